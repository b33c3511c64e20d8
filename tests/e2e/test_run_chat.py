"""`bedplate run` with the real engine and the built-in model: a chat in a real terminal, and single answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.commands import run
from tests.conftest import Served, have_ended, wait_for
from tests.contract.documents import check_document
from tests.terminals import CTRL_C, CTRL_D, Terminal

from bedplate.hosting.records import list_running
from bedplate.run.environments import EngineEnvironment

pytestmark = pytest.mark.engine


def count_prompt_tokens(shown: str) -> int:
    found = re.search(r"([\d,]+) \+ [\d,]+ tokens", shown)
    assert found is not None, shown
    return int(found[1].replace(",", ""))


def read_stats(terminal: Terminal) -> str:
    terminal.type("/stats\r")
    return terminal.read_until(r"engine memory \S+ \S+")


def test_a_chat_streams_remembers_stops_and_ends(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment
) -> None:
    """Nothing runs before, and nothing runs afterwards."""
    with Terminal("run", "--temperature", "0", "--max-tokens", "24") as terminal:
        terminal.read_until(r"smollm2-135m-instruct on llama.cpp at http://127.0.0.1:\d+/v1")
        terminal.read_until(">>> ")
        (record,) = list_running()
        engine = psutil.Process(record.pid).children(recursive=True)
        terminal.type("Name a colour.\r")
        terminal.read_until(">>> ")
        shown = read_stats(terminal)
        assert re.search(r"TTFT [\d.,]+ ms · [\d.,]+ tok/s · ", shown), shown
        first = count_prompt_tokens(shown)

        terminal.type("Name another one.\r")
        terminal.read_until("Name another one.")
        terminal.read_until(">>> ")
        second = count_prompt_tokens(read_stats(terminal))
        assert second > first + 20  # the first question, its answer of 24 tokens, and the second question

        terminal.type("/clear\rName a colour.\r")
        terminal.read_until("the conversation is empty")
        terminal.read_until("Name a colour.")
        terminal.read_until(">>> ")
        assert count_prompt_tokens(read_stats(terminal)) == first

        terminal.type("/help\r")
        terminal.read_until("/exit +end the chat")
        terminal.type("/colour\r")
        terminal.read_until("there is no command /colour; /help lists the commands")
        terminal.read_until(">>> ")
        terminal.interrupt_prompt()
        terminal.read_until("Ctrl-D or /exit ends the chat")
        terminal.read_until(">>> ")  # before the prompt, the terminal itself takes Ctrl-D
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    wait_for(lambda: have_ended(engine), "the engine to end")
    assert not list_running()


def test_ctrl_c_stops_an_answer_and_not_the_chat(own_home: Path, serve: Callable[..., Served]) -> None:
    """The running service is reused, and stays."""
    served = serve()
    with Terminal("run", "builtin") as terminal:
        terminal.read_until(re.escape(served.url))
        terminal.read_until(">>> ")
        terminal.type("Count from 1 to 2000, one number each line.\r")
        terminal.read_until(r"each line\.\n[^\n]+\n?[^\n]")
        terminal.type(CTRL_C)
        terminal.read_until("stopped")
        terminal.read_until(">>> ")
        terminal.type('"""Say\r')
        terminal.read_until(r"\.\.\. ")
        terminal.type('hello."""\r')
        terminal.read_until(">>> ")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert served.process.poll() is None
    (record,) = list_running()
    assert record.url == served.url


def test_a_killed_chat_takes_its_service_along(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment
) -> None:
    with Terminal("run") as terminal:
        terminal.read_until(">>> ")
        (record,) = list_running()
        processes = [psutil.Process(record.pid), *psutil.Process(record.pid).children(recursive=True)]
        terminal.process.kill()
        wait_for(lambda: have_ended(processes), "the service to end")


def test_one_answer_from_arguments_and_stdin(own_home: Path, serve: Callable[..., Served]) -> None:
    served = serve()
    fixed = ("--temperature", "0", "--max-tokens", "16")
    plain = answer("run", "builtin", "Why is the sky blue?", *fixed)
    assert plain.returncode == 0 and plain.stderr == ""
    assert plain.stdout.endswith("\n") and plain.stdout.strip()

    document = json.loads(answer("run", "Why is the sky blue?", "--json", *fixed).stdout)
    check_document("answer", json.dumps(document))
    assert document["text"] + "\n" == plain.stdout
    assert (document["url"], document["engine"], document["schema"]) == (served.url, "llama.cpp", "answer/1")
    assert document["output_tokens"] == 16 and document["finish_reason"] == "length"
    assert 0 < document["ttft_ms"] < document["duration_ms"] and document["memory_bytes"] > 0

    piped = answer("run", "--json", *fixed, stdin="Why is the sky blue?")
    assert json.loads(piped.stdout)["text"] == document["text"]
    both = json.loads(answer("run", "builtin", "Translate:", "--json", *fixed, stdin="Why is the sky blue?").stdout)
    assert both["prompt_tokens"] > document["prompt_tokens"]


def test_a_service_that_was_kept_is_reused(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment
) -> None:
    first = answer("run", "builtin", "Hello", "--max-tokens", "4", "--keep")
    assert first.returncode == 0, first.stderr
    (record,) = list_running()
    assert f"bedplate stop {record.name}" in first.stderr
    second = answer("run", "smollm2:135m", "Hello", "--max-tokens", "4", "--json")
    assert json.loads(second.stdout)["url"] == record.url
    assert run("stop", record.name).code == 0


def test_an_endpoint_with_a_key(own_home: Path, serve: Callable[..., Served]) -> None:
    serve(env={"BEDPLATE_API_KEY": "correct"})
    refused = answer("run", "builtin", "Hello", "--max-tokens", "4")
    assert refused.returncode == 2 and refused.stdout == "" and "BEDPLATE_API_KEY" in refused.stderr
    accepted = answer("run", "builtin", "Hello", "--max-tokens", "4", env={"BEDPLATE_API_KEY": "correct"})
    assert accepted.returncode == 0 and accepted.stdout.strip()


def answer(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bedplate", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )
