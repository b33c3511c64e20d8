"""What gave wrong answers on this machine is kept in the store, and not chosen again."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.measure.samples_of_agreement import agreement

from bedplate import store
from bedplate.decide import decide
from bedplate.engines import engine
from bedplate.errors import OutsideFailed
from bedplate.facts.simulated import simulated
from bedplate.run.builtin import builtin_facts
from bedplate.values import Decision, Settings, Workload
from bedplate.values.agreement import Agreement

MACHINE = simulated({"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16})
VERSION = engine("llama.cpp").version or ""


def decided(*agreements: Agreement, wanted: str | None = None) -> Decision:
    return decide(MACHINE, builtin_facts(), Workload(), wanted, agreements=agreements)


def broken(verdict: str = "broken", **changes: Any) -> Agreement:
    return agreement(verdict, **{"engine_version": VERSION, **changes})


class TestDeciding:
    def test_it_is_refused_with_the_figures_and_another_takes_its_place(self) -> None:
        assert decided().engine == "llama.cpp"
        found = decided(broken())
        assert found.engine not in ("llama.cpp", None)
        (refusal,) = [one for one in found.refused if one.engine == "llama.cpp"]
        assert refusal.kind == "unsuitable" and "gave wrong answers on this machine: 3 of 48 prefixes" in refusal.why

    def test_asked_for_it_is_taken_with_a_loud_reason(self) -> None:
        found = decided(broken(), wanted="llama.cpp")
        assert (
            found.engine == "llama.cpp"
            and "WARNING: it gave wrong answers on this machine: 3 of 48" in found.reasons[0].text
        )
        assert "WARNING" not in decided(wanted="llama.cpp").reasons[0].text

    def test_a_later_check_that_found_nothing_clears_it(self) -> None:
        assert decided(broken("ok"), broken()).engine == "llama.cpp"
        assert decided(broken(), broken("ok")).engine != "llama.cpp"

    def test_a_check_that_could_not_be_made_does_not(self) -> None:
        assert decided(broken("unchecked"), broken()).engine != "llama.cpp"

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
    def test_of_another_setting_it_says_nothing(self, changes: dict[str, Any]) -> None:
        assert decided(broken(**changes)).engine == "llama.cpp"


class TestTheStore:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store.sqlite"

    def test_newest_first_of_this_machine_and_model(self, path: Path) -> None:
        older, newer = agreement(at="2026-11-01T10:00:00Z"), agreement("ok", at="2026-11-02T10:00:00Z")
        for one in (newer, older, agreement(machine="m2"), agreement(model="another")):
            store.add_agreement(one, path)
        assert store.agreements("m1", "SmolLM2-135M-Instruct", path) == (newer, older)
        assert len(store.agreements("m1", path=path)) == 3
        assert store.results("m1", path=path) == ()

    def test_reading_makes_no_file(self, path: Path) -> None:
        assert store.agreements("m1", path=path) == () and not path.exists()

    def test_a_file_of_the_first_version_keeps_what_it_has(self, path: Path) -> None:
        with sqlite3.connect(path) as connection:  # as version 1 made it
            connection.executescript(
                "CREATE TABLE results (id INTEGER PRIMARY KEY, at TEXT NOT NULL, machine TEXT NOT NULL,"
                " engine TEXT NOT NULL, model TEXT NOT NULL, body TEXT NOT NULL);"
                "INSERT INTO results (at, machine, engine, model, body) VALUES ('2026-11-01T10:00:00Z', 'm1', 'vllm',"
                """ 'x', '{"at":"2026-11-01T10:00:00Z","machine":"m1","engine":"vllm","model":"x","concurrency":1,"""
                """"prompt_tokens":1,"output_tokens":1}'); PRAGMA user_version=1;"""
            )
        connection.close()
        assert store.agreements("m1", path=path) == ()
        store.add_agreement(agreement(), path)
        assert store.agreements("m1", path=path) == (agreement(),)
        assert [one.engine for one in store.results("m1", path=path)] == ["vllm"]

    def test_a_row_that_cannot_be_read_is_a_failure_and_not_a_crash(self, path: Path) -> None:
        store.add_agreement(agreement(), path)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE agreements SET body = '{}'")
        connection.close()
        with pytest.raises(OutsideFailed):
            store.agreements("m1", path=path)
