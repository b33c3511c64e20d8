"""Input of all targets: services with their plans, the pools that they run on, and the tenants."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from bedplate.decide import plan as plan_decision
from bedplate.decide.cards import keep_cards
from bedplate.decide.portfolio import make_pool_machine
from bedplate.engines.visible import pick_cards
from bedplate.errors import NotPossible
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values import Decision, Hardware, Model, Plan, Workload
from bedplate.values.intent import DeployTarget, Intent, NodePool, PlatformTenant, Service
from bedplate.values.portfolio import Portfolio
from bedplate.values.units import parse_ttl

NO_NETWORK = ("none", "no", "")
MOST_LETTERS = 40
"""Of a service's name: names of other objects add to it, and KubeRay accepts 41."""
RESERVED_NAMES = ("bedplate-gateway", "default-deny")
SUFFIXES = ("", "-model", "-picker", "-worker", "-decode", "-prefill", "-frontend", "-serve-svc", "-head-svc")
"""What names of a service's objects add to its own."""


@dataclass(frozen=True)
class PlacedService:
    """A service and the pool that it runs on."""

    name: str
    plan: Plan
    decision: Decision
    pool: NodePool
    node: Hardware
    """All accelerators of the pool as one machine, with the CPU and memory of one node."""
    spare: int
    """Free accelerators of the pool; for a CPU pool, free nodes."""
    tenants: tuple[str, ...] = ()
    copies: int = 1
    """Instances of the whole plan, each with the plan's own replicas."""
    ttl_s: float | None = None
    """Scaled to zero after this long without a request; `None`: it keeps running."""


@dataclass(frozen=True)
class Platform:
    services: tuple[PlacedService, ...]
    pools: tuple[NodePool, ...]
    tenants: tuple[PlatformTenant, ...] = ()
    deploy: DeployTarget = field(default_factory=DeployTarget)
    elsewhere: tuple[tuple[int, Service], ...] = ()
    """Endpoints elsewhere, each with its position among all services of the intent."""
    gateway_settings: dict[str, object] = field(default_factory=dict)
    """Fields of the intent that concern only the gateway in front of all services."""


def place_one_service(
    intent: Intent, hardware: Hardware, model: Model, workload: Workload, decision: Decision
) -> Platform:
    """Describe one service on one machine or on identical nodes."""
    plan = plan_decision(decision, model, workload)
    (name,) = choose_service_names([model.short_name])
    # Of different accelerators, the files are for those that the plan names.
    cards = pick_cards(hardware, plan.settings.cards)
    node = keep_cards(hardware, cards) if cards else hardware
    pool = _describe_pool(intent, node)
    layout = decision.parallelism
    used = layout.tensor * layout.pipeline * layout.data
    spare = max(0, len(hardware.accelerators) - used) if hardware.accelerators else 0
    placed = PlacedService(name, plan, decision, pool, node, spare)
    return Platform((placed,), (pool,), intent.tenants, intent.deploy, gateway_settings=_get_gateway_settings(intent))


def place_services(
    intent: Intent,
    found: Portfolio,
    models: Sequence[Model],
    hardware: Hardware | None = None,
    elsewhere: Sequence[tuple[int, Service]] = (),
) -> Platform:
    """Describe a portfolio in which every service is placed, in pools or together on one machine.

    `elsewhere` are the endpoints elsewhere, which the portfolio and the intent's services do not have.
    """
    lost = [placement.service for placement in found.placements if placement.pool is None]
    if lost:
        raise NotPossible(
            f"no files were written: {_join_names(lost)} {'does' if len(lost) == 1 else 'do'} not fit",
            cause="no pool has enough free capacity next to the other services",
            hint="use a larger pool, fewer users or a smaller model; bedplate plan -f FILE shows what would fit",
        )
    alone = _describe_pool(intent, hardware) if hardware is not None and not intent.pools else None
    pools = {pool.name: pool for pool in intent.pools}
    names = choose_service_names([placement.service for placement in found.placements])
    services = []
    for name, asked, model, placement in zip(names, intent.services, models, found.placements, strict=True):
        plan = plan_decision(placement.decision, model, asked.workload)
        if alone is not None and hardware is not None:
            pool, node, spare = alone, hardware, 0
        else:
            pool = pools[str(placement.pool)]
            node, spare = make_pool_machine(pool, pool.count), found.free[pool.name]
        copies, ttl_s = max(1, asked.replicas), parse_ttl(asked.ttl, f"services: {name}: ttl")
        services.append(PlacedService(name, plan, placement.decision, pool, node, spare, asked.tenants, copies, ttl_s))
    pools_used = intent.pools or ((alone,) if alone else ())
    settings = _get_gateway_settings(intent)
    return Platform(tuple(services), pools_used, intent.tenants, intent.deploy, tuple(elsewhere), settings)


def split_services(intent: Intent) -> tuple[tuple[Service, ...], tuple[tuple[int, Service], ...]]:
    """Return the services to plan, and the endpoints elsewhere with their positions."""
    local = tuple(one for one in intent.services if one.url is None)
    return local, tuple((index, one) for index, one in enumerate(intent.services) if one.url is not None)


def _get_gateway_settings(intent: Intent) -> dict[str, object]:
    lists = {"allow_hosts": [*intent.allow_hosts], "allow_origins": [*intent.allow_origins]}
    return {"routing": intent.routing, **{name: value or None for name, value in lists.items()}}


def explain_missing_network(placed: PlacedService, cards: int) -> str | None:
    """Say why a replica cannot span nodes when no network is named; `None` when it can or need not."""
    per_node = count_node_cards(placed)
    if cards <= per_node or (placed.pool.network or "none").lower() not in NO_NETWORK:
        return None
    return (
        f"one replica of {placed.name} needs {cards} GPUs, but a node of {placed.pool.name} has {per_node}, "
        "and the intent names no network between the nodes"
    )


def count_node_cards(placed: PlacedService) -> int:
    if placed.pool.gpus_per_node is not None:
        return placed.pool.gpus_per_node
    return max(1, placed.node.cards_per_node)


def make_slug(text: str, most: int = MOST_LETTERS) -> str:
    """Turn a text into a Kubernetes name: lower case letters, digits and dashes, starting with a letter."""
    letters = unicodedata.normalize("NFKD", text)  # Ü becomes U and two dots
    plain = "".join(one for one in letters.lower() if not unicodedata.combining(one))
    made = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:most].rstrip("-")
    return made if made[:1].isalpha() else f"m-{made}".rstrip("-")


def choose_names(wanted: Sequence[str]) -> list[str]:
    """Return a different Kubernetes name for each text."""
    found: list[str] = []
    for name in map(make_slug, wanted):
        number = 2
        unique = name
        while unique in found:
            unique, number = f"{name}-{number}", number + 1
        found.append(unique)
    return found


def choose_service_names(wanted: Sequence[str]) -> list[str]:
    """Return names whose objects have different names, too: chat-model is the name of a policy of chat."""
    taken, found = set(RESERVED_NAMES), []
    for slug in map(make_slug, wanted):
        number, name = 1, slug
        while not taken.isdisjoint(name + suffix for suffix in SUFFIXES):
            number += 1
            name = f"{slug[: MOST_LETTERS - len(str(number)) - 1].rstrip('-')}-{number}"
        taken.update(name + suffix for suffix in SUFFIXES)
        found.append(name)
    return found


def _describe_pool(intent: Intent, hardware: Hardware) -> NodePool:
    """Describe hypothetical hardware, or this machine, as a pool."""
    network = intent.hardware.get("network") if isinstance(intent.hardware, dict) else None
    first = hardware.accelerators[0] if hardware.accelerators else None
    if first is None:
        cores, ram_gb = hardware.cpu.logical_cores, hardware.memory.total_bytes / 2**30
        return NodePool(name="nodes", cpu=hardware.cpu.name, cores=cores, ram_gb=ram_gb, os=hardware.os)
    chip = find_accelerator_chip(first)
    return NodePool(
        name="nodes",
        accelerator=chip.name if chip is not None else first.name,
        count=len(hardware.accelerators),
        gpus_per_node=hardware.cards_per_node,
        network=str(network) if network is not None else None,
        ram_gb=hardware.memory.total_bytes / 2**30,
        cores=hardware.cpu.logical_cores,
        os=hardware.os,
    )


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
