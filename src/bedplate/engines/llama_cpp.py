"""llama.cpp: GGUF weights on any hardware, one server process."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

from bedplate.engines.base import DEFAULT_CONTEXT_TOKENS as DEFAULT_CONTEXT_TOKENS
from bedplate.engines.base import (
    SIXTEEN_BIT,
    BorrowedLibrary,
    BuildVariant,
    ComputeTarget,
    Engine,
    EngineState,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    SourceBuild,
    choose_context,
    find_cards,
    find_known_failure,
    get_converted_path,
    get_source_folder,
    plan_download,
    plan_helper_installation,
    plan_published_download,
)
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.knobs import (
    SPIN,
    apply_tuned_options,
    keep_tunable,
    make_field_choices,
    make_option_choices,
    uses_engine_defaults,
)
from bedplate.engines.mistakes import (
    BAD_FIELD,
    BAD_MESSAGES,
    BAD_SCHEMA,
    BAD_TEMPLATE,
    BAD_TOKENS,
    BAD_TOOLS,
    NO_EMBEDDINGS,
    TEXT_ONLY,
    TOO_LONG,
)
from bedplate.engines.pytorch import ENGINE as CONVERTER
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shared import make_curl_command, split_layers, sum_counters, sum_samples
from bedplate.engines.traits import (
    AdapterTraits,
    AdviceFlags,
    ContainerConversion,
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
from bedplate.facts.adapters import compute_adapter_bytes
from bedplate.facts.chips import find_accelerator_chip
from bedplate.facts.known_models import GGUF_BITS
from bedplate.values import (
    Accelerator,
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
from bedplate.values.quoting import join_posix_shell
from bedplate.values.record import make_estimate
from bedplate.values.tuning import SettingChoice, TunableSetting
from bedplate.values.workload import DEFAULT_LORA_RANK, LoraAdapter

BENCH = "llama-bench"
"""Its benchmark, whose results `bedplate runs import` reads."""
MIN_HTTP_THREADS = 96
SPARE_HTTP_THREADS = 8
"""The server uses one thread per connection: with too few, health checks of a busy engine fail."""
PROCESS_BYTES = 58_000_000
"""Interpreter, library and threads, without model and scratch buffers, as measured (docs/memory.md)."""
SLOT_BYTES_PER_WORD = 24
"""For each slot and word of the vocabulary: logits, candidates and probabilities (docs/memory.md)."""
MICRO_BATCH = 512
VECTOR_TOKENS = 8
CUBLAS_TOKENS = 33
DOT_PRODUCT_TOKENS = 64
"""Up to how many tokens it multiplies vectors on GPUs, and from how many on a library multiplied quantized weights:
before kernels for NVIDIA's 8-bit units (MMQ_MAX_BATCH_SIZE, 2024), and where chips have 16-bit matrix units but no such
kernels (MMQ_DP4A_MAX_BATCH_SIZE)."""
COMPUTE_BYTES_PER_HIDDEN = 64
"""Scratch memory for each element of a micro-batch's hidden state: 17 MB at a hidden size of 576, by the log."""
MAX_SLOTS = 256
DEFAULT_SLOTS = 4
"""Clients send a second request (a title, a retry) during the first; an idle slot costs memory but no time."""
K_QUANTS = ("Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M")
"""Types below Q8_0 that llama-quantize converts 16-bit weights to."""
SMALL_BLOCKS = ("Q5_1", "Q4_1")
"""Used instead if rows are not a multiple of 256: K-quants then need more bits than their names say."""
K_BLOCK = 256
NOT_CONVERTED = frozenset([
    "albert", "deberta", "deberta-v2", "electra", "gptj", "internlm", "mpnet", "opt", "persimmon",
])  # fmt: skip
"""`model_type` of architectures for which no class in conversion/ of the pinned source is registered."""
SOURCE = "llama_cpp_python-0.3.36"
SOURCE_PACKAGE = "llama-cpp-python==0.3.36"
"""The only package on the index with the complete source of llama.cpp: server, converter and quantizer."""
SOURCE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE_BYTES = 76_589_250
TREE = f"{SOURCE}/vendor/llama.cpp"
BUILD = "llama.cpp-build"
IMAGES, IMAGE_BUILD = "ghcr.io/ggml-org/llama.cpp", "b11515"
SERVER, QUANTIZER = "llama-server", "llama-quantize"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    # Each program is one file that does not depend on the build folder.
    "-DBUILD_SHARED_LIBS=OFF",
    # The build would download the web UI. HTTPS is only for model downloads, which bedplate does.
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)
BACKENDS: dict[Device, tuple[str, ...]] = {
    "cpu": (),
    # NCCL is not needed to split layers over cards, and the program would depend on its library.
    "cuda": ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF"),
    "rocm": ("-DGGML_HIP=ON",),
    "xpu": ("-DGGML_VULKAN=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
    "metal": (),
}
SIMILAR_GFX: Mapping[str, tuple[str, str]] = {"gfx1031": ("gfx1030", "10.3.0"), "gfx1032": ("gfx1030", "10.3.0")}
"""By AMD GPU without kernels in rocBLAS, which then ends the program ("Cannot read TensileLibrary.dat"): the GPU that
it is built for and run as, and the version that HSA_OVERRIDE_GFX_VERSION names it by (docs/build.md of b21e4de;
nktice/AMD-AI issue 6 for gfx1032). The variable has no effect on Windows."""
RUN_AS = "HSA_OVERRIDE_GFX_VERSION"
ANY_CUDA = ("-DCMAKE_CUDA_ARCHITECTURES=native",)
"""Compile for the installed cards only, instead of for a dozen generations."""
X86_OPTIONS = {
    "sse4_2": "GGML_SSE42",
    "avx": "GGML_AVX",
    "avx2": "GGML_AVX2",
    "fma": "GGML_FMA",
    "f16c": "GGML_F16C",
    "avx_vnni": "GGML_AVX_VNNI",
    "avx512f": "GGML_AVX512",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
}
"""ggml's names of instruction sets: a build that leaves one out must name all the others."""
DEVICE_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "Vulkan", "vulkan": "Vulkan"}
BUILD_CORE_SECONDS = 1200.0
GPU_BUILD_CORE_SECONDS = 5040.0
BUILD_BASIS = "measured: 7 min for an H200 on 12 cores, 10 min for a CPU on 2 cores"
BUILD_DISK_BYTES = 400_000_000
GPU_BUILD_DISK_BYTES = 1_500_000_000
"""For the CPU as measured: 180 MB of source, 140 MB of objects and programs. For a GPU an upper bound."""
CONVERT_START_S = 15.0
CONVERT_BYTES_S = {"q8_0": 30e6}
CONVERT_COPY_BYTES_S = 150e6
"""The converter quantizes in Python on one core and copies 16-bit weights almost unchanged."""
QUANTIZE_WEIGHTS_S_PER_CORE = 8e6
ENGINE_DEFAULT_SLOTS = 4
"""llama-server's default of `--parallel`, with a unified KV cache (tools/server/server.cpp)."""
REQUANTIZED_TYPES = ("Q8_0", "F16", "Q4_0")
"""Types for which llama.cpp has blocked matrix kernels on CPUs (ggml-cpu: llamafile/sgemm.cpp, repack.cpp), the most
faithful first. Other types, such as Q4_1, are computed row by row. The weights are requantized from the file, so more
bits do not restore precision. Q5_0 has such kernels too but must be dequantized: 1.1 times the speed of Q4_1, where
Q8_0 had 1.4 times (docs/tune.md)."""
MICRO_BATCHES = (64, 128, 256, 512, 1024, 2048)
BATCHES = (256, 512, 1024, 2048, 4096)
ENGINE_DEFAULT_BATCH = 2048
MIN_BATCH = 128
FEW_CORES = 4
"""With fewer cores, one that does not compute is noticeable; with more, memory may be the bottleneck."""

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"data is not within the file bounds|gguf_init_from_\w+: failed to read ",
        KnownFailure(
            message="the model file is damaged: it is shorter than its header says",
            hint="download it again, and check that the disk is not full",
        ),
    ),
    (
        r"invalid magic characters",
        KnownFailure(
            message="the model file is not a GGUF file",
            hint="specify a .gguf file; `bedplate inspect FILE` shows the type of a file",
        ),
    ),
    (
        r"unknown model architecture: '(?P<what>[^']+)'",
        KnownFailure(
            message="this build of llama.cpp does not support the architecture {what}",
            hint="a newer build may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"unknown (?:pre-)?tokenizer(?: type)?:? '?(?P<what>[^'\s]+)",
        KnownFailure(
            message="this build of llama.cpp does not support the tokenizer {what}",
            hint="a newer build may support it: update bedplate",
        ),
    ),
    (
        r"(?:failed to allocate|unable to allocate|cannot allocate memory|std::bad_alloc)",
        KnownFailure(
            message="there is not enough memory for the model and its KV cache",
            hint="reduce the need: --context 4096, --concurrency 1, or a smaller quantization",
        ),
    ),
    (
        r"n_seq_max must be <= (?P<what>\d+)",
        KnownFailure(
            message="llama.cpp supports at most {what} concurrent requests",
            hint="specify --concurrency {what} or less",
        ),
    ),
    (
        r"failed to open GGUF file '(?P<what>.+)' \(Permission denied\)",
        KnownFailure(
            message="no permission to read {what}",
            hint="change its permissions, or run bedplate as its owner",
        ),
    ),
    (
        r"failed to open GGUF file '(?P<what>.+)' \(No such file or directory\)",
        KnownFailure(
            message="{what} does not exist any more",
            hint="specify its new path if it was moved, or mount its disk",
        ),
    ),
    (
        r"std::system_error'\s+what\(\):\s+Resource temporarily unavailable",
        KnownFailure(
            message="llama.cpp could not start its threads: a limit on processes or memory was reached",
            hint="raise the limit (ulimit -u, ulimit -v, or the limits of the container), or stop other programs",
            lasting=False,
        ),
    ),
    (
        r"couldn't bind HTTP server socket",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
)


EIGHT_BIT_CACHE = EightBitCache(
    # 32 values share a scale of 16 bits.
    bits=8.5,
    rows=(
        SupportedQuantization(method="q8_0", part="cache", device="cuda",
                              source="ggml/src/ggml-cuda/fattn.cu of b10586: ggml_cuda_fattn_kv_type_supported"),
        SupportedQuantization(method="q8_0", part="cache", device="rocm",
                              source="ggml/src/ggml-cuda/fattn.cu of b10586, which HIP compiles as well"),
        SupportedQuantization(method="q8_0", part="cache", device="metal",
                              source="ggml/src/ggml-metal/ggml-metal-device.m of b10586: FLASH_ATTN_EXT"),
    ),
    head_step=32,
)  # fmt: skip


def check_context_size(launch: PlannedLaunch) -> str | None:
    """The context, which the server divides among its slots, holds the longest request in each of them."""
    size, slots = launch.get_count("--ctx-size", 0), launch.get_count("--parallel")
    asked = launch.plan.workload.request_tokens
    if not size or size // slots >= asked:
        return None
    return f"--ctx-size {size} divided among {slots} slots is less than a request of {asked:,} tokens"


def check_cache_type(launch: PlannedLaunch) -> str | None:
    """A quantized cache of values needs flash attention, and heads that consist of whole blocks."""
    kind, size = launch.options.get("--cache-type-v", "f16"), launch.model.head_dim
    if kind in ("f16", "bf16", "f32"):
        return None
    if launch.options.get("--flash-attn", "auto") == "off":
        return f"a KV cache of type {kind} needs flash attention, which is off"
    if size is not None and size % EIGHT_BIT_CACHE.head_step:
        return f"a KV cache of type {kind} has blocks of {EIGHT_BIT_CACHE.head_step} values, the heads have {size}"
    return None


def check_split(launch: PlannedLaunch) -> str | None:
    """Experts on the host over several cards need an explicit split: by default each card gets as many layers."""
    if launch.plan.parallelism.pipeline == 1 or not launch.get_count("--n-cpu-moe", 0):
        return None
    if "--tensor-split" in launch.options:
        return None
    return "the layers with experts on the host all come first, so that the last card gets most of the experts"


def check_amd_kernels(launch: PlannedLaunch) -> str | None:
    """A GPU without kernels in rocBLAS is run as a similar one; the variable for this counts for all GPUs."""
    lacking = [card.name for card in launch.cards if _find_gfx(card) in SIMILAR_GFX]
    if launch.device != "rocm" or launch.hardware.os != "linux" or not lacking or RUN_AS in launch.launch.env:
        return None
    return f"rocBLAS has no kernels for the {lacking[0]}, and beside other GPUs it cannot be run as a similar one"


def check_embedding_batch(launch: PlannedLaunch) -> str | None:
    """A micro-batch holds the longest input whose embedding is computed."""
    size, asked = launch.get_count("--ubatch-size", MICRO_BATCH), launch.plan.workload.request_tokens
    if "--embeddings" not in launch.options or size >= asked:
        return None
    return f"an embedding of {asked:,} tokens needs --ubatch-size of as many, not {size:,}"


def check_conversion(launch: PlannedLaunch) -> str | None:
    """The converter has a class for the architecture of weights that are converted."""
    architecture = launch.model.architecture
    converts = launch.plan.weights.made == "converted" and launch.model.format != "gguf"
    if not converts or architecture not in NOT_CONVERTED:
        return None
    return f"its converter does not support the architecture {architecture}"


LAUNCH_RULES = (
    LaunchRule("llama.cpp.conversion", "conversion/base.py of llama_cpp_python 0.3.36: ModelBase.register",
               check_conversion, "GGUF weights of the model"),
    LaunchRule("llama.cpp.embedding-batch", "tools/server/server-context.cpp of August 2026: n_ubatch",
               check_embedding_batch, "a shorter --context"),
    LaunchRule("llama.cpp.context", "src/llama-context.cpp of b10586: n_ctx_seq", check_context_size,
               "a shorter --context"),
    LaunchRule("llama.cpp.cache-type", "src/llama-context.cpp of b10586: type_v, n_embd_head_v", check_cache_type),
    LaunchRule("llama.cpp.split", "src/llama-model.cpp of b10586: load_tensors, splits; common/arg.cpp: --n-cpu-moe",
               check_split),
    LaunchRule("llama.cpp.amd-kernels", "docs/build.md of b21e4de: HSA_OVERRIDE_GFX_VERSION; nktice/AMD-AI issue 6",
               check_amd_kernels, "the GPU alone, or Vulkan"),
)  # fmt: skip
RULE_SOURCES = {
    "plan.device": "ggml/src/ggml-cuda/CMakeLists.txt of b10586",
    "weights.available": "src/llama-model-loader.cpp of b10586",
    "slots.count": "src/llama-cparams.h of b10586: LLAMA_MAX_SEQ",
    "layout.kinds": "common/arg.cpp of b10586: --split-mode",
    "layout.cards": "common/arg.cpp of b10586: --device",
    "layout.hosts": "tools/rpc/README.md of b10586: experimental",
    "layout.idle-cards": "common/arg.cpp of b10586: --device",
    "adapters.loaded": "common/arg.cpp of b10586: --lora-scaled",
    "memory.load": "src/llama-model.cpp of b10586: load_tensors",
    "memory.serve": "src/llama-kv-cache.cpp of b10586: the whole cache is allocated at start-up",
    "memory.host": "common/arg.cpp of b10586: --n-gpu-layers, --n-cpu-moe",
}


# The launcher parses the options, and the wheel's parameters must have each of them.
OPTION_CHECK = f"""
import os, sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
loader = SourceFileLoader("server", os.path.join(os.path.dirname(sys.executable), {SERVER!r}))
server = module_from_spec(spec_from_loader("server", loader))
loader.exec_module(server)
server.make_params(server.make_parser().parse_args(sys.argv[1:]))
"""


_TYPES = ("gguf", "gguf mxfp4", "gguf nvfp4")
QUANTIZATIONS = (
    *make_rows("ggml/src/ggml-cuda/ggml-cuda.cu of b10586: MUL_MAT in supports_op", "cuda", _TYPES),
    *make_rows("ggml/src/ggml-cuda/ggml-cuda.cu of b10586, which HIP compiles as well", "rocm", _TYPES),
    # Metal has no products with NVFP4.
    *make_rows("ggml/src/ggml-metal/ggml-metal-device.m of b10586: MUL_MAT in supports_op", "metal", _TYPES[:2]),
    *make_rows("ggml/src/ggml-sycl/ggml-sycl.cpp of b10586: MUL_MAT in supports_op", "xpu", _TYPES),
    *make_rows("ggml/src/ggml-cpu/ggml-cpu.c of b10586: type_traits_cpu", "cpu", _TYPES),
)


class LlamaCpp(Engine):
    id = "llama.cpp"
    name = "llama.cpp"
    spellings = (
        "ggml", "llamaserver", "llamacppserver", "llamacpppython", "xllamacpp", "llamafile", "koboldcpp", "lmstudio",
        "gpt4all",
    )  # fmt: skip
    formats = ("gguf",)
    converts = ("safetensors",)
    vendors = ("nvidia", "amd", "apple", "intel")
    unplanned: ClassVar[Mapping[str, str]] = {"huawei": "llama.cpp with its CANN backend (docs/backend/CANN.md)"}
    cpu = True
    systems = ("linux", "macos", "windows")
    # Maxwell, "lowest CUDA 12 standard": ggml/src/ggml-cuda/CMakeLists.txt.
    capability = (5, 0)
    tasks = ("generate", "embed", "classify")
    # Whole layers, one card after the other. Its modes `row` (all KV cache on one card) and `tensor` ("EXPERIMENTAL" in
    # its help) do not divide the memory as a tensor-parallel fit assumes.
    ways = ("pipeline",)
    offloads = True
    effort = 1
    version = "2026.10.11549"
    recipe = EnvironmentRecipe(
        packages=("xllamacpp==2026.10.11549",),
        # The wheel contains the library and neither of these programs.
        programs=((SERVER, "llama_server.py"), (QUANTIZER, "llama_quantize.py")),
        # The wheel needs the OpenMP runtime of the system; a minimal Debian has none.
        libraries=(
            BorrowedLibrary(soname="libgomp.so.1", package="treelite==4.8.1", file="treelite.libs/libgomp-*.so*"),
        ),
        download_bytes=34_000_000,
        disk_bytes=127_000_000,
        check="import xllamacpp; xllamacpp.CommonParams()",
    )
    option_check = OPTION_CHECK
    build = SourceBuild(
        package=SOURCE_PACKAGE,
        archive=f"{SOURCE}.tar.gz",
        sha256=SOURCE_SHA256,
        tree=TREE,
        programs=(SERVER, QUANTIZER, "llama-bench"),
        version="0.3.36-native",
        download_bytes=SOURCE_BYTES,
        disk_bytes=BUILD_DISK_BYTES,
        gpu_disk_bytes=GPU_BUILD_DISK_BYTES,
        core_seconds=BUILD_CORE_SECONDS,
        gpu_core_seconds=GPU_BUILD_CORE_SECONDS,
        basis=BUILD_BASIS,
        brings=(("dotprod", "1.8 times the tokens per second on two Neoverse-N1 cores"),),
    )
    # The server then reports its load progress on stdout, and exits when its stdin closes.
    supervised_env: ClassVar[dict[str, str]] = {"LLAMA_SERVER_ROUTER_PORT": "1"}
    # `tool_choice` required permits any text before the call, and a named function is read as auto
    # (ggml-org/llama.cpp issues 27217 and 26535). Images need a projector file, which is not given.
    server_features = ServerFeatures(
        tools="auto", json_schema=True, json_object=True, logprobs=True, choices="slots",
        source="xllamacpp 2026.10.11549: answers to each of these requests",
    )  # fmt: skip
    mistakes = (
        (r"exceeds the available context size \((?P<context>\d+) tokens\)", TOO_LONG),
        (r"^Failed to parse messages: (?P<detail>.{1,300})", BAD_MESSAGES),
        (r"^Failed to parse tools: (?P<detail>[^;]{1,300})", BAD_TOOLS),
        (r"(?:image|audio|video) input is not supported", TEXT_ONLY),
        (r"does not support embeddings", NO_EMBEDDINGS),
        (r"JSON schema error at (?P<detail>.{1,300})", BAD_SCHEMA),
        (r"[Jj]inja.*?: (?P<detail>.{1,300})", BAD_TEMPLATE),
        (r"vector::_M_range_check|Prompt contains invalid tokens", BAD_TOKENS),
        (r"^(?P<detail>Unknown reasoning format: .{0,100})", BAD_FIELD),  # with status 500
    )
    uses = MemoryUse(
        process_bytes=PROCESS_BYTES,
        device_bytes=450_000_000,
        prefill_tokens=MICRO_BATCH,
        spread=0.4,
        source="measured: docs/memory.md",
    )
    # Devices that the installed wheel supports; for any other device the plan begins with a build.
    built_for = ("cpu", "metal")
    features = Features(
        batching="continuous, fixed slots",
        kv_cache="one region per slot, prefix cache per slot",
        quantization="GGUF: 1.5 to 8 bits, MXFP4, NVFP4; cache in 8 or 4 bits",
        hardware="CPU, NVIDIA, AMD, Apple, Intel, Vulkan; layers can be offloaded to the host",
        structured_output="JSON schema and GBNF grammars",
        multi_node="RPC, experimental",
        server="its own",
        maintained="active",
        source="llama.cpp b11549 (October 2026): tools/server/README.md, docs/build.md, common/arg.cpp",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(slots="--parallel")
    loading = LoadingTraits(
        embeds_on_host=True, divides="by memory",
        source="src/llama-model.cpp of b10586: dev_input is the CPU, and the default split is by free memory",
    )  # fmt: skip
    reads_projectors = True
    adapters = AdapterTraits(
        names="--lora-scaled", separator=",", mixes=False, selects="number",
        use="requests choose one by its number in `lora`, or POST /lora-adapters",
        source="common/arg.cpp and tools/server/README.md of August 2026: all adapters are loaded at start-up; "
        "tools/server/server-context.cpp: can_batch_with needs equal adapters; src/llama-adapter.cpp: each is in the "
        "memory of its layer, also with quantized weights",
    )  # fmt: skip
    max_slots = MAX_SLOTS
    default_slots = DEFAULT_SLOTS
    variable_prefixes = ("LLAMA_",)
    key_variable = "LLAMA_API_KEY"
    private_port = PrivatePort(
        key_checked_by="engine",
        # Without its web pages, / answers 404.
        open_paths=("/", "/health", "/v1/health"),
        source="tools/server/server-http.cpp of August 2026: get_public_endpoints; common/arg.cpp: LLAMA_API_KEY",
    )
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "laptops, edge boxes and unusual hardware; little VRAM and much RAM"
    table_names = TableNames(
        words=("llama.cpp", "llamacpp", "llama-cpp", "ggml", "lm studio", "koboldcpp", "llamafile", "llama-bench"),
        rank=12,
    )  # fmt: skip
    estimate = EstimateTraits(
        kernels="gguf", one_stream=True, plain_products=True, chunk_tokens=MICRO_BATCH,
        overlaps_chunks=True, graphics_backend="vulkan", pass_tokens=2048,
        # Greedy sampling from Qwen's 248,320 entries takes 0.22 ms (unslothai/llama.cpp, pull request 200), the default
        # samplers 0.49 ms for Llama's 128,256 (ggml-org/llama.cpp, issue 27050): 0.9 and 3.9 ns for each, here between.
        # Passing a token on takes 0.17 ms with 32 waiting requests (the same pull request).
        sample_entry_s=1.9e-9, wake_s=5.3e-6, most_woken=64,
    )  # fmt: skip
    flags = AdviceFlags(
        slots="--parallel",
        threads="--threads",
        cache_memory="--ctx-size",
        cache_type="--cache-type-k q8_0 --cache-type-v q8_0",
        batch_tokens="--batch-size",
    )
    noted = NotedOptions(slots="--parallel")
    requests = RequestTraits(
        fields=frozenset(["n_predict", "n_cmpl", "ignore_eos"]),
        # It has 13 samplers; a longer list applies some of them repeatedly. Stop strings are searched at each token.
        # The probabilities of the whole vocabulary would be sorted and sent with each token.
        limits={"samplers": 16, "stop": 64, "n_probs": 100, "logprobs": 100, "top_logprobs": 100},
        # The web UI sends it to continue an answer later; the server then finishes it without a client.
        dropped_headers=frozenset([b"x-conversation-id"]),
        usage_per_sequence=True,
        # Its events of /v1/responses have no output_index, on which the stream helper of the openai client fails.
        apis=frozenset(["messages"]),
        # By its metrics after aborts, mostly 2: the event of the token in progress finds the connection closed when
        # the next token has been started. 1 if a token takes longer than the second after which it looks by itself.
        unsent_tokens=2,
        counter=TokenCounter(
            field="content",
            special="add_special",
            prompts={
                "chat": "/v1/chat/completions/input_tokens",
                "messages": "/v1/messages/count_tokens",
                "responses": "/v1/responses/input_tokens",
            },
        ),
    )
    metric_names = MetricNames(running="llamacpp:requests_processing", waiting="llamacpp:requests_deferred")
    # Measured on a CPU: 1 to 3 s.
    container = ContainerTraits(start_s=10.0)

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or ("BF16" if model.format != "gguf" else "Q4_K_M")
        if model.format == "gguf" or (model.format == "facts" and label in GGUF_BITS):
            return (Weights(label=label, made="as it is", format="gguf"),)
        # The converter keeps these types: gpt-oss was trained in MXFP4, and NVFP4 has its own kernels.
        if label in ("MXFP4", "NVFP4"):
            if self.find_quantization(f"gguf {label.lower()}", target) is None:
                return ()
            return (Weights(label=label, made="converted", format="gguf"),)
        if label in SIXTEEN_BIT:
            plain = "BF16" if "bf16" in target.features and label != "F16" else "F16"
            labels: tuple[str, ...] = (plain, "Q8_0", *_list_smaller_types(model))
        elif label == "FP8":
            labels = ("Q8_0", *_list_smaller_types(model))
        elif label.upper() in ("INT4", "GPTQ-INT4"):  # known models spell it GPTQ-Int4
            # Dequantized to 16 bits first, so that more bits than before would not restore precision.
            labels = _list_smaller_types(model)[-2:] if _list_smaller_types(model) == K_QUANTS else SMALL_BLOCKS[-1:]
        else:
            return ()
        kept = [one for one in labels if not workload.precision_sensitive or one in ("BF16", "F16", "Q8_0")]
        return tuple(Weights(label=one, made="converted", format="gguf") for one in kept)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if workload.task == "classify" and (model.format, model.task) != ("gguf", "classify"):
            why = "classifies only with rerankers that are GGUF files"
            return self.make_refusal("impossible", why, "a GGUF reranker; onnxruntime runs classifiers")
        if model.format != "gguf" and model.architecture in NOT_CONVERTED:
            why = f"its converter does not support the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "GGUF weights of the model, or an engine that supports it")
        return super().refuse(hardware, model, workload)

    def refuse_adapters(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if any(mark in _get_adapter_path(one) for one in workload.adapters for mark in ",:"):
            why = "separates LoRA adapters and their scales with commas and colons, and a path has one"
            return self.make_refusal("impossible", why, "a path without a comma or a colon")
        return super().refuse_adapters(hardware, model, workload)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        in_flight = workload.compute_most_in_flight()
        target = self.find_target(hardware)
        device = target.device if target is not None else "cpu"
        slots = min(in_flight if workload.states_load else max(in_flight, DEFAULT_SLOTS), MAX_SLOTS)
        return Settings(
            slots=slots,
            context_tokens=choose_context(model, workload),
            threads=hardware.cpu.allowed_physical_cores,
            sockets=hardware.cpu.sockets if (hardware.cpu.sockets or 1) > 1 else None,
            device=device,
            # The output layer counts as one more layer.
            gpu_layers=0 if device == "cpu" else model.num_layers + 1,
            batch_tokens=_choose_batch_tokens(model, workload, slots, MIN_BATCH if device == "cpu" else MICRO_BATCH),
            board=_find_overridden_gfx(hardware) if device == "rocm" else None,
        )

    def compute_overhead_bytes(self, model: Model, settings: Settings) -> float:
        scratch = MICRO_BATCH * (model.hidden_size or 4096) * COMPUTE_BYTES_PER_HIDDEN
        images = _count_projector_bytes(model)
        return PROCESS_BYTES + scratch + settings.slots * SLOT_BYTES_PER_WORD * (model.vocab_size or 0) + images

    def compute_activation_bytes(self, model: Model, prompt_tokens: int) -> float:
        # The vision encoder is on the first card; the others have as much left.
        return super().compute_activation_bytes(model, prompt_tokens) + _count_projector_bytes(model)

    def count_largest_stage(self, layers: int, stages: int) -> int:
        # It divides the layers and the output, which comes last.
        return -(-(layers + 1) // stages)

    def count_launch_cards(self, launch: PlannedLaunch) -> int | None:
        if launch.device not in DEVICE_NAMES:
            return None
        return len(launch.options["--device"].split(",")) if "--device" in launch.options else 1

    def count_layers_by_card(self, launch: PlannedLaunch) -> tuple[int, ...]:
        """The layers of each card: the last ones are on cards, divided by --tensor-split, else by free memory."""
        layers = launch.model.num_layers
        planned = launch.plan.settings.gpu_layers
        placed = min(launch.get_count("--n-gpu-layers", layers + 1 if planned is None else planned), layers + 1)
        given = launch.options.get("--tensor-split", "")
        sizes = [float(one) for one in given.split(",")] if given else [card.free_bytes or 1 for card in launch.cards]
        return divide_layers(layers, placed, sizes or [1.0])

    def count_layers_by_memory(self, layers: int, sizes: Sequence[float], placed: int | None = None) -> tuple[int, ...]:
        return divide_layers(layers, layers + 1 if placed is None else placed, sizes)

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        # A ChatML template without tools is extended by them in `launch`.
        from bedplate.engines.shipped.openai_server.tools import with_tools

        return "auto" if with_tools(plan.model.chat_template) else super().find_tool_support(plan)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings = plan.settings
        built = settings.device not in self.built_for
        argv = [f"{BUILD}/bin/{SERVER}" if built else SERVER]
        argv += ["--model", _get_gguf_path(plan), "--alias", plan.model.served_name]
        if uses_engine_defaults(settings):
            # The library of the wheel starts with one slot; the released llama-server starts with these.
            argv += ["--host", "127.0.0.1", "--port", str(port)]
            argv += ["--parallel", str(ENGINE_DEFAULT_SLOTS), "--kv-unified"]
            return Launch(argv=(*argv, "--metrics"), prepare=self._plan_steps(plan, built))
        argv += ["--host", "127.0.0.1", "--port", str(port), "--threads-http", str(_count_http_threads(settings))]
        # The server divides its context among the slots, so --ctx-size is for all of them.
        argv += ["--ctx-size", str(settings.context_tokens * settings.slots), "--parallel", str(settings.slots)]
        if settings.threads is not None:
            argv += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
        if settings.sockets is not None and (settings.device == "cpu" or _has_host_layers(plan)):
            # tools/server/README.md of b11549: spreads threads and memory evenly over the NUMA nodes.
            argv += ["--numa", "distribute"]
        argv += _place_layers(plan)
        # By default its prompt cache may use 8 GiB of RAM, which the plan does not include.
        argv += ["--cache-ram", "0", "--fit", "off", "--metrics", "--slots", "--no-webui"]
        if settings.batch_tokens is not None:
            argv += ["--batch-size", str(settings.batch_tokens)]
        if settings.kv_type == "fp8":
            # Its KV cache supports 8-bit integers, not 8-bit floats; for values it requires flash attention.
            argv += ["--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]
        if _reads_only(plan.model, plan.workload):
            # An input is computed in one micro-batch, and several inputs share one.
            tokens = str(max(ENGINE_DEFAULT_BATCH, settings.context_tokens))
            argv += ["--embeddings", "--batch-size", tokens, "--ubatch-size", tokens]
            if "classify" in (plan.model.task, plan.workload.task):
                # tools/server/README.md of b11549: /v1/rerank needs the pooling of rerankers.
                argv += ["--pooling", "rank"]
        if plan.workload.adapters:
            # One adapter applies to every request. Of several, each request chooses one: with --lora, all of them apply
            # to a request that chooses none, also with --lora-init-without-apply.
            scale = 1 if len(plan.workload.adapters) == 1 else 0
            argv += ["--lora-scaled", ",".join(f"{_get_adapter_path(one)}:{scale}" for one in plan.workload.adapters)]
        if plan.model.projector is not None:
            argv += ["--mmproj", plan.model.projector.file]
        from bedplate.engines.shipped.openai_server.tools import with_tools

        if template := with_tools(plan.model.chat_template):
            argv += ["--chat-template", template]
        launch = Launch(argv=tuple(argv), env=_make_environment(settings), prepare=self._plan_steps(plan, built))
        return apply_tuned_options(launch, settings)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        on_cpu = plan.settings.device == "cpu"
        found = [_make_weights_knob(plan)] if on_cpu and plan.weights.format == "gguf" else []
        found += _make_thread_knobs(hardware, plan) if on_cpu else _make_card_knobs(plan)
        found += [*_make_batch_knobs(plan), *_make_cache_knobs(plan), _make_speculation_knob()]
        return keep_tunable(found)

    def get_draft_options(self, model: str) -> tuple[str, ...]:
        return ("--spec-type", "draft-simple", "--spec-draft-model", model)

    def list_variants(self, hardware: Hardware, device: Device) -> tuple[BuildVariant, ...]:
        options = (*CMAKE_OPTIONS, *BACKENDS.get(device, ()), *_choose_cuda_architectures(hardware, device))
        options += _choose_gfx(_find_overridden_gfx(hardware) if device == "rocm" else None)
        found = [BuildVariant(options=(*options, "-DGGML_NATIVE=ON"))]
        sets = hardware.cpu.instruction_sets
        if any(name.startswith("amx") for name in sets):
            # AMX kernels compiled by GCC 12 fail with an illegal instruction on machines whose AMX works.
            rest = tuple(f"-D{option}={'ON' if name in sets else 'OFF'}" for name, option in X86_OPTIONS.items())
            found.append(BuildVariant(name="AMX", options=(*options, "-DGGML_NATIVE=OFF", "-DGGML_BMI2=ON", *rest)))
        return tuple(found)

    def list_build_steps(self, plan: Plan) -> tuple[Preparation, ...]:
        return tuple(
            step for step in self.launch(plan, 0).prepare if step.where in (f"{SOURCE}.tar.gz", TREE, *_BUILD_FOLDERS)
        )

    def _plan_steps(self, plan: Plan, built: bool) -> tuple[Preparation, ...]:
        converted = plan.weights.made == "converted"
        quantized = converted and plan.weights.label in (*K_QUANTS, *SMALL_BLOCKS)
        steps = [] if built else list(self.plan_installation(plan))
        if converted and plan.model.format == "gguf":
            quantizer = f"{BUILD}/bin/{QUANTIZER}" if built else QUANTIZER
            return (
                *steps,
                *(_plan_source() if built else ()),
                *self._plan_build(plan, built),
                _plan_requantization(plan, quantizer),
            )
        adapters = _list_unconverted_adapters(plan)
        if built or converted or adapters:
            steps += _plan_source()
        steps += self._plan_build(plan, built, quantizes=quantized)
        if converted or adapters:
            steps += [*(plan_download(plan) if converted else ()), *plan_helper_installation(CONVERTER)]
        steps += [_plan_adapter_conversion(plan, one) for one in adapters]
        if converted:
            quantizer = f"{BUILD}/bin/{QUANTIZER}" if built else QUANTIZER
            steps += _plan_conversion(plan, quantizer if quantized else None)
        return (*steps, *plan_published_download(plan))

    def _plan_build(self, plan: Plan, built: bool, *, quantizes: bool = True) -> list[Preparation]:
        return _plan_cmake(plan.settings, [SERVER, *([QUANTIZER] if quantizes else [])]) if built else []

    def get_max_connections(self, settings: Settings) -> int | None:
        return _count_http_threads(settings) - SPARE_HTTP_THREADS

    def is_current(self, version: str, backend: str) -> bool:
        # Builds are numbered; tables without a build number are mostly from 2023 and 2024.
        return bool(version) or backend == "cpu"

    def get_chunk_size(self, micro_batch: int | None, batch: int | None, scenario: str) -> int | None:
        if micro_batch is not None:
            return min(micro_batch, batch or micro_batch)
        if batch is not None:
            return min(MICRO_BATCH, batch)
        # llama-batched-bench fills its batch with many prompts, and is usually run with larger batches.
        return 2048 if "batched-bench" in scenario else None

    def uses_flash_attention(self, build: int | None, year: int | None, scenario: str) -> bool:
        # Programs use it since build 6325 (August 2025), llama-bench since build 9430 (May 2026).
        since, since_year = (9430, 2026) if "llama-bench" in scenario else (6325, 2026)
        return build >= since if build is not None else (year or 0) >= since_year

    def get_library_tokens(
        self, backend: str, family: str, half: bool, build: int | None = None, year: int | None = None
    ) -> int | None:
        driver = backend.partition("-")[0]
        if driver not in ("cuda", "rocm"):
            return None
        if half:
            return VECTOR_TOKENS + 1
        if driver == "cuda":
            if family == "volta":
                return DOT_PRODUCT_TOKENS
            # Kernels for 8-bit matrix units multiply quantized weights since build 3216 (June 2024).
            return None if _is_since(3216, 2025, build, year) else CUBLAS_TOKENS
        # The same for the matrix instructions of RDNA3 and RDNA4, since November and December 2025.
        since = {"rdna3": 7279, "rdna4": 7148}.get(family)
        return None if since is None or _is_since(since, 2026, build, year) else DOT_PRODUCT_TOKENS

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        kinds: dict[Device, str] = {"cpu": "server", "cuda": "server-cuda", "rocm": "server-rocm",
                                    "vulkan": "server-vulkan", "xpu": "server-intel"}  # fmt: skip
        if device not in kinds:
            return None
        note = "not every build has an image: this is the known image nearest to the plan's version"
        return ContainerImage(name=f"{IMAGES}:{kinds[device]}-{IMAGE_BUILD}", note=note)

    def adapt_to_container(self, launch: Launch, image: str) -> Launch:
        return replace_fields(launch, argv=(f"/app/{SERVER}", *launch.argv[1:]))

    def get_health_command(self, url: str) -> tuple[str, ...]:
        return make_curl_command(url)

    def plan_container_conversion(self, plan: Plan, source: str, made: str) -> ContainerConversion | None:
        label = plan.weights.label
        plain = {"Q8_0": "q8_0", "F16": "f16", "BF16": "bf16"}
        quantized = label not in plain and label not in ("MXFP4", "NVFP4")
        first = f"{made}.16-bit" if quantized else f"{made}.part"
        convert = ["python3", "/app/convert_hf_to_gguf.py", source, "--outfile", first]
        commands = [[*convert, "--outtype", plain.get(label, "auto")]]
        if quantized:
            commands += [["/app/llama-quantize", first, f"{made}.part", label], ["rm", first]]
        # This image contains the converter and the quantizer in /app; both run on the CPU.
        image = f"{IMAGES}:full-{IMAGE_BUILD}"
        command = " && ".join(map(join_posix_shell, commands))
        return ContainerConversion(command=command, image=image, on_cards=False)

    def read_progress(self, line: str) -> float | None:
        mark = "cmd_child_to_router:state:"
        if mark not in line:
            return None
        try:
            report = json.loads(line.split(mark, 1)[1])
            payload = report["payload"] if report["state"] == "loading" else {}
            stages = payload.get("stages") or [None]
            done = stages.index(payload["current"]) if payload.get("current") in stages else 0
            return float((done + payload["value"]) / len(stages))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES)

    def read_metrics(self, metrics: str) -> EngineState:
        cached = sum_samples(metrics, "llamacpp:prompt_tokens_cached_total")
        computed = sum_samples(metrics, "llamacpp:prompt_tokens_total")
        return EngineState(
            running=sum_samples(metrics, "llamacpp:requests_processing"),
            waiting=sum_samples(metrics, "llamacpp:requests_deferred"),
            cache_hits=cached,
            cache_queries=cached + computed if cached is not None and computed is not None else None,
            computed=sum_counters(
                metrics, "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:n_decode_total"
            ),
        )


def _get_gguf_path(plan: Plan) -> str:
    if plan.weights.made == "converted":
        return get_converted_path(plan)
    if plan.model.files or plan.weights.published is not None:
        return plan.model_path
    # A model without files, known only by its facts, has no path yet.
    return f"{plan.model.name}.gguf"


def _has_host_layers(plan: Plan) -> bool:
    settings = plan.settings
    placed = settings.gpu_layers if settings.gpu_layers is not None else plan.model.num_layers
    return bool(settings.host_expert_layers) or placed < plan.model.num_layers


def _place_layers(plan: Plan) -> list[str]:
    """Options that place the layers; by default the server uses all visible cards."""
    settings, cards = plan.settings, plan.parallelism.pipeline
    layers = settings.gpu_layers
    if layers is None:
        layers = 0 if settings.device == "cpu" else plan.model.num_layers + 1
    argv = ["--n-gpu-layers", str(layers)]
    if name := DEVICE_NAMES.get(settings.device):
        if cards > 1:
            argv += ["--device", ",".join(f"{name}{number}" for number in range(cards))]
        argv += ["--split-mode", "layer" if cards > 1 else "none"]
    if settings.host_expert_layers:
        argv += ["--n-cpu-moe", str(_count_first_layers(plan.model, settings.host_expert_layers))]
        if cards > 1:
            # By default every card gets as many layers, and the last cards all layers with experts.
            *others, last = split_layers(plan)
            # The output counts as one more layer.
            argv += ["--tensor-split", ",".join(map(str, (*others, last + 1)))]
    return argv


def _count_first_layers(model: Model, with_experts: int) -> int:
    """The value of --n-cpu-moe, which also counts layers without experts, for this many layers with experts."""
    layers, experts = model.num_layers, model.num_moe_layers or model.num_layers
    if 2 * experts <= layers:
        # Every second or third layer has experts.
        return min(layers, -(-with_experts * layers // experts))
    return min(layers, with_experts + layers - experts)


def divide_layers(layers: int, placed: int, sizes: Sequence[float]) -> tuple[int, ...]:
    """Layers by card as llama_model::load_tensors divides the last `placed` of them, the output counted as one."""
    if len(sizes) == 1:
        return (max(0, placed - 1),)
    total, counts, ends, so_far = sum(sizes), [0] * len(sizes), [], 0.0
    for size in sizes:
        so_far += size
        ends.append(so_far / total)
    for number in range(placed):
        card = min(bisect_right(ends, number / placed), len(sizes) - 1)
        # The output follows the last layer.
        counts[card] += layers + 1 - placed + number < layers
    return tuple(counts)


def _plan_source() -> list[Preparation]:
    only = ("--no-deps", "--no-binary", "llama-cpp-python")
    take = ("python3", "-m", "pip", "download", *only, SOURCE_PACKAGE, "--dest", ".")
    unpack = ("tar", "-xzf", f"{SOURCE}.tar.gz")
    return [
        Preparation(
            kind="download", what=SOURCE_PACKAGE, where=f"{SOURCE}.tar.gz", download_bytes=77_000_000,
            disk_bytes=77_000_000, argv=take,
        ),
        Preparation(kind="build", what="extract llama.cpp's source", where=TREE, disk_bytes=225_000_000, argv=unpack),
    ]  # fmt: skip


_BUILD_FOLDERS = (BUILD, f"{BUILD}/bin")


def _choose_cuda_architectures(hardware: Hardware, device: Device) -> tuple[str, ...]:
    """The cmake option that compiles only for the installed NVIDIA cards: each architecture takes minutes."""
    if device != "cuda":
        return ()
    found = {card.compute_capability for card in find_cards(hardware, ("nvidia",))}
    if not found or None in found:
        return ANY_CUDA
    numbers = sorted(int(one.replace(".", "")) for one in found if one)
    return ("-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(f"{number}-real" for number in numbers),)


def _find_overridden_gfx(hardware: Hardware) -> str | None:
    """The AMD GPU that rocBLAS has no kernels for, if all of the machine's are run as the same other one."""
    found = {_find_gfx(card) for card in find_cards(hardware, ("amd",))}
    known = {SIMILAR_GFX.get(one or "") for one in found}
    return min(filter(None, found)) if hardware.os == "linux" and len(known) == 1 and None not in known else None


def _find_gfx(card: Accelerator) -> str | None:
    chip = find_accelerator_chip(card)
    reported = (card.architecture or "").split(":")[0].lower()
    return reported if reported.startswith("gfx") else chip.gfx if chip is not None else None


def _choose_gfx(overridden: str | None) -> tuple[str, ...]:
    similar = SIMILAR_GFX.get(overridden or "")
    return (f"-DGPU_TARGETS={similar[0]}",) if similar is not None else ()


def _make_environment(settings: Settings) -> dict[str, str]:
    similar = SIMILAR_GFX.get(settings.board or "")
    return {RUN_AS: similar[1]} if similar is not None else {}


def _plan_cmake(settings: Settings, programs: list[str]) -> list[Preparation]:
    cards = ANY_CUDA if settings.device == "cuda" else _choose_gfx(settings.board)
    configure = ("cmake", "-S", TREE, "-B", BUILD, *CMAKE_OPTIONS, *BACKENDS[settings.device], *cards)
    compile_all = ("cmake", "--build", BUILD, "--config", "Release", "--parallel", "--target", *programs)
    small = settings.device in ("cpu", "metal")
    work = BUILD_CORE_SECONDS if small else GPU_BUILD_CORE_SECONDS
    took = make_estimate(work / (settings.threads or 4), 0.5, BUILD_BASIS)
    on = f"llama.cpp for {settings.device}"
    return [
        Preparation(kind="build", what=f"configure {on}", where=BUILD, argv=configure),
        Preparation(
            kind="build", what=f"{' and '.join(programs)} from {on}", where=f"{BUILD}/bin",
            disk_bytes=BUILD_DISK_BYTES if small else GPU_BUILD_DISK_BYTES, seconds=took, argv=compile_all,
        ),
    ]  # fmt: skip


def _list_smaller_types(model: Model) -> tuple[str, ...]:
    """Quantization types below 8 bits for this model, the largest first."""
    return SMALL_BLOCKS if (model.hidden_size or 0) % K_BLOCK else K_QUANTS


def _estimate_quantized_bytes(model: Model, label: str) -> int:
    weights, bits = model.parameters + model.vision_parameters, GGUF_BITS[label]
    # K-quants do not support these rows: the output layer, shared with the embeddings, is then stored in 8 bits.
    output = (model.vocab_size or 0) * (model.hidden_size or 0) if label in SMALL_BLOCKS else 0
    return round((weights * bits + output * (GGUF_BITS["Q8_0"] - bits)) / 8)


def _plan_conversion(plan: Plan, quantizer: str | None) -> list[Preparation]:
    """Steps that convert Hugging Face weights to GGUF, through 16 bits for types below Q8_0.

    The converter runs in PyTorch's environment, which has all packages that it imports.
    """
    label, result, folder = plan.weights.label, get_converted_path(plan), get_source_folder(plan)
    # The 16-bit file is the same for every target type.
    first = f"{plan.model.short_name}-16-bit.gguf" if quantizer else result
    outtype = {"Q8_0": "q8_0", "F16": "f16", "BF16": "bf16"}.get(label, "auto")
    weights = plan.model.parameters + plan.model.vision_parameters
    first_bytes = round(weights * (16 if quantizer else GGUF_BITS.get(label, 4.5 if "FP4" in label else 16)) / 8)
    convert = ("python3", f"{TREE}/convert_hf_to_gguf.py", folder, "--outfile", first, "--outtype", outtype)
    steps = [
        Preparation(
            kind="convert", what=f"{plan.model.name} to GGUF", where=first, disk_bytes=first_bytes,
            seconds=make_estimate(
                CONVERT_START_S + first_bytes / CONVERT_BYTES_S.get(outtype, CONVERT_COPY_BYTES_S), 0.6,
                "measured: 135 million weights to Q8_0 in 19 s on 2 busy cores; 16 bits at disk speed",
            ),
            argv=convert, within=CONVERTER.id,
        ),
    ]  # fmt: skip
    if quantizer:
        cores = plan.settings.threads or 4
        took = make_estimate(
            weights / (QUANTIZE_WEIGHTS_S_PER_CORE * cores),
            0.7,
            "measured: 135 million weights in 6 to 12 s on two busy cores",
        )
        steps.append(
            Preparation(
                kind="convert", what=f"{plan.model.name} in {label}", where=result, seconds=took,
                disk_bytes=_estimate_quantized_bytes(plan.model, label),
                argv=(quantizer, first, result, label, str(cores)),
            )
        )  # fmt: skip
    return steps


def _get_adapter_path(adapter: LoraAdapter) -> str:
    return adapter.path if adapter.path.endswith(".gguf") else f"{adapter.served_name}.gguf"


def _list_unconverted_adapters(plan: Plan) -> list[LoraAdapter]:
    """The LoRA adapters that are not GGUF files yet."""
    named = plan.workload.adapters if plan.workload.names_adapters else ()
    return [one for one in named if not one.path.endswith(".gguf")]


def _plan_adapter_conversion(plan: Plan, adapter: LoraAdapter) -> Preparation:
    result = _get_adapter_path(adapter)
    folder = adapter.served_name if adapter.is_on_hub else adapter.path
    convert = ["python3", f"{TREE}/convert_lora_to_gguf.py", folder, "--outfile", result, "--outtype", "f16"]
    if adapter.is_on_hub:
        fetch = join_posix_shell(["hf", "download", adapter.path, "--local-dir", folder])
        convert = ["sh", "-c", f"{fetch} && {join_posix_shell(convert)}"]
    return Preparation(
        kind="convert", what=f"adapter {adapter.served_name} to GGUF", where=result, argv=tuple(convert),
        disk_bytes=round(compute_adapter_bytes(plan.model, adapter.rank or DEFAULT_LORA_RANK)), within=CONVERTER.id,
    )  # fmt: skip


def _plan_requantization(plan: Plan, quantizer: str) -> Preparation:
    """The step that requantizes a GGUF file to another type."""
    label, cores = plan.weights.label, plan.settings.threads or 4
    weights = plan.model.parameters + plan.model.vision_parameters
    took = make_estimate(
        weights / (QUANTIZE_WEIGHTS_S_PER_CORE * cores), 0.7, "measured: 135 million weights in 6 to 12 s"
    )
    return Preparation(
        kind="convert", what=f"{plan.model.name} in {label}", where=get_converted_path(plan), seconds=took,
        disk_bytes=round(weights * GGUF_BITS.get(label, 16) / 8),
        argv=(quantizer, "--allow-requantize", plan.model_path, get_converted_path(plan), label, str(cores)),
    )  # fmt: skip


_HELP = "llama-server --help of b11549"


def _make_weights_knob(plan: Plan) -> TunableSetting:
    now, source = plan.weights.label, plan.model
    kept = SettingChoice(value=now)
    sixteen = now in SIXTEEN_BIT
    made = [label for label in REQUANTIZED_TYPES if label != now and not (sixteen and label == "F16")]
    return TunableSetting(
        name="weights",
        meaning="weight type; converted from the file once, and kept",
        choices=(kept, *(SettingChoice(value=label, weights=label, lossy=_is_lossy(label, now)) for label in made))
        if source.files
        else (kept,),
        now=now,
        own="as in the file",
        alone=True,
        limits=("compute", "memory bandwidth"),
        risk=("answers", "memory"),
        prior=0.7 if now not in REQUANTIZED_TYPES else 0.3,
        source="ggml-cpu of b11549: types with blocked matrix kernels",
    )


def _is_lossy(label: str, now: str) -> bool:
    """Whether it has fewer bits than now and fewer than Q8_0, which is nearly lossless."""
    return GGUF_BITS.get(label, 16.0) < min(GGUF_BITS.get(now, 16.0), GGUF_BITS["Q8_0"])


def _make_thread_knobs(hardware: Hardware, plan: Plan) -> list[TunableSetting]:
    cores, now = hardware.cpu.allowed_physical_cores, str(plan.settings.threads)
    counts = sorted({max(1, cores // 2), cores, cores + 1, 2 * cores, plan.settings.threads or cores})
    about = {
        "own": "number of physical cores", "own_choice": str(cores), "now": now, "ordered": True,
        "source": "docs/threads.md",
        "first": (str(cores + 1),) if cores < FEW_CORES else (),
    }  # fmt: skip
    pinned = SettingChoice(value="on", variables=(("OMP_PLACES", "cores"), ("OMP_PROC_BIND", "close")))
    return [
        TunableSetting(
            name="threads", meaning="threads for decode", choices=make_option_choices(counts, "--threads"),
            limits=("compute", "memory bandwidth", "runtime overhead"), prior=0.12, **about,  # type: ignore[arg-type]
        ),
        TunableSetting(
            name="threads-batch", meaning="threads for prefill", choices=make_option_choices(counts, "--threads-batch"),
            limits=("compute",), prior=0.2, **about,  # type: ignore[arg-type]
        ),
        # --poll is for builds without OpenMP; both the wheel and the build from source use OpenMP.
        TunableSetting(
            name="spin", meaning="whether idle threads spin or block", now="default",
            own="spin for a while, then block", choices=SPIN, limits=("runtime overhead",),
            prior=0.12, source="ggml-cpu.c of b11549: GGML_USE_OPENMP; OpenMP 5.2, OMP_WAIT_POLICY",
        ),
        TunableSetting(
            name="pinning", meaning="each thread is pinned to one core", now="off", own="off",
            choices=(SettingChoice(value="off"), pinned), limits=("runtime overhead", "memory bandwidth"), prior=0.12,
            source="OpenMP 5.2, OMP_PROC_BIND",
        ),
    ]  # fmt: skip


def _make_card_knobs(plan: Plan) -> list[TunableSetting]:
    settings, all_layers = plan.settings, plan.model.num_layers + 1
    layers, experts = settings.gpu_layers, settings.host_expert_layers
    on_card = _list_values_around(layers, all_layers) if layers is not None and layers < all_layers else []
    on_host = _list_values_around(experts, plan.model.num_layers) if experts else []
    split = ("layer", "row") if plan.parallelism.pipeline > 1 else ("layer",)
    where = {"limits": ("memory bandwidth", "compute", "KV cache"), "risk": ("memory", "start"), "source": _HELP}
    return [
        TunableSetting(
            name="gpu-layers", meaning="layers on the GPU; the CPU computes the others", now=str(layers),
            choices=make_field_choices(on_card, "gpu_layers"),
            own="all that fit", ordered=True, prior=0.5, **where,  # type: ignore[arg-type]
        ),
        TunableSetting(
            name="host-experts", meaning="layers whose experts stay in host memory", now=str(experts), own="none",
            choices=make_field_choices(on_host, "host_expert_layers"),
            ordered=True, prior=0.5, **where,  # type: ignore[arg-type]
        ),
        TunableSetting(
            name="split", meaning="how the model is split over GPUs: by layers, or each matrix by rows",
            choices=tuple(SettingChoice(value=one, options=("--split-mode", one)) for one in split), now="layer",
            own="layer",
            limits=("interconnect", "memory bandwidth", "compute"), risk=("memory", "start"), prior=0.3, source=_HELP,
        ),
    ]  # fmt: skip


def _list_values_around(now: int, most: int) -> list[int]:
    return sorted({max(0, min(most, now + step)) for step in (-4, -2, -1, 0, 1, 2, 4)})


def _reads_only(model: Model, workload: Workload) -> bool:
    """Whether it embeds or reranks texts and generates none."""
    return not {"embed", "classify"}.isdisjoint((model.task, workload.task))


def _choose_batch_tokens(model: Model, workload: Workload, slots: int, least: int) -> int | None:
    """A batch size that holds one whole prompt and one token of each other request.

    Prompts that arrive together are then computed one after the other, so that only the last one waits for all.
    """
    # Images and embedding inputs are computed in one step regardless of their length.
    whole = model.vision_parameters or model.projector is not None or _reads_only(model, workload)
    tokens = workload.prompt_tokens + slots
    return tokens if workload.compute_in_flight() > 1 and not whole and least <= tokens < ENGINE_DEFAULT_BATCH else None


def _make_batch_knobs(plan: Plan) -> list[TunableSetting]:
    settings = plan.settings
    asked = plan.workload.compute_in_flight()
    slots = sorted({1, max(1, asked // 2), asked, min(2 * asked, MAX_SLOTS), settings.slots})
    batch = str(settings.batch_tokens or ENGINE_DEFAULT_BATCH)
    one_prompt = _choose_batch_tokens(plan.model, plan.workload, settings.slots, MIN_BATCH)
    alone = () if one_prompt is None or one_prompt >= int(batch) else (one_prompt,)
    source = "common/common.h of b11549: n_batch, n_ubatch, n_parallel"
    return [
        TunableSetting(
            name="ubatch", meaning="prefill chunk size in tokens", now=str(MICRO_BATCH), own="512",
            choices=make_option_choices(MICRO_BATCHES, "--ubatch-size"), ordered=True, limits=("compute", "scheduler"),
            risk=("memory",), prior=0.35, source=source,
        ),
        TunableSetting(
            name="batch", meaning="maximum tokens of all requests in one step", now=batch,
            own=str(ENGINE_DEFAULT_BATCH), own_choice=str(ENGINE_DEFAULT_BATCH), first=tuple(map(str, alone)),
            ordered=True,
            choices=make_option_choices({*BATCHES, *alone, int(batch)}, "--batch-size"),
            limits=("compute", "scheduler"), risk=("memory",), prior=0.45 if alone else 0.3,
            source=f"{source}; server-context.cpp: prompts fill a step up to n_batch",
        ),
        TunableSetting(
            name="slots", meaning="concurrent requests; others wait", now=str(settings.slots), own="4",
            choices=make_field_choices(slots, "slots"), ordered=True,
            own_choice="4" if 4 in slots else None,
            limits=("scheduler", "KV cache", "memory bandwidth"), risk=("memory",), prior=0.2, source=source,
        ),
    ]  # fmt: skip


def _make_cache_knobs(plan: Plan) -> list[TunableSetting]:
    kept, eight = SettingChoice(value="f16"), ("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    on_cpu = plan.settings.device == "cpu"
    # On a CPU `auto` means `on`.
    flash = ("auto", "off") if on_cpu else ("auto", "on", "off")
    return [
        TunableSetting(
            name="flash-attn", meaning="flash attention", now="auto", own="auto",
            choices=tuple(SettingChoice(value=one, options=("--flash-attn", one)) for one in flash),
            limits=("compute", "memory bandwidth", "KV cache"), risk=("answers",), prior=0.4, source=_HELP,
        ),
        TunableSetting(
            name="kv-unified", meaning="one KV cache for all slots, instead of one for each", now="off", own="on",
            choices=(SettingChoice(value="off"), SettingChoice(value="on", options=("--kv-unified",))), own_choice="on",
            limits=("KV cache", "compute"), prior=0.2, source=_HELP,
        ),
        TunableSetting(
            name="kv-type", meaning="type of the KV cache", own="f16",
            now="q8_0" if plan.settings.kv_type == "fp8" else "f16",
            choices=(kept, SettingChoice(value="q8_0", options=eight, settings=(("kv_type", "fp8"),))),
            # On CPUs 16-bit floats are converted to 32 bits before each use; 8-bit integers are multiplied directly.
            limits=("KV cache", "memory bandwidth", "compute") if on_cpu else ("KV cache", "memory bandwidth"),
            risk=("answers",), prior=0.25, source=_HELP,
        ),
        TunableSetting(
            name="prompt-cache", meaning="MiB of RAM for the prompt cache of earlier requests", now="0", own="8192",
            choices=(SettingChoice(value="0"), SettingChoice(value="8192", options=("--cache-ram", "8192"))),
            own_choice="8192",
            limits=("KV cache",), risk=("memory",), prior=0.2 if plan.workload.shared_prefix_tokens else 0.02,
            source=_HELP,
        ),
    ]  # fmt: skip


def _make_speculation_knob() -> TunableSetting:
    kinds = ("ngram-simple", "ngram-mod")
    return TunableSetting(
        name="speculation", meaning="n-gram speculation", now="off",
        own="off", choices=(SettingChoice(value="off"), *(SettingChoice(value=one, options=("--spec-type",
        one)) for one in kinds)),
        limits=("memory bandwidth", "runtime overhead"), risk=("answers",), prior=0.05, source=_HELP,
    )  # fmt: skip


def _is_since(number: int, first_year: int, build: int | None, year: int | None) -> bool:
    """Whether a build is at least this one: by its number, by its year, or because only a current build is meant."""
    return build >= number if build is not None else year is None or year >= first_year


def _count_projector_bytes(model: Model) -> int:
    projector = model.projector
    return projector.weight_bytes + projector.activation_bytes if projector is not None else 0


def _count_http_threads(settings: Settings) -> int:
    # The engine queues as many requests as it computes, so that the next one starts as soon as a slot is free.
    return max(MIN_HTTP_THREADS, 2 * settings.slots + SPARE_HTTP_THREADS)


ENGINE = LlamaCpp()
