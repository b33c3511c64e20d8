"""The supervisor with the real engine on the real model, and with small faulty programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S, have_ended, wait_for

from bedplate.decide import decide, plan
from bedplate.engines import Engine, KnownFailure, get_engine
from bedplate.errors import ExternalFailure
from bedplate.facts.hardware import probe
from bedplate.run import supervisor as module
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment
from bedplate.run.gateway import GatewayBackend
from bedplate.run.supervisor import (
    EARLY_DEATHS,
    LATER_DEATHS,
    MAX_BACK_OFF_S,
    MIN_BACK_OFF_S,
    EngineExit,
    EngineLog,
    EngineProcess,
    Supervisor,
    compute_back_off_s,
    explain_exit,
    find_final_failure,
    find_free_port,
)
from bedplate.values import Launch, Plan, Workload, replace_fields

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Fake(Engine):
    """An engine whose program is written by the test."""

    id = "fake"
    name = "Fake"
    version = "1"
    supervised_env: ClassVar[dict[str, str]] = {"FAKE": "yes"}

    def launch(self, plan: Plan, port: int) -> Launch:
        return Launch(argv=("fake", str(port)))


class Recorder(GatewayBackend):
    """Records the states and the loading progress."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.seen_progress: list[float] = []
        super().__init__("model", "engine")

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_state" and self.states[-1:] != [value]:
            self.states.append(str(value))
        if name == "progress" and isinstance(value, float):
            self.seen_progress.append(value)


def make_fake_environment(folder: Path, script: str) -> EngineEnvironment:
    """Like an engine's environment: an interpreter, and a program next to it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "fake").write_text(script)
    return EngineEnvironment(
        engine="fake", version="1", path=str(folder), packages=(), python="3", made_at="now", disk_bytes=0
    )


def make_real_plan(model_file: Path) -> Plan:
    model = replace_fields(read_builtin_facts(), files=(str(model_file),))
    workload = Workload(concurrency=1, context_tokens=1024)
    return plan(decide(probe(), model, workload), model, workload)


def list_descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def until(look: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.02)


def supervise(
    environment: EngineEnvironment,
    log: Path,
    then: Callable[[Supervisor, Recorder], Awaitable[None]],
    *,
    model_file: Path = Path("model.gguf"),
    kind: Engine | None = None,
    loop: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> Recorder:
    """Starts an engine, calls `then` with it, and stops it; no process may be left."""
    backend = Recorder()

    async def run() -> None:
        one = Supervisor(make_real_plan(model_file), kind or Fake(), environment, backend, log)
        one.start()
        try:
            async with asyncio.timeout(HANG_S):
                await then(one, backend)
        finally:
            await one.stop()

    loop(run())
    assert not list_descendants()
    return backend


async def expect_failure(one: Supervisor) -> ExternalFailure:
    with pytest.raises(ExternalFailure) as caught:
        await one.wait_for_start()
    return caught.value


class TestTheRealEngine:
    def test_becomes_ready_and_is_restarted_after_a_kill(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        pids: list[int | None] = []
        log = tmp_path / "log"

        async def said_so(times: int) -> None:
            # It answers before it logs that, and a killed engine logs nothing more.
            await until(lambda: log.read_text().count("model loaded") == times, f"{times} x 'model loaded' in the log")

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            assert backend.address is not None and backend.restarts == 0
            await said_so(1)
            assert one.process is not None and one.process.pid is not None
            pids.append(one.process.pid)
            os.kill(one.process.pid, signal.SIGKILL)
            await until(lambda: backend.states[-2:] == ["restarting", "ready"], "the restart")
            pids.append(one.process.pid)
            assert backend.restarts == 1 and backend.reason is None
            await said_so(2)

        backend = supervise(llama_environment, log, then, model_file=builtin_gguf, kind=get_engine("llama.cpp"))
        assert backend.states == ["loading", "ready", "restarting", "ready", "stopped"]
        assert backend.seen_progress[0] == 0 and backend.seen_progress[-1] == 1
        assert None not in pids and pids[0] != pids[1]
        assert log.read_text().count("# 2") == 2

    def test_killed_warden_kills_the_engine(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            (warden,) = psutil.Process().children()
            engines = warden.children()
            warden.kill()
            await until(lambda: backend.states[-2:] == ["restarting", "ready"], "the restart")
            assert engines and have_ended(engines)

        supervise(llama_environment, tmp_path / "log", then, model_file=builtin_gguf, kind=get_engine("llama.cpp"))

    def test_missing_file_is_not_retried(self, llama_environment: EngineEnvironment, tmp_path: Path) -> None:
        async def then(one: Supervisor, backend: Recorder) -> None:
            error = await expect_failure(one)
            assert error.message == f"llama.cpp did not start: {tmp_path}/gone.gguf does not exist any more"
            assert str(tmp_path / "log") in str(error.hint)

        file = tmp_path / "gone.gguf"
        backend = supervise(llama_environment, tmp_path / "log", then, model_file=file, kind=get_engine("llama.cpp"))
        assert backend.states == ["loading", "failed", "stopped"] and backend.restarts == 0

    def test_truncated_file_is_not_retried(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        file = tmp_path / "cut.gguf"
        with builtin_gguf.open("rb") as whole:
            file.write_bytes(whole.read(20_000_000))

        async def then(one: Supervisor, backend: Recorder) -> None:
            assert "the model file is damaged" in (await expect_failure(one)).message

        backend = supervise(llama_environment, tmp_path / "log", then, model_file=file, kind=get_engine("llama.cpp"))
        assert backend.restarts == 0

    def test_stops_restarting_after_the_file_was_removed(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(builtin_gguf.read_bytes())

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            file.unlink()
            assert one.process is not None and one.process.pid is not None
            os.kill(one.process.pid, signal.SIGKILL)
            failure = await one.wait_for_failure()
            assert failure.message == f"{file} does not exist any more"
            assert backend.address is None and backend.explain_unavailable().endswith(failure.message)

        backend = supervise(llama_environment, tmp_path / "log", then, model_file=file, kind=get_engine("llama.cpp"))
        assert backend.states == ["loading", "ready", "restarting", "failed", "stopped"]


class TestGivingUp:
    def test_stops_after_three_early_exits(self, tmp_path: Path) -> None:
        environment = make_fake_environment(tmp_path / "env", "import sys; print('why I died'); sys.exit(3)")

        async def then(one: Supervisor, backend: Recorder) -> None:
            error = await expect_failure(one)
            assert error.message == "Fake did not start: it ended with status 3: why I died"
            assert error.exit_code == 3

        backend = supervise(environment, tmp_path / "log", then)
        assert backend.restarts == EARLY_DEATHS - 1
        assert backend.states == ["loading", "restarting", "failed", "stopped"]
        assert (tmp_path / "log").read_text().count("why I died") == EARLY_DEATHS

    def test_reads_last_line_without_newline(self, tmp_path: Path) -> None:
        environment = make_fake_environment(
            tmp_path / "env", "import sys; sys.stderr.write('half a line'); sys.exit(9)"
        )

        async def then(one: Supervisor, backend: Recorder) -> None:
            assert (await expect_failure(one)).message.endswith("it ended with status 9: half a line")

        supervise(environment, tmp_path / "log", then)
        assert (tmp_path / "log").read_text().count("half a line\n") == EARLY_DEATHS

    def test_reports_engine_that_cannot_be_started(self, tmp_path: Path) -> None:
        environment = make_fake_environment(tmp_path / "env", "")
        environment.interpreter.unlink()

        async def then(one: Supervisor, backend: Recorder) -> None:
            message = (await expect_failure(one)).message
            assert "it could not be started: " in message and "No such file" in message

        supervise(environment, tmp_path / "log", then)

    def test_kills_engine_that_hangs_while_loading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "START_LIMIT_S", 0.5)
        monkeypatch.setattr(module, "SLOWEST_DISK_BYTES_S", 10**12)
        monkeypatch.setattr(module, "EARLY_DEATHS", 2)
        hang = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('hm', flush=True)"
        environment = make_fake_environment(tmp_path / "env", f"{hang}\nwhile True: time.sleep(600)")

        async def then(one: Supervisor, backend: Recorder) -> None:
            error = await expect_failure(one)
            assert error.message == "Fake did not start: it was not ready after 500 ms"
            await until(lambda: not list_descendants(), "the engine to be killed")

        backend = supervise(environment, tmp_path / "log", then)
        assert backend.restarts == 1
        assert "# not ready after 500 ms" in (tmp_path / "log").read_text()

    @pytest.mark.measures
    def test_kills_engine_whose_health_check_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "START_LIMIT_S", 1.0)
        monkeypatch.setattr(module, "SLOWEST_DISK_BYTES_S", 10**12)
        monkeypatch.setattr(module, "EARLY_DEATHS", 1)
        mute = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))"
        environment = make_fake_environment(tmp_path / "env", f"{mute}\nwhile True: c = s.accept()")

        async def then(one: Supervisor, backend: Recorder) -> None:
            began = time.monotonic()
            assert "not ready after 1.0 s" in (await expect_failure(one)).message
            assert time.monotonic() - began < 30

        supervise(environment, tmp_path / "log", then)

    def test_internal_error_reaches_the_waiting_caller(self, tmp_path: Path) -> None:
        class Broken(Fake):
            def launch(self, plan: Plan, port: int) -> Launch:
                raise ZeroDivisionError("a mistake")

        async def then(one: Supervisor, backend: Recorder) -> None:
            with pytest.raises(ZeroDivisionError):
                await one.wait_for_start()
            assert backend.state == "failed" and backend.reason == "a mistake"

        supervise(make_fake_environment(tmp_path / "env", HEALTHY), tmp_path / "log", then, kind=Broken())


class TestStopping:
    @pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def test_stops_at_any_moment_of_the_start(
        self, tmp_path: Path, loop: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        environment = make_fake_environment(tmp_path / "env", HEALTHY)

        def after(turns: int) -> Callable[[Supervisor, Recorder], Coroutine[Any, Any, None]]:
            async def then(one: Supervisor, backend: Recorder) -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)

            return then

        for turns in (0, 1, 2, 3, 4, 6, 10, 30, 100):
            assert supervise(environment, tmp_path / "log", after(turns), loop=loop).states[-1] == "stopped"

    def test_stops_while_waiting_to_restart(self, tmp_path: Path) -> None:
        async def then(one: Supervisor, backend: Recorder) -> None:
            await until(lambda: backend.state == "restarting", "the first death")

        backend = supervise(make_fake_environment(tmp_path / "env", "exit(1)"), tmp_path / "log", then)
        assert backend.states == ["loading", "restarting", "stopped"]

    def test_kills_engine_that_ignores_sigterm(self, tmp_path: Path) -> None:
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"

        async def run() -> None:
            lines: list[str] = []
            log = EngineLog(tmp_path / "log")
            process = EngineProcess(log, lines.append)
            await process.start([sys.executable, "-c", f"{deaf}\nwhile True: time.sleep(600)"], dict(os.environ))
            await until(lambda: lines, "its first line")
            await process.stop(grace_s=0.2)
            log.close()
            assert process.code == -signal.SIGKILL

        asyncio.run(run())
        assert not list_descendants()

    def test_engine_ends_when_bedplate_is_killed(self, tmp_path: Path) -> None:
        environment = make_fake_environment(tmp_path / "env", HEALTHY)
        argv = [str(environment.interpreter), str(environment.interpreter.parent / "fake"), str(find_free_port())]
        code = f"""
import asyncio, os, pathlib
from bedplate.run.supervisor import EngineLog, EngineProcess
async def main():
    process = EngineProcess(EngineLog(pathlib.Path({str(tmp_path / "log")!r})), lambda line: print(line, flush=True))
    await process.start({argv!r}, dict(os.environ))
    await process.ended.wait()
asyncio.run(main())
"""
        bedplate = psutil.Popen([sys.executable, "-c", code], stdout=-1)
        with bedplate:
            assert bedplate.stdout.readline() == b"listening\n"
            processes = bedplate.children(recursive=True)
            assert len(processes) == 2
            bedplate.kill()
        wait_for(lambda: have_ended(processes), "warden and engine to end")


deaths = st.builds(
    EngineExit,
    code=st.sampled_from([None, 0, 1, -6, -9]),
    log=st.just(""),
    was_ready=st.booleans(),
    worked=st.booleans(),
)
idle_deaths = st.builds(EngineExit, code=st.just(1), log=st.just(""), was_ready=st.booleans(), worked=st.just(False))


class TestPolicy:
    @given(st.lists(deaths, min_size=1, max_size=30))
    def test_back_off_is_bounded(self, history: list[EngineExit]) -> None:
        assert MIN_BACK_OFF_S <= compute_back_off_s(history) <= MAX_BACK_OFF_S

    @given(st.lists(deaths, max_size=20), st.lists(idle_deaths, min_size=1, max_size=20))
    def test_back_off_grows_with_exits_without_answers(self, history: list[EngineExit], idle: list[EngineExit]) -> None:
        waits = [compute_back_off_s([*history, *idle[:count]]) for count in range(1, len(idle) + 1)]
        assert waits == sorted(waits)
        if len(idle) > 10:
            assert waits[-1] == MAX_BACK_OFF_S

    @given(st.lists(deaths, max_size=20))
    def test_answered_request_resets_back_off(self, history: list[EngineExit]) -> None:
        assert compute_back_off_s([*history, EngineExit(1, "", was_ready=True, worked=True)]) == MIN_BACK_OFF_S

    @given(st.lists(deaths, min_size=1, max_size=30), st.integers(0, 2 * LATER_DEATHS))
    def test_stops_after_consecutive_early_exits(self, history: list[EngineExit], more: int) -> None:
        """After three, or after ten if the engine has been ready before."""
        history = [*history, *[EngineExit(-9, "", was_ready=False, worked=False)] * more]
        most = LATER_DEATHS if any(death.was_ready for death in history) else EARLY_DEATHS
        in_a_row = [not death.was_ready for death in history[-most:]]
        assert (find_final_failure(history, Fake()) is not None) == (len(in_a_row) == most and all(in_a_row))

    def test_permanent_failure_is_not_retried_before_first_readiness(self) -> None:
        class Telling(Fake):
            def explain(self, log: str) -> KnownFailure | None:
                return KnownFailure(message=log, hint="", lasting=log == "lasting")

        early = EngineExit(1, "lasting", was_ready=False, worked=False)
        assert find_final_failure([early], Telling()) == KnownFailure(message="lasting", hint="")
        assert find_final_failure([EngineExit(1, "lasting", was_ready=True, worked=False)], Telling()) is None
        assert find_final_failure([EngineExit(1, "passing", was_ready=False, worked=False)], Telling()) is None

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            (-signal.SIGKILL, "out of memory"),
            (-signal.SIGILL, "an instruction that this CPU does not support"),
            (-signal.SIGSEGV, "SIGSEGV"),
            (-63, "signal 63"),
            (2, "status 2: the last line"),
            (None, "could not be started: the last line"),
        ],
    )
    def test_explains_exit_status(self, code: int | None, says: str) -> None:
        failure = explain_exit(
            EngineExit(code, "# launch\nthe last line\n\n# a note", was_ready=False, worked=False), Fake()
        )
        assert says in failure.message and failure.hint


class TestLog:
    def test_log_is_rotated_and_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LOG_BYTES", 1000)
        log = EngineLog(tmp_path / "engine.log")
        for number in range(1000):
            assert log.append_output(f"line {number}\n".encode()) == [f"line {number}"]
        log.close()
        files = sorted(tmp_path.iterdir(), key=lambda file: file.suffix.replace(".log", ".0"), reverse=True)
        assert [file.name for file in files] == [*(f"engine.log.{number}" for number in (4, 3, 2, 1)), "engine.log"]
        assert all(0 < file.stat().st_size <= 1000 for file in files)
        kept = [int(line.split()[1]) for file in files for line in file.read_text().splitlines()]
        assert kept == list(range(kept[0], 1000)) and len(kept) > 300
        assert log.read_tail().splitlines() == [f"line {number}" for number in range(800, 1000)]

    def test_appends_to_existing_log(self, tmp_path: Path) -> None:
        for text in ("one", "two"):
            log = EngineLog(tmp_path / "engine.log")
            log.write(text)
            log.close()
        assert (tmp_path / "engine.log").read_text() == "one\ntwo\n"

    @given(st.lists(st.binary(max_size=20)))
    def test_lines_are_the_same_however_output_is_split(self, chunks: list[bytes]) -> None:
        log = EngineLog(Path("/nonexistent/log"))
        lines = [line for chunk in chunks if chunk for line in log.append_output(chunk)] + log.append_output(b"")
        whole = b"".join(chunks).decode("utf-8", "replace").split("\n")
        assert [line for line in lines if line] == [line.rstrip("\r") for line in whole if line.rstrip("\r")]

    def test_splits_endless_line(self, tmp_path: Path) -> None:
        log = EngineLog(tmp_path / "log")
        lines = [line for _ in range(100) for line in log.append_output(b"x" * 10_000)]
        log.close()
        assert sum(map(len, lines)) > 900_000 and max(map(len, lines)) < 80_000

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
    def test_full_disk_loses_only_log_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.symlink_to("/dev/full")

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            assert one.log.read_tail().splitlines()[1:] == ["listening"]
            # Once there is free space again, lines are written again.
            path.unlink()
            one.log.write("there is room")
            assert path.read_text() == "there is room\n"
            path.unlink()
            path.symlink_to("/dev/full")

        supervise(make_fake_environment(tmp_path / "env", HEALTHY), path, then)

    def test_log_that_cannot_be_opened_loses_only_lines(self, tmp_path: Path) -> None:
        (tmp_path / "a file").write_text("")

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            assert one.log.read_tail().splitlines()[1:] == ["listening"]

        supervise(make_fake_environment(tmp_path / "env", HEALTHY), tmp_path / "a file" / "log", then)

    def test_phase_is_known_before_its_progress_bar_ends_the_line(self, tmp_path: Path) -> None:
        class Phased(Fake):
            start_phases = (("^Loading", "load"), ("Capturing", "capture"))

        async def then(one: Supervisor, backend: Recorder) -> None:
            await until(lambda: backend.phases.current == "capture", "the bar")
            assert one.log.read_tail().splitlines()[1:] == ["Loading"]
            go_on.write_text("")
            await one.wait_for_start()
            assert [time.phase for time in backend.phases.list_times()] == ["start", "load", "capture"]
            assert backend.phases.current is None

        go_on = tmp_path / "go on"
        script = (
            "import os, time\nprint('Loading')\nprint('\\rCapturing: 0%', end='', flush=True)\n"
            f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n" + HEALTHY
        )
        supervise(make_fake_environment(tmp_path / "env", script), tmp_path / "log", then, kind=Phased())

    def test_error_in_progress_parser_does_not_block_the_engine(self, tmp_path: Path) -> None:
        class Confused(Fake):
            def read_progress(self, line: str) -> float | None:
                raise KeyError(line)

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()

        chatty = "print('x' * 1_000_000, flush=True)\n" + HEALTHY
        supervise(make_fake_environment(tmp_path / "env", chatty), tmp_path / "log", then, kind=Confused())
        assert "# bedplate could not parse the previous line: KeyError('listening')" in (tmp_path / "log").read_text()

    def test_engine_gets_supervised_variables(self, tmp_path: Path) -> None:
        environment = make_fake_environment(
            tmp_path / "env", "import os; print(os.environ['FAKE'], flush=True)" + HEALTHY
        )

        async def then(one: Supervisor, backend: Recorder) -> None:
            await one.wait_for_start()
            assert "yes" in one.log.read_tail().splitlines()

        supervise(environment, tmp_path / "log", then)
