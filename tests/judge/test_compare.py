"""Stay, migrate or not proven: error rates, the decision rules, and which cells are comparable."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import GOOD, Noise, make_cell, make_pair, make_repeat, make_sample, with_settings

from bedplate.changing.gate import ROUNDS
from bedplate.decide.evidence import PROVEN_GAIN
from bedplate.errors import UsageError
from bedplate.judge.compare import compare
from bedplate.judge.effect import compute_repeats_needed, pair_rounds
from bedplate.measure.statistics import compute_wilson_interval
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.run import Cell, Flag, Load, Quality, Repeat, ResourceUse, Sample, Subject
from bedplate.values.structured import StructuredAnswer, StructuredOutput, StructuredSupport, Support
from bedplate.values.verdict import MetricName, Verdict
from bedplate.values.workload import LatencyTarget

"""What `bedplate gate` measures by default."""
QUIET = {"request": 0.03, "repeat": 0.008, "drift": 0.01}


def pair(gain: float, repeats: int = 5, loads: tuple[int, ...] = (4,), seed: int = 7) -> tuple[list[Cell], list[Cell]]:
    return make_pair(Noise(seed, **QUIET), gain, repeats, loads)


def with_structured(matched: list[bool], prompts: str = "aaaa", support: Support = "enforced") -> Quality:
    """`support`: of JSON schemas. All answers are those to tools."""
    answers = tuple(
        StructuredAnswer(prompt=f"p{number}", kind="tool_auto", matched=one) for number, one in enumerate(matched)
    )
    reason = "a control request was answered with free text" if support == "ignored" else None
    kinds = (
        StructuredSupport(kind="json_schema", support=support, reason=reason),
        StructuredSupport(kind="tool_auto", support="accepted", asked=len(matched)),
    )
    found = StructuredOutput(asked=len(matched), matched=sum(matched), prompts=prompts, kinds=kinds, answers=answers)
    return replace_fields(GOOD, structured=found)


def change_cells(cells: list[Cell], **changes: object) -> list[Cell]:
    return [replace_fields(cell, **changes) for cell in cells]


def change_repeats(cells: list[Cell], change: Callable[[Repeat], Repeat]) -> list[Cell]:
    return [replace_fields(cell, repeats=tuple(map(change, cell.repeats))) for cell in cells]


def change_samples(cells: list[Cell], change: Callable[[int, Sample], Sample]) -> list[Cell]:
    return change_repeats(
        cells, lambda repeat: replace_fields(repeat, samples=tuple(change(*one) for one in enumerate(repeat.samples)))
    )


class TestPower:
    """Single repeats vary by 5 %, with heavy tails and drift."""

    def count_answers(
        self, gain: float, times: int, seed: int, loads: tuple[int, ...] = (4,)
    ) -> collections.Counter[str]:
        noise = Noise(seed, request=0.06, repeat=0.02, drift=0.02)
        return collections.Counter(compare(*make_pair(noise, gain, 5, loads)).answer for _ in range(times))

    def test_of_200_pairs_of_the_same_engine_few_say_migrate_or_raise_an_alarm(self) -> None:
        found = self.count_codes(1.0, 200, seed=11)
        assert found[10] <= 5 and found[30] + found[10] <= 10

    def test_four_loads_of_the_same_engine_rarely_say_migrate(self) -> None:
        assert self.count_answers(1.0, 25, seed=2, loads=(1, 4, 8, 16))["migrate"] <= 1

    def test_a_gain_of_15_percent_is_found_at_least_8_times_in_10(self) -> None:
        found = self.count_answers(1.15, 50, seed=3)
        assert found["migrate"] >= 40 and found["stay"] == 0

    def test_a_gain_of_15_percent_is_found_over_four_loads(self) -> None:
        assert self.count_answers(1.15, 15, seed=4, loads=(1, 4, 8, 16))["migrate"] >= 12

    def test_identical_requests_on_both_sides_rarely_say_migrate(self) -> None:
        noise = Noise(6, request=0.06, repeat=0.02, drift=0.02)
        pairs = [make_pair(noise, 1.0, 3, (4,)) for _ in range(120)]
        assert sum(compare(a, b, least_gain=1.03, same_work=True).answer == "migrate" for a, b in pairs) <= 3

    def count_codes(self, gain: float, times: int, seed: int, repeats: int = 5) -> collections.Counter[int]:
        noise = Noise(seed, request=0.06, repeat=0.02, drift=0.02)
        return collections.Counter(compare(*make_pair(noise, gain, repeats, (4,))).exit_code for _ in range(times))

    def test_a_loss_of_10_percent_is_found_at_least_8_times_in_10(self) -> None:
        assert self.count_codes(0.9, 30, seed=12, repeats=ROUNDS)[30] >= 24

    def test_a_loss_of_15_percent_never_says_migrate(self) -> None:
        found = self.count_answers(1 / 1.15, 30, seed=5)
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

    def test_a_gain_below_the_cost_of_moving_says_stay(self) -> None:
        verdict = compare(*pair(1.04, repeats=8))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("stay", "moving costs", 0)
        assert verdict.least_gain == PROVEN_GAIN and "10 %" in verdict.text

    def test_a_small_gain_says_migrate_if_moving_costs_less(self) -> None:
        assert compare(*pair(1.04, repeats=8), least_gain=1.02).answer == "migrate"

    def test_a_loss_says_stay(self) -> None:
        verdict = compare(*pair(0.8))
        assert (verdict.answer, verdict.constraint) == ("stay", "throughput") and "slower" in verdict.text

    def test_noise_says_not_proven_and_how_many_repeats_are_needed(self) -> None:
        verdict = compare(*make_pair(Noise(3, repeat=0.12, drift=0.0), 1.12, 4))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("not proven", "noise", 20)
        assert verdict.would_prove is not None and "repeats of each with 4 in flight" in verdict.would_prove

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_fewer_than_three_repeats_prove_nothing(self, repeats: int) -> None:
        verdict = compare(*pair(2.0, repeats))
        assert verdict.answer == "not proven" and verdict.would_prove is not None
        assert f"instead of {repeats}" in verdict.would_prove

    def test_repeats_that_were_not_interleaved_have_wider_intervals(self) -> None:
        one, other = pair(1.3)
        later = change_repeats(other, lambda repeat: replace_fields(repeat, at=f"2026-11-16T{(repeat.at or '')[11:]}"))
        turns, apart = compare(one, other).effects[0], compare(one, later).effects[0]
        another_run = compare(one, change_cells(later, run="another")).effects[0]
        assert turns.paired and not apart.paired and not another_run.paired
        widths = [math.log(each.gain.high / each.gain.low) for each in (turns, apart, another_run)]
        assert widths == sorted(widths) and widths[0] < widths[1] < widths[2]

    def test_opposite_results_at_two_loads_say_not_proven(self) -> None:
        (one,), (other,) = pair(1.3, loads=(1,))
        (many,), (slower,) = pair(0.7, loads=(16,))
        verdict = compare([one, many], [other, slower])
        assert (verdict.answer, verdict.constraint) == ("not proven", "load") and "--concurrency" in str(
            verdict.would_prove
        )
        assert compare([one], [other]).answer == "migrate"

    def test_an_unproven_gain_does_not_hide_a_loss_under_another_load(self) -> None:
        (one,), (other,) = pair(1.4, 1, loads=(1,))
        (many,), (slower,) = pair(0.4, 1, loads=(16,))
        verdict = compare([one, many], [other, slower])
        assert verdict.answer == "not proven" and "only 1 repeat" in verdict.text
        assert re.search(r"\d+ % faster with 1 request at a time .*, but \d+ % slower with 16 in flight", verdict.text)

    def test_an_open_loop_is_compared_by_request_time(self) -> None:
        load = Load(arrivals="poisson", requests_per_s=3, prompt_tokens=64, output_tokens=32)
        one, other = pair(1.3)
        verdict = compare(change_cells(one, load=load), change_cells(other, load=load))
        assert verdict.effects[0].metric == "e2e_ms" and verdict.answer == "migrate"

    def test_a_verdict_is_deterministic_and_round_trips_as_json(self) -> None:
        one, other = pair(1.1)
        verdict = compare(one, other)
        assert from_json(Verdict, to_json(verdict)) == verdict == compare(one, other)


class TestWorse:
    """Exit code 30: significantly worse than the baseline, by more than the tolerance."""

    def test_a_loss_beyond_the_tolerance_is_worse(self) -> None:
        verdict = compare(*pair(0.9))
        assert (verdict.answer, verdict.exit_code, verdict.tolerance) == ("stay", 30, 0.05)
        assert verdict.worse is not None and "with 4 in flight: 7.9 % worse" in verdict.worse

    def test_a_loss_within_the_tolerance_is_not_worse(self) -> None:
        assert compare(*pair(0.97, repeats=8)).exit_code == 0
        assert compare(*pair(0.9), tolerance=0.2).exit_code == 0
        assert compare(*pair(0.94, repeats=8)).exit_code == 0
        assert compare(*pair(0.94, repeats=8), tolerance=0.01).exit_code == 30

    def test_a_loss_that_may_be_noise_is_not_worse(self) -> None:
        assert compare(*make_pair(Noise(3, repeat=0.2, drift=0.0), 0.9, 4)).worse is None

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_fewer_than_three_repeats_are_not_worse(self, repeats: int) -> None:
        assert compare(*pair(0.3, repeats)).worse is None

    def test_worse_takes_precedence_over_a_gain_under_another_load(self) -> None:
        (one,), (other,) = pair(1.5, loads=(1,))
        (many,), (slower,) = pair(0.92, loads=(16,), repeats=8)
        verdict = compare([one, many], [other, slower])
        assert (verdict.answer, verdict.exit_code) == ("not proven", 30)
        assert verdict.worse is not None and "16 in flight" in verdict.worse

    def test_worse_answers_errors_and_missed_targets_are_worse(self) -> None:
        one, other = pair(1.3)
        broken = compare(one, change_cells(other, quality=Quality(asked=100, agreement=0.1, verdict="broken")))
        assert broken.exit_code == 30 and broken.worse == broken.text
        failing = change_samples(
            other, lambda at, sample: replace_fields(sample, outcome="error") if at < 3 else sample
        )
        assert compare(one, failing).exit_code == 30
        late = compare([make_timed_cell("one", 150)], [make_timed_cell("other", 300)], target=TestTargets.TARGET)
        assert (late.constraint, late.exit_code) == ("latency", 30)

    def test_a_baseline_with_wrong_answers_has_no_speed_to_lose(self) -> None:
        one, other = pair(0.5)
        verdict = compare(change_cells(one, quality=Quality(asked=100, agreement=0.1, verdict="broken")), other)
        assert (verdict.answer, verdict.exit_code) == ("migrate", 10)


class TestMetrics:
    """A comparison by chosen metrics."""

    @pytest.mark.parametrize(("metric", "named"), [("ttft_p95", "ttft_p95_ms"), ("tpot_p95", "tpot_p95_ms")])
    def test_95th_percentiles_are_compared_over_all_requests(self, metric: MetricName, named: str) -> None:
        verdict = compare(*pair(0.5, repeats=8), metrics=(metric,))
        (effect,) = [one for one in verdict.effects if one.metric == named]
        assert effect.paired and effect.gain.low < effect.gain.value < effect.gain.high
        assert effect.gain.value == pytest.approx(0.5, rel=0.25) and effect.b > effect.a
        assert (verdict.exit_code, verdict.constraint, verdict.metrics) == (30, "latency", (metric,))
        assert compare(*pair(2.0, repeats=8), metrics=(metric,)).exit_code == 10
        assert compare(*pair(1.0), metrics=(metric,)).exit_code in (0, 20)

    def test_a_slow_tail_is_found_where_the_median_is_equal(self) -> None:
        one, other = pair(1.0, repeats=8)
        late = change_samples(other, lambda at, sample: replace_fields(sample, ttft_ms=600.0) if at < 2 else sample)
        assert compare(one, late).worse is None
        assert compare(one, late, metrics=("ttft_p95",)).exit_code == 30

    def test_few_requests_have_no_95th_percentile(self) -> None:
        sides = [change_repeats(side, lambda one: replace_fields(one, samples=one.samples[:3])) for side in pair(0.7)]
        verdict = compare(*sides, metrics=("ttft_p95",))
        assert (verdict.answer, verdict.exit_code) == ("not proven", 20) and "fewer than 20 requests" in verdict.text

    @pytest.mark.parametrize(("factor", "code"), [(1.2, 30), (1.02, 0), (0.8, 10)])
    def test_peak_memory(self, factor: float, code: int) -> None:
        one, other = (
            change_repeats(
                side,
                lambda repeat, peak=peak: replace_fields(repeat, use=ResourceUse(peak_memory_bytes=round(peak))),  # type: ignore[misc]
            )
            for side, peak in zip(pair(1.0), (1e9, 1e9 * factor), strict=True)
        )
        verdict = compare(one, other, metrics=("peak_memory",))
        assert verdict.exit_code == code
        assert compare(one, change_repeats(other, lambda each: replace_fields(each, use=ResourceUse())),
                       metrics=("peak_memory",)).exit_code == 20  # fmt: skip

    @pytest.mark.parametrize(("agreement", "code"), [(0.98, 0), (0.95, 0), (0.85, 30)])
    def test_quality_is_compared_within_the_tolerance(self, agreement: float, code: int) -> None:
        one, other = pair(0.5)
        changed = change_cells(other, quality=replace_fields(GOOD, asked=400, agreement=agreement))
        verdict = compare(change_cells(one, quality=replace_fields(GOOD, asked=400)), changed, metrics=("quality",))
        assert verdict.exit_code == code, verdict.text

    def test_structured_output_is_compared_where_both_have_a_result(self) -> None:
        one, other = pair(1.0)
        good, bad = (replace_fields(GOOD, structured=StructuredOutput(asked=100, matched=n)) for n in (97, 60))
        verdict = compare(change_cells(one, quality=good), change_cells(other, quality=bad), metrics=("schema",))
        assert verdict.exit_code == 30 and "structured output 60.0% instead of 97.0%" in str(verdict.worse)
        missing = compare(change_cells(one, quality=good), other, metrics=("schema",))
        assert (missing.answer, missing.exit_code) == ("not proven", 20) and "no result for structured" in missing.text

    @pytest.mark.parametrize(("lost", "code"), [(0, 0), (2, 0), (20, 30)])
    def test_structured_output_is_compared_prompt_by_prompt(self, lost: int, code: int) -> None:
        one, other = pair(1.0)
        verdict = compare(
            change_cells(one, quality=with_structured([True] * 80 + [False] * 20)),
            change_cells(other, quality=with_structured([False] * lost + [True] * (80 - lost) + [False] * 20)),
            metrics=("schema",),
        )
        assert verdict.exit_code == code, verdict.text
        (effect,) = [each for each in verdict.effects if each.metric == "schema_match"]
        assert effect.repeats == (100, 100) and effect.gain.value == pytest.approx(1 - lost / 80)
        if lost == 0:
            assert 0.95 < effect.gain.low < 1 < effect.gain.high < 1.05, "the same answers are equivalent"

    def test_other_prompts_are_not_compared(self) -> None:
        one, other = pair(1.0)
        changed = with_structured([True] * 9, prompts="bbbb")
        verdict = compare(change_cells(one, quality=with_structured([True] * 9)), change_cells(other, quality=changed),
                          metrics=("schema",))  # fmt: skip
        assert verdict.exit_code == 20 and "with the same prompts" in verdict.text

    def test_an_engine_that_ignores_schemas_is_worse(self) -> None:
        one, other = pair(3.0)
        good, ignoring = with_structured([True] * 40), with_structured([True] * 40, support="ignored")
        verdict = compare(change_cells(one, quality=good), change_cells(other, quality=ignoring), metrics=("schema",))
        assert (verdict.answer, verdict.constraint, verdict.exit_code) == ("stay", "quality", 30)
        assert "does not support JSON schemas, and" in str(verdict.worse) and "free text" in verdict.text
        back = compare(change_cells(one, quality=ignoring), change_cells(other, quality=good), metrics=("schema",))
        assert back.exit_code == 10 and "supports JSON schemas" in back.text
        assert compare(change_cells(one, quality=good), change_cells(other, quality=ignoring)).worse is None

    def test_several_metrics_share_the_error_probability(self) -> None:
        one, other = pair(1.0)
        alone, both = (
            next(effect for effect in compare(one, other, metrics=names).effects if effect.metric == "output_tok_s")
            for names in (("tok_s",), ("tok_s", "ttft_p95"))
        )
        assert both.sure_low < alone.sure_low and both.gain == alone.gain

    def test_errors_count_whatever_the_metric_is(self) -> None:
        one, other = pair(1.5)
        failing = change_samples(
            other, lambda at, sample: replace_fields(sample, outcome="error") if at < 3 else sample
        )
        assert compare(one, failing, metrics=("tok_s",)).constraint == "errors"


class TestQualityAndErrors:
    def test_broken_answers_say_stay(self) -> None:
        one, other = pair(3.0)
        broken = Quality(asked=100, agreement=0.1, verdict="broken", note="text is garbled")
        verdict = compare(one, change_cells(other, quality=broken))
        assert (verdict.answer, verdict.constraint) == ("stay", "quality") and "garbled" in verdict.text

    def test_broken_answers_in_service_say_migrate(self) -> None:
        one, other = pair(0.9)
        verdict = compare(change_cells(one, quality=Quality(asked=100, agreement=0.1, verdict="broken")), other)
        assert (verdict.answer, verdict.constraint) == ("migrate", "quality")

    @pytest.mark.parametrize("quality", [None, Quality()])
    def test_unchecked_answers_never_say_migrate(self, quality: Quality | None) -> None:
        one, other = pair(1.3)
        verdict = compare(one, change_cells(other, quality=quality))
        assert (verdict.answer, verdict.constraint) == ("not proven", "quality")
        slower_one, slower = pair(0.8)
        assert compare(slower_one, change_cells(slower, quality=quality)).answer == "stay"

    def test_worse_answers_outweigh_speed(self) -> None:
        one, other = pair(1.3)
        worse = Quality(asked=200, agreement=0.8, verdict="ok")
        assert compare(one, change_cells(other, quality=worse)).constraint == "quality"
        as_good = Quality(asked=200, agreement=0.96, verdict="ok")
        assert compare(one, change_cells(other, quality=as_good)).answer == "migrate"

    @pytest.mark.parametrize(
        ("mine", "theirs", "answer"),
        [
            ((20.0, 19.8), (24.0, 19.8), "stay"),
            ((14.2, 13.9), (25.4, 25.3), "migrate"),  # one endpoint scores single words, the other the whole text
            ((20.0, None), (24.0, None), "migrate"),  # it is unknown whether they are for the same text
        ],
    )
    def test_perplexity_is_compared_relative_to_its_reference(
        self, mine: tuple[float, float | None], theirs: tuple[float, float | None], answer: str
    ) -> None:
        one, other = pair(1.3)
        words, more = (replace_fields(GOOD, perplexity=own, reference_perplexity=ref) for own, ref in (mine, theirs))
        assert compare(change_cells(one, quality=words), change_cells(other, quality=more)).answer == answer

    def test_failed_requests_outweigh_speed(self) -> None:
        one, other = pair(1.5)
        failing = change_samples(
            other, lambda place, sample: replace_fields(sample, outcome="error") if place < 3 else sample
        )
        verdict = compare(one, failing)
        assert (verdict.answer, verdict.constraint) == ("stay", "errors") and "15 of 60 requests" in verdict.text

    def test_a_later_first_token_needs_a_latency_target(self) -> None:
        one, other = pair(1.3)
        later = change_samples(other, lambda _, sample: replace_fields(sample, ttft_ms=2 * (sample.ttft_ms or 0.0)))
        verdict = compare(one, later)
        assert (verdict.answer, verdict.constraint) == ("not proven", "latency") and "its TTFT is" in verdict.text
        assert compare(one, later, target=LatencyTarget(ttft_ms=1000)).answer == "migrate"


def make_timed_cell(engine: str, ttft_ms: float, step_ms: float = 10.0, late: int = 0, concurrency: int = 4) -> Cell:
    """Three repeats of forty requests; of each, `late` come after a second."""
    repeats: list[Repeat] = []
    for number in range(3):
        samples = [make_sample(0.1 * place, ttft_ms * (1 + place / 400), step_ms) for place in range(40 - late)]
        samples += [make_sample(9.0, 1000.0, step_ms) for _ in range(late)]
        repeats.append(make_repeat(samples, 8.0 * number + (4 if engine == "other" else 0)))
    return make_cell(engine, repeats, concurrency)


class TestTargets:
    TARGET = LatencyTarget(ttft_ms=200)

    def test_only_the_challenger_meets_the_target(self) -> None:
        verdict = compare([make_timed_cell("one", 300)], [make_timed_cell("other", 150)], target=self.TARGET)
        assert (verdict.answer, verdict.constraint) == ("migrate", "latency") and "Only other" in verdict.text
        assert verdict.on_target[0].a.value == 0 and verdict.on_target[0].b.value == 1

    def test_only_the_incumbent_meets_the_target(self) -> None:
        verdict = compare(
            [make_timed_cell("one", 150)], [make_timed_cell("other", 300, step_ms=1.0)], target=self.TARGET
        )
        assert (verdict.answer, verdict.constraint) == ("stay", "latency")

    def test_speed_decides_if_both_meet_the_target(self) -> None:
        verdict = compare(
            [make_timed_cell("one", 150)], [make_timed_cell("other", 140, step_ms=5.0)], target=self.TARGET
        )
        assert (verdict.answer, verdict.constraint) == ("migrate", "throughput") and "Both meet" in verdict.text

    def test_neither_meets_the_target(self) -> None:
        verdict = compare(
            [make_timed_cell("one", 300)], [make_timed_cell("other", 250, step_ms=1.0)], target=self.TARGET
        )
        assert (verdict.answer, verdict.constraint) == ("not proven", "latency") and "Neither" in verdict.text

    def test_too_few_requests_to_decide_whether_the_target_is_met(self) -> None:
        verdict = compare(
            [make_timed_cell("one", 150, late=4)], [make_timed_cell("other", 150, late=3)], target=self.TARGET
        )
        assert (verdict.answer, verdict.constraint) == ("not proven", "noise") and "Too few requests" in verdict.text

    def test_each_side_meets_the_target_at_another_load(self) -> None:
        one = [make_timed_cell("one", 150, concurrency=1), make_timed_cell("one", 300, concurrency=8)]
        other = [make_timed_cell("other", 300, concurrency=1), make_timed_cell("other", 150, concurrency=8)]
        assert compare(one, other, target=self.TARGET).constraint == "load"


class TestComparableCells:
    def test_invalid_cells_are_left_out_with_the_reason(self) -> None:
        one, other = pair(1.3, loads=(1, 4))
        spoilt = replace_fields(
            other[1], flags=(Flag(kind="client", text="the client was the bottleneck", invalid=True),)
        )
        verdict = compare(one, [other[0], spoilt])
        assert [effect.load.concurrency for effect in verdict.effects if effect.metric == "output_tok_s"] == [1]
        assert verdict.left_out == ("other, 4 in flight, 64 + 32 tokens: the client was the bottleneck",)
        with pytest.raises(UsageError, match="B has no valid cell") as caught:
            compare(one[1:], [spoilt])
        assert caught.value.cause is not None and "the client was the bottleneck" in caught.value.cause

    def test_rejects_another_model(self) -> None:
        one, other = pair(1.3)
        another = [replace_fields(cell, subject=replace_fields(cell.subject, model="another")) for cell in other]
        with pytest.raises(UsageError, match="not comparable") as caught:
            compare(one, another)
        assert caught.value.cause == "model: SmolLM2-135M-Instruct and another"

    def test_rejects_other_weights_unless_allowed(self) -> None:
        one, other = pair(1.3)
        stored = [replace_fields(cell, subject=replace_fields(cell.subject, quantization="Q8_0")) for cell in other]
        with pytest.raises(UsageError, match="not comparable") as caught:
            compare(one, stored)
        assert caught.value.hint is not None and "--allow quantization" in caught.value.hint
        verdict = compare(one, stored, allow=("quantization",))
        assert verdict.answer == "migrate" and [each.what for each in verdict.differences] == ["quantization"]
        with pytest.raises(UsageError, match="--allow model: cells with this difference cannot be compared"):
            compare(one, stored, allow=("model",))

    def test_rejects_sides_without_a_common_load(self) -> None:
        one, other = pair(1.3, loads=(1,))[0], pair(1.3, loads=(4,))[1]
        with pytest.raises(UsageError, match="no load in common") as caught:
            compare(one, other)
        assert "1 request at a time" in str(caught.value.cause) and "4 in flight" in str(caught.value.cause)

    @pytest.mark.parametrize("empty", [0, 1])
    def test_rejects_a_side_without_cells(self, empty: int) -> None:
        sides = list(pair(1.3))
        sides[empty] = []
        with pytest.raises(UsageError, match=f"{'AB'[empty]} has no valid cell"):
            compare(*sides)

    def test_prefers_the_run_with_both_sides(self) -> None:
        one, other = pair(1.3)
        newer = change_cells(other, run="later", at="2026-11-16T00:00:00Z", id="newer")
        verdict = compare(one, [*other, *newer])
        assert verdict.b.runs == ("made",) and verdict.effects[0].paired

    def test_prefers_the_quantization_measured_on_both_sides(self) -> None:
        one, other = pair(1.3)
        newer = [
            replace_fields(
                cell, id="wide", at="2026-11-16T00:00:00Z", subject=replace_fields(cell.subject, quantization="BF16")
            )
            for cell in other
        ]
        verdict = compare(one, [*other, *newer])
        assert verdict.b.quantization == "Q4_1" and verdict.effects[0].paired

    def test_rejects_comparing_a_cell_with_itself(self) -> None:
        one, _ = pair(1.0)
        with pytest.raises(UsageError):
            compare(one, one)

    def test_lists_each_difference_once(self) -> None:
        one, other = pair(1.3, loads=(1, 4))
        verdict = compare([with_settings(cell) for cell in one], [with_settings(cell, slots=4) for cell in other])
        assert [(each.what, each.a, each.b) for each in verdict.differences] == [("slots", "16", "4")]


class TestCosts:
    def test_a_verdict_contains_the_costs_of_both_sides(self) -> None:
        one, other = pair(1.3)
        base = Subject(engine="llama.cpp", model=one[0].subject.model, quantization="Q4_1", weights_id="w")
        native = replace_fields(base, build="native")
        folder = replace_fields(base, engine="vllm", quantization="BF16", start_s=40.0, install_bytes=4_100_000_000)
        verdict = compare(change_cells(one, subject=native), change_cells(other, subject=folder))
        assert verdict.b.cost.install_bytes == 4_100_000_000 and verdict.b.cost.start_s == 40.0
        assert verdict.b.cost.steps == ("weights converted to BF16",)
        assert verdict.a.cost.steps == ("compiled from source on this machine",)
        assert (verdict.a.cost.effort or 0) < (verdict.b.cost.effort or 0)


class TestInterleavedRounds:
    def count_rounds(self, text: str) -> int:
        moments: dict[str, list[str | None]] = {"A": [], "B": []}
        for second, side in enumerate(text):
            moments[side].append(f"2026-11-15T09:00:{second:02d}.000Z")
        return len(pair_rounds(moments["A"], moments["B"]))

    def test_pairs_neighbours_in_either_order(self) -> None:
        assert self.count_rounds("ABABAB") == self.count_rounds("ABBAAB") == 3
        assert self.count_rounds("ABABABBB") == 3, "surplus repeats are not paired"
        assert self.count_rounds("AABBAABBAABB") == 3, "consecutive repeats of one side form one round"

    def test_sequential_sides_are_not_interleaved(self) -> None:
        assert (
            self.count_rounds("AAAABBBB")
            == self.count_rounds("AB")
            == self.count_rounds("")
            == self.count_rounds("AABB")
            == 0
        )

    def test_repeats_without_start_times_are_not_interleaved(self) -> None:
        assert pair_rounds([None, None, None], ["a", "b", "c"]) == []


class TestSameWork:
    """Four concurrent prompts are prefilled one after the other, so their TTFTs differ by position, not at random."""

    def test_only_the_variation_between_rounds_counts(self) -> None:
        a, b = pair(1.0, repeats=3)
        a = change_samples(a, lambda number, sample: replace_fields(sample, ttft_ms=(1 + number % 4) * 1000))
        b = change_samples(b, lambda number, sample: replace_fields(sample, ttft_ms=(1 + number % 4) * 500))
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
        few, more = compute_repeats_needed(noise, distance, 0.95), compute_repeats_needed(noise * 2, distance, 0.95)
        assert few is None or few >= 3
        assert more is None or (few is not None and few <= more)

    @given(st.integers(0, 200), st.integers(1, 200))
    def test_a_share_lies_within_its_interval(self, hits: int, count: int) -> None:
        share = min(hits, count) / count
        low, high = compute_wilson_interval(share, count, 0.95)
        assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1

    def test_a_share_of_one_from_few_requests_is_uncertain(self) -> None:
        assert compute_wilson_interval(1.0, 5, 0.95)[0] < 0.6 < compute_wilson_interval(1.0, 100, 0.95)[0]

    @given(st.floats(0.3, 3.0), st.integers(3, 6), st.integers(0, 1000))
    def test_swapping_the_sides_inverts_the_effect(self, gain: float, repeats: int, seed: int) -> None:
        one, other = make_pair(Noise(seed, **QUIET), gain, repeats)
        forth, back = compare(one, other).effects[0].gain, compare(other, one).effects[0].gain
        assert forth.value == pytest.approx(1 / back.value, rel=1e-6)
        assert forth.low <= forth.value <= forth.high
        assert forth.low == pytest.approx(1 / back.high, rel=0.05)
