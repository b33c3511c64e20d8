"""Watch: the state of a running service, what triggered an evaluation, and its result."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Decision
from bedplate.values.migration import Migration
from bedplate.values.record import Record
from bedplate.values.shadow import ShadowResult
from bedplate.values.verdict import EXIT_CODES, Answer
from bedplate.values.workload import LatencyTarget, Workload

TriggerKind = Literal["schedule", "release", "bedplate", "driver", "workload", "latency", "asked"]


class Outlook(Record, frozen=True, kw_only=True):
    """One served model as its host sees it now, and the decision that would be made for it today."""

    schema: Literal["outlook/1"] = "outlook/1"
    model: str
    engine: str
    engine_version: str
    quantization: str | None = None
    machine: str
    driver: str | None = None
    """Driver version of the accelerators."""
    requests: int
    """Requests in the last day."""
    workload: Workload
    """The workload of the decision: the observed one if there were enough requests, else the assumed one."""
    drift: str | None = None
    late: str | None = None
    """How the latency target is missed."""
    target: LatencyTarget | None = None
    decision: Decision
    """Made without regard to the engine in service."""


class Trigger(Record, frozen=True, kw_only=True):
    kind: TriggerKind
    text: str


class UntriedChallenger(Record, frozen=True, kw_only=True):
    """A challenger that was not measured."""

    engine: str
    why: str


class WatchEvaluation(Record, frozen=True, kw_only=True):
    """One evaluation."""

    schema: Literal["watch/1"] = "watch/1"
    at: str
    service: str
    model: str
    engine: str
    engine_version: str
    triggers: tuple[Trigger, ...]
    answer: Answer
    text: str
    challenger: str | None = None
    """The challenger that the answer is about."""
    planned: str | None = None
    """The engine that `plan` would choose today."""
    shadows: tuple[ShadowResult, ...] = ()
    untried: tuple[UntriedChallenger, ...] = ()
    report: str | None = None
    """Path of the report page."""
    migration: Migration | None = None
    notes: tuple[str, ...] = ()
    took_s: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]


class WatchState(Record, frozen=True, kw_only=True):
    """The state that `watch` keeps between evaluations."""

    schema: Literal["watch-state/1"] = "watch-state/1"
    at_s: float
    driver: str | None = None
    drift: str | None = None
    late: str | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """The version of each engine that bedplate installs."""
    releases: dict[str, str] = msgspec.field(default_factory=dict)
    """The newest version of each engine's package on the package index."""
