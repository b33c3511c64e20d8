"""Judges the sides of a tuning's proof by the rules of `compare`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bedplate.errors import UsageError
from bedplate.judge.compare import CHANCE, compare
from bedplate.measure.statistics import compute_half_width
from bedplate.measure.summary import compute_output_tok_s, list_tpots, list_ttfts, summarize_cell
from bedplate.tuning.rounds import SURELY
from bedplate.values import Launch, Plan
from bedplate.values.record import Figure
from bedplate.values.run import Cell, Load, Repeat
from bedplate.values.tuning import (
    ComparedSettings,
    Objective,
    Opponent,
    Proof,
    SettingChange,
    SideName,
    TrialMeasurement,
    TuningRun,
)
from bedplate.values.verdict import Answer, Effect, Metric, Verdict

LEAST_GAIN = 1.03
"""Changing a setting costs nothing, so the required gain is smaller than for a migration to another engine."""
SPEED_KEPT = 0.9
"""Share of the plan's throughput that a setting for less memory or energy must keep."""
LOST = -20.0
"""Score of a measurement without output: a logarithm that JSON can represent."""


def is_settled(tuned: TuningRun, other: Cell, best: Cell) -> bool:
    """Whether more rounds would not change the result; uses a stricter significance level than the final proof."""
    try:
        verdict = _compare_cells(tuned, other, best, chance=SURELY)
    except UsageError:
        return False
    speed = _find_effect(verdict, "output_tok_s")
    slower = speed is not None and speed.sure_high < 1 and tuned.objective in ("throughput", "cost")
    return slower or choose_answer(tuned.objective, verdict, other, best) == "migrate"


def make_proof(tuned: TuningRun, against: Opponent, other: Cell, best: Cell) -> Proof:
    try:
        verdict = _compare_cells(tuned, other, best)
    except UsageError as error:
        return Proof(against=against, answer="not proven", text=error.summary)
    speed, first = _find_effect(verdict, "output_tok_s"), _find_effect(verdict, "ttft_ms")
    return Proof(
        against=against,
        answer=choose_answer(tuned.objective, verdict, other, best),
        text=verdict.text,
        output_tok_s=speed.gain if speed is not None else None,
        ttft_ms=first.gain if first is not None else None,
    )


def _compare_cells(tuned: TuningRun, other: Cell, best: Cell, chance: float = CHANCE) -> Verdict:
    return compare(
        [other], [best], target=tuned.target, allow=("quantization", "weights"), least_gain=LEAST_GAIN, chance=chance,
        same_work=True,
    )  # fmt: skip


def choose_answer(objective: Objective, verdict: Verdict, other: Cell, tuned: Cell) -> Answer:
    """Return the answer of `compare` for throughput; for other objectives, apply the same rules to their figures."""
    if objective in ("throughput", "cost") or verdict.constraint in ("quality", "errors"):
        return verdict.answer
    speed = _find_effect(verdict, "output_tok_s")
    if objective == "latency":
        first, each = _find_effect(verdict, "ttft_ms"), _find_effect(verdict, "tpot_ms")
        if first is None or each is None:
            return "not proven"
        gain = first.gain.value * each.gain.value
        sure = min(first.sure_high, each.sure_high) >= 1 and max(first.sure_low, each.sure_low) > 1
        return "migrate" if gain >= LEAST_GAIN**2 and sure else "not proven"
    one, two = summarize_cell(other), summarize_cell(tuned)
    before, after = (
        (one.peak_memory_bytes, two.peak_memory_bytes)
        if objective == "memory"
        else (one.energy_j_per_token, two.energy_j_per_token)
    )
    if not before or not after or speed is None:
        return "not proven"
    return "migrate" if before / after >= LEAST_GAIN and speed.gain.high >= SPEED_KEPT else "not proven"


def _find_effect(verdict: Verdict, metric: Metric) -> Effect | None:
    return next((one for one in verdict.effects if one.metric == metric), None)


def make_side(
    name: SideName, turned: tuple[SettingChange, ...], plan: Plan, launch: Launch, cell: Cell
) -> ComparedSettings:
    found = summarize_cell(cell)
    peak = found.peak_gpu_bytes if cell.subject.device != "cpu" and found.peak_gpu_bytes else found.peak_memory_bytes
    return ComparedSettings(
        name=name,
        turned=turned,
        settings=plan.settings,
        weights=plan.weights,
        argv=launch.argv,
        variables=tuple(launch.env.items()),
        output_tok_s=_make_figure([compute_output_tok_s(one, cell.load) for one in cell.repeats]),
        ttft_ms=_make_figure([compute_median(list_ttfts(one.samples)) for one in cell.repeats]),
        tpot_ms=_make_figure([compute_median(list_tpots(one.samples)) for one in cell.repeats]),
        peak_memory_bytes=peak,
        energy_j_per_token=found.energy_j_per_token,
        quality=cell.quality,
        cell=cell.id,
        taken=tuple(summarize_round(one, cell.load) for one in cell.repeats),
    )


def summarize_round(repeat: Repeat, load: Load) -> TrialMeasurement:
    """Summarize the measurement of one side in one round."""
    energy = repeat.use.energy_j
    speed, first, each = (
        compute_output_tok_s(repeat, load),
        compute_median(list_ttfts(repeat.samples)),
        compute_median(list_tpots(repeat.samples)),
    )
    made = sum(one.output_tokens or 0 for one in repeat.samples)
    return TrialMeasurement(
        at=repeat.at or "", seconds=round(repeat.seconds, 3), score=math.log(speed) if speed else LOST,
        output_tok_s=speed, ttft_ms=first, tpot_ms=each, peak_memory_bytes=repeat.use.peak_memory_bytes,
        energy_j_per_token=energy / made if energy is not None and made else None,
    )  # fmt: skip


def compute_median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _make_figure(values: Sequence[float | None]) -> Figure | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, wide = statistics.fmean(known), compute_half_width(known) or 0.0
    words = f"{len(known)} interleaved repeats"
    return Figure(value=mean, low=max(0.0, mean - wide), high=mean + wide, basis="measured", source=words)
