"""bedplate runs show: the cells of one run, their flags, and the plans that they change."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

RunId = Annotated[
    str, typer.Argument(metavar="ID", help="The id from `bedplate runs`, or an unambiguous beginning of it.")
]


def register(app: typer.Typer) -> None:
    app.command(
        epilog="""Examples:

\b
  bedplate runs show 20261115-151214-5ea8
  bedplate runs show 20261115-151214-5ea8 --json

`bedplate report ID` shows the measured figures."""
    )(show)


def show(id_: RunId, json: Json = False) -> None:
    """Show the cells of a run or tuning, their flags in words, and the plans that they change."""
    from bedplate.facts.hardware import probe
    from bedplate.measure.stored_runs import get_run_details

    found = get_run_details(id_, probe())
    if json:
        from bedplate.values import to_json

        print(to_json(found))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.runs import render_details

    make_console().print(render_details(found))
