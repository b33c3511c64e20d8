"""Runs and cells are stored one by one, and an older store gets the new tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from tests.runs import make_cell, make_run

from bedplate import store
from bedplate.errors import ExternalFailure, UsageError
from bedplate.values import replace_fields
from bedplate.values.result import Result

RESULT = Result(
    at="2026-11-01T10:00:00Z", machine="m1", engine="vllm", model="x", concurrency=1, prompt_tokens=1, output_tokens=1
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def test_a_run_has_its_cells_in_start_order(path: Path) -> None:
    cells = [make_cell("vllm", 4, 80.0), make_cell("vllm", 1, 50.0), make_cell("llama.cpp", 1, 40.0)]
    run = make_run(cells)
    store.add_run(run, path)
    for cell in cells:
        store.add_cell(cell, path)
    assert (
        store.find_run("made", path) == run and store.find_run("ma", path) == run and store.find_run(path=path) == run
    )
    assert store.read_runs(path=path) == (replace_fields(run, cells=()),) and store.read_runs("elsewhere", path) == ()
    assert store.read_cells(engine="vllm", path=path) == (cells[1], cells[0])
    assert store.read_cells("made", path=path) == tuple(cells)


def test_a_cell_with_more_repeats_replaces_the_stored_one(path: Path) -> None:
    first, second = make_cell("vllm", 1, 50.0, repeats=1), make_cell("vllm", 4, 80.0)
    store.add_run(make_run([]), path)
    for cell in (first, second, make_cell("vllm", 1, 50.0, repeats=3)):
        store.add_cell(cell, path)
    assert [len(cell.repeats) for cell in store.find_run("made", path).cells] == [3, 3]
    assert [cell.load.concurrency for cell in store.find_run("made", path).cells] == [1, 4]


def test_a_stored_run_can_be_updated(path: Path) -> None:
    run = replace_fields(make_run([]), finished=False)
    store.add_run(run, path)
    store.add_run(replace_fields(run, finished=True), path)
    assert [one.finished for one in store.read_runs(path=path)] == [True]


def test_unknown_and_ambiguous_run_ids_are_rejected(path: Path) -> None:
    with pytest.raises(UsageError, match="no run is stored yet"):
        store.find_run(path=path)
    store.add_run(make_run([]), path)
    store.add_run(replace_fields(make_run([]), id="made-again", at="2026-11-16T09:00:00Z"), path)
    with pytest.raises(UsageError, match="there is no run x") as unknown:
        store.find_run("x", path)
    assert "made-again" in (unknown.value.hint or "")
    with pytest.raises(UsageError, match="2 run ids begin with ma"):
        store.find_run("ma", path)
    assert store.find_run(path=path).id == "made-again" and store.find_run("made-", path).id == "made-again"


def test_a_complete_id_wins_over_a_prefix_of_a_longer_one(path: Path) -> None:
    store.add_run(make_run([]), path)
    store.add_run(replace_fields(make_run([]), id="made-again"), path)
    assert store.find_run("made", path).id == "made"


def test_an_older_store_gets_the_tables_and_keeps_the_rest(path: Path) -> None:
    store.add_result(RESULT, path)
    with sqlite3.connect(path) as connection:
        for table in ("runs", "cells"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version=2")
    connection.close()
    store.add_run(make_run([]), path)
    assert store.read_results("m1", path=path) == (RESULT,) and store.find_run(path=path).id == "made"
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (store.VERSION,)
    connection.close()


def test_an_unreadable_cell_raises_an_external_failure(path: Path) -> None:
    store.add_run(make_run([]), path)
    store.add_cell(make_cell("vllm", 1, 50.0), path)
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE cells SET body = \'{"schema": "cell/99"}\'')
    connection.close()
    with pytest.raises(ExternalFailure):
        store.find_run("made", path)


def test_reading_creates_no_file(path: Path) -> None:
    assert store.read_runs(path=path) == () and store.read_cells(path=path) == ()
    assert not path.exists()
