"""Agreement: whether an engine gives the answers that its weights give in PyTorch, and what shows it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Settings
from bedplate.values.record import Record


class Disagreement(Record, frozen=True, kw_only=True):
    prefix: str
    """The end of it."""
    expected: str
    got: str | None
    """`None`: the engine ended its answer there."""
    gap: float
    """By how much the reference prefers its token to the next best, in logits; below about 0.5 it is nearly a tie."""


class Agreement(Record, frozen=True, kw_only=True):
    schema: Literal["agreement/1"] = "agreement/1"
    at: str
    """When it was asked: ISO 8601, UTC."""
    machine: str
    """`fingerprint` of the hardware."""
    engine: str
    engine_version: str
    model: str
    weights: str
    """Their label, as the plan has it."""
    settings: Settings | None = None
    reference: str
    """What it was compared with: the beginning of the SHA-256 of the file whose weights the reference has."""
    asked: int
    answered: int
    agreed: int
    clear: int
    """Of those answered, how many the reference answers with a clear margin; the verdict rests on these."""
    clear_agreed: int
    floor: float | None = None
    """The share of the clear ones that the stored bits explain; `None`: nothing was compared."""
    verdict: Literal["ok", "broken", "unchecked"]
    why: str
    evidence: tuple[Disagreement, ...] = ()

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.answered if self.answered else None

    def same_setting(self, engine: str, version: str, weights: str, settings: Settings) -> bool:
        """Whether it speaks of this engine in this version, weights, device and kind of cache."""
        own = self.settings
        return (self.engine, self.engine_version, self.weights) == (engine, version, weights) and (
            own is None or (own.device, own.kv_type) == (settings.device, settings.kv_type)
        )
