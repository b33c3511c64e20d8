"""Write runs to files: JSON, CSV, JSON Lines, and a summary in the format of MLPerf."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Literal

import msgspec

from bedplate.measure.summary import all_samples, rows, summarized, why_invalid
from bedplate.values import to_json
from bedplate.values.run import Cell, Run
from bedplate.values.summary import Percentiles, Row

Form = Literal["json", "csv", "jsonl", "txt"]
RULE = "=" * 48
NS_PER_MS = 1_000_000


def written(run: Run, form: Form) -> str:
    if form == "json":
        return to_json(run) + "\n"
    if form == "jsonl":
        return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows(run))
    if form == "csv":
        return as_csv(rows(run))
    return "\n".join(mlperf_summary(run, cell) for cell in run.cells)


def as_csv(found: tuple[Row, ...]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row.__struct_fields__)
    for row in found:
        writer.writerow("" if value is None else value for value in msgspec.structs.astuple(row))
    return text.getvalue()


def mlperf_summary(run: Run, cell: Cell) -> str:
    """One cell in the format of MLPerf's LoadGen summary, with times in nanoseconds. It is not an MLPerf result."""
    return "\n".join(_lines(run, cell)) + "\n"


def _lines(run: Run, cell: Cell) -> Iterator[str]:
    found, load = summarized(cell), cell.load
    wrong = why_invalid(cell)
    yield from (RULE, "Results summary in the format of MLPerf (not an MLPerf result)", RULE)
    yield f"SUT name : {cell.subject.engine} {cell.subject.engine_version or ''}".rstrip()
    scenario = "SingleStream" if load.concurrency == 1 else "Closed loop" if load.arrivals == "closed" else "Server"
    yield f"Scenario : {scenario}"
    yield "Mode     : PerformanceOnly"
    yield f"Completed samples per second : {_number(found.requests_s)}"
    yield f"Completed tokens per second : {_number(found.output_tok_s)}"
    yield f"Result is : {'INVALID' if wrong else 'VALID'}"
    for reason in wrong:
        yield f"  Reason : {reason}"
    yield from ("", RULE, "Additional Stats", RULE)
    yield f"Samples : {found.requests}"
    yield f"Samples in error : {found.requests - found.ok}"
    yield from _times("latency", found.e2e_ms)
    yield from _times("first token latency", found.ttft_ms)
    yield from _times("time per output token", found.tpot_ms)
    yield from ("", RULE, "Test Parameters Used", RULE)
    yield f"model : {cell.subject.model} {cell.subject.quantization or ''}".rstrip()
    yield f"arrivals : {load.arrivals}"
    yield f"concurrency : {_number(load.concurrency)}"
    yield f"target_qps : {_number(load.requests_per_s)}"
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
    failed = sum(sample.outcome != "ok" for sample in all_samples(cell))
    yield f"{failed} errors encountered during test." if failed else "No errors encountered during test."


def _times(what: str, found: Percentiles | None) -> Iterator[str]:
    """Omits percentiles that need more samples, which LoadGen does not."""
    if found is None:
        yield f"Mean {what} (ns) : not measured"
        return
    yield f"Mean {what} (ns) : {_ns(found.mean)}"
    for name, value in (("50.00", found.p50), ("90.00", found.p90), ("95.00", found.p95), ("99.00", found.p99)):
        if value is not None:
            yield f"{name} percentile {what} (ns) : {_ns(value)}"
    yield f"Max {what} (ns) : {_ns(found.max)}"


def _ns(value_ms: float) -> int:
    return round(value_ms * NS_PER_MS)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
