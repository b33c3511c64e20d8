"""Pure functions from what is true to what to do: fit, rules, Decision, Plan."""

from bedplate.decide.choose import decide
from bedplate.decide.planning import plan

__all__ = ["decide", "plan"]
