"""From effects to an answer: right answers first, then none that fail, then the latency asked for, then speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bedplate.judge.effect import MOST_REPEATS, repeats_needed, wilson
from bedplate.judge.words import count_of, gain_words, short_load
from bedplate.measure.knee import MET
from bedplate.values.record import Figure
from bedplate.values.run import Quality
from bedplate.values.verdict import Answer, Constraint, Effect, OnTarget, Side

LEAST_REPEATS = 3
"""Of each side, before a gain counts as proven: "A repeatable harness matters more than a single impressive run"."""
NEARLY = 0.1
"""How far below what is asked the interval of a share may reach that is itself above it: few requests say no more."""
WORSE_AGREEMENT = 0.05
WORSE_PERPLEXITY = 1.05
"""Beyond what another order of additions explains: answers that are worse by so much are another product."""
MORE_ERRORS = 0.01
WHICH_LOAD = "say which load counts: --concurrency N"


class Opinion(NamedTuple):
    answer: Answer
    constraint: Constraint
    text: str
    would_prove: str | None = None


class Errors(NamedTuple):
    a: int
    a_of: int
    b: int
    b_of: int


class Case(NamedTuple):
    """All that the answer rests on."""

    a: Side
    b: Side
    main: tuple[Effect, ...]
    """One for each load."""
    ttft: tuple[Effect, ...]
    targets: tuple[OnTarget, ...]
    errors: Errors
    least_gain: float
    confidence: float

    @property
    def move(self) -> str:
        return f"{(self.least_gain - 1) * 100:.0f} %"


def weighed(case: Case) -> Opinion:
    found = _by_quality(case) or _by_errors(case) or _by_target(case) or _by_speed(case, case.main)
    return _if_answers_were_checked(case, found)


def _if_answers_were_checked(case: Case, opinion: Opinion) -> Opinion:
    """Nobody moves to an engine whose answers nobody looked at."""
    checked = case.b.quality is not None and case.b.quality.verdict != "unchecked"
    if opinion.answer != "migrate" or checked:
        return opinion
    text = f"{opinion.text} But its answers were not checked against a reference."
    return Opinion("not proven", "quality", text, "a run in which its answers are checked")


# answers


def _by_quality(case: Case) -> Opinion | None:
    mine, theirs = case.a.quality, case.b.quality
    if theirs is None or theirs.verdict == "unchecked":
        return None
    if theirs.verdict == "broken":
        told = f": {theirs.note}" if theirs.note else ""
        text = f"{case.b.engine} gives wrong answers here{told}. However fast, it is broken."
        return Opinion("stay", "quality", text, "answers that agree with the reference")
    if mine is None or mine.verdict == "unchecked":
        return None
    if mine.verdict == "broken":
        text = f"{case.a.engine} gives wrong answers here, and {case.b.engine} gives right ones."
        return Opinion("migrate", "quality", text)
    if (why := worse(mine, theirs)) is not None:
        text = f"{case.b.engine} answers worse: {why}. Speed does not make up for that."
        return Opinion("stay", "quality", text, "weights or settings with which its answers are as good")
    return None


def worse(mine: Quality, theirs: Quality) -> str | None:
    """Why the second is worse by more than chance."""
    if mine.agreement is not None and theirs.agreement is not None and mine.asked and theirs.asked:
        low = wilson(mine.agreement, mine.asked, 0.95)[0]
        high = wilson(theirs.agreement, theirs.asked, 0.95)[1]
        if theirs.agreement < mine.agreement - WORSE_AGREEMENT and high < low:
            return f"{theirs.agreement:.0%} of its next tokens agree with the reference, against {mine.agreement:.0%}"
    own, other = _over_reference(mine), _over_reference(theirs)
    if own is not None and other is not None and other > own * WORSE_PERPLEXITY:
        return f"perplexity {other:.2f} times the reference's, against {own:.2f} times"
    return None


def _over_reference(quality: Quality) -> float | None:
    """Endpoints tell more or less of a text's likelihood; only beside the reference's on the same part does it mean
    anything."""
    if quality.perplexity is None or quality.reference_perplexity is None:
        return None
    return quality.perplexity / quality.reference_perplexity


def _by_errors(case: Case) -> Opinion | None:
    found = case.errors
    if not found.a_of or not found.b_of:
        return None
    mine, theirs = found.a / found.a_of, found.b / found.b_of
    surely = wilson(theirs, found.b_of, 0.99)[0] > wilson(mine, found.a_of, 0.99)[1]
    if theirs <= mine + MORE_ERRORS or not surely:
        return None
    failed = f"{found.b} of {count_of(found.b_of, 'request')} to {case.b.engine} failed"
    text = f"{failed}, of those to {case.a.engine} {found.a} of {found.a_of}."
    return Opinion("stay", "errors", text, "a run in which it answers all requests")


# the latency that was asked for


def _by_target(case: Case) -> Opinion | None:
    """`None` where none was given."""
    if not case.targets:
        return None
    met = [(one, _met(one.a), _met(one.b)) for one in case.targets]
    only_a = [one for one, mine, theirs in met if mine and theirs is False and one.a.low > one.b.high]
    only_b = [one for one, mine, theirs in met if theirs and mine is False and one.b.low > one.a.high]
    if only_a and only_b:
        text = f"{case.a.engine} meets the latency target with {_loads(only_a)}, {case.b.engine} with {_loads(only_b)}."
        return Opinion("not proven", "load", text, WHICH_LOAD)
    if only_a:
        text = f"{case.b.engine} misses the latency target with {_loads(only_a)}: {_shares(case, only_a[-1])}."
        return Opinion("stay", "latency", text, f"settings with which {case.b.engine} meets it, too")
    if only_b:
        return _rescued(case, only_b)
    both = {one.load for one, mine, theirs in met if mine and theirs}
    if both:
        return _by_speed(case, [one for one in case.main if one.load in both], " Both meet the latency target there.")
    return _neither(case, all(mine is False and theirs is False for _, mine, theirs in met))


def _met(share: Figure) -> bool | None:
    """Whether enough requests are in time; `None`: too few to tell."""
    if share.value >= MET and share.low >= MET - NEARLY:
        return True
    return False if share.high < MET else None


def _rescued(case: Case, only_b: Sequence[OnTarget]) -> Opinion:
    text = f"Only {case.b.engine} meets the latency target with {_loads(only_b)}: {_shares(case, only_b[-1])}."
    slower = [one for one in case.main if _slower(one, case.least_gain)]
    if slower:
        text += f" But it is {gain_words(slower[-1])}."
        return Opinion("not proven", "load", text, WHICH_LOAD)
    return Opinion("migrate", "latency", text)


def _neither(case: Case, surely: bool) -> Opinion:
    lightest = case.targets[0]
    shares = (
        f"with {short_load(lightest.load)} {lightest.a.value:.0%} and {lightest.b.value:.0%} of requests are in time"
    )
    if surely:
        ways = "a smaller load, other settings (bedplate diagnose), or a third engine"
        return Opinion("not proven", "latency", f"Neither meets the latency target: {shares}.", ways)
    text = f"Whether the latency target is met is within chance: {shares}."
    return Opinion("not proven", "noise", text, "more requests under the same load")


def _shares(case: Case, one: OnTarget) -> str:
    return f"{one.b.value:.0%} of its requests are in time, of those to {case.a.engine} {one.a.value:.0%}"


def _loads(found: Sequence[OnTarget]) -> str:
    return ", ".join(short_load(one.load) for one in found)


# speed


def _by_speed(case: Case, main: Sequence[Effect], also: str = "") -> Opinion:
    if not main:
        text = "Neither tokens nor times were counted on both sides."
        return Opinion("not proven", "noise", text, "a run that counts tokens")
    faster = [one for one in main if _faster(one, case.least_gain)]
    slower = [one for one in main if _slower(one, case.least_gain)]
    if faster and slower:
        best, worst = max(faster, key=_value), min(slower, key=_value)
        text = f"{case.b.engine} is {gain_words(best)}, but {gain_words(worst)}."
        return Opinion("not proven", "load", text, WHICH_LOAD)
    if faster:
        return _moving(case, max(faster, key=lambda one: one.sure_low), also)
    if all(one.gain.high < case.least_gain for one in main):
        return _staying(case, main, also)
    return _unproven(case, max(main, key=_value), also)


def _value(one: Effect) -> float:
    return one.gain.value


def _faster(one: Effect, least_gain: float) -> bool:
    """The gain is no chance, and the best guess of it pays for the move."""
    return one.sure_low > 1.0 and one.gain.value >= least_gain and min(one.repeats) >= LEAST_REPEATS


def _slower(one: Effect, least_gain: float) -> bool:
    return one.sure_high < 1.0 and one.gain.value <= 1 / least_gain


def _moving(case: Case, best: Effect, also: str) -> Opinion:
    text = f"{case.b.engine} is {gain_words(best)}.{also}"
    later = None if case.targets else _later_first_token(case, best)
    if later is not None:
        text += f" But its first token takes {1 / later.gain.value:.1f} times as long."
        return Opinion("not proven", "latency", text, "a latency target that says what matters: --slo 'ttft_ms=…'")
    return Opinion("migrate", "throughput", f"{text} That is more than what moving costs ({case.move}).")


def _later_first_token(case: Case, best: Effect) -> Effect | None:
    found = (one for one in case.ttft if one.load == best.load)
    return next((one for one in found if one.gain.high < 1.0 and one.gain.value < 1 / case.least_gain), None)


def _staying(case: Case, main: Sequence[Effect], also: str) -> Opinion:
    if all(one.gain.high < 1.0 for one in main):
        text = f"{case.b.engine} is {gain_words(min(main, key=_value))}.{also}"
        return Opinion("stay", "throughput", text, "another version or setting of it")
    reach = max(main, key=lambda one: one.gain.high)
    text = f"{case.b.engine} is {gain_words(reach)}.{also}"
    text += f" Even the far end of that is less than what moving costs ({case.move})."
    return Opinion("stay", "moving costs", text, f"a gain of {case.move} or more, on this work")


def _unproven(case: Case, best: Effect, also: str) -> Opinion:
    text = f"{case.b.engine} is {gain_words(best)}.{also}"
    repeats = min(best.repeats)
    if repeats < LEAST_REPEATS:
        text += f" That rests on {count_of(repeats, 'repeat')}."
        return Opinion("not proven", "noise", text, _more(case, best, LEAST_REPEATS))
    gain, least = math.log(best.gain.value), math.log(case.least_gain)
    needed = repeats_needed(best.noise or 0.0, gain if gain >= least else least - gain, case.confidence)
    why = "Chance may explain it." if best.gain.low <= 1 <= best.gain.high else "Whether it pays is within chance."
    return Opinion("not proven", "noise", f"{text} {why}", _more(case, best, needed))


def _more(case: Case, best: Effect, needed: int | None) -> str:
    repeats = min(best.repeats)
    if needed is None:
        unsteady = f"repeats with {short_load(best.load)} vary so much that not even {MOST_REPEATS} would do"
        return f"a quieter machine: {unsteady}"
    count = max(needed, repeats + 1)
    turns = "" if best.paired else " that take turns"
    more = f"about {count} repeats of each with {short_load(best.load)}{turns}, instead of {repeats}"
    return f"{more}{_how(case, best, count)}"


def _how(case: Case, best: Effect, count: int) -> str:
    """The command that measures it, where it can be had by one."""
    if best.load.concurrency is None or case.a.engine == case.b.engine:
        return ""
    engines, load = f"{case.a.engine},{case.b.engine}", best.load.concurrency
    return f": bedplate bench --engines {engines} --concurrency {load} --repeats {count} --turns {count}"
