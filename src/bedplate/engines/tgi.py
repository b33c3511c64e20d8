"""TGI: Hugging Face's server, no longer developed and therefore not recommended for new services."""

from __future__ import annotations

from pathlib import PurePath

from bedplate.engines.base import SIXTEEN_BIT, ComputeTarget, Engine, EngineState, Features, KnownFailure, MemoryUse
from bedplate.engines.checks import LaunchRule, PlannedLaunch, explain_expert_kernels, lacks_expert_kernels
from bedplate.engines.quantizations import make_rows
from bedplate.engines.shared import (
    HUB,
    PORT_IN_USE,
    TORCH,
    FailurePatterns,
    choose_plain_weights,
    explain_log,
    identify_quantization,
    join_options,
    make_curl_command,
    refuse_architecture,
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
    EstimateTraits,
    LaunchOptions,
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
from bedplate.values.decision import Device

# From the source of v3.3.7 (2025-12-18), its last release.
IMAGE = "ghcr.io/huggingface/text-generation-inference:3.3.7"
MOUNT = "/models"
GFX = ("gfx90a", "gfx942")
"""PYTORCH_ROCM_ARCH in Dockerfile_amd."""
PREFILL_TOKENS = 4096
# ModelType in server/text_generation_server/models/__init__.py, and a few from its transformers 4.51.3.
ARCHITECTURES = frozenset([
    "deepseek_v2", "deepseek_v3", "idefics2", "idefics3", "llava_next", "llama", "llama4", "phi3", "granite", "gemma",
    "paligemma", "gemma2", "gemma3", "gemma3_text", "cohere", "dbrx", "mamba", "mistral", "mixtral", "gpt_bigcode",
    "phi", "phimoe", "baichuan", "falcon", "starcoder2", "qwen2", "qwen2_vl", "qwen2_5_vl", "opt", "t5", "galactica",
    "santacoder", "bloom", "mpt", "gpt2", "gpt_neox", "gptj", "idefics", "mllama",
    "qwen3", "qwen3_moe", "olmo2", "glm4", "cohere2", "stablelm",
])  # fmt: skip
QUANTIZE_VALUES = {
    "awq": "awq", "gptq": "gptq", "fp8": "fp8", "modelopt": "fp8", "compressed-tensors": "compressed-tensors",
}  # fmt: skip
"""Values of --quantize for weights that are already quantized."""
_KNOWN_FAILURES: FailurePatterns = (
    (
        r"Not enough memory to handle `?max_total_tokens=(?P<tokens>\d+)`?",
        KnownFailure(
            message="the memory left by the weights does not hold the KV cache of one request of {tokens} tokens",
            hint="specify a shorter --context, or use a smaller quantization",
        ),
    ),
    (
        r"Not enough memory to handle (?P<tokens>\d+) prefill tokens",
        KnownFailure(
            message="there is not enough memory for a prefill of {tokens} tokens",
            hint="specify a shorter --context, or use a smaller quantization",
        ),
    ),
    (
        r"Unsupported model type (?P<what>\S+)|has model type `(?P<type>[^`]+)` but Transformers does not recognize",
        KnownFailure(
            message="this version of TGI does not support the architecture {what}{type}",
            hint="use --engine vllm, which supports more architectures and is maintained",
        ),
    ),
    (
        r"`num_heads` must be divisible by `num_shards` "
        r"\(got `num_heads`: (?P<heads>\d+) and `num_shards`: (?P<shards>\d+)",
        KnownFailure(
            message="the model's {heads} attention heads cannot be divided among {shards} GPUs",
            hint="use fewer GPUs, or choose another engine with --engine",
        ),
    ),
)  # fmt: skip


def check_input_tokens(launch: PlannedLaunch) -> str | None:
    """The context holds at least one token of output after the longest prompt."""
    prompt, total = launch.get_count("--max-input-tokens", 0), launch.get_count("--max-total-tokens", 0)
    return f"--max-input-tokens {prompt} is not less than --max-total-tokens {total}" if prompt >= total > 0 else None


def check_architecture(launch: PlannedLaunch) -> str | None:
    """The server has the model's architecture."""
    if launch.model.architecture in (*ARCHITECTURES, "", "unknown"):
        return None
    return f"TGI does not have the architecture {launch.model.architecture}"


def check_expert_kernels(launch: PlannedLaunch) -> str | None:
    """FP8 experts need compute capability 8.9: Triton computes them with FP8 activations."""
    return explain_expert_kernels(launch)


RULE_SOURCES = {"adapters.loaded": "launcher/src/main.rs of v3.3.7: lora_adapters"}
LAUNCH_RULES = (
    LaunchRule("tgi.input-tokens", "launcher/src/main.rs of v3.3.7: max_input_tokens", check_input_tokens),
    LaunchRule("tgi.architecture", "server/text_generation_server/models/__init__.py of v3.3.7", check_architecture),
    LaunchRule("tgi.fp8-experts", "server/text_generation_server/layers/moe/fp8.py of v3.3.7: use_fp8_w8a8",
               check_expert_kernels, "weights in 4 bits, or vLLM"),
)  # fmt: skip


QUANTIZATIONS = (
    *make_rows("server/text_generation_server/utils/quantization.py of v3.3.7: get_loader", "cuda", ["awq", "gptq"]),
    *make_rows("server/text_generation_server/layers/compressed_tensors of v3.3.7; layers/marlin/util.py", "cuda",
               ["compressed-tensors"], least=(8, 0)),
    # Without FP8 units, Marlin kernels dequantize it.
    *make_rows("server/text_generation_server/layers/fp8.py of v3.3.7", "cuda", ["fp8", "modelopt"],
               least=(8, 0)),
    *make_rows("server/text_generation_server/layers/fp8.py of v3.3.7", "cuda", ["FP8 while loading"], units="fp8"),
    *make_rows("server/text_generation_server/layers/eetq.py, bnb.py of v3.3.7", "cuda",
               ["INT8 while loading", "NF4 while loading"]),
    *make_rows("server/text_generation_server/layers/gptq/__init__.py of v3.3.7: GPTQWeight, AWQ as gptq", "rocm",
               ["awq", "gptq"]),
    *make_rows("server/text_generation_server/layers/compressed_tensors/w8an_fp.py of v3.3.7, FP8 only", "rocm",
               ["compressed-tensors"], units="fp8"),
    *make_rows("server/text_generation_server/layers/fp8.py of v3.3.7", "rocm",
               ["fp8", "modelopt", "FP8 while loading"], units="fp8"),
)  # fmt: skip


class Tgi(Engine):
    id = "tgi"
    name = "TGI"
    spellings = ("textgenerationinference", "huggingfacetgi", "hftgi", "huggingfacetextgenerationinference")
    version = "3.3.7"
    formats = ("safetensors",)
    vendors = ("nvidia", "amd")
    # docs/source/installation_nvidia.md names the T4 as the oldest.
    capability = (7, 5)
    ways = ("tensor",)
    paged = True
    built_for = ("cuda", "rocm")
    effort = 3
    features = Features(
        batching="continuous",
        kv_cache="paged, prefix cache; FP8 on NVIDIA",
        quantization="FP8 and 8 bits (EETQ) while loading; AWQ, GPTQ, FP8, compressed-tensors as stored",
        hardware="NVIDIA from Turing on, AMD Instinct MI200 and MI300",
        structured_output="JSON schema, regular expressions",
        multi_node="no",
        server="its own, in a container",
        maintained="not since December 2025: fixes only, and it recommends vLLM and SGLang",
        source="TGI v3.3.7 (2025-12-18): launcher/src/main.rs, README.md",
    )
    # A JSON object needs a schema.
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=False, logprobs=True, choices="one", vision=True,
        source="TGI 3: docs/source/conceptual/guidance.md, router/src/lib.rs",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=3_000_000_000,
        device_bytes=2_500_000_000,
        prefill_tokens=PREFILL_TOKENS,
        share=0.95,
        share_of="total",
        spread=0.5,
        source="TGI: its warm-up leaves 5 % of the memory free (flash_causal_lm.py)",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(context="--max-total-tokens", share="--cuda-memory-fraction", cards=("--num-shard",))
    adapters = AdapterTraits(
        names="--lora-adapters",
        separator=",",
        use="requests name one as adapter_id, or as their model",
        source="launcher/src/main.rs and docs/source/conceptual/lora.md of v3.3.7: all are loaded at start-up; without "
        "a prefix cache",
    )
    default_slots = 128
    key_variable = "API_KEY"
    private_port = PrivatePort(key_checked_by="nobody", source="it has no recipe: bedplate does not start it")
    quantizations = QUANTIZATIONS
    strength = "existing deployments"
    table_names = TableNames(words=("text-generation-inference", "text generation inference", "tgi"), rank=9)
    estimate = EstimateTraits(kernels="serving")
    flags = AdviceFlags(
        slots="--max-concurrent-requests",
        cache_memory="--cuda-memory-fraction",
        cache_type="--kv-cache-dtype fp8_e4m3fn",
        batch_tokens="--max-batch-prefill-tokens",
    )
    noted = NotedOptions(context="--max-total-tokens", tensor="--num-shard")
    requests = RequestTraits(counter=TokenCounter(field="inputs"))
    metric_names = MetricNames(running="tgi_batch_current_size", waiting="tgi_queue_size")
    container = ContainerTraits(start_s=90.0, joins_values=True, drains=True)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        return (
            super().refuse(hardware, model, workload)
            or refuse_gfx(self, hardware, GFX)
            or refuse_architecture(self, model, ARCHITECTURES)
            or refuse_stored(self, hardware, model, workload)
        )

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label, method = identify_quantization(model)
        if method != "16-bit":
            lacks = lacks_expert_kernels(model, target.device, target.capability)
            runs = method in QUANTIZE_VALUES and _has_kernels(label, method, target) and not lacks
            return (Weights(label=model.quantization or label, made="as it is", format="safetensors"),) if runs else ()
        found = [choose_plain_weights(label, target)]
        if "fp8" in target.features:
            found.append(Weights(label="FP8", made="while loading", format="safetensors"))
        elif target.device == "cuda" and not model.num_experts:
            found.append(Weights(label="INT8", made="while loading", format="safetensors"))
        if target.device == "cuda" and not workload.precision_sensitive and not model.num_experts:
            found.append(Weights(label="NF4", made="while loading", format="safetensors"))
        return tuple(found)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        settings = set_default_context(super().settle(hardware, model, workload), model, workload)
        # The context must hold at least one output token after the longest prompt.
        return replace_fields(settings, context_tokens=max(2, settings.context_tokens), batch_tokens=PREFILL_TOKENS)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings = plan.settings
        image = f"{IMAGE}-rocm" if settings.device == "rocm" else IMAGE
        argv = [
            "docker",
            "run",
            "--rm",
            "--network",
            "host",
            "--shm-size",
            "16g",
            *_get_device_options(settings.device),
        ]
        # `--env NAME` without a value forwards a variable if it is set, and does not show its value.
        argv += ["--env", "HF_TOKEN", "--env", "API_KEY"]
        path = plan.model_path
        if plan.model.files:
            argv += ["--volume", f"{path}:{MOUNT}/{PurePath(path).name}:ro"]
            path = f"{MOUNT}/{PurePath(path).name}"
        adapters, mounts = _mount_adapters(plan)
        argv += mounts
        argv += [image, "--model-id", path, "--hostname", "127.0.0.1", "--port", str(port)]
        most = settings.context_tokens
        answer = min(plan.workload.output_tokens, most - 1)
        argv += ["--max-total-tokens", str(most), "--max-input-tokens", str(max(1, most - answer))]
        argv += ["--max-batch-prefill-tokens", str(max(settings.batch_tokens or 0, most - answer))]
        # As many requests may wait as are computed.
        argv += ["--max-concurrent-requests", str(2 * settings.slots)]
        argv += join_options(
            [("--cuda-memory-fraction", settings.memory_share), ("--quantize", _get_quantize_value(plan))]
        )
        if plan.weights.made == "while loading" and plan.weights.label in SIXTEEN_BIT:
            argv += ["--dtype", "float16" if plan.weights.label == "F16" else "bfloat16"]
        if settings.kv_type == "fp8":
            argv += ["--kv-cache-dtype", "fp8_e4m3fn"]
        if plan.parallelism.tensor > 1:
            argv += ["--sharded", "true", "--num-shard", str(plan.parallelism.tensor)]
        argv += join_options([("--lora-adapters", ",".join(adapters) or None)])
        argv += ["--usage-stats", "off"]
        pull = Preparation(kind="download", what=image, where="the container store", argv=("docker", "pull", image))
        return Launch(argv=tuple(argv), prepare=(pull,))

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device not in ("cuda", "rocm"):
            return None
        return ContainerImage(name=IMAGE if device == "cuda" else f"{IMAGE}-rocm")

    def adapt_to_container(self, launch: Launch, image: str) -> Launch:
        return replace_fields(launch, argv=("text-generation-launcher", *launch.argv[launch.argv.index(image) + 1 :]))

    def get_health_command(self, url: str) -> tuple[str, ...]:
        return make_curl_command(url)

    def explain(self, log: str) -> KnownFailure | None:
        return explain_log(log, _KNOWN_FAILURES, TORCH, HUB, PORT_IN_USE)

    def read_metrics(self, metrics: str) -> EngineState:
        return EngineState(
            running=sum_samples(metrics, "tgi_batch_current_size"),
            waiting=sum_samples(metrics, "tgi_queue_size"),
            computed=sum_counters(metrics, "tgi_batch_inference_count"),
        )


def _get_device_options(device: str) -> list[str]:
    if device == "rocm":
        return ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--ipc", "host"]
    return ["--gpus", "all"]


def _mount_adapters(plan: Plan) -> tuple[list[str], list[str]]:
    """The LoRA adapters as the launcher names them, and the options that mount those on this machine."""
    names, mounts = [], []
    for one in plan.workload.adapters:
        if one.is_on_hub:
            names.append(one.path)
            continue
        names.append(f"{one.served_name}={MOUNT}/{one.served_name}")
        mounts += ["--volume", f"{one.path}:{MOUNT}/{one.served_name}:ro"]
    return names, mounts


def _has_kernels(label: str, method: str, target: ComputeTarget) -> bool:
    if method in ("awq", "gptq") or (label == "FP8" and "fp8" in target.features):
        return True
    # Marlin kernels: only for NVIDIA, from compute capability 8.0 on.
    return target.device == "cuda" and (target.capability is None or target.capability >= (8, 0))


def _get_quantize_value(plan: Plan) -> str | None:
    if plan.weights.made == "while loading":
        return {"FP8": "fp8", "INT8": "eetq", "NF4": "bitsandbytes-nf4"}.get(plan.weights.label)
    method = identify_quantization(plan.model)[1]
    # AWQ's own kernels are not built for ROCm; those for GPTQ load the same weights (layers/gptq/__init__.py).
    return "gptq" if method == "awq" and plan.settings.device == "rocm" else QUANTIZE_VALUES.get(method)


ENGINE = Tgi()
