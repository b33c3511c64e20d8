"""The bytes and operations of a step, computed from the model's dimensions.

Nothing here is fitted. The lower bounds of all estimates are computed here too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from bedplate.decide.estimate.machine import MachineRates
from bedplate.values import Model

READ_ROWS_ONLY = ("embedding", "vision", "mtp")
"""Parts of which a token reads nothing, or only one row."""
ATTENDING = frozenset({
    "full attention", "latent attention", "sparse attention", "compressed attention", "windowed attention",
    "chunked attention", "attention and state space",
})  # fmt: skip
SPARSE_TOKENS = 2048
"""Tokens that a sparse-attention layer attends to (DeepSeek-V3.2 and GLM-5: index_topk)."""
OF_EXPERTS = 0.6
"""Share of experts in the active weights of a mixture-of-experts model: 57 to 67% in DeepSeek-V3 and Qwen3."""
POPULARITY_SHAPE = 1.0
"""Shape of the distribution of the experts' popularity; infinite: uniform. With llama.cpp on a GB10, 32 sequences read
55 to 70% of the experts of gpt-oss and Qwen3, where a uniform choice would read 64 to 98%."""
LATENT_HEAD = 320
"""Key and value width of one head of latent attention when a prompt is computed unabsorbed: 128 + 64 and 128."""


class Attention(NamedTuple):
    """All layers with the same kind of cache."""

    layers: float
    bytes_per_token: float
    """16-bit cache of one token of context."""
    window: int | None
    state_bytes: int
    pair_ops: float
    """Operations for one new token against one token of context."""
    unabsorbed_pair_ops: float
    """The same for prompts in engines that expand latents first."""
    kv_heads: int
    latent: bool


EXTRA_KERNELS = {
    "qwen3": 2, "qwen3moe": 2, "qwen3vl": 2, "qwen3vlmoe": 2, "gemma2": 2, "gemma3": 4, "gemma4": 6, "gemma3n": 16,
    "olmo2": 2, "olmo3": 2, "hunyuanv1moe": 2, "hunyuanmoe": 2, "hunyuanv1dense": 2, "hunyuandense": 2, "dots1": 2,
    "llama4": 2, "glm4": 2, "exaone4": 4, "minimaxm2": 2, "granite": 2, "granitemoe": 2,
}  # fmt: skip
"""Kernels of a layer in addition to those of a Llama layer, by architecture: norms of queries, keys and values, norms
after attention and after the feed-forward part, and scales (the implementations in Transformers)."""


class ModelShape(NamedTuple):
    """The dimensions of a model that determine the cost of a step."""

    name: str
    layers: int
    hidden: int
    dense_bytes: float
    """Weights that every step reads: all but routed experts and embedding tables."""
    dense_params: float
    output_bytes: float
    """The part of `dense_bytes` for the output projection."""
    output_params: float
    expert_bytes: float
    """All routed experts of all layers."""
    expert_params: float
    experts: int
    experts_active: int
    moe_layers: int
    attention: tuple[Attention, ...]
    quantization: str
    """The model's label: BF16, FP8, Q4_K_M …"""
    method: str
    """none, fp8, nvfp4, mxfp4, gptq, awq, gguf, mlx, exl2 …"""
    bits: float
    """Mean bits of the weights that are read."""
    total_bytes: float
    total_params: float
    stored_bits: float = 16.0
    """Bits of a weight in the quantized matrices, without scales: 4 for AWQ, even if other weights have 16 bits."""
    small_kernels: float = 0.0
    """Norms, scales and gates of all layers in addition to those of a Llama layer: each is a kernel."""
    borrowing_layers: int = 0
    """The last layers, if they read the cache of an earlier layer: of a prompt, only its last token needs them."""

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token uses."""
        return self.experts_active / self.experts if self.experts else 0.0

    @property
    def active_params(self) -> float:
        return self.dense_params + self.expert_params * self.expert_share


def get_shape(model: Model) -> ModelShape:
    found = _shapes.get(id(model))
    if found is not None and found[0] is model:
        return found[1]
    if len(_shapes) > 512:
        _shapes.clear()
    shape = _compute_shape(model)
    _shapes[id(model)] = (model, shape)
    return shape


_shapes: dict[int, tuple[Model, ModelShape]] = {}


def _compute_shape(model: Model) -> ModelShape:
    dense_bytes = dense_params = expert_bytes = expert_params = output_bytes = output_params = 0.0
    for part in model.parts:
        if part.name in READ_ROWS_ONLY:
            continue
        if part.name == "experts":
            expert_bytes, expert_params = float(part.bytes), float(part.parameters)
            continue
        dense_bytes += part.bytes
        dense_params += part.parameters
        if part.name == "output":
            output_bytes, output_params = float(part.bytes), float(part.parameters)
    experts, active = model.num_experts or 0, model.num_experts_active or 0
    if not model.parts:
        dense_bytes, dense_params = float(model.weight_bytes), float(model.parameters)
        if model.active_parameters and model.active_parameters < model.parameters:
            # Only the sums are known: the inactive weights are experts. A token uses an eighth of the experts if that
            # is unknown, or less if it uses a smaller share of all weights, because it also uses dense weights.
            used = model.active_parameters / model.parameters
            share = active / experts if experts and active else min(1 / 8, OF_EXPERTS * used)
            expert_params = min((model.parameters - model.active_parameters) / (1 - share), float(model.parameters))
            expert_bytes = expert_params * model.weight_bytes / model.parameters
            dense_params -= expert_params
            dense_bytes -= expert_bytes
            experts, active = (experts, active) if experts and active else (round(8 / share), 8)
    if not expert_params:
        experts = active = 0
    details = model.quantization_details
    read = dense_params + expert_params
    return ModelShape(
        name=model.name,
        layers=max(1, model.num_layers),
        hidden=model.hidden_size or round(math.sqrt(max(read, 1.0) / max(1, model.num_layers) / 12)),
        dense_bytes=dense_bytes,
        dense_params=dense_params,
        output_bytes=output_bytes,
        output_params=output_params,
        expert_bytes=expert_bytes,
        expert_params=expert_params,
        experts=experts,
        experts_active=active,
        moe_layers=(model.num_moe_layers or model.num_layers) if experts else 0,
        attention=_group_attention(model),
        quantization=model.quantization or "BF16",
        method=details.method if details is not None else ("gguf" if model.format == "gguf" else "none"),
        bits=(dense_bytes + expert_bytes) * 8 / read if read else 16.0,
        total_bytes=float(model.weight_bytes),
        total_params=float(model.parameters),
        stored_bits=_get_stored_bits(model, (dense_bytes + expert_bytes) * 8 / read if read else 16.0),
        small_kernels=_count_small_kernels(model, experts > 0),
        borrowing_layers=_count_borrowing_layers(model),
    )


def _count_small_kernels(model: Model, has_experts: bool) -> float:
    kind = model.architecture.lower().replace("_", "").replace("-", "").removesuffix("text")
    each = EXTRA_KERNELS.get(kind, 0)
    if kind == "gemma4" and (has_experts or _count_borrowing_layers(model)):
        # Layers with experts have a dense part with its own norms; the smallest models have inputs for each layer.
        each += 6
    return float(each * model.num_layers)


def _count_borrowing_layers(model: Model) -> int:
    return sum(group.count for group in model.layers or () if group.kind == "shares another layer's cache")


def _get_stored_bits(model: Model, mean_bits: float) -> float:
    details = model.quantization_details
    if details is None or details.method == "gguf":
        # A GGUF label names a mixture of types, whose mean is more precise than the name.
        return mean_bits
    return min(details.bits, mean_bits)


def _group_attention(model: Model) -> tuple[Attention, ...]:
    heads = model.num_heads or max(1, (model.hidden_size or 4096) // 128)
    groups = model.layers
    if not groups:
        width = 2 * (model.head_dim or 128)
        return (
            Attention(
                layers=model.num_layers, bytes_per_token=float(model.kv_bytes_per_token), window=None,
                state_bytes=model.state_bytes, pair_ops=2.0 * heads * width * model.num_layers,
                unabsorbed_pair_ops=2.0 * heads * width * model.num_layers, kv_heads=model.num_kv_heads or heads,
                latent=False,
            ),
        )  # fmt: skip
    own = sum(group.count for group in groups if group.kind in ATTENDING)
    borrowing = _count_borrowing_layers(model)
    # Layers without a cache read that of another layer, so they cost as much as those with a cache.
    again = 1 + borrowing / own if own else 1.0
    found = []
    for group in groups:
        if group.kind not in ATTENDING and not group.state_bytes:
            continue
        sparse = group.kind == "sparse attention"
        latent = group.kind == "latent attention" or (sparse and (group.kv_heads or 0) == 1)
        width = (group.key_dim or model.head_dim or 128) + (group.value_dim or model.head_dim or 128)
        attends = group.kind in ATTENDING
        window = group.window
        per_token = float(group.kv_bytes_per_token)
        if window and group.kv_bytes_window:
            per_token = group.kv_bytes_window / window
        if sparse:
            window = SPARSE_TOKENS
        pair = 2.0 * heads * width * group.count * again if attends else 0.0
        found.append(
            Attention(
                layers=group.count * (again if attends else 1.0),
                bytes_per_token=per_token * (again if attends else 1.0),
                window=window,
                state_bytes=group.state_bytes,
                pair_ops=pair,
                # With sparse attention, no engine expands the latents of the chosen tokens.
                unabsorbed_pair_ops=2.0 * heads * LATENT_HEAD * group.count if latent and not sparse else pair,
                kv_heads=group.kv_heads or model.num_kv_heads or heads,
                latent=latent,
            )
        )
    return tuple(found)


def count_used_experts(experts: int, active: int, tokens: float) -> float:
    """The expected number of different experts that `tokens` choose, uniformly and independently."""
    if not experts or tokens <= 0:
        return 0.0
    return experts * float(1.0 - (1.0 - active / experts) ** tokens)


def count_distinct_experts(experts: int, active: int, tokens: float) -> float:
    """The expected number of different experts that `tokens` choose if some experts are more popular than others.

    Popularity follows a gamma distribution: with the same load on average, fewer experts are chosen than uniformly.
    """
    if not experts or tokens <= 0:
        return 0.0
    left = (1.0 + (tokens - 1) * active / experts / POPULARITY_SHAPE) ** -POPULARITY_SHAPE
    return experts - (experts - active) * float(left)


def count_expert_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes of routed experts that a step of `tokens` reads, all layers."""
    if not shape.experts:
        return 0.0
    return shape.expert_bytes * count_used_experts(shape.experts, shape.experts_active, tokens) / shape.experts


def count_weight_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes of weights that a step of `tokens` reads on all devices together."""
    return shape.dense_bytes + count_expert_bytes(shape, tokens)


def count_kv_bytes(shape: ModelShape, context: float, kv_bits: float = 16.0) -> float:
    """Bytes of cache and state that one sequence reads for one token."""
    total = 0.0
    for group in shape.attention:
        seen = context if group.window is None else min(context, group.window)
        total += group.bytes_per_token * seen * kv_bits / 16.0 + group.state_bytes
    return total


def count_linear_ops(shape: ModelShape, tokens: float, output_rows: float | None = None) -> float:
    """Operations of all matrix products for `tokens`; logits for `output_rows` of them (default: all)."""
    body = shape.active_params - shape.output_params
    rows = tokens if output_rows is None else output_rows
    return 2.0 * (body * tokens + shape.output_params * rows)


def count_attention_ops(shape: ModelShape, tokens: float, depth: float = 0.0, *, absorbed: bool = True) -> float:
    """Attention operations of `tokens` new tokens: among each other, causally, and with `depth` earlier tokens."""
    total = 0.0
    for group in shape.attention:
        each = group.pair_ops if absorbed else group.unabsorbed_pair_ops
        total += each * _count_pairs(tokens, depth, group.window)
    return total


def _count_pairs(tokens: float, depth: float, window: int | None) -> float:
    if window is None:
        return tokens * (depth + (tokens + 1) / 2)
    if depth >= window:
        return tokens * window
    # The first tokens attend to all earlier ones until the window is full.
    growing = min(tokens, window - depth)
    return growing * (depth + (growing + 1) / 2) + (tokens - growing) * window


def count_all_reduce_bytes(tokens: float, shape: ModelShape, ranks: int) -> float:
    """Bytes that each device sends in one ring all-reduce of the 16-bit hidden states."""
    return 2.0 * (ranks - 1) / ranks * tokens * shape.hidden * 2.0 if ranks > 1 else 0.0


def get_link_bytes_s(machine: MachineRates, ranks: int) -> float | None:
    """Bandwidth of one device to its group: the links of a node, or the network if a group spans nodes."""
    if ranks > machine.per_node:
        return machine.network_bytes_s or machine.peer_bytes_s
    if machine.peer_kind == "xgmi" and machine.peer_bytes_s:
        # In a mesh, all links to the peers are used at the same time.
        return machine.peer_bytes_s * max(1, ranks - 1)
    return machine.peer_bytes_s


HALF_BITS = 12
"""Mean bits from which on weights count as 16-bit: a few tensors may have 8 bits."""


def compute_decode_floor_s(
    shape: ModelShape, machine: MachineRates, batch: float, context: float, ranks: int, kv_bits: float
) -> float:
    """The lower bound of a step: its bytes at the data sheet's bandwidth, or its operations at the highest rate."""
    moved = _count_least_bytes(shape, batch) + batch * count_kv_bytes(shape, context, kv_bits)
    computed = count_linear_ops(shape, batch) + count_attention_ops(shape, 1, context) * batch
    best = _get_best_rate(shape, machine)
    bandwidth = machine.bandwidth_bytes_s * ranks
    return max(moved / bandwidth if bandwidth else 0.0, computed / (best * ranks) if best else 0.0)


def compute_prefill_floor_s(shape: ModelShape, machine: MachineRates, tokens: float, ranks: int) -> float:
    """The lower bound of a prompt: its operations at the highest rate, or one read of the weights that it uses."""
    best = _get_best_rate(shape, machine)
    computed = count_linear_ops(shape, tokens, 1) / (best * ranks) if best else 0.0
    bandwidth = machine.bandwidth_bytes_s * ranks
    return max(computed, _count_least_bytes(shape, tokens) / bandwidth if bandwidth else 0.0)


def _count_least_bytes(shape: ModelShape, tokens: float) -> float:
    if not shape.experts:
        return shape.dense_bytes
    used = count_distinct_experts(shape.experts, shape.experts_active, tokens) / shape.experts
    return shape.dense_bytes + shape.expert_bytes * used


def _get_best_rate(shape: ModelShape, machine: MachineRates) -> float:
    """The highest rate of the units that can multiply such weights: 8-bit and 4-bit units cannot multiply 16 bits.

    Desktop cards accumulate in 16 bits twice as fast as in 32 bits, which data sheets state; some engines use that.
    """
    best = max(machine.ops_s.values(), default=0.0)
    wide = max((machine.ops_s.get(name, 0.0) for name in ("bf16", "fp16", "fp32", "tf32")), default=0.0)
    if shape.bits < HALF_BITS or not wide or machine.kind == "cpu":
        return best
    return min(best, wide * (2 if machine.consumer else 1))
