"""How the requests of an estimate arrive, as numbers that the batching model uses."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

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


class Arrivals(NamedTuple):
    """The arrival process of a load and how it was reported."""

    process: ArrivalProcess
    rounds: float = 10.0
    spread: float = 0.0
    statistic: Literal["mean", "median"] = "mean"

    @property
    def terms(self) -> ArrivalTerms:
        if self.process is ArrivalProcess.CLOSED:
            seen = self.statistic == "mean" or self.rounds < 3
            return ArrivalTerms(0.0, max(1.0, self.rounds), self.spread, float(seen))
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
USERS = Arrivals(ArrivalProcess.USERS)
BURST = Arrivals(ArrivalProcess.BURST)
USUAL_BENCHMARK = Arrivals(ArrivalProcess.CLOSED, spread=0.2)
"""Published closed loops: ten requests for each stream, means, lengths between 0.8 and 1 times the stated one."""
BENCH = Arrivals(ArrivalProcess.CLOSED, statistic="median")
"""`bedplate bench`: equal requests, medians over the measurement window."""
