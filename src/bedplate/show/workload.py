"""The page of `workload`: lengths, rate, concurrency and prefix sharing of a trace."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.facts.workload import to_workload
from bedplate.values.units import figure, seconds
from bedplate.values.workload import Arrivals, InFlight, Lengths, PrefixReuse, Spread, TraceSummary

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
    span = f" in {long_time(summary.arrivals.span_s)}" if summary.arrivals is not None else ""
    head = f" {summary.requests:,} request{'' if summary.requests == 1 else 's'}{span}"
    parts: list[RenderableType] = [
        Text.assemble((head, "bold"), (f" · {FORMATS[summary.format]} · {summary.source}", "dim")),
        Text(""),
        _lengths(summary),
        Text(""),
        _histogram(summary),
        Text(""),
        _rest(summary),
    ]
    return Group(*parts)


def _lengths(summary: TraceSummary) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True, min_width=9)
    for _ in range(5):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("Tokens", *(Text(name, style="dim") for name in ("mean", "p50", "p90", "p99", "max")), "")
    rows = (("  prompt", summary.prompt), ("  output", summary.output), ("  total", summary.total))
    for label, lengths in rows:
        table.add_row(label, *_spread(lengths.spread), _basis(lengths))
    if summary.in_flight is not None:
        table.add_row("In flight", *_spread(summary.in_flight.spread), Text(flight_basis(summary.in_flight)))
    return table


def _spread(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}" for value in values]


def _basis(lengths: Lengths) -> str:
    return lengths.basis if lengths.error is None else f"{lengths.basis} ± {lengths.error:.0%}"


def flight_basis(flight: InFlight) -> str:
    if flight.assumption is None:
        return f"{flight.basis}: requests take {seconds(flight.request_s)} on average"
    return f"{flight.basis}, assuming {flight.assumption}"


def _histogram(summary: TraceSummary) -> RenderableType:
    """Histograms of prompt and output lengths in powers of two, side by side."""
    table = Table.grid(padding=(0, 1, 0, 1))
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True, min_width=13)
        table.add_column(no_wrap=True, min_width=BAR_WIDTH)
        table.add_column(justify="right", style="dim", no_wrap=True, min_width=5)
    table.add_row(Text("prompt", style="bold"), "", "", Text("output", style="bold"), "", "")
    prompts, outputs = bars(summary.prompt), bars(summary.output)
    for index in range(max(len(prompts), len(outputs))):
        cells: list[RenderableType] = []
        for side in (prompts, outputs):
            label, bar, share = side[index] if index < len(side) else ("", "", "")
            cells += [label, Text(bar, style="cyan"), share]
        table.add_row(*cells)
    return table


def bars(lengths: Lengths) -> list[tuple[str, str, str]]:
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
    return [(_range(low, high), _bar(count / most), f"{count / whole:.1%}") for low, high, count in bins]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8].strip() if eighths % 8 else "")


def _rest(summary: TraceSummary) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")

    def rows(label: str, *texts: str) -> None:
        # As Text, because names from files may contain brackets, which rich would read as markup.
        for position, text in enumerate(texts):
            table.add_row(label if position == 0 else "", Text(text))

    arrivals = summary.arrivals
    if arrivals is not None and arrivals.requests_per_s is not None:
        rows("Rate", *rate_lines(arrivals))
        rows("Bursts", burst_words(arrivals))
    if summary.prefix is not None:
        rows("Prefix", *prefix_words(summary.prefix))
    if summary.outcomes:
        whole = summary.requests
        rows(
            "Outcomes",
            " · ".join(f"{name} {count:,} ({count / whole:.1%})" for name, count in summary.outcomes.items()),
        )
    if summary.tenants or summary.models:
        tenants = f"{summary.tenants:,} tenant{'' if summary.tenants == 1 else 's'}" if summary.tenants else ""
        rows("Tenants", " · ".join(filter(None, (tenants, ", ".join(summary.models)))))
    rows("Notes", *summary.notes)
    if summary.bad_rows:
        left_out = f"{summary.bad_rows:,} unreadable, skipped"
        rows("Bad rows", left_out, *summary.bad_examples)
    rows("Plan for", plan_words(summary))
    return table


def rate_lines(arrivals: Arrivals) -> list[str]:
    rate = arrivals.requests_per_s or 0.0
    often = f"{figure(rate)} requests/s" if rate >= 0.1 else f"{figure(rate * 60)} requests/min"
    if len(arrivals.series) < 2:
        return [often]
    each = long_time(arrivals.span_s / len(arrivals.series))
    highest = max(arrivals.series)
    return [often, f"{sparkline(arrivals.series)}  one mark is {each}; peak {figure(highest)} requests/s"]


def sparkline(values: tuple[float, ...]) -> str:
    most = max(values, default=0.0)
    if not most:
        return BARS[0] * len(values)
    return "".join(BARS[min(7, int(value / most * 8))] if value else " " for value in values)


def burst_words(arrivals: Arrivals) -> str:
    """How bursty the arrivals are, in words and figures."""
    peaks = [
        f"{figure(ratio)} × the mean in the busiest {name}"
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
        f"{_evenness(arrivals.gap_cv)}: coefficient of variation of the gaps {arrivals.gap_cv:.2f} (Poisson: 1){over}"
    )


def _evenness(gap_cv: float) -> str:
    if gap_cv < 0.5:
        return "steady, like a scheduled client"
    if gap_cv < 0.85:
        return "steadier than independent arrivals"
    if gap_cv <= 1.25:
        return "like independent arrivals"
    return "bursty" if gap_cv <= 2.5 else "very bursty"


def prefix_words(prefix: PrefixReuse) -> list[str]:
    """What a prefix cache would save, how many requests share a prefix, and what follows."""
    source = f"({prefix.basis}: {prefix.how})"
    if prefix.basis == "reported":
        lines = [f"the engine's prefix cache saved {prefix.saved_share:.0%} of prompt tokens {source}"]
    else:
        lines = [f"an unlimited prefix cache would save about {prefix.saved_share:.0%} of prompt tokens {source}"]
    if prefix.by_cache:
        sizes = (f"{cache.saved_share:.0%} with {_count(cache.tokens)} tokens" for cache in prefix.by_cache)
        lines.append(f"a limited LRU cache: {', '.join(sizes)}")
    if prefix.sharing_requests:
        lines.append(
            f"{prefix.sharing_requests:.0%} of requests share a prefix with an earlier one, typically "
            f"{prefix.typical_tokens:,} tokens"
        )
    return [*lines, _prefix_advice(prefix)]


def _prefix_advice(prefix: PrefixReuse) -> str:
    near = prefix.by_cache[0].saved_share if prefix.by_cache else prefix.saved_share
    if near >= 0.4:
        return "much is shared: enable prefix caching, and route requests with the same prefix to the same replica"
    if near >= 0.1:
        more = "; a larger cache, in host memory or on disk, saves much more" if prefix.saved_share > 2 * near else ""
        return f"enable prefix caching{more}"
    if prefix.saved_share >= 0.1:
        return "much is shared, but far apart in time: only a large cache, in host memory or on disk, helps"
    return "little is shared: prefix caching brings little"


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.3g} M" if tokens >= 1e6 * 0.99 else f"{tokens:,}"


def plan_words(summary: TraceSummary) -> str:
    workload = to_workload(summary)
    flight = f"{workload.concurrency:,} in flight (p99) · " if workload.concurrency is not None else ""
    shared = f" · {workload.shared_prefix_tokens:,} shared prefix tokens" if workload.shared_prefix_tokens else ""
    lengths = f"{workload.prompt_tokens:,} + {workload.output_tokens:,} tokens (means)"
    longest = f"up to {workload.context_tokens:,} (p99)"
    return f"{flight}{lengths} · {longest}{shared}; write it with -o FILE"


def long_time(span_s: float) -> str:
    if span_s < 2 * 3600:
        return seconds(span_s)
    return f"{span_s / 3600:.1f} h" if span_s < 72 * 3600 else f"{span_s / 86400:.1f} days"
