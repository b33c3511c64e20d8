"""Measurements on this machine correct estimates, and overrule rules only if they are conclusive."""

from __future__ import annotations

import pytest
from tests.commands import invoke
from tests.runs import make_run

from bedplate import store
from bedplate.decide import decide
from bedplate.decide.estimate import compute_expectation
from bedplate.decide.evidence import Calibration, SpeedRatio, calibrate, compute_speed_ratios, gather_evidence
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import apply_label, find_model
from bedplate.values import Decision, Parallelism, Workload, replace_fields
from bedplate.values.intent import Operations
from bedplate.values.result import Result

MACHINE = make_simulated_hardware({"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048})
MODEL = find_model("meta-llama/Meta-Llama-3.1-8B")
WORK = Workload(concurrency=64, prompt_tokens=1024, output_tokens=256)


def make_result(engine: str, tok_s: float, **other: object) -> Result:
    base = Result(
        at="2026-11-01T10:00:00Z", machine=store.compute_fingerprint(MACHINE), engine=engine, model=MODEL.name,
        quantization="FP8", concurrency=64, prompt_tokens=1024, output_tokens=256, ttft_ms=100, output_tok_s=tok_s,
        output_tok_s_low=0.98 * tok_s, output_tok_s_high=1.02 * tok_s, quality=1.0,
    )  # fmt: skip
    return replace_fields(base, **other)


def decide_with(*results: Result, operations: Operations | None = None) -> Decision:
    return decide(MACHINE, MODEL, WORK, operations=operations, results=results)


class TestOverrulingMeasurements:
    def test_clear_gain_overrules_the_rule_with_a_reason(self) -> None:
        assert decide_with().engine == "vllm"
        found = decide_with(make_result("vllm", 4000), make_result("sglang", 5200))
        assert found.engine == "sglang" and found.reasons[0].rule == "evidence.measured"
        assert "30%" in found.reasons[0].text and "vLLM" in found.reasons[0].text
        assert found.reasons[0].source.startswith("store")

    def test_clear_gain_replaces_the_incumbent(self) -> None:
        kept = Operations(incumbent="vllm")
        assert decide_with(operations=kept).reasons[0].rule == "operations.incumbent"
        found = decide_with(make_result("vllm", 4000), make_result("sglang", 5200), operations=kept)
        assert found.engine == "sglang"

    def test_best_of_several_measured_engines_is_chosen(self) -> None:
        found = decide_with(make_result("vllm", 4000), make_result("sglang", 5200), make_result("tensorrt-llm", 5900))
        assert found.engine == "tensorrt-llm"

    @pytest.mark.parametrize(
        "challenger",
        [
            make_result("sglang", 4200),
            make_result("sglang", 8000, quality=0.8),
            make_result("sglang", 8000, ttft_ms=400),
            make_result("sglang", 8000, concurrency=32),
            make_result("sglang", 8000, quantization="AWQ-INT4"),
            make_result("sglang", 8000, prompt_tokens=100),
            make_result("sglang", 8000, model="another model"),
            make_result("sglang", 8000, machine="another machine"),
            make_result("sglang", 8000, output_tok_s=None),
            make_result("sglang", 8000, output_tok_s_low=None, output_tok_s_high=None),
        ],
        ids=["5 %", "wrong answers", "slower to begin", "other load", "other weights", "other prompts", "other model",
             "other machine", "no figure", "measured once"],
    )  # fmt: skip
    def test_unproven_gain_changes_nothing(self, challenger: Result) -> None:
        found = decide_with(make_result("vllm", 4000), challenger)
        assert found.engine == "vllm" and found.reasons[0].rule == "serve.default"

    def test_a_challenger_alone_proves_nothing(self) -> None:
        assert decide_with(make_result("sglang", 9000)).engine == "vllm"

    @pytest.mark.parametrize(("in_flight", "engine"), [(16, "vllm"), (32, "sglang"), (128, "sglang"), (300, "vllm")])
    def test_measurement_applies_to_similar_workloads(self, in_flight: int, engine: str) -> None:
        work = replace_fields(WORK, concurrency=in_flight)
        results = (make_result("vllm", 4000), make_result("sglang", 5200))
        assert decide(MACHINE, MODEL, work, results=results).engine == engine

    def test_nearest_measured_load_is_used(self) -> None:
        at_64 = (make_result("vllm", 4000), make_result("sglang", 5200))
        at_32 = (make_result("vllm", 3000, concurrency=32), make_result("sglang", 2500, concurrency=32))
        for in_flight, engine in ((32, "vllm"), (40, "vllm"), (60, "sglang"), (64, "sglang")):
            work = replace_fields(WORK, concurrency=in_flight)
            assert decide(MACHINE, MODEL, work, results=(*at_64, *at_32)).engine == engine, in_flight

    def test_challenger_is_compared_with_the_best_result_of_the_engine(self) -> None:
        """A result with a bad layout is not a fair comparison."""
        bad = make_result("vllm", 2000, parallelism=Parallelism(tensor=8))
        assert decide_with(bad, make_result("vllm", 5000), make_result("sglang", 5200)).engine == "vllm"

    def test_measured_engine_that_cannot_run_here_is_not_chosen(self) -> None:
        found = decide_with(make_result("vllm", 4000), make_result("exllamav2", 9000), make_result("mlx", 9000))
        assert found.engine != "mlx"

    def test_unknown_engine_in_results_is_ignored(self) -> None:
        assert decide_with(make_result("vllm", 4000), make_result("nobody's engine", 9000)).engine == "vllm"


class TestCalibration:
    def test_measurement_corrects_the_estimate_with_a_reason(self) -> None:
        plain = decide_with()
        assert plain.estimate.output_tok_s is not None and plain.settings is not None
        one_card = decide(
            make_simulated_hardware({"accelerator": "H100 SXM", "ram_gb": 2048}), MODEL, WORK, "vllm"
        ).estimate.output_tok_s
        assert one_card is not None
        slower = decide_with(make_result("vllm", one_card.value / 2, quantization=plain.quantization))
        assert slower.estimate.output_tok_s is not None and slower.estimate.tpot_ms is not None
        assert slower.estimate.output_tok_s.value < 0.75 * plain.estimate.output_tok_s.value
        (said,) = [reason for reason in slower.reasons if reason.rule == "evidence.calibrated"]
        assert "scaled by 0.50" in said.text and said.source.startswith("store")
        assert "evidence.calibrated" not in [reason.rule for reason in plain.reasons]

    def test_cached_prompt_tokens_do_not_make_the_machine_faster(self) -> None:
        shared = replace_fields(WORK, shared_prefix_tokens=960)
        model = apply_label(MODEL, "FP8")
        for engine, has_cache in (("vllm", True), ("pytorch", False)):
            work = shared if has_cache else WORK
            expected = compute_expectation(MACHINE, model, engine, Parallelism(), work, slots=64)
            assert expected is not None
            measured = make_result(engine, expected.output_tok_s, shared_prefix_tokens=960)
            (found,) = compute_speed_ratios(MACHINE, [measured])
            assert found.ratio == pytest.approx(1.0), engine

    def test_without_measurements_nothing_is_corrected(self) -> None:
        assert gather_evidence(MACHINE, MODEL, []).get_factor("vllm", "cuda") == 1.0

    def test_another_engines_measurement_corrects_nothing(self) -> None:
        plain, other = decide_with(), decide_with(make_result("llama.cpp", 10))
        assert plain.estimate == other.estimate

    def test_measurement_of_another_model_corrects_but_does_not_overrule(self) -> None:
        small = make_result("vllm", 50, model="Qwen/Qwen3-0.6B", quantization="BF16")
        evidence = gather_evidence(MACHINE, MODEL, [small])
        assert evidence.get_factor("vllm", "cuda") < 1 and evidence.results == ()

    def test_correction_uses_the_measured_layout(self) -> None:
        plain = decide_with()
        rate, layout = plain.estimate.output_tok_s, plain.parallelism
        assert rate is not None and layout != Parallelism()
        same = make_result("vllm", rate.value, quantization=plain.quantization, parallelism=layout)
        assert gather_evidence(MACHINE, MODEL, [same]).get_factor("vllm", "cuda") == pytest.approx(1.0, rel=0.05)

    def test_cpu_measurement_does_not_correct_the_gpu(self) -> None:
        slow = make_result("llama.cpp", 10, concurrency=1, quantization="Q4_K_M", device="cpu")
        evidence = gather_evidence(MACHINE, MODEL, [slow])
        assert evidence.get_factor("llama.cpp", "cuda") == 1.0

    @pytest.mark.parametrize(("label", "known"), [("6.0 bpw", True), ("AWQ-Int4", True), ("made up", False)])
    def test_quantization_labels_of_decisions_are_recognized(self, label: str, known: bool) -> None:
        evidence = gather_evidence(MACHINE, MODEL, [make_result("vllm", 50, quantization=label)])
        assert bool(evidence.calibrations) is known

    def test_correction_factor_is_the_median_ratio(self) -> None:
        on_gpu = [SpeedRatio(("vllm", "cuda"), ratio, run) for ratio, run in ((2.0, "c"), (1.0, "b"), (0.1, "c"))]
        found = calibrate([*on_gpu, SpeedRatio(("vllm", "cpu"), 0.5, None)])
        assert found == {("vllm", "cuda"): Calibration(1.0, ("c", "b")), ("vllm", "cpu"): Calibration(0.5, ())}
        assert calibrate([]) == {}

    def test_plan_names_the_runs_and_the_command_that_removes_them(self) -> None:
        def explain(*results: Result) -> str:
            reasons = decide_with(*results).reasons
            return next(reason.text for reason in reasons if reason.rule == "evidence.calibrated")

        assert "(run a; bedplate runs discard a removes it)" in explain(make_result("vllm", 4000, run="a"))
        several = explain(*(make_result("vllm", 4000, run=run) for run in ("d", "c", "b")))
        assert "(runs d, c and 1 more; bedplate runs discard ID removes one)" in several


def test_plan_reads_the_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path_factory.mktemp("home")))
    arguments = (
        "plan",
        MODEL.name,
        "--hardware",
        "8x H100 SXM",
        "--concurrency",
        "64",
        "--set",
        "ram_gb=2048",
        "--json",
    )
    assert '"engine": "vllm"' in invoke(*arguments).out
    for one in (make_result("vllm", 4000, run="made"), make_result("sglang", 5200, run="made")):
        store.add_result(one)
    assert '"engine": "vllm"' in invoke(*arguments).out, "nobody could see or discard the run of these results"
    made = make_run(())
    store.add_run(replace_fields(made, environment=replace_fields(made.environment, machine=one.machine)))
    answer = invoke(*arguments)
    assert answer.code == 0 and '"evidence.measured"' in answer.out
