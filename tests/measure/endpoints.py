"""A scripted completions endpoint over real HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str], tuple[int, Any]]
"""Maps a prompt to the status and the body; a body of bytes is sent unchanged."""


def make_completion(text: str, *, finish: str = "length", prompt_tokens: int | None = None, made: int = 1) -> Any:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": made}
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": finish}],
        "usage": usage if prompt_tokens is not None else None,
    }


class Scripted:
    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()


@contextlib.contextmanager
def serve_script(script: Script) -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.bodies.append(body)
            endpoint.keys.add(self.headers.get("Authorization"))
            status, answer = script(body["prompt"]) if self.path == "/v1/completions" else (404, {})
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = Scripted(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
