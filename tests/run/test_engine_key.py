"""The key of an engine's port that is the same at each start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bedplate.run.engine_key import read_stable_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_key_is_the_same_at_each_start_and_differs_by_engine() -> None:
    assert read_stable_key("vllm") == read_stable_key("vllm") != read_stable_key("sglang")
    assert len(read_stable_key("vllm")) == 64


def test_key_differs_by_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_stable_key("vllm")
    monkeypatch.setenv("BEDPLATE_HOME", str(home.with_name("other")))
    assert read_stable_key("vllm") != first


def test_only_the_user_can_read_the_secret(home: Path) -> None:
    read_stable_key("vllm")
    (file,) = home.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_processes_that_start_at_once_agree_on_the_secret() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read_stable_key, ["vllm"] * 32))) == 1
