"""ReferenceList: the references that answers are compared with, without the answers themselves."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


class ReferenceSummary(Record, frozen=True, kw_only=True):
    model: str
    id: str
    """The beginning of the hash of the weights, as in runs."""
    method: Literal["float32", "float32 by layer", "engine"]
    """float32: PyTorch, completely in memory. by layer: one layer in memory at a time. engine: an engine's answers."""
    made_with: str
    """The program, its version and the precision."""
    weight_bytes: int
    prefixes: int
    clear: int
    """Prefixes with a clear answer. Only these decide whether an engine is broken."""
    perplexity: float | None = None
    """On the fixed text; `None`: the engine that computed the reference does not report it."""
    places: int = 0
    """Places in the text with the most likely next tokens."""
    at: str | None = None
    """When it was computed: ISO 8601, UTC. `None`: it is shipped with bedplate."""
    seconds: float | None = None
    """How long that took."""
    path: str | None = None
    """`None`: it is shipped with bedplate."""


class ReferenceList(Record, frozen=True, kw_only=True):
    """What `bedplate reference --json` prints."""

    schema: Literal["references/1"] = "references/1"
    references: tuple[ReferenceSummary, ...]
