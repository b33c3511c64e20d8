"""Simulation: a fleet on paper, what it was given, what was tried, and what came of it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Parallelism
from bedplate.values.record import Basis, Record
from bedplate.values.workload import LatencyTarget, Share

LayoutName = Literal["aggregated", "disaggregated"]
RouterName = Literal["random", "least-loaded", "prefix"]


class Times(Record, frozen=True, kw_only=True):
    """How a latency is spread over the requests, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


class Traffic(Record, frozen=True, kw_only=True):
    """What the fleet was sent."""

    source: str
    """A trace's name, or `synthetic`."""
    requests: int
    requests_per_s: float | None
    """The mean; nothing in a closed loop."""
    concurrency: int | None = None
    """Of a closed loop."""
    prompt_tokens: float
    """Means over the requests."""
    output_tokens: float
    shared: bool = False
    """Whether it says which prompts begin alike."""
    seed: int | None = None
    """Of what was made up: lengths and arrivals, and of a router that draws lots."""


class Outcome(Record, frozen=True, kw_only=True):
    """One layout under that traffic. All of it rests on the times of passes, so it is what those are: `basis`."""

    layout: LayoutName
    router: RouterName
    replicas: int
    prefills: int = 0
    """Of them, those that only compute prompts."""
    cards: int
    """Accelerators, or machines where they have none."""
    requests: int
    """How many of the traffic's requests this was tried with; fewer than all while searching."""
    refused: int
    """Too long for a replica."""
    seconds: float
    """From the first arrival to the last answer."""
    output_tok_s: float
    requests_per_s: float
    """Answered."""
    on_target: Share | None
    """Of all requests, those that were answered within every target; nothing where none is set."""
    goodput_requests_s: float | None
    goodput_tok_s: float | None
    """Output tokens of those requests."""
    ttft_ms: Times | None
    tpot_ms: Times | None
    e2e_ms: Times | None
    kv_use_mean: Share
    """Of the cache, by requests that run, over all replicas and the whole time."""
    kv_use_peak: Share
    """Of the fullest replica at its fullest moment."""
    busy_share: Share
    preemptions: int
    cache_hit_share: Share | None
    """Of the prompts' tokens, those that were found in a prefix cache; nothing where the traffic shares nothing."""
    cost_per_million_tokens: float | None
    """Of output, all cards and their electricity paid for the whole time; nothing without a price."""
    kwh_per_million_tokens: float | None
    """All cards at the stated watts for the whole time; nothing without watts."""
    meets: bool | None
    """Whether enough requests were on target; nothing where no target is set."""
    basis: Basis = "estimate"


class Engine(Record, frozen=True, kw_only=True):
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
    """That the cache holds."""
    context_tokens: int
    source: str
    """What the times of passes rest on."""
    low: float
    """Factors on those times between which eight of ten lay that were held against them."""
    high: float


class Simulation(Record, frozen=True, kw_only=True):
    schema: Literal["simulation/1"] = "simulation/1"
    replica: Engine
    traffic: Traffic
    target: LatencyTarget | None = None
    met_share: Share
    """Of the requests, how many must be on target."""
    answer: Outcome | None
    """The layout that was asked for; or of a range, the cheapest that meets the target: nothing when none does."""
    slow: Outcome | None = None
    """The same if all passes took as long as the estimate's band allows; and likewise as short."""
    fast: Outcome | None = None
    safe: Outcome | None = None
    """Of a range: the fewest replicas of that layout that meet the target even if passes are slow; nothing if none do.
    """
    tried: tuple[Outcome, ...] = ()
    """Every layout that was simulated, in that order."""
    price_per_hour: float | None = None
    """Of one card; watts likewise."""
    watts: float | None = None
    electricity_price: float | None = None
    """Of one kWh."""
    notes: tuple[str, ...] = ()
