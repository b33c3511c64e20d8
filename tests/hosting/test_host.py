"""A host adds and removes engines at run time: by request, on demand, and within its memory."""

from __future__ import annotations

import asyncio
import io
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import invoke
from tests.conftest import HANG_S
from tests.hosting.stub_hosts import (
    DIES,
    add,
    ask,
    count_need_bytes,
    make_stub_environment,
    make_stub_readied,
    read_pid,
    with_host,
)
from tests.run.test_supervisor import until

from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.hosting.host import Host
from bedplate.hosting.status import collect_status
from bedplate.hosting.tenants import add_key, revoke
from bedplate.run.environments import EngineEnvironment
from bedplate.run.listening import ListenOptions, check_port
from bedplate.serving.serve import declare_tenants
from bedplate.show.services import render_list, render_status
from bedplate.values.record import from_json, to_json
from bedplate.values.service import HostStatus, Order, ServiceRecord
from bedplate.values.tenant import DeclaredTenant


@pytest.fixture
def stub(tmp_path: Path, bedplate_home: Path) -> EngineEnvironment:
    return make_stub_environment(tmp_path / "stub")


def test_a_port_that_is_taken_meanwhile_is_replaced_by_a_free_one_only_if_any_will_do(tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        assert host.gateway.url.startswith("http://127.0.0.1:") and not host.gateway.url.endswith(f":{port}")
        assert (await ask(host, "nothing"))[0] == 404

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        check_port(ListenOptions(port=port, any_port=True))
        with_host(then, tmp_path, listen=ListenOptions(port=port, any_port=True))
        for step in (check_port, lambda listen: with_host(then, tmp_path, listen=listen)):
            with pytest.raises(ExternalFailure, match=f"port {port} on 127.0.0.1 is in use"):
                step(ListenOptions(port=port))


class TestEngines:
    def test_second_engine_replaces_the_first_without_lost_requests(
        self, stub: EngineEnvironment, tmp_path: Path
    ) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub)
            await add(host, one)
            (first,) = host.engines
            go = tmp_path / "go"
            slow = asyncio.create_task(ask(host, "alpha", words=f"after {go}"))
            await until(lambda: first.backend.in_flight, "the slow request to be in flight")
            second = await host.add_engine(one.build_start(), share=0)
            assert [engine.id for engine in host.engines] == ["llama.cpp-1", "llama.cpp-2"]
            assert read_pid(await ask(host, "alpha")) == first.pid
            second.backend.share = 1.0
            removing = asyncio.create_task(host.remove_engine(first, HANG_S))
            await until(lambda: first.leaving, "the first engine to leave")
            assert not slow.done()
            go.touch()
            assert await removing, "it waits for the running request"
            assert slow.done() and read_pid(await slow) not in (None, second.pid)
            assert read_pid(await ask(host, "alpha")) == second.pid
            assert host.engines == (second,)

        with_host(then, tmp_path)

    def test_requests_beyond_the_drain_time_end_with_an_error(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub)
            await add(host, one)
            (first,) = host.engines
            slow = asyncio.create_task(ask(host, "alpha", 60_000))
            await until(lambda: first.backend.in_flight, "the slow request to be in flight")
            await host.add_engine(one.build_start())
            assert not await host.remove_engine(first, 0.1)
            code, body = await slow
            assert code in (502, 503) and body["error"]["message"]

        with_host(then, tmp_path)

    def test_failed_start_does_not_affect_other_engines(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        broken = make_stub_environment(tmp_path / "broken", DIES)

        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub)
            await add(host, one)
            with pytest.raises(ExternalFailure, match="did not start"):
                await host.add_engine(replace(one.build_start(), environment=broken), share=0)
            assert len(host.engines) == 1 and read_pid(await ask(host, "alpha")) == host.engines[0].pid

        with_host(then, tmp_path)

    def test_replicas_share_the_requests(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, replicas=3))
            # A conversation stays at its replica unless that has four more requests in flight than another.
            answers = await asyncio.gather(*(ask(host, "alpha", 300, f"number {n}") for n in range(18)))
            assert {read_pid(answer) for answer in answers} == {engine.pid for engine in host.engines}
            assert len(host.engines) == 3

        with_host(then, tmp_path)

    def test_engine_that_does_not_fit_is_not_started(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        one = make_stub_readied("alpha", stub)

        async def then(host: Host) -> None:
            await add(host, one)
            with pytest.raises(NotPossible, match="does not fit next to") as caught:
                await host.add_engine(one.build_start())
            assert "budget" in str(caught.value.cause)

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(one)))

    def test_memory_of_a_plan_equals_that_of_its_decision(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub)
            assert dict(host.compute_need(one.plan)) == dict(one.needs[0])

        with_host(then, tmp_path)

    def test_rejects_engine_for_a_model_that_is_not_served(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub)
            with pytest.raises(UsageError, match="not served"):
                await host.add_engine(one.build_start())
            await add(host, one)
            with pytest.raises(UsageError, match="already served"):
                await add(host, one)

        with_host(then, tmp_path)


class TestSeveralModels:
    def test_request_goes_to_the_model_it_names(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            for name in ("alpha", "beta"):
                await add(host, make_stub_readied(name, stub))
            pids = {name: host.get_service(name).engines[0].pid for name in ("alpha", "beta")}
            assert pids == {name: read_pid(await ask(host, name)) for name in pids}
            code, body = await ask(host, "gamma")
            assert code == 404 and "alpha, beta" in body["error"]["message"]

        with_host(then, tmp_path)


class TestOnDemand:
    def test_loads_on_first_request_and_unloads_after_ttl(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=0.6))
            service = host.get_service()
            assert not host.engines
            # All of them wait for one start.
            answers = await asyncio.gather(*(ask(host, "alpha") for _ in range(5)))
            assert len({read_pid(answer) for answer in answers}) == 1
            await ask(host, "alpha", 1500)  # longer than the TTL: a model in use stays loaded
            assert service.state == "ready"
            await until(lambda: not service.engines, "it to be unloaded", 10)
            assert read_pid(await ask(host, "alpha")) != read_pid(answers[0])

        with_host(then, tmp_path)

    def test_every_alias_loads_the_model(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=600))
            service = host.get_service()
            for name in ("/models/ALPHA.gguf", "alpha"):
                assert read_pid(await ask(host, name)) == host.engines[0].pid
                await host.unload(service)
            code, _ = await ask(host, "/models/beta.gguf")
            assert code == 404

        with_host(then, tmp_path)

    def test_state_is_loading_during_the_load(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=600))
            service = host.get_service()
            assert service.current_operation is None
            loading = asyncio.create_task(host.load(service))
            await until(lambda: service.busy, "it to begin")
            assert service.current_operation == "loading"
            await loading
            assert service.current_operation is None
            service.at_rest.clear()
            assert service.current_operation == "unloading"
            service.at_rest.set()

        with_host(then, tmp_path)

    def test_preload_loads_at_start(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=600, preload=True))
            assert host.get_service().state == "ready"

        with_host(then, tmp_path)

    def test_least_recently_used_model_is_unloaded(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        models = [make_stub_readied(name, stub, ttl_s=600) for name in ("alpha", "beta", "gamma")]

        async def then(host: Host) -> None:
            for one in models:
                await add(host, one)
            for name in ("alpha", "beta", "alpha", "gamma"):
                read_pid(await ask(host, name))
            states = {name: service.state for name, service in host.services.items()}
            assert states == {"alpha": "ready", "beta": "unloaded", "gamma": "ready"}

        with_host(then, tmp_path, budget_bytes=round(2.5 * count_need_bytes(models[0])))

    def test_load_waits_for_a_model_in_use(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        models = [make_stub_readied(name, stub, ttl_s=600) for name in ("alpha", "beta")]

        async def then(host: Host) -> None:
            for one in models:
                await add(host, one)
            long = asyncio.create_task(ask(host, "alpha", 1000))
            await until(lambda: host.get_service("alpha").in_flight, "the first model to be in use")
            read_pid(await ask(host, "beta"))
            assert long.done() and read_pid(await long)
            assert host.get_service("alpha").state == "unloaded"

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(models[0])))

    def test_model_that_never_fits_gets_503(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        stays, wants = make_stub_readied("alpha", stub), make_stub_readied("beta", stub, ttl_s=600)

        async def then(host: Host) -> None:
            await add(host, stays)
            await add(host, wants)
            code, body = await ask(host, "beta")
            assert code == 503 and body["error"]["code"] == "not_running"
            told = body["error"]["message"]
            assert "not enough memory for beta next to the loaded models" in told
            assert "alpha" not in told, "the client may not know of it"
            assert "alpha cannot be unloaded now" in str(host.get_service("beta").failure)
            said = [note for note in host.notes if "could not be loaded" in note]
            assert (await ask(host, "beta"))[0] == 503
            assert [note for note in host.notes if "could not be loaded" in note] == said != []
            assert host.get_service("beta").state == "failed" and read_pid(await ask(host, "alpha"))

        with_host(then, tmp_path, budget_bytes=round(1.5 * count_need_bytes(stays)))

    def test_failed_load_is_reported_and_retried_by_the_next_request(
        self, stub: EngineEnvironment, tmp_path: Path
    ) -> None:
        program = Path(stub.path) / "bin" / "llama-server"
        good = program.read_text()
        program.write_text(DIES)

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=600))
            code, body = await ask(host, "alpha")
            assert code == 503 and "no good" in body["error"]["message"] and not host.engines
            program.write_text(good)
            assert read_pid(await ask(host, "alpha"))
            assert host.get_service().failure is None

        with_host(then, tmp_path)

    def test_requests_wait_while_a_killed_engine_restarts(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        import os
        import signal

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, ttl_s=600))
            first = read_pid(await ask(host, "alpha"))
            os.kill(first, signal.SIGKILL)
            await until(lambda: host.engines[0].state != "ready", "the death to be seen")
            assert read_pid(await ask(host, "alpha")) != first

        with_host(then, tmp_path)


class TestOrderTenants:
    def test_tenants_of_the_order_apply_with_warnings(
        self, stub: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))  # a separate store of keys
        order = Order(tenants=(DeclaredTenant(name="ann", weight=2.0), DeclaredTenant(name="bob")))
        add_key("ann", {"weight": 5.0})

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub, tenants=("ann",)))
            declare_tenants(host, order)
            code, body = await ask(host, "alpha")
            assert code == 401 and body["error"]["code"] == "invalid_api_key"
            ann = host.gateway.tenants.get_member("ann")
            assert ann is not None and ann.weight == 2.0
            assert list(host.notes)[-2:] == [
                "bob has no key yet and cannot send requests: run bedplate keys add bob",
                "ann: weight 2 from the file applies here, not 5 from bedplate keys",
            ]

        with_host(then, tmp_path)


class TestKeys:
    def test_serve_prints_how_to_open_an_endpoint_that_lost_its_keys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
        add_key("ann", {})
        revoke("ann")

        async def then(host: Host) -> None:
            declare_tenants(host, Order())
            assert host.gateway.needs_key
            assert "bedplate keys open" in host.notes[-1] and "bedplate keys add" in host.notes[-1]

        with_host(then, tmp_path)
        assert invoke("keys", "open").code == 0

        async def then_open(host: Host) -> None:
            declare_tenants(host, Order())
            assert not host.gateway.needs_key and not host.notes

        with_host(then_open, tmp_path)


class TestStatus:
    def test_reports_models_and_engines_and_round_trips(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        record = ServiceRecord(
            name="test", pid=1, birth="b", socket="s", log="l", version="1", started_at="2026-01-01T00:00:00+00:00"
        )

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub))
            await add(host, make_stub_readied("beta", stub, ttl_s=60))
            running = asyncio.create_task(ask(host, "alpha", 600_000))
            await until(lambda: host.get_service("alpha").in_flight, "a request to be in flight")
            found = await collect_status(host, record)
            running.cancel()
            assert from_json(HostStatus, to_json(found)) == found
            alpha, beta = found.models
            assert (alpha.state, beta.state, found.in_flight) == ("ready", "unloaded", 1)
            assert alpha.engines[0].pid == host.engines[0].pid and alpha.why and alpha.engines[0].in_flight == 1
            assert alpha.engines[0].memory_bytes is not None and alpha.engines[0].memory_bytes > 1_000_000
            assert beta.planned_bytes == alpha.planned_bytes > 100_000_000

        with_host(then, tmp_path)

    def test_current_operation_is_in_list_and_status(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        record = ServiceRecord(
            name="test", pid=1, birth="b", socket="s", log="l", version="1", started_at="2026-01-01T00:00:00+00:00"
        )

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", stub))
            with host.get_service().engage("migrating to vllm: it gets 10 % of the requests"):
                found = await collect_status(host, record)
            assert found.models[0].busy == "migrating to vllm: it gets 10 % of the requests"
            console = Console(width=250, record=True, file=io.StringIO())
            console.print(render_list([(record, found)]))
            assert "ready, migrating to vllm " in console.export_text()
            console.print(render_status(found))
            assert "migrating to vllm: it gets 10 % of the requests" in console.export_text()
            assert host.get_service().current_operation is None
            with (
                host.get_service().engage("loading"),
                pytest.raises(RuntimeError),
                host.get_service().engage("migrating"),
            ):
                raise AssertionError("two at once")

        with_host(then, tmp_path)
