"""Engines that hang: they are restarted with the reason, their clients get an error, and other replicas go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.conftest import HANG_S, wait_for
from tests.hosting.stub_hosts import HANDLER, LISTEN, add, ask, make_stub_environment, make_stub_readied, with_host

from bedplate.engines.shipped import ray_serve
from bedplate.hosting.host import Host, HostedEngine
from bedplate.hosting.status import collect_status
from bedplate.run import supervisor as module
from bedplate.run.environments import EngineEnvironment
from bedplate.run.gateway import GatewayBackend
from bedplate.run.liveness import HangLimits, ProgressSample
from bedplate.run.supervisor import EngineWatcher, find_free_port
from bedplate.show.services import render_list, render_status
from bedplate.values.service import LastExit, ServiceRecord

LIMITS = HangLimits(silent_s=0.6, every_s=0.1, idle_every_s=0.1, answer_s=0.3, longest_gap_s=0.5)
SCRIPT = f"""{HANDLER}
    def do_POST(self):
        asked = self.asked()["messages"][-1]["content"]
        if asked == "deadlock":
            threading.Event().wait()
        if asked == "burn":
            while not os.path.exists(FOLDER + "/enough"): pass
        if asked == "flood":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            while True:
                self.wfile.write(b'data: {{"id": "a", "choices": []}}\\n\\n' * 1000)
        message = {{"role": "assistant", "content": str(os.getpid())}}
        self.answer({{"choices": [{{"message": message, "finish_reason": "stop"}}], "usage": {{}}}})
import threading
while os.path.exists(FOLDER + "/wait"):
    time.sleep(0.02)
{LISTEN}"""
STOPPED = "its process was stopped by a signal (SIGSTOP), and "


class Seen:
    """The samples that were taken of all engines."""

    def __init__(self) -> None:
        self.samples: list[tuple[GatewayBackend, ProgressSample]] = []

    async def wait_for_samples(self, match: Callable[[ProgressSample], object], span_s: float) -> None:
        """Wait until such samples span this time, which is longer than an engine may be silent."""
        began = len(self.samples)
        while True:
            found = [one.at_s for _, one in self.samples[began:] if match(one)]
            if found and found[-1] - found[0] >= span_s:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(module, "HANG_LIMITS", LIMITS)
    taken, take_sample = Seen(), EngineWatcher.take_sample

    async def take(self: EngineWatcher, session: aiohttp.ClientSession) -> ProgressSample:
        sample = await take_sample(self, session)
        taken.samples.append((self._backend, sample))
        return sample

    monkeypatch.setattr(EngineWatcher, "take_sample", take)
    return taken


@pytest.fixture
def stub(tmp_path: Path, bedplate_home: Path) -> EngineEnvironment:
    return make_stub_environment(tmp_path / "stub", SCRIPT.replace("FOLDER", repr(str(tmp_path))))


async def until(look: Callable[[], object]) -> None:
    while not look():
        await asyncio.sleep(0.02)


def stop_process(engine: HostedEngine) -> int:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    return engine.pid


async def read_health(host: Host) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{host.url}/health") as answer:
        return answer.status, await answer.json()


def render_text(what: Any) -> str:
    from rich.console import Console

    console = Console(width=400, no_color=True)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def make_record(host: Host) -> ServiceRecord:
    return ServiceRecord(
        name="test", pid=os.getpid(), birth="", socket="", log="", version="1", started_at="2026-11-17T00:00:00+00:00"
    )


@pytest.mark.parametrize("how", ["deadlock", "SIGSTOP"])
def test_hung_engine_is_restarted_with_the_reason(
    stub: EngineEnvironment, seen: Seen, tmp_path: Path, how: str
) -> None:
    """A scheduler that is deadlocked, whose server answers health checks, and a stopped process."""
    wait = tmp_path / "wait"

    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub))
        (engine,) = host.engines
        pid = engine.pid
        wait.touch()  # the next process is ready later, so that the state in between is visible
        if how == "SIGSTOP":
            stop_process(engine)
        status, body = await ask(host, "alpha", words="deadlock" if how == "deadlock" else "who?")
        assert status == 504 and body["error"]["code"] == "engine_hung"
        assert body["error"]["message"] == "llama.cpp hung and is being restarted: it made no progress"
        text = engine.backend.reason or ""
        assert text.removeprefix(STOPPED).startswith("it made no progress for ") and text.endswith(" a request waited")
        assert text.startswith(STOPPED) == (how == "SIGSTOP")
        assert engine.backend.last_exit == LastExit(cause="hung", text=text)

        status, body = await ask(host, "alpha")
        assert (status, body["error"]["code"]) == (503, "engine_restarting")
        assert body["error"]["message"] == "llama.cpp hung and is being restarted"
        status, health = await read_health(host)
        assert (status, health["status"]) == (503, "restarting")
        assert health["models"]["alpha"] == {
            "engine": "llama.cpp", "state": "restarting", "progress": None, "cause": "hung",
        }  # fmt: skip
        shown = await collect_status(host, make_record(host))
        assert shown.models[0].engines[0].last_exit == LastExit(cause="hung", text=text)
        assert text in render_text(render_status(shown))
        assert "llama.cpp-1 restarting" in render_text(render_list([(make_record(host), shown)]))

        wait.unlink()
        await until(lambda: engine.state == "ready")
        assert engine.pid != pid and engine.backend.restarts == 1
        assert (await ask(host, "alpha"))[0] == 200 and (await read_health(host))[0] == 200
        assert any(note.startswith(f"llama.cpp hung: {text}; restarting it in ") for note in host.notes)
        assert f"# {text}; stopped by bedplate" in engine.log.read_text()
        assert f"1 restart: {text}" in render_text(render_status(await collect_status(host, make_record(host))))

    with_host(then, tmp_path)


def test_idle_engine_must_answer_its_health_check(stub: EngineEnvironment, seen: Seen, tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub))
        (engine,) = host.engines
        await seen.wait_for_samples(lambda one: one.is_answering, 2 * LIMITS.silent_s)
        assert engine.backend.restarts == 0
        stop_process(engine)
        await until(lambda: engine.backend.restarts == 1 and engine.state == "ready")
        assert engine.backend.last_exit is not None and engine.backend.last_exit.cause == "hung"
        assert engine.backend.last_exit.text.startswith(f"{STOPPED}it did not answer its health check for ")

    with_host(then, tmp_path)


def test_request_of_a_hung_replica_goes_to_another_one(stub: EngineEnvironment, seen: Seen, tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub, replicas=2))
        first, second = host.engines
        first.backend.share, pids = 0.0, {engine.id: engine.pid for engine in host.engines}
        stop_process(second)
        asking = asyncio.create_task(ask(host, "alpha"))
        await until(lambda: second.backend.in_flight == 1)
        first.backend.share = 1.0
        status, body = await asking
        assert status == 200 and body["choices"][0]["message"]["content"] == str(pids[first.id])
        await until(lambda: second.state == "ready")
        assert (first.backend.restarts, second.backend.restarts) == (0, 1) and first.pid == pids[first.id]

    with_host(then, tmp_path)


def test_engine_that_computes_a_long_prompt_is_not_killed(stub: EngineEnvironment, seen: Seen, tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub))
        asking = asyncio.create_task(ask(host, "alpha", words="burn"))
        await seen.wait_for_samples(lambda one: one.waiting, 3 * LIMITS.silent_s)
        (tmp_path / "enough").touch()
        assert (await asking)[0] == 200 and host.engines[0].backend.restarts == 0

    with_host(then, tmp_path)


def test_client_that_does_not_read_cannot_restart_an_engine(
    stub: EngineEnvironment, seen: Seen, tmp_path: Path
) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub))
        (engine,) = host.engines
        body = {"model": "alpha", "stream": True, "messages": [{"role": "user", "content": "flood"}]}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{host.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                await until(lambda: engine.backend.unread == 1)
                await seen.wait_for_samples(lambda one: not one.waiting and one.is_answering, 2 * LIMITS.silent_s)
                assert engine.backend.in_flight == 1 and engine.backend.restarts == 0
                answer.close()
            await until(lambda: engine.backend.in_flight == 0)
        assert engine.backend.unread == 0

    with_host(then, tmp_path)


def test_engine_that_bedplate_paused_is_not_restarted(stub: EngineEnvironment, seen: Seen, tmp_path: Path) -> None:
    from bedplate.changing.standstill import EnginePauser

    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub, replicas=2))
        paused, other = host.engines
        pauser = EnginePauser()
        pauser.add(paused)
        pauser.pause()
        await seen.wait_for_samples(lambda one: one.is_answering, 3 * LIMITS.silent_s)  # of the other one
        assert paused.backend.restarts == other.backend.restarts == 0
        pauser.resume()
        await until(lambda: any(backend is paused.backend and one.is_answering for backend, one in seen.samples[-4:]))
        assert paused.backend.restarts == 0

    with_host(then, tmp_path)


def test_process_of_an_orchestrator_is_judged_by_its_health_check(
    stub: EngineEnvironment, seen: Seen, tmp_path: Path
) -> None:
    """Its requests may wait for another process, and Ray's processes use the CPU all the time."""

    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", stub))
        (engine,) = host.engines
        engine.supervisor.by_health = True
        os.kill(engine.pid or 0, signal.SIGKILL)  # the next process is watched in that way
        await until(lambda: engine.backend.restarts == 1 and engine.state == "ready")
        assert engine.backend.last_exit is not None and engine.backend.last_exit.cause == "killed"
        asking = asyncio.create_task(ask(host, "alpha", words="deadlock"))
        await seen.wait_for_samples(lambda one: one.is_answering and not one.waiting, 2 * LIMITS.silent_s)
        assert engine.backend.in_flight == 1 and engine.backend.restarts == 1
        stop_process(engine)
        assert (await asking)[1]["error"]["code"] == "engine_hung"

    with_host(then, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ray_replica_detects_that_its_engine_hangs(tmp_path: Path) -> None:
    """An engine that answers or computes does not hang; a stopped one does."""
    (tmp_path / "engine.py").write_text(SCRIPT.replace("FOLDER", repr(str(tmp_path))))
    port = find_free_port()
    command = [sys.executable, str(tmp_path / "engine.py"), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None and engine.stdout.readline() == b"listening\n"
            before = ray_serve.measure_cpu_seconds(os.getpid())
            assert 0 < ray_serve.measure_cpu_seconds(engine.pid) < before  # a part of this process's
            limits = {"hang_s": 0.6, "every_s": 0.1, "limit_s": 0.3}
            watching = threading.Thread(
                target=ray_serve.wait_for_hang, args=(f"http://127.0.0.1:{port}/", engine.pid), kwargs=limits
            )
            watching.start()
            watching.join(2 * limits["hang_s"])
            assert watching.is_alive()
            engine.send_signal(signal.SIGSTOP)
            wait_for(lambda: not watching.is_alive(), "the hang to be detected")
        finally:
            engine.kill()
            engine.wait(HANG_S)
