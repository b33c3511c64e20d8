"""Who must and must not reach whom, by the semantics of network policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.deploy.intents import build_platform, emit_files
from tests.deploy.walk import iterate_pods, read_manifests

from bedplate.deploy.emit import emit_target
from bedplate.values import replace_fields

Tree = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A pod, or with no namespace an address outside of the cluster."""

    namespace: str | None
    labels: dict[str, str] = field(default_factory=dict)


STRANGER = Peer("other", {"app": "shell"})
CLIENT = {"app": "client"}
DNS = Peer("kube-system", {"k8s-app": "kube-dns"})
HUB = Peer(None)
GATEWAY = "gateway.networking.k8s.io/gateway-name"


def matches(selector: Tree, labels: dict[str, str]) -> bool:
    alike = all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())
    return alike and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def admits(rule: Tree, key: str, peer: Peer, port: int, home: str) -> bool:
    if "ports" in rule and all(one["port"] != port for one in rule["ports"]):
        return False
    return key not in rule or any(is_selected(one, peer, home) for one in rule[key])


def is_selected(one: Tree, peer: Peer, home: str) -> bool:
    if peer.namespace is None:
        return False
    if "namespaceSelector" in one:
        if not matches(one["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace}):
            return False
    elif peer.namespace != home:
        return False
    return matches(one.get("podSelector", {}), peer.labels)


class Network:
    """The pods and policies of one set of files."""

    def __init__(self, name: str, target: str, files: Mapping[str, str] | None = None) -> None:
        self.trees = read_manifests(files or emit_files(name, target))
        self.home = next(tree["metadata"]["name"] for tree in self.trees if tree["kind"] == "Namespace")
        found = [tree for tree in self.trees if tree["kind"] == "NetworkPolicy"]
        self.policies = [(tree["metadata"]["namespace"], tree["spec"]) for tree in found]

    def find(self, component: str, service: str | None = None) -> Peer:
        """Return the first pod of a component: engine, model, head, frontend or picker."""
        return next(peer for peer in self.list_pods() if is_component(peer, component, service))

    def list_pods(self) -> Iterator[Peer]:
        for tree in self.trees:
            for labels, _ in iterate_pods(tree):
                yield Peer(self.home, labels)

    def allows(self, source: Peer, target: Peer, port: int, *, ingress_only: bool = False) -> bool:
        leaves = ingress_only or self._passes(source, target, port, "Egress", "egress", "to")
        return leaves and self._passes(target, source, port, "Ingress", "ingress", "from")

    def _passes(self, pod: Peer, peer: Peer, port: int, kind: str, rules: str, key: str) -> bool:
        own = [
            one
            for home, one in self.policies
            if home == pod.namespace and kind in one["policyTypes"] and matches(one["podSelector"], pod.labels)
        ]
        home = pod.namespace or ""
        return not own or any(admits(rule, key, peer, port, home) for one in own for rule in one.get(rules, []))


def is_component(peer: Peer, component: str, service: str | None) -> bool:
    labels = peer.labels
    named = labels.get("app.kubernetes.io/component") == component or (
        component == "picker" and labels.get("app.kubernetes.io/name", "").endswith("-picker")
    )
    return named and service in (None, labels.get("app.kubernetes.io/instance"))


def test_engine_is_reached_by_clients_prometheus_and_the_gateway_only() -> None:
    net = Network("gateway", "kubernetes")
    engine = net.find("engine")
    for source, port, allowed in (
        (Peer(net.home, CLIENT), 8000, True),
        (Peer(net.home, CLIENT), 22, False),
        (Peer("monitoring"), 8000, True),
        (Peer("ingress", {"app": "proxy"}), 8000, True),
        (Peer("envoy-gateway-system", {GATEWAY: "inference"}), 8000, True),
        (Peer("envoy-gateway-system", {GATEWAY: "another"}), 8000, False),
        (STRANGER, 8000, False),
        (HUB, 8000, False),
    ):
        assert net.allows(source, engine, port, ingress_only=True) == allowed, (source, port)
    assert net.allows(net.find("picker"), engine, 8000)


@pytest.mark.parametrize("name", ["h100-chat", "platform", "two-nodes-sglang", "cpu-ollama"])
def test_only_the_job_reaches_the_hub(name: str) -> None:
    net = Network(name, "kubernetes")
    assert net.allows(net.find("model"), HUB, 443) and not net.allows(net.find("model"), HUB, 80)
    assert not net.allows(net.find("engine"), HUB, 443)
    assert net.allows(net.find("engine"), DNS, 53) and not net.allows(net.find("engine"), DNS, 443)
    assert not net.allows(STRANGER, net.find("model"), 8000)


def test_copied_models_need_no_network() -> None:
    platform = build_platform("h100-chat")
    copied = replace(platform, deploy=replace_fields(platform.deploy, models="copy"))
    net = Network("h100-chat", "kubernetes", emit_target(copied, "kubernetes"))
    for peer, port in ((HUB, 443), (DNS, 53), (STRANGER, 443)):
        assert not net.allows(net.find("model"), peer, port)
    assert net.allows(net.find("engine"), DNS, 53)


def test_ranks_of_a_replica_reach_each_other_and_no_other_service() -> None:
    net = Network("two-nodes-405b", "kubernetes")
    engine = net.find("engine")
    assert net.allows(engine, engine, 29500) == any(tree["kind"] == "LeaderWorkerSet" for tree in net.trees)
    several = Network("platform", "kubernetes")
    assert not several.allows(several.find("engine", "chat"), several.find("engine", "code"), 8000)


@pytest.mark.parametrize("target", ["kubernetes", "ray", "dynamo"])
def test_tenants_reach_the_endpoint_and_neither_engines_nor_each_other(target: str) -> None:
    net = Network("teams", target)
    gateway, engine = net.find("gateway"), net.find("engine")
    database, job = Peer("databases", {"app": "postgresql"}), {"app": "job"}
    for source, peer, port, allowed in (
        (Peer("tenant-research", job), gateway, 8000, True),
        (Peer("tenant-research", job), engine, 8000, False),
        (Peer("tenant-research", job), Peer("tenant-sales", job), 8000, False),
        (Peer("tenant-research", job), Peer("tenant-research", job), 8000, True),
        (Peer("tenant-research", job), DNS, 53, True),
        (Peer("tenant-research", job), HUB, 443, False),
        (STRANGER, Peer("tenant-research", job), 8000, False),
        (gateway, engine, 8000, True),
        (gateway, database, 5432, True),
        (gateway, database, 80, False),
        (gateway, Peer("tenant-sales", job), 8000, False),
        (Peer("monitoring"), gateway, 8000, True),
    ):
        assert net.allows(source, peer, port) == allowed, (source, peer, port)
    if target == "kubernetes":
        assert not net.allows(Peer(net.home, CLIENT), engine, 8000, ingress_only=True), "only the gateway has the key"


def test_ray_operator_reaches_the_head() -> None:
    net = Network("h100-chat", "ray")
    head = net.find("head")
    operator = Peer("kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"})
    assert net.allows(operator, head, 8265)
    assert not net.allows(STRANGER, head, 8265)
    assert net.allows(net.find("engine"), head, 6379) and net.allows(net.find("model"), HUB, 443)


def test_dynamo_frontend_reaches_its_workers() -> None:
    net = Network("h100-chat", "dynamo")
    assert net.allows(net.find("frontend"), net.find("engine"), 9090)
    assert not net.allows(STRANGER, net.find("frontend"), 8000)
