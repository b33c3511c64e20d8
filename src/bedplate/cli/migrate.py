"""bedplate migrate: replaces the engine behind a running endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bedplate.cli.options import Json, parse_engine_and_version
from bedplate.cli.serve import BuildChoice
from bedplate.cli.status import ServiceName

if TYPE_CHECKING:
    from bedplate.values import Decision
    from bedplate.values.migration import Migration

EXAMPLES = """Examples:

\b
  bedplate migrate vllm
  bedplate migrate llama.cpp chat --build native
  bedplate migrate pytorch --step 5,25,100 --slower 4
  bedplate plan --engine vllm --json > plan.json; bedplate migrate vllm --plan plan.json
  bedplate migrate --cancel
  bedplate migrate --cancel chat

Exit codes: 0 migrated, or cancelled; 1 rolled back, with the reason, or no migration to cancel; 2 usage error;
3 external failure."""


def migrate(
    context: typer.Context,
    engine: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="The engine to migrate to; none with --cancel.", show_default=False),
    ] = None,
    name: ServiceName = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the running migration; the old engine serves all requests again.")
    ] = False,
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
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.errors import UsageError
    from bedplate.hosting.control import ask
    from bedplate.hosting.records import choose_service
    from bedplate.values.migration import Migration

    if cancel:
        _cancel(context, name, service=engine, model=model, json=json)
    if engine is None:
        raise UsageError("no engine is given to migrate to", hint="for example: bedplate migrate vllm")
    wanted = MigrationRequest(
        engine=parse_engine_and_version(engine),
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
    service, progress = choose_service(name), TerminalProgress()
    try:
        done = ask(service, "migrate", wanted, answer=Migration, tell=progress.note, limit_s=None)
    except KeyboardInterrupt:
        progress.note(f"the migration continues; to cancel it: bedplate migrate --cancel {service.name}")
        raise
    _show(done, json=json)
    raise typer.Exit(done.exit_code)


def _cancel(
    context: typer.Context, name: str | None, *, service: str | None, model: str | None, json: bool
) -> NoReturn:
    """With --cancel the first argument is the service."""
    from bedplate.changing.migrate import CancelRequest
    from bedplate.cli.options import list_given
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.errors import UsageError
    from bedplate.hosting.control import ask
    from bedplate.hosting.records import choose_service
    from bedplate.values.migration import Migration

    if name is not None:
        raise UsageError("--cancel needs no engine", hint=f"bedplate migrate --cancel {name}")
    if others := list_given(context, without=("engine", "cancel", "model", "json")):
        raise UsageError(f"--cancel cannot be combined with {' and '.join(others)}", hint="bedplate migrate --cancel")
    request = CancelRequest(model=model)
    tell = TerminalProgress().note
    done = ask(choose_service(service), "cancel", request, answer=Migration, tell=tell, limit_s=None)
    _show(done, json=json)
    raise typer.Exit(1 if done.outcome == "migrated" else 0)


def _show(done: Migration, *, json: bool) -> None:
    if json:
        from bedplate.values import to_json

        print(to_json(done))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.migration import render_migration

    make_console().print(render_migration(done))


def _read_decision(path: Path) -> Decision:
    from bedplate.errors import make_unreadable_error
    from bedplate.values import Decision, from_json

    try:
        text = path.read_bytes()
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    return from_json(Decision, text, origin=str(path))
