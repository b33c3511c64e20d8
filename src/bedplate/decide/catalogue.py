"""The known models that this machine can run: each is decided as in `plan`, and the list is ranked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bedplate.decide.candidates import LEAST_BITS, PRECISE_BITS, READING_TOK_S, EngineCandidate
from bedplate.decide.cards import get_free_bytes, order_cards
from bedplate.decide.case import FEW, DecisionCase, with_model_task
from bedplate.decide.choose import EngineSearch, settle_load
from bedplate.decide.evidence import Calibration, MachineEvidence, Measured, calibrate, compute_speed_ratios
from bedplate.decide.explain import estimate_candidate
from bedplate.decide.memory import find_largest, fit
from bedplate.decide.wording import describe_shortage
from bedplate.engines import load_engines
from bedplate.facts.known_models import list_known_names, look_up_model, parse_model_name
from bedplate.facts.library import LocatedModel
from bedplate.facts.released import find_release_year
from bedplate.values import (
    Estimate,
    Figure,
    Hardware,
    LatencyTarget,
    Model,
    Offload,
    Parallelism,
    Refusal,
    Workload,
    replace_fields,
    to_json,
)
from bedplate.values.intent import Operations
from bedplate.values.model import Task
from bedplate.values.record import Record
from bedplate.values.result import Result
from bedplate.values.units import format_figure
from bedplate.values.units import format_size as as_size

EVERYDAY_TOKENS = 8192
"""Context of a usual conversation; weights that leave no memory for it are not considered."""
STEP_TOKENS = 1024
"""Resolution of the longest context."""
FIRST_YEAR = 2023
YEARLY_GAIN = 2.0
"""How much larger a model of the previous year must be to rank the same: an assumption, used only for ranking.

Published estimates of how quickly small models catch up are higher ("Densing law of LLMs", Xiao et al. 2025).
"""
UNKNOWN_BYTES_S, UNKNOWN_BITS = 40e9, 4.5
"""Ranks models where no speed can be predicted: the memory bandwidth of a usual desktop, and common weights."""
Pace = Literal["comfortable", "not predicted", "slow", "some wait"]
PACES: tuple[Pace, ...] = ("comfortable", "not predicted", "slow", "some wait")
"""In the order in which they are listed. Comfortable: twice the reading speed, or the requested speed."""


class CatalogueEntry(Record, frozen=True, kw_only=True):
    """One known model on one machine: how it would run, or why it does not."""

    name: str
    task: Task
    parameters: int
    active_parameters: int | None = None
    released: int | None = None
    """The year of publication."""
    max_context: int | None = None
    """The model's maximum context."""
    here: tuple[str, ...] = ()
    """Names of the copies that are already on this machine, as command-line arguments."""
    fits: bool
    """It fits, and is at least as fast as requested."""
    why: str | None = None
    """Why it does not fit."""
    engine: str | None = None
    rule: str | None = None
    """The rule that chose the engine."""
    format: str | None = None
    quantization: str | None = None
    parallelism: Parallelism = Parallelism()
    offload: Offload | None = None
    tok_s: Figure | None = None
    """Speed of one stream while the requested number of requests is in flight; `None`: not predicted."""
    estimate: Estimate = Estimate()
    memory_bytes: int | None = None
    """On the fullest device."""
    usable_bytes: int | None = None
    devices: int = 1
    """Devices that each hold this much."""
    longest_context: int | None = None
    """The longest request for which all requests in flight fit, with these weights and devices."""
    in_flight: int = 1
    """Concurrent requests that this was decided for."""
    max_concurrency: int = 0
    pace: Pace | None = None


class Catalogue(Record, frozen=True, kw_only=True):
    """The JSON output of `bedplate models`."""

    schema: Literal["models/1"] = "models/1"
    known: int
    """Number of models considered."""
    fitting: int
    models: tuple[CatalogueEntry, ...]
    notes: tuple[str, ...] = ()
    """Measurements on this machine that change the estimated speeds, and how to remove them."""


class DistinctModel(Record, frozen=True, kw_only=True):
    """One model, with all names of its versions and quantizations."""

    key: str
    name: str
    """The preferred name."""
    names: tuple[str, ...]


@lru_cache(maxsize=1)
def list_distinct_models() -> tuple[DistinctModel, ...]:
    """One entry for each model: its quantizations and chat versions are the same model."""
    groups: dict[str, list[str]] = {}
    for name in list_known_names():
        groups.setdefault(parse_model_name(name).key, []).append(name)
    for key in [key for key, names in groups.items() if all(parse_model_name(name).label for name in names)]:
        # Known in one quantization only, by a name that continues after it: Qwen3-32B-FP8-Static-PerTensor.
        plain = {parse_model_name(name.partition(f"-{parse_model_name(name).label}")[0]).key for name in groups[key]}
        for other in plain & (groups.keys() - {key}):
            groups[other] += groups.pop(key, [])
    return tuple(
        DistinctModel(key=key, name=min(names, key=_rank_name), names=tuple(names)) for key, names in groups.items()
    )


def _rank_name(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sort key: original weights first, then chat models, then short names."""
    is_chat = re.search(r"instruct|chat|-it\b", name, re.IGNORECASE)
    is_original = parse_model_name(name).label in (None, "BF16")
    return not is_original, "-Base" in name, not is_chat, len(name), name


def search_models(models: Iterable[DistinctModel], search: str | None) -> tuple[DistinctModel, ...]:
    """The models with a name that contains every searched word; case and separators do not matter."""
    words = (search or "").lower().split()

    def matches(name: str) -> bool:
        plain = re.sub(r"[-_. ]", "", name.lower())
        return all(word in name.lower() or re.sub(r"[-_. ]", "", word) in plain for word in words)

    return tuple(model for model in models if any(matches(name) for name in model.names))


def find_copies(located: Iterable[LocatedModel]) -> dict[str, tuple[str, ...]]:
    """By the key of each known model, the names of its copies on this machine."""
    found: dict[str, list[str]] = {}
    for one in located:
        found.setdefault(parse_model_name(one.name).key, []).append(one.name)
    return {key: tuple(names) for key, names in found.items()}


def with_everyday_context(workload: Workload) -> Workload:
    """The workload with the context of a conversation, if it has few requests and no lengths."""
    in_flight = workload.compute_in_flight(workload.assumed_request_s)
    if not has_default_lengths(workload) or in_flight > FEW or workload.task != "generate":
        return workload
    return replace_fields(workload, context_tokens=max(EVERYDAY_TOKENS, workload.request_tokens))


def has_default_lengths(workload: Workload) -> bool:
    default = Workload()
    lengths = (workload.context_tokens, workload.prompt_tokens, workload.output_tokens)
    return lengths == (None, default.prompt_tokens, default.output_tokens)


def build_catalogue(
    hardware: Hardware,
    workload: Workload,
    operations: Operations | None = None,
    *,
    models: Sequence[DistinctModel] | None = None,
    results: tuple[Result, ...] = (),
    here: Mapping[str, tuple[str, ...]] | None = None,
    least_tok_s: float | None = None,
) -> Iterator[tuple[DistinctModel, CatalogueEntry | None]]:
    """An entry for each model, in the order of `models`; `None` for models of another task than the workload's."""
    asker = _CatalogueBuilder(hardware, workload, operations or Operations(), results, least_tok_s)
    for known in list_distinct_models() if models is None else models:
        facts = look_up_model(known.name)
        entry = asker.build_entry(facts) if facts is not None and facts.task == workload.task else None
        yield known, replace_fields(entry, here=(here or {}).get(known.key, ())) if entry is not None else None


def describe_calibrations(
    hardware: Hardware, results: Sequence[Result], entries: Iterable[CatalogueEntry]
) -> tuple[str, ...]:
    """A note on each engine of the entries whose estimates were scaled by measurements."""
    used = {entry.engine for entry in entries}
    found = calibrate(compute_speed_ratios(hardware, results)) if used - {None} else {}
    return tuple(
        f"estimates of {engine} on {device} are scaled by {one.describe()}"
        for (engine, device), one in found.items()
        if engine in used
    )


def rank_entries(entries: Iterable[CatalogueEntry]) -> tuple[CatalogueEntry, ...]:
    """Sorted: comfortable models first, the most capable on top; models that do not fit last, the smallest first."""
    return tuple(sorted(entries, key=_rank))


def _rank(entry: CatalogueEntry) -> tuple[int, float, str, list[int], str]:
    if not entry.fits or entry.pace is None:
        return len(PACES), float(entry.parameters), "", [], entry.name
    worth = score_capability(entry)
    if entry.pace == "slow" and entry.tok_s is not None:
        # Among slow models, speed matters more than size: half the speed counts as a quarter.
        worth *= (entry.tok_s.value / READING_TOK_S) ** 2
    elif entry.pace == "not predicted":
        tok_s = UNKNOWN_BYTES_S / ((entry.active_parameters or entry.parameters) * UNKNOWN_BITS / 8)
        worth *= min(1.0, tok_s / READING_TOK_S) ** 2
    # Newer versions of a family come first: 1.5 before 1, and 3.6 before 3.5.
    plain = entry.name.rpartition("/")[2].lower()
    versions = [*(-int(number) for number in re.findall(r"\d+", plain)), 0]
    return PACES.index(entry.pace), -worth, re.split(r"\d", plain)[0], versions, entry.name


def score_capability(entry: CatalogueEntry) -> float:
    """A rough score for ranking: the geometric mean of all and active parameters, higher for newer models."""
    active = entry.active_parameters or entry.parameters
    years = max(0, (entry.released or FIRST_YEAR) - FIRST_YEAR)
    return math.sqrt(float(entry.parameters) * active) * YEARLY_GAIN**years


@dataclass(frozen=True)
class _ChosenCandidate:
    candidate: EngineCandidate
    rule: str
    case: DecisionCase


class _CatalogueBuilder:
    """Decides model after model; models of the same architecture and size are decided once."""

    def __init__(
        self,
        hardware: Hardware,
        workload: Workload,
        operations: Operations,
        results: tuple[Result, ...],
        least_tok_s: float | None,
    ) -> None:
        self.hardware, self.workload, self.operations = order_cards(hardware), workload, operations
        self.everyday = with_everyday_context(workload)
        self.unsaid = has_default_lengths(workload)
        self.results, self.least_tok_s = results, least_tok_s
        self._calibrations: Mapping[Measured, Calibration] | None = None
        self._decided: dict[str, CatalogueEntry] = {}

    def build_entry(self, model: Model) -> CatalogueEntry:
        own = tuple(result for result in self.results if result.model == model.name)
        shape = to_json(replace_fields(model, name="", sources=(), has_chat_template=False), indent=0)
        if own or shape not in self._decided:
            made = self._decide(model, own)
            if own:
                return made
            self._decided[shape] = made
        return replace_fields(self._decided[shape], name=model.name, released=find_release_year(model.name))

    def _decide(self, model: Model, own: tuple[Result, ...]) -> CatalogueEntry:
        plain = CatalogueEntry(
            name=model.name,
            task=model.task,
            parameters=model.parameters,
            active_parameters=model.active_parameters,
            released=find_release_year(model.name),
            max_context=model.max_context,
            fits=False,
        )
        if why := self._explain_impossible(model):
            return replace_fields(plain, why=why)
        workload = with_model_task(model, self._adapt_workload(model))
        if self.least_tok_s is not None and workload.latency is None:
            workload = replace_fields(workload, latency=LatencyTarget(tpot_ms=1000 / self.least_tok_s))
        case = DecisionCase(self.hardware, model, workload, self.operations)
        found = _choose_engine(case, MachineEvidence(own, self._get_calibrations()))
        if isinstance(found, str):
            return replace_fields(plain, why=found)
        return self._judge_pace(_describe_entry(plain, found))

    def _adapt_workload(self, model: Model) -> Workload:
        """The workload; default lengths are limited to the model's context."""
        most = model.max_context
        if most is None or self.everyday.request_tokens <= most or not self.unsaid:
            return self.everyday
        output = self.workload.output_tokens if model.task == "generate" else 1
        output = max(1, min(output, most // 2))
        return replace_fields(
            self.workload,
            context_tokens=most,
            prompt_tokens=max(1, min(self.workload.prompt_tokens, most - output)),
            output_tokens=output,
        )

    def _explain_impossible(self, model: Model) -> str | None:
        """Why the model cannot run, if that is known without a search."""
        tokens = self._adapt_workload(model).request_tokens
        if model.max_context is not None and tokens > model.max_context:
            return f"its context is only {model.max_context:,} tokens"
        bits = PRECISE_BITS if self.workload.precision_sensitive else LEAST_BITS
        smallest = min(model.weight_bytes, model.parameters * bits / 8)
        available = _sum_memory(self.hardware)
        if smallest > available:
            return f"its weights need {as_size(smallest)} at {bits:g} bits; only {as_size(available)} is available"
        return None

    def _get_calibrations(self) -> Mapping[Measured, Calibration]:
        """Corrections from measurements on this machine; the same for all models, so computed once."""
        if self._calibrations is None:
            self._calibrations = calibrate(compute_speed_ratios(self.hardware, self.results))
        return self._calibrations

    def _judge_pace(self, entry: CatalogueEntry) -> CatalogueEntry:
        """The entry with its pace; it does not fit if it is slower than requested."""
        speed, least = entry.tok_s, self.least_tok_s
        if least is not None and speed is None:
            return replace_fields(entry, fits=False, why="its speed cannot be predicted here")
        if least is not None and speed is not None and speed.value < least:
            return replace_fields(
                entry,
                fits=False,
                why=f"about {format_figure(speed.value, 2)} tok/s for one stream, less than requested",
            )
        if entry.max_concurrency < entry.in_flight:
            return replace_fields(entry, pace="some wait")
        if speed is None:
            return replace_fields(entry, pace="not predicted")
        return replace_fields(entry, pace="comfortable" if speed.value >= (least or READING_TOK_S) else "slow")


def _choose_engine(case: DecisionCase, evidence: MachineEvidence) -> _ChosenCandidate | str:
    """The choice of `plan`, or why no engine runs it here."""
    search = settle_load(EngineSearch(case, evidence, installable=False), None)
    candidate, reason = search.pick_engine()
    if candidate is not None and reason is not None:
        return _ChosenCandidate(candidate, reason.rule, search.case)
    return _summarize_refusals(
        [found for engine in load_engines().values() if isinstance(found := search.get_candidate(engine), Refusal)]
    )


def _summarize_refusals(refusals: Sequence[Refusal]) -> str:
    """The most informative refusal in short: how much memory is missing, if one says so."""
    lacking = sorted(
        (refusal for refusal in refusals if refusal.shortage is not None),
        key=lambda refusal: not load_engines()[refusal.engine].offloads,
    )
    if lacking and (shortage := lacking[0].shortage) is not None:
        return describe_shortage(shortage, breakdown=False)
    return refusals[0].why if refusals else "no engine runs it here"


def _sum_memory(hardware: Hardware) -> float:
    """All memory that can hold weights: that of the cards, and of the host unless they share it."""
    cards = hardware.accelerators
    shared = any(card.unified_memory for card in cards)
    on_cards = sum(get_free_bytes(card) or 0 for card in cards)
    return float(
        max(on_cards, hardware.memory.available_bytes) if shared else on_cards + hardware.memory.available_bytes
    )


def _describe_entry(plain: CatalogueEntry, found: _ChosenCandidate) -> CatalogueEntry:
    candidate, case = found.candidate, found.case
    estimate = estimate_candidate(candidate, case)
    fullest = max(candidate.fit.devices, key=lambda need: need.total_bytes)
    return replace_fields(
        plain,
        fits=True,
        engine=candidate.engine.id,
        rule=found.rule,
        format=candidate.weights.format,
        quantization=candidate.model.quantization or candidate.weights.label,
        parallelism=candidate.layout,
        offload=candidate.fit.offload,
        tok_s=compute_stream_speed(estimate),
        estimate=estimate,
        memory_bytes=fullest.total_bytes,
        usable_bytes=fullest.usable_bytes,
        devices=fullest.count,
        longest_context=find_longest_context(candidate, case),
        in_flight=case.in_flight,
        max_concurrency=candidate.max_concurrency,
    )


def compute_stream_speed(estimate: Estimate) -> Figure | None:
    """Tokens per second of one stream: the inverse of the time per output token, with its interval."""
    each = estimate.tpot_ms
    if each is None or each.value <= 0:
        return None
    return Figure(
        value=1000 / each.value,
        low=1000 / each.high,
        high=1000 / max(each.low, 1e-9),
        basis=each.basis,
        source=each.source,
    )


def find_longest_context(candidate: EngineCandidate, case: DecisionCase) -> int | None:
    """The longest request for which all requests in flight fit, with these weights and devices."""
    most = candidate.model.max_context
    if most is None:
        return None
    holds = _make_fit_check(candidate, case)
    if holds(most):
        return most
    asked = min(case.workload.request_tokens, most)
    return max(asked, STEP_TOKENS * find_largest(lambda steps: holds(steps * STEP_TOKENS), max(1, most // STEP_TOKENS)))


def _make_fit_check(candidate: EngineCandidate, case: DecisionCase) -> Callable[[int], bool]:
    workload = case.workload
    everyone = min(case.in_flight, candidate.max_concurrency)

    def holds(tokens: int) -> bool:
        prompt = max(1, tokens - workload.output_tokens)
        longer = replace_fields(
            workload, context_tokens=tokens, prompt_tokens=prompt, output_tokens=max(1, tokens - prompt)
        )
        room = fit(
            candidate.hardware, candidate.model, longer, candidate.engine, parallelism=candidate.layout,
            kv_type=candidate.settings.kv_type,
        )  # fmt: skip
        # Offload that was not planned would make it slower than the estimate in the same entry.
        same_place = room.offload is None or candidate.fit.offload is not None
        return room.fits and room.max_concurrency >= everyone and same_place

    return holds
