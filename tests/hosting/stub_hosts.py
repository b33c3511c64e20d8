"""Hosts with stub engines: small programs in place of llama-server that start quickly.

A request's `max_tokens` is the duration of the response in milliseconds; one with the words `after PATH` is answered
once that file exists. The text is the process id of the stub.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tests.conftest import HANG_S, has_no_new_children, wait_for
from tests.engines.plans import machine

from bedplate.decide import decide, plan
from bedplate.decide.placement import ServiceAsk, divide_machine
from bedplate.hosting.host import Host
from bedplate.hosting.memory import MemoryLimits
from bedplate.progress import SilentProgress
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment
from bedplate.run.listening import ListenOptions
from bedplate.run.ready import ModelDecision, PreparedModel
from bedplate.values import Hardware, Workload, replace_fields
from bedplate.values.service import ModelOrder

HANDLER = """
import hashlib, http.server, json, os, sys, time
words = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def asked(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    def do_GET(self):
        self.answer({})
    def log_message(self, *_): pass
"""
"""The beginning of a stub program. Its `do_POST` and `LISTEN` follow."""
LISTEN = """
class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
print("listening", flush=True)
Server(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""
SERVER = f"""{HANDLER}
    def do_POST(self):
        asked = self.asked()
        time.sleep(asked.get("max_tokens", 0) / 1000)
        said = asked["messages"][0]["content"]
        while said.startswith("after ") and not os.path.exists(said.removeprefix("after ")):
            time.sleep(0.01)
        self.answer({{
            "choices": [{{"message": {{"role": "assistant", "content": str(os.getpid())}}, "finish_reason": "stop"}}],
            "usage": {{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}},
        }})
{LISTEN}"""
DIES = "import sys; print('no good'); sys.exit(3)"
WORK = Workload(concurrency=2, context_tokens=1024)


def make_stub_environment(folder: Path, script: str = SERVER) -> EngineEnvironment:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "llama-server").write_text(script)
    return EngineEnvironment(
        engine="llama.cpp", version="1", path=str(folder), packages=(), python="3", made_at="now", disk_bytes=0
    )


def make_stub_readied(
    name: str,
    environment: EngineEnvironment,
    hardware: Hardware | None = None,
    *,
    replicas: int = 1,
    work: Workload = WORK,
    **wanted: Any,
) -> PreparedModel:
    """A prepared service whose model equals the built-in one except for its name."""
    on = hardware or machine("cpu")
    facts = replace_fields(read_builtin_facts(), name=name, files=(f"/models/{name}.gguf",))
    ask = ServiceAsk(name, work, lambda machine, work: decide(machine, facts, work, "llama.cpp"), replicas)
    (part,) = divide_machine(on, [ask])
    chosen = plan(part.decision, facts, part.workload)
    asked = ModelOrder(model=name, workload=work, replicas=replicas, **wanted)
    return PreparedModel(ModelDecision(asked, on, facts, part, chosen), chosen, environment, None)


def count_need_bytes(one: PreparedModel) -> int:
    return sum(sum(need.values()) for need in one.needs)


def with_host(
    then: Callable[[Host], Awaitable[None]],
    logs: Path,
    *,
    budget_bytes: int | None = None,
    hardware: Hardware | None = None,
    listen: ListenOptions = ListenOptions(port=0, grace_s=5),  # noqa: B008
) -> None:
    """Run `then` with a host, and check that no process of the host is left."""

    async def run() -> None:
        on = hardware or machine("cpu")
        host = Host(
            "test",
            listen,
            on,
            SilentProgress(),
            logs,
            room=MemoryLimits.from_hardware(on, budget_bytes),
        )
        await host.start()
        host.state = "ready"
        try:
            async with asyncio.timeout(HANG_S):
                await then(host)
        finally:
            await host.stop()

    before = psutil.Process().children(recursive=True)  # processes left by an earlier test do not count
    asyncio.run(run())
    wait_for(lambda: has_no_new_children(before), "the processes of the host to end")


async def add(host: Host, one: PreparedModel) -> None:
    await host.add_service(one.decided.wanted, one)


async def ask(host: Host, model: str, ms: int = 0, words: str = "who?") -> tuple[int, Any]:
    """The status and the JSON body of a response."""
    body = {"model": model, "max_tokens": ms, "messages": [{"role": "user", "content": words}]}
    async with aiohttp.ClientSession() as session, session.post(f"{host.url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


def read_pid(answer: tuple[int, Any]) -> int:
    status, body = answer
    assert status == 200, body
    return int(body["choices"][0]["message"]["content"])
