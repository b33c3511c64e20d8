"""`diagnose` on recorded runs from an NVIDIA H200."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate.cli.judging import diagnose_cells
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.diagnosis import Bottleneck, Diagnosis
from bedplate.values.run import Run

RUNS = Path(__file__).parents[1] / "captures" / "runs"


def read_run(name: str) -> Run:
    return from_json(Run, lzma.decompress((RUNS / f"h200-{name}.json.xz").read_bytes()))


def diagnose_run(run: Run) -> Bottleneck:
    (found,) = diagnose_cells(run.cells, {run.id: run.environment}, None, run.models).bottlenecks
    return found


def find_evidence(found: Bottleneck, words: str) -> tuple[str, str | None]:
    return next((one.text, one.limit) for one in found.evidence if words in one.text)


def test_pytorch_is_limited_by_runtime_overhead_at_every_batch_size() -> None:
    found = diagnose_run(read_run("pytorch"))
    assert [load.limit for load in found.loads] == ["runtime overhead"] * 3
    # 14.4 GB at 4.51 TB/s take 3.2 ms; a step takes 41.
    assert all((load.bandwidth_share or 1) < 0.1 and 3 < (load.floor_ms or 0) < 4 for load in found.loads)
    assert find_evidence(found, "of the host's cores") == (
        "the engine's processes kept 1.0 of the host's cores busy", "runtime overhead"
    )  # fmt: skip
    # 512 tokens add 4 ms to a step of 42 ms. Most of their computation overlaps with the step, so no rate is reported.
    assert (
        "adds 4" in find_evidence(found, "prefill of 512")[0]
        and "FLOP" not in find_evidence(found, "prefill of 512")[0]
    )
    assert found.changes[0].kind == "engine" and found.predictions[0].gain.value > 1.4


def test_llama_cpp_goes_from_runtime_overhead_to_compute_with_more_requests() -> None:
    found = diagnose_run(read_run("llama"))
    assert [load.limit for load in found.loads] == ["runtime overhead", "runtime overhead", "compute"]
    reading = [sum(one.share for one in load.spent if one.limit == "memory bandwidth") for load in found.loads]
    assert reading == sorted(reading, reverse=True) and reading[0] > 0.2
    assert not found.loads[-1].clear, "runtime overhead is close behind"


def test_exllamav3_with_sixteen_requests_is_limited_by_its_host_processes() -> None:
    found = diagnose_run(read_run("exl3"))
    assert found.limit == "runtime overhead"
    assert find_evidence(found, "reads 3.59 GB of weights")[1] is None, "four bits a weight, not sixteen"
    assert find_evidence(found, "of the host's cores") == (
        "the engine's processes kept 7.4 of the host's cores busy", "runtime overhead"
    )  # fmt: skip
    # An added stream costs 30 times as much as a prompt token, so compute is not what grows.
    assert find_evidence(found, "for each added stream")[1] == "runtime overhead"


@pytest.mark.parametrize("source", ["run", "option", "none"])
def test_a_run_without_model_facts_needs_the_model_option(source: str, tmp_path: Path) -> None:
    run = read_run("pytorch")
    if source != "run":
        run = replace_fields(run, models=())
    (tmp_path / "run.json").write_text(to_json(run))
    options = ("--model", "meta-llama/Llama-3.1-8B") if source == "option" else ()
    done = invoke("diagnose", str(tmp_path / "run.json"), "--json", *options)
    assert done.code == 0, done.err
    (found,) = from_json(Diagnosis, done.out).bottlenecks
    assert found.limit == (None if source == "none" else "runtime overhead")
    assert any("size of llama-8b-bf16 is unknown" in one for one in found.unknown) == (source == "none")
