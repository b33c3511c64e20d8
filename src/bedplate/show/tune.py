"""The pages of `tune`: progress, result, Pareto front, and the launch command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from bedplate.show.columns import Column, Columns
from bedplate.show.figures import NOT_MEASURED, figure
from bedplate.show.page import page_of
from bedplate.show.plots import Point, Series, lines
from bedplate.tuning.search import Teller, target_words
from bedplate.values.diagnosis import Bottleneck
from bedplate.values.record import Figure
from bedplate.values.tuning import Knob, Opponent, Proof, Refused, Side, Step, Taken, Tuned, Turn, words_of
from bedplate.values.units import seconds, size

ENGINE_DEFAULTS, PLAN = get_args(Opponent)
NAMES = {ENGINE_DEFAULTS: "engine defaults", PLAN: "bedplate's plan", "tuned": "tuned"}
MOST_ON_FRONT = 8


class TuneTeller(Teller):
    """Progress on stderr: a status line on a terminal, one line per measurement elsewhere."""

    def __init__(self, out: Console) -> None:
        self._console = out
        self._status: Status | None = None
        self._own: float | None = None

    def __enter__(self) -> TuneTeller:
        if self._console.is_terminal:
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
            self._console.print(Text.assemble((" ✓ ", "green"), f"{label}: {seconds(took_s)}"))

    # progress of tuning

    def begun(self, tuned: Tuned, knobs: Sequence[Knob]) -> None:
        load = tuned.load
        words = f" {tuned.engine} {tuned.engine_version} · {tuned.model} · {load.concurrency} in flight, "
        words += f"{load.prompt_tokens} + {load.output_tokens} tokens · for {tuned.objective}"
        if target := target_words(tuned.target):
            words += f", {target}"
        allowed = [knob.name for knob in knobs if not tuned.knobs or knob.name in tuned.knobs]
        self._console.print(Text(f"{words} · {seconds(tuned.budget_s)}"), soft_wrap=True)
        self._console.print(Text(f" settings: {', '.join(allowed)}", style="dim"), soft_wrap=True)

    def doing(self, what: str, best: str, left_s: float) -> None:
        self._update(" · ".join(part for part in (what, best, f"{seconds(left_s)} left") if part))

    def taken(self, turned: tuple[Turn, ...], taken: Taken, tuned: Tuned) -> None:
        last = next((one for one in tuned.trials if one.taken and one.taken[-1] is taken), None)
        name = "engine defaults" if last is not None and last.own_defaults else words_of(turned)
        if taken.cut:
            words = f"stopped after {seconds(taken.seconds)}: slower than the best"
        else:
            words = f"{figure(taken.output_tok_s, NOT_MEASURED)} tok/s · TTFT {figure(taken.ttft_ms, NOT_MEASURED)} ms"
            words += f" · TPOT {figure(taken.tpot_ms, NOT_MEASURED)} ms"
            if taken.peak_memory_bytes is not None:
                words += f" · {size(taken.peak_memory_bytes)}"
        left = seconds(max(0.0, tuned.budget_s - tuned.spent_s))
        self._console.print(
            Text.assemble(f" {tuned.measurements:3d}  ", (f"{name}: ", "bold"), words, (f"   {left} left", "dim")),
            soft_wrap=True,
        )

    def diagnosed(self, found: Bottleneck) -> None:
        self._console.print(Text(f" bottleneck: {found.text}", style="dim"), soft_wrap=True)

    def kept(self, step: Step) -> None:
        words = f" ✓ kept {step.turn.knob} {step.turn.value} (was {step.before}): {gain_words(step.gain)}"
        self._console.print(Text(words, style="green"), soft_wrap=True)

    def worked(self, name: str, turn: int, taken: Taken, tuned: Tuned) -> None:
        words = f" proof, round {turn + 1}  {name}: {figure(taken.output_tok_s, NOT_MEASURED)} tok/s"
        words += f" · TTFT {figure(taken.ttft_ms, NOT_MEASURED)} ms"
        self._console.print(Text(f"{words} · in {seconds(taken.seconds)}"), soft_wrap=True)

    def refused(self, refused: Refused) -> None:
        where = words_of((refused.turn,))
        self._console.print(Text(f" ✗ {where}: {refused.why}", style="yellow"), soft_wrap=True)
        for line in refused.evidence:
            self._console.print(Text(f"     {line}", style="dim"), soft_wrap=True)

    def _update(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(text))


def teller_for(out: Console) -> TuneTeller:
    return TuneTeller(out)


def gain_words(gain: Figure) -> str:
    return f"× {gain.value:.2f} ({gain.low:.2f} … {gain.high:.2f})"


# the result


def render_tuned(tuned: Tuned) -> RenderableType:
    parts: list[RenderableType] = [Text(""), Padding(_head(tuned), (0, 1)), Text("")]
    if tuned.sides:
        parts += [_sides(tuned.sides), Text("")]
    parts.append(page_of(_rows(tuned)))
    if tuned.front:
        parts += [Text(""), _front(tuned)]
    return Group(*parts)


def _head(tuned: Tuned) -> Text:
    best = tuned.side("tuned")
    where = f"{tuned.engine} {tuned.engine_version}"
    if not tuned.finished:
        return Text.assemble(("Not finished.", "bold yellow"), f"  {tuned.measurements} measurements are stored.")
    if best is None:
        words = f"  No setting made {where} significantly better."
        return Text.assemble(("The plan is unchanged.", "bold green"), words)
    if not tuned.proven:
        found = tuned.proof("plan")
        words = (
            f"  {words_of(best.turned)} looked better, but this is not proven: {found.text if found else NOT_MEASURED}"
        )
        return Text.assemble(("The plan is unchanged.", "bold yellow"), words)
    defaults, plan = tuned.proof(ENGINE_DEFAULTS), tuned.proof("plan")
    words = f"  {where} with {words_of(best.turned)}"
    words += f": {_proof_words(defaults, 'the engine defaults')}" if defaults is not None else ""
    words += f"; {_proof_words(plan, 'the plan')}" if plan is not None else ""
    return Text.assemble(("Tuned.", "bold cyan"), f"{words}. `plan` and `serve` use it from now on.")


def _proof_words(proof: Proof, name: str) -> str:
    parts = []
    if proof.output_tok_s is not None:
        parts.append(f"{gain_words(proof.output_tok_s)} the tokens per second of {name}")
    if proof.ttft_ms is not None:
        parts.append(f"{1 / proof.ttft_ms.value:.2f} of the time to first token")
    return " and ".join(parts) or proof.answer


def _sides(sides: Sequence[Side]) -> RenderableType:
    return Columns(
        Column.of("", [NAMES[one.name] for one in sides], comfortable=40),
        (
            Column.of("weights", [one.weights.label for one in sides]),
            Column.of("tok/s", [_spread(one.output_tok_s) for one in sides], right=True),
            Column.of("TTFT ms", [_spread(one.ttft_ms) for one in sides], right=True),
            Column.of("TPOT ms", [_spread(one.tpot_ms) for one in sides], right=True),
            Column.of("peak GB", [_gigabytes(one.peak_memory_bytes) for one in sides], right=True),
            Column.of("agreement", [_agreement(one) for one in sides], right=True),
        ),
    )


def _spread(found: Figure | None) -> str:
    if found is None:
        return NOT_MEASURED
    wide = (found.high - found.low) / 2
    return f"{figure(found.value)} ± {figure(wide)}" if wide > 0 else figure(found.value)


def _gigabytes(taken: int | None) -> str:
    return NOT_MEASURED if taken is None else f"{taken / 1e9:.3g}"


def _agreement(side: Side) -> str:
    quality = side.quality
    if quality is None or quality.agreement is None:
        return NOT_MEASURED
    return f"{round(quality.agreement * quality.asked)}/{quality.asked}" + ("" if quality.verdict == "ok" else " !")


def _rows(tuned: Tuned) -> Iterator[tuple[str, str, str]]:
    if tuned.diagnosis:
        yield "Bottleneck", tuned.diagnosis, f"planned: {tuned.limit or 'unknown'}"
    for step in tuned.steps:
        yield "Gain", f"{step.turn.knob} {step.turn.value} (was {step.before})  {gain_words(step.gain)}", "measured"
    for refused in tuned.refused:
        yield "Refused", f"{words_of((refused.turn,))}: {refused.why}", refused.kind
    for note in tuned.notes:
        yield "Note", note, ""
    counts = f"{tuned.measurements} short measurements of {len(tuned.trials)} settings"
    yield "Budget", f"{seconds(tuned.spent_s)} of {seconds(tuned.budget_s)} used: {counts}", tuned.id
    best = tuned.side("tuned") if tuned.proven else tuned.side("plan")
    if best is not None:
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in best.variables)
        yield "Launch", f"{environment} {shlex.join(_shorten(best.argv))}".strip(), ""
    if tuned.price_per_hour and best is not None and best.output_tok_s is not None:
        cost = tuned.price_per_hour / 3600 / best.output_tok_s.value * 1e6
        yield "Cost", f"{figure(cost)} per million tokens at {tuned.price_per_hour:g} per hour", "measured"


def _shorten(argv: Sequence[str]) -> list[str]:
    """The command without the text of a chat template, which is longer than the rest."""
    return [word if len(word) < 300 else f"{word[:24]}…" for word in argv]


def _front(tuned: Tuned) -> RenderableType:
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
            Text(one.name), figure(one.output_tok_s), figure(one.ttft_ms), _gigabytes(one.peak_memory_bytes),
            Text(bar, style="cyan"),
        )  # fmt: skip
    return table


def front_svg(tuned: Tuned) -> str:
    """Throughput over time to first token for all measurements; a line joins the Pareto front."""
    seen = [
        Point(
            one.ttft_ms, one.output_tok_s, title=words_of(trial.turned) if not trial.own_defaults else "engine defaults"
        )
        for trial in tuned.trials
        if (one := trial.best) is not None and one.ttft_ms and one.output_tok_s
    ]
    front = [Point(one.ttft_ms, one.output_tok_s, title=one.name) for one in tuned.front]
    series = [Series("front", tuple(sorted(front, key=lambda one: one.x)), 0)] if front else []
    series += [Series(one.title, (one,), 1 + number) for number, one in enumerate(seen[:2])]
    return lines(f"{tuned.engine}: tokens per second and time to first token", series, "TTFT ms", "tok/s") + "\n"


# tunable settings


def render_knobs(engine: str, knobs: Sequence[Knob]) -> RenderableType:
    rows = sorted(knobs, key=lambda knob: -knob.prior)
    return Group(
        Text(""),
        Columns(
            Column.of(f"{engine}: setting", [knob.name for knob in rows]),
            (
                Column.of("planned", [knob.now for knob in rows]),
                Column.of("engine default", [knob.own for knob in rows], comfortable=24),
                Column.of("values", [" ".join(one.value for one in knob.choices) for knob in rows], comfortable=36),
                Column.of("may relieve", [", ".join(knob.limits) for knob in rows], comfortable=28),
                Column.of("risk", [", ".join(knob.risk) or "none" for knob in rows]),
                Column.of("meaning", [knob.meaning for knob in rows], comfortable=50),
            ),
        ),
        Text(""),
    )
