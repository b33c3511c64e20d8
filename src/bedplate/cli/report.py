"""bedplate report: measurements as one HTML or Markdown page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import ElectricityPrice, PricePerHour, price_from, write_file

if TYPE_CHECKING:
    from bedplate.judge.argument import Candidate
    from bedplate.values import Model
    from bedplate.values.run import Cell, Run
    from bedplate.values.verdict import Verdict

EXAMPLES = """Examples:

\b
  bedplate report                          the newest run, to bedplate-report.html
  bedplate report RUN1 RUN2 -o both.html   several runs on one page
  bedplate report run.json --md            a file from `bedplate bench --json`, as Markdown on standard output
  bedplate report --slo ttft_ms=500        recommend an engine that meets this target
  bedplate report --incumbent vllm         compare with the engine in service today"""
DEFAULT_FILE = Path("bedplate-report.html")


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run ids, or files from `bench --json`. Default: the newest run.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; .md writes Markdown.",
            show_default=str(DEFAULT_FILE),
        ),
    ] = None,
    md: Annotated[
        bool, typer.Option("--md", help="Print Markdown on standard output instead of writing HTML.")
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Latency target: ttft_ms=500,tpot_ms=50.", show_default=False),
    ] = None,
    incumbent: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="The engine in service today.", show_default=False)
    ] = None,
    price_per_hour: PricePerHour = None,
    electricity_price: ElectricityPrice = None,
) -> None:
    """Write a report of measurements: recommendation, table, charts.

    The HTML file is self-contained: it opens offline, in light or dark mode, on a phone and in print.
    """
    from bedplate.cli.judging import diagnosis_of
    from bedplate.facts.hardware import probe
    from bedplate.judge.argument import argument
    from bedplate.measure.questions import read_target
    from bedplate.show.report import html, markdown, page_of

    target = read_target(slo) if slo is not None else None
    found = [_run(name) for name in runs] if runs else [_run(None)]
    found = [_priced(run, price_per_hour, electricity_price) for run in found]
    cells = [cell for run in found for cell in run.cells]
    models = [model for run in found for model in run.models]
    diagnosis = diagnosis_of(cells, {run.id: run.environment for run in found}, probe(), models) if cells else None
    choice = argument(found, diagnosis, target).choice
    verdict = _verdict(cells, incumbent, choice) if incumbent is not None else None
    page = page_of(found, _facts(cells, models), diagnosis, verdict, target)
    if md and output is None:
        print(markdown(page), end="")  # noqa: T201
        return
    path = output or DEFAULT_FILE
    write_file(path, markdown(page) if md or path.suffix == ".md" else html(page))
    from bedplate.cli.terminal import console

    console().print(f" {page.headline}  {path}", highlight=False, markup=False, soft_wrap=True)


def _run(named: str | None) -> Run:
    from bedplate import store
    from bedplate.measure.kept import run_of_file

    if named is not None and (named.endswith(".json") or Path(named).is_file()):
        return run_of_file(Path(named))
    return store.run(named)


def _priced(run: Run, price_per_hour: float | None, electricity_price: float | None) -> Run:
    from bedplate.values import replaced

    price = price_from(None, price_per_hour, electricity_price, run.environment.price)
    return replaced(run, environment=replaced(run.environment, price=price))


def _facts(cells: list[Cell], models: list[Model]) -> dict[tuple[str, str | None], Model]:
    """The facts of each measured model, with its weights as they were served."""
    from bedplate.cli.judging import model_named
    from bedplate.judge.ground import as_served

    found = {}
    for name, label in {(cell.subject.model, cell.subject.quantization) for cell in cells}:
        if (model := model_named(name, models)) is not None:
            found[name, label] = as_served(model, label)
    return found


def _verdict(cells: list[Cell], incumbent: str, choice: Candidate | None) -> Verdict | None:
    """Compares the engine in service with the recommended one; `None` where they are the same."""
    from bedplate.engines.names import engine_id
    from bedplate.errors import BadQuestion
    from bedplate.judge.compare import compare

    wanted = engine_id(incumbent) or incumbent
    mine = [cell for cell in cells if cell.subject.engine == wanted]
    if not mine:
        there = ", ".join(dict.fromkeys(cell.subject.engine for cell in cells)) or "none"
        raise BadQuestion(f"{incumbent} was not measured in these runs", hint=f"measured engines: {there}")
    if choice is None or choice.engine == wanted:
        return None
    return compare(mine, choice.cells, allow=("quantization", "weights"))
