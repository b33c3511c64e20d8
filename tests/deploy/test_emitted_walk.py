"""Every selector, port, probe, volume, queue and name in emitted files resolves."""

from __future__ import annotations

import pytest
import yaml
from tests.deploy.intents import FEW, INTENTS, WORK, WRITTEN, build_platform, emit_files, make_platform
from tests.deploy.walk import find_broken_references, iterate_pods, read_manifests

from bedplate.deploy.emit import emit_target

ON_A_CLUSTER = [case for case in WRITTEN if case[1] != "compose"]
WITH_COMPOSE = [name for name, target in WRITTEN if target == "compose"]


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_all_references_resolve(name: str, target: str) -> None:
    assert not find_broken_references(emit_files(name, target))


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_pods_without_gpus_run_where_their_image_does(name: str, target: str) -> None:
    """A cluster may have nodes with another architecture. GPUs imply theirs, and so do the flavors of Kueue."""
    queued = bool(build_platform(name).tenants)
    for tree in read_manifests(emit_files(name, target)):
        for labels, pod in iterate_pods(tree):
            component = labels.get("app.kubernetes.io/component")
            if component == "gateway" or (component in ("head", "frontend") and not queued):
                assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}, tree["metadata"]["name"]
            elif component in ("head", "frontend"):
                assert "nodeSelector" not in pod, "it would need quota of CPU nodes"


@pytest.mark.parametrize(
    ("cpu", "platforms", "selector"),
    [("Ampere Altra", "linux/arm64", {"kubernetes.io/arch": "arm64"}),
     ("Intel Xeon Gold 6430", "linux/amd64 and linux/arm64", None)],
)  # fmt: skip
def test_gateway_runs_on_the_architecture_of_the_nodes(cpu: str, platforms: str, selector: object) -> None:
    pools = [{"name": "graces", "accelerator": "GH200", "count": 2, "gpus_per_node": 1, "arch": "arm64"},
             {"name": "cpus", "cpu": cpu, "cores": 32, "ram_gb": 128}]  # fmt: skip
    small = {"name": "small", "model": "Qwen/Qwen3-4B", "pool": "cpus", "engine": "llama.cpp", "workload": FEW}
    services = [{"name": "chat", "model": "Qwen/Qwen3-8B", "pool": "graces", "workload": WORK}, small]
    described = {"pools": pools, "services": services, "deploy": {"endpoint": True}}
    files = emit_target(make_platform(described), "kubernetes")
    assert f"Dockerfile, for {platforms}." in " ".join(files["endpoint.yaml"].replace("#", " ").split())
    (pod,) = (
        pod
        for tree in read_manifests(files)
        for labels, pod in iterate_pods(tree)
        if labels.get("app.kubernetes.io/component") == "gateway"
    )
    assert pod.get("nodeSelector") == selector


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_volume_for_one_node_is_read_by_one_kind_of_pods(name: str, target: str) -> None:
    """Pods of two kinds, such as Dynamo's frontend and its worker, may be placed on two nodes."""
    trees = read_manifests(emit_files(name, target))
    read = [
        volume["persistentVolumeClaim"]["claimName"]
        for tree in trees
        if tree["kind"] != "Job"
        for _, pod in iterate_pods(tree)
        for volume in pod.get("volumes", [])
        if "persistentVolumeClaim" in volume
    ]
    assert read
    for tree in trees:
        if tree["kind"] == "PersistentVolumeClaim" and tree["spec"]["accessModes"] == ["ReadWriteOnce"]:
            assert read.count(tree["metadata"]["name"]) == 1


def test_broken_references_are_detected() -> None:
    files = dict(emit_files("h100-chat", "kubernetes"))
    text = files["meta-llama-3-1-70b.yaml"]
    for old, new, complaint in (
        ("claimName: meta-llama-3-1-70b-model", "claimName: other", "no PersistentVolumeClaim other"),
        ("targetPort: http", "targetPort: web", "port web is none of"),
        ("port: http\n", "port: web\n", "asks port web"),
        ("serviceAccountName: meta-llama-3-1-70b", "serviceAccountName: nobody", "no ServiceAccount nobody"),
        ("image: vllm/vllm-openai:v0.32.0", "image: vllm/vllm-openai", "is not pinned"),
        ("mountPath: /models", "mountPath: /model", "is on no volume"),
        ("- name: shm\n              mountPath", "- name: shared\n              mountPath", "no volume shared"),
    ):
        assert old in text, old
        found = find_broken_references({**files, "meta-llama-3-1-70b.yaml": text.replace(old, new)})
        assert any(complaint in what for what in found), (complaint, found)
    scaled = files["scaling.yaml"].replace("name: meta-llama-3-1-70b\n  # 64", "name: nothing\n  # 64")
    assert any("no Deployment nothing" in what for what in find_broken_references({**files, "scaling.yaml": scaled}))


def test_missing_queue_is_detected() -> None:
    files = dict(emit_files("platform", "kubernetes"))
    text = files["chat.yaml"].replace("queue-name: shared-services", "queue-name: nowhere")
    assert any("no LocalQueue nowhere" in what for what in find_broken_references({**files, "chat.yaml": text}))


@pytest.mark.parametrize("name", WITH_COMPOSE)
def test_compose_references_resolve(name: str) -> None:
    for path, text in emit_files(name, "compose").items():
        if not path.endswith("compose.yaml"):
            continue
        tree = yaml.safe_load(text)
        services = tree["services"]
        published = [port for one in services.values() for port in one.get("ports", [])]
        assert len(set(published)) == len(published) and all(port.startswith("127.0.0.1:") for port in published)
        taken: list[str] = []
        for one in services.values():
            assert set(one.get("depends_on", {})) <= set(services)
            assert ":" in one["image"].rpartition("/")[2]
            named = [mount.partition(":")[0] for mount in one.get("volumes", []) if mount[0] not in "./"]
            assert set(named) <= set(tree["volumes"])
            assert {config["source"] for config in one.get("configs", [])} <= set(tree.get("configs", {}))
            if "healthcheck" in one:
                devices = one.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
                taken += [number for device in devices for number in device.get("device_ids", [])]
        assert len(set(taken)) == len(taken)


class TestFigures:
    """Numbers that must agree between parts of the files."""

    @pytest.mark.parametrize("name", [name for name in INTENTS if "cpu" not in name])
    def test_pods_request_at_most_the_gpus_of_a_node(self, name: str) -> None:
        for tree in read_manifests(emit_files(name, "kubernetes")):
            for _, pod in iterate_pods(tree):
                for container in pod["containers"]:
                    requests = container["resources"]["requests"]
                    for vendor in ("nvidia.com/gpu", "amd.com/gpu"):
                        assert requests.get(vendor, 0) == container["resources"]["limits"].get(vendor, 0) <= 8

    @pytest.mark.parametrize("name", list(INTENTS))
    def test_grace_period_covers_drain_and_shutdown(self, name: str) -> None:
        for tree in read_manifests(emit_files(name, "kubernetes")):
            if tree["kind"] not in ("Deployment", "LeaderWorkerSet"):
                continue
            for _, pod in iterate_pods(tree):
                grace = pod["terminationGracePeriodSeconds"]
                for container in pod["containers"]:
                    waits = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                    drains = [int(word.partition("=")[2]) for word in container.get("args", [])
                              if word.startswith("--shutdown-timeout")]  # fmt: skip
                    assert waits + sum(drains) < grace

    def test_quotas_add_up_to_the_gpus_of_each_pool(self) -> None:
        trees = read_manifests(emit_files("platform", "kubernetes"))
        given: dict[str, int] = {}
        for tree in trees:
            if tree["kind"] == "ClusterQueue":
                for flavor in tree["spec"]["resourceGroups"][0]["flavors"]:
                    for resource in flavor["resources"]:
                        if resource["name"].endswith("/gpu"):
                            given[flavor["name"]] = given.get(flavor["name"], 0) + resource["nominalQuota"]
        assert given["nvidia-h100-sxm-80gb"] == 32 and given["nvidia-l4"] == 8 and given["amd-instinct-mi300x"] == 8
