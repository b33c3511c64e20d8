"""The best candidate of one engine: weights, layout and settings that fit, and the expected performance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bedplate.decide.case import MANY, DecisionCase, with_model_task
from bedplate.decide.estimate import compute_expectation
from bedplate.decide.estimate.calibration import Expectation
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.layouts import list_layouts
from bedplate.decide.memory import MemoryDemand, fit, get_free_bytes, get_weight_bytes_on_device
from bedplate.decide.verify import PlanFault, find_first_fault
from bedplate.decide.wording import describe_remedy, describe_shortage, join_alternatives
from bedplate.engines import Engine
from bedplate.engines.base import RESERVED_SHARE, SIXTEEN_BIT, ComputeTarget, find_cards
from bedplate.facts.known_models import apply_label
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
ROUNDED_OFF = 0.1
"""Bits by which a quantization's average may be below its name, because some tensors have fewer bits."""
READING_TOK_S = 20.0
"""Twice the reading speed of people; a single user notices no difference above it."""
COMFORT_TPOT_S = 1 / READING_TOK_S
ROUNDING = 1.005
"""Three digits are shown; this factor keeps the shown amount from being too small."""
NEARLY = 0.8
"""Weights with fewer bits are used only if they hold clearly more requests than this share."""
SERVER_EFFORT = 3
"""Engines of at least this effort are servers that batch: one read of the weights serves many requests."""
CARDS = (2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
"""Usual numbers of GPUs in one machine, or in several nodes together."""
SURELY = 2
"""Cache for this many times a request's tokens needs no further check: windows and states do not grow as fast."""
SHOWN_PORT = 8080
"""The port in a Decision's launch command, which a person can copy; `serve` takes a free port."""
SAME = 0.97
"""An estimate cannot tell layouts within three percent apart; then the simpler one is preferred."""


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
    expected: Expectation | None
    unpacks: bool = False
    """Whether `model` is first dequantized from the requested GGUF."""
    tuned: TuningRun | None = None
    """The tuning result that its settings come from, if there is one."""
    rejected: tuple[RejectedCandidate, ...] = ()
    """Candidates of the same engine that would have been preferred, but that the verifier rejected."""

    @property
    def quantization(self) -> str | None:
        return self.model.quantization or self.weights.label

    @property
    def cards(self) -> int:
        return self.layout.tensor * self.layout.pipeline * self.layout.data

    @property
    def bits(self) -> float:
        """Average bits per weight, including scales and wider tensors."""
        return self.model.bits_per_weight or 16.0

    @property
    def nominal_bits(self) -> float:
        """The bits in the name: Q3_K_M is a 3-bit quantization although it takes four."""
        named, details = _parse_bits(self.weights.label), self.model.quantization_details
        return named if named is not None else details.bits if details is not None else self.bits


def choose_candidate(
    engine: Engine, case: DecisionCase, evidence: MachineEvidence, *, installable: bool = False, asked: bool = False
) -> EngineCandidate | Refusal:
    """The weights, layout and settings for this engine, or the refusal.

    A combination that gave wrong answers on this machine is excluded, unless the engine was requested (`asked`) and has
    no other.
    """
    if refusal := engine.refuse(case.hardware, case.model, case.workload):
        return refusal
    hardware, target = _choose_target(engine, case.hardware, installable)
    if target is None:
        return engine.make_refusal("impossible", "the build that bedplate installs does not support this hardware")
    case = replace(case, hardware=hardware)
    forms = list(_list_weights(engine, target, case))
    if not forms and not _has_memory_to_convert(engine, case):
        return engine.make_refusal("impossible", f"its conversion needs {_describe_source(engine, case)}")
    if not forms:
        return engine.make_refusal(
            "impossible",
            f"does not support {case.model.quantization or case.model.format} weights on this hardware",
            "the same model in another format",
        )
    found = [_lay_out(engine, target, form, case, evidence) for form in forms]
    laid_out = [fitting for some in found if (fitting := [one for one in some if one.fit.fits])]
    if not laid_out:
        smallest = min(found, key=lambda some: some[0].model.weight_bytes)
        refusal = refuse_too_large(engine, min(smallest, key=_compute_missing_bytes), case.workload)
        if _has_memory_to_convert(engine, case):
            return refusal
        hints = (refusal.hint, f"a conversion to fewer bits, with {_describe_source(engine, case)}")
        return replace_fields(refusal, hint=join_alternatives(hint for hint in hints if hint is not None))
    return _choose_verified(engine, laid_out, case, evidence, asked)


def _choose_verified(
    engine: Engine, laid_out: list[list[EngineCandidate]], case: DecisionCase, evidence: MachineEvidence, asked: bool
) -> EngineCandidate | Refusal:
    """The best candidate that the verifier accepts; `laid_out` has the layouts that fit for each weight format."""
    rejected: list[RejectedCandidate] = []
    while laid_out:
        fitting = [_choose_layout(some, case) for some in laid_out]
        sound = [candidate for candidate in fitting if find_wrong_answers(candidate, evidence) is None]
        if not sound and not asked and (wrong := find_wrong_answers(fitting[0], evidence)) is not None:
            return engine.make_refusal(
                "unsuitable", f"gave wrong answers on this machine: {wrong.why}", f"--engine {engine.id} uses it anyway"
            )
        chosen = _choose_weights(sound or fitting, case)
        fault = verify_candidate(chosen, case)
        if fault is None:
            return replace(chosen, rejected=tuple(rejected))
        rejected.append(RejectedCandidate(chosen.quantization or "", chosen.layout, fault))
        laid_out = [kept for some in laid_out if (kept := [one for one in some if one is not chosen])]
    first = rejected[0].fault
    return engine.make_refusal("impossible", first.why, first.hint)


def describe_rejection(one: RejectedCandidate) -> str:
    layout = one.layout
    cards = layout.tensor * layout.pipeline * layout.data
    where = f" on {cards} accelerators" if cards > 1 else ""
    return f"{one.quantization}{where} was not planned: {one.fault.why} (rule {one.fault.rule})"


def verify_candidate(candidate: EngineCandidate, case: DecisionCase) -> PlanFault | None:
    """The reason why the engine would not serve this candidate."""
    engine = candidate.engine
    plan = Plan(
        engine=engine.id,
        engine_version=engine.version or "unpinned",
        model=case.model,
        workload=with_model_task(case.model, case.workload),
        weights=candidate.weights,
        parallelism=candidate.layout,
        settings=candidate.settings,
    )
    return find_first_fault(plan, engine.launch(plan, SHOWN_PORT), candidate.hardware)


def find_wrong_answers(candidate: EngineCandidate, evidence: MachineEvidence) -> Agreement | None:
    """The check that found wrong answers of this candidate on this machine, if there is one."""
    version = candidate.engine.version or "unpinned"
    return evidence.find_broken(candidate.engine.id, version, candidate.weights.label, candidate.settings)


def refuse_too_large(engine: Engine, nearest: EngineCandidate, work: Workload) -> Refusal:
    """The refusal because not even the smallest weights fit, with the amounts of memory."""
    fullest = max(nearest.fit.devices, key=lambda need: need.high_bytes - (need.usable_bytes or 0))
    shortage = Shortage(
        device=fullest.device,
        count=fullest.count,
        weights_label=nearest.model.quantization or nearest.weights.label,
        needed_bytes=fullest.high_bytes,
        weights_bytes=fullest.weights_bytes,
        cache_bytes=fullest.kv_bytes,
        overhead_bytes=fullest.overhead_bytes.high + fullest.activation_bytes.high,
        usable_bytes=fullest.usable_bytes,
    )
    remedies = find_remedies(nearest, work)
    return Refusal(
        engine=engine.id,
        kind="impossible",
        why=describe_shortage(shortage),
        hint=join_alternatives(map(describe_remedy, remedies)),
        shortage=shortage,
        remedies=remedies,
    )


def find_remedies(nearest: EngineCandidate, work: Workload) -> tuple[Remedy, ...]:
    """Changes with which it would fit, the smallest first; amounts are rounded up."""
    remedies: list[Remedy] = []
    needs = nearest.fit.devices
    room = sum(
        (need.usable_bytes or 0) - need.kv_bytes - need.overhead_bytes.high - need.activation_bytes.high
        for need in needs
        for _ in range(need.count)
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
    """The engine's weight formats in order of preference, each with the model in that format."""
    offered = engine.list_weights(target, case.model, case.workload)
    if target.device in ("cuda", "rocm") and "fp8" in target.features and not case.workload.precision_sensitive:
        # FP8 comes before 16 bits for many requests: half the bytes to read, hardly any loss, and the chip has units.
        eights = [form for form in offered if form.label == "FP8"]
        if engine.effort >= SERVER_EFFORT and eights and offered[0].label in SIXTEEN_BIT:
            offered = (*eights, *(form for form in offered if form.label != "FP8"))
    least = PRECISE_BITS - ROUNDED_OFF if case.workload.precision_sensitive else LEAST_BITS
    for form in offered:
        model = convert_model(case.model, form)
        if form.made != "as it is" and (model.bits_per_weight or 16.0) < least:
            continue
        if form.made == "converted" and not _has_memory_to_convert(engine, case):
            continue
        yield form, model


def _has_memory_to_convert(engine: Engine, case: DecisionCase) -> bool:
    """Whether host memory holds the weights that the engine's conversion reads; an assumed size does not count."""
    memory, need = case.hardware.memory, case.model.weight_bytes * engine.loading.conversion_copies
    return memory.basis == "estimate" or need <= memory.available_bytes * (1 - RESERVED_SHARE)


def _describe_source(engine: Engine, case: DecisionCase) -> str:
    need = case.model.weight_bytes * engine.loading.conversion_copies
    return f"{format_memory(need)} of host memory for the unconverted weights"


def _can_load(engine: Engine, weights: Weights, source: Model, layout: Parallelism, case: DecisionCase) -> bool:
    """Whether each card holds the unquantized weights, if the engine needs all of them before it quantizes."""
    if weights.made != "while loading" or weights.label in SIXTEEN_BIT or engine.loading.quantizes == "by layer":
        return True
    each = get_weight_bytes_on_device(source, layout, engine)
    return all(each <= (get_free_bytes(card) or 0) for card in find_cards(case.hardware, engine.vendors))


def convert_model(model: Model, form: Weights) -> Model:
    if form.made == "as it is" or (model.format == "facts" and not model.parameters):
        return model
    changed = apply_label(model, form.label)
    return changed if changed.format == form.format else replace_fields(changed, format=form.format)


def _lay_out(
    engine: Engine, target: ComputeTarget, form: tuple[Weights, Model], case: DecisionCase, evidence: MachineEvidence
) -> list[EngineCandidate]:
    """A candidate for each layout of these weights."""
    weights, model = form
    return [
        make_candidate(engine, target, weights, model, layout, case, evidence)
        for layout in list_layouts(case.hardware, engine, model)
    ]


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
) -> EngineCandidate:
    hardware, workload = case.hardware, case.workload
    room = fit(hardware, model, workload, engine, parallelism=layout)
    settings, need = fit_settings(engine, hardware, model, layout, case, room)
    if not _can_load(engine, weights, case.model, layout, case):
        need = replace_fields(need, fits=False)
    expected = None
    if need.fits:
        factor = evidence.get_factor(engine.id, target.device)
        expected = compute_expectation(
            hardware, model, engine.id, layout, workload, slots=settings.slots, offload=need.offload, factor=factor
        )
    most = room.max_concurrency
    if engine.max_slots:
        most = min(most, engine.max_slots * layout.data)
    return EngineCandidate(engine, weights, model, hardware, target, layout, settings, need, most, expected)


def fit_settings(
    engine: Engine, hardware: Hardware, model: Model, layout: Parallelism, case: DecisionCase, room: Fit
) -> tuple[Settings, Fit]:
    """The largest settings that fit: first reduce slots beyond the workload, then context, then slots below it."""
    wanted = engine.settle(hardware, model, case.workload)
    each = -(-wanted.slots // layout.data)
    wanted = replace_fields(wanted, slots=max(1, each))
    if engine.paged:
        held = room.max_concurrency
        if case.workload.request_tokens > case.workload.usual_tokens and wanted.device != "cpu" and room.fits:
            # A paged cache grows with the request, so more requests of usual length fit than of the longest. On a CPU
            # the size of the cache is fixed at the start.
            usual = replace_fields(case.workload, context_tokens=None)
            held = fit(hardware, model, usual, engine, parallelism=layout).max_concurrency
        context = _find_context(engine, hardware, model, layout, case.workload, wanted.context_tokens, room)
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
    engine: Engine, hardware: Hardware, model: Model, layout: Parallelism, work: Workload, wanted: int, room: Fit
) -> int:
    """The longest context that the cache can hold: an engine with a longer one does not start."""
    asked = min(work.request_tokens, wanted)
    if not room.fits or room.max_concurrency // layout.data * asked >= SURELY * wanted:
        return wanted
    while wanted > asked:
        alone = replace_fields(work, context_tokens=wanted, concurrency=1)
        if fit(hardware, model, alone, engine, parallelism=layout).fits:
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


def _choose_layout(fitting: list[EngineCandidate], case: DecisionCase) -> EngineCandidate:
    """For many requests, the highest throughput; for a few, the fewest GPUs that are faster than reading speed.

    Latency targets come first: only layouts that meet them, or the one that misses them least.
    """
    in_flight = case.in_flight
    # Weights are in host memory only if they do not fit on all cards together.
    on_cards = [one for one in fitting if one.fit.offload is None]
    fitting = on_cards or [one for one in fitting if one.cards == max(other.cards for other in fitting)]
    useful = [one for one in fitting if one.layout.data <= max(1, in_flight)] or fitting
    most = max(one.max_concurrency for one in useful)
    holding = [one for one in useful if one.max_concurrency >= min(in_flight, most)]
    pool = [one for one in holding if meets_targets(one, case)]
    if not pool and case.workload.latency is not None:
        nearest = min(_compute_overrun(one, case) for one in holding)
        return min((one for one in holding if _compute_overrun(one, case) * SAME <= nearest), key=_rank_complexity)
    pool = pool or holding
    if case.peak_in_flight < MANY:
        quick = [one for one in pool if _is_quick(one, case)]
        return min(
            quick or pool, key=lambda one: (one.cards if quick else 0, -_estimate_speed(one), *_rank_complexity(one))
        )
    fastest = max(_estimate_speed(one) for one in pool)
    return min((one for one in pool if _estimate_speed(one) >= fastest * SAME), key=_rank_complexity)


def meets_targets(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether there are latency targets and the estimate meets them."""
    return case.workload.latency is not None and _compute_overrun(candidate, case) <= 1


def _compute_overrun(candidate: EngineCandidate, case: DecisionCase) -> float:
    """The larger ratio of estimate to target, of TTFT and TPOT; infinite if the speed cannot be predicted."""
    target, expected = case.workload.latency, candidate.expected
    if target is None or expected is None:
        return math.inf
    return target.compute_overrun(expected.ttft_s * 1000, expected.tpot_s * 1000)


def _is_quick(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether it meets the targets, or without a TPOT target, is faster than reading speed."""
    target, expected = case.workload.latency, candidate.expected
    if target is not None and target.tpot_ms is not None:
        return meets_targets(candidate, case)
    return expected is not None and expected.tpot_s <= COMFORT_TPOT_S


def _estimate_speed(candidate: EngineCandidate) -> float:
    """Total tokens per second; if that cannot be predicted, the number of concurrent requests."""
    return candidate.expected.output_tok_s if candidate.expected is not None else float(candidate.max_concurrency)


def _rank_complexity(candidate: EngineCandidate) -> tuple[int, ...]:
    layout = candidate.layout
    return (layout.pipeline, layout.tensor, layout.expert, layout.attention_data, layout.data)


def _get_least_bits(model: Model) -> float:
    had = _parse_bits(model.source_quantization or "")
    return TWICE_BITS if had is not None and had < TWICE_BITS else EVERYDAY_BITS


def _parse_bits(label: str) -> float | None:
    named = re.match(r"I?Q(\d)", label)
    return float(named[1]) if named else None


def _choose_weights(fitting: list[EngineCandidate], case: DecisionCase) -> EngineCandidate:
    """Of the candidates that fit, the first that holds all requests and, for a few, is faster than reading speed."""
    in_flight, least = case.in_flight, _get_least_bits(case.model)
    # Requests that wait for a GPU that holds all weights finish sooner than with weights in RAM.
    fitting = [one for one in fitting if one.fit.offload is None and one.nominal_bits >= least] or fitting
    holding = [one for one in fitting if one.max_concurrency >= in_flight]
    if not holding:
        # Some requests wait in any case, so fewer bits would only make the answers worse.
        everyday = [one for one in fitting if one.nominal_bits >= least] or fitting
        most = max(one.max_concurrency for one in everyday)
        return next(one for one in everyday if one.max_concurrency >= NEARLY * most)
    if case.workload.precision_sensitive or fitting[0].engine.effort >= SERVER_EFFORT:
        kept = [one for one in holding if one.nominal_bits >= least and meets_targets(one, case)]
        return kept[0] if kept else holding[0]
    everyday = [one for one in holding if one.nominal_bits >= least] or holding
    quick = [one for one in everyday if _is_quick(one, case)]
    return quick[0] if quick else min(everyday, key=lambda one: (one.expected.tpot_s if one.expected else 0, one.bits))
