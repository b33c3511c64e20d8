"""What the gateway knows of the engine behind it. The supervisor writes it, the gateway reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

BackendState = Literal["loading", "ready", "restarting", "failed", "stopped"]


class Backend:
    """One served model and the private address of the engine that serves it now."""

    def __init__(self, model: str, engine: str, engine_version: str = "", aliases: Iterable[str] = ()) -> None:
        self.model = model
        self.engine = engine
        self.engine_version = engine_version
        self.names = frozenset(name.lower() for name in (model, *aliases))
        self.state: BackendState = "loading"
        self.address: tuple[str, int] | None = None
        self.engine_key: str | None = None
        """What the engine asks of us, so that its private port is of no use to anybody else on the machine."""
        self.progress: float | None = None
        """How much of the model is loaded, 0 to 1, when the engine says so."""
        self.reason: str | None = None
        """Why the engine is not ready, in words."""
        self.retry_after_s = 1
        self.restarts = 0
        self.worked = False
        """Whether the engine has answered anything since it was started."""
        self.max_connections: int | None = None
        """Connections that the engine's HTTP server answers at once; further requests wait here, in order."""
        self.context_tokens: int | None = None

    def answers_to(self, name: str) -> bool:
        return name.lower() in self.names

    def unavailable(self) -> str:
        """Why a request cannot be taken now, in one sentence."""
        if self.state == "failed":
            return f"{self.engine} could not be kept running: {self.reason or 'see its log'}"
        if self.state == "stopped":
            return "bedplate is shutting down"
        if self.state == "restarting":
            return f"{self.engine} stopped and is being restarted"
        done = f" ({self.progress:.0%})" if self.progress is not None else ""
        return f"{self.engine} is still loading {self.model}{done}"
