"""Knobs: every value of every engine lands in its command line, which stays one that the engine takes."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan

from bedplate.engines import get_engine
from bedplate.engines.knobs import (
    apply_values,
    is_native,
    make_build_knob,
    make_draft_knob,
    merge_options,
    with_engine_defaults,
)
from bedplate.errors import UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import apply_label
from bedplate.values import Model, Parallelism, Plan, Workload, from_json, replace_fields, to_json
from bedplate.values.tuning import SettingChoice, TunableSetting

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
WORDS = st.lists(st.sampled_from(["--a", "--b", "--no-c", "--c", "1", "x y", "-m"]), max_size=8)


def make_plan(engine_id: str, on: str) -> Plan:
    one = get_engine(engine_id)
    which = model(LLAMA, folder=True)
    if engine_id == "llama.cpp":
        which = replace_fields(apply_label(which, "Q4_1"), format="gguf", files=("/models/it is here/a.gguf",))
    return plan(one, machine(on, 1), which)


CASES = [
    ("llama.cpp", "cpu"), ("llama.cpp", "RTX 4090"), ("vllm", "cpu"), ("vllm", "H100 SXM"), ("pytorch", "cpu"),
    ("pytorch", "RTX 4090"), ("sglang", "cpu"), ("sglang", "H100 SXM"), ("sglang", "MI300X"), ("mlx", "cpu"),
    ("mistral.rs", "cpu"), ("onnxruntime", "cpu"), ("onnxruntime", "RTX 4090"), ("exllamav3", "RTX 4090"),
    ("exllamav2", "RTX 4090"),
]  # fmt: skip
SHIPPED = {
    "mistral.rs": "mistralrs_server", "onnxruntime": "onnxruntime_server",
    "exllamav3": "exllamav3_server", "exllamav2": "exllamav2_server",
}  # fmt: skip


def check_command(engine_id: str, argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the options against the engine's published ones, or against the server that bedplate ships."""
    start = next(number for number, word in enumerate(argv) if word.startswith("--"))
    if engine_id in SHIPPED:
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        monkeypatch.setitem(sys.modules, "openai_server", core)
        program = importlib.import_module(f"bedplate.engines.shipped.{SHIPPED[engine_id]}")
        types = (one for one in vars(program).values() if isinstance(one, type))
        classes = (one for one in types if issubclass(one, core.EngineBackend))
        backend = next(one for one in classes if one.__module__ == program.__name__)
        core.make_parser(backend).parse_args(argv[start:])
        return
    file = {"llama.cpp": "llama_cpp"}.get(engine_id, engine_id)
    parse_options(file, [*(["MODEL"] if read_options(file)["positional"] else []), *argv[start:]])


@pytest.mark.parametrize(("engine_id", "on"), CASES)
def test_every_value_of_every_knob_gives_a_valid_command(
    engine_id: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, chosen = get_engine(engine_id), make_plan(engine_id, on)
    knobs = one.list_settings(machine(on, 1), chosen)
    assert knobs and len({knob.name for knob in knobs}) == len(knobs)
    before = one.launch(chosen, 8000)
    for knob in knobs:
        values = [choice.value for choice in knob.choices]
        assert knob.now in values and len(set(values)) == len(values) and 0 < knob.prior < 1
        assert set(knob.first) < set(values) and knob.now not in knob.first and (knob.ordered or not knob.first)
        for choice in knob.choices:
            turned = apply_values(chosen, knobs, {knob.name: choice.value})
            after = one.launch(turned, 8000)
            if choice.value == knob.now:
                assert turned == chosen
                continue
            assert after != before, f"{knob.name} {choice.value} changes nothing"
            check_command(engine_id, after.argv, monkeypatch)
            for name, value in choice.variables:
                assert after.env[name] == value
            assert from_json(Plan, to_json(turned)) == turned


@pytest.mark.parametrize(("engine_id", "on"), CASES)
def test_engine_defaults_name_only_model_and_address(engine_id: str, on: str) -> None:
    one, chosen = get_engine(engine_id), make_plan(engine_id, on)
    bare = one.launch(with_engine_defaults(chosen), 8000)
    options = {word for word in bare.argv if word.startswith("--")}
    needed = {"sglang": 5} if on == "cpu" else {}  # what it does not run without there
    assert {"--host", "--port"} <= options and len(options) - needed.get(engine_id, 0) <= 7
    assert not options & {"--threads", "--max-num-seqs", "--continuous-batching", "--enforce-eager", "--cache-ram"}
    assert not options & {"--decode-concurrency", "--max-running-requests", "--chunk-tokens", "--spin"}


@pytest.mark.parametrize("engine_id", ["llama.cpp", "vllm", "mlx"])
def test_draft_model_is_an_option_of_the_command(engine_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, chosen = get_engine(engine_id), make_plan(engine_id, "cpu")
    knob = make_draft_knob(one.get_draft_options("/models/small one.gguf"), "/models/small one.gguf")
    argv = one.launch(apply_values(chosen, (knob,), {"draft": "small one.gguf"}), 8000).argv
    assert any("/models/small one.gguf" in word for word in argv)
    check_command(engine_id, argv, monkeypatch)
    assert apply_values(chosen, (knob,), {"draft": "off"}) == chosen


def test_16_bit_weights_may_be_quantized() -> None:
    one, mac = get_engine("mlx"), make_simulated_hardware({"accelerator": "M4 Max", "ram_gb": 64, "os": "macos"})
    chosen = plan(one, mac, model(LLAMA, folder=True))
    assert chosen.weights.made == "as it is"
    turned = apply_values(chosen, one.list_settings(mac, chosen), {"weights": "8-BIT"})
    assert (turned.weights.label, turned.weights.format, turned.weights.made) == ("8-BIT", "mlx", "converted")
    steps = [step for step in one.launch(turned, 0).prepare if step.kind == "convert"]
    assert [step.where for step in steps] == [one.launch(turned, 0).argv[2]]


def test_first_tries_the_concurrency_of_one_cuda_graph() -> None:
    one, chosen = get_engine("exllamav3"), make_plan("exllamav3", "RTX 4090")
    crowded = next(knob for knob in one.list_settings(machine("RTX 4090", 1), chosen) if knob.name == "slots")
    assert (chosen.settings.slots, crowded.first) == (16, ("8",))
    few = replace_fields(chosen, settings=replace_fields(chosen.settings, slots=4))
    assert next(knob for knob in one.list_settings(machine("RTX 4090", 1), few) if knob.name == "slots").first == ()
    assert one.launch(chosen, 8000).env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in one.launch(with_engine_defaults(chosen), 8000).env


def test_batch_size_of_concurrent_requests_holds_one_prompt() -> None:
    one, work = get_engine("llama.cpp"), Workload(concurrency=4, prompt_tokens=512)

    def batch(on: str, model_: Model, work: Workload) -> str | None:
        argv = one.launch(plan(one, machine(on, 1), model_, workload=work), 8000).argv
        return argv[argv.index("--batch-size") + 1] if "--batch-size" in argv else None

    gguf = make_plan("llama.cpp", "cpu").model
    assert batch("cpu", gguf, work) == "516" == batch("RTX 4090", gguf, work)
    assert batch("cpu", gguf, replace_fields(work, concurrency=1)) is None, "nobody waits behind another"
    assert batch("cpu", gguf, replace_fields(work, prompt_tokens=4000)) is None, "longer than a step anyway"
    short = replace_fields(work, prompt_tokens=200)
    assert (batch("cpu", gguf, short), batch("RTX 4090", gguf, short)) == ("204", None), "a card wants more at once"
    assert batch("cpu", replace_fields(gguf, vision_parameters=1000), work) is None, "pictures are read whole"
    assert batch("cpu", replace_fields(gguf, task="embed"), work) == "8192", "an input is computed in one batch"


def test_native_build_may_replace_the_package() -> None:
    chosen = make_plan("llama.cpp", "cpu")
    built = apply_values(chosen, (make_build_knob(),), {"build": "native"})
    assert is_native(built.settings) and not is_native(chosen.settings)
    threads = TunableSetting(
        name="threads", meaning="", now="2", own="2", choices=(SettingChoice(value="1", options=("--threads", "1")),),
        prior=0.5, source="",
    )  # fmt: skip
    assert is_native(apply_values(built, (threads,), {"threads": "1"}).settings), "what was turned before stays"
    assert get_engine("llama.cpp").launch(built, 8000).argv == get_engine("llama.cpp").launch(chosen, 8000).argv
    assert apply_values(chosen, (make_build_knob(),), {"build": "packages"}) == chosen


def test_offers_other_layouts_of_several_cards() -> None:
    one, on = get_engine("vllm"), machine("H100 SXM", 4)
    chosen = plan(one, on, model(LLAMA, folder=True), layout=Parallelism(tensor=4))
    knob = next(knob for knob in one.list_settings(on, chosen) if knob.name == "layout")
    assert [choice.value for choice in knob.choices] == ["4 x 1", "1 x 4", "2 x 2"]
    argv = one.launch(apply_values(chosen, (knob,), {"layout": "2 x 2"}), 8000).argv
    for option in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        assert argv.count(option) == 1 and argv[argv.index(option) + 1] == "2"


def test_offers_more_or_fewer_layers_on_the_host() -> None:
    one, on = get_engine("llama.cpp"), machine("RTX 4090", 1)
    whole = make_plan("llama.cpp", "RTX 4090")
    partly = replace_fields(whole, settings=replace_fields(whole.settings, gpu_layers=20))
    assert "gpu-layers" not in [knob.name for knob in one.list_settings(on, whole)]
    knob = next(knob for knob in one.list_settings(on, partly) if knob.name == "gpu-layers")
    assert [choice.value for choice in knob.choices] == ["16", "18", "19", "20", "21", "22", "24"]
    argv = one.launch(apply_values(partly, (knob,), {"gpu-layers": "24"}), 8000).argv
    assert argv[argv.index("--n-gpu-layers") + 1] == "24"


def test_shipped_launcher_accepts_tuned_options() -> None:
    parser: argparse.ArgumentParser = importlib.import_module("bedplate.engines.shipped.llama_server").make_parser()
    one, chosen = get_engine("llama.cpp"), make_plan("llama.cpp", "cpu")
    knobs = one.list_settings(machine("cpu"), chosen)
    last = {knob.name: knob.choices[-1].value for knob in knobs}
    options = parser.parse_args(one.launch(apply_values(chosen, knobs, last), 8000).argv[1:])
    assert options.ubatch_size == 2048 and options.cache_type_k == "q8_0"
    bare = parser.parse_args(one.launch(with_engine_defaults(chosen), 8000).argv[1:])
    assert (bare.parallel, bare.kv_unified, bare.threads) == (4, True, -1)


def test_first_batch_size_holds_one_prompt() -> None:
    """And a token of each other request: one token less, and every prompt but the first needs a second step."""
    one, found = get_engine("llama.cpp"), make_plan("llama.cpp", "cpu")
    asked = found.workload.prompt_tokens + found.settings.slots
    assert found.settings.batch_tokens == asked
    (batch,) = (knob for knob in one.list_settings(machine("cpu"), found) if knob.name == "batch")
    assert (batch.now, batch.first) == (str(asked), ())
    chosen = replace_fields(found, settings=replace_fields(found.settings, batch_tokens=None))
    (batch,) = (knob for knob in one.list_settings(machine("cpu"), chosen) if knob.name == "batch")
    assert batch.first == (str(asked),) and str(asked) in [choice.value for choice in batch.choices]
    long = replace_fields(chosen, workload=replace_fields(chosen.workload, prompt_tokens=4000))
    (batch,) = (knob for knob in one.list_settings(machine("cpu"), long) if knob.name == "batch")
    assert batch.first == ()


def test_offers_no_setting_that_is_ignored_on_a_cpu() -> None:
    names = {knob.name for knob in get_engine("vllm").list_settings(machine("cpu"), make_plan("vllm", "cpu"))}
    assert "threads" in names and "async-scheduling" not in names
    knobs = {
        knob.name: knob for knob in get_engine("llama.cpp").list_settings(machine("cpu"), make_plan("llama.cpp", "cpu"))
    }
    assert "poll" not in knobs and [one.value for one in knobs["flash-attn"].choices] == ["auto", "off"]


def test_gguf_weights_are_requantized_from_the_file() -> None:
    one, chosen = get_engine("llama.cpp"), make_plan("llama.cpp", "cpu")
    turned = apply_values(chosen, one.list_settings(machine("cpu"), chosen), {"weights": "Q8_0"})
    steps = [step for step in one.launch(turned, 0).prepare if step.kind == "convert"]
    assert [step.argv[:3] for step in steps] == [("llama-quantize", "--allow-requantize", "/models/it is here/a.gguf")]
    assert steps[0].where in one.launch(turned, 0).argv and turned.weights.made == "converted"


def test_rejects_an_unknown_value() -> None:
    knob = TunableSetting(
        name="a", meaning="", choices=(SettingChoice(value="1"),), now="1", own="1", prior=0.5, source=""
    )
    with pytest.raises(UsageError, match="no value '2'"):
        apply_values(make_plan("vllm", "cpu"), (knob,), {"a": "2"})


@given(WORDS, WORDS)
def test_merged_command_has_each_new_option_once(argv: list[str], options: list[str]) -> None:
    said = [word for word in options if word.startswith("--")]
    found = merge_options(argv, options)
    for name in said:
        assert found.count(name) == 1
    assert set(found) <= {*argv, *options}
    assert merge_options(found, options) == found
