"""Requests for greedy-token agreement over real HTTP, and the check of `serve` after the start of its engine."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.measure.endpoints import Script, make_completion, serve_script
from tests.measure.samples_of_agreement import make_plan, make_reference

from bedplate import store
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.measure import agreement as measured
from bedplate.measure.agreement import (
    QUICK,
    CompletionAnswer,
    FailedRequest,
    ask,
    check_served,
    compare,
    record_agreement,
)
from bedplate.measure.prefixes import hash_prefix
from bedplate.measure.reference import Reference
from bedplate.values import replace_fields
from bedplate.values.agreement import Agreement

MACHINE = make_simulated_hardware({"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16})
KNOWN = make_reference(200)


def answer_correctly(prompt: str) -> tuple[int, Any]:
    known = KNOWN.answers[hash_prefix(prompt)]
    return 200, make_completion(known.text, prompt_tokens=known.tokens)


def answer_nonsense(prompt: str) -> tuple[int, Any]:
    return 200, make_completion(random.Random(prompt).choice([" the", ",", " of", "\n"]), prompt_tokens=7)


def answer_without_spaces(prompt: str) -> tuple[int, Any]:
    return 200, make_completion(KNOWN.answers[hash_prefix(prompt)].text.strip())


def check_script(script: Script) -> Agreement:
    pairs = KNOWN.list_known()
    with serve_script(script) as endpoint:
        replies = asyncio.run(ask(endpoint.url, pairs, model="m", in_flight=8))
    return record_agreement(make_plan(), KNOWN, compare(pairs, replies), at="2026-11-15T10:00:00Z", machine="m1")


def test_correct_answers_are_ok() -> None:
    found = check_script(answer_correctly)
    assert (found.verdict, found.agreed, found.answered) == ("ok", 200, 200)


def test_stripped_spaces_are_ok() -> None:
    assert check_script(answer_without_spaces).verdict == "ok"


def test_nonsense_is_broken_with_evidence() -> None:
    found = check_script(answer_nonsense)
    assert found.verdict == "broken" and found.agreed == 0 and found.evidence
    assert all(one.expected.startswith(" word") for one in found.evidence)


def test_a_quarter_of_wrong_answers_is_broken() -> None:
    found = check_script(
        lambda prompt: (answer_correctly if random.Random(prompt).random() < 0.75 else answer_nonsense)(prompt)
    )
    assert found.verdict == "broken" and 100 < found.agreed < 180


def test_requests_one_greedy_token_with_the_key() -> None:
    with serve_script(answer_correctly) as endpoint:
        asyncio.run(ask(endpoint.url, KNOWN.list_known()[:3], model="some-model", key="secret"))
    assert endpoint.keys == {"Bearer secret"}
    assert all(
        body == {"model": "some-model", "prompt": body["prompt"], "max_tokens": 1, "temperature": 0}
        for body in endpoint.bodies
    )


def test_stops_after_one_request_without_the_api() -> None:
    with serve_script(lambda prompt: (404, {"error": "not found"})) as endpoint:
        replies = asyncio.run(ask(endpoint.url, KNOWN.list_known(), model="m"))
    assert len(endpoint.bodies) == 1 and all(isinstance(one, FailedRequest) and one.lasting for one in replies)


def test_an_unreachable_endpoint_fails_every_request() -> None:
    with serve_script(answer_correctly) as endpoint:
        pass
    replies = asyncio.run(ask(endpoint.url, KNOWN.list_known()[:4], model="m"))
    assert len(replies) == 4 and all(isinstance(one, FailedRequest) and one.why for one in replies)


def test_failed_requests_keep_the_order_of_the_others() -> None:
    bad = set(list(KNOWN.answers)[1::3])
    with serve_script(
        lambda prompt: (500, b"oops") if hash_prefix(prompt) in bad else answer_correctly(prompt)
    ) as endpoint:
        replies = asyncio.run(ask(endpoint.url, KNOWN.list_known(), model="m"))
    for (prefix, known), one in zip(KNOWN.list_known(), replies, strict=True):
        if hash_prefix(prefix) in bad:
            assert isinstance(one, FailedRequest)
        else:
            assert isinstance(one, CompletionAnswer) and one.text == known.text


class TestCheckAtStartUp:
    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measured, "find_reference", lambda model: KNOWN)

    def check(self, script: Script, path: Path, **changes: Any) -> tuple[list[Agreement], int]:
        reported: list[Agreement] = []
        with serve_script(script) as endpoint:
            asyncio.run(
                check_served(MACHINE, replace_fields(make_plan(), **changes), endpoint.url, None, reported.append, path)
            )
        return reported, len(endpoint.bodies)

    def read_store(self, path: Path) -> tuple[Agreement, ...]:
        return store.read_agreements(store.compute_fingerprint(MACHINE), path=path)

    def test_reports_and_stores_the_result(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        reported, requests = self.check(answer_correctly, path)
        assert requests == QUICK and reported[0].verdict == "ok" and self.read_store(path) == tuple(reported)

    def test_does_not_repeat_a_check_that_passed(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        self.check(answer_correctly, path)
        assert self.check(answer_correctly, path) == ([], 0)

    def test_checks_another_version(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        self.check(answer_correctly, path)
        reported, _ = self.check(answer_nonsense, path, engine_version="2026.12")
        assert reported[0].verdict == "broken"

    def test_repeats_a_check_that_failed(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        assert self.check(answer_nonsense, path)[0][0].verdict == "broken"
        assert self.check(answer_correctly, path)[0][0].verdict == "ok"
        assert sorted(one.verdict for one in self.read_store(path)) == ["broken", "ok"]

    def test_stores_a_missing_api_but_not_failed_requests(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        assert self.check(lambda prompt: (500, b""), path)[0][0].verdict == "unchecked"
        assert self.read_store(path) == ()
        assert self.check(lambda prompt: (404, b""), path)[0][0].verdict == "unchecked"
        assert self.check(lambda prompt: (404, b""), path) == ([], 0)

    def test_does_nothing_without_a_reference(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing: Reference | None = None
        monkeypatch.setattr(measured, "find_reference", lambda model: nothing)
        assert self.check(answer_correctly, tmp_path / "store.sqlite") == ([], 0)
