"""The running services from outside: who is there, how they are, and how they are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from bedplate.errors import OutsideFailed
from bedplate.hosting import records
from bedplate.hosting.control import ask
from bedplate.hosting.operations import DRAIN_S, Stop, Stopping
from bedplate.values.record import Record
from bedplate.values.service import HostStatus, ServiceRecord

GLANCE_S = 5.0
"""For one that may be too busy to answer, when others are waiting to be listed."""
LATE_S = 30.0
"""After its answers had their time, what a host may take to end its engines and itself."""
LOOK_S = 0.02


class Running(Record, frozen=True, kw_only=True):
    """A service that runs, and how it is, unless it does not say."""

    record: ServiceRecord
    status: HostStatus | None = None


class Stopped(Record, frozen=True, kw_only=True):
    name: str
    in_flight: int | None = None
    """Answers that were under way; `None`: it did not say."""
    took_s: float
    signalled: bool = False
    """Whether it had to be told by a signal, since it did not answer."""


def listed() -> tuple[list[Running], list[ServiceRecord]]:
    """All that run, and those that ended without saying so, whose files are gone now."""
    alive, stale = records.swept()
    return [Running(record=record, status=_glance(record)) for record in alive], stale


def status_of(record: ServiceRecord) -> HostStatus:
    return ask(record, "status", answer=HostStatus)


def _glance(record: ServiceRecord) -> HostStatus | None:
    try:
        return ask(record, "status", answer=HostStatus, limit_s=GLANCE_S)
    except OutsideFailed:  # it is still installing, or hangs; that it runs is known all the same
        return None


def stopped(
    record: ServiceRecord, drain_s: float = DRAIN_S, tell: Callable[[str], None] = lambda text: None
) -> Stopped:
    """Asks it to stop and waits until its process is gone."""
    began = time.monotonic()
    in_flight, signalled = None, False
    try:
        in_flight = ask(record, "stop", Stop(drain_s=drain_s), answer=Stopping).in_flight
        if in_flight:
            tell(f"{record.name}: {in_flight} answers are under way, and have up to {drain_s:g} s")
    except OutsideFailed as error:
        signalled = _signalled(record)
        if not signalled and records.is_alive(record):
            raise
        tell(f"{record.name}: {error.message}; process {record.pid} was told by a signal")
    until = began + drain_s + LATE_S
    while records.is_alive(record):
        if time.monotonic() > until:
            raise OutsideFailed(
                f"{record.name} (process {record.pid}) has not ended after {drain_s + LATE_S:g} s",
                hint=f"kill -9 {record.pid} ends it and its engines; its log: {record.log}",
            )
        time.sleep(LOOK_S)
    records.forget(record)
    return Stopped(name=record.name, in_flight=in_flight, took_s=time.monotonic() - began, signalled=signalled)


def _signalled(record: ServiceRecord) -> bool:
    """Only if it is that very process still."""
    if records.birth_of(record.pid) != record.birth:
        return False
    try:
        os.kill(record.pid, signal.SIGTERM)
    except OSError:
        return False
    return True
