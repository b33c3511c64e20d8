"""bedplate completion: shell completion for bash, zsh and fish."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

EXAMPLES = """Examples:

\b
  bedplate completion bash > ~/.local/share/bash-completion/completions/bedplate
  bedplate completion zsh > ~/.zfunc/_bedplate       with fpath+=~/.zfunc before compinit in ~/.zshrc
  bedplate completion fish > ~/.config/fish/completions/bedplate.fish
  source <(bedplate completion bash)                 for this shell only"""
VARIABLE = "_BEDPLATE_COMPLETE"


class CompletedShell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[CompletedShell, typer.Argument(metavar="SHELL", help="The shell: bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands and options in a shell."""
    import click
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell.value)
    if kind is None:
        from bedplate.errors import ExternalFailure

        raise ExternalFailure(f"the installed versions of typer and click have no completion for {shell.value}")
    typer.echo(kind(click.Group("bedplate"), {}, "bedplate", VARIABLE).source().strip())
