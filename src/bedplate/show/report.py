"""The report: measurements as one page that argues, in HTML that opens offline or in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bedplate._version import __version__
from bedplate.decide.estimate.physics import attention_ops, kv_read_bytes, linear_ops, shape_of, weights_read_bytes
from bedplate.judge.argument import Candidate, argument, bottleneck_of, candidates, on_target, summaries
from bedplate.measure.summary import spent, why_invalid
from bedplate.show import plots
from bedplate.show.figures import TBD, figure, slowest
from bedplate.values import LatencyTarget, Model
from bedplate.values.cost import Price
from bedplate.values.diagnosis import Diagnosis
from bedplate.values.run import Cell, Run
from bedplate.values.summary import Summary
from bedplate.values.verdict import Verdict

GB = 1e9


@dataclass(frozen=True)
class Column:
    name: str
    text: bool = False


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    first: bool
    """Of its engine."""
    chosen: bool


@dataclass(frozen=True)
class Plot:
    svg: str
    caption: str


@dataclass(frozen=True)
class Page:
    """Everything that is shown, in words and drawings; the templates add nothing but form."""

    title: str
    headline: str
    subtitle: str
    because: tuple[str, ...]
    verdict: Verdict | None
    change: str | None
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    flags: tuple[str, ...]
    plots: tuple[Plot, ...]
    not_measured: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    footer: str
    bedplate: str = __version__


COLUMNS = (
    Column("engine", text=True), Column("version", text=True), Column("weights", text=True), Column("in flight"),
    Column("TTFT ms"), Column("p99"), Column("TPOT ms"), Column("p99"), Column("tok/s"), Column("±"),
    Column("peak GB"), Column("quality"), Column("limit", text=True),
)  # fmt: skip
PAID = {"cost_per_million_tokens": Column("cost per M"), "kwh_per_million_tokens": Column("kWh per M")}
"""Of a million output tokens; each is shown where it is known of any row."""
LAST = 2
"""Columns behind those: quality, limit."""


def page_of(
    runs: Sequence[Run],
    models: Mapping[tuple[str, str | None], Model] | None = None,
    diagnosis: Diagnosis | None = None,
    verdict: Verdict | None = None,
    target: LatencyTarget | None = None,
) -> Page:
    """The page for these runs. `models` are facts of what was measured, by name and weights: bytes and operations."""
    cells = [cell for run in runs for cell in run.cells if cell.repeats]
    found = argument(runs, diagnosis, target)
    shown = candidates(cells)
    first = runs[0]
    names = sorted({cell.subject.model for cell in cells}) or ["no model yet"]
    bottleneck = bottleneck_of(found.choice, diagnosis) if found.choice is not None else None
    hardware = dict.fromkeys(run.environment.hardware for run in runs)
    paid = Paid({run.id: run.environment.price for run in runs}, cells)
    return Page(
        title=f"{', '.join(names)} on {first.environment.hardware}",
        headline=found.headline,
        subtitle=f"{', '.join(names)} · {' and '.join(hardware)} · {first.at[:10]}{_lengths(cells)}",
        because=found.because,
        verdict=verdict,
        change=bottleneck.changes[0].text if bottleneck is not None and bottleneck.changes else None,
        columns=(*COLUMNS[:-LAST], *(PAID[name] for name in paid.names), *COLUMNS[-LAST:]),
        rows=_rows(runs, shown, found.choice, diagnosis, paid),
        flags=_flags(shown),
        plots=_plots(runs, shown, found.choice, models or {}, target),
        not_measured=found.not_measured,
        environment=_environment(runs, shown),
        commands=tuple(shlex.join(run.environment.command) for run in runs if run.environment.command),
        footer=f"Made by bedplate {__version__}. Times are medians of single requests, taken by the client; "
        "tokens are those that the engine counted; ± is a 95 % interval; < is the slowest of fewer than 100 requests.",
    )


def html(page: Page) -> str:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("bedplate.show", "templates")
    return Environment(loader=loader, autoescape=True).get_template("report.html.jinja").render(page=page)


def markdown(page: Page) -> str:
    lines = [f"# {page.headline}", "", page.subtitle, "", *(f"- {line}" for line in page.because)]
    if page.verdict is not None:
        lines += ["", f"**{page.verdict.answer}**: {page.verdict.text}"]
    if page.change:
        lines += ["", f"What to change first: {page.change}"]
    lines += ["", "## Measured", ""]
    lines += [_md_row([column.name for column in page.columns])]
    lines += [_md_row(["---" if column.text else "---:" for column in page.columns])]
    lines += [_md_row(row.cells) for row in page.rows]
    lines += ["", *(f"- {flag}" for flag in page.flags)] if page.flags else []
    lines += ["", "## Not measured", "", *(f"- {line}" for line in page.not_measured or ("nothing is missing",))]
    lines += ["", "## To repeat it", "", *(f"- {name}: {value}" for name, value in page.environment)]
    if page.commands:
        lines += ["", "```sh", *page.commands, "```"]
    return "\n".join([*lines, "", page.footer, ""])


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# the table


def _rows(
    runs: Sequence[Run],
    shown: Sequence[Candidate],
    choice: Candidate | None,
    diagnosis: Diagnosis | None,
    paid: Paid,
) -> tuple[Row, ...]:
    rows: list[Row] = []
    for one in shown:
        bottleneck = bottleneck_of(one, diagnosis)
        limits = {at.cell: at.limit for at in (bottleneck.loads if bottleneck is not None else ())}
        chosen = choice is not None and one.name == choice.name
        ordered = sorted(summaries(one), key=lambda pair: (pair[0].load.concurrency or 0, pair[0].at))
        for number, (cell, summary) in enumerate(ordered):
            values = _cells(one, cell, summary, limits.get(cell.id), number == 0)
            values = (*values[:-LAST], *paid.words(cell, summary), *values[-LAST:])
            rows.append(Row(values, number == 0, chosen))
    measured = {one.engine for one in shown}
    for run in runs:
        for engine in run.matrix.engines if run.matrix is not None else ():
            if engine not in measured:
                measured.add(engine)
                others = len(COLUMNS) - 1 + len(paid.names)
                rows.append(Row((engine, *[TBD] * others), first=True, chosen=False))
    return tuple(rows)


class Paid:
    """What a million tokens cost in each cell, by the prices of the runs."""

    def __init__(self, prices: Mapping[str, Price | None], cells: Sequence[Cell]) -> None:
        self._prices = prices
        each = [spent(cell, prices.get(cell.run)) for cell in cells]
        self.names = tuple(name for name in PAID if any(getattr(one, name) is not None for one in each))

    def words(self, cell: Cell, summary: Summary) -> tuple[str, ...]:
        each = spent(cell, self._prices.get(cell.run), summary)
        return tuple(figure(getattr(each, name)) for name in self.names)


def _cells(one: Candidate, cell: Cell, summary: Summary, limit: str | None, first: bool) -> tuple[str, ...]:
    load, quality = cell.load, cell.quality
    offered = f"{load.requests_per_s:g}/s" if load.requests_per_s else load.arrivals
    ttft, tpot, spread = summary.ttft_ms, summary.tpot_ms, summary.interval
    peak = summary.peak_gpu_bytes or summary.peak_memory_bytes
    rate = summary.output_tok_s
    return (
        one.engine if first else "",
        (cell.subject.engine_version or "") if first else "",
        (one.quantization or "") if first else "",
        str(load.concurrency) if load.concurrency is not None else offered,
        figure(ttft.p50 if ttft else None),
        slowest(ttft),
        figure(tpot.p50 if tpot else None),
        slowest(tpot),
        figure(rate),
        f"{(spread.high - spread.low) / 2 / rate:.1%}" if spread is not None and rate else TBD,
        f"{peak / GB:.2f}" if peak else TBD,
        f"{quality.agreement:.3f}" if quality is not None and quality.agreement is not None else TBD,
        limit or TBD,
    )


def _flags(shown: Sequence[Candidate]) -> tuple[str, ...]:
    """What makes a row less than it looks, said once for all loads that it is true of."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in shown:
        for cell in one.cells:
            at = str(cell.load.concurrency or cell.load.requests_per_s or cell.load.arrivals)
            for text in dict.fromkeys((*why_invalid(cell), *(flag.text for flag in cell.flags))):
                found.setdefault((one.name, text), []).append(at)
    return tuple(f"{name} at {', '.join(at)}: {text}" for (name, text), at in found.items())


# the plots


def _plots(
    runs: Sequence[Run],
    shown: Sequence[Candidate],
    choice: Candidate | None,
    models: Mapping[tuple[str, str | None], Model],
    target: LatencyTarget | None,
) -> tuple[Plot, ...]:
    if not shown:
        return ()
    drawn = [_tradeoff(shown, target), *_distributions(shown)]
    drawn += [_roofline(runs, shown, models), _memory(shown, models)]
    return tuple(plot for plot in drawn if plot is not None)


def _tradeoff(shown: Sequence[Candidate], target: LatencyTarget | None) -> Plot | None:
    """Throughput against latency; the ring is the knee: the load after which more of it brings little but waiting."""
    series = []
    for number, one in enumerate(shown):
        points = []
        for cell, summary in sorted(summaries(one), key=lambda pair: pair[0].load.concurrency or 0):
            if summary.output_tok_s is None or summary.e2e_ms is None:
                continue
            late = target is not None and on_target(cell, target) < 1
            title = f"{one.name}, {cell.load.concurrency} in flight: {summary.output_tok_s:,.0f} tok/s"
            label = str(cell.load.concurrency or "")
            points.append(plots.Point(summary.e2e_ms.p50 / 1000, summary.output_tok_s, label, title, hollow=late))
        if points:
            series.append(plots.Series(one.name, _ringed(points), number))
    if not series:
        return None
    svg = plots.lines("Throughput against latency", series, "seconds for a request, median", "output tokens a second")
    return Plot(svg, "Each point is a load, with the requests in flight beside it; the dashed ring marks the knee.")


def _ringed(points: Sequence[plots.Point]) -> tuple[plots.Point, ...]:
    at = knee([(point.x, point.y) for point in points])
    return tuple(
        plots.Point(one.x, one.y, one.label, one.title, one.hollow, ring=number == at)
        for number, one in enumerate(points)
    )


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Where throughput for each second of waiting is best; `None` with too few points to have one."""
    if len(points) < 3:
        return None
    power = [rate / seconds if seconds > 0 else 0.0 for seconds, rate in points]
    return power.index(max(power))


def _distributions(shown: Sequence[Candidate]) -> list[Plot | None]:
    """At the heaviest load that each has: a median says nothing of those who waited longest."""
    ttft: list[tuple[str, int, Sequence[float]]] = []
    tpot: list[tuple[str, int, Sequence[float]]] = []
    for number, one in enumerate(shown):
        cell = max(one.cells, key=lambda each: each.load.concurrency or 0)
        good = [sample for repeat in cell.repeats for sample in repeat.samples if sample.outcome == "ok"]
        name = f"{one.name}, {cell.load.concurrency}" if cell.load.concurrency else one.name
        ttft.append((name, number, [sample.ttft_ms for sample in good if sample.ttft_ms is not None]))
        tpot.append((name, number, [found for sample in good if (found := sample.tpot_ms) is not None]))
    return [
        Plot(plots.shares(title, values, unit), caption) if any(found for _, _, found in values) else None
        for title, values, unit, caption in (
            ("Time to the first token", ttft, "ms", "Time to the first token at the heaviest load of each engine."),
            ("Time for each further token", tpot, "ms", "Time for each further token at the same loads."),
        )
    ]


def _roofline(
    runs: Sequence[Run], shown: Sequence[Candidate], models: Mapping[tuple[str, str | None], Model]
) -> Plot | None:
    series = []
    for number, one in enumerate(shown):
        points = []
        for cell, summary in summaries(one):
            model = models.get((cell.subject.model, cell.subject.quantization))
            if model is None or summary.tpot_ms is None or cell.load.concurrency is None:
                continue
            per_byte, rate = _intensity(cell, summary.tpot_ms.p50, model)
            title = f"{one.name}, {cell.load.concurrency} in flight: {plots.number(rate)}op/s"
            points.append(plots.Point(per_byte, rate, title=title))
        if points:
            series.append(plots.Series(one.name, tuple(points), number))
    if not series:
        return None
    environment = runs[0].environment
    svg = plots.roofline("Roofline", series, environment.bandwidth_bytes_s, environment.operations_s, "measured here")
    if environment.bandwidth_bytes_s is None:
        return Plot(
            svg, "Operations over bytes; no roof, since this machine was not measured: bedplate probe --measure."
        )
    return Plot(svg, "Making tokens: under the slope it is memory that limits, under the flat part arithmetic.")


def _intensity(cell: Cell, step_ms: float, model: Model) -> tuple[float, float]:
    """Operations for each byte, and operations a second, of a step that makes one token of each request."""
    shape = shape_of(model)
    slots = cell.subject.settings.slots if cell.subject.settings is not None else None
    batch = float(min(cell.load.concurrency or 1, slots or cell.load.concurrency or 1))
    context = cell.load.prompt_tokens + cell.load.output_tokens / 2
    moved = weights_read_bytes(shape, batch) + batch * kv_read_bytes(shape, context)
    operations = linear_ops(shape, batch) + batch * attention_ops(shape, 1, context)
    return operations / moved, operations / (step_ms / 1000)


def _memory(shown: Sequence[Candidate], models: Mapping[tuple[str, str | None], Model]) -> Plot | None:
    bars = []
    for one in shown:
        cell, summary = max(summaries(one), key=lambda pair: pair[0].load.concurrency or 0)
        peak = summary.peak_gpu_bytes or summary.peak_memory_bytes
        if not peak:
            continue
        model = models.get((cell.subject.model, cell.subject.quantization))
        bars.append(plots.Bar(one.name, _parts(cell, peak, model)))
    if not bars:
        return None
    caption = "Peak memory while it served; the cache is what these requests need, whatever the engine has set aside."
    return Plot(plots.stacked("Memory", bars, "GB"), caption)


def _parts(cell: Cell, peak: int, model: Model | None) -> tuple[tuple[str, float], ...]:
    if model is None:
        return (("all of it", peak / GB),)
    weights = min(model.weight_bytes, peak)
    tokens = (cell.load.concurrency or 1) * (cell.load.prompt_tokens + cell.load.output_tokens)
    cache = min(tokens * model.kv_bytes_per_token, peak - weights)
    return (("weights", weights / GB), ("KV cache", cache / GB), ("overhead", (peak - weights - cache) / GB))


# how to repeat it


def _environment(runs: Sequence[Run], shown: Sequence[Candidate]) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for run in runs:
        environment = run.environment
        found.append(("Machine", f"{environment.hardware} (fingerprint {environment.machine})"))
        found.append(("System", f"{environment.system}, Python {environment.python}, bedplate {environment.bedplate}"))
        found.append(("Run", f"{run.id}, {run.at}"))
    for one in shown:
        argv = one.cells[-1].subject.argv
        if argv:
            found.append((one.name, shlex.join(argv)))
    clients = [
        r.client for one in shown for cell in one.cells for r in cell.repeats if r.client.error_p50_ms is not None
    ]
    if clients:
        worst = max(clients, key=lambda one: one.error_p99_ms or 0.0)
        error = f"{max(one.error_p50_ms or 0.0 for one in clients):.2f} ms at the median"
        found.append(("Client's own error", f"{error}, {worst.error_p99_ms or 0.0:.2f} ms at the 99th percentile"))
    return tuple(dict.fromkeys(found))


def _lengths(cells: Sequence[Cell]) -> str:
    lengths = {(cell.load.prompt_tokens, cell.load.output_tokens) for cell in cells}
    if len(lengths) != 1:
        return ""
    ((prompt, output),) = lengths
    return f" · {prompt} tokens in, {output} out"
