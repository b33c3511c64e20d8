"""Error bands: conformal quantiles over campaigns, fallback to parent groups, and the coverage that the data state."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bedplate.decide.estimate.bands import LEVELS, classify_device, find_bands, find_distance, list_groups
from bedplate.decide.estimate.calibration import Band, load_table
from bedplate.decide.estimate.expectation import compute_expectation
from bedplate.decide.estimate.machine import MachineRates, make_chip_rates
from bedplate.decide.estimate.physics import ModelShape, get_shape
from bedplate.facts.chips import find_chip
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Parallelism, Workload

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "score" / "bands.py"
JUDGED = ("decode", "prefill", "TTFT", "TTFT disaggregated", "TPOT", "TPOT disaggregated", "throughput", "memory")


@pytest.fixture(scope="module")
def scoring() -> ModuleType:
    spec = importlib.util.spec_from_file_location("score_bands", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["score_bands"] = module
    spec.loader.exec_module(module)
    return module


def get_machine(name: str) -> MachineRates:
    return make_chip_rates(find_chip(name).chip, 1)


def get_model_shape(name: str = "Llama 3.1 8B Q4_K_M") -> ModelShape:
    return get_shape(find_model(name))


def make_rows(scoring: ModuleType, campaigns: int, *, seed: int = 1, distance: str = "new chip") -> list[Any]:
    """Rows of campaigns whose shared error is as large as that of single rows."""
    chance = random.Random(seed)
    rows = []
    for number in range(campaigns):
        shared = chance.gauss(0, 0.2)
        rows += [
            scoring.LeftOutRow("decode", "gguf", "CPU", distance, f"campaign {number}", "", "campaign",
                               shared + chance.gauss(0, 0.2))
            for _ in range(chance.choice((3, 20, 60)))
        ]  # fmt: skip
    return rows


def test_quantile_is_weighted(scoring: ModuleType) -> None:
    assert scoring.take_quantile([(1.0, 1.0), (2.0, 1.0), (3.0, 8.0)], 0.5) == 3.0
    assert scoring.take_quantile([(1.0, 8.0), (2.0, 1.0), (3.0, 1.0)], 0.5) == 1.0
    assert scoring.take_quantile([(1.0, 1.0), (2.0, 1.0)], 1.0) == 2.0


def test_correction_leaves_less_outside_the_fewer_campaigns_there_are(scoring: ModuleType) -> None:
    tails = [scoring.correct_tail(0.1, count) for count in (1, 4, 100)]
    assert tails == sorted(tails)
    assert tails[0] == pytest.approx(0.05)
    assert tails[-1] == pytest.approx(0.1, rel=0.02)


def test_campaigns_count_and_not_their_rows(scoring: ModuleType) -> None:
    def spread(rows: int) -> Any:
        logs = [("large", 0.0)] * rows + [(f"small {i}", 0.5) for i in range(4) for _ in range(10)]
        made = [
            scoring.LeftOutRow("decode", "gguf", "CPU", "new chip", name, "", "campaign", log) for name, log in logs
        ]
        return scoring.Pool(made).find_spread("decode", 80)

    assert spread(20) == spread(2000)
    assert spread(2000).middle == 0.5


def test_group_with_few_campaigns_uses_its_parent(scoring: ModuleType) -> None:
    rows = make_rows(scoring, 12)
    rare = [row._replace(device="graphics card") for row in make_rows(scoring, 2, seed=2)]
    pool = scoring.Pool(rows + rare)
    names = rare[0].groups
    assert pool.choose_group(names) == "decode / gguf / new chip"
    assert pool.choose_group(rows[0].groups) == "decode / gguf / CPU / new chip"
    groups, _ = scoring.compute_bands(rows + rare)
    assert "decode / gguf / CPU / new chip" in groups and names[0] not in groups


@pytest.mark.parametrize("seed", range(3))
def test_bands_cover_campaigns_that_were_never_seen(scoring: ModuleType, seed: int) -> None:
    groups, stated = scoring.compute_bands(make_rows(scoring, 25, seed=seed))
    low, high = groups["decode / new chip"]["80"]
    fresh = make_rows(scoring, 300, seed=100 + seed)
    inside = sum(low <= 2.718281828**row.log <= high for row in fresh) / len(fresh)
    assert 0.70 <= inside <= 0.90
    assert stated.coverage[80] == pytest.approx(inside, abs=0.12)


def test_metric_with_few_campaigns_is_divided_into_series_and_wider(scoring: ModuleType) -> None:
    rows = [row._replace(campaign="one", series=row.campaign) for row in make_rows(scoring, 12)]
    groups, stated = scoring.compute_bands(rows)
    assert (stated.unit, stated.campaigns) == ("series", 1)
    known, _ = scoring.compute_bands([row._replace(campaign=row.series, series="") for row in rows])
    assert groups["decode"]["80"][1] > known["decode"]["80"][1]


def test_every_distance_has_bands_and_farther_ones_are_wider(scoring: ModuleType) -> None:
    groups, _ = scoring.compute_bands(make_rows(scoring, 12))
    ends = [groups[list_groups("decode", None, "", distance)[-2]]["80"] for distance in scoring.DISTANCES]
    widths = [high / low for low, high in ends]
    assert widths == sorted(widths)
    assert widths[-1] > 1.2 * widths[-2]


def test_bands_of_the_data_file_are_nested_and_contain_the_estimate() -> None:
    groups = load_table("bands")["groups"]
    assert len(groups) > 30
    for name, group in groups.items():
        before = Band(1.0, 1.0)
        for level in LEVELS:
            band = Band(*group[str(level)])
            assert band.low <= before.low and band.high >= before.high, name
            before = band
        assert before.low < 1 < before.high, name


@pytest.mark.parametrize("metric", JUDGED)
def test_stated_coverage_of_left_out_rows_is_near_80_percent(metric: str) -> None:
    line = load_table("bands")["score"][metric]
    assert 0.74 <= line["coverage"]["80"] <= 0.88
    assert line["coverage"]["50"] < line["coverage"]["80"] < line["coverage"]["95"]


LIMITS = {
    "decode": 0.09, "TPOT, all workers": 0.15, "memory": 0.05, "TTFT": 0.28, "TTFT disaggregated": 0.38,
    "prefill": 0.25, "throughput": 0.18,
}  # fmt: skip
"""Largest median errors of rows that the fit has not seen."""


@pytest.mark.parametrize(("metric", "most"), LIMITS.items())
def test_errors_of_left_out_rows_are_within_their_limits(metric: str, most: float) -> None:
    errors = load_table("bands")["score"][metric]["error"]
    # Nothing of the memory estimate is fitted on these rows, so every campaign is left out already.
    assert errors.keys() == ({"campaign"} if metric == "memory" else {"chip", "model", "engine", "campaign"})
    for split, error in errors.items():
        assert error <= most, split


def test_bands_belong_to_the_shipped_fit(scoring: ModuleType) -> None:
    assert load_table("bands")["fit"] == scoring.compute_fingerprint(), "run `make score ARGS=--write`"


def test_distance_grows_from_a_measured_chip_to_another_engine() -> None:
    known = {
        "engines": {"llama.cpp": [["graphics card", "ada", 1008.0]], "vllm": [["data-centre GPU", "hopper", 3350.0]]},
        "params": [1e9, 70e9],
    }  # fmt: skip
    shape = get_model_shape()

    def find(engine: str, chip: str) -> str:
        return find_distance(known, engine, get_machine(chip), shape)[0]

    assert find("llama.cpp", "RTX 4090") == "measured chip"
    assert find("llama.cpp", "RTX 4060") == "new chip"
    assert find("llama.cpp", "H100 SXM") == "new engine"
    assert find("sglang", "H100 SXM") == "new engine"
    assert find("sglang", "RTX 4090") == "far"


def test_far_from_all_data_the_band_is_wider_and_says_so() -> None:
    near = find_bands("decode", "llama.cpp", get_machine("RTX 4090"), get_model_shape())
    far = find_bands("decode", "llama.cpp", get_machine("RTX 4090"), get_model_shape()._replace(total_params=9e12))
    assert near.far == "" and near.campaigns >= 3
    assert "parameters" in far.far and far.eighty.high / far.eighty.low > near.eighty.high / near.eighty.low
    model = find_model("Llama 3.1 8B")
    hardware = make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 64})
    found = compute_expectation(hardware, model, "llama.cpp", Parallelism(), Workload(), slots=1)
    assert found is not None and "band is wide" not in found.source


@pytest.mark.parametrize(
    ("chip", "device"),
    [
        ("RTX 4090", "graphics card"), ("H100 SXM", "data-centre GPU"), ("Apple M4 Max 40-core GPU", "Apple GPU"),
        ("AMD Ryzen AI Max+ 395", "GPU with shared memory"), ("AMD EPYC 9654", "CPU"),
    ],
)  # fmt: skip
def test_devices_are_classified_by_their_memory(chip: str, device: str) -> None:
    assert classify_device(make_chip_rates(find_chip(chip, guess=True).chip, 1)) == device
