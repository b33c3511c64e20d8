"""Tuning: the tunable settings of an engine, the trials on this machine, and the best settings found."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Parallelism, Settings, Weights
from bedplate.values.diagnosis import Limit
from bedplate.values.record import Figure, Record
from bedplate.values.run import Exclusion, Load, Quality
from bedplate.values.verdict import Answer
from bedplate.values.workload import LatencyTarget, Workload

Objective = Literal["throughput", "latency", "memory", "energy", "cost"]
Risk = Literal["answers", "memory", "start"]
"""Possible side effects of a setting: changed answers, more memory, an engine that does not start."""
RefusedKind = Literal["start", "died", "swapped", "answers", "errors"]
Opponent = Literal["own defaults", "plan"]
SideName = Opponent | Literal["tuned"]
NEAR = 2.0
"""Two workloads are of the same class if lengths and concurrency differ by at most this factor."""
USUAL_IN_FLIGHT = 4
"""Concurrency to assume if none is specified: one client and a retry or two."""


class SettingChoice(Record, frozen=True, kw_only=True):
    """One value of a tunable setting, and its effect on the launch."""

    value: str
    options: tuple[str, ...] = ()
    """Command-line options. An option replaces the plan's option of the same name."""
    without: tuple[str, ...] = ()
    """Options to remove from the plan's command line."""
    variables: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, int | str], ...] = ()
    """Fields of `Settings`, which all engines share."""
    weights: str | None = None
    """Label of weights that are converted from the model's own."""
    weights_format: str | None = None
    """Format of these weights; `None`: that of the plan."""
    native: bool = False
    """Whether to use the build compiled on this machine instead of the published package."""
    lossy: bool = False
    """Whether it is known to answer less faithfully than the plan."""
    start_s: float = 0.0
    """Expected extra start-up time, before one was measured."""
    restless: bool = False
    """Whether the engine keeps the CPU busy while idle, so that no other engine can be measured at the same time."""


class TunableSetting(Record, frozen=True, kw_only=True):
    name: str
    meaning: str
    choices: tuple[SettingChoice, ...]
    now: str
    """Its value in the plan."""
    own: str
    """The engine default, in words."""
    own_choice: str | None = None
    """The engine default, if it is one of `choices`."""
    ordered: bool = False
    """Whether the values form a scale, so that a search can continue in the direction that helped."""
    first: tuple[str, ...] = ()
    """The values to try first; empty: the neighbors of the current value."""
    alone: bool = False
    """Whether it changes so much that the other settings are tried only after it."""
    limits: tuple[Limit, ...] = ()
    """Bottlenecks that it may relieve; empty: any."""
    risk: tuple[Risk, ...] = ()
    prior: float
    """Probability of a gain above noise, before any measurement."""
    source: str
    """Where these facts come from."""


class SettingChange(Record, frozen=True, kw_only=True):
    knob: str
    value: str


class TrialMeasurement(Record, frozen=True, kw_only=True):
    """One short measurement: all requests in flight at once, from the first byte sent to the last byte received."""

    at: str
    seconds: float
    score: float
    """Logarithm of the objective; more is better."""
    output_tok_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    peak_memory_bytes: int | None = None
    energy_j_per_token: float | None = None
    rounds: int = 1
    """Requests of each stream."""
    cut: bool = False
    """Stopped early because it was clearly slower than the best. Its figures are then bounds that it did not reach."""


class Trial(Record, frozen=True, kw_only=True):
    """One combination of settings with all of its measurements."""

    turned: tuple[SettingChange, ...] = ()
    """Differences from the plan."""
    own_defaults: bool = False
    taken: tuple[TrialMeasurement, ...] = ()
    start_s: float | None = None

    @property
    def best(self) -> TrialMeasurement | None:
        """The median of the completed measurements, of which the longest count."""
        whole = sorted((one for one in self.taken if not one.cut), key=lambda one: one.score)
        most = max((one.rounds for one in whole), default=1)
        longest = [one for one in whole if one.rounds == most]
        return longest[len(longest) // 2] if longest else None


class RefusedSetting(Record, frozen=True, kw_only=True):
    """A setting that is never proposed again for this engine version on this machine, with the evidence."""

    schema: Literal["refused-setting/1"] = "refused-setting/1"
    at: str
    machine: str
    engine: str
    engine_version: str
    model: str
    turn: SettingChange
    """The change that caused it."""
    turned: tuple[SettingChange, ...]
    """All differences from the plan."""
    kind: RefusedKind
    why: str
    evidence: tuple[str, ...] = ()


class TuningStep(Record, frozen=True, kw_only=True):
    """One change that was kept, and its gain at that time."""

    turn: SettingChange
    before: str
    gain: Figure
    """Factor of improvement of the objective."""


class ComparedSettings(Record, frozen=True, kw_only=True):
    """One of the settings compared at the end, in interleaved rounds."""

    name: SideName
    turned: tuple[SettingChange, ...] = ()
    settings: Settings
    weights: Weights
    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    output_tok_s: Figure | None = None
    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    peak_memory_bytes: int | None = None
    energy_j_per_token: float | None = None
    quality: Quality | None = None
    cell: str | None = None
    taken: tuple[TrialMeasurement, ...] = ()
    """One measurement per round."""


class Proof(Record, frozen=True, kw_only=True):
    """The tuned settings compared with others, by the rules of `compare`."""

    against: Opponent
    answer: Answer
    text: str
    output_tok_s: Figure | None = None
    """Factor of improvement with its 95 % interval."""
    ttft_ms: Figure | None = None
    """Factor of improvement: 2 is half the time."""


class ParetoPoint(Record, frozen=True, kw_only=True):
    """A setting on the Pareto front: no other is better in every respect."""

    name: str
    turned: tuple[SettingChange, ...] = ()
    output_tok_s: float
    ttft_ms: float
    peak_memory_bytes: int | None = None


class TuningRun(Record, frozen=True, kw_only=True):
    """One run of `bedplate tune`, stored after each measurement."""

    schema: Literal["tuning/1"] = "tuning/1"
    id: str
    at: str
    machine: str
    hardware: str
    """In one line."""
    bedplate: str
    engine: str
    engine_version: str
    build: str
    """wheel, native, adopted."""
    model: str
    asked_model: str | None = None
    """As the user named it; `None`: the built-in model."""
    weights_id: str | None = None
    load: Load
    workload: Workload
    parallelism: Parallelism = Parallelism()
    objective: Objective = "throughput"
    target: LatencyTarget | None = None
    price_per_hour: float | None = None
    lossy: bool = False
    knobs: tuple[str, ...] = ()
    """The settings that may be changed; empty: all."""
    draft: str | None = None
    """The requested draft model for speculation."""
    budget_s: float
    spent_s: float = 0.0
    measurements: int = 0
    finished: bool = False
    limit: Limit | None = None
    diagnosis: str | None = None
    """The bottleneck of the plan's own run."""
    sides: tuple[ComparedSettings, ...] = ()
    proofs: tuple[Proof, ...] = ()
    steps: tuple[TuningStep, ...] = ()
    front: tuple[ParetoPoint, ...] = ()
    trials: tuple[Trial, ...] = ()
    refused: tuple[RefusedSetting, ...] = ()
    notes: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    """Why plans do not use it: flags of the measurements of the compared sides."""
    source: str | None = None
    """Imported tunings: the file that it was read from."""

    def find_side(self, name: str) -> ComparedSettings | None:
        return next((one for one in self.sides if one.name == name), None)

    def find_proof(self, against: str) -> Proof | None:
        return next((one for one in self.proofs if one.against == against), None)

    @property
    def is_proven(self) -> bool:
        """Whether the tuned settings are proven better than the plan's."""
        found = self.find_proof("plan")
        return self.finished and found is not None and found.answer == "migrate"

    @property
    def is_inconclusive(self) -> bool:
        """Whether it ended without comparing any other settings with the plan's. An exported one has no trials."""
        tried = any(one.turned and one.taken and not one.own_defaults for one in self.trials)
        compared = self.find_side("tuned") is not None
        return self.finished and not compared and bool(self.steps or (self.trials and not tried))

    def covers(self, workload: Workload) -> bool:
        """Whether it applies to this class of workload."""
        stated = workload.concurrency is not None or workload.users > 1
        in_flight = workload.compute_in_flight() if stated else USUAL_IN_FLIGHT
        shared = workload.shared_prefix_tokens, self.load.shared_prefix_tokens
        return (
            workload.task == "generate"
            and _are_near(in_flight, self.load.concurrency or 1)
            and _are_near(workload.prompt_tokens, self.load.prompt_tokens)
            and _are_near(workload.output_tokens, self.load.output_tokens)
            and (shared[0] > 0) == (shared[1] > 0)
        )


def _are_near(one: float, other: float) -> bool:
    return max(one, other) <= NEAR * min(one, other)


def describe_changes(turned: tuple[SettingChange, ...]) -> str:
    """Such as "weights Q8_0, ubatch 256"; without changes it names the plan."""
    return ", ".join(f"{one.knob} {one.value}" for one in turned) or "as planned"
