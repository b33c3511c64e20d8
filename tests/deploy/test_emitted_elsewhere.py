"""Endpoints elsewhere among the services of a platform: the gateway in the cluster sends requests to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.intents import PLATFORM, SERVICES, TEAMS, make_platform
from tests.deploy.walk import find_broken_references, read_manifests

from bedplate.decide.intent import to_intent
from bedplate.deploy.emit import emit_target
from bedplate.errors import NotPossible, UsageError
from bedplate.hosting.endpoints import check_endpoints, make_endpoints
from bedplate.hosting.ordering import make_order

Tree = dict[str, Any]
CLOUD: Tree = {"url": "https://api.example.com:8443/v1", "model": "owner/large", "key_env": "CLOUD_KEY", "share": 0.5}
CHAT = "meta-llama/Meta-Llama-3.1-70B"


def describe(*services: Tree, **more: Any) -> Tree:
    return {
        **PLATFORM, "services": list(services), "tenants": TEAMS,
        "deploy": {"endpoint": True, "namespace": "serving"}, **more,
    }  # fmt: skip


def find_all(files: dict[str, str], kind: str, name: str = "bedplate-gateway") -> Tree:
    return next(
        one for one in read_manifests(files) if one["kind"] == kind and one["metadata"].get("name") == name
    )  # fmt: skip


def read_gateway(files: dict[str, str]) -> Tree:
    found: Tree = yaml.safe_load(find_all(files, "ConfigMap")["data"]["gateway.yaml"])
    return found


def test_gateway_has_the_endpoints_in_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = {**CLOUD, "name": CHAT, "price_per_million_tokens": 2, "tenants": ["sales"]}
    platform = make_platform(
        describe({**CLOUD, "wait": "2m"}, {**SERVICES[0], "tenants": ["sales"]}, joining, routing="order")
    )
    files = emit_target(platform, "kubernetes")
    assert not find_broken_references(files)
    monkeypatch.setenv("ENGINE_KEY", "one")
    monkeypatch.setenv("CLOUD_KEY", "two")
    order = make_order(to_intent(read_gateway(files)))
    check_endpoints(order)
    backends = make_endpoints(order, [])
    served = CHAT.lower()
    assert [(one.model, one.sent_name) for one in backends] == [
        ("owner/large", "owner/large"), (served, served), (served, "owner/large"),
    ]  # fmt: skip
    assert [(one.rank, one.share, one.price, one.engine_key) for one in backends] == [
        (0, 0.5, 0, "two"), (1, 1, 0, "one"), (2, 0.5, 2, "two"),
    ]  # fmt: skip
    assert order.routing == "order" and backends[0].wait_s == 120
    assert order.endpoints[2].tenants == ("sales",)


def test_keys_come_from_a_secret_and_ports_are_open() -> None:
    files = emit_target(make_platform(describe(SERVICES[0], CLOUD)), "kubernetes")
    (container,) = find_all(files, "Deployment")["spec"]["template"]["spec"]["containers"]
    (key,) = (one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "CLOUD_KEY")
    assert key == {"name": "endpoint-keys", "key": "CLOUD_KEY"}
    assert "generic endpoint-keys -n serving --from-literal=CLOUD_KEY=…" in files["endpoint.yaml"]
    egress = find_all(files, "NetworkPolicy")["spec"]["egress"]
    assert {one["port"] for one in egress[-1]["ports"]} == {5432, 8443}


def test_origins_of_web_pages_are_passed_on() -> None:
    platform = make_platform(describe(SERVICES[0], allow_origins=["https://chat.example.com"]))
    assert read_gateway(emit_target(platform, "kubernetes"))["allow_origins"] == ["https://chat.example.com"]


@pytest.mark.parametrize("target", ["kubernetes", "ray", "dynamo"])
def test_files_without_a_gateway_refuse_an_endpoint(target: str) -> None:
    platform = make_platform(describe(SERVICES[0], CLOUD, deploy={"namespace": "serving"}))
    with pytest.raises(NotPossible, match=r"api\.example\.com.*no gateway") as caught:
        emit_target(platform, target)
    assert "deploy.endpoint: true" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"url": "http://127.0.0.1:9000/v1"}, "the gateway's own pod"),
        ({"key_env": "ENGINE_KEY"}, "cannot be a variable"),
        ({"key_env": "a b"}, "cannot be a variable"),
        ({"url": "http://api.example.com/v1"}, "unencrypted"),
        ({"url": "ftp://api.example.com"}, "must be an http or https URL"),
        ({"name": CHAT, "tenants": ["labs"]}, "different tenants"),
        ({"model": {"params_b": 7}}, "facts of a model"),
    ],
)
def test_what_the_gateway_would_refuse_at_its_start_is_an_error(changed: Tree, words: str, tmp_path: Path) -> None:
    intent = tmp_path / "platform.yaml"
    intent.write_text(yaml.safe_dump(describe(SERVICES[0], {**CLOUD, **changed})))
    shown = invoke("plan", "-f", str(intent), "--emit", "kubernetes", "-o", str(tmp_path / "files"))
    assert shown.code == 2 and words in shown.err, shown.err


def test_key_may_be_sent_unencrypted_within_the_cluster(tmp_path: Path) -> None:
    intent = tmp_path / "platform.yaml"
    intent.write_text(yaml.safe_dump(describe(SERVICES[0], {**CLOUD, "url": "http://vllm.team.svc:8000/v1"})))
    shown = invoke("plan", "-f", str(intent), "--emit", "kubernetes", "-o", str(tmp_path / "files"))
    assert shown.code == 0, shown.err


def test_idle_model_is_not_joined() -> None:
    joining = {**CLOUD, "name": CHAT}
    with pytest.raises(UsageError, match="ttl cannot be combined"):
        emit_target(make_platform(describe({**SERVICES[0], "ttl": "10m"}, joining)), "kubernetes")


class TestNames:
    """Names of services, tenants and namespaces that the files use themselves."""

    @pytest.mark.parametrize("target", ["kubernetes", "ray", "dynamo"])
    def test_no_object_and_no_file_is_lost(self, target: str) -> None:
        names = ["gateway", "network", "queues", "namespace", "service-queues", "default-deny", "bedplate-gateway",
                 "chat-model", "chat", "x" * 60, "x" * 61, "モデル", "模型"]  # fmt: skip
        own = {"model": "Qwen/Qwen3-8B", "pool": "big", "workload": {"concurrency": 1}}
        deploy = {"endpoint": True, "namespace": "serving"}
        platform = make_platform(describe(*({**own, "name": one} for one in names), deploy=deploy))
        files = emit_target(platform, target)
        assert not find_broken_references(files)
        engines = [one.name for one in platform.services]
        assert len(set(engines)) == len(names) and all(len(one) <= 40 for one in engines)
        named = {one["metadata"]["name"] for one in read_manifests(files)}
        assert set(engines) <= named

    def test_names_that_the_endpoint_or_the_queues_cannot_have_are_errors(self) -> None:
        for tenants, deploy, words in (
            ([{"name": "shared-services"}], {}, "is the queue of services"),
            ([{"name": "研究"}], {"endpoint": True}, "is not a valid tenant name"),
            ([{"name": "labs"}], {"namespace": "tenant-labs"}, "is the namespace of tenant labs"),
        ):
            service = {**SERVICES[0], "tenants": []}
            with pytest.raises(UsageError, match=words):
                emit_target(make_platform(describe(service, tenants=tenants, deploy=deploy)), "kubernetes")
