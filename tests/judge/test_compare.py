"""Stay, migrate or not proven: seldom wrong about one and the same engine, and sure of a gain that is there."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import GOOD, Noise, made_cell, made_pair, made_repeat, made_sample, with_settings

from bedplate.decide.evidence import PROVEN_GAIN
from bedplate.errors import BadQuestion
from bedplate.judge.compare import compare
from bedplate.judge.effect import repeats_needed, turns_of, wilson
from bedplate.values import from_json, replaced, to_json
from bedplate.values.run import Cell, Flag, Load, Quality, Repeat, Sample, Subject
from bedplate.values.verdict import Verdict
from bedplate.values.workload import LatencyTarget

QUIET = {"request": 0.03, "repeat": 0.008, "drift": 0.01}


def pair(gain: float, repeats: int = 5, loads: tuple[int, ...] = (4,), seed: int = 7) -> tuple[list[Cell], list[Cell]]:
    return made_pair(Noise(seed, **QUIET), gain, repeats, loads)


def changed(cells: list[Cell], **changes: object) -> list[Cell]:
    return [replaced(cell, **changes) for cell in cells]


def each_repeat(cells: list[Cell], change: Callable[[Repeat], Repeat]) -> list[Cell]:
    return [replaced(cell, repeats=tuple(map(change, cell.repeats))) for cell in cells]


def each_sample(cells: list[Cell], change: Callable[[int, Sample], Sample]) -> list[Cell]:
    return each_repeat(
        cells, lambda repeat: replaced(repeat, samples=tuple(change(*one) for one in enumerate(repeat.samples)))
    )


class TestPower:
    """Noise of which single repeats vary by 5 %, with heavy tails and drift."""

    def answers(self, gain: float, times: int, seed: int, loads: tuple[int, ...] = (4,)) -> collections.Counter[str]:
        noise = Noise(seed, request=0.06, repeat=0.02, drift=0.02)
        return collections.Counter(compare(*made_pair(noise, gain, 5, loads)).answer for _ in range(times))

    def test_of_200_pairs_of_the_same_engine_at_most_5_say_migrate(self) -> None:
        assert self.answers(1.0, 200, seed=1)["migrate"] <= 5

    def test_over_four_loads_at_once_neither(self) -> None:
        assert self.answers(1.0, 25, seed=2, loads=(1, 4, 8, 16))["migrate"] <= 1

    def test_a_gain_of_15_percent_is_found_at_least_8_times_in_10(self) -> None:
        found = self.answers(1.15, 50, seed=3)
        assert found["migrate"] >= 40 and found["stay"] == 0

    def test_and_over_four_loads(self) -> None:
        assert self.answers(1.15, 15, seed=4, loads=(1, 4, 8, 16))["migrate"] >= 12

    def test_with_the_same_work_on_both_sides_as_seldom(self) -> None:
        noise = Noise(6, request=0.06, repeat=0.02, drift=0.02)
        pairs = [made_pair(noise, 1.0, 3, (4,)) for _ in range(120)]
        assert sum(compare(a, b, least_gain=1.03, same_work=True).answer == "migrate" for a, b in pairs) <= 3

    def test_a_loss_of_15_percent_is_never_a_reason_to_move(self) -> None:
        found = self.answers(1 / 1.15, 30, seed=5)
        assert found["stay"] >= 24 and found["migrate"] == 0


class TestAnswers:
    def test_a_clear_gain_says_migrate_with_its_figures(self) -> None:
        verdict = compare(*pair(1.3))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("migrate", "throughput", 10)
        effect = verdict.effects[0]
        assert effect.metric == "output_tok_s" and effect.paired and effect.repeats == (5, 5)
        assert effect.gain.low < 1.3 < effect.gain.high and effect.gain.basis == "measured"
        assert effect.b / effect.a == pytest.approx(effect.gain.value, rel=0.05)
        assert "other is 3" in verdict.text and "with 4 in flight" in verdict.text

    def test_a_gain_that_does_not_pay_says_stay(self) -> None:
        verdict = compare(*pair(1.04, repeats=8))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("stay", "moving costs", 0)
        assert verdict.least_gain == PROVEN_GAIN and "10 %" in verdict.text

    def test_it_pays_where_moving_costs_less(self) -> None:
        assert compare(*pair(1.04, repeats=8), least_gain=1.02).answer == "migrate"

    def test_a_loss_says_stay(self) -> None:
        verdict = compare(*pair(0.8))
        assert (verdict.answer, verdict.constraint) == ("stay", "throughput") and "slower" in verdict.text

    def test_noise_says_not_proven_and_how_many_repeats_would_do(self) -> None:
        verdict = compare(*made_pair(Noise(3, repeat=0.12, drift=0.0), 1.12, 4))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("not proven", "noise", 20)
        assert verdict.would_prove is not None and "repeats of each with 4 in flight" in verdict.would_prove

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_a_single_impressive_run_proves_nothing(self, repeats: int) -> None:
        verdict = compare(*pair(2.0, repeats))
        assert verdict.answer == "not proven" and verdict.would_prove is not None
        assert f"instead of {repeats}" in verdict.would_prove

    def test_repeats_that_did_not_take_turns_are_believed_less(self) -> None:
        one, other = pair(1.3)
        later = each_repeat(other, lambda repeat: replaced(repeat, at=f"2026-11-16T{(repeat.at or '')[11:]}"))
        turns, apart = compare(one, other).effects[0], compare(one, later).effects[0]
        another_run = compare(one, changed(later, run="another")).effects[0]
        assert turns.paired and not apart.paired and not another_run.paired
        widths = [math.log(each.gain.high / each.gain.low) for each in (turns, apart, another_run)]
        assert widths == sorted(widths) and widths[0] < widths[1] < widths[2]

    def test_who_wins_may_depend_on_the_load(self) -> None:
        (one,), (other,) = pair(1.3, loads=(1,))
        (many,), (slower,) = pair(0.7, loads=(16,))
        verdict = compare([one, many], [other, slower])
        assert (verdict.answer, verdict.constraint) == ("not proven", "load") and "--concurrency" in str(
            verdict.would_prove
        )
        assert compare([one], [other]).answer == "migrate"

    def test_an_open_loop_is_weighed_by_time(self) -> None:
        load = Load(arrivals="poisson", requests_per_s=3, prompt_tokens=64, output_tokens=32)
        one, other = pair(1.3)
        verdict = compare(changed(one, load=load), changed(other, load=load))
        assert verdict.effects[0].metric == "e2e_ms" and verdict.answer == "migrate"

    def test_it_round_trips_and_is_always_the_same(self) -> None:
        one, other = pair(1.1)
        verdict = compare(one, other)
        assert from_json(Verdict, to_json(verdict)) == verdict == compare(one, other)


class TestWhatComesBeforeSpeed:
    def test_broken_answers_never_win(self) -> None:
        one, other = pair(3.0)
        broken = Quality(asked=100, agreement=0.1, verdict="broken", note="text is garbled")
        verdict = compare(one, changed(other, quality=broken))
        assert (verdict.answer, verdict.constraint) == ("stay", "quality") and "garbled" in verdict.text

    def test_broken_answers_in_service_are_a_reason_to_move(self) -> None:
        one, other = pair(0.9)
        verdict = compare(changed(one, quality=Quality(asked=100, agreement=0.1, verdict="broken")), other)
        assert (verdict.answer, verdict.constraint) == ("migrate", "quality")

    @pytest.mark.parametrize("quality", [None, Quality()])
    def test_nobody_moves_to_answers_that_were_not_checked(self, quality: Quality | None) -> None:
        one, other = pair(1.3)
        verdict = compare(one, changed(other, quality=quality))
        assert (verdict.answer, verdict.constraint) == ("not proven", "quality")
        slower_one, slower = pair(0.8)
        assert compare(slower_one, changed(slower, quality=quality)).answer == "stay"

    def test_worse_answers_do_not_win_by_speed(self) -> None:
        one, other = pair(1.3)
        worse = Quality(asked=200, agreement=0.8, verdict="ok")
        assert compare(one, changed(other, quality=worse)).constraint == "quality"
        as_good = Quality(asked=200, agreement=0.96, verdict="ok")
        assert compare(one, changed(other, quality=as_good)).answer == "migrate"

    @pytest.mark.parametrize(
        ("mine", "theirs", "answer"),
        [
            ((20.0, 19.8), (24.0, 19.8), "stay"),
            ((14.2, 13.9), (25.4, 25.3), "migrate"),  # one endpoint tells of single words, the other of a whole text
            ((20.0, None), (24.0, None), "migrate"),  # nobody knows whether they are of the same text
        ],
    )
    def test_perplexity_counts_beside_its_reference_alone(
        self, mine: tuple[float, float | None], theirs: tuple[float, float | None], answer: str
    ) -> None:
        one, other = pair(1.3)
        words, more = (replaced(GOOD, perplexity=own, reference_perplexity=ref) for own, ref in (mine, theirs))
        assert compare(changed(one, quality=words), changed(other, quality=more)).answer == answer

    def test_requests_that_fail_do_not_win_by_speed(self) -> None:
        one, other = pair(1.5)
        failing = each_sample(other, lambda place, sample: replaced(sample, outcome="error") if place < 3 else sample)
        verdict = compare(one, failing)
        assert (verdict.answer, verdict.constraint) == ("stay", "errors") and "15 of 60 requests" in verdict.text

    def test_a_first_token_that_comes_later_is_said_before_anybody_moves(self) -> None:
        one, other = pair(1.3)
        later = each_sample(other, lambda _, sample: replaced(sample, ttft_ms=2 * (sample.ttft_ms or 0.0)))
        verdict = compare(one, later)
        assert (verdict.answer, verdict.constraint) == ("not proven", "latency") and "first token" in verdict.text
        assert compare(one, later, target=LatencyTarget(ttft_ms=1000)).answer == "migrate"


def timed(engine: str, ttft_ms: float, step_ms: float = 10.0, late: int = 0, concurrency: int = 4) -> Cell:
    """Three repeats of forty requests; of each, `late` come after a second."""
    repeats: list[Repeat] = []
    for number in range(3):
        samples = [made_sample(0.1 * place, ttft_ms * (1 + place / 400), step_ms) for place in range(40 - late)]
        samples += [made_sample(9.0, 1000.0, step_ms) for _ in range(late)]
        repeats.append(made_repeat(samples, 8.0 * number + (4 if engine == "other" else 0)))
    return made_cell(engine, repeats, concurrency)


class TestTargets:
    TARGET = LatencyTarget(ttft_ms=200)

    def test_only_the_challenger_meets_it(self) -> None:
        verdict = compare([timed("one", 300)], [timed("other", 150)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("migrate", "latency") and "Only other" in verdict.text
        assert verdict.on_target[0].a.value == 0 and verdict.on_target[0].b.value == 1

    def test_only_the_incumbent_meets_it_however_fast_the_other_is(self) -> None:
        verdict = compare([timed("one", 150)], [timed("other", 300, step_ms=1.0)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("stay", "latency")

    def test_both_meet_it_and_speed_decides(self) -> None:
        verdict = compare([timed("one", 150)], [timed("other", 140, step_ms=5.0)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("migrate", "throughput") and "Both meet" in verdict.text

    def test_neither_meets_it(self) -> None:
        verdict = compare([timed("one", 300)], [timed("other", 250, step_ms=1.0)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("not proven", "latency") and "Neither" in verdict.text

    def test_whether_it_is_met_may_be_chance(self) -> None:
        verdict = compare([timed("one", 150, late=4)], [timed("other", 150, late=3)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("not proven", "noise") and "chance" in verdict.text

    def test_it_may_depend_on_the_load(self) -> None:
        one = [timed("one", 150, concurrency=1), timed("one", 300, concurrency=8)]
        other = [timed("other", 300, concurrency=1), timed("other", 150, concurrency=8)]
        assert compare(one, other, target=self.TARGET).constraint == "load"


class TestFairness:
    def test_invalid_cells_are_refused_with_the_reason(self) -> None:
        one, other = pair(1.3, loads=(1, 4))
        spoilt = replaced(other[1], flags=(Flag(kind="client", text="the client was the limit", invalid=True),))
        verdict = compare(one, [other[0], spoilt])
        assert [effect.load.concurrency for effect in verdict.effects if effect.metric == "output_tok_s"] == [1]
        assert verdict.left_out == ("other, 4 in flight, 64 + 32 tokens: the client was the limit",)
        with pytest.raises(BadQuestion, match="nothing of B") as caught:
            compare(one[1:], [spoilt])
        assert caught.value.cause is not None and "the client was the limit" in caught.value.cause

    def test_another_model_is_refused(self) -> None:
        one, other = pair(1.3)
        another = [replaced(cell, subject=replaced(cell.subject, model="another")) for cell in other]
        with pytest.raises(BadQuestion, match="would mean nothing") as caught:
            compare(one, another)
        assert caught.value.cause == "model: SmolLM2-135M-Instruct and another"

    def test_other_weights_are_refused_unless_somebody_asks(self) -> None:
        one, other = pair(1.3)
        stored = [replaced(cell, subject=replaced(cell.subject, quantization="Q8_0")) for cell in other]
        with pytest.raises(BadQuestion, match="would mean nothing") as caught:
            compare(one, stored)
        assert caught.value.hint is not None and "--allow quantization" in caught.value.hint
        verdict = compare(one, stored, allow=("quantization",))
        assert verdict.answer == "migrate" and [each.what for each in verdict.differences] == ["quantization"]
        with pytest.raises(BadQuestion, match="cannot be looked past"):
            compare(one, stored, allow=("model",))

    def test_no_load_in_common(self) -> None:
        one, other = pair(1.3, loads=(1,))[0], pair(1.3, loads=(4,))[1]
        with pytest.raises(BadQuestion, match="no load in common") as caught:
            compare(one, other)
        assert "1 request at a time" in str(caught.value.cause) and "4 in flight" in str(caught.value.cause)

    @pytest.mark.parametrize("empty", [0, 1])
    def test_nothing_at_all(self, empty: int) -> None:
        sides = list(pair(1.3))
        sides[empty] = []
        with pytest.raises(BadQuestion, match=f"nothing of {'AB'[empty]}"):
            compare(*sides)

    def test_of_several_runs_the_one_that_both_are_in(self) -> None:
        one, other = pair(1.3)
        newer = changed(other, run="later", at="2026-11-16T00:00:00Z", id="newer")
        verdict = compare(one, [*other, *newer])
        assert verdict.b.runs == ("made",) and verdict.effects[0].paired

    def test_of_several_forms_the_one_that_both_were_measured_in(self) -> None:
        one, other = pair(1.3)
        newer = [
            replaced(cell, id="wide", at="2026-11-16T00:00:00Z", subject=replaced(cell.subject, quantization="BF16"))
            for cell in other
        ]
        verdict = compare(one, [*other, *newer])
        assert verdict.b.quantization == "Q4_1" and verdict.effects[0].paired

    def test_a_cell_is_not_held_against_itself(self) -> None:
        one, _ = pair(1.0)
        with pytest.raises(BadQuestion):
            compare(one, one)

    def test_what_differs_is_printed_once(self) -> None:
        one, other = pair(1.3, loads=(1, 4))
        verdict = compare([with_settings(cell) for cell in one], [with_settings(cell, slots=4) for cell in other])
        assert [(each.what, each.a, each.b) for each in verdict.differences] == [("slots", "16", "4")]


class TestCosts:
    def test_costs_stand_beside_the_speed(self) -> None:
        one, other = pair(1.3)
        base = Subject(engine="llama.cpp", model=one[0].subject.model, quantization="Q4_1", weights_id="w")
        native = replaced(base, build="native")
        folder = replaced(base, engine="vllm", quantization="BF16", start_s=40.0, install_bytes=4_100_000_000)
        verdict = compare(changed(one, subject=native), changed(other, subject=folder))
        assert verdict.b.cost.install_bytes == 4_100_000_000 and verdict.b.cost.start_s == 40.0
        assert verdict.b.cost.steps == ("weights made into BF16 for it",)
        assert verdict.a.cost.steps == ("built from source on this machine",)
        assert (verdict.a.cost.effort or 0) < (verdict.b.cost.effort or 0)


class TestTurns:
    def order(self, text: str) -> int:
        moments: dict[str, list[str | None]] = {"A": [], "B": []}
        for second, side in enumerate(text):
            moments[side].append(f"2026-11-15T09:00:{second:02d}.000Z")
        return len(turns_of(moments["A"], moments["B"]))

    def test_neighbours_are_paired_whoever_comes_first(self) -> None:
        assert self.order("ABABAB") == self.order("ABBAAB") == 3
        assert self.order("ABABABBB") == 3, "what one side has more is left alone"
        assert self.order("AABBAABBAABB") == 3, "several at a time are one turn together"

    def test_one_after_the_other_is_not_turns(self) -> None:
        assert self.order("AAAABBBB") == self.order("AB") == self.order("") == self.order("AABB") == 0

    def test_without_moments_nobody_knows(self) -> None:
        assert turns_of([None, None, None], ["a", "b", "c"]) == []


class TestSameWork:
    """Four prompts at once are read one after the other: their times differ because somebody is last, not by chance."""

    def test_the_turns_alone_tell_what_varies(self) -> None:
        a, b = pair(1.0, repeats=3)
        a = each_sample(a, lambda number, sample: replaced(sample, ttft_ms=(1 + number % 4) * 1000))
        b = each_sample(b, lambda number, sample: replaced(sample, ttft_ms=(1 + number % 4) * 500))
        wide, narrow = (
            next(one for one in compare(a, b, same_work=same).effects if one.metric == "ttft_ms").gain
            for same in (False, True)
        )
        assert narrow.value == wide.value == pytest.approx(2.0)
        assert wide.low < 1.9 and wide.high > 2.1
        assert narrow.low == pytest.approx(2.0) and narrow.high == pytest.approx(2.0)


class TestFigures:
    @given(st.floats(0.005, 0.3), st.floats(0.02, 0.5))
    def test_more_noise_needs_more_repeats(self, noise: float, distance: float) -> None:
        few, more = repeats_needed(noise, distance, 0.95), repeats_needed(noise * 2, distance, 0.95)
        assert few is None or few >= 3
        assert more is None or (few is not None and few <= more)

    @given(st.integers(0, 200), st.integers(1, 200))
    def test_a_share_lies_within_its_interval(self, hits: int, count: int) -> None:
        share = min(hits, count) / count
        low, high = wilson(share, count, 0.95)
        assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1

    def test_a_clean_sheet_of_a_few_is_not_all(self) -> None:
        assert wilson(1.0, 5, 0.95)[0] < 0.6 < wilson(1.0, 100, 0.95)[0]

    @given(st.floats(0.3, 3.0), st.integers(3, 6), st.integers(0, 1000))
    def test_turned_round_the_effect_is_the_inverse(self, gain: float, repeats: int, seed: int) -> None:
        one, other = made_pair(Noise(seed, **QUIET), gain, repeats)
        forth, back = compare(one, other).effects[0].gain, compare(other, one).effects[0].gain
        assert forth.value == pytest.approx(1 / back.value, rel=1e-6)
        assert forth.low <= forth.value <= forth.high
        assert forth.low == pytest.approx(1 / back.high, rel=0.05)
