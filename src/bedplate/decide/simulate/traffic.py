"""The requests to simulate: from a trace, or generated from a workload and a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from bedplate.decide.simulate.book import Book
from bedplate.errors import UsageError
from bedplate.values.arrival import DEFAULT_THINK_TIME_S, ArrivalProcess
from bedplate.values.simulation import Traffic
from bedplate.values.workload import RequestShape, Workload


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Immutable requests that can be simulated several times, each time with a new `Book`."""

    prompt: list[int]
    output: list[int]
    arrival: list[float]
    """In order, from 0. In a closed loop, only the first request of each client."""
    hashes: list[tuple[Hashable, ...]] | None
    hash_tokens: int
    source: str
    seed: int | None = None
    notes: tuple[str, ...] = ()
    process: ArrivalProcess = ArrivalProcess.TRACE
    clients: int | None = None
    """In a closed loop: the number of clients, each with at most one request in flight."""
    think_s: list[float] = field(default_factory=list)
    """For users: the time from each answer to the same user's next request."""
    expected_rate: float | None = None
    """Requests per second of a synthetic stream; in a closed loop, if the latency is as assumed before there is one."""

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def requests_per_s(self) -> float | None:
        """Mean rate from the gaps between arrivals; `None` in a closed loop, or if all requests arrive together."""
        if self.clients is not None or len(self.arrival) < 2 or self.arrival[-1] <= 0:
            return None
        return (len(self.arrival) - 1) / self.arrival[-1]

    @property
    def mean_prompt(self) -> float:
        return sum(self.prompt) / len(self.prompt)

    @property
    def mean_output(self) -> float:
        return sum(self.output) / len(self.output)

    @property
    def longest(self) -> int:
        return max(prompt + output for prompt, output in zip(self.prompt, self.output, strict=True))

    def make_book(self) -> Book:
        return Book(self.prompt, self.output, self.arrival, self.hashes, self.hash_tokens)

    def take_first(self, count: int) -> RequestStream:
        """The first `count` requests, at the same rate."""
        if count >= len(self):
            return self
        return replace(
            self,
            prompt=self.prompt[:count],
            output=self.output[:count],
            arrival=self.arrival[:count],
            think_s=self.think_s[:count],
            hashes=self.hashes[:count] if self.hashes is not None else None,
        )

    def summarize(self) -> Traffic:
        return Traffic(
            source=self.source,
            requests=len(self),
            requests_per_s=self.requests_per_s,
            concurrency=self.clients if self.process is ArrivalProcess.CLOSED else None,
            prompt_tokens=self.mean_prompt,
            output_tokens=self.mean_output,
            shared=self.hashes is not None,
            seed=self.seed,
        )


def from_shapes(
    shapes: Iterable[RequestShape],
    source: str,
    *,
    rate: float | None = None,
    most: int | None = None,
    seed: int = 0,
) -> RequestStream:
    """A trace's requests in the order of arrival; `rate` scales the arrival times.

    A trace without times gets Poisson arrivals at that rate.
    """
    rows: list[tuple[float, int, int, tuple[Hashable, ...]]] = []
    untimed = left_out = 0
    block = 0
    for shape in shapes:
        if not shape.prompt_tokens or not shape.output_tokens:
            left_out += 1
            continue
        untimed += shape.started_s is None
        block = block or shape.prefix_block_tokens or 0
        hashes = shape.prefix_hashes if shape.prefix_block_tokens == block else ()
        rows.append((shape.started_s or 0.0, shape.prompt_tokens, shape.output_tokens, hashes))
    if not rows:
        raise UsageError(f"{source} has no request with a prompt and an output length")
    notes = [f"{left_out:,} requests without a prompt or output length are left out"] if left_out else []
    drawn: int | None = None
    if untimed:
        if rate is None:
            raise UsageError(
                f"{source} has no arrival times", hint="--rate R generates Poisson arrivals at R requests/s"
            )
        moments = draw_poisson(len(rows), rate, random.Random(seed))  # noqa: S311
        notes.append(f"the trace has no arrival times: Poisson arrivals at {rate:g} requests/s are used")
        drawn = seed
    else:
        rows.sort(key=lambda row: row[0])
        moments = [row[0] - rows[0][0] for row in rows]
        span = moments[-1]
        if rate is not None and span > 0:
            scale = (len(rows) - 1) / rate / span
            moments = [moment * scale for moment in moments]
            notes.append(f"the trace's arrival times are scaled to {rate:g} requests/s")
    found = RequestStream(
        prompt=[row[1] for row in rows],
        output=[row[2] for row in rows],
        arrival=moments,
        hashes=[row[3] for row in rows] if block else None,
        hash_tokens=block,
        source=source,
        seed=drawn,
        notes=tuple(notes),
        process=ArrivalProcess.TRACE if drawn is None else ArrivalProcess.POISSON,
    )
    return found.take_first(most) if most is not None else found


def make_synthetic(
    workload: Workload,
    requests: int,
    rate: float | None = None,
    *,
    seed: int = 0,
    spread: float = 0.0,
    prefixes: int = 1,
) -> RequestStream:
    """Requests of the workload's lengths. They arrive as the workload says; with `rate`, as a Poisson stream.

    `spread` is the coefficient of variation of the lengths (log-normal; 0: all the same); `prefixes` is the number of
    different shared prefixes.
    """
    draw = random.Random(seed)  # noqa: S311
    prompt = _draw_lengths(workload.prompt_tokens, spread, requests, draw)
    output = _draw_lengths(workload.output_tokens, spread, requests, draw)
    shared = workload.shared_prefix_tokens
    hashes: list[tuple[Hashable, ...]] | None = None
    if shared:
        names = [(number,) for number in range(prefixes)]
        hashes = [names[int(draw.random() * prefixes)] for _ in range(requests)]
        prompt = [max(one, shared + 1) for one in prompt]
    rate = rate or workload.requests_per_s
    if rate is not None:
        arrival = draw_poisson(requests, rate, draw)
        return RequestStream(
            prompt, output, arrival, hashes, shared, "synthetic", seed, process=ArrivalProcess.POISSON,
            expected_rate=rate,
        )  # fmt: skip
    load = workload.make_load()
    think_s: list[float] = []
    if load.arrival is ArrivalProcess.CLOSED:
        clients = load.in_flight
        # The clients start one after the other, within the time of one request.
        arrival = [load.request_s * number / clients for number in range(min(clients, requests))]
    else:
        clients, mean_s = workload.users, load.think_time_s or DEFAULT_THINK_TIME_S
        think_s = [draw.expovariate(1 / mean_s) for _ in range(requests)]
        first = sorted(draw.expovariate(1 / mean_s) for _ in range(clients))[:requests]
        arrival = [moment - first[0] for moment in first]
    return RequestStream(
        prompt, output, arrival, hashes, shared, "synthetic", seed, process=load.arrival, clients=clients,
        think_s=think_s, expected_rate=load.requests_per_s,
    )  # fmt: skip


def draw_poisson(requests: int, rate: float, draw: random.Random) -> list[float]:
    moments, now = [], 0.0
    for _ in range(requests):
        moments.append(now)
        now += draw.expovariate(rate)
    return moments


def _draw_lengths(mean: int, spread: float, count: int, draw: random.Random) -> list[int]:
    if spread <= 0:
        return [mean] * count
    sigma = math.sqrt(math.log(1 + spread * spread))
    middle = math.log(mean) - sigma * sigma / 2
    return [max(1, round(draw.lognormvariate(middle, sigma))) for _ in range(count)]
