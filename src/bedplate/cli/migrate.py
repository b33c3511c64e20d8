"""bedplate migrate: replaces the engine behind a running endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json, parse_engine_and_version
from bedplate.cli.serve import BuildChoice
from bedplate.cli.status import ServiceName

if TYPE_CHECKING:
    from bedplate.values import Decision

EXAMPLES = """Examples:

\b
  bedplate migrate vllm
  bedplate migrate llama.cpp chat --build native
  bedplate migrate pytorch --step 5,25,100 --slower 4
  bedplate plan --engine vllm --json > plan.json; bedplate migrate vllm --plan plan.json

Exit codes: 0 migrated; 1 rolled back, with the reason; 2 usage error; 3 external failure."""


def migrate(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="The engine to migrate to.", parser=parse_engine_and_version)
    ],
    name: ServiceName = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The served model, when there are several. Default: the only one.", show_default=False
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Start the engine with this plan, a file from `bedplate plan --json`.",
            show_default=False,
        ),
    ] = None,
    build: Annotated[
        BuildChoice, typer.Option(help="packages: as published; native: built from source on this machine.")
    ] = BuildChoice.packages,
    step: Annotated[
        str, typer.Option(metavar="PERCENT,…", help="Share of requests that the new engine gets at each step.")
    ] = "10,50,100",
    least: Annotated[
        float, typer.Option("--step-seconds", min=0.1, help="Shortest duration of a step, in seconds.")
    ] = 3,
    most: Annotated[
        float, typer.Option("--step-limit", min=0.1, help="Longest duration of a step with few requests, in seconds.")
    ] = 60,
    hold_most: Annotated[
        int,
        typer.Option(min=0, help="Requests that may wait while engines are swapped, when both do not fit into memory."),
    ] = 256,
    prefixes: Annotated[
        int, typer.Option(min=8, max=48, help="Number of prompt prefixes at which the answers are compared.")
    ] = 48,
    slower: Annotated[
        float,
        typer.Option(min=1, metavar="TIMES", help="Allowed slowdown per token if there is no latency target."),
    ] = 1.5,
    force: Annotated[
        bool,
        typer.Option("--force", help="Migrate even if requests of the last day used what the new engine lacks."),
    ] = False,
    json: Json = False,
) -> None:
    """Replace the engine behind a running endpoint.

    No request is lost. If the new engine is worse, the old one takes over again.
    """
    from bedplate.changing.migrate import MigrationRequest, read_steps
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.hosting.control import ask
    from bedplate.hosting.records import choose_service
    from bedplate.values import to_json
    from bedplate.values.migration import Migration

    wanted = MigrationRequest(
        engine=engine,
        model=model,
        decision=_read_decision(plan) if plan is not None else None,
        build=build.value,
        steps=read_steps(step),
        least_step_s=least,
        most_step_s=max(least, most),
        hold_most=hold_most,
        slower=slower,
        prefixes=prefixes,
        force=force,
    )
    done = ask(choose_service(name), "migrate", wanted, answer=Migration, tell=TerminalProgress().note, limit_s=None)
    if json:
        print(to_json(done))  # noqa: T201
    else:
        from bedplate.show.migration import render_migration

        make_console().print(render_migration(done))
    raise typer.Exit(done.exit_code)


def _read_decision(path: Path) -> Decision:
    from bedplate.errors import UsageError
    from bedplate.values import Decision, from_json

    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}", cause=error.strerror or str(error)) from error
    return from_json(Decision, text, origin=str(path))
