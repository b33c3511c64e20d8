"""Error bands of estimates: quantiles of published measurements that a fit did not see, by group of questions.

A group is determined by the question alone: the metric, the engine's kernels, the class of device, and the distance to
published measurements. The data file is written by `benchmarks/score/bands.py`; docs/estimates.md has the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.calibration import WIDE, Band, load_table
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.local import STACKED
from bedplate.decide.estimate.machine import MachineRates
from bedplate.decide.estimate.physics import ModelShape

BandMetric = Literal[
    "decode", "batched decode", "prefill", "whole request", "TTFT", "TTFT disaggregated", "TPOT", "TPOT disaggregated",
    "throughput", "memory",
]  # fmt: skip
Distance = Literal["measured chip", "new chip", "new engine", "far"]

DISTANCES: tuple[Distance, ...] = ("measured chip", "new chip", "new engine", "far")
"""From near to far: the engine was measured on this chip; on this class of device; an engine with the same kernels was,
or this engine on another class; none of these."""
UNDER_LOAD: frozenset[BandMetric] = frozenset(
    ("TTFT", "TTFT disaggregated", "TPOT", "TPOT disaggregated", "throughput")
)
LEVELS = (50, 80, 95)
"""Percentages of the bands."""
SAME_CHIP = 1.05
"""Two chips of one architecture count as the same if their bandwidths differ by at most this factor."""
SIZE_MARGIN = 2.0
"""A model counts as outside of the measured sizes if it is this many times larger or smaller."""

NORMAL = (0.67, 1.28, 1.96)
"""Standard deviations of a normal distribution that contain these percentages."""


class BandSet(NamedTuple):
    """The bands of one figure, and what they are based on."""

    half: Band
    """Contains half of the measurements."""
    eighty: Band
    most: Band
    """Contains 95 of 100 measurements."""
    group: str
    campaigns: int
    rows: int
    far: str = ""
    """Why no published measurement is near; empty if some are."""

    def widen(self, variance: float) -> BandSet:
        """The bands with a further, independent error of this variance in logarithms."""
        bands = (self.half, self.eighty, self.most)
        half, eighty, most = (_add_variance(band, z * z * variance) for band, z in zip(bands, NORMAL, strict=True))
        return self._replace(half=half, eighty=eighty, most=most)

    def describe_distance(self) -> str:
        """A clause for the source of a figure; empty if published measurements are near."""
        return f"; the band is wide because there is {self.far}" if self.far else ""

    def invert(self) -> BandSet:
        """The bands of a time, if these are the bands of a rate."""
        return self._replace(half=self.half.invert(), eighty=self.eighty.invert(), most=self.most.invert())


def _add_variance(band: Band, squared: float) -> Band:
    low, high = (math.copysign(math.sqrt(math.log(end) ** 2 + squared), math.log(end)) for end in band)
    return Band(math.exp(low), math.exp(high))


def classify_device(machine: MachineRates) -> str:
    if machine.kind == "cpu":
        return "CPU"
    if machine.vendor == "apple":
        return "Apple GPU"
    if machine.unified:
        return "GPU with shared memory"
    return "data-centre GPU" if machine.family in STACKED else "graphics card"


def choose_path(metric: BandMetric) -> str:
    """The estimator of a metric, which determines the measurements that are compared with it."""
    return "under load" if metric in UNDER_LOAD else "memory" if metric == "memory" else "one stream"


_found_bands: dict[tuple[object, ...], BandSet] = {}
"""By all that the bands depend on: the candidates of one engine differ in their layouts, and the bands do not."""
MOST_FOUND_BANDS = 512


def find_bands(metric: BandMetric, engine: str, machine: MachineRates, shape: ModelShape) -> BandSet:
    """The bands of a figure of this engine, machine and model: of the most specific group that has enough campaigns."""
    device, bandwidth = classify_device(machine), machine.bandwidth_bytes_s
    key = (metric, engine, device, machine.family, bandwidth, shape.total_params)
    if (known := _found_bands.get(key)) is not None:
        return known
    if len(_found_bands) >= MOST_FOUND_BANDS:
        _found_bands.clear()
    _found_bands[key] = found = _look_up_bands(metric, engine, machine, shape)
    return found


def _look_up_bands(metric: BandMetric, engine: str, machine: MachineRates, shape: ModelShape) -> BandSet:
    table = load_table("bands")
    distance, far = find_distance(table["known"].get(choose_path(metric), {}), engine, machine, shape)
    groups = table["groups"]
    for name in list_groups(metric, get_traits(engine).kernels, classify_device(machine), distance):
        if (found := groups.get(name)) is not None:
            half, eighty, most = (Band(*found[str(level)]) for level in LEVELS)
            return BandSet(half, eighty, most, name, found["campaigns"], found["rows"], far)
    return BandSet(WIDE, WIDE, WIDE, metric, 0, 0, far or "no published measurement of this metric")


def list_groups(metric: str, kernels: str | None, device: str, distance: Distance) -> tuple[str, ...]:
    """The names of the groups of a question, from the most specific to the most general."""
    kind = kernels or "other"
    return (
        f"{metric} / {kind} / {device} / {distance}",
        f"{metric} / {kind} / {distance}",
        f"{metric} / {distance}",
        metric,
    )


def find_distance(
    known: Mapping[str, Any], engine: str, machine: MachineRates, shape: ModelShape
) -> tuple[Distance, str]:
    """The distance to published measurements, and if it is far, why."""
    engines: Mapping[str, Sequence[Sequence[Any]]] = known.get("engines", {})
    device = classify_device(machine)
    own = engines.get(engine, ())
    far = ""
    if any(_is_same_chip(chip, device, machine) for chip in own):
        level = 0
    elif any(chip[0] == device for chip in own):
        level = 1
    elif own or _has_similar(engines, engine, device):
        level = 2
    else:
        level, far = 3, f"no published measurement of {engine} or a similar engine on a {device}"
    least, largest = known.get("params", (0.0, math.inf))
    if not least / SIZE_MARGIN <= shape.total_params <= largest * SIZE_MARGIN:
        level = 3
        sizes = f"{least / 1e9:.2g} to {largest / 1e9:.3g} billion parameters"
        far = f"no published measurement of a model of this size, only of {sizes}"
    return DISTANCES[level], far


def _is_same_chip(chip: Sequence[Any], device: str, machine: MachineRates) -> bool:
    _, family, bandwidth = chip
    if chip[0] != device or family != machine.family:
        return False
    return bool(bandwidth / SAME_CHIP <= machine.bandwidth_bytes_s / 1e9 <= bandwidth * SAME_CHIP)


def _has_similar(engines: Mapping[str, Sequence[Sequence[Any]]], engine: str, device: str) -> bool:
    """Whether an engine with the same kernels was measured on this class of device; any engine if they are unknown."""
    kernels = get_traits(engine).kernels
    return any(
        chip[0] == device
        for other, chips in engines.items()
        if kernels is None or get_traits(other).kernels == kernels
        for chip in chips
    )
