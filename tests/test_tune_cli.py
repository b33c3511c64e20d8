"""`tune` on the command line: tunable settings, export and import, usage errors. No engine runs here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import invoke
from tests.decide.test_tuned import make_tuning

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.run.builtin import fetch_builtin
from bedplate.show.tune import render_tuned
from bedplate.values import from_json, replace_fields
from bedplate.values.run import Exclusion
from bedplate.values.tuning import RefusedSetting, SettingChange, Trial, TrialMeasurement, TuningRun


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def store_tuning(**changes: object) -> TuningRun:
    machine = store.compute_fingerprint(probe())
    tuned = replace_fields(make_tuning(ubatch="256"), machine=machine, trials=(Trial(),), **changes)
    store.add_tuning(tuned)
    return tuned


def test_list_describes_each_setting() -> None:
    found = invoke("tune", "--list", "--engine", "llama.cpp")
    assert found.code == 0 and "ubatch" in found.out and "prefill chunk size in tokens" in found.out
    knobs = json.loads(invoke("tune", "--list", "--engine", "vllm", "--json").out)
    assert {"batch-tokens", "threads"} <= {knob["name"] for knob in knobs}
    assert all(knob["source"] and knob["meaning"] for knob in knobs)


def test_export_omits_trials_and_import_restores_the_settings(tmp_path: Path) -> None:
    tuned = store_tuning()
    file = tmp_path / "tuned.json"
    assert invoke("tune", "--export", str(file)).code == 0
    written = from_json(TuningRun, file.read_bytes())
    assert written == replace_fields(tuned, trials=())
    assert invoke("tune", "--import", str(file)).code == 0
    assert store.read_tunings(tuned.machine)[0].source == "tuned.json"


def test_a_damaged_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text('{"schema": "tuning/1", "engine": 3}')
    found = invoke("tune", "--import", str(file))
    assert found.code == 2 and f"not a valid {TuningRun.__name__}" in found.err
    assert invoke("tune", "--import", str(tmp_path / "none.json")).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export", "x.json"), "no engine has been tuned on this machine"),
        (("--resume", "last"), "there is no unfinished tuning"),
        (("--budget", "soon"), "is not a duration"),
        (("--slo", "fast"), "is not a latency target"),
        (("--build", "mine"), "is not one of packages and native"),
        (("--engine", "nobody"), "no engine is called"),
    ],
)
def test_invalid_options_are_rejected_before_anything_runs(arguments: tuple[str, ...], message: str) -> None:
    found = invoke("tune", *arguments)
    assert found.code == 2 and message in found.err


def test_an_unknown_setting_is_a_usage_error(builtin_gguf: Path) -> None:
    fetch_builtin()
    found = invoke("tune", "--engine", "llama.cpp", "--knobs", "luck")
    assert found.code == 2 and "no tunable setting 'luck'" in found.err and "ubatch" in found.err


def test_a_finished_tuning_cannot_be_resumed() -> None:
    tuned = store_tuning()
    assert "is already finished" in invoke("tune", "--resume", tuned.id).err


def test_plan_uses_tuned_settings_unless_untuned() -> None:
    from tests.decide.test_tuned import MODEL, WORK

    from bedplate.decide import decide
    from bedplate.decide.planning import plan

    machine = probe()
    before = plan(decide(machine, MODEL, WORK, "llama.cpp"), MODEL, WORK)
    made = make_tuning(ubatch="256")
    sides = (
        replace_fields(made.sides[0], settings=before.settings, weights=before.weights),
        replace_fields(made.sides[1], settings=replace_fields(before.settings, turned=made.sides[1].settings.turned)),
    )
    store.add_tuning(replace_fields(made, machine=store.compute_fingerprint(machine), sides=sides))
    asked = ("plan", "--engine", "llama.cpp", "--concurrency", "4", "--output-tokens", "128", "--json")
    found = json.loads(invoke(*asked).out)
    assert "tuned.measured" in [reason["rule"] for reason in found["reasons"]]
    assert "--ubatch-size" in found["launch"]["argv"]
    plain = json.loads(invoke(*asked, "--untuned").out)
    assert "tuned.measured" not in [reason["rule"] for reason in plain["reasons"]]


def test_the_store_keeps_the_latest_tuning_and_all_refusals() -> None:
    first = store_tuning(finished=False)
    store.add_tuning(replace_fields(first, measurements=7))
    assert [one.measurements for one in store.read_tunings(first.machine)] == [7]
    assert store.read_tunings("elsewhere") == () and len(store.read_tunings(None)) == 1
    refused = RefusedSetting(
        at="2026-11-15T10:00:00Z", machine="m", engine="llama.cpp", engine_version="1", model="a",
        turn=SettingChange(knob="weights", value="Q4_0"), turned=(), kind="answers", why="30 of "
        "48", evidence=("after …",),
    )  # fmt: skip
    store.add_refused(refused)
    assert (
        store.read_refused_settings("m", "llama.cpp") == (refused,) and store.read_refused_settings("m", "vllm") == ()
    )


# the headline


def write_headline(tuned: TuningRun) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(render_tuned(tuned))
    return next(line.strip() for line in out.getvalue().splitlines() if line.strip())


def make_trial(*turned: SettingChange, own_defaults: bool = False) -> Trial:
    taken = TrialMeasurement(at="2026-11-15T10:00:00Z", seconds=1.0, score=1.0, output_tok_s=10.0)
    return Trial(turned=turned, own_defaults=own_defaults, taken=(taken,))


def test_a_tuning_that_measured_no_alternative_is_inconclusive() -> None:
    tuned = make_tuning(ubatch="256")
    change = tuned.steps[0].turn
    alone = replace_fields(tuned, sides=tuned.sides[:1], proofs=(), steps=())
    for trials in ((make_trial(),), (make_trial(), make_trial(change, own_defaults=True))):
        said = write_headline(replace_fields(alone, trials=trials))
        assert said.startswith("Inconclusive.") and "No alternative to the plan was measured" in said
    tried = replace_fields(alone, trials=(make_trial(), make_trial(change)))
    assert "significantly better" in write_headline(tried) and not tried.is_inconclusive
    assert not replace_fields(alone, trials=(make_trial(),), finished=False).is_inconclusive
    assert not replace_fields(alone, trials=()).is_inconclusive, "an exported tuning has no trials"


def test_a_tuning_whose_best_settings_were_not_compared_is_inconclusive() -> None:
    tuned = make_tuning(ubatch="256")
    said = write_headline(replace_fields(tuned, sides=(), proofs=(), trials=(make_trial(tuned.steps[0].turn),)))
    assert said.startswith("Inconclusive.") and "ubatch 256 looked better" in said


def test_a_tuning_that_plans_do_not_use_says_why() -> None:
    tuned = make_tuning(ubatch="256")
    assert "use it from now on" in write_headline(tuned)
    flagged = replace_fields(tuned, exclusions=(Exclusion(kind="short", text="only 3 requests succeeded"),))
    assert "`plan` and `serve` do not use it: only 3 requests succeeded." in write_headline(flagged)
