"""The pages of `ps` and `status`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.run.start_phases import WORDS
from bedplate.show.columns import Column, FittingTable
from bedplate.show.decision import ORIGINS, describe_lengths
from bedplate.show.serving import describe_start, list_phase_times
from bedplate.values.service import EngineStatus, HostStatus, ModelStatus, RemoteEndpointStatus, ServiceRecord
from bedplate.values.units import format_memory
from bedplate.values.workload import Workload

STYLES = {"ready": "green", "failed": "bold red", "restarting": "yellow", "loading": "yellow", "starting": "yellow"}
SHOWN_NOTES = 5
LEAST_IMPORTANT = ("process", "in flight", "models", "up", "memory", "engines")
"""Columns of `ps` that a narrow terminal leaves out, in this order; `status` and `--json` have them."""


def format_duration(duration_s: float) -> str:
    """A duration in its two largest units."""
    minutes, hours, days = duration_s / 60, duration_s / 3600, duration_s / 86400
    if minutes < 1:
        return f"{duration_s:.0f} s"
    if hours < 1:
        return f"{minutes:.0f} min"
    large, small = (int(hours), int(minutes) % 60) if days < 1 else (int(days), int(hours) % 24)
    units = ("h", "min") if days < 1 else ("d", "h")
    return f"{large} {units[0]} {small} {units[1]}" if small else f"{large} {units[0]}"


def render_list(services: Sequence[tuple[ServiceRecord, HostStatus | None]]) -> RenderableType:
    rows = [_make_row(record, status) for record, status in services]
    names = ("name", "state", "url", "models", "engines", "in flight", "memory", "up", "process")
    right = {"in flight", "memory", "up", "process"}
    columns = [
        Column.from_cells(name, [row[index] for row in rows], right=name in right, comfortable=48)
        for index, name in enumerate(names)
    ]
    return FittingTable(tuple(columns), LEAST_IMPORTANT)


def _make_row(record: ServiceRecord, status: HostStatus | None) -> list[str | Text]:
    state = status.state if status is not None else record.state
    if status is None:
        models = ", ".join(record.models) or "–"
        return [record.name, _format_state(state), record.url or "–", models, "–", "–", "–", "–", str(record.pid)]
    engines = [engine for model in status.models for engine in model.engines]
    where = [one.url.partition("://")[2].partition("/")[0] for one in status.endpoints]
    return [
        status.name,
        Text.assemble(_format_state(state), *(f", {one}" for one in _list_activities(status.models))),
        status.url or "–",
        ", ".join(dict.fromkeys([*(one.model for one in status.models), *(one.model for one in status.endpoints)])),
        ", ".join(dict.fromkeys([*(engine.engine for engine in engines), *where])) or "none loaded",
        str(status.in_flight),
        format_memory(status.memory_bytes) if status.memory_bytes is not None else "–",
        format_duration(status.uptime_s),
        str(status.pid),
    ]


def _list_activities(models: Sequence[ModelStatus]) -> list[str]:
    """Current activities without their progress, and engines that are restarted; `status` shows the details."""
    busy = [model.busy.partition(":")[0] for model in models if model.busy and model.busy != model.state]
    engines = [engine for model in models for engine in model.engines]
    phases = [WORDS[engine.phase] for engine in engines if engine.phase is not None]
    lost = [f"{engine.id} {engine.state}" for engine in engines if engine.state in ("restarting", "failed")]
    return list(dict.fromkeys([*busy, *phases, *lost]))


def _format_state(state: str) -> Text:
    return Text(state, style=STYLES.get(state, ""))


def render_status(status: HostStatus) -> RenderableType:
    where = "in the background" if status.detached else "in the foreground"
    key = " · requires an API key" if status.needs_key else ""
    head = Text.assemble(
        (f"\n {status.name}  ", "bold"), _format_state(status.state),
        f"  up {format_duration(status.uptime_s)}, {where}, process {status.pid}, bedplate {status.version}\n",
        (f" {status.url or 'no endpoint yet'}", "bold"), key, "\n",
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    for model in status.models:
        parts += [_render_model(model), Text("")]
    if status.endpoints:
        parts += [_render_endpoints(status.endpoints), Text("")]
    parts.append(_render_foot(status))
    return Group(*parts)


def _render_model(model: ModelStatus) -> RenderableType:
    grid = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    about = [model.quantization, f"context {model.context_tokens:,}"]
    if model.replicas > 1:
        about.append(f"{model.replicas} replicas")
    if model.ttl_s is not None:
        about.append(f"unloaded after {format_duration(model.ttl_s)} without a request")
    if model.idle_s is not None:
        about.append(f"idle for {format_duration(model.idle_s)}")
    words = " · ".join(part for part in about if part)
    grid.add_row("Model", Text.assemble((model.model, "bold"), "  ", _format_state(model.state), f"  {words}"))
    if model.busy is not None and model.busy != model.state:
        grid.add_row("", Text(model.busy, style="yellow"))
    if model.reason is not None:
        grid.add_row("", Text(model.reason, style="red"))
    if model.on is not None:
        grid.add_row("Hardware", Text(model.on.text, style="" if model.on.real else "yellow"))
    for number, engine in enumerate(model.engines):
        grid.add_row("" if number else "Engine", _describe_engine(engine))
    if not model.engines:
        grid.add_row("Engine", Text(f"not loaded; up to {format_memory(model.planned_bytes)} when loaded", style="dim"))
    if model.why:
        grid.add_row("Why", model.why[0])
    grid.add_row("Workload", _describe_workload(model.workload))
    if model.drift is not None:
        grid.add_row("", Text(model.drift, style="yellow"))
    return grid


def _render_endpoints(endpoints: Sequence[RemoteEndpointStatus]) -> RenderableType:
    grid = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for number, one in enumerate(endpoints):
        state = "ejected" if one.ejected and one.state == "ready" else one.state
        parts = [f"serves {one.model}" + (f" as {one.remote_model}" if one.remote_model != one.model else "")]
        parts += [f"{one.in_flight} in flight", f"{one.sent:,} sent", f"share {one.share:g}"]
        if one.ttft_ms is not None:
            parts.append(f"TTFT {one.ttft_ms:.0f} ms")
        if one.price_per_million_tokens:
            parts.append(f"{one.price_per_million_tokens:g} per million tokens")
        line = Text.assemble((one.url, "bold"), "  ", _format_state(state), f"  {' · '.join(parts)}")
        if one.reason is not None:
            line.append(f"\n{one.reason}", "yellow")
        grid.add_row("" if number else "Elsewhere", line)
    return grid


def _describe_engine(engine: EngineStatus) -> Text:
    size = format_memory(engine.memory_bytes) if engine.memory_bytes is not None else "memory unknown"
    parts = [
        f"{engine.in_flight} in flight",
        f"{size} (planned: up to {format_memory(engine.planned_bytes)})",
        _describe_restarts(engine),
    ]
    if engine.uptime_s is not None:
        parts.append(f"up {format_duration(engine.uptime_s)}")
    if engine.share == 0:
        parts.append("receives no new requests")
    if engine.part is not None:
        parts.insert(0, engine.part)
    if engine.phase is not None:
        parts.insert(0, WORDS[engine.phase])
    on = f"{engine.device}, {engine.threads} threads" if engine.threads and engine.device == "cpu" else engine.device
    line = Text.assemble(
        (engine.id, "bold"), f" {engine.version}  ", _format_state(engine.state), f"  {' · '.join(parts)}"
    )
    line.append(f" · {on} · {engine.slots} slots", "dim")
    if engine.phases:
        times = describe_start(engine.phases) if engine.phase is None else list_phase_times(engine.phases)
        line.append(f"\n{times}", "dim")
    if engine.reason is not None and engine.state != "ready":
        line.append(f"\n{engine.reason}", "yellow")
    return line


def _describe_restarts(engine: EngineStatus) -> str:
    if not engine.restarts or engine.last_exit is None or engine.state != "ready":
        return f"{engine.restarts} restarts" if engine.restarts != 1 else "1 restart"
    return (
        f"1 restart: {engine.last_exit.text}"
        if engine.restarts == 1
        else (f"{engine.restarts} restarts, the last one because {engine.last_exit.text}")
    )


def _describe_workload(workload: Workload) -> str:
    users = f"{workload.users:,} user{'s' if workload.users != 1 else ''}"
    known = workload.concurrency is not None or workload.load is not None
    in_flight = f", {workload.compute_in_flight():,} in flight" if known else ""
    return f"planned for {users}{in_flight}, {describe_lengths(workload)} ({ORIGINS[workload.origin]})"


def _render_foot(status: HostStatus) -> RenderableType:
    budget = f" of a budget of {format_memory(status.budget_bytes)}" if status.budget_bytes is not None else ""
    planned = sum(engine.planned_bytes for model in status.models for engine in model.engines)
    size = format_memory(status.memory_bytes) if status.memory_bytes is not None else "unknown"
    lines = [f" Memory  {size} now, planned up to {format_memory(planned)}{budget}", f" Log     {status.log}"]
    lines += [f"         {note}" for note in status.notes[-SHOWN_NOTES:]]
    return Text("\n".join(lines) + "\n", style="dim")
