"""The estimate of a plan: its dependence on the workload, its bottleneck and its source."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide.estimate import Expectation, compute_expectation, estimate_for, get_limit
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Hardware, Parallelism, Workload
from bedplate.values.fit import Offload

ONE = Workload(concurrency=1, prompt_tokens=512, output_tokens=256)


def make_machine(name: str = "RTX 4090", count: int = 1, ram_gb: float = 96, cpu: str | None = None) -> Hardware:
    return make_simulated_hardware({"accelerator": name, "count": count, "ram_gb": ram_gb, "cpu": cpu})


def estimate_plan(
    hardware: Hardware,
    model: str = "Meta-Llama-3-8B Q4_K_M",
    engine: str = "llama.cpp",
    layout: Parallelism | None = None,
    workload: Workload = ONE,
    slots: int = 1,
    offload: Offload | None = None,
    factor: float = 1.0,
) -> Expectation:
    found = compute_expectation(
        hardware, find_model(model), engine, layout or Parallelism(), workload, slots=slots, offload=offload,
        factor=factor,
    )  # fmt: skip
    assert found is not None
    return found


def test_figures_have_a_band_and_a_source() -> None:
    found = estimate_for(make_machine(), find_model("Meta-Llama-3-8B Q4_K_M"), "llama.cpp", Parallelism(), ONE, slots=1)
    for figure in (found.ttft_ms, found.tpot_ms, found.output_tok_s):
        assert figure is not None
        assert figure.low < figure.value < figure.high and figure.basis == "estimate"
        assert "fitted on published measurements" in (figure.source or "")


def test_estimate_for_an_rtx_4090_agrees_with_published_speed() -> None:
    """Published speeds of current builds with Llama 3 8B Q4_K_M: 130 to 165 tokens per second since CUDA graphs."""
    assert 125 < 1 / estimate_plan(make_machine()).tpot_s < 170


def test_parts_add_up_to_the_step() -> None:
    found = estimate_plan(make_machine())
    assert sum(found.parts_s.values()) == pytest.approx(found.tpot_s, rel=1e-6)
    assert get_limit(found) == max(found.parts_s, key=lambda name: found.parts_s[name])


def test_bottleneck_is_named() -> None:
    assert get_limit(estimate_plan(make_machine(), "Meta-Llama-3-8B")) == "memory bandwidth"
    assert get_limit(estimate_plan(make_machine("H100 SXM"), "Qwen2.5-0.5B-Instruct", "pytorch")) == "runtime overhead"
    long = Workload(concurrency=1, prompt_tokens=120_000, output_tokens=256)
    assert (
        get_limit(estimate_plan(make_machine("GB10", ram_gb=128), "Qwen3-30B-A3B Q4_K_M", workload=long)) == "KV cache"
    )


def test_experts_on_the_host_add_their_read_time() -> None:
    offload = Offload(kind="experts", device_layers=6, host_layers=30, host_bytes=50_000_000_000)
    kept = estimate_plan(make_machine(cpu="AMD Ryzen 9 7950X"), "gpt-oss-120b")
    found = estimate_plan(make_machine(cpu="AMD Ryzen 9 7950X"), "gpt-oss-120b", offload=offload)
    assert found.tpot_s > kept.tpot_s
    assert get_limit(found) == "host memory"
    # 4 of 128 experts on the host, at no more than its 83.2 GB/s.
    assert found.parts_s["host memory"] >= 50e9 * 4 / 128 / 83.2e9


def test_measurement_scales_the_estimate_and_is_named_as_source() -> None:
    plain, measured = estimate_plan(make_machine()), estimate_plan(make_machine(), factor=1.25)
    assert measured.tpot_s == pytest.approx(plain.tpot_s / 1.25)
    assert measured.output_tok_s == pytest.approx(plain.output_tok_s * 1.25)
    assert "1.25 as measured on this machine" in measured.source


def test_two_cards_read_faster_than_one() -> None:
    one = estimate_plan(make_machine("H100 SXM", 1), "Meta-Llama-3-8B", "vllm")
    two = estimate_plan(make_machine("H100 SXM", 2), "Meta-Llama-3-8B", "vllm", Parallelism(tensor=2))
    assert two.tpot_s < one.tpot_s
    assert two.parts_s["interconnect"] > 0 == one.parts_s["interconnect"]


def test_more_requests_share_weight_reads() -> None:
    many = Workload(concurrency=8, prompt_tokens=512, output_tokens=256)
    alone, together = estimate_plan(make_machine()), estimate_plan(make_machine(), workload=many, slots=8)
    assert alone.output_tok_s < together.output_tok_s < 8 * alone.output_tok_s
    assert together.tpot_s > alone.tpot_s


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "lmdeploy"])
@pytest.mark.parametrize(
    ("chip", "cards", "model"),
    [("H100 SXM", 1, "Qwen3-8B"), ("A100 SXM 80GB", 4, "Llama-3.1-70B-Instruct"), ("RTX 4090", 1, "Qwen3-4B")],
)
def test_concurrent_requests_are_never_faster_than_a_single_one(chip: str, cards: int, model: str, engine: str) -> None:
    loads = [Workload(concurrency=n, prompt_tokens=512, output_tokens=256) for n in range(1, 17)]
    hardware, layout = make_machine(chip, cards), Parallelism(tensor=cards)
    found = [estimate_plan(hardware, model, engine, layout, work, slots=16).tpot_s for work in loads]
    assert found == sorted(found)


def test_requests_beyond_the_slots_wait() -> None:
    many = Workload(concurrency=16, prompt_tokens=512, output_tokens=256)
    assert (
        estimate_plan(make_machine(), workload=many, slots=4).ttft_s
        > estimate_plan(make_machine(), workload=many, slots=16).ttft_s
    )


def test_a_cached_prefix_is_not_computed_again() -> None:
    shared = Workload(concurrency=1, prompt_tokens=4096, output_tokens=256, shared_prefix_tokens=4000)
    whole = Workload(concurrency=1, prompt_tokens=4096, output_tokens=256)
    assert (
        estimate_plan(make_machine(), workload=shared).ttft_s < estimate_plan(make_machine(), workload=whole).ttft_s / 4
    )


def test_task_without_generation_has_no_estimate() -> None:
    model = find_model("BAAI/bge-m3")
    assert compute_expectation(make_machine(), model, "pytorch", Parallelism(), ONE, slots=1) is None
    unknown = make_simulated_hardware({"cpu": "Some CPU 3000", "cores": 12, "ram_gb": 32})
    small = find_model("Qwen2.5-0.5B-Instruct")
    assert estimate_for(unknown, small, "llama.cpp", Parallelism(), ONE, slots=1).tpot_ms is None


@settings(deadline=None)
@given(
    st.sampled_from(["RTX 4090", "H100 SXM", "MI300X", "GB10"]),
    st.sampled_from(["Meta-Llama-3-8B Q4_K_M", "Qwen3-30B-A3B", "gpt-oss-20b"]),
    st.sampled_from(["llama.cpp", "vllm", "pytorch", "tensorrt-llm", "onnxruntime", "exllamav3"]),
    st.integers(1, 30_000),
    st.integers(1, 4_000),
)
def test_longer_prompts_never_have_a_shorter_ttft(chip: str, model: str, engine: str, prompt: int, more: int) -> None:
    shorter = Workload(concurrency=1, prompt_tokens=prompt, output_tokens=64)
    longer = Workload(concurrency=1, prompt_tokens=prompt + more, output_tokens=64)
    hardware = make_machine(chip, ram_gb=128)
    first = estimate_plan(hardware, model, engine, workload=shorter)
    second = estimate_plan(hardware, model, engine, workload=longer)
    # At the switch from vectors to matrices, a few more tokens may cost slightly less.
    assert second.ttft_s >= first.ttft_s * (0.9 if prompt > 64 else 0.3)
    assert second.tpot_s >= first.tpot_s * (1 - 1e-9)


@pytest.mark.measures
def test_estimate_is_computed_quickly() -> None:
    hardware, model = make_machine("H100 SXM", 8), find_model("Qwen3-30B-A3B")

    def took_s() -> float:
        began = time.perf_counter()
        for tensor in (1, 2, 4, 8) * 5:
            estimate_for(hardware, model, "vllm", Parallelism(tensor=tensor), ONE, slots=4)
        return (time.perf_counter() - began) / 20

    took_s()
    assert min(took_s() for _ in range(5)) < 0.001
