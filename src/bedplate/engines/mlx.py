"""MLX: Apple's array framework for Apple Silicon with unified memory."""

from __future__ import annotations

from bedplate.engines.base import (
    SIXTEEN_BIT,
    ComputeTarget,
    Engine,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    choose_context,
    find_known_failure,
    get_converted_path,
)
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.knobs import (
    apply_tuned_options,
    keep_tunable,
    make_field_choices,
    make_option_choices,
    make_slots_knob,
    uses_engine_defaults,
)
from bedplate.engines.quantizations import make_rows
from bedplate.engines.shared import get_adapter_folder, plan_adapter_downloads
from bedplate.engines.traits import (
    AdapterTraits,
    AdviceFlags,
    ContainerTraits,
    EstimateTraits,
    LaunchOptions,
    PrivatePort,
    ServerFeatures,
    TableNames,
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
from bedplate.values.record import make_estimate
from bedplate.values.tuning import SettingChoice, TunableSetting

BITS = {"8-BIT": 8, "6-BIT": 6, "4-BIT": 4}
ON_CPU = ("F32", "8-BIT")
"""On a CPU fewer bits are not faster, and 4-bit weights with bfloat16 generated wrong text."""
CONVERT_START_S = 6.0
CONVERT_BYTES_S = 200e6
LONG_ANSWER = 4096
PROMPT_CONCURRENCY = 8
"""Default of mlx_lm.server: prompts in one prefill batch."""
ENGINE_DEFAULT_SLOTS, ENGINE_DEFAULT_STEP = 32, 2048
PREFILL_STEPS = (256, 512, 1024, 2048, 4096)
EIGHT = 8
_OPTIONS = "mlx_lm/server.py of 0.32.2: its options"
# The files of mlx_lm/models in mlx-lm 0.32.2, each named after a `model_type`, and the keys of its MODEL_REMAPPING.
_MODEL_TYPES = """
Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4
exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl laguna lfm2
lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo
mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark
nanbeige nanochat nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small
phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5
qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5
stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
mistral llava phi-msft falcon_mamba joyai_llm_flash kimi_k2 qwen2_5_vl minimax_m2 iquestcoder xverse gemma4_unified
deepseek_v41_text
"""
ARCHITECTURES = frozenset(_MODEL_TYPES.split())
# Architectures whose loader dequantizes FP8 weights (`weight_scale_inv`); others ignore the scales.
_FP8_TYPES = """
deepseek_v3 deepseek_v32 glm_moe_dsa kimi_k2 joyai_llm_flash mimo_v2_flash minimax minimax_m2 minimax_m3_vl ministral3
mistral3 mistral4
"""
FP8_ARCHITECTURES = frozenset(_FP8_TYPES.split())
# Quantizations of other tools, repacked while loading: utils.load_model of mlx-lm 0.32.2. It refuses g_idx, which the
# checkpoints of GPTQ have.
REPACKED = ("MXFP4", "NVFP4", "INT4", "AWQ-INT4")

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"Model type (?P<what>[\w.-]+) not supported",
        KnownFailure(
            message="this version of MLX does not support the architecture {what}",
            hint="a newer version may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|\[metal::malloc\]|\[malloc_or_wait\] Unable to allocate",
        KnownFailure(
            message="there is not enough memory for the model and its KV cache",
            hint="reduce the need: --context 4096, --concurrency 1, or fewer bits; or close other programs",
        ),
    ),
    (
        r"No safetensors found in (?P<what>\S+)",
        KnownFailure(
            message="{what} contains no weights",
            hint="specify the folder with config.json and the .safetensors files",
        ),
    ),
    (
        r"unsupported compressed-tensors format '(?P<what>[^']+)'",
        KnownFailure(
            message="MLX does not load weights in the format {what}",
            hint="use the model in BF16, or one in MLX format",
        ),
    ),
    (
        r"Address already in use",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
)


def check_architecture(launch: PlannedLaunch) -> str | None:
    """This version has the model's architecture."""
    if launch.model.architecture in (*ARCHITECTURES, "unknown") or launch.model.format == "facts":
        return None
    return f"MLX does not have the architecture {launch.model.architecture}"


RULE_SOURCES = {"adapters.loaded": "mlx_lm/server.py of 0.32.2: --adapter-path"}
LAUNCH_RULES = (LaunchRule("mlx.architecture", "mlx_lm/models of 0.32.2", check_architecture),)


_PACKED = ("awq", "compressed-tensors", "mxfp4", "mxfp4 experts, fp8", "nvfp4")
QUANTIZATIONS = (
    *make_rows("mlx/backend/metal/kernels/quantized.metal of 0.32.2; mlx_lm/convert.py", "metal", ["mlx"]),
    *make_rows("mlx_lm/utils.py of 0.32.2: load_model", "metal", _PACKED),
    *make_rows("mlx/backend/cpu/quantized.cpp of 0.32.2; mlx_lm/convert.py", "cpu", ["mlx"]),
    *make_rows("mlx_lm/utils.py of 0.32.2: load_model", "cpu", _PACKED),
)


class Mlx(Engine):
    id = "mlx"
    name = "MLX"
    spellings = ("mlxlm", "mlxlmserver", "mlxvlm", "applemlx")
    version = "0.32.2"
    recipe = EnvironmentRecipe(
        # `cpu` has an effect only on Linux; on a Mac the same requirement installs the Metal kernels.
        packages=("mlx-lm[cpu]==0.32.2", "mlx==0.32.2", "transformers==5.22.2"),
        programs=(("mlx-server", "mlx_server.py"),),
        download_bytes=80_000_000,
        disk_bytes=220_000_000,
        check="import mlx.core as mx, mlx_lm.server; assert mx.sum(mx.ones(3)).item() == 3",
        chosen_by_release=("mlx",),
    )
    formats = ("mlx", "safetensors")
    vendors = ("apple",)
    cpu = True
    systems = ("macos", "linux")
    built_for = ("cpu", "metal")
    effort = 1
    features = Features(
        batching="continuous",
        kv_cache="one per request, prefix cache; 8 or 4 bits without batching",
        quantization="2 to 8 bits in groups, MXFP4, NVFP4, MXFP8; AWQ and GPTQ repacked",
        hardware="Apple Silicon; CPU on Linux (slow); NVIDIA needs another wheel, not supported by bedplate",
        structured_output="none",
        multi_node="several Macs with mlx.launch",
        server="mlx_lm.server; not for production, according to its documentation",
        maintained="active",
        source="mlx-lm 0.32.2 (October 2026): mlx_lm/server.py, mlx_lm/utils.py, models/",
    )
    # The server ignores response_format, tool_choice and n.
    server_features = ServerFeatures(
        tools="auto", json_schema=False, json_object=False, logprobs=True, choices="one",
        source="mlx-lm 0.32: server.py, APIHandler",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=150_000_000,
        prefill_tokens=2048,
        mlp_copies=0.0,
        hidden_copies=0.0,
        logits_for_all=True,
        spread=0.5,
        source="published memory peaks of mlx-lm on M4 Max: mainly the logits of one prefill step",
    )
    launch_rules = LAUNCH_RULES
    rule_sources = RULE_SOURCES
    launch_options = LaunchOptions(slots="--decode-concurrency")
    adapters = AdapterTraits(
        most=1,
        names="--adapter-path",
        use="it applies to every request",
        source="mlx_lm/server.py of 0.32.2: --adapter-path; a request for another adapter loads the whole model again; "
        "mlx_lm/tuner/utils.py: load_adapters reads a folder in the format of mlx_lm.lora",
    )
    default_slots = 4
    private_port = PrivatePort(
        key_checked_by="wrapper",
        source="mlx_lm/server.py of 0.32.2 has no option for a key; it is a server of http.server",
    )
    quantizations = QUANTIZATIONS
    strength = "a Mac"
    table_names = TableNames(words=("mlx",), rank=8)
    estimate = EstimateTraits(kernels="mlx", one_stream=True, fp4_products=False, fp8_products=False, grouped_bits=True)
    flags = AdviceFlags(
        slots="--decode-concurrency",
        cache_type="--kv-bits 8",
        batch_tokens="--prefill-step-size",
    )
    container = ContainerTraits(allowed=False)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        if model.architecture not in (*ARCHITECTURES, "unknown") and model.format != "facts":
            return self.make_refusal(
                "impossible", f"does not support the architecture {model.architecture}", "an engine that supports it"
            )
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            stored = model.quantization or "these"
            return self.make_refusal(
                "impossible", f"does not load {stored} weights", "the same model in BF16, or in MLX format"
            )
        return None

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if model.format == "mlx":
            return (Weights(label=label, made="as it is", format="mlx"),)
        if label in REPACKED:
            return (Weights(label=label, made="as it is", format="safetensors"),)
        labels = [
            one for one in _list_target_types(target.device) if not (workload.precision_sensitive and _is_lossy(one))
        ]
        made = tuple(Weights(label=one, made="converted", format="mlx") for one in labels if one != label)
        if label in SIXTEEN_BIT or model.format == "facts":
            as_it_is = Weights(label=label, made="as it is", format="safetensors")
            return made if target.device == "cpu" and label != "F32" else (as_it_is, *made)
        return made if label == "FP8" and model.architecture in FP8_ARCHITECTURES else ()

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # KV caches grow with their requests; only the plan limits them.
        return replace_fields(super().settle(hardware, model, workload), context_tokens=choose_context(model, workload))

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, converted = plan.settings, plan.weights.made == "converted"
        argv = ["mlx-server", "--model", get_converted_path(plan) if converted else plan.model_path]
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        adapter = next(iter(plan.workload.adapters), None)
        if adapter is not None:
            argv += ["--adapter-path", get_adapter_folder(adapter)]
        env = {"HF_HUB_OFFLINE": "1"} if plan.model.files or converted else {}
        steps = (*self.plan_installation(plan), *([_plan_conversion(plan)] if converted else []))
        steps = (*steps, *plan_adapter_downloads(plan))
        if uses_engine_defaults(settings):
            return Launch(argv=tuple(argv), env=env, prepare=steps)
        argv += ["--decode-concurrency", str(settings.slots)]
        argv += ["--prompt-concurrency", str(min(settings.slots, PROMPT_CONCURRENCY))]
        # By default it keeps the last ten conversations of any length; the plan counts the context of all slots.
        bits = 8 if settings.kv_type == "fp8" else 16
        kept = plan.model.compute_kv_bytes(settings.context_tokens, bits) * settings.slots
        argv += ["--prompt-cache-bytes", str(kept)]
        # The limit for requests without one; the server does not know the context length.
        argv += ["--max-tokens", str(max(settings.context_tokens, LONG_ANSWER))]
        if settings.batch_tokens is not None:
            argv += ["--prefill-step-size", str(settings.batch_tokens)]
        if settings.kv_type == "fp8":
            argv += ["--kv-bits", "8"]
        return apply_tuned_options(Launch(argv=tuple(argv), env=env, prepare=steps), settings)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        settings, asked = plan.settings, plan.workload.compute_in_flight()
        step = settings.batch_tokens or ENGINE_DEFAULT_STEP
        readers = min(settings.slots, PROMPT_CONCURRENCY)
        return keep_tunable([
            _make_weights_knob(plan),
            make_slots_knob(plan, (1, asked, 2 * asked), own=ENGINE_DEFAULT_SLOTS, source=_OPTIONS),
            TunableSetting(
                name="prefill-step", meaning="prefill chunk size in tokens", now=str(step),
                own=str(ENGINE_DEFAULT_STEP), own_choice=str(ENGINE_DEFAULT_STEP), ordered=True,
                choices=make_field_choices({*PREFILL_STEPS, step}, "batch_tokens"),
                limits=("compute", "scheduler"), risk=("memory",), prior=0.3, source=_OPTIONS,
            ),
            TunableSetting(
                name="prompts-at-once", meaning="prompts in one prefill batch",
                now=str(readers), own=str(PROMPT_CONCURRENCY), ordered=True,
                choices=make_option_choices({1, max(1, readers // 2), readers}, "--prompt-concurrency"),
                limits=("scheduler", "compute"), risk=("memory",), prior=0.35, source=_OPTIONS,
            ),
        ])  # fmt: skip

    def get_draft_options(self, model: str) -> tuple[str, ...]:
        return ("--draft-model", model)

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES)


def _list_target_types(device: Device) -> tuple[str, ...]:
    return ON_CPU if device == "cpu" else tuple(BITS)


def _is_lossy(label: str) -> bool:
    return BITS.get(label, 16) < EIGHT


def _make_weights_knob(plan: Plan) -> TunableSetting:
    now = plan.weights.label
    # Weights that are already quantized are not converted again.
    makes = plan.model.format != "mlx" and now in (*SIXTEEN_BIT, *BITS)
    made = [label for label in _list_target_types(plan.settings.device) if label != now] if makes else []
    return TunableSetting(
        name="weights", meaning="bits per weight; converted from the model once, and kept", now=now,
        own="as stored", alone=True,
        choices=(SettingChoice(value=now), *(SettingChoice(value=one, weights=one, weights_format="mlx",
        lossy=_is_lossy(one))
                                      for one in made)),
        limits=("memory bandwidth", "compute"), risk=("answers", "memory"), prior=0.6,
        source="mlx_lm.convert --help of 0.32.2",
    )  # fmt: skip


def _plan_conversion(plan: Plan) -> Preparation:
    bits, result, on_cpu = BITS.get(plan.weights.label), get_converted_path(plan), plan.settings.device == "cpu"
    argv = ["mlx_lm.convert", "--hf-path", plan.model_path, "--mlx-path", result]
    if bits is not None:
        argv += ["--quantize", "--q-bits", str(bits)]
    if on_cpu:
        # In bfloat16 its CPU kernels were slow and generated wrong text; in float32 the text was right.
        argv += ["--dtype", "float32", *(["--q-group-size", "32"] if bits is not None else [])]
    # Each group has a scale and a bias: 16 bits per 64 weights, on a CPU 32 bits per 32 weights.
    stored_bits = 32.0 if bits is None else bits + (2.0 if on_cpu else 0.5)
    weights = plan.model.parameters + plan.model.vision_parameters
    return Preparation(
        kind="convert",
        what=f"{plan.model.name} to {bits or 32} bits",
        where=result,
        disk_bytes=round(weights * stored_bits / 8),
        seconds=make_estimate(
            CONVERT_START_S + 2 * weights / CONVERT_BYTES_S,
            0.6,
            "measured: 135 million weights in 8 s on two busy cores; larger models at disk speed",
        ),
        argv=tuple(argv),
    )


ENGINE = Mlx()
