"""Engines with wrong answers on this machine are stored and not chosen again."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.measure.samples_of_agreement import make_agreement

from bedplate import store
from bedplate.decide import decide
from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import Decision, Settings, Workload
from bedplate.values.agreement import Agreement

MACHINE = make_simulated_hardware({"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16})
VERSION = get_engine("llama.cpp").version or ""


def decide_with(*agreements: Agreement, wanted: str | None = None) -> Decision:
    return decide(MACHINE, read_builtin_facts(), Workload(), wanted, agreements=agreements)


def make_broken(verdict: str = "broken", **changes: Any) -> Agreement:
    return make_agreement(verdict, **{"engine_version": VERSION, **changes})


class TestDecision:
    def test_a_broken_engine_is_refused_with_figures(self) -> None:
        assert decide_with().engine == "llama.cpp"
        found = decide_with(make_broken())
        assert found.engine not in ("llama.cpp", None)
        (refusal,) = [one for one in found.refused if one.engine == "llama.cpp"]
        assert refusal.kind == "unsuitable" and "gave wrong answers on this machine: 3 of 48 prefixes" in refusal.why

    def test_a_broken_engine_is_used_on_request_with_a_warning(self) -> None:
        found = decide_with(make_broken(), wanted="llama.cpp")
        assert (
            found.engine == "llama.cpp"
            and "WARNING: it gave wrong answers on this machine: 3 of 48" in found.reasons[0].text
        )
        assert "WARNING" not in decide_with(wanted="llama.cpp").reasons[0].text

    def test_a_later_passed_check_clears_the_refusal(self) -> None:
        assert decide_with(make_broken("ok"), make_broken()).engine == "llama.cpp"
        assert decide_with(make_broken(), make_broken("ok")).engine != "llama.cpp"

    def test_a_later_unchecked_result_does_not_clear_the_refusal(self) -> None:
        assert decide_with(make_broken("unchecked"), make_broken()).engine != "llama.cpp"

    @pytest.mark.parametrize(
        "changes",
        [
            {"engine_version": "1.0"},
            {"weights": "Q8_0"},
            {"model": "another model"},
            {"engine": "vllm"},
            {"settings": Settings(slots=1, context_tokens=2048, device="cuda")},
            {"settings": Settings(slots=1, context_tokens=2048, kv_type="fp8")},
        ],
    )
    def test_a_broken_result_of_other_settings_does_not_count(self, changes: dict[str, Any]) -> None:
        assert decide_with(make_broken(**changes)).engine == "llama.cpp"


class TestStore:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store.sqlite"

    def test_returns_agreements_of_machine_and_model_newest_first(self, path: Path) -> None:
        older, newer = make_agreement(at="2026-11-01T10:00:00Z"), make_agreement("ok", at="2026-11-02T10:00:00Z")
        for one in (newer, older, make_agreement(machine="m2"), make_agreement(model="another")):
            store.add_agreement(one, path)
        assert store.read_agreements("m1", "SmolLM2-135M-Instruct", path) == (newer, older)
        assert len(store.read_agreements("m1", path=path)) == 3
        assert store.read_results("m1", path=path) == ()

    def test_reading_creates_no_file(self, path: Path) -> None:
        assert store.read_agreements("m1", path=path) == () and not path.exists()

    def test_migrates_a_store_of_the_first_version(self, path: Path) -> None:
        with sqlite3.connect(path) as connection:  # the schema of version 1
            connection.executescript(
                "CREATE TABLE results (id INTEGER PRIMARY KEY, at TEXT NOT NULL, machine TEXT NOT NULL,"
                " engine TEXT NOT NULL, model TEXT NOT NULL, body TEXT NOT NULL);"
                "INSERT INTO results (at, machine, engine, model, body) VALUES ('2026-11-01T10:00:00Z', 'm1', 'vllm',"
                """ 'x', '{"at":"2026-11-01T10:00:00Z","machine":"m1","engine":"vllm","model":"x","concurrency":1,"""
                """"prompt_tokens":1,"output_tokens":1}'); PRAGMA user_version=1;"""
            )
        connection.close()
        assert store.read_agreements("m1", path=path) == ()
        store.add_agreement(make_agreement(), path)
        assert store.read_agreements("m1", path=path) == (make_agreement(),)
        assert [one.engine for one in store.read_results("m1", path=path)] == ["vllm"]

    def test_an_unreadable_row_raises_outside_failed(self, path: Path) -> None:
        store.add_agreement(make_agreement(), path)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE agreements SET body = '{}'")
        connection.close()
        with pytest.raises(ExternalFailure):
            store.read_agreements("m1", path=path)
