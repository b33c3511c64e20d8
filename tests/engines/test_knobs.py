"""Knobs: every value of every engine lands in its command line, which stays one that the engine takes."""

from __future__ import annotations

import argparse
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.argv import parsed, published
from tests.engines.plans import machine, model, plan

from bedplate.engines import engine
from bedplate.engines.knobs import build_knob, draft_knob, is_native, merged, turned_plan, with_own_defaults
from bedplate.errors import BadQuestion
from bedplate.facts.known_models import with_label
from bedplate.values import Parallelism, Plan, from_json, replaced, to_json
from bedplate.values.tuning import Choice, Knob

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
WORDS = st.lists(st.sampled_from(["--a", "--b", "--no-c", "--c", "1", "x y", "-m"]), max_size=8)


def planned(engine_id: str, on: str) -> Plan:
    one = engine(engine_id)
    which = model(LLAMA, folder=True)
    if engine_id == "llama.cpp":
        which = replaced(with_label(which, "Q4_1"), format="gguf", files=("/models/it is here/a.gguf",))
    return plan(one, machine(on, 1), which)


CASES = [("llama.cpp", "cpu"), ("llama.cpp", "RTX 4090"), ("vllm", "cpu"), ("vllm", "H100 SXM"), ("pytorch", "cpu"),
         ("pytorch", "RTX 4090")]  # fmt: skip


@pytest.mark.parametrize(("engine_id", "on"), CASES)
def test_every_value_of_every_knob_gives_a_command_that_the_engine_takes(engine_id: str, on: str) -> None:
    one, chosen = engine(engine_id), planned(engine_id, on)
    knobs = one.knobs(machine(on, 1), chosen)
    assert knobs and len({knob.name for knob in knobs}) == len(knobs)
    before = one.launch(chosen, 8000)
    file = {"llama.cpp": "llama_cpp"}.get(engine_id, engine_id)
    for knob in knobs:
        values = [choice.value for choice in knob.choices]
        assert knob.now in values and len(set(values)) == len(values) and 0 < knob.prior < 1
        assert set(knob.first) < set(values) and knob.now not in knob.first and (knob.ordered or not knob.first)
        for choice in knob.choices:
            turned = turned_plan(chosen, knobs, {knob.name: choice.value})
            after = one.launch(turned, 8000)
            if choice.value == knob.now:
                assert turned == chosen
                continue
            assert after != before, f"{knob.name} {choice.value} changes nothing"
            words = list(after.argv)
            start = next(number for number, word in enumerate(words) if word.startswith("--"))
            parsed(file, [*(["MODEL"] if published(file)["positional"] else []), *words[start:]])
            for name, value in choice.variables:
                assert after.env[name] == value
            assert from_json(Plan, to_json(turned)) == turned


@pytest.mark.parametrize(("engine_id", "on"), CASES)
def test_own_defaults_name_the_model_the_address_and_little_else(engine_id: str, on: str) -> None:
    one, chosen = engine(engine_id), planned(engine_id, on)
    bare = one.launch(with_own_defaults(chosen), 8000)
    options = {word for word in bare.argv if word.startswith("--")}
    assert {"--host", "--port"} <= options and len(options) <= 7
    assert not options & {"--threads", "--max-num-seqs", "--continuous-batching", "--enforce-eager", "--cache-ram"}


@pytest.mark.parametrize(("engine_id", "file"), [("llama.cpp", "llama_cpp"), ("vllm", "vllm")])
def test_a_small_model_may_guess_ahead(engine_id: str, file: str) -> None:
    one, chosen = engine(engine_id), planned(engine_id, "cpu")
    knob = draft_knob(one.drafting("/models/small one.gguf"), "/models/small one.gguf")
    argv = one.launch(turned_plan(chosen, (knob,), {"draft": "small one.gguf"}), 8000).argv
    assert any("/models/small one.gguf" in word for word in argv)
    start = next(number for number, word in enumerate(argv) if word.startswith("--"))
    parsed(file, [*(["MODEL"] if published(file)["positional"] else []), *argv[start:]])
    assert turned_plan(chosen, (knob,), {"draft": "off"}) == chosen


def test_the_build_for_this_machine_may_take_the_place_of_the_ready_made() -> None:
    chosen = planned("llama.cpp", "cpu")
    built = turned_plan(chosen, (build_knob(),), {"build": "native"})
    assert is_native(built.settings) and not is_native(chosen.settings)
    threads = Knob(
        name="threads", meaning="", now="2", own="2", choices=(Choice(value="1", options=("--threads", "1")),),
        prior=0.5, source="",
    )  # fmt: skip
    assert is_native(turned_plan(built, (threads,), {"threads": "1"}).settings), "what was turned before stays"
    assert engine("llama.cpp").launch(built, 8000).argv == engine("llama.cpp").launch(chosen, 8000).argv
    assert turned_plan(chosen, (build_knob(),), {"build": "packages"}) == chosen


def test_several_cards_may_be_divided_otherwise() -> None:
    one, on = engine("vllm"), machine("H100 SXM", 4)
    chosen = plan(one, on, model(LLAMA, folder=True), layout=Parallelism(tensor=4))
    knob = next(knob for knob in one.knobs(on, chosen) if knob.name == "layout")
    assert [choice.value for choice in knob.choices] == ["4 x 1", "1 x 4", "2 x 2"]
    argv = one.launch(turned_plan(chosen, (knob,), {"layout": "2 x 2"}), 8000).argv
    for option in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        assert argv.count(option) == 1 and argv[argv.index(option) + 1] == "2"


def test_what_stays_on_the_host_may_be_more_or_less() -> None:
    one, on = engine("llama.cpp"), machine("RTX 4090", 1)
    whole = planned("llama.cpp", "RTX 4090")
    partly = replaced(whole, settings=replaced(whole.settings, gpu_layers=20))
    assert "gpu-layers" not in [knob.name for knob in one.knobs(on, whole)]
    knob = next(knob for knob in one.knobs(on, partly) if knob.name == "gpu-layers")
    assert [choice.value for choice in knob.choices] == ["16", "18", "19", "20", "21", "22", "24"]
    argv = one.launch(turned_plan(partly, (knob,), {"gpu-layers": "24"}), 8000).argv
    assert argv[argv.index("--n-gpu-layers") + 1] == "24"


def test_the_shipped_launcher_takes_what_is_turned() -> None:
    parser: argparse.ArgumentParser = importlib.import_module("bedplate.engines.shipped.llama_server").parser()
    one, chosen = engine("llama.cpp"), planned("llama.cpp", "cpu")
    knobs = one.knobs(machine("cpu"), chosen)
    last = {knob.name: knob.choices[-1].value for knob in knobs}
    options = parser.parse_args(one.launch(turned_plan(chosen, knobs, last), 8000).argv[1:])
    assert options.ubatch_size == 2048 and options.cache_type_k == "q8_0"
    bare = parser.parse_args(one.launch(with_own_defaults(chosen), 8000).argv[1:])
    assert (bare.parallel, bare.kv_unified, bare.threads) == (4, True, -1)


def test_a_step_that_holds_one_prompt_is_where_batches_begin() -> None:
    """And a token of each other request: one token less, and every prompt but the first needs a second step."""
    one, chosen = engine("llama.cpp"), planned("llama.cpp", "cpu")
    asked = chosen.workload.prompt_tokens + chosen.settings.slots
    (batch,) = (knob for knob in one.knobs(machine("cpu"), chosen) if knob.name == "batch")
    assert batch.first == (str(asked),) and str(asked) in [choice.value for choice in batch.choices]
    long = replaced(chosen, workload=replaced(chosen.workload, prompt_tokens=4000))
    (batch,) = (knob for knob in one.knobs(machine("cpu"), long) if knob.name == "batch")
    assert batch.first == ()


def test_what_an_engine_does_not_heed_on_a_processor_is_no_knob_there() -> None:
    names = {knob.name for knob in engine("vllm").knobs(machine("cpu"), planned("vllm", "cpu"))}
    assert "threads" in names and "async-scheduling" not in names
    knobs = {knob.name: knob for knob in engine("llama.cpp").knobs(machine("cpu"), planned("llama.cpp", "cpu"))}
    assert "poll" not in knobs and [one.value for one in knobs["flash-attn"].choices] == ["auto", "off"]


def test_weights_of_a_gguf_are_made_of_itself() -> None:
    one, chosen = engine("llama.cpp"), planned("llama.cpp", "cpu")
    turned = turned_plan(chosen, one.knobs(machine("cpu"), chosen), {"weights": "Q8_0"})
    steps = [step for step in one.launch(turned, 0).prepare if step.kind == "convert"]
    assert [step.argv[:3] for step in steps] == [("llama-quantize", "--allow-requantize", "/models/it is here/a.gguf")]
    assert steps[0].where in one.launch(turned, 0).argv and turned.weights.made == "converted"


def test_a_value_that_there_is_not_is_said() -> None:
    knob = Knob(name="a", meaning="", choices=(Choice(value="1"),), now="1", own="1", prior=0.5, source="")
    with pytest.raises(BadQuestion, match="no value '2'"):
        turned_plan(planned("vllm", "cpu"), (knob,), {"a": "2"})


@given(WORDS, WORDS)
def test_merged_words_hold_each_new_option_once_and_with_its_value(argv: list[str], options: list[str]) -> None:
    said = [word for word in options if word.startswith("--")]
    found = merged(argv, options)
    for name in said:
        assert found.count(name) == 1
    assert set(found) <= {*argv, *options}
    assert merged(found, options) == found
