"""Measurements on this machine as evidence: they correct estimates, and they take precedence over rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from bedplate.engines import load_engines
from bedplate.engines.base import DEVICES, get_card_family
from bedplate.facts.known_models import apply_label, look_up_model
from bedplate.values import Hardware, Model, Settings, Workload, replace_fields
from bedplate.values.agreement import Agreement
from bedplate.values.arrival import DEFAULT_THINK_TIME_S
from bedplate.values.decision import Device
from bedplate.values.result import Result
from bedplate.values.run import Load
from bedplate.values.tuning import TuningRun
from bedplate.values.verdict import SAME_SOURCE, ComparedEngine, Effect, Verdict

MOST_RESULTS = 200
PROVEN_GAIN = 1.10
"""A smaller gain is within the day-to-day variation of a machine, and a migration costs more than it brings."""
LEAST_QUALITY = 0.95
ALIKE = 2.0
"""Workloads are similar if concurrency, prompt length, output length and the prompt tokens that repeat no earlier
request each differ by at most this factor. The default loads of `bench` are no further apart, and the faster engine
seldom changes between them."""
MEASURED_LOADS = ("output_tok_s", "e2e_ms")
"""Metrics of a verdict's effects that exist once per load."""
Measured = tuple[str, Device]
"""An engine and its device: the speed on a CPU says nothing about the speed on a GPU."""


class MeasuredWork(NamedTuple):
    """What decides whether a measurement is about a similar workload. `None`: it does not apply, or is unknown."""

    prompt_tokens: float
    output_tokens: float
    concurrency: int | None = None
    requests_per_s: float | None = None
    sessions: int | None = None
    wait_s: float = 0.0
    """Between the requests of a session."""
    repeated_tokens: float | None = None
    """Prompt tokens that repeat an earlier request. Unknown for replays."""
    structured_output: bool | None = None
    """Whether answers had to follow a schema or call a tool. Unknown for replays."""


class WantedWork(NamedTuple):
    """The workload of a plan, with the requests in flight that follow from it."""

    workload: Workload
    in_flight: int


@dataclass(frozen=True)
class SpeedRatio:
    """One result compared with its estimate."""

    measured: Measured
    ratio: float
    """Measured over estimated output tokens per second."""
    run: str | None


@dataclass(frozen=True)
class Calibration:
    """The correction of the estimates of one engine on one device."""

    factor: float
    """The median ratio of measured to estimated speed."""
    runs: tuple[str, ...]
    """The runs with these measurements, newest first."""

    def describe(self) -> str:
        """The factor, its runs, and the command that removes them."""
        words = f"{self.factor:.2f}, the median ratio of measured to estimated speed on this machine"
        if not self.runs:
            return words
        which = ", ".join(self.runs[:2]) + (f" and {len(self.runs) - 2} more" if len(self.runs) > 2 else "")
        named, what = ("run", self.runs[0]) if len(self.runs) == 1 else ("runs", "ID")
        return f"{words} ({named} {which}; bedplate runs discard {what} removes {'it' if named == 'run' else 'one'})"


@dataclass(frozen=True)
class MachineEvidence:
    results: tuple[Result, ...] = ()
    calibrations: Mapping[Measured, Calibration] = field(default_factory=dict)
    agreements: tuple[Agreement, ...] = ()
    """Checks of the answers of engines with this model, newest first."""
    verdicts: tuple[Verdict, ...] = ()
    """Comparisons of two engines with this model, newest first."""
    tunings: tuple[TuningRun, ...] = ()
    """Tuning results with this model, newest first."""

    def get_factor(self, engine: str, device: Device) -> float:
        found = self.calibrations.get((engine, device))
        return found.factor if found is not None else 1.0

    def find_broken(self, engine: str, version: str, weights: str, settings: Settings) -> Agreement | None:
        """The check that found wrong answers with exactly these settings, unless a later check found none."""
        checked = (
            one
            for one in self.agreements
            if one.verdict != "unchecked" and one.has_same_setting(engine, version, weights, settings)
        )
        newest = next(checked, None)
        return newest if newest is not None and newest.verdict == "broken" else None

    def find_better(
        self, engine: str, quantization: str | None, work: Workload, in_flight: int | None = None
    ) -> list[BetterEngine]:
        """Engines that were measured to be clearly better on a similar workload, the largest gain first.

        A verdict takes precedence over the results that it was computed from, and a newer verdict over an older one.
        `in_flight`: the requests in flight of the workload; the default is what it states.
        """
        wanted = WantedWork(work, work.compute_in_flight() if in_flight is None else in_flight)
        of_verdicts = dict(_judge_verdicts(self.verdicts, engine, quantization, wanted))
        of_results = dict(_compare_results(_select_newest(self.results), engine, quantization, wanted))
        known = {**of_results, **of_verdicts}
        return sorted((one for one in known.values() if one is not None), key=lambda one: -one.gain)


@dataclass(frozen=True)
class BetterEngine:
    """An engine that was measured to be better than another, with the evidence."""

    engine: str
    gain: float
    """1.3: 30% more throughput."""
    text: str
    source: str
    made_into: str | None = None
    """The measured quantization, if it was converted from the same weights as the other engine's."""
    runs: tuple[str, ...] = ()


def _judge_verdicts(
    verdicts: Sequence[Verdict], engine: str, quantization: str | None, wanted: WantedWork
) -> Iterator[tuple[str, BetterEngine | None]]:
    """The newest verdict on each challenger; `None`: there is no reason to migrate to it."""
    seen: set[str] = set()
    for verdict in verdicts:
        a, b = verdict.a, verdict.b
        near = _find_nearest(verdict.effects, wanted)
        # If the faster engine depends on the load, the results for the requested load are better evidence.
        # A verdict on two versions of one engine is no reason to choose another engine.
        if a.engine != engine or b.engine in (engine, *seen) or near is None or verdict.constraint == "load":
            continue
        if not _has_same_weights(verdict, quantization):
            continue
        seen.add(b.engine)
        holds = verdict.answer == "migrate" and _is_right(b)
        yield b.engine, _from_verdict(verdict, near) if holds else None


def _from_verdict(verdict: Verdict, near: Effect) -> BetterEngine:
    b = verdict.b
    made = b.quantization if b.quantization != verdict.a.quantization else None
    runs = tuple(dict.fromkeys((*verdict.a.runs, *b.runs)))
    source = f"store: verdict on {_describe_runs(runs)}; bedplate runs discard ID removes one"
    text = f"measured here: {verdict.text}"
    if made is not None and b.quality is not None:
        note = b.quality.note or "its answers agree with the reference"
        text += f" Its {made} was converted from the same weights; {note}."
    return BetterEngine(b.engine, near.gain.value, text, source, made, runs)


def _is_right(side: ComparedEngine) -> bool:
    """Whether its answers were checked and agree with the reference; the verdict compares the two engines' quality."""
    found = side.quality
    return found is not None and found.verdict == "ok" and (found.agreement or 0.0) >= LEAST_QUALITY


def _has_same_weights(verdict: Verdict, quantization: str | None) -> bool:
    """Whether both engines ran these weights on one machine, and no difference was ignored."""
    for one in verdict.differences:
        if one.what in ("machine", "weights") or (one.what == "quantization" and one.note != SAME_SOURCE):
            return False
    return verdict.a.quantization in (None, quantization)


def _find_nearest(effects: Sequence[Effect], wanted: WantedWork) -> Effect | None:
    near = [
        (apart, one)
        for one in effects
        if one.metric in MEASURED_LOADS and (apart := _compute_distance(_read_load(one.load), wanted))
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def _compare_results(
    newest: Sequence[Result], engine: str, quantization: str | None, wanted: WantedWork
) -> Iterator[tuple[str, BetterEngine | None]]:
    """Compare each challenger's results with this engine's best result under the load nearest to the workload."""
    near = [
        (apart, one)
        for one in newest
        if one.engine == engine and (apart := _compute_distance(_read_result(one), wanted))
    ]
    own = [one for _, one in sorted(near, key=lambda pair: (pair[0], -(pair[1].output_tok_s or 0)))]
    fastest = sorted(newest, key=lambda one: -(one.output_tok_s or 0))
    for name in dict.fromkeys(one.engine for one in newest if one.engine != engine):
        theirs = [one for one in fastest if one.engine == name]
        mine = next((one for one in own if any(_is_fair(other, one, quantization) for other in theirs)), None)
        if mine is not None:
            better = (other for other in theirs if _is_fair(other, mine, quantization) and _is_better(other, mine))
            best = next(better, None)
            yield name, _from_results(best, mine) if best is not None else None


def _is_fair(other: Result, mine: Result, quantization: str | None) -> bool:
    """Whether two results are comparable; a conversion counts only if it started from the requested weights."""
    return other.is_comparable_to(mine) and mine.quantization in (other.quantization, quantization)


def _from_results(other: Result, mine: Result) -> BetterEngine:
    gain = (other.output_tok_s or 0) / (mine.output_tok_s or 1)
    text = (
        f"measured here: {gain - 1:.0%} more tokens per second than {get_engine_name(mine.engine)} on the same workload"
    )
    made = other.quantization if other.quantization != mine.quantization else None
    if made is not None:
        text += (
            f"; its {made} was converted from the same weights, with {other.quality or 0:.0%} greedy-token agreement"
        )
    runs = tuple(dict.fromkeys(run for run in (mine.run, other.run) if run))
    where = _describe_runs(runs) if mine.run and other.run else f"{other.at} and {mine.at}"
    source = f"store: {where}, {other.concurrency} requests in flight; bedplate runs discard ID removes one"
    return BetterEngine(other.engine, gain, text, source, made, runs)


def get_engine_name(engine: str) -> str:
    known = load_engines().get(engine)
    return known.name if known is not None else engine


def _describe_runs(names: Sequence[str]) -> str:
    return f"run{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _read_result(result: Result) -> MeasuredWork:
    return MeasuredWork(
        result.prompt_tokens,
        result.output_tokens,
        result.concurrency,
        repeated_tokens=result.shared_prefix_tokens,
        structured_output=None if result.shared_prefix_tokens is None else False,
    )


@lru_cache(maxsize=256)
def _read_load(load: Load) -> MeasuredWork | None:
    """`None` for the sessions of a trace, whose lengths a load does not have."""
    if load.trace is not None:
        replayed = MeasuredWork(load.prompt_tokens, load.output_tokens, requests_per_s=load.requests_per_s)
        return replayed if load.arrivals == "replay" else None
    if load.scenario is None:
        return MeasuredWork(
            load.prompt_tokens, load.output_tokens, load.concurrency, load.requests_per_s,
            repeated_tokens=load.shared_prefix_tokens, structured_output=False,
        )  # fmt: skip
    from bedplate.facts.scenarios import compute_means

    means = compute_means(load.scenario)
    return MeasuredWork(
        load.prompt_tokens,
        load.output_tokens,
        requests_per_s=None if load.requests_per_s is None else means.turns * load.requests_per_s,
        sessions=load.sessions,
        wait_s=means.wait_s,
        repeated_tokens=load.scenario.system_tokens + means.history_tokens,
        structured_output=means.structured_share > 0,
    )


class MeasuredWorkload(NamedTuple):
    """A workload under which an engine was measured."""

    engine: str
    model: str
    quantization: str | None
    workload: Workload


def list_measured_workloads(results: Iterable[Result], verdicts: Iterable[Verdict]) -> Iterator[MeasuredWorkload]:
    """Those of the results, and those of the first sides of the verdicts."""
    for one in results:
        yield MeasuredWorkload(one.engine, one.model, one.quantization, _make_workload(_read_result(one)))
    for verdict in verdicts:
        for load in dict.fromkeys(effect.load for effect in verdict.effects):
            if (measured := _read_load(load)) is not None:
                a = verdict.a
                yield MeasuredWorkload(a.engine, verdict.model, a.quantization, _make_workload(measured))


def _make_workload(measured: MeasuredWork) -> Workload:
    concurrency = measured.concurrency if measured.wait_s or measured.concurrency else measured.sessions
    return Workload(
        users=1 if concurrency else measured.sessions or 1,
        concurrency=concurrency,
        requests_per_s=measured.requests_per_s,
        think_time_s=measured.wait_s or None,
        prompt_tokens=round(measured.prompt_tokens),
        output_tokens=round(measured.output_tokens),
        shared_prefix_tokens=round(measured.repeated_tokens or 0),
        structured_output=bool(measured.structured_output),
    )


def _compute_distance(measured: MeasuredWork | None, wanted: WantedWork) -> float | None:
    """Distance of a measured load from the requested workload: 1 is the same; `None`: not similar.

    A measurement of unique prompts says little about a prefix cache, and one of free text little about schemas.
    """
    work = wanted.workload
    if measured is None or (pairs := _pair_load(measured, wanted)) is None:
        return None
    if measured.structured_output not in (None, work.structured_output):
        return None
    pairs += [(measured.prompt_tokens, work.prompt_tokens), (measured.output_tokens, work.output_tokens)]
    if measured.repeated_tokens is not None and (measured.repeated_tokens or work.repeated_prefix_tokens):
        new = max(1.0, measured.prompt_tokens - measured.repeated_tokens)
        pairs.append((new, work.prompt_tokens - work.repeated_prefix_tokens))
    ratios = [max(one / other, other / one) for one, other in pairs]
    return math.prod(ratios) if max(ratios) <= ALIKE else None


def _pair_load(measured: MeasuredWork, wanted: WantedWork) -> list[tuple[float, float]] | None:
    """The measured and the requested number of requests; `None`: they arrive in another way."""
    work = wanted.workload
    if measured.concurrency is not None:
        return [(measured.concurrency, wanted.in_flight)]
    if measured.requests_per_s is not None:
        return None if work.requests_per_s is None else [(measured.requests_per_s, work.requests_per_s)]
    if measured.sessions is None or work.requests_per_s is not None:
        return None
    if not measured.wait_s:  # a session without waiting times always has a request in flight
        return [(measured.sessions, wanted.in_flight)]
    if work.concurrency is not None:
        return None
    return [(measured.sessions, work.users), (measured.wait_s, work.think_time_s or DEFAULT_THINK_TIME_S)]


def _select_newest(results: Sequence[Result]) -> list[Result]:
    """The newest result of each engine and setting: the best of many runs would be chance."""
    found: dict[tuple[object, ...], Result] = {}
    for result in results:
        key = (
            result.machine, result.engine, result.model, result.quantization, result.weights_id, result.device,
            result.parallelism, result.concurrency, result.prompt_tokens, result.output_tokens,
            result.shared_prefix_tokens,
        )  # fmt: skip
        if result.output_tok_s:
            found.setdefault(key, result)
    return list(found.values())


def _is_better(one: Result, other: Result) -> bool:
    """Whether it is clearly faster, not slower to the first token, and gives correct answers.

    For converted weights, the agreement with the reference must have been measured.
    """
    if one.quality is None and one.quantization != other.quantization:
        return False
    if one.quality is not None and one.quality < LEAST_QUALITY:
        return False
    if (one.output_tok_s or 0) < PROVEN_GAIN * (other.output_tok_s or 0):
        return False
    if one.output_tok_s_low is None or other.output_tok_s_high is None:
        return False  # measured once: "a repeatable harness matters more than a single impressive run"
    if one.output_tok_s_low <= other.output_tok_s_high:
        return False  # the confidence intervals overlap
    return one.ttft_ms is None or other.ttft_ms is None or one.ttft_ms <= other.ttft_ms * PROVEN_GAIN


def gather_evidence(
    hardware: Hardware,
    model: Model,
    results: Sequence[Result],
    agreements: Sequence[Agreement] = (),
    verdicts: Sequence[Verdict] = (),
    tunings: Sequence[TuningRun] = (),
) -> MachineEvidence:
    """Turn results into evidence: those of this model may overrule a rule, and all of them correct the estimates."""
    return MachineEvidence(
        tuple(result for result in results if result.model == model.name),
        calibrate(compute_speed_ratios(hardware, results, (model,))),
        tuple(one for one in agreements if one.model == model.name),
        tuple(one for one in verdicts if one.model == model.name),
        tuple(one for one in tunings if one.model == model.name),
    )


def compute_speed_ratios(
    hardware: Hardware, results: Sequence[Result], models: Sequence[Model] = ()
) -> list[SpeedRatio]:
    """Compare each result, newest first, with its estimate. `models` are facts of models not known by name."""
    from bedplate.decide.estimate import compute_expectation

    found = []
    for result in results[:MOST_RESULTS]:
        measured_model = _get_model(result, models)
        if measured_model is None or not result.output_tok_s:
            continue
        known = load_engines().get(result.engine)
        work = Workload(
            concurrency=result.concurrency,
            prompt_tokens=result.prompt_tokens,
            output_tokens=result.output_tokens,
            # Cached prompt tokens are not computed, which is no property of the machine.
            shared_prefix_tokens=result.shared_prefix_tokens or 0 if known is not None and known.reuses_prefixes else 0,
        )
        device = result.device or _guess_device(hardware)
        machine = hardware if device != "cpu" else replace_fields(hardware, accelerators=(), links=())
        slots = -(-result.concurrency // result.parallelism.data)
        expected = compute_expectation(machine, measured_model, result.engine, result.parallelism, work, slots=slots)
        if expected is not None and expected.output_tok_s > 0:
            ratio = result.output_tok_s / expected.output_tok_s
            found.append(SpeedRatio((result.engine, device), ratio, result.run))
    return found


def calibrate(ratios: Sequence[SpeedRatio]) -> dict[Measured, Calibration]:
    groups: dict[Measured, list[SpeedRatio]] = {}
    for one in ratios:
        groups.setdefault(one.measured, []).append(one)
    return {
        measured: Calibration(
            statistics.median(one.ratio for one in group),
            tuple(dict.fromkeys(one.run for one in group if one.run is not None)),
        )
        for measured, group in groups.items()
    }


def _guess_device(hardware: Hardware) -> Device:
    return DEVICES.get(get_card_family(hardware.accelerators[0]), "cpu") if hardware.accelerators else "cpu"


def _get_model(result: Result, models: Sequence[Model]) -> Model | None:
    """The measured model with the measured weights: one of `models`, or one that is known by name."""
    found = next((one for one in models if one.name == result.model), None) or look_up_model(result.model)
    if found is None or not result.quantization or result.quantization == found.quantization:
        return found
    label = result.quantization.upper().replace(" ", "")
    stored = apply_label(found, label)
    # Results with an unknown quantization cannot correct an estimate.
    return stored if (stored.quantization or "").upper().replace(" ", "") == label else None
