"""Scenarios: every figure has a source, and sessions are drawn as they say."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts.scenarios import (
    NAMES,
    SCENARIOS,
    adjust_scenario,
    compute_means,
    draw,
    draw_session,
    fit_context,
    get_scenario,
)
from bedplate.values.record import replace_fields
from bedplate.values.scenario import Distribution

every_scenario = pytest.mark.parametrize("name", NAMES)


@every_scenario
def test_every_figure_has_a_source(name: str) -> None:
    scenario = get_scenario(name)
    cited = {source.field for source in scenario.sources}
    needed = {"turns", "input_tokens", "output_tokens", "think_s"}
    if scenario.system_tokens:
        needed |= {"system_tokens"}
    if scenario.tool_share:
        needed |= {"tool_share", "tool_tokens", "tool_s"}
    if scenario.schema_share:
        needed |= {"schema_share"}
    assert needed <= cited and all(source.text for source in scenario.sources)


def test_rejects_an_unknown_name() -> None:
    with pytest.raises(UsageError, match="chat, rag, agent"):
        get_scenario("chatt")


@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(kind="constant", mean=7),
        Distribution(kind="geometric", mean=7),
        Distribution(kind="exponential", mean=7),
        Distribution(kind="lognormal", mean=7, cv=0.8),
    ],
)
def test_a_distribution_has_its_mean(distribution: Distribution) -> None:
    rng = random.Random(1)
    drawn = [draw(distribution, rng) for _ in range(20_000)]
    assert abs(statistics.fmean(drawn) - 7) < 0.2 and min(drawn) >= 0


def test_a_lognormal_distribution_has_its_coefficient_of_variation() -> None:
    rng = random.Random(1)
    drawn = [draw(Distribution(kind="lognormal", mean=100, cv=0.5), rng) for _ in range(20_000)]
    assert abs(statistics.pstdev(drawn) / statistics.fmean(drawn) - 0.5) < 0.03


@every_scenario
@given(number=st.integers(0, 200))
def test_no_request_exceeds_the_context(name: str, number: int) -> None:
    scenario = replace_fields(get_scenario(name), context_tokens=4096)
    session = draw_session(scenario, str(number))
    assert session.turns
    for turn, prompt in zip(session.turns, session.prompt_tokens, strict=True):
        assert prompt + turn.output_tokens <= 4096


@every_scenario
def test_sessions_depend_only_on_the_seed(name: str) -> None:
    scenario = get_scenario(name)
    assert draw_session(scenario, "0/1") == draw_session(scenario, "0/1")
    assert [draw_session(scenario, f"0/{n}") for n in range(9)] != [draw_session(scenario, f"1/{n}") for n in range(9)]


def test_a_prompt_contains_the_turns_before_it() -> None:
    session = next(one for n in range(50) if len((one := draw_session(SCENARIOS["chat"], str(n))).turns) > 2)
    prompts = session.prompt_tokens
    assert prompts[0] == session.system_tokens + session.turns[0].new_tokens
    assert prompts[1] == prompts[0] + session.turns[0].output_tokens + session.turns[1].new_tokens


def test_the_turn_after_a_tool_call_returns_its_result() -> None:
    turns = [turn for n in range(20) for turn in draw_session(SCENARIOS["agent"], str(n)).turns]
    assert any(turn.calls_tool for turn in turns) and not any(turn.calls_tool and turn.schema for turn in turns)
    for n in range(20):
        session = draw_session(SCENARIOS["agent"], str(n)).turns
        assert not session[-1].calls_tool, "nobody would return its result"
        assert [turn.after_tool for turn in session[1:]] == [turn.calls_tool for turn in session[:-1]]


def test_means_are_those_of_the_sources() -> None:
    chat, agent = compute_means(SCENARIOS["chat"]), compute_means(SCENARIOS["agent"])
    assert abs(chat.turns - 3.5) < 0.4 and abs(chat.output_tokens - 211) < 15 and abs(chat.wait_s - 30) < 3
    assert agent.structured_share > 0.7 and agent.history_tokens > agent.prompt_tokens / 2
    assert compute_means(SCENARIOS["code"]).history_tokens == 0


def test_a_smaller_context_ends_sessions_earlier() -> None:
    short = compute_means(fit_context(SCENARIOS["agent"], 8192))
    assert short.longest_tokens <= 8192 and short.turns < compute_means(SCENARIOS["agent"]).turns
    assert fit_context(SCENARIOS["chat"], 131072) == SCENARIOS["chat"]
    with pytest.raises(UsageError, match="needs a context"):
        fit_context(SCENARIOS["agent"], 2048)


def test_explicit_lengths_replace_those_of_the_scenario() -> None:
    changed = compute_means(adjust_scenario(SCENARIOS["chat"], prompt_tokens=700))
    assert abs(changed.prompt_tokens - 700) < 0.15 * 700 and changed.output_tokens < 211
    changed = compute_means(adjust_scenario(SCENARIOS["chat"], output_tokens=50))
    assert abs(changed.output_tokens - 50) < 5
    assert adjust_scenario(SCENARIOS["chat"], shared_prefix_tokens=0).system_tokens == 0
    with pytest.raises(UsageError, match="instead of 300"):
        adjust_scenario(SCENARIOS["agent"], prompt_tokens=300, output_tokens=300)
