"""Every scenario through the command line: the expected engine, refusals, fit and exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.commands import Answer, invoke, run
from tests.decide.scenario_files import EXPECTATIONS, list_own_files, make_shared_parameters, read_scenario

from bedplate.engines import load_engines
from bedplate.facts.known_models import apply_label
from bedplate.run.models import find_intended_model
from bedplate.values import Decision, from_json

AS_A_PROCESS = ("minimal-h100", "mac-too-small", "unknown-chip", "prompt-of-nothing")
"""One scenario per exit code runs in a separate process; for the others that would only repeat Python's start."""


def get_name(path: Path | None) -> str:
    return path.stem if path is not None else "absent"


@pytest.mark.parametrize("path", list_own_files(), ids=get_name)
def test_scenarios(path: Path) -> None:
    check(path, run if path.stem in AS_A_PROCESS else invoke)


@pytest.mark.parametrize("path", make_shared_parameters(), ids=get_name)
def test_shared_scenarios(path: Path) -> None:
    check(path, run if path.stem == "h100x8-general-serving" else invoke)


def test_each_scenario_has_known_expectations() -> None:
    assert len(list_own_files()) >= 30
    for path in list_own_files():
        loaded = read_scenario(path)
        assert set(loaded) == {"intent", "expect"} and loaded["expect"], path.name
        assert set(loaded["expect"]) <= EXPECTATIONS, path.name


def check(path: Path, ask: Any) -> None:
    loaded = read_scenario(path)
    expect = loaded["expect"]
    answer: Answer = ask("plan", "-f", str(path), "--json")
    if "error" in expect:
        assert answer.code == 2, answer
        assert expect["error"].lower() in answer.err.lower() and not answer.out
        return
    decision = from_json(Decision, answer.out)
    shown = (decision.engine, decision.quantization, decision.reasons, decision.refused)
    assert answer.code == (0 if decision.engine is not None else 1)
    check_engines(decision, expect, shown)
    if "fits" in expect:
        assert decision.fits is expect["fits"], shown
    if "orchestrator" in expect:
        assert decision.orchestrator == expect["orchestrator"], shown
    if "quantization" in expect:
        assert decision.quantization in expect["quantization"], shown
    if "never_quantized_below_bits" in expect:
        assert get_bits(decision, loaded["intent"]) >= expect["never_quantized_below_bits"], shown
    if "queues" in expect:
        waits = [reason for reason in decision.reasons if reason.rule == "fit.queue"]
        assert bool(waits) is expect["queues"], shown


def check_engines(decision: Decision, expect: dict[str, Any], shown: object) -> None:
    refused = {refusal.engine for refusal in decision.refused}
    named = [name for name in (decision.engine, *(one.engine for one in decision.challengers)) if name] + sorted(
        refused
    )
    assert sorted(named) == sorted(load_engines()), shown
    if "engine" in expect:
        assert decision.engine in (expect["engine"] or [None]), shown
    assert refused >= set(expect.get("refused", ())), shown
    assert decision.engine not in expect.get("never", ()), shown


def get_bits(decision: Decision, intent: dict[str, Any]) -> float:
    """Bits per weight by the name of the format, without scales."""
    label = (decision.quantization or "").upper().replace(" ", "")
    stored = apply_label(find_intended_model(intent["model"]), label)
    return stored.quantization_details.bits if stored.quantization_details is not None else stored.bits_per_weight or 0
