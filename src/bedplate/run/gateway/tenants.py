"""Tenants with their keys and limits. They may change while requests are served; nothing here accesses the disk."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from bedplate.run.gateway import sse
from bedplate.run.gateway.errors import encode_error
from bedplate.run.gateway.fair import SMOOTHING
from bedplate.values.record import replace_fields
from bedplate.values.tenant import DEFAULT_TENANT, LIMITS, DeclaredTenant, Tenant, digest_key

if TYPE_CHECKING:
    from bedplate.run.gateway.shared_limits import SharedLimits
    from bedplate.run.gateway.watch import TenantMeter

BYTES_PER_TOKEN = 4
"""Estimates the tokens of a body, to charge a request before the engine has counted them."""
FIRST_OUTPUT_TOKENS = 256.0
"""Expected tokens of an answer before any has ended."""
_LIMIT_HEADERS = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%dms\r\n"


class KeyDigest(NamedTuple):
    """The digest of one valid key."""

    digest: bytes
    tenant: str
    expires_s: float | None = None
    """Seconds since 1970."""


class Rejection(NamedTuple):
    """Why a request is not accepted, and the response that says so."""

    status: int
    message: str
    code: str
    retry_after_s: int
    """0: the same request will be rejected again."""
    param: str | None = None
    """The field of the request that caused it."""

    def encode(self, api: sse.Api) -> bytes:
        """The body of the response."""
        kinds = {429: "rate_limit_error", 400: "invalid_request_error"}
        kind = kinds.get(self.status, "server_error")
        return encode_error(api, self.status, self.message, kind, self.code, self.param)

    def format_retry_header(self) -> bytes:
        return b"retry-after: %d\r\n" % self.retry_after_s if self.retry_after_s else b""


class Demand(NamedTuple):
    """What a request demands of an engine."""

    prompts: int = 1
    choices: int = 1
    """The answers to each prompt."""
    prompt_tokens: int | None = None
    """Where the prompt consists of token ids."""
    least_tokens: int = 0
    """The length of each answer that the request enforces."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.choices


ONE_SEQUENCE = Demand()


class RateBucket:
    """A token bucket: `per_minute` units a minute, also in one burst. A later correction may overdraw it."""

    __slots__ = ("_at", "_ms_per_unit", "_per_s", "level", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60
        self._ms_per_unit = 60_000 / per_minute
        self.level = float(per_minute)
        """What was available at the last update. At least as much is available now, without looking at the clock."""
        self._at = time.monotonic()

    def read_level(self, now: float) -> float:
        self.take(0.0, now)
        return self.level

    def compute_wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` is available; an amount larger than the bucket needs a full bucket."""
        missing = min(amount, self.per_minute) - self.read_level(now)
        return missing * 60 / self.per_minute if missing > 0 else 0.0

    def take(self, amount: float, now: float) -> None:
        level = self.level
        if now > self._at:
            level += (now - self._at) * self._per_s
            if level > self.per_minute:
                level = self.per_minute
            self._at = now
        self.level = level - amount

    def restore(self, level: float, elapsed_s: float, now: float) -> None:
        """Sets the level as it was `elapsed_s` ago."""
        self.level, self._at = level, now
        self.take(0.0, now + elapsed_s)
        self._at = now

    def report_remaining(self) -> tuple[float, float]:
        """The available amount at the last update, and the milliseconds until the bucket is full, to be rounded off."""
        level = self.level
        return level if level > 0 else 0, (self.per_minute - level) * self._ms_per_unit + 1


class TenantState:
    """The current limits and usage of one tenant."""

    __slots__ = (
        "_limit_headers", "has_limits", "in_flight", "is_admin", "is_limited", "max_in_flight", "mean_output", "meter",
        "name", "requests", "shared", "tokens", "weight",
    )  # fmt: skip

    def __init__(self, tenant: Tenant, shared: SharedLimits | None = None) -> None:
        self.name = tenant.name
        self.shared = shared
        """The limits are those of all gateways together; the buckets here show what is left of them."""
        self.meter: TenantMeter | None = None
        """Set when its first request has ended."""
        self.in_flight = 0
        self.mean_output = FIRST_OUTPUT_TOKENS
        self.requests: RateBucket | None = None
        self.tokens: RateBucket | None = None
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        self.weight = tenant.weight
        self.max_in_flight = tenant.in_flight
        self.requests = _create_bucket(self.requests, tenant.requests_per_minute)
        self.tokens = _create_bucket(self.tokens, tenant.tokens_per_minute)
        self._limit_headers = b"".join(
            _LIMIT_HEADERS % (name, limit, name, name)
            for name, limit in ((b"requests", tenant.requests_per_minute), (b"tokens", tenant.tokens_per_minute))
            if limit is not None
        )
        self.has_limits = self.requests is not None or self.tokens is not None
        """Whether responses carry `x-ratelimit` headers."""
        self.is_limited = self.has_limits or self.max_in_flight is not None
        self.is_admin = tenant.admin or tenant.name == DEFAULT_TENANT
        """Whether it may see other tenants' figures."""

    def copy_limits(self) -> TenantState:
        """The same limits, of which nothing is used."""
        requests, tokens = self.requests, self.tokens
        limits = Tenant(
            name=self.name,
            requests_per_minute=requests.per_minute if requests is not None else None,
            tokens_per_minute=tokens.per_minute if tokens is not None else None,
            in_flight=self.max_in_flight,
        )
        return TenantState(limits)

    def estimate_cost_tokens(self, body_bytes: int, max_tokens: int | None, demand: Demand = ONE_SEQUENCE) -> float:
        """The expected cost of a request, from its length, its `max_tokens` and this tenant's earlier answers."""
        output = self.mean_output
        if max_tokens is not None:
            most = 4 * output
            output = max_tokens if max_tokens < most else most
        if demand is ONE_SEQUENCE:
            return body_bytes / BYTES_PER_TOKEN + output
        prompt = demand.prompt_tokens if demand.prompt_tokens is not None else body_bytes / BYTES_PER_TOKEN
        return prompt + demand.sequences * max(output, demand.least_tokens)

    def check_limits(self, cost_tokens: float, now: float, sequences: int = 1) -> Rejection | None:
        """Why a limit forbids one more request with so many sequences now; `None` where none does."""
        if self.max_in_flight is not None and self.in_flight + sequences > self.max_in_flight:
            if sequences > self.max_in_flight > 0:
                return reject_sequences(sequences, self.max_in_flight, "the limit of concurrent requests is")
            message = f"the limit of {self.max_in_flight} concurrent requests is reached"
            return Rejection(429, message, "too_many_in_flight", 1)
        requests, tokens = self.requests, self.tokens
        if sequences > 1 and tokens is not None and cost_tokens > tokens.per_minute:
            message = (
                f"this request makes {sequences} sequences, which need about {cost_tokens:,.0f} tokens; the limit is "
                f"{tokens.per_minute:,} tokens per minute: send fewer in one request"
            )
            return Rejection(400, message, "too_many_sequences", 0)
        if requests is not None and requests.level < 1 and (wait_s := requests.compute_wait_s(1, now)):
            message = f"the limit of {requests.per_minute:,} requests per minute is reached"
            return Rejection(429, message, "requests_per_minute", max(1, math.ceil(wait_s)))
        if tokens is not None and tokens.level < cost_tokens and (wait_s := tokens.compute_wait_s(cost_tokens, now)):
            message = (
                f"the limit of {tokens.per_minute:,} tokens per minute is reached: "
                f"this request needs about {cost_tokens:,.0f}"
            )
            return Rejection(429, message, "tokens_per_minute", max(1, math.ceil(wait_s)))
        return None

    def admit(self, cost_tokens: float, now: float) -> None:
        self.in_flight += 1
        self.charge(cost_tokens, now)

    def charge(self, cost_tokens: float, now: float) -> None:
        """Charges one more request to the limits per minute."""
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(cost_tokens, now)

    def correct_charge(
        self, charged_tokens: float, used_tokens: float, output_tokens: int | None, now: float, sequences: int = 1
    ) -> None:
        """Corrects the charge of a request that has ended to the tokens that it used."""
        if self.tokens is not None:
            self.tokens.take(used_tokens - charged_tokens, now)
            if self.shared is not None:
                self.shared.correct(self.name, used_tokens - charged_tokens)
        if output_tokens is not None:
            self.mean_output += SMOOTHING * (output_tokens / sequences - self.mean_output)

    def format_limit_headers(self) -> bytes:
        """The remaining limits as the headers of OpenAI's API."""
        requests, tokens = self.requests, self.tokens
        if requests is not None and tokens is not None:
            return self._limit_headers % (*requests.report_remaining(), *tokens.report_remaining())
        only = requests or tokens
        return self._limit_headers % only.report_remaining() if only is not None else b""


class Tenants:
    """All tenants and keys. Without keys the endpoint is open, and all requests belong to the default tenant."""

    def __init__(
        self, api_key: str | None = None, salt: bytes | None = None, shared: SharedLimits | None = None
    ) -> None:
        self._shared = shared
        self.salt = salt or secrets.token_bytes(32)
        self._own = digest_key(api_key.encode(), self.salt) if api_key is not None else None
        self._members: dict[str, TenantState] = {}
        self._keys: dict[bytes, KeyDigest] = {}
        self._declared: dict[str, DeclaredTenant] = {}
        self._stored: tuple[Tenant, ...] = ()
        self.turn = object()
        """A token that changes whenever tenants or keys may have changed; cached keys are then looked up again."""
        self.is_open = True
        """Whether no key is required. It never becomes true again: revoking the last key must not open the endpoint."""
        self.replace((), ())

    @property
    def has_several(self) -> bool:
        """Whether more than one tenant has a key."""
        return len({key.tenant for key in self._keys.values()}) > 1

    def get_member(self, name: str) -> TenantState | None:
        return self._members.get(name)

    def list_members(self) -> list[TenantState]:
        return list(self._members.values())

    @property
    def has_valid_key(self) -> bool:
        now = time.time()
        return any(key.expires_s is None or key.expires_s > now for key in self._keys.values())

    def require_key(self) -> None:
        """Closes the endpoint to requests without a valid key, even if there is none."""
        self.is_open = False

    def replace(self, tenants: Iterable[Tenant], keys: Iterable[KeyDigest]) -> None:
        """Replaces the stored tenants and keys; the usage of tenants that stay is kept."""
        self._stored = tuple(tenants)
        self._keys = {key.digest: key for key in keys}
        if self._own is not None:
            self._keys[self._own] = KeyDigest(self._own, DEFAULT_TENANT)
        self._rebuild_members()

    def declare(self, declared: Iterable[DeclaredTenant]) -> None:
        """Sets the tenants of the intent file. Their limits take precedence over those in the store.

        An endpoint with declared tenants requires a key, even while none of them has one.
        """
        self._declared = {one.name: one for one in declared}
        self._rebuild_members()

    def _rebuild_members(self) -> None:
        self.turn = object()
        known = {tenant.name: tenant for tenant in (*map(_create_tenant, self._declared), *self._stored)}
        known.setdefault(DEFAULT_TENANT, Tenant(name=DEFAULT_TENANT))
        before, self._members = self._members, {}
        for name, tenant in known.items():
            allowed = apply_declared_limits(tenant, self._declared.get(name))
            member = self._members[name] = before.get(name) or TenantState(allowed, self._shared)
            member.update(allowed)
        self.default = self._members[DEFAULT_TENANT]
        self._keys = {digest: key for digest, key in self._keys.items() if key.tenant in self._members}
        self.is_open = self.is_open and not self._keys and not self._declared

    def find(self, given: bytes) -> VerifiedKey | None:
        """Returns the key's owner; `None` for a key that is unknown or has expired."""
        digest = digest_key(given, self.salt)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        found = VerifiedKey(given, self._members[key.tenant], key.expires_s, self.turn)
        return None if found.has_expired else found


class VerifiedKey:
    """A valid key, cached so that the next request on the connection needs no lookup."""

    __slots__ = ("_given", "expires_s", "member", "turn")

    def __init__(self, given: bytes, member: TenantState, expires_s: float | None, turn: object) -> None:
        self._given = given
        self.member = member
        self.expires_s = expires_s
        self.turn = turn

    @property
    def has_expired(self) -> bool:
        return self.expires_s is not None and time.time() >= self.expires_s

    def is_valid_for(self, given: bytes, turn: object) -> bool:
        """Whether this is the same key, has not expired, and no key has changed since it was verified."""
        return hmac.compare_digest(given, self._given) and turn is self.turn and not self.has_expired


def reject_sequences(sequences: int, limit: int, what: str) -> Rejection:
    """Rejects a request with more sequences than can ever run at once."""
    message = f"this request makes {sequences} sequences; {what} {limit}: send at most {limit} in one request"
    return Rejection(400, message, "too_many_sequences", 0)


def apply_declared_limits(stored: Tenant, declared: DeclaredTenant | None) -> Tenant:
    """The stored tenant with the declared limits, which take precedence."""
    if declared is None:
        return stored
    limits = {name: value for name in LIMITS if (value := getattr(declared, name)) is not None}
    return replace_fields(stored, **limits)


def _create_tenant(name: str) -> Tenant:
    return Tenant(name=name)


def _create_bucket(before: RateBucket | None, per_minute: int | None) -> RateBucket | None:
    if per_minute is None:
        return None
    return before if before is not None and before.per_minute == per_minute else RateBucket(per_minute)
