"""A tuning stays within its budget: complete tunings with simulated engines and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engines.plans import machine, model
from tests.judge.made_cells import GOOD, make_repeat, make_sample

from bedplate.engines import get_engine
from bedplate.engines.vllm import COMPILE_S
from bedplate.errors import ExternalFailure
from bedplate.facts.known_models import apply_label
from bedplate.measure.reference import read_shipped_references
from bedplate.progress import SilentProgress
from bedplate.run.starting import EngineStart
from bedplate.tuning import answers
from bedplate.tuning.answers import AnswerChecker
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN, make_point
from bedplate.tuning.pool import TrialEngine, TuningPool
from bedplate.tuning.proof import Prover, is_disturbed
from bedplate.tuning.search import Point, TuningListener
from bedplate.tuning.state import TuningState
from bedplate.tuning.trials import Trials, TrialUse
from bedplate.tuning.tune import Tuner, choose_plan
from bedplate.values import replace_fields
from bedplate.values.run import Load, Quality, Repeat, ResourceUse
from bedplate.values.tuning import Trial, TrialMeasurement, TuningRun

LOAD = Load(concurrency=4, prompt_tokens=64, output_tokens=32)
MIB_300 = 300 << 20


class SimulatedPool(TuningPool):
    """Starts and conversions only advance the clock."""

    def __init__(self, tuner: SimulatedTuner, most: int) -> None:
        super().__init__(most)
        self.tuner = tuner

    def get(self, point: Point, make: Callable[[], EngineStart]) -> TrialEngine:
        tuner = self.tuner
        alive: Any = SimpleNamespace(point=point, started=SimpleNamespace(start_s=1.0, died=False), stack=ExitStack())
        if point not in self.running:
            while len(self.running) >= self.most:
                self.end(next(iter(self.running)))
            if tuner.budget.estimate_conversion_s(point):
                label = tuner.state.make_plan_at(point).weights.label
                tuner.budget.convert_s[label] = tuner.pass_time(tuner.about["convert"])
            tuner.pass_time(tuner.get_start_s(point))
        self.running[point] = self.running.pop(point, alive)
        return self.running[point]


class SimulatedEngines(Engines):
    def __init__(self, tuner: SimulatedTuner) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.pool)
        self.tuner = tuner

    def warm(self, alive: TrialEngine, limit_s: float) -> None: ...

    def wait_until_idle(self, point: Point) -> None:
        self.tuner.pass_time(0.2)


class SimulatedAnswers(AnswerChecker):
    def __init__(self, tuner: SimulatedTuner) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines)
        self.tuner = tuner

    def check(self, point: Point) -> Quality:
        self.engines.get(point)
        self.budget.check_s = max(self.budget.check_s, self.tuner.pass_time(self.tuner.about["check"]))
        wrong = dict(point).get("weights") == "Q4_0"
        self.state.qualities[point] = replace_fields(GOOD, verdict="broken", note="wrong") if wrong else GOOD
        return self.state.qualities[point]


class SimulatedTrials(Trials):
    def __init__(self, tuner: SimulatedTuner) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines)
        self.tuner = tuner

    def watch(self, alive: TrialEngine, load: Load, limit_s: float, rounds: int = 1) -> tuple[Repeat | None, TrialUse]:
        tuner, point = self.tuner, cast(Any, alive).point
        tuner.loaded.append((point, set(tuner.pool.running)))
        before, used = tuner.now, TrialUse(MIB_300, None, 0)
        took_s = tuner.pass_time(rounds * tuner.get_burst_s(point))
        if took_s > limit_s:
            tuner.now = before + limit_s
            return None, used
        return tuner.make_repeat(took_s, rounds), used

    def diagnose(self) -> None:
        self.tuner.pass_time(self.tuner.about["wave"] / 2)
        self.tuner.set_bottleneck()


class SimulatedProver(Prover):
    def __init__(self, tuner: SimulatedTuner) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines, tuner.answers)
        self.tuner = tuner

    def measure_side(self, point: Point, turn: int, rounds: int, limit_s: float) -> Repeat | None:
        self.engines.get(point)
        tuner = self.tuner
        before, took_s = tuner.now, tuner.pass_time(rounds * tuner.get_burst_s(point))
        if took_s > limit_s:
            tuner.now = before + limit_s
            return None
        return tuner.disturb(tuner.make_repeat(took_s, rounds), point, turn)


class SimulatedTuner(Tuner):
    """Starts no engine: bursts, starts, conversions and checks of answers take given times, with noise."""

    def __init__(self, path: Path, budget_s: float, seed: int, engine_id: str = "llama.cpp", **about: float) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.about = {"wave": 17.0, "start": 1.5, "convert": 6.0, "check": 8.0, "own": 1.15, "noise": 0.1, **about}
        self.loaded: list[tuple[Point, set[Point]]] = []
        """Each measured point, and the points that were loaded at that time."""
        on, one = machine("cpu", 1), get_engine(engine_id)
        facts = model("meta-llama/Llama-3.1-8B-Instruct", folder=True)
        if engine_id in ("llama.cpp", "onnxruntime"):
            facts = replace_fields(apply_label(facts, "Q4_1"), format="gguf", files=("/models/a.gguf",))
        chosen = choose_plan(one.id, on, facts, LOAD, None, path=path)
        kept = TuningRun(
            id=f"simulated-{seed}", at="2026-11-15T10:00:00Z", machine="simulated", hardware="", bedplate="",
            engine=one.id, engine_version=chosen.plan.engine_version, build="wheel", model=facts.name, load=LOAD,
            workload=chosen.plan.workload, budget_s=budget_s,
        )  # fmt: skip
        knobs = one.list_settings(on, chosen.plan)
        super().__init__(
            TuningState(on, facts, chosen, knobs, kept, SilentProgress(), TuningListener(), path, lambda: self.now)
        )
        self.pool = self.budget.pool = SimulatedPool(self, 5)
        self.engines = SimulatedEngines(self)
        self.answers = SimulatedAnswers(self)
        self.trials = SimulatedTrials(self)
        self.prover = SimulatedProver(self)

    def run(self) -> TuningRun:
        self.prover.prove(self.search())
        self.state.keep(finished=True)
        return self.state.kept

    def pass_time(self, seconds: float) -> float:
        took_s = seconds * self.random.lognormvariate(0, self.about["noise"])
        self.now += took_s
        return took_s

    def get_burst_s(self, point: Point) -> float:
        faster = {"Q8_0": 0.65, "Q4_0": 0.6, "F16": 0.95, "Q5_0": 0.9}.get(dict(point).get("weights", ""), 1.0)
        return self.about["wave"] * (self.about["own"] if point == OWN else faster)

    def make_repeat(self, took_s: float, rounds: int) -> Repeat:
        """Make a repeat of four streams with this duration."""
        each_ms = 1000 * took_s / rounds
        samples = [
            make_sample(0.0, each_ms / 2, each_ms / 2 / 31, 32, prompt_tokens=64) for _ in range(rounds * 4)
        ]  # fmt: skip
        return make_repeat(samples, self.now - took_s, took_s, delivered_tokens=float(rounds * 4 * 32))

    def get_start_s(self, point: Point) -> float:
        return self.about["start"]

    def set_bottleneck(self) -> None: ...

    def disturb(self, repeat: Repeat, point: Point, turn: int) -> Repeat:
        return repeat


@settings(  # one example is a complete tuning of simulated minutes
    deadline=None,
    max_examples=max(5, settings().max_examples // 5),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 10**6), st.floats(0.3, 30), st.floats(0.5, 15), st.floats(300, 1200), st.floats(1, 2))
def test_tuning_stays_within_its_budget(
    tmp_path: Path, seed: int, wave: float, start: float, budget_s: float, own: float
) -> None:
    tuner = SimulatedTuner(tmp_path / "store.sqlite", budget_s, seed, wave=wave, start=start, own=own)
    found = tuner.run()
    assert tuner.now <= 1.05 * budget_s
    assert found.finished and found.spent_s <= 1.05 * budget_s
    names = {side.name for side in found.sides}
    # With little time there is only one opponent.
    assert "plan" in names or names == {"own defaults", "tuned"}


def test_ten_minutes_are_enough_to_find_and_prove_the_best_weights(tmp_path: Path) -> None:
    proven = 0
    for seed in range(6):
        tuner = SimulatedTuner(tmp_path / f"{seed}.sqlite", 600, seed)
        found = tuner.run()
        best = found.find_side("tuned")
        assert tuner.now <= 630 and best is not None and ("weights", "Q8_0") in best.settings.turned.knobs  # type: ignore[union-attr]
        assert {one.turn.value for one in found.refused} <= {"Q4_0"}
        assert min(len(side.taken) for side in found.sides) >= 3 and len(found.sides) == 3
        own = found.find_proof("own defaults")
        assert own is not None and own.output_tok_s is not None
        proven += found.is_proven and own.answer == "migrate"
        assert own.output_tok_s.value == pytest.approx(1.15 / 0.65, rel=0.2)
    assert proven >= 5


def test_measurements_are_not_short_beside_long_starts(tmp_path: Path) -> None:
    # SGLang on an H200: 64 requests take 1.2 s, a start takes 45 s.
    tuner = SimulatedTuner(tmp_path / "store.sqlite", 600, 3, wave=1.2, start=45.0, noise=0.0)
    tuner.pool.most = 1
    found = tuner.run()
    assert tuner.now <= 630
    measured = [one for trial in found.trials for one in trial.taken]
    assert [one.rounds for one in measured] == [1, *[4] * (len(measured) - 1)] and len(measured) > 3
    assert all(one.seconds >= 4.5 * 0.6 for side in found.sides for one in side.taken)


def test_clear_proof_ends_early_and_unclear_one_continues(tmp_path: Path) -> None:
    plain = SimulatedTuner(tmp_path / "store.sqlite", 3000, 1, noise=0.01).run()
    unclear = SimulatedTuner(tmp_path / "other.sqlite", 3000, 1, noise=0.35)
    assert plain.is_proven and max(len(side.taken) for side in plain.sides) == 3
    assert plain.spent_s < 1500
    unclear.state.best = (("weights", "Q8_0"),)
    for point in (OWN, (), unclear.state.best):
        unclear.trials.measure(point, None)
    assert max(map(len, unclear.prover.measure_sides().values())) > 3


def test_notes_report_missing_time_for_the_proof(tmp_path: Path) -> None:
    found = SimulatedTuner(tmp_path / "store.sqlite", 600, 2, wave=45.0, own=2.0).run()
    assert found.spent_s <= 630
    assert any("no time to compare with" in note or "budget was used up" in note for note in found.notes)


def test_short_budget_finds_and_proves_the_best_weights(tmp_path: Path) -> None:
    for seed in range(4):
        tuner = SimulatedTuner(
            tmp_path / f"{seed}.sqlite", 600, seed, wave=40.0, start=3.0, check=15.0, own=1.03, noise=0.03
        )
        found = tuner.run()
        best = found.find_side("tuned")
        assert tuner.now <= 630 and best is not None and ("weights", "Q8_0") in best.settings.turned.knobs  # type: ignore[union-attr]
        assert not [one for one in found.trials if one.own_defaults]  # they are measured only in the proof
        assert [len(side.taken) for side in found.sides] == [3, 3, 3] and found.is_proven


class TunerWithFailingDefaults(SimulatedTuner):
    """The engine defaults do not start."""

    def get_start_s(self, point: Point) -> float:
        if point == OWN:
            raise ExternalFailure("it did not start")
        return super().get_start_s(point)


def test_proof_against_the_plan_continues_if_engine_defaults_do_not_start(tmp_path: Path) -> None:
    for wave in (40.0, 5.0):
        found = TunerWithFailingDefaults(tmp_path / f"{wave}.sqlite", 600, 2, wave=wave, start=3.0, noise=0.03).run()
        assert [side.name for side in found.sides] == ["plan", "tuned"] and found.is_proven
        assert [one.turn.knob for one in found.refused] == ["own defaults"]


class DisturbedTuner(SimulatedTuner):
    """In the second round, other processes use the CPU while the engine defaults are measured."""

    def disturb(self, repeat: Repeat, point: Point, turn: int) -> Repeat:
        if turn != 1 or point != OWN:
            return repeat
        return replace_fields(repeat, seconds=3 * repeat.seconds, use=replace_fields(repeat.use, other_cpu_share=0.5))


def test_round_disturbed_by_other_processes_does_not_count(tmp_path: Path) -> None:
    found = DisturbedTuner(tmp_path / "store.sqlite", 900, 3, noise=0.02).run()
    own, best = found.find_side("own defaults"), found.find_side("tuned")
    assert own is not None and best is not None
    assert len(own.taken) == len(best.taken) >= 3
    assert max(one.seconds for one in own.taken) < 2 * min(one.seconds for one in own.taken)
    assert found.notes[-1] == f"1 of {len(own.taken) + 1} rounds do not count: other processes used the CPU"
    assert found.is_proven


@pytest.mark.parametrize(
    ("use", "on_cpu", "disturbed"),
    [
        (ResourceUse(other_cpu_share=0.5), True, True),
        (ResourceUse(other_cpu_share=0.5), False, False),
        (ResourceUse(other_gpu_share=0.5), False, True),
        (ResourceUse(other_gpu_share=0.2), False, False),
        (ResourceUse(other_measurements=(77,)), False, True),
    ],
)
def test_use_of_the_engines_device_disturbs_a_round(use: ResourceUse, on_cpu: bool, disturbed: bool) -> None:
    assert is_disturbed(Repeat(seconds=1.0, use=use), on_cpu=on_cpu) == disturbed


def test_slow_engine_defaults_are_stopped_but_not_refused(tmp_path: Path) -> None:
    tuner = SimulatedTuner(tmp_path / "store.sqlite", 900, 4, own=40.0, noise=0.02)
    found = tuner.run()
    (own,) = [one for one in found.trials if one.own_defaults]
    assert [one.cut for one in own.taken] == [True] and own.taken[0].seconds < 7 * 17
    assert not [one for one in found.refused if one.kind != "answers"]
    assert found.find_side("own defaults") is None and found.is_proven


def test_short_budget_proof_continues_without_slow_engine_defaults(tmp_path: Path) -> None:
    tuner = SimulatedTuner(tmp_path / "store.sqlite", 700, 5, wave=40.0, start=3.0, check=10.0, own=40.0, noise=0.02)
    found = tuner.run()
    assert tuner.now <= 1.05 * 700 and [side.name for side in found.sides] == ["plan", "tuned"] and found.is_proven
    assert not [one for one in found.refused if one.kind != "answers"]
    assert any(note.startswith("the engine defaults took over") for note in found.notes)


def test_no_engine_is_measured_while_another_one_spins(tmp_path: Path) -> None:
    tuner = SimulatedTuner(tmp_path / "store.sqlite", 900, 5)
    tuner.state.change(knobs=("spin", "pinning"))
    tuner.run()
    spinning = (("spin", "active"),)
    assert any(point == spinning for point, _ in tuner.loaded)
    assert any(len(running) > 2 for _, running in tuner.loaded)
    assert not [point for point, running in tuner.loaded if spinning in running and point != spinning]
    tuner.state.best = spinning
    assert list(tuner.budget.estimate_proof_times().starts) == [
        spinning
    ]  # in the proof it starts again before each measurement


class CompilingTuner(SimulatedTuner):
    """vLLM on a CPU: compilation is its default; it is faster but takes two minutes to start."""

    def __init__(self, path: Path, budget_s: float, seed: int) -> None:
        super().__init__(path, budget_s, seed, engine_id="vllm", wave=10.0, start=35.0, own=0.7, noise=0.03)
        self.pool.most = 2
        self.budget.count_loaded_engines = lambda trial: 2  # type: ignore[method-assign]

    def get_burst_s(self, point: Point) -> float:
        return 10.0 * (0.7 if self.compiles(point) else 1.0)

    def get_start_s(self, point: Point) -> float:
        return 150.0 if self.compiles(point) else 35.0

    def compiles(self, point: Point) -> bool:
        return point == OWN or ("compile", "on") in point

    def set_bottleneck(self) -> None:
        self.state.change(limit="runtime overhead")


def test_better_engine_default_is_tried_first_despite_slow_start(tmp_path: Path) -> None:
    tuner = CompilingTuner(tmp_path / "store.sqlite", 1200, 6)
    found = tuner.run()
    first = next(one for one in found.trials if one.turned)
    assert ("compile", "on") in make_point(first)
    assert found.steps[0].turn.knob == "compile" and found.spent_s <= 1260


def test_slow_start_is_expected_only_for_settings_that_cause_it(tmp_path: Path) -> None:
    tuner = CompilingTuner(tmp_path / "store.sqlite", 1200, 7)
    compiled, other = (("compile", "on"),), (("batch-tokens", "512"),)
    budget = tuner.budget
    budget.start_s = {(): 35.0}
    assert budget.estimate_start_s(other) == 35 and budget.estimate_start_s(compiled) == 35 + COMPILE_S
    budget.start_s |= {OWN: 150.0}
    assert budget.estimate_start_s(other) == 35 and budget.estimate_start_s(compiled) == 150
    budget.start_s |= {(*other, *compiled): 140.0}
    assert budget.estimate_start_s(compiled) == 140


def test_other_weights_are_converted_from_the_dequantized_file(tmp_path: Path) -> None:
    tuner = SimulatedTuner(tmp_path / "store.sqlite", 60.0, 1, "onnxruntime")
    plan = tuner.state.make_plan_at((("weights", "F32"),))
    steps = [step for step in tuner.state.list_conversions(plan) if step.kind == "convert"]
    assert [step.argv[0] for step in steps] == ["gguf-to-folder", "python"]
    assert steps[0].where in steps[1].argv and "fp32" in steps[1].argv


def test_slow_engine_is_compared_with_fewer_answers(tmp_path: Path) -> None:
    known = read_shipped_references()[0].list_known()

    def count_asked(ttft_ms: float, budget_s: float) -> int:
        tuner = SimulatedTuner(tmp_path / "store.sqlite", budget_s, 1)
        taken = TrialMeasurement(at="2026-11-16T10:00:00Z", seconds=1.0, score=0.0, ttft_ms=ttft_ms)
        tuner.state.trials[()] = Trial(taken=(taken,))
        return len(tuner.answers.select_affordable(known))

    assert count_asked(100.0, 600.0) == answers.ASKED == count_asked(100.0, 60.0)
    assert count_asked(60_000.0, 240.0) == answers.LEAST_ASKED
    assert answers.LEAST_ASKED < count_asked(8_000.0, 240.0) < count_asked(8_000.0, 600.0) <= answers.ASKED
