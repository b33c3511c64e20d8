"""Sessions on the real llama.cpp with the real model: answers have a schema, and its cache has the earlier turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tests.conftest import Served

from bedplate.facts.scenarios import SCENARIOS
from bedplate.measure.load import LoadTarget, measure, prepare, run
from bedplate.values.record import replace_fields
from bedplate.values.run import Load
from bedplate.values.scenario import Distribution

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_core")]


def test_the_answers_of_an_agent_are_structured_and_its_history_is_cached(serve: Callable[..., Served]) -> None:
    served = serve("--context", "4096")
    scenario = replace_fields(
        SCENARIOS["agent"],
        turns=Distribution(kind="constant", mean=3),
        system_tokens=120,
        input_tokens=Distribution(kind="constant", mean=20),
        tool_tokens=Distribution(kind="constant", mean=30),
        output_tokens=Distribution(kind="constant", mean=16),
        tool_s=Distribution(kind="constant", mean=0.01),
        tool_share=1.0,
        context_tokens=3072,
    )
    load = Load(arrivals="constant", requests_per_s=0.01, scenario=scenario, prompt_tokens=200, output_tokens=16)
    target = LoadTarget.from_url(served.root, model=served.endpoint["model"])
    prepared = run(prepare(target, load))
    # A small model without tools in its own template is not forced to call one; a schema describes the call.
    assert prepared.tools is not None or prepared.schemas, prepared.notes
    limits = {"least_requests": 3, "seconds": 1.0, "most_seconds": 600.0, "timeout_s": 600.0}
    repeat = run(measure(target, load, prepared=prepared, warmup_s=0.0, check=False, **limits))  # type: ignore[arg-type]
    turns = sorted((sample for sample in repeat.samples if sample.session == 0), key=lambda sample: sample.turn or 0)
    assert [(turn.turn, turn.outcome) for turn in turns] == [(number, "ok") for number in (1, 2, 3)], turns
    for before, after in itertools.pairwise(turns):
        assert before.prompt_tokens is not None and after.prompt_tokens is not None
        assert after.prompt_tokens > before.prompt_tokens, "it contains the turn before"
        assert (after.cached_tokens or 0) >= 0.8 * before.prompt_tokens, "the engine found it in its cache"
    assert repeat.sessions[0].outcome == "complete"
