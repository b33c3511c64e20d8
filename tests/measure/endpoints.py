"""A scripted completions or chat endpoint over real HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str], tuple[int, Any]]
"""Maps a prompt to the status and the body; a body of bytes is sent unchanged."""
ChatScript = Callable[[dict[str, Any]], tuple[int, Any]]
"""Maps the body of a request to the same."""


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


def serve_script(script: Script) -> contextlib.AbstractContextManager[Scripted]:
    return _serve("/v1/completions", lambda body: script(body["prompt"]))


def serve_chat(script: ChatScript) -> contextlib.AbstractContextManager[Scripted]:
    return _serve("/v1/chat/completions", script)


@contextlib.contextmanager
def _serve(path: str, script: ChatScript) -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.bodies.append(body)
            endpoint.keys.add(self.headers.get("Authorization"))
            status, answer = script(body) if self.path == path else (404, {})
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
