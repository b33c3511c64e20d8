"""Fit the efficiencies of `decide/estimate/data/local.json` on a folder of published measurements.

All efficiencies are fitted together. An efficiency is a base value times factors for the backend, the kind of memory
and the architecture, the kind of engine, the engine and its build. Each factor is expected to be 1 and moves only as
far as the rows support, so that an engine or a chip without measurements takes the values that similar ones share.

Needs numpy, which bedplate itself does not: `pip install numpy`. Prints the remaining error. With `--write`, stores the
fitted values and the cross-validated errors in the data file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bedplate.decide.estimate import local
from bedplate.decide.estimate.local import LocalEstimator, PassWork, Profile
from bedplate.published import one_stream
from bedplate.published.campaigns import KnownMeasurements, campaign
from bedplate.published.one_stream import StreamMetric
from bedplate.published.predict import is_under_load
from bedplate.published.rows import PredictionRefusal, PublishedCase, resolve

DATA = Path(local.__file__).parent / "data" / "local.json"
METRICS = {"decode_tok_s_single", "prefill_tok_s", "total_tok_s_incl_prompt", "output_tok_s_total"}
# Prior of each efficiency: its expected value and the factor by which it may plausibly differ.
PRIOR = {
    "slack": (0.18, 1.5), "kv_read": (0.6, 1.5), "unpack_16": (0.03, 2.0), "unpack_8": (0.04, 2.0),
    "unpack_4": (0.04, 2.0), "layer_s": (25e-6, 2.0), "kernel_s": (4e-6, 2.0), "packed_s": (15e-6, 2.0),
    "moe_s": (30e-6, 2.0),
    "state_s": (30e-6, 2.0), "step_s": (300e-6, 2.0), "launch_s": (750e-6, 1.3), "launch_8": (1.5, 1.5),
    "launch_8_packed": (1.2, 1.3), "launch_4": (1.0, 1.3), "read_8": (1.0, 1.3), "read_packed": (1.0, 1.3),
    "eager_s": (60e-6, 2.0), "pair": (10.0, 3.0), "gemm": (0.4, 1.6), "gemm_8": (0.9, 1.25), "gemm_16": (1.2, 1.3),
    "gemm_fp4": (1.3, 1.4), "gemm_moe": (0.15, 1.8), "moe_16": (1.0, 1.5), "moe_4": (1.5, 2.0), "tile": (24.0, 2.0),
    "attend": (0.3, 1.7), "activation": (1.0, 1.4), "column": (0.05, 2.0), "plain": (1.0, 1.5), "plain_kv": (1.3, 1.3),
    "device_s": (250e-6, 1.6), "reduce_s": (12e-6, 1.6), "gemm_k": (0.9, 1.3), "unpack_k": (1.2, 1.5),
    "library": (0.4, 1.6), "copy": (1.0, 1.3), "call_s": (10e-6, 1.6), "expert_tile": (24.0, 2.0),
    "moe_tile_s": (100e-6, 3.0), "state": (4.0, 2.5), "scan": (0.1, 3.0), "scores": (4.0, 1.5), "overlap": (0.9, 1.15),
    "overlap_staged": (0.7, 1.3),
}  # fmt: skip
CPU_PRIOR = PRIOR | {
    "slack": (0.3, 1.6), "kv_read": (0.3, 1.5), "unpack_16": (0.2, 2.0), "unpack_8": (0.12, 2.0),
    "unpack_4": (0.15, 2.0), "layer_s": (20e-6, 2.0), "tile": (4.0, 2.0), "gemm": (0.9, 1.6),
    "gemm_moe": (0.6, 1.8), "expert_tile": (4.0, 2.0), "attend": (0.15, 2.0), "pair": (3000.0, 3.0),
    "column": (0.5, 2.0), "activation": (1.0, 2.5),
}  # fmt: skip
# Priors for particular effects, as a factor on the base value.
EXPECTED = {
    "like eager": {"moe_s": 30.0},
    # 32-bit activations; each operation is a pass through memory.
    "like gguf": {"activation": 3.0},
    "like gguf/cpu": {"activation": 3.0},
    # Decode on an RX 9070 XT: 84 % of the speed of the same build with Vulkan (lmstudio-bug-tracker, issue 574). Fused
    # attention has no matrix instructions unless it was built with rocWMMA. rocBLAS has few kernels for graphics cards.
    "rocm": {"unpack_4": 1.5, "unpack_8": 1.3, "layer_s": 1.4, "moe_s": 1.5, "attend": 0.3, "plain": 0.3,
             "library": 0.4},
    "llama.cpp/rocm-lt": {"library": 3.0},
    "llama.cpp/rocm-wmma": {"attend": 3.0, "plain": 3.0},
    # Work groups start for all experts, and most find no token. The same shaders serve the matrix units of all vendors.
    "vulkan": {"moe_tile_s": 8.0, "gemm": 0.8, "gemm_moe": 0.8},
    # cuBLAS comes near the rate that the power limit allows.
    "cuda": {"library": 2.2},
    # Builds before CUDA graphs start each kernel from the host: 27, 25 and 13 microseconds more per layer of Llama 2 7B
    # on an H100 PCIe, an RTX 3090 and an RTX 4090 (ggml-org/llama.cpp, issue 6763 and pull request 6766), beside the 31
    # of current builds.
    "llama.cpp/cuda older": {"layer_s": 1.7},
    # Matrix libraries use tiles of at least 64 rows.
    "like serving": {"tile": 2.0},
    # PyTorch on a CPU: each of about twenty operators of a layer starts and joins threads, some 20 microseconds each.
    "like serving/cpu": {"layer_s": 20.0},
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
MOST_FOLDS = 12
"""Folds of a cross-validation; each leaves out whole chips, models, engines or campaigns."""
CV_ROUNDS = 5
"""Rounds for a fold, which starts from the fit on all rows."""
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
    campaign: str


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


def load_cases(folders: Sequence[Path], scored: int = 1) -> list[tuple[str, PublishedCase, float, bool, str]]:
    """Rows that this path predicts, without duplicates: source, case, measured value, whether scored, campaign."""
    found: list[tuple[str, PublishedCase, float, bool, str]] = []
    known = KnownMeasurements()
    for number, folder in enumerate(folders):
        for path in sorted(folder.glob("*.csv")) if folder.is_dir() else [folder]:
            with path.open(newline="") as file:
                for raw in csv.DictReader(file):
                    if raw.get("metric") not in METRICS:
                        continue
                    case = resolve(raw)
                    if isinstance(case, PredictionRefusal) or _left_out(path.stem, case):
                        continue
                    value = float(raw["value"])
                    if known.add(case, value):
                        found.append((path.stem, case, value, number < scored, campaign(raw)))
    return found


def load(folders: Sequence[Path], scored: int = 1) -> list[Row]:
    return make_rows(load_cases(folders, scored))


def make_rows(cases: list[tuple[str, PublishedCase, float, bool, str]]) -> list[Row]:
    """Rows with what each is asked; the rows of one group share the weight of one row."""
    sizes = Counter(_group(source, case) for source, case, *_ in cases)
    rows = []
    for source, case, truth, is_scored, series in cases:
        question = one_stream.make_case_estimator(case)
        asked = one_stream.find_metric(question, case)
        if not isinstance(asked, PredictionRefusal):
            weight = sizes[_group(source, case)] ** -0.6 * (1.0 if is_scored else MORE_WEIGHT)
            rows.append(Row(source, case, truth, question, asked, weight, is_scored, series))
    return rows


def _left_out(source: str, case: PublishedCase) -> bool:
    """Rows to skip: rows under load (another fit covers them), without lengths, or marked as odd in the notes."""
    if case.metric == "total_tok_s_incl_prompt" and case.prompt_tokens is None:
        return True
    if source == "llamacpp_xiongjiedai_gpus" and case.metric == "prefill_tok_s" and case.shape.bits > 12:
        chip, four = case.chip.name, case.devices == 4
        if "A100 SXM" in chip or "L40S" in chip or ("RTX 5000 Ada" in chip and four):
            return True
    return case.metric == "output_tok_s_total" and is_under_load(case)


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
    """In the order of their combinations of effects."""
    work: PassWork
    owner: Any
    times: Any
    floor: Any
    tokens: Any
    truth: Any
    weight: Any
    names: list[str]
    """All effects."""
    kind: Any
    """For each row, the number of its combination of effects."""
    first: Any
    """The first row of each combination."""
    has: Any
    """Which effects each combination has: combinations by effects, 1 or 0."""


def columns(unsorted: list[Row]) -> Columns:
    effects = {id(row): effects_of(row) for row in unsorted}
    combinations = {key: number for number, key in enumerate(dict.fromkeys(effects.values()))}
    rows = sorted(unsorted, key=lambda row: combinations[effects[id(row)]])
    kind = np.array([combinations[effects[id(row)]] for row in rows])
    names = sorted({name for key in combinations for name in key}, key=lambda name: (name not in ("gpu", "cpu"), name))
    has = np.zeros((len(combinations), len(names)))
    for key, number in combinations.items():
        has[number, [names.index(name) for name in key]] = 1.0
    parts = [(i, part) for i, row in enumerate(rows) for part in row.asked.parts]
    fields = np.array([part.work for _, part in parts], dtype=float).T
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
        kind=kind,
        first=np.searchsorted(kind, np.arange(len(combinations))),
        has=has,
    )


def log_predicted(table: Columns, logs: Any) -> Any:
    """Logarithms of the predictions, from those of each row's efficiencies."""
    return _log_values(table, Profile(*np.exp(logs).T[:, table.owner]))


def _log_values(table: Columns, profile: Profile) -> Any:
    seconds = np.maximum(local.forward(profile, table.work).total_s * table.times, table.floor)
    return np.log(table.tokens) - np.log(np.bincount(table.owner, seconds, minlength=len(table.rows)))


def compute_slopes(table: Columns, logs: Any, base: Any, used: Any) -> Any:
    """The change of each prediction's logarithm with the logarithm of each efficiency."""
    profile = Profile(*np.exp(logs).T[:, table.owner])
    slopes = np.zeros((len(table.rows), logs.shape[1]))
    for j, name in enumerate(Profile._fields):
        if used[j]:
            moved = profile._replace(**{name: getattr(profile, name) * math.exp(1e-4)})
            slopes[:, j] = (_log_values(table, moved) - base) / 1e-4
    return slopes


class Term(NamedTuple):
    """A mechanism of the model and what it is without it, for the table of terms."""

    name: str
    mechanism: str
    without: dict[str, float]
    """Efficiencies that are fixed at these values."""
    work: Mapping[str, float] = MappingProxyType({})
    """Columns of the work that are fixed at these values."""


TERMS = (
    Term("`library`, `copy`", "a library multiplies 16-bit copies of the weights (cuBLAS, rocBLAS, hipBLASLt)",
         {}, {"library": 0.0, "expert_library": 0.0, "copied_s": 0.0}),
    Term("`call_s`", "the host starts one library product for each expert", {"call_s": 1e-12}),
    Term("`moe_tile_s`", "most tiles that are started for experts are empty", {"moe_tile_s": 1e-12}),
    Term("`gemm_k`, `unpack_k`", "blocks of K-quants have two levels of scales", {"gemm_k": 1.0, "unpack_k": 1.0}),
    Term("`scores`", "attention that is not fused stores its scores", {"scores": 1e-9}),
    Term("`plain`, `plain_kv`", "attention that is not fused has other products", {"plain": 1.0, "plain_kv": 1.0}),
    Term("`overlap`, `overlap_staged`", "chunks of a prompt follow each other through a pipeline of GPUs",
         {"overlap": 1.0, "overlap_staged": 1.0}),
    Term("`state`, `scan`", "recurrent states pass through memory", {"state": 1e-9, "scan": 1e-9}),
    Term("`tile`, `expert_tile`", "a product of few rows costs as much as a tile", {"tile": 1e-3, "expert_tile": 1e-3}),
    Term("`column`", "each further vector costs a share of the first", {"column": 1e-9}),
    Term("`activation`", "activations pass through memory", {"activation": 1e-9}),
    Term("`launch_8`, `launch_8_packed`, `launch_4`", "quantized products take other kernels to launch",
         {"launch_8": 1.0, "launch_8_packed": 1.0, "launch_4": 1.0}),
    Term("`read_8`, `read_packed`", "tiles of quantized weights read slower", {"read_8": 1.0, "read_packed": 1.0}),
    Term("`unpack_16`, `unpack_8`, `unpack_4`", "dequantizing takes instructions",
         {"unpack_16": 1e-9, "unpack_8": 1e-9, "unpack_4": 1e-9}),
    Term("`pair`", "attention of one token takes instructions", {"pair": 1e-9}),
    Term("`layer_s`, `eager_s`", "starting the kernels of a layer", {"layer_s": 1e-12, "eager_s": 1e-12}),
    Term("`kernel_s`", "norms and scales that a Llama layer does not have are kernels, too", {"kernel_s": 1e-12}),
    Term("(none)", "only a prompt's last token passes layers that read an earlier layer's cache (mistral.rs)",
         {}, {"computed": 1.0}),
    Term("`moe_s`", "routing, and a kernel for each matrix of the experts", {"moe_s": 1e-12}),
    Term("`step_s`", "sampling, and the runtime between two steps", {"step_s": 1e-12}),
)  # fmt: skip
TERM_METRICS = {"decode_tok_s_single": "decode", "prefill_tok_s": "prefill", "output_tok_s_total": "batched decode"}
TERM_ROUNDS = 4


def print_terms(rows: list[Row], full: Any = None) -> None:
    """Print each term with its mechanism, its value on GPUs, and the errors of a fit of all others without it."""
    table = columns(rows)
    full = fit(table) if full is None else full
    base = full[table.names.index("gpu")]
    print(f"| term | mechanism | value on GPUs | {' | '.join(TERM_METRICS.values())} |")
    print("| --- | --- | --- |" + " ---: |" * len(TERM_METRICS))
    for term in (Term("all terms", "", {}), *TERMS):
        here = _fix_work(table, term)
        effects, _ = prior(table.names, term.without)
        free = [j for j, field in enumerate(Profile._fields) if field not in term.without]
        effects[:, free] = full[:, free]
        effects = fit(here, effects, TERM_ROUNDS, term.without)
        values = np.exp(log_predicted(here, spread_out(here, effects)))
        errors = [
            statistics.median(
                abs(value / row.truth - 1)
                for row, value in zip(table.rows, values, strict=True)
                if row.scored and row.case.metric == metric
            )
            for metric in TERM_METRICS
        ]
        fields = re.findall(r"`(\w+)`", term.name)
        shown = ", ".join(f"{math.exp(base[Profile._fields.index(field)]):.2g}" for field in fields)
        cells = " | ".join(f"{error:.1%}" for error in errors)
        print(f"| {term.name} | {term.mechanism} | {shown} | {cells} |", flush=True)


def _fix_work(table: Columns, term: Term) -> Columns:
    fixed: dict[str, Any] = {name: np.full_like(table.owner, value, dtype=float) for name, value in term.work.items()}
    return table._replace(work=table.work._replace(**fixed))


def prior(names: list[str], fixed: Mapping[str, float] = MappingProxyType({})) -> tuple[Any, Any]:
    """Prior mean and width of each effect on each efficiency; zero width where it does not apply or is fixed."""
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
            if field in fixed:
                centre[i, j] = math.log(fixed[field]) if name in ("gpu", "cpu") else 0.0
                continue
            limited = OF_CHIPS if name.startswith("chip ") else OF_MEMORY if name.startswith("memory ") else fields
            if field in limited:
                spread[i, j] = spread_of(name) * math.log(table[field][1])
    return centre, spread


def spread_out(table: Columns, effects: Any) -> Any:
    """The sum of each row's effects."""
    return (table.has @ effects)[table.kind]


def gather(table: Columns, by_row: Any) -> Any:
    """The sum over the rows of each effect; the transpose of `spread_out`."""
    return table.has.T @ np.add.reduceat(by_row, table.first, axis=0)


def softened(errors: Any) -> Any:
    """Softened residuals in standard deviations, so that an outlier such as a throttled card has limited influence."""
    sizes = abs(errors) / SCALE
    return np.sign(errors) * np.where(sizes > 1, 1 + np.log(np.maximum(sizes, 1)), sizes)


def fit(
    table: Columns, start: Any = None, rounds: int = ROUNDS, fixed: Mapping[str, float] = MappingProxyType({})
) -> Any:
    """Maximum a posteriori estimate of the effects by damped Gauss-Newton."""
    centre, spread = prior(table.names, fixed)
    has_say = spread > 0
    inverse = np.where(has_say, 1 / np.where(has_say, spread, 1) ** 2, 0)
    effects = centre.copy() if start is None else start.copy()
    used = np.ones(effects.shape[1], dtype=bool)

    def cost(candidate: Any) -> tuple[float, Any]:
        errors = log_predicted(table, spread_out(table, candidate)) - np.log(table.truth)
        return float((table.weight * softened(errors) ** 2).sum() + ((candidate - centre) ** 2 * inverse).sum()), errors

    now, errors = cost(effects)
    damping = 1e-3
    for _ in range(rounds):
        slopes = compute_slopes(table, spread_out(table, effects), errors + np.log(table.truth), used)
        used = (abs(slopes) > 1e-7).any(axis=0)
        # Weights for which weighted squares have the same gradient as the squares of the softened residuals.
        sizes = np.maximum(abs(errors), 1e-9)
        weight = table.weight * softened(sizes) / sizes / np.maximum(sizes, SCALE)
        slope = gather(table, slopes * (weight * errors)[:, None]) + (effects - centre) * inverse
        diagonal = gather(table, slopes**2 * weight[:, None]) + inverse
        for _ in range(14):
            step = solve(table, slopes, weight, inverse, diagonal, damping, np.where(has_say, -slope, 0.0))
            candidate = effects + np.clip(step, -1.5, 1.5)
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


def solve(
    table: Columns, slopes: Any, weight: Any, inverse: Any, diagonal: Any, damping: float, target: Any, most: int = 60
) -> Any:
    """The damped Gauss-Newton step by conjugate gradients: the matrix of all effects is never built."""
    scale = diagonal * (1 + damping)
    scale = np.where(scale > 1e-12, scale, 1.0)
    step, rest = np.zeros_like(target), target.copy()
    towards = rest / scale
    ahead = towards.copy()
    size = first = float((rest * towards).sum())
    for _ in range(most):
        moved = (slopes * spread_out(table, ahead)).sum(axis=1)
        product = gather(table, slopes * (weight * moved)[:, None]) + ahead * (inverse + damping * diagonal)
        product = np.where(inverse > 0, product, 0.0)
        length = size / max(float((ahead * product).sum()), 1e-300)
        step += length * ahead
        rest -= length * product
        towards = rest / scale
        size, before = float((rest * towards).sum()), size
        if size < 1e-6 * first:
            break
        ahead = towards + size / before * ahead
    return step


def predicted(table: Columns, names: list[str], effects: Any, fixed: Mapping[str, float] = MappingProxyType({})) -> Any:
    """Efficiencies of rows by their effects; unknown effects change nothing."""
    known = {name: effects[i] for i, name in enumerate(names)}
    here, _ = prior(table.names)
    own = np.array([known.get(name, here[i]) for i, name in enumerate(table.names)])
    return np.exp(log_predicted(table, spread_out(table, own)))


def errors_of(rows: list[Row], names: list[str], effects: Any) -> list[tuple[Row, float]]:
    table = columns(rows)
    values = predicted(table, names, effects)
    return [(row, float(value) / row.truth - 1) for row, value in zip(table.rows, values, strict=True)]


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
    "campaign": lambda row: row.campaign,
}


def make_folds(rows: list[Row], group_of: Callable[[Row], str], most: int = MOST_FOLDS) -> list[set[str]]:
    """Whole groups in at most so many folds with about the same number of rows."""
    sizes = Counter(group_of(row) for row in rows)
    groups = sorted({group_of(row) for row in rows if row.scored}, key=lambda group: (-sizes[group], group))
    folds: list[set[str]] = [set() for _ in range(min(most, len(groups)))]
    for group in groups:
        min(folds, key=lambda fold: sum(sizes[one] for one in fold)).add(group)
    return folds


def cross_validated(rows: list[Row], names: list[str], full: Any, split: str) -> list[tuple[Row, float]]:
    """Predictions of each group from a fit on the groups of other folds."""
    group_of = SPLITS[split]
    counts = Counter(name for row in rows for name in effects_of(row))
    found = []
    for fold in make_folds(rows, group_of):
        left_out = [row for row in rows if group_of(row) in fold and row.scored]
        table = columns([row for row in rows if group_of(row) not in fold])
        # Start from the fit on all rows, which is near; effects without rows of their own return to their prior.
        start, _ = prior(table.names)
        still = Counter(name for row in table.rows for name in effects_of(row))
        for i, name in enumerate(table.names):
            if still[name] > 0.7 * counts[name]:
                start[i] = full[names.index(name)]
        effects = fit(table, start, CV_ROUNDS)
        found += errors_of(left_out, table.names, effects)
        middle = statistics.median(abs(error) for _, error in found[-len(left_out) :])
        print(f"  {split} {', '.join(sorted(fold))[:80]}: {middle:.1%} of {len(left_out)}", file=sys.stderr, flush=True)
    return found


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
    parser.add_argument("--terms", action="store_true", help="print the table of terms of docs/estimates.md and stop")
    parser.add_argument("--splits", nargs="*", default=list(SPLITS))
    options = parser.parse_args()
    rows = load([options.truth, *options.more])
    if options.terms:
        print_terms(rows)
        return
    table = columns(rows)
    full = fit(table)
    report(errors_of(rows, table.names, full), "fitted on all rows")
    validation: list[dict[str, Any]] = []
    if not options.no_validation:
        for split in options.splits:
            found = cross_validated(rows, table.names, full, split)
            report(found, f"left out by {split}")
            validation += summary(found, split)
        for line in validation:
            print(line)
    if options.write:
        write(rows, table.names, full, validation)


def write(rows: list[Row], names: list[str], effects: Any, validation: list[dict[str, Any]]) -> None:
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
                "cross_validation": validation,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
