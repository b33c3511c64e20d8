"""Shadow: a challenger tried on an endpoint's own work, beside the engine in service or while nobody asks."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.verdict import Verdict


class Shadowed(Record, frozen=True, kw_only=True):
    schema: Literal["shadow/1"] = "shadow/1"
    at: str
    model: str
    how: Literal["live", "replay"]
    """live: a sample of the requests went to both; replay: recorded shapes, to each in turn, while nobody asked."""
    verdict: Verdict
    requests: int
    """At the challenger."""
    turns: int
    """Stretches that both sides were measured in."""
    pauses: int
    """Times that it stopped because somebody asked for something."""
    took_s: float
    run: str
    """Where the store has it."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code
