"""Import of runs from other benchmarks; files without samples are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs import make_cell, make_run

from bedplate.errors import UsageError
from bedplate.measure.imports import read_run
from bedplate.measure.summary import summarize_cell
from bedplate.values import to_json

CAPTURES = Path(__file__).parents[1] / "captures" / "runs"


def test_imports_vllm_bench_serve() -> None:
    run = read_run(CAPTURES / "vllm-bench-serve.json")
    (cell,) = run.cells
    assert run.finished and run.source == "vllm-bench-serve.json" and run.at == "2026-11-15T09:30:00Z"
    assert (cell.load.arrivals, cell.load.concurrency, cell.load.prompt_tokens, cell.load.output_tokens) == (
        "closed", 2, 32, 4,
    )  # fmt: skip
    (repeat,) = cell.repeats
    first, second, third = repeat.samples
    assert first.at_s == 0 and second.at_s == pytest.approx(0.5) and third.outcome == "error"
    assert first.ttft_ms == pytest.approx(120) and first.duration_ms == pytest.approx(180)
    assert second.tpot_ms == pytest.approx(100 / 3) and second.gaps_ms == pytest.approx((20, 30, 50))
    assert third.error == "Service Unavailable" and third.ttft_ms is None
    assert summarize_cell(cell).error_share == pytest.approx(1 / 3)
    assert {flag.kind for flag in cell.flags} >= {"errors", "short"}


def test_a_real_vllm_file_gives_its_stated_figures() -> None:
    path = CAPTURES / "vllm-bench-serve-real.json"
    stated = json.loads(path.read_text())
    (cell,) = read_run(path).cells
    found = summarize_cell(cell)
    assert found.ttft_ms is not None and found.ttft_ms.p50 == pytest.approx(stated["median_ttft_ms"])
    assert found.tpot_ms is not None and found.tpot_ms.mean == pytest.approx(stated["mean_tpot_ms"], rel=1e-3)
    assert found.ok == stated["completed"] and found.error_share == 0 and cell.load.concurrency == 2


def test_imports_the_rate_of_an_open_loop(tmp_path: Path) -> None:
    document = json.loads((CAPTURES / "vllm-bench-serve.json").read_text())
    document |= {"request_rate": 4.0, "burstiness": 0.5}
    cell = read_run(write_file(tmp_path, document)).cells[0]
    assert cell.load.arrivals == "poisson" and cell.load.requests_per_s == 4.0 and "burstiness 0.5" in cell.notes


def test_imports_guidellm() -> None:
    run = read_run(CAPTURES / "guidellm.json")
    closed, opened = run.cells
    assert (closed.load.arrivals, closed.load.concurrency) == ("closed", 2)
    assert (opened.load.arrivals, opened.load.requests_per_s) == ("poisson", 2.5)
    assert closed.repeats[0].seconds == 10 and closed.subject.url == "http://127.0.0.1:8000"
    good, last, failed = closed.repeats[0].samples
    assert (good.ttft_ms, good.duration_ms, good.output_tokens, good.cached_tokens) == (200.0, 500.0, 16, 0)
    assert good.tpot_ms == pytest.approx(20) and failed.outcome == "error" and last.at_s == pytest.approx(1.5)
    assert run.environment.python == "3.12.3" and run.environment.hardware == "not reported"


def test_a_real_guidellm_file_gives_its_stated_means() -> None:
    path = CAPTURES / "guidellm-real.json"
    stated = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    (cell,) = read_run(path).cells
    found = summarize_cell(cell)
    ttft, latency = (stated[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "request_latency"))
    assert found.ttft_ms is not None and found.ttft_ms.mean == pytest.approx(ttft)
    assert found.e2e_ms is not None and found.e2e_ms.mean == pytest.approx(1000 * latency)
    assert (found.ok, cell.load.concurrency, found.output_tokens) == (6, 2, 8)


def test_each_file_is_a_separate_run_and_machine() -> None:
    once, again = read_run(CAPTURES / "guidellm.json"), read_run(CAPTURES / "guidellm.json")
    other = read_run(CAPTURES / "vllm-bench-serve.json")
    assert once == again
    assert other.environment.machine != once.environment.machine and other.id != once.id


def test_imports_a_bedplate_run_unchanged(tmp_path: Path) -> None:
    run = make_run([make_cell("vllm", 4, 100.0)])
    path = tmp_path / "run.json"
    path.write_text(to_json(run))
    assert read_run(path) == run


def test_a_file_without_samples_gives_a_hint(tmp_path: Path) -> None:
    document = json.loads((CAPTURES / "vllm-bench-serve.json").read_text())
    for name in ("ttfts", "itls", "input_lens", "output_lens", "start_times"):
        del document[name]
    with pytest.raises(UsageError) as refused:
        read_run(write_file(tmp_path, document))
    assert "--save-detailed" in (refused.value.hint or "")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe", b'{"schema": "run/1"}'])
def test_rejects_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        read_run(path)
    with pytest.raises(UsageError):
        read_run(tmp_path / "none.json")


scalars = st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@given(name=st.sampled_from(["vllm-bench-serve", "guidellm"]), data=st.data())
def test_rejects_invalid_fields_without_crashing(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = json.loads((CAPTURES / f"{name}.json").read_text())
    part = document
    for _ in range(data.draw(st.integers(0, 4))):
        inner = [
            value for value in (part.values() if isinstance(part, dict) else part) if isinstance(value, dict | list)
        ]
        inner = [value for value in inner if value]
        if not inner:
            break
        part = data.draw(st.sampled_from(inner))
    key: Any = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
    part[key] = data.draw(values)
    path = write_file(tmp_path_factory.mktemp("garbled"), document)
    try:
        run = read_run(path)
    except UsageError:
        return
    assert run.cells


def write_file(folder: Path, document: object) -> Path:
    path = folder / "document.json"
    path.write_text(json.dumps(document))
    return path
