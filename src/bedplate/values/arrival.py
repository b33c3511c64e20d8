"""How requests arrive, and the load that follows: requests per second and requests in flight."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from bedplate.values.record import Record

DEFAULT_THINK_TIME_S = 30.0
"""Think time of users if it is not specified; docs/workload.md gives the reason."""
PEAK_DEVIATIONS = 2.33
"""Standard deviations above the mean that cover 99 % of the time, if the number in flight is about normal."""


class ArrivalProcess(StrEnum):
    """What makes requests arrive. The same engine has another latency under each."""

    CLOSED = "closed"
    """A fixed number of requests in flight: the next one is sent when one ends."""
    BURST = "burst"
    """All requests at the same moment."""
    POISSON = "poisson"
    """A rate with random gaps, which does not depend on the answers."""
    USERS = "users"
    """A number of people who each wait for the answer, think, and send the next request."""
    TRACE = "trace"
    """The arrival times of a trace."""


class RequestLoad(Record, frozen=True, kw_only=True):
    """The load that a workload puts on one deployment, solved together with its request time by Little's law."""

    arrival: ArrivalProcess
    users: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Users with think time; `None` for other arrival processes."""
    think_time_s: float | None = None
    assumed: bool = False
    """Whether the think time is the default."""
    requests_per_s: float
    in_flight: Annotated[int, msgspec.Meta(ge=1)]
    """Mean number of requests in flight, waiting ones included, rounded up."""
    request_s: float
    """Mean time of a request, from its arrival to its last token."""

    @property
    def peak_in_flight(self) -> int:
        """Requests in flight that are exceeded only 1 % of the time."""
        if self.arrival is ArrivalProcess.USERS and self.users is not None:
            # Each user has a request in flight or not, independently of the others.
            mean = self.requests_per_s * self.request_s
            spread = math.sqrt(max(0.0, mean * (1 - mean / self.users)))
            return max(self.in_flight, min(self.users, math.ceil(mean + PEAK_DEVIATIONS * spread)))
        if self.arrival is ArrivalProcess.POISSON:
            mean = self.requests_per_s * self.request_s
            return max(self.in_flight, math.ceil(mean + PEAK_DEVIATIONS * math.sqrt(mean)))
        return self.in_flight

    @property
    def description(self) -> str:
        """`500 users, 30 s between requests: 9.8 requests/s, 89 in flight`."""
        flight = f"{self.in_flight:,} in flight"
        rate = (
            f"{self.requests_per_s:.2g} requests/s"
            if self.requests_per_s < 10
            else f"{self.requests_per_s:,.0f} requests/s"
        )
        if self.arrival is ArrivalProcess.USERS and self.users is not None and self.think_time_s is not None:
            who = "1 user" if self.users == 1 else f"{self.users:,} users"
            assumed = " (assumed)" if self.assumed else ""
            return f"{who}, {self.think_time_s:g} s between requests{assumed}: {rate}, {flight}"
        if self.arrival is ArrivalProcess.CLOSED:
            return f"a closed loop: {flight}, {rate}"
        names = {ArrivalProcess.POISSON: "Poisson arrivals", ArrivalProcess.TRACE: "arrivals of the trace"}
        return f"{names.get(self.arrival, 'one burst')}: {rate}, {flight}"
