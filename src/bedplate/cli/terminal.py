"""Terminal output: results on stdout, progress and errors on stderr, colours only on a terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.segment import Segment
from rich.text import Text

from bedplate.errors import BedplateError
from bedplate.progress import can_redraw
from bedplate.values.quoting import escape_controls
from bedplate.values.units import format_seconds

PIPE_WIDTH = 120
"""Width if the output is not a terminal."""
SLOW_S = 5.0
COMMAND = re.compile(r"(?:^|: |`)bedplate [a-z]+ \S")


class SafeConsole(Console):
    """Shows control characters of texts as escapes: only its own styles and cursor movements reach the terminal.

    Names and metadata of models come from files that anybody may have made.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Lines that may not be wrapped, such as commands, stay whole: without this, rich cuts their ends off."""
        super().print(*objects, **{"crop": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                yield Segment(escape_controls(segment.text, keep="\n"), segment.style)


def make_console(stream: TextIO | None = None, kind: type[SafeConsole] = SafeConsole) -> Console:
    """A console that wraps at the terminal's width, or at a fixed width in a pipe."""
    file = stream if stream is not None else sys.stdout
    return kind(file=file, highlight=False, soft_wrap=False, width=None if file.isatty() else PIPE_WIDTH)


def show_error(error: BedplateError) -> None:
    """Print error, cause and hint, one line each; a terminal wraps them between words."""
    out = make_console(sys.stderr)
    styles = {"error": "bold red", "caused by": "bold", "hint": "bold cyan"}
    for (label, style), text in zip(styles.items(), (error.message, error.cause, error.hint), strict=True):
        if text:
            is_whole = _stays_whole(out, text) if label == "hint" else not out.is_terminal
            out.print(Text.assemble((f"{label}: ", style), text), soft_wrap=is_whole)


def _stays_whole(out: Console, text: str) -> bool:
    """In a pipe every line does; on a terminal a hint with a command does, so that it can be copied."""
    return not out.is_terminal or COMMAND.search(text) is not None


def confirm(question: str) -> bool:
    """Asks on the terminal. Leaving the question ends the command as Ctrl-C does everywhere else."""
    import typer

    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None  # exit code 130, and no "Aborted!"


def _shorten_home(text: str) -> str:
    """Paths in the user's folder as a shell takes them, too."""
    return text.replace(f" {Path.home()}/", " ~/")


class _ProgressConsole(SafeConsole):
    """Progress that nobody reads any more, as in `bedplate serve 2>&1 | head -1`, must not end a service."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - what is left in the buffer is dropped at exit
            os.dup2(nothing.fileno(), self.file.fileno())


class JsonProgress:
    """Events as lines of JSON on stderr, for programs that collect logs."""

    def __init__(self) -> None:
        self.service: str | None = None
        """`None` until the name is known."""

    def note(self, text: str) -> None:
        from bedplate.run.log_text import format_log_entry

        with suppress(BrokenPipeError):
            print(format_log_entry(text, self.service), file=sys.stderr, flush=True)  # noqa: T201

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        yield lambda done: None
        self.note(f"{label}: {format_seconds(time.monotonic() - began)}")


class TerminalProgress:
    """Progress bars on a terminal, lines in logs. Steps shorter than a second are not logged."""

    def __init__(self) -> None:
        self._console = make_console(sys.stderr, _ProgressConsole)

    def note(self, text: str) -> None:
        if _stays_whole(self._console, text):
            self._console.print(Text(f" {text}", style="dim"), soft_wrap=True)
        else:
            self._console.print(Padding(Text(_shorten_home(text), style="dim"), (0, 0, 0, 1), expand=False))

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        if can_redraw(self._console):
            with self._show_bar(label, total) as update:
                yield update
        else:
            yield self._print_lines(label, total)
        took_s = time.monotonic() - began
        if took_s >= 1:
            self._console.print(Text.assemble((" ✓ ", "green"), f"{label}: {format_seconds(took_s)}"))

    @contextmanager
    def _show_bar(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(30), TaskProgressColumn())
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(Text(label).markup, total=total)
            yield lambda done: bars.update(task, completed=min(done, total) if total else done)

    def _print_lines(self, label: str, total: int | None) -> Callable[[int], None]:
        last = [time.monotonic(), 0.0]

        def update(done: int) -> None:
            now = time.monotonic()
            share = min(done / total, 1.0) if total else 0.0
            if now - last[0] >= SLOW_S and share > last[1]:
                last[:] = [now, share]
                self.note(f"{label}: {share:.0%}")

        return update
