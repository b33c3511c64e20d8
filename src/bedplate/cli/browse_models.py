"""The list of `models` on a terminal: reads keys, draws the screen, and starts the chosen command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bedplate.decide.catalogue import CatalogueEntry
    from bedplate.show.model_browser import ModelBrowser
    from bedplate.values.model import Task

ESCAPE_S = 0.05
"""Bytes of one key arrive together; an Escape that nothing follows is the key itself."""
_SEQUENCES = {
    "A": "up", "B": "down", "H": "home", "F": "end", "1~": "home", "4~": "end", "5~": "page-up", "6~": "page-down",
}  # fmt: skip
_CONTROLS = {
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c", "\x04": "ctrl-d",
    "\x10": "up", "\x0e": "down",
}  # fmt: skip


def can_browse() -> bool:
    """Whether a person can press keys and see a screen; Windows prints the list."""
    on_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    return on_terminal and os.name == "posix" and os.environ.get("TERM", "dumb") != "dumb"


def browse_models(state: ModelBrowser, find_models: Callable[[Task], tuple[CatalogueEntry, ...]]) -> ModelBrowser:
    """Let a person choose; return the last state with its action. `find_models` lists the models of another task."""
    from rich.control import Control

    from bedplate.cli.terminal import make_console
    from bedplate.show.model_browser import FRAME_LINES, render_browser

    console = make_console()
    known = {state.task: state.entries}
    with _read_single_keys() as keys, console.screen(hide_cursor=True) as screen:
        while state.action is None:
            size = console.size
            state = replace(state, page=max(1, size.height - FRAME_LINES))
            console.control(Control.home())
            screen.update(render_browser(state, size.height, size.width))
            state = state.press(next(keys))
            if state.task not in known:
                known[state.task] = find_models(state.task)
            state = replace(state, entries=known[state.task])
    return state


@contextmanager
def _read_single_keys() -> Iterator[Iterator[str]]:
    """Keys as they are pressed, without echo; the terminal is restored afterwards."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        # Output is still processed, so that a new line begins in the first column.
        mode = termios.tcgetattr(fd)
        mode[1] = before[1]
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        yield parse_keys(lambda wait_s: _read_text(fd, wait_s))
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read_text(fd: int, wait_s: float | None) -> str:
    """What was typed; an empty text if nothing was within `wait_s`, and Ctrl-D at the end of the terminal."""
    import select

    if wait_s is not None and not select.select([fd], [], [], wait_s)[0]:
        return ""
    return os.read(fd, 1024).decode("utf-8", "ignore") or "\x04"


def parse_keys(read: Callable[[float | None], str]) -> Iterator[str]:
    """Yield names of special keys, and characters."""
    text = ""
    while True:
        text = text or read(None)
        if text[0] != "\x1b":
            yield _CONTROLS.get(text[0], text[0])
            text = text[1:]
            continue
        text += read(ESCAPE_S) if text == "\x1b" else ""
        name, used = _parse_sequence(text)
        yield name
        text = text[used:]


def _parse_sequence(text: str) -> tuple[str, int]:
    """The key of an escape sequence, and its length; an unknown sequence is a key without a meaning."""
    if text[1:2] not in ("[", "O"):
        return "escape", 1
    end = next((at for at, letter in enumerate(text[2:], 2) if letter.isalpha() or letter == "~"), len(text) - 1)
    return _SEQUENCES.get(text[2 : end + 1], "unknown"), end + 1
