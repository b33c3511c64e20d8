"""Fit the efficiencies of `bedplate.decide.estimate.batching` on published measurements, and cross-validate them.

    python benchmarks/score/fit_serving.py [--write] [--cross-validate [chip] [model] [engine] [campaign]] [--ablate]

Reads the tables of ../shared/truth and the first-party rows of benchmarks/score/first_party. Needs numpy, which
bedplate itself does not. Rows of one configuration that differ only in the metric share one computation, and a
measurement that several tables have counts once. Cross-validation leaves out whole groups: every chip, every model,
every engine and every campaign in turn. `--ablate` repeats the fit without each term of `TERMS` and prints a table of
the errors.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bedplate.decide.estimate.arrivals import ArrivalTerms
from bedplate.decide.estimate.batching import Efficiencies, RankWork, Waits, classify_weights
from bedplate.decide.estimate.serving import ServingLoad, compute_times
from bedplate.published.campaigns import KnownMeasurements, campaign
from bedplate.published.rows import PredictionRefusal, PublishedCase, resolve
from bedplate.published.under_load import find_load

ROOT = Path(__file__).resolve().parents[2]
TRUTH = ROOT.parent / "shared" / "truth"
DATA = ROOT / "src" / "bedplate" / "decide" / "estimate" / "data" / "serving.json"
SOURCES = (
    "aiconfigurator_silicon_e2e", "inferencex_repo_results", "trtllm_perf_overview", "mlperf_v5_1_llm", "lmdeploy_a100",
)  # fmt: skip
FIRST_PARTY = sorted((Path(__file__).resolve().parent / "first_party").glob("*.csv"))
METRICS = ("ttft_ms", "tpot_ms", "output_tok_s_total")
ARCHITECTURES = (
    "deepseek", "gpt-oss", "minimax", "qwen3.5", "qwen3-235b", "qwen3-30b", "kimi", "glm", "405b", "mixtral-8x22b",
    "mixtral", "mistral", "scout", "maverick", "70b", "20b", "13b", "8b", "7b",
)  # fmt: skip
AXES = ("engine", "family", "weights", "pair")
Array = Any
"""A numpy array; numpy may have no type stubs."""


class Parameter(NamedTuple):
    scale: str
    """share: between 0 and 1, on a logistic scale; positive: on a logarithmic scale."""
    start: float
    axes: str = ""
    """Groups that may adjust it: e(ngine), f(amily of chips), w(eight type), p(air of engine and family)."""
    tight: float = 1.0
    """Regularization of its adjustments towards zero."""
    firm: float = 1.0
    """Regularization towards its start value, for effects that hardly more than one engine shows."""


PARAMETERS = {
    "dense_read": Parameter("share", 0.9, "ef"),
    "expert_read": Parameter("share", 0.8, "f"),
    "unpacking": Parameter("positive", 0.3),
    "unpacking_layer_s": Parameter("positive", 1e-5),
    "cache_read": Parameter("share", 0.7, "ef"),
    "matrix": Parameter("share", 0.5, "efwp"),
    "expert_matrix": Parameter("share", 0.2, "efp"),
    "attention": Parameter("share", 0.4, "e"),
    "activations": Parameter("positive", 20.0, "e"),
    "expert_activations": Parameter("positive", 5.0, "e"),
    "latent_attention": Parameter("share", 0.4, firm=0.3),
    "imbalance": Parameter("positive", 0.2, firm=0.3),
    "routing_spread": Parameter("share", 0.8),
    "layer_s": Parameter("positive", 5e-5, "ef"),
    "expert_layer_s": Parameter("positive", 2e-5, "ef"),
    "latent_layer_s": Parameter("positive", 1e-5, "ef"),
    "state_layer_s": Parameter("positive", 40e-6),
    "sparse_layer_s": Parameter("positive", 8e-5),
    "quantizing_s": Parameter("positive", 1e-5),
    "pass_s": Parameter("positive", 1e-4, "e"),
    "sequence_s": Parameter("positive", 5e-6, "e"),
    "forward_s": Parameter("positive", 2e-5, "e", 0.3, 0.3),
    "reduce_latency_s": Parameter("positive", 5e-6, "ef"),
    "reduce_rate": Parameter("share", 0.3, "ef"),
    "reduce_rate_prompt": Parameter("share", 0.4, "ef", 0.6),
    "exchange_latency_s": Parameter("positive", 5e-6, "e"),
    "exchange_rate": Parameter("share", 0.2, "e"),
    "exchange_rate_prompt": Parameter("share", 0.4),
    "prompt_share": Parameter("positive", 0.8, "e"),
    "request_s": Parameter("positive", 10e-3, "e", 1.0, 0.3),
    # Start values have one digit: the order of magnitude of the time of a kernel, a message or a layer.
    "first_layer_s": Parameter("positive", 1e-4),
    "first_expert_layer_s": Parameter("positive", 5e-4),
    "fused": Parameter("share", 0.5),
    "first_latent_layer_s": Parameter("positive", 5e-4),
    "first_state_layer_s": Parameter("positive", 2e-3),
    "host": Parameter("positive", 1.0, "ep", firm=0.2),
    "eager_layer_s": Parameter("positive", 5e-4, firm=0.3),
    "host_shared": Parameter("positive", 0.8, "e", 0.5, 0.3),
    "steps_waited": Parameter("positive", 2.0, "e"),
    "polled": Parameter("positive", 0.5),
    "gathered": Parameter("positive", 1.0),
    "balanced": Parameter("positive", 0.5),
    "queue": Parameter("positive", 0.05, firm=0.3),
    "burst": Parameter("positive", 1.0, "e", 0.3),
    "synchronized": Parameter("share", 0.8, "e", 0.3),
    "scatter": Parameter("positive", 1.0),
    "jitter": Parameter("positive", 0.02),
    "lag": Parameter("positive", 1.0),
    "cache_held": Parameter("positive", 1.0, "e"),
    "saturation": Parameter("positive", 1.0, "e", 0.3, 8.0),
    "unevenness": Parameter("positive", 0.2),
    "wave_slower": Parameter("positive", 2.0, "e", 0.1),
    "wave_token": Parameter("positive", 1.5, "e", 0.1),
    "guess": Parameter("positive", 0.45),
    "accepted": Parameter("share", 0.85),
    "apart_token": Parameter("positive", 1.0, "e", 1.0, 8.0),
    "apart_streams": Parameter("positive", 10.0, "", 1.0, 0.4),
    "apart_growth": Parameter("positive", 0.5, "e", 0.2, 0.4),
    "apart_first_s": Parameter("positive", 0.05, "e", 0.2, 0.4),
    "apart_burst": Parameter("positive", 3.0),
    "apart_saturated": Parameter("positive", 0.5),
    "apart_sized": Parameter("positive", 1.0, "", 1.0, 0.4),
    "apart_far_s": Parameter("positive", 2e-5),
    "apart_uneven": Parameter("positive", 0.3),
    "apart_scattered": Parameter("positive", 1.0, "", 1.0, 0.4),
    "tuned": Parameter("positive", 1.2, "e", 0.4, 4.0),
    "tuned_server": Parameter("positive", 0.9),
    "tuned_interactive": Parameter("positive", 0.6),
}
NAMES = list(Efficiencies._fields)
APART = [name for name in NAMES if name.startswith("apart_")]
# Rows of a kind that says little about chips and models count less; spreads are those of a good fit.
SPREAD = {"ttft_ms": 0.2, "tpot_ms": 0.12, "output_tok_s_total": 0.15}
WEIGHT = {"ttft_ms": 0.6, "tpot_ms": 1.0, "output_tok_s_total": 0.8}
WAY_WEIGHT = {"offline": 0.6, "server": 0.6, "interactive": 0.4, "wave": 0.5, "apart": 0.7}
BASE_TIGHT = MOVE_TIGHT = PAIR_TIGHT = 2.0
SMALL = 40
FAR = 1.5


class Row(NamedTuple):
    source: str
    metric: str
    value: float
    engine: str
    family: str
    weights: str
    chip: str
    model: str
    campaign: str
    way: str
    replicas: float
    trust: float
    loads: tuple[tuple[float, ServingLoad], ...]
    """The load with the settings that the row does not state, with probabilities."""

    @property
    def pair(self) -> str:
        return f"{self.engine} on {self.family}"


def read(sources: tuple[str, ...] = SOURCES) -> tuple[list[Row], list[tuple[str, str, str]]]:
    rows: list[Row] = []
    refused: list[tuple[str, str, str]] = []
    known = KnownMeasurements()
    for path in (*(TRUTH / f"{source}.csv" for source in sources), *FIRST_PARTY):
        with path.open(newline="") as file:
            for record in csv.DictReader(file):
                if record["metric"] not in METRICS:
                    continue
                case = resolve(record)
                if not isinstance(case, PredictionRefusal) and not known.add(case, float(record["value"])):
                    continue
                found = case if isinstance(case, PredictionRefusal) else find_load(case)
                if isinstance(found, PredictionRefusal):
                    refused.append((path.stem, record["metric"], found.why))
                    continue
                assert not isinstance(case, PredictionRefusal)
                rows.append(
                    Row(
                        path.stem,
                        record["metric"],
                        float(record["value"]),
                        case.engine,
                        found.machine.family,
                        classify_weights(case.shape),
                        case.chip.name,
                        architecture(case.texts["model"]),
                        campaign(record),
                        found.question.way,
                        found.layout.replicas,
                        trust(case),
                        found.alternatives,
                    )
                )
    return rows, refused


def trust(case: PublishedCase) -> float:
    """Lower weight for a campaign whose TTFT falls as concurrency rises: it timed something else."""
    odd = case.engine == "tensorrt-llm" and case.metric == "ttft_ms" and re.search(r"attn_dp( |$)", case.parallelism)
    return 0.15 if odd else 1.0


def architecture(name: str) -> str:
    """Family and size of a model, whatever its name and weight format."""
    lowered = name.lower().replace("_", ".").replace(" ", "-")
    for word in ARCHITECTURES:
        if word in lowered:
            return word
    return lowered


class Traced:
    """A column that records its inputs; one reverse pass gives the gradient for all of them.

    Rows are independent, so the gradients of all rows are computed at once.
    """

    __slots__ = ("parts", "slope", "value")
    __array_ufunc__ = None
    """Makes numpy defer arithmetic with its arrays to this class."""
    made: ClassVar[list[Traced]] = []

    def __init__(self, value: Array, *parts: tuple[Any, Array]) -> None:
        self.value = value
        self.parts = [(part, slope) for part, slope in parts if isinstance(part, Traced)]
        self.slope: Array = None
        Traced.made.append(self)

    def slopes(self) -> None:
        """Store the gradient of this column in `slope` of each of its inputs."""
        for one in Traced.made:
            one.slope = None
        self.slope = np.ones_like(self.value)
        for one in reversed(Traced.made):
            if one.slope is not None:
                for part, slope in one.parts:
                    part.slope = one.slope * slope if part.slope is None else part.slope + one.slope * slope

    def __add__(self, other: Any) -> Traced:
        return Traced(self.value + _plain(other), (self, 1.0), (other, 1.0))

    __radd__ = __add__

    def __neg__(self) -> Traced:
        return Traced(-self.value, (self, -1.0))

    def __sub__(self, other: Any) -> Traced:
        return Traced(self.value - _plain(other), (self, 1.0), (other, -1.0))

    def __rsub__(self, other: Any) -> Traced:
        return Traced(other - self.value, (self, -1.0))

    def __mul__(self, other: Any) -> Traced:
        return Traced(self.value * _plain(other), (self, _plain(other)), (other, self.value))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Traced:
        below = _plain(other)
        value = self.value / below
        return Traced(value, (self, 1.0 / below), (other, -value / below))

    def __rtruediv__(self, other: Any) -> Traced:
        value = other / self.value
        return Traced(value, (self, -value / self.value))

    def __pow__(self, power: Any) -> Traced:
        up = _plain(power)
        value = self.value**up
        below = np.maximum(self.value, 1e-300)
        return Traced(value, (self, up * below ** (up - 1.0)), (power, value * np.log(below)))

    def __rpow__(self, base: Any) -> Traced:
        value = base**self.value
        return Traced(value, (self, value * np.log(np.maximum(base, 1e-300))))

    def __abs__(self) -> Traced:
        return Traced(np.abs(self.value), (self, np.sign(self.value)))


def _plain(column: Any) -> Any:
    return column.value if isinstance(column, Traced) else column


class Columns:
    """Rows of one serving layout as columns."""

    def __init__(self, rows: list[Row], index: Array) -> None:
        self.index = index
        chosen = [rows[i] for i in index]
        # Metrics of one configuration are computed once; a row has one load for each setting that it does not state.
        places: dict[Any, int] = {}
        of, place, share, first = [], [], [], []
        for number, row in enumerate(chosen):
            for weight, load in row.loads:
                key = (row.engine, row.family, row.weights, load)
                if key not in places:
                    places[key] = len(places)
                    first.append(index[number])
                of.append(number)
                place.append(places[key])
                share.append(weight)
        self.of, self.place, self.share = np.array(of), np.array(place), np.array(share)
        self.unique = np.array(first)
        self.metric = np.array([METRICS.index(row.metric) for row in chosen])
        self.value = np.array([row.value for row in chosen])
        self.replicas = np.array([row.replicas for row in chosen])
        questions = [key[-1] for key in places]
        plain = {name: np.array([float(getattr(q, name)) for q in questions]) for name in QUESTION_COLUMNS}
        self.question = ServingLoad(
            way=questions[0].way,
            work=_columns([q.work for q in questions]),
            spread=_columns([q.spread for q in questions]),
            prompts=_columns([q.prompts for q in questions]),
            waits=Waits(*(np.array(column, dtype=float) for column in zip(*(q.waits for q in questions), strict=True))),
            arrival=ArrivalTerms(
                *(np.array(column, dtype=float) for column in zip(*(q.arrival for q in questions), strict=True))
            ),
            **plain,
        )
        self.scale = np.array([SPREAD[METRICS[m]] for m in self.metric])
        weight = np.array([WEIGHT[METRICS[m]] for m in self.metric]) * WAY_WEIGHT.get(questions[0].way, 1.0)
        self.weight = weight * np.array([row.trust for row in chosen])

    def chosen(self, inside: Array) -> Columns:
        """The rows for which `inside` is true."""
        kept = inside[self.index]
        part = copy(self)
        loads = kept[self.of]
        places, part.place = np.unique(self.place[loads], return_inverse=True)
        part.of, part.share = (np.cumsum(kept) - 1)[self.of[loads]], self.share[loads]
        part.index, part.unique = self.index[kept], self.unique[places]
        for name in ("metric", "value", "replicas", "scale", "weight"):
            setattr(part, name, getattr(self, name)[kept])
        q = self.question
        part.question = q._replace(
            work=RankWork(*(column[places] for column in q.work)),
            spread=RankWork(*(column[places] for column in q.spread)),
            prompts=RankWork(*(column[places] for column in q.prompts)),
            waits=Waits(*(column[places] for column in q.waits)),
            arrival=ArrivalTerms(*(column[places] for column in q.arrival)),
            **{name: getattr(q, name)[places] for name in QUESTION_COLUMNS},
        )
        return part

    def figures(self, e: Any) -> tuple[Any, Any, Any]:
        """In the order of `METRICS`, without factors that do not depend on a parameter."""
        got = compute_times(self.question, e)
        return got.first_s, got.token_s, got.tok_s

    def averaged(self, by_load: Array) -> Array:
        """The mean over the loads of each row; `by_load` has one entry, or row of entries, for each load of a row."""
        shares = self.share.reshape(-1, *(1,) * (by_load.ndim - 1))
        if len(self.of) == len(self.index):
            return by_load
        found = np.zeros((len(self.index), *by_load.shape[1:]))
        np.add.at(found, self.of, by_load * shares)
        return found

    def logs(self, figures: tuple[Any, Any, Any]) -> Array:
        """Logarithm of predicted over measured values."""
        one = np.ones(len(self.unique))
        found = np.log(np.stack([_plain(figure) * one for figure in figures]))[self.metric[self.of], self.place]
        units = np.where(self.metric == METRICS.index("output_tok_s_total"), self.replicas, 1e3)
        return self.averaged(found) + np.log(units / self.value)


QUESTION_COLUMNS = ("streams", "slots", "complete", "ranks", "prefills", "decodes", "dealt", "guessing", "eager")


def _columns(works: list[RankWork]) -> RankWork:
    columns: list[Array] = [np.array(column, dtype=float) for column in zip(*works, strict=True)]
    return RankWork(*columns)


class Fit:
    def __init__(self, rows: list[Row], absent: dict[str, float] | None = None) -> None:
        self.rows = rows
        self.absent = absent or {}
        """Parameters that are fixed at a value without effect, to see what the others do without them."""
        self.keys = {axis: sorted({getattr(row, axis) for row in rows}) for axis in AXES}
        self.level = {axis: np.array([self.keys[axis].index(getattr(row, axis)) for row in rows]) for axis in AXES}
        self.slots: dict[tuple[str, str], slice] = {}
        at = len(NAMES)
        for name in NAMES:
            for axis in AXES:
                if axis[0] in PARAMETERS[name].axes:
                    self.slots[name, axis] = slice(at, at + len(self.keys[axis]))
                    at += len(self.keys[axis])
        self.size = at
        self.tight = np.full(at, BASE_TIGHT)
        self.tight[: len(NAMES)] *= [PARAMETERS[name].firm for name in NAMES]
        for (name, axis), place in self.slots.items():
            self.tight[place] = PAIR_TIGHT if axis == "pair" else MOVE_TIGHT * PARAMETERS[name].tight
        self.ways = np.array([row.way for row in rows])
        self.all = {way: Columns(rows, np.flatnonzero(self.ways == way)) for way in sorted(set(self.ways))}
        cells: dict[Any, int] = {}
        self.cell = np.array([cells.setdefault((row.engine, row.family, row.weights), len(cells)) for row in rows])
        self.places = [self._places(np.flatnonzero(self.cell == cell)[0]) for cell in range(len(cells))]

    def _places(self, row: int) -> tuple[Array, Array]:
        """The numbers that determine the parameters of such a row: index of each, and the parameter it changes."""
        numbers, names = list(range(len(NAMES))), list(range(len(NAMES)))
        for (name, axis), place in self.slots.items():
            numbers.append(place.start + int(self.level[axis][row]))
            names.append(NAMES.index(name))
        return np.array(numbers), np.array(names)

    def columns(self, index: Array) -> list[Columns]:
        inside = np.zeros(len(self.rows), dtype=bool)
        inside[index] = True
        return [self.all[way].chosen(inside) for way in sorted(set(self.ways[index]))]

    def moved(self, x: Array, index: Array) -> Array:
        """Value of each parameter (rows) for each table row (columns), on its scale."""
        moved = np.repeat(x[: len(NAMES), None], len(index), axis=1)
        for (name, axis), place in self.slots.items():
            moved[NAMES.index(name)] += x[place][self.level[axis][index]]
        return moved

    def efficiencies(self, moved: Array) -> list[Array]:
        values = []
        for name, z in zip(NAMES, moved, strict=True):
            scale, start, *_ = PARAMETERS[name]
            if name in self.absent:
                values.append(np.full_like(z, self.absent[name]))
                continue
            values.append(1 / (1 + (1 / start - 1) * np.exp(-z)) if scale == "share" else start * np.exp(z))
        return values

    def run(self, index: Array, free: list[str] | None = None, start: Array | None = None, steps: int = 20) -> Array:
        """Least squares by Levenberg-Marquardt: thousands of rows, hundreds of numbers."""
        blocks = self.columns(index)
        x = np.zeros(self.size) if start is None else start.copy()
        active = np.zeros(self.size, dtype=bool)
        for name in NAMES if free is None else free:
            active[NAMES.index(name)] = True
            for axis in AXES:
                if (name, axis) in self.slots:
                    active[self.slots[name, axis]] = True
        damping = 1e-2
        cost, gradient, curvature = self.sloped(blocks, x, active)
        for _ in range(steps):
            before = cost
            for _ in range(6):
                step = np.zeros(self.size)
                step[active] = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
                there = x + np.clip(step, -1.0, 1.0)
                cost = self.cost(blocks, there, active)
                if cost < before:
                    x, damping = there, damping / 4
                    break
                damping *= 5
            else:
                break
            if before - cost < 1e-4 * before:
                break
            cost, gradient, curvature = self.sloped(blocks, x, active)
        return x

    def cost(self, blocks: list[Columns], x: Array, active: Array) -> float:
        total = float(np.sum((x * self.tight)[active] ** 2))
        for block in blocks:
            e = Efficiencies(*self.efficiencies(self.moved(x, block.unique)))
            total += float(np.sum(_robust(block.logs(block.figures(e)), block) ** 2))
        return total

    def sloped(self, blocks: list[Columns], x: Array, active: Array) -> tuple[float, Array, Array]:
        """Half the gradient of the sum of squares for every fitted number, and its curvature."""
        total = float(np.sum((x * self.tight)[active] ** 2))
        gradient, curvature = x * self.tight**2, np.diag(self.tight**2)
        for block in blocks:
            Traced.made.clear()
            values = self.efficiencies(self.moved(x, block.unique))
            e: list[Any] = [Traced(value) for value in values]
            figures = block.figures(Efficiencies(*e))
            logs = block.logs(figures)
            by = np.zeros((len(METRICS), len(NAMES), len(block.unique)))
            for metric in set(block.metric):
                figures[metric].slopes()
                for i, (name, value) in enumerate(zip(NAMES, values, strict=True)):
                    if e[i].slope is not None:
                        grown = value * (1 - value) if PARAMETERS[name].scale == "share" else value
                        by[metric, i] = e[i].slope * grown / figures[metric].value
            residual = _robust(logs, block)
            total += float(residual @ residual)
            slopes = block.averaged(by[block.metric[block.of], :, block.place]) * _robust_slope(logs, block)[:, None]
            cells = self.cell[block.index]
            for cell in set(cells):
                inside = slopes[cells == cell]
                numbers, names = self.places[cell]
                curvature[np.ix_(numbers, numbers)] += (inside.T @ inside)[np.ix_(names, names)]
                gradient[numbers] += (inside.T @ residual[cells == cell])[names]
        Traced.made.clear()
        return total, gradient[active], curvature[np.ix_(active, active)]

    def fitted(self, index: Array, steps: int = 20, start: Array | None = None) -> Array:
        """Fit aggregated workers first, then the remaining parameters of disaggregated workers."""
        ways = self.ways[index]
        free = [name for name in NAMES if name not in APART and name not in self.absent]
        x = self.run(index[ways != "apart"], free, start, steps=steps)
        apart = [name for name in APART if name not in self.absent]
        return self.run(index[ways == "apart"], apart, x, steps=steps) if (ways == "apart").any() else x

    def logs(self, x: Array, index: Array) -> Array:
        out = np.zeros(len(self.rows))
        for block in self.columns(index):
            e = Efficiencies(*self.efficiencies(self.moved(x, block.unique)))
            out[block.index] = block.logs(block.figures(e))
        return out[index]

    def table(self, x: Array) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for i, name in enumerate(NAMES):
            scale, start, *_ = PARAMETERS[name]
            base = float(1 / (1 + (1 / start - 1) * np.exp(-x[i])) if scale == "share" else start * np.exp(x[i]))
            entry: dict[str, Any] = {"scale": scale, "base": _short(base)}
            for axis in AXES:
                if (name, axis) in self.slots:
                    moves = {
                        key: round(float(move), 3)
                        for key, move in zip(self.keys[axis], x[self.slots[name, axis]], strict=True)
                    }
                    entry[axis] = {key: move for key, move in moves.items() if abs(move) >= 0.005}
            entries[name] = entry
        return entries


def _off(logs: Array) -> Array:
    """Error as a share of the measured value, as reported; linear from a few times that value on."""
    near = np.minimum(logs, FAR)
    return np.expm1(near) + np.exp(near) * (logs - near)


def _robust(logs: Array, block: Columns) -> Array:
    """Outliers count by their logarithm only."""
    off = _off(logs)
    return np.sign(off) * block.scale * np.sqrt(np.log1p((off / block.scale) ** 2)) * block.weight


def _robust_slope(logs: Array, block: Columns) -> Array:
    far = np.maximum(np.abs(_off(logs) / block.scale), 1e-9)
    grown = np.exp(np.minimum(logs, FAR))
    return far / (1 + far**2) / np.sqrt(np.log1p(far**2)) * block.weight * grown


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def summary(rows: list[Row], logs: Array, index: Array, by: str) -> list[tuple[str, str, int, float, float]]:
    found = []
    names = np.array([getattr(rows[i], by) for i in index])
    metrics = np.array([rows[i].metric for i in index])
    for name in sorted(set(names)):
        for metric in METRICS:
            chosen = logs[(names == name) & (metrics == metric)]
            if len(chosen):
                found.append(
                    (name, metric, len(chosen), float(np.median(np.abs(np.expm1(chosen)))), float(np.median(chosen)))
                )
    return found


def show(title: str, lines: list[tuple[str, str, int, float, float]]) -> None:
    sys.stdout.write(f"{title}\n")
    for name, metric, count, median, bias in lines:
        sys.stdout.write(f"  {name:34s} {metric:20s} {count:5d}  median {median:6.1%}  bias {bias:+.2f}\n")
    sys.stdout.flush()


SPLITS = ("chip", "model", "engine", "campaign")


def cross_validated(fit: Fit, start: Array, splits: tuple[str, ...] = SPLITS, steps: int = 6) -> dict[str, Array]:
    """For each split, the logarithm of predicted over measured for every row, fitted without the row's group.

    Each fit starts from that of all rows, which is near: a few steps suffice.
    """
    everything = np.arange(len(fit.rows))
    found = {}
    for split in splits:
        names = np.array([getattr(row, split) for row in fit.rows])
        logs = np.zeros(len(fit.rows))
        counts = {name: int((names == name).sum()) for name in set(names)}
        groups = [{name} for name, count in sorted(counts.items()) if count >= SMALL]
        # Small groups are left out together: a fit for each would take long and show no more.
        groups.append({name for name, count in counts.items() if count < SMALL})
        for group in groups:
            inside = np.isin(names, list(group))
            if not inside.any():
                continue
            out = everything[inside]
            x = fit.fitted(everything[~inside], steps, start)
            logs[out] = fit.logs(x, out)
        found[split] = logs
    return found


class Term(NamedTuple):
    mechanism: str
    absent: dict[str, float]
    """The parameters of the term, each at the value at which it has no effect."""
    waits: Mapping[str, float] = MappingProxyType({})
    """The scheduler settings of disaggregated workers without the term."""

    def remove_from(self, row: Row) -> Row:
        if row.way != "apart" or not self.waits:
            return row
        loads = ((share, load._replace(waits=load.waits._replace(**self.waits))) for share, load in row.loads)
        return row._replace(loads=tuple(loads))


TERMS = (
    Term("a closed loop's requests arrive in a burst", {"burst": 0.0}),
    Term("similar requests stay together after the first round", {"synchronized": 0.0}),
    Term("first tokens of a burst are sent a pass later", {"lag": 0.0}),
    Term("another process sends the tokens", {"forward_s": 0.0}),
    Term("the busiest expert rank computes more than the mean", {"imbalance": 0.0}),
    Term("the host launches the layers of a first pass", {"host": 0.0}),
    Term("hidden states pass through memory", {"activations": 0.0, "expert_activations": 0.0}),
    Term("4-bit weights are dequantized", {"unpacking": 0.0, "unpacking_layer_s": 0.0}),
    Term("inputs are quantized", {"quantizing_s": 0.0}),
    Term("all-reduces and exchanges take time per message", {"reduce_latency_s": 0.0, "exchange_latency_s": 0.0}),
    Term("sequences are divided unevenly over attention groups", {"unevenness": 0.0}),
    Term("schedulers poll, collect and balance", {"polled": 0.0, "gathered": 0.0, "balanced": 0.0}),
    Term("messages between nodes take longer", {"apart_far_s": 0.0}),
    Term("requests are divided unevenly over decode workers", {"apart_uneven": 0.0}),
    Term("a prefill pass lasts as long as that of its fullest group", {"apart_scattered": 0.0}),
    Term("prompts of a pass leave a prefill worker together (SGLang)", {}, {"ahead": 0.0}),
)
"""Terms that `--ablate` takes out one by one."""


def choose_rows(rows: list[Row]) -> dict[str, Array]:
    """Which rows have a metric; TTFT of aggregated and of disaggregated workers are two."""
    metric, apart = np.array([row.metric for row in rows]), np.array([row.way == "apart" for row in rows])
    first = metric == "ttft_ms"
    return {
        "tpot_ms": metric == "tpot_ms",
        "ttft_ms aggregated": first & ~apart,
        "ttft_ms disaggregated": first & apart,
        "output_tok_s_total": metric == "output_tok_s_total",
    }


def show_ablations(rows: list[Row], x: Array) -> None:
    """The errors on all rows, as fitted, with all terms and without each; values are the base values."""
    everything = np.arange(len(rows))
    values = Fit(rows).table(x)
    sys.stdout.write("| without | base values | TPOT | TTFT aggregated | TTFT disaggregated | throughput |\n")
    sys.stdout.write("| --- | --- | ---: | ---: | ---: | ---: |\n")
    for term in (Term("(all terms)", {}), *TERMS):
        fit = Fit([term.remove_from(row) for row in rows], term.absent)
        logs = fit.logs(fit.fitted(everything, 3, x) if term.absent or term.waits else x, everything)
        shown = ", ".join(f"`{name}` {values[name]['base']:.2g}" for name in term.absent)
        medians = (np.median(np.abs(np.expm1(logs[chosen]))) for chosen in choose_rows(rows).values())
        cells = " | ".join(f"{one:.1%}" for one in medians)
        sys.stdout.write(f"| {term.mechanism} | {shown} | {cells} |\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the package's data file")
    parser.add_argument("--cross-validate", nargs="*", choices=SPLITS)
    parser.add_argument("--ablate", action="store_true", help="print the errors without each term")
    options = parser.parse_args()
    began = time.time()
    rows, refused = read()
    sys.stdout.write(f"{len(rows)} rows, {len(refused)} refused, read in {time.time() - began:.0f} s\n")
    for line in sorted(set(refused))[:20]:
        sys.stdout.write(f"  refused: {line}\n")
    fit = Fit(rows)
    everything = np.arange(len(rows))
    began = time.time()
    x = fit.fitted(everything)
    sys.stdout.write(f"fitted {fit.size} numbers in {time.time() - began:.0f} s\n")
    logs = fit.logs(x, everything)
    for by in ("source", "way", "engine", "chip", "model"):
        show(f"as fitted, by {by}", summary(rows, logs, everything, by))
    data: dict[str, Any] = {
        "efficiencies": fit.table(x),
        "rows": dict(sorted(Counter(row.source for row in rows).items())),
    }
    if options.cross_validate is not None:
        left_out = cross_validated(fit, x, tuple(options.cross_validate) or SPLITS)
        figures = []
        for split, found in left_out.items():
            show(f"left out: every {split} in turn", summary(rows, found, everything, split))
            show(f"left out: every {split}, by source", summary(rows, found, everything, "source"))
            show(f"left out: every {split}, by way", summary(rows, found, everything, "way"))
            for metric, chosen in choose_rows(rows).items():
                median = float(np.median(np.abs(np.expm1(found[chosen]))))
                figures.append(
                    {"split": split, "metric": metric, "rows": int(chosen.sum()), "median": round(median, 4)}
                )
                sys.stdout.write(f"cross-validated by {split}: {metric} {chosen.sum()} rows, median {median:.1%}\n")
        data["cross_validation"] = figures
    if options.ablate:
        show_ablations(rows, x)
    if options.write:
        old = json.loads(DATA.read_text()) if DATA.exists() else {}
        DATA.parent.mkdir(exist_ok=True)
        DATA.write_text(json.dumps({**old, **data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
