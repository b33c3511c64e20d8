"""Run: what was measured, with its raw samples, and everything that a reader needs to repeat or to doubt it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bedplate.values.cost import Price
from bedplate.values.decision import Device, Parallelism, Refusal, Settings
from bedplate.values.model import Model
from bedplate.values.record import Record
from bedplate.values.workload import Count, LatencyTarget, NotNegative, Positive, Share, Tokens

Arrivals = Literal["closed", "poisson", "constant", "burst", "replay"]
Halt = Literal["narrow", "time", "most", "unknown", "stopped"]
"""The interval was narrow enough; time was up; as many as were asked for; no figure to repeat; somebody stopped it."""
Outcome = Literal["ok", "error", "cut", "timeout", "refused"]
"""cut: the stream ended without its last event; refused: the endpoint said 429 or 503 before it took the request."""
FlagKind = Literal[
    "client", "busy", "throttled", "truncated", "length", "cache", "errors", "garbled", "broken", "swapped", "short",
    "mixed",
]  # fmt: skip


class Load(Record, frozen=True, kw_only=True):
    """What is asked of the endpoint. Two runs are comparable only where this is the same."""

    arrivals: Arrivals = "closed"
    """closed: so many in flight at any time; the others send without looking at what has come back."""
    concurrency: Count | None = None
    """Of a closed loop: requests in flight."""
    requests_per_s: Positive | None = None
    """Of an open loop; of a replay, what the trace comes to."""
    burst: Count | None = None
    """Requests that come at once, for bursts."""
    trace: str | None = None
    """Of a replay: the trace's name and the beginning of its SHA-256."""
    prompt_tokens: Count = 512
    output_tokens: Count = 128
    shared_prefix_tokens: Tokens = 0
    """Of each prompt, what all of them begin with; all else is in no other prompt."""
    seed: int = 0


class Sample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as the client saw it. Times count from the moment before the request's first byte was written."""

    at_s: float
    """When it was sent, from the start of the measured time."""
    late_ms: float = 0.0
    """How much later it was sent than it was due."""
    ttft_ms: float | None = None
    """To the first byte of the first event that carries text."""
    duration_ms: float
    """To the last event that carries text or the reason of the end."""
    gaps_ms: tuple[float, ...] = ()
    """Between the events that carry text, in their order. An event may carry several tokens, or half of one."""
    prompt_tokens: int | None = None
    """As the endpoint counts them."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that a prefix cache held already, where the endpoint says so."""
    finish: str | None = None
    outcome: Outcome = "ok"
    error: str | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Time for each output token after the first; events are not tokens, so their gaps are not used."""
        if self.ttft_ms is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.duration_ms - self.ttft_ms) / (self.output_tokens - 1)


class Client(Record, frozen=True, kw_only=True):
    """What the load generator says of itself."""

    error_p50_ms: float | None = None
    """Against a null server with known timing, on this machine at this concurrency, just before or after."""
    error_p99_ms: float | None = None
    send_lag_p99_ms: float = 0.0
    loop_lag_p99_ms: float = 0.0
    """How late its event loop came round to timers that were due."""
    cpu_share: float = 0.0
    """Of one core."""
    limit: bool = False
    """Whether the client itself was the limit: such a cell says nothing of the engine."""
    reasons: tuple[str, ...] = ()
    """Why it was."""


class EngineSeries(Record, frozen=True, kw_only=True):
    """The engine's own metrics over the measured time; `None` is what it does not tell."""

    scrapes: int = 0
    running_mean: float | None = None
    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_max: float | None = None
    kv_use_max: float | None = None
    preemptions: float | None = None
    cache_hit_share: float | None = None


class Use(Record, frozen=True, kw_only=True):
    """What the machine gave for it. `None`: not measured, as on an endpoint elsewhere."""

    peak_memory_bytes: int | None = None
    """Of the engine's whole process tree; memory that its processes share is counted once."""
    peak_gpu_bytes: int | None = None
    energy_j: float | None = None
    energy_source: Literal["nvml", "rapl"] | None = None
    engine_cpu_s: float | None = None
    other_cpu_share: Share | None = None
    """Of the machine's processors, what neither the engine nor the client took: a busy machine."""
    clock_share: float | None = None
    """The lowest processor or GPU clock while it was busy, over its usual one: below about 0.9 it was throttled."""
    throttled: tuple[str, ...] = ()
    """What a driver gave as reasons for lower clocks while it was busy: heat, power."""
    swapped_bytes: int | None = None


class Quality(Record, frozen=True, kw_only=True):
    """Against PyTorch in float32 on the same weights."""

    asked: int = 0
    agreement: Share | None = None
    """Of greedy next tokens at fixed prefixes."""
    divergence: NotNegative | None = None
    """Mean Kullback-Leibler divergence from the reference over the tokens that both list, in nats."""
    perplexity: Positive | None = None
    """On a small fixed text."""
    reference_perplexity: Positive | None = None
    verdict: Literal["ok", "broken", "unchecked"] = "unchecked"
    note: str | None = None
    garbled: str | None = None
    """What is wrong with a text that it wrote, where that is plain to see: it repeats itself, it is no language."""


class Flag(Record, frozen=True, kw_only=True):
    """Something that makes a cell less than it looks, in words for a reader."""

    kind: FlagKind
    text: str
    invalid: bool = False
    """Whether the cell must not be compared at all."""


class Subject(Record, frozen=True, kw_only=True):
    """What was measured: an engine that bedplate started, or any endpoint by its URL."""

    engine: str
    """An engine's id, or the endpoint's own name where it is not known."""
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    weights_id: str | None = None
    """The beginning of the SHA-256 of the weights; the same weights in another format keep their source's."""
    device: Device | None = None
    parallelism: Parallelism = Parallelism()
    settings: Settings | None = None
    build: str | None = None
    """wheel, native, adopted."""
    through_gateway: bool = False
    """Whether it was measured through bedplate's gateway, and not at the engine's own port."""
    url: str | None = None
    """Of an endpoint that bedplate did not start."""
    argv: tuple[str, ...] = ()
    start_s: float | None = None
    install_bytes: int | None = None


class Cell(Record, frozen=True, kw_only=True):
    """One subject under one load: any number of repeats, all their samples kept."""

    schema: Literal["cell/1"] = "cell/1"
    id: str
    run: str
    at: str
    """When it began: ISO 8601, UTC."""
    machine: str
    """`fingerprint` of the hardware that the client saw."""
    subject: Subject
    load: Load
    repeats: tuple[Repeat, ...] = ()
    warmup: int = 0
    """Requests before the measured ones, not kept."""
    exact_output: bool = False
    """Whether the endpoint was made to give exactly as many tokens as asked for."""
    quality: Quality | None = None
    flags: tuple[Flag, ...] = ()
    notes: str = ""
    halt: Halt | None = None
    """Why there are no more repeats; `None`: it is being measured, or bedplate was ended over it."""


class Repeat(Record, frozen=True, kw_only=True):
    """One stretch of measured time."""

    at: str | None = None
    """When it began: ISO 8601, UTC, with milliseconds. Repeats of two cells that took turns are compared in pairs."""
    seconds: Positive
    samples: tuple[Sample, ...] = ()
    """The requests that were sent (of open loops: due) within it; all of them were waited for, under the same load."""
    delivered_tokens: float | None = None
    """Output tokens that came within it, also of requests from before; `None` where the endpoint tells no usage."""
    warmup: int = 0
    """Requests before it, not kept."""
    exact_prompt: bool | None = None
    """Whether every prompt had the tokens that it should; `None` where the endpoint tells no usage."""
    exact_output: bool | None = None
    in_flight_max: int = 0
    reopened: int = 0
    """Connections that the endpoint closed, and that were opened again within it."""
    notes: tuple[str, ...] = ()
    client: Client = Client()
    engine: EngineSeries = EngineSeries()
    use: Use = Use()


class Environment(Record, frozen=True, kw_only=True):
    """What a reader needs to repeat it."""

    bedplate: str
    python: str
    system: str
    command: tuple[str, ...] = ()
    hardware: str
    """In one line, as `probe` says it."""
    machine: str
    """Its fingerprint."""
    bandwidth_bytes_s: float | None = None
    """Measured here by `probe --measure`; `None`: not measured."""
    operations_s: float | None = None
    price: Price | None = None
    """As somebody said it."""


class Matrix(Record, frozen=True, kw_only=True):
    """What a run was asked for: each engine under each load. Enough to go on with it later."""

    model: str | None = None
    """As it was named; `None`: the built-in one."""
    engines: tuple[str, ...] = ()
    loads: tuple[Load, ...]
    url: str | None = None
    """Of an endpoint that is measured in the place of engines, and the variable that its key is in."""
    key_env: str | None = None
    served_model: str | None = None
    """As the endpoint names it; `None`: the first that it lists."""
    trace_path: str | None = None
    seconds: Positive = 10.0
    repeats: Count = 5
    turns: Count = 1
    """How often each engine is started and measured; with several, they take turns."""
    budget_s: Positive = 600.0
    target: LatencyTarget | None = None
    through_gateway: bool = False
    check_quality: bool = True
    native: bool = False


class Run(Record, frozen=True, kw_only=True):
    """One call of `bedplate bench`: its cells are kept one by one as they are finished."""

    schema: Literal["run/1"] = "run/1"
    id: Annotated[str, msgspec.Meta(min_length=1)]
    at: str
    environment: Environment
    cells: tuple[Cell, ...] = ()
    finished: bool = False
    matrix: Matrix | None = None
    """What was asked for; `None` of what others measured."""
    left_out: tuple[Refusal, ...] = ()
    """Engines that were asked for and could not be measured."""
    models: tuple[Model, ...] = ()
    """What was known of the model that was measured, without its files: a diagnosis elsewhere needs its bytes."""
    source: str | None = None
    """Of what others measured: the file that it was read from."""
