"""The arithmetic of the benchmark that compares one engine with itself, on constructed interleaved rounds."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
from tests.judge.made_cells import Noise, make_pair, make_sample

from bedplate.judge.compare import compare
from bedplate.judge.effect import pair_rounds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def same_engine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_engine", ROOT / "benchmarks" / "judge" / "same_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_finds_the_gain_that_was_put_in(same_engine: ModuleType) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 1.0, repeats=20)
    one, other = same_engine.drawn(a, b, 5, 1.15, random.Random(2))
    effects = compare([one], [other]).effects
    assert all(effect.gain.value == pytest.approx(1.15, rel=0.03) for effect in effects) and len(effects) == 3
    assert len(pair_rounds([repeat.at for repeat in one.repeats], [repeat.at for repeat in other.repeats])) == 5


def test_a_faster_sample_keeps_its_duration_consistent(same_engine: ModuleType) -> None:
    sample = same_engine._faster(make_sample(), 2.0)
    assert sample.duration_ms == pytest.approx(sample.ttft_ms + sum(sample.gaps_ms))


def test_counts_the_verdicts_of_many_comparisons(same_engine: ModuleType) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 1.0, repeats=20)
    found = same_engine.answers(a, b, 5, 1.3, 10)
    assert found == {"migrate": 10}
