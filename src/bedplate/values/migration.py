"""Migration: the replacement of an engine behind a running endpoint, or its rollback with the reason."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.workload import NotNegative

Stage = Literal["start", "warm-up", "answers", "traffic", "answers under load", "cancelled"]


class MigrationEngine(Record, frozen=True, kw_only=True):
    """An engine with its weights, on one side of a migration."""

    engine: str
    engine_version: str
    quantization: str | None = None
    replicas: int = 1


class AnswerCheck(Record, frozen=True, kw_only=True):
    """The challenger's answers compared with others: one greedy next token after each of some fixed prefixes."""

    against: Literal["the reference", "the engine in service"]
    stage: Stage
    asked: int
    answered: int
    agreed: int
    clear: int
    """How many of the answered prefixes have a clear answer. The verdict uses only these."""
    clear_agreed: int
    floor: float | None = None
    """The share of the clear ones that must agree, given the stored bits of both. `None`: nothing was compared."""
    verdict: Literal["ok", "broken", "unchecked"]
    why: str


class LatencySummary(Record, frozen=True, kw_only=True):
    """Requests and median latencies of one side, from the moment the engine received each request."""

    requests: int
    failed: int
    refused: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class MigrationStep(Record, frozen=True, kw_only=True):
    """A period with a part of the traffic on the challenger."""

    percent: NotNegative
    seconds: float
    challenger: LatencySummary
    beside: LatencySummary
    """The engine in service in the same period; once it gets no traffic, its latency before the migration."""


class Migration(Record, frozen=True, kw_only=True):
    schema: Literal["migration/1"] = "migration/1"
    at: str
    """When it began: ISO 8601, UTC."""
    model: str
    a: MigrationEngine
    """The engine that was in service."""
    b: MigrationEngine
    """The challenger."""
    outcome: Literal["migrated", "rolled back"]
    stage: Stage | None = None
    """The stage of the rollback, or the stage that failed. cancelled: by `bedplate migrate --cancel`."""
    reason: str | None = None
    """Why it was rolled back, or what failed although it was kept, because nothing else was left to serve."""
    side_by_side: bool
    """Whether both engines ran at once. If not, requests were held during the switch."""
    took_s: float
    checks: tuple[AnswerCheck, ...] = ()
    steps: tuple[MigrationStep, ...] = ()
    held_most: int = 0
    """The most requests that waited at once while no engine was running."""
    held_s: float = 0.0
    cut: int = 0
    """Answers that did not end within the drain time."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.outcome == "migrated" else 1
