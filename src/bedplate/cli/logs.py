"""bedplate logs: what a service and its engines have said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """Examples:

\b
  bedplate logs
  bedplate logs chat -n 20
  bedplate logs chat -f

Of a service that has ended, the logs are still there: name it."""


def logs(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Default: the only one that runs.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The last lines of each log.")] = 100,
) -> None:
    """Show the logs of a service and of its engines; each under its name where there are several."""
    from bedplate.hosting.logs import chosen, last_lines
    from bedplate.hosting.logs import follow as followed

    files = chosen(name)
    shown = _Shown(follow or len(files()) > 1)
    if follow:
        for path, added in followed(files, lines):
            shown.show(path, added)
    for path in files():
        shown.show(path, last_lines(path, lines))


class _Shown:
    """Prints lines, with the file's name wherever it is another one than before."""

    def __init__(self, with_names: bool) -> None:
        self._with_names = with_names
        self._last: Path | None = None

    def show(self, path: Path, lines: list[str]) -> None:
        if not lines:
            return
        if self._with_names and path != self._last:
            between = "\n" if self._last is not None else ""
            print(f"{between}==> {path.name.removesuffix('.log')} <==")  # noqa: T201
        self._last = path
        print("\n".join(lines), flush=True)  # noqa: T201
