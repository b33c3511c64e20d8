"""Migration: one engine behind a running endpoint is replaced by another, or the attempt is taken back, and why."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.workload import NotNegative

Stage = Literal["start", "warm-up", "answers", "traffic", "answers under load"]


class Party(Record, frozen=True, kw_only=True):
    """An engine with its weights, as it serves or would serve."""

    engine: str
    engine_version: str
    quantization: str | None = None
    replicas: int = 1


class Checked(Record, frozen=True, kw_only=True):
    """Answers of the challenger beside others: one greedy next token after each of some fixed prefixes."""

    against: Literal["the reference", "the engine in service"]
    stage: Stage
    asked: int
    answered: int
    agreed: int
    clear: int
    """Of those answered, how many have a clear answer; the verdict rests on these."""
    clear_agreed: int
    floor: float | None = None
    """The share of these that the stored bits of both explain; `None`: nothing was compared."""
    verdict: Literal["ok", "broken", "unchecked"]
    why: str


class Latency(Record, frozen=True, kw_only=True):
    """What requests came to at one side, counted from the moment when the engine got them; medians."""

    requests: int
    failed: int
    refused: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Step(Record, frozen=True, kw_only=True):
    """A part of the traffic at the challenger, for a while."""

    percent: NotNegative
    seconds: float
    challenger: Latency
    beside: Latency
    """The engine in service meanwhile, or, once it gets nothing any more, before all this."""


class Migration(Record, frozen=True, kw_only=True):
    schema: Literal["migration/1"] = "migration/1"
    at: str
    """When it began: ISO 8601, UTC."""
    model: str
    a: Party
    """What was in service."""
    b: Party
    """The challenger."""
    outcome: Literal["migrated", "rolled back"]
    stage: Stage | None = None
    """Where it was taken back, or found to be no good."""
    reason: str | None = None
    """Why; of one that migrated all the same, because nothing else was left."""
    side_by_side: bool
    """Whether both ran at once; else requests were held while one went and the other came."""
    took_s: float
    checks: tuple[Checked, ...] = ()
    steps: tuple[Step, ...] = ()
    held_most: int = 0
    """Requests that waited at once while no engine was there."""
    held_s: float = 0.0
    cut: int = 0
    """Answers that did not end in the time that was given to them."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.outcome == "migrated" else 1
