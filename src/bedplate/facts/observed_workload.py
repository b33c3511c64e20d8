"""The workload that an endpoint had, from the stored shapes of its requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bedplate.errors import NotPossible
from bedplate.facts.traces import BYTES_PER_TOKEN, BadRows
from bedplate.facts.workload import TraceMeter
from bedplate.usage_store import open_usage_store
from bedplate.values.record import replace_fields
from bedplate.values.traffic import PREFIX_BLOCK_BYTES, ServedRequest
from bedplate.values.units import format_seconds
from bedplate.values.workload import RequestShape, TraceSummary

MODEL_APIS = frozenset(["chat", "completions", "responses", "messages", "embeddings"])
"""APIs that run the model. Counting tokens does not."""


def summarize_observed(span_s: float, *, model: str | None = None) -> TraceSummary:
    """Summarise the requests of the last `span_s` seconds like any other trace."""
    since_s = time.time() - span_s
    counts = _RowCounts()
    rows = open_usage_store().read_requests(since_s, model=model)
    for row in rows:
        counts.add(row)
    if not counts.requests:
        whose = f" for {model}" if model is not None else ""
        raise NotPossible(
            f"no request{whose} was answered in the last {_format_span(span_s)}",
            hint="specify a longer span or another model; bedplate usage --since all lists all use",
        )
    meter = TraceMeter()
    rows = open_usage_store().read_requests(since_s, model=model)
    meter.add_all(_make_shapes(rows, counts.block_tokens))
    summary = meter.make_summary(f"the endpoint, last {_format_span(span_s)}", "bedplate", BadRows("the store"))
    if counts.turned_away:
        note = f"{counts.turned_away:,} rejected requests (429) are not counted"
        summary = replace_fields(summary, notes=(*summary.notes, note))
    return summary


class _RowCounts:
    """Totals over all rows, needed before the first row is processed."""

    def __init__(self) -> None:
        self.requests = self.turned_away = 0
        self._bytes = self._tokens = 0

    def add(self, row: ServedRequest) -> None:
        if row.outcome == "turned_away":
            self.turned_away += 1
        elif row.api in MODEL_APIS:
            self.requests += 1
            if row.prompt_tokens and row.text_bytes:
                self._bytes += row.text_bytes
                self._tokens += row.prompt_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens per block, by the engine's own count. Blocks are cut by bytes."""
        per_byte = self._tokens / self._bytes if self._bytes else 1 / BYTES_PER_TOKEN
        return max(1, round(PREFIX_BLOCK_BYTES * per_byte))


def _make_shapes(rows: Iterator[ServedRequest], block_tokens: int) -> Iterator[RequestShape]:
    for row in rows:
        if row.outcome == "turned_away" or row.api not in MODEL_APIS:
            continue
        yield RequestShape(
            started_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.completion_tokens,
            cached_tokens=row.cached_tokens,
            ttft_ms=row.ttft_ms,
            duration_ms=row.duration_ms,
            prefix_hashes=row.prefix_hashes,
            prefix_block_tokens=block_tokens if row.prefix_hashes else None,
            tenant=row.tenant,
            model=row.model,
            outcome="error" if row.outcome == "failed" else row.outcome,
        )


def _format_span(span_s: float) -> str:
    if span_s >= 3600:
        return f"{span_s / 3600:g} h"
    return format_seconds(span_s)
