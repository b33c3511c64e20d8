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
    weights_id: str | None = None
    """Of the weights, or of those that they were made of: the beginning of the SHA-256; `None`: not recorded."""
    run: str | None = None
    """The run that it was measured in."""
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
            and self._same_weights(other)
            and self.concurrency == other.concurrency
            and self.prompt_tokens == other.prompt_tokens
            and self.output_tokens == other.output_tokens
        )

    def _same_weights(self, other: Result) -> bool:
        """By what they were made of, where that is recorded of both; else by their name."""
        if self.weights_id is not None and other.weights_id is not None:
            return self.weights_id == other.weights_id
        return self.quantization == other.quantization
