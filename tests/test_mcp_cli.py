"""`bedplate mcp` with the client of the official SDK, and what a client cannot do with it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import HANG_S, have_ended, wait_for

from bedplate.cli.mcp_server import TOOLS, McpError, build_arguments, make_result


def test_the_official_client_lists_and_calls_the_tools(tmp_path: Path) -> None:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def talk() -> tuple[Any, Any, Any]:
        arguments, env = ["-m", "bedplate", "mcp"], {"BEDPLATE_HOME": str(tmp_path)}
        server = StdioServerParameters(command=sys.executable, args=arguments, env=env)
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
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
