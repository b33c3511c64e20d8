"""Run each measurement in its own process, so that its memory, crashes and hangs end with that process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, TypeVar, cast

from bedplate.errors import ExternalFailure
from bedplate.interrupts import defer_interrupts
from bedplate.values import Record, from_json

R = TypeVar("R", bound=Record)

PROGRESS, RESULT = "progress", "result"
MODULE = "bedplate.facts.measured.worker"


def _make_command(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", MODULE, name


def run_part(
    name: str,
    request: Record,
    result: type[R],
    update: Callable[[int], None] | None = None,
    *,
    limit_s: float = 60.0,
) -> R:
    """Run the part `name` of worker.py on `request`. `update` receives the progress in percent."""
    import msgspec

    late = threading.Event()
    process: subprocess.Popen[bytes] | None = None
    # A separate thread watches the time limit, because reading the next line may block forever. It is a daemon, so
    # Python does not wait for it after an interrupt.
    alarm = threading.Timer(limit_s, lambda: _stop(process, late))
    alarm.daemon = True
    with tempfile.TemporaryFile() as errors:
        try:
            with defer_interrupts():
                process = _start(_make_command(name), errors)
            alarm.start()
            answer = _exchange_messages(process, msgspec.json.encode(request), update or (lambda done: None))
            code = process.wait()
        finally:
            alarm.cancel()
            _stop(process)
            _close(process)
        if answer is not None:
            return from_json(result, answer, f"the answer of {name}")
        errors.seek(0)
        raise ExternalFailure(_explain_failure(name, code, errors.read(), limit_s if late.is_set() else None))


def _start(command: tuple[str, ...], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        # A separate session, so that Ctrl-C reaches only this process, which then ends the part.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    except OSError as error:
        raise ExternalFailure("could not start a process for the measurement", cause=str(error)) from error


def _stop(process: subprocess.Popen[bytes] | None, late: threading.Event | None = None) -> None:
    if late is not None:
        late.set()
    if process is not None:
        process.kill()
        process.wait()


def _close(process: subprocess.Popen[bytes] | None) -> None:
    for pipe in (process.stdin, process.stdout) if process is not None else ():
        with contextlib.suppress(OSError):
            cast(IO[bytes], pipe).close()


def _exchange_messages(process: subprocess.Popen[bytes], request: bytes, update: Callable[[int], None]) -> bytes | None:
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with contextlib.suppress(OSError), stdin:  # closing also writes, and fails if nobody reads
        stdin.write(request)
    answer = None
    with stdout:
        for line in stdout:
            kind, _, rest = line.partition(b" ")
            if kind == RESULT.encode():
                answer = rest
            elif kind == PROGRESS.encode() and rest.strip().isdigit():
                update(int(rest))
    return answer


def _explain_failure(name: str, code: int, printed: bytes, limit_s: float | None) -> str:
    if limit_s is not None:
        return f"{name} was stopped after {limit_s:g} s"
    lines = printed.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{name} failed: {reason}"
