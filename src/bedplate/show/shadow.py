"""A challenger that was tried, and a look at whether the engine is still the right one, as people read them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.show.compare import HEADS, render_verdict
from bedplate.show.page import page_of
from bedplate.values.shadow import Shadowed
from bedplate.values.units import seconds
from bedplate.values.watch import Watched

HOW = {"live": "a sample of the live requests", "replay": "recorded shapes, in turns, while nobody asked"}


def render_shadow(done: Shadowed) -> RenderableType:
    return Group(render_verdict(done.verdict), page_of(_how(done)))


def _how(done: Shadowed) -> Iterator[tuple[str, str, str]]:
    paused = f", interrupted {_counted(done.pauses, 'time')}" if done.pauses else ""
    asked = f"{_counted(done.requests, 'request')} in {_counted(done.turns, 'turn')}"
    yield "How", f"{HOW[done.how]}: {asked}{paused}", "measured"
    yield "Took", f"{seconds(done.took_s)}; kept as {done.run}", ""
    for note in done.notes:
        yield "Note", note, ""


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def render_watched(done: Watched) -> RenderableType:
    word, style = HEADS[done.answer]
    to = {"stay": f" with {done.engine}", "migrate": f" to {done.challenger}"}.get(done.answer, "")
    head = Text.assemble((f"{word}{to}.", style), f"  {done.text}")
    return Group(Text(""), Padding(head, (0, 1)), Text(""), page_of(_rows(done)))


def _rows(done: Watched) -> Iterator[tuple[str, str, str]]:
    yield "Service", f"{done.service}: {done.model} on {done.engine} {done.engine_version}", done.at
    for trigger in done.triggers:
        yield "Because", trigger.text, trigger.kind
    if done.planned is not None and done.planned != done.engine:
        yield "Plan", f"a plan would choose {done.planned} today", ""
    for one in done.shadows:
        yield "Tried", f"{one.verdict.b.engine}: {one.verdict.answer}. {one.verdict.text}", f"run {one.run}"
        for note in one.notes:
            yield "", note, ""
    for untried in done.untried:
        yield "Not tried", f"{untried.engine}: {untried.why}", ""
    if done.migration is not None:
        why = f": {done.migration.reason}" if done.migration.reason else ""
        yield "Migration", f"{done.migration.outcome}{why}", ""
    if done.report is not None:
        yield "Report", done.report, ""
    for note in done.notes:
        yield "Note", note, ""
    yield "Took", seconds(done.took_s), ""
