"""The state of an engine as the gateway sees it. The supervisor writes it, the gateway reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from bedplate.engines import KnownMistake
    from bedplate.engines.traits import RequestTraits
    from bedplate.run.gateway.elsewhere import RemoteAddress
    from bedplate.run.gateway.errors import EngineError
    from bedplate.values.capabilities import Capabilities, Feature

from bedplate.run.gateway.sse import set_fields, set_model
from bedplate.run.start_phases import StartPhases
from bedplate.values.service import LastExit

BackendState = Literal["loading", "ready", "restarting", "failed", "stopped"]
EJECT_AFTER = 3
"""After this many consecutive failures an engine gets no requests for a while, if other engines are healthy."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class FinishedRequest(NamedTuple):
    """A request that has ended at one backend."""

    outcome: Literal["ok", "refused", "mistaken", "failed", "cancelled"]
    """mistaken: refused, and every engine would refuse it. failed: at this backend; another one may have answered."""
    begun: bool
    """Whether the client had received a part of the answer."""
    ttft_s: float | None
    """Of a stream: from the moment when it was sent to the backend."""
    duration_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    target: bytes
    body: bytes
    """As the client sent it."""


class GatewayBackend:
    """One engine of a served model, and its private address.

    Several backends of one `model` share its requests: replicas, or an incumbent and its challenger.
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
        """Backends with the same group and share are replicas: requests go to the least loaded one."""
        self.names = frozenset(name.lower() for name in (model, *aliases))
        self.changed: Callable[[GatewayBackend], None] | None = None
        """Called after each change of state or share; set by the gateway."""
        self.begun: Callable[[], None] | None = None
        """Called when a request is sent to it."""
        self.on_end: Callable[[FinishedRequest], None] | None = None
        """Called when a request has ended here, to compare engines."""
        self.drop_requests: Callable[[], None] | None = None
        """Ends its connections: their requests are sent to another engine, or get an error. Set by the gateway."""
        self._state: BackendState = "loading"
        self._share = share
        self.address: tuple[str, int] | None = None
        self.engine_key: str | None = None
        """The API key that the engine requires, so that other users of the machine cannot use its private port."""
        self.progress: float | None = None
        """How much of the model is loaded, 0 to 1, if the engine reports it."""
        self.phases = StartPhases()
        """The phases of its start."""
        self.reason: str | None = None
        """Why the engine is not ready."""
        self.retry_after_s = 1
        self.restarts = 0
        self.restarts_behind = 0
        """Restarts of replicas that an orchestrator has in other processes than this one."""
        self.last_exit: LastExit | None = None
        """Why the last process of the engine ended."""
        self.worked = False
        """Whether the engine has answered anything since it was started."""
        self.max_connections: int | None = None
        """Concurrent connections that the engine's HTTP server accepts; further requests wait in the gateway."""
        self.slots: int | None = None
        """Concurrent requests that the engine computes. Where several tenants share it, no more are sent to it, since
        an engine's own queue does not know tenants."""
        self.context_tokens: int | None = None
        self.requests: RequestTraits | None = None
        """How the engine handles what changes the cost of a request; `None`: not known."""
        self.lacking_apis: frozenset[str] = frozenset()
        """The other APIs that it does not have, where `requests` is not known."""
        self.capabilities: Capabilities | None = None
        """What its requests may ask for; `None`: not known."""
        self.find_mistake: Callable[[str], KnownMistake | None] | None = None
        """Recognizes a client's mistake by the engine's error message."""
        self.attempts = 1
        """How many times one request may be sent to it: more than once if its address is a load balancer."""
        self.wants_name = False
        """Whether requests must contain `sent_name`."""
        self.sent_name = model
        """The model's name in requests to it, where it wants one."""
        self.body_fields: dict[str, Any] = {}
        """Fields of requests to it, instead of the name."""
        self.followers: list[AdapterBackend] = []
        """The LoRA adapters that it serves under names of their own."""
        self.remote: RemoteAddress | None = None
        """The endpoint elsewhere; `None`: an engine on this machine."""
        self.connect_options: dict[str, Any] = {}
        """For asyncio, which connects to it."""
        self.rank = 0
        """Its position, where requests go to the first backend that can answer."""
        self.price = 0.0
        """What a million tokens cost, where requests go to the cheapest backend."""
        self.sent = 0
        """Number of requests that were sent to it."""
        self.in_flight = 0
        """Requests that were sent to it and have not ended."""
        self.received = 0
        """Parts of answers that it has sent. The supervisor sees from it that the engine makes progress."""
        self.unread = 0
        """Answers whose clients do not read: the engine need not make progress with them."""
        self.last_used = monotonic()
        """When a request was last sent to it, or ended there; on the monotonic clock."""
        self.health = Health()

    @property
    def state(self) -> BackendState:
        return self._state

    @state.setter
    def state(self, state: BackendState) -> None:
        self._state = state
        if state == "ready":
            self.health = Health()
        self.notify()

    @property
    def share(self) -> float:
        """Its share of the model's requests, relative to the other backends; 0: it gets no new requests."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        if not 0 <= share < float("inf"):
            raise ValueError(f"a share must be 0 or more, not {share}")
        self._share = share
        self.notify()

    @property
    def takes_new(self) -> bool:
        """Whether it accepts new requests, whatever its health."""
        return self._state == "ready" and self._share > 0

    @property
    def is_asleep(self) -> bool:
        """Whether it is unavailable until a request has it started."""
        return False

    @property
    def has_hung(self) -> bool:
        """Whether it is unavailable because it hung."""
        return self._state != "ready" and self.last_exit is not None and self.last_exit.cause == "hung"

    def supports(self, features: tuple[Feature, ...]) -> bool:
        known = self.capabilities
        return known is None or all(known.supports(one) for one in features)

    def mark_unreachable(self, reason: str) -> None:
        """Called when it does not accept connections, or answers with 503: it did not begin with the request."""

    def translate_error(self, error: EngineError) -> EngineError:
        """The error as the client gets it."""
        return error

    def explain_unavailable(self) -> str:
        """Why a request cannot be accepted now."""
        if self.state == "failed":
            return f"{self.engine} failed repeatedly and is not restarted: {self.reason or 'see its log'}"
        if self.state == "stopped":
            return "bedplate is shutting down"
        if self.state == "restarting":
            return f"{self.engine} {'hung' if self.has_hung else 'stopped'} and is being restarted"
        phase = self.phases.describe_current()
        done = f" ({self.progress:.0%})" if self.progress is not None else ""
        return f"{self.engine} is still loading {self.model}{f' ({phase})' if phase is not None else done}"

    def notify(self) -> None:
        """Says that the state, the share or what it supports has changed."""
        if self.changed is not None:
            self.changed(self)
        for one in self.followers:
            if one.changed is not None:
                one.changed(one)

    def address_body(self, body: bytes) -> bytes:
        """The body with the name or the fields that this backend needs."""
        if self.body_fields:
            return set_fields(body, self.body_fields)
        return set_model(body, self.sent_name)


class AdapterBackend(GatewayBackend):
    """A LoRA adapter of an engine, under a name of its own. All but its name, share and route are the engine's."""

    _OWN = frozenset(
        {"base", "model", "names", "group", "changed", "begun", "on_end", "drop_requests", "_share", "share"}
        | {"wants_name", "sent_name", "body_fields", "followers"}
    )

    def __init__(self, base: GatewayBackend, name: str, body_fields: dict[str, Any]) -> None:
        self.base = base
        self.model, self.names, self.group = name, frozenset([name.lower()]), f"{base.group} {name}"
        self.changed: Callable[[GatewayBackend], None] | None = None
        self.begun, self.on_end, self.drop_requests = base.begun, None, None
        self._share = 1.0
        self.wants_name = True
        self.body_fields = body_fields
        # Without fields the engine knows the adapter as a model; otherwise every request needs the fields.
        self.sent_name = "" if body_fields else name
        self.followers: list[AdapterBackend] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.base, name, value)


class Health:
    """Ejects an engine after consecutive failures. It gets no requests for a pause, then one trial request; each
    failed trial doubles the pause."""

    __slots__ = ("_in_trial", "_pause_s", "_paused_until", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """Consecutive ones; while there are none, neither sent requests nor answers have to be recorded."""
        self._pause_s = FIRST_PAUSE_S
        self._paused_until: float | None = None
        self._in_trial = False

    @property
    def is_healthy(self) -> bool:
        return self._paused_until is None

    def can_try(self, now: float) -> bool:
        if self._paused_until is None:
            return True
        return now >= self._paused_until and not self._in_trial

    def record_sent(self) -> None:
        """Records a request that is sent to the engine; to an ejected engine, it is the trial."""
        self._in_trial = self._paused_until is not None

    def record_success(self) -> None:
        if self.failures:
            self.__init__()  # type: ignore[misc]

    def record_inconclusive(self) -> None:
        """Records a trial without a result: its client disconnected."""
        self._in_trial = False

    def record_failure(self, now: float) -> None:
        self.failures += 1
        self._in_trial = False
        if self.failures >= EJECT_AFTER:
            if self._paused_until is not None:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._paused_until = now + self._pause_s
