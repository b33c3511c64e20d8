"""The recommendation of the report: which engine to deploy, why, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bedplate.decide.evidence import PROVEN_GAIN
from bedplate.engines import load_engines
from bedplate.engines.roles import REFERENCE
from bedplate.judge.answers import explain_worse_answers
from bedplate.judge.words import describe_load_briefly
from bedplate.measure.knee import MET
from bedplate.measure.summary import is_valid, list_samples, meets, summarize_cell
from bedplate.values.diagnosis import Bottleneck, Diagnosis
from bedplate.values.evidence import find_exclusions
from bedplate.values.run import Cell, Load, Quality, Run
from bedplate.values.summary import Summary
from bedplate.values.workload import LatencyTarget

MOST_EFFORT = 5


@dataclass(frozen=True)
class MeasuredEngine:
    """One version of an engine with one kind of weights, and its cells."""

    engine: str
    quantization: str | None
    cells: tuple[Cell, ...]
    version: str | None = None
    """`None` if no other version of the engine was measured."""

    @property
    def name(self) -> str:
        known = load_engines().get(self.engine)
        name = known.name if known is not None else self.engine
        return " ".join(part for part in (name, self.version, self.quantization) if part)


@dataclass(frozen=True)
class Recommendation:
    headline: str
    choice: MeasuredEngine | None = None
    because: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()


def group_by_engine(cells: Sequence[Cell]) -> list[MeasuredEngine]:
    """The newest cell of each load, by engine, version and quantization, in the order of their first measurement."""
    found: dict[tuple[str, str | None, str | None], dict[Load, Cell]] = {}
    for cell in sorted(cells, key=lambda one: one.at):
        key = (cell.subject.engine, cell.subject.engine_version, cell.subject.quantization)
        found.setdefault(key, {})[cell.load] = cell
    versions = Counter(engine for engine, _ in {key[:2] for key in found})
    return [
        MeasuredEngine(engine, label, tuple(of.values()), version if versions[engine] > 1 else None)
        for (engine, version, label), of in found.items()
    ]


def recommend_engine(
    runs: Sequence[Run], diagnosis: Diagnosis | None = None, target: LatencyTarget | None = None
) -> Recommendation:
    """Recommends an engine. Engines with wrong answers are excluded, whatever their speed.

    Invalid cells and cells with few requests count for nothing.
    """
    cells = [cell for run in runs for cell in run.cells]
    missing = list_not_measured(runs)
    sound = [replace(one, cells=kept) for one in group_by_engine(cells) if (kept := tuple(filter(is_sound, one.cells)))]
    if not sound:
        headline = "There is no recommendation: no valid measurement has enough requests."
        return Recommendation(headline, not_measured=missing)
    sound, worse_ones = _exclude_worse_answers(sound)
    if target is not None:
        return _recommend_by_target(sound, target, diagnosis, missing, worse_ones)
    load = _choose_common_load(sound)
    ranked = sorted(((_find_rate(one, load), one) for one in sound if _find_rate(one, load)), key=lambda pair: -pair[0])
    if not ranked:
        return Recommendation("No measurement has a token throughput.", not_measured=missing)
    best_rate = ranked[0][0]
    # Engines whose difference is within the day-to-day variation of a machine are ranked by operational effort.
    close = [one for rate, one in ranked if rate * PROVEN_GAIN > best_rate]
    choice = min(close, key=lambda one: (_find_effort(one), -_find_rate(one, load)))
    rate = _find_rate(choice, load)
    because = [f"{choice.name} generates {rate:,.0f} tokens per second {_describe_load(load)}"]
    others = [(other, one) for other, one in ranked if one is not choice]
    if others and others[0][0] > rate:
        because.append(
            f"{others[0][1].name} generates {others[0][0]:,.0f}, which is less than {PROVEN_GAIN - 1:.0%} more: "
            "too little to justify its operational complexity"
        )
    elif others:
        next_rate, next_best = others[0]
        because.append(
            f"that is {rate / next_rate:.2f} times the throughput of the second, {next_best.name} with {next_rate:,.0f}"
        )
    without = [one.name for one in sound if not _find_rate(one, load)]
    if without:
        because.append(
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no valid measurement {_describe_load(load)}"
        )
    because += (*worse_ones, *_explain_choice(choice, diagnosis))
    return Recommendation(_write_headline(choice, sound), choice, tuple(because), missing)


def _exclude_worse_answers(sound: Sequence[MeasuredEngine]) -> tuple[list[MeasuredEngine], list[str]]:
    """The candidates whose answers are as good as the best one's, by the rule of `compare`; and the excluded ones."""
    checked = [(one, quality) for one in sound if (quality := _find_checked_quality(one)) is not None]
    if not checked:
        return list(sound), []
    best, best_quality = max(checked, key=lambda pair: (pair[1].agreement or 0.0, pair[1].asked))
    reasons = {
        one.name: why for one, quality in checked if (why := explain_worse_answers(best_quality, quality)) is not None
    }
    excluded = [f"{name} is excluded, whatever its speed: {why} ({best.name})" for name, why in reasons.items()]
    return [one for one in sound if one.name not in reasons], excluded


def _find_checked_quality(one: MeasuredEngine) -> Quality | None:
    known = (cell.quality for cell in one.cells)
    return next((quality for quality in known if quality is not None and quality.verdict == "ok"), None)


def _recommend_by_target(
    sound: Sequence[MeasuredEngine],
    target: LatencyTarget,
    diagnosis: Diagnosis | None,
    missing: tuple[str, ...],
    worse_ones: Sequence[str],
) -> Recommendation:
    served = {one.name: [cell for cell in one.cells if compute_met_share(cell, target) >= MET] for one in sound}
    words = " and ".join(
        f"{name} ≤ {value:g} ms" for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms)) if value
    )
    best = {one.name: max((_compute_tok_s(cell) for cell in served[one.name]), default=0.0) for one in sound}
    choice = max(sound, key=lambda one: (best[one.name], -_find_effort(one)))
    if not best[choice.name]:
        return Recommendation(f"No engine meets {words} at any measured load.", not_measured=missing)
    cell = max(served[choice.name], key=_compute_tok_s)
    because = [f"it generates {_compute_tok_s(cell):,.0f} tokens per second with {words} for {MET:.0%} of the requests"]
    because[0] += f" {_describe_load(cell.load)}, the heaviest measured load that meets the target"
    because += [
        f"{one.name} generates {best[one.name]:,.0f} within the target"
        if best[one.name]
        else f"{one.name} does not meet the target at any measured load"
        for one in sound
        if one is not choice
    ]
    because += (*worse_ones, *_explain_choice(choice, diagnosis))
    return Recommendation(_write_headline(choice, sound), choice, tuple(because), missing)


def _write_headline(choice: MeasuredEngine, sound: Sequence[MeasuredEngine]) -> str:
    """Recommends no engine by speed alone, nor by measurements of different models."""
    if len({cell.subject.model for one in sound for cell in one.cells}) > 1:
        return f"{choice.name} has the highest throughput, but the engines ran different weights: no choice is proven."
    if _find_checked_quality(choice) is None:
        return f"Deploy {choice.name}, after its answers have been checked."
    return f"Deploy {choice.name}."


def compute_met_share(cell: Cell, target: LatencyTarget) -> float:
    """The share of the requests that met the target."""
    samples = list_samples(cell)
    return sum(meets(sample, target) for sample in samples) / len(samples) if samples else 0.0


def list_not_measured(runs: Sequence[Run]) -> tuple[str, ...]:
    """Everything that a reader may expect and that was not measured."""
    found: list[str] = []
    for run in runs:
        if run.matrix is not None:
            for engine in run.matrix.engines:
                done = {cell.load for cell in run.cells if cell.repeats and is_named(cell, engine)}
                loads = [_describe_load(load) for load in run.matrix.loads if load not in done]
                if loads and not any(one.engine == engine for one in run.left_out):
                    found.append(f"{engine} {', '.join(loads)}")
        found += [f"{one.engine}: {one.why}" for one in run.left_out]
        if run.environment.bandwidth_bytes_s is None:
            found.append("the memory bandwidth of this machine (bedplate probe --measure)")
    cells = [cell for run in runs for cell in run.cells]
    unchecked = {c.subject.engine for c in cells if c.quality is None or c.quality.verdict == "unchecked"}
    found += [f"whether the answers of {engine} are correct" for engine in sorted(unchecked)]
    if cells and not any(repeat.use.energy_j is not None for cell in cells for repeat in cell.repeats):
        found.append("energy: no energy counter could be read")
    return tuple(dict.fromkeys(found))


def is_named(cell: Cell, engine: str) -> bool:
    """Whether a cell is one of the engine that a run names as ID or ID@VERSION."""
    name, _, version = engine.partition("@")
    return cell.subject.engine == name and version in ("", cell.subject.engine_version)


def find_bottleneck(one: MeasuredEngine, diagnosis: Diagnosis | None) -> Bottleneck | None:
    names = (one.engine, one.quantization)
    return next(
        (
            each
            for each in (diagnosis.bottlenecks if diagnosis else ())
            if (each.engine, each.quantization) == names and one.version in (None, each.engine_version)
        ),
        None,
    )


def summarize_cells(one: MeasuredEngine) -> list[tuple[Cell, Summary]]:
    return [(cell, summarize_cell(cell)) for cell in one.cells]


def _explain_choice(choice: MeasuredEngine, diagnosis: Diagnosis | None) -> list[str]:
    found = []
    if (bottleneck := find_bottleneck(choice, diagnosis)) is not None and bottleneck.limit is not None:
        found.append(f"its bottleneck: {bottleneck.text}")
    shares = [cell.quality.agreement for cell in choice.cells if cell.quality is not None and cell.quality.agreement]
    if shares:
        found.append(f"greedy-token agreement with {REFERENCE.name} in float32: {min(shares):.1%} of the prefixes")
    return found


def _choose_common_load(sound: Sequence[MeasuredEngine]) -> Load:
    """The heaviest load under which more than half of the candidates were measured."""
    counts: dict[Load, int] = {}
    for one in sound:
        for cell in one.cells:
            counts[cell.load] = counts.get(cell.load, 0) + 1
    common = [load for load in counts if 2 * counts[load] > len(sound)] or list(counts)
    return max(common, key=lambda load: (load.concurrency or 0, load.requests_per_s or 0.0, counts[load]))


def _find_rate(one: MeasuredEngine, load: Load) -> float:
    return max((_compute_tok_s(cell) for cell in one.cells if cell.load == load), default=0.0)


def _compute_tok_s(cell: Cell) -> float:
    return summarize_cell(cell).output_tok_s or 0.0


def _find_effort(one: MeasuredEngine) -> int:
    engine = load_engines().get(one.engine)
    return engine.effort if engine is not None else MOST_EFFORT


def is_sound(cell: Cell) -> bool:
    """Whether a recommendation may use the cell: it is valid, with enough requests and correct answers."""
    return is_valid(cell) and all(one.kind not in ("short", "broken") for one in find_exclusions(cell))


def _describe_load(load: Load) -> str:
    if load.concurrency is not None:
        return f"at {load.concurrency} in flight"
    if load.sessions is not None:
        return f"with {describe_load_briefly(load)}"
    return f"at {load.requests_per_s:g} requests per second" if load.requests_per_s else f"({load.arrivals})"
