"""Every target fetches the published weights that the plan names."""

from __future__ import annotations

import pytest
from tests.commands import invoke

FILE = "Meta-Llama-3.1-8B-Instruct-Q6_K.gguf"
GGUF = ["plan", "meta-llama/Llama-3.1-8B-Instruct", "--hardware", "RTX 4060", "--engine", "llama.cpp", "--emit"]
FP8 = ["plan", "Qwen/Qwen3-32B", "--hardware", "L40S", "--concurrency", "16", "--emit"]


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_one_gguf_file_is_fetched(target: str) -> None:
    text = invoke(*GGUF, target).out
    assert f"allow_patterns=['{FILE}']" in text
    assert f"/models/Meta-Llama-3.1-8B-Instruct-GGUF/{FILE}" in text
    assert "convert" not in text.partition("services:")[2]


def test_the_script_fetches_the_file_once() -> None:
    text = invoke(*GGUF, "command").out
    folder = "Meta-Llama-3.1-8B-Instruct-GGUF"
    assert f"step once {folder} uvx" in text and f"--model {folder}/{FILE}" in text
    assert "convert_hf_to_gguf" not in text


@pytest.mark.parametrize("target", ["compose", "kubernetes", "dynamo", "ray"])
def test_the_repository_is_fetched_and_the_name_stays(target: str) -> None:
    text = invoke(*FP8, target).out
    assert "get('Qwen/Qwen3-32B-FP8', local_dir='/models/Qwen3-32B-FP8')" in text
    assert "qwen/qwen3-32b" in text


def test_the_script_serves_the_repository() -> None:
    assert "exec vllm serve Qwen/Qwen3-32B-FP8" in invoke(*FP8, "command").out
