"""Emitted files on a real control plane: accepted, unchanged when applied again, placed, upgraded, scaled, deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.conftest import Cluster
from tests.cluster.scenario import (
    Deployed,
    emit_for_cluster,
    list_gpu_pods,
    replace_models,
    upgrade_engines,
)
from tests.deploy.intents import build_platform
from tests.deploy.test_emitted_walk import ON_A_CLUSTER

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_life_on_a_cluster(name: str, target: str, cluster: Cluster, tmp_path: Path) -> None:
    deployed = Deployed(cluster.plane, cluster.nodes, tmp_path, build_platform(name))
    plane, namespace = cluster.plane, deployed.namespace
    files = emit_for_cluster(name, target)
    try:
        # First the models: no pod may hold a GPU while they are downloaded.
        deployed.apply(files, first=True)
        jobs = deployed.list_names("Job")
        waiting = plane.settle(namespace, hold=jobs)
        assert not deployed.check_placement(waiting)
        converts = any("convert" in str(tree) for tree in deployed.trees if tree["kind"] == "Job")
        assert converts or not list_gpu_pods(waiting)
        plane.settle(namespace)
        deployed.apply(files)
        deployed.expand()
        pods = plane.settle(namespace)
        assert not deployed.check_placement(pods)
        assert list_gpu_pods(pods) or "cpu" in name
        assert not deployed.check_volumes()

        before = deployed.read_state()
        deployed.apply(files)
        assert deployed.read_state() == before, "applying the same files changed an object"

        with upgrade_engines():
            deployed.apply(emit_for_cluster(name, target))
        deployed.expand()
        pods = plane.settle(namespace)
        assert not deployed.check_placement(pods)
        images = {one["image"] for pod in pods for one in pod["spec"]["containers"] if one["name"] == "engine"}
        assert all(image.endswith("-next") for image in images)

        deployed.apply(emit_for_cluster(name, target, replace_models))
        deployed.expand()
        assert not deployed.check_placement(plane.settle(namespace))

        for scaled in deployed.scale():
            assert not deployed.check_placement(plane.settle(namespace)), scaled
    finally:
        left = deployed.delete()
    assert not left
