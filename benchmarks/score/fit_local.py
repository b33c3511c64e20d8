"""Fits the efficiencies of `decide/estimate/data/local.json` on a folder of published measurements.

Needs numpy and scipy, which bedplate itself does not: `pip install numpy scipy`. Prints the error that is left, and
with `--write` puts the fitted figures, their bands and the cross-validated errors into the data file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bedplate.decide.estimate import local
from bedplate.decide.estimate.local import Profile, Question
from bedplate.decide.estimate.rows import Case, Refused, resolve

DATA = Path(local.__file__).parent / "data" / "local.json"
METRICS = {"decode_tok_s_single", "prefill_tok_s", "total_tok_s_incl_prompt", "output_tok_s_total"}
# What an efficiency is before anything is measured, and by what factor it may well differ: physics and common sense.
PRIOR = {
    "read": (0.82, 1.12), "kv_read": (0.6, 1.5), "unpack_16": (0.05, 2.5), "unpack_8": (0.06, 2.5),
    "unpack_4": (0.08, 2.5), "layer_s": (20e-6, 2.0), "packed_s": (20e-6, 2.0), "moe_s": (30e-6, 2.0),
    "state_s": (30e-6, 2.0), "step_s": (300e-6, 2.0), "launch_s": (1e-6, 1.1), "launch_8": (1.5, 1.5),
    "launch_4": (1.0, 1.3), "eager_s": (40e-6, 2.0), "pair": (10.0, 3.0), "gemm": (0.4, 1.6), "gemm_8": (0.9, 1.25),
    "gemm_16": (1.2, 1.3), "gemm_fp4": (1.3, 1.4), "gemm_moe": (0.2, 1.8), "moe_16": (1.0, 1.5), "moe_4": (1.5, 2.0),
    "tile": (24.0, 2.0), "attend": (0.3, 1.7), "activation": (1.0, 1.7), "column": (0.05, 2.0), "plain": (1.5, 1.5),
    "plain_kv": (1.3, 1.3), "device_s": (250e-6, 1.6), "reduce_s": (12e-6, 1.6),
}  # fmt: skip
# Where a kind of device or engine is known to be another matter.
PRIORS: dict[str, dict[str, tuple[float, float]]] = {
    "cpu": {
        "read": (0.6, 1.3), "kv_read": (0.3, 1.5), "unpack_16": (0.35, 2.0), "unpack_8": (0.35, 2.0),
        "unpack_4": (0.35, 2.0), "layer_s": (30e-6, 2.0), "tile": (4.0, 2.0), "gemm": (0.06, 2.0),
        "gemm_moe": (0.05, 2.0), "attend": (0.02, 2.0), "pair": (3000.0, 3.0), "column": (0.5, 2.0),
    },
    "pytorch": {"launch_s": (800e-6, 1.3), "moe_s": (1e-3, 3.0)},
    # Marlin's kernels keep up with reading (Frantar et al., 2024).
    "vllm": {"unpack_8": (0.02, 1.5), "unpack_4": (0.03, 1.5)},
    "mistral.rs": {"moe_16": (0.4, 2.5)},
}  # fmt: skip
BOUNDS = {"read": (0.2, 0.97), "kv_read": (0.02, 0.95), "gemm": (0.01, 0.95), "gemm_moe": (0.005, 0.95),
          "attend": (0.005, 0.95)}  # fmt: skip
SCALE = 0.08
"""Residuals of this size, in logarithms, weigh as much as one standard deviation of a prior."""


class Row(NamedTuple):
    source: str
    case: Case
    truth: float
    question: Question
    weight: float


def load(folder: Path) -> list[Row]:
    """The rows that this path predicts, those of one group sharing the weight of one."""
    found: list[tuple[str, Case, float]] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for raw in csv.DictReader(file):
                if raw.get("metric") not in METRICS:
                    continue
                case = resolve(raw)
                if isinstance(case, Refused) or _left_out(path.stem, case):
                    continue
                found.append((path.stem, case, float(raw["value"])))
    sizes = Counter(_group(source, case) for source, case, _ in found)
    return [
        Row(source, case, truth, local.question_of(case), sizes[_group(source, case)] ** -0.6)
        for source, case, truth in found
    ]


def _left_out(source: str, case: Case) -> bool:
    """Rows under load, which another fit is for; rows without lengths; and rows that the tables' own notes call odd."""
    if case.metric == "total_tok_s_incl_prompt" and case.prompt_tokens is None:
        return True
    if source == "llamacpp_xiongjiedai_gpus" and case.metric == "prefill_tok_s" and case.shape.bits > 12:
        chip, four = case.chip.name, case.devices == 4
        if "A100 SXM" in chip or "L40S" in chip or ("RTX 5000 Ada" in chip and four):
            return True
    return case.metric == "output_tok_s_total" and case.engine in local.SERVED


def _group(source: str, case: Case) -> tuple[object, ...]:
    metric = "prefill" if case.metric == "prefill_tok_s" else "decode"
    return (source, case.chip.name, case.texts["model"], case.texts["quantization"], case.engine, case.backend, metric)


def key_of(row: Row) -> str:
    return f"{row.case.engine}/{row.case.backend}" + ("" if local.is_current(row.case) else "/older")


# Whose fitted figures are what is expected of another before it is measured: the same kernels, or nearly.
PARENTS = {
    "llama.cpp/cuda/older": "llama.cpp/cuda", "lmdeploy/cuda": "vllm/cuda", "llama.cpp/rocm-lt": "llama.cpp/rocm",
    "llama.cpp/rocm-wmma": "llama.cpp/rocm", "llama.cpp/rocm-wmma-lt": "llama.cpp/rocm-lt",
    "llama.cpp/vulkan-amdvlk": "llama.cpp/vulkan", "mistral.rs/cpu": "llama.cpp/cpu",
}  # fmt: skip
MOST_ROWS = 600


def prior_of(key: str) -> dict[str, tuple[float, float]]:
    prior = dict(PRIOR)
    for word in key.split("/"):
        prior |= PRIORS.get(word, {})
    return prior


def predicted(row: Row, profile: Profile) -> float:
    value = local.computed(row.question._replace(profile=profile), row.case)
    return float("nan") if isinstance(value, Refused) else value


def fit(
    key: str, rows: list[Row], parent: Profile | None = None, start: Profile | None = None, steps: int = 25
) -> Profile:
    """The efficiencies that are likeliest, given the rows and what was to be expected before."""
    prior = prior_of(key)
    names = Profile._fields
    centre = np.array([math.log(prior[name][0]) for name in names])
    spread = np.array([math.log(prior[name][1]) for name in names])
    low = np.array([math.log(BOUNDS[name][0]) if name in BOUNDS else centre[i] - 5 for i, name in enumerate(names)])
    high = np.array([math.log(BOUNDS[name][1]) if name in BOUNDS else centre[i] + 5 for i, name in enumerate(names)])
    if parent is not None:
        centre = np.log(np.array(parent))
    weights = np.sqrt(np.array([row.weight for row in rows]))

    def residuals(x: Any) -> Any:
        profile = Profile(*(math.exp(value) for value in x))
        errors = np.array([math.log(predicted(row, profile) / row.truth) for row in rows])
        # Soft: a row that is far off, such as a throttled card, must not bend the others.
        soft = np.sign(errors) * np.where(
            abs(errors) > SCALE, 1 + np.log(np.maximum(abs(errors) / SCALE, 1)), abs(errors) / SCALE
        )
        return np.concatenate([soft * weights, (x - centre) / spread])

    first = centre if start is None else np.log(np.array(start))
    first = np.clip(first, low + 1e-6, high - 1e-6)
    found = least_squares(residuals, first, bounds=(low, high), max_nfev=steps, x_scale=spread)
    return Profile(*(float(math.exp(value)) for value in found.x))


def errors_by(rows: Iterable[Row], profile_of: Callable[[Row], Profile]) -> list[tuple[Row, float]]:
    return [(row, predicted(row, profile_of(row)) / row.truth - 1) for row in rows]


def report(found: list[tuple[Row, float]], title: str) -> None:
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in found:
        groups[(row.source[:24], key_of(row), row.case.metric)].append(error)
    print(f"\n{title}")
    for name, errors in sorted(groups.items()):
        sizes = [abs(error) for error in errors]
        middle, mean, bias = statistics.median(sizes), statistics.mean(sizes), statistics.mean(errors)
        print(f"  {name!s:90} n={len(errors):4d} median {middle:6.1%} mean {mean:6.1%} bias {bias:+6.1%}")


def pooled_key(key: str) -> str:
    """Where rows of all engines of a backend are taken together, for an engine that nobody has measured."""
    return f"other/{key.split('/')[1]}"


def fit_all(
    rows: list[Row], starts: dict[str, Profile] | None = None, only: set[str] | None = None, most: int = MOST_ROWS
) -> dict[str, Profile]:
    """A profile for each engine and backend, and one for each backend over all engines."""
    by_key: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_key[key_of(row)].append(row)
    for key in [key for key in by_key if not key.startswith("pytorch")]:
        by_key[pooled_key(key)] += thinned(by_key[key], 100)
    found: dict[str, Profile] = {}
    for key in sorted(by_key, key=generation):
        if only is None or key in only:
            start = (starts or {}).get(key)
            parent = found.get(PARENTS.get(key, "")) or (starts or {}).get(PARENTS.get(key, ""))
            found[key] = fit(key, thinned(by_key[key], most), parent, start, 25 if start is None else 5)
    return found


def generation(key: str) -> int:
    """Parents come first."""
    return 1 + generation(PARENTS[key]) if key in PARENTS else 0


def thinned(rows: list[Row], most: int) -> list[Row]:
    """At most so many rows, by chance that is the same every time: tables alternate between their metrics."""
    return sorted(rows, key=lambda row: zlib.crc32(row.case.row_id.encode()))[:most]


def profile_without(case: Case, dated: bool, profiles: dict[str, Profile]) -> Profile:
    for key in local.kin(case.engine, case.backend, dated):
        if key in profiles:
            return profiles[key]
    return Profile(*(prior_of("other/cpu" if case.backend == "cpu" else "other")[name][0] for name in Profile._fields))


SPLITS: dict[str, Callable[[Row], str]] = {
    "chip": lambda row: row.case.chip.name,
    "model": lambda row: row.case.model.name,
    "engine": lambda row: row.case.engine,
}


def cross_validated(rows: list[Row], full: dict[str, Profile], split: str) -> list[tuple[Row, float]]:
    """Each group predicted by what was fitted on all the others."""
    group_of = SPLITS[split]
    found = []
    for group in sorted({group_of(row) for row in rows}):
        left_out = [row for row in rows if group_of(row) == group]
        kept = [row for row in rows if group_of(row) != group]
        touched = {key_of(row) for row in left_out}
        touched |= {pooled_key(key) for key in touched}
        touched |= {key for key, parent in PARENTS.items() if parent in touched and key in full}
        refitted = fit_all(kept, full, only=touched, most=120)
        # What the left-out rows had no part in stays as it is.
        usable = {key: profile for key, profile in full.items() if key not in touched} | refitted
        for row in left_out:
            profile = profile_without(row.case, local.is_current(row.case), usable)
            found.append((row, predicted(row, profile) / row.truth - 1))
        middle = statistics.median(abs(error) for _, error in found[-len(left_out) :])
        print(f"  {split} {group}: {middle:.1%} of {len(left_out)}", file=sys.stderr, flush=True)
    return found


def shared(row: Row, rows: list[Row]) -> bool:
    """Whether other chips than the row's were measured with the same engine and backend."""
    key = key_of(row)
    return any(other.case.chip.name != row.case.chip.name for other in rows if key_of(other) == key)


def summary(found: list[tuple[Row, float]], split: str) -> list[dict[str, Any]]:
    """By metric and source, and over the groups that were left out, so that one box with many rows counts once."""
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
    """Factors between which eight of ten truths lie, from predictions of rows that had no part in the fit."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row, error in found:
        ratios[row.case.metric].append(1 / (1 + error))
        ratios[f"{row.case.metric}/{key_of(row)}"].append(1 / (1 + error))
    return {
        name: (round(float(np.quantile(values, 0.1)), 3), round(float(np.quantile(values, 0.9)), 3))
        for name, values in sorted(ratios.items())
        if len(values) >= 10
    }


def rounded(profile: Profile) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in profile._asdict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument(
        "--only", default="", help="fit only engines and backends with this in their name; writes nothing"
    )
    parser.add_argument("--write", action="store_true", help="put the result into the package's data file")
    parser.add_argument(
        "--no-validation", action="store_true", help="leave out the cross-validation, which takes minutes"
    )
    options = parser.parse_args()
    rows = [row for row in load(options.truth) if options.only in key_of(row)]
    full = fit_all(rows)
    report(errors_by(rows, lambda row: full[key_of(row)]), "fitted on all rows")
    validation: list[dict[str, Any]] = []
    left_out: list[tuple[Row, float]] = []
    if not options.no_validation:
        for split in SPLITS:
            found = cross_validated(rows, full, split)
            report(found, f"left out by {split}")
            validation += summary(found, split)
            # How far an engine is off that nobody measured says nothing of one that was.
            left_out += [
                (row, error) for row, error in found if split == "model" or (split == "chip" and shared(row, rows))
            ]
        for line in validation:
            print(line)
    if options.write and not options.only:
        write(rows, full, validation, bands(left_out or errors_by(rows, lambda row: full[key_of(row)])))


def write(
    rows: list[Row],
    full: dict[str, Profile],
    validation: list[dict[str, Any]],
    found_bands: dict[str, tuple[float, float]],
) -> None:
    counts = Counter(key_of(row) for row in rows)
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        sources[key_of(row)].add(row.source)
    profiles = {
        key: {
            "rows": counts.get(key, 0),
            "sources": sorted(sources.get(key, ())) or ["all engines of this backend"],
            "values": rounded(profile),
        }
        for key, profile in sorted(full.items())
    }
    for key in ("other", "other/cpu"):
        if key not in profiles:
            values = {name: prior_of(key)[name][0] for name in Profile._fields}
            profiles[key] = {"rows": 0, "sources": ["before any measurement"], "values": values}
    DATA.write_text(
        json.dumps(
            {
                "about": "Efficiencies by engine and backend, by benchmarks/score/fit_local.py; see docs/estimates.md",
                "profiles": profiles,
                "bands": found_bands,
                "cross_validation": validation,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
