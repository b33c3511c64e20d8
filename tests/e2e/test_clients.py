"""Real clients, unmodified, against the real engine on the real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.conftest import HANG_S, Served, wait_for

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MODEL = "smollm2-135m-instruct"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one word."}
]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    from openai import OpenAI  # half a second, which tests without an engine need not take

    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as one:
        yield one


def read_metric(served: Served, pattern: str) -> float:
    with urllib.request.urlopen(f"{served.root}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


def read_private(served: Served, path: str) -> str:
    """A page from the engine's private port, with its key."""
    engine = served.find_engine()
    headers = {"authorization": f"Bearer {engine.environ()['LLAMA_API_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{get_private_url(engine)}{path}", headers=headers)) as answer:
        text: str = answer.read().decode()
        return text


def test_the_engines_own_metrics_have_their_names_and_count(served: Served, client: OpenAI) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, Any]:
        with urllib.request.urlopen(f"{served.root}/metrics/engines") as answer:
            found = text_string_to_metric_families(answer.read().decode())
            return {family.name: family for family in found}

    before = read()["llamacpp:tokens_predicted"]
    answer = client.chat.completions.create(model="", messages=QUESTION, max_tokens=8, temperature=0)
    after = read()["llamacpp:tokens_predicted"]
    assert before.type == after.type == "counter"
    (was,), (now,) = before.samples, after.samples
    assert was.name == now.name == "llamacpp:tokens_predicted_total"
    assert now.labels == {"model": "smollm2-135m-instruct", "engine": "llama.cpp", "replica": "0"}
    assert answer.usage is not None and now.value - was.value == answer.usage.completion_tokens
    own = {line.split()[2:4][0] for line in read_private(served, "/metrics").splitlines() if line.startswith("# TYPE")}
    assert {name.removesuffix("_total") for name in own} | {"bedplate_engine_metrics_up"} == set(read())


def count_slots_in_use(served: Served) -> int:
    return sum(slot["is_processing"] for slot in json.loads(read_private(served, "/slots")))


def get_private_url(engine: psutil.Process) -> str:
    command = engine.cmdline()
    return f"http://127.0.0.1:{command[command.index('--port') + 1]}"


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_answer_has_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_unstreamed_answer_and_ends_with_usage(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, seed=1)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, seed=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 1
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage


def test_stream_without_requested_usage_gets_none_and_is_still_counted(client: OpenAI, served: Served) -> None:
    name = r'bedplate_tokens_total\{[^}]*kind="completion"[^}]*\}'
    before = read_metric(served, name)
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, stream=True)
    chunks = list(stream)
    assert all(c.usage is None and c.choices for c in chunks)
    assert 0 < read_metric(served, name) - before <= 8


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=4, temperature=0)
    assert "5" in answer.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_output_matches_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "maximum": 99999999},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=80, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )  # fmt: skip
    made = json.loads(answer.choices[0].message.content or "")
    assert set(made) == {"city", "population"} and isinstance(made["population"], int)


def test_tool_call_and_its_result_work(client: OpenAI) -> None:
    """The model's own template does not support tools, and so small a model needs exact instructions to call one."""
    tool: ChatCompletionToolParam = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Berlin"]}},
                "required": ["city"],
            },
        },
    }
    call_text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Repeat this: {call_text}"}]
    asked = client.chat.completions.create(model=MODEL, messages=messages, tools=[tool], max_tokens=80, temperature=0)
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    told: ChatCompletionMessageParam = {
        "role": "assistant",
        "tool_calls": [{"id": call.id, "type": "function",
                        "function": {"name": "get_weather", "arguments": call.function.arguments}}],
    }  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL, messages=[*messages, told, result], tools=[tool], max_tokens=40, temperature=0
    )
    assert answer.choices[0].message.content


def test_disconnect_during_a_stream_ends_the_generation(client: OpenAI, served: Served) -> None:
    cancelled = r'bedplate_requests_total\{[^}]*outcome="cancelled"[^}]*\}'
    before = read_metric(served, cancelled)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count from 1 to 1000."}], max_tokens=4000, stream=True
    )
    next(iter(stream))
    assert count_slots_in_use(served) == 1
    stream.close()
    wait_for(lambda: count_slots_in_use(served) == 0, "the slot to be free again")
    assert read_metric(served, cancelled) - before == 1
    assert read_metric(served, r"bedplate_requests_in_flight\{[^}]*\}") == 0


def test_all_tokens_that_the_engine_generates_are_counted(client: OpenAI, served: Served) -> None:
    """Lists of prompts, choices, and streams whose client disconnects."""

    def count() -> tuple[float, float]:
        generated = re.search(
            r"^llamacpp:tokens_predicted_total (\S+)$", read_private(served, "/metrics"), re.MULTILINE
        )
        assert generated is not None
        return float(generated[1]), read_metric(served, r'bedplate_tokens_total\{[^}]*kind="completion"[^}]*\}')

    before = count()
    client.completions.create(model=MODEL, prompt=["The river is", "A lake"], max_tokens=6, temperature=0)
    client.completions.create(model=MODEL, prompt=[[504, 4203], [504]], max_tokens=6, temperature=0)
    assert read_metric(served, r"bedplate_requests_in_flight\{[^}]*\}") == 0
    for _ in client.completions.create(model=MODEL, prompt=["The river is", "A lake"], max_tokens=6, stream=True):
        pass
    wait_for(lambda: count()[1] - before[1] == 36, "all sequences to be counted")
    assert count()[0] - before[0] == 36
    # With this header the server would continue without a client.
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count from 1 to 1000."}], max_tokens=4000, temperature=0,
        stream=True, extra_headers={"X-Conversation-Id": "one"},
    )  # fmt: skip
    received = 0
    for event in stream:
        received += bool(event.choices[0].delta.content)
        if received == 12:
            break
    stream.close()
    wait_for(lambda: count_slots_in_use(served) == 0, "the slot to be free again")
    wait_for(lambda: count()[1] - before[1] >= 36 + 12, "the aborted stream to be counted")
    generated, counted = (now - then for now, then in zip(count(), before, strict=True))
    assert abs(counted - generated) <= 2, "the token in progress, and one of the tokenizer's choice"


def test_private_engine_port_requires_a_key(served: Served) -> None:
    engine = served.find_engine()
    request = urllib.request.Request(
        f"{get_private_url(engine)}/v1/chat/completions", json.dumps({"messages": []}).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as answer:
        assert answer.code == 401
    assert engine.environ()["LLAMA_API_KEY"] not in " ".join(engine.cmdline())


def test_responses_api(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8)
    assert answer.output_text
    events = [
        event.type
        for event in client.responses.create(
            model=MODEL, input="Count from 1 to 100.", max_output_tokens=8, temperature=0, stream=True
        )
    ]
    assert events[0] == "response.created" and events[-1] == "response.incomplete"


def test_anthropic_style_messages(served: Served) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": QUESTION}
    request = urllib.request.Request(
        f"{served.url}/messages", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        made = json.load(answer)
    assert made["type"] == "message" and made["content"][0]["text"] and made["usage"]["output_tokens"] > 0


def test_tokenize(served: Served) -> None:
    request = urllib.request.Request(f"{served.root}/tokenize", b'{"content": "hello world"}')
    with urllib.request.urlopen(request) as answer:
        assert len(json.load(answer)["tokens"]) == 2


def test_errors_are_openai_errors(client: OpenAI, served: Served) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=QUESTION)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages="not a list")
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model=MODEL, input="hi", encoding_format="float")
    assert "embeddings" in refused.value.message
    with pytest.raises(urllib.error.HTTPError) as bad:
        urllib.request.urlopen(urllib.request.Request(f"{served.url}/chat/completions", b"{not json"))
    with bad.value as answer:
        assert answer.code == 400 and json.load(answer)["error"]["type"] == "invalid_request_error"


def test_rejects_prompt_longer_than_context_and_engine_survives(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="word " * 10_000, max_tokens=4)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_llm_command_line_works(served: Served, tmp_path: Path) -> None:
    """Simon Willison's `llm`, configured as its documentation describes for OpenAI-compatible models."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {MODEL}\n  api_base: {served.url}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "here", "--key", "none", "-o", "max_tokens", "16", "-o", "temperature", "0",
         "What is the capital of France? Answer in one word."],
        capture_output=True, text=True, env={**os.environ, "LLM_USER_PATH": str(tmp_path)}, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_printed_curl_command_works(served: Served) -> None:
    from bedplate.run.gateway.pages import write_curl_command

    done = subprocess.run(
        ["bash", "-c", write_curl_command(served.root, needs_key=False)], capture_output=True, text=True, timeout=HANG_S
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
