"""A second process asks a running host: answers, notes on the way, refusals, and those who misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S

from bedplate.errors import AnswerIsNo, BadQuestion, OutsideFailed
from bedplate.hosting.control import ControlServer, Nothing, Operation, ask
from bedplate.hosting.records import short_socket_path
from bedplate.values.record import Record
from bedplate.values.service import ServiceRecord


class Add(Record, frozen=True, kw_only=True):
    a: int
    b: int = 1


class Sum(Record, frozen=True, kw_only=True):
    total: int


class HostStub:
    """All that the control socket itself needs of a host."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.cancelled = asyncio.Event()
        self.went_on = asyncio.Event()
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)


async def add(host: Any, asked: Add, tell: Callable[[str], None]) -> Sum:
    tell("adding")
    return Sum(total=asked.a + asked.b)


async def refuse(host: Any, asked: Nothing, tell: Callable[[str], None]) -> None:
    raise AnswerIsNo("no", cause="because", hint="perhaps")


async def break_down(host: Any, asked: Nothing, tell: Callable[[str], None]) -> None:
    raise ValueError("a mistake")


async def take_long(host: Any, asked: Nothing, tell: Callable[[str], None]) -> None:
    host.begun.set()
    try:
        await host.go.wait()
        host.went_on.set()
    except asyncio.CancelledError:
        host.cancelled.set()
        raise


OPERATIONS = {
    "add": Operation(Add, add),
    "refuse": Operation(Nothing, refuse),
    "break": Operation(Nothing, break_down),
    "long": Operation(Nothing, take_long),
    "lasting": Operation(Nothing, take_long, goes_on=True),
}


def record_at(path: Path) -> ServiceRecord:
    return ServiceRecord(
        name="chat",
        pid=os.getpid(),
        birth="b",
        socket=str(path),
        log="",
        version="1",
        started_at="2026-01-01",
        state="ready",
    )


def serving(folder: Path, then: Callable[[HostStub, ServiceRecord], Awaitable[None]]) -> HostStub:
    async def run() -> HostStub:
        host = HostStub()
        server = ControlServer(host, OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(folder / "run" / "chat.sock", "chat")
        async with asyncio.timeout(HANG_S):
            await then(host, record_at(path))
        await server.stop()
        assert not path.exists()
        return host

    return asyncio.run(run())


async def asked_in_a_thread(record: ServiceRecord, do: str, arguments: Record | None = None, **more: Any) -> Any:
    return await asyncio.to_thread(lambda: ask(record, do, arguments, **{"answer": Sum, **more}))


def test_an_answer_and_what_was_told_on_the_way(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        assert Path(record.socket).stat().st_mode & 0o777 == 0o600
        assert Path(record.socket).parent.stat().st_mode & 0o777 == 0o700
        told: list[str] = []
        found = await asked_in_a_thread(record, "add", Add(a=2), answer=Sum, tell=told.append)
        assert found == Sum(total=3) and told == ["adding"]

    serving(tmp_path, then)


def test_what_the_host_refuses_is_raised_here(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        with pytest.raises(AnswerIsNo) as caught:
            await asked_in_a_thread(record, "refuse", answer=Sum)
        assert (caught.value.message, caught.value.cause, caught.value.hint) == ("no", "because", "perhaps")
        with pytest.raises(BadQuestion, match="has no operation 'fly'"):
            await asked_in_a_thread(record, "fly", answer=Sum)
        with pytest.raises(BadQuestion, match="missing required field `a`"):
            await asked_in_a_thread(record, "add", answer=Sum)

    serving(tmp_path, then)


def test_a_mistake_of_the_hosts_own_is_told_and_noted(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        with pytest.raises(OutsideFailed, match="a mistake"):
            await asked_in_a_thread(record, "break", answer=Sum)
        assert "a mistake" in host.said[0]
        assert (await asked_in_a_thread(record, "add", Add(a=1), answer=Sum)).total == 2

    serving(tmp_path, then)


@pytest.mark.parametrize("do", ["long", "lasting"])
def test_who_hangs_up_ends_what_was_asked_unless_it_is_to_go_on(tmp_path: Path, do: str) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        _, writer = await asyncio.open_unix_connection(record.socket)
        writer.write(json.dumps({"do": do}).encode() + b"\n")
        await host.begun.wait()
        writer.close()
        if do == "long":
            await host.cancelled.wait()
        else:
            # The server sees the end of the connection before the next one, which comes later.
            await asked_in_a_thread(record, "add", Add(a=1), answer=Sum)
            host.go.set()
            await host.went_on.wait()

    serving(tmp_path, then)


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[]\n", b"1\n", b'{"do": 1}\n', b'{"do": []}\n', b"\xff\xfe\n", b"{" * 9]
)
def test_nonsense_is_answered_and_disturbs_nobody(tmp_path: Path, line: bytes) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        reader, writer = await asyncio.open_unix_connection(record.socket)
        writer.write(line)
        writer.write_eof()
        answer = await reader.read()
        assert b'"error"' in answer if line.endswith(b"\n") else answer == b""
        writer.close()
        assert (await asked_in_a_thread(record, "add", Add(a=1), answer=Sum)).total == 2
        assert not host.said

    serving(tmp_path, then)


@pytest.mark.parametrize("do", ["long", "lasting"])
def test_the_end_of_the_host_is_told_to_those_who_wait(tmp_path: Path, do: str) -> None:
    async def run() -> None:
        host = HostStub()
        server = ControlServer(host, OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(tmp_path / "chat.sock", "chat")
        waiting = asyncio.create_task(asked_in_a_thread(record_at(path), do, answer=Sum))
        await host.begun.wait()
        await server.stop()
        with pytest.raises(OutsideFailed, match="is stopping"):
            await waiting
        await asyncio.wait_for(host.cancelled.wait(), HANG_S)

    asyncio.run(run())


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(OutsideFailed, match="does not answer") as caught:
        ask(record_at(tmp_path / "none.sock"), "add", answer=Sum)
    assert "bedplate stop chat" in str(caught.value.hint)


def test_a_host_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(OutsideFailed, match="does not answer"):
            ask(record_at(tmp_path / "s"), "add", answer=Sum, limit_s=0.1)


def test_a_file_system_without_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some mounts do: here it is a path that is too long for the kernel."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def run() -> None:
        server = ControlServer(HostStub(), OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(tmp_path / ("x" * 120) / "chat.sock", "chat")
        assert path == short_socket_path("chat") and path.is_socket()
        await server.stop()

    asyncio.run(run())
