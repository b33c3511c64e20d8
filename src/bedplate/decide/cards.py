"""Machines with different accelerators: their kinds, and the groups of cards that a plan may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bedplate.engines import Engine
from bedplate.engines.base import get_card_family
from bedplate.values import Accelerator, Hardware, replace_fields

SAME_FREE = 0.9
"""Cards of one model count as equal if each has at least this share of the free memory of the emptiest."""
NEAR_RATE = 0.5
"""An integrated GPU is used beside a card only with at least this share of the card's memory bandwidth."""
MOST_REMEMBERED = 256
GIB = 1 << 30

_kinds: dict[int, tuple[object, tuple[tuple[Accelerator, ...], ...]]] = {}
_groups: dict[tuple[int, Engine], tuple[object, tuple[Hardware, ...]]] = {}
"""By the identity of a machine's accelerators, and of the machine: a search asks many times for the same machine."""


def list_kinds(hardware: Hardware) -> tuple[tuple[Accelerator, ...], ...]:
    """The accelerators by model and free memory, the fastest kind first, and each kind in the order of the machine.

    The order of the kinds does not depend on the order of the machine.
    """
    cards = hardware.accelerators
    known = _kinds.get(id(cards))
    if known is not None and known[0] is cards:
        return known[1]
    if len(_kinds) >= MOST_REMEMBERED:
        _kinds.clear()
    models: dict[tuple[object, ...], list[Accelerator]] = {}
    for card in cards:
        models.setdefault((card.name, card.vendor, (card.memory_bytes or 0) // GIB), []).append(card)
    kinds = [kind for alike in models.values() for kind in _split_by_free_memory(alike)]
    found = tuple(sorted(kinds, key=_rank_kind))
    _kinds[id(cards)] = (cards, found)
    return found


def has_different_cards(hardware: Hardware) -> bool:
    return len(list_kinds(hardware)) > 1


def order_cards(hardware: Hardware) -> Hardware:
    """The same machine with its accelerators in the order of their kinds; their indexes stay."""
    kinds = list_kinds(hardware)
    if len(kinds) < 2:
        return hardware
    ordered = tuple(card for kind in kinds for card in kind)
    return hardware if ordered == hardware.accelerators else replace_fields(hardware, accelerators=ordered)


def keep_cards(hardware: Hardware, cards: Iterable[Accelerator]) -> Hardware:
    """The part of the machine with these accelerators and the links between them and to the host."""
    kept = tuple(cards)
    ends = {"host", *(str(card.index) for card in kept)}
    links = tuple(link for link in hardware.links if link.a in ends and link.b in ends)
    return replace_fields(hardware, accelerators=kept, links=links)


def list_card_groups(hardware: Hardware, engine: Engine) -> tuple[Hardware, ...]:
    """The parts of the machine whose accelerators one process of the engine may use together.

    The machine itself if its accelerators are alike or the engine supports none of them. Otherwise those of one kind,
    without integrated GPUs that are much slower than a card, and, of each vendor, the two, three and more with the most
    free memory if they are of several kinds: a layout on such a group uses all of its cards.
    """
    known = _groups.get((id(hardware), engine))
    if known is not None and known[0] is hardware:
        return known[1]
    if len(_groups) >= MOST_REMEMBERED:
        _groups.clear()
    found = tuple(_generate_groups(hardware, engine)) if has_different_cards(hardware) else (hardware,)
    _groups[id(hardware), engine] = (hardware, found := found or (hardware,))
    return found


def _generate_groups(hardware: Hardware, engine: Engine) -> Iterator[Hardware]:
    families: dict[str, list[tuple[Accelerator, ...]]] = {}
    fastest = 0.0
    for kind in list_kinds(hardware):
        part = keep_cards(hardware, kind)
        target = engine.find_target(part)
        if get_card_family(kind[0]) not in engine.vendors or target is None or target.device == "cpu":
            continue
        fastest = max(fastest, _get_rate(kind))
        if kind[0].unified_memory and _get_rate(kind) < NEAR_RATE * fastest:
            continue
        families.setdefault(get_card_family(kind[0]), []).append(kind)
        yield part
    for kinds in families.values():
        # Memory that is shared with the CPU is not added to that of a card.
        own = [kind for kind in kinds if not kind[0].unified_memory]
        numbers = {card.index: number for number, kind in enumerate(own) for card in kind}
        cards = [card for kind in own for card in kind]
        largest = sorted(cards, key=lambda card: -_get_free(card))
        for count in range(2, len(cards) + 1):
            chosen = sorted(largest[:count], key=lambda card: numbers[card.index])
            if numbers[chosen[0].index] != numbers[chosen[-1].index]:
                yield keep_cards(hardware, chosen)


def _split_by_free_memory(cards: Sequence[Accelerator]) -> Iterator[tuple[Accelerator, ...]]:
    """Cards of one model: those of about the same free memory together, the emptiest first."""
    most = max(map(_get_free, cards))
    if all(_get_free(card) >= SAME_FREE * most for card in cards):
        yield tuple(cards)
        return
    left = list(cards)
    while left:
        most = max(map(_get_free, left))
        yield tuple(card for card in left if _get_free(card) >= SAME_FREE * most)
        left = [card for card in left if _get_free(card) < SAME_FREE * most]


def _rank_kind(kind: Sequence[Accelerator]) -> tuple[object, ...]:
    first = kind[0]
    return first.unified_memory, -_get_rate(kind), -(first.memory_bytes or 0), first.name, -_get_free(first)


def _get_rate(kind: Sequence[Accelerator]) -> float:
    """Memory bandwidth; 0 if it is unknown."""
    return max(card.bandwidth_bytes_s.value if card.bandwidth_bytes_s is not None else 0.0 for card in kind)


def get_free_bytes(card: Accelerator) -> int | None:
    return card.free_bytes if card.free_bytes is not None else card.memory_bytes


def _get_free(card: Accelerator) -> int:
    return get_free_bytes(card) or 0
