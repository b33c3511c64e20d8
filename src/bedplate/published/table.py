"""Reads a CSV table and writes one with a prediction or a reason for each row."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO

from bedplate.errors import UsageError
from bedplate.published.predict import predict
from bedplate.published.rows import OUTPUT_COLUMNS, PredictionRefusal

NEEDED = ("hardware", "engine", "model", "metric")
LONGEST_CELL = 1 << 20
TOLD_EVERY = 50


def read_table(source: TextIO, name: str = "the table") -> list[dict[str, str | None]]:
    """All rows as dictionaries; columns may be in any order, and unknown columns are ignored."""
    csv.field_size_limit(LONGEST_CELL)
    try:
        reader = csv.DictReader(source)
        columns = [(column or "").strip().lower() for column in reader.fieldnames or ()]
        if not columns:
            raise UsageError(f"{name} is empty", hint=f"the first line must name the columns: {', '.join(NEEDED)} …")
        if missing := [column for column in NEEDED if column not in columns]:
            raise UsageError(
                f"{name} has no column {missing[0]!r}",
                cause=f"it has {', '.join(columns[:20])}"[:300],
                hint=f"required columns: {', '.join(NEEDED)}",
            )
        reader.fieldnames = columns
        return list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{name} is not a CSV table in UTF-8", cause=str(error)) from error


def find_row(source: TextIO, name: str, wanted: str | int) -> dict[str, str | None]:
    """The row with this id, or on this line of the file; the line with the column names is line 1."""
    text = source.read()
    rows = read_table(io.StringIO(text, newline=""), name)
    if isinstance(wanted, int):
        reader = csv.reader(io.StringIO(text, newline=""))
        lines = [reader.line_num for cells in reader if cells][1:]
        if wanted in lines:
            return rows[lines.index(wanted)]
        raise UsageError(f"{name} has no row that ends on line {wanted}", hint="line 1 has the names of the columns")
    found = next((row for row in rows if (row.get("row_id") or "").strip() == wanted), None)
    if found is None:
        raise UsageError(f"{name} has no row with the id {wanted!r}", hint="FILE:LINE selects a row by its line")
    return found


def predict_rows(
    table: Iterable[Mapping[str, str | None]], done: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[str, ...]]:
    """The rows of the output in the table's order; rows without an id get their number."""
    for number, row in enumerate(table, 1):
        found = predict(row)
        row_id = (row.get("row_id") or "").strip() or str(number)
        if isinstance(found, PredictionRefusal):
            yield row_id, "", "", "", found.why
        else:
            yield row_id, *(f"{value:.6g}" for value in found), ""
        if number % TOLD_EVERY == 0:
            done(number)


def write_table(lines: Iterable[tuple[str, ...]], target: TextIO) -> None:
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(OUTPUT_COLUMNS)
    writer.writerows(lines)
