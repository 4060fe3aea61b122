"""A small OpenAI-compatible server whose model is a hash of the tokens before, with faults and gaps that can be switched on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FEATURES = frozenset(
    {"completions", "chat", "logprobs", "seed", "streaming", "echo", "token_ids", "cache_salt", "ignore_eos", "usage"}
)


class FakeServer:
    """`faults` break promises: repeat, batch, warm, echo, abort, stream, seed. `lacks` are FEATURES it has not."""

    def __init__(self, faults=(), lacks=(), key=None, busy=0):
        self.faults, self.has, self.key, self.busy = set(faults), FEATURES - set(lacks), key, busy
        self.bodies = []
        self.times = []
        self.lock = threading.Lock()
        self.open = []
        self.count = 0
        self.aborted = False
        self.streams_ended = threading.Event()
        self.streams_ended.set()
        self.seen = set()

    def answer(self, path, body, has_company):
        """Status and the JSON of an answer; its choice is in the shape of `path`."""
        kind = "completions" if path == "/v1/completions" else "chat"
        if kind not in self.has:
            return 404, {"error": {"message": "no such path"}}
        known = {"seed": "seed", "echo": "echo", "cache_salt": "cache_salt", "ignore_eos": "ignore_eos"}
        wanted = {known[name] for name in known if name in body}
        if wanted - self.has:
            return 400, {"error": {"message": f"not supported: {wanted - self.has}"}}
        prompt = body["prompt"] if kind == "completions" else json.dumps(body["messages"])
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        salt = body.get("cache_salt")
        with self.lock:
            self.count += 1
            is_warm = (salt, tuple(ids)) in self.seen
            self.seen.add((salt, tuple(ids)))
        tokens = self.generate(ids, body, has_company, is_warm=is_warm)
        return 200, self.body(kind, body, ids, tokens, is_warm)

    def generate(self, ids, body, has_company, *, is_warm):
        """(id, logprob) of each token of prompt and answer."""
        extra = []
        if "batch" in self.faults and has_company.is_set():
            extra.append("batch")
        if "warm" in self.faults and is_warm:
            extra.append("warm")
        if "repeat" in self.faults:
            extra.append(self.count)
        if "abort" in self.faults and self.aborted:
            extra.append("abort")
        seed = body.get("seed") if body["temperature"] and "seed" not in self.faults else None
        found = [(token, logprob_of(ids[:n], token) if body.get("echo") else 0.0) for n, token in enumerate(ids)]
        if "echo" in self.faults:
            found = [(token, logprob + 2**-20) for token, logprob in found]
        sequence = list(ids)
        for n in range(body["max_tokens"]):
            token = 97 + word(sequence, seed) % 26
            logprob = logprob_of(sequence, token)
            # A fault shows first in a logprob and then in a token, as a sum in another order does.
            if extra and n == 2:
                logprob += (1 + word([], extra) % 5) * 2**-30
            if extra and n == 5:
                token = 97 + (token - 96 + word(sequence, extra) % 25) % 26
            found.append((token, logprob))
            sequence.append(token)
        return found

    def body(self, kind, body, ids, tokens, is_warm):
        drawn = tokens if body.get("echo") else tokens[len(ids) :]
        text = bytes(token for token, _ in drawn).decode()
        if "stream" in self.faults and body.get("stream"):
            text = text[:-1] + "?"
        choice = {"index": 0, "finish_reason": "length"}
        names = [chr(token) for token, _ in drawn]
        if "logprobs" in self.has and body.get("logprobs"):
            values = [logprob for _, logprob in drawn]
            choice["logprobs"] = (
                {
                    "tokens": names,
                    "token_logprobs": values,
                    "top_logprobs": [{n: v} for n, v in zip(names, values, strict=True)],
                }
                if kind == "completions"
                else {
                    "content": [
                        {"token": n, "logprob": v, "top_logprobs": []} for n, v in zip(names, values, strict=True)
                    ]
                }
            )
        if "token_ids" in self.has and body.get("return_token_ids"):
            choice |= {"token_ids": [token for token, _ in tokens[len(ids) :]], "prompt_token_ids": ids}
        choice |= {"text": text} if kind == "completions" else {"message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": len(ids) - 1 if is_warm else 0}}
        return {"choices": [choice], "system_fingerprint": "fp_fake"} | (
            {"usage": usage} if "usage" in self.has else {}
        )


def word(sequence, extra):
    return int.from_bytes(hashlib.blake2b(bytes(sequence), key=repr(extra).encode()[:64], digest_size=6).digest())


def logprob_of(before, token):
    return -(word(before, token) % 1000) / 256


def pieces(body):
    """An answer in three events; logprobs come with the first one."""
    (choice,) = body["choices"]
    text = choice.pop("text", None)
    key, text = ("text", text) if text is not None else ("delta", choice.pop("message")["content"])
    for part, rest in ((text[:1], choice), (text[1:3], {}), (text[3:], {})):
        yield {"choices": [{"index": 0, **rest, key: part if key == "text" else {"content": part}}]}


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self):
        self.reply(200, {"data": [{"id": "fake"}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.bodies.append(body)
        if fake.key and self.headers["Authorization"] != f"Bearer {fake.key}":
            return self.reply(401, {"error": {"message": "who are you"}})
        with fake.lock:
            has_company = threading.Event()
            fake.open.append(has_company)
            for visit in fake.open if len(fake.open) > 1 else ():
                visit.set()
            fake.times.append(time.monotonic())
            fake.busy -= 1
            is_busy = fake.busy >= 0
        try:
            self.fake.streams_ended.wait(5)
            time.sleep(0.001 if "batch" not in fake.faults else 0.02)
            status, answer = (
                (503, {"error": {"message": "later"}}) if is_busy else fake.answer(self.path, body, has_company)
            )
        finally:
            with fake.lock:
                fake.open.remove(has_company)
        if status == 200 and body.get("stream"):
            return self.stream(answer) if "streaming" in fake.has else self.reply(400, {"error": {"message": "no"}})
        return self.reply(status, answer)

    def stream(self, answer):
        self.fake.streams_ended.clear()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for piece in pieces(answer):
                self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
                self.wfile.flush()
            for _ in range(40 if "abort" in self.fake.faults else 0):
                time.sleep(0.002)
                self.wfile.write(b": nothing yet\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            self.wfile.flush()
        except OSError:
            self.fake.aborted = True
        finally:
            self.fake.streams_ended.set()

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(fake):
    """The base URL of a server that runs until the end of the block."""
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
