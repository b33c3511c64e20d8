"""Workload drift is reported together with the new plan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.hosting.stub_hosts import make_stub_environment, make_stub_readied

from bedplate import store
from bedplate.hosting.drift import ENOUGH, describe_drift, describe_new_plan, list_differences
from bedplate.hosting.host import HostedService
from bedplate.values import Decision, Workload, replace_fields
from bedplate.values.traffic import ServedRequest


def make_request(number: int, prompt: int, output: int) -> ServedRequest:
    return ServedRequest(
        at_s=time.time() - 3600 + 10 * number, tenant="default", model="alpha", api="chat", outcome="ok", status=200,
        body_bytes=100, prompt_tokens=prompt, completion_tokens=output, duration_ms=500,
    )  # fmt: skip


def test_lists_figures_that_differ_from_the_assumed_workload() -> None:
    assumed = Workload(prompt_tokens=512, output_tokens=256)
    assert list_differences(assumed, replace_fields(assumed, prompt_tokens=700, output_tokens=200)) == []
    assert list_differences(assumed, replace_fields(assumed, prompt_tokens=2048, concurrency=9)) == [
        "2,048 prompt tokens instead of 512",
        "9 concurrent requests instead of 1",
    ]
    assert not list_differences(replace_fields(assumed, users=40), replace_fields(assumed, concurrency=9))
    assert list_differences(replace_fields(assumed, concurrency=40), replace_fields(assumed, concurrency=9))
    assert list_differences(assumed, replace_fields(assumed, shared_prefix_tokens=400)) == [
        "a shared prefix of 400 tokens instead of 0"
    ]


def test_says_what_a_new_plan_would_choose(tmp_path: Path) -> None:
    before = make_stub_readied("alpha", make_stub_environment(tmp_path / "stub")).decided.decision
    assert describe_new_plan(before, before) == "a new plan would be the same"
    assert before.settings is not None
    more = replace_fields(before, settings=replace_fields(before.settings, slots=9))
    assert "keep llama.cpp, with 9 slots" in describe_new_plan(before, more)
    assert "a new plan would choose vllm" in describe_new_plan(before, replace_fields(more, engine="vllm"))
    none = Decision(engine=None, model="alpha", fits=False, max_concurrency=0, hints=("more memory",))
    assert describe_new_plan(before, none) == "this workload does not fit here: more memory"


@pytest.mark.parametrize(("requests", "is_reported"), [(ENOUGH - 1, False), (ENOUGH, True)])
def test_drift_is_reported_only_with_enough_requests(
    requests: int, is_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    one = make_stub_readied("alpha", make_stub_environment(tmp_path / "stub"))
    service = HostedService.__new__(HostedService)  # __init__ needs a running event loop
    service.name, service.wanted, service.readied = "alpha", one.decided.wanted, one
    assert describe_drift(service) is None
    store.add_requests([make_request(number, 3000, 100) for number in range(requests)])
    said = describe_drift(service)
    assert (said is not None) == is_reported
    if said is not None:
        assert "3,000 prompt tokens instead of 512" in said and "a new plan" in said
