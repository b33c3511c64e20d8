"""The page of `plan --procure`: the chips that would serve the workload, the fewest cards first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bedplate.decide.questions import Offer, describe_layout, is_laptop
from bedplate.decide.targets import get_target
from bedplate.show.columns import Column, FittingTable
from bedplate.show.decision import describe_requests, format_short
from bedplate.values import Figure, Model, Workload

PAID = {"cost_per_million_tokens": "cost per M", "kwh_per_million_tokens": "kWh per M"}
"""Per million output tokens."""
SHOWN = 15
LEAST_IMPORTANT = ("capacity", "layout", "weights", "watts", "TTFT ms")
"""Columns that a narrow terminal leaves out, in this order."""
NARROWEST_CHIP = 17
"""Names of chips wrap between words down to this width."""


def render_offers(model: Model, workload: Workload, offers: tuple[Offer, ...], asked: int) -> RenderableType:
    target = _describe_target(workload)
    if not offers:
        return Text(f" None of {asked} known chips serves {model.name} as requested with at most 8 cards{target}")
    portable = [one for one in offers if is_laptop(one.accelerator)]
    sold = [one for one in offers if one not in portable] if _has_many_users(workload) else []
    worthwhile = list_worthwhile(sold or offers)
    shown = worthwhile[:SHOWN]
    requests = describe_requests(workload, [offer.decision.in_flight for offer in offers])
    head = f"{len(offers)} of {asked} known chips serve {model.name}, {requests}{target}; all figures are estimates"
    beaten, rest = len(sold or offers) - len(worthwhile), len(worthwhile) - len(shown)
    lines = [f"… and {rest} more"] if rest else []
    lines += [f"left out: {beaten} that need no fewer cards, no less power, and are not faster"] if beaten else []
    lines += [f"left out: {len(portable)} laptops, as there are several users"] if sold and portable else []
    lines += ["--json lists all"] if lines else []
    return Group(
        Text(""),
        Padding(Text(head, style="bold"), (0, 0, 0, 1), expand=False),
        Text(""),
        _make_table(shown),
        *(Padding(Text(line, style="dim"), (0, 0, 0, 1), expand=False) for line in lines),
    )


def _make_table(shown: Sequence[Offer]) -> FittingTable:
    # Shown only if the intent specifies a price or watts.
    paid = [name for name in PAID if any(getattr(offer.decision.estimate, name) is not None for offer in shown)]
    texts = {
        "chip": [one.accelerator for one in shown],
        "engine": [one.decision.engine or "" for one in shown],
        "weights": [one.decision.quantization or "" for one in shown],
        "layout": [describe_layout(one.decision).replace(" parallel", "") for one in shown],
    }
    numbers = {
        "TTFT ms": [_format_cell(one.decision.estimate.ttft_ms) for one in shown],
        "TPOT ms": [_format_cell(one.decision.estimate.tpot_ms) for one in shown],
        "tok/s": [_format_cell(one.decision.estimate.output_tok_s) for one in shown],
        "capacity": [f"{one.decision.max_concurrency:,}" for one in shown],
        "watts": [f"{one.watts:,.0f}" if one.watts is not None else "" for one in shown],
        **{PAID[name]: [_format_cell(getattr(one.decision.estimate, name)) for one in shown] for name in paid},
    }
    columns = [Column.from_cells("cards", [str(one.count) for one in shown], right=True)]
    columns += [Column.from_cells(name, cells, comfortable=NARROWEST_CHIP) for name, cells in texts.items()]
    columns += [Column.from_cells(name, cells, right=True) for name, cells in numbers.items()]
    return FittingTable(tuple(columns), LEAST_IMPORTANT)


def _has_many_users(workload: Workload) -> bool:
    return workload.users > 1 or workload.compute_in_flight() > 1


def _describe_target(workload: Workload) -> str:
    """The latency targets, which are those of a chat if the workload states none."""
    target = get_target(workload)
    if target is None:
        return ""
    pairs = (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms))
    texts = [f"{name} at most {format_short(limit)} ms" for name, limit in pairs if limit is not None]
    assumed = " (assumed)" if workload.latency is None else ""
    return f", {' and '.join(texts)}{assumed}" if texts else ""


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
