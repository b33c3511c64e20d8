"""Tools: the chat template offers them to the model, and its calls are found in its answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .backend import BackendError

ToolFormat = Literal["tagged", "bare"]
"""tagged: each call is JSON between `<tool_call>` and `</tool_call>`; bare: the answer itself is JSON."""
BEGIN, END = "<tool_call>", "</tool_call>"
_OTHER_TAGGED = ("<function=", "<arg_key>")
"""Templates that write something other than JSON between the tags."""
_BARE = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>", '"parameters":')
"""What templates have whose calls are bare JSON. The markers are special tokens, which are not part of the text."""
_OTHER_BARE = ("[ARGS]", "<|channel|>", "<|tool_call_start|>")


def find_tool_format(template: str | None) -> ToolFormat | None:
    """How a model with this chat template writes calls; `None`: it offers no tools, or the format is not known."""
    if template is None or "tools" not in template:
        return None
    if BEGIN in template:
        return None if any(one in template for one in _OTHER_TAGGED) else "tagged"
    known = any(one in template for one in _BARE) and not any(one in template for one in _OTHER_BARE)
    return "bare" if known else None


def with_tools(template: str | None) -> str | None:
    """A ChatML template without tool support, extended by tools; unchanged for requests without tools."""
    if template is None or "<|im_start|>" not in template or "tools" in template:
        return None
    offering = Path(__file__).with_name("chatml-tools.jinja").read_text(encoding="utf-8")
    return f"{{% if tools %}}{offering.rstrip()}{{% else %}}{template}{{% endif %}}"


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request that the model may, or must, call."""

    tools: list[dict[str, Any]]
    format: ToolFormat
    forced: bool
    """Whether the answer must be a call."""
    several: bool

    @property
    def opening(self) -> str:
        """What the model's answer begins with, as part of the prompt."""
        return f"{BEGIN}\n" if self.forced and self.format == "tagged" else ""

    def make_schema(self) -> str | None:
        """The JSON schema of a forced call."""
        if not self.forced:
            return None
        shared: dict[str, dict[str, Any]] = {}
        calls = []
        for tool in self.tools:
            parameters = dict(tool["function"].get("parameters") or {"type": "object"})
            for where in ("$defs", "definitions"):  # references begin at the root
                for name, schema in (parameters.pop(where, None) or {}).items():
                    if shared.setdefault(where, {}).setdefault(name, schema) != schema:
                        message = f"two tools have a different {where}/{name}; give them different names"
                        raise BackendError(message, "tools", code="invalid_tools")
            properties = {"name": {"const": tool["function"]["name"]}, "arguments": parameters}
            calls.append(
                {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
            )
        return json.dumps({**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared})

    def make_parser(self) -> ToolCallParser:
        names = [tool["function"]["name"] for tool in self.tools]
        return ToolCallParser(self.format, names, inside=self.forced, several=self.several)


def read_tools(body: dict[str, Any], known: ToolFormat | None, *, can_force: bool) -> OfferedTools | None:
    """The tools of a request; `None`: the model is not offered any."""
    tools = body.get("tools")
    choice = body.get("tool_choice") or "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise BackendError("tool_choice needs tools", "tool_choice")
        return None
    if not isinstance(tools, list):
        raise BackendError("tools must be a list", "tools")
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools[{place}]")
    if choice == "none":
        return None
    if known is None:
        message = "the chat template of this model has no tools, or writes calls in a format that is not supported"
        raise BackendError(message, "tools", code="unsupported_tools")
    forced = choice != "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if choice.get("type") != "function" or not tools:
            raise BackendError("tool_choice must name one of the tools", "tool_choice")
    elif choice not in ("auto", "required"):
        raise BackendError("tool_choice must be none, auto, required or a function", "tool_choice")
    if forced and not can_force:
        raise BackendError("this engine supports only tool_choice auto and none", "tool_choice")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise BackendError("response_format cannot be combined with tools", "response_format")
    return OfferedTools(tools, known, forced, body.get("parallel_tool_calls") is not False)


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BackendError(f"{where} must be a function with a name", "tools", code="invalid_tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise BackendError(f"{where}.function.parameters must be a JSON schema", "tools", code="invalid_tools")


def decode_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of earlier calls as objects, which chat templates expect."""
    return [
        {**message, "tool_calls": [_decode_call(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _decode_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # what a model wrote by mistake stays in the conversation
    return {**call, "function": {**function, "arguments": arguments}}


class ToolCallParser:
    """Separates calls from the text of an answer. What may become a call is held back until it is complete."""

    def __init__(self, form: ToolFormat, names: Collection[str], *, inside: bool = False, several: bool = True) -> None:
        self.count = 0
        """The calls that were found."""
        self._tagged = form == "tagged"
        self._names = names
        self._inside = inside
        """Whether the held text follows the beginning of a call."""
        self._opened = ""
        """What was removed from the text at the beginning of the call; the prompt may have contained it."""
        self._several = several
        self._is_text = False
        """Whether the answer has begun as text, so that JSON in it is not a call."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text and the calls that are complete now."""
        self._held += text
        if not self._tagged:
            begun = self._held.lstrip()
            if not self._is_text and (not begun or begun[0] in "{["):
                self._inside = bool(begun)
                return "", []
            self._is_text, self._inside = True, False
            return self._release(), []
        shown, calls = "", list[FunctionCall]()
        while True:
            mark = END if self._inside else BEGIN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                found = self._find_calls(before)
                shown += f"{self._opened}{before}{END}" if found is None else ""
                calls += found or ()
            else:
                shown += before.rstrip()
                self._opened = before[len(before.rstrip()) :] + BEGIN
            self._inside = not self._inside
        if not self._inside:
            keep = _count_held(self._held)
            shown, self._held = shown + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, calls

    def flush(self) -> tuple[str, list[FunctionCall]]:
        """What is left at the end of the answer; a call may lack its end."""
        if self._inside and (found := self._find_calls(self._held)) is not None:
            self._held = ""
            return "", found
        opened = self._opened if self._inside else ""
        text = opened + self._release()
        return ("" if self.count and not text.strip() else text), []

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text

    def _find_calls(self, text: str) -> list[FunctionCall] | None:
        """The calls in a text that should be one; `None`: it is not."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = [self._make_call(one) for one in (found if isinstance(found, list) else [found])]
        complete = [call for call in calls if call is not None]
        if not complete or len(complete) < len(calls):
            return None
        kept = complete if self._several else complete[: max(1 - self.count, 0)]
        self.count += len(kept)
        return kept

    def _make_call(self, found: Any) -> FunctionCall | None:
        if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
            return None
        if not self._tagged and name not in self._names:  # JSON that is an answer
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            return FunctionCall(name, arguments)
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))


def _count_held(text: str) -> int:
    """The length of the end of `text` that may belong to a call: white space, and the beginning of its mark."""
    mark = next((n for n in range(min(len(text), len(BEGIN) - 1), 0, -1) if BEGIN.startswith(text[-n:])), 0)
    rest = text[: len(text) - mark]
    return mark + len(rest) - len(rest.rstrip())
