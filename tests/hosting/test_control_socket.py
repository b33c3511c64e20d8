"""The control socket: answers, notes, errors, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.conftest import HANG_S

from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.hosting.control import ControlServer, NoArguments, Operation, ask
from bedplate.hosting.records import get_short_socket_path
from bedplate.values.record import Record
from bedplate.values.service import ServiceRecord


class Add(Record, frozen=True, kw_only=True):
    a: int
    b: int = 1


class Sum(Record, frozen=True, kw_only=True):
    total: int


class HostStub:
    """The part of a host that the control socket needs."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.cancelled = asyncio.Event()
        self.went_on = asyncio.Event()
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.end = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)


async def add(host: Any, asked: Add, tell: Callable[[str], None]) -> Sum:
    tell("adding")
    return Sum(total=asked.a + asked.b)


async def refuse(host: Any, asked: NoArguments, tell: Callable[[str], None]) -> None:
    raise NotPossible("no", cause="because", hint="perhaps")


async def break_down(host: Any, asked: NoArguments, tell: Callable[[str], None]) -> None:
    raise ValueError("a mistake")


async def take_long(host: Any, asked: NoArguments, tell: Callable[[str], None]) -> None:
    host.begun.set()
    try:
        await host.go.wait()
        tell("going on")
        host.went_on.set()
        await host.end.wait()
    except asyncio.CancelledError:
        host.cancelled.set()
        raise


OPERATIONS = {
    "add": Operation(Add, add),
    "refuse": Operation(NoArguments, refuse),
    "break": Operation(NoArguments, break_down),
    "long": Operation(NoArguments, take_long),
    "lasting": Operation(NoArguments, take_long, goes_on=True),
}


def make_record(path: Path) -> ServiceRecord:
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


def run_server(
    folder: Path,
    then: Callable[[HostStub, ServiceRecord], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> HostStub:
    """What the loop would print as a traceback fails the test."""
    printed: list[dict[str, Any]] = []

    async def run() -> HostStub:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        host = HostStub()
        server = ControlServer(host, OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(folder / "run" / "chat.sock", "chat")
        async with asyncio.timeout(HANG_S):
            await then(host, make_record(path))
        await server.stop()
        assert not path.exists()
        return host

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        host = runner.run(run())
    assert printed == []
    return host


async def ask_in_thread(record: ServiceRecord, do: str, arguments: Record | None = None, **more: Any) -> Any:
    return await asyncio.to_thread(lambda: ask(record, do, arguments, **{"answer": Sum, **more}))


def test_client_gets_notes_and_the_answer(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        assert Path(record.socket).stat().st_mode & 0o777 == 0o600
        assert Path(record.socket).parent.stat().st_mode & 0o777 == 0o700
        told: list[str] = []
        found = await ask_in_thread(record, "add", Add(a=2), answer=Sum, tell=told.append)
        assert found == Sum(total=3) and told == ["adding"]

    run_server(tmp_path, then)


def test_errors_of_the_host_are_raised_at_the_client(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        with pytest.raises(NotPossible) as caught:
            await ask_in_thread(record, "refuse", answer=Sum)
        assert (caught.value.message, caught.value.cause, caught.value.hint) == ("no", "because", "perhaps")
        with pytest.raises(UsageError, match="has no operation 'fly'"):
            await ask_in_thread(record, "fly", answer=Sum)
        with pytest.raises(UsageError, match="missing required field `a`"):
            await ask_in_thread(record, "add", answer=Sum)

    run_server(tmp_path, then)


def test_unexpected_exception_is_reported_and_logged(tmp_path: Path) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        with pytest.raises(ExternalFailure, match="a mistake"):
            await ask_in_thread(record, "break", answer=Sum)
        assert "a mistake" in host.said[0]
        assert (await ask_in_thread(record, "add", Add(a=1), answer=Sum)).total == 2

    run_server(tmp_path, then)


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop])
@pytest.mark.parametrize("do", ["long", "lasting"])
def test_disconnect_cancels_an_operation_unless_it_goes_on(
    tmp_path: Path, do: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        _, writer = await asyncio.open_unix_connection(record.socket)
        writer.write(json.dumps({"do": do}).encode() + b"\n")
        await host.begun.wait()
        writer.close()
        if do == "long":
            await host.cancelled.wait()
        else:
            # The server sees the end of this connection before the next connection.
            await ask_in_thread(record, "add", Add(a=1), answer=Sum)
            host.go.set()
            await host.went_on.wait()
            # Its note has closed the connection when the next one is answered.
            await ask_in_thread(record, "add", Add(a=1), answer=Sum)
            host.end.set()

    run_server(tmp_path, then, loop_factory)


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[]\n", b"1\n", b'{"do": 1}\n', b'{"do": []}\n', b"\xff\xfe\n", b"{" * 9]
)
def test_malformed_request_gets_an_error(tmp_path: Path, line: bytes) -> None:
    async def then(host: HostStub, record: ServiceRecord) -> None:
        reader, writer = await asyncio.open_unix_connection(record.socket)
        writer.write(line)
        writer.write_eof()
        answer = await reader.read()
        assert b'"error"' in answer if line.endswith(b"\n") else answer == b""
        writer.close()
        assert (await ask_in_thread(record, "add", Add(a=1), answer=Sum)).total == 2
        assert not host.said

    run_server(tmp_path, then)


@pytest.mark.parametrize("do", ["long", "lasting"])
def test_waiting_clients_are_told_when_the_host_stops(tmp_path: Path, do: str) -> None:
    printed: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        host = HostStub()
        server = ControlServer(host, OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(tmp_path / "chat.sock", "chat")
        waiting = asyncio.create_task(ask_in_thread(make_record(path), do, answer=Sum))
        await host.begun.wait()
        await server.stop()
        with pytest.raises(ExternalFailure, match="is stopping"):
            await waiting
        await asyncio.wait_for(host.cancelled.wait(), HANG_S)

    asyncio.run(run())
    assert printed == []  # asyncio would print a traceback


def test_missing_socket_is_an_external_failure(tmp_path: Path) -> None:
    with pytest.raises(ExternalFailure, match="does not answer") as caught:
        ask(make_record(tmp_path / "none.sock"), "add", answer=Sum)
    assert "bedplate stop chat" in str(caught.value.hint)


def test_client_times_out_if_the_host_is_silent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(ExternalFailure, match="does not answer"):
            ask(make_record(tmp_path / "s"), "add", answer=Sum, limit_s=0.1)


def test_falls_back_to_a_short_socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is too long for the kernel, which fails like a file system without sockets."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def run() -> None:
        server = ControlServer(HostStub(), OPERATIONS)  # type: ignore[arg-type]
        path = await server.start(tmp_path / ("x" * 120) / "chat.sock", "chat")
        assert path == get_short_socket_path("chat") and path.is_socket()
        await server.stop()

    asyncio.run(run())
