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
from bedplate.measure.summary import is_valid, summarize_cell
from bedplate.values import from_json, to_json
from bedplate.values.run import Cell, Run

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


def list_gaps(cell: Cell) -> str:
    return next(flag.text for flag in cell.flags if flag.kind == "gaps")


def test_a_vllm_file_without_samples_keeps_its_figures_and_says_what_is_missing() -> None:
    path = CAPTURES / "vllm-bench-serve-summary.json"
    stated = json.loads(path.read_text())
    (cell,) = read_run(path).cells
    assert cell.stated is not None and not cell.repeats and not is_valid(cell)
    assert cell.stated.output_tok_s == stated["output_throughput"] and cell.stated.requests == 40
    assert (cell.stated.ttft_ms_p50, cell.stated.tpot_ms_p99) == (stated["median_ttft_ms"], stated["p99_tpot_ms"])
    assert (cell.load.concurrency, cell.load.prompt_tokens, cell.load.output_tokens) == (4, 1024, 1024)
    assert "samples of single requests" in list_gaps(cell) and "--save-detailed" in cell.notes


def test_imports_llama_bench() -> None:
    path = CAPTURES / "llama-bench.json"
    run = read_run(path)
    prompt, generation = run.cells
    assert run.environment.hardware == "AMD Ryzen 7 7800X3D 8-Core Processor, NVIDIA GeForce RTX 4080"
    for cell in run.cells:
        one = cell.subject
        assert (one.engine, one.engine_version, one.quantization) == ("llama.cpp", "b5163", "Q4_K_M")
        assert one.model == "Qwen2.5-7B-Instruct-Q4_K_M" and "weights hash" in list_gaps(cell)
        assert "hardware" not in list_gaps(cell) and len(cell.repeats[0].samples) == 5
    stated = [row["avg_ts"] for row in json.loads(path.read_text())]
    assert prompt.stated is not None and prompt.stated.prompt_tok_s == stated[0]
    found = summarize_cell(generation)
    assert found.output_tok_s == pytest.approx(stated[1], rel=1e-3) and found.ttft_ms is None
    first = summarize_cell(prompt)
    assert first.ttft_ms is not None and 1000 * 512 / first.ttft_ms.mean == pytest.approx(stated[0], rel=1e-2)
    assert first.output_tok_s is None and prompt.load.prompt_tokens == 512 and generation.load.output_tokens == 128


def test_imports_llama_bench_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    rows = json.loads((CAPTURES / "llama-bench.json").read_text())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_run(path).cells) == 2
    assert len(read_run(write_file(tmp_path, rows[1])).cells) == 1


def test_imports_a_summary_of_aiperf() -> None:
    run = read_run(CAPTURES / "aiperf.json")
    (cell,) = run.cells
    assert run.at == "2026-07-03T05:16:02Z" and cell.subject.model == "qwen3.6-nvfp4" and cell.stated is not None
    assert (cell.load.concurrency, cell.load.prompt_tokens, cell.load.output_tokens) == (2, 2855, 435)
    assert cell.stated.output_tok_s == pytest.approx(324.314) and cell.stated.ttft_ms_p95 == pytest.approx(248.811)
    assert cell.stated.tpot_ms_p50 == pytest.approx(5.566, abs=1e-3) and cell.stated.requests == 96
    assert list_gaps(cell).startswith("the file does not contain: hardware, engine version") and not is_valid(cell)


def test_imports_records_of_aiperf(tmp_path: Path) -> None:
    path = CAPTURES / "aiperf-records.jsonl"
    (cell,) = read_run(path).cells
    failed, first, second = cell.repeats[0].samples
    assert failed.outcome == "error" and "cancelled" in (failed.error or "") and failed.ttft_ms is None
    stated = [json.loads(line)["metrics"] for line in path.read_text().splitlines()[:0:-1]]
    for sample, metrics in zip((first, second), stated, strict=True):
        assert sample.ttft_ms == metrics["ttft"]["value"] and sample.output_tokens == 193
        assert sample.tpot_ms == pytest.approx(metrics["inter_token_latency"]["value"])
    assert cell.load.concurrency == 2 and "model" in list_gaps(cell)
    newer = [json.loads(line.replace("timestamp_ns", "request_start_ns").replace('"ttft"', '"time_to_first_token"')
             .replace("credit_phase", "benchmark_phase")) for line in path.read_text().splitlines()]  # fmt: skip
    warmup = {**newer[1], "metadata": {**newer[1]["metadata"], "benchmark_phase": "warmup"}}
    other = tmp_path / "records.jsonl"
    other.write_text("".join(json.dumps(one) + "\n" for one in (*newer, warmup)))
    assert read_run(other).cells[0].repeats[0].samples == cell.repeats[0].samples


def test_imports_inferencex(tmp_path: Path) -> None:
    run = read_run(CAPTURES / "inferencex.json")
    (cell,) = run.cells
    assert run.environment.hardware == "8 x MI355X" and cell.stated is not None
    subject = cell.subject
    assert (subject.engine, subject.engine_version, subject.quantization) == ("vllm", "0.21.0", "INT4")
    assert subject.parallelism.tensor == 8 and cell.stated.output_tok_s == pytest.approx(8 * 27.678011, rel=1e-6)
    assert cell.stated.ttft_ms_p50 == pytest.approx(296.98, abs=0.01)
    assert cell.stated.tpot_ms_p99 == pytest.approx(18.46, abs=0.01) and "spec_decoding mtp" in cell.notes
    assert (cell.load.concurrency, cell.load.prompt_tokens, cell.load.output_tokens) == (4, 1024, 1024)
    row = json.loads((CAPTURES / "inferencex.json").read_text())
    several = read_run(write_file(tmp_path, [row, row | {"conc": 8, "is_multinode": True, "image": "sglang"}]))
    spread = several.cells[1]
    assert spread.stated is not None and spread.stated.output_tok_s is None, "the number of GPUs is unknown"
    assert spread.subject.engine_version is None and several.environment.hardware == "8 x MI355X and MI355X"


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


@given(
    name=st.sampled_from(
        ["vllm-bench-serve", "vllm-bench-serve-summary", "guidellm", "llama-bench", "aiperf", "inferencex"]
    ),
    data=st.data(),
)
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
    assert run.cells and from_json(Run, to_json(run)) == run, "the store can read it again"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vllm-bench-serve-summary", {"median_ttft_ms": "fast"}),
        ("vllm-bench-serve-summary", {"output_throughput": 1e400}),
        ("vllm-bench-serve", {"input_lens": [-32, 32, 32]}),
        ("vllm-bench-serve", {"ttfts": [-0.1, 0.1, 0.0]}),
        ("vllm-bench-serve", {"itls": [[1e20], [0.1], []]}),
        ("vllm-bench-serve", {"duration": -5}),
        ("inferencex", {"conc": 0}),
    ],
)
def test_impossible_values_are_rejected(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    document = json.loads((CAPTURES / f"{name}.json").read_text())
    with pytest.raises(UsageError):
        read_run(write_file(tmp_path, document | changes))


def test_impossible_times_of_a_bedplate_run_are_rejected(tmp_path: Path) -> None:
    document = json.loads(to_json(make_run([make_cell("vllm", 4, 100.0)])))
    document["cells"][0]["repeats"][0]["samples"][0]["duration_ms"] = -1.0
    with pytest.raises(UsageError, match="is not read") as caught:
        read_run(write_file(tmp_path, document))
    assert caught.value.cause == f"request 1 of cell {document['cells'][0]['id']}: a time is negative or too long"


def write_file(folder: Path, document: object) -> Path:
    path = folder / "document.json"
    path.write_text(json.dumps(document))
    return path
