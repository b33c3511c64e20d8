"""The control socket of a running host: JSON lines over a Unix socket that only this user may open.

Request: {"do": "stop", "with": {"drain_s": 30}}. Response: any number of {"note": "…"}, then {"done": …} or
{"error": …}.
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

from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.home import make_disk_failure
from bedplate.hosting.records import ensure_private_folder, get_short_socket_path
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.host import Host
    from bedplate.values.service import ServiceRecord

MOST_BYTES = 8 << 20
ASK_LIMIT_S = 10.0
"""Timeout for the request line. A client that connects and sends nothing is disconnected."""
ANSWER_LIMIT_S = 30.0

T = TypeVar("T")
Tell = Callable[[str], None]
"""Sends a line about progress to the client."""


class NoArguments(Record, frozen=True, kw_only=True):
    """The arguments of an operation that has none."""


@dataclass(frozen=True)
class Operation:
    """An operation that clients of the control socket can request."""

    asks: type[Record]
    """The type of its arguments."""
    does: Callable[[Host, Any, Tell], Awaitable[object]]
    """Its result is sent back as JSON, and a BedplateError as an error with the same message."""
    goes_on: bool = False
    """Whether it continues after the client disconnects. Otherwise it is cancelled."""


class ErrorReport(Record, frozen=True, kw_only=True):
    message: str
    cause: str | None = None
    hint: str | None = None
    exit_code: int = 3

    @classmethod
    def from_error(cls, error: BedplateError) -> ErrorReport:
        return cls(message=error.message, cause=error.cause, hint=error.hint, exit_code=error.exit_code)

    def to_exception(self) -> BedplateError:
        kind = {1: NotPossible, 2: UsageError}.get(self.exit_code, ExternalFailure)
        return kind(self.message, cause=self.cause, hint=self.hint)


class ControlServer:
    """Serves the control socket of a host. Each connection carries one request."""

    def __init__(self, host: Host, operations: Mapping[str, Operation]) -> None:
        self._host = host
        self._operations = operations
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, wanted: Path, name: str) -> Path:
        """Listen at `wanted`, or at a short path in the temporary folder if that file system has no sockets."""
        try:
            bound, path = _bind_socket(wanted), wanted
        except OSError:
            path = get_short_socket_path(name)
            try:
                bound = _bind_socket(path)
            except OSError as error:
                raise make_disk_failure(error, path) from error
        self._server = await asyncio.start_unix_server(self._handle_connection, sock=bound, limit=MOST_BYTES)
        self._path = path
        return path

    async def stop(self) -> None:
        """Close the socket and cancel the operations that still run."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def send(**fields: object) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(fields) + b"\n")

        try:
            done = await self._answer(reader, lambda text: send(note=text))
            send(done=done)
        except BedplateError as error:
            send(error=ErrorReport.from_error(error))
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            # Not raised again: asyncio before Python 3.12 prints a traceback for a cancelled handler.
            send(error=ErrorReport(message="the service is stopping", exit_code=3))
        except Exception as error:
            self._host.say(f"a request on the control socket failed: {error!r}")
            send(error=ErrorReport(message=f"the service failed to run this request: {error!r}", exit_code=3))
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, tell: Tell) -> object:
        async with asyncio.timeout(ASK_LIMIT_S):
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                raise UsageError("the request is too long") from error
        operation, arguments = self._parse_request(line)
        running = asyncio.ensure_future(operation.does(self._host, arguments, tell))
        # An error after the client has disconnected has no reader. asyncio would print it with a traceback.
        running.add_done_callback(lambda one: None if one.cancelled() else one.exception())
        disconnected = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({running, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not operation.goes_on:
                raise ConnectionResetError("the client disconnected")
            return await running
        except asyncio.CancelledError:  # the host stops, and with it also operations that outlive their client
            running.cancel()
            raise
        finally:
            disconnected.cancel()
            if not operation.goes_on:
                running.cancel()

    def _parse_request(self, line: bytes) -> tuple[Operation, Record]:
        try:
            request = msgspec.json.decode(line)
            name, arguments = request["do"], request.get("with") or {}
            operation = self._operations.get(name)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError("the request is malformed", cause=str(error)) from error
        if operation is None:
            raise UsageError(
                f"this service has no operation {name!r}",
                hint=f"it has {', '.join(sorted(self._operations))}; restart the service if bedplate was updated",
            )
        try:
            return operation, msgspec.convert(arguments, operation.asks)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: {error}") from error


def _bind_socket(path: Path) -> socket.socket:
    ensure_private_folder(path.parent)
    server = socket.socket(socket.AF_UNIX)
    previous_umask = os.umask(0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # left by a killed service: this process owns the name, so no other one listens there
        server.bind(str(path))
        server.listen(64)
    except OSError:
        server.close()
        raise
    finally:
        os.umask(previous_umask)
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
    """Send a request to a running host and return its answer. Raises the error that the host raised.

    `limit_s` is the timeout for each line.
    """
    request = msgspec.json.encode({"do": do, "with": arguments if arguments is not None else NoArguments()})
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(limit_s)
        try:
            client.connect(record.socket)
            client.sendall(request + b"\n")
            with client.makefile("rb") as lines:
                for line in lines:
                    response = msgspec.json.decode(line)
                    if "note" in response:
                        tell(str(response["note"]))
                    elif "error" in response:
                        raise msgspec.convert(response["error"], ErrorReport).to_exception()
                    elif "done" in response:
                        return msgspec.convert(response["done"], answer)
        except TimeoutError as error:
            raise _make_silence_failure(record, f"no response within {limit_s:g} s") from error
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise _make_silence_failure(record, str(error)) from error
    raise _make_silence_failure(record, "it closed the connection")


def _make_silence_failure(record: ServiceRecord, cause: str) -> ExternalFailure:
    if record.state == "starting":
        return ExternalFailure(
            f"{record.name} (process {record.pid}) is still starting",
            cause="its model or engine is being downloaded or installed, or its engines are not ready",
            hint=f"try again later, or stop it: bedplate stop {record.name}",
        )
    return ExternalFailure(
        f"{record.name} (process {record.pid}) does not answer on its control socket",
        cause=cause,
        hint=f"see bedplate logs {record.name}; bedplate stop {record.name} still stops it",
    )
