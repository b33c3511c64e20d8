"""Tuning: what an engine lets one turn, what came of turning it here, and the settings that were the best."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Parallelism, Settings, Weights
from bedplate.values.diagnosis import Limit
from bedplate.values.record import Figure, Record
from bedplate.values.run import Load, Quality
from bedplate.values.verdict import Answer
from bedplate.values.workload import LatencyTarget, Workload

Objective = Literal["throughput", "latency", "memory", "energy", "cost"]
Risk = Literal["answers", "memory", "start"]
"""What a knob may do beside changing the speed: change answers, take more memory, keep the engine from starting."""
RefusedKind = Literal["start", "died", "swapped", "answers", "errors"]
Opponent = Literal["own defaults", "plan"]
SideName = Opponent | Literal["tuned"]
NEAR = 2.0
"""Lengths and numbers in flight within this factor are the same class of work."""
USUAL_IN_FLIGHT = 4
"""What is taken where nobody says how many come at once: a client, a retry or two."""


class Choice(Record, frozen=True, kw_only=True):
    """One value of a knob, and what it means for the launch."""

    value: str
    options: tuple[str, ...] = ()
    """Words of the engine's command line; an option that the plan names already is replaced."""
    without: tuple[str, ...] = ()
    """Options of the plan's command line that go."""
    variables: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, int | str], ...] = ()
    """Fields of `Settings`, for what all engines share."""
    weights: str | None = None
    """The label of weights that are made of the model's own."""
    weights_format: str | None = None
    """What these are stored in; nothing: as the plan's."""
    native: bool = False
    """Whether the engine as it was built for this machine takes the place of the ready-made one."""
    lossy: bool = False
    """Whether it answers less faithfully than the plan, by what is known of it."""
    start_s: float = 0.0
    """What it adds to a start, as far as is known before one was seen."""
    restless: bool = False
    """Whether its engine keeps the processors busy while it has nothing to do, so that nobody can be measured beside
    it."""


class Knob(Record, frozen=True, kw_only=True):
    name: str
    meaning: str
    choices: tuple[Choice, ...]
    now: str
    """Its value in the plan."""
    own: str
    """The engine's own default, in words."""
    own_choice: str | None = None
    """The same as one of the choices, where it is one of them."""
    ordered: bool = False
    """Whether its values are a scale, on which one can go on in the direction that helped."""
    first: tuple[str, ...] = ()
    """Where on its scale to begin; nothing: beside where it stands."""
    alone: bool = False
    """Whether it changes so much that the others are tried only after it."""
    limits: tuple[Limit, ...] = ()
    """Which limits of a diagnosis it may move; none: it may help with any."""
    risk: tuple[Risk, ...] = ()
    prior: float
    """How likely it is to bring more than noise, as far as is known before anything is measured."""
    source: str
    """Where all this is known from."""


class Turn(Record, frozen=True, kw_only=True):
    knob: str
    value: str


class Taken(Record, frozen=True, kw_only=True):
    """One short measurement: all requests in flight at once, from the first byte sent to the last one received."""

    at: str
    seconds: float
    score: float
    """The logarithm of the objective; more is better."""
    output_tok_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    peak_memory_bytes: int | None = None
    energy_j_per_token: float | None = None
    cut: bool = False
    """Given up once it was clearly slower than the best; the figures are then what it did not even reach."""


class Trial(Record, frozen=True, kw_only=True):
    """One setting, as often as it was measured."""

    turned: tuple[Turn, ...] = ()
    """Away from the plan."""
    own_defaults: bool = False
    taken: tuple[Taken, ...] = ()
    start_s: float | None = None

    @property
    def best(self) -> Taken | None:
        """The middle one of those that came to their end."""
        whole = sorted((one for one in self.taken if not one.cut), key=lambda one: one.score)
        return whole[len(whole) // 2] if whole else None


class Refused(Record, frozen=True, kw_only=True):
    """A setting that is never proposed again on this machine with this version, and what shows why."""

    schema: Literal["refused-setting/1"] = "refused-setting/1"
    at: str
    machine: str
    engine: str
    engine_version: str
    model: str
    turn: Turn
    """What was changed when it happened."""
    turned: tuple[Turn, ...]
    """All that differed from the plan."""
    kind: RefusedKind
    why: str
    evidence: tuple[str, ...] = ()


class Step(Record, frozen=True, kw_only=True):
    """One change that was kept, and what it brought at that moment."""

    turn: Turn
    before: str
    gain: Figure
    """How many times better by the objective."""


class Side(Record, frozen=True, kw_only=True):
    """One of those that are compared at the end, measured in turns with the others."""

    name: SideName
    turned: tuple[Turn, ...] = ()
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
    taken: tuple[Taken, ...] = ()
    """Turn by turn."""


class Proof(Record, frozen=True, kw_only=True):
    """The tuned settings beside others, as `compare` weighs them."""

    against: Opponent
    answer: Answer
    text: str
    output_tok_s: Figure | None = None
    """How many times better, with its 95 % interval."""
    ttft_ms: Figure | None = None
    """Likewise: 2 is half the time."""


class OnFront(Record, frozen=True, kw_only=True):
    """A setting that no other beats in everything at once."""

    name: str
    turned: tuple[Turn, ...] = ()
    output_tok_s: float
    ttft_ms: float
    peak_memory_bytes: int | None = None


class Tuned(Record, frozen=True, kw_only=True):
    """One run of `bedplate tune`, kept after each measurement."""

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
    """As it was named; `None`: the built-in one."""
    weights_id: str | None = None
    load: Load
    workload: Workload
    parallelism: Parallelism = Parallelism()
    objective: Objective = "throughput"
    target: LatencyTarget | None = None
    price_per_hour: float | None = None
    lossy: bool = False
    knobs: tuple[str, ...] = ()
    """Those that were allowed; none: all."""
    draft: str | None = None
    """A small model that may guess ahead, which was asked for."""
    budget_s: float
    spent_s: float = 0.0
    measurements: int = 0
    finished: bool = False
    limit: Limit | None = None
    diagnosis: str | None = None
    """What the plan's own run was limited by."""
    sides: tuple[Side, ...] = ()
    proofs: tuple[Proof, ...] = ()
    steps: tuple[Step, ...] = ()
    front: tuple[OnFront, ...] = ()
    trials: tuple[Trial, ...] = ()
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()
    source: str | None = None
    """Of what others found: the file that it was read from."""

    def side(self, name: str) -> Side | None:
        return next((one for one in self.sides if one.name == name), None)

    def proof(self, against: str) -> Proof | None:
        return next((one for one in self.proofs if one.against == against), None)

    @property
    def proven(self) -> bool:
        """Whether the tuned settings were shown to be better than the plan's."""
        found = self.proof("plan")
        return self.finished and found is not None and found.answer == "migrate"

    def covers(self, workload: Workload) -> bool:
        """Whether it was found for this class of work."""
        stated = workload.concurrency is not None or workload.users > 1
        in_flight = workload.in_flight() if stated else USUAL_IN_FLIGHT
        shared = workload.shared_prefix_tokens, self.load.shared_prefix_tokens
        return (
            workload.task == "generate"
            and _near(in_flight, self.load.concurrency or 1)
            and _near(workload.prompt_tokens, self.load.prompt_tokens)
            and _near(workload.output_tokens, self.load.output_tokens)
            and (shared[0] > 0) == (shared[1] > 0)
        )


def _near(one: float, other: float) -> bool:
    return max(one, other) <= NEAR * min(one, other)


def words_of(turned: tuple[Turn, ...]) -> str:
    """Such as "weights Q8_0, ubatch 256"; nothing turned is the plan itself."""
    return ", ".join(f"{one.knob} {one.value}" for one in turned) or "as planned"
