"""How far a candidate misses the latency targets and the number of concurrent requests, by its estimate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bedplate.decide.case import CHAT_SLACK, CHAT_TARGET, DecisionCase
from bedplate.values import LatencyTarget, Workload

if TYPE_CHECKING:
    from bedplate.decide.candidates import EngineCandidate


def get_target(workload: Workload) -> LatencyTarget | None:
    """The latency targets that it states, or those of a chat; none for other work."""
    return workload.latency or (CHAT_TARGET if workload.is_chat else None)


def get_slack(workload: Workload) -> float:
    """The factor up to which the latency targets count as met."""
    return 1.0 if workload.latency is not None else CHAT_SLACK


def compute_shortfall(candidate: EngineCandidate, case: DecisionCase) -> float:
    """The product of the factors by which it misses TTFT, TPOT and the number of requests; 1 if it misses none."""
    shortfall = max(1.0, case.in_flight / max(1, candidate.usual_concurrency))
    slack = get_slack(case.workload)
    return shortfall * math.prod(max(1.0, took / limit / slack) for _, took, limit in list_latencies(candidate, case))


def list_latencies(candidate: EngineCandidate, case: DecisionCase) -> list[tuple[str, float, float]]:
    """(name, estimate, target) in milliseconds of each latency with a target; empty without an estimate."""
    target, expected = get_target(case.workload), candidate.expected
    if target is None or expected is None:
        return []
    pairs = (("TTFT", expected.ttft_s, target.ttft_ms), ("TPOT", expected.tpot_s, target.tpot_ms))
    return [(name, took * 1000, limit) for name, took, limit in pairs if limit is not None]


def meets_targets(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether the estimate meets the latency targets; false without an estimate."""
    latencies = list_latencies(candidate, case)
    return bool(latencies) and all(took <= limit * get_slack(case.workload) for _, took, limit in latencies)


def is_limited_by_cache(candidate: EngineCandidate, case: DecisionCase) -> bool:
    """Whether its KV cache does not fit on the GPUs, holds too few requests, or is why the TPOT target is missed."""
    need = candidate.fit
    if not need.fits or need.offload is not None:
        return all(one.weights_bytes < (one.usable_bytes or 0) for one in need.devices)
    if candidate.usual_concurrency < case.in_flight:
        return True
    expected = candidate.expected
    if expected is None:
        return False
    slow = [
        took - limit * get_slack(case.workload)
        for name, took, limit in list_latencies(candidate, case)
        if name == "TPOT"
    ]
    if not slow or slow[0] <= 0:
        return False
    # Half of the cache's bytes may be enough to meet the target, even if something else takes longer.
    return expected.limit == "KV cache" or expected.parts_s.get("KV cache", 0.0) * 1000 / 2 >= slow[0]
