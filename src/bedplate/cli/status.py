"""bedplate status: how one service is doing."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate status
  bedplate status chat
  bedplate status chat --json

Exit code 1: no such service is running."""
ServiceName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Default: the only one that runs.", show_default=False)
]


def status(name: ServiceName = None, json: Json = False) -> None:
    """Show what is served by which engine and why, in flight, memory, restarts, and whether the work has changed."""
    from bedplate.cli.terminal import console
    from bedplate.hosting.records import chosen
    from bedplate.hosting.services import status_of
    from bedplate.values import to_json

    found = status_of(chosen(name))
    if json:
        print(to_json(found))  # noqa: T201
        return
    from bedplate.show.services import render_status

    console().print(render_status(found))
