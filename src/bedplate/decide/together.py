"""Several models, or several replicas of one, on one machine: what each gets of it, and whether they fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bedplate.decide.memory import free_of
from bedplate.decide.wording import join_alternatives
from bedplate.engines.base import RESERVED_SHARE
from bedplate.engines.roles import FIRST
from bedplate.errors import AnswerIsNo
from bedplate.values import Accelerator, Decision, Hardware, Workload, replaced
from bedplate.values.units import memory

HOST = "host"
FULL_SHARE = 0.05
"""A card with less than this of its memory left is no place for another model."""
Need = Mapping[str, int]
"""Bytes by device, at the most: "host", and cards as "card 0"."""
Decides = Callable[[Hardware, Workload], Decision]


@dataclass(frozen=True)
class Ask:
    name: str
    workload: Workload
    decides: Decides
    replicas: int = 1
    on_demand: bool = False
    """Whether it shares its place with others that are loaded on demand."""


@dataclass(frozen=True)
class Part:
    """What a service gets of the machine: the same for each of its replicas."""

    workload: Workload
    """Of one replica."""
    decision: Decision
    needs: tuple[Need, ...]
    """Of each replica."""
    cards: tuple[tuple[int, ...], ...]
    """The accelerators of each replica by the driver's numbers; empty where it may take them as they come."""


def together(hardware: Hardware, asks: Sequence[Ask], budget_bytes: int | None = None) -> tuple[Part, ...]:
    """A part for each; raises when they do not fit together. First as each would like it, then with what was asked for.

    Those that stay loaded are counted together. Those on demand must fit beside them one at a time.
    """
    try:
        return _parts(hardware, asks, budget_bytes)
    except AnswerIsNo:
        modest = [_modest(ask) for ask in asks]
        if modest == list(asks):
            raise
        return _parts(hardware, modest, budget_bytes)


def _parts(hardware: Hardware, asks: Sequence[Ask], budget_bytes: int | None) -> tuple[Part, ...]:
    found: dict[int, Part] = {}
    taken: list[Need] = []
    stay = [index for index, ask in enumerate(asks) if not ask.on_demand]
    for index in (*stay, *(index for index, ask in enumerate(asks) if ask.on_demand)):
        ask = asks[index]
        rest = less(hardware, taken, budget_bytes)
        part = _part(rest, ask, alone=len(asks) == 1, name_cards=len(hardware.accelerators) > 1)
        if not part.decision.fits and (len(asks) > 1 or ask.replicas > 1 or budget_bytes is not None):
            beside = [asks[other].name for other in stay if other in found]
            raise _too_much(ask, part.decision, beside, hardware, budget_bytes)
        if _crowded(part, ask, hardware):
            raise AnswerIsNo(
                f"{ask.replicas} replicas of {part.decision.engine} need an accelerator each",
                cause=f"it takes a share of the whole card, and there are {len(hardware.accelerators)}",
                hint=f"fewer replicas, or --engine {FIRST.id}, whose processes share a card",
            )
        found[index] = part
        if not ask.on_demand:
            taken += part.needs
    return tuple(found[index] for index in range(len(asks)))


def _part(hardware: Hardware, ask: Ask, *, alone: bool, name_cards: bool) -> Part:
    if alone and ask.replicas == 1:
        decision = ask.decides(hardware, ask.workload)
        return Part(ask.workload, decision, (need_of(decision, hardware.accelerators),), ((),))
    groups = _groups(hardware.accelerators, ask.replicas)
    machine, workload = portion(hardware, groups[-1], ask.replicas), _shared_out(ask.workload, ask.replicas)
    decision = ask.decides(machine, workload)
    used = [group[: _cards_used(decision)] for group in groups]
    needs = tuple(need_of(decision, group) for group in groups)
    cards = tuple(tuple(card.index for card in group) for group in used)
    return Part(workload, decision, needs, cards if name_cards else tuple(() for _ in groups))


def _crowded(part: Part, ask: Ask, hardware: Hardware) -> bool:
    settings = part.decision.settings
    return settings is not None and settings.memory_share is not None and ask.replicas > len(hardware.accelerators) > 0


def need_of(decision: Decision, cards: Sequence[Accelerator]) -> Need:
    """What one engine is counted for on each device; an engine that takes a share of a card takes the card."""
    found: dict[str, int] = {}
    whole = decision.settings is not None and decision.settings.memory_share is not None
    for one in decision.memory.devices if decision.memory is not None else ():
        if one.device == HOST:
            found[HOST] = found.get(HOST, 0) + one.high_bytes
            continue
        for card in cards[: one.count]:
            found[f"card {card.index}"] = max(one.high_bytes, (free_of(card) or 0) if whole else 0)
    return found


def less(hardware: Hardware, taken: Sequence[Need], budget_bytes: int | None = None) -> Hardware:
    """The machine as it is when so much of it is taken, within the budget; cards with most room come first."""
    left = None if budget_bytes is None else max(0, budget_bytes - sum(sum(need.values()) for need in taken))
    available = hardware.memory.available_bytes - sum(need.get(HOST, 0) for need in taken)
    if left is not None:
        available = min(available, round(left / (1 - RESERVED_SHARE)))
    cards = [_less_of(card, taken, left) for card in hardware.accelerators]
    if taken:
        cards.sort(key=lambda card: -(free_of(card) or 0))
        roomy = [card for card in cards if not _full(card)]
        cards = roomy or cards[:1]
    return replaced(
        hardware,
        memory=replaced(hardware.memory, available_bytes=max(0, available)),
        accelerators=tuple(cards),
    )


def _less_of(card: Accelerator, taken: Sequence[Need], left: int | None) -> Accelerator:
    free = free_of(card)
    if free is None:
        return card
    free -= sum(need.get(f"card {card.index}", 0) for need in taken)
    return replaced(card, free_bytes=max(0, free if left is None else min(free, left)))


def _full(card: Accelerator) -> bool:
    free = free_of(card)
    return free is not None and free < FULL_SHARE * (card.memory_bytes or free or 1)


def portion(hardware: Hardware, cards: Sequence[Accelerator], replicas: int) -> Hardware:
    """The machine as one of so many replicas may see it: its part of the cores and of the memory, and its cards."""
    cpu = hardware.cpu
    return replaced(
        hardware,
        cpu=replaced(
            cpu,
            allowed_cores=cpu.allowed_cores / replicas,
            allowed_physical_cores=max(1, cpu.allowed_physical_cores // replicas),
        ),
        memory=replaced(hardware.memory, available_bytes=hardware.memory.available_bytes // replicas),
        accelerators=tuple(cards),
    )


def _groups(cards: Sequence[Accelerator], replicas: int) -> list[tuple[Accelerator, ...]]:
    """The cards of each replica, those with the least room last; where there are too few, replicas share them."""
    if not cards:
        return [()] * replicas
    each = len(cards) // replicas
    if each:
        return [tuple(cards[number * each : (number + 1) * each]) for number in range(replicas)]
    sharers = -(-replicas // len(cards))
    shared = [replaced(card, free_bytes=(free_of(card) or 0) // sharers) for card in cards]
    groups: list[tuple[Accelerator, ...]] = [(card,) for card in shared * sharers]
    return groups[:replicas]


def _cards_used(decision: Decision) -> int:
    if decision.settings is None or decision.settings.device == "cpu":
        return 0
    layout = decision.parallelism
    return layout.tensor * layout.pipeline * layout.data


def _shared_out(workload: Workload, replicas: int) -> Workload:
    """One replica's part of the work."""
    rate = workload.requests_per_s
    return replaced(
        workload,
        users=-(-workload.users // replicas),
        concurrency=-(-workload.concurrency // replicas) if workload.concurrency is not None else None,
        requests_per_s=rate / replicas if rate is not None else None,
    )


def _modest(ask: Ask) -> Ask:
    """No more than was asked for: engines are otherwise given some room beyond that where there is any."""
    work = ask.workload
    asked = replaced(work, context_tokens=work.request_tokens, concurrency=work.in_flight())
    return Ask(ask.name, asked, ask.decides, ask.replicas, ask.on_demand)


def _too_much(
    ask: Ask, decision: Decision, beside: Sequence[str], hardware: Hardware, budget_bytes: int | None
) -> AnswerIsNo:
    first = decision.refused[0] if decision.refused else None
    many = f"{ask.replicas} replicas of {ask.name} do" if ask.replicas > 1 else f"{ask.name} does"
    where = f" beside {' and '.join(beside)}" if beside else ""
    within = memory(budget_bytes) if budget_bytes is not None else f"{memory(hardware.memory.available_bytes)} of RAM"
    hints = ["fewer replicas"] if ask.replicas > 1 else []
    if beside:
        hints.append("a ttl, so that they are loaded when they are needed and take turns")
    if budget_bytes is not None:
        hints.append("a larger memory budget")
    return AnswerIsNo(
        f"{many} not fit{where} in {within}",
        cause=f"{first.engine}: {first.why}" if first is not None else None,
        hint=join_alternatives((*hints, *decision.hints)),
    )
