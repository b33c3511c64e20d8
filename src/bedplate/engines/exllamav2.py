"""ExLlamaV2: quantized models on one to four RTX cards."""

from __future__ import annotations

from bedplate.engines.base import (
    SIXTEEN_BIT,
    ComputeTarget,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    choose_context,
    find_known_failure,
    get_converted_path,
    get_source_folder,
    plan_download,
    plan_published_download,
)
from bedplate.engines.exllamav3 import count_compile_jobs, get_kernel_env, make_module_argv, plan_compilation
from bedplate.engines.knobs import apply_tuned_options, keep_tunable, make_cache_knob
from bedplate.engines.quantizations import make_rows
from bedplate.engines.shipped import SERVER, SERVER_PACKAGES, BedplateServedEngine
from bedplate.engines.traits import (
    AdviceFlags,
    ContainerTraits,
    EstimateTraits,
    LoadingTraits,
    ServerFeatures,
    TableNames,
)
from bedplate.engines.visible import show_first
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
from bedplate.values.record import make_estimate
from bedplate.values.tuning import TunableSetting

BPW = ("8.0BPW", "6.0BPW", "5.0BPW", "4.0BPW", "3.5BPW", "3.0BPW", "2.5BPW")
CONVERT_WEIGHTS_S, CONVERT_LAYER_S, CONVERT_START_S = 2.5e6, 5.0, 12.0
# Without flash-attn, version 0.3.2 uses PyTorch's attention for prefill and calibration without a causal mask (attn.py,
# _attn_torch), and generates nonsense. Its plain attention has the mask.
MASKED = {"EXLLAMA_NO_SDPA": "1"}
WIDTH_STEP = 32
COMPILE_CORE_S, COMPILE_BASIS = 2160.0, "measured on a machine with an H200: 2.3 min with 16 jobs"
# `model_type` values of the classes in exllamav2/architecture.py of 0.3.2. It loads any other class as a Llama, and
# then generates nonsense.
_MODEL_TYPES = """
cohere cohere2 dbrx gemma gemma2 gemma3 glm4 gpt2 gpt_bigcode granite index internlm2 llama minicpm mistral mistral3
mixtral orion phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_moe starcoder2
"""
ARCHITECTURES = frozenset(_MODEL_TYPES.split())

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"Insufficient VRAM for model and cache|torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory",
        KnownFailure(
            message="there is not enough GPU memory for the model and its KV cache",
            hint="reduce the need: --context 4096, or fewer bits per weight",
        ),
    ),
    (
        r"CUDA_HOME environment variable is not set|nvcc: not found|No such file or directory: '[^']*nvcc'",
        KnownFailure(
            message="ExLlamaV2 compiles its kernels on this machine, and the CUDA compiler nvcc is missing",
            hint="install a C++ compiler and the CUDA toolkit that matches the driver",
        ),
    ),
    (
        r"Error building extension 'exllamav2_ext'",
        KnownFailure(
            message="the compilation of its kernels failed",
            hint="see the first error in the log; if memory ran out, set MAX_JOBS to a smaller number",
        ),
    ),
    (
        r"## Could not find (?P<what>\S+)\.\* in model|Missing any of the following keys",
        KnownFailure(
            message="tensors that ExLlamaV2 expects for this architecture are missing from the folder",
            hint="use --engine exllamav3: the model may be newer than the last release of ExLlamaV2, July 2025",
        ),
    ),
)


QUANTIZATIONS = make_rows("exllamav2/ext.py of 0.3.2: make_q_matrix", "cuda", ["exl2", "gptq"])


class ExLlamaV2(BedplateServedEngine):
    id = "exllamav2"
    name = "ExLlamaV2"
    spellings = ("exllama2", "exl2")
    # The major version is part of the name: ExLlamaV2 and ExLlamaV3 have different formats.
    spelling_pattern = r"\s*exllama[\s_v-]*2\.[0-9]"
    version = "0.3.2"
    recipe = EnvironmentRecipe(
        packages=("exllamav2==0.3.2", "torch==2.11.0", "tokenizers==0.22.2", "jinja2==3.1.6", *SERVER_PACKAGES),
        programs=(("exllamav2-server", "exllamav2_server.py"), *SERVER),
        download_bytes=3_000_000_000,
        disk_bytes=7_000_000_000,
        # Importing it compiles its kernels, which is a separate step.
        check="import importlib.util as u, torch, uvicorn, starlette; "
        "assert torch.cuda.is_available() and u.find_spec('exllamav2')",
    )
    formats = ("exl2",)
    converts = ("safetensors",)
    vendors = ("nvidia",)
    built_for = ("cuda",)
    systems = ("linux", "windows")
    # The oldest target of PyTorch 2.11's wheels.
    capability = (7, 5)
    ways = ("pipeline",)
    loading = LoadingTraits(
        divides="by memory", source="model.py of 0.3.2: load_autosplit fills a card before the next one"
    )
    effort = 2
    reuses_prefixes = False
    # exllamav2 0.3.2: ExLlamaV2Lora; shipped/exllamav2_server.py does not use it.
    no_adapters = "bedplate's server for it loads no LoRA adapters"
    features = Features(
        batching="none without flash-attn, which has no wheel",
        kv_cache="one sequence; 4, 6 or 8 bits",
        quantization="EXL2: 2 to 8 bits per weight; GPTQ in 4 bits",
        hardware="NVIDIA",
        structured_output="none",
        multi_node="none",
        server="bedplate's",
        maintained="no release since July 2025; replaced by ExLlamaV3",
        source="exllamav2 0.3.2 (July 2025): architecture.py, generator/dynamic.py, conversion/convert_exl2.py",
    )
    server_features = ServerFeatures(
        tools="auto", json_schema=False, json_object=False, logprobs=False, choices="one",
        source="engines/shipped/exllamav2_server.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=1_500_000_000,
        device_bytes=600_000_000,
        prefill_tokens=2048,
        spread=0.6,
        source="ExLlamaV2: default of max_input_len; driver context and kernels assumed as for PyTorch",
    )
    max_slots = 1
    quantizations = QUANTIZATIONS
    strength = "one to four RTX cards, one user"
    table_names = TableNames(words=("exllama", "exl2", "tabbyapi"), rank=7)
    estimate = EstimateTraits(kernels="exllama", one_stream=True, plain_products=True)
    flags = AdviceFlags(
        slots="--slots",
        cache_type="--cache-bits 8",
    )
    # Its kernels are compiled at the first start, which takes minutes on several cores.
    container = ContainerTraits(start_s=900.0)
    compiles_kernels = True

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        if model.architecture not in (*ARCHITECTURES, "unknown") and model.format != "facts":
            return self.make_refusal(
                "impossible",
                f"does not support the architecture {model.architecture}",
                "exllamav3, which may support it",
            )
        if odd := _list_odd_widths(model):
            why = f"needs layer sizes that are multiples of {WIDTH_STEP}, and this model has {odd}"
            return self.make_refusal("impossible", why, "another model, or llama.cpp, which supports any size")
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            why = f"loads 16-bit or GPTQ weights, not {model.quantization}"
            return self.make_refusal("impossible", why, "the same model in BF16, or as EXL2")
        return None

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        # Known models spell it GPTQ-Int4.
        label = label.upper() if label.upper() == "GPTQ-INT4" else label
        if model.format == "exl2":
            return (Weights(label=label, made="as it is", format="exl2"),)
        if label == "GPTQ-INT4" or (label == "INT4" and _get_quantization_method(model) == "gptq"):
            return (Weights(label=label, made="as it is", format="safetensors"),)
        if label not in SIXTEEN_BIT:
            return ()
        labels = BPW[:1] if workload.precision_sensitive else BPW
        return tuple(Weights(label=one, made="converted", format="exl2") for one in labels)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # Its KV cache is allocated at start-up, so it must hold more than an average request.
        settings = super().settle(hardware, model, workload)
        return replace_fields(
            settings, context_tokens=choose_context(model, workload), threads=count_compile_jobs(hardware)
        )

    def launch(self, plan: Plan, port: int) -> Launch:
        converted, cards = plan.weights.made == "converted", plan.parallelism.pipeline
        argv = self.make_server_argv("exllamav2-server", plan, port)
        if converted:
            argv[argv.index("--model") + 1] = get_converted_path(plan)
        elif plan.weights.published is not None and not plan.model.files:
            argv[argv.index("--model") + 1] = plan.weights.published.folder
        if plan.settings.kv_type == "fp8":
            argv += ["--cache-bits", "8"]
        env = get_kernel_env("exllamav2")
        if cards > 1:
            # It fills one visible card after the other.
            env |= show_first(plan.settings.device, cards)
        compilation = plan_compilation("exllamav2", plan.settings, COMPILE_CORE_S, COMPILE_BASIS)
        steps = [*self.plan_installation(plan), compilation]
        steps += [*plan_download(plan), _plan_conversion(plan)] if converted else plan_published_download(plan)
        return apply_tuned_options(Launch(argv=tuple(argv), env=env, prepare=tuple(steps)), plan.settings)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        # Without flash-attn it computes one request at a time, so there are no batching settings.
        return keep_tunable([make_cache_knob(plan, "cache.py of 0.3.2: ExLlamaV2Cache_Q8")])

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES) or super().explain(log)


def _list_odd_widths(model: Model) -> str:
    """Layer sizes that it does not support. It pads the output of a matrix to 32 (linear.py, pad32), not the input of
    the next one, and packs weights of 3 and 5 bits by 32 rows (cuda/q_matrix.cu)."""
    head = model.head_dim
    if head is None and model.hidden_size and model.num_heads:
        head = model.hidden_size // model.num_heads
    widths = {
        "a hidden size": model.hidden_size,
        "an MLP size": model.intermediate_size,
        "an expert size": model.moe_intermediate_size,
        "a query size": head * model.num_heads if head and model.num_heads else None,
        "a key size": head * model.num_kv_heads if head and model.num_kv_heads else None,
    }
    return " and ".join(f"{what} of {width}" for what, width in widths.items() if width and width % WIDTH_STEP)


def _get_quantization_method(model: Model) -> str:
    return model.quantization_details.method if model.quantization_details else ""


def _plan_conversion(plan: Plan) -> Preparation:
    bits, result = plan.weights.label.removesuffix("BPW"), get_converted_path(plan)
    weights = plan.model.parameters + plan.model.vision_parameters
    kept = 2 * (plan.model.vocab_size or 0) * (plan.model.hidden_size or 0)
    argv = [*make_module_argv("exllamav2", "conversion.convert_exl2", MASKED), "--in_dir", get_source_folder(plan)]
    argv += ["--out_dir", f"{result}-work", "--compile_full", result, "--bits", bits]
    return Preparation(
        kind="convert",
        what=f"{plan.model.name} to {bits} bits per weight",
        where=result,
        # Twice: the working folder keeps the finished layers until the conversion is complete.
        disk_bytes=round(2 * (weights * float(bits) / 8 + kept)),
        seconds=make_estimate(
            CONVERT_START_S + CONVERT_LAYER_S * plan.model.num_layers + weights / CONVERT_WEIGHTS_S,
            0.7,
            "measured on an H200: 203 s for SmolLM2-135M; it measures every layer, then quantizes",
        ),
        argv=tuple(argv),
    )


ENGINE = ExLlamaV2()
