"""What to change first, in the engine's own words, and what removing the limit should bring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bedplate.judge.flags import Knob, flag
from bedplate.judge.ground import Ground
from bedplate.judge.observed import View, slots_of
from bedplate.judge.spending import threads_too_many
from bedplate.values import Figure
from bedplate.values.diagnosis import AtLoad, Change, Limit, Prediction, SpentOn
from bedplate.values.run import Cell
from bedplate.values.verdict import Metric

NARROWER = ((12.0, "8-bit weights", 8.5), (6.5, "4-bit weights", 4.5))
"""From how many bits on the next narrower weights are worth it, and how many bits those have, scales included."""
MODEL_SPREAD = 0.25
"""How far predictions from measured steps and prompts may be off."""
OVERHEAD_REMOVED = (0.35, 0.7, 1.0)
"""Of the runtime's own part, what other settings or another engine take away: at the least, likely, at the most."""
MOST_PROMPT = 2.0
"""Times its time alone, what a prompt may cost among others; vLLM's on two cores cost 1.6 to 1.9 times as much."""
FEW_STREAMS = 8
"""Below so many, more requests at once still share much of a step."""


class Patient(NamedTuple):
    """One cell whose limit is known."""

    cell: Cell
    view: View
    told: AtLoad
    ground: Ground

    @property
    def engine(self) -> str:
        return self.cell.subject.engine

    @property
    def in_flight(self) -> float:
        return float(self.cell.load.concurrency or self.view.batch)

    def share(self, limit: Limit) -> float:
        return sum(one.share for one in self.told.spent if one.limit == limit)

    def share_spent_on(self, *parts: SpentOn) -> float:
        return sum(one.share for one in self.told.spent if one.on in parts)

    def flag(self, knob: Knob, value: object = None) -> str | None:
        name = flag(knob, self.engine, self.ground.device)
        if name is None or value is None:
            return name
        return f"{name}={value}" if name.isupper() else f"{name} {value}"


# what removing it brings


def predictions_for(patient: Patient) -> Iterator[Prediction]:
    if patient.told.limit is not None:
        yield from PREDICTIONS[patient.told.limit](patient)


def _all_at_once(patient: Patient) -> Iterator[Prediction]:
    view, in_flight = patient.view, patient.in_flight
    if view.queue_ms <= 0.05 * view.request_ms:
        return
    now, then = cycle_ms(view, view.batch), cycle_ms(view, in_flight)
    change = f"all {in_flight:.0f} requests computed at once"
    yield _predicted(change, "output_tok_s", in_flight / then / (view.batch / now))
    soonest, latest = _first_token_ms(view, in_flight, then)
    usual, spread = math.sqrt(soonest * latest), math.sqrt(latest / soonest) * (1 + MODEL_SPREAD) - 1
    yield _predicted(change, "ttft_ms", view.ttft_ms / usual, spread)


def _roomier_cache(patient: Patient) -> Iterator[Prediction]:
    yield from _all_at_once(patient)
    reading = patient.share_spent_on("cache")
    if reading > 0.1:
        yield _predicted("a cache in 8 bits", "output_tok_s", 1 / (1 - reading / 2))


def _fewer_bytes(patient: Patient) -> Iterator[Prediction]:
    if (narrower := _narrower(patient.ground)) is not None:
        words, left = narrower
        yield _predicted(words, "output_tok_s", 1 / (1 - patient.share("memory bandwidth") * (1 - left)))


def _cached_prompts(patient: Patient) -> Iterator[Prediction]:
    prompts = patient.share_spent_on("prompt", "other prompts")
    if prompts > 0.1:
        yield _predicted("prompts that a cache holds already", "output_tok_s", 1 / (1 - min(prompts, 0.98)))


def _free_links(patient: Patient) -> Iterator[Prediction]:
    yield _predicted("links that cost nothing", "output_tok_s", 1 / (1 - min(patient.share("interconnect"), 0.95)))


def _leaner_runtime(patient: Patient) -> Iterator[Prediction]:
    own = patient.share("runtime overhead")
    least, likely, most = (1 / (1 - min(0.97, own * part)) for part in OVERHEAD_REMOVED)
    too_many = threads_too_many(patient.cell, patient.ground) is not None
    yield Prediction(
        change="as many threads as cores" if too_many else "a runtime with less of its own",
        metric="output_tok_s",
        gain=Figure(value=likely, low=least, high=most, basis="estimate", source="a step beyond its floor"),
    )


PREDICTIONS: dict[Limit, Callable[[Patient], Iterator[Prediction]]] = {
    "scheduler": _all_at_once, "KV cache": _roomier_cache, "memory bandwidth": _fewer_bytes,
    "compute": _cached_prompts, "interconnect": _free_links, "runtime overhead": _leaner_runtime,
}  # fmt: skip


def _predicted(change: str, metric: Metric, gain: float, spread: float = MODEL_SPREAD) -> Prediction:
    source = "steps and prompts as they were measured here"
    low, high = gain / (1 + spread), gain * (1 + spread)
    figure = Figure(value=gain, low=low, high=high, basis="estimate", source=source)
    return Prediction(change=change, metric=metric, gain=figure)


def cycle_ms(view: View, batch: float) -> float:
    """A request's time when `batch` of them are computed together: everyone's prompt once, and a step for each token.

    In the time of one request each of the others ends once and brings a new prompt.
    """
    return batch * _prompt_ms(view) + view.tokens * _step_ms(view, batch)


def _prompt_ms(view: View) -> float:
    """What a prompt costs among others: that of a request alone, or more, where steps that hold one took longer.

    Where it is more than twice as much, something else was in the way.
    """
    among_others = (view.prefill_ms + view.behind_ms + view.stalled_ms - view.step_ms) / view.batch
    return min(max(view.prefill_ms, among_others), MOST_PROMPT * view.prefill_ms)


def _step_ms(view: View, batch: float) -> float:
    """What a step has beside its tokens stays; each further stream adds a token."""
    return max(0.0, view.step_ms - view.batch * view.stream_ms) + batch * view.stream_ms


def _first_token_ms(view: View, batch: float, cycle: float) -> tuple[float, float]:
    """Its own prompt with what is left of another one, if requests come one by one; all prompts, if they come together.

    A closed loop of answers of one length falls into step sooner or later; real traffic does not.
    """
    busy = min(0.95, batch * view.prefill_ms / cycle) if cycle > 0 else 0.0
    step = max(_step_ms(view, batch), 1e-6)
    alone = view.prefill_ms * (1 + busy / 2 / (1 - busy / 2)) + step
    return alone, max(alone, view.prefill_ms * batch + step)


def _narrower(ground: Ground) -> tuple[str, float] | None:
    """The next narrower weights, and what share of the bytes they have."""
    if ground.shape is None:
        return None
    bits = ground.shape.bits
    return next(((words, narrow / bits) for least, words, narrow in NARROWER if bits >= least), None)


# what to change


def changes_for(patient: Patient) -> Iterator[Change]:
    if patient.told.limit is None:
        how = "bedplate probe --measure, then bedplate bench with 1, 4, 8 and 16 requests in flight"
        yield Change(kind="measure", text=how)
    else:
        yield from CHANGES[patient.told.limit](patient)


def _more_slots(patient: Patient) -> Iterator[Change]:
    slots, in_flight = slots_of(patient.cell), round(patient.in_flight)
    if slots is None or slots < in_flight:
        text = f"as many slots as requests in flight: {in_flight}"
        yield Change(kind="flag", text=text, flag=patient.flag("slots", in_flight))
    else:
        text = "smaller pieces of prompts between two steps"
        yield Change(kind="flag", text=text, flag=patient.flag("batch tokens"))
    yield Change(kind="work", text="fewer requests at once, or a second replica")


def _more_cache(patient: Patient) -> Iterator[Change]:
    yield Change(kind="flag", text="more memory for the cache", flag=patient.flag("cache memory"))
    settings = patient.cell.subject.settings
    if settings is None or settings.kv_type == "16-bit":
        yield Change(kind="flag", text="a cache in 8 bits", flag=patient.flag("cache type"))
    yield Change(kind="hardware", text="a device with more memory, or more of them")


def _less_to_read(patient: Patient) -> Iterator[Change]:
    if (narrower := _narrower(patient.ground)) is not None:
        yield Change(kind="quantization", text=f"{narrower[0]}: {narrower[1]:.0%} of the bytes")
    if patient.in_flight < FEW_STREAMS:
        yield Change(kind="work", text="more requests at once: they share each reading of the weights")
    yield Change(kind="hardware", text="a device with more memory bandwidth")


def _less_overhead(patient: Patient) -> Iterator[Change]:
    threads, cores = threads_too_many(patient.cell, patient.ground), patient.ground.cores
    if threads is not None:
        yield Change(kind="flag", text=f"{cores} threads instead of {threads}", flag=patient.flag("threads", cores))
    yield Change(kind="engine", text=f"an engine that does less between two steps than {patient.engine}: bedplate plan")
    if patient.in_flight < FEW_STREAMS:
        yield Change(kind="work", text="more requests at once: they share the time between two steps")


def _less_to_compute(patient: Patient) -> Iterator[Change]:
    if patient.share_spent_on("prompt", "other prompts") > 0.5:
        yield Change(kind="work", text="shorter prompts, or a prefix that requests share and a cache holds")
    reached = patient.told.operations_share
    if reached is not None and reached < 0.3:
        text = f"an engine whose kernels reach more than {reached:.0%} of this machine's rate: bedplate plan"
        yield Change(kind="engine", text=text)
    yield Change(kind="hardware", text="a device that computes faster")


def _less_to_send(patient: Patient) -> Iterator[Change]:
    ranks = patient.cell.subject.parallelism.tensor
    yield Change(kind="flag", text=f"fewer devices for each request than {ranks}, and more replicas")
    yield Change(kind="hardware", text="devices with faster links between them")


CHANGES: dict[Limit, Callable[[Patient], Iterator[Change]]] = {
    "scheduler": _more_slots, "KV cache": _more_cache, "memory bandwidth": _less_to_read,
    "runtime overhead": _less_overhead, "compute": _less_to_compute, "interconnect": _less_to_send,
}  # fmt: skip
