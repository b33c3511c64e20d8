"""Run: a benchmark with its raw samples and everything needed to reproduce or question it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bedplate.values.cost import Price
from bedplate.values.decision import Device, Parallelism, Refusal, Settings
from bedplate.values.model import Model
from bedplate.values.record import Record
from bedplate.values.scenario import Scenario
from bedplate.values.structured import StructuredOutput
from bedplate.values.workload import Count, LatencyTarget, NotNegative, Positive, Share, Tokens

Arrivals = Literal["closed", "poisson", "constant", "burst", "replay", "sessions"]
Halt = Literal["narrow", "time", "most", "unknown", "stopped"]
"""Why no further repeats were made.

narrow: the interval is narrow enough. time: the time budget is spent. most: the requested number is reached. unknown:
there is no figure to repeat. stopped: the user stopped it.
"""
Outcome = Literal["ok", "error", "cut", "timeout", "refused"]
"""cut: the stream ended without its last event. refused: the endpoint answered 429 or 503."""
FlagKind = Literal[
    "client", "busy", "throttled", "truncated", "length", "cache", "errors", "garbled", "broken", "swapped", "short",
    "mixed", "gaps",
]  # fmt: skip
"""gaps: an imported file lacks facts or samples."""


class Load(Record, frozen=True, kw_only=True):
    """The load on the endpoint. Two runs are comparable only if it is the same."""

    arrivals: Arrivals = "closed"
    """closed: a fixed number of requests in flight. sessions: a fixed number of conversations, each with at most one
    request in flight and with waiting times between them. The others are open loops, which do not wait for answers.
    """
    concurrency: Count | None = None
    """Closed loop: requests in flight."""
    requests_per_s: Positive | None = None
    """Open loop: request rate; with a scenario, sessions per second. Replay: the trace's mean rate."""
    burst: Count | None = None
    """Requests per burst."""
    trace: str | None = None
    """The name of the trace that lengths and sessions are read from, and the beginning of its SHA-256."""
    prompt_tokens: Count = 512
    output_tokens: Count = 128
    shared_prefix_tokens: Tokens = 0
    """Length of the prefix that all prompts share. The rest of each prompt is unique."""
    seed: int = 0
    sessions: Count | None = None
    """Conversations at the same time."""
    scenario: Scenario | None = None
    """The distributions that the sessions are drawn from. `prompt_tokens` and `output_tokens` are then means."""

    @property
    def has_sessions(self) -> bool:
        """Whether requests belong to conversations, whose prompts repeat earlier turns and answers."""
        return self.scenario is not None or self.arrivals == "sessions"


class Sample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the client saw it. Times start just before the first byte of the request is written."""

    at_s: float
    """When it was sent, relative to the start of the measurement window."""
    late_ms: float = 0.0
    """Delay between the scheduled and the actual sending."""
    ttft_ms: float | None = None
    """Time to the first byte of the first event with text."""
    duration_ms: float
    """Time to the last event with text or a finish reason."""
    gaps_ms: tuple[float, ...] = ()
    """Times between the events with text, in order. An event may carry several tokens, or part of one."""
    prompt_tokens: int | None = None
    """As counted by the endpoint."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in a prefix cache, if the endpoint reports them."""
    finish: str | None = None
    outcome: Outcome = "ok"
    error: str | None = None
    session: int | None = None
    """Number of its session in the repeat; `None`: it belongs to none."""
    turn: int | None = None
    """From 1."""

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first. It does not use `gaps_ms`, because an event is not a token."""
        if self.ttft_ms is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.duration_ms - self.ttft_ms) / (self.output_tokens - 1)


SessionOutcome = Literal["complete", "context", "failed", "unfinished"]
"""context: it ended early, because its next request would have exceeded the context. unfinished: the repeat ended."""


class SessionResult(Record, frozen=True, kw_only=True):
    """One conversation of which at least one request was measured."""

    session: int
    turns: int
    """Turns that were answered."""
    planned_turns: int
    duration_s: float
    """From the first request to the last answer, with the waiting times between turns."""
    answering_s: float
    """The part of it in which a request was in flight."""
    outcome: SessionOutcome
    joined: bool = False
    """Whether it was under way at the beginning: its first turns and answers were not sent, only repeated."""


class ClientAccuracy(Record, frozen=True, kw_only=True):
    """Accuracy and load of the load generator itself."""

    error_p50_ms: float | None = None
    """Error of the client's times against a null server with known timing, at this concurrency, just before or after.
    """
    error_p99_ms: float | None = None
    send_lag_p99_ms: float = 0.0
    loop_lag_p99_ms: float = 0.0
    """Delay of the event loop's timers."""
    cpu_share: float = 0.0
    """Share of one core."""
    limit: bool = False
    """Whether the client was the bottleneck. If so, the cell says nothing about the engine."""
    reasons: tuple[str, ...] = ()
    """Why the client was the bottleneck."""


class EngineSeries(Record, frozen=True, kw_only=True):
    """The engine's own metrics in the measurement window; `None`: not reported by the engine."""

    scrapes: int = 0
    running_mean: float | None = None
    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_max: float | None = None
    kv_use_max: float | None = None
    preemptions: float | None = None
    cache_hit_share: float | None = None


class ResourceUse(Record, frozen=True, kw_only=True):
    """Resources used. `None`: not measured, for example at a remote endpoint."""

    peak_memory_bytes: int | None = None
    """Peak of the engine's whole process tree. Memory shared between its processes counts once."""
    peak_gpu_bytes: int | None = None
    energy_j: float | None = None
    energy_source: Literal["nvml", "rapl"] | None = None
    engine_cpu_s: float | None = None
    other_cpu_share: Share | None = None
    """Share of the machine's CPU time that neither the engine nor the client used: other processes used the CPU."""
    other_gpu_share: Share | None = None
    """Share of the engine's GPU that other processes used, of the busiest one if it has several."""
    other_gpu_processes: tuple[str, ...] = ()
    """Those processes: program, process id and memory, as far as the system names them."""
    other_measurements: tuple[int, ...] = ()
    """Process ids of other `bench` and `tune` commands that measured on the same GPU meanwhile."""
    clock_share: float | None = None
    """The lowest CPU or GPU clock under load, divided by its usual clock. Below about 0.9 it was throttled."""
    throttled: tuple[str, ...] = ()
    """Throttling reasons that the driver reported under load: heat, power."""
    swapped_bytes: int | None = None


class Quality(Record, frozen=True, kw_only=True):
    """Quality compared with the reference of the same weights."""

    asked: int = 0
    agreement: Share | None = None
    """Greedy-token agreement at fixed prefixes."""
    divergence: NotNegative | None = None
    """Mean Kullback-Leibler divergence from the reference, over the tokens that both list, in nats."""
    divergence_error: NotNegative | None = None
    """Its standard error over the places in the text."""
    perplexity: Positive | None = None
    """On a small fixed text."""
    reference_perplexity: Positive | None = None
    perplexity_error: NotNegative | None = None
    """Standard error of the logarithm of their ratio."""
    reference: str | None = None
    """How the reference was computed: the program, its version and precision. `None`: there is none."""
    verdict: Literal["ok", "broken", "unchecked"] = "unchecked"
    note: str | None = None
    garbled: str | None = None
    """What is obviously wrong with a generated text: it repeats itself, or it is not language."""
    structured: StructuredOutput | None = None
    """`None`: structured output was not measured."""


class Flag(Record, frozen=True, kw_only=True):
    """A reason to trust a cell less, in words."""

    kind: FlagKind
    text: str
    invalid: bool = False
    """Whether the cell must not be compared at all."""


class Exclusion(Record, frozen=True, kw_only=True):
    """A reason why a measurement does not change estimates and plans."""

    kind: FlagKind
    text: str


Role = Literal["baseline", "challenger"]
"""Of a subject in a gate."""


class Subject(Record, frozen=True, kw_only=True):
    """What was measured: an engine that bedplate started, or an endpoint given by its URL."""

    engine: str
    """The engine's id, or the endpoint's name if the engine is unknown."""
    engine_version: str | None = None
    model: str
    quantization: str | None = None
    weights_id: str | None = None
    """The beginning of the SHA-256 of the weights. Converted weights keep the id of their source."""
    device: Device | None = None
    parallelism: Parallelism = Parallelism()
    settings: Settings | None = None
    build: str | None = None
    """wheel, native, adopted."""
    through_gateway: bool = False
    """Whether requests went through bedplate's gateway instead of the engine's own port."""
    url: str | None = None
    """URL of an endpoint that bedplate did not start."""
    argv: tuple[str, ...] = ()
    start_s: float | None = None
    install_bytes: int | None = None
    role: Role | None = None


class StatedFigures(Record, frozen=True, kw_only=True):
    """Figures of an imported file that has no samples. They are shown, and never compared or used by plans."""

    requests: int | None = None
    output_tok_s: float | None = None
    prompt_tok_s: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p95: float | None = None
    tpot_ms_p99: float | None = None
    e2e_ms_p50: float | None = None


class Cell(Record, frozen=True, kw_only=True):
    """One subject under one load, with the samples of all repeats."""

    schema: Literal["cell/1"] = "cell/1"
    id: str
    run: str
    at: str
    """When it began: ISO 8601, UTC."""
    machine: str
    """`compute_fingerprint` of the client's hardware."""
    subject: Subject
    load: Load
    repeats: tuple[Repeat, ...] = ()
    warmup: int = 0
    """Warm-up requests, which are not kept."""
    exact_output: bool = False
    """Whether the endpoint was made to generate exactly the requested number of tokens."""
    quality: Quality | None = None
    flags: tuple[Flag, ...] = ()
    notes: str = ""
    halt: Halt | None = None
    """Why there are no more repeats; `None`: still running, or bedplate was killed."""
    stated: StatedFigures | None = None


class Repeat(Record, frozen=True, kw_only=True):
    """One measurement window."""

    at: str | None = None
    """When it began: ISO 8601, UTC, with milliseconds. Interleaved repeats of two cells are compared in pairs."""
    seconds: Positive
    samples: tuple[Sample, ...] = ()
    """The requests sent (open loop: scheduled) within it. The client waited for all of them under the same load."""
    delivered_tokens: float | None = None
    """Output tokens received within it, also those of earlier requests; `None`: the endpoint reports no usage."""
    warmup: int = 0
    """Warm-up requests before it, which are not kept."""
    exact_prompt: bool | None = None
    """Whether every prompt had the intended number of tokens; `None`: the endpoint reports no usage."""
    exact_output: bool | None = None
    in_flight_max: int = 0
    reopened: int = 0
    """Connections that the endpoint closed and the client reopened."""
    notes: tuple[str, ...] = ()
    sessions: tuple[SessionResult, ...] = ()
    client: ClientAccuracy = ClientAccuracy()
    engine: EngineSeries = EngineSeries()
    use: ResourceUse = ResourceUse()


class RunEnvironment(Record, frozen=True, kw_only=True):
    """What is needed to reproduce the run."""

    bedplate: str
    python: str
    system: str
    command: tuple[str, ...] = ()
    hardware: str
    """In one line, as `probe` prints it."""
    machine: str
    """Fingerprint of the hardware."""
    bandwidth_bytes_s: float | None = None
    """Measured by `probe --measure` on this machine; `None`: not measured."""
    operations_s: float | None = None
    price: Price | None = None
    """As the user stated it."""


class GateSide(Record, frozen=True, kw_only=True):
    """One side of a gate. Both sides may be the same version of one engine."""

    role: Role
    engine: str
    """ID or ID@VERSION."""
    settings: Settings | None = None
    """Those of the stored baseline; `None`: those that a plan chooses."""


class MeasuredEndpoint(Record, frozen=True, kw_only=True):
    """An endpoint that is measured in the same rounds as engines."""

    url: str
    key_env: str | None = None
    """The environment variable that holds its API key."""
    served_model: str | None = None
    """Its name for the model; `None`: the first that it lists."""


class BenchMatrix(Record, frozen=True, kw_only=True):
    """The engines and loads that a run was asked for. It contains all that is needed to resume the run."""

    model: str | None = None
    """As the user named it; `None`: the built-in model."""
    engines: tuple[str, ...] = ()
    endpoints: tuple[MeasuredEndpoint, ...] = ()
    """Endpoints elsewhere, beside `engines`."""
    loads: tuple[Load, ...]
    url: str | None = None
    """The endpoint to measure instead of engines. `key_env` names the variable with its key."""
    key_env: str | None = None
    served_model: str | None = None
    """The endpoint's name for the model; `None`: the first that it lists."""
    trace_path: str | None = None
    seconds: Positive = 10.0
    repeats: Count = 5
    turns: Count = 1
    """Interleaved rounds: how often each engine is started and measured."""
    budget_s: Positive = 600.0
    target: LatencyTarget | None = None
    through_gateway: bool = False
    check_quality: bool = True
    check_structured: bool = False
    native: bool = False
    sides: tuple[GateSide, ...] = ()
    """Of a gate: one for each of `engines`."""


class Run(Record, frozen=True, kw_only=True):
    """One call of `bedplate bench`. Cells are stored one by one as they finish."""

    schema: Literal["run/1"] = "run/1"
    id: Annotated[str, msgspec.Meta(min_length=1)]
    at: str
    environment: RunEnvironment
    cells: tuple[Cell, ...] = ()
    finished: bool = False
    matrix: BenchMatrix | None = None
    """What was asked for; `None` for imported measurements."""
    left_out: tuple[Refusal, ...] = ()
    """Requested engines that could not be measured."""
    models: tuple[Model, ...] = ()
    """Facts of the measured model, without its files. A diagnosis on another machine needs them."""
    source: str | None = None
    """Imported measurements: the file that they were read from."""
