"""ChatAnswer: one answer of an endpoint, and how long it took."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


class ChatAnswer(Record, frozen=True, kw_only=True):
    schema: Literal["answer/1"] = "answer/1"
    model: str
    engine: str | None = None
    url: str
    """The base URL of the endpoint, ending in /v1."""
    text: str
    reasoning: str | None = None
    """What a reasoning model wrote before its answer; `None`: the engine reports none."""
    finish_reason: str | None = None
    stopped: bool = False
    """Whether Ctrl-C stopped it before its end."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: float | None = None
    """From sending the request to the first token, as the client sees it."""
    output_tok_s: float | None = None
    """Tokens per second after the first token."""
    duration_ms: float
    memory_bytes: int | None = None
    """Memory of the engines after the answer, as the operating system reports it."""
