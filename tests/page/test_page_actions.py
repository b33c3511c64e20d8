"""What the live page offers beyond figures: deviations from the plan, recent requests, logs and actions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.hosting.stub_hosts import add, ask, make_stub_environment, make_stub_readied, with_host
from tests.page.test_live import ANNS, OPERATOR, get, make_request, read_live, require_keys
from tests.run.test_supervisor import until

from bedplate.changing.operations import CHANGING_OPERATIONS
from bedplate.hosting.control import Operation
from bedplate.hosting.host import Host
from bedplate.hosting.operations import ModelRequest, load, unload
from bedplate.page.deviations import list_deviations
from bedplate.page.live import LiveRecorder, ModelSnapshot
from bedplate.page.page import ACTIONS, LOG, CpuReading, LiveFigures, _compute_cpu_share, add_live_page
from bedplate.run.environments import EngineEnvironment
from bedplate.values import LatencyTarget, replace_fields
from bedplate.values.decision import Estimate
from bedplate.values.live import LiveEngine, LiveModel, RecentLatency
from bedplate.values.record import make_estimate

OPERATIONS = {"load": Operation(ModelRequest, load), "unload": Operation(ModelRequest, unload), **CHANGING_OPERATIONS}
MB = 1_000_000
PLANNED = LiveModel(
    model="alpha",
    state="ready",
    context_tokens=1024,
    engines=(
        LiveEngine(
            id="llama.cpp-1", engine="llama.cpp", version="1", device="cpu", state="ready", memory_bytes=100 * MB,
            planned_bytes=200 * MB, kv_use=0.5,
        ),
    ),
    expected=Estimate(
        ttft_ms=make_estimate(100, 0.5), tpot_ms=make_estimate(10, 0.5), output_tok_s=make_estimate(100, 0.5)
    ),
    expected_in_flight=2,
    slots=4,
    waiting=0,
    ttft=RecentLatency(p50_ms=120, p95_ms=400),
    tpot=RecentLatency(p50_ms=12, p95_ms=30),
    output_tok_s=80,
    ended=20,
    failed=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def use_temporary_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def stub(tmp_path: Path) -> EngineEnvironment:
    return make_stub_environment(tmp_path / "stub")


def list_texts(in_flight: float = 2.0, **changes: Any) -> list[str]:
    return [one.text for one in list_deviations(replace_fields(PLANNED, **changes), in_flight)]


class TestDeviations:
    def test_nothing_is_listed_within_the_plan_or_better(self) -> None:
        assert list_texts() == []
        assert list_texts(ttft=RecentLatency(p50_ms=1, p95_ms=2), output_tok_s=900.0) == []

    def test_each_figure_that_is_worse_gets_a_sentence(self) -> None:
        slow = RecentLatency(p50_ms=1600, p95_ms=2000)
        assert list_texts(ttft=slow) == [
            "Time to first token is above the plan: median 1.60 s, planned at most 150 ms."
        ]
        assert "planned at most 15 ms with 2 in flight; 8 were in flight" in list_texts(8.0, tpot=slow)[0]
        assert list_texts(output_tok_s=20.0) == ["Output is below the plan: 20 tokens/s, planned at least 50."]
        assert list_texts(failed=3) == ["3 of 20 requests failed in the last minute."]
        assert list_texts(waiting=1) == ["1 request waits for one of the 4 slots."]
        full = replace_fields(PLANNED.engines[0], memory_bytes=300 * MB, kv_use=0.97)
        memory, cache = list_texts(engines=(full,))
        assert memory.startswith("llama.cpp-1 uses ") and "planned at most" in memory
        assert cache.startswith("The KV cache of llama.cpp-1 is 97% full")

    def test_a_target_replaces_the_planned_latency(self) -> None:
        target = LatencyTarget(ttft_ms=300)
        assert list_texts(target=target) == [
            "Time to first token misses the target: 95th percentile 400 ms, target 300 ms."
        ]
        assert list_texts(target=target, ttft=RecentLatency(p50_ms=250, p95_ms=290)) == []

    def test_few_requests_or_little_load_are_not_compared(self) -> None:
        assert list_texts(ended=2, ttft=RecentLatency(p50_ms=9000, p95_ms=9000)) == []
        assert list_texts(1.0, output_tok_s=20.0) == []


class TestFigures:
    def test_statuses_waits_and_cache_hits_are_counted(self) -> None:
        recorder = LiveRecorder(1000.0)
        recorder.record_request(make_request(tenant="ann", cached_tokens=50, wait_ms=30.0))
        recorder.record_request(make_request(tenant="bob", outcome="failed", status=502))
        recorder.record_request(make_request(tenant="ann", outcome="turned_away", status=429, duration_ms=0.0))
        recorder.end_second({"alpha": ModelSnapshot(1, 0, cpu_share=0.5)}, now_s=1001.0)
        assert recorder.count_statuses() == {"200": 1, "429": 1, "502": 1}
        assert recorder.count_statuses("ann") == {"200": 1, "429": 1} and recorder.count_statuses("carol") == {}
        series = recorder.build_history(["alpha"]).models["alpha"]
        assert series.cached_share == (0.25,) and series.prompt_tok_s == (200.0,) and series.cpu_share == (0.5,)
        assert series.wait_p50_ms[0] == pytest.approx(30, rel=0.016)
        for second in range(700):
            recorder.end_second({}, now_s=1002.0 + second)
        assert recorder.count_statuses() == {} and recorder.count_statuses("ann") == {}

    def test_recent_requests_are_shapes_newest_first(self) -> None:
        recorder = LiveRecorder(1000.0)
        for number in range(500):
            recorder.record_request(make_request(tenant="ann" if number % 2 else "bob", prompt_tokens=number))
        assert [one.prompt_tokens for one in recorder.list_requests(2)] == [499, 498]
        assert [one.prompt_tokens for one in recorder.list_requests(2, "bob")] == [498, 496]
        fields = {field.name for field in msgspec.structs.fields(type(recorder.list_requests(1)[0]))}
        assert not fields & {"prefix_hashes", "body", "messages", "prompt", "text"}

    def test_cpu_share_is_of_the_allowed_cores_and_of_one_process(self) -> None:
        before, now = CpuReading(100.0, 7, 10.0), CpuReading(102.0, 7, 13.0)
        assert _compute_cpu_share(before, now, 2) == 0.75
        assert _compute_cpu_share(before, CpuReading(102.0, 8, 1.0), 2) is None
        assert _compute_cpu_share(None, now, 2) is None


def with_page(stub: EngineEnvironment, tmp_path: Path, then: Callable[[Host, LiveFigures], Awaitable[None]]) -> None:
    async def run(host: Host) -> None:
        figures = add_live_page(host, OPERATIONS)
        await add(host, make_stub_readied("alpha", stub))
        await then(host, figures)

    with_host(run, tmp_path)


async def post(host: Host, what: object, key: str | None = None, **headers: str) -> tuple[int, Any]:
    body = what if isinstance(what, bytes) else msgspec.json.encode(what)
    given = {"content-type": "application/json", **headers, **({"authorization": f"Bearer {key}"} if key else {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{host.url}{ACTIONS}", data=body, headers=given) as answer,
    ):
        return answer.status, await answer.json()


async def act(host: Host, figures: LiveFigures, do: str, **given: object) -> str:
    """The outcome of an action."""
    assert await post(host, {"do": do, "with": {"model": "alpha", **given}}) == (202, {"accepted": do})
    await until(lambda: figures.actions.report is not None and figures.actions.report.state != "running", do)
    report = (await read_live(host)).action
    assert report is not None
    return f"{report.state}: {report.text}"


class TestActions:
    def test_an_unloaded_model_is_loaded_by_an_action_or_by_the_next_request(
        self, stub: EngineEnvironment, tmp_path: Path
    ) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            assert await act(host, figures, "load") == "failed: alpha is already loaded"
            assert await act(host, figures, "unload") == "done: done"
            live = await read_live(host)
            assert live.may_act and live.models[0].state == "unloaded" and not host.engines
            assert (await get(host, "/health"))[0] == 200
            assert (await act(host, figures, "unload")).startswith("failed: alpha is not loaded")
            assert await act(host, figures, "load") == "done: done" and len(host.engines) == 1
            await act(host, figures, "unload")
            assert (await ask(host, "alpha"))[0] == 200 and len(host.engines) == 1
            # It is again a model that has to be there for the endpoint to be healthy.
            route = host.gateway.find_route("alpha")
            assert route is not None and not route.on_demand

        with_page(stub, tmp_path, then)

    def test_a_failed_action_says_why(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            assert (await act(host, figures, "cancel")).startswith("failed: no migration is running")
            assert (await act(host, figures, "migrate", engine="nothing")).startswith("failed: ")
            assert any("migrate on the live page failed" in one for one in host.notes)
            assert host.get_service().state == "ready"

        with_page(stub, tmp_path, then)

    def test_requests_that_are_not_actions_are_rejected(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            deep = b'{"do": "load", "with": {"model": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
            mistakes = (b"", b"[]", b"{}", b'{"do": 1}', b'{"do": "\xff"}', deep, {"do": "load", "with": {"model": 7}})
            for body in mistakes:
                status, answer = await post(host, body)
                assert status == 400 and answer["error"]["code"] == "bad_body", body
            for name in ("stop", "say", "status", "shadow", "__class__"):
                status, answer = await post(host, {"do": name})
                assert status == 400 and answer["error"]["code"] == "unknown_action"
            assert (await get(host, ACTIONS))[0] == 405
            assert figures.actions.report is None

        with_page(stub, tmp_path, then)

    def test_other_origins_and_forms_are_refused(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        unload_alpha = {"do": "unload", "with": {"model": "alpha"}}

        async def then(host: Host, figures: LiveFigures) -> None:
            from bedplate.run.gateway.origins import OriginPolicy

            host.gateway.origins = OriginPolicy((), ["https://chat.example.com"])
            for origin in ("https://chat.example.com", "http://127.0.0.1:1", "null"):
                assert (await post(host, unload_alpha, origin=origin))[0] == 403, origin
            assert (await post(host, unload_alpha, **{"content-type": "text/plain"}))[0] == 415
            require_keys(host)
            assert (await post(host, unload_alpha, OPERATOR, origin="https://chat.example.com"))[0] == 403
            assert host.engines and figures.actions.report is None
            assert (await post(host, unload_alpha, OPERATOR, origin=host.url))[0] == 202

        with_page(stub, tmp_path, then)

    def test_only_the_operator_and_admins_may_act(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            require_keys(host)
            for key, status in ((None, 401), ("wrong", 401), (ANNS, 403)):
                assert (await post(host, {"do": "unload"}, key))[0] == status
            assert not (await read_live(host, ANNS)).may_act and (await read_live(host, OPERATOR)).may_act
            require_keys(host, admin=True)
            assert (await post(host, {"do": "load"}, ANNS))[0] == 202

        with_page(stub, tmp_path, then)

    def test_without_keys_nobody_may_act_beyond_loopback(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            host.listen = msgspec.structs.replace(host.listen, host="0.0.0.0")
            assert (await post(host, {"do": "unload"}))[0] == 403
            live = await read_live(host)
            assert not live.may_act and not live.models[0].targets
            require_keys(host)
            assert (await read_live(host, OPERATOR)).may_act

        with_page(stub, tmp_path, then)


class TestLogsAndRequests:
    def test_logs_are_for_the_operator(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            host.say("something happened")
            live = await read_live(host)
            assert live.logs == ("service", "llama.cpp-1")
            for name, line in (("service", "something happened"), ("llama.cpp-1", "listening")):
                status, _, text = await get(host, f"{LOG}?of={name}")
                assert status == 200 and line in text
            for name in ("../../etc/passwd", "llama.cpp-2", ""):
                assert (await get(host, f"{LOG}?of={name}"))[0] in (200, 404)
                assert "root:" not in (await get(host, f"{LOG}?of={name}"))[2]
            require_keys(host)
            assert (await get(host, LOG))[0] == 401
            assert (await get(host, LOG, authorization=f"Bearer {ANNS}"))[0] == 403
            assert not (await read_live(host, ANNS)).logs

        with_page(stub, tmp_path, then)

    def test_a_tenant_sees_its_own_requests_and_no_contents(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            await ask(host, "alpha", words="a secret question")
            figures.recorder.record_request(make_request(time.time(), tenant="ann", prompt_tokens=77))
            _, _, text = await get(host, "/bedplate/live")
            assert "secret" not in text
            whole = await read_live(host)
            assert [one.tenant for one in whole.requests] == ["ann", "default"] and whole.statuses == {"200": 2}
            require_keys(host)
            own = await read_live(host, ANNS)
            assert [one.prompt_tokens for one in own.requests] == [77] and own.statuses == {"200": 1}

        with_page(stub, tmp_path, then)
