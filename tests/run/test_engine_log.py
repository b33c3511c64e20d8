"""What an engine writes to its log because of what clients send: it is short, plain, limited and private."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.run import supervisor
from bedplate.run.log_text import BURST_BYTES, BYTES_PER_REQUEST, BYTES_PER_S, MAX_LINE_CHARS, clean_line
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


def test_output_during_the_start_is_not_limited(log: EngineLog) -> None:
    for _ in range(100):
        log.append_output(b"x" * 3000 + b"\n")
    assert log.path.stat().st_size == 100 * 3001


class Requests:
    """The number of requests that an engine got, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.now = 0, 1000.0
        monkeypatch.setattr("bedplate.run.supervisor.time.monotonic", lambda: self.now)


@pytest.fixture
def requests(log: EngineLog, monkeypatch: pytest.MonkeyPatch) -> Requests:
    found = Requests(monkeypatch)
    log.limit_output(lambda: found.count)
    return found


@pytest.mark.parametrize("text", [b"client text " * 50_000 + b"\n", b"forged line\n" * 50_000])
def test_a_client_cannot_fill_the_log(text: bytes, log: EngineLog, requests: Requests) -> None:
    """The output of these requests takes no more of the log than that of ordinary requests may."""
    for _ in range(20):
        requests.count += 1
        for place in range(0, len(text), 65_536):
            log.append_output(text[place : place + 65_536])
    log.close()
    assert log.path.stat().st_size <= BURST_BYTES + 20 * (BYTES_PER_REQUEST + 100)


def test_notes_about_lines_left_out_count_too(log: EngineLog, requests: Requests) -> None:
    """A slow engine writes the output of one request so slowly that now and then there is room for a line."""
    began = requests.now
    for _ in range(20_000):
        requests.now += 0.01
        log.append_output(b"x" * 30 + b"\n")
    log.close()
    assert "left out" in log.path.read_text()
    assert log.path.stat().st_size <= BURST_BYTES + BYTES_PER_S * (requests.now - began)


def test_each_ordinary_request_is_logged(log: EngineLog, requests: Requests) -> None:
    for number in range(2000):
        requests.count += 1
        log.append_output(f"request {number}: {'x' * 90}\n".encode() * 10)
    assert log.path.read_text().count("\n") == 20_000 and "left out" not in log.path.read_text()


def test_background_output_is_logged_while_no_request_comes(log: EngineLog, requests: Requests) -> None:
    for _ in range(2000):
        requests.now += 1
        log.append_output(b"throughput: " + b"x" * 900 + b"\n")
    assert "left out" not in log.path.read_text()


def test_last_lines_of_an_engine_that_ended_are_kept(log: EngineLog, requests: Requests) -> None:
    for _ in range(100):
        log.append_output(b"short line\n" * 100)
    log.append_output(b"Traceback\nOutOfMemory: the reason\n")
    assert "the reason" not in log.path.read_text()
    log.append_output(b"")
    assert log.path.read_text().endswith("Traceback\nOutOfMemory: the reason\n")
    assert "OutOfMemory: the reason" in log.read_tail() and "lines left out" in log.path.read_text()


def test_lines_of_an_engine_do_not_look_like_bedplates_own(log: EngineLog) -> None:
    log.append_output(b"# stopped by bedplate\n")
    log.write("# 2026-01-01 llama-server")
    assert log.path.read_text() == " # stopped by bedplate\n# 2026-01-01 llama-server\n"


def test_bedplates_own_lines_are_written_during_a_flood(log: EngineLog, requests: Requests) -> None:
    for _ in range(200):
        log.append_output(b"x" * 3000 + b"\n")
    log.write("# stopped by bedplate")
    assert log.path.read_text().endswith("# stopped by bedplate\n")
