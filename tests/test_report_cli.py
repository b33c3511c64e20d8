"""`bedplate report` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import invoke, run
from tests.runs import make_cell, make_run

from bedplate.values import replace_fields, to_json


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    cells = [make_cell("llama.cpp", 4, 100), make_cell("pytorch", 4, 40, label="BF16")]
    file = tmp_path / "run.json"
    file.write_text(to_json(make_run(cells, engines=["llama.cpp", "pytorch", "vllm"], loads=[4])))
    return file


def test_a_page_is_written_and_its_path_printed(run_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = invoke("report", str(run_file), "-o", str(page))
    assert done.code == 0 and "Deploy llama.cpp Q4_1." in done.out and str(page) in done.out.replace("\n", "")
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "vllm" in text and "TBD" in text
    assert text.count("<figure>") == 6  # the built-in model's facts are known, so the roofline is there


def test_markdown_goes_to_standard_output(run_file: Path) -> None:
    done = invoke("report", str(run_file), "--md")
    assert done.code == 0 and done.out.startswith("# Deploy llama.cpp Q4_1.")


def test_an_incumbent_is_compared_with_the_choice(run_file: Path) -> None:
    done = invoke("report", str(run_file), "--md", "--incumbent", "pytorch")
    assert done.code == 0 and "**migrate**" in done.out
    nobody = invoke("report", str(run_file), "--md", "--incumbent", "sglang")
    assert nobody.code == 2 and "was not measured in these runs" in nobody.err


def test_another_version_of_the_engine_is_an_incumbent(tmp_path: Path) -> None:
    cells = [make_cell("vllm", 4, 100), make_cell("vllm", 4, 40)]
    cells = [
        replace_fields(cell, id=version, subject=replace_fields(cell.subject, engine_version=version))
        for cell, version in zip(cells, ("0.32.0", "0.31.0"), strict=True)
    ]
    file = tmp_path / "run.json"
    file.write_text(to_json(make_run(cells, engines=["vllm@0.32.0", "vllm@0.31.0"], loads=[4])))
    done = invoke("report", str(file), "--md", "--incumbent", "vLLM@0.31.0")
    assert done.code == 0 and "# Deploy vLLM 0.32.0 Q4_1." in done.out and "**migrate**" in done.out
    assert done.out.count("| vllm |") == 2 and "TBD | TBD | TBD | TBD" not in done.out
    same = invoke("report", str(file), "--md", "--incumbent", "vllm@0.32.0")
    assert same.code == 0 and "**migrate**" not in same.out
    assert invoke("report", str(file), "--md", "--incumbent", "vllm@0.30.0").code == 2


def test_without_a_run_the_error_suggests_bench(tmp_path: Path) -> None:
    done = run("report", env={"BEDPLATE_HOME": str(tmp_path)})
    assert done.code == 2 and "bedplate bench" in done.err


def test_invalid_input_and_output_paths_are_rejected(run_file: Path, tmp_path: Path) -> None:
    garbled = tmp_path / "garbled.json"
    garbled.write_text("{}")
    assert invoke("report", str(garbled)).code == 2
    assert invoke("report", str(run_file), "-o", str(tmp_path / "no" / "page.html")).code == 3
