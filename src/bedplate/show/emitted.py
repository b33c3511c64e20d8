"""The pages of `plan --emit`: the files, and the command that applies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import describe_layout
from bedplate.deploy.kubernetes import find_requirements, write_apply_commands
from bedplate.values import Decision
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import quote_shell


def render_headline(decision: Decision) -> RenderableType:
    """One service in two lines; `plan` without `--emit` shows the whole decision."""
    if decision.engine is None:
        return Text("")
    first = decision.reasons[0] if decision.reasons else None
    lines: list[RenderableType] = [
        Text(
            f" {decision.model}: {decision.engine}, {decision.quantization}, {describe_layout(decision)}", style="bold"
        )
    ]
    if first is not None:
        lines.append(Text(f" {first.text} ({first.rule})", style="dim"))
    return Group(*lines)


def render_unused(target: str, settings: Sequence[str]) -> RenderableType:
    return Text(f" Without effect in files for {target}: {', '.join(settings)}", style="yellow")


def render_files(target: str, folder: Path, files: Mapping[str, str], deploy: DeployTarget) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1), show_header=False)
    for name, text in files.items():
        table.add_row(Text(name), Text(f"{len(text.splitlines()):,} lines", style="dim"))
    lines: list[RenderableType] = [Text(""), Text(f" Written to {folder}", style="bold green"), table]
    if target == "compose":
        first = next(name for name in files if name.endswith("compose.yaml"))
        lines.append(Text(f" docker compose --file {folder / first} up --detach --wait"))
        return Group(*lines)
    if any("/Dockerfile" in name for name in files):
        lines.append(Text(" Build and push images/ first", style="yellow"))
    if needs := find_requirements(dict(files)):
        lines.append(Text(f" The cluster needs {', '.join(needs)}", style="dim"))
    lines += [Text(f" {command}") for command in write_apply_commands(deploy, quote_shell(str(folder)))]
    return Group(*lines)
