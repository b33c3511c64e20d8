"""Summarize cells: statistics of their samples, table rows, and differences between two cells. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from bedplate.measure.statistics import compute_half_width, compute_percentiles, compute_serial_correlation
from bedplate.values.cost import CostPerMillion, Price, compute_cost_per_million
from bedplate.values.decision import Settings
from bedplate.values.evidence import NO_SAMPLES, find_exclusions
from bedplate.values.result import Result
from bedplate.values.run import Cell, Load, Repeat, Run, Sample, Subject
from bedplate.values.scenario import Distribution, Scenario
from bedplate.values.summary import BenchRow, Interval, Percentiles, Summary
from bedplate.values.verdict import SAME_SOURCE, Difference, Differences
from bedplate.values.workload import LatencyTarget

LEAST_BLOCKS = 5
MOST_BLOCKS = 20
SAME_LENGTH = 0.02
"""Lengths that differ by at most this share are equal: a chat template or an early end explains it."""
OTHER_WORK = 0.10
"""Lengths that differ by more than this share are another workload."""
CACHED_APART = 0.05
"""If the cached shares of the prompt tokens differ by more than this, one side computed less."""


# one repeat


def compute_output_tok_s(repeat: Repeat, load: Load) -> float | None:
    """Output tokens per second of all streams together; `None` if the endpoint reports no token counts.

    The load generator counts the tokens that arrived within the measurement window. The samples alone do not show that:
    they lack requests that began in the warm-up, and include the end of the last ones after the window. Without that
    count, Little's law gives the rate of a closed loop: tokens per request over its time, times the concurrency.
    """
    if repeat.delivered_tokens is not None:
        return repeat.delivered_tokens / repeat.seconds
    return _compute_rate(repeat.samples, load, repeat.seconds, _count_tokens)


def compute_requests_s(repeat: Repeat, load: Load) -> float | None:
    """Successful requests per second."""
    return _compute_rate(repeat.samples, load, repeat.seconds, lambda sample: 1.0 if sample.outcome == "ok" else 0.0)


def _compute_rate(
    samples: Sequence[Sample], load: Load, seconds: float, count: Callable[[Sample], float | None]
) -> float | None:
    counted = [count(sample) for sample in samples]
    if not samples or any(value is None for value in counted):
        return None
    total = math.fsum(value for value in counted if value is not None)
    busy_s = math.fsum(sample.duration_ms for sample in samples) / 1000
    if load.arrivals == "closed" and load.concurrency is not None and busy_s > 0:
        return load.concurrency * total / busy_s
    return total / seconds


def _count_tokens(sample: Sample) -> float | None:
    """The output tokens of a request; a failed request has none."""
    if sample.outcome != "ok":
        return 0.0
    return None if sample.output_tokens is None else float(sample.output_tokens)


def list_ttfts(samples: Iterable[Sample]) -> list[float]:
    return [sample.ttft_ms for sample in samples if sample.outcome == "ok" and sample.ttft_ms is not None]


def list_tpots(samples: Iterable[Sample]) -> list[float]:
    return [found for sample in samples if sample.outcome == "ok" and (found := sample.tpot_ms) is not None]


def list_durations(samples: Iterable[Sample]) -> list[float]:
    return [sample.duration_ms for sample in samples if sample.outcome == "ok"]


def meets(sample: Sample, target: LatencyTarget) -> bool:
    """Whether a request succeeded and met the target. An answer of one token has no TPOT."""
    if sample.outcome != "ok":
        return False
    if target.ttft_ms is not None and (sample.ttft_ms is None or sample.ttft_ms > target.ttft_ms):
        return False
    return target.tpot_ms is None or sample.tpot_ms is None or sample.tpot_ms <= target.tpot_ms


# one cell


def list_samples(cell: Cell) -> list[Sample]:
    return [sample for repeat in cell.repeats for sample in repeat.samples]


def is_valid(cell: Cell) -> bool:
    return not list_invalid_reasons(cell)


def list_invalid_reasons(cell: Cell) -> tuple[str, ...]:
    """The reasons why the cell must not be compared."""
    found = [flag.text for flag in cell.flags if flag.invalid]
    if not found and any(repeat.client.limit for repeat in cell.repeats):
        found.append("the client was the bottleneck")
    if not any(sample.outcome == "ok" for sample in list_samples(cell)):
        found.append(NO_SAMPLES if cell.stated is not None else "no request succeeded")
    return tuple(found)


def summarize_cell(cell: Cell) -> Summary:
    samples = list_samples(cell)
    good = [sample for sample in samples if sample.outcome == "ok"]
    rates = _drop_missing(compute_output_tok_s(repeat, cell.load) for repeat in cell.repeats)
    tok_s = statistics.fmean(rates) if rates else None
    requests = _drop_missing(compute_requests_s(repeat, cell.load) for repeat in cell.repeats)
    gaps = [gap for sample in good for gap in sample.gaps_ms]
    counted = [sample for sample in good if sample.output_tokens]
    events = sum(len(sample.gaps_ms) + 1 for sample in counted)
    tokens = sum(sample.output_tokens or 0 for sample in counted)
    energy = _drop_missing(repeat.use.energy_j for repeat in cell.repeats)
    made = [
        rate * repeat.seconds
        for repeat in cell.repeats
        if (rate := compute_output_tok_s(repeat, cell.load)) is not None
    ]
    return Summary(
        cell=cell.id,
        repeats=len(cell.repeats),
        seconds=math.fsum(repeat.seconds for repeat in cell.repeats),
        requests=len(samples),
        ok=len(good),
        error_share=1 - len(good) / len(samples) if samples else None,
        output_tok_s=tok_s,
        interval=_compute_interval(cell, rates, tok_s),
        requests_s=statistics.fmean(requests) if requests else None,
        ttft_ms=compute_percentiles(list_ttfts(samples)),
        tpot_ms=compute_percentiles(list_tpots(samples)),
        gap_ms=compute_percentiles(gaps),
        e2e_ms=compute_percentiles(list_durations(samples)),
        tokens_per_event=tokens / events if events else None,
        prompt_tokens=_compute_median(sample.prompt_tokens for sample in good),
        output_tokens=_compute_median(sample.output_tokens for sample in good),
        cached_share=compute_cached_share(samples),
        peak_memory_bytes=_find_peak(repeat.use.peak_memory_bytes for repeat in cell.repeats),
        peak_gpu_bytes=_find_peak(repeat.use.peak_gpu_bytes for repeat in cell.repeats),
        energy_j_per_token=_divide_by_tokens(energy, made, len(cell.repeats)),
    )


def compute_cached_share(samples: Iterable[Sample]) -> float | None:
    counted = [one for one in samples if one.cached_tokens is not None and one.prompt_tokens]
    total = sum(one.prompt_tokens or 0 for one in counted)
    return sum(one.cached_tokens or 0 for one in counted) / total if total else None


def _compute_interval(cell: Cell, rates: Sequence[float], tok_s: float | None) -> Interval | None:
    if tok_s is None or tok_s <= 0:
        return None
    if len(rates) > 1:
        wide = compute_half_width(rates)
        return _make_interval(tok_s, wide, "repeats", len(rates)) if wide is not None else None
    blocks = compute_block_rates(cell.repeats[0], cell.load)
    wide = compute_half_width(blocks)
    if wide is None:
        return None
    # Consecutive blocks are correlated, so they count as fewer independent ones.
    correlation = max(0.0, min(0.9, compute_serial_correlation(blocks)))
    wide *= math.sqrt((1 + correlation) / (1 - correlation))
    return _make_interval(tok_s, wide * tok_s / statistics.fmean(blocks), "blocks", len(blocks))


def _make_interval(value: float, wide: float, over: str, count: int) -> Interval:
    low, high = max(0.0, value - wide), value + wide
    return Interval(low=low, high=high, over="repeats" if over == "repeats" else "blocks", count=count)


def compute_block_rates(repeat: Repeat, load: Load) -> list[float]:
    """The rates of blocks of consecutive requests, each with at least as many requests as are in flight.

    Empty if there are too few requests, and for an open loop, whose rate is given.
    """
    in_flight = load.concurrency
    if load.arrivals != "closed" or in_flight is None:
        return []
    ordered = sorted(repeat.samples, key=lambda sample: sample.at_s)
    count = min(MOST_BLOCKS, len(ordered) // max(2, in_flight))
    if count < LEAST_BLOCKS:
        return []
    bounds = [number * len(ordered) // count for number in range(count + 1)]
    parts = (ordered[low:high] for low, high in itertools.pairwise(bounds))
    return [rate for part in parts if (rate := _compute_rate(part, load, 1.0, _count_tokens)) is not None and rate > 0]


def _divide_by_tokens(energy_j: Sequence[float], made: Sequence[float], repeats: int) -> float | None:
    if not repeats or len(energy_j) != repeats or len(made) != repeats or not math.fsum(made):
        return None
    return math.fsum(energy_j) / math.fsum(made)


def _drop_missing(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _compute_median(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _find_peak(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


# rows


def compute_spent(cell: Cell, price: Price | None, found: Summary | None = None) -> CostPerMillion:
    """Cost and energy of a million output tokens. Energy follows from the stated watts if it was not measured.

    Only output tokens are counted; the cost includes the prompts.
    """
    found = found or summarize_cell(cell)
    layout = cell.subject.parallelism
    cards = layout.tensor * layout.pipeline * layout.data if cell.subject.device not in (None, "cpu") else 1
    return compute_cost_per_million(price, cards, found.output_tok_s, found.energy_j_per_token)


def make_row(cell: Cell, hardware: str | None = None, price: Price | None = None) -> BenchRow:
    """A flat row with its fields in column order. `hardware` is text; the default is the machine's fingerprint."""
    found, subject, quality = summarize_cell(cell), cell.subject, cell.quality
    paid = compute_spent(cell, price, found)
    ttft, tpot, gap, e2e = found.ttft_ms, found.tpot_ms, found.gap_ms, found.e2e_ms
    on_card = subject.device not in (None, "cpu")
    peak = found.peak_gpu_bytes if on_card and found.peak_gpu_bytes is not None else found.peak_memory_bytes
    return BenchRow(
        engine=subject.engine,
        version=subject.engine_version,
        model=subject.model,
        quantization=subject.quantization,
        hardware=hardware or cell.machine,
        concurrency=cell.load.concurrency,
        prompt_tokens=cell.load.prompt_tokens,
        output_tokens=cell.load.output_tokens,
        ttft_ms=_get_percentile(ttft, "p50"),
        tok_per_s=found.output_tok_s,
        peak_mem_gb=None if peak is None else peak / 1e9,
        notes="; ".join(_list_notes(cell, found)),
        tok_per_s_low=found.interval.low if found.interval else None,
        tok_per_s_high=found.interval.high if found.interval else None,
        requests_per_s=found.requests_s,
        ttft_ms_p90=_get_percentile(ttft, "p90"),
        ttft_ms_p95=_get_percentile(ttft, "p95"),
        ttft_ms_p99=_get_percentile(ttft, "p99"),
        ttft_ms_max=_get_percentile(ttft, "max"),
        tpot_ms=_get_percentile(tpot, "p50"),
        tpot_ms_p90=_get_percentile(tpot, "p90"),
        tpot_ms_p95=_get_percentile(tpot, "p95"),
        tpot_ms_p99=_get_percentile(tpot, "p99"),
        gap_ms=_get_percentile(gap, "p50"),
        gap_ms_p99=_get_percentile(gap, "p99"),
        e2e_ms=_get_percentile(e2e, "p50"),
        e2e_ms_p90=_get_percentile(e2e, "p90"),
        e2e_ms_p99=_get_percentile(e2e, "p99"),
        requests=found.requests,
        error_share=found.error_share,
        repeats=found.repeats,
        seconds=found.seconds,
        quality=quality.agreement if quality else None,
        quality_verdict=quality.verdict if quality else "unchecked",
        energy_j_per_token=found.energy_j_per_token,
        cost_per_million_tokens=paid.cost_per_million_tokens,
        kwh_per_million_tokens=paid.kwh_per_million_tokens,
        arrivals=cell.load.arrivals,
        offered_per_s=cell.load.requests_per_s,
        seed=cell.load.seed,
        valid=is_valid(cell),
        start_s=subject.start_s,
        install_gb=None if subject.install_bytes is None else subject.install_bytes / 1e9,
        at=cell.at,
        cell=cell.id,
        run=cell.run,
        machine=cell.machine,
    )


def make_rows(run: Run) -> tuple[BenchRow, ...]:
    return tuple(make_row(cell, run.environment.hardware, run.environment.price) for cell in run.cells)


def _get_percentile(found: Percentiles | None, name: str) -> float | None:
    value: float | None = getattr(found, name) if found is not None else None
    return value


def _list_notes(cell: Cell, found: Summary) -> Iterator[str]:
    yield from dict.fromkeys(flag.text for flag in cell.flags)
    asked = cell.load.output_tokens
    median = None if cell.load.has_sessions else found.output_tokens
    if median is not None and _compute_relative_difference(median, asked) > SAME_LENGTH:
        yield f"answers have {median:g} tokens instead of {asked}"
    if cell.quality is not None and cell.quality.note:
        yield cell.quality.note
    if cell.notes:
        yield cell.notes


# differences between two cells


def list_differences(a: Cell, b: Cell) -> Differences:
    """All differences except the engine and its version."""
    return Differences(
        meaningless=(
            *_compare_workloads(a, b),
            *_compare_weights(a, b),
            *_compare_lengths(a, b),
            *_compare_warmups(a, b),
        ),
        printed=tuple(_list_small_differences(a, b)),
    )


def _compare_values(what: str, a: object, b: object, note: str | None = None) -> Iterator[Difference]:
    if a != b:
        yield Difference(what=what, a=_format_value(a), b=_format_value(b), note=note)


def _format_value(value: object) -> str:
    if value is None:
        return "not reported"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _compare_workloads(a: Cell, b: Cell) -> Iterator[Difference]:
    yield from _compare_values("machine", a.machine, b.machine)
    yield from _compare_values("model", a.subject.model, b.subject.model)
    one, other = a.load, b.load
    yield from _compare_values("arrivals", one.arrivals, other.arrivals)
    yield from _compare_values("concurrency", one.concurrency, other.concurrency)
    yield from _compare_values("requests per second", one.requests_per_s, other.requests_per_s)
    yield from _compare_values("burst", one.burst, other.burst)
    yield from _compare_values("trace", one.trace, other.trace)
    yield from _compare_values("sessions", one.sessions, other.sessions)
    yield from _compare_scenarios(one.scenario, other.scenario)
    yield from _compare_values("prompt tokens", one.prompt_tokens, other.prompt_tokens)
    yield from _compare_values("output tokens", one.output_tokens, other.output_tokens)
    yield from _compare_values("shared prefix tokens", one.shared_prefix_tokens, other.shared_prefix_tokens)


def _compare_scenarios(one: Scenario | None, other: Scenario | None) -> Iterator[Difference]:
    names = [None if scenario is None else scenario.name for scenario in (one, other)]
    yield from _compare_values("scenario", *names)
    if one is None or other is None or names[0] != names[1]:
        return
    for field in one.__struct_fields__:
        if field != "sources" and getattr(one, field) != getattr(other, field):
            yield Difference(
                what=f"scenario {one.name}: {field}", a=_describe_drawn(one, field), b=_describe_drawn(other, field)
            )


def _describe_drawn(scenario: Scenario, field: str) -> str:
    value = getattr(scenario, field)
    return f"{value.kind} {value.mean:g}" if isinstance(value, Distribution) else _format_value(value)


def _compare_weights(a: Cell, b: Cell) -> Iterator[Difference]:
    one, other = a.subject, b.subject
    known = one.weights_id is not None and other.weights_id is not None
    if known and one.weights_id != other.weights_id:
        yield from _compare_values("weights", one.weights_id, other.weights_id)
    elif not known and not _is_unreported_elsewhere(one, other):
        yield from _compare_values("quantization", one.quantization, other.quantization)


def _is_unreported_elsewhere(one: Subject, other: Subject) -> bool:
    """Whether an endpoint elsewhere does not report its quantization. Its answers are compared instead."""
    return any(subject.url is not None and subject.quantization is None for subject in (one, other))


def _compare_lengths(a: Cell, b: Cell) -> Iterator[Difference]:
    """Differences in the lengths that the endpoints counted, which may differ from the requested ones."""
    for what, one, other in _list_mean_lengths(a, b):
        if _compute_relative_difference(one, other) > OTHER_WORK:
            yield Difference(what=what, a=f"{one:g}", b=f"{other:g}")
    if not has_shared_prefixes(a.load):
        yield from _compare_cached_shares(a, b)


def _compare_cached_shares(a: Cell, b: Cell) -> Iterator[Difference]:
    one, other = compute_cached_share(list_samples(a)), compute_cached_share(list_samples(b))
    if abs((one or 0.0) - (other or 0.0)) > CACHED_APART:
        yield Difference(what="cached prompt tokens", a=_format_share(one), b=_format_share(other))


def has_shared_prefixes(load: Load) -> bool:
    """Whether the workload has shared prefixes. Caching them is then a feature of the engine, not a difference."""
    return load.shared_prefix_tokens > 0 or load.arrivals == "replay" or load.has_sessions


def _compare_warmups(a: Cell, b: Cell) -> Iterator[Difference]:
    """A difference if only one side was warmed up; the number of requests does not matter."""
    one, other = count_warmup_requests(a), count_warmup_requests(b)
    if (one == 0) != (other == 0):
        yield Difference(what="warm-up", a=_format_requests(one), b=_format_requests(other))


def _list_mean_lengths(a: Cell, b: Cell) -> Iterator[tuple[str, float, float]]:
    good = [[sample for sample in list_samples(cell) if sample.outcome == "ok"] for cell in (a, b)]
    for what, name in (("prompt tokens, as counted", "prompt_tokens"), ("output tokens, as counted", "output_tokens")):
        one, other = ([value for one in side if (value := getattr(one, name)) is not None] for side in good)
        if one and other:
            yield what, statistics.fmean(one), statistics.fmean(other)


def _format_share(share: float | None) -> str:
    return "not reported" if share is None else f"{share:.0%}"


def _compute_relative_difference(one: float, other: float) -> float:
    return abs(one - other) / max(one, other, 1e-9)


def _list_small_differences(a: Cell, b: Cell) -> Iterator[Difference]:
    one, other = a.subject, b.subject
    if one.weights_id is not None and one.weights_id == other.weights_id:
        yield from _compare_values("quantization", one.quantization, other.quantization, SAME_SOURCE)
    elif _is_unreported_elsewhere(one, other):
        yield from _compare_values("quantization", one.quantization, other.quantization)
    yield from _compare_values("seed", a.load.seed, b.load.seed, "different prompts of the same length")
    for what, mine, theirs in _list_mean_lengths(a, b):
        if SAME_LENGTH < _compute_relative_difference(mine, theirs) <= OTHER_WORK:
            yield Difference(what=what, a=f"{mine:g}", b=f"{theirs:g}")
    if has_shared_prefixes(a.load):
        yield from _compare_cached_shares(a, b)
    yield from _compare_values("exact output lengths", _format_flag(a.exact_output), _format_flag(b.exact_output))
    yield from _compare_values("device", one.device, other.device)
    yield from _compare_values("build", one.build, other.build)
    yield from _compare_values("measured", _describe_place(one), _describe_place(other))
    yield from _compare_values("layout", _describe_layout(a), _describe_layout(b))
    yield from _compare_settings(one.settings, other.settings)
    yield from _compare_values("endpoint", one.url, other.url)


def _describe_place(subject: Subject) -> str:
    return "through the gateway" if subject.through_gateway else "directly at the endpoint"


def count_warmup_requests(cell: Cell) -> int:
    """Number of warm-up requests of all repeats."""
    return max(cell.warmup, sum(repeat.warmup for repeat in cell.repeats))


def _format_requests(count: int) -> str:
    return "none" if count == 0 else f"{count} requests"


def _format_flag(flag: bool) -> str:
    return "yes" if flag else "no"


def _describe_layout(cell: Cell) -> str:
    found = cell.subject.parallelism
    named = (("tensor", found.tensor), ("pipeline", found.pipeline), ("data", found.data), ("expert", found.expert),
             ("attention data", found.attention_data))  # fmt: skip
    return ", ".join(f"{name} {size}" for name, size in named if size > 1) or "one device"


def _compare_settings(a: Settings | None, b: Settings | None) -> Iterator[Difference]:
    if a is None or b is None:
        return
    for name, words in SETTING_WORDS.items():
        yield from _compare_values(words, getattr(a, name), getattr(b, name))


SETTING_WORDS = {
    "slots": "slots", "context_tokens": "context", "threads": "threads", "gpu_layers": "layers on the GPU",
    "host_expert_layers": "layers with experts on the host", "kv_type": "cache type", "batch_tokens": "batch tokens",
    "memory_share": "memory share",
}  # fmt: skip


# results


def make_result(cell: Cell) -> Result | None:
    """The result that later plans use; `None` if the cell is not evidence, or has an open loop."""
    if cell.load.concurrency is None or find_exclusions(cell):
        return None
    found = summarize_cell(cell)
    if found.output_tok_s is None:
        return None
    subject, quality = cell.subject, cell.quality
    on_card = subject.device not in (None, "cpu")
    return Result(
        at=cell.at,
        machine=cell.machine,
        engine=subject.engine,
        engine_version=subject.engine_version,
        model=subject.model,
        quantization=subject.quantization,
        weights_id=subject.weights_id,
        run=cell.run,
        device=subject.device,
        parallelism=subject.parallelism,
        concurrency=cell.load.concurrency,
        prompt_tokens=cell.load.prompt_tokens,
        output_tokens=cell.load.output_tokens,
        shared_prefix_tokens=cell.load.shared_prefix_tokens,
        ttft_ms=_get_percentile(found.ttft_ms, "p50"),
        tpot_ms=_get_percentile(found.tpot_ms, "p50"),
        output_tok_s=found.output_tok_s,
        output_tok_s_low=None if found.interval is None else found.interval.low,
        output_tok_s_high=None if found.interval is None else found.interval.high,
        peak_memory_bytes=found.peak_gpu_bytes if on_card and found.peak_gpu_bytes else found.peak_memory_bytes,
        quality=quality.agreement if quality is not None and quality.verdict == "ok" else None,
    )
