"""The systemd unit, parsed by the rules of systemd, and checked by systemd-analyze if it is installed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commands import invoke

from bedplate.hosting.systemd import notify, quote_word, render_unit


def parse_fields(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            name, equals, value = line.partition("=")
            assert equals and re.fullmatch(r"[A-Za-z]+", name), line
            found.setdefault(name, []).append(value)
    return found


def parse_command(line: str) -> list[str]:
    """Split a command by the rules of systemd.service(5) and systemd.syntax(7)."""
    words, word, quote, at, begun = [], "", "", 0, False
    while at < len(line):
        char = line[at]
        if char == "\\":
            at += 1
            word += {"n": "\n", "t": "\t", "\\": "\\", '"': '"'}[line[at]]
        elif quote and char == quote:
            quote = ""
        elif not quote and char == '"':
            quote, begun = char, True
        elif not quote and char == " ":
            if word or begun:
                words.append(word)
            word, begun = "", False
        elif char in "%$":
            assert line[at + 1] == char, "an unquoted specifier or variable"
            at += 1
            word += char
        else:
            word += char
        at += 1
    return [*words, word] if word or begun else words


@given(
    st.lists(
        st.text(
            st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t \"%$\\'"), min_size=1
        ),
        min_size=1,
    )
)
def test_quoting_round_trips(words: list[str]) -> None:
    words = [word for word in words if "\r" not in word]
    line = " ".join(quote_word(word, command=True) for word in words)
    assert "\n" not in line and parse_command(line) == words


def test_unit_settings() -> None:
    found = parse_fields(
        render_unit("chat", "a model", ["/usr/bin/python3", "-m", "bedplate"], "/home/me/it 100%", {"A": "b c"})
    )
    assert found["KillMode"] == ["mixed"] and found["Restart"] == ["on-failure"] and found["Type"] == ["notify"]
    assert found["OOMPolicy"] == ["continue"] and found["RestartPreventExitStatus"] == ["1 2"]
    assert found["WorkingDirectory"] == ["/home/me/it 100%%"] and found["Environment"] == ['"A=b c"']
    assert found["ExecStart"] == ["/usr/bin/python3 -m bedplate"]


def test_serve_systemd_prints_the_given_command(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = invoke(
        "serve", "my model.gguf", "--port", "9000", "--set", "users=2", "--set", "volume=normal", "--no-check",
        "--build", "native", "--systemd", "--name", "chat", "-d", "--allow-host", "a.example", "--allow-host", "*",
        "--allow-origin", "https://b.example",
    )  # fmt: skip
    assert answer.code == 0, answer
    (line,) = parse_fields(answer.out)["ExecStart"]
    assert parse_command(line) == [
        sys.executable, "-m", "bedplate", "serve", "my model.gguf", "--port", "9000", "--allow-host", "a.example",
        "--allow-host", "*", "--allow-origin", "https://b.example", "--set", "users=2", "--set", "volume=normal",
        "--build", "native", "--no-check", "--name", "chat",
    ]  # fmt: skip
    assert str(Path.cwd()) in answer.out


def test_api_key_is_not_written_to_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = invoke("serve", "--systemd", "--api-key", "secret-word")
    assert answer.code == 2 and "secret-word" not in answer.out + answer.err and "EnvironmentFile" in answer.err
    monkeypatch.setenv("BEDPLATE_API_KEY", "secret-word")
    assert "secret-word" not in invoke("serve", "--systemd").out


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed here")
    path = tmp_path / "bedplate-chat.service"
    path.write_text(
        render_unit("chat", "a model", [sys.executable, "-m", "bedplate", "serve", "a b"], str(tmp_path), {})
    )
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([program, "--user", "verify", str(path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and path.name not in done.stderr, done.stderr


def test_systemd_is_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify("READY=1")  # the socket is closed: nothing happens
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
