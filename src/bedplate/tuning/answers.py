"""Compares the answers of a tuned engine with the reference: a setting that is faster but wrong is not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bedplate.measure.agreement import (
    Pairs,
    TokenComparison,
    ask,
    choose_floor,
    choose_quick_prefixes,
    judge_comparison,
)
from bedplate.measure.agreement import compare as compare_answers
from bedplate.measure.answers import collect_basis
from bedplate.measure.load import run as run_loop
from bedplate.measure.references import provide_affordable_reference
from bedplate.progress import SilentProgress
from bedplate.tuning.budget import Budget
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import describe_point
from bedplate.tuning.search import Point
from bedplate.tuning.state import TuningState
from bedplate.values.run import Quality

ASKED, ASK_AT_ONCE = 48, 4
"""Number of next tokens to compare, and the number of concurrent requests."""
CHECK_SHARE, LEAST_ASKED = 0.2, 12
"""Share of the budget for one comparison, and the fewest tokens to compare when the engine is slow."""
LAST_LINES = 3


class ActivityProgress(SilentProgress):
    """Shows a long step as the activity of the tuning."""

    def __init__(self, state: TuningState) -> None:
        self.state = state

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        self.state.say(label)
        yield lambda done: None


class AnswerChecker:
    def __init__(self, state: TuningState, budget: Budget, engines: Engines) -> None:
        self.state, self.budget, self.engines = state, budget, engines
        self.pairs: Pairs = ()
        self.evidence: tuple[str, ...] = ()
        """Evidence of the last comparison."""

    def check(self, point: Point) -> Quality:
        """Compare greedy next tokens with the reference, or with the plan's answers if there is no reference."""
        alive, began = self.engines.get(point), self.state.clock()
        self.state.say(f"comparing the answers of {describe_point(point)}")
        plan = self.state.plan
        if not self.pairs:
            source = plan.source or plan.model
            reference = provide_affordable_reference(
                source, self.state.hardware, ActivityProgress(self.state), left_s=self.state.left_s, name=source.name
            )
            if reference is not None:
                self.pairs = self.select_affordable(reference.list_known())
            else:
                self.pairs = run_loop(collect_basis(plan, plan, alive.where, most=ASKED)).pairs
                self.state.note("there is no reference for these weights: answers are compared with those of the plan")
        answers = run_loop(
            ask(alive.where.url, self.pairs, model=alive.where.name, key=alive.where.key, in_flight=ASK_AT_ONCE)
        )
        found = compare_answers(self.pairs, answers)
        floor = choose_floor(plan)
        if self.state.kept.lossy:
            floor = min(floor, choose_floor(alive.started.start.plan))
        verdict, note = judge_comparison(found, floor)
        self.evidence = describe_evidence(found)
        quality = Quality(
            asked=found.asked,
            agreement=found.agreed / found.answered if found.answered else None,
            verdict=verdict,
            note=note,
        )
        self.state.qualities[point] = quality
        self.budget.check_s = max(self.budget.check_s, self.state.clock() - began)
        return quality

    def select_affordable(self, known: Pairs) -> Pairs:
        """Select as many as fit into a share of the budget, and at least a few."""
        wanted, seen = choose_quick_prefixes(known, ASKED), self.state.trials.get(())
        first = seen.best.ttft_ms if seen is not None and seen.best is not None else None
        if not first or not wanted:
            return wanted
        load = self.state.kept.load
        # An upper bound: assumes prefill of one prompt after the other; batched prompts take less each.
        tokens_s = load.prompt_tokens * ((load.concurrency or 1) + 1) / 2 / (first / 1000)
        each_s = sum(one.tokens for _, one in wanted) / len(wanted) / tokens_s
        count = int(CHECK_SHARE * self.state.kept.budget_s / each_s)
        return wanted if count >= ASKED else choose_quick_prefixes(known, max(LEAST_ASKED, count))


def describe_evidence(found: TokenComparison) -> tuple[str, ...]:
    return tuple(
        f"after …{one.prefix[-40:]!r}: got {one.got!r}, expected {one.expected!r}"
        for one in found.evidence[:LAST_LINES]
    )
