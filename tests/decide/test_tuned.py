"""Tuning results: plans for similar workloads use them and give the reason."""

from __future__ import annotations

import pytest

from bedplate.decide import decide
from bedplate.decide.planning import plan as planned
from bedplate.engines import get_engine
from bedplate.engines.knobs import apply_values
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import Decision, Figure, Workload, from_json, replace_fields, to_json
from bedplate.values.run import Load
from bedplate.values.tuning import ComparedSettings, Proof, SettingChange, TuningRun, TuningStep

MACHINE = make_simulated_hardware({"cpu": "AMD EPYC 9654", "cores": 4, "ram_gb": 32, "os": "linux"})
MODEL = read_builtin_facts()
WORK = Workload(concurrency=4, prompt_tokens=512, output_tokens=128)


def make_gain(value: float) -> Figure:
    return Figure(value=value, low=0.9 * value, high=1.1 * value, basis="measured", source="3 repeats in turns")


def make_tuning(work: Workload = WORK, **values: str) -> TuningRun:
    """A tuning result with these values."""
    decision = decide(MACHINE, MODEL, work, "llama.cpp")
    before = planned(decision, MODEL, work)
    llama = get_engine("llama.cpp")
    after = apply_values(before, llama.list_settings(MACHINE, before), values)
    turned = tuple(SettingChange(knob=name, value=value) for name, value in values.items())
    side = {"argv": (), "output_tok_s": make_gain(100), "ttft_ms": make_gain(900), "tpot_ms": make_gain(20)}
    return TuningRun(
        id="t1", at="2026-11-15T10:00:00.000Z", machine="m", hardware="four cores", bedplate="0", engine="llama.cpp",
        engine_version=llama.version or "", build="wheel", model=MODEL.name, budget_s=600, finished=True,
        load=Load(concurrency=4, prompt_tokens=512, output_tokens=128), workload=work,
        sides=(
            ComparedSettings(name="plan", settings=before.settings, weights=before.weights, **side),  # type: ignore[arg-type]
            ComparedSettings(name="tuned", turned=turned, settings=after.settings, weights=after.weights, **side),  # type: ignore[arg-type]
        ),
        proofs=(
            Proof(
                against="own defaults", answer="migrate", text="", output_tok_s=make_gain(2.5), ttft_ms=make_gain(3.0)
            ),
            Proof(against="plan", answer="migrate", text="", output_tok_s=make_gain(2.4), ttft_ms=make_gain(2.8)),
        ),
        steps=(TuningStep(turn=turned[0], before="512", gain=make_gain(1.2)),),
    )  # fmt: skip


def decide_with(tuned: TuningRun, work: Workload = WORK) -> Decision:
    return decide(MACHINE, MODEL, work, "llama.cpp", tunings=(tuned,))


def get_tuning_reason(decision: Decision) -> str | None:
    return next((reason.text for reason in decision.reasons if reason.rule == "tuned.measured"), None)


def test_plan_for_the_same_workload_uses_tuned_settings_with_a_reason() -> None:
    found = decide_with(make_tuning(weights="Q8_0", ubatch="256"))
    assert found.launch is not None and found.quantization == "Q8_0"
    argv = found.launch.argv
    assert argv[argv.index("--ubatch-size") + 1] == "256" and "Q8_0.gguf" in argv[argv.index("--model") + 1]
    assert any("--allow-requantize" in step.argv for step in found.launch.prepare)
    said = get_tuning_reason(found) or ""
    assert "weights Q8_0, ubatch 256" in said and "2.50 times" in said and "of llama.cpp defaults" in said
    reason = next(one for one in found.reasons if one.rule == "tuned.measured")
    assert "measured here" in reason.source
    assert found.estimate.output_tok_s is not None and found.estimate.output_tok_s.basis == "measured"


def test_memory_is_computed_for_tuned_settings() -> None:
    plain, tuned = (
        decide_with(replace_fields(make_tuning(ubatch="256"), finished=False)),
        decide_with(make_tuning(weights="F16")),
    )
    assert plain.memory is not None and tuned.memory is not None
    assert tuned.memory.devices[0].weights_bytes > 2 * plain.memory.devices[0].weights_bytes


@pytest.mark.parametrize(
    "work",
    [
        WORK,
        Workload(origin="default"),
        replace_fields(WORK, concurrency=8),
        replace_fields(WORK, prompt_tokens=1024, output_tokens=64),
        replace_fields(WORK, context_tokens=4096),
    ],
)
def test_similar_workload_uses_tuned_settings(work: Workload) -> None:
    found = decide_with(make_tuning(ubatch="256"), work)
    assert get_tuning_reason(found) is not None
    assert found.settings is not None and found.settings.turned is not None
    if work.context_tokens:
        assert found.settings.context_tokens == 4096  # tuning does not change the requested context


@pytest.mark.parametrize(
    "work",
    [
        replace_fields(WORK, concurrency=16),
        replace_fields(WORK, concurrency=1),
        replace_fields(WORK, prompt_tokens=4096),
        replace_fields(WORK, output_tokens=1024),
        replace_fields(WORK, shared_prefix_tokens=256),
    ],
)
def test_different_workload_does_not_use_tuned_settings(work: Workload) -> None:
    assert get_tuning_reason(decide_with(make_tuning(ubatch="256"), work)) is None


@pytest.mark.parametrize(
    "other",
    [
        {"finished": False},
        {"engine_version": "older"},
        {"model": "another"},
        {"engine": "vllm"},
        {"proofs": ()},
    ],
)
def test_unproven_or_foreign_tuning_is_not_used(other: dict[str, object]) -> None:
    assert get_tuning_reason(decide_with(replace_fields(make_tuning(ubatch="256"), **other))) is None


def test_newest_tuning_is_used() -> None:
    newest, older = make_tuning(ubatch="256"), make_tuning(ubatch="128")
    found = decide(MACHINE, MODEL, WORK, "llama.cpp", tunings=(newest, older))
    assert "ubatch 256" in (get_tuning_reason(found) or "")


def test_tuning_round_trips_through_json() -> None:
    tuned = make_tuning(weights="Q8_0", threads="2", ubatch="64")
    assert from_json(TuningRun, to_json(tuned)) == tuned
