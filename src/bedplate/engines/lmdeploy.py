"""LMDeploy: TurboMind's kernels for 4-bit weights on NVIDIA, and an engine in PyTorch for the models beyond them."""

from __future__ import annotations

from collections.abc import Mapping

from bedplate.engines.base import (
    Engine,
    EngineState,
    Failure,
    Features,
    MemoryUse,
    Target,
    fetching,
    made_path,
    source_folder,
)
from bedplate.engines.parsers import Parsers, parsers_for
from bedplate.engines.shared import (
    HUB,
    PORT_IN_USE,
    TORCH,
    Known,
    everyday_settings,
    explained,
    highest,
    hub_variables,
    joined,
    plain_form,
    refuse_architecture,
    refuse_stored,
    stored_as,
    total,
)
from bedplate.engines.traits import (
    AdviceFlags,
    ContainerImage,
    ContainerTraits,
    EstimateTraits,
    MetricNames,
    NotedOptions,
    TableNames,
)
from bedplate.values import Hardware, Launch, Model, Plan, Preparation, Refusal, Settings, Weights, Workload, replaced
from bedplate.values.decision import Device
from bedplate.values.record import estimate

# All of this by the files of the package lmdeploy 0.18.0 (2026-09-28), unless another version is named.
PREFILL_TOKENS = 8192
TURBOMIND = frozenset([
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "internvl_chat",
    "internvl", "interns1", "llama", "internlm2", "internlm3", "glm4_moe_lite", "gpt_oss", "mixtral",
])  # fmt: skip
"""turbomind/supported_models.py, as config.json's `model_type` has them."""
PYTORCH = frozenset([
    "llama4", "chatglm", "glm4", "glm4v", "glm4_moe", "glm_moe_dsa", "mistral", "gemma", "gemma2", "gemma3",
    "gemma3_text", "deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v32", "deepseek_v4",
    "deepseek_vl_v2", "hy_v3", "llava", "llava_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "phi3", "phi3_v",
    "phimoe", "cogvlm", "minicpm3", "minicpmv", "qwen3_next", "sdar", "sdar_moe",
])  # fmt: skip
"""pytorch/models/module_map.py, beyond those above."""
MAKES_AWQ = frozenset([
    "internlm2", "internlm3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "llama", "phi3", "chatglm",
    "mixtral", "qwen2_vl", "qwen2_5_vl", "mistral",
])  # fmt: skip
"""lite/apis/calibrate.py."""
GROUPS: Mapping[str, frozenset[int]] = {
    "awq": frozenset([128]), "gptq": frozenset([128]), "compressed-tensors": frozenset([32, 128]),
    "mxfp4": frozenset([32]), "fp8": frozenset([128]),
}  # fmt: skip
"""Weights that share a scale, by what TurboMind runs (turbomind/converter.py): from V100 on, FP8 in blocks included."""
PARSERS: Mapping[str, Parsers] = {
    "deepseek-r1-distill": Parsers(None, "default"),
    "deepseek-r1": Parsers(None, "default"),
    "deepseek-v3.1": Parsers(None, "deepseek-v3"),
    "deepseek-v3.2": Parsers("deepseek-v32", "deepseek-v32"),
    "deepseek-v4": Parsers("deepseek-v4", "deepseek-v4"),
    "kimi-k2": Parsers("kimi_k2"),
    "kimi-k2-thinking": Parsers("kimi_k2", "default"),
    "glm-4.5": Parsers(None, "default"),
    "glm-4.7": Parsers("glm47", "default"),
    "qwq": Parsers("qwen", "default"),
    "qwen-2.5": Parsers("qwen2d5"),
    "qwen-3": Parsers("qwen3", "default"),
    "qwen-3-instruct": Parsers("qwen3"),
    "qwen-3-thinking": Parsers("qwen3", "default"),
    "qwen-3-coder": Parsers("qwen3coder"),
    "qwen-3.5": Parsers("qwen3coder", "default"),
    "llama-3": Parsers("llama3"),
    "internlm": Parsers("internlm"),
}
"""gpt-oss is parsed by its architecture, and needs no name."""
_KNOWN_FAILURES: Known = (
    (
        r"CUDA runtime error: out of memory|No enough gpu memory for (?:kv cache|state cache|runtime)",
        Failure(
            message="beside the weights there is no room for the cache and the work on a prompt",
            hint="ask for less: a shorter --context, a lower --concurrency, a smaller quantization; or free the GPU",
        ),
    ),
    (
        r"Can not found rewrite for architectures: \['?(?P<what>\w+)"
        r"|\((?P<gone>\w+)\) support has been removed from LMDeploy",
        Failure(
            message="this version of LMDeploy does not know the architecture {what}{gone}",
            hint="vllm serves more architectures",
        ),
    ),
    (
        r"Unsupported group_size=(?P<size>\d+) for model_format=\"(?P<how>[\w-]+)\"",
        Failure(
            message="LMDeploy does not run {how} weights in groups of {size}",
            hint="the same model in groups of 128, or another engine with --engine",
        ),
    ),
    (
        r"cuda is not available",
        Failure(message="the GPU's driver was not found", hint="`bedplate doctor` says what there is"),
    ),
)


class LmDeploy(Engine):
    id = "lmdeploy"
    name = "LMDeploy"
    spellings = ("turbomind", "lmdeployturbomind", "internlmlmdeploy")
    version = "0.18.0"
    formats = ("safetensors",)
    vendors = ("nvidia",)
    # CMakeLists.txt of 0.16.0 for CUDA 12, whose libraries the package asks for.
    capability = (7, 0)
    # Data parallel it needs a proxy before it, and experts are spread by a library that it does not bring along.
    ways = ("tensor",)
    paged = True
    built_for = ("cuda",)
    effort = 3
    # No recipe: the package is built for CUDA 12 and nothing else, and it has not been run yet.
    features = Features(
        batching="continuous, prompts in chunks",
        kv_cache="paged, prefix cache on request; 8 or 4 bits",
        quantization="AWQ, GPTQ, MXFP4, FP8 in blocks and 4-bit compressed-tensors as stored; makes AWQ",
        hardware="NVIDIA from Volta on; others by builds of their own",
        structured_output="JSON schema, regular expressions (xgrammar)",
        multi_node="yes: tensor, data and expert parallel behind a proxy",
        server="its own",
        maintained="active",
        source="LMDeploy 0.18.0 (2026-09-28): cli/utils.py, messages.py, turbomind/, metrics/loggers.py",
    )
    uses = MemoryUse(
        process_bytes=3_000_000_000,
        device_bytes=2_500_000_000,
        prefill_tokens=PREFILL_TOKENS,
        # Of what weights leave free it takes so much for the cache, so that this is rather too little.
        share=0.8,
        spread=0.5,
        source="LMDeploy: defaults of cache_max_entry_count and max_prefill_token_num; else assumed as vLLM's",
    )
    default_slots = 128
    strength = "4-bit weights for many users on NVIDIA, where it is measured to be faster"
    table_names = TableNames(words=("lmdeploy", "turbomind"), rank=4)
    estimate = EstimateTraits(kernels="serving", reserves_answer=True, memory_known=False)
    flags = AdviceFlags(
        slots="--max-batch-size",
        cache_memory="--cache-max-entry-count",
        cache_type="--quant-policy int8",
        batch_tokens="--max-prefill-token-num",
    )
    noted = NotedOptions(slots="--max-batch-size", context="--session-len", tensor="--tp")
    metric_names = MetricNames(
        running="lmdeploy:num_requests_running",
        waiting="lmdeploy:num_requests_waiting",
        kv_use="lmdeploy:gpu_cache_usage_perc",
    )
    container = ContainerTraits(joins_values=True)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_architecture(self, model, TURBOMIND | PYTORCH)
            or refuse_stored(self, hardware, model, workload)
        )

    def weights(self, target: Target, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = stored_as(model)
        if method != "16-bit":
            runs = _runs(model, label, method, target)
            return (Weights(label=model.quantization or label, made="as it is", format="safetensors"),) if runs else ()
        found = [plain_form(label, target)]
        if model.architecture in MAKES_AWQ and not workload.precision_sensitive:
            found.append(Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        return tuple(found)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = everyday_settings(super().settle(hardware, model, workload), model, workload)
        return replaced(settings, batch_tokens=PREFILL_TOKENS)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, tensor = plan.settings, plan.parallelism.tensor
        converted = plan.weights.made == "converted"
        path = made_path(plan) if converted else plan.model_path
        backend = _backend(plan.model)
        argv = ["lmdeploy", "serve", "api_server", path, "--model-name", plan.model.served_name]
        argv += ["--server-name", "127.0.0.1", "--server-port", str(port), "--backend", backend]
        argv += ["--session-len", str(settings.context_tokens), "--max-batch-size", str(settings.slots)]
        argv += joined([
            ("--cache-max-entry-count", settings.memory_share),
            ("--max-prefill-token-num", settings.batch_tokens),
            ("--tp", tensor if tensor > 1 else None),
        ])  # fmt: skip
        if plan.weights.made == "while loading":
            argv += ["--dtype", "float16" if plan.weights.label == "F16" else "bfloat16"]
        if converted:
            argv += ["--model-format", "awq"]
        if settings.kv_type == "fp8":
            # TurboMind has no 8-bit floats for its cache, but 8-bit integers.
            argv += ["--quant-policy", "int8" if backend == "turbomind" else "fp8"]
        if plan.workload.shared_prefix_tokens:
            argv += ["--enable-prefix-caching"]
        parsers = parsers_for(plan.model, PARSERS)
        argv += joined([("--tool-call-parser", parsers.tools), ("--reasoning-parser", parsers.reasoning)])
        return Launch(argv=tuple(argv), env=hub_variables(plan), prepare=self._prepare(plan))

    def published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device != "cuda":
            return None
        note = "tag by the project's own naming; v0.16.0-cu12.8 is the newest that was seen"
        return ContainerImage(name=f"openmmlab/lmdeploy:v{self.version}-cu12.8", note=note, python=True)

    def explain(self, log: str) -> Failure | None:
        return explained(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE)

    def read(self, metrics: str) -> EngineState:
        before = total(metrics, "lmdeploy:num_api_requests_waiting")
        inside = total(metrics, "lmdeploy:num_requests_waiting")
        waiting = [count for count in (before, inside) if count is not None]
        return EngineState(
            running=total(metrics, "lmdeploy:num_requests_running"),
            waiting=sum(waiting) if waiting else None,
            kv_use=highest(metrics, "lmdeploy:gpu_cache_usage_perc"),
        )

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        package = f"lmdeploy=={self.version}"
        steps = [
            Preparation(
                kind="install", what=package, where="an environment of its own",
                argv=("uv", "pip", "install", "--torch-backend", "auto", package),
            )
        ]  # fmt: skip
        if plan.weights.made == "converted":
            steps += [*fetching(plan), _quantizing(plan)]
        return tuple(steps)


def _runs(model: Model, label: str, method: str, target: Target) -> bool:
    details = model.quantization_details
    shared = details.block[-1] if details is not None and details.block else details.group_size if details else None
    if method not in GROUPS or (shared is not None and shared not in GROUPS[method]):
        return False
    if method == "compressed-tensors" and label != "INT4":
        return False
    if model.architecture not in PYTORCH:
        # FP8 with a scale for each channel or tensor has other names in its files.
        return method != "fp8" or shared == 128
    # Its other engine knows no GPTQ and no MXFP4, and runs FP8 on units for it alone (pytorch/config.py).
    in_groups = {"compressed-tensors": 32, "fp8": 128}.get(method)
    return method == "awq" or (shared == in_groups is not None and (method != "fp8" or "fp8" in target.features))


def _backend(model: Model) -> str:
    return "pytorch" if model.architecture in PYTORCH else "turbomind"


def _quantizing(plan: Plan) -> Preparation:
    """AWQ on the GPU that will serve, calibrated with 128 samples of a public text."""
    folder, where = source_folder(plan), made_path(plan)
    seconds = estimate(300 + 120 * plan.model.parameters / 1e9, 0.7, "not measured: minutes for each billion weights")
    return Preparation(
        kind="convert", what=f"{plan.model.name} to {plan.weights.label}", where=where,
        disk_bytes=round(plan.model.parameters * 0.6), seconds=seconds,
        argv=("lmdeploy", "lite", "auto_awq", folder, "--work-dir", where, "--w-bits", "4", "--w-group-size", "128"),
    )  # fmt: skip


ENGINE = LmDeploy()
