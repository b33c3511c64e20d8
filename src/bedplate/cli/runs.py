"""bedplate runs: stored measurements, whether they are clean, and which plans they change."""

from __future__ import annotations

import typer

from bedplate.cli.options import Json

app = typer.Typer(
    help="List, discard, export and import stored measurements.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate runs
  bedplate runs list --json
  bedplate runs show 20261115-151214-5ea8
  bedplate runs discard 20261115-151214-5ea8 --yes
  bedplate runs export 20261115-151214-5ea8 --sign -o result.json
  bedplate runs verify result.json
  bedplate runs import result.json""",
)


@app.callback()
def runs(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(json=json)


@app.command(
    name="list",
    epilog="""Examples:

\b
  bedplate runs list
  bedplate runs list --json""",
)
def list_(json: Json = False) -> None:
    """List stored runs and tunings, newest first: clean or flagged, and their effect on plans."""
    from bedplate.facts.hardware import probe
    from bedplate.measure.stored_runs import list_stored_runs

    found = list_stored_runs(probe())
    if json:
        from bedplate.values import to_json
        from bedplate.values.stored_runs import RunList

        print(to_json(RunList(runs=found)))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.runs import render_runs

    make_console().print(render_runs(found))
