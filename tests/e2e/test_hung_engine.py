"""A real engine whose process is stopped by a signal, and one that is busy with a long prompt."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from tests.conftest import HANG_S, Served, have_ended, post_json, wait_for
from tests.e2e.test_killed_engine import Outcome, stream_once

DETECTED_S = 60
LONG_PROMPT_S = 120.0
ON_S, OFF_S = 0.02, 0.38
"""How long a throttled engine runs and is stopped in turn: a machine that is twenty times slower."""


def read_page(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask(served: Served, prompt: str) -> tuple[int, Any]:
    return post_json(f"{served.url}/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})


def count_restarts(served: Served) -> int:
    found = re.search(r"^bedplate_engine_restarts\{.*\} (\d+)", read_page(f"{served.root}/metrics")[1], re.MULTILINE)
    assert found is not None
    return int(found[1])


async def stop_during_stream(served: Served, engine: psutil.Process) -> Outcome:
    from openai import AsyncOpenAI

    outcome, first = Outcome(), asyncio.Event()
    async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        streaming = asyncio.create_task(stream_once(client, outcome, first))
        await asyncio.wait_for(first.wait(), HANG_S)
        engine.suspend()
        await asyncio.wait_for(streaming, HANG_S)
    return outcome


def test_stopped_engine_is_restarted_within_a_minute(serve: Callable[..., Served]) -> None:
    served = serve()
    engine = served.find_engine()
    outcome = asyncio.run(stop_during_stream(served, engine))
    assert outcome.error is not None and outcome.error.code == "engine_hung" and outcome.finish is None
    wait_for(lambda: have_ended([engine]), "the stopped engine to be killed")
    wait_for(lambda: read_page(f"{served.root}/health")[0] == 200, "the endpoint to be ready again")
    assert served.find_engine().pid != engine.pid and count_restarts(served) == 1
    assert ask(served, "The sky is")[0] == 200
    (line,) = [line for line in served.stderr if "llama.cpp hung: " in line]
    found = re.search(r"\(SIGSTOP\), and it made no progress for ([\d.]+) s while a request waited; restarting", line)
    assert found is not None and float(found[1]) < DETECTED_S


def test_stopped_engine_without_requests_is_restarted(serve: Callable[..., Served]) -> None:
    served = serve()
    engine = served.find_engine()
    engine.suspend()
    wait_for(lambda: have_ended([engine]), "the stopped engine to be killed")
    wait_for(lambda: read_page(f"{served.root}/health")[0] == 200, "the endpoint to be ready again")
    assert ask(served, "The sky is")[0] == 200 and count_restarts(served) == 1
    assert any("it did not answer its health check for " in line for line in served.stderr)


@contextlib.contextmanager
def throttle(process: psutil.Process) -> Iterator[None]:
    """Slow a process down."""
    enough = threading.Event()

    def run() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not enough.is_set():
                process.suspend()
                enough.wait(OFF_S)
                process.resume()
                time.sleep(ON_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.nightly
def test_engine_with_a_prompt_of_two_minutes_is_not_killed(serve: Callable[..., Served], one_core: None) -> None:
    served = serve("--context", "8192", "--concurrency", "1")
    engine = served.find_engine()
    answers: list[tuple[int, Any]] = []
    prompt = " ".join(f"{number} bottles stand on the wall." for number in range(1, 500))
    with throttle(engine):
        asking = threading.Thread(target=lambda: answers.append(ask(served, prompt)))
        asking.start()
        asking.join(LONG_PROMPT_S)
        assert asking.is_alive(), f"the prompt took less than two minutes: {answers}"
        assert count_restarts(served) == 0 and served.find_engine().pid == engine.pid
        assert served.stop() == 0
    asking.join(HANG_S)
    assert [(status, body["error"]["code"]) for status, body in answers] == [(503, "shutting_down")]
    assert not any("hung" in line for line in served.stderr)
