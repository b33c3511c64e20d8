"""Gate: the result of measuring a challenger against a baseline in interleaved rounds, for CI."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.run import Load
from bedplate.values.verdict import EXIT_CODES, Effect, Verdict


class GateEngine(Record, frozen=True, kw_only=True):
    engine: str
    engine_version: str | None = None
    quantization: str | None = None

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.engine, self.engine_version, self.quantization) if part)


class StoredFigure(Record, frozen=True, kw_only=True):
    """What the stored baseline had under one load. It is shown, and does not decide."""

    load: Load
    output_tok_s: float | None = None


class GateResult(Record, frozen=True, kw_only=True):
    schema: Literal["gate/1"] = "gate/1"
    at: str
    run: str
    """The run with the cells of both sides."""
    model: str
    hardware: str
    baseline: GateEngine
    challenger: GateEngine
    rounds: int
    """Interleaved rounds that both sides have."""
    verdict: Verdict | None = None
    """`None`: the cells cannot be compared, for the reason in `text`."""
    text: str
    effects: tuple[Effect, ...] = ()
    """All metrics that both sides have, also those that do not decide."""
    stored: tuple[StoredFigure, ...] = ()
    notes: tuple[str, ...] = ()
    took_s: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES["not proven"] if self.verdict is None else self.verdict.exit_code
