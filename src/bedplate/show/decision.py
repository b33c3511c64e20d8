"""A Decision as people read it: what, why, what to expect, what was refused, and the launch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import Change, layout_words
from bedplate.decide.rules import RULES_PAGE
from bedplate.show.probe import one_line
from bedplate.values import Challenger, Decision, Figure, Fit, Hardware, Model, Reason, Refusal, Workload
from bedplate.values.units import figure, memory, seconds, size


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
    table.add_row("Work", Text(work_line(workload, decision)), workload.origin)
    if decision.engine is not None:
        first = decision.reasons[0]
        table.add_row("Engine", Text(f"{decision.engine} {decision.engine_version}", style="bold green"), "")
        table.add_row("", Text(f"why: {first.text}"), Text(cited(first)))
    else:
        table.add_row("Engine", Text(headline(decision, model, asked), style="bold red"), "")
    if decision.refused:
        table.add_row("", Text.assemble(("refused  ", "bold"), refusals_line(decision), style="dim"), "bedplate plan")
    if decision.memory is not None:
        table.add_row("Fit", Text(fit_line(decision.memory)), Text(band(decision.estimate.memory_gb)))
    if decision.fits:
        table.add_row("Speed", *_speed_row(decision))
    return table


def render_decision(
    hardware: Hardware, model: Model, workload: Workload, decision: Decision, asked: str | None = None
) -> RenderableType:
    """The page of `plan`."""
    head = Text(f" {headline(decision, model, asked)}", style="bold green" if decision.fits else "bold red")
    table = page()
    table.add_row("For", Text(model_line(model)), Text(model.origin or ""))
    table.add_row("On", Text(one_line(hardware)), "")
    table.add_row("Work", Text(work_line(workload, decision)), workload.origin)
    for position, reason in enumerate(decision.reasons):
        table.add_row("Why" if position == 0 else "", Text(reason.text), Text(cited(reason)))
    if decision.memory is not None:
        table.add_row("Memory", Text(fit_line(decision.memory)), Text(band(decision.estimate.memory_gb)))
    if decision.fits:
        most = f"memory for {decision.max_concurrency:,} requests of {workload.request_tokens:,} tokens at once"
        table.add_row("Room", Text(most), "estimate")
        for label, value, basis in expect_rows(decision):
            table.add_row(label, Text(value), Text(basis))
    for position, refusal in enumerate(decision.refused):
        why = Text.assemble((f"{refusal.engine:<13}", "bold"), refusal.why)
        hint = f"would win if: {refusal.hint}" if refusal.hint and refusal.kind != "impossible" else refusal.hint or ""
        table.add_row("Not" if position == 0 else "", why, Text(hint))
    for position, challenger in enumerate(decision.challengers):
        needs = Text.assemble((f"{challenger.engine:<13}", "bold"), f"justified by {challenger.evidence_needed}")
        table.add_row("Measure" if position == 0 else "", needs, "worth measuring on your own work")
    for position, hint in enumerate(decision.hints):
        table.add_row("Would fit" if position == 0 else "", Text(hint), "")
    for position, note in enumerate(decision.notes):
        table.add_row("Note" if position == 0 else "", Text(note), "")
    parts: list[RenderableType] = [Text(""), head, Text(""), table]
    if decision.reasons:
        parts.append(Text(f"\n The source of each rule: {RULES_PAGE}", style="dim"))
    if decision.launch is not None:
        parts += [Text(""), *_preparations(decision), Text(" Launch", style="bold"), Text("  " + launch_text(decision))]
    return Group(*parts)


def render_why_not(decision: Decision, engine: str) -> tuple[RenderableType, Refusal | Challenger | Decision]:
    """What the decision says of one engine, and the value that says it."""
    if decision.engine == engine:
        reason = decision.reasons[0]
        return Text(f" {engine} is the choice: {reason.text}  ({cited(reason)})"), decision
    for challenger in decision.challengers:
        if challenger.engine == engine:
            text = f" {engine} is worth measuring. It would be justified by {challenger.evidence_needed}"
            return Text(text), challenger
    refusal = next(refusal for refusal in decision.refused if refusal.engine == engine)
    words = {"impossible": "cannot run this here", "unsuitable": "could, but was not built for this"}
    lines = [Text(f" {engine} {words.get(refusal.kind, 'can, but is not the first choice')}: {refusal.why}")]
    if refusal.hint:
        told = "What would help" if refusal.kind == "impossible" else "It would win if"
        lines.append(Text(f" {told}: {refusal.hint}"))
    if decision.reasons:
        first = decision.reasons[0]
        lines.append(Text(f" Chosen instead: {decision.engine}, since {first.text}  ({first.rule})"))
    return Group(*lines), refusal


def render_changes(asked: str, before: Decision, after: Decision, found: Sequence[Change]) -> RenderableType:
    """The page of `plan --what-if`."""
    if not found:
        return Text(f" With {asked} nothing changes: {before.engine or 'nothing fits'}, {before.quantization or ''}")
    table = Table.grid(padding=(0, 3, 0, 1))
    table.add_row("", Text("now", style="bold"), Text(asked, style="bold"))
    for change in found:
        table.add_row(Text(change.what, style="bold"), Text(change.before), Text(change.after))
    lines: list[RenderableType] = [Text(""), table]
    if after.reasons and (not before.reasons or before.reasons[0] != after.reasons[0]):
        first = after.reasons[0]
        lines += [Text(""), Text(f" Why  {first.text}  ({cited(first)})")]
    lines += [Text(f" Would fit  {hint}") for hint in after.hints]
    return Group(*lines)


def expect_rows(decision: Decision) -> list[tuple[str, str, str]]:
    """What to expect, with bands, what limits it, and what it costs."""
    expected = decision.estimate
    if expected.output_tok_s is None:
        why = "not predicted for this engine and hardware"
        if decision.settings is not None and decision.settings.device == "cpu":
            why = "memory bandwidth not known: bedplate probe --measure"
        return [("Expect", "TTFT TBD   TPOT TBD   tok/s TBD", why)]
    speeds = (
        ("TTFT", expected.ttft_ms, " ms"),
        ("TPOT", expected.tpot_ms, " ms"),
        ("", expected.output_tok_s, " tok/s in all"),
    )
    text = "   ".join(f"{name} {ranged(figure, unit)}".strip() for name, figure, unit in speeds if figure is not None)
    rows = [
        ("Expect", text, f"estimate: {expected.output_tok_s.source}" if expected.output_tok_s.source else "estimate")
    ]
    if decision.limit:
        rows.append(("Limit", decision.limit, "the largest part of making a token"))
    if expected.cost_per_million_tokens is not None:
        rows.append(("Cost", f"{ranged(expected.cost_per_million_tokens, '')} for a million output tokens", "estimate"))
    if expected.kwh_per_million_tokens is not None:
        rows.append(
            ("Energy", f"{ranged(expected.kwh_per_million_tokens, ' kWh')} for a million output tokens", "estimate")
        )
    return rows


def ranged(figure: Figure, unit: str) -> str:
    return f"{short(figure.value)}{unit} ({short(figure.low)} to {short(figure.high)})"


def short(value: float) -> str:
    """Three figures that matter; nobody reads more of an estimate."""
    return figure(value)


def _speed_row(decision: Decision) -> tuple[Text, Text]:
    expected = decision.estimate
    if expected.tpot_ms is None:
        return Text("TBD: not measured on this machine yet", style="dim"), Text("")
    one = Figure(
        value=1000 / expected.tpot_ms.value,
        low=1000 / expected.tpot_ms.high,
        high=1000 / max(expected.tpot_ms.low, 1e-9),
        basis="estimate",
    )
    return Text(f"about {ranged(one, ' tok/s')} for one stream"), Text("estimate, not measured here yet")


def _preparations(decision: Decision) -> list[RenderableType]:
    steps = decision.launch.prepare if decision.launch is not None else ()
    if not steps:
        return []
    lines: list[RenderableType] = [Text(" Before", style="bold")]
    for step in steps:
        parts = [f"{step.kind} {step.what}"]
        if step.download_bytes:
            parts.append(f"download {size(step.download_bytes)}")
        if step.disk_bytes:
            parts.append(f"{size(step.disk_bytes)} on disk")
        if step.seconds is not None:
            parts.append(f"about {seconds(step.seconds.value)}")
        lines.append(Text(f"  {' · '.join(parts)}"))
        if step.argv:
            lines.append(Text(f"    {shlex.join(step.argv)}", style="dim"))
    return lines


def headline(decision: Decision, model: Model, asked: str | None = None) -> str:
    """The answer in a line; of an engine that was asked for, why not."""
    if decision.engine is not None:
        version = f" {decision.engine_version}" if decision.engine_version else ""
        parts = [f"{decision.engine}{version}", decision.quantization or model.format]
        if layout_words(decision) != "one device":
            parts.append(layout_words(decision))
        if decision.orchestrator is not None:
            parts.append(f"under {decision.orchestrator}")
        return ", ".join(parts)
    reasons = {refusal.why for refusal in decision.refused}
    if len(reasons) == 1:
        return f"No: {reasons.pop()}"
    first = decision.refused[0] if decision.refused else None
    if first is not None and first.engine == asked:
        return f"No: {first.engine} {first.why}"
    return f"Nothing runs {model.name} here as asked"


def model_line(model: Model) -> str:
    parts = [model.name, f"{model.quantization or ''} {model.format.upper()}".strip(), size(model.weight_bytes)]
    if model.max_context:
        parts.append(f"context {model.max_context:,}")
    return " · ".join(parts)


def work_line(workload: Workload, decision: Decision) -> str:
    settings, replicas = decision.settings, decision.parallelism.data
    made = "" if workload.usual_tokens == workload.prompt_tokens else f" + {workload.output_tokens:,}"
    line = f"{arrivals(workload) or users(workload)} · {workload.prompt_tokens:,}{made} tokens"
    if settings is not None:
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        line += f" → at most {settings.slots} at once{each}, up to {settings.context_tokens:,} tokens each"
    return line


def users(workload: Workload) -> str:
    return f"{workload.users:,} user{'s' if workload.users > 1 else ''}"


def arrivals(workload: Workload) -> str | None:
    """How requests come, where that is said and not how many there are at once."""
    if workload.concurrency is not None:
        return None
    if workload.requests_per_s is not None:
        return f"{workload.requests_per_s:g} requests a second"
    if workload.think_time_s is not None:
        return f"{users(workload)} who think for {workload.think_time_s:g} s"
    return None


def fit_line(found: Fit) -> str:
    """The need on each kind of device."""
    lines = []
    for need in found.devices:
        own = need.overhead_bytes.value + need.activation_bytes.value
        where = "RAM" if need.device == "host" else f"{need.count} × {need.device}" if need.count > 1 else need.device
        lines.append(
            f"{memory(need.total_bytes)} of {memory(need.usable_bytes or 0)} on {where}: "
            f"weights {memory(need.weights_bytes)} · cache {memory(need.kv_bytes)} · overhead {memory(own)}"
        )
    return "\n".join(lines)


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


def cited(reason: Reason) -> str:
    """The rule, and its source unless the page of rules has it."""
    return reason.rule if reason.source.startswith(RULES_PAGE) else f"{reason.rule} · {reason.source}"


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
