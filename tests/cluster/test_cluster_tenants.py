"""Tenants on a real control plane: what members may do, and what their namespace refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import Cluster
from tests.cluster.control_plane import Refused
from tests.cluster.scenario import Deployed, emit_for_cluster
from tests.conftest import wait_for
from tests.deploy.intents import build_platform

pytestmark = pytest.mark.cluster
PAGE = Path(__file__).parents[2] / "docs" / "platform.md"
SAFE = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def make_pod(name: str, **container: Any) -> dict[str, Any]:
    made = {"name": "main", "image": "example.com/train", "securityContext": SAFE, **container}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [made]}}


def test_members_rights_quotas_and_limits(cluster: Cluster, tmp_path: Path) -> None:
    deployed = Deployed(cluster.plane, cluster.nodes, tmp_path, build_platform("teams"))
    plane = cluster.plane

    def can(verb: str, what: str, tenant: str, group: str) -> bool:
        words = ("auth", "can-i", verb, what, "-n", f"tenant-{tenant}", "--as=ada", f"--as-group={group}")
        try:
            return plane.kubectl(*words).strip() == "yes"
        except Refused:
            return False

    try:
        deployed.apply(emit_for_cluster("teams", "kubernetes"), first=True)
        assert can("create", "jobs.batch", "research", "idp:research") and can("create", "secrets", "sales", "sales")
        for verb, what, tenant, group in (
            ("create", "jobs.batch", "sales", "idp:research"),
            ("get", "secrets", "research", "sales"),
            ("update", "resourcequotas", "sales", "sales"),
            ("delete", "networkpolicies.networking.k8s.io", "sales", "sales"),
            ("create", "rolebindings.rbac.authorization.k8s.io", "sales", "sales"),
            ("create", "localqueues.kueue.x-k8s.io", "sales", "sales"),
        ):
            assert not can(verb, what, tenant, group), (verb, what, tenant, group)
        pods = "/api/v1/namespaces/tenant-sales/pods"
        made = plane.call("POST", pods, make_pod("plain"))
        (container,) = made["spec"]["containers"]
        assert container["resources"]["requests"] == {"cpu": "500m", "memory": "1Gi"}
        gpus = {"limits": {"nvidia.com/gpu": 41}, "requests": {"cpu": 1, "memory": "1Gi"}}
        with pytest.raises(Refused, match="exceeded quota"):
            plane.call("POST", pods, make_pod("too-large", resources=gpus))
        with pytest.raises(Refused, match="violates PodSecurity"):
            plane.call("POST", pods, make_pod("root", securityContext={"privileged": True}))
        job = re.search(r"^```yaml\n(apiVersion: batch/v1\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        assert job is not None
        (tmp_path / "sweep.yaml").write_text(job[1])
        plane.kubectl("apply", "-f", str(tmp_path / "sweep.yaml"), "--as=ada", "--as-group=labs")
        wait_for(lambda: plane.get_pods("tenant-labs"), "a pod of the Job in docs/platform.md")
        service = {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "open"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
        }  # fmt: skip
        with pytest.raises(Refused, match="exceeded quota"):
            plane.call("POST", "/api/v1/namespaces/tenant-sales/services", service)
    finally:
        left = deployed.delete()
    assert not [name for name in left if name != "plain"]
