"""TensorRT-LLM: the highest performance on NVIDIA hardware, for a model that rarely changes."""

from __future__ import annotations

import json
from collections.abc import Mapping

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
from bedplate.engines.checks import LaunchRule, PlannedLaunch, explain_packing
from bedplate.engines.parsers import Parsers, find_parsers
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shared import (
    HUB,
    PORT_IN_USE,
    TORCH,
    FailurePatterns,
    choose_plain_weights,
    explain_log,
    get_hub_variables,
    identify_quantization,
    join_options,
    parse_shard_progress,
    refuse_architecture,
    refuse_stored,
    set_default_context,
)
from bedplate.engines.traits import (
    AdapterTraits,
    AdviceFlags,
    ClonedProgram,
    ContainerConversion,
    ContainerImage,
    ContainerTraits,
    DynamoWorker,
    EstimateTraits,
    LaunchOptions,
    LoadingTraits,
    MetricNames,
    NotedOptions,
    PrivatePort,
    RequestTraits,
    ServerFeatures,
    TableNames,
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
    make_estimate,
    replace_fields,
)
from bedplate.values.capabilities import Capabilities, ToolSupport
from bedplate.values.decision import Device
from bedplate.values.quoting import join_posix_shell, quote_posix_shell

PACKAGE = "tensorrt-llm==1.2.1"
"""The package on PyPI is a stub that downloads the wheel from NVIDIA's index."""
IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
INDEX = "https://pypi.nvidia.com"
OPTIMIZER = ClonedProgram(
    program="hf_ptq.py",
    repository="https://github.com/NVIDIA/TensorRT-Model-Optimizer",
    # The version that TensorRT-LLM 1.2 requires. The package contains the library; the program is one of its examples.
    tag="0.37.0",
    path="examples/llm_ptq",
)
SYSTEM = "the CUDA toolkit 13.1 and libopenmpi-dev"
"""From its installation guide for pip on Ubuntu 24.04, which also asks for PyTorch for CUDA 13.0."""
OPTIONS_FILE = "trtllm-options.yaml"
# Model types whose classes the release notes up to 1.2 and the table of supported models list for the PyTorch backend,
# without those that only AutoDeploy supports or that came with 1.3.
ARCHITECTURES = frozenset([
    "llama", "llama4", "mllama", "mistral", "mistral3", "mixtral", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3",
    "qwen3_moe", "qwen3_next", "qwen3_vl", "deepseek_v3", "deepseek_v32", "kimi_k2", "gpt_oss", "gemma3", "gemma3_text",
    "glm4_moe", "nemotron", "nemotron-nas", "nemotron_h", "phi3", "phi4mm", "exaone4", "exaone_moe", "hunyuan_v1_moe",
    "hunyuan_v1_dense", "seed_oss", "starcoder2", "cohere2",
])  # fmt: skip
# "Hardware Support Matrix" of docs/source/features/quantization.md (2026): methods by generation.
_AMPERE, _ADA, _HOPPER, _BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
MOST_RESIDENT_ADAPTERS = 32
ATTENTION_TARGETS = ("attn_q", "attn_k", "attn_v", "attn_dense")
MLP_TARGETS = ("mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")
"""Its names of the linear layers (lora_helper.py: get_default_trtllm_modules_to_hf_modules)."""
CONVERSIONS = {"FP8": "fp8", "NVFP4": "nvfp4", "AWQ-INT4": "int4_awq"}
"""ModelOpt's names of the output formats."""
PARSERS: Mapping[str, Parsers] = {
    "deepseek-r1": Parsers(None, "deepseek-r1"),
    "deepseek-r1-distill": Parsers(None, "deepseek-r1"),
    "qwen-3": Parsers("qwen3", "qwen3"),
    "qwen-3-instruct": Parsers("qwen3"),
    "qwen-3-thinking": Parsers("qwen3", "deepseek-r1"),
    "qwen-3-coder": Parsers("qwen3_coder"),
}
"""Only names that all sources of the pinned version's time agree on; DeepSeek's were renamed then."""
_KNOWN_FAILURES: FailurePatterns = (
    (
        r"Executor creation failed due to insufficient GPU memory\."
        r"[\s\S]{0,200}?could not be created: (?P<what>[^\n]+)",
        KnownFailure(
            message="there is not enough GPU memory for: {what}",
            hint="specify a shorter --context or a lower --concurrency, or use a smaller quantization or more GPUs",
        ),
    ),
    (
        r"Executor creation failed due to insufficient GPU memory",
        KnownFailure(
            message="there is not enough GPU memory for the model's KV cache",
            hint="specify a shorter --context or a lower --concurrency, or use a smaller quantization or more GPUs",
        ),
    ),
    (
        r"Unknown architecture for AutoModelForCausalLM: (?P<what>\S+)",
        KnownFailure(
            message="this version of TensorRT-LLM does not support the architecture {what}",
            hint="choose another engine with --engine",
        ),
    ),
    (
        r"(?i)unsupported quant[_ ]mode: (?P<what>[^\n]{1,80})",
        KnownFailure(
            message="TensorRT-LLM has no kernels for this quantization on this GPU ({what})",
            hint="use another quantization of the same model",
        ),
    ),
    (
        r"No GPU devices found on the node",
        KnownFailure(message="TensorRT-LLM found no NVIDIA GPU", hint="in a container, start it with --gpus all"),
    ),
    (
        r"Failed to bind socket to \S+:\d+",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
)


_MATRIX = "docs/source/features/quantization.md (2026), for 1.2.1: Hardware Support Matrix"
QUANTIZATIONS = (
    # Scales of blocks: only Hopper and data-centre Blackwell (sm_100, sm_103).
    *make_rows(_MATRIX, "cuda", ["fp8", "modelopt"], least=_ADA),
    *make_rows(_MATRIX, "cuda", ["fp8 in blocks"], least=_HOPPER, below=(12, 0)),
    *make_rows(_MATRIX, "cuda", ["nvfp4", "mixed"], least=_BLACKWELL),
    # The matrix lists only Blackwell; the guide has Triton kernels for Hopper.
    *make_rows("docs/source/deployment-guide/deployment-guide-for-gpt-oss-on-trtllm.md (2026): MoE backends",
               "cuda", ["mxfp4"], least=_HOPPER),
    *make_rows(_MATRIX, "cuda", ["awq", "gptq"], least=_AMPERE, below=_BLACKWELL),
)  # fmt: skip
EIGHT_BIT_CACHE = EightBitCache(
    rows=(
        SupportedQuantization(method="fp8", part="cache", device="cuda", least=(8, 0),
                              source="docs/source/features/quantization.md (2026), for 1.2.1: FP8 KV Cache"),
    ),
)  # fmt: skip
PACKED_BITS = {"awq": frozenset([4]), "gptq": frozenset([4])}


def check_method(launch: PlannedLaunch) -> str | None:
    """The quantization has kernels for this compute capability."""
    _, method = identify_quantization(launch.loaded)
    if method == "16-bit" or launch.capability is None or _runs(method, launch.capability, launch.loaded):
        return None
    capability = ".".join(map(str, launch.capability))
    return f"{launch.loaded.quantization} weights have no kernels for compute capability {capability}"


def check_packing(launch: PlannedLaunch) -> str | None:
    """AWQ and GPTQ checkpoints have four bits."""
    return explain_packing(launch, identify_quantization(launch.loaded)[1], PACKED_BITS)


def check_attention(launch: PlannedLaunch) -> str | None:
    """Attention data parallelism has no size: every tensor rank is an attention replica, or none is."""
    layout = launch.plan.parallelism
    if layout.attention_data in (1, layout.tensor):
        return None
    return f"enable_attention_dp makes {layout.tensor} attention replicas, not {layout.attention_data}"


LAUNCH_RULES = (
    LaunchRule(
        "tensorrt-llm.attention",
        "docs/source/features/parallel-strategy.md (2026), for 1.2.1: enable_attention_dp",
        check_attention,
    ),
    LaunchRule(
        "tensorrt-llm.packing",
        "docs/source/features/quantization.md (2026), for 1.2.1: W4A16 AWQ and W4A16 GPTQ",
        check_packing,
        "the same model in another quantization",
    ),
    LaunchRule(
        "tensorrt-llm.quantization",
        "docs/source/features/quantization.md (2026), for 1.2.1: Hardware Support Matrix",
        check_method,
    ),
)


class TensorRtLlm(Engine):
    id = "tensorrt-llm"
    name = "TensorRT-LLM"
    spellings = ("trtllm", "trtllmserve", "tensorrt", "nvidiatensorrtllm", "tensorrtllmbackend")
    version = "1.2.1"
    formats = ("safetensors",)
    vendors = ("nvidia",)
    # docs/source/supported-hardware.md: Ampere (A100), Ada Lovelace, Hopper, Blackwell.
    capability = _AMPERE
    ways = ("tensor", "pipeline", "data", "expert", "attention_data")
    paged = True
    built_for = ("cuda",)
    effort = 5
    features = Features(
        batching="in flight, chunked prefill, overlapped scheduling",
        kv_cache="paged, prefix cache by blocks, host memory tier; FP8",
        quantization="FP8, NVFP4, MXFP4, AWQ, GPTQ as stored; converted by ModelOpt, never while loading",
        hardware="NVIDIA only: Ampere, Ada, Hopper, Blackwell",
        structured_output="JSON schema, grammars (xgrammar), if enabled",
        multi_node="yes, with MPI",
        server="its own (trtllm-serve); loads Hugging Face checkpoints, no engine build since 1.0",
        maintained="active",
        source="TensorRT-LLM 1.2 release notes; trtllm-serve's source of January 2026 and its reference of spring 2026",
    )
    # `tool_choice` does not constrain the answer. Structured output needs a backend, which is set if it is planned.
    server_features = ServerFeatures(
        tools="auto", json_schema=True, json_object=True, logprobs=True, choices="any", vision=True,
        source="TensorRT-LLM 1.x: serve/openai_server.py, openai_protocol.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=3_000_000_000,
        prefill_tokens=8192,
        share=0.90,
        spread=0.5,
        source="TensorRT-LLM: free_gpu_memory_fraction and max_num_tokens defaults",
    )
    launch_rules = LAUNCH_RULES
    launch_options = LaunchOptions(
        context="--max_seq_len", share="--kv_cache_free_gpu_memory_fraction", cards=("--tp_size", "--pp_size")
    )
    loading = LoadingTraits(share_covers="cache", source="kv_cache_free_gpu_memory_fraction of its serve command")
    adapters = AdapterTraits(
        most_resident=MOST_RESIDENT_ADAPTERS,
        use="requests have a lora_request with the name and path of one",
        source="docs/source/features/lora.md and tensorrt_llm/lora_helper.py of 2026: LoraConfig, also with quantized "
        "models",
    )
    default_slots = 256
    private_port = PrivatePort(
        key_checked_by="wrapper",
        other_ports="with several GPUs MPI's and NCCL's ports, without a key; not checked",
        source="trtllm-serve's reference of spring 2026 has no option for a key; serve/openai_server.py runs uvicorn",
    )
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "very high volume on NVIDIA, a model that rarely changes"
    table_names = TableNames(words=("tensorrt", "trtllm", "trt-llm", "trt"), rank=1)
    estimate = EstimateTraits(kernels="serving", reserves_answer=True, balances_groups=True)
    flags = AdviceFlags(
        slots="--max_batch_size",
        cache_memory="--kv_cache_free_gpu_memory_fraction",
        batch_tokens="--max_num_tokens",
    )
    noted = NotedOptions(slots="--max_batch_size", context="--max_seq_len", tensor="--tp_size")
    requests = RequestTraits(
        fields=frozenset(["best_of", "min_tokens", "ignore_eos"]),
        apis=frozenset(["responses"]),  # "Responses API" in the documentation of trtllm-serve
    )
    metric_names = MetricNames(path="/prometheus/metrics", kv_use="trtllm_kv_cache_utilization", picker="trtllm-serve")
    container = ContainerTraits(start_s=240.0, joins_values=True)
    dynamo = DynamoWorker(
        module="dynamo.trtllm",
        framework="trtllm",
        image="nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime",
        version="1.3.0rc29",
        names_served=True,
        tool_parser="--tool_parser",
        reasoning_parser="--reasoning_parser",
        renames={
            "--max_seq_len": "--max-seq-len", "--max_batch_size": "--max-batch-size",
            "--max_num_tokens": "--max-num-tokens", "--tp_size": "--tensor-parallel-size",
            "--kv_cache_free_gpu_memory_fraction": "--free-gpu-memory-fraction",
            "--pp_size": "--pipeline-parallel-size", "--ep_size": "--expert-parallel-size",
            "--extra_llm_api_options": "--extra-engine-args",
        },
    )  # fmt: skip
    cloned = OPTIMIZER
    node_starter = "MPI"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_architecture(self, model, ARCHITECTURES)
            or refuse_stored(self, hardware, model, workload)
        )

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = identify_quantization(model)
        capability = target.capability or _HOPPER
        if method != "16-bit":
            as_it_is = Weights(label=model.quantization or label, made="as it is", format="safetensors")
            return (as_it_is,) if _runs(method, capability, model) else ()
        found = [choose_plain_weights(label, target)]
        labels = ["FP8"] if capability >= _ADA else []
        if not workload.precision_sensitive:
            labels += ["NVFP4"] if capability >= _BLACKWELL else ["AWQ-INT4"]
        return (*found, *(Weights(label=one, made="converted", format="safetensors") for one in labels))

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = set_default_context(super().settle(hardware, model, workload), model, workload)
        settings = replace_fields(settings, batch_tokens=8192)
        target = self.find_target(hardware)
        if target is None or target.capability is None or identify_quantization(model)[1] != "mxfp4":
            return settings
        # The kernels for its experts depend on the generation.
        return replace_fields(settings, compute_capability=".".join(map(str, target.capability)))

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        # Without a parser for the model's format, calls stay in the text.
        return super().find_tool_support(plan) if find_parsers(plan.model, PARSERS).tools else "none"

    def describe_capabilities(self, plan: Plan) -> Capabilities | None:
        found = super().describe_capabilities(plan)
        if found is None or plan.workload.structured_output:
            return found
        return replace_fields(found, json_schema=False, json_object=False)

    def starts_replicas(self, model: Model) -> bool:
        # trtllm-serve has no option for replicas.
        return False

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        # enable_attention_dp has no size: every rank is an attention replica.
        return layout.attention_data in (1, layout.tensor)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, layout = plan.settings, plan.parallelism
        path = get_converted_path(plan) if plan.weights.made == "converted" else plan.model_path
        # It has no option for the served model name, and accepts any name.
        argv = ["trtllm-serve", "serve", path, "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--max_seq_len", str(settings.context_tokens)]
        argv += ["--max_batch_size", str(-(-settings.slots // layout.attention_data))]
        argv += join_options([("--max_num_tokens", settings.batch_tokens)])
        argv += join_options([("--kv_cache_free_gpu_memory_fraction", settings.memory_share)])
        for name, size in (("--tp_size", layout.tensor), ("--pp_size", layout.pipeline), ("--ep_size", layout.expert)):
            argv += [name, str(size)] if size > 1 else []
        parsers = find_parsers(plan.model, PARSERS)
        argv += join_options([("--reasoning_parser", parsers.reasoning), ("--tool_parser", parsers.tools)])
        argv += ["--extra_llm_api_options", OPTIONS_FILE]
        return Launch(argv=tuple(argv), env=get_hub_variables(plan), prepare=self._prepare(plan))

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch:
        """One command for all nodes, run by Slurm on the first; MPI starts every rank."""
        launch = self.launch(plan, port)
        ranks = plan.parallelism.tensor * plan.parallelism.pipeline
        srun = ["srun", "--nodes", str(nodes), "--ntasks", str(ranks), "--ntasks-per-node", str(-(-ranks // nodes))]
        return replace_fields(launch, argv=(*srun, "--mpi=pmix", "trtllm-llmapi-launch", *launch.argv))

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        return ContainerImage(name=IMAGE, python=True) if device == "cuda" else None

    def list_container_files(self, plan: Plan) -> dict[str, str]:
        # Without it there are no Prometheus metrics.
        return {OPTIONS_FILE: f"{write_options(plan)}return_perf_metrics: true\n"}

    def plan_container_conversion(self, plan: Plan, source: str, made: str) -> ContainerConversion | None:
        words = [f"{made}.part" if word == get_converted_path(plan) else word for word in _plan_conversion(plan).argv]
        cloned = f"git clone --depth 1 --branch {OPTIMIZER.tag} {OPTIMIZER.repository} /cache/modelopt"
        begin = f"rm -rf /cache/modelopt && {cloned} && cd /cache/modelopt/{OPTIMIZER.path}"
        return ContainerConversion(command=f"{begin} && {join_posix_shell(['python3', *words[1:]])}")

    def get_dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        disaggregation = ("--disaggregation-mode", role) if role != "worker" else ()
        return (*disaggregation, *(("--publish-kv-events",) if role != "decode" else ()))

    def list_dynamo_files(self, plan: Plan, role: str) -> dict[str, str]:
        """Options by role: a prefill worker cannot overlap steps, and prefill and decode workers transfer KV cache."""
        lines = [self.list_container_files(plan)[OPTIONS_FILE].rstrip("\n"), "backend: pytorch"]
        if role != "worker":
            lines += [f"disable_overlap_scheduler: {'true' if role == 'prefill' else 'false'}"]
            lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
        return {OPTIONS_FILE: "\n".join(lines) + "\n"}

    def read_progress(self, line: str) -> float | None:
        return parse_shard_progress(line)

    def explain(self, log: str) -> KnownFailure | None:
        return explain_log(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE)

    def read_metrics(self, metrics: str) -> EngineState:
        """From its `/metrics`, a JSON list of the iterations since the previous request."""
        try:
            newest = json.loads(metrics)[-1]
            cache = newest.get("kvCacheStats") or {}
            used, most = cache.get("usedNumBlocks"), cache.get("maxNumBlocks")
            hits, misses = _to_float(cache.get("reusedBlocks")), _to_float(cache.get("missedBlocks"))
            return EngineState(
                running=_to_float(newest.get("numActiveRequests")),
                waiting=_to_float(newest.get("numQueuedRequests")),
                kv_use=used / most if used is not None and most else None,
                cache_hits=hits,
                cache_queries=hits + misses if hits is not None and misses is not None else None,
                computed=_to_float(newest.get("iter")),
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            return EngineState()

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        steps = [
            Preparation(
                kind="install",
                what=f"{PACKAGE}, on a system with {SYSTEM}; or in the container {IMAGE}",
                where=OWN_ENVIRONMENT,
                argv=("uv", "pip", "install", "--torch-backend", "cu130", "--extra-index-url", INDEX, PACKAGE),
            )
        ]
        if plan.weights.made == "converted":
            steps += plan_download(plan)
            steps.append(_plan_conversion(plan))
        text = write_options(plan)
        steps.append(
            Preparation(
                kind="build", what=f"options file: {', '.join(text.splitlines())}", where=OPTIONS_FILE,
                disk_bytes=len(text), argv=("sh", "-c", f"printf '%s' {quote_posix_shell(text)} > {OPTIONS_FILE}"),
            )
        )  # fmt: skip
        return tuple(steps)


def write_options(plan: Plan) -> str:
    """The YAML file with settings that have no command-line option."""
    # Without chunked prefill, prompts longer than a batch are rejected; without statistics, its metrics are empty.
    lines = ["enable_chunked_prefill: true", "enable_iter_perf_stats: true"]
    if plan.weights.made == "while loading":
        lines.append("dtype: bfloat16")
    if plan.parallelism.attention_data > 1:
        lines.append("enable_attention_dp: true")
    if plan.settings.kv_type == "fp8":
        lines += ["kv_cache_config:", "  dtype: fp8"]
    if (backend := _choose_expert_backend(plan)) is not None:
        lines += ["moe_config:", f"  backend: {backend}"]
    if plan.workload.structured_output:
        lines.append("guided_decoding_backend: xgrammar")
    if count := len(plan.workload.adapters):
        # An adapter of experts would need the names of the experts' layers, which differ by model.
        targets = ATTENTION_TARGETS if plan.model.num_experts else (*ATTENTION_TARGETS, *MLP_TARGETS)
        lines += ["lora_config:", f"  lora_target_modules: [{', '.join(targets)}]"]
        lines += [f"  max_lora_rank: {ENGINE.choose_adapter_rank(plan.workload)}"]
        lines += [f"  max_loras: {ENGINE.count_resident_adapters(plan.workload)}", f"  max_cpu_loras: {count}"]
    return "\n".join([*lines, ""])


def _choose_expert_backend(plan: Plan) -> str | None:
    """The kernels for MXFP4 experts, which the gpt-oss guide names for each generation; `None`: its default."""
    capability = plan.settings.compute_capability
    if capability is None or identify_quantization(plan.model)[1] != "mxfp4":
        return None
    return {9: "TRITON", 10: "TRTLLM"}.get(int(capability.partition(".")[0]))


def _runs(method: str, capability: tuple[int, int], model: Model) -> bool:
    details = model.quantization_details
    blocks = method == "fp8" and details is not None and details.block is not None
    if method in PACKED_BITS and details is not None and details.bits not in PACKED_BITS[method]:
        return False
    target = ComputeTarget(device="cuda", count=1, capability=capability)
    return ENGINE.find_quantization("fp8 in blocks" if blocks else method, target) is not None


def _plan_conversion(plan: Plan) -> Preparation:
    seconds = make_estimate(
        600 + 60 * plan.model.parameters / 1e9, 0.7, "not measured: calibration on the serving GPUs"
    )
    argv = ("python", OPTIMIZER.program, "--pyt_ckpt_path", get_source_folder(plan), "--qformat")
    return Preparation(
        kind="convert",
        what=f"{plan.model.name} to {plan.weights.label}, with examples/llm_ptq of NVIDIA's Model Optimizer",
        where=get_converted_path(plan),
        disk_bytes=round(plan.model.parameters * (1.1 if plan.weights.label == "FP8" else 0.65)),
        seconds=seconds,
        argv=(*argv, CONVERSIONS[plan.weights.label], "--export_path", get_converted_path(plan)),
    )


def _to_float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


ENGINE = TensorRtLlm()
