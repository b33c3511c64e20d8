"""Model: exact facts from the model's files. Nothing here is estimated."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePath
from typing import Literal

from bedplate.values.quoting import is_safe
from bedplate.values.record import Basis, Record

Task = Literal["generate", "embed", "classify", "transcribe", "other"]
LayerKind = Literal[
    "full attention",
    "latent attention",
    "sparse attention",
    "compressed attention",
    "windowed attention",
    "chunked attention",
    "cross attention",
    "linear attention",
    "state space",
    "short convolution",
    "attention and state space",
    "shares another layer's cache",
    "no cache",
]


class TensorGroup(Record, frozen=True, kw_only=True):
    """All tensors of one storage type."""

    type: str
    tensors: int
    parameters: int
    bytes: int


class ModelPart(Record, frozen=True, kw_only=True):
    """The weights of one purpose: embedding, attention, experts …"""

    name: str
    parameters: int
    active_parameters: int
    """Parameters that one token uses."""
    bytes: int


class LayerGroup(Record, frozen=True, kw_only=True):
    """Layers with the same kind of cache. Sizes are sums over all of them."""

    kind: LayerKind
    count: int
    kv_bytes_per_token: float = 0.0
    """Bytes that each further token adds, with 16-bit KV. It can be below 1 if the cache is compressed."""
    window: int | None = None
    """Size of the attention window in tokens; older tokens leave the cache."""
    kv_bytes_window: int = 0
    """The most that windowed layers hold for one sequence."""
    state_bytes: int = 0
    """Constant state for one sequence."""
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None


class Quantization(Record, frozen=True, kw_only=True):
    """How the weights are stored, as the configuration says."""

    method: str
    """fp8, nvfp4, mxfp4, gptq, awq, compressed-tensors, bitsandbytes, mlx, exl2, exl3, gguf …"""
    bits: float
    """Bits of one weight, without scales."""
    group_size: int | None = None
    """Number of weights that share a scale."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""
    kv_cache: str | None = None
    """The KV cache type that the model was calibrated for, such as FP8."""
    activation_bits: int | None = None


UNPACKED = "unpacked from"
"""Prefix of `origin` if the model is a folder, in the working directory, that is dequantized from a GGUF file."""


@lru_cache(maxsize=256)
def _join_words(name: str) -> str:
    """Join the words of a name with dashes; control characters separate words like spaces."""
    return "-".join("".join(letter if is_safe(letter) else " " for letter in name).split())


class Projector(Record, frozen=True, kw_only=True):
    """The vision encoder of a GGUF model and its projector, which are a file of their own (mmproj)."""

    file: str
    """Absolute path."""
    kind: str
    """The type of the projector: mlp, idefics3, qwen2vl_merger …"""
    parameters: int
    weight_bytes: int
    image_size: int | None = None
    """Pixels of one side of the image, or of one tile, that the encoder reads."""
    image_tokens: int | None = None
    """Tokens of one image, or of one tile; None if they depend on the size of the image."""
    activation_bytes: int = 0
    """The most that the encoder holds while it computes one image, by its shape."""


class Model(Record, frozen=True, kw_only=True):
    schema: Literal["model/1"] = "model/1"
    name: str
    format: Literal["gguf", "safetensors", "mlx", "exl2", "exl3", "onnx", "facts"]
    files: tuple[str, ...] = ()
    """Absolute paths. Engines are given the first one."""
    origin: str | None = None
    """Where the files come from: built in, a folder, a hub id, another program's cache."""
    architecture: str
    task: Task = "generate"
    parameters: int
    active_parameters: int | None = None
    """Parameters that one token uses. Below `parameters` for mixture-of-experts models."""
    weight_bytes: int
    quantization: str | None = None
    """The type that most of the weights are stored in."""
    tensor_groups: tuple[TensorGroup, ...] = ()
    num_layers: int
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """The maximum over the layers, which may differ."""
    num_experts: int | None = None
    num_experts_active: int | None = None
    vocab_size: int | None = None
    max_context: int | None = None
    kv_bytes_per_token: int
    """Bytes that each further token adds in full-attention layers, with 16-bit KV."""
    kv_bytes_window: int = 0
    """The most that windowed layers hold for one sequence."""
    state_bytes: int = 0
    """Constant state of linear-attention and state-space layers for one sequence."""
    has_chat_template: bool = False
    chat_template: str | None = None
    """The default chat template, unless it is too long to include."""
    basis: Basis = "reported"
    parts: tuple[ModelPart, ...] = ()
    """The weights by purpose; empty if only their sum is known."""
    layers: tuple[LayerGroup, ...] = ()
    """The cache of each kind of layer; empty if only the sums are known."""
    quantization_details: Quantization | None = None
    mtp_parameters: int = 0
    """Parameters of multi-token-prediction heads. No other figure includes them."""
    mtp_weight_bytes: int = 0
    vision_parameters: int = 0
    """Parameters of vision and audio encoders and their projectors.

    `parameters` does not include them; `weight_bytes` does, because engines load them.
    """
    vision_weight_bytes: int = 0
    projector: Projector | None = None
    """Beside a GGUF file. No other figure includes it."""
    head_dim: int | None = None
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    num_shared_experts: int | None = None
    shared_expert_intermediate_size: int | None = None
    num_moe_layers: int | None = None
    kv_lora_rank: int | None = None
    """Width of the latent that MLA keeps instead of keys and values."""
    qk_rope_head_dim: int | None = None
    sliding_window: int | None = None
    tied_embeddings: bool | None = None
    sources: tuple[str, ...] = ()
    """Sources of the facts of a known model."""

    @property
    def served_name(self) -> str:
        """The model name that clients send: lower case, without spaces, and never an option of a command line."""
        return _join_words(self.name).lower().lstrip("-") or "model"

    @property
    def short_name(self) -> str:
        """The name for use in file names: without owner and spaces, and neither hidden nor an option."""
        return _join_words(PurePath(self.name).name.replace("\\", " ")).lstrip("-.") or "model"

    @property
    def is_unpacked(self) -> bool:
        """Whether the model is a folder that is first dequantized from a GGUF file."""
        return not self.files and (self.origin or "").startswith(UNPACKED)

    @property
    def source_quantization(self) -> str | None:
        """The quantization type of the weights in that GGUF file."""
        return (self.origin or "").removeprefix(UNPACKED).split()[0] if self.is_unpacked else None

    @property
    def bits_per_weight(self) -> float | None:
        weights = self.parameters + self.vision_parameters
        return self.weight_bytes * 8 / weights if weights else None

    @property
    def read_bytes_per_token(self) -> int:
        """Weight bytes read for one token: only active experts, and one row of the embedding table."""
        if not self.parts:
            active = self.parameters if self.active_parameters is None else self.active_parameters
            return self.weight_bytes * active // self.parameters if self.parameters else self.weight_bytes
        return sum(
            part.bytes * part.active_parameters // part.parameters
            for part in self.parts
            if part.parameters and part.name not in ("embedding", "vision", "mtp")
        )

    def compute_kv_bytes(self, context_tokens: int, bits: float = 16) -> int:
        """KV cache bytes of one sequence of `context_tokens`, with keys and values of `bits` bits.

        States keep their size.
        """
        windows = self.kv_bytes_window
        if self.layers:
            windows = sum(
                group.kv_bytes_window * min(context_tokens, group.window) // group.window
                for group in self.layers
                if group.window
            ) + sum(group.kv_bytes_window for group in self.layers if not group.window)
        return int((self.kv_bytes_per_token * context_tokens + windows) * bits // 16) + self.state_bytes
