"""Lists running services, reads their status and stops them, from another process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from bedplate.errors import ExternalFailure
from bedplate.hosting import records
from bedplate.hosting.control import ANSWER_LIMIT_S, ask
from bedplate.hosting.operations import DRAIN_S, StopAccepted, StopRequest
from bedplate.values.record import Record
from bedplate.values.service import HostStatus, ServiceRecord

GLANCE_S = 5.0
"""Timeout for the status of one service in a list of several."""
LATE_S = 30.0
"""How long a host may take to stop its engines and exit after its requests were drained."""
LOOK_S = 0.02


class RunningService(Record, frozen=True, kw_only=True):
    """A running service, and its status if it answered."""

    record: ServiceRecord
    status: HostStatus | None = None


class StoppedService(Record, frozen=True, kw_only=True):
    name: str
    in_flight: int | None = None
    """Requests that were running; null if the service did not report it."""
    took_s: float
    signalled: bool = False
    """Whether it was stopped by a signal because it did not answer."""


def list_services() -> tuple[list[RunningService], list[ServiceRecord]]:
    """The running services, and those that exited unexpectedly, whose files are removed."""
    alive, stale = records.remove_stale()
    return [RunningService(record=record, status=_try_status(record)) for record in alive], stale


def read_status(record: ServiceRecord, limit_s: float = ANSWER_LIMIT_S) -> HostStatus:
    return ask(record, "status", answer=HostStatus, limit_s=limit_s)


def _try_status(record: ServiceRecord) -> HostStatus | None:
    try:
        return read_status(record, GLANCE_S)
    except ExternalFailure:  # it is still installing, or hangs; it is listed as running without a status
        return None


def stop_service(
    record: ServiceRecord, drain_s: float = DRAIN_S, tell: Callable[[str], None] = lambda text: None
) -> StoppedService:
    """Stop a service and wait until its process has exited."""
    began = time.monotonic()
    in_flight, signalled = None, False
    try:
        in_flight = ask(record, "stop", StopRequest(drain_s=drain_s), answer=StopAccepted).in_flight
        if in_flight:
            tell(f"{record.name}: waiting up to {drain_s:g} s for {in_flight} running requests")
    except ExternalFailure as error:
        signalled = _send_sigterm(record)
        if not signalled and records.is_alive(record):
            raise
        tell(f"{record.name}: {error.message}; sent SIGTERM to process {record.pid}")
    until = began + drain_s + LATE_S
    while records.is_alive(record):
        if time.monotonic() > until:
            raise ExternalFailure(
                f"{record.name} (process {record.pid}) is still running after {drain_s + LATE_S:g} s",
                hint=f"kill -9 {record.pid} stops it and its engines; see its log: {record.log}",
            )
        time.sleep(LOOK_S)
    records.forget(record)
    return StoppedService(name=record.name, in_flight=in_flight, took_s=time.monotonic() - began, signalled=signalled)


def _send_sigterm(record: ServiceRecord) -> bool:
    """Send SIGTERM, unless the process id belongs to another process now."""
    if records.read_birth(record.pid) != record.birth:
        return False
    try:
        os.kill(record.pid, signal.SIGTERM)
    except OSError:
        return False
    return True
