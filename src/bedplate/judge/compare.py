"""Stay, migrate or not proven: two subjects under the same loads, by the rules of the source articles (docs/rules.md).

"What is a fair engine comparison? Same model, quantization, prompts, output lengths, hardware, warmup, and metrics."
"The winner is the engine that satisfies your deployment constraint with measured headroom."
"A repeatable harness matters more than a single impressive run."
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

from bedplate.decide.evidence import PROVEN_GAIN
from bedplate.engines import all_engines
from bedplate.judge.effect import effect, on_target
from bedplate.judge.matching import Pair, matched
from bedplate.judge.weighing import Case, Errors, weighed
from bedplate.measure.summary import all_samples, spent, summarized
from bedplate.values.cost import PerMillion, Price
from bedplate.values.run import Cell, Quality
from bedplate.values.verdict import Cost, Effect, Metric, Side, Spent, Verdict
from bedplate.values.workload import LatencyTarget

CHANCE = 0.05
"""Error probability over all loads together: with four loads, each interval that decides is a 98.75 % interval."""


def compare(
    a: Sequence[Cell],
    b: Sequence[Cell],
    *,
    target: LatencyTarget | None = None,
    allow: Collection[str] = (),
    least_gain: float = PROVEN_GAIN,
    prices: tuple[Price | None, Price | None] = (None, None),
    chance: float = CHANCE,
    same_work: bool = False,
) -> Verdict:
    """Compares b, the challenger, with a, the engine in service. Raises BadQuestion if no cells are comparable.

    `prices` are those of the machines that each side was measured on. `chance` is the error probability of the
    verdict; a caller that compares repeatedly passes a smaller one.
    `same_work`: both sides got the same requests in each round.
    """
    found = matched(a, b, allow)
    pairs, confidence = found.pairs, 1 - chance / len(found.pairs)
    estimate = functools.partial(effect, confidence=confidence, same_work=same_work)
    main = _known(_main(pair, estimate) for pair in pairs)
    ttft = _known(estimate(pair.a, pair.b, "ttft_ms") for pair in pairs)
    tpot = _known(estimate(pair.a, pair.b, "tpot_ms") for pair in pairs)
    targets = tuple(on_target(pair.a, pair.b, target, confidence) for pair in pairs) if target is not None else ()
    one, other = (_side([pair[number] for pair in pairs], pairs[-1][1 - number]) for number in (0, 1))
    case = Case(one, other, main, ttft, targets, _errors(pairs), least_gain, confidence)
    opinion = weighed(case)
    return Verdict(
        answer=opinion.answer,
        constraint=opinion.constraint,
        text=opinion.text,
        would_prove=opinion.would_prove,
        model=pairs[0].a.subject.model,
        machine=pairs[0].a.machine,
        a=one,
        b=other,
        effects=(*main, *ttft, *tpot),
        on_target=targets,
        spent=_spent(pairs, prices),
        least_gain=least_gain,
        differences=found.differences,
        left_out=found.left_out,
    )


def _spent(pairs: Sequence[Pair], prices: tuple[Price | None, Price | None]) -> tuple[Spent, ...]:
    found = [Spent(load=pair.a.load, a=spent(pair.a, prices[0]), b=spent(pair.b, prices[1])) for pair in pairs]
    return tuple(one for one in found if not one.a == one.b == PerMillion())


def _known(found: Iterable[Effect | None]) -> tuple[Effect, ...]:
    return tuple(one for one in found if one is not None)


def _main(pair: Pair, estimate: Callable[[Cell, Cell, Metric], Effect | None]) -> Effect | None:
    """Throughput if the loop is closed and tokens are counted; otherwise the request time.

    In an open loop the request rate determines the throughput of both sides.
    """
    speed = estimate(pair.a, pair.b, "output_tok_s") if pair.a.load.arrivals == "closed" else None
    return speed or estimate(pair.a, pair.b, "e2e_ms")


def _errors(pairs: Sequence[Pair]) -> Errors:
    counted: list[int] = []
    for number in (0, 1):
        samples = [sample for pair in pairs for sample in all_samples(pair[number])]
        counted += [sum(sample.outcome != "ok" for sample in samples), len(samples)]
    return Errors(*counted)


def _side(cells: Sequence[Cell], opposite: Cell) -> Side:
    subject = max(cells, key=lambda cell: cell.at).subject
    return Side(
        engine=subject.engine,
        engine_version=subject.engine_version,
        quantization=subject.quantization,
        cells=tuple(cell.id for cell in cells),
        runs=tuple(dict.fromkeys(cell.run for cell in cells)),
        quality=_quality(cells),
        cost=_cost(cells, opposite),
    )


def _quality(cells: Iterable[Cell]) -> Quality | None:
    """The worst quality of the cells; unchecked cells count last."""
    known = [cell.quality for cell in cells if cell.quality is not None]
    order = {"broken": 0, "ok": 1, "unchecked": 2}

    def badness(one: Quality) -> tuple[int, float]:
        return order[one.verdict], one.agreement if one.agreement is not None else 2.0

    return min(known, key=badness, default=None)


def _cost(cells: Sequence[Cell], opposite: Cell) -> Cost:
    subject, found = cells[-1].subject, [summarized(cell) for cell in cells]
    known = all_engines().get(subject.engine)
    recipe = known.recipe if known is not None else None
    installed = [cell.subject.install_bytes for cell in cells if cell.subject.install_bytes is not None]
    return Cost(
        engine=subject.engine,
        install_bytes=max(installed, default=recipe.disk_bytes if recipe is not None else None),
        start_s=max((cell.subject.start_s for cell in cells if cell.subject.start_s is not None), default=None),
        peak_memory_bytes=max((one.peak_memory_bytes for one in found if one.peak_memory_bytes), default=None),
        peak_gpu_bytes=max((one.peak_gpu_bytes for one in found if one.peak_gpu_bytes), default=None),
        effort=known.effort if known is not None else None,
        steps=tuple(_steps(cells[-1], opposite)),
    )


def _steps(cell: Cell, opposite: Cell) -> Iterable[str]:
    subject, other = cell.subject, opposite.subject
    if subject.build == "native":
        yield "compiled from source on this machine"
    known, theirs = all_engines().get(subject.engine), all_engines().get(other.engine)
    if known is None or theirs is None or subject.weights_id is None or subject.weights_id != other.weights_id:
        return
    if subject.quantization != other.quantization and "gguf" in theirs.formats and "gguf" not in known.formats:
        yield f"weights converted to {subject.quantization or 'another format'}"
