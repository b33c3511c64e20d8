"""What cannot be is refused with its reason, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.intents import FEW, H100, LLAMA, PLATFORM, WORK, made_platform

from bedplate.deploy.emit import as_one_stream, emitted
from bedplate.errors import AnswerIsNo, BadQuestion

WIDE = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8}
BIG = "meta-llama/Meta-Llama-3.1-405B"


def refusal(described: dict[str, Any], target: str, engine: str | None = None) -> AnswerIsNo:
    with pytest.raises(AnswerIsNo) as caught:
        emitted(made_platform(described, engine), target)
    return caught.value


@pytest.mark.parametrize("target", ["compose", "kubernetes", "dynamo", "ray"])
def test_tensorrt_llm_on_amd(target: str) -> None:
    answer = invoke("plan", LLAMA, "--hardware", "8x MI300X", "--engine", "tensorrt-llm", "--emit", target)
    assert answer.code == 1 and "needs an NVIDIA GPU" in answer.err and not answer.out


@pytest.mark.parametrize("network", [None, "none"])
def test_more_cards_than_a_node_has_without_a_network(network: str | None) -> None:
    work = {**WORK, "precision_sensitive": True}
    described = {"hardware": {**WIDE, "network": network}, "model": BIG, "workload": work}
    found = refusal(described, "kubernetes", "vllm")
    assert "no network between the nodes" in found.message and "16 cards" in found.message
    assert "network" in (found.hint or "")


def test_with_a_network_the_same_is_written() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    work = {**WORK, "precision_sensitive": True}
    files = emitted(made_platform({"hardware": hardware, "model": BIG, "workload": work}, "vllm"), "kubernetes")
    assert "kind: LeaderWorkerSet" in files["meta-llama-3-1-405b.yaml"]


def test_compose_on_several_nodes() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    found = refusal({"hardware": hardware, "model": LLAMA, "workload": WORK}, "compose")
    assert "one machine" in found.message and "2 nodes" in found.message


def test_engines_that_an_orchestrator_does_not_run() -> None:
    described = {"hardware": H100, "model": LLAMA, "workload": WORK}
    assert "Ray Serve LLM runs vLLM" in refusal(described, "ray", "sglang").message
    assert "Dynamo runs vllm, sglang, tensorrt-llm" in refusal(described, "dynamo", "tgi").message
    amd = {"hardware": {"accelerator": "MI300X", "count": 8}, "model": LLAMA, "workload": WORK}
    assert "made for NVIDIA" in refusal(amd, "dynamo").message
    assert "made for NVIDIA" in refusal(amd, "ray").message


def test_in_a_platform_they_stand_beside_it_instead() -> None:
    files = emitted(made_platform(PLATFORM), "dynamo")
    assert "kind: DynamoGraphDeployment" in files["chat.yaml"]
    assert "kind: Deployment" in files["code.yaml"] and "it stands beside it" in files["code.yaml"]


def test_tensorrt_llm_on_several_nodes_wants_an_operator() -> None:
    hardware = {**WIDE, "network": "InfiniBand NDR 400"}
    described = {"hardware": hardware, "model": BIG, "workload": WORK}
    found = refusal(described, "kubernetes", "tensorrt-llm")
    assert "several nodes" in found.message and "dynamo" in (found.hint or "")
    assert "nodeCount: 2" in emitted(made_platform(described, "tensorrt-llm"), "dynamo")["meta-llama-3-1-405b.yaml"]


def test_no_containers_on_a_mac_and_none_of_mlx() -> None:
    mac = {"hardware": {"accelerator": "Apple M4 Max", "ram_gb": 64}, "model": "Qwen/Qwen3-8B", "workload": FEW}
    assert "containers are run on Linux" in refusal(mac, "compose").message


def test_a_gateway_needs_an_engine_that_it_reads() -> None:
    described = {"hardware": H100, "model": LLAMA, "workload": WORK, "deploy": {"gateway": "inference"}}
    assert "does not read the metrics" in refusal(described, "kubernetes", "tgi").message


def test_workers_of_two_kinds_need_two_workers() -> None:
    described = {"hardware": {**H100, "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW,
                 "deploy": {"layout": "disaggregated"}}  # fmt: skip
    assert "at once" in refusal(described, "dynamo").message


def test_a_service_without_a_place() -> None:
    pool = {"name": "small", "accelerator": "L4", "count": 1, "gpus_per_node": 1}
    found = refusal({"pools": [pool], "services": [{"name": "large", "model": BIG, "workload": WORK}]}, "kubernetes")
    assert "large has no place" in found.message


def test_a_target_that_nobody_knows() -> None:
    answer = invoke("plan", LLAMA, "--hardware", "8x H100 SXM", "--emit", "nomad")
    assert answer.code == 2 and "kubernetes" in answer.err
    with pytest.raises(BadQuestion):
        emitted(made_platform({"hardware": H100, "model": LLAMA, "workload": WORK}), "nomad")


def test_a_platform_is_no_script(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text(yaml.safe_dump(PLATFORM))
    answer = invoke("plan", "-f", str(path), "--emit", "command")
    assert answer.code == 2 and "one service" in answer.err


def test_files_that_are_no_manifests_need_a_folder() -> None:
    described = {"hardware": {"accelerator": "RTX 4090", "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW}
    files = emitted(made_platform(described, "pytorch"), "kubernetes")
    assert "images/pytorch/Dockerfile" in files
    with pytest.raises(BadQuestion, match="Dockerfile"):
        as_one_stream(files)


class TestCommandLine:
    CHAT = ("plan", LLAMA, "--hardware", "8x H100 SXM", "--concurrency", "64")

    def test_a_folder(self, tmp_path: Path) -> None:
        answer = invoke(*self.CHAT, "--emit", "kubernetes", "-o", str(tmp_path / "out"))
        assert answer.code == 0 and "kubectl apply -k" in answer.out and "vllm" in answer.out
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert {"kustomization.yaml", "namespace.yaml", "network.yaml", "scaling.yaml"} <= names

    def test_the_same_intent_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            invoke(*self.CHAT, "--emit", "dynamo", "-o", str(tmp_path / name))
        one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b"))
        assert one == two and one

    def test_a_stream_is_manifests_alone_and_what_was_decided_goes_elsewhere(self) -> None:
        answer = invoke(*self.CHAT, "--emit", "kubernetes")
        kinds = [tree["kind"] for tree in yaml.safe_load_all(answer.out)]
        assert answer.code == 0 and "Deployment" in kinds and "Kustomization" not in kinds
        assert "vllm" in answer.err and "serve.default" in answer.err

    def test_the_portfolio_is_shown_before_anything_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text(yaml.safe_dump(PLATFORM))
        answer = invoke("plan", "-f", str(path), "--emit", "kubernetes", "-o", str(tmp_path / "out"))
        assert answer.code == 0 and answer.out.index("Standard: vllm") < answer.out.index("Written to")

    def test_options_of_the_platform(self, tmp_path: Path) -> None:
        options = ("--set", "gateway=ingress/inference", "--set", "namespace=llms")
        answer = invoke(*self.CHAT, *options, "--emit", "kubernetes", "-o", str(tmp_path))
        assert answer.code == 0
        assert "kind: InferencePool" in (tmp_path / "gateway.yaml").read_text()
        assert "namespace: llms" in (tmp_path / "network.yaml").read_text()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        answer = invoke(*self.CHAT, "--emit", "compose", "-o", str(tmp_path / "file" / "out"))
        assert answer.code == 3 and "cannot create" in answer.err
