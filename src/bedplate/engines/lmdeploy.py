"""LMDeploy: TurboMind kernels for 4-bit weights on NVIDIA, and a PyTorch engine for other models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from bedplate.engines.base import (
    OWN_ENVIRONMENT,
    ComputeTarget,
    Engine,
    EngineState,
    Features,
    KnownFailure,
    MemoryUse,
    get_converted_path,
    get_source_folder,
    plan_download,
)
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.parsers import Parsers, find_parsers
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shared import (
    HUB,
    PORT_IN_USE,
    TORCH,
    FailurePatterns,
    choose_plain_weights,
    explain_log,
    find_highest_sample,
    get_hub_variables,
    identify_quantization,
    join_options,
    list_named_adapters,
    refuse_architecture,
    refuse_stored,
    set_default_context,
    sum_counters,
    sum_samples,
)
from bedplate.engines.traits import (
    AdapterTraits,
    AdviceFlags,
    ContainerImage,
    ContainerTraits,
    EstimateTraits,
    LaunchOptions,
    LoadingTraits,
    MetricNames,
    NotedOptions,
    PrivatePort,
    RequestTraits,
    ServerFeatures,
    TableNames,
    TokenCounter,
)
from bedplate.values import (
    Hardware,
    Launch,
    Model,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
    replace_fields,
)
from bedplate.values.capabilities import ToolSupport
from bedplate.values.decision import Device
from bedplate.values.record import make_estimate

# From the files of the package lmdeploy 0.18.0 (2026-09-28), unless another version is named.
PREFILL_TOKENS = 8192
DIST_PORT = 20000
TURBOMIND = frozenset([
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "internvl_chat",
    "internvl", "interns1", "llama", "internlm2", "internlm3", "glm4_moe_lite", "gpt_oss", "mixtral",
])  # fmt: skip
"""`model_type` values of config.json, from turbomind/supported_models.py."""
PYTORCH = frozenset([
    "llama4", "chatglm", "glm4", "glm4v", "glm4_moe", "glm_moe_dsa", "mistral", "gemma", "gemma2", "gemma3",
    "gemma3_text", "deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v32", "deepseek_v4",
    "deepseek_vl_v2", "hy_v3", "llava", "llava_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "phi3", "phi3_v",
    "phimoe", "cogvlm", "minicpm3", "minicpmv", "qwen3_next", "sdar", "sdar_moe",
])  # fmt: skip
"""pytorch/models/module_map.py, in addition to those above."""
MAKES_AWQ = frozenset([
    "internlm2", "internlm3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "llama", "phi3", "chatglm",
    "mixtral", "qwen2_vl", "qwen2_5_vl", "mistral",
])  # fmt: skip
"""lite/apis/calibrate.py."""
GROUPS: Mapping[str, frozenset[int]] = {
    "awq": frozenset([128]), "gptq": frozenset([128]), "compressed-tensors": frozenset([32, 128]),
    "mxfp4": frozenset([32]), "fp8": frozenset([128]),
}  # fmt: skip
"""Supported group sizes of TurboMind (turbomind/converter.py): from V100 on, FP8 in blocks included."""
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
"""gpt-oss needs no name: its parser is selected by architecture."""
_KNOWN_FAILURES: FailurePatterns = (
    (
        r"CUDA runtime error: out of memory|No enough gpu memory for (?:kv cache|state cache|runtime)",
        KnownFailure(
            message="the memory left by the weights is too small for KV cache and activations",
            hint="use a shorter --context, a lower --concurrency or a smaller quantization; or free GPU memory",
        ),
    ),
    (
        r"Can not found rewrite for architectures: \['?(?P<what>\w+)"
        r"|\((?P<gone>\w+)\) support has been removed from LMDeploy",
        KnownFailure(
            message="this version of LMDeploy does not support the architecture {what}{gone}",
            hint="use --engine vllm, which supports more architectures",
        ),
    ),
    (
        r"Unsupported group_size=(?P<size>\d+) for model_format=\"(?P<how>[\w-]+)\"",
        KnownFailure(
            message="LMDeploy does not support {how} weights with group size {size}",
            hint="use the same model with group size 128, or choose another engine with --engine",
        ),
    ),
    (
        r"cuda is not available",
        KnownFailure(message="the GPU driver was not found", hint="install it; `bedplate doctor` shows what was found"),
    ),
)


EIGHT_BIT_CACHE = EightBitCache(
    # A scale and a zero point of 16 bits for each head of each token, with the usual 128 values.
    bits=8.25,
    rows=(
        SupportedQuantization(method="int8", part="cache", device="cuda", least=(7, 0),
                              source="docs/en/quantization/kv_quant.md of 0bf868e; quant_policy of 0.18.0"),
    ),
)  # fmt: skip


def check_method(launch: PlannedLaunch) -> str | None:
    """Its backends load this quantization of this architecture on this GPU."""
    label, method = identify_quantization(launch.model)
    if method == "16-bit":
        return None
    target = ComputeTarget(device=launch.device, count=1, features=launch.chip.features if launch.chip else frozenset())
    runs = _runs(launch.model, label, method, target, adapters=bool(launch.plan.workload.adapters))
    return None if runs else f"it does not load {label} weights of this model"


def check_adapters(launch: PlannedLaunch) -> str | None:
    """LoRA adapters need the PyTorch engine."""
    backend = launch.options.get("--backend", "")
    return (
        f"the backend {backend} has no LoRA adapters"
        if launch.plan.workload.adapters and backend != "pytorch"
        else None
    )


def check_cache_share(launch: PlannedLaunch) -> str | None:
    """The cache takes less than all of the memory that the weights leave."""
    share = launch.options.get("--cache-max-entry-count", "0.8")
    return None if 0 < float(share) < 1 else f"--cache-max-entry-count {share} is not between 0 and 1"


def check_architecture(launch: PlannedLaunch) -> str | None:
    """One of its backends has the model's architecture."""
    if launch.model.architecture in (*TURBOMIND, *PYTORCH, "", "unknown"):
        return None
    return f"LMDeploy does not have the architecture {launch.model.architecture}"


RULE_SOURCES = {
    "cache.type": "docs/en/quantization/kv_quant.md of 0bf868e; quant_policy of 0.18.0",
    "adapters.loaded": "cli/utils.py of 0.16.0: get_lora_adapters",
    "memory.convert": "lite/apis/calibrate.py of 0.16.0: load_hf_from_pretrained",
    "memory.capture": "messages.py of 0.16.0: cache_max_entry_count",
}
LAUNCH_RULES = (
    LaunchRule("lmdeploy.quantization", "turbomind/converter.py and pytorch/config.py of 0.16.0", check_method),
    LaunchRule("lmdeploy.adapters", "cli/serve.py of 0.16.0: adapters of the PyTorch engine", check_adapters),
    LaunchRule("lmdeploy.cache-share", "messages.py of 0.16.0: cache_max_entry_count", check_cache_share),
    LaunchRule(
        "lmdeploy.architecture", "turbomind/supported_models.py and pytorch/models/module_map.py of 0.16.0",
        check_architecture,
    ),
)  # fmt: skip


QUANTIZATIONS = (
    *make_rows(
        "turbomind/converter.py of 0.18.0: model_format", "cuda", ["awq", "gptq", "compressed-tensors", "mxfp4"]
    ),
    # Its PyTorch engine needs FP8 units, TurboMind does not.
    *make_rows("turbomind/converter.py and pytorch/config.py of 0.18.0: model_format", "cuda", ["fp8"]),
)


class LmDeploy(Engine):
    id = "lmdeploy"
    name = "LMDeploy"
    spellings = ("turbomind", "lmdeployturbomind", "internlmlmdeploy")
    version = "0.18.0"
    formats = ("safetensors",)
    vendors = ("nvidia",)
    unplanned: ClassVar[Mapping[str, str]] = {"huawei": "LMDeploy with DeepLink-org/dlinfer"}
    # CMakeLists.txt of 0.16.0 for CUDA 12, which the package depends on.
    capability = (7, 0)
    # Data parallelism needs a separate proxy, and expert parallelism a library that the package does not include.
    ways = ("tensor",)
    paged = True
    built_for = ("cuda",)
    effort = 3
    # No recipe: the package is only built for CUDA 12, and it has not been tested yet.
    features = Features(
        batching="continuous, chunked prefill",
        kv_cache="paged, optional prefix cache; 8 or 4 bits",
        quantization="AWQ, GPTQ, MXFP4, FP8 in blocks and 4-bit compressed-tensors as stored; converts to AWQ",
        hardware="NVIDIA from Volta on; other vendors with separate builds",
        structured_output="JSON schema, regular expressions (xgrammar)",
        multi_node="yes: TurboMind with a command on each node, the PyTorch engine on a Ray cluster",
        server="its own",
        maintained="active",
        source="LMDeploy 0.18.0 (2026-09-28): cli/utils.py, messages.py, turbomind/, metrics/loggers.py",
    )
    # `tool_choice` selects which tools are offered; the answer is not constrained.
    server_features = ServerFeatures(
        tools="auto", json_schema=True, json_object=True, logprobs=True, choices="one", vision=True,
        source="lmdeploy 0.17: serve/openai/api_server.py, protocol.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=3_000_000_000,
        device_bytes=2_500_000_000,
        prefill_tokens=PREFILL_TOKENS,
        # It applies this share to the memory that weights leave free, so the estimate is on the low side.
        share=0.8,
        spread=0.5,
        source="LMDeploy: defaults of cache_max_entry_count and max_prefill_token_num; the rest assumed as for vLLM",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(
        context="--session-len", slots="--max-batch-size", port="--server-port", share="--cache-max-entry-count",
        cards=("--tp",),
    )  # fmt: skip
    loading = LoadingTraits(
        share_covers="cache", conversion_copies=1.0,
        source="messages.py of 0.16.0: cache_max_entry_count; lite/apis/calibrate.py: load_hf_from_pretrained",
    )  # fmt: skip
    adapters = AdapterTraits(
        names="--adapters",
        use="requests name one as their model",
        source="docs/en/llm/api_server_lora.md and cli/utils.py: only the PyTorch engine has them; "
        "pytorch/nn/linear/lora.py of August 2026: also with AWQ and FP8 weights",
    )
    default_slots = 128
    private_port = PrivatePort(
        key_checked_by="wrapper",
        other_ports="with several GPUs PyTorch's rendezvous port and NCCL's ports, on several nodes also port 20000, "
        "without a key; not checked",
        source="cli/utils.py of 0.18.0: --api-keys would be readable in the list of processes; "
        "serve/openai/api_server.py runs uvicorn",
    )
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "4-bit weights for many users on NVIDIA, if a measurement shows that it is faster"
    table_names = TableNames(words=("lmdeploy", "turbomind"), rank=4)
    estimate = EstimateTraits(kernels="serving", reserves_answer=True, memory_known=False)
    flags = AdviceFlags(
        slots="--max-batch-size",
        cache_memory="--cache-max-entry-count",
        cache_type="--quant-policy int8",
        batch_tokens="--max-prefill-token-num",
    )
    noted = NotedOptions(slots="--max-batch-size", context="--session-len", tensor="--tp")
    requests = RequestTraits(
        fields=frozenset(["min_new_tokens", "ignore_eos"]),
        counter=TokenCounter(path="/v1/encode", field="input", special="add_bos"),
    )
    metric_names = MetricNames(
        running="lmdeploy:num_requests_running",
        waiting="lmdeploy:num_requests_waiting",
        kv_use="lmdeploy:gpu_cache_usage_perc",
    )
    container = ContainerTraits(joins_values=True)
    not_distributed = "has no launch of this model for several nodes, except on a Ray cluster"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_architecture(self, model, TURBOMIND | PYTORCH)
            or refuse_stored(self, hardware, model, workload)
        )

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = identify_quantization(model)
        if method != "16-bit":
            runs = _runs(model, label, method, target, adapters=bool(workload.adapters))
            return (Weights(label=model.quantization or label, made="as it is", format="safetensors"),) if runs else ()
        found = [choose_plain_weights(label, target)]
        if model.architecture in MAKES_AWQ and not workload.precision_sensitive:
            found.append(Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        return tuple(found)

    def refuse_eight_bit_cache(self, target: ComputeTarget, model: Model) -> str | None:
        if model.architecture in PYTORCH:
            return "its PyTorch engine has another 8-bit cache, which bedplate does not plan"
        return super().refuse_eight_bit_cache(target, model)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = set_default_context(super().settle(hardware, model, workload), model, workload)
        return replace_fields(settings, batch_tokens=PREFILL_TOKENS)

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        # Without a parser for the model's format, calls stay in the text.
        return super().find_tool_support(plan) if find_parsers(plan.model, PARSERS).tools else "none"

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, tensor = plan.settings, plan.parallelism.tensor
        converted = plan.weights.made == "converted"
        path = get_converted_path(plan) if converted else plan.model_path
        backend = _choose_backend(plan)
        argv = ["lmdeploy", "serve", "api_server", path, "--model-name", plan.model.served_name]
        argv += ["--server-name", "127.0.0.1", "--server-port", str(port), "--backend", backend]
        argv += ["--session-len", str(settings.context_tokens), "--max-batch-size", str(settings.slots)]
        argv += join_options([
            ("--cache-max-entry-count", settings.memory_share),
            ("--max-prefill-token-num", settings.batch_tokens),
            ("--tp", tensor if tensor > 1 else None),
        ])  # fmt: skip
        if plan.weights.made == "while loading":
            argv += ["--dtype", "float16" if plan.weights.label == "F16" else "bfloat16"]
        if converted:
            argv += ["--model-format", "awq"]
        if settings.kv_type == "fp8":
            # The KV cache of TurboMind supports 8-bit integers, not 8-bit floats.
            argv += ["--quant-policy", "int8" if backend == "turbomind" else "fp8"]
        if plan.workload.shared_prefix_tokens:
            argv += ["--enable-prefix-caching"]
        if plan.workload.adapters:
            argv += ["--adapters", *list_named_adapters(plan)]
        parsers = find_parsers(plan.model, PARSERS)
        argv += join_options([("--tool-call-parser", parsers.tools), ("--reasoning-parser", parsers.reasoning)])
        return Launch(argv=tuple(argv), env=get_hub_variables(plan), prepare=self._prepare(plan))

    def can_distribute(self, model: Model) -> bool:
        # The PyTorch engine needs a Ray cluster, which is started first (docs/en/advance/pytorch_multinodes.md).
        return model.architecture not in PYTORCH

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch | None:
        """The command on one of several nodes (turbomind/turbomind.py of 0.18.0); the first node serves requests."""
        if _choose_backend(plan) != "turbomind":
            return None
        launch = self.launch(plan, port)
        argv = (*launch.argv, "--nnodes", str(nodes), "--node-rank", str(rank))
        return replace_fields(launch, argv=(*argv, "--dist-init-addr", f"{leader}:{DIST_PORT}"))

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device != "cuda":
            return None
        note = "tag by the project's naming scheme; the newest checked tag is v0.16.0-cu12.8"
        return ContainerImage(name=f"openmmlab/lmdeploy:v{self.version}-cu12.8", note=note, python=True)

    def explain(self, log: str) -> KnownFailure | None:
        return explain_log(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE)

    def read_metrics(self, metrics: str) -> EngineState:
        before = sum_samples(metrics, "lmdeploy:num_api_requests_waiting")
        inside = sum_samples(metrics, "lmdeploy:num_requests_waiting")
        waiting = [count for count in (before, inside) if count is not None]
        return EngineState(
            running=sum_samples(metrics, "lmdeploy:num_requests_running"),
            waiting=sum(waiting) if waiting else None,
            kv_use=find_highest_sample(metrics, "lmdeploy:gpu_cache_usage_perc"),
            computed=sum_counters(metrics, "lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total"),
        )

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        package = f"lmdeploy=={self.version}"
        steps = [
            Preparation(
                kind="install", what=package, where=OWN_ENVIRONMENT,
                argv=("uv", "pip", "install", "--torch-backend", "auto", package),
            )
        ]  # fmt: skip
        if plan.weights.made == "converted":
            steps += [*plan_download(plan), _plan_quantization(plan)]
        return tuple(steps)


def _runs(model: Model, label: str, method: str, target: ComputeTarget, *, adapters: bool = False) -> bool:
    details = model.quantization_details
    shared = details.block[-1] if details is not None and details.block else details.group_size if details else None
    if method not in GROUPS or (shared is not None and shared not in GROUPS[method]):
        return False
    if method == "compressed-tensors" and label != "INT4":
        return False
    if model.architecture not in PYTORCH and not adapters:
        # FP8 with a scale per channel or tensor has other tensor names.
        return method != "fp8" or shared == 128
    # The PyTorch engine does not support GPTQ and MXFP4, and needs FP8 units for FP8 (pytorch/config.py).
    in_groups = {"compressed-tensors": 32, "fp8": 128}.get(method)
    return method == "awq" or (shared == in_groups is not None and (method != "fp8" or "fp8" in target.features))


def _choose_backend(plan: Plan) -> str:
    return "pytorch" if plan.model.architecture in PYTORCH or plan.workload.adapters else "turbomind"


def _plan_quantization(plan: Plan) -> Preparation:
    """The step that converts to AWQ on the serving GPU, calibrated with 128 samples of a public text."""
    folder, where = get_source_folder(plan), get_converted_path(plan)
    seconds = make_estimate(300 + 120 * plan.model.parameters / 1e9, 0.7, "not measured: minutes per billion weights")
    return Preparation(
        kind="convert", what=f"{plan.model.name} to {plan.weights.label}", where=where,
        disk_bytes=round(plan.model.parameters * 0.6), seconds=seconds,
        argv=("lmdeploy", "lite", "auto_awq", folder, "--work-dir", where, "--w-bits", "4", "--w-group-size", "128"),
    )  # fmt: skip


ENGINE = LmDeploy()
