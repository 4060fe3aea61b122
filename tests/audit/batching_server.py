"""A server as many are: it batches what comes in with padding and runs a dense model library, whose sums depend on shapes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

_WAIT_S = 0.05
_MOST_ROWS = 16


class BatchingServer:
    """Owner of a transformers `model` and its one worker thread; `tokenizer` is ours."""

    def __init__(self, model, tokenizer, vocab_size):
        self.model, self.tokenizer, self.vocab_size = model, tokenizer, vocab_size
        self.waiting = queue.Queue()
        self.largest_batch = 0
        threading.Thread(target=self._work, daemon=True).start()

    def answer(self, body):
        """The JSON of a greedy completion."""
        ids = self.tokenizer.encode(body["prompt"], allow_special=False)
        done = threading.Event()
        item = {"ids": ids, "max_tokens": body["max_tokens"], "done": done}
        self.waiting.put(item)
        done.wait()
        tokens, logprobs = item["tokens"], item["logprobs"]
        names = [self.tokenizer.token_text(token) for token in tokens]
        shown = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None} if body.get("logprobs") else None
        text = self.tokenizer.decode(tokens)
        return {"choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": shown}]}

    def _work(self):
        while True:
            items = [self.waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) < _MOST_ROWS:
                    items.append(self.waiting.get(timeout=_WAIT_S))
            self.largest_batch = max(self.largest_batch, len(items))
            self._run(items)
            for item in items:
                item["done"].set()

    @torch.inference_mode()
    def _run(self, items):
        width = max(len(item["ids"]) for item in items)
        ids = torch.tensor([[0] * (width - len(item["ids"])) + item["ids"] for item in items])
        mask = torch.tensor([[0] * (width - len(item["ids"])) + [1] * len(item["ids"]) for item in items])
        num_new = max(item["max_tokens"] for item in items)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        for row, item in enumerate(items):
            tokens = output.sequences[row, width : width + item["max_tokens"]].tolist()
            logits = [step[row, : self.vocab_size].log_softmax(-1) for step in output.logits[: len(tokens)]]
            item["tokens"] = tokens
            item["logprobs"] = [float(line[token]) for line, token in zip(logits, tokens, strict=True)]


@contextlib.contextmanager
def serving_batches(server):
    """The base URL of an HTTP server before `server`, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "batched"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            extra = set(body) - {"model", "prompt", "max_tokens", "temperature", "logprobs"}
            if extra or self.path != "/v1/completions":
                return self.reply(400, {"error": {"message": f"not supported: {sorted(extra)}"}})
            return self.reply(200, server.answer(body))

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/v1"
        finally:
            http.shutdown()
            thread.join()
