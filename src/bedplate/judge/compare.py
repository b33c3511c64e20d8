"""Stay, migrate or not proven: two subjects under the same loads, by the rules of the source articles (docs/rules.md).

"What is a fair engine comparison? Same model, quantization, prompts, output lengths, hardware, warmup, and metrics."
"The winner is the engine that satisfies your deployment constraint with measured headroom."
"A repeatable harness matters more than a single impressive run."
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from bedplate.decide.evidence import PROVEN_GAIN
from bedplate.engines import load_engines
from bedplate.judge.answers import compare_answers
from bedplate.judge.effect import compare_target_shares, estimate_effect, estimate_share_effect
from bedplate.judge.matching import CellPair, match_cells
from bedplate.judge.weighing import METRICS, SHARES, ComparisonFacts, ErrorCounts, decide_verdict, explain_loss
from bedplate.measure.summary import compute_spent, list_samples, summarize_cell
from bedplate.values.cost import CostPerMillion, Price
from bedplate.values.record import replace_fields
from bedplate.values.run import Cell, Quality
from bedplate.values.structured import StructuredOutput
from bedplate.values.verdict import (
    TOLERANCE,
    ComparedEngine,
    CostComparison,
    Effect,
    Metric,
    MetricName,
    OperatingCost,
    Verdict,
    name_sides,
)
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
    metrics: Sequence[MetricName] = (),
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Compares b, the challenger, with a, the engine in service. Raises UsageError if no cells are comparable.

    `prices` are those of the machines that each side was measured on. `chance` is the error probability of the
    verdict; a caller that compares repeatedly passes a smaller one.
    `same_work`: both sides got the same requests in each round.
    `metrics` decide instead of speed; wrong answers and errors count in any case. `tolerance`: a larger loss is worse.
    """
    found = match_cells(a, b, allow)
    pairs, confidence = found.pairs, 1 - chance / (len(found.pairs) * max(1, len(metrics)))
    estimate = functools.partial(estimate_effect, confidence=confidence, same_work=same_work)
    main = _drop_missing(_estimate_main_effect(pair, estimate) for pair in pairs)
    ttft = _drop_missing(estimate(pair.a, pair.b, "ttft_ms") for pair in pairs)
    tpot = _drop_missing(estimate(pair.a, pair.b, "tpot_ms") for pair in pairs)
    targets = (
        tuple(compare_target_shares(pair.a, pair.b, target, confidence) for pair in pairs) if target is not None else ()
    )
    one, other = (_make_side([pair[number] for pair in pairs], pairs[-1][1 - number]) for number in (0, 1))
    asked = {
        name: _estimate_metric(name, pairs, (one.quality, other.quality), estimate, confidence) for name in metrics
    }
    names = name_sides(one, other)
    case = ComparisonFacts(
        replace_fields(one, engine=names[0]), replace_fields(other, engine=names[1]), main, ttft, targets,
        _count_errors(pairs), least_gain, confidence, tolerance, asked,
        compare_answers(one.quality, other.quality),
    )  # fmt: skip
    opinion = decide_verdict(case)
    worse = explain_loss(case, opinion)
    return Verdict(
        answer=opinion.answer,
        constraint=opinion.constraint,
        text=opinion.text,
        would_prove=opinion.would_prove,
        model=pairs[0].a.subject.model,
        machine=pairs[0].a.machine,
        a=one,
        b=other,
        effects=tuple(dict.fromkeys((*main, *ttft, *tpot, *itertools.chain.from_iterable(asked.values())))),
        answers=case.answers,
        on_target=targets,
        spent=_compute_costs(pairs, prices),
        least_gain=least_gain,
        metrics=tuple(metrics),
        tolerance=tolerance,
        worse=worse,
        differences=found.differences,
        left_out=found.left_out,
    )


def _compute_costs(pairs: Sequence[CellPair], prices: tuple[Price | None, Price | None]) -> tuple[CostComparison, ...]:
    found = [
        CostComparison(load=pair.a.load, a=compute_spent(pair.a, prices[0]), b=compute_spent(pair.b, prices[1]))
        for pair in pairs
    ]
    return tuple(one for one in found if not one.a == one.b == CostPerMillion())


def _drop_missing(found: Iterable[Effect | None]) -> tuple[Effect, ...]:
    return tuple(one for one in found if one is not None)


def _estimate_main_effect(pair: CellPair, estimate: Callable[[Cell, Cell, Metric], Effect | None]) -> Effect | None:
    """Throughput if the loop is closed and tokens are counted; otherwise the request time.

    In an open loop the request rate determines the throughput of both sides.
    """
    speed = estimate(pair.a, pair.b, "output_tok_s") if pair.a.load.arrivals == "closed" else None
    return speed or estimate(pair.a, pair.b, "e2e_ms")


def _estimate_metric(
    name: MetricName,
    pairs: Sequence[CellPair],
    qualities: tuple[Quality | None, Quality | None],
    estimate: Callable[[Cell, Cell, Metric], Effect | None],
    confidence: float,
) -> tuple[Effect, ...]:
    """The effects of a metric, one for each load that has it. The answers do not depend on the load."""
    metric = METRICS[name]
    if metric in SHARES:
        return _drop_missing([estimate_share_effect(*qualities, pairs[0].a.load, metric, confidence)])
    return _drop_missing(estimate(pair.a, pair.b, metric) for pair in pairs)


def _count_errors(pairs: Sequence[CellPair]) -> ErrorCounts:
    counted: list[int] = []
    for number in (0, 1):
        samples = [sample for pair in pairs for sample in list_samples(pair[number])]
        counted += [sum(sample.outcome != "ok" for sample in samples), len(samples)]
    return ErrorCounts(*counted)


def _make_side(cells: Sequence[Cell], opposite: Cell) -> ComparedEngine:
    subject = max(cells, key=lambda cell: cell.at).subject
    return ComparedEngine(
        engine=subject.engine,
        engine_version=subject.engine_version,
        quantization=subject.quantization,
        cells=tuple(cell.id for cell in cells),
        runs=tuple(dict.fromkeys(cell.run for cell in cells)),
        quality=_find_worst_quality(cells),
        cost=_compute_operating_cost(cells, opposite),
    )


def _find_worst_quality(cells: Sequence[Cell]) -> Quality | None:
    """The worst quality of the cells; unchecked cells count last."""
    known = [cell.quality for cell in cells if cell.quality is not None]
    order = {"broken": 0, "ok": 1, "unchecked": 2}

    def rank_quality(one: Quality) -> tuple[int, float]:
        return order[one.verdict], one.agreement if one.agreement is not None else 2.0

    worst = min(known, key=rank_quality, default=None)
    if worst is None:
        return None
    # Structured output is measured only on request, so cells of other runs may lack it.
    measured = [one for cell in sorted(cells, key=lambda cell: cell.at) if (one := _get_structured(cell)) is not None]
    return replace_fields(worst, structured=measured[-1] if measured else None)


def _get_structured(cell: Cell) -> StructuredOutput | None:
    return cell.quality.structured if cell.quality is not None else None


def _compute_operating_cost(cells: Sequence[Cell], opposite: Cell) -> OperatingCost:
    subject, found = cells[-1].subject, [summarize_cell(cell) for cell in cells]
    known = load_engines().get(subject.engine)
    recipe = known.recipe if known is not None else None
    installed = [cell.subject.install_bytes for cell in cells if cell.subject.install_bytes is not None]
    return OperatingCost(
        engine=subject.engine,
        install_bytes=max(installed, default=recipe.disk_bytes if recipe is not None else None),
        start_s=max((cell.subject.start_s for cell in cells if cell.subject.start_s is not None), default=None),
        peak_memory_bytes=max((one.peak_memory_bytes for one in found if one.peak_memory_bytes), default=None),
        peak_gpu_bytes=max((one.peak_gpu_bytes for one in found if one.peak_gpu_bytes), default=None),
        effort=known.effort if known is not None else None,
        steps=tuple(_list_steps(cells[-1], opposite)),
    )


def _list_steps(cell: Cell, opposite: Cell) -> Iterable[str]:
    subject, other = cell.subject, opposite.subject
    if subject.build == "native":
        yield "compiled from source on this machine"
    known, theirs = load_engines().get(subject.engine), load_engines().get(other.engine)
    if known is None or theirs is None or subject.weights_id is None or subject.weights_id != other.weights_id:
        return
    if subject.quantization != other.quantization and "gguf" in theirs.formats and "gguf" not in known.formats:
        yield f"weights converted to {subject.quantization or 'another format'}"
