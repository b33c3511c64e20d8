"""What `diagnose` says of runs that bedplate measured on an NVIDIA H200, kept as they were."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate.cli.judging import diagnosis_of
from bedplate.values import from_json, replaced, to_json
from bedplate.values.diagnosis import Bottleneck, Diagnosis
from bedplate.values.run import Run

RUNS = Path(__file__).parents[1] / "captures" / "runs"


def kept(name: str) -> Run:
    return from_json(Run, lzma.decompress((RUNS / f"h200-{name}.json.xz").read_bytes()))


def told(run: Run) -> Bottleneck:
    (found,) = diagnosis_of(run.cells, {run.id: run.environment}, None, run.models).bottlenecks
    return found


def evidence(found: Bottleneck, words: str) -> tuple[str, str | None]:
    return next((one.text, one.limit) for one in found.evidence if words in one.text)


def test_pytorch_spends_a_step_on_its_own_runtime_whatever_the_batch() -> None:
    found = told(kept("pytorch"))
    assert [load.limit for load in found.loads] == ["runtime overhead"] * 3
    # 14.4 GB at 4.51 TB/s take 3.2 ms; a step takes 41.
    assert all((load.bandwidth_share or 1) < 0.1 and 3 < (load.floor_ms or 0) < 4 for load in found.loads)
    assert evidence(found, "of the host's cores") == (
        "the engine's processes kept 1.0 of the host's cores busy", "runtime overhead"
    )  # fmt: skip
    # 512 tokens add 4 ms to a step of 42: that is not what computing them takes, and no rate is made of it.
    assert "adds 4" in evidence(found, "a prompt of 512")[0] and "FLOP" not in evidence(found, "a prompt of 512")[0]
    assert found.changes[0].kind == "engine" and found.predictions[0].gain.value > 1.4


def test_llama_cpp_goes_from_its_runtime_to_computing_as_requests_are_added() -> None:
    found = told(kept("llama"))
    assert [load.limit for load in found.loads] == ["runtime overhead", "runtime overhead", "compute"]
    reading = [sum(one.share for one in load.spent if one.limit == "memory bandwidth") for load in found.loads]
    assert reading == sorted(reading, reverse=True) and reading[0] > 0.2
    assert not found.loads[-1].clear, "runtime overhead is close behind"


def test_exllamav3_with_sixteen_is_held_up_by_its_host() -> None:
    found = told(kept("exl3"))
    assert found.limit == "runtime overhead"
    assert evidence(found, "reads 3.59 GB of weights")[1] is None, "four bits a weight, not sixteen"
    assert evidence(found, "of the host's cores") == (
        "the engine's processes kept 7.4 of the host's cores busy", "runtime overhead"
    )  # fmt: skip
    # A further stream costs 30 times what a token of a prompt costs: it is not computing that grows.
    assert evidence(found, "for each further one")[1] == "runtime overhead"


@pytest.mark.parametrize("told_by", ["run", "option", "nobody"])
def test_a_run_without_its_model_needs_somebody_to_say_what_it_was(told_by: str, tmp_path: Path) -> None:
    run = kept("pytorch")
    if told_by != "run":
        run = replaced(run, models=())
    (tmp_path / "run.json").write_text(to_json(run))
    options = ("--model", "meta-llama/Llama-3.1-8B") if told_by == "option" else ()
    done = invoke("diagnose", str(tmp_path / "run.json"), "--json", *options)
    assert done.code == 0, done.err
    (found,) = from_json(Diagnosis, done.out).bottlenecks
    assert found.limit == (None if told_by == "nobody" else "runtime overhead")
    assert any("sizes of llama-8b-bf16 are not known" in one for one in found.unknown) == (told_by == "nobody")
