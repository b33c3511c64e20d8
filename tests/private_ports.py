"""Checks that a running engine's private port is closed to everybody who does not have its key."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.conftest import HANG_S

from bedplate.engines import Engine

PATHS = (
    "/", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses",
    "/health", "/health_generate", "/v1/health", "/metrics", "/metrics/", "/invocations", "/ping", "/version", "/load",
    "/tokenize", "/detokenize", "/generate", "/classify", "/flush_cache", "/shutdown", "/get_server_info", "/reset",
    "/load_model", "/slots", "/props", "/docs", "/openapi.json", "/models", "/api/tags", "//v1/models", "/V1/models",
    "/nothing",
)  # fmt: skip
"""Paths that engines serve, in any version, and some that none does."""


@dataclass(frozen=True)
class PrivatePort:
    port: int
    key: str
    processes: tuple[psutil.Process, ...]

    def ask(self, method: str, path: str, key: str | None = None, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {**headers, "Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")


def find_private_port(processes: Iterable[psutil.Process], engine: Engine) -> PrivatePort:
    """The port and the key by the engine's process, as only its user can read them."""
    variable, found = engine.private_key_variable, tuple(processes)
    assert variable is not None
    for process in found:
        if key := process.environ().get(variable):
            words = process.cmdline()
            return PrivatePort(int(words[words.index("--port") + 1]), key, found)
    raise AssertionError(f"no process of {engine.name} has {variable}")


def check_closed(at: PrivatePort, engine: Engine) -> None:
    """Without the key every path is refused, except those that the engine's file states; with it they answer."""
    assert engine.private_port is not None
    stated, body = engine.private_port.open_paths, {"model": "x", "prompt": "x", "messages": []}
    answered = {
        (method, path, key): status
        for path in PATHS
        for key in (None, "wrong", at.key[:-1], f"{at.key}x")
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD")
        if (status := at.ask(method, path, key, body if method == "POST" else None)[0]) != 401
    }
    assert {path for _, path, _ in answered} <= set(stated), answered
    assert at.ask("GET", "/nothing", at.key)[0] != 401
    assert at.ask("POST", "/v1/completions", at.key, {})[0] != 401


def check_key_is_hidden(at: PrivatePort, logs: Iterable[Path]) -> None:
    """No process of the tree shows the key in its arguments, and no log contains it."""
    for process in at.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert at.key not in " ".join(process.cmdline())
    files = list(logs)
    assert files
    for log in files:
        assert at.key not in log.read_text(errors="replace")


def check_sockets(at: PrivatePort) -> None:
    """The processes listen on nothing but loopback, and on Unix sockets that other users cannot open."""
    for process in at.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}, listening
            paths = [Path(str(one.laddr)) for one in process.net_connections("unix") if one.laddr]
            assert [path for path in paths if path.is_socket() and path.stat().st_mode & 0o022] == []


def check_private_port(processes: Iterable[psutil.Process], engine: Engine, logs: Iterable[Path]) -> PrivatePort:
    """All of the above for a running engine, given the processes of its service and the logs."""
    at = find_private_port(processes, engine)
    check_closed(at, engine)
    check_key_is_hidden(at, logs)
    check_sockets(at)
    return at
