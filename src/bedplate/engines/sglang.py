"""SGLang: shared prefixes, long context and mixture-of-experts models at scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from bedplate.engines.base import (
    OWN_ENVIRONMENT,
    ComputeTarget,
    Engine,
    EngineState,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    OverlayRecipe,
    find_cards,
    get_converted_path,
    plan_download,
)
from bedplate.engines.checks import (
    LaunchRule,
    PlannedLaunch,
    explain_expert_kernels,
    explain_old_method,
    explain_packing,
    format_capability,
    lacks_expert_kernels,
)
from bedplate.engines.knobs import (
    apply_tuned_options,
    keep_tunable,
    make_field_choices,
    make_slots_knob,
    make_variable_choices,
    uses_engine_defaults,
)
from bedplate.engines.mistakes import BAD_TOKENS, TOO_LONG
from bedplate.engines.parsers import Parsers, find_parsers
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shared import (
    CONTEXT_BYTES,
    DATA_NOT_FOR_SERVING,
    HUB,
    NOT_FOR_TEXT,
    PORT_IN_USE,
    TORCH,
    TORCH_2_11_CUDA_13,
    FailurePatterns,
    choose_plain_weights,
    explain_log,
    find_highest_sample,
    get_dynamo_event_options,
    get_dynamo_pooling_options,
    get_hub_variables,
    identify_quantization,
    join_options,
    list_named_adapters,
    parse_shard_progress,
    plan_compression,
    refuse_gfx,
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
    TokenCounter,
)
from bedplate.engines.transformers_models import ARCHITECTURES_5_19, REMOTE_CODE_HINT, OwnModels
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
    replace_fields,
)
from bedplate.values.capabilities import ToolSupport
from bedplate.values.decision import Device
from bedplate.values.tuning import SettingChoice, TunableSetting

# From the source of 0.5.23 (its wheel), unless another version is named.
VERSION = "0.5.23"
DIST_PORT = 25000
MOST_RESIDENT_ADAPTERS = 32
"""Every adapter of a batch takes the memory of one of the highest rank, whether or not it is used."""
ALONE_SHARE = 0.9
"""Of a GPU's memory: with more free, SGLang has it to itself."""
CHUNKS, SHARES = (512, 1024, 2048, 4096, 8192, 16384), (0.8, 0.85, 0.9)
# python/sglang/kernels/aot/setup_rocm.py of v0.5.18.
GFX = ("gfx942", "gfx950", "gfx1250")
SUPPORTED_METHODS = frozenset([
    "fp8", "modelopt", "nvfp4", "mixed", "mxfp4", "mxfp8", "compressed-tensors", "awq", "gptq", "auto-round",
    "bitsandbytes", "torchao", "quark", "mxfp4 experts, fp8",
])  # fmt: skip
ROCM_METHODS = SUPPORTED_METHODS - {"modelopt", "nvfp4", "mixed", "bitsandbytes", "mxfp8"}
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
PARSERS_BY_VERSION: Mapping[str, Mapping[str, Parsers]] = {
    # srt/function_call/function_call_parser.py and srt/parser/reasoning_parser.py of 0.5.15.
    "0.5.15": {name: one for name, one in PARSERS.items() if name not in ("kimi-k3", "minimax-m3")},
}
X86 = ("x86_64", "amd64", "AMD64")
CPU_SLOTS = 8
CPU_BATCH_TOKENS = 2048
# Tested on a CPU without its kernels: dense, with layers that SGLang also implements in plain PyTorch.
CPU_ARCHITECTURES = frozenset(["llama"])
# The requirements of its wheel without those for GPUs, images and other services; PyTorch is older than its pin.
CPU_RECIPE = EnvironmentRecipe(
    packages=(
        "torch==2.13.0", "triton==3.9.0", "transformers==5.19.0", "xgrammar==0.2.7", "compressed-tensors==0.18.0",
        "openai==2.8.0", "openai-harmony==0.0.4", "sentencepiece==0.2.1", "soundfile==0.13.1", "llguidance>=1.7.6,<2",
        "gguf==0.19.0", "aiohttp", "dill", "einops", "fastapi", "interegular", "ipython", "jsonschema",
        "msgspec", "numpy", "orjson", "packaging", "partial-json-parser", "pillow", "prometheus-client>=0.20", "psutil",
        "pybase64", "pydantic", "python-multipart", "pyzmq>=25.1.2", "regex", "requests", "scipy", "setproctitle",
        "tiktoken", "tqdm", "uvicorn>=0.51", "uvloop", "watchfiles", "xxhash", "zstandard",
    ),
    bare=("sglang==0.5.23",),
    programs=(("sglang-server", "sglang_server.py"),),
    download_bytes=660_000_000,
    disk_bytes=2_450_000_000,
    check="import sglang, torch, triton, orjson, zmq; assert torch.ones(3).sum() == 3",
)  # fmt: skip
_KNOWN_FAILURES: FailurePatterns = (
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        KnownFailure(
            message="weights and activations leave no memory for the KV cache",
            hint="use a smaller quantization, more GPUs, or a GPU without other programs",
        ),
    ),
    (
        r"Model architectures \[?'?(?P<what>[\w.-]+)'?\]? are not supported for now"
        r"|The checkpoint you are trying to load has model type `(?P<type>[^`]+)`",
        KnownFailure(
            message="this version of SGLang does not support the architecture {what}{type}",
            hint="a newer version may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"User-specified context_length \((?P<length>\d+)\) is greater than the derived context_length",
        KnownFailure(
            message="the model does not support a context of {length} tokens",
            hint="specify a shorter --context",
        ),
    ),
)

_SCHEDULER_FAILURE: FailurePatterns = (
    (
        # SGLang then kills all of its processes, which looks like a system without memory.
        r"Scheduler hit an exception: Traceback(?:.*\n)+?(?P<why>\w*(?:Error|Exception)\b.*)",
        KnownFailure(message="its scheduler failed: {why}", hint="see the engine's log"),
    ),
)

OVERLAY_0_5_15 = OverlayRecipe(
    version="0.5.15",
    packages=("sglang==0.5.15",),
    as_of="2026-11-17T11:00:00Z",
    additional=("gguf==0.19.0",),
    torch="2.11.0",
    cuda="13",
    provided=TORCH_2_11_CUDA_13,
    unused=NOT_FOR_TEXT,
    unused_files=(*DATA_NOT_FOR_SERVING, "xgrammar/lib/libxgrammar.a"),
    # sgl_kernel/load_utils.py selects the folder by GPU: sm90 for Hopper, sm100 for others.
    other_kernels=(("9", ("sgl_kernel/sm100",)), ("10", ("sgl_kernel/sm90",)), ("12", ("sgl_kernel/sm90",))),
    # With FlashInfer, sampling and some FP8 kernels are compiled at the first start; attention is FA3 on Hopper anyway
    # (server_args.py, srt/arg_groups/overrides.py: _sampling_backend_default).
    environment=(("SGLANG_IS_FLASHINFER_AVAILABLE", "false"),),
    check="import sglang, torch, sgl_kernel.flash_attn; assert torch.cuda.is_available()",
    source="SGLang 0.5.15: requirements of its wheel; served on one H200 with PyTorch 2.11.0+cu130 and Triton "
    "attention, November 2026",
)

CUDA_LEAST: Mapping[str, tuple[int, int]] = {"modelopt": (8, 9), "mxfp8": (10, 0)}
"""Methods that need more than the kernels of the wheel (get_min_capability in srt/layers/quantization of 0.5.23)."""
_METHODS = "srt/layers/quantization of 0.5.23"
QUANTIZATIONS = (
    *make_rows(f"{_METHODS}: BASE_QUANTIZATION_METHODS", "cuda", SUPPORTED_METHODS - CUDA_LEAST.keys()),
    *(row for method, least in CUDA_LEAST.items()
      for row in make_rows(f"{_METHODS}: get_min_capability", "cuda", [method], least=least)),
    # Without FP8 units, Marlin kernels dequantize it.
    *make_rows(f"{_METHODS}: fp8.py, use_marlin", "cuda", ["FP8 while loading"], least=(8, 0)),
    *make_rows(f"{_METHODS}: BASE_QUANTIZATION_METHODS", "rocm", ROCM_METHODS),
    *make_rows(f"{_METHODS}: fp8.py", "rocm", ["FP8 while loading"], units="fp8"),
)  # fmt: skip
# The backends for a latent cache that it chooses by default, FlashAttention 3 and Triton, have no FP8.
_FP8_CACHE = "srt/mem_cache/kv_cache_dtype.py of 0.5.23; docs/advanced_features/attention_backend.mdx of cce0a12"
EIGHT_BIT_CACHE = EightBitCache(
    rows=(
        SupportedQuantization(method="fp8_e4m3", part="cache", device="cuda", least=(8, 9),
                              source=f"{_FP8_CACHE} (August 2026): FP8 KV Cache; Triton has E4M3 from 8.9 on"),
        SupportedQuantization(method="fp8_e4m3", part="cache", device="rocm", units="fp8",
                              source=f"{_FP8_CACHE} (August 2026): AITER"),
    ),
)  # fmt: skip
SPARSE_ATTENTION = frozenset(["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
SPARSE_LEAST = (9, 0)
"""The indexer of sparse attention is in DeepGEMM, and its prefill in FlashAttention 3 or FlashMLA: none has kernels for
older GPUs (issue 35420 of August 2026; docs/cookbook/autoregressive/DeepSeek/DeepSeek-V4.mdx: from the H100 on)."""
NO_ARCHITECTURES = frozenset(["jamba", "falcon", "internlm", "minimax_text_01", "minimax_m1", "mpnet"])
"""Without a class in srt/models of 0.5.23, and not among those that its Transformers backend implements."""
_OWN_CONFIGS = """
NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 bailing_hybrid bailing_moe_v3_vl bailingmm_moe_v2_lite beam
chatglm deepseek-ocr deepseek_vl_v2 dots3_note dots_ocr dots_vlm exaone gigachat3_5 inkling_model intern_s2_preview
interns2_mobius interns2_mobius_text internvl_chat iquest_q1 iquest_q1_mtp jet_nemotron jet_vlm k2_horizon kimi_k2
kimi_k3 kimi_vl locateanything minicpm_sala multi_modality nanbeige nemotron_h_puzzle spark2_5 step3_vl step3p5 xllm
"""
OWN_MODELS = OwnModels(VERSION, ARCHITECTURES_5_19 | frozenset(_OWN_CONFIGS.split()))
"""Configurations of Transformers 5.19.0 and of srt/utils/hf_transformers/common.py of 0.5.23: _CONFIG_REGISTRY."""


def check_method(launch: PlannedLaunch) -> str | None:
    """The quantization method has kernels for this GPU."""
    _, method = identify_quantization(launch.loaded)
    if method == "16-bit" or launch.device == "cpu" or launch.is_quantized_while_loading:
        return None
    if method not in (SUPPORTED_METHODS if launch.device == "cuda" else ROCM_METHODS):
        return f"{launch.loaded.quantization} weights are not a method that it supports on {launch.device}"
    return explain_old_method(launch, method, CUDA_LEAST.get(method) if launch.device == "cuda" else None)


def check_expert_kernels(launch: PlannedLaunch) -> str | None:
    """FP8 experts need compute capability 8.9: they are computed by Triton, not by Marlin kernels as dense layers."""
    return explain_expert_kernels(launch)


PACKED_BITS: Mapping[str, frozenset[int]] = {"awq": frozenset([4]), "gptq": frozenset([2, 3, 4, 8])}


def check_packing(launch: PlannedLaunch) -> str | None:
    """AWQ and GPTQ checkpoints have a number of bits that has kernels."""
    return explain_packing(launch, identify_quantization(launch.loaded)[1], PACKED_BITS)


def check_architecture(launch: PlannedLaunch) -> str | None:
    """This version has the model's architecture."""
    architecture = launch.model.architecture
    return f"SGLang does not have the architecture {architecture}" if architecture in NO_ARCHITECTURES else None


def check_configuration(launch: PlannedLaunch) -> str | None:
    """This version or its Transformers has the model's configuration, without code of the model's repository."""
    return OWN_MODELS.explain(launch.model, launch.plan.engine_version, "SGLang")


def check_sparse_attention(launch: PlannedLaunch) -> str | None:
    """DeepSeek's sparse attention has kernels from compute capability 9.0 on."""
    if launch.device != "cuda" or launch.model.architecture not in SPARSE_ATTENTION or launch.capability is None:
        return None
    if launch.capability >= SPARSE_LEAST:
        return None
    return f"sparse attention has no kernels for compute capability {format_capability(launch)}"


def check_cache_type(launch: PlannedLaunch) -> str | None:
    """An FP8 cache needs compute capability 8.9, and no latent attention."""
    if not launch.options.get("--kv-cache-dtype", "auto").startswith("fp8"):
        return None
    if launch.model.kv_lora_rank is not None:
        return "its backends for a latent cache have no FP8"
    if launch.device != "cuda" or launch.capability is None or launch.capability >= (8, 9):
        return None
    return f"an FP8 KV cache needs compute capability 8.9; this one is {format_capability(launch)}"


def check_online_fp8(launch: PlannedLaunch) -> str | None:
    """FP8 while loading needs FP8 units, or a dense model that Marlin kernels dequantize."""
    if launch.options.get("--quantization") != "fp8" or launch.device == "cpu":
        return None
    if launch.chip is not None and "fp8" in launch.chip.features:
        return None
    if launch.device == "cuda" and not launch.model.num_experts:
        return None
    return "FP8 while loading needs FP8 units for the experts of a model"


def check_replicas(launch: PlannedLaunch) -> str | None:
    """One command starts replicas on one host only, and not together with attention data parallelism."""
    if launch.get_count("--dp-size") == 1 or "--enable-dp-attention" in launch.options:
        return None
    if launch.get_count("--attn-dp-size") > 1:
        return "--dp-size is not combined with --attn-dp-size"
    nodes = launch.get_count("--nnodes")
    return f"--dp-size is not combined with --nnodes {nodes}" if nodes > 1 else None


def check_groups(launch: PlannedLaunch) -> str | None:
    """Attention replicas, expert ranks and hosts divide the tensor ranks."""
    tensor, stages = launch.get_count("--tp-size"), launch.get_count("--pp-size")
    for name in ("--attn-dp-size", "--ep-size"):
        if tensor % launch.get_count(name):
            return f"--tp-size {tensor} is not a multiple of {name} {launch.get_count(name)}"
    if tensor * stages % launch.hosts:
        return f"--tp-size {tensor} times --pp-size {stages} is not a multiple of {launch.hosts} hosts"
    return None


def check_name(launch: PlannedLaunch) -> str | None:
    """The served name has no colon, which separates the name of an adapter."""
    name = launch.options.get("--served-model-name", "")
    return f"the served name {name!r} contains a colon" if ":" in name else None


def check_adapters(launch: PlannedLaunch) -> str | None:
    """LoRA adapters are not combined with attention data parallelism, nor with quantized experts."""
    if "--enable-lora" not in launch.options:
        return None
    if launch.get_count("--attn-dp-size") > 1 or "--enable-dp-attention" in launch.options:
        return "LoRA adapters with attention data parallelism must all be pinned"
    if launch.model.num_experts and not _can_adapt_experts(launch.loaded):
        return f"LoRA adapters of experts in {launch.loaded.quantization} depend on kernels that it may not choose"
    slots, kept = launch.get_count("--max-loras-per-batch", 8), launch.get_count("--max-loaded-loras", 0)
    return f"--max-loaded-loras {kept} is less than --max-loras-per-batch {slots}" if 0 < kept < slots else None


LAUNCH_RULES = (
    LaunchRule("sglang.quantization", "srt/model_loader/loader.py of 0.5.23: get_min_capability", check_method,
               "the same model in another quantization"),
    LaunchRule("sglang.fp8-experts", "srt/layers/quantization/fp8.py of 0.5.23: Fp8MoEMethod.create_moe_runner; "
               "sgl-project/sglang/issues/38291", check_expert_kernels, "weights in 4 bits, or vLLM"),
    LaunchRule("sglang.packing", "srt/layers/quantization/awq/awq.py and gptq/gptq.py of cce0a12 (August 2026): "
               "weight_bits", check_packing, "the same model in another quantization"),
    LaunchRule("sglang.architecture", "srt/models/registry.py of 0.5.23", check_architecture, "another engine"),
    LaunchRule("sglang.configuration", "srt/utils/hf_transformers/common.py of 0.5.23: _CONFIG_REGISTRY; models/auto "
               "of Transformers 5.19.0", check_configuration, REMOTE_CODE_HINT),
    LaunchRule("sglang.sparse-attention", "srt/layers/attention/dsa/dsa_indexer.py, dsa_backend.py of cce0a12 (August "
               "2026); sgl-project/sglang/issues/35420", check_sparse_attention, "an H100 or a newer data-centre GPU"),
    LaunchRule("sglang.fp8", "srt/layers/quantization/fp8.py of 0.5.23: use_marlin", check_online_fp8,
               "weights that are published in FP8"),
    LaunchRule("sglang.cache-type", _FP8_CACHE, check_cache_type, "a 16-bit KV cache"),
    LaunchRule("sglang.replicas", "srt/arg_groups/validation_hook.py of 0.5.23: dp_size and nnodes; "
               "parallel_hook.py: handle_data_parallelism", check_replicas, "attention data parallelism"),
    LaunchRule("sglang.groups", "srt/arg_groups/parallel_hook.py of 0.5.23: attn_dp_size, ep_size; "
               "validation_hook.py: nnodes", check_groups),
    LaunchRule("sglang.adapters", "srt/arg_groups/lora_hook.py of 0.5.23: check_lora_server_args; "
               "srt/lora/lora_manager.py: attn_dp_enabled; srt/lora/layers.py: FusedMoEWithLoRA", check_adapters,
               "tensor or data parallelism, and experts in 16 bits"),
    LaunchRule("sglang.name", "srt/arg_groups/validation_hook.py of 0.5.23: served_model_name", check_name),
)  # fmt: skip
RULE_SOURCES = {
    "plan.device": "python/sglang/kernels/aot/CMakeLists.txt of v0.5.18",
    "weights.kernels": f"{_METHODS}: BASE_QUANTIZATION_METHODS, get_min_capability",
    "cache.type": _FP8_CACHE,
    "context.length": "srt/configs/model_config.py of 0.5.23: _derive_context_length",
    "layout.kinds": "srt/server_args.py of 0.5.23",
    "layout.cards": "srt/server_args.py of 0.5.23: tp_size, pp_size, dp_size",
    "layout.hosts": "srt/arg_groups/validation_hook.py of 0.5.23: nnodes",
    "layout.heads": "srt/layers/linear.py of 0.5.23: QKVParallelLinear",
    "layout.width": "srt/layers/quantization/fp8.py of 0.5.23: validate_block_quant_shapes",
    "layout.experts": "srt/model_executor/model_runner_components/moe_ep_setup.py of 0.5.23",
    "adapters.loaded": "srt/arg_groups/fields/lora.py of 0.5.23: lora_paths, max_loras_per_batch, max_lora_rank",
    "memory.load": "srt/model_loader/loader.py of 0.5.23: load_weights_and_postprocess; "
    "srt/layers/quantization/fp8.py: weights are created in the model's type",
    "memory.capture": "srt/model_executor/pool_configurator.py of 0.5.23: mem_fraction_static",
    "memory.convert": "llmcompressor 0.14.0.1: entrypoints/utils.py, initialize_model_from_path",
}


class Sglang(Engine):
    id = "sglang"
    name = "SGLang"
    spellings = ("sgl", "sglangruntime")
    version = VERSION
    # srt/server_args.py of its wheel: of the options used here, parsers and attention data parallelism differ.
    checked_versions = ("0.5.15",)
    formats = ("safetensors",)
    vendors = ("nvidia", "amd")
    unplanned: ClassVar[Mapping[str, str]] = {
        "huawei": "SGLang with its Ascend backend",
        "google": "sgl-project/sglang-jax",
    }
    cpu = True
    # Its wheels contain kernels from sm_80 on: python/sglang/kernels/aot/CMakeLists.txt of v0.5.18.
    capability = (8, 0)
    tasks = ("generate", "embed")
    ways = ("tensor", "pipeline", "data", "expert", "attention_data")
    paged = True
    # For GPUs it is planned but not installed; the CPU does not replace a GPU.
    built_for = ("cpu", "cuda", "rocm")
    recipe = CPU_RECIPE
    overlays = (OVERLAY_0_5_15,)
    effort = 4
    features = Features(
        batching="continuous, chunked prefill, overlapped scheduling",
        kv_cache="paged, prefix cache (RadixAttention), host memory tiers; FP8",
        quantization="FP8 while loading; FP8, NVFP4, MXFP4, AWQ, GPTQ, bitsandbytes as stored",
        hardware="NVIDIA from Ampere on, AMD Instinct from MI300 on; x86 CPUs (slow)",
        structured_output="JSON schema, regular expressions, grammars (xgrammar)",
        multi_node="yes: tensor, pipeline, expert, attention data parallel; disaggregated prefill",
        server="its own",
        maintained="active",
        source="SGLang 0.5.23 (2026-10-30): srt/arg_groups/fields, srt/function_call; kernels by v0.5.18",
    )
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=True, logprobs=True, choices="any", vision=True,
        source="SGLang 0.5.23: docs/advanced_features, tool_parser and structured_outputs",
    )  # fmt: skip
    mistakes = (
        (r"longer than the model's context length \((?P<context>\d+) tokens\)", TOO_LONG),
        (r"maximum context length (?:is|of) (?P<context>[\d,]+)", TOO_LONG),
        (r"out of (?:the )?vocab", BAD_TOKENS),
    )
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=3_000_000_000,
        context_bytes=CONTEXT_BYTES,
        layer_graph_bytes=250_000,
        prefill_tokens=8192,
        share=0.88,
        spread=0.5,
        source="SGLang: mem_fraction_static and chunked_prefill_size defaults; graphs as its log reports",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(
        context="--context-length", slots="--max-running-requests", share="--mem-fraction-static",
        cards=("--tp-size", "--pp-size", "--dp-size"),
    )  # fmt: skip
    loading = LoadingTraits(
        quantizes="whole model", share_covers="weights and cache", conversion_copies=1.0,
        source="srt/model_loader/loader.py of 0.5.23: all weights are loaded in the model's type, then each layer is "
        "quantized; srt/arg_groups/memory_hook.py: mem_fraction_static; llmcompressor 0.14.0.1: entrypoints/utils.py",
    )  # fmt: skip
    adapters = AdapterTraits(
        most_resident=MOST_RESIDENT_ADAPTERS, slots="--max-loras-per-batch", rank="--max-lora-rank",
        names="--lora-paths", use="requests name one as MODEL:NAME",
        source="srt/lora/mem_pool.py of 0.5.23: get_lora_A_shape and get_lora_B_shape allocate max_loras_per_batch "
        "adapters of the highest rank; srt/arg_groups/fields/lora.py: a batch counts the model without an adapter too",
    )  # fmt: skip
    default_slots = 256
    # srt/environ.py of 0.5.15 and 0.5.23, PyTorch, Triton, and flashinfer/jit/env.py.
    # Logs of 0.5.15. Triton kernels are compiled while the first graph is captured, which the log does not show.
    start_phases = (
        (r"Load weight begin", "load"),
        (r"Load weight end|Capture .*graph end", "warm-up"),
        (r"Capture .*graph begin", "capture"),
        (r"DeepGEMM JIT .*Compil", "compile"),
    )
    compile_caches = (
        "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    )  # fmt: skip
    variable_prefixes = ("SGLANG_",)
    highest_port = 55535
    """It refuses to start where PORT + 10000, its port for gRPC, is none (sglang 0.5.15, srt/server_args.py)."""
    private_port = PrivatePort(
        # Its --api-key would be readable in the list of processes, and leaves /health_generate and /metrics open.
        key_checked_by="wrapper",
        other_ports="Unix sockets between its processes, which only the user may open; PyTorch's rendezvous port, and "
        "with attention data parallelism ZeroMQ ports on loopback, without a key",
        source="srt/utils/auth.py and PortArgs in srt/server_args.py of 0.5.23",
    )
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "shared prefixes, structured output, long context or MoE at scale"
    table_names = TableNames(words=("sglang",), rank=2)
    estimate = EstimateTraits(kernels="serving", prompts_first=True, chip_pass_tokens={"blackwell-dc": 16384.0})
    flags = AdviceFlags(
        slots="--max-running-requests",
        cache_memory="--mem-fraction-static",
        cache_type="--kv-cache-dtype fp8_e4m3",
        batch_tokens="--chunked-prefill-size",
        no_graphs="--disable-cuda-graph",
    )
    noted = NotedOptions(slots="--max-running-requests", context="--context-length", tensor="--tp-size")
    requests = RequestTraits(
        fields=frozenset(["min_tokens", "ignore_eos"]),
        limits={"stop": 64},
        counter=TokenCounter(prompts={"chat": "/tokenize"}),
        # http_server.py of 0.5.10: /v1/messages with count_tokens (pull request 18630), /v1/responses.
        apis=frozenset(["messages", "responses"]),
    )
    metric_names = MetricNames(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_use="sglang:token_usage",
        picker="sglang",
    )
    container = ContainerTraits(start_s=120.0, joins_values=True, drains=True)
    dynamo = DynamoWorker(
        module="dynamo.sglang", framework="sglang", image="nvcr.io/nvidia/ai-dynamo/sglang-runtime", version="0.5.21",
        names_model=False, tool_parser="--tool-call-parser", reasoning_parser="--reasoning-parser",
    )  # fmt: skip

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_gfx(self, hardware, GFX)
            or self._refuse_on_cpu(hardware, model, workload)
            or self._refuse_architecture(model)
            or self._refuse_sparse_attention(hardware, model)
            or refuse_stored(self, hardware, model, workload)
        )

    def _refuse_sparse_attention(self, hardware: Hardware, model: Model) -> Refusal | None:
        target = self.find_target(hardware)
        capability = target.capability if target is not None and target.device == "cuda" else None
        if model.architecture not in SPARSE_ATTENTION or capability is None or capability >= SPARSE_LEAST:
            return None
        return self.make_refusal("impossible", "has no sparse attention for this GPU", "an H100 or newer")

    def _refuse_architecture(self, model: Model) -> Refusal | None:
        if model.architecture in NO_ARCHITECTURES:
            why = f"{self.version} does not have the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "an engine that supports it")
        return OWN_MODELS.refuse(self, model)

    def refuse_adapters(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if model.num_experts and not _can_adapt_experts(model):
            why = f"its LoRA adapters of experts in {model.quantization} depend on kernels that it may not choose"
            return self.make_refusal("impossible", why, "the same model in BF16")
        return super().refuse_adapters(hardware, model, workload)

    def count_resident_adapters(self, workload: Workload) -> int:
        # A batch counts requests without an adapter as one more.
        return super().count_resident_adapters(workload) + 1 if workload.adapters else 0

    def find_target(self, hardware: Hardware) -> ComputeTarget | None:
        """The CPU only if it is x86 and there is no GPU of a supported vendor."""
        found = super().find_target(hardware)
        if found is None or found.device != "cpu":
            return found
        return found if not find_cards(hardware, self.vendors) and hardware.cpu.arch in X86 else None

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = identify_quantization(model)
        if target.device == "cpu":
            return (choose_plain_weights(label, target),) if method == "16-bit" else ()
        if method != "16-bit":
            as_it_is = Weights(label=model.quantization or label, made="as it is", format="safetensors")
            lacks = lacks_expert_kernels(model, target.device, target.capability)
            return (as_it_is,) if self.find_quantization(method, target) is not None and not lacks else ()
        found = [choose_plain_weights(label, target)]
        if workload.adapters and model.num_experts:
            return tuple(found)
        if workload.task == "generate" and ("fp8" in target.features or _dequantizes_fp8(target, model)):
            found.append(Weights(label="FP8", made="while loading", format="safetensors"))
        if workload.task == "generate" and not workload.precision_sensitive:
            if target.device == "cuda" and "fp4" in target.features:
                found.append(Weights(label="NVFP4", made="converted", format="safetensors"))
            found.append(Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        return tuple(found)

    def count_graphs(self, settings: Settings) -> int:
        """As srt/server_args.py of 0.5.15 counts: the sizes of decoding steps and, up to the context, of prompts."""
        if settings.device != "cuda":
            return 0
        steps = [1, 2, 4, 8, 12, *range(16, 257, 8)]
        prompts = [
            *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
            *range(1280, 4097, 256), *range(4608, 8193, 512),
        ]  # fmt: skip
        longest = min(settings.batch_tokens or 8192, settings.context_tokens)
        captured = [size for size in steps if size <= settings.slots]
        return len(captured) + len([size for size in prompts if size <= longest])

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = set_default_context(super().settle(hardware, model, workload), model, workload)
        if settings.device != "cpu":
            return replace_fields(
                settings, memory_share=self._choose_share_beside_others(hardware, model, settings.context_tokens)
            )
        slots = settings.slots if workload.states_load else max(workload.compute_in_flight(), CPU_SLOTS)
        threads = hardware.cpu.allowed_physical_cores
        return replace_fields(settings, slots=slots, threads=threads, batch_tokens=CPU_BATCH_TOKENS)

    def _choose_share_beside_others(self, hardware: Hardware, model: Model, prompt_tokens: int) -> float | None:
        """`--mem-fraction-static` where other processes hold much of a GPU's memory; `None` leaves it to SGLang.

        SGLang derives what it leaves to activations and CUDA graphs from the GPU's total memory, but counts the share
        from the memory that is free when it starts.
        """
        cards = [card for card in find_cards(hardware, self.vendors) if card.memory_bytes and card.free_bytes]
        smallest = min(cards, key=lambda card: card.free_bytes or 0, default=None)
        if smallest is None or (smallest.free_bytes or 0) >= ALONE_SHARE * (smallest.memory_bytes or 0):
            return None
        free = smallest.free_bytes or 0
        rest = (self.uses.device_bytes + self.compute_activation_bytes(model, prompt_tokens)) * (1 + self.uses.spread)
        return min(self.uses.share, max(0.1, math.floor(100 * (free - rest) / free) / 100))

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        return layout.tensor * layout.pipeline % hosts == 0

    def accepts_adapters(self, layout: Parallelism) -> bool:
        return layout.attention_data == 1

    def _get_adapter_options(self, plan: Plan) -> list[str]:
        work = plan.workload
        if not work.adapters:
            return []
        argv = ["--enable-lora", "--max-loras-per-batch", str(self.count_resident_adapters(work))]
        argv += ["--max-lora-rank", str(self.choose_adapter_rank(work))]
        if plan.settings.device == "cpu":
            argv += ["--lora-backend", "torch_native"]
        if work.names_adapters:
            return [*argv, "--lora-paths", *list_named_adapters(plan)]
        # Adapters without names are loaded later, with POST /load_lora_adapter.
        return [*argv, "--lora-target-modules", "all"]

    def count_launch_cards(self, launch: PlannedLaunch) -> int | None:
        # With --enable-dp-attention, --dp-size divides the tensor ranks instead of multiplying them.
        found = super().count_launch_cards(launch)
        merged = "--enable-dp-attention" in launch.options
        return found // launch.get_count("--dp-size") if found is not None and merged else found

    def find_pinned_recipe(self, device: Device) -> EnvironmentRecipe | None:
        return self.recipe if device == "cpu" else None

    def _find_parsers(self, plan: Plan) -> Parsers:
        known = PARSERS_BY_VERSION.get(self.find_options_version(plan.engine_version) or "", PARSERS)
        return find_parsers(plan.model, known)

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        # Without a parser for the model's format, calls stay in the text.
        return super().find_tool_support(plan) if self._find_parsers(plan).tools else "none"

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, layout = plan.settings, _merge_replicas(plan.parallelism)
        path = get_converted_path(plan) if plan.weights.made == "converted" else plan.model_path
        on_cpu = settings.device == "cpu"
        argv = ["sglang-server" if on_cpu else "sglang", "serve", "--model-path", path]
        argv += ["--served-model-name", plan.model.served_name]
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        if uses_engine_defaults(settings):
            # On a CPU it does not run without these options.
            argv += [*_get_loading_options(plan), "--enable-metrics", *(_get_cpu_options(plan) if on_cpu else [])]
            return Launch(argv=tuple(argv), env=_make_environment(plan), prepare=self._prepare(plan))
        argv += ["--context-length", str(settings.context_tokens)]
        # It divides this number among the attention ranks; each replica gets the full number.
        merged = plan.parallelism.data // layout.data
        argv += ["--max-running-requests", str(settings.slots * merged)]
        argv += join_options([("--mem-fraction-static", settings.memory_share)])
        argv += join_options([("--chunked-prefill-size", settings.batch_tokens)])
        argv += _get_loading_options(plan)
        if settings.kv_type == "fp8":
            argv += ["--kv-cache-dtype", "fp8_e4m3"]
        argv += _get_layout_options(layout, self.find_options_version(plan.engine_version))
        argv += self._get_adapter_options(plan)
        if plan.workload.task == "embed":
            argv += ["--is-embedding"]
        else:
            parsers = self._find_parsers(plan)
            argv += join_options([("--tool-call-parser", parsers.tools), ("--reasoning-parser", parsers.reasoning)])
        argv += ["--enable-metrics", *(_get_cpu_options(plan) if on_cpu else [])]
        return apply_tuned_options(
            Launch(argv=tuple(argv), env=_make_environment(plan), prepare=self._prepare(plan)), settings
        )

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        on_cpu = plan.settings.device == "cpu"
        return keep_tunable(
            [*_make_scheduler_knobs(plan), *(_make_cpu_knobs(hardware, plan) if on_cpu else _make_card_knobs(plan))]
        )

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch:
        """The command on one of several nodes; the first node serves requests."""
        launch = self.launch(plan, port)
        argv = (*launch.argv, "--nnodes", str(nodes), "--node-rank", str(rank))
        return replace_fields(launch, argv=(*argv, "--dist-init-addr", f"{leader}:{DIST_PORT}"))

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device == "rocm":
            newer = gfx in ("gfx950", "gfx1250")
            build = "v0.5.21-rocm720-mi35x-20261006" if newer else "v0.5.20-rocm10-mi30x-20260920"
            newest = "ROCm tags contain a date; this is the newest checked tag, and the plan is for version"
            return ContainerImage(name=f"lmsysorg/sglang-rocm:{build}", note=f"{newest} {self.version}", python=True)
        if device not in ("cuda", "cpu"):
            return None
        tag = f"lmsysorg/sglang:v{self.version}{'-xeon' if device == 'cpu' else ''}"
        return ContainerImage(name=tag, note="tag by the project's naming scheme, not checked", python=True)

    def adapt_to_container(self, launch: Launch, image: str) -> Launch:
        # The image contains the project's program, not bedplate's wrapper.
        own = launch.argv[0] == "sglang-server"
        return replace_fields(launch, argv=("sglang", *launch.argv[1:])) if own else launch

    def get_dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        if task != "generate":
            return get_dynamo_pooling_options(task)
        disaggregation = (
            "--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl",
            "--disaggregation-bootstrap-port", "30001",
        ) if role != "worker" else ()  # fmt: skip
        # The router counts in blocks of 16 tokens, which is vLLM's default.
        return (*get_dynamo_event_options(role), "--page-size", "16", *disaggregation)

    def read_progress(self, line: str) -> float | None:
        return parse_shard_progress(line)

    def explain(self, log: str) -> KnownFailure | None:
        return explain_log(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE, _SCHEDULER_FAILURE)

    def read_metrics(self, metrics: str) -> EngineState:
        return EngineState(
            running=sum_samples(metrics, "sglang:num_running_reqs"),
            waiting=sum_samples(metrics, "sglang:num_queue_reqs"),
            kv_use=find_highest_sample(metrics, "sglang:token_usage"),
            preemptions=sum_samples(metrics, "sglang:num_retracted_requests_total"),
            cache_hits=sum_samples(metrics, "sglang:cached_tokens_total"),
            cache_queries=sum_samples(metrics, "sglang:prompt_tokens_total"),
            computed=sum_counters(metrics, "sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
        )

    def _refuse_on_cpu(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        target = self.find_target(hardware)
        if target is None or target.device != "cpu":
            return None
        if workload.task != "generate":
            return self.make_refusal("impossible", f"does not support the task {workload.task} on a CPU", "a GPU")
        if model.architecture not in (*CPU_ARCHITECTURES, "", "unknown") or model.num_experts:
            why = f"no package contains its CPU kernels for {model.architecture}, which it needs on a CPU"
            return self.make_refusal("impossible", why, "a GPU, or an engine for CPUs")
        return None

    def _refuse_hardware(self, hardware: Hardware) -> Refusal:
        if find_cards(hardware, self.vendors) or hardware.cpu.arch in X86:
            return super()._refuse_hardware(hardware)
        why = f"no package contains its kernels for {hardware.cpu.arch} CPUs, and it does not start without them"
        return self.make_refusal("impossible", why, "an NVIDIA or AMD GPU, or an x86 CPU")

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        package, where = f"sglang=={self.get_version(plan)}", OWN_ENVIRONMENT
        if plan.settings.device == "cpu":
            return _plan_cpu_installation(where)
        if plan.settings.device == "rocm":
            steps = [Preparation(kind="install", what=f"{package} built for ROCm", where=where)]
        else:
            argv = ("uv", "pip", "install", "--torch-backend", "auto", package)
            steps = [Preparation(kind="install", what=package, where=where, disk_bytes=4_100_000_000, argv=argv)]
        if plan.weights.made == "converted":
            steps += plan_download(plan)
            steps += plan_compression(plan, "NVFP4" if plan.weights.label == "NVFP4" else "W4A16_ASYM")
        return tuple(steps)


_ARGUMENTS = "srt/server_args.py of 0.5.23"


def _make_scheduler_knobs(plan: Plan) -> list[TunableSetting]:
    settings, asked = plan.settings, plan.workload.compute_in_flight()
    chunk = "default" if settings.batch_tokens is None else str(settings.batch_tokens)
    sizes = sorted({*CHUNKS, *([settings.batch_tokens] if settings.batch_tokens is not None else [])})
    chunks = make_field_choices(sizes, "batch_tokens")
    return [
        TunableSetting(
            name="chunk", meaning="prefill chunk size in tokens", now=chunk,
            choices=chunks if settings.batch_tokens is not None else (SettingChoice(value="default"), *chunks),
            own="2048 to 16384, by GPU memory", ordered=settings.batch_tokens is not None,
            limits=("compute", "scheduler"), risk=("memory",), prior=0.35, source=_ARGUMENTS,
        ),
        make_slots_knob(plan, {max(1, asked // 2), asked, 2 * asked}, own=None, source=_ARGUMENTS),
        TunableSetting(
            name="mixed-chunk", meaning="prefill chunks and decode share a step", now="off", own="off",
            choices=(SettingChoice(value="off"), SettingChoice(value="on", options=("--enable-mixed-chunk",))),
            limits=("scheduler", "compute"), prior=0.25, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="prefix-cache", meaning="prefix cache: known prompt prefixes are not recomputed",
            choices=(SettingChoice(value="on"), SettingChoice(value="off", options=("--disable-radix-cache",))),
            now="on", own="on",
            limits=("runtime overhead", "compute"), prior=0.05 if plan.workload.shared_prefix_tokens else 0.15,
            source=_ARGUMENTS,
        ),
    ]  # fmt: skip


def _make_cpu_knobs(hardware: Hardware, plan: Plan) -> list[TunableSetting]:
    cores, now = hardware.cpu.allowed_physical_cores, plan.settings.threads
    counts = sorted({max(1, cores // 2), cores, now or cores})
    return [
        TunableSetting(
            name="threads", meaning="threads", now=str(now or cores), own="one per core",
            choices=make_variable_choices(counts, "OMP_NUM_THREADS"),
            ordered=True, limits=("compute", "memory bandwidth", "runtime overhead"), prior=0.2,
            source="OpenMP, which PyTorch uses",
        ),
    ]  # fmt: skip


def _make_card_knobs(plan: Plan) -> list[TunableSetting]:
    settings = plan.settings
    share = "default" if settings.memory_share is None else f"{settings.memory_share:g}"
    shares = tuple(SettingChoice(value=f"{n:g}", options=("--mem-fraction-static", f"{n:g}")) for n in SHARES)
    backends = ("flashinfer", "fa3", "triton") if settings.device == "cuda" else ("triton", "aiter")
    return [
        TunableSetting(
            name="memory-share", meaning="share of the GPU memory for weights and KV cache", now=share,
            choices=(SettingChoice(value=share), *(one for one in shares if one.value != share)),
            own="by GPU memory", limits=("KV cache",), risk=("memory", "start"), prior=0.1, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="kv-type", meaning="type of the KV cache", own="auto: as the weights",
            now="fp8" if settings.kv_type == "fp8" else "auto",
            choices=(SettingChoice(value="auto", settings=(("kv_type", "16-bit"),)),
                     SettingChoice(value="fp8", settings=(("kv_type", "fp8"),))),
            limits=("KV cache", "memory bandwidth"), risk=("answers", "start"), prior=0.15, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="attention", meaning="attention kernels", now="default", own="chosen for the GPU",
            choices=(SettingChoice(value="default"),
                     *(SettingChoice(value=one, options=("--attention-backend", one)) for one in backends)),
            limits=("compute", "memory bandwidth", "KV cache"), risk=("start", "answers"), prior=0.25,
            source=_ARGUMENTS,
        ),
        TunableSetting(
            name="graphs", meaning="CUDA graphs: one launch per step instead of one per kernel", now="on",
            choices=(SettingChoice(value="on"), SettingChoice(value="off", options=("--disable-cuda-graph",))),
            own="on",
            limits=("runtime overhead",), risk=("memory",), prior=0.05, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="overlap", meaning="the next step is scheduled during the current one", now="on", own="on",
            choices=(SettingChoice(value="on"), SettingChoice(value="off", options=("--disable-overlap-schedule",))),
            limits=("scheduler", "runtime overhead"), prior=0.1, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="speculation", meaning="n-gram speculation", now="off",
            choices=(SettingChoice(value="off"), SettingChoice(value="n-gram", options=("--speculative-algorithm",
            "NGRAM"))),
            own="off", limits=("memory bandwidth", "runtime overhead"), risk=("start", "memory"), prior=0.1,
            source=_ARGUMENTS,
        ),
    ]  # fmt: skip


def _get_loading_options(plan: Plan) -> list[str]:
    if plan.weights.made != "while loading":
        return []
    return ["--quantization", "fp8"] if plan.weights.label == "FP8" else ["--dtype", "bfloat16"]


def _get_cpu_options(plan: Plan) -> list[str]:
    # Without a size, the KV cache takes nearly all of the memory; without sleeping, an idle server uses a whole core.
    argv = ["--device", "cpu", "--max-total-tokens", str(_count_cache_tokens(plan)), "--sleep-on-idle"]
    # No package contains its AMX kernels, and without a GPU there is nothing to overlap the scheduling with.
    argv += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
    # Its log is shown during the start, and would otherwise consist of health checks.
    return [*argv, "--log-level-http", "warning"]


def _count_cache_tokens(plan: Plan) -> int:
    """KV cache for one request of maximum length, or for the expected concurrent requests."""
    at_once = min(plan.settings.slots, plan.workload.compute_in_flight()) * plan.workload.request_tokens
    return round(1.1 * max(plan.settings.context_tokens, at_once))


def _make_environment(plan: Plan) -> dict[str, str]:
    env = get_hub_variables(plan)
    if plan.settings.device != "cpu":
        return env
    # The first selects the CPU build; without the second, each health check generates a token.
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    # Spinning threads would take cores from the engine's other processes.
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}
    return env | ({"OMP_NUM_THREADS": str(plan.settings.threads)} if plan.settings.threads is not None else {})


def _plan_cpu_installation(where: str) -> tuple[Preparation, ...]:
    recipe = CPU_RECIPE
    return (
        Preparation(
            kind="install",
            what="the requirements of SGLang on a CPU",
            where=where,
            download_bytes=recipe.download_bytes,
            disk_bytes=recipe.disk_bytes,
            argv=("uv", "pip", "install", "--torch-backend", "cpu", *recipe.packages),
        ),
        Preparation(
            kind="install",
            what=f"{' '.join(recipe.bare)}, without its GPU dependencies",
            where=where,
            argv=("uv", "pip", "install", "--no-deps", *recipe.bare),
        ),
    )


def _can_adapt_experts(model: Model) -> bool:
    """Whether it always chooses kernels with LoRA adapters for the experts: Triton's, for 16-bit weights."""
    return identify_quantization(model)[1] == "16-bit"


def _dequantizes_fp8(target: ComputeTarget, model: Model) -> bool:
    """Whether Marlin kernels dequantize FP8 to 16 bits: dense models on NVIDIA GPUs without FP8 units."""
    return target.device == "cuda" and not model.num_experts and (target.capability or (0, 0)) >= (8, 0)


def _merge_replicas(layout: Parallelism) -> Parallelism:
    """SGLang rejects replicas together with attention data parallelism; one wider group is equivalent."""
    if layout.attention_data == 1 or layout.data == 1:
        return layout
    return replace_fields(
        layout, tensor=layout.tensor * layout.data, attention_data=layout.attention_data * layout.data,
        expert=layout.expert * layout.data, data=1,
    )  # fmt: skip


def _get_layout_options(layout: Parallelism, version: str | None) -> list[str]:
    # srt/server_args.py of 0.5.15: --dp-size is the attention size, enabled by --enable-dp-attention.
    switch = version == "0.5.15" and layout.attention_data > 1
    sizes = (
        ("--tp-size", layout.tensor),
        ("--pp-size", layout.pipeline),
        ("--dp-size", layout.attention_data if switch else layout.data),
        ("--ep-size", layout.expert),
        ("--attn-dp-size", 1 if switch else layout.attention_data),
    )
    argv = join_options((name, size if size > 1 else None) for name, size in sizes)
    return [*argv, "--enable-dp-attention"] if switch else argv


ENGINE = Sglang()
