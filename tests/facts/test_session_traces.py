"""Traces with sessions: BurstGPT, Qwen-Bailian, AIPerf's variant of Mooncake, GitHub Copilot, trajectories of agents.

The rows have the columns and fields that the publishers document.
"""

from __future__ import annotations

import io
import json
from typing import Any, cast

import pytest

from bedplate.facts.traces import BadRows, detect_format, parse_trace
from bedplate.values.workload import RequestShape, TraceFormat


def read(text: str, kind: TraceFormat) -> list[RequestShape]:
    bad = BadRows("trace")
    stream = cast("io.BufferedReader", io.BufferedReader(io.BytesIO(text.encode())))
    assert detect_format(stream, "trace") == kind
    found = list(parse_trace(stream, kind, bad))
    assert not bad.count, bad.examples
    return found


def test_burstgpt_without_sessions() -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text += "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
    assert read(text, "burstgpt") == [RequestShape(started_s=5, prompt_tokens=472, output_tokens=18)], (
        "a request without response tokens failed"
    )


def test_burstgpt_with_sessions() -> None:
    text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text += "5,a1,2.5,ChatGPT,472,18,490,Conversation log\n9,,0.5,GPT-4,10,20,30,API log\n"
    one, other = read(text, "burstgpt")
    assert (one.session, one.duration_ms) == ("a1", 2500) and other.session is None


def test_bailian_follows_the_parents_of_a_request() -> None:
    rows: list[dict[str, Any]] = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 5, "turn": 1},
        {"chat_id": 7, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 60, "output_length": 6, "turn": 2},
        {"chat_id": 8, "parent_chat_id": 7, "timestamp": 20, "input_length": 90, "output_length": 7, "turn": 3},
        {"chat_id": 9, "parent_chat_id": -1, "timestamp": 30, "input_length": 9, "output_length": 7, "turn": 1},
    ]
    text = "\n".join(json.dumps({**row, "type": "text", "hash_ids": [1, 2]}) for row in rows)
    shapes = read(text, "bailian")
    assert [shape.session for shape in shapes] == ["1", "1", "1", "9"]
    assert shapes[0].prefix_block_tokens == 16 and shapes[0].started_s == 0.5


def test_mooncake_rows_with_a_session_may_follow_the_answer() -> None:
    text = '{"session_id": "s", "timestamp": 1000, "input_length": 30, "output_length": 3, "hash_ids": [1]}\n'
    text += '{"session_id": "s", "delay": 500, "input_length": 50, "output_length": 4, "hash_ids": [1, 2]}\n'
    one, other = read(text, "mooncake")
    assert (one.session, one.started_s, other.started_s, other.wait_s) == ("s", 1.0, None, 0.5)


def test_copilot_has_a_session_in_each_line() -> None:
    def call(second: int, initiator: str, completion: int) -> dict[str, object]:
        tokens = {"total": 100 + completion, "prompt": 100, "completion": completion, "cached": 80, "cached_pct": 80.0}
        return {
            "message_id": "m", "timestamp": f"2026-06-01T00:00:{second:02}Z", "duration_ms": 1500.0,
            "initiator_type": initiator, "model": "Model A", "result": "Success", "status_code": "OK", "tokens": tokens,
            "message_metadata": [{"type": "System", "role": "system", "sequenceId": 0, "token_len": 50}],
        }  # fmt: skip

    turns = [
        {"turn_id": "t", "llm_calls": [call(1, "user", 9), call(5, "agent", 8)], "tool_batches": []},
        {"turn_id": "u", "llm_calls": [call(30, "user", 7), call(40, "agent", 0)], "tool_batches": []},
    ]
    shapes = read(json.dumps({"session_id": "abc", "date": "2026-06-01", "turns": turns}), "copilot")
    assert [shape.after_tool for shape in shapes] == [False, True, False], "a call without tokens is left out"
    assert {shape.session for shape in shapes} == {"abc"} and shapes[0].cached_tokens == 80
    assert (shapes[1].started_s or 0) - (shapes[0].started_s or 0) == 4


TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "You use tools."},
    {"role": "user", "content": [{"type": "text", "text": "Please fix the bug in the parser."}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]},
    {"role": "tool", "content": "parser.py tests"},
    {"role": "assistant", "content": "It is fixed."},
]


@pytest.mark.parametrize(
    "conversation",
    [
        {"messages": TURNS, "instance_id": "x-1"},
        {"messages_json": json.dumps(TURNS), "session_id": "x-1"},
        {"trajectory": [{**turn, "role": "ai" if turn["role"] == "assistant" else turn["role"]} for turn in TURNS],
         "instance_id": "x-1"},
    ],
)  # fmt: skip
def test_trajectories_of_agents_are_sessions(conversation: dict[str, object]) -> None:
    one, other = read(json.dumps(conversation), "sharegpt")
    assert one.session == other.session == "x-1" and one.started_s is None
    assert (one.after_tool, other.after_tool) == (False, True)
    assert (other.prompt_tokens or 0) > (one.prompt_tokens or 0) + (one.output_tokens or 0)
    assert other.cached_tokens == (one.prompt_tokens or 0) + (one.output_tokens or 0)
