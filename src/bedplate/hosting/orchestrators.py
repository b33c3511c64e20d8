"""The orchestrators, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bedplate.errors import BadQuestion
from bedplate.hosting.orchestrated import NAMES, Kind

if TYPE_CHECKING:
    from bedplate.engines import Recipe
    from bedplate.values.service import Order


def kind_for(order: Order) -> Kind | None:
    """The orchestrator of this order; None if bedplate runs the engines itself.

    Raises for what is known to be impossible before anything is probed.
    """
    if order.on is None:
        return None
    if len(order.services) > 1:
        raise BadQuestion(
            f"--on {order.on}: {NAMES[order.on]} serves one model, and there are {len(order.services)} services",
            hint="serve them without --on, or start a service for each",
        )
    if order.bundle is not None:
        raise BadQuestion(f"--on {order.on}: a bundle does not contain {NAMES[order.on]}", hint="leave --on out")
    if order.services[0].on_demand:
        raise BadQuestion(f"--on {order.on}: {NAMES[order.on]} keeps its model loaded", hint="leave --ttl out")
    if order.on == "dynamo":
        from bedplate.hosting.on_dynamo import Dynamo

        return Dynamo(order)
    from bedplate.hosting.on_ray import Ray

    return Ray(order)


def recipe_of(id: str) -> Recipe | None:
    """The recipe of an orchestrator's environment; None if no orchestrator has this name."""
    if id == "dynamo":
        from bedplate.hosting.on_dynamo import ALONE

        return ALONE
    if id == "ray":
        from bedplate.hosting.on_ray import RECIPE

        return RECIPE
    return None
