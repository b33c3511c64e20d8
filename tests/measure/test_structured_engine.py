"""The real llama.cpp with the real model: its grammar enforces schemas, and the gateway refuses required calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.conftest import Served

from bedplate.measure.structured import check

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_core")]


def test_support_and_scores_of_a_real_engine(serve: Callable[..., Served]) -> None:
    served = serve()
    names = ("extract-person", "classify-ticket", "object-person", "auto-none-thanks", "named-timer")
    found = asyncio.run(check(served.root, served.endpoint["model"], None, only=names))
    by_kind = {one.kind: one for one in found.kinds}
    assert {kind: one.support for kind, one in by_kind.items()} == {
        "json_schema": "enforced", "json_object": "enforced", "tool_auto": "accepted", "tool_named": "refused",
    }  # fmt: skip
    assert "tool_choice that requires a call" in str(by_kind["tool_named"].reason)
    matched = by_kind["json_schema"].matched
    assert matched is not None and (matched.passed, matched.count) == (2, 2), "a grammar makes every answer match"
    assert found.asked == 4
