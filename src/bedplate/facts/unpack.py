"""The Hugging Face folder that a GGUF file can be dequantized to, for engines that cannot load GGUF."""

from __future__ import annotations

from bedplate.values.model import UNPACKED, Model
from bedplate.values.record import replace_fields

ARCHITECTURES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text", "starcoder2": "starcoder2",
    "stablelm": "stablelm", "falcon": "falcon", "gpt2": "gpt2", "bloom": "bloom", "mamba": "mamba",
}  # fmt: skip
"""From the name in a GGUF header to Transformers' name, for the architectures in its `GGUF_CONFIG_MAPPING`."""


def make_dequantized(model: Model) -> Model | None:
    """The same weights as 16-bit safetensors; `None` if Transformers does not know the architecture.

    Dequantization does not restore lost precision, so the answers stay those of the GGUF file.
    """
    architecture = ARCHITECTURES.get(model.architecture)
    if model.format != "gguf" or architecture is None:
        return None
    parts = tuple(replace_fields(part, bytes=2 * part.parameters) for part in model.parts)
    return replace_fields(
        model,
        format="safetensors",
        architecture=architecture,
        files=(),
        origin=f"{UNPACKED} {model.quantization} GGUF",
        quantization="BF16",
        quantization_details=None,
        tensor_groups=(),
        parts=parts,
        weight_bytes=2 * model.parameters,
    )
