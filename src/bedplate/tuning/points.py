"""Points of the search: the settings that differ from the plan."""

from __future__ import annotations

from bedplate.tuning.search import Point
from bedplate.values.tuning import SettingChange, Trial, describe_changes

OWN_KNOB = "own defaults"
OWN: Point = (("", OWN_KNOB),)
"""The point of the engine defaults."""


def make_point(trial: Trial) -> Point:
    return OWN if trial.own_defaults else tuple(sorted((one.knob, one.value) for one in trial.turned))


def make_changes(point: Point) -> tuple[SettingChange, ...]:
    return () if point == OWN else tuple(SettingChange(knob=knob, value=value) for knob, value in point)


def describe_point(point: Point) -> str:
    return "the engine defaults" if point == OWN else "the plan" if not point else describe_changes(make_changes(point))
