"""The current bottleneck: the requests of the last minute, diagnosed like a measured cell."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from bedplate.engines import EngineState
from bedplate.judge.diagnose import build_roofline, diagnose_subject
from bedplate.judge.observed import LEAST_REQUESTS
from bedplate.measure.watch import summarize_states
from bedplate.page.live import WINDOW_S, RequestCounts
from bedplate.values import Hardware, Plan, replace_fields
from bedplate.values.diagnosis import Limit
from bedplate.values.live import LiveBottleneck
from bedplate.values.run import Cell, Load, Repeat, Sample, Subject
from bedplate.values.traffic import ServedRequest

MOST_EVIDENCE = 4
HOLD_S = 20.0
"""How long another bottleneck must have been found before it replaces the one that the page shows."""
IDLE = LiveBottleneck(text="No bottleneck: no requests in the last minute.")
TOO_FEW = LiveBottleneck(text=f"Unknown: fewer than {LEAST_REQUESTS} streamed responses ended in the last minute.")


class NamedBottleneck(NamedTuple):
    """The bottleneck that the page shows."""

    found: LiveBottleneck
    at_s: float
    """When it was found last."""
    plan: Plan
    slots: int
    other_since_s: float | None = None
    """Since when another one has been found; `None`: the last look found the same."""

    def get_limit(self, plan: Plan, slots: int, now_s: float) -> Limit | None:
        """`None` if it is of another engine, of other settings, or too old."""
        is_current = (self.plan, self.slots) == (plan, slots) and now_s <= self.at_s + WINDOW_S
        return self.found.limit if is_current else None


def keep_bottleneck(
    found: LiveBottleneck, last: NamedBottleneck | None, plan: Plan, slots: int, now_s: float
) -> NamedBottleneck:
    """What the page shows after it showed `last`. Traffic that has not changed keeps its bottleneck: another one
    replaces it after `HOLD_S`, and too few responses after a minute."""
    new = NamedBottleneck(found, now_s, plan, slots)
    named = last.get_limit(plan, slots, now_s) if last is not None else None
    if last is None or named is None or found == IDLE or found.limit == named:
        return new
    if found == TOO_FEW:
        return last
    since_s = now_s if last.other_since_s is None else last.other_since_s
    return new if now_s - since_s >= HOLD_S else last._replace(other_since_s=since_s)


def diagnose_window(
    tallies: Sequence[RequestCounts],
    recent: Sequence[ServedRequest],
    plan: Plan,
    slots: int,
    hardware: Hardware,
    states: Sequence[EngineState] = (),
    now_s: float | None = None,
    named: Limit | None = None,
) -> LiveBottleneck:
    """Name the bottleneck of one model.

    `tallies` are the seconds of the last minute, `slots` is the sum over all engines that take requests, and `states`
    are the engine metrics read in that time. `named`: the bottleneck that was named before. It stays until another one
    is clear: of two that are close, now one and now the other is larger.
    """
    concurrency = [tally.standing.in_flight + tally.standing.waiting for tally in tallies]
    busy = [number for number in concurrency if number]
    if not busy and not any(tally.ended for tally in tallies):
        return IDLE
    now_s = time.time() if now_s is None else now_s
    samples = [_to_sample(one, now_s) for one in recent if _is_fresh(one, now_s) and (one.completion_tokens or 0) > 1]
    if len(samples) < LEAST_REQUESTS:
        return TOO_FEW
    cell = _make_cell(samples, plan, slots, max(1, round(statistics.fmean(busy))) if busy else 1, states)
    found = diagnose_subject([cell], build_roofline(cell.subject, plan.model, hardware), named)
    if found.limit is None:
        why = found.loads[-1].why if found.loads else None
        return LiveBottleneck(text=f"Unknown: {why}." if why else "Unknown.")
    return LiveBottleneck(
        limit=found.limit,
        text=found.text,
        evidence=tuple(
            one.text for one in sorted(found.evidence, key=lambda one: one.limit != found.limit) if one.kind != "client"
        )[:MOST_EVIDENCE],
        change=found.changes[0].text if found.changes else None,
    )


def _is_fresh(request: ServedRequest, now_s: float) -> bool:
    return request.at_s + request.duration_ms / 1000 > now_s - WINDOW_S


def _to_sample(request: ServedRequest, now_s: float) -> Sample:
    return Sample(
        at_s=request.at_s - now_s,
        ttft_ms=request.ttft_ms,
        duration_ms=request.duration_ms,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.completion_tokens,
        cached_tokens=request.cached_tokens,
    )


def _make_cell(
    samples: Sequence[Sample], plan: Plan, slots: int, in_flight: int, states: Sequence[EngineState]
) -> Cell:
    subject = Subject(
        engine=plan.engine,
        engine_version=plan.engine_version,
        model=plan.model.name,
        quantization=plan.weights.label,
        device=plan.settings.device,
        # All replicas count as one engine with as many slots.
        parallelism=replace_fields(plan.parallelism, data=1),
        settings=replace_fields(plan.settings, slots=slots),
    )
    prompt = statistics.fmean(one.prompt_tokens or 0 for one in samples)
    output = statistics.fmean(one.output_tokens or 0 for one in samples)
    load = Load(concurrency=in_flight, prompt_tokens=max(1, round(prompt)), output_tokens=max(1, round(output)))
    repeat = Repeat(seconds=WINDOW_S, samples=tuple(samples), engine=summarize_states(states))
    return Cell(id="now", run="now", at="", machine="", subject=subject, load=load, repeats=(repeat,))
