"""Diagnosis: the bottleneck, the evidence, what to change first and the predicted gain."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Figure, Record
from bedplate.values.run import Load
from bedplate.values.verdict import Metric

Limit = Literal["memory bandwidth", "KV cache", "interconnect", "scheduler", "runtime overhead", "compute"]
"""The five limits that the source articles name (docs/rules.md), and compute, for long prompts and large batches."""
ChangeKind = Literal["flag", "quantization", "engine", "hardware", "work", "measure"]


SpentOn = Literal["queue", "prompt", "other prompts", "stalls", "weights", "cache", "tokens", "links", "runtime"]
"""Where a part of a request's time goes. `prompt` is the request's own prefill, `other prompts` that of others."""
EvidenceKind = Literal[
    "bandwidth", "step floor", "step growth", "prompt", "queue", "cache", "links", "host", "threads", "client"
]


class TimeShare(Record, frozen=True, kw_only=True):
    """A part of a request's mean time, and where it goes."""

    limit: Limit
    on: SpentOn | None = None
    what: str
    """`on` in words."""
    ms: float
    share: float
    """Share of the whole request time."""


class LoadDiagnosis(Record, frozen=True, kw_only=True):
    """One cell: where the time of its requests went."""

    cell: str
    load: Load
    limit: Limit | None
    """`None`: cannot be determined."""
    clear: bool = False
    """Whether the largest part is well ahead of the second."""
    request_ms: float | None = None
    spent: tuple[TimeShare, ...] = ()
    """The parts, largest first. They add up to `request_ms`."""
    step_ms: float | None = None
    """Time between two tokens of one stream while no prefill runs."""
    floor_ms: float | None = None
    """Lower bound of a step: its bytes at this machine's bandwidth, or its operations at this machine's rate."""
    batch: float | None = None
    """Mean number of requests in a batch."""
    bandwidth_share: float | None = None
    """Bytes read per step, divided by the step time, as a share of the machine's bandwidth."""
    operations_share: float | None = None
    """Prefill operations, divided by the prefill time, as a share of the machine's rate."""
    why: str | None = None
    """Why the bottleneck cannot be determined."""


class Observation(Record, frozen=True, kw_only=True):
    """One observation, and the limit that it supports. `limit` is `None` if it supports none or contradicts one."""

    kind: EvidenceKind | None = None
    text: str
    limit: Limit | None = None


class SuggestedChange(Record, frozen=True, kw_only=True):
    kind: ChangeKind
    text: str
    flag: str | None = None
    """The option of this engine, if it has one and it is known."""


class GainPrediction(Record, frozen=True, kw_only=True):
    """The predicted gain from removing the bottleneck."""

    change: str
    metric: Metric
    gain: Figure
    """Factor of improvement. For times it is the inverse ratio, so more is better."""


class Bottleneck(Record, frozen=True, kw_only=True):
    """The bottleneck of one engine in one setting, over all measured loads."""

    engine: str
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    limit: Limit | None
    """The bottleneck under the heaviest load."""
    text: str
    loads: tuple[LoadDiagnosis, ...]
    evidence: tuple[Observation, ...] = ()
    predictions: tuple[GainPrediction, ...] = ()
    changes: tuple[SuggestedChange, ...] = ()
    """What to change, most important first."""
    unknown: tuple[str, ...] = ()
    """What could not be determined, and how to measure it."""


class Diagnosis(Record, frozen=True, kw_only=True):
    schema: Literal["diagnosis/1"] = "diagnosis/1"
    machine: str
    runs: tuple[str, ...]
    bottlenecks: tuple[Bottleneck, ...]
