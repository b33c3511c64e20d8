"""Shadows: replay in idle time, mirrored live requests, and pauses for real requests."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.changing.migrating import Load, make_engine
from tests.changing.traffic import make_repeat, make_request
from tests.commands import invoke
from tests.conftest import wait_for
from tests.hosting.stub_hosts import add, with_host
from tests.run.test_supervisor import until

from bedplate import store
from bedplate.changing import shadow as shadowing
from bedplate.changing.episodes import summarize_load
from bedplate.changing.shadow import (
    ShadowRequest,
    ShadowRun,
    list_cards,
    list_devices,
    run_shadow,
    summarize_checks,
)
from bedplate.changing.shadow_elsewhere import parse_engine
from bedplate.changing.shadow_mirror import LEAST_IN_WINDOW, fix_length, parse_usage, split_windows
from bedplate.decide.placement import Need
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.hosting.host import Host
from bedplate.measure.load import LoadTarget
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.run.ready import PreparedModel
from bedplate.run.starting import EngineStart
from bedplate.run.supervisor import find_free_port
from bedplate.values.evidence import find_exclusions
from bedplate.values.migration import AnswerCheck
from bedplate.values.record import from_json, replace_fields, to_json
from bedplate.values.run import Repeat, Sample
from bedplate.values.shadow import ShadowResult
from bedplate.values.workload import RequestShape

JUNK = st.recursive(st.none() | st.text() | st.integers(), lambda one: st.lists(one) | st.dictionaries(st.text(), one))
"""Arbitrary JSON in place of a model list."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate store, since measurements of one test would influence the next."""
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shadowing, "IDLE_S", 0.05)


def offered(monkeypatch: pytest.MonkeyPatch, one: PreparedModel, *, live: bool) -> None:
    def ready(self: ShadowRun, progress: object) -> tuple[PreparedModel, Any, dict[str, str], bool]:
        return one, self.host.compute_need(one.plan), {}, live

    monkeypatch.setattr(ShadowRun, "_prepare_challenger", ready)


def record_some(count: int = 5) -> None:
    now = time.time()
    store.add_requests([make_request(now - 600 + 60 * number, completion_tokens=6) for number in range(count)])


def tell(text: str) -> None:
    return None


def is_still(pid: int | None) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def collect_addresses(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The URLs that rounds are replayed against."""
    found: set[str] = set()
    apart = shadowing._run_generator

    async def noted(call: Any) -> Any:
        found.add(call.target.url)
        return await apart(call)

    monkeypatch.setattr(shadowing, "_run_generator", noted)
    return found


@pytest.mark.measures
class TestReplay:
    def test_faster_challenger_is_proven_on_recorded_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offered(monkeypatch, make_engine(tmp_path, "fast", pause_s=0.05), live=False)
        record_some()

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "slow", pause_s=0.12))
            done = await run_shadow(host, ShadowRequest(engine="llama.cpp", share=1.0, for_s=50), tell)
            assert done.how == "replay" and done.turns >= 3 and done.requests == done.turns
            assert done.verdict.answer == "migrate", done.verdict.text
            assert done.verdict.effects[0].paired and done.verdict.effects[0].gain.value > 1.5
            assert len(host.engines) == 1 and host.engines[0].plan.engine_version == "slow"
            assert from_json(ShadowResult, to_json(done)) == done and done.exit_code == 10
            kept = store.find_run(done.run)
            assert len(kept.cells) == 2 and kept.finished
            learnt = store.read_results(kept.environment.machine)
            is_clean = not any(find_exclusions(cell) for cell in kept.cells)
            assert {one.engine_version for one in learnt} == ({"slow", "fast"} if is_clean else set())

        with_host(then, tmp_path)

    def test_equal_challenger_is_not_proven_and_assumed_workload_is_replayed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.004), live=False)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.004))
            done = await run_shadow(host, ShadowRequest(engine="llama.cpp", for_s=50), tell)
            assert done.verdict.answer in ("stay", "not proven")
            assert any("the plan assumed" in note for note in done.notes)

        with_host(then, tmp_path)

    def test_replay_stops_for_a_real_request_and_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.05), live=False)
        record_some(3)

        begun: list[float] = []
        apart = shadowing._run_generator

        async def watched(call: Any) -> Any:
            begun.append(time.monotonic())
            return await apart(call)

        monkeypatch.setattr(shadowing, "_run_generator", watched)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.05))
            trying = asyncio.create_task(run_shadow(host, ShadowRequest(engine="llama.cpp", share=1.0, for_s=50), tell))
            await until(lambda: len(begun) == 3, "a round to be running", 30)
            async with Load(host, 1) as load:
                await until(lambda: len(load.statuses) >= 3, "real answers", 20)
                assert len(begun) == 3, "no replay during real requests"
            done = await trying
            assert done.pauses >= 1 and done.turns >= 2, "it continued afterwards"
            assert set(load.statuses) == {200}

        with_host(then, tmp_path)

    def test_other_engines_are_paused_during_real_requests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.05), live=False)
        record_some(3)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.05))
            trying = asyncio.create_task(run_shadow(host, ShadowRequest(engine="llama.cpp", share=1.0, for_s=50), tell))
            await until(lambda: sum(one.state == "ready" for one in host.engines) == 3, "both to be there", 30)
            async with Load(host, 1) as load:
                await until(lambda: len(load.statuses) >= 2, "real answers", 20)
                assert [is_still(one.pid) for one in host.engines] == [False, True, True]
            await until(lambda: not any(is_still(one.pid) for one in host.engines), "them to go on")
            assert (await trying).turns >= 2
            assert set(load.statuses) == {200}

        with_host(then, tmp_path)

    def test_loading_engine_is_paused_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The requests arrive while the Python process of the challenger starts."""
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.001), live=False)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.02))
            trying = asyncio.create_task(run_shadow(host, ShadowRequest(engine="llama.cpp", share=1.0, for_s=50), tell))
            await until(lambda: len(host.engines) == 2 and host.engines[1].pid is not None, "its process")
            async with Load(host, 1) as load:
                await until(lambda: len(load.statuses) >= 2, "real answers", 20)
                assert is_still(host.engines[1].pid)
            done = await trying
            challenger = next(
                one.subject for one in store.find_run(done.run).cells if one.subject.engine_version == "two"
            )
            assert challenger.start_s is None, "it would include the pause"

        with_host(then, tmp_path)

    def test_second_copy_is_measured_if_memory_allows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.001), live=False)
        asked = collect_addresses(monkeypatch)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.001))
            done = await run_shadow(host, ShadowRequest(engine="llama.cpp", for_s=50), tell)
            assert len(asked) == 2 and host.engines[0].url not in asked
            assert not any("itself" in note for note in done.notes)

        with_host(then, tmp_path)

    def test_incumbent_is_measured_if_a_second_copy_does_not_fit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.001), live=False)
        asked = collect_addresses(monkeypatch)
        monkeypatch.setattr(Host, "check_memory", lambda self, need, what: None)
        monkeypatch.setattr(Host, "has_memory_for", lambda self, need: False)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.001))
            done = await run_shadow(host, ShadowRequest(engine="llama.cpp", for_s=50), tell)
            assert len(asked) == 2 and host.engines[0].url in asked
            assert any("not enough memory for a second copy" in note and "itself" in note for note in done.notes)

        with_host(then, tmp_path)

    def test_untimed_work_continues_after_a_pause(self, tmp_path: Path) -> None:
        """Otherwise an endpoint with a request every few seconds would never finish comparing answers."""
        begun: list[int] = []

        async def work() -> int:
            begun.append(1)
            await asyncio.sleep(0.5)
            return 7

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.02))
            one = ShadowRun(host, host.get_service(), ShadowRequest(engine="llama.cpp", for_s=50), tell)
            working = asyncio.create_task(one._run_untimed(work(), False))
            async with Load(host, 1) as load:
                await until(lambda: len(load.statuses) >= 2, "real answers", 20)
                assert one._still.is_still
            assert await working == 7 and begun == [1]

        with_host(then, tmp_path)

    def test_often_interrupted_round_is_halved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes = tuple(RequestShape(started_s=float(n), prompt_tokens=9, output_tokens=9) for n in range(7))
        lengths: list[int] = []

        async def guarded(self: ShadowRun, work: Any, most: int | None = None) -> Repeat:
            (call,) = [cell.cell_contents for cell in work.__closure__ or ()] or work.__defaults__
            lengths.append(len(call.shapes))
            if most is not None and len(call.shapes) > 2:
                raise shadowing.RoundInterrupted
            return make_repeat(0, duration_ms=9.0)

        monkeypatch.setattr(ShadowRun, "_run_in_idle_time", guarded)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            one = ShadowRun(host, host.get_service(), ShadowRequest(engine="llama.cpp"), tell)
            target, prepared = LoadTarget.from_url("http://127.0.0.1:9"), PreparedEndpoint(model="m", api="chat")
            both, load = (target, target), summarize_load([shapes], "alpha")
            assert await one._measure_pair((0, 1), both, load, (prepared, prepared), shapes, 0) is not None
            assert lengths == [7, 3, 1, 1], "the same number for both sides"
            assert await one._measure_pair((0, 1), both, load, (prepared, prepared), shapes, 1) is not None
            assert lengths[4:] == [1, 1], "later rounds start at that size"

        with_host(then, tmp_path)

    def test_busy_endpoint_gives_no_verdict(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two"), live=False)
        monkeypatch.setattr(ShadowRun, "_start_engine", _start_at_once)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            async with Load(host, 3):
                with pytest.raises(NotPossible, match="could not be compared") as told:
                    await run_shadow(host, ShadowRequest(engine="llama.cpp", for_s=1), tell)
                assert "idle" in (told.value.cause or "")
            assert len(host.engines) == 1 and host.get_service().busy is None

        with_host(then, tmp_path)

    def test_cancelling_stops_the_challenger(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offered(monkeypatch, make_engine(tmp_path, "two", pause_s=0.2), live=False)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one", pause_s=0.2))
            trying = asyncio.create_task(run_shadow(host, ShadowRequest(engine="llama.cpp", for_s=50), tell))
            await until(lambda: len(host.engines) >= 2 and host.engines[1].state == "ready", "the challenger")
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
            assert len(host.engines) == 1

        with_host(then, tmp_path)


async def _start_at_once(self: ShadowRun, start: EngineStart, need: Need, live: bool, ours: list[Any]) -> Any:
    started = await self.host.add_engine(start, service=self.service.name, share=0.0, need=need)
    ours.append(started)
    return started


@pytest.mark.measures
class TestLive:
    def test_sampled_requests_go_to_both_engines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offered(monkeypatch, make_engine(tmp_path, "fast", pause_s=0.005), live=True)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "slow", pause_s=0.02))
            (first,) = host.engines
            async with Streams(host, 4):
                done = await run_shadow(host, ShadowRequest(engine="llama.cpp", share=1.0, for_s=3), tell)
            assert done.how == "live" and done.requests > 10
            (main,) = [one for one in done.verdict.effects if one.metric == "e2e_ms"]
            assert main.gain.value > 1.5, "each token takes a quarter of the time"
            assert host.engines == (first,) and first.backend.on_end is None

        with_host(then, tmp_path)

    def test_gain_under_partial_load_is_not_proven(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        offered(monkeypatch, make_engine(tmp_path, "fast", pause_s=0.001), live=True)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "slow", pause_s=0.02))
            async with Streams(host, 4):
                done = await run_shadow(host, ShadowRequest(engine="llama.cpp", share=0.5, for_s=3), tell)
            assert done.verdict.answer != "migrate"
            assert any(one.what == "requests" for one in done.verdict.differences)

        with_host(then, tmp_path)


class TestWindows:
    """Measurement windows of live requests."""

    @pytest.mark.parametrize(
        ("moments", "lengths"),
        [
            ((), []),
            ((0.1, 0.2), [2]),
            ((0.0, 0.1, 0.2, 0.3, 2.0), [5]),
            ((0.0, 0.1, 0.2, 0.3, 2.0, 2.1, 2.2, 2.3), [4, 4]),
            ((0.0, 0.1, 0.2, 0.3, 2.0, 2.1, 2.2, 2.3, 4.0, 4.1), [4, 6]),
            ((0.0, 2.0, 4.0, 6.0, 8.0, 10.0), [6]),
        ],
    )
    def test_short_last_window_is_merged(self, moments: tuple[float, ...], lengths: list[int]) -> None:
        assert [len(one) for one in split_windows(make_pairs(moments), 1.0)] == lengths

    @given(st.lists(st.floats(0, 100)), st.floats(0.1, 20))
    def test_windows_keep_all_pairs_in_order(self, moments: list[float], window_s: float) -> None:
        found = split_windows(make_pairs(moments), window_s)
        assert [at_s for stretch in found for at_s, _, _ in stretch] == sorted(moments)
        assert len(found) < 2 or min(map(len, found)) >= LEAST_IN_WINDOW


def make_pairs(moments: Iterable[float]) -> list[tuple[float, Sample, Sample]]:
    (sample,) = make_repeat(0, duration_ms=9.0).samples
    return [(at_s, sample, sample) for at_s in moments]


@pytest.mark.measures
class TestRemoteChallenger:
    @pytest.mark.parametrize("named", ["engine", "endpoint"])
    def test_live_requests_go_to_a_challenger_at_a_url(self, tmp_path: Path, named: str) -> None:
        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "slow", pause_s=0.02))
            (first,) = host.engines
            with start_elsewhere(make_engine(tmp_path, "fast", pause_s=0.005)) as url:
                engine = "vllm" if named == "engine" else LoadTarget.from_url(url).name
                asked = ShadowRequest(engine=engine, share=1.0, for_s=6, url=url, served_model="alpha")
                async with Streams(host, 4):
                    done = await run_shadow(host, asked, tell)
            assert host.engines == (first,) and first.backend.on_end is None, "nothing is started here"
            assert done.how == "live" and done.turns >= 3 and done.requests > 10
            assert done.verdict.answer == "migrate", done.verdict.text
            assert done.verdict.b.engine == engine and done.verdict.b.quality is not None
            assert done.verdict.b.quality.verdict == "ok"
            assert {one.what: one.b for one in done.verdict.differences}["endpoint"] == url
            machine = done.verdict.machine
            assert store.read_results(machine) == () and store.read_verdicts(machine) == (), (
                "plans use local results only"
            )

        with_host(then, tmp_path)

    def test_challenger_with_wrong_answers_is_broken(self, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "slow", pause_s=0.02))
            with start_elsewhere(make_engine(tmp_path, "fast", seed="other", pause_s=0.005)) as url:
                asked = ShadowRequest(engine="vllm", share=1.0, for_s=2, url=url, served_model="alpha")
                async with Streams(host, 2):
                    done = await run_shadow(host, asked, tell)
            assert done.verdict.answer == "stay" and done.verdict.b.quality is not None
            assert done.verdict.b.quality.verdict == "broken"

        with_host(then, tmp_path)

    def test_unreachable_challenger_is_an_external_failure(self, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            asked = ShadowRequest(engine="vllm", url="http://127.0.0.1:9", served_model="alpha")
            with pytest.raises(ExternalFailure, match="cannot connect to"):
                await run_shadow(host, asked, tell)
            assert host.get_service().busy is None

        with_host(then, tmp_path)

    def test_rejects_url_that_serves_another_engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def listed(target: LoadTarget) -> bytes:
            return b'{"data": [{"id": "alpha", "engine": "sglang", "engine_version": "1"}]}'

        monkeypatch.setattr("bedplate.changing.shadow_elsewhere._read_model_list", listed)

        async def then(host: Host) -> None:
            await add(host, make_engine(tmp_path, "one"))
            refused = pytest.raises(UsageError, match=r"at .* is served by sglang, not by vllm")
            with start_elsewhere(make_engine(tmp_path, "fast", pause_s=0.001)) as url, refused:
                await run_shadow(host, ShadowRequest(engine="vllm", url=url, served_model="alpha"), tell)

        with_host(then, tmp_path)

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("--key-env", "KEY"), "--key-env and --served-model need --url"),
            (("--served-model", "alpha"), "--key-env and --served-model need --url"),
            (("--url", "http://127.0.0.1:9", "--build", "native"), "with --url nothing is"),
            (("--url", "http://127.0.0.1:9", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
            (("--url", "ftp://127.0.0.1"), "not an HTTP URL"),
        ],
    )
    def test_rejects_invalid_options(self, words: tuple[str, ...], why: str) -> None:
        answer = invoke("shadow", "vllm", *words)
        assert answer.code == 2 and why in answer.err

    def test_parses_engine_from_model_list(self) -> None:
        rows = [{"id": "a", "engine": "vllm", "engine_version": "0.31"}, {"id": "b", "owned_by": "x"}, {"id": "c"}]
        listed = json.dumps({"data": rows}).encode()
        assert parse_engine(listed, "a") == ("vllm", "0.31")
        assert parse_engine(listed, "b") == parse_engine(listed, "c") == parse_engine(listed, "d") == (None, None)

    @given(st.binary() | JUNK.map(lambda value: json.dumps({"data": value}).encode()))
    def test_any_model_list_is_accepted(self, listed: bytes) -> None:
        assert parse_engine(listed, "a") == (None, None)


@contextmanager
def start_elsewhere(one: PreparedModel) -> Iterator[str]:
    """Start the engine outside of bedplate and yield its URL."""
    port = find_free_port()
    words = [sys.executable, f"{one.environment.path}/bin/llama-server", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: is_listening(port), "it to listen")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Streams:
    """Keeps this many streams in flight."""

    def __init__(self, host: Host, count: int) -> None:
        self._host, self._count, self._over = host, count, False

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self._count)]

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _go_on(self) -> None:
        body = {
            "model": "alpha", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True,
        }  # fmt: skip
        async with aiohttp.ClientSession() as session:
            while not self._over:
                async with session.post(f"{self._host.url}/v1/chat/completions", json=body) as answer:
                    assert b"[DONE]" in await answer.read()


class TestParts:
    def test_host_memory_is_not_an_exclusive_device(self) -> None:
        assert list_devices("cuda", {"host": 1, "card 0": 5}) == {"card 0"}
        assert list_devices("cpu", {"host": 1}) == {"cpu"} and list_devices("cpu", {"host": 1, "card 0": 5}) == {"cpu"}

    def test_challenger_sees_only_its_gpus(self) -> None:
        machine = make_simulated_hardware({"accelerator": "RTX 4090", "count": 4, "ram_gb": 64})
        cards = pick_cards(machine, list_cards({"host": 1, "card 2": 5, "card 3": 5}))
        assert show_cards("cuda", cards) == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert show_cards("cpu", pick_cards(machine, list_cards({"host": 1}))) == {}

    def test_broken_against_either_is_broken(self) -> None:
        good = AnswerCheck(
            against="the reference", stage="answers", asked=48, answered=48, agreed=48, clear=48, clear_agreed=48,
            floor=0.97, verdict="ok", why="48 of 48",
        )  # fmt: skip
        bad = replace_fields(good, against="the engine in service", verdict="broken", agreed=1, why="1 of 48")
        assert summarize_checks((good, bad)).verdict == "broken"
        assert summarize_checks((good,)).agreement == 1.0
        assert summarize_checks((replace_fields(good, verdict="unchecked", why="no API"),)).note == "no API"
        assert summarize_checks(()).verdict == "unchecked"

    def test_copied_request_fixes_the_output_length(self) -> None:
        body = {"messages": [], "stream": True, "max_tokens": 400, "stop": ["."]}
        asked = fix_length(body, 7, ("usage", "ignore_eos", "min_tokens"))
        assert (asked["max_tokens"], asked["ignore_eos"], asked["min_tokens"]) == (7, True, 7) and "stop" not in asked
        assert asked["stream_options"] == {"include_usage": True} and body["stop"] == ["."]
        assert fix_length({"max_completion_tokens": 9}, 7, ())["max_completion_tokens"] == 7
        shaped = fix_length({"response_format": {"type": "json_object"}, "stop": ["}"]}, 7, ("ignore_eos",))
        assert "ignore_eos" not in shaped and shaped["stop"] == ["}"], "structured output is not forced to a length"
        assert fix_length({"n": 2}, 14, ("ignore_eos",)).keys() == {"n", "stream_options"}
        assert "max_tokens" not in fix_length({}, None, ("ignore_eos",)), "the token count is unknown"

    def test_parses_usage_from_a_stream(self) -> None:
        stream = (
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n: ping\n\ndata: {"choices":[],'
            b'"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
        )
        assert parse_usage(stream) == (3, 5, "stop")
        assert parse_usage(b"data: {broken\n\ndata: {\xff}\n\n") == (None, None, None)
