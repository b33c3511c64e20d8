"""The pages of `shadow` and `watch`."""

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

METHODS = {"live": "a sample of the live requests", "replay": "recorded request shapes, interleaved, while idle"}


def render_shadow(done: Shadowed) -> RenderableType:
    return Group(render_verdict(done.verdict), page_of(_method_rows(done)))


def _method_rows(done: Shadowed) -> Iterator[tuple[str, str, str]]:
    paused = f", interrupted {_counted(done.pauses, 'time')}" if done.pauses else ""
    requests = f"{_counted(done.requests, 'request')} in {_counted(done.turns, 'round')}"
    yield "Method", f"{METHODS[done.how]}: {requests}{paused}", "measured"
    yield "Duration", f"{seconds(done.took_s)}; stored as run {done.run}", ""
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
        yield "Trigger", trigger.text, trigger.kind
    if done.planned is not None and done.planned != done.engine:
        yield "Plan", f"plan now chooses {done.planned}", ""
    for one in done.shadows:
        yield "Measured", f"{one.verdict.b.engine}: {one.verdict.answer}. {one.verdict.text}", f"run {one.run}"
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
    yield "Duration", seconds(done.took_s), ""
