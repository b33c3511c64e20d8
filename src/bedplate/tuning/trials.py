"""The trials of a tuning: one burst of requests at a point, its resource use and its score."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bedplate.errors import BedplateError, ExternalFailure, NotPossible
from bedplate.judge.diagnose import build_roofline, diagnose_subject
from bedplate.measure.bench import describe_environment
from bedplate.measure.burst import send_burst
from bedplate.measure.flags import BUSY, SWAPPED_BYTES, flag_cell
from bedplate.measure.load import run as run_loop
from bedplate.measure.moments import format_now
from bedplate.measure.summary import compute_output_tok_s, list_tpots, list_ttfts, meets
from bedplate.measure.watch import Watcher
from bedplate.tuning.budget import REQUEST_LIMIT_S, Budget
from bedplate.tuning.comparison import LOST, SPEED_KEPT, compute_median
from bedplate.tuning.engines import Engines
from bedplate.tuning.points import OWN, describe_point, make_changes
from bedplate.tuning.pool import TrialEngine
from bedplate.tuning.search import Point, compute_score
from bedplate.tuning.state import TuningState
from bedplate.values import replace_fields
from bedplate.values.run import Load, Repeat, ResourceUse
from bedplate.values.tuning import RefusedKind, Trial, TrialMeasurement

LEAST_SEEN, FEW_TOKENS = 3, 16
"""Requests that a diagnosis needs per load, and output tokens of a single request."""


@dataclass(frozen=True)
class TrialUse:
    memory_bytes: int | None
    energy_j: float | None
    """Energy per output token."""
    swapped_bytes: int | None


class Trials:
    def __init__(self, state: TuningState, budget: Budget, engines: Engines) -> None:
        self.state, self.budget, self.engines = state, budget, engines
        self._replay = {point: list(one.taken) for point, one in state.trials.items()}
        self._number = sum(len(one.taken) for one in state.kept.trials)
        self._busy_told = False
        self._planned: Repeat | None = None
        """The first burst of the plan."""

    def measure(self, point: Point, bar: float | None) -> float | None:
        """Measure one burst and return its score; a resumed tuning replays its stored measurements first."""
        if replay := self._replay.get(point):
            return replay.pop(0).score
        try:
            alive = self.engines.get(point)
            self.state.say(describe_point(point))
            limit_s = self.budget.get_limit_s(bar)
            self.engines.wait_until_idle(point)
            rounds = self.budget.rounds
            repeat, used = self.watch(alive, self.state.kept.load, limit_s, rounds)
        except (ExternalFailure, NotPossible) as error:
            self.engines.drop(point)
            self.state.refuse(point, "start", error.summary, list_cause_and_hint(error))
            return None
        except OSError as error:
            kind: RefusedKind = "died" if self.engines.drop(point) else "errors"
            self.state.refuse(point, kind, str(error) or type(error).__name__, ())
            return None
        if used.swapped_bytes is not None and used.swapped_bytes > SWAPPED_BYTES:
            words = f"the system swapped out {used.swapped_bytes / 1e6:.0f} MB during the measurement"
            self.state.refuse(point, "swapped", words, ())
            return None
        taken = self._summarize(repeat, used, limit_s, bar, rounds)
        if taken is not None and bar is None and taken.cut:
            # A slow setting is not refused: it lost this time, and may be tried again in another tuning.
            self._add(point, alive, taken)
            return None
        if taken is None:
            failed = [one.error or one.outcome for one in repeat.samples if one.outcome != "ok"] if repeat else []
            words = failed[0] if failed else "no figures for this objective"
            self.state.refuse(point, "errors", words, tuple(failed[:3]))
            return None
        if not point and self._planned is None:
            self._planned = repeat
        self._add(point, alive, taken)
        return taken.score

    def _add(self, point: Point, alive: TrialEngine, taken: TrialMeasurement) -> None:
        before = self.state.trials.get(point) or Trial(
            turned=make_changes(point), own_defaults=point == OWN, start_s=round(alive.started.start_s, 2)
        )
        self.state.trials[point] = replace_fields(before, taken=(*before.taken, taken))
        self.state.keep()
        self.state.teller.report_measurement(make_changes(point), taken, self.state.kept)

    def watch(self, alive: TrialEngine, load: Load, limit_s: float, rounds: int = 1) -> tuple[Repeat | None, TrialUse]:
        with Watcher(alive.meters) as watcher:
            watcher.mark("begin")
            self._number += 1
            prepared = self.engines.prepare_target(alive)
            repeat = run_loop(send_burst(alive.target, load, prepared, self._number, limit_s, rounds=rounds))
            watcher.mark("end")
        use, engine = watcher.summarize_readings()
        self._tell_if_busy(use)
        energy = use.energy_j
        made = sum(one.output_tokens or 0 for one in repeat.samples) if repeat is not None else 0
        peak = use.peak_gpu_bytes if alive.meters.on_card and use.peak_gpu_bytes else use.peak_memory_bytes
        used = TrialUse(peak, energy / made if energy is not None and made else None, use.swapped_bytes)
        return (replace_fields(repeat, use=use, engine=engine) if repeat is not None else None), used

    def _tell_if_busy(self, use: ResourceUse) -> None:
        """Note other processes once."""
        shares = {"CPU": use.other_cpu_share or 0.0, "GPU": use.other_gpu_share or 0.0}
        busy = [f"{share:.0%} of the {device}" for device, share in shares.items() if share > BUSY]
        if use.other_measurements:
            busy.append("the same GPU for another measurement")
        if busy and not self._busy_told:
            self._busy_told = True
            names = f" ({'; '.join(use.other_gpu_processes)})" if use.other_gpu_processes else ""
            used = " and ".join(busy)
            note = f"other processes used {used} during the measurement{names}: this makes the figures worse"
            self.state.note(note)
            self.state.progress.note(note)

    def _summarize(
        self, repeat: Repeat | None, used: TrialUse, limit_s: float, bar: float | None, rounds: int
    ) -> TrialMeasurement | None:
        tuned = self.state.kept
        if repeat is None:
            # It was stopped because it is slower than the bar; its exact score does not matter.
            return TrialMeasurement(
                at=format_now(milliseconds=True),
                seconds=round(limit_s, 3),
                score=LOST if bar is None else bar,
                rounds=rounds,
                cut=True,
            )
        if any(one.outcome != "ok" for one in repeat.samples):
            return None
        speed = compute_output_tok_s(repeat, tuned.load)
        first, each = compute_median(list_ttfts(repeat.samples)), compute_median(list_tpots(repeat.samples))
        share = None
        if tuned.target is not None:
            share = statistics.fmean(meets(one, tuned.target) for one in repeat.samples)
        plan = self.state.trials.get(())
        floor = plan.best.output_tok_s if plan is not None and plan.best is not None else None
        score = compute_score(
            tuned.objective, output_tok_s=speed, ttft_ms=first, tpot_ms=each, peak_memory_bytes=used.memory_bytes,
            energy_j_per_token=used.energy_j, on_target=share, floor_tok_s=SPEED_KEPT * floor if floor else None,
        )  # fmt: skip
        if score is None:
            if tuned.objective == "energy":
                raise NotPossible("this machine does not report energy use", hint="NVIDIA GPUs and Intel RAPL do")
            return None
        return TrialMeasurement(
            at=repeat.at or format_now(milliseconds=True),
            seconds=round(repeat.seconds, 3), score=score, output_tok_s=speed, ttft_ms=first,
            tpot_ms=each, peak_memory_bytes=used.memory_bytes, energy_j_per_token=used.energy_j, rounds=rounds,
        )  # fmt: skip

    def diagnose(self) -> None:
        """Find the bottleneck from the plan's burst and from a single request; a known one is not measured again."""
        if self.state.kept.diagnosis is not None:
            return
        load = self.state.kept.load
        alone = replace_fields(load, concurrency=1, output_tokens=min(load.output_tokens, FEW_TOKENS))
        cells = []
        for one in [alone, load] if load.concurrency != 1 and not self.budget.is_short else [load]:
            self.state.say(f"the plan with concurrency {one.concurrency}, to find the bottleneck")
            repeats = [self._planned] if one is load and self._planned is not None else []
            while sum(len(repeat.samples) for repeat in repeats) < LEAST_SEEN:
                repeat, _ = self.watch(self.engines.get(()), one, REQUEST_LIMIT_S)
                if repeat is None:
                    return
                repeats.append(repeat)
            cell = self.state.make_cell((), one, tuple(repeats), "plan")
            cells.append(replace_fields(cell, flags=flag_cell(cell)))
        hardware = self.state.hardware
        ground = build_roofline(cells[-1].subject, self.state.facts, hardware, describe_environment(hardware))
        found = diagnose_subject(cells, ground)
        self.state.change(limit=found.limit, diagnosis=found.text)
        self.state.teller.report_bottleneck(found)


def list_cause_and_hint(error: BedplateError) -> tuple[str, ...]:
    return tuple(part for part in (error.cause, error.hint) if part)
