"""What the gateway knows of the engine behind it. The supervisor writes it, the gateway reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Literal, NamedTuple

BackendState = Literal["loading", "ready", "restarting", "failed", "stopped"]
SICK_AFTER = 3
"""Failures in a row, after which an engine gets no more while others are well."""
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class Ended(NamedTuple):
    """One request that a backend was given, now that it is done with it there."""

    outcome: Literal["ok", "refused", "failed", "cancelled"]
    """failed: here; another backend may have answered it all the same."""
    begun: bool
    """Whether its client had seen a part of the answer."""
    ttft_s: float | None
    """Of a stream: from the moment when the backend got it."""
    duration_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    target: bytes
    body: bytes
    """As the client sent it."""


class Backend:
    """One served model and the private address of one engine that serves it now.

    Several backends of one `model` share its requests: replicas, or an engine and its challenger.
    """

    def __init__(
        self,
        model: str,
        engine: str,
        engine_version: str = "",
        aliases: Iterable[str] = (),
        *,
        share: float = 1.0,
        group: str | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.engine_version = engine_version
        self.group = group or f"{engine} {engine_version}"
        """Backends of one group and share are replicas: any of them will do, the least loaded one best."""
        self.names = frozenset(name.lower() for name in (model, *aliases))
        self.changed: Callable[[Backend], None] | None = None
        """Told of a new state or share; the gateway's own."""
        self.begun: Callable[[], None] | None = None
        """Told in the very moment when it is given a request."""
        self.on_end: Callable[[Ended], None] | None = None
        """Told of each request that it is done with, for those who compare engines."""
        self._state: BackendState = "loading"
        self._share = share
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
        self.slots: int | None = None
        """Requests that the engine computes at once. Where several tenants share it, no more are sent to it, since
        what waits inside of an engine waits in its order and not by whose turn it is."""
        self.context_tokens: int | None = None
        self.attempts = 1
        """How often it may be given one request: more than once where several engines stand behind its address."""
        self.wants_name = False
        """Whether requests must name the model by the very name that it is served under."""
        self.in_flight = 0
        """Requests that it has been given and that have not ended."""
        self.last_used = monotonic()
        """When it was last given one, or done with one; on the monotonic clock."""
        self.health = Health()

    @property
    def state(self) -> BackendState:
        return self._state

    @state.setter
    def state(self, state: BackendState) -> None:
        self._state = state
        if state == "ready":
            self.health = Health()
        self._tell()

    @property
    def share(self) -> float:
        """Its part of the model's requests, beside those of the other backends; 0: it gets nothing new."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        if not 0 <= share < float("inf"):
            raise ValueError(f"a share is 0 or more, not {share}")
        self._share = share
        self._tell()

    @property
    def takes_new(self) -> bool:
        """Whether it may be given a request, however well it is."""
        return self._state == "ready" and self._share > 0

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

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed(self)


class Health:
    """Whether an engine does what it is asked. One that fails again and again rests, longer each time, and is then
    tried with one request."""

    __slots__ = ("_failures", "_rest_s", "_rests_until", "_trying")

    def __init__(self) -> None:
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._rests_until: float | None = None
        self._trying = False

    @property
    def is_well(self) -> bool:
        return self._rests_until is None

    def may_try(self, now: float) -> bool:
        if self._rests_until is None:
            return True
        return now >= self._rests_until and not self._trying

    def sent(self) -> None:
        """A request goes to it; to one that rests, as a trial."""
        self._trying = self._rests_until is not None

    def succeeded(self) -> None:
        if self._failures:
            self.__init__()  # type: ignore[misc]

    def ended_otherwise(self) -> None:
        """A trial that says nothing: its client left."""
        self._trying = False

    def failed(self, now: float) -> None:
        self._failures += 1
        self._trying = False
        if self._failures >= SICK_AFTER:
            if self._rests_until is not None:
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._rests_until = now + self._rest_s
