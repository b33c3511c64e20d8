"""Endpoint: where a served model answers."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Record


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
