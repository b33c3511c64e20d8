"""Watch: evaluates on a schedule, and when something has changed, whether a service still has the right engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bedplate import store
from bedplate.changing.migrate import MigrationRequest
from bedplate.changing.notify import post
from bedplate.changing.outlook import OutlookRequest
from bedplate.changing.shadow import ShadowRequest
from bedplate.changing.upgrade import ReleaseCandidate, UpgradeTrial, find_candidate, find_device
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines import load_engines
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.home import ensure_writable, get_home
from bedplate.hosting.control import NoArguments, ask
from bedplate.hosting.operations import MOST_SAID, LogMessage
from bedplate.measure.moments import format_now
from bedplate.run.ready import is_installed
from bedplate.run.releases import ask_index, find_package, is_newer
from bedplate.values.migration import Migration
from bedplate.values.record import from_json, replace_fields, to_json
from bedplate.values.shadow import ShadowResult
from bedplate.values.units import format_seconds
from bedplate.values.verdict import name_sides
from bedplate.values.watch import (
    Outlook,
    Trigger,
    UntriedChallenger,
    UpgradeResult,
    WatchEvaluation,
    WatchState,
)

if TYPE_CHECKING:
    from bedplate.values.service import ServiceRecord
    from bedplate.values.verdict import Answer

EVERY_S = 86_400.0
BUDGET_S = 600.0
LOOK_S = 300.0
"""Interval between two checks for changes."""
RELEASES_S = 6 * 3600.0
LEAST_BUDGET_S = 30.0
"""Remaining budget below which no further challenger is started."""
RETRY_S = 60.0
SPEED = ("output_tok_s", "e2e_ms")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class WatchOptions:
    """The options of a watch."""

    model: str | None = None
    every_s: float = EVERY_S
    budget_s: float = BUDGET_S
    share: float = 0.1
    webhook: str | None = None
    auto: bool = False
    force: bool = False
    """Also try challengers that lack what requests of the last day used."""
    upgrade: bool = False
    """Install a newer release of the engine in service side by side, and compare both."""
    keep: bool = False
    """Keep a release that is worse."""
    tell: Tell = lambda text: None


def watch_once(record: ServiceRecord, asked: WatchOptions) -> WatchEvaluation:
    """Evaluate once, whether or not anything has changed. The changes are reported too."""
    found = ask(record, "outlook", OutlookRequest(model=asked.model), answer=Outlook, limit_s=120)
    before = read_last_state(record.name, found.model)
    now = read_state(found, before, refresh=True)
    triggers = find_triggers(found, before, now, asked.every_s) or (Trigger(kind="asked", text="evaluation requested"),)
    now = replace_fields(now, rejected={})
    return _evaluate(record, asked, found, triggers, now)


def watch(record: ServiceRecord, asked: WatchOptions, on_result: Callable[[WatchEvaluation], None]) -> None:
    """Evaluate repeatedly while the service runs, and call `on_result` with each evaluation."""
    looked_at_releases = float("-inf")
    asked.tell(
        f"watching {record.name}: an evaluation every {format_seconds(asked.every_s)}, or when something changes; "
        f"{'migrating on a proven gain' if asked.auto else 'no migration without --auto'}"
    )
    while True:
        try:
            found = ask(record, "outlook", OutlookRequest(model=asked.model), answer=Outlook, limit_s=120)
        except ExternalFailure as error:
            from bedplate.hosting.records import is_alive

            if not is_alive(record):
                asked.tell(f"{record.name} has exited; the watch ends")
                return
            asked.tell(f"{error.message}; trying again in {format_seconds(RETRY_S)}")
            time.sleep(RETRY_S)  # the service is too busy to answer
            continue
        before = read_last_state(record.name, found.model)
        refresh = time.monotonic() - looked_at_releases > RELEASES_S
        if refresh:
            looked_at_releases = time.monotonic()
        now = read_state(found, before, refresh=refresh)
        triggers = find_triggers(found, before, now, asked.every_s)
        if triggers:
            on_result(_evaluate(record, asked, found, triggers, now))
        time.sleep(min(LOOK_S, asked.every_s))


# triggers


def read_state(found: Outlook, before: WatchState | None, *, refresh: bool) -> WatchState:
    """The current state. The package index is queried only with `refresh`."""
    packages = {
        name: package
        for name in _list_engines(found)
        if (package := find_package(engine_by_id(name), find_device(found) if name == found.engine else "cpu"))
    }
    releases, no_answer = (dict(before.releases), dict(before.no_answer)) if before is not None else ({}, {})
    if refresh:
        answer = ask_index(package for package, _ in packages.values())
        releases, no_answer = releases | answer.newest, answer.failed
    return WatchState(
        at_s=time.time(),
        driver=found.driver,
        drift=found.drift,
        late=found.late,
        versions={name: version for name, (_, version) in packages.items()},
        releases=releases,
        no_answer=no_answer,
        rejected=dict(before.rejected) if before is not None else {},
    )


def _list_engines(found: Outlook) -> tuple[str, ...]:
    """The engine in service and the engines that may replace it."""
    wanted = (found.engine, found.decision.engine, *(one.engine for one in found.decision.challengers))
    return tuple(dict.fromkeys(name for name in wanted if name is not None and name in load_engines()))


def find_triggers(found: Outlook, before: WatchState | None, now: WatchState, every_s: float) -> tuple[Trigger, ...]:
    """The reasons for an evaluation, most important first. Pure."""
    if before is None:
        return (Trigger(kind="schedule", text="first evaluation"),)
    triggers = []
    if found.late is not None and before.late is None:
        triggers.append(Trigger(kind="latency", text=found.late))
    if found.drift is not None and before.drift is None:
        triggers.append(Trigger(kind="workload", text=found.drift))
    if now.driver != before.driver:
        text = f"the driver is {now.driver or 'unknown'}, was {before.driver or 'unknown'}"
        triggers.append(Trigger(kind="driver", text=text))
    for name, version in now.versions.items():
        if name in before.versions and before.versions[name] != version:
            text = f"bedplate now installs {name} {version} instead of {before.versions[name]}"
            triggers.append(Trigger(kind="bedplate", text=text))
    for package, version in now.releases.items():
        if before.releases.get(package, version) != version:
            text = f"{package} {version} is on the index, after {before.releases[package]}"
            triggers.append(Trigger(kind="release", text=text))
    if not triggers and now.at_s - before.at_s >= every_s:
        text = f"the last evaluation was {format_seconds(now.at_s - before.at_s)} ago"
        triggers.append(Trigger(kind="schedule", text=text))
    return tuple(triggers)


# one evaluation


def _evaluate(
    record: ServiceRecord, asked: WatchOptions, found: Outlook, triggers: tuple[Trigger, ...], now: WatchState
) -> WatchEvaluation:
    began, at = time.monotonic(), format_now()
    for trigger in triggers:
        asked.tell(f"{trigger.kind}: {trigger.text}")
    shadows, untried, upgrade = _try_challengers(record, asked, found, now)
    answer, text, best = conclude(found, shadows, upgrade)
    notes = list_release_notes(found, now, asked.upgrade)
    if upgrade is not None and upgrade.removed is not None:
        now = replace_fields(now, rejected={**now.rejected, upgrade.name: upgrade.text})
    done = WatchEvaluation(
        at=at,
        service=record.name,
        model=found.model,
        engine=found.engine,
        engine_version=found.engine_version,
        triggers=triggers,
        answer=answer,
        text=text,
        challenger=best,
        planned=found.decision.engine,
        shadows=tuple(shadows),
        untried=tuple(untried),
        upgrade=upgrade,
        notes=tuple(notes),
        took_s=round(time.monotonic() - began, 3),
    )
    if asked.auto and answer == "migrate" and best is not None:
        done = _migrate(record, asked, done, best)
    done = _write_report(done, found)
    _log_result(record, done)
    if asked.webhook is not None and (why := post(asked.webhook, to_json(done))) is not None:
        done = replace_fields(done, notes=(*done.notes, f"the webhook failed: {why}"))
    save_state(record.name, found.model, now)
    return done


def _log_result(record: ServiceRecord, done: WatchEvaluation) -> None:
    """Write the outcome to the service's log, unless the service has exited."""
    moved = f"; migration: {done.migration.outcome}" if done.migration is not None else ""
    to = f" to {done.challenger}" if done.answer == "migrate" else ""
    with contextlib.suppress(BedplateError):
        line = LogMessage(text=f"watch: {done.answer}{to}: {done.text}{moved}"[:MOST_SAID])
        ask(record, "say", line, answer=NoArguments)


def choose_challengers(found: Outlook, installed: Sequence[str]) -> tuple[list[str], list[UntriedChallenger]]:
    """The challengers to try, in the plan's order, and those not to try, with the reason. Pure."""
    decision = found.decision
    names = [name for name in (decision.engine, *(one.engine for one in decision.challengers)) if name is not None]
    tried, untried = [], []
    for name in dict.fromkeys(names):
        if name == found.engine:
            continue
        if name in installed or name == decision.engine:
            tried.append(name)
        else:
            untried.append(
                UntriedChallenger(
                    engine=name, why=f"it is not installed; bedplate shadow {name} installs and compares it"
                )
            )
    return tried, untried


def _choose_release(
    asked: WatchOptions, found: Outlook, now: WatchState
) -> ReleaseCandidate | UntriedChallenger | None:
    """The release to compare; or why a newer one is not compared again."""
    candidate = find_candidate(found, now) if asked.upgrade else None
    if not isinstance(candidate, ReleaseCandidate):
        return None
    if why := now.rejected.get(candidate.name):
        return UntriedChallenger(engine=candidate.name, why=f"it was removed after an earlier comparison: {why}")
    return candidate


def _try_challengers(
    record: ServiceRecord, asked: WatchOptions, found: Outlook, now: WatchState
) -> tuple[list[ShadowResult], list[UntriedChallenger], UpgradeResult | None]:
    """Shadow the newer release, then each challenger, until the budget is spent."""
    hardware = probe()
    installed = [name for name, one in load_engines().items() if is_installed(one, hardware)]
    names, untried = choose_challengers(found, installed)
    shadows: list[ShadowResult] = []
    upgrade, release = None, _choose_release(asked, found, now)
    until, tried = time.monotonic() + asked.budget_s, 0
    if isinstance(release, UntriedChallenger):
        untried.append(release)
    elif release is not None:
        share_s = allot_time(asked.budget_s, len(names) + 1, is_first=True) or asked.budget_s
        wanted = ShadowRequest(
            engine=release.name, model=found.model, share=asked.share, for_s=share_s, force=asked.force
        )
        upgrade, shadow = UpgradeTrial(record, found, release, asked.tell).run(wanted, keep=asked.keep)
        shadows += [shadow] if shadow is not None else []
        tried = 1
    for position, name in enumerate(names):
        for_s = allot_time(until - time.monotonic(), len(names) - position, is_first=position + tried == 0)
        if for_s is None:
            untried.append(
                UntriedChallenger(engine=name, why=f"the budget of {format_seconds(asked.budget_s)} is spent")
            )
            continue
        wanted = ShadowRequest(engine=name, model=found.model, share=asked.share, for_s=for_s, force=asked.force)
        try:
            shadows.append(ask(record, "shadow", wanted, answer=ShadowResult, tell=asked.tell, limit_s=None))
        except (NotPossible, UsageError, ExternalFailure) as error:
            untried.append(UntriedChallenger(engine=name, why=error.summary))
            asked.tell(f"{name}: {untried[-1].why}")
    return shadows, untried, upgrade


def allot_time(left_s: float, challengers: int, *, is_first: bool) -> float | None:
    """Time for the next challenger; None if too little is left. The first challenger is always tried."""
    if left_s < LEAST_BUDGET_S and not is_first:
        return None
    return max(left_s / challengers, min(LEAST_BUDGET_S, left_s))


def conclude(
    found: Outlook, shadows: Sequence[ShadowResult], upgrade: UpgradeResult | None = None
) -> tuple[Answer, str, str | None]:
    """The answer over all comparisons: a proven gain is enough, and the largest one counts. Pure."""
    planned = found.decision.engine
    moves = [one for one in shadows if one.verdict.answer == "migrate"]
    if moves:
        best = max(moves, key=_compute_gain)
        return "migrate", best.verdict.text, _name_challenger(best)
    open_ones = [one for one in shadows if one.verdict.answer == "not proven"]
    if open_ones:
        best = max(open_ones, key=_compute_gain)
        return "not proven", best.verdict.text, _name_challenger(best)
    if upgrade is not None and upgrade.answer == "not proven":
        return "not proven", upgrade.text, upgrade.name
    if planned is not None and planned not in (found.engine, *map(_name_challenger, shadows)):
        return "not proven", f"A new plan would choose {planned}, but it could not be measured.", planned
    if not shadows and upgrade is not None:
        return "stay", upgrade.text, upgrade.name
    if not shadows:
        return "stay", f"A new plan would choose {found.engine} again, and no challenger could be measured.", None
    best = max(shadows, key=_compute_gain)
    return "stay", best.verdict.text, _name_challenger(best)


def _name_challenger(one: ShadowResult) -> str:
    """Its engine; ID@VERSION if it is another version of the engine in service."""
    return name_sides(one.verdict.a, one.verdict.b)[1]


def _compute_gain(one: ShadowResult) -> float:
    """The largest gain in throughput or end-to-end latency. TTFT and TPOT are parts of these."""
    return max((effect.gain.value for effect in one.verdict.effects if effect.metric in SPEED), default=0.0)


def list_release_notes(found: Outlook, now: WatchState, upgrade: bool) -> list[str]:
    """Notes about releases that are not compared: of the engine in service without --upgrade, and of others. Pure."""
    candidate = find_candidate(found, now)
    notes = []
    if isinstance(candidate, str):
        notes += [f"no upgrade: {candidate}"] if upgrade else []
    elif not upgrade:
        notes.append(
            f"{candidate.package} {candidate.release} is newer than {candidate.present}, which is in service; "
            "--upgrade installs it side by side and compares both"
        )
    pins = {
        known[0]: known[1]
        for name in now.versions
        if name != found.engine and (known := find_package(engine_by_id(name))) is not None
    }
    notes += [
        f"{package} {version} is on the index; this version of bedplate installs {pins[package]}"
        for package, version in now.releases.items()
        if package in pins and is_newer(version, pins[package])
    ]
    return [*notes, *(f"new releases of {package} are unknown: {why}" for package, why in now.no_answer.items())]


def _migrate(record: ServiceRecord, asked: WatchOptions, done: WatchEvaluation, engine: str) -> WatchEvaluation:
    try:
        wanted = MigrationRequest(engine=engine, model=done.model, force=asked.force)
        moved = ask(record, "migrate", wanted, answer=Migration, tell=asked.tell, limit_s=None)
    except BedplateError as error:
        return replace_fields(done, notes=(*done.notes, f"the migration failed: {error.summary}"))
    return replace_fields(done, migration=moved)


# reports and state


def _write_report(done: WatchEvaluation, found: Outlook) -> WatchEvaluation:
    """Write the HTML report and the JSON document under BEDPLATE_HOME/reports."""
    from bedplate.show.report import make_report, to_html

    stem = f"{done.service}-{done.at.replace(':', '')}"
    try:
        folder = ensure_writable(get_home() / "reports")
        runs = [store.find_run(one.run) for one in done.shadows]
        if runs:
            verdict = next((one.verdict for one in done.shadows if _name_challenger(one) == done.challenger), None)
            page = make_report(runs, verdict=verdict, target=found.target)
            path = folder / f"{stem}.html"
            path.write_text(to_html(page), encoding="utf-8")
            done = replace_fields(done, report=str(path))
        (folder / f"{stem}.json").write_text(to_json(done), encoding="utf-8")
    except (OSError, BedplateError) as error:
        why = error.message if isinstance(error, BedplateError) else error.strerror or str(error)
        return replace_fields(done, notes=(*done.notes, f"the report could not be written: {why}"))
    return done


def _get_state_path(service: str, model: str) -> Path:
    from bedplate.hosting.records import to_name

    return get_home() / "watch" / f"{service}-{to_name(model)}.json"


def read_last_state(service: str, model: str) -> WatchState | None:
    """The state of the last evaluation; None if there is none or it cannot be read."""
    try:
        return from_json(WatchState, _get_state_path(service, model).read_bytes())
    except (OSError, UsageError):
        return None


def save_state(service: str, model: str, seen: WatchState) -> None:
    path = _get_state_path(service, model)
    ensure_writable(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(to_json(seen), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror or str(error)) from error
