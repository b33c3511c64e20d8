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
    from bedplate.cli.terminal import make_console
    from bedplate.hosting.records import choose_service
    from bedplate.hosting.services import read_status
    from bedplate.values import to_json

    found = read_status(choose_service(name))
    if json:
        print(to_json(found))  # noqa: T201
        return
    from bedplate.show.services import render_status

    make_console().print(render_status(found))
