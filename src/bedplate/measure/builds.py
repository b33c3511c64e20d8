"""Check a native build of an engine: compare its answers with the packaged build and with the float32 reference."""

from __future__ import annotations

from collections.abc import Sequence

from bedplate.engines.roles import REFERENCE
from bedplate.measure.agreement import (
    CHANCE,
    QUICK_TOKENS,
    CompletionAnswer,
    Pairs,
    Reply,
    TokenComparison,
    ask,
    choose_floor,
    compare,
    compute_tail_probability,
    is_clear,
    judge_comparison,
)
from bedplate.measure.prefixes import choose_spread
from bedplate.measure.reference import find_reference
from bedplate.run.native import BuildTestResult
from bedplate.values import Plan

PREFIXES = 120
IN_FLIGHT = 4
SHOWN = 3
SHOWN_CHARACTERS = 40


class BuildExaminer:
    """Compares next tokens after the fixed prefixes, for weights with a shipped reference."""

    async def ask(self, chosen: Plan, url: str, key: str | None) -> Sequence[Reply]:
        return await ask(url, _choose_pairs(chosen), model=chosen.model.served_name, key=key, in_flight=IN_FLIGHT)

    def judge(self, chosen: Plan, built: Sequence[Reply], packaged: Sequence[Reply] | None) -> BuildTestResult:
        return judge_build(_choose_pairs(chosen), built, packaged, choose_floor(chosen))


def _choose_pairs(chosen: Plan) -> Pairs:
    reference = find_reference(chosen.source or chosen.model)
    known = reference.list_known() if reference is not None else ()
    return choose_spread([pair for pair in known if pair[1].tokens <= QUICK_TOKENS], PREFIXES)


def judge_build(
    pairs: Pairs, built: Sequence[Reply], packaged: Sequence[Reply] | None, floor: float
) -> BuildTestResult:
    """A build is correct if it agrees with both, except for near ties and what rounding explains."""
    if not pairs:
        return BuildTestResult(
            runs=True, right=True, why="it answers; there is no reference for the weights that were used"
        )
    found = compare(pairs, built)
    verdict, why = judge_comparison(found, floor)
    if verdict != "ok":
        words = "its answers could not be checked" if verdict == "unchecked" else "it gives wrong answers"
        return BuildTestResult(runs=True, right=False, why=f"{words}: {why}", evidence=_list_evidence(found))
    reference = f"greedy-token agreement with {REFERENCE.name} in float32: {found.agreed}/{found.answered}"
    both = [
        (prefix, known, one, other)
        for (prefix, known), one, other in zip(pairs, built, packaged or (), strict=packaged is not None)
        if isinstance(one, CompletionAnswer) and isinstance(other, CompletionAnswer)
    ]
    if not both:
        return BuildTestResult(runs=True, right=True, why=reference)
    different = [(prefix, known, one, other) for prefix, known, one, other in both if one.text != other.text]
    clear = sum(is_clear(known) for _, known, _, _ in both)
    clearly_different = [case for case in different if is_clear(case[1])]
    counts = f"greedy-token agreement with the packaged build: {len(both) - len(different)}/{len(both)}"
    if compute_tail_probability(clear - len(clearly_different), clear, floor) < CHANCE:
        evidence = tuple(
            f"after …{prefix[-SHOWN_CHARACTERS:]!r} the build gives {one.text!r}, the packaged build {other.text!r}"
            for prefix, _, one, other in clearly_different[:SHOWN]
        )
        return BuildTestResult(runs=True, right=False, why=f"it answers differently: {counts}", evidence=evidence)
    ties = len(different) - len(clearly_different)
    kinds = [f"{ties} near-tie{'s' if ties > 1 else ''}"] if ties else []
    kinds += [f"{len(clearly_different)} explained by rounding"] if clearly_different else []
    others = f" (the rest: {', '.join(kinds)})" if kinds else ""
    return BuildTestResult(runs=True, right=True, why=f"{counts}{others}; {reference}")


def _list_evidence(found: TokenComparison) -> tuple[str, ...]:
    return tuple(
        f"after …{one.prefix[-SHOWN_CHARACTERS:]!r} the build gives "
        f"{'the end of the text' if one.got is None else repr(one.got)} instead of {one.expected!r}"
        for one in found.evidence[:SHOWN]
    )
