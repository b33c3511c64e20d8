"""Endpoint: where a served model answers."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record

Orchestrator = Literal["dynamo", "ray"]
"""What can stand above the engines of a service on this machine."""


class Above(Record, frozen=True, kw_only=True):
    """What stands between the endpoint and the engines, and what those engines are."""

    orchestrator: Orchestrator
    version: str
    workers: str
    """The engine, or `mocker`."""
    workers_version: str
    real: bool
    """Whether they compute; a mocker only takes its time, and its text means nothing."""
    replicas: int
    text: str
    """All of that in a sentence, with the reason where they do not compute."""


class Endpoint(Record, frozen=True, kw_only=True):
    schema: Literal["endpoint/1"] = "endpoint/1"
    url: str
    """The base that OpenAI clients take, ending in /v1."""
    model: str
    engine: str
    engine_version: str
    needs_key: bool = False
    pid: int
    log: str
    name: str | None = None
    """Of the service, as `ps`, `status`, `logs` and `stop` know it."""
    models: tuple[str, ...] = ()
    """All that are served there, the first one included."""
    on: Above | None = None
    """What runs the engines, where bedplate does not do so itself."""
