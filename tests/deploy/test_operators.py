"""Rules of the operators' admission webhooks and the versions that the files need, for every emitted object."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.operators import list_update_violations, list_violations
from tests.cluster.scenario import emit_for_cluster, replace_models, upgrade_engines
from tests.deploy.intents import WITH_RAY, build_platform, emit_files, make_platform
from tests.deploy.test_emitted_walk import ON_A_CLUSTER
from tests.deploy.walk import iterate_pods, read_manifests

from bedplate.decide.portfolio import make_pool_machine
from bedplate.deploy.emit import emit_target
from bedplate.deploy.images import RAY_VERSION
from bedplate.deploy.service_containers import make_node_selector
from bedplate.engines import get_engine
from bedplate.errors import UsageError
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values.intent import NodePool

TESTS = Path(__file__).parents[1]
MI300X = {"name": "amd", "accelerator": "MI300X", "count": 8, "gpus_per_node": 8}


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_operators_admit_every_object(name: str, target: str) -> None:
    assert not list_violations(read_manifests(emit_files(name, target)))


def test_violations_are_detected() -> None:
    (service,) = (tree for tree in read_manifests(emit_files("tenants-alone", "ray")) if tree["kind"] == "RayService")
    del service["metadata"]["annotations"]
    service["spec"]["serviceUnhealthySecondThreshold"] = 900
    found = " ".join(list_violations([service]))
    assert "only as an elastic job" in found and "deprecated" in found


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_operators_admit_every_upgrade(name: str, target: str) -> None:
    before = read_manifests(emit_files(name, target))
    with upgrade_engines():
        assert not list_update_violations(before, read_manifests(emit_for_cluster(name, target)))
    assert not list_update_violations(before, read_manifests(emit_for_cluster(name, target, replace_models)))


def test_violations_of_graphs_are_detected() -> None:
    (graph,) = (tree for tree in read_manifests(emit_files("h100-chat", "dynamo")) if "Graph" in tree["kind"])
    changed = copy.deepcopy(graph)
    worker = next(one for one in changed["spec"]["components"] if one["type"] == "worker")
    assert "scalingAdapter" in worker and "replicas" not in worker
    worker.update(replicas=2, multinode={"nodeCount": 2})
    found = " ".join(list_update_violations([graph], [changed]))
    assert "replicas cannot be modified directly" in found and "nodeCount is immutable" in found
    worker["name"] = "decode"
    assert "component topology is immutable" in " ".join(list_update_violations([graph], [changed]))


def test_ranks_that_kueue_admits_together_are_not_scaled() -> None:
    """It deletes pods beyond the size of their group."""
    platform = build_platform("two-nodes-405b")
    free = replace(platform, services=tuple(replace(one, spare=16) for one in platform.services))
    for tenants, kinds in ((platform.tenants, set()), ((), {"ScaledObject"})):
        trees = read_manifests(emit_target(replace(free, tenants=tenants), "dynamo"))
        assert {tree["kind"] for tree in trees if tree["kind"] == "ScaledObject"} == kinds
        assert not list_violations(trees)


@pytest.mark.parametrize(
    ("target", "refused"), [("kubernetes", ["Deployment drafts"]), ("ray", ["RayService drafts"]), ("dynamo", [])]
)
def test_another_queue_is_another_job(target: str, refused: list[str]) -> None:
    """Kueue refuses another queue for a Job; docs/platform.md says what to do with running engines."""
    platform = build_platform("platform")
    drafts = replace(platform.services[1], tenants=("sales", "research"))
    changed = replace(platform, services=(platform.services[0], drafts, *platform.services[2:]))
    after = read_manifests(emit_target(changed, target))
    found = list_update_violations(read_manifests(emit_files("platform", target)), after)
    assert found == [f"{name}: the queue of a running workload is immutable" for name in refused]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fallback": {"failureThreshold": 4, "replicas": -1}}, "Replicas must both be"),
        ({"minReplicaCount": 9, "maxReplicaCount": 2}, "must be less than MaxReplicaCount"),
        ({"triggers": 2 * [{"type": "prometheus", "name": "a", "metadata": {}}]}, "defined multiple times"),
        ({"triggers": [{"type": "prometheus", "metadata": {}}]}, "of type AverageValue"),
        ({"triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": {"a": 1}}]}, "must be text"),
    ],
)
def test_violations_of_scaled_objects_are_detected(change: dict[str, Any], words: str) -> None:
    trees = read_manifests(emit_files("platform", "kubernetes"))
    scaled = next(tree for tree in trees if tree["kind"] == "ScaledObject")
    scaled["spec"].update(change)
    assert words in " ".join(list_violations([scaled]))
    assert "already managed" in " ".join(list_violations([scaled, scaled]))


def test_violations_of_queues_and_of_workloads_on_several_nodes_are_detected() -> None:
    trees = read_manifests(emit_files("two-nodes-405b", "kubernetes"))
    queue = next(tree for tree in trees if tree["kind"] == "ClusterQueue")
    flavor = queue["spec"]["resourceGroups"][0]["flavors"][0]
    flavor["resources"][0].update(nominalQuota=1, lendingLimit=2)
    flavor["resources"].reverse()
    del queue["spec"]["cohortName"]
    found = " ".join(list_violations([queue]))
    assert "lendingLimit must be" in found and "must match the names" in found and "cohort is empty" in found
    group = next(tree for tree in trees if tree["kind"] == "LeaderWorkerSet")
    larger = copy.deepcopy(group)
    larger["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["resources"]["requests"][
        "cpu"
    ] = 1
    assert "immutable with a queue" in " ".join(list_update_violations([group], [larger]))
    group["metadata"]["name"] = "1-first"
    assert "DNS-1035" in " ".join(list_violations([group]))


def test_header_names_the_version_of_keda() -> None:
    for name, target, version in (
        ("two-nodes-405b", "kubernetes", None), ("platform", "kubernetes", "2.17"), ("platform", "dynamo", "2.18"),
        ("idle", "kubernetes", "2.19"),
    ):  # fmt: skip
        text = emit_files(name, target)["kustomization.yaml"]
        assert (f"KEDA {version} or newer" in text) if version is not None else "KEDA" not in text


def test_header_names_the_version_of_kubernetes() -> None:
    """Older API servers refuse `preStop.sleep`, which not all files have."""
    for name, target in ON_A_CLUSTER:
        files = emit_files(name, target)
        sleeps = any("preStop" in str(pod) for tree in read_manifests(files) for _, pod in iterate_pods(tree))
        assert ("The cluster needs Kubernetes 1.30 or newer" in files["kustomization.yaml"]) == sleeps, (name, target)


class TestKueue:
    @pytest.mark.parametrize("target", ["kubernetes", "dynamo", "ray"])
    def test_files_state_the_version_and_the_configuration(self, target: str) -> None:
        files = emit_files("platform", target)
        version = "0.18" if target == "ray" else "0.16"
        assert f"Kueue {version} or newer" in files["kustomization.yaml"]
        lines = [line[2:] for line in files["queues.yaml"].splitlines() if line.startswith("#   ")]
        frameworks = yaml.safe_load("\n".join(lines))["integrations"]["frameworks"]
        assert {"batch/job", "deployment", "pod"} <= set(frameworks)
        assert ("ray.io/rayservice" in frameworks) == (target == "ray")

    def test_pods_accept_the_label_of_their_flavor(self) -> None:
        """Kueue adds the flavor's label to the pod's selector: both must hold on one node."""
        trees = read_manifests(emit_files("platform", "kubernetes"))
        flavors = [tree["spec"]["nodeLabels"] for tree in trees if tree["kind"] == "ResourceFlavor"]
        assert {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"} in flavors
        for tree in trees:
            for labels, pod in iterate_pods(tree):
                if labels.get("app.kubernetes.io/component") in ("engine", "model"):
                    assert any(accepts(pod, flavor) for flavor in flavors), tree["metadata"]["name"]


def accepts(pod: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a node with just these labels satisfies a pod's selector and affinity."""
    if any(labels.get(name) != value for name, value in pod.get("nodeSelector", {}).items()):
        return False
    affinity = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = affinity["nodeSelectorTerms"][0]["matchExpressions"] if affinity else []
    return all(
        (term["key"] not in labels) if term["operator"] == "DoesNotExist" else labels.get(term["key"]) in term["values"]
        for term in terms
    )


@pytest.mark.parametrize("chip", ["RX 7900 XTX", "MI250X", "MI300X", "H100 SXM", "A100 SXM 80GB", "T4"])
def test_label_values_are_valid(chip: str) -> None:
    node = make_pool_machine(NodePool(name="one", accelerator=chip), 1)
    values = make_node_selector(node, find_accelerator_chip(node.accelerators[0])).values
    assert values and all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value) for value in values)


def test_label_of_a_pool_selects_its_nodes() -> None:
    described: dict[str, Any] = {
        "pools": [{**MI300X, "node_label": "example.com/cards=mi300x"}],
        "tenants": [{"name": "all"}],
        "services": [{"name": "code", "model": "Qwen/Qwen3-32B"}],
    }
    for tree in read_manifests(emit_target(make_platform(described), "kubernetes")):
        if tree["kind"] == "ResourceFlavor":
            assert tree["spec"]["nodeLabels"] == {"example.com/cards": "mi300x"}
        for labels, pod in iterate_pods(tree):
            if labels.get("app.kubernetes.io/component") in ("engine", "model"):
                assert pod["nodeSelector"] == {"example.com/cards": "mi300x"}
    described["pools"][0]["node_label"] = "no label"
    with pytest.raises(UsageError, match="not a node label"):
        emit_target(make_platform(described), "kubernetes")


class TestRay:
    def test_engine_is_the_version_that_ray_requires(self) -> None:
        lines = (TESTS / "captures" / "ray" / "METADATA").read_text().splitlines()
        ray = get_engine("vllm").ray
        assert ray is not None and f"Version: {RAY_VERSION}" in lines
        assert f'Requires-Dist: vllm[audio]=={ray.version}; extra == "llm"' in lines

    def test_engine_options_are_known_to_older_and_newer_versions(self) -> None:
        """Ray's vLLM is between the two versions whose options were captured."""
        folder = TESTS / "engines" / "options"
        for file in ("vllm-0.26.0.json", "vllm.json"):
            options = json.loads((folder / file).read_text())["options"]
            known = {name.removeprefix("--").replace("-", "_"): one for one in options for name in one["names"]}
            for name in sorted(WITH_RAY):
                for path, text in emit_files(name, "ray").items():
                    if path.startswith("serve/"):
                        kwargs = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
                        for option, value in kwargs.items():
                            assert option in known, (file, option)
                            choices = known[option].get("choices")
                            assert choices is None or value in choices, (file, option, value)
