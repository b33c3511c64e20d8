"""The pages of `shadow` and `watch`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.judge.words import describe_change
from bedplate.show.compare import HEADS, describe_quality, render_verdict
from bedplate.show.page import make_fact_table
from bedplate.values.shadow import ShadowResult
from bedplate.values.units import format_seconds, format_size
from bedplate.values.verdict import name_sides
from bedplate.values.watch import UpgradeResult, WatchEvaluation

METHODS = {"live": "a sample of the live requests", "replay": "recorded request shapes, interleaved, while idle"}


def render_shadow(done: ShadowResult) -> RenderableType:
    return Group(render_verdict(done.verdict), make_fact_table(_list_method_rows(done)))


def _list_method_rows(done: ShadowResult) -> Iterator[tuple[str, str, str]]:
    paused = f", interrupted {_format_count(done.pauses, 'time')}" if done.pauses else ""
    requests = f"{_format_count(done.requests, 'request')} in {_format_count(done.turns, 'round')}"
    yield "Method", f"{METHODS[done.how]}: {requests}{paused}", "measured"
    yield "Duration", f"{format_seconds(done.took_s)}; stored as run {done.run}", ""
    for note in done.notes:
        yield "Note", note, ""


def _format_count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def render_watched(done: WatchEvaluation) -> RenderableType:
    word, style = HEADS[done.answer]
    if done.answer == "migrate" and done.upgrade is not None and done.challenger == done.upgrade.name:
        word = "Upgrade"
    to = {"stay": f" with {done.engine}", "migrate": f" to {done.challenger}"}.get(done.answer, "")
    head = Text.assemble((f"{word}{to}.", style), f"  {done.text}")
    return Group(Text(""), Padding(head, (0, 1)), Text(""), make_fact_table(_list_rows(done)))


def _list_upgrade_rows(found: UpgradeResult) -> Iterator[tuple[str, str, str]]:
    yield "Upgrade", f"{found.engine} {found.present} to {found.release}: {found.answer}. {found.text}", found.package
    for effect in found.effects:
        yield "", describe_change(effect), f"{min(effect.repeats)} interleaved rounds"
    for name, quality in ((found.present, found.present_quality), (found.release, found.quality)):
        if quality is not None:
            yield "", f"{name}: {describe_quality(quality)}", "measured"
    if found.options is not None:
        yield "", found.options, ""
    lock = "" if found.locked is None else ", locked" if found.locked else ", not locked"
    size = f"{format_size(found.disk_bytes)}{lock}" if found.disk_bytes is not None else ""
    if found.removed is not None:
        yield "", f"removed again, because {found.removed}", size
    elif found.installed:
        yield "", f"installed beside the version in service; bedplate engines remove {found.name} removes it", size


def _list_rows(done: WatchEvaluation) -> Iterator[tuple[str, str, str]]:
    yield "Service", f"{done.service}: {done.model} on {done.engine} {done.engine_version}", done.at
    for trigger in done.triggers:
        yield "Trigger", trigger.text, trigger.kind
    if done.planned is not None and done.planned != done.engine:
        yield "Plan", f"plan now chooses {done.planned}", ""
    if done.upgrade is not None:
        yield from _list_upgrade_rows(done.upgrade)
    for one in done.shadows:
        name = name_sides(one.verdict.a, one.verdict.b)[1]
        yield "Measured", f"{name}: {one.verdict.answer}. {one.verdict.text}", f"run {one.run}"
        for note in one.notes:
            yield "", note, ""
    for untried in done.untried:
        yield "Not measured", f"{untried.engine}: {untried.why}", ""
    if done.migration is not None:
        why = f": {done.migration.reason}" if done.migration.reason else ""
        yield "Migration", f"{done.migration.outcome}{why}", ""
    if done.report is not None:
        yield "Report", done.report, ""
    for note in done.notes:
        yield "Note", note, ""
    yield "Duration", format_seconds(done.took_s), ""
