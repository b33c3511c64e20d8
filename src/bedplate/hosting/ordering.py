"""Turns an intent into an order for one host on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bedplate.errors import UsageError
from bedplate.hosting.orchestration import REPLICAS
from bedplate.run.gateway.origins import parse_host, parse_origin
from bedplate.values.endpoint import Orchestrator
from bedplate.values.intent import Intent, ModelNamed, PlatformTenant, Service
from bedplate.values.service import ModelOrder, Order
from bedplate.values.tenant import DeclaredTenant, is_tenant_name
from bedplate.values.units import parse_duration

LEAST_SHARE = 0.01
"""The share that tenants without a share get together if the others claim everything, so that none waits forever."""


def make_order(
    intent: Intent,
    *,
    engine: str | None = None,
    replicas: int | None = None,
    ttl: str | None = None,
    on: Orchestrator | None = None,
    allow_hosts: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    **listening: Any,
) -> Order:
    """The order for the intent's services, or for its one model. `listening` are further fields of the order.

    `allow_hosts` and `allow_origins` are added to those of the intent.
    """
    hosts = [parse_host(one, "allow_hosts") for one in intent.allow_hosts]
    origins = [parse_origin(one, "allow_origins") for one in intent.allow_origins]
    listening["allow_hosts"] = (*hosts, *map(parse_host, allow_hosts))
    listening["allow_origins"] = (*origins, *map(parse_origin, allow_origins))
    if not intent.services:
        wanted = ModelOrder(
            model=_get_model_name(intent.model, "model"),
            workload=intent.workload,
            operations=intent.operations,
            engine=engine,
            replicas=replicas or (REPLICAS if on is not None else 1),
            ttl_s=parse_ttl(ttl, "--ttl"),
        )
        return Order(services=(wanted,), tenants=to_declared_tenants(intent.tenants), on=on, **listening)
    if intent.pools:
        raise UsageError(
            "pools: pools are hypothetical hardware, and serve runs on this machine",
            hint="leave pools out to serve the services here; bedplate plan -f FILE plans with them",
        )
    for option, value in (("--engine", engine), ("--replicas", replicas), ("--ttl", ttl)):
        if value is not None:
            raise UsageError(
                f"{option}: the intent has {len(intent.services)} services, and each has its own setting",
                hint=f"set it in the file: {option.strip('-')}: {value}",
            )
    services = tuple(_to_wanted(one, index, intent) for index, one in enumerate(intent.services))
    return Order(services=services, tenants=to_declared_tenants(intent.tenants), on=on, **listening)


def to_declared_tenants(tenants: Sequence[PlatformTenant]) -> tuple[DeclaredTenant, ...]:
    """The tenants with weights instead of shares. Equal shares have weight 1, the default of a tenant.

    Tenants without a share divide what the others leave, as in a plan.
    """
    for index, one in enumerate(tenants):
        if not is_tenant_name(one.name):
            hint = "use letters, digits and . _ @ -, at most 64 characters"
            raise UsageError(f"tenants[{index}].name: {one.name!r} is not a valid tenant name", hint=hint)
    shares = [one.share for one in tenants if one.share is not None]
    without_share = len(tenants) - len(shares)
    left = max(LEAST_SHARE, 1 - sum(shares)) / without_share if without_share else 0.0
    return tuple(
        DeclaredTenant(
            name=one.name,
            weight=round((one.share or left) * len(tenants), 6) if shares else None,
            requests_per_minute=one.requests_per_minute,
            tokens_per_minute=one.tokens_per_minute,
            in_flight=one.in_flight,
        )
        for one in tenants
    )


def _to_wanted(service: Service, index: int, intent: Intent) -> ModelOrder:
    return ModelOrder(
        model=_get_model_name(service.model, f"services[{index}].model"),
        workload=service.workload,
        operations=service.operations or intent.operations,
        engine=service.engine,
        replicas=service.replicas,
        ttl_s=parse_ttl(service.ttl, f"services[{index}].ttl"),
        preload=service.preload,
        tenants=service.tenants,
    )


def _get_model_name(model: ModelNamed | None, field: str) -> str | None:
    if isinstance(model, dict):
        raise UsageError(
            f"{field}: facts of a model can be planned, not served", hint="name a file, a folder or owner/name"
        )
    return model


def parse_ttl(ttl: str | float | None, field: str) -> float | None:
    if ttl is None:
        return None
    found = parse_duration(ttl, field) if isinstance(ttl, str) else float(ttl)
    if found <= 0:
        raise UsageError(f"{field}: must be more than 0", hint="for example 10m; leave it out to keep the model loaded")
    return found
