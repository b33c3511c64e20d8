"""Reads the rows of a table: hardware, model, engine and layout in their usual spellings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from bedplate.decide.estimate.engines import OTHER, get_timed_engine, get_traits
from bedplate.decide.estimate.machine import MachineRates, make_chip_rates
from bedplate.decide.estimate.physics import ModelShape, get_shape
from bedplate.engines import EstimateTraits, load_engines
from bedplate.engines.names import find_engine_id
from bedplate.errors import BedplateError, UsageError
from bedplate.facts.chips import Chip, ChipMatch, find_chip, load_chips
from bedplate.facts.known_models import look_up_model, make_model_from_facts, parse_model_name
from bedplate.published.run_settings import RunSettings, read_run_settings
from bedplate.published.settings import ServingSettings, parse_settings
from bedplate.values import LayerGroup, Model, ModelPart, Parallelism, replace_fields
from bedplate.values.units import format_memory as as_memory

COLUMNS = (
    "row_id", "hardware", "count", "engine", "model", "quantization", "tensor_parallel", "parallelism", "concurrency",
    "prompt_tokens", "output_tokens", "context_depth", "metric", "backend", "engine_version", "scenario", "notes",
)  # fmt: skip
OUTPUT_COLUMNS = ("row_id", "predicted", "low", "high", "refused")
SERVING_METRICS = frozenset({"ttft_ms", "tpot_ms", "output_tok_s_total", "output_tok_s_per_gpu", "samples_s",
                             "latency_ms"})  # fmt: skip
LOCAL_METRICS = frozenset({"decode_tok_s_single", "prefill_tok_s", "total_tok_s_incl_prompt", "peak_memory_gb"})
METRICS = LOCAL_METRICS | SERVING_METRICS
KNOWN_WAYS = re.compile(r"\d|tensor|pipeline|expert|data|layer|split|row|agg|single|none")
UNSAID = frozenset({"", "none", "null", "nan", "n/a", "na", "-", "?", "tbd", "unknown", "default", "auto"})
STRETCHED = 8
"""Largest factor by which a row's tokens may exceed the model's context: contexts are extended, within limits."""
ROUNDED_UP = 1.02
"""Tolerance for rounded sizes of files and memory."""
PLAIN_GGUF_PARAMS = 50e9
"""Up to this size, a GGUF repository without a quantization in its name is mostly Q8_0, above it mostly Q4_K_M."""


class PredictionRefusal(NamedTuple):
    why: str


class PublishedCase(NamedTuple):
    """A row with its hardware, model and engine identified."""

    row_id: str
    metric: str
    engine: str
    """An engine id of bedplate, `lmdeploy`, or `other`."""
    backend: str
    """cuda, rocm, vulkan, metal, cpu or sycl; of llama.cpp's builds also vulkan-amdvlk, rocm-wmma, and with hipBLASLt
    rocm-lt and rocm-wmma-lt."""
    machine: MachineRates
    chip: Chip
    shape: ModelShape
    model: Model
    devices: int | None
    """Total number of accelerators; `None` if not reported."""
    layout: Parallelism
    concurrency: int | None
    """Requests in flight; `None` if the row only says that the load is at saturation."""
    saturated: bool
    prompt_tokens: int | None
    output_tokens: int | None
    depth: int | None
    """Tokens that were in the cache before; `None` if not reported."""
    parallelism: str
    scenario: str
    version: str
    notes: Mapping[str, str]
    texts: Mapping[str, str]
    """The original texts of the row."""
    run: RunSettings = RunSettings()
    """Settings of a run on one machine as far as the row mentions them."""
    settings: ServingSettings = ServingSettings()
    """The engine's settings as far as the row states them."""


class RowPrediction(NamedTuple):
    value: float
    low: float
    high: float


def resolve(row: Mapping[str, str | None]) -> PublishedCase | PredictionRefusal:
    """The row as a case that can be predicted, or why it cannot."""
    texts = {name: (row.get(name) or "").strip() for name in (*COLUMNS, "date")}
    metric = texts["metric"].lower()
    if metric not in METRICS:
        known = ", ".join(sorted(METRICS))
        return PredictionRefusal(f"unknown metric {metric!r}; known: {known}" if metric else "the metric is missing")
    engine = find_engine(texts["engine"])
    if engine is None:
        return PredictionRefusal("the engine is missing")
    notes = parse_notes(texts["notes"])
    if (unread := _find_unreadable(texts)) is not None:
        return PredictionRefusal(unread)
    try:
        chip = _get_chip(texts["hardware"])
        model = _find_model(texts["model"], texts["quantization"], engine, _read_hints(texts, notes))
        count = _parse_count(texts["count"])
        tensor = _parse_count(texts["tensor_parallel"])
        layout = parse_layout(texts["parallelism"], tensor)
    except BedplateError as error:
        return PredictionRefusal(error.message + (f" ({error.hint})" if error.hint else ""))
    devices = count or (layout.tensor * layout.pipeline * layout.data if layout != Parallelism() or tensor else None)
    run = read_run_settings(texts)
    backend = _parse_backend(texts["backend"], chip, texts["engine"], run)
    settings = parse_settings(texts, notes)
    if backend == "cpu" and chip.kind != "cpu":
        chip = _get_cpu(chip)
    concurrency, saturated = _parse_concurrency(texts["concurrency"])
    return PublishedCase(
        row_id=texts["row_id"],
        metric=metric,
        engine=engine,
        backend=backend,
        machine=_get_machine(
            chip.name, (devices or 1) * chip.devices_per_card, run.threads, chip.kind == "cpu", run.instruction_sets
        ),
        chip=chip,
        shape=get_shape(model),
        model=model,
        devices=devices,
        layout=layout,
        concurrency=concurrency,
        saturated=saturated,
        prompt_tokens=_parse_count(texts["prompt_tokens"], zero=True),
        output_tokens=_parse_count(texts["output_tokens"], zero=True),
        depth=_parse_count(texts["context_depth"], zero=True),
        parallelism=texts["parallelism"],
        scenario=texts["scenario"],
        version=texts["engine_version"],
        notes=notes,
        texts=texts,
        run=run,
        settings=settings,
    )


def _find_unreadable(texts: Mapping[str, str]) -> str | None:
    """The error for a cell that cannot be read: ignoring it would predict something else."""
    for name in ("count", "tensor_parallel", "prompt_tokens", "output_tokens", "context_depth"):
        if texts[name].lower() not in UNSAID and _parse_count(texts[name], zero=True) is None:
            return f"{name}: {texts[name][:40]!r} is not a number"
    if texts["concurrency"].lower() not in UNSAID and _parse_concurrency(texts["concurrency"]) == (None, False):
        return f"concurrency: {texts['concurrency'][:40]!r} is neither a number nor a word such as max or saturated"
    if texts["parallelism"].lower() not in UNSAID and not KNOWN_WAYS.search(texts["parallelism"].lower()):
        return f"parallelism: {texts['parallelism'][:40]!r} is not a known layout such as tp8 or pp2"
    return None


def explain_impossible(case: PublishedCase) -> str | None:
    """Why the measurement is impossible, so that a prediction would be meaningless; `None` if it is possible."""
    chip, engine = case.chip, load_engines().get(case.engine)
    on_cpu = chip.kind == "cpu" or case.backend == "cpu"
    name = engine.name if engine is not None else case.engine
    if engine is not None and not (
        engine.cpu if on_cpu else chip.vendor in engine.vendors or chip.kind == "accelerator"
    ):
        return f"{name} does not support {'CPUs' if on_cpu else chip.name}"
    if case.model.task != "generate" and case.metric not in ("prefill_tok_s", "peak_memory_gb", "samples_s"):
        return f"{case.model.name} does not generate text"
    tokens = (case.prompt_tokens or 0) + (case.output_tokens or 0) + (case.depth or 0)
    if case.model.max_context and tokens > STRETCHED * case.model.max_context:
        return f"{tokens:,} tokens, but the context of {case.model.name} is {case.model.max_context:,}"
    count, tensor = _parse_count(case.texts["count"]), _parse_count(case.texts["tensor_parallel"])
    # With a more detailed layout, the count may have another meaning.
    if count is not None and tensor is not None and tensor > count and not case.parallelism:
        return f"tensor_parallel is {tensor}, but count is {count}"
    memory = _get_chip_memory(case.texts["hardware"]) or case.machine.memory_bytes
    if not on_cpu and memory is not None and case.metric not in SERVING_METRICS:
        devices = (case.devices or 1) * chip.devices_per_card
        if case.model.weight_bytes > ROUNDED_UP * memory * devices:
            where = f"{devices} × {chip.name}" if devices > 1 else chip.name
            return f"the weights ({as_memory(case.model.weight_bytes)}) do not fit in {where} with {as_memory(memory)}"
    return None


def find_engine(text: str) -> str | None:
    lowered = text.strip().lower()
    if not lowered:
        return None
    named = find_engine_id(text) or next((engine for word, engine in _list_table_words() if word in lowered), OTHER)
    return get_timed_engine(named)


@lru_cache(maxsize=1)
def _list_table_words() -> tuple[tuple[str, str], ...]:
    """Words that identify an engine in an unusual spelling; the first match counts."""
    named = [(one.table_names, one.id) for one in load_engines().values() if one.table_names is not None]
    named.sort(key=lambda one: one[0].rank)
    return tuple((word, engine) for names, engine in named for word in names.words)


def parse_notes(text: str) -> dict[str, str]:
    """Parse `a=1; b=2`; parts without `=` are ignored."""
    found = {}
    for piece in text.split(";"):
        name, separator, value = piece.partition("=")
        if separator:
            found[name.strip().lower()] = value.strip()
    return found


@lru_cache(maxsize=4096)
def parse_layout(text: str, tensor: int | None = None) -> Parallelism:
    """Parse `tp8 pp1 attn_dp4 moe_ep8`, `TP4,PP2`, `TEP8` or `DEP16`; other texts mean one replica of `tensor` devices.

    For a disaggregated layout, the decode workers count.
    """
    lowered = text.lower()
    decode = lowered.rpartition("decode")[2]

    def find_count(pattern: str) -> int | None:
        found = re.search(pattern, decode)
        return max(1, int(found[1])) if found else None

    stages = find_count(r"(?<![a-z_])pp\s*[-=]?(\d{1,4})") or 1
    if (ranks := find_count(r"\bdep\s*-?(\d{1,4})\b")) is not None:
        return Parallelism(tensor=1, pipeline=stages, data=ranks, expert=ranks, attention_data=ranks)
    if (ranks := find_count(r"\btep\s*-?(\d{1,4})\b")) is not None:
        return Parallelism(tensor=ranks, pipeline=stages, expert=ranks)
    return Parallelism(
        tensor=find_count(r"(?<![a-z_])tp\s*[-=]?(\d{1,4})") or tensor or 1,
        pipeline=stages,
        data=find_count(r"(?<![a-z_])dp\s*[-=]?(\d{1,4})") or 1,
        expert=find_count(r"(?<![a-z])(?:moe_)?ep\s*[-=]?(\d{1,4})") or 1,
        attention_data=find_count(r"attn_dp\s*[-=]?(\d{1,4})") or 1,
    )


@lru_cache(maxsize=4096)
def _get_machine(
    chip_name: str, devices: int, threads: int | None, on_cpu: bool, instruction_sets: tuple[str, ...] = ()
) -> MachineRates:
    chip = load_chips()[chip_name]
    if on_cpu:
        chip = replace_fields(chip, kind="cpu", instruction_sets=instruction_sets or chip.instruction_sets)
    return make_chip_rates(chip, devices, threads=threads)


def _get_chip(text: str) -> Chip:
    return _match_chip(text).chip


def _get_chip_memory(text: str) -> int | None:
    """The memory that the row states, or the largest that the chip is sold with."""
    found = _match_chip(text)
    options = found.chip.memory_options_gib
    return found.memory_bytes or (round(max(options) * 2**30) if options else None)


@lru_cache(maxsize=4096)
def _match_chip(text: str) -> ChipMatch:
    if " / " in text:
        raise UsageError(f"{text!r} is more than one machine")
    plain = re.sub(r"^\s*virtualized\s+|^\s*\[[^\]]*\]\s*", "", text, flags=re.IGNORECASE)
    try:
        return find_chip(plain, guess=True)
    except UsageError:
        # Text in parentheses has details of the same chip, or of the machine.
        outer = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", plain).strip()
        # The name of the board's vendor may precede that of the chip.
        outer = re.sub(r"^.*?(?=\b(?:nvidia|amd|intel|apple|geforce|radeon)\b)", "", outer, flags=re.IGNORECASE)
        if not outer or outer == plain:
            raise
        return find_chip(outer, guess=True)


def _get_cpu(chip: Chip) -> Chip:
    """The CPU of a machine with this accelerator, for rows that ran on the CPU."""
    if chip.cpu is not None:
        return find_chip(chip.cpu, guess=True).chip
    if chip.unified and chip.cores:
        return replace_fields(chip, kind="cpu")
    raise UsageError(f"measured on a CPU, but the CPU of a machine with {chip.name} is unknown")


def _parse_backend(text: str, chip: Chip, engine_text: str, run: RunSettings) -> str:
    lowered = f"{text} {engine_text}".lower()
    if chip.kind == "cpu":
        return "cpu"
    if "vulkan" in lowered:
        return "vulkan-amdvlk" if run.driver == "amdvlk" else "vulkan"
    words = (
        ("rocwmma", "rocm"), ("hip", "rocm"), ("rocm", "rocm"), ("metal", "metal"), ("sycl", "sycl"), ("cuda", "cuda"),
    )  # fmt: skip
    found = next((backend for word, backend in words if word in lowered), None)
    if found is None and re.search(r"\bcpu\b", lowered):
        return "cpu"
    backend = found or {"nvidia": "cuda", "amd": "rocm", "apple": "metal", "intel": "sycl"}.get(chip.vendor, "other")
    if backend != "rocm":
        return backend
    return backend + ("-wmma" if run.rocwmma else "") + ("-lt" if run.hipblaslt else "")


def _parse_concurrency(text: str) -> tuple[int | None, bool]:
    """Requests in flight, and whether the row says that the load is at saturation."""
    found = re.match(r"\s*(\d{1,7})(?:\.0+)?\s*$", _drop_commas(text))
    if found:
        return max(1, int(found[1])), False
    saturated = bool(re.search(r"max|infinite|saturat|offline|inf\b", text, re.IGNORECASE))
    return None, saturated


def _drop_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)


def _parse_count(text: str, *, zero: bool = False) -> int | None:
    """Parse a count such as `8`, `8.0` or `1,024`; `None` if it is not one."""
    found = re.match(r"\s*(\d{1,12})(?:\.\d*)?\s*$", _drop_commas(text))
    if found is None:
        return None
    value = int(found[1])
    return value if value or zero else None


class _Hints(NamedTuple):
    """Facts about the model file from a row's notes."""

    file_bytes: float | None
    parameters: float | None
    gemm: str
    group: int | None
    layers: int | None
    vocabulary: int | None
    """Layers and vocabulary of a model that has this shape otherwise, e.g. one with random weights."""


def _read_hints(texts: Mapping[str, str], notes: Mapping[str, str]) -> _Hints:
    group = re.search(r"\bg(\d{2,3})\b", texts["quantization"].lower())
    size = _parse_bytes(notes.get("file_bytes", "")) or _parse_bytes(notes.get("file_size", ""))
    return _Hints(
        size,
        _parse_params(notes.get("params", "")),
        notes.get("gemm", ""),
        int(group[1]) if group else None,
        _parse_count(notes.get("model_layers", "")),
        _parse_count(notes.get("model_vocabulary", "")),
    )


def _parse_bytes(text: str) -> float | None:
    found = re.match(r"\s*([\d.]{1,20})\s*(B|[KMGT]i?B)?\s*$", text)
    if found is None or found[1].count(".") > 1 or not found[1].strip("."):
        return None
    units = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    units |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
    value = float(found[1]) * units.get(found[2] or "", 1.0)
    return value if value > 0 else None


def _parse_params(text: str) -> float | None:
    found = re.match(r"\s*([\d.]{1,20})\s*([MBT])?\s*$", text)
    if found is None or found[1].count(".") > 1 or not found[1].strip("."):
        return None
    value = float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}.get(found[2] or "", 1.0)
    return value if value > 0 else None


@lru_cache(maxsize=4096)
def _find_model(name: str, quantization: str, engine: str, hints: _Hints) -> Model:
    if not name:
        raise UsageError("the model is missing")
    traits = get_traits(engine)
    label = _find_label(name, quantization, traits, hints)
    words = re.sub(r"\s*-\s*(medium|small|large)\b", "", name, flags=re.IGNORECASE) if label else name
    found = look_up_model(f"{words} {label}".strip()) or (look_up_model(words) if label else None)
    if found is None:
        found = _make_unknown_model(name, label or parse_model_name(name).label, hints)
    elif label is None and traits.kernels == "gguf" and found.format != "gguf" and _is_unlabelled_gguf(name):
        found = look_up_model(f"{name} {_guess_gguf(name, found)}") or found
    if traits.kernels == "gguf" and found.quantization == "MXFP4" and label not in ("F16", "BF16"):
        found = _with_q8_rest(found)
    if traits.grouped_bits and hints.group and found.quantization_details is not None:
        # A 16-bit scale and a 16-bit bias for each group; the label assumes groups of 64.
        found = _rescale(found, found.weight_bytes + found.parameters * (32 / hints.group - 0.5) / 8)
    if (hints.layers or hints.vocabulary) and found.parts and found.num_layers and found.vocab_size:
        found = _resize(found, hints.layers or found.num_layers, hints.vocabulary or found.vocab_size)
    if hints.file_bytes and hints.parameters and 0.5 < hints.parameters / max(found.parameters, 1) < 2:
        found = _rescale(found, hints.file_bytes + found.vision_weight_bytes)
    return found


def _find_label(name: str, quantization: str, traits: EstimateTraits, hints: _Hints) -> str | None:
    """The quantization in the spelling of `known_models`."""
    text = re.sub(r"\bg\d{2,3}\b", " ", quantization.strip().lower())
    text = re.sub(r"\b(unset|none|uqff|gguf|exl2|exl3|default|auto)\b", " ", text).strip()
    text = re.sub(r"\bq(\d)k\b", r"q\1_k", text)
    text = text.replace("uint4", "int4").replace("uint8", "int8")
    if traits.grouped_bits and (bits := re.fullmatch(r"q(\d)", text)):
        text = f"{bits[1]}-bit"
    if not text and hints.gemm:
        text = {"nvfp4": "nvfp4", "bf16": "bf16", "float16": "bf16", "fp16": "fp16"}.get(
            hints.gemm.lower(), "fp8" if "fp8" in hints.gemm.lower() else ""
        )
    if not text:
        return None
    label = parse_model_name(f"x {text}").label
    if label is None and (bits := re.search(r"(\d(?:\.\d+)?)\s*-?bit", text)):
        return f"{bits[1]}-bit"
    return label


def _is_unlabelled_gguf(name: str) -> bool:
    return "gguf" in name.lower() and parse_model_name(name).label is None


def _guess_gguf(name: str, model: Model) -> str:
    if "qat" in name.lower():
        return "Q4_0"
    return "Q8_0" if model.parameters < PLAIN_GGUF_PARAMS else "Q4_K_M"


def _make_unknown_model(name: str, label: str | None, hints: _Hints) -> Model:
    """An unlisted model, from the sizes in its name and in the notes."""
    lowered = name.lower()
    several = re.search(r"(\d{1,3})x(\d{1,4}(?:\.\d+)?)b", lowered)
    size = re.search(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d+)?)b(?![a-z0-9]*bit)", re.sub(r"a\d+(\.\d+)?b", "", lowered))
    active = re.search(r"(?:^|[-_. ])a(\d{1,3}(?:\.\d+)?)b", lowered)
    billions = hints.parameters / 1e9 if hints.parameters else None
    if billions is None and several:
        billions = float(several[1]) * float(several[2]) * 0.83
    if billions is None and size:
        billions = float(size[1])
    if billions is None:
        raise UsageError(f"unknown model {name[:100]!r}, and its name has no size")
    facts: dict[str, object] = {"params_b": billions, "name": name[:200]}
    if active or several:
        facts["active_params_b"] = float(active[1]) if active else float(several[2]) * 1.8 if several else billions
    if label:
        facts["quantization"] = label
    if hints.file_bytes:
        facts["weight_gb"] = hints.file_bytes / 1e9
    return make_model_from_facts(facts)


def _with_q8_rest(model: Model) -> Model:
    """GGUF files of models that were trained in MXFP4 keep the experts in MXFP4 and store the rest as Q8_0."""
    factor = 8.5 / 16
    parts = tuple(
        part if part.name in ("experts", "vision", "mtp") else replace_fields(part, bytes=round(part.bytes * factor))
        for part in model.parts
    )
    saved = sum(part.bytes for part in model.parts) - sum(part.bytes for part in parts)
    return replace_fields(model, parts=parts, weight_bytes=model.weight_bytes - saved)


def _resize(model: Model, layers: int, vocabulary: int) -> Model:
    """The same shape with another number of equal layers and another vocabulary."""
    deep, wide = layers / model.num_layers, vocabulary / (model.vocab_size or vocabulary)

    def scale_part(part: ModelPart) -> ModelPart:
        factor = wide if part.name in ("embedding", "output") else deep
        return replace_fields(
            part,
            parameters=round(part.parameters * factor),
            active_parameters=round(part.active_parameters * factor),
            bytes=round(part.bytes * factor),
        )

    def scale_layers(group: LayerGroup) -> LayerGroup:
        cache = round(group.kv_bytes_per_token * deep)
        return replace_fields(group, count=round(group.count * deep), kv_bytes_per_token=cache)

    parts = tuple(map(scale_part, model.parts))
    return replace_fields(
        model,
        parts=parts,
        layers=tuple(map(scale_layers, model.layers)),
        num_layers=layers,
        num_moe_layers=round(model.num_moe_layers * deep) if model.num_moe_layers else None,
        vocab_size=vocabulary,
        kv_bytes_per_token=round(model.kv_bytes_per_token * deep),
        parameters=sum(part.parameters for part in parts),
        active_parameters=sum(part.active_parameters for part in parts),
        weight_bytes=sum(part.bytes for part in parts),
    )


def _rescale(model: Model, weight_bytes: float) -> Model:
    """The same model with `weight_bytes` in total; the size of a vision encoder does not change."""
    fixed = model.vision_weight_bytes
    factor = (weight_bytes - fixed) / max(1, model.weight_bytes - fixed)
    parts = tuple(
        part if part.name in ("vision", "mtp") else replace_fields(part, bytes=round(part.bytes * factor))
        for part in model.parts
    )
    return replace_fields(model, parts=parts, weight_bytes=round(weight_bytes))
