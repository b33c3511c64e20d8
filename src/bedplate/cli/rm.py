"""bedplate rm: removes downloaded models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bedplate.run.local_models import LocalModel

EXAMPLES = """Examples:

\b
  bedplate rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M       asks first
  bedplate rm builtin --yes

Exit codes: 1 in use, kept by another program, or declined; 2 no such model, or neither a terminal nor --yes."""


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names from `bedplate list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove downloaded models from this machine.

    Only bedplate's own models and those in the Hugging Face cache. A model in use is kept.
    """
    from bedplate.run.local_models import remove_models, select_removable
    from bedplate.values import to_json
    from bedplate.values.units import format_size

    found = select_removable(models)
    if not yes and not _confirm(found):
        typer.echo("nothing was removed", err=True)
        raise typer.Exit(1)
    removed = remove_models(found)
    if json:
        print(to_json(removed))  # noqa: T201
        return
    names = ", ".join(one.name for one in removed.models)
    typer.echo(f"removed {names}: {format_size(removed.freed_bytes)} freed")


def _confirm(models: Sequence[LocalModel]) -> bool:
    from bedplate.cli.terminal import confirm
    from bedplate.errors import UsageError
    from bedplate.values.quoting import escape_controls
    from bedplate.values.units import format_size

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("removing a model needs a confirmation", hint="add --yes if there is no terminal to ask on")
    for one in models:
        typer.echo(escape_controls(f"{one.name}: {format_size(one.size_bytes)} in {one.path}"), err=True)
    return confirm("remove this?" if len(models) == 1 else "remove these?")
