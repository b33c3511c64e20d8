"""How a second process asks a running host for something: a line of JSON each way, on a socket of this user's alone.

Asked: {"do": "stop", "with": {"drain_s": 30}}. Answered: any number of {"note": "…"}, then {"done": …} or {"error": …}.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bedplate.errors import AnswerIsNo, BadQuestion, BedplateError, OutsideFailed
from bedplate.home import disk_failure
from bedplate.hosting.records import private_folder, short_socket_path
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.host import Host
    from bedplate.values.service import ServiceRecord

MOST_BYTES = 8 << 20
ASK_LIMIT_S = 10.0
"""To hear what is wanted; whoever connects and says nothing is not waited for."""
ANSWER_LIMIT_S = 30.0

T = TypeVar("T")
Tell = Callable[[str], None]
"""Takes a line about how far it is, for whoever asked."""


class Nothing(Record, frozen=True, kw_only=True):
    """What is asked without any further words."""


@dataclass(frozen=True)
class Operation:
    """Something that a host can be asked for."""

    asks: type[Record]
    """Its arguments."""
    does: Callable[[Host, Any, Tell], Awaitable[object]]
    """The value that it returns goes back as JSON; a BedplateError goes back as what it says."""
    goes_on: bool = False
    """Even when whoever asked has gone; else it is cancelled."""


class Error(Record, frozen=True, kw_only=True):
    message: str
    cause: str | None = None
    hint: str | None = None
    exit_code: int = 3

    @classmethod
    def of(cls, error: BedplateError) -> Error:
        return cls(message=error.message, cause=error.cause, hint=error.hint, exit_code=error.exit_code)

    def raised(self) -> BedplateError:
        kind = {1: AnswerIsNo, 2: BadQuestion}.get(self.exit_code, OutsideFailed)
        return kind(self.message, cause=self.cause, hint=self.hint)


class ControlServer:
    """Listens for a host. Each connection asks for one thing."""

    def __init__(self, host: Host, operations: Mapping[str, Operation]) -> None:
        self._host = host
        self._operations = operations
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, wanted: Path, name: str) -> Path:
        """Listens at `wanted`, or, on a file system that has no sockets, at a short path in the temporary folder."""
        try:
            bound, path = _bound(wanted), wanted
        except OSError:
            path = short_socket_path(name)
            try:
                bound = _bound(path)
            except OSError as error:
                raise disk_failure(error, path) from error
        self._server = await asyncio.start_unix_server(self._meet, sock=bound, limit=MOST_BYTES)
        self._path = path
        return path

    async def stop(self) -> None:
        """Ends after those operations that are under way, which hear of the end in their own way."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def say(**what: object) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(what) + b"\n")

        try:
            done = await self._answer(reader, lambda text: say(note=text))
            say(done=done)
        except BedplateError as error:
            say(error=Error.of(error))
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            say(error=Error(message="the service is ending", exit_code=3))
            raise
        except Exception as error:
            self._host.say(f"a request on the control socket failed: {error!r}")
            say(error=Error(message=f"the service failed over this: {error!r}", exit_code=3))
        finally:
            with contextlib.suppress(ConnectionError):
                if writer.can_write_eof():
                    writer.write_eof()
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, tell: Tell) -> object:
        async with asyncio.timeout(ASK_LIMIT_S):
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                raise BadQuestion("the request is too long") from error
        operation, asked = self._understood(line)
        doing = asyncio.ensure_future(operation.does(self._host, asked, tell))
        gone = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done() and not operation.goes_on:
                raise ConnectionResetError("whoever asked has gone")
            return await doing
        except asyncio.CancelledError:  # the host itself ends, and with it everything that goes on
            doing.cancel()
            raise
        finally:
            gone.cancel()
            if not operation.goes_on:
                doing.cancel()

    def _understood(self, line: bytes) -> tuple[Operation, Record]:
        try:
            asked = msgspec.json.decode(line)
            name, arguments = asked["do"], asked.get("with") or {}
            operation = self._operations.get(name)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise BadQuestion("the request is not understood", cause=str(error)) from error
        if operation is None:
            raise BadQuestion(
                f"this service knows no {name!r}", hint=f"it knows {', '.join(sorted(self._operations))}; is it older?"
            )
        try:
            return operation, msgspec.convert(arguments, operation.asks)
        except msgspec.ValidationError as error:
            raise BadQuestion(f"{name}: {error}") from error


def _bound(path: Path) -> socket.socket:
    private_folder(path.parent)
    server = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of one that was killed: the name has been claimed, so nobody listens there
        server.bind(str(path))
        server.listen(64)
    except OSError:
        server.close()
        raise
    finally:
        os.umask(before)
    return server


def ask(
    record: ServiceRecord,
    do: str,
    arguments: Record | None = None,
    *,
    answer: type[T],
    tell: Tell = lambda text: None,
    limit_s: float | None = ANSWER_LIMIT_S,
) -> T:
    """Asks a running host and waits for what it says, for `limit_s` between two lines. Raises what it raised."""
    request = msgspec.json.encode({"do": do, "with": arguments if arguments is not None else Nothing()})
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(limit_s)
        try:
            client.connect(record.socket)
            client.sendall(request + b"\n")
            with client.makefile("rb") as lines:
                for line in lines:
                    said = msgspec.json.decode(line)
                    if "note" in said:
                        tell(str(said["note"]))
                    elif "error" in said:
                        raise msgspec.convert(said["error"], Error).raised()
                    elif "done" in said:
                        return msgspec.convert(said["done"], answer)
        except TimeoutError as error:
            raise _silent(record, f"nothing was heard for {limit_s:g} s") from error
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise _silent(record, str(error)) from error
    raise _silent(record, "it ended the conversation")


def _silent(record: ServiceRecord, cause: str) -> OutsideFailed:
    if record.state == "starting":
        return OutsideFailed(
            f"{record.name} (process {record.pid}) is still starting",
            cause="what it needs is being fetched or installed, or its engines are not ready",
            hint=f"try again later; bedplate stop {record.name} ends it",
        )
    return OutsideFailed(
        f"{record.name} (process {record.pid}) does not answer on its control socket",
        cause=cause,
        hint=f"bedplate logs {record.name}; bedplate stop {record.name} ends it all the same",
    )
