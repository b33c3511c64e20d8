"""The page of `diagnose`: the bottleneck, where the time goes, the evidence, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.judge.words import short_load, signed
from bedplate.show.columns import Column, Columns
from bedplate.show.figures import NOT_MEASURED, figure
from bedplate.show.page import page_of
from bedplate.values import units
from bedplate.values.diagnosis import AtLoad, Bottleneck, Diagnosis, Limit, Prediction

LIMITS: tuple[Limit, ...] = (
    "scheduler", "compute", "memory bandwidth", "KV cache", "interconnect", "runtime overhead",
)  # fmt: skip
METRICS = {"output_tok_s": "tokens per second", "ttft_ms": "time to first token", "tpot_ms": "time per token",
           "e2e_ms": "request latency"}  # fmt: skip


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    parts: list[RenderableType] = []
    for one in diagnosis.bottlenecks:
        parts += [Text(""), *_bottleneck(one)]
    return Group(*parts)


def _bottleneck(one: Bottleneck) -> Iterator[RenderableType]:
    name = " ".join(part for part in (one.engine, one.engine_version, one.quantization) if part)
    style = "bold" if one.limit is not None else "bold yellow"
    yield Padding(Text.assemble((f"{name}  ", "bold cyan"), (one.text, style)), (0, 1))
    yield Text("")
    yield _table(one.loads)
    yield Text("")
    yield page_of(_rows(one))


def _table(loads: tuple[AtLoad, ...]) -> RenderableType:
    """The share of request time per bottleneck for each load; only bottlenecks with a share have a column."""
    seen = [limit for limit in LIMITS if any(spent.limit == limit for load in loads for spent in load.spent)]
    columns = [
        Column.of("request ms", [figure(load.request_ms, NOT_MEASURED) for load in loads], right=True),
        *(Column.of(limit, [_share(load, limit) for load in loads], right=True) for limit in seen),
        Column.of("step ms", [figure(load.step_ms, NOT_MEASURED) for load in loads], right=True),
        Column.of("floor ms", [figure(load.floor_ms, NOT_MEASURED) for load in loads], right=True),
        Column.of("bandwidth", [_percent(load.bandwidth_share) for load in loads], right=True),
        Column.of("bottleneck", [load.limit or "unknown" for load in loads]),
    ]
    return Columns(Column.of("load", [short_load(load.load) for load in loads]), tuple(columns))


def _share(load: AtLoad, limit: Limit) -> Text:
    if not load.spent:
        return Text(NOT_MEASURED)
    share = sum(spent.share for spent in load.spent if spent.limit == limit)
    return Text(f"{share:.0%}", style="bold" if limit == load.limit else "dim")


def _percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{share:.0%}"


def _rows(one: Bottleneck) -> Iterator[tuple[str, str, str]]:
    for evidence in one.evidence:
        yield "Evidence", evidence.text, f"→ {evidence.limit}" if evidence.limit is not None else ""
    for change in one.changes:
        yield "Change", f"{change.text}: {change.flag}" if change.flag else change.text, change.kind
    for prediction in one.predictions:
        yield "Expected", _prediction(prediction), "estimate"
    for unknown in one.unknown:
        yield "Unknown", unknown, ""


def _prediction(one: Prediction) -> str:
    gain = one.gain
    if one.metric == "output_tok_s":
        return f"{one.change}: {METRICS[one.metric]} {signed(gain.value)} ({signed(gain.low)} … {signed(gain.high)})"
    times = f"{units.figure(gain.value, 2)} times shorter ({units.figure(gain.low, 2)} … {units.figure(gain.high, 2)})"
    return f"{one.change}: {METRICS[one.metric]} {times}"
