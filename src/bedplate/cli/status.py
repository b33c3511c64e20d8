"""bedplate status: the state of one service."""

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
    str | None, typer.Argument(metavar="NAME", help="The service. Default: the only running one.", show_default=False)
]


def status(name: ServiceName = None, json: Json = False) -> None:
    """Show the state of a running service and its engines.

    The engine and why it was chosen, running requests, memory, restarts, and whether the workload has changed.
    """
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
