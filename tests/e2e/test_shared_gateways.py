"""Three gateway processes with one PostgreSQL, in front of one engine, while one of them is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.conftest import Served
from tests.postgresql import start_database
from tests.soak.gateways import IN_FLIGHT, SharedOutcome, run_gateways


def check(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float, kills: int
) -> SharedOutcome:
    with start_database() as database:
        monkeypatch.setenv("BEDPLATE_USAGE_STORE", database.url)
        run = run_gateways(
            served.url, served.endpoint["model"], database, folder, seconds=seconds, kills=kills, seed=kills
        )
        outcome = asyncio.run(run)
    print(outcome.describe())
    assert not outcome.violations, outcome.describe() + "\n" + "\n".join(outcome.violations)
    assert outcome.kills == kills
    return outcome


def test_killed_gateways_lose_no_older_records_and_limits_hold(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(served, tmp_path, monkeypatch, seconds=4, kills=2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_killed_gateways_for_ten_minutes(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = check(served, tmp_path, monkeypatch, seconds=600, kills=60)
    assert outcome.most_in_flight == IN_FLIGHT, "the clients send more than the limit allows"
