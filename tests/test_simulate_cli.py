"""`bedplate simulate`: the page, the JSON, the exit codes and usage errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate.values import from_json
from bedplate.values.simulation import Simulation

CAPTURES = Path(__file__).parent / "captures" / "traces"
INTENT = """
hardware: {accelerator: NVIDIA H100 SXM 80GB, count: 1, ram_gb: 256, os: linux}
model: meta-llama/Llama-3.1-8B-Instruct
workload:
  concurrency: 64
  prompt_tokens: 1024
  output_tokens: 256
  latency: {ttft_ms: 400, tpot_ms: 15}
operations: {price_per_hour: 2.5, watts: 700}
"""


@pytest.fixture
def intent(tmp_path: Path) -> str:
    path = tmp_path / "bedplate.yaml"
    path.write_text(INTENT)
    return str(path)


def test_the_page_shows_performance_and_cost(intent: str) -> None:
    answer = invoke("simulate", "-f", intent, "--requests", "500", "--rate", "40", "--replicas", "4")
    assert answer.code == 0
    for words in (
        "4 replicas, 4 cards", "of requests meet the target", "vllm", "500 requests", "TTFT ≤ 400 ms and TPOT ≤ 15 ms",
        "Goodput", "p95", "KV cache", "per million tokens", "kWh", "if passes are slow", "continuous batching",
    ):  # fmt: skip
        assert words in " ".join(answer.out.split()), words


def test_a_range_finds_the_cheapest_fleet_and_lists_the_tried_ones(intent: str) -> None:
    answer = invoke("simulate", "-f", intent, "--requests", "600", "--rate", "80", "--replicas", "1..64", "--json")
    found = from_json(Simulation, answer.out)
    assert answer.code == 0
    assert found.answer is not None and found.answer.meets
    assert {one.layout for one in found.tried} == {"aggregated", "disaggregated"}
    assert found.answer.cards == min(one.cards for one in found.tried if one.meets)
    page = invoke("simulate", "-f", intent, "--requests", "600", "--rate", "80", "--replicas", "1..64")
    assert "prefill +" in page.out and "tried" in page.out


def test_the_same_seed_gives_the_same_output(intent: str) -> None:
    asked = (
        "simulate",
        "-f",
        intent,
        "--requests",
        "300",
        "--rate",
        "30",
        "--replicas",
        "2",
        "--json",
        "--spread",
        "1",
    )
    assert invoke(*asked, "--router", "random").out == invoke(*asked, "--router", "random").out
    assert invoke(*asked, "--seed", "1").out != invoke(*asked, "--seed", "2").out


def test_a_trace_is_replayed(intent: str) -> None:
    trace = CAPTURES / "mooncake-conversation.jsonl"
    answer = invoke(
        "simulate", "-f", intent, "--trace", str(trace), "--replicas", "2", "--router", "prefix", "--json"
    )  # fmt: skip
    found = from_json(Simulation, answer.out)
    assert found.traffic.source == trace.name
    assert found.traffic.shared
    assert found.answer is not None and found.answer.cache_hit_share is not None
    assert found.answer.requests == found.traffic.requests


def test_unmet_targets_exit_with_1(intent: str) -> None:
    asked = ("simulate", "-f", intent, "--requests", "200", "--rate", "20", "--slo", "ttft_ms=0.5")
    answer = invoke(*asked, "--replicas", "1..4")
    assert answer.code == 1
    assert "No layout that was tried meets the target" in answer.out
    assert invoke(*asked, "--replicas", "2").code == 1


def test_a_range_without_a_target_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(
        INTENT.replace("  latency: {ttft_ms: 400, tpot_ms: 15}\n", "").replace("operations", "# operations")
    )
    answer = invoke("simulate", "-f", str(path), "--requests", "100", "--rate", "10", "--replicas", "1")
    assert answer.code == 0
    assert "unknown · energy unknown" in " ".join(answer.out.split())
    refused = invoke("simulate", "-f", str(path), "--requests", "100", "--rate", "10")
    assert refused.code == 2 and "needs latency targets" in refused.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replicas", "many"), "is not a number or a range"),
        (("--replicas", "8..2"), "out of range"),
        (("--replicas", "0"), "out of range"),
        (("--slo", "ttft=500"), "'ttft' is not one of ttft_ms and tpot_ms"),
        (("--slo", "ttft_ms=soon"), "is not a target"),
        (("--slo", "ttft_ms=-1"), "more than 0"),
        (("--slo", "ttft_ms=nan"), "more than 0"),
        (("--replicas", "1", "--layout", "disaggregated"), "cannot be divided"),
        (("--replicas", "4", "--layout", "aggregated", "--prefills", "1"), "needs --layout disaggregated"),
        (("--trace", "nowhere.jsonl"), "cannot read"),
    ],
)
def test_invalid_options_are_usage_errors(intent: str, arguments: tuple[str, ...], words: str) -> None:
    answer = invoke("simulate", "-f", intent, "--requests", "50", "--rate", "10", *arguments)
    assert answer.code == 2
    assert words in answer.err


def test_a_missing_request_rate_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("hardware: {accelerator: NVIDIA H100 SXM 80GB}\nmodel: meta-llama/Llama-3.1-8B-Instruct\n")
    answer = invoke("simulate", "-f", str(path), "--replicas", "1")
    assert answer.code == 2 and "--rate" in answer.err


def test_the_json_names_its_schema(intent: str) -> None:
    answer = invoke("simulate", "-f", intent, "--requests", "50", "--rate", "10", "--replicas", "1", "--json")
    assert json.loads(answer.out)["schema"] == "simulation/1"
