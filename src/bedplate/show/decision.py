"""The pages of `plan` and `serve`: engine, reasons, estimates, refused engines, launch command."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bedplate.decide.case import with_model_task
from bedplate.decide.questions import DecisionChange, describe_layout
from bedplate.decide.rules import RULES_PAGE
from bedplate.show.columns import SourcedTable
from bedplate.show.probe import describe_hardware
from bedplate.values import Challenger, Decision, Figure, Fit, Hardware, Model, NodeLaunch, Reason, Refusal, Workload
from bedplate.values.quoting import join_shell, quote_shell
from bedplate.values.units import format_figure, format_memory, format_seconds, format_size
from bedplate.values.workload import AUDIO_WINDOW_S

SHIFTS = ("tuned.measured", "evidence.calibrated")
"""Rules of reasons that state how measurements on this machine change a plan."""
ORIGINS = {"default": "default", "asked": "specified", "observed": "observed"}
SHOWN_REASONS = 3
"""Reasons for refusals that `serve` shows."""


def render_serving(
    hardware: Hardware, model: Model, workload: Workload, decision: Decision, asked: str | None = None
) -> RenderableType:
    """What `serve` prints first: hardware, model, workload, engine and reason."""
    workload = with_model_task(model, workload)
    table = SourcedTable()
    table.add_row("Hardware", Text(describe_hardware(hardware)), "")
    table.add_row("Model", Text(describe_model(model)), Text(model.origin or ""))
    table.add_row("Workload", Text(describe_workload(workload, decision)), ORIGINS[workload.origin])
    if decision.engine is not None:
        first = decision.reasons[0]
        table.add_row("Engine", Text(f"{decision.engine} {decision.engine_version}", style="bold green"), "")
        table.add_row("", Text(f"why: {first.text}"), Text(cite_reason(first)))
        for hint in decision.hints:
            table.add_row("", Text.assemble(("hint: ", "yellow"), hint), "")
    else:
        table.add_row("Engine", Text(write_headline(decision, model, asked), style="bold red"), "")
    if decision.refused:
        table.add_row(
            "", Text.assemble(("refused  ", "bold"), describe_refusals(decision), style="dim"), "bedplate plan"
        )
    if decision.memory is not None:
        table.add_row("Memory", Text(describe_fit(decision.memory)), Text(format_spread(decision.estimate.memory_gb)))
    if decision.fits:
        table.add_row("Speed", *_make_speed_row(decision))
    for reason in decision.reasons:
        if reason.rule in SHIFTS:
            table.add_row("", Text(reason.text), Text(cite_reason(reason)))
    return table


def render_decision(
    hardware: Hardware,
    model: Model,
    workload: Workload,
    decision: Decision,
    asked: str | None = None,
    named: Sequence[str] | None = None,
) -> RenderableType:
    """The page of `plan`. `asked` is the requested engine. `named`: how the user named the model, if so."""
    workload = with_model_task(model, workload)
    head = Text(f" {write_headline(decision, model, asked)}", style="bold green" if decision.fits else "bold red")
    table = SourcedTable()
    table.add_row("Model", Text(describe_model(model)), Text(model.origin or ""))
    table.add_row("Hardware", Text(describe_hardware(hardware)), "")
    table.add_row("Workload", Text(describe_workload(workload, decision)), ORIGINS[workload.origin])
    load = decision.load.description if decision.load is not None and workload.depends_on_latency else None
    if load is not None:
        table.add_row("Load", Text(load), "Little's law")
    for position, reason in enumerate(decision.reasons):
        table.add_row("Why" if position == 0 else "", Text(reason.text), Text(cite_reason(reason)))
    if decision.memory is not None:
        table.add_row("Memory", Text(describe_fit(decision.memory)), Text(format_spread(decision.estimate.memory_gb)))
    if decision.fits:
        unit = "text tokens" if workload.task == "transcribe" else "tokens"
        capacity = f"{_count_concurrent(decision.max_concurrency)} of {workload.request_tokens:,} {unit}"
        table.add_row("Capacity", Text(capacity), "estimate")
        for label, value, basis in list_expected_rows(decision):
            table.add_row(label, Text(value), Text(basis))
    for position, refusal in enumerate(decision.refused):
        hint = (
            f"preferred when: {refusal.hint}" if refusal.hint and refusal.kind != "impossible" else refusal.hint or ""
        )
        table.add_row("Refused" if position == 0 else "", refusal.why, hint, name=refusal.engine)
    for position, challenger in enumerate(decision.challengers):
        needs, why = f"justified by {challenger.evidence_needed}", "worth measuring on your workload"
        table.add_row("Measure" if position == 0 else "", needs, why, name=challenger.engine)
    for position, hint in enumerate(list_remedies(decision)):
        table.add_row("Would fit" if position == 0 else "", Text(hint), "")
    notes = [note for note in decision.notes if load is None or not note.startswith(load)]
    for position, note in enumerate(notes):
        table.add_row("Note" if position == 0 else "", Text(note), "")
    hints = render_hints(decision)
    parts: list[RenderableType] = [Text(""), head, *([hints] if hints is not None else []), Text(""), table]
    if decision.reasons:
        parts.append(Text(f"\n The source of each rule: {RULES_PAGE}", style="dim"))
    if decision.launch is not None:
        launch, template = decision.launch, _name_chat_template(model, named)
        parts += [Text(""), *_render_preparations(decision)]
        parts += _render_node_launches(decision, template) or _render_command(
            " Launch", launch.env, launch.argv, template
        )
    return Group(*parts)


class NamedTemplate(NamedTuple):
    """A chat template, and the command that prints it: the text is longer than all other options together."""

    text: str
    command: str


def _name_chat_template(model: Model, named: Sequence[str] | None) -> NamedTemplate | None:
    if model.chat_template is None or named is None:
        return None
    from bedplate.engines.shipped.openai_server.tools import with_tools

    text = with_tools(model.chat_template)
    if text is None:
        return None
    return NamedTemplate(text, f'"$({join_shell(["bedplate", "inspect", *named, "--chat-template"])})"')


def _render_command(
    title: str, env: Mapping[str, str], argv: Sequence[str], template: NamedTemplate | None
) -> list[RenderableType]:
    text = write_command(env, argv)
    if template is not None:
        text = text.replace(quote_shell(template.text), template.command)
    # Not wrapped, so that it can be pasted into a shell.
    return [Text(title, style="bold"), Text(text, no_wrap=True, overflow="ignore")]


def _render_node_launches(decision: Decision, template: NamedTemplate | None) -> list[RenderableType]:
    """The commands of nodes and replicas; of those that differ only in values, one command and the other values."""
    launches = decision.node_launches
    lines: list[RenderableType] = []
    shown: list[NodeLaunch] = []
    for one in launches:
        alike = next((other for other in shown if list_changed_words(other, one) is not None), None)
        if alike is None:
            shown.append(one)
            within = f", in a Slurm allocation of {one.starts} nodes" if one.starts > 1 else ""
            lines += _render_command(f" Launch on {_name_place(one, launches)}{within}", one.env, one.argv, template)
        else:
            words = list_changed_words(alike, one)
            but = f", with {join_shell(words)}" if words else ""
            same = f"the command of {_name_place(alike, launches)}{but}"
            lines.append(_indent(f"On {_name_place(one, launches)}: {same}", 1))
    if any("_ADDRESS" in word for one in launches for word in one.argv):
        lines.append(Text(" NODE_N_ADDRESS is the address of node N in the network that connects the nodes."))
    if (endpoints := sum(one.serves for one in launches)) > 1:
        above = f", or let {decision.orchestrator} start them" if decision.orchestrator is not None else ""
        lines.append(Text(f" {endpoints} endpoints: put a load balancer in front of them{above}."))
    return lines


def _name_place(one: NodeLaunch, launches: Sequence[NodeLaunch]) -> str:
    """Node 0, or node 0 (replica 1) if several replicas run there."""
    together = sum(other.node == one.node for other in launches) > 1
    return f"node {one.node} (replica {one.replica})" if together else f"node {one.node}"


def list_changed_words(one: NodeLaunch, other: NodeLaunch) -> tuple[str, ...] | None:
    """The variables and options with another value in `other`; `None` if the commands differ in more than values."""
    if len(one.argv) != len(other.argv) or one.env.keys() != other.env.keys() or one.serves != other.serves:
        return None
    pairs = list(zip(one.argv, other.argv, strict=True))
    if any(old != new for old, new in pairs if old.startswith("-")):
        return None
    variables = [f"{name}={value}" for name, value in other.env.items() if one.env[name] != value]
    options = [
        word for before, (old, new) in itertools.pairwise([("", ""), *pairs]) if old != new for word in (before[1], new)
    ]
    return (*variables, *options)


def render_hints(decision: Decision) -> Text | None:
    """One line with what is idle, missed or ignored, and what would help; `None` if there is nothing to say."""
    found = [text for text in decision.hints if text not in list_remedies(decision)]
    return Text.assemble((" Hints: ", "bold yellow"), " · ".join(found)) if found else None


def list_remedies(decision: Decision) -> list[str]:
    """The hints that say what would make the model fit."""
    pairs = zip(decision.hint_details, decision.hints, strict=False)
    return [text for detail, text in pairs if detail.kind == "would-fit"]


def render_why_not(decision: Decision, engine: str) -> tuple[RenderableType, Refusal | Challenger | Decision]:
    """The answer of `--why-not` for one engine, and the value it comes from."""
    if decision.engine == engine:
        reason = decision.reasons[0]
        return Text(f" {engine} is the choice: {reason.text}  ({cite_reason(reason)})"), decision
    for challenger in decision.challengers:
        if challenger.engine == engine:
            text = f" {engine} is worth measuring. It is justified by {challenger.evidence_needed}"
            return Text(text), challenger
    refusal = next(refusal for refusal in decision.refused if refusal.engine == engine)
    words = {"impossible": "cannot run this here", "unsuitable": "can run this, but is not suited to it"}
    lines = [Text(f" {engine} {words.get(refusal.kind, 'can run this, but is not the first choice')}: {refusal.why}")]
    if refusal.hint:
        label = "What would help" if refusal.kind == "impossible" else "Preferred when"
        lines.append(Text(f" {label}: {refusal.hint}"))
    if decision.reasons:
        first = decision.reasons[0]
        lines.append(Text(f" Chosen instead: {decision.engine}, because {first.text}  ({first.rule})"))
    return Group(*lines), refusal


def render_changes(asked: str, before: Decision, after: Decision, changes: Sequence[DecisionChange]) -> RenderableType:
    """The page of `plan --what-if`."""
    if not changes:
        return Text(f" With {asked} nothing changes: {before.engine or 'no engine fits'}, {before.quantization or ''}")
    table = Table.grid(padding=(0, 3, 0, 1))
    table.add_row("", Text("now", style="bold"), Text(asked, style="bold"))
    for change in changes:
        table.add_row(Text(change.what, style="bold"), Text(change.before), Text(change.after))
    lines: list[RenderableType] = [Text(""), table]
    if after.reasons and (not before.reasons or before.reasons[0] != after.reasons[0]):
        first = after.reasons[0]
        lines += [Text(""), Text(f" Why  {first.text}  ({cite_reason(first)})")]
    lines += [Text(f" Would fit  {hint}") for hint in list_remedies(after)]
    hints = render_hints(after)
    lines += [hints] if hints is not None else []
    return Group(*lines)


def list_expected_rows(decision: Decision) -> list[tuple[str, str, str]]:
    """Estimates with their ranges, the bottleneck, cost and energy."""
    expected = decision.estimate
    if expected.output_tok_s is None:
        why = "no estimate for this engine on this hardware"
        if decision.settings is not None and decision.settings.device == "cpu":
            why = "memory bandwidth not measured: bedplate probe --measure"
        return [("Expect", "TTFT, TPOT and tok/s not predicted", why)]
    speeds = (
        ("TTFT", expected.ttft_ms, " ms"),
        ("TPOT", expected.tpot_ms, " ms"),
        ("", expected.output_tok_s, " tok/s total"),
    )
    text = "   ".join(
        f"{name} {format_range(figure, unit)}".strip() for name, figure, unit in speeds if figure is not None
    )
    rows = [
        ("Expect", text, f"estimate: {expected.output_tok_s.source}" if expected.output_tok_s.source else "estimate")
    ]
    if decision.limit:
        rows.append(("Bottleneck", decision.limit, "largest share of the time per token"))
    if expected.cost_per_million_tokens is not None:
        rows.append(
            ("Cost", f"{format_range(expected.cost_per_million_tokens, '')} per million output tokens", "estimate")
        )
    if expected.kwh_per_million_tokens is not None:
        rows.append(
            ("Energy", f"{format_range(expected.kwh_per_million_tokens, ' kWh')} per million output tokens", "estimate")
        )
    return rows


def format_range(figure: Figure, unit: str) -> str:
    return f"{format_short(figure.value)}{unit} ({format_short(figure.low)} to {format_short(figure.high)})"


def format_short(value: float) -> str:
    """Three significant digits, enough for an estimate."""
    return format_figure(value)


def _make_speed_row(decision: Decision) -> tuple[Text, Text]:
    expected = decision.estimate
    if expected.tpot_ms is None:
        return Text("not measured on this machine yet", style="dim"), Text("")
    is_measured = any(reason.rule in SHIFTS for reason in decision.reasons)
    one = Figure(
        value=1000 / expected.tpot_ms.value,
        low=1000 / expected.tpot_ms.high,
        high=1000 / max(expected.tpot_ms.low, 1e-9),
        basis="estimate",
    )
    basis = "estimate" if is_measured else "estimate, not measured on this machine yet"
    return Text(f"about {format_range(one, ' tok/s')} for one stream"), Text(basis)


def _render_preparations(decision: Decision) -> list[RenderableType]:
    steps = decision.launch.prepare if decision.launch is not None else ()
    if not steps:
        return []
    lines: list[RenderableType] = [Text(" Prepare", style="bold")]
    for step in steps:
        parts = [f"{step.kind} {step.what}"]
        if step.download_bytes:
            parts.append(f"download {format_size(step.download_bytes)}")
        if step.disk_bytes:
            parts.append(f"{format_size(step.disk_bytes)} on disk")
        if step.seconds is not None:
            parts.append(f"about {format_seconds(step.seconds.value)}")
        lines.append(_indent(" · ".join(parts), 2))
        if step.argv:
            lines.append(_StepCommand(step.argv))
    return lines


def _indent(text: str, by: int) -> Padding:
    """Indents the further lines of a text that is wrapped, too."""
    return Padding(Text(text), (0, 0, 0, by), expand=False)


@dataclass(frozen=True)
class _StepCommand:
    """A command in lines that fit the terminal; each but the last ends with a backslash, so that it can be pasted."""

    argv: tuple[str, ...]
    indent: str = "    "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [self.indent]
        for word in map(quote_shell, self.argv):
            if lines[-1].strip() and len(lines[-1]) + len(f" {word} \\") > options.max_width:
                lines[-1] += " \\"
                lines.append(f"{self.indent}    {word}")
            else:
                lines[-1] += f" {word}" if lines[-1].strip() else word
        yield Text("\n".join(lines), style="dim", no_wrap=True, overflow="ignore")


def write_headline(decision: Decision, model: Model, asked: str | None = None) -> str:
    """The decision in one line. If no engine fits, the reason, of the requested engine if there is one."""
    if decision.engine is not None:
        version = f" {decision.engine_version}" if decision.engine_version else ""
        parts = [f"{decision.engine}{version}", decision.quantization or model.format]
        if decision.settings is not None and decision.settings.kv_type != "16-bit":
            parts.append("8-bit KV cache")
        if describe_layout(decision) != "one device":
            parts.append(describe_layout(decision))
        if decision.orchestrator is not None:
            parts.append(f"under {decision.orchestrator}")
        return ", ".join(parts)
    reasons = {refusal.why for refusal in decision.refused}
    if len(reasons) == 1:
        return f"Not possible: {reasons.pop()}"
    first = decision.refused[0] if decision.refused else None
    if first is not None and first.engine == asked:
        return f"Not possible: {first.engine} {first.why}"
    return f"No engine can run {model.name} here as requested"


def describe_model(model: Model) -> str:
    parts = [model.name, f"{model.quantization or ''} {model.format.upper()}".strip(), format_size(model.weight_bytes)]
    if model.max_context:
        parts.append(f"context {model.max_context:,}")
    return " · ".join(parts)


def describe_workload(workload: Workload, decision: Decision) -> str:
    settings, replicas = decision.settings, decision.parallelism.data
    line = f"{describe_arrivals(workload) or describe_users(workload)} · {describe_lengths(workload)}"
    if settings is not None:
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        line += f" → at most {_count_concurrent(settings.slots)}{each}, up to {settings.context_tokens:,} tokens each"
    return line


def _count_concurrent(count: int) -> str:
    return f"{count:,} concurrent request{'' if count == 1 else 's'}"


def describe_lengths(workload: Workload) -> str:
    """Input and output of one request."""
    if workload.task == "transcribe":
        return f"{AUDIO_WINDOW_S} seconds of audio in, {workload.output_tokens:,} text tokens out"
    output = "" if workload.usual_tokens == workload.prompt_tokens else f" + {workload.output_tokens:,}"
    return f"{workload.prompt_tokens:,}{output} tokens"


def describe_users(workload: Workload) -> str:
    if workload.users == 1 and workload.concurrency is not None and workload.concurrency > 1:
        return f"{workload.concurrency:,} requests in flight"
    return f"{workload.users:,} user{'s' if workload.users > 1 else ''}"


def describe_arrivals(workload: Workload) -> str | None:
    """The arrival pattern, if it is specified and the concurrency is not."""
    if workload.concurrency is not None:
        return None
    if workload.requests_per_s is not None:
        return f"{workload.requests_per_s:g} requests/s"
    if workload.think_time_s is not None:
        return f"{describe_users(workload)}, think time {workload.think_time_s:g} s"
    return None


def describe_requests(workload: Workload, in_flight: Sequence[int]) -> str:
    """How requests arrive, and how many are in flight on several machines or with several models."""
    if not workload.depends_on_latency:
        count = workload.compute_in_flight()
        return "one request at a time" if count == 1 else f"{count:,} concurrent requests"
    load = workload.make_load()
    if load.think_time_s is None:
        what = f"{workload.requests_per_s:g} requests/s"
    else:
        assumed = " (assumed)" if load.think_time_assumed else ""
        what = f"{describe_users(workload)}, {load.think_time_s:g} s between requests{assumed}"
    if not in_flight:
        return what
    low, high = min(in_flight), max(in_flight)
    return f"{what}: {low:,} in flight" if low == high else f"{what}: {low:,} to {high:,} in flight"


def describe_fit(found: Fit) -> str:
    """Memory needed on each kind of device."""
    lines = []
    for need in found.devices:
        overhead = need.overhead_bytes.value + need.activation_bytes.value
        where = f"on {need.count} × {need.device}" if need.count > 1 else f"on {need.device}"
        where = "RAM" if need.device == "host" else where
        adapters = f"LoRA adapters {format_memory(need.adapter_bytes)} · " if need.adapter_bytes else ""
        lines.append(
            f"{format_memory(need.total_bytes)} of {format_memory(need.usable_bytes or 0)} {where}: "
            f"weights {format_memory(need.weights_bytes)} · KV cache {format_memory(need.kv_bytes)} · "
            f"{adapters}overhead {format_memory(overhead)}"
        )
    return "\n".join(lines)


def describe_refusals(decision: Decision) -> str:
    """Refused engines, grouped by reason. If one was chosen, the reasons that apply to most of them; `plan` has all."""
    by_reason: dict[str, list[str]] = {}
    for refusal in decision.refused:
        by_reason.setdefault(refusal.why, []).append(refusal.engine)
    ordered = sorted(by_reason.items(), key=lambda group: -len(group[1]))
    shown = ordered[:SHOWN_REASONS] if decision.engine is not None else ordered
    rest = sum(len(engines) for _, engines in ordered[len(shown) :])
    texts = [f"{', '.join(engines)}: {why}" for why, engines in shown]
    return "   ".join([*texts, f"and {rest} other{'s' if rest > 1 else ''}"] if rest else texts)


def format_spread(figure: Figure | None) -> str:
    if figure is None or not figure.value:
        return ""
    return f"{figure.basis} ± {(figure.high - figure.value) / figure.value:.0%}"


def cite_reason(reason: Reason) -> str:
    """The rule, and its source unless docs/rules.md has it."""
    return reason.rule if reason.source.startswith(RULES_PAGE) else f"{reason.rule} · {reason.source}"


def write_command(variables: Mapping[str, str], argv: Sequence[str]) -> str:
    """A command, quoted for a shell, with one option per line."""
    several = len(variables) > 1
    env = (" \\\n" if several else " ").join(f"{name}={quote_shell(value)}" for name, value in variables.items())
    words = [quote_shell(word) for word in argv]
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    gap = " \\\n" if several else " "
    return (f"{env}{gap}" if env else "") + " \\\n    ".join(lines)
