"""A simulated engine with known limits: it batches continuously and prefills one prompt at a time.

To check a predicted gain, change the parameter and simulate again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.judge.made_cells import MODEL, make_cell, make_repeat, with_engine, with_settings

from bedplate.decide.estimate.physics import ModelShape, count_weight_bytes, get_shape
from bedplate.judge.roofline import Roofline
from bedplate.run.models import find_known_model
from bedplate.values import Figure, replace_fields
from bedplate.values.run import Cell, Load, Sample


@dataclass(frozen=True)
class MadeEngine:
    token_ms: float = 1.0
    """Prefill time of one token, and what a stream adds to a step."""
    read_ms: float = 4.0
    """Time for reading the weights in each step."""
    own_ms: float = 0.5
    """Runtime overhead of each step."""
    slots: int = 16
    cache_requests: int | None = None
    """Requests that fit in its KV cache."""
    prompt: int = 64
    tokens: int = 32
    tells: bool = True
    threads: int = 2
    stream_ms: float | None = None
    """What a stream adds to a step, if different from `token_ms`."""

    def cell(self, concurrency: int, requests: int = 60) -> Cell:
        samples, waiting, running = _Loop(self, concurrency).run(requests)
        load = Load(concurrency=concurrency, prompt_tokens=self.prompt, output_tokens=self.tokens)
        cell = make_cell("llama.cpp", [make_repeat(samples, 0.0)], concurrency, load=load)
        cell = with_settings(cell, slots=self.slots, threads=self.threads)
        if not self.tells:
            return replace_fields(cell, subject=replace_fields(cell.subject, settings=None))
        full = self.cache_requests is not None and self.cache_requests < min(concurrency, self.slots)
        return with_engine(
            cell, waiting_mean=waiting, running_mean=running, kv_use_max=0.99 if full else 0.3,
            preemptions=3.0 if full else 0.0,
        )  # fmt: skip

    def cells(self, *loads: int) -> list[Cell]:
        return [self.cell(load) for load in loads]

    def tok_s(self, concurrency: int) -> float:
        samples = _Loop(self, concurrency).run(80)[0]
        return concurrency * self.tokens * len(samples) / sum(one.duration_ms for one in samples) * 1000

    def ttft_ms(self, concurrency: int) -> float:
        samples = _Loop(self, concurrency).run(80)[0]
        return sum(one.ttft_ms or 0.0 for one in samples) / len(samples)

    def ground(self, cores: int = 2) -> Roofline:
        """A machine on which reading the weights takes `read_ms`."""
        shape = the_shape()
        rate = count_weight_bytes(shape, 1) / (self.read_ms / 1000)
        return Roofline(shape=shape, bandwidth=exactly(rate), operations=exactly(1e12), cores=cores)


@dataclass
class _Loop:
    engine: MadeEngine
    concurrency: int
    now: float = 0.0
    waiting: list[_Request] = field(default_factory=list)
    running: list[_Request] = field(default_factory=list)

    def run(self, requests: int) -> tuple[list[Sample], float, float]:
        """The samples after the warm-up, and the mean numbers of waiting and running requests."""
        engine = self.engine
        room = min(engine.slots, engine.cache_requests or engine.slots)
        stream = engine.token_ms if engine.stream_ms is None else engine.stream_ms
        done: list[_Request] = []
        waited = ran = watched = 0.0
        self.waiting = [_Request(0.0) for _ in range(self.concurrency)]
        skip = 2 * self.concurrency
        while len(done) < requests + skip:
            before, counts = self.now, (len(self.waiting), len(self.running))
            if self.waiting and len(self.running) < room:
                one = self.waiting.pop(0)
                self.now += engine.prompt * engine.token_ms
                self.running.append(one)
                counts = (counts[0] - 1, counts[1] + 1)
            else:
                self.now += engine.read_ms + engine.own_ms + stream * len(self.running)
                for one in list(self.running):
                    one.times.append(self.now)
                    if len(one.times) == engine.tokens:
                        self.running.remove(one)
                        done.append(one)
                        self.waiting.append(_Request(self.now))
            if len(done) >= skip:
                took = self.now - before
                waited, ran, watched = waited + took * counts[0], ran + took * counts[1], watched + took
        return [one.sample(engine) for one in done[skip:]], waited / watched, ran / watched


@dataclass
class _Request:
    sent: float
    times: list[float] = field(default_factory=list)

    def sample(self, engine: MadeEngine) -> Sample:
        gaps = tuple(b - a for a, b in zip(self.times, self.times[1:], strict=False))
        return Sample(
            at_s=self.sent / 1000, ttft_ms=self.times[0] - self.sent, duration_ms=self.times[-1] - self.sent,
            gaps_ms=gaps, prompt_tokens=engine.prompt, output_tokens=engine.tokens,
        )  # fmt: skip


def the_shape() -> ModelShape:
    return get_shape(find_known_model(MODEL))


def exactly(value: float) -> Figure:
    return Figure(value=value, low=value, high=value, basis="measured")
