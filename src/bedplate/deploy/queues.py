"""Kueue: a flavor per node type, a queue per tenant with its share, and one for shared services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bedplate.decide.portfolio import make_pool_machine
from bedplate.deploy.platform import Platform, make_slug
from bedplate.deploy.pods import Tree, write_metadata
from bedplate.deploy.service_containers import GIB, NODE_SHARE, NodeSelector, ServiceContainers, make_node_selector
from bedplate.deploy.yaml_writer import annotate
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values.intent import DeployTarget, NodePool

API = "kueue.x-k8s.io/v1beta2"
SHARED = "shared-services"
COHORT = "bedplate"
JOB_CORES, JOB_GIB = 4, 16
"""Reserved per service for the job that fills its volume and for the endpoint picker."""


@dataclass(frozen=True)
class Amount:
    cards: int = 0
    cores: int = 0
    gib: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cards + other.cards, self.cores + other.cores, self.gib + other.gib)


@dataclass(frozen=True)
class Flavor:
    """All nodes with the same GPUs, in any pool."""

    name: str
    selector: NodeSelector
    has: Amount


def choose_queue(unit: ServiceContainers, platform: Platform) -> str | None:
    """Return a service's queue: that of its only tenant, or the shared one."""
    if not platform.tenants:
        return None
    return make_slug(unit.placed.tenants[0]) if len(unit.placed.tenants) == 1 else SHARED


def write_queues(platform: Platform, units: Sequence[ServiceContainers]) -> list[Tree]:
    flavors = _list_flavors(platform.pools)
    takes = {flavor.name: _sum_usage(units, platform, flavor) for flavor in flavors}
    shares = _compute_shares(platform)
    found: list[Tree] = [_write_resource_flavor(flavor) for flavor in flavors]
    shared = any(choose_queue(unit, platform) == SHARED for unit in units)
    for name in [*([SHARED] if shared else []), *shares]:
        quotas: dict[str, tuple[Amount, str]] = {}
        for flavor in flavors:
            kept = takes[flavor.name].get(SHARED, Amount())
            if name == SHARED:
                quotas[flavor.name] = (kept, "used by services that several tenants share")
            else:
                quotas[flavor.name] = _compute_quota(name, shares, flavor, kept, takes[flavor.name].get(name, Amount()))
        made = _write_cluster_queue(name, quotas, flavors, _count_adapters(platform))
        found += [made, _write_local_queue(name, platform.deploy)]
    return found


def _count_adapters(platform: Platform) -> tuple[str, int] | None:
    """Grant one network adapter per node. They are not scarce, but Kueue admits no resource without a quota."""
    rdma = platform.deploy.rdma
    return (rdma, sum(pool.nodes for pool in platform.pools)) if rdma is not None else None


def _list_flavors(pools: Sequence[NodePool]) -> list[Flavor]:
    found: dict[str, Flavor] = {}
    for pool in pools:
        name, selector = _describe_node_type(pool)
        node = make_pool_machine(pool, pool.count)
        has = Amount(
            pool.count if selector.resource is not None else 0,
            int(NODE_SHARE * node.cpu.logical_cores * pool.nodes),
            int(NODE_SHARE * node.memory.total_bytes / GIB * pool.nodes),
        )
        found[name] = Flavor(name, selector, found[name].has + has if name in found else has)
    return list(found.values())


def _describe_node_type(pool: NodePool) -> tuple[str, NodeSelector]:
    node = make_pool_machine(pool, pool.count)
    chip = find_accelerator_chip(node.accelerators[0]) if node.accelerators else None
    selector = make_node_selector(node, chip)
    return make_slug(chip.name if chip is not None else pool.accelerator or f"cpu-{selector.values[0]}"), selector


def _sum_usage(units: Sequence[ServiceContainers], platform: Platform, flavor: Flavor) -> dict[str, Amount]:
    """Sum what the services of each queue use of a flavor at the planned number of replicas."""
    found: dict[str, Amount] = {}
    for unit in units:
        if _describe_node_type(unit.placed.pool)[0] != flavor.name:
            continue
        pods = unit.replicas * unit.nodes
        takes = Amount(unit.cards * pods, unit.cpu_cores * pods + JOB_CORES, unit.memory_bytes // GIB * pods + JOB_GIB)
        queue = str(choose_queue(unit, platform))
        found[queue] = found.get(queue, Amount()) + takes
    return found


def _compute_shares(platform: Platform) -> dict[str, float]:
    """Return each tenant's share; tenants without one divide what is left equally."""
    stated = {make_slug(tenant.name): tenant.share for tenant in platform.tenants}
    left = max(0.0, 1.0 - sum(share or 0.0 for share in stated.values()))
    unstated = sum(share is None for share in stated.values())
    return {name: share if share is not None else left / unstated for name, share in stated.items()}


def _compute_quota(
    name: str, shares: Mapping[str, float], flavor: Flavor, kept: Amount, own: Amount
) -> tuple[Amount, str]:
    """Return a tenant's quota of what the shared services leave, and the comment for it."""
    rest = Amount(*(max(0, has - took) for has, took in zip(_to_tuple(flavor.has), _to_tuple(kept), strict=True)))
    cards, cores, gib = (_divide(amount, shares)[name] for amount in _to_tuple(rest))
    words = f"{shares[name]:.0%} of the {rest.cards} not used by shared services" if kept.cards else (
        f"{shares[name]:.0%} of {rest.cards}"
    )  # fmt: skip
    if own.cards > cards:
        words += f"; its services need {own.cards} and borrow the rest"
    return Amount(cards, cores, gib), words


def _to_tuple(amount: Amount) -> tuple[int, int, int]:
    return amount.cards, amount.cores, amount.gib


def _divide(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divide into whole numbers by the largest remainder method."""
    exact = {name: count * share for name, share in shares.items()}
    found = {name: int(value + 1e-9) for name, value in exact.items()}
    left = round(sum(exact.values())) - sum(found.values())
    for name in sorted(exact, key=lambda one: (found[one] - exact[one], one))[: max(0, left)]:
        found[name] += 1
    return found


def _write_resource_flavor(flavor: Flavor) -> Tree:
    chosen = flavor.selector
    spec: Tree = {"nodeLabels": {chosen.label: chosen.values[0]}}
    if chosen.resource is not None:
        spec["tolerations"] = [{"key": chosen.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": flavor.name}, "spec": spec}


def _write_cluster_queue(
    name: str,
    quotas: Mapping[str, tuple[Amount, str]],
    flavors: Sequence[Flavor],
    adapters: tuple[str, int] | None,
) -> Tree:
    resources = list(dict.fromkeys(one.selector.resource for one in flavors if one.selector.resource is not None))
    listed: list[object] = []
    for flavor in flavors:
        amount, words = quotas[flavor.name]
        entries: list[object] = [
            {"name": "cpu", "nominalQuota": amount.cores},
            {"name": "memory", "nominalQuota": f"{amount.gib}Gi"},
        ]
        for resource in resources:
            mine = resource == flavor.selector.resource
            limit = flavor.has.cards - amount.cards if mine else None
            quota: object = annotate(amount.cards, words) if mine else 0
            entries.append({"name": resource, "nominalQuota": quota, "borrowingLimit": limit})
        if adapters is not None:
            entries.append({"name": adapters[0], "nominalQuota": annotate(adapters[1], "one per node")})
        listed.append({"name": flavor.name, "resources": entries})
    return {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {
            "cohortName": annotate(COHORT, "queues of one cohort lend each other unused quota"),
            "namespaceSelector": {},
            "queueingStrategy": "BestEffortFIFO",
            "preemption": {
                "reclaimWithinCohort": annotate("Any", "a queue preempts borrowers to get back its quota"),
                "withinClusterQueue": "LowerPriority",
            },
            "resourceGroups": [
                {
                    "coveredResources": ["cpu", "memory", *resources, *([adapters[0]] if adapters else [])],
                    "flavors": listed,
                }
            ],
        },
    }


def _write_local_queue(name: str, deploy: DeployTarget) -> Tree:
    return {
        "apiVersion": API, "kind": "LocalQueue", "metadata": write_metadata(name, deploy),
        "spec": {"clusterQueue": name},
    }  # fmt: skip
