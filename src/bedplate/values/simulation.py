"""Simulation: a simulated fleet, its input, the layouts tried and the results."""

from __future__ import annotations

from typing import Literal

from bedplate.values.arrival import RequestLoad
from bedplate.values.decision import Parallelism
from bedplate.values.record import Basis, Record
from bedplate.values.workload import LatencyTarget, Share

LayoutName = Literal["aggregated", "disaggregated"]
RouterName = Literal["random", "least-loaded", "prefix"]


class LatencyDistribution(Record, frozen=True, kw_only=True):
    """Distribution of a latency over the requests, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


class Traffic(Record, frozen=True, kw_only=True):
    """The traffic sent to the fleet."""

    source: str
    """A trace's name, or `synthetic`."""
    requests: int
    requests_per_s: float | None
    """Mean arrival rate; `None` in a closed loop."""
    concurrency: int | None = None
    """Requests in flight in a closed loop."""
    prompt_tokens: float
    """Mean over the requests."""
    output_tokens: float
    shared: bool = False
    """Whether the traffic states which prompts share a prefix."""
    seed: int | None = None
    """Seed for synthetic lengths and arrivals, and for the random router."""
    load: RequestLoad | None = None
    """How requests arrive, and by the closed form of `plan` their rate and the number in flight on the fleet of
    `answer`. For disaggregated workers it has the simulated request time."""


class Outcome(Record, frozen=True, kw_only=True):
    """One layout under that traffic. All figures follow from the pass times and have their `basis`."""

    layout: LayoutName
    router: RouterName
    replicas: int
    prefills: int = 0
    """Replicas that only run prefill."""
    cards: int
    """Accelerators, or machines if they have none."""
    parallelism: Parallelism = Parallelism()
    """The layout of one replica."""
    requests: int
    """Number of simulated requests. A search uses a part of the traffic."""
    refused: int
    """Requests that are too long for a replica."""
    seconds: float
    """From the first arrival to the last answer."""
    output_tok_s: float
    requests_per_s: float
    """Completed requests per second."""
    on_target: Share | None
    """Share of all requests that met every target; `None`: no target."""
    on_target_noise: Share | None = None
    """Half of the 95 % interval of `on_target`: another seed gives a share within it."""
    goodput_requests_s: float | None
    goodput_tok_s: float | None
    """Output tokens of those requests."""
    ttft_ms: LatencyDistribution | None
    tpot_ms: LatencyDistribution | None
    e2e_ms: LatencyDistribution | None
    kv_use_mean: Share
    """Mean KV cache utilization by running requests, over all replicas and the whole time."""
    kv_use_peak: Share
    """Peak KV cache utilization of any replica."""
    busy_share: Share
    in_flight_mean: float = 0.0
    """Mean number of requests in flight, waiting ones included."""
    preemptions: int
    cache_hit_share: Share | None
    """Share of prompt tokens found in a prefix cache; `None`: no prompts share a prefix."""
    cost_per_million_tokens: float | None
    """Per million output tokens, with all cards and their electricity paid for the whole time; `None`: no price."""
    kwh_per_million_tokens: float | None
    """All cards at the stated watts for the whole time; `None`: no watts."""
    meets: bool | None
    """Whether enough requests met the target; `None`: no target."""
    basis: Basis = "estimate"


class ReplicaDescription(Record, frozen=True, kw_only=True):
    """One replica."""

    engine: str
    model: str
    quantization: str | None
    hardware: str
    parallelism: Parallelism
    cards: int
    slots: int
    batch_tokens: int
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    context_tokens: int
    source: str
    """Source of the pass times."""
    low: float
    """Factors on the pass times that covered eight of ten measured cases."""
    high: float


class Simulation(Record, frozen=True, kw_only=True):
    schema: Literal["simulation/1"] = "simulation/1"
    replica: ReplicaDescription
    traffic: Traffic
    target: LatencyTarget | None = None
    met_share: Share
    """Share of the requests that must meet the target."""
    answer: Outcome | None
    """The requested layout; for a range, the cheapest that meets the target, or `None`."""
    slow: Outcome | None = None
    """`answer` with all passes at the slow end of the estimate. `fast` is the same at the fast end."""
    fast: Outcome | None = None
    safe: Outcome | None = None
    """For a range: the fewest replicas of that layout that meet the target even with slow passes; `None`: none."""
    tried: tuple[Outcome, ...] = ()
    """Every simulated layout, in order."""
    price_per_hour: float | None = None
    """Price of one card. `watts` is also for one card."""
    watts: float | None = None
    electricity_price: float | None = None
    """Price of one kWh."""
    notes: tuple[str, ...] = ()
