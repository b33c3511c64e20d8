"""The operations of every running host: say, status and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from bedplate.hosting.control import NoArguments, Operation, Tell
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.host import Host
    from bedplate.values.service import HostStatus, ServiceRecord

DRAIN_S = 30.0
MOST_SAID = 2000


class StopRequest(Record, frozen=True, kw_only=True):
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = DRAIN_S
    """How long running requests may take."""


class StopAccepted(Record, frozen=True, kw_only=True):
    in_flight: int
    """Requests that were running when the stop was requested."""


class LogMessage(Record, frozen=True, kw_only=True):
    """A line for the service's log, from a process that works on the service, such as a watch."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_SAID)]


async def say(host: Host, asked: LogMessage, tell: Tell) -> NoArguments:
    host.say(" ".join(asked.text.split()))
    return NoArguments()


async def stop(host: Host, asked: StopRequest, tell: Tell) -> StopAccepted:
    """Answer at once and stop afterwards. The client waits for the process to exit."""
    in_flight = sum(service.in_flight for service in host.services.values())
    host.say(f"stopping; {in_flight} running requests have up to {asked.drain_s:g} s to finish")
    host.request_stop(asked.drain_s)
    return StopAccepted(in_flight=in_flight)


def make_host_operations(record: ServiceRecord) -> dict[str, Operation]:
    async def report_status(host: Host, asked: NoArguments, tell: Tell) -> HostStatus:
        from bedplate.hosting.status import collect_status

        return await collect_status(host, record)

    return {
        "say": Operation(LogMessage, say),
        "status": Operation(NoArguments, report_status),
        "stop": Operation(StopRequest, stop, goes_on=True),
    }
