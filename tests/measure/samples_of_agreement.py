"""Constructed plans, references and agreements."""

from __future__ import annotations

from typing import Any

from bedplate.measure.prefixes import hash_prefix, list_fixed_prefixes
from bedplate.measure.reference import Reference, ReferenceAnswer
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import Model, Plan, Settings, Weights, Workload, replace_fields
from bedplate.values.agreement import Agreement


def make_reference(count: int = 100, gap: float = 3.0) -> Reference:
    answers = {
        hash_prefix(prefix): ReferenceAnswer(f" word{number}", "text", 7, gap)
        for number, prefix in enumerate(list_fixed_prefixes()[:count])
    }
    return Reference(file="a.gguf", sha256="ab" * 32, file_bytes=10, made_with="a test, float32", answers=answers)


def make_plan(
    label: str = "Q4_1", made: str = "as it is", form: str = "gguf", *, model: Model | None = None, **settings: Any
) -> Plan:
    model = model or replace_fields(read_builtin_facts(), files=())
    return Plan(
        engine="llama.cpp",
        engine_version="2026.10.11549",
        model=model,
        workload=Workload(),
        weights=Weights(label=label, made=made, format=form),  # type: ignore[arg-type]
        settings=Settings(slots=1, context_tokens=2048, **settings),
    )


def make_agreement(verdict: str = "broken", **changes: Any) -> Agreement:
    given: dict[str, Any] = {
        "at": "2026-11-15T10:00:00Z",
        "machine": "m1",
        "engine": "llama.cpp",
        "engine_version": "2026.10.11549",
        "model": "SmolLM2-135M-Instruct",
        "weights": "Q4_1",
        "settings": Settings(slots=1, context_tokens=2048),
        "reference": "b179c9523d0e",
        "asked": 48,
        "answered": 48,
        "agreed": 3,
        "clear": 48,
        "clear_agreed": 3,
        "floor": 0.95,
        "why": "3 of 48 prefixes agree with the reference; at least 95% are expected with these weights",
    }
    return Agreement(verdict=verdict, **{**given, **changes})  # type: ignore[arg-type]
