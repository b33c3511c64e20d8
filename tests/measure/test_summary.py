"""What samples come to: rates without edges, percentiles with their numbers, the row, and what makes cells differ."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import Noise, made_cell, made_pair, made_repeat, made_sample, with_settings

from bedplate.measure.load import output_tok_s as generators_own
from bedplate.measure.summary import (
    block_rates,
    differences,
    meets,
    output_tok_s,
    result_of,
    row,
    rows,
    summarized,
    why_invalid,
)
from bedplate.values import from_json, replaced, to_json
from bedplate.values.decision import Parallelism
from bedplate.values.run import Cell, Environment, Flag, Load, Quality, Repeat, Run, Use
from bedplate.values.summary import Row, Summary
from bedplate.values.workload import LatencyTarget

FIRST_FIELDS = (
    "engine", "version", "model", "quantization", "hardware", "concurrency", "prompt_tokens", "output_tokens",
    "ttft_ms", "tok_per_s", "peak_mem_gb", "notes",
)  # fmt: skip


def closed_loop(streams: int, ttft_ms: float, step_ms: float, tokens: int, seconds: float) -> Repeat:
    """A loop that never stops, cut at any moment: its samples are those that begin within, all of them whole."""
    took_s = (ttft_ms + step_ms * (tokens - 1)) / 1000
    samples = []
    for stream in range(streams):
        at = took_s * stream / streams
        while at < seconds:
            samples.append(made_sample(at, ttft_ms, step_ms, tokens))
            at += took_s
    return made_repeat(samples, seconds=seconds)


class TestRates:
    @given(
        st.integers(1, 16), st.floats(1, 2000), st.floats(0.5, 50), st.integers(2, 64),
        st.floats(min_value=0.5, max_value=8),
    )  # fmt: skip
    def test_a_closed_loop_has_no_edges_wherever_it_is_cut(
        self, streams: int, ttft_ms: float, step_ms: float, tokens: int, cycles: float
    ) -> None:
        took_s = (ttft_ms + step_ms * (tokens - 1)) / 1000
        repeat = closed_loop(streams, ttft_ms, step_ms, tokens, took_s * cycles)
        load = Load(concurrency=streams)
        assert output_tok_s(repeat, load) == pytest.approx(streams * tokens / took_s, rel=1e-6)

    def test_what_the_generator_counted_is_believed_first_and_as_it_reads_it_itself(self) -> None:
        repeat = made_repeat([made_sample()], seconds=4.0, delivered_tokens=200.0)
        assert output_tok_s(repeat, Load(concurrency=4)) == 50.0 == generators_own(repeat)

    def test_an_open_loop_is_what_came_of_what_was_sent(self) -> None:
        repeat = made_repeat([made_sample(tokens=32), made_sample(tokens=32, outcome="error")], seconds=2.0)
        assert output_tok_s(repeat, Load(arrivals="poisson", requests_per_s=1.0)) == 16.0

    def test_tokens_that_nobody_counts_make_no_rate(self) -> None:
        cell = made_cell("x", [made_repeat([made_sample(output_tokens=None)])])
        found = summarized(cell)
        assert found.output_tok_s is None and found.interval is None and found.ttft_ms is not None
        assert row(cell).tok_per_s is None

    def test_requests_that_failed_bring_nothing_and_take_their_time(self) -> None:
        good, bad = made_sample(), made_sample(outcome="cut")
        both = summarized(made_cell("x", [made_repeat([good, bad])]))
        alone = summarized(made_cell("x", [made_repeat([good])]))
        assert both.output_tok_s is not None and alone.output_tok_s is not None
        assert both.output_tok_s == pytest.approx(alone.output_tok_s / 2)
        assert both.error_share == 0.5 and both.requests == 2 and both.ok == 1
        assert both.ttft_ms is not None and both.ttft_ms.count == 1


class TestIntervals:
    def test_over_repeats_it_is_students(self) -> None:
        repeats = [made_repeat([made_sample()], seconds=1.0, delivered_tokens=rate) for rate in (98.0, 101.0, 104.0)]
        found = summarized(made_cell("x", repeats))
        assert found.interval is not None and found.interval.over == "repeats" and found.interval.count == 3
        assert found.output_tok_s == 101.0
        assert (found.interval.low, found.interval.high) == pytest.approx((101 - 7.45, 101 + 7.45), abs=0.02)

    def test_of_one_repeat_it_is_over_blocks_of_whole_requests(self) -> None:
        cells, _ = made_pair(Noise(1), 1.0, repeats=1)
        many = Noise(2).next_repeat(1.0, 0.0, 4, requests=60)
        found = summarized(replaced(cells[0], repeats=(many,)))
        assert found.interval is not None and found.interval.over == "blocks" and found.interval.count == 15
        assert found.output_tok_s is not None and found.interval.low < found.output_tok_s < found.interval.high
        assert summarized(cells[0]).interval is None, "twelve requests are too few for blocks of four"

    def test_blocks_that_drift_are_believed_less(self) -> None:
        def half(rising: bool) -> float:
            times = [100.0 + 2 * number if rising else 100.0 + (40 if number % 2 else 0) for number in range(40)]
            samples = [made_sample(float(place), took * 0.2, took * 0.8 / 31) for place, took in enumerate(times)]
            found = summarized(made_cell("x", [made_repeat(samples)], concurrency=1)).interval
            assert found is not None
            return (found.high - found.low) / (found.high + found.low)

        assert half(rising=True) > 2 * half(rising=False)

    def test_open_loops_have_no_blocks(self) -> None:
        assert block_rates(made_repeat([made_sample()] * 50), Load(arrivals="poisson", requests_per_s=5)) == []


class TestRows:
    def test_the_row_begins_with_what_was_asked_of_it(self) -> None:
        assert Row.__struct_fields__[:12] == FIRST_FIELDS

    def test_it_goes_into_a_csv_file_and_says_what_is_odd(self) -> None:
        use = Use(peak_memory_bytes=500_000_000, peak_gpu_bytes=3_000_000_000)
        flags = (Flag(kind="busy", text="others took 20 % of the machine"),)
        cell = made_cell("x", [made_repeat([made_sample(tokens=20)], use=use)], flags=flags, notes="by hand")
        found = row(cell, "a box")
        assert found.peak_mem_gb == 0.5 and found.hardware == "a box"
        assert row(replaced(cell, subject=replaced(cell.subject, device="cuda"))).peak_mem_gb == 3.0
        assert found.notes == "others took 20 % of the machine; answers of 20 tokens where 32 were asked for; by hand"
        text = io.StringIO()
        csv.writer(text).writerow(msgspec.structs.astuple(found))
        assert from_json(Row, to_json(found)) == found and text.getvalue().startswith("x,1,SmolLM2")

    def test_a_runs_rows_carry_its_hardware(self) -> None:
        environment = Environment(bedplate="0", python="3", system="linux", hardware="two cores", machine="made-up")
        run = Run(id="r", at="", environment=environment, cells=(made_cell("x", []),))
        assert [one.hardware for one in rows(run)] == ["two cores"]

    @given(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["ok", "error", "timeout", "refused"]))
    def test_whatever_is_missing_nothing_breaks(self, repeats: int, samples: int, outcome: str) -> None:
        sample = made_sample(outcome=outcome)
        sample = replaced(sample, ttft_ms=None, output_tokens=None) if outcome == "refused" else sample
        cell = made_cell("x", [made_repeat([sample] * samples) for _ in range(repeats)])
        found = summarized(cell)
        assert from_json(Summary, to_json(found)) == found
        assert row(cell).valid == (outcome == "ok" and repeats * samples > 0)


class TestTargets:
    def test_in_time_is_both_times_and_no_failure(self) -> None:
        target = LatencyTarget(ttft_ms=100, tpot_ms=10)
        assert meets(made_sample(), target) and not meets(made_sample(ttft_ms=101), target)
        assert not meets(made_sample(step_ms=11), target) and not meets(made_sample(outcome="cut"), target)
        assert meets(made_sample(tokens=1), target)


def whole(engine: str = "x", **other: object) -> Cell:
    return made_cell(engine, [made_repeat([made_sample()])], **other)  # type: ignore[arg-type]


class TestDifferences:
    def test_two_engines_alone_are_no_difference(self) -> None:
        found = differences(whole("x"), whole("y"))
        assert not found.meaningless and not found.printed

    @pytest.mark.parametrize(
        "change",
        [
            {"machine": "another"},
            {"load": Load(concurrency=8, prompt_tokens=64, output_tokens=32)},
            {"load": Load(concurrency=4, prompt_tokens=64, output_tokens=33)},
            {"load": Load(concurrency=4, prompt_tokens=64, output_tokens=32, shared_prefix_tokens=16)},
            {"load": Load(arrivals="poisson", requests_per_s=2, prompt_tokens=64, output_tokens=32)},
            {"repeats": (made_repeat([made_sample(tokens=20)]),)},
            {"repeats": (made_repeat([made_sample(cached_tokens=32)]),)},
            {"repeats": (made_repeat([made_sample()], warmup=0),)},
        ],
    )
    def test_other_work_is_not_compared(self, change: dict[str, object]) -> None:
        assert differences(whole(), replaced(whole(), **change)).meaningless

    @pytest.mark.parametrize(
        "load",
        [
            Load(concurrency=4, prompt_tokens=64, output_tokens=32, shared_prefix_tokens=32),
            Load(arrivals="replay", requests_per_s=2, trace="chat", prompt_tokens=64, output_tokens=32),
        ],
    )
    def test_what_a_cache_brings_counts_where_the_work_repeats_itself(self, load: Load) -> None:
        one = replaced(whole("x"), load=load)
        other = replaced(whole("y"), load=load, repeats=(made_repeat([made_sample(cached_tokens=32)]),))
        found = differences(one, other)
        assert not found.meaningless and [each.what for each in found.printed] == ["prompt tokens from a cache"]

    def test_other_weights_are_not_compared_unless_they_are_made_of_the_same(self) -> None:
        one = whole()

        def stored(label: str, weights: str | None) -> Cell:
            return replaced(one, subject=replaced(one.subject, quantization=label, weights_id=weights))

        assert [each.what for each in differences(one, stored("BF16", None)).meaningless] == ["quantization"]
        assert [each.what for each in differences(stored("Q4_1", "a"), stored("Q4_1", "b")).meaningless] == ["weights"]
        same = differences(stored("Q4_1", "a"), stored("BF16", "a"))
        assert not same.meaningless and [each.what for each in same.printed] == ["quantization"]

    def test_settings_and_layouts_are_printed(self) -> None:
        one, other = with_settings(whole()), with_settings(whole(), slots=4, kv_type="fp8")
        other = replaced(other, subject=replaced(other.subject, parallelism=Parallelism(tensor=2)))
        found = differences(one, other)
        assert not found.meaningless and [each.what for each in found.printed] == ["layout", "slots", "cache type"]

    def test_a_tokens_difference_in_length_is_printed_and_a_tenth_is_refused(self) -> None:
        slightly = replaced(whole(), repeats=(made_repeat([made_sample(tokens=30)]),))
        assert [each.what for each in differences(whole(), slightly).printed] == ["output tokens, as counted"]


class TestEvidence:
    def test_a_cell_becomes_a_result_that_plans_read(self) -> None:
        cell = made_cell("vllm", [made_repeat([made_sample()], seconds=1.0, delivered_tokens=90.0)])
        found = result_of(cell)
        assert found is not None and found.engine == "vllm" and found.output_tok_s == 90 and found.quality == 0.98
        assert (found.ttft_ms, found.concurrency, found.machine) == (100.0, 4, "made-up")

    @pytest.mark.parametrize(
        "cell",
        [
            replaced(whole(), flags=(Flag(kind="client", text="the client was busy", invalid=True),)),
            replaced(whole(), repeats=()),
            replaced(whole(), load=Load(arrivals="poisson", requests_per_s=2)),
        ],
    )
    def test_nothing_is_learnt_from_cells_that_say_nothing(self, cell: Cell) -> None:
        assert result_of(cell) is None

    def test_broken_answers_are_no_quality_at_all(self) -> None:
        cell = replaced(whole(), quality=Quality(asked=10, agreement=0.97, verdict="broken"))
        found = result_of(cell)
        assert found is not None and found.quality == 0.0
        unchecked = result_of(replaced(cell, quality=Quality()))
        assert unchecked is not None and unchecked.quality is None

    def test_a_client_that_was_the_limit_is_said(self) -> None:
        busy = replaced(whole().repeats[0], client=replaced(whole().repeats[0].client, limit=True))
        assert why_invalid(replaced(whole(), repeats=(busy,))) == ("the client was the limit",)
