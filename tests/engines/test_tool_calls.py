"""Tools in the shipped server: what it asks of the model, and how it finds calls in the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_openai_server import Server, start, stop

from bedplate.engines.shipped.openai_server import ChatTemplate
from bedplate.engines.shipped.openai_server.tools import (
    BEGIN,
    END,
    FunctionCall,
    OfferedTools,
    ToolCallParser,
    decode_arguments,
    find_tool_format,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIMER = {"type": "function", "function": {"name": "set_timer", "parameters": {"type": "object"}}}
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
TAGGED = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"


def parse(parts: list[str], form: Any = "tagged", **options: Any) -> tuple[str, list[FunctionCall]]:
    parser = ToolCallParser(form, ["get_weather", "set_timer"], **options)
    found = [*(parser.feed(part) for part in parts), parser.flush()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        ("Hello <b>there</b>.\n", "Hello <b>there</b>.\n", []),
        (f"{BEGIN}\n{CALL}\n{END}", "", ["get_weather"]),
        (f"One moment.\n{BEGIN}{CALL}{END}\n{BEGIN}{CALL}{END}\n", "One moment.", ["get_weather"] * 2),
        (f"{BEGIN}[{CALL}]{END} Done.", " Done.", ["get_weather"]),
        (f"{BEGIN}\n{CALL}", "", ["get_weather"]),  # it ended before the mark
        (f"Then {BEGIN}not JSON{END}.", f"Then {BEGIN}not JSON{END}.", []),
        (f"Then {BEGIN}" + '{"name": "get_w', f"Then {BEGIN}" + '{"name": "get_w', []),
        (f'{BEGIN}{{"arguments": 1}}{END}', f'{BEGIN}{{"arguments": 1}}{END}', []),
        (f'{BEGIN}{{"name": "set_timer"}}{END}', "", ["set_timer"]),
        ("a < b and a <tool", "a < b and a <tool", []),
    ],
)
def test_calls_between_tags_are_found_however_the_text_is_divided(text: str, shown: str, names: list[str]) -> None:
    for parts in ([text], list(text), [text[:9], text[9:]]):
        found, calls = parse(parts)
        assert (found, [call.name for call in calls]) == (shown, names), parts


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        (CALL, "", ["get_weather"]),
        (f" [{CALL}, {CALL}]", "", ["get_weather"] * 2),
        ('{"name": "set_timer", "parameters": {"s": 5}}', "", ["set_timer"]),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),  # an answer in JSON
        ("[1, 2]", "[1, 2]", []),
        (f"It is {CALL}", f"It is {CALL}", []),
        ("", "", []),
    ],
)
def test_an_answer_that_is_a_call_in_json_is_found(text: str, shown: str, names: list[str]) -> None:
    for parts in ([text], list(text)):
        found, calls = parse(parts, "bare")
        assert (found, [call.name for call in calls]) == (shown, names)


def test_arguments_are_json_in_a_text_and_ids_differ() -> None:
    _, (first, second) = parse([f"{BEGIN}{CALL}{END}{BEGIN}{CALL}{END}"])
    assert json.loads(first.arguments) == {"city": "Paris"} and first.id != second.id
    _, (quoted,) = parse([BEGIN + '{"name": "f", "arguments": "{\\"a\\": 1}"}' + END])
    assert quoted.arguments == '{"a": 1}'


def test_only_the_first_of_several_calls_is_kept_on_request() -> None:
    assert len(parse([f"{BEGIN}{CALL}{END}{BEGIN}{CALL}{END}"], several=False)[1]) == 1
    text, calls = parse([f"[{CALL}, {CALL}]"], "bare", several=False)
    assert len(calls) == 1 and not text


@given(st.lists(st.sampled_from([BEGIN, END, CALL, "{", "<tool", "_call>", " ", "\n", "x"]), max_size=9), st.data())
def test_no_text_is_lost_or_depends_on_how_it_is_divided(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, calls = parse([text])
    assert (whole, len(calls)) == (parse(parts)[0], len(parse(parts)[1]))
    if not calls:
        assert whole == text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        (TAGGED, "tagged"),
        ("{{ tools }}<tool_call><function=name>", None),
        ('{{ tools }} {"name": n, "parameters": p}', "bare"),
        ("{{ tools }}[TOOL_CALLS][{", "bare"),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]{", None),
        ("{{ tools }}<|channel|>commentary", None),
    ],
)
def test_the_format_of_calls_follows_from_the_chat_template(template: str | None, form: str | None) -> None:
    assert find_tool_format(template) == form
    assert ChatTemplate(template, {}).tool_format == form


def test_a_chatml_template_is_extended_by_tools_and_otherwise_unchanged() -> None:
    template = ChatTemplate(CHATML, {})
    messages = [{"role": "user", "content": "Hi"}]
    assert template.tool_format == "tagged"
    assert template.render(messages, None, {}) == "<|im_start|>user\nHi<|im_end|>\n"
    assert json.dumps(WEATHER) in template.render(messages, [WEATHER], {})


def test_templates_get_the_arguments_of_earlier_calls_as_objects() -> None:
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}, "odd"]}
    first, second = decode_arguments([said, wrong])
    assert first["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert second == wrong


def test_a_forced_call_has_the_schema_of_its_tool() -> None:
    forced = OfferedTools([WEATHER], "tagged", forced=True, several=True)
    schema = json.loads(forced.make_schema() or "")
    assert schema["properties"] == {"name": {"const": "get_weather"}, "arguments": CITY}
    assert forced.opening == "<tool_call>\n" and OfferedTools([WEATHER], "bare", True, True).opening == ""
    both = json.loads(OfferedTools([WEATHER, TIMER], "bare", True, True).make_schema() or "")
    assert [one["properties"]["name"]["const"] for one in both["anyOf"]] == ["get_weather", "set_timer"]
    assert OfferedTools([WEATHER], "tagged", False, True).make_schema() is None


def test_definitions_of_a_schema_stay_where_its_references_point() -> None:
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": CITY}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    schema = json.loads(OfferedTools([tool], "tagged", True, True).make_schema() or "")
    assert schema["$defs"] == {"Place": CITY} and "$defs" not in schema["properties"]["arguments"]
    other = {"type": "function", "function": {"name": "run", "parameters": {"$defs": {"Place": {}}}}}
    with pytest.raises(Exception, match="different names"):
        OfferedTools([tool, other], "tagged", True, True).make_schema()


@pytest.fixture(scope="module", params=["tagged", "bare"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    one = start("--slots", "2", "--context", "4000", "--tools", str(request.param))
    yield one, str(request.param)
    stop(one)


def ask(server: Server, content: str, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": content}], **more}
    return server.client().chat.completions.create(**{"tools": [WEATHER, TIMER], **asked})


def test_calls_of_an_answer_and_of_a_stream_are_the_same(server: tuple[Server, str]) -> None:
    one, form = server
    text = f"say:{BEGIN}{CALL}{END}" if form == "tagged" else f"say:{CALL}"
    choice = ask(one, text).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    with one.client().chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": text}], tools=[WEATHER]
    ) as stream:
        last = stream.get_final_completion().choices[0]
    assert last.finish_reason == "tool_calls" and not last.message.content
    assert [one.function.name for one in last.message.tool_calls or ()] == ["get_weather"]


def test_text_stays_text(server: tuple[Server, str]) -> None:
    choice = ask(server[0], "say:It is sunny.").choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("It is sunny.", "stop", None)
    chunks = list(ask(server[0], "say:It is sunny.", stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "It is sunny."


def test_tools_are_offered_unless_the_choice_is_none(server: tuple[Server, str]) -> None:
    assert ask(server[0], "offered").choices[0].message.content == "['get_weather', 'set_timer']"
    assert ask(server[0], "offered", tool_choice="none").choices[0].message.content == "[]"
    named = {"type": "function", "function": {"name": "set_timer"}}
    assert "set_timer" in ask(server[0], "schema:", tool_choice=named).choices[0].message.content


def test_a_forced_call_is_constrained_and_parsed(server: tuple[Server, str]) -> None:
    schema = json.loads(ask(server[0], "schema:", tool_choice="required").choices[0].message.content)
    assert len(schema["anyOf"]) == 2
    choice = ask(server[0], f"say:{CALL}", tool_choice="required").choices[0]
    assert choice.message.tool_calls[0].function.name == "get_weather" and choice.finish_reason == "tool_calls"
    cut = ask(server[0], f"say:{CALL}", tool_choice="required", max_tokens=9).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls, cut.message.content) == ("length", None, CALL[:9])


def test_results_follow_their_calls(server: tuple[Server, str]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "called"})
    assert ask(server[0], "", messages=messages).choices[0].message.content == "Rome"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "with a name"),
        ({"tools": [{"type": "web_search"}]}, "with a name"),
        ({"tools": {}, "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "sometimes"}, "none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "one of the tools"),
        ({"response_format": {"type": "json_object"}}, "cannot be combined"),
    ],
)
def test_mistakes_are_answered_with_400(server: tuple[Server, str], more: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        ask(server[0], "say:x", **more)


def test_an_engine_without_schemas_cannot_force_a_call() -> None:
    plain = start("--plain", "--tools", "tagged")
    try:
        with pytest.raises(openai.BadRequestError, match="auto and none"):
            ask(plain, "say:x", tool_choice="required")
        assert ask(plain, f"say:{BEGIN}{CALL}{END}").choices[0].finish_reason == "tool_calls"
    finally:
        stop(plain)
