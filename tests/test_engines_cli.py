"""`bedplate engines`: the map, the page of one engine, and columns that are TBD until they are measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from syrupy.assertion import SnapshotAssertion
from tests.commands import invoke
from tests.runs import make_run

from bedplate import store
from bedplate.decide.case import DecisionCase
from bedplate.decide.engine_map import (
    CHEAT_SHEET,
    EngineRow,
    EngineSupport,
    RuleLine,
    build_row,
    find_common_results,
    list_rules,
    mark_cheat_sheet,
)
from bedplate.decide.intent import read_intent, resolve_hardware
from bedplate.decide.rules import CHALLENGES, DOUBTS, ORCHESTRATION, PICKS
from bedplate.engines import Features, load_engines
from bedplate.engines.names import ORCHESTRATORS
from bedplate.facts.hardware import probe
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.engine_listing import LockStatus
from bedplate.run.environments import EngineEnvironment
from bedplate.run.models import find_intended_model
from bedplate.show.columns import Column, SplitTable
from bedplate.show.engines import PROVERB, render_engine, render_map
from bedplate.values import Hardware, replace_fields
from bedplate.values.result import Result

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.yaml"))
EVERYWHERE: dict[str, dict[str, Any]] = {
    "cpu": {"cpu": "AMD EPYC 9654", "cores": 8, "ram_gb": 32, "os": "linux"},
    "mac": {"accelerator": "Apple M2 Ultra (76-core GPU)", "ram_gb": 192, "os": "macos"},
    "rtx": {"accelerator": "RTX 4090"},
    "datacenter": {"accelerator": "H100 SXM", "count": 8},
    "amd": {"accelerator": "MI300X"},
}


def read_machine(name: str) -> Hardware:
    return make_simulated_hardware(EVERYWHERE[name])


def make_result(engine: str, **fields: Any) -> Result:
    given: dict[str, Any] = {
        "at": "2026-11-15T10:00:00Z", "machine": "m", "engine": engine, "model": "SmolLM2-135M-Instruct",
        "quantization": "Q4_1", "concurrency": 1, "prompt_tokens": 512, "output_tokens": 128, "ttft_ms": 210.5,
        "output_tok_s": 61.25, "peak_memory_bytes": 700 << 20, "quality": 0.98,
    }  # fmt: skip
    return Result(**{**given, **fields})


# the cheat sheet


def test_the_cheat_sheet_names_every_engine_and_existing_rules() -> None:
    named = {engine for line in CHEAT_SHEET for engine in line.engines}
    assert named == {*load_engines(), *ORCHESTRATORS}
    there = {rule.id for rules in (PICKS, ORCHESTRATION) for rule in rules}
    assert {rule for line in CHEAT_SHEET for rule in line.rules} <= there


@pytest.mark.parametrize(
    ("name", "one", "many"),
    [
        ("cpu", "llama.cpp", "llama.cpp"),
        ("mac", "mlx", "llama.cpp"),
        ("rtx", "exllamav3", "vllm"),
        ("datacenter", "vllm", "vllm"),
        ("amd", "vllm", "vllm"),
    ],
)
def test_the_line_for_this_machine_is_marked(name: str, one: str, many: str) -> None:
    marked = {who: line.engines for line in mark_cheat_sheet(read_machine(name)) for who in line.here}
    assert one in marked["one user"] and many in marked["many users"]


# support of a machine


def test_every_engine_says_whether_it_runs_here() -> None:
    for name in EVERYWHERE:
        for engine in load_engines().values():
            said = build_row(engine, read_machine(name), None).here
            assert said.runs == (said.device is not None) == (said.why is None)


def test_refusals_and_doubts_are_distinguished() -> None:
    said = build_row(load_engines()["exllamav3"], read_machine("amd"), None).here
    assert not said.runs and said.why == "needs an NVIDIA GPU"
    few = build_row(load_engines()["vllm"], read_machine("cpu"), None).here
    assert few.doubt and few.doubt_for_many is None
    crowd = build_row(load_engines()["llama.cpp"], read_machine("rtx"), None).here
    assert crowd.doubt is None and crowd.doubt_for_many


def test_every_engine_is_described_with_a_source() -> None:
    for engine in load_engines().values():
        assert engine.features is not None, engine.id
        assert all(len(getattr(engine.features, name)) > 1 for name in Features.__struct_fields__), engine.id


# rules


def test_every_rule_about_one_engine_is_on_its_page() -> None:
    about = [(rule.engines[0], rule.id) for rule in DOUBTS]
    about += [(rule.engines[0], rule.id) for rule in CHALLENGES]
    for engine, rule in about:
        assert rule in {line.rule for line in list_rules(engine)}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_pick_names_only_engines_whose_page_has_the_rule(path: Path) -> None:
    try:
        intent = read_intent(path)
        case = DecisionCase(
            resolve_hardware(intent), find_intended_model(intent.model), intent.workload, intent.operations
        )
    except Exception as error:  # wrong questions have no picks
        assert type(error).__name__ == "UsageError"
        return
    for rule in PICKS:
        picked = rule.says(case)
        if picked is not None and rule.id != "operations.incumbent":
            assert set(picked.engines) <= set(rule.engines), rule.id


# measurements


def test_results_are_shown_for_the_most_common_workload() -> None:
    alone = make_result("llama.cpp", concurrency=16, at="2026-11-15T12:00:00Z")
    shared = [
        make_result("llama.cpp"),
        make_result("vllm"),
        make_result("llama.cpp", output_tok_s=1.0, at="2026-11-14T10:00:00Z"),
    ]
    found = find_common_results([alone, *shared])
    assert found == {"llama.cpp": shared[0], "vllm": shared[1]}
    assert find_common_results([]) == {}


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    return tmp_path


def test_columns_are_tbd_until_this_machine_has_measured_them(own_home: Path) -> None:
    before = invoke("engines")
    assert before.code == 0 and before.out.count("TBD") >= 4 * len(load_engines()) and PROVERB in before.out
    machine, run = store.compute_fingerprint(probe()), make_run(())
    store.add_run(replace_fields(run, environment=replace_fields(run.environment, machine=machine)))
    store.add_result(make_result("llama.cpp", machine=machine, run=run.id))
    store.add_result(make_result("vllm", machine="another machine", output_tok_s=99999.0, run=run.id))
    after = invoke("engines").out
    for figure in ("61.2", "700 MiB", "0.98", "SmolLM2-135M-Instruct Q4_1, 1 in flight, 512 + 128 tokens"):
        assert figure in after
    assert "99,999" not in after
    printed = json.loads(invoke("engines", "--json").out)
    measured = {one["engine"]: one["measured"] for one in printed["engines"]}
    assert measured["llama.cpp"]["output_tok_s"] == 61.25 and measured["vllm"] is None


# the command line


def test_json_has_the_whole_map(own_home: Path) -> None:
    printed = json.loads(invoke("engines", "--json", "--hardware", "2x RTX 3090").out)
    assert printed["schema"] == "engines/1" and [one["engine"] for one in printed["engines"]] == list(load_engines())
    assert any(line["here"] for line in printed["cheat_sheet"])
    mlx = next(one for one in printed["engines"] if one["engine"] == "mlx")
    assert mlx["installed"] == [] and set(mlx["features"]) == set(Features.__struct_fields__)
    locks = {one["engine"]: one["lock"] for one in printed["engines"]}
    assert locks["tgi"] is None
    assert locks["exllamav3"] == {"locked": False, "reason": "the build of torch depends on the GPU and its driver"}


@pytest.mark.parametrize("engine", sorted(load_engines()))
def test_one_engine_has_a_page(engine: str) -> None:
    page = invoke("engines", "show", engine, "--hardware", "RTX 4090")
    one = load_engines()[engine]
    assert page.code == 0 and one.name in page.out and "Rules that name this engine" in page.out and PROVERB in page.out
    printed = json.loads(invoke("engines", "show", engine, "--hardware", "RTX 4090", "--json").out)
    assert printed["schema"] == "engine/1" and printed["engine"] == engine
    assert printed["features"]["source"] == (one.features.source if one.features else None)


@pytest.mark.parametrize(
    ("said", "engine"),
    [("vLLM", "vllm"), ("TRT-LLM", "tensorrt-llm"), ("llama cpp", "llama.cpp"), ("ORT", "onnxruntime")],
)
def test_engines_show_accepts_every_spelling(said: str, engine: str) -> None:
    printed = json.loads(invoke("engines", "show", said, "--hardware", "RTX 4090", "--json").out)
    assert printed["engine"] == engine


@pytest.mark.parametrize(
    "words",
    [
        "engines build {}", "engines forget {}", "engines use {}", "engines remove {}", "migrate {}", "shadow {}",
        "serve -f none.yaml --engine {}", "tune -f none.yaml --engine {}", "bundle -f none.yaml --engine {}",
        "simulate -f none.yaml --engine {}", "bench -f none.yaml --engines llama.cpp,{}",
    ],
)  # fmt: skip
def test_every_verb_accepts_every_spelling_of_an_engine(words: str, own_home: Path) -> None:
    wrong = invoke(*words.format("vLLLM").split())
    assert wrong.code == 2 and "no engine is called 'vLLLM'" in wrong.err and "did you mean vllm" in wrong.err
    # Other errors are only found after the engine is known.
    assert "no engine" not in invoke(*words.format("vLLM").split()).err


def test_an_unknown_engine_is_a_usage_error() -> None:
    assert invoke("engines", "show", "frobnicate").code == 2
    assert invoke("engines", "--hardware", "RTX 99999").code == 2


# pages, from fixed values


FEATURES = Features(
    batching="continuous, prompts in chunks, scheduling overlapped with the GPU",
    kv_cache="paged, prefix tree, tiers in host memory",
    quantization="FP8 while loading; FP8, NVFP4, MXFP4, AWQ, GPTQ as stored",
    hardware="NVIDIA from Ampere on, AMD Instinct from MI300 on",
    structured_output="JSON schema, regular expressions, grammars",
    multi_node="yes: tensor, pipeline, expert and data parallel",
    server="its own",
    maintained="active",
    source="its source, version 1.2.3",
)


RULES = (
    RuleLine(
        rule="hardware.some",
        kind="may pick",
        text="A machine of this kind runs it.",
        source="docs/rules.md#hardware.some",
    ),
    RuleLine(
        rule="doubt.alpha", kind="doubts", text="For many it was not built, " * 4, source="docs/rules.md#doubt.alpha"
    ),
    RuleLine(
        rule="challenge.alpha",
        kind="would measure",
        text="It is worth measuring.",
        source="docs/rules.md#challenge.alpha",
    ),
)


def made(engine: str, **fields: Any) -> EngineRow:
    given: dict[str, Any] = {
        "engine": engine, "name": engine.title(), "version": "1.2.3", "strength": "many users over an API", "effort": 3,
        "formats": ("safetensors",), "converts": ("gguf",), "vendors": ("nvidia",), "cpu": False, "systems": ("linux",),
        "tasks": ("generate",), "ways": ("tensor",), "features": FEATURES, "packages": ("one==1.2.3",),
        "download_bytes": 34_000_000, "disk_bytes": 127_000_000, "here": EngineSupport(runs=False, why="needs "
        "an NVIDIA GPU"),
        "measured": None, "rules": RULES,
    }  # fmt: skip
    return EngineRow(**{**given, **fields})


ROWS = (
    made("alpha", here=EngineSupport(runs=True, device="cpu"), measured=make_result("alpha")),
    made("tensor-beta", features=None, packages=(), download_bytes=None, disk_bytes=None),
    made("gamma", here=EngineSupport(runs=True, device="cuda", doubt="not built for one", doubt_for_many=None)),
)
THERE = [
    EngineEnvironment(
        engine="alpha", version="1.2.3", path="engines/alpha/1.2.3", packages=(), python="3.11", made_at="2026-11-15",
        disk_bytes=106_000_000,
    ),
    EngineEnvironment(
        engine="gamma", version="1.0", path="engines/gamma/1.0", packages=(), python="3.11", made_at="2026-11-15",
        disk_bytes=1_000_000,
    ),
]  # fmt: skip

LOCKS = {
    "alpha": LockStatus(locked=True),
    "tensor-beta": None,
    "gamma": LockStatus(locked=False, reason="there is no lock for Python 3.15"),
}


def render_text(shown: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_use_registers_an_installed_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 6123 (79c1160b)'\n")
    program.chmod(0o755)
    said = invoke("engines", "use", "llama.cpp", "--program", str(program))
    assert said.code == 0 and f"now runs {program}: version 6123-79c1160b" in said.out
    assert "other versions may reject" in said.err
    page = invoke("engines", "show", "llama.cpp").out
    assert "6123-79c1160b" in page and str(program)[-20:] in page.replace("\n", "")
    assert f"no longer uses {program}" in invoke("engines", "forget", "llama.cpp").out
    for wrong in ([], ["--program", str(program), "--python", str(program)]):
        assert invoke("engines", "use", "llama.cpp", *wrong).code == 2


def test_engines_without_a_native_build_are_rejected() -> None:
    assert invoke("engines", "build", "vllm").code == 2
    assert invoke("serve", "--build", "sideways").code == 2


@pytest.mark.parametrize("width", [80, 120, 250])
def test_map_page(width: int, snapshot: SnapshotAssertion) -> None:
    page = render_text(
        render_map(read_machine("cpu"), mark_cheat_sheet(read_machine("cpu")), ROWS, THERE, LOCKS), width
    )
    assert max(map(len, page.splitlines())) <= width
    assert page == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_engine_page(width: int, snapshot: SnapshotAssertion) -> None:
    page = render_text(render_engine(read_machine("cpu"), ROWS[0], THERE, LOCKS["alpha"]), width)
    assert max(map(len, page.splitlines())) <= width
    assert page == snapshot


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_columns_that_do_not_fit_continue_below(width: int) -> None:
    columns = SplitTable(
        Column.from_cells("id", ["a", "b"]),
        tuple(Column.from_cells(f"column {n}", ["word " * n, "x"]) for n in range(1, 8)),
    )
    parts = list(columns.split(width))
    assert [column.name for part in parts for column in part] == [f"column {n}" for n in range(1, 8)]
    if width >= 200:
        assert len(parts) == 1
    page = render_text(columns, width)
    assert page.count(" a ") >= len(parts) and max(map(len, page.splitlines())) <= width
