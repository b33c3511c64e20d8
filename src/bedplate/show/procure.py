"""Offers as people compare them: the machines that would serve the work, the fewest cards first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import Offer, layout_words
from bedplate.show.decision import short
from bedplate.values import Figure, Model, Workload

PAID = {"cost_per_million_tokens": "cost per M", "kwh_per_million_tokens": "kWh per M"}
"""Of output tokens."""


def render_offers(model: Model, workload: Workload, offers: tuple[Offer, ...], asked: int) -> RenderableType:
    if not offers:
        return Text(f" None of {asked} known chips serves {model.name} as asked with at most 8 cards")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    # Only where the intent says a price or watts: elsewhere there is nothing to show.
    paid = [name for name in PAID if any(getattr(offer.decision.estimate, name) is not None for offer in offers)]
    for name in ("cards", "chip", "engine", "weights", "layout", "TTFT ms", "TPOT ms", "tok/s", "at once", "watts"):
        table.add_column(name, justify="left" if name in ("chip", "engine", "weights", "layout") else "right")
    for name in paid:
        table.add_column(PAID[name], justify="right")
    for offer in sorted(offers, key=_order):
        decision, expected = offer.decision, offer.decision.estimate
        figures = (expected.ttft_ms, expected.tpot_ms, expected.output_tok_s)
        spent = (getattr(expected, name) for name in paid)
        table.add_row(
            str(offer.count),
            Text(offer.accelerator),
            decision.engine or "",
            Text(decision.quantization or ""),
            layout_words(decision),
            *(_cell(figure) for figure in figures),
            f"{decision.max_concurrency:,}",
            f"{offer.watts:,.0f}" if offer.watts is not None else "",
            *(_cell(figure) for figure in spent),
        )
    work = f"{workload.in_flight():,} requests at once"
    head = f" {len(offers)} of {asked} known chips serve {model.name}, {work}; all figures are estimates"
    return Group(Text(""), Text(head, style="bold"), Text(""), table)


def _cell(figure: Figure | None) -> str:
    return short(figure.value) if figure is not None else "TBD"


def _order(offer: Offer) -> tuple[int, float]:
    """Few cards first; among as many, the fastest."""
    rate = offer.decision.estimate.output_tok_s
    return offer.count, -(rate.value if rate is not None else 0.0)
