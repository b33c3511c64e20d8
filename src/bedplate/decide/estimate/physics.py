"""What a step moves and computes, counted from the model's shape: bytes, operations, bytes over links.

Nothing here is fitted. The floors that no estimate may beat come from here too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from bedplate.decide.estimate.machine import Machine
from bedplate.values import Model

READ_ROWS_ONLY = ("embedding", "vision", "mtp")
"""Parts that making a token does not read, or of which it reads one row."""
ATTENDING = frozenset({
    "full attention", "latent attention", "sparse attention", "compressed attention", "windowed attention",
    "chunked attention", "attention and state space",
})  # fmt: skip
SPARSE_TOKENS = 2048
"""Tokens that a sparse-attention layer attends to (DeepSeek-V3.2 and GLM-5: index_topk)."""
OF_EXPERTS = 0.6
"""Of the weights that a token of a mixture uses, what is experts: DeepSeek-V3 and Qwen3's have 57 to 67 %."""
LATENT_HEAD = 320
"""Key and value width of one head of latent attention when a prompt is computed unabsorbed: 128 + 64 and 128."""


class Attention(NamedTuple):
    """Layers that keep the same kind of cache, all together."""

    layers: float
    bytes_per_token: float
    """Cache that one token of context is, 16-bit."""
    window: int | None
    state_bytes: int
    pair_ops: float
    """Operations for one new token against one token of context."""
    unabsorbed_pair_ops: float
    """Likewise for prompts in engines that expand latents first."""
    kv_heads: int
    latent: bool


class Shape(NamedTuple):
    """A model as a step sees it."""

    name: str
    layers: int
    hidden: int
    dense_bytes: float
    """Weights that every step reads: all but routed experts and embedding tables."""
    dense_params: float
    output_bytes: float
    """Of them, the output projection."""
    output_params: float
    expert_bytes: float
    """All routed experts of all layers."""
    expert_params: float
    experts: int
    experts_active: int
    moe_layers: int
    attention: tuple[Attention, ...]
    quantization: str
    """As the model's label has it: BF16, FP8, Q4_K_M …"""
    method: str
    """none, fp8, nvfp4, mxfp4, gptq, awq, gguf, mlx, exl2 …"""
    bits: float
    """Mean bits of a weight that is read."""
    total_bytes: float
    total_params: float
    stored_bits: float = 16.0
    """Of a weight in the matrices that were quantised, scales left out: 4 in AWQ, whatever else stayed 16-bit."""

    @property
    def expert_share(self) -> float:
        """Of all experts, what one token uses."""
        return self.experts_active / self.experts if self.experts else 0.0

    @property
    def active_params(self) -> float:
        return self.dense_params + self.expert_params * self.expert_share


def shape_of(model: Model) -> Shape:
    found = _shapes.get(id(model))
    if found is not None and found[0] is model:
        return found[1]
    if len(_shapes) > 512:
        _shapes.clear()
    shape = _shape(model)
    _shapes[id(model)] = (model, shape)
    return shape


_shapes: dict[int, tuple[Model, Shape]] = {}


def _shape(model: Model) -> Shape:
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
            # Only the sums are known: what one token leaves out is experts, an eighth of which it uses if nobody says,
            # and less where it uses less of all: the rest of what it uses is no expert.
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
    return Shape(
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
        attention=_attention(model),
        quantization=model.quantization or "BF16",
        method=details.method if details is not None else ("gguf" if model.format == "gguf" else "none"),
        bits=(dense_bytes + expert_bytes) * 8 / read if read else 16.0,
        total_bytes=float(model.weight_bytes),
        total_params=float(model.parameters),
        stored_bits=_stored_bits(model, (dense_bytes + expert_bytes) * 8 / read if read else 16.0),
    )


def _stored_bits(model: Model, mean_bits: float) -> float:
    details = model.quantization_details
    if details is None or details.method == "gguf":
        # A GGUF label stands for a mixture, whose mean says more than its name.
        return mean_bits
    return min(details.bits, mean_bits)


def _attention(model: Model) -> tuple[Attention, ...]:
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
    borrowing = sum(group.count for group in groups if group.kind == "shares another layer's cache")
    # Layers without a cache of their own read that of another, so they cost what their kind costs.
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
                # Where each token chooses whom it attends to, no engine expands what it chose.
                unabsorbed_pair_ops=2.0 * heads * LATENT_HEAD * group.count if latent and not sparse else pair,
                kv_heads=group.kv_heads or model.num_kv_heads or heads,
                latent=latent,
            )
        )
    return tuple(found)


def experts_touched(experts: int, active: int, tokens: float) -> float:
    """How many different experts so many tokens choose, where each chooses evenly and for itself."""
    if not experts or tokens <= 0:
        return 0.0
    return experts * float(1.0 - (1.0 - active / experts) ** tokens)


def expert_read_bytes(shape: Shape, tokens: float) -> float:
    """Routed experts that a step of so many tokens reads, all layers."""
    if not shape.experts:
        return 0.0
    return shape.expert_bytes * experts_touched(shape.experts, shape.experts_active, tokens) / shape.experts


def weights_read_bytes(shape: Shape, tokens: float) -> float:
    """Weights that a step of so many tokens reads, on all devices together."""
    return shape.dense_bytes + expert_read_bytes(shape, tokens)


def kv_read_bytes(shape: Shape, context: float, kv_bits: float = 16.0) -> float:
    """Cache and state that one sequence reads to make one token."""
    total = 0.0
    for group in shape.attention:
        seen = context if group.window is None else min(context, group.window)
        total += group.bytes_per_token * seen * kv_bits / 16.0 + group.state_bytes
    return total


def linear_ops(shape: Shape, tokens: float, output_rows: float | None = None) -> float:
    """Operations of all matrix products for so many tokens; logits for `output_rows` of them, all if not said."""
    body = shape.active_params - shape.output_params
    rows = tokens if output_rows is None else output_rows
    return 2.0 * (body * tokens + shape.output_params * rows)


def attention_ops(shape: Shape, tokens: float, depth: float = 0.0, *, absorbed: bool = True) -> float:
    """Operations between `tokens` new tokens and what they see: each other causally, and `depth` tokens before."""
    total = 0.0
    for group in shape.attention:
        each = group.pair_ops if absorbed else group.unabsorbed_pair_ops
        total += each * _pairs(tokens, depth, group.window)
    return total


def _pairs(tokens: float, depth: float, window: int | None) -> float:
    if window is None:
        return tokens * (depth + (tokens + 1) / 2)
    if depth >= window:
        return tokens * window
    # The first ones still see all, until the window is full.
    growing = min(tokens, window - depth)
    return growing * (depth + (growing + 1) / 2) + (tokens - growing) * window


def all_reduce_bytes(tokens: float, shape: Shape, ranks: int) -> float:
    """What each device sends in one all-reduce of the hidden states, in 16 bits, by a ring."""
    return 2.0 * (ranks - 1) / ranks * tokens * shape.hidden * 2.0 if ranks > 1 else 0.0


def link_bytes_s(machine: Machine, ranks: int) -> float | None:
    """What one device sends to its group: over the links of a node, or over the network when a group spans nodes."""
    if ranks > machine.per_node:
        return machine.network_bytes_s or machine.peer_bytes_s
    if machine.peer_kind == "xgmi" and machine.peer_bytes_s:
        # A mesh: one link to each peer, and all of them at once.
        return machine.peer_bytes_s * max(1, ranks - 1)
    return machine.peer_bytes_s


HALF_BITS = 12
"""Of weights that are stored in 16 bits, a few tensors may be in 8."""


def decode_floor_s(shape: Shape, machine: Machine, batch: float, context: float, ranks: int, kv_bits: float) -> float:
    """No step is faster: its bytes at the sheet's bandwidth, or its operations at the best rate of the units."""
    moved = weights_read_bytes(shape, batch) + batch * kv_read_bytes(shape, context, kv_bits)
    computed = linear_ops(shape, batch) + attention_ops(shape, 1, context) * batch
    best = _best_rate(shape, machine)
    bandwidth = machine.bandwidth_bytes_s * ranks
    return max(moved / bandwidth if bandwidth else 0.0, computed / (best * ranks) if best else 0.0)


def prefill_floor_s(shape: Shape, machine: Machine, tokens: float, ranks: int) -> float:
    """No prompt is faster: all that it computes at the best rate of the units, or one reading of what it touches."""
    best = _best_rate(shape, machine)
    computed = linear_ops(shape, tokens, 1) / (best * ranks) if best else 0.0
    bandwidth = machine.bandwidth_bytes_s * ranks
    return max(computed, weights_read_bytes(shape, tokens) / bandwidth if bandwidth else 0.0)


def _best_rate(shape: Shape, machine: Machine) -> float:
    """Of the units that may multiply such weights: those for 8 and 4 bits are of no use to 16.

    Cards for the desk add twice as fast in 16 bits as in the 32 that their sheets are for, and some engines do.
    """
    best = max(machine.ops_s.values(), default=0.0)
    wide = max((machine.ops_s.get(name, 0.0) for name in ("bf16", "fp16", "fp32", "tf32")), default=0.0)
    if shape.bits < HALF_BITS or not wide or machine.kind == "cpu":
        return best
    return min(best, wide * (2 if machine.consumer else 1))
