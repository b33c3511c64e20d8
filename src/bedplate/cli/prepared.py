"""bedplate prepared: what was converted for an engine and is kept, and how to remove it."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

app = typer.Typer(
    help="List converted weights that are kept: for which engine, how large, when last used.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate prepared
  bedplate prepared --json
  bedplate prepared remove c2427084
  bedplate prepared remove --stale
  bedplate prepared remove --unused""",
)


@app.callback()
def prepared(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from bedplate.run.kept import kept

    found = kept()
    if json:
        from bedplate.values import to_json

        print(to_json({"schema": "prepared/1", "prepared": found}))  # noqa: T201
        return
    from bedplate.cli.terminal import console
    from bedplate.show.prepared import render_prepared

    console().print(render_prepared(found))


@app.command()
def remove(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="As `bedplate prepared` names them; the first letters will do."),
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Those that nothing will ask for again.")] = False,
    unused: Annotated[bool, typer.Option("--unused", help="All that no running bedplate uses.")] = False,
) -> None:
    """Remove converted weights; the next start that needs them makes them again. Never what is in use."""
    from bedplate.errors import AnswerIsNo, BadQuestion
    from bedplate.run.kept import chosen
    from bedplate.run.kept import remove as remove_kept
    from bedplate.values.units import size

    if not ids and not stale and not unused:
        raise BadQuestion("nothing was named", hint="name an id, --stale or --unused; bedplate prepared lists them")
    gone, stay = remove_kept(chosen(ids or [], stale=stale, unused=unused))
    typer.echo(f"removed {len(gone)}: {size(sum(one.disk_bytes for one in gone))} freed")
    if stay:
        names = ", ".join(one.id for one in stay)
        raise AnswerIsNo(f"in use by a running bedplate, and still there: {names}", hint="stop it first")
