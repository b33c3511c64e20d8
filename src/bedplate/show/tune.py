"""The pages of `tune`: progress, result, Pareto front, and the launch command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from bedplate.progress import can_redraw
from bedplate.show.columns import Column, SplitTable
from bedplate.show.figures import NOT_MEASURED, format_figure_or_missing
from bedplate.show.page import make_fact_table
from bedplate.show.plots import PlotSeries, Point, draw_lines
from bedplate.tuning.search import TuningListener, describe_target
from bedplate.values.diagnosis import Bottleneck
from bedplate.values.quoting import join_shell, quote_shell
from bedplate.values.record import Figure
from bedplate.values.tuning import (
    ComparedSettings,
    Opponent,
    Proof,
    RefusedSetting,
    SettingChange,
    TrialMeasurement,
    TunableSetting,
    TuningRun,
    TuningStep,
    describe_changes,
)
from bedplate.values.units import format_seconds, format_size

ENGINE_DEFAULTS, PLAN = get_args(Opponent)
NAMES = {ENGINE_DEFAULTS: "engine defaults", PLAN: "bedplate's plan", "tuned": "tuned"}
MOST_ON_FRONT = 8


class TuneView(TuningListener):
    """Progress on stderr: a status line on a terminal, one line per measurement elsewhere."""

    def __init__(self, out: Console) -> None:
        self._console = out
        self._status: Status | None = None
        self._own: float | None = None

    def __enter__(self) -> TuneView:
        if can_redraw(self._console):
            self._status = self._console.status("", refresh_per_second=2)
            self._status.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._status is not None:
            self._status.stop()

    # progress of preparation and start

    def note(self, text: str) -> None:
        self._console.print(Text(f" {text}", style="dim"), soft_wrap=True)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        began = time.monotonic()
        self._update(label)
        yield lambda done: None
        if (took_s := time.monotonic() - began) >= 1:
            self._console.print(Text.assemble((" ✓ ", "green"), f"{label}: {format_seconds(took_s)}"))

    # progress of tuning

    def report_start(self, tuned: TuningRun, knobs: Sequence[TunableSetting]) -> None:
        load = tuned.load
        words = f" {tuned.engine} {tuned.engine_version} · {tuned.model} · {load.concurrency} in flight, "
        words += f"{load.prompt_tokens} + {load.output_tokens} tokens · for {tuned.objective}"
        if target := describe_target(tuned.target):
            words += f", {target}"
        allowed = [knob.name for knob in knobs if not tuned.knobs or knob.name in tuned.knobs]
        self._console.print(Text(f"{words} · {format_seconds(tuned.budget_s)}"), soft_wrap=True)
        self._console.print(Text(f" settings: {', '.join(allowed)}", style="dim"), soft_wrap=True)

    def report_activity(self, what: str, best: str, left_s: float) -> None:
        self._update(" · ".join(part for part in (what, best, f"{format_seconds(left_s)} left") if part))

    def report_measurement(self, turned: tuple[SettingChange, ...], taken: TrialMeasurement, tuned: TuningRun) -> None:
        last = next((one for one in tuned.trials if one.taken and one.taken[-1] is taken), None)
        name = "engine defaults" if last is not None and last.own_defaults else describe_changes(turned)
        if taken.cut:
            words = f"stopped after {format_seconds(taken.seconds)}: slower than the best"
        else:
            words = (
                f"{format_figure_or_missing(taken.output_tok_s, NOT_MEASURED)} tok/s · TTFT "
                f"{format_figure_or_missing(taken.ttft_ms, NOT_MEASURED)} ms"
            )
            words += f" · TPOT {format_figure_or_missing(taken.tpot_ms, NOT_MEASURED)} ms"
            if taken.peak_memory_bytes is not None:
                words += f" · {format_size(taken.peak_memory_bytes)}"
        left = format_seconds(max(0.0, tuned.budget_s - tuned.spent_s))
        self._console.print(
            Text.assemble(f" {tuned.measurements:3d}  ", (f"{name}: ", "bold"), words, (f"   {left} left", "dim")),
            soft_wrap=True,
        )

    def report_bottleneck(self, found: Bottleneck) -> None:
        self._console.print(Text(f" bottleneck: {found.text}", style="dim"), soft_wrap=True)

    def report_step(self, step: TuningStep) -> None:
        words = f" ✓ kept {step.turn.knob} {step.turn.value} (was {step.before}): {describe_gain(step.gain)}"
        self._console.print(Text(words, style="green"), soft_wrap=True)

    def report_round(self, name: str, turn: int, taken: TrialMeasurement, tuned: TuningRun) -> None:
        words = f" proof, round {turn + 1}  {name}: {format_figure_or_missing(taken.output_tok_s, NOT_MEASURED)} tok/s"
        words += f" · TTFT {format_figure_or_missing(taken.ttft_ms, NOT_MEASURED)} ms"
        self._console.print(Text(f"{words} · in {format_seconds(taken.seconds)}"), soft_wrap=True)

    def report_refusal(self, refused: RefusedSetting) -> None:
        where = describe_changes((refused.turn,))
        self._console.print(Text(f" ✗ {where}: {refused.why}", style="yellow"), soft_wrap=True)
        for line in refused.evidence:
            self._console.print(Text(f"     {line}", style="dim"), soft_wrap=True)

    def _update(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(text))


def make_view(out: Console) -> TuneView:
    return TuneView(out)


def describe_gain(gain: Figure) -> str:
    return f"× {gain.value:.2f} ({gain.low:.2f} … {gain.high:.2f})"


# the result


def render_tuned(tuned: TuningRun) -> RenderableType:
    parts: list[RenderableType] = [Text(""), Padding(_render_head(tuned), (0, 1)), Text("")]
    if tuned.sides:
        parts += [_render_sides(tuned.sides), Text("")]
    parts.append(make_fact_table(_list_rows(tuned)))
    if tuned.front:
        parts += [Text(""), _render_front(tuned)]
    return Group(*parts)


def _render_head(tuned: TuningRun) -> Text:
    best = tuned.find_side("tuned")
    where = f"{tuned.engine} {tuned.engine_version}"
    if not tuned.finished:
        return Text.assemble(("Not finished.", "bold yellow"), f"  {tuned.measurements} measurements are stored.")
    if tuned.is_inconclusive:
        return Text.assemble(
            ("Inconclusive.", "bold yellow"), f"  {_explain_inconclusive(tuned)} The plan is unchanged."
        )
    if best is None:
        words = f"  No setting made {where} significantly better."
        return Text.assemble(("The plan is unchanged.", "bold green"), words)
    if not tuned.is_proven:
        found = tuned.find_proof("plan")
        words = (
            f"  {describe_changes(best.turned)} looked better, but this is not proven: "
            f"{found.text if found else NOT_MEASURED}"
        )
        return Text.assemble(("The plan is unchanged.", "bold yellow"), words)
    defaults, plan = tuned.find_proof(ENGINE_DEFAULTS), tuned.find_proof("plan")
    words = f"  {where} with {describe_changes(best.turned)}"
    words += f": {_describe_proof(defaults, 'the engine defaults')}" if defaults is not None else ""
    words += f"; {_describe_proof(plan, 'the plan')}" if plan is not None else ""
    use = "`plan` and `serve` use it from now on."
    if tuned.exclusions:
        use = f"`plan` and `serve` do not use it: {'; '.join(one.text for one in tuned.exclusions)}."
    return Text.assemble(("Tuned.", "bold cyan"), f"{words}. {use}")


def _explain_inconclusive(tuned: TuningRun) -> str:
    if tuned.steps:
        better = describe_changes(tuple(step.turn for step in tuned.steps))
        return f"{better} looked better, but could not be compared with the plan."
    return "No alternative to the plan was measured; a larger --budget tries more settings."


def _describe_proof(proof: Proof, name: str) -> str:
    parts = []
    if proof.output_tok_s is not None:
        parts.append(f"{describe_gain(proof.output_tok_s)} the tokens per second of {name}")
    if proof.ttft_ms is not None:
        parts.append(f"{1 / proof.ttft_ms.value:.2f} of the time to first token")
    return " and ".join(parts) or proof.answer


def _render_sides(sides: Sequence[ComparedSettings]) -> RenderableType:
    return SplitTable(
        Column.from_cells("", [NAMES[one.name] for one in sides], comfortable=40),
        (
            Column.from_cells("weights", [one.weights.label for one in sides]),
            Column.from_cells("tok/s", [_format_spread(one.output_tok_s) for one in sides], right=True),
            Column.from_cells("TTFT ms", [_format_spread(one.ttft_ms) for one in sides], right=True),
            Column.from_cells("TPOT ms", [_format_spread(one.tpot_ms) for one in sides], right=True),
            Column.from_cells("peak GB", [_format_gigabytes(one.peak_memory_bytes) for one in sides], right=True),
            Column.from_cells("agreement", [_describe_agreement(one) for one in sides], right=True),
        ),
    )


def _format_spread(found: Figure | None) -> str:
    if found is None:
        return NOT_MEASURED
    wide = (found.high - found.low) / 2
    return (
        f"{format_figure_or_missing(found.value)} ± {format_figure_or_missing(wide)}"
        if wide > 0
        else format_figure_or_missing(found.value)
    )


def _format_gigabytes(taken: int | None) -> str:
    return NOT_MEASURED if taken is None else f"{taken / 1e9:.3g}"


def _describe_agreement(side: ComparedSettings) -> str:
    quality = side.quality
    if quality is None or quality.agreement is None:
        return NOT_MEASURED
    return f"{round(quality.agreement * quality.asked)}/{quality.asked}" + ("" if quality.verdict == "ok" else " !")


def _list_rows(tuned: TuningRun) -> Iterator[tuple[str, str, str]]:
    if tuned.diagnosis:
        yield "Bottleneck", tuned.diagnosis, f"planned: {tuned.limit or 'unknown'}"
    for step in tuned.steps:
        yield "Gain", f"{step.turn.knob} {step.turn.value} (was {step.before})  {describe_gain(step.gain)}", "measured"
    for refused in tuned.refused:
        yield "Refused", f"{describe_changes((refused.turn,))}: {refused.why}", refused.kind
    for note in tuned.notes:
        yield "Note", note, ""
    counts = f"{tuned.measurements} short measurements of {len(tuned.trials)} settings"
    yield "Budget", f"{format_seconds(tuned.spent_s)} of {format_seconds(tuned.budget_s)} used: {counts}", tuned.id
    best = tuned.find_side("tuned") if tuned.is_proven else tuned.find_side("plan")
    if best is not None:
        environment = " ".join(f"{name}={quote_shell(value)}" for name, value in best.variables)
        yield "Launch", f"{environment} {join_shell(_shorten(best.argv))}".strip(), ""
    if tuned.price_per_hour and best is not None and best.output_tok_s is not None:
        cost = tuned.price_per_hour / 3600 / best.output_tok_s.value * 1e6
        yield (
            "Cost",
            f"{format_figure_or_missing(cost)} per million tokens at {tuned.price_per_hour:g} per hour",
            "measured",
        )


def _shorten(argv: Sequence[str]) -> list[str]:
    """The command without the text of a chat template, which is longer than the rest."""
    return [word if len(word) < 300 else f"{word[:24]}…" for word in argv]


def _render_front(tuned: TuningRun) -> RenderableType:
    """The Pareto front: settings that no other setting beats in all metrics, with a bar for the throughput."""
    shown, most = tuned.front[:MOST_ON_FRONT], max(one.output_tok_s for one in tuned.front)
    table = Table(box=None, padding=(0, 1, 0, 1), header_style="dim")
    table.add_column("Pareto front: best trade-offs", overflow="fold")
    for name in ("tok/s", "TTFT ms", "peak GB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in shown:
        bar = "█" * max(1, round(24 * one.output_tok_s / most))
        table.add_row(
            Text(one.name), format_figure_or_missing(one.output_tok_s), format_figure_or_missing(one.ttft_ms),
            _format_gigabytes(one.peak_memory_bytes),
            Text(bar, style="cyan"),
        )  # fmt: skip
    return table


def draw_front(tuned: TuningRun) -> str:
    """Throughput over time to first token for all measurements; a line joins the Pareto front."""
    seen = [
        Point(
            one.ttft_ms,
            one.output_tok_s,
            title=describe_changes(trial.turned) if not trial.own_defaults else "engine defaults",
        )
        for trial in tuned.trials
        if (one := trial.best) is not None and one.ttft_ms and one.output_tok_s
    ]
    front = [Point(one.ttft_ms, one.output_tok_s, title=one.name) for one in tuned.front]
    series = [PlotSeries("front", tuple(sorted(front, key=lambda one: one.x)), 0)] if front else []
    series += [PlotSeries(one.title, (one,), 1 + number) for number, one in enumerate(seen[:2])]
    return draw_lines(f"{tuned.engine}: tokens per second and time to first token", series, "TTFT ms", "tok/s") + "\n"


# tunable settings


def render_settings(engine: str, knobs: Sequence[TunableSetting]) -> RenderableType:
    rows = sorted(knobs, key=lambda knob: -knob.prior)
    return Group(
        Text(""),
        SplitTable(
            Column.from_cells(f"{engine}: setting", [knob.name for knob in rows]),
            (
                Column.from_cells("planned", [knob.now for knob in rows]),
                Column.from_cells("engine default", [knob.own for knob in rows], comfortable=24),
                Column.from_cells(
                    "values", [" ".join(one.value for one in knob.choices) for knob in rows], comfortable=36
                ),
                Column.from_cells("may relieve", [", ".join(knob.limits) for knob in rows], comfortable=28),
                Column.from_cells("risk", [", ".join(knob.risk) or "none" for knob in rows]),
                Column.from_cells("meaning", [knob.meaning for knob in rows], comfortable=50),
            ),
        ),
        Text(""),
    )
