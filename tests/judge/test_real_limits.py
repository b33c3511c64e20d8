"""Bottlenecks of a real llama.cpp: too few slots, and long prompts.

The predicted gain is not checked here, because other processes may use this machine; tests/fleet/test_removed_limits.py
checks it.
"""

from __future__ import annotations

import pytest
from tests.judge.real_engine import measure_cells, ready_engine

from bedplate.judge.diagnose import build_roofline, diagnose_subject
from bedplate.run.models import find_known_model
from bedplate.values import Workload
from bedplate.values.diagnosis import Bottleneck
from bedplate.values.run import Cell, Load

pytestmark = [
    pytest.mark.measures,
    pytest.mark.timeout(900),
    # The fixtures before `one_core` install with all cores.
    pytest.mark.usefixtures("builtin_gguf", "llama_environment", "one_core"),
]


def find_bottleneck(cells: list[Cell]) -> Bottleneck:
    subject = cells[-1].subject
    return diagnose_subject(cells, build_roofline(subject, find_known_model(subject.model), None))


def make_loads(*in_flight: int, prompt: int, output: int) -> list[Load]:
    return [Load(concurrency=count, prompt_tokens=prompt, output_tokens=output) for count in in_flight]


def test_too_few_slots_make_the_scheduler_the_bottleneck() -> None:
    ready = ready_engine("llama.cpp", Workload(concurrency=1, prompt_tokens=16, output_tokens=24), slots=1, threads=1)
    found = find_bottleneck(measure_cells(ready, make_loads(1, 6, prompt=16, output=24)))
    assert found.limit == "scheduler" and found.changes[0].flag == "--parallel 6"
    assert any("requests wait in the engine" in one.text and one.limit == "scheduler" for one in found.evidence)
    assert [one.metric for one in found.predictions] == ["output_tok_s", "ttft_ms"]
    assert found.predictions[1].gain.value > 1.5


def test_long_prompts_make_compute_the_bottleneck() -> None:
    ready = ready_engine("llama.cpp", Workload(concurrency=1, prompt_tokens=240, output_tokens=4), slots=1, threads=1)
    found = find_bottleneck(measure_cells(ready, make_loads(1, prompt=240, output=4)))
    assert found.limit == "compute"
    assert "prompts" in found.changes[0].text and found.predictions[0].gain.value > 1.5
