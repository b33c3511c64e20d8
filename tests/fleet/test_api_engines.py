"""Unmodified clients of other APIs against engines that have chat completions alone."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.api_clients import CHECKS, check_forced_calls
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


@pytest.mark.parametrize(("client", "api"), CHECKS)
def test_an_unmodified_client_works(served: tuple[Served, bool], client: str, api: str) -> None:
    CHECKS[client, api](served[0].root, MODEL, tools=served[1])


def test_a_forced_tool_call_is_a_call(served: tuple[Served, bool]) -> None:
    if served[1]:
        check_forced_calls(served[0].root, MODEL)
        return
    with pytest.raises(openai.BadRequestError, match="tools"):
        check_forced_calls(served[0].root, MODEL)
