"""A plan for several nodes has the command of every node; an engine without such a launch says so."""

from __future__ import annotations

import functools

import pytest
from rich.console import Console

from bedplate.decide import decide
from bedplate.decide.placement import ServiceAsk, divide_machine
from bedplate.engines import load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.show.decision import list_changed_words, render_decision
from bedplate.values import Decision, Hardware, NodeLaunch, Workload

R1, DENSE = "deepseek-ai/DeepSeek-R1", "meta-llama/Meta-Llama-3.1-70B"
WORK = Workload(users=200)
KIMI = find_model("moonshotai/Kimi-K2-Instruct")


@functools.cache
def make_nodes(count: int, chip: str = "H100 SXM") -> Hardware:
    described = {"accelerator": chip, "count": count, "gpus_per_node": 8, "network": "8x 400 Gbit/s"}
    return make_simulated_hardware(described | {"ram_gb": 1024})


@functools.cache
def decide_on(count: int, model: str, engine: str | None = None, users: int = 200) -> Decision:
    return decide(make_nodes(count), find_model(model), Workload(users=users), engine)


def get_value(launch: NodeLaunch, option: str) -> str:
    return launch.argv[launch.argv.index(option) + 1]


@pytest.mark.parametrize("engine", [None, "vllm", "sglang"])
def test_replica_on_two_nodes_has_a_rank_on_each(engine: str | None) -> None:
    launches = decide_on(16, R1, engine).node_launches
    assert [one.node for one in launches] == [0, 1] and [one.serves for one in launches] == [True, False]
    assert [get_value(one, "--node-rank") for one in launches] == ["0", "1"]
    assert {get_value(one, "--nnodes") for one in launches} == {"2"}
    leader = "--master-addr" if "--master-addr" in launches[0].argv else "--dist-init-addr"
    assert {get_value(one, leader).partition(":")[0] for one in launches} == {"NODE_0_ADDRESS"}


def test_slurm_starts_all_ranks_of_tensorrt_llm() -> None:
    (only,) = decide_on(16, R1, "tensorrt-llm").node_launches
    assert only.starts == 2 and only.argv[0] == "srun" and get_value(only, "--ntasks") == "16"
    assert get_value(only, "--ntasks-per-node") == "8" and "trtllm-llmapi-launch" in only.argv


def test_each_replica_has_its_own_leader() -> None:
    decision = decide_on(32, R1)
    assert decision.parallelism.data == 2
    leaders = [get_value(one, "--master-addr") for one in decision.node_launches]
    assert leaders == ["NODE_0_ADDRESS", "NODE_0_ADDRESS", "NODE_2_ADDRESS", "NODE_2_ADDRESS"]
    assert [one.replica for one in decision.node_launches] == [0, 0, 1, 1]
    # The options of one replica: the other one is started by other commands.
    assert all("--data-parallel-size" not in one.argv for one in decision.node_launches)


def test_replicas_within_a_node_need_no_rank() -> None:
    decision = decide_on(16, DENSE, users=4000)
    layout, launches = decision.parallelism, decision.node_launches
    assert layout.tensor * layout.pipeline <= 8 < layout.tensor * layout.data
    assert len(launches) == 2 and all(one.serves and "--nnodes" not in one.argv for one in launches)
    sizes = [int(get_value(one, "--data-parallel-size")) for one in launches]
    assert sum(sizes) == layout.data and launches[1].replica == sizes[0]


def test_one_node_has_no_list() -> None:
    assert decide(make_nodes(8), find_model(DENSE), WORK).node_launches == ()


@pytest.mark.parametrize("engine", sorted(load_engines()))
def test_engine_without_a_launch_for_several_nodes_says_so(engine: str) -> None:
    """DeepSeek-R1 as published needs more than one node of eight H100."""
    decision = decide(make_nodes(16), KIMI, WORK, engine)
    if decision.engine is not None:
        layout = decision.parallelism
        assert load_engines()[engine].can_distribute(KIMI) or layout.tensor * layout.pipeline <= 8
        return
    refusal = next(one for one in decision.refused if one.engine == engine)
    if refusal.shortage is None:
        return
    assert (refusal.cause == "several-nodes") == (not load_engines()[engine].can_distribute(KIMI))
    if refusal.cause is not None:
        assert load_engines()[engine].not_distributed in refusal.why and "vllm" in (refusal.hint or "")


def test_page_has_one_command_for_nodes_that_differ_in_values() -> None:
    decision = decide_on(32, R1)
    console = Console(width=200, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(render_decision(make_nodes(32), find_model(R1), WORK, decision))
    page = captured.get()
    assert page.count("Launch on node") == 2 and "On node 2: the command of node 0, with --master-addr" in page
    assert "2 endpoints: put a load balancer in front of them" in page
    first, second = decision.node_launches[0], decision.node_launches[2]
    assert list_changed_words(first, second) == ("--master-addr", "NODE_2_ADDRESS")
    assert list_changed_words(first, decision.node_launches[1]) is None


SMALL_MIXTURE = "Qwen/Qwen3-30B-A3B-FP8"


@functools.cache
def decide_small() -> Decision:
    return decide(make_simulated_hardware({"accelerator": "B200 SXM", "count": 8, "ram_gb": 1024}),
                  find_model(SMALL_MIXTURE), Workload(concurrency=1024, prompt_tokens=1024), "vllm")  # fmt: skip


def test_replicas_of_a_mixture_are_separate_servers() -> None:
    """vLLM's data-parallel ranks would divide each expert of 768 among 8 ranks, and 96 is not a block of 128."""
    decision = decide_small()
    launches = decision.node_launches
    assert decision.parallelism.data == 8 == len(launches) and decision.parallelism.tensor == 1
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in launches] == [str(card) for card in range(8)]
    assert [get_value(one, "--port") for one in launches] == [str(8080 + number) for number in range(8)]
    assert all("--data-parallel-size" not in one.argv for one in launches)
    assert decision.launch is not None and "--data-parallel-size" not in decision.launch.argv


def test_serve_starts_a_process_for_each_replica_of_a_mixture() -> None:
    on, model = (
        make_simulated_hardware({"accelerator": "B200 SXM", "count": 8, "ram_gb": 1024}),
        find_model(SMALL_MIXTURE),
    )
    work = Workload(concurrency=1024, prompt_tokens=1024)
    ask = ServiceAsk("mixture", work, lambda hardware, workload: decide(hardware, model, workload, "vllm"))
    (part,) = divide_machine(on, [ask])
    assert len(part.needs) == 8 and part.cards == tuple((card,) for card in range(8))
    assert part.decision.parallelism.data == 1 and part.workload.concurrency == 128


@pytest.mark.parametrize(
    ("model", "chip", "count", "concurrency", "allowed"),
    [
        # vllm-project/recipes 8959cf6: models/deepseek-ai/DeepSeek-R1.yaml, single_node_tp, _tep and _dep.
        ("deepseek-ai/DeepSeek-R1", "H200 SXM", 8, 16, {(8, 1, 1), (8, 8, 1)}),
        ("deepseek-ai/DeepSeek-R1", "H200 SXM", 8, 512, {(8, 8, 8)}),
        ("deepseek-ai/DeepSeek-R1", "MI300X", 8, 512, {(8, 8, 8)}),
        # docs/serving/expert_parallel_deployment.md of vLLM a014e35: data parallel 16 over two nodes.
        ("deepseek-ai/DeepSeek-V3", "H100 SXM", 16, 512, {(16, 16, 16)}),
        # models/Qwen/Qwen3-235B-A22B-Instruct-2507.yaml: at most tensor parallel 4 for the FP8 experts, or by experts.
        ("Qwen/Qwen3-235B-A22B-FP8", "H200 SXM", 8, 16, {(4, 1, 1), (8, 8, 1)}),
        ("Qwen/Qwen3-235B-A22B-FP8", "H200 SXM", 8, 512, {(8, 8, 8), (8, 8, 2), (4, 4, 4)}),
        # moonshotai/Kimi-K2.md: data and expert parallel 16.
        ("moonshotai/Kimi-K2-Instruct", "H200 SXM", 16, 512, {(16, 16, 16)}),
        # models/MiniMaxAI/MiniMax-M2.yaml: tensor parallel 8 fails, TP4, TP+EP and DP+EP do not.
        ("MiniMaxAI/MiniMax-M2", "H100 SXM", 8, 16, {(4, 1, 1), (4, 4, 1), (8, 8, 1)}),
        ("MiniMaxAI/MiniMax-M2", "H100 SXM", 8, 512, {(8, 8, 8), (8, 8, 1), (4, 4, 4)}),
        ("zai-org/GLM-4.6-FP8", "H200 SXM", 8, 512, {(8, 8, 8), (4, 4, 1), (8, 8, 1)}),
        ("openai/gpt-oss-120b", "B200 SXM", 8, 16, {(1, 1, 1), (2, 2, 1), (4, 4, 1), (8, 8, 1)}),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "H100 SXM", 8, 16, {(8, 1, 1), (8, 8, 1)}),
    ],
)  # fmt: skip
def test_large_mixtures_follow_the_recipe(
    model: str, chip: str, count: int, concurrency: int, allowed: set[tuple[int, int, int]]
) -> None:
    """(tensor ranks, expert ranks, attention replicas)"""
    facts, work = find_model(model), Workload(concurrency=concurrency, prompt_tokens=1024, output_tokens=512)
    decision = decide(make_nodes(count, chip), facts, work, "vllm")
    layout = decision.parallelism
    assert (layout.tensor, layout.expert, layout.attention_data) in allowed
    rules = {reason.rule for reason in decision.reasons}
    cards = layout.tensor * layout.pipeline * layout.data
    if layout.attention_data > 1:
        assert {"layout.attention", "layout.expert"} <= rules
    elif layout.tensor > 1 and (facts.num_experts or 0) % cards == 0:
        (why,) = [reason.text for reason in decision.reasons if reason.rule == "layout.mixture"]
        assert f"over {cards} GPUs" in why and ("fewer tokens" in why or "fit" in why or "misses" in why or "as" in why)


def test_two_small_nodes_hold_four_bits_instead_of_fewer_on_one() -> None:
    """On one DGX Spark, 235 B parameters have 2 bits; on two, NVFP4 or 4 bits in vLLM."""
    sparks = make_simulated_hardware({"accelerator": "DGX Spark", "count": 2})
    found = decide(sparks, find_model("Qwen/Qwen3-235B-A22B"), Workload())
    assert found.engine == "vllm" and len(found.node_launches) == 2
    assert not [hint for hint in found.hint_details if hint.kind in ("few-bits", "idle-nodes")]
    one = decide(sparks, find_model("openai/gpt-oss-120b"), Workload())
    assert one.engine == "llama.cpp" and one.node_launches == ()


def test_attention_replicas_over_nodes_are_not_left_to_ray() -> None:
    facts, work = find_model("deepseek-ai/DeepSeek-V3"), Workload(concurrency=512, prompt_tokens=1024)
    found = decide(make_nodes(16), facts, work)
    assert found.parallelism.attention_data == 16 and found.orchestrator == "kubernetes"
    assert decide_on(16, R1).orchestrator == "ray"


@functools.cache
def decide_on_b200(model: str, engine: str) -> Decision:
    machine = make_simulated_hardware({"accelerator": "B200 SXM", "count": 8, "ram_gb": 1024})
    return decide(machine, find_model(model), Workload(concurrency=1024, prompt_tokens=1024), engine)


def test_replicas_of_tensorrt_llm_are_separate_servers() -> None:
    """trtllm-serve has no option for replicas; without them, a small model would leave most cards idle."""
    decision = decide_on_b200("meta-llama/Meta-Llama-3.1-8B", "tensorrt-llm")
    launches, layout = decision.node_launches, decision.parallelism
    assert layout.tensor * layout.data == 8 and len(launches) == layout.data > 1
    assert len({one.env["CUDA_VISIBLE_DEVICES"] for one in launches}) == layout.data
    assert [get_value(one, "--port") for one in launches] == [str(8080 + number) for number in range(layout.data)]
    assert all(one.argv[:2] == ("trtllm-serve", "serve") for one in launches)


def test_turbomind_has_a_command_on_each_node() -> None:
    """turbomind/turbomind.py of LMDeploy 0.18.0: --nnodes, --node-rank and --dist-init-addr."""
    launches = decide_on(16, "meta-llama/Meta-Llama-3.1-405B", "lmdeploy").node_launches
    assert [one.serves for one in launches] == [True, False]
    assert [get_value(one, "--node-rank") for one in launches] == ["0", "1"]
    assert {get_value(one, "--dist-init-addr") for one in launches} == {"NODE_0_ADDRESS:20000"}
    assert {get_value(one, "--tp") for one in launches} == {"16"}


def test_pytorch_engine_of_lmdeploy_is_refused_on_several_nodes() -> None:
    decision = decide(make_nodes(16), KIMI, WORK, "lmdeploy")
    refusal = next(one for one in decision.refused if one.engine == "lmdeploy")
    assert decision.engine is None and refusal.cause == "several-nodes" and "Ray cluster" in refusal.why


def test_orchestrator_starts_the_chosen_engine() -> None:
    """Files for Ray start only vLLM, and on Kubernetes nothing starts the ranks of TensorRT-LLM."""
    found = {engine: decide_on(16, R1, engine) for engine in ("vllm", "sglang", "tensorrt-llm")}
    assert {engine: one.orchestrator for engine, one in found.items()} == {
        "vllm": "ray", "sglang": "kubernetes", "tensorrt-llm": "dynamo",
    }  # fmt: skip
    assert any("files for Ray do not" in one.text for one in found["sglang"].reasons)
