"""The companion notebook: its table starts with TBD cells, and running it fills them with measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "engine-benchmark.ipynb"
QUICK = {
    'ENGINES = ["llama.cpp", "pytorch"]': 'ENGINES = ["llama.cpp"]',
    "CONCURRENCY = [1, 4, 8, 16]": "CONCURRENCY = [1, 2]",
    "PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128": "PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8",
    "SECONDS, REPEATS = 10, 3": "SECONDS, REPEATS = 1, 1",
}


def find_cell(notebook: Any, tag: str) -> Any:
    return next(one for one in notebook.cells if tag in one.metadata.get("tags", []))


def read_table(one: Any) -> list[dict[str, str]]:
    (output,) = one.outputs
    lines = re.findall(r"<tr>(.*?)</tr>", output["data"]["text/html"], re.DOTALL)
    head = re.findall(r"<th>(.*?)</th>", lines[0])
    return [dict(zip(head, re.findall(r"<td>(.*?)</td>", line, re.DOTALL), strict=True)) for line in lines[1:]]


def test_the_stored_notebook_has_tbd_cells() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    rows = read_table(find_cell(notebook, "empty-table"))
    assert len(rows) == 8
    assert all(row[name] == "TBD" for row in rows for name in ("ttft_ms", "tok_per_s", "peak_mem_gb", "version"))
    assert not any(one.get("outputs") for one in notebook.cells if one is not find_cell(notebook, "empty-table"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_running_the_notebook_fills_the_table(builtin_gguf: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = find_cell(notebook, "parameters")
    for usual, quick in QUICK.items():
        assert usual in parameters.source
        parameters.source = parameters.source.replace(usual, quick)
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    rows = read_table(find_cell(notebook, "filled-table"))
    assert [(row["engine"], row["concurrency"]) for row in rows] == [("llama.cpp", "1"), ("llama.cpp", "2")]
    assert all(float(row[name].replace(",", "")) > 0 for row in rows for name in ("ttft_ms", "tok_per_s"))
    assert all(row["model"] == "SmolLM2-135M-Instruct" and row["quantization"] == "Q4_1" for row in rows)
    text = "".join(part.get("text", "") for one in notebook.cells for part in one.get("outputs", []))
    assert "llama.cpp" in text and "Not measured:" in text
