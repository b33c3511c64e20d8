"""ExLlamaV3: EXL3 weights on one to four RTX cards."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.knobs import (
    apply_tuned_options,
    keep_tunable,
    make_cache_knob,
    make_field_choices,
    make_slots_knob,
    uses_engine_defaults,
)
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, make_rows
from bedplate.engines.shipped import SERVER, SERVER_PACKAGES, BedplateServedEngine
from bedplate.engines.traits import (
    AdviceFlags,
    ContainerTraits,
    EstimateTraits,
    LaunchOptions,
    LoadingTraits,
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
    replace_fields,
)
from bedplate.values.record import make_estimate
from bedplate.values.tuning import TunableSetting

ENGINE_DEFAULT_SLOTS, CHUNK, CHUNKS = 256, 2048, (512, 1024, 2048, 4096)
"""Defaults of its generator; the KV cache size has no default."""
GRAPH_BATCH_SIZE = 8
"""Maximum number of requests for which a step is one CUDA graph (MAX_BSZ in modules/attention_fn/bc_attn.py, MAX_BSZN
in modules/mlp.py of 1.6.5)."""
_GRAPHS = "generator/generator.py of 1.6.5: max_batch_size; modules/attention_fn/bc_attn.py: MAX_BSZ; docs/gpu.md"
BPW = ("8.0BPW", "6.0BPW", "5.0BPW", "4.0BPW", "3.5BPW", "3.0BPW", "2.5BPW")
PAGE_TOKENS = 256
WIDTH_STEP = 128
COMPILE_JOBS = 6
BYTES_PER_JOB = 3 << 30
"""Host memory for the compilation of one of its larger files."""
COMPILE_CORE_S, COMPILE_BASIS = 4680.0, "measured on a machine with an H200: 4.5 to 5.4 min with 16 jobs, 13 min with 6"
CONVERT_WEIGHTS_S, CONVERT_LAYER_S, CONVERT_START_S = 7e6, 3.2, 18.0
# `model_type` values of the classes in exllamav3/architecture/architectures.py of 1.6.5, without draft models.
_MODEL_TYPES = """
afmoe apertus arcee bailing_hybrid cohere cohere2 deepseek_v3 deepseek_v4 dots1 ernie4_5 ernie4_5_moe exaone4 gemma2
gemma3 gemma3_text gemma4 gemma4_text gemma4_unified glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa
gpt_oss hy_v3 hyperclovax iquestcoder kimi_k2 kimi_linear laguna lfm2 lfm2_moe lfm2_vl llama mimo mimo_v2 minimax_m2
ministral3 mistral mistral3 mistral4 mixtral muse_glimmer nemotron-nas nemotron_h olmo3 olmo_hybrid phi3 qwen2
qwen2_5_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen4_exp
seed_oss smollm3 solar_open spark2_5 step3p5 step3p7
"""
ARCHITECTURES = frozenset(_MODEL_TYPES.split())
# Version 1.6.5 pads every matrix to multiples of 128 (modules/linear.py, pad_to). Attention, plain MLPs and experts
# trim the padding (trim_padded_out); gated MLPs (modules/mlp.py, GatedMLP), delta nets and short convolutions do not,
# so that their output is wider than the residual that it is added to (modules/transformer.py). The architectures below
# have none of these layers, such as gpt-oss with a hidden size of 2880; all others need a multiple of 128. Head sizes
# and the inner size of the MLP are free: the next matrix is padded in the same way.
_ANY_WIDTH = frozenset(
    ["apertus", "arcee", "gpt_oss", "minimax_m2", "mixtral", "nemotron_h", "qwen3_moe", "qwen3_vl_moe"]
)

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"Insufficient VRAM in split for model and cache|torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory",
        KnownFailure(
            message="there is not enough GPU memory for the model and its KV cache",
            hint="reduce the need: --context 4096, --concurrency 1, or fewer bits per weight",
        ),
    ),
    (
        r"Unknown architecture (?P<what>\w+)",
        KnownFailure(
            message="this version of ExLlamaV3 does not support the architecture {what}",
            hint="a newer version may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"tensor a \((?P<has>\d+)\) must match the size of tensor b \((?P<gets>\d+)\) at non-singleton dimension 2",
        KnownFailure(
            message="ExLlamaV3 pads to multiples of 128: the hidden size is {has}, and its layers return {gets}",
            hint="choose another engine with --engine, or a model whose hidden size is a multiple of 128",
        ),
    ),
    (
        r"CUDA_HOME environment variable is not set|nvcc: not found|No such file or directory: '[^']*nvcc'",
        KnownFailure(
            message="ExLlamaV3 compiles its kernels on this machine, and the CUDA compiler nvcc is missing",
            hint="install a C++ compiler and the CUDA toolkit that matches the driver",
        ),
    ),
    (
        r"Error building extension 'exllamav3_ext'",
        KnownFailure(
            message="the compilation of its kernels failed",
            hint="see the first error in the log; if memory ran out, set MAX_JOBS to a smaller number",
        ),
    ),
)

NO_TENSOR = frozenset(["afmoe", "glm4_moe_lite", "lfm2", "lfm2_moe", "lfm2_vl", "mistral4", "olmo3", "olmo_hybrid",
                       "qwen3_next"])  # fmt: skip
"""Architectures with `supports_tp: False` in architecture/ of 1.6.5."""


EIGHT_BIT_CACHE = EightBitCache(
    bits=8.5,
    rows=(
        SupportedQuantization(method="8 bits", part="cache", device="cuda", source="cache/quant.py of 1.6.5: k_bits"),
    ),
    head_step=32,
)


def check_tensor(launch: PlannedLaunch) -> str | None:
    """Tensor parallelism is only for architectures that implement it."""
    if "--tensor-parallel" not in launch.options or launch.model.architecture not in NO_TENSOR:
        return None
    return f"the architecture {launch.model.architecture} has no tensor parallelism"


def check_width(launch: PlannedLaunch) -> str | None:
    """The hidden size is a multiple of 128, except for architectures that trim the padding."""
    width = launch.model.hidden_size
    if width is None or width % WIDTH_STEP == 0 or launch.model.architecture in _ANY_WIDTH:
        return None
    return f"the hidden size of {width} is not a multiple of {WIDTH_STEP}"


def check_cache_tokens(launch: PlannedLaunch) -> str | None:
    """The cache consists of whole pages."""
    tokens = launch.get_count("--cache-tokens", 0)
    return f"--cache-tokens {tokens} is not a multiple of {PAGE_TOKENS}" if tokens % PAGE_TOKENS else None


def check_architecture(launch: PlannedLaunch) -> str | None:
    """This version has the model's architecture."""
    architecture = launch.model.architecture
    if architecture in (*ARCHITECTURES, "unknown") or launch.model.format == "facts":
        return None
    return f"ExLlamaV3 does not have the architecture {architecture}"


LAUNCH_RULES = (
    LaunchRule("exllamav3.tensor", "model/model.py of 1.6.5: supports_tp", check_tensor),
    LaunchRule("exllamav3.width", "modules/linear.py of 1.6.5: pad_to", check_width),
    LaunchRule("exllamav3.cache", "cache/fp16.py of 1.6.5: max_num_tokens", check_cache_tokens),
    LaunchRule("exllamav3.architecture", "architecture/architectures.py of 1.6.5", check_architecture),
)


QUANTIZATIONS = make_rows("modules/quant/exl3.py of 1.6.5", "cuda", ["exl3"])


class ExLlamaV3(BedplateServedEngine):
    id = "exllamav3"
    name = "ExLlamaV3"
    spellings = ("exllama3", "exl3")
    # The major version is part of the name: ExLlamaV2 and ExLlamaV3 have different formats.
    spelling_pattern = r"\s*exllama[\s_v-]*3\.[0-9]"
    version = "1.6.5"
    recipe = EnvironmentRecipe(
        packages=("exllamav3==1.6.5", "torch==2.11.0", "jinja2==3.1.6", *SERVER_PACKAGES),
        programs=(("exllamav3-server", "exllamav3_server.py"), *SERVER),
        download_bytes=2_900_000_000,
        disk_bytes=6_800_000_000,
        # Importing it compiles its kernels, which is a separate step.
        check="import importlib.util as u, torch, uvicorn, starlette; "
        "assert torch.cuda.is_available() and u.find_spec('exllamav3')",
    )
    formats = ("exl3",)
    converts = ("safetensors",)
    vendors = ("nvidia",)
    built_for = ("cuda",)
    systems = ("linux", "windows")
    # Version 1.6.5 has code for Turing (util/backend.py); PyTorch 2.11's wheels do not support older GPUs.
    capability = (7, 5)
    ways = ("pipeline", "tensor")
    effort = 2
    # README of exllamav3 (2026): LoRA support; shipped/exllamav3_server.py does not use it.
    no_adapters = "bedplate's server for it loads no LoRA adapters"
    features = Features(
        batching="continuous",
        kv_cache="paged, prefix cache; 2 to 8 bits",
        quantization="EXL3: 1 to 8 bits per weight",
        hardware="NVIDIA from Turing on; AMD from source, not tested",
        structured_output="JSON schema (llguidance)",
        multi_node="none",
        server="bedplate's; the project recommends TabbyAPI",
        maintained="active",
        source="exllamav3 1.6.5 (October 2026): README, model_init.py, generator/, architecture/architectures.py",
    )
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=False, logprobs=False, choices="one",
        source="engines/shipped/exllamav3_server.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=1_500_000_000,
        device_bytes=600_000_000,
        prefill_tokens=2048,
        spread=0.6,
        source="ExLlamaV3: default of max_chunk_size; driver context and kernels assumed as for PyTorch",
    )
    launch_rules = LAUNCH_RULES
    loading = LoadingTraits(
        embeds_on_host=True, divides="by memory",
        source="modules/embedding.py of 1.6.5: embeddings are on the CPU; model/model_ls.py of 1.4.1: "
        "_load_autosplit fills a card before the next one",
    )  # fmt: skip
    launch_options = LaunchOptions(context="--context", slots="--slots", cards=("--cards",))
    max_slots = 256
    quantizations = QUANTIZATIONS
    eight_bit_cache = EIGHT_BIT_CACHE
    strength = "one to four RTX cards, one user"
    table_names = TableNames(words=("exllamav3", "exl3"), rank=6)
    estimate = EstimateTraits(kernels="exllama", one_stream=True, plain_products=True)
    flags = AdviceFlags(
        slots="--slots",
        cache_memory="--cache-tokens",
        cache_type="--cache-bits 8",
        batch_tokens="--chunk-tokens",
    )
    # Its kernels are compiled at the first start, which takes minutes on several cores.
    container = ContainerTraits(start_s=900.0)
    compiles_kernels = True

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        if model.architecture not in (*ARCHITECTURES, "unknown") and model.format != "facts":
            return self.make_refusal(
                "impossible", f"does not support the architecture {model.architecture}", "an engine that supports it"
            )
        if model.architecture.startswith("gemma4") and re.search(r"\bE\dB\b", model.name, re.IGNORECASE):
            return self.make_refusal("impossible", "does not support the small E models of Gemma 4", "a larger Gemma 4")
        width = model.hidden_size
        if width is not None and width % WIDTH_STEP and model.architecture not in _ANY_WIDTH:
            why = f"needs a hidden size that is a multiple of {WIDTH_STEP}, and this model's is {width}"
            return self.make_refusal(
                "impossible", why, "a model with such a hidden size; exllamav2 needs a multiple of 32"
            )
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            why = f"has no conversion of {model.quantization} weights that suits this workload"
            return self.make_refusal("impossible", why, "the same model in BF16, or as EXL3")
        return None

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        return layout.tensor == 1 or model.architecture not in NO_TENSOR

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if model.format == "exl3":
            return (Weights(label=label, made="as it is", format="exl3"),)
        # Its converter dequantizes FP8 and MXFP4; it does not read other quantized weights.
        if label not in (*SIXTEEN_BIT, "FP8", "MXFP4"):
            return ()
        labels: tuple[str, ...] = BPW[:1] if workload.precision_sensitive else BPW
        if label == "MXFP4":
            labels = tuple(one for one in labels if float(one.removesuffix("BPW")) <= 5)
        return tuple(Weights(label=one, made="converted", format="exl3") for one in labels)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # Its KV cache is allocated at start-up, so it must hold more than an average request.
        settings = super().settle(hardware, model, workload)
        return replace_fields(
            settings, context_tokens=choose_context(model, workload), threads=count_compile_jobs(hardware)
        )

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, layout = plan.settings, plan.parallelism
        converted = plan.weights.made == "converted"
        argv = self.make_server_argv("exllamav3-server", plan, port)
        if converted:
            argv[argv.index("--model") + 1] = get_converted_path(plan)
        argv += ["--cache-tokens", str(-(-settings.context_tokens // PAGE_TOKENS) * PAGE_TOKENS * settings.slots)]
        if uses_engine_defaults(settings):
            argv[argv.index("--slots") + 1] = str(ENGINE_DEFAULT_SLOTS)
        if (cards := layout.tensor * layout.pipeline) > 1:
            argv += ["--cards", str(cards)]
        if layout.tensor > 1:
            argv += ["--tensor-parallel"]
        if settings.kv_type == "fp8":
            argv += ["--cache-bits", "8"]
        if settings.batch_tokens is not None:
            argv += ["--chunk-tokens", str(settings.batch_tokens)]
        steps = [*self.plan_installation(plan), plan_compilation("exllamav3", settings, COMPILE_CORE_S, COMPILE_BASIS)]
        steps += [*plan_download(plan), _plan_conversion(plan)] if converted else plan_published_download(plan)
        env = get_kernel_env("exllamav3")
        if not uses_engine_defaults(settings):
            # Token embeddings are computed on the host. For larger batches PyTorch uses all cores, which then spin:
            # slower, with eight busy cores (docs/gpu.md).
            env["OMP_NUM_THREADS"] = "1"
        return apply_tuned_options(Launch(argv=tuple(argv), env=env, prepare=tuple(steps)), settings)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        settings, asked = plan.settings, plan.workload.compute_in_flight()
        chunk = settings.batch_tokens or CHUNK
        found = make_slots_knob(plan, {1, GRAPH_BATCH_SIZE, asked, 2 * asked}, own=None, source=_GRAPHS)
        # With more requests kernels are launched one by one, and the GPU waits for the launches.
        crowded = settings.slots > GRAPH_BATCH_SIZE
        return keep_tunable([
            replace_fields(found, first=(str(GRAPH_BATCH_SIZE),), prior=0.7) if crowded else found,
            TunableSetting(
                name="chunk", meaning="prefill chunk size in tokens", now=str(chunk), own=str(CHUNK),
                own_choice=str(CHUNK), ordered=True, risk=("memory",), prior=0.25, limits=("compute", "scheduler"),
                choices=make_field_choices({*CHUNKS, chunk}, "batch_tokens"),
                source="generator/generator.py of 1.6.5: max_chunk_size",
            ),
            make_cache_knob(plan, "cache/ of 1.6.5: CacheLayer_quant"),
        ])  # fmt: skip

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES) or super().explain(log)


def count_compile_jobs(hardware: Hardware) -> int:
    """Number of parallel compiler processes for the available cores and memory."""
    most = hardware.memory.available_bytes // BYTES_PER_JOB
    return max(1, min(int(hardware.cpu.allowed_cores), most))


def get_kernel_env(package: str) -> dict[str, str]:
    """The environment variable for the folder of the compiled kernels, relative to the working directory."""
    return {"TORCH_EXTENSIONS_DIR": _get_kernel_folder(package)}


def plan_compilation(package: str, settings: Settings, core_seconds: float, basis: str) -> Preparation:
    """The step that compiles the package's kernels, which the first request would otherwise wait for."""
    jobs = settings.threads or COMPILE_JOBS
    where = _get_kernel_folder(package)
    lines = (*_set_kernel_folder(package), f"import {package}")
    return Preparation(
        kind="build",
        what=f"CUDA kernels of {package}; needs nvcc and a C++ compiler",
        where=where,
        seconds=make_estimate(core_seconds / jobs, 0.5, basis),
        disk_bytes=500_000_000,
        argv=("env", f"MAX_JOBS={jobs}", "python", "-c", "; ".join(lines)),
    )


def make_module_argv(package: str, module: str, env: Mapping[str, str] | None = None) -> list[str]:
    """A command like `python -m` that uses the compiled kernels; otherwise the import would compile them again."""
    also = [f'os.environ["{name}"] = "{value}"' for name, value in (env or {}).items()]
    run = ("import runpy", f'runpy.run_module("{package}.{module}", run_name="__main__")')
    lines = (*_set_kernel_folder(package), *also, *run)
    return ["python", "-c", "; ".join(lines)]


def _set_kernel_folder(package: str) -> tuple[str, ...]:
    return "import os", f'os.environ["TORCH_EXTENSIONS_DIR"] = os.path.abspath("{_get_kernel_folder(package)}")'


def _get_kernel_folder(package: str) -> str:
    return f"{package}-kernels"


def _plan_conversion(plan: Plan) -> Preparation:
    bits, result = plan.weights.label.removesuffix("BPW"), get_converted_path(plan)
    model = plan.model
    weights = model.parameters + model.vision_parameters
    # The embedding is not quantized.
    kept = 2 * (model.vocab_size or 0) * (model.hidden_size or 0)
    argv = [*make_module_argv("exllamav3", "conversion.convert_model"), "--in_dir", get_source_folder(plan)]
    argv += ["--work_dir", f"{result}-work", "--out_dir", result, "--bits", bits]
    return Preparation(
        kind="convert",
        what=f"{model.name} to {bits} bits per weight",
        where=result,
        # Twice: the working folder keeps the finished layers until the conversion is complete.
        disk_bytes=round(2 * (weights * float(bits) / 8 + kept)),
        seconds=make_estimate(
            CONVERT_START_S + CONVERT_LAYER_S * model.num_layers + weights / CONVERT_WEIGHTS_S,
            0.7,
            "its README: a few hours for 70 B on one GPU; measured on an H200: 134 s for 30 small layers, 26 s for 2",
        ),
        argv=tuple(argv),
    )


ENGINE = ExLlamaV3()
