"""Watch: triggers, challengers, conclusion, webhook and outlook."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.changing.traffic import make_repeat, make_request, make_subject
from tests.engines.plans import machine
from tests.hosting.stub_hosts import add, make_stub_environment, make_stub_readied, with_host

from bedplate import store
from bedplate.changing import watch as watching
from bedplate.changing.episodes import make_cell, summarize_load
from bedplate.changing.notify import check_url, post
from bedplate.changing.outlook import OutlookRequest, describe_missed_target, get_driver
from bedplate.changing.outlook import report_outlook as outlook_of
from bedplate.changing.watch import (
    WatchOptions,
    allot_time,
    choose_challengers,
    conclude,
    find_triggers,
    list_release_notes,
    read_last_state,
    watch_once,
)
from bedplate.decide import decide
from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.hosting.host import Host
from bedplate.judge.compare import compare
from bedplate.measure.bench import describe_environment
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.releases import IndexAnswer, find_package, parse_requirements
from bedplate.values import Workload, replace_fields
from bedplate.values.decision import Challenger
from bedplate.values.migration import Migration, MigrationEngine
from bedplate.values.record import from_json, to_json
from bedplate.values.run import Quality, Run
from bedplate.values.service import ServiceRecord
from bedplate.values.shadow import ShadowResult
from bedplate.values.watch import Outlook, WatchEvaluation, WatchState
from bedplate.values.workload import LatencyTarget, RequestShape

RECORD = ServiceRecord(
    name="chat", pid=1, birth="b", socket="s", log="l", version="1", started_at="2026-01-01T00:00:00+00:00"
)
BEFORE = WatchState(at_s=1000.0, driver="550", versions={"llama.cpp": "1"}, releases={"xllamacpp": "1"})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def outlook(**changes: Any) -> Outlook:
    decision = decide(machine("cpu"), read_builtin_facts(), Workload(), "llama.cpp")
    base: dict[str, Any] = {
        "model": "alpha", "engine": "pytorch", "engine_version": "2.13.0", "machine": "m", "requests": 500,
        "workload": Workload(), "decision": replace_fields(decision, challengers=()),
    }  # fmt: skip
    return Outlook(**{**base, **changes})


def shadowed(a: str, b: str, a_ms: float, b_ms: float, *, run: str = "r1") -> ShadowResult:
    """A shadow of both engines with five rounds."""
    shapes = (RequestShape(started_s=0.0, prompt_tokens=50, output_tokens=20),)
    load, quality = summarize_load([shapes], "alpha"), Quality(verdict="ok", agreement=1.0, asked=48)
    cells = []
    for side, (name, took_ms) in enumerate(((a, a_ms), (b, b_ms))):
        repeats = [
            make_repeat(2 * turn + side, duration_ms=took_ms * (1 + turn / 100), requests=3) for turn in range(5)
        ]
        cells.append(make_cell(run, "2026-01-01T00:00:00Z", "m", make_subject(name), load, repeats, quality, ""))
    store.add_run(
        Run(id=run, at="2026-01-01T00:00:00Z", environment=describe_environment(machine("cpu")), finished=True)
    )
    for cell in cells:
        store.add_cell(cell)
    verdict = compare([cells[0]], [cells[1]])
    return ShadowResult(
        at="2026-01-01T00:00:00Z", model="alpha", how="replay", verdict=verdict, requests=15, turns=5, pauses=0,
        took_s=9.0, run=run,
    )  # fmt: skip


class TestTriggers:
    def kinds(self, found: Outlook, now: WatchState, every_s: float = 1e9) -> list[str]:
        return [one.kind for one in find_triggers(found, BEFORE, now, every_s)]

    def test_first_evaluation_is_always_due(self) -> None:
        (only,) = find_triggers(outlook(), None, BEFORE, 1e9)
        assert only.kind == "schedule" and only.text == "first evaluation"

    def test_no_trigger_without_changes_before_the_schedule(self) -> None:
        assert self.kinds(outlook(), replace_fields(BEFORE, at_s=1999.0), 1000) == []
        assert self.kinds(outlook(), replace_fields(BEFORE, at_s=2000.0), 1000) == ["schedule"]

    @pytest.mark.parametrize(
        ("found", "now", "kind"),
        [
            ({"late": "80% met the target"}, {}, "latency"),
            ({"drift": "longer prompts"}, {}, "workload"),
            ({}, {"driver": "560"}, "driver"),
            ({}, {"versions": {"llama.cpp": "2"}}, "bedplate"),
            ({}, {"releases": {"xllamacpp": "2"}}, "release"),
        ],
    )
    def test_each_change_is_a_trigger(self, found: dict[str, Any], now: dict[str, Any], kind: str) -> None:
        assert self.kinds(outlook(**found), replace_fields(BEFORE, **now)) == [kind]

    def test_first_seen_package_is_not_a_new_release(self) -> None:
        assert self.kinds(outlook(), replace_fields(BEFORE, releases={"xllamacpp": "1", "vllm": "3"})) == []

    def test_known_conditions_trigger_once(self) -> None:
        found = outlook(drift="longer prompts", late="80%")
        assert find_triggers(found, replace_fields(BEFORE, drift="longer", late="79%"), BEFORE, 1e9) == ()


class TestChallengers:
    def test_tries_planned_engine_and_installed_challengers(self) -> None:
        decision = replace_fields(
            outlook().decision,
            challengers=(
                Challenger(engine="vllm", evidence_needed="speed"),
                Challenger(engine="sglang", evidence_needed="speed"),
            ),
        )
        tried, untried = choose_challengers(outlook(decision=decision), ["vllm", "pytorch"])
        assert tried == ["llama.cpp", "vllm"] and [one.engine for one in untried] == ["sglang"]

    def test_engine_in_service_is_not_a_challenger(self) -> None:
        assert choose_challengers(outlook(engine="llama.cpp"), ["llama.cpp"]) == ([], [])


class TestConclusion:
    def test_stay_without_challengers(self) -> None:
        answer, text, best = conclude(outlook(engine="llama.cpp"), [])
        assert (answer, best) == ("stay", None) and "no challenger could be measured" in text

    def test_unmeasured_planned_engine_is_not_proven(self) -> None:
        answer, text, best = conclude(outlook(), [])
        assert (answer, best) == ("not proven", "llama.cpp") and "could not be measured" in text

    def test_budget_is_divided_among_challengers(self) -> None:
        assert allot_time(20.0, 3, is_first=True) == 20.0
        assert allot_time(19.9, 2, is_first=False) is None
        assert allot_time(90.0, 3, is_first=True) == 30.0 and allot_time(70.0, 2, is_first=False) == 35.0
        assert allot_time(40.0, 2, is_first=False) == 30.0

    def test_the_largest_proven_gain_wins(self) -> None:
        some, more = shadowed("a", "b", 400, 300, run="r1"), shadowed("a", "c", 400, 100, run="r2")
        assert {some.verdict.answer, more.verdict.answer} == {"migrate"}
        assert conclude(outlook(), [some, more])[::2] == ("migrate", "c")

    def test_slower_challengers_mean_stay(self) -> None:
        assert conclude(outlook(engine="llama.cpp"), [shadowed("a", "b", 100, 400)])[::2] == ("stay", "b")

    def test_slower_challengers_do_not_replace_the_planned_engine(self) -> None:
        answer, text, best = conclude(outlook(), [shadowed("pytorch", "vllm", 100, 400)])
        assert (answer, best) == ("not proven", "llama.cpp") and "could not be measured" in text
        assert conclude(outlook(), [shadowed("pytorch", "llama.cpp", 100, 400)])[0] == "stay"

    def test_largest_gain_is_in_speed_not_in_ttft(self) -> None:
        faster, sooner = shadowed("a", "b", 400, 200, run="r1"), shadowed("a", "c", 400, 300, run="r2")
        effects = [
            replace_fields(one, gain=replace_fields(one.gain, value=9.0)) if one.metric == "ttft_ms" else one
            for one in sooner.verdict.effects
        ]
        sooner = replace_fields(sooner, verdict=replace_fields(sooner.verdict, effects=tuple(effects)))
        assert conclude(outlook(), [faster, sooner])[::2] == ("migrate", "b")


class TestOnce:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Answers in place of a host."""
        state: dict[str, Any] = {"asked": [], "shadow": None, "outlook": outlook(), "say": None}

        def ask(record: ServiceRecord, do: str, arguments: Any, **more: Any) -> Any:
            state["asked"].append((do, arguments))
            if isinstance(state.get(do), Exception):
                raise state[do]
            return state[do]

        monkeypatch.setattr(watching, "ask", ask)
        monkeypatch.setattr(watching, "ask_index", lambda packages: IndexAnswer(dict.fromkeys(packages, "9999.1"), {}))
        monkeypatch.setattr(watching, "is_installed", lambda one, hardware: one.id == "llama.cpp")
        return state

    def test_evaluation_shadows_reports_and_saves_state(self, asked: dict[str, Any], home: Path) -> None:
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 400, 100)
        done = watch_once(RECORD, WatchOptions(budget_s=60))
        assert (done.answer, done.challenger, done.exit_code, done.migration) == ("migrate", "llama.cpp", 10, None)
        assert [do for do, _ in asked["asked"]] == ["outlook", "shadow", "say"], "no migration without --auto"
        assert asked["asked"][2][1].text.startswith("watch: migrate to llama.cpp: "), "the service's log has the result"
        assert asked["asked"][1][1].engine == "llama.cpp" and asked["asked"][1][1].for_s <= 60
        assert done.report is not None and "<html" in Path(done.report).read_text()
        assert "llama.cpp" in Path(done.report).read_text()
        (kept,) = (home / "reports").glob("*.json")
        assert from_json(WatchEvaluation, kept.read_text()).answer == "migrate"
        assert any("9999.1 is on the index; this version of bedplate installs" in note for note in done.notes)
        before = read_last_state("chat", "alpha")
        assert before is not None and before.releases["xllamacpp"] == "9999.1"
        again = watch_once(RECORD, WatchOptions(budget_s=60))
        assert [one.kind for one in again.triggers] == ["asked"]

    def test_auto_migrates_only_on_a_proven_gain(self, asked: dict[str, Any]) -> None:
        asked["migrate"] = Migration(
            at="2026-01-01T00:00:00Z", model="alpha", a=MigrationEngine(engine="pytorch", engine_version="1"),
            b=MigrationEngine(engine="llama.cpp", engine_version="1"), outcome="migrated", side_by_side=True,
            took_s=1.0,
        )  # fmt: skip
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 100, 100)
        assert watch_once(RECORD, WatchOptions(auto=True)).migration is None
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 400, 100, run="r2")
        assert watch_once(RECORD, WatchOptions(auto=True)).migration == asked["migrate"]
        (moved,) = [arguments for do, arguments in asked["asked"] if do == "migrate"]
        assert moved.engine == "llama.cpp" and asked["asked"][-1][1].text.endswith("; migration: migrated")

    def test_failed_migration_is_in_the_result(self, asked: dict[str, Any]) -> None:
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 400, 100)
        asked["migrate"] = NotPossible("llama.cpp cannot be installed", cause="no space")
        done = watch_once(RECORD, WatchOptions(auto=True))
        assert done.answer == "migrate" and done.migration is None
        assert done.notes[-1] == "the migration failed: llama.cpp cannot be installed: no space"

    def test_untried_challenger_is_named_with_reason(self, asked: dict[str, Any]) -> None:
        asked["shadow"] = NotPossible("it does not fit next to the loaded engines", cause="9 GB are needed")
        done = watch_once(RECORD, WatchOptions())
        assert done.answer == "not proven" and done.exit_code == 20
        assert done.untried[0].why == "it does not fit next to the loaded engines: 9 GB are needed"
        assert done.report is None

    def test_a_worse_challenger_exits_with_30(self, asked: dict[str, Any]) -> None:
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 100, 400)
        done = watch_once(RECORD, WatchOptions())
        assert (done.answer, done.challenger, done.exit_code) == ("stay", "llama.cpp", 30)
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 100, 100, run="r2")
        assert watch_once(RECORD, WatchOptions()).exit_code in (0, 20)

    def test_webhook_gets_the_result(self, asked: dict[str, Any], hook: Hook) -> None:
        asked["shadow"] = shadowed("pytorch", "llama.cpp", 400, 100)
        watch_once(RECORD, WatchOptions(webhook=hook.url))
        assert from_json(WatchEvaluation, hook.bodies[0]).answer == "migrate"

    def test_webhook_failure_is_noted(self, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watching, "post", lambda url, body: "HTTP 404")
        asked["shadow"] = NotPossible("no")
        done = watch_once(RECORD, WatchOptions(webhook="http://127.0.0.1:9/"))
        assert done.notes[-1] == "the webhook failed: HTTP 404" and read_last_state("chat", "alpha") is not None

    def test_unreadable_state_counts_as_none(self, asked: dict[str, Any], home: Path) -> None:
        asked["shadow"] = NotPossible("no")
        watch_once(RECORD, WatchOptions())
        (state,) = (home / "watch").glob("*.json")
        state.write_text("{broken")
        assert read_last_state("chat", "alpha") is None
        assert watch_once(RECORD, WatchOptions()).triggers[0].kind == "schedule"


class TestLoop:
    def test_announces_itself_and_ends_with_the_service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A missing control socket means that the service has exited."""
        said: list[str] = []
        told: list[WatchEvaluation] = []
        gone = replace_fields(RECORD, pid=2**22, socket=str(tmp_path / "none.sock"))
        watching.watch(gone, WatchOptions(tell=said.append), told.append)
        assert "every 24 h" in said[0] and "no migration without --auto" in said[0]
        assert said[1:] == ["chat has exited; the watch ends"] and told == []

    def test_evaluates_on_schedule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first evaluation, one by schedule, then the service exits."""
        answers = iter([outlook(), outlook(), outlook()])
        clock = iter([1000.0, 1010.0, 1070.0])

        def ask(record: ServiceRecord, do: str, arguments: Any, **more: Any) -> Any:
            if do == "outlook":
                found = next(answers, None)
                if found is None:
                    raise ExternalFailure("no answer")
                return found
            raise NotPossible("it does not fit") if do == "shadow" else ExternalFailure("gone")

        slept: list[float] = []
        monkeypatch.setattr(watching, "ask", ask)
        monkeypatch.setattr(watching, "ask_index", lambda packages: IndexAnswer({}, {}))
        clocks = SimpleNamespace(time=lambda: next(clock), sleep=slept.append, monotonic=time.monotonic)
        monkeypatch.setattr("bedplate.changing.watch.time", clocks)
        told: list[WatchEvaluation] = []
        watching.watch(replace_fields(RECORD, pid=2**22, socket="none"), WatchOptions(every_s=60.0), told.append)
        assert [one.triggers[0].kind for one in told] == ["schedule", "schedule"]
        assert "70.0 s" in told[1].triggers[0].text and set(slept) == {60.0}


class TestOutlook:
    def test_host_reports_state_and_new_decision(self, tmp_path: Path) -> None:
        now = time.time()
        store.add_requests(
            [make_request(now - number, prompt_tokens=900, completion_tokens=50) for number in range(120)]
        )

        async def then(host: Host) -> None:
            await add(host, make_stub_readied("alpha", make_stub_environment(tmp_path / "stub")))
            found = await outlook_of(host, OutlookRequest(), lambda text: None)
            assert (found.model, found.engine, found.requests) == ("alpha", "llama.cpp", 120)
            assert found.workload.prompt_tokens >= 900 and found.decision.engine is not None
            assert found.drift is not None and "prompt tokens" in found.drift
            assert from_json(Outlook, to_json(found)) == found

        with_host(then, tmp_path)


class Hook:
    """A webhook that responds with these statuses, and repeats the last one."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[bytes] = []
        self.statuses = list(statuses)
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(hook.statuses.pop(0) if len(hook.statuses) > 1 else hook.statuses[0])
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return None

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    one = Hook(200)
    yield one
    one.close()


class TestNotify:
    @pytest.fixture(autouse=True)
    def no_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bedplate.changing.notify.PAUSES_S", (0.0, 0.0))

    def test_retries_server_errors(self, hook: Hook) -> None:
        hook.statuses = [503, 500, 200]
        assert post(hook.url, json.dumps({"a": 1})) is None and len(hook.bodies) == 3

    def test_gives_up_after_retries(self, hook: Hook) -> None:
        hook.statuses = [503]
        assert post(hook.url, "{}") == "HTTP 503" and len(hook.bodies) == 3

    def test_client_errors_are_not_retried(self, hook: Hook) -> None:
        hook.statuses = [404]
        assert post(hook.url, "{}") == "HTTP 404" and len(hook.bodies) == 1

    def test_unreachable_webhook_is_a_reason(self) -> None:
        assert "refused" in (post("http://127.0.0.1:9/", "{}") or "").lower()

    @pytest.mark.parametrize("url", ["", "example.com", "file:///etc/passwd", "ftp://example.com"])
    def test_rejects_invalid_urls(self, url: str) -> None:
        with pytest.raises(UsageError, match="webhook"):
            check_url(url)


class TestFacts:
    def test_package_is_the_first_pinned_one(self) -> None:
        assert find_package(get_engine("llama.cpp"))[0] == "xllamacpp"  # type: ignore[index]
        assert find_package(get_engine("ollama")) is None

    def test_parses_compiled_requirements(self) -> None:
        assert parse_requirements(
            "xllamacpp==2026.11.1\n    # via -r -\nvllm==0.33.0 ; python_version < '3.14'\n\nnoise\n"
        ) == {
            "xllamacpp": "2026.11.1",
            "vllm": "0.33.0",
        }
        assert parse_requirements("") == {}

    def test_unpinned_release_is_noted(self) -> None:
        pinned = find_package(get_engine("llama.cpp"))
        assert pinned is not None
        now = replace_fields(BEFORE, versions={"llama.cpp": pinned[1]}, releases={"xllamacpp": pinned[1]})
        present = outlook(engine_version=get_engine("pytorch").version)
        assert list_release_notes(present, now, upgrade=False) == []
        newer = replace_fields(now, releases={"xllamacpp": "9999.1"})
        assert "xllamacpp 9999.1 is on the index" in list_release_notes(present, newer, upgrade=False)[0]

    def test_missed_target_needs_enough_requests(self) -> None:
        target = LatencyTarget(ttft_ms=40)
        assert describe_missed_target([make_request(1.0)] * 49, target) is None
        assert describe_missed_target([make_request(1.0)] * 50, target) == (
            "0% of the 50 requests in the last hour met the target (TTFT 40 ms)"
        )
        assert describe_missed_target([make_request(1.0)] * 50, LatencyTarget(ttft_ms=60, tpot_ms=20)) is None
        assert describe_missed_target([make_request(1.0)] * 50, LatencyTarget(tpot_ms=19)) is not None

    def test_no_driver_without_accelerators(self) -> None:
        assert get_driver(machine("cpu")) is None
