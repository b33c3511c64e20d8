"""An 8-bit KV cache: planned only where the 16-bit one is the limit, in the order of fidelity, with the right bytes."""

from __future__ import annotations

from typing import Any

import pytest

from bedplate.decide import decide
from bedplate.decide.candidates import EngineCandidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.choose import EngineSearch
from bedplate.decide.estimate import compute_expectation
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.memory import fit
from bedplate.decide.order import classify_fidelity
from bedplate.engines import get_engine, load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Decision, Hardware, Parallelism, Settings, Workload
from bedplate.values.intent import Operations
from bedplate.values.workload import LatencyTarget

EIGHT = "meta-llama/Llama-3.1-8B-Instruct"


def make_machine(card: str, count: int = 1) -> Hardware:
    return make_simulated_hardware({"accelerator": card, "count": count, "ram_gb": 512})


def decide_for(model: str, card: str, count: int = 1, engine: str | None = None, **work: Any) -> Decision:
    return decide(make_machine(card, count), find_model(model), Workload(**work), engine, with_alternatives=True)


def list_candidates(engine: str, model: str, card: str, **work: Any) -> tuple[list[EngineCandidate], DecisionCase]:
    case = DecisionCase(make_machine(card), find_model(model), Workload(**work), Operations())
    found = EngineSearch(case, MachineEvidence(), installable=False).get_candidates(get_engine(engine))
    assert isinstance(found, tuple), found
    return list(found), case


def get_reason(decision: Decision, rule: str = "cache.8bit") -> str:
    return next((reason.text for reason in decision.reasons if reason.rule == rule), "")


class TestChoice:
    def test_a_cache_that_limits_the_requests_has_8_bits_and_the_reason_is_printed(self) -> None:
        found = decide_for("Qwen/Qwen3-32B", "H100 SXM", concurrency=100, prompt_tokens=2000, output_tokens=500)
        assert found.settings is not None and found.launch is not None
        assert (found.engine, found.quantization, found.settings.kv_type) == ("vllm", "FP8", "fp8")
        assert found.max_concurrency >= 100 and "--kv-cache-dtype" in found.launch.argv
        assert get_reason(found) == ("8-bit KV cache, for 100 of 100 concurrent requests: a 16-bit cache would hold 57")
        others = {(one.quantization, one.settings.kv_type) for one in found.alternatives
                  if one.engine == "vllm" and one.settings is not None}  # fmt: skip
        assert {("FP8", "16-bit"), ("BF16", "fp8"), ("AWQ-Int4", "fp8")} <= others

    def test_a_cache_that_is_large_enough_has_16_bits_and_no_other_is_considered(self) -> None:
        found = decide_for("Qwen/Qwen3-32B", "H200 SXM", concurrency=16)
        assert found.settings is not None and found.settings.kv_type == "16-bit" and not get_reason(found)
        kinds = {one.settings.kv_type for one in found.alternatives
                 if one.engine in ("vllm", "sglang") and one.settings is not None}  # fmt: skip
        assert kinds == {"16-bit"}

    def test_8_bits_for_weights_or_cache_come_before_8_bits_for_both_and_that_before_4_bit_weights(self) -> None:
        found, case = list_candidates(
            "vllm", "Qwen/Qwen3-32B", "H100 SXM", concurrency=512, prompt_tokens=2000, output_tokens=500
        )
        kinds = {(one.quantization, one.settings.kv_type): classify_fidelity(one, case) for one in found}
        assert kinds["FP8", "16-bit"] == kinds["BF16", "fp8"]
        order = [
            ("BF16", "16-bit"), ("FP8", "16-bit"), ("FP8", "fp8"), ("AWQ-Int4", "16-bit"), ("AWQ-Int4", "fp8"),
        ]  # fmt: skip
        assert sorted({*kinds} - {("BF16", "fp8")}, key=lambda kind: kinds[kind]) == order

    def test_weights_stay_on_the_card_if_an_8_bit_cache_leaves_the_memory(self) -> None:
        """Q4_K_M of 32 B and a 16-bit cache of 20,500 tokens exceed 24 GB; layers in RAM are many times slower."""
        found = decide_for(
            "Qwen/Qwen3-32B", "RTX 4090", 1, "llama.cpp", concurrency=1, prompt_tokens=20000, output_tokens=500
        )
        assert found.memory is not None and found.memory.offload is None and found.launch is not None
        assert found.quantization == "Q4_K_M" and found.launch.argv.count("q8_0") == 2
        assert "does not fit in addition to the weights" in get_reason(found)

    def test_a_missed_latency_target_is_met_by_reading_half_the_cache(self) -> None:
        work: dict[str, Any] = {"concurrency": 8, "prompt_tokens": 60000, "output_tokens": 30000}
        wide = decide_for(EIGHT, "B200", **work)
        assert wide.settings is not None and wide.settings.kv_type == "16-bit" and wide.estimate.tpot_ms is not None
        assert wide.limit == "KV cache"
        target = LatencyTarget(tpot_ms=wide.estimate.tpot_ms.value * 0.8)
        found, _ = list_candidates("vllm", EIGHT, "B200", latency=target, **work)
        narrow = [one for one in found if one.sixteen_bit is not None]
        assert narrow and all(
            one.expected is not None
            and one.sixteen_bit is not None
            and one.sixteen_bit.expected is not None
            and one.expected.tpot_s < one.sixteen_bit.expected.tpot_s
            for one in narrow
        )

    @pytest.mark.parametrize(
        ("engine", "card", "model"),
        [
            ("vllm", "A100 SXM 80GB", EIGHT),
            ("sglang", "RTX 3090", EIGHT),
            ("vllm", "H100 SXM", "deepseek-ai/DeepSeek-V3.2"),
            ("sglang", "H100 SXM", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
            ("tgi", "H100 SXM", EIGHT),
        ],
    )
    def test_engines_and_chips_without_kernels_get_none(self, engine: str, card: str, model: str) -> None:
        found, _ = list_candidates(engine, model, card, concurrency=4000, prompt_tokens=4000, output_tokens=500)
        assert {one.settings.kv_type for one in found} == {"16-bit"}

    def test_an_embedding_model_keeps_16_bits(self) -> None:
        found, _ = list_candidates("vllm", "Qwen/Qwen3-Embedding-8B", "RTX 4090", task="embed", concurrency=4000)
        assert {one.settings.kv_type for one in found} == {"16-bit"}


class TestAmounts:
    @pytest.mark.parametrize(("name", "bits"), [("vllm", 8.0), ("llama.cpp", 8.5), ("exllamav3", 8.5)])
    def test_memory_counts_the_bits_that_are_stored(self, name: str, bits: float) -> None:
        machine, model, work = make_machine("H100 SXM"), find_model(EIGHT), Workload(concurrency=8, prompt_tokens=4000)
        wide, narrow = (fit(machine, model, work, name, kv_type=kind).devices[0] for kind in ("16-bit", "fp8"))
        assert narrow.kv_bytes == pytest.approx(wide.kv_bytes * bits / 16, rel=1e-6)
        assert narrow.weights_bytes == wide.weights_bytes
        settings = Settings(slots=8, context_tokens=work.request_tokens, device="cuda", kv_type="fp8")
        same = fit(machine, model, work, name, settings=settings).devices[0]
        assert same.kv_bytes == pytest.approx(narrow.kv_bytes, rel=1e-6)

    @pytest.mark.parametrize(("name", "requests"), [("vllm", 32), ("vllm", 1), ("llama.cpp", 1)])
    def test_a_token_reads_fewer_bytes(self, name: str, requests: int) -> None:
        machine, model = make_machine("H200 SXM"), find_model(EIGHT)
        work = Workload(concurrency=requests, prompt_tokens=15000, output_tokens=500)
        wide, narrow = (
            compute_expectation(machine, model, name, Parallelism(), work, slots=requests, kv_bits=bits)
            for bits in (16.0, 8.0)
        )
        assert wide is not None and narrow is not None and narrow.tpot_s < wide.tpot_s

    def test_every_row_cites_a_file_and_a_version(self) -> None:
        planned = [engine for engine in load_engines().values() if engine.eight_bit_cache is not None]
        assert len(planned) >= 6
        for engine in planned:
            assert engine.eight_bit_cache is not None
            for row in engine.eight_bit_cache.rows:
                assert row.part == "cache" and any(mark in row.source for mark in (".py", ".md", ".cu", ".m of"))
