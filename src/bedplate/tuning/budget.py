"""The time and memory budget of a tuning: expected durations, time for the proof, number of loaded engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bedplate.engines.knobs import find_choice
from bedplate.facts.hardware import probe
from bedplate.tuning.points import OWN, OWN_KNOB
from bedplate.tuning.pool import TuningPool
from bedplate.tuning.rounds import SideTimes, compute_reserve_s, count_rounds_after_start
from bedplate.tuning.search import Point
from bedplate.tuning.state import TuningState
from bedplate.values import Settings
from bedplate.values.tuning import Trial

REQUEST_LIMIT_S, LEAST_LIMIT_S = 300.0, 30.0
MOST_WAITED = {"throughput": 1.45, "cost": 1.45}
"""A candidate is stopped after this many times the best's burst; other objectives allow slower candidates."""
WAITED_ELSE = 2.5
MANY_WAVES = 30
"""A budget shorter than this many bursts of the plan counts as short."""
SLOW, HASTY_SLOW = 6.0, 2.5
"""Limit for the engine defaults as a multiple of the plan's burst: usually, and with a short budget."""
MEMORY_SHARE = 0.6
"""Share of the free memory that idle engines may use together."""
MOST_ALIVE = 5
PROOF_MEMORY_SHARE = 0.85
"""The same for the sides of the proof, whose memory is known."""


class Budget:
    """Time and memory, based on the measurements so far."""

    def __init__(self, state: TuningState, pool: TuningPool) -> None:
        self.state, self.pool = state, pool
        self.start_s: dict[Point, float] = {}
        self.convert_s: dict[str, float] = {}
        """Duration of conversions, by the label of the weights."""
        self.check_s = 0.0
        """Duration of the longest comparison of answers."""

    # time

    def get_wave_s(self, point: Point) -> float | None:
        """The duration of one request of each stream."""
        trial = self.state.trials.get(point)
        return trial.best.seconds / trial.best.rounds if trial is not None and trial.best is not None else None

    @property
    def rounds(self) -> int:
        """Requests of each stream in a burst: several where a burst of one is short beside the engine's start."""
        wave_s = self.get_wave_s(())
        return 1 if wave_s is None else count_rounds_after_start(wave_s, self.start_s.get((), 0.0))

    def get_burst_s(self, point: Point) -> float | None:
        wave_s = self.get_wave_s(point)
        return wave_s * self.rounds if wave_s is not None else None

    @property
    def is_short(self) -> bool:
        """Whether there is time for only a few bursts."""
        wave_s = self.get_wave_s(())
        return wave_s is not None and self.state.kept.budget_s < MANY_WAVES * wave_s

    def has_time_for(self, point: Point) -> bool:
        """Whether a point can be measured once more before the proof must start."""
        return self.state.left_s - self.estimate_measurement_s(point) >= self.estimate_reserve_s()

    def get_limit_s(self, bar: float | None) -> float:
        """Return the time limit of one burst; `bar` is the score to beat."""
        usual = self.get_burst_s(self.state.best)
        if usual is not None and bar is not None:
            return usual * MOST_WAITED.get(self.state.kept.objective, WAITED_ELSE) + 0.5
        longest = min(REQUEST_LIMIT_S, max(self.state.left_s, LEAST_LIMIT_S))
        return longest if usual is None else min(longest, max(SLOW * usual, LEAST_LIMIT_S))

    def get_defaults_limit_s(self, rounds: int, most_s: float) -> float:
        """Return the time limit of the engine defaults if they are measured only in the proof."""
        if OWN in self.state.trials or (usual := self.get_wave_s(())) is None or not self.is_short:
            return most_s
        return min(most_s, max(HASTY_SLOW * rounds * usual, LEAST_LIMIT_S))

    def estimate_measurement_s(self, point: Point) -> float:
        """Estimate one measurement of a point: conversion and start if it is not loaded, and a burst."""
        burst_s = self.get_burst_s(point) or self.get_burst_s(self.state.best) or 0.0
        return (
            burst_s
            if point in self.pool.running
            else burst_s + self.estimate_conversion_s(point) + self.estimate_start_s(point)
        )

    def estimate_start_s(self, point: Point) -> float:
        """Return the measured start-up time, or the plan's plus what each changed setting adds."""
        if point in self.start_s:
            return self.start_s[point]
        if point == OWN:
            return max(self.start_s.values(), default=0.0)
        return self.start_s.get((), 0.0) + math.fsum(self._estimate_added_s(knob, value) for knob, value in point)

    def _estimate_added_s(self, name: str, value: str) -> float:
        knob, usual = self.state.get_setting(name), self.start_s.get((), 0.0)
        planned_s = find_choice(knob, value).start_s
        seen = [took_s for point, took_s in self.start_s.items() if (name, value) in point]
        if not seen and planned_s and value == knob.own_choice and OWN in self.start_s:
            seen = [self.start_s[OWN]]
        return max(0.0, min(seen) - usual) if seen else planned_s

    def estimate_conversion_s(self, point: Point) -> float:
        plan, base = self.state.make_plan_at(point), self.state.make_plan_at(())
        if plan.weights == base.weights or plan.weights.label in self.convert_s:
            return 0.0
        steps = [
            step for step in self.state.list_conversions(plan) if step.kind == "convert" and step.seconds is not None
        ]
        planned_s = math.fsum(step.seconds.value for step in steps if step.seconds is not None)
        return max(planned_s, max(self.convert_s.values(), default=0.0))

    def estimate_reserve_s(self) -> float:
        """Estimate the duration of the proof from the bursts."""
        checked = self.check_s if self.state.best not in self.state.qualities else 0.0
        sides, against = self.list_proof_sides(), [one for one in (OWN, ()) if one != self.state.best]
        starts = math.fsum(self.estimate_start_s(one) for one in sides if one not in self.pool.running)
        # One more comparison of answers: the last winner may need it.
        other_s = checked + self.check_s + starts
        budget_s = self.state.kept.budget_s
        return compute_reserve_s(
            self.estimate_proof_times(), self.state.best, against, budget_s=budget_s, other_s=other_s
        )

    def estimate_proof_times(self) -> SideTimes:
        """Return the durations of the proof's sides; sides that cannot stay loaded start before each measurement."""
        sides = self.list_proof_sides()
        waves = {one: found for one in sides if (found := self.get_wave_s(one)) is not None}
        if OWN in sides and OWN not in self.state.trials and () in waves:
            waves[OWN] = waves[()]  # until it is measured
        alone = self.count_proof_engines(sides) < len(sides)
        return SideTimes(
            waves, {one: self.estimate_start_s(one) for one in sides if alone or self.state.is_restless(one)}
        )

    def list_proof_sides(self) -> list[Point]:
        """Return the sides of the proof in their order."""
        failed = any(one.turn.knob == OWN_KNOB for one in self.state.kept.refused)
        known = {*self.state.trials, *([OWN] if self.is_short and not failed else [])}
        return [one for one in dict.fromkeys((OWN, self.state.best, ())) if one in known]

    # memory

    def count_loaded_engines(self, trial: Trial | None) -> int:
        """Return how many engines may be loaded at once; an engine that reserves GPU memory in advance runs alone."""
        settings: Settings = self.state.chosen.plan.settings
        if settings.memory_share is not None or settings.device not in ("cpu", "cuda"):
            return 1
        least = 2 if settings.device == "cpu" else 1
        each = trial.best.peak_memory_bytes if trial is not None and trial.best is not None else None
        if each is None:
            return least
        free = self._get_free_bytes() + each * len(self.pool.running)
        return max(least, min(MOST_ALIVE, int(MEMORY_SHARE * free / (1.5 * each))))

    def count_proof_engines(self, sides: Sequence[Point]) -> int:
        """Return how many engines may be loaded during the proof: all sides if their memory is known to fit."""
        if self.pool.most in (1, MOST_ALIVE):
            return self.pool.most
        peaks = {point: found.peak_memory_bytes for point, one in self.state.trials.items() if (found := one.best)}
        needed = [peaks.get(side) for side in sides]
        if None in needed:
            return self.pool.most
        free = self._get_free_bytes() + sum(peaks.get(one) or 0 for one in self.pool.running)
        fits = sum(one or 0 for one in needed) <= PROOF_MEMORY_SHARE * free
        return max(self.pool.most, len(sides)) if fits else self.pool.most

    def _get_free_bytes(self) -> int:
        """Return free host memory or, on GPUs, the least free memory of any GPU."""
        if self.state.chosen.plan.settings.device == "cpu":
            import psutil

            return int(psutil.virtual_memory().available)
        cards = [card.free_bytes for card in probe(recall=False).accelerators if card.vendor == "nvidia"]
        return min((one for one in cards if one is not None), default=0)
