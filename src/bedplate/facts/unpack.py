"""A GGUF's weights as the Hugging Face folder that they can be unpacked to: what other engines would be given."""

from __future__ import annotations

from bedplate.values.model import UNPACKED, Model
from bedplate.values.record import replaced

ARCHITECTURES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text", "starcoder2": "starcoder2",
    "stablelm": "stablelm", "falcon": "falcon", "gpt2": "gpt2", "bloom": "bloom", "mamba": "mamba",
}  # fmt: skip
"""From the name in a GGUF header to Transformers' own, for those that it unpacks (its `GGUF_CONFIG_MAPPING`)."""


def unpacked(model: Model) -> Model | None:
    """The same weights in 16 bits, as safetensors; `None` where Transformers does not know the architecture.

    What a quantization has lost is not found again, so the answers stay those of the GGUF.
    """
    architecture = ARCHITECTURES.get(model.architecture)
    if model.format != "gguf" or architecture is None:
        return None
    parts = tuple(replaced(part, bytes=2 * part.parameters) for part in model.parts)
    return replaced(
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
