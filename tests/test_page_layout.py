"""What people read in a terminal of 80 columns: one table in `ps`, this machine first, commands that can be pasted."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from tests.commands import invoke
from tests.runs import make_cell, make_run

from bedplate.cli import terminal
from bedplate.cli.terminal import SafeConsole
from bedplate.decide import decide
from bedplate.decide.questions import Offer, list_purchasable, procure
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.models import find_known_model
from bedplate.show.bench import render_run
from bedplate.show.columns import Column, FittingTable
from bedplate.show.procure import list_worthwhile, render_offers
from bedplate.show.serving import render_ready
from bedplate.values import Endpoint, Workload, replace_fields
from bedplate.values.intent import Operations


def render(what: object, width: int) -> str:
    out = SafeConsole(file=io.StringIO(), width=width, highlight=False)
    out.print(what)
    return cast(io.StringIO, out.file).getvalue()


def make_table() -> FittingTable:
    cells = {
        "name": "smollm2-135m-instruct", "state": "ready", "url": "http://127.0.0.1:8080/v1",
        "models": "smollm2-135m-instruct", "engines": "llama.cpp", "memory": "353 MiB", "process": "12345",
    }  # fmt: skip
    columns = tuple(Column.from_cells(name, [cell], comfortable=48) for name, cell in cells.items())
    return FittingTable(columns, ("process", "models", "memory", "engines"))


@pytest.mark.parametrize(
    ("width", "left_out"), [(200, set()), (100, {"process"}), (80, {"process", "models"}), (60, {"process", "models"})]
)
def test_a_narrow_terminal_leaves_columns_out_and_keeps_one_table(width: int, left_out: set[str]) -> None:
    shown = render(make_table(), width)
    header = shown.splitlines()[0].split()
    assert {"process", "models"} - set(header) == left_out
    assert header[:2] == ["name", "state"] and len(shown.splitlines()) == 2
    assert "http://127.0.0.1:8080/v1" in shown and "smollm2-135m-instruct" in shown  # whole words


def test_engines_begins_with_this_machine() -> None:
    shown = invoke("engines").out
    first, second, third = (shown.index(title) for title in ("This machine", "Recommended by hardware", "Features"))
    assert first < second < third


def test_ready_names_the_live_page() -> None:
    endpoint = Endpoint(
        url="http://127.0.0.1:8080/v1", model="m", engine="llama.cpp", engine_version="1", pid=1, log="/x"
    )
    assert "live page  http://127.0.0.1:8080/\n" in render(render_ready(endpoint), 80)


@pytest.mark.parametrize("models", [("smollm2-135m-instruct",), ("smollm2-135m-instruct", "qwen3-embedding-0.6b")])
def test_ready_fits_80_columns_and_its_command_can_be_pasted(models: tuple[str, ...]) -> None:
    endpoint = Endpoint(
        url="http://127.0.0.1:65535/v1", model=models[0], models=models, engine="llama.cpp", engine_version="1", pid=1,
        log="/x", needs_key=True,
    )  # fmt: skip
    shown = render(render_ready(endpoint), 80)
    assert max(map(len, shown.splitlines())) < 80
    words = shlex.split("curl" + shown.partition(" curl")[2].partition("Ctrl-C")[0].replace("\\\n", " "))
    assert words[:2] == ["curl", f"{endpoint.url}/chat/completions"] and words[2::2] == ["-H", "-H", "-d"]
    assert json.loads(words[-1]).get("model") == (models[0] if len(models) > 1 else None)


@pytest.mark.parametrize("engine", ["vllm", "pytorch"])
def test_the_launch_command_of_a_plan_can_be_pasted(engine: str) -> None:
    arguments = ("plan", "meta-llama/Meta-Llama-3.1-70B", "--hardware", "8x H100 SXM", "--engine", engine)
    shown = invoke(*arguments).out.partition(" Launch\n")[2]
    words = shlex.split(shown.replace("\\\n", " "))
    launch = json.loads(invoke(*arguments, "--json").out)["launch"]
    assert words == [*(f"{name}={value}" for name, value in launch["env"].items()), *launch["argv"]]


def test_chat_template_in_a_launch_command_is_printed_by_another_command() -> None:
    """The chat template of the built-in model is longer than all other options together."""
    shown = invoke("plan").out.partition(" Launch\n")[2]
    template = json.loads(invoke("plan", "--json").out)["launch"]["argv"][-1]
    assert len(template) > 1_000 > len(shown)
    bash = ["bash", "-c", f"printf '%s\\n' {shown.partition('--chat-template ')[2]}"]
    programs = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert subprocess.run(bash, env=programs, capture_output=True, text=True, check=True).stdout == f"{template}\n"


def test_chat_template_of_a_model(builtin_gguf: Path) -> None:
    shown = invoke("inspect", str(builtin_gguf), "--chat-template").out
    model = json.loads(invoke("inspect", str(builtin_gguf), "--json").out)
    assert shown.startswith("{% if tools %}") and model["chat_template"] in shown
    assert "cannot be combined" in invoke("inspect", "--chat-template", "--json").err
    answer = invoke("inspect", "Llama 3.1 8B FP8", "--chat-template")
    assert answer.code == 1 and "no chat template is known" in answer.err and not answer.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama3.1:8b", "--hardware", "RTX 3060 12GB", "--engine", "llama.cpp"),
        ("Qwen/Qwen3-30B-A3B", "--hardware", "2x RTX 4090", "--engine", "llama.cpp"),
        ("gpt-oss:20b", "--hardware", "8 H100 SXM", "--users", "200", "--engine", "vllm"),
    ],
)
def test_commands_of_a_plan_can_be_pasted_from_80_columns(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and launch: nothing is cut off, and lines end with a backslash between words."""
    decision = json.loads(invoke("plan", *arguments, "--json").out)
    launch = (decision.get("node_launches") or [decision["launch"]])[0]
    monkeypatch.setattr(terminal, "PIPE_WIDTH", 80)
    page = invoke("plan", *arguments).out
    prepare, _, last = page.partition(" Prepare\n")[2].partition(" Launch")
    lines = last.partition("\n")[2].partition("\n On node")[0]
    words = shlex.split(lines.replace("\\\n", " "))
    assert words == [*(f"{name}={value}" for name, value in launch["env"].items()), *launch["argv"]]
    commands = re.findall(r"^    \S(?:.*\\\n)*.*$", prepare, re.MULTILINE)
    expected = [step["argv"] for step in decision["launch"]["prepare"] if step["argv"]]
    assert [shlex.split(one.replace("\\\n", " ")) for one in commands] == expected and expected
    assert max(len(line) for one in commands for line in one.splitlines()) <= 80


def test_procurement_leaves_out_what_another_chip_beats() -> None:
    model = find_known_model("meta-llama/Llama-3.1-8B-Instruct")
    of_vendor = {name: [chip for chip in list_purchasable() if chip.vendor == name] for name in ("nvidia", "apple")}
    chips = [*of_vendor["nvidia"][:12], *of_vendor["apple"][:4]]
    offers = [one for _, one in procure(model, Workload(), Operations(), chips) if one is not None]
    shown = list_worthwhile(offers)
    for known in (True, False):
        have = [one for one in offers if (one.watts is not None) == known]
        assert 0 < len([one for one in have if one in shown]) < len(have)
    assert [one.count for one in shown] == sorted(one.count for one in shown)
    for one in offers:
        if one not in shown:
            assert any(is_as_good(other, one) for other in shown), one.accelerator


def is_as_good(one: Offer, other: Offer) -> bool:
    rates = [offer.decision.estimate.output_tok_s for offer in (one, other)]
    speeds = [rate.value if rate is not None else 0.0 for rate in rates]
    if (one.watts is None) != (other.watts is None):
        return False
    return one.count <= other.count and (one.watts or 0) <= (other.watts or 0) and speeds[0] >= speeds[1]


def test_procurement_names_every_chip_and_engine_at_80_columns() -> None:
    model = find_known_model("meta-llama/Llama-3.1-70B-Instruct")
    chips = [chip for chip in list_purchasable() if chip.name in ("NVIDIA RTX PRO 4500 Blackwell", "NVIDIA A30")]
    offers = tuple(one for _, one in procure(model, Workload(), Operations(), chips) if one is not None)
    assert len(offers) == 2
    shown = render(render_offers(model, Workload(), offers, 189), 80)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    words = set(shown.split())
    for offer in offers:
        assert offer.decision.engine in words and {*offer.accelerator.split()} <= words


def test_procurement_for_many_people_leaves_out_laptops_and_chips_that_miss_the_targets_of_a_chat() -> None:
    model = find_known_model("meta-llama/Llama-3.1-8B-Instruct")
    names = ("NVIDIA GeForce RTX 5080 Laptop", "NVIDIA L4", "NVIDIA Jetson Orin Nano 8GB", "NVIDIA H100 SXM 80GB")
    chips = [chip for chip in list_purchasable() if chip.name in names]
    assert len(chips) == len(names)
    for users in (1, 100):
        workload = Workload(users=users)
        offers = tuple(one for _, one in procure(model, workload, Operations(), chips) if one is not None)
        shown = render(render_offers(model, workload, offers, len(chips)), 120)
        assert "TTFT at most 2,000 ms and TPOT at most 100 ms (assumed)" in " ".join(shown.split())
        assert ("RTX 5080 Laptop" in shown) == (users == 1)
        assert ("left out: 1 laptops, as there are several users" in shown) == (users > 1)
        for offer in offers:
            expected = offer.decision.estimate
            assert expected.ttft_ms is not None and expected.ttft_ms.value <= 2200
            assert expected.tpot_ms is not None and expected.tpot_ms.value <= 110


@pytest.mark.parametrize(
    "words",
    [
        ("models", "--search", "qwen3", "--limit", "4"),
        ("inspect", "llama3.1:8b"),
        ("plan", "qwen3:8b"),
        ("plan", "llama3.1:8b", "--engine", "llama.cpp"),
        ("plan", "gpt-oss:20b", "--alternatives"),
        ("simulate", "qwen3:8b", "--rate", "4", "--requests", "200", "--slo", "tpot_ms=50"),
    ],
)
def test_no_word_breaks_at_80_columns(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models may break after a hyphen."""
    machine = () if words[0] == "inspect" else ("--hardware", "RTX 4090")
    shown = {}
    for width in (80, 2000):
        monkeypatch.setattr(terminal, "PIPE_WIDTH", width)
        answer = invoke(*words, *machine)
        assert answer.code == 0, answer.err
        shown[width] = answer.out
    whole = set(re.findall(r"[^\s/-]+", shown[2000]))
    assert [word for word in re.findall(r"[^\s/-]+", shown[80]) if word not in whole] == []


def test_the_table_of_a_benchmark_has_every_figure_at_any_width() -> None:
    """A narrow terminal gets several tables, each with engine and load; a p99 stays beside its median."""
    cells = [make_cell("vllm", load, 50.0 * load) for load in (1, 4)] + [make_cell("tensorrt-llm", 256, 33333.3)]
    run = make_run(cells)
    wide = render(render_run(run, 0.98, {cells[0].id: "memory bandwidth"}), 200)
    for width in (60, 80, 100):
        shown = render(render_run(run, 0.98, {cells[0].id: "memory bandwidth"}), width)
        assert "…" not in shown and max(map(len, shown.splitlines())) <= width
        assert set(wide.split()) == set(shown.split())
        heads = [line.split() for line in shown.splitlines() if line.startswith(" engine ")]
        assert len(heads) > 1 and all(head[:2] == ["engine", "load"] and head[2] not in ("p99", "±") for head in heads)


def test_a_plan_for_a_cpu_mentions_no_gpu_in_its_reasons() -> None:
    model = find_known_model("meta-llama/Llama-3.1-8B-Instruct")
    known = make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 24, "os": "linux"})
    unknown = replace_fields(known.cpu, name="unknown CPU")
    machine = replace_fields(known, cpu=unknown, memory=replace_fields(known.memory, bandwidth_bytes_s=None))
    decision = decide(machine, model, Workload())
    texts = {one.rule: one.text for one in decision.reasons}
    assert texts["quant.unpredicted"].startswith(
        "not F16 on the CPU: if the speed of a local engine cannot be predicted"
    )
