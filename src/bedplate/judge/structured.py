"""Compare the structured output of two sides, prompt by prompt, over the kinds that both support."""

from __future__ import annotations

import math
from typing import NamedTuple

from bedplate.values.structured import StructuredOutput, StructuredSupport


class PairedShares(NamedTuple):
    """The shares of matched answers of two sides, each with the number of prompts."""

    a: tuple[float, int]
    b: tuple[float, int]
    correlation: float = 0.0
    """Between the answers to the same prompt: 1 if both sides match the same prompts."""


def pair_structured(a: StructuredOutput | None, b: StructuredOutput | None) -> PairedShares | None:
    """`None`: one side was not measured, with other prompts, or they support no kind in common."""
    if a is None or b is None or a.prompts != b.prompts:
        return None
    if a.prompts is None:
        known = a.asked and b.asked
        return PairedShares((a.matched / a.asked, a.asked), (b.matched / b.asked, b.asked)) if known else None
    mine, theirs = ({one.prompt: one.matched for one in side.answers} for side in (a, b))
    common = [(mine[prompt], theirs[prompt]) for prompt in mine if prompt in theirs]
    count = len(common)
    if not count:
        return None
    shares = (sum(one for one, _ in common) / count, sum(other for _, other in common) / count)
    return PairedShares((shares[0], count), (shares[1], count), _compute_correlation(common))


def _compute_correlation(pairs: list[tuple[bool, bool]]) -> float:
    """The phi coefficient, corrected for continuity as in Newcombe's tenth method for paired shares."""
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if not product:
        return 0.0
    excess = float(both * neither - only_a * only_b)
    if excess > 0:
        excess = max(0.0, excess - len(pairs) / 2)
    return excess / math.sqrt(product)


def list_lost_kinds(a: StructuredOutput | None, b: StructuredOutput | None) -> tuple[StructuredSupport, ...]:
    """The kinds that a supports and b does not, as b answered them."""
    supported = {one.kind for one in a.kinds if one.is_supported} if a is not None else set()
    return tuple(one for one in (b.list_unsupported() if b is not None else ()) if one.kind in supported)
