"""What changes and what stays when an engine or a model is upgraded; `make cluster` applies the same files."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.scenario import emit_for_cluster, replace_models, upgrade_engines
from tests.deploy.intents import build_platform, emit_files
from tests.deploy.test_emitted_walk import ON_A_CLUSTER
from tests.deploy.walk import iterate_pods, read_manifests

from bedplate.deploy.service_containers import describe_containers

Tree = dict[str, Any]


def select(files: dict[str, str], kind: str) -> list[Tree]:
    return [tree for tree in read_manifests(files) if tree["kind"] == kind]


def get_names(files: dict[str, str], kind: str) -> set[str]:
    return {tree["metadata"]["name"] for tree in select(files, kind)}


@pytest.mark.parametrize("name", ["h100-chat", "platform", "rtx4090-exllamav3", "cpu-ollama"])
def test_changed_job_has_a_new_name_and_the_volumes_stay(name: str) -> None:
    before = emit_files(name, "kubernetes")
    with upgrade_engines():
        after = emit_for_cluster(name, "kubernetes")
    specs = {tree["metadata"]["name"]: tree["spec"] for tree in select(before, "Job")}
    changed = 0
    for tree in select(after, "Job"):
        same = specs.get(tree["metadata"]["name"])
        assert same is None or same == tree["spec"]
        changed += same is None
    assert changed or name == "rtx4090-exllamav3", "its Job uses no image of the engine"
    assert get_names(before, "PersistentVolumeClaim") == get_names(after, "PersistentVolumeClaim")


def test_new_model_has_a_volume_of_its_own() -> None:
    before, after = emit_files("h100-chat", "kubernetes"), emit_for_cluster("h100-chat", "kubernetes", replace_models)
    for kind in ("Job", "PersistentVolumeClaim"):
        assert not get_names(before, kind) & get_names(after, kind)
    assert get_names(before, "Deployment") == get_names(after, "Deployment")


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_models_are_fetched_on_the_nodes_that_run_the_engine(name: str, target: str) -> None:
    trees = read_manifests(emit_files(name, target))
    selected: dict[str, list[tuple[str, object]]] = {}
    for tree in trees:
        for labels, pod in iterate_pods(tree):
            chosen = pod.get("affinity", {}).get("nodeAffinity"), pod.get("nodeSelector"), pod.get("tolerations")
            if labels.get("app.kubernetes.io/component") in ("engine", "model"):
                selected.setdefault(labels["app.kubernetes.io/instance"], []).append((tree["kind"], chosen))
    assert selected
    for service, found in selected.items():
        assert len(found) > 1 and all(chosen == found[0][1] for _, chosen in found), service


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_first_step_has_everything_that_the_jobs_refer_to(name: str, target: str) -> None:
    trees = read_manifests(emit_files(name, target))
    first = [tree for tree in trees if tree["metadata"].get("labels", {}).get("bedplate/apply") == "first"]
    kinds = {tree["kind"] for tree in first}
    assert {"Namespace", "ServiceAccount", "PersistentVolumeClaim", "Job", "NetworkPolicy"} <= kinds
    assert not kinds & {"Deployment", "LeaderWorkerSet", "RayService", "DynamoGraphDeployment"}
    for kind in ("Job", "PersistentVolumeClaim", "LocalQueue", "ClusterQueue", "ResourceFlavor"):
        assert [tree for tree in trees if tree["kind"] == kind] == [tree for tree in first if tree["kind"] == kind]


@pytest.mark.parametrize(
    ("name", "surge", "unavailable"),
    [("one-pool", "1", "0"), ("h100-chat", "0", "1"), ("h100-tensorrt-llm", "0", "1"), ("fleet-apart", "0", "1")],
)
def test_workers_of_dynamo_are_replaced_within_the_gpus_of_the_pool(name: str, surge: str, unavailable: str) -> None:
    """The operator starts one worker more by default, which waits for ever in a pool without free GPUs."""
    pace = {
        "nvidia.com/deployment-rolling-update-max-surge": surge,
        "nvidia.com/deployment-rolling-update-max-unavailable": unavailable,
    }
    for graph in select(emit_files(name, "dynamo"), "DynamoGraphDeployment"):
        workers = [one for one in graph["spec"]["components"] if one["type"] != "frontend"]
        assert workers and all(one["podTemplate"]["metadata"]["annotations"] == pace for one in workers)
    for plain in select(emit_files(name, "kubernetes"), "Deployment"):
        assert plain["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": int(surge), "maxUnavailable": int(unavailable),
        }  # fmt: skip


@pytest.mark.parametrize(("name", "fits"), [("one-pool", True), ("h100-chat", False)])
def test_ray_service_states_the_gpus_that_its_upgrade_needs(name: str, fits: bool) -> None:
    files = emit_files(name, "ray")
    for service in select(files, "RayService"):
        words = " ".join(files[f"{service['metadata']['name']}.yaml"].replace("#", " ").split())
        group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        cards = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert f"it needs {group['minReplicas'] * cards} free GPUs" in words
        assert ("Delete the RayService before" in words) == (not fits)


def test_deadline_of_a_deployment_includes_the_download() -> None:
    platform = build_platform("h100-chat")
    unit = describe_containers(platform.services[0], platform.deploy)
    (deployment,) = select(emit_files("h100-chat", "kubernetes"), "Deployment")
    assert unit.prepare_s > 600, "140 GB take more than ten minutes at 1 Gbit/s"
    assert deployment["spec"]["progressDeadlineSeconds"] > unit.prepare_s + unit.load_s
