"""A server that streams what a test wants it to: words, with or without usage, or something else than an answer."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeOpenAI:
    """`respond(number, path, body)` gives the data of events, (status, JSON), or bytes that are sent as they are."""

    def __init__(self, respond=None):
        self.respond = respond or (lambda *request: events(request[-1]))
        self.bodies, self.paths, self.headers = [], [], []
        self.lock = threading.Lock()

    def measured(self):
        """The bodies after calibration and warm-up."""
        return self.bodies[7:]


def events(body, usage=True, num_tokens=None, per_event=1):
    """An answer of full length, `per_event` tokens at a time."""
    count = num_tokens or body.get("max_tokens") or body["max_completion_tokens"]
    prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
    for start in range(0, count, per_event):
        text = " word" * min(per_event, count - start)
        choice = {"text": text} if "prompt" in body else {"delta": {"content": text}}
        yield json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]})
    if usage:
        told = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
        yield json.dumps({"choices": [], "usage": {**told, "prompt_tokens_details": {"cached_tokens": 3}}})
    yield "[DONE]"


class Handler(BaseHTTPRequestHandler):
    fake: FakeOpenAI
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = {"/v1/models": {"data": [{"id": "fake-model"}]}, "/version": {"version": "9.9"}}
        self.reply(200 if self.path in known else 404, known.get(self.path, {"detail": "Not Found"}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.fake.lock:
            number = len(self.fake.bodies)
            self.fake.bodies.append(body)
            self.fake.paths.append(self.path)
            self.fake.headers.append(dict(self.headers))
        answer = self.fake.respond(number, self.path, body)
        with contextlib.suppress(OSError):  # the client may have gone
            if isinstance(answer, bytes):
                self.wfile.write(answer)
            elif isinstance(answer, tuple):
                self.reply(*answer)
            else:
                self.stream(answer)
        self.close_connection = True

    def stream(self, answer):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in answer:
            part = f": a comment\n\ndata: {data}\n\n".encode()
            # In two pieces, so that a line may be cut anywhere.
            for piece in (part[:20], part[20:]):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
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
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
