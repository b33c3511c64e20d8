"""bedplate engines use and forget: a Python that has an engine already, in the place of one that bedplate installs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineName = Annotated[str, typer.Argument(metavar="ID", help="The engine, as `bedplate engines` names it.")]
Python = Annotated[
    Path, typer.Option("--python", metavar="PATH", help="An interpreter, or the folder of a virtual environment.")
]


def register(app: typer.Typer) -> None:
    app.command(
        epilog="""Examples:

\b
  bedplate engines use vllm --python ~/vllm-env/bin/python
  bedplate engines use pytorch --python /opt/torch
  bedplate engines forget vllm"""
    )(use)
    app.command()(forget)


def use(engine: EngineName, python: Python) -> None:
    """Use a Python of your own that has an engine's packages; bedplate starts it and changes nothing in it."""
    from bedplate.engines import engine as engine_by_id
    from bedplate.run.environments import adopt

    one = engine_by_id(engine)
    found = adopt(one, python)
    typer.echo(f"{one.id} runs in {found.adopted} from now on: version {found.version}, Python {found.python}")
    if one.version is not None and found.version != one.version:
        typer.echo(f"its options were checked for {one.version}; another version may refuse some of them", err=True)


def forget(engine: EngineName) -> None:
    """Forget a Python that was named with `use`; the next `serve` installs the engine again."""
    from bedplate.engines import engine as engine_by_id
    from bedplate.run.environments import forget as forget_adopted

    gone = forget_adopted(engine_by_id(engine))
    typer.echo(f"forgot {gone.adopted} for {engine}; it was not touched")
