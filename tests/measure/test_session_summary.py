"""The summary of sessions: TTFT by turn, durations, cache hits; how bench, diagnose and compare show them."""

from __future__ import annotations

from typing import Any

from tests.judge.made_cells import make_cell
from tests.runs import make_run

from bedplate.facts.scenarios import SCENARIOS
from bedplate.judge.diagnose import diagnose
from bedplate.judge.roofline import Roofline
from bedplate.judge.words import describe_load
from bedplate.measure.flags import flag_cell
from bedplate.measure.knee import choose_next_load
from bedplate.measure.session_summary import summarize_sessions
from bedplate.measure.summary import list_differences, make_result
from bedplate.show.bench import write_session_lines, write_title
from bedplate.values.record import replace_fields
from bedplate.values.run import Cell, EngineSeries, Load, Repeat, Sample, SessionResult
from bedplate.values.workload import LatencyTarget

LOAD = Load(
    arrivals="sessions", sessions=2, scenario=SCENARIOS["agent"], prompt_tokens=800, output_tokens=50,
    shared_prefix_tokens=500,
)  # fmt: skip


def make_turn(session: int, turn: int, prompt: int, cached: int | None, ttft_ms: float) -> Sample:
    return Sample(
        at_s=float(turn), ttft_ms=ttft_ms, duration_ms=ttft_ms + 490, prompt_tokens=prompt, output_tokens=50,
        cached_tokens=cached, session=session, turn=turn, gaps_ms=(10.0,) * 49,
    )  # fmt: skip


def make_session_cell(*, cached: bool = True, load: Load = LOAD, **engine: Any) -> Cell:
    turns = [(1, 600, 500, 900.0), (2, 800, 640, 200.0), (3, 1000, 840, 210.0), (4, 1200, 1040, 220.0),
             (5, 1400, 1240, 230.0), (6, 1600, 1440, 240.0)]  # fmt: skip
    samples = tuple(
        make_turn(session, turn, prompt, found if cached else 0, ttft)
        for session in (0, 1)
        for turn, prompt, found, ttft in turns
    )
    sessions = (
        SessionResult(session=0, turns=6, planned_turns=6, duration_s=12, answering_s=5, outcome="complete"),
        SessionResult(session=1, turns=6, planned_turns=9, duration_s=20, answering_s=6, outcome="unfinished"),
        SessionResult(
            session=2, turns=3, planned_turns=9, duration_s=1, answering_s=1, outcome="complete", joined=True
        ),
    )
    repeat = Repeat(
        seconds=30, samples=samples, sessions=sessions, delivered_tokens=600.0, engine=EngineSeries(scrapes=9, **engine)
    )
    return replace_fields(make_cell("llama.cpp", (repeat,)), load=load)


def test_latencies_are_grouped_by_turn() -> None:
    found = summarize_sessions(make_session_cell())
    assert found is not None
    assert [(one.turns, one.requests, one.ttft_ms) for one in found.ttft_by_turn] == [
        ("1", 2, 900.0), ("2", 2, 200.0), ("3", 2, 210.0), ("4", 2, 220.0), ("5-8", 4, 235.0),
    ]  # fmt: skip


def test_only_whole_sessions_have_a_duration() -> None:
    found = summarize_sessions(make_session_cell())
    assert found is not None and (found.complete, found.unfinished, found.failed) == (2, 1, 0)
    assert (found.duration_s, found.answering_s) == (12, 5)


def test_cache_hits_are_compared_with_what_is_repeated() -> None:
    found = summarize_sessions(make_session_cell(cache_hit_share=0.8))
    assert found is not None and found.metrics_share == 0.8
    repeated = 500 + sum(prompt + 50 for prompt in (600, 800, 1000, 1200, 1400))
    assert found.repeated_share == repeated / (600 + 800 + 1000 + 1200 + 1400 + 1600)
    assert found.cached_share is not None and found.cached_share > 0.8


def test_a_cell_without_sessions_has_no_summary() -> None:
    assert summarize_sessions(make_cell("llama.cpp", (Repeat(seconds=1.0),))) is None


def test_bench_shows_turns_sessions_and_cache_hits() -> None:
    run = make_run([make_session_cell(cache_hit_share=0.8)])
    turns, sessions, cached = write_session_lines(run)
    assert turns == "llama.cpp, 2 sess.: TTFT p50 in ms by turn: 1 900, 2 200, 3 210, 4 220, 5-8 235"
    assert sessions.endswith("2 sessions complete, 1 unfinished; median duration 12.0 s, of which 5.0 s answering")
    assert "80% by the engine's metrics" in cached and "repeat earlier requests" in cached
    run = replace_fields(run, matrix=None)
    assert "scenario agent, mean 800 in, 50 out, 500 shared" in write_title(run, None)
    assert describe_load(LOAD).startswith("2 agent sessions, 800 + 50")


def test_sessions_are_flagged_neither_for_lengths_nor_for_cached_prompts() -> None:
    kinds = {flag.kind for flag in flag_cell(make_session_cell(cache_hit_share=0.9))}
    assert not kinds & {"cache", "length", "truncated"}


def test_sessions_do_not_correct_estimates() -> None:
    assert make_result(make_session_cell()) is None, "the number of sessions is not that of requests in flight"


def test_a_scenario_is_compared_by_its_figures() -> None:
    other = replace_fields(SCENARIOS["agent"], system_tokens=100)
    one, two = make_session_cell(), make_session_cell(load=replace_fields(LOAD, scenario=other, sessions=3))
    found = {difference.what for difference in list_differences(one, two).meaningless}
    assert {"sessions", "scenario agent: system_tokens"} <= found
    assert not list_differences(one, make_session_cell()).meaningless


def test_a_latency_target_is_searched_over_sessions() -> None:
    wanted = choose_next_load([make_session_cell()], LatencyTarget(ttft_ms=2000))
    assert wanted is not None and (wanted.sessions, wanted.concurrency) == (4, None)


def test_diagnose_says_whether_repeated_prefixes_were_reused() -> None:
    def find(cell: Cell) -> str:
        (one,) = diagnose([([cell], Roofline())]).bottlenecks
        return next(evidence.text for evidence in one.evidence if "repeat earlier requests" in evidence.text)

    assert "were found in the prefix cache" in find(make_session_cell(cache_hit_share=0.83))
    assert find(make_session_cell(cached=False, cache_hit_share=0.1)).endswith("the others were computed again")
