"""bedplate estimate: predicts the rows of a table of measurements."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from typing import TextIO

EXAMPLES = """Examples:

\b
  bedplate estimate --rows measured.csv --out predicted.csv
  bedplate estimate --rows - < measured.csv | head

Columns: hardware, count, engine, model, quantization, tensor_parallel, parallelism, concurrency, prompt_tokens,
output_tokens, context_depth, metric; optional hints: backend, engine_version, scenario, notes. Required: hardware,
engine, model and metric. A row that cannot be predicted gets a reason instead of a number."""


def estimate(
    rows: Annotated[
        str, typer.Option("--rows", metavar="FILE", help="The CSV table of rows to predict; - reads standard input.")
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The CSV file to write; - is standard output.")
    ] = "-",
) -> None:
    """Predict the rows of a table of measurements.

    Writes row_id, predicted, low, high and refused, one line per row, in the order of the table.
    """
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.errors import UsageError
    from bedplate.published.table import predict_rows, read_table

    try:
        with _open_input(rows) as source:
            table = read_table(source, rows)
    except OSError as error:
        raise UsageError(f"cannot read {rows}", cause=error.strerror or str(error)) from error
    with TerminalProgress().step("predicting", len(table)) as done:
        found = list(predict_rows(table, done))
    _write_rows(out, found)
    refused = sum(1 for line in found if line[-1])
    if out != "-":
        summary = f" {len(found):,} rows: {len(found) - refused:,} predicted, {refused:,} refused; written: {out}"
        make_console(sys.stderr).print(summary, soft_wrap=True, markup=False)


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
