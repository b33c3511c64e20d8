"""Turns a decision into a replica for the simulation: its passes, slots, cache and cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bedplate.decide.candidates import convert_model, make_candidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.choose import LAST_RESORT, decide
from bedplate.decide.estimate.calibration import Band
from bedplate.decide.estimate.expectation import compute_expectation
from bedplate.decide.evidence import gather_evidence
from bedplate.decide.layouts import list_layouts
from bedplate.decide.load import solve_load, sum_request_s
from bedplate.decide.memory import get_kv_bytes_on_device
from bedplate.decide.simulate.fleet import Fleet, Transfer
from bedplate.decide.simulate.outcome import CardPrice
from bedplate.decide.simulate.replica import BLOCK_TOKENS, ReplicaLimits, Steps
from bedplate.decide.simulate.times import MeanLengths, make_replica_times
from bedplate.decide.wording import join_alternatives
from bedplate.engines import Engine as InferenceEngine
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.chips import find_accelerator_chip
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.unpack import make_dequantized
from bedplate.values import (
    Decision,
    Fit,
    Hardware,
    Model,
    Parallelism,
    RequestLoad,
    Settings,
    Workload,
    replace_fields,
)
from bedplate.values.intent import Operations
from bedplate.values.result import Result
from bedplate.values.simulation import ReplicaDescription, RouterName

MACHINE_CARDS = (1, 2, 4, 8)
"""Cards of one machine, as they are sold."""
SEVERAL_MACHINES = (2, 4, 8)
"""Numbers of the largest machine that one replica may span."""
USUAL_PASS_TOKENS = 8192
"""Tokens of one pass, if neither the plan nor the engine defaults set it."""


def _make_unsolved_load(workload: Workload, replicas: int) -> RequestLoad:
    return workload.make_load()


class Deployment(NamedTuple):
    steps: Steps
    limits: ReplicaLimits
    transfer: Transfer
    spread: Band
    cards: int
    """Cards of one replica."""
    paid: CardPrice
    replica: ReplicaDescription
    """The description of a replica for the output."""
    solve_load: Callable[[Workload, int], RequestLoad] = _make_unsolved_load
    """The load of a workload on this many replicas, by the closed form of `plan`."""

    def make_fleet(
        self, replicas: int, *, router: RouterName = "least-loaded", prefills: int = 0, seed: int = 0
    ) -> Fleet:
        return Fleet(self.steps, self.limits, replicas, router, prefills, self.transfer, seed)


def make_deployment(
    hardware: Hardware,
    model: Model,
    decision: Decision,
    workload: Workload,
    lengths: MeanLengths,
    *,
    operations: Operations | None = None,
    results: tuple[Result, ...] = (),
    measured_on: Hardware | None = None,
) -> Deployment:
    """One replica of the decision; with a paged cache, it has at least the engine's default number of slots.

    `results` were measured on `measured_on`; `None`: on `hardware`.
    """
    if model.task != "generate":
        raise UsageError(f"{model.name} has the task {model.task}, but only text generation can be simulated")
    if decision.engine is None or decision.settings is None or decision.weights is None or decision.memory is None:
        first = decision.refused[0] if decision.refused else None
        raise NotPossible(
            f"{model.name} cannot be served on {name_hardware(hardware)} as requested, so there is nothing to simulate",
            cause=f"{first.engine}: {first.why}" if first else None,
            hint=join_alternatives(decision.hints),
        )
    engine, settings, memory = engine_by_id(decision.engine), decision.settings, decision.memory
    whole = (make_dequantized(model) or model) if decision.unpacks else model
    stored = convert_model(whole, decision.weights)
    machine = replace_fields(hardware, accelerators=(), links=()) if settings.device == "cpu" else hardware
    layout = replace_fields(decision.parallelism, data=1)
    limits = _compute_limits(engine, settings, memory, stored, layout, workload)
    factor = gather_evidence(measured_on or hardware, whole, results).get_factor(engine.id, settings.device)
    kv_bits = engine.get_stored_cache_bits(settings.kv_type)
    found = make_replica_times(
        machine, stored, engine.id, layout, lengths, slots=limits.slots, batch_tokens=limits.batch_tokens,
        kv_bits=kv_bits, offload=memory.offload, factor=factor,
    )  # fmt: skip
    if found is None:
        raise NotPossible(
            f"the speed of {model.name} on {name_hardware(machine)} cannot be estimated, so it cannot be simulated",
            hint="bedplate probe --measure measures this machine's memory bandwidth",
        )
    prices = operations or Operations()
    cards = layout.tensor * layout.pipeline
    replica = ReplicaDescription(
        engine=engine.id,
        model=model.name,
        quantization=decision.quantization,
        hardware=name_hardware(machine),
        parallelism=layout,
        cards=cards,
        slots=limits.slots,
        batch_tokens=limits.batch_tokens,
        kv_tokens=limits.kv_blocks * limits.block_tokens,
        context_tokens=settings.context_tokens,
        source=found.source,
        low=found.spread.low,
        high=found.spread.high,
    )
    paid = CardPrice(prices.price_per_hour, prices.watts, prices.electricity_price)
    each = max(1, decision.max_concurrency // max(1, decision.parallelism.data))

    def solve_fleet_load(asked: Workload, replicas: int) -> RequestLoad:
        most = each * replicas

        def estimate_request_s(in_flight: int) -> float | None:
            expected = compute_expectation(
                machine, stored, engine.id, replace_fields(layout, data=replicas),
                replace_fields(asked, concurrency=in_flight), slots=max(1, -(-min(in_flight, most) // replicas)),
                offload=memory.offload, factor=factor, kv_bits=kv_bits,
            )  # fmt: skip
            return sum_request_s(expected, asked)

        if asked.depends_on_latency:
            return solve_load(asked, estimate_request_s, most)
        return asked.make_load(estimate_request_s(asked.compute_in_flight()))

    return Deployment(found.steps, limits, found.transfer, found.spread, cards, paid, replica, solve_fleet_load)


def list_deployments(
    hardware: Hardware,
    model: Model,
    workload: Workload,
    lengths: MeanLengths,
    wanted: str | None = None,
    *,
    operations: Operations | None = None,
    results: tuple[Result, ...] = (),
) -> tuple[Deployment, ...]:
    """A replica of every layout on every machine size of this chip, whatever number of cards `hardware` has.

    The engine and the quantization are those that `plan` chooses on the largest machine, so that fleets differ in
    nothing but their layout. A machine without accelerators, or with an unknown chip, comes in one size.
    """
    sizes = _list_machines(hardware)
    decision, machine = _plan_largest(sizes, model, workload, wanted, operations, results)

    def make_one(size: Hardware, shape: Decision) -> Deployment:
        return make_deployment(
            size, model, shape, workload, lengths, operations=operations, results=results, measured_on=hardware
        )

    found = tuple(
        make_one(size, shape)
        for size in sizes
        for shape in _list_replica_layouts(size, machine, model, decision, workload, operations)
    )
    return found or (make_one(machine, decision),)


def _list_machines(hardware: Hardware) -> list[Hardware]:
    """The machines of this chip, the smallest first."""
    chip = find_accelerator_chip(hardware.accelerators[0]) if hardware.accelerators else None
    if chip is None:
        return [hardware]
    found: list[Hardware] = []
    largest = MACHINE_CARDS[-1]
    for count in (*MACHINE_CARDS, *(largest * machines for machines in SEVERAL_MACHINES)):
        try:
            found.append(make_simulated_hardware({"accelerator": chip.name, "count": count}))
        except UsageError:
            break  # a machine has only one of these chips
    return found or [hardware]


def _plan_largest(
    sizes: list[Hardware],
    model: Model,
    workload: Workload,
    wanted: str | None,
    operations: Operations | None,
    results: tuple[Result, ...],
) -> tuple[Decision, Hardware]:
    """The decision for one machine of the largest size, or for several if only they run a serving engine."""
    single = [one for one in sizes if one.nodes == 1][-1]
    first: Decision | None = None
    for machine in (single, *(one for one in sizes if one.nodes > 1)):
        decision = decide(machine, model, workload, wanted, operations=operations, results=results)
        first = first or decision
        within = decision.memory is not None and decision.memory.offload is None
        if decision.fits and within and decision.reasons[0].rule != LAST_RESORT:
            return decision, machine
    return first or decision, single


def _list_replica_layouts(
    machine: Hardware,
    planned_on: Hardware,
    model: Model,
    decision: Decision,
    workload: Workload,
    operations: Operations | None,
) -> Iterator[Decision]:
    """The decision in every layout in which one replica uses all cards of the machine and fits."""
    if decision.engine is None or decision.weights is None or decision.settings is None:
        return
    if decision.settings.device == "cpu" or not machine.accelerators:
        if machine is planned_on:
            yield replace_fields(decision, parallelism=Parallelism())
        return
    if machine.nodes > max(1, planned_on.nodes):
        return  # one machine is enough for a replica, and links between machines are slower
    engine = engine_by_id(decision.engine)
    whole = (make_dequantized(model) or model) if decision.unpacks else model
    case = DecisionCase(machine, whole, workload, operations or Operations())
    target = engine.find_target(machine)
    stored, evidence = convert_model(whole, decision.weights), gather_evidence(machine, whole, ())
    for layout in list_layouts(machine, engine, stored):
        if target is None or layout.data > 1 or layout.tensor * layout.pipeline != len(machine.accelerators):
            continue
        one = make_candidate(engine, target, decision.weights, stored, layout, case, evidence)
        if one.fit.fits and one.fit.offload is None:
            yield replace_fields(
                decision, parallelism=layout, settings=one.settings, memory=one.fit, max_concurrency=one.max_concurrency
            )  # fmt: skip


def name_hardware(hardware: Hardware) -> str:
    return hardware.accelerators[0].name if hardware.accelerators else hardware.cpu.name or "a CPU"


def _compute_limits(
    engine: InferenceEngine, settings: Settings, memory: Fit, model: Model, layout: Parallelism, workload: Workload
) -> ReplicaLimits:
    groups, longest = max(1, layout.attention_data), float(settings.context_tokens)
    batch = (settings.batch_tokens or engine.estimate.pass_tokens or USUAL_PASS_TOKENS) * groups
    if not engine.paged:
        # The whole context is reserved for each slot.
        each = -(-settings.context_tokens // BLOCK_TOKENS)
        return ReplicaLimits(
            settings.slots, max(batch, settings.slots + 1), settings.slots * each, reserves=True, longest=longest
        )
    need = memory.devices[0]
    room = (need.usable_bytes or 0) - need.high_bytes + need.kv_bytes
    tokens = workload.request_tokens
    blocks = int(room * groups / max(1.0, get_kv_bytes_on_device(model, tokens, layout) / tokens)) // BLOCK_TOKENS
    slots = max(settings.slots, engine.default_slots)
    slots = min(slots, engine.max_slots) if engine.max_slots else slots
    slots = max(1, min(slots, blocks))
    return ReplicaLimits(
        slots, max(batch, slots + 1), max(1, blocks), reserves=engine.estimate.reserves_answer, longest=longest
    )
