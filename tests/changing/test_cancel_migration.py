"""`bedplate migrate --cancel`, and stopping a host, in each phase of a migration."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.changing.migrating import Load, make_engine, make_quick_request, offer_engines, send_requests
from tests.commands import invoke
from tests.conftest import have_ended
from tests.hosting.stub_hosts import (
    HANDLER,
    LISTEN,
    add,
    count_need_bytes,
    make_stub_environment,
    make_stub_readied,
    with_host,
)

from bedplate.changing.challenger import ThreadProgress, run_in_thread
from bedplate.changing.migrate import CancelRequest, MigrationRun, cancel_migration, migrate
from bedplate.errors import NotPossible, UsageError
from bedplate.home import hold_lock
from bedplate.hosting.host import Host, HostedEngine
from bedplate.interrupts import OperationCancelled, check_cancelled
from bedplate.run.child import run_child
from bedplate.values.migration import Migration

NEVER_READY = f"""{HANDLER}
    def do_GET(self):
        self.send_error(503)
{LISTEN}"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


@pytest.fixture(autouse=True)
def short_steps(bedplate_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.changing.migrate.IDLE_STEP_S", 0.2)


async def until(look: Callable[[], object]) -> None:
    while not look():
        await asyncio.sleep(0.02)


def ignore(text: str) -> None:
    return None


def start_migration(host: Host, **more: Any) -> asyncio.Task[Migration]:
    return asyncio.create_task(migrate(host, make_quick_request("llama.cpp", **more), ignore))


def is_doing(host: Host, *words: str) -> bool:
    return any(word in (host.get_service().current_operation or "") for word in words)


async def cancel(host: Host) -> Migration:
    return await cancel_migration(host, CancelRequest(), ignore)


def convert_forever(monkeypatch: pytest.MonkeyPatch) -> list[psutil.Process]:
    """Replace the preparation by a conversion that does not end; returns its processes."""
    processes: list[psutil.Process] = []

    def prepare(self: MigrationRun, progress: ThreadProgress, hardware: object = None) -> None:
        def note(pid: int) -> None:
            if not processes:
                top = psutil.Process(pid)
                processes.extend([top, *top.children(recursive=True)] if top.children() else [])

        with progress.step("converting"):
            run_child(SLEEP, tick=note)

    monkeypatch.setattr(MigrationRun, "_prepare_in_thread", prepare)
    return processes


class TestCancel:
    def test_during_a_conversion(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        processes = convert_forever(monkeypatch)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            moving = start_migration(host)
            await until(lambda: processes)
            done = await cancel(host)
            assert await moving == done and have_ended(processes) and len(processes) == 2
            assert (done.outcome, done.stage, done.reason) == ("rolled back", "cancelled", "by request (preparing)")
            assert done.b.engine == "llama.cpp" and done.exit_code == 1 and not done.checks
            assert host.get_service().current_operation is None
            assert {status for status, _ in await send_requests(host, 2)} == {200}

        with_host(then, tmp_path)

    @pytest.mark.parametrize("both_fit", [True, False], ids=["side by side", "swap"])
    def test_while_the_challenger_starts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_fit: bool) -> None:
        first = make_engine(tmp_path, "one")
        stuck = make_stub_readied("alpha", make_stub_environment(tmp_path / "stuck", NEVER_READY))
        offer_engines(monkeypatch, **{"llama.cpp": stuck})

        async def then(host: Host) -> None:
            await add(host, first)
            async with Load(host, 2) as load:
                moving = start_migration(host)
                await until(lambda: any(engine.state == "loading" for engine in host.engines))
                done = await cancel(host)
            assert (done.outcome, done.stage, done.side_by_side, done.cut) == ("rolled back", "cancelled", both_fit, 0)
            assert await moving == done and set(load.statuses) == {200}
            (engine,) = host.engines
            assert engine.plan.engine_version == "one" and engine.backend.share == 1.0
            assert host.get_service().readied is first and host.get_service().current_operation is None

        with_host(then, tmp_path, budget_bytes=None if both_fit else round(1.5 * count_need_bytes(first)))

    @pytest.mark.parametrize("both_fit", [True, False], ids=["side by side", "swap"])
    def test_with_a_part_of_the_traffic(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_fit: bool) -> None:
        first = make_engine(tmp_path, "one")
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})

        async def then(host: Host) -> None:
            await add(host, first)
            async with Load(host, 2) as load:
                moving = start_migration(host, least_step_s=3600.0, most_step_s=3600.0)
                await until(
                    lambda: any(one.plan.engine_version == "two" and one.backend.worked for one in host.engines)
                )
                done = await cancel(host)
            assert (done.outcome, done.stage, done.side_by_side, done.cut) == ("rolled back", "cancelled", both_fit, 0)
            assert await moving == done and set(load.statuses) == {200}
            (engine,) = host.engines
            assert engine.plan.engine_version == "one" and engine.backend.share == 1.0

        with_host(then, tmp_path, budget_bytes=None if both_fit else round(1.5 * count_need_bytes(first)))

    def test_while_a_swap_waits_for_running_requests(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The old engine is not stopped, and its answers are not cut."""
        first = make_engine(tmp_path, "one", pause_s=0.05)
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})

        async def then(host: Host) -> None:
            await add(host, first)
            (engine,) = host.engines
            long = asyncio.create_task(send_requests(host, 1, tokens=60))
            await until(lambda: engine.backend.in_flight)
            start_migration(host)
            await until(lambda: is_doing(host, "new requests are held"))
            held = asyncio.create_task(send_requests(host, 1))
            await until(lambda: host.gateway.count_waiting("alpha"))
            done = await cancel(host)
            assert (done.outcome, done.stage, done.cut) == ("rolled back", "cancelled", 0)
            assert host.engines == (engine,) and engine.backend.restarts == 0
            assert [status for status, _ in [*(await long), *(await held)]] == [200, 200]

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(first)))

    def test_is_refused_after_all_checks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})
        draining, enough = asyncio.Event(), asyncio.Event()
        drain_and_stop = MigrationRun._drain_and_stop

        async def drain(self: MigrationRun, engines: Sequence[HostedEngine], drain_s: float | None = None) -> None:
            draining.set()
            await enough.wait()
            await drain_and_stop(self, engines, drain_s)

        monkeypatch.setattr(MigrationRun, "_drain_and_stop", drain)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            moving = start_migration(host)
            await draining.wait()
            with pytest.raises(NotPossible, match="has passed all checks and cannot be cancelled any more"):
                await cancel(host)
            enough.set()
            assert (await moving).outcome == "migrated"

        with_host(then, tmp_path)

    def test_without_a_migration(self, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            with pytest.raises(NotPossible, match="no migration is running") as caught:
                await cancel(host)
            assert caught.value.cause == "alpha: no operation"
            with pytest.raises(UsageError, match="beta is not served here"):
                await cancel_migration(host, CancelRequest(model="beta"), ignore)

        with_host(then, tmp_path)


@pytest.mark.parametrize("phase", ["conversion", "start", "traffic", "held"])
def test_stopping_the_host_ends_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """No process is left, and no thread keeps the host from ending."""
    first = make_engine(tmp_path, "one")
    processes: list[psutil.Process] = []
    if phase == "conversion":
        processes = convert_forever(monkeypatch)
    else:
        stuck = make_stub_readied("alpha", make_stub_environment(tmp_path / "stuck", NEVER_READY))
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two") if phase == "traffic" else stuck})
    moving: list[asyncio.Task[Migration]] = []

    async def then(host: Host) -> None:
        await add(host, first)
        moving.append(start_migration(host, least_step_s=3600.0, most_step_s=3600.0))
        if phase == "conversion":
            await until(lambda: processes)
        elif phase == "traffic":
            await until(lambda: is_doing(host, "it gets 10 %"))
        else:
            await until(lambda: any(engine.state == "loading" for engine in host.engines))

    with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(first)) if phase == "held" else None)
    assert moving[0].cancelled() and have_ended(processes)


class TestThreads:
    def test_result_and_error_reach_the_caller(self) -> None:
        async def run() -> None:
            assert await run_in_thread(lambda a, b: a + b, 1, 2) == 3
            with pytest.raises(ZeroDivisionError):
                await run_in_thread(lambda: 1 // 0)

        asyncio.run(run())

    def test_work_that_cannot_be_cancelled_does_not_delay_the_exit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bedplate.changing.challenger.CANCEL_S", 0.05)
        enough, started = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            enough.wait()

        async def run() -> None:
            task = asyncio.create_task(run_in_thread(work))
            await until(started.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        (left,) = [one for one in threading.enumerate() if one.name == "bedplate-work"]
        assert left.daemon
        enough.set()
        left.join()

    def test_waiting_for_a_lock_can_be_cancelled(self, tmp_path: Path) -> None:
        waits, ended = threading.Event(), threading.Event()

        def work() -> None:
            try:
                with hold_lock(tmp_path / "one", "converting", lambda text: waits.set()):
                    pass
            except OperationCancelled:
                ended.set()
                raise

        async def run() -> None:
            with hold_lock(tmp_path / "one", "converting"):
                task = asyncio.create_task(run_in_thread(work))
                await until(waits.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert ended.is_set()

        asyncio.run(run())

    def test_code_outside_is_never_cancelled(self) -> None:
        check_cancelled()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "no engine is given"),
        (("--cancel", "--plan", "plan.json", "--step", "50"), 2, "--cancel cannot be combined with --plan and --step"),
        (("--cancel", "vllm", "chat"), 2, "bedplate migrate --cancel chat"),
        (("--cancel", "chat"), 1, "no service named chat is running"),
        (("vlm",), 2, "no engine is called 'vlm'"),
    ],
)
def test_command_line(own_home: Path, words: tuple[str, ...], code: int, said: str) -> None:
    answer = invoke("migrate", *words)
    assert answer.code == code and said in answer.err
