"""Runs the command line, in a separate process or in this one, which is much faster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import click
import typer
from click.testing import CliRunner

from bedplate.cli.app import app
from bedplate.errors import BedplateError


class Answer(NamedTuple):
    code: int
    out: str
    err: str
    """stderr; for an error in this process, its message, cause and hint."""


def run(*arguments: str, env: dict[str, str] | None = None) -> Answer:
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@cache
def command_tree() -> click.Group:
    """All verbs. typer makes this tree anew for each call of `app`, which takes longer than most plans."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    return command


def invoke(*arguments: str, stdin: bytes | None = None) -> Answer:
    done = CliRunner().invoke(command_tree(), list(arguments), input=stdin, prog_name="bedplate")
    if isinstance(done.exception, BedplateError):
        error = done.exception
        said = "\n".join(part for part in (error.message, error.cause, error.hint) if part)
        return Answer(error.exit_code, done.stdout, said)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Answer(done.exit_code, done.stdout, done.stderr)


def all_commands(
    command: click.Command | None = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that call it."""
    command = command or command_tree()
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from all_commands(inner, (*path, name))
