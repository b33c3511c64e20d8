"""Structured output: the answers of an endpoint to prompts with JSON schemas and tools."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bedplate.values.record import Record
from bedplate.values.workload import Count, Share

StructuredKind = Literal["json_schema", "json_object", "tool_auto", "tool_required", "tool_named"]
"""How a request asks for structure: the type of its `response_format`, or its `tool_choice`."""
Support = Literal["enforced", "accepted", "ignored", "refused", "unknown"]
"""enforced: control requests prove it. accepted: answered, and there is no proof either way. ignored: the field has no
effect. refused: the endpoint answers 4xx, or bedplate's gateway would. unknown: the control requests failed."""
Number = Annotated[int, msgspec.Meta(ge=0)]
KIND_NAMES: dict[StructuredKind, str] = {
    "json_schema": "JSON schemas",
    "json_object": "JSON objects",
    "tool_auto": "tools",
    "tool_required": "required tool calls",
    "tool_named": "named tool calls",
}


class CheckedShare(Record, frozen=True, kw_only=True):
    """How many answers passed one check, of those that it applies to, with Wilson's 95 % interval."""

    passed: Number
    count: Count
    low: Share
    high: Share


class StructuredAnswer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One scored answer."""

    prompt: str
    """Id of the prompt."""
    kind: StructuredKind
    matched: bool
    right_values: bool | None = None
    """`None`: the prompt determines no values."""
    problem: str | None = None
    """The first check that failed, in words."""


class StructuredSupport(Record, frozen=True, kw_only=True):
    """One kind of structured output. A share is `None` if its check applies to no answer."""

    kind: StructuredKind
    support: Support
    reason: str | None = None
    """Why it is not supported, or not known to be."""
    asked: Number = 0
    """Prompts of this kind that got a response; 0 if it is not supported."""
    refused: Number = 0
    """Prompts that the endpoint answered with 4xx, although it supports this kind."""
    failed: Number = 0
    """Prompts without a response, because of a time-out or a lost connection. They are in no share."""
    matched: CheckedShare | None = None
    """Of all prompts: the answer matches its schema and calls the right tool, or none if none is right."""
    valid_json: CheckedShare | None = None
    """Of all answers; with tools, of the calls."""
    schema_match: CheckedShare | None = None
    """Of the same."""
    right_tool: CheckedShare | None = None
    """Of all prompts with tools. Where no tool is right, an answer without a call is right."""
    right_arguments: CheckedShare | None = None
    """Of all prompts that determine values: arguments of the call, or values in the answer."""

    @property
    def is_supported(self) -> bool:
        return self.support not in ("ignored", "refused")


class StructuredOutput(Record, frozen=True, kw_only=True):
    """Answers to prompts with JSON schemas and tools."""

    asked: Number
    """Prompts of all supported kinds that got a response."""
    matched: Number
    """Answers that are valid JSON, match the schema, and call the right tool."""
    prompts: str | None = None
    """The beginning of the SHA-256 of the prompts. Only results with the same prompts are comparable."""
    kinds: tuple[StructuredSupport, ...] = ()
    answers: tuple[StructuredAnswer, ...] = ()

    def list_unsupported(self) -> tuple[StructuredSupport, ...]:
        return tuple(one for one in self.kinds if not one.is_supported)
