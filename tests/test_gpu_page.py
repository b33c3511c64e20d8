"""The figures of docs/gpu.md are those of the run files in benchmarks/card/results."""

from __future__ import annotations

import json
import re
import statistics
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bedplate.judge.diagnose import build_roofline, diagnose
from bedplate.measure.summary import make_rows
from bedplate.values.record import from_json
from bedplate.values.run import Cell, Run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "card" / "results"
FIRST, SECOND, THIRD, FOURTH = (f"h200-2026-11-17{letter}" for letter in ("", "-b", "-c", "-d"))


@cache
def read_files(archive: str) -> dict[str, str]:
    with tarfile.open(RESULTS / f"{archive}.tar.xz") as tar:
        members = [member for member in tar if member.isfile()]
        return {
            member.name.partition("/")[2]: stream.read().decode("utf-8", "replace")
            for member in members
            if (stream := tar.extractfile(member)) is not None
        }


def read_json(archive: str, name: str) -> Any:
    return json.loads(read_files(archive)[name])


def find_row(*words: str) -> list[str]:
    """The cells of the table row that begins with these words."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| " + " | ".join(words) + " |")]
    return [cell.strip() for cell in row.strip("|").split("|")][len(words) :]


def read_numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_start_times() -> None:
    cold, warm = (read_json(SECOND, f"vllm-serve/{name}.start.json")["ready_s"] for name in ("cold", "warm"))
    before = read_json(FIRST, "vllm-serve/cold.start.json")["ready_s"]
    assert read_numbers(find_row("first start of the built-in model to ready")[0]) == [round(cold), round(before)]
    (told,) = read_numbers(find_row("second start to ready, with a compile cache that is found")[0])
    assert told == round(warm)
    with_bytecode = [read_files(SECOND)[f"warm-with-bytecode/{name}.txt"] for name in ("second", "first")]
    found = [float(re.findall(r"starting vLLM: ([\d.]+) s", text)[-1]) for text in with_bytecode]
    assert read_numbers(find_row("the same, with bytecode of PyTorch too")[0]) == [round(one) for one in found]
    assert cold / found[0] >= 3


@pytest.mark.parametrize(
    ("engine", "archive", "name"),
    [
        ("vLLM", FIRST, "vllm-8b"),
        ("SGLang", FIRST, "sglang-8b"),
        ("vLLM, experts", THIRD, "moe-vllm"),
        ("SGLang, experts", FOURTH, "moe-sglang"),
    ],
)
def test_speed(engine: str, archive: str, name: str) -> None:
    run = from_json(Run, read_files(archive)[f"{name}/run.json"].encode())
    measured = {row.concurrency: row for row in make_rows(run)}
    lines = PAGE[PAGE.index(f"| {engine} | 1 |") :].splitlines()[:4]
    for level, line in zip((1, 16, 64, 256), lines, strict=True):
        told = [cell.strip() for cell in line.strip("|").split("|")]
        row = measured[level]
        assert float(told[1]) == level
        figures = [float(told[place].replace(",", "")) for place in (2, 4, 6)]
        assert figures == pytest.approx([row.tok_per_s, row.tpot_ms, row.ttft_ms], rel=0.005)


def test_migrations_lost_no_answer() -> None:
    streams = read_json(SECOND, "migrate/streams.json")
    there, back = streams["migrations"]
    assert there["side_by_side"] and back["side_by_side"]
    assert (streams["failed"], streams["truncated"], streams["duplicated"], streams["rejected"]) == ([], [], [], 0)
    assert read_numbers(" ".join(find_row("vLLM to SGLang"))) == [round(there["seconds"]), there["answers_meanwhile"]]
    assert read_numbers(" ".join(find_row("SGLang to vLLM"))) == [round(back["seconds"]), back["answers_meanwhile"]]
    assert f"All {streams['whole']:,} answers were complete" in PAGE


@pytest.mark.parametrize("words", ["512 + 128 tokens, unique prompts", "2,048 + 128 tokens, the first 1,792 shared"])
def test_comparison(words: str) -> None:
    prompt = words.partition(" ")[0].replace(",", "")
    printed = read_files(SECOND)["compare/compare.txt"]
    (line,) = [line for line in printed.splitlines() if f"{prompt} + 128 tokens " in line and "(" in line]
    told = find_row(words)
    figures = [*read_numbers(told[0]), *read_numbers(told[1]), *read_numbers(told[2])]
    figures += [*read_numbers(told[3]), *read_numbers(told[4])]
    assert figures == read_numbers(line.partition("tokens")[2])[: len(figures)]
    assert "Stay with vllm" in printed


def read_run(name: str) -> Run:
    return from_json(Run, read_files(THIRD)[f"bottlenecks/{name}.json"].encode())


def select_loads(run: Run, *loads: tuple[int, int, int]) -> tuple[Cell, ...]:
    """The cells of these loads: concurrency, prompt tokens and shared prefix."""
    return tuple(
        cell
        for cell in run.cells
        if (cell.load.concurrency, cell.load.prompt_tokens, cell.load.shared_prefix_tokens) in loads
    )


def compute_speed(cell: Cell) -> float:
    return statistics.median((one.delivered_tokens or 0.0) / one.seconds for one in cell.repeats)


@pytest.mark.parametrize(
    ("bottleneck", "run", "load", "without"),
    [
        ("few sequences", "vllm-slots-8", (64, 512, 0), (64, 512, 0)),
        ("small KV cache", "vllm-num-gpu-blocks-override-640", (64, 512, 0), (64, 512, 0)),
        ("no CUDA graphs", "vllm-enforce-eager", (64, 512, 0), (64, 512, 0)),
        ("long prefill", "vllm", (16, 4096, 0), (16, 4096, 4080)),
    ],
)
def test_diagnose_names_bottlenecks_and_predicts_their_gain(
    bottleneck: str, run: str, load: tuple[int, int, int], without: tuple[int, int, int]
) -> None:
    made = read_run(run)
    cells = select_loads(made, (1, 512, 0), load)
    roofline = build_roofline(cells[0].subject, made.models[0], None, made.environment)
    (found,) = diagnose([(cells, roofline)]).bottlenecks
    gain = found.predictions[0].gain.value
    before, (after,) = cells[-1], select_loads(read_run("vllm"), without)
    measured = compute_speed(after) / compute_speed(before)
    _, slow, fast, limit, predicted, told = find_row(bottleneck)
    assert (*read_numbers(slow), *read_numbers(fast)) == (round(compute_speed(before)), round(compute_speed(after)))
    assert (found.limit, float(predicted), float(told)) == (limit, round(gain, 2), round(measured, 2))
    assert abs(gain / measured - 1) < 0.3


def read_verdicts(step: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["b"], one["load"]): one for one in read_json(FOURTH, f"{step}/verdicts.json") if one["a"] == "vllm"}


def test_plan_is_not_slower_than_the_engines_defaults() -> None:
    for place, (row, load) in enumerate({"1 request": "1:512/128", "64 requests": "64:512/128"}.items()):
        assert row in find_row("vLLM, FP8")
        verdict = read_verdicts("vllm-defaults")["vllm:defaults", load]
        low, gain, high = verdict["output_tok_s"]
        assert verdict["answer"] == "stay" and low < 1
        told = read_numbers(find_row("defaults against the plan")[place])
        assert told == [round(abs(gain - 1) * 100, 1), round(abs(low - 1) * 100), round(abs(high - 1) * 100)]
        assert read_numbers(find_row("TTFT, ratio")[place]) == [round(verdict["ttft_ms"][n], 2) for n in (1, 0, 2)]


@pytest.mark.parametrize(
    ("row", "side"),
    [
        ("the plan", "vllm"),
        ("`--kv-cache-dtype fp8`", "vllm-kv-cache-dtype-fp8"),
        ("`--no-enable-prefix-caching`", "vllm-no-enable-prefix-caching"),
        ("n-gram speculation, 4 tokens", "vllm-speculative-config"),
    ],
)
def test_options_beside_the_plan(row: str, side: str) -> None:
    names = [one for one in read_files(FOURTH) if one.startswith("options/") and one.endswith(".json")]
    (name,) = [one for one in names if one == f"options/{side}.json" or one.startswith(f"options/{side}.method")]
    cells = from_json(Run, read_files(FOURTH)[name].encode()).cells
    assert read_numbers(" ".join(find_row(row))) == [round(compute_speed(cell)) for cell in cells]


def test_larger_shape() -> None:
    printed = read_files(FOURTH)["dense-32b/output.txt"]
    lines = PAGE[PAGE.index("| vLLM, 32 B | 1 |") :].splitlines()[:3]
    for level, line in zip((1, 16, 64), lines, strict=True):
        (speed,) = re.findall(rf" {level}:512/128, round 1, .*: (\d+) tok/s", printed)
        estimate = read_json(FOURTH, f"dense-32b/plan-{level}.json")["estimate"]["output_tok_s"]
        told = read_numbers(line.split("|", 3)[3])
        assert told == [float(speed), *(round(estimate[name]) for name in ("value", "low", "high"))]


def test_busy_gpu_is_refused_and_flagged() -> None:
    refused = read_json(THIRD, "busy-gpu/refused.json")
    assert refused["status"] == 3 and refused["error"].removeprefix("error: ") in " ".join(PAGE.split())
    outcome = read_json(THIRD, "shared-gpu/outcome.json")
    assert outcome["statuses"]["second, refused"] == 3
    assert all("busy" in flags for flags in outcome["flags"].values())
