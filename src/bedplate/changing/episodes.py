"""Recorded requests as short episodes that can be replayed one by one, and their results as cells. Pure."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bedplate.facts.observed_workload import MODEL_APIS
from bedplate.facts.traces import BYTES_PER_TOKEN
from bedplate.measure.flags import flag_cell
from bedplate.measure.prefixes import choose_spread
from bedplate.measure.statistics import compute_half_width
from bedplate.measure.summary import list_samples
from bedplate.values import Workload, replace_fields
from bedplate.values.evidence import find_exclusions
from bedplate.values.result import Result
from bedplate.values.run import Cell, Load, Quality, Repeat, Subject
from bedplate.values.traffic import PREFIX_BLOCK_BYTES, ServedRequest
from bedplate.values.workload import RequestShape

MOST_REQUESTS = 8
MOST_SPAN_S = 10.0
MOST_TOKENS = 512
"""Most output tokens in an episode. A short episode is cheap to repeat after an interruption."""
LEAST_EPISODES = 6
MOST_EPISODES = 24
WRITES = MODEL_APIS - {"embeddings"}

Episode = tuple[RequestShape, ...]


class RecordedShapes(NamedTuple):
    shapes: tuple[RequestShape, ...]
    too_long: int
    """Requests that exceed the context of one of the engines."""


def select_shapes(rows: Iterable[ServedRequest], most_tokens: int) -> RecordedShapes:
    """The recorded requests that can be replayed, in order of arrival, with their lengths and shared prefixes."""
    kept = [row for row in rows if row.outcome == "ok" and row.api in WRITES and row.prompt_tokens]
    tokens, num_bytes = sum(row.prompt_tokens or 0 for row in kept), sum(row.text_bytes for row in kept)
    block = max(1, round(PREFIX_BLOCK_BYTES * (tokens / num_bytes if num_bytes else 1 / BYTES_PER_TOKEN)))
    shapes = [
        RequestShape(
            started_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(1, row.completion_tokens or 1),
            prefix_hashes=row.prefix_hashes,
            prefix_block_tokens=block if row.prefix_hashes else None,
            model=row.model,
        )
        for row in sorted(kept, key=lambda row: row.at_s)
    ]
    short = tuple(one for one in shapes if (one.prompt_tokens or 0) + (one.output_tokens or 0) <= most_tokens)
    return RecordedShapes(short, len(shapes) - len(short))


def build_assumed_shapes(workload: Workload) -> RecordedShapes:
    """One burst of the workload that the plan assumed, if there are no recorded requests."""
    one = RequestShape(started_s=0.0, prompt_tokens=workload.prompt_tokens, output_tokens=workload.output_tokens)
    concurrency = max(1, min(workload.compute_in_flight(), MOST_REQUESTS, MOST_TOKENS // workload.output_tokens))
    return RecordedShapes((one,) * concurrency, 0)


def split_episodes(shapes: Sequence[RequestShape], share: float) -> tuple[Episode, ...]:
    """About `share` of the requests, as episodes spread over the whole time, but at least `LEAST_EPISODES`."""
    found: list[list[RequestShape]] = []
    for shape in shapes:
        if not found or not _fits_episode(found[-1], shape):
            found.append([])
        found[-1].append(shape)
    wanted = min(MOST_EPISODES, max(LEAST_EPISODES, round(share * len(found))))
    chosen = [tuple(one) for one in choose_spread(found, wanted)]
    return tuple(_shift_to_zero(chosen[number % len(chosen)]) for number in range(max(wanted, len(chosen))))


def _fits_episode(episode: Sequence[RequestShape], shape: RequestShape) -> bool:
    tokens = sum(one.output_tokens or 0 for one in episode) + (shape.output_tokens or 0)
    span_s = (shape.started_s or 0.0) - (episode[0].started_s or 0.0)
    return len(episode) < MOST_REQUESTS and span_s <= MOST_SPAN_S and tokens <= MOST_TOKENS


def _shift_to_zero(episode: Episode) -> Episode:
    first = episode[0].started_s or 0.0
    return tuple(replace_fields(one, started_s=(one.started_s or 0.0) - first) for one in episode)


def summarize_load(chosen: Sequence[Episode], source: str) -> Load:
    """One load that summarizes all episodes."""
    shapes = [shape for episode in chosen for shape in episode]
    spans_s = sum(max(1.0, episode[-1].started_s or 0.0) for episode in chosen)
    digest = hashlib.sha256(msgspec.json.encode([[s.prompt_tokens, s.output_tokens] for s in shapes])).hexdigest()[:12]
    return Load(
        arrivals="replay",
        requests_per_s=round(len(shapes) / spans_s, 3),
        trace=f"{source} {digest}",
        prompt_tokens=max(1, round(statistics.median(shape.prompt_tokens or 1 for shape in shapes))),
        output_tokens=max(1, round(statistics.median(shape.output_tokens or 1 for shape in shapes))),
    )


def make_cell(
    run: str,
    at: str,
    machine: str,
    subject: Subject,
    load: Load,
    repeats: Sequence[Repeat],
    quality: Quality,
    notes: str,
) -> Cell:
    what = run.encode() + msgspec.json.encode(subject)
    cell = Cell(
        id=hashlib.sha256(what + msgspec.json.encode(load)).hexdigest()[:12],
        run=run,
        at=at,
        machine=machine,
        subject=subject,
        load=load,
        repeats=tuple(repeats),
        warmup=sum(repeat.warmup for repeat in repeats),
        exact_output=all(bool(repeat.exact_output) for repeat in repeats),
        quality=quality,
        notes=notes,
        halt="most",
    )
    return replace_fields(cell, flags=flag_cell(cell))


def derive_results(a: Cell, b: Cell) -> tuple[Result, ...]:
    """The results of both engines for later plans, converted to a closed loop. Empty if one side is not evidence.

    In an open loop the throughput is that of the arrivals. The engine's own speed is the rate of tokens while requests
    were in flight, times the mean concurrency.
    """
    if find_exclusions(a) or find_exclusions(b):
        return ()
    busy = [
        sum(s.duration_ms for s in repeat.samples) / 1000 / max(_measure_span(repeat), 1e-3) for repeat in a.repeats
    ]
    in_flight = max(1, round(statistics.fmean(busy)))
    return tuple(one for cell in (a, b) if (one := _derive_result(cell, in_flight)) is not None)


def _measure_span(repeat: Repeat) -> float:
    """From the first request to the last answer."""
    ends = [sample.at_s + sample.duration_ms / 1000 for sample in repeat.samples]
    return max(ends, default=0.0) - min((sample.at_s for sample in repeat.samples), default=0.0)


def _derive_result(cell: Cell, in_flight: int) -> Result | None:
    speeds = []
    for repeat in cell.repeats:
        good = [sample for sample in repeat.samples if sample.outcome == "ok" and sample.output_tokens]
        took_s = sum(sample.duration_ms for sample in good) / 1000
        if took_s > 0:
            speeds.append(in_flight * sum(sample.output_tokens or 0 for sample in good) / took_s)
    if not speeds:
        return None
    mean, wide = statistics.fmean(speeds), compute_half_width(speeds)
    samples, subject, quality = list_samples(cell), cell.subject, cell.quality
    ttfts = [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]
    tpots = [sample.tpot_ms for sample in samples if sample.tpot_ms is not None]
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
        concurrency=in_flight,
        prompt_tokens=cell.load.prompt_tokens,
        output_tokens=cell.load.output_tokens,
        ttft_ms=statistics.median(ttfts) if ttfts else None,
        tpot_ms=statistics.median(tpots) if tpots else None,
        output_tok_s=mean,
        output_tok_s_low=None if wide is None else max(0.0, mean - wide),
        output_tok_s_high=None if wide is None else mean + wide,
        quality=quality.agreement if quality is not None and quality.verdict == "ok" else None,
    )
