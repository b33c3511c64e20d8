"""What one request costs in the gateway: CPU instructions and Python bytecodes, against another checkout.

A client connection and an engine connection are fed without sockets, so that only the gateway's own code runs.
Bytecodes and instructions are counts: the load of the machine does not affect them. CPU time is the least of many
interleaved rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve()
OWN = HERE.parents[2]
ROUNDS = 15
REQUESTS = 2_000
COUNTED = (50, 150)
"""Instructions are counted for both numbers of requests; the difference leaves out the start of Python."""
CHUNKS = 64
KINDS = ("plain", "stream", "tenants")
"""tenants: a plain answer, with two tenants that have limits and share the engine, and a record of each request."""


def make_request(stream: bool, number: int, key: str) -> bytes:
    asked: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": f"Question {number}?"}]}
    asked |= {"max_tokens": CHUNKS, "temperature": 0.7} | ({"stream": True} if stream else {})
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nuser-agent: bench\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def make_answer(stream: bool) -> list[bytes]:
    if not stream:
        message = {"role": "assistant", "content": "An answer of some words."}
        whole = {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "small",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15},
        }  # fmt: skip
        body = json.dumps(whole).encode()
        return [
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        ]
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "small"}
    deltas = [{**base, "choices": [{"index": 0, "delta": {"content": f" word{n}"}}]} for n in range(CHUNKS)]
    usage = {**base, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": CHUNKS}}
    events = [*(b"data: %b\n\n" % json.dumps(one).encode() for one in (*deltas, usage)), b"data: [DONE]\n\n"]
    parts = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    parts[0] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + parts[0]
    return [*parts[:-1], parts[-1] + b"0\r\n\r\n"]


class Wire(asyncio.Transport):
    """A transport that counts what is written."""

    written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def writelines(self, list_of_data: Any) -> None:
        self.written += sum(map(len, list_of_data))

    def _nothing(self) -> None: ...

    pause_reading = resume_reading = close = abort = _nothing

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def make_exchange(kind: str, folder: Path) -> Callable[[], None]:
    """A function that sends one request through a gateway and its answer back."""
    from bedplate_gateway import two_tenants

    from bedplate.run.gateway import Gateway, GatewayBackend
    from bedplate.run.gateway.client import ClientConnection
    from bedplate.run.gateway.recorder import RequestRecorder
    from bedplate.run.gateway.upstream import EngineConnection

    stream, key, keeper = kind == "stream", "", None
    if kind == "tenants":
        key = "sk-" + "0123456789abcdef" * 4
        two_tenants(folder / "store.sqlite", key)
        keeper = RequestRecorder(folder / "store.sqlite")
    backend = GatewayBackend("small", "llama.cpp", "1")
    backend.address, backend.slots, backend.state = ("127.0.0.1", 1), 4096, "ready"
    gateway = Gateway([backend], keeper=keeper)
    client, to_client, to_engine = ClientConnection(gateway), Wire(), Wire()
    client.connection_made(to_client)
    ((link,),) = (route.links for route in gateway.routes)
    engine = EngineConnection(link.pool, ("127.0.0.1", 1))
    engine.connection_made(to_engine)
    link.pool.give_back(engine, reusable=True, was_active=False)
    requests, answer = [make_request(stream, number, key) for number in range(50)], make_answer(stream)
    count = 0

    def exchange() -> None:
        nonlocal count
        before, count = to_client.written, count + 1
        client.data_received(requests[count % len(requests)])
        for part in answer:
            engine.data_received(part)
        assert to_client.written > before and backend.in_flight == 0, "the request was not answered"

    return exchange


def count_bytecodes(exchange: Callable[[], None], requests: int = 20) -> float:
    """Executed bytecode instructions for each request: Python's own work, exactly."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        for _ in range(requests):
            exchange()
    finally:
        sys.settrace(None)
    return executed / requests


async def run_child(kind: str, requests: int, bytecodes: bool, folder: Path) -> dict[str, float]:
    exchange = make_exchange(kind, folder)
    for _ in range(20):
        exchange()
    if bytecodes:
        return {"bytecodes": count_bytecodes(exchange)}
    begun = time.process_time()
    for _ in range(requests):
        exchange()
    return {"cpu_us": (time.process_time() - begun) / requests * 1e6}


def ask_child(checkout: Path, kind: str, requests: int, *more: str, under: tuple[str, ...] = ()) -> tuple[Any, str]:
    argv = [*under, sys.executable, str(HERE), "--child", kind, "--requests", str(requests), *more]
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr[-2000:]}")
    return json.loads(done.stdout), done.stderr


def count_instructions(checkout: Path, kind: str) -> float:
    """CPU instructions for each request, by valgrind."""
    found = []
    for requests in COUNTED:
        under = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
        text = ask_child(checkout, kind, requests, under=under)[1]
        found.append(int(re.findall(r"Collected : (\d+)", text)[-1]))
    return (found[1] - found[0]) / (COUNTED[1] - COUNTED[0])


def compare(checkouts: dict[str, Path], rounds: int, instructions: bool) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {kind: {name: {} for name in checkouts} for kind in KINDS}
    for kind in KINDS:
        times: dict[str, list[float]] = {name: [] for name in checkouts}
        for turn in range(rounds):
            for name in list(checkouts) if turn % 2 else list(checkouts)[::-1]:
                requests = REQUESTS // 10 if kind == "stream" else REQUESTS
                times[name].append(ask_child(checkouts[name], kind, requests)[0]["cpu_us"])
        for name, checkout in checkouts.items():
            one = found[kind][name]
            one["bytecodes"] = ask_child(checkout, kind, 0, "--bytecodes")[0]["bytecodes"]
            if instructions:
                one["instructions"] = count_instructions(checkout, kind)
            if rounds:
                one["cpu_us_min"], one["cpu_us_median"] = min(times[name]), statistics.median(times[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout (git worktree add DIR COMMIT)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds of CPU time; 0: counts only")
    parser.add_argument("--instructions", action="store_true", help="count CPU instructions with valgrind (slow)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=argparse.SUPPRESS)
    parser.add_argument("--bytecodes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(run_child(given.child, given.requests, given.bytecodes, Path(folder)))))
        return
    if given.instructions and shutil.which("valgrind") is None:
        sys.exit("--instructions needs valgrind")
    checkouts = {"this": OWN} | ({"other": given.against.resolve()} if given.against else {})
    found = compare(checkouts, given.rounds, given.instructions)
    for kind, sides in found.items():
        for measure, value in sides["this"].items():
            other = sides.get("other", {}).get(measure)
            against = f"   other {other:12,.1f}   {value / other - 1:+7.1%}" if other else ""
            print(f"{kind:7} {measure:14} {value:12,.1f}{against}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
