"""Score answers with structured output: valid JSON, schema match, right tool, right arguments, and support. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from bedplate.measure.json_schema import find_mismatch, is_number, parse_json
from bedplate.measure.statistics import compute_wilson_interval
from bedplate.measure.structured_prompts import KINDS, PromptFile, StructuredPrompt, ToolDefinition
from bedplate.values.structured import (
    CheckedShare,
    StructuredAnswer,
    StructuredKind,
    StructuredOutput,
    StructuredSupport,
    Support,
)

CONFIDENCE = 0.95
SHOWN_CHARACTERS = 60
"""Of an answer."""
SHOWN_ERROR_CHARACTERS = 160
REFUSALS = (400, 404, 405, 413, 415, 422, 501)
"""Statuses that say that the endpoint does not accept the request; another error is a failure."""


class ToolCall(NamedTuple):
    name: str
    arguments: str


class ChatReply(NamedTuple):
    """The response to one chat request."""

    status: int
    """0: no response."""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    error: str | None = None

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def is_cut_off(self) -> bool:
        return self.finish == "length"


class AnswerScore(NamedTuple):
    """The checks of one answer; `None`: the check does not apply."""

    prompt: StructuredPrompt
    reply: ChatReply
    valid_json: bool | None = None
    schema_match: bool | None = None
    right_tool: bool | None = None
    right_arguments: bool | None = None
    problem: str | None = None

    @property
    def is_matched(self) -> bool:
        """Whether it matches its schema, and calls the right tool, or none if none is right."""
        checks = (self.valid_json, self.schema_match, self.right_tool)
        return self.reply.is_answered and False not in checks


# reading responses


def read_reply(status: int, body: bytes) -> ChatReply:
    """Parses the response of a chat API, valid or not."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ChatReply(status, error="the response is not JSON")
    if status != 200:
        return ChatReply(status, error=_read_error(document))
    try:
        choice = document["choices"][0]
        message = choice["message"]
        calls = tuple(_read_call(one["function"]) for one in message.get("tool_calls") or ())
        text = message.get("content") or ""
        tokens = (document.get("usage") or {}).get("prompt_tokens")
        return ChatReply(status, str(text), calls, choice.get("finish_reason"), tokens)
    except (LookupError, TypeError, AttributeError):
        return ChatReply(status, error="the response does not have the format of a chat completion")


def _read_call(function: dict[str, Any]) -> ToolCall:
    arguments = function.get("arguments")
    # Some servers return the object itself instead of its JSON text.
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(str(function["name"]), text)


def _read_error(document: Any) -> str:
    found = document
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return " ".join(text.split())


# one answer


def score_reply(prompt: StructuredPrompt, reply: ChatReply, tools: dict[str, ToolDefinition]) -> AnswerScore:
    values = False if prompt.has_values else None
    if not reply.is_answered:
        status = f"HTTP {reply.status}: " if reply.status else ""
        problem = f"{status}{reply.error or 'no response'}"
        right_tool = False if prompt.uses_tools else None
        return AnswerScore(
            prompt,
            reply,
            right_tool=right_tool,
            right_arguments=values,
            problem=_shorten(problem, SHOWN_ERROR_CHARACTERS),
        )
    if prompt.uses_tools:
        return _score_call(AnswerScore(prompt, reply, right_arguments=values), tools)
    return _check_json(AnswerScore(prompt, reply, right_arguments=values), reply.text, prompt.schema or {})


def _score_call(score: AnswerScore, tools: dict[str, ToolDefinition]) -> AnswerScore:
    prompt, calls = score.prompt, score.reply.calls
    if prompt.tool is None:
        wrong = f"calls {calls[0].name}, and no tool is right" if calls else None
        return score._replace(right_tool=not calls, problem=wrong)
    if not calls:
        return score._replace(right_tool=False, problem=f"no call; {_quote(score.reply)}")
    first = calls[0]
    is_right = {call.name for call in calls} == {prompt.tool}
    if first.name not in prompt.tools:
        problem = f"calls {first.name}, which is not on offer"
        return score._replace(right_tool=False, schema_match=False, problem=problem)
    found = _check_json(score._replace(right_tool=is_right), first.arguments, tools[first.name].parameters)
    if is_right:
        return found
    wrong = next(call.name for call in calls if call.name != prompt.tool)
    values = False if prompt.has_values else None
    return found._replace(right_arguments=values, problem=f"calls {wrong} instead of {prompt.tool}")


def _check_json(score: AnswerScore, text: str, schema: dict[str, Any]) -> AnswerScore:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        how = "cut off" if score.reply.is_cut_off else "not JSON"
        return score._replace(valid_json=False, schema_match=False, problem=f"{how}: {_shorten(text)}")
    mismatch = find_mismatch(value, schema)
    score = score._replace(valid_json=True, schema_match=mismatch is None, problem=mismatch)
    if not score.prompt.has_values:
        return score
    is_right = is_as_expected(value, score.prompt.expect)
    problem = mismatch or (None if is_right else f"other values: {_shorten(text)}")
    return score._replace(right_arguments=is_right, problem=problem)


def is_as_expected(value: Any, expected: Any) -> bool:
    """Whether the determined values are right: texts without regard to case, lists without regard to order."""
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(
            key in value and is_as_expected(value[key], one) for key, one in expected.items()
        )
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and _match_in_any_order(value, expected)
    if isinstance(expected, str):
        return isinstance(value, str) and _normalize(value) == _normalize(expected)
    if is_number(expected):
        return is_number(value) and math.isclose(value, expected, rel_tol=1e-9)
    return value is expected


def _match_in_any_order(values: Sequence[Any], expected: Sequence[Any]) -> bool:
    left = list(values)
    for one in expected:
        found = next((number for number, value in enumerate(left) if is_as_expected(value, one)), None)
        if found is None:
            return False
        del left[found]
    return True


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!")


def _shorten(text: str, most: int = SHOWN_CHARACTERS) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _quote(reply: ChatReply) -> str:
    return f'the answer is "{_shorten(reply.text)}"' if reply.text.strip() else "the answer is empty"


# support


def judge_support(
    kind: StructuredKind, controls: Iterable[AnswerScore], without_tools: ChatReply | None = None
) -> tuple[Support, str | None]:
    """Whether the endpoint supports a kind, from the control requests, with the evidence if it does not.

    `without_tools`: the response to the first control of tool_auto when it is sent without its tools.
    """
    scores = list(controls)
    if scores and all(one.reply.is_refused for one in scores):
        return "refused", scores[0].problem
    answered = [one for one in scores if one.reply.is_answered]
    if not answered:
        return "unknown", scores[0].problem if scores else None
    if kind == "tool_auto":
        return _judge_tools(answered[0].reply, without_tools)
    evidence = [one for one in answered if _is_evidence(one)]
    wrong = next((one for one in evidence if not _follows_control(one)), None)
    if wrong is not None:
        return "ignored", _describe_evidence(wrong)
    return ("enforced", None) if evidence else ("unknown", "the answers to the control requests were cut off")


def _judge_tools(with_tools: ChatReply, without_tools: ChatReply | None) -> tuple[Support, str | None]:
    """Tools that reach the model make the prompt longer."""
    longer, shorter = with_tools.prompt_tokens, without_tools.prompt_tokens if without_tools is not None else None
    if with_tools.calls:
        return "accepted", None
    if longer is None or shorter is None:
        return "unknown", "the endpoint reports no prompt tokens"
    if longer <= shorter:
        return "ignored", f"the prompt has {longer} tokens with tools and {shorter} without them"
    return "accepted", None


def _is_evidence(score: AnswerScore) -> bool:
    """An answer that was cut off says nothing, unless it has no call, did not even begin as JSON, or began as JSON
    although the control asks for plain text."""
    text = score.reply.text.lstrip()
    begins = text.startswith(("{", "["))
    return score.prompt.uses_tools or not score.reply.is_cut_off or (bool(text) and not begins) or _is_forced(score)


def _is_forced(score: AnswerScore) -> bool:
    """Whether an answer began as an object although the prompt asks for plain text, as all controls of this kind do."""
    return score.prompt.kind == "json_object" and score.reply.text.lstrip().startswith("{")


def _follows_control(score: AnswerScore) -> bool:
    if score.prompt.kind == "tool_required":
        return bool(score.reply.calls)
    if score.prompt.kind == "tool_named":
        return {call.name for call in score.reply.calls} == {score.prompt.tool}
    return score.is_matched or (score.reply.is_cut_off and _is_forced(score))


def _describe_evidence(score: AnswerScore) -> str:
    if score.prompt.uses_tools and score.reply.calls:
        return f"a control request was answered with a call of {score.reply.calls[0].name}"
    what = "without a call; " if score.prompt.uses_tools else "although it does not match; "
    return f"a control request was answered {what}{_quote(score.reply)}"


# all answers


def summarize_kind(
    kind: StructuredKind, support: Support, reason: str | None, scores: Sequence[AnswerScore]
) -> StructuredSupport:
    """The shares of one kind. `scores` has only answers of this kind."""
    if support == "unknown" and any(one.reply.calls for one in scores):
        support, reason = "accepted", None
    failed = [one for one in scores if not one.reply.status]
    scores = [one for one in scores if one.reply.status]
    return StructuredSupport(
        kind=kind,
        support=support,
        reason=reason,
        asked=len(scores),
        refused=sum(one.reply.is_refused for one in scores),
        failed=len(failed),
        matched=_make_share([one.is_matched for one in scores]),
        valid_json=_make_share([one.valid_json for one in scores]),
        schema_match=_make_share([one.schema_match for one in scores]),
        right_tool=_make_share([one.right_tool for one in scores]),
        right_arguments=_make_share([one.right_arguments for one in scores]),
    )


def _make_share(checks: Sequence[bool | None]) -> CheckedShare | None:
    known = [one for one in checks if one is not None]
    if not known:
        return None
    low, high = compute_wilson_interval(sum(known) / len(known), len(known), CONFIDENCE)
    return CheckedShare(passed=sum(known), count=len(known), low=low, high=high)


def summarize_all(
    file: PromptFile, kinds: Iterable[StructuredSupport], scores: Sequence[AnswerScore]
) -> StructuredOutput:
    ordered = sorted(kinds, key=lambda one: KINDS.index(one.kind))
    scores = [one for one in scores if one.reply.status]
    order = {prompt.id: number for number, prompt in enumerate(file.prompts)}
    return StructuredOutput(
        asked=len(scores),
        matched=sum(one.is_matched for one in scores),
        prompts=file.digest,
        kinds=tuple(ordered),
        answers=tuple(
            StructuredAnswer(
                prompt=one.prompt.id,
                kind=one.prompt.kind,
                matched=one.is_matched,
                right_values=one.right_arguments,
                problem=one.problem,
            )
            for one in sorted(scores, key=lambda score: order[score.prompt.id])
        ),
    )
