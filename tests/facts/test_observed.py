"""Stored requests of an endpoint are summarized as a workload."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate import store
from bedplate.decide.intent import read_intent
from bedplate.errors import NotPossible
from bedplate.facts.observed_workload import summarize_observed
from bedplate.facts.workload import to_workload
from bedplate.run.gateway.shapes import hash_prefixes
from bedplate.values import from_json
from bedplate.values.traffic import ServedRequest
from bedplate.values.workload import TraceSummary

SALT = b"s" * 32
SYSTEM = b'[{"role":"system","content":"' + b"You are a careful helper. " * 78 + b'"}'


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def make_request(number: int, **more: object) -> ServedRequest:
    """One of a hundred requests, sent every two seconds, each taking four, with a shared system prompt of 2 KB."""
    text = SYSTEM + str(number).encode() * 300
    fields = {
        "at_s": time.time() - 600 + 2 * number, "tenant": "alice", "model": "small", "engine": "llama.cpp",
        "api": "chat", "stream": True, "outcome": "ok", "status": 200, "body_bytes": len(text) + 30,
        "duration_ms": 4000.0, "ttft_ms": 100.0, "prompt_tokens": len(text) // 4, "completion_tokens": 100,
        "prefix_hashes": hash_prefixes(text, SALT), "text_bytes": len(text),
    }  # fmt: skip
    return ServedRequest(**{**fields, **more})  # type: ignore[arg-type]


def test_stored_requests_become_a_workload() -> None:
    store.add_requests([make_request(number) for number in range(100)])
    summary = summarize_observed(3600)
    work = to_workload(summary)
    assert summary.requests == 100 and summary.tenants == 1 and summary.models == ("small",)
    assert work.origin == "observed" and work.concurrency in (2, 3)
    assert work.requests_per_s == pytest.approx(0.5, rel=0.02)
    assert work.output_tokens == 100 and 600 < work.prompt_tokens < 800
    # The system prompt has four blocks of 512 bytes. All requests but the first reuse them.
    assert work.shared_prefix_tokens == pytest.approx(4 * 128, rel=0.05)


def test_other_models_old_requests_and_token_counts_are_excluded() -> None:
    store.add_requests(
        [
            make_request(1),
            make_request(2),
            make_request(3, model="large"),
            make_request(4, api="other"),
            make_request(5, at_s=time.time() - 9000),
            make_request(6, outcome="turned_away", engine=None),
        ]
    )
    assert summarize_observed(3600, model="small").requests == 2
    whole = summarize_observed(3600)
    assert whole.requests == 3 and "1 rejected requests (429) are not counted" in whole.notes
    assert summarize_observed(10_000).requests == 4


def test_requests_without_an_end_are_noted() -> None:
    lost = make_request(2, outcome="cancelled", prompt_tokens=None, completion_tokens=None)
    store.add_requests(
        [make_request(1), lost, make_request(3, outcome="failed", prompt_tokens=None, completion_tokens=None)]
    )
    summary = summarize_observed(3600)
    assert summary.outcomes == {"cancelled": 1, "error": 1}
    assert summary.prompt.spread.max == make_request(1).prompt_tokens


def test_without_requests_it_is_an_error() -> None:
    with pytest.raises(NotPossible, match="no request was answered in the last 24 h"):
        summarize_observed(86_400)
    assert invoke("workload", "--observed", "24h").code == 1


def test_the_command_writes_a_valid_intent(tmp_path: Path) -> None:
    store.add_requests([make_request(number) for number in range(20)])
    path = tmp_path / "bedplate.yaml"
    page = invoke("workload", "--observed", "24h", "--model", "small", "-o", str(path))
    assert page.code == 0 and "20 requests in" in page.out
    summary = from_json(TraceSummary, invoke("workload", "--observed", "24h", "--json").out)
    assert read_intent(path).workload == to_workload(summary)


@pytest.mark.parametrize(
    "words", [(), ("x.csv", "--observed", "24h"), ("x.csv", "--model", "m"), ("--observed", "now")]
)
def test_exactly_one_source_is_required(words: tuple[str, ...]) -> None:
    assert invoke("workload", *words).code == 2
