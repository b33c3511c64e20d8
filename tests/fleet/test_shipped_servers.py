"""Engines without a server of their own, behind bedplate's: real answers, streams, counts, crowds and cancelling."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import wait_for
from tests.fleet.conftest import Running, Start

from bedplate.engines import Engine, engine
from bedplate.facts.hardware import probe
from bedplate.facts.model_folder import read_folder
from bedplate.run.environments import Environment
from bedplate.run.models import local_model
from bedplate.values import Model, Plan, Preparation, Workload

QUESTION = "What is the capital of France?"
WORK = Workload(concurrency=8, context_tokens=2048)
CHECKED = int(os.environ.get("BEDPLATE_FLEET_PREFIXES", "100"))


def plan(one: Engine, model: Model, label: str | None = None, workload: Workload = WORK) -> Plan:
    hardware = probe()
    target = one.target(hardware)
    assert target is not None and one.refuse(hardware, model, workload) is None
    form = next(form for form in one.weights(target, model, workload) if label in (None, form.label))
    settings = one.settle(hardware, model, workload)
    return Plan(
        engine=one.id, engine_version=one.version or "", model=model, workload=workload, weights=form, settings=settings
    )


def prepare(chosen: Plan, step: Preparation, environment: Environment, made: Path) -> Model:
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
    request: pytest.FixtureRequest, start_engine: Start, smollm: Path, onnx_environment: Environment, made: Path
) -> Iterator[tuple[str, Running]]:
    name, _, label = str(request.param).partition(" ")
    one, folder = engine(name), read_folder(smollm, name="SmolLM2-135M-Instruct")
    chosen = plan(one, folder, label)
    steps = [step for step in one.launch(chosen, 1).prepare if step.kind == "convert"]
    if steps:
        chosen = plan(one, prepare(chosen, steps[0], onnx_environment, made))
    running = start_engine(one, chosen)
    yield str(request.param), running
    assert running.process.stdin is not None
    running.process.stdin.close()
    running.process.stdin = None
    assert running.process.wait(10) == 0  # it ends with whoever holds its stdin


def chat(running: Running, question: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    more = {"temperature": 0, "max_tokens": 24, **more}
    return running.client().chat.completions.create(model=running.name, messages=messages, **more)


def test_it_knows_the_capital_of_france(served: tuple[str, Running]) -> None:
    answer = chat(served[1], QUESTION)
    assert "capital of France is Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens == 37  # as PyTorch and llama.cpp count them
    if answer.choices[0].finish_reason == "stop":
        assert answer.usage.completion_tokens == 8


def test_a_stream_says_the_same(served: tuple[str, Running]) -> None:
    whole = chat(served[1], "Name three colours.")
    chunks = list(chat(served[1], "Name three colours.", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    assert len(chunks) > 10  # token by token


def test_eight_at_once_answer_as_one(served: tuple[str, Running]) -> None:
    _, running = served
    questions = [f"What is {n} plus {n}?" for n in range(1, 9)]
    alone = [chat(running, question) for question in questions]
    together: dict[int, Any] = {}

    def ask(number: int) -> None:
        together[number] = chat(running, questions[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n].choices[0].message.content for n in range(8)] == [
        one.choices[0].message.content for one in alone
    ]
    assert [together[n].usage for n in range(8)] == [one.usage for one in alone]


def test_a_client_that_goes_stops_its_request(served: tuple[str, Running]) -> None:
    _, running = served
    stream = chat(running, "Tell a long story.", stream=True, max_tokens=1500)
    next(iter(stream))
    assert running.metric("requests_running") == 1
    stream.close()
    wait_for(lambda: running.metric("requests_running") == 0, "the request to be cancelled")
    before = running.metric("generation_tokens_total")
    assert chat(running, QUESTION).choices and running.metric("generation_tokens_total") - before <= 24


def test_stop_and_limits(served: tuple[str, Running]) -> None:
    _, running = served
    asked: dict[str, Any] = {"model": running.name, "prompt": "The capital of France is", "temperature": 0}
    whole = running.client().completions.create(**asked, max_tokens=12).choices[0].text
    assert whole.startswith(" ")  # nothing is trimmed
    stop = whole[5:8]
    cut = running.client().completions.create(**asked, max_tokens=12, stop=[stop]).choices[0]
    assert cut.text == whole.partition(stop)[0] and cut.finish_reason == "stop"
    short = chat(running, "Tell a story.", max_tokens=5)
    assert short.usage.completion_tokens == 5 and short.choices[0].finish_reason == "length"


def test_an_answer_that_fits_a_schema(served: tuple[str, Running]) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = chat(served[1], f"{QUESTION} Answer as JSON.", response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_logprobs(served: tuple[str, Running]) -> None:
    said = chat(served[1], QUESTION, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(said) == 4 and all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in said)
    assert all(one.token == one.top_logprobs[0].token for one in said)  # greedy


def test_a_seed_repeats_an_answer(served: tuple[str, Running]) -> None:
    name, running = served
    if name.startswith("mistral.rs"):
        with pytest.raises(Exception, match="takes no seed"):
            chat(running, "Tell a story.", temperature=1, seed=7)
        return
    first, again, other = (
        chat(running, "Tell a story.", temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8)
    )
    assert first == again != other


def test_next_tokens_are_pytorchs(served: tuple[str, Running], smollm: Path) -> None:
    """What differs is what quantization changes; 16 and more bits change hardly anything."""
    name, running = served
    least = {"onnxruntime F32": 0.99, "mistral.rs F32": 0.99, "mistral.rs Q8_0": 0.9, "onnxruntime INT4": 0.5}[name]
    known = json.loads((smollm / "next-tokens.json").read_text())
    known = known[:: max(1, len(known) // CHECKED)]
    agree = 0
    for text, length, expected in known:
        body = {"prompt": text, "max_tokens": 1, "temperature": 0}
        answer = running.ask("/v1/completions", body)
        assert answer["usage"]["prompt_tokens"] == length  # the same tokenizer
        agree += answer["choices"][0]["text"] == expected
    print(f"{name}: {agree} of {len(known)} next tokens as PyTorch in float32")
    assert agree >= least * len(known)


def test_mistralrs_answers_from_a_gguf_file(start_engine: Start, builtin_gguf: Path) -> None:
    model = local_model(str(builtin_gguf))
    assert model is not None
    running = start_engine(engine("mistral.rs"), plan(engine("mistral.rs"), model))
    answer = chat(running, QUESTION, max_tokens=3)
    assert answer.usage.prompt_tokens == 37 and answer.usage.completion_tokens == 3


def test_vectors_are_pytorchs(
    start_engine: Start, minilm: Path, onnx_environment: Environment, made: Path, tmp_path: Path
) -> None:
    one, work = engine("onnxruntime"), Workload(task="embed", concurrency=4)
    chosen = plan(one, read_folder(minilm, name="all-MiniLM-L6-v2"), workload=work)
    (step,) = [step for step in one.launch(chosen, 1).prepare if step.kind == "convert"]
    model = prepare(chosen, step, onnx_environment, made)
    running = start_engine(one, plan(one, model, workload=work))
    texts = ["A cat sits on the mat.", "猫", "Inference engines differ, but vectors should not. " * 12]
    found = running.client().embeddings.create(model=running.name, input=texts, encoding_format="float")
    script = tmp_path / "vectors.py"
    shutil.copy(Path(__file__).with_name("vectors.py"), script)
    done = subprocess.run(
        [str(onnx_environment.interpreter), str(script), str(minilm), json.dumps(texts)],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    for vector, known in zip(found.data, expected["vectors"], strict=True):
        assert max(abs(a - b) for a, b in zip(vector.embedding, known, strict=True)) < 1e-5
    assert found.usage.prompt_tokens == expected["tokens"]
