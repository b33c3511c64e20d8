"""The orchestrators, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bedplate.errors import UsageError
from bedplate.hosting.orchestration import NAMES, OrchestratorSetup

if TYPE_CHECKING:
    from bedplate.engines import EnvironmentRecipe
    from bedplate.values.service import Order


def choose_orchestrator(order: Order) -> OrchestratorSetup | None:
    """The orchestrator of this order; None if bedplate runs the engines itself.

    Raises for what is known to be impossible before anything is probed.
    """
    if order.on is None:
        return None
    if len(order.services) > 1:
        raise UsageError(
            f"--on {order.on}: {NAMES[order.on]} serves one model, and there are {len(order.services)} services",
            hint="serve them without --on, or start a service for each",
        )
    if order.bundle is not None:
        raise UsageError(f"--on {order.on}: a bundle does not contain {NAMES[order.on]}", hint="leave --on out")
    if order.services[0].is_on_demand:
        raise UsageError(f"--on {order.on}: {NAMES[order.on]} keeps its model loaded", hint="leave --ttl out")
    if order.on == "dynamo":
        from bedplate.hosting.on_dynamo import DynamoSetup

        return DynamoSetup(order)
    from bedplate.hosting.on_ray import RaySetup

    return RaySetup(order)


def find_recipe(id: str) -> EnvironmentRecipe | None:
    """The recipe of an orchestrator's environment; None if no orchestrator has this name."""
    if id == "dynamo":
        from bedplate.hosting.on_dynamo import ALONE

        return ALONE
    if id == "ray":
        from bedplate.hosting.on_ray import RECIPE

        return RECIPE
    return None
