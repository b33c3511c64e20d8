"""Watch: the state of a running service, what triggered an evaluation, and its result."""

from __future__ import annotations

from typing import Literal

import msgspec

from bedplate.values.decision import Decision, Plan
from bedplate.values.migration import Migration
from bedplate.values.record import Record
from bedplate.values.run import Quality
from bedplate.values.shadow import ShadowResult
from bedplate.values.verdict import EXIT_CODES, Answer, Effect, name_sides
from bedplate.values.workload import LatencyTarget, Workload

TriggerKind = Literal["schedule", "release", "bedplate", "driver", "workload", "latency", "asked"]
UpgradeAnswer = Literal["upgrade", "stay", "not proven"]


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
    plan: Plan | None = None
    """The plan of the engine in service."""


class Trigger(Record, frozen=True, kw_only=True):
    kind: TriggerKind
    text: str


class UntriedChallenger(Record, frozen=True, kw_only=True):
    """A challenger that was not measured."""

    engine: str
    why: str


class UpgradeResult(Record, frozen=True, kw_only=True):
    """Whether to upgrade the engine in service to a newer release."""

    engine: str
    package: str
    present: str
    """The version in service."""
    release: str
    answer: UpgradeAnswer
    text: str
    """The reason for the answer in one or two sentences."""
    effects: tuple[Effect, ...] = ()
    """What was measured, with intervals; empty if the release was not compared."""
    quality: Quality | None = None
    """The answers of the release."""
    present_quality: Quality | None = None
    worse: str | None = None
    """Why the release is worse by more than the tolerance."""
    would_prove: str | None = None
    options: str | None = None
    """What the release's own parser says about the options of the launch."""
    locked: bool | None = None
    """Whether it was installed from a lock file."""
    disk_bytes: int | None = None
    installed: bool
    """Whether the release is still installed."""
    removed: str | None = None
    """Why it was removed again."""
    run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}@{self.release}"


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
    upgrade: UpgradeResult | None = None
    """The comparison with a newer release of the engine in service, with --upgrade."""
    report: str | None = None
    """Path of the report page."""
    migration: Migration | None = None
    notes: tuple[str, ...] = ()
    took_s: float

    @property
    def exit_code(self) -> int:
        """That of the comparison that the answer is about."""
        verdicts = (one.verdict for one in self.shadows if one.verdict.answer == self.answer)
        found = next((one for one in verdicts if name_sides(one.a, one.b)[1] == self.challenger), None)
        return EXIT_CODES[self.answer] if found is None else found.exit_code


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
    no_answer: dict[str, str] = msgspec.field(default_factory=dict)
    """Why the package index gave no answer about a package."""
    rejected: dict[str, str] = msgspec.field(default_factory=dict)
    """Why a release, as ID@VERSION, was removed again: it is not installed again on a schedule."""
