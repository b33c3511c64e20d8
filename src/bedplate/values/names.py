"""What engines and orchestrators are called: one id for each, and the names that people use for it."""

from __future__ import annotations

import re

ENGINE_IDS = (
    "llama.cpp", "mlx", "exllamav2", "exllamav3", "vllm", "sglang", "tensorrt-llm", "tgi", "onnxruntime", "pytorch",
    "mistral.rs", "ollama", "lmdeploy",
)  # fmt: skip
ORCHESTRATOR_IDS = ("dynamo", "ray", "kubernetes")

# Without what is not a letter or digit. Programs that are another one's shell count as what runs inside of them.
SPELLINGS = {
    "llama.cpp": (
        "ggml", "llamaserver", "llamacppserver", "llamacpppython", "xllamacpp", "llamafile", "koboldcpp", "lmstudio",
        "gpt4all",
    ),
    "mlx": ("mlxlm", "mlxlmserver", "mlxvlm", "applemlx"),
    "exllamav2": ("exllama2", "exl2"),
    "exllamav3": ("exllama3", "exl3"),
    "vllm": ("vllmserve", "vllmv0", "vllmv1", "vllmopenai"),
    "sglang": ("sgl", "sglangruntime"),
    "tensorrt-llm": ("trtllm", "trtllmserve", "tensorrt", "nvidiatensorrtllm", "tensorrtllmbackend"),
    "tgi": ("textgenerationinference", "huggingfacetgi", "hftgi", "huggingfacetextgenerationinference"),
    "onnxruntime": ("onnx", "ort", "onnxrt", "ortgenai", "onnxruntimegenai", "microsoftonnxruntime"),
    "pytorch": ("torch", "transformers", "hftransformers", "huggingfacetransformers", "pytorcheager", "torchserve"),
    "mistral.rs": ("mistralrsserver",),
    "ollama": ("ollamaserve", "ollamaserver"),
    "lmdeploy": ("turbomind", "lmdeployturbomind", "internlmlmdeploy"),
    "dynamo": ("nvidiadynamo", "aidynamo"),
    "ray": ("rayserve", "rayserv", "rayllm", "rayservellm", "kuberay"),
    "kubernetes": ("k8s", "kserve", "openshift", "eks", "gke", "aks"),
}  # fmt: skip
VERSION = re.compile(r"[\s@=_v-]*[0-9]+\.[0-9].*$|[\s@=_-]+b[0-9]{3,}$|\s*\([^()]*\)\s*$")
"""And what else follows a name: llama.cpp's builds are numbers without a dot; in brackets stands how it was built."""
GENERATION = re.compile(r"^\s*(exllama)[\s_v-]*([23])\.[0-9]", re.IGNORECASE)
"""Of ExLlama the first part of the version is part of the name: the two share no format."""


def engine_id(text: str) -> str | None:
    """The id of the engine that `text` names, in any usual spelling and with a version if they like."""
    found = _known(text)
    return found if found in ENGINE_IDS else None


def orchestrator_id(text: str) -> str | None:
    found = _known(text)
    return found if found in ORCHESTRATOR_IDS else None


def nearest_names(text: str, count: int = 3) -> tuple[str, ...]:
    """The ids whose names look most like `text`, best first."""
    import difflib

    close = difflib.get_close_matches(_plain(text), _BY_NAME, n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(_BY_NAME[name] for name in close))[:count]


def _known(text: str) -> str | None:
    if generation := GENERATION.match(text):
        return f"{generation[1].lower()}v{generation[2]}"
    return _BY_NAME.get(_plain(text)) or _BY_NAME.get(_plain(VERSION.sub("", text[:200])))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text[:200].lower())


_BY_NAME = {_plain(name): id for id in (*ENGINE_IDS, *ORCHESTRATOR_IDS) for name in (id, *SPELLINGS[id])}
