"""The table of `bench`: updated in place on a terminal, one line per finished cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from bedplate.measure.bench import BenchListener
from bedplate.measure.knee import MET, Knee, compute_met_share, find_knee
from bedplate.measure.session_summary import summarize_sessions
from bedplate.measure.summary import compute_spent, is_valid, summarize_cell
from bedplate.progress import can_redraw
from bedplate.show.columns import Column, SplitTable
from bedplate.show.figures import TBD, format_figure_or_missing, format_slowest
from bedplate.show.structured import write_lines as write_structured_lines
from bedplate.values import Refusal, replace_fields
from bedplate.values.cost import Price
from bedplate.values.run import Cell, Flag, Load, Quality, Run, Subject
from bedplate.values.summary import SessionSummary, Summary
from bedplate.values.units import format_seconds as time_words
from bedplate.values.workload import LatencyTarget

HEADS = ("engine", "version", "weights", "load", "TTFT ms", "p99", "TPOT ms", "p99", "tok/s", "±", "peak GB", "quality",
         "bottleneck")  # fmt: skip
WIDTHS = (12, 14, 9, 9, 8, 8, 8, 8, 8, 6, 8, 8, 10)
FIRST_FIGURE = 3
PAID_HEADS, PAID_WIDTHS = ("cost per M", "kWh per M"), (10, 9)
"""Per million output tokens; shown if a price is specified."""
LAST = 2
"""Number of columns after those: quality, bottleneck."""
SLOW_S = 1.0
Judge = Callable[[Run], dict[str, str]]
MOMENTS = {
    "preparing": "preparing",
    "warm-up": "warming up",
    "begin": "measuring",
    "end": "waiting for the last responses",
}


def describe_load(load: Load) -> str:
    """The load as a table cell: requests in flight, request rate, or trace."""
    if load.arrivals == "closed":
        return str(load.concurrency)
    if load.arrivals == "sessions":
        return f"{load.sessions} sess."
    if load.arrivals == "replay":
        return "trace"
    return f"{load.requests_per_s:g}/s"


def write_title(run: Run, idle: float | None, models: Iterable[str] = ()) -> str:
    """Model, prompt and output lengths, machine, and its idle share."""
    matrix = run.matrix
    loads = matrix.loads if matrix is not None else tuple(cell.load for cell in run.cells)
    parts = [", ".join(dict.fromkeys((*models, *(cell.subject.model for cell in run.cells))))]
    if loads:
        first = loads[0]
        shared = f", {first.shared_prefix_tokens} shared" if first.shared_prefix_tokens else ""
        named = "" if first.scenario is None else f"scenario {first.scenario.name}, mean "
        parts.append(f"{named}{first.prompt_tokens} in, {first.output_tokens} out{shared}")
        if run.cells and all(repeat.exact_output for cell in run.cells for repeat in cell.repeats):
            parts[-1] += ", exact"
    if matrix is not None and matrix.through_gateway:
        parts.append("through the gateway")
    parts.append(run.environment.hardware)
    if idle is not None:
        parts.append(f"idle {idle:.0%}")
    return " · ".join(part for part in parts if part)


def describe_client(run: Run) -> str | None:
    errors = [repeat.client.error_p99_ms for cell in run.cells for repeat in cell.repeats if repeat.client.error_p99_ms]
    return f"client error ≤ {max(errors):.1f} ms" if errors else None


def list_headings(price: Price | None) -> tuple[str, ...]:
    return HEADS if price is None else (*HEADS[:-LAST], *PAID_HEADS, *HEADS[-LAST:])


def _list_widths(price: Price | None) -> tuple[int, ...]:
    return WIDTHS if price is None else (*WIDTHS[:-LAST], *PAID_WIDTHS, *WIDTHS[-LAST:])


def _format_cost(cell: Cell, found: Summary, price: Price | None) -> tuple[str, ...]:
    if price is None:
        return ()
    each = compute_spent(cell, price, found)
    return format_figure_or_missing(each.cost_per_million_tokens), format_figure_or_missing(each.kwh_per_million_tokens)


def make_row(cell: Cell, limit: str = "", price: Price | None = None) -> tuple[str, ...]:
    """One cell of the benchmark matrix as a table row."""
    found, subject = summarize_cell(cell), cell.subject
    peak = found.peak_gpu_bytes if found.peak_gpu_bytes is not None else found.peak_memory_bytes
    return (
        subject.engine,
        subject.engine_version or "",
        subject.quantization or "",
        describe_load(cell.load),
        format_figure_or_missing(found.ttft_ms.p50 if found.ttft_ms else None),
        format_slowest(found.ttft_ms),
        format_figure_or_missing(found.tpot_ms.p50 if found.tpot_ms else None),
        format_slowest(found.tpot_ms),
        format_figure_or_missing(found.output_tok_s),
        _format_spread(found),
        TBD if peak is None else format_figure_or_missing(peak / 1e9),
        *_format_cost(cell, found, price),
        _format_quality(cell.quality),
        limit if is_valid(cell) else "invalid",
    )


def _format_spread(found: Summary) -> str:
    if found.interval is None or not found.output_tok_s:
        return ""
    return f"{(found.interval.high - found.interval.low) / 2 / found.output_tok_s:.0%}"


def _format_quality(quality: Quality | None) -> str:
    if quality is None or quality.verdict == "unchecked":
        return TBD
    words = "" if quality.agreement is None else f"{quality.agreement:.2f}"
    return f"{words} !" if quality.verdict == "broken" else words


def write_footnotes(run: Run) -> Iterator[Text]:
    """Flags, engines left out, and capacity under the latency target; each text once."""
    seen: dict[tuple[str, str, bool], list[tuple[Cell, Flag]]] = {}
    for cell in run.cells:
        for flag in cell.flags:
            seen.setdefault((cell.subject.engine, flag.kind, flag.invalid), []).append((cell, flag))
    for (engine, _, invalid), found in seen.items():
        where = ", ".join(dict.fromkeys(describe_load(cell.load) for cell, _ in found))
        texts = dict.fromkeys(flag.text for _, flag in found)
        words = f" {'✗' if invalid else '!'} {engine}, load {where}: {next(iter(texts))}"
        yield Text(words + (" (and similar)" if len(texts) > 1 else ""), style="red" if invalid else "yellow")
    for refusal in run.left_out:
        yield Text(f" – {refusal.engine}: {refusal.why}", style="dim")
    for words in write_session_lines(run):
        yield Text(f" {words}")
    for words in write_capacity_lines(run):
        yield Text(f" {words}", style="bold")
    for words in write_structured_lines(run.cells):
        yield Text(f" {words}")
    if any(format_slowest(summarize_cell(cell).ttft_ms).startswith("<") for cell in run.cells if cell.repeats):
        yield Text(" <  the maximum; fewer than 100 requests are too few for a 99th percentile", style="dim")


def write_session_lines(run: Run) -> Iterator[str]:
    """For each cell with sessions: TTFT by turn, session durations, and the tokens found in a prefix cache."""
    for cell in run.cells:
        found = summarize_sessions(cell)
        if found is None:
            continue
        head = f"{cell.subject.engine}, {describe_load(cell.load)}:"
        turns = ", ".join(f"{one.turns} {format_figure_or_missing(one.ttft_ms)}" for one in found.ttft_by_turn)
        yield f"{head} TTFT p50 in ms by turn: {turns}"
        yield f"{head} {describe_sessions(found)}"
        if cached := describe_cached(found):
            yield f"{head} {cached}"


def describe_sessions(found: SessionSummary) -> str:
    ends = ((found.context, "ended at the context limit"), (found.failed, "failed"), (found.unfinished, "unfinished"))
    counts = [f"{found.complete} sessions complete", *(f"{count} {words}" for count, words in ends if count)]
    if found.duration_s is None:
        return f"{', '.join(counts)}; no session was measured from its first turn to its last: pass a larger --seconds"
    answering = "" if found.answering_s is None else f", of which {time_words(found.answering_s)} answering"
    return f"{', '.join(counts)}; median duration {time_words(found.duration_s)}{answering}"


def describe_cached(found: SessionSummary) -> str | None:
    """The cache hits that the engine reports: with each answer, and in its metrics."""
    parts = []
    if found.cached_share is not None:
        parts.append(f"{found.cached_share:.0%} by the answers' own counts")
    if found.metrics_share is not None:
        parts.append(f"{found.metrics_share:.0%} by the engine's metrics")
    repeated = f"{found.repeated_share:.0%} repeat earlier requests" if found.repeated_share is not None else ""
    if not parts:
        return f"the engine reports no cached prompt tokens; {repeated}" if repeated else None
    return f"cached prompt tokens: {', '.join(parts)}" + (f"; {repeated}" if repeated else "")


def write_capacity_lines(run: Run) -> Iterator[str]:
    target = run.matrix.target if run.matrix is not None else None
    if target is None:
        return
    for engine in dict.fromkeys(cell.subject.engine for cell in run.cells):
        mine = [cell for cell in run.cells if cell.subject.engine == engine]
        yield f"{engine}: {_describe_capacity(find_knee(mine, target), target)}"


def _describe_capacity(found: Knee, target: LatencyTarget) -> str:
    asked = " and ".join(
        f"{name} ≤ {value:g} ms"
        for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms))
        if value is not None
    )
    if found.holds is None:
        even = f" even with {_describe_heavier_load(found.breaks.load)}" if found.breaks is not None else ""
        return f"{asked} is not met{even}"
    rate = summarize_cell(found.holds).requests_s
    share = compute_met_share(found.holds, target) or 0.0
    words = f"up to {_describe_heavier_load(found.holds.load)} meet {asked} ({share:.0%} of requests; {MET:.0%} needed)"
    words += f": {format_figure_or_missing(rate)} requests/s" if rate is not None else ""
    return words + (
        f"; {_describe_heavier_load(found.breaks.load)} do not"
        if found.breaks is not None
        else "; higher loads were not tried"
    )


def _describe_heavier_load(load: Load) -> str:
    if load.arrivals == "closed":
        return f"{load.concurrency} in flight"
    if load.sessions is not None:
        return f"{load.sessions} sessions"
    return f"{format_figure_or_missing(load.requests_per_s)} {'requests' if load.scenario is None else 'sessions'}/s"


def render_run(run: Run, idle: float | None = None, limits: dict[str, str] | None = None) -> RenderableType:
    """The whole run: title, table, footnotes."""
    price = run.environment.price
    rows = [make_row(cell, (limits or {}).get(cell.id, ""), price) for cell in run.cells]
    return Group(_render_head(run, idle), Text(""), _make_table(rows, price), *write_footnotes(run), _render_tail(run))


def _render_head(run: Run, idle: float | None, models: Iterable[str] = ()) -> Text:
    words = describe_client(run)
    return Text(f" {write_title(run, idle, models)}{f' · {words}' if words else ''}", style="bold")


def _render_tail(run: Run) -> Text:
    return Text(f"\n run {run.id}   bedplate bench --resume {run.id} · --csv · --json", style="dim")


def _make_table(rows: Sequence[Sequence[str]], price: Price | None = None) -> SplitTable:
    """One table, or several with the engine and the load in each if the terminal is narrow."""
    headings = list_headings(price)
    lines: list[tuple[str, ...]] = []
    last: tuple[str, ...] = ()
    for row in rows:
        same = last[:3] == tuple(row[:3])
        lines.append(("", "", "", *row[3:]) if same else tuple(row))
        last = tuple(row)
    columns = [
        Column.from_cells(
            name,
            [Text(line[number], style="dim" if line[number] == TBD else "") for line in lines],
            right=_is_right_aligned(number, headings),
            belongs=name in ("p99", "±"),
        )
        for number, name in enumerate(headings)
    ]
    return SplitTable(columns[0], tuple(columns[1:]), repeated=("load",))


class BenchView(BenchListener):
    """Progress of a run; the base of both views."""

    def __init__(self, console: Console, judge: Judge, notes: Console | None = None) -> None:
        self.console = console
        self._notes = notes or console
        self._judge = judge
        self.run: Run | None = None
        self.idle: float | None = None
        self.subjects: list[Subject] = []
        self.cells: dict[str, Cell] = {}

    def __enter__(self) -> BenchView:
        return self

    def __exit__(self, *failure: object) -> None: ...

    def report_start(self, run: Run, subjects: Sequence[Subject], idle: float) -> None:
        self.run, self.subjects, self.idle = run, list(subjects), idle
        self.cells = {cell.id: cell for cell in run.cells}

    def report_end(self, run: Run) -> None: ...

    @property
    def price(self) -> Price | None:
        return self.run.environment.price if self.run is not None else None

    def find_bottlenecks(self, cells: Sequence[Cell]) -> dict[str, str]:
        whole = [cell for cell in cells if cell.repeats]
        return self._judge(replace_fields(self.run, cells=tuple(whole))) if self.run is not None and whole else {}

    def note(self, text: str) -> None:
        """Print apart from the rows: stdout carries only the table."""
        self._notes.print(Text(f" {text}", style="dim"), soft_wrap=True)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        yield lambda done: None
        took_s = time.monotonic() - began
        if took_s >= SLOW_S:
            self.note(f"{label}: {time_words(took_s)}")


class LineView(BenchView):
    """Prints one line per cell when it is finished."""

    def report_start(self, run: Run, subjects: Sequence[Subject], idle: float) -> None:
        super().report_start(run, subjects, idle)
        self.console.print(Text(f" {write_title(run, idle, [one.model for one in subjects])}"), soft_wrap=True)
        self.console.print(Text(_format_line(list_headings(self.price), self.price), style="dim"), soft_wrap=True)

    def report_cell(self, cell: Cell) -> None:
        self.cells[cell.id] = cell
        if cell.halt is None:  # its next interleaved round follows
            return
        mine = [one for one in self.cells.values() if one.subject.engine == cell.subject.engine]
        row = make_row(cell, self.find_bottlenecks(mine).get(cell.id, ""), self.price)
        self.console.print(Text(_format_line(row, self.price)), soft_wrap=True)

    def report_refusal(self, refusal: Refusal) -> None:
        self.console.print(Text(f" – {refusal.engine}: {refusal.why}"), soft_wrap=True)

    def report_end(self, run: Run) -> None:
        for words in write_footnotes(run):
            self.console.print(words, soft_wrap=True)
        self.console.print(_render_tail(run), soft_wrap=True)


def _format_line(row: Sequence[str], price: Price | None = None) -> str:
    return " " + " ".join(
        value.rjust(width) if _is_right_aligned(number, row) else value.ljust(width)
        for number, (value, width) in enumerate(zip(row, _list_widths(price), strict=True))
    )


def _is_right_aligned(number: int, columns: Sequence[str]) -> bool:
    """Figures are right-aligned; engine, version, weights and bottleneck are not."""
    return FIRST_FIGURE <= number < len(columns) - 1


class TableView(BenchView):
    """The whole table, updated in place. It is redrawn only on an event, since drawing takes CPU time from the run."""

    def __init__(self, console: Console, judge: Judge) -> None:
        super().__init__(console, judge)
        self._now: dict[str, str] = {}
        self._status = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> TableView:
        self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._live.stop()

    def report_start(self, run: Run, subjects: Sequence[Subject], idle: float) -> None:
        super().report_start(run, subjects, idle)
        self._draw()

    def report_phase(self, cell: Cell, moment: str) -> None:
        self._status = ""
        self._now = {
            cell.id: f"{MOMENTS.get(moment, moment)}, repeat {len(cell.repeats) + 1}{_describe_spread_so_far(cell)}"
        }
        self.cells[cell.id] = cell
        self._draw()

    def report_cell(self, cell: Cell) -> None:
        self._now = {}
        self.cells[cell.id] = cell
        self._draw()

    def note(self, text: str) -> None:
        self._live.console.print(Text(f" {text}", style="dim"), soft_wrap=True)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        last = [0.0]

        def update(done: int) -> None:
            if time.monotonic() - last[0] >= SLOW_S:
                last[0] = time.monotonic()
                self._status = f"{label}{f': {min(1.0, done / total):.0%}' if total else ''}"
                self._draw()

        self._status = label
        self._draw()
        yield update
        self._status = ""
        self._draw()

    def report_end(self, run: Run) -> None:
        self._live.stop()
        self.console.print(render_run(run, self.idle, self.find_bottlenecks(run.cells)))

    def _draw(self) -> None:
        parts: list[RenderableType] = []
        if self.run is not None:
            shown = Run(
                id=self.run.id, at=self.run.at, environment=self.run.environment, matrix=self.run.matrix,
                cells=tuple(self.cells.values()),
            )  # fmt: skip
            models = [subject.model for subject in self.subjects]
            parts += [
                _render_head(shown, self.idle, models),
                Text(""),
                _make_table(list(self._make_rows()), self.price),
            ]
        if self._status:
            parts.append(Text(f" {self._status} …", style="dim"))
        self._live.update(Group(*parts), refresh=True)

    def _make_rows(self) -> Iterator[tuple[str, ...]]:
        """All cells of the matrix, measured or not."""
        loads = self.run.matrix.loads if self.run is not None and self.run.matrix is not None else ()
        blank = [""] * (len(list_headings(self.price)) - FIRST_FIGURE - 2)
        for subject in self.subjects:
            mine = [cell for cell in self.cells.values() if cell.subject.engine == subject.engine]
            known = [cell.load for cell in mine]
            for load in (*loads, *(load for load in known if load not in loads)):
                cell = next((cell for cell in mine if cell.load == load), None)
                if cell is not None and cell.id in self._now:
                    yield (*_list_names(subject), describe_load(load), TBD, *blank[1:], self._now[cell.id])
                elif cell is not None and cell.repeats:
                    yield make_row(cell, price=self.price)
                else:
                    yield (*_list_names(subject), describe_load(load), TBD, *blank)


def _list_names(subject: Subject) -> tuple[str, str, str]:
    return subject.engine, subject.engine_version or "", subject.quantization or ""


def _describe_spread_so_far(cell: Cell) -> str:
    if not cell.repeats:
        return ""
    words = _format_spread(summarize_cell(cell))
    return f", ± {words}" if words else ""


def choose_view(console: Console, judge: Judge = lambda run: {}, notes: Console | None = None) -> BenchView:
    """`judge` finds the bottleneck of each cell, by cell id; `notes` is the console for notes. Default: `console`."""
    return TableView(console, judge) if can_redraw(console) else LineView(console, judge, notes)
