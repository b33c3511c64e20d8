"""The number of requests in flight, solved together with the time that a request takes at that number."""

from __future__ import annotations

from collections.abc import Callable

from bedplate.decide.candidates import EngineCandidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.estimate.calibration import Expectation
from bedplate.decide.estimate.expectation import compute_expectation
from bedplate.values import Estimate, RequestLoad, Workload, replace_fields
from bedplate.values.arrival import ArrivalProcess

RequestTime = Callable[[int], float | None]
"""The time of a request in seconds if this many are in flight; `None` if it cannot be estimated."""


def solve_load(workload: Workload, estimate_request_s: RequestTime, most: int) -> RequestLoad:
    """The load at which arrivals and request time agree by Little's law; at most `most` requests at a stated rate.

    More requests in flight take longer, so the number that arrives while one is answered grows with the number in
    flight. The result is the number that reproduces itself. At a rate that the deployment cannot sustain there is none,
    and the result is `most`. Users wait for their answers, so there always is one for them.
    """
    bound = most if workload.arrival is ArrivalProcess.POISSON else workload.users
    low, high = 0, max(1, bound)  # a request does not end early enough with `low` in flight, and does with `high`
    in_flight = min(high, workload.compute_in_flight(workload.assumed_request_s))
    while True:
        request_s = estimate_request_s(in_flight)
        if request_s is None:
            return workload.make_load()
        follows = workload.compute_in_flight(request_s)
        if follows == in_flight or (follows > in_flight and in_flight >= high):
            return workload.make_load(request_s, in_flight)
        if follows > in_flight:
            low = in_flight
        else:
            high = in_flight
        if high - low <= 1:
            return workload.make_load(request_s if in_flight == high else estimate_request_s(high), high)
        in_flight = follows if low < follows < high else (low + high) // 2


def solve_candidate_load(candidate: EngineCandidate, case: DecisionCase) -> RequestLoad:
    """The load of the case's workload on one engine, layout and weights."""
    layout, workload = candidate.layout, case.workload
    most = max(1, candidate.max_concurrency)

    def estimate_request_s(in_flight: int) -> float | None:
        expected = compute_expectation(
            candidate.hardware, candidate.model, candidate.engine.id, layout,
            replace_fields(workload, concurrency=in_flight), slots=max(1, -(-min(in_flight, most) // layout.data)),
            offload=candidate.fit.offload, factor=candidate.factor, kv_bits=candidate.kv_bits,
        )  # fmt: skip
        return sum_request_s(expected, workload)

    return solve_load(workload, estimate_request_s, most)


def sum_request_s(expected: Expectation | None, workload: Workload) -> float | None:
    """The time of a whole request: to the first token, and for all others."""
    return None if expected is None else expected.ttft_s + expected.tpot_s * workload.output_tokens


def get_request_s(estimate: Estimate, workload: Workload) -> float | None:
    if estimate.ttft_ms is None or estimate.tpot_ms is None:
        return None
    return (estimate.ttft_ms.value + estimate.tpot_ms.value * workload.output_tokens) / 1000
