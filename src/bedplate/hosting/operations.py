"""The operations that a running host itself answers, by name: say, status and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from bedplate.hosting.control import Nothing, Operation, Tell
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.host import Host
    from bedplate.values.service import HostStatus, ServiceRecord

DRAIN_S = 30.0
MOST_SAID = 2000


class Stop(Record, frozen=True, kw_only=True):
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = DRAIN_S
    """How long answers under way may take."""


class Stopping(Record, frozen=True, kw_only=True):
    in_flight: int
    """Answers under way when it was asked."""


class Say(Record, frozen=True, kw_only=True):
    """For those who do something beside a host, and have something to tell its operator."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_SAID)]


async def say(host: Host, asked: Say, tell: Tell) -> Nothing:
    host.say(" ".join(asked.text.split()))
    return Nothing()


async def stop(host: Host, asked: Stop, tell: Tell) -> Stopping:
    """Says so at once and ends afterwards: whoever asked sees the process go."""
    in_flight = sum(service.in_flight for service in host.services.values())
    host.say(f"asked to stop, with {in_flight} answers under way and {asked.drain_s:g} s for them")
    host.stop_soon(asked.drain_s)
    return Stopping(in_flight=in_flight)


def host_operations(record: ServiceRecord) -> dict[str, Operation]:
    async def report_status(host: Host, asked: Nothing, tell: Tell) -> HostStatus:
        from bedplate.hosting.status import status

        return await status(host, record)

    return {
        "say": Operation(Say, say),
        "status": Operation(Nothing, report_status),
        "stop": Operation(Stop, stop, goes_on=True),
    }
