"""The table of `bench`: unmeasured figures are TBD, flags are footnotes, and rows fill in."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.runs import make_cell, make_run

from bedplate.show.bench import LineView, TableView, choose_view, make_row, render_run, write_title
from bedplate.values import Refusal, replace_fields
from bedplate.values.run import Flag, Load, Quality, Run
from bedplate.values.workload import LatencyTarget

CELLS = [make_cell("vllm", 1, 50.0), make_cell("vllm", 4, 150.0), make_cell("llama.cpp", 1, 40.0)]


def render_page(run: Run) -> str:
    out = io.StringIO()
    Console(file=out, width=150, highlight=False).print(render_run(run, 0.98, {CELLS[0].id: "bandwidth"}))
    return out.getvalue()


def test_a_row_has_the_figures_in_their_columns() -> None:
    row = make_row(CELLS[1], "bandwidth")
    assert row[:4] == ("vllm", "1.0", "Q4_1", "4") and row[8] == "150" and row[10] == "0.4"
    assert row[11] == "0.98" and row[12] == "bandwidth" and row[5].startswith("<")  # sixty requests show no p99
    assert 80 < float(row[4]) < 120 and float(row[6]) > 20


def test_unknown_figures_are_tbd() -> None:
    empty = replace_fields(CELLS[0], repeats=(), quality=Quality(note="no reference"))
    row = make_row(empty)
    assert row[4:9] == ("TBD",) * 5 and row[9] == "" and row[10:12] == ("TBD", "TBD")


def test_wrong_answers_are_marked() -> None:
    assert make_row(replace_fields(CELLS[0], quality=Quality(agreement=0.11, verdict="broken")))[11] == "0.11 !"


def test_the_page_names_an_engine_once_and_lists_flags_below() -> None:
    busy = Flag(kind="busy", text="other processes used 40% of the CPU", invalid=True)
    cells = [replace_fields(CELLS[0], flags=(busy,)), replace_fields(CELLS[1], flags=(busy,)), CELLS[2]]
    run = replace_fields(
        make_run(cells), left_out=(Refusal(engine="mlx", kind="impossible", why="needs Apple Silicon"),)
    )
    text = render_page(run)
    assert text.count("vllm  ") == 1 and text.count("other processes used 40%") == 1
    assert "✗ vllm, load 1, 4: other" in text
    assert "invalid" in text and "– mlx: needs Apple Silicon" in text and "bandwidth" not in text
    assert "client error ≤ 0.5 ms" in text and "idle 98%" in text and "512 in, 128 out" in text
    assert "fewer than 100 requests" in text and "made" in text


def test_the_bottleneck_is_in_the_last_column() -> None:
    assert "bandwidth" in render_page(make_run(CELLS))


def test_the_capacity_of_each_engine_is_shown() -> None:
    run = make_run([make_cell("vllm", 1, 50.0), make_cell("vllm", 4, 150.0, ttft_ms=900), CELLS[2]])
    assert run.matrix is not None
    asked = replace_fields(run.matrix, target=LatencyTarget(ttft_ms=500, tpot_ms=50))
    text = render_page(replace_fields(run, matrix=asked))
    assert "vllm: up to 1 in flight meet TTFT ≤ 500 ms and TPOT ≤ 50 ms" in text and "; 4 in flight do not" in text
    assert "llama.cpp: up to 1 in flight" in text and "higher loads were not tried" in text
    never = replace_fields(asked, target=LatencyTarget(ttft_ms=1))
    assert "vllm: TTFT ≤ 1 ms is not met even with 1 in flight" in render_page(replace_fields(run, matrix=never))


def test_the_title_names_lengths_and_shared_prefix() -> None:
    run = make_run([], loads=(1,))
    assert run.matrix is not None
    shared = replace_fields(run.matrix, loads=(Load(concurrency=1, shared_prefix_tokens=100),))
    words = write_title(replace_fields(run, matrix=shared), None, ["a model"])
    assert words.startswith("a model · 512 in, 128 out, 100 shared · a made-up machine")


def test_each_finished_cell_is_a_line_in_a_pipe() -> None:
    out = io.StringIO()
    teller = choose_view(Console(file=out, width=200), lambda run: {CELLS[0].id: "bandwidth"})
    assert isinstance(teller, LineView)
    run = make_run([], ["vllm", "mlx"])
    with teller:
        teller.report_start(run, [CELLS[0].subject], 0.5)
        teller.report_refusal(Refusal(engine="mlx", kind="impossible", why="needs Apple Silicon"))
        teller.report_phase(replace_fields(CELLS[0], repeats=()), "begin")
        before = out.getvalue()
        assert "50" not in before.splitlines()[-1]
        teller.report_cell(replace_fields(CELLS[0], halt=None))
        assert out.getvalue() == before, "another turn of it comes"
        teller.report_cell(replace_fields(CELLS[0], halt="most"))
    assert "bandwidth" in out.getvalue().splitlines()[-1] and "0.98" in out.getvalue().splitlines()[-1]
    teller.report_end(replace_fields(run, cells=(CELLS[0],)))
    lines = out.getvalue().splitlines()
    heads = lines[1]
    assert heads.split()[0] == "engine" and lines[3].index("Q4_1") == heads.index("weights")


def test_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_view(Console(file=io.StringIO(), force_terminal=True)), LineView)


def test_the_table_fills_in_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=True, highlight=False, color_system=None)
    teller = choose_view(console)
    assert isinstance(teller, TableView)
    run = make_run([], ["vllm"], loads=(1, 4))
    with teller:
        with teller.step("installing vllm", 100) as done:
            done(50)
        teller.report_start(run, [CELLS[0].subject], 0.9)
        first = out.getvalue()
        assert first.count("TBD") == 2 and "installing vllm" in first
        teller.report_phase(replace_fields(CELLS[0], repeats=()), "begin")
        assert "measuring, repeat 1" in out.getvalue()[len(first) :]
        teller.report_phase(replace_fields(CELLS[0], repeats=CELLS[0].repeats[:2]), "warm-up")
        assert "warming up, repeat 3, ± " in out.getvalue()
        teller.note("a note")
        teller.report_cell(CELLS[0])
    teller.report_end(replace_fields(run, cells=(CELLS[0],)))
    assert "run made" in out.getvalue() and "a note" in out.getvalue()
