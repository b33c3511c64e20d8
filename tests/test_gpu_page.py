"""The figures of docs/gpu.md are those of the run files in benchmarks/card/results."""

from __future__ import annotations

import json
import re
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bedplate.measure.summary import make_rows
from bedplate.values.record import from_json
from bedplate.values.run import Run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "card" / "results"
FIRST, SECOND = "h200-2026-11-17", "h200-2026-11-17-b"


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


@pytest.mark.parametrize(("engine", "name"), [("vLLM", "vllm-8b"), ("SGLang", "sglang-8b")])
def test_speed(engine: str, name: str) -> None:
    run = from_json(Run, read_files(FIRST)[f"{name}/run.json"].encode())
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
