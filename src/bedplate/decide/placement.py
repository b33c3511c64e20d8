"""Divides one machine among several models or replicas, and checks that they fit together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bedplate.decide.cards import get_free_bytes, has_different_cards, keep_cards
from bedplate.decide.nodes import has_separate_replicas
from bedplate.decide.wording import join_alternatives
from bedplate.engines.base import RESERVED_SHARE
from bedplate.engines.roles import FIRST
from bedplate.engines.visible import pick_cards
from bedplate.errors import NotPossible
from bedplate.values import Accelerator, Decision, Hardware, Workload, replace_fields
from bedplate.values.fit import DeviceNeed
from bedplate.values.units import format_memory

HOST = "host"
FULL_SHARE = 0.05
"""A card with a smaller share of free memory gets no further model."""
Need = Mapping[str, int]
"""Maximum bytes by device: "host", and cards as "card 0"."""
Decides = Callable[[Hardware, Workload], Decision]


@dataclass(frozen=True)
class ServiceAsk:
    name: str
    workload: Workload
    decides: Decides
    replicas: int = 1
    on_demand: bool = False
    """Whether it is loaded on demand and shares memory with other models that are."""


@dataclass(frozen=True)
class MachinePart:
    """The part of the machine that a service gets; all its replicas are the same."""

    workload: Workload
    """The workload of one replica."""
    decision: Decision
    needs: tuple[Need, ...]
    """The memory of each replica."""
    cards: tuple[tuple[int, ...], ...]
    """The accelerators of each replica by the driver's indices; empty if the engine chooses."""


def divide_machine(
    hardware: Hardware, asks: Sequence[ServiceAsk], budget_bytes: int | None = None
) -> tuple[MachinePart, ...]:
    """A part for each service; raises if they do not fit together.

    If they do not fit with spare context and slots, the minimum is tried, then fewer cards for each replica. Services
    that stay loaded must fit together; each service on demand must fit in the remaining memory alone.
    """
    modest = [_reduce_to_minimum(ask) for ask in asks]
    tried = [asks] if modest == list(asks) else [asks, modest]
    refusals: list[NotPossible] = []
    for most_cards in _list_card_limits(hardware, asks):
        for services in tried:
            try:
                return _make_parts(hardware, services, budget_bytes, most_cards)
            except NotPossible as refusal:
                refusals.append(refusal)
    raise refusals[len(tried) - 1]  # with all cards


def _list_card_limits(hardware: Hardware, asks: Sequence[ServiceAsk]) -> list[int]:
    """The most cards of one replica: all, then half of them, and so on."""
    cards = len(hardware.accelerators)
    if len(asks) == 1 or cards < 2:
        return [max(1, cards)]
    return [cards >> halved for halved in range(cards.bit_length())]


def _make_parts(
    hardware: Hardware, asks: Sequence[ServiceAsk], budget_bytes: int | None, most_cards: int
) -> tuple[MachinePart, ...]:
    found: dict[int, MachinePart] = {}
    taken: list[Need] = []
    stay = [index for index, ask in enumerate(asks) if not ask.on_demand]
    for index in (*stay, *(index for index, ask in enumerate(asks) if ask.on_demand)):
        ask = asks[index]
        rest = subtract_needs(hardware, taken, budget_bytes)
        part = _make_part(rest, ask, most_cards, alone=len(asks) == 1, name_cards=len(hardware.accelerators) > 1)
        if len(part.cards) == 1 and has_different_cards(hardware):
            part = replace(part, decision=_name_cards(part.decision, part.cards[0]))
        if not part.decision.fits and (len(asks) > 1 or ask.replicas > 1 or budget_bytes is not None):
            others = [asks[other].name for other in stay if other in found]
            raise _explain_too_much(ask, part.decision, others, hardware, budget_bytes)
        if _is_crowded(part, ask, hardware):
            raise NotPossible(
                f"{ask.replicas} replicas of {part.decision.engine} need one accelerator each",
                cause=f"each reserves a share of a whole GPU, and there are only {len(hardware.accelerators)}",
                hint=f"fewer replicas, or --engine {FIRST.id}, whose processes can share a GPU",
            )
        found[index] = part
        if not ask.on_demand:
            taken += part.needs
    return tuple(found[index] for index in range(len(asks)))


def _make_part(hardware: Hardware, ask: ServiceAsk, most_cards: int, *, alone: bool, name_cards: bool) -> MachinePart:
    if alone and ask.replicas == 1:
        decision = ask.decides(hardware, ask.workload)
        chosen = decision.settings.cards if decision.settings is not None else ()
        if not has_separate_replicas(decision):
            return MachinePart(ask.workload, decision, (count_need(decision, hardware.accelerators),), (chosen,))
        layout = decision.parallelism
        hardware = keep_cards(hardware, pick_cards(hardware, chosen)) if chosen else hardware
        ask, most_cards = replace(ask, replicas=layout.data), layout.tensor * layout.pipeline
    cards = sorted(hardware.accelerators, key=lambda card: -(get_free_bytes(card) or 0))
    if not has_different_cards(hardware):
        cards = list(hardware.accelerators)
    groups = [group[:most_cards] for group in _group_cards(cards, ask.replicas)]
    machine, workload = take_portion(hardware, groups[-1], ask.replicas), _divide_workload(ask.workload, ask.replicas)
    decision = ask.decides(machine, workload)
    used = [_pick_used(decision, groups[-1], group) for group in groups]
    decision = _name_cards(decision, ())
    needs = tuple(count_need(decision, group) for group in used)
    indexes = tuple(tuple(card.index for card in group) if name_cards else () for group in used)
    return MachinePart(workload, decision, needs, indexes)


def _pick_used(
    decision: Decision, decided_for: Sequence[Accelerator], group: Sequence[Accelerator]
) -> tuple[Accelerator, ...]:
    """The cards of one replica's group at the places of those that the decision uses."""
    named = decision.settings.cards if decision.settings is not None else ()
    if not named:
        return tuple(group[: _count_used_cards(decision)])
    places = {card.index: place for place, card in enumerate(decided_for)}
    return tuple(group[places[index]] for index in named)


def _name_cards(decision: Decision, cards: tuple[int, ...]) -> Decision:
    """The decision for these cards; for none, if each of its replicas has others."""
    if decision.settings is None or decision.settings.cards == cards:
        return decision
    return replace_fields(decision, settings=replace_fields(decision.settings, cards=cards))


def _is_crowded(part: MachinePart, ask: ServiceAsk, hardware: Hardware) -> bool:
    settings = part.decision.settings
    return settings is not None and settings.memory_share is not None and ask.replicas > len(hardware.accelerators) > 0


def count_need(decision: Decision, cards: Sequence[Accelerator]) -> Need:
    """The memory that one engine needs on each device; an engine that reserves a share of a card takes all of it."""
    settings = decision.settings
    whole = settings is not None and settings.memory_share is not None
    needs = decision.memory.devices if decision.memory is not None else ()
    found: dict[str, int] = {}
    for one, card in match_cards(needs, cards, settings.cards if settings is not None else ()):
        if card is None:
            found[HOST] = found.get(HOST, 0) + one.high_bytes
        else:
            found[f"card {card.index}"] = max(one.high_bytes, (get_free_bytes(card) or 0) if whole else 0)
    return found


def match_cards(
    needs: Sequence[DeviceNeed], cards: Sequence[Accelerator], named: Sequence[int]
) -> Iterator[tuple[DeviceNeed, Accelerator | None]]:
    """Each need with its card, or with `None` for the host; cards that need the same share a record."""
    known = {card.index: card for card in cards}
    rest = iter([known[index] for index in named if index in known] if named else cards)
    for one in needs:
        if one.device == HOST:
            yield one, None
        else:
            yield from ((one, card) for card in itertools.islice(rest, one.count))


def subtract_needs(hardware: Hardware, taken: Sequence[Need], budget_bytes: int | None = None) -> Hardware:
    """The machine without the memory that is taken, within the budget; cards with the most free memory first."""
    left = None if budget_bytes is None else max(0, budget_bytes - sum(sum(need.values()) for need in taken))
    available = hardware.memory.available_bytes - sum(need.get(HOST, 0) for need in taken)
    if left is not None:
        available = min(available, round(left / (1 - RESERVED_SHARE)))
    cards = [_subtract_from_card(card, taken, left) for card in hardware.accelerators]
    if taken:
        cards.sort(key=lambda card: -(get_free_bytes(card) or 0))
        not_full = [card for card in cards if not _is_full(card)]
        cards = not_full or cards[:1]
    return replace_fields(
        hardware,
        memory=replace_fields(hardware.memory, available_bytes=max(0, available)),
        accelerators=tuple(cards),
    )


def _subtract_from_card(card: Accelerator, taken: Sequence[Need], left: int | None) -> Accelerator:
    free = get_free_bytes(card)
    if free is None:
        return card
    free -= sum(need.get(f"card {card.index}", 0) for need in taken)
    return replace_fields(card, free_bytes=max(0, free if left is None else min(free, left)))


def _is_full(card: Accelerator) -> bool:
    free = get_free_bytes(card)
    return free is not None and free < FULL_SHARE * (card.memory_bytes or free or 1)


def take_portion(hardware: Hardware, cards: Sequence[Accelerator], replicas: int) -> Hardware:
    """The part of the machine for one replica: its share of cores and memory, and its cards."""
    cpu = hardware.cpu
    return replace_fields(
        hardware,
        cpu=replace_fields(
            cpu,
            allowed_cores=cpu.allowed_cores / replicas,
            allowed_physical_cores=max(1, cpu.allowed_physical_cores // replicas),
        ),
        memory=replace_fields(hardware.memory, available_bytes=hardware.memory.available_bytes // replicas),
        accelerators=tuple(cards),
    )


def _group_cards(cards: Sequence[Accelerator], replicas: int) -> list[tuple[Accelerator, ...]]:
    """The cards of each replica, those with the least free memory last; replicas share cards if there are too few."""
    if not cards:
        return [()] * replicas
    each = len(cards) // replicas
    if each:
        return [tuple(cards[number * each : (number + 1) * each]) for number in range(replicas)]
    sharers = -(-replicas // len(cards))
    shared = [replace_fields(card, free_bytes=(get_free_bytes(card) or 0) // sharers) for card in cards]
    groups: list[tuple[Accelerator, ...]] = [(card,) for card in shared * sharers]
    return groups[:replicas]


def _count_used_cards(decision: Decision) -> int:
    if decision.settings is None or decision.settings.device == "cpu":
        return 0
    layout = decision.parallelism
    return layout.tensor * layout.pipeline * layout.data


def _divide_workload(workload: Workload, replicas: int) -> Workload:
    """One replica's part of the workload."""
    rate = workload.requests_per_s
    return replace_fields(
        workload,
        users=-(-workload.users // replicas),
        concurrency=-(-workload.concurrency // replicas) if workload.concurrency is not None else None,
        requests_per_s=rate / replicas if rate is not None else None,
    )


def _reduce_to_minimum(ask: ServiceAsk) -> ServiceAsk:
    """The request without the spare context and slots that engines otherwise get if there is memory."""
    work = ask.workload
    in_flight = None if work.depends_on_latency else work.compute_in_flight()
    asked = replace_fields(work, context_tokens=work.request_tokens, concurrency=in_flight)
    return ServiceAsk(ask.name, asked, ask.decides, ask.replicas, ask.on_demand)


def _explain_too_much(
    ask: ServiceAsk, decision: Decision, others: Sequence[str], hardware: Hardware, budget_bytes: int | None
) -> NotPossible:
    first = decision.refused[0] if decision.refused else None
    many = f"{ask.replicas} replicas of {ask.name} do" if ask.replicas > 1 else f"{ask.name} does"
    where = f" together with {' and '.join(others)}" if others else ""
    within = (
        format_memory(budget_bytes)
        if budget_bytes is not None
        else f"{format_memory(hardware.memory.available_bytes)} of RAM"
    )
    hints = ["fewer replicas"] if ask.replicas > 1 else []
    if others:
        hints.append("a ttl for the services, so that each is loaded only when it is needed")
    if budget_bytes is not None:
        hints.append("a larger memory budget")
    return NotPossible(
        f"{many} not fit{where} in {within}",
        cause=f"{first.engine}: {first.why}" if first is not None else None,
        hint=join_alternatives((*hints, *decision.hints)),
    )
