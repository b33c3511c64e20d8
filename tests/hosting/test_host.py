"""Engines come and go behind one endpoint while it runs, by hand, on demand, and as memory allows."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.hosting.stub_hosts import DIES, add, ask, needs, pid_in, stub_environment, stub_readied, with_host
from tests.run.test_supervisor import until

from bedplate.errors import AnswerIsNo, BadQuestion, OutsideFailed
from bedplate.hosting.host import Host
from bedplate.hosting.status import status
from bedplate.hosting.tenants import add_key
from bedplate.run.environments import Environment
from bedplate.serving.serve import declare_tenants
from bedplate.show.services import render_list, render_status
from bedplate.values.record import from_json, to_json
from bedplate.values.service import HostStatus, Order, ServiceRecord
from bedplate.values.tenant import Declared


@pytest.fixture
def stub(tmp_path: Path, bedplate_home: Path) -> Environment:
    return stub_environment(tmp_path / "stub")


class TestEngines:
    def test_one_more_engine_takes_over_from_the_first_without_a_lost_answer(
        self, stub: Environment, tmp_path: Path
    ) -> None:
        async def then(host: Host) -> None:
            one = stub_readied("alpha", stub)
            await add(host, one)
            (first,) = host.engines
            slow = asyncio.create_task(ask(host, "alpha", 2500))
            await until(lambda: first.backend.in_flight, "the slow answer to be under way")
            second = await host.add_engine(one.start(), share=0)
            assert [engine.id for engine in host.engines] == ["llama.cpp-1", "llama.cpp-2"]
            assert pid_in(await ask(host, "alpha")) == first.pid
            second.backend.share = 1.0
            assert not slow.done()
            assert await host.remove_engine(first, 10), "it waits for the answer under way"
            assert slow.done() and pid_in(await slow) not in (None, second.pid)
            assert pid_in(await ask(host, "alpha")) == second.pid
            assert host.engines == (second,)

        with_host(then, tmp_path)

    def test_answers_that_take_too_long_are_cut_with_an_error(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = stub_readied("alpha", stub)
            await add(host, one)
            (first,) = host.engines
            slow = asyncio.create_task(ask(host, "alpha", 60_000))
            await until(lambda: first.backend.in_flight, "the slow answer to be under way")
            await host.add_engine(one.start())
            assert not await host.remove_engine(first, 0.1)
            code, body = await slow
            assert code in (502, 503) and body["error"]["message"]

        with_host(then, tmp_path)

    def test_an_engine_that_does_not_start_leaves_the_others_alone(self, stub: Environment, tmp_path: Path) -> None:
        broken = stub_environment(tmp_path / "broken", DIES)

        async def then(host: Host) -> None:
            one = stub_readied("alpha", stub)
            await add(host, one)
            with pytest.raises(OutsideFailed, match="did not start"):
                await host.add_engine(replace(one.start(), environment=broken), share=0)
            assert len(host.engines) == 1 and pid_in(await ask(host, "alpha")) == host.engines[0].pid

        with_host(then, tmp_path)

    def test_replicas_share_the_requests(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, replicas=3))
            # Conversations stay where they are, unless that replica has four more under way than another.
            answers = await asyncio.gather(*(ask(host, "alpha", 300, f"number {n}") for n in range(18)))
            assert {pid_in(answer) for answer in answers} == {engine.pid for engine in host.engines}
            assert len(host.engines) == 3

        with_host(then, tmp_path)

    def test_what_does_not_fit_beside_the_others_is_not_started(self, stub: Environment, tmp_path: Path) -> None:
        one = stub_readied("alpha", stub)

        async def then(host: Host) -> None:
            await add(host, one)
            with pytest.raises(AnswerIsNo, match="does not fit next to") as caught:
                await host.add_engine(one.start())
            assert "budget" in str(caught.value.cause)

        with_host(then, tmp_path, budget_bytes=round(1.5 * needs(one)))

    def test_what_a_plan_needs_is_what_its_decision_counted(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = stub_readied("alpha", stub)
            assert dict(host.need_of(one.plan)) == dict(one.needs[0])

        with_host(then, tmp_path)

    def test_engines_of_nothing_that_is_served_are_refused(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = stub_readied("alpha", stub)
            with pytest.raises(BadQuestion, match="not served"):
                await host.add_engine(one.start())
            await add(host, one)
            with pytest.raises(BadQuestion, match="already served"):
                await add(host, one)

        with_host(then, tmp_path)


class TestSeveralModels:
    def test_a_request_goes_to_the_model_that_it_names(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            for name in ("alpha", "beta"):
                await add(host, stub_readied(name, stub))
            pids = {name: host.service(name).engines[0].pid for name in ("alpha", "beta")}
            assert pids == {name: pid_in(await ask(host, name)) for name in pids}
            code, body = await ask(host, "gamma")
            assert code == 404 and "alpha, beta" in body["error"]["message"]

        with_host(then, tmp_path)


class TestOnDemand:
    def test_it_is_loaded_by_its_first_request_and_unloaded_after_its_time(
        self, stub: Environment, tmp_path: Path
    ) -> None:
        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=0.6))
            service = host.service()
            assert not host.engines
            # All of them wait for one start.
            answers = await asyncio.gather(*(ask(host, "alpha") for _ in range(5)))
            assert len({pid_in(answer) for answer in answers}) == 1
            await ask(host, "alpha", 1500)  # longer than its time: a model in use stays
            assert service.state == "ready"
            await until(lambda: not service.engines, "it to be unloaded", 10)
            assert pid_in(await ask(host, "alpha")) != pid_in(answers[0])

        with_host(then, tmp_path)

    def test_all_of_its_names_load_it(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=600))
            service = host.service()
            for name in ("/models/ALPHA.gguf", "alpha"):
                assert pid_in(await ask(host, name)) == host.engines[0].pid
                await host.unload(service)
            code, _ = await ask(host, "/models/beta.gguf")
            assert code == 404

        with_host(then, tmp_path)

    def test_it_says_that_it_is_being_loaded(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=600))
            service = host.service()
            assert service.doing is None
            loading = asyncio.create_task(host.load(service))
            await until(lambda: service.busy, "it to begin")
            assert service.doing == "loading"
            await loading
            assert service.doing is None
            service.at_rest.clear()
            assert service.doing == "unloading"
            service.at_rest.set()

        with_host(then, tmp_path)

    def test_preload_loads_it_at_once(self, stub: Environment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=600, preload=True))
            assert host.service().state == "ready"

        with_host(then, tmp_path)

    def test_the_one_used_longest_ago_makes_room(self, stub: Environment, tmp_path: Path) -> None:
        models = [stub_readied(name, stub, ttl_s=600) for name in ("alpha", "beta", "gamma")]

        async def then(host: Host) -> None:
            for one in models:
                await add(host, one)
            for name in ("alpha", "beta", "alpha", "gamma"):
                pid_in(await ask(host, name))
            states = {name: service.state for name, service in host.services.items()}
            assert states == {"alpha": "ready", "beta": "unloaded", "gamma": "ready"}

        with_host(then, tmp_path, budget_bytes=round(2.5 * needs(models[0])))

    def test_a_model_in_use_is_waited_for_and_never_unloaded(self, stub: Environment, tmp_path: Path) -> None:
        models = [stub_readied(name, stub, ttl_s=600) for name in ("alpha", "beta")]

        async def then(host: Host) -> None:
            for one in models:
                await add(host, one)
            long = asyncio.create_task(ask(host, "alpha", 1000))
            await until(lambda: host.service("alpha").in_flight, "the first model to be in use")
            pid_in(await ask(host, "beta"))
            assert long.done() and pid_in(await long)
            assert host.service("alpha").state == "unloaded"

        with_host(then, tmp_path, budget_bytes=round(1.5 * needs(models[0])))

    def test_what_can_never_fit_gets_a_clear_503(self, stub: Environment, tmp_path: Path) -> None:
        stays, wants = stub_readied("alpha", stub), stub_readied("beta", stub, ttl_s=600)

        async def then(host: Host) -> None:
            await add(host, stays)
            await add(host, wants)
            code, body = await ask(host, "beta")
            assert code == 503 and body["error"]["code"] == "not_running"
            assert "not enough memory for beta next to alpha" in body["error"]["message"]
            assert host.service("beta").state == "failed" and pid_in(await ask(host, "alpha"))

        with_host(then, tmp_path, budget_bytes=round(1.5 * needs(stays)))

    def test_a_load_that_fails_is_told_and_tried_again_by_the_next_request(
        self, stub: Environment, tmp_path: Path
    ) -> None:
        program = Path(stub.path) / "bin" / "llama-server"
        good = program.read_text()
        program.write_text(DIES)

        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=600))
            code, body = await ask(host, "alpha")
            assert code == 503 and "no good" in body["error"]["message"] and not host.engines
            program.write_text(good)
            assert pid_in(await ask(host, "alpha"))
            assert host.service().failure is None

        with_host(then, tmp_path)

    def test_requests_wait_while_a_killed_engine_comes_back(self, stub: Environment, tmp_path: Path) -> None:
        import os
        import signal

        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, ttl_s=600))
            first = pid_in(await ask(host, "alpha"))
            os.kill(first, signal.SIGKILL)
            await until(lambda: host.engines[0].state != "ready", "the death to be seen")
            assert pid_in(await ask(host, "alpha")) != first

        with_host(then, tmp_path)


class TestTenantsOfAnOrder:
    def test_they_are_those_of_its_endpoint_which_says_what_is_odd_about_them(
        self, stub: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))  # with keys of its own
        order = Order(tenants=(Declared(name="ann", weight=2.0), Declared(name="bob")))
        add_key("ann", {"weight": 5.0})

        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub, tenants=("ann",)))
            declare_tenants(host, order)
            code, body = await ask(host, "alpha")
            assert code == 401 and body["error"]["code"] == "invalid_api_key"
            ann = host.gateway.tenants.member("ann")
            assert ann is not None and ann.weight == 2.0
            assert list(host.notes)[-2:] == [
                "bob has no key yet and cannot send requests: run bedplate keys add bob",
                "ann: weight 2 from the file applies here, not 5 from bedplate keys",
            ]

        with_host(then, tmp_path)


class TestStatus:
    def test_it_says_what_there_is_and_round_trips(self, stub: Environment, tmp_path: Path) -> None:
        record = ServiceRecord(
            name="test", pid=1, birth="b", socket="s", log="l", version="1", started_at="2026-01-01T00:00:00+00:00"
        )

        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub))
            await add(host, stub_readied("beta", stub, ttl_s=60))
            slow = asyncio.create_task(ask(host, "alpha", 1000))
            await until(lambda: host.service("alpha").in_flight, "an answer to be under way")
            found = await status(host, record)
            await slow
            assert from_json(HostStatus, to_json(found)) == found
            alpha, beta = found.models
            assert (alpha.state, beta.state, found.in_flight) == ("ready", "unloaded", 1)
            assert alpha.engines[0].pid == host.engines[0].pid and alpha.why and alpha.engines[0].in_flight == 1
            assert alpha.engines[0].memory_bytes is not None and alpha.engines[0].memory_bytes > 1_000_000
            assert beta.planned_bytes == alpha.planned_bytes > 100_000_000

        with_host(then, tmp_path)

    def test_what_is_being_done_is_in_the_list_and_in_the_status(self, stub: Environment, tmp_path: Path) -> None:
        record = ServiceRecord(
            name="test", pid=1, birth="b", socket="s", log="l", version="1", started_at="2026-01-01T00:00:00+00:00"
        )

        async def then(host: Host) -> None:
            await add(host, stub_readied("alpha", stub))
            with host.service().engaged("migrating to vllm: it gets 10 % of the requests"):
                found = await status(host, record)
            assert found.models[0].busy == "migrating to vllm: it gets 10 % of the requests"
            console = Console(width=250, record=True, file=io.StringIO())
            console.print(render_list([(record, found)]))
            assert "ready, migrating to vllm " in console.export_text()
            console.print(render_status(found))
            assert "migrating to vllm: it gets 10 % of the requests" in console.export_text()
            assert host.service().doing is None
            with host.service().engaged("loading"), pytest.raises(RuntimeError), host.service().engaged("migrating"):
                raise AssertionError("two at once")

        with_host(then, tmp_path)
