"""The pages of `runs list` and `runs show`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bedplate.judge.words import describe_load
from bedplate.measure.imported_run import UNKNOWN, UNKNOWN_TIME
from bedplate.show.columns import Column, SourcedTable, SplitTable
from bedplate.values.run import Exclusion
from bedplate.values.stored_runs import RunDetails, StoredCell, StoredRun
from bedplate.values.units import format_figure


def render_runs(found: Sequence[StoredRun]) -> RenderableType:
    if not found:
        return Text(" no runs: bedplate bench and bedplate tune store their measurements here", style="dim")
    table = SplitTable(
        Column.from_cells("id", [Text(one.id, style="bold") for one in found]),
        (
            Column.from_cells("time", [_format_time(one.at) for one in found]),
            Column.from_cells("engine", [", ".join(one.engines) for one in found], comfortable=24),
            Column.from_cells("model", [", ".join(one.models) for one in found], comfortable=24),
            Column.from_cells("cells", [f"{one.kind} {one.cells}" for one in found]),
            Column.from_cells("clean", [_describe_cleanness(one) for one in found], comfortable=34),
            Column.from_cells("plans", [_describe_effects(one) for one in found], comfortable=24),
        ),
    )
    hint = " bedplate runs show ID explains a run; bedplate runs discard ID removes it and its effect on plans"
    return Group(Text(), table, Text(), Text(hint, style="dim"))


def _format_time(at: str) -> str:
    return UNKNOWN if at == UNKNOWN_TIME else at[:16].replace("T", " ")


def _describe_cleanness(run: StoredRun) -> Text:
    if not run.cells:
        return Text("nothing measured", style="dim")
    if run.clean == run.cells:
        return Text("clean" if run.finished else "clean, not finished", style="green")
    count = "flagged" if not run.clean else f"{run.clean} of {run.cells} clean"
    return Text(f"{count}: {_join_reasons(run.exclusions[:1])}", style="yellow")


def _describe_effects(run: StoredRun) -> str:
    if not run.is_local:
        return "another machine"
    factors = [one for one in run.effects if one.factor is not None]
    parts = [f"shifts plans by {one.factor:.2f}" for one in factors[:1] if len(factors) == 1]
    if len(factors) > 1:
        parts = [f"shifts plans by {', '.join(f'{one.factor:.2f} ({one.engine})' for one in factors)}"]
    parts += ["changes the engine" for one in run.effects if one.kind == "engine"][:1]
    parts += ["changes settings" for one in run.effects if one.kind == "settings"][:1]
    return "; ".join(parts) or "no effect"


def _join_reasons(reasons: Sequence[Exclusion]) -> str:
    return "; ".join(one.text for one in reasons)


def render_details(found: RunDetails) -> RenderableType:
    run = found.run
    table = SourcedTable()
    table.add_row(
        "Run", Text(f"{run.id}, {run.kind}{'' if run.finished else ', not finished'}"), Text(_format_time(run.at))
    )
    table.add_row("Engines", Text(", ".join(run.engines) or "none"), "")
    table.add_row("Models", Text(", ".join(run.models) or "none"), "")
    for position, cell in enumerate(found.cells):
        table.add_row("Cells" if position == 0 else "", *_describe_cell(cell))
    if run.kind == "tune":
        table.add_row("Settings", Text(f"{run.cells} compared"), _describe_cleanness(run))
    for position, reason in enumerate(run.exclusions if run.kind == "tune" else ()):
        table.add_row("Excluded" if position == 0 else "", Text(reason.text), Text(reason.kind))
    for position, effect in enumerate(run.effects):
        table.add_row("Affects" if position == 0 else "", Text(effect.text), "")
    if not run.effects:
        table.add_row("Affects", Text(_explain_no_effect(run)), "")
    parts: list[RenderableType] = [Text(), table]
    if run.effects:
        parts += [Text(), Text(f" bedplate runs discard {run.id} removes these effects", style="dim")]
    return Group(*parts)


def _describe_cell(cell: StoredCell) -> tuple[Text, Text]:
    name = f"{cell.engine}@{cell.engine_version}" if cell.engine_version else cell.engine
    speed = f", {format_figure(cell.output_tok_s)} tok/s" if cell.output_tok_s is not None else ""
    text = Text(f"{name}, {describe_load(cell.load)}{speed}")
    for flag in cell.flags:
        text.append(f"\n  {flag.text}", style="red" if flag.invalid else "yellow")
    stated = {flag.text for flag in cell.flags}
    for reason in cell.exclusions:
        if reason.text not in stated:
            text.append(f"\n  {reason.text}", style="yellow")
    return text, Text("clean", style="green") if not cell.exclusions else Text("flagged: plans do not use it")


def _explain_no_effect(run: StoredRun) -> str:
    if not run.is_local:
        return "nothing: it was measured on another machine"
    if run.kind == "import":
        return "nothing: imported measurements never change plans"
    if not run.clean:
        return "nothing: plans use clean measurements only"
    if run.kind == "tune":
        return "nothing: no settings were proven better than the plan's"
    return "nothing: its model or load gives no estimate to correct"
