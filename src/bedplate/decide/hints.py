"""What a decision leaves idle, misses or ignores, with the figures. The sentences are made in wording.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from bedplate.decide.case import CHAT_SLACK, CHAT_TARGET, DecisionCase
from bedplate.decide.estimate.machine import get_machine_rates
from bedplate.decide.load import get_request_s
from bedplate.decide.rules import PICKS
from bedplate.decide.wording import describe_hint
from bedplate.engines import Engine
from bedplate.engines.base import find_cards, get_card_family
from bedplate.engines.visible import pick_cards
from bedplate.facts.chips import find_accelerator_chip
from bedplate.facts.published_weights import find_original
from bedplate.values import Decision, Hardware, Hint, LatencyTarget, Workload, replace_fields
from bedplate.values.decision import HintCause
from bedplate.values.intent import Intent

UNUSABLE_TPOT_MS, UNUSABLE_TTFT_MS = 1000.0, 60_000.0
"""From here on nobody waits for an answer: one token a second, or a minute to the first token."""
KEEPS_UP = 0.9
"""Share of the arriving requests that must be answered; the rest allows for rounding over a few iterations."""
MOST_NAMED = 3
"""Engines that a hint names."""
DEFAULT_WORKLOAD = Workload()


def add_hints(decision: Decision, case: DecisionCase, engines: Mapping[str, Engine]) -> Decision:
    """The decision with all hints; `case` has the whole machine, also the part that the engine does not use."""
    engine = engines.get(decision.engine) if decision.engine is not None else None
    found = (
        _find_unsupported_hardware(decision, case, engines)
        if engine is None
        else [
            *_find_idle_cards(decision, case, engine, engines),
            *_find_idle_nodes(decision, case, engine),
            *_find_idle_sockets(decision, case.hardware, engine),
            *_find_missed_targets(decision, case.workload),
            *_find_unusable_speed(decision, case.workload),
            *_find_waiting_requests(decision, case.workload, engine),
            *_find_unreachable_rate(decision, case),
            *_find_ignored_fields(decision, case, engine, engines),
        ]
    )
    return _set_hints(decision, (*decision.hint_details, *found))


def add_intent_hints(decision: Decision, intent: Intent, hardware: Hardware) -> Decision:
    """The decision with hints about fields of a described machine that change nothing."""
    described = intent.hardware if isinstance(intent.hardware, dict) else {}
    given = {name for name, value in described.items() if value is not None}
    ignored = [
        name
        for name, is_used in (("link", hardware.cards_per_node > 1), ("network", hardware.nodes > 1))
        if name in given and not is_used and "schema" not in given
    ]
    found = [Hint(kind="ignored-field", field=f"hardware.{name}", cause="hardware") for name in ignored]
    return _set_hints(decision, (*decision.hint_details, *found))


def _set_hints(decision: Decision, details: tuple[Hint, ...]) -> Decision:
    return replace_fields(decision, hint_details=details, hints=tuple(map(describe_hint, details)))


def _find_unsupported_hardware(decision: Decision, case: DecisionCase, engines: Mapping[str, Engine]) -> Iterator[Hint]:
    """Accelerators that no engine uses, or that are used by engines that do not run this model."""
    hardware = case.hardware
    cards, users = hardware.accelerators, _list_users(hardware, engines)
    name = cards[0].name if cards else hardware.cpu.name
    if cards and not users:
        yield Hint(
            kind="unsupported-hardware", device=name, total=len(cards), engines=_list_cpu_engines(),
            projects=_list_projects(hardware, engines),
        )  # fmt: skip
    elif not decision.hint_details:
        bare = replace_fields(hardware, accelerators=(), links=())
        able = [engine for engine in engines.values() if _has_weights(engine, bare, case)]
        on_cpu = tuple(engine.id for engine in sorted(able, key=lambda engine: engine.effort)[:MOST_NAMED])
        yield Hint(
            kind="unsupported-model", device=name, engines=users, cpu_engines=on_cpu if cards else (),
            original=find_original(case.model),
        )  # fmt: skip


def _has_weights(engine: Engine, hardware: Hardware, case: DecisionCase) -> bool:
    """Whether it runs this model on this hardware, and loads or makes weights of it."""
    target = engine.find_target(hardware)
    if target is None or engine.refuse(hardware, case.model, case.workload) is not None:
        return False
    return bool(engine.list_weights(target, case.model, case.workload))


def _list_cpu_engines() -> tuple[str, ...]:
    """The engines that are chosen for a machine without accelerators."""
    return next(rule.engines for rule in PICKS if rule.id == "hardware.cpu")


def _list_users(hardware: Hardware, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    """The engines that compute on an accelerator of this machine."""
    targets = {name: engine.find_target(hardware) for name, engine in engines.items()}
    return tuple(name for name, target in targets.items() if target is not None and target.device != "cpu")


def _list_projects(hardware: Hardware, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    families = dict.fromkeys(get_card_family(card) for card in hardware.accelerators)
    found = (engine.unplanned.get(family) for family in families for engine in engines.values())
    return tuple(project for project in found if project is not None)


def _count_used_cards(decision: Decision) -> int:
    layout, settings = decision.parallelism, decision.settings
    on_cpu = settings is None or settings.device == "cpu"
    return 0 if on_cpu else layout.tensor * layout.pipeline * layout.data


def _find_idle_cards(
    decision: Decision, case: DecisionCase, engine: Engine, engines: Mapping[str, Engine]
) -> Iterator[Hint]:
    """One hint for each kind of card."""
    cards, count = case.hardware.accelerators, _count_used_cards(decision)
    usable = find_cards(case.hardware, engine.vendors) if count else []
    named = decision.settings.cards if decision.settings is not None else ()
    # Drivers of two vendors may both number their cards from 0.
    used = {id(card) for card in (pick_cards(case.hardware, named) if named and count else usable[:count])}
    able = {id(card) for card in usable}
    families = {get_card_family(card) for card in cards if id(card) in used}
    for name in dict.fromkeys(card.name for card in cards if id(card) not in used):
        alike = [card for card in cards if card.name == name]
        idle = [card for card in alike if id(card) not in used]
        if all(id(card) in able for card in idle):
            others: tuple[str, ...] = ()
            projects: tuple[str, ...] = ()
            cause: HintCause = "enough" if _meets_workload(decision, case.workload) else "layout"
            if cause == "layout" and get_card_family(idle[0]) not in families:
                cause = "vendor"
        else:
            part = replace_fields(case.hardware, accelerators=tuple(alike))
            others = tuple(one for one in _list_able(part, case, engines) if one != engine.id)
            projects = () if others else _list_projects(part, engines)
            cause = "engine"
        yield Hint(
            kind="idle-cards", device=name, used=len(alike) - len(idle), total=len(alike), cause=cause,
            engines=others, projects=projects,
        )  # fmt: skip


def _list_able(hardware: Hardware, case: DecisionCase, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    """The simplest engines that run this model on the accelerators."""
    users = (engines[name] for name in _list_users(hardware, engines))
    able = [engine for engine in users if engine.refuse(hardware, case.model, case.workload) is None]
    return tuple(engine.id for engine in sorted(able, key=lambda engine: engine.effort)[:MOST_NAMED])


def _meets_workload(decision: Decision, workload: Workload) -> bool:
    misses_target = any(hint.kind == "missed-target" for hint in _find_missed_targets(decision, workload))
    return decision.max_concurrency >= decision.in_flight and not misses_target


def _find_idle_nodes(decision: Decision, case: DecisionCase, engine: Engine) -> Iterator[Hint]:
    hardware = case.hardware
    if not hardware.accelerators:
        return
    chip = find_accelerator_chip(hardware.accelerators[0])
    each = min(hardware.cards_per_node, (chip.per_host if chip is not None else None) or hardware.cards_per_node)
    used, total = -(-_count_used_cards(decision) // each), -(-len(hardware.accelerators) // each)
    if used < total and total > 1:
        cause: HintCause = "engine"
        if used:
            cause = "enough" if _meets_workload(decision, case.workload) else "layout"
            if cause == "layout" and "data" not in engine.ways and not engine.can_distribute(case.model):
                cause = "one-node"
        yield Hint(kind="idle-nodes", used=max(1, used), total=total, cause=cause)


def _find_idle_sockets(decision: Decision, hardware: Hardware, engine: Engine) -> Iterator[Hint]:
    sockets = hardware.cpu.sockets or 1
    if decision.settings is not None and decision.settings.device == "cpu" and sockets > 1 and not engine.spans_sockets:
        yield Hint(
            kind="idle-sockets", device=hardware.cpu.name, used=1, total=sockets, cause="engine",
            engines=_list_cpu_engines(),
        )  # fmt: skip


def _find_missed_targets(decision: Decision, workload: Workload) -> Iterator[Hint]:
    asked = workload.latency or LatencyTarget()
    expected, limit = decision.estimate, decision.limit
    for metric, took, wanted, usual in (
        ("ttft_ms", expected.ttft_ms, asked.ttft_ms, CHAT_TARGET.ttft_ms),
        ("tpot_ms", expected.tpot_ms, asked.tpot_ms, CHAT_TARGET.tpot_ms),
    ):
        if not workload.is_chat and (wanted is None or (metric == "tpot_ms" and workload.task != "generate")):
            continue
        target, slack = (wanted, 1.0) if wanted is not None else (usual, CHAT_SLACK)
        if took is None and wanted is not None:
            yield Hint(kind="unknown-target", metric=metric, target_ms=wanted)  # type: ignore[arg-type]
        elif took is not None and target is not None and took.value > target * slack:
            yield Hint(
                kind="missed-target", metric=metric, expected_ms=took.value, target_ms=target,  # type: ignore[arg-type]
                is_default=wanted is None, bottleneck=limit,
            )  # fmt: skip


def _find_unusable_speed(decision: Decision, workload: Workload) -> Iterator[Hint]:
    ttft, tpot = decision.estimate.ttft_ms, decision.estimate.tpot_ms
    if not workload.is_chat or ttft is None or tpot is None:
        return
    if ttft.value > UNUSABLE_TTFT_MS or tpot.value > UNUSABLE_TPOT_MS:
        yield Hint(
            kind="unusable-speed", expected_ms=tpot.value, request_s=get_request_s(decision.estimate, workload),
            bottleneck=decision.limit,
        )  # fmt: skip


def find_growing_queue(decision: Decision, workload: Workload) -> Hint | None:
    """Requests arrive faster than they are answered, so that the queue grows; `None` if not, or if it is unknown."""
    made, arriving = decision.estimate.output_tok_s, workload.requests_per_s
    answered = made.value / workload.output_tokens if made is not None else None
    if answered is None or arriving is None or answered >= arriving * KEEPS_UP:
        return None
    return Hint(
        kind="growing-queue", requests_per_s=arriving, answered_per_s=answered,
        machines=math.ceil(arriving / answered) if answered > 0 else None,
    )  # fmt: skip


def _find_unreachable_rate(decision: Decision, case: DecisionCase) -> Iterator[Hint]:
    """Inputs that arrive faster than the devices compute at their peak, where the speed is not predicted."""
    arriving, hardware, model = case.workload.requests_per_s, case.hardware, case.model
    if arriving is None or case.workload.task == "transcribe" or decision.estimate.output_tok_s is not None:
        return
    count = _count_used_cards(decision)
    rates = get_machine_rates(hardware if count else replace_fields(hardware, accelerators=(), links=()))
    peak_ops = rates.rate("bf16", "fp16", "fp32") if count else rates.rate("fp32")
    looked_up = sum(part.parameters for part in model.parts if part.name == "embedding")
    computed = model.parameters if model.active_parameters is None else model.active_parameters
    needed_ops = 2.0 * (computed - looked_up) * case.workload.prompt_tokens
    if not peak_ops or needed_ops <= 0 or (decision.weights is not None and "8" in decision.weights.label):
        return
    most = peak_ops * max(1, count) / needed_ops
    if most < arriving:
        yield Hint(
            kind="growing-queue", requests_per_s=arriving, answered_per_s=most, machines=math.ceil(arriving / most),
            bottleneck="compute",
        )  # fmt: skip


def _find_waiting_requests(decision: Decision, workload: Workload, engine: Engine) -> Iterator[Hint]:
    queue = find_growing_queue(decision, workload) if workload.depends_on_latency else None
    if queue is not None:
        yield queue
    slots = decision.settings.slots * decision.parallelism.data if decision.settings is not None else 0
    running = min(slots, decision.max_concurrency)
    if running < decision.in_flight:
        cause: HintCause | None = "engine" if decision.max_concurrency >= decision.in_flight else None
        # A paged cache grows with the requests: more of the usual length run than of the longest.
        usual = slots if engine.paged and workload.request_tokens > workload.usual_tokens else running
        if usual >= decision.in_flight:
            cause = "length"
        yield Hint(
            kind="waiting-requests", used=running, total=decision.in_flight, cause=cause,
            most_tokens=workload.request_tokens if cause == "length" else None,
        )  # fmt: skip


def _find_ignored_fields(
    decision: Decision, case: DecisionCase, engine: Engine, engines: Mapping[str, Engine]
) -> Iterator[Hint]:
    for field, cause, other in (
        *_list_ignored_load(case.workload),
        *_list_ignored_shape(decision, case, engine),
        *_list_ignored_operations(decision, case, engine, engines),
    ):
        yield Hint(kind="ignored-field", field=field, cause=cause, other_field=other)


IgnoredField = tuple[str, HintCause, str | None]


def _list_ignored_load(work: Workload) -> Iterator[IgnoredField]:
    """Of several fields that state the load, the first of concurrency, rate and users counts."""
    used = "concurrency" if work.concurrency is not None else "requests_per_s" if work.requests_per_s else None
    if used is None:
        return
    for name, is_given in (
        ("requests_per_s", work.requests_per_s is not None),
        ("users", work.users > 1),
        ("think_time_s", work.think_time_s is not None),
    ):
        if is_given and name != used:
            yield f"workload.{name}", "other-field", f"workload.{used}"


def _list_ignored_shape(decision: Decision, case: DecisionCase, engine: Engine) -> Iterator[IgnoredField]:
    work = case.workload
    if work.task in ("embed", "classify"):
        if work.output_tokens != DEFAULT_WORKLOAD.output_tokens:
            yield "workload.output_tokens", "task", None
        if work.structured_output:
            yield "workload.structured_output", "task", None
        if work.latency is not None and work.latency.tpot_ms is not None:
            yield "workload.latency.tpot_ms", "task", None
    elif work.structured_output and engine.server_features is not None and not engine.server_features.json_schema:
        yield "workload.structured_output", "engine", None
    if work.context_tokens is not None and work.context_tokens < work.usual_tokens:
        yield "workload.context_tokens", "other-field", "workload.prompt_tokens"
    if work.shared_prefix_tokens and not engine.reuses_prefixes:
        yield "workload.shared_prefix_tokens", "engine", None
    if any(reason.rule == "quant.stored" for reason in decision.reasons):
        yield "workload.precision_sensitive", "weights", None


def _list_ignored_operations(
    decision: Decision, case: DecisionCase, engine: Engine, engines: Mapping[str, Engine]
) -> Iterator[IgnoredField]:
    operations = case.operations
    if operations.portable and not engine.cpu and len(engine.vendors) == 1:
        yield "operations.portable", "engine", None
    if operations.incumbent is not None and operations.incumbent not in {*engines, decision.orchestrator}:
        yield "operations.incumbent", "orchestrator", None
    yield from _list_ignored_prices(decision, case)


def _list_ignored_prices(decision: Decision, case: DecisionCase) -> Iterator[IgnoredField]:
    price = case.operations.price
    unknown = decision.estimate.output_tok_s is None
    # Without the energy, the cost is unknown, not only its part for electricity.
    lacks_watts = price.electricity_price is not None and price.watts is None
    for name in ("price_per_hour", "watts", "electricity_price"):
        if getattr(price, name) is None:
            continue
        if unknown:
            yield f"operations.{name}", "unknown-speed", None
        elif lacks_watts:
            yield f"operations.{name}", "missing-field", "operations.watts"
