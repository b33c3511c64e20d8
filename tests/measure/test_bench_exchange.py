"""Runs as files: each format contains the rows, with the required columns first."""

from __future__ import annotations

import csv
import io
import json

from tests.runs import make_cell, make_run

from bedplate.measure.exchange import write_mlperf_summary, write_run
from bedplate.values import from_json, replace_fields
from bedplate.values.run import Flag, Run

FIRST_COLUMNS = [
    "engine",
    "version",
    "model",
    "quantization",
    "hardware",
    "concurrency",
    "prompt_tokens",
    "output_tokens",
    "ttft_ms",
    "tok_per_s",
    "peak_mem_gb",
    "notes",
]
CELLS = [make_cell("vllm", 1, 50.0), make_cell("llama.cpp", 4, 90.0, label=None)]


def test_json_round_trips() -> None:
    run = make_run(CELLS)
    assert from_json(Run, write_run(run, "json")) == run


def test_csv_has_the_required_columns_first_and_empty_unknown_values() -> None:
    rows = list(csv.DictReader(io.StringIO(write_run(make_run(CELLS), "csv"))))
    assert list(rows[0])[: len(FIRST_COLUMNS)] == FIRST_COLUMNS and len(rows) == 2
    assert rows[0]["engine"] == "vllm" and rows[0]["tok_per_s"] == "50.0" and rows[1]["quantization"] == ""
    assert rows[0]["ttft_ms_p99"] == ""  # not shown for sixty requests


def test_jsonl_has_one_row_per_line() -> None:
    lines = write_run(make_run(CELLS), "jsonl").splitlines()
    assert [json.loads(line)["engine"] for line in lines] == ["vllm", "llama.cpp"]
    assert json.loads(lines[1])["quantization"] is None


def test_the_summary_says_valid_or_gives_the_reason() -> None:
    run = make_run(CELLS)
    good = write_mlperf_summary(run, CELLS[0])
    assert "Result is : VALID" in good and "No warnings encountered during test." in good
    assert "Scenario : SingleStream" in good and "not an MLPerf result" in good
    assert "90.00 percentile first token latency (ns)" in good and "99.00 percentile" not in good
    flag = Flag(kind="busy", text="other processes used 50% of the CPU", invalid=True)
    bad = write_mlperf_summary(run, replace_fields(CELLS[1], flags=(flag,)))
    assert (
        "Result is : INVALID\n  Reason : other processes used 50%" in bad and "WARNING: other processes used 50%" in bad
    )
    assert write_run(run, "txt").count("Result is") == 2
