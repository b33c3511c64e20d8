"""The scenarios, with the source of each figure, and sessions drawn from them. Pure and deterministic for a seed."""

from __future__ import annotations

import math
import random
from typing import NamedTuple, get_args

from bedplate.errors import UsageError
from bedplate.values.record import replace_fields
from bedplate.values.scenario import (
    Distribution,
    Scenario,
    ScenarioName,
    ScenarioSource,
    SessionPlan,
    SessionTurn,
)

NAMES: tuple[ScenarioName, ...] = get_args(ScenarioName)
MOST_TURNS = 500
SCALED_ERROR = 0.15
"""Largest relative error of a mean prompt length that was asked for."""
SAMPLED_REQUESTS = 2000
"""Requests that the means of a scenario are computed from."""

_AZURE_CONV = "computed from Azure's LLM inference trace 2023, conversation"
_AZURE_CODE = "computed from Azure's LLM inference trace 2023, code: mean 2,048 in and 28 out, cv 0.96 and 2.1"
_COPILOT = "GitHub Copilot coding agent traces 2026, dataset card"
_TRACELAB = "TraceLab, University of Washington"
_THINK = "the default think time of users; docs/workload.md gives the reason"
_ASSUMED = "assumed: no public figure was found"


def _constant(mean: float) -> Distribution:
    return Distribution(kind="constant", mean=mean)


def _lognormal(mean: float, cv: float) -> Distribution:
    return Distribution(kind="lognormal", mean=mean, cv=cv)


def _cite(**texts: str) -> tuple[ScenarioSource, ...]:
    return tuple(ScenarioSource(field=field, text=text) for field, text in texts.items())


SCENARIOS: dict[ScenarioName, Scenario] = {
    "chat": Scenario(
        name="chat",
        turns=Distribution(kind="geometric", mean=3.5),
        system_tokens=500,
        input_tokens=_lognormal(140, 1.0),
        output_tokens=_lognormal(211, 0.77),
        think_s=Distribution(kind="exponential", mean=30.0),
        sessions=16,
        context_tokens=8192,
        sources=_cite(
            turns="ShareGPT: 330,239 turns in 94,145 conversations, 3.51 each (ShareChat, arXiv 2512.17843, table 1)",
            system_tokens="the common prefix of a public multi-turn benchmark (generate_multi_turn.json)",
            input_tokens="user messages of 120 to 160 tokens in the same benchmark; the cv is assumed",
            output_tokens=f"{_AZURE_CONV}: mean 211, cv 0.77",
            think_s=_THINK,
        ),
    ),
    "rag": Scenario(
        name="rag",
        turns=Distribution(kind="geometric", mean=1.5),
        system_tokens=500,
        input_tokens=_lognormal(2600, 0.3),
        output_tokens=_lognormal(211, 0.77),
        think_s=Distribution(kind="exponential", mean=30.0),
        sessions=8,
        context_tokens=16384,
        sources=_cite(
            turns="computed from Mooncake's conversation trace: 12,031 requests continue one another in 8,057 chains",
            system_tokens="as chat",
            input_tokens="chunks of 512 tokens (arXiv 2411.03538); five chunks and a short question are assumed",
            output_tokens=f"{_AZURE_CONV}: mean 211, cv 0.77",
            think_s=_THINK,
        ),
    ),
    "agent": Scenario(
        name="agent",
        turns=Distribution(kind="geometric", mean=31.0),
        system_tokens=3000,
        input_tokens=_lognormal(140, 1.0),
        output_tokens=_lognormal(300, 1.0),
        think_s=Distribution(kind="exponential", mean=30.0),
        tool_share=0.87,
        tool_tokens=_lognormal(1200, 1.0),
        tool_s=Distribution(kind="exponential", mean=1.9),
        sessions=4,
        context_tokens=65536,
        sources=_cite(
            turns=f"{_COPILOT}: 3.95 user turns with 7.83 LLM calls each",
            system_tokens="first requests of 3,040 to 3,200 tokens in a trace of Claude on SWE-bench "
            "(swe_multiturn-claude-trace-tokenized-qwen3.5)",
            input_tokens="as chat",
            output_tokens=f"{_TRACELAB}: median 252 (Claude) and 184 (Codex); here the median is 212",
            think_s=_THINK,
            tool_share=f"{_COPILOT}: all of 7.83 LLM calls of a turn but the first follow a tool",
            tool_tokens=f"{_TRACELAB}: median of the appended tokens 857 (Claude) and 886 (Codex); here 849",
            tool_s=f"{_TRACELAB}: 97.8 h end to end in 184,000 calls of exec_command",
            context_tokens="agentic-coding-trajectories: the longest prompt of a session is 69,274 tokens at p95",
        ),
    ),
    "code": Scenario(
        name="code",
        turns=_constant(1),
        input_tokens=_lognormal(2048, 0.96),
        output_tokens=_lognormal(28, 2.1),
        think_s=_constant(0),
        sessions=8,
        context_tokens=8192,
        sources=_cite(
            turns="the trace has no sessions: each completion is a request of its own",
            input_tokens=_AZURE_CODE,
            output_tokens=_AZURE_CODE,
            think_s="the next request of another user follows at once",
        ),
    ),
    "batch": Scenario(
        name="batch",
        turns=_constant(1),
        system_tokens=624,
        input_tokens=_lognormal(531, 0.96),
        output_tokens=_lognormal(211, 0.77),
        think_s=_constant(0),
        schema_share=0.5,
        sessions=16,
        context_tokens=8192,
        sources=_cite(
            turns="Qwen-Bailian trace B of API requests: less than 0.1 % are multi-turn (arXiv 2506.02634)",
            system_tokens="54 % of the prompt tokens of that trace repeat an earlier request (arXiv 2506.02634)",
            input_tokens=f"the rest of a prompt of 1,155 tokens, {_AZURE_CONV}",
            output_tokens=f"{_AZURE_CONV}: mean 211, cv 0.77",
            think_s="programs do not think",
            schema_share=_ASSUMED,
        ),
    ),
    "voice": Scenario(
        name="voice",
        turns=Distribution(kind="geometric", mean=10.0),
        system_tokens=800,
        input_tokens=_lognormal(25, 0.5),
        output_tokens=_lognormal(40, 0.5),
        think_s=Distribution(kind="exponential", mean=8.0),
        sessions=8,
        context_tokens=4096,
        sources=_cite(
            turns=_ASSUMED,
            system_tokens="a context of about 800 tokens (callingscout.ai, below 400ms)",
            input_tokens=_ASSUMED,
            output_tokens=_ASSUMED,
            think_s=f"{_ASSUMED}; the caller listens to the answer and speaks",
        ),
    ),
}  # fmt: skip


class ScenarioMeans(NamedTuple):
    """Means over the requests of a scenario, computed from drawn sessions."""

    turns: float
    prompt_tokens: float
    output_tokens: float
    history_tokens: float
    """Prompt tokens that repeat earlier requests of the same session, without the shared system prompt."""
    wait_s: float
    """Between an answer and the next request of the session."""
    longest_tokens: int
    """Prompt and answer of the longest drawn request."""
    structured_share: float
    """Share of requests whose answer must be a tool call or match a JSON schema."""


def get_scenario(name: str) -> Scenario:
    for known, scenario in SCENARIOS.items():
        if known == name:
            return scenario
    raise UsageError(f"--scenario {name!r} is not one of {', '.join(NAMES)}")


def draw_session(scenario: Scenario, seed: str) -> SessionPlan:
    """The session for this seed. It ends before a request would exceed the context."""
    rng = random.Random(f"{scenario.name}/{seed}")  # noqa: S311
    wanted = min(MOST_TURNS, draw_count(scenario.turns, rng))
    turns: list[SessionTurn] = []
    held = scenario.system_tokens
    after_tool, wait_s = False, 0.0
    for number in range(wanted):
        calls_tool = number + 1 < wanted and rng.random() < scenario.tool_share
        new = draw_count(scenario.tool_tokens if after_tool else scenario.input_tokens, rng)
        output = draw_count(scenario.output_tokens, rng)
        schema = not calls_tool and rng.random() < scenario.schema_share
        next_wait_s = draw(scenario.tool_s if calls_tool else scenario.think_s, rng)
        room = scenario.context_tokens - held
        if new + output > room:
            if turns:
                break
            new, output = max(1, min(new, room - 1 - min(output, room // 4))), max(1, min(output, room // 4))
        turns.append(
            SessionTurn(
                new_tokens=new, output_tokens=output, wait_s=wait_s, after_tool=after_tool, calls_tool=calls_tool,
                schema=schema,
            )
        )  # fmt: skip
        held += new + output
        after_tool, wait_s = calls_tool, next_wait_s
    if turns[-1].calls_tool:  # nobody returns the result of a call in the last turn
        turns[-1] = replace_fields(turns[-1], calls_tool=False)
    return SessionPlan(turns=tuple(turns), system_tokens=scenario.system_tokens)


def draw(distribution: Distribution, rng: random.Random) -> float:
    mean = distribution.mean
    if mean <= 0:
        return 0.0
    if distribution.kind == "exponential":
        return rng.expovariate(1 / mean)
    if distribution.kind == "lognormal" and distribution.cv > 0:
        sigma = math.sqrt(math.log(1 + distribution.cv**2))
        return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    if distribution.kind == "geometric" and mean > 1:
        return 1 + math.floor(math.log(1 - rng.random()) / math.log(1 - 1 / mean))
    return mean


def draw_count(distribution: Distribution, rng: random.Random) -> int:
    return max(1, round(draw(distribution, rng)))


def compute_means(scenario: Scenario) -> ScenarioMeans:
    """The means of the sessions as they are drawn, with the limit of the context."""
    sessions: list[SessionPlan] = []
    requests = 0
    while requests < SAMPLED_REQUESTS:
        sessions.append(draw_session(scenario, f"mean {len(sessions)}"))
        requests += len(sessions[-1].turns)
    prompts = history = outputs = structured = longest = 0
    waits_s: list[float] = []
    for session in sessions:
        for turn, prompt in zip(session.turns, session.prompt_tokens, strict=True):
            prompts += prompt
            outputs += turn.output_tokens
            history += prompt - turn.new_tokens - session.system_tokens
            structured += turn.schema or turn.calls_tool
            longest = max(longest, prompt + turn.output_tokens)
        waits_s += [turn.wait_s or 0.0 for turn in session.turns[1:]]
    return ScenarioMeans(
        turns=requests / len(sessions),
        prompt_tokens=prompts / requests,
        output_tokens=outputs / requests,
        history_tokens=history / requests,
        wait_s=sum(waits_s) / len(waits_s) if waits_s else 0.0,
        longest_tokens=longest,
        structured_share=structured / requests,
    )


def fit_context(scenario: Scenario, max_context: int | None) -> Scenario:
    """The scenario for a model with this context. Raises `UsageError` if its first requests do not fit."""
    if max_context is None or max_context >= scenario.context_tokens:
        return scenario
    least = scenario.system_tokens + scenario.output_tokens.mean + min(scenario.input_tokens.mean, 256)
    if least > max_context:
        raise UsageError(
            f"the scenario {scenario.name} needs a context of {least:,.0f} tokens, and the model has {max_context:,}",
            hint="pass a smaller --prompt-tokens, which scales all parts of the prompts",
        )
    return replace_fields(scenario, context_tokens=max_context)


def adjust_scenario(
    scenario: Scenario,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    shared_prefix_tokens: int | None = None,
) -> Scenario:
    """The scenario with explicit lengths. A mean prompt length scales all lengths that are not given."""
    if output_tokens is not None:
        scenario = _scale(scenario, 1.0, output_tokens / scenario.output_tokens.mean)
    if prompt_tokens is not None:
        scenario = _scale_to_prompt(scenario, prompt_tokens, with_answers=output_tokens is None)
    if shared_prefix_tokens is not None:
        scenario = replace_fields(scenario, system_tokens=shared_prefix_tokens)
    return scenario


def _scale_to_prompt(scenario: Scenario, prompt_tokens: int, *, with_answers: bool) -> Scenario:
    """Bisection, because a context limit and the answers in later prompts do not scale in proportion."""
    free = replace_fields(scenario, context_tokens=max(scenario.context_tokens, 64 * prompt_tokens))
    low, high = 0.0, 16.0
    for _ in range(12):
        middle = (low + high) / 2
        found = compute_means(_scale(free, middle, middle if with_answers else 1.0)).prompt_tokens
        low, high = (middle, high) if found < prompt_tokens else (low, middle)
    scaled = _scale(scenario, high, high if with_answers else 1.0)
    found = compute_means(scaled).prompt_tokens
    if abs(found - prompt_tokens) > SCALED_ERROR * prompt_tokens:
        raise UsageError(
            f"prompts of the scenario {scenario.name} would have {found:,.0f} tokens instead of {prompt_tokens:,}",
            hint="the context and the answers of earlier turns limit it; change --output-tokens, or leave one out",
        )
    return scaled


def _scale(scenario: Scenario, prompts: float, answers: float) -> Scenario:
    def times(distribution: Distribution, factor: float) -> Distribution:
        return replace_fields(distribution, mean=distribution.mean * factor)

    return replace_fields(
        scenario,
        system_tokens=round(scenario.system_tokens * prompts),
        input_tokens=times(scenario.input_tokens, prompts),
        tool_tokens=times(scenario.tool_tokens, prompts),
        output_tokens=times(scenario.output_tokens, answers),
    )
