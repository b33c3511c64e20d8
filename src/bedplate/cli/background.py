"""The program of a service in the background: reads its order from stdin, serves it, and reports until it is ready."""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from bedplate.errors import BedplateError
from bedplate.home import get_logs_dir, open_private
from bedplate.hosting.control import ErrorReport
from bedplate.hosting.detached import (
    MOST_EARLY_BYTES,
    ChoiceReport,
    DetachedInput,
    LogReport,
    PipeReporter,
    StartReport,
)
from bedplate.interrupts import forget_interrupts
from bedplate.values import Endpoint
from bedplate.values.service import ServiceRecord


def main() -> int:
    """Serves the order on stdin; exit codes are those of `bedplate serve`."""
    from bedplate.cli.checks import check_answers, make_examiner
    from bedplate.serving.serve import ServeHooks, serve_order

    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=DetachedInput)
    _close_input()
    # While nothing runs yet, a request to end is what Ctrl-C is in the foreground.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reporter = PipeReporter(errand.report_fd)
    if errand.lifeline_fd is not None:
        _stop_when_closed(errand.lifeline_fd)

    def report_ready(endpoint: Endpoint) -> None:
        reporter.send(StartReport(ready=endpoint))
        reporter.close()

    order = errand.order
    hooks = ServeHooks(
        progress=reporter,
        on_decision=lambda hardware, model, wanted, decision: reporter.send(
            StartReport(choice=ChoiceReport(hardware=hardware, model=model, wanted=wanted, decision=decision))
        ),
        on_claim=lambda record: reporter.send(StartReport(log=_log_to_service(record))),
        on_ready=report_ready,
        check=check_answers if order.check else None,
        examiner=make_examiner(),
    )
    try:
        serve_order(order, hooks, fallback=errand.fallback, detached=True)
    except BedplateError as error:
        from bedplate.cli.terminal import show_error

        show_error(error)
        reporter.send(StartReport(error=ErrorReport.from_error(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _log_to_service(record: ServiceRecord) -> LogReport:
    """Redirects everything that this process and its children print to the service's own log."""
    path = get_logs_dir() / f"{record.name}@host.log"
    large = path.exists() and path.stat().st_size > MOST_EARLY_BYTES
    with open_private(path, "wb" if large else "ab") as log:
        began = log.tell()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    return LogReport(path=str(path), began=began)


def _stop_when_closed(fd: int) -> None:
    """Ask this process to stop once the other end of the pipe is closed."""

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    os.set_inheritable(fd, False)
    threading.Thread(target=watch, daemon=True).start()


def _close_input() -> None:
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        forget_interrupts()
