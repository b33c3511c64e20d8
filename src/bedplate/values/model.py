"""Model: what the files say, exactly; nothing here is estimated."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Basis, Record

Task = Literal["generate", "embed", "classify", "other"]


class TensorGroup(Record, frozen=True, kw_only=True):
    """All tensors of one storage type."""

    type: str
    tensors: int
    parameters: int
    bytes: int


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

    @property
    def served_name(self) -> str:
        """The name that clients send: lower case and without spaces, as they are used to."""
        return "-".join(self.name.split()).lower()

    def kv_bytes(self, context_tokens: int) -> int:
        """Cache of one sequence of `context_tokens`, 16-bit."""
        return self.kv_bytes_per_token * context_tokens + self.kv_bytes_window + self.state_bytes
