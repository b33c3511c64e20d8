"""The budget holds: a whole tuning with engines on paper and a clock of its own, from the first look to the proof."""

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

from bedplate.engines import engine
from bedplate.engines.vllm import COMPILE_S
from bedplate.errors import OutsideFailed
from bedplate.facts.known_models import with_label
from bedplate.measure.reference import shipped_references
from bedplate.progress import Silent
from bedplate.run.starting import EngineStart
from bedplate.tuning import answers
from bedplate.tuning.answers import Answers
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN, point_of
from bedplate.tuning.pool import Alive, Pool
from bedplate.tuning.proof import Prover
from bedplate.tuning.search import Point, Teller
from bedplate.tuning.state import TuningState
from bedplate.tuning.trials import Trials, Used
from bedplate.tuning.tune import Tuner, chosen_plan
from bedplate.values import replaced
from bedplate.values.run import Load, Quality, Repeat
from bedplate.values.tuning import Taken, Trial, Tuned

LOAD = Load(concurrency=4, prompt_tokens=64, output_tokens=32)
MIB_300 = 300 << 20


class PaperPool(Pool):
    """Starts and conversions only take their time."""

    def __init__(self, tuner: Paper, most: int) -> None:
        super().__init__(most)
        self.tuner = tuner

    def get(self, point: Point, make: Callable[[], EngineStart]) -> Alive:
        tuner = self.tuner
        alive: Any = SimpleNamespace(point=point, started=SimpleNamespace(start_s=1.0, died=False), stack=ExitStack())
        if point not in self.running:
            while len(self.running) >= self.most:
                self.end(next(iter(self.running)))
            if tuner.budget.conversion_s(point):
                label = tuner.state.plan_at(point).weights.label
                tuner.budget.convert_s[label] = tuner.passes(tuner.about["convert"])
            tuner.passes(tuner.start(point))
        self.running[point] = self.running.pop(point, alive)
        return self.running[point]


class PaperEngines(Engines):
    def __init__(self, tuner: Paper) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.pool)
        self.tuner = tuner

    def warm(self, alive: Alive, limit_s: float) -> None: ...

    def rest(self, point: Point) -> None:
        self.tuner.passes(0.2)


class PaperAnswers(Answers):
    def __init__(self, tuner: Paper) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines)
        self.tuner = tuner

    def check(self, point: Point) -> Quality:
        self.engines.get(point)
        self.budget.check_s = max(self.budget.check_s, self.tuner.passes(self.tuner.about["check"]))
        wrong = dict(point).get("weights") == "Q4_0"
        self.state.qualities[point] = replaced(GOOD, verdict="broken", note="wrong") if wrong else GOOD
        return self.state.qualities[point]


class PaperTrials(Trials):
    def __init__(self, tuner: Paper) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines)
        self.tuner = tuner

    def watch(self, alive: Alive, load: Load, limit_s: float) -> tuple[Repeat | None, Used]:
        tuner, point = self.tuner, cast(Any, alive).point
        tuner.beside.append((point, set(tuner.pool.running)))
        before, used = tuner.now, Used(MIB_300, None, 0)
        took_s = tuner.passes(tuner.wave(point))
        if took_s > limit_s:
            tuner.now = before + limit_s
            return None, used
        return tuner.repeat(took_s, 1), used

    def diagnose(self) -> None:
        self.tuner.passes(self.tuner.about["wave"] / 2)
        self.tuner.diagnosed()


class PaperProver(Prover):
    def __init__(self, tuner: Paper) -> None:
        super().__init__(tuner.state, tuner.budget, tuner.engines, tuner.answers)
        self.tuner = tuner

    def work(self, point: Point, turn: int, rounds: int, limit_s: float) -> Repeat | None:
        self.engines.get(point)
        tuner = self.tuner
        before, took_s = tuner.now, tuner.passes(rounds * tuner.wave(point))
        if took_s > limit_s:
            tuner.now = before + limit_s
            return None
        return tuner.disturbed(tuner.repeat(took_s, rounds), point, turn)


class Paper(Tuner):
    """Nothing is started: waves take what they take, longer by chance, and so do starts, conversions and answers."""

    def __init__(self, path: Path, budget_s: float, seed: int, engine_id: str = "llama.cpp", **about: float) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.about = {"wave": 17.0, "start": 1.5, "convert": 6.0, "check": 8.0, "own": 1.15, "noise": 0.1, **about}
        self.beside: list[tuple[Point, set[Point]]] = []
        """Who was loaded beside whom while it was measured."""
        on, one = machine("cpu", 1), engine(engine_id)
        facts = model("meta-llama/Llama-3.1-8B-Instruct", folder=True)
        if engine_id in ("llama.cpp", "onnxruntime"):
            facts = replaced(with_label(facts, "Q4_1"), format="gguf", files=("/models/a.gguf",))
        chosen = chosen_plan(one.id, on, facts, LOAD, None, path=path)
        kept = Tuned(
            id=f"paper-{seed}", at="2026-11-15T10:00:00Z", machine="paper", hardware="", bedplate="", engine=one.id,
            engine_version=chosen.plan.engine_version, build="wheel", model=facts.name, load=LOAD,
            workload=chosen.plan.workload, budget_s=budget_s,
        )  # fmt: skip
        knobs = one.knobs(on, chosen.plan)
        super().__init__(TuningState(on, facts, chosen, knobs, kept, Silent(), Teller(), path, lambda: self.now))
        self.pool = self.budget.pool = PaperPool(self, 5)
        self.engines = PaperEngines(self)
        self.answers = PaperAnswers(self)
        self.trials = PaperTrials(self)
        self.prover = PaperProver(self)

    def run(self) -> Tuned:
        self.prover.prove(self.search())
        self.state.keep(finished=True)
        return self.state.kept

    def passes(self, seconds: float) -> float:
        took_s = seconds * self.dice.lognormvariate(0, self.about["noise"])
        self.now += took_s
        return took_s

    def wave(self, point: Point) -> float:
        faster = {"Q8_0": 0.65, "Q4_0": 0.6, "F16": 0.95, "Q5_0": 0.9}.get(dict(point).get("weights", ""), 1.0)
        return self.about["wave"] * (self.about["own"] if point == OWN else faster)

    def repeat(self, took_s: float, rounds: int) -> Repeat:
        """Four streams, as fast as it says."""
        each_ms = 1000 * took_s / rounds
        samples = [
            make_sample(0.0, each_ms / 2, each_ms / 2 / 31, 32, prompt_tokens=64) for _ in range(rounds * 4)
        ]  # fmt: skip
        return make_repeat(samples, self.now - took_s, took_s, delivered_tokens=float(rounds * 4 * 32))

    def start(self, point: Point) -> float:
        return self.about["start"]

    def diagnosed(self) -> None: ...

    def disturbed(self, repeat: Repeat, point: Point, turn: int) -> Repeat:
        return repeat


@settings(  # one example is a whole tuning of simulated minutes
    deadline=None,
    max_examples=max(5, settings().max_examples // 5),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 10**6), st.floats(0.3, 30), st.floats(0.5, 15), st.floats(300, 1200), st.floats(1, 2))
def test_a_tuning_takes_no_longer_than_it_may(
    tmp_path: Path, seed: int, wave: float, start: float, budget_s: float, own: float
) -> None:
    tuner = Paper(tmp_path / "store.sqlite", budget_s, seed, wave=wave, start=start, own=own)
    found = tuner.run()
    assert tuner.now <= 1.05 * budget_s
    assert found.finished and found.spent_s <= 1.05 * budget_s
    names = {side.name for side in found.sides}
    # Where time is short it is held against one opponent alone.
    assert "plan" in names or names == {"own defaults", "tuned"}


def test_ten_minutes_hold_a_search_that_finds_the_weights_and_a_proof_of_them(tmp_path: Path) -> None:
    proven = 0
    for seed in range(6):
        tuner = Paper(tmp_path / f"{seed}.sqlite", 600, seed)
        found = tuner.run()
        best = found.side("tuned")
        assert tuner.now <= 630 and best is not None and ("weights", "Q8_0") in best.settings.turned.knobs  # type: ignore[union-attr]
        assert {one.turn.value for one in found.refused} <= {"Q4_0"}
        assert min(len(side.taken) for side in found.sides) >= 3 and len(found.sides) == 3
        own = found.proof("own defaults")
        assert own is not None and own.output_tok_s is not None
        proven += found.proven and own.answer == "migrate"
        assert own.output_tok_s.value == pytest.approx(1.15 / 0.65, rel=0.2)
    assert proven >= 5


def test_a_proof_that_is_plain_ends_before_its_time_and_one_that_is_not_goes_on(tmp_path: Path) -> None:
    plain = Paper(tmp_path / "store.sqlite", 3000, 1, noise=0.01).run()
    unclear = Paper(tmp_path / "other.sqlite", 3000, 1, noise=0.35)
    assert plain.proven and max(len(side.taken) for side in plain.sides) == 3
    assert plain.spent_s < 1500
    unclear.state.best = (("weights", "Q8_0"),)
    for point in (OWN, (), unclear.state.best):
        unclear.trials.measure(point, None)
    assert max(map(len, unclear.prover.measure_sides().values())) > 3


def test_where_there_is_no_time_for_both_it_says_so(tmp_path: Path) -> None:
    found = Paper(tmp_path / "store.sqlite", 600, 2, wave=45.0, own=2.0).run()
    assert found.spent_s <= 630
    assert any("no time to hold it against" in note or "time was up" in note for note in found.notes)


def test_where_there_is_time_for_few_waves_it_finds_the_weights_and_proves_them_against_both(tmp_path: Path) -> None:
    for seed in range(4):
        tuner = Paper(tmp_path / f"{seed}.sqlite", 600, seed, wave=40.0, start=3.0, check=15.0, own=1.03, noise=0.03)
        found = tuner.run()
        best = found.side("tuned")
        assert tuner.now <= 630 and best is not None and ("weights", "Q8_0") in best.settings.turned.knobs  # type: ignore[union-attr]
        assert not [one for one in found.trials if one.own_defaults]  # they are measured in the proof alone
        assert [len(side.taken) for side in found.sides] == [3, 3, 3] and found.proven


class Stubborn(Paper):
    """Its own defaults do not start."""

    def start(self, point: Point) -> float:
        if point == OWN:
            raise OutsideFailed("it did not start")
        return super().start(point)


def test_own_defaults_that_do_not_start_leave_the_proof_against_the_plan(tmp_path: Path) -> None:
    for wave in (40.0, 5.0):
        found = Stubborn(tmp_path / f"{wave}.sqlite", 600, 2, wave=wave, start=3.0, noise=0.03).run()
        assert [side.name for side in found.sides] == ["plan", "tuned"] and found.proven
        assert [one.turn.knob for one in found.refused] == ["own defaults"]


class Disturbed(Paper):
    """In the second turn somebody else has the processors while the engine's own defaults are measured."""

    def disturbed(self, repeat: Repeat, point: Point, turn: int) -> Repeat:
        if turn != 1 or point != OWN:
            return repeat
        return replaced(repeat, seconds=3 * repeat.seconds, use=replaced(repeat.use, other_cpu_share=0.5))


def test_a_turn_in_which_others_had_the_processors_counts_for_nobody(tmp_path: Path) -> None:
    found = Disturbed(tmp_path / "store.sqlite", 900, 3, noise=0.02).run()
    own, best = found.side("own defaults"), found.side("tuned")
    assert own is not None and best is not None
    assert len(own.taken) == len(best.taken) >= 3
    assert max(one.seconds for one in own.taken) < 2 * min(one.seconds for one in own.taken)
    assert found.notes[-1] == f"of {len(own.taken) + 1} turns 1 do not count: others had the processors"
    assert found.proven


def test_own_defaults_that_are_much_slower_are_not_waited_for_and_not_held_to_be_unsafe(tmp_path: Path) -> None:
    tuner = Paper(tmp_path / "store.sqlite", 900, 4, own=40.0, noise=0.02)
    found = tuner.run()
    (own,) = [one for one in found.trials if one.own_defaults]
    assert [one.cut for one in own.taken] == [True] and own.taken[0].seconds < 7 * 17
    assert not [one for one in found.refused if one.kind != "answers"]
    assert found.side("own defaults") is None and found.proven


def test_in_haste_the_proof_goes_on_without_them(tmp_path: Path) -> None:
    tuner = Paper(tmp_path / "store.sqlite", 700, 5, wave=40.0, start=3.0, check=10.0, own=40.0, noise=0.02)
    found = tuner.run()
    assert tuner.now <= 1.05 * 700 and [side.name for side in found.sides] == ["plan", "tuned"] and found.proven
    assert not [one for one in found.refused if one.kind != "answers"]
    assert any(note.startswith("own defaults had not done in") for note in found.notes)


def test_nobody_is_measured_beside_an_engine_that_spins_while_it_is_idle(tmp_path: Path) -> None:
    tuner = Paper(tmp_path / "store.sqlite", 900, 5)
    tuner.state.change(knobs=("spin", "pinning"))
    tuner.run()
    spinning = (("spin", "active"),)
    assert any(point == spinning for point, _ in tuner.beside)
    assert any(len(running) > 2 for _, running in tuner.beside)
    assert not [point for point, running in tuner.beside if spinning in running and point != spinning]
    tuner.state.best = spinning
    assert list(tuner.budget.proof_times().starts) == [
        spinning
    ]  # in the proof it is started anew before each piece of work


class Compiling(Paper):
    """vLLM on a processor: compiled it is faster, as it is by itself, and takes two minutes to start."""

    def __init__(self, path: Path, budget_s: float, seed: int) -> None:
        super().__init__(path, budget_s, seed, engine_id="vllm", wave=10.0, start=35.0, own=0.7, noise=0.03)
        self.pool.most = 2
        self.budget.engines_at_once = lambda trial: 2  # type: ignore[method-assign]

    def wave(self, point: Point) -> float:
        return 10.0 * (0.7 if self.compiles(point) else 1.0)

    def start(self, point: Point) -> float:
        return 150.0 if self.compiles(point) else 35.0

    def compiles(self, point: Point) -> bool:
        return point == OWN or ("compile", "on") in point

    def diagnosed(self) -> None:
        self.state.change(limit="runtime overhead")


def test_what_own_defaults_do_better_than_the_plan_is_tried_first_though_it_is_slow_to_start(tmp_path: Path) -> None:
    tuner = Compiling(tmp_path / "store.sqlite", 1200, 6)
    found = tuner.run()
    first = next(one for one in found.trials if one.turned)
    assert ("compile", "on") in point_of(first)
    assert found.steps[0].turn.knob == "compile" and found.spent_s <= 1260


def test_a_slow_start_is_expected_of_those_alone_that_have_a_reason(tmp_path: Path) -> None:
    tuner = Compiling(tmp_path / "store.sqlite", 1200, 7)
    compiled, other = (("compile", "on"),), (("batch-tokens", "512"),)
    budget = tuner.budget
    budget.start_s = {(): 35.0}
    assert budget.starting_s(other) == 35 and budget.starting_s(compiled) == 35 + COMPILE_S
    budget.start_s |= {OWN: 150.0}
    assert budget.starting_s(other) == 35 and budget.starting_s(compiled) == 150
    budget.start_s |= {(*other, *compiled): 140.0}
    assert budget.starting_s(compiled) == 140


def test_other_weights_are_made_of_what_the_file_is_unpacked_to(tmp_path: Path) -> None:
    tuner = Paper(tmp_path / "store.sqlite", 60.0, 1, "onnxruntime")
    plan = tuner.state.plan_at((("weights", "F32"),))
    steps = [step for step in tuner.state.conversions(plan) if step.kind == "convert"]
    assert [step.argv[0] for step in steps] == ["gguf-to-folder", "python"]
    assert steps[0].where in steps[1].argv and "fp32" in steps[1].argv


def test_an_engine_that_reads_slowly_is_asked_for_fewer_answers(tmp_path: Path) -> None:
    known = shipped_references()[0].known()

    def asked(ttft_ms: float, budget_s: float) -> int:
        tuner = Paper(tmp_path / "store.sqlite", budget_s, 1)
        taken = Taken(at="2026-11-16T10:00:00Z", seconds=1.0, score=0.0, ttft_ms=ttft_ms)
        tuner.state.trials[()] = Trial(taken=(taken,))
        return len(tuner.answers.affordable(known))

    assert asked(100.0, 600.0) == answers.ASKED == asked(100.0, 60.0)
    assert asked(60_000.0, 240.0) == answers.LEAST_ASKED
    assert answers.LEAST_ASKED < asked(8_000.0, 240.0) < asked(8_000.0, 600.0) <= answers.ASKED
