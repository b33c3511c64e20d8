"""What is done with one emitted set of files on the control plane, and what is checked each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cluster.control_plane import ControlPlane, Refused, Tree, find_reason
from tests.cluster.nodes import NodeKind
from tests.cluster.operators import expand_pods
from tests.conftest import wait_for
from tests.deploy.intents import build_platform
from tests.deploy.walk import read_manifests

from bedplate.deploy import dynamo, kubernetes, ray
from bedplate.deploy.emit import emit_target
from bedplate.deploy.images import DYNAMO_VERSION, RAY_TAG
from bedplate.deploy.platform import PlacedService, Platform
from bedplate.deploy.service_containers import ServiceContainers, describe_containers
from bedplate.values import replace_fields

Files = Mapping[str, str]
GPUS = ("nvidia.com/gpu", "amd.com/gpu")


def emit_for_cluster(name: str, target: str, change: Callable[[Platform], Platform] | None = None) -> dict[str, str]:
    platform = build_platform(name)
    return emit_target(change(platform) if change is not None else platform, target)


@contextmanager
def upgrade_engines() -> Iterator[None]:
    """Emit with the next version of every engine's image."""

    def describe_next(*words: Any, **options: Any) -> ServiceContainers:
        unit = describe_containers(*words, **options)
        image = replace(unit.image, name=f"{unit.image.name}-next")
        steps = tuple(replace(step, image=image.name) if step.image == unit.image.name else step for step in unit.steps)
        return replace(unit, image=image, steps=steps)

    with (
        mock.patch.object(kubernetes, "describe_containers", describe_next),
        mock.patch.object(dynamo, "describe_containers", describe_next),
        mock.patch.object(ray, "describe_containers", describe_next),
        mock.patch.object(dynamo, "DYNAMO_VERSION", f"{DYNAMO_VERSION}-next"),
        mock.patch.object(ray, "RAY_TAG", f"{RAY_TAG}-next"),
    ):
        yield


def replace_models(platform: Platform) -> Platform:
    """Return the platform with the next version of every model, which is a little larger."""

    def change(placed: PlacedService) -> PlacedService:
        model = placed.plan.model
        files = tuple(f"{path}-next" for path in model.files)
        weights = placed.plan.weights
        if weights.published is not None:
            published = replace_fields(weights.published, repository=f"{weights.published.repository}-next")
            weights = replace_fields(weights, published=published)
        grown = replace_fields(model, name=f"{model.name}-next", files=files)
        return replace(placed, plan=replace_fields(placed.plan, model=grown, weights=weights))

    return replace(platform, services=tuple(change(placed) for placed in platform.services))


class Deployed:
    """One set of files on the cluster."""

    def __init__(self, plane: ControlPlane, nodes: Mapping[str, NodeKind], folder: Path, platform: Platform) -> None:
        self.plane, self.nodes, self.folder, self.platform = plane, nodes, folder, platform
        self.files: Files = {}
        self.expanded: list[str] = []

    @property
    def namespace(self) -> str:
        return self.platform.deploy.namespace or "inference"

    @property
    def trees(self) -> list[Tree]:
        return read_manifests(self.files)

    def apply(self, files: Files, *, first: bool = False) -> str:
        """Apply the files as `kustomization.yaml` says; `first`: only what is needed before the engines."""
        self.files = files
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        chosen = ("-l", "bedplate/apply=first") if first else ()
        return self.plane.kubectl("apply", "--server-side", "--validate=strict", "-k", str(self.folder), *chosen)

    def list_names(self, kind: str) -> list[str]:
        return [tree["metadata"]["name"] for tree in self.trees if tree["kind"] == kind]

    def scale(self) -> Iterator[str]:
        """Scale each workload to its maximum and back, one after the other: services of a pool share what is free.

        Workloads that may be scaled to zero are so first.
        """
        idle = [tree["spec"]["scaleTargetRef"]["name"] for tree in self.trees
                if tree["kind"] == "ScaledObject" and tree["spec"]["minReplicaCount"] == 0]  # fmt: skip
        for name in idle:
            self._set_replicas(name, 0)
            yield name
            self._set_replicas(name, 1)
        most = {tree["spec"]["scaleTargetRef"]["name"]: tree["spec"]["maxReplicaCount"]
                for tree in self.trees if tree["kind"] == "ScaledObject"}  # fmt: skip
        most |= {tree["metadata"]["name"]: tree["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]
                 for tree in self.trees if tree["kind"] == "RayService"}  # fmt: skip
        for name, count in most.items():
            if name in self.list_names("Deployment"):
                self._set_replicas(name, count)
                yield name
                self._set_replicas(name, 1)
            else:
                self.expand({name: count})
                yield name
                self.expand()

    def _set_replicas(self, name: str, count: int) -> None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}/scale"
        self.plane.call("PATCH", path, {"spec": {"replicas": count}}, "application/merge-patch+json")

    def expand(self, most: Mapping[str, int] | None = None) -> None:
        """Create the pods that operators would create; those that were there are removed first."""
        self.remove_expanded()
        for tree in self.trees:
            for pod in expand_pods(tree, _find_maximum(tree, most or {}) if most is not None else None):
                path = f"/api/v1/namespaces/{self.namespace}/pods"
                # The API server fills the token's volume in where an account is named.
                self.plane.apply(pod, path)
                self.expanded.append(f"{path}/{pod['metadata']['name']}")

    def remove_expanded(self) -> None:
        for path in self.expanded:
            self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        self.expanded = []

    def read_state(self) -> dict[str, object]:
        """Return the generation of every object, or its version where it has none."""
        found: dict[str, object] = {}
        for tree in self.trees:
            path = _find_path(tree)
            kept = self.plane.call("GET", path)
            meta = kept["metadata"]
            # The version of a quota changes with its use.
            version = str(kept["spec"]) if tree["kind"] == "ResourceQuota" else meta["resourceVersion"]
            found[path] = meta.get("generation") or version
        return found

    def check_placement(self, pods: list[Tree]) -> list[str]:
        """Return what is wrong with where the pods were placed."""
        hardware = {placed.name: _name_hardware(placed) for placed in self.platform.services}
        found = []
        for pod in pods:
            name, node, labels = pod["metadata"]["name"], pod["spec"].get("nodeName"), pod["metadata"].get("labels", {})
            if node is None:
                found.append(f"{name} is not placed: {find_reason(pod)}")
                continue
            serves = self.nodes[node].serves
            wanted = hardware.get(labels.get("app.kubernetes.io/instance"))
            if labels.get("app.kubernetes.io/component") in ("head", "frontend", "picker") or wanted is None:
                # It needs no GPU and may run on any node that is not reserved and that can run its image: the picker's
                # is for all architectures, and Kueue, which does not run here, would choose nodes of a flavor.
                reserved = dict(self.nodes[node].taints).get("dedicated") is not None
                anywhere = "-picker-" in name or (self.platform.tenants and "gateway" not in name)
                wrong = reserved or (self.nodes[node].arch != "amd64" and not anywhere)
                found += [f"{name} is on {node}"] if wrong else []
            elif serves is None or serves not in wanted:
                found.append(f"{name} of a service for {wanted} is on {node}")
        return found

    def check_volumes(self) -> list[str]:
        """Return claims that no pod could bind."""
        claims = self.plane.get_items(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims")
        return [f"{one['metadata']['name']} is {one['status']['phase']}" for one in claims
                if one["status"]["phase"] != "Bound"]  # fmt: skip

    def delete(self) -> list[str]:
        """Delete everything, and return what is left in the namespace."""
        self.remove_expanded()
        self.plane.kubectl("delete", "-k", str(self.folder), "--wait=false", "--ignore-not-found")

        def is_gone(namespace: str) -> bool:
            try:
                self.plane.call("GET", f"/api/v1/namespaces/{namespace}")
            except Refused:
                return True
            return False

        def are_gone() -> bool:
            self.plane.serve_pods()
            return all(map(is_gone, self.list_names("Namespace")))

        wait_for(are_gone, "the namespaces to be deleted")
        self.plane.remove_volumes()
        return [pod["metadata"]["name"] for pod in self.plane.get_pods()]


def _find_path(tree: Tree) -> str:
    group, kind, meta = tree["apiVersion"], tree["kind"].lower(), tree["metadata"]
    root = f"/apis/{group}" if "/" in group else f"/api/{group}"
    within = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    many = kind[:-1] + "ies" if kind.endswith("y") else kind + ("es" if kind.endswith("s") else "s")
    return f"{root}{within}/{many}/{meta['name']}"


def _find_maximum(tree: Tree, most: Mapping[str, int]) -> int | None:
    suffix = "-worker" if tree["kind"] == "DynamoGraphDeployment" else ""
    return most.get(f"{tree['metadata']['name']}{suffix}")


def _name_hardware(placed: PlacedService) -> str:
    on_cpu = placed.plan.settings.device == "cpu"
    return "CPU" if on_cpu or placed.pool.accelerator is None else placed.pool.accelerator


def list_gpu_pods(pods: list[Tree]) -> list[str]:
    """Return placed pods that request GPUs."""
    return [
        pod["metadata"]["name"]
        for pod in pods
        if pod["spec"].get("nodeName")
        and any(gpu in one["resources"].get("limits", {}) for one in pod["spec"]["containers"] for gpu in GPUS
                if "resources" in one)
    ]  # fmt: skip
