"""Phases of a start: from the captured logs of engines, with the times in their lines, to what `serve` reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bedplate.engines import get_engine
from bedplate.run.gateway import GatewayBackend
from bedplate.run.start_phases import PhaseTeller, StartPhases
from bedplate.show.serving import describe_start
from bedplate.values.endpoint import StartPhaseTime

CAPTURES = Path(__file__).parents[1] / "captures"


class Clock:
    """Shows the time of the last line that has one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def read(self, line: str) -> None:
        if found := re.search(r"(?:11-1\d) (\d\d:\d\d:\d\d)", line):
            hours, minutes, seconds = map(int, found[1].split(":"))
            self.now = 3600.0 * hours + 60 * minutes + seconds


def replay(engine: str, capture: str, *argv: str) -> tuple[dict[str, float], list[str]]:
    """The times of the phases, and what is reported about them."""
    lines = (CAPTURES / engine / capture).read_bytes().decode().split("\n")
    clock, told = Clock(), list[str]()
    clock.read(lines[0])
    phases, teller = StartPhases(clock), PhaseTeller(get_engine(engine).name, told.append)
    phases.begin(known=bool(get_engine(engine).start_phases))
    teller.update(phases)
    for line in lines:
        clock.read(line)
        if (phase := get_engine(engine).read_phase(line, argv)) is not None:
            phases.enter(phase)
        teller.update(phases)
    phases.end()
    teller.update(phases)
    return {one.phase: one.seconds for one in phases.list_times()}, told


def test_the_first_start_of_vllm_on_a_gpu() -> None:
    times, told = replay("vllm", "started-gpu-first.txt")
    # Its own figures: loading 4.14 s, torch.compile 44.19 s, capture 2 s, all after the processes 69.35 s.
    assert times == {"start": 75, "load": 4, "compile": 45, "warm-up": 24, "capture": 2}
    assert told == [
        "vLLM: starting its processes took 75.0 s", "vLLM: loading weights took 4.0 s", "vLLM: compiling took 45.0 s",
        "vLLM: warming up took 3.0 s", "vLLM: capturing CUDA graphs took 2.0 s", "vLLM: warming up took 21.0 s",
    ]  # fmt: skip


def test_a_start_of_vllm_with_a_compile_cache() -> None:
    times, _ = replay("vllm", "started-gpu-second.txt")
    assert times == {"start": 30, "load": 3, "compile": 9, "warm-up": 3, "capture": 3}


def test_vllm_without_compilation() -> None:
    times, _ = replay("vllm", "started-gpu-second.txt", "vllm", "serve", "--enforce-eager")
    assert "compile" not in times
    on_cpu, _ = replay("vllm", "started.txt", "--enforce-eager")
    assert list(on_cpu) == ["start", "load", "warm-up"] and on_cpu["load"] == 5


def test_the_first_start_of_sglang_on_a_gpu() -> None:
    times, told = replay("sglang", "started-gpu-first.txt")
    # Its own figures: weights 9.45 s, prefill graphs 36.23 s, decode graphs 3.34 s.
    assert times == {"start": 56, "load": 9, "warm-up": 11, "capture": 40}
    assert "SGLang: capturing CUDA graphs took 37.0 s" in told


def test_reads_how_much_of_the_weights_sglang_has_loaded() -> None:
    lines = (CAPTURES / "sglang" / "started-gpu-first.txt").read_bytes().decode().split("\n")
    assert [done for line in lines if (done := get_engine("sglang").read_progress(line)) is not None] == [1.0]


def test_an_engine_without_phases_has_none() -> None:
    phases = StartPhases()
    phases.begin(known=bool(get_engine("llama.cpp").start_phases))
    phases.enter("load")
    phases.end()
    assert phases.list_times() == () and phases.current is None and phases.describe_current() is None


def test_a_client_is_told_the_phase() -> None:
    clock = Clock()
    backend = GatewayBackend("m", "vllm")
    backend.phases = StartPhases(clock)
    backend.progress = 1.0
    backend.phases.begin(known=True)
    backend.phases.enter("compile")
    clock.now = 12.0
    assert backend.explain_unavailable() == "vllm is still loading m (compiling for 12.0 s)"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_begins_anew(restarted: bool) -> None:
    clock, told = Clock(), list[str]()
    phases, teller = StartPhases(clock), PhaseTeller("vLLM", told.append)
    phases.begin(known=True)
    teller.update(phases)
    clock.now = 40.0
    if restarted:  # it died while it started
        phases.end()
        phases.begin(known=True)
        teller.update(phases)
    clock.now = 50.0
    phases.enter("load")
    teller.update(phases)
    assert phases.list_times() == (StartPhaseTime(phase="start", seconds=10.0 if restarted else 50.0),)
    assert told == [f"vLLM: starting its processes took {'10.0' if restarted else '50.0'} s"]


def test_describes_a_start() -> None:
    phases = (StartPhaseTime(phase="load", seconds=4.14), StartPhaseTime(phase="capture", seconds=2.0))
    assert describe_start(phases) == "started in 6.1 s: weights 4.1 s, CUDA graphs 2.0 s"
