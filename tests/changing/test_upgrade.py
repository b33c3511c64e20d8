"""Upgrades: which release is compared, what its comparison means, and when it is removed again."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.changing.test_watch_service import BEFORE, RECORD, outlook
from tests.changing.traffic import make_repeat, make_subject

from bedplate.changing import upgrade as upgrading
from bedplate.changing import watch as watching
from bedplate.changing.episodes import make_cell, summarize_load
from bedplate.changing.upgrade import ReleaseCandidate, find_candidate
from bedplate.changing.watch import WatchOptions, list_release_notes, read_last_state, watch_once
from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.judge.compare import compare
from bedplate.run.environments import EngineEnvironment
from bedplate.run.options import OptionCheck
from bedplate.run.releases import IndexAnswer
from bedplate.show.shadow import render_watched
from bedplate.values import replace_fields
from bedplate.values.run import Quality
from bedplate.values.shadow import ShadowResult
from bedplate.values.watch import Outlook
from bedplate.values.workload import RequestShape

PRESENT, NEWER = "2026.9.11063", "9999.1.2"
LLAMA = get_engine("llama.cpp")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def serving(version: str = PRESENT, **changes: Any) -> Outlook:
    """llama.cpp in service, and no other engine to try."""
    decision = replace_fields(outlook().decision, engine="llama.cpp", challengers=())
    return outlook(engine="llama.cpp", engine_version=version, decision=decision, **changes)


def compared(a_ms: float, b_ms: float, b_quality: Quality | None = None) -> ShadowResult:
    """A comparison of both versions in eight interleaved rounds."""
    load = summarize_load([(RequestShape(started_s=0.0, prompt_tokens=50, output_tokens=20),)], "alpha")
    right = Quality(verdict="ok", agreement=1.0, asked=48)
    cells = []
    for side, (version, took_ms, quality) in enumerate(((PRESENT, a_ms, right), (NEWER, b_ms, b_quality or right))):
        repeats = [make_repeat(2 * turn + side, duration_ms=took_ms + turn, requests=3) for turn in range(8)]
        subject = replace_fields(make_subject("llama.cpp"), engine_version=version)
        cells.append(make_cell("r1", "2026-01-01T00:00:00Z", "m", subject, load, repeats, quality, ""))
    return ShadowResult(
        at="2026-01-01T00:00:00Z", model="alpha", how="replay", verdict=compare([cells[0]], [cells[1]]), requests=24,
        turns=8, pauses=0, took_s=9.0, run="r1",
    )  # fmt: skip


class TestCandidate:
    @pytest.mark.parametrize(
        ("present", "releases", "release"),
        [
            (PRESENT, {"xllamacpp": NEWER}, NEWER),
            (PRESENT, {}, LLAMA.pinned_version),
            (PRESENT, {"xllamacpp": "2026.9.10809"}, LLAMA.pinned_version),
            ("9999.1.1", {"xllamacpp": NEWER}, NEWER),
        ],
    )
    def test_is_the_newest_release_on_the_index_or_of_bedplate(
        self, present: str, releases: dict[str, str], release: str
    ) -> None:
        found = find_candidate(serving(present), replace_fields(BEFORE, releases=releases))
        assert found == ReleaseCandidate("llama.cpp", "xllamacpp", present, release)

    @pytest.mark.parametrize(
        ("found", "why"),
        [
            (serving(NEWER), "is the newest release of xllamacpp"),
            (serving("0.3.36-native"), "is not a release of xllamacpp"),
            (outlook(engine="lmdeploy", engine_version="0.1.0"), "bedplate installs no package of lmdeploy"),
        ],
    )
    def test_reason_if_there_is_none(self, found: Outlook, why: str) -> None:
        now = replace_fields(BEFORE, releases={"xllamacpp": NEWER})
        assert why in str(find_candidate(found, now))
        assert any(why in note for note in list_release_notes(found, now, upgrade=True))

    def test_newer_release_is_only_noted_without_the_option(self) -> None:
        now = replace_fields(BEFORE, versions={}, releases={"xllamacpp": NEWER})
        (note,) = list_release_notes(serving(), now, upgrade=False)
        assert f"xllamacpp {NEWER} is newer than {PRESENT}" in note and "--upgrade" in note
        assert list_release_notes(serving(), now, upgrade=True) == []

    def test_unreachable_index_is_noted(self) -> None:
        now = replace_fields(BEFORE, versions={}, releases={}, no_answer={"xllamacpp": "it cannot be reached"})
        notes = list_release_notes(serving(LLAMA.pinned_version or ""), now, upgrade=False)
        assert notes == ["new releases of xllamacpp are unknown: it cannot be reached"]


class Site:
    """What an upgrade does to a site: installs, checks, asks for a comparison, removes."""

    def __init__(self) -> None:
        self.outlook = serving()
        self.installed: list[str] = []
        self.removed: list[str] = []
        self.shadow: ShadowResult | Exception | None = None
        self.check = OptionCheck(accepted=True, by="its own parser", options=9)
        self.failure: Exception | None = None
        self.was_there = False
        self.asked: list[str] = []


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    here = Site()
    environment = EngineEnvironment(
        engine="llama.cpp", version=NEWER, path=str(tmp_path / "new"), packages=(), python="3", made_at="now",
        disk_bytes=1_000,
    )  # fmt: skip

    def ask(record: Any, do: str, arguments: Any, **more: Any) -> Any:
        here.asked.append(do)
        if do == "outlook":
            return here.outlook
        if do != "shadow":
            return None
        assert arguments.engine == f"llama.cpp@{NEWER}" and here.installed == [NEWER] and not here.removed
        if isinstance(here.shadow, Exception):
            raise here.shadow
        return here.shadow

    def install(engine: Any, progress: Any, device: str) -> EngineEnvironment:
        if here.failure is not None:
            raise here.failure
        here.installed.append(engine.version)
        return environment

    for module in (watching, upgrading):
        monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(watching, "ask_index", lambda packages: IndexAnswer(dict.fromkeys(packages, NEWER), {}))
    monkeypatch.setattr(watching, "is_installed", lambda one, hardware: False)
    monkeypatch.setattr(upgrading, "find_environment", lambda *words: environment if here.was_there else None)
    monkeypatch.setattr(upgrading, "make_environment", install)
    monkeypatch.setattr(upgrading.UpgradeTrial, "_check_options", lambda self, environment: here.check.problem)
    monkeypatch.setattr(upgrading, "uninstall_environment", lambda one: here.removed.append(one.version))
    yield here


class TestTrial:
    def test_nothing_is_installed_without_the_option(self, site: Site) -> None:
        done = watch_once(RECORD, WatchOptions())
        assert site.installed == [] and done.upgrade is None and (done.answer, done.exit_code) == ("stay", 0)
        assert any("--upgrade installs it side by side" in note for note in done.notes)

    def test_proven_gain_is_an_upgrade_with_interval_and_quality(self, site: Site) -> None:
        site.shadow = compared(400, 200)
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        found = done.upgrade
        assert found is not None and (found.answer, done.answer, done.exit_code) == ("upgrade", "migrate", 10)
        assert done.challenger == f"llama.cpp@{NEWER}" and f"llama.cpp@{NEWER} is " in done.text
        assert found.effects[0].gain.low > 1.5 and found.quality is not None and found.quality.agreement == 1.0
        assert found.installed and site.removed == []
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(render_watched(done))
        page = console.export_text()
        assert f"Upgrade to llama.cpp@{NEWER}." in page and "beside the version in service" in page
        words = " ".join(page.split())
        assert re.search(r"request time 20\d ms instead of 40\d ms .*: \d+ % better \(95 % interval", words)
        assert page.count("answers agree with the reference") == 2

    def test_worse_release_is_removed_and_not_installed_again_on_a_schedule(self, site: Site) -> None:
        site.shadow = compared(200, 400)
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert done.upgrade is not None and (done.upgrade.answer, done.exit_code) == ("stay", 30)
        assert site.removed == [NEWER] and not done.upgrade.installed and done.upgrade.removed == "it is worse"
        state = read_last_state("chat", "alpha")
        assert state is not None and f"llama.cpp@{NEWER}" in state.rejected
        again = watching._evaluate(RECORD, WatchOptions(upgrade=True), site.outlook, (), state)
        assert site.installed == [NEWER] and "removed after an earlier comparison" in again.untried[-1].why

    def test_worse_release_is_kept_by_option(self, site: Site) -> None:
        site.shadow = compared(200, 400)
        done = watch_once(RECORD, WatchOptions(upgrade=True, keep=True))
        assert site.removed == [] and done.upgrade is not None and done.upgrade.installed and done.exit_code == 30

    def test_release_that_was_installed_before_is_not_removed(self, site: Site) -> None:
        site.shadow, site.was_there = compared(200, 400), True
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert site.removed == [] and done.upgrade is not None and done.upgrade.installed

    def test_equal_release_stays_installed(self, site: Site) -> None:
        site.shadow = compared(200, 200)
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert done.upgrade is not None and done.upgrade.answer == "stay" and done.exit_code == 0
        assert site.removed == [] and done.upgrade.installed

    def test_wrong_answers_are_worse_however_fast(self, site: Site) -> None:
        site.shadow = compared(400, 100, Quality(verdict="broken", agreement=0.1, asked=48))
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert done.upgrade is not None and done.upgrade.answer == "stay" and done.exit_code == 30
        assert site.removed == [NEWER]

    def test_rejected_option_ends_before_the_comparison(self, site: Site) -> None:
        site.check = OptionCheck(accepted=False, by="its own parser", options=9, problem="--metrics")
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert "shadow" not in site.asked and site.removed == [NEWER]
        assert done.upgrade is not None and (done.answer, done.exit_code) == ("stay", 0)
        assert "does not accept the options that bedplate starts it with: --metrics" in done.text

    @pytest.mark.parametrize(
        "failure", [ExternalFailure("installing llama.cpp failed"), UsageError("plain http"), OSError("no disk")]
    )
    def test_failed_installation_is_not_proven(self, site: Site, failure: Exception) -> None:
        site.failure = failure
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert done.upgrade is not None and not done.upgrade.installed
        assert (done.answer, done.exit_code) == ("not proven", 20) and "could not be tried" in done.text

    def test_failed_comparison_is_not_proven_and_the_release_is_kept(self, site: Site) -> None:
        site.shadow = NotPossible("the endpoint was never idle")
        done = watch_once(RECORD, WatchOptions(upgrade=True))
        assert (done.answer, done.exit_code) == ("not proven", 20) and site.removed == []
        assert done.upgrade is not None and done.upgrade.installed and "never idle" in done.upgrade.text
