"""Functions shared by engines: weight types, known failures, Prometheus text, quantization with LLM Compressor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from bedplate.engines.base import (
    DEFAULT_CONTEXT_TOKENS,
    OWN_ENVIRONMENT,
    SIXTEEN_BIT,
    ComputeTarget,
    Engine,
    KnownFailure,
    get_converted_path,
    get_source_folder,
)
from bedplate.facts.known_models import apply_label
from bedplate.values import (
    Hardware,
    Model,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
    make_estimate,
    replace_fields,
)
from bedplate.values.workload import LoraAdapter

GIB = 1 << 30
CONTEXT_BYTES = 720_000_000
"""The driver context of a process with PyTorch 2.11 on an H200: 0.67 GiB with vLLM, 0.52 to 0.71 GiB with SGLang."""
COMPRESSOR = "llmcompressor==0.14.0.1"
FLOAT32_ONLY = frozenset(["fp32"])
"""Features of a target that should compute in 32 bits."""
TORCH_2_11_CUDA_13 = (
    "torch", "triton", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver",
    "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvjitlink", "nvidia-nvshmem-cu13",
    "nvidia-nvtx",
)  # fmt: skip
"""Requirements of torch 2.11.0 for CUDA 13 on Linux, from the metadata of its wheel; triton is 3.6.0."""
NOT_FOR_TEXT = (
    "torchvision", "torchaudio", "torchcodec", "opencv*", "pynvvideocodec", "pyarrow", "pandas", "datasets", "lxml",
    "modelscope*", "grpcio*", "smg*", "sentry-sdk", "fastapi-cloud-cli", "agent-detector", "detect-installer",
    "rignore", "fastar", "z3-solver", "tilelang", "tokenspeed*", "cuda-tile", "torch-c-dlpack-ext",
    "flashinfer-cubin", "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm",
    "nvidia-cuda-tileiras", "nvidia-nvvm", "nvidia-mathdx",
)  # fmt: skip
"""Packages for images, audio, data sets, telemetry and compilation. vLLM 0.26.0 and SGLang 0.5.15 served text without
them on an H200 (November 2026); kernels that are compiled on first use need the nvcc of the machine."""
DATA_NOT_FOR_SERVING = ("pycountry/locales", "sympy/*/tests", "scipy/*/tests", "mistral_common/data/*.*")
"""Translations, tests, and tokenizers that only MistralTokenizer.v1() to .v7() read; models contain their own."""

FailurePatterns = tuple[tuple[str, KnownFailure], ...]
"""(pattern, failure), the most specific first: the log of a failed start often ends with a general message."""

PORT_IN_USE: FailurePatterns = (
    (
        r"(?i)address already in use",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
)
HUB: FailurePatterns = (
    (
        r"Cannot access gated repo|You are trying to access a gated repo|GatedRepoError",
        KnownFailure(
            message="access to the model is gated",
            hint="request access on the model's page, then set HF_TOKEN to a token of your account",
        ),
    ),
    (
        r"Repo id must be in the form[^\n]*?: '(?P<what>/[^'\n]*)'",
        KnownFailure(
            message="{what} does not exist",
            hint="specify its new path if it was moved, or mount its disk",
        ),
    ),
    (
        r"401 Client Error|Repository Not Found for url|RepositoryNotFoundError|is not a valid model identifier",
        KnownFailure(
            message="the hub does not have this model, or the model is private",
            hint="check the name (owner/name); for a private model, set HF_TOKEN",
        ),
    ),
    (
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|Cannot reach https://huggingface\.co"
        r"|couldn't connect to 'https://huggingface\.co'",
        KnownFailure(
            message="the model is not on this machine, and the hub cannot be reached",
            hint="download the model first, or specify a folder that contains it",
        ),
    ),
)
TORCH: FailurePatterns = (
    (
        r"Error while creating shared memory segment|posix_fallocate failed|/dev/shm[^\n]{0,200}No space left on device"
        r"|insufficient shared memory \(shm\)",
        KnownFailure(
            message="the shared memory (/dev/shm) for the engine's processes is too small",
            hint="in a container, start it with --shm-size 16g or --ipc=host",
        ),
    ),
    (
        r"CUDA out of memory[^\n]{0,200}GPU \d+ has a total capacity of (?P<all>[\d.]+) GiB[^\n]{0,200}?"
        r"Process (?P<pid>\d+) has (?P<held>[\d.]+) GiB memory in use",
        KnownFailure(
            message="the GPU ran out of memory: process {pid} holds {held} of its {all} GiB",
            hint="stop that process, use another GPU (CUDA_VISIBLE_DEVICES), or ask for less: a shorter --context, "
            "a smaller quantization",
        ),
    ),
    (
        r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|HIP out of memory|XPU out of memory)"
        r"|CUDA error: out of memory|cudaErrorMemoryAllocation",
        KnownFailure(
            message="the GPU ran out of memory",
            hint="use a shorter --context, a lower --concurrency or a smaller quantization; or free GPU memory",
        ),
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError|RCCL error",
        KnownFailure(
            message="communication between the GPUs failed (NCCL)",
            hint="start again with NCCL_DEBUG=INFO; common causes: the driver, the network, shared memory",
        ),
    ),
    (
        r"no kernel image is available for execution on the device",
        KnownFailure(
            message="this build of the engine has no kernels for this GPU",
            hint="use a GPU generation that the engine supports, or choose another engine with --engine",
        ),
    ),
    (
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old|Found no NVIDIA driver",
        KnownFailure(
            message="the GPU driver is missing, or too old for the engine's CUDA version",
            hint="update the driver; `bedplate doctor` shows the installed version",
        ),
    ),
)


def explain_log(log: str, *known: FailurePatterns) -> KnownFailure | None:
    """The failure of the first pattern that the log matches; its named groups fill in the message."""
    for pattern, failure in (entry for entries in known for entry in entries):
        if found := re.search(pattern, log):
            words = {name: value or "" for name, value in found.groupdict().items()}
            return KnownFailure(
                message=failure.message.format(**words), hint=failure.hint.format(**words), lasting=failure.lasting
            )
    return None


def read_samples(metrics: str, name: str) -> list[float]:
    """The values of one metric in Prometheus text, one for each set of labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^\n]*\}})? +([0-9.eE+-]+|NaN|[+-]Inf)(?: +\d+)?$"
    return [value for value in map(_parse_number, re.findall(pattern, metrics, re.MULTILINE)) if value is not None]


def sum_samples(metrics: str, *names: str) -> float | None:
    """The sum over all labels of the first of these metrics that exists."""
    return next((sum(found) for name in names if (found := read_samples(metrics, name))), None)


def sum_counters(metrics: str, *names: str) -> float | None:
    """The sum over all labels of all of these metrics that exist."""
    found = [value for name in names for value in read_samples(metrics, name)]
    return sum(found) if found else None


def find_highest_sample(metrics: str, *names: str) -> float | None:
    return next((max(found) for name in names if (found := read_samples(metrics, name))), None)


def parse_shard_progress(line: str) -> float | None:
    """The loaded share from the weight loaders of vLLM, SGLang and transformers: `… checkpoint shards:  50%`."""
    # A progress bar may be one growing line: the last number is the newest.
    found = re.findall(
        r"(?:checkpoint shards|loading shards|safetensors weights[^:]*|Loading weights)[^:]*:\s*(\d{1,3})%", line
    )
    return min(int(found[-1]), 100) / 100 if found else None


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


_SAME_METHODS = {
    "finegrained_fp8": "fp8", "fbgemm_fp8": "fp8", "fp8_pb_wo": "fp8", "gptqmodel": "gptq", "gptq_marlin": "gptq",
    "awq_marlin": "awq", "auto_round": "auto-round", "intel/auto-round": "auto-round", "int8": "compressed-tensors",
    "int4": "compressed-tensors",
}  # fmt: skip
_BY_LABEL = {
    "FP8": "fp8", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "INT8": "compressed-tensors",
    "INT4": "compressed-tensors", "AWQ-INT4": "awq", "GPTQ-INT4": "gptq", "GPTQ-INT8": "gptq", "NF4": "bitsandbytes",
}  # fmt: skip


def identify_quantization(model: Model) -> tuple[str, str]:
    """Label and quantization method of the weights; "16-bit" if not quantized, "" if the method is unknown."""
    label = (model.quantization or "BF16").upper()
    if label in SIXTEEN_BIT:
        return label, "16-bit"
    details = model.quantization_details
    method = details.method.lower() if details is not None else _BY_LABEL.get(label, "")
    if method.startswith("mixed:"):
        return label, "mixed"
    return label, _SAME_METHODS.get(method, method)


def name_quantization(weights: Weights, loaded: Model) -> str | None:
    """The name of these weights in the table of quantizations; `None` for 16 and 32 bits."""
    label = weights.label.upper()
    if label in SIXTEEN_BIT:
        return None
    if weights.made == "while loading":
        return f"{label} while loading"
    if weights.format == "gguf":
        return f"gguf {label.lower()}" if label in ("MXFP4", "NVFP4") else "gguf"
    return weights.format if weights.format != "safetensors" else identify_quantization(loaded)[1]


def choose_plain_weights(label: str, target: ComputeTarget) -> Weights:
    """Weights without quantization: BF16 or F16, as the chip supports; loaders convert from 32 bits."""
    has_bf16 = target.capability is None or target.capability >= (8, 0)
    wanted = "BF16" if has_bf16 and label != "F16" else "F16"
    return Weights(label=wanted, made="as it is" if wanted == label else "while loading", format="safetensors")


def set_default_context(settings: Settings, model: Model, workload: Workload) -> Settings:
    """The settings with context for an average conversation, unless a context is requested."""
    asked = workload.context_tokens or max(workload.request_tokens, DEFAULT_CONTEXT_TOKENS)
    return replace_fields(settings, context_tokens=min(max(asked, workload.request_tokens), model.max_context or asked))


def refuse_stored(engine: Engine, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
    """Why it cannot run weights of this quantization here, although it supports their format."""
    target = engine.find_target(hardware)
    if target is None or engine.list_weights(target, model, workload):
        return None
    where = target.chip.name if target.chip is not None else {"cpu": "a CPU"}.get(target.device, target.device.upper())
    return engine.make_refusal(
        "impossible", f"does not run {model.quantization} weights on {where}", "the same model in another quantization"
    )


def refuse_architecture(engine: Engine, model: Model, known: frozenset[str]) -> Refusal | None:
    """Why it cannot load this architecture; `None` also if the architecture is unknown."""
    if model.architecture in known or model.architecture in ("", "unknown"):
        return None
    return engine.make_refusal(
        "impossible", f"{engine.version} does not support the architecture {model.architecture}", "a newer version may"
    )


def refuse_gfx(engine: Engine, hardware: Hardware, known: tuple[str, ...]) -> Refusal | None:
    """Why it does not support this AMD GPU."""
    target = engine.find_target(hardware)
    if target is None or target.device != "rocm":
        return None
    card = next(card for card in hardware.accelerators if card.vendor == "amd")
    reported = (card.architecture or "").split(":")[0].lower()
    gfx = reported if reported.startswith("gfx") else (target.chip.gfx if target.chip is not None else None)
    if gfx is None or gfx in known:
        return None
    return engine.make_refusal("impossible", f"has no kernels for {gfx}", f"an AMD GPU with {', '.join(known)}")


def split_layers(plan: Plan) -> tuple[int, ...]:
    """Layers on each card of a pipeline, with their cache, so that all cards hold about as much."""
    settings = plan.settings
    loaded = apply_label(plan.model, plan.weights.label) if plan.weights.made != "as it is" else plan.model
    cache = loaded.compute_kv_bytes(settings.context_tokens) * settings.slots / max(1, loaded.num_layers)
    sizes = list_layer_bytes(loaded, settings.host_expert_layers or 0)
    return balance_layers([size + cache for size in sizes], plan.parallelism.pipeline)


def list_layer_bytes(model: Model, host_expert_layers: int = 0) -> list[float]:
    """Bytes of each layer on an accelerator; the routed experts of the first layers that have any are on the host."""
    layers = max(1, model.num_layers)
    sizes = {part.name: part.bytes for part in model.parts if part.name != "mtp"}
    experts = sizes.get("experts", 0)
    # The token embedding is on the host, or on the card with the fewest layers.
    dense = model.weight_bytes - experts - sum(sizes.get(name, 0) for name in ("embedding", "output", "vision"))
    having = model.num_moe_layers or layers
    found, left = [], host_expert_layers
    for number in range(layers):
        # Dense layers come first; or experts are in every second or third layer.
        spread = (number + 1) * having // layers > number * having // layers
        has = bool(experts) and (number >= layers - having if 2 * having > layers else spread)
        found.append(dense / layers + (experts / having if has and left <= 0 else 0.0))
        left -= has
    return found


def balance_layers(sizes: Sequence[float], cards: int) -> tuple[int, ...]:
    """The number of consecutive layers on each card, so that the fullest card holds the least."""
    low, high = max(sizes, default=0.0), sum(sizes)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill_cards(sizes, middle)) <= cards else (middle, high)
    counts = _fill_cards(sizes, high * (1 + 1e-9))
    return (*counts, *([0] * (cards - len(counts))))


def _fill_cards(sizes: Sequence[float], room: float) -> list[int]:
    """The number of consecutive layers on each card, if each is filled before the next one."""
    counts, filled = [0], 0.0
    for size in sizes:
        if filled + size > room and counts[-1]:
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += size
    return counts


def plan_compression(plan: Plan, scheme: str) -> tuple[Preparation, ...]:
    """Steps that quantize with LLM Compressor on the serving GPUs, calibrated with 512 samples."""
    recipe = f"QuantizationModifier(targets='Linear', scheme={scheme!r}, ignore={_NOT_QUANTIZED!r})"
    smoothing = "from llmcompressor.modifiers.transform.awq import AWQModifier; " if scheme.startswith("W4") else ""
    steps = f"[AWQModifier(), {recipe}]" if smoothing else f"[{recipe}]"
    script = (
        "from llmcompressor import oneshot; "
        f"from llmcompressor.modifiers.quantization import QuantizationModifier; {smoothing}"
        f"oneshot(model={get_source_folder(plan)!r}, dataset='open_platypus', recipe={steps}, "
        f"max_seq_length=2048, output_dir={get_converted_path(plan)!r})"
    )
    seconds = make_estimate(600 + 150 * plan.model.parameters / 1e9, 0.7, "not measured: minutes per billion weights")
    size = round(plan.model.parameters * 0.6)
    return (
        Preparation(
            kind="install", what=COMPRESSOR, where=OWN_ENVIRONMENT,
            argv=("uv", "pip", "install", COMPRESSOR),
        ),
        Preparation(
            kind="convert", what=f"{plan.model.name} to {plan.weights.label}", where=get_converted_path(plan),
            disk_bytes=size,
            seconds=seconds, argv=("python", "-c", script),
        ),
    )  # fmt: skip


_NOT_QUANTIZED = ["lm_head", "re:.*gate$", "re:.*router$", "re:.*vision.*", "re:visual.*"]
"""Layers that are not quantized: output, routers, vision encoder. They are small and sensitive."""


def get_hub_variables(plan: Plan) -> dict[str, str]:
    """Environment variables that disable hub access if the weights and adapters are local."""
    local = plan.model.files or plan.weights.made == "converted"
    return {"HF_HUB_OFFLINE": "1"} if local and not any(one.is_on_hub for one in plan.workload.adapters) else {}


def list_named_adapters(plan: Plan) -> list[str]:
    """NAME=PATH of each LoRA adapter."""
    return [f"{one.served_name}={one.path}" for one in plan.workload.adapters]


def get_adapter_folder(adapter: LoraAdapter) -> str:
    """Where an engine that reads LoRA adapters from folders alone finds one."""
    return adapter.served_name if adapter.is_on_hub else adapter.path


def plan_adapter_downloads(plan: Plan) -> list[Preparation]:
    """Steps that download listed LoRA adapters from the hub into their folders."""
    named = plan.workload.adapters if plan.workload.names_adapters else ()
    return [
        Preparation(
            kind="download", what=f"adapter {one.path}", where=(folder := get_adapter_folder(one)),
            argv=("hf", "download", one.path, "--local-dir", folder),
        )
        for one in named if one.is_on_hub
    ]  # fmt: skip


def join_options(options: Iterable[tuple[str, object | None]]) -> list[str]:
    """Command-line words of the options whose value is not `None`."""
    return [word for name, value in options if value is not None for word in (name, str(value))]


def get_compute_bits(model: Model) -> int:
    """Bits of PyTorch's compute type, which is also the type of the KV cache."""
    return 32 if model.quantization == "F32" else 16


def widen_on_older_arm(found: ComputeTarget | None, hardware: Hardware) -> ComputeTarget | None:
    """The target, in 32 bits on ARM CPUs without BF16 (before v8.6), where BF16 crashes or is far slower."""
    sets = hardware.cpu.instruction_sets
    if found is None or found.device != "cpu" or "neon" not in sets or "bf16" in sets:
        return found
    return ComputeTarget(device="cpu", count=1, features=FLOAT32_ONLY)


KV_EVENTS = {
    "publisher": "zmq",
    "topic": "kv-events",
    "endpoint": "tcp://*:20080",
    "enable_kv_cache_events": True,
}


def get_dynamo_event_options(role: str) -> tuple[str, ...]:
    """Options by which a Dynamo worker reports its KV cache to the router; decode workers are not routed by it."""
    return ("--kv-events-config", json.dumps(KV_EVENTS, separators=(",", ":"))) if role != "decode" else ()


def get_dynamo_pooling_options(task: str) -> tuple[str, ...]:
    return ("--embedding-worker",) if task == "embed" else ("--classify-worker",)


def make_curl_command(url: str) -> tuple[str, ...]:
    """A health command for images without Python."""
    return ("curl", "--fail", "--silent", "--output", "/dev/null", url)
