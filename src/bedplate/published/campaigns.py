"""Campaigns and duplicates of published rows: what cross-validation leaves out together, and what counts once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping

from bedplate.decide.estimate.batching import classify_weights
from bedplate.published.rows import PredictionRefusal, PublishedCase, parse_notes, resolve

SAME_VALUE = 5e-4
"""Relative difference up to which two figures of one configuration are one measurement, rounded differently."""

Record = Mapping[str, str | None]


def campaign(row: Record) -> str:
    """The series of measurements that a row belongs to: its source, the file of the series, and the month.

    Rows without a date belong together if they name the same engine and release.
    """
    notes = parse_notes(row.get("notes") or "")
    source = (row.get("source") or "").split("(")[0].strip().lower()
    month = find_month(row.get("date") or "") or find_month(notes.get("measured", ""))
    if not month:
        release = re.match(r"v?(\d+\.\d+)", (row.get("engine_version") or "").strip().lower())
        month = f"{(row.get('engine') or '').strip().lower()} {release[1] if release else ''}".strip()
    return " ".join(filter(None, (source, _find_series(row.get("source_path") or "", notes), month)))


def _find_series(path: str, notes: Mapping[str, str]) -> str:
    """The file that lists the series; a file with one result or with one day's copy of all results names none."""
    file = notes.get("source_file") or path.partition("#")[0].partition(";")[0].strip().rpartition("/")[2]
    return "" if file.removesuffix(".xz").endswith(".json") or find_month(file) else file.lower()


def find_month(text: str) -> str:
    """`2026-01` of `2026-01-31`, `20260131` or `2026-01 (v0.2.0)`; empty if there is no date."""
    found = re.match(r"\s*(20\d\d)-?(0[1-9]|1[0-2])", text)
    return f"{found[1]}-{found[2]}" if found else ""


def identify(case: PublishedCase) -> Hashable:
    """What was measured, whatever the spelling of chip, model, engine, weights and layout; without the value."""
    sizes = re.findall(r"([a-z_]+)\s*[-=]?\s*(\d+)", case.parallelism.lower())
    return (
        case.metric, case.chip.name, case.engine, case.backend, case.devices, case.notes.get("threads"),
        _identify_model(case), tuple(size for size in sizes if size[1] != "1") or case.layout,
        case.concurrency, case.saturated, case.prompt_tokens, case.output_tokens, case.depth or 0,
    )  # fmt: skip


def _identify_model(case: PublishedCase) -> Hashable:
    shape = case.shape
    return (
        shape.layers, shape.hidden, shape.experts, round(shape.dense_params / 1e7), round(shape.expert_params / 1e8),
        classify_weights(shape), round(shape.bits, 1),
    )  # fmt: skip


class KnownMeasurements:
    """The measurements seen so far, to find the ones that repeat another."""

    def __init__(self) -> None:
        self._values: dict[Hashable, list[float]] = {}

    def add(self, case: PublishedCase, value: float) -> bool:
        """Whether this figure is new: no row of the same configuration had the same one."""
        values = self._values.setdefault(identify(case), [])
        if any(abs(value - other) <= SAME_VALUE * abs(other) for other in values):
            return False
        values.append(value)
        return True


def remove_duplicates(rows: Iterable[Record]) -> list[Record]:
    """The rows without repetitions; rows that cannot be read are kept, because nothing shows what they repeat."""
    known, kept = KnownMeasurements(), []
    for row in rows:
        case = resolve(row)
        try:
            value = float(row.get("value") or "")
        except ValueError:
            value = 0.0
        if isinstance(case, PredictionRefusal) or not value or known.add(case, value):
            kept.append(row)
    return kept
