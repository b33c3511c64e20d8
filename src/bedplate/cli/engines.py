"""bedplate engines: what is known, what is installed, and how to remove it."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

app = typer.Typer(
    help="List the engines; remove what is installed.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate engines
  bedplate engines remove llama.cpp""",
)


@app.callback()
def engines(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from bedplate.run.environments import installed

    there = installed()
    if json:
        from bedplate.values import to_json

        print(to_json(there))  # noqa: T201
        return
    from bedplate.engines import all_engines
    from bedplate.show.engines import render_engines
    from bedplate.show.terminal import console

    console().print(render_engines(all_engines(), there))


@app.command()
def remove(
    engine: Annotated[str, typer.Argument(metavar="ID", help="The engine, as `bedplate engines` names it.")],
) -> None:
    """Remove an engine's environments; the next `serve` installs it again."""
    from bedplate.engines import engine as engine_by_id
    from bedplate.run.environments import remove as remove_environments
    from bedplate.values.units import size

    gone = remove_environments(engine_by_id(engine).id)
    freed = sum(environment.disk_bytes for environment in gone)
    typer.echo(f"removed {engine}: {size(freed)} freed")
