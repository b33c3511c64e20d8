"""Checks a plan as its engine would, before it is shown. It uses the launch, not the figures of the search.

The rules of one engine are in that engine's file; those that hold for several engines are in `general` and `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bedplate.decide.verify.general import GENERAL_RULES
from bedplate.decide.verify.memory import MEMORY_RULES
from bedplate.engines import get_plan_engine, load_engines
from bedplate.engines.base import find_cards, parse_capability
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.visible import pick_cards
from bedplate.facts.chips import find_accelerator_chip
from bedplate.facts.known_models import apply_label
from bedplate.values import Accelerator, Hardware, Launch, Model, Plan

__all__ = ["PlanFault", "find_first_fault", "list_faults", "list_launch_rules"]


class PlanFault(NamedTuple):
    """A reason why the engine would not serve this plan."""

    rule: str
    why: str
    source: str
    hint: str | None


def find_first_fault(plan: Plan, launch: Launch, hardware: Hardware) -> PlanFault | None:
    return next(_generate_faults(plan, launch, hardware), None)


def list_faults(plan: Plan, launch: Launch, hardware: Hardware) -> tuple[PlanFault, ...]:
    """Every rule that the plan breaks; `hardware` is without accelerators if the engine computes on the CPU."""
    return tuple(_generate_faults(plan, launch, hardware))


def list_launch_rules() -> tuple[LaunchRule, ...]:
    own = (rule for engine in load_engines().values() for rule in engine.launch_rules)
    return (*GENERAL_RULES, *MEMORY_RULES, *own)


def _generate_faults(plan: Plan, launch: Launch, hardware: Hardware) -> Iterator[PlanFault]:
    engine = get_plan_engine(plan)
    planned = describe_launch(plan, launch, hardware)
    for rule in (*GENERAL_RULES, *engine.launch_rules, *MEMORY_RULES):
        if (why := rule.find_fault(planned)) is not None:
            yield PlanFault(rule.id, why, engine.rule_sources.get(rule.id, rule.source), rule.hint)


def describe_launch(plan: Plan, launch: Launch, hardware: Hardware) -> PlannedLaunch:
    engine, layout = get_plan_engine(plan), plan.parallelism
    on_cpu = plan.settings.device == "cpu"
    found = find_cards(hardware, engine.vendors) if not on_cpu else ()
    named = plan.settings.cards
    cards = (
        tuple(card for card in pick_cards(hardware, named) if card in found)
        if named and not on_cpu
        else found[: layout.tensor * layout.pipeline * layout.data]
    )
    weakest = min(cards, key=lambda card: _get_capability(card) or (0, 0), default=None)
    chip = find_accelerator_chip(weakest) if weakest is not None else None
    each = min(hardware.cards_per_node, (chip.per_host if chip is not None else None) or hardware.cards_per_node)
    return PlannedLaunch(
        plan=plan,
        launch=launch,
        hardware=hardware,
        loaded=_convert(plan),
        device=plan.settings.device,
        chip=chip,
        capability=_get_capability(weakest) if weakest is not None else None,
        cards=cards,
        hosts=-(-layout.tensor * layout.pipeline // max(1, each)) if cards else 1,
    )


def _get_capability(card: Accelerator) -> tuple[int, int] | None:
    """CUDA compute capability; `None` if it is unknown, or if the card has none."""
    chip = find_accelerator_chip(card)
    return parse_capability(card.compute_capability or (chip.capability if chip is not None else None))


def _convert(plan: Plan) -> Model:
    if plan.weights.made == "as it is" or not plan.model.parameters:
        return plan.model
    return apply_label(plan.model, plan.weights.label)
