"""Compare predicted speed and memory with published rows: errors and coverage by metric, then by source.

Reads the tables in a folder of measurements (`--truth`). In-sample errors apply the shipped efficiencies to rows that
they were partly fitted on. The errors of rows that were left out, and the coverage of the bands, are stored with the
bands; `--write` computes both again, which takes minutes and needs numpy. Run it after a fit.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bands import LeftOutRow, compute_bands, compute_fingerprint, find_memory_unit

from bedplate.decide.estimate import calibration
from bedplate.decide.estimate.bands import LEVELS
from bedplate.decide.estimate.calibration import load_table
from bedplate.decide.estimate.engines import get_traits
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, find_engine
from bedplate.values.units import format_seconds

DATA = Path(calibration.__file__).parent / "data" / "bands.json"
SPLITS = ("chip", "model", "engine", "campaign")
GOALS = {
    "decode": (0.09, 0.06), "prefill": (0.25, 0.15), "TTFT": (0.28, 0.18), "TTFT disaggregated": (0.38, 0.28),
    "TPOT, all workers": (0.15, 0.10), "throughput": (0.18, 0.12), "memory": (0.05, 0.04),
}  # fmt: skip
"""Goals for the median error of left-out rows: must and aim."""
TOGETHER = {"TPOT, all workers": ("TPOT", "TPOT disaggregated")}
"""Metrics whose errors are also judged together; each has bands of its own."""
COVERAGE_GOAL = "74–88 %"
REFUSED_GOAL = 0.10


class ScoredRow(NamedTuple):
    source: str
    metric: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def convert(self, unit: float) -> ScoredRow:
        return self._replace(predicted=self.predicted * unit, low=self.low * unit, high=self.high * unit)


Refused = dict[tuple[str, str], Counter[str]]


def score(folder: Path, every: int = 1) -> tuple[list[ScoredRow], Refused]:
    """All rows, or every so many, with their predictions, and the reasons for refused rows by source and metric."""
    scored: list[ScoredRow] = []
    refused: Refused = defaultdict(Counter)
    for path in sorted(folder.glob("*.csv")):
        rows = []
        with path.open(newline="") as file:
            for record in islice(csv.DictReader(file), 0, None, every):
                if not record.get("metric") or not record.get("value"):
                    continue
                metric, found = name_metric(record), predict(record)
                if isinstance(found, PredictionRefusal):
                    refused[path.stem, metric][found.why] += 1
                else:
                    rows.append(ScoredRow(path.stem, metric, *found, float(record["value"])))
        memory = [row for row in rows if row.metric == "memory"]
        unit = find_memory_unit([(row.predicted, row.measured) for row in memory]) if memory else 1.0
        scored += [row.convert(unit) if row.metric == "memory" else row for row in rows]
    return scored, refused


def name_metric(record: dict[str, str]) -> str:
    """The metric of a row in the words of the bands."""
    metric = record["metric"]
    if metric in ("ttft_ms", "tpot_ms"):
        disaggregated = "disagg" in record["scenario"].lower() or "disagg" in record["parallelism"].lower()
        return metric.removesuffix("_ms").upper() + (" disaggregated" if disaggregated else "")
    if metric == "output_tok_s_total" and get_traits(find_engine(record["engine"]) or "").kernels != "serving":
        return "batched decode" if find_engine(record["engine"]) != "lmdeploy" else "throughput"
    return {
        "decode_tok_s_single": "decode", "prefill_tok_s": "prefill", "total_tok_s_incl_prompt": "whole request",
        "peak_memory_gb": "memory", "output_tok_s_total": "throughput", "output_tok_s_per_gpu": "throughput",
    }.get(metric, metric)  # fmt: skip


def print_metrics(scored: list[ScoredRow], refused: Refused, stored: dict[str, Any]) -> None:
    print(
        "Median errors, and shares of left-out rows inside the bands, each predicted without its campaign.\n\n"
        "| metric | rows | refused | in sample | left out: chip | model | engine | campaign | goal (aim) "
        f"| campaigns | 50 % | 80 % (goal {COVERAGE_GOAL}) | 95 % |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    lines = stored.get("score", {})
    for metric in [*GOALS, *sorted(({row.metric for row in scored} | lines.keys()) - GOALS.keys())]:
        parts = TOGETHER.get(metric, (metric,))
        rows = [row for row in scored if row.metric in parts]
        left = sum(counts.total() for (_, name), counts in refused.items() if name in parts)
        line = lines.get(metric, {})
        errors = [_format_share(line.get("error", {}).get(split), 1) for split in SPLITS]
        must, aim = GOALS.get(metric, (None, None))
        goal = f"{must:.0%} ({aim:.0%})" if must and aim else "–"
        inside = [_format_share(line.get("coverage", {}).get(str(level))) for level in LEVELS]
        own = _format_share(statistics.median(abs(row.error) for row in rows) if rows else None, 1)
        print(
            f"| {metric} | {len(rows) + left} | {_format_share(left / max(1, len(rows) + left), 1)} | {own} "
            f"| {' | '.join(errors)} | {goal} | {line.get('campaigns', '–')} | {' | '.join(inside)} |"
        )


def print_sources(scored: list[ScoredRow], refused: Refused, why: bool) -> None:
    print(
        f"\nBy source, in sample; at most {REFUSED_GOAL:.0%} of a source may be refused.\n\n"
        "| source | metric | rows | refused | median error | bias | in the 80 % band |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for source, metric in sorted({(row.source, row.metric) for row in scored} | refused.keys()):
        rows = [row for row in scored if (row.source, row.metric) == (source, metric)]
        left = refused.get((source, metric), Counter())
        share = left.total() / (len(rows) + left.total())
        figures = "– | – | –"
        if rows:
            error, bias = (
                statistics.median(abs(row.error) for row in rows),
                statistics.median(row.error for row in rows),
            )
            figures = f"{error:.1%} | {bias:+.1%} | {sum(row.is_inside for row in rows) / len(rows):.0%}"
        print(f"| {source} | {metric} | {len(rows) + left.total()} | {share:.1%} | {figures} |")
        if why:
            for reason, count in left.most_common(3):
                print(f"{source} {metric}: {count} × {reason}", file=sys.stderr)


def _format_share(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{share:.{digits}%}"


def write_bands(truth: Path) -> dict[str, Any]:
    """Leave out every campaign, chip, model and engine in turn, and store the bands and the errors."""
    with ProcessPoolExecutor(2) as processes:
        parts = [processes.submit(collect_rows, path, truth) for path in ("under load", "one stream", "memory")]
        found = [part.result() for part in parts]
    by_metric: dict[str, list[LeftOutRow]] = defaultdict(list)
    for _, rows, _ in found:
        for row in rows:
            by_metric[row.metric].append(row)
    groups: dict[str, Any] = {}
    lines: dict[str, Any] = {}
    for metric, rows in sorted(by_metric.items()):
        bands, calibrated = compute_bands(rows)
        groups |= bands
        lines[metric] = {
            "rows": calibrated.rows,
            "campaigns": calibrated.campaigns,
            "left_out": calibrated.unit,
            "error": _find_medians(rows),
            "coverage": {str(level): round(share, 3) for level, share in calibrated.coverage.items()},
            "coverage_by_campaign": {str(level): round(one, 3) for level, one in calibrated.campaign_coverage.items()},
        }
    for metric, members in TOGETHER.items():
        lines[metric] = {"error": _find_medians([row for member in members for row in by_metric[member]])}
    data = {
        "about": "Error bands as factors of an estimate, and their coverage, by benchmarks/score/speed.py --write; "
        "see docs/estimates.md",
        "fit": compute_fingerprint(),
        "known": {path: known for path, _, known in found},
        "groups": groups,
        "score": lines,
    }
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    load_table.cache_clear()
    return data


def collect_rows(path: str, truth: Path) -> tuple[str, list[LeftOutRow], dict[str, Any]]:
    import left_out

    def tell(text: str) -> None:
        print(f"{path}: {text}", file=sys.stderr, flush=True)

    if path == "under load":
        return path, *left_out.leave_out_serving(tell)
    return path, *(left_out.leave_out_local(truth, tell) if path == "one stream" else left_out.leave_out_memory(truth))


def _find_medians(rows: list[LeftOutRow]) -> dict[str, float]:
    """The median errors by what was left out."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[row.split].append(abs(math.expm1(-row.log)))
    return {split: round(statistics.median(errors[split]), 4) for split in SPLITS if split in errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument("--why", action="store_true", help="show why rows were refused")
    parser.add_argument("--write", action="store_true", help="compute the bands again and write the data file")
    options = parser.parse_args()
    if not options.truth.is_dir():
        sys.exit(f"no tables in {options.truth}; pass their folder with --truth DIR")
    began = time.monotonic()
    stored = write_bands(options.truth) if options.write else load_table("bands")
    scored, refused = score(options.truth)
    print_metrics(scored, refused, stored)
    print_sources(scored, refused, options.why)
    rows = len(scored) + sum(counts.total() for counts in refused.values())
    print(f"\n{rows:,} rows in {format_seconds(time.monotonic() - began)}")
    if stored["fit"] != compute_fingerprint():
        print("The bands belong to another fit; compute them again: make score ARGS=--write", file=sys.stderr)


if __name__ == "__main__":
    main()
