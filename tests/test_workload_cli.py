"""`bedplate workload`: the page, the JSON, the written file and errors."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import Answer, invoke

from bedplate.decide.intent import read_intent
from bedplate.facts.workload import summarize_trace, to_workload
from bedplate.show.workload import describe_bursts, describe_prefixes, draw_sparkline, make_bars
from bedplate.values import from_json
from bedplate.values.workload import (
    Arrivals,
    CacheSize,
    LengthBin,
    LengthDistribution,
    PrefixReuse,
    Spread,
    TraceSummary,
)

CAPTURES = Path(__file__).parent / "captures" / "traces"


def run(*arguments: str | Path, stdin: bytes | None = None) -> Answer:
    return invoke("workload", *map(str, arguments), stdin=stdin)


def test_the_page_shows_the_summary() -> None:
    page = run(CAPTURES / "mooncake-synthetic.jsonl").out
    for words in (
        "66 requests in", "Mooncake trace", "p99", "In flight", "estimate, assuming 500 ms", "requests/s",
        "an unlimited prefix cache would save about 5% of prompt tokens",
        "of requests share a prefix with an earlier one", "Plan for",
    ):  # fmt: skip
        assert words in page
    assert "█" in page and "\x1b[" not in page


def test_json_is_a_summary() -> None:
    summary = from_json(TraceSummary, run(CAPTURES / "azure-2023-conv.csv", "--json").out)
    assert summary == summarize_trace(CAPTURES / "azure-2023-conv.csv")


def test_assumed_latencies_can_be_specified() -> None:
    done = run(CAPTURES / "azure-2023-conv.csv", "--json", "--ttft-ms", "0", "--tpot-ms", "10")
    flight = from_json(TraceSummary, done.out).in_flight
    assert flight is not None and flight.assumption == "0 ms to the first token and 10 ms for each one"


def test_the_intent_is_written_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    done = run(CAPTURES / "azure-2023-conv.csv", "-o", path)
    assert done.code == 0 and f"written: {path}" in done.out
    assert read_intent(path).workload == to_workload(summarize_trace(CAPTURES / "azure-2023-conv.csv"))
    again = run(CAPTURES / "azure-2023-conv.csv", "-o", path)
    assert again.code == 2 and "already exists" in again.err
    assert run(CAPTURES / "azure-2023-conv.csv", "-o", tmp_path / "no" / "x.yaml").code == 3


def test_standard_input_may_be_gzip() -> None:
    packed = gzip.compress((CAPTURES / "azure-2024.csv").read_bytes())
    command = [sys.executable, "-m", "bedplate", "workload", "-"]
    done = subprocess.run(command, input=packed, capture_output=True, check=True)
    assert "10 requests in 7.0 days" in done.stdout.decode()


def test_bad_rows_are_shown_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes((CAPTURES / "azure-2024.csv").read_bytes() + b"[red]oops\n")
    page = run(path).out
    assert "1 unreadable, skipped" in page and "line 12: '[red]oops'" in page


@pytest.mark.parametrize("arguments", [("absent.csv",), (__file__,), (__file__, "--format", "azure"), ()])
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.code == 2 and done.err and not done.out


def test_help_has_examples() -> None:
    assert "bedplate workload conversation_trace.jsonl.gz" in run("--help").out


def test_small_outer_bins_are_merged() -> None:
    bins = [(1, 1), (2, 0), (4, 500), (8, 400), (16, 99), (32, 1)]
    lengths = LengthDistribution(
        spread=Spread(mean=1, p50=1, p90=1, p99=1, max=1), total_tokens=1, basis="reported",
        bins=tuple(LengthBin(from_tokens=low, to_tokens=2 * low - 1, requests=count) for low, count in bins),
    )  # fmt: skip
    assert [(label, share) for label, _, share in make_bars(lengths)] == [
        ("1–7", "50.0%"),
        ("8–15", "40.0%"),
        ("16–63", "10.0%"),
    ]
    assert make_bars(lengths)[0][1] == "█" * 18


def test_sparklines_of_zeros_are_flat() -> None:
    assert draw_sparkline((0.0, 1.0, 8.0)) == " ▂█" and draw_sparkline((0.0, 0.0)) == "▁▁" and draw_sparkline(()) == ""


@pytest.mark.parametrize(
    ("gap_cv", "words"),
    [
        (0.1, "steady, like a scheduled client"),
        (0.7, "steadier than independent arrivals"),
        (1.0, "like independent arrivals"),
        (2.0, "bursty"),
        (6.0, "very bursty"),
        (None, "unknown, too few arrivals"),
    ],
)
def test_bursts_are_described(gap_cv: float | None, words: str) -> None:
    arrivals = Arrivals(
        span_s=100, requests_per_s=1, gap_cv=gap_cv, peak_to_mean_1s=3, peak_to_mean_10s=2, peak_to_mean_60s=None,
        same_moment=0, series=(),
    )  # fmt: skip
    told = describe_bursts(arrivals)
    assert (
        told.startswith(words) and "3 × the mean in the busiest second, 2 × the mean in the busiest 10 seconds" in told
    )


@pytest.mark.parametrize(
    ("ever", "near", "words"),
    [
        (0.9, 0.6, "much is shared: enable prefix caching"),
        (0.3, 0.2, "enable prefix caching"),
        (0.6, 0.2, "saves much more"),
        (0.4, 0.05, "far apart in time"),
        (0.05, 0.05, "brings little"),
    ],
)
def test_prefix_sharing_is_described(ever: float, near: float, words: str) -> None:
    reuse = PrefixReuse(
        saved_share=ever, by_cache=(CacheSize(tokens=10**6, saved_share=near),), sharing_requests=0.5,
        typical_tokens=512, saved_tokens_per_request=9, basis="measured", how="hashes",
    )  # fmt: skip
    lines = describe_prefixes(reuse)
    assert lines[0].startswith(f"an unlimited prefix cache would save about {ever:.0%}") and words in lines[-1]
