"""Pods wait for the nodes of their plan: the scheduler places them on no others, also where these are free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster.conftest import Cluster
from tests.cluster.scenario import Deployed, emit_for_cluster
from tests.deploy.intents import build_platform

pytestmark = pytest.mark.cluster


@contextmanager
def cordon(cluster: Cluster, hardware: set[str]) -> Iterator[None]:
    """Let no pod be placed on the nodes of these kinds, as `kubectl cordon` does."""
    chosen = [name for name, kind in cluster.nodes.items() if kind.serves in hardware]
    assert chosen

    def set_unschedulable(value: bool | None) -> None:
        for name in chosen:
            body = {"spec": {"unschedulable": value}}
            cluster.plane.call("PATCH", f"/api/v1/nodes/{name}", body, "application/merge-patch+json")

    set_unschedulable(True)
    try:
        yield
    finally:
        set_unschedulable(None)


@pytest.mark.parametrize(
    ("name", "target", "hardware"),
    [
        ("h100-chat", "kubernetes", {"H100 SXM"}),
        ("h100-chat", "ray", {"H100 SXM"}),
        ("h100-chat", "dynamo", {"H100 SXM"}),
        ("two-nodes-405b", "kubernetes", {"H100 SXM"}),
        ("mi300x-chat", "kubernetes", {"MI300X"}),
        ("one-pool", "kubernetes", {"L40S"}),
        ("cpu-llama-cpp", "kubernetes", {"CPU"}),
        ("platform", "kubernetes", {"H100 SXM", "L4", "MI300X", "CPU"}),
    ],
)
def test_pods_wait_while_only_other_nodes_are_free(
    name: str, target: str, hardware: set[str], cluster: Cluster, tmp_path: Path
) -> None:
    """Free are reserved nodes with the same cards, other cards, nodes with different cards and another CPU."""
    deployed = Deployed(cluster.plane, cluster.nodes, tmp_path, build_platform(name))
    try:
        with cordon(cluster, hardware):
            deployed.apply(emit_for_cluster(name, target))
            deployed.expand()
            waiting = deployed.check_placement(cluster.plane.settle(deployed.namespace))
            assert waiting and all("is not placed: Unschedulable" in one for one in waiting), waiting
            services = [placed.name for placed in deployed.platform.services]
            assert all(any(one.startswith(service) for one in waiting) for service in services), waiting
        pods = cluster.plane.settle(deployed.namespace)
        assert not deployed.check_placement(pods)
    finally:
        left = deployed.delete()
    assert not left
