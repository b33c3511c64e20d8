"""The operations of every running host: say, status and stop."""

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
    """How long running requests may take."""


class Stopping(Record, frozen=True, kw_only=True):
    in_flight: int
    """Requests that were running when the stop was requested."""


class Say(Record, frozen=True, kw_only=True):
    """A line for the service's log, from a process that works on the service, such as a watch."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_SAID)]


async def say(host: Host, asked: Say, tell: Tell) -> Nothing:
    host.say(" ".join(asked.text.split()))
    return Nothing()


async def stop(host: Host, asked: Stop, tell: Tell) -> Stopping:
    """Answer at once and stop afterwards. The client waits for the process to exit."""
    in_flight = sum(service.in_flight for service in host.services.values())
    host.say(f"stopping; {in_flight} running requests have up to {asked.drain_s:g} s to finish")
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
