"""The chat of `bedplate run`: reads lines, streams answers, and knows a few commands."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from bedplate.cli.terminal import make_console, show_error
from bedplate.errors import BedplateError
from bedplate.hosting.chat import ChatSession, Tell, TextKind
from bedplate.values.chat import ChatAnswer
from bedplate.values.quoting import escape_controls
from bedplate.values.units import format_figure, format_memory, format_seconds

PROMPT = ">>> "
CONTINUED = "... "
COMMANDS = {
    "/help": "list these commands",
    "/stats": "time to first token and tokens per second of the last answer, and memory of the engine",
    "/clear": "forget the conversation so far",
    "/exit": "end the chat (or Ctrl-D)",
}
ENDS = ("/exit", "/bye", "/quit")
MULTILINE = '"""'


def chat(conversation: ChatSession) -> None:
    """Answers questions until Ctrl-D or /exit. Ctrl-C stops an answer."""
    out = make_console()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        # `input` uses it to edit lines and to recall earlier ones. They are kept in memory only.
        import readline

        # A pasted text of several lines is one message. Python switches this off, because its own prompt needs lines.
        readline.parse_and_bind("set enable-bracketed-paste on")
    engine = f" on {conversation.engine}" if conversation.engine else ""
    out.print(Text.assemble(" ", (conversation.model, "bold"), f"{engine} at {conversation.url}"), soft_wrap=True)
    out.print(Text(" /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends", style="dim"))
    last: ChatAnswer | None = None
    while True:
        try:
            text = _read_message()
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:
            out.print(Text("\n Ctrl-D or /exit ends the chat", style="dim"))
            continue
        if text in ENDS:
            return
        if text.startswith("/") and "\n" not in text:
            last = _run_command(text, conversation, last, out)
        elif text:
            last = _answer(conversation, text, out) or last


def _read_message() -> str:
    """One line, or several between triple quotes."""
    line = input(PROMPT).strip()
    if not line.startswith(MULTILINE):
        return line
    lines = [line.removeprefix(MULTILINE)]
    while not lines[-1].endswith(MULTILINE):
        lines.append(input(CONTINUED))
    return "\n".join(lines).removesuffix(MULTILINE).strip()


def _run_command(text: str, conversation: ChatSession, last: ChatAnswer | None, out: Console) -> ChatAnswer | None:
    """Runs a command, and returns the answer that /stats describes from now on."""
    if text == "/clear":
        conversation.clear()
        out.print(" the conversation is empty")
        return None
    if text == "/stats":
        described = describe_answer(conversation.add_memory(last)) if last is not None else "there is no answer yet"
        out.print(Text(f" {described}"))
    elif text == "/help":
        width = max(map(len, COMMANDS))
        for name, meaning in COMMANDS.items():
            out.print(f" {name:{width}}  {meaning}")
        out.print(f" {MULTILINE:{width}}  begins and ends a message of several lines")
    else:
        out.print(Text(f" there is no command {text.split()[0]}; /help lists the commands", style="yellow"))
    return last


class WordWrap:
    """Wraps streamed text between words: a word that reaches the edge is erased, and begins the next line."""

    def __init__(self) -> None:
        self._column, self._word = 0, ""

    def split(self, piece: str, width: int) -> Iterator[str | int]:
        """Text to write, and numbers of cells to erase before the cursor."""
        begun, written = "", len(self._word)
        for letter in piece:
            cells = cell_len(letter)
            if letter.isspace():
                # A space at the edge becomes the end of the line.
                shown = "\n" if letter == "\n" or self._column >= width else letter
                begun, written, self._word = begun + shown, 0, ""
                self._column = 0 if shown == "\n" else self._column + 1
                continue
            if self._column + cells > width:
                if cell_len(self._word) == self._column:  # longer than a line
                    written, self._word = 0, ""
                yield begun[: len(begun) + written - len(self._word)]
                yield cell_len(self._word[:written])
                begun, written, self._column = f"\n{self._word}", 0, cell_len(self._word)
            begun, self._word, self._column = begun + letter, self._word + letter, self._column + cells
        yield begun


def make_writer(out: Console) -> Tell:
    """Writes the pieces of an answer as they arrive."""
    wrap = WordWrap()

    def tell(piece: str, kind: TextKind) -> None:
        text, style = escape_controls(piece, keep="\n\t"), "dim" if kind == "reasoning" else ""
        parts = [text] if out.is_dumb_terminal else wrap.split(text, out.width - 1)
        for part in parts:
            if isinstance(part, str):
                out.print(Text(part, style=style), end="", soft_wrap=True)
            elif part:
                out.control(Control((ControlType.CURSOR_BACKWARD, part), (ControlType.ERASE_IN_LINE, 0)))

    return tell


def _answer(conversation: ChatSession, text: str, out: Console) -> ChatAnswer | None:
    try:
        answer = conversation.ask(text, make_writer(out))
    except BedplateError as error:
        out.print()
        show_error(error)
        if conversation.messages:
            out.print(Text(" /clear forgets the conversation so far", style="dim"))
        return None
    out.print(Text("\n stopped", style="yellow") if answer.stopped else "")
    if answer.finish_reason == "length":
        out.print(Text(" the answer reached its limit of tokens", style="yellow"))
    out.print()
    return answer


def describe_answer(answer: ChatAnswer) -> str:
    """Its speed and size in one line."""
    parts = [
        f"TTFT {format_figure(answer.ttft_ms)} ms" if answer.ttft_ms is not None else "no token",
        f"{format_figure(answer.output_tok_s)} tok/s" if answer.output_tok_s is not None else "",
        f"{answer.prompt_tokens:,} + {answer.output_tokens:,} tokens"
        if answer.prompt_tokens is not None and answer.output_tokens is not None
        else "stopped before the tokens were counted"
        if answer.stopped
        else "",
        format_seconds(answer.duration_ms / 1e3),
        f"engine memory {format_memory(answer.memory_bytes)}" if answer.memory_bytes is not None else "",
    ]
    return " · ".join(part for part in parts if part)
