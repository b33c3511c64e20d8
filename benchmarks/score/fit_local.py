"""Fit the efficiencies of `decide/estimate/data/local.json` on a folder of published measurements.

All efficiencies are fitted together. An efficiency is a base value times factors for the backend, the kind of memory
and the architecture, the kind of engine, the engine and its build. Each factor is expected to be 1 and moves only as
far as the rows support, so that an engine or a chip without measurements takes the values that similar ones share.

Needs numpy, which bedplate itself does not: `pip install numpy`. Prints the remaining error. With `--write`, stores the
fitted values, their bands and the cross-validated errors in the data file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bedplate.decide.estimate import local
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.local import LocalEstimator, PassWork, Profile
from bedplate.published import one_stream
from bedplate.published.one_stream import StreamMetric
from bedplate.published.rows import PredictionRefusal, PublishedCase, resolve

DATA = Path(local.__file__).parent / "data" / "local.json"
METRICS = {"decode_tok_s_single", "prefill_tok_s", "total_tok_s_incl_prompt", "output_tok_s_total"}
# Prior of each efficiency: its expected value and the factor by which it may plausibly differ.
PRIOR = {
    "slack": (0.18, 1.5), "kv_read": (0.6, 1.5), "unpack_16": (0.03, 2.0), "unpack_8": (0.04, 2.0),
    "unpack_4": (0.04, 2.0), "layer_s": (25e-6, 2.0), "packed_s": (15e-6, 2.0), "moe_s": (30e-6, 2.0),
    "state_s": (30e-6, 2.0), "step_s": (300e-6, 2.0), "launch_s": (750e-6, 1.3), "launch_8": (1.5, 1.5),
    "launch_4": (1.0, 1.3), "eager_s": (60e-6, 2.0), "pair": (10.0, 3.0), "gemm": (0.4, 1.6), "gemm_8": (0.9, 1.25),
    "gemm_16": (1.2, 1.3), "gemm_fp4": (1.3, 1.4), "gemm_moe": (0.15, 1.8), "moe_16": (1.0, 1.5), "moe_4": (1.5, 2.0),
    "tile": (24.0, 2.0), "attend": (0.3, 1.7), "activation": (1.0, 1.4), "column": (0.05, 2.0), "plain": (1.5, 1.5),
    "plain_kv": (1.3, 1.3), "device_s": (250e-6, 1.6), "reduce_s": (12e-6, 1.6),
}  # fmt: skip
CPU_PRIOR = PRIOR | {
    "slack": (0.3, 1.6), "kv_read": (0.3, 1.5), "unpack_16": (0.2, 2.0), "unpack_8": (0.12, 2.0),
    "unpack_4": (0.15, 2.0), "layer_s": (20e-6, 2.0), "tile": (4.0, 2.0), "gemm": (0.9, 1.6),
    "gemm_moe": (0.6, 1.8), "attend": (0.15, 2.0), "pair": (3000.0, 3.0), "column": (0.5, 2.0),
}  # fmt: skip
# Priors for particular effects, as a factor on the base value.
EXPECTED = {
    "like eager": {"moe_s": 30.0},
    # 32-bit activations; each operation is a pass through memory.
    "like gguf": {"activation": 3.0},
    "like gguf/cpu": {"activation": 3.0},
    # On an RX 9070 XT, 84 % of the speed of the same build with Vulkan (lmstudio-bug-tracker, issue 574).
    "rocm": {"unpack_4": 1.5, "unpack_8": 1.3, "layer_s": 1.4, "moe_s": 1.5},
    # Matrix libraries use tiles of at least 64 rows.
    "like serving": {"tile": 2.0},
}  # fmt: skip
OF_CHIPS = (
    "slack", "kv_read", "unpack_16", "unpack_8", "unpack_4", "layer_s", "moe_s", "step_s", "gemm", "gemm_8", "gemm_16",
    "gemm_moe", "attend", "tile", "eager_s",
)  # fmt: skip
"""Efficiencies that may differ between architectures, whatever the engine."""
OF_MEMORY = (*OF_CHIPS,)
"""Efficiencies that may differ between kinds of memory."""
SCALE = 0.06
"""Residuals of this size, in logarithms, weigh as much as one standard deviation of a prior."""
ROUNDS = 80
NARROWEST = (0.93, 1.07)
"""Minimum width of a band: two machines of the same kind differ by as much."""
MORE_WEIGHT = 0.4
"""Relative weight of `--more` tables (single reported figures) compared with tables measured in one campaign."""


class Row(NamedTuple):
    source: str
    case: PublishedCase
    truth: float
    question: LocalEstimator
    asked: StreamMetric
    weight: float
    scored: bool
    """Whether the row counts in the reported errors, and not only in the fit."""


def spread_of(name: str) -> float:
    """Prior width of an effect, as a share of the prior width of its efficiency."""
    if name in ("gpu", "cpu"):
        return 1.0
    if name.startswith("chip "):
        return 0.35
    if name.startswith("memory "):
        return 0.5
    if "older" in name:
        return 0.5
    if name.startswith("like "):
        return 0.5 if "/" in name else 0.7
    return 0.7


def load(folders: Sequence[Path], scored: int = 1) -> list[Row]:
    """Rows that this path predicts; the rows of one group share the weight of one row."""
    found: list[tuple[str, PublishedCase, float, bool]] = []
    for number, folder in enumerate(folders):
        for path in sorted(folder.glob("*.csv")) if folder.is_dir() else [folder]:
            with path.open(newline="") as file:
                for raw in csv.DictReader(file):
                    if raw.get("metric") not in METRICS:
                        continue
                    case = resolve(raw)
                    if isinstance(case, PredictionRefusal) or _left_out(path.stem, case):
                        continue
                    found.append((path.stem, case, float(raw["value"]), number < scored))
    sizes = Counter(_group(source, case) for source, case, _, _ in found)
    rows = []
    for source, case, truth, is_scored in found:
        question = one_stream.make_case_estimator(case)
        asked = one_stream.find_metric(question, case)
        if not isinstance(asked, PredictionRefusal):
            weight = sizes[_group(source, case)] ** -0.6 * (1.0 if is_scored else MORE_WEIGHT)
            rows.append(Row(source, case, truth, question, asked, weight, is_scored))
    return rows


def _left_out(source: str, case: PublishedCase) -> bool:
    """Rows to skip: rows under load (another fit covers them), without lengths, or marked as odd in the notes."""
    if case.metric == "total_tok_s_incl_prompt" and case.prompt_tokens is None:
        return True
    if source == "llamacpp_xiongjiedai_gpus" and case.metric == "prefill_tok_s" and case.shape.bits > 12:
        chip, four = case.chip.name, case.devices == 4
        if "A100 SXM" in chip or "L40S" in chip or ("RTX 5000 Ada" in chip and four):
            return True
    return case.metric == "output_tok_s_total" and get_traits(case.engine).kernels == "serving"


def _group(source: str, case: PublishedCase) -> tuple[object, ...]:
    metric = "prefill" if case.metric == "prefill_tok_s" else "decode"
    return (source, case.chip.name, case.texts["model"], case.texts["quantization"], case.engine, case.backend, metric)


def effects_of(row: Row) -> tuple[str, ...]:
    case = row.case
    return local.list_effects(case.engine, case.backend, case.machine, one_stream.is_current(case))


def key_of(row: Row) -> str:
    case = row.case
    return f"{case.engine}/{case.backend}" + ("" if one_stream.is_current(case) else " older")


class Columns(NamedTuple):
    """Rows as columns: all passes in one array, with the row that each belongs to."""

    rows: list[Row]
    work: PassWork
    owner: Any
    times: Any
    floor: Any
    tokens: Any
    truth: Any
    weight: Any
    names: list[str]
    """All effects."""
    groups: list[tuple[list[int], Any]]
    """Rows with the same effects: which effects, and which rows."""


def columns(rows: list[Row]) -> Columns:
    parts = [(i, part) for i, row in enumerate(rows) for part in row.asked.parts]
    fields: list[Any] = [np.array([getattr(part.work, name) for _, part in parts]) * 1.0 for name in PassWork._fields]
    names = sorted(
        {name for row in rows for name in effects_of(row)}, key=lambda name: (name not in ("gpu", "cpu"), name)
    )
    by_effects: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_effects[effects_of(row)].append(i)
    return Columns(
        rows=rows,
        work=PassWork(*fields),
        owner=np.array([i for i, _ in parts]),
        times=np.array([part.times for _, part in parts]),
        floor=np.array([part.floor_s for _, part in parts]),
        tokens=np.array([row.asked.tokens for row in rows]),
        truth=np.array([row.truth for row in rows]),
        weight=np.array([row.weight for row in rows]),
        names=names,
        groups=[([names.index(name) for name in key], np.array(members)) for key, members in by_effects.items()],
    )


def log_predicted(table: Columns, logs: Any) -> Any:
    """Logarithms of the predictions, from those of each row's efficiencies."""
    each = np.exp(logs)[table.owner]
    profile = Profile(*(each[:, i] for i in range(each.shape[1])))
    seconds = np.maximum(local.forward(profile, table.work).total_s * table.times, table.floor)
    return np.log(table.tokens) - np.log(np.bincount(table.owner, seconds, minlength=len(table.rows)))


def prior(names: list[str]) -> tuple[Any, Any]:
    """Prior mean and width of each effect on each efficiency; zero width where it does not apply."""
    fields = Profile._fields
    centre = np.zeros((len(names), len(fields)))
    spread = np.zeros((len(names), len(fields)))
    for i, name in enumerate(names):
        table = CPU_PRIOR if name == "cpu" else PRIOR
        for j, field in enumerate(fields):
            if name in ("gpu", "cpu"):
                centre[i, j] = math.log(table[field][0])
            elif field in EXPECTED.get(name, {}):
                centre[i, j] = math.log(EXPECTED[name][field])
            limited = OF_CHIPS if name.startswith("chip ") else OF_MEMORY if name.startswith("memory ") else fields
            if field in limited:
                spread[i, j] = spread_of(name) * math.log(table[field][1])
    return centre, spread


def spread_out(table: Columns, effects: Any) -> Any:
    logs = np.zeros((len(table.rows), effects.shape[1]))
    for members, rows in table.groups:
        logs[rows] = effects[members].sum(axis=0)
    return logs


def softened(errors: Any) -> Any:
    """Softened residuals in standard deviations, so that an outlier such as a throttled card has limited influence."""
    sizes = abs(errors) / SCALE
    return np.sign(errors) * np.where(sizes > 1, 1 + np.log(np.maximum(sizes, 1)), sizes)


def fit(table: Columns, start: Any = None, rounds: int = ROUNDS) -> Any:
    """Maximum a posteriori estimate of the effects by damped Gauss-Newton."""
    centre, spread = prior(table.names)
    has_say = spread > 0
    inverse = np.where(has_say, 1 / np.where(has_say, spread, 1) ** 2, 0)
    effects = centre.copy() if start is None else start.copy()
    fields = effects.shape[1]

    def cost(candidate: Any) -> tuple[float, Any]:
        errors = log_predicted(table, spread_out(table, candidate)) - np.log(table.truth)
        return float((table.weight * softened(errors) ** 2).sum() + ((candidate - centre) ** 2 * inverse).sum()), errors

    now, errors = cost(effects)
    damping = 1e-3
    for _ in range(rounds):
        logs = spread_out(table, effects)
        base = log_predicted(table, logs)
        slopes = np.empty((len(table.rows), fields))
        for j in range(fields):
            moved = logs.copy()
            moved[:, j] += 1e-4
            slopes[:, j] = (log_predicted(table, moved) - base) / 1e-4
        # Weights for which weighted squares have the same gradient as the squares of the softened residuals.
        sizes = np.maximum(abs(errors), 1e-9)
        weight = table.weight * softened(sizes) / sizes / np.maximum(sizes, SCALE)
        size = len(table.names) * fields
        normal = np.zeros((size, size))
        slope = np.zeros(size)
        for members, rows in table.groups:
            each = slopes[rows]
            gram = (each * weight[rows, None]).T @ each
            pull = each.T @ (weight[rows] * errors[rows])
            for one in members:
                slope[one * fields : (one + 1) * fields] += pull
                for other in members:
                    normal[one * fields : (one + 1) * fields, other * fields : (other + 1) * fields] += gram
        slope += ((effects - centre) * inverse).ravel()
        used = has_say.ravel() & (np.diag(normal) > 1e-12)
        normal[np.diag_indices(size)] += inverse.ravel()
        kept = np.flatnonzero(used)
        system = normal[np.ix_(kept, kept)]
        for _ in range(14):
            step = np.zeros(size)
            step[kept] = np.linalg.solve(system + damping * np.diag(np.diag(system)), -slope[kept])
            candidate = effects + np.clip(step, -1.5, 1.5).reshape(effects.shape)
            then, errors_then = cost(candidate)
            if then < now:
                break
            damping *= 8
        else:
            return effects
        damping = max(1e-6, damping / 4)
        gained, now, errors, effects = now - then, then, errors_then, candidate
        if gained < 1e-5 * now:
            break
    return effects


def predicted(rows: list[Row], names: list[str], effects: Any) -> Any:
    """Efficiencies of rows by their effects; unknown effects change nothing."""
    table = columns(rows)
    known = {name: effects[i] for i, name in enumerate(names)}
    here, _ = prior(table.names)
    own = np.array([known.get(name, here[i]) for i, name in enumerate(table.names)])
    return np.exp(log_predicted(table, spread_out(table, own)))


def errors_of(rows: list[Row], names: list[str], effects: Any) -> list[tuple[Row, float]]:
    values = predicted(rows, names, effects)
    return [(row, float(value) / row.truth - 1) for row, value in zip(rows, values, strict=True)]


def report(found: Iterable[tuple[Row, float]], title: str) -> None:
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in found:
        groups[(row.source[:24], key_of(row), row.case.metric)].append(error)
    print(f"\n{title}")
    for name, errors in sorted(groups.items()):
        sizes = [abs(error) for error in errors]
        middle, mean, bias = statistics.median(sizes), statistics.mean(sizes), statistics.median(errors)
        print(f"  {name!s:90} n={len(errors):4d} median {middle:6.1%} mean {mean:6.1%} bias {bias:+6.1%}")


SPLITS: dict[str, Callable[[Row], str]] = {
    "chip": lambda row: row.case.chip.name,
    "model": lambda row: row.case.model.name,
    "engine": lambda row: row.case.engine,
}


def cross_validated(rows: list[Row], names: list[str], full: Any, split: str) -> list[tuple[Row, float]]:
    """Predictions of each group from a fit on all other groups."""
    group_of = SPLITS[split]
    found = []
    for group in sorted({group_of(row) for row in rows if row.scored}):
        left_out = [row for row in rows if group_of(row) == group and row.scored]
        table = columns([row for row in rows if group_of(row) != group])
        # Start from the fit on all rows, which is near; effects without rows of their own return to their prior.
        start, _ = prior(table.names)
        counts = Counter(name for row in rows for name in effects_of(row))
        still = Counter(name for row in table.rows for name in effects_of(row))
        for i, name in enumerate(table.names):
            if still[name] > 0.7 * counts[name]:
                start[i] = full[names.index(name)]
        effects = fit(table, start, 8)
        found += errors_of(left_out, table.names, effects)
        middle = statistics.median(abs(error) for _, error in found[-len(left_out) :])
        print(f"  {split} {group}: {middle:.1%} of {len(left_out)}", file=sys.stderr, flush=True)
    return found


def shared(row: Row, rows: list[Row]) -> bool:
    """Whether other chips than the row's were measured with the same engine and backend."""
    key = key_of(row)
    return any(other.case.chip.name != row.case.chip.name for other in rows if key_of(other) == key)


def summary(found: list[tuple[Row, float]], split: str) -> list[dict[str, Any]]:
    """Errors by metric and source, and over left-out groups, so that one machine with many rows counts once."""
    lines = []
    for metric in sorted({row.case.metric for row, _ in found}):
        errors = [abs(error) for row, error in found if row.case.metric == metric]
        groups: dict[str, list[float]] = defaultdict(list)
        for row, error in found:
            if row.case.metric == metric:
                groups[f"{row.source} {SPLITS[split](row)}"].append(abs(error))
        by_group = statistics.median(map(statistics.median, groups.values()))
        lines.append(
            {
                "split": split, "metric": metric, "rows": len(errors), "median": round(statistics.median(errors), 4),
                "groups": len(groups), "group_median": round(by_group, 4),
            }
        )  # fmt: skip
    return lines


def bands(found: list[tuple[Row, float]]) -> dict[str, tuple[float, float]]:
    """Factors that contain eight of ten measured values, from predictions of rows outside of the fit."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row, error in found:
        ratios[row.case.metric].append(1 / (1 + error))
        ratios[f"{row.case.metric}/{effects_of(row)[-1]}"].append(1 / (1 + error))
    return {
        name: (
            min(NARROWEST[0], round(float(np.quantile(values, 0.1)), 3)),
            max(NARROWEST[1], round(float(np.quantile(values, 0.9)), 3)),
        )
        for name, values in sorted(ratios.items())
        if len(values) >= 10
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument(
        "--more",
        type=Path,
        nargs="*",
        default=[],
        help="more tables of the same format, for the fit but not for the score",
    )
    parser.add_argument("--write", action="store_true", help="write the result to the package's data file")
    parser.add_argument("--no-validation", action="store_true", help="skip the cross-validation, which takes minutes")
    parser.add_argument("--splits", nargs="*", default=list(SPLITS))
    options = parser.parse_args()
    rows = load([options.truth, *options.more])
    table = columns(rows)
    full = fit(table)
    report(errors_of(rows, table.names, full), "fitted on all rows")
    validation: list[dict[str, Any]] = []
    left_out: list[tuple[Row, float]] = []
    if not options.no_validation:
        for split in options.splits:
            found = cross_validated(rows, table.names, full, split)
            report(found, f"left out by {split}")
            validation += summary(found, split)
            # The error for an engine without measurements says nothing about one with measurements.
            left_out += [
                (row, error) for row, error in found if split == "model" or (split == "chip" and shared(row, rows))
            ]
        for line in validation:
            print(line)
    if options.write:
        write(rows, table.names, full, validation, bands(left_out or errors_of(rows, table.names, full)))


def write(
    rows: list[Row],
    names: list[str],
    effects: Any,
    validation: list[dict[str, Any]],
    found_bands: dict[str, tuple[float, float]],
) -> None:
    counts = Counter(name for row in rows for name in effects_of(row))
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for name in effects_of(row):
            sources[name].add(row.source)
    kept: dict[str, Any] = {}
    for i, name in enumerate(names):
        whole = name in ("gpu", "cpu")
        values = {
            field: float(f"{math.exp(effects[i, j]):.3g}")
            for j, field in enumerate(Profile._fields)
            if whole or abs(effects[i, j]) > 0.004
        }
        kept[name] = {"rows": counts[name], "sources": sorted(sources[name]), "values": values}
    DATA.write_text(
        json.dumps(
            {
                "about": "Efficiencies, and factors on them by backend, chip and engine, by "
                "benchmarks/score/fit_local.py; see docs/estimates.md",
                "effects": kept,
                "bands": found_bands,
                "cross_validation": validation,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
