"""The server of a made-up engine: each token is a word, and `--lanes` limits concurrent requests."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.name, self.lanes = options.name, threading.Semaphore(options.lanes)
        self.running = self.waiting = 0
        self.counting = threading.Lock()

    def count(self, running: int, waiting: int) -> None:
        with self.counting:
            self.running += running
            self.waiting += waiting


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send("application/json", "{}")
        elif self.path == "/v1/models":
            self._send("application/json", json.dumps({"object": "list", "data": [{"id": self.server.name}]}))
        elif self.path == "/metrics":
            self._send("text/plain", f"warp_running {self.server.running}\nwarp_waiting {self.server.waiting}\n")
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = os.environ.get("WARP_KEY")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.send_error(401)
        elif self.path != "/v1/completions":
            self.send_error(404)
        else:
            self.server.count(0, 1)
            with self.server.lanes:
                self.server.count(1, -1)
                self._answer(asked)
                self.server.count(-1, 0)

    def _answer(self, asked: dict[str, Any]) -> None:
        count = int(asked.get("max_tokens", 16))
        usage = {"prompt_tokens": len(str(asked["prompt"]).split()), "completion_tokens": count}
        if not asked.get("stream"):
            choice = {"index": 0, "text": " word" * count, "finish_reason": "length"}
            self._send("application/json", json.dumps({"choices": [choice], "usage": usage}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for index in range(count):
            end = "length" if index == count - 1 else None
            self._event({"choices": [{"index": 0, "text": " word", "finish_reason": end}]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="warp-serve")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", default="warp")
    parser.add_argument("--lanes", type=int, default=2)
    server = Server(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()
