"""The scenarios: intents with the expected answers, from this repository and from ../shared if it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.schemas import LOADER

from bedplate.decide import decide
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.run.models import find_intended_model
from bedplate.values import Decision

OWN = Path(__file__).parents[1] / "scenarios"
SHARED = Path(__file__).parents[2].parent / "shared" / "scenarios"
EXPECTATIONS = {
    "engine", "refused", "never", "fits", "orchestrator", "quantization", "never_quantized_below_bits", "queues",
    "error",
}  # fmt: skip


def list_own_files() -> list[Path]:
    return sorted(OWN.glob("*.yaml"))


def list_shared_files() -> list[Path]:
    return sorted(SHARED.glob("*.yaml"))


def make_shared_parameters() -> list[Any]:
    """For parametrize: the shared files, or one skipped test."""
    skip = pytest.mark.skip(reason="the shared scenarios (../shared/scenarios) are not here")
    return list_shared_files() or [pytest.param(None, marks=skip)]


def read_scenario(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(path.read_text(), LOADER)
    return loaded


def decide_intent(intent: dict[str, Any], **options: Any) -> Decision:
    """The decision for the data of an intent file, without the command line."""
    asked = to_intent(intent)
    return decide(
        resolve_hardware(asked),
        find_intended_model(asked.model),
        asked.workload,
        operations=asked.operations,
        **options,
    )
