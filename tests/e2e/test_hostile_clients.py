"""Hostile clients of a real endpoint with the real engine: connections, logs, foreign names and lost keys."""

from __future__ import annotations

import json
import resource
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.conftest import HANG_S, Served

from bedplate.run.log_text import BURST_BYTES, BYTES_PER_REQUEST, BYTES_PER_S

FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
SMALL = ("--context", "512", "--concurrency", "1", "--name", "door")
CLIENT_TEXT = "CLIENT TEXT \x1b[31m\n# forged line\n" * 20_000


def ask(served: Served, path: str = "/v1/chat/completions", **more: object) -> tuple[int, bytes]:
    headers = {"content-type": "application/json"}
    for name in ("host", "origin", "authorization"):
        if name in more:
            headers[name] = str(more.pop(name))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    data = json.dumps(body).encode() if path.endswith("completions") else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(served.root + path, data, headers), timeout=HANG_S
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def few_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python limits itself to 64 open files when it starts, as after `ulimit -n 64`."""
    folder = tmp_path_factory.mktemp("few-files")
    (folder / "sitecustomize.py").write_text(FEW_FILES)
    return {"PYTHONPATH": str(folder)}


def test_hostile_clients_without_keys(own_home: Path, few_files: dict[str, str], serve: Callable[..., Served]) -> None:
    served = serve(*SMALL, env=few_files)
    assert resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE) == (64, 64)
    address = ("127.0.0.1", int(served.root.rpartition(":")[2]))
    idle = [socket.create_connection(address, HANG_S) for _ in range(100)]
    try:
        assert ask(served, "/health")[0] == 200
        assert ask(served)[0] == 200
    finally:
        for pipe in idle:
            pipe.close()
    for foreign in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert ask(served, **foreign)[0] == 403 and ask(served, "/v1/models", **foreign)[0] == 403

    (log,) = (own_home / "logs").glob("door@*.log")
    began, size = log.stat().st_mtime, log.stat().st_size
    for _ in range(5):
        assert ask(served, grammar=CLIENT_TEXT)[0] == 400
    took_s = log.stat().st_mtime - began
    assert log.stat().st_size - size < BURST_BYTES + 5 * (BYTES_PER_REQUEST + 200) + BYTES_PER_S * (took_s + 1)
    text = log.read_text()
    assert "\x1b" not in text and "\n# forged line" not in text and "lines left out" in text
    assert ask(served)[0] == 200

    assert [stat.S_IMODE(path.stat().st_mode) for path in (own_home, log.parent, log)] == [0o700, 0o700, 0o600]


def test_endpoint_stays_closed_when_its_store_is_gone(own_home: Path, serve: Callable[..., Served]) -> None:
    key = invoke("keys", "add", "alice").out.strip()
    for file in own_home.glob("store.sqlite*"):
        file.rename(file.with_name(f"away-{file.name}"))
    served = serve(*SMALL)
    assert served.endpoint["needs_key"] and "bedplate keys open" in "".join(served.stderr)
    for given in ({}, {"authorization": f"Bearer {key}"}):
        assert ask(served, **given)[0] == 401
    status, body = ask(served, "/health")
    assert status == 200 and json.loads(body)["models"] == {}
