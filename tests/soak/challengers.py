"""Defective challengers as a package of third-party engines: one gives wrong answers, one is slow, one dies at once.

The conversion of a fourth one never ends.

The first two are llama.cpp behind a small proxy, so that everything else works.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = "bedplate_challengers"
NAMES = ("wrong", "slow", "dying", "converting")

ENGINES = """\
from pathlib import Path

from bedplate.engines.llama_cpp import LlamaCpp
from bedplate.values import Launch, Plan, Preparation, replace_fields

FRONT = str(Path(__file__).with_name("front.py"))


class Wrong(LlamaCpp):
    id = "wrong"
    name = "Wrong"

    def launch(self, plan: Plan, port: int) -> Launch:
        real = super().launch(plan, port)
        return replace_fields(real, argv=("python", FRONT, self.id, str(port), *real.argv[1:]))


class Slow(Wrong):
    id = "slow"
    name = "Slow"


class Dying(LlamaCpp):
    id = "dying"
    name = "Dying"

    def launch(self, plan: Plan, port: int) -> Launch:
        real = super().launch(plan, port)
        return replace_fields(real, argv=("python", "-c", "print('no good'); raise SystemExit(3)"))


class Converting(LlamaCpp):
    id = "converting"
    name = "Converting"

    def launch(self, plan: Plan, port: int) -> Launch:
        real = super().launch(plan, port)
        endless = ("python", "-c", "import time; time.sleep(3600)  # conversion")
        step = Preparation(kind="convert", what="the weights", where="never", argv=endless)
        return replace_fields(real, prepare=(*real.prepare, step))


WRONG, SLOW, DYING, CONVERTING = Wrong(), Slow(), Dying(), Converting()
"""

FRONT = '''\
"""A proxy in front of a real server: `wrong` replaces the words of answers, `slow` delays each event of a stream."""
import http.client
import http.server
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

mode, port, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
PAUSE_S = {pause_s}
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    inner = probe.getsockname()[1]
words[words.index("--port") + 1] = str(inner)
here = Path(sys.executable).parent
server = subprocess.Popen([sys.executable, "-I", str(here / "llama-server"), *words])


def garbled(value):
    if isinstance(value, dict):
        return {{key: "banana" if key in ("text", "content") and isinstance(one, str) and one else garbled(one)
                for key, one in value.items()}}
    return [garbled(one) for one in value] if isinstance(value, list) else value


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.forward("GET", b"")

    def do_POST(self):
        self.forward("POST", self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, method, body):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", inner, timeout=600)
            connection.request(method, self.path, body, {{
                "Content-Type": "application/json", "Authorization": self.headers.get("Authorization", "")}})
            answer = connection.getresponse()
        except OSError:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(answer.status)
        kind = answer.headers.get("Content-Type", "application/json")
        self.send_header("Content-Type", kind)
        if "event-stream" not in kind:
            body = answer.read()
            if mode == "wrong" and method == "POST":
                body = json.dumps(garbled(json.loads(body))).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Connection", "close")
        self.end_headers()
        for line in answer:
            if mode == "slow" and line.startswith(b"data: {{"):
                time.sleep(PAUSE_S)
            if mode == "wrong" and line.startswith(b"data: {{"):
                line = b"data: " + json.dumps(garbled(json.loads(line[6:]))).encode() + b"\\n"
            self.wfile.write(line)
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


Server(("127.0.0.1", port), Handler).serve_forever()
'''


def installed(folder: Path, *, pause_s: float) -> Path:
    """Writes the package as installed into `folder`, for PYTHONPATH. `slow` waits `pause_s` before each event."""
    metadata = folder / f"{PACKAGE}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{PACKAGE}.py").write_text(ENGINES)
    (folder / "front.py").write_text(FRONT.format(pause_s=pause_s))
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 1.0\n")
    points = "".join(f"{name} = {PACKAGE}:{name.upper()}\n" for name in NAMES)
    (metadata / "entry_points.txt").write_text(f"[bedplate.engines]\n{points}")
    return folder
