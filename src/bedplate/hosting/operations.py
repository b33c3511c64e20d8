"""The operations of every running host: load, unload, say, status and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from bedplate.errors import NotPossible
from bedplate.hosting.adapters import AdapterRequest, change_adapters
from bedplate.hosting.control import NoArguments, Operation, Tell
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.host import Host, HostedService
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


class ModelRequest(Record, frozen=True, kw_only=True):
    model: str | None = None
    """The served name; None for the only model."""


async def load(host: Host, asked: ModelRequest, tell: Tell) -> NoArguments:
    service = host.get_service(asked.model)
    _check_idle(host, service)
    if service.engines:
        raise NotPossible(f"{service.name} is already loaded")
    await host.load(service)
    return NoArguments()


async def unload(host: Host, asked: ModelRequest, tell: Tell) -> NoArguments:
    """Free the memory of a model. The next request loads it again."""
    service = host.get_service(asked.model)
    _check_idle(host, service)
    if not service.engines:
        raise NotPossible(f"{service.name} is not loaded")
    if service.on is not None:
        raise NotPossible(
            f"{service.name} runs on {service.on.above.orchestrator.capitalize()} and cannot be unloaded",
            hint=f"bedplate stop {host.name} stops the service",
        )
    host.say(f"unloading {service.name}, as requested; the next request loads it again")
    host.allow_reload(service)
    await host.unload(service)
    host.say(f"{service.name} is unloaded")
    return NoArguments()


def _check_idle(host: Host, service: HostedService) -> None:
    if host.state != "ready" or service.current_operation is not None:
        cause = service.current_operation if host.state == "ready" else f"the service is {host.state}"
        raise NotPossible(f"{service.name} is busy", cause=cause, hint="try again later")


async def say(host: Host, asked: LogMessage, tell: Tell) -> NoArguments:
    host.say(" ".join(asked.text.split()))
    return NoArguments()


async def stop(host: Host, asked: StopRequest, tell: Tell) -> StopAccepted:
    """Answer at once and stop afterwards. The client waits for the process to exit."""
    in_flight = sum(service.in_flight for service in host.services.values())
    rest = f"; {in_flight} running requests have up to {asked.drain_s:g} s to finish" if in_flight else ""
    host.say(f"stopping{rest}")
    host.request_stop(asked.drain_s)
    return StopAccepted(in_flight=in_flight)


def make_host_operations(record: ServiceRecord) -> dict[str, Operation]:
    async def report_status(host: Host, asked: NoArguments, tell: Tell) -> HostStatus:
        from bedplate.hosting.status import collect_status

        return await collect_status(host, record)

    return {
        "adapters": Operation(AdapterRequest, change_adapters, goes_on=True),
        "load": Operation(ModelRequest, load, goes_on=True),
        "unload": Operation(ModelRequest, unload, goes_on=True),
        "say": Operation(LogMessage, say),
        "status": Operation(NoArguments, report_status),
        "stop": Operation(StopRequest, stop, goes_on=True),
    }
