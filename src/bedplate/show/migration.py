"""The page of `migrate`: outcome, reason, and the figures of each step."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.show.columns import Column, SplitTable
from bedplate.show.figures import format_figure_or_missing
from bedplate.show.page import make_fact_table
from bedplate.values.migration import Migration, MigrationEngine
from bedplate.values.units import format_seconds


def render_migration(done: Migration) -> RenderableType:
    if done.outcome == "migrated":
        head = Text.assemble(
            (f"Migrated to {done.b.engine}.", "bold green"), f"  {done.model} was served without interruption."
        )
        if done.reason is not None:
            head = Text.assemble((f"{done.b.engine} stays.", "bold yellow"), f"  {done.stage}: {done.reason}.")
    else:
        head = Text.assemble(
            ("Rolled back.", "bold yellow"),
            f"  {done.b.engine}, {done.stage}: {done.reason}. ",
            f"{done.a.engine} keeps serving.",
        )
    parts: list[RenderableType] = [Text(""), Padding(head, (0, 1)), Text("")]
    if done.steps:
        parts += [_render_steps(done), Text("")]
    return Group(*parts, make_fact_table(_list_rows(done)))


def _render_steps(done: Migration) -> RenderableType:
    """The figures of the challenger and the incumbent at each step."""
    steps = done.steps
    return SplitTable(
        Column.from_cells("traffic", [f"{step.percent:g} %" for step in steps], right=True),
        (
            Column.from_cells("for", [format_seconds(step.seconds) for step in steps], right=True),
            Column.from_cells("requests", [str(step.challenger.requests) for step in steps], right=True),
            Column.from_cells("failed", [str(step.challenger.failed) for step in steps], right=True),
            Column.from_cells(
                "TTFT ms", [format_figure_or_missing(step.challenger.ttft_ms) for step in steps], right=True
            ),
            Column.from_cells(
                "incumbent", [format_figure_or_missing(step.beside.ttft_ms) for step in steps], right=True
            ),
            Column.from_cells(
                "TPOT ms", [format_figure_or_missing(step.challenger.tpot_ms) for step in steps], right=True
            ),
            Column.from_cells(
                "incumbent", [format_figure_or_missing(step.beside.tpot_ms) for step in steps], right=True
            ),
        ),
    )


def _list_rows(done: Migration) -> Iterator[tuple[str, str, str]]:
    yield "Incumbent", _format_name(done.a), ""
    yield "Challenger", _format_name(done.b), ""
    for one in done.checks:
        yield "Answers", f"{one.stage}, compared with {one.against}: {one.why}", "measured" if one.answered else ""
    if done.side_by_side:
        yield "Method", "side by side: both engines loaded", ""
    else:
        yield "Method", f"one after the other: up to {done.held_most} requests waited {format_seconds(done.held_s)}", ""
    yield "Duration", format_seconds(done.took_s), ""
    if done.cut:
        yield "Aborted", f"{done.cut} responses did not finish in the time allowed", ""
    for note in done.notes:
        yield "Note", note, ""


def _format_name(one: MigrationEngine) -> str:
    many = f"{one.replicas} × " if one.replicas > 1 else ""
    return f"{many}{one.engine} {one.engine_version} {one.quantization or ''}".rstrip()
