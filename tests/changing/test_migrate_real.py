"""A real engine under steady streams, with bad challengers and a good one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Served, have_ended, pin_to_one_core, start_serve, wait_for
from tests.contract.documents import check_document
from tests.soak.challengers import installed
from tests.soak.streams import Counts, Streams, looked_at

from bedplate.run.environments import EngineEnvironment

STREAMS, TOKENS, THINK_S = 2, 5, 0.4
STEPS = ("--step", "50,100", "--step-seconds", "0.5", "--prefixes", "8")
STRICT = (*STEPS, "--step-limit", "60", "--slower", "3")
PATIENT = (*STEPS, "--step-limit", "120", "--slower", "30")
"""Limits for the good challenger, which must pass on a busy machine too."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("challengers") / "site", pause_s=1.2)


@pytest.fixture(scope="module")
def served(site: Path, builtin_gguf: Path, llama_environment: EngineEnvironment) -> Iterator[Served]:
    words = ("--name", "moving", "--engine", "llama.cpp", "--concurrency", "6", "--context", "512")
    with pin_to_one_core():
        one = start_serve(*words, env={"PYTHONPATH": str(site)})
    assert one.endpoint, "".join(one.stderr)
    yield one
    below = one.list_descendants()
    assert one.stop() == 0
    wait_for(lambda: have_ended(below), "the engines' processes to end")


def under_load(served: Served, site: Path, *words: str) -> tuple[int, dict[str, Any], str, Counts]:
    """`bedplate migrate`, as a person calls it, while streams go on."""
    env = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "bedplate", "migrate", words[0], "moving", *words[1:], "--json"]

    async def go() -> tuple[subprocess.CompletedProcess[str], Counts]:
        async with Streams(served.url, served.endpoint["model"], STREAMS, TOKENS, think_s=THINK_S) as streams:
            while streams.counts.whole < 8:
                await asyncio.sleep(0.05)
            run = lambda: subprocess.run(command, capture_output=True, text=True, env=env)  # noqa: E731
            done = await asyncio.to_thread(run)
        return done, streams.counts

    done, counts = asyncio.run(go())
    return done.returncode, check_document("migration", done.stdout) if done.stdout else {}, done.stderr, counts


@pytest.mark.parametrize(
    ("challenger", "stage", "reason"),
    [
        ("wrong", "answers", "it gives wrong answers: 0 of "),
        pytest.param("slow", "traffic", "times as long", marks=pytest.mark.measures),
        ("dying", "start", "no good"),
    ],
)
def test_bad_challenger_is_rolled_back_without_broken_streams(
    served: Served, site: Path, challenger: str, stage: str, reason: str
) -> None:
    code, done, said, counts = under_load(served, site, challenger, *STRICT)
    assert code == 1, said
    assert (done["outcome"], done["stage"]) == ("rolled back", stage), done
    assert reason in done["reason"] or (challenger == "slow" and "requests ended in" in done["reason"]), done["reason"]
    assert (counts.failed, counts.truncated, counts.duplicated) == ([], [], []) and counts.whole > 8


def test_good_challenger_takes_over_without_broken_streams(served: Served, site: Path, tmp_path: Path) -> None:
    """The same engine with more slots."""
    env = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    words = ("plan", "--engine", "llama.cpp", "--concurrency", "8", "--context", "512", "--json")
    planned = subprocess.run([sys.executable, "-m", "bedplate", *words], capture_output=True, text=True, env=env)
    (tmp_path / "plan.json").write_text(planned.stdout)
    before = served.find_engine().pid
    code, done, said, counts = under_load(served, site, "llama.cpp", "--plan", str(tmp_path / "plan.json"), *PATIENT)
    assert code == 0, said
    assert done["outcome"] == "migrated" and done["side_by_side"] and done["cut"] == 0
    assert [step["percent"] for step in done["steps"]] == [50, 100]
    assert {check["verdict"] for check in done["checks"]} == {"ok"}
    assert (counts.failed, counts.truncated, counts.duplicated) == ([], [], []) and counts.whole > 8
    assert served.find_engine().pid != before


def chunk(text: str, **more: Any) -> str:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": more.pop("finish", None)}]
    return f"data: {json.dumps({'id': 'a', 'choices': choices, **more})}\n\n"


USAGE = 'data: {"id": "a", "choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "wrong"),
    [
        (chunk("x") + chunk("y", finish="length") + USAGE + DONE, None),
        (chunk("x") + chunk("y", finish="length") + USAGE, "truncated"),
        (chunk("x") + USAGE + DONE, "truncated"),
        (chunk("x", finish="length") + USAGE.replace(": 2", ": 1") + DONE, "truncated"),
        (chunk("x", finish="length") + chunk("y", finish="length") + USAGE + DONE, "duplicated"),
        (chunk("x") + chunk("y", id="b", finish="length") + USAGE + DONE, "duplicated"),
        (chunk("x", finish="length") + USAGE + DONE + chunk("y"), "duplicated"),
        (chunk("x", finish="length") + USAGE.replace(": 2", ": 3") + DONE, "duplicated"),
        (chunk("x") + 'data: {"error": {"message": "gone"}}\n\n' + DONE, "failed"),
    ],
)
def test_stream_check_detects_faults(stream: str, wrong: str | None) -> None:
    found = looked_at(stream, 2)
    assert (found[0] if found else None) == wrong
