"""Shell completion in real shells where they are installed, and man pages made from the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import all_commands, command_tree, invoke

from bedplate.cli.man_pages import list_pages


def test_bash_completes_verbs_and_options() -> None:
    """A real bash sources the script and calls its function as for the Tab key."""
    bash = shutil.which("bash")
    assert bash is not None
    script = invoke("completion", "bash").out
    program = f"""{script}
bedplate() {{ {sys.executable} -m bedplate "$@"; }}
export -f bedplate
complete_words() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _bedplate_completion {sys.executable.rpartition("/")[0]}/bedplate
    printf '%s\\n' "${{COMPREPLY[@]}}"
}}
complete_words bedplate se
complete_words bedplate serve --por
complete_words bedplate serve --engine lla
"""
    done = subprocess.run([bash, "-c", program], capture_output=True, text=True, env=os.environ)
    assert done.stdout.split() == ["serve", "--port", "llama.cpp"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_valid_syntax(shell: str, tmp_path: Path) -> None:
    answer = invoke("completion", shell)
    assert answer.code == 0 and "_BEDPLATE_COMPLETE" in answer.out and "bedplate" in answer.out
    if (program := shutil.which(shell)) is not None:
        path = tmp_path / "script"
        path.write_text(answer.out)
        assert subprocess.run([program, "-n", str(path)], capture_output=True).returncode == 0


def test_another_shell_is_a_usage_error() -> None:
    answer = invoke("completion", "tcsh")
    assert answer.code == 2 and "choose bash, zsh or fish" in answer.err


def test_there_is_a_man_page_for_each_command() -> None:
    pages = dict(list_pages(command_tree()))
    assert set(pages) == {f"{'-'.join(('bedplate', *path))}.1" for path, _ in all_commands()}
    serve = pages["bedplate-serve.1"]
    for word in (
        ".TH BEDPLATE\\-SERVE 1",
        ".SH NAME",
        ".SH SYNOPSIS",
        "\\-\\-port",
        ".SH EXAMPLES",
        "\\-\\-replicas 2",
    ):
        assert word in serve, word
    assert "bedplate\\-engines\\-install" in pages["bedplate-engines.1"]


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed here")
def test_man_renders_the_pages_without_warnings(tmp_path: Path) -> None:
    pages = dict(list_pages(command_tree()))
    for name in ("bedplate.1", "bedplate-serve.1", "bedplate-engines.1"):
        path = tmp_path / name
        path.write_text(pages[name])
        done = subprocess.run(
            ["man", "--warnings", "-l", str(path)], capture_output=True, text=True, env={**os.environ, "MANWIDTH": "80"}
        )
        assert done.returncode == 0 and done.stderr == "", (name, done.stderr)
