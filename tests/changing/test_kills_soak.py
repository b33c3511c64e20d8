"""A short run of the kill soak of docs/services.md, and tests that it detects faults."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.changing.traffic import make_request
from tests.conftest import pin_to_one_core, wait_for
from tests.soak.kills import (
    TOKEN,
    Answer,
    Judged,
    Kept,
    Life,
    Orphans,
    Outcome,
    body_of,
    compared,
    growth,
    judged,
    options_of,
    soaked,
    unexplained,
)
from tests.soak.shadows import Timed, table

from bedplate.run.environments import EngineEnvironment
from bedplate.values.record import replace_fields


@pytest.mark.nightly
def test_ten_kills_lose_nothing(
    builtin_gguf: Path, llama_environment: EngineEnvironment, own_home: Path, tmp_path: Path
) -> None:
    options = options_of(["--minutes", "0.4", "--kills", "10", "--seed", "3", "--streams", "2"])
    said: list[str] = []
    with (tmp_path / "serve.log").open("wb") as log, pin_to_one_core():
        outcome = asyncio.run(soaked(options, log, said.append))
    assert outcome.violations() == [], outcome.table()
    assert len(outcome.kills) == 10 and len({one.kind for one in outcome.kills}) >= 3
    # The number of responses between kills depends on the machine.
    assert outcome.kept.found >= 5 and len(outcome.lives) > 1, outcome.table()


# detection of faults


def make_chunk(tokens: int, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": more.pop("finish", None)}
    if tokens:
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}] * tokens}
    return f"data: {json.dumps({'id': 'a', 'choices': [choice], **more})}\n\n"


USAGE = 'data: {"id": "a", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
DONE = "data: [DONE]\n\n"
ERROR = 'data: {"error": {"message": "gone", "code": "engine_stopped"}}\n\n'


@pytest.mark.parametrize(
    ("stream", "outcome"),
    [
        (make_chunk(1) + make_chunk(1) + make_chunk(0, finish="length") + USAGE + DONE, "whole"),
        (make_chunk(1) + make_chunk(1, finish="length") + USAGE, "cut"),
        (make_chunk(1) + make_chunk(1) + USAGE + DONE, "cut"),
        (make_chunk(1) + make_chunk(0, finish="length") + USAGE + DONE, "cut"),
        (make_chunk(1) + make_chunk(1, finish="length") + USAGE.replace(": 2", ": 1") + DONE, "cut"),
        (make_chunk(1) + make_chunk(1, finish="length") + DONE, "cut"),
        (make_chunk(1) + make_chunk(1, finish="stop") + USAGE + DONE, "wrong"),
        (make_chunk(1) + make_chunk(1, id="b", finish="length") + USAGE + DONE, "wrong"),
        (make_chunk(1) + 'data: {"id": "a", "cho', "cut"),
        (make_chunk(1) + ERROR, "error"),
        ("", "cut"),
    ],
)
def test_classifies_streams(stream: str, outcome: str) -> None:
    assert judged(200, stream, stream=True, tokens=2).outcome == outcome


def test_classifies_plain_responses_and_errors() -> None:
    choice = {"finish_reason": "length", "logprobs": {"content": [{}, {}]}}
    whole = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    assert judged(200, whole, stream=False, tokens=2) == Judged("whole", prompt_tokens=9)
    assert judged(200, whole[:-5], stream=False, tokens=2).outcome == "cut"
    assert judged(200, whole, stream=False, tokens=3).outcome == "cut"
    assert judged(503, '{"error": {"message": "m", "code": "c"}}', stream=True, tokens=2) == Judged(
        "error", "HTTP 503 c"
    )
    assert judged(502, "<html>", stream=True, tokens=2).outcome == "wrong"


def test_consecutive_bodies_differ_in_length() -> None:
    bodies = [body_of(number, "m", 3 + number % 10, stream=bool(number % 3)) for number in range(90, 1100)]
    assert len({len(body) for body in bodies}) == len(bodies)
    assert all(json.loads(body)["user"] for body in bodies)


def make_answer(at_s: float, outcome: str = "whole", body_bytes: int = 700) -> Answer:
    return Answer(5, body_bytes, at_s - 1, at_s, Judged(outcome, prompt_tokens=9 if outcome == "whole" else None))


class TestRecords:
    kept = replace_fields(make_request(99.1, completion_tokens=5), prompt_tokens=9, body_bytes=700)

    def test_each_complete_response_has_a_record(self) -> None:
        found = compared([make_answer(100)], [self.kept], [])
        assert (found.found, found.lost, found.wrong) == (1, [], [])

    def test_only_records_of_the_last_second_before_a_kill_may_be_lost(self) -> None:
        assert compared([make_answer(100)], [], [100.4]).lost == [pytest.approx(0.4)]
        (late,) = compared([make_answer(100)], [], [101.2]).wrong
        assert "1.20 s before a kill" in late
        (never,) = compared([make_answer(100)], [], []).wrong
        assert "no kill" in never

    def test_duplicate_or_different_record_is_a_violation(self) -> None:
        assert "2 times" in compared([make_answer(100)], [self.kept, self.kept], []).wrong[0]
        other = replace_fields(self.kept, completion_tokens=4)
        assert "other tokens" in compared([make_answer(100)], [other], []).wrong[0]

    def test_undelivered_response_does_not_count(self) -> None:
        assert "it was not" in compared([make_answer(100, "error")], [self.kept], []).wrong[0]
        assert compared([make_answer(100, "closed")], [self.kept], [99.9]).wrong == []

    def test_equal_body_length_is_not_the_same_request(self) -> None:
        assert compared([make_answer(100)], [replace_fields(self.kept, at_s=9.0)], []).found == 0


def test_closed_connection_without_reason_is_a_violation() -> None:
    lives = [Life(1, 0.0, ready_s=1.0, died_s=50.0), Life(2, 50.1, ready_s=53.0)]
    assert unexplained([make_answer(50.2, "closed"), make_answer(52.0, "refused")], lives) == []
    assert len(unexplained([make_answer(40.0, "closed"), make_answer(60.0, "refused")], lives)) == 2


def make_life(sizes: list[int]) -> Life:
    return Life(1, 0.0, ready_s=0.0, samples=[(float(at), size * 1_000_000, 30) for at, size in enumerate(sizes)])


def test_detects_growing_memory() -> None:
    flat, growing = [100] * 60, [100 + at for at in range(60)]
    assert growth([make_life(flat)])[1] == []
    assert "memory of one process" in growth([make_life(growing)])[1][0]
    assert growth([make_life(flat), *(make_life([100] * 12) for _ in range(6))])[1] == []
    (wrong,) = growth([make_life(flat), *(make_life([100 + 4 * number] * 12) for number in range(6))])[1]
    assert "first and last third" in wrong


def test_detects_orphaned_processes() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={TOKEN: "mine"})
    orphans = Orphans("mine")
    try:
        wait_for(lambda: orphans.look(None) == 1 or None, "it to be seen")
        assert orphans.look(os.getpid()) == 0 and Orphans("other").look(None) == 0
    finally:
        process.communicate()


def test_fewer_kills_than_requested_is_a_violation() -> None:
    done = Outcome(
        [make_answer(100)], [], [make_life([100] * 60)], [], 0, Orphans("t"), 0, Kept(found=1), "ok", 5, 60.0
    )
    assert done.violations() == ["0 kills of 5"] and "| complete answers | 1," in done.table()


def test_detects_requests_slowed_by_a_shadow() -> None:
    usual = [Timed("without", 100 + number % 7, 10.0) for number in range(40)]
    same = [Timed("while it is tried", 100 + number % 7, 10.0) for number in range(40)]
    slower = [Timed("while it is tried", 130 + number % 7, 10.0) for number in range(40)]
    assert table([*usual, *same])[1] is False
    text, slowed = table([*usual, *slower])
    assert slowed and "while it is tried | 40 |" in text
    computing = [replace(one, took_ms=100.0, shadow_ms=3.0) for one in same]
    assert table([*usual, *computing])[1] is True
