"""bedplate logs: the logs of a service and its engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """Examples:

\b
  bedplate logs
  bedplate logs chat -n 20
  bedplate logs chat -f

The logs of a stopped service remain: give its name."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def logs(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The service. Default: the only running one.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to show from the end of each log.")
    ] = 100,
) -> None:
    """Show the logs of a service and its engines."""
    from bedplate.hosting.logs import choose_files, read_last_lines
    from bedplate.hosting.logs import follow as followed

    files = choose_files(name)
    shown = _LogPrinter(follow or len(files()) > 1)
    if follow:
        for path, added in followed(files, lines):
            shown.show(path, added)
    for path in files():
        shown.show(path, read_last_lines(path, lines))


class _LogPrinter:
    """Prints lines, with a heading whenever the file changes."""

    def __init__(self, with_names: bool) -> None:
        self._with_names = with_names
        self._last: Path | None = None

    def show(self, path: Path, lines: list[str]) -> None:
        if not lines:
            return
        from bedplate.cli.printing import print_text

        if self._with_names and path != self._last:
            between = "\n" if self._last is not None else ""
            print_text(f"{between}==> {path.name.removesuffix('.log')} <==")
        self._last = path
        print_text("\n".join(map(_clean_line, lines)))


def _clean_line(line: str) -> str:
    """The line as a terminal shows it: without colours, and only the last state of a progress bar."""
    return _COLOURS.sub("", line).rstrip("\r").rpartition("\r")[2]
