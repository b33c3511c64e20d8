"""Logs of a service: last lines across rotated files, and following."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import NotPossible
from bedplate.hosting import logs, records
from bedplate.hosting.logs import LogFollower, follow, read_last_lines
from bedplate.run import supervisor
from bedplate.run.supervisor import EngineLog


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "logs").mkdir(parents=True)
    return tmp_path / "home"


@given(
    pieces=st.lists(st.lists(st.text("ab é", max_size=5), max_size=8), min_size=1, max_size=4),
    count=st.integers(0, 30),
)
def test_last_lines_span_rotated_files(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[str]], count: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.log"
    for number, lines in enumerate(reversed(pieces)):
        name = path if number == 0 else path.with_name(f"a.log.{number}")
        name.write_text("".join(f"{line}\n" for line in lines))
    whole = [line for lines in pieces for line in lines]
    assert read_last_lines(path, count) == (whole[-count:] if count else [])


def test_large_file_is_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK", 7)
    (tmp_path / "a.log").write_text("\n".join(str(number) for number in range(1000)))
    assert read_last_lines(tmp_path / "a.log", 3) == ["997", "998", "999"]
    assert read_last_lines(tmp_path / "none.log", 3) == []


def test_each_line_is_followed_once_during_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 100)
    log = EngineLog(tmp_path / "a.log")
    log.write("before")
    follower = LogFollower(tmp_path / "a.log", from_end=True)
    seen: list[str] = []
    for number in range(40):
        log.write(f"line {number:02d} {'x' * (number % 17)}")
        if number % 3 == 0:
            seen += follower.read()
    seen += follower.read()
    log.close()
    assert [line[:7] for line in seen] == [f"line {number:02d}" for number in range(40)]
    assert (tmp_path / "a.log.1").exists()


def test_only_complete_lines_are_read_and_truncation_restarts(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    follower = LogFollower(path, from_end=True)
    assert follower.read() == []
    path.write_text("one\ntw")
    assert follower.read() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert follower.read() == ["two"]
    path.write_text("x\n")
    assert follower.read() == ["x"]


def test_follow_starts_with_last_lines_and_includes_new_files(tmp_path: Path) -> None:
    first, later = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("1\n2\n3\n")
    seen = follow(lambda: [path for path in (first, later) if path.exists()], 2)
    assert next(seen) == (first, ["2", "3"])
    for number in ("4", "5"):
        with first.open("a") as file:
            file.write(f"{number}\n")
        later.write_text("new\n")
        assert next(seen) == (first, [number])
        if number == "4":
            assert next(seen) == (later, ["new"])


def test_chooses_logs_by_service_name(own_home: Path) -> None:
    folder = own_home / "logs"
    for name in ("chat.log", "chat@llama.cpp-1.log", "chat-2.log", "detached.log", "other.log"):
        (folder / name).write_text("x\n")
    assert [path.name for path in logs.choose_files("chat")()] == ["chat.log", "chat@llama.cpp-1.log"]
    with pytest.raises(NotPossible, match="no log of a service named cha") as caught:
        logs.choose_files("cha")
    assert "chat, chat-2, other" in str(caught.value.hint)
    with pytest.raises(NotPossible, match="no service is running"):
        logs.choose_files(None)


def test_running_service_shows_only_logs_of_this_run(own_home: Path) -> None:
    import os

    folder = own_home / "logs"
    for name in ("chat.log", "chat@pytorch-1.log", "chat@llama.cpp-1.log"):
        (folder / name).write_text("x\n")
    os.utime(folder / "chat@pytorch-1.log", (1, 1))
    records.claim_name("chat", "unused")
    assert [path.name for path in logs.choose_files(None)()] == ["chat.log", "chat@llama.cpp-1.log"]
