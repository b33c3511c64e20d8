"""The search: finds the best of made-up engines through noise, with few measurements, and never what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.plans import machine, model, plan

from bedplate.engines import engine
from bedplate.facts.known_models import with_label
from bedplate.tuning.search import (
    Climbed,
    Lever,
    Move,
    Point,
    climb,
    front_of,
    gain_figure,
    levers_of,
    score_of,
    turned,
)
from bedplate.values import replaced
from bedplate.values.tuning import Taken, Trial, Turn, words_of

NOISE = 0.02


class Made:
    """An engine on paper: each knob has its effects, some values only together with others; measuring is noisy."""

    def __init__(self, seed: int, noise: float = NOISE, sizes: tuple[int, ...] = (4, 5, 3, 2, 2)) -> None:
        self.dice = random.Random(seed)
        self.noise, self.asked = noise, list[Point]()
        self.levers = tuple(self._lever(number, size) for number, size in enumerate(sizes))
        self.effects = {
            (lever.name, value): 0.0 if value == lever.now else self._effect(lever, value)
            for lever in self.levers
            for value in lever.values
        }
        self.drift = 0.0

    def _lever(self, number: int, size: int) -> Lever:
        values = tuple(str(2**one) for one in range(size))
        return Lever(
            f"k{number}", values, values[0 if number % 2 else size // 2], ordered=number in (1, 2), alone=not number
        )

    def _effect(self, lever: Lever, value: str) -> float:
        if lever.alone:
            return self.dice.choice((-1.0, -0.2, 0.4, 1.0))
        if lever.ordered:  # one hill
            return -0.06 * abs(lever.values.index(value) - self.dice.randrange(2) - lever.values.index(lever.now))
        return self.dice.choice((-0.3, 0.0, 0.0, 0.15))

    def true(self, point: Point) -> float:
        at = dict(point)
        return sum(self.effects[lever.name, at.get(lever.name, lever.now)] for lever in self.levers)

    def measure(self, point: Point, bar: float | None) -> float | None:
        self.asked.append(point)
        self.drift += self.dice.gauss(0, self.noise / 4)
        found = self.true(point) + self.drift + self.dice.gauss(0, self.noise)
        return bar if bar is not None and found < bar else found

    def best(self) -> float:
        return sum(max(self.effects[lever.name, value] for value in lever.values) for lever in self.levers)

    def settings(self) -> int:
        return math.prod(len(lever.values) for lever in self.levers)


def climbed(made: Made, **more: Callable[[Point], bool]) -> Climbed:
    return climb(made.levers, made.measure, **more)  # type: ignore[arg-type]


def test_it_comes_within_five_percent_of_the_best_with_a_tenth_of_the_measurements() -> None:
    near, spent = 0, []
    for seed in range(60):
        made = Made(seed)
        found = climbed(made)
        near += made.true(found.best) >= made.best() - math.log(1.05)
        spent.append(len(made.asked) / made.settings())
    assert near >= 54  # nine in ten, through noise
    assert max(spent) <= 0.2 and sum(spent) / len(spent) <= 0.1


@given(st.integers(0, 10**6), st.floats(0.0, 0.08))
def test_it_never_ends_far_below_where_it_began(seed: int, noise: float) -> None:
    made = Made(seed, noise)
    found = climbed(made)
    assert made.true(found.best) >= made.true(()) - 0.12
    assert len(found.kept) == 0 or made.asked.count(found.best) >= 2  # nothing is kept that was measured once


@given(st.integers(0, 10**6))
def test_the_same_measurements_give_the_same_search(seed: int) -> None:
    one, other = Made(seed), Made(seed)
    assert climbed(one) == climbed(other) and one.asked == other.asked


@given(st.integers(0, 10**6), st.sampled_from(["k0", "k1", "k3"]))
def test_what_was_refused_is_never_asked_for(seed: int, name: str) -> None:
    made = Made(seed)
    lever = next(one for one in made.levers if one.name == name)
    refused = {(name, value) for value in lever.values if value != lever.now}
    found = climb(made.levers, made.measure, refused=refused)
    assert all(name not in dict(point) for point in (*made.asked, found.best))


def test_what_fails_is_left_out_and_the_rest_goes_on() -> None:
    made = Made(3)
    broken = {value for value in made.levers[0].values if value != made.levers[0].now}

    def measure(point: Point, bar: float | None) -> float | None:
        return None if dict(point).get("k0") in broken else made.measure(point, bar)

    found = climb(made.levers, measure)
    assert "k0" not in dict(found.best) and found.whole


def test_a_winner_that_answers_wrongly_is_not_kept_and_the_next_one_is() -> None:
    lever = Lever("weights", ("own", "wrong", "right"), "own", alone=True)
    speeds = {"own": 0.0, "wrong": 1.0, "right": 0.7}
    seen: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        return speeds[dict(point).get("weights", "own")]

    def accept(point: Point, move: Move) -> bool:
        seen.append(move.value)
        return move.value != "wrong"

    found = climb((lever,), measure, accept=accept)
    assert seen == ["wrong", "right"]
    assert dict(found.best) == {"weights": "right"}


def test_it_stops_when_time_is_up_and_says_so() -> None:
    made, left = Made(5), [6]

    def more(point: Point) -> bool:
        left[0] -= 1
        return left[0] > 0

    assert not climbed(made, more=more).whole
    assert len(made.asked) < 6


def test_what_there_is_no_time_for_is_left_out_and_the_rest_goes_on() -> None:
    lever, other = Lever("slow", ("1", "2"), "1"), Lever("quick", ("1", "2"), "1")
    asked: list[Point] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(point)
        return len(point) / 2

    found = climb((lever, other), measure, more=lambda point: "slow" not in dict(point))
    assert dict(found.best) == {"quick": "2"} and not found.whole
    assert all("slow" not in dict(point) for point in asked)


def test_other_values_of_the_knob_that_won_are_not_tried_in_its_place() -> None:
    lever = Lever("weights", ("own", "a", "b", "c"), "own", alone=True)
    speeds = {"own": 0.0, "a": 0.3, "b": 0.2, "c": 0.1}
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("weights", "own"))
        return speeds[asked[-1]]

    assert dict(climb((lever,), measure).best) == {"weights": "a"}
    assert asked.count("c") == 1 and asked.count("b") <= 2


def test_a_scale_is_begun_where_its_knob_says() -> None:
    lever = Lever("batch", ("256", "516", "1024", "2048", "4096"), "2048", ordered=True, first=("516",))
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("batch", "2048"))
        return {"516": 0.4, "256": 0.1}.get(asked[-1], 0.0)

    assert dict(climb((lever,), measure).best) == {"batch": "516"}
    assert asked[:2] == ["2048", "516"] and "256" in asked and "4096" not in asked


class Scripted:
    """Lever a, b, ... with two values each: the differences to the best, as they come; measuring drifts."""

    def __init__(self, drift: float = 0.0, **gains: list[float]) -> None:
        self.levers = tuple(Lever(name, ("off", "on"), "off") for name in gains)
        self.gains, self.drift, self.asked = {name: iter(one) for name, one in gains.items()}, drift, list[Point]()

    def measure(self, point: Point, bar: float | None) -> float | None:
        self.asked.append(point)
        return sum(next(self.gains[name]) for name, _ in point) + self.drift * len(self.asked)

    def times(self, name: str) -> int:
        return sum(name in dict(point) for point in self.asked)


ON = "on"
MIXED = [0.3, -0.2]
"""Two turns of one that varies a lot."""


def test_the_best_is_measured_before_and_after_so_that_what_drifts_drops_out() -> None:
    made = Scripted(drift=0.05, a=[0.04] * 7)
    found = climb(made.levers, made.measure)
    assert dict(found.best) == {"a": ON}
    assert found.kept[0].gains == pytest.approx((0.04, 0.04))


def test_one_that_is_left_alone_goes_in_pairs_with_the_best() -> None:
    made = Scripted(a=[0.07, 0.0, 0.02, 0.0, 0.07])
    climb(made.levers, made.measure)
    assert made.asked == [(), *((("a", ON),), ()) * 5]


def test_what_was_measured_just_now_is_not_measured_again() -> None:
    made = Scripted(a=[-1.0])
    climb(made.levers, made.measure, seen=0.0)
    assert made.asked == [(("a", ON),)]  # and who is far behind need not be held against it once more


def test_a_race_goes_on_while_there_is_hope() -> None:
    made = Scripted(a=[0.07, 0.0, 0.02, 0.0, 0.07])
    (kept,) = climb(made.levers, made.measure).kept
    assert len(kept.gains) == 5
    hopeless = Scripted(a=[0.07, -0.03, 1.0, 1.0])
    assert not climb(hopeless.levers, hopeless.measure).kept and hopeless.times("a") == 2


def test_what_all_contenders_vary_by_is_what_a_gain_is_held_against() -> None:
    alone = Scripted(d=[0.05] * 7)
    assert climb(alone.levers, alone.measure, width=1).kept
    # Where others went up and down by a third, two equal gains of a twentieth are luck.
    among = Scripted(a=[*MIXED], b=[*MIXED], c=[*MIXED], d=[0.05] * 7)
    assert not climb(among.levers, among.measure, width=1).kept
    assert among.times("d") == 2
    # And where all others hardly vary, a small gain is one.
    steady = Scripted(a=[0.03, 0.029, 0.03], b=[0.03, 0.029], d=[0.05, 0.01])
    found = climb(steady.levers, steady.measure, width=1, accept=lambda point, move: move.lever.name == "d")
    assert dict(found.best) == {"d": ON} and len(found.kept[0].gains) == 2
    before = Scripted(d=[0.05, 0.01])
    assert not climb(before.levers, before.measure, width=1, more=lambda point: len(before.asked) < 5).kept


def test_a_great_gain_that_was_seen_once_when_time_was_up_goes_to_the_proof() -> None:
    for gain, answers, taken in ((2.0, True, True), (0.3, True, False), (2.0, False, False)):
        made, asked = Scripted(a=[gain] * 7), list[Point]()

        def more(point: Point, made: Scripted = made) -> bool:
            return len(made.asked) < 2

        def accept(point: Point, move: Move, asked: list[Point] = asked, answers: bool = answers) -> bool:
            asked.append(point)
            return answers

        found = climb(made.levers, made.measure, accept=accept, more=more)
        assert bool(found.best) == taken and not found.whole
        assert [one.gains for one in found.kept] == ([(gain,)] if taken else [])
        assert bool(asked) == (gain > 1)
    assert gain_figure([2.0]).source == "one short run"


def test_in_haste_a_gain_beyond_the_noise_is_measured_once() -> None:
    made = Scripted(a=[0.07] * 20, b=[0.04] * 20)
    found = climb(made.levers, made.measure, hasty=True, width=1)
    assert [len(one.gains) for one in found.kept] == [1, 2]
    assert made.asked[:2] == [(), (("a", ON),)]
    careful = Scripted(a=[0.07] * 20, b=[0.04] * 20)
    assert [len(one.gains) for one in climb(careful.levers, careful.measure, width=1).kept] == [2, 2]


def test_weights_that_answer_less_faithfully_are_tried_only_if_that_is_allowed() -> None:
    llama, on = engine("llama.cpp"), machine("cpu")
    facts = replaced(with_label(model("Qwen/Qwen3-32B"), "Q4_1"), format="gguf", files=("/models/a.gguf",))
    knobs = llama.knobs(on, plan(llama, on, facts))
    strict, loose = (levers_of(knobs, None, {"weights"}, lossy=lossy)[0].values for lossy in (False, True))
    assert set(strict) == {"Q4_1", "Q8_0", "F16"} and set(loose) == {*strict, "Q4_0"}


def test_who_is_in_time_goes_on_without_those_who_are_not() -> None:
    made = Scripted(a=[0.2] * 7, b=[0.5] * 7)
    found = climb(made.levers, made.measure, more=lambda point: "b" not in dict(point) or len(made.asked) < 1)
    assert dict(found.best) == {"a": ON} and not found.whole and not made.times("b")


def test_what_the_engine_does_by_itself_comes_first_where_that_was_better() -> None:
    vllm, on = engine("vllm"), machine("cpu")
    knobs = vllm.knobs(on, plan(vllm, on, model("Qwen/Qwen3-32B")))
    usual = [lever.name for lever in levers_of(knobs, "KV cache", hints={"split-kv"})]
    better = levers_of(knobs, "KV cache", hints={"split-kv"}, as_own=True)
    assert usual[0] == "split-kv" and usual[1] != "compile"
    assert better[0].name == "compile" and better[0].first == (ON,) and better[1].name == "split-kv"


def test_32_bits_come_first_where_a_processor_multiplies_no_bf16() -> None:
    torch, on = engine("pytorch"), machine("cpu")
    first = {}
    for sets in (("avx2",), ("avx2", "avx512_bf16")):
        here = replaced(on, cpu=replaced(on.cpu, instruction_sets=sets))
        first[sets[-1]] = levers_of(torch.knobs(here, plan(torch, here, model("Qwen/Qwen3-32B"))), "compute")[0].name
    assert first["avx2"] == "dtype" and first["avx512_bf16"] != "dtype"


def test_other_values_come_after_the_one_to_begin_with() -> None:
    lever = Lever("way", ("a", "b", "c"), "a", first=("c",))
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("way", "a"))
        return 0.0

    climb((lever,), measure)
    assert asked[:3] == ["a", "c", "b"]


def test_a_knob_turned_back_is_not_turned() -> None:
    lever = Lever("a", ("1", "2"), "1")
    assert turned(turned((), lever, "2"), lever, "1") == ()


def test_the_diagnosis_decides_what_comes_first() -> None:
    llama, on = engine("llama.cpp"), machine("cpu")
    knobs = llama.knobs(on, plan(llama, on, model("Qwen/Qwen3-32B")))
    by_compute = [lever.name for lever in levers_of(knobs, "compute")]
    by_cache = [lever.name for lever in levers_of(knobs, "KV cache")]
    assert by_compute.index("ubatch") < by_compute.index("kv-type")
    assert by_cache.index("kv-type") < by_cache.index("ubatch")
    assert [lever.name for lever in levers_of(knobs, None, {"threads"})] == ["threads"]


def taken(tok_s: float, ttft: float, memory: int) -> Taken:
    return Taken(at="", seconds=1, score=math.log(tok_s), output_tok_s=tok_s, ttft_ms=ttft, peak_memory_bytes=memory)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100), st.integers(1, 100)), min_size=1, max_size=12))
def test_nobody_on_the_front_is_beaten_by_another(figures: list[tuple[float, float, int]]) -> None:
    trials = [
        Trial(turned=(Turn(knob="n", value=str(number)),), taken=(taken(*one),)) for number, one in enumerate(figures)
    ]
    front = front_of(trials, lambda trial: words_of(trial.turned))
    assert front
    for one in front:
        assert not any(
            a >= one.output_tok_s and b <= one.ttft_ms and c <= (one.peak_memory_bytes or 0)
            and (a, b, c) != (one.output_tok_s, one.ttft_ms, one.peak_memory_bytes)
            for a, b, c in figures
        )  # fmt: skip


def test_scores_know_their_objective() -> None:
    slow = {"output_tok_s": 10.0, "ttft_ms": 1000.0, "tpot_ms": 50.0, "peak_memory_bytes": 100}
    fast = {"output_tok_s": 20.0, "ttft_ms": 500.0, "tpot_ms": 40.0, "peak_memory_bytes": 200}
    for objective in ("throughput", "latency", "cost"):
        assert score_of(objective, **fast) > score_of(objective, **slow)  # type: ignore[arg-type, operator]
    assert score_of("memory", **fast) < score_of("memory", **slow)  # type: ignore[arg-type, operator]
    assert score_of("energy", **fast) is None  # type: ignore[arg-type]
    # Half the time to the first token is worth a seventh of the tokens.
    sooner = {**slow, "output_tok_s": 8.6, "ttft_ms": 500.0}
    assert score_of("throughput", **sooner) > score_of("throughput", **slow)  # type: ignore[arg-type, operator]
    # Less memory at half the speed is no gain, and tokens that come too late do not count.
    assert score_of("memory", **slow, floor_tok_s=20.0) < score_of("memory", **fast, floor_tok_s=20.0)  # type: ignore[arg-type, operator]
    assert score_of("throughput", **fast, on_target=0.4) < score_of("throughput", **slow)  # type: ignore[arg-type, operator]
