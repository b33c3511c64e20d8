"""Nodes that exist as objects only, with the labels and taints that the vendors' operators set.

Labels: NVIDIA GPU feature discovery (nvidia-smi's product name with dashes), and AMD's node labeller (k8s-device-plugin
ed764684, docs/user-guide/installation.md, cmd/k8s-node-labeller/main.go).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.control_plane import ZONE, ControlPlane

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
PRESENT = "feature.node.kubernetes.io/amd-gpu"


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind. `serves` is the accelerator of the plans that may run there; `None`: none may."""

    name: str
    count: int
    serves: str | None = None
    resource: str | None = None
    cards: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str], ...] = ()
    cores: int = 192
    memory: str = "2Ti"
    arch: str = "amd64"


def _name_product(name: str) -> dict[str, str]:
    return {"nvidia.com/gpu.product": name, "nvidia.com/gpu.present": "true"}


KINDS = (
    NodeKind("h100", 4, "H100 SXM", NVIDIA, 8, _name_product("NVIDIA-H100-80GB-HBM3"), ((NVIDIA, "present"),)),
    NodeKind("h200", 1, "H200 SXM", NVIDIA, 8, _name_product("NVIDIA-H200"), ((NVIDIA, "present"),)),
    NodeKind("a100", 1, "A100 SXM 80GB", NVIDIA, 4, _name_product("NVIDIA-A100-SXM4-80GB")),
    NodeKind("l4", 2, "L4", NVIDIA, 4, _name_product("NVIDIA-L4"), cores=96, memory="384Gi"),
    NodeKind("l40s", 1, "L40S", NVIDIA, 4, _name_product("NVIDIA-L40S"), cores=96, memory="768Gi"),
    NodeKind("rtx4090", 1, "RTX 4090", NVIDIA, 1, _name_product("NVIDIA-GeForce-RTX-4090"), cores=32, memory="128Gi"),
    NodeKind("mi300x", 1, "MI300X", AMD, 8, {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", PRESENT: "true"},
             ((AMD, "present"),)),
    NodeKind("cpu", 4, "CPU", cores=64, memory="256Gi"),
    # Nothing may run on these: the same cards, reserved for others; other cards of the same vendor; another CPU.
    NodeKind("reserved", 2, None, NVIDIA, 8, _name_product("NVIDIA-H100-80GB-HBM3"),
             ((NVIDIA, "present"), ("dedicated", "training"))),
    NodeKind("pcie", 2, None, NVIDIA, 8, _name_product("NVIDIA-H100-PCIe"), ((NVIDIA, "present"),)),
    NodeKind("mi250", 1, None, AMD, 8, {"amd.com/gpu.product-name": "AMD_Instinct_MI250X", PRESENT: "true"},
             ((AMD, "present"),)),
    NodeKind("arm", 2, None, arch="arm64", cores=128, memory="512Gi"),
)  # fmt: skip
MIXED = NodeKind("mixed", 1, None, AMD, 8, {PRESENT: "true", "amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "4",
                                            "amd.com/gpu.product-name.AMD_Instinct_MI210": "4"})  # fmt: skip
"""Where cards differ within a node, AMD's labeller sets no `product-name`."""


def list_nodes() -> Iterator[tuple[NodeKind, dict[str, Any]]]:
    """Yield each node's kind and object; zones alternate."""
    for kind in (*KINDS, MIXED):
        for index in range(kind.count):
            name = f"{kind.name}-{index}"
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": kind.arch,
                      ZONE: f"zone-{index % 2}", **kind.labels}  # fmt: skip
            taints = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in kind.taints]
            yield kind, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
                         "spec": {"taints": taints}}  # fmt: skip


def create_nodes(plane: ControlPlane) -> dict[str, NodeKind]:
    """Create all nodes, and return their kinds by name."""
    found = {}
    for kind, node in list_nodes():
        name = node["metadata"]["name"]
        plane.apply(node, "/api/v1/nodes")
        # Admission marks new nodes as not ready; the controller that would clear that needs heartbeats.
        path, merge = f"/api/v1/nodes/{name}", "application/merge-patch+json"
        plane.call("PATCH", path, {"spec": {"taints": node["spec"]["taints"]}}, merge)
        size = {"cpu": str(kind.cores), "memory": kind.memory, "pods": "110", "ephemeral-storage": "4Ti"}
        size |= {kind.resource: str(kind.cards), "rdma/ib": str(kind.cards)} if kind.resource else {}
        ready = [{"type": "Ready", "status": "True", "reason": "Simulated", "message": "exists as an object only"}]
        status = {"capacity": size, "allocatable": size, "conditions": ready}
        plane.call("PATCH", f"{path}/status", {"status": status}, merge)
        found[name] = kind
    return found
