"""Plans for many models, quantizations, layouts and settings, for the tests of the engines."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from bedplate.engines import Engine
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Hardware, Model, Parallelism, Plan, Settings, Workload, replace_fields
from bedplate.values.workload import LoraAdapter

MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.2", "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking", "zai-org/GLM-4.6",
    "MiniMaxAI/MiniMax-M2", "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2.5-72B-Instruct",
    "nvidia/DeepSeek-V3.2-NVFP4", "google/gemma-4-31B-it", "Qwen/Qwen3-Coder-Next", "Qwen/Qwen2-72B-Instruct",
)  # fmt: skip
MACHINES = (
    "NVIDIA T4", "A100 80GB SXM", "RTX 4090", "H100 SXM", "B200", "RTX 5090", "MI300X", "MI355X", "cpu",
)  # fmt: skip


@functools.cache
def machine(name: str, count: int = 8) -> Hardware:
    if name == "cpu":
        return make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 256, "os": "linux"})
    return make_simulated_hardware({"accelerator": name, "count": count, "ram_gb": 1024, "os": "linux"})


def model(name: str, folder: bool = False) -> Model:
    found = find_model(name)
    return replace_fields(found, files=("/models/it is here/model-00001-of-2.safetensors",)) if folder else found


def plan(
    engine: Engine,
    on: Hardware,
    which: Model,
    *,
    label: str | None = None,
    workload: Workload | None = None,
    layout: Parallelism | None = None,
    settings: Settings | None = None,
) -> Plan:
    work = workload or Workload(concurrency=16, context_tokens=8192)
    target = engine.find_target(on)
    assert target is not None
    forms = engine.list_weights(target, which, work)
    chosen = next(form for form in forms if label is None or form.label == label)
    return Plan(
        engine=engine.id, engine_version=engine.version or "", model=which, workload=work, weights=chosen,
        parallelism=layout or Parallelism(), settings=settings or engine.settle(on, which, work),
    )  # fmt: skip


ADAPTERS = (LoraAdapter(path="/adapters/sql", rank=8), "acme/support, v2", LoraAdapter(path="a/b", name="c", rank=64))


def lora_adapters(engine: Engine) -> st.SearchStrategy[int | tuple[str | LoraAdapter, ...] | None]:
    """No adapters, a number of them, or a list, as far as the engine serves them."""
    if engine.adapters is None:
        return st.none()
    most = engine.adapters.most or len(ADAPTERS)
    named = ADAPTERS if engine.adapters.separator is None else (*ADAPTERS[:1], *ADAPTERS[2:])
    return st.none() | st.integers(1, engine.adapters.most or 200) | st.just(named[:most])


@st.composite
def plans(draw: st.DrawFn, engine: Engine) -> Plan:
    """Any plan that an engine accepts, whether or not it would fit."""
    on = machine(draw(st.sampled_from(MACHINES)))
    which = model(draw(st.sampled_from(MODELS)), draw(st.booleans()))
    work = Workload(
        users=draw(st.integers(1, 5000)),
        concurrency=draw(st.none() | st.integers(1, 3000)),
        prompt_tokens=draw(st.integers(1, 200_000)),
        output_tokens=draw(st.integers(1, 20_000)),
        context_tokens=draw(st.none() | st.integers(1, 1_000_000)),
        shared_prefix_tokens=draw(st.sampled_from([0, 4000])),
        structured_output=draw(st.booleans()),
        precision_sensitive=draw(st.booleans()),
        lora_adapters=draw(lora_adapters(engine)),
    )
    target = engine.find_target(on)
    forms = engine.list_weights(target, which, work) if target is not None else ()
    if target is None or not forms or engine.refuse(on, which, work) is not None:
        on, which = machine("H100 SXM"), model("meta-llama/Llama-3.1-8B-Instruct")
        target = engine.find_target(on)
        assert target is not None
        forms = engine.list_weights(target, which, work)
    size = st.sampled_from([1, 2, 4, 8])
    tensor = draw(size) if target.device != "cpu" and "tensor" in engine.ways else 1
    expert = tensor if which.num_experts and "expert" in engine.ways and draw(st.booleans()) else 1
    layout = Parallelism(
        tensor=tensor,
        pipeline=draw(size) if target.device != "cpu" and "pipeline" in engine.ways else 1,
        data=draw(size) if target.device != "cpu" and "data" in engine.ways else 1,
        expert=expert,
        attention_data=tensor if expert > 1 and "attention_data" in engine.ways and draw(st.booleans()) else 1,
    )
    settings = engine.settle(on, which, work)
    if draw(st.booleans()):
        settings = replace_fields(
            settings, kv_type="fp8", memory_share=0.8, batch_tokens=draw(st.sampled_from([512, 16384]))
        )
    return Plan(
        engine=engine.id, engine_version=engine.version or "", model=which, workload=work,
        weights=draw(st.sampled_from(forms)), parallelism=layout, settings=settings,
    )  # fmt: skip
