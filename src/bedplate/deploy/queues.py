"""Kueue: a flavor per node type, a queue per tenant with its share, and one for shared services."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bedplate.decide.portfolio import make_pool_machine
from bedplate.deploy.platform import Platform, make_slug
from bedplate.deploy.pods import FIRST, NAMESPACE, Tree, write_metadata
from bedplate.deploy.service_containers import GIB, NODE_SHARE, NodeSelector, ServiceContainers, make_node_selector
from bedplate.deploy.yaml_writer import annotate
from bedplate.errors import UsageError
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values.intent import DeployTarget, NodePool, PlatformTenant

API = "kueue.x-k8s.io/v1beta2"
SHARED = "shared-services"
COHORT = "bedplate"
DEFAULT_QUEUE = "default"
"""Kueue gives workloads without a queue the one of this name, if their namespace has it: ApplyDefaultLocalQueue in
pkg/controller/jobframework/defaults.go of ff69552e."""
LEAST_TOTAL = 0.9999
"""The sum of shares that are all stated; thirds may be rounded."""
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
    flavors = list_flavors(platform.pools)
    takes = {flavor.name: _sum_usage(units, platform, flavor) for flavor in flavors}
    shares = _compute_shares(platform)
    tenants = {make_slug(tenant.name): tenant for tenant in platform.tenants}
    found: list[Tree] = [_write_resource_flavor(flavor) for flavor in flavors]
    found.append({"apiVersion": API, "kind": "Cohort", "metadata": {"name": COHORT, "labels": FIRST}, "spec": {}})
    shared = any(choose_queue(unit, platform) == SHARED for unit in units)
    for name in [*([SHARED] if shared else []), *shares]:
        quotas: dict[str, tuple[Amount, str]] = {}
        for flavor in flavors:
            kept = takes[flavor.name].get(SHARED, Amount())
            if name == SHARED:
                quotas[flavor.name] = (kept, "used by services that several tenants share")
            else:
                quotas[flavor.name] = _compute_quota(name, shares, flavor, kept, takes[flavor.name].get(name, Amount()))
        made = _write_cluster_queue(
            name, quotas, flavors, _count_adapters(platform), tenants.get(name), shares.get(name), platform.deploy
        )
        found += [made, _write_local_queue(name, platform.deploy)]
    return found


KUEUE_CONFIGURATION = "config.kueue.x-k8s.io/v1beta2"
MANAGED = {
    "Job": "batch/job", "Deployment": "deployment", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/leaderworkerset",
    "RayService": "ray.io/rayservice",
}  # fmt: skip
"""Kueue's names of the kinds with a queue (apis/config/v1beta2/configuration_types.go of 0.19). Pods of Dynamo, of
Deployments and of LeaderWorkerSets are managed as pods."""


def explain_configuration(kinds: Collection[str]) -> list[str]:
    """Return Kueue's configuration as lines of a comment: without it, quotas silently do not apply."""
    names = [name for kind, name in MANAGED.items() if kind in kinds]
    others = set(kinds) & {"Deployment", "LeaderWorkerSet", "DynamoGraphDeployment"}
    names += ["pod"] if others else []
    return [
        f"Needs Kueue {find_least_version(kinds)} or newer, with these frameworks in its configuration (the default):",
        f"  apiVersion: {KUEUE_CONFIGURATION}",
        "  kind: Configuration",
        "  integrations:",
        "    frameworks:",
        *(f"    - {name}" for name in names),
    ]


def find_least_version(kinds: Collection[str]) -> str:
    """Return the first version of Kueue that manages these kinds by default.

    config/components/manager/controller_manager_config.yaml: Deployments, LeaderWorkerSets and pods since 0.16,
    RayServices since 0.17; pkg/features/kube_features.go: elastic jobs, which RayServices are, since 0.18.
    """
    return "0.18" if "RayService" in kinds else "0.16"


def _count_adapters(platform: Platform) -> tuple[str, int] | None:
    """Grant one network adapter per node. They are not scarce, but Kueue admits no resource without a quota."""
    rdma = platform.deploy.rdma
    return (rdma, sum(pool.nodes for pool in platform.pools)) if rdma is not None else None


def list_flavors(pools: Sequence[NodePool]) -> list[Flavor]:
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
    selector = make_node_selector(node, chip, pool.node_label)
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


def name_tenant_namespace(tenant: PlatformTenant) -> str:
    return f"tenant-{make_slug(tenant.name)}"


def _compute_shares(platform: Platform) -> dict[str, float]:
    """Return each tenant's share; tenants without one divide what is left equally."""
    stated = {make_slug(tenant.name): tenant.share for tenant in platform.tenants}
    if len(stated) < len(platform.tenants):
        raise UsageError(
            "tenants: two of the names are the same as names of Kubernetes, which have lower case letters and dashes",
            hint="choose names that differ in letters or digits",
        )
    for name, words in (
        (SHARED, "the queue of services that several tenants share"),
        (DEFAULT_QUEUE, "the queue of workloads that name none"),
    ):
        if name in stated:
            raise UsageError(f"tenants: {name} is {words}", hint="choose another name")
    if None not in stated.values() and (total := sum(share or 0.0 for share in stated.values())) < LEAST_TOTAL:
        raise UsageError(
            f"tenants: the shares add up to {total:.0%}, so {1 - total:.0%} of the quota would belong to nobody",
            hint="let the shares add up to 1, or leave out the share of one tenant: it gets the rest",
        )
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
    label: object = chosen.values[0] if chosen.values else None
    if len(chosen.values) > 1:
        label = annotate(label, "if your nodes have another label, set node_label of the pool")
    spec: Tree = {"nodeLabels": {chosen.label: label}}
    if chosen.resource is not None:
        spec["tolerations"] = [{"key": chosen.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "apiVersion": API,
        "kind": "ResourceFlavor",
        "metadata": {"name": flavor.name, "labels": FIRST},
        "spec": spec,
    }


def _write_cluster_queue(
    name: str,
    quotas: Mapping[str, tuple[Amount, str]],
    flavors: Sequence[Flavor],
    adapters: tuple[str, int] | None,
    tenant: PlatformTenant | None,
    share: float | None,
    deploy: DeployTarget,
) -> Tree:
    """Write a tenant's queue, or with `tenant` None that of the services that several share."""
    spaces = [deploy.namespace or NAMESPACE, *([name_tenant_namespace(tenant)] if tenant is not None else [])]
    borrow = tenant.borrow if tenant is not None and tenant.borrow is not None else 1.0
    lend = tenant.lend if tenant is not None else None
    resources = list(dict.fromkeys(one.selector.resource for one in flavors if one.selector.resource is not None))
    listed: list[object] = []
    for flavor in flavors:
        amount, words = quotas[flavor.name]
        entries: list[object] = [
            {"name": "cpu", "nominalQuota": amount.cores, **_limit_lending(amount.cores, lend)},
            {"name": "memory", "nominalQuota": f"{amount.gib}Gi", **_limit_lending(amount.gib, lend, "Gi")},
        ]
        for resource in resources:
            mine = resource == flavor.selector.resource
            limit = int(borrow * (flavor.has.cards - amount.cards) + 1e-9) if mine else None
            quota: object = annotate(amount.cards, words) if mine else 0
            lent = _limit_lending(amount.cards, lend) if mine else {}
            entries.append({"name": resource, "nominalQuota": quota, "borrowingLimit": limit, **lent})
        if adapters is not None:
            entries.append({"name": adapters[0], "nominalQuota": annotate(adapters[1], "one per node")})
        listed.append({"name": flavor.name, "resources": entries})
    return {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": name, "labels": FIRST},
        "spec": {
            "cohortName": annotate(COHORT, "queues of one cohort lend each other unused quota"),
            "namespaceSelector": {
                "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": spaces}]
            },
            "fairSharing": annotate(
                {"weight": format_weight(share)}, "unused quota is lent in proportion to the shares"
            )
            if share is not None
            else None,
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


def _limit_lending(amount: int, lend: float | None, unit: str = "") -> Tree:
    """Return what others may borrow at most of a quota while it is not used; nothing: all of it."""
    if lend is None:
        return {}
    most = int(lend * amount + 1e-9)
    return {"lendingLimit": f"{most}{unit}" if unit else most}


def format_weight(share: float) -> str:
    """A weight as a quantity of Kubernetes: thousandths."""
    return f"{max(1, round(1000 * share))}m"


def _write_local_queue(name: str, deploy: DeployTarget) -> Tree:
    return {
        "apiVersion": API, "kind": "LocalQueue", "metadata": write_metadata(name, deploy, FIRST),
        "spec": {"clusterQueue": name},
    }  # fmt: skip
