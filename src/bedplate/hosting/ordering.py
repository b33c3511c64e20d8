"""Turns an intent into an order for one host on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bedplate.errors import UsageError
from bedplate.hosting.orchestration import REPLICAS
from bedplate.run.gateway.origins import parse_host, parse_origin
from bedplate.values.endpoint import Orchestrator
from bedplate.values.intent import Intent, ModelNamed, PlatformTenant, Routing, Service
from bedplate.values.record import replace_fields
from bedplate.values.service import EndpointOrder, ModelOrder, Order
from bedplate.values.tenant import DeclaredTenant, is_tenant_name
from bedplate.values.units import parse_ttl

_ENDPOINT_FIELDS = ("model", "name", "key_env", "share", "price_per_million_tokens")
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
    endpoints: Sequence[str] = (),
    routing: Routing | None = None,
    **listening: Any,
) -> Order:
    """The order for the intent's services, or for its one model. `listening` are further fields of the order.

    `allow_hosts` and `allow_origins` are added to those of the intent.
    """
    hosts = [parse_host(one, "allow_hosts") for one in intent.allow_hosts]
    origins = [parse_origin(one, "allow_origins") for one in intent.allow_origins]
    listening["allow_hosts"] = (*hosts, *map(parse_host, allow_hosts))
    listening["allow_origins"] = (*origins, *map(parse_origin, allow_origins))
    routing = routing or intent.routing
    more = tuple(_parse_endpoint(text) for text in endpoints)
    if not intent.services:
        if routing is not None and not more:
            raise UsageError(
                "routing: there is one model without endpoints elsewhere, so there is nothing to choose from",
                hint="--endpoint URL adds one, or services: [{url: …}] in the file",
            )
        wanted = ModelOrder(
            model=_get_model_name(intent.model, "model"),
            workload=intent.workload,
            operations=intent.operations,
            engine=engine,
            replicas=replicas or (REPLICAS if on is not None else 1),
            ttl_s=parse_ttl(ttl, "--ttl"),
        )
        return Order(
            services=(wanted,), endpoints=_rank(more, 1), routing=routing,
            tenants=to_declared_tenants(intent.tenants), on=on, **listening,
        )  # fmt: skip
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
    services = tuple(_to_wanted(one, index, intent) for index, one in enumerate(intent.services) if one.url is None)
    remote = tuple(_to_endpoint(one, index) for index, one in enumerate(intent.services) if one.url is not None)
    return Order(
        services=services, endpoints=(*remote, *_rank(more, len(intent.services))), routing=routing,
        tenants=to_declared_tenants(intent.tenants), on=on, **listening,
    )  # fmt: skip


def _to_endpoint(service: Service, index: int) -> EndpointOrder:
    return EndpointOrder(
        url=service.url or "",
        model=_get_model_name(service.model, f"services[{index}].model"),
        name=service.name,
        key_env=service.key_env,
        share=service.share or 1.0,
        price_per_million_tokens=service.price_per_million_tokens or 0.0,
        rank=index,
        tenants=service.tenants,
        wait_s=parse_ttl(service.wait, f"services[{index}].wait"),
    )


def _rank(endpoints: Sequence[EndpointOrder], first: int) -> tuple[EndpointOrder, ...]:
    return tuple(replace_fields(one, rank=first + index) for index, one in enumerate(endpoints))


def _parse_endpoint(text: str) -> EndpointOrder:
    """`URL,FIELD=VALUE,…` of an option."""
    url, *fields = (piece.strip() for piece in text.split(","))
    found: dict[str, str | float] = {"url": url}
    for piece in fields:
        name, _, value = piece.partition("=")
        if name not in _ENDPOINT_FIELDS or not value:
            hint = f"URL,FIELD=VALUE with the fields {', '.join(_ENDPOINT_FIELDS)}"
            raise UsageError(f"--endpoint: {piece!r} is not a field of an endpoint", hint=hint)
        found[name] = value
    try:
        return msgspec.convert(found, EndpointOrder, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--endpoint: {str(error).replace('`', '').replace('$.', '')}") from error


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
        rank=index,
    )


def _get_model_name(model: ModelNamed | None, field: str) -> str | None:
    if isinstance(model, dict):
        raise UsageError(
            f"{field}: facts of a model can be planned, not served", hint="name a file, a folder or owner/name"
        )
    return model
