"""The memory of a layout, compared with published and measured peaks and with manual calculations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.decide import decide
from bedplate.decide.memory import (
    find_largest,
    find_most_requests,
    fit,
    get_kv_bytes_on_device,
    get_weight_bytes_on_device,
)
from bedplate.engines.shared import CONTEXT_BYTES
from bedplate.errors import UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Hardware, Parallelism, Workload, from_json, to_json
from bedplate.values.fit import DeviceNeed, Fit

H200_PEAKS = [
    # batch, prompt, torch.cuda.max_memory_allocated(): benchmarks/memory/pytorch.py --measure, H200, torch 2.11
    (1, 128, 16_127_704_064), (1, 2048, 16_606_899_200), (1, 8192, 18_145_356_800), (4, 512, 16_606_899_200),
    (4, 2048, 18_145_356_800), (16, 512, 18_145_356_800), (16, 2048, 24_299_187_200), (64, 512, 24_299_187_200),
]  # fmt: skip


def make_machine(name: str, count: int = 1, ram_gb: float = 512) -> Hardware:
    return make_simulated_hardware({"accelerator": name, "count": count, "ram_gb": ram_gb, "os": "linux"})


@pytest.mark.parametrize(("batch", "prompt", "peak"), H200_PEAKS)
def test_pytorch_memory_agrees_with_measurements_on_an_h200(batch: int, prompt: int, peak: int) -> None:
    work = Workload(concurrency=batch, prompt_tokens=prompt, output_tokens=32)
    (need,) = fit(make_machine("H200 SXM"), find_model("meta-llama/Meta-Llama-3.1-8B"), work, "pytorch").devices
    assert need.total_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(("engine", "made"), [("vllm", "while loading"), ("sglang", "converted")])
def test_weights_that_are_quantized_while_loading_must_fit_before(engine: str, made: str) -> None:
    """An H200 held all 16-bit weights while SGLang quantized them; vLLM quantizes one layer after the other."""
    chosen = decide(make_machine("H100 NVL 94GB"), find_model("meta-llama/Meta-Llama-3.1-70B"), Workload(), engine)
    assert chosen.weights is not None and chosen.weights.made == made


def plan_need(engine: str, model: str, work: Workload, machine: Hardware) -> tuple[str, DeviceNeed]:
    """How the weights are made, and the memory of a card, as a plan states it."""
    chosen = decide(machine, find_model(model), work, engine)
    assert chosen.weights is not None and chosen.memory is not None
    return chosen.weights.made, chosen.memory.devices[0]


def test_a_plan_states_the_peak_while_loading() -> None:
    """Weights as they are, with one layer that is not quantized yet (vLLM), or with all of them (SGLang)."""
    source = find_model("meta-llama/Meta-Llama-3.1-8B").weight_bytes
    for engine in ("vllm", "sglang"):
        made, need = plan_need(engine, "meta-llama/Meta-Llama-3.1-8B", Workload(), make_machine("H200 SXM"))
        assert made == "as it is" and need.loading_bytes == source + CONTEXT_BYTES
    small = make_machine("RTX 4090")
    made, need = plan_need("vllm", "meta-llama/Meta-Llama-3.1-8B", Workload(concurrency=64), small)
    assert made == "while loading" and need.loading_bytes is not None
    assert need.loading_bytes == pytest.approx(need.weights_bytes + source / 32 + CONTEXT_BYTES, rel=0.001)
    made, need = plan_need("sglang", "meta-llama/Meta-Llama-3.1-8B", Workload(concurrency=64), small)
    assert made == "while loading" and need.loading_bytes == source + CONTEXT_BYTES


def test_a_plan_states_the_memory_of_cuda_graphs() -> None:
    """A part of the overhead: more requests and layers are more graphs, and each layer has a part of each."""
    few, many, deep = (
        plan_need("vllm", model, Workload(concurrency=count), make_machine("H200 SXM"))[1]
        for model, count in (
            ("meta-llama/Meta-Llama-3.1-8B", 8),
            ("meta-llama/Meta-Llama-3.1-8B", 256),
            ("Qwen3-32B", 256),
        )
    )
    graphs = [need.graph_bytes.value for need in (few, many, deep) if need.graph_bytes is not None]
    # 51 sizes up to 512 tokens in pieces, and 4 or 35 of them as a whole.
    assert graphs == [200_000 * 32 * (51 + 4), 200_000 * 32 * (51 + 35), 200_000 * 64 * (51 + 35)]
    assert all(graph < need.overhead_bytes.value for graph, need in zip(graphs, (few, many, deep), strict=True))


@pytest.mark.parametrize(("engine", "machine"), [("llama.cpp", "H200 SXM"), ("vllm", "MI300X")])
def test_a_start_that_was_not_measured_is_not_estimated(engine: str, machine: str) -> None:
    need = plan_need(engine, "meta-llama/Meta-Llama-3.1-8B", Workload(), make_machine(machine))[1]
    assert need.loading_bytes is None and need.graph_bytes is None


def test_tensor_ranks_divide_kv_heads_down_to_one() -> None:
    model = find_model("meta-llama/Meta-Llama-3.1-70B")
    whole = model.compute_kv_bytes(1000)
    assert get_kv_bytes_on_device(model, 1000, Parallelism(tensor=4)) == whole // 4
    assert get_kv_bytes_on_device(model, 1000, Parallelism(tensor=16)) == whole // 8
    assert get_kv_bytes_on_device(model, 1000, Parallelism(tensor=4, pipeline=2)) == whole // 8


def test_every_tensor_rank_stores_the_whole_latent_cache() -> None:
    model = find_model("DeepSeek-R1")
    assert get_kv_bytes_on_device(model, 1000, Parallelism(tensor=8)) == model.compute_kv_bytes(1000)


def test_experts_are_divided_among_expert_ranks() -> None:
    model = find_model("Qwen3-30B-A3B")
    experts = next(part.bytes for part in model.parts if part.name == "experts")
    each = get_weight_bytes_on_device(model, Parallelism(tensor=2, expert=8))
    assert each == round(experts / 8 + (model.weight_bytes - experts) / 2)


def test_attention_data_parallelism_holds_more_latent_requests() -> None:
    work = Workload(concurrency=1, prompt_tokens=4000, output_tokens=1000)
    model, machine = find_model("DeepSeek-R1"), make_machine("H200 SXM", 8, 2048)
    plain = fit(machine, model, work, "sglang", parallelism=Parallelism(tensor=8, expert=8))
    spread = fit(machine, model, work, "sglang", parallelism=Parallelism(tensor=8, expert=8, attention_data=8))
    assert plain.fits and spread.fits and spread.max_concurrency > 4 * plain.max_concurrency


def test_dense_model_that_exceeds_the_gpu_is_offloaded_by_layers() -> None:
    model = find_model("Llama 3.1 70B Q4_K_M")
    found = fit(make_machine("RTX 4090", 1, 128), model, Workload(prompt_tokens=512, output_tokens=256), "llama.cpp")
    assert found.fits and found.offload is not None and found.offload.kind == "layers"
    card, host = found.devices
    assert card.fits and card.weights_bytes + host.weights_bytes == model.weight_bytes
    # One more layer would not fit on the GPU.
    layer = (model.weight_bytes + model.compute_kv_bytes(768)) / model.num_layers
    assert card.high_bytes + layer > (card.usable_bytes or 0)


def test_experts_are_offloaded_before_layers() -> None:
    found = fit(make_machine("RTX 4090", 1, 128), find_model("gpt-oss-120b"), Workload(), "llama.cpp")
    assert found.fits and found.offload is not None and found.offload.kind == "experts"
    assert found.offload.device_layers + found.offload.host_layers == 36


def test_engine_without_offload_does_not_fit() -> None:
    found = fit(make_machine("RTX 4090"), find_model("meta-llama/Meta-Llama-3.1-70B"), Workload(), "vllm")
    assert not found.fits and found.max_concurrency == 0 and found.offload is None


def test_quantization_reduces_memory() -> None:
    model, machine = find_model("meta-llama/Meta-Llama-3.1-70B"), make_machine("H200 SXM")
    plain = fit(machine, model, Workload(), "vllm")
    smaller = fit(machine, model, Workload(), "vllm", quantization="FP8")
    assert not plain.fits and smaller.fits
    assert smaller.devices[0].weights_bytes < 0.55 * plain.devices[0].weights_bytes


def test_layout_larger_than_the_machine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="8 devices"):
        fit(make_machine("H100 SXM", 4), find_model("Qwen3-8B"), Workload(), "vllm", parallelism=Parallelism(tensor=8))


def test_replicas_multiply_the_capacity() -> None:
    model, work = find_model("Qwen3-8B"), Workload(prompt_tokens=2000, output_tokens=500)
    one = fit(make_machine("L4", 1), model, work, "vllm").max_concurrency
    assert one > 0
    assert fit(make_machine("L4", 4), model, work, "vllm", parallelism=Parallelism(data=4)).max_concurrency == 4 * one


@given(st.integers(1, 64), st.integers(1, 20_000), st.sampled_from(["RTX 4090", "L4", "H100 SXM", "H200 SXM"]))
def test_max_concurrency_fits_and_one_more_does_not(users: int, prompt: int, name: str) -> None:
    model = find_model("Qwen3-8B")
    work = Workload(users=users, prompt_tokens=prompt, output_tokens=200)
    found = fit(make_machine(name), model, work, "vllm")
    assert from_json(Fit, to_json(found)) == found
    if found.fits:
        full = Workload(concurrency=found.max_concurrency, prompt_tokens=prompt, output_tokens=200)
        more = Workload(concurrency=found.max_concurrency + 1, prompt_tokens=prompt, output_tokens=200)
        assert fit(make_machine(name), model, full, "vllm").concurrency == found.max_concurrency
        assert fit(make_machine(name), model, more, "vllm").concurrency == found.max_concurrency


@given(
    st.floats(0, 100), st.floats(0, 5), st.sampled_from([1, 8]), st.floats(0, 10), st.integers(1, 50),
    st.floats(0, 400), st.sampled_from([1, 4, 64, 65536]),
)  # fmt: skip
def test_interpolation_finds_the_same_number_of_requests_as_bisection(
    fixed: float, cache: float, groups: int, activations: float, most: int, usable: float, ceiling: int
) -> None:
    asked = []

    def needs(requests: int) -> float:
        asked.append(requests)
        return fixed + cache * -(-requests // groups) + activations * min(requests, most)

    found = find_most_requests(needs, usable, ceiling)
    assert len(asked) <= 2 + 4 * 17
    assert found == find_largest(lambda requests: needs(requests) <= usable, ceiling)


def test_a_gpu_that_shares_the_memory_of_the_system_leaves_it_a_part() -> None:
    """57 GiB in 16 bits are no plan for 60 GiB in which the system runs as well; a limit by the system counts alone."""
    model = find_model("Qwen/Qwen3-30B-A3B-Instruct-2507")
    for described, share in (
        ({"accelerator": "Jetson AGX Orin 64GB"}, 0.95),
        ({"accelerator": "DGX Spark"}, 0.95),
        ({"accelerator": "RTX PRO 6000 Blackwell Workstation"}, 1.0),
        ({"accelerator": "M4 Max", "ram_gb": 64}, 1.0),
    ):
        hardware = make_simulated_hardware(described)
        (need,) = fit(hardware, model, Workload(), "llama.cpp", "Q4_K_M").devices
        free = hardware.accelerators[0].free_bytes
        assert free is not None and need.usable_bytes == round(free * share), described
    jetson = make_simulated_hardware({"accelerator": "Jetson AGX Orin 64GB"})
    assert decide(jetson, model, Workload()).quantization == "Q8_0"
