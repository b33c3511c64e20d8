"""bedplate engines use and forget: an engine that is here already, in the place of one that bedplate installs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bedplate.cli.options import EngineName

Python = Annotated[
    Path | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="An interpreter, or the folder of a virtual environment.",
        show_default=False,
    ),
]
Program = Annotated[
    Path | None,
    typer.Option(
        "--program", metavar="PATH", help="The engine's own server program, such as llama-server.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        epilog="""Examples:

\b
  bedplate engines use vllm --python ~/vllm-env/bin/python
  bedplate engines use pytorch --python /opt/torch
  bedplate engines use llama.cpp --program /opt/homebrew/bin/llama-server
  bedplate engines forget vllm"""
    )(use)
    app.command()(forget)


def use(engine: EngineName, python: Python = None, program: Program = None) -> None:
    """Use an engine of your own: a Python that has its packages, or its server program. bedplate changes neither."""
    from bedplate.engines import engine as engine_by_id
    from bedplate.errors import BadQuestion
    from bedplate.run.environments import adopt, adopt_program

    one = engine_by_id(engine)
    if python is not None and program is None:
        found = adopt(one, python)
        typer.echo(f"{one.id} runs in {found.adopted} from now on: version {found.version}, Python {found.python}")
    elif program is not None and python is None:
        found = adopt_program(one, program)
        typer.echo(f"{one.id} is {found.program} from now on: version {found.version}")
    else:
        raise BadQuestion("name either --python or --program", hint="bedplate engines use --help")
    if one.version is not None and found.version not in (one.version, *one.checked_versions):
        known = " and ".join((one.version, *one.checked_versions))
        typer.echo(f"its options were checked for {known}; another version may refuse some of them", err=True)


def forget(engine: EngineName) -> None:
    """Forget what was named with `use`; the next `serve` installs the engine again."""
    from bedplate.engines import engine as engine_by_id
    from bedplate.run.environments import forget as forget_adopted

    gone = forget_adopted(engine_by_id(engine))
    typer.echo(f"forgot {gone.theirs} for {engine}; it was not touched")
