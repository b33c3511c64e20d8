"""Endpoint: the address of a served model."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record
from bedplate.values.workload import NotNegative

Orchestrator = Literal["dynamo", "ray"]
"""Orchestrators that bedplate can run on this machine."""


StartPhase = Literal["start", "load", "compile", "capture", "warm-up"]
"""Phases of an engine's start.

start: its processes start and import their packages. load: weights. compile: kernels and graphs. capture: CUDA graphs.
warm-up: the rest, such as allocating the KV cache and the first runs.
"""


class StartPhaseTime(Record, frozen=True, kw_only=True):
    phase: StartPhase
    seconds: NotNegative


class EndpointOrchestrator(Record, frozen=True, kw_only=True):
    """The orchestrator between the endpoint and the engines, and the workers that it runs."""

    orchestrator: Orchestrator
    version: str
    workers: str
    """The engine's id, or `mocker`."""
    workers_version: str
    real: bool
    """Whether the workers run the model. A mocker only simulates the timing, and its text has no meaning."""
    replicas: int
    text: str
    """The above in one sentence, with the reason if the workers do not run the model."""


class Endpoint(Record, frozen=True, kw_only=True):
    schema: Literal["endpoint/1"] = "endpoint/1"
    url: str
    """The base URL for OpenAI clients, ending in /v1."""
    model: str
    engine: str
    engine_version: str
    needs_key: bool = False
    pid: int
    log: str
    name: str | None = None
    """Name of the service in `ps`, `status`, `logs` and `stop`."""
    models: tuple[str, ...] = ()
    """All models served there, including `model`."""
    on: EndpointOrchestrator | None = None
    """The orchestrator that runs the engines; `None`: bedplate runs them itself."""
    phases: tuple[StartPhaseTime, ...] = ()
    """How long each phase of the first engine's start took; empty if its log does not show phases."""
