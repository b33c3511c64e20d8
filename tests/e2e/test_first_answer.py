"""End to end: `bedplate serve` of the built-in model, one real answer, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.conftest import have_ended, start_serve, wait_for

from bedplate.run.environments import EngineEnvironment

pytestmark = pytest.mark.first_answer


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """An engine with one thread: several would spin while they wait for each other, and other tests use the CPUs."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("one_cpu")
def test_serve_answers_and_ctrl_c_stops_everything(builtin_gguf: Path, llama_environment: EngineEnvironment) -> None:
    from openai import OpenAI

    served = start_serve("--check")
    assert served.endpoint, "".join(served.stderr)
    processes = [psutil.Process(served.process.pid), *served.list_descendants()]
    assert len(processes) == 3, "bedplate, the warden and the engine"
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "What is the capital of France? Answer in one word."}],
            max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    with urllib.request.urlopen(f"{served.root}/metrics") as answer:
        assert b"bedplate_" in answer.read()
    assert served.stop(signal.SIGINT) == 0
    wait_for(lambda: have_ended(processes), "every process to end")
