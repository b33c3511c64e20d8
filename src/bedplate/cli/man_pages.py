"""Writes a man page of each command from its help: python -m bedplate.cli.man_pages DIR."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from bedplate._version import __version__


def escape(text: str) -> str:
    """Text for roff: backslashes and dashes as they are typed, and no line that begins like a request."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in plain.splitlines())


def write_page(path: tuple[str, ...], command: click.Command) -> str:
    """The page of one command; `path` are the words that call it, without bedplate."""
    name, words = "-".join(("bedplate", *path)), " ".join(("bedplate", *path))
    context = click.Context(command, info_name=words)
    summary, _, rest = (command.help or "").strip().partition("\n")
    lines = [
        f'.TH {escape(name.upper())} 1 "" "bedplate {escape(__version__)}" "bedplate"',
        ".SH NAME", f"{escape(name)} \\- {escape(summary.rstrip('.'))}",
        ".SH SYNOPSIS", f".B {escape(words)}", escape(" ".join(command.collect_usage_pieces(context))),
    ]  # fmt: skip
    if rest.strip():
        lines += [".SH DESCRIPTION", escape(" ".join(rest.split()))]
    found = [param.get_help_record(context) for param in command.get_params(context)]
    records = [record for record in found if record is not None]
    if records:
        lines.append(".SH OPTIONS")
        for left, text in records:
            lines += [".TP", f".B {escape(left)}", escape(" ".join(text.split()))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for inner, one in command.commands.items():
            lines += [".TP", f".BR {escape('-'.join((name, inner)))} (1)", escape(one.get_short_help_str(200))]
    if epilog := (command.epilog or "").replace("\b\n", "").strip():
        lines += [".SH EXAMPLES", ".nf", escape(re.sub(r"^Examples:\s*\n", "", epilog)), ".fi"]
    if path:
        lines += [".SH SEE ALSO", ".BR bedplate (1)"]
    return "\n".join(lines) + "\n"


def list_pages(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """File name and text of each page, also of commands below other commands."""
    yield f"{'-'.join(('bedplate', *path))}.1", write_page(path, command)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from list_pages(inner, (*path, name))


def write_pages(folder: Path) -> list[Path]:
    from bedplate.cli.app import app

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in list_pages(typer.main.get_command(app)):
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bedplate.cli.man_pages DIR, such as ~/.local/share/man/man1")
    sys.stdout.write(f"{len(write_pages(Path(sys.argv[1]).expanduser()))} pages in {sys.argv[1]}\n")
