"""Kubernetes manifests: a folder for `kubectl apply -k`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bedplate._version import __version__
from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.deploy.gateway import inference_pool
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import (
    NAMESPACE,
    Tree,
    counted,
    engine_container,
    filling_job,
    labels_of,
    metadata,
    model_claim,
    model_labels,
    pod_spec,
    selecting,
)
from bedplate.deploy.queues import queue_of, queues
from bedplate.deploy.scaling import pod_monitor, scaled_object
from bedplate.deploy.served import GIB, PORT, Served, served
from bedplate.deploy.yaml_writer import document, documents, why
from bedplate.errors import AnswerIsNo
from bedplate.values import Launch
from bedplate.values.intent import Deploy

Files = dict[str, str]
MONITORING = "monitoring"
LEADER, INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"


def kubernetes(platform: Platform) -> Files:
    units = [served(placed, platform.deploy) for placed in platform.services]
    return manifests(platform, units, {unit.name: workload(unit, platform) for unit in units})


def manifests(
    platform: Platform,
    units: Sequence[Served],
    workloads: Mapping[str, Sequence[Tree]],
    *,
    plain_reasons: Mapping[str, str] | None = None,
    more_files: Files | None = None,
) -> Files:
    """Write all files around the workloads, which differ between plain Kubernetes and its orchestrators.

    `plain_reasons` gives, by service, why an orchestrator does not run it and it is a plain workload.
    """
    deploy = platform.deploy
    files = {"namespace.yaml": documents(list(_namespace(deploy)))}
    plain = [unit for unit in units if _is_plain(workloads[unit.name])]
    for unit in units:
        parts = [*_before(unit, platform, unit in plain), *workloads[unit.name]]
        heading = head_of(unit)
        if plain_reasons and unit.name in plain_reasons:
            heading += f"\n{plain_reasons[unit.name]}: deployed as a plain workload."
        files[f"{unit.name}.yaml"] = documents(parts, heading)
    files["network.yaml"] = documents([*_network(units, deploy, plain)])
    if watched := [pod_monitor(unit, deploy, unit.metrics.path) for unit in plain if unit.metrics is not None]:
        files["monitoring.yaml"] = documents(watched)
    if scaled := [found for unit in plain if (found := scaled_object(unit, deploy)) is not None]:
        files["scaling.yaml"] = documents(scaled)
    if platform.tenants:
        files["queues.yaml"] = documents(queues(platform, units))
    if deploy.gateway is not None and plain:
        files["gateway.yaml"] = documents([part for unit in plain for part in inference_pool(unit, deploy, len(plain))])
    files |= more_files or {}
    files["kustomization.yaml"] = kustomization(platform, units, files)
    return files | built_images(units)


def head_of(unit: Served) -> str:
    placed, decision = unit.placed, unit.placed.decision
    layout = decision.parallelism
    ways = [f"{name} {size}" for name, size in (
        ("tensor parallel", layout.tensor), ("pipeline parallel", layout.pipeline), ("expert parallel", layout.expert),
        ("attention data parallel", layout.attention_data),
    ) if size > 1]  # fmt: skip
    shape = f", {', '.join(ways)}" if ways else ""
    first = decision.reasons[0] if decision.reasons else None
    why_this = f"\nWhy: {first.text} ({first.rule})" if first is not None else ""
    return (
        f"{decision.model} ({decision.quantization}) with {unit.engine.name} {unit.plan.engine_version}{shape}, "
        f"{counted(unit.replicas, 'replica')} on {placed.pool.accelerator or placed.pool.cpu or 'CPUs'}.{why_this}"
    )


def workload(unit: Served, platform: Platform) -> list[Tree]:
    """Write a Deployment, or a LeaderWorkerSet if a replica spans nodes, and its Service."""
    deploy, queue = platform.deploy, queue_of(unit, platform)
    made = leader_worker_set(unit, deploy, queue) if unit.nodes > 1 else deployment(unit, deploy, queue)
    found = [made, service(unit, deploy)]
    return [*found, disruption_budget(unit, deploy)] if unit.replicas > 1 else found


def deployment(unit: Served, deploy: Deploy, queue: str | None) -> Tree:
    can_surge = unit.most_replicas > unit.replicas
    surge = {"maxSurge": 1 if can_surge else 0, "maxUnavailable": 0 if can_surge else 1}
    reason = "the pool has capacity for one more replica" if can_surge else (
        "the pool has no free GPUs: an old pod must stop before a new one starts"
    )  # fmt: skip
    template = {"metadata": {"labels": labels_of(unit)}, "spec": pod_spec(unit, deploy, engine_container(unit))}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(unit.name, deploy, labels_of(unit, queue)),
        "spec": {
            **replicas(unit, deploy),
            "strategy": why({"type": "RollingUpdate", "rollingUpdate": surge}, reason),
            "progressDeadlineSeconds": unit.start_failures * 10 + 300,
            "selector": {"matchLabels": selecting(unit)},
            "template": template,
        },
    }


def replicas(unit: Served, deploy: Deploy) -> Tree:
    """Return the replica count, or nothing if it is autoscaled: applying the file would reset it."""
    if scaled_object(unit, deploy) is not None:
        return {}
    load = f"{unit.placed.decision.in_flight:,} concurrent requests, {unit.at_once:,} per replica"
    fixed = "the pool has no capacity for more" if unit.metrics is not None else "the engine has no metrics to scale by"
    return {"replicas": why(unit.replicas, f"{load}; {fixed}")}


def leader_worker_set(unit: Served, deploy: Deploy, queue: str | None) -> Tree:
    leader_argv, worker_argv = on_nodes(unit)
    rdma = deploy.rdma
    leader = engine_container(unit, leader_argv, rdma=rdma)
    worker = engine_container(unit, worker_argv, answers=False, rdma=rdma)
    labels = labels_of(unit)
    group: Tree = {
        "size": why(unit.nodes, f"nodes per replica, {unit.cards} GPUs on each"),
        "restartPolicy": why(
            "RecreateGroupOnPodRestart", "a lost rank cannot rejoin, so all pods of the replica restart"
        ),
        "leaderTemplate": {
            "metadata": {"labels": labels | {"role": "leader"}},
            "spec": pod_spec(unit, deploy, leader),
        },
        "workerTemplate": {"metadata": {"labels": labels | {"role": "worker"}}, "spec": pod_spec(unit, deploy, worker)},
    }
    noted = None
    if rdma is None:
        noted = (
            "Without deploy.rdma the pods request no network adapter, and traffic between the nodes uses the pod "
            "network: slower than the plan's estimate."
        )
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(unit.name, deploy, labels_of(unit, queue)),
        "spec": {
            **replicas(unit, deploy),
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": why(group, noted) if noted else group,
        },
    }


def on_nodes(unit: Served) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the commands of a replica's leader pod and of its worker pods."""
    from dataclasses import replace

    first, other = (_on_node(unit, rank) for rank in (0, 1))
    if first is None or other is None:
        starter = unit.engine.node_starter
        raise AnswerIsNo(
            f"{unit.engine.name} cannot start on several nodes by itself, but {unit.name} needs {unit.nodes} nodes",
            cause=f"its ranks must be started by {starter}" if starter is not None else None,
            hint=f"use --emit dynamo, whose operator starts the ranks, or --engine {STANDARD_ENGINE}",
        )
    return replace(unit, launch=first).program, replace(unit, launch=other).program


def _on_node(unit: Served, rank: int) -> Launch | None:
    from bedplate.values import replaced

    made = unit.engine.launch_on_node(unit.plan, PORT, nodes=unit.nodes, rank=rank, leader=LEADER)
    if made is None or unit.engine.node_starter is not None:
        return None
    extra = list(made.argv[len(unit.engine.launch(unit.plan, PORT).argv) :])
    if rank:
        extra[extra.index("--node-rank") + 1] = INDEX
    return replaced(unit.launch, argv=(*unit.launch.argv, *extra))


def service(unit: Served, deploy: Deploy) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(unit.name, deploy, selecting(unit)),
        "spec": {
            "selector": selecting(unit, leader=True),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def disruption_budget(unit: Served, deploy: Deploy) -> Tree:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(unit.name, deploy),
        "spec": {"maxUnavailable": unit.nodes, "selector": {"matchLabels": selecting(unit)}},
    }


def _before(unit: Served, platform: Platform, plain: bool) -> Iterator[Tree]:
    """Yield what a workload refers to: service account, settings, volume and the job that fills it."""
    deploy = platform.deploy
    yield {
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(unit.name, deploy),
        "automountServiceAccountToken": False,
    }  # fmt: skip
    if unit.files and plain:
        yield {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(unit.name, deploy), "data": dict(unit.files),
        }  # fmt: skip
    yield volume_claim(unit, deploy)
    yield filling_job(unit, deploy, queue_of(unit, platform))


def volume_claim(unit: Served, deploy: Deploy) -> Tree:
    shared = unit.most_replicas > 1 or unit.nodes > 1
    reason = "pods on several nodes read it" if shared else "a single pod reads it"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(model_claim(unit), deploy),
        "spec": {
            "accessModes": why(["ReadWriteMany" if shared else "ReadWriteOnce"], reason),
            "storageClassName": deploy.storage_class,
            "resources": {
                "requests": {
                    "storage": why(
                        f"{unit.volume_bytes // GIB}Gi",
                        "downloaded and converted weights, plus 20% headroom",
                    )
                }
            },
        },
    }


def _namespace(deploy: Deploy) -> Iterator[Tree]:
    level = "privileged" if deploy.rdma is not None else "restricted"
    reason = "RDMA needs IPC_LOCK, which only this level allows" if level == "privileged" else "no pod needs more"
    yield {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": deploy.namespace or NAMESPACE,
            "labels": {"pod-security.kubernetes.io/enforce": why(level, reason)},
        },
    }


def _network(units: Sequence[Served], deploy: Deploy, plain: Sequence[Served]) -> Iterator[Tree]:
    """Yield network policies: deny by default, then allow clients, Prometheus, DNS and a replica's own ranks.

    Pods that an orchestrator runs may also reach each other and the API server.
    """
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    yield {
        **kind,
        "metadata": metadata("default-deny", deploy),
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
    names = {"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}
    dns = {"to": [{"namespaceSelector": _named("kube-system")}], "ports": list(names)}
    http = {"port": PORT, "protocol": "TCP"}
    for unit in units:
        if unit not in plain:
            yield from _orchestrated(unit, deploy, dns)
            continue
        own = {"matchLabels": selecting(unit)}
        callers: list[Tree] = [{"podSelector": {}}, {"namespaceSelector": _named(MONITORING)}]
        if deploy.gateway is not None and "/" in deploy.gateway:
            callers.append({"namespaceSelector": _named(deploy.gateway.partition("/")[0])})
        inside: list[Tree] = [{"from": callers, "ports": [http]}]
        outside: list[Tree] = [dns]
        if unit.nodes > 1:
            inside.append({"from": [{"podSelector": own}]})
            outside.append({"to": [{"podSelector": own}]})
        yield {
            **kind,
            "metadata": metadata(unit.name, deploy),
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": why(inside, "clients in this namespace, and Prometheus"),
                "egress": why(outside, "DNS only: the weights are on the volume"),
            },
        }
        yield _filling_policy(unit, deploy, dns)


def _orchestrated(unit: Served, deploy: Deploy, dns: Tree) -> Iterator[Tree]:
    own = {"app.kubernetes.io/name": unit.engine.id.replace(".", "-"), "app.kubernetes.io/instance": unit.name}
    inside = [{"from": [{"podSelector": {}}, {"namespaceSelector": _named(MONITORING)}]}]
    api = [{"port": port, "protocol": "TCP"} for port in (443, 6443)]
    yield {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(unit.name, deploy),
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": why(inside, "clients and workers in this namespace, and Prometheus"),
            "egress": why(
                [dns, {"to": [{"podSelector": {}}]}, {"ports": [*api, {"port": 4222, "protocol": "TCP"}]}],
                "pods in this namespace, the API server (discovery), NATS, and the model hub",
            ),
        },
    }


def _filling_policy(unit: Served, deploy: Deploy, dns: Tree) -> Tree:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model_claim(unit), deploy),
        "spec": {
            "podSelector": {"matchLabels": model_labels(unit)},
            "policyTypes": ["Ingress", "Egress"],
            "egress": why([dns, {"ports": [{"port": 443, "protocol": "TCP"}]}], "the model hub"),
        },
    }


def _named(namespace: str) -> Tree:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _is_plain(parts: Sequence[Tree]) -> bool:
    """Whether the pods are written here; an operator monitors and scales the pods that it creates."""
    return any(part["kind"] in ("Deployment", "LeaderWorkerSet") for part in parts)


def kustomization(platform: Platform, units: Sequence[Served], files: Files) -> str:
    needs = needed(files)
    head = f"Generated by bedplate {__version__}. Apply with: kubectl apply -k ."
    if needs:
        head += f"\nThe cluster needs {', '.join(needs)}."
    head += f"\nSecrets are not included. For gated models: {_create('hf-token', 'token')}"
    images = [
        {"name": unit.image.name.partition(":")[0], "newTag": unit.image.name.rpartition(":")[2]}
        for unit in units
        if unit.image.dockerfile is not None
    ]
    tree: Tree = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": None,
        "resources": [name for name in files if name.endswith(".yaml") and "/" not in name],
    }
    if images:
        unique = list({image["name"]: image for image in images}.values())
        tree["images"] = why(unique, "built from images/: set newName to the registry that you pushed them to")
    return document(tree, head)


def _create(name: str, key: str) -> str:
    return f"kubectl create secret generic {name} --from-literal={key}=…"


NEEDS = {
    "keda.sh/": "KEDA", "monitoring.coreos.com/": "the Prometheus operator", "kueue.x-k8s.io/": "Kueue 0.15 or newer",
    "leaderworkerset.x-k8s.io/": "LeaderWorkerSet", "inference.networking.k8s.io/": "Gateway API with its inference "
    "extension", "nvidia.com/v1beta1": "the Dynamo operator", "ray.io/": "KubeRay",
}  # fmt: skip


def needed(files: Files) -> list[str]:
    text = "\n".join(files.values())
    return [what for group, what in NEEDS.items() if f"apiVersion: {group}" in text]


def built_images(units: Sequence[Served]) -> Files:
    """Return the build contexts of images that are not published."""
    found: Files = {}
    for unit in units:
        if unit.image.dockerfile is not None:
            folder = f"images/{unit.engine.id}"
            found[f"{folder}/Dockerfile"] = unit.image.dockerfile
            found |= {f"{folder}/{name}": text for name, text in unit.image.files}
    return found
