"""The page of `plan --alternatives`: the chosen plan, and every plan that was not chosen, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.values import Alternative, Decision, Estimate, Figure, Parallelism
from bedplate.values.units import format_figure

HEADS = ("engine", "weights", "layout", "TTFT ms", "TPOT ms", "tok/s")
FIRST_NUMBER = 3
LEGEND = "KV8 8-bit KV cache, TP tensor, PP pipeline, DP data, EP expert, AD attention data parallelism"


def render_alternatives(decision: Decision) -> RenderableType:
    rows = [_make_cells(one.engine, one.quantization, one) for one in decision.alternatives]
    whys = [_describe(one) for one in decision.alternatives]
    if decision.engine is not None:
        reason = decision.reasons[0]
        rows.insert(0, _make_cells(decision.engine, decision.quantization, decision))
        whys.insert(0, Text(f"chosen: {reason.text} ({reason.rule})", style="green"))
    if not rows:
        return Text(" No engine has a plan to compare: bedplate plan gives the reasons")
    widths = [max(len(cell) for cell in column) for column in zip(HEADS, *rows, strict=True)]
    lines: list[RenderableType] = [Text(""), Text(_format_line(HEADS, widths), style="dim")]
    for cells, why in zip(rows, whys, strict=True):
        lines += [Text(_format_line(cells, widths), style="bold"), Padding(why, (0, 0, 0, 3), expand=False)]
    return Group(*lines, Text(f"\n {LEGEND}", style="dim"))


def _describe(one: Alternative) -> Text:
    text = one.why_not if one.fits else f"not possible: {one.why_not}"
    return Text(f"{text} ({one.rule})" if one.rule is not None else text)


def _make_cells(engine: str, quantization: str | None, plan: Alternative | Decision) -> tuple[str, ...]:
    expected: Estimate = plan.estimate
    figures = (expected.ttft_ms, expected.tpot_ms, expected.output_tok_s)
    narrow = plan.settings is not None and plan.settings.kv_type != "16-bit"
    weights = f"{quantization or ''}{' KV8' if narrow else ''}"
    cards = ",".join(map(str, plan.settings.cards)) if plan.settings is not None else ""
    layout = f"{shorten_layout(plan.parallelism)}{f' on {cards}' if cards else ''}"
    return (engine, weights, layout, *map(_format_figure, figures))


def _format_figure(figure: Figure | None) -> str:
    return format_figure(figure.value) if figure is not None else "-"


def shorten_layout(layout: Parallelism) -> str:
    """`TP4 DP2`; `1` for one device."""
    sizes = (
        ("TP", layout.tensor), ("PP", layout.pipeline), ("DP", layout.data), ("EP", layout.expert),
        ("AD", layout.attention_data),
    )  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "1"


def _format_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if number >= FIRST_NUMBER else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return " " + "  ".join(padded)
