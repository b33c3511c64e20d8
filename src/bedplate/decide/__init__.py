"""Pure functions from hardware, model and workload to a Decision and a Plan: memory fit, rules, estimates."""

from bedplate.decide.choose import decide
from bedplate.decide.planning import plan

__all__ = ["decide", "plan"]
