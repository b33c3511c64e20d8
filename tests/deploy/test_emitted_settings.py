"""Settings of the intent reach the files: gateways, metrics, engines, replicas and keys; or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.intents import H100, LLAMA, PLATFORM, TENANTS, TWO_NODES, WORK, make_platform
from tests.deploy.walk import find_broken_references, read_manifests

from bedplate.decide import decide, plan
from bedplate.deploy.emit import emit_target, list_unused_settings
from bedplate.deploy.shell import write_script
from bedplate.engines import get_engine
from bedplate.errors import NotPossible
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Workload

Tree = dict[str, Any]
CHAT: Tree = {"hardware": H100, "model": LLAMA, "workload": WORK}
POOL: Tree = {"name": "big", "accelerator": "H100 SXM", "count": 8, "gpus_per_node": 8}
SERVICE: Tree = {"name": "chat", "model": "Qwen/Qwen3-8B", "workload": WORK}
BIG = "meta-llama/Meta-Llama-3.1-405B"


def emit(described: Tree, target: str = "kubernetes", engine: str | None = None, **deploy: str) -> list[Tree]:
    files = emit_target(make_platform({**described, "deploy": deploy}, engine), target)
    return read_manifests(files)


def find(trees: list[Tree], kind: str, name: str | None = None) -> Tree:
    return next(one for one in trees if one["kind"] == kind and name in (None, one["metadata"]["name"]))


class TestGateway:
    def test_istio_connects_to_the_picker_by_tls(self) -> None:
        trees = emit(CHAT, gateway="ingress/inference", gateway_provider="istio")
        rule = find(trees, "DestinationRule")
        picker = find(trees, "InferencePool")["spec"]["endpointPickerRef"]["name"]
        assert rule["spec"]["host"] == f"{picker}.inference.svc.cluster.local"
        assert rule["spec"]["trafficPolicy"]["tls"]["mode"] == "SIMPLE"

    def test_gke_has_health_check_and_timeout_policies(self) -> None:
        trees = emit(CHAT, gateway="ingress/inference", gateway_provider="gke")
        check = find(trees, "HealthCheckPolicy")["spec"]
        assert check["default"]["config"]["httpHealthCheck"] == {"requestPath": "/health", "port": 8000}
        assert find(trees, "GCPBackendPolicy")["spec"]["targetRef"] == check["targetRef"]
        assert "timeouts" not in find(trees, "HTTPRoute")["spec"]["rules"][0]

    def test_agentgateway_needs_a_picker_without_tls(self) -> None:
        def list_arguments(**deploy: str) -> list[str]:
            trees = emit(CHAT, gateway="ingress/inference", **deploy)
            made = find(trees, "Deployment", "meta-llama-3-1-70b-picker")
            arguments: list[str] = made["spec"]["template"]["spec"]["containers"][0]["args"]
            return arguments

        assert "--secure-serving=false" in list_arguments(gateway_provider="agentgateway")
        assert "--secure-serving=false" not in list_arguments()

    def test_data_plane_in_another_namespace_reaches_the_engine(self) -> None:
        policy = find(emit(CHAT, gateway="ingress/inference"), "NetworkPolicy", "meta-llama-3-1-70b")
        callers = policy["spec"]["ingress"][0]["from"]
        label = {"gateway.networking.k8s.io/gateway-name": "inference"}
        assert {"namespaceSelector": {}, "podSelector": {"matchLabels": label}} in callers

    @pytest.mark.parametrize(
        ("target", "service"), [("dynamo", "meta-llama-3-1-70b-frontend"), ("ray", "meta-llama-3-1-70b-serve-svc")]
    )
    def test_orchestrated_services_have_a_route(self, target: str, service: str) -> None:
        trees = emit(CHAT, target, gateway="ingress/inference")
        (backend,) = find(trees, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
        assert backend == {"kind": "Service", "name": service, "port": 8000}

    def test_service_that_the_picker_cannot_read_does_not_block_the_platform(self) -> None:
        described = {**PLATFORM, "deploy": {"gateway": "ingress/inference"}}
        files = emit_target(make_platform(described), "kubernetes")
        trees = read_manifests(files)
        assert find(trees, "HTTPRoute", "search")["spec"]["rules"][0]["backendRefs"][0]["kind"] == "Service"
        assert find(trees, "HTTPRoute", "chat")["spec"]["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"
        assert not find_broken_references(files)


class TestMetrics:
    @pytest.mark.parametrize(
        ("address", "namespace"),
        [
            (None, "monitoring"), ("http://prometheus.observability.svc:9090", "observability"),
            ("http://thanos.metrics:9090", "metrics"), ("https://prometheus.example.com", "monitoring"),
        ],
    )  # fmt: skip
    def test_network_policy_admits_the_namespace_of_prometheus(self, address: str | None, namespace: str) -> None:
        trees = emit(CHAT, **({"prometheus": address} if address else {}))
        callers = find(trees, "NetworkPolicy", "meta-llama-3-1-70b")["spec"]["ingress"][0]["from"]
        assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}} in callers

    @pytest.mark.parametrize("target", ["kubernetes", "ray"])
    def test_pod_monitors_have_the_label_of_the_release(self, target: str) -> None:
        assert find(emit(CHAT, target), "PodMonitor")["metadata"]["labels"]["release"] == "kube-prometheus-stack"
        trees = emit(CHAT, target, prometheus_release="metrics")
        assert find(trees, "PodMonitor")["metadata"]["labels"]["release"] == "metrics"

    @pytest.mark.parametrize(("engine", "has_key"), [("llama.cpp", True), ("vllm", False)])
    def test_prometheus_has_the_key_of_engines_that_require_it_for_metrics(self, engine: str, has_key: bool) -> None:
        """llama.cpp answers /metrics only with its key; the gateway's files need the Secret."""
        service = {**SERVICE, "engine": engine, "workload": {"concurrency": 4}}
        described = {"pools": [POOL], "services": [service], "deploy": {"endpoint": True}}
        monitor = find(read_manifests(emit_target(make_platform(described), "kubernetes")), "PodMonitor", "chat")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        key = {"credentials": {"name": "engine-key", "key": "key"}}
        assert endpoint.get("authorization") == (key if has_key else None)
        assert get_engine(engine).requires_key("/metrics") == has_key

    def test_files_say_what_to_add_with_a_key_that_is_optional(self) -> None:
        """A monitor that names a Secret which is not there would not be read at all."""
        service = {**SERVICE, "engine": "llama.cpp", "workload": {"concurrency": 4}}
        files = emit_target(make_platform({"pools": [POOL], "services": [service]}), "kubernetes")
        assert "authorization" not in find(read_manifests(files), "PodMonitor")["spec"]["podMetricsEndpoints"][0]
        assert "authorization: {credentials: {name: engine-key, key: key}}" in " ".join(
            files["monitoring.yaml"].replace("#", "").split()
        )

    @pytest.mark.parametrize("target", ["kubernetes", "dynamo"])
    def test_planned_replicas_stay_when_prometheus_fails(self, target: str) -> None:
        spec = find(emit(CHAT, target), "ScaledObject")["spec"]
        assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"


class TestDynamoOnSeveralNodes:
    def test_files_state_what_the_operator_needs(self) -> None:
        files = emit_target(make_platform({"hardware": TWO_NODES, "model": BIG, "workload": WORK}, "sglang"), "dynamo")
        spans = "multinode:" in files["meta-llama-3-1-405b.yaml"]
        assert ("Grove, or with LeaderWorkerSet and Volcano" in files["kustomization.yaml"]) == spans

    def test_ranks_are_admitted_together(self) -> None:
        described = {"hardware": TWO_NODES, "model": BIG, "tenants": TENANTS,
                     "workload": {**WORK, "prompt_tokens": 512, "precision_sensitive": True}}  # fmt: skip
        trees = emit(described, "dynamo", "vllm")
        worker = find(trees, "DynamoGraphDeployment")["spec"]["components"][1]
        meta = worker["podTemplate"]["metadata"]
        assert worker["multinode"]["nodeCount"] == 2
        assert meta["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == str(2 * worker["replicas"])
        assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "meta-llama-3-1-405b-worker"
        level = find(trees, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        assert level == "baseline", "the operator adds init containers without a security context"


class TestInputs:
    def test_engine_and_replicas_of_a_service_in_a_pool(self) -> None:
        services = [{**SERVICE, "engine": "sglang", "replicas": 3}]
        platform = make_platform({"pools": [POOL], "services": services})
        assert platform.services[0].plan.engine == "sglang" and platform.services[0].copies == 3
        files = emit_target(platform, "kubernetes")
        scaled = find(read_manifests(files), "ScaledObject")["spec"]
        assert scaled["fallback"]["replicas"] % 3 == 0 and scaled["maxReplicaCount"] <= 8

    def test_replicas_that_do_not_fit_are_refused(self) -> None:
        services = [{**SERVICE, "replicas": 9}]
        with pytest.raises(NotPossible, match="does not fit"):
            make_platform({"pools": [POOL], "services": services})

    @pytest.mark.parametrize("target", ["kubernetes", "dynamo", "ray"])
    def test_files_say_where_no_key_is_checked(self, target: str) -> None:
        text = emit_target(make_platform(CHAT), target)["meta-llama-3-1-70b.yaml"]
        assert ("No API key is checked" in text) == (target != "kubernetes")

    @pytest.mark.parametrize(
        ("target", "deploy", "unused"),
        [
            ("compose", {"endpoint": True, "gateway": "ingress/inference", "gateway_provider": "gke"},
             ["deploy.gateway", "deploy.endpoint", "tenants", "deploy.gateway_provider"]),
            ("kubernetes", {"layout": "disaggregated", "gateway_provider": "gke"},
             ["deploy.gateway_provider", "deploy.layout"]),
            ("kubernetes", {"layout": "aggregated", "gateway": "inference", "gateway_provider": "gke"}, []),
            ("dynamo", {"layout": "disaggregated", "endpoint": True}, []),
        ],
    )  # fmt: skip
    def test_settings_that_the_files_do_not_express_are_named(
        self, target: str, deploy: Tree, unused: list[str]
    ) -> None:
        platform = make_platform({**CHAT, "tenants": TENANTS, "deploy": deploy})
        assert sorted(list_unused_settings(platform, target)) == sorted(unused)

    def test_the_command_line_names_them(self) -> None:
        words = ("--hardware", "8x H100 SXM", "--concurrency", "64", "--set", "gateway=ingress/inference")
        answer = invoke("plan", LLAMA, *words, "--emit", "compose")
        assert answer.code == 0 and "Without effect in files for compose: deploy.gateway" in answer.err
        assert "Without effect" not in answer.out
        assert "Without effect" not in invoke("plan", LLAMA, *words, "--emit", "kubernetes").err

    def test_script_for_several_nodes_has_the_command_of_each(self) -> None:
        answer = invoke("plan", BIG, "--hardware", "16x H100 SXM", "--concurrency", "256", "--emit", "command")
        assert answer.code == 0 and ': "${NODE_RANK:?' in answer.out and "\n1)\n" in answer.out

    def test_replicas_of_a_mixture_are_separate_containers(self) -> None:
        hardware = {"accelerator": "B200 SXM", "count": 4, "ram_gb": 512}
        asked = {"hardware": hardware, "model": "Qwen/Qwen3-30B-A3B-FP8", "workload": {"concurrency": 1024}}
        (text,) = emit_target(make_platform(asked), "compose").values()
        assert text.count("device_ids:") == 4 and "--data-parallel-size" not in text
        assert all(f'"127.0.0.1:{port}:8000"' in text for port in range(8000, 8004))


class TestDifferentCards:
    """The files name the GPUs of the plan as the driver does."""

    @pytest.mark.parametrize(("cards", "place"), [("RTX 4060 8GB + RTX 4090", "1"), ("RTX 4090 + RTX 4060 8GB", "0")])
    def test_compose_reserves_the_chosen_gpu(self, cards: str, place: str) -> None:
        engine = self.read_engine(cards)
        (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [place] and "count" not in device
        # In the container, the GPU has the number 0.
        assert "CUDA_VISIBLE_DEVICES" not in engine["environment"]

    def test_compose_shows_the_chosen_amd_gpu_by_the_number_of_its_driver(self) -> None:
        engine = self.read_engine("RTX 3060 12GB + RX 7900 XTX")
        assert engine["environment"]["HIP_VISIBLE_DEVICES"] == "0"

    def test_the_script_exports_the_variables(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "RTX 4060 8GB + RTX 4090", "ram_gb": 64})
        model, work = find_model("Qwen/Qwen3-4B"), Workload(concurrency=16)
        decision = decide(hardware, model, work, "vllm")
        script = write_script(plan(decision, model, work), decision)
        assert "export CUDA_VISIBLE_DEVICES=1\n" in script and "export CUDA_DEVICE_ORDER=PCI_BUS_ID\n" in script

    def read_engine(self, cards: str) -> dict[str, Any]:
        described = {"hardware": {"accelerator": cards, "ram_gb": 64}, "model": "Qwen/Qwen3-4B", "workload": WORK}
        files = emit_target(make_platform(described, "vllm"), "compose")
        found: dict[str, Any] = yaml.safe_load(files["compose.yaml"])["services"]["qwen3-4b"]
        return found
