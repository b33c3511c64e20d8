"""A budget limits the whole run: windows are shortened, and what does not fit is left out with its reason."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate import store
from bedplate.measure import quality
from bedplate.measure.bench import prepare_in_time
from bedplate.measure.bench_budget import (
    LEAST_WINDOW_S,
    OVERRUN,
    WARMUP_S,
    RepeatTimes,
    TimeNeed,
    WallBudget,
    estimate_need,
)
from bedplate.measure.load import LoadTarget, PreparedEndpoint, serve_null
from bedplate.values import from_json
from bedplate.values.run import Load, Run

TIMES = RepeatTimes(10.0, 60.0, 300.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_budget_nothing_changes() -> None:
    wall = WallBudget(None)
    assert wall.left_s is None and wall.has_time_for(1e9) and wall.get_answers_limit_s(9) == quality.LIMIT_S
    assert wall.fit_repeat(TIMES, 1000.0, 50) == TIMES


def test_starts_and_checks_count() -> None:
    clock = Clock()
    wall = WallBudget(60.0, clock)
    assert wall.has_time_for(60) and wall.get_answers_limit_s(1) == 15.0
    clock.now_s += 40
    assert wall.left_s == 20 and not wall.has_time_for(21)
    assert wall.get_answers_limit_s(1) is None, "the answers get a quarter of the time, and at least ten seconds"


def test_windows_are_shortened_to_an_equal_share() -> None:
    clock = Clock()
    wall = WallBudget(60.0, clock)
    four = wall.fit_repeat(TIMES, 1.0, 4)
    assert four is not None and four.seconds == 10.0 and four.most_s == 57.0
    eight = wall.fit_repeat(TIMES, 1.0, 8)
    assert eight is not None and eight.seconds == 60 / 8 - WARMUP_S - 1.0
    many = wall.fit_repeat(TIMES, 1.0, 100)
    assert many is not None and many.seconds == LEAST_WINDOW_S
    clock.now_s += 57
    assert wall.fit_repeat(TIMES, 1.0, 1) is None


@pytest.mark.parametrize("request_s", [0.0, 1.0, 20.0])
def test_no_repeat_ends_after_the_allowed_overrun(request_s: float) -> None:
    """Also if every request of the window is cut off only by its time limit."""
    for limit_s, passed_s, cells in itertools.product((60.0, 600.0), (0.0, 10.0, 35.0, 56.0), (1, 3, 16)):
        clock = Clock()
        wall = WallBudget(limit_s, clock)
        clock.now_s += passed_s
        times = wall.fit_repeat(TIMES, request_s, cells)
        if times is not None:
            assert passed_s + WARMUP_S + times.most_s + times.timeout_s <= max(OVERRUN * limit_s, 300.0 + limit_s)
            assert times.timeout_s >= request_s or times.timeout_s == 300.0
            if limit_s == 60.0:
                assert passed_s + WARMUP_S + times.most_s + times.timeout_s <= 75.0


def test_an_endpoint_that_does_not_answer_uses_up_only_the_budget() -> None:
    ended = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def ask() -> PreparedEndpoint | None:
        async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            found = await prepare_in_time(LoadTarget.from_url(url), Load(concurrency=1), None, (), 0.5)
            await ended.wait()
            return found

    assert asyncio.run(ask()) is None


def test_the_reason_names_what_is_left_and_what_is_needed() -> None:
    clock = Clock()
    wall = WallBudget(120.0, clock)
    clock.now_s += 3.0
    told = "it takes about 2 min 00 s, and 1 min 57 s of the budget of 2 min 00 s are left"
    assert wall.describe_spent(120.0) == told
    clock.now_s += 117.0
    assert wall.describe_spent(120.0) == wall.describe_spent() == "the budget of 2 min 00 s is used up"


def test_needs_are_known_beforehand() -> None:
    need = estimate_need(8, 2, 10.0, starts_s=30.0, installs_s=5.0, checks=2)
    assert need == TimeNeed(5.0, 60.0, 90.0, 224.0) and need.total_s == 379.0
    assert (
        need.describe()
        == "installing and converting 5.0 s, starts 60.0 s, checks of answers 1 min 30 s, cells 3 min 44 s"
    )


@pytest.mark.engine
def test_cells_without_time_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    with serve_null(first_ms=10, interval_ms=1, tokens=8) as null:
        done = invoke(
            "bench", "--url", null.url, "--concurrency", ",".join(map(str, range(1, 31))), "--prompt-tokens", "24",
            "--output-tokens", "8", "--seconds", "5", "--repeats", "3", "--budget", "20s", "--json",
        )  # fmt: skip
    assert done.code == 0, done.err
    assert "all of it needs about" in done.err and "and the budget is 20.0 s" in done.err
    run = from_json(Run, done.out)
    assert run.finished and 0 < len(run.cells) < 30 and all(cell.halt == "time" for cell in run.cells)
    assert len(run.cells) + len(run.left_out) == 30
    assert run.left_out[-1].why == "not measured with 30 in flight: the budget of 20.0 s is used up"
    assert run.cells[0].quality is not None and "budget" in (run.cells[0].quality.note or "")
    assert store.find_run().left_out == run.left_out
