"""Migrations and rollbacks behind a running endpoint lose no requests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.changing.migrating import (
    SLOW_S,
    Load,
    make_engine,
    make_quick_request,
    offer_engines,
    offer_slow_engine,
    send_requests,
)
from tests.engines.plans import machine
from tests.hosting.stub_hosts import (
    DIES,
    add,
    count_need_bytes,
    make_stub_environment,
    make_stub_readied,
    read_pid,
    with_host,
)
from tests.run.test_supervisor import until

from bedplate.changing.migrate import MigrationRun, measure_free_memory, migrate, read_steps, replace_decision
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.hosting.host import Host
from bedplate.run.ready import PreparedModel
from bedplate.values import Hardware
from bedplate.values.migration import Migration
from bedplate.values.record import from_json, replace_fields, to_json


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def home(bedplate_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate store for agreements, and short steps without traffic."""
    monkeypatch.setattr("bedplate.changing.migrate.IDLE_STEP_S", 0.2)


class TestSideBySide:
    def test_good_challenger_takes_over_without_lost_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = make_engine(tmp_path, "one"), make_engine(tmp_path, "two")
        offer_engines(monkeypatch, **{"llama.cpp": second})

        async def then(host: Host) -> None:
            await add(host, first)
            told = Told()
            async with Load(host, 6) as load:
                done = await migrate(host, make_quick_request("llama.cpp"), told)
            assert (done.outcome, done.side_by_side, done.cut) == ("migrated", True, 0)
            assert set(load.statuses) == {200}
            assert [step.percent for step in done.steps] == [10, 50, 100]
            assert all(step.challenger.requests >= 6 and not step.challenger.failed for step in done.steps)
            (engine,) = host.engines
            assert engine.plan.engine_version == "two" and engine.backend.share == 1.0
            assert host.get_service().readied is second and engine.backend.on_end is None
            assert [one.against for one in done.checks] == ["the engine in service"] * 2
            assert {one.verdict for one in done.checks} == {"ok"}
            assert "sending 10 % of the requests to llama.cpp two (Q4_1)" in told.lines
            assert host.get_service().current_operation is None
            assert from_json(Migration, to_json(done)) == done and done.exit_code == 0

        with_host(then, tmp_path)

    def test_challenger_with_wrong_answers_gets_no_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "other", seed="other")})

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            (first,) = host.engines
            async with Load(host, 3) as load:
                done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert (done.outcome, done.stage) == ("rolled back", "answers") and not done.steps
            assert "it gives wrong answers" in (done.reason or "") and "engine in service" in (done.reason or "")
            assert set(load.statuses) == {200} and host.engines == (first,) and first.backend.share == 1.0
            assert done.exit_code == 1

        with_host(then, tmp_path)

    @pytest.mark.measures
    def test_slow_challenger_is_rolled_back_after_draining(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offer_slow_engine(monkeypatch, make_engine(tmp_path, "slow", pause_s=SLOW_S))

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            async with Load(host, 6) as load:
                await until(lambda: len(load.statuses) > 10, "some requests")
                done = await migrate(host, make_quick_request("llama.cpp", most_step_s=30.0), Told())
                assert len(host.engines) == 1
            assert (done.outcome, done.stage, done.cut) == ("rolled back", "traffic", 0)
            assert "times as long" in (done.reason or "") and done.steps[-1].challenger.tpot_ms
            assert set(load.statuses) == {200}

        with_host(then, tmp_path)

    def test_challenger_that_does_not_start_is_rolled_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offer_engines(
            monkeypatch, **{"llama.cpp": make_stub_readied("alpha", make_stub_environment(tmp_path / "dies", DIES))}
        )

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            (first,) = host.engines
            done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert (done.outcome, done.stage) == ("rolled back", "start") and "no good" in (done.reason or "")
            assert host.engines == (first,) and read_pid((await send_requests(host, 1))[0]) == first.pid

        with_host(then, tmp_path)

    def test_challenger_that_dies_is_rolled_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # It survives the warm-up and the comparison of answers, and dies under traffic.
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "weak", dies_after=33)})

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            async with Load(host, 6) as load:
                done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert (done.outcome, done.stage) == ("rolled back", "traffic"), done
            assert "died" in (done.reason or "") or "requests failed;" in (done.reason or "")
            assert set(load.statuses) == {200}, "the incumbent answered what the challenger failed"
            assert len(host.engines) == 1

        with_host(then, tmp_path)

    def test_unloaded_model_gets_the_engine_after_checks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = make_engine(tmp_path, "one"), make_engine(tmp_path, "two")
        offer_engines(monkeypatch, **{"llama.cpp": second})

        async def then(host: Host) -> None:
            await host.add_service(replace_fields(first.decided.wanted, ttl_s=600.0), first)
            assert not host.engines
            moving = asyncio.create_task(migrate(host, make_quick_request("llama.cpp"), Told()))
            await until(lambda: host.get_service().busy, "the migration to begin")
            ((status, _),) = await send_requests(host, 1)
            done = await moving
            assert status == 200 and done.outcome == "migrated"
            assert [engine.plan.engine_version for engine in host.engines] == ["two"]

        with_host(then, tmp_path)

    def test_migration_without_traffic_is_noted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert done.outcome == "migrated" and len(done.notes) == 3
            assert done.notes[0].startswith("only 0 requests in")

        with_host(then, tmp_path)


class TestIncumbentDies:
    """The incumbent is killed during the migration and does not start again."""

    def kill_incumbent(self, host: Host, folder: Path) -> None:
        (engine,) = (one for one in host.engines if one.plan.engine_version == "one")
        (folder / "one" / "bin" / "llama-server").write_text(DIES)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)

    async def migrate_service(self, host: Host, folder: Path, *, revive: bool = False, **more: Any) -> Migration:
        """A migration in which the incumbent dies as soon as the challenger is ready."""
        program = folder / "one" / "bin" / "llama-server"
        good = program.read_text()
        moving = asyncio.create_task(migrate(host, make_quick_request("llama.cpp", **more), Told()))
        await until(lambda: len(host.engines) == 2 and host.engines[1].state == "ready", "the challenger")
        self.kill_incumbent(host, folder)
        await until(lambda: host.engines[0].state != "ready", "the death to be seen")
        if revive:
            program.write_text(good)
        return await moving

    @pytest.mark.measures
    def test_new_process_of_the_incumbent_takes_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_slow_engine(monkeypatch, make_engine(tmp_path, "slow", pause_s=SLOW_S))

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            async with Load(host, 4) as load:
                await until(lambda: len(load.statuses) > 10, "some requests")
                done = await self.migrate_service(host, tmp_path, revive=True)
            assert done.outcome == "rolled back" and done.stage == "traffic", done
            (engine,) = host.engines
            assert (engine.plan.engine_version, engine.state, engine.backend.share) == ("one", "ready", 1.0)
            assert ((await send_requests(host, 1))[0])[0] == 200 and host.get_service().current_operation is None

        with_host(then, tmp_path)

    @pytest.mark.measures
    def test_challenger_stays_if_no_other_engine_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = make_engine(tmp_path, "slow", pause_s=SLOW_S)
        offer_slow_engine(monkeypatch, slow)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            async with Load(host, 4) as load:
                await until(lambda: len(load.statuses) > 10, "some requests")
                done = await self.migrate_service(host, tmp_path)
            assert (done.outcome, done.stage) == ("migrated", "traffic"), done
            assert "times as long" in (done.reason or "") and "no other engine is left" in (done.reason or "")
            (engine,) = host.engines
            assert engine.plan.engine_version == "slow" and engine.backend.share == 1.0
            assert host.get_service().readied is slow and host.get_service().failure is None
            assert ((await send_requests(host, 1))[0])[0] == 200

        with_host(then, tmp_path)

    def test_challenger_with_wrong_answers_never_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "other", seed="other")})
        # The answers are compared after the incumbent has died.
        real = MigrationRun._check_challengers

        async def later(self: MigrationRun, ready: Any, basis: Any) -> None:
            TestIncumbentDies().kill_incumbent(self.host, tmp_path)
            await until(lambda: self.host.engines[0].state != "ready", "the death to be seen")
            await real(self, ready, basis)

        monkeypatch.setattr(MigrationRun, "_check_challengers", later)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            with pytest.raises(ExternalFailure, match="could not be started again"):
                await migrate(host, make_quick_request("llama.cpp"), Told())
            assert not host.engines and host.get_service().state == "failed"

        with_host(then, tmp_path)


class TestBothOnOneGpu:
    """The GPU and the free memory on it are simulated; engines that share a real one need one."""

    @pytest.mark.parametrize(("slots", "side_by_side"), [(64, True), (8, False)])
    def test_second_engine_gets_the_memory_that_is_free_if_it_serves_as_many_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, side_by_side: bool
    ) -> None:
        hardware = machine("H200 SXM", 1)
        (card,) = hardware.accelerators
        whole = {"card 0": card.free_bytes or 0}
        first = with_slots(make_engine(tmp_path, "one"), 64, whole)
        two = make_engine(tmp_path, "two")
        second, smaller = with_slots(two, 64, whole), with_slots(two, slots, {"card 0": 8 * 2**30})
        free = 11 * 2**30
        now = replace_fields(hardware, accelerators=(replace_fields(card, free_bytes=free),))
        monkeypatch.setattr("bedplate.changing.migrate.probe", lambda *, recall: now)
        planned: list[int | None] = []

        def prepare(self: MigrationRun, progress: object, hardware: Hardware | None = None) -> PreparedModel:
            planned.append(hardware.accelerators[0].free_bytes if hardware is not None else None)
            return second if hardware is None else smaller

        monkeypatch.setattr(MigrationRun, "_prepare_in_thread", prepare)

        async def then(host: Host) -> None:
            await add(host, first)
            done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert (done.outcome, done.side_by_side) == ("migrated", side_by_side), done.reason
            assert planned == [None, free]

        with_host(then, tmp_path, hardware=hardware)


def test_gpu_that_does_not_report_its_free_memory_counts_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its total would be taken for free otherwise."""
    hardware = machine("H200 SXM", 1)
    silent = replace_fields(hardware.accelerators[0], free_bytes=None)
    monkeypatch.setattr(
        "bedplate.changing.migrate.probe", lambda *, recall: replace_fields(hardware, accelerators=(silent,))
    )
    assert [card.free_bytes for card in measure_free_memory(hardware).accelerators] == [0]


def with_slots(ready: PreparedModel, slots: int, need: dict[str, int]) -> PreparedModel:
    """The same engine for this many requests, with this need of memory."""
    plan = replace_fields(ready.plan, settings=replace_fields(ready.plan.settings, slots=slots))
    part = dataclasses.replace(ready.decided.part, needs=(need,))
    return dataclasses.replace(ready, plan=plan, decided=dataclasses.replace(ready.decided, part=part))


class TestSwap:
    def test_requests_are_held_during_the_swap(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = make_engine(tmp_path, "one"), make_engine(tmp_path, "two")
        offer_engines(monkeypatch, **{"llama.cpp": second})

        async def then(host: Host) -> None:
            await add(host, first)
            async with Load(host, 4) as load:
                done = await migrate(host, make_quick_request("llama.cpp"), Told())
            assert (done.outcome, done.side_by_side, done.cut) == ("migrated", False, 0)
            assert 1 <= done.held_most <= 4 and done.held_s > 0 and set(load.statuses) == {200}
            assert host.engines[0].plan.engine_version == "two"

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(first)))

    @pytest.mark.measures
    @pytest.mark.parametrize(("seed", "pause_s", "stage"), [("other", 0.01, "answers"), ("same", SLOW_S, "traffic")])
    def test_failed_swap_restarts_the_old_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: str, pause_s: float, stage: str
    ) -> None:
        first = make_engine(tmp_path, "one")
        offer_slow_engine(monkeypatch, make_engine(tmp_path, "bad", seed=seed, pause_s=pause_s))

        async def then(host: Host) -> None:
            await add(host, first)
            async with Load(host, 4) as load:
                await until(lambda: len(load.statuses) > 10, "some requests")
                # Long enough for the six slow responses of a comparison, also on a busy machine.
                done = await migrate(host, make_quick_request("llama.cpp", most_step_s=30.0), Told())
            assert (done.outcome, done.stage, done.side_by_side) == ("rolled back", stage, False), done.reason
            assert set(load.statuses) == {200} and host.engines[0].plan.engine_version == "one"
            assert host.get_service().readied is first

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(first)))

    def test_requests_beyond_the_hold_limit_are_rejected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = make_engine(tmp_path, "one")
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})

        async def then(host: Host) -> None:
            await add(host, first)
            slow = asyncio.create_task(send_requests(host, 1, tokens=100))
            await until(lambda: host.get_service().in_flight, "a request to be in flight")
            moving = asyncio.create_task(migrate(host, make_quick_request("llama.cpp", hold_most=2), Told()))
            await until(lambda: host.gateway.routes[0].held, "requests to be held while the first engine is drained")
            answers = await send_requests(host, 5)
            done, ((status, _),) = await moving, await slow
            assert status == 200 and done.held_most == 2
            assert sorted(code for code, _ in answers) == [200, 200, 503, 503, 503]
            assert {body["error"]["code"] for code, body in answers if code == 503} == {"held_full"}

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(first)))


class TestArguments:
    def test_rejects_migration_to_the_same_plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = make_engine(tmp_path, "one")
        offer_engines(monkeypatch, **{"llama.cpp": first})

        async def then(host: Host) -> None:
            await add(host, first)
            with pytest.raises(UsageError, match="already serves alpha"):
                await migrate(host, make_quick_request("llama.cpp"), Told())
            assert host.get_service().busy is None

        with_host(then, tmp_path)

    def test_rejects_concurrent_migrations(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            moving = asyncio.create_task(migrate(host, make_quick_request("llama.cpp", steps=(50.0,)), Told()))
            await until(lambda: host.get_service().busy, "the first to begin")
            with pytest.raises(NotPossible, match="cannot be migrated now") as caught:
                await migrate(host, make_quick_request("llama.cpp"), Told())
            assert "migrating to llama.cpp" in str(caught.value.cause)
            done = await moving
            assert done.outcome == "migrated" and [step.percent for step in done.steps] == [50, 100]

        with_host(then, tmp_path)

    def test_stopping_the_host_cancels_a_migration(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offer_engines(monkeypatch, **{"llama.cpp": make_engine(tmp_path, "two")})
        moving: list[asyncio.Task[Migration]] = []

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            moving.append(asyncio.create_task(migrate(host, make_quick_request("llama.cpp"), Told())))
            await until(lambda: len(host.engines) == 2, "both engines")

        with_host(then, tmp_path)
        assert moving[0].cancelled()

    def test_rejects_plan_of_another_model_or_engine(self, tmp_path: Path) -> None:
        one = make_engine(tmp_path, "one").decided
        assert replace_decision(one, one.decision).plan == one.plan
        with pytest.raises(UsageError, match="plan is for beta"):
            replace_decision(one, replace_fields(one.decision, model="beta"))
        with pytest.raises(UsageError, match="plan is for vllm"):
            replace_decision(one, replace_fields(one.decision, engine="vllm"))

    @pytest.mark.parametrize(
        ("text", "steps"), [("10,50,100", (10, 50, 100)), (" 5% , 100% ", (5, 100)), ("100", (100,))]
    )
    def test_parses_increasing_percentages(self, text: str, steps: tuple[float, ...]) -> None:
        assert read_steps(text) == steps

    @pytest.mark.parametrize("text", ["", "0,100", "50,10", "10,10", "101", "ten", "-5", "nan"])
    def test_rejects_invalid_steps(self, text: str) -> None:
        with pytest.raises(UsageError, match="increasing percentages"):
            read_steps(text)


def test_plan_is_made_for_the_requested_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided and prepared as by `serve`, with the service's workload and budget."""
    first = make_engine(tmp_path, "one")
    seen: dict[str, object] = {}

    def decided(wanted: list[object], hardware: object, progress: object, **more: object) -> tuple[object]:
        seen.update(engine=wanted[0].engine, workload=wanted[0].workload, **more)  # type: ignore[attr-defined]
        return (first.decided,)

    monkeypatch.setattr("bedplate.changing.migrate.decide_engines", decided)
    monkeypatch.setattr("bedplate.changing.migrate.prepare_model", lambda one, progress, **more: first)

    async def then(host: Host) -> None:
        await add(host, first)
        ready = MigrationRun(host, host.get_service(), make_quick_request("vllm"), Told())._prepare_in_thread(None)  # type: ignore[arg-type]
        assert ready is first and seen["engine"] == "vllm"
        assert seen["workload"] == first.decided.wanted.workload and seen["budget_bytes"] == host.room.budget_bytes

    with_host(then, tmp_path)
