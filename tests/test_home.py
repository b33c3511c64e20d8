"""The home: only its owner may open it, also if an older version created it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate import store
from bedplate.home import ensure_writable, get_logs_dir, hold_lock, make_folder, open_private

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes exist on Linux and macOS")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "deep" / "home"))
    before = os.umask(0o022)
    yield tmp_path / "deep" / "home"
    os.umask(before)


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("first", ["logs", "store", "lock", "key"])
def test_whatever_creates_the_home_makes_it_private(first: str, home: Path) -> None:
    if first == "logs":
        ensure_writable(get_logs_dir())
        assert read_mode(get_logs_dir()) == 0o700
    elif first == "store":
        store.get_salt()
    elif first == "lock":
        with hold_lock(home / "engines" / "one", "testing"):
            pass
    else:
        assert invoke("keys", "add", "alice").code == 0
        assert read_mode(home / "keys-required") == 0o600
    assert read_mode(home) == 0o700


def test_home_of_an_older_version_becomes_private(home: Path) -> None:
    logs = home / "logs"
    logs.mkdir(parents=True)
    files = [logs / name for name in ("chat.log", "chat.log.1", "chat@llama.cpp-1.log", "detached.log")]
    for file in files:
        file.write_text("a line\n")
    assert read_mode(home) == 0o755 and read_mode(files[0]) == 0o644
    ensure_writable(logs)
    assert read_mode(home) == read_mode(logs) == 0o700
    assert [read_mode(file) for file in files] == [0o600] * 4


def test_folders_that_are_not_only_bedplates_keep_their_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, mode in enumerate((0o755, 0o1777)):
        folder = tmp_path / str(number)
        folder.mkdir()
        folder.chmod(mode)
        monkeypatch.setenv("BEDPLATE_HOME", str(folder))
        monkeypatch.setenv("HOME", str(folder / "user") if mode == 0o755 else str(tmp_path / "other"))
        ensure_writable(get_logs_dir())
        assert read_mode(folder) == mode
        assert read_mode(get_logs_dir()) == 0o700, "the logs are bedplate's in any case"


def test_a_linked_log_of_somebody_else_is_not_changed(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.txt"
    target.write_text("")
    target.chmod(0o644)
    get_logs_dir().mkdir(parents=True)
    (get_logs_dir() / "linked.log").symlink_to(target)
    ensure_writable(get_logs_dir())
    assert read_mode(target) == 0o644


def test_folders_outside_keep_the_usual_mode(home: Path, tmp_path: Path) -> None:
    assert read_mode(make_folder(tmp_path / "elsewhere" / "inner")) == 0o755


def test_private_files_are_private_from_their_first_byte(home: Path, tmp_path: Path) -> None:
    with open_private(tmp_path / "one.log", "ab") as file:
        assert read_mode(tmp_path / "one.log") == 0o600
        file.write(b"x")


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has files without a name")
def test_a_process_killed_while_it_checks_a_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)  # as if it were killed before
    ensure_writable(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []
