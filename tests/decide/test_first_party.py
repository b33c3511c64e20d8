"""bedplate's own measurements are kept as rows with their run files, and both fits use them."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bedplate.decide.estimate.calibration import load_table
from bedplate.published.campaigns import KnownMeasurements
from bedplate.published.predict import is_under_load, predict
from bedplate.published.rows import PublishedCase, RowPrediction, resolve
from bedplate.published.under_load import RowLoad, find_load

ROOT = Path(__file__).parents[2]
SCORE = ROOT / "benchmarks" / "score"
UNDER_LOAD, ONE_STREAM = SCORE / "first_party" / "h200.csv", SCORE / "more" / "first_party.csv"


@pytest.fixture(scope="module")
def first_party() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_party", SCORE / "first_party.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_party"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(first_party: ModuleType) -> list[Any]:
    return list(first_party.read_cells())


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_cases(path: Path) -> Iterator[tuple[dict[str, str], PublishedCase]]:
    for row in read_rows(path):
        case = resolve(row)
        assert isinstance(case, PublishedCase), f"{row['row_id']}: {case.why}"
        yield row, case


def test_rows_are_those_of_the_run_files(first_party: ModuleType, cells: list[Any]) -> None:
    for path, rows in first_party.make_tables(cells).items():
        expected = [{name: row.get(name, "") for name in first_party.COLUMNS} for row in rows]
        assert read_rows(path) == expected, f"run benchmarks/score/first_party.py: {path.name} is not up to date"


def test_every_archive_and_every_cpu_run_has_rows() -> None:
    paths = {row["source_path"] for path in (UNDER_LOAD, ONE_STREAM) for row in read_rows(path)}
    archives = {path.name for path in (ROOT / "benchmarks" / "card" / "results").glob("*.tar.xz")}
    assert {path.partition(":")[0] for path in paths if ":" in path} == archives
    runs = {path.name for path in (ROOT / "tests" / "captures" / "runs").glob("two-cores-*.json.xz")}
    assert {name for path in paths if (name := path.rpartition("/")[2]).startswith("two-cores-")} == runs


def test_flagged_cells_and_weights_on_the_host_are_left_out(cells: list[Any]) -> None:
    assert not [cell.path for cell in cells if cell.cell["flags"] or "offload/" in cell.path]
    # The one flagged cell of the CPU runs: at 16 streams, no request of llama.cpp ended in time.
    counts = {cell.load["concurrency"] for cell in cells if cell.path.endswith("two-cores-llama.json.xz")}
    assert counts == {1, 4, 8}


def test_fit_under_load_used_every_row() -> None:
    known, kept = KnownMeasurements(), 0
    for row, case in read_cases(UNDER_LOAD):
        assert is_under_load(case)
        assert isinstance(find_load(case), RowLoad), row["row_id"]
        kept += known.add(case, float(row["value"]))
    assert load_table("serving")["rows"]["h200"] == kept


def test_fit_of_one_stream_used_every_row() -> None:
    engines: Counter[str] = Counter()
    for row, case in read_cases(ONE_STREAM):
        assert not is_under_load(case)
        assert isinstance(predict(row), RowPrediction), row["row_id"]
        engines[f"{case.engine}/{case.backend}"] += 1
    effects = load_table("local")["effects"]
    assert {"vllm/cpu", "llama.cpp/cpu", "llama.cpp/cuda", "vllm/cuda", "sglang/cuda"} <= engines.keys()
    for engine in engines:
        assert "first_party" in effects[engine]["sources"], engine


def test_shapes_of_random_models_are_resized() -> None:
    rows = {row["model"]: case for row, case in read_cases(UNDER_LOAD)}
    quarter, whole = rows["Qwen/Qwen3-30B-A3B"], rows["meta-llama/Llama-3.1-8B"]
    assert quarter.shape.layers == quarter.shape.moe_layers == 12
    assert quarter.shape.total_params == pytest.approx(7.7e9, rel=0.01)
    assert whole.shape.total_params == pytest.approx(7.4e9, rel=0.01)
    assert whole.shape.output_params == 49152 * 4096


def test_decoding_on_two_cores_is_predicted_within_a_factor_of_two() -> None:
    """Builds without dot products, narrow vector units and PyTorch's operators make it 6 to 9 times slower."""
    found = {}
    for row, case in read_cases(ONE_STREAM):
        if case.backend == "cpu" and case.metric == "decode_tok_s_single":
            predicted = predict(row)
            assert isinstance(predicted, RowPrediction)
            found[case.engine, case.chip.name] = predicted.value / float(row["value"])
    assert len(found) == 4
    assert all(0.5 < ratio < 2 for ratio in found.values()), found


def test_sets_that_a_build_does_not_use_are_stated_in_the_row() -> None:
    row = next(row for row, case in read_cases(ONE_STREAM) if case.engine == "llama.cpp" and case.backend == "cpu")
    case = resolve(row)
    everything = resolve(row | {"notes": "threads=2"})
    assert isinstance(case, PublishedCase)
    assert isinstance(everything, PublishedCase)
    assert case.run.instruction_sets == ("neon",)
    assert case.machine.plain_ops_s < 0.5 * everything.machine.plain_ops_s
    assert case.machine.core_hz < 0.5 * everything.machine.core_hz
