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
from hypothesis import example, given
from hypothesis import strategies as st
from tests.commands import invoke

from bedplate.errors import UsageError
from bedplate.hosting.systemd import notify, render_unit
from bedplate.values.quoting import is_safe, quote_systemd


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
            if line[at] == "x":
                byte = int(line[at + 1 : at + 3], 16)
                word += chr(byte if byte < 0x80 else 0xDC00 + byte)
                at += 2
            else:
                word += {"\\": "\\", '"': '"'}[line[at]]
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


odd_words = st.text(
    st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("\n\r\t \"%$\\';\x1b\x85\u2028"), min_size=1
)


@given(st.lists(odd_words, min_size=1))
def test_quoting_round_trips(words: list[str]) -> None:
    line = " ".join(quote_systemd(word, command=True) for word in words)
    assert all(map(is_safe, line)), "systemd ends a line at a carriage return too"
    # Escapes are bytes of UTF-8.
    assert [word.encode("utf-8", "surrogateescape").decode() for word in parse_command(line)] == words


@given(what=odd_words, values=st.lists(odd_words, max_size=2), argument=odd_words)
@example(what="a\\", values=["x\nExecStartPre=touch canary"], argument="\rExecStartPre=touch canary")
def test_hostile_words_add_no_setting(what: str, values: list[str], argument: str) -> None:
    environment = {f"V{number}": value for number, value in enumerate(values)}
    plain = render_unit("chat", "a", ["/bin/a", "b"], "/home", dict.fromkeys(environment, "c"))
    text = render_unit("chat", what, ["/bin/a", argument], "/home", environment)
    lines = [line.partition("=")[0] for line in text.splitlines()]
    assert lines == [line.partition("=")[0] for line in plain.splitlines()] and "\r" not in text
    assert not [line for line in text.splitlines() if line.endswith("\\")]


@pytest.mark.parametrize("folder", ["/home/a\nExecStartPre=/bin/x", "/home/a\rUser=root", "/home/a\\", "/home/a "])
def test_folder_that_a_unit_cannot_name_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="cannot name the folder"):
        render_unit("chat", "a model", ["/bin/a"], folder, {})


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
    words = [sys.executable, "-m", "bedplate", "serve", "a b", "\r\nUser=root\x1b[2J", ";", "%n $HOME", "\\"]
    path.write_text(render_unit("chat", "a model\nUser=root\\", words, str(tmp_path), {"A": "\rUser=root"}))
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
