"""The scenarios: intents with what a good answer is, our own and those of ../shared where it is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bedplate.decide import decide
from bedplate.decide.intent import intent_of, resolved_hardware
from bedplate.run.models import intended_model
from bedplate.values import Decision

OWN = Path(__file__).parents[1] / "scenarios"
SHARED = Path(__file__).parents[2].parent / "shared" / "scenarios"
EXPECTATIONS = {
    "engine", "refused", "never", "fits", "orchestrator", "quantization", "never_quantized_below_bits", "queues",
    "error",
}  # fmt: skip


def own_files() -> list[Path]:
    return sorted(OWN.glob("*.yaml"))


def shared_files() -> list[Path]:
    return sorted(SHARED.glob("*.yaml"))


def shared_parameters() -> list[Any]:
    """For parametrize: the shared files, or one test that says why there are none."""
    skip = pytest.mark.skip(reason="the shared scenarios (../shared/scenarios) are not here")
    return shared_files() or [pytest.param(None, marks=skip)]


def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def decided(intent: dict[str, Any], **options: Any) -> Decision:
    """The decision for an intent as a file would hold it, without the command line around it."""
    asked = intent_of(intent)
    return decide(
        resolved_hardware(asked), intended_model(asked.model), asked.workload, operations=asked.operations, **options
    )
