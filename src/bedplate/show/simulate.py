"""The page of `simulate`: replica, traffic, results, and the fleets that were tried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.simulate.search import Told
from bedplate.progress import Progress
from bedplate.show.columns import SourcedTable
from bedplate.show.decision import format_short
from bedplate.show.figures import format_figure_or_missing
from bedplate.values import Parallelism
from bedplate.values.cost import Price
from bedplate.values.simulation import LatencyDistribution, Outcome, ReplicaDescription, Simulation, Traffic
from bedplate.values.workload import LatencyTarget

NOTE_S = 5.0
"""Seconds between two lines that say which fleet is being simulated."""


@contextmanager
def show_progress(progress: Progress) -> Iterator[Told]:
    """Shows which fleet is being simulated, if it takes longer than a few seconds."""
    noted_s = time.monotonic()
    with progress.step("simulating") as update:

        def report(what: str, requests: int, arrived: int) -> None:
            nonlocal noted_s
            update(arrived)
            if time.monotonic() - noted_s >= NOTE_S:
                noted_s = time.monotonic()
                progress.note(f"simulating {what}: {arrived:,} of {requests:,} requests")

        yield report


def render_simulation(found: Simulation) -> RenderableType:
    answer = found.answer
    table = SourcedTable()
    table.add_row("Replica", Text(_describe_replica(found.replica)), Text(found.replica.hardware))
    table.add_row("Traffic", Text(_describe_traffic(found.traffic)), Text(found.traffic.source))
    if found.traffic.load is not None:
        table.add_row("Load", Text(found.traffic.load.description), _describe_simulated_load(answer))
    table.add_row("Target", Text(_describe_target(found.target, found.met_share)), "")
    if answer is not None:
        for label, value, basis in _list_rows(found, answer):
            table.add_row(label, Text(value), Text(basis))
    for position, note in enumerate(found.notes):
        table.add_row("Note" if position == 0 else "", Text(note), "")
    parts: list[RenderableType] = [Text(""), Text(_write_head(found), style="bold"), Text(""), table]
    if len(found.tried) > 1:
        parts += [Text(""), _make_tried_table(found.tried)]
    return Group(*parts)


def _write_head(found: Simulation) -> str:
    answer = found.answer
    if answer is None:
        most = max(found.tried, key=lambda one: one.on_target or 0.0, default=None)
        nearest = (
            f"; nearest: {describe_fleet(most)}, {most.on_target or 0:.1%} of requests meet it"
            if most is not None
            else ""
        )
        return f" No layout that was tried meets the target{nearest}"
    words = f" {describe_fleet(answer)}, {answer.cards:,} {'card' if answer.cards == 1 else 'cards'}"
    if answer.meets is None:
        return words
    if not answer.meets:
        return f"{words}: {_describe_share(answer)} meet the target, which is too few"
    return f"{words}: {_describe_share(answer)} meet the target"


def describe_fleet(one: Outcome) -> str:
    if one.layout == "disaggregated":
        return f"{one.prefills} prefill + {one.replicas - one.prefills} decode workers"
    return f"{one.replicas} {'replica' if one.replicas == 1 else 'replicas'}"


def _describe_share(one: Outcome) -> str:
    noise = f" ± {one.on_target_noise:.1%}" if one.on_target_noise is not None else ""
    return f"{one.on_target or 0:.1%}{noise} of requests"


def _describe_replica(one: ReplicaDescription) -> str:
    layout = _describe_layout(one.parallelism)
    return (
        f"{one.engine} · {one.model} · {one.quantization or 'original weights'}{layout} · {one.slots} slots · "
        f"KV cache of {one.kv_tokens:,} tokens"
    )


def _describe_layout(layout: Parallelism) -> str:
    names = (
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
        ("expert", layout.expert),
        ("attention data", layout.attention_data),
    )
    return "".join(f" · {name} parallel {size}" for name, size in names if size > 1)


def _describe_traffic(one: Traffic) -> str:
    rate = f"{format_figure_or_missing(one.requests_per_s)} requests/s · " if one.requests_per_s is not None else ""
    return (
        f"{one.requests:,} requests · {rate}{one.prompt_tokens:,.0f} + {one.output_tokens:,.0f} tokens on average"
        + (" · with shared prefixes" if one.shared else "")
    )


def _describe_simulated_load(answer: Outcome | None) -> str:
    if answer is None:
        return ""
    rate = format_figure_or_missing(answer.requests_per_s)
    return f"simulated: {rate} requests/s, {answer.in_flight_mean:,.0f} in flight"


def _describe_target(target: LatencyTarget | None, share: float) -> str:
    if target is None:
        return "none"
    parts = [
        f"{name} ≤ {value:g} ms"
        for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms))
        if value is not None
    ]
    return f"{' and '.join(parts)} for {share:.0%} of requests"


def _list_rows(found: Simulation, answer: Outcome) -> Iterator[tuple[str, str, str]]:
    yield (
        "Throughput",
        f"{format_short(answer.output_tok_s)} tok/s · {format_short(answer.requests_per_s)} requests/s",
        "estimate",
    )
    if answer.goodput_requests_s is not None and answer.goodput_tok_s is not None:
        yield (
            "Goodput",
            f"{format_short(answer.goodput_requests_s)} requests/s · {format_short(answer.goodput_tok_s)} tok/s "
            f"on target",
            _describe_range(found),
        )
    if found.safe is not None:
        yield (
            "With margin",
            f"{describe_fleet(found.safe)}, {found.safe.cards:,} cards",
            "meets the target even if passes are slow",
        )
    for name, times in (("TTFT", answer.ttft_ms), ("TPOT", answer.tpot_ms), ("End to end", answer.e2e_ms)):
        if times is not None:
            yield name, _format_times(times), "estimate"
    cached = f" · {answer.cache_hit_share:.0%} of prompts cached" if answer.cache_hit_share is not None else ""
    preempted = f" · {answer.preemptions:,} preempted" if answer.preemptions else ""
    yield (
        "KV cache",
        f"{answer.kv_use_mean:.0%} used, {answer.kv_use_peak:.0%} at most{cached}{preempted}",
        f"replicas busy {answer.busy_share:.0%} of the time",
    )
    cost = answer.cost_per_million_tokens
    energy = answer.kwh_per_million_tokens
    yield (
        "Cost",
        f"{'unknown' if cost is None else f'{format_figure_or_missing(cost)} per million tokens'} · "
        f"{'energy unknown' if energy is None else f'{format_figure_or_missing(energy)} kWh'}",
        _describe_cost(found),
    )
    yield "Based on", found.replica.source, f"80% of passes × {found.replica.low:.2f} to {found.replica.high:.2f}"


def _describe_cost(found: Simulation) -> str:
    paid = found.price_per_hour if found.electricity_price is None else found.electricity_price
    missing = [name for name, value in (("price_per_hour", paid), ("watts", found.watts)) if value is None]
    if missing:
        return f"{' and '.join(missing)}: not specified in operations"
    card = Price(price_per_hour=found.price_per_hour, watts=found.watts).description
    electricity = f", {found.electricity_price:g} per kWh" if found.electricity_price is not None else ""
    return f"{card} per card{electricity}"


def _describe_range(found: Simulation) -> str:
    slow, fast = found.slow, found.fast
    if slow is None or fast is None or slow.on_target is None or fast.on_target is None:
        return "estimate"
    return f"{slow.on_target:.0%} of requests if passes are slow, {fast.on_target:.0%} if fast"


def _format_times(times: LatencyDistribution) -> str:
    return f"p50 {format_short(times.p50)} · p95 {format_short(times.p95)} · p99 {format_short(times.p99)} ms"


def _make_tried_table(tried: tuple[Outcome, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1), header_style="dim")
    for name in ("tried", "cards", "requests", "on target", "noise", "tok/s", "TTFT p95", "TPOT p95", "cost per M"):
        table.add_column(name, justify="left" if name == "tried" else "right")
    for one in tried:
        table.add_row(
            Text(f"{describe_fleet(one)}{_describe_layout(one.parallelism)}"),
            f"{one.cards:,}",
            f"{one.requests:,}",
            f"{one.on_target:.1%}" if one.on_target is not None else "",
            f"± {one.on_target_noise:.1%}" if one.on_target_noise is not None else "",
            format_short(one.output_tok_s),
            format_short(one.ttft_ms.p95) if one.ttft_ms is not None else "",
            format_short(one.tpot_ms.p95) if one.tpot_ms is not None else "",
            format_figure_or_missing(one.cost_per_million_tokens),
            style="" if one.meets else "dim",
        )
    return table
