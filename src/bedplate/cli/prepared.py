"""bedplate prepared: lists and removes converted weights."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

app = typer.Typer(
    help="List or remove converted weights.",
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
    from bedplate.run.prepared_weights import list_prepared

    found = list_prepared()
    if json:
        from bedplate.run.prepared_weights import PreparedList
        from bedplate.values import to_json

        print(to_json(PreparedList(prepared=tuple(found))))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.prepared import render_prepared

    make_console().print(render_prepared(found))


@app.command(
    epilog="""Examples:

\b
  bedplate prepared remove c2427084
  bedplate prepared remove --stale
  bedplate prepared remove --unused"""
)
def remove(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Ids from `bedplate prepared`, or their first letters."),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Remove outdated weights, which nothing will use again.")
    ] = False,
    unused: Annotated[bool, typer.Option("--unused", help="Remove all weights that no running bedplate uses.")] = False,
) -> None:
    """Remove converted weights. The next start that needs them converts again. Weights in use are kept."""
    from bedplate.errors import NotPossible, UsageError
    from bedplate.run.prepared_weights import remove_prepared as remove_kept
    from bedplate.run.prepared_weights import select_prepared
    from bedplate.values.units import format_size

    if not ids and not stale and not unused:
        raise UsageError("no weights are named", hint="give an id from bedplate prepared, --stale or --unused")
    removed, in_use = remove_kept(select_prepared(ids or [], stale=stale, unused=unused))
    typer.echo(f"removed {len(removed)}: {format_size(sum(one.disk_bytes for one in removed))} freed")
    if in_use:
        names = ", ".join(one.id for one in in_use)
        raise NotPossible(f"not removed, since a running bedplate uses them: {names}", hint="stop it first")
