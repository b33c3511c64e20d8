"""The page of `compare`: the verdict and its reason first, then the figures of both sides."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bedplate.judge.answers import describe_interval, describe_values
from bedplate.judge.words import (
    describe_change,
    describe_difference,
    describe_load,
    describe_load_briefly,
    format_signed_percent,
)
from bedplate.show.columns import Column, SplitTable
from bedplate.show.figures import NOT_MEASURED, format_figure_or_missing
from bedplate.show.page import make_fact_table
from bedplate.show.structured import describe_structured
from bedplate.values.agreement import name_reference
from bedplate.values.run import Load, Quality
from bedplate.values.units import format_memory, format_seconds, format_size
from bedplate.values.verdict import ComparedEngine, Effect, Metric, Verdict, name_sides

HEADS = {
    "stay": ("Stay", "bold green"),
    "migrate": ("Migrate", "bold cyan"),
    "not proven": ("Not proven", "bold yellow"),
}
CHOSEN_HEADS: dict[Metric, str] = {"ttft_p95_ms": "TTFT p95 ms", "tpot_p95_ms": "TPOT p95 ms"}
"""Columns of metrics that a comparison has only if they were asked for."""


def render_verdict(verdict: Verdict) -> RenderableType:
    word, style = HEADS[verdict.answer]
    a, b = name_sides(verdict.a, verdict.b)
    to = {"stay": f" with {a}", "migrate": f" to {b}"}.get(verdict.answer, "")
    head = Text.assemble((f"{word}{to}.", style), f"  {verdict.text}")
    if verdict.answer == "not proven":
        head.append(f" Stay with {a}.")
    lines: list[RenderableType] = [Text(""), Padding(head, (0, 1))]
    if verdict.worse is not None:
        over = f"Worse than the baseline (tolerance {verdict.tolerance * 100:g} %):"
        lines.append(Padding(Text.assemble((over, "bold red"), f" {verdict.worse}"), (0, 1)))
    if verdict.would_prove and verdict.answer != "migrate":
        label = "Evidence that would settle it" if verdict.answer == "not proven" else "What would change that"
        lines.append(Padding(Text(f"{label}: {verdict.would_prove}."), (0, 1)))
    return Group(*lines, Text(""), _render_loads(verdict), Text(""), _make_page(verdict))


def _render_loads(verdict: Verdict) -> RenderableType:
    """One line per load: the figures of both sides, and how much better B is than A."""
    loads = list(dict.fromkeys(one.load for one in verdict.effects))
    by_load = {(one.load, one.metric): one for one in verdict.effects}
    speed = any(one.metric == "output_tok_s" for one in verdict.effects)
    main: Metric = "output_tok_s" if speed else "e2e_ms"
    columns = [
        *_make_metric_columns(by_load, loads, main, "tok/s" if speed else "request ms"),
        Column.from_cells("better by", [_format_gain(by_load.get((load, main))) for load in loads], right=True),
        *_make_metric_columns(by_load, loads, "ttft_ms", "TTFT ms"),
        *_make_metric_columns(by_load, loads, "tpot_ms", "TPOT ms"),
        *(
            column
            for metric, words in CHOSEN_HEADS.items()
            for column in _make_metric_columns(by_load, loads, metric, words)
        ),
        *_make_cost_columns(verdict, loads),
        Column.from_cells("repeats", [_format_repeats(by_load, load) for load in loads], right=True),
    ]
    lengths = {(load.prompt_tokens, load.output_tokens) for load in loads}
    words = describe_load_briefly if len(lengths) == 1 else describe_load
    return SplitTable(Column.from_cells("load", [words(load) for load in loads], comfortable=40), tuple(columns))


def _make_metric_columns(
    by_load: dict[tuple[Load, Metric], Effect], loads: list[Load], metric: Metric, words: str
) -> Iterator[Column]:
    """A's and B's figures; B's are coloured where the difference is significant."""
    found = [by_load.get((load, metric)) for load in loads]
    if any(found):
        yield Column.from_cells(
            f"{words} A", [format_figure_or_missing(one.a if one else None, NOT_MEASURED) for one in found], right=True
        )
        yield Column.from_cells(
            "B",
            [Text(format_figure_or_missing(one.b), style=_choose_style(one)) if one else NOT_MEASURED for one in found],
            right=True,
        )


def _make_cost_columns(verdict: Verdict, loads: list[Load]) -> Iterator[Column]:
    """Per million output tokens, if a price is specified or energy was measured."""
    by_load = {one.load: one for one in verdict.spent}
    for words, name in (("cost per M", "cost_per_million_tokens"), ("kWh per M", "kwh_per_million_tokens")):
        sides = {
            side: [getattr(getattr(by_load.get(load), side, None), name, None) for load in loads] for side in ("a", "b")
        }
        if any(value is not None for values in sides.values() for value in values):
            yield Column.from_cells(
                f"{words} A", [format_figure_or_missing(value, NOT_MEASURED) for value in sides["a"]], right=True
            )
            yield Column.from_cells(
                "B", [format_figure_or_missing(value, NOT_MEASURED) for value in sides["b"]], right=True
            )


def _format_repeats(by_load: dict[tuple[Load, Metric], Effect], load: Load) -> str:
    found = by_load.get((load, "output_tok_s")) or by_load.get((load, "e2e_ms"))
    if found is None:
        return NOT_MEASURED
    each = (
        f"{found.repeats[0]}" if found.repeats[0] == found.repeats[1] else f"{found.repeats[0]} and {found.repeats[1]}"
    )
    return f"{each} interleaved" if found.paired else each


def _format_gain(one: Effect | None) -> Text:
    if one is None:
        return Text(NOT_MEASURED)
    text = (
        f"{format_signed_percent(one.gain.value)} ({format_signed_percent(one.gain.low)} … "
        f"{format_signed_percent(one.gain.high)})"
    )
    return Text(text, style=_choose_style(one))


def _choose_style(one: Effect) -> str:
    return "green" if one.gain.low > 1 else "red" if one.gain.high < 1 else ""


def _make_page(verdict: Verdict) -> Table:
    return make_fact_table(_list_rows(verdict))


def _list_rows(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    lengths = dict.fromkeys(f"{one.load.prompt_tokens} + {one.load.output_tokens} tokens" for one in verdict.effects)
    yield "Workload", f"{verdict.model} · {', '.join(lengths)}", ""
    yield "A", _format_name(verdict.a), "in service"
    yield "B", _format_name(verdict.b), "challenger"
    for one in verdict.on_target:
        text = f"{describe_load(one.load)}: {one.a.value:.0%} and {one.b.value:.0%} of requests meet the target"
        yield "Target", text, "measured"
    for effect in verdict.effects:
        if effect.metric in ("peak_memory_bytes", "agreement", "schema_match"):
            yield "Compared", describe_change(effect), "measured"
    for side in (verdict.a, verdict.b):
        text = f"{_format_name(side)}: {describe_quality(side.quality)}"
        yield "Quality", text, "measured" if _is_checked(side) else ""
    for answers in verdict.answers:
        text = f"{describe_values(answers)}: {answers.outcome}, {describe_interval(answers)}"
        yield "Answers", text, "measured"
    for side in (verdict.a, verdict.b):
        if side.quality is not None and (found := side.quality.structured) is not None:
            yield "Structured", f"{_format_name(side)}: {describe_structured(found)}", "measured"
    for side in (verdict.a, verdict.b):
        yield "Costs", f"{_format_name(side)}: {_describe_costs(side)}", ""
    if verdict.a.engine != verdict.b.engine:
        yield "", f"{verdict.b.engine} has releases, options and metrics of its own to operate", ""
    for difference in verdict.differences:
        yield "Differs", describe_difference(difference), ""
    for left_out in verdict.left_out:
        yield "Left out", left_out, ""


def _format_name(side: ComparedEngine) -> str:
    parts = (side.engine, side.engine_version, side.quantization)
    return " ".join(part for part in parts if part)


def _is_checked(side: ComparedEngine) -> bool:
    return side.quality is not None and side.quality.verdict != "unchecked"


def describe_quality(quality: Quality | None) -> str:
    if quality is None or quality.verdict == "unchecked":
        return "not checked"
    parts = ["answers agree with the reference" if quality.verdict == "ok" else "answers are wrong"]
    if quality.agreement is not None:
        agreed = f"{round(quality.agreement * quality.asked)}/{quality.asked}"
        parts.append(f"greedy-token agreement with {name_reference(quality.reference)}: {agreed}")
    if quality.perplexity is not None:
        reference = quality.reference_perplexity
        parts.append(f"perplexity {quality.perplexity:.2f}" + (f" (reference {reference:.2f})" if reference else ""))
    if quality.divergence is not None:
        error = "" if quality.divergence_error is None else f" ± {1.96 * quality.divergence_error:.4f}"
        parts.append(f"divergence {quality.divergence:.4f}{error} nats")
    if quality.note:
        parts.append(quality.note)
    return " · ".join(parts)


def _describe_costs(side: ComparedEngine) -> str:
    cost = side.cost
    parts = [
        None if cost.install_bytes is None else f"{format_size(cost.install_bytes)} installed",
        None if cost.start_s is None else f"starts in {format_seconds(cost.start_s)}",
        None if cost.peak_memory_bytes is None else f"peak {format_memory(cost.peak_memory_bytes)}",
        None if cost.peak_gpu_bytes is None else f"peak {format_memory(cost.peak_gpu_bytes)} on the GPU",
        None if cost.effort is None else f"operating effort {cost.effort} of 5",
        *cost.steps,
    ]
    return " · ".join(part for part in parts if part) or NOT_MEASURED
