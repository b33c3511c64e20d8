"""Who asks: keys, and what each tenant may have. Changed while requests come; nothing here touches the disk."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from bedplate.run.gateway.fair import SMOOTHING
from bedplate.values.record import replaced
from bedplate.values.tenant import DEFAULT_TENANT, LIMITS, Declared, Tenant, key_digest

if TYPE_CHECKING:
    from bedplate.run.gateway.watch import TenantMeter

BYTES_PER_TOKEN = 4
"""Of a body, for what is charged before the engine has counted."""
FIRST_OUTPUT_TOKENS = 256.0
"""What an answer is taken to have before any has ended."""
_TOLD = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%dms\r\n"


class KeyDigest(NamedTuple):
    """One key that opens the endpoint."""

    digest: bytes
    tenant: str
    expires_s: float | None = None
    """Seconds since 1970."""


class Unaccepted(NamedTuple):
    """Why a request is not taken, as its answer says it."""

    status: int
    message: str
    code: str
    retry_after_s: int


class Bucket:
    """So much a minute, all of it at once if need be. May be overdrawn by what turns out later."""

    __slots__ = ("_at", "_level", "_per_s", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60
        self._level = float(per_minute)
        self._at = time.monotonic()

    def level(self, now: float) -> float:
        self.take(0.0, now)
        return self._level

    def has(self, amount: float) -> bool:
        """Whether so much can be taken for sure, without a look at the clock: since then it has only grown."""
        return amount <= self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until so much can be taken; more than fits is let through when it is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing * 60 / self.per_minute if missing > 0 else 0.0

    def take(self, amount: float, now: float) -> None:
        level = self._level
        if now > self._at:
            level += (now - self._at) * self._per_s
            if level > self.per_minute:
                level = self.per_minute
            self._at = now
        self._level = level - amount

    def left(self) -> tuple[int, int]:
        """As it was when last taken from: what could be had at once, and in how many milliseconds all of it."""
        level = self._level
        return int(level) if level > 0 else 0, int((self.per_minute - level) * 1000 / self._per_s) + 1


class Member:
    """One tenant as the gateway sees it now."""

    __slots__ = (
        "_told", "has_limits", "in_flight", "is_admin", "is_limited", "max_in_flight", "mean_output", "meter", "name",
        "requests", "tokens", "weight",
    )  # fmt: skip

    def __init__(self, tenant: Tenant) -> None:
        self.name = tenant.name
        self.meter: TenantMeter | None = None
        """Its series, once there are any."""
        self.in_flight = 0
        self.mean_output = FIRST_OUTPUT_TOKENS
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        self.weight = tenant.weight
        self.max_in_flight = tenant.in_flight
        self.requests = _bucket(self.requests, tenant.requests_per_minute)
        self.tokens = _bucket(self.tokens, tenant.tokens_per_minute)
        self._told = b"".join(
            _TOLD % (name, limit, name, name)
            for name, limit in ((b"requests", tenant.requests_per_minute), (b"tokens", tenant.tokens_per_minute))
            if limit is not None
        )
        self.has_limits = self.requests is not None or self.tokens is not None
        """Of those that its answers tell."""
        self.is_limited = self.has_limits or self.max_in_flight is not None
        self.is_admin = tenant.admin or tenant.name == DEFAULT_TENANT
        """Whether it may see what others use."""

    def cost_tokens(self, body_bytes: int, max_tokens: int | None) -> float:
        """What a request will probably cost, from its length, what it asks for and what this tenant's others got."""
        output = self.mean_output if max_tokens is None else min(float(max_tokens), 4 * self.mean_output)
        return body_bytes / BYTES_PER_TOKEN + output

    def limited(self, cost_tokens: float, now: float) -> Unaccepted | None:
        """Why it may not have one more request now."""
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            return Unaccepted(
                429, f"{self.in_flight} requests are under way, as many as you may have", "too_many_in_flight", 1
            )
        requests, tokens = self.requests, self.tokens
        if requests is not None and not requests.has(1) and (wait_s := requests.wait_s(1, now)):
            message = f"you may send {requests.per_minute:,} requests a minute"
            return Unaccepted(429, message, "requests_per_minute", max(1, math.ceil(wait_s)))
        if tokens is not None and not tokens.has(cost_tokens) and (wait_s := tokens.wait_s(cost_tokens, now)):
            message = f"you may use {tokens.per_minute:,} tokens a minute, and this takes about {cost_tokens:,.0f}"
            return Unaccepted(429, message, "tokens_per_minute", max(1, math.ceil(wait_s)))
        return None

    def admit(self, cost_tokens: float, now: float) -> None:
        self.in_flight += 1
        self.charge(cost_tokens, now)

    def charge(self, cost_tokens: float, now: float) -> None:
        """For one more request; where nothing is limited by the minute, there is nothing to charge."""
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(cost_tokens, now)

    def ended(self, charged_tokens: float, used_tokens: float | None, output_tokens: int | None, now: float) -> None:
        """A request is over; what it used is charged in the place of what was expected, where it is known."""
        self.in_flight -= 1
        if used_tokens is not None and self.tokens is not None:
            self.tokens.take(used_tokens - charged_tokens, now)
        if output_tokens is not None:
            self.mean_output += SMOOTHING * (output_tokens - self.mean_output)

    def headers(self) -> bytes:
        """What is left of its limits, in the words of OpenAI's API."""
        requests, tokens = self.requests, self.tokens
        if requests is not None and tokens is not None:
            return self._told % (*requests.left(), *tokens.left())
        only = requests or tokens
        return self._told % only.left() if only is not None else b""


class Tenants:
    """All who may ask here. Without any key the endpoint is open, and everybody is the one default tenant."""

    def __init__(self, api_key: str | None = None, salt: bytes | None = None) -> None:
        self.salt = salt or secrets.token_bytes(32)
        self._own = key_digest(api_key.encode(), self.salt) if api_key is not None else None
        self._members: dict[str, Member] = {}
        self._keys: dict[bytes, KeyDigest] = {}
        self._declared: dict[str, Declared] = {}
        self._stored: tuple[Tenant, ...] = ()
        self.turn = object()
        """Another one whenever somebody may have come, gone or changed: who knew a key before has to look again."""
        self.is_open = True
        """Once it asked for a key it always does: taking the last one back is no invitation to everybody."""
        self.replace((), ())

    @property
    def several(self) -> bool:
        """Whether more than one tenant could be here."""
        return len({key.tenant for key in self._keys.values()}) > 1

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def replace(self, tenants: Iterable[Tenant], keys: Iterable[KeyDigest]) -> None:
        """Takes over what is true from now on; whoever stays keeps what it has used."""
        self._stored = tuple(tenants)
        self._keys = {key.digest: key for key in keys}
        if self._own is not None:
            self._keys[self._own] = KeyDigest(self._own, DEFAULT_TENANT)
        self._know()

    def declare(self, declared: Iterable[Declared]) -> None:
        """Tenants that whoever started this endpoint named: what is said of them goes before what the store has.

        An endpoint that is meant for certain tenants is not open to everybody, also while none of them has a key.
        """
        self._declared = {one.name: one for one in declared}
        self._know()

    def _know(self) -> None:
        self.turn = object()
        known = {tenant.name: tenant for tenant in (*map(_named, self._declared), *self._stored)}
        known.setdefault(DEFAULT_TENANT, Tenant(name=DEFAULT_TENANT))
        before, self._members = self._members, {}
        for name, tenant in known.items():
            allowed = overlaid(tenant, self._declared.get(name))
            member = self._members[name] = before.get(name) or Member(allowed)
            member.update(allowed)
        self.default = self._members[DEFAULT_TENANT]
        self._keys = {digest: key for digest, key in self._keys.items() if key.tenant in self._members}
        self.is_open = self.is_open and not self._keys and not self._declared

    def find(self, given: bytes) -> Key | None:
        """Whose key this is; nobody's when it is unknown or no longer valid."""
        digest = key_digest(given, self.salt)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        found = Key(given, self._members[key.tenant], key.expires_s, self.turn)
        return None if found.has_expired else found


class Key:
    """One key that was found to be good, so that the next request that brings it need not be looked up."""

    __slots__ = ("_given", "_turn", "expires_s", "member")

    def __init__(self, given: bytes, member: Member, expires_s: float | None, turn: object) -> None:
        self._given = given
        self.member = member
        self.expires_s = expires_s
        self._turn = turn

    @property
    def has_expired(self) -> bool:
        return self.expires_s is not None and time.time() >= self.expires_s

    def is_still(self, given: bytes, turn: object) -> bool:
        """Whether this is the same key, and still good."""
        return turn is self._turn and hmac.compare_digest(given, self._given) and not self.has_expired


def overlaid(stored: Tenant, declared: Declared | None) -> Tenant:
    """What a tenant may have where both the store and whoever started the endpoint say something of it."""
    if declared is None:
        return stored
    said = {name: value for name in LIMITS if (value := getattr(declared, name)) is not None}
    return replaced(stored, **said)


def _named(name: str) -> Tenant:
    return Tenant(name=name)


def _bucket(before: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None:
        return None
    return before if before is not None and before.per_minute == per_minute else Bucket(per_minute)
