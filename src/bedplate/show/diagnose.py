"""The page of `diagnose`: the bottleneck, where the time goes, the evidence, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.judge.words import describe_load_briefly, format_signed_percent
from bedplate.show.columns import Column, SplitTable
from bedplate.show.figures import NOT_MEASURED, format_figure_or_missing
from bedplate.show.page import make_fact_table
from bedplate.values import units
from bedplate.values.diagnosis import Bottleneck, Diagnosis, GainPrediction, Limit, LoadDiagnosis

LIMITS: tuple[Limit, ...] = (
    "scheduler", "compute", "memory bandwidth", "KV cache", "interconnect", "runtime overhead",
)  # fmt: skip
METRICS = {"output_tok_s": "tokens per second", "ttft_ms": "time to first token", "tpot_ms": "time per token",
           "e2e_ms": "request latency"}  # fmt: skip


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    parts: list[RenderableType] = []
    for one in diagnosis.bottlenecks:
        parts += [Text(""), *_render_bottleneck(one)]
    return Group(*parts)


def _render_bottleneck(one: Bottleneck) -> Iterator[RenderableType]:
    name = " ".join(part for part in (one.engine, one.engine_version, one.quantization) if part)
    style = "bold" if one.limit is not None else "bold yellow"
    yield Padding(Text.assemble((f"{name}  ", "bold cyan"), (one.text, style)), (0, 1))
    yield Text("")
    yield _make_table(one.loads)
    yield Text("")
    yield make_fact_table(_list_rows(one))


def _make_table(loads: tuple[LoadDiagnosis, ...]) -> RenderableType:
    """The share of request time per bottleneck for each load; only bottlenecks with a share have a column."""
    seen = [limit for limit in LIMITS if any(spent.limit == limit for load in loads for spent in load.spent)]
    columns = [
        Column.from_cells(
            "request ms", [format_figure_or_missing(load.request_ms, NOT_MEASURED) for load in loads], right=True
        ),
        *(Column.from_cells(limit, [_format_share(load, limit) for load in loads], right=True) for limit in seen),
        Column.from_cells(
            "step ms", [format_figure_or_missing(load.step_ms, NOT_MEASURED) for load in loads], right=True
        ),
        Column.from_cells(
            "floor ms", [format_figure_or_missing(load.floor_ms, NOT_MEASURED) for load in loads], right=True
        ),
        Column.from_cells("bandwidth", [_format_percent(load.bandwidth_share) for load in loads], right=True),
        Column.from_cells("bottleneck", [load.limit or "unknown" for load in loads]),
    ]
    return SplitTable(Column.from_cells("load", [describe_load_briefly(load.load) for load in loads]), tuple(columns))


def _format_share(load: LoadDiagnosis, limit: Limit) -> Text:
    if not load.spent:
        return Text(NOT_MEASURED)
    share = sum(spent.share for spent in load.spent if spent.limit == limit)
    return Text(f"{share:.0%}", style="bold" if limit == load.limit else "dim")


def _format_percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{share:.0%}"


def _list_rows(one: Bottleneck) -> Iterator[tuple[str, str, str]]:
    for evidence in one.evidence:
        yield "Evidence", evidence.text, f"→ {evidence.limit}" if evidence.limit is not None else ""
    for change in one.changes:
        yield "Change", f"{change.text}: {change.flag}" if change.flag else change.text, change.kind
    for prediction in one.predictions:
        yield "Expected", _describe_prediction(prediction), "estimate"
    for unknown in one.unknown:
        yield "Unknown", unknown, ""


def _describe_prediction(one: GainPrediction) -> str:
    gain = one.gain
    if one.metric == "output_tok_s":
        return (
            f"{one.change}: {METRICS[one.metric]} {format_signed_percent(gain.value)} "
            f"({format_signed_percent(gain.low)} … {format_signed_percent(gain.high)})"
        )
    times = (
        f"{units.format_figure(gain.value, 2)} times shorter ({units.format_figure(gain.low, 2)} … "
        f"{units.format_figure(gain.high, 2)})"
    )
    return f"{one.change}: {METRICS[one.metric]} {times}"
