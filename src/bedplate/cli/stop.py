"""bedplate stop: ends services in order."""

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

Exit code 1: no such service is running. 3: it has not ended in time."""


def stop(
    name: ServiceName = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all that run.")] = False,
    drain: Annotated[float, typer.Option(min=0, max=86400, help="Seconds that answers under way may take.")] = 30,
    json: Json = False,
) -> None:
    """Stop a service: it takes nothing new, finishes its answers, and ends with its engines."""
    import sys

    from bedplate.cli.terminal import TerminalProgress, console, show_error
    from bedplate.errors import BadQuestion, BedplateError
    from bedplate.hosting.records import chosen, running
    from bedplate.hosting.services import stopped
    from bedplate.values import to_json
    from bedplate.values.units import seconds

    if every and name is not None:
        raise BadQuestion("--all and a name cannot both be meant", hint="leave one of them out")
    progress = TerminalProgress()
    done, code = [], 0
    for record in running() if every else [chosen(name)]:
        try:
            one = stopped(record, drain, progress.note)
        except BedplateError as error:
            if not every:
                raise
            show_error(error)  # the others are stopped all the same
            code = error.exit_code
            continue
        done.append(one)
        if not json:
            console().print(f" {one.name} stopped in {seconds(one.took_s)}", soft_wrap=True)
    if json:
        print(to_json(done))  # noqa: T201
    elif every and not done and not code:
        console().print(" nothing is running")
    sys.exit(code)
