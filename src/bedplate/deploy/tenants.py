"""Tenants on a cluster: a namespace for each with rights, limits, network policies and its queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bedplate.deploy import endpoint
from bedplate.deploy.platform import Platform, make_slug
from bedplate.deploy.pods import FIRST, NAMESPACE, Tree
from bedplate.deploy.queues import API, DEFAULT_QUEUE, Flavor, list_flavors, name_tenant_namespace
from bedplate.deploy.service_containers import PORT
from bedplate.deploy.yaml_writer import annotate
from bedplate.errors import UsageError
from bedplate.values.intent import PlatformTenant

PRIORITIES = {
    "production": (0, "services"),
    "interactive": (-100, "notebooks and experiments"),
    "batch": (-1000, "jobs that can wait"),
}
"""Priorities of workloads: the value and the description. Emitted services have no class, and so 0: not every kind
passes the class on to its pods."""
OWN_OBJECTS = {
    "": ["pods", "pods/log", "pods/exec", "pods/portforward", "services", "configmaps", "secrets",
         "persistentvolumeclaims", "events"],
    "apps": ["deployments", "statefulsets", "replicasets"],
    "batch": ["jobs", "cronjobs"],
    "ray.io": ["rayjobs", "rayclusters", "rayservices"],
    "leaderworkerset.x-k8s.io": ["leaderworkersets"],
}  # fmt: skip
"""What members of a tenant may change in their namespace, by API group. Quotas and policies are not among them."""
READ_OBJECTS = {
    "": ["resourcequotas", "limitranges"],
    "kueue.x-k8s.io": ["localqueues", "workloads"],
    "networking.k8s.io": ["networkpolicies"],
}
READ, CHANGE = ["get", "list", "watch"], ["create", "update", "patch", "delete", "deletecollection"]


def explain_tenants(platform: Platform) -> list[str]:
    first = platform.tenants[0]
    space = name_tenant_namespace(first)
    return [
        "A namespace for each tenant. Its members are the users of a group of your identity provider, for example "
        f"{first.group or first.name}.",
        "Members start workloads with these labels; within a tenant, a higher priority preempts a lower one:",
        f"  kueue.x-k8s.io/queue-name: {make_slug(first.name)}",
        f"  kueue.x-k8s.io/priority-class: {' | '.join(PRIORITIES)}",
        f"  kubectl auth can-i create jobs -n {space} --as=someone --as-group={first.group or first.name}",
        f"Workloads without a queue get the queue {DEFAULT_QUEUE} of their namespace, so none runs without quota.",
        "Keep manageJobsWithoutQueueName and managedJobsNamespaceSelector of Kueue's configuration at their defaults:",
        "otherwise gateways wait for a queue, or quotas of services do not apply. To lend quota by the shares, add:",
        "  fairSharing: {}",
    ]


def write_tenants(platform: Platform) -> list[Tree]:
    flavors = list_flavors(platform.pools)
    found: list[Tree] = [
        {
            "apiVersion": API,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": name, "labels": FIRST},
            "value": value,
            "description": words,
        }
        for name, (value, words) in PRIORITIES.items()
    ]
    home = platform.deploy.namespace or NAMESPACE
    for tenant in platform.tenants:
        if name_tenant_namespace(tenant) == home:
            raise UsageError(
                f"deploy.namespace: {home} is the namespace of tenant {tenant.name}",
                hint="the services need a namespace of their own",
            )
        found += _write_tenant(tenant, platform, flavors)
    return found


def _write_tenant(tenant: PlatformTenant, platform: Platform, flavors: Sequence[Flavor]) -> Iterator[Tree]:
    space, name = name_tenant_namespace(tenant), make_slug(tenant.name)
    yield {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": space,
            "labels": {
                **FIRST,
                "bedplate/tenant": name,
                "pod-security.kubernetes.io/enforce": "restricted",
            },
        },
    }
    yield from _write_rights(tenant, space)
    yield _write_quota(space, flavors)
    yield {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "defaults", "namespace": space, "labels": FIRST},
        "spec": {
            "limits": [
                {
                    "type": "Container",
                    "defaultRequest": annotate(
                        {"cpu": "500m", "memory": "1Gi"}, "for containers that state none: the quota needs a figure"
                    ),
                    "default": {"memory": "1Gi"},
                }
            ]
        },
    }
    yield from _write_policies(platform, space)
    for queue in (name, DEFAULT_QUEUE):
        yield {
            "apiVersion": API, "kind": "LocalQueue", "metadata": {"name": queue, "namespace": space, "labels": FIRST},
            "spec": {"clusterQueue": name},
        }  # fmt: skip


def _write_rights(tenant: PlatformTenant, space: str) -> Iterator[Tree]:
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [api], "resources": names, "verbs": READ + CHANGE} for api, names in OWN_OBJECTS.items()]
    rules += [{"apiGroups": [api], "resources": names, "verbs": READ} for api, names in READ_OBJECTS.items()]
    yield {
        "apiVersion": f"{group}/v1",
        "kind": "Role",
        "metadata": {"name": "member", "namespace": space, "labels": FIRST},
        "rules": annotate(rules, "quotas, limits, network policies and rights belong to the platform"),
    }
    yield {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "members", "namespace": space, "labels": FIRST},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "member"},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": tenant.group or tenant.name}],
    }


def _write_quota(space: str, flavors: Sequence[Flavor]) -> Tree:
    """Write the most that a tenant can have with everything that it may borrow. Kueue applies the shares."""
    hard: Tree = {
        "requests.cpu": annotate(
            sum(flavor.has.cores for flavor in flavors), "all that could be borrowed: the shares are in the queues"
        ),
        "requests.memory": f"{sum(flavor.has.gib for flavor in flavors)}Gi",
    }
    for flavor in flavors:
        if flavor.selector.resource is not None:
            key = f"requests.{flavor.selector.resource}"
            hard[key] = hard.get(key, 0) + flavor.has.cards
    hard |= {
        "pods": 500,
        "persistentvolumeclaims": 50,
        "services.loadbalancers": annotate(0, "clients from outside come through the platform's endpoint"),
        "services.nodeports": 0,
    }
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tenant", "namespace": space, "labels": FIRST},
        "spec": {"hard": hard},
    }


def _write_policies(platform: Platform, space: str) -> Iterator[Tree]:
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    yield {
        **kind,
        "metadata": {"name": "default-deny", "namespace": space, "labels": FIRST},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
    names = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    kube = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    outside: list[Tree] = [{"to": [{"namespaceSelector": kube}], "ports": names}, {"to": [{"podSelector": {}}]}]
    words = "DNS, and pods of the same tenant"
    if platform.deploy.endpoint:
        home = {"matchLabels": {"kubernetes.io/metadata.name": platform.deploy.namespace or NAMESPACE}}
        gateway: Tree = {"namespaceSelector": home, "podSelector": {"matchLabels": endpoint.SELECTOR}}
        outside.append({"to": [gateway], "ports": [{"port": PORT, "protocol": "TCP"}]})
        words = "DNS, pods of the same tenant, and the endpoint of the platform"
    yield {
        **kind,
        "metadata": {"name": "own", "namespace": space, "labels": FIRST},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": annotate([{"from": [{"podSelector": {}}]}], "pods of the same tenant"),
            "egress": annotate(outside, words),
        },
    }
