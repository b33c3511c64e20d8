"""Limits that several gateways share: a thread reserves requests in the usage store, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bedplate.errors import ExternalFailure
from bedplate.run.gateway.tenants import RateBucket, Rejection, TenantState

if TYPE_CHECKING:
    from bedplate.postgres_store import LimitLevels, PostgresLimits

REPORT_EVERY_S = 1.0
"""How often a gateway renews its lease. It expires after ten times as long."""
CLOSE_LIMIT_S = 5.0
UNAVAILABLE = Rejection(
    503, "the limits of this tenant cannot be checked: the usage store does not answer", "limits_unavailable", 1
)

Answer = Callable[[Rejection | None], None]
"""Called in the gateway's loop: why the request is rejected; `None`: it is reserved."""


class Reservation(NamedTuple):
    """A request that waits until its tenant's limits are checked."""

    member: TenantState
    cost_tokens: float
    sequences: int
    answer: Answer


class _Levels(NamedTuple):
    requests: float | None
    tokens: float | None


class SharedLimits:
    """Reserves the requests of tenants with limits. Other tenants do not wait for the store.

    While the store does not answer, requests of tenants with limits are rejected.
    """

    def __init__(self, limits: PostgresLimits, note: Callable[[str], None] = lambda text: None) -> None:
        self._limits = limits
        self._note = note
        self._changes = threading.Condition()
        # Guarded by the condition:
        self._reservations: list[Reservation] = []
        self._released: dict[str, int] = {}
        self._corrections: dict[str, float] = {}
        self._stopping = False
        # Used by the thread only:
        self._in_flight: dict[str, int] = {}
        """The reserved sequences of this gateway, by tenant."""
        self._failing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # called in the gateway's loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run_thread, name="bedplate-limits", daemon=True)
        self._thread.start()

    def reserve(self, member: TenantState, cost_tokens: float, sequences: int, answer: Answer) -> None:
        with self._changes:
            self._reservations.append(Reservation(member, cost_tokens, sequences, answer))
            self._changes.notify()

    def release(self, tenant: str, sequences: int) -> None:
        """Ends the reservation of a request. Its tokens stay charged."""
        with self._changes:
            self._released[tenant] = self._released.get(tenant, 0) + sequences
            self._changes.notify()

    def correct(self, tenant: str, tokens: float) -> None:
        """Charges further tokens, or returns some if the number is negative."""
        with self._changes:
            self._corrections[tenant] = self._corrections.get(tenant, 0.0) + tokens
            self._changes.notify()

    async def stop(self) -> None:
        with self._changes:
            self._stopping = True
            self._changes.notify()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, CLOSE_LIMIT_S)

    # called in its own thread

    def _run_thread(self) -> None:
        report_at = 0.0
        while True:
            with self._changes:
                if not (self._reservations or self._released or self._corrections or self._stopping):
                    self._changes.wait(max(0.0, report_at - time.monotonic()))
                reservations, self._reservations = self._reservations, []
                released, self._released = self._released, {}
                corrections, self._corrections = self._corrections, {}
                stopping = self._stopping
            self._apply(reservations, released, corrections)
            if stopping:
                break
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + REPORT_EVERY_S
                with contextlib.suppress(ExternalFailure):
                    self._limits.report_alive(self._in_flight)
        self._limits.close()

    def _apply(self, reservations: list[Reservation], released: dict[str, int], corrections: dict[str, float]) -> None:
        if not reservations and not released and not corrections:
            return
        for tenant, count in released.items():
            self._in_flight[tenant] = max(0, self._in_flight.get(tenant, 0) - count)
        before = dict(self._in_flight)
        results: list[tuple[Reservation, Rejection | None, _Levels]] = []

        def decide(levels: dict[str, LimitLevels]) -> None:
            now = time.monotonic()
            for tenant, tokens in corrections.items():
                own = levels[tenant]
                if own.tokens is not None:
                    own.tokens -= tokens
            for one in reservations:
                results.append((one, *self._check(one, levels[one.member.name], now)))

        tenants = {*corrections, *(one.member.name for one in reservations)}
        try:
            self._limits.update(sorted(tenants), decide, self._in_flight)
            self._failing = False
        except ExternalFailure as error:
            self._in_flight = before
            results = [(one, UNAVAILABLE, _Levels(None, None)) for one in reservations]
            if not self._failing:
                self._failing = True
                self._note(f"cannot check limits: {error.message}: {error.cause}; tenants with limits are rejected")
        # Tenants without a request need no row.
        self._in_flight = {tenant: count for tenant, count in self._in_flight.items() if count or tenant in before}
        if results and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_deliver, results)

    def _check(self, one: Reservation, levels: LimitLevels, now: float) -> tuple[Rejection | None, _Levels]:
        """Checks one request with the rules of a single gateway, and charges it."""
        tenant = one.member.name
        state = one.member.copy_limits()
        state.in_flight = levels.elsewhere + self._in_flight.get(tenant, 0)
        elapsed_s, levels.elapsed_s = levels.elapsed_s, 0.0
        _restore(state.requests, levels.requests, elapsed_s, now)
        _restore(state.tokens, levels.tokens, elapsed_s, now)
        why = state.check_limits(one.cost_tokens, now, one.sequences)
        if why is None:
            state.charge(one.cost_tokens, now)
            self._in_flight[tenant] = self._in_flight.get(tenant, 0) + one.sequences
        levels.requests = state.requests.level if state.requests is not None else None
        levels.tokens = state.tokens.level if state.tokens is not None else None
        return why, _Levels(levels.requests, levels.tokens)


def _restore(bucket: RateBucket | None, level: float | None, elapsed_s: float, now: float) -> None:
    if bucket is not None:
        bucket.restore(float(bucket.per_minute) if level is None else level, elapsed_s, now)


def _deliver(results: list[tuple[Reservation, Rejection | None, _Levels]]) -> None:
    now = time.monotonic()
    for one, why, levels in results:
        # The copies of the levels are for the headers of the answer.
        if levels.requests is not None:
            _restore(one.member.requests, levels.requests, 0.0, now)
        if levels.tokens is not None:
            _restore(one.member.tokens, levels.tokens, 0.0, now)
        try:
            one.answer(why)
        except Exception as error:  # a bug in one exchange must not affect others
            context = {"message": "internal error after a reservation", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
