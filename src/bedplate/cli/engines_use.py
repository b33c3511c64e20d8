"""bedplate engines use and forget: use an engine that is already installed instead of one that bedplate installs."""

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
        help="A Python interpreter, or the folder of a virtual environment.",
        show_default=False,
    ),
]
Program = Annotated[
    Path | None,
    typer.Option(
        "--program", metavar="PATH", help="The server program of the engine, such as llama-server.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        epilog="""Examples:

\b
  bedplate engines use vllm --python ~/vllm-env/bin/python
  bedplate engines use pytorch --python /opt/torch
  bedplate engines use llama.cpp --program /opt/homebrew/bin/llama-server

`bedplate engines forget ID` undoes it."""
    )(use)
    app.command(epilog="Examples:\n\n\b\n  bedplate engines forget vllm")(forget)


def use(engine: EngineName, python: Python = None, program: Program = None) -> None:
    """Use an installed engine: a Python with its packages, or its server program. bedplate changes neither."""
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.errors import UsageError
    from bedplate.run.environments import adopt_program, adopt_python

    one = engine_by_id(engine)
    if python is not None and program is None:
        found = adopt_python(one, python)
        typer.echo(f"{one.id} now runs in {found.adopted}: version {found.version}, Python {found.python}")
    elif program is not None and python is None:
        found = adopt_program(one, program)
        typer.echo(f"{one.id} now runs {found.program}: version {found.version}")
    else:
        raise UsageError("give either --python or --program", hint="bedplate engines use --help")
    if one.version is not None and found.version not in (one.version, *one.checked_versions):
        known = " and ".join((one.version, *one.checked_versions))
        typer.echo(f"bedplate was tested with {known}; other versions may reject some options", err=True)


def forget(engine: EngineName) -> None:
    """Undo `use`. The next `serve` installs the engine again."""
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.run.environments import forget_environment as forget_adopted

    forgotten = forget_adopted(engine_by_id(engine))
    typer.echo(f"{engine} no longer uses {forgotten.adopted_path}, which was not changed")
