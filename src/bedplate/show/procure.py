"""The page of `plan --procure`: the chips that would serve the workload, the fewest cards first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.decide.questions import Offer, describe_layout
from bedplate.show.decision import describe_requests, format_short
from bedplate.values import Figure, Model, Workload

PAID = {"cost_per_million_tokens": "cost per M", "kwh_per_million_tokens": "kWh per M"}
"""Per million output tokens."""
SHOWN = 15


def render_offers(model: Model, workload: Workload, offers: tuple[Offer, ...], asked: int) -> RenderableType:
    if not offers:
        return Text(f" None of {asked} known chips serves {model.name} as requested with at most 8 cards")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    # Shown only if the intent specifies a price or watts.
    paid = [name for name in PAID if any(getattr(offer.decision.estimate, name) is not None for offer in offers)]
    for name in ("cards", "chip", "engine", "weights", "layout", "TTFT ms", "TPOT ms", "tok/s", "capacity", "watts"):
        table.add_column(name, justify="left" if name in ("chip", "engine", "weights", "layout") else "right")
    for name in paid:
        table.add_column(PAID[name], justify="right")
    worthwhile = list_worthwhile(offers)
    shown = worthwhile[:SHOWN]
    for offer in shown:
        decision, expected = offer.decision, offer.decision.estimate
        figures = (expected.ttft_ms, expected.tpot_ms, expected.output_tok_s)
        spent = (getattr(expected, name) for name in paid)
        table.add_row(
            str(offer.count),
            Text(offer.accelerator),
            decision.engine or "",
            Text(decision.quantization or ""),
            describe_layout(decision),
            *(_format_cell(figure) for figure in figures),
            f"{decision.max_concurrency:,}",
            f"{offer.watts:,.0f}" if offer.watts is not None else "",
            *(_format_cell(figure) for figure in spent),
        )
    requests = describe_requests(workload, [offer.decision.in_flight for offer in offers])
    head = f" {len(offers)} of {asked} known chips serve {model.name}, {requests}; all figures are estimates"
    beaten, rest = len(offers) - len(worthwhile), len(worthwhile) - len(shown)
    lines = [f" … and {rest} more"] if rest else []
    lines += [f" left out: {beaten} that need no fewer cards, no less power, and are not faster"] if beaten else []
    lines += [" --json lists all"] if lines else []
    return Group(Text(""), Text(head, style="bold"), Text(""), table, *(Text(line, style="dim") for line in lines))


def list_worthwhile(offers: Sequence[Offer]) -> list[Offer]:
    """The fewest cards first, then the fastest; without those that another beats in cards, watts and speed."""
    found = [one for one in offers if not any(_beats(other, one) for other in offers)]
    return sorted(found, key=_order_by_cards_and_speed)


def _beats(one: Offer, other: Offer) -> bool:
    """Whether one is as good in everything and better in something. Unknown watts equal only unknown watts."""
    if (one.watts is None) != (other.watts is None):
        return False
    better, worse = _order_by_cards_and_speed(one), _order_by_cards_and_speed(other)
    pairs = [*zip(better, worse, strict=True), (one.watts or 0.0, other.watts or 0.0)]
    return all(first <= second for first, second in pairs) and any(first < second for first, second in pairs)


def _format_cell(figure: Figure | None) -> str:
    return format_short(figure.value) if figure is not None else "unknown"


def _order_by_cards_and_speed(offer: Offer) -> tuple[int, float]:
    """By number of cards, then by speed."""
    rate = offer.decision.estimate.output_tok_s
    return offer.count, -(rate.value if rate is not None else 0.0)
