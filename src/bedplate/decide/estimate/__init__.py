"""Stub until the estimator's own face is written (its author replaces this file)."""

from __future__ import annotations

from bedplate.decide.estimate.calibration import Expectation
from bedplate.values import Estimate, Figure, Hardware, Model, Offload, Parallelism, Workload


def expectation_for(
    hardware: Hardware, model: Model, engine: str, layout: Parallelism, workload: Workload, *, slots: int,
    offload: Offload | None = None, factor: float = 1.0,
) -> Expectation | None:  # fmt: skip
    return None


def estimate_of(expectation: Expectation) -> Estimate:
    def figure(value: float, band: tuple[float, float]) -> Figure:
        return Figure(
            value=value, low=value * band[0], high=value * band[1], basis="estimate", source=expectation.source
        )

    return Estimate(
        ttft_ms=figure(expectation.ttft_s * 1000, expectation.ttft_band),
        tpot_ms=figure(expectation.tpot_s * 1000, expectation.tpot_band),
        output_tok_s=figure(expectation.output_tok_s, expectation.output_band),
    )
