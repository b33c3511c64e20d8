"""The pages of `compare` and `diagnose`: the answer comes first, at any width, and unmeasured figures are marked."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType
from tests.judge.made_cells import Noise, make_pair
from tests.judge.made_engine import MadeEngine

from bedplate.judge.compare import compare
from bedplate.judge.diagnose import Roofline, diagnose
from bedplate.show.compare import render_verdict
from bedplate.show.diagnose import render_diagnosis
from bedplate.values import replace_fields
from bedplate.values.run import Cell, Load, Quality
from bedplate.values.verdict import Verdict
from bedplate.values.workload import LatencyTarget

WIDTHS = [60, 80, 120, 200]


def render_page(what: RenderableType, width: int = 120) -> str:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(what)
    return text.getvalue()


def make_sides(gain: float, loads: tuple[int, ...] = (1, 8)) -> tuple[list[Cell], list[Cell]]:
    return make_pair(Noise(7, request=0.03, repeat=0.008, drift=0.01), gain, 5, loads)


def make_verdict(gain: float = 1.3) -> Verdict:
    return compare(*make_sides(gain))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_answer_comes_first_and_nothing_is_truncated(width: int) -> None:
    text = render_page(render_verdict(make_verdict()), width)
    assert text.split()[0] == "Migrate" and "…" in text
    assert max(map(len, text.splitlines())) <= width
    for word in ("tok/s A", "TTFT ms A", "TPOT ms A", "interleaved", "Quality", "Costs", "8 in flight"):
        assert word in text


def test_each_answer_has_its_headline() -> None:
    assert "Stay with one." in render_page(render_verdict(make_verdict(0.7)))
    unchecked = compare(make_sides(1.3)[0], [replace_fields(cell, quality=Quality()) for cell in make_sides(1.3)[1]])
    text = render_page(render_verdict(unchecked))
    assert "Not proven." in text and "Stay with one." in text and "Evidence that would settle it" in text
    assert "not checked" in text


def test_left_out_cells_and_differences_are_on_the_page() -> None:
    one, other = make_sides(1.3)
    other = [replace_fields(cell, load=replace_fields(cell.load, seed=5)) for cell in other]
    found = compare(one, other, target=LatencyTarget(ttft_ms=5000))
    text = render_page(render_verdict(replace_fields(found, left_out=("16 in flight: [broken]",))))
    assert "seed: 0 and 5 (different prompts of the same length)" in text and "[broken]" in text
    assert "of requests meet the target" in text


def test_an_open_loop_comparison_shows_latencies_instead_of_throughput() -> None:
    load = Load(arrivals="poisson", requests_per_s=3, prompt_tokens=64, output_tokens=32)
    one, other = ([replace_fields(side[0], load=load)] for side in make_sides(1.3, (4,)))
    text = render_page(render_verdict(compare(one, other)))
    assert "request ms A" in text and "tok/s" not in text and "3 requests per second (poisson)" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_diagnosis_names_the_bottleneck_and_the_option(width: int) -> None:
    engine = MadeEngine(slots=1, token_ms=0.05)
    text = render_page(render_diagnosis(diagnose([(engine.cells(1, 8), engine.ground())])), width)
    assert "Scheduler is the bottleneck" in " ".join(text.split()) and "--parallel" in text
    assert max(map(len, text.splitlines())) <= width
    assert "Evidence" in text and "Change" in text and "Expected" in text


def test_an_unknown_bottleneck_is_reported() -> None:
    text = render_page(render_diagnosis(diagnose([(MadeEngine(own_ms=40.0, token_ms=0.05).cells(1), Roofline())])))
    assert "unknown" in text and "not measured" in text and "probe --measure" in text
