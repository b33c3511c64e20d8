"""The arithmetic of the benchmark that compares one engine with itself, on constructed interleaved rounds."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.judge.made_cells import Noise, make_pair, make_sample

from bedplate.judge.compare import compare
from bedplate.values import replace_fields
from bedplate.values.run import ResourceUse, RunEnvironment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def same_engine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_engine", ROOT / "benchmarks" / "judge" / "same_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # records find their types there
    spec.loader.exec_module(module)
    return module


def test_finds_the_gain_that_was_put_in(same_engine: ModuleType) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 1.0, repeats=20)
    quicker = replace_fields(b, repeats=tuple(same_engine.faster(repeat, 1.15) for repeat in b.repeats))
    effects = compare([a], [quicker]).effects
    assert all(effect.gain.value == pytest.approx(1.15, rel=0.03) for effect in effects) and len(effects) == 3


def test_comparisons_are_drawn_from_blocks_of_neighbouring_rounds(same_engine: ModuleType) -> None:
    """None of them twice: equal moments could not be paired."""
    dice, drawn = random.Random(3), set[int]()
    for _ in range(100):
        chosen = same_engine.choose_rounds(22, 12, dice)
        assert len(chosen) == len(set(chosen)) == 12 and chosen == sorted(chosen)
        drawn.update(chosen)
        assert [b - a for a, b in itertools.pairwise(chosen)].count(1) >= 9  # three in each block
    assert drawn == set(range(22))


def test_a_faster_sample_keeps_its_duration_consistent(same_engine: ModuleType) -> None:
    sample = same_engine._faster(make_sample(), 2.0)
    assert sample.duration_ms == pytest.approx(sample.ttft_ms + sum(sample.gaps_ms))


def write_rounds(same_engine: ModuleType, path: Path, busy: set[int]) -> None:
    """Three processes, of which the third is slower."""
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 1.0, repeats=17)
    environment = RunEnvironment(bedplate="0", python="", system="", hardware="", machine="made-up")
    header = same_engine.RoundsHeader(
        environment=environment, engine="llama.cpp", engine_version="1", model="m", load=a.load, seconds=3.0,
        settings=("", "", "slots=3"),
    )  # fmt: skip
    file = same_engine.RoundsFile(path)
    file.add(header)
    for number, (one, other) in enumerate(zip(a.repeats, b.repeats, strict=True)):
        use = ResourceUse(other_cpu_share=0.3 if number in busy else 0.02)
        repeats = tuple(replace_fields(repeat, use=use) for repeat in (one, other, same_engine.faster(other, 0.9)))
        file.add(same_engine.Round(number=number, repeats=repeats))


def test_a_collection_continues_after_a_line_that_was_cut_off(same_engine: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    write_rounds(same_engine, path, set())
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    file = same_engine.RoundsFile(path)
    assert len(file.rounds) == 16 and file.header.settings == ("", "", "slots=3")
    file.add(same_engine.Round(number=16, repeats=file.rounds[0].repeats))
    assert [one.number for one in same_engine.RoundsFile(path).rounds] == list(range(17))


def test_rounds_with_other_processes_are_left_out(same_engine: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    write_rounds(same_engine, path, {3})
    file = same_engine.RoundsFile(path)
    assert same_engine.Collection.count(file, True) == 16 and same_engine.Collection.count(file, False) == 17
    run = file.make_run(quiet_only=True)
    assert [len(cell.repeats) for cell in run.cells] == [16] * 3 and run.cells[2].notes == "slots=3"
    assert [len(cell.repeats) for cell in same_engine.read_rounds(path).cells] == [17] * 3


def test_a_slower_setting_is_counted_as_worse(same_engine: ModuleType, tmp_path: Path) -> None:
    write_rounds(same_engine, tmp_path / "rounds.jsonl", set())
    a, _, slower = same_engine.read_rounds(tmp_path / "rounds.jsonl").cells
    found = same_engine.codes(a, slower, 8, 2, swap=False)
    assert found == {30: 2} and same_engine.describe_codes(found) == "2 worse, 0 migrate, 0 not proven, 0 stay"


def test_counts_the_verdicts_of_many_comparisons(same_engine: ModuleType) -> None:
    (a,), (b,) = make_pair(Noise(1, request=0.02, repeat=0.005, drift=0.0), 1.0, repeats=20)
    assert same_engine.codes(a, b, 8, 10, gain=1.3) == {10: 10}
