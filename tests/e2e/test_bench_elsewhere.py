"""A local llama.cpp and another one behind a second bedplate: rows of one run, and one verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.conftest import Served

from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.run import Cell, ClientAccuracy, Run

KEY = "sk-elsewhere-71c2"
MODEL = "smollm2-135m-instruct"
LOAD = ("--concurrency", "1", "--prompt-tokens", "32", "--output-tokens", "8", "--seconds", "1", "--repeats", "2",
        "--no-quality")  # fmt: skip


def bedplate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bedplate", *words], capture_output=True, text=True, check=False)


def forget_disturbances(cell: Cell) -> Cell:
    repeats = tuple(replace_fields(repeat, client=ClientAccuracy()) for repeat in cell.repeats)
    return replace_fields(cell, flags=(), repeats=repeats)


def test_bench_and_compare_treat_an_endpoint_elsewhere_like_a_local_engine(
    serve: Callable[..., Served], own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE_KEY", KEY)
    box = serve("--name", "box", "--engine", "llama.cpp", env={"BEDPLATE_API_KEY": KEY})
    file = tmp_path / "services.yaml"
    services = [
        {"model": "builtin", "engine": "llama.cpp"},
        {"url": box.url, "model": MODEL, "key_env": "ELSEWHERE_KEY"},
    ]
    file.write_text(yaml.safe_dump({"services": services}))
    name = box.root.partition("://")[2]
    for words in (
        ("--engines", f"llama.cpp,{box.url}", "--key-env", "ELSEWHERE_KEY", "--model", MODEL),
        ("-f", str(file)),
    ):
        done = bedplate("bench", *words, *LOAD, "--json")
        assert done.returncode == 0, done.stderr
        run = from_json(Run, done.stdout)
        assert [cell.subject.engine for cell in run.cells] == ["llama.cpp", name] and not run.left_out
        local, remote = run.cells
        assert local.subject.model == remote.subject.model and remote.subject.url == box.root
        assert all(sample.outcome == "ok" for cell in run.cells for repeat in cell.repeats for sample in repeat.samples)
        order = sorted((repeat.at or "", cell.subject.engine) for cell in run.cells for repeat in cell.repeats)
        assert [engine for _, engine in order] == ["llama.cpp", name, name, "llama.cpp"]
        assert KEY not in done.stdout + done.stderr
    # `compare` refuses cells that other processes disturbed, or whose client was slow, as where tests run side by side.
    quiet = tmp_path / "run.json"
    quiet.write_text(to_json(replace_fields(run, cells=tuple(map(forget_disturbances, run.cells)))))
    compared = bedplate("compare", f"{quiet}:llama.cpp", f"{quiet}:{name}", "--json")
    assert compared.returncode in (0, 10, 20, 30), compared.stderr
    verdict = json.loads(compared.stdout)
    assert (verdict["a"]["engine"], verdict["b"]["engine"]) == ("llama.cpp", name)
    assert verdict["a"]["runs"] == verdict["b"]["runs"] == [run.id]
