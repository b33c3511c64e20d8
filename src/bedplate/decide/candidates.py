"""The candidates of one engine: weights, layouts and settings, and the expected performance of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bedplate.decide.cards import get_free_bytes, has_different_cards, list_card_groups
from bedplate.decide.case import MANY, DecisionCase, with_model_task
from bedplate.decide.estimate import compute_expectation
from bedplate.decide.estimate.calibration import Expectation
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.layouts import list_layouts
from bedplate.decide.memory import MemoryDemand, fit, get_weight_bytes_on_device, is_quantized_while_loading
from bedplate.decide.nodes import make_launch
from bedplate.decide.targets import compute_shortfall, is_limited_by_cache
from bedplate.decide.verify import PlanFault, find_first_fault
from bedplate.decide.wording import describe_remedy, describe_shortage, join_alternatives
from bedplate.engines import Engine, load_engines
from bedplate.engines.base import RESERVED_SHARE, ComputeTarget, find_cards
from bedplate.facts.known_models import apply_label
from bedplate.facts.published_weights import get_published_model, list_published
from bedplate.values import (
    Fit,
    Hardware,
    Model,
    Parallelism,
    Plan,
    Refusal,
    Remedy,
    Settings,
    Shortage,
    Weights,
    Workload,
    replace_fields,
)
from bedplate.values.agreement import Agreement
from bedplate.values.fit import DeviceNeed
from bedplate.values.tuning import TuningRun
from bedplate.values.units import format_memory

LEAST_BITS = 3.0
"""With fewer bits per weight, another engine or a smaller model gives better answers."""
EVERYDAY_BITS = 4.0
"""landscape "for text generation, 4-bit quantization is often acceptable"."""
PRECISE_BITS = 8.0
"""landscape "anything where precision matters at the decimal level": such a workload keeps eight bits."""
TWICE_BITS = 8.0
"""Weights that had fewer bits are not quantized below this again: for SmolLM2 in Q4_1, greedy-token agreement is
588/1,000 with INT4 and 914/960 with INT8 (docs/fleet.md)."""
LONG_CONVERSION_S = 300.0
"""A conversion of this length is avoided if published weights can be fetched, by this or another suitable engine."""
FETCHED_SHARE = 0.75
"""Published weights with this share of the bits, or with 8, are fetched instead of converting: hardly any difference in
quality, and neither the original's download nor the conversion."""
SAME_BITS = 0.3
"""Quantizations of this difference in bits per weight serve the same purpose."""
ROUNDED_OFF = 0.1
"""Bits by which a quantization's average may be below its name, because some tensors have fewer bits."""
READING_TOK_S = 20.0
"""Twice the reading speed of people; a single user notices no difference above it."""
COMFORT_TPOT_S = 1 / READING_TOK_S
ROUNDING = 1.005
"""Three digits are shown; this factor keeps the shown amount from being too small."""
SERVER_EFFORT = 3
"""Engines of at least this effort are servers that batch: one read of the weights serves many requests."""
CARDS = (2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
"""Usual numbers of GPUs in one machine, or in several nodes together."""
SURELY = 2
"""Cache for this many times a request's tokens needs no further check: windows and states do not grow as fast."""
SHOWN_PORT = 8080
"""The port in a Decision's launch command, which a person can copy; `serve` takes a free port."""


@dataclass(frozen=True)
class RejectedCandidate:
    quantization: str
    layout: Parallelism
    fault: PlanFault


@dataclass(frozen=True)
class EngineCandidate:
    engine: Engine
    weights: Weights
    model: Model
    """With these weights."""
    hardware: Hardware
    """Without accelerators, if the engine computes on the CPU."""
    target: ComputeTarget
    layout: Parallelism
    settings: Settings
    fit: Fit
    """With these settings."""
    max_concurrency: int
    """Concurrent requests of the longest length."""
    expected: Expectation | None
    factor: float = 1.0
    """Measured speed of the engine on this machine, as a multiple of the estimate."""
    unpacks: bool = False
    """Whether `model` is first dequantized from the requested GGUF."""
    tuned: TuningRun | None = None
    """The tuning result that its settings come from, if there is one."""
    sixteen_bit: EngineCandidate | None = None
    """The same plan with a 16-bit KV cache, if this one has 8 bits."""
    rejected: tuple[RejectedCandidate, ...] = ()
    """Candidates of the same engine that would have been preferred, but that the verifier rejected."""

    @property
    def quantization(self) -> str | None:
        return self.model.quantization or self.weights.label

    @property
    def cards(self) -> int:
        return self.layout.tensor * self.layout.pipeline * self.layout.data

    @property
    def usual_concurrency(self) -> int:
        """Concurrent requests of usual length."""
        running = self.settings.slots * self.layout.data if self.engine.paged else 0
        return max(self.max_concurrency, running)

    @property
    def kv_bits(self) -> float:
        return self.engine.get_stored_cache_bits(self.settings.kv_type)

    @property
    def bits(self) -> float:
        """Average bits per weight, including scales and wider tensors."""
        return self.model.bits_per_weight or 16.0

    @property
    def nominal_bits(self) -> float:
        """The bits in the name: Q3_K_M is a 3-bit quantization although it takes four."""
        return _get_nominal_bits(self.weights, self.model)


def list_candidates(
    engine: Engine, case: DecisionCase, evidence: MachineEvidence, *, installable: bool = False
) -> tuple[EngineCandidate, ...] | Refusal:
    """All weights and layouts of this engine, whether they fit or not, each with its settings and its estimate."""
    if refusal := refuse_model(engine, case):
        return refusal
    parts = _list_parts(engine, case, installable)
    if not parts:
        return engine.make_refusal("impossible", "the build that bedplate installs does not support this hardware")
    found = [
        candidate
        for part, target in parts
        for form in _list_weights(engine, target, part)
        for candidate in _lay_out(engine, target, form, part, evidence)
    ]
    if found and not any(one.fit.fits for one in found):
        found += _list_saving_memory(engine, parts, evidence)
    if found:
        return tuple(found)
    case = parts[0][0]
    if not _has_memory_to_convert(engine, case):
        return engine.make_refusal("impossible", f"its conversion needs {_describe_source(engine, case)}")
    return engine.make_refusal(
        "impossible",
        f"does not support {case.model.quantization or case.model.format} weights on this hardware",
        "the same model in another format",
    )


def _list_saving_memory(
    engine: Engine, parts: Sequence[tuple[DecisionCase, ComputeTarget]], evidence: MachineEvidence
) -> list[EngineCandidate]:
    """The candidates with settings that need less memory of each card, if the engine has such settings."""
    return [
        replace(candidate, engine=engine)
        for part, target in parts
        if (saving := engine.save_memory(target, part.workload)) is not None
        for form in _list_weights(engine, target, part)
        for candidate in _lay_out(saving, target, form, part, evidence)
    ]


def _list_parts(engine: Engine, case: DecisionCase, installable: bool) -> list[tuple[DecisionCase, ComputeTarget]]:
    """The case on each group of cards that the engine may use, or on the CPU if it uses none."""
    groups = list_card_groups(case.hardware, engine)
    found: list[tuple[DecisionCase, ComputeTarget]] = []
    for group in groups:
        part = replace(case, hardware=group, names_cards=has_different_cards(case.hardware))
        if len(groups) > 1 and _refuse_on_part(engine, part) is not None:
            continue
        hardware, target = _choose_target(engine, group, installable)
        if target is not None:
            found.append((part if hardware is group else replace(part, hardware=hardware), target))
    on_cards = [one for one in found if one[1].device != "cpu"]
    return on_cards or found[:1]


def refuse_unfitting(engine: Engine, candidates: Sequence[EngineCandidate], case: DecisionCase) -> Refusal:
    """The refusal if none of an engine's candidates fits."""
    least = min(one.model.weight_bytes for one in candidates)
    smallest = [one for one in candidates if one.model.weight_bytes == least]
    refusal = refuse_too_large(engine, find_nearest(smallest), case.workload)
    if not engine.can_distribute(case.model) and find_cards(case.hardware, engine.vendors) and case.hardware.nodes > 1:
        able = [
            one.id for one in load_engines().values() if one.can_distribute(case.model) and case.vendor in one.vendors
        ]
        refusal = replace_fields(
            refusal,
            cause="several-nodes",
            why=f"{engine.not_distributed}, and on one node it {refusal.why}",
            hint=join_alternatives((*able, *((refusal.hint,) if refusal.hint is not None else ()))),
        )
    if _has_memory_to_convert(engine, case):
        return refusal
    hints = (refusal.hint, f"a conversion to fewer bits, with {_describe_source(engine, case)}")
    return replace_fields(refusal, hint=join_alternatives(hint for hint in hints if hint is not None))


def refuse_model(engine: Engine, case: DecisionCase) -> Refusal | None:
    """Why the engine cannot run this model here, neither the original weights nor published ones."""
    groups = list_card_groups(case.hardware, engine)
    refusals = [_refuse_on_part(engine, replace(case, hardware=group)) for group in groups]
    return None if None in refusals else refusals[0]


def _refuse_on_part(engine: Engine, case: DecisionCase) -> Refusal | None:
    refusal = engine.refuse(case.hardware, case.model, case.workload)
    if refusal is None:
        return None
    target = engine.find_target(case.hardware)
    return None if target is not None and list_accepted_weights(engine, target, case) else refusal


def describe_rejection(one: RejectedCandidate) -> str:
    layout = one.layout
    cards = layout.tensor * layout.pipeline * layout.data
    where = f" on {cards} accelerators" if cards > 1 else ""
    return f"{one.quantization}{where} was not planned: {one.fault.why} (rule {one.fault.rule})"


def verify_candidate(candidate: EngineCandidate, case: DecisionCase) -> PlanFault | None:
    """The reason why the engine would not serve this candidate."""
    plan = make_plan(candidate, case, candidate.weights)
    # All cards of the machine, so that it is checked which of them the plan names.
    hardware = case.hardware if candidate.hardware.accelerators else candidate.hardware
    return find_first_fault(plan, make_launch(plan, candidate.engine, hardware, SHOWN_PORT), hardware)


def make_plan(candidate: EngineCandidate, case: DecisionCase, weights: Weights) -> Plan:
    """The plan of a candidate, with its own weights or with others."""
    engine = candidate.engine
    return Plan(
        engine=engine.id,
        engine_version=engine.version or "unpinned",
        model=get_planned_model(case.model, weights),
        workload=with_model_task(case.model, case.workload),
        weights=weights,
        parallelism=candidate.layout,
        settings=candidate.settings,
    )


def compute_conversion_s(candidate: EngineCandidate, case: DecisionCase, weights: Weights | None = None) -> float:
    """The estimated time of the conversions before the first start, of its own weights or of others."""
    weights = weights or candidate.weights
    if weights.made != "converted":
        return 0.0
    steps = candidate.engine.launch(make_plan(candidate, case, weights), SHOWN_PORT).prepare
    return sum(step.seconds.value for step in steps if step.kind == "convert" and step.seconds is not None)


def find_wrong_answers(candidate: EngineCandidate, evidence: MachineEvidence) -> Agreement | None:
    """The check that found wrong answers of this candidate on this machine, if there is one."""
    version = candidate.engine.version or "unpinned"
    return evidence.find_broken(candidate.engine.id, version, candidate.weights.label, candidate.settings)


def refuse_too_large(engine: Engine, nearest: EngineCandidate, work: Workload) -> Refusal:
    """The refusal because not even the smallest weights fit, with the amounts of memory."""
    shortage, remedies = make_shortage(nearest), find_remedies(nearest, work)
    return Refusal(
        engine=engine.id,
        kind="impossible",
        why=describe_shortage(shortage),
        hint=join_alternatives(map(describe_remedy, remedies)),
        shortage=shortage,
        remedies=remedies,
    )


def make_shortage(candidate: EngineCandidate) -> Shortage:
    """The memory of the fullest device of a candidate that does not fit."""
    fullest = max(candidate.fit.devices, key=lambda need: need.high_bytes - (need.usable_bytes or 0))
    return Shortage(
        device=fullest.device,
        count=fullest.count,
        weights_label=candidate.model.quantization or candidate.weights.label,
        needed_bytes=fullest.high_bytes,
        weights_bytes=fullest.weights_bytes,
        cache_bytes=fullest.kv_bytes,
        overhead_bytes=fullest.overhead_bytes.high + fullest.activation_bytes.high + fullest.adapter_bytes,
        usable_bytes=fullest.usable_bytes,
    )


def find_nearest(candidates: Sequence[EngineCandidate]) -> EngineCandidate:
    """Of candidates that do not fit, the one that lacks the least memory."""
    return min(candidates, key=_compute_missing_bytes)


def find_remedies(nearest: EngineCandidate, work: Workload) -> tuple[Remedy, ...]:
    """Changes with which it would fit, the smallest first; amounts are rounded up."""
    remedies: list[Remedy] = []
    needs = nearest.fit.devices
    room = sum(
        (need.usable_bytes or 0) + need.weights_bytes - need.high_bytes for need in needs for _ in range(need.count)
    )
    model = nearest.model
    if room > 0 and model.parameters and (bits := math.floor(room * 80 / model.parameters) / 10) >= LEAST_BITS:
        remedies.append(Remedy(kind="quantization", most_bits_per_weight=bits, bits_per_weight=nearest.bits))
    lacking = {need.device: _compute_shortage(need, nearest.engine) * need.count for need in needs}
    missing_bytes = sum(lacking.values()) * ROUNDING
    remedies.append(Remedy(kind="memory", memory_bytes=missing_bytes, on_cards=not lacking.get("host")))
    if needs[0].device != "host" and (cards := _count_enough_cards(nearest, work)) is not None:
        remedies.append(Remedy(kind="cards", cards=cards))
    return tuple(remedies)


def _count_enough_cards(nearest: EngineCandidate, work: Workload) -> int | None:
    """The smallest usual number of the same GPUs for which a layout fits."""
    from bedplate.facts.hypothetical import make_simulated_hardware  # imported here because most plans fit

    cards, chip = find_cards(nearest.hardware, nearest.engine.vendors), nearest.target.chip
    each = nearest.fit.devices[0]
    if chip is None or chip.unified or not each.usable_bytes:
        return None
    least = -(-each.weights_bytes * each.count // each.usable_bytes)
    for count in CARDS:
        if count <= len(cards) or count < least or count % chip.devices_per_card:
            continue
        machine = make_simulated_hardware({
            "accelerator": chip.name, "count": count // chip.devices_per_card,
            "ram_gb": max(1, nearest.hardware.memory.total_bytes >> 30),
        })  # fmt: skip
        ways = list_layouts(machine, nearest.engine, nearest.model)
        if any(
            fit(machine, nearest.model, work, nearest.engine, parallelism=way).fits for way in ways if way.data == 1
        ):
            return count
    return None


def _compute_shortage(need: DeviceNeed, engine: Engine) -> float:
    """Free memory that one device lacks: more than the engine lacks, because it may use only a share of it."""
    share = 1 - RESERVED_SHARE if need.device == "host" else engine.uses.share
    return max(0, need.high_bytes - (need.usable_bytes or 0)) / share


def _choose_target(engine: Engine, hardware: Hardware, installable: bool) -> tuple[Hardware, ComputeTarget | None]:
    """The part of the machine that the engine uses; a CPU build does not use the accelerators."""
    target = engine.find_target(hardware)
    if target is None or target.device == "cpu":
        return _remove_cards(hardware), target
    if installable and target.device not in engine.built_for:
        return _remove_cards(hardware), engine.find_target(_remove_cards(hardware))
    return hardware, target


def _remove_cards(hardware: Hardware) -> Hardware:
    if not hardware.accelerators:
        return hardware
    return replace_fields(hardware, accelerators=(), links=())


def _list_weights(engine: Engine, target: ComputeTarget, case: DecisionCase) -> Iterator[tuple[Weights, Model]]:
    """The engine's weight formats, the most faithful first, each with the model in that format."""
    known = [(form, convert_model(case.model, form)) for form in engine.list_weights(target, case.model, case.workload)]
    offered = _use_published(known, list_accepted_weights(engine, target, case))
    least = PRECISE_BITS - ROUNDED_OFF if case.workload.precision_sensitive else LEAST_BITS
    for form, model in offered:
        if form.is_chosen and not _has_same_type(model, case.model) and (model.bits_per_weight or 16.0) < least:
            continue
        if form.made == "converted" and not _has_memory_to_convert(engine, case):
            continue
        yield form, model


WeightForm = tuple[Weights, Model]
"""Weights that an engine loads, and the model with them."""


def list_accepted_weights(engine: Engine, target: ComputeTarget, case: DecisionCase) -> list[WeightForm]:
    """The published weights in the engine's first format that it loads as they are, one for each quantization."""
    found: dict[tuple[str, str], WeightForm] = {}
    for form in list_published(case.model):
        if form.format not in engine.formats[:1] or (form.format, form.label) in found:
            continue
        loaded = engine.list_weights(target, form.model, case.workload)
        if len(loaded) != 1 or loaded[0].made != "as it is":
            continue
        if engine.refuse(case.hardware, form.model, case.workload) is None:
            weights = replace_fields(loaded[0], published=form.weights)
            found[form.format, form.label] = weights, form.model
    return list(found.values())


def _use_published(offered: list[WeightForm], published: list[WeightForm]) -> list[WeightForm]:
    """The offered weights, each from a repository if one has it, and published weights of other numbers of bits.

    A conversion is replaced by published weights of the same bits; other weights only by the same type.
    """
    if not published:
        return offered
    found: list[WeightForm] = []
    for one in offered:
        form, model = one
        same = [other for other in published if other[0].format == form.format and _has_same_type(other[1], model)] or [
            other for other in published if form.made == "converted" and _has_same_bits(other, one)
        ]
        one = same[0] if same else one
        if one not in found:
            found.append(one)
    for other in published:
        if any(_has_same_bits(other, one) for one in found):
            continue
        bits = other[1].bits_per_weight or 16.0
        place = next((at for at, one in enumerate(found) if (one[1].bits_per_weight or 16.0) < bits), len(found))
        found.insert(place, other)
    return found


def _has_same_type(model: Model, other: Model) -> bool:
    return (model.quantization or "").upper() == (other.quantization or "").upper()


def _has_same_bits(one: WeightForm, other: WeightForm) -> bool:
    return abs(_get_nominal_bits(*one) - _get_nominal_bits(*other)) < SAME_BITS


def _get_nominal_bits(weights: Weights, model: Model) -> float:
    named, details = _parse_bits(weights.label), model.quantization_details
    return named if named is not None else details.bits if details is not None else model.bits_per_weight or 16.0


def get_planned_model(model: Model, weights: Weights) -> Model:
    """The model that the engine is given: the published one, if the plan fetches it."""
    return get_published_model(model, weights.published) if weights.published is not None else model


def _has_memory_to_convert(engine: Engine, case: DecisionCase) -> bool:
    """Whether host memory holds the weights that the engine's conversion reads; an assumed size does not count."""
    memory, need = case.hardware.memory, case.model.weight_bytes * engine.loading.conversion_copies
    return memory.basis == "estimate" or need <= memory.available_bytes * (1 - RESERVED_SHARE)


def _describe_source(engine: Engine, case: DecisionCase) -> str:
    need = case.model.weight_bytes * engine.loading.conversion_copies
    return f"{format_memory(need)} of host memory for the unconverted weights"


def _can_load(engine: Engine, weights: Weights, source: Model, layout: Parallelism, case: DecisionCase) -> bool:
    """Whether each card holds the unquantized weights, if the engine needs all of them before it quantizes."""
    if not is_quantized_while_loading(weights) or engine.loading.quantizes == "by layer":
        return True
    each = get_weight_bytes_on_device(source, layout, engine)
    return all(each <= (get_free_bytes(card) or 0) for card in find_cards(case.hardware, engine.vendors))


def convert_model(model: Model, form: Weights) -> Model:
    """The model with these weights."""
    if form.published is not None:
        return get_published_model(model, form.published)
    if form.made == "as it is" or (model.format == "facts" and not model.parameters):
        return model
    changed = apply_label(model, form.label)
    return changed if changed.format == form.format else replace_fields(changed, format=form.format)


def _lay_out(
    engine: Engine, target: ComputeTarget, form: tuple[Weights, Model], case: DecisionCase, evidence: MachineEvidence
) -> list[EngineCandidate]:
    """A candidate for each layout of these weights; with an 8-bit KV cache as well, if that of 16 bits is the limit."""
    weights, model = form
    wanted = engine.settle(case.hardware, model, case.workload)

    def make(layout: Parallelism, wanted: Settings) -> EngineCandidate:
        return make_candidate(engine, target, weights, model, layout, case, evidence, wanted)

    layouts = list_layouts(case.hardware, engine, model)
    if has_different_cards(case.hardware):
        every = len(case.hardware.accelerators)
        layouts = (one for one in layouts if one.tensor * one.pipeline * one.data == every)
    if case.workload.adapters:
        layouts = (one for one in layouts if engine.accepts_adapters(one))
    found = [make(layout, wanted) for layout in layouts]
    if case.workload.task != "generate" or engine.refuse_eight_bit_cache(target, model) is not None:
        return found
    if any(one.fit.fits and one.fit.offload is None and compute_shortfall(one, case) <= 1 for one in found):
        return found
    narrow = replace_fields(wanted, kv_type="fp8")
    limited = [one for one in found if is_limited_by_cache(one, case)]
    if case.peak_in_flight >= MANY:
        # Fewer replicas hold fewer requests, so that of a layout only the most are tried.
        most = {replace_fields(one.layout, data=1): one for one in sorted(limited, key=lambda one: one.layout.data)}
        limited = list(most.values())
    others = [replace(make(one.layout, narrow), sixteen_bit=one) for one in limited]
    return [*found, *(one for one in others if one.fit.fits and one.fit.offload is None)]


def _compute_missing_bytes(candidate: EngineCandidate) -> int:
    return sum(need.high_bytes - (need.usable_bytes or 0) for need in candidate.fit.devices)


def make_candidate(
    engine: Engine,
    target: ComputeTarget,
    weights: Weights,
    model: Model,
    layout: Parallelism,
    case: DecisionCase,
    evidence: MachineEvidence,
    wanted: Settings | None = None,
) -> EngineCandidate:
    """`wanted` are the largest settings for this workload, which do not depend on the layout."""
    hardware, workload = case.hardware, case.workload
    kv_type = wanted.kv_type if wanted is not None else "16-bit"
    room = fit(hardware, model, workload, engine, parallelism=layout, kv_type=kv_type)
    wanted = wanted or engine.settle(hardware, model, workload)
    settings, need = fit_settings(engine, hardware, model, layout, case, room, wanted)
    if case.names_cards and target.device != "cpu":
        used = hardware.accelerators[: layout.tensor * layout.pipeline * layout.data]
        settings = replace_fields(settings, cards=tuple(card.index for card in used))
    if not _can_load(engine, weights, case.model, layout, case):
        need = replace_fields(need, fits=False)
    expected, factor = None, evidence.get_factor(engine.id, target.device)
    if need.fits:
        expected = compute_expectation(
            hardware, model, engine.id, layout, workload, slots=settings.slots, offload=need.offload, factor=factor,
            kv_bits=engine.get_stored_cache_bits(kv_type),
        )  # fmt: skip
    most = room.max_concurrency
    if engine.max_slots:
        most = min(most, engine.max_slots * layout.data)
    return EngineCandidate(engine, weights, model, hardware, target, layout, settings, need, most, expected, factor)


def fit_settings(
    engine: Engine, hardware: Hardware, model: Model, layout: Parallelism, case: DecisionCase, room: Fit,
    wanted: Settings,
) -> tuple[Settings, Fit]:  # fmt: skip
    """The largest settings that fit: first reduce slots beyond the workload, then context, then slots below it."""
    each = -(-wanted.slots // layout.data)
    wanted = replace_fields(wanted, slots=max(1, each))
    if engine.paged:
        held = room.max_concurrency
        if case.workload.request_tokens > case.workload.usual_tokens and wanted.device != "cpu" and room.fits:
            # A paged cache grows with the request, so more requests of usual length fit than of the longest. On a CPU
            # the size of the cache is fixed at the start.
            usual = replace_fields(case.workload, context_tokens=None)
            held = fit(hardware, model, usual, engine, parallelism=layout, kv_type=wanted.kv_type).max_concurrency
        context = _find_context(engine, hardware, model, layout, case.workload, wanted, room)
        slots = max(1, min(wanted.slots, held // layout.data or 1))
        return replace_fields(wanted, slots=slots, context_tokens=context), room
    asked = MemoryDemand.from_workload(engine, case.workload, None)
    asked_slots = min(-(-asked.in_flight // layout.data), each)
    for settings in _shrink_settings(wanted, asked_slots, asked.tokens):
        need = fit(hardware, model, case.workload, engine, parallelism=layout, settings=settings)
        if need.offload is not None and settings.slots > asked_slots:
            continue  # extra slots would move weights from the GPU to RAM
        if need.fits and need.max_concurrency >= settings.slots * layout.data:
            return _apply_offload(settings, model, need), need
    return settings, room


def _find_context(
    engine: Engine, hardware: Hardware, model: Model, layout: Parallelism, work: Workload, settings: Settings, room: Fit
) -> int:
    """The longest context that the cache can hold: an engine with a longer one does not start."""
    wanted, kv_type = settings.context_tokens, settings.kv_type
    asked = min(work.request_tokens, wanted)
    if not room.fits or room.max_concurrency // layout.data * asked >= SURELY * wanted:
        return wanted
    while wanted > asked:
        alone = replace_fields(work, context_tokens=wanted, concurrency=1)
        if fit(hardware, model, alone, engine, parallelism=layout, kv_type=kv_type).fits:
            break
        wanted = max(wanted // 2, asked)
    return wanted


def _apply_offload(settings: Settings, model: Model, need: Fit) -> Settings:
    if need.offload is None:
        return settings
    if need.offload.kind == "experts":
        return replace_fields(settings, gpu_layers=model.num_layers + 1, host_expert_layers=need.offload.host_layers)
    return replace_fields(settings, gpu_layers=need.offload.device_layers)


def _shrink_settings(settings: Settings, asked_slots: int, asked_context: int) -> Iterator[Settings]:
    """Settings from the largest to the smallest, which serves one request."""
    slots, context = settings.slots, settings.context_tokens
    asked_slots, asked_context = min(asked_slots, slots), min(asked_context, context)
    yield settings
    while slots > asked_slots:
        slots = max(slots // 2, asked_slots)
        yield replace_fields(settings, slots=slots)
    while context > asked_context:
        context = max(context // 2, asked_context)
        yield replace_fields(settings, slots=slots, context_tokens=context)
    while slots > 1:
        slots //= 2
        yield replace_fields(settings, slots=slots, context_tokens=context)


@lru_cache(maxsize=256)
def _parse_bits(label: str) -> float | None:
    named = re.match(r"I?Q(\d)", label)
    return float(named[1]) if named else None


def get_least_bits(model: Model) -> float:
    """The fewest bits per weight that are used if anything else fits."""
    had = _parse_bits(model.source_quantization or "")
    return TWICE_BITS if had is not None and had < TWICE_BITS else EVERYDAY_BITS
