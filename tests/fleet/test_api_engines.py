"""Unmodified clients of other APIs against engines that have chat completions alone."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests import api_clients
from tests.api_engines import ENGINES
from tests.conftest import Served, have_ended, start_serve, wait_for

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Served, bool]]:
    one = start_serve("--engine", str(request.param))
    assert one.endpoint, "".join(one.stderr)
    yield one, ENGINES[request.param]
    below = one.list_descendants()
    assert one.stop() == 0
    wait_for(lambda: have_ended(below), "the engine's processes to end")


def test_the_anthropic_client_works(served: tuple[Served, bool]) -> None:
    api_clients.check_anthropic(served[0].root, MODEL, tools=served[1])


def test_the_responses_api_of_the_openai_client_works(served: tuple[Served, bool]) -> None:
    api_clients.check_responses(served[0].root, MODEL, tools=served[1])


def test_the_ollama_client_works(served: tuple[Served, bool]) -> None:
    api_clients.check_ollama(served[0].root, MODEL, tools=served[1])


def test_a_forced_tool_call_is_a_call(served: tuple[Served, bool]) -> None:
    if served[1]:
        api_clients.check_forced_calls(served[0].root, MODEL)
        return
    with pytest.raises(openai.BadRequestError, match="tools"):
        api_clients.check_forced_calls(served[0].root, MODEL)
