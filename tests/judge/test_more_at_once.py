"""Predicted throughput at a higher concurrency, compared with recorded runs that measured both."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from bedplate.judge.advice import estimate_cycle_ms
from bedplate.judge.observed import RequestBreakdown, break_down_cells, find_single_request
from bedplate.measure.summary import summarize_cell
from bedplate.values import from_json
from bedplate.values.run import Run

RUNS = Path(__file__).parents[1] / "captures" / "runs"


def read_breakdowns(name: str) -> dict[int, tuple[RequestBreakdown, float]]:
    """By requests in flight: the parts of the mean request, and the throughput in tokens per second."""
    cells = from_json(Run, lzma.decompress((RUNS / f"{name}.json.xz").read_bytes())).cells
    found = {}
    for cell, view in zip(cells, break_down_cells(cells, find_single_request(cells)), strict=True):
        speed = summarize_cell(cell).output_tok_s
        assert view is not None and speed is not None and cell.load.concurrency is not None
        found[cell.load.concurrency] = view, speed
    return found


@pytest.mark.parametrize("name", ["two-cores-vllm", "h200-llama"])
def test_predicts_sixteen_requests_in_flight_from_four(name: str) -> None:
    """A prefill takes 1.9 times as long in a batch as alone. Without that factor vLLM's gain was 11 % too high."""
    runs = read_breakdowns(name)
    (few, speed), (_, truth) = runs[4], runs[16]
    gain = 16 / few.batch * estimate_cycle_ms(few, few.batch) / estimate_cycle_ms(few, 16)
    assert gain * speed == pytest.approx(truth, rel=0.05)


def test_a_prefill_in_a_batch_takes_between_one_and_two_times_its_time_alone() -> None:
    view = read_breakdowns("two-cores-vllm")[4][0]
    calm, torn = view._replace(behind_ms=0.0, stalled_ms=0.0), view._replace(stalled_ms=1e6)
    steps = view.tokens * view.step_ms
    assert estimate_cycle_ms(calm, view.batch) == pytest.approx(view.batch * view.prefill_ms + steps)
    assert estimate_cycle_ms(torn, view.batch) == pytest.approx(2 * view.batch * view.prefill_ms + steps)
