"""Divide the mean request of a cell into parts: queue, prefill and steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bedplate.measure.summary import list_invalid_reasons, list_samples
from bedplate.values.run import Cell, Sample
from bedplate.values.statistics import compute_quantile

ONE_TOKEN_EVENTS = (0.9, 1.15)
"""Tokens per stream event within which each event counts as one token."""
LEAST_SHORT_GAP = 0.5
"""As a share of the median gap. If a quarter of the gaps are shorter, several events arrive in one packet."""
LEAST_MEDIAN_GAP = 0.02
"""As a share of the time per output token; a smaller median gap is not a step."""
LEAST_REQUESTS = 3
FULL_CACHE = 0.95


class RequestBreakdown(NamedTuple):
    """The parts of the mean request of a cell, in milliseconds."""

    request_ms: float
    ttft_ms: float
    tokens: float
    prompt: float
    """Prompt tokens that were not in the prefix cache."""
    context: float
    """Mean number of tokens in the KV cache while the answer is generated."""
    step_ms: float
    """Time between two tokens while no prefill runs."""
    queue_ms: float
    queue_known: bool
    """Whether the engine or its settings report the queue; otherwise it is the time that prefills do not explain."""
    prefill_ms: float
    """The request's own prefill, alone."""
    behind_ms: float
    """Part of the TTFT during which other requests were computed."""
    stalled_ms: float
    """Time between tokens during which other requests were prefilled."""
    batch: float
    """Mean number of requests in a batch."""
    token_ms: float
    """Prefill time of one prompt token."""
    stream_ms: float
    """What an added stream adds to a step: the growth of steps with the batch, but at most one prompt token."""


class SingleRequestTimes(NamedTuple):
    """The median request of a cell with one request at a time."""

    ttft_ms: float
    step_ms: float
    prompt: float


def _select_good(cell: Cell) -> list[Sample]:
    return [
        one
        for one in list_samples(cell)
        if one.outcome == "ok" and one.ttft_ms is not None and (one.output_tokens or 0) > 1
    ]


def list_disturbances(cell: Cell) -> tuple[str, ...]:
    """How other processes used the machine. Its times then show their load too, and not only the engine's limits."""
    texts = (flag.text for flag in cell.flags if flag.kind == "busy")
    return tuple(text.removeprefix("other processes ").removeprefix("used ") for text in texts)


def _is_usable(cell: Cell) -> bool:
    return not list_invalid_reasons(cell) and not list_disturbances(cell)


def find_single_request(cells: Sequence[Cell]) -> SingleRequestTimes | None:
    for cell in cells:
        good = _select_good(cell)
        if cell.load.concurrency == 1 and len(good) >= LEAST_REQUESTS and _is_usable(cell):
            return SingleRequestTimes(
                ttft_ms=statistics.median(one.ttft_ms or 0.0 for one in good),
                step_ms=statistics.median(one.tpot_ms or 0.0 for one in good),
                prompt=_compute_prompt_tokens(cell, good),
            )
    return None


def _compute_prompt_tokens(cell: Cell, good: Sequence[Sample]) -> float:
    """Mean number of prompt tokens that were not in the prefix cache."""
    counted = [one.prompt_tokens - (one.cached_tokens or 0) for one in good if one.prompt_tokens is not None]
    return max(1.0, statistics.fmean(counted)) if counted else float(cell.load.prompt_tokens)


def break_down_cell(cell: Cell, alone: SingleRequestTimes | None) -> RequestBreakdown | None:
    """`None` if the cell is invalid or disturbed, or has too few requests with counted tokens."""
    good = _select_good(cell)
    if len(good) < LEAST_REQUESTS or not _is_usable(cell):
        return None
    in_flight = float(cell.load.concurrency or _apply_littles_law(cell, good))
    request = statistics.fmean(one.duration_ms for one in good)
    if request <= 0:
        return None
    ttft = statistics.fmean(one.ttft_ms or 0.0 for one in good)
    tokens = statistics.fmean(float(one.output_tokens or 0) for one in good)
    prompt = _compute_prompt_tokens(cell, good)
    whole = statistics.fmean(float(one.prompt_tokens or cell.load.prompt_tokens) for one in good)
    step = _compute_step_ms(good)
    prefill, token = _compute_prefill_ms(good, alone, prompt, step, in_flight)
    queue, known = _compute_queue_ms(cell, request, ttft, prefill, step, in_flight)
    # A prefill time inferred from this cell includes the queue; one that was measured alone does not.
    queue = min(queue, ttft if alone is None else max(0.0, ttft - prefill))
    prefill = min(prefill, ttft - queue)
    running = compute_mean(repeat.engine.running_mean for repeat in cell.repeats)
    batch = in_flight * (1 - queue / request)
    if running is not None and running > 0:
        batch = min(in_flight, running)
    if (slots := count_slots(cell)) is not None:
        batch = min(batch, float(slots))
    return RequestBreakdown(
        request_ms=request, ttft_ms=ttft, tokens=tokens, prompt=prompt, context=whole + tokens / 2, step_ms=step,
        queue_ms=queue, queue_known=known, prefill_ms=prefill, behind_ms=max(0.0, ttft - queue - prefill),
        stalled_ms=max(0.0, request - ttft - (tokens - 1) * step), batch=max(1.0, batch), token_ms=token,
        stream_ms=token,
    )  # fmt: skip


def break_down_cells(cells: Sequence[Cell], alone: SingleRequestTimes | None) -> list[RequestBreakdown | None]:
    """For all cells of one subject together, since the growth of steps with the batch needs several loads."""
    breakdowns = [break_down_cell(cell, alone) for cell in cells]
    seen = sorted(
        (breakdown for breakdown in breakdowns if breakdown is not None), key=lambda breakdown: breakdown.batch
    )
    if not seen or seen[-1].batch - seen[0].batch < 1:
        return breakdowns
    few, many = seen[0], seen[-1]
    each = max(0.0, (many.step_ms - few.step_ms) / (many.batch - few.batch))
    return [breakdown and breakdown._replace(stream_ms=min(breakdown.token_ms, each)) for breakdown in breakdowns]


def _apply_littles_law(cell: Cell, good: Sequence[Sample]) -> float:
    seconds = math.fsum(repeat.seconds for repeat in cell.repeats)
    return max(1.0, math.fsum(one.duration_ms for one in good) / 1000 / seconds) if seconds else 1.0


def _compute_step_ms(good: Sequence[Sample]) -> float:
    """The median gap if each event is one token; otherwise the first quartile of the time per output token."""
    tpots = sorted(found for one in good if (found := one.tpot_ms) is not None)
    calm = compute_quantile(tpots, 0.25)
    gaps = sorted(gap for one in good for gap in one.gaps_ms)
    made = sum(one.output_tokens or 0 for one in good) / max(1, sum(len(one.gaps_ms) + 1 for one in good))
    if gaps and ONE_TOKEN_EVENTS[0] <= made <= ONE_TOKEN_EVENTS[1]:
        usual = compute_quantile(gaps, 0.5)
        # Events that arrive in one packet have gaps of zero, which are not steps. Prefills of other requests make only
        # a few gaps long, so the median stays valid.
        if compute_quantile(gaps, 0.25) >= LEAST_SHORT_GAP * usual and usual >= LEAST_MEDIAN_GAP * calm:
            return min(usual, compute_quantile(tpots, 0.5))
    return calm


def _compute_prefill_ms(
    good: Sequence[Sample], alone: SingleRequestTimes | None, prompt: float, step: float, in_flight: float
) -> tuple[float, float]:
    """The prefill time of a prompt and of one token: measured alone, or else from the shortest TTFTs of this cell."""
    if alone is not None and alone.prompt > 0:
        whole = max(0.0, alone.ttft_ms - alone.step_ms)
        return whole * prompt / alone.prompt, whole / alone.prompt
    ttfts = sorted(one.ttft_ms or 0.0 for one in good)
    least = max(0.0, compute_quantile(ttfts, 0.5 if in_flight <= 1 else 0.05) - step)
    return least, least / prompt


def _compute_queue_ms(
    cell: Cell, request: float, ttft: float, prefill: float, step: float, in_flight: float
) -> tuple[float, bool]:
    """How long a request waits for a slot or KV cache (by Little's law, if the number of waiting requests is known).

    Engines also count requests that wait for another prefill as waiting; those are not part of this queue.
    """
    if in_flight <= 1:
        return 0.0, True
    waiting = compute_mean(repeat.engine.waiting_mean for repeat in cell.repeats)
    by_engine = None if waiting is None else request * min(1.0, waiting / in_flight)
    if by_engine is not None and is_cache_full(cell):
        return by_engine, True
    if (slots := count_slots(cell)) is not None:
        return request * max(0.0, 1 - slots / in_flight), True
    # Upper bound of what prefills explain: all prompts in flight, prefilled one after the other.
    unexplained = max(0.0, ttft - in_flight * prefill - step)
    return (unexplained, False) if by_engine is None else (min(by_engine, unexplained), False)


def is_cache_full(cell: Cell) -> bool:
    preempted = sum(repeat.engine.preemptions or 0.0 for repeat in cell.repeats)
    used = find_maximum(repeat.engine.kv_use_max for repeat in cell.repeats)
    slots = count_slots(cell)
    has_free_slots = slots is None or slots >= (cell.load.concurrency or 1)
    return preempted > 0 or (used is not None and used >= FULL_CACHE and has_free_slots)


def count_slots(cell: Cell) -> int | None:
    """Maximum number of concurrent requests over all replicas."""
    settings = cell.subject.settings
    return None if settings is None else settings.slots * max(1, cell.subject.parallelism.data)


def compute_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def find_maximum(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
