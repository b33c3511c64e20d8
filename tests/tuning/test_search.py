"""The search finds the best settings of made-up engines despite noise, with few measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.plans import machine, model, plan

from bedplate.engines import get_engine
from bedplate.facts.known_models import apply_label
from bedplate.tuning.search import (
    Move,
    Point,
    SearchResult,
    SearchSetting,
    climb,
    compute_score,
    find_front,
    make_gain_figure,
    order_settings,
    with_value,
)
from bedplate.values import replace_fields
from bedplate.values.tuning import SettingChange, Trial, TrialMeasurement, describe_changes

NOISE = 0.02


class MadeUpEngine:
    """A made-up engine: each value has an effect, and measurements have noise and drift."""

    def __init__(self, seed: int, noise: float = NOISE, sizes: tuple[int, ...] = (4, 5, 3, 2, 2)) -> None:
        self.random = random.Random(seed)
        self.noise, self.measured = noise, list[Point]()
        self.levers = tuple(self._make_lever(number, size) for number, size in enumerate(sizes))
        self.effects = {
            (lever.name, value): 0.0 if value == lever.now else self._draw_effect(lever, value)
            for lever in self.levers
            for value in lever.values
        }
        self.drift = 0.0

    def _make_lever(self, number: int, size: int) -> SearchSetting:
        values = tuple(str(2**one) for one in range(size))
        return SearchSetting(
            f"k{number}", values, values[0 if number % 2 else size // 2], ordered=number in (1, 2), alone=not number
        )

    def _draw_effect(self, lever: SearchSetting, value: str) -> float:
        if lever.alone:
            return self.random.choice((-1.0, -0.2, 0.4, 1.0))
        if lever.ordered:  # one maximum
            return -0.06 * abs(lever.values.index(value) - self.random.randrange(2) - lever.values.index(lever.now))
        return self.random.choice((-0.3, 0.0, 0.0, 0.15))

    def get_true_score(self, point: Point) -> float:
        at = dict(point)
        return sum(self.effects[lever.name, at.get(lever.name, lever.now)] for lever in self.levers)

    def measure(self, point: Point, bar: float | None) -> float | None:
        self.measured.append(point)
        self.drift += self.random.gauss(0, self.noise / 4)
        found = self.get_true_score(point) + self.drift + self.random.gauss(0, self.noise)
        return bar if bar is not None and found < bar else found

    def compute_best(self) -> float:
        return sum(max(self.effects[lever.name, value] for value in lever.values) for lever in self.levers)

    def count_settings(self) -> int:
        return math.prod(len(lever.values) for lever in self.levers)


def run_search(made: MadeUpEngine, **options: Callable[[Point], bool]) -> SearchResult:
    return climb(made.levers, made.measure, **options)  # type: ignore[arg-type]


def test_search_gets_within_five_percent_of_the_best_with_a_tenth_of_the_measurements() -> None:
    near, spent = 0, []
    for seed in range(60):
        made = MadeUpEngine(seed)
        found = run_search(made)
        near += made.get_true_score(found.best) >= made.compute_best() - math.log(1.05)
        spent.append(len(made.measured) / made.count_settings())
    assert near >= 54  # nine in ten, despite noise
    assert max(spent) <= 0.2 and sum(spent) / len(spent) <= 0.1


@given(st.integers(0, 10**6), st.floats(0.0, 0.08))
def test_search_does_not_end_far_below_its_start(seed: int, noise: float) -> None:
    made = MadeUpEngine(seed, noise)
    found = run_search(made)
    assert made.get_true_score(found.best) >= made.get_true_score(()) - 0.12
    assert len(found.kept) == 0 or made.measured.count(found.best) >= 2  # a kept point was measured at least twice


@given(st.integers(0, 10**6))
def test_search_is_deterministic(seed: int) -> None:
    one, other = MadeUpEngine(seed), MadeUpEngine(seed)
    assert run_search(one) == run_search(other) and one.measured == other.measured


@given(st.integers(0, 10**6), st.sampled_from(["k0", "k1", "k3"]))
def test_refused_values_are_not_measured(seed: int, name: str) -> None:
    made = MadeUpEngine(seed)
    lever = next(one for one in made.levers if one.name == name)
    refused = {(name, value) for value in lever.values if value != lever.now}
    found = climb(made.levers, made.measure, refused=refused)
    assert all(name not in dict(point) for point in (*made.measured, found.best))


def test_failed_values_are_skipped() -> None:
    made = MadeUpEngine(3)
    broken = {value for value in made.levers[0].values if value != made.levers[0].now}

    def measure(point: Point, bar: float | None) -> float | None:
        return None if dict(point).get("k0") in broken else made.measure(point, bar)

    found = climb(made.levers, measure)
    assert "k0" not in dict(found.best) and found.whole


def test_next_best_is_kept_if_the_winner_is_rejected() -> None:
    lever = SearchSetting("weights", ("own", "wrong", "right"), "own", alone=True)
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


def test_search_stops_when_time_is_up() -> None:
    made, left = MadeUpEngine(5), [6]

    def has_time(point: Point) -> bool:
        left[0] -= 1
        return left[0] > 0

    assert not run_search(made, has_time=has_time).whole
    assert len(made.measured) < 6


def test_values_without_time_are_skipped() -> None:
    lever, other = SearchSetting("slow", ("1", "2"), "1"), SearchSetting("quick", ("1", "2"), "1")
    asked: list[Point] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(point)
        return len(point) / 2

    found = climb((lever, other), measure, has_time=lambda point: "slow" not in dict(point))
    assert dict(found.best) == {"quick": "2"} and not found.whole
    assert all("slow" not in dict(point) for point in asked)


def test_other_values_of_the_winning_setting_are_not_tried_again() -> None:
    lever = SearchSetting("weights", ("own", "a", "b", "c"), "own", alone=True)
    speeds = {"own": 0.0, "a": 0.3, "b": 0.2, "c": 0.1}
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("weights", "own"))
        return speeds[asked[-1]]

    assert dict(climb((lever,), measure).best) == {"weights": "a"}
    assert asked.count("c") == 1 and asked.count("b") <= 2


def test_scale_starts_at_its_preferred_value() -> None:
    lever = SearchSetting("batch", ("256", "516", "1024", "2048", "4096"), "2048", ordered=True, first=("516",))
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("batch", "2048"))
        return {"516": 0.4, "256": 0.1}.get(asked[-1], 0.0)

    assert dict(climb((lever,), measure).best) == {"batch": "516"}
    assert asked[:2] == ["2048", "516"] and "256" in asked and "4096" not in asked


class ScriptedEngine:
    """Settings a, b, … with two values each: their gains per measurement are given, and measurements drift."""

    def __init__(self, drift: float = 0.0, **gains: list[float]) -> None:
        self.levers = tuple(SearchSetting(name, ("off", "on"), "off") for name in gains)
        self.gains, self.drift, self.measured = {name: iter(one) for name, one in gains.items()}, drift, list[Point]()

    def measure(self, point: Point, bar: float | None) -> float | None:
        self.measured.append(point)
        return sum(next(self.gains[name]) for name, _ in point) + self.drift * len(self.measured)

    def count(self, name: str) -> int:
        return sum(name in dict(point) for point in self.measured)


ON = "on"
MIXED = [0.3, -0.2]
"""Two rounds of a candidate with much noise."""


def test_drift_cancels_because_the_best_is_measured_before_and_after() -> None:
    made = ScriptedEngine(drift=0.05, a=[0.04] * 7)
    found = climb(made.levers, made.measure)
    assert dict(found.best) == {"a": ON}
    assert found.kept[0].gains == pytest.approx((0.04, 0.04))


def test_last_candidate_alternates_with_the_best() -> None:
    made = ScriptedEngine(a=[0.07, 0.0, 0.02, 0.0, 0.07])
    climb(made.levers, made.measure)
    assert made.measured == [(), *((("a", ON),), ()) * 5]


def test_recent_measurement_of_the_best_is_reused() -> None:
    made = ScriptedEngine(a=[-1.0])
    climb(made.levers, made.measure, start_score=0.0)
    assert made.measured == [(("a", ON),)]  # and a candidate far behind is not compared again


def test_race_continues_while_a_significant_gain_is_possible() -> None:
    made = ScriptedEngine(a=[0.07, 0.0, 0.02, 0.0, 0.07])
    (kept,) = climb(made.levers, made.measure).kept
    assert len(kept.gains) == 5
    hopeless = ScriptedEngine(a=[0.07, -0.03, 1.0, 1.0])
    assert not climb(hopeless.levers, hopeless.measure).kept and hopeless.count("a") == 2


def test_significance_uses_the_noise_of_all_candidates() -> None:
    alone = ScriptedEngine(d=[0.05] * 7)
    assert climb(alone.levers, alone.measure, width=1).kept
    # If others vary by a third, two equal gains of a twentieth are not significant.
    among = ScriptedEngine(a=[*MIXED], b=[*MIXED], c=[*MIXED], d=[0.05] * 7)
    assert not climb(among.levers, among.measure, width=1).kept
    assert among.count("d") == 2
    # If all others hardly vary, a small gain is significant.
    steady = ScriptedEngine(a=[0.03, 0.029, 0.03], b=[0.03, 0.029], d=[0.05, 0.01])
    found = climb(steady.levers, steady.measure, width=1, accept=lambda point, move: move.lever.name == "d")
    assert dict(found.best) == {"d": ON} and len(found.kept[0].gains) == 2
    before = ScriptedEngine(d=[0.05, 0.01])
    assert not climb(before.levers, before.measure, width=1, has_time=lambda point: len(before.measured) < 5).kept


def test_large_gain_measured_once_is_kept_when_time_is_up() -> None:
    for gain, answers, taken in ((2.0, True, True), (0.3, True, False), (2.0, False, False)):
        made, asked = ScriptedEngine(a=[gain] * 7), list[Point]()

        def has_time(point: Point, made: ScriptedEngine = made) -> bool:
            return len(made.measured) < 2

        def accept(point: Point, move: Move, asked: list[Point] = asked, answers: bool = answers) -> bool:
            asked.append(point)
            return answers

        found = climb(made.levers, made.measure, accept=accept, has_time=has_time)
        assert bool(found.best) == taken and not found.whole
        assert [one.gains for one in found.kept] == ([(gain,)] if taken else [])
        assert bool(asked) == (gain > 1)
    assert make_gain_figure([2.0]).source == "one short run"


def test_short_budget_keeps_a_clear_gain_after_one_measurement() -> None:
    made = ScriptedEngine(a=[0.07] * 20, b=[0.04] * 20)
    found = climb(made.levers, made.measure, short_budget=True, width=1)
    assert [len(one.gains) for one in found.kept] == [1, 2]
    assert made.measured[:2] == [(), (("a", ON),)]
    careful = ScriptedEngine(a=[0.07] * 20, b=[0.04] * 20)
    assert [len(one.gains) for one in climb(careful.levers, careful.measure, width=1).kept] == [2, 2]


def test_lossy_weights_are_tried_only_if_allowed() -> None:
    llama, on = get_engine("llama.cpp"), machine("cpu")
    facts = replace_fields(apply_label(model("Qwen/Qwen3-32B"), "Q4_1"), format="gguf", files=("/models/a.gguf",))
    knobs = llama.list_settings(on, plan(llama, on, facts))
    strict, loose = (order_settings(knobs, None, {"weights"}, lossy=lossy)[0].values for lossy in (False, True))
    assert set(strict) == {"Q4_1", "Q8_0", "F16"} and set(loose) == {*strict, "Q4_0"}


def test_candidates_with_time_continue_without_the_others() -> None:
    made = ScriptedEngine(a=[0.2] * 7, b=[0.5] * 7)
    found = climb(made.levers, made.measure, has_time=lambda point: "b" not in dict(point) or len(made.measured) < 1)
    assert dict(found.best) == {"a": ON} and not found.whole and not made.count("b")


def test_engine_defaults_come_first_if_they_were_better() -> None:
    vllm, on = get_engine("vllm"), machine("cpu")
    knobs = vllm.list_settings(on, plan(vllm, on, model("Qwen/Qwen3-32B")))
    usual = [lever.name for lever in order_settings(knobs, "KV cache", hints={"split-kv"})]
    better = order_settings(knobs, "KV cache", hints={"split-kv"}, as_own=True)
    assert usual[0] == "split-kv" and usual[1] != "compile"
    assert better[0].name == "compile" and better[0].first == (ON,) and better[1].name == "split-kv"


def test_dtype_comes_first_on_a_cpu_without_bf16() -> None:
    torch, on = get_engine("pytorch"), machine("cpu")
    first = {}
    for sets in (("avx2",), ("avx2", "avx512_bf16")):
        here = replace_fields(on, cpu=replace_fields(on.cpu, instruction_sets=sets))
        first[sets[-1]] = order_settings(
            torch.list_settings(here, plan(torch, here, model("Qwen/Qwen3-32B"))), "compute"
        )[0].name
    assert first["avx2"] == "dtype" and first["avx512_bf16"] != "dtype"


def test_preferred_value_is_tried_before_the_others() -> None:
    lever = SearchSetting("way", ("a", "b", "c"), "a", first=("c",))
    asked: list[str] = []

    def measure(point: Point, bar: float | None) -> float | None:
        asked.append(dict(point).get("way", "a"))
        return 0.0

    climb((lever,), measure)
    assert asked[:3] == ["a", "c", "b"]


def test_plan_value_is_not_part_of_a_point() -> None:
    lever = SearchSetting("a", ("1", "2"), "1")
    assert with_value(with_value((), lever, "2"), lever, "1") == ()


def test_bottleneck_decides_the_order_of_settings() -> None:
    llama, on = get_engine("llama.cpp"), machine("cpu")
    knobs = llama.list_settings(on, plan(llama, on, model("Qwen/Qwen3-32B")))
    by_compute = [lever.name for lever in order_settings(knobs, "compute")]
    by_cache = [lever.name for lever in order_settings(knobs, "KV cache")]
    assert by_compute.index("ubatch") < by_compute.index("kv-type")
    assert by_cache.index("kv-type") < by_cache.index("ubatch")
    assert [lever.name for lever in order_settings(knobs, None, {"threads"})] == ["threads"]


def make_measurement(tok_s: float, ttft: float, memory: int) -> TrialMeasurement:
    return TrialMeasurement(
        at="", seconds=1, score=math.log(tok_s), output_tok_s=tok_s, ttft_ms=ttft, peak_memory_bytes=memory
    )


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100), st.integers(1, 100)), min_size=1, max_size=12))
def test_no_point_on_the_pareto_front_is_dominated(figures: list[tuple[float, float, int]]) -> None:
    trials = [
        Trial(turned=(SettingChange(knob="n", value=str(number)),), taken=(make_measurement(*one),))
        for number, one in enumerate(figures)
    ]
    front = find_front(trials, lambda trial: describe_changes(trial.turned))
    assert front
    for one in front:
        assert not any(
            a >= one.output_tok_s and b <= one.ttft_ms and c <= (one.peak_memory_bytes or 0)
            and (a, b, c) != (one.output_tok_s, one.ttft_ms, one.peak_memory_bytes)
            for a, b, c in figures
        )  # fmt: skip


def test_score_depends_on_the_objective() -> None:
    slow = {"output_tok_s": 10.0, "ttft_ms": 1000.0, "tpot_ms": 50.0, "peak_memory_bytes": 100}
    fast = {"output_tok_s": 20.0, "ttft_ms": 500.0, "tpot_ms": 40.0, "peak_memory_bytes": 200}
    for objective in ("throughput", "latency", "cost"):
        assert compute_score(objective, **fast) > compute_score(objective, **slow)  # type: ignore[arg-type, operator]
    assert compute_score("memory", **fast) < compute_score("memory", **slow)  # type: ignore[arg-type, operator]
    assert compute_score("energy", **fast) is None  # type: ignore[arg-type]
    # Half the TTFT is worth a seventh of the tokens.
    sooner = {**slow, "output_tok_s": 8.6, "ttft_ms": 500.0}
    assert compute_score("throughput", **sooner) > compute_score("throughput", **slow)  # type: ignore[arg-type, operator]
    # Less memory at half the speed is not a gain, and tokens that miss the latency target do not count.
    assert compute_score("memory", **slow, floor_tok_s=20.0) < compute_score("memory", **fast, floor_tok_s=20.0)  # type: ignore[arg-type, operator]
    assert compute_score("throughput", **fast, on_target=0.4) < compute_score("throughput", **slow)  # type: ignore[arg-type, operator]
