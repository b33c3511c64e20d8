"""Records of running services: lookup, stale records and reused process ids."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.hosting import records
from bedplate.values.record import replace_fields


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_claimed_record_is_found_and_removed(own_home: Path) -> None:
    record = records.claim_name("chat", "unused")
    assert record.pid == os.getpid() and records.choose_service("chat") == record == records.choose_service(None)
    path = own_home / "services" / "chat.json"
    assert path.stat().st_mode & 0o777 == 0o600
    records.forget(record)
    assert not path.exists() and not records.list_running()


def test_name_can_be_claimed_once(own_home: Path) -> None:
    records.claim_name("chat", "unused")
    with pytest.raises(UsageError, match="chat is already running") as caught:
        records.claim_name("chat", "unused")
    assert "bedplate stop chat" in str(caught.value.hint)
    # Without a requested name, a free one is chosen.
    assert [records.claim_name(None, "chat").name for _ in range(2)] == ["chat-2", "chat-3"]


@pytest.mark.parametrize("name", ["", "Chat", "a b", "../x", "-x", "x" * 64, "a@b", "é"])
def test_rejects_invalid_service_names(own_home: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a valid service name"):
        records.claim_name(name, "unused")


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen3-0.6B", "qwen-qwen3-0.6b"), ("...", "bedplate"), ("Ünï", "n"), ("a" * 80, "a" * 63)],
)
def test_service_name_is_derived_from_model_name(model: str, name: str) -> None:
    assert records.to_name(model) == name and records.NAME.fullmatch(name)


def test_record_of_a_dead_process_is_stale(own_home: Path, sleeper: subprocess.Popen[bytes]) -> None:
    birth = records.read_birth(sleeper.pid)
    assert birth is not None
    record = replace_fields(records.claim_name("chat", "unused"), pid=sleeper.pid, birth=birth)
    records.write(record)
    assert records.is_alive(record)
    sleeper.kill()
    sleeper.wait()
    assert not records.is_alive(record)
    with pytest.raises(NotPossible, match="no service named chat") as caught:
        records.choose_service("chat")
    assert "exited unexpectedly" in str(caught.value.cause)
    assert records.claim_name("chat", "unused").pid == os.getpid()


def test_zombie_counts_as_dead(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert records.read_birth(sleeper.pid) is None


def test_reused_pid_is_a_different_process(own_home: Path) -> None:
    record = records.claim_name("chat", "unused")
    records.write(replace_fields(record, birth=record.birth + "1"))
    assert not records.list_running()
    # The process that has the name now keeps it.
    newer = records.claim_name("chat", "unused")
    records.forget(replace_fields(record, birth="older"))
    assert records.list_running() == [newer]


def test_unreadable_record_is_ignored(own_home: Path) -> None:
    (own_home / "services").mkdir(parents=True)
    (own_home / "services" / "chat.json").write_text('{"schema": "serv')
    assert not records.list_running()
    assert records.claim_name("chat", "unused").name == "chat"


def test_choosing_needs_a_name_unless_one_service_runs(own_home: Path) -> None:
    with pytest.raises(NotPossible, match="no service is running"):
        records.choose_service(None)
    records.claim_name("a", "unused")
    records.claim_name("b", "unused")
    with pytest.raises(UsageError, match="2 services") as caught:
        records.choose_service(None)
    assert "a, b" in str(caught.value.hint)


def test_unwritable_home_is_an_external_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("in the way")
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    with pytest.raises(ExternalFailure, match="cannot write"):
        records.claim_name("chat", "unused")
    assert records.list_running() == []


def test_socket_path_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / ("long" * 40)))
    path = records.get_socket_path("chat")
    assert len(os.fsencode(path)) < 104 and path != records.get_socket_path("other")
    monkeypatch.setenv("BEDPLATE_HOME", "/short")
    assert records.get_socket_path("chat") == Path("/short/run/chat.sock")


def test_socket_folder_is_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    assert records.ensure_private_folder(tmp_path / "open").stat().st_mode & 0o077 == 0
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(ExternalFailure, match="not a folder"):
        records.ensure_private_folder(tmp_path / "link")
