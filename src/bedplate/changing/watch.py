"""Looks again whether a service has the right engine: on a schedule, and when something has changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bedplate import store
from bedplate.changing.migrate import Migrate
from bedplate.changing.notify import post
from bedplate.changing.outlook import AskOutlook
from bedplate.changing.releases import newest, package_of
from bedplate.changing.shadow import Shadow
from bedplate.engines import all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.errors import AnswerIsNo, BadQuestion, BedplateError, OutsideFailed
from bedplate.facts.hardware import probe
from bedplate.home import home, writable
from bedplate.hosting.control import Nothing, ask
from bedplate.hosting.operations import MOST_SAID, Say
from bedplate.measure.moments import now_text
from bedplate.run.ready import is_installed
from bedplate.values.migration import Migration
from bedplate.values.record import from_json, replaced, to_json
from bedplate.values.shadow import Shadowed
from bedplate.values.units import seconds
from bedplate.values.watch import Outlook, Seen, Trigger, Untried, Watched

if TYPE_CHECKING:
    from bedplate.values.service import ServiceRecord
    from bedplate.values.verdict import Answer

EVERY_S = 86_400.0
BUDGET_S = 600.0
LOOK_S = 300.0
"""Between two looks at what may have changed."""
RELEASES_S = 6 * 3600.0
LEAST_BUDGET_S = 30.0
"""Of the budget, below which another challenger is not begun."""
RETRY_S = 60.0
SPEED = ("output_tok_s", "e2e_ms")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Watching:
    """What a watch was asked for."""

    model: str | None = None
    every_s: float = EVERY_S
    budget_s: float = BUDGET_S
    share: float = 0.1
    webhook: str | None = None
    auto: bool = False
    tell: Tell = lambda text: None


def watch_once(record: ServiceRecord, asked: Watching) -> Watched:
    """One evaluation, whether anything has changed or not; what has is said all the same."""
    found = ask(record, "outlook", AskOutlook(model=asked.model), answer=Outlook, limit_s=120)
    before = remembered(record.name, found.model)
    now = seen_now(found, before, refresh=True)
    triggers = triggered(found, before, now, asked.every_s) or (Trigger(kind="asked", text="somebody asked"),)
    return _evaluated(record, asked, found, triggers, now)


def watch(record: ServiceRecord, asked: Watching, told: Callable[[Watched], None]) -> None:
    """Looks again and again, for as long as the service runs. `told` hears of each evaluation."""
    looked_at_releases = float("-inf")
    asked.tell(
        f"watching {record.name}: a look every {seconds(asked.every_s)}, or when something changes; "
        f"{'a proven gain is migrated to' if asked.auto else 'nothing is moved without --auto'}"
    )
    while True:
        try:
            found = ask(record, "outlook", AskOutlook(model=asked.model), answer=Outlook, limit_s=120)
        except OutsideFailed as error:
            from bedplate.hosting.records import is_alive

            if not is_alive(record):
                asked.tell(f"{record.name} has ended, and so does its watch")
                return
            asked.tell(f"{error.message}; asking again in {seconds(RETRY_S)}")
            time.sleep(RETRY_S)  # too busy to say
            continue
        before = remembered(record.name, found.model)
        refresh = time.monotonic() - looked_at_releases > RELEASES_S
        if refresh:
            looked_at_releases = time.monotonic()
        now = seen_now(found, before, refresh=refresh)
        triggers = triggered(found, before, now, asked.every_s)
        if triggers:
            told(_evaluated(record, asked, found, triggers, now))
        time.sleep(min(LOOK_S, asked.every_s))


# what has changed


def seen_now(found: Outlook, before: Seen | None, *, refresh: bool) -> Seen:
    """The state of things; the index is asked only now and then."""
    packages = {name: package for name in _names(found) if (package := package_of(engine_by_id(name))) is not None}
    releases = dict(before.releases) if before is not None else {}
    if refresh:
        releases |= newest(package for package, _ in packages.values())
    return Seen(
        at_s=time.time(),
        driver=found.driver,
        drift=found.drift,
        late=found.late,
        versions={name: version for name, (_, version) in packages.items()},
        releases=releases,
    )


def _names(found: Outlook) -> tuple[str, ...]:
    """The engine in service, and those that might take its place."""
    wanted = (found.engine, found.decision.engine, *(one.engine for one in found.decision.challengers))
    return tuple(dict.fromkeys(name for name in wanted if name is not None and name in all_engines()))


def triggered(found: Outlook, before: Seen | None, now: Seen, every_s: float) -> tuple[Trigger, ...]:
    """What calls for another look, most telling first. Pure."""
    if before is None:
        return (Trigger(kind="schedule", text="it was never looked at before"),)
    triggers = []
    if found.late is not None and before.late is None:
        triggers.append(Trigger(kind="latency", text=found.late))
    if found.drift is not None and before.drift is None:
        triggers.append(Trigger(kind="workload", text=found.drift))
    if now.driver != before.driver:
        text = f"the driver is {now.driver or 'not known'}, and was {before.driver or 'not known'}"
        triggers.append(Trigger(kind="driver", text=text))
    for name, version in now.versions.items():
        if name in before.versions and before.versions[name] != version:
            text = f"bedplate installs {name} {version} now, and installed {before.versions[name]} then"
            triggers.append(Trigger(kind="bedplate", text=text))
    for package, version in now.releases.items():
        if before.releases.get(package, version) != version:
            text = f"{package} {version} is on the index, after {before.releases[package]}"
            triggers.append(Trigger(kind="release", text=text))
    if not triggers and now.at_s - before.at_s >= every_s:
        text = f"the last look is {seconds(now.at_s - before.at_s)} ago"
        triggers.append(Trigger(kind="schedule", text=text))
    return tuple(triggers)


# one evaluation


def _evaluated(
    record: ServiceRecord, asked: Watching, found: Outlook, triggers: tuple[Trigger, ...], now: Seen
) -> Watched:
    began, at = time.monotonic(), now_text()
    for trigger in triggers:
        asked.tell(f"{trigger.kind}: {trigger.text}")
    shadows, untried = _tried(record, asked, found)
    answer, text, best = conclusion(found, shadows)
    notes = [*unpinned(now)]
    done = Watched(
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
        notes=tuple(notes),
        took_s=round(time.monotonic() - began, 3),
    )
    if asked.auto and answer == "migrate" and best is not None:
        done = _moved(record, asked, done, best)
    done = _written(done, found)
    _logged(record, done)
    if asked.webhook is not None and (why := post(asked.webhook, to_json(done))) is not None:
        done = replaced(done, notes=(*done.notes, f"the webhook was not told: {why}"))
    remember(record.name, found.model, now)
    return done


def _logged(record: ServiceRecord, done: Watched) -> None:
    """In the service's own log, which its operator reads; one that has ended meanwhile has no use for it."""
    moved = f"; migration: {done.migration.outcome}" if done.migration is not None else ""
    to = f" to {done.challenger}" if done.answer == "migrate" else ""
    with contextlib.suppress(BedplateError):
        said = Say(text=f"watch: {done.answer}{to}: {done.text}{moved}"[:MOST_SAID])
        ask(record, "say", said, answer=Nothing)


def challengers(found: Outlook, installed: Sequence[str]) -> tuple[list[str], list[Untried]]:
    """Who is tried, in the plan's order, and who is not and why. Pure."""
    decision = found.decision
    wanted = [name for name in (decision.engine, *(one.engine for one in decision.challengers)) if name is not None]
    tried, untried = [], []
    for name in dict.fromkeys(wanted):
        if name == found.engine:
            continue
        if name in installed or name == decision.engine:
            tried.append(name)
        else:
            untried.append(
                Untried(engine=name, why=f"it is not installed here; bedplate shadow {name} would do that and try it")
            )
    return tried, untried


def _tried(record: ServiceRecord, asked: Watching, found: Outlook) -> tuple[list[Shadowed], list[Untried]]:
    """Each challenger in idle time, as long as there is budget."""
    hardware = probe()
    installed = [name for name, one in all_engines().items() if is_installed(one, hardware)]
    names, untried = challengers(found, installed)
    shadows: list[Shadowed] = []
    until = time.monotonic() + asked.budget_s
    for position, name in enumerate(names):
        for_s = part_of(until - time.monotonic(), len(names) - position, is_first=position == 0)
        if for_s is None:
            untried.append(Untried(engine=name, why=f"the budget of {seconds(asked.budget_s)} was spent"))
            continue
        wanted = Shadow(engine=name, model=found.model, share=asked.share, for_s=for_s)
        try:
            shadows.append(ask(record, "shadow", wanted, answer=Shadowed, tell=asked.tell, limit_s=None))
        except (AnswerIsNo, BadQuestion, OutsideFailed) as error:
            untried.append(Untried(engine=name, why=error.summary))
            asked.tell(f"{name}: {untried[-1].why}")
    return shadows, untried


def part_of(left_s: float, challengers: int, *, is_first: bool) -> float | None:
    """How long the next of so many may take; `None`: what is left is not worth beginning. The first is always tried."""
    if left_s < LEAST_BUDGET_S and not is_first:
        return None
    return max(left_s / challengers, min(LEAST_BUDGET_S, left_s))


def conclusion(found: Outlook, shadows: Sequence[Shadowed]) -> tuple[Answer, str, str | None]:
    """The answer of all comparisons together: one proven gain is enough, the largest counts. Pure."""
    planned = found.decision.engine
    moves = [one for one in shadows if one.verdict.answer == "migrate"]
    if moves:
        best = max(moves, key=_gain)
        return "migrate", best.verdict.text, best.verdict.b.engine
    open_ones = [one for one in shadows if one.verdict.answer == "not proven"]
    if open_ones:
        best = max(open_ones, key=_gain)
        return "not proven", best.verdict.text, best.verdict.b.engine
    if planned is not None and planned not in (found.engine, *(one.verdict.b.engine for one in shadows)):
        return "not proven", f"A plan would choose {planned} today, and it could not be measured.", planned
    if not shadows:
        return "stay", f"A plan would choose {found.engine} again, and no challenger could be measured.", None
    best = max(shadows, key=_gain)
    return "stay", best.verdict.text, best.verdict.b.engine


def _gain(one: Shadowed) -> float:
    """In speed: first tokens and single ones are parts of it."""
    return max((effect.gain.value for effect in one.verdict.effects if effect.metric in SPEED), default=0.0)


def unpinned(now: Seen) -> list[str]:
    """Releases that this bedplate does not install yet."""
    pins = {
        package: version
        for name in now.versions
        if (found := package_of(engine_by_id(name)))
        for package, version in [found]
    }
    return [
        f"{package} {version} is on the index; this bedplate installs {pins[package]}, and has measured nothing newer"
        for package, version in now.releases.items()
        if package in pins and pins[package] != version
    ]


def _moved(record: ServiceRecord, asked: Watching, done: Watched, engine: str) -> Watched:
    try:
        wanted = Migrate(engine=engine, model=done.model)
        moved = ask(record, "migrate", wanted, answer=Migration, tell=asked.tell, limit_s=None)
    except BedplateError as error:
        return replaced(done, notes=(*done.notes, f"the migration failed: {error.summary}"))
    return replaced(done, migration=moved)


# what is kept


def _written(done: Watched, found: Outlook) -> Watched:
    """Its page and its value, under BEDPLATE_HOME/reports."""
    from bedplate.show.report import html, page_of

    stem = f"{done.service}-{done.at.replace(':', '')}"
    try:
        folder = writable(home() / "reports")
        runs = [store.run(one.run) for one in done.shadows]
        if runs:
            verdict = next((one.verdict for one in done.shadows if one.verdict.b.engine == done.challenger), None)
            page = page_of(runs, verdict=verdict, target=found.target)
            path = folder / f"{stem}.html"
            path.write_text(html(page), encoding="utf-8")
            done = replaced(done, report=str(path))
        (folder / f"{stem}.json").write_text(to_json(done), encoding="utf-8")
    except (OSError, BedplateError) as error:
        why = error.message if isinstance(error, BedplateError) else error.strerror or str(error)
        return replaced(done, notes=(*done.notes, f"the report could not be written: {why}"))
    return done


def _state_path(service: str, model: str) -> Path:
    from bedplate.hosting.records import as_name

    return home() / "watch" / f"{service}-{as_name(model)}.json"


def remembered(service: str, model: str) -> Seen | None:
    """A state that cannot be read is none: everything is looked at anew."""
    try:
        return from_json(Seen, _state_path(service, model).read_bytes())
    except (OSError, BadQuestion):
        return None


def remember(service: str, model: str, seen: Seen) -> None:
    path = _state_path(service, model)
    writable(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(to_json(seen), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OutsideFailed(f"cannot write {path}", cause=error.strerror or str(error)) from error
