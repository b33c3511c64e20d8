"""Impossible deployments are refused with a reason, and no file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.intents import FEW, H100, LLAMA, PLATFORM, SERVICES, WORK, make_platform

from bedplate.decide.intent import read_intent
from bedplate.deploy.emit import emit_target, join_manifests
from bedplate.errors import NotPossible, UsageError
from bedplate.hosting.ordering import make_order

WIDE = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8}
SHORT = {**WORK, "prompt_tokens": 512, "precision_sensitive": True}
"""16-bit weights of the big model meet the latency targets on two nodes."""
BIG = "meta-llama/Meta-Llama-3.1-405B"


def catch_refusal(described: dict[str, Any], target: str, engine: str | None = None) -> NotPossible:
    with pytest.raises(NotPossible) as caught:
        emit_target(make_platform(described, engine), target)
    return caught.value


@pytest.mark.parametrize("target", ["compose", "kubernetes", "dynamo", "ray"])
def test_refuses_tensorrt_llm_on_amd(target: str) -> None:
    answer = invoke("plan", LLAMA, "--hardware", "8x MI300X", "--engine", "tensorrt-llm", "--emit", target)
    assert answer.code == 1 and "needs an NVIDIA GPU" in answer.err and not answer.out


@pytest.mark.parametrize("network", [None, "none"])
def test_refuses_replica_larger_than_a_node_without_network(network: str | None) -> None:
    described = {"hardware": {**WIDE, "network": network}, "model": BIG, "workload": SHORT}
    found = catch_refusal(described, "kubernetes", "vllm")
    assert "no network between the nodes" in found.message and "16 GPUs" in found.message
    assert "network" in (found.hint or "")


def test_replica_larger_than_a_node_is_emitted_with_network() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    files = emit_target(make_platform({"hardware": hardware, "model": BIG, "workload": SHORT}, "vllm"), "kubernetes")
    assert "kind: LeaderWorkerSet" in files["meta-llama-3-1-405b.yaml"]


def test_refuses_compose_for_several_nodes() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    found = catch_refusal({"hardware": hardware, "model": LLAMA, "workload": WORK}, "compose")
    assert "one machine" in found.message and "2 nodes" in found.message


def test_refuses_engines_that_an_orchestrator_does_not_support() -> None:
    described = {"hardware": H100, "model": LLAMA, "workload": WORK}
    assert "Ray Serve LLM runs vLLM" in catch_refusal(described, "ray", "sglang").message
    assert "Dynamo runs vllm, sglang, tensorrt-llm" in catch_refusal(described, "dynamo", "tgi").message
    amd = {"hardware": {"accelerator": "MI300X", "count": 8}, "model": LLAMA, "workload": WORK}
    assert "NVIDIA GPUs, but" in catch_refusal(amd, "dynamo").message
    assert "NVIDIA GPUs, but" in catch_refusal(amd, "ray").message


def test_services_that_dynamo_does_not_run_are_plain_deployments() -> None:
    files = emit_target(make_platform(PLATFORM), "dynamo")
    assert "kind: DynamoGraphDeployment" in files["chat.yaml"]
    assert "kind: Deployment" in files["code.yaml"] and "deployed as a plain workload" in files["code.yaml"]


def test_tensorrt_llm_on_several_nodes_needs_dynamo() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    described = {"hardware": hardware, "model": BIG, "workload": WORK}
    found = catch_refusal(described, "kubernetes", "tensorrt-llm")
    assert "several nodes" in found.message and "dynamo" in (found.hint or "")
    assert "nodeCount: 2" in emit_target(make_platform(described, "tensorrt-llm"), "dynamo")["meta-llama-3-1-405b.yaml"]


def test_refuses_containers_on_macos() -> None:
    mac = {"hardware": {"accelerator": "Apple M4 Max", "ram_gb": 64}, "model": "Qwen/Qwen3-8B", "workload": FEW}
    assert "containers need Linux" in catch_refusal(mac, "compose").message


def test_refuses_gateway_for_engine_without_supported_metrics() -> None:
    described = {"hardware": H100, "model": LLAMA, "workload": WORK, "deploy": {"gateway": "inference"}}
    assert "cannot read the metrics" in catch_refusal(described, "kubernetes", "tgi").message


def test_refuses_disaggregation_with_one_worker() -> None:
    described = {"hardware": {**H100, "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW,
                 "deploy": {"layout": "disaggregated"}}  # fmt: skip
    assert "cannot be disaggregated" in catch_refusal(described, "dynamo").message


def test_refuses_platform_with_a_service_that_does_not_fit() -> None:
    pool = {"name": "small", "accelerator": "L4", "count": 1, "gpus_per_node": 1}
    found = catch_refusal(
        {"pools": [pool], "services": [{"name": "large", "model": BIG, "workload": WORK}]}, "kubernetes"
    )
    assert "large does not fit" in found.message


def test_refuses_unknown_target() -> None:
    answer = invoke("plan", LLAMA, "--hardware", "8x H100 SXM", "--emit", "nomad")
    assert answer.code == 2 and "kubernetes" in answer.err
    with pytest.raises(UsageError):
        emit_target(make_platform({"hardware": H100, "model": LLAMA, "workload": WORK}), "nomad")


def test_refuses_script_for_several_services(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text(yaml.safe_dump(PLATFORM))
    answer = invoke("plan", "-f", str(path), "--emit", "command")
    assert answer.code == 2 and "one service" in answer.err


def test_refuses_to_stream_files_that_are_not_manifests() -> None:
    described = {"hardware": {"accelerator": "RTX 4090", "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW}
    files = emit_target(make_platform(described, "pytorch"), "kubernetes")
    assert "images/pytorch/Dockerfile" in files
    with pytest.raises(UsageError, match="Dockerfile"):
        join_manifests(files)


class TestCommandLine:
    CHAT = ("plan", LLAMA, "--hardware", "8x H100 SXM", "--concurrency", "256")

    def test_writes_files_into_a_folder(self, tmp_path: Path) -> None:
        answer = invoke(*self.CHAT, "--emit", "kubernetes", "-o", str(tmp_path / "out"))
        assert answer.code == 0 and "kubectl apply --server-side -k" in answer.out and "vllm" in answer.out
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert {"kustomization.yaml", "namespace.yaml", "network.yaml", "scaling.yaml"} <= names

    def test_output_is_deterministic(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            invoke(*self.CHAT, "--emit", "dynamo", "-o", str(tmp_path / name))
        one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b"))
        assert one == two and one

    def test_stdout_has_only_manifests_and_stderr_has_the_decision(self) -> None:
        answer = invoke(*self.CHAT, "--emit", "kubernetes")
        kinds = [tree["kind"] for tree in yaml.safe_load_all(answer.out)]
        assert answer.code == 0 and "Deployment" in kinds and "Kustomization" not in kinds
        assert "vllm" in answer.err and "serve.default" in answer.err

    def test_prints_the_portfolio_before_writing(self, tmp_path: Path) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text(yaml.safe_dump(PLATFORM))
        answer = invoke("plan", "-f", str(path), "--emit", "kubernetes", "-o", str(tmp_path / "out"))
        assert answer.code == 0 and answer.out.index("Standard: vllm") < answer.out.index("Written to")

    def test_set_options_change_the_manifests(self, tmp_path: Path) -> None:
        options = ("--set", "gateway=ingress/inference", "--set", "namespace=llms")
        answer = invoke(*self.CHAT, *options, "--emit", "kubernetes", "-o", str(tmp_path))
        assert answer.code == 0
        assert "kind: InferencePool" in (tmp_path / "gateway.yaml").read_text()
        assert "namespace: llms" in (tmp_path / "network.yaml").read_text()

    def test_reports_a_folder_that_cannot_be_created(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        answer = invoke(*self.CHAT, "--emit", "compose", "-o", str(tmp_path / "file" / "out"))
        assert answer.code == 3 and "cannot create" in answer.err


ADAPTED = {"hardware": H100, "model": LLAMA, "workload": {**WORK, "lora_adapters": ["acme/sql", "acme/support"]}}


@pytest.mark.parametrize("target", ["dynamo", "ray"])
def test_refuses_adapters_where_another_server_loads_them(target: str) -> None:
    found = catch_refusal(ADAPTED, target, "vllm")
    assert f"the files for {target} do not load" in found.message and "compose" in (found.hint or "")


def test_refuses_adapters_of_this_machine_in_containers() -> None:
    work = {**WORK, "lora_adapters": ["/adapters/sql"]}
    assert "not on a model hub" in catch_refusal({**ADAPTED, "workload": work}, "kubernetes", "vllm").message


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_adapters_are_downloaded_with_the_model_and_loaded_from_the_volume(target: str) -> None:
    text = "".join(emit_target(make_platform(ADAPTED, "vllm"), target).values())
    assert "get('acme/sql', local_dir='/models/sql')" in text.replace("''", "'")
    assert "sql=/models/sql" in text and "support=/models/support" in text
    assert "--lora-modules=sql" not in text, "an option with several values is not joined with the first"


IDLE: dict[str, Any] = {**PLATFORM, "services": [{**SERVICES[1], "ttl": "30m", "tenants": []}]}


class TestScaleToZero:
    """`services[].ttl`: who stops the engines, and who starts them again."""

    def test_refused_without_the_gateway_that_wakes_the_service(self) -> None:
        found = catch_refusal(IDLE, "kubernetes")
        assert "drafts has a ttl" in found.message and "deploy.endpoint: true" in (found.hint or "")

    @pytest.mark.parametrize("target", ["compose", "dynamo", "ray"])
    def test_refused_where_engines_keep_running(self, target: str) -> None:
        found = catch_refusal({**IDLE, "deploy": {"endpoint": True}}, target)
        assert f"the files for {target} keep every engine running" in found.message and found.hint

    def test_gateway_holds_requests_and_its_metrics_start_the_engine(self) -> None:
        files = emit_target(make_platform({**IDLE, "deploy": {"endpoint": True}}), "kubernetes")
        spec = yaml.safe_load(files["scaling.yaml"])["spec"]
        assert spec["minReplicaCount"] == 0 and spec["cooldownPeriod"] == 1800
        queries = {one["name"]: one["metadata"]["query"] for one in spec["triggers"]}
        of = r'{namespace="inference",model=~"qwen/qwen3\\-8b|drafts"}'
        assert queries["gateway"] == f"sum(bedplate_requests_in_flight{of})" and of in queries["recent"]
        (config,) = (
            tree["data"]["gateway.yaml"] for tree in yaml.safe_load_all(files["endpoint.yaml"])
            if tree["kind"] == "ConfigMap"
        )  # fmt: skip
        (order,) = make_order(read_intent(config)).endpoints
        assert order.model == "qwen/qwen3-8b" and order.wait_s is not None and order.wait_s > 60

    def test_engines_stay_without_ttl(self) -> None:
        kept = [{name: value for name, value in IDLE["services"][0].items() if name != "ttl"}]
        described = {**IDLE, "services": kept, "deploy": {"endpoint": True}}
        files = emit_target(make_platform(described), "kubernetes")
        assert yaml.safe_load(files["scaling.yaml"])["spec"]["minReplicaCount"] == 1
        assert "wait:" not in files["endpoint.yaml"] and "bedplate_requests_in_flight" not in files["scaling.yaml"]


@pytest.mark.parametrize("target", ["kubernetes", "ray"])
def test_refuses_to_leave_the_choice_of_different_gpus_to_kubernetes(target: str) -> None:
    described = {"hardware": {"accelerator": "RTX 4060 8GB + RTX 4090", "ram_gb": 64}, "model": "Qwen/Qwen3-4B",
                 "workload": WORK}  # fmt: skip
    found = catch_refusal(described, target, "vllm")
    assert "is planned for NVIDIA GeForce RTX 4090" in found.message
    assert "--emit command or compose" in (found.hint or "")
