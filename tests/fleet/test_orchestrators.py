"""Real `serve --on ray` and `serve --on dynamo`: clients are not disturbed by killed processes.

Streams run while processes are killed. Each stream must be complete or end with an error, and killed processes must be
restarted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from tests.conftest import HANG_S, have_ended, wait_for
from tests.fleet.serving import Serving, serving
from tests.private_ports import check_closed, check_key_is_hidden, find_private_port

from bedplate.engines import get_engine
from bedplate.home import get_logs_dir
from bedplate.hosting.on_ray import RayHeadNode, RayPackages, build_head_options
from bedplate.hosting.orchestration import make_private_folder
from bedplate.progress import SilentProgress
from bedplate.run.environments import build_command, make_environment
from bedplate.run.supervisor import find_free_port

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked for as Linux shows them"),
]
BACK_S = HANG_S
"""Time limit for a restart on a busy machine."""
STREAMS = 4


@contextlib.contextmanager
def orchestrated(*arguments: str) -> Iterator[Serving]:
    with serving("--replicas", "2", "--context", "2048", *arguments) as one:
        one.wait_ready()
        yield one


def command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def found(one: Serving, pattern: str) -> list[psutil.Process]:
    """Processes whose command matches the pattern, without wardens, the oldest first."""
    below = [process for process in one.descendants() if "warden.py" not in command(process)]
    return sorted((p for p in below if re.search(pattern, command(p))), key=lambda p: p.pid)


def bedplate(*words: str) -> dict[str, Any]:
    """The JSON output of a command."""
    argv = [sys.executable, "-m", "bedplate", *words, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def status(one: Serving) -> dict[str, Any]:
    return bedplate("status", one.endpoint["name"])


def open_to_all(processes: list[psutil.Process]) -> list[tuple[str, Any]]:
    """Processes that listen on more than loopback."""
    return [
        (command(process)[:80], connection.laddr)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    ]


def says_something(one: Serving, **more: Any) -> str:
    import openai

    with openai.OpenAI(base_url=one.endpoint["url"], api_key="none", max_retries=0, timeout=HANG_S) as client:
        messages: Any = [{"role": "user", "content": "Count to ten."}]
        answer = client.chat.completions.create(model=one.endpoint["model"], messages=messages, max_tokens=8, **more)
        if not more.get("stream"):
            assert answer.usage.completion_tokens > 0
            return str(answer.choices[0].message.content)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        assert text
        return text


async def stream(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> str:
    """How one stream ended: whole, error (reported), refused (with a status), or cut."""
    body = {
        "messages": [{"role": "user", "content": f"Tell story number {number}."}], "stream": True,
        "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    last = b""
    async with session.post(f"{url}/chat/completions", json=body) as answer:
        if answer.status != 200:
            told = await answer.json()
            return "refused" if answer.status in (500, 502, 503) and told["error"]["message"] else "cut"
        try:
            async for raw in answer.content:
                last = raw.strip() or last
        except aiohttp.ClientPayloadError:
            return "error"
    if last == b"data: [DONE]":
        return "whole"
    return "error" if b'"error"' in last else "cut"


async def under_streams(
    one: Serving, happens: Callable[[], Awaitable[None]], tokens: int = 96
) -> collections.Counter[str]:
    """How streams ended that began before, during and after an event."""
    ended: collections.Counter[str] = collections.Counter()
    over = asyncio.Event()
    numbers = iter(range(10**9))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S)) as session:

        async def client() -> None:
            while not over.is_set():
                ended[await stream(session, one.endpoint["url"], next(numbers), tokens)] += 1
                await asyncio.sleep(0.05)

        clients = [asyncio.create_task(client()) for _ in range(STREAMS)]
        await asyncio.sleep(2)
        try:
            await happens()
            await asyncio.sleep(2)
        finally:
            over.set()
            await asyncio.gather(*clients)
    return ended


def survives(
    one: Serving, kill: Callable[[], int], is_back: Callable[[int], bool], tokens: int = 96, *, refused: bool = True
) -> None:
    """Kill a process during streams and wait for its restart; then requests must work as before.

    `refused`: whether requests may get an error with a status.
    """

    async def happens() -> None:
        killed = kill()
        until = time.monotonic() + BACK_S
        while not await asyncio.to_thread(is_back, killed):
            assert time.monotonic() < until, f"{killed} was killed and did not come back within {BACK_S:.0f} s"
            await asyncio.sleep(0.2)

    ended = asyncio.run(under_streams(one, happens, tokens))
    print(dict(ended))
    assert ended["whole"] and not ended["cut"] and (refused or not ended["refused"]), ended
    assert says_something(one, stream=True)


def killed(processes: list[psutil.Process], index: int = -1) -> int:
    processes[index].kill()
    return processes[index].pid


class TestRay:
    ENGINE = r"bin/llama-server .*--port"
    REPLICA = r"^ray::ServeReplica"
    RAYLET = r"/raylet/raylet "

    @pytest.fixture(scope="class")
    def one(self, builtin_gguf: Path) -> Iterator[Serving]:
        with orchestrated("--on", "ray", "--engine", "llama.cpp") as one:
            yield one
            if one.process.poll() is None:
                one.stop()

    def whole(self, one: Serving, but: int) -> bool:
        """All of it is there, and what was killed is something else now."""
        counts = [len(found(one, pattern)) for pattern in (self.ENGINE, self.REPLICA, self.RAYLET)]
        return counts == [2, 2, 2] and not psutil.pid_exists(but) and self.answers(one)

    def restarts(self, one: Serving) -> int:
        return sum(engine["restarts"] for engine in status(one)["models"][0]["engines"])

    def answers(self, one: Serving) -> bool:
        import openai

        try:
            return bool(says_something(one))
        except openai.APIError:
            return False

    def test_cluster_has_two_nodes_with_one_replica_each(self, one: Serving) -> None:
        on: Any = one.endpoint["on"]
        assert on["orchestrator"] == "ray" and on["workers"] == "llama.cpp" and on["real"] and on["replicas"] == 2
        raylets = found(one, self.RAYLET)
        assert len(raylets) == 2
        # Each replica is below a raylet of its own.
        owners = [next(r.pid for r in raylets if r in replica.parents()) for replica in found(one, self.REPLICA)]
        assert sorted(owners) == sorted(raylet.pid for raylet in raylets)
        (model,) = status(one)["models"]
        assert [engine["part"] for engine in model["engines"]] == ["head node", "node"]
        assert all(engine["state"] == "ready" for engine in model["engines"])

    def test_the_same_clients_work(self, one: Serving) -> None:
        import openai

        assert says_something(one) and says_something(one, stream=True)
        with openai.OpenAI(base_url=one.endpoint["url"], api_key="none") as client:
            assert client.models.list().data[0].id == one.endpoint["model"]

    def test_both_replicas_get_requests(self, one: Serving) -> None:
        async def nothing() -> None:
            await asyncio.sleep(5)

        def used() -> list[float]:
            return [sum(process.cpu_times()[:2]) for process in found(one, self.ENGINE)]

        before = used()
        asyncio.run(under_streams(one, nothing))
        assert all(after - was > 0.5 for was, after in zip(before, used(), strict=True))

    def test_nothing_listens_to_the_network(self, one: Serving) -> None:
        assert not open_to_all(one.descendants())

    def test_application_and_engines_need_their_keys(self, one: Serving) -> None:
        for engine in (RayHeadNode(Path(), "llama.cpp", ""), get_engine("llama.cpp")):
            at = find_private_port(one.descendants(), engine)
            check_closed(at, engine)
            check_key_is_hidden(at, get_logs_dir().glob("*.log"))

    def test_recovers_from_a_killed_engine(self, one: Serving) -> None:
        before = self.restarts(one)
        survives(one, lambda: killed(found(one, self.ENGINE)), lambda pid: self.whole(one, pid), refused=False)
        assert self.restarts(one) == before + 1

    def test_recovers_from_a_killed_replica(self, one: Serving) -> None:
        before = self.restarts(one)
        survives(one, lambda: killed(found(one, self.REPLICA), 0), lambda pid: self.whole(one, pid), refused=False)
        assert self.restarts(one) == before + 1

    def test_recovers_from_a_killed_node(self, one: Serving) -> None:
        node = max(found(one, self.RAYLET), key=lambda raylet: raylet.create_time())
        survives(one, lambda: killed([node]), lambda pid: self.whole(one, pid))

    def test_recovers_from_a_killed_head_node(self, one: Serving) -> None:
        gcs = r"/gcs/gcs_server "
        survives(one, lambda: killed(found(one, gcs)), lambda pid: self.whole(one, pid))

    def test_head_node_starts_while_a_process_of_the_lost_cluster_is_left(self, bedplate_home: Path) -> None:
        """A worker node's raylet names the address of the head node until it is stopped, too."""
        environment = make_environment(RayPackages(), SilentProgress())
        folder, port = make_private_folder(), find_free_port()
        (folder / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        config = {
            "address": f"127.0.0.1:{port}", "up": str(folder / "up"), "replicas": 1, "ongoing": 1,
            "head": build_head_options(folder, port, find_free_port()), "engine": {"ready": str(folder / "ready")},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        node = RayHeadNode(folder / "config.json", "llama.cpp", "0" * 64)
        argv = build_command(environment, node.launch(None, find_free_port()))  # type: ignore[arg-type]
        left = subprocess.Popen(
            ["x/raylet/raylet", "-c", "import signal; signal.pause()", f"--gcs-address=127.0.0.1:{port}"],
            executable=sys.executable,
        )
        env = {**os.environ, **node.variables, "BEDPLATE_ENGINE_KEY": "key"}
        with (folder / "log").open("wb") as log:
            head = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: (folder / "up").exists() or head.poll() is not None, "the head node to start or to exit")
            assert (folder / "up").exists(), (folder / "log").read_text()
        finally:
            left.kill()
            left.wait()
            for process in psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            head.kill()
            head.wait()
            shutil.rmtree(folder, ignore_errors=True)

    def test_no_process_is_left(self, one: Serving) -> None:
        """Last: also after bedplate itself was killed, where only wardens are left to clean up."""
        below = one.descendants()
        assert len(below) > 10
        one.process.send_signal(signal.SIGKILL)
        wait_for(lambda: have_ended(below), "all of Ray to end")

    def test_signal_stops_all_processes(self, builtin_gguf: Path) -> None:
        with orchestrated("--on", "ray", "--engine", "llama.cpp") as one:
            folder = next(Path(word) for p in found(one, "ray-serve") for word in p.cmdline() if "bedplate-" in word)
            one.stop()
            assert not folder.parent.exists()


class TestDynamo:
    FRONT = r"bin/dynamo-front"

    @pytest.fixture(scope="class", params=["mocker", "vllm"])
    def one(self, request: pytest.FixtureRequest, builtin_gguf: Path) -> Iterator[Serving]:
        with orchestrated("--on", "dynamo", "--engine", request.param) as one:
            yield one
            if one.process.poll() is None:
                one.stop()

    def worker(self, one: Serving) -> str:
        return r"bin/dynamo-vllm" if one.endpoint["engine"] == "vllm" else r"-m dynamo\.mocker"

    def test_reports_whether_workers_compute(self, one: Serving) -> None:
        on: Any = one.endpoint["on"]
        assert on["orchestrator"] == "dynamo" and on["real"] is (one.endpoint["engine"] == "vllm")
        assert ("a real vLLM" if on["real"] else "timing is simulated") in on["text"]
        assert len(found(one, self.worker(one))) >= 2 and len(found(one, self.FRONT)) == 1
        (model,) = status(one)["models"]
        assert [engine["part"] for engine in model["engines"]] == ["front end", "worker", "worker"]

    def test_the_same_clients_work(self, one: Serving) -> None:
        assert says_something(one) and says_something(one, stream=True)

    def test_nothing_listens_to_the_network(self, one: Serving) -> None:
        assert not open_to_all(one.descendants())

    def test_prompt_is_routed_to_the_worker_with_its_prefix(self, one: Serving) -> None:
        """Round robin would send every second request to the worker that has not seen it."""
        text = " ".join(f"word{number}" for number in range(300))

        async def cached(session: aiohttp.ClientSession, number: int) -> tuple[int, int]:
            body = {"model": one.endpoint["model"], "prompt": f"{text} {number}", "max_tokens": 2}
            async with session.post(f"{one.endpoint['url']}/completions", json=body) as answer:
                usage = (await answer.json())["usage"]
                return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        async def asked() -> list[tuple[int, int]]:
            async with aiohttp.ClientSession() as session:
                return [await cached(session, number) for number in range(8)]

        (_, first), *later = asyncio.run(asked())
        assert first == 0
        assert all(known > 0.8 * prompt for prompt, known in later), later

    def test_requests_without_a_model_name_are_accepted(self, one: Serving) -> None:
        async def asked() -> int:
            async with aiohttp.ClientSession() as session:
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                async with session.post(f"{one.endpoint['url']}/chat/completions", json=body) as answer:
                    return answer.status

        assert asyncio.run(asked()) == 200

    def test_killed_worker_loses_no_answer(self, one: Serving) -> None:
        pattern = self.worker(one)
        before = {process.pid for process in found(one, pattern)}

        def is_back(pid: int) -> bool:
            engines = status(one)["models"][0]["engines"]
            return all(engine["state"] == "ready" for engine in engines) and not psutil.pid_exists(pid)

        survives(one, lambda: killed(found(one, pattern)), is_back)
        assert before != {process.pid for process in found(one, pattern)}

    def test_recovers_from_a_killed_front_end(self, one: Serving) -> None:
        def is_back(pid: int) -> bool:
            new = [process.pid for process in found(one, self.FRONT)]
            return bool(new) and pid not in new and status(one)["models"][0]["state"] == "ready"

        survives(one, lambda: killed(found(one, self.FRONT)), is_back)

    def test_no_process_is_left(self, one: Serving) -> None:
        below = one.descendants()
        os.kill(one.process.pid, signal.SIGKILL)
        wait_for(lambda: have_ended(below), "all of Dynamo to end")


@pytest.mark.parametrize(("on", "engine"), [("ray", "llama.cpp"), ("dynamo", "mocker")])
def test_detached_service_runs_until_it_is_stopped(on: str, engine: str, builtin_gguf: Path) -> None:
    words = ("-d", "--port", "0", "--no-check", "--replicas", "2", "--context", "2048", "--on", on, "--engine", engine)
    endpoint = bedplate("serve", *words)
    host = psutil.Process(endpoint["pid"])
    below = host.children(recursive=True)
    try:
        assert endpoint["on"]["orchestrator"] == on and len(below) >= 6
        one: Any = SimpleNamespace(endpoint=endpoint)
        assert says_something(one) and says_something(one, stream=True)
        (model,) = status(one)["models"]
        assert model["state"] == "ready" and model["on"]["text"] == endpoint["on"]["text"]
    finally:
        bedplate("stop", endpoint["name"])
    wait_for(lambda: have_ended([host, *below]), "all of it to end")
