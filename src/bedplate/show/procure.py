"""Offers as people compare them: the machines that would serve the work, the fewest cards first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import Offer, layout_words
from bedplate.show.decision import short
from bedplate.values import Model, Workload


def render_offers(model: Model, workload: Workload, offers: tuple[Offer, ...], asked: int) -> RenderableType:
    if not offers:
        return Text(f" None of {asked} known chips serves {model.name} as asked with at most 8 cards")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("cards", "chip", "engine", "weights", "layout", "TTFT ms", "TPOT ms", "tok/s", "at once", "watts"):
        table.add_column(name, justify="left" if name in ("chip", "engine", "weights", "layout") else "right")
    for offer in sorted(offers, key=_order):
        decision, expected = offer.decision, offer.decision.estimate
        figures = (expected.ttft_ms, expected.tpot_ms, expected.output_tok_s)
        table.add_row(
            str(offer.count),
            Text(offer.accelerator),
            decision.engine or "",
            Text(decision.quantization or ""),
            layout_words(decision),
            *(short(figure.value) if figure is not None else "TBD" for figure in figures),
            f"{decision.max_concurrency:,}",
            f"{offer.watts:,.0f}" if offer.watts is not None else "",
        )
    work = f"{workload.in_flight():,} requests at once"
    head = f" {len(offers)} of {asked} known chips serve {model.name}, {work}; all figures are estimates"
    return Group(Text(""), Text(head, style="bold"), Text(""), table)


def _order(offer: Offer) -> tuple[int, float]:
    """Few cards first; among as many, the fastest."""
    rate = offer.decision.estimate.output_tok_s
    return offer.count, -(rate.value if rate is not None else 0.0)
