"""Turns a decision into a replica for the simulation: its passes, slots, cache and cards."""

from __future__ import annotations

from typing import NamedTuple

from bedplate.decide.candidates import convert_model
from bedplate.decide.estimate.calibration import Band
from bedplate.decide.evidence import gather_evidence
from bedplate.decide.memory import get_kv_bytes_on_device
from bedplate.decide.simulate.fleet import Fleet, Transfer
from bedplate.decide.simulate.outcome import CardPrice
from bedplate.decide.simulate.replica import BLOCK_TOKENS, ReplicaLimits, Steps
from bedplate.decide.simulate.times import MeanLengths, make_replica_times
from bedplate.decide.wording import join_alternatives
from bedplate.engines import Engine as InferenceEngine
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.unpack import make_dequantized
from bedplate.values import Decision, Fit, Hardware, Model, Parallelism, Settings, Workload, replace_fields
from bedplate.values.intent import Operations
from bedplate.values.result import Result
from bedplate.values.simulation import ReplicaDescription, RouterName

USUAL_PASS_TOKENS = 8192
"""Tokens of one pass, if neither the plan nor the engine defaults set it."""


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
) -> Deployment:
    """One replica of the decision; with a paged cache, it has at least the engine's default number of slots."""
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
    evidence = gather_evidence(hardware, whole, results)
    kv_bits = 8.0 if settings.kv_type == "fp8" else 16.0
    found = make_replica_times(
        machine, stored, engine.id, layout, lengths, slots=limits.slots, batch_tokens=limits.batch_tokens,
        kv_bits=kv_bits, offload=memory.offload, factor=evidence.get_factor(engine.id, settings.device),
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
    return Deployment(found.steps, limits, found.transfer, found.spread, cards, paid, replica)


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
