"""A simulated replica, calibrated with one and four requests in flight, compared with measurements with more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "captures" / "runs"
WITHIN = 0.20
MEASURED = ("two-cores-arm-llama", "two-cores-arm-vllm", "two-cores-llama", "two-cores-vllm", "h200-llama")


@pytest.fixture(scope="module")
def here() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_here", ROOT / "benchmarks" / "simulate" / "here.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # for its named tuples
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def lines(here: ModuleType) -> dict[tuple[str, int], Any]:
    found: dict[tuple[str, int], Any] = {}
    for name in MEASURED:
        (one,) = here.held(here.read(RUNS / f"{name}.json.xz"))
        found |= {(name, line.in_flight): line for line in one.lines}
    return found


def off(ours: float, theirs: float) -> float:
    return ours / theirs - 1


def named(which: tuple[str, int]) -> str:
    return f"{which[0]}-{which[1]}"


FORETOLD = [
    ("two-cores-arm-llama", 8), ("two-cores-arm-llama", 16), ("two-cores-arm-vllm", 8), ("two-cores-arm-vllm", 16),
    ("two-cores-llama", 8), ("two-cores-vllm", 8), ("two-cores-vllm", 16), ("h200-llama", 16),
]  # fmt: skip


@pytest.mark.parametrize("which", FORETOLD, ids=named)
def test_throughput_and_latency_are_predicted(lines: dict[tuple[str, int], Any], which: tuple[str, int]) -> None:
    line = lines[which]
    assert line.role == "foretold"
    assert abs(off(line.ours.tok_s, line.theirs.tok_s)) < WITHIN
    ours, theirs = (seen.ttft + (line.output - 1) * seen.tpot for seen in (line.ours, line.theirs))
    assert abs(off(ours, theirs)) < WITHIN


@pytest.mark.parametrize("which", [one for one in FORETOLD if one != ("two-cores-arm-llama", 16)], ids=named)
def test_time_per_token_is_predicted(lines: dict[tuple[str, int], Any], which: tuple[str, int]) -> None:
    """If two of 16 prompts happen to be computed first, these two wait for the others afterwards."""
    assert abs(off(lines[which].ours.tpot, lines[which].theirs.tpot)) < WITHIN


@pytest.mark.parametrize("which", FORETOLD, ids=named)
def test_slowest_first_tokens_are_predicted(lines: dict[tuple[str, int], Any], which: tuple[str, int]) -> None:
    """On a machine with varying speed, vLLM at 8 has four rounds in which a prompt took 255 to 450 ms."""
    wide = 0.30 if which == ("two-cores-vllm", 8) else WITHIN
    assert abs(off(lines[which].ours.ttft_p95, lines[which].theirs.ttft_p95)) < wide


@pytest.mark.parametrize("name", MEASURED)
def test_calibration_data_are_reproduced(lines: dict[tuple[str, int], Any], name: str) -> None:
    line = lines[name, 4]
    assert line.role == "learnt from"
    assert abs(off(line.ours.ttft, line.theirs.ttft)) < 0.1 and abs(off(line.ours.tok_s, line.theirs.tok_s)) < 0.11


def test_additional_sequence_costs_at_least_a_prompt_token(here: ModuleType) -> None:
    guess = here.Guess(pass_s=0.01, sequence_s=0.004, prompt_token_s=0.001, share=1.0)
    steps = guess.steps(16, 64, 4).decode_s
    assert steps[4] - steps[3] == pytest.approx(0.004)
    assert steps[16] - steps[15] == pytest.approx(0.002), "between a prompt's token and the last one"
    hidden = here.Guess(pass_s=0.01, sequence_s=0.001, prompt_token_s=0.004, share=1.0)
    assert hidden.decode_s(4, 4) == pytest.approx(0.014)
    assert hidden.decode_s(16, 4) == pytest.approx(0.062), "reading the weights hides no more of it"


def test_speed_variation_has_a_mean_of_one(here: ModuleType) -> None:
    assert here.speeds(0.0) == [1.0] * 9
    found = here.speeds(0.2)
    assert sum(found) / 9 == pytest.approx(1.0) and found == sorted(found) and found[-1] / found[0] > 1.5


def test_gaps_with_a_prompt_are_excluded_from_token_gaps(here: ModuleType) -> None:
    assert here.undisturbed([10.0, 12.0, 10.0, 19.0, 10.0, 300.0]) == pytest.approx(12.2)


def test_throughput_at_several_speeds_is_for_the_same_work(here: ModuleType) -> None:
    """Not the mean of the speeds, which would overestimate a machine with varying speed."""
    guess = here.Guess(pass_s=0.01, sequence_s=0.001, prompt_token_s=0.0001, share=1.0)
    limits, asked = here.ReplicaLimits(4, 512, 400, reserves=True), here.Asked(64, 32, 4, (30.0,), 0.5, 4000)
    steps = guess.steps(4, 512, 4)
    even, uneven = (here.foretold(steps, limits, asked, spread).tok_s for spread in (0.0, 0.4))
    assert uneven == pytest.approx(even, rel=0.02)


def test_percentile_is_interpolated_between_ranks(here: ModuleType) -> None:
    assert here.share_of([1.0], 0.95) == 1.0
    assert here.share_of([0.0, 10.0], 0.5) == 5.0
    assert here.share_of([float(one) for one in range(21)], 0.95) == 19.0


def test_engine_without_all_measurements_is_excluded(here: ModuleType) -> None:
    assert here.held(here.read(RUNS / "h200-llama.json.xz"), learn=(1, 2)) == []
