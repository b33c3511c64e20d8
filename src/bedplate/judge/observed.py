"""One cell as the parts of a mean request: what it waits for, what its prompt takes, what a step takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.summary import all_samples, why_invalid
from bedplate.values.run import Cell, Sample
from bedplate.values.statistics import quantile

ONE_TOKEN_EVENTS = (0.9, 1.15)
ALIKE = 0.5
"""Of the usual gap; where a quarter of all gaps is shorter than that, tokens come in clumps."""
NOTHING = 0.02
LEAST_REQUESTS = 3
FULL_CACHE = 0.95


class View(NamedTuple):
    """One cell as the parts of a mean request, in milliseconds."""

    request_ms: float
    ttft_ms: float
    tokens: float
    prompt: float
    """Tokens of it that had to be computed."""
    context: float
    """Tokens in the cache while the answer is made, on average."""
    step_ms: float
    """Between two tokens while no prompt is computed."""
    queue_ms: float
    queue_known: bool
    """Whether the engine or its settings say who waited; else the queue is what prompts alone cannot explain."""
    prefill_ms: float
    """Its own prompt, alone."""
    behind_ms: float
    """To the first token, spent while others were computed."""
    stalled_ms: float
    """Between tokens, likewise."""
    batch: float
    """Requests that were computed at once."""
    token_ms: float
    """What one token of a prompt takes."""
    stream_ms: float
    """What a further stream adds to a step: as steps grew with the batch, but no more than a token of a prompt."""


class Alone(NamedTuple):
    """One request at a time: what nothing else disturbs."""

    ttft_ms: float
    step_ms: float
    prompt: float


def _good(cell: Cell) -> list[Sample]:
    return [
        one
        for one in all_samples(cell)
        if one.outcome == "ok" and one.ttft_ms is not None and (one.output_tokens or 0) > 1
    ]


def alone_of(cells: Sequence[Cell]) -> Alone | None:
    for cell in cells:
        good = _good(cell)
        if cell.load.concurrency == 1 and len(good) >= LEAST_REQUESTS and not why_invalid(cell):
            return Alone(
                ttft_ms=statistics.median(one.ttft_ms or 0.0 for one in good),
                step_ms=statistics.median(one.tpot_ms or 0.0 for one in good),
                prompt=_prompt(cell, good),
            )
    return None


def _prompt(cell: Cell, good: Sequence[Sample]) -> float:
    """Tokens of a prompt that had to be computed."""
    counted = [one.prompt_tokens - (one.cached_tokens or 0) for one in good if one.prompt_tokens is not None]
    return max(1.0, statistics.fmean(counted)) if counted else float(cell.load.prompt_tokens)


def view_of(cell: Cell, alone: Alone | None) -> View | None:
    """`None` where there is nothing to see: too few requests, no tokens counted, the client in the way."""
    good = _good(cell)
    if len(good) < LEAST_REQUESTS or why_invalid(cell):
        return None
    in_flight = float(cell.load.concurrency or _littles_law(cell, good))
    request = statistics.fmean(one.duration_ms for one in good)
    if request <= 0:
        return None
    ttft = statistics.fmean(one.ttft_ms or 0.0 for one in good)
    tokens = statistics.fmean(float(one.output_tokens or 0) for one in good)
    prompt = _prompt(cell, good)
    whole = statistics.fmean(float(one.prompt_tokens or cell.load.prompt_tokens) for one in good)
    step = _step_ms(good)
    prefill, token = _prefill_ms(good, alone, prompt, step, in_flight)
    queue, known = _queue_ms(cell, request, ttft, prefill, step, in_flight)
    # A prompt's time that is only guessed from here has the queue in it; one that was measured alone has not.
    queue = min(queue, ttft if alone is None else max(0.0, ttft - prefill))
    prefill = min(prefill, ttft - queue)
    running = mean_of(repeat.engine.running_mean for repeat in cell.repeats)
    batch = in_flight * (1 - queue / request)
    if running is not None and running > 0:
        batch = min(in_flight, running)
    if (slots := slots_of(cell)) is not None:
        batch = min(batch, float(slots))
    return View(
        request_ms=request, ttft_ms=ttft, tokens=tokens, prompt=prompt, context=whole + tokens / 2, step_ms=step,
        queue_ms=queue, queue_known=known, prefill_ms=prefill, behind_ms=max(0.0, ttft - queue - prefill),
        stalled_ms=max(0.0, request - ttft - (tokens - 1) * step), batch=max(1.0, batch), token_ms=token,
        stream_ms=token,
    )  # fmt: skip


def views_of(cells: Sequence[Cell], alone: Alone | None) -> list[View | None]:
    """All cells of one subject: how steps grow with the batch is seen over all of them."""
    views = [view_of(cell, alone) for cell in cells]
    seen = sorted((view for view in views if view is not None), key=lambda view: view.batch)
    if not seen or seen[-1].batch - seen[0].batch < 1:
        return views
    few, many = seen[0], seen[-1]
    each = max(0.0, (many.step_ms - few.step_ms) / (many.batch - few.batch))
    return [view and view._replace(stream_ms=min(view.token_ms, each)) for view in views]


def _littles_law(cell: Cell, good: Sequence[Sample]) -> float:
    seconds = math.fsum(repeat.seconds for repeat in cell.repeats)
    return max(1.0, math.fsum(one.duration_ms for one in good) / 1000 / seconds) if seconds else 1.0


def _step_ms(good: Sequence[Sample]) -> float:
    """The usual gap where each event is a token; else the time per token of the requests that were disturbed least."""
    tpots = sorted(found for one in good if (found := one.tpot_ms) is not None)
    calm = quantile(tpots, 0.25)
    gaps = sorted(gap for one in good for gap in one.gaps_ms)
    made = sum(one.output_tokens or 0 for one in good) / max(1, sum(len(one.gaps_ms) + 1 for one in good))
    if gaps and ONE_TOKEN_EVENTS[0] <= made <= ONE_TOKEN_EVENTS[1]:
        usual = quantile(gaps, 0.5)
        # Events that arrive in clumps have gaps of nothing, which are no steps. That most time is spent on the prompts
        # of others makes few gaps long, and is no reason to doubt the usual one.
        if quantile(gaps, 0.25) >= ALIKE * usual and usual >= NOTHING * calm:
            return min(usual, quantile(tpots, 0.5))
    return calm


def _prefill_ms(
    good: Sequence[Sample], alone: Alone | None, prompt: float, step: float, in_flight: float
) -> tuple[float, float]:
    """A prompt by itself, and one token of it: as it was alone, else as the quickest first tokens here were."""
    if alone is not None and alone.prompt > 0:
        whole = max(0.0, alone.ttft_ms - alone.step_ms)
        return whole * prompt / alone.prompt, whole / alone.prompt
    ttfts = sorted(one.ttft_ms or 0.0 for one in good)
    least = max(0.0, quantile(ttfts, 0.5 if in_flight <= 1 else 0.05) - step)
    return least, least / prompt


def _queue_ms(
    cell: Cell, request: float, ttft: float, prefill: float, step: float, in_flight: float
) -> tuple[float, bool]:
    """How long a request waits although nothing but room is missing, by Little's law where it is known how many wait.

    Those that wait while other prompts are computed are counted by engines as well; that is no queue of this kind.
    """
    if in_flight <= 1:
        return 0.0, True
    waiting = mean_of(repeat.engine.waiting_mean for repeat in cell.repeats)
    by_engine = None if waiting is None else request * min(1.0, waiting / in_flight)
    if by_engine is not None and cache_is_full(cell):
        return by_engine, True
    if (slots := slots_of(cell)) is not None:
        return request * max(0.0, 1 - slots / in_flight), True
    # Even if all prompts that are in flight were computed one after the other first, it would not take longer.
    unexplained = max(0.0, ttft - in_flight * prefill - step)
    return (unexplained, False) if by_engine is None else (min(by_engine, unexplained), False)


def cache_is_full(cell: Cell) -> bool:
    preempted = sum(repeat.engine.preemptions or 0.0 for repeat in cell.repeats)
    used = most_of(repeat.engine.kv_use_max for repeat in cell.repeats)
    slots = slots_of(cell)
    room = slots is None or slots >= (cell.load.concurrency or 1)
    return preempted > 0 or (used is not None and used >= FULL_CACHE and room)


def slots_of(cell: Cell) -> int | None:
    """Requests that are computed at once at the most, over all replicas."""
    settings = cell.subject.settings
    return None if settings is None else settings.slots * max(1, cell.subject.parallelism.data)


def mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def most_of(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
