"""bedplate runs discard: removes a run and what was computed from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json
from bedplate.cli.runs_show import RunId

if TYPE_CHECKING:
    from bedplate.values.stored_runs import StoredRun


def register(app: typer.Typer) -> None:
    app.command(
        epilog="""Examples:

\b
  bedplate runs discard ID                                           asks first
  bedplate runs discard 20261115-151214-5ea8 --yes
  bedplate bench --resume 20261115-151214-5ea8 --json > run.json     a copy, before it is discarded

Exit codes: 0 discarded; 1 declined; 2 no such run, or neither a terminal nor --yes."""
    )(discard)


def discard(
    id_: RunId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a run or tuning with its cells, results and verdicts. Plans are then made without it."""
    from bedplate.facts.hardware import probe
    from bedplate.measure.stored_runs import discard_run, find_stored_run, list_stored_runs

    run = find_stored_run(id_, list_stored_runs(probe()))
    if not yes and not _confirm(run):
        typer.echo("nothing was discarded", err=True)
        raise typer.Exit(1)
    removed = discard_run(run)
    if json:
        from bedplate.values import to_json

        print(to_json(removed))  # noqa: T201
        return
    typer.echo(
        f"discarded {run.id}: {removed.cells} cells, {removed.results} results and {removed.verdicts} verdicts removed"
    )
    for effect in run.effects:
        typer.echo(f"no longer applies: {effect.text}")


def _confirm(run: StoredRun) -> bool:
    from bedplate.cli.terminal import confirm
    from bedplate.errors import UsageError

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"discarding {run.id} needs a confirmation", hint="add --yes if there is no terminal to ask on"
        )
    for effect in run.effects:
        typer.echo(effect.text, err=True)
    return confirm(f"remove {run.id} with its {run.cells} cells?")
