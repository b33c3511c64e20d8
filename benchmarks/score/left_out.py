"""The errors of published rows by fits that did not see them: every campaign, chip, model and engine left out in turn.

Needs numpy, as the fits do. Small groups are left out together, in a few parts, because a fit for each would take long.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bands import LeftOutRow, find_memory_unit

from bedplate.decide.estimate.bands import BandMetric, classify_device, find_distance
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.machine import make_chip_rates
from bedplate.published import campaigns
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, PublishedCase, RowPrediction, resolve

MORE, FIRST_PARTY = (Path(__file__).parent / name for name in ("more", "first_party"))
SPLITS = ("campaign", "chip", "model", "engine")
SMALL_PARTS = 3
LOCAL_ROUNDS, SERVING_STEPS = 6, 6
LOCAL_METRICS: Mapping[str, BandMetric] = {
    "decode_tok_s_single": "decode", "prefill_tok_s": "prefill", "total_tok_s_incl_prompt": "whole request",
    "output_tok_s_total": "batched decode",
}  # fmt: skip


class MeasuredRow(NamedTuple):
    """A row with what groups it, before anything is left out."""

    metric: BandMetric
    case: PublishedCase
    campaign: str

    def get_group(self, split: str) -> str:
        case = self.case
        return {
            "campaign": self.campaign,
            "chip": case.chip.name,
            "model": name_model(case),
            "engine": case.engine,
        }[split]


def name_model(case: PublishedCase) -> str:
    """A model whatever its spelling and weight format."""
    shape = case.shape
    return f"{shape.layers} {shape.hidden} {shape.experts} {round(math.log2(max(shape.total_params, 1.0)) * 4)}"


def make_folds(rows: Sequence[MeasuredRow], split: str, small: int) -> list[list[int]]:
    """The places of the rows that are left out together."""
    names = [row.get_group(split) for row in rows]
    counts = Counter(names)
    rare = sorted(name for name, count in counts.items() if count < small)
    parts = [{name} for name in sorted(counts.keys() - set(rare))]
    parts += [set(part) for i in range(SMALL_PARTS) if (part := rare[i::SMALL_PARTS])]
    return [[i for i, name in enumerate(names) if name in part] for part in parts]


def list_known(rows: Iterable[MeasuredRow]) -> dict[str, Any]:
    """The chips of each engine, and the range of sizes: what `find_distance` compares a question with."""
    engines: dict[str, set[tuple[str, str, float]]] = defaultdict(set)
    sizes = [math.inf, 0.0]
    for row in rows:
        case = row.case
        machine = case.machine
        engines[case.engine].add(
            (classify_device(machine), machine.family, float(f"{machine.bandwidth_bytes_s / 1e9:.4g}"))
        )
        size = case.shape.total_params
        sizes = [min(sizes[0], size), max(sizes[1], size)]
    return {
        "engines": {engine: sorted(map(list, chips)) for engine, chips in sorted(engines.items())},
        "params": [float(f"{size:.3g}") for size in sizes],
    }


def leave_out(
    rows: Sequence[MeasuredRow],
    small: int,
    fit_without: Callable[[list[int]], Sequence[float]],
    splits: Sequence[str] = SPLITS,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[LeftOutRow]:
    """The rows with their errors by fits without them. `fit_without` has the logarithms of predicted over measured."""
    for split in splits:
        folds = make_folds(rows, split, small)
        for number, fold in enumerate(folds, 1):
            inside = set(fold)
            known = list_known(row for i, row in enumerate(rows) if i not in inside)
            for i, log in zip(fold, fit_without(fold), strict=True):
                row = rows[i]
                case = row.case
                distance, _ = find_distance(known, case.engine, case.machine, case.shape)
                yield LeftOutRow(
                    row.metric, get_traits(case.engine).kernels, classify_device(case.machine), distance, row.campaign,
                    f"{case.engine} {case.chip.name} {name_model(case)}", split, -float(log),
                )  # fmt: skip
            tell(f"left out by {split}: {number} of {len(folds)}")


def leave_out_local(truth: Path, tell: Callable[[str], None]) -> tuple[list[LeftOutRow], dict[str, Any]]:
    """One stream: `fit_local`."""
    import fit_local

    paths = [truth, *sorted(MORE.glob("*.csv"))]
    named = {
        (path.stem, record["row_id"]): campaigns.campaign(record)
        for path in [*truth.glob("*.csv"), *paths[1:]]
        for record in _read(path)
    }
    rows = fit_local.load(paths)
    measured = [
        MeasuredRow(LOCAL_METRICS[row.case.metric], row.case, named[row.source, row.case.row_id]) for row in rows
    ]
    table = fit_local.columns(rows)
    full = fit_local.fit(table)

    def fit_without(fold: list[int]) -> Sequence[float]:
        inside = set(fold)
        rest = fit_local.columns([row for i, row in enumerate(rows) if i not in inside])
        start, _ = fit_local.prior(rest.names)
        # Start near the fit on all rows; effects that lost most of their rows return to their prior.
        before, after = (
            Counter(name for row in part for name in fit_local.effects_of(row)) for part in (rows, rest.rows)
        )
        for i, name in enumerate(rest.names):
            if after[name] > 0.7 * before[name]:
                start[i] = full[table.names.index(name)]
        effects = fit_local.fit(rest, start, LOCAL_ROUNDS)
        found = {id(row): error for row, error in fit_local.errors_of([rows[i] for i in fold], rest.names, effects)}
        return [math.log1p(found[id(rows[i])]) for i in fold]

    return list(leave_out(measured, 12, fit_without, tell=tell)), list_known(measured)


def leave_out_serving(tell: Callable[[str], None]) -> tuple[list[LeftOutRow], dict[str, Any]]:
    """Many streams: `fit_serving`."""
    import fit_serving
    import numpy as np

    rows, _ = fit_serving.read()
    measured = list(_match(rows, fit_serving.TRUTH))
    fit = fit_serving.Fit(rows)
    everything = np.arange(len(rows))
    full = fit.fitted(everything)

    def fit_without(fold: list[int]) -> Sequence[float]:
        fitted = fit.fitted(np.setdiff1d(everything, fold), SERVING_STEPS, full)
        return list(fit.logs(fitted, np.array(fold)))

    return list(leave_out(measured, 15, fit_without, tell=tell)), list_known(measured)


def _match(rows: Sequence[Any], truth: Path) -> Iterator[MeasuredRow]:
    """The rows of a fit with their cases: the tables are read again, in the same order."""
    paths = {source: truth / f"{source}.csv" for source in dict.fromkeys(row.source for row in rows)}
    records = (
        (source, record)
        for source, path in paths.items()
        for record in _read(path if path.exists() else FIRST_PARTY / path.name)
    )
    for row in rows:
        source, record = next(
            found for found in records
            if (found[0], found[1]["metric"], float(found[1]["value"])) == (row.source, row.metric, row.value)
        )  # fmt: skip
        case = resolve(record)
        assert not isinstance(case, PredictionRefusal), source
        case = case._replace(machine=make_chip_rates(case.chip, 1))
        yield MeasuredRow(name_load_metric(row.metric, row.way), case, campaigns.campaign(record))


def name_load_metric(metric: str, way: str) -> BandMetric:
    if metric == "output_tok_s_total":
        return "throughput"
    if metric == "ttft_ms":
        return "TTFT disaggregated" if way == "apart" else "TTFT"
    return "TPOT disaggregated" if way == "apart" else "TPOT"


def leave_out_memory(truth: Path) -> tuple[list[LeftOutRow], dict[str, Any]]:
    """Memory: nothing in it is fitted on these rows, so each is left out already."""
    found: list[LeftOutRow] = []
    measured: list[MeasuredRow] = []
    for path in sorted(truth.glob("*.csv")):
        pairs: list[tuple[MeasuredRow, RowPrediction, float]] = []
        for record in _read(path):
            if record["metric"] != "peak_memory_gb":
                continue
            case, predicted = resolve(record), predict(record)
            if not isinstance(case, PredictionRefusal) and not isinstance(predicted, PredictionRefusal):
                pairs.append(
                    (MeasuredRow("memory", case, campaigns.campaign(record)), predicted, float(record["value"]))
                )
        unit = find_memory_unit([(predicted.value, value) for _, predicted, value in pairs]) if pairs else 1.0
        measured += [row for row, _, _ in pairs]
        for row, predicted, value in pairs:
            case = row.case
            found.append(
                LeftOutRow(
                    "memory", get_traits(case.engine).kernels, classify_device(case.machine), "measured chip",
                    row.campaign, f"{case.engine} {name_model(case)} {case.shape.quantization}", "campaign",
                    math.log(value / (predicted.value * unit)),
                )
            )  # fmt: skip
    return found, list_known(measured)


def _read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            if record.get("metric") and record.get("value"):
                yield record
