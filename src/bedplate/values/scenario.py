"""Scenario: the distributions that the sessions of a usual kind of traffic are drawn from, and the drawn sessions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bedplate.values.record import Record

ScenarioName = Literal["chat", "rag", "agent", "code", "batch", "voice"]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Distribution(Record, frozen=True, kw_only=True):
    """A distribution of positive figures, by its mean."""

    kind: Literal["constant", "geometric", "exponential", "lognormal"]
    mean: NotNegative
    cv: NotNegative = 1.0
    """Coefficient of variation of a log-normal distribution; the others do not use it."""


class ScenarioSource(Record, frozen=True, kw_only=True):
    """Where the figures of one field were read, or that they are assumed."""

    field: str
    text: str


class Scenario(Record, frozen=True, kw_only=True):
    """One kind of traffic. Each turn of a session sends all earlier turns and answers again."""

    name: ScenarioName
    turns: Distribution
    """Requests per session."""
    system_tokens: Tokens = 0
    """System prompt and tool definitions that all sessions share."""
    input_tokens: Distribution
    """Tokens that a turn of the user adds to the prompt."""
    output_tokens: Distribution
    think_s: Distribution
    """Seconds between an answer and the same user's next turn."""
    tool_share: Share = 0.0
    """Share of the turns after the first that return the result of a tool instead of a user's message."""
    tool_tokens: Distribution = Distribution(kind="constant", mean=0.0)
    """Tokens of a tool's result."""
    tool_s: Distribution = Distribution(kind="constant", mean=0.0)
    """Seconds that a tool takes, between a tool call and its result."""
    schema_share: Share = 0.0
    """Share of the answers to users that must match a JSON schema."""
    sessions: Count = 4
    """Sessions at the same time, if nothing else is specified."""
    context_tokens: Count
    """A session ends before a request would exceed this length, prompt and answer together."""
    sources: tuple[ScenarioSource, ...] = ()


class SessionTurn(Record, frozen=True, kw_only=True):
    """One request of a session."""

    new_tokens: Count
    """Tokens that it adds to the prompt of the session."""
    output_tokens: Count
    wait_s: NotNegative | None = 0.0
    """Seconds after the previous answer; `None`: it is sent at `at_s`, or after that answer if it is later."""
    at_s: float | None = None
    """Time in a trace, from its beginning."""
    after_tool: bool = False
    """Whether it returns the result of a tool."""
    calls_tool: bool = False
    """Whether its answer must be a tool call."""
    schema: bool = False
    """Whether its answer must match a JSON schema."""
    restarts: bool = False
    """Whether it begins without the earlier turns, because their context was compacted or replaced."""


class SessionPlan(Record, frozen=True, kw_only=True):
    """One session before it is sent; the answers follow from the engine."""

    turns: tuple[SessionTurn, ...]
    system_tokens: Tokens = 0
    starts_s: float | None = None
    """In a trace: when its first request is sent."""

    @property
    def prompt_tokens(self) -> list[int]:
        """The prompt length of each turn, if all answers have their planned length."""
        lengths, held = [], self.system_tokens
        for turn in self.turns:
            held = turn.new_tokens if turn.restarts else held + turn.new_tokens
            lengths.append(held)
            held += turn.output_tokens
        return lengths
