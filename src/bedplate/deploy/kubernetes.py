"""Kubernetes manifests: a folder for `kubectl apply -k`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from bedplate._version import __version__
from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.deploy.endpoint import SELECTOR, explain_endpoint, name_image, write_endpoint
from bedplate.deploy.gateway import select_data_planes, write_gateway
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import (
    FIRST,
    NAMESPACE,
    Tree,
    format_count,
    make_labels,
    make_model_labels,
    make_selector,
    name_model,
    name_model_claim,
    write_engine_container,
    write_metadata,
    write_model_job,
    write_pod_spec,
)
from bedplate.deploy.queues import choose_queue, explain_configuration, find_least_version, write_queues
from bedplate.deploy.scaling import find_metrics_namespace, write_pod_monitor, write_scaled_object
from bedplate.deploy.service_containers import GIB, PATIENCE, PORT, ServiceContainers, describe_containers
from bedplate.deploy.tenants import explain_tenants, write_tenants
from bedplate.deploy.yaml_writer import annotate, write_document, write_documents
from bedplate.errors import NotPossible
from bedplate.values import Launch
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import quote_shell
from bedplate.values.units import format_seconds

Files = dict[str, str]
OWN_FILES = (
    "namespace", "network", "monitoring", "scaling", "queues", "tenants", "gateway", "endpoint", "kustomization",
)  # fmt: skip
LEADER, INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"


def write_kubernetes(platform: Platform) -> Files:
    units = [describe_containers(placed, platform.deploy) for placed in platform.services]
    return write_manifests(platform, units, {unit.name: write_workload(unit, platform) for unit in units})


def write_manifests(
    platform: Platform,
    units: Sequence[ServiceContainers],
    workloads: Mapping[str, Sequence[Tree]],
    *,
    plain_reasons: Mapping[str, str] | None = None,
    more_files: Files | None = None,
    operator: Tree | None = None,
    backends: Mapping[str, tuple[str, int]] | None = None,
) -> Files:
    """Write all files around the workloads, which differ between plain Kubernetes and its orchestrators.

    `plain_reasons` gives, by service, why an orchestrator does not run it and it is a plain workload; `operator`
    selects the operator's pods, if they call the service; `backends` gives, by service, the operator's Service.
    """
    deploy = platform.deploy
    plain = [unit for unit in units if _is_plain(workloads[unit.name])]
    injected = any(unit.nodes > 1 and unit not in plain and unit.engine.dynamo is not None for unit in units)
    files = {"namespace.yaml": write_documents(list(_write_namespace(deploy, injected and backends is not None)))}
    for unit in units:
        parts = [*_write_prerequisites(unit, platform, unit in plain), *workloads[unit.name]]
        heading = write_heading(unit)
        if plain_reasons and unit.name in plain_reasons:
            heading.append(f"{plain_reasons[unit.name]}: deployed as a plain workload.")
        if unit not in plain or unit.engine.key_variable is None:
            heading.append("No API key is checked, also if the Secret engine-key exists: keys need a gateway in front.")
        files[name_file(unit.name)] = write_documents(parts, heading)
    files["network.yaml"] = write_documents([*_write_network_policies(units, deploy, plain, operator)])
    if watched := [write_pod_monitor(unit, deploy, unit.metrics.path) for unit in plain if unit.metrics is not None]:
        files["monitoring.yaml"] = write_documents(watched)
    if scaled := [found for unit in plain if (found := write_scaled_object(unit, deploy)) is not None]:
        files["scaling.yaml"] = write_documents(scaled)
    if platform.tenants:
        kinds = {"Job", *(str(part["kind"]) for parts in workloads.values() for part in parts)}
        files["queues.yaml"] = write_documents(write_queues(platform, units), explain_configuration(kinds))
        files["tenants.yaml"] = write_documents(write_tenants(platform), explain_tenants(platform))
    if deploy.gateway is not None:
        served = dict(backends or {}) | {unit.name: (unit.name, 80) for unit in plain}
        files["gateway.yaml"] = write_documents(list(write_gateway(units, deploy, served, plain)))
    if deploy.endpoint:
        reached = {unit.name: (unit.name, 80) for unit in units} | dict(backends or {})
        reached |= {unit.name: (unit.name, 80) for unit in plain}
        parts = write_endpoint(platform, units, reached, plain)
        files["endpoint.yaml"] = write_documents(parts, explain_endpoint(platform))
    files |= more_files or {}
    files["kustomization.yaml"] = write_kustomization(platform, units, files)
    return files | write_image_contexts(units)


def name_file(service: str) -> str:
    """Name the file of a service; the platform's own files have fixed names."""
    return f"service-{service}.yaml" if service in OWN_FILES or service.startswith("service-") else f"{service}.yaml"


def write_heading(unit: ServiceContainers) -> list[str]:
    placed, decision = unit.placed, unit.placed.decision
    layout = decision.parallelism
    ways = [f"{name} {size}" for name, size in (
        ("tensor parallel", layout.tensor), ("pipeline parallel", layout.pipeline), ("expert parallel", layout.expert),
        ("attention data parallel", layout.attention_data),
    ) if size > 1]  # fmt: skip
    shape = f", {', '.join(ways)}" if ways else ""
    first = decision.reasons[0] if decision.reasons else None
    what = (
        f"{decision.model} ({decision.quantization}) with {unit.engine.name} {unit.plan.engine_version}{shape}, "
        f"{format_count(unit.replicas, 'replica')} on {placed.pool.accelerator or placed.pool.cpu or 'CPUs'}."
    )
    load = [f"Load: {decision.load.description}."] if decision.load and unit.plan.workload.depends_on_latency else []
    return [what, *([f"Why: {first.text} ({first.rule})"] if first is not None else []), *load]


def write_workload(unit: ServiceContainers, platform: Platform) -> list[Tree]:
    """Write a Deployment, or a LeaderWorkerSet if a replica spans nodes, and its Service."""
    deploy, queue = platform.deploy, choose_queue(unit, platform)
    made = write_leader_worker_set(unit, deploy, queue) if unit.nodes > 1 else write_deployment(unit, deploy, queue)
    found = [made, write_service(unit, deploy)]
    return [*found, write_disruption_budget(unit, deploy)] if unit.replicas > 1 else found


def write_deployment(unit: ServiceContainers, deploy: DeployTarget, queue: str | None) -> Tree:
    can_surge = unit.most_replicas > unit.replicas
    surge = {"maxSurge": 1 if can_surge else 0, "maxUnavailable": 0 if can_surge else 1}
    reason = "the pool has capacity for one more replica" if can_surge else (
        "the pool has no free GPUs: an old pod must stop before a new one starts"
    )  # fmt: skip
    template = {
        "metadata": {"labels": make_labels(unit)},
        "spec": write_pod_spec(unit, deploy, write_engine_container(unit)),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": write_metadata(unit.name, deploy, make_labels(unit, queue)),
        "spec": {
            **write_replicas(unit, deploy),
            "strategy": annotate({"type": "RollingUpdate", "rollingUpdate": surge}, reason),
            "progressDeadlineSeconds": annotate(
                math.ceil(PATIENCE * unit.prepare_s) + unit.start_failures * 10 + 300,
                f"{format_seconds(unit.prepare_s)} to put the model onto the volume, if it is not there yet; "
                f"{unit.load_words}",
            ),
            "selector": {"matchLabels": make_selector(unit)},
            "template": template,
        },
    }


def write_replicas(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    """Return the replica count, or nothing if it is autoscaled: applying the file would reset it."""
    if write_scaled_object(unit, deploy) is not None:
        return {}
    load = f"{unit.placed.decision.in_flight:,} concurrent requests, {unit.request_capacity:,} per replica"
    fixed = "the pool has no capacity for more" if unit.metrics is not None else "the engine has no metrics to scale by"
    return {"replicas": annotate(unit.replicas, f"{load}; {fixed}")}


def write_leader_worker_set(unit: ServiceContainers, deploy: DeployTarget, queue: str | None) -> Tree:
    leader_argv, worker_argv = build_node_commands(unit)
    rdma = deploy.rdma
    leader = write_engine_container(unit, leader_argv, rdma=rdma)
    worker = write_engine_container(unit, worker_argv, answers=False, rdma=rdma)
    labels = make_labels(unit)
    group: Tree = {
        "size": annotate(unit.nodes, f"nodes per replica, {unit.cards} GPUs on each"),
        "restartPolicy": annotate(
            "RecreateGroupOnPodRestart", "a lost rank cannot rejoin, so all pods of the replica restart"
        ),
        "leaderTemplate": {
            "metadata": {"labels": labels | {"role": "leader"}},
            "spec": write_pod_spec(unit, deploy, leader),
        },
        "workerTemplate": {
            "metadata": {"labels": labels | {"role": "worker"}},
            "spec": write_pod_spec(unit, deploy, worker),
        },
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
        "metadata": write_metadata(unit.name, deploy, make_labels(unit, queue)),
        "spec": {
            **write_replicas(unit, deploy),
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": annotate(group, noted) if noted else group,
        },
    }


def build_node_commands(
    unit: ServiceContainers,
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the commands of a replica's leader pod and of its worker pods."""
    from dataclasses import replace

    first, other = (_launch_on_node(unit, rank) for rank in (0, 1))
    if first is None or other is None:
        starter = unit.engine.node_starter
        raise NotPossible(
            f"{unit.engine.name} cannot start on several nodes by itself, but {unit.name} needs {unit.nodes} nodes",
            cause=f"its ranks must be started by {starter}" if starter is not None else None,
            hint=f"use --emit dynamo, whose operator starts the ranks, or --engine {STANDARD_ENGINE}",
        )
    return replace(unit, launch=first).program, replace(unit, launch=other).program


def _launch_on_node(unit: ServiceContainers, rank: int) -> Launch | None:
    from bedplate.values import replace_fields

    made = unit.engine.launch_on_node(unit.plan, PORT, nodes=unit.nodes, rank=rank, leader=LEADER)
    if made is None or unit.engine.node_starter is not None:
        return None
    extra = list(made.argv[len(unit.engine.launch(unit.plan, PORT).argv) :])
    if rank:
        extra[extra.index("--node-rank") + 1] = INDEX
    return replace_fields(unit.launch, argv=(*unit.launch.argv, *extra))


def write_service(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": write_metadata(unit.name, deploy, make_selector(unit)),
        "spec": {
            "selector": make_selector(unit, leader=True),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def write_disruption_budget(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": write_metadata(unit.name, deploy),
        "spec": {"maxUnavailable": unit.nodes, "selector": {"matchLabels": make_selector(unit)}},
    }


def _write_prerequisites(unit: ServiceContainers, platform: Platform, plain: bool) -> Iterator[Tree]:
    """Yield what a workload refers to: service account, settings, volume and the job that fills it."""
    deploy = platform.deploy
    yield {
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": write_metadata(unit.name, deploy, FIRST),
        "automountServiceAccountToken": False,
    }  # fmt: skip
    if unit.files and plain:
        yield {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": write_metadata(unit.name, deploy),
            "data": dict(unit.files),
        }  # fmt: skip
    yield write_volume_claim(unit, deploy)
    yield write_model_job(unit, deploy, choose_queue(unit, platform))


def write_volume_claim(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    reason = "a single pod reads it" if unit.access_mode == "ReadWriteOnce" else "pods on several nodes read it"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": write_metadata(name_model_claim(unit), deploy, make_model_labels(unit) | FIRST),
        "spec": {
            "accessModes": annotate([unit.access_mode], reason),
            "storageClassName": unit.storage_class,
            "resources": {
                "requests": {
                    "storage": annotate(
                        f"{unit.volume_bytes // GIB}Gi",
                        "downloaded and converted weights, plus 20% headroom",
                    )
                }
            },
        },
    }


def _write_namespace(deploy: DeployTarget, injected: bool) -> Iterator[Tree]:
    """Write the namespace; `injected`: an operator adds init containers without a security context."""
    level, reason = "restricted", "no pod needs more"
    if injected:
        # deploy/operator/internal/dynamo/backend_vllm.go of Dynamo bb3100e6: UpdatePodSpec.
        level, reason = "baseline", "Dynamo's operator adds init containers that restricted refuses"
    if deploy.rdma is not None:
        level, reason = "privileged", "RDMA needs IPC_LOCK, which only this level allows"
    yield {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": deploy.namespace or NAMESPACE,
            "labels": {**FIRST, "pod-security.kubernetes.io/enforce": annotate(level, reason)},
        },
    }


def _write_network_policies(
    units: Sequence[ServiceContainers],
    deploy: DeployTarget,
    plain: Sequence[ServiceContainers],
    operator: Tree | None,
) -> Iterator[Tree]:
    """Yield network policies: deny by default, then allow clients, Prometheus, DNS and a replica's own ranks.

    Pods that an orchestrator runs may also reach each other and the API server.
    """
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    yield {
        **kind,
        "metadata": write_metadata("default-deny", deploy, FIRST),
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
    names = {"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}
    dns = {"to": [{"namespaceSelector": _match_namespace("kube-system")}], "ports": list(names)}
    http = {"port": PORT, "protocol": "TCP"}
    for unit in units:
        if unit not in plain:
            yield from _write_orchestrated_policy(unit, deploy, dns, operator)
            continue
        own = {"matchLabels": make_selector(unit)}
        metrics = _match_namespace(find_metrics_namespace(deploy))
        who = "the gateway" if deploy.endpoint else "clients in this namespace"
        clients: Tree = {"podSelector": {"matchLabels": SELECTOR} if deploy.endpoint else {}}
        callers: list[Tree] = [clients, {"namespaceSelector": metrics}, *select_data_planes(deploy)]
        inside: list[Tree] = [{"from": callers, "ports": [http]}]
        outside: list[Tree] = [dns]
        if unit.nodes > 1:
            inside.append({"from": [{"podSelector": own}]})
            outside.append({"to": [{"podSelector": own}]})
        yield {
            **kind,
            "metadata": write_metadata(unit.name, deploy),
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": annotate(inside, f"{who}, and Prometheus"),
                "egress": annotate(outside, "DNS only: the weights are on the volume"),
            },
        }
        yield _write_model_policy(unit, deploy, dns)


def _write_orchestrated_policy(
    unit: ServiceContainers, deploy: DeployTarget, dns: Tree, operator: Tree | None
) -> Iterator[Tree]:
    own = {"app.kubernetes.io/name": unit.engine.id.replace(".", "-"), "app.kubernetes.io/instance": unit.name}
    metrics = _match_namespace(find_metrics_namespace(deploy))
    inside: list[Tree] = [{"from": [{"podSelector": {}}, {"namespaceSelector": metrics}, *select_data_planes(deploy)]}]
    if operator is not None:
        inside.append({"from": [{"namespaceSelector": {}, "podSelector": operator}]})
    api = [{"port": port, "protocol": "TCP"} for port in (443, 6443)]
    yield {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": write_metadata(unit.name, deploy),
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": annotate(inside, "clients and workers in this namespace, Prometheus, and the operator"),
            "egress": annotate(
                [dns, {"to": [{"podSelector": {}}]}, {"ports": [*api, {"port": 4222, "protocol": "TCP"}]}],
                "pods in this namespace, the API server (discovery), NATS, and the model hub",
            ),
        },
    }


def _write_model_policy(unit: ServiceContainers, deploy: DeployTarget, dns: Tree) -> Tree:
    egress: object = annotate([dns, {"ports": [{"port": 443, "protocol": "TCP"}]}], "the model hub")
    if deploy.models == "copy":
        egress = annotate([], "none: the model is copied into the pod, which kubectl does through its kubelet")
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": write_metadata(name_model(unit), deploy, FIRST),
        "spec": {
            "podSelector": {"matchLabels": make_model_labels(unit)},
            "policyTypes": ["Ingress", "Egress"],
            "egress": egress,
        },
    }


def _match_namespace(namespace: str) -> Tree:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _is_plain(parts: Sequence[Tree]) -> bool:
    """Whether the pods are written here; an operator monitors and scales the pods that it creates."""
    return any(part["kind"] in ("Deployment", "LeaderWorkerSet") for part in parts)


def write_kustomization(platform: Platform, units: Sequence[ServiceContainers], files: Files) -> str:
    needs = find_requirements(files)
    head = [f"Generated by bedplate {__version__}. Apply in three steps, so that no pod holds GPUs during a download:"]
    head += [f"  {command}" for command in write_apply_commands(platform.deploy)]
    if needs:
        head.append(f"The cluster needs {', '.join(needs)}.")
    head.append(f"Secrets are not included. For gated models: {_write_secret_command('hf-token', 'token')}")
    images = [
        {"name": unit.image.name.rpartition(":")[0], "newTag": unit.image.name.rpartition(":")[2]}
        for unit in units
        if unit.image.dockerfile is not None
    ]
    if platform.deploy.endpoint:
        name, _, tag = name_image(platform.deploy).rpartition(":")
        images.append({"name": name, "newTag": tag})
    tree: Tree = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": None,
        "resources": [name for name in files if name.endswith(".yaml") and "/" not in name],
    }
    if images:
        unique = list({image["name"]: image for image in images}.values())
        tree["images"] = annotate(unique, "built from images/ or bedplate's Dockerfile: set newName to your registry")
    return write_document(tree, head)


def write_apply_commands(deploy: DeployTarget, folder: str = ".") -> tuple[str, str, str]:
    """Return the commands that fill the volumes, wait for that, and start the engines; again for every upgrade."""
    (key, value), namespace = next(iter(FIRST.items())), quote_shell(deploy.namespace or NAMESPACE)
    return (
        f"kubectl apply --server-side -k {folder} -l {key}={value}",
        f"kubectl wait -n {namespace} --for=condition=complete job -l {key}={value} --timeout=24h",
        f"kubectl apply --server-side -k {folder}",
    )


def _write_secret_command(name: str, key: str) -> str:
    return f"kubectl create secret generic {name} --from-literal={key}=…"


NEEDS = {
    "keda.sh/": "KEDA {keda} or newer", "monitoring.coreos.com/": "the Prometheus operator",
    "kueue.x-k8s.io/": "Kueue {kueue} or newer",
    "leaderworkerset.x-k8s.io/": "LeaderWorkerSet", "inference.networking.k8s.io/": "Gateway API with its inference "
    "extension", "nvidia.com/v1beta1": "the Dynamo operator", "ray.io/": "KubeRay",
    "networking.istio.io/": "Istio", "networking.gke.io/": "GKE's Gateway controller",
}  # fmt: skip


DYNAMO_NODES = "the Dynamo operator with Grove, or with LeaderWorkerSet and Volcano, for workers on several nodes"
"""deploy/operator/internal/controller/dgd_component_program.go of Dynamo bb3100e6: reasonNoMultinodeOrchestrator."""


KUBERNETES = "Kubernetes 1.30 or newer"
"""`preStop.sleep` is on by default since then: PodLifecycleSleepAction in pkg/features/kube_features.go."""


def find_requirements(files: Files) -> list[str]:
    text = "\n".join(files.values())
    needs = NEEDS | ({"nvidia.com/v1beta1": DYNAMO_NODES} if "multinode:" in text else {})
    kueue = find_least_version(["RayService"] if "kind: RayService" in text else [])
    versions = {"{kueue}": kueue, "{keda}": find_least_keda(text)}
    return ([KUBERNETES] if "preStop:" in text else []) + [
        re.sub(r"\{\w+\}", lambda match: versions[match[0]], what)
        for group, what in needs.items()
        if f"apiVersion: {group}" in text
    ]


def find_least_keda(text: str) -> str:
    """Return the first version of KEDA that has what the files use: CHANGELOG.md of KEDA 8b4f083c.

    `fallback.behavior` since 2.17, for other kinds than Deployments since 2.18 (#6992); from zero since 2.19 (#7239).
    """
    if "minReplicaCount: 0" in text:
        return "2.19"
    return "2.18" if "kind: LeaderWorkerSet" in text or "kind: DynamoGraphDeploymentScalingAdapter" in text else "2.17"


def write_image_contexts(units: Sequence[ServiceContainers]) -> Files:
    """Return the build contexts of images that are not published."""
    found: Files = {}
    for unit in units:
        if unit.image.dockerfile is not None:
            folder = f"images/{unit.engine.id}"
            found[f"{folder}/Dockerfile"] = unit.image.dockerfile
            found |= {f"{folder}/{name}": text for name, text in unit.image.files}
    return found
