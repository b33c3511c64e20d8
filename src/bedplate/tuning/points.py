"""Points of the search: the settings that differ from the plan."""

from __future__ import annotations

from bedplate.tuning.search import Point
from bedplate.values.tuning import Trial, Turn, words_of

OWN_KNOB = "own defaults"
OWN: Point = (("", OWN_KNOB),)
"""The point of the engine defaults."""


def point_of(trial: Trial) -> Point:
    return OWN if trial.own_defaults else tuple(sorted((one.knob, one.value) for one in trial.turned))


def turns_of(point: Point) -> tuple[Turn, ...]:
    return () if point == OWN else tuple(Turn(knob=knob, value=value) for knob, value in point)


def words_at(point: Point) -> str:
    return "the engine defaults" if point == OWN else "the plan" if not point else words_of(turns_of(point))
