"""Layouts divide the model evenly, suit the links, and are few enough to search."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide import decide
from bedplate.decide.layouts import (
    LARGE_MIXTURE,
    can_divide,
    can_divide_experts,
    count_fast_cards,
    list_layouts,
)
from bedplate.engines import get_engine, load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import apply_label, find_model
from bedplate.values import Hardware, Model, Parallelism, Workload, replace_fields

MACHINES = (
    ("RTX 4090", 1, None), ("RTX 4090", 3, None), ("RTX 4090", 4, None), ("RTX 4090", 6, None), ("L40S", 8, None),
    ("H100 SXM", 4, None), ("H100 SXM", 8, None), ("H100 SXM", 16, 8), ("H200 SXM", 24, 8), ("H100 SXM", 128, 8),
    ("MI300X", 8, None), ("MI300X", 16, 8), ("B200 SXM", 8, None), ("L4", 12, 4), ("Apple M3 Ultra", 1, None),
)  # fmt: skip
MODELS = (
    "Qwen/Qwen3-0.6B", "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen2.5-72B-Instruct",
    "meta-llama/Meta-Llama-3.1-405B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B", "gpt-oss-120b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
)  # fmt: skip
LABELS = (None, "FP8", "AWQ-INT4")
TRT = get_engine("tensorrt-llm")


@functools.cache
def make_machine(name: str, count: int, per_node: int | None = None) -> Hardware:
    described: dict[str, object] = {"accelerator": name, "count": count, "ram_gb": 512}
    if per_node is not None:
        described |= {"gpus_per_node": per_node, "network": "InfiniBand NDR 400"}
    if name.startswith("Apple"):
        described["os"] = "macos"
    return make_simulated_hardware(described)


@functools.cache
def make_model(name: str, label: str | None) -> Model:
    model = find_model(name)
    return model if label is None else apply_label(model, label)


def count_groups(model: Model) -> int:
    details = model.quantization_details
    return max(details.group_size or 1, *(details.block or (1,))) if details is not None else 1


@settings(deadline=None)
@given(
    st.sampled_from(MACHINES), st.sampled_from(MODELS), st.sampled_from(LABELS), st.sampled_from(list(load_engines()))
)
def test_every_layout_is_valid(named: tuple[str, int, int | None], name: str, label: str | None, which: str) -> None:
    hardware, model, one = make_machine(*named), make_model(name, label), get_engine(which)
    if one.find_target(hardware) is None:
        return
    found = list(list_layouts(hardware, one, model))
    assert Parallelism() in found and len(found) == len(set(found))
    node, fast, groups = hardware.cards_per_node, count_fast_cards(hardware), count_groups(model)
    for layout in found:
        tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
        assert tensor * pipeline * data <= max(1, len(hardware.accelerators))
        for way in ("tensor", "pipeline", "data", "expert", "attention_data"):
            assert getattr(layout, way) == 1 or way in one.ways
        # Ranks that divide attention are in one node; experts may be distributed over several.
        heads = tensor // layout.attention_data
        assert heads <= node and pipeline <= model.num_layers and (tensor <= node or tensor % node == 0)
        # Over PCIe at most a few cards; more only if all of them share faster links.
        assert tensor <= 4 or tensor <= fast or fast >= node
        assert (model.num_heads or 0) % heads == 0
        if model.kv_lora_rank is None and model.num_kv_heads:
            assert model.num_kv_heads % heads == 0 or heads % model.num_kv_heads == 0
        if not model.num_experts and model.intermediate_size:
            assert model.intermediate_size % (tensor * groups) == 0 or tensor == 1
        if model.num_experts and tensor > 1 and layout.expert == 1:
            assert (model.moe_intermediate_size or 0) % (tensor * groups) == 0
        if layout.expert > 1:
            assert model.num_experts and model.num_experts % layout.expert == 0 and layout.expert == tensor
        if layout.attention_data > 1:
            assert tensor == layout.expert and tensor % layout.attention_data == 0
            assert model.kv_lora_rank is not None or model.parameters >= LARGE_MIXTURE
        # Within a node with fast links, tensor parallelism is faster than pipeline stages.
        if pipeline > 1 and fast >= node > 1 and "tensor" in one.ways:
            assert tensor == node


def test_quantization_groups_must_divide_evenly() -> None:
    """29,568 is 231 groups of 128, which does not divide by two; the 16-bit weights divide by eight."""
    plain, four_bit = make_model("Qwen/Qwen2.5-72B-Instruct", None), make_model("Qwen/Qwen2.5-72B-Instruct", "AWQ-INT4")
    assert plain.intermediate_size == 29_568
    assert [can_divide(plain, tensor) for tensor in (2, 4, 8)] == [True] * 3
    assert [can_divide(four_bit, tensor) for tensor in (2, 4, 8)] == [False] * 3
    hardware = make_machine("H100 SXM", 8)
    assert {layout.tensor for layout in list_layouts(hardware, get_engine("vllm"), plain)} == {1, 2, 4, 8}
    assert {layout.tensor for layout in list_layouts(hardware, get_engine("vllm"), four_bit)} == {1}


def test_heads_and_kv_heads_must_divide_evenly() -> None:
    model = make_model("meta-llama/Meta-Llama-3.1-70B", None)
    assert (model.num_heads, model.num_kv_heads) == (64, 8)
    assert [tensor for tensor in (1, 2, 3, 4, 6, 8, 16, 32, 64) if can_divide(model, tensor)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]
    twenty = replace_fields(model, num_heads=20, num_kv_heads=4, intermediate_size=5 * 1024)
    assert [tensor for tensor in (2, 4, 8, 16) if can_divide(twenty, tensor)] == [2, 4]
    six = replace_fields(model, num_kv_heads=6, num_heads=96, intermediate_size=96 * 1024)
    assert [tensor for tensor in (2, 3, 4, 6, 8, 12) if can_divide(six, tensor)] == [2, 3, 6, 12]


def test_indivisible_experts_use_expert_parallelism() -> None:
    model = replace_fields(make_model("Qwen/Qwen3-30B-A3B", None), moe_intermediate_size=6)
    assert not can_divide_experts(model, 4)
    found = [one for one in list_layouts(make_machine("H100 SXM", 4), get_engine("vllm"), model) if one.tensor == 4]
    assert found and all(one.expert == 4 for one in found)


def test_large_mixtures_use_attention_data_parallelism() -> None:
    hardware = make_machine("H200 SXM", 8, None)
    for name in ("deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-235B-A22B-FP8"):
        large = list(list_layouts(hardware, get_engine("sglang"), find_model(name)))
        assert Parallelism(tensor=8, expert=8, attention_data=8) in large
        assert Parallelism(tensor=8, expert=8, attention_data=2) in large
        # TensorRT-LLM has a switch for it, without a size.
        sizes = {(one.tensor, one.attention_data) for one in list_layouts(hardware, TRT, find_model(name))}
        assert (8, 8) in sizes and (8, 2) not in sizes
    plain = list_layouts(hardware, get_engine("sglang"), make_model("Qwen/Qwen3-30B-A3B", None))
    assert {layout.attention_data for layout in plain} == {1}


def test_experts_are_distributed_over_nodes_and_attention_is_not() -> None:
    hardware, model = make_machine("H100 SXM", 16, 8), make_model("deepseek-ai/DeepSeek-V3", None)
    found = list(list_layouts(hardware, get_engine("vllm"), model))
    wide = {layout for layout in found if layout.tensor == 16}
    assert wide == {Parallelism(tensor=16, expert=16, attention_data=16)}
    # vLLM's data-parallel ranks are the outermost: with stages, expert ranks would be on both nodes.
    assert all(layout.pipeline == 1 for layout in found if layout.attention_data > 1)


def test_pipeline_stages_span_nodes() -> None:
    hardware, model = make_machine("H100 SXM", 16, 8), make_model("meta-llama/Meta-Llama-3.1-405B", None)
    found = list(list_layouts(hardware, get_engine("vllm"), model))
    assert Parallelism(tensor=8, pipeline=2) in found
    assert max(layout.tensor for layout in found) == 8
    decision = decide(hardware, model, Workload(concurrency=8, prompt_tokens=500), "tensorrt-llm")
    assert decision.parallelism.tensor <= 8


def test_gpus_without_fast_links_use_pipeline_stages() -> None:
    found = list(
        list_layouts(make_machine("RTX 4090", 6), get_engine("vllm"), make_model("meta-llama/Meta-Llama-3.1-70B", None))
    )
    assert {layout.pipeline for layout in found if layout.tensor == 1} == {1, 2, 3, 4, 5, 6}
    assert {layout.tensor for layout in found} == {1, 2, 4}


def test_engine_without_parallelism_uses_one_device() -> None:
    model = make_model("meta-llama/Meta-Llama-3.1-8B", None)
    for one in load_engines().values():
        if not one.ways and one.find_target(make_machine("H100 SXM", 8)) is not None:
            assert list(list_layouts(make_machine("H100 SXM", 8), one, model)) == [Parallelism()]


@pytest.mark.parametrize("name", MODELS)
def test_number_of_layouts_stays_small_for_large_fleets(name: str) -> None:
    """The number of layouts determines the time of a search; benchmarks/plan/search.py measures it."""
    for one in load_engines().values():
        assert len(list(list_layouts(make_machine("H100 SXM", 128, 8), one, make_model(name, None)))) <= 150
        assert len(list(list_layouts(make_machine("H100 SXM", 8), one, make_model(name, None)))) <= 30


class TestSlowNodes:
    """Without fast links, a pipeline goes through all cards of several nodes."""

    def test_a_large_model_is_on_all_nodes(self) -> None:
        nodes = {"accelerator": "RTX 4090", "count": 24, "gpus_per_node": 8, "network": "100 GbE", "ram_gb": 1024}
        found = decide(make_simulated_hardware(nodes), find_model("meta-llama/Llama-3.1-405B-Instruct"), Workload())
        layout = found.parallelism
        assert (found.engine, found.quantization) == ("vllm", "FP8")
        assert layout.tensor * layout.pipeline == 24 and layout.tensor <= 4 and len(found.node_launches) == 3
        assert found.estimate.tpot_ms is not None and found.estimate.tpot_ms.value < 150
        assert not any(hint.kind in ("idle-cards", "idle-nodes", "unusable-speed") for hint in found.hint_details)

    def test_a_pipeline_has_whole_nodes(self) -> None:
        nodes = {"accelerator": "L40S", "count": 16, "gpus_per_node": 8, "network": "100 GbE", "ram_gb": 1024}
        machine, engine = make_simulated_hardware(nodes), get_engine("vllm")

        def list_wide(name: str) -> set[tuple[int, int]]:
            found = list_layouts(machine, engine, find_model(name))
            return {(one.tensor, one.pipeline) for one in found if one.tensor * one.pipeline > 8}

        assert list_wide("nvidia/Llama-3.1-405B-Instruct-FP8") == {(1, 16), (2, 8), (4, 4)}
        assert list_wide("Qwen/Qwen3-32B") == set()  # each node holds a replica

    def test_an_engine_for_one_node_says_so(self) -> None:
        nodes = {"accelerator": "RTX 4090", "count": 16, "gpus_per_node": 8, "network": "100 GbE", "ram_gb": 1024}
        machine = make_simulated_hardware(nodes)
        found = decide(machine, find_model("meta-llama/Llama-3.1-405B-Instruct"), Workload(), "llama.cpp")
        (hint,) = [hint for hint in found.hint_details if hint.kind == "idle-nodes"]
        assert (hint.used, hint.total, hint.cause) == (1, 2, "one-node")
        assert any("this engine computes on one node" in text for text in found.hints)


class TestLastResort:
    """No rule names an engine that runs here, so that the simplest suitable one is used."""

    def test_many_requests_get_an_engine_that_is_designed_for_them(self) -> None:
        """vLLM no longer has this architecture; ExLlamaV3 has weights of four bits, and is for a few requests."""
        machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 8, "ram_gb": 1024})
        many = decide(machine, find_model("rednote-hilab/dots.llm1.inst"), Workload(concurrency=32))
        assert (many.engine, many.quantization, many.reasons[0].rule) == ("sglang", "BF16", "anywhere")
        one = decide(machine, find_model("rednote-hilab/dots.llm1.inst"), Workload())
        assert one.engine == "llama.cpp"

    def test_a_server_that_meets_the_targets_replaces_one_that_cannot(self) -> None:
        """One request, but 405 GB on cards of four machines or in the memory of one."""
        nodes = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 4, "network": "25 Gbit/s", "ram_gb": 1024}
        model = find_model("nvidia/GLM-5.2-NVFP4")
        found = decide(make_simulated_hardware(nodes), model, Workload(prompt_tokens=8000, output_tokens=50))
        assert found.engine in ("vllm", "sglang") and found.estimate.tpot_ms is not None
        assert found.estimate.tpot_ms.value < 100
