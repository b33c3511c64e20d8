"""The status of a host."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from bedplate._version import __version__
from bedplate.hosting.drift import describe_drift
from bedplate.hosting.endpoints import describe_endpoints
from bedplate.measure.watch import list_process_tree, measure_memory_bytes
from bedplate.values.service import EngineStatus, HostStatus, ModelStatus

if TYPE_CHECKING:
    from bedplate.hosting.host import Host, HostedEngine, HostedService
    from bedplate.values.service import ServiceRecord


async def collect_status(host: Host, record: ServiceRecord) -> HostStatus:
    """Collect the status. The memory of processes is read in a thread, since that is slow."""
    pids = {engine.id: engine.pid for engine in host.engines}
    sizes = await asyncio.to_thread(_read_sizes, pids)
    drifts = {name: await asyncio.to_thread(describe_drift, service) for name, service in host.services.items()}
    models = tuple(_describe_model(service, sizes, drifts[name]) for name, service in host.services.items())
    known = [size for size in sizes.values() if size is not None]
    return HostStatus(
        name=host.name,
        pid=os.getpid(),
        version=__version__,
        state=host.state,
        url=f"{host.url}/v1" if host.url else None,
        needs_key=host.gateway.needs_key,
        detached=record.detached,
        started_at=record.started_at,
        uptime_s=time.monotonic() - host.began,
        in_flight=sum(backend.in_flight for backend in host.gateway.backends),
        memory_bytes=sum(known) if known or not sizes else None,
        budget_bytes=host.room.budget_bytes,
        room_bytes=host.room.devices,
        log=str(host.log.path),
        models=models,
        endpoints=describe_endpoints(host.gateway, host.endpoints),
        notes=tuple(host.notes),
    )


def _read_sizes(pids: dict[str, int | None]) -> dict[str, int | None]:
    return {id: measure_memory_bytes(list_process_tree(pid)) if pid is not None else None for id, pid in pids.items()}


def _describe_model(service: HostedService, sizes: dict[str, int | None], drifted: str | None) -> ModelStatus:
    plan = service.readied.plan
    return ModelStatus(
        model=service.name,
        state=service.state,
        why=tuple(f"{reason.text} ({reason.rule})" for reason in service.readied.decided.decision.reasons),
        busy=service.current_operation,
        reason=service.failure,
        quantization=plan.weights.label,
        context_tokens=plan.settings.context_tokens,
        replicas=service.wanted.replicas,
        ttl_s=service.wanted.ttl_s,
        idle_s=time.monotonic() - service.last_used if service.engines and not service.in_flight else None,
        planned_bytes=sum(service.need.values()),
        workload=service.wanted.workload,
        drift=drifted,
        engines=tuple(_describe_engine(engine, sizes.get(engine.id)) for engine in service.engines),
        on=service.on.above if service.on is not None else None,
    )


def _describe_engine(engine: HostedEngine, size: int | None) -> EngineStatus:
    backend, settings = engine.backend, engine.plan.settings
    return EngineStatus(
        id=engine.id,
        engine=engine.supervisor.engine.id,
        version=engine.supervisor.engine.version or "" if engine.part.name else engine.plan.engine_version,
        state=backend.state,
        reason=backend.reason,
        progress=backend.progress,
        phase=backend.phases.current,
        phases=backend.phases.list_times(),
        pid=engine.pid,
        device=settings.device,
        threads=settings.threads,
        slots=settings.slots,
        share=backend.share,
        in_flight=backend.in_flight,
        restarts=backend.restarts,
        last_exit=backend.last_exit,
        uptime_s=time.monotonic() - engine.ready_since if engine.ready_since is not None else None,
        memory_bytes=size,
        planned_bytes=sum(engine.need.values()),
        log=str(engine.log),
        part=engine.part.name,
    )
