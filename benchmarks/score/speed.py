"""Compare predicted speed and memory with published rows: for each source and metric the rows, refusals and errors.

Reads the tables in a folder of measurements (`--truth`). The first table applies the shipped efficiencies to rows that
they were partly fitted on. The second shows the errors for whole groups of rows that were left out of the fit, by chip,
by model and by engine, as stored in the data files (`fit_local.py` and `fit_serving.py` recompute them).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from bedplate.decide.estimate.calibration import load_table
from bedplate.published.predict import predict
from bedplate.published.rows import PredictionRefusal, RowPrediction
from bedplate.values.units import format_seconds


class Scored(NamedTuple):
    error: float
    inside: bool


MEMORY_UNITS = (1.0, 1e3, 1e3 / 1.048576, 1 / 1.073741824)
"""Tables use GB, MB, MiB or GiB under `peak_memory_gb`: the number of each unit in 10⁹ bytes."""


def score(folder: Path) -> tuple[dict[tuple[str, str], list[Scored]], dict[tuple[str, str], Counter[str]]]:
    scored: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    refused: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    pairs: dict[tuple[str, str], list[tuple[RowPrediction, float]]] = defaultdict(list)
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if not row.get("metric") or not row.get("value"):
                    continue
                group = (path.stem, row["metric"])
                found = predict(row)
                if isinstance(found, PredictionRefusal):
                    refused[group][found.why] += 1
                else:
                    pairs[group].append((found, float(row["value"])))
    for group, members in pairs.items():
        unit = unit_of(members) if group[1] == "peak_memory_gb" else 1.0
        for found, truth in members:
            scored[group].append(Scored(found.value * unit / truth - 1, found.low * unit <= truth <= found.high * unit))
    return scored, refused


def unit_of(members: list[tuple[RowPrediction, float]]) -> float:
    """The unit in which predictions are nearest to a table."""
    return min(
        MEMORY_UNITS,
        key=lambda unit: statistics.median(abs(found.value * unit / truth - 1) for found, truth in members),
    )


def printed(
    scored: dict[tuple[str, str], list[Scored]], refused: dict[tuple[str, str], Counter[str]], why: bool
) -> None:
    print("| source | metric | rows | refused | median error | mean error | bias | in the band |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for group in sorted(set(scored) | set(refused)):
        found, left = scored.get(group, []), refused.get(group, Counter())
        rows = len(found) + left.total()
        if not found:
            print(f"| {group[0]} | {group[1]} | {rows} | {left.total()} | – | – | – | – |")
        else:
            sizes = [abs(one.error) for one in found]
            print(
                f"| {group[0]} | {group[1]} | {rows} | {left.total()} | {statistics.median(sizes):.1%} "
                f"| {statistics.mean(sizes):.1%} | {statistics.mean(one.error for one in found):+.1%} "
                f"| {sum(one.inside for one in found) / len(found):.0%} |"
            )
        if why:
            for reason, count in left.most_common(3):
                print(f"{group[0]} {group[1]}: {count} × {reason}", file=sys.stderr)


def validation() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name in ("local", "serving"):
        try:
            lines += load_table(name).get("cross_validation", [])
        except FileNotFoundError:
            continue
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument("--why", action="store_true", help="show why rows were refused")
    options = parser.parse_args()
    if not options.truth.is_dir():
        sys.exit(f"no tables in {options.truth}; pass their folder with --truth DIR")
    began = time.monotonic()
    scored, refused = score(options.truth)
    printed(scored, refused, options.why)
    rows = sum(map(len, scored.values())) + sum(counts.total() for counts in refused.values())
    print(f"\n{rows:,} rows in {format_seconds(time.monotonic() - began)}")
    if lines := validation():
        print("\nWhole groups left out, predicted from a fit on the others:\n")
        print("| left out by | metric | rows | median error | groups | median of the groups' medians |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for line in lines:
            groups, by_group = line.get("groups"), line.get("group_median")
            print(
                f"| {line['split']} | {line['metric']} | {line['rows']} | {line['median']:.1%} "
                f"| {groups if groups is not None else '–'} | {f'{by_group:.1%}' if by_group is not None else '–'} |"
            )


if __name__ == "__main__":
    main()
