"""Embeddings, rerank, score and classify on vLLM's CPU build through the gateway, compared with PyTorch.

The models are those of `tests/e2e/test_tasks_real.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Served, have_ended, post_json, start_serve, wait_for
from tests.e2e.task_models import compute_relevance, make_classifier
from tests.e2e.test_tasks_real import DOCUMENTS, LABELS, NEAR, QUERY, count_tokens
from tests.fleet.embedding import TEXTS, compute_vectors
from tests.fleet.serving import START_LIMIT_S

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment, make_environment

pytestmark = pytest.mark.timeout(2 * START_LIMIT_S)
PAIRS = [[QUERY, document] for document in DOCUMENTS]
Start = Callable[[Path], Served]


@pytest.fixture(scope="module")
def vllm(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("vllm"))


@pytest.fixture
def start(vllm: EngineEnvironment) -> Iterator[Start]:
    running: list[Served] = []

    def start_one(model: Path) -> Served:
        served = start_serve(str(model), "--engine", "vllm")
        running.append(served)
        assert served.endpoint, "".join(served.stderr)
        return served

    yield start_one
    for served in running:
        below = served.list_descendants()
        assert served.stop() == 0
        wait_for(lambda below=below: have_ended(below), "the engine's processes to end")  # type: ignore[misc]


def ask(served: Served, path: str, body: dict[str, Any], model: str) -> Any:
    """The answer, whose tokens are those that the gateway counts."""
    before = count_tokens(served, model)
    status, found = post_json(served.root + path, {"model": model, **body})
    assert status == 200, found
    assert found["usage"]["prompt_tokens"] == count_tokens(served, model) - before > 0
    return found


def assert_refused(served: Served, path: str, body: dict[str, Any], model: str) -> None:
    status, found = post_json(served.root + path, {"model": model, **body})
    assert status == 400 and found["error"]["type"] == "invalid_request_error", (status, found)


def test_vllm_embeddings_and_their_scores_agree_with_pytorch(
    start: Start, minilm: Path, vllm: EngineEnvironment, tmp_path: Path
) -> None:
    model = tmp_path / "vllm-embedder"
    model.symlink_to(minilm)
    known = compute_vectors(vllm.interpreter, model)
    served = start(model)
    found = ask(served, "/v1/embeddings", {"input": list(TEXTS)}, model.name)
    for one, expected in zip(found["data"], known.vectors, strict=True):
        assert max(abs(a - b) for a, b in zip(one["embedding"], expected, strict=True)) < NEAR
    assert found["usage"]["prompt_tokens"] == known.tokens
    first, *others = TEXTS
    found = ask(served, "/score", {"text_1": first, "text_2": others}, model.name)
    for one, vector in zip(found["data"], known.vectors[1:], strict=True):
        assert math.isclose(one["score"], sum(map(float.__mul__, known.vectors[0], vector)), abs_tol=NEAR)
    assert_refused(served, "/v1/embeddings", {"input": "long " * 600}, model.name)
    assert_refused(served, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, model.name)


def test_vllm_rerank_and_score_agree_with_pytorch(
    start: Start, minilm: Path, vllm: EngineEnvironment, tmp_path: Path
) -> None:
    model = make_classifier(minilm, tmp_path / "vllm-reranker", ("LABEL_0",))
    known = compute_relevance(vllm.interpreter, model, PAIRS)
    expected = [row[0] for row in known["probabilities"]]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    served = start(model)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = ask(served, path, {"query": QUERY, "documents": DOCUMENTS}, model.name)
        assert [one["index"] for one in found["results"]] == order
        for one in found["results"]:
            assert math.isclose(one["relevance_score"], expected[one["index"]], abs_tol=NEAR)
        assert found["usage"]["prompt_tokens"] == known["tokens"]
    few = ask(served, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}, model.name)
    assert [one["index"] for one in few["results"]] == order[:2]
    for path in ("/score", "/v1/score"):
        found = ask(served, path, {"text_1": QUERY, "text_2": DOCUMENTS}, model.name)
        for one, score in zip(found["data"], expected, strict=True):
            assert math.isclose(one["score"], score, abs_tol=NEAR)
    assert_refused(served, "/v1/rerank", {"query": QUERY, "documents": ["long " * 600]}, model.name)
    assert_refused(served, "/v1/embeddings", {"input": "a"}, model.name)


def test_vllm_classify_agrees_with_pytorch(start: Start, minilm: Path, vllm: EngineEnvironment, tmp_path: Path) -> None:
    model = make_classifier(minilm, tmp_path / "vllm-classifier", LABELS)
    known = compute_relevance(vllm.interpreter, model, [[one] for one in DOCUMENTS])
    served = start(model)
    found = ask(served, "/classify", {"input": DOCUMENTS}, model.name)
    for one, expected in zip(found["data"], known["probabilities"], strict=True):
        assert all(math.isclose(a, b, abs_tol=NEAR) for a, b in zip(one["probs"], expected, strict=True))
        assert one["label"] == LABELS[expected.index(max(expected))]
    assert found["usage"]["prompt_tokens"] == known["tokens"]
