"""mistral.rs: GGUF and Hugging Face weights, one small program."""

from __future__ import annotations

from bedplate.engines.base import (
    OWN_ENVIRONMENT,
    SIXTEEN_BIT,
    ComputeTarget,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    find_known_failure,
    plan_published_download,
)
from bedplate.engines.knobs import apply_tuned_options, keep_tunable, make_threads_knob, uses_engine_defaults
from bedplate.engines.quantizations import make_rows
from bedplate.engines.shipped import SERVER, SERVER_PACKAGES, BedplateServedEngine
from bedplate.engines.traits import AdviceFlags, EstimateTraits, ServerFeatures, TableNames
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
from bedplate.values.tuning import SettingChoice, TunableSetting

ISQ = {"Q8_0": "Q8_0", "Q6_K": "Q6K", "Q5_K_M": "Q5K", "Q4_K_M": "Q4K"}
"""Types of in-situ quantization, by the most similar GGUF type."""
WHEELS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
"""Compute capabilities for which its release has wheels."""
RELEASE = "https://github.com/EricLBuehler/mistral.rs/releases/expanded_assets/v{}"
LOSSLESS = frozenset(["BF16", "F16", "F32", "Q8_0"])
# `model_type` values of Architecture in the stubs of the wheel.
_FOLDERS = """
mistral gemma mixtral llama phi phi3 qwen2 gemma2 starcoder2 phimoe deepseek_v2 deepseek_v3 qwen3 glm4 glm4_moe
glm4_moe_lite qwen3_moe smollm3 granitemoehybrid gpt_oss qwen3_next lfm2 lfm2_moe
"""
FOLDERS = frozenset(_FOLDERS.split())
# mistralrs-core/src/gguf/normal_registry.rs, by the names in GGUF files.
_FILES = """
llama mistral3 gemma gemma2 phi2 phi3 phimoe qwen2 qwen3 qwen3moe qwen3next qwen35moe starcoder2 deepseek2 glm4 glm4moe
smollm3 granite granitemoe granitehybrid gpt-oss hunyuan-dense hunyuan-moe lfm2 lfm2moe
"""
FILES = frozenset(_FILES.split())

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"Unknown (?:normal-model )?GGUF architecture `(?P<what>[^`]+)`",
        KnownFailure(
            message="this version of mistral.rs does not support the architecture {what}",
            hint="use --engine llama.cpp, which may support it",
        ),
    ),
    (
        r"appears to be a Mistral model, but the file does not encode",
        KnownFailure(
            message="mistral.rs does not load GGUF files of Mistral models without the original configuration",
            hint="specify the folder of the original model, or use --engine llama.cpp",
        ),
    ),
    (
        r"bedplate-engine: (?P<what>.+ is not a GGUF file)",
        KnownFailure(message="{what}", hint="`bedplate inspect FILE` shows the type of a file"),
    ),
    (
        r"bedplate-engine: the model file is damaged|GGUF tensor .+ outside file length",
        KnownFailure(
            message="the model file is damaged: it is shorter than its header says",
            hint="download it again, and check that the disk is not full",
        ),
    ),
    (
        r"bedplate-engine: mistral\.rs cannot load the model: (?P<what>.+)",
        KnownFailure(
            message="mistral.rs cannot load this model: {what}",
            hint="try another engine: bedplate plan --engine llama.cpp",
        ),
    ),
)


QUANTIZATIONS = tuple(
    row
    for device in ("cpu", "cuda", "metal")
    for row in make_rows(
        "mistralrs-quant/src/gguf/mod.rs of 0.9.5", device, ["gguf", *(f"{one} while loading" for one in ISQ)]
    )
)


class MistralRs(BedplateServedEngine):
    id = "mistral.rs"
    name = "mistral.rs"
    spellings = ("mistralrsserver",)
    version = "0.9.5"
    recipe = EnvironmentRecipe(
        packages=("mistralrs==0.9.5", "jinja2==3.1.6", *SERVER_PACKAGES),
        programs=(("mistralrs-server", "mistralrs_server.py"), *SERVER),
        download_bytes=27_000_000,
        disk_bytes=87_000_000,
        check="import mistralrs, jinja2, uvicorn, starlette; mistralrs.Runner",
    )
    formats = ("gguf", "safetensors")
    vendors = ("nvidia", "apple")
    cpu = True
    systems = ("linux", "macos", "windows")
    # PyPI has Metal and CPU wheels. CUDA wheels are release assets by toolkit and GPU.
    built_for = ("cpu", "metal")
    capability = WHEELS[0]
    effort = 1
    # The runner of its package rejects concurrent requests, and on CPUs batched prompts fail.
    max_slots = 1
    # mistralrs 0.9.5: Which.Lora and Which.GGUF have adapters; shipped/mistralrs_server.py uses neither.
    no_adapters = "bedplate's server for it loads no LoRA adapters"
    features = Features(
        batching="none in its Python package; continuous in its own server",
        kv_cache="prefix cache; paged on CUDA and Metal",
        quantization="GGUF; 2 to 8 bits while loading",
        hardware="CPU, NVIDIA, Apple Silicon",
        structured_output="JSON schema (llguidance)",
        multi_node="none in its Python package",
        server="bedplate's; its own must be built from source",
        maintained="active",
        source="mistralrs 0.9.5 (November 2026): the stubs of the wheel, README; tested on a CPU",
    )
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=True, logprobs=True, choices="one",
        source="engines/shipped/mistralrs_server.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=220_000_000,
        device_bytes=500_000_000,
        spread=0.8,
        source="measured with SmolLM2 on a CPU, without weights; device memory is assumed",
    )
    quantizations = QUANTIZATIONS
    strength = "a small portable program for one user"
    table_names = TableNames(words=("mistral.rs", "mistralrs"), rank=5)
    estimate = EstimateTraits(kernels="gguf", one_stream=True, plain_products=True, skips_borrowing_layers=True)
    flags = AdviceFlags(
        slots="--slots",
        threads="--threads",
    )

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        known = FILES if model.format == "gguf" else FOLDERS
        if model.format != "facts" and model.architecture not in (*known, "unknown"):
            return self.make_refusal(
                "impossible", f"does not support the architecture {model.architecture}", "an engine that supports it"
            )
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            stored = model.quantization or "these"
            return self.make_refusal(
                "impossible", f"does not load {stored} weights on this device", "the same model in BF16, or as GGUF"
            )
        return None

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if model.format == "gguf":
            # It has kernels for the plain and the K types, not for the I types.
            return (
                ()
                if label.startswith(("IQ", "MXFP4", "NVFP4"))
                else (Weights(label=label, made="as it is", format="gguf"),)
            )
        if label not in SIXTEEN_BIT:
            return ()
        labels = ("Q8_0",) if workload.precision_sensitive else tuple(ISQ)
        return (
            Weights(label=label, made="as it is", format="safetensors"),
            *(Weights(label=one, made="while loading", format="safetensors") for one in labels),
        )

    def get_library_tokens(
        self, backend: str, family: str, half: bool, build: int | None = None, year: int | None = None
    ) -> int | None:
        # cuBLAS multiplies weights that are not quantized; mistral.rs has its own kernels for the others.
        return 2 if half and backend == "cuda" else None

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        chosen = super().settle(hardware, model, workload)
        if chosen.device == "cpu":
            return replace_fields(chosen, threads=hardware.cpu.allowed_physical_cores)
        target = self.find_target(hardware)
        if chosen.device != "cuda" or target is None or target.capability is None:
            return chosen
        return replace_fields(chosen, compute_capability=".".join(map(str, target.capability)))

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = self.make_server_argv("mistralrs-server", plan, port)
        if plan.weights.made == "while loading":
            argv += ["--isq", ISQ[plan.weights.label]]
        if plan.settings.threads is not None and not uses_engine_defaults(plan.settings):
            argv += ["--threads", str(plan.settings.threads)]
        env = {"HF_HUB_OFFLINE": "1"} if plan.model.files else {}
        return apply_tuned_options(
            Launch(
                argv=tuple(argv),
                env=env,
                prepare=(*self._plan_installation(plan), *plan_published_download(plan)),
            ),
            plan.settings,
        )

    def list_requirements(self, settings: Settings) -> tuple[str, ...]:
        usual = super().list_requirements(settings)
        if settings.device != "cuda":
            return usual
        _, *rest = usual
        engine = f"mistralrs=={_choose_wheel(settings.compute_capability)}"
        return ("--find-links", RELEASE.format(self.version), engine, *rest)

    def _plan_installation(self, plan: Plan) -> tuple[Preparation, ...]:
        if plan.settings.device != "cuda":
            return self.plan_installation(plan)
        words = self.list_requirements(plan.settings)
        what = f"{' '.join(words[2:])}, from its release for CUDA"
        argv = ("uv", "pip", "install", *words)
        return (Preparation(kind="install", what=what, where=OWN_ENVIRONMENT, argv=argv),)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        found = [_make_weights_knob(plan)]
        if plan.settings.device == "cpu":
            cores, source = hardware.cpu.allowed_physical_cores, "rayon and candle, which it uses"
            found.append(make_threads_knob(plan, cores, own="one per core", source=source, prior=0.3))
        return keep_tunable(found)

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES) or super().explain(log)


def _choose_wheel(capability: str | None) -> str:
    """The version of the wheel for a GPU, as named in its guide (0.9.2).

    The oldest toolkit that supports the GPU also works with newer drivers, and a wheel for one compute capability also
    works on later GPUs of the same generation.
    """
    card = tuple(map(int, capability.split("."))) if capability else WHEELS[0]
    fitting = [one for one in WHEELS if one[0] == card[0] and one <= card]
    major, minor = max(fitting, default=WHEELS[0])
    toolkit = "cuda129" if (major, minor) == (12, 1) else "cuda128"
    return f"{MistralRs.version}+{toolkit}.sm{major}{minor}"


def _make_weights_knob(plan: Plan) -> TunableSetting:
    """The setting for in-situ quantization, which is repeated at every start."""
    now = plan.weights.label
    known = (now, *(one for one in ISQ if one != now)) if plan.weights.format == "safetensors" else (now,)
    return TunableSetting(
        name="weights", meaning="type to which weights are quantized while loading", now=now,
        own="as stored", alone=True,
        choices=tuple(SettingChoice(value=one, options=("--isq", ISQ[one]) if one != now else (),
        lossy=one not in LOSSLESS)
                      for one in known),
        limits=("memory bandwidth", "compute"), risk=("answers", "start"), prior=0.6,
        source="mistralrs 0.9.5: in_situ_quant",
    )  # fmt: skip


ENGINE = MistralRs()
