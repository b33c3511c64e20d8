"""Tuning the real llama.cpp: a setting that is faster but wrong is refused, and no process is left running."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import psutil
import pytest
from tests.conftest import have_ended, wait_for

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.progress import SilentProgress
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment
from bedplate.run.ready import prepare_model
from bedplate.tuning import answers
from bedplate.tuning import rounds as proving
from bedplate.tuning import state as states
from bedplate.tuning import tune as tuning
from bedplate.tuning.search import TuningListener
from bedplate.tuning.state import TuningState
from bedplate.tuning.tune import Tuner, TuningStopped, choose_plan, list_settings, tune
from bedplate.values.run import Load, Repeat
from bedplate.values.tuning import (
    RefusedSetting,
    SettingChange,
    SettingChoice,
    TrialMeasurement,
    TunableSetting,
    TuningRun,
)

pytestmark = [pytest.mark.measures, pytest.mark.timeout(1800), pytest.mark.usefixtures("one_core")]
LOAD = Load(concurrency=2, prompt_tokens=32, output_tokens=8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ASKED", 6)
    for name, value in (("LEAST_TURNS", 1), ("MOST_TURNS", 1), ("LEAST_WORK_S", 0.1)):
        monkeypatch.setattr(proving, name, value)


@pytest.fixture
def own_store(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def write_model_with_few_layers(source: Path, result: Path) -> None:
    """Write the model with a tenth of its layers: it loads, generates text several times as fast, and is wrong."""
    reader = gguf.GGUFReader(source)
    layers = int(reader.fields["llama.block_count"].contents())
    writer = gguf.GGUFWriter(result, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = layers // 10 if field.name == "llama.block_count" else field.contents()
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < layers // 10:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wrong_setting(path: Path) -> TunableSetting:
    return TunableSetting(
        name="depth", meaning="a model without most of its layers", now="whole", own="whole", alone=True,
        choices=(SettingChoice(value="whole"), SettingChoice(value="few", options=("--model", str(path)))),
        risk=("answers",), prior=0.9, source="made for this test",
    )  # fmt: skip


def list_children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_setting_with_wrong_answers_is_refused_and_not_tried_again(
    builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path, own_store: Path
) -> None:
    path = tmp_path / "few.gguf"
    write_model_with_few_layers(builtin_gguf, path)
    asked = {
        "engine": "llama.cpp",
        "load": LOAD,
        "knobs": ("depth",),
        "more_knobs": (make_wrong_setting(path),),
        "path": own_store,
    }
    found = tune(budget_s=1800, **asked)  # type: ignore[arg-type]
    trials = {trial.turned: trial.best for trial in found.trials if not trial.own_defaults}
    planned, trapped = trials[()], trials[(SettingChange(knob="depth", value="few"),)]
    assert planned is not None and trapped is not None
    assert (trapped.output_tok_s or 0) > 1.2 * (planned.output_tok_s or 0)  # it is faster, but wrong
    (refused,) = found.refused
    assert refused.kind == "answers" and refused.turn.value == "few" and refused.evidence
    assert "agree with the reference" in refused.why
    assert all(not one.turned for one in found.front)
    assert not found.is_proven and found.find_side("tuned") is None and found.finished
    assert store.read_refused_settings(found.machine, "llama.cpp", own_store) == (refused,)
    hardware, facts = probe(), read_builtin_facts()
    chosen = choose_plan("llama.cpp", hardware, facts, LOAD, None)
    again = Tuner(
        TuningState(
            hardware, facts, chosen, (make_wrong_setting(path),), found, SilentProgress(), TuningListener(), own_store
        )
    )
    assert again._find_refused() == {("depth", "few")}  # tests/tuning/test_search.py checks that a search skips these
    assert not list_children()


class InterruptAfter(TuningListener):
    """Simulates Ctrl-C after `count` measurements."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[TrialMeasurement] = []

    def report_measurement(self, turned: tuple[SettingChange, ...], taken: TrialMeasurement, tuned: TuningRun) -> None:
        self.seen.append(taken)
        if len(self.seen) == self.count:
            raise KeyboardInterrupt


def test_resume_reuses_measurements_from_before_ctrl_c(
    builtin_gguf: Path, llama_environment: EngineEnvironment, own_store: Path
) -> None:
    asked = {"engine": "llama.cpp", "load": LOAD, "knobs": ("threads",), "path": own_store}
    with pytest.raises(TuningStopped) as stopped:
        tune(budget_s=1800, teller=InterruptAfter(3), **asked)  # type: ignore[arg-type]
    kept = stopped.value.tuned
    assert kept.measurements == 3 and not kept.finished and kept.id in str(stopped.value)
    wait_for(lambda: have_ended(list_children()), "the engines to end")
    counting = InterruptAfter(-1)
    whole = tune(resume=kept.id, budget_s=1800, teller=counting, path=own_store)
    assert whole.finished and whole.id == kept.id
    assert whole.measurements == 3 + len(counting.seen)
    assert whole.trials[0].taken[0] == kept.trials[0].taken[0]
    assert whole.find_side("own defaults") is not None and whole.find_side("plan") is not None


class RefusalRecorder(TuningListener):
    def __init__(self) -> None:
        self.found: list[RefusedSetting] = []

    def report_refusal(self, refused: RefusedSetting) -> None:
        self.found.append(refused)


def test_setting_that_does_not_start_is_refused_with_the_engine_error(
    builtin_gguf: Path, llama_environment: EngineEnvironment, own_store: Path
) -> None:
    broken = TunableSetting(
        name="cache", meaning="an unknown cache type", now="f16", own="f16", prior=0.9, source="made for this test",
        choices=(SettingChoice(value="f16"), SettingChoice(value="q9", options=("--cache-type-k", "q9_9"))),
    )  # fmt: skip
    teller = RefusalRecorder()
    found = tune(
        engine="llama.cpp", load=LOAD, knobs=("cache",), more_knobs=(broken,), budget_s=1800, teller=teller,
        path=own_store,
    )  # fmt: skip
    (refused,) = teller.found
    assert refused.kind == "start" and "q9_9" in refused.why and found.finished
    assert store.read_refused_settings(store.compute_fingerprint(probe()), "llama.cpp", own_store) == (refused,)


def test_native_build_is_compared_with_the_package(
    builtin_gguf: Path, llama_environment: EngineEnvironment, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is a stand-in, the same program with another version: a real one takes long."""
    built = msgspec.structs.replace(llama_environment, version="as built", built=True)
    hardware = probe()
    chosen = choose_plan("llama.cpp", hardware, read_builtin_facts(), LOAD, None)
    assert "build" not in [knob.name for knob in list_settings(chosen)]
    for module in (tuning, states):
        monkeypatch.setattr(module, "find_usable_build", lambda *_: built)
    assert list_settings(chosen)[0].name == "build"
    found = tune(engine="llama.cpp", load=LOAD, knobs=("build",), budget_s=1800, path=own_store)
    native = (SettingChange(knob="build", value="native"),)
    assert native in [trial.turned for trial in found.trials] and not found.refused
    state = TuningState(
        hardware,
        read_builtin_facts(),
        chosen,
        list_settings(chosen),
        found,
        SilentProgress(),
        TuningListener(),
        own_store,
    )
    state.ready = prepare_model(chosen, SilentProgress(), to_measure=True)
    point = (("build", "native"),)
    assert Tuner(state).engines.start_at(point).environment == built
    assert state.make_plan_at(point).engine_version == "as built"
    subject = state.make_cell(
        point, LOAD, (Repeat(at="2026-11-16T10:00:00Z", seconds=1.0, samples=()),), "tuned"
    ).subject
    assert (subject.build, subject.engine_version) == ("native", "as built")
    assert not list_children()
