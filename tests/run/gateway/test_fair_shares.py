"""Shares of tenants whose requests differ in size, length and number, in simulated time."""

from __future__ import annotations

import pytest

from bedplate.run.gateway.fair import FairQueue

from .simulated import RequestKind, SimulatedEngine, SimulatedTenant
from .test_fair import Job

SLOTS = 8
ONE = RequestKind()
LONG = RequestKind(1, 400, 300, shortest=0.2)
SHORT = RequestKind(1, 20, 8)


def list_greedy_kinds(tokens: int) -> tuple[RequestKind, ...]:
    """The requests of the greedy tenant in tests/soak/accounting.py."""
    return (
        RequestKind(3, 14, tokens),
        RequestKind(4, 14, tokens),
        RequestKind(2, 45, tokens, shares_prompt=True),
        RequestKind(3, 45, tokens, shares_prompt=True),
        RequestKind(1, 45, 4 * tokens, aborted_after=tokens),
        RequestKind(2, 12, 400, aborted_after=tokens // 2),
        RequestKind(60, 12, tokens),
        RequestKind(1, 45, 2 * tokens),
        RequestKind(2, 3, tokens),
        RequestKind(1, 45, 400, aborted_after=tokens),
    )


MIXES = {
    "lists, choices, disconnects and 64 streams": {
        "quiet": SimulatedTenant((RequestKind(1, 45, 16),), 4),
        "greedy": SimulatedTenant(list_greedy_kinds(16), 64),
    },
    "longer answers": {
        "quiet": SimulatedTenant((RequestKind(1, 45, 40),), 4),
        "greedy": SimulatedTenant(list_greedy_kinds(40), 64),
    },
    "four prompts in each request": {
        "one": SimulatedTenant((ONE,), 32),
        "four": SimulatedTenant((RequestKind(4),), 32),
    },
    "four choices of one prompt": {
        "one": SimulatedTenant((ONE,), 4),
        "four": SimulatedTenant((RequestKind(4, shares_prompt=True),), 32),
    },
    "three prompts, which leave a slot unused": {
        "one": SimulatedTenant((ONE,), 4),
        "three": SimulatedTenant((RequestKind(3),), 32),
    },
    "four answers of different length": {
        "one": SimulatedTenant((ONE,), 4),
        "four": SimulatedTenant((RequestKind(4, shortest=0.1),), 32),
    },
    "lists of 60, which are rejected": {
        "one": SimulatedTenant((ONE,), 4),
        "sixty": SimulatedTenant((RequestKind(60), RequestKind(4)), 32),
    },
    "long and short requests": {
        "long": SimulatedTenant((LONG,), 16),
        "short": SimulatedTenant((SHORT,), 16),
    },
    "few long requests beside many short ones": {
        "long": SimulatedTenant((LONG,), 4),
        "short": SimulatedTenant((SHORT,), 32),
    },
    "three tenants": {
        "one": SimulatedTenant((ONE,), 16),
        "two": SimulatedTenant((RequestKind(2),), 16),
        "longer": SimulatedTenant((RequestKind(1, 100, 64, shortest=0.3),), 16),
    },
    "three times the weight for single requests": {
        "one": SimulatedTenant((ONE,), 32, weight=3.0),
        "two": SimulatedTenant((RequestKind(2),), 32),
    },
    "three times the weight for lists": {
        "one": SimulatedTenant((ONE,), 32),
        "four": SimulatedTenant((RequestKind(4),), 32, weight=3.0),
    },
}


@pytest.mark.parametrize("mix", MIXES)
def test_each_tenant_gets_its_share_of_the_tokens(mix: str) -> None:
    tenants = MIXES[mix]
    engine = SimulatedEngine(SLOTS, tenants)
    tokens = engine.run(seconds=60)
    weights = sum(one.weight for one in tenants.values())
    shares = {name: tokens[name] / tokens.total() for name in tenants}
    print(shares, engine.compute_used_share())
    for name, one in tenants.items():
        assert shares[name] == pytest.approx(one.weight / weights, rel=0.05), shares
    # Slots that wait for a large request are few.
    assert engine.compute_used_share() > 0.85
    assert min(len(waits) for waits in engine.waits_s.values()) > 20


@pytest.mark.parametrize("shortest", [1.0, 0.2])
def test_tenant_within_its_share_does_not_wait_for_a_flood(shortest: float) -> None:
    kind = RequestKind(1, 45, 96, shortest=shortest)
    engine = SimulatedEngine(SLOTS, {"quiet": SimulatedTenant((kind,), 4), "flood": SimulatedTenant((kind,), 64)})
    engine.run(seconds=60)
    waits = sorted(engine.waits_s["quiet"])
    assert waits[int(0.95 * len(waits))] == 0.0


def test_tenant_ahead_of_its_share_leaves_slots_to_a_request_that_needs_several() -> None:
    queue: FairQueue[Job] = FairQueue()
    ahead, behind = queue.get_queue("ahead", 1), queue.get_queue("behind", 1)
    for line in (ahead, behind):
        line.mean_cost = 100.0
    large = Job("behind", 400.0, sequences=4)
    queue.charge_sent(behind, 400.0, 0.0, 4)
    queue.add(behind, large, 0.0)
    for _ in range(40):
        queue.charge_sent(ahead, 100, 0.0)
        queue.settle_charge(ahead, 100, 100)
    queue.add(ahead, Job("ahead"), 0.0)
    for free in (1, 2, 3):
        assert queue.take(free, SLOTS, 0.1, free) is None
    found = queue.take(4, SLOTS, 0.1, 4)
    assert found is not None and found[1] is large
    queue.charge_sent(behind, 400.0, 0.1, 4)
    assert ahead.is_held_back
    found = queue.take(1, SLOTS, 0.1, 1)
    assert found is not None and found[0] is ahead, "nobody waits for several slots any more"
    queue.charge_sent(ahead, 100, 0.1)
    assert not ahead.is_held_back


def test_request_with_more_sequences_than_any_engine_has_slots_is_returned_at_once() -> None:
    """The engines may have been replaced by smaller ones since it was accepted."""
    queue: FairQueue[Job] = FairQueue()
    large = Job("one", sequences=8)
    queue.add(queue.get_queue("one", 1), large, 0.0)
    assert queue.take(8, 8, 0.0, 4, 8) is None
    found = queue.take(8, 8, 0.0, 4, 4)
    assert found is not None and found[1] is large
