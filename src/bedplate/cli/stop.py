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

    from bedplate.cli.terminal import TerminalProgress, make_console, show_error
    from bedplate.errors import BedplateError, UsageError
    from bedplate.hosting.records import choose_service, list_running
    from bedplate.hosting.services import stop_service
    from bedplate.values import to_json
    from bedplate.values.units import format_seconds

    if every and name is not None:
        raise UsageError("--all and NAME cannot be combined", hint="leave out one of the two")
    progress = TerminalProgress()
    done, code = [], 0
    for record in list_running() if every else [choose_service(name)]:
        try:
            one = stop_service(record, drain, progress.note)
        except BedplateError as error:
            if not every:
                raise
            show_error(error)  # the others are still stopped
            code = error.exit_code
            continue
        done.append(one)
        if not json:
            make_console().print(f" {one.name} stopped in {format_seconds(one.took_s)}", soft_wrap=True)
    if json:
        print(to_json(done))  # noqa: T201
    elif every and not done and not code:
        make_console().print(" no service is running")
    sys.exit(code)
