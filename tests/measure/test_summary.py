"""Summaries of cells: rates, intervals, rows, and differences between cells."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import Noise, make_cell, make_pair, make_repeat, make_sample, with_settings

from bedplate.measure.load import compute_delivered_tok_s as generator_tok_s
from bedplate.measure.summary import (
    compute_block_rates,
    compute_output_tok_s,
    list_differences,
    list_invalid_reasons,
    make_result,
    make_row,
    make_rows,
    meets,
    summarize_cell,
)
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.decision import Parallelism
from bedplate.values.run import Cell, Flag, Load, Quality, Repeat, ResourceUse, Run, RunEnvironment
from bedplate.values.summary import BenchRow, Summary
from bedplate.values.workload import LatencyTarget

FIRST_FIELDS = (
    "engine", "version", "model", "quantization", "hardware", "concurrency", "prompt_tokens", "output_tokens",
    "ttft_ms", "tok_per_s", "peak_mem_gb", "notes",
)  # fmt: skip


def make_closed_loop(streams: int, ttft_ms: float, step_ms: float, tokens: int, seconds: float) -> Repeat:
    """A closed loop: the samples are the requests that begin within the window, all of them complete."""
    took_s = (ttft_ms + step_ms * (tokens - 1)) / 1000
    samples = []
    for stream in range(streams):
        at = took_s * stream / streams
        while at < seconds:
            samples.append(make_sample(at, ttft_ms, step_ms, tokens))
            at += took_s
    return make_repeat(samples, seconds=seconds)


class TestRates:
    @given(
        st.integers(1, 16), st.floats(1, 2000), st.floats(0.5, 50), st.integers(2, 64),
        st.floats(min_value=0.5, max_value=8),
    )  # fmt: skip
    def test_the_rate_of_a_closed_loop_does_not_depend_on_the_window(
        self, streams: int, ttft_ms: float, step_ms: float, tokens: int, cycles: float
    ) -> None:
        took_s = (ttft_ms + step_ms * (tokens - 1)) / 1000
        repeat = make_closed_loop(streams, ttft_ms, step_ms, tokens, took_s * cycles)
        load = Load(concurrency=streams)
        assert compute_output_tok_s(repeat, load) == pytest.approx(streams * tokens / took_s, rel=1e-6)

    def test_prefers_the_token_count_of_the_generator(self) -> None:
        repeat = make_repeat([make_sample()], seconds=4.0, delivered_tokens=200.0)
        assert compute_output_tok_s(repeat, Load(concurrency=4)) == 50.0 == generator_tok_s(repeat)

    def test_the_rate_of_an_open_loop_counts_successful_requests(self) -> None:
        repeat = make_repeat([make_sample(tokens=32), make_sample(tokens=32, outcome="error")], seconds=2.0)
        assert compute_output_tok_s(repeat, Load(arrivals="poisson", requests_per_s=1.0)) == 16.0

    def test_no_rate_without_token_counts(self) -> None:
        cell = make_cell("x", [make_repeat([make_sample(output_tokens=None)])])
        found = summarize_cell(cell)
        assert found.output_tok_s is None and found.interval is None and found.ttft_ms is not None
        assert make_row(cell).tok_per_s is None

    def test_failed_requests_count_time_but_no_tokens(self) -> None:
        good, bad = make_sample(), make_sample(outcome="cut")
        both = summarize_cell(make_cell("x", [make_repeat([good, bad])]))
        alone = summarize_cell(make_cell("x", [make_repeat([good])]))
        assert both.output_tok_s is not None and alone.output_tok_s is not None
        assert both.output_tok_s == pytest.approx(alone.output_tok_s / 2)
        assert both.error_share == 0.5 and both.requests == 2 and both.ok == 1
        assert both.ttft_ms is not None and both.ttft_ms.count == 1


class TestIntervals:
    def test_interval_over_repeats_uses_students_t(self) -> None:
        repeats = [make_repeat([make_sample()], seconds=1.0, delivered_tokens=rate) for rate in (98.0, 101.0, 104.0)]
        found = summarize_cell(make_cell("x", repeats))
        assert found.interval is not None and found.interval.over == "repeats" and found.interval.count == 3
        assert found.output_tok_s == 101.0
        assert (found.interval.low, found.interval.high) == pytest.approx((101 - 7.45, 101 + 7.45), abs=0.02)

    def test_interval_of_one_repeat_uses_blocks_of_requests(self) -> None:
        cells, _ = make_pair(Noise(1), 1.0, repeats=1)
        many = Noise(2).next_repeat(1.0, 0.0, 4, requests=60)
        found = summarize_cell(replace_fields(cells[0], repeats=(many,)))
        assert found.interval is not None and found.interval.over == "blocks" and found.interval.count == 15
        assert found.output_tok_s is not None and found.interval.low < found.output_tok_s < found.interval.high
        assert summarize_cell(cells[0]).interval is None, "twelve requests are too few for five blocks of four"

    def test_correlated_blocks_have_a_wider_interval(self) -> None:
        def half(rising: bool) -> float:
            times = [100.0 + 2 * number if rising else 100.0 + (40 if number % 2 else 0) for number in range(40)]
            samples = [make_sample(float(place), took * 0.2, took * 0.8 / 31) for place, took in enumerate(times)]
            found = summarize_cell(make_cell("x", [make_repeat(samples)], concurrency=1)).interval
            assert found is not None
            return (found.high - found.low) / (found.high + found.low)

        assert half(rising=True) > 2 * half(rising=False)

    def test_open_loops_have_no_blocks(self) -> None:
        assert compute_block_rates(make_repeat([make_sample()] * 50), Load(arrivals="poisson", requests_per_s=5)) == []


class TestRows:
    def test_a_row_begins_with_the_required_fields(self) -> None:
        assert BenchRow.__struct_fields__[:12] == FIRST_FIELDS

    def test_a_row_contains_notes_and_converts_to_csv(self) -> None:
        use = ResourceUse(peak_memory_bytes=500_000_000, peak_gpu_bytes=3_000_000_000)
        flags = (Flag(kind="busy", text="other processes used 20 % of the CPU"),)
        cell = make_cell("x", [make_repeat([make_sample(tokens=20)], use=use)], flags=flags, notes="by hand")
        found = make_row(cell, "a box")
        assert found.peak_mem_gb == 0.5 and found.hardware == "a box"
        assert make_row(replace_fields(cell, subject=replace_fields(cell.subject, device="cuda"))).peak_mem_gb == 3.0
        assert found.notes == "other processes used 20 % of the CPU; answers have 20 tokens instead of 32; by hand"
        text = io.StringIO()
        csv.writer(text).writerow(msgspec.structs.astuple(found))
        assert from_json(BenchRow, to_json(found)) == found and text.getvalue().startswith("x,1,SmolLM2")

    def test_rows_contain_the_hardware_of_the_run(self) -> None:
        environment = RunEnvironment(bedplate="0", python="3", system="linux", hardware="two cores", machine="made-up")
        run = Run(id="r", at="", environment=environment, cells=(make_cell("x", []),))
        assert [one.hardware for one in make_rows(run)] == ["two cores"]

    @given(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["ok", "error", "timeout", "refused"]))
    def test_incomplete_cells_are_summarized_without_errors(self, repeats: int, samples: int, outcome: str) -> None:
        sample = make_sample(outcome=outcome)
        sample = replace_fields(sample, ttft_ms=None, output_tokens=None) if outcome == "refused" else sample
        cell = make_cell("x", [make_repeat([sample] * samples) for _ in range(repeats)])
        found = summarize_cell(cell)
        assert from_json(Summary, to_json(found)) == found
        assert make_row(cell).valid == (outcome == "ok" and repeats * samples > 0)


class TestTargets:
    def test_a_request_meets_a_target_with_both_times_and_success(self) -> None:
        target = LatencyTarget(ttft_ms=100, tpot_ms=10)
        assert meets(make_sample(), target) and not meets(make_sample(ttft_ms=101), target)
        assert not meets(make_sample(step_ms=11), target) and not meets(make_sample(outcome="cut"), target)
        assert meets(make_sample(tokens=1), target)


def make_whole_cell(engine: str = "x", **other: object) -> Cell:
    return make_cell(engine, [make_repeat([make_sample()])], **other)  # type: ignore[arg-type]


class TestDifferences:
    def test_the_engine_is_not_a_difference(self) -> None:
        found = list_differences(make_whole_cell("x"), make_whole_cell("y"))
        assert not found.meaningless and not found.printed

    @pytest.mark.parametrize(
        "change",
        [
            {"machine": "another"},
            {"load": Load(concurrency=8, prompt_tokens=64, output_tokens=32)},
            {"load": Load(concurrency=4, prompt_tokens=64, output_tokens=33)},
            {"load": Load(concurrency=4, prompt_tokens=64, output_tokens=32, shared_prefix_tokens=16)},
            {"load": Load(arrivals="poisson", requests_per_s=2, prompt_tokens=64, output_tokens=32)},
            {"repeats": (make_repeat([make_sample(tokens=20)]),)},
            {"repeats": (make_repeat([make_sample(cached_tokens=32)]),)},
            {"repeats": (make_repeat([make_sample()], warmup=0),)},
        ],
    )
    def test_another_workload_is_not_comparable(self, change: dict[str, object]) -> None:
        assert list_differences(make_whole_cell(), replace_fields(make_whole_cell(), **change)).meaningless

    @pytest.mark.parametrize(
        "load",
        [
            Load(concurrency=4, prompt_tokens=64, output_tokens=32, shared_prefix_tokens=32),
            Load(arrivals="replay", requests_per_s=2, trace="chat", prompt_tokens=64, output_tokens=32),
        ],
    )
    def test_cached_tokens_are_only_listed_for_workloads_with_shared_prefixes(self, load: Load) -> None:
        one = replace_fields(make_whole_cell("x"), load=load)
        other = replace_fields(make_whole_cell("y"), load=load, repeats=(make_repeat([make_sample(cached_tokens=32)]),))
        found = list_differences(one, other)
        assert not found.meaningless and [each.what for each in found.printed] == ["cached prompt tokens"]

    def test_other_weights_are_comparable_only_from_the_same_source(self) -> None:
        one = make_whole_cell()

        def stored(label: str, weights: str | None) -> Cell:
            return replace_fields(one, subject=replace_fields(one.subject, quantization=label, weights_id=weights))

        assert [each.what for each in list_differences(one, stored("BF16", None)).meaningless] == ["quantization"]
        assert [each.what for each in list_differences(stored("Q4_1", "a"), stored("Q4_1", "b")).meaningless] == [
            "weights"
        ]
        same = list_differences(stored("Q4_1", "a"), stored("BF16", "a"))
        assert not same.meaningless and [each.what for each in same.printed] == ["quantization"]

    def test_lists_differing_settings_and_layouts(self) -> None:
        one, other = with_settings(make_whole_cell()), with_settings(make_whole_cell(), slots=4, kv_type="fp8")
        other = replace_fields(other, subject=replace_fields(other.subject, parallelism=Parallelism(tensor=2)))
        found = list_differences(one, other)
        assert not found.meaningless and [each.what for each in found.printed] == ["layout", "slots", "cache type"]

    def test_lists_small_differences_in_length(self) -> None:
        slightly = replace_fields(make_whole_cell(), repeats=(make_repeat([make_sample(tokens=30)]),))
        assert [each.what for each in list_differences(make_whole_cell(), slightly).printed] == [
            "output tokens, as counted"
        ]


class TestEvidence:
    def test_a_cell_becomes_a_result_for_plans(self) -> None:
        cell = make_cell("vllm", [make_repeat([make_sample()], seconds=1.0, delivered_tokens=90.0)])
        found = make_result(cell)
        assert found is not None and found.engine == "vllm" and found.output_tok_s == 90 and found.quality == 0.98
        assert (found.ttft_ms, found.concurrency, found.machine) == (100.0, 4, "made-up")

    @pytest.mark.parametrize(
        "cell",
        [
            replace_fields(make_whole_cell(), flags=(Flag(kind="client", text="the client was busy", invalid=True),)),
            replace_fields(make_whole_cell(), repeats=()),
            replace_fields(make_whole_cell(), load=Load(arrivals="poisson", requests_per_s=2)),
        ],
    )
    def test_invalid_cells_give_no_result(self, cell: Cell) -> None:
        assert make_result(cell) is None

    def test_unchecked_answers_have_no_quality_and_broken_ones_give_no_result(self) -> None:
        cell = make_whole_cell()
        assert make_result(replace_fields(cell, quality=Quality(asked=10, agreement=0.97, verdict="broken"))) is None
        unchecked = make_result(replace_fields(cell, quality=Quality()))
        assert unchecked is not None and unchecked.quality is None

    def test_a_client_bottleneck_is_a_reason_for_invalidity(self) -> None:
        busy = replace_fields(
            make_whole_cell().repeats[0], client=replace_fields(make_whole_cell().repeats[0].client, limit=True)
        )
        assert list_invalid_reasons(replace_fields(make_whole_cell(), repeats=(busy,))) == (
            "the client was the bottleneck",
        )
