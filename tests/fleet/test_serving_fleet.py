"""Every engine that this machine can run, from `bedplate serve --engine ID` on, with the built-in model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from tests.conftest import Served, gone, start_serve, wait_for

ENGINES = ("llama.cpp", "mistral.rs", "onnxruntime", "mlx", "pytorch", "vllm")
QUESTION = "What is the capital of France?"
START_LIMIT_S = 900
"""Of an engine that was killed, on a machine that may be busy: vLLM takes a minute on an idle one."""


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, builtin_gguf: Path) -> Iterator[Served]:
    one = start_serve("--engine", request.param, "--no-check")
    assert one.endpoint, "".join(one.stderr)
    yield one
    below = one.descendants()
    assert one.stop() == 0
    wait_for(lambda: gone(below), "the engine's processes to end")


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=600)


def ask(served: Served, text: str = QUESTION) -> openai.types.chat.ChatCompletion:
    return client(served).chat.completions.create(
        model=served.endpoint["model"],
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=24,
    )


def test_it_answers(served: Served) -> None:
    answer = ask(served)
    assert (answer.choices[0].message.content or "").strip()
    assert answer.usage is not None and answer.usage.prompt_tokens == 37
    assert 0 < answer.usage.completion_tokens <= 24


def test_it_streams_what_it_answers_with_usage_and_an_end(served: Served) -> None:
    whole = ask(served).choices[0].message.content
    stream = client(served).chat.completions.create(
        model=served.endpoint["model"],
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole
    usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usage and usage[-1].prompt_tokens == 37


def test_it_answers_four_at_once(served: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: ask(served, f"Count to {number}."), range(3, 7)))
    assert all((answer.choices[0].message.content or "").strip() for answer in answers)


def test_it_is_started_again_when_it_is_killed(served: Served) -> None:
    before = ask(served).choices[0].message.content
    engine = next(one for one in served.descendants() if not is_warden(one))
    engine.kill()
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with contextlib.suppress(openai.APIError):
            assert ask(served).choices[0].message.content == before
            return
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.5)


def test_a_second_start_finds_everything_there(served: Served) -> None:
    name = served.endpoint["engine"]
    again = start_serve("--engine", name, "--no-check", env=dict(os.environ))
    try:
        assert again.endpoint, "".join(again.stderr)
        assert not [line for line in again.stderr if "installing" in line or "converting" in line]
    finally:
        again.stop()


def is_warden(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("warden.py") for word in process.cmdline())
    return True
