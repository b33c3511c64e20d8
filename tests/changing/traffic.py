"""Sample requests, repeats and subjects."""

from __future__ import annotations

from typing import Any

from bedplate.values.run import Repeat, Sample, Subject
from bedplate.values.traffic import ServedRequest


def make_request(at_s: float, **changes: Any) -> ServedRequest:
    base: dict[str, Any] = {
        "at_s": at_s, "tenant": "local", "model": "alpha", "engine": "llama.cpp", "api": "chat", "stream": True,
        "outcome": "ok", "status": 200, "body_bytes": 300, "prompt_tokens": 30, "completion_tokens": 20,
        "ttft_ms": 50.0, "duration_ms": 430.0, "text_bytes": 120,
    }  # fmt: skip
    return ServedRequest(**{**base, **changes})


def make_repeat(number: int, *, duration_ms: float, requests: int = 1, tokens: int = 20) -> Repeat:
    samples = tuple(
        Sample(at_s=0.0, ttft_ms=duration_ms / 10, duration_ms=duration_ms, prompt_tokens=50, output_tokens=tokens)
        for _ in range(requests)
    )
    return Repeat(at=f"2026-01-01T00:00:{number:02d}.000Z", seconds=duration_ms / 1000, samples=samples)


def make_subject(engine: str) -> Subject:
    return Subject(engine=engine, engine_version="1", model="alpha", quantization="Q4_1", device="cpu")
