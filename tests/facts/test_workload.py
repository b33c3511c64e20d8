"""The workload of a trace, compared with manual sums and exact methods, in bounded memory."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.decide.intent import read_intent
from bedplate.errors import UsageError
from bedplate.facts import workload
from bedplate.facts.traces import BadRows
from bedplate.facts.workload import (
    ArrivalMeter,
    LengthMeter,
    PrefixMeter,
    TraceMeter,
    summarize_trace,
    to_workload,
    write_workload_yaml,
)
from bedplate.values import from_json, to_json
from bedplate.values.workload import RequestShape, Spread, TraceSummary

CAPTURES = Path(__file__).parents[1] / "captures" / "traces"
ALL = sorted(path for path in CAPTURES.iterdir() if path.suffix in (".csv", ".json", ".jsonl"))


def measure_shapes(shapes: Iterable[RequestShape], **options: float) -> TraceSummary:
    meter = TraceMeter(**options)  # type: ignore[arg-type]
    meter.add_all(shapes)
    return meter.make_summary("made", "bedplate", BadRows("made"))


def measure_arrivals(moments: Iterable[float], lasts_s: float = 0.0) -> ArrivalMeter:
    meter = ArrivalMeter()
    meter.add([(moment, lasts_s) for moment in moments])
    return meter


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_summary_survives_json_and_makes_an_intent(path: Path) -> None:
    summary = summarize_trace(path)
    assert from_json(TraceSummary, to_json(summary)) == summary
    intent = read_intent(write_workload_yaml(summary))
    assert intent.workload == to_workload(summary) and intent.workload.origin == "observed"


class TestPublishedTraces:
    def test_the_azure_trace_of_2023_is_summarized(self) -> None:
        summary = summarize_trace(CAPTURES / "azure-2023-conv.csv")
        assert summary.requests == 40 and summary.format == "azure" and summary.prefix is None
        prompts = sorted(int(row.split(",")[1]) for row in (CAPTURES / "azure-2023-conv.csv").read_text().split()[2::2])
        assert summary.prompt.spread == Spread(
            mean=statistics.fmean(prompts), p50=prompts[19], p90=prompts[35], p99=prompts[39], max=prompts[39]
        )
        assert summary.arrivals is not None and summary.arrivals.span_s == pytest.approx(24.146296, abs=1e-5)
        assert summary.arrivals.requests_per_s == pytest.approx(39 / 24.146296)
        assert summary.in_flight is not None and summary.in_flight.basis == "estimate"
        assert summary.in_flight.assumption == "500 ms to the first token and 50 ms for each one"

    def test_mooncake_gives_shared_prefixes(self) -> None:
        summary = summarize_trace(CAPTURES / "mooncake-synthetic.jsonl")
        prefix = summary.prefix
        assert prefix is not None and prefix.basis == "measured" and prefix.block_tokens == 512
        # Counted manually: three rows repeat 57, 5 and 28 blocks of earlier rows.
        rows = [json.loads(line) for line in (CAPTURES / "mooncake-synthetic.jsonl").read_text().splitlines()]
        whole = sum(row["input_length"] for row in rows)
        assert prefix.saved_share == pytest.approx(512 * (57 + 5 + 28) / whole)
        assert prefix.sharing_requests == pytest.approx(3 / len(rows)) and prefix.typical_tokens == 28 * 512
        assert [cache.saved_share for cache in prefix.by_cache] == [pytest.approx(prefix.saved_share)] * 3

    def test_sharegpt_notes_what_is_unknown(self) -> None:
        summary = summarize_trace(CAPTURES / "sharegpt-constructed.json")
        assert summary.arrivals is None and summary.in_flight is None
        assert summary.prompt.basis == "estimate" and summary.prompt.error == 0.25
        assert summary.prefix is not None and summary.prefix.basis == "estimate"
        assert any("4 bytes" in note for note in summary.notes) and any("no times" in note for note in summary.notes)

    def test_the_request_log_is_measured(self) -> None:
        summary = summarize_trace(CAPTURES / "requests-constructed.jsonl")
        flight = summary.in_flight
        assert flight is not None and flight.basis == "measured" and flight.assumption is None
        # From the first arrival to the last, 3.5 s: 1, then 1 until 2.0, two until 3.0, one until 3.5.
        assert flight.spread.mean == pytest.approx((1 + 1 + 2 + 0.5) / 3.5) and flight.spread.max == 2
        assert summary.outcomes == {"cancelled": 1} and summary.tenants == 2 and summary.models == ("m",)
        assert summary.prefix is not None and summary.prefix.typical_tokens == 32
        assert summary.prefix.saved_share == pytest.approx((32 + 40) / (64 + 64 + 40))


class TestLengths:
    @given(st.lists(st.integers(0, 60_000), min_size=1, max_size=300))
    def test_percentiles_are_exact(self, lengths: list[int]) -> None:
        meter = LengthMeter()
        meter.add(lengths)
        spread = meter.make_distribution("reported", None).spread
        ordered = sorted(lengths)
        for share, found in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
            assert found == ordered[math.ceil(round(share * len(ordered), 9)) - 1]
        assert spread.mean == pytest.approx(statistics.fmean(lengths)) and spread.max == max(lengths)

    @given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50))
    def test_very_long_lengths_are_nearly_exact_with_few_counters(self, lengths: list[int]) -> None:
        meter = LengthMeter()
        meter.add(lengths)
        found = meter.make_distribution("reported", None)
        assert found.spread.p50 == pytest.approx(sorted(lengths)[math.ceil(len(lengths) / 2) - 1], rel=1 / 32_768)
        assert found.spread.max == max(lengths) and found.total_tokens == sum(lengths)
        assert sum(one.requests for one in found.bins) == len(lengths)

    def test_bins_are_powers_of_two_without_holes(self) -> None:
        meter = LengthMeter()
        meter.add([0, 1, 5, 4, 16])
        bins = [
            (one.from_tokens, one.to_tokens, one.requests) for one in meter.make_distribution("reported", None).bins
        ]
        assert bins == [(0, 0, 1), (1, 1, 1), (2, 3, 0), (4, 7, 2), (8, 15, 0), (16, 31, 1)]


class TestArrivals:
    def test_regular_arrivals_have_a_cv_of_zero(self) -> None:
        found = measure_arrivals(range(1000)).make_arrivals()
        assert found.requests_per_s == 1 and found.gap_cv == pytest.approx(0, abs=1e-6)
        assert found.peak_to_mean_60s == pytest.approx(1, rel=0.01) and max(found.series) < 1.2

    def test_poisson_arrivals_have_a_cv_of_one(self) -> None:
        chance = random.Random(7)
        moments, now = [], 0.0
        for _ in range(20_000):
            now += chance.expovariate(5)
            moments.append(now)
        found = measure_arrivals(moments).make_arrivals()
        assert found.gap_cv == pytest.approx(1, abs=0.03) and found.requests_per_s == pytest.approx(5, rel=0.03)

    def test_bursts_show_in_short_windows(self) -> None:
        moments = [minute * 60 + item / 1000 for minute in range(30) for item in range(60)]
        found = measure_arrivals(moments).make_arrivals()
        assert found.gap_cv is not None and found.gap_cv > 5
        assert found.peak_to_mean_1s == pytest.approx(60 / (1800 / 1740.059), rel=1e-3)
        assert found.peak_to_mean_60s == pytest.approx(1, rel=0.05)

    @given(st.permutations(range(200)))
    def test_a_log_sorted_by_end_gives_the_same_result(self, order: list[int]) -> None:
        moments = [number**1.5 for number in range(200)]
        assert (
            measure_arrivals(moments[at] for at in order).make_arrivals() == measure_arrivals(moments).make_arrivals()
        )

    def test_requests_far_out_of_order_are_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workload, "HELD_BACK", 2)
        meter = ArrivalMeter()
        for moment in (10, 11, 12, 13, 14, 15, 1, 16):
            meter.add([(float(moment), 0.0)])
        assert meter.make_arrivals().span_s == 15 and "far out of order" in meter.make_notes()[0]

    def test_single_and_simultaneous_requests_are_summarized(self) -> None:
        for moments in ([5.0], [5.0] * 9):
            found = measure_arrivals(moments).make_arrivals()
            assert found.span_s == 0 and found.requests_per_s is None and found.gap_cv is None and found.series == ()
        assert measure_shapes([RequestShape(started_s=5, duration_ms=1)]).in_flight is None

    def test_a_coarse_clock_is_noted(self) -> None:
        summary = measure_shapes(RequestShape(started_s=number // 10 * 3, output_tokens=1) for number in range(100))
        assert any("clock is coarse" in note for note in summary.notes)

    def test_long_traces_are_counted_in_wider_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workload, "MAX_WINDOWS", 100)
        found = measure_arrivals(range(5000)).make_arrivals()
        assert found.peak_to_mean_1s is None and found.peak_to_mean_10s is None
        assert len(found.series) == 49 and found.requests_per_s == 1


class TestInFlight:
    def test_littles_law_holds_for_the_counted_requests(self) -> None:
        chance = random.Random(3)
        shapes = [RequestShape(started_s=number / 10, duration_ms=chance.uniform(0, 8000)) for number in range(20_000)]
        summary = measure_shapes(shapes)
        assert summary.in_flight is not None and summary.arrivals is not None and summary.arrivals.requests_per_s
        by_law = summary.arrivals.requests_per_s * summary.in_flight.request_s
        assert summary.in_flight.spread.mean == pytest.approx(by_law, rel=0.01)

    @given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), min_size=2, max_size=40))
    def test_in_flight_matches_a_brute_force_count(self, requests: list[tuple[int, int]]) -> None:
        meter = ArrivalMeter()
        meter.add([(float(start), float(lasts)) for start, lasts in requests])
        spread = meter.compute_in_flight()
        first, last = min(requests)[0], max(requests)[0]
        levels = [sum(start <= moment < start + lasts for start, lasts in requests) for moment in range(first, last)]
        if levels:
            assert spread.mean == pytest.approx(statistics.fmean(levels))
            assert spread.p50 == sorted(levels)[math.ceil(len(levels) / 2) - 1]

    def test_assumptions_are_stated(self) -> None:
        shapes = [RequestShape(started_s=float(second), output_tokens=10) for second in range(100)]
        flight = measure_shapes(shapes, ttft_ms=1000, tpot_ms=100).in_flight
        assert flight is not None and flight.request_s == 2 and flight.spread.p50 == 2
        assert flight.assumption == "1000 ms to the first token and 100 ms for each one"
        some = measure_shapes([*shapes, RequestShape(started_s=100, duration_ms=5, output_tokens=1)]).in_flight
        assert some is not None and "for the 99% without a duration" in (some.assumption or "")


class TestPrefix:
    def test_a_small_cache_evicts_the_oldest_prompts_from_their_ends(self) -> None:
        meter = PrefixMeter((40,))
        for blocks in ((1, 2, 3), (4, 5), (1, 2, 3)):
            meter.add(blocks, 10 * len(blocks), 10)
        reuse = meter.make_reuse()
        # Four blocks fit. After the second prompt, blocks 1 and 2 of the first remain, since its end is evicted first.
        assert reuse.by_cache[0].saved_share == pytest.approx(20 / 80) and reuse.saved_share == pytest.approx(30 / 80)

    def test_a_short_last_block_counts_its_own_tokens(self) -> None:
        meter = PrefixMeter()
        meter.add((1, 2), 15, 10)
        meter.add((1, 2), 15, 10)
        assert meter.make_reuse().saved_share == pytest.approx(0.5)
        assert meter.make_reuse().by_cache[0].saved_share == pytest.approx(0.5)

    def test_hashes_may_be_text(self) -> None:
        meter = PrefixMeter()
        meter.add(("ab", "cd"), 32, 16)
        meter.add(("ab", "xx"), 32, 16)
        assert meter.make_reuse().saved_share == pytest.approx(0.25)

    def test_tokens_outside_of_blocks_are_never_shared(self) -> None:
        meter = PrefixMeter()
        for _ in range(2):
            meter.add((1, 2), 40, 10)
        assert meter.make_reuse().saved_share == pytest.approx(20 / 80)

    def test_another_block_size_is_excluded_and_noted(self) -> None:
        meter = PrefixMeter()
        meter.add((1, 2), 32, 16)
        meter.add((1, 2), 64, 32)
        assert meter.requests == 1 and "another block size" in meter.make_notes()[0]

    def test_sampled_blocks_give_nearly_the_same_result_in_bounded_memory(self) -> None:
        chance = random.Random(11)
        sizes = (20_000, 200_000)
        exact, sampled = PrefixMeter(sizes, max_blocks=10**6), PrefixMeter(sizes, max_blocks=2000)
        fresh = 10**6
        for _ in range(4000):
            shared = chance.randrange(200) * 50
            hashes = (0, *range(shared + 1, shared + chance.randrange(2, 20)), *range(fresh, fresh + 10))
            fresh += 10
            for meter in (exact, sampled):
                meter.add(hashes, 16 * len(hashes), 16)
        assert sampled.make_reuse().saved_share == pytest.approx(exact.make_reuse().saved_share, abs=0.03)
        pairs = zip(sampled.make_reuse().by_cache, exact.make_reuse().by_cache, strict=True)
        for few, all_blocks in pairs:
            assert few.saved_share == pytest.approx(all_blocks.saved_share, abs=0.05) and few.saved_share > 0.05
        assert len(sampled._seen) <= 2000 and "one in" in sampled.make_notes()[0] and not exact.make_notes()

    def test_cached_tokens_that_the_engine_counted_are_reported(self) -> None:
        summary = measure_shapes([RequestShape(prompt_tokens=100, cached_tokens=cached) for cached in (0, 50, 500)])
        assert summary.prefix is not None and summary.prefix.basis == "reported"
        assert summary.prefix.saved_share == 0.5 and summary.prefix.by_cache == ()


class TestToWorkload:
    def test_lengths_are_means_and_limits_are_percentiles(self) -> None:
        shapes = [
            RequestShape(started_s=number / 2, prompt_tokens=100 + number, output_tokens=50, duration_ms=10_000)
            for number in range(1000)
        ]
        work = to_workload(measure_shapes(shapes))
        assert (work.prompt_tokens, work.output_tokens) == (600, 50)  # means
        assert work.context_tokens == 100 + 989 + 50  # p99 of both together
        assert (work.concurrency, work.users) == (20, 20) and work.requests_per_s == 2
        assert work.origin == "observed" and work.task == "generate"

    def test_requests_without_output_are_embeddings(self) -> None:
        assert to_workload(measure_shapes([RequestShape(prompt_tokens=9, output_tokens=0)])).task == "embed"

    def test_the_yaml_gives_a_reason_for_each_figure(self) -> None:
        text = write_workload_yaml(summarize_trace(CAPTURES / "mooncake-synthetic.jsonl"))
        assert text.splitlines()[1] == "workload:"
        for field in (
            "users",
            "concurrency",
            "requests_per_s",
            "prompt_tokens",
            "context_tokens",
            "shared_prefix_tokens",
        ):
            line = next(line for line in text.splitlines() if line.startswith(f"  {field}: "))
            assert len(line.partition("# ")[2]) > 3

    def test_a_file_name_cannot_inject_yaml(self, tmp_path: Path) -> None:
        path = tmp_path / "a\nmodel: evil"
        path.write_bytes((CAPTURES / "azure-2024.csv").read_bytes())
        assert read_intent(write_workload_yaml(summarize_trace(path))).model is None


def test_mostly_bad_rows_are_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "rubbish\n" * 20)
    with pytest.raises(UsageError, match="20 of 20 rows cannot be read"):
        summarize_trace(path)


def test_a_header_alone_has_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(UsageError, match="holds no requests"):
        summarize_trace(path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.measures
def test_a_million_rows_take_seconds_and_little_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(5)
    path = tmp_path / "million.csv"
    now = 0.0
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for _ in range(100_000):
            rows = []
            for _ in range(10):
                now += 0.05 * chance.random()
                minutes, second = divmod(now, 60)
                hours, minute = divmod(int(minutes), 60)
                day, hour = divmod(hours, 24)
                rows.append(
                    f"2024-05-{10 + day} {hour:02d}:{minute:02d}:{second:010.7f},{int(now * 7919) % 9000},200\r\n"
                )
            file.write("".join(rows))
    # In a separate process, because the peak memory of other tests would hide that of this one.
    code = """
import sys, time
from pathlib import Path
from bedplate.facts.workload import summarize_trace
from bedplate.values import to_json
def peak_kib():
    # Not getrusage, which starts at the peak of the parent.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
before = peak_kib()
began = time.perf_counter()
summary = summarize_trace(sys.argv[1])
took = time.perf_counter() - began
print(took, time.process_time(), (peak_kib() - before) / 1024)
print(to_json(summary))
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    figures, _, text = done.stdout.partition("\n")
    took_s, worked_s, grown_mib = map(float, figures.split())
    with capsys.disabled():
        print(f"\n1,000,000 rows: {took_s:.1f} s ({worked_s:.1f} s of CPU), {grown_mib:.0f} MiB more memory")
    summary = from_json(TraceSummary, text)
    assert summary.requests == 1_000_000 and not summary.bad_rows
    assert summary.arrivals is not None and summary.arrivals.requests_per_s == pytest.approx(40, rel=0.01)
    assert 0 < grown_mib < 150
