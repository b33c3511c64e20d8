"""Parts run in separate processes: results, crashes, hangs and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import HANG_S, wait_for

from bedplate.errors import ExternalFailure
from bedplate.facts.measured import cuda, disk, matrix, ram
from bedplate.facts.measured.cache import identify_machine, recall
from bedplate.facts.measured.measuring import find_disturbances, measure
from bedplate.facts.measured.part import run_part
from bedplate.values import Accelerator, Figure, GpuProcess, Hardware, Record, from_json, replace_fields
from bedplate.values.measurements import GpuBandwidth

from .samples import HARDWARE, make_figure

ASKED = disk.DiskRequest(folder="/nowhere", when="2026-11-15")
NOTHING = "import sys; sys.stdin.read(); "


def run(code: str, limit_s: float = 60.0, seen: list[int] | None = None) -> disk.DiskResult:
    with replace_command(sys.executable, "-c", NOTHING + code):
        return run_part("disk", ASKED, disk.DiskResult, seen.append if seen is not None else None, limit_s=limit_s)


@contextlib.contextmanager
def replace_command(*command: str) -> Iterator[None]:
    """Run another program instead of the worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bedplate.facts.measured.part._make_command", lambda _: command)
        yield


def test_progress_and_result_are_returned() -> None:
    seen: list[int] = []
    answer = run("""print('progress 10\\nnoise\\nprogress x\\nprogress 80\\nresult {"notes": ["hello"]}')""", seen=seen)
    assert answer.notes == ("hello",) and seen == [10, 80]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(7)", "exit code 7"),
        ("print('first', file=sys.stderr); sys.exit('the last line')", "the last line"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("print('progress 5')", "exit code 0"),
    ],
)
def test_a_part_that_ends_without_an_answer_says_why(code: str, said: str) -> None:
    with pytest.raises(ExternalFailure, match=said):
        run(code)


def test_a_part_that_hangs_is_stopped() -> None:
    with pytest.raises(ExternalFailure, match=r"stopped after 0\.5 s"):
        run("import time; time.sleep(600)", limit_s=0.5)


@pytest.mark.parametrize("during", ["the start", "the next step"])
def test_an_interrupt_at_the_start_leaves_no_process(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def spy(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        if during == "the start":
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    def interrupted(timer: threading.Timer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", spy)
    monkeypatch.setattr(threading.Timer, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(600)")
    assert started[0].returncode == -signal.SIGKILL


def test_an_invalid_answer_becomes_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def garbled(name: str, request: object, result: type[Record], *_: object, **__: object) -> Record:
        return from_json(result, b'{"no": "such field"}')

    monkeypatch.setattr("bedplate.facts.measured.measuring.run_part", garbled)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    parts = (cuda.CudaResult, disk.DiskResult, matrix.MatrixResult, ram.RamResult)
    notes = measure(HARDWARE).notes
    for part in parts:
        assert sum(f"is not a valid {part.__name__} " in note for note in notes) == 1


def test_a_part_that_never_reads_its_request_is_handled() -> None:
    with (
        replace_command(sys.executable, "-c", "raise SystemExit(3)"),
        pytest.raises(ExternalFailure, match="exit code 3"),
    ):
        run_part("disk", ASKED, disk.DiskResult)


def test_a_missing_interpreter_is_reported() -> None:
    with replace_command("/nowhere/python"), pytest.raises(ExternalFailure, match="could not start"):
        run_part("disk", ASKED, disk.DiskResult)


def test_a_failed_part_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(name: str, *_: object, **__: object) -> None:
        raise ExternalFailure(f"{name} failed: signal 9")

    monkeypatch.setattr("bedplate.facts.measured.measuring.run_part", fails)
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    found = measure(HARDWARE)
    for words in ("ram failed", "cuda failed", "matrix failed", "disk failed", "could not be stored"):
        assert any(words in note for note in found.notes), words
    assert [check.name for check in found.instruction_sets] == list(HARDWARE.cpu.instruction_sets)


def test_other_processes_are_noted() -> None:
    assert find_disturbances(HARDWARE, 0.05) == ()
    assert "other processes used 60% of the CPU" in find_disturbances(HARDWARE, 0.6)[0]
    first, second = HARDWARE.accelerators
    busy = replace_fields(
        HARDWARE, accelerators=(first, replace_fields(second, processes=(GpuProcess(pid=1), GpuProcess(pid=2))))
    )
    assert find_disturbances(busy, 0.0) == ("2 other processes use GPU 1, so its figures may be too low",)


def test_figures_of_a_busy_machine_do_not_replace_those_of_an_idle_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shares = iter((0.6, 0.0, 0.6))
    monkeypatch.setattr("bedplate.facts.measured.measuring._measure_busy_share", lambda: next(shares))
    monkeypatch.setattr("bedplate.facts.measured.measuring.run_part", lambda name, request, result, *_, **__: result())
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    for disturbed in (True, False):
        found = measure(HARDWARE)
        assert bool(found.disturbances) is disturbed and recall(identify_machine(HARDWARE)) == found
    busy = measure(HARDWARE)
    assert recall(identify_machine(HARDWARE)) == found and "stay in use" in busy.notes[-1]


def test_the_data_sheet_figure_is_kept_with_the_measured_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answers(name: str, request: object, result: type[Record], update: object, **_: object) -> Record:
        gpus = (GpuBandwidth(index=0, name="a"), GpuBandwidth(index=1, name="b"))
        return cuda.CudaResult(gpus=gpus) if name == "cuda" else result()

    monkeypatch.setattr("bedplate.facts.measured.measuring.run_part", answers)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    sheet = Figure(value=4.8e12, low=4.8e12, high=4.8e12, basis="spec", source="a sheet")
    first, second = HARDWARE.accelerators
    cards = (
        replace_fields(first, bandwidth_bytes_s=sheet),
        replace_fields(second, bandwidth_bytes_s=make_figure(4e12)),
    )
    found = measure(replace_fields(HARDWARE, accelerators=cards))
    assert [gpu.spec_bytes_s for gpu in found.gpus] == [sheet, None]
    amd = replace_fields(HARDWARE, accelerators=(Accelerator(name="Radeon", vendor="amd"),))
    assert "GPUs of amd are not measured: bedplate can only measure NVIDIA GPUs" in measure(amd).notes


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    process = start(tmp_path)
    # The first children check instruction sets. The workers come after them, and none may remain.
    wait_for(lambda: _find_worker(process) or process.poll() is not None, "a worker")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert not [one for one in psutil.process_iter(["environ"]) if _is_ours(one, tmp_path)]
    assert not tmp_path.exists() or not list(tmp_path.rglob("*"))


def start(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bedplate", "probe", "--measure", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BEDPLATE_HOME": str(home)},
    )


def _find_worker(process: subprocess.Popen[str]) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("bedplate.facts.measured.worker" in one.cmdline() for one in psutil.Process(process.pid).children())
    return False


def _is_ours(process: psutil.Process, home: Path) -> bool:
    return (process.info["environ"] or {}).get("BEDPLATE_HOME") == str(home)


@pytest.mark.measures
def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    process = start(tmp_path)
    out, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors
    hardware = from_json(Hardware, out)
    found = hardware.measured
    assert found is not None and found.took_s < 120
    assert found.ram_all_cores is not None or found.notes
    if found.ram_all_cores is not None:
        assert hardware.memory.bandwidth_bytes_s == found.ram_all_cores.read_bytes_s
    assert {path.name for path in tmp_path.iterdir()} <= {"measured.json", "measured.json.lock"}
    again = subprocess.run(
        [sys.executable, "-m", "bedplate", "probe", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "BEDPLATE_HOME": str(tmp_path)},
    )
    assert from_json(Hardware, again.stdout).measured == found, "it is remembered without measuring"
