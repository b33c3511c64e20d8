"""Decide a comparison: by answer quality first, then by failed requests, then by the latency target, then by speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bedplate.judge.answers import describe_interval, describe_values
from bedplate.judge.effect import MOST_REPEATS, compute_repeats_needed
from bedplate.judge.structured import list_lost_kinds
from bedplate.judge.words import (
    METRIC_WORDS,
    describe_change,
    describe_gain,
    describe_load_briefly,
    format_count,
)
from bedplate.measure.knee import MET
from bedplate.measure.statistics import compute_wilson_interval
from bedplate.values.record import Figure
from bedplate.values.structured import KIND_NAMES, StructuredSupport
from bedplate.values.verdict import (
    Answer,
    ComparedEngine,
    Constraint,
    Effect,
    Metric,
    MetricName,
    QualityEffect,
    TargetShare,
)

LEAST_REPEATS = 3
"""Repeats of each side that prove a gain: "A repeatable harness matters more than a single impressive run"."""
TOLERANCE = 0.1
"""The lower end of the confidence interval may fall this far below the required share."""
MORE_ERRORS = 0.01
WHICH_LOAD = "choose the load that counts: --concurrency N"
METRICS: dict[MetricName, Metric] = {
    "ttft_p95": "ttft_p95_ms", "tpot_p95": "tpot_p95_ms", "tok_s": "output_tok_s", "peak_memory": "peak_memory_bytes",
    "quality": "agreement", "schema": "schema_match",
}  # fmt: skip
SHARES: tuple[Metric, ...] = ("agreement", "schema_match")
CONSTRAINTS: dict[MetricName, Constraint] = {
    "ttft_p95": "latency", "tpot_p95": "latency", "tok_s": "throughput", "peak_memory": "memory", "quality": "quality",
    "schema": "quality",
}  # fmt: skip
MISSING: dict[MetricName, tuple[str, str]] = {
    "ttft_p95": ("fewer than 20 requests of one side have a TTFT", "more requests under the same load"),
    "tpot_p95": ("fewer than 20 requests of one side have a TPOT", "more requests under the same load"),
    "tok_s": ("one side reports no token counts", "a run that counts tokens"),
    "peak_memory": ("the memory of one side was not measured", "a run on the machine of the engine"),
    "quality": ("the answers of one side were not checked against a reference", "a run that checks the answers"),
    "schema": (
        "one side has no result for structured output with the same prompts",
        "a run that measures it: bedplate bench --structured",
    ),
}
"""Why a metric is missing, and what would provide it."""


class ComparisonVerdict(NamedTuple):
    answer: Answer
    constraint: Constraint
    text: str
    would_prove: str | None = None


class ErrorCounts(NamedTuple):
    a: int
    a_of: int
    b: int
    b_of: int


class ComparisonFacts(NamedTuple):
    """Everything that decides a comparison."""

    a: ComparedEngine
    b: ComparedEngine
    main: tuple[Effect, ...]
    """One for each load."""
    ttft: tuple[Effect, ...]
    targets: tuple[TargetShare, ...]
    errors: ErrorCounts
    least_gain: float
    confidence: float
    tolerance: float
    metrics: Mapping[MetricName, tuple[Effect, ...]]
    """The effects of the metrics that were asked for; empty: speed decides."""
    answers: tuple[QualityEffect, ...] = ()

    @property
    def move(self) -> str:
        return f"{(self.least_gain - 1) * 100:.0f} %"


def decide_verdict(case: ComparisonFacts) -> ComparisonVerdict:
    found = (
        _decide_by_quality(case)
        or _decide_by_errors(case)
        or _decide_by_support(case)
        or (_decide_by_metrics(case) if case.metrics else _decide_by_target(case))
        or _decide_by_speed(case, case.main)
    )
    return _require_checked_answers(case, _refuse_mixed_result(case, found))


def explain_loss(case: ComparisonFacts, opinion: ComparisonVerdict) -> str | None:
    """Why the challenger is worse than the baseline by more than the tolerance; `None` if it is not."""
    decided = _decide_by_quality(case) or _decide_by_errors(case) or _decide_by_support(case)
    if decided is None and opinion.answer == "stay" and opinion.constraint == "latency" and not case.metrics:
        decided = opinion  # only the baseline meets the latency target
    if decided is not None:
        # The speed of a baseline that gives wrong answers does not count.
        return decided.text if decided.answer == "stay" else None
    losses = _list_losses(case)
    if opinion.answer == "migrate" or not losses:
        return None
    return f"{case.b.engine}: {describe_change(min(losses, key=_get_gain))}."


def _list_losses(case: ComparisonFacts) -> list[Effect]:
    effects = [one for found in case.metrics.values() for one in found] if case.metrics else case.main
    return [one for one in effects if is_loss(one, case.tolerance)]


def is_loss(one: Effect, tolerance: float) -> bool:
    """Whether a loss is significant, and its best estimate exceeds the tolerance."""
    return one.sure_high < 1.0 and one.gain.value < 1 - tolerance and min(one.repeats) >= LEAST_REPEATS


def _refuse_mixed_result(case: ComparisonFacts, opinion: ComparisonVerdict) -> ComparisonVerdict:
    """Does not recommend an engine that is worse under another load, unless quality or a target decided."""
    losses = _list_losses(case)
    if opinion.answer != "migrate" or opinion.constraint in ("quality", "latency") or not losses:
        return opinion
    text = f"{opinion.text} But under another load: {describe_change(min(losses, key=_get_gain))}."
    return ComparisonVerdict("not proven", "load", text, WHICH_LOAD)


def _require_checked_answers(case: ComparisonFacts, opinion: ComparisonVerdict) -> ComparisonVerdict:
    """Does not recommend an engine whose answers were not checked, or may be worse by more than the margin."""
    checked = case.b.quality is not None and case.b.quality.verdict != "unchecked"
    if opinion.answer != "migrate":
        return opinion
    if not checked:
        text = f"{opinion.text} But its answers were not checked against a reference."
        return ComparisonVerdict("not proven", "quality", text, "a run that checks its answers: bedplate reference")
    unproven = [one for one in case.answers if one.outcome == "not proven"]
    if not unproven or opinion.constraint == "quality":
        return opinion
    words = f"{describe_values(unproven[0])}: {describe_interval(unproven[0])}"
    text = f"{opinion.text} But its answers may be worse: {words}."
    return ComparisonVerdict("not proven", "quality", text, "a run that compares more answers with the reference")


# answers


def _decide_by_quality(case: ComparisonFacts) -> ComparisonVerdict | None:
    mine, theirs = case.a.quality, case.b.quality
    if theirs is None or theirs.verdict == "unchecked":
        return None
    if theirs.verdict == "broken":
        note = f": {theirs.note}" if theirs.note else ""
        text = f"{case.b.engine} gives wrong answers on this machine{note}. Its speed does not count."
        return ComparisonVerdict("stay", "quality", text, "answers that agree with the reference")
    if mine is None or mine.verdict == "unchecked":
        return None
    if mine.verdict == "broken":
        text = f"{case.a.engine} gives wrong answers on this machine, and {case.b.engine} gives correct ones."
        return ComparisonVerdict("migrate", "quality", text)
    worse = [one for one in case.answers if one.outcome == "worse"]
    if worse:
        text = f"The answers of {case.b.engine} are worse: {describe_values(worse[0])}. Its speed does not count."
        return ComparisonVerdict("stay", "quality", text, "weights or settings that make its answers as good")
    return None


def _decide_by_errors(case: ComparisonFacts) -> ComparisonVerdict | None:
    found = case.errors
    if not found.a_of or not found.b_of:
        return None
    mine, theirs = found.a / found.a_of, found.b / found.b_of
    is_significant = (
        compute_wilson_interval(theirs, found.b_of, 0.99)[0] > compute_wilson_interval(mine, found.a_of, 0.99)[1]
    )
    if theirs <= mine + MORE_ERRORS or not is_significant:
        return None
    failed = f"{found.b} of {format_count(found.b_of, 'request')} to {case.b.engine} failed"
    text = f"{failed}, and {found.a} of {found.a_of} to {case.a.engine}."
    return ComparisonVerdict("stay", "errors", text, "a run in which it answers all requests")


# structured output


def _decide_by_support(case: ComparisonFacts) -> ComparisonVerdict | None:
    """By the kinds of structured output that only one side supports, if that is what counts."""
    if "schema" not in case.metrics:
        return None
    mine, theirs = (None if side.quality is None else side.quality.structured for side in (case.a, case.b))
    if lost := list_lost_kinds(mine, theirs):
        reason = f": {lost[0].reason}" if lost[0].reason else ""
        text = f"{case.b.engine} does not support {_list_kinds(lost)}, and {case.a.engine} does{reason}."
        return ComparisonVerdict("stay", "quality", text, f"a version or settings of {case.b.engine} that support it")
    gained = list_lost_kinds(theirs, mine)
    if gained and not _list_losses(case):
        text = f"{case.b.engine} supports {_list_kinds(gained)}, and {case.a.engine} does not."
        return ComparisonVerdict("migrate", "quality", text)
    return None


def _list_kinds(kinds: Sequence[StructuredSupport]) -> str:
    names = [KIND_NAMES[one.kind] for one in kinds]
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


# single metrics


def _decide_by_metrics(case: ComparisonFacts) -> ComparisonVerdict:
    """By the metrics that were asked for: a loss first, then what is missing, then a gain."""
    order = [(name, one) for name, found in case.metrics.items() for one in found]
    losses = _list_losses(case)
    if losses:
        name, worst = min(((name, one) for name, one in order if one in losses), key=lambda pair: _get_gain(pair[1]))
        text = f"{case.b.engine}: {describe_change(worst)}."
        return ComparisonVerdict("stay", CONSTRAINTS[name], text, "another version of it, or other settings")
    for name, found in case.metrics.items():
        if not found:
            why, would_prove = MISSING[name]
            text = f"{METRIC_WORDS[METRICS[name]]} cannot be compared: {why}."
            return ComparisonVerdict("not proven", CONSTRAINTS[name], text, would_prove)
    gains = [(name, one) for name, one in order if _is_faster(one, case.least_gain)]
    if gains:
        name, best = max(gains, key=lambda pair: pair[1].sure_low)
        text = f"{case.b.engine}: {describe_change(best)}. {_describe_enough(case)}"
        return ComparisonVerdict("migrate", CONSTRAINTS[name], text)
    name, reach = max(order, key=lambda pair: pair[1].gain.high)
    text = f"{case.b.engine}: {describe_change(reach)}."
    if reach.gain.high < case.least_gain:
        return ComparisonVerdict(
            "stay", "moving costs", text, f"a gain of at least {case.move} in {', '.join(case.metrics)}"
        )
    return ComparisonVerdict("not proven", "noise", text, "more interleaved repeats")


# latency target


def _decide_by_target(case: ComparisonFacts) -> ComparisonVerdict | None:
    """`None` if no target was given."""
    if not case.targets:
        return None
    met = [(one, _meets_target(one.a), _meets_target(one.b)) for one in case.targets]
    only_a = [one for one, mine, theirs in met if mine and theirs is False and one.a.low > one.b.high]
    only_b = [one for one, mine, theirs in met if theirs and mine is False and one.b.low > one.a.high]
    if only_a and only_b:
        text = (
            f"{case.a.engine} meets the latency target with {_list_loads(only_a)}, {case.b.engine} with "
            f"{_list_loads(only_b)}."
        )
        return ComparisonVerdict("not proven", "load", text, WHICH_LOAD)
    if only_a:
        text = (
            f"{case.b.engine} misses the latency target with {_list_loads(only_a)}: "
            f"{_describe_shares(case, only_a[-1])}."
        )
        return ComparisonVerdict("stay", "latency", text, f"settings with which {case.b.engine} also meets it")
    if only_b:
        return _decide_only_challenger_meets(case, only_b)
    both = {one.load for one, mine, theirs in met if mine and theirs}
    if both:
        return _decide_by_speed(
            case, [one for one in case.main if one.load in both], " Both meet the latency target there."
        )
    return _decide_neither_meets(case, all(mine is False and theirs is False for _, mine, theirs in met))


def _meets_target(share: Figure) -> bool | None:
    """Whether enough requests meet the target; `None`: too few requests to decide."""
    if share.value >= MET and share.low >= MET - TOLERANCE:
        return True
    return False if share.high < MET else None


def _decide_only_challenger_meets(case: ComparisonFacts, only_b: Sequence[TargetShare]) -> ComparisonVerdict:
    text = (
        f"Only {case.b.engine} meets the latency target with {_list_loads(only_b)}: "
        f"{_describe_shares(case, only_b[-1])}."
    )
    slower = [one for one in case.main if _is_slower(one, case.least_gain)]
    if slower:
        text += f" But it is {describe_gain(slower[-1])}."
        return ComparisonVerdict("not proven", "load", text, WHICH_LOAD)
    return ComparisonVerdict("migrate", "latency", text)


def _decide_neither_meets(case: ComparisonFacts, is_certain: bool) -> ComparisonVerdict:
    lightest = case.targets[0]
    shares = (
        f"with {describe_load_briefly(lightest.load)}, {lightest.a.value:.0%} and {lightest.b.value:.0%} "
        f"of the requests meet it"
    )
    if is_certain:
        ways = "a smaller load, other settings (bedplate diagnose), or a third engine"
        return ComparisonVerdict("not proven", "latency", f"Neither meets the latency target: {shares}.", ways)
    text = f"Too few requests to decide whether the latency target is met: {shares}."
    return ComparisonVerdict("not proven", "noise", text, "more requests under the same load")


def _describe_shares(case: ComparisonFacts, one: TargetShare) -> str:
    return f"{one.b.value:.0%} of its requests meet it, and {one.a.value:.0%} of those to {case.a.engine}"


def _list_loads(found: Sequence[TargetShare]) -> str:
    return ", ".join(describe_load_briefly(one.load) for one in found)


# speed


def _decide_by_speed(case: ComparisonFacts, main: Sequence[Effect], also: str = "") -> ComparisonVerdict:
    if not main:
        text = "The two sides have neither token counts nor request times in common."
        return ComparisonVerdict("not proven", "noise", text, "a run that counts tokens")
    faster = [one for one in main if _is_faster(one, case.least_gain)]
    slower = [one for one in main if _is_slower(one, case.least_gain)]
    if faster and slower:
        best, worst = max(faster, key=_get_gain), min(slower, key=_get_gain)
        text = f"{case.b.engine} is {describe_gain(best)}, but {describe_gain(worst)}."
        return ComparisonVerdict("not proven", "load", text, WHICH_LOAD)
    if faster:
        return _recommend_moving(case, max(faster, key=lambda one: one.sure_low), also)
    if all(one.gain.high < case.least_gain for one in main):
        return _recommend_staying(case, main, also)
    return _explain_unproven(case, main, also)


def _get_gain(one: Effect) -> float:
    return one.gain.value


def _is_faster(one: Effect, least_gain: float) -> bool:
    """Whether the gain is significant, and its best estimate reaches the minimum gain for a migration."""
    return one.sure_low > 1.0 and one.gain.value >= least_gain and min(one.repeats) >= LEAST_REPEATS


def _is_slower(one: Effect, least_gain: float) -> bool:
    return one.sure_high < 1.0 and one.gain.value <= 1 / least_gain


def _recommend_moving(case: ComparisonFacts, best: Effect, also: str) -> ComparisonVerdict:
    text = f"{case.b.engine} is {describe_gain(best)}.{also}"
    later = None if case.targets else _find_later_first_token(case, best)
    if later is not None:
        text += f" But its TTFT is {1 / later.gain.value:.1f} times as long."
        return ComparisonVerdict("not proven", "latency", text, "a latency target, which decides: --slo 'ttft_ms=…'")
    return ComparisonVerdict("migrate", "throughput", f"{text} {_describe_enough(case)}")


def _describe_enough(case: ComparisonFacts) -> str:
    return f"That is at least the minimum gain for a migration ({case.move})."


def _find_later_first_token(case: ComparisonFacts, best: Effect) -> Effect | None:
    found = (one for one in case.ttft if one.load == best.load)
    return next((one for one in found if one.gain.high < 1.0 and one.gain.value < 1 / case.least_gain), None)


def _recommend_staying(case: ComparisonFacts, main: Sequence[Effect], also: str) -> ComparisonVerdict:
    if all(one.gain.high < 1.0 for one in main):
        text = f"{case.b.engine} is {describe_gain(min(main, key=_get_gain))}.{also}"
        return ComparisonVerdict("stay", "throughput", text, "another version of it, or other settings")
    reach = max(main, key=lambda one: one.gain.high)
    text = f"{case.b.engine} is {describe_gain(reach)}.{also}"
    text += f" Even the upper end of the interval is below the minimum gain for a migration ({case.move})."
    return ComparisonVerdict("stay", "moving costs", text, f"a gain of at least {case.move} on this workload")


def _explain_unproven(case: ComparisonFacts, main: Sequence[Effect], also: str) -> ComparisonVerdict:
    best, worst = max(main, key=_get_gain), min(main, key=_get_gain)
    other = f", but {describe_gain(worst)}" if worst.gain.high < 1.0 < best.gain.value else ""
    text = f"{case.b.engine} is {describe_gain(best)}{other}.{also}"
    repeats = min(best.repeats)
    if repeats < LEAST_REPEATS:
        text += f" The measurement has only {format_count(repeats, 'repeat')}."
        return ComparisonVerdict("not proven", "noise", text, _describe_needed_repeats(case, best, LEAST_REPEATS))
    gain, least = math.log(best.gain.value), math.log(case.least_gain)
    needed = compute_repeats_needed(best.noise or 0.0, gain if gain >= least else least - gain, case.confidence)
    why = "The difference may be noise."
    if not best.gain.low <= 1 <= best.gain.high:
        why = f"Whether the gain reaches the minimum for a migration ({case.move}) is not certain."
    return ComparisonVerdict("not proven", "noise", f"{text} {why}", _describe_needed_repeats(case, best, needed))


def _describe_needed_repeats(case: ComparisonFacts, best: Effect, needed: int | None) -> str:
    repeats = min(best.repeats)
    if needed is None:
        unsteady = f"repeats with {describe_load_briefly(best.load)} vary so much that {MOST_REPEATS} would not suffice"
        return f"a machine with less other load: {unsteady}"
    count = max(needed, repeats + 1)
    kind = "repeats" if best.paired else "interleaved repeats"
    more = f"about {count} {kind} of each with {describe_load_briefly(best.load)}, instead of {repeats}"
    return f"{more}{_write_bench_command(case, best, count)}"


def _write_bench_command(case: ComparisonFacts, best: Effect, count: int) -> str:
    """The command that measures it, if one command can."""
    if best.load.concurrency is None or case.a.engine == case.b.engine:
        return ""
    engines, load = f"{case.a.engine},{case.b.engine}", best.load.concurrency
    return f": bedplate bench --engines {engines} --concurrency {load} --repeats {count} --turns {count}"
