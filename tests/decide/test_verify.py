"""The verifier: seeded faults are found by their rule, generated plans have none, and the search goes on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.decide.plan_cases import PlanCase, generate_cases, generate_mixed_cases, make_machine
from tests.decide.plan_order import check_engine

from bedplate.decide import decide
from bedplate.decide.candidates import EngineCandidate, get_planned_model, verify_candidate
from bedplate.decide.case import DecisionCase, with_model_task
from bedplate.decide.choose import EngineSearch
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.nodes import make_launch
from bedplate.decide.planning import plan
from bedplate.decide.verify import list_faults, list_launch_rules
from bedplate.decide.verify.general import GENERAL_RULES
from bedplate.decide.verify.memory import MEMORY_RULES
from bedplate.engines import get_engine, load_engines
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import apply_label, find_model
from bedplate.values import Hardware, Launch, Model, Plan, Weights, Workload, replace_fields
from bedplate.values.hardware import Disk
from bedplate.values.intent import Operations
from bedplate.values.workload import LoraAdapter

GIB = 1 << 30
QUICK, QUICK_FULL, NIGHTLY = 300, 12, 3000
REJECTED_SHARE = 0.01
"""The search finds plans that the engine accepts by itself; the verifier is the last resort."""


@dataclass(frozen=True)
class ShownPlan:
    """What would be shown: the plan, its launch, and the machine."""

    plan: Plan
    launch: Launch
    hardware: Hardware

    def list_rules(self) -> list[str]:
        return [fault.rule for fault in list_faults(self.plan, self.launch, self.hardware)]

    def with_plan(self, **fields: Any) -> ShownPlan:
        """The same engine's launch for a changed plan."""
        changed = replace_fields(self.plan, **fields)
        launch = make_launch(changed, get_engine(changed.engine), self.hardware, 8080)
        return replace(self, plan=changed, launch=launch)

    def with_settings(self, **fields: Any) -> ShownPlan:
        return self.with_plan(settings=replace_fields(self.plan.settings, **fields))

    def with_layout(self, **fields: Any) -> ShownPlan:
        return self.with_plan(parallelism=replace_fields(self.plan.parallelism, **fields))

    def with_model(self, model: Model) -> ShownPlan:
        return self.with_plan(model=model)

    def with_option(self, name: str, value: str | None) -> ShownPlan:
        """The launch with another value of an option; `None` removes the option and its value."""
        argv = list(self.launch.argv)
        if name in argv:
            at = argv.index(name)
            end = next((number for number in range(at + 1, len(argv)) if argv[number].startswith("--")), len(argv))
            argv[at:end] = [name, value] if value is not None else []
        elif value is not None:
            argv += [name, value] if value else [name]
        return replace(self, launch=replace_fields(self.launch, argv=tuple(argv)))

    def with_machine(self, **fields: Any) -> ShownPlan:
        return replace(self, hardware=replace_fields(self.hardware, **fields))

    def with_memory(self, available_bytes: int) -> ShownPlan:
        memory = replace_fields(self.hardware.memory, available_bytes=available_bytes, basis="reported")
        return self.with_machine(memory=memory)


@functools.cache
def make_plan(
    engine: str, chip: str, count: int, model: str, concurrency: int = 8, *, nodes: int = 1, **fields: Any
) -> ShownPlan:
    described: dict[str, Any] = {"accelerator": chip, "count": count, "ram_gb": 2048}
    if nodes > 1:
        described |= {"gpus_per_node": count // nodes, "network": "InfiniBand NDR 400"}
    hardware = make_simulated_hardware(described)
    return show_plan(engine, hardware, model, Workload(concurrency=concurrency, **fields))


def show_plan(name: str, hardware: Hardware, model: str, workload: Workload) -> ShownPlan:
    """The plan of one engine, which has no fault."""
    asked = DecisionCase(hardware, find_model(model), workload, Operations())
    engine = get_engine(name)
    found = EngineSearch(asked, MachineEvidence(), installable=False).get_candidate(engine)
    assert isinstance(found, EngineCandidate), found
    planned = Plan(
        engine=name, engine_version=engine.version or "unpinned", workload=workload,
        model=get_planned_model(asked.model, found.weights), weights=found.weights,
        parallelism=found.layout, settings=found.settings,
    )  # fmt: skip
    shown = ShownPlan(planned, make_launch(planned, engine, hardware, 8080), hardware)
    assert shown.list_rules() == []
    return shown


def plan_on_mixed(engine: str, model: str, other: str = "RTX 4060 8GB") -> ShownPlan:
    """A plan for the second of two different cards."""
    machine = make_simulated_hardware({"accelerator": [other, "RTX 4090"], "ram_gb": 64})
    shown = show_plan(engine, machine, model, Workload(concurrency=1))
    assert shown.plan.settings.cards == (1,)
    return shown


def show_other_card(shown: ShownPlan) -> ShownPlan:
    env = {**shown.launch.env, "CUDA_VISIBLE_DEVICES": "0"}
    return replace(shown, launch=replace_fields(shown.launch, env=env))


def drop_environment(shown: ShownPlan) -> ShownPlan:
    return replace(shown, launch=replace_fields(shown.launch, env={}))


def change_model(shown: ShownPlan, **fields: Any) -> ShownPlan:
    return shown.with_model(replace_fields(shown.plan.model, **fields))


def with_card_memory(shown: ShownPlan, gib: float) -> ShownPlan:
    """The same plan on cards with less memory."""
    size = round(gib * GIB)
    cards = tuple(replace_fields(card, memory_bytes=size, free_bytes=size) for card in shown.hardware.accelerators)
    return shown.with_machine(accelerators=cards)


def remove_steps(shown: ShownPlan) -> ShownPlan:
    return replace(shown, launch=replace_fields(shown.launch, prepare=()))


def change_step(shown: ShownPlan, word: str, other: str) -> ShownPlan:
    """The same plan with another word in the commands of its steps."""
    steps = tuple(
        replace_fields(step, argv=tuple(other if part == word else part for part in step.argv))
        for step in shown.launch.prepare
    )
    return replace(shown, launch=replace_fields(shown.launch, prepare=steps))


def load_packed(shown: ShownPlan, label: str, **fields: Any) -> ShownPlan:
    """The same plan for a checkpoint with other bits or groups."""
    model = apply_label(find_model(shown.plan.model.name), label)
    assert model.quantization_details is not None
    return load_as_published(
        shown, replace_fields(model, quantization_details=replace_fields(model.quantization_details, **fields))
    )


def make_from_original(shown: ShownPlan, label: str, made: str, form: str) -> ShownPlan:
    """The same plan without published weights: the engine converts or quantizes the original."""
    weights = Weights(label=label, made=made, format=form)  # type: ignore[arg-type]
    return shown.with_plan(model=find_model(shown.plan.model.name), weights=weights)


def load_as_published(shown: ShownPlan, model: Model, block: tuple[int, int] | None = None) -> ShownPlan:
    """The same plan for published weights, if need be in blocks."""
    if block is not None and model.quantization_details is not None:
        details = replace_fields(model.quantization_details, block=block)
        model = replace_fields(model, quantization_details=details)
    weights = Weights(label=str(model.quantization), made="as it is", format="safetensors")
    return shown.with_plan(model=model, weights=weights)


def plan_h100(engine: str = "vllm", count: int = 8, model: str = "meta-llama/Meta-Llama-3.1-70B") -> ShownPlan:
    return make_plan(engine, "H100 SXM", count, model, 64)


def plan_a100() -> ShownPlan:
    return make_plan("vllm", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64)


def plan_adapters(engine: str) -> ShownPlan:
    adapters = (LoraAdapter(path="/adapters/sql", rank=64), "acme/support")
    return make_plan(engine, "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64, lora_adapters=adapters)


def plan_experts_on_host() -> ShownPlan:
    """A mixture of experts over four cards with a part of its experts on the host."""
    return make_plan("llama.cpp", "RTX 3090", 4, "Qwen/Qwen3-235B-A22B", 1)


@functools.cache
def make_cpu_plan() -> ShownPlan:
    hardware = make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 128})
    return show_plan("llama.cpp", hardware, "Qwen/Qwen3-8B", Workload(concurrency=1))


@functools.cache
def make_mac_plan(engine: str = "mlx") -> ShownPlan:
    hardware = make_simulated_hardware({"accelerator": "Apple M3 Max 40-core", "ram_gb": 64, "os": "macos"})
    return show_plan(engine, hardware, "Qwen/Qwen3-8B", Workload(concurrency=1))


def put_experts_on_host(shown: ShownPlan) -> ShownPlan:
    return shown.with_plan(
        parallelism=replace_fields(shown.plan.parallelism, pipeline=1),
        settings=replace_fields(shown.plan.settings, host_expert_layers=30),
    )


# name → (rules of which one must find it, the faulty plan)
FAULTS: dict[str, tuple[str, Callable[[], ShownPlan]]] = {
    # idle hardware
    "experts in RAM beside three idle cards": (
        "layout.idle-cards",
        lambda: put_experts_on_host(make_plan("llama.cpp", "RTX 3090", 4, "Qwen/Qwen3-30B-A3B", 1)),
    ),
    "a GPU without kernels beside another": (
        "llama.cpp.amd-kernels",
        lambda: drop_environment(make_plan("llama.cpp", "RX 6600", 1, "Qwen/Qwen3-4B", 1)),
    ),
    # memory card by card
    "experts on the host without a split": (
        "llama.cpp.split",
        lambda: plan_experts_on_host().with_option("--tensor-split", None),
    ),
    "a split that overflows the last card": (
        "memory.load",
        lambda: plan_experts_on_host().with_option("--tensor-split", "10,10,10,65"),
    ),
    "BF16 weights that are quantized only after loading": (
        "memory.load",
        lambda: with_card_memory(
            make_from_original(
                make_plan("sglang", "H100 SXM", 1, "Qwen/Qwen3-30B-A3B", 64), "FP8", "while loading", "safetensors"
            ),
            50,
        ),
    ),
    "a conversion without memory for its source": (
        "memory.convert",
        lambda: make_plan("vllm", "A100 SXM 80GB", 1, "meta-llama/Meta-Llama-3.1-70B", 4)
        .with_plan(weights=Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        .with_memory(96 * GIB),
    ),
    "a conversion on a small disk": (
        "disk.prepare",
        lambda: make_from_original(
            make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-32B", 1), "Q4_K_M", "converted", "gguf"
        ).with_machine(
            disk=Disk(path="/", total_bytes=100 * GIB, free_bytes=20 * GIB)
        ),
    ),
    "a longer context than the cache holds": (
        "memory.capture",
        lambda: with_card_memory(plan_a100(), 24).with_settings(context_tokens=40960),
    ),
    "slots whose cache does not fit": (
        "memory.serve",
        lambda: make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1).with_settings(slots=200),
    ),
    "experts on a host with little memory": ("memory.host", lambda: plan_experts_on_host().with_memory(32 * GIB)),
    "weights on a CPU with little memory": (
        "memory.host",
        lambda: replace(
            make_cpu_plan(), hardware=make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 4})
        ),
    ),
    "a share that other programs have taken": (
        "memory.share",
        lambda: plan_a100().with_machine(
            accelerators=tuple(
                replace_fields(card, free_bytes=(card.memory_bytes or 0) // 2)
                for card in plan_a100().hardware.accelerators
            )
        ),
    ),
    "an uneven pipeline": (
        "memory.load",
        lambda: with_card_memory(make_plan("llama.cpp", "RTX 3090", 2, "Qwen/Qwen3-32B", 1), 15).with_option(
            "--tensor-split", "1,3"
        ),
    ),
    # weights that exist
    "FP8 weights that nobody published": (
        "weights.available",
        lambda: plan_h100().with_plan(
            weights=replace_fields(plan_h100().plan.weights, label="FP8", made="as it is", format="safetensors")
        ),
    ),
    "a conversion that no step makes": (
        "weights.available",
        lambda: remove_steps(
            make_from_original(
                make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1), "Q8_0", "converted", "gguf"
            )
        ),
    ),
    # published weights
    "a published file that no step fetches": (
        "weights.published",
        lambda: remove_steps(make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1)),
    ),
    "another repository than the published one": (
        "weights.published",
        lambda: replace(
            make_plan("vllm", "L40S", 1, "Qwen/Qwen3-32B", 4),
            launch=replace_fields(plan_h100().launch, argv=("vllm", "serve", "Qwen/Qwen3-32B")),
        ),
    ),
    "another branch than the published one": (
        "weights.published",
        lambda: change_step(make_plan("exllamav3", "RTX 4090", 1, "Qwen/Qwen3-32B", 1), "4.0bpw", "8.0bpw"),
    ),
    "AWQ weights of eight bits": ("vllm.packing", lambda: load_packed(plan_a100(), "AWQ-INT4", bits=8)),
    "GPTQ weights in groups of 1024": ("vllm.packing", lambda: load_packed(plan_a100(), "GPTQ-INT4", group_size=1024)),
    "AWQ weights of three bits": (
        "sglang.packing",
        lambda: load_packed(make_plan("sglang", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 8), "AWQ-INT4", bits=3),
    ),
    "GPTQ weights of eight bits": (
        "tensorrt-llm.packing",
        lambda: load_packed(make_plan("tensorrt-llm", "H100 SXM", 1, "Qwen/Qwen3-8B", 8), "GPTQ-INT8"),
    ),
    "a GGUF file for an engine of folders": (
        "weights.available",
        lambda: plan_h100().with_plan(weights=replace_fields(plan_h100().plan.weights, format="gguf")),
    ),
    # what a chip can do
    "FP8 per channel on an A100": (
        "vllm.fp8-per-channel",
        lambda: plan_a100().with_option("--quantization", "fp8_per_channel"),
    ),
    "MXFP4 on a T4": (
        "vllm.quantization",
        lambda: load_as_published(make_plan("vllm", "T4", 1, "Qwen/Qwen3-0.6B"), find_model("openai/gpt-oss-20b")),
    ),
    "BF16 on a T4": (
        "vllm.compute-type",
        lambda: make_plan("vllm", "T4", 1, "Qwen/Qwen3-0.6B").with_option("--dtype", "bfloat16"),
    ),
    "F16 for a model that is unstable in it": (
        "vllm.compute-type",
        lambda: change_model(make_plan("vllm", "T4", 1, "Qwen/Qwen3-0.6B"), architecture="gemma3_text"),
    ),
    "an FP8 cache on an A100": ("vllm.cache-type", lambda: plan_a100().with_option("--kv-cache-dtype", "fp8")),
    "an FP8 cache that the checkpoint asks for on an A100": (
        "vllm.cache-type",
        lambda: make_plan("vllm", "A100 SXM 80GB", 1, "nvidia/Llama-3.1-8B-Instruct-FP8", 64).with_option(
            "--kv-cache-dtype", None
        ),
    ),
    "NVFP4 in a GGUF file on a Mac": (
        "weights.kernels",
        lambda: make_mac_plan("llama.cpp").with_plan(
            weights=Weights(label="NVFP4", made="converted", format="gguf")
        ),
    ),
    "an 8-bit cache that is planned for an A100": (
        "cache.type",
        lambda: plan_a100().with_settings(kv_type="fp8"),
    ),
    "an 8-bit cache on Gaudi": (
        "cache.type",
        lambda: make_plan("vllm", "Gaudi 3", 1, "Qwen/Qwen3-8B", 8).with_settings(kv_type="fp8"),
    ),
    "an 8-bit cache for sparse attention": (
        "cache.type",
        lambda: change_model(plan_h100().with_settings(kv_type="fp8"), architecture="deepseek_v32"),
    ),
    "an FP8 cache of SGLang on an A100": (
        "sglang.cache-type",
        lambda: make_plan("sglang", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64).with_option(
            "--kv-cache-dtype", "fp8_e4m3"
        ),
    ),
    "an FP8 cache of SGLang for latent attention": (
        "sglang.cache-type",
        lambda: plan_h100("sglang", 1, "deepseek-ai/DeepSeek-V2-Lite-Chat").with_option("--kv-cache-dtype", "fp8_e4m3"),
    ),
    "a quantized cache of heads that are no whole blocks": (
        "llama.cpp.cache-type",
        lambda: change_model(make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1), head_dim=80)
        .with_option("--cache-type-v", "q8_0")
        .with_option("--flash-attn", "on"),
    ),
    "an 8-bit cache that does not fit": (
        "memory.serve",
        lambda: with_card_memory(
            make_plan(
                "llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 4, prompt_tokens=30000, output_tokens=1000
            ).with_settings(kv_type="fp8"),
            12,
        ),
    ),
    "a GPU without kernels": (
        "plan.device",
        lambda: replace(
            plan_a100(), hardware=make_simulated_hardware({"accelerator": "V100 SXM2 32GB", "ram_gb": 64})
        ),
    ),
    "FP8 by ModelOpt on a T4": (
        "vllm.quantization",
        lambda: load_as_published(
            make_plan("vllm", "T4", 1, "Qwen/Qwen3-0.6B"), find_model("nvidia/Llama-3.1-8B-Instruct-FP8")
        ),
    ),
    "FP8 by ModelOpt on an A100, for SGLang": (
        "sglang.quantization",
        lambda: load_as_published(
            make_plan("sglang", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64),
            find_model("nvidia/Llama-3.1-8B-Instruct-FP8"),
        ),
    ),
    "FP8 by ModelOpt for Transformers": (
        "weights.kernels",
        lambda: load_as_published(
            make_plan("pytorch", "H100 SXM", 1, "Qwen/Qwen3-8B", 1), find_model("nvidia/Llama-3.1-8B-Instruct-FP8")
        ),
    ),
    "published FP8 experts on an A100, for SGLang": (
        "sglang.fp8-experts",
        lambda: load_as_published(
            make_plan("sglang", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64),
            find_model("Qwen/Qwen3-30B-A3B-FP8"),
            (128, 128),
        ),
    ),
    "published FP8 experts on an A100, for TGI": (
        "tgi.fp8-experts",
        lambda: load_as_published(
            make_plan("tgi", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64),
            find_model("Qwen/Qwen3-30B-A3B-FP8"),
            (128, 128),
        ),
    ),
    "MXFP8 before Blackwell": (
        "sglang.quantization",
        lambda: plan_h100("sglang").with_model(apply_label(find_model("Qwen/Qwen3-32B"), "MXFP8")).with_plan(
            weights=replace_fields(plan_h100("sglang").plan.weights, label="MXFP8", made="as it is")
        ),
    ),
    "FP8 experts while loading on an A100": (
        "sglang.fp8",
        lambda: make_plan("sglang", "A100 SXM 80GB", 2, "Qwen/Qwen3-30B-A3B", 64).with_option("--quantization", "fp8"),
    ),
    "FP8 blocks on an Ada GPU": (
        "tensorrt-llm.quantization",
        lambda: load_as_published(
            make_plan("tensorrt-llm", "L40S", 1, "Qwen/Qwen3-8B", 64),
            apply_label(find_model("Qwen/Qwen3-8B"), "FP8"),
            (128, 128),
        ),
    ),
    "a quantization that LMDeploy does not load": (
        "lmdeploy.quantization",
        lambda: make_plan("lmdeploy", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64).with_model(
            apply_label(find_model("Qwen/Qwen3-8B"), "NVFP4")
        ),
    ),
    # architectures
    "an architecture that vLLM removed": (
        "vllm.architecture",
        lambda: change_model(plan_h100(), architecture="dots1"),
    ),
    "an architecture that is only in the model's repository, for vLLM": (
        "vllm.configuration",
        lambda: change_model(plan_h100(), architecture="internlm2"),
    ),
    "an architecture that is only in the model's repository, for SGLang": (
        "sglang.configuration",
        lambda: change_model(plan_h100("sglang"), architecture="nemotron-nas"),
    ),
    "an architecture that Transformers does not have": (
        "pytorch.architecture",
        lambda: change_model(make_plan("pytorch", "RTX 4090", 1, "Qwen/Qwen3-8B", 1), architecture="kimi_k3"),
    ),
    "sparse attention on an A100": (
        "vllm.sparse-attention",
        lambda: change_model(plan_a100(), architecture="deepseek_v32"),
    ),
    "DeepSeek V4 on an A100": (
        "vllm.sparse-attention",
        lambda: change_model(plan_a100(), architecture="deepseek_v4"),
    ),
    "sparse attention of SGLang on an A100": (
        "sglang.sparse-attention",
        lambda: change_model(make_plan("sglang", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 16), architecture="glm_moe_dsa"),
    ),
    "an architecture that SGLang does not have": (
        "sglang.architecture",
        lambda: change_model(plan_h100("sglang"), architecture="jamba"),
    ),
    "tensor parallelism that ExLlamaV3 does not have": (
        "exllamav3.tensor",
        lambda: change_model(
            make_plan("exllamav3", "RTX 3090", 2, "Qwen/Qwen3-32B", 1), architecture="qwen3_next"
        ).with_layout(tensor=2, pipeline=1),
    ),
    "a hidden size that ExLlamaV3 pads wrongly": (
        "exllamav3.width",
        lambda: change_model(make_plan("exllamav3", "RTX 3090", 1, "Qwen/Qwen3-8B", 1), hidden_size=4000),
    ),
    "an architecture that ExLlamaV3 does not have": (
        "exllamav3.architecture",
        lambda: change_model(make_plan("exllamav3", "RTX 3090", 1, "Qwen/Qwen3-8B", 1), architecture="jamba"),
    ),
    "an architecture that TGI does not have": (
        "tgi.architecture",
        lambda: change_model(make_plan("tgi", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B"), architecture="gpt_oss"),
    ),
    "an architecture that LMDeploy does not have": (
        "lmdeploy.architecture",
        lambda: change_model(make_plan("lmdeploy", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64), architecture="jamba"),
    ),
    "an architecture that MLX does not have": (
        "mlx.architecture",
        lambda: change_model(make_mac_plan(), architecture="falcon"),
    ),
    # layouts
    "three ranks for 64 heads": (
        "layout.heads",
        lambda: plan_h100().with_layout(tensor=3, pipeline=1, data=1),
    ),
    "six ranks for 8 KV heads": (
        "layout.heads",
        lambda: change_model(plan_h100(), num_heads=48).with_layout(tensor=6, pipeline=1, data=1),
    ),
    "ranks that cut a quantization group": (
        "layout.width",
        lambda: change_model(
            plan_h100(model="Qwen/Qwen2.5-72B-Instruct-AWQ"), intermediate_size=128 * 12
        ).with_layout(tensor=8, pipeline=1, data=1),
    ),
    "ranks that cut the blocks of shared experts": (
        "layout.width",
        lambda: change_model(
            load_as_published(
                plan_h100(model="Qwen/Qwen3-30B-A3B"), apply_label(find_model("Qwen/Qwen3-30B-A3B"), "FP8"), (128, 128)
            ),
            shared_expert_intermediate_size=512,
        ).with_layout(tensor=8, expert=8, pipeline=1, data=1),
    ),
    "experts that cannot be divided": (
        "layout.experts",
        lambda: change_model(plan_h100(model="Qwen/Qwen3-30B-A3B"), num_experts=60).with_layout(
            tensor=8, expert=8, pipeline=1, data=1
        ),
    ),
    "expert parallelism without experts": (
        "vllm.experts",
        lambda: plan_h100().with_option("--enable-expert-parallel", ""),
    ),
    "more stages than layers": (
        "layout.stages",
        lambda: change_model(plan_h100(), num_layers=4).with_layout(tensor=1, pipeline=8, data=1),
    ),
    "a pipeline of a model that has none": (
        "vllm.pipeline",
        lambda: change_model(plan_h100(), architecture="gemma3n").with_layout(tensor=4, pipeline=2, data=1),
    ),
    "a kind of parallelism that the engine lacks": (
        "layout.kinds",
        lambda: make_plan("llama.cpp", "RTX 3090", 2, "Qwen/Qwen3-32B", 1).with_layout(tensor=2, pipeline=1),
    ),
    "options for fewer cards than the layout": (
        "layout.cards",
        lambda: plan_h100(model="meta-llama/Meta-Llama-3.1-405B").with_option("--tensor-parallel-size", "4"),
    ),
    "more cards than there are": (
        "layout.cards",
        lambda: plan_a100().with_layout(tensor=8),
    ),
    "llama.cpp over two nodes": (
        "layout.hosts",
        lambda: make_plan("llama.cpp", "H100 SXM", 16, "Qwen/Qwen3-8B", 1, nodes=2).with_layout(pipeline=16),
    ),
    "replicas of a mixture in one vLLM server": (
        "vllm.replicas",
        lambda: plan_h100(model="Qwen/Qwen3-235B-A22B-FP8").with_layout(tensor=4, expert=1, attention_data=1, data=2)
        .with_option("--data-parallel-size", "2"),
    ),
    "attention replicas with pipeline stages over two nodes": (
        "vllm.attention-stages",
        lambda: make_plan("vllm", "H100 SXM", 16, "deepseek-ai/DeepSeek-V3", 64, nodes=2)
        .with_layout(tensor=8, pipeline=2, expert=8, attention_data=8, data=1),
    ),
    "attention replicas of several ranks in TensorRT-LLM": (
        "tensorrt-llm.attention",
        lambda: plan_h100("tensorrt-llm", model="deepseek-ai/DeepSeek-R1").with_layout(
            tensor=8, expert=8, attention_data=2, data=1
        ),
    ),
    "SGLang replicas in one command for two nodes": (
        "sglang.replicas",
        lambda: plan_h100("sglang").with_option("--dp-size", "2").with_option("--nnodes", "2"),
    ),
    "SGLang replicas with attention replicas": (
        "sglang.replicas",
        lambda: plan_h100("sglang").with_option("--dp-size", "2").with_option("--attn-dp-size", "2"),
    ),
    "expert ranks that do not divide the tensor ranks": (
        "sglang.groups",
        lambda: plan_h100("sglang").with_option("--tp-size", "8").with_option("--ep-size", "3"),
    ),
    # adapters
    "an adapter of a higher rank than planned": (
        "adapters.loaded",
        lambda: plan_adapters("vllm").with_option("--max-lora-rank", "8"),
    ),
    "adapters that SGLang does not load": (
        "adapters.loaded",
        lambda: plan_adapters("sglang").with_option("--lora-paths", None),
    ),
    "adapters for which no memory is reserved": (
        "adapters.loaded",
        lambda: plan_adapters("vllm").with_option("--max-loras", None),
    ),
    "a server without adapters": (
        "adapters.loaded",
        lambda: make_plan("exllamav3", "RTX 3090", 1, "Qwen/Qwen3-8B", 1).with_plan(workload=Workload(lora_adapters=2)),
    ),
    "adapters that fill the card": (
        "memory.capture",
        lambda: plan_adapters("vllm").with_option("--max-loras", "900"),
    ),
    "an architecture without adapters": (
        "vllm.adapters",
        lambda: change_model(plan_adapters("vllm"), architecture="falcon"),
    ),
    "a rank that vLLM does not have": (
        "vllm.adapters",
        lambda: plan_adapters("vllm").with_option("--max-lora-rank", "100"),
    ),
    "fewer adapters in host memory than in a batch": (
        "vllm.adapters",
        lambda: plan_adapters("vllm").with_option("--max-cpu-loras", "1"),
    ),
    "adapters of experts with tensor and data parallel attention": (
        "vllm.adapters",
        lambda: make_plan("vllm", "H100 SXM", 8, "openai/gpt-oss-120b", 64, lora_adapters=4).with_layout(
            tensor=8, expert=8, attention_data=4, data=1
        ),
    ),
    "adapters with attention replicas": (
        "sglang.adapters",
        lambda: plan_adapters("sglang").with_option("--attn-dp-size", "2"),
    ),
    "adapters in LMDeploy's TurboMind": (
        "lmdeploy.adapters",
        lambda: plan_adapters("lmdeploy").with_option("--backend", "turbomind"),
    ),
    # options
    "a context beyond the model's": ("context.length", lambda: plan_h100().with_option("--max-model-len", "999999")),
    "a context below the requests'": ("context.length", lambda: plan_h100().with_option("--max-model-len", "64")),
    "more slots than llama.cpp has": (
        "slots.count",
        lambda: make_plan("llama.cpp", "H100 SXM", 1, "Qwen/Qwen3-0.6B", 1).with_option("--parallel", "300"),
    ),
    "fewer tokens in a step than requests": (
        "vllm.batch",
        lambda: plan_h100().with_option("--max-num-batched-tokens", "1"),
    ),
    "an input that an encoder would have to divide": (
        "vllm.batch",
        lambda: make_plan("vllm", "L4", 1, "BAAI/bge-m3", prompt_tokens=4096, task="embed").with_option(
            "--max-num-batched-tokens", "2048"
        ),
    ),
    "an embedding longer than a micro-batch": (
        "llama.cpp.embedding-batch",
        lambda: make_plan("llama.cpp", "L4", 1, "BAAI/bge-m3", prompt_tokens=4096, task="embed").with_option(
            "--ubatch-size", "512"
        ),
    ),
    "a conversion of an architecture that the converter lacks": (
        "llama.cpp.conversion",
        lambda: change_model(
            make_from_original(make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1), "Q8_0", "converted", "gguf"),
            architecture="internlm",
        ),
    ),
    "port 0": ("launch.port", lambda: plan_h100().with_option("--port", "0")),
    "an embedding model that generates": (
        "vllm.runner",
        lambda: make_plan("vllm", "L4", 1, "BAAI/bge-large-en-v1.5", task="embed").with_option("--runner", None),
    ),
    "a task that the engine does not serve": (
        "plan.task",
        lambda: plan_h100("sglang").with_plan(workload=replace_fields(plan_h100().plan.workload, task="classify")),
    ),
    "a system without the engine": ("plan.system", lambda: plan_h100().with_machine(os="windows")),
    "a colon in SGLang's served name": (
        "sglang.name",
        lambda: plan_h100("sglang").with_option("--served-model-name", "llama:70b"),
    ),
    "a quantized cache without flash attention": (
        "llama.cpp.cache-type",
        lambda: make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 1)
        .with_option("--cache-type-v", "q8_0")
        .with_option("--flash-attn", "off"),
    ),
    "a context that the slots divide": (
        "llama.cpp.context",
        lambda: make_plan("llama.cpp", "RTX 4090", 1, "Qwen/Qwen3-8B", 4).with_option("--ctx-size", "1024"),
    ),
    "a prompt as long as the context of TGI": (
        "tgi.input-tokens",
        lambda: make_plan("tgi", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B").with_option("--max-input-tokens", "8192"),
    ),
    "all memory for LMDeploy's cache": (
        "lmdeploy.cache-share",
        lambda: make_plan("lmdeploy", "A100 SXM 80GB", 1, "Qwen/Qwen3-8B", 64).with_option(
            "--cache-max-entry-count", "1.0"
        ),
    ),
    "a named card without the memory": (
        "memory.load",
        lambda: plan_on_mixed("vllm", "Qwen/Qwen3-8B").with_settings(cards=(0,)),
    ),
    "a named card that the machine does not have": (
        "layout.visible-cards",
        lambda: plan_on_mixed("vllm", "Qwen/Qwen3-8B").with_settings(cards=(7,)),
    ),
    "two named cards for a layout of one": (
        "layout.visible-cards",
        lambda: plan_on_mixed("vllm", "Qwen/Qwen3-8B").with_settings(cards=(0, 1)),
    ),
    "a process that sees another card than the plan names": (
        "layout.visible-cards",
        lambda: show_other_card(plan_on_mixed("vllm", "Qwen/Qwen3-8B")),
    ),
    "cards of two vendors in one process": (
        "layout.visible-cards",
        lambda: plan_on_mixed("llama.cpp", "Qwen/Qwen3-8B", "RX 7900 XTX")
        .with_layout(pipeline=2)
        .with_settings(cards=(0, 1)),
    ),
    "a part of a page in ExLlamaV3's cache": (
        "exllamav3.cache",
        lambda: make_plan("exllamav3", "RTX 3090", 1, "Qwen/Qwen3-8B", 1).with_option("--cache-tokens", "1000"),
    ),
}  # fmt: skip


class TestSeededFaults:
    @pytest.mark.parametrize("name", FAULTS)
    def test_a_seeded_fault_is_found_by_its_rule(self, name: str) -> None:
        rule, make = FAULTS[name]
        assert rule in make().list_rules()

    def test_there_are_enough_of_them_and_every_rule_finds_one(self) -> None:
        assert len(FAULTS) >= 30
        assert {rule for rule, _ in FAULTS.values()} == {rule.id for rule in list_launch_rules()}


class TestRules:
    def test_every_rule_has_a_unique_id_a_sentence_and_a_source(self) -> None:
        rules = list_launch_rules()
        assert len({rule.id for rule in rules}) == len(rules)
        for rule in rules:
            assert rule.sentence.endswith("."), rule.id
            assert rule.source, rule.id

    def test_rules_of_an_engine_cite_a_file_and_a_version(self) -> None:
        for engine in load_engines().values():
            cited = [(rule.id, rule.source) for rule in engine.launch_rules]
            for rule, source in (*cited, *engine.rule_sources.items()):
                assert re.search(r"\.(?:py|cpp|h|rs|md|txt)|/\w+ of", source), (rule, source)
                assert re.search(r"\bb?\d+(?:\.\d+)*", source), (rule, source)

    def test_engines_cite_the_rules_that_they_share(self) -> None:
        shared = {rule.id for rule in (*GENERAL_RULES, *MEMORY_RULES)}
        cited = {rule for engine in load_engines().values() for rule in engine.rule_sources}
        assert cited <= shared
        # The first three follow from arithmetic, the catalogue has the sources of its entries, and drivers hide cards.
        assert shared - cited == {
            "plan.system", "launch.port", "disk.prepare", "weights.published", "layout.visible-cards",
        }  # fmt: skip


def find_candidate(case: PlanCase, engine: str) -> tuple[EngineCandidate, EngineSearch] | None:
    machine, model = make_machine(case.chip, case.count), find_model(case.model)
    assert machine is not None
    work = with_model_task(model, case.workload)
    if model.max_context is not None and work.request_tokens > model.max_context:
        return None
    asked = DecisionCase(machine, model, work, Operations())
    search = EngineSearch(asked, MachineEvidence(), installable=False)
    found = search.get_candidate(get_engine(engine))
    return (found, search) if isinstance(found, EngineCandidate) else None


class TestGeneratedPlans:
    def test_the_search_finds_plans_that_the_verifier_accepts_and_no_other_candidate_beats(self) -> None:
        engines = list(load_engines())
        planned, compared, rejected = 0, 0, []
        cases = (*generate_cases(QUICK), *generate_mixed_cases(QUICK // 4))
        for number, case in enumerate(cases):
            engine = engines[number % len(engines)]
            found = find_candidate(case, engine)
            if found is None:
                continue
            candidate, search = found
            planned += 1
            rejected += [(case.label, one.fault) for one in candidate.rejected]
            assert verify_candidate(candidate, search.case) is None, case.label
            compared += check_engine(search, engine)
        assert planned >= QUICK / 6 and compared >= 5 * planned
        assert len(rejected) <= REJECTED_SHARE * planned, rejected

    def test_shown_launches_have_no_fault(self) -> None:
        check_decisions(QUICK_FULL)

    @pytest.mark.nightly
    def test_thousands_of_shown_launches_have_no_fault(self) -> None:
        check_decisions(NIGHTLY)


def check_decisions(number: int) -> None:
    """Every decision shows a launch without a fault, and few preferred candidates were rejected."""
    planned, rejected = 0, []
    for case in (*generate_cases(number), *generate_mixed_cases(number // 4)):
        machine, model = make_machine(case.chip, case.count), find_model(case.model)
        assert machine is not None
        decision = decide(machine, model, case.workload)
        if decision.launch is None or decision.settings is None:
            continue
        planned += 1
        rejected += [(case.label, note) for note in decision.notes if "was not planned" in note]
        if decision.settings.device == "cpu":
            machine = replace_fields(machine, accelerators=(), links=())
        faults = list_faults(plan(decision, model, case.workload), decision.launch, machine)
        assert faults == (), (case.label, faults)
    assert planned > number / 3
    assert len(rejected) <= REJECTED_SHARE * planned, rejected


class TestSearch:
    def test_a_rejected_plan_is_not_shown_and_the_next_one_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = get_engine("vllm")
        usual = decide_on_h100s()

        def refuse_layout(launch: PlannedLaunch) -> str | None:
            """For this test."""
            return "this layout fails" if launch.plan.parallelism == usual.parallelism else None

        rule = LaunchRule("test.layout", "this test", refuse_layout)
        monkeypatch.setattr(type(engine), "launch_rules", (*engine.launch_rules, rule))
        other = decide_on_h100s()
        assert (other.engine, usual.engine) == ("vllm", "vllm")
        assert other.parallelism != usual.parallelism
        assert any("this layout fails (rule test.layout)" in note for note in other.notes)

    def test_an_engine_whose_plans_are_all_rejected_is_refused_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = get_engine("vllm")

        def refuse_all(launch: PlannedLaunch) -> str | None:
            """For this test."""
            return "nothing works"

        rule = LaunchRule("test.all", "this test", refuse_all, "another engine")
        monkeypatch.setattr(type(engine), "launch_rules", (rule,))
        decision = decide_on_h100s()
        assert decision.engine != "vllm"
        (refusal,) = (one for one in decision.refused if one.engine == "vllm")
        assert (refusal.kind, refusal.why, refusal.hint) == ("impossible", "nothing works", "another engine")


def decide_on_h100s() -> Any:
    hardware = make_simulated_hardware({"accelerator": "H100 SXM", "count": 4, "ram_gb": 512})
    return decide(hardware, find_model("meta-llama/Meta-Llama-3.1-70B"), Workload(concurrency=64))
