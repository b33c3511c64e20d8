"""Cost per million tokens has the same names, units and figures in every verb."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import invoke
from tests.commands import run as command
from tests.runs import make_cell, make_run

from bedplate.cli.options import read_price
from bedplate.errors import UsageError
from bedplate.measure.exchange import write_run
from bedplate.measure.load import serve_null
from bedplate.measure.summary import compute_spent, make_row
from bedplate.show.bench import LineView, render_run
from bedplate.values import Parallelism, replace_fields, to_json
from bedplate.values.cost import Price
from bedplate.values.run import Cell, Run

PRICE = Price(price_per_hour=3.6, watts=100, electricity_price=0.5)
"""At 100 tokens a second a million take 10,000 s: 10 for the machine, 0.278 kWh."""


def add_energy(cell: Cell, joules: float) -> Cell:
    repeats = [
        replace_fields(one, use=replace_fields(one.use, energy_j=joules, energy_source="rapl")) for one in cell.repeats
    ]
    return replace_fields(cell, repeats=tuple(repeats))


def make_priced_run(price: Price | None, *cells: Cell) -> Run:
    run = make_run(cells or [make_cell("llama.cpp", 4, 100), make_cell("pytorch", 4, 40)])
    return replace_fields(run, environment=replace_fields(run.environment, price=price))


def render_page(run: Run) -> str:
    out = Console(file=io.StringIO(), width=220)
    out.print(render_run(run))
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_bench_table_shows_cost_only_with_a_price() -> None:
    assert "cost per M" not in render_page(make_priced_run(None))
    shown = render_page(make_priced_run(PRICE))
    assert "cost per M" in shown and "kWh per M" in shown
    line = next(one for one in shown.splitlines() if "llama.cpp" in one).split()
    assert "10.1" in line and "0.278" in line
    slower = next(one for one in shown.splitlines() if "pytorch" in one).split()
    assert "25.3" in slower and "0.694" in slower


def test_log_lines_have_the_same_columns() -> None:
    run, out = make_priced_run(PRICE), Console(file=io.StringIO(), width=220)
    teller = LineView(out, lambda run: {})
    teller.report_start(run, [cell.subject for cell in run.cells], 1.0)
    teller.report_cell(replace_fields(run.cells[0], halt="narrow"))
    head, line = out.file.getvalue().splitlines()[1:3]  # type: ignore[attr-defined]
    assert head.index("cost per M") + len("cost per M") == line.index("10.1") + len("10.1")


def test_measured_energy_takes_precedence() -> None:
    cell = add_energy(make_cell("vllm", 4, 100), 10 * 100 * 36.0)  # 36 J a token
    found = compute_spent(cell, PRICE)
    assert found.kwh_per_million_tokens == pytest.approx(10.0, rel=0.01)
    assert found.cost_per_million_tokens == pytest.approx(10.0 + 5.0, rel=0.01)
    assert compute_spent(cell, None).kwh_per_million_tokens == pytest.approx(10.0, rel=0.01)
    assert compute_spent(cell, None).cost_per_million_tokens is None


def test_the_price_is_multiplied_by_the_cards() -> None:
    cell = make_cell("vllm", 4, 100)
    on_four = replace_fields(
        cell, subject=replace_fields(cell.subject, device="cuda", parallelism=Parallelism(tensor=2, data=2))
    )
    one, four = (make_row(each, price=Price(price_per_hour=3.6)).cost_per_million_tokens for each in (cell, on_four))
    assert one is not None and four == pytest.approx(4 * one)


def test_csv_rows_have_cost_and_energy() -> None:
    rows = list(csv.DictReader(io.StringIO(write_run(make_priced_run(PRICE), "csv"))))
    assert float(rows[0]["cost_per_million_tokens"]) == pytest.approx(10.139, rel=0.01)
    assert float(rows[0]["kwh_per_million_tokens"]) == pytest.approx(0.2778, rel=0.01)
    bare = list(csv.DictReader(io.StringIO(write_run(make_priced_run(None), "csv"))))
    assert bare[0]["cost_per_million_tokens"] == ""


@pytest.mark.engine
def test_a_run_stores_its_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    asked = ("--prompt-tokens", "24", "--output-tokens", "8", "--seconds", "0.5", "--repeats", "1", "--no-quality")
    with serve_null(first_ms=10, interval_ms=1, tokens=8) as null:
        done = command("bench", "--url", null.url, "--concurrency", "2", *asked, "--price-per-hour", "3.6")
    assert done.code == 0 and "cost per M" in done.out, done.err
    (kept,) = csv.DictReader(io.StringIO(invoke("bench", "--resume", "last", "--csv").out))
    assert float(kept["cost_per_million_tokens"]) == pytest.approx(1000 / float(kept["tok_per_s"]), rel=0.01)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    made = []
    for engine, rate in (("llama.cpp", 100), ("pytorch", 40)):
        path = tmp_path / f"{engine}.json"
        path.write_text(to_json(make_priced_run(PRICE, make_cell(engine, 4, rate))))
        made.append(str(path))
    return made[0], made[1]


def test_compare_shows_the_cost_of_both_sides(files: tuple[str, str]) -> None:
    done = invoke("compare", *files, "--json")
    assert done.code == 30, done.err  # B is slower by more than the tolerance
    (one,) = json.loads(done.out)["spent"]
    assert one["a"]["cost_per_million_tokens"] == pytest.approx(10.139, rel=0.01)
    assert one["b"]["cost_per_million_tokens"] == pytest.approx(25.347, rel=0.01)
    shown = invoke("compare", *files).out
    assert "cost per M A" in shown and "25.3" in shown


def test_a_price_option_takes_precedence_over_the_stored_price(files: tuple[str, str]) -> None:
    done = invoke("compare", *files, "--json", "--price-per-hour", "36")
    (one,) = json.loads(done.out)["spent"]
    assert one["a"]["cost_per_million_tokens"] == pytest.approx(100.139, rel=0.01)


def test_report_has_columns_only_for_known_costs(files: tuple[str, str], tmp_path: Path) -> None:
    shown = invoke("report", files[0], "--md").out
    assert "cost per M" in shown and "| 10.1 |" in shown
    bare = tmp_path / "bare.json"
    bare.write_text(to_json(make_priced_run(None)))
    assert "per M" not in invoke("report", str(bare), "--md").out
    with_price = invoke("report", str(bare), "--md", "--price-per-hour", "3.6").out
    assert "cost per M" in with_price and "kWh per M" not in with_price
    head, *_, last = [line for line in with_price.splitlines() if line.startswith("|")]
    assert head.count("|") == last.count("|")


def test_price_options_take_precedence_over_the_intent(tmp_path: Path) -> None:
    file = tmp_path / "bedplate.yaml"
    file.write_text("operations: {price_per_hour: 2.5, watts: 700, electricity_price: 0.3}\n")
    assert read_price(file, None, None) == Price(price_per_hour=2.5, watts=700, electricity_price=0.3)
    assert read_price(file, 9.0, None) == Price(price_per_hour=9.0, watts=700, electricity_price=0.3)
    assert read_price(None, None, None) is None
    with pytest.raises(UsageError, match="--electricity-price"):
        read_price(None, None, 0.0)
    assert invoke("bench", "--price-per-hour", "-1").code == 2


def test_plan_adds_electricity_to_the_price() -> None:
    asked = ("plan", "meta-llama/Llama-3.1-8B-Instruct", "--hardware", "H100 SXM 80GB", "--json")
    paid = [*asked, "--set", "price_per_hour=2.5", "--set", "watts=700"]
    one, two = (
        json.loads(invoke(*words).out)["estimate"] for words in (paid, [*paid, "--set", "electricity_price=0.5"])
    )
    kwh = one["kwh_per_million_tokens"]["value"]
    assert two["cost_per_million_tokens"]["value"] == pytest.approx(one["cost_per_million_tokens"]["value"] + 0.5 * kwh)
    assert two["cost_per_million_tokens"]["low"] < two["cost_per_million_tokens"]["high"]


def test_simulate_includes_electricity_in_the_cost(tmp_path: Path) -> None:
    file = tmp_path / "bedplate.yaml"
    intent = (
        "hardware: {accelerator: NVIDIA H100 SXM 80GB, count: 1, ram_gb: 512, os: linux}\n"
        "model: meta-llama/Llama-3.1-8B-Instruct\n"
        "workload: {concurrency: 8, prompt_tokens: 256, output_tokens: 32}\n"
        "operations: {price_per_hour: 2.5, watts: 700, electricity_price: 0.4}\n"
    )
    file.write_text(intent)
    words = ("simulate", "-f", str(file), "--requests", "100", "--rate", "10", "--replicas", "1")
    answer = json.loads(invoke(*words, "--json").out)["answer"]
    hours = 1e6 / answer["output_tok_s"] / 3600
    assert answer["kwh_per_million_tokens"] == pytest.approx(0.7 * hours)
    assert answer["cost_per_million_tokens"] == pytest.approx(2.5 * hours + 0.4 * 0.7 * hours)
    assert "0.4 per kWh" in " ".join(invoke(*words).out.split())
