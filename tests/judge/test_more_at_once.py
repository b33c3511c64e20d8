"""How much more requests at once bring, foretold from fewer: held against runs in which both were measured."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from bedplate.judge.advice import cycle_ms
from bedplate.judge.observed import View, alone_of, views_of
from bedplate.measure.summary import summarized
from bedplate.values import from_json
from bedplate.values.run import Run

RUNS = Path(__file__).parents[1] / "captures" / "runs"


def seen(name: str) -> dict[int, tuple[View, float]]:
    """By requests in flight: the parts of one, and tokens a second of all."""
    cells = from_json(Run, lzma.decompress((RUNS / f"{name}.json.xz").read_bytes())).cells
    found = {}
    for cell, view in zip(cells, views_of(cells, alone_of(cells)), strict=True):
        speed = summarized(cell).output_tok_s
        assert view is not None and speed is not None and cell.load.concurrency is not None
        found[cell.load.concurrency] = view, speed
    return found


@pytest.mark.parametrize("name", ["two-cores-vllm", "h200-llama"])
def test_sixteen_are_foretold_from_four(name: str) -> None:
    """Prompts cost 1.9 times as much among others as alone in both; counted as alone, vLLM's gain was 11 % too high."""
    runs = seen(name)
    (few, speed), (_, truth) = runs[4], runs[16]
    gain = 16 / few.batch * cycle_ms(few, few.batch) / cycle_ms(few, 16)
    assert gain * speed == pytest.approx(truth, rel=0.05)


def test_what_a_prompt_costs_among_others_is_no_less_than_alone_and_at_most_twice_as_much() -> None:
    view = seen("two-cores-vllm")[4][0]
    calm, torn = view._replace(behind_ms=0.0, stalled_ms=0.0), view._replace(stalled_ms=1e6)
    steps = view.tokens * view.step_ms
    assert cycle_ms(calm, view.batch) == pytest.approx(view.batch * view.prefill_ms + steps)
    assert cycle_ms(torn, view.batch) == pytest.approx(2 * view.batch * view.prefill_ms + steps)
