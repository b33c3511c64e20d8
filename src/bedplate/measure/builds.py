"""Does a build of an engine answer as the ready-made one does, and as the weights do in PyTorch?"""

from __future__ import annotations

from collections.abc import Sequence

from bedplate.engines.roles import REFERENCE
from bedplate.measure.agreement import (
    CHANCE,
    QUICK_TOKENS,
    Answer,
    Comparison,
    Pairs,
    Said,
    ask,
    chance,
    compare,
    floor_for,
    is_clear,
    verdict_of,
)
from bedplate.measure.prefixes import spread
from bedplate.measure.reference import reference_for
from bedplate.run.native import Verdict
from bedplate.values import Plan

PREFIXES = 120
IN_FLIGHT = 4
SHOWN = 3
SHOWN_CHARACTERS = 40


class BuildExaminer:
    """Next tokens after the fixed prefixes, on weights that a reference is shipped for."""

    async def ask(self, chosen: Plan, url: str, key: str | None) -> Sequence[Said]:
        return await ask(url, _pairs(chosen), model=chosen.model.served_name, key=key, in_flight=IN_FLIGHT)

    def judge(self, chosen: Plan, built: Sequence[Said], packaged: Sequence[Said] | None) -> Verdict:
        return judged_build(_pairs(chosen), built, packaged, floor_for(chosen))


def _pairs(chosen: Plan) -> Pairs:
    reference = reference_for(chosen.source or chosen.model)
    known = reference.known() if reference is not None else ()
    return spread([pair for pair in known if pair[1].tokens <= QUICK_TOKENS], PREFIXES)


def judged_build(pairs: Pairs, built: Sequence[Said], packaged: Sequence[Said] | None, floor: float) -> Verdict:
    """Right is what agrees with both, but for ties and as many others as rounding explains."""
    if not pairs:
        return Verdict(
            runs=True, right=True, why="it answers; there is no reference for the weights that it was tried on"
        )
    found = compare(pairs, built)
    verdict, why = verdict_of(found, floor)
    if verdict != "ok":
        words = "its answers could not be checked" if verdict == "unchecked" else "it gives wrong answers"
        return Verdict(runs=True, right=False, why=f"{words}: {why}", evidence=_evidence(found))
    reference = f"{found.agreed} of {found.answered} next tokens as {REFERENCE.name}'s"
    both = [
        (prefix, known, one, other)
        for (prefix, known), one, other in zip(pairs, built, packaged or (), strict=packaged is not None)
        if isinstance(one, Answer) and isinstance(other, Answer)
    ]
    if not both:
        return Verdict(runs=True, right=True, why=reference)
    unlike = [(prefix, known, one, other) for prefix, known, one, other in both if one.text != other.text]
    clear = sum(is_clear(known) for _, known, _, _ in both)
    clearly_unlike = [case for case in unlike if is_clear(case[1])]
    counts = f"{len(both) - len(unlike)} of {len(both)} next tokens as the ready-made engine's"
    if chance(clear - len(clearly_unlike), clear, floor) < CHANCE:
        evidence = tuple(
            f"after …{prefix[-SHOWN_CHARACTERS:]!r} it says {one.text!r}, the ready-made one {other.text!r}"
            for prefix, _, one, other in clearly_unlike[:SHOWN]
        )
        return Verdict(runs=True, right=False, why=f"it answers differently: {counts}", evidence=evidence)
    ties = len(unlike) - len(clearly_unlike)
    kinds = [f"{ties} near-tie{'s' if ties > 1 else ''}"] if ties else []
    kinds += [f"{len(clearly_unlike)} within what rounding explains"] if clearly_unlike else []
    others = f" (the rest: {', '.join(kinds)})" if kinds else ""
    return Verdict(runs=True, right=True, why=f"{counts}{others}, {reference}")


def _evidence(found: Comparison) -> tuple[str, ...]:
    return tuple(
        f"after …{one.prefix[-SHOWN_CHARACTERS:]!r} it says {'the end' if one.got is None else repr(one.got)}, "
        f"and not {one.expected!r}"
        for one in found.evidence[:SHOWN]
    )
