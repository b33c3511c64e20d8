"""The Model Context Protocol on standard input and output, for `bedplate mcp`.

The protocol is JSON-RPC, one message a line, and tools need four of its methods, so bedplate speaks it without a
library: https://modelcontextprotocol.io/specification/2025-11-25. A tool runs a verb in a separate process, which
ends when its request is cancelled or the server ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple, TextIO

from bedplate._version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol; a client that asks for another one gets the first."""
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _PARSE_ERROR = -32600, -32601, -32602, -32700
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 1}
_WORKLOAD = {
    "users": {**_NUMBER, "description": "Number of users, who think between requests."},
    "concurrency": {**_NUMBER, "description": "Number of requests in flight."},
    "context": {**_NUMBER, "description": "Longest request in tokens, prompt and answer."},
}
_LENGTHS = {
    "prompt_tokens": {**_NUMBER, "description": "Typical prompt length in tokens."},
    "output_tokens": {**_NUMBER, "description": "Typical answer length in tokens."},
}
_MODEL = {**_TEXT, "description": "A .gguf file, a folder, or owner/name on the Hugging Face hub."}
_HARDWARE = {**_TEXT, "description": 'Hypothetical hardware, for example "8x H100 SXM". Default: this machine.'}
_RUN = "a run id, RUN:ENGINE, an engine, or a file from `bench --json`"


class VerbTool(NamedTuple):
    """A verb as a tool: its options are the other properties."""

    description: str
    properties: dict[str, Any]
    positional: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    reads_only: bool = True


TOOLS: dict[str, VerbTool] = {
    "probe": VerbTool("Reports this machine: CPU, memory, GPUs, disk, and limits of containers.", {}),
    "models": VerbTool(
        "Lists the models that this machine, or hypothetical hardware, can run, with engine, speed and memory.",
        {"hardware": _HARDWARE, **_WORKLOAD, "search": _TEXT, "limit": _NUMBER},
    ),
    "plan": VerbTool(
        "Chooses the inference engine for a model, hardware and workload, with the reasons, memory, expected speed, "
        "rejected engines and the launch command. Nothing is installed or started.",
        {"model": _MODEL, "hardware": _HARDWARE, **_WORKLOAD, **_LENGTHS, "engine": _TEXT},
        ("model",),
    ),
    "bench": VerbTool(
        "Measures installed engines on this machine. It takes minutes and uses the whole machine.",
        {
            "model": _MODEL,
            "engines": {**_TEXT, "description": "Engine ids, comma-separated."},
            "concurrency": {**_TEXT, "description": "Numbers of concurrent requests, comma-separated."},
            **_LENGTHS,
            "budget": {**_TEXT, "description": "Time limit of the whole run, for example 4m."},
        },
        ("model",),
        reads_only=False,
    ),
    "diagnose": VerbTool(
        "Finds the bottleneck of a measured run, and what to change first.",
        {"run": {**_TEXT, "description": f"{_RUN[0].upper()}{_RUN[1:]}. Default: the newest run."}, "engine": _TEXT},
        ("run",),
    ),
    "compare": VerbTool(
        "Compares two measured engines: stay, migrate or not proven.",
        {
            "a": {**_TEXT, "description": f"The engine in service: {_RUN}."},
            "b": {**_TEXT, "description": "The engine that may replace it, named in the same way."},
        },
        ("a", "b"),
        ("a", "b"),
    ),
}


class McpError(Exception):
    """An error of the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def describe_tools() -> list[dict[str, Any]]:
    found = []
    for name, tool in TOOLS.items():
        schema: dict[str, Any] = {"type": "object", "properties": tool.properties, "additionalProperties": False}
        if tool.required:
            schema["required"] = list(tool.required)
        hints = {"readOnlyHint": tool.reads_only, "destructiveHint": False, "openWorldHint": False}
        found.append({"name": name, "description": tool.description, "inputSchema": schema, "annotations": hints})
    return found


def build_arguments(name: str, given: dict[str, Any]) -> list[str]:
    """The command line of a call. Values cannot become options: each is part of its option, or comes after `--`."""
    tool = TOOLS.get(name)
    if tool is None:
        raise McpError(_INVALID_PARAMS, f"unknown tool {name!r}; choose {', '.join(TOOLS)}")
    if unknown := [one for one in given if one not in tool.properties]:
        raise McpError(_INVALID_PARAMS, f"{name} has no argument {', '.join(unknown)}")
    if missing := [one for one in tool.required if given.get(one) is None]:
        raise McpError(_INVALID_PARAMS, f"{name} needs {' and '.join(missing)}")
    for one, value in given.items():
        kind = str if tool.properties[one]["type"] == "string" else int
        if value is not None and type(value) is not kind:
            raise McpError(_INVALID_PARAMS, f"{one} must be {'a text' if kind is str else 'an integer'}")
    options = [
        f"--{one.replace('_', '-')}={value}"
        for one, value in given.items()
        if value is not None and one not in tool.positional
    ]
    placed = [str(given[one]) for one in tool.positional if given.get(one) is not None]
    return [name, *options, "--json", *(["--", *placed] if placed else [])]


class McpServer:
    """Answers the messages of one client. Calls run at the same time, each in a thread that waits for its process."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._running: dict[Any, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []

    def serve(self, lines: TextIO) -> None:
        for line in lines:
            if line.strip():
                self._receive(line)
        for process in list(self._running.values()):
            end_process(process)
        for thread in self._threads:
            thread.join()

    def _receive(self, line: str) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            self._send({"id": None, "error": {"code": _PARSE_ERROR, "message": "the line is not JSON"}})
            return
        if not isinstance(message, dict):
            self._send({"id": None, "error": {"code": _INVALID_REQUEST, "message": "batches are not supported"}})
            return
        number, params = message.get("id"), message.get("params")
        params = params if isinstance(params, dict) else {}
        if number is None:
            if message.get("method") == "notifications/cancelled" and is_id(cancelled := params.get("requestId")):
                process = self._running.get(cancelled)
                if process is not None:
                    end_process(process)
            return
        if not is_id(number):
            self._send({"id": None, "error": {"code": _INVALID_REQUEST, "message": "id must be a text or a number"}})
            return
        try:
            self._answer(number, message.get("method"), params)
        except McpError as error:
            self._send({"id": number, "error": {"code": error.code, "message": error.message}})

    def _answer(self, number: Any, method: Any, params: dict[str, Any]) -> None:
        if method == "initialize":
            asked = params.get("protocolVersion")
            result: dict[str, Any] = {
                "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bedplate", "version": __version__},
                "instructions": "Decides which LLM inference engine fits a machine, and measures engines.",
            }
        elif method == "ping":
            result = {}
        elif method == "tools/list":
            result = {"tools": describe_tools()}
        elif method == "tools/call":
            given = params.get("arguments") or {}
            if not isinstance(given, dict):
                raise McpError(_INVALID_PARAMS, "arguments must be an object")
            self._start(number, build_arguments(str(params.get("name")), given))
            return
        else:
            raise McpError(_NO_METHOD, f"there is no method {method}")
        self._send({"id": number, "result": result})

    def _start(self, number: Any, arguments: list[str]) -> None:
        if number in self._running:
            raise McpError(_INVALID_REQUEST, f"the request {number} is still running")
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "bedplate.cli.mcp_child", *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                env={**os.environ, "NO_COLOR": "1"},
            )  # fmt: skip
        except (OSError, ValueError) as error:  # a null character, a lone surrogate, or too long for a command line
            raise McpError(_INVALID_PARAMS, f"{arguments[0]} cannot be run with these arguments: {error}") from None
        self._running[number] = process
        thread = threading.Thread(target=self._finish, args=(number, process))
        self._threads.append(thread)
        thread.start()

    def _finish(self, number: Any, process: subprocess.Popen[str]) -> None:
        # Not communicate(), which would close stdin: the process ends when that is closed.
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read() if process.stderr else ""))
        reader.start()
        output = process.stdout.read() if process.stdout else ""
        reader.join()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
        del self._running[number]
        self._send({"id": number, "result": make_result(output, "".join(errors))})

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._output.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._output.flush()


def is_id(number: object) -> bool:
    return type(number) in (str, int, float)


def make_result(output: str, errors: str) -> dict[str, Any]:
    """The result of a call: the document that the verb printed, or its error."""
    try:
        document = json.loads(output)
    except ValueError:
        text = errors.strip() or output.strip() or "the verb printed nothing"
        return {"content": [{"type": "text", "text": text}], "isError": True}
    result: dict[str, Any] = {"content": [{"type": "text", "text": output}], "isError": False}
    if isinstance(document, dict):
        result["structuredContent"] = document
    return result


def end_process(process: subprocess.Popen[str]) -> None:
    """Ends a verb like Ctrl-C, so that it stops its engines."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
