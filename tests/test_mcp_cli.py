"""`bedplate mcp` with the client of the official SDK, and what a client cannot do with it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import HANG_S, have_ended, wait_for
from tests.runs import make_cell, make_run

from bedplate.cli.mcp_server import TOOLS, McpError, McpServer, build_arguments, make_result
from bedplate.run.environments import EngineEnvironment
from bedplate.values import to_json


@asynccontextmanager
async def open_session(home: Path) -> AsyncIterator[Any]:
    """A session of the official SDK's client with `bedplate mcp`."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    arguments, env = ["-m", "bedplate", "mcp"], {"BEDPLATE_HOME": str(home), "PATH": os.environ["PATH"]}
    server = StdioServerParameters(command=sys.executable, args=arguments, env=env)
    async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()
        yield session


def test_the_official_client_lists_and_calls_the_tools(tmp_path: Path) -> None:
    async def talk() -> tuple[Any, Any, Any]:
        async with open_session(tmp_path) as session:
            tools = await session.list_tools()
            model, hardware = "meta-llama/Llama-3.1-8B", "1x H100 SXM"
            planned, failed = await asyncio.gather(
                session.call_tool("plan", {"model": model, "hardware": hardware, "users": 20}),
                session.call_tool("plan", {"model": "--version"}),
            )
            return tools, planned, failed

    tools, planned, failed = asyncio.run(talk())
    assert {tool.name for tool in tools.tools} == set(TOOLS) == {
        "probe", "models", "plan", "bench", "diagnose", "compare",
    }  # fmt: skip
    document = json.loads(planned.content[0].text)
    assert document["schema"].startswith("decision/") and document["engine"]
    # The value is a model's name, not an option.
    assert json.loads(failed.model_dump_json())["content"][0]["text"].startswith("error: ")


def test_the_official_client_calls_every_other_tool(
    own_home: Path, tmp_path: Path, builtin_gguf: Path, llama_environment: EngineEnvironment
) -> None:
    """`bench` measures the real llama.cpp, and `compare` judges a made-up run of two engines."""
    made = tmp_path / "made.json"
    cells = [make_cell(engine, 1, rate) for engine, rate in (("llama.cpp", 100.0), ("pytorch", 200.0))]
    made.write_text(to_json(make_run(cells, ("llama.cpp", "pytorch"), (1,))))
    short = {"engines": "llama.cpp", "concurrency": "1", "prompt_tokens": 16, "output_tokens": 4, "budget": "20s"}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("probe", {}),
        ("models", {"hardware": "RTX 4090", "search": "qwen", "limit": 2}),
        ("bench", short),
        ("diagnose", {"engine": "llama.cpp"}),
        ("compare", {"a": f"{made}:llama.cpp", "b": f"{made}:pytorch"}),
    ]

    async def talk() -> dict[str, Any]:
        async with open_session(own_home) as session:
            return {name: await session.call_tool(name, given) for name, given in calls}

    found = {name: result.model_dump(by_alias=True) for name, result in asyncio.run(talk()).items()}
    assert not [result for result in found.values() if result["isError"]]
    documents = {name: json.loads(result["content"][0]["text"]) for name, result in found.items()}
    kinds = {name: one["schema"].split("/")[0] for name, one in documents.items()}
    assert kinds == {
        "probe": "hardware", "models": "models", "bench": "run", "diagnose": "diagnosis", "compare": "verdict",
    }  # fmt: skip
    assert len(documents["models"]["models"]) == 2 and documents["compare"]["answer"] == "migrate"
    assert documents["diagnose"]["runs"] == [documents["bench"]["id"]]
    assert found["compare"]["structuredContent"] == documents["compare"]


def test_values_cannot_become_options() -> None:
    assert build_arguments("plan", {"model": "--emit", "hardware": "-o x", "users": 3}) == [
        "plan", "--hardware=-o x", "--users=3", "--json", "--", "--emit",
    ]  # fmt: skip
    for name, given in (
        ("serve", {}),
        ("plan", {"output": "/tmp/x"}),
        ("compare", {"a": "x"}),
        ("plan", {"users": "3"}),
        ("plan", {"users": True}),
    ):
        with pytest.raises(McpError):
            build_arguments(name, given)


def call(number: Any, name: str, **given: Any) -> dict[str, Any]:
    return {"id": number, "method": "tools/call", "params": {"name": name, "arguments": given}}


def test_bad_messages_get_errors_and_the_server_goes_on(tmp_path: Path) -> None:
    pipe = tmp_path / "intent.json"
    os.mkfifo(pipe)  # a verb that reads it waits until it is cancelled
    bad = [
        ("not JSON", -32700),
        ([call(1, "probe")], -32600),
        (call([1], "probe"), -32600),
        (call(True, "probe"), -32600),
        ({"id": 1, "method": "resources/list"}, -32601),
        (call(1, "serve"), -32602),
        (call(1, "plan", model="a\0b"), -32602),
        (call(1, "plan", model="\ud800"), -32602),
        (call(1, "plan", model="x" * 2_500_000), -32602),
        (call(7, "probe"), -32600),  # 7 is running
    ]
    numbers: list[Any] = [[], {}, None, 8, 7]
    cancel = [{"method": "notifications/cancelled", "params": {"requestId": number}} for number in numbers]
    sent = [call(7, "diagnose", run=str(pipe)), *(one for one, _ in bad), *cancel, {"id": "last", "method": "ping"}]
    output = io.StringIO()
    McpServer(output).serve(io.StringIO("".join(json.dumps(one) + "\n" for one in sent).replace('"not JSON"', "not")))
    answers = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [one["error"]["code"] for one in answers if "error" in one] == [code for _, code in bad]
    ended = {one["id"]: one["result"] for one in answers if "result" in one}
    assert set(ended) == {7, "last"} and ended[7]["isError"]


def test_a_verdict_is_a_result_whatever_its_exit_code() -> None:
    assert make_result('{"a": 1}', "note")["structuredContent"] == {"a": 1}
    assert make_result("", "error: no run")["isError"]


@pytest.mark.skipif(not hasattr(psutil.Process, "cpu_affinity"), reason="looks at the processes below the server")
def test_a_call_ends_with_the_server_and_when_it_is_cancelled(tmp_path: Path) -> None:
    """The verb waits for the end of its file, which is a pipe that nobody writes to."""
    pipe = tmp_path / "intent.json"
    os.mkfifo(pipe)
    call = {"name": "diagnose", "arguments": {"run": str(pipe)}}
    for how in ("cancel", "close", "kill"):
        server = subprocess.Popen(
            [sys.executable, "-m", "bedplate", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": call}
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()
        (child,) = wait_for(lambda: psutil.Process(server.pid).children(), "the verb to start")  # noqa: B023
        if how == "cancel":
            params = {"requestId": 7}
            notice = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            server.stdin.write(json.dumps(notice) + "\n")
            server.stdin.flush()
        elif how == "close":
            server.stdin.close()
        else:
            server.kill()
        wait_for(lambda: have_ended([child]), f"the verb to end after {how}")  # noqa: B023
        if not server.stdin.closed:
            server.stdin.close()
        assert server.wait(HANG_S) == (-9 if how == "kill" else 0)
        server.stdout.close()
