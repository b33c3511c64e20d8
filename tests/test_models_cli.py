"""`bedplate models` through the command line: filters, exit codes, JSON, and pages that fit the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion
from tests.commands import invoke, run

from bedplate.decide.catalogue import Catalogue, CatalogueEntry
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.show.models import format_context, format_parameters, render_models
from bedplate.values import Figure, Hardware, Offload, Workload, from_json, replace_fields


def list_models(*options: str) -> dict[str, Any]:
    """The JSON of a few models on one card."""
    answer = invoke("models", "--hardware", "RTX 4090", "--search", "qwen3", "--json", *options)
    found: dict[str, Any] = json.loads(answer.out)
    assert answer.code == (0 if found["fitting"] else 1)
    return found


def test_json_is_a_catalogue_of_fitting_models() -> None:
    printed = invoke("models", "--hardware", "RTX 4090", "--search", "qwen3", "--json").out
    found = from_json(Catalogue, printed)
    assert found.fitting == len(found.models) < found.known
    first = found.models[0]
    assert first.fits and first.pace == "comfortable" and first.tok_s is not None and first.tok_s.basis == "estimate"


def test_all_also_lists_unfit_models_with_reasons() -> None:
    found = list_models("--all")
    refused = [model for model in found["models"] if not model["fits"]]
    assert len(found["models"]) == found["known"] and refused and all(model["why"] for model in refused)


def test_options_filter_the_models() -> None:
    plain, long = list_models(), list_models("--context", "200000")
    assert 0 < long["fitting"] < plain["fitting"]
    quick = list_models("--min-tok-s", "150")
    assert 0 < quick["fitting"] < plain["fitting"]
    assert all(model["tok_s"]["value"] >= 150 for model in quick["models"])
    assert len(list_models("--limit", "3")["models"]) == 3
    many = list_models("--users", "30")
    assert {model["engine"] for model in many["models"]} != {model["engine"] for model in plain["models"]}
    assert all(model["task"] == "embed" for model in list_models("--task", "embed")["models"])


def test_an_intent_file_sets_hardware_and_workload(tmp_path: Path) -> None:
    file = tmp_path / "bedplate.yaml"
    file.write_text("hardware: {accelerator: H100 SXM, count: 2}\nworkload: {concurrency: 40, prompt_tokens: 2000}\n")
    answer = invoke("models", "-f", str(file), "--search", "llama-3.3-70b-instruct", "--json")
    (model,) = json.loads(answer.out)["models"]
    assert answer.code == 0 and model["engine"] == "vllm" and model["in_flight"] == 40


def test_an_intent_with_pools_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text("pools: [{name: a, accelerator: H100 SXM, count: 8}]\nservices: [{model: Qwen/Qwen3-8B}]\n")
    answer = invoke("models", "-f", str(path))
    assert answer.code == 2 and "one machine" in answer.err and "--hardware" in answer.err and not answer.out


def test_no_fitting_model_exits_with_1() -> None:
    page = invoke("models", "--hardware", "RTX 4090", "--search", "kimi-k2", "--set", "ram_gb=16")
    assert page.code == 1 and "None of" in page.out and "--all shows the reasons" in page.out
    nothing = invoke("models", "--search", "no such model")
    assert nothing.code == 1 and "No known model" in nothing.out


@pytest.mark.parametrize(
    "arguments",
    [["--hardware", "RTX 99999"], ["--task", "dance"], ["--limit", "0"], ["--users", "0"], ["--min-tok-s", "-1"]],
)
def test_invalid_options_are_usage_errors(arguments: list[str]) -> None:
    assert invoke("models", *arguments).code == 2


def test_the_page_suggests_a_plan_with_the_same_engine() -> None:
    page = invoke("models", "--hardware", "RTX 4090", "--search", "qwen3-14b").out
    assert "bedplate plan Qwen/Qwen3-14B --hardware 'RTX 4090' --context 8192" in page
    planned = json.loads(invoke("plan", "Qwen/Qwen3-14B", "--hardware", "RTX 4090", "--context", "8192", "--json").out)
    same = next(model for model in list_models()["models"] if model["name"] == "Qwen/Qwen3-14B")
    assert (planned["engine"], planned["quantization"]) == (same["engine"], same["quantization"])


def test_this_machine_is_the_default(tmp_path: Path) -> None:
    nowhere = {"BEDPLATE_HOME": str(tmp_path), "HF_HOME": str(tmp_path), "UV_OFFLINE": "1"}
    answer = run("models", "--search", "smollm2", env=nowhere)
    assert answer.code == 0 and "SmolLM2-135M" in answer.out and "\x1b[" not in answer.out
    assert not list(tmp_path.iterdir())


# pages, from fixed values


def make_entry(name: str, **fields: object) -> CatalogueEntry:
    plain = CatalogueEntry(
        name=name,
        task="generate",
        parameters=8_000_000_000,
        released=2025,
        max_context=131072,
        fits=True,
        engine="llama.cpp",
        rule="hardware.cpu",
        format="gguf",
        quantization="Q4_K_M",
        tok_s=Figure(value=41.6, low=33.2, high=50.7, basis="estimate"),
        memory_bytes=6 << 30,
        usable_bytes=20 << 30,
        longest_context=131072,
        max_concurrency=4,
        pace="comfortable",
    )
    return replace_fields(plain, **fields)


ENTRIES = (
    make_entry(
        "maker/Large-MoE-30B-A3B", parameters=30_500_000_000, active_parameters=3_300_000_000, longest_context=31744
    ),
    make_entry("maker/A-Model-With-A-Name-That-Is-Much-Longer-Than-Most-8B-Instruct", here=("long:8b",)),
    make_entry("maker/Unpredicted-8B", tok_s=None, pace="not predicted"),
    make_entry(
        "maker/Split-70B",
        pace="slow",
        tok_s=Figure(value=2.4, low=2, high=3, basis="estimate"),
        offload=Offload(kind="layers", device_layers=20, host_layers=60, host_bytes=30 << 30),
    ),
    make_entry("maker/Crowded-8B", pace="some wait", devices=4),
    make_entry(
        "maker/Giant-671B", fits=False, pace=None, parameters=671_000_000_000, why="needs 300 GiB, and may take 20 GiB"
    ),
)
MACHINE = make_simulated_hardware({"cpu": "AMD EPYC 9654", "cores": 8, "ram_gb": 32, "os": "linux"})


def render_page(
    width: int, entries: Sequence[CatalogueEntry] = ENTRIES, limit: int | None = None, hardware: Hardware = MACHINE
) -> str:
    out = io.StringIO()
    found = Catalogue(known=9, fitting=sum(entry.fits for entry in entries), models=tuple(entries))
    shown = render_models(hardware, Workload(), found, limit=limit, least_tok_s=None, plan="bedplate plan maker/Large")
    Console(file=out, width=width, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120, 160])
def test_models_page(width: int, snapshot: SnapshotAssertion) -> None:
    shown = render_page(width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_truncated(width: int) -> None:
    for word in ("30.5B-A3.3B", "Q4_K_M", "llama.cpp", "41.6", "6 GiB", "31k", "–", "+RAM", "here", "4 × 6 GiB"):
        assert word in render_page(width), word
    assert "33.2–50.7" in render_page(120)


def test_without_a_bandwidth_the_page_suggests_probe_measure() -> None:
    bare = replace_fields(MACHINE, memory=replace_fields(MACHINE.memory, bandwidth_bytes_s=None))
    assert "bedplate probe --measure" in render_page(80, ENTRIES[2:3], hardware=bare)
    assert "bedplate probe --measure" not in render_page(80, ENTRIES[:2], hardware=bare)
    timed = Figure(value=1e11, low=1e11, high=1e11, basis="measured")
    known = replace_fields(MACHINE, memory=replace_fields(MACHINE.memory, bandwidth_bytes_s=timed))
    assert "bedplate probe --measure" not in render_page(80, ENTRIES[2:3], hardware=known)


def test_the_page_counts_models_beyond_the_limit() -> None:
    assert "… and 3 more: --limit 5" in render_page(80, limit=2)


def test_figures_are_formatted() -> None:
    assert format_parameters(make_entry("a", parameters=135_000_000)) == "135M"
    assert format_parameters(make_entry("a", active_parameters=7_900_000_000)) == "8B"
    assert format_context(make_entry("a", longest_context=1 << 20, max_context=1 << 20)) == "1M"
    assert format_context(make_entry("a", longest_context=None)) == "–"
    assert format_context(make_entry("a", longest_context=512, max_context=512)) == "512"
