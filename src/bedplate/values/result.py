"""Result: the performance of one engine on one machine under one workload. Later decisions use it as evidence."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Device, Parallelism
from bedplate.values.record import Record


class Result(Record, frozen=True, kw_only=True):
    schema: Literal["result/1"] = "result/1"
    at: str
    """When it was measured: ISO 8601, UTC."""
    machine: str
    """`compute_fingerprint` of the hardware."""
    engine: str
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    weights_id: str | None = None
    """The beginning of the SHA-256 of the weights, or of those they were converted from; `None`: not recorded."""
    run: str | None = None
    """The run that contains the measurement."""
    device: Device | None = None
    """The device it computed on; `None`: the accelerators, if there are any."""
    parallelism: Parallelism = Parallelism()
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int | None = None
    """Length of the prefix that all prompts shared; `None`: not recorded."""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tok_s: float | None = None
    output_tok_s_low: float | None = None
    """Lower end of the 95 % confidence interval; `None`: not repeated."""
    output_tok_s_high: float | None = None
    peak_memory_bytes: int | None = None
    quality: float | None = None
    """Share of agreement with the reference, 0 to 1; `None`: not checked."""

    def is_comparable_to(self, other: Result) -> bool:
        """Whether machine, model, weights and workload are the same, so that only engine and layout differ."""
        return (
            self.machine == other.machine
            and self.model == other.model
            and self._has_same_weights(other)
            and self.concurrency == other.concurrency
            and self.prompt_tokens == other.prompt_tokens
            and self.output_tokens == other.output_tokens
            and self._may_share_prefix_of(other)
        )

    def _may_share_prefix_of(self, other: Result) -> bool:
        """False only if both lengths are recorded and differ."""
        return len({self.shared_prefix_tokens, other.shared_prefix_tokens} - {None}) <= 1

    def _has_same_weights(self, other: Result) -> bool:
        """Compare the weights by their source if it is recorded for both, else by label."""
        if self.weights_id is not None and other.weights_id is not None:
            return self.weights_id == other.weights_id
        return self.quantization == other.quantization
