"""A migration does not take away what clients used in the last day, unless it is forced."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from tests.changing.migrating import make_engine, make_quick_request
from tests.hosting.stub_hosts import add, with_host

from bedplate import store
from bedplate.changing.losses import (
    RecentUse,
    ServiceOffer,
    check_losses,
    count_most_at_once,
    find_losses,
    summarize_use,
)
from bedplate.changing.migrate import migrate
from bedplate.changing.outcomes import LatencyLimits, ObservedRequest, RequestTally, explain_worse
from bedplate.changing.shadow import ShadowRequest, run_shadow
from bedplate.errors import NotPossible
from bedplate.hosting.host import Host
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.values.capabilities import Capabilities
from bedplate.values.record import replace_fields
from bedplate.values.traffic import ServedRequest

FULL = Capabilities(vision=True)
PLAIN = Capabilities(tools="none", json_schema=False, json_object=False, logprobs=False, n=1)
BEFORE = ServiceOffer("vllm 1", FULL, 16, 8192)


def make_row(at_s: float = 0.0, **more: Any) -> ServedRequest:
    usual = {"tenant": "a", "model": "alpha", "engine": "llama.cpp", "api": "chat", "outcome": "ok", "status": 200}
    return ServedRequest(**{"at_s": at_s, "body_bytes": 10, "duration_ms": 1000.0, **usual, **more})


def test_use_is_read_from_answered_requests_only() -> None:
    rows = [
        make_row(0.0, features=("tools", "seed"), prompt_tokens=100, completion_tokens=20),
        make_row(0.5, wait_ms=100.0),
        make_row(0.9),
        make_row(2.0, features=("json_schema",), outcome="refused", prompt_tokens=9999),
        make_row(2.0, outcome="turned_away", engine=None),
    ]
    assert summarize_use(rows) == RecentUse(frozenset(["tools", "seed"]), 3, 120)


@pytest.mark.parametrize(
    ("begun", "ended", "most"),
    [([], [], 0), ([1.0], [2.0], 1), ([1.0, 2.0], [2.0, 3.0], 1), ([1.0, 1.5, 1.7], [2.0, 2.0, 1.6], 2)],
)
def test_concurrency_is_the_largest_overlap(begun: list[float], ended: list[float], most: int) -> None:
    assert count_most_at_once(begun, ended) == most


def test_losses_are_divided_by_use() -> None:
    after = ServiceOffer("pytorch 1", PLAIN, 1, 4096)
    used = RecentUse(frozenset(["json_schema"]), 4, 1000)
    losses = {one.text: one.was_used for one in find_losses(BEFORE, after, used)}
    assert losses["JSON schemas (response_format json_schema)"] and not losses["tools"]
    assert losses["concurrent requests: 1 instead of 16 (up to 4 ran at once)"]
    assert not losses["context length: 4,096 instead of 8,192 tokens"]
    with pytest.raises(NotPossible, match=r"JSON schemas.*4 ran at once") as refused:
        check_losses(BEFORE, after, used, force=False)
    assert "--force" in (refused.value.hint or "")
    notes = check_losses(BEFORE, after, used, force=True)
    assert any("JSON schemas" in note for note in notes)
    assert check_losses(BEFORE, after, RecentUse(), force=False)
    longer = RecentUse(frozenset(), 1, 5000)
    with pytest.raises(NotPossible, match="a request had 5,000"):
        check_losses(BEFORE, after, longer, force=False)


def test_an_engine_that_states_no_features_is_not_refused() -> None:
    unknown = ServiceOffer("own 1", None, 16, 8192)
    used = RecentUse(frozenset(["tools"]))
    assert check_losses(BEFORE, unknown, used, force=False) == []
    with pytest.raises(NotPossible, match="tools"):
        check_losses(unknown, BEFORE._replace(capabilities=PLAIN), used, force=False)
    assert check_losses(unknown, BEFORE._replace(capabilities=PLAIN), RecentUse(), force=False) == []


@pytest.mark.parametrize("verb", ["migrate", "shadow"])
def test_a_used_feature_is_not_lost_unless_forced(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bedplate_home: Path
) -> None:
    """The engine is refused before it is installed."""
    first = make_engine(tmp_path, "one")
    worse = dataclasses.replace(
        first.decided, plan=replace_fields(first.plan, engine="pytorch", engine_version="5.22.2")
    )
    installed: list[object] = []

    def install(one: object, *_: object, **__: object) -> None:
        installed.append(one)
        raise NotPossible("not here")

    for module in ("migrate", "shadow"):
        monkeypatch.setattr(f"bedplate.changing.{module}.decide_engines", lambda *_, **__: (worse,))
        monkeypatch.setattr(f"bedplate.changing.{module}.prepare_model", install)
    asking = make_quick_request("pytorch")

    async def change(host: Host, force: bool) -> None:
        if verb == "migrate":
            await migrate(host, replace_fields(asking, force=force), lambda text: None)
        else:
            await run_shadow(host, ShadowRequest(engine="pytorch", force=force), lambda text: None)

    async def then(host: Host) -> None:
        await add(host, first)
        for features, force, reached in (
            (("json_schema",), False, False), (("json_schema",), True, True), (("seed",), False, True),
        ):  # fmt: skip
            with store._open_store(store.get_store_path()) as connection:
                connection.execute("DELETE FROM requests")
            store.add_requests([make_row(time.time() - 60, features=features)])
            installed.clear()
            with pytest.raises(NotPossible, match="not here" if reached else "JSON schemas"):
                await asyncio.wait_for(change(host, force), 60)
            assert bool(installed) is reached

    with_host(then, tmp_path)


def make_end(outcome: str) -> FinishedRequest:
    return FinishedRequest(outcome, False, None, 1.0, None, None, b"/v1/chat/completions", b"{}")  # type: ignore[arg-type]


def test_mistakes_of_clients_do_not_roll_a_migration_back() -> None:
    tally = RequestTally()
    for _ in range(50):
        tally.add(make_end("mistaken"))
    assert tally.count == 0
    refused = [ObservedRequest.from_ended(make_end("refused"))] * 10
    ok = [ObservedRequest.from_ended(make_end("ok"))] * 10
    limits = LatencyLimits()
    assert explain_worse(refused, ok, limits) is not None
    assert explain_worse(refused, ok, limits, compare_rejections=False) is None
