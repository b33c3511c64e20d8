"""Plans over the breadth of models, quantizations, layouts and settings, for the tests of the serving engines."""

from __future__ import annotations

from hypothesis import strategies as st

from bedplate.engines import Engine, Target
from bedplate.facts.chips import chips
from bedplate.facts.known_models import find_model
from bedplate.facts.simulated import simulate
from bedplate.values import Hardware, Model, Parallelism, Plan, Settings, Weights, Workload, replaced

MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.2", "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking", "zai-org/GLM-4.6",
    "MiniMaxAI/MiniMax-M2", "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2.5-72B-Instruct",
    "nvidia/DeepSeek-V3.2-NVFP4", "google/gemma-4-31B-it", "Qwen/Qwen3-Coder-Next",
)  # fmt: skip


def model(name: str, folder: bool = False) -> Model:
    found = find_model(name)
    return replaced(found, files=("/models/it is here/model-00001-of-2.safetensors",)) if folder else found
