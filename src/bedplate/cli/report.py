"""bedplate report: measurements as one HTML or Markdown page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import ElectricityPrice, PricePerHour, read_price, write_file

if TYPE_CHECKING:
    from bedplate.judge.argument import MeasuredEngine
    from bedplate.values import Model
    from bedplate.values.run import Cell, Run
    from bedplate.values.verdict import Verdict

EXAMPLES = """Examples:

\b
  bedplate report                          the newest run, to bedplate-report.html
  bedplate report RUN1 RUN2 -o both.html   several runs on one page
  bedplate report run.json --md            a file from `bedplate bench --json`, as Markdown on standard output
  bedplate report --slo ttft_ms=500        recommend an engine that meets this target
  bedplate report --incumbent vllm         compare with the engine in service today
  bedplate report results/ -o all.html     every result file of a folder on one page that can be sorted"""
DEFAULT_FILE = Path("bedplate-report.html")


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run ids, files with a run, or one folder of result files. Default: the newest run.",
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
    if runs and any(Path(name).is_dir() for name in runs):
        prices = {"--price-per-hour": price_per_hour, "--electricity-price": electricity_price}
        _report_folder(runs, output, md, given={"--slo": slo, "--incumbent": incumbent, **prices})
        return
    from bedplate.cli.judging import diagnose_cells
    from bedplate.facts.hardware import probe
    from bedplate.judge.argument import recommend_engine
    from bedplate.measure.questions import parse_target
    from bedplate.show.report import make_report, to_html, to_markdown

    target = parse_target(slo) if slo is not None else None
    found = [_load_run(name) for name in runs] if runs else [_load_run(None)]
    found = [_add_price(run, price_per_hour, electricity_price) for run in found]
    cells = [cell for run in found for cell in run.cells]
    models = [model for run in found for model in run.models]
    diagnosis = diagnose_cells(cells, {run.id: run.environment for run in found}, probe(), models) if cells else None
    choice = recommend_engine(found, diagnosis, target).choice
    verdict = _compare_with_choice(cells, incumbent, choice) if incumbent is not None else None
    page = make_report(found, _find_model_facts(cells, models), diagnosis, verdict, target)
    if md and output is None:
        print(to_markdown(page), end="")  # noqa: T201
        return
    path = output or DEFAULT_FILE
    write_file(path, to_markdown(page) if md or path.suffix == ".md" else to_html(page))
    from bedplate.cli.terminal import make_console

    make_console().print(f" {page.headline}  {path}", highlight=False, markup=False, soft_wrap=True)
    for warning in page.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _report_folder(runs: list[str], output: Path | None, md: bool, given: dict[str, object]) -> None:
    from bedplate.errors import UsageError
    from bedplate.show.results_page import make_results_page, read_folder, to_html, to_markdown

    if len(runs) > 1:
        raise UsageError("a folder cannot be combined with other runs", hint="put the files into the folder")
    if used := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{' and '.join(used)} cannot be used with a folder", hint="name the runs instead")
    folder = Path(runs[0])
    page = make_results_page(read_folder(folder), folder.resolve().name)
    if md and output is None:
        print(to_markdown(page), end="")  # noqa: T201
        return
    path = output or DEFAULT_FILE
    write_file(path, to_markdown(page) if md or path.suffix == ".md" else to_html(page))
    from bedplate.cli.printing import print_text

    print_text(f" {page.headline}  {path}")
    for warning in page.unreadable:
        typer.echo(f"warning: {warning}", err=True)


def _load_run(named: str | None) -> Run:
    from bedplate import store
    from bedplate.measure.results import read_result

    if named is not None and (named.endswith(".json") or Path(named).is_file()):
        return read_result(Path(named), require_valid=True).run
    return store.find_run(named)


def _add_price(run: Run, price_per_hour: float | None, electricity_price: float | None) -> Run:
    from bedplate.values import replace_fields

    price = read_price(None, price_per_hour, electricity_price, run.environment.price)
    return replace_fields(run, environment=replace_fields(run.environment, price=price))


def _find_model_facts(cells: list[Cell], models: list[Model]) -> dict[tuple[str, str | None], Model]:
    """The facts of each measured model, with its weights as they were served."""
    from bedplate.cli.judging import find_named_model
    from bedplate.judge.roofline import apply_quantization

    found = {}
    for name, label in {(cell.subject.model, cell.subject.quantization) for cell in cells}:
        if (model := find_named_model(name, models)) is not None:
            found[name, label] = apply_quantization(model, label)
    return found


def _compare_with_choice(cells: list[Cell], incumbent: str, choice: MeasuredEngine | None) -> Verdict | None:
    """Compares the engine in service with the recommended one; `None` where they are the same, or nothing is sound."""
    from bedplate.engines.names import find_engine_id
    from bedplate.errors import UsageError
    from bedplate.judge.argument import is_named, is_sound
    from bedplate.judge.compare import compare

    _, at, version = incumbent.partition("@")
    wanted = f"{find_engine_id(incumbent) or incumbent}{at}{version.removeprefix('v')}"
    mine = [cell for cell in cells if is_named(cell, wanted)]
    if not mine:
        there = ", ".join(dict.fromkeys(cell.subject.engine for cell in cells)) or "none"
        raise UsageError(f"{incumbent} was not measured in these runs", hint=f"measured engines: {there}")
    mine = [cell for cell in mine if is_sound(cell)]
    if choice is None or not mine or any(is_named(cell, wanted) for cell in choice.cells):
        return None
    return compare(mine, choice.cells, allow=("quantization", "weights"))
