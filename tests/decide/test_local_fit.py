"""The arithmetic of the fit for one or a few streams: its folds, its sums over effects and its solver."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bedplate.published.rows import PublishedCase, resolve

np = pytest.importorskip("numpy", reason="the fit needs numpy, which bedplate itself does not")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "score" / "fit_local.py"
MEASURED = (
    ("RTX 4090", "CUDA", "Llama-3.1-8B", "Q4_K_M", "decode_tok_s_single", 130.0),
    ("RTX 4090", "CUDA", "Llama-3.1-8B", "Q4_K_M", "prefill_tok_s", 9000.0),
    ("RTX 3090", "CUDA", "Qwen3-30B-A3B", "Q4_K_M", "prefill_tok_s", 3000.0),
    ("RX 7900 XTX", "ROCm", "Llama-3.1-8B", "F16", "prefill_tok_s", 2500.0),
    ("Apple M2 Ultra", "Metal", "Llama-3.1-8B", "Q8_0", "decode_tok_s_single", 60.0),
)


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_local", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_local"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(fitting: ModuleType) -> list[Any]:
    cases = []
    for hardware, backend, model, label, metric, value in MEASURED:
        tokens = ("512", "0") if metric == "prefill_tok_s" else ("0", "128")
        found = resolve({
            "hardware": hardware, "count": "1", "engine": "llama.cpp", "engine_version": "b7000", "backend": backend,
            "model": model, "quantization": label, "metric": metric, "prompt_tokens": tokens[0],
            "output_tokens": tokens[1], "context_depth": "0", "scenario": "llama-bench", "notes": "fa=1",
        })  # fmt: skip
        assert isinstance(found, PublishedCase), found
        cases.append(("table", found, value, True, f"campaign of {hardware}"))
    made: list[Any] = fitting.make_rows(cases)
    return made


def test_folds_leave_out_whole_groups(fitting: ModuleType, rows: list[Any]) -> None:
    for split, group_of in fitting.SPLITS.items():
        folds = fitting.make_folds(rows, group_of, 2)
        assert sorted(group for fold in folds for group in fold) == sorted({group_of(row) for row in rows}), split
        assert len(folds) <= 2


def test_step_of_the_fit_solves_its_equations(fitting: ModuleType, rows: list[Any]) -> None:
    table = fitting.columns(rows)
    centre, spread = fitting.prior(table.names)
    inverse = np.where(spread > 0, 1 / np.where(spread > 0, spread, 1) ** 2, 0)
    errors = fitting.log_predicted(table, fitting.spread_out(table, centre)) - np.log(table.truth)
    slopes = fitting.compute_slopes(
        table, fitting.spread_out(table, centre), errors + np.log(table.truth), [True] * centre.shape[1]
    )
    target = np.where(spread > 0, -fitting.gather(table, slopes * errors[:, None]), 0.0)
    ones = np.ones(len(rows))
    diagonal = fitting.gather(table, slopes**2) + inverse
    step = fitting.solve(table, slopes, ones, inverse, diagonal, 0.0, target, 400)
    moved = (slopes * fitting.spread_out(table, step)).sum(axis=1)
    product = np.where(spread > 0, fitting.gather(table, slopes * moved[:, None]) + step * inverse, 0.0)
    assert product == pytest.approx(target, abs=1e-2 * float(abs(target).max()))


def test_fit_moves_predictions_towards_the_measured_values(fitting: ModuleType, rows: list[Any]) -> None:
    table = fitting.columns(rows)
    before, _ = fitting.prior(table.names)
    after = fitting.fit(table, rounds=10)

    def compute_misfit(effects: Any) -> float:
        return float(abs(fitting.log_predicted(table, fitting.spread_out(table, effects)) - np.log(table.truth)).mean())

    assert compute_misfit(after) < 0.5 * compute_misfit(before)
