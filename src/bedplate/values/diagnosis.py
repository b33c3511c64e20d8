"""Diagnosis: which limit binds, the figures that show it, what to change first and what that should bring."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Figure, Record
from bedplate.values.run import Load
from bedplate.values.verdict import Metric

Limit = Literal["memory bandwidth", "KV cache", "interconnect", "scheduler", "runtime overhead", "compute"]
"""The five that the source articles name (docs/rules.md), and compute, for long prompts and large batches."""
ChangeKind = Literal["flag", "quantization", "engine", "hardware", "work", "measure"]


SpentOn = Literal["queue", "prompt", "other prompts", "stalls", "weights", "cache", "tokens", "links", "runtime"]
"""What a part of a request's time is spent on; `prompt` is its own."""
EvidenceKind = Literal[
    "bandwidth", "step floor", "step growth", "prompt", "queue", "cache", "links", "host", "threads", "client"
]


class Spent(Record, frozen=True, kw_only=True):
    """A part of the mean time of a request, and what it is spent on."""

    limit: Limit
    on: SpentOn | None = None
    what: str
    """The same in words."""
    ms: float
    share: float
    """Of the whole request."""


class AtLoad(Record, frozen=True, kw_only=True):
    """One cell: where the time of its requests went."""

    cell: str
    load: Load
    limit: Limit | None
    """`None`: cannot be told."""
    clear: bool = False
    """Whether the largest part is well ahead of the next one."""
    request_ms: float | None = None
    spent: tuple[Spent, ...] = ()
    """The largest first; they add up to `request_ms`."""
    step_ms: float | None = None
    """Between two tokens of one stream, while no prompt is computed."""
    floor_ms: float | None = None
    """No step is faster: its bytes at this machine's bandwidth, or its operations at its rate."""
    batch: float | None = None
    """Requests that were computed at once, on average."""
    bandwidth_share: float | None = None
    """Bytes that a step has to read, over its time, as a share of the machine's bandwidth."""
    operations_share: float | None = None
    """Operations of the prompts over their time, as a share of the machine's rate."""
    why: str | None = None
    """Where nothing can be told: the reason."""


class Evidence(Record, frozen=True, kw_only=True):
    """One observation, and which limit it speaks for; `None`: it speaks against one, or for none."""

    kind: EvidenceKind | None = None
    text: str
    limit: Limit | None = None


class Change(Record, frozen=True, kw_only=True):
    kind: ChangeKind
    text: str
    flag: str | None = None
    """The option of this very engine, where it has one and it is known."""


class Prediction(Record, frozen=True, kw_only=True):
    """What removing the limit should bring."""

    change: str
    metric: Metric
    gain: Figure
    """How many times better; of times the inverse ratio, so that more is better."""


class Bottleneck(Record, frozen=True, kw_only=True):
    """One engine in one setting, over all loads that it was measured with."""

    engine: str
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    limit: Limit | None
    """Under the heaviest load."""
    text: str
    loads: tuple[AtLoad, ...]
    evidence: tuple[Evidence, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    changes: tuple[Change, ...] = ()
    """What to change, the first first."""
    unknown: tuple[str, ...] = ()
    """What could not be told, and how to measure it."""


class Diagnosis(Record, frozen=True, kw_only=True):
    schema: Literal["diagnosis/1"] = "diagnosis/1"
    machine: str
    runs: tuple[str, ...]
    bottlenecks: tuple[Bottleneck, ...]
