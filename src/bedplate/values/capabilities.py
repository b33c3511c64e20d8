"""Capabilities: what requests may ask of a model on an engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bedplate.values.record import Record

ToolSupport = Literal["none", "auto", "forced"]
"""none: tools are refused. auto: the model decides whether it calls one. forced: `tool_choice` can also require it."""
Feature = Literal["tools", "forced_tools", "json_schema", "json_object", "logprobs", "vision", "n", "stop", "seed"]
"""What one request asks for in addition to text. Only requests that were answered count as use of a feature."""
FEATURE_NAMES: dict[Feature, str] = {
    "tools": "tools",
    "forced_tools": "tool_choice that requires a call",
    "json_schema": "JSON schemas (response_format json_schema)",
    "json_object": "JSON objects (response_format json_object)",
    "logprobs": "logprobs",
    "vision": "images",
    "n": "several choices (n, best_of)",
    "stop": "stop strings",
    "seed": "seed",
}
_TOOL_LEVELS: tuple[ToolSupport, ...] = ("none", "auto", "forced")


class Capabilities(Record, frozen=True, kw_only=True):
    """What a model on an engine supports. The gateway refuses requests for anything else."""

    generation: bool = True
    """Whether it generates text."""
    embeddings: bool = False
    transcriptions: bool = False
    """Whether it transcribes audio."""
    tools: ToolSupport = "forced"
    json_schema: bool = True
    json_object: bool = True
    logprobs: bool = True
    vision: bool = False
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most choices of one request; `None`: no limit."""
    stop: bool = True
    seed: bool = True
    context_tokens: int | None = None
    vocab_size: int | None = None
    """Token ids are below this number."""

    def supports(self, feature: Feature) -> bool:
        if feature == "tools":
            return self.tools != "none"
        if feature == "forced_tools":
            return self.tools == "forced"
        if feature == "n":
            return self.n is None or self.n > 1
        return bool(getattr(self, feature))

    def list_missing(self, wanted: Capabilities) -> tuple[Feature, ...]:
        """The features that `wanted` has and this one lacks."""
        return tuple(one for one in FEATURE_NAMES if wanted.supports(one) and not self.supports(one))


def merge_capabilities(found: list[Capabilities | None]) -> Capabilities | None:
    """What at least one of them supports; `None`: not known."""
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    first, *others = known
    for one in others:
        first = _merge_two(first, one)
    return first


def _merge_two(a: Capabilities, b: Capabilities) -> Capabilities:
    return Capabilities(
        generation=a.generation or b.generation,
        embeddings=a.embeddings or b.embeddings,
        transcriptions=a.transcriptions or b.transcriptions,
        tools=max(a.tools, b.tools, key=_TOOL_LEVELS.index),
        json_schema=a.json_schema or b.json_schema,
        json_object=a.json_object or b.json_object,
        logprobs=a.logprobs or b.logprobs,
        vision=a.vision or b.vision,
        n=_find_larger(a.n, b.n),
        stop=a.stop or b.stop,
        seed=a.seed or b.seed,
        context_tokens=_find_larger(a.context_tokens, b.context_tokens),
        vocab_size=_find_larger(a.vocab_size, b.vocab_size),
    )


def _find_larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)
