"""The prompts for structured output, with their schemas, tools and expected values."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from typing import Any, get_args

import msgspec

from bedplate.values.structured import StructuredKind

FILE = "structured_prompts.yaml"
KINDS: tuple[StructuredKind, ...] = get_args(StructuredKind)


class ToolDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: str
    parameters: dict[str, Any]


class StructuredPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    kind: StructuredKind
    prompt: str
    schema: dict[str, Any] | None = None
    expect: Any = msgspec.UNSET
    """Values that the prompt determines."""
    tools: tuple[str, ...] = ()
    tool: str | None = None
    """The right tool; `None`: none is right."""

    @property
    def uses_tools(self) -> bool:
        return self.kind.startswith("tool_")

    @property
    def has_values(self) -> bool:
        return self.expect is not msgspec.UNSET


class PromptFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tools: dict[str, ToolDefinition]
    controls: tuple[StructuredPrompt, ...]
    prompts: tuple[StructuredPrompt, ...]
    digest: str = ""
    """The beginning of the SHA-256 of the file."""


@functools.cache
def read_prompts() -> PromptFile:
    from bedplate.facts.yaml_text import parse_yaml

    raw = (importlib.resources.files("bedplate.measure") / "data" / FILE).read_bytes()
    document, _, _ = parse_yaml(raw.decode(), FILE)
    found = msgspec.convert(document, PromptFile)
    return msgspec.structs.replace(found, digest=hashlib.sha256(raw).hexdigest()[:12])


def spread_kinds(prompts: tuple[StructuredPrompt, ...]) -> list[StructuredPrompt]:
    """Orders prompts so that any beginning of the list has about the same share of each kind."""
    places: list[tuple[float, int, StructuredPrompt]] = []
    for kind in KINDS:
        mine = [one for one in prompts if one.kind == kind]
        places += [((number + 0.5) / len(mine), KINDS.index(kind), one) for number, one in enumerate(mine)]
    return [one for _, _, one in sorted(places, key=lambda place: place[:2])]


def make_body(prompt: StructuredPrompt, tools: dict[str, ToolDefinition], max_tokens: int) -> dict[str, Any]:
    """The body of a chat request, without the model."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt.prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if prompt.uses_tools:
        body["tools"] = [
            {"type": "function", "function": {"name": name, **msgspec.structs.asdict(tools[name])}}
            for name in prompt.tools
        ]
        named = {"type": "function", "function": {"name": prompt.tool}}
        body["tool_choice"] = named if prompt.kind == "tool_named" else prompt.kind.removeprefix("tool_")
    elif prompt.kind == "json_schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": prompt.id.replace("-", "_"), "schema": prompt.schema, "strict": True},
        }
    else:
        body["response_format"] = {"type": "json_object"}
    return body
