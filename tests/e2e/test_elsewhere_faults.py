"""Three real bedplates on one machine behind the endpoint of a fourth, and a fault at each of them.

A relay before each bedplate injects its faults. Without one it passes requests and answers on as they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import yaml
from aiohttp import web
from openai import OpenAI
from tests.conftest import Served, have_ended, pin_to_one_core, share_installed, start_serve, wait_for

from bedplate.run.environments import EngineEnvironment

MODEL = "smollm2-135m-instruct"
NAMES = ("laptop", "box", "cloud")
KEYS = {name: f"sk-{name}-8e21" for name in NAMES}
CHAT = "/v1/chat/completions"
Fault = Literal["wrong key", "status 500", "slow", "hang"]


class Relay:
    """Passes requests on to one bedplate, or injects a fault."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault: Fault | None = None
        self.url = ""
        self.asked = 0
        """Chat completions that it was asked for, whatever came of them."""
        self.answered = 0
        """Those that the bedplate answered with 200."""
        self._repaired = asyncio.Event()

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._relay)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def repair(self) -> None:
        """Ends the fault. What was kept waiting continues."""
        self.fault = None
        self._repaired.set()
        self._repaired = asyncio.Event()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body, is_chat = await request.read(), request.path == CHAT
        self.asked += is_chat
        if self.fault == "hang" or (self.fault == "slow" and is_chat):
            await self._repaired.wait()
        if self.fault == "status 500" and is_chat:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        if self.fault == "wrong key":
            headers["Authorization"] = "Bearer sk-of-last-year"
        url = f"{self.target}{request.path}"
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, data=body, headers=headers) as answer,
        ):
            self.answered += is_chat and answer.status == 200
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await passed.prepare(request)
            async for data in answer.content.iter_any():
                await passed.write(data)
            await passed.write_eof()
            return passed


class Relays:
    """The relays of all bedplates, in a thread of their own."""

    def __init__(self, bedplates: dict[str, Served]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.each = {name: Relay(one.root) for name, one in bedplates.items()}
        self._runners = [self._run(relay.start()) for relay in self.each.values()]

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def repair(self, name: str) -> None:
        self._run(self.each[name].repair())

    def close(self) -> None:
        for name, runner in zip(self.each, self._runners, strict=True):
            self.repair(name)
            self._run(runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def home(
    bedplate_home: Path,
    builtin_gguf: Path,
    llama_environment: EngineEnvironment,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A separate store and service folder. Engines and models are shared by all tests."""
    folder = tmp_path_factory.mktemp("elsewhere")
    share_installed(folder, bedplate_home)
    return folder


@pytest.fixture(scope="module")
def bedplates(home: Path) -> Iterator[dict[str, Served]]:
    found: dict[str, Served] = {}
    with pin_to_one_core():  # inherited by all processes
        try:
            for name, key in KEYS.items():
                found[name] = start_serve("--name", name, env={"BEDPLATE_HOME": str(home), "BEDPLATE_API_KEY": key})
                assert found[name].endpoint, "".join(found[name].stderr)
            yield found
        finally:
            _stop(*found.values())


def _stop(*running: Served) -> None:
    below = [process for one in running for process in one.list_descendants()]
    for one in running:
        one.stop()
    wait_for(lambda: have_ended(below), "the processes to end")


@pytest.fixture
def relays(bedplates: dict[str, Served]) -> Iterator[Relays]:
    made = Relays(bedplates)
    yield made
    made.close()


class OneEndpoint:
    """The bedplate that has the three others as endpoints elsewhere, and no engine of its own."""

    def __init__(self, served: Served, home: Path, relays: Relays) -> None:
        self.served, self.home, self.relays = served, home, relays

    def ask(self, text: str) -> None:
        """Streams an answer, which must be whole."""
        with OpenAI(base_url=self.served.url, api_key="none", max_retries=0) as client:
            streamed = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0, stream=True
            )
            chunks = list(streamed)
        assert chunks[-1].choices[0].finish_reason is not None
        assert any(chunk.choices[0].delta.content for chunk in chunks)

    def ask_at(self, name: str, text: str) -> bool:
        """Whether this bedplate was the one that answered."""
        before = self.relays.each[name].answered
        self.ask(text)
        return self.relays.each[name].answered > before

    def read_status(self, name: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "bedplate", "status", "one", "--json"],
            capture_output=True, text=True, check=True, env={**os.environ, "BEDPLATE_HOME": str(self.home)},
        )  # fmt: skip
        endpoints: list[dict[str, Any]] = json.loads(done.stdout)["endpoints"]
        return next(one for one in endpoints if one["url"] == self.relays.each[name].url)

    def wait_for_state(self, name: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.read_status(name)
            return status if status["state"] == state else None

        return wait_for(look, f"{name} to be {state}")

    def find_conversations(self) -> dict[str, str]:
        """For each bedplate, a conversation that it answers."""
        found: dict[str, str] = {}
        for number in range(1000):
            text = f"Conversation {number}"
            before = {name: relay.answered for name, relay in self.relays.each.items()}
            self.ask(text)
            (place,) = [name for name, relay in self.relays.each.items() if relay.answered > before[name]]
            found.setdefault(place, text)
            if len(found) == len(NAMES):
                break
        return found


@pytest.fixture
def start_one(home: Path, relays: Relays, tmp_path: Path) -> Iterator[Callable[[str], OneEndpoint]]:
    running: list[Served] = []

    def start(routing: str) -> OneEndpoint:
        services = [
            {"url": relay.url, "model": MODEL, "key_env": f"{name}_KEY".upper()} for name, relay in relays.each.items()
        ]
        file = tmp_path / "one.yaml"
        file.write_text(yaml.safe_dump({"routing": routing, "services": services}))
        keys = {f"{name}_KEY".upper(): key for name, key in KEYS.items()}
        served = start_serve("-f", str(file), "--name", "one", env={"BEDPLATE_HOME": str(home), **keys})
        running.append(served)
        assert served.endpoint, "".join(served.stderr)
        found = OneEndpoint(served, home, relays)
        for name in NAMES:
            found.wait_for_state(name, "ready")
        return found

    yield start
    _stop(*running)


def test_others_answer_while_one_fails_and_it_returns_when_it_is_repaired(
    start_one: Callable[[str], OneEndpoint], relays: Relays
) -> None:
    one = start_one("share")
    conversations = one.find_conversations()
    laptop, box, cloud = (relays.each[name] for name in NAMES)
    # The key of the laptop is wrong, and the box answers with status 500: the cloud has both of their conversations.
    laptop.fault, box.fault = "wrong key", "status 500"
    before = cloud.answered, laptop.answered + box.answered
    for _ in range(3):
        one.ask(conversations["laptop"])
        one.ask(conversations["box"])
    assert (cloud.answered, laptop.answered + box.answered) == (before[0] + 6, before[1])
    # The check finds the wrong key. It does not find what only requests meet, so the box is ejected by their errors.
    status = one.read_status("box")
    assert (status["state"], status["ejected"], status["reason"]) == ("ready", True, None)
    status = one.wait_for_state("laptop", "restarting")
    assert status["reason"] == "it rejects the API key"
    asked = laptop.asked
    one.ask(conversations["laptop"])
    assert laptop.asked == asked, "it gets no requests"
    relays.repair("laptop")
    relays.repair("box")
    assert one.wait_for_state("laptop", "ready")["reason"] is None
    for name in ("laptop", "box"):
        wait_for(lambda name=name: one.ask_at(name, conversations[name]), f"{name} to answer")  # type: ignore[misc]
        status = one.read_status(name)
        assert (status["state"], status["ejected"]) == ("ready", False)
    # The cloud hangs with a request, then altogether: another one answers it.
    cloud.fault, asked, answered = "slow", cloud.asked, cloud.answered
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.ask, conversations["cloud"])
        wait_for(lambda: cloud.asked > asked, "the request at the cloud")
        one.ask(conversations["laptop"])
        cloud.fault = "hang"
        waiting.result()
    status = one.wait_for_state("cloud", "restarting")
    assert status["reason"] == "no answer within 5 s"
    one.ask(conversations["cloud"])
    assert (cloud.asked, cloud.answered) == (asked + 1, answered)
    relays.repair("cloud")
    one.wait_for_state("cloud", "ready")
    assert one.ask_at("cloud", conversations["cloud"])
    printed = "".join(one.served.stderr)
    for name in ("laptop", "cloud"):
        assert f"the endpoint {relays.each[name].url[len('http://') : -len('/v1')]} cannot be used" in printed
    assert not any(key in printed for key in KEYS.values())


def test_slow_one_is_passed_over_by_latency_and_measured_again(
    start_one: Callable[[str], OneEndpoint], relays: Relays
) -> None:
    one = start_one("latency")
    slow = relays.each["laptop"]
    slow.fault = "slow"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.ask, "first")
        wait_for(lambda: slow.asked > 0, "the request at the laptop")
        for number in range(8):  # all of them while the laptop answers its first one
            one.ask(f"while it is slow {number}")
        relays.repair("laptop")
        waiting.result()
    times = {name: one.read_status(name)["ttft_ms"] for name in NAMES}
    assert times["laptop"] > max(times["box"], times["cloud"])
    for number in range(8):
        one.ask(f"afterwards {number}")
    assert slow.asked == slow.answered == 1 and all(relays.each[name].answered for name in ("box", "cloud"))
    # One request in 20 measures the place that was measured longest ago.
    for number in range(20):
        if slow.answered == 1:
            one.ask(f"to measure {number}")
    assert slow.answered == 2
