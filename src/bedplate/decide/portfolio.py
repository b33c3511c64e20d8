"""Places several services on pools of machines, and chooses one standard engine for as many as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bedplate.decide.case import CHAT_TARGET
from bedplate.decide.choose import decide
from bedplate.decide.placement import Decides, ServiceAsk, divide_machine
from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import UsageError
from bedplate.facts.hypothetical import make_simulated_hardware, split_cards
from bedplate.values import Decision, Hardware, Model, Parallelism
from bedplate.values.intent import Intent, NodePool, Operations, Service
from bedplate.values.portfolio import Placement, Portfolio
from bedplate.values.record import replace_fields


@dataclass(frozen=True)
class ServiceRequest:
    service: Service
    model: Model
    operations: Operations

    @property
    def name(self) -> str:
        return self.service.name or self.model.name

    def decide_on(self, pool: NodePool, count: int) -> Decision:
        """The decision for this service on `count` devices of a pool."""
        machine, workload = make_pool_machine(pool, count), self.service.workload
        return decide(machine, self.model, workload, self.service.engine, operations=self.operations)


HERE = "this machine"


def place_on_one_machine(intent: Intent, models: Sequence[Model], hardware: Hardware) -> Portfolio:
    """Place the services of an intent without pools together on one machine; raises if they do not fit."""
    asks = [
        ServiceAsk(
            service.name or model.name,
            service.workload,
            _make_decider(service, model, service.operations or intent.operations),
            service.replicas,
            service.ttl is not None,
        )
        for service, model in zip(intent.services, models, strict=True)
    ]
    decisions = [part.decision for part in divide_machine(hardware, asks)]
    standard, why = _choose_standard(decisions)
    placements = [
        Placement(
            service=ask.name,
            pool=HERE if decision.fits else None,
            accelerators=ask.replicas * _count_cards(decision),
            exception=_explain_exception(decision, standard),
            decision=decision,
        )
        for ask, decision in zip(asks, decisions, strict=True)
    ]
    return Portfolio(engine=standard, text=why, placements=tuple(placements), free={}, notes=intent.notes)


def _make_decider(service: Service, model: Model, operations: Operations) -> Decides:
    return lambda hardware, workload: decide(hardware, model, workload, service.engine, operations=operations)


def _count_cards(decision: Decision) -> int:
    if decision.settings is None or decision.settings.device == "cpu":
        return 0
    return decision.parallelism.tensor * decision.parallelism.pipeline * decision.parallelism.data


def _explain_exception(decision: Decision, standard: str | None) -> str | None:
    if decision.engine in (None, standard) or not decision.reasons:
        return None
    return f"{decision.engine}: {decision.reasons[0].text} ({decision.reasons[0].rule})"


def make_portfolio(intent: Intent, models: Sequence[Model]) -> Portfolio:
    """Place the services of an intent on its pools; `models` are those of the services, in their order."""
    asked = [
        ServiceRequest(service, model, service.operations or intent.operations)
        for service, model in zip(intent.services, models, strict=True)
    ]
    alone = [_decide_anywhere(one, intent.pools) for one in asked]
    standard, why = _choose_standard(alone)
    free = {pool.name: pool.count for pool in intent.pools}
    placements: dict[int, Placement] = {}
    # The largest models come first; small ones fit in what is left.
    for index in sorted(range(len(asked)), key=lambda position: -asked[position].model.weight_bytes):
        placements[index] = _place_service(asked[index], alone[index], standard, intent.pools, free)
    pools = {pool.name: pool for pool in intent.pools}
    placed = {index: _add_bits(asked[index], one, pools, free) for index, one in placements.items()}
    return Portfolio(
        engine=standard,
        text=why,
        placements=tuple(placed[index] for index in range(len(asked))),
        free=free,
        notes=intent.notes,
    )


def _choose_standard(alone: Sequence[Decision]) -> tuple[str | None, str]:
    wins = Counter(decision.engine for decision in alone if decision.engine is not None)
    if not wins:
        return None, "no service fits any pool"
    most = max(wins.values())
    best = [name for name, count in wins.items() if count == most]
    standard = STANDARD_ENGINE if STANDARD_ENGINE in best else min(best)
    count, name = wins[standard], engine_by_id(standard).name
    whom = "the only service" if len(alone) == 1 else f"{count} of {len(alone)} services"
    return standard, f"{name} is the best choice for {whom}; one standard engine costs less to operate than several"


def _decide_anywhere(asked: ServiceRequest, pools: Sequence[NodePool]) -> Decision:
    """The decision for the largest pool in which the service fits while all pools are free."""
    decisions = [
        asked.decide_on(pool, pool.count)
        for pool in sorted(pools, key=lambda pool: -_compute_worth(pool, pool.count))
        if asked.service.pool in (None, pool.name)
    ]
    return next((decision for decision in decisions if decision.fits), decisions[0])


def _compute_worth(pool: NodePool, count: int) -> int:
    """The total accelerator memory of this many devices, as a measure of what a placement costs."""
    return count * sum(card.memory_bytes or 0 for card in make_pool_machine(pool, 1).accelerators)


def make_pool_machine(pool: NodePool, count: int) -> Hardware:
    """`count` devices of a pool as one machine."""
    described = {
        "accelerator": pool.accelerator,
        "count": count if pool.accelerator else None,
        "gpus_per_node": min(pool.gpus_per_node, count) if pool.accelerator and pool.gpus_per_node else None,
        "network": pool.network if pool.network not in (None, "none") else None,
        "cpu": pool.cpu,
        "cores": pool.cores,
        "ram_gb": pool.ram_gb,
        "os": pool.os,
        "arch": pool.arch,
    }
    if len(split_cards(pool.accelerator)) > 1:
        raise UsageError(
            f"pool {pool.name}: accelerator: all nodes of a pool have the same accelerators",
            hint="describe nodes with others as a pool of their own",
        )
    try:
        return make_simulated_hardware({name: value for name, value in described.items() if value is not None})
    except UsageError as error:
        words = error.message.replace("hardware.", "")
        hint = "count is the number of accelerators in the whole pool" if words.startswith("count: is ") else error.hint
        raise UsageError(f"pool {pool.name}: {words}", cause=error.cause, hint=hint) from error


def _place_service(
    asked: ServiceRequest, alone: Decision, standard: str | None, pools: Sequence[NodePool], free: dict[str, int]
) -> Placement:
    """Take the fewest devices that hold all requests; the exception says why another engine than the standard runs."""
    own = alone.engine if alone.engine is not None else standard
    reason = alone.reasons[0] if alone.reasons and own != standard else None
    exception = f"{own}: {reason.text} ({reason.rule})" if reason is not None else None
    best: tuple[tuple[bool, float, str], int, NodePool, Decision] | None = None
    replicas = asked.service.replicas
    for pool in pools:
        if asked.service.pool not in (None, pool.name):
            continue
        for count in _list_counts(free[pool.name] // replicas):
            decision = asked.decide_on(pool, count)
            if _holds(decision):
                found = (_rank(decision, pool, count), count, pool, decision)
                best = found if best is None or found[0] < best[0] else best
                if _is_readable(decision):
                    break
    if best is None:
        nothing = Parallelism()
        lost = replace_fields(alone, engine=None, fits=False, launch=None, parallelism=nothing) if alone.fits else alone
        return Placement(service=asked.name, pool=None, accelerators=0, exception=exception, decision=lost)
    _, count, pool, decision = best
    free[pool.name] -= count * replicas
    if decision.engine == standard:
        exception = None
    elif exception is None and decision.reasons:
        exception = f"{decision.engine}: {decision.reasons[0].text} ({decision.reasons[0].rule})"
    used = count * replicas
    return Placement(service=asked.name, pool=pool.name, accelerators=used, exception=exception, decision=decision)


def _add_bits(
    asked: ServiceRequest, placed: Placement, pools: Mapping[str, NodePool], free: dict[str, int]
) -> Placement:
    """Use free devices for weights with more bits, if they were quantized only so that all requests fit."""
    now = placed.decision
    if placed.pool is None or now.weights is None or not now.weights.is_chosen or not _has_few_bits(now):
        return placed
    pool, replicas = pools[placed.pool], asked.service.replicas
    for count in _list_counts((placed.accelerators + free[pool.name]) // replicas):
        if count * replicas <= placed.accelerators:
            continue
        decision = asked.decide_on(pool, count)
        if _holds(decision) and decision.engine == now.engine and not _has_few_bits(decision):
            free[pool.name] -= count * replicas - placed.accelerators
            return replace_fields(placed, accelerators=count * replicas, decision=decision)
    return placed


def _has_few_bits(decision: Decision) -> bool:
    return decision.quantization is not None and decision.quantization.upper().endswith(("INT4", "FP4"))


def _holds(decision: Decision) -> bool:
    return decision.fits and decision.max_concurrency >= decision.in_flight


def _rank(decision: Decision, pool: NodePool, count: int) -> tuple[bool, float, str]:
    """Sort key: placements that meet the TPOT target of a chat first, the smallest on top; then by time per token."""
    if _is_readable(decision) or decision.estimate.tpot_ms is None:
        return False, _compute_worth(pool, count), pool.name
    return True, decision.estimate.tpot_ms.value, pool.name


def _is_readable(decision: Decision) -> bool:
    """Whether tokens arrive as fast as a chat needs; always true for models that generate no text."""
    tpot = decision.estimate.tpot_ms
    return tpot is None or tpot.value <= (CHAT_TARGET.tpot_ms or 0)


def _list_counts(free: int) -> list[int]:
    """Device counts to try, in ascending order."""
    sizes = [size for size in (1, 2, 4, 8) if size <= free]
    return [*sizes, *range(16, free + 1, 8)]
