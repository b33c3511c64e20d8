"""The requests of a scenario's sessions, to simulate."""

from __future__ import annotations

import random
from collections.abc import Hashable

from bedplate.decide.simulate.traffic import RequestStream
from bedplate.facts.scenarios import compute_means, draw_session
from bedplate.values.arrival import ArrivalProcess
from bedplate.values.scenario import Scenario, SessionPlan
from bedplate.values.workload import Workload

BLOCK_TOKENS = 128
NAMES_PER_SESSION = 1_000_000
"""More blocks than a session has."""


class _SessionRows:
    """Requests with the times at which they would be sent if each took the assumed time."""

    def __init__(self, scenario: Scenario, request_s: float, seed: int) -> None:
        self._scenario = scenario
        self._request_s = request_s
        self._seed = seed
        self._sessions = 0
        self.rows: list[tuple[float, int, int, tuple[Hashable, ...], float]] = []
        """Time, prompt, output, names of the blocks, and the wait after the answer."""

    def add_session(self, starts_s: float) -> float:
        """Adds all requests of the next session; returns when it has ended."""
        session = draw_session(self._scenario, f"{self._seed}/simulated {self._sessions}")
        self._sessions += 1
        now_s = starts_s
        waits = [turn.wait_s or 0.0 for turn in session.turns[1:]] + [self._scenario.think_s.mean]
        for number, (turn, prompt) in enumerate(zip(session.turns, session.prompt_tokens, strict=True)):
            self.rows.append((now_s, prompt, turn.output_tokens, self._name_blocks(session, prompt), waits[number]))
            now_s += self._request_s + waits[number]
        return now_s

    def has_all(self, requests: int, until_s: float) -> bool:
        """Whether the first `requests` are known, if all sessions that begin before `until_s` were added."""
        return len(self.rows) >= requests and sum(row[0] <= until_s for row in self.rows) >= requests

    def _name_blocks(self, session: SessionPlan, prompt: int) -> tuple[Hashable, ...]:
        """Equal names for the system prompt of all sessions, and for the earlier turns of the same session."""
        shared, first = session.system_tokens // BLOCK_TOKENS, self._sessions * NAMES_PER_SESSION
        return (*range(-shared, 0), *range(first + shared, first + prompt // BLOCK_TOKENS))


def make_session_stream(
    scenario: Scenario, workload: Workload, requests: int, rate: float | None = None, *, seed: int = 0
) -> RequestStream:
    """Requests of the scenario's sessions, whose prompts repeat earlier turns.

    With `rate` (requests per second) sessions begin as a Poisson stream; else the users of the workload have one each.
    """
    rng = random.Random(seed)  # noqa: S311
    found = _SessionRows(scenario, workload.assumed_request_s, seed)
    rate = rate or workload.requests_per_s
    clients = None if rate is not None else workload.concurrency or workload.users
    if rate is not None:
        each_s, now_s = compute_means(scenario).turns / rate, 0.0
        while not found.has_all(requests, now_s):
            found.add_session(now_s)
            now_s += rng.expovariate(1 / each_s)
    else:
        ends_s = [rng.uniform(0, workload.assumed_request_s) for _ in range(clients or 1)]
        while not found.has_all(requests, min(ends_s)):
            place = ends_s.index(min(ends_s))
            ends_s[place] = found.add_session(ends_s[place])
    rows = sorted(found.rows, key=lambda row: row[0])[:requests]
    waits = any(row[4] > 0 for row in rows)
    process = ArrivalProcess.USERS if waits else ArrivalProcess.CLOSED
    arrival = [row[0] - rows[0][0] for row in rows]
    return RequestStream(
        prompt=[row[1] for row in rows],
        output=[row[2] for row in rows],
        arrival=arrival if clients is None else arrival[:clients],
        hashes=[row[3] for row in rows],
        hash_tokens=BLOCK_TOKENS,
        source=f"scenario {scenario.name}",
        seed=seed,
        process=ArrivalProcess.POISSON if clients is None else process,
        clients=clients,
        think_s=[row[4] for row in rows] if clients is not None and waits else [],
        expected_rate=rate if rate is not None else workload.make_load().requests_per_s,
    )
