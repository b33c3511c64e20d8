"""What a person wants, as an order for one host on this machine."""

from __future__ import annotations

from typing import Any

from bedplate.errors import BadQuestion
from bedplate.values.intent import Intent, ModelNamed, Service
from bedplate.values.service import Order, Wanted
from bedplate.values.units import parsed_seconds


def order_of(
    intent: Intent,
    *,
    engine: str | None = None,
    replicas: int | None = None,
    ttl: str | None = None,
    **listening: Any,
) -> Order:
    """The intent's services, or its one model; `listening` are further fields of the order."""
    if not intent.services:
        wanted = Wanted(
            model=_named(intent.model, "model"),
            workload=intent.workload,
            operations=intent.operations,
            engine=engine,
            replicas=replicas or 1,
            ttl_s=ttl_seconds(ttl, "--ttl"),
        )
        return Order(services=(wanted,), **listening)
    if intent.pools:
        raise BadQuestion(
            "pools: these are machines on paper, and serve runs on this one",
            hint="leave pools out to serve the services here; bedplate plan -f FILE plans them",
        )
    for option, value in (("--engine", engine), ("--replicas", replicas), ("--ttl", ttl)):
        if value is not None:
            raise BadQuestion(
                f"{option}: the intent has {len(intent.services)} services, each with its own",
                hint=f"say it in the file: {option.strip('-')}: {value}",
            )
    return Order(services=tuple(_wanted(one, index, intent) for index, one in enumerate(intent.services)), **listening)


def _wanted(service: Service, index: int, intent: Intent) -> Wanted:
    return Wanted(
        model=_named(service.model, f"services[{index}].model"),
        workload=service.workload,
        operations=service.operations or intent.operations,
        engine=service.engine,
        replicas=service.replicas,
        ttl_s=ttl_seconds(service.ttl, f"services[{index}].ttl"),
        preload=service.preload,
    )


def _named(model: ModelNamed | None, field: str) -> str | None:
    if isinstance(model, dict):
        raise BadQuestion(f"{field}: facts can be planned, not served", hint="name a file, a folder or owner/name")
    return model


def ttl_seconds(ttl: str | float | None, field: str) -> float | None:
    if ttl is None:
        return None
    found = parsed_seconds(ttl, field) if isinstance(ttl, str) else float(ttl)
    if found <= 0:
        raise BadQuestion(f"{field}: must be more than 0", hint="for example 10m; leave it out to keep it loaded")
    return found
