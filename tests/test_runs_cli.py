"""Only clean measurements change plans, and `bedplate runs` lists, shows and discards them."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.contract.documents import check_document
from tests.decide.test_tuned import make_tuning
from tests.judge.made_cells import Noise, make_pair
from tests.runs import make_cell, make_run

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.scenarios import get_scenario
from bedplate.judge.compare import compare
from bedplate.measure.flags import flag_cell
from bedplate.measure.questions import parse_loads
from bedplate.measure.stored_runs import find_stored_run, list_stored_runs
from bedplate.measure.summary import make_result
from bedplate.run.environments import EngineEnvironment
from bedplate.values import from_json, make_estimate, replace_fields
from bedplate.values.evidence import find_exclusions
from bedplate.values.run import Flag, FlagKind, Quality, ResourceUse, Run

CAPTURES = Path(__file__).parent / "captures" / "runs"
PLAIN = make_simulated_hardware({"cpu": "Intel Xeon", "cores": 2, "ram_gb": 24})
SPEED = make_estimate(20e9, 0.1, "made up")
MACHINE = replace_fields(PLAIN, memory=replace_fields(PLAIN.memory, bandwidth_bytes_s=SPEED))
HERE = store.compute_fingerprint(MACHINE)
BUSY = Flag(kind="busy", text="other processes used 34% of the CPU")
PLAN = ("plan", "--concurrency", "4", "--prompt-tokens", "512", "--output-tokens", "128", "--json")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home on a machine of known speed."""
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    monkeypatch.setattr("bedplate.facts.hardware.probe", lambda: MACHINE)
    return tmp_path


def read_run(name: str, **changes: object) -> Run:
    """A real run, as if it had been measured on `MACHINE`."""
    run = from_json(Run, lzma.decompress((CAPTURES / f"{name}.json.xz").read_bytes()))
    cells = tuple(replace_fields(cell, machine=HERE, **changes) for cell in run.cells)
    environment = replace_fields(run.environment, machine=HERE)
    return replace_fields(run, environment=environment, cells=cells)


def keep(run: Run) -> Run:
    """Store a run as `bench` does."""
    store.add_run(run)
    for cell in run.cells:
        store.add_cell(cell)
        if (result := make_result(cell)) is not None:
            store.add_result(result)
    return run


def get_speed() -> float:
    return float(json.loads(invoke(*PLAN).out)["estimate"]["output_tok_s"]["value"])


def get_reasons() -> dict[str, str]:
    return {one["rule"]: one["text"] for one in json.loads(invoke(*PLAN).out)["reasons"]}


# what counts


@pytest.mark.parametrize(
    "kind",
    ["client", "busy", "throttled", "truncated", "length", "cache", "errors", "garbled", "broken", "swapped", "short"],
)
def test_a_flagged_cell_is_no_evidence(kind: FlagKind) -> None:
    cell = make_cell("llama.cpp", 4, 80.0, flags=(Flag(kind=kind, text="why"),))
    assert [(one.kind, one.text) for one in find_exclusions(cell)] == [(kind, "why")] and make_result(cell) is None


def test_a_clean_cell_is_evidence_also_beside_engines_with_other_weights() -> None:
    mixed = Flag(kind="mixed", text="Q4_1 weights, but vllm BF16")
    for cell in (make_cell("llama.cpp", 4, 80.0), make_cell("llama.cpp", 4, 80.0, flags=(mixed,))):
        assert find_exclusions(cell) == () and make_result(cell) is not None


def test_cells_without_flags_are_judged_by_their_samples() -> None:
    cell = make_cell("llama.cpp", 4, 80.0)
    limited = replace_fields(cell.repeats[0], client=replace_fields(cell.repeats[0].client, limit=True))
    failed = tuple(replace_fields(sample, outcome="error") for sample in cell.repeats[0].samples)
    for repeat, quality, kind in (
        (limited, cell.quality, "client"),
        (replace_fields(cell.repeats[0], samples=failed), cell.quality, "short"),
        (cell.repeats[0], Quality(verdict="broken"), "broken"),
    ):
        found = find_exclusions(replace_fields(cell, repeats=(repeat,), quality=quality))
        assert [one.kind for one in found] == [kind]


def test_other_processes_exclude_a_cell() -> None:
    cell = make_cell("llama.cpp", 4, 80.0)
    for use in (
        ResourceUse(other_cpu_share=0.12),
        ResourceUse(other_gpu_share=0.2),
        ResourceUse(other_measurements=(7,)),
        ResourceUse(clock_share=0.8),
    ):
        repeats = (*cell.repeats[1:], replace_fields(cell.repeats[0], use=use))
        disturbed = replace_fields(cell, repeats=repeats)
        assert find_exclusions(replace_fields(disturbed, flags=flag_cell(disturbed))), use


# plans


def test_a_flagged_run_does_not_change_plans_and_a_clean_one_does(home: Path) -> None:
    plain = get_speed()
    keep(read_run("two-cores-llama", flags=(BUSY,)))
    assert get_speed() == plain and "evidence.calibrated" not in get_reasons()
    shifted = keep(read_run("two-cores-arm-llama"))
    assert get_speed() != plain
    (factor,) = [one.factor for one in list_stored_runs(MACHINE)[0].effects if one.factor is not None]
    assert get_speed() / plain == pytest.approx(factor, rel=1e-6)
    reason = get_reasons()["evidence.calibrated"]
    assert f"scaled by {factor:.2f}" in reason and f"bedplate runs discard {shifted.id} removes it" in reason


def test_models_ignores_flagged_runs_and_names_clean_ones(home: Path) -> None:
    asked = ("models", "--search", "SmolLM2-135M", "--json")
    plain = json.loads(invoke(*asked).out)
    keep(read_run("two-cores-llama", flags=(BUSY,)))
    assert json.loads(invoke(*asked).out) == plain and plain["notes"] == []
    run = keep(read_run("two-cores-arm-llama"))
    moved = json.loads(invoke(*asked).out)
    assert moved["models"][0]["tok_s"]["value"] != plain["models"][0]["tok_s"]["value"]
    assert f"bedplate runs discard {run.id} removes it" in moved["notes"][0]
    assert run.id in " ".join(invoke(*asked[:-1]).out.split())


def test_a_verdict_on_flagged_cells_is_no_evidence(home: Path) -> None:
    llama, vllm = keep(read_run("two-cores-arm-llama")), keep(read_run("two-cores-arm-vllm"))
    verdict = compare(llama.cells, vllm.cells, allow=("quantization", "weights"))
    store.add_verdict(verdict, "2026-11-16T10:00:00Z")
    assert store.read_evidence(HERE).verdicts == (verdict,)
    store.add_cell(replace_fields(vllm.cells[0], flags=(BUSY,)))
    assert store.read_evidence(HERE).verdicts == () and store.read_verdicts(HERE) == (verdict,)
    store.add_cell(vllm.cells[0])
    assert store.read_evidence(HERE).verdicts == (verdict,), "a further repeat may make a cell clean"


def test_a_tuning_with_flagged_measurements_is_no_evidence(home: Path) -> None:
    tuned = replace_fields(make_tuning(ubatch="256"), machine=HERE)
    store.add_tuning(tuned)
    assert store.read_evidence(HERE).tunings == (tuned,)
    excluded = find_exclusions(make_cell("llama.cpp", 4, 80.0, flags=(BUSY,)))
    store.add_tuning(replace_fields(tuned, exclusions=excluded))
    assert store.read_evidence(HERE).tunings == ()
    (shown,) = list_stored_runs(MACHINE)
    assert shown.kind == "tune" and shown.clean == 0 and shown.effects == () and shown.exclusions == excluded


# older stores


def test_results_of_flagged_cells_of_an_older_store_are_removed(home: Path) -> None:
    clean, flagged = read_run("two-cores-arm-llama"), read_run("two-cores-arm-vllm", flags=(BUSY,))
    for run in (clean, flagged):
        store.add_run(run)
        for cell in run.cells:
            store.add_cell(cell)
            made = make_result(replace_fields(cell, flags=()))
            assert made is not None
            store.add_result(made)
    without_run = make_result(replace_fields(flagged.cells[0], flags=()))
    assert without_run is not None
    store.add_result(replace_fields(without_run, run=None))
    with contextlib.closing(sqlite3.connect(store.get_store_path())) as connection, connection:
        connection.execute("DROP TABLE exclusions")
        connection.execute("PRAGMA user_version=7")
    assert {one.engine for one in store.read_evidence(HERE).results} == {"llama.cpp"}
    assert len(store.read_evidence(HERE).results) == len(clean.cells)
    assert set(store.read_exclusions()) == {cell.id for cell in flagged.cells}
    assert [one.run for one in store.read_results(HERE) if one.engine == "vllm"] == [None], "stored, but no evidence"


# bedplate runs


def test_list_shows_what_is_clean_and_what_changes_plans(home: Path) -> None:
    assert "no runs" in invoke("runs").out
    keep(read_run("two-cores-llama", flags=(BUSY,)))
    run = keep(read_run("two-cores-arm-llama"))
    store.add_tuning(replace_fields(make_tuning(ubatch="256"), machine=HERE))
    keep(replace_fields(read_run("h200-llama"), source="h200.json", at="2026-11-01T10:00:00Z"))
    page = " ".join(invoke("runs", "list").out.split())
    assert "flagged: other processes used 34% of the CPU" in page and "changes settings" in page
    document = check_document("runs", invoke("runs", "list", "--json").out)
    assert [one["kind"] for one in document["runs"]].count("bench") == 2
    rows = {one["id"]: one for one in document["runs"]}
    factor = rows[run.id]["effects"][0]["factor"]
    assert f"shifts plans by {factor:.2f}" in page and rows[run.id]["clean"] == rows[run.id]["cells"] == 4
    assert rows[run.id]["engines"] == [f"llama.cpp@{run.cells[0].subject.engine_version}"]
    assert invoke("runs", "--json").out == invoke("runs", "list", "--json").out


def test_a_verdict_on_a_scenario_is_listed_as_an_effect(home: Path) -> None:
    load = parse_loads(concurrency="16", scenario=get_scenario("chat"))[0]
    sides = [
        [
            replace_fields(one, load=load, machine=HERE, run="chat", subject=replace_fields(one.subject, engine=engine))
            for one in side
        ]
        for engine, side in zip(("llama.cpp", "vllm"), make_pair(Noise(3, 0.02, 0.004, 0.004), 1.5), strict=True)
    ]  # fmt: skip
    keep(replace_fields(read_run("two-cores-arm-llama"), id="chat", cells=(*sides[0], *sides[1])))
    assert [one.effects for one in list_stored_runs(MACHINE)] == [()]
    store.add_verdict(compare(*sides), "2026-11-16T10:00:00Z")
    ((effect,),) = [one.effects for one in list_stored_runs(MACHINE)]
    assert effect.kind == "engine" and "choose vLLM instead of llama.cpp under the measured load" in effect.text


def test_show_lists_flags_in_words_and_effects(home: Path) -> None:
    flagged, clean = keep(read_run("two-cores-llama", flags=(BUSY,))), keep(read_run("two-cores-arm-llama"))
    page = " ".join(invoke("runs", "show", flagged.id).out.split())
    assert BUSY.text in page and "plans use clean measurements only" in page
    document = check_document("run-details", invoke("runs", "show", clean.id[:12], "--json").out)
    assert [one["exclusions"] for one in document["cells"]] == [[], [], [], []]
    (effect,) = document["run"]["effects"]
    assert effect["kind"] == "estimates" and effect["factor_without"] == 1.0
    assert f"bedplate runs discard {clean.id} removes these effects" in invoke("runs", "show", clean.id).out


def test_discard_takes_back_everything_that_depended_on_the_run(home: Path) -> None:
    llama = keep(read_run("two-cores-arm-llama"))
    before = invoke(*PLAN).out
    vllm = keep(read_run("two-cores-arm-vllm"))
    verdict = compare(llama.cells, vllm.cells, allow=("quantization", "weights"))
    store.add_verdict(verdict, "2026-11-16T10:00:00Z")
    assert store.read_last_verdict(HERE, verdict.model) is not None
    effects = {one.id: one.effects for one in list_stored_runs(MACHINE)}
    assert [one.kind for one in effects[vllm.id]][:1] == ["estimates"]
    document = check_document("discarded-run", invoke("runs", "discard", vllm.id, "--yes", "--json").out)
    assert (document["cells"], document["results"], document["verdicts"]) == (4, 4, 1)
    assert invoke(*PLAN).out == before and store.read_last_verdict(HERE, verdict.model) is None
    assert [one.id for one in list_stored_runs(MACHINE)] == [llama.id] and store.read_cells(vllm.id) == ()
    tuned = replace_fields(make_tuning(ubatch="256"), machine=HERE)
    store.add_tuning(tuned)
    done = invoke("runs", "discard", tuned.id, "--yes")
    assert done.code == 0 and "no longer applies: plans of llama.cpp use" in done.out
    assert store.read_tunings(HERE) == ()


def test_discard_without_a_terminal_needs_yes(home: Path) -> None:
    run = keep(read_run("two-cores-arm-llama"))
    refused = invoke("runs", "discard", run.id)
    assert refused.code == 2 and "--yes" in refused.err and len(store.read_runs()) == 1


@pytest.mark.parametrize(("said", "code", "left"), [(b"n\n", 1, 1), (b"y\n", 0, 0)])
def test_discard_asks_on_a_terminal(home: Path, said: bytes, code: int, left: int) -> None:
    run = keep(read_run("two-cores-arm-llama"))
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "bedplate", "runs", "discard", run.id],
            stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs,
        )  # fmt: skip
        os.write(ours, said)
        assert process.wait(timeout=300) == code
    finally:
        os.close(theirs)
        os.close(ours)
    assert len(store.read_runs()) == left


def test_unknown_ids_name_the_nearest(home: Path) -> None:
    empty = invoke("runs", "show", "x")
    assert empty.code == 2 and "no run is stored yet" in empty.err
    run = keep(read_run("two-cores-arm-llama"))
    keep(replace_fields(make_run(()), id="made"))
    for verb in (("show",), ("discard", "--yes")):
        wrong = invoke("runs", *verb, run.id[:-2] + "zz")
        assert wrong.code == 2 and f"there is no run {run.id[:-2]}zz" in wrong.err and run.id in wrong.err
        assert "made" not in wrong.err.splitlines()[1]
    keep(replace_fields(make_run(()), id="made-again"))
    assert find_stored_run("made", list_stored_runs(MACHINE)).id == "made", "a whole id is not ambiguous"
    assert "2 run ids begin with ma" in invoke("runs", "show", "ma").err


def test_runs_of_other_machines_have_no_effect(home: Path) -> None:
    run = keep(from_json(Run, lzma.decompress((CAPTURES / "two-cores-arm-llama.json.xz").read_bytes())))
    (shown,) = list_stored_runs(MACHINE)
    assert not shown.is_local and shown.effects == () and shown.clean == len(run.cells)
    assert "another machine" in " ".join(invoke("runs").out.split())


# a real engine


def test_a_real_run_is_listed_shown_and_discarded(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = probe()
    # Without a bandwidth there is no estimate that a run could correct.
    known = replace_fields(here, memory=replace_fields(here.memory, bandwidth_bytes_s=SPEED))
    monkeypatch.setattr("bedplate.facts.hardware.probe", lambda: known)
    options = ("--seconds", "1", "--repeats", "2", "--budget", "60", "--prompt-tokens", "64", "--output-tokens", "16")
    done = invoke("bench", "--engines", "llama.cpp", "--concurrency", "1", *options, "--no-quality", "--json")
    assert done.code == 0, done.err
    run = from_json(Run, done.out)
    (row,) = json.loads(invoke("runs", "list", "--json").out)["runs"]
    flagged = bool(find_exclusions(run.cells[0]))
    assert (row["id"], row["cells"], row["clean"]) == (run.id, 1, 0 if flagged else 1)
    assert row["engines"][0].startswith("llama.cpp@") and bool(row["effects"]) is not flagged
    assert len(store.read_evidence(run.environment.machine).results) == (0 if flagged else 1)
    plan = invoke("plan", "--concurrency", "1", "--json").out
    assert (run.id in plan) is not flagged
    assert invoke("runs", "show", run.id).code == 0
    assert invoke("runs", "discard", run.id, "--yes").code == 0
    assert run.id not in invoke("plan", "--concurrency", "1", "--json").out and store.read_runs() == ()
