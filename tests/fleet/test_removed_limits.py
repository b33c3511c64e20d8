"""A limit that is named is then removed, on real engines: the gain is the one that was predicted, within 30 %.

Slots, threads and long prompts with llama.cpp, a cache that is too small with vLLM, a slow runtime with PyTorch. Speed
is judged here, so that it wants a machine that nobody else uses.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from tests.judge.real_engine import measure_cells, ready_engine, with_settings

from bedplate.facts.hardware import probe
from bedplate.facts.measured import apply_measurements, measure
from bedplate.judge.diagnose import build_roofline, diagnose_subject
from bedplate.measure.summary import summarize_cell
from bedplate.progress import SilentProgress
from bedplate.run.models import find_known_model
from bedplate.run.ready import PreparedModel
from bedplate.values import Hardware, Workload, replace_fields, to_json
from bedplate.values.diagnosis import Bottleneck, Limit
from bedplate.values.run import Cell, Load

pytestmark = pytest.mark.timeout(1800)
WITHIN = 0.3


@lru_cache(maxsize=1)
def machine() -> Hardware:
    hardware = probe(recall=False)
    return apply_measurements(hardware, measure(hardware, SilentProgress()))


def told(cells: list[Cell]) -> Bottleneck:
    subject = cells[-1].subject
    return diagnose_subject(cells, build_roofline(subject, find_known_model(subject.model), machine()))


def speed(cells: list[Cell]) -> float:
    found = summarize_cell(cells[-1]).output_tok_s
    assert found is not None
    return found


def loads(*in_flight: int, prompt: int = 32, output: int = 48) -> list[Load]:
    return [Load(concurrency=count, prompt_tokens=prompt, output_tokens=output) for count in in_flight]


def cells_of(ready: PreparedModel, *in_flight: int, prompt: int = 32, output: int = 48) -> list[Cell]:
    return measure_cells(ready, loads(*in_flight, prompt=prompt, output=output), seconds=8.0, repeats=3)


def predicted(found: Bottleneck, limit: Limit) -> float:
    assert found.limit == limit, found.text
    return next(one.gain.value for one in found.predictions if one.metric == "output_tok_s")


def kept(name: str, *sides: list[Cell]) -> None:
    """Write the measured cells if BEDPLATE_KEEP_CELLS is set, to explain a gain that was not predicted."""
    if folder := os.environ.get("BEDPLATE_KEEP_CELLS"):
        Path(folder, f"{name}.json").write_text(to_json([cell for cells in sides for cell in cells]), encoding="utf-8")


def test_predicts_gain_of_more_slots() -> None:
    few = ready_engine("llama.cpp", Workload(concurrency=8, prompt_tokens=32, output_tokens=48), slots=1)
    before, after = cells_of(few, 1, 8), cells_of(with_settings(few, slots=8), 8)
    found = told(before)
    assert predicted(found, "scheduler") == pytest.approx(speed(after) / speed(before), rel=WITHIN)
    first = [statistics.fmean(one.ttft_ms or 0 for one in cells[-1].repeats[0].samples) for cells in (before, after)]
    assert first[1] < first[0] / 2


def test_predicts_gain_of_fewer_threads() -> None:
    cores = machine().cpu.allowed_physical_cores
    many = ready_engine("llama.cpp", Workload(concurrency=1, prompt_tokens=32, output_tokens=48), threads=4 * cores)
    before, after = cells_of(many, 1), cells_of(with_settings(many, threads=cores), 1)
    found = told(before)
    assert found.changes[0].flag == f"--threads {cores}"
    assert predicted(found, "runtime overhead") > 1
    gain = found.predictions[0].gain
    assert gain.low / 1.3 <= speed(after) / speed(before) <= gain.high * 1.3


def test_predicts_gain_of_shorter_prompts() -> None:
    ready = ready_engine("llama.cpp", Workload(concurrency=4, prompt_tokens=512, output_tokens=32), slots=4)
    before, after = cells_of(ready, 1, 4, prompt=512, output=32), cells_of(ready, 4, prompt=2, output=32)
    assert predicted(told(before), "compute") == pytest.approx(speed(after) / speed(before), rel=WITHIN)


def test_predicts_gain_of_a_larger_cache() -> None:
    """vLLM with KV cache for five of sixteen requests, then for all: its cache size follows from the workload."""
    ready = ready_engine("vllm", Workload(concurrency=16, prompt_tokens=512, output_tokens=64, context_tokens=1024))
    one_user = replace_fields(ready.plan, workload=replace_fields(ready.plan.workload, concurrency=1))
    small = replace(ready, plan=one_user)
    before, after = (cells_of(one, *users, prompt=512, output=64) for one, users in ((small, (1, 16)), (ready, (16,))))
    kept("larger-cache", before, after)
    assert predicted(told(before), "KV cache") == pytest.approx(speed(after) / speed(before), rel=WITHIN)


def test_recognizes_a_slow_runtime() -> None:
    """The same weights, one request at a time: PyTorch launches each kernel separately, llama.cpp does not."""
    work = Workload(concurrency=1, prompt_tokens=32, output_tokens=48)
    before = cells_of(ready_engine("pytorch", work), 1)
    found = told(before)
    assert found.limit == "runtime overhead" and found.changes[0].kind == "engine"
