"""Flags that reduce the validity of a cell, from its samples and the readings of the machine. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bedplate.measure.summary import compute_cached_share, list_samples
from bedplate.values.run import Cell, Flag, ResourceUse, Sample
from bedplate.values.units import format_size

BUSY, TOO_BUSY = 0.10, 0.25
"""Share of the CPU or GPU that other processes used. Above the second, the cell of an engine on it is invalid."""
THROTTLED = 0.9
SWAPPED_BYTES, TOO_MUCH_SWAPPED_BYTES = 16_000_000, 256_000_000
CACHED, TOO_MUCH_CACHED = 0.05, 0.10
"""Share of the prompt tokens that were cached beyond the shared prefix of the load."""
FAILED = 0.05
SHORT_BY = 0.02
LEAST_REQUESTS = 8
HEAT = ("heat", "hardware slowdown", "power brake")


def flag_cell(cell: Cell, quantizations: Sequence[tuple[str, str | None]] = ()) -> tuple[Flag, ...]:
    """`quantizations`: the engines of the run with their weights."""
    found = [
        *_flag_client(cell),
        *_flag_outcomes(cell),
        *_flag_lengths(cell),
        *_flag_cache(cell),
        *_flag_machine(cell),
        *_flag_quality(cell),
        *_flag_mixed_weights(cell, quantizations),
    ]
    return tuple(found)


def _flag_client(cell: Cell) -> Iterator[Flag]:
    limited = [repeat.client for repeat in cell.repeats if repeat.client.limit]
    if limited:
        words = "; ".join(limited[0].reasons) or "it was too slow"
        often = f" in {len(limited)} of {len(cell.repeats)} repeats" if len(cell.repeats) > 1 else ""
        yield Flag(kind="client", text=f"the client was the bottleneck{often}: {words}", invalid=True)


def _flag_outcomes(cell: Cell) -> Iterator[Flag]:
    samples = list_samples(cell)
    if not samples:
        if cell.repeats:
            text = f"no request ended within {max(repeat.seconds for repeat in cell.repeats):.0f} s"
            yield Flag(kind="short", text=text, invalid=True)
        return
    bad = [sample for sample in samples if sample.outcome != "ok"]
    cut = [sample for sample in bad if sample.outcome == "cut"]
    if cut:
        share = len(cut) / len(samples)
        yield Flag(
            kind="truncated",
            text=f"{_format_count(cut, samples)} answers ended before their last event",
            invalid=share > FAILED,
        )
    others = [sample for sample in bad if sample.outcome != "cut"]
    if others:
        first = next((sample.error for sample in others if sample.error), others[0].outcome)
        text = f"{_format_count(others, samples)} requests failed: {first}"
        yield Flag(kind="errors", text=text, invalid=len(others) / len(samples) > FAILED)
    if len(samples) - len(bad) < LEAST_REQUESTS:
        good = len(samples) - len(bad)
        yield Flag(kind="short", text=f"only {good} request{'' if good == 1 else 's'} succeeded")


def _format_count(some: Sequence[Sample], samples: Sequence[Sample]) -> str:
    return f"{len(some)} of {len(samples)}"


def _flag_lengths(cell: Cell) -> Iterator[Flag]:
    """Compares lengths with the load. Those of a trace and of sessions vary and are not checked."""
    if cell.load.arrivals == "replay" or cell.load.has_sessions:
        return
    good = [sample for sample in list_samples(cell) if sample.outcome == "ok"]
    counts = [sample.output_tokens for sample in good if sample.output_tokens is not None]
    asked = cell.load.output_tokens
    early = [count for count in counts if count < asked]
    if good and not counts:
        yield Flag(kind="length", text="the endpoint does not report output tokens: the throughput is unknown")
    elif early and statistics.fmean(counts) < (1 - SHORT_BY) * asked:
        text = f"answers have {_describe_lengths(counts)} instead of {asked}"
        yield Flag(kind="truncated" if cell.exact_output else "length", text=text)
    elif counts and statistics.fmean(counts) > (1 + SHORT_BY) * asked:
        yield Flag(kind="length", text=f"answers have {_describe_lengths(counts)} instead of {asked}")
    prompts = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    wanted = cell.load.prompt_tokens
    if prompts and abs(statistics.fmean(prompts) - wanted) > SHORT_BY * wanted:
        text = f"prompts have {_describe_lengths(prompts)} instead of {wanted}"
        yield Flag(kind="length", text=text)


def _describe_lengths(counts: Sequence[int]) -> str:
    """Such as "20 tokens", or "9.25 tokens on average (8 to 13)"."""
    low, high = min(counts), max(counts)
    return f"{low} tokens" if low == high else f"{statistics.fmean(counts):.4g} tokens on average ({low} to {high})"


def _flag_cache(cell: Cell) -> Iterator[Flag]:
    if cell.load.arrivals == "replay" or cell.load.has_sessions:  # prompts share prefixes as in the trace or session
        return
    reported = compute_cached_share(list_samples(cell))
    scraped = [repeat.engine.cache_hit_share for repeat in cell.repeats if repeat.engine.cache_hit_share is not None]
    shares = [*([reported] if reported is not None else []), *([max(scraped)] if scraped else [])]
    expected = cell.load.shared_prefix_tokens / cell.load.prompt_tokens
    beyond = max(shares, default=0.0) - expected
    if beyond > CACHED:
        text = f"{max(shares):.0%} of the prompt tokens were cached, but the prompts share only {expected:.0%}"
        yield Flag(kind="cache", text=text, invalid=beyond > TOO_MUCH_CACHED)


def _flag_machine(cell: Cell) -> Iterator[Flag]:
    uses = [repeat.use for repeat in cell.repeats]
    others = max((use.other_cpu_share for use in uses if use.other_cpu_share is not None), default=0.0)
    if others > BUSY:
        on_cpu = cell.subject.device in (None, "cpu")
        text = f"other processes used {others:.0%} of the CPU"
        yield Flag(kind="busy", text=text, invalid=on_cpu and others > TOO_BUSY)
    yield from _flag_gpu(uses)
    clock = min((use.clock_share for use in uses if use.clock_share is not None), default=None)
    reasons = tuple(dict.fromkeys(reason for use in uses for reason in use.throttled))
    if (clock is not None and clock < THROTTLED) or any(reason in HEAT for reason in reasons):
        at = f"clocks fell to {clock:.0%}" if clock is not None and clock < THROTTLED else "clocks were throttled"
        yield Flag(kind="throttled", text=f"{at}{': ' if reasons else ''}{', '.join(reasons)}")
    swapped = max((use.swapped_bytes for use in uses if use.swapped_bytes is not None), default=0)
    if swapped > SWAPPED_BYTES:
        text = f"the machine swapped {format_size(swapped)}"
        yield Flag(kind="swapped", text=text, invalid=swapped > TOO_MUCH_SWAPPED_BYTES)


def _flag_gpu(uses: Sequence[ResourceUse]) -> Iterator[Flag]:
    """Other processes on the engine's GPU. Another measurement puts it under load, even if nobody reports how much."""
    share = max((use.other_gpu_share for use in uses if use.other_gpu_share is not None), default=None)
    names = dict.fromkeys(name for use in uses for name in use.other_gpu_processes)
    benches = dict.fromkeys(pid for use in uses for pid in use.other_measurements)
    if not names and not benches and (share or 0.0) <= BUSY:
        return
    amount = f"used {share:.0%} of the GPU" if share is not None and share > BUSY else "were on the GPU"
    who = [*names, *(f"another measurement of bedplate (process {pid})" for pid in benches)]
    text = f"other processes {amount}{': ' if who else ''}{'; '.join(who)}"
    yield Flag(kind="busy", text=text, invalid=bool(benches) or (share or 0.0) > TOO_BUSY)


def _flag_quality(cell: Cell) -> Iterator[Flag]:
    quality = cell.quality
    if quality is not None and quality.verdict == "broken":
        words = f": {quality.note}" if quality.note else ""
        yield Flag(kind="broken", text=f"its answers disagree with the reference{words}")
    if quality is not None and quality.garbled:
        yield Flag(kind="garbled", text=quality.garbled)


def _flag_mixed_weights(cell: Cell, quantizations: Sequence[tuple[str, str | None]]) -> Iterator[Flag]:
    own = cell.subject.quantization
    different = [
        (engine, label) for engine, label in quantizations if label is not None and own is not None and label != own
    ]
    if different:
        others = ", ".join(f"{engine} {label}" for engine, label in different)
        yield Flag(kind="mixed", text=f"{own} weights, but {others}: the engines read different numbers of bytes")
