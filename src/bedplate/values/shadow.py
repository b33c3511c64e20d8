"""Shadow: a challenger tested on an endpoint's own traffic, beside the engine in service or while it is idle."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.verdict import Verdict


class ShadowResult(Record, frozen=True, kw_only=True):
    schema: Literal["shadow/1"] = "shadow/1"
    at: str
    model: str
    how: Literal["live", "replay"]
    """live: a sample of the requests went to both. replay: both got recorded request shapes in interleaved rounds,
    while idle.
    """
    verdict: Verdict
    requests: int
    """Requests sent to the challenger."""
    turns: int
    """Interleaved rounds in which both were measured."""
    pauses: int
    """How often it paused for a client's request."""
    took_s: float
    run: str
    """Id of the run in the store."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code
