"""The page of `report`: measurements, verdict and charts, as self-contained HTML or as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bedplate._version import __version__
from bedplate.decide.estimate.physics import (
    count_attention_ops,
    count_kv_bytes,
    count_linear_ops,
    count_weight_bytes,
    get_shape,
)
from bedplate.judge.argument import (
    MeasuredEngine,
    compute_met_share,
    find_bottleneck,
    group_by_engine,
    is_named,
    recommend_engine,
    summarize_cells,
)
from bedplate.judge.words import describe_load_briefly
from bedplate.measure.exchange import to_csv
from bedplate.measure.summary import compute_spent, make_rows
from bedplate.show import plots
from bedplate.show.figures import TBD, format_figure_or_missing, format_slowest
from bedplate.show.structured import HEADINGS, describe_structured, list_structured
from bedplate.show.structured import list_rows as list_structured_rows
from bedplate.values import LatencyTarget, Model
from bedplate.values.cost import Price
from bedplate.values.diagnosis import Diagnosis
from bedplate.values.evidence import ABOUT_OTHERS, find_exclusions
from bedplate.values.quoting import escape_markdown, join_shell
from bedplate.values.run import Cell, Load, Run, Sample
from bedplate.values.summary import Summary
from bedplate.values.verdict import Verdict

GB = 1e9


@dataclass(frozen=True)
class ReportColumn:
    name: str
    text: bool = False


@dataclass(frozen=True)
class ReportRow:
    cells: tuple[str, ...]
    first: bool
    """Whether it is the first row of its engine."""
    chosen: bool


@dataclass(frozen=True)
class Plot:
    title: str
    drawings: tuple[str, ...]
    """The same chart as SVG in two widths."""
    caption: str
    legend: tuple[plots.LegendEntry, ...] = ()


@dataclass(frozen=True)
class KeyFigure:
    name: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class LongText:
    name: str
    text: str


@dataclass(frozen=True)
class ReportPage:
    """All text and charts of the report; the template adds only layout."""

    title: str
    headline: str
    subtitle: str
    warnings: tuple[str, ...]
    """Reasons to doubt measurements. They are shown above the recommendation."""
    because: tuple[str, ...]
    tiles: tuple[KeyFigure, ...]
    """Of the recommended engine."""
    tiles_of: str
    """Engine and load of the tiles."""
    verdict: Verdict | None
    change: str | None
    columns: tuple[ReportColumn, ...]
    rows: tuple[ReportRow, ...]
    flags: tuple[str, ...]
    structured: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    """For each engine with a result for structured output: a line, and its rows."""
    plots: tuple[Plot, ...]
    not_measured: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    launches: tuple[LongText, ...]
    """The command of each engine."""
    commands: tuple[str, ...]
    csv: str
    """One row per cell, as `bedplate bench --csv` prints them."""
    footer: str
    structured_headings: tuple[str, ...] = HEADINGS
    bedplate: str = __version__


COLUMNS = (
    ReportColumn("engine", text=True), ReportColumn("version", text=True), ReportColumn("weights", text=True),
    ReportColumn("in flight"), ReportColumn("requests"), ReportColumn("errors"),
    ReportColumn("TTFT ms"), ReportColumn("p99"), ReportColumn("TPOT ms"), ReportColumn("p99"),
    ReportColumn("tok/s"), ReportColumn("±"),
    ReportColumn("peak GB"), ReportColumn("quality"), ReportColumn("bottleneck", text=True),
)  # fmt: skip
PAID = {"cost_per_million_tokens": ReportColumn("cost per M"), "kwh_per_million_tokens": ReportColumn("kWh per M")}
"""Per million output tokens; a column is shown if any row has a value."""
SIZES = (plots.WIDE, plots.NARROW)
LAST = 2
"""Number of columns after those: quality, bottleneck."""


def make_report(
    runs: Sequence[Run],
    models: Mapping[tuple[str, str | None], Model] | None = None,
    diagnosis: Diagnosis | None = None,
    verdict: Verdict | None = None,
    target: LatencyTarget | None = None,
) -> ReportPage:
    """The page for these runs. `models` holds the facts of the measured models, by name and quantization."""
    cells = [cell for run in runs for cell in run.cells if cell.repeats]
    found = recommend_engine(runs, diagnosis, target)
    shown = group_by_engine(cells)
    first = runs[0]
    names = sorted({cell.subject.model for cell in cells}) or ["no model measured"]
    bottleneck = find_bottleneck(found.choice, diagnosis) if found.choice is not None else None
    hardware = dict.fromkeys(run.environment.hardware for run in runs)
    tiles_of, tiles = _make_tiles(found.choice, runs)
    paid = CostColumns({run.id: run.environment.price for run in runs}, cells)
    return ReportPage(
        title=f"{', '.join(names)} on {first.environment.hardware}",
        headline=found.headline,
        subtitle=f"{', '.join(names)} · {' and '.join(hardware)} · {first.at[:10]}{_describe_lengths(cells)}",
        warnings=_list_texts(shown, lambda cell: (one.text for one in find_exclusions(cell))),
        because=found.because,
        tiles=tiles,
        tiles_of=tiles_of,
        verdict=verdict,
        change=bottleneck.changes[0].text if bottleneck is not None and bottleneck.changes else None,
        columns=(*COLUMNS[:-LAST], *(PAID[name] for name in paid.names), *COLUMNS[-LAST:]),
        rows=_make_rows(runs, shown, found.choice, diagnosis, paid),
        flags=_list_texts(shown, lambda cell: (one.text for one in cell.flags if one.kind in ABOUT_OTHERS)),
        structured=tuple(
            (f"{name}: {describe_structured(one)}", tuple(list_structured_rows(one)))
            for name, one in list_structured(cells)
        ),
        plots=_draw_plots(runs, shown, found.choice, models or {}, target),
        not_measured=found.not_measured,
        environment=_list_environment(runs, shown),
        launches=tuple(
            LongText(one.name, join_shell(one.cells[-1].subject.argv)) for one in shown if one.cells[-1].subject.argv
        ),
        csv=to_csv(tuple(row for run in runs for row in make_rows(run))),
        commands=tuple(join_shell(run.environment.command) for run in runs if run.environment.command),
        footer=f"Generated by bedplate {__version__}. Times are medians over requests, measured by the client; tokens "
        "are counted by the engine; ± is a 95 % confidence interval; < marks the maximum of fewer than 100 requests.",
    )


def to_html(page: ReportPage) -> str:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("bedplate.show", "templates")
    return Environment(loader=loader, autoescape=True).get_template("report.html.jinja").render(page=page)


def to_markdown(page: ReportPage) -> str:
    safe = escape_markdown
    lines = [f"> **Warning:** {safe(warning)}  " for warning in page.warnings]
    lines += [""] if lines else []
    lines += [f"# {safe(page.headline)}", "", safe(page.subtitle), "", *(f"- {safe(line)}" for line in page.because)]
    if page.verdict is not None:
        lines += ["", f"**{safe(page.verdict.answer)}**: {safe(page.verdict.text)}"]
    if page.change:
        lines += ["", f"First change to try: {safe(page.change)}"]
    lines += ["", "## Measured", ""]
    lines += [_format_markdown_row([column.name for column in page.columns])]
    lines += [_format_markdown_row(["---" if column.text else "---:" for column in page.columns])]
    lines += [_format_markdown_row(row.cells) for row in page.rows]
    lines += ["", *(f"- {safe(flag)}" for flag in page.flags)] if page.flags else []
    lines += ["", "## Structured output"] if page.structured else []
    for line, rows in page.structured:
        lines += ["", safe(line), "", _format_markdown_row(page.structured_headings)]
        lines += [_format_markdown_row(["---"] * len(page.structured_headings)), *map(_format_markdown_row, rows)]
    lines += [
        "",
        "## Not measured",
        "",
        *(f"- {safe(line)}" for line in page.not_measured or ("nothing: the matrix is complete",)),
    ]
    lines += ["", "## Reproduce", "", *(f"- {safe(name)}: {safe(value)}" for name, value in page.environment)]
    lines += [f"- {safe(one.name)}: {safe(one.text)}" for one in page.launches]
    if page.commands:
        lines += ["", "```sh", *page.commands, "```"]
    return "\n".join([*lines, "", safe(page.footer), ""])


def _format_markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


# key figures


def _make_tiles(choice: MeasuredEngine | None, runs: Sequence[Run]) -> tuple[str, tuple[KeyFigure, ...]]:
    """The recommended engine at its highest load, in a few figures."""
    if choice is None:
        return "", ()
    cell, summary = max(summarize_cells(choice), key=lambda pair: (pair[0].load.concurrency or 0, pair[0].at))
    prices = {run.id: run.environment.price for run in runs}
    spent = compute_spent(cell, prices.get(cell.run), summary)
    tiles = []
    if summary.output_tok_s is not None:
        spread = summary.interval
        note = f"95 %: {spread.low:,.0f} to {spread.high:,.0f}" if spread is not None else ""
        tiles.append(KeyFigure("Output", f"{summary.output_tok_s:,.0f}", "tok/s", note))
    for name, found in (("Time to first token", summary.ttft_ms), ("Time per output token", summary.tpot_ms)):
        if found is not None:
            tiles.append(KeyFigure(name, format_figure_or_missing(found.p50), "ms", f"p99 {format_slowest(found)} ms"))
    if summary.tpot_ms is not None and summary.tpot_ms.p50:
        tiles.append(KeyFigure("Speed for one user", format_figure_or_missing(1000 / summary.tpot_ms.p50), "tok/s"))
    if peak := summary.peak_gpu_bytes or summary.peak_memory_bytes:
        tiles.append(KeyFigure("Peak memory", f"{peak / GB:.2f}", "GB", "GPU" if summary.peak_gpu_bytes else "RAM"))
    if spent.cost_per_million_tokens is not None:
        tiles.append(KeyFigure("Cost per million tokens", format_figure_or_missing(spent.cost_per_million_tokens)))
    if spent.kwh_per_million_tokens is not None:
        kwh = format_figure_or_missing(spent.kwh_per_million_tokens)
        tiles.append(KeyFigure("Energy per million tokens", kwh, "kWh"))
    errors = summary.requests - summary.ok
    tiles.append(KeyFigure("Requests", f"{summary.requests:,}", "", f"{errors:,} failed"))
    return f"{choice.name}, {describe_load_briefly(cell.load)}", tuple(tiles)


# the table


def _make_rows(
    runs: Sequence[Run],
    shown: Sequence[MeasuredEngine],
    choice: MeasuredEngine | None,
    diagnosis: Diagnosis | None,
    paid: CostColumns,
) -> tuple[ReportRow, ...]:
    rows: list[ReportRow] = []
    for one in shown:
        bottleneck = find_bottleneck(one, diagnosis)
        limits = {at.cell: at.limit for at in (bottleneck.loads if bottleneck is not None else ())}
        chosen = choice is not None and one.name == choice.name
        ordered = sorted(summarize_cells(one), key=lambda pair: (pair[0].load.concurrency or 0, pair[0].at))
        for number, (cell, summary) in enumerate(ordered):
            values = _make_cells(one, cell, summary, limits.get(cell.id), number == 0)
            values = (*values[:-LAST], *paid.format_costs(cell, summary), *values[-LAST:])
            rows.append(ReportRow(values, number == 0, chosen))
    listed: set[str] = set()
    for run in runs:
        for engine in run.matrix.engines if run.matrix is not None else ():
            if engine not in listed and not any(is_named(cell, engine) for one in shown for cell in one.cells):
                listed.add(engine)
                others = len(COLUMNS) - 1 + len(paid.names)
                rows.append(ReportRow((engine, *[TBD] * others), first=True, chosen=False))
    return tuple(rows)


class CostColumns:
    """What a million tokens cost in each cell, by the prices of the runs."""

    def __init__(self, prices: Mapping[str, Price | None], cells: Sequence[Cell]) -> None:
        self._prices = prices
        each = [compute_spent(cell, prices.get(cell.run)) for cell in cells]
        self.names = tuple(name for name in PAID if any(getattr(one, name) is not None for one in each))

    def format_costs(self, cell: Cell, summary: Summary) -> tuple[str, ...]:
        each = compute_spent(cell, self._prices.get(cell.run), summary)
        return tuple(format_figure_or_missing(getattr(each, name)) for name in self.names)


def _make_cells(one: MeasuredEngine, cell: Cell, summary: Summary, limit: str | None, first: bool) -> tuple[str, ...]:
    load, quality = cell.load, cell.quality
    offered = f"{load.requests_per_s:g}/s" if load.requests_per_s else describe_load_briefly(load)
    ttft, tpot, spread = summary.ttft_ms, summary.tpot_ms, summary.interval
    peak = summary.peak_gpu_bytes or summary.peak_memory_bytes
    rate = summary.output_tok_s
    return (
        one.engine if first else "",
        (cell.subject.engine_version or "") if first else "",
        (one.quantization or "") if first else "",
        str(load.concurrency) if load.concurrency is not None else offered,
        f"{summary.requests:,}",
        f"{summary.requests - summary.ok:,}",
        format_figure_or_missing(ttft.p50 if ttft else None),
        format_slowest(ttft),
        format_figure_or_missing(tpot.p50 if tpot else None),
        format_slowest(tpot),
        format_figure_or_missing(rate),
        f"{(spread.high - spread.low) / 2 / rate:.1%}" if spread is not None and rate else TBD,
        f"{peak / GB:.2f}" if peak else TBD,
        f"{quality.agreement:.3f}" if quality is not None and quality.agreement is not None else TBD,
        limit or TBD,
    )


def _list_texts(shown: Sequence[MeasuredEngine], list_texts: Callable[[Cell], Iterable[str]]) -> tuple[str, ...]:
    """The texts about all cells, each once per engine with all its loads."""
    found: dict[tuple[str, str], list[Load]] = {}
    for one in shown:
        for cell in one.cells:
            for text in dict.fromkeys(list_texts(cell)):
                found.setdefault((one.name, text), []).append(cell.load)
    return tuple(f"{name} with {_list_loads(loads)}: {text}" for (name, text), loads in found.items())


def _list_loads(loads: Sequence[Load]) -> str:
    """Such as "1, 4 in flight"."""
    closed = ", ".join(str(load.concurrency) for load in loads if load.arrivals == "closed")
    others = [describe_load_briefly(load) for load in loads if load.arrivals != "closed"]
    return ", ".join([*([f"{closed} in flight"] if closed else []), *others])


# the charts


def _draw_plots(
    runs: Sequence[Run],
    shown: Sequence[MeasuredEngine],
    choice: MeasuredEngine | None,
    models: Mapping[tuple[str, str | None], Model],
    target: LatencyTarget | None,
) -> tuple[Plot, ...]:
    if not shown:
        return ()
    drawn = [_draw_tradeoff(shown, target), _draw_users(shown), *_draw_distributions(shown)]
    drawn += [_draw_roofline(runs, shown, models), _draw_memory(shown, models)]
    return tuple(plot for plot in drawn if plot is not None)


def _draw_tradeoff(shown: Sequence[MeasuredEngine], target: LatencyTarget | None) -> Plot | None:
    """Throughput over latency; the ring marks the knee, after which more load mostly adds waiting time."""
    series = []
    for number, one in enumerate(shown):
        points = []
        for cell, summary in sorted(summarize_cells(one), key=lambda pair: pair[0].load.concurrency or 0):
            if summary.output_tok_s is None or summary.e2e_ms is None:
                continue
            late = target is not None and compute_met_share(cell, target) < 1
            title = _describe_point(
                one, cell, f"{summary.output_tok_s:,.0f} tok/s", f"{summary.e2e_ms.p50 / 1000:.3g} s"
            )
            label = str(cell.load.concurrency or "")
            points.append(plots.Point(summary.e2e_ms.p50 / 1000, summary.output_tok_s, label, title, hollow=late))
        if points:
            series.append(plots.PlotSeries(one.name, _mark_knee(points), number))
    if not series:
        return None
    title = "Throughput over latency"
    caption = "Each point is a load, labelled with its requests in flight. The dashed ring marks the knee."
    if target is not None:
        caption += " Loads that miss the target are hollow."
    drawings = tuple(
        plots.draw_lines(title, series, "median request latency, s", "output tokens per second", size) for size in SIZES
    )
    return Plot(title, drawings, caption, plots.make_legend(series))


def _draw_users(shown: Sequence[MeasuredEngine]) -> Plot | None:
    """What one user gets against what the hardware delivers."""
    series, on_gpu = [], False
    for number, one in enumerate(shown):
        points = []
        for cell, summary in sorted(summarize_cells(one), key=lambda pair: pair[0].load.concurrency or 0):
            if summary.output_tok_s is None or summary.tpot_ms is None or not summary.tpot_ms.p50:
                continue
            devices = _count_gpus(cell)
            on_gpu = on_gpu or devices is not None
            user, machine = 1000 / summary.tpot_ms.p50, summary.output_tok_s / (devices or 1)
            per = "per GPU" if devices is not None else "in all"
            title = _describe_point(one, cell, f"{user:,.3g} tok/s per user", f"{machine:,.0f} tok/s {per}")
            points.append(plots.Point(user, machine, str(cell.load.concurrency or ""), title))
        if points:
            series.append(plots.PlotSeries(one.name, tuple(points), number))
    if not series:
        return None
    per = "per GPU" if on_gpu else "of the machine"
    title = f"Speed for one user against throughput {per}"
    drawings = tuple(
        plots.draw_lines(title, series, "tokens per second and user", f"tokens per second {per}", size)
        for size in SIZES
    )
    caption = "The speed of one user is 1 / TPOT at the median. More requests in flight lead up and to the left."
    return Plot(title, drawings, caption, plots.make_legend(series))


def _count_gpus(cell: Cell) -> int | None:
    """`None`: it ran on the CPU, or the device is unknown."""
    if cell.subject.device in (None, "cpu"):
        return None
    layout = cell.subject.parallelism
    return layout.tensor * layout.pipeline * layout.data


def _describe_point(one: MeasuredEngine, cell: Cell, *figures: str) -> str:
    return f"{one.name}, {describe_load_briefly(cell.load)}: {', '.join(figures)}"


def _mark_knee(points: Sequence[plots.Point]) -> tuple[plots.Point, ...]:
    at = find_knee([(point.x, point.y) for point in points])
    return tuple(
        plots.Point(one.x, one.y, one.label, one.title, one.hollow, ring=number == at)
        for number, one in enumerate(points)
    )


def find_knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the point with the highest throughput per second of latency; `None` for fewer than three points."""
    if len(points) < 3:
        return None
    power = [rate / seconds if seconds > 0 else 0.0 for seconds, rate in points]
    return power.index(max(power))


def _draw_distributions(shown: Sequence[MeasuredEngine]) -> list[Plot | None]:
    """TTFT and TPOT at the highest load of each engine; a median does not show the slowest requests."""
    ttft: list[tuple[str, int, Sequence[float]]] = []
    tpot: list[tuple[str, int, Sequence[float]]] = []
    for number, one in enumerate(shown):
        answered = [(cell, good) for cell in one.cells if (good := _list_good_samples(cell))]
        if not answered:
            continue
        cell, good = max(answered, key=lambda pair: pair[0].load.concurrency or 0)
        name = f"{one.name}, {cell.load.concurrency}" if cell.load.concurrency else one.name
        ttft.append((name, number, [sample.ttft_ms for sample in good if sample.ttft_ms is not None]))
        tpot.append((name, number, [found for sample in good if (found := sample.tpot_ms) is not None]))
    return [
        Plot(
            title,
            tuple(plots.draw_distributions(title, values, f"{title.lower()}, ms", size) for size in SIZES),
            "At the highest load that each engine answered. Markers: median and 95th percentile.",
            plots.make_legend([plots.PlotSeries(name, (), number) for name, number, found in values if found]),
        )
        if any(found for _, _, found in values)
        else None
        for title, values in (("Time to first token", ttft), ("Time per output token", tpot))
    ]


def _list_good_samples(cell: Cell) -> list[Sample]:
    return [sample for repeat in cell.repeats for sample in repeat.samples if sample.outcome == "ok"]


def _draw_roofline(
    runs: Sequence[Run], shown: Sequence[MeasuredEngine], models: Mapping[tuple[str, str | None], Model]
) -> Plot | None:
    series = []
    for number, one in enumerate(shown):
        points = []
        for cell, summary in summarize_cells(one):
            model = models.get((cell.subject.model, cell.subject.quantization))
            if model is None or summary.tpot_ms is None or cell.load.concurrency is None:
                continue
            per_byte, rate = _compute_intensity(cell, summary.tpot_ms.p50, model)
            title = _describe_point(
                one, cell, f"{plots.format_number(rate)}op/s", f"{per_byte:.3g} operations per byte"
            )
            points.append(plots.Point(per_byte, rate, str(cell.load.concurrency), title))
        if points:
            series.append(plots.PlotSeries(one.name, tuple(points), number))
    if not series:
        return None
    environment = runs[0].environment
    title = "Roofline of decoding"
    drawings = tuple(
        plots.draw_roofline(title, series, environment.bandwidth_bytes_s, environment.operations_s, size)
        for size in SIZES
    )
    if environment.bandwidth_bytes_s is None:
        caption = "No roof, because this machine is not measured: bedplate probe --measure."
    else:
        caption = (
            "The roofs were measured on this machine. Under the slope the bottleneck is memory bandwidth, under the "
        )
        caption += "flat part it is compute."
    return Plot(title, drawings, f"Each point is a load. {caption}", plots.make_legend(series))


def _compute_intensity(cell: Cell, step_ms: float, model: Model) -> tuple[float, float]:
    """Operations per byte and operations per second of a decode step, which makes one token for each request."""
    shape = get_shape(model)
    slots = cell.subject.settings.slots if cell.subject.settings is not None else None
    batch = float(min(cell.load.concurrency or 1, slots or cell.load.concurrency or 1))
    context = cell.load.prompt_tokens + cell.load.output_tokens / 2
    moved = count_weight_bytes(shape, batch) + batch * count_kv_bytes(shape, context)
    operations = count_linear_ops(shape, batch) + batch * count_attention_ops(shape, 1, context)
    return operations / moved, operations / (step_ms / 1000)


def _draw_memory(shown: Sequence[MeasuredEngine], models: Mapping[tuple[str, str | None], Model]) -> Plot | None:
    bars = []
    for one in shown:
        cell, summary = max(summarize_cells(one), key=lambda pair: pair[0].load.concurrency or 0)
        peak = summary.peak_gpu_bytes or summary.peak_memory_bytes
        if not peak:
            continue
        model = models.get((cell.subject.model, cell.subject.quantization))
        bars.append(plots.Bar(one.name, _split_memory(cell, peak, model)))
    if not bars:
        return None
    caption = "KV cache is what these requests need, not what the engine has reserved."
    drawings = tuple(plots.draw_stacked_bars("Peak memory", bars, "GB", size) for size in SIZES)
    return Plot("Peak memory while serving", drawings, caption, plots.make_bar_legend(bars))


def _split_memory(cell: Cell, peak: int, model: Model | None) -> tuple[tuple[str, float], ...]:
    if model is None:
        return (("total", peak / GB),)
    weights = min(model.weight_bytes, peak)
    tokens = (cell.load.concurrency or 1) * (cell.load.prompt_tokens + cell.load.output_tokens)
    cache = min(tokens * model.kv_bytes_per_token, peak - weights)
    return (("weights", weights / GB), ("KV cache", cache / GB), ("overhead", (peak - weights - cache) / GB))


# how to reproduce it


def _list_environment(runs: Sequence[Run], shown: Sequence[MeasuredEngine]) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for run in runs:
        environment = run.environment
        found.append(("Machine", f"{environment.hardware} (fingerprint {environment.machine})"))
        found.append(("System", f"{environment.system}, Python {environment.python}, bedplate {environment.bedplate}"))
        found.append(("Run", f"{run.id}, {run.at}"))
    clients = [
        r.client for one in shown for cell in one.cells for r in cell.repeats if r.client.error_p50_ms is not None
    ]
    if clients:
        worst = max(clients, key=lambda one: one.error_p99_ms or 0.0)
        error = f"{max(one.error_p50_ms or 0.0 for one in clients):.2f} ms at the median"
        found.append(("Client error", f"{error}, {worst.error_p99_ms or 0.0:.2f} ms at the 99th percentile"))
    return tuple(dict.fromkeys(found))


def _describe_lengths(cells: Sequence[Cell]) -> str:
    lengths = {(cell.load.prompt_tokens, cell.load.output_tokens) for cell in cells}
    if len(lengths) != 1:
        return ""
    ((prompt, output),) = lengths
    return f" · {prompt} tokens in, {output} out"
