"""Asking an endpoint over real HTTP, and the check that `serve` makes once its engine is ready."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.measure.endpoints import Script, completion, scripted
from tests.measure.samples_of_agreement import plan, reference

from bedplate import store
from bedplate.facts.simulated import simulated
from bedplate.measure import agreement as measured
from bedplate.measure.agreement import QUICK, Answer, Failed, ask, check_served, compare, judged
from bedplate.measure.prefixes import prefix_hash
from bedplate.measure.reference import Reference
from bedplate.values import replaced
from bedplate.values.agreement import Agreement

MACHINE = simulated({"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16})
KNOWN = reference(200)


def truthful(prompt: str) -> tuple[int, Any]:
    known = KNOWN.answers[prefix_hash(prompt)]
    return 200, completion(known.text, prompt_tokens=known.tokens)


def nonsense(prompt: str) -> tuple[int, Any]:
    return 200, completion(random.Random(prompt).choice([" the", ",", " of", "\n"]), prompt_tokens=7)


def stripped(prompt: str) -> tuple[int, Any]:
    return 200, completion(KNOWN.answers[prefix_hash(prompt)].text.strip())


def verdict(script: Script) -> Agreement:
    pairs = KNOWN.known()
    with scripted(script) as endpoint:
        said = asyncio.run(ask(endpoint.url, pairs, model="m", in_flight=8))
    return judged(plan(), KNOWN, compare(pairs, said), at="2026-11-15T10:00:00Z", machine="m1")


def test_an_engine_that_says_what_its_weights_say() -> None:
    found = verdict(truthful)
    assert (found.verdict, found.agreed, found.answered) == ("ok", 200, 200)


def test_one_that_strips_the_space() -> None:
    assert verdict(stripped).verdict == "ok"


def test_one_that_answers_nonsense_is_broken_with_evidence() -> None:
    found = verdict(nonsense)
    assert found.verdict == "broken" and found.agreed == 0 and found.evidence
    assert all(one.expected.startswith(" word") for one in found.evidence)


def test_one_that_is_wrong_a_quarter_of_the_time_is_broken() -> None:
    found = verdict(lambda prompt: (truthful if random.Random(prompt).random() < 0.75 else nonsense)(prompt))
    assert found.verdict == "broken" and 100 < found.agreed < 180


def test_what_is_asked_is_one_greedy_token_with_the_key() -> None:
    with scripted(truthful) as endpoint:
        asyncio.run(ask(endpoint.url, KNOWN.known()[:3], model="some-model", key="secret"))
    assert endpoint.keys == {"Bearer secret"}
    assert all(
        body == {"model": "some-model", "prompt": body["prompt"], "max_tokens": 1, "temperature": 0}
        for body in endpoint.bodies
    )


def test_without_such_an_api_it_is_asked_once() -> None:
    with scripted(lambda prompt: (404, {"error": "not found"})) as endpoint:
        said = asyncio.run(ask(endpoint.url, KNOWN.known(), model="m"))
    assert len(endpoint.bodies) == 1 and all(isinstance(one, Failed) and one.lasting for one in said)


def test_nobody_there() -> None:
    with scripted(truthful) as endpoint:
        pass
    said = asyncio.run(ask(endpoint.url, KNOWN.known()[:4], model="m"))
    assert len(said) == 4 and all(isinstance(one, Failed) and one.why for one in said)


def test_some_that_fail_leave_the_others_in_their_place() -> None:
    bad = set(list(KNOWN.answers)[1::3])
    with scripted(lambda prompt: (500, b"oops") if prefix_hash(prompt) in bad else truthful(prompt)) as endpoint:
        said = asyncio.run(ask(endpoint.url, KNOWN.known(), model="m"))
    for (prefix, known), one in zip(KNOWN.known(), said, strict=True):
        if prefix_hash(prefix) in bad:
            assert isinstance(one, Failed)
        else:
            assert isinstance(one, Answer) and one.text == known.text


class TestAtStartUp:
    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measured, "reference_for", lambda model: KNOWN)

    def check(self, script: Script, path: Path, **changes: Any) -> tuple[list[Agreement], int]:
        told: list[Agreement] = []
        with scripted(script) as endpoint:
            asyncio.run(check_served(MACHINE, replaced(plan(), **changes), endpoint.url, None, told.append, path))
        return told, len(endpoint.bodies)

    def kept(self, path: Path) -> tuple[Agreement, ...]:
        return store.agreements(store.fingerprint(MACHINE), path=path)

    def test_it_is_quick_told_and_remembered(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        told, requests = self.check(truthful, path)
        assert requests == QUICK and told[0].verdict == "ok" and self.kept(path) == tuple(told)

    def test_what_was_good_is_not_asked_again(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        self.check(truthful, path)
        assert self.check(truthful, path) == ([], 0)

    def test_another_version_is(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        self.check(truthful, path)
        told, _ = self.check(nonsense, path, engine_version="2026.12")
        assert told[0].verdict == "broken"

    def test_what_was_broken_is_asked_again_and_may_have_been_mended(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        assert self.check(nonsense, path)[0][0].verdict == "broken"
        assert self.check(truthful, path)[0][0].verdict == "ok"
        assert sorted(one.verdict for one in self.kept(path)) == ["broken", "ok"]

    def test_an_engine_without_the_api_is_remembered_and_one_that_fails_is_not(self, tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        assert self.check(lambda prompt: (500, b""), path)[0][0].verdict == "unchecked"
        assert self.kept(path) == ()
        assert self.check(lambda prompt: (404, b""), path)[0][0].verdict == "unchecked"
        assert self.check(lambda prompt: (404, b""), path) == ([], 0)

    def test_without_a_reference_nothing_happens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing: Reference | None = None
        monkeypatch.setattr(measured, "reference_for", lambda model: nothing)
        assert self.check(truthful, tmp_path / "store.sqlite") == ([], 0)
