"""The page of `workload`: lengths, rate, concurrency and prefix sharing of a trace."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.facts.workload import to_workload
from bedplate.values.units import format_figure, format_seconds
from bedplate.values.workload import Arrivals, InFlight, LengthDistribution, PrefixReuse, Spread, TraceSummary

FORMATS = {
    "azure": "Azure LLM inference trace",
    "mooncake": "Mooncake trace",
    "sharegpt": "ShareGPT conversations",
    "bedplate": "bedplate request log",
}
BARS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR_WIDTH = 18
MOST_BINS = 12
FEW = 0.005
"""Outer bins with less than this share of the requests are merged into their neighbour."""


def render_summary(summary: TraceSummary) -> RenderableType:
    """The page of `workload`."""
    span = f" in {format_long_time(summary.arrivals.span_s)}" if summary.arrivals is not None else ""
    head = f" {summary.requests:,} request{'' if summary.requests == 1 else 's'}{span}"
    parts: list[RenderableType] = [
        Text.assemble((head, "bold"), (f" · {FORMATS[summary.format]} · {summary.source}", "dim")),
        Text(""),
        _render_lengths(summary),
        Text(""),
        _render_histogram(summary),
        Text(""),
        _render_rest(summary),
    ]
    return Group(*parts)


def _render_lengths(summary: TraceSummary) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True, min_width=9)
    for _ in range(5):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("Tokens", *(Text(name, style="dim") for name in ("mean", "p50", "p90", "p99", "max")), "")
    rows = (("  prompt", summary.prompt), ("  output", summary.output), ("  total", summary.total))
    for label, lengths in rows:
        table.add_row(label, *_format_spread(lengths.spread), _describe_basis(lengths))
    if summary.in_flight is not None:
        table.add_row(
            "In flight", *_format_spread(summary.in_flight.spread), Text(describe_flight_basis(summary.in_flight))
        )
    return table


def _format_spread(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}" for value in values]


def _describe_basis(lengths: LengthDistribution) -> str:
    return lengths.basis if lengths.error is None else f"{lengths.basis} ± {lengths.error:.0%}"


def describe_flight_basis(flight: InFlight) -> str:
    if flight.assumption is None:
        return f"{flight.basis}: requests take {format_seconds(flight.request_s)} on average"
    return f"{flight.basis}, assuming {flight.assumption}"


def _render_histogram(summary: TraceSummary) -> RenderableType:
    """Histograms of prompt and output lengths in powers of two, side by side."""
    table = Table.grid(padding=(0, 1, 0, 1))
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True, min_width=13)
        table.add_column(no_wrap=True, min_width=BAR_WIDTH)
        table.add_column(justify="right", style="dim", no_wrap=True, min_width=5)
    table.add_row(Text("prompt", style="bold"), "", "", Text("output", style="bold"), "", "")
    prompts, outputs = make_bars(summary.prompt), make_bars(summary.output)
    for index in range(max(len(prompts), len(outputs))):
        cells: list[RenderableType] = []
        for side in (prompts, outputs):
            label, bar, share = side[index] if index < len(side) else ("", "", "")
            cells += [label, Text(bar, style="cyan"), share]
        table.add_row(*cells)
    return table


def make_bars(lengths: LengthDistribution) -> list[tuple[str, str, str]]:
    """Label, bar and share of each bin; small outer bins are merged into their neighbours."""
    bins = [(one.from_tokens, one.to_tokens, one.requests) for one in lengths.bins]
    whole = sum(requests for _, _, requests in bins)
    if not whole:
        return []
    while len(bins) > 1 and (bins[0][2] < FEW * whole or len(bins) > MOST_BINS):
        bins[:2] = [(bins[0][0], bins[1][1], bins[0][2] + bins[1][2])]
    while len(bins) > 1 and bins[-1][2] < FEW * whole:
        bins[-2:] = [(bins[-2][0], bins[-1][1], bins[-2][2] + bins[-1][2])]
    most = max(requests for _, _, requests in bins)
    return [(_format_range(low, high), _draw_bar(count / most), f"{count / whole:.1%}") for low, high, count in bins]


def _format_range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _draw_bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8].strip() if eighths % 8 else "")


def _render_rest(summary: TraceSummary) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")

    def add_rows(label: str, *texts: str) -> None:
        # As Text, because names from files may contain brackets, which rich would read as markup.
        for position, text in enumerate(texts):
            table.add_row(label if position == 0 else "", Text(text))

    arrivals = summary.arrivals
    if arrivals is not None and arrivals.requests_per_s is not None:
        add_rows("Rate", *describe_rate(arrivals))
        add_rows("Bursts", describe_bursts(arrivals))
    if summary.prefix is not None:
        add_rows("Prefix", *describe_prefixes(summary.prefix))
    if summary.outcomes:
        whole = summary.requests
        add_rows(
            "Outcomes",
            " · ".join(f"{name} {count:,} ({count / whole:.1%})" for name, count in summary.outcomes.items()),
        )
    if summary.tenants or summary.models:
        tenants = f"{summary.tenants:,} tenant{'' if summary.tenants == 1 else 's'}" if summary.tenants else ""
        add_rows("Tenants", " · ".join(filter(None, (tenants, ", ".join(summary.models)))))
    add_rows("Notes", *summary.notes)
    if summary.bad_rows:
        left_out = f"{summary.bad_rows:,} unreadable, skipped"
        add_rows("Bad rows", left_out, *summary.bad_examples)
    add_rows("Plan for", describe_plan(summary))
    return table


def describe_rate(arrivals: Arrivals) -> list[str]:
    rate = arrivals.requests_per_s or 0.0
    often = f"{format_figure(rate)} requests/s" if rate >= 0.1 else f"{format_figure(rate * 60)} requests/min"
    if len(arrivals.series) < 2:
        return [often]
    each = format_long_time(arrivals.span_s / len(arrivals.series))
    highest = max(arrivals.series)
    return [often, f"{draw_sparkline(arrivals.series)}  one mark is {each}; peak {format_figure(highest)} requests/s"]


def draw_sparkline(values: tuple[float, ...]) -> str:
    most = max(values, default=0.0)
    if not most:
        return BARS[0] * len(values)
    return "".join(BARS[min(7, int(value / most * 8))] if value else " " for value in values)


def describe_bursts(arrivals: Arrivals) -> str:
    """How bursty the arrivals are, in words and figures."""
    peaks = [
        f"{format_figure(ratio)} × the mean in the busiest {name}"
        for ratio, name in (
            (arrivals.peak_to_mean_1s, "second"),
            (arrivals.peak_to_mean_10s, "10 seconds"),
            (arrivals.peak_to_mean_60s, "minute"),
        )
        if ratio is not None
    ]
    over = f"; peak rate: {', '.join(peaks)}" if peaks else ""
    if arrivals.gap_cv is None:
        return f"unknown, too few arrivals{over}"
    return (
        f"{_describe_evenness(arrivals.gap_cv)}: coefficient of variation of the gaps {arrivals.gap_cv:.2f} "
        f"(Poisson: 1){over}"
    )


def _describe_evenness(gap_cv: float) -> str:
    if gap_cv < 0.5:
        return "steady, like a scheduled client"
    if gap_cv < 0.85:
        return "steadier than independent arrivals"
    if gap_cv <= 1.25:
        return "like independent arrivals"
    return "bursty" if gap_cv <= 2.5 else "very bursty"


def describe_prefixes(prefix: PrefixReuse) -> list[str]:
    """What a prefix cache would save, how many requests share a prefix, and what follows."""
    source = f"({prefix.basis}: {prefix.how})"
    if prefix.basis == "reported":
        lines = [f"the engine's prefix cache saved {prefix.saved_share:.0%} of prompt tokens {source}"]
    else:
        lines = [f"an unlimited prefix cache would save about {prefix.saved_share:.0%} of prompt tokens {source}"]
    if prefix.by_cache:
        sizes = (f"{cache.saved_share:.0%} with {_format_count(cache.tokens)} tokens" for cache in prefix.by_cache)
        lines.append(f"a limited LRU cache: {', '.join(sizes)}")
    if prefix.sharing_requests:
        lines.append(
            f"{prefix.sharing_requests:.0%} of requests share a prefix with an earlier one, typically "
            f"{prefix.typical_tokens:,} tokens"
        )
    return [*lines, _advise_on_prefixes(prefix)]


def _advise_on_prefixes(prefix: PrefixReuse) -> str:
    near = prefix.by_cache[0].saved_share if prefix.by_cache else prefix.saved_share
    if near >= 0.4:
        return "much is shared: enable prefix caching, and route requests with the same prefix to the same replica"
    if near >= 0.1:
        more = "; a larger cache, in host memory or on disk, saves much more" if prefix.saved_share > 2 * near else ""
        return f"enable prefix caching{more}"
    if prefix.saved_share >= 0.1:
        return "much is shared, but far apart in time: only a large cache, in host memory or on disk, helps"
    return "little is shared: prefix caching brings little"


def _format_count(tokens: int) -> str:
    return f"{tokens / 1e6:.3g} M" if tokens >= 1e6 * 0.99 else f"{tokens:,}"


def describe_plan(summary: TraceSummary) -> str:
    workload = to_workload(summary)
    flight = f"{workload.concurrency:,} in flight (p99) · " if workload.concurrency is not None else ""
    shared = f" · {workload.shared_prefix_tokens:,} shared prefix tokens" if workload.shared_prefix_tokens else ""
    lengths = f"{workload.prompt_tokens:,} + {workload.output_tokens:,} tokens (means)"
    longest = f"up to {workload.context_tokens:,} (p99)"
    return f"{flight}{lengths} · {longest}{shared}; write it with -o FILE"


def format_long_time(span_s: float) -> str:
    if span_s < 2 * 3600:
        return format_seconds(span_s)
    return f"{span_s / 3600:.1f} h" if span_s < 72 * 3600 else f"{span_s / 86400:.1f} days"
