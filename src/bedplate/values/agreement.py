"""Agreement: whether an engine's greedy answers match those of its weights in PyTorch, with the evidence."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Settings
from bedplate.values.record import Record


class Disagreement(Record, frozen=True, kw_only=True):
    prefix: str
    """The end of the prefix."""
    expected: str
    got: str | None
    """`None`: the engine ended its answer here."""
    gap: float
    """The reference's logit margin between its token and the next best one. Below about 0.5 it is nearly a tie."""


class Agreement(Record, frozen=True, kw_only=True):
    schema: Literal["agreement/1"] = "agreement/1"
    at: str
    """When the check ran: ISO 8601, UTC."""
    machine: str
    """`compute_fingerprint` of the hardware."""
    engine: str
    engine_version: str
    model: str
    weights: str
    """The label of the weights, as in the plan."""
    settings: Settings | None = None
    reference: str
    """The beginning of the SHA-256 of the file that the reference's weights come from."""
    asked: int
    answered: int
    agreed: int
    clear: int
    """How many of the answered prefixes the reference decides with a clear margin. The verdict uses only these."""
    clear_agreed: int
    floor: float | None = None
    """The share of the clear ones that must agree, given the stored bits. `None`: nothing was compared."""
    verdict: Literal["ok", "broken", "unchecked"]
    why: str
    evidence: tuple[Disagreement, ...] = ()

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.answered if self.answered else None

    def has_same_setting(self, engine: str, version: str, weights: str, settings: Settings) -> bool:
        """Whether this check used the same engine version, weights, device and KV cache type."""
        own = self.settings
        return (self.engine, self.engine_version, self.weights) == (engine, version, weights) and (
            own is None or (own.device, own.kv_type) == (settings.device, settings.kv_type)
        )
