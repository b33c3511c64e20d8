"""The gradients of the fit under load agree with its cost function."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bedplate.decide.estimate.batching import classify_weights
from bedplate.published.rows import PublishedCase, resolve
from bedplate.published.under_load import RowLoad, find_load

np = pytest.importorskip("numpy", reason="the fit needs numpy, which bedplate itself does not")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "score" / "fit_serving.py"
ROWS = (
    ("vLLM", "NVIDIA H100 SXM 80GB", "openai/gpt-oss-120b", "agg", "tp4 pp1 attn_dp1 moe_tp4 moe_ep1"),
    ("SGLang", "NVIDIA B200 SXM 180GB", "Qwen/Qwen3.5-397B-A17B", "agg", "tp8 pp1 attn_dp1 moe_tp8 moe_ep1"),
    ("TensorRT-LLM", "NVIDIA H200 SXM 141GB", "deepseek-ai/DeepSeek-R1", "agg", "tp1 pp1 attn_dp8 moe_tp1 moe_ep8"),
    ("TensorRT-LLM", "NVIDIA GB200", "deepseek-ai/DeepSeek-R1", "disagg",
     "disagg prefill 2x(tp8 dp1 ep8 bs) decode 3x(tp8 dp1 ep8 bs)"),
    ("SGLang", "NVIDIA B200 SXM 180GB", "Qwen/Qwen3.5-397B-A17B", "agg", "tp4 pp1 attn_dp1 moe_tp4 moe_ep1"),
)  # fmt: skip
GUESSING = "wip=False; measured=2026-03-20"
"""A day on which the last of these was measured with speculative decoding."""


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_serving", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_serving"] = module
    spec.loader.exec_module(module)
    return module


def test_gradients_agree_with_the_cost_function(fitting: ModuleType) -> None:
    rows = []
    for engine, hardware, model, scenario, parallelism in ROWS:
        for metric, value in (("ttft_ms", 400.0), ("tpot_ms", 12.0)):
            found = resolve({
                "hardware": hardware, "engine": engine, "model": model, "quantization": "fp8", "metric": metric,
                "concurrency": "48", "prompt_tokens": "1024", "output_tokens": "1024", "scenario": scenario,
                "parallelism": parallelism, "notes": GUESSING,
            })  # fmt: skip
            assert isinstance(found, PublishedCase), found
            question = find_load(found)
            assert isinstance(question, RowLoad), question
            rows.append(
                fitting.Row("a", metric, value, found.engine, question.machine.family, classify_weights(found.shape),
                            found.chip.name, model, "a series", question.question.way, 1.0, 1.0, question.alternatives)
            )  # fmt: skip
    # A row that does not state whether tokens were drafted.
    load = rows[0].loads[0][1]
    rows.append(rows[0]._replace(loads=((0.6, load), (0.4, load._replace(guessing=3.0)))))
    fit = fitting.Fit(rows)
    assert {load.guessing for row in rows for _, load in row.loads} == {0.0, 3.0}
    assert {block.question.way for block in fit.columns(np.arange(len(rows)))} == {"steady", "apart"}
    blocks, every = fit.columns(np.arange(len(rows))), np.ones(fit.size, dtype=bool)
    x = np.random.default_rng(0).normal(0.0, 0.2, fit.size)
    cost, gradient, _ = fit.sloped(blocks, x, every)
    assert cost == pytest.approx(fit.cost(blocks, x, every))
    for number in [*range(0, fit.size, 7), fitting.NAMES.index("guess"), fitting.NAMES.index("accepted")]:
        nudge = np.zeros(fit.size)
        nudge[number] = 1e-5
        slope = (fit.cost(blocks, x + nudge, every) - fit.cost(blocks, x - nudge, every)) / 4e-5
        assert gradient[number] == pytest.approx(slope, rel=1e-4, abs=1e-7)
