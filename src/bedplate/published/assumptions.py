"""Settings that a row leaves open, in words."""

from __future__ import annotations

from collections.abc import Iterable


def list_averaged(choices: Iterable[tuple[float, str]]) -> str:
    """The choices with their probabilities; the one alone if there is only one."""
    weights: dict[str, float] = {}
    for weight, text in choices:
        weights[text] = weights.get(text, 0.0) + weight
    if len(weights) == 1:
        return next(iter(weights))
    return " or ".join(f"{text} ({weight:.0%})" for text, weight in weights.items())
