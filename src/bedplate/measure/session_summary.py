"""Summarize the sessions of a cell: TTFT by turn, durations, and cache hits. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bedplate.measure.summary import compute_cached_share, list_samples, list_ttfts
from bedplate.values.run import Cell, Sample, SessionOutcome
from bedplate.values.summary import SessionSummary, TurnLatency

TURN_LIMITS = (1, 2, 3, 4, 8, 16, 32, 64)
"""The last turn of each group; later turns are the last group."""


def summarize_sessions(cell: Cell) -> SessionSummary | None:
    """`None`: the cell has no sessions."""
    sessions = [one for repeat in cell.repeats for one in repeat.sessions]
    if not sessions:
        return None

    def count(outcome: SessionOutcome) -> int:
        return sum(one.outcome == outcome for one in sessions)

    whole = [one for one in sessions if one.outcome in ("complete", "context") and not one.joined]
    samples = list_samples(cell)
    shares = [one.engine.cache_hit_share for one in cell.repeats if one.engine.cache_hit_share is not None]
    return SessionSummary(
        complete=count("complete"),
        context=count("context"),
        failed=count("failed"),
        unfinished=count("unfinished"),
        duration_s=_compute_median(one.duration_s for one in whole),
        answering_s=_compute_median(one.answering_s for one in whole),
        ttft_by_turn=tuple(group_by_turn(samples)),
        cached_share=compute_cached_share(samples),
        metrics_share=statistics.fmean(shares) if shares else None,
        repeated_share=_compute_repeated_share(cell),
    )


def group_by_turn(samples: Sequence[Sample]) -> Iterable[TurnLatency]:
    low = 1
    for high in (*TURN_LIMITS, None):
        some = [one for one in samples if one.turn is not None and one.turn >= low and (not high or one.turn <= high)]
        if some:
            yield TurnLatency(
                turns=f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}",
                requests=len(some),
                ttft_ms=_compute_median(list_ttfts(some)),
                prompt_tokens=_compute_median(one.prompt_tokens for one in some if one.prompt_tokens is not None),
                cached_share=compute_cached_share(some),
            )
        low = (high or low) + 1


def _compute_repeated_share(cell: Cell) -> float | None:
    """What an unlimited prefix cache would find: the request before, its answer, and the shared system prompt."""
    total = repeated = 0
    system = cell.load.shared_prefix_tokens
    for repeat in cell.repeats:
        before: dict[int, int] = {}
        for sample in repeat.samples:
            if sample.session is None or sample.prompt_tokens is None:
                continue
            held = before.get(sample.session)
            if held is not None or sample.turn == 1:
                total += sample.prompt_tokens
                repeated += min(sample.prompt_tokens, system if held is None else held)
            before[sample.session] = sample.prompt_tokens + (sample.output_tokens or 0)
    return repeated / total if total else None


def _compute_median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(statistics.median(known)) if known else None
