"""The supervisor gives each start a key that only this user can read, and stops an engine that does not ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.run.test_supervisor import HEALTHY, Fake, Recorder, expect_failure, make_fake_environment, supervise

from bedplate.engines import PrivatePort
from bedplate.run.supervisor import Supervisor

OTHER_SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    line = server.accept()[0]
    line.recv(65536)
    line.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    line.close()
"""


class WrappedFake(Fake):
    key_variable = "FAKE_KEY"
    private_port = PrivatePort(key_checked_by="wrapper", source="made up")


async def ask(backend: Recorder, headers: Mapping[str, str]) -> int:
    assert backend.address is not None
    host, port = backend.address
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/v1", headers=headers) as answer:
        return answer.status


def test_wrapped_engine_needs_the_key_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", "of the user's other servers")
    keys = []

    async def then(one: Supervisor, backend: Recorder) -> None:
        await one.wait_for_start()
        assert one.process is not None and one.process.pid is not None
        for tree in range(2):
            key = backend.engine_key
            assert key is not None and len(key) >= 43
            keys.append(key)
            assert await ask(backend, {}) == 401
            assert await ask(backend, {"Authorization": "Bearer of the user's other servers"}) == 401
            assert await ask(backend, {"Authorization": f"Bearer {key}"}) == 200
            for process in psutil.Process().children(recursive=True):
                assert key not in " ".join(process.cmdline())
            assert "FAKE_KEY" not in psutil.Process(one.process.pid).environ()
            if not tree:
                one.process.kill()
                await asyncio.wait_for(_wait_for_restart(backend), 60)

    supervise(make_fake_environment(tmp_path / "env", HEALTHY), tmp_path / "log", then, kind=WrappedFake())
    assert keys[0] != keys[1]
    assert not any(key in (tmp_path / "log").read_text() for key in keys)


async def _wait_for_restart(backend: Recorder) -> None:
    while backend.states[-2:] != ["restarting", "ready"]:
        await asyncio.sleep(0.02)


def test_engine_that_answers_without_the_key_is_stopped(tmp_path: Path) -> None:
    async def then(one: Supervisor, backend: Recorder) -> None:
        error = await expect_failure(one)
        assert error.message == "Fake 1 was stopped: its private port answered without the key"
        assert one.process is not None and one.process.ended.is_set() and backend.address is None

    backend = supervise(
        make_fake_environment(tmp_path / "env", OTHER_SERVER), tmp_path / "log", then, kind=WrappedFake()
    )
    assert "ready" not in backend.states
