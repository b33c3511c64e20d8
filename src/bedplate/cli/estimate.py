"""bedplate estimate: predicts the rows of a table of measurements."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager
    from typing import TextIO

EXAMPLES = """Examples:

\b
  bedplate estimate --rows measured.csv --out predicted.csv
  bedplate estimate --rows - < measured.csv | head
  bedplate estimate --explain measured.csv:12
  bedplate estimate --rows measured.csv --explain LCP-00001

Columns: hardware, count, engine, model, quantization, tensor_parallel, parallelism, concurrency, prompt_tokens,
output_tokens, context_depth, metric; optional hints: backend, engine_version, scenario, notes. Required: hardware,
engine, model and metric. A row that cannot be predicted gets a reason instead of a number."""


def estimate(
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            metavar="FILE",
            help="The CSV table of rows to predict; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The CSV file to write; - is standard output.")
    ] = "-",
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="ROW",
            help="List the terms of one prediction. ROW is FILE:LINE, a row_id of --rows, or NAME=VALUE; NAME=VALUE ….",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Predict the rows of a table of measurements.

    Writes row_id, predicted, low, high and refused, one line per row, in the order of the table.
    """
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.errors import UsageError, make_unreadable_error
    from bedplate.published.table import predict_rows, read_table

    if explain is not None:
        _explain_row(explain, rows, json)
        return
    if rows is None or json:
        raise UsageError(
            "--json needs --explain ROW" if rows is not None else "no rows to predict",
            hint="use --rows FILE for a table, or --explain ROW for the terms of one prediction",
        )
    try:
        with _open_input(rows) as source:
            table = read_table(source, rows)
    except OSError as error:
        raise make_unreadable_error(rows, error) from error
    with TerminalProgress().step("predicting", len(table)) as done:
        found = list(predict_rows(table, done))
    _write_rows(out, found)
    refused = sum(1 for line in found if line[-1])
    if out != "-":
        summary = f" {len(found):,} rows: {len(found) - refused:,} predicted, {refused:,} refused; written: {out}"
        make_console(sys.stderr).print(summary, soft_wrap=True, markup=False)


def _explain_row(text: str, rows: str | None, json: bool) -> None:
    from bedplate.cli.terminal import make_console
    from bedplate.errors import NotPossible
    from bedplate.published.explain import explain
    from bedplate.published.rows import PredictionRefusal

    found = explain(_find_row(text, rows))
    if isinstance(found, PredictionRefusal):
        raise NotPossible("the row cannot be predicted", cause=found.why)
    if json:
        from bedplate.values import to_json

        print(to_json(found))  # noqa: T201
        return
    from bedplate.show.estimate import render_explanation

    make_console().print(render_explanation(found))


def _find_row(text: str, rows: str | None) -> Mapping[str, str | None]:
    """The row that `--explain` names: in a file by its line, in --rows by its id, or the question itself."""
    from bedplate.errors import UsageError, make_unreadable_error
    from bedplate.published.explain import parse_question
    from bedplate.published.table import find_row

    name, _, line = text.rpartition(":")
    in_file = rows is None and bool(name) and line.isdecimal() and Path(name).exists()
    if rows is None and not in_file:
        if "=" in text:
            return parse_question(text)
        raise UsageError(
            f"{text!r} names no row", hint="use FILE:LINE, --rows FILE with a row_id, or hardware=…; engine=…; metric=…"
        )
    path = name if in_file else str(rows)
    try:
        with _open_input(path) as source:
            return find_row(source, path, int(line) if in_file else text)
    except OSError as error:
        raise make_unreadable_error(path, error) from error


def _open_input(name: str) -> AbstractContextManager[TextIO]:
    if name == "-":
        # The same encoding as for files: spreadsheets write a byte order mark.
        return nullcontext(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline=""))
    return Path(name).open(encoding="utf-8-sig", newline="")


def _write_rows(name: str, lines: Iterable[tuple[str, ...]]) -> None:
    from bedplate.errors import ExternalFailure
    from bedplate.published.table import write_table

    if name == "-":
        write_table(lines, sys.stdout)
        return
    try:
        with Path(name).open("w", encoding="utf-8", newline="") as file:
            write_table(lines, file)
    except OSError as error:
        raise ExternalFailure(f"cannot write {name}", cause=error.strerror or str(error)) from error
