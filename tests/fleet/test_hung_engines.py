"""SIGSTOP of engines of several kinds: the waiting client gets an error, and the engine is restarted."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S, have_ended, post_json, wait_for
from tests.fleet.serving import START_LIMIT_S, Serving

# The engine is installed and its weights are converted first, which may take longer than other tests may.
pytestmark = pytest.mark.timeout(2 * START_LIMIT_S)


TINY = str(Path(__file__).parents[1] / "models" / "llama")
"""Weights that need no conversion from GGUF: that takes longer than all the rest."""
MODELS = {"llama.cpp": (), "mistral.rs": (), "pytorch": (TINY,), "onnxruntime": (TINY,)}


def ask(serving: Serving) -> tuple[int, Any]:
    return post_json(f"{serving.root}/v1/completions", {"prompt": "Say a word.", "max_tokens": 4})


@pytest.mark.parametrize("engine", MODELS)
def test_stopped_engine_is_restarted(engine: str, bedplate_home: object) -> None:
    serving = Serving(*MODELS[engine], "--engine", engine, "--name", f"hung-{engine.replace('.', '')}")
    try:
        serving.wait_ready()
        assert ask(serving)[0] == 200
        processes = serving.engine_processes()
        answers: list[tuple[int, Any]] = []
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        asking = threading.Thread(target=lambda: answers.append(ask(serving)))
        asking.start()
        asking.join(HANG_S)
        assert answers and answers[0][0] == 504, answers
        assert answers[0][1]["error"]["code"] == "engine_hung"
        wait_for(lambda: have_ended(processes), "the stopped processes to be killed")
        wait_for(lambda: ask(serving)[0] == 200, "an answer of the new process")
        (line,) = [line for line in serving.printed if " hung: " in line]
        assert "(SIGSTOP), and it made no progress for " in line
        serving.stop()
    finally:
        serving.end()
