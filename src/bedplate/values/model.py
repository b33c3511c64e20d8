"""Model: what the files say, exactly; nothing here is estimated."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from bedplate.values.record import Basis, Record

Task = Literal["generate", "embed", "classify", "other"]
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


class Part(Record, frozen=True, kw_only=True):
    """What the weights are for: embedding, attention, experts …"""

    name: str
    parameters: int
    active_parameters: int
    """Those that one token passes through."""
    bytes: int


class LayerGroup(Record, frozen=True, kw_only=True):
    """Layers that keep the same kind of memory of what they have read; sizes are of all of them together."""

    kind: LayerKind
    count: int
    kv_bytes_per_token: float = 0.0
    """What one more token adds, 16-bit; below a whole byte where a cache is compressed."""
    window: int | None = None
    """Tokens after which the oldest are forgotten."""
    kv_bytes_window: int = 0
    """The most that they hold for one sequence, where they see a window only."""
    state_bytes: int = 0
    """Constant state for one sequence."""
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None


class Quantization(Record, frozen=True, kw_only=True):
    """How the weights are stored, as the configuration says it."""

    method: str
    """fp8, nvfp4, mxfp4, gptq, awq, compressed-tensors, bitsandbytes, mlx, exl2, exl3, gguf …"""
    bits: float
    """Of one weight, without scales."""
    group_size: int | None = None
    """Weights that share a scale."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""
    kv_cache: str | None = None
    """The type that the cache was calibrated for, such as FP8."""
    activation_bits: int | None = None


UNPACKED = "unpacked from"
"""How the origin of a folder begins that is made of a GGUF file here, and lies beside whoever runs the command."""


class Model(Record, frozen=True, kw_only=True):
    schema: Literal["model/1"] = "model/1"
    name: str
    format: Literal["gguf", "safetensors", "mlx", "exl2", "exl3", "onnx", "facts"]
    files: tuple[str, ...] = ()
    """Absolute paths, the first one is what an engine is given."""
    origin: str | None = None
    """How it came here: built in, a folder, a hub id, another program's cache."""
    architecture: str
    task: Task = "generate"
    parameters: int
    active_parameters: int | None = None
    """Parameters that one token passes through; differs from `parameters` for mixtures of experts."""
    weight_bytes: int
    quantization: str | None = None
    """The type that most of the weights are stored in."""
    tensor_groups: tuple[TensorGroup, ...] = ()
    num_layers: int
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """The most that any layer has; layers may differ."""
    num_experts: int | None = None
    num_experts_active: int | None = None
    vocab_size: int | None = None
    max_context: int | None = None
    kv_bytes_per_token: int
    """What one more token adds in the layers that attend to everything, with 16-bit KV."""
    kv_bytes_window: int = 0
    """The most that windowed layers hold for one sequence."""
    state_bytes: int = 0
    """Constant state of linear-attention and state-space layers for one sequence."""
    has_chat_template: bool = False
    chat_template: str | None = None
    """The default template itself, unless it is too long to carry along."""
    basis: Basis = "reported"
    parts: tuple[Part, ...] = ()
    """The weights by what they are for; empty when only their sum is known."""
    layers: tuple[LayerGroup, ...] = ()
    """What each kind of layer keeps for a sequence; empty when only the sums are known."""
    quantization_details: Quantization | None = None
    mtp_parameters: int = 0
    """Heads that guess several tokens ahead; in none of the other figures."""
    mtp_weight_bytes: int = 0
    vision_parameters: int = 0
    """Towers that see or hear, and their projectors: not in `parameters`, but in `weight_bytes`: engines load them."""
    vision_weight_bytes: int = 0
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
    """Where the facts of a known model come from."""

    @property
    def served_name(self) -> str:
        """The name that clients send: lower case and without spaces, as they are used to."""
        return "-".join(self.name.split()).lower()

    @property
    def short_name(self) -> str:
        """As part of a file's name: without its owner, and without spaces."""
        return "-".join(PurePath(self.name).name.split()) or "model"

    @property
    def is_unpacked(self) -> bool:
        """Whether it will be the folder of its short name, which is made of a GGUF file first."""
        return not self.files and (self.origin or "").startswith(UNPACKED)

    @property
    def unpacked_from(self) -> str | None:
        """The type that its weights have in that file."""
        return (self.origin or "").removeprefix(UNPACKED).split()[0] if self.is_unpacked else None

    @property
    def bits_per_weight(self) -> float | None:
        weights = self.parameters + self.vision_parameters
        return self.weight_bytes * 8 / weights if weights else None

    @property
    def read_bytes_per_token(self) -> int:
        """Weights that are read to make one token: active experts alone, and one row of the embedding table."""
        if not self.parts:
            active = self.parameters if self.active_parameters is None else self.active_parameters
            return self.weight_bytes * active // self.parameters if self.parameters else self.weight_bytes
        return sum(
            part.bytes * part.active_parameters // part.parameters
            for part in self.parts
            if part.parameters and part.name not in ("embedding", "vision", "mtp")
        )

    def kv_bytes(self, context_tokens: int, bits: int = 16) -> int:
        """Cache of one sequence of `context_tokens`, of keys and values of so many bits; states stay as they are."""
        windows = self.kv_bytes_window
        if self.layers:
            windows = sum(
                group.kv_bytes_window * min(context_tokens, group.window) // group.window
                for group in self.layers
                if group.window
            ) + sum(group.kv_bytes_window for group in self.layers if not group.window)
        return (self.kv_bytes_per_token * context_tokens + windows) * bits // 16 + self.state_bytes
