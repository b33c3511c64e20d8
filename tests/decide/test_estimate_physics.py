"""Bytes and operations of a step, checked by hand, and the lower bounds of estimates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide.estimate import local
from bedplate.decide.estimate.machine import get_family, get_machine_rates, make_chip_rates, make_cpu_rates
from bedplate.decide.estimate.physics import (
    compute_decode_floor_s,
    compute_prefill_floor_s,
    count_all_reduce_bytes,
    count_attention_ops,
    count_kv_bytes,
    count_linear_ops,
    count_used_experts,
    count_weight_bytes,
    get_shape,
)
from bedplate.facts.chips import find_chip, load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model, make_model_from_facts
from bedplate.values import Figure, replace_fields

MODELS = (
    "Meta-Llama-3-8B Q4_K_M", "Qwen3-30B-A3B", "deepseek-ai/DeepSeek-R1", "gpt-oss-20b", "gemma-4-E4B-it",
    "Qwen3.5-397B-A17B FP8", "Qwen2.5-0.5B-Instruct",
)  # fmt: skip


def test_one_token_reads_the_active_weights() -> None:
    for name in MODELS:
        model = find_model(name)
        assert count_weight_bytes(get_shape(model), 1) == pytest.approx(model.read_bytes_per_token, rel=0.001), name


def test_larger_batch_uses_more_experts_up_to_all() -> None:
    assert count_used_experts(128, 8, 1) == pytest.approx(8)
    assert count_used_experts(128, 8, 16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert count_used_experts(128, 8, 10_000) == pytest.approx(128)
    assert count_used_experts(0, 0, 5) == 0


@settings(deadline=None)
@given(st.sampled_from(MODELS), st.integers(1, 512), st.integers(1, 512))
def test_more_tokens_never_read_less(name: str, some: int, more: int) -> None:
    shape = get_shape(find_model(name))
    few, many = sorted((some, more))
    assert count_weight_bytes(shape, few) <= count_weight_bytes(shape, many) * (1 + 1e-9)


def test_windowed_cache_stops_growing() -> None:
    shape = get_shape(find_model("gpt-oss-20b"))
    windowed = next(group for group in shape.attention if group.window)
    whole = next(group for group in shape.attention if not group.window)
    assert windowed.window is not None
    grown = count_kv_bytes(shape, 8192) - count_kv_bytes(shape, 4096)
    assert grown == pytest.approx(4096 * whole.bytes_per_token)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.sampled_from([None, 7, 16]))
def test_attention_counts_each_pair_once(tokens: int, depth: int, window: int | None) -> None:
    shape = get_shape(find_model("Meta-Llama-3-8B"))
    group = shape.attention[0]._replace(window=window)
    seen = [depth + place + 1 for place in range(tokens)]
    pairs = sum(count if window is None else min(count, window) for count in seen)
    assert count_attention_ops(shape._replace(attention=(group,)), tokens, depth) == pytest.approx(
        group.pair_ops * pairs, rel=0.02 if window is None else 0.1
    )


def test_sparse_attention_does_not_expand_latents_for_prompts() -> None:
    expanded, chosen = (
        get_shape(find_model(name)).attention[0] for name in ("deepseek-ai/DeepSeek-R1", "zai-org/GLM-5")
    )
    assert expanded.latent
    assert expanded.unabsorbed_pair_ops < expanded.pair_ops
    assert chosen.latent
    assert chosen.unabsorbed_pair_ops == chosen.pair_ops


def test_a_dense_token_costs_two_operations_for_each_weight() -> None:
    model = find_model("Meta-Llama-3-8B")
    embedding = next(part.parameters for part in model.parts if part.name == "embedding")
    assert count_linear_ops(get_shape(model), 1) == pytest.approx(2 * (model.parameters - embedding))


def test_ring_all_reduce_sends_nearly_twice_the_hidden_states() -> None:
    shape = get_shape(find_model("Meta-Llama-3-8B"))
    assert count_all_reduce_bytes(10, shape, 1) == 0
    assert count_all_reduce_bytes(10, shape, 4) == pytest.approx(2 * 3 / 4 * 10 * 4096 * 2)


@pytest.mark.parametrize(("params_b", "active_b"), [(117, 5.1), (671, 37), (30.5, 3.3), (46.7, 12.9), (1000, 1)])
def test_moe_model_from_facts_keeps_dense_weights(params_b: float, active_b: float) -> None:
    shape = get_shape(make_model_from_facts({"params_b": params_b, "active_params_b": active_b}))
    assert shape.dense_params > 0 and shape.dense_bytes > 0
    assert shape.dense_params + shape.expert_params == pytest.approx(params_b * 1e9)
    assert shape.dense_params + shape.expert_params * shape.experts_active / shape.experts == pytest.approx(
        active_b * 1e9, rel=0.05
    )


def test_shape_is_computed_from_facts_alone() -> None:
    shape = get_shape(make_model_from_facts({"params_b": 30, "active_params_b": 3, "quantization": "Q4_K_M"}))
    assert shape.active_params == pytest.approx(3e9, rel=0.01)
    assert count_weight_bytes(shape, 1) < count_weight_bytes(shape, 64) < shape.total_bytes * 1.001


@pytest.mark.parametrize("name", ["RTX 4090", "H100 SXM", "MI300X", "RX 7900 XTX", "B200", "A100 SXM 80GB"])
def test_hypothetical_hardware_has_the_rates_of_the_chip(name: str) -> None:
    chip = find_chip(name, guess=True).chip
    described = get_machine_rates(make_simulated_hardware({"accelerator": chip.name, "count": 1, "ram_gb": 256}))
    direct = make_chip_rates(chip, 1)
    assert described.family == direct.family == get_family(chip)
    assert described.bandwidth_bytes_s == direct.bandwidth_bytes_s
    assert dict(described.ops_s) == dict(direct.ops_s)
    assert described.plain_ops_s == direct.plain_ops_s


def test_links_and_nodes_come_from_the_hardware() -> None:
    machine = get_machine_rates(
        make_simulated_hardware({"accelerator": "H100 SXM", "count": 16, "network": "8x 400 Gbit/s"})
    )
    assert (machine.devices, machine.per_node, machine.peer_kind) == (16, 8, "nvlink")
    assert machine.peer_bytes_s == pytest.approx(450e9) and machine.network_bytes_s == pytest.approx(400e9)


def test_measured_bandwidth_far_below_the_data_sheet_is_used() -> None:
    hardware = make_simulated_hardware({"accelerator": "RTX 4090", "count": 1, "ram_gb": 64})
    card = hardware.accelerators[0]

    def measured(value: float) -> float:
        figure = Figure(value=value, low=value, high=value, basis="measured")
        return get_machine_rates(
            replace_fields(hardware, accelerators=(replace_fields(card, bandwidth_bytes_s=figure),))
        ).bandwidth_bytes_s

    assert measured(930e9) == pytest.approx(1008e9)
    assert measured(400e9) == pytest.approx(400e9 / 0.92)


def test_every_chip_has_machine_rates() -> None:
    for chip in load_chips().values():
        machine = make_chip_rates(chip)
        assert machine.bandwidth_bytes_s > 0
        assert machine.core_hz > 0, chip.name
        assert machine.plain_ops_s > 0, chip.name


def test_chip_without_published_rates_has_those_of_its_family() -> None:
    silent, like = (
        make_chip_rates(load_chips()["Apple M5 Max (40-core GPU)"]),
        make_chip_rates(find_chip("M4 Max 40-core").chip),
    )
    rates = [machine.ops_s["fp16"] / machine.bandwidth_bytes_s for machine in (silent, like)]
    assert rates[0] == pytest.approx(rates[1], rel=0.3)


def test_unlisted_gpu_has_the_rates_of_its_generation() -> None:
    hardware = make_simulated_hardware({"accelerator": "RTX 4090"})
    card = replace_fields(hardware.accelerators[0], name="NVIDIA Graphics Device")
    unlisted, listed = get_machine_rates(replace_fields(hardware, accelerators=(card,))), get_machine_rates(hardware)
    assert unlisted.family == listed.family
    assert unlisted.ops_s["fp16"] == pytest.approx(listed.ops_s["fp16"], rel=0.5)
    assert unlisted.plain_ops_s > 0


def test_unknown_cpu_has_rates_from_its_cores() -> None:
    hardware = make_simulated_hardware({"cpu": "Some CPU 3000", "cores": 12, "ram_gb": 32})
    machine = make_cpu_rates(hardware.cpu, hardware.memory.bandwidth_bytes_s)
    assert (machine.kind, machine.cores, machine.bandwidth_bytes_s) == ("cpu", 12, 0.0)


def test_a_prompt_passes_layers_without_a_cache_with_its_last_token_only() -> None:
    machine, shape = make_chip_rates(find_chip("GB10", guess=True).chip), get_shape(find_model("gemma-4-E4B-it"))
    assert (shape.layers, shape.borrowing_layers) == (42, 18)
    skipping, other = (local.make_local_estimator(name, "cuda", machine, shape) for name in ("mistral.rs", "llama.cpp"))
    assert skipping.make_prefill_part(1000).work.computed == pytest.approx(1 - 18 / 42 * 0.999)
    assert other.make_prefill_part(1000).work.computed == skipping.make_step_part(1, 1000).work.computed == 1
    part = skipping.make_prefill_part(4000)
    whole = part._replace(work=part.work._replace(computed=1.0))
    assert 0.5 < skipping.compute_seconds(part) / skipping.compute_seconds(whole) < 0.7


@pytest.mark.parametrize(
    ("name", "each"), [("Meta-Llama-3-8B", 0), ("Qwen3-8B", 2), ("gemma-3-4b-it", 4), ("gemma-4-E4B-it", 12)]
)
def test_norms_that_llama_lacks_are_kernels(name: str, each: int) -> None:
    machine, shape = make_chip_rates(find_chip("RTX 4090").chip), get_shape(find_model(name))
    question = local.make_local_estimator("llama.cpp", "cuda", machine, shape)
    assert shape.small_kernels == each * shape.layers
    work = question.make_step_part(1, 100).work
    fewer = local.forward(question.profile, work._replace(small_kernels=0.0)).total_s
    assert local.forward(question.profile, work).total_s - fewer == pytest.approx(
        shape.small_kernels * question.profile.kernel_s
    )


def test_a_library_multiplies_the_16_bit_weights_of_mistral_rs() -> None:
    machine = make_chip_rates(find_chip("H100 SXM", guess=True).chip)
    for label, library in (("BF16", 1.0), ("Q8_0", 0.0)):
        shape = get_shape(find_model(f"Qwen3-8B {label}" if label != "BF16" else "Qwen3-8B"))
        question = local.make_local_estimator("mistral.rs", "cuda", machine, shape)
        assert question.make_prefill_part(512).work.library == library


def test_the_server_of_llama_cpp_takes_host_time_for_each_further_sequence() -> None:
    machine, shape = make_chip_rates(find_chip("H100 SXM", guess=True).chip), get_shape(find_model("Meta-Llama-3-8B"))
    benchmark = local.make_local_estimator("llama.cpp", "cuda", machine, shape)
    server = benchmark._replace(served=True)
    assert server.step_s(1, 500) == benchmark.step_s(1, 500)
    added = {count: server.step_s(count, 500) - benchmark.step_s(count, 500) for count in (16, 64, 256)}
    # 0.24 ms to sample from 128,256 entries, and 5.3 µs for each waiting request that a token wakes, up to 64 of them.
    assert added[16] == pytest.approx(15 * (0.244e-3 + 16 * 5.3e-6), rel=0.01)
    assert added[64] == pytest.approx(63 * (0.244e-3 + 64 * 5.3e-6), rel=0.01)
    assert added[256] / 255 == pytest.approx(added[64] / 63)
    other = local.make_local_estimator("exllamav3", "cuda", machine, shape, served=True)
    assert other.step_s(64, 500) == other._replace(served=False).step_s(64, 500)


@settings(deadline=None)
@given(
    st.sampled_from(["RTX 4090", "H100 SXM", "Apple M2 Ultra (76-core GPU)", "GB10", "MI300X", "RTX 3060 12GB"]),
    st.sampled_from(MODELS),
    st.sampled_from(["llama.cpp", "vllm", "mlx", "exllamav2", "pytorch", "mistral.rs", "other"]),
    st.integers(1, 256),
    st.integers(1, 100_000),
)
def test_no_estimate_is_below_the_lower_bound(chip: str, name: str, engine: str, batch: int, context: int) -> None:
    machine = make_chip_rates(find_chip(chip, guess=True).chip)
    shape = get_shape(find_model(name))
    question = local.make_local_estimator(engine, "cuda", machine, shape)
    assert question.step_s(batch, context) >= compute_decode_floor_s(shape, machine, batch, context, 1, 16.0)
    computed = context * question.make_prefill_part(context).work.computed
    assert question.estimate_prefill_s(context) >= compute_prefill_floor_s(shape, machine, computed, 1)
    assert math.isfinite(question.step_s(batch, context))
