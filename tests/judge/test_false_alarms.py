"""False alarms and missed losses of `compare`, resampled from real interleaved rounds of equal builds.

benchmarks/judge/same_engine.py collects the rounds on a machine that does nothing else.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.judge.made_cells import Noise, make_pair
from tests.judge.test_same_engine import ROOT, same_engine

from bedplate.changing.gate import ROUNDS
from bedplate.judge.effect import estimate_effect
from bedplate.values.run import Cell

__all__ = ["same_engine"]

DATA = ROOT / "benchmarks" / "judge" / "rounds.json.xz"
needs_data = pytest.mark.skipif(
    not DATA.exists(), reason="no rounds were collected yet: benchmarks/judge/same_engine.py says how"
)


@pytest.fixture(scope="module")
def cells(same_engine: ModuleType) -> tuple[Cell, ...]:
    found: tuple[Cell, ...] = same_engine.read_rounds(DATA).cells
    return found


@needs_data
def test_at_most_10_of_200_comparisons_of_equal_builds_raise_an_alarm(
    same_engine: ModuleType, cells: tuple[Cell, ...]
) -> None:
    assert len(cells[0].repeats) >= 60
    found = same_engine.codes(cells[0], cells[1], ROUNDS, 200)
    assert found[30] + found[10] <= 10, found


@needs_data
def test_a_loss_of_10_percent_is_found_in_8_of_10_comparisons(same_engine: ModuleType, cells: tuple[Cell, ...]) -> None:
    loss = estimate_effect(cells[0], cells[2], "output_tok_s", 0.95)
    assert loss is not None and 0.87 < loss.gain.value < 0.93, "the setting should cost about 10 %"
    found = same_engine.codes(cells[0], cells[2], ROUNDS, 50, swap=False)
    assert found[30] >= 40, found
    exact = same_engine.codes(cells[0], cells[2], ROUNDS, 50, swap=False, gain=0.9 / loss.gain.value)
    assert exact[30] >= 40, f"of 10 % instead of {1 - loss.gain.value:.1%}: {exact}"


# the arithmetic, on constructed rounds


def test_rounds_are_stored_without_losing_a_comparison(same_engine: ModuleType, tmp_path: Path) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 0.9, repeats=12)
    run = same_engine.Run(
        id="made", at="2026-11-15T09:00:00Z", cells=(a, b),
        environment=same_engine.RunEnvironment(bedplate="0", python="", system="", hardware="", machine="made-up"),
    )  # fmt: skip
    for name in ("rounds.json", "rounds.json.xz"):
        same_engine.keep_rounds(run, tmp_path / name)
        one, other = same_engine.read_rounds(tmp_path / name).cells
        assert same_engine.codes(one, other, 8, 5, swap=False) == {30: 5}
    assert same_engine.codes(b, a, 8, 5, swap=False)[30] == 0


def test_which_side_is_the_baseline_is_random(same_engine: ModuleType) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 0.7, repeats=12)
    found = same_engine.codes(a, b, 8, 20)
    assert found[30] > 0 and found[10] > 0 and found[30] + found[10] == 20
