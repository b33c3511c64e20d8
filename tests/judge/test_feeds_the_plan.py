"""What was measured outranks rules: cells become results, and results the next plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.judge.made_cells import made_cell, made_repeat, made_sample

from bedplate import store
from bedplate.decide import decide
from bedplate.facts.known_models import find_model
from bedplate.facts.simulated import simulated
from bedplate.measure.summary import result_of
from bedplate.values import Workload, replaced
from bedplate.values.run import Cell, Flag, Load, Quality, Subject

MACHINE = simulated({"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048})
MODEL = find_model("meta-llama/Meta-Llama-3.1-8B")
WORK = Workload(concurrency=64, prompt_tokens=1024, output_tokens=256)


def cell(engine: str, tok_s: float, at: str = "2026-11-15T09:00:00Z") -> Cell:
    made = made_cell(engine, [made_repeat([made_sample()], seconds=1.0, delivered_tokens=tok_s)])
    return replaced(
        made,
        at=at,
        machine=store.fingerprint(MACHINE),
        subject=Subject(engine=engine, model=MODEL.name, quantization="FP8", device="cuda"),
        load=Load(concurrency=64, prompt_tokens=1024, output_tokens=256),
    )


def engine_after(path: Path, *cells: Cell) -> str | None:
    for one in cells:
        found = result_of(one)
        if found is not None:
            store.add(found, path)
    kept = store.results(store.fingerprint(MACHINE), MODEL.name, path)
    return decide(MACHINE, MODEL, WORK, results=kept).engine


def test_a_measured_gain_changes_the_plan(tmp_path: Path) -> None:
    assert engine_after(tmp_path / "a", cell("vllm", 4000), cell("sglang", 4100)) == "vllm"
    assert engine_after(tmp_path / "b", cell("vllm", 4000), cell("sglang", 5200)) == "sglang"


def test_a_gain_that_may_be_chance_changes_nothing(tmp_path: Path) -> None:
    def repeated(engine: str, *tok_s: float) -> Cell:
        repeats = tuple(made_repeat([made_sample()], seconds=1.0, delivered_tokens=rate) for rate in tok_s)
        return replaced(cell(engine, tok_s[0]), repeats=repeats)

    steady = repeated("vllm", 4000, 4010, 3990)
    assert engine_after(tmp_path / "a", steady, repeated("sglang", 3000, 7000, 5600)) == "vllm"
    assert engine_after(tmp_path / "b", steady, repeated("sglang", 5190, 5200, 5210)) == "sglang"


@pytest.mark.parametrize(
    "spoilt",
    [
        {"quality": Quality(asked=100, agreement=0.99, verdict="broken")},
        {"flags": (Flag(kind="client", text="the client was the limit", invalid=True),)},
    ],
)
def test_wrong_answers_and_invalid_cells_do_not(tmp_path: Path, spoilt: dict[str, object]) -> None:
    assert engine_after(tmp_path / "s", cell("vllm", 4000), replaced(cell("sglang", 9000), **spoilt)) == "vllm"


def test_the_last_word_counts_and_not_the_luckiest(tmp_path: Path) -> None:
    lucky = cell("sglang", 5200, "2026-11-14T09:00:00Z")
    assert engine_after(tmp_path / "s", cell("vllm", 4000), lucky, cell("sglang", 4100)) == "vllm"
