"""SGLang: shared prefixes, long context and mixtures of experts, at scale."""

from __future__ import annotations

from collections.abc import Mapping

from bedplate.engines.base import Engine, EngineState, Failure, Features, MemoryUse, Target, fetching, made_path
from bedplate.engines.parsers import Parsers, parsers_for
from bedplate.engines.shared import (
    HUB,
    PORT_IN_USE,
    TORCH,
    Known,
    compressing,
    everyday_settings,
    explained,
    highest,
    hub_variables,
    joined,
    plain_form,
    progress_of_shards,
    refuse_gfx,
    refuse_stored,
    stored_as,
    total,
)
from bedplate.values import (
    Hardware,
    Launch,
    Model,
    Parallelism,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
    replaced,
)

# All of this by the source of 0.5.23 (its wheel), unless another version is named.
DIST_PORT = 25000
# python/sglang/kernels/aot/setup_rocm.py of v0.5.18.
GFX = ("gfx942", "gfx950", "gfx1250")
RUNS = frozenset([
    "fp8", "nvfp4", "mixed", "mxfp4", "mxfp8", "compressed-tensors", "awq", "gptq", "auto-round", "bitsandbytes",
    "torchao", "quark", "mxfp4 experts, fp8",
])  # fmt: skip
RUNS_ON_ROCM = RUNS - {"nvfp4", "mixed", "bitsandbytes", "mxfp8"}
PARSERS: Mapping[str, Parsers] = {
    "hermes": Parsers("hermes"),
    "deepseek-r1-distill": Parsers(None, "deepseek-r1"),
    "deepseek-r1": Parsers("deepseekv3", "deepseek-r1"),
    "deepseek-v3": Parsers("deepseekv3"),
    "deepseek-v3.1": Parsers("deepseekv31", "deepseek-v3"),
    "deepseek-v3.2": Parsers("deepseekv32", "deepseek-v3"),
    "deepseek-v4": Parsers("deepseekv4", "deepseek-v4"),
    "kimi-k2": Parsers("kimi_k2"),
    "kimi-k2-thinking": Parsers("kimi_k2", "kimi_k2"),
    "kimi-k3": Parsers("kimi_k3", "kimi_k3"),
    "gpt-oss": Parsers("gpt-oss", "gpt-oss"),
    "glm-4.5": Parsers("glm", "glm45"),
    "glm-4.7": Parsers("glm47", "glm45"),
    "minimax-m2": Parsers("minimax-m2", "minimax-append-think"),
    "minimax-m3": Parsers("minimax-m3", "minimax-m3"),
    "qwq": Parsers("qwen", "deepseek-r1"),
    "qwen-2.5": Parsers("qwen"),
    "qwen-3": Parsers("qwen", "qwen3"),
    "qwen-3-instruct": Parsers("qwen"),
    "qwen-3-thinking": Parsers("qwen", "qwen3-thinking"),
    "qwen-3-coder": Parsers("qwen3_coder"),
    "qwen-3.5": Parsers("qwen3_coder", "qwen3"),
    "llama-3": Parsers("llama3"),
    "llama-4": Parsers("pythonic"),
    "mistral": Parsers("mistral"),
    "magistral": Parsers("mistral", "mistral"),
    "gemma-4": Parsers("gemma4", "gemma4"),
    "nemotron-3": Parsers("qwen3_coder", "nemotron_3"),
    "hunyuan": Parsers("hunyuan", "hunyuan"),
    "step-3.5": Parsers("step3p5", "step3p5"),
    "mimo": Parsers("mimo", "mimo"),
    "lfm2": Parsers("lfm2"),
}
_KNOWN_FAILURES: Known = (
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        Failure(
            message="the weights and the work on a prompt leave no memory for the cache",
            hint="a smaller quantization, more cards, or a GPU that nothing else uses",
        ),
    ),
    (
        r"Model architectures \[?'?(?P<what>[\w.-]+)'?\]? are not supported for now"
        r"|The checkpoint you are trying to load has model type `(?P<type>[^`]+)`",
        Failure(
            message="this version of SGLang does not know the architecture {what}{type}",
            hint="a newer version may: see whether bedplate has an update, or choose another engine with --engine",
        ),
    ),
    (
        r"User-specified context_length \((?P<length>\d+)\) is greater than the derived context_length",
        Failure(
            message="the model was not made for {length} tokens of context",
            hint="ask for a shorter --context",
        ),
    ),
)


class Sglang(Engine):
    id = "sglang"
    name = "SGLang"
    version = "0.5.23"
    formats = ("safetensors",)
    vendors = ("nvidia", "amd")
    # Its wheels hold kernels from sm_80 on: python/sglang/kernels/aot/CMakeLists.txt of v0.5.18.
    capability = (8, 0)
    tasks = ("generate", "embed")
    ways = ("tensor", "pipeline", "data", "expert", "attention_data")
    paged = True
    built_for = ("cuda",)
    effort = 4
    features = Features(
        batching="continuous, prompts in chunks, scheduling overlapped with the GPU",
        kv_cache="paged, prefix tree (RadixAttention), tiers in host memory; FP8",
        quantization="FP8 while loading; FP8, NVFP4, MXFP4, AWQ, GPTQ, bitsandbytes as stored",
        hardware="NVIDIA from Ampere on, AMD Instinct from MI300 on",
        structured_output="JSON schema, regular expressions, grammars (xgrammar)",
        multi_node="yes: tensor, pipeline, expert, attention data parallel; prefill and decode apart",
        server="its own",
        maintained="active",
        source="SGLang 0.5.23 (2026-10-30): srt/arg_groups/fields, srt/function_call; kernels by v0.5.18",
    )
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=3_000_000_000,
        prefill_tokens=8192,
        share=0.88,
        spread=0.5,
        source="SGLang: mem_fraction_static and chunked_prefill_size defaults; graphs as its log reports",
    )
    default_slots = 256
    strength = "shared prefixes, structured output, long context or MoE at scale"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_gfx(self, hardware, GFX)
            or refuse_stored(self, hardware, model, workload)
        )

    def weights(self, target: Target, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = stored_as(model)
        if method != "16-bit":
            runs = RUNS if target.device == "cuda" else RUNS_ON_ROCM
            as_it_is = Weights(label=model.quantization or label, made="as it is", format="safetensors")
            return (as_it_is,) if method in runs else ()
        found = [plain_form(label, target)]
        if workload.task == "generate" and ("fp8" in target.features or _unpacks_fp8(target, model)):
            found.append(Weights(label="FP8", made="while loading", format="safetensors"))
        if workload.task == "generate" and not workload.precision_sensitive:
            if target.device == "cuda" and "fp4" in target.features:
                found.append(Weights(label="NVFP4", made="converted", format="safetensors"))
            found.append(Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        return tuple(found)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # What it leaves to activations and graphs it computes from the card's memory; a share would override that.
        settings = everyday_settings(super().settle(hardware, model, workload), model, workload)
        return replaced(settings, memory_share=None)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, layout = plan.settings, _one_group(plan.parallelism)
        path = made_path(plan) if plan.weights.made == "converted" else plan.model_path
        argv = ["sglang", "serve", "--model-path", path, "--served-model-name", plan.model.served_name]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--context-length", str(settings.context_tokens)]
        # It divides this among the ranks of attention; replicas have as many each.
        merged = plan.parallelism.data // layout.data
        argv += ["--max-running-requests", str(settings.slots * merged)]
        argv += joined([("--mem-fraction-static", settings.memory_share)])
        argv += joined([("--chunked-prefill-size", settings.batch_tokens)])
        if plan.weights.made == "while loading":
            argv += ["--quantization", "fp8"] if plan.weights.label == "FP8" else ["--dtype", "bfloat16"]
        if settings.kv_type == "fp8":
            argv += ["--kv-cache-dtype", "fp8_e4m3"]
        argv += _layout(layout)
        if plan.workload.task == "embed":
            argv += ["--is-embedding"]
        else:
            parsers = parsers_for(plan.model, PARSERS)
            argv += joined([("--tool-call-parser", parsers.tools), ("--reasoning-parser", parsers.reasoning)])
        argv += ["--enable-metrics"]
        return Launch(argv=tuple(argv), env=hub_variables(plan), prepare=self._prepare(plan))

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch:
        """The command of one node of several; the first one answers requests."""
        launch = self.launch(plan, port)
        argv = (*launch.argv, "--nnodes", str(nodes), "--node-rank", str(rank))
        return replaced(launch, argv=(*argv, "--dist-init-addr", f"{leader}:{DIST_PORT}"))

    def progress(self, line: str) -> float | None:
        return progress_of_shards(line)

    def explain(self, log: str) -> Failure | None:
        return explained(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE)

    def read(self, metrics: str) -> EngineState:
        return EngineState(
            running=total(metrics, "sglang:num_running_reqs"),
            waiting=total(metrics, "sglang:num_queue_reqs"),
            kv_use=highest(metrics, "sglang:token_usage"),
            preemptions=total(metrics, "sglang:num_retracted_requests_total"),
        )

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        package, where = f"sglang=={self.version}", "an environment of its own"
        if plan.settings.device == "rocm":
            steps = [Preparation(kind="install", what=f"{package} built for ROCm", where=where)]
        else:
            argv = ("uv", "pip", "install", "--torch-backend", "auto", package)
            steps = [Preparation(kind="install", what=package, where=where, disk_bytes=4_100_000_000, argv=argv)]
        if plan.weights.made == "converted":
            steps += fetching(plan)
            steps += compressing(plan, "NVFP4" if plan.weights.label == "NVFP4" else "W4A16_ASYM")
        return tuple(steps)


def _unpacks_fp8(target: Target, model: Model) -> bool:
    """Dense models on NVIDIA without units for FP8: Marlin kernels unpack it to 16 bits."""
    return target.device == "cuda" and not model.num_experts and (target.capability or (0, 0)) >= (8, 0)


def _one_group(layout: Parallelism) -> Parallelism:
    """Replicas beside attention data parallelism are refused; as one wider group they keep the same requests apart."""
    if layout.attention_data == 1 or layout.data == 1:
        return layout
    return replaced(
        layout, tensor=layout.tensor * layout.data, attention_data=layout.attention_data * layout.data,
        expert=layout.expert * layout.data, data=1,
    )  # fmt: skip


def _layout(layout: Parallelism) -> list[str]:
    return joined(
        (name, size if size > 1 else None)
        for name, size in (
            ("--tp-size", layout.tensor),
            ("--pp-size", layout.pipeline),
            ("--dp-size", layout.data),
            ("--ep-size", layout.expert),
            ("--attn-dp-size", layout.attention_data),
        )
    )


ENGINE = Sglang()
