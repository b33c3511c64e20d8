"""A trace as people read it: how long, how often, how many at once, and what its prompts share."""

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
"""Bins at the ends that hold less than this share of the requests are shown as one with their neighbour."""


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
    rows = (("  prompt", summary.prompt), ("  output", summary.output), ("  both", summary.total))
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
    """Prompts and outputs side by side, by powers of two."""
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
    """Label, bar and share of each bin, with thin ends folded into their neighbours."""
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
        # As Text, since what comes out of files may hold brackets that would be taken for markup.
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
        rows("Who", " · ".join(filter(None, (tenants, ", ".join(summary.models)))))
    rows("Notes", *summary.notes)
    if summary.bad_rows:
        left_out = f"{summary.bad_rows:,} cannot be read and {'is' if summary.bad_rows == 1 else 'are'} left out"
        rows("Bad rows", left_out, *summary.bad_examples)
    rows("Plan for", plan_words(summary))
    return table


def rate_lines(arrivals: Arrivals) -> list[str]:
    rate = arrivals.requests_per_s or 0.0
    often = f"{figure(rate)} requests a second" if rate >= 0.1 else f"{figure(rate * 60)} requests a minute"
    if len(arrivals.series) < 2:
        return [often]
    each = long_time(arrivals.span_s / len(arrivals.series))
    highest = max(arrivals.series)
    return [often, f"{sparkline(arrivals.series)}  each mark is {each}; the highest {figure(highest)} a second"]


def sparkline(values: tuple[float, ...]) -> str:
    most = max(values, default=0.0)
    if not most:
        return BARS[0] * len(values)
    return "".join(BARS[min(7, int(value / most * 8))] if value else " " for value in values)


def burst_words(arrivals: Arrivals) -> str:
    """How uneven the arrivals are, in words and then in figures."""
    peaks = [
        f"{figure(ratio)} × in the busiest {name}"
        for ratio, name in (
            (arrivals.peak_to_mean_1s, "second"),
            (arrivals.peak_to_mean_10s, "10 seconds"),
            (arrivals.peak_to_mean_60s, "minute"),
        )
        if ratio is not None
    ]
    over = f"; rate against the mean: {', '.join(peaks)}" if peaks else ""
    if arrivals.gap_cv is None:
        return f"too few arrivals to tell{over}"
    return f"{_evenness(arrivals.gap_cv)}: gaps vary by {arrivals.gap_cv:.2f} of their mean, 1 is chance{over}"


def _evenness(gap_cv: float) -> str:
    if gap_cv < 0.5:
        return "steady, as a program with a clock sends them"
    if gap_cv < 0.85:
        return "steadier than chance"
    if gap_cv <= 1.25:
        return "as independent people send them"
    return "bursty" if gap_cv <= 2.5 else "in clumps with pauses between"


def prefix_words(prefix: PrefixReuse) -> list[str]:
    """What a cache would save, how requests share, and what to do about it."""
    told = f"({prefix.basis}: {prefix.how})"
    if prefix.basis == "reported":
        lines = [f"the engine's prefix cache saved {prefix.saved_share:.0%} of prompt tokens {told}"]
    else:
        lines = [f"a prefix cache would save about {prefix.saved_share:.0%} of prompt tokens if it never forgot {told}"]
    if prefix.by_cache:
        sizes = (f"{cache.saved_share:.0%} with {_count(cache.tokens)} tokens" for cache in prefix.by_cache)
        lines.append(f"one that forgets the oldest: {', '.join(sizes)}")
    if prefix.sharing_requests:
        lines.append(
            f"{prefix.sharing_requests:.0%} of requests begin as an earlier one did, typically with "
            f"{prefix.typical_tokens:,} tokens"
        )
    return [*lines, _meaning(prefix)]


def _meaning(prefix: PrefixReuse) -> str:
    near = prefix.by_cache[0].saved_share if prefix.by_cache else prefix.saved_share
    if near >= 0.4:
        return "prompts share much: keep prefix caching on, and send alike requests to the same replica"
    if near >= 0.1:
        more = (
            ", and a larger cache, in host memory or on disk, saves much more" if prefix.saved_share > 2 * near else ""
        )
        return f"worth having prefix caching on{more}"
    if prefix.saved_share >= 0.1:
        return (
            "prompts share much, but far apart in time: it takes a large cache, in host memory or on disk, to keep it"
        )
    return "hardly anything is shared: prefix caching matters little here"


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.3g} M" if tokens >= 1e6 * 0.99 else f"{tokens:,}"


def plan_words(summary: TraceSummary) -> str:
    work = to_workload(summary)
    flight = f"{work.concurrency:,} in flight (p99) · " if work.concurrency is not None else ""
    shared = f" · {work.shared_prefix_tokens:,} shared" if work.shared_prefix_tokens else ""
    lengths = f"{work.prompt_tokens:,} + {work.output_tokens:,} tokens (means) · up to {work.context_tokens:,} (p99)"
    return f"{flight}{lengths}{shared}; -o FILE writes it"


def long_time(span_s: float) -> str:
    if span_s < 2 * 3600:
        return seconds(span_s)
    return f"{span_s / 3600:.1f} h" if span_s < 72 * 3600 else f"{span_s / 86400:.1f} days"
