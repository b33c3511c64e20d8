"""Who asks: keys, and what each tenant may have. Changed while requests come; nothing here touches the disk."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Iterable
from typing import NamedTuple

from bedplate.run.gateway.fair import SMOOTHING
from bedplate.values.tenant import DEFAULT_TENANT, Tenant, key_digest

BYTES_PER_TOKEN = 4
"""Of a body, for what is charged before the engine has counted."""
FIRST_OUTPUT_TOKENS = 256.0
"""What an answer is taken to have before any has ended."""


class KeyDigest(NamedTuple):
    """One key that opens the endpoint."""

    digest: bytes
    tenant: str
    expires_s: float | None = None
    """Seconds since 1970."""


class Limited(NamedTuple):
    message: str
    code: str
    retry_after_s: int


class Bucket:
    """So much a minute, all of it at once if need be. May be overdrawn by what turns out later."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = time.monotonic()

    def level(self, now: float) -> float:
        if now > self._at:
            self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until so much can be taken; more than fits is let through when it is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing * 60 / self.per_minute if missing > 0 else 0.0

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def full_in_s(self, now: float) -> float:
        return (self.per_minute - self.level(now)) * 60 / self.per_minute


class Member:
    """One tenant as the gateway sees it now."""

    __slots__ = ("has_limits", "in_flight", "max_in_flight", "mean_output", "name", "requests", "tokens", "weight")

    def __init__(self, tenant: Tenant) -> None:
        self.name = tenant.name
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
        self.has_limits = self.requests is not None or self.tokens is not None

    def cost_tokens(self, body_bytes: int, max_tokens: int | None) -> float:
        """What a request will probably cost, from its length, what it asks for and what this tenant's others got."""
        output = self.mean_output if max_tokens is None else min(float(max_tokens), 4 * self.mean_output)
        return body_bytes / BYTES_PER_TOKEN + output

    def limited(self, cost_tokens: float, now: float) -> Limited | None:
        """Why it may not have one more request now."""
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            return Limited(f"{self.in_flight} requests are under way, as many as you may have", "too_many_in_flight", 1)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now)):
            message = f"you may send {self.requests.per_minute:,} requests a minute"
            return Limited(message, "requests_per_minute", max(1, math.ceil(wait_s)))
        if self.tokens is not None and (wait_s := self.tokens.wait_s(cost_tokens, now)):
            message = f"you may use {self.tokens.per_minute:,} tokens a minute, and this takes about {cost_tokens:,.0f}"
            return Limited(message, "tokens_per_minute", max(1, math.ceil(wait_s)))
        return None

    def admit(self, cost_tokens: float, now: float) -> None:
        self.in_flight += 1
        if not self.has_limits:
            return
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

    def headers(self, now: float) -> bytes:
        """What is left of its limits, in the words of OpenAI's API."""
        said = b""
        for name, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                said += (
                    b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %.3fs\r\n"
                    % (name, bucket.per_minute, name, max(0, int(bucket.level(now))), name, bucket.full_in_s(now))
                )
        return said


class Tenants:
    """All who may ask here. Without any key the endpoint is open, and everybody is the one default tenant."""

    def __init__(self, api_key: str | None = None, salt: bytes | None = None) -> None:
        self.salt = salt or secrets.token_bytes(32)
        self._own = key_digest(api_key.encode(), self.salt) if api_key is not None else None
        self._members: dict[str, Member] = {}
        self._keys: dict[bytes, KeyDigest] = {}
        self.is_open = True
        """Once it asked for a key it always does: taking the last one back is no invitation to everybody."""
        self.replace((), ())

    @property
    def several(self) -> bool:
        """Whether more than one tenant could be here."""
        return len({key.tenant for key in self._keys.values()}) > 1

    @property
    def default(self) -> Member:
        return self._members[DEFAULT_TENANT]

    def members(self) -> list[Member]:
        return list(self._members.values())

    def replace(self, tenants: Iterable[Tenant], keys: Iterable[KeyDigest]) -> None:
        """Takes over what is true from now on; whoever stays keeps what it has used."""
        known = {tenant.name: tenant for tenant in tenants}
        known.setdefault(DEFAULT_TENANT, Tenant(name=DEFAULT_TENANT))
        before, self._members = self._members, {}
        for name, tenant in known.items():
            member = self._members[name] = before.get(name) or Member(tenant)
            member.update(tenant)
        self._keys = {key.digest: key for key in keys if key.tenant in self._members}
        if self._own is not None:
            self._keys[self._own] = KeyDigest(self._own, DEFAULT_TENANT)
        self.is_open = self.is_open and not self._keys

    def find(self, given: bytes) -> Member | None:
        """Whose key this is; nobody's when it is unknown or no longer valid."""
        digest = key_digest(given, self.salt)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        if key.expires_s is not None and time.time() >= key.expires_s:
            return None
        return self._members[key.tenant]


def _bucket(before: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None:
        return None
    return before if before is not None and before.per_minute == per_minute else Bucket(per_minute)
