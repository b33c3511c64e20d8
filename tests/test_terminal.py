"""Control characters from model files and other untrusted text do not reach the terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tests.commands import invoke, run
from tests.facts.test_gguf import write

from bedplate.cli.logs import _LogPrinter
from bedplate.cli.terminal import SafeConsole, TerminalProgress, make_console, show_error
from bedplate.errors import UsageError
from bedplate.values.quoting import is_safe

EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\u202eb\u2028c\x7f"
STYLES = re.compile(r"\x1b\[[0-9;]*m")
texts = st.lists(
    st.sampled_from(["\x1b[2J", "\x9b", "\r", "\n", "\x07", "\x08", "\u202e", "\x00", "\x7f", "[red]x[/red]", "a"])
    | st.text(st.characters(codec="utf-8"), max_size=5),
    max_size=6,
).map("".join)


def assert_harmless(shown: str, styles: bool = False) -> None:
    left = STYLES.sub("", shown) if styles else shown
    assert all(letter == "\n" or is_safe(letter) for letter in left), repr(left)


def make_renderables(text: str) -> list[RenderableType]:
    table = Table(title=Text(text))
    table.add_column(Text(text))
    table.add_row(Text(text, style="bold red"), Text.assemble((text, "dim"), "x"))
    return [Text(text), table, Panel(Text(text), title=Text(text)), text]


@given(texts)
@example(EVIL)
def test_console_writes_only_its_own_styles(text: str) -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, color_system="standard", width=40, highlight=False)
    for renderable in make_renderables(text):
        console.print(renderable, markup=False)
    console.print(text, markup=False, soft_wrap=True)
    assert_harmless(out.getvalue(), styles=True)


def test_usual_text_and_styles_are_unchanged() -> None:
    written = []
    for kind in (Console, SafeConsole):
        out = io.StringIO()
        console = kind(file=out, force_terminal=True, color_system="standard", width=60)
        for renderable in make_renderables("4 × H100 · é …\u00a0GB\nsecond line"):
            console.print(renderable)
        written.append(out.getvalue())
    assert written[0] == written[1] and "\x1b[" in written[0]


def test_errors_and_progress_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(UsageError(f"{EVIL} is wrong", cause=EVIL, hint=EVIL))
    progress = TerminalProgress()
    progress.note(EVIL)
    with progress.step(EVIL, 10) as tell:
        tell(10)
    shown = capsys.readouterr().err
    assert "\\x1b" in shown
    assert_harmless(shown)
    assert isinstance(make_console(), SafeConsole)


class Screen(io.StringIO):
    """A terminal for texts of this process."""

    def isatty(self) -> bool:
        return True


def show_all(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in {"COLUMNS": "40", "TERM": "xterm", "HOME": "/home/ann"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", screen)
    show_error(
        UsageError("bedplate finds that this model is too large", hint="plan it: bedplate plan a-model --hardware x")
    )
    TerminalProgress().note("downloading a model of one gigabyte to /home/ann/.cache/bedplate/a.gguf")
    return STYLES.sub("", screen.getvalue()).splitlines()


def test_a_terminal_wraps_between_words_and_keeps_commands_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_all(Screen(), monkeypatch) == [
        "error: bedplate finds that this model is",
        "too large",
        "hint: plan it: bedplate plan a-model --hardware x",
        " downloading a model of one gigabyte to ",
        " ~/.cache/bedplate/a.gguf               ",
    ]


def test_a_pipe_gets_one_line_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show_all(io.StringIO(), monkeypatch)
    assert len(lines) == 3 and lines[-1].endswith(" to /home/ann/.cache/bedplate/a.gguf")


@pytest.fixture
def evil_gguf(tmp_path: Path) -> Path:
    """A model whose metadata contains escape sequences; a file called model.gguf has no name of its own."""
    general = {
        "general.name": EVIL, "general.basename": EVIL, "general.finetune": EVIL, "general.size_label": EVIL,
        "tokenizer.chat_template": f"{EVIL}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}",
        "tokenizer.ggml.model": EVIL, "general.license": EVIL,
    }  # fmt: skip
    return write(tmp_path / "model.gguf", general=general, vocabulary=4)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect"], ["inspect", "--json"], ["plan", "--engine", "llama.cpp"], ["plan", "--json"],
        ["plan", "--emit", "command"], ["plan", "--hardware", "RTX 4090", "--emit", "compose"],
        ["plan", "--hardware", "RTX 4090", "--emit", "kubernetes"], ["plan", "--why-not", "vllm"],
        ["serve", "--systemd"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_verbs_show_hostile_metadata_escaped(words: list[str], evil_gguf: Path) -> None:
    answer = invoke(words[0], str(evil_gguf), *words[1:])
    assert answer.out, answer
    assert_harmless(answer.out + answer.err)


def test_json_contains_the_metadata_unchanged(evil_gguf: Path) -> None:
    assert EVIL in json.loads(invoke("inspect", "--json", str(evil_gguf)).out)["chat_template"]


def test_refusals_of_hostile_files_are_escaped(tmp_path: Path) -> None:
    hostile = tmp_path / f"{EVIL}.gguf"
    hostile.write_bytes(b"GGUF\x03\0\0\0")
    answer = run("inspect", str(hostile))
    assert answer.code == 2 and "error: " in answer.err
    assert_harmless(answer.out + answer.err)


def test_logs_are_printed_without_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["\x1b[1;36mINFO\x1b[0m ready", "loading 10 %\rloading 20 %\r", f"request {EVIL}", "a\ttab"]
    _LogPrinter(with_names=False).show(Path("x.log"), lines)
    shown = capsys.readouterr().out
    assert shown.startswith("INFO ready\nloading 20 %\n") and shown.endswith("a\ttab\n")
    assert_harmless(shown.replace("\t", " "))
