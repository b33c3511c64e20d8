"""Result: what one engine did on one machine for one kind of work; the evidence that later decisions rest on."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Device, Parallelism
from bedplate.values.record import Record


class Result(Record, frozen=True, kw_only=True):
    schema: Literal["result/1"] = "result/1"
    at: str
    """When it was measured: ISO 8601, UTC."""
    machine: str
    """`fingerprint` of the hardware."""
    engine: str
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    device: Device | None = None
    """What it computed on; `None`: the accelerators, where there are any."""
    parallelism: Parallelism = Parallelism()
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tok_s: float | None = None
    output_tok_s_low: float | None = None
    """In between this and the next one it lies, by 95 in 100; `None`: not repeated."""
    output_tok_s_high: float | None = None
    peak_memory_bytes: int | None = None
    quality: float | None = None
    """Agreement with the reference, 1 is all; `None`: not checked."""

    def comparable(self, other: Result) -> bool:
        """The same machine, model, weights and work: what differs is the engine, and how it is best laid out."""
        return (
            self.machine == other.machine
            and self.model == other.model
            and self.quantization == other.quantization
            and self.concurrency == other.concurrency
            and self.prompt_tokens == other.prompt_tokens
            and self.output_tokens == other.output_tokens
        )
