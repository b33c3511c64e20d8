"""How the requests of an estimate arrive, as numbers that the batching model uses."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from bedplate.values import Workload
from bedplate.values.arrival import ArrivalProcess


class ArrivalTerms(NamedTuple):
    """An arrival process as the input of the batching model; in a fit, each field is a column."""

    random: Any = 0.0
    """1 if requests arrive independently of each other, 0 if the next one follows the end of another."""
    rounds: Any = 10.0
    """Requests per stream of a closed loop. The first round is a burst: all streams start together."""
    spread: Any = 0.2
    """Range of the requests' lengths relative to the longest. Equal requests that start together end together."""
    first_round: Any = 1.0
    """1 if the reported figure includes the first round (a mean), 0 if not (a median over many rounds)."""
    staggered: Any = 0.0
    """1 if the first requests of a closed loop are spread over the time of one request, 0 if they are a burst."""


class RequestArrivals(NamedTuple):
    """The arrival process of a load and how it was reported."""

    process: ArrivalProcess
    rounds: float = 10.0
    spread: float = 0.0
    statistic: Literal["mean", "median"] = "mean"
    staggered: bool = False

    @property
    def terms(self) -> ArrivalTerms:
        if self.process is ArrivalProcess.CLOSED:
            seen = self.statistic == "mean" or self.rounds < 3
            return ArrivalTerms(0.0, max(1.0, self.rounds), self.spread, float(seen), float(self.staggered))
        if self.process is ArrivalProcess.BURST:
            return ArrivalTerms(0.0, rounds=1.0)
        return ArrivalTerms(random=1.0)

    def describe(self) -> str:
        return DESCRIPTIONS[self.process]


DESCRIPTIONS = {
    ArrivalProcess.USERS: "users with think time",
    ArrivalProcess.CLOSED: "a closed loop",
    ArrivalProcess.BURST: "one burst",
    ArrivalProcess.POISSON: "Poisson arrivals",
    ArrivalProcess.TRACE: "arrivals of a trace, as a Poisson process at its rate",
}
USERS = RequestArrivals(ArrivalProcess.USERS)
BURST = RequestArrivals(ArrivalProcess.BURST)
USUAL_BENCHMARK = RequestArrivals(ArrivalProcess.CLOSED, spread=0.2)
"""Published closed loops: ten requests for each stream, means, lengths between 0.8 and 1 times the stated one."""
BENCH = RequestArrivals(ArrivalProcess.CLOSED, statistic="median", staggered=True)
"""`bedplate bench`: equal requests, medians over the measurement window, first requests spread over one request."""


def choose_arrivals(workload: Workload) -> RequestArrivals:
    """The arrival process that a question states; users with think time if it states none."""
    if workload.concurrency is not None:
        return USUAL_BENCHMARK
    return USERS if workload.requests_per_s is None else RequestArrivals(ArrivalProcess.POISSON)
