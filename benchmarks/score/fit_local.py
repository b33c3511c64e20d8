"""Fits the efficiencies of `decide/estimate/data/local.json` on a folder of published measurements.

Needs numpy and scipy, which bedplate itself does not: `pip install numpy scipy`. Prints the error that is left, and with
`--write` puts the fitted figures, their bands and the cross-validated errors into the data file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
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
    "unpack_4": (0.08, 2.5), "layer_s": (20e-6, 2.0), "moe_s": (30e-6, 2.0), "state_s": (30e-6, 2.0),
    "step_s": (300e-6, 2.0), "launch_s": (1e-6, 1.1), "launch_8": (1.5, 1.5), "launch_4": (1.0, 1.3),
    "eager_s": (40e-6, 2.0), "pair": (10.0, 3.0), "gemm": (0.4, 1.6), "gemm_moe": (0.2, 1.8),
    "gemm_8": (0.9, 1.25), "gemm_16": (1.2, 1.3),
    "gemm_fp4": (1.3, 1.4), "moe_16": (1.0, 1.5), "moe_4": (1.5, 2.0), "tile": (24.0, 2.0), "attend": (0.3, 1.7), "activation": (1.0, 1.7), "column": (0.05, 2.0), "plain": (1.5, 1.5),
    "plain_kv": (1.3, 1.3), "device_s": (250e-6, 1.6), "reduce_s": (12e-6, 1.6),
}  # fmt: skip
# Where a kind of device or engine is known to be another matter.
PRIORS: dict[str, dict[str, tuple[float, float]]] = {
    "cpu": {
        "read": (0.6, 1.3), "kv_read": (0.3, 1.5), "unpack_16": (0.5, 2.0), "unpack_8": (0.5, 2.0),
        "unpack_4": (0.6, 2.0), "layer_s": (30e-6, 2.0), "tile": (4.0, 2.0), "gemm": (0.15, 2.0), "gemm_moe": (0.1, 2.0),
        "attend": (0.05, 2.0), "pair": (3000.0, 3.0), "column": (0.5, 2.0),
    },
    "pytorch": {"launch_s": (800e-6, 1.3), "moe_s": (1e-3, 3.0)},
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
                if isinstance(case, Refused) or _elsewhere(case):
                    continue
                found.append((path.stem, case, float(raw["value"])))
    sizes = Counter(_group(source, case) for source, case, _ in found)
    return [
        Row(source, case, truth, local.question_of(case), sizes[_group(source, case)] ** -0.6)
        for source, case, truth in found
    ]


def _elsewhere(case: Case) -> bool:
    """Rows under load, which another fit is for, and rows that their own publisher's readers found odd."""
    if case.metric == "total_tok_s_incl_prompt" and case.prompt_tokens is None:
        return True
    odd = ("A100 SXM" in case.chip.name, "L40S" in case.chip.name, "RTX 5000 Ada" in case.chip.name and case.devices == 4)
    if case.metric == "prefill_tok_s" and case.row_id.startswith("XJD") and case.shape.bits > 12 and any(odd):
        return True
    return case.metric == "output_tok_s_total" and case.engine in local.SERVED


def _group(source: str, case: Case) -> tuple[object, ...]:
    metric = "prefill" if case.metric == "prefill_tok_s" else "decode"
    return (source, case.chip.name, case.texts["model"], case.texts["quantization"], case.engine, case.backend, metric)


def key_of(row: Row) -> str:
    case = row.case
    dated = bool(case.version) or case.engine != "llama.cpp" or case.backend == "cpu"
    backend = case.backend
    return f"{case.engine}/{backend}" + ("" if dated else "/undated")


def prior_of(key: str) -> dict[str, tuple[float, float]]:
    prior = dict(PRIOR)
    for word in key.split("/"):
        prior |= PRIORS.get(word, {})
    return prior


def predicted(row: Row, profile: Profile) -> float:
    value = local.computed(row.question._replace(profile=profile), row.case)
    return float("nan") if isinstance(value, Refused) else value


def fit(key: str, rows: list[Row], start: dict[str, float] | None = None) -> Profile:
    prior = prior_of(key)
    names = Profile._fields
    centre = np.array([math.log(prior[name][0]) for name in names])
    spread = np.array([math.log(prior[name][1]) for name in names])
    low = np.array([math.log(BOUNDS[name][0]) if name in BOUNDS else centre[i] - 5 for i, name in enumerate(names)])
    high = np.array([math.log(BOUNDS[name][1]) if name in BOUNDS else centre[i] + 5 for i, name in enumerate(names)])
    weights = np.array([row.weight for row in rows])

    def residuals(x: Any) -> Any:
        profile = Profile(*(math.exp(value) for value in x))
        errors = [math.log(predicted(row, profile) / row.truth) for row in rows]
        # Soft: a row that is far off, such as a throttled card, must not bend the others.
        soft = [math.copysign(SCALE * math.log1p(abs(e) / SCALE) if abs(e) > SCALE else abs(e), e) for e in errors]
        return np.concatenate([np.array(soft) / SCALE * np.sqrt(weights), (x - centre) / spread])

    first = np.clip(centre, low + 1e-6, high - 1e-6)
    found = least_squares(residuals, first, bounds=(low, high), max_nfev=25, x_scale=spread)
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
        print(f"  {name!s:90} n={len(errors):4d} median {statistics.median(sizes):6.1%} mean {statistics.mean(sizes):6.1%} "
              f"bias {statistics.mean(errors):+6.1%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = load(options.truth)
    by_key: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_key[key_of(row)].append(row)
    profiles = {}
    for key, members in by_key.items():
        if options.only and options.only not in key:
            continue
        profiles[key] = fit(key, members)
        print(key, len(members), {k: float(f"{v:.3g}") for k, v in profiles[key]._asdict().items()}, file=sys.stderr, flush=True)
        report(errors_by(members, lambda row: profiles[key_of(row)]), key)


if __name__ == "__main__":
    main()
