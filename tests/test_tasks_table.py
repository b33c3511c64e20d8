"""The table of tasks by engine: it lists every engine, agrees with their tasks, and each tested cell has a test."""

from __future__ import annotations

import re
from pathlib import Path

from bedplate.engines import load_engines

ROOT = Path(__file__).parents[1]
FILES = (
    "e2e/test_tasks_real.py", "e2e/test_images_real.py", "fleet/test_speech_real.py", "e2e/test_lora_real.py",
    "fleet/test_lora_pytorch.py", "fleet/test_lora_vllm.py", "fleet/test_pooling_vllm.py",
)  # fmt: skip
REAL = "".join((ROOT / "tests" / name).read_text(encoding="utf-8") for name in FILES)
TESTED = {
    ("llama.cpp", "embeddings"): ("test_embeddings_agree", "gguf-embedder"),
    ("llama.cpp", "rerank"): ("test_rerank_agrees", "gguf-reranker"),
    ("llama.cpp", "images"): ("test_images_reach_the_model", "tiny-vlm"),
    ("onnxruntime", "embeddings"): ("test_embeddings_agree", "onnx-embedder"),
    ("onnxruntime", "rerank"): ("test_rerank_agrees", "onnx-reranker"),
    ("onnxruntime", "score"): ("test_score_of", "onnx-reranker"),
    ("onnxruntime", "classify"): ("test_classify_agrees", "onnx-classifier"),
    ("pytorch", "transcriptions"): ("test_transcriptions_agree", "tiny-whisper"),
    ("llama.cpp", "LoRA"): ("test_adapters_are_models", "smollm2-135m-instruct"),
    ("pytorch", "LoRA"): ("test_pytorch_loads_and_unloads", "tiny-llama"),
    ("vllm", "embeddings"): ("test_vllm_embeddings_and_their_scores", "vllm-embedder"),
    ("vllm", "rerank"): ("test_vllm_rerank_and_score", "vllm-reranker"),
    ("vllm", "score"): ("test_vllm_rerank_and_score", "vllm-reranker"),
    ("vllm", "classify"): ("test_vllm_classify_agrees", "vllm-classifier"),
    ("vllm", "LoRA"): ("test_vllm_loads_and_unloads", "smollm2-135m-instruct"),
}
TASKS = {
    "embeddings": "embed", "rerank": "classify", "score": "classify", "classify": "classify",
    "transcriptions": "transcribe",
}  # fmt: skip


def read_table() -> dict[tuple[str, str], str]:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines = page.split("## Tasks by engine")[1].split("\n## ")[0].splitlines()
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines if line.startswith("|")]
    head, _, *body = rows
    return {(row[0], name): cell for row in body for name, cell in zip(head[1:], row[1:], strict=True)}


def test_table_lists_every_engine() -> None:
    assert {engine for engine, _ in read_table()} == set(load_engines())


def test_cells_agree_with_the_tasks_of_the_engines() -> None:
    for (engine, api), cell in read_table().items():
        assert cell in ("tested", "forwarded", "–")
        one = load_engines()[engine]
        if api == "images":
            sees = one.reads_projectors or (one.server_features is not None and one.server_features.vision)
            assert sees == (cell != "–"), engine
            continue
        if api == "LoRA":
            assert (one.adapters is not None and one.adapters.selects is not None) == (cell != "–"), engine
            continue
        has_task = TASKS[api] in one.tasks
        assert has_task or cell == "–", f"{engine} has no task for {api}"
        if api in ("embeddings", "transcriptions"):
            assert has_task == (cell != "–"), f"{engine} has {api}, and the table does not say so"


def test_each_tested_cell_has_a_test() -> None:
    assert {place for place, cell in read_table().items() if cell == "tested"} == set(TESTED)
    for test, model in TESTED.values():
        assert f"def {test}" in REAL and model in REAL
