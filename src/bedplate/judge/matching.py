"""Find the cells of two subjects that are comparable: same workload, same machine, valid measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from bedplate.errors import UsageError
from bedplate.judge.words import describe_difference, describe_load
from bedplate.measure.summary import list_differences, list_invalid_reasons
from bedplate.values.run import Cell, Load
from bedplate.values.verdict import Difference

ALLOWED = ("quantization", "weights", "machine")
"""Differences that `--allow` accepts; any other makes two cells not comparable."""
HINT = "measure both in one run: bedplate bench --engines A,B --turns 5"

LoadKey = tuple[object, ...]


class CellPair(NamedTuple):
    a: Cell
    b: Cell


class MatchedCells(NamedTuple):
    pairs: list[CellPair]
    left_out: tuple[str, ...]
    """Cells that were not compared, and why."""
    differences: tuple[Difference, ...]
    """Differences between the cells that were compared."""
    refused: tuple[Difference, ...] = ()
    """Differences that made other cells not comparable."""

    @property
    def newest(self) -> str:
        """The newest time at which both sides had been measured."""
        return max((min(pair.a.at, pair.b.at) for pair in self.pairs), default="")


def match_cells(a: Sequence[Cell], b: Sequence[Cell], allow: Collection[str] = ()) -> MatchedCells:
    """Pairs the newest cells of both sides under the same load. Raises UsageError if none are comparable.

    Of several versions, quantizations or devices of one engine, the one that was measured last on both sides counts.
    """
    for name in allow:
        if name not in ALLOWED:
            raise UsageError(
                f"--allow {name}: cells with this difference cannot be compared",
                hint=f"--allow accepts {', '.join(ALLOWED)}",
            )
    left_out: list[str] = []
    mine, theirs = _select_valid(a, left_out), _select_valid(b, left_out)
    if not mine or not theirs:
        raise _make_no_cells_error("B" if mine else "A", left_out)
    tries = [
        _match_configurations(one, other, allow)
        for one in _group_by_configuration(mine)
        for other in _group_by_configuration(theirs)
    ]
    best = max(tries, key=lambda found: (found.newest, len(found.pairs)))
    if not best.pairs:
        raise _make_not_comparable_error(mine, theirs, tries)
    return best._replace(left_out=(*left_out, *best.left_out))


def _match_configurations(a: Sequence[Cell], b: Sequence[Cell], allow: Collection[str]) -> MatchedCells:
    """Pairs one configuration of each side, load by load."""
    pairs: list[CellPair] = []
    left_out: list[str] = []
    seen: dict[Difference, None] = {}
    refused: dict[Difference, None] = {}
    for one in _select_newest(a):
        other = _find_partner(one, b)
        if other is None:
            continue
        found = list_differences(one, other)
        hard = [difference for difference in found.meaningless if difference.what not in allow]
        if hard:
            refused.update(dict.fromkeys(hard))
            left_out.append(f"{describe_load(one.load)}: {'; '.join(map(describe_difference, hard))}")
        else:
            pairs.append(CellPair(one, other))
            seen.update(dict.fromkeys((*found.meaningless, *found.printed)))
    pairs.sort(key=lambda pair: _rank_load(pair.a.load))
    return MatchedCells(pairs, tuple(left_out), tuple(seen), tuple(refused))


def _group_by_configuration(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells by configuration: version, weights, device, build, gateway, machine; each group has one cell per load."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        one = cell.subject
        key = (one.engine, one.engine_version, one.model, one.quantization, one.weights_id, one.device, one.build,
               one.through_gateway, one.url, cell.machine)  # fmt: skip
        found.setdefault(key, []).append(cell)
    return list(found.values())


def _select_valid(cells: Sequence[Cell], left_out: list[str]) -> list[Cell]:
    found = []
    for cell in cells:
        if wrong := list_invalid_reasons(cell):
            left_out.append(f"{cell.subject.engine}, {describe_load(cell.load)}: {'; '.join(wrong)}")
        else:
            found.append(cell)
    return found


def _select_newest(cells: Sequence[Cell]) -> list[Cell]:
    """The newest cell of each load."""
    return list({_make_load_key(cell.load): cell for cell in sorted(cells, key=lambda cell: cell.at)}.values())


def _find_partner(cell: Cell, others: Sequence[Cell]) -> Cell | None:
    """The cell under the same load: from the same run if there is one, otherwise the newest."""
    same = [
        other for other in others if _make_load_key(other.load) == _make_load_key(cell.load) and other.id != cell.id
    ]
    return max(same, key=lambda other: (other.run == cell.run, other.at), default=None)


def _make_load_key(load: Load) -> LoadKey:
    return (
        load.arrivals, load.concurrency, load.requests_per_s, load.burst, load.trace, load.prompt_tokens,
        load.output_tokens, load.shared_prefix_tokens, load.sessions, load.scenario,
    )  # fmt: skip


def _rank_load(load: Load) -> tuple[float, float, int, int]:
    return (load.concurrency or load.sessions or 0, load.requests_per_s or 0.0, load.prompt_tokens, load.output_tokens)


def _make_no_cells_error(side: str, left_out: Sequence[str]) -> UsageError:
    cause = "; ".join(dict.fromkeys(left_out)) or "it has no cells"
    return UsageError(f"{side} has no valid cell to compare", cause=cause, hint=HINT)


def _make_not_comparable_error(a: Sequence[Cell], b: Sequence[Cell], tries: Sequence[MatchedCells]) -> UsageError:
    refused = min((found.refused for found in tries if found.refused), key=len, default=())
    if not refused:
        loads = [" · ".join(dict.fromkeys(describe_load(cell.load) for cell in side)) for side in (a, b)]
        cause = f"A was measured with {loads[0]}; B with {loads[1]}"
        return UsageError("A and B have no load in common", cause=cause, hint=HINT)
    names = {one.what for one in refused}
    accept = f"accept the difference with {' '.join(f'--allow {name}' for name in sorted(names))}; or "
    return UsageError(
        "A and B are not comparable",
        cause="; ".join(map(describe_difference, refused)),
        hint=f"{accept if names <= set(ALLOWED) else ''}{HINT}",
    )
