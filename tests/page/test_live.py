"""The live page: counters per second, access, and the bottleneck."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.plans import machine
from tests.hosting.stub_hosts import add, ask, make_stub_environment, make_stub_readied, with_host
from tests.run.test_supervisor import until

from bedplate import store
from bedplate.engines import EngineState
from bedplate.hosting.host import Host
from bedplate.page.binding import HOLD_S, IDLE, TOO_FEW, NamedBottleneck, diagnose_window, keep_bottleneck
from bedplate.page.live import (
    MOST_RECENT,
    MOST_TENANTS,
    SPAN_S,
    SPELL_S,
    WINDOW_S,
    LiveRecorder,
    ModelSnapshot,
    RequestCounts,
    build_series,
    find_bucket,
    summarize_times,
)
from bedplate.page.page import FIGURES, DiagnosisInput, LiveFigures, add_live_page, diagnose_models
from bedplate.run.environments import EngineEnvironment
from bedplate.run.gateway.tenants import KeyDigest, Tenants
from bedplate.values import Plan
from bedplate.values.live import Live, LiveBottleneck
from bedplate.values.record import from_json, replace_fields, to_json
from bedplate.values.tenant import Tenant, digest_key
from bedplate.values.traffic import ServedRequest
from bedplate.values.verdict import ComparedEngine, OperatingCost, Verdict

HTML = {"accept": "text/html,*/*"}
OPERATOR = "the-operators-key"
ANNS = "anns-own-key"

milliseconds = st.lists(st.floats(0.01, 1e6), max_size=40)


@pytest.fixture(autouse=True)
def use_temporary_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def stub(tmp_path: Path) -> EngineEnvironment:
    return make_stub_environment(tmp_path / "stub")


def make_request(
    ended_s: float = 0.0, *, tenant: str = "default", engine: str = "llama.cpp", **given: Any
) -> ServedRequest:
    usual: dict[str, Any] = {
        "api": "chat", "stream": True, "outcome": "ok", "status": 200, "body_bytes": 100, "prompt_tokens": 100,
        "completion_tokens": 11, "ttft_ms": 200.0, "duration_ms": 1200.0,
    }  # fmt: skip
    usual |= given
    return ServedRequest(
        at_s=ended_s - usual["duration_ms"] / 1000, tenant=tenant, model="alpha", engine=engine, **usual
    )


def find_nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


class TestCounting:
    @given(milliseconds.filter(bool))
    def test_quantiles_are_accurate_to_one_bucket(self, values: list[float]) -> None:
        counts: dict[int, int] = {}
        for value in values:
            counts[find_bucket(value)] = counts.get(find_bucket(value), 0) + 1
        found = summarize_times([counts])
        assert found.p50_ms == pytest.approx(find_nearest_rank(values, 0.5), rel=0.016)
        assert found.p95_ms == pytest.approx(find_nearest_rank(values, 0.95), rel=0.016)

    @given(st.lists(st.none() | milliseconds, max_size=150), st.integers(0, 150))
    def test_each_second_covers_the_minute_before_it(self, seconds: list[list[float] | None], asked: int) -> None:
        tallies = [None if values is None else count_values(values) for values in seconds]
        new = min(asked, len(tallies))
        found = build_series(tallies, new)
        assert len(found.ended) == len(found.ttft_p50_ms) == new
        for number, second in enumerate(range(len(tallies) - new, len(tallies))):
            window = [tally for tally in tallies[max(0, second - WINDOW_S + 1) : second + 1] if tally is not None]
            assert found.ended[number] == sum(tally.ended for tally in window)
            assert found.output_tok_s[number] == pytest.approx(
                sum(tally.completion_tokens for tally in window) / min(WINDOW_S, second + 1), abs=0.01
            )
            expected = summarize_times(tally.ttft for tally in window)
            assert (found.ttft_p50_ms[number], found.ttft_p95_ms[number]) == (expected.p50_ms, expected.p95_ms)

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.data())
    def test_incremental_history_equals_full_history(self, requests: list[int], data: st.DataObject) -> None:
        recorder = LiveRecorder(1000.0)
        cut = data.draw(st.integers(0, len(requests)))
        first = recorder.build_history(["alpha"])
        for second, number in enumerate(requests):
            if second == cut:
                first = recorder.build_history(["alpha"])
            for _ in range(number):
                recorder.record_request(make_request())
            recorder.end_second({"alpha": ModelSnapshot(number, 0)}, now_s=1000.0 + data.draw(st.integers(-5, second)))
        if cut == len(requests):
            first = recorder.build_history(["alpha"])
        later = recorder.build_history(["alpha"], first.at_s[-1] if first.at_s else 0)
        whole = recorder.build_history(["alpha"])
        assert first.at_s + later.at_s == whole.at_s
        for name in ("in_flight", "ended", "output_tok_s", "tpot_p95_ms"):
            parts = [getattr(part.models["alpha"], name) for part in (first, later)]
            assert parts[0] + parts[1] == getattr(whole.models["alpha"], name)

    def test_history_and_recent_requests_are_bounded(self) -> None:
        recorder = LiveRecorder()
        for second in range(SPAN_S + 3 * WINDOW_S):
            recorder.record_request(make_request(second))
            recorder.end_second({"alpha": ModelSnapshot(1, 0)}, now_s=second)
        assert len(recorder.build_history(["alpha"]).at_s) == SPAN_S
        assert len(recorder.seconds) == SPAN_S + WINDOW_S
        assert len(recorder.recent["alpha"]) == MOST_RECENT

    def test_rejected_requests_are_counted_separately(self) -> None:
        recorder = LiveRecorder()
        recorder.record_request(make_request(tenant="ann"))
        recorder.record_request(make_request(tenant="ann", outcome="failed", status=502, reason="engine_stopped"))
        refused: dict[str, Any] = {
            "outcome": "turned_away",
            "status": 429,
            "duration_ms": 0.0,
            "reason": "tokens_per_minute",
        }
        recorder.record_request(make_request(tenant="ann", **refused))
        used = recorder.used["ann"]
        assert used.reasons == {"engine_stopped": 1, "tokens_per_minute": 1}
        assert (used.requests, used.failed, used.turned_away, used.completion_tokens) == (2, 1, 1, 22)
        recorder.end_second({})
        (tally,) = recorder.get_window("alpha")
        assert (tally.ended, tally.failed, sum(tally.ttft.values())) == (2, 1, 1)
        assert recorder.count_tokens("ann") == 222 and recorder.count_tokens("bob") == 0


class TestTenantHistory:
    def test_covers_the_minute_before_each_interval_and_no_other_tenant(self) -> None:
        recorder = LiveRecorder(1000.0)
        for second in range(120):
            recorder.record_request(make_request(tenant="ann", ttft_ms=100.0))
            recorder.record_request(make_request(tenant="bob", ttft_ms=9000.0, completion_tokens=5000))
            if second % 10 == 0:
                recorder.record_request(make_request(tenant="ann", outcome="turned_away", status=429, duration_ms=0.0))
            recorder.end_second({"alpha": ModelSnapshot(7, 3)}, now_s=1001.0 + second, in_flight={"ann": 2, "bob": 5})
        found = recorder.build_tenant_history("ann")
        own = found.own
        assert own is not None and not found.models
        assert found.at_s == tuple(range(1000, 1120, SPELL_S)) and len(own.ended) == len(found.at_s)
        assert (own.ended[-1], own.turned_away[-1], own.failed[-1]) == (60, 6, 0)
        assert own.tokens[-1] == 60 * 111 and own.output_tok_s[-1] == pytest.approx(11)
        assert own.ttft_p50_ms[-1] == pytest.approx(100, rel=0.016) and own.ttft_p95_ms[-1] == own.ttft_p50_ms[-1]
        assert set(own.in_flight) == {2} and set(own.waiting) == {0} and set(own.memory_bytes) == {None}
        later = recorder.build_tenant_history("ann", since_s=1100)
        assert later.at_s == (1105, 1110, 1115) and later.own is not None and later.own.ended == own.ended[-3:]
        nobody = recorder.build_tenant_history("carol").own
        assert nobody is not None and set(nobody.ended) == {0} and set(nobody.ttft_p50_ms) == {None}

    def test_number_of_tenants_with_history_is_bounded(self) -> None:
        recorder = LiveRecorder(1000.0)
        for number in range(MOST_TENANTS + 10):
            recorder.record_request(make_request(tenant=f"t{number}"))
        recorder.end_second({}, now_s=1000.0 + SPELL_S)
        assert len(recorder.spells[-1].tenants) == MOST_TENANTS
        assert recorder.used[f"t{MOST_TENANTS + 9}"].requests == 1
        for second in range(2 * SPAN_S):
            recorder.end_second({}, now_s=1010.0 + second)
        assert len(recorder.spells) == (SPAN_S + WINDOW_S) // SPELL_S
        assert len(recorder.build_tenant_history("t0").at_s) == SPAN_S // SPELL_S


def count_values(values: list[float]) -> RequestCounts:
    tally = RequestCounts()
    tally.ended, tally.completion_tokens = len(values), 3 * len(values)
    for value in values:
        tally.ttft[find_bucket(value)] = tally.ttft.get(find_bucket(value), 0) + 1
    return tally


class TestBottleneck:
    def diagnose(self, standing: ModelSnapshot, requests: list[ServedRequest], slots: int, *states: EngineState) -> Any:
        environment = EngineEnvironment(
            engine="llama.cpp", version="1", path="/", packages=(), python="3", made_at="now", disk_bytes=0
        )
        plan = make_stub_readied("alpha", environment).plan
        tally = RequestCounts()
        tally.standing, tally.ended = standing, len(requests)
        return diagnose_window([tally] * 10, requests, plan, slots, machine("cpu"), states, now_s=1000.0)

    def test_idle_endpoint_has_no_bottleneck(self) -> None:
        assert self.diagnose(ModelSnapshot(0, 0), [], 4) == IDLE

    def test_two_responses_are_too_few(self) -> None:
        assert self.diagnose(ModelSnapshot(1, 0), [make_request(999.0)] * 2, 4) == TOO_FEW

    def test_old_responses_do_not_count(self) -> None:
        assert self.diagnose(ModelSnapshot(1, 0), [make_request(900.0)] * 20, 4) == TOO_FEW

    def test_many_requests_for_few_slots_name_the_scheduler(self) -> None:
        waited = [make_request(990.0, ttft_ms=9000.0, duration_ms=10000.0)] * 20
        found = self.diagnose(ModelSnapshot(2, 18), waited, 2)
        assert found.limit == "scheduler" and found.text.startswith("Scheduler is the bottleneck with 20 in flight")
        assert any("2 slots for 20 requests" in one for one in found.evidence)
        assert found.change

    def test_full_kv_cache_is_named(self) -> None:
        waited = [make_request(990.0, ttft_ms=9000.0, duration_ms=10000.0)] * 20
        full = EngineState(running=4, waiting=16, kv_use=0.99, preemptions=0)
        found = self.diagnose(ModelSnapshot(20, 0), waited, 64, full, replace_state(full, preemptions=7))
        assert found.limit == "KV cache"
        assert any("99% full" in one for one in found.evidence)


class TestSteadyBottleneck:
    """What the page shows, look by look."""

    def make_plan(self) -> Plan:
        environment = EngineEnvironment(
            engine="llama.cpp", version="1", path="/", packages=(), python="3", made_at="now", disk_bytes=0
        )
        return make_stub_readied("alpha", environment).plan

    def draw_traffic(self, seconds: int) -> tuple[list[RequestCounts], list[ServedRequest]]:
        """Poisson arrivals at two slots, which are nearly busy: the counts of each second, and the requests."""
        rng, tallies = random.Random(1), [RequestCounts() for _ in range(seconds)]
        at_s, free, requests = 0.0, [0.0, 0.0], []
        running, waiting = [0] * seconds, [0] * seconds
        while (at_s := at_s + rng.expovariate(0.9)) < seconds:
            began_s = max(at_s, free.pop(free.index(min(free))))
            tokens, prefill_ms = max(2, round(40 * rng.lognormvariate(0, 0.5))), 400 * rng.lognormvariate(0, 0.3)
            ended_s = began_s + (prefill_ms + 30 * tokens) / 1000
            free.append(ended_s)
            for second in range(math.ceil(at_s), min(seconds, math.ceil(ended_s))):
                (waiting if second < began_s else running)[second] += 1
            if ended_s < seconds:
                tallies[int(ended_s)].ended += 1
            ttft_ms = 1000 * (began_s - at_s) + prefill_ms
            requests.append(
                make_request(
                    ended_s, prompt_tokens=200, completion_tokens=tokens, ttft_ms=ttft_ms,
                    duration_ms=1000 * (ended_s - at_s),
                )
            )  # fmt: skip
        for tally, *counts in zip(tallies, running, waiting, strict=True):
            tally.standing = ModelSnapshot(*counts)
        return tallies, requests

    def test_unchanged_traffic_keeps_its_bottleneck_for_more_than_seconds(self) -> None:
        plan, hardware = self.make_plan(), machine("cpu")
        tallies, requests = self.draw_traffic(400)
        moments = range(90, 400, 2)
        before: dict[str, NamedBottleneck] = {}
        seen, shown = [], []
        for now_s in moments:
            ended = [one for one in requests if one.at_s + one.duration_ms / 1000 <= now_s]
            window = tallies[now_s - WINDOW_S : now_s]
            seen.append(diagnose_window(window, ended, plan, 2, hardware, now_s=now_s).limit)
            before = diagnose_models(
                {"alpha": DiagnosisInput(window, ended, plan, 2, ())}, hardware, before, float(now_s)
            )
            shown.append(before["alpha"].found.limit)
        spells_s = [[2 * len(list(group)) for _, group in itertools.groupby(limits)] for limits in (seen, shown)]
        assert min(spells_s[0][1:-1]) <= 4, "in this traffic, two bottlenecks are close"
        assert min(spells_s[1][1:-1]) >= HOLD_S and None not in shown

    def test_sparse_traffic_keeps_its_bottleneck_for_a_minute(self) -> None:
        plan = self.make_plan()
        last = NamedBottleneck(LiveBottleneck(limit="scheduler", text="Scheduler."), 100.0, plan, 2)
        for found, now_s, limit in ((TOO_FEW, 150.0, "scheduler"), (TOO_FEW, 161.0, None), (IDLE, 101.0, None)):
            assert keep_bottleneck(found, last, plan, 2, now_s).found.limit == limit

    def test_another_bottleneck_replaces_it_when_it_has_lasted(self) -> None:
        plan, other = self.make_plan(), LiveBottleneck(limit="compute", text="Compute.")
        shown = NamedBottleneck(LiveBottleneck(limit="scheduler", text="Scheduler."), 100.0, plan, 2)
        assert keep_bottleneck(other, shown, plan, 4, 102.0).found == other, "other settings"
        for now_s, limit in ((102.0, "scheduler"), (102.0 + HOLD_S - 1, "scheduler"), (102.0 + HOLD_S, "compute")):
            shown = keep_bottleneck(other, shown, plan, 2, now_s)
            assert shown.found.limit == limit, now_s
        short = keep_bottleneck(LiveBottleneck(limit="scheduler", text="Scheduler."), shown, plan, 2, 130.0)
        assert short.found == other and keep_bottleneck(other, short, plan, 2, 132.0).other_since_s is None


def replace_state(state: EngineState, **changes: Any) -> EngineState:
    import msgspec

    return msgspec.structs.replace(state, **changes)


def with_page(stub: EngineEnvironment, tmp_path: Path, then: Callable[[Host, LiveFigures], Awaitable[None]]) -> None:
    async def run(host: Host) -> None:
        figures = add_live_page(host)
        await add(host, make_stub_readied("alpha", stub))
        await then(host, figures)

    with_host(run, tmp_path)


async def get(host: Host, path: str, **headers: str) -> tuple[int, Any, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{host.url}{path}", headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


async def read_live(host: Host, key: str | None = None, **headers: str) -> Live:
    status, _, text = await get(host, FIGURES, **headers, **({"authorization": f"Bearer {key}"} if key else {}))
    assert status == 200, text
    return from_json(Live, text)


def require_keys(host: Host, *, admin: bool = False) -> None:
    """Require keys as `--api-key` and `keys add ann` do."""
    tenants = Tenants(OPERATOR)
    tenants.replace(
        (Tenant(name="ann", tokens_per_minute=100_000, requests_per_minute=60, in_flight=4, admin=admin),),
        (KeyDigest(digest_key(ANNS.encode(), tenants.salt), "ann"),),
    )
    host.gateway.tenants = tenants


class TestPage:
    def test_browsers_get_html_and_other_clients_get_text(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            status, headers, page = await get(host, "/", **HTML)
            assert status == 200 and page.startswith("<!doctype html>")
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            _, headers, text = await get(host, "/")
            assert headers["content-type"].startswith("text/plain") and "alpha is served by llama.cpp" in text

        with_page(stub, tmp_path, then)

    def test_shows_models_engines_and_reasons(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            for _ in range(3):
                await ask(host, "alpha")
            running = asyncio.create_task(ask(host, "alpha", 600_000))
            await until(lambda: host.get_service().in_flight, "a request to be in flight")
            figures.record_second()
            await read_live(host)
            await figures.read_engines()
            found = await read_live(host)
            running.cancel()
            assert from_json(Live, to_json(found)) == found
            (model,) = found.models
            (engine,) = model.engines
            assert (found.eyes, found.tenant, model.state, model.in_flight, model.ended) == (
                "all",
                "default",
                "ready",
                1,
                3,
            )
            assert engine.id == "llama.cpp-1" and engine.engine == "llama.cpp" and engine.share == 1.0
            assert engine.memory_bytes is not None and engine.memory_bytes > 1_000_000
            assert model.why and model.why[0].rule and found.history.models["alpha"].in_flight == (1,)
            assert found.tenants[0].requests == 3 and found.tenants[0].completion_tokens == 3
            assert model.binding is not None and model.binding.limit is None and "Unknown" in model.binding.text

        with_page(stub, tmp_path, then)

    def test_shows_the_last_verdict_for_this_machine(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        def side(engine: str) -> ComparedEngine:
            return ComparedEngine(engine=engine, cells=(), runs=(), cost=OperatingCost(engine=engine))

        async def then(host: Host, figures: LiveFigures) -> None:
            verdict = Verdict(
                answer="stay", constraint="noise", text="It is no faster.", model="alpha", effects=(), least_gain=1.1,
                machine=store.compute_fingerprint(host.hardware), a=side("llama.cpp"), b=side("vllm"),
            )  # fmt: skip
            store.add_verdict(replace_fields(verdict, answer="migrate"), "2026-11-14T10:00:00+00:00")
            store.add_verdict(verdict, "2026-11-15T10:00:00+00:00")
            store.add_verdict(replace_fields(verdict, machine="another"), "2026-11-16T10:00:00+00:00")
            await read_live(host)
            await figures.read_engines()
            found = (await read_live(host)).verdict
            assert found is not None and (found.answer, found.at) == ("stay", "2026-11-15T10:00:00+00:00")
            assert (found.incumbent, found.challenger) == ("llama.cpp", "vllm")

        with_page(stub, tmp_path, then)

    def test_seconds_are_recorded_in_the_background(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            running = asyncio.create_task(figures.run())
            await until(lambda: len(figures.recorder.seconds) >= 2, "two seconds to pass")
            running.cancel()
            first, second = list(figures.recorder.seconds)[:2]
            assert second.at_s >= first.at_s and "alpha" in second.models

        with_page(stub, tmp_path, then)

    def test_engine_metrics_are_read_only_while_the_page_is_open(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            await figures.read_engines()
            (unseen,) = figures._seen.values()
            assert unseen.memory_bytes is not None and unseen.state is None
            assert not figures.is_page_open
            await read_live(host)
            assert figures.is_page_open
            await figures.read_engines()
            (seen,) = figures._seen.values()
            assert seen.state is not None

        with_page(stub, tmp_path, then)

    def test_invalid_since_returns_the_full_history(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            figures.record_second()
            for asked in ("x", "", "-1", "nan", "1e400"):
                status, _, text = await get(host, f"{FIGURES}?since={asked}")
                assert status == 200 and from_json(Live, text)

        with_page(stub, tmp_path, then)


class TestAccess:
    def test_page_loads_without_a_key_but_figures_need_one(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            require_keys(host)
            status, _, page = await get(host, "/", **HTML)
            assert status == 200 and "alpha" not in page
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-bedplate-tenant": "default"}):
                status, _, text = await get(host, FIGURES, **headers)
                assert status == 401 and "alpha" not in text

        with_page(stub, tmp_path, then)

    def test_operator_sees_all_tenants_and_a_tenant_sees_itself(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            require_keys(host)
            now = time.time()
            for name in ("ann", "default", "default"):
                figures.recorder.record_request(make_request(now, tenant=name))
            figures.record_second()
            host.say("something happened")
            whole = await read_live(host, OPERATOR)
            assert {one.name: one.requests for one in whole.tenants} == {"ann": 1, "default": 2}
            assert whole.eyes == "all" and whole.notes and whole.history.at_s
            # The key names the tenant; the header is ignored.
            own = await read_live(host, ANNS, **{"X-Bedplate-Tenant": "default"})
            assert (own.eyes, own.tenant) == ("own", "ann")
            assert [(one.name, one.requests, one.tokens_per_minute) for one in own.tenants] == [("ann", 1, 100_000)]
            (model,) = own.models
            assert model.model == "alpha" and model.in_flight is None and model.ended is None and model.binding is None
            assert model.engines[0].memory_bytes is None and model.engines[0].in_flight is None
            assert not own.notes and not own.history.models and own.verdict is None and own.hardware is None
            assert own.history.own is not None and own.tenants[0].tokens_left == 100_000
            assert "default" not in to_json(replace_fields(own, name="x"))

        with_page(stub, tmp_path, then)

    def test_admin_sees_what_the_operator_sees(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            require_keys(host, admin=True)
            figures.record_second()
            seen = await read_live(host, ANNS)
            assert (seen.eyes, seen.tenant) == ("all", "ann")
            assert {one.name for one in seen.tenants} == {"ann", "default"} and seen.history.models

        with_page(stub, tmp_path, then)

    def test_tenant_sees_only_models_it_may_use(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            await add(host, make_stub_readied("beta", stub, tenants=("bob",)))
            require_keys(host)
            host.name = "beta"  # services have the name of a model by default
            figures.record_second()
            for path in (FIGURES, "/", "/health", "/metrics", "/v1/models"):
                assert "beta" not in (await get(host, path, authorization=f"Bearer {ANNS}"))[2], path
            assert [one.model for one in (await read_live(host, ANNS)).models] == ["alpha"]
            assert (await read_live(host, OPERATOR)).name == "beta"
            assert [one.model for one in (await read_live(host, OPERATOR)).models] == ["alpha", "beta"]

        with_page(stub, tmp_path, then)

    def test_revoked_key_is_rejected(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host, figures: LiveFigures) -> None:
            require_keys(host)
            await read_live(host, ANNS)
            host.gateway.tenants.replace((), ())
            assert (await get(host, FIGURES, authorization=f"Bearer {ANNS}"))[0] == 401

        with_page(stub, tmp_path, then)
