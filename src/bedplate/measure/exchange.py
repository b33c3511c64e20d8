"""Write runs to files: JSON, CSV, JSON Lines, and a summary in the format of MLPerf."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Literal

import msgspec

from bedplate.measure.summary import list_invalid_reasons, list_samples, make_rows, summarize_cell
from bedplate.values import to_json
from bedplate.values.run import Cell, Run
from bedplate.values.summary import BenchRow, Percentiles

Form = Literal["json", "csv", "jsonl", "txt"]
RULE = "=" * 48
NS_PER_MS = 1_000_000


def write_run(run: Run, form: Form) -> str:
    if form == "json":
        return to_json(run) + "\n"
    if form == "jsonl":
        return "".join(msgspec.json.encode(row).decode() + "\n" for row in make_rows(run))
    if form == "csv":
        return to_csv(make_rows(run))
    return "\n".join(write_mlperf_summary(run, cell) for cell in run.cells)


def to_csv(found: tuple[BenchRow, ...]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(BenchRow.__struct_fields__)
    for row in found:
        writer.writerow("" if value is None else value for value in msgspec.structs.astuple(row))
    return text.getvalue()


def write_mlperf_summary(run: Run, cell: Cell) -> str:
    """One cell in the format of MLPerf's LoadGen summary, with times in nanoseconds. It is not an MLPerf result."""
    return "\n".join(_list_lines(run, cell)) + "\n"


def _list_lines(run: Run, cell: Cell) -> Iterator[str]:
    found, load = summarize_cell(cell), cell.load
    wrong = list_invalid_reasons(cell)
    yield from (RULE, "Results summary in the format of MLPerf (not an MLPerf result)", RULE)
    yield f"SUT name : {cell.subject.engine} {cell.subject.engine_version or ''}".rstrip()
    scenario = "SingleStream" if load.concurrency == 1 else "Closed loop" if load.arrivals == "closed" else "Server"
    yield f"Scenario : {scenario}"
    yield "Mode     : PerformanceOnly"
    yield f"Completed samples per second : {_format_number(found.requests_s)}"
    yield f"Completed tokens per second : {_format_number(found.output_tok_s)}"
    yield f"Result is : {'INVALID' if wrong else 'VALID'}"
    for reason in wrong:
        yield f"  Reason : {reason}"
    yield from ("", RULE, "Additional Stats", RULE)
    yield f"Samples : {found.requests}"
    yield f"Samples in error : {found.requests - found.ok}"
    yield from _list_times("latency", found.e2e_ms)
    yield from _list_times("first token latency", found.ttft_ms)
    yield from _list_times("time per output token", found.tpot_ms)
    yield from ("", RULE, "Test Parameters Used", RULE)
    yield f"model : {cell.subject.model} {cell.subject.quantization or ''}".rstrip()
    yield f"arrivals : {load.arrivals}"
    yield f"concurrency : {_format_number(load.concurrency)}"
    yield f"target_qps : {_format_number(load.requests_per_s)}"
    yield f"prompt_tokens : {load.prompt_tokens}"
    yield f"output_tokens : {load.output_tokens}"
    yield f"repeats : {len(cell.repeats)}"
    yield f"measured_duration (ms) : {found.seconds * 1000:.0f}"
    yield f"warmup_samples : {cell.warmup}"
    yield f"seed : {load.seed}"
    yield f"hardware : {run.environment.hardware}"
    yield f"bedplate : {run.environment.bedplate}, run {run.id}, cell {cell.id}"
    notes = [flag.text for flag in cell.flags]
    yield ""
    yield from (f"WARNING: {note}" for note in notes)
    if not notes:
        yield "No warnings encountered during test."
    failed = sum(sample.outcome != "ok" for sample in list_samples(cell))
    yield f"{failed} errors encountered during test." if failed else "No errors encountered during test."


def _list_times(what: str, found: Percentiles | None) -> Iterator[str]:
    """Omits percentiles that need more samples, which LoadGen does not."""
    if found is None:
        yield f"Mean {what} (ns) : not measured"
        return
    yield f"Mean {what} (ns) : {_to_ns(found.mean)}"
    for name, value in (("50.00", found.p50), ("90.00", found.p90), ("95.00", found.p95), ("99.00", found.p99)):
        if value is not None:
            yield f"{name} percentile {what} (ns) : {_to_ns(value)}"
    yield f"Max {what} (ns) : {_to_ns(found.max)}"


def _to_ns(value_ms: float) -> int:
    return round(value_ms * NS_PER_MS)


def _format_number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
