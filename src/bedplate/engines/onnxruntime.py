"""ONNX Runtime: portable across vendors, and for models other than LLMs."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from bedplate.engines.base import (
    SIXTEEN_BIT,
    ComputeTarget,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    find_known_failure,
    get_converted_path,
    get_source_folder,
    plan_download,
)
from bedplate.engines.knobs import (
    apply_tuned_options,
    keep_tunable,
    make_slots_knob,
    make_threads_knob,
    uses_engine_defaults,
)
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
from bedplate.values.decision import Device
from bedplate.values.record import make_estimate
from bedplate.values.tuning import SettingChoice, TunableSetting

PRECISIONS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "INT8": "int8", "INT4": "int4"}
"""Values of the GenAI builder's --precision."""
BYTES_PER_WEIGHT = {"F32": 4.0, "BF16": 2.0, "F16": 2.0, "INT8": 1.13, "INT4": 0.64}
"""Integer weights have a 32-bit scale per block of 32; from the file sizes of SmolLM2."""
CPU_TYPES, GPU_TYPES = ("F32", "INT8", "INT4"), ("BF16", "INT8", "INT4")
ENCODER_SLOTS = 32
"""Concurrent requests to an encoder on a GPU if no load is specified."""
BUILD_WEIGHTS_S = 30e6
BUILD_START_S = 20.0
# `model_type` values of the architectures that the builder supports (models/builder.py of 0.18.0).
_WRITERS = """
chatglm ernie4_5 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_unified gpt_oss granite granitemoehybrid
hunyuan_v1_dense internlm2 lfm2 lfm2_moe lfm2_vl llama mistral mistral3 nemotron olmo phi phi3 phimoe phi3small phi3_v
phi4mm qwen2 qwen2_5_vl qwen3 qwen3_vl qwen3_5 qwen3_5_moe smollm3
"""
WRITERS = frozenset(_WRITERS.split())
# Encoders that Transformers supports without remote code; the exporter checks each result.
_READERS = "albert bert camembert deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta"
READERS = frozenset(_READERS.split())
RECIPE = EnvironmentRecipe(
    # The packages from torch on convert models to ONNX.
    packages=(
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.31.1",
        "tokenizers==0.23.3",
        "jinja2==3.1.6",
        *SERVER_PACKAGES,
        "torch==2.13.0",
        "transformers==5.22.2",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
        "onnxscript==0.7.2",
    ),
    programs=(("onnxruntime-server", "onnxruntime_server.py"), ("onnx-export", "onnx_export.py"), *SERVER),
    download_bytes=320_000_000,
    disk_bytes=1_080_000_000,
    check="import onnxruntime, onnxruntime_genai, tokenizers, jinja2, uvicorn, starlette, onnx_ir, torch, transformers",
)
_ON_CUDA = {"onnxruntime-genai": "onnxruntime-genai-cuda", "onnxruntime": "onnxruntime-gpu"}
CUDA_RECIPE = msgspec.structs.replace(
    RECIPE,
    packages=tuple(
        f"{_ON_CUDA.get(name, name)}=={version}"
        for name, _, version in (one.partition("==") for one in RECIPE.packages)
    ),
    download_bytes=3_000_000_000,
    disk_bytes=7_500_000_000,
)

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"bedplate-engine: there is no \.onnx file in (?P<what>.+)",
        KnownFailure(message="{what} contains no .onnx file", hint="specify the folder with the .onnx files"),
    ),
    (
        r"bedplate-engine: this model has inputs other than text: (?P<what>.+)",
        KnownFailure(
            message="the model has inputs other than text: {what}",
            hint="use an ONNX model that generates, embeds or classifies text",
        ),
    ),
    (
        r"bedplate-engine: (?P<what>.+) has no tokenizer\.json",
        KnownFailure(
            message="{what} has no tokenizer.json",
            hint="copy the tokenizer files of the original model to the folder of the .onnx file",
        ),
    ),
    (
        r"Protobuf parsing failed|External data path does not exist|External data path validation failed",
        KnownFailure(
            message="the model file is damaged, or its external data is missing",
            hint="download it again, including the .onnx.data files",
        ),
    ),
    (
        r"(?:[Uu]nsupported model IR version|is not a registered function/op|opset \d+ is under development)",
        KnownFailure(
            message="the model needs another version of ONNX Runtime",
            hint="build it again with `onnxruntime_genai.models.builder`, or update bedplate",
        ),
    ),
)


QUANTIZATIONS = tuple(
    row
    for device in ("cpu", "cuda")
    for row in make_rows("src/python/py/models/builder.py of 0.18.0: precision", device, ["onnx"])
)


class OnnxRuntime(BedplateServedEngine):
    id = "onnxruntime"
    name = "ONNX Runtime"
    spellings = ("onnx", "ort", "onnxrt", "ortgenai", "onnxruntimegenai", "microsoftonnxruntime")
    version = "0.18.0"
    recipe = RECIPE
    formats = ("onnx",)
    converts = ("safetensors",)
    vendors = ("nvidia",)
    cpu = True
    systems = ("linux", "macos", "windows")
    # The oldest target of CUDA 13.
    capability = (7, 5)
    tasks = ("generate", "embed", "classify", "other")
    effort = 2
    reuses_prefixes = False
    # onnxruntime-genai 0.18.0: Adapters; shipped/onnxruntime_server.py does not use it.
    no_adapters = "bedplate's server for it loads no LoRA adapters"
    features = Features(
        batching="continuous with a paged cache (CUDA, WebGPU); interleaved requests on CPUs",
        kv_cache="fixed size per request; paged on CUDA",
        quantization="INT4 and INT8, converted by its builder",
        hardware="CPU, NVIDIA; other vendors with additional packages",
        structured_output="JSON schema (llguidance)",
        multi_node="none",
        server="bedplate's",
        maintained="active",
        source="onnxruntime-genai 0.18.0 (November 2026): its Python API, models/builder.py; tested on a CPU",
    )
    server_features = ServerFeatures(
        tools="forced", json_schema=True, json_object=True, logprobs=True, choices="one",
        source="engines/shipped/onnxruntime_server.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=190_000_000,
        device_bytes=500_000_000,
        mlp_copies=3.0,
        spread=0.5,
        source="measured with SmolLM2 in INT4 and F32 on a CPU, without weights; device memory is assumed",
    )
    default_slots = 4
    quantizations = QUANTIZATIONS
    strength = "hardware of several vendors, or models other than LLMs"
    table_names = TableNames(words=("onnx",), rank=10)
    estimate = EstimateTraits(kernels="eager", one_stream=True)
    flags = AdviceFlags(
        slots="--slots",
        threads="--threads",
    )
    readers: ClassVar[frozenset[str]] = READERS

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        reads = _is_encoder(model, workload)
        known = self.readers if reads else WRITERS
        if model.format == "safetensors" and model.architecture not in (*known, "unknown"):
            why = f"its {'exporter' if reads else 'builder'} does not support the architecture {model.architecture}"
            return self.make_refusal("impossible", why, "the same model as ONNX")
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            return self.make_refusal(
                "impossible", f"cannot convert {model.quantization} weights", "the same model in BF16, or as ONNX"
            )
        return None

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "F32"
        if model.format == "onnx":
            return (Weights(label=label, made="as it is", format="onnx"),)
        if model.quantization is not None and label not in SIXTEEN_BIT:
            return ()
        if _is_encoder(model, workload):
            # On a GPU in half precision; CPUs compute only in 32 bits.
            half = target.device == "cuda" and not workload.precision_sensitive
            kinds = ("F16", "F32") if half else ("F32",)
            return tuple(Weights(label=one, made="converted", format="onnx") for one in kinds)
        # On CPUs it only computes in 32 bits: 16-bit weights would be converted.
        widest = ("F32",) if target.device == "cpu" else (label if label in ("BF16", "F16") else "BF16",)
        labels = (*widest, "INT8") if workload.precision_sensitive else (*widest, "INT8", "INT4")
        return tuple(Weights(label=one, made="converted", format="onnx") for one in labels)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        chosen = super().settle(hardware, model, workload)
        if _is_encoder(model, workload):
            # It computes one batch after the other; on a GPU, a batch has the texts of all waiting requests.
            asked = chosen.slots if workload.states_load else ENCODER_SLOTS
            chosen = replace_fields(chosen, slots=1 if chosen.device == "cpu" else asked)
        return replace_fields(chosen, threads=hardware.cpu.allowed_physical_cores) if chosen.device == "cpu" else chosen

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, converted = plan.settings, plan.weights.made == "converted"
        argv = self.make_server_argv("onnxruntime-server", plan, port)
        if converted:
            argv[argv.index("--model") + 1] = get_converted_path(plan)
        argv += ["--device", "cuda" if settings.device == "cuda" else "cpu"]
        if settings.threads is not None and not uses_engine_defaults(settings):
            argv += ["--threads", str(settings.threads)]
        steps = [self._plan_installation(plan)]
        if converted:
            reads = _is_encoder(plan.model, plan.workload)
            # The builder accepts a hub id; the exporter needs a folder.
            steps += [*plan_download(plan), _plan_export(plan)] if reads else [_plan_build(plan)]
        return apply_tuned_options(Launch(argv=tuple(argv), prepare=tuple(steps)), settings)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        settings, asked = plan.settings, plan.workload.compute_in_flight()
        found = [_make_weights_knob(plan)]
        if not _is_encoder(plan.model, plan.workload):
            source = "its server interleaves requests on a CPU, and batches them on a GPU"
            found.append(make_slots_knob(plan, (1, asked, 2 * asked), own=None, source=source))
        if settings.device == "cpu":
            cores = hardware.cpu.allowed_physical_cores
            source = "onnxruntime 1.31.1: intra_op_num_threads, session.intra_op.allow_spinning"
            found.append(make_threads_knob(plan, cores, own="one per core", source=source))
            found.append(
                TunableSetting(
                    name="spin", meaning="whether idle threads spin or block", now="on", own="on",
                    choices=(SettingChoice(value="on"), SettingChoice(value="off", options=("--spin", "off"))),
                    limits=("runtime overhead", "compute"), prior=0.2, source=source,
                )
            )  # fmt: skip
        return keep_tunable(found)

    def find_pinned_recipe(self, device: Device) -> EnvironmentRecipe | None:
        return CUDA_RECIPE if device == "cuda" else self.recipe

    def _plan_installation(self, plan: Plan) -> Preparation:
        (step,) = self.plan_installation(plan)
        if plan.settings.device != "cuda":
            return step
        recipe = CUDA_RECIPE.at_version(self.get_version(plan) or self.version)
        return replace_fields(
            step, what=" ".join(recipe.packages), download_bytes=recipe.download_bytes, disk_bytes=recipe.disk_bytes
        )

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES) or super().explain(log)


def _is_encoder(model: Model, workload: Workload) -> bool:
    """Whether the model is an encoder, which generates no text."""
    return "generate" not in (model.task, workload.task) or model.architecture in READERS


def _make_weights_knob(plan: Plan) -> TunableSetting:
    now = plan.weights.label
    makes = plan.weights.made == "converted" and not _is_encoder(plan.model, plan.workload)
    made = [one for one in (CPU_TYPES if plan.settings.device == "cpu" else GPU_TYPES) if one != now] if makes else []
    return TunableSetting(
        name="weights", meaning="weight type; converted from the model once, and kept", now=now,
        own="as built", alone=True,
        choices=(SettingChoice(value=now), *(SettingChoice(value=one, weights=one,
        lossy=one == "INT4") for one in made)),
        limits=("memory bandwidth", "compute"), risk=("answers", "memory"), prior=0.5,
        source="onnxruntime_genai.models.builder of 0.18.0: --precision",
    )  # fmt: skip


def _plan_build(plan: Plan) -> Preparation:
    """The conversion step with GenAI's builder, for models that generate text."""
    cuda = plan.settings.device == "cuda"
    result = get_converted_path(plan)
    argv = ["python", "-m", "onnxruntime_genai.models.builder"]
    here = plan.model.files or plan.model.is_unpacked
    argv += ["--input", plan.model_path] if here else ["--model_name", plan.model.name]
    argv += ["--output", result, "--precision", PRECISIONS[plan.weights.label]]
    argv += ["--execution_provider", "cuda" if cuda else "cpu"]
    if cuda:
        # Without it, no request joins a running batch.
        argv += ["--extra_options", "use_paged_attention=true"]
    return _plan_conversion(plan, f"{plan.model.name} to ONNX in {plan.weights.label}", result, argv)


def _plan_export(plan: Plan) -> Preparation:
    result = get_converted_path(plan)
    argv = ["onnx-export", "--model", get_source_folder(plan), "--output", result]
    argv += ["--precision", "fp16"] if plan.weights.label == "F16" else []
    return _plan_conversion(plan, f"{plan.model.name} to ONNX", result, argv)


def _plan_conversion(plan: Plan, what: str, where: str, argv: list[str]) -> Preparation:
    weights = plan.model.parameters + plan.model.vision_parameters
    seconds = BUILD_START_S + weights / BUILD_WEIGHTS_S
    return Preparation(
        kind="convert",
        what=what,
        where=where,
        disk_bytes=round(weights * BYTES_PER_WEIGHT[plan.weights.label]),
        seconds=make_estimate(seconds, 0.7, "measured: 20 to 40 s for SmolLM2 or a small encoder on two cores"),
        argv=tuple(argv),
    )


ENGINE = OnnxRuntime()
