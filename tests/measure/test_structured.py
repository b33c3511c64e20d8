"""Structured output: the prompts, the scores of real answers, and the support that control requests show."""

from __future__ import annotations

import asyncio
import collections
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.measure.endpoints import serve_chat

from bedplate.measure.json_schema import find_mismatch
from bedplate.measure.structured import check
from bedplate.measure.structured_prompts import StructuredPrompt, make_body, read_prompts, spread_kinds
from bedplate.measure.structured_scoring import (
    AnswerScore,
    ChatReply,
    ToolCall,
    is_as_expected,
    judge_support,
    read_reply,
    score_reply,
    summarize_kind,
)
from bedplate.values.capabilities import Capabilities
from bedplate.values.structured import StructuredKind, StructuredOutput

FILE = read_prompts()
PROMPTS = {one.id: one for one in (*FILE.prompts, *FILE.controls)}
CAPTURED: dict[str, Any] = json.loads((Path(__file__).parent / "structured_answers.json").read_text())
"""Responses of llama.cpp with the built-in model. `bare:` ones were asked without the field, as if it were ignored."""


def score(name: str, reply: ChatReply) -> AnswerScore:
    return score_reply(PROMPTS[name], reply, FILE.tools)


def read_captured(name: str) -> ChatReply:
    return read_reply(CAPTURED[name]["status"], json.dumps(CAPTURED[name]["body"]).encode())


def say(text: str, finish: str = "stop") -> ChatReply:
    return ChatReply(200, text, finish=finish)


def call(name: str, arguments: str) -> ChatReply:
    return ChatReply(200, calls=(ToolCall(name, arguments),), finish="tool_calls")


# the prompts


def test_a_hundred_prompts_of_all_kinds() -> None:
    counts = collections.Counter(one.kind for one in FILE.prompts)
    assert sum(counts.values()) == 100 and min(counts.values()) >= 10 and len(counts) == 5
    assert len(PROMPTS) == len(FILE.prompts) + len(FILE.controls) and len({one.prompt for one in FILE.prompts}) == 100
    offered = [len(one.tools) for one in FILE.prompts if one.kind == "tool_auto"]
    assert min(offered) == 1 and max(offered) > 3
    assert sum(one.tool is None for one in FILE.prompts if one.kind == "tool_auto") >= 5


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_expected_values_match_the_schema(prompt: StructuredPrompt) -> None:
    assert set(prompt.tools) <= FILE.tools.keys() and (prompt.tool is None or prompt.tool in prompt.tools)
    assert prompt.uses_tools == bool(prompt.tools) and (prompt.schema is None) == prompt.uses_tools
    schema = FILE.tools[prompt.tool].parameters if prompt.tool else prompt.schema
    if prompt.has_values:
        assert schema is not None
        found = find_mismatch(prompt.expect, schema)
        assert found is None or found.endswith("is missing"), "the prompt need not determine every value"


def test_any_beginning_has_all_kinds() -> None:
    order = spread_kinds(FILE.prompts)
    assert len(order) == 100 and len({one.kind for one in order[:12]}) == 5
    half = collections.Counter(one.kind for one in order[:50])
    assert half["json_schema"] == 23 and half["tool_auto"] == 12


def test_requests() -> None:
    body = make_body(PROMPTS["named-timer"], FILE.tools, 9)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "set_timer"}} and body["max_tokens"] == 9
    assert [one["function"]["name"] for one in body["tools"]] == ["add_to_cart", "set_timer"]
    assert make_body(PROMPTS["required-timer"], FILE.tools, 9)["tool_choice"] == "required"
    form = make_body(PROMPTS["extract-person"], FILE.tools, 9)["response_format"]
    assert form["json_schema"]["schema"] == PROMPTS["extract-person"].schema
    assert make_body(PROMPTS["object-sum"], FILE.tools, 9)["response_format"] == {"type": "json_object"}


# scores


def test_a_real_answer_with_right_values() -> None:
    found = score("extract-person", read_captured("extract-person"))
    assert found.is_matched and found.valid_json and found.schema_match and found.right_arguments
    assert found.right_tool is None and found.problem is None


def test_a_real_answer_that_the_grammar_does_not_constrain() -> None:
    """llama.cpp does not enforce uniqueItems."""
    found = score("classify-topics", read_captured("classify-topics"))
    assert found.valid_json and not found.is_matched and found.problem == "$.topics[2] is not unique"


def test_a_real_answer_without_a_call() -> None:
    found = score("auto-timer", read_captured("auto-timer"))
    assert found.right_tool is False and found.valid_json is None and not found.is_matched
    assert str(found.problem).startswith('no call; the answer is "')


def test_a_real_object_with_other_keys() -> None:
    found = score("object-sum", read_captured("object-sum"))
    assert found.valid_json and not found.is_matched and found.problem == "$.sum is missing"


@pytest.mark.parametrize(
    ("reply", "valid", "match", "problem"),
    [
        (say('{"price": 49.90, "currency": "USD"}'), True, True, "other values"),
        (say('{"price": "49.90", "currency": "EUR"}'), True, False, "$.price is not of type number"),
        (say('Here it is: {"price": 49.9, "currency": "EUR"}'), False, False, "not JSON"),
        (say('{"price": 49.9, "curr', "length"), False, False, "cut off"),
        (ChatReply(400, error="unknown field"), None, None, "HTTP 400: unknown field"),
    ],
)
def test_answers_with_a_schema(reply: ChatReply, valid: bool | None, match: bool | None, problem: str) -> None:
    found = score("extract-price", reply)
    assert (found.valid_json, found.schema_match, found.right_arguments) == (valid, match, False)
    assert str(found.problem).startswith(problem) and found.is_matched == bool(match)


@pytest.mark.parametrize(
    ("name", "reply", "right_tool", "matched", "right_arguments"),
    [
        ("auto-timer", call("set_timer", '{"minutes": 25}'), True, True, True),
        ("auto-timer", call("set_timer", '{"minutes": 20}'), True, True, False),
        ("auto-timer", call("set_timer", '{"minutes": "25"}'), True, False, False),
        ("auto-timer", call("set_alarm", '{"minutes": 25}'), False, False, False),
        ("auto-choose-light", call("set_timer", '{"minutes": 5}'), False, False, False),
        ("auto-none-greeting", say("Hello!"), True, True, None),
        ("auto-none-greeting", call("get_weather", '{"city": "Oslo", "day": "today"}'), False, False, None),
    ],
)  # fmt: skip
def test_answers_with_tools(
    name: str, reply: ChatReply, right_tool: bool, matched: bool, right_arguments: bool | None
) -> None:
    found = score(name, reply)
    assert (found.right_tool, found.is_matched, found.right_arguments) == (right_tool, matched, right_arguments)


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        ({"a": "Rome.", "b": 1}, {"a": "rome"}, True),
        ({"b": 1}, {"a": None}, False),
        ({"a": None}, {"a": None}, True),
        ([{"n": 2}, {"n": 1}], [{"n": 1}, {"n": 2}], True),
        ([1, 1], [1, 2], False),
        (True, 1, False),
        (1, True, False),
        (5.0, 5, True),
        ("4711", 4711, False),
    ],
)
def test_expected_values(value: Any, expected: Any, right: bool) -> None:
    assert is_as_expected(value, expected) is right


def test_reads_calls_and_errors_of_several_servers() -> None:
    message = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 7}}
    found = read_reply(200, json.dumps(body).encode())
    assert found == ChatReply(200, "", (ToolCall("f", '{"a":1}'),), "tool_calls", 7)
    assert read_reply(422, b'{"detail": "no such field"}').error == "no such field"
    assert read_reply(400, b'{"error": {"message": "not supported", "code": 400}}').error == "not supported"
    for broken in (b"", b"[]", b'{"choices": []}', b"\xff"):
        assert not read_reply(200, broken).is_answered


def test_a_time_out_is_in_no_share() -> None:
    scores = [
        score("auto-timer", call("set_timer", '{"minutes": 25}')),
        score("auto-parcel", ChatReply(0, error="late")),
    ]
    found = summarize_kind("tool_auto", "accepted", None, scores)
    assert (found.asked, found.failed, found.refused) == (1, 1, 0)
    assert found.matched is not None and (found.matched.passed, found.matched.count) == (1, 1)
    assert 0.2 < found.matched.low < 0.3 and found.matched.high == 1.0


# support


def test_a_real_constrained_answer_is_proof() -> None:
    reply = read_captured("control-enum")
    assert judge_support("json_schema", [score("control-enum", reply)]) == ("enforced", None)


def test_a_real_answer_without_the_constraint_shows_that_the_schema_is_ignored() -> None:
    support, reason = judge_support("json_schema", [score("control-enum", read_captured("bare:control-enum"))])
    assert support == "ignored" and "L'Étoile, la Marseillaise" in str(reason)


def test_a_real_answer_without_a_required_call() -> None:
    """llama.cpp reads `required` as a permission: any text may come before the call, so that it may never come."""
    support, reason = judge_support("tool_required", [score("control-required", read_captured("control-required"))])
    assert support == "ignored" and "without a call" in str(reason) and "A river is" in str(reason)


@pytest.mark.parametrize(
    ("kind", "name", "reply", "support"),
    [
        ("json_schema", "control-enum", say('{"zq_41": "vrelk-8"}'), "ignored"),
        ("json_schema", "control-enum", say('{"answer": "Paris"}'), "ignored"),
        ("json_schema", "control-enum", say('{"zq_41": "vre', "length"), "unknown"),
        ("json_schema", "control-enum", say("The capital of France is", "length"), "ignored"),
        ("json_schema", "control-enum", ChatReply(400, error="not supported"), "refused"),
        ("json_schema", "control-enum", ChatReply(500, error="crashed"), "unknown"),
        ("json_object", "control-greeting", say("Hello!"), "ignored"),
        ("json_object", "control-greeting", say('{"hello": 1}'), "enforced"),
        ("json_object", "control-greeting", say('{"hello": "wor', "length"), "enforced"),
        ("json_object", "control-greeting", say("Hello and", "length"), "ignored"),
        ("json_object", "control-greeting", say("", "length"), "unknown"),
        ("tool_required", "control-required", say("A river flows."), "ignored"),
        ("tool_required", "control-required", call("set_timer", "{}"), "enforced"),
        ("tool_named", "control-named", call("get_weather", '{"city": "Oslo"}'), "ignored"),
        ("tool_named", "control-named", call("restart_service", "{}"), "enforced"),
    ],
)
def test_support(kind: StructuredKind, name: str, reply: ChatReply, support: str) -> None:
    assert judge_support(kind, [score(name, reply)])[0] == support


@pytest.mark.parametrize(("longer", "support"), [(90, "accepted"), (40, "ignored"), (None, "unknown")])
def test_tools_that_reach_the_model_make_the_prompt_longer(longer: int | None, support: str) -> None:
    asked = score("auto-weather", ChatReply(200, "Sunny.", prompt_tokens=longer))
    assert judge_support("tool_auto", [asked], ChatReply(200, "Sunny.", prompt_tokens=40))[0] == support


# asking


def answer_everything(body: dict[str, Any]) -> tuple[int, Any]:
    """An engine that enforces JSON schemas of objects with enums, ignores `json_object`, and refuses tools."""
    if "tools" in body:
        return 400, {"error": {"message": "this server has no tools"}}
    form = body["response_format"]
    is_object = form["type"] == "json_object"
    text = "Hello there." if is_object else json.dumps(make_example(form["json_schema"]["schema"]))
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}


def make_example(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [make_example(schema["items"])] * schema.get("minItems", 1)
    if schema.get("type") == "object":
        return {name: make_example(schema["properties"][name]) for name in schema["required"]}
    return {"string": "x", "integer": 1, "number": 1.5, "boolean": True}.get(str(schema.get("type")))


def ask(url: str, *names: str, **options: Any) -> StructuredOutput:
    return asyncio.run(check(url, "m", "k", only=names, **options))


def test_unsupported_kinds_are_reported_and_not_asked() -> None:
    with serve_chat(answer_everything) as endpoint:
        found = ask(endpoint.url, "classify-ticket", "extract-person", "object-sum", "auto-timer")
    assert {one.kind: one.support for one in found.kinds} == {
        "json_schema": "enforced", "json_object": "ignored", "tool_auto": "refused",
    }  # fmt: skip
    assert (found.asked, found.matched, found.prompts) == (2, 2, FILE.digest)
    assert {one.prompt for one in found.answers} == {"classify-ticket", "extract-person"}
    by_kind = {one.kind: one for one in found.kinds}
    assert by_kind["tool_auto"].reason == "HTTP 400: this server has no tools"
    assert '"Hello there."' in str(by_kind["json_object"].reason)
    assert endpoint.keys == {"Bearer k"}


def test_what_the_gateway_refuses_is_not_asked() -> None:
    with serve_chat(answer_everything) as endpoint:
        known = Capabilities(tools="none", json_object=False)
        found = ask(endpoint.url, "object-sum", "auto-timer", "named-timer", capabilities=known)
    assert not endpoint.bodies and found.asked == 0 and len(found.list_unsupported()) == 3
    assert all("the gateway refuses" in str(one.reason) for one in found.kinds)


def test_without_time_nothing_is_asked() -> None:
    with serve_chat(answer_everything) as endpoint:
        found = ask(endpoint.url, "extract-person", "auto-timer", limit_s=0.0)
    assert found.asked == 0 and not endpoint.bodies and {one.support for one in found.kinds} == {"unknown"}


def test_an_endpoint_that_does_not_answer_is_left_in_time() -> None:
    """The controls count in the time limit, which is a part of the budget of `bench`."""
    answered = threading.Event()

    def hang(body: dict[str, Any]) -> tuple[int, Any]:
        answered.wait()
        return 200, {}

    with serve_chat(hang) as endpoint:
        try:
            found = ask(endpoint.url, "extract-person", "auto-timer", limit_s=0.5)
        finally:
            answered.set()
    assert found.asked == 0 and {one.support for one in found.kinds} == {"unknown"}
