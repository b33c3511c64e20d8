"""Run the load generator in a separate process, so that its caller does not delay it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from bedplate import errors
from bedplate.measure.load.client_error import ClientErrorFigures
from bedplate.measure.load.driver import Watch
from bedplate.measure.load.generator import measure
from bedplate.measure.load.loops import run
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.target import LoadTarget
from bedplate.values.record import Record
from bedplate.values.run import Load, Repeat
from bedplate.values.workload import RequestShape

C = TypeVar("C")


class MeasureCall(Record, frozen=True, kw_only=True):
    """The arguments of `measure`. They are sent through a pipe, because other users can read command lines."""

    target: LoadTarget
    load: Load
    prepared: PreparedEndpoint | None = None
    seconds: float = 10.0
    warmup_s: float = 2.0
    least_requests: int | None = None
    most_seconds: float = 60.0
    timeout_s: float = 120.0
    round: int = 0
    shapes: tuple[RequestShape, ...] = ()
    check: bool | ClientErrorFigures = True


class ProcessError(Record, frozen=True, kw_only=True):
    kind: str
    message: str
    hint: str | None = None
    cause: str | None = None


class ProcessMessage(Record, frozen=True, kw_only=True):
    """One line of the process's output."""

    moment: str | None = None
    repeat: Repeat | None = None
    problem: ProcessError | None = None
    nothing: bool = False
    """Whether the process ended without a repeat."""


def measure_apart(
    target: LoadTarget,
    load: Load,
    *,
    prepared: PreparedEndpoint | None = None,
    seconds: float = 10.0,
    warmup_s: float = 2.0,
    least_requests: int | None = None,
    most_seconds: float = 60.0,
    timeout_s: float = 120.0,
    round: int = 0,
    shapes: Sequence[RequestShape] = (),
    check: bool | ClientErrorFigures = True,
    watch: Watch | None = None,
) -> Repeat:
    """Runs `measure` in a separate process."""
    call = MeasureCall(
        target=target,
        load=load,
        prepared=prepared,
        seconds=seconds,
        warmup_s=warmup_s,
        least_requests=least_requests,
        most_seconds=most_seconds,
        timeout_s=timeout_s,
        round=round,
        shapes=tuple(shapes),
        check=check,
    )
    found = run_process("bedplate.measure.load", call, watch)
    if found is None:
        raise errors.ExternalFailure("the load generator returned no measurement")
    return found


def start_generator(module: str) -> subprocess.Popen[bytes]:
    """Starts `module` in its own process group: Ctrl-C reaches only the caller, even while the module is imported."""
    command = [sys.executable, "-m", module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def run_process(module: str, call: Record, watch: Watch | None) -> Repeat | None:
    """Runs `module` as a process with this call and returns its repeat; `None`: it has none."""
    process = start_generator(module)
    with process:
        try:
            return _listen(process, call, watch)
        finally:
            process.terminate()


def _listen(process: subprocess.Popen[bytes], call: Record, watch: Watch | None) -> Repeat | None:
    if process.stdin is None or process.stdout is None:
        raise errors.ExternalFailure("the load generator has no pipes")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(call) + b"\n")
        process.stdin.flush()
    for line in process.stdout:
        message = msgspec.json.decode(line, type=ProcessMessage)
        if message.repeat is not None or message.nothing:
            return message.repeat
        if message.problem is not None:
            raise make_error(message.problem)
        if message.moment is not None and watch is not None:
            watch(message.moment)
    raise errors.ExternalFailure("the load generator ended unexpectedly", cause=f"status {process.wait()}")


def make_error(problem: ProcessError) -> errors.BedplateError:
    kinds = {kind.__name__: kind for kind in (errors.NotPossible, errors.UsageError, errors.ExternalFailure)}
    return kinds.get(problem.kind, errors.BedplateError)(problem.message, hint=problem.hint, cause=problem.cause)


def main() -> None:
    def run_call(call: MeasureCall, watch: Watch) -> Coroutine[Any, Any, Repeat]:
        arguments: dict[str, Any] = {name: getattr(call, name) for name in call.__struct_fields__}
        return measure(**arguments, watch=watch)

    serve_call(MeasureCall, run_call)


def serve_call(kind: type[C], work: Callable[[C, Watch], Coroutine[Any, Any, Repeat | None]]) -> None:
    """Reads one call, and writes events and finally the repeat, one JSON object per line. Ends with its caller."""
    line = sys.stdin.buffer.readline()
    if not line:  # the caller has ended
        return
    call = msgspec.json.decode(line, type=kind)
    _end_with_caller()
    with contextlib.suppress(OSError, AttributeError):
        # Time spent waiting for a CPU would count as engine time. A higher priority needs privileges.
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        repeat = run(work(call, lambda moment: _write_message(ProcessMessage(moment=moment))))
        message = ProcessMessage(repeat=repeat, nothing=repeat is None)
    except errors.BedplateError as error:
        problem = ProcessError(kind=type(error).__name__, message=error.message, hint=error.hint, cause=error.cause)
        message = ProcessMessage(problem=problem)
    _write_message(message)
    os._exit(0)  # do not wait for the thread that watches the caller


def _write_message(message: ProcessMessage) -> None:
    # Not sys.stdout: with PYTHONUNBUFFERED it may write only a part of the data.
    with open(1, "wb", closefd=False) as pipe:
        pipe.write(msgspec.json.encode(message) + b"\n")


def _end_with_caller() -> None:
    import threading

    def wait_for_caller() -> None:
        sys.stdin.buffer.read()  # returns when the other end of the pipe is closed
        os._exit(1)

    threading.Thread(target=wait_for_caller, daemon=True).start()
