"""The budget of a tuning: what each step is expected to take, what the proof needs, how many engines fit at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bedplate.engines.knobs import choice_of
from bedplate.facts.hardware import probe
from bedplate.tuning.points import OWN, OWN_KNOB
from bedplate.tuning.pool import Pool
from bedplate.tuning.rounds import Times, reserve_s
from bedplate.tuning.search import Point
from bedplate.tuning.state import TuningState
from bedplate.values import Settings
from bedplate.values.tuning import Trial

REQUEST_LIMIT_S, LEAST_LIMIT_S = 300.0, 30.0
MOST_WAITED = {"throughput": 1.45, "cost": 1.45}
"""Times the best's own wave that a contender is waited for; other objectives may be worth a slower one."""
WAITED_ELSE = 2.5
MANY_WAVES = 30
"""Where the whole time holds fewer of the plan's waves, there is haste."""
SLOW, HASTY_SLOW = 6.0, 2.5
"""Times the plan's own wave that the engine's own defaults are waited for: in the first look, and in haste."""
MEMORY_SHARE = 0.6
"""Of the free memory, what engines that wait for their turn may hold together."""
MOST_ALIVE = 5
PROOF_MEMORY_SHARE = 0.85
"""Likewise, for the sides of the proof, whose memory is known."""


class Budget:
    """Time and memory, by what was measured so far."""

    def __init__(self, state: TuningState, pool: Pool) -> None:
        self.state, self.pool = state, pool
        self.start_s: dict[Point, float] = {}
        self.convert_s: dict[str, float] = {}
        """By the label of the weights."""
        self.check_s = 0.0
        """The longest comparison of answers."""

    # time

    def wave_s(self, point: Point) -> float | None:
        trial = self.state.trials.get(point)
        return trial.best.seconds if trial is not None and trial.best is not None else None

    @property
    def is_hasty(self) -> bool:
        """Whether there is time for few waves only."""
        wave_s = self.wave_s(())
        return wave_s is not None and self.state.kept.budget_s < MANY_WAVES * wave_s

    def has_time_for(self, point: Point) -> bool:
        """Whether a setting can be measured once more before the proof must begin."""
        return self.state.left_s - self.expected_s(point) >= self.reserve_s()

    def limit_s(self, bar: float | None) -> float:
        """How long one wave is waited for; `bar` is the score to beat."""
        usual = self.wave_s(self.state.best)
        if usual is not None and bar is not None:
            return usual * MOST_WAITED.get(self.state.kept.objective, WAITED_ELSE) + 0.5
        longest = min(REQUEST_LIMIT_S, max(self.state.left_s, LEAST_LIMIT_S))
        return longest if usual is None else min(longest, max(SLOW * usual, LEAST_LIMIT_S))

    def own_limit_s(self, rounds: int, most_s: float) -> float:
        """How long the engine's own defaults are waited for where they are seen in the proof alone."""
        if OWN in self.state.trials or (usual := self.wave_s(())) is None or not self.is_hasty:
            return most_s
        return min(most_s, max(HASTY_SLOW * rounds * usual, LEAST_LIMIT_S))

    def expected_s(self, point: Point) -> float:
        """What it takes to measure a setting once: weights and a start where it is not loaded, and a wave."""
        waves = self.wave_s(point) or self.wave_s(self.state.best) or 0.0
        return waves if point in self.pool.running else waves + self.conversion_s(point) + self.starting_s(point)

    def starting_s(self, point: Point) -> float:
        """As it was seen; else as the plan's, with what each turned knob adds to it."""
        if point in self.start_s:
            return self.start_s[point]
        if point == OWN:
            return max(self.start_s.values(), default=0.0)
        return self.start_s.get((), 0.0) + math.fsum(self._added_s(knob, value) for knob, value in point)

    def _added_s(self, name: str, value: str) -> float:
        knob, usual = self.state.knob(name), self.start_s.get((), 0.0)
        planned_s = choice_of(knob, value).start_s
        seen = [took_s for point, took_s in self.start_s.items() if (name, value) in point]
        if not seen and planned_s and value == knob.own_choice and OWN in self.start_s:
            seen = [self.start_s[OWN]]
        return max(0.0, min(seen) - usual) if seen else planned_s

    def conversion_s(self, point: Point) -> float:
        plan, base = self.state.plan_at(point), self.state.plan_at(())
        if plan.weights == base.weights or plan.weights.label in self.convert_s:
            return 0.0
        steps = [step for step in self.state.conversions(plan) if step.kind == "convert" and step.seconds is not None]
        planned_s = math.fsum(step.seconds.value for step in steps if step.seconds is not None)
        return max(planned_s, max(self.convert_s.values(), default=0.0))

    def reserve_s(self) -> float:
        """What the proof will take, by what the waves took."""
        checked = self.check_s if self.state.best not in self.state.qualities else 0.0
        sides, against = self.proof_sides(), [one for one in (OWN, ()) if one != self.state.best]
        starts = math.fsum(self.starting_s(one) for one in sides if one not in self.pool.running)
        # One more look at answers: who wins last may have to be looked at.
        other_s = checked + self.check_s + starts
        budget_s = self.state.kept.budget_s
        return reserve_s(self.proof_times(), self.state.best, against, budget_s=budget_s, other_s=other_s)

    def proof_times(self) -> Times:
        """Of the sides of a proof; those that cannot stay loaded beside others start before each piece of work."""
        sides = self.proof_sides()
        waves = {one: found for one in sides if (found := self.wave_s(one)) is not None}
        if OWN in sides and OWN not in self.state.trials and () in waves:
            waves[OWN] = waves[()]  # until it is seen
        alone = self.engines_in_proof(sides) < len(sides)
        return Times(waves, {one: self.starting_s(one) for one in sides if alone or self.state.is_restless(one)})

    def proof_sides(self) -> list[Point]:
        """Of a proof, in their order."""
        failed = any(one.turn.knob == OWN_KNOB for one in self.state.kept.refused)
        known = {*self.state.trials, *([OWN] if self.is_hasty and not failed else [])}
        return [one for one in dict.fromkeys((OWN, self.state.best, ())) if one in known]

    # memory

    def engines_at_once(self, trial: Trial | None) -> int:
        """How many engines may be loaded at once; those that take a card's memory in advance come one by one."""
        settings: Settings = self.state.chosen.plan.settings
        if settings.memory_share is not None or settings.device not in ("cpu", "cuda"):
            return 1
        least = 2 if settings.device == "cpu" else 1
        each = trial.best.peak_memory_bytes if trial is not None and trial.best is not None else None
        if each is None:
            return least
        free = self._free_bytes() + each * len(self.pool.running)
        return max(least, min(MOST_ALIVE, int(MEMORY_SHARE * free / (1.5 * each))))

    def engines_in_proof(self, sides: Sequence[Point]) -> int:
        """How many engines may be loaded while it is proven: all sides, where their memory is known to fit."""
        if self.pool.most in (1, MOST_ALIVE):
            return self.pool.most
        peaks = {point: found.peak_memory_bytes for point, one in self.state.trials.items() if (found := one.best)}
        needed = [peaks.get(side) for side in sides]
        if None in needed:
            return self.pool.most
        free = self._free_bytes() + sum(peaks.get(one) or 0 for one in self.pool.running)
        fits = sum(one or 0 for one in needed) <= PROOF_MEMORY_SHARE * free
        return max(self.pool.most, len(sides)) if fits else self.pool.most

    def _free_bytes(self) -> int:
        """Of the memory that engines compute in; of several cards, what each has."""
        if self.state.chosen.plan.settings.device == "cpu":
            import psutil

            return int(psutil.virtual_memory().available)
        cards = [card.free_bytes for card in probe(recall=False).accelerators if card.vendor == "nvidia"]
        return min((one for one in cards if one is not None), default=0)
