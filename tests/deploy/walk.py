"""Finds references in emitted manifests that do not resolve."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import yaml
from tests.deploy.schemas import LOADER

from bedplate.deploy import endpoint

Tree = dict[str, Any]
OPERATOR_PORTS = {9090}
"""Ports that Dynamo's operator adds to its workers."""


def read_manifests(files: Mapping[str, str]) -> list[Tree]:
    """Read every manifest that kustomization.yaml lists."""
    (kustomization,) = read_documents(files["kustomization.yaml"])
    return [tree for name in kustomization["resources"] for tree in read_documents(files[name]) if tree]


def read_documents(text: str) -> list[Any]:
    """Read YAML; the same text is parsed once, because several tests ask for it."""
    trees: list[Any] = msgspec.json.decode(_convert_to_json(text))
    return trees


def read_all_documents(files: Mapping[str, str]) -> list[Any]:
    return [tree for path, text in files.items() if path.endswith(".yaml") for tree in read_documents(text)]


@functools.lru_cache(2000)
def _convert_to_json(text: str) -> bytes:
    trees = list(yaml.load_all(text, LOADER))
    data = msgspec.json.encode(trees)
    assert msgspec.json.decode(data) == trees, "a date or a key that is no string would be another one in Kubernetes"
    return data


def iterate_pods(tree: Tree) -> Iterator[tuple[Tree, Tree]]:
    """Yield (labels, spec) of every pod that a manifest creates."""
    kind, spec = tree["kind"], tree.get("spec", {})
    templates = []
    if kind in ("Deployment", "Job"):
        templates = [spec["template"]]
    elif kind == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], group["workerTemplate"]]
    elif kind == "DynamoGraphDeployment":
        templates = [component["podTemplate"] for component in spec["components"]]
    elif kind == "RayService":
        cluster = spec["rayClusterConfig"]
        templates = [cluster["headGroupSpec"]["template"], *(one["template"] for one in cluster["workerGroupSpecs"])]
    for template in templates:
        yield template.get("metadata", {}).get("labels", {}), template["spec"]


def find_broken_references(files: Mapping[str, str]) -> list[str]:
    """Describe all references that do not resolve."""
    trees = read_manifests(files)
    named = {(tree["kind"], tree["metadata"]["name"]) for tree in trees}
    pods = [(tree, labels, spec) for tree in trees for labels, spec in iterate_pods(tree)]
    found = [f"{kind} {name} is there twice" for kind, name in _find_duplicates(trees)]
    for tree in trees:
        found += [f"{tree['kind']} {tree['metadata']['name']}: {what}" for what in _check_manifest(tree, named, pods)]
    for tree, labels, spec in pods:
        found += [f"{tree['kind']} {tree['metadata']['name']}: {what}" for what in _check_pod(tree, spec, named)]
        del labels
    namespaces = {tree["metadata"]["name"] for tree in trees if tree["kind"] == "Namespace"}
    found += [
        f"{tree['kind']} {tree['metadata']['name']}: no namespace {tree['metadata']['namespace']}"
        for tree in trees
        if tree["metadata"].get("namespace", next(iter(namespaces))) not in namespaces
    ]
    return found


def _find_duplicates(trees: list[Tree]) -> list[tuple[str, str]]:
    all_names = [(tree["kind"], tree["metadata"].get("namespace"), tree["metadata"]["name"]) for tree in trees]
    return [(kind, name) for kind, space, name in set(all_names) if all_names.count((kind, space, name)) > 1]


def _selects(selector: Tree, labels: Tree) -> bool:
    alike = all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())
    return alike and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def _check_manifest(tree: Tree, named: set[tuple[str, str]], pods: list[tuple[Tree, Tree, Tree]]) -> Iterator[str]:
    kind, spec = tree["kind"], tree.get("spec", {})
    queue = tree["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    if queue is not None and ("LocalQueue", queue) not in named:
        yield f"no LocalQueue {queue}"
    if kind == "Deployment":
        own = next(labels for labels, _ in iterate_pods(tree))
        if not _selects(spec["selector"], own):
            yield "selects none of its own pods"
        stolen = [other["metadata"]["name"] for other, labels, _ in pods if other is not tree
                  and _selects(spec["selector"], labels)]  # fmt: skip
        if stolen:
            yield f"selects pods of {stolen}"
    if kind in ("Service", "PodMonitor", "PodDisruptionBudget", "InferencePool", "NetworkPolicy"):
        yield from _check_selection(kind, spec, pods)
    if kind == "LocalQueue" and ("ClusterQueue", spec["clusterQueue"]) not in named:
        yield f"no ClusterQueue {spec['clusterQueue']}"
    if kind == "ClusterQueue":
        yield from _check_quotas(spec, named, pods)
    if kind == "ScaledObject":
        yield from _check_scaling(spec, named, pods)
    if kind == "InferencePool":
        picker = spec["endpointPickerRef"]
        if ("Service", picker["name"]) not in named:
            yield f"no Service {picker['name']}"
    if kind == "HTTPRoute":
        for rule in spec["rules"]:
            for reference in rule["backendRefs"]:
                made = reference["name"].removesuffix("-serve-svc"), reference["name"].removesuffix("-frontend")
                by_operator = ("RayService", made[0]) in named or ("DynamoGraphDeployment", made[1]) in named
                if (reference["kind"], reference["name"]) not in named and not by_operator:
                    yield f"no {reference['kind']} {reference['name']}"
    if kind == "RoleBinding":
        references = [("Role", tree["roleRef"]["name"])]
        references += [(one["kind"], one["name"]) for one in tree["subjects"] if one["kind"] != "Group"]
        yield from (f"no {what} {name}" for what, name in references if (what, name) not in named)


def _check_selection(kind: str, spec: Tree, pods: list[tuple[Tree, Tree, Tree]]) -> Iterator[str]:
    selector: Tree = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
    selector = {"matchLabels": selector} if kind == "Service" else selector
    chosen = [pod for _, labels, pod in pods if _selects(selector, labels)]
    if not chosen:
        yield "selects no pod"
    wanted: list[Any] = []
    if kind == "Service":
        wanted = [port["targetPort"] for port in spec["ports"]]
    elif kind == "PodMonitor":
        wanted = [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    elif kind == "InferencePool":
        wanted = [port["number"] for port in spec["targetPorts"]]
    for port in wanted:
        for pod in chosen:
            if port not in _list_ports(pod):
                yield f"port {port} is none of {sorted(map(str, _list_ports(pod)))}"


def _list_ports(pod: Tree) -> set[Any]:
    ports = [port for container in pod["containers"] for port in container.get("ports", [])]
    return {port["containerPort"] for port in ports} | {port["name"] for port in ports}


def _check_quotas(spec: Tree, named: set[tuple[str, str]], pods: list[tuple[Tree, Tree, Tree]]) -> Iterator[str]:
    covered = {name for group in spec["resourceGroups"] for name in group["coveredResources"]}
    for group in spec["resourceGroups"]:
        for flavor in group["flavors"]:
            if ("ResourceFlavor", flavor["name"]) not in named:
                yield f"no ResourceFlavor {flavor['name']}"
            listed = [resource["name"] for resource in flavor["resources"]]
            if listed != group["coveredResources"]:
                yield f"{flavor['name']} lists {listed}, in another order than covered"
    for tree, _, pod in pods:
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            if left := set(container["resources"].get("requests", {})) - covered:
                yield f"{tree['metadata']['name']} asks for {left}, which no quota covers"


def _check_scaling(spec: Tree, named: set[tuple[str, str]], pods: list[tuple[Tree, Tree, Tree]]) -> Iterator[str]:
    target = spec["scaleTargetRef"]
    if target["kind"] == "DynamoGraphDeploymentScalingAdapter":
        adapters = {
            f"{tree['metadata']['name']}-{component['name']}"
            for tree, _, _ in pods
            if tree["kind"] == "DynamoGraphDeployment"
            for component in tree["spec"]["components"]
            if "scalingAdapter" in component
        }
        if target["name"] not in adapters:
            yield f"no component makes the adapter {target['name']}"
    elif (target["kind"], target["name"]) not in named:
        yield f"no {target['kind']} {target['name']}"
    # At zero, the engine has no metrics: something else must start it.
    least = 0 if any(one["name"] == "gateway" for one in spec["triggers"]) else 1
    if not least <= spec["minReplicaCount"] < spec["maxReplicaCount"]:
        yield "cannot scale"


def _check_pod(tree: Tree, pod: Tree, named: set[tuple[str, str]]) -> Iterator[str]:
    account = pod.get("serviceAccountName")
    if account is not None and ("ServiceAccount", account) not in named:
        yield f"no ServiceAccount {account}"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for name, volume in volumes.items():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and ("PersistentVolumeClaim", claim) not in named:
            yield f"no PersistentVolumeClaim {claim}"
        config = volume.get("configMap", {}).get("name")
        if config is not None and ("ConfigMap", config) not in named:
            yield f"no ConfigMap {config}"
        mounted = [mount["name"] for container in _list_containers(pod) for mount in container.get("volumeMounts", [])]
        if name not in mounted:
            yield f"the volume {name} is mounted nowhere"
    for container in _list_containers(pod):
        yield from _check_container(tree, pod, container, volumes)


def _list_containers(pod: Tree) -> list[Tree]:
    return [*pod["containers"], *pod.get("initContainers", [])]


def _check_container(tree: Tree, pod: Tree, container: Tree, volumes: Tree) -> Iterator[str]:
    del pod
    image = container["image"]
    if ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
        yield f"{image} is not pinned"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"no volume {mount['name']}"
    if len(set(paths)) != len(paths):
        yield f"two volumes on one of {paths}"
    own = {port["containerPort"] for port in container.get("ports", [])}
    own |= {port["name"] for port in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        how = container.get(probe, {})
        port = next((how[kind]["port"] for kind in ("httpGet", "grpc", "tcpSocket") if kind in how), None)
        known = own | (OPERATOR_PORTS if tree["kind"] == "DynamoGraphDeployment" else set())
        if how and port not in known:
            yield f"{probe} asks port {port}, which is none of {own}"
    for variable in container.get("env", []):
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        if secret is not None and not secret.get("optional") and tree["metadata"]["name"] != endpoint.NAME:
            yield f"the secret {secret['name']} is not here and not optional"
    words = [*container.get("command", []), *container.get("args", [])]
    for word in words:
        path = word.partition("=")[2] if word.startswith("--") else word
        if path.startswith(("/models/", "/etc/engine/")) and not any(path.startswith(f"{one}/") for one in paths):
            yield f"{path} is on no volume"
