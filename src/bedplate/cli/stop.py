"""bedplate stop: stops services."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json
from bedplate.cli.status import ServiceName

EXAMPLES = """Examples:

\b
  bedplate stop
  bedplate stop chat --drain 120
  bedplate stop --all

Exit codes: 1 no such service is running; 3 it did not stop in time."""


def stop(
    name: ServiceName = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all running services.")] = False,
    drain: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that running requests may take to finish.")
    ] = 30,
    json: Json = False,
) -> None:
    """Stop a service after it has finished its running requests."""
    import sys

    from bedplate.cli.terminal import TerminalProgress, console, show_error
    from bedplate.errors import BadQuestion, BedplateError
    from bedplate.hosting.records import chosen, running
    from bedplate.hosting.services import stopped
    from bedplate.values import to_json
    from bedplate.values.units import seconds

    if every and name is not None:
        raise BadQuestion("--all and NAME cannot be combined", hint="leave out one of the two")
    progress = TerminalProgress()
    done, code = [], 0
    for record in running() if every else [chosen(name)]:
        try:
            one = stopped(record, drain, progress.note)
        except BedplateError as error:
            if not every:
                raise
            show_error(error)  # the others are still stopped
            code = error.exit_code
            continue
        done.append(one)
        if not json:
            console().print(f" {one.name} stopped in {seconds(one.took_s)}", soft_wrap=True)
    if json:
        print(to_json(done))  # noqa: T201
    elif every and not done and not code:
        console().print(" no service is running")
    sys.exit(code)
