"""What an engine writes to its log because of what clients send: it is short, plain, limited and private."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.run import supervisor
from bedplate.run.gateway.tenants import RateBucket
from bedplate.run.log_text import MAX_LINE_CHARS, clean_line
from bedplate.run.supervisor import EngineLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EngineLog]:
    found = EngineLog(tmp_path / "engine.log")
    yield found
    found.close()


def test_log_and_rotated_log_are_private(log: EngineLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 100)
    for number in range(20):
        log.append_output(f"line {number}\n".encode())
    log.close()
    files = list(log.path.parent.iterdir())
    assert len(files) > 1 and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_control_characters_are_escaped_and_colours_removed(log: EngineLog) -> None:
    hostile = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J a\rb\x0bc\x00 \u202etxt\u2028next\x9b1m\ttab é 漢\n"
    log.append_output(hostile.encode())
    log.write("its own\nsecond line")
    (first, second) = log.path.read_text().splitlines()
    assert first == "red \\x1b]0;title\\x07 \\x1b[2J a\\x0db\\x0bc\\x00 \\u202etxt\\u2028next\\x9b1m\ttab é 漢"
    assert second == "its own\\x0asecond line"
    assert list(log.tail) == [first, second]


def test_long_lines_keep_their_beginning_and_end(log: EngineLog) -> None:
    log.append_output(b"begin " + b"x" * 60_000 + b" end\n")
    line = log.path.read_text()
    assert line.startswith("begin x") and line.endswith("x end\n") and len(line) < MAX_LINE_CHARS + 100
    assert "56,010 characters left out" in line


@given(st.text(st.sampled_from("a é\t\n\r\x00\x0b\x1b[31m\x7f\x85\x9b\u2028\u2029\u202e\ud800\U0001f600")))
def test_a_cleaned_line_is_one_short_line(text: str) -> None:
    found = clean_line(text)
    assert len(found.splitlines()) <= 1 and len(found) <= 4 * MAX_LINE_CHARS + 100
    assert all(character == "\t" or not (ord(character) < 32 or 127 <= ord(character) < 160) for character in found)
    assert clean_line(found) == found


def test_a_flood_is_limited_and_the_last_lines_of_the_engine_are_kept(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("bedplate.run.supervisor.time.monotonic", lambda: now[0])
    monkeypatch.setattr("bedplate.run.gateway.tenants.time.monotonic", lambda: now[0])
    log._rate = RateBucket(supervisor.OUTPUT_BYTES_PER_MINUTE)
    line = b"error: " + b"client text " * 300 + b"\n"
    for _ in range(1000):
        log.append_output(line)
    size = log.path.stat().st_size
    assert supervisor.OUTPUT_BYTES_PER_MINUTE * 0.9 < size <= supervisor.OUTPUT_BYTES_PER_MINUTE
    now[0] += 60
    log.append_output(b"later\n")
    text = log.path.read_text()
    assert text.endswith("bytes a minute\nlater\n") and "lines left out" in text
    for _ in range(1000):
        log.append_output(line)
    log.append_output(b"short line\n" * 1000)
    log.append_output(b"Traceback\nOutOfMemory: the reason\n")
    assert "the reason" not in log.path.read_text()
    log.append_output(b"")  # it ended
    assert log.path.read_text().endswith("Traceback\nOutOfMemory: the reason\n")
    assert "OutOfMemory: the reason" in log.read_tail()
    assert log.path.stat().st_size < 4 * supervisor.OUTPUT_BYTES_PER_MINUTE


def test_bedplates_own_lines_are_written_during_a_flood(log: EngineLog) -> None:
    for _ in range(2000):
        log.append_output(b"x" * 3000 + b"\n")
    log.write("# stopped by bedplate")
    assert log.path.read_text().endswith("# stopped by bedplate\n")
