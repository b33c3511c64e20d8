"""Sessions of the load generator: what it sends, when, and what it records."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.measure.rough_server import Asked, make_response, make_stream, serve_rough

from bedplate.errors import UsageError
from bedplate.facts.scenarios import SCENARIOS
from bedplate.measure.load import LoadTarget, PreparedEndpoint, measure, prepare, run, serve_null
from bedplate.measure.load.null_server import NullServer
from bedplate.measure.load.schedule import check_load
from bedplate.measure.load.sessions import SessionFactory
from bedplate.measure.load.tools import TOOLS
from bedplate.measure.load.trace_sessions import group_sessions, limit_sessions
from bedplate.measure.load.words import WORDS
from bedplate.values.record import replace_fields
from bedplate.values.run import Load, Repeat
from bedplate.values.scenario import Distribution, Scenario
from bedplate.values.workload import RequestShape

QUICK = {"seconds": 0.6, "warmup_s": 0.1, "least_requests": 1, "check": False}


def make_scenario(**changes: Any) -> Scenario:
    """Four turns of a few tokens, without waiting."""
    short = Scenario(
        name="chat",
        turns=Distribution(kind="constant", mean=4),
        system_tokens=20,
        input_tokens=Distribution(kind="constant", mean=12),
        output_tokens=Distribution(kind="constant", mean=3),
        think_s=Distribution(kind="constant", mean=0),
        context_tokens=4096,
    )
    return replace_fields(short, **changes)


def make_load(scenario: Scenario, **changes: Any) -> Load:
    return Load(**{"arrivals": "sessions", "sessions": 1, "scenario": scenario, **changes})


def make_prepared(**changes: Any) -> PreparedEndpoint:
    return PreparedEndpoint(model="m", api="chat", fields=("usage",), request_s=0.01, **changes)


def answer_chat(text: str, request: dict[str, Any], **delta: Any) -> bytes:
    """A streamed chat answer; each word of the messages counts as one token."""
    words = sum(len(str(message.get("content") or "").split()) for message in request.get("messages", ()))
    usage = {"prompt_tokens": words, "completion_tokens": request.get("max_tokens", 1)}
    event = {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": "stop"}], "usage": usage}
    return make_stream(b"data: " + json.dumps(event).encode() + b"\n\n")


def find_conversations(asked: list[Asked]) -> list[list[dict[str, Any]]]:
    return [one.json["messages"] for one in asked if one.body and "messages" in one.json]


@pytest.fixture(scope="module")
def null() -> Iterator[NullServer]:
    with serve_null(first_ms=5, interval_ms=1, tokens=8) as one:
        yield one


def measure_null(null: NullServer, load: Load, **options: Any) -> Repeat:
    target = LoadTarget.from_url(null.url)
    return run(measure(target, load, **{**QUICK, "prepared": make_prepared(), **options}))


# what is sent


def test_each_turn_contains_the_turns_before_it_and_the_real_answers() -> None:
    answers = iter(range(10**6))

    def script(connection: socket.socket, asked: Asked) -> None:
        connection.sendall(answer_chat(f'real answer "{next(answers)}"\n', asked.json))

    with serve_rough(script) as server:
        load = make_load(make_scenario())
        target = LoadTarget.from_url(server.url, model="m")
        repeat = run(measure(target, load, prepared=make_prepared(), **QUICK))  # type: ignore[arg-type]
        sent = find_conversations(server.asked)
    assert {sample.outcome for sample in repeat.samples} == {"ok"}
    whole = [one for one in repeat.sessions if one.outcome == "complete" and not one.joined]
    assert whole and all(one.turns == one.planned_turns == 4 for one in whole)
    longer = [(one, other) for one, other in itertools.pairwise(sent) if len(other) == len(one) + 2]
    assert longer, "one session at a time: the next request continues the one before"
    for before, after in longer:
        assert after[: len(before)] == before
        assert after[-2]["role"] == "assistant" and after[-2]["content"].startswith('real answer "')
        assert after[-1]["role"] == "user" and len(after[-1]["content"].split()) == 12
    firsts = [one for one in sent if len(one) == 2]
    assert len({one[0]["content"] for one in sent}) == 1, "all sessions share the system prompt"
    assert sent[0][0]["role"] == "system" and len({one[1]["content"] for one in firsts}) == len(firsts)


def test_a_session_that_is_under_way_repeats_a_generated_history() -> None:
    factory = SessionFactory(
        LoadTarget.from_url("http://127.0.0.1:1"), make_load(make_scenario(), sessions=8), make_prepared(), 0
    )
    joined = [factory.make_exchange(number, 0).session for number in range(8)]
    assert {one.joined for one in joined if one is not None} > {0}, "they begin at different turns"
    for one in joined:
        assert one is not None and len(one.messages) == 2 + 2 * one.joined
    assert factory.to_join == 8
    later = factory.make_exchange(8, 0).session
    assert later is not None and later.joined == 0, "later sessions begin with their first turn"


def test_tools_are_called_and_their_results_returned() -> None:
    call = {"index": 0, "id": "x", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}

    def script(connection: socket.socket, asked: Asked) -> None:
        if not asked.body:
            connection.sendall(make_response({"data": [{"id": "m", "max_model_len": 999}]}))
        elif asked.json.get("tool_choice") == "required":
            connection.sendall(answer_chat("", asked.json, tool_calls=[call]))
        else:
            connection.sendall(answer_chat("done", asked.json))

    scenario = make_scenario(
        name="agent",
        tool_share=1.0,
        tool_tokens=Distribution(kind="constant", mean=30),
        tool_s=Distribution(kind="constant", mean=0.001),
    )
    with serve_rough(script) as server:
        target = LoadTarget.from_url(server.url, model="m")
        load = make_load(scenario)
        prepared = run(prepare(target, load))
        assert (prepared.tools, prepared.api, prepared.context_tokens) == ("auto", "chat", 999)
        repeat = run(measure(target, load, prepared=prepared, **QUICK))  # type: ignore[arg-type]
        requests = [one.json for one in server.asked if one.body and "messages" in one.json]
    assert {sample.outcome for sample in repeat.samples} == {"ok"}
    assert all(sample.ttft_ms is not None for sample in repeat.samples), "a tool call counts as text"
    last = next(one for one in requests if len(one["messages"]) == 8 and one["messages"][-1]["role"] == "tool")
    assert last["tools"] == list(TOOLS) and last["tool_choice"] == "auto", "the last turn answers the user"
    called, result = last["messages"][-2:]
    assert called["tool_calls"][0]["function"] == call["function"]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] and len(result["content"].split()) == 30


def test_an_incomplete_tool_call_is_repeated_as_text() -> None:
    call = {"index": 0, "function": {"name": "read_file", "arguments": '{"path": "a'}}

    def script(connection: socket.socket, asked: Asked) -> None:
        required = asked.json.get("tool_choice") == "required"
        connection.sendall(answer_chat("", asked.json, **({"tool_calls": [call]} if required else {})))

    scenario = make_scenario(name="agent", tool_share=1.0, tool_tokens=Distribution(kind="constant", mean=5))
    with serve_rough(script) as server:
        target = LoadTarget.from_url(server.url, model="m")
        run(measure(target, make_load(scenario), prepared=make_prepared(tools="auto"), **QUICK))  # type: ignore[arg-type]
        sent = find_conversations(server.asked)
    longer = next(one for one in sent if len(one) == 4 and one[2]["content"].startswith("{"))
    assert longer[2] == {"role": "assistant", "content": '{"path": "a'} and longer[3]["role"] == "user"


def test_requests_with_a_json_schema() -> None:
    def script(connection: socket.socket, asked: Asked) -> None:
        models = make_response({"data": []})  # the context is unknown
        connection.sendall(answer_chat('{"items": []}', asked.json) if asked.body else models)

    with serve_rough(script) as server:
        target = LoadTarget.from_url(server.url, model="m")
        load = make_load(make_scenario(name="batch", schema_share=1.0))
        prepared = run(prepare(target, load))
        assert prepared.schemas and not any("schema" in note for note in prepared.notes)
        run(measure(target, load, prepared=prepared, **QUICK))  # type: ignore[arg-type]
        request = server.asked[-1].json
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["items"]["items"]["enum"][0] in WORDS
    assert "ignore_eos" not in request and "min_tokens" not in request, "an answer with a schema ends by itself"


def test_says_that_an_endpoint_ignores_schemas(null: NullServer) -> None:
    prepared = run(prepare(LoadTarget.from_url(null.url), make_load(make_scenario(name="batch", schema_share=0.5))))
    assert not prepared.schemas and any("JSON schemas" in note for note in prepared.notes)


# when it is sent


def test_a_turn_is_sent_after_the_waiting_time(null: NullServer) -> None:
    load = make_load(make_scenario(think_s=Distribution(kind="constant", mean=0.08)))
    repeat = measure_null(null, load, seconds=1.0)
    turns = sorted((sample for sample in repeat.samples if sample.session == 1), key=lambda sample: sample.turn or 0)
    assert len(turns) >= 2
    for before, after in itertools.pairwise(turns):
        ended_s = before.at_s + before.duration_ms / 1000
        assert after.at_s - after.late_ms / 1000 >= ended_s + 0.08 - 0.002, "not before the waiting time is over"
    assert repeat.in_flight_max == 1


def test_each_session_has_at_most_one_request_in_flight(null: NullServer) -> None:
    repeat = measure_null(null, make_load(make_scenario(), sessions=3))
    assert repeat.in_flight_max <= 3 and {sample.outcome for sample in repeat.samples} == {"ok"}
    for number in {sample.session for sample in repeat.samples}:
        mine = sorted((one for one in repeat.samples if one.session == number), key=lambda one: one.at_s)
        assert [one.turn for one in mine] == list(range(mine[0].turn or 0, (mine[-1].turn or 0) + 1))


def test_sessions_arrive_in_an_open_loop(null: NullServer) -> None:
    load = Load(arrivals="constant", requests_per_s=20, scenario=make_scenario())
    repeat = measure_null(null, load)
    firsts = [sample for sample in repeat.samples if sample.turn == 1]
    assert firsts and any(sample.turn == 4 for sample in repeat.samples)
    assert not any(one.joined for one in repeat.sessions)


def test_the_client_check_includes_late_turns(null: NullServer) -> None:
    repeat = measure_null(null, make_load(make_scenario(), sessions=2))
    assert repeat.client.send_lag_p99_ms > 0 and repeat.client.loop_lag_p99_ms > 0


# what is recorded


def test_a_failed_request_ends_its_session() -> None:
    def script(connection: socket.socket, asked: Asked) -> None:
        if len(asked.json["messages"]) > 2:
            connection.sendall(make_response({"error": "no"}, "500 Internal Server Error"))
        else:
            connection.sendall(answer_chat("x", asked.json))

    with serve_rough(script) as server:
        target = LoadTarget.from_url(server.url, model="m")
        load = Load(arrivals="constant", requests_per_s=20, scenario=make_scenario())
        repeat = run(measure(target, load, prepared=make_prepared(), **QUICK))  # type: ignore[arg-type]
    failed = [one for one in repeat.sessions if one.outcome == "failed"]
    assert failed and all(one.turns == 1 for one in failed)
    assert {sample.turn for sample in repeat.samples if sample.outcome == "error"} == {2}


def test_a_session_ends_before_its_context_is_full() -> None:
    def script(connection: socket.socket, asked: Asked) -> None:
        connection.sendall(answer_chat("a " * 60, asked.json))  # far longer than asked for

    with serve_rough(script) as server:
        target = LoadTarget.from_url(server.url, model="m")
        load = make_load(make_scenario(context_tokens=200))
        repeat = run(measure(target, load, prepared=make_prepared(), **QUICK))  # type: ignore[arg-type]
        longest = max(sum(len(m["content"].split()) for m in one) for one in find_conversations(server.asked))
    assert any(one.outcome == "context" for one in repeat.sessions) and longest < 200
    assert {sample.outcome for sample in repeat.samples} == {"ok"}


def test_sessions_need_a_number_and_something_to_draw_from() -> None:
    with pytest.raises(UsageError, match="their number"):
        check_load(Load(arrivals="sessions", scenario=SCENARIOS["chat"]))
    with pytest.raises(UsageError, match="a scenario or a trace"):
        check_load(Load(arrivals="sessions", sessions=1))


# traces


def make_shape(started_s: float | None, prompt: int, output: int, session: str | None, **more: Any) -> RequestShape:
    return RequestShape(started_s=started_s, prompt_tokens=prompt, output_tokens=output, session=session, **more)


def test_the_requests_of_a_session_stay_together() -> None:
    shapes = [
        make_shape(10, 100, 20, "a", duration_ms=2000),
        make_shape(11, 50, 5, None),
        make_shape(15, 150, 30, "a"),
        make_shape(30, 40, 4, "a"),
    ]
    first, second = group_sessions(shapes, Load(arrivals="replay"))
    assert [turn.new_tokens for turn in first.turns] == [100, 30, 40]
    assert [turn.wait_s for turn in first.turns] == [0.0, 3.0, None], "the time after the answer, if it is known"
    assert [turn.restarts for turn in first.turns] == [False, False, True], "its context was replaced"
    assert first.prompt_tokens == [100, 150, 40] and first.turns[2].at_s == 20
    assert (second.starts_s, len(second.turns)) == (1.0, 1)


def test_requests_that_exceed_the_context_are_left_out() -> None:
    shapes = [make_shape(n, 100 * (n + 1), 10, "a") for n in range(4)] + [make_shape(9, 900, 10, None)]
    (kept,) = limit_sessions(group_sessions(shapes, Load(arrivals="replay")), 330, 20)
    assert kept.prompt_tokens == [100, 200, 300]
    with pytest.raises(UsageError, match="no session of the trace fits"):
        limit_sessions([kept], 50, 20)


def test_a_replay_continues_the_sessions_of_its_trace(null: NullServer) -> None:
    shapes = [
        make_shape(0.0, 20, 2, "a"), make_shape(0.05, 30, 2, "b", duration_ms=10),
        make_shape(0.1, 40, 3, "a"), make_shape(0.2, 60, 4, "b"),
    ]  # fmt: skip
    load = Load(arrivals="replay", trace="test")
    repeat = measure_null(null, load, shapes=shapes, seconds=30, most_seconds=30)
    found = {(one.session, one.turn): (one.prompt_tokens, one.output_tokens) for one in repeat.samples}
    assert found == {(0, 1): (20, 2), (1, 1): (30, 2), (0, 2): (40, 3), (1, 2): (60, 4)}
    assert [one.outcome for one in repeat.sessions] == ["complete", "complete"] and repeat.seconds < 20


def test_the_sessions_of_a_trace_without_times_run_in_a_closed_loop(null: NullServer) -> None:
    shapes = [make_shape(None, 20 + n, 2, f"s{n // 2}") for n in range(6)]
    with pytest.raises(UsageError, match="no arrival times"):
        check_load(Load(arrivals="replay", trace="test"), shapes)
    repeat = measure_null(null, Load(arrivals="sessions", sessions=2, trace="test"), shapes=shapes)
    assert {sample.outcome for sample in repeat.samples} == {"ok"} and repeat.sessions
