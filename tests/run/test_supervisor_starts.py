"""Slow starts: the limit is extended while the engine uses the CPU; and the working directory of a start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.run.test_supervisor import HEALTHY, Fake, Recorder, make_fake_environment, make_real_plan

from bedplate.errors import ExternalFailure
from bedplate.home import get_home
from bedplate.run import supervisor as module
from bedplate.run.environments import EngineEnvironment
from bedplate.run.supervisor import StartDeadline, Supervisor, measure_busy_seconds

SLOWLY = f"import time\nbegan = time.monotonic()\nwhile time.monotonic() - began < 2.5: pass\n{HEALTHY}"
CIRCLES = "while True: pass"
TELLING = f"import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]), flush=True)\n{HEALTHY}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_LIMIT_S", 1.0)
    monkeypatch.setattr(module, "SLOWEST_DISK_BYTES_S", 10**12)
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(module, "EARLY_DEATHS", 1)


def start(environment: EngineEnvironment, folder: Path, cwd: Path | None = None) -> Supervisor:
    async def run() -> Supervisor:
        one = Supervisor(
            make_real_plan(folder / "model.gguf"),
            Fake(),
            environment,
            Recorder(),
            folder / "log",
            lambda text: None,
            cwd,
        )
        one.start()
        try:
            await one.wait_for_start()
        finally:
            await one.stop()
        return one

    return asyncio.run(run())


@pytest.mark.usefixtures("impatient")
class TestStartLimit:
    def test_limit_is_extended_while_the_engine_uses_the_cpu(self, tmp_path: Path) -> None:
        one = start(make_fake_environment(tmp_path / "env", SLOWLY), tmp_path)
        assert one.backend.restarts == 0

    def test_extension_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LONGEST_START_S", 1.0)
        with pytest.raises(ExternalFailure, match="Fake did not start: it was not ready after"):
            start(make_fake_environment(tmp_path / "env", CIRCLES), tmp_path)


def test_cpu_time_includes_descendants() -> None:
    own = measure_busy_seconds(os.getpid())
    sum(range(3_000_000))
    assert measure_busy_seconds(os.getpid()) > own > 0
    assert measure_busy_seconds(2**22 + 1) == 0


def test_no_extension_before_the_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = StartDeadline(60)
    assert patience.extend(os.getpid()) is None
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.0)
    assert patience.extend(None) is None
    longer = patience.extend(os.getpid())
    assert longer is not None and 59 < longer <= 60


def test_starts_in_the_folder_of_its_weights_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "prepared").mkdir()
    start(make_fake_environment(tmp_path / "env", TELLING), tmp_path, tmp_path / "prepared")
    told = next(line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("["))
    cwd, env = json.loads(told)
    assert cwd == str(tmp_path / "prepared")
    assert env["HF_HUB_OFFLINE"] == "1" and Path(env["HF_HUB_CACHE"]).is_dir() and "HF_TOKEN" not in env
    assert Path(env["HF_HOME"]).is_relative_to(get_home())


def test_last_words_exclude_lines_of_bedplate(tmp_path: Path) -> None:
    one = start(make_fake_environment(tmp_path / "env", HEALTHY), tmp_path)
    assert one.last_words == "listening"
    one.log.tail.clear()
    one.log.tail.append("# ours")
    assert one.last_words == "no output yet"
