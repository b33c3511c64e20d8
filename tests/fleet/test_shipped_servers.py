"""Engines without a server of their own, behind bedplate's: real answers, streams, counts, crowds and cancelling."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S, wait_for
from tests.fleet import checks
from tests.fleet.conftest import Running, Start
from tests.fleet.embedding import check_vectors, compute_vectors

from bedplate.engines import Engine, get_engine
from bedplate.facts.hardware import probe
from bedplate.facts.model_folder import read_folder
from bedplate.measure.prefixes import choose_spread
from bedplate.measure.reference import read_shipped_references
from bedplate.run.builtin import FILE_SHA256
from bedplate.run.environments import EngineEnvironment
from bedplate.run.models import find_local_model
from bedplate.values import Model, Plan, Preparation, Workload

WORK = Workload(concurrency=8, context_tokens=2048)
CHECKED = int(os.environ.get("BEDPLATE_FLEET_PREFIXES", "100"))
Served = tuple[str, Plan, Running]
"""An engine and its weights in words, the plan that chose them, and its server."""
SUMS = [f"What is {n} plus {n}?" for n in range(1, 9)]


def plan(one: Engine, model: Model, label: str | None = None, workload: Workload = WORK) -> Plan:
    hardware = probe()
    target = one.find_target(hardware)
    assert target is not None and one.refuse(hardware, model, workload) is None
    form = next(form for form in one.list_weights(target, model, workload) if label in (None, form.label))
    settings = one.settle(hardware, model, workload)
    return Plan(
        engine=one.id, engine_version=one.version or "", model=model, workload=workload, weights=form, settings=settings
    )


def prepare(chosen: Plan, step: Preparation, environment: EngineEnvironment, made: Path) -> Model:
    """Runs a step of a plan in the engine's environment, and reads what it made."""
    result = made / step.where
    if not result.exists():
        program, *arguments = step.argv
        bin_folder = environment.interpreter.parent
        first = [] if program == "python" else [str(bin_folder / program)]
        subprocess.run([str(environment.interpreter), *first, *arguments], cwd=made, check=True)
        assert (result / "model.onnx").exists()
    return read_folder(result, name=chosen.model.name)


@pytest.fixture(scope="module", params=["onnxruntime F32", "onnxruntime INT4", "mistral.rs F32", "mistral.rs Q8_0"])
def served(
    request: pytest.FixtureRequest, start_engine: Start, smollm: Path, onnx_environment: EngineEnvironment, made: Path
) -> Iterator[Served]:
    name, _, label = str(request.param).partition(" ")
    one, folder = get_engine(name), read_folder(smollm, name="SmolLM2-135M-Instruct")
    chosen = plan(one, folder, label)
    steps = [step for step in one.launch(chosen, 1).prepare if step.kind == "convert"]
    given = plan(one, prepare(chosen, steps[0], onnx_environment, made)) if steps else chosen
    running = start_engine(one, given)
    yield str(request.param), chosen, running
    assert running.process.stdin is not None
    running.process.stdin.close()
    running.process.stdin = None
    assert running.process.wait(HANG_S) == 0  # it exits when its stdin closes


def test_it_knows_the_capital_of_france(served: Served) -> None:
    checks.knows_the_capital(served[2].at)
    checks.counts_tokens(served[2].at)


def test_stream_has_the_same_text(served: Served) -> None:
    checks.streams_what_it_answers(served[2].at)


def test_eight_concurrent_answers_equal_one(served: Served) -> None:
    checks.answers_four_at_once(served[2].at, SUMS)


def test_disconnect_cancels_the_request(served: Served) -> None:
    running = served[2]
    stream = running.at.chat("Tell a long story.", stream=True, max_tokens=1500)
    next(iter(stream))
    assert running.metric("requests_running") == 1
    stream.close()
    wait_for(lambda: running.metric("requests_running") == 0, "the request to be cancelled")
    before = running.metric("generation_tokens_total")
    assert running.at.chat(checks.PARIS).choices
    assert running.metric("generation_tokens_total") - before <= checks.FEW_TOKENS


def test_stop_strings_and_limits_end_answers(served: Served) -> None:
    at = served[2].at
    asked: dict[str, Any] = {"model": at.model, "prompt": "The capital of France is", "temperature": 0}
    whole = at.client.completions.create(**asked, max_tokens=12).choices[0].text
    assert whole.startswith(" ")  # nothing is trimmed
    stop = whole[5:8]
    cut = at.client.completions.create(**asked, max_tokens=12, stop=[stop]).choices[0]
    assert cut.text == whole.partition(stop)[0] and cut.finish_reason == "stop"
    short = at.chat("Tell a story.", max_tokens=5)
    assert short.usage.completion_tokens == 5 and short.choices[0].finish_reason == "length"


def test_answer_matches_a_schema(served: Served) -> None:
    checks.fits_a_schema(served[2].at)


def test_returns_logprobs(served: Served) -> None:
    at = served[2].at
    said = at.chat(checks.PARIS, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(said) == 4 and all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in said)
    assert all(one.token == one.top_logprobs[0].token for one in said)  # greedy


def test_a_seed_repeats_an_answer(served: Served) -> None:
    name, _, running = served
    if name.startswith("mistral.rs"):
        with pytest.raises(Exception, match="takes no seed"):
            running.at.chat("Tell a story.", temperature=1, seed=7)
        return
    first, again, other = (
        checks.read_text(running.at.chat("Tell a story.", temperature=1, seed=seed)) for seed in (7, 7, 8)
    )
    assert first == again != other


def test_next_tokens_agree_with_pytorch(served: Served) -> None:
    name, chosen, running = served
    (reference,) = [one for one in read_shipped_references() if one.sha256 == FILE_SHA256]
    found = checks.compare_next_tokens(running.at, chosen, reference, choose_spread(reference.list_known(), CHECKED))
    print(f"{name}: {found.agreed} of {found.answered} next tokens as PyTorch in float32")
    assert found.verdict == "ok", found


def test_mistralrs_answers_from_a_gguf_file(start_engine: Start, builtin_gguf: Path) -> None:
    model = find_local_model(str(builtin_gguf))
    assert model is not None
    running = start_engine(get_engine("mistral.rs"), plan(get_engine("mistral.rs"), model))
    checks.counts_tokens(running.at)


def test_embeddings_agree_with_pytorch(
    start_engine: Start, minilm: Path, onnx_environment: EngineEnvironment, made: Path
) -> None:
    one, work = get_engine("onnxruntime"), Workload(task="embed", concurrency=4)
    chosen = plan(one, read_folder(minilm, name="all-MiniLM-L6-v2"), workload=work)
    (step,) = [step for step in one.launch(chosen, 1).prepare if step.kind == "convert"]
    model = prepare(chosen, step, onnx_environment, made)
    running = start_engine(one, plan(one, model, workload=work))
    check_vectors(running.at, compute_vectors(onnx_environment.interpreter, minilm))
