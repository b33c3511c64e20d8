"""A Decision as people read it: what, why, what to expect, what was refused, and the launch."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.show.probe import one_line
from bedplate.values import Decision, Figure, Hardware, MemoryNeed, Model, Settings, Workload
from bedplate.values.units import memory, size


def page() -> Table:
    """Label, what it says, and on whose word."""
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", max_width=96)
    table.add_column(style="dim", overflow="fold", max_width=48)
    return table


def render_serving(
    hardware: Hardware, model: Model, workload: Workload, decision: Decision, asked: str | None = None
) -> RenderableType:
    """The head of `serve`: what was found, what was chosen and why."""
    table = page()
    table.add_row("Hardware", Text(one_line(hardware)), "")
    table.add_row("Model", Text(model_line(model)), Text(model.origin or ""))
    table.add_row("Work", Text(work_line(workload, decision.settings)), workload.origin)
    if decision.engine is not None:
        first = decision.reasons[0]
        table.add_row("Engine", Text(f"{decision.engine} {decision.engine_version}", style="bold green"), "")
        table.add_row("", Text(f"why: {first.text}"), Text(f"{first.rule}, {source_file(first.source)}"))
    else:
        table.add_row("Engine", Text(headline(decision, model, asked), style="bold red"), "")
    if decision.refused:
        table.add_row("", Text.assemble(("refused  ", "bold"), refusals_line(decision), style="dim"), "bedplate plan")
    if decision.memory is not None:
        table.add_row("Fit", Text(fit_line(decision.memory)), Text(band(decision.estimate.memory_gb)))
    table.add_row("Speed", Text("TBD: not measured on this machine yet", style="dim"), "")
    return table


def render_decision(
    hardware: Hardware, model: Model, workload: Workload, decision: Decision, asked: str | None = None
) -> RenderableType:
    """The page of `plan`."""
    head = Text(f" {headline(decision, model, asked)}", style="bold green" if decision.fits else "bold red")
    table = page()
    table.add_row("For", Text(model_line(model)), Text(model.origin or ""))
    table.add_row("On", Text(one_line(hardware)), "")
    table.add_row("Work", Text(work_line(workload, decision.settings)), workload.origin)
    for position, reason in enumerate(decision.reasons):
        table.add_row("Why" if position == 0 else "", Text(reason.text), Text(f"{reason.rule} · {reason.source}"))
    if decision.memory is not None:
        table.add_row("Memory", Text(fit_line(decision.memory)), Text(band(decision.estimate.memory_gb)))
    if decision.fits:
        most = f"{decision.max_concurrency:,} requests of {workload.request_tokens:,} tokens fit at once"
        table.add_row("Room", Text(most), "estimate")
        table.add_row("Expect", Text("TTFT TBD   TPOT TBD   tok/s TBD"), "not measured on this machine yet")
    for position, refusal in enumerate(decision.refused):
        why = Text.assemble((f"{refusal.engine:<13}", "bold"), refusal.why)
        hint = f"would win if: {refusal.hint}" if refusal.hint and refusal.kind != "impossible" else refusal.hint or ""
        table.add_row("Not" if position == 0 else "", why, Text(hint))
    for position, hint in enumerate(decision.hints):
        table.add_row("Would fit" if position == 0 else "", Text(hint), "")
    parts: list[RenderableType] = [Text(""), head, Text(""), table]
    if decision.launch is not None:
        parts += [Text(""), Text(" Launch", style="bold"), Text("  " + launch_text(decision))]
    return Group(*parts)


def headline(decision: Decision, model: Model, asked: str | None = None) -> str:
    """The answer in a line; of an engine that was asked for, why not."""
    if decision.engine is not None:
        return f"{decision.engine} {decision.engine_version}, {decision.quantization or model.format}"
    reasons = {refusal.why for refusal in decision.refused}
    if len(reasons) == 1:
        return f"No: {reasons.pop()}"
    first = decision.refused[0] if decision.refused else None
    if first is not None and (decision.settings is not None or first.engine == asked):
        return f"No: {first.engine} {first.why}"
    return f"Nothing runs {model.name} here"


def model_line(model: Model) -> str:
    parts = [model.name, f"{model.quantization or ''} {model.format.upper()}".strip(), size(model.weight_bytes)]
    if model.max_context:
        parts.append(f"context {model.max_context:,}")
    return " · ".join(parts)


def work_line(workload: Workload, settings: Settings | None) -> str:
    users = f"{workload.users:,} user{'s' if workload.users > 1 else ''}"
    line = f"{users} · {workload.prompt_tokens:,} + {workload.output_tokens:,} tokens"
    if settings is not None:
        line += f" → {settings.slots} at once, up to {settings.context_tokens:,} tokens each"
    return line


def fit_line(need: MemoryNeed) -> str:
    return (
        f"{memory(need.total_bytes)} of {memory(need.available_bytes)} free: weights {memory(need.weights_bytes)} · "
        f"cache {memory(need.kv_bytes)} · overhead {memory(need.overhead_bytes.value)}"
    )


def refusals_line(decision: Decision) -> str:
    """Every refusal in a few words; engines with the same reason share it."""
    by_reason: dict[str, list[str]] = {}
    for refusal in decision.refused:
        by_reason.setdefault(refusal.why, []).append(refusal.engine)
    return "   ".join(f"{', '.join(engines)}: {why}" for why, engines in by_reason.items())


def band(figure: Figure | None) -> str:
    if figure is None or not figure.value:
        return ""
    return f"{figure.basis} ± {(figure.high - figure.value) / figure.value:.0%}"


def source_file(source: str) -> str:
    return source.partition(' "')[0]


def launch_text(decision: Decision) -> str:
    """The command as a shell takes it, an option a line."""
    if decision.launch is None:
        return ""
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in decision.launch.env.items())
    words = [
        shlex.quote(word) if len(word) < 200 else f"'…' # {len(word):,} characters" for word in decision.launch.argv
    ]
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return (f"{env} " if env else "") + " \\\n      ".join(lines)
