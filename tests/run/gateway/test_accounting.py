"""Every sequence of a request is charged and recorded, also when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bedplate.engines.traits import RequestTraits, TokenCounter
from bedplate.run.gateway import upstream
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.run.gateway.tasks import MAX_TEXTS
from bedplate.run.gateway.tenants import TenantState
from bedplate.values.tenant import Tenant
from bedplate.values.traffic import ServedRequest

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    STREAM_HEAD,
    Client,
    End,
    Setup,
    make_answer,
    make_chat_body,
    make_chunk,
    make_delta,
    make_stream,
    request,
    start_gateway,
    wait_until,
    wait_within,
)
from .test_tenants import allow, ask

COUNTER = TokenCounter(prompts={"chat": "/count-prompt"})
COUNTING = RequestTraits(counter=COUNTER, unsent_tokens=2, apis=frozenset(["messages", "responses"]))
PER_SEQUENCE = RequestTraits(counter=COUNTER, usage_per_sequence=True, unsent_tokens=2)
COMPLETIONS = "/v1/completions"


@pytest.fixture
def keeper(tmp_path: Path) -> RequestRecorder:
    return RequestRecorder(tmp_path / "store.sqlite")


def collect_rows(keeper: RequestRecorder) -> list[ServedRequest]:
    rows: list[ServedRequest] = []
    keeper.listeners.append(rows.append)
    return rows


def make_count(tokens: int) -> bytes:
    return make_answer({"count": tokens})


def make_usage(prompt: int, output: int, choices: list[Any] | None = None) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": choices or [], "usage": usage}).encode() + b"\n\n"


def get_member(setup: Setup, name: str) -> TenantState:
    member = setup.gateway.tenants.get_member(name)
    assert member is not None
    return member


async def post(setup: Setup, path: str, body: dict[str, Any], key: str = "sk-of-alice") -> Any:
    return await (await setup.connect()).post(path, body, authorization=f"Bearer {key}")


# limits of a tenant


async def test_each_sequence_counts_as_one_request_in_flight() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", in_flight=4))
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        first = asyncio.ensure_future(post(setup, COMPLETIONS, {"prompt": ["a", "b", "c"]}))
        await setup.engine.request()
        assert get_member(setup, "alice").in_flight == 3
        refused = await post(setup, CHAT, make_chat_body(n=2))
        assert (refused.status, refused.error["code"]) == (429, "too_many_in_flight")
        second = asyncio.ensure_future(ask(setup))
        await setup.engine.request(1)
        gate.set()
        assert [one.status for one in await wait_within(asyncio.gather(first, second))] == [200, 200]
        assert get_member(setup, "alice").in_flight == 0


async def test_request_with_more_sequences_than_the_limit_is_rejected_for_good() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", in_flight=4), Tenant(name="bob", tokens_per_minute=1000))
        refused = await post(setup, COMPLETIONS, {"prompt": ["a"] * 60})
        assert (refused.status, refused.error["code"]) == (400, "too_many_sequences")
        assert "60 sequences" in refused.error["message"] and "at most 4" in refused.error["message"]
        assert "retry-after" not in refused.headers
        costly = await post(setup, COMPLETIONS, {"prompt": "a", "n": 20, "max_tokens": 100}, "sk-of-bob")
        assert (costly.status, costly.error["code"]) == (400, "too_many_sequences")
        assert not setup.engine.seen


async def test_expected_tokens_of_all_sequences_are_charged_at_once() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", tokens_per_minute=1000))
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        first = asyncio.ensure_future(post(setup, CHAT, make_chat_body(n=4, max_tokens=200)))
        await setup.engine.request()
        assert (await post(setup, CHAT, make_chat_body(n=2, max_tokens=200))).error["code"] == "tokens_per_minute"
        gate.set()
        assert (await wait_within(first)).status == 200


async def test_tokenization_is_charged_for_its_length_and_recorded_without_tokens(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper) as setup:
        allow(setup, Tenant(name="alice", tokens_per_minute=10_000))
        answer = await post(setup, "/tokenize", {"content": "x" * 20_000})
        assert answer.status == 200 and int(answer.headers["x-ratelimit-remaining-tokens"]) < 5000
        assert (await post(setup, "/tokenize", {"content": "x" * 40_000})).status == 429
    assert [(row.api, row.completion_tokens) for row in rows] == [("other", 3), ("other", None)]


@pytest.mark.parametrize("entry", ["a", [1, 2]])
async def test_embeddings_of_too_many_texts_are_refused(entry: str | list[int]) -> None:
    async with start_gateway() as setup:
        for path in ("/v1/embeddings", "/api/embed"):
            refused = await post(setup, path, {"input": [entry] * (MAX_TEXTS + 1)})
            assert refused.status == 400 and b"input may have at most 2048 entries" in refused.body
        assert not setup.engine.seen
        assert (await post(setup, "/v1/embeddings", {"input": [entry] * MAX_TEXTS})).status == 200
        assert (await post(setup, "/v1/embeddings", {"input": [1] * (MAX_TEXTS + 1)})).status == 200  # of one text


# slots of the engines


async def test_sequences_take_slots_and_one_tenant_gets_no_more_than_its_share() -> None:
    async with start_gateway(slots=4) as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.run_periodic_checks()
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        too_many = await post(setup, CHAT, make_chat_body(n=5))
        assert (too_many.status, too_many.error["code"]) == (400, "too_many_sequences")
        bob = asyncio.ensure_future(ask(setup, "sk-of-bob"))
        await setup.engine.request()
        beyond = await post(setup, CHAT, make_chat_body(n=3))
        assert (beyond.status, beyond.error["code"]) == (429, "too_many_sequences")
        assert "retry-after" in beyond.headers
        asking = [asyncio.ensure_future(post(setup, CHAT, make_chat_body(n=2))) for _ in range(3)]
        await setup.engine.request(1)
        await wait_until(lambda: setup.count_waiting() == 2, "the others to wait")
        late = asyncio.ensure_future(ask(setup, "sk-of-bob"))
        await setup.engine.request(2)
        assert setup.engine.seen[2].json == make_chat_body(), "the free slot is for the other tenant"
        assert setup.count_waiting() == 2
        gate.set()
        answers = await wait_within(asyncio.gather(bob, late, *asking))
        assert [one.status for one in answers] == [200] * 5
        (link,) = setup.gateway.routes[0].links
        assert link.additional_sequences == 0


async def test_queued_request_beyond_the_share_is_rejected_when_another_tenant_came() -> None:
    async with start_gateway(slots=4) as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.run_periodic_checks()
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        alone = [asyncio.ensure_future(post(setup, CHAT, make_chat_body(n=4))) for _ in range(2)]
        await wait_until(lambda: setup.count_waiting() == 1, "the second to wait")
        bob = asyncio.ensure_future(ask(setup, "sk-of-bob"))
        await wait_until(lambda: setup.count_waiting() == 2, "the other tenant to wait")
        gate.set()
        first, second, other = await wait_within(asyncio.gather(*alone, bob))
        assert (first.status, other.status) == (200, 200)
        assert (second.status, second.error["code"], second.error["type"]) == (
            429, "too_many_sequences", "rate_limit_error"
        )  # fmt: skip


async def test_without_other_tenants_an_engine_queues_the_sequences_itself() -> None:
    async with start_gateway(slots=4) as setup:
        assert (await (await setup.connect()).post(COMPLETIONS, {"prompt": ["a"] * 60})).status == 200


# usage of all choices


async def test_sums_the_usage_of_sequences_that_report_it_separately(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    last = {"index": 0, "text": "", "finish_reason": "length"}
    async with start_gateway(keeper=keeper, requests=PER_SEQUENCE) as setup:
        setup.engine.answer(make_stream(make_usage(5, 30, [last]), make_usage(7, 20, [last]) + DONE))
        await (await setup.connect()).post(COMPLETIONS, {"prompt": ["a", "b"], "stream": True})
        setup.engine.answer(make_stream(make_delta("x"), make_usage(9, 4) + make_usage(9, 5) + make_usage(9, 6), DONE))
        await (await setup.connect()).post(CHAT, make_chat_body(stream=True, n=3))
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(12, 50), (9, 15)]


async def test_last_usage_is_the_total_of_engines_that_report_it_together(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.answer(make_stream(make_delta("x"), make_usage(9, 4), make_usage(9, 15), DONE))
        await (await setup.connect()).post(CHAT, make_chat_body(stream=True, n=3))
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(9, 15)]


async def test_counts_the_choices_that_a_complete_answer_does_not_report(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    choices = [
        {"index": 0, "text": "first", "finish_reason": "length"},
        {"index": 1, "text": "second", "finish_reason": "stop"},
        {"index": 2, "text": "third", "finish_reason": "length"},
    ]
    async with start_gateway(keeper=keeper, requests=PER_SEQUENCE) as setup:
        allow(setup, Tenant(name="alice"))
        setup.engine.answer(make_answer({"choices": choices, "usage": {"prompt_tokens": 4, "completion_tokens": 10}}))
        for tokens in (6, 20, 30):
            setup.engine.answer(make_count(tokens))
        await post(setup, COMPLETIONS, {"prompt": ["one", "two", [7, 8, 9]]})
        await wait_until(lambda: rows, "the record")
        asked = [(one.target, one.json) for one in setup.engine.seen[1:]]
        assert setup.gateway.routes[0].waiting.get_queue("alice", 1.0).served == 13 + 61
    assert asked == [
        ("/tokenize", {"prompt": "two", "add_special_tokens": True}),
        ("/tokenize", {"prompt": "second", "add_special_tokens": False}),
        ("/tokenize", {"prompt": "third", "add_special_tokens": False}),
    ]
    # The end token of the second answer is not part of its text.
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(4 + 6 + 3, 10 + 20 + 1 + 30)]


# aborted requests


async def open_stream(setup: Setup, path: str, body: dict[str, Any], *events: bytes) -> Client:
    """Returns when these events have arrived; the stream has no end."""
    setup.engine.answer(STREAM_HEAD, *(make_chunk(event) for event in events), asyncio.Event())
    client = await setup.connect()
    await client.send(request(path, {**body, "stream": True}, authorization="Bearer sk-of-alice"))
    arrived = b""
    await client.head()
    while len(arrived) < len(b"".join(events)):
        arrived += await client.chunk()
    return client


async def abort_stream(setup: Setup, path: str, body: dict[str, Any], *events: bytes) -> None:
    """Disconnects after these events have arrived."""
    (await open_stream(setup, path, body, *events)).reset()


async def test_aborted_stream_is_counted_with_the_tokenizer_and_charged(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        allow(setup, Tenant(name="alice", tokens_per_minute=60))
        member, body = get_member(setup, "alice"), make_chat_body(max_tokens=1000)
        setup.engine.otherwise = (make_count(40),)
        thinking = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"Hm. "}}]}\n\n'
        await abort_stream(setup, CHAT, body, thinking, make_delta("Forty "), make_delta("tokens"))
        await wait_until(lambda: rows, "the record")
        prompt, text = setup.engine.seen[1:]
        assert prompt.target == "/count-prompt" and prompt.json["messages"] == body["messages"]
        assert text.json == {"prompt": "Hm. Forty tokens", "add_special_tokens": False}
        (row,) = rows
        assert (row.outcome, row.prompt_tokens, row.completion_tokens) == ("cancelled", 40, 42)
        assert setup.read_metric("tokens_total", kind="completion") == 42
        # 82 instead of about 1,000; one token returns each second.
        assert member.tokens is not None and 60 - 82 <= member.tokens.read_level(0.0) < 30
        read = setup.gateway.meters.registry.get_sample_value
        assert read("bedplate_tenant_tokens_total", {"tenant": "alice", "kind": "completion"}) == 42
        line = setup.gateway.routes[0].waiting.get_queue("alice", 1.0)
        assert line.served == 82 and line.in_flight == 0


async def test_aborted_stream_is_estimated_if_the_engine_cannot_count(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper) as setup:
        await abort_stream(setup, COMPLETIONS, {"prompt": "x" * 400}, b'data: {"choices":[{"text":"12345678"}]}\n\n')
        await wait_until(lambda: rows, "the record")
        assert len(setup.engine.seen) == 1
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(100, 3)]


async def test_aborted_stream_is_estimated_if_the_engine_stopped(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.otherwise = (End.RESET,)
        await abort_stream(setup, COMPLETIONS, {"prompt": "x" * 400}, b'data: {"choices":[{"text":"12345678"}]}\n\n')
        await wait_until(lambda: rows, "the record")
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(100, 4)]


async def test_records_aborted_requests_when_the_gateway_stops(
    keeper: RequestRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bedplate.run.gateway.server._COUNT_S", 0.01)
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.otherwise = (asyncio.Event(),)
        event = b'data: {"choices":[{"text":"1"}]}\n\n'
        for client in [await open_stream(setup, COMPLETIONS, {"prompt": "x" * 400}, event) for _ in range(3)]:
            client.reset()
        await wait_until(lambda: len(setup.engine.seen) == 4, "the first to be counted")
        assert not rows
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(100, 3)] * 3


async def test_first_usage_of_the_messages_api_is_not_the_last(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}}
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hello"}}
    events = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (start, delta, delta)]
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.otherwise = (make_count(30),)
        messages = [{"role": "user", "content": "Hi"}]
        await abort_stream(setup, "/v1/messages", {"messages": messages, "max_tokens": 500}, *events)
        await wait_until(lambda: rows, "the record")
        assert [one.json["prompt"] for one in setup.engine.seen[1:]] == ["HelloHello"]
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(25, 32)]


async def test_aborted_stream_of_the_responses_api_is_counted(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    events = [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.reasoning_text.delta", "delta": "Hm. "},
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "response.output_text.done", "text": "Hello"},
    ]
    lines = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.otherwise = (make_count(30),)
        await abort_stream(setup, "/v1/responses", {"input": "x" * 398}, *lines)
        await wait_until(lambda: rows, "the record")
        assert [one.json["prompt"] for one in setup.engine.seen[1:]] == ["Hm. Hello"]
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(100, 32)]


async def test_each_choice_of_an_aborted_stream_is_counted(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    events = [
        b'data: {"choices":[{"index":1,"text":"b"}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
        b'data: {"choices":[{"index":1,"text":"b","finish_reason":"stop"}],"usage":{"completion_tokens":2}}\n\n',
    ]
    async with start_gateway(keeper=keeper, requests=PER_SEQUENCE) as setup:
        setup.engine.otherwise = (make_count(10),)
        await abort_stream(setup, COMPLETIONS, {"prompt": ["one", "two", "three"]}, *events)
        await wait_until(lambda: rows, "the record")
        assert sorted(one.json["prompt"] for one in setup.engine.seen[1:]) == ["a", "bb", "one", "three", "two"]
    # One choice ended with a token that is not in its text, one was interrupted, and one had not begun.
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(30, 20 + 1 + 2)]


async def test_long_streams_keep_only_their_text(keeper: RequestRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "KEPT_CHUNKS", 4)
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.otherwise = (make_count(10),)
        await abort_stream(setup, CHAT, make_chat_body(), *(make_delta(f"{number} ") for number in range(11)))
        await wait_until(lambda: rows, "the record")
        assert setup.engine.seen[2].json["prompt"] == "".join(f"{number} " for number in range(11))


async def test_request_that_is_aborted_before_its_first_token_costs_its_prompt(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.engine.answer(asyncio.Event())
        setup.engine.otherwise = (make_count(10),)
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(stream=True)))
        await setup.engine.request()
        client.reset()
        await wait_until(lambda: rows, "the record")
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(10, 0)]


async def test_aborted_answer_that_is_not_streamed_is_estimated_by_the_pace_of_others(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING) as setup:
        setup.gateway.routes[0]._service_s = 1e-6  # recent answers took a microsecond
        setup.engine.answer(asyncio.Event())
        setup.engine.otherwise = (make_count(10),)
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(max_tokens=70, n=2)))
        await setup.engine.request()
        client.reset()
        await wait_until(lambda: rows, "the record")
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(10, 140)]


async def test_request_that_never_reached_an_engine_costs_nothing(keeper: RequestRecorder) -> None:
    rows = collect_rows(keeper)
    async with start_gateway(keeper=keeper, requests=COUNTING, max_connections=1) as setup:
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer(ANSWER))
        first = asyncio.ensure_future((await setup.connect()).post(CHAT, make_chat_body()))
        await setup.engine.request()
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(stream=True)))
        await wait_until(lambda: setup.count_waiting() == 1, "it to wait")
        client.reset()
        await wait_until(lambda: rows, "the record")
        gate.set()
        await wait_within(first)
    assert (rows[0].outcome, rows[0].prompt_tokens, rows[0].completion_tokens) == ("cancelled", None, None)


# fields and headers of engines


async def test_rejects_fields_that_no_engine_of_the_model_understands() -> None:
    traits = RequestTraits(fields=frozenset(["ignore_eos"]), limits={"samplers": 4})
    async with start_gateway(requests=traits) as setup:
        client = await setup.connect()
        refused = await client.post(CHAT, make_chat_body(n_predict=5))
        assert (refused.status, refused.error["code"], refused.error["param"]) == (
            400, "unsupported_parameter", "n_predict"
        )  # fmt: skip
        assert refused.error["type"] == "invalid_request_error" and "max_tokens" in refused.error["message"]
        assert (await client.post(CHAT, make_chat_body(samplers=["top_k"] * 5))).status == 400
        assert not setup.engine.seen
        for fields in ({"ignore_eos": True}, {"samplers": ["top_k"]}, {"unknown": 1}, {"n_predict": None}):
            assert (await client.post(CHAT, make_chat_body(**fields))).status == 200
            assert setup.engine.seen[-1].json == make_chat_body(**fields)


async def test_headers_that_keep_an_answer_running_are_not_forwarded() -> None:
    async with start_gateway(requests=RequestTraits(dropped_headers=frozenset([b"x-conversation-id"]))) as setup:
        client = await setup.connect()
        await client.post(CHAT, make_chat_body(), x_conversation_id="abc", x_request_id="7")
        seen = setup.engine.seen[0]
        assert seen.header("x-conversation-id") == [] and seen.header("x-request-id") == ["7"]
