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


def name_reference(made_with: str | None) -> str:
    """As output names it: in float32, or by the engine whose answers it has."""
    is_float32 = made_with is None or "float32" in made_with
    return "the float32 reference" if is_float32 else f"the reference of {made_with}"


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
    """The beginning of the SHA-256 of the weights that the reference was computed with."""
    made_with: str | None = None
    """How the reference was computed; `None` in records of earlier versions: PyTorch in float32."""
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
    def reference_name(self) -> str:
        return name_reference(self.made_with)

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.answered if self.answered else None

    def has_same_setting(self, engine: str, version: str, weights: str, settings: Settings) -> bool:
        """Whether this check used the same engine version, weights, device and KV cache type."""
        own = self.settings
        return (self.engine, self.engine_version, self.weights) == (engine, version, weights) and (
            own is None or (own.device, own.kv_type) == (settings.device, settings.kv_type)
        )
