"""Tenants on Kubernetes, and the gateway in front of all services."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.intents import PLATFORM, SERVICES, TEAMS, build_platform, emit_files
from tests.deploy.walk import read_manifests

from bedplate.decide.intent import to_intent
from bedplate.deploy.emit import emit_target
from bedplate.errors import UsageError
from bedplate.hosting.endpoints import check_endpoints
from bedplate.hosting.ordering import make_order
from bedplate.values import replace_fields
from bedplate.values.intent import PlatformTenant

Tree = dict[str, Any]
NAMES = [str(team["name"]) for team in TEAMS]


def find_all(kind: str, name: str = "teams", target: str = "kubernetes") -> dict[tuple[str, str], Tree]:
    return {
        (tree["metadata"].get("namespace", ""), tree["metadata"]["name"]): tree
        for tree in read_manifests(emit_files(name, target))
        if tree["kind"] == kind
    }


def test_each_tenant_has_a_namespace_with_rights_limits_policies_and_a_queue() -> None:
    for name in NAMES:
        space = f"tenant-{name}"
        assert (
            find_all("Namespace")["", space]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        )
        group = find_all("RoleBinding")[space, "members"]["subjects"][0]["name"]
        assert group == ("idp:research" if name == "research" else name)
        assert find_all("ResourceQuota")[space, "tenant"]["spec"]["hard"]["requests.nvidia.com/gpu"] == 40
        assert find_all("LimitRange")[space, "defaults"] and find_all("NetworkPolicy")[space, "default-deny"]
        queue = find_all("LocalQueue")[space, name]["spec"]["clusterQueue"]
        assert find_all("LocalQueue")[space, "default"]["spec"]["clusterQueue"] == queue
        allowed = find_all("ClusterQueue")["", queue]["spec"]["namespaceSelector"]["matchExpressions"][0]["values"]
        assert allowed == ["serving", space], "other tenants cannot use the queue"


def test_gateways_and_services_keep_the_namespaces_that_kueue_manages() -> None:
    """In others its queues are ignored for Deployments and pods; with a default queue the gateway would wait in it."""
    text = emit_files("teams", "kubernetes")["tenants.yaml"]
    assert "managedJobsNamespaceSelector of Kueue's configuration at their defaults" in text
    assert "matchExpressions" not in text
    assert ("serving", "default") not in find_all("LocalQueue")
    platform = build_platform("platform")
    with pytest.raises(UsageError, match="the queue of workloads that name none"):
        emit_target(replace(platform, tenants=(PlatformTenant(name="default"),)), "kubernetes")


def test_members_cannot_change_what_limits_them() -> None:
    rules = find_all("Role")["tenant-sales", "member"]["rules"]
    changed = {name for rule in rules if "create" in rule["verbs"] for name in rule["resources"]}
    assert changed.isdisjoint(
        ["resourcequotas", "limitranges", "networkpolicies", "roles", "rolebindings", "localqueues", "workloads"]
    )


def test_shares_become_weights_quotas_and_limits_of_lending_and_borrowing() -> None:
    queues = find_all("ClusterQueue")
    weights = {name: queues["", name]["spec"]["fairSharing"]["weight"] for name in NAMES}
    assert weights == {"research": "400m", "sales": "300m", "support": "200m", "labs": "100m"}
    assert {queue["spec"]["cohortName"] for queue in queues.values()} == {name for _, name in find_all("Cohort")}
    (group,) = queues["", "research"]["spec"]["resourceGroups"]
    gpus = next(one for one in group["flavors"][0]["resources"] if one["name"] == "nvidia.com/gpu")
    whole = gpus["nominalQuota"]
    assert gpus["lendingLimit"] == int(0.25 * whole) and gpus["borrowingLimit"] == int(0.5 * (32 - whole))
    (group,) = queues["", "sales"]["spec"]["resourceGroups"]
    gpus = next(one for one in group["flavors"][0]["resources"] if one["name"] == "nvidia.com/gpu")
    assert "lendingLimit" not in gpus and gpus["borrowingLimit"] == 32 - gpus["nominalQuota"]
    assert {queue["spec"]["preemption"]["reclaimWithinCohort"] for queue in queues.values()} == {"Any"}


def test_services_are_not_preempted_by_jobs_of_their_tenant() -> None:
    classes = {name: tree["value"] for (_, name), tree in find_all("WorkloadPriorityClass").items()}
    assert classes["production"] == 0 > classes["interactive"] > classes["batch"]


@pytest.mark.parametrize(
    ("shares", "words"),
    [((0.7, 0.5), "add up to 120%"), ((0.5, 0.3), "20% of the quota would belong to nobody")],
)
def test_shares_that_do_not_add_up_are_an_error(shares: tuple[float, float], words: str, tmp_path: Path) -> None:
    teams = [{"name": f"t{share}", "share": share} for share in shares]
    services = [{**one, "tenants": []} for one in SERVICES[:1]]
    intent = tmp_path / "bedplate.yaml"
    intent.write_text(yaml.safe_dump({**PLATFORM, "services": services, "tenants": teams}))
    shown = invoke("plan", "-f", str(intent), "--emit", "kubernetes", "-o", str(tmp_path / "files"))
    assert shown.code == 2 and words in shown.err


def test_tenants_whose_namespaces_would_be_the_same_are_an_error() -> None:
    platform = replace(build_platform("platform"), tenants=(PlatformTenant(name="a.b"), PlatformTenant(name="a-b")))
    with pytest.raises(UsageError, match="the same as names of Kubernetes"):
        emit_target(platform, "kubernetes")


def test_the_example_of_the_documentation_is_written(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "platform.yaml"
    shown = invoke("plan", "-f", str(example), "--emit", "kubernetes", "-o", str(tmp_path / "files"))
    assert shown.code == 0, shown.err
    written = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"chat.yaml", "drafts.yaml", "code.yaml", "endpoint.yaml", "tenants.yaml", "queues.yaml"} <= written
    tenants = example.read_text().partition("tenants:\n")[2].partition("operations")[0]
    assert tenants in (example.parents[1] / "docs" / "platform.md").read_text()


class TestGateway:
    @pytest.mark.parametrize("target", ["kubernetes", "ray", "dynamo"])
    def test_its_configuration_is_an_order_for_every_service(
        self, target: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = find_all("ConfigMap", target=target)["serving", "bedplate-gateway"]["data"]["gateway.yaml"]
        monkeypatch.setenv("ENGINE_KEY", "secret")
        order = make_order(to_intent(yaml.safe_load(text)))
        check_endpoints(order)
        assert not order.services and len(order.endpoints) == 2
        limits = {one.name: (one.in_flight, one.tokens_per_minute) for one in order.tenants}
        assert limits == {
            "research": (None, None), "sales": (32, None), "support": (None, 100_000), "labs": (None, None),
        }  # fmt: skip
        assert order.endpoints[1].tenants == ("sales", "support")
        services = {name for _, name in find_all("Service", target=target)}
        if target == "kubernetes":
            assert {one.url for one in order.endpoints} == {"http://chat/v1", "http://drafts/v1"} and "chat" in services

    def test_a_pod_ends_after_its_answers_and_after_clients_stopped_coming(self) -> None:
        spec = find_all("Deployment")["serving", "bedplate-gateway"]["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        drain_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = int(container["args"][container["args"].index("--grace") + 1].removesuffix("s"))
        engines = [
            tree["spec"]["template"]["spec"]
            for (_, name), tree in find_all("Deployment").items()
            if name != "bedplate-gateway"
        ]
        assert grace_s >= max(one["terminationGracePeriodSeconds"] for one in engines)
        assert pod["terminationGracePeriodSeconds"] > drain_s + grace_s
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert container["image"].startswith("registry.example.com/bedplate:")
        assert container["securityContext"]["readOnlyRootFilesystem"]

    def test_it_does_not_start_without_its_secrets(self) -> None:
        (container,) = find_all("Deployment")["serving", "bedplate-gateway"]["spec"]["template"]["spec"]["containers"]
        secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
        assert set(secrets) == {"BEDPLATE_USAGE_STORE", "BEDPLATE_API_KEY", "ENGINE_KEY"}
        assert not any(one.get("optional") for one in secrets.values())

    def test_another_configuration_replaces_its_pods(self) -> None:
        platform = build_platform("teams")
        changed = replace(platform, tenants=(replace_fields(platform.tenants[0], in_flight=7), *platform.tenants[1:]))

        def find_annotations(files: dict[str, str]) -> Tree:
            trees = read_manifests(files)
            made = next(
                one for one in trees if one["kind"] == "Deployment" and one["metadata"]["name"] == "bedplate-gateway"
            )
            annotations: Tree = made["spec"]["template"]["metadata"]["annotations"]
            return annotations

        assert find_annotations(emit_target(changed, "kubernetes")) != find_annotations(
            emit_files("teams", "kubernetes")
        )

    def test_it_is_written_only_where_asked(self) -> None:
        assert "endpoint.yaml" not in emit_files("platform", "kubernetes")
