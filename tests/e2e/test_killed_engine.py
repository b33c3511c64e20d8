"""The engine is killed repeatedly during streams: no client gets a truncated answer that looks complete."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.conftest import HANG_S, Served, have_ended, wait_for

if TYPE_CHECKING:
    import openai
    from openai import AsyncOpenAI

STREAMS = 8
KILLS = 20
MODEL = "smollm2-135m-instruct"


class Outcome:
    """The result of one client."""

    def __init__(self) -> None:
        self.chunks = 0
        self.finish: str | None = None
        self.error: openai.APIError | None = None


async def stream_once(client: AsyncOpenAI, outcome: Outcome, first: asyncio.Event) -> None:
    import openai

    try:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a very long story about the sea."}],
            max_tokens=1500,
            stream=True,
        )
        async for chunk in stream:
            outcome.chunks += 1
            first.set()
            outcome.finish = chunk.choices[0].finish_reason or outcome.finish
    except openai.APIError as error:
        outcome.error = error


async def kill_under_load(served: Served) -> list[Outcome]:
    from openai import AsyncOpenAI

    engine = served.find_engine()
    async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        outcomes = [Outcome() for _ in range(STREAMS)]
        first = asyncio.Event()
        tasks = [asyncio.create_task(stream_once(client, outcome, first)) for outcome in outcomes]
        await asyncio.wait_for(first.wait(), HANG_S)
        engine.kill()
        await asyncio.wait_for(asyncio.gather(*tasks), HANG_S)
    wait_for(lambda: have_ended([engine]), "the killed engine to end")
    return outcomes


def list_alive(served: Served) -> list[psutil.Process]:
    return [process for process in served.list_descendants() if not have_ended([process])]


def is_healthy(served: Served) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{served.root}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.mark.timeout(600)
def test_survives_engine_killed_twenty_times_during_streams(serve: Callable[..., Served]) -> None:
    served = serve()
    engines = set()
    for round_number in range(KILLS):
        engines.add(served.find_engine().pid)
        outcomes = asyncio.run(kill_under_load(served))
        assert any(outcome.chunks for outcome in outcomes)
        for outcome in outcomes:
            # Complete, or an error that the client library recognizes; never an end without either.
            whole = outcome.finish is not None and outcome.error is None
            assert whole or outcome.error is not None, f"round {round_number}: a stream ended as if it were complete"
            if outcome.error is not None:
                assert "llama.cpp" in outcome.error.message
        wait_for(lambda: served.find_engine().pid not in engines and is_healthy(served), "the endpoint to be back")
        wait_for(lambda: len(list_alive(served)) == 2, f"one warden and one engine, not {list_alive(served)}")
    assert len(engines) == KILLS


def test_sigkill_of_bedplate_leaves_no_process(serve: Callable[..., Served]) -> None:
    served = serve()
    below = served.list_descendants()
    assert len(below) == 2
    os.kill(served.process.pid, signal.SIGKILL)
    wait_for(lambda: have_ended(below), "the warden and the engine to end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything_with_status_0(serve: Callable[..., Served], number: int) -> None:
    served = serve()
    below = served.list_descendants()
    assert served.stop(number) == 0
    wait_for(lambda: have_ended(below), "the warden and the engine to end")


def test_ctrl_c_during_a_stream_ends_it_with_an_error(serve: Callable[..., Served]) -> None:
    from openai import AsyncOpenAI

    served = serve()

    async def interrupt() -> Outcome:
        outcome, first = Outcome(), asyncio.Event()
        async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            task = asyncio.create_task(stream_once(client, outcome, first))
            await asyncio.wait_for(first.wait(), HANG_S)
            served.process.send_signal(signal.SIGINT)
            await asyncio.wait_for(task, HANG_S)
        return outcome

    outcome = asyncio.run(interrupt())
    assert outcome.finish is not None or (outcome.error is not None and "shutting down" in outcome.error.message)
    assert served.process.wait(HANG_S) == 0


def test_ctrl_c_on_the_terminal_stops_everything(llama_environment: object, builtin_gguf: Path) -> None:
    """As a terminal does: the signal goes to the foreground process group only."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bedplate", "serve", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert any("Ready" in line for line in iter(process.stdout.readline, ""))
        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) == 0
    wait_for(lambda: have_ended(below), "the warden and the engine to end")
