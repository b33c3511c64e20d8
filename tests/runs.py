"""Made-up runs for tests of verdicts and pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bedplate.values import Settings
from bedplate.values.run import (
    BenchMatrix,
    Cell,
    ClientAccuracy,
    Flag,
    Load,
    Quality,
    Repeat,
    ResourceUse,
    Run,
    RunEnvironment,
    Sample,
    Subject,
)

MODEL = "SmolLM2-135M-Instruct"


def make_cell(
    engine: str,
    concurrency: int,
    tok_s: float,
    ttft_ms: float = 100.0,
    *,
    label: str | None = "Q4_1",
    repeats: int = 3,
    quality: Quality | None = None,
    flags: tuple[Flag, ...] = (),
    peak_memory_bytes: int | None = 400_000_000,
) -> Cell:
    """A cell of a steady engine with this TTFT and total throughput."""
    dice = random.Random(f"{engine}{concurrency}")
    tpot_ms = 1000 * concurrency / tok_s
    parts = []
    for repeat in range(repeats):
        samples = []
        for number in range(20):
            first = ttft_ms * dice.lognormvariate(0, 0.1)
            whole = first + 127 * tpot_ms * dice.lognormvariate(0, 0.02)
            samples.append(
                Sample(at_s=number / 10, ttft_ms=first, duration_ms=whole, prompt_tokens=512, output_tokens=128)
            )
        parts.append(
            Repeat(
                seconds=10.0,
                samples=tuple(samples),
                delivered_tokens=10 * tok_s * (1 + 0.005 * (repeat - (repeats - 1) / 2)),
                client=ClientAccuracy(error_p50_ms=0.1, error_p99_ms=0.5),
                use=ResourceUse(peak_memory_bytes=peak_memory_bytes),
            )
        )
    return Cell(
        id=f"{engine}-{label}-{concurrency}",
        run="made",
        at="2026-11-15T09:00:00Z",
        machine="machine",
        subject=Subject(
            engine=engine,
            engine_version="1.0",
            model=MODEL,
            quantization=label,
            settings=Settings(slots=16, context_tokens=2048),
            argv=(f"{engine}-server", "--port", "1"),
        ),
        load=Load(concurrency=concurrency),
        repeats=tuple(parts),
        quality=quality or Quality(asked=48, agreement=0.98, verdict="ok"),
        flags=flags,
    )


def make_run(cells: Sequence[Cell], engines: Sequence[str] = (), loads: Sequence[int] = (1, 4, 8, 16)) -> Run:
    return Run(
        id="made",
        at="2026-11-15T09:00:00Z",
        environment=RunEnvironment(
            bedplate="0.0",
            python="3.11",
            system="Linux",
            command=("bedplate", "bench"),
            hardware="a made-up machine",
            machine="machine",
            bandwidth_bytes_s=2e10,
            operations_s=4e11,
        ),
        cells=tuple(cells),
        matrix=BenchMatrix(engines=tuple(engines), loads=tuple(Load(concurrency=one) for one in loads)),
        finished=True,
    )
