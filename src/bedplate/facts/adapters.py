"""The size of a LoRA adapter, from the widths of a model's linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bedplate.values import Model

UNKNOWN_SHARE = 0.005 / 16
"""Parameters of an adapter for each rank and parameter of a model whose widths are not known. Of Llama 3.1 at rank 16,
an adapter has 0.5 % of the parameters of 8 B, and 0.3 % of those of 70 B."""
ADAPTER_BYTES = 2
"""Bytes of each parameter: adapters are stored in the 16-bit compute type."""


class LinearLayer(NamedTuple):
    """A linear layer that an adapter may change. Tensor ranks divide its outputs, or its inputs."""

    inputs: int
    outputs: int
    divides_inputs: bool = False
    copies: float = 1


def compute_adapter_bytes(model: Model, rank: int, *, tensor: int = 1, expert: int = 1) -> float:
    """Bytes of one adapter of all linear layers on each of `tensor` ranks.

    Engines divide one of the two matrices of a layer among the ranks, and store the other one on each. Each of `expert`
    ranks has the adapters of its own experts.
    """
    if not model.hidden_size or not model.num_layers:
        return ADAPTER_BYTES * model.parameters * UNKNOWN_SHARE * rank
    dense = sum(_count_inner_widths(layer, tensor) for layer in _list_dense_layers(model))
    experts = sum(_count_inner_widths(layer, 1 if expert > 1 else tensor) for layer in _list_expert_layers(model))
    return ADAPTER_BYTES * rank * (dense + experts / max(1, expert))


def _count_inner_widths(layer: LinearLayer, ranks: int) -> float:
    inputs, outputs = float(layer.inputs), float(layer.outputs)
    if layer.divides_inputs:
        inputs /= ranks
    else:
        outputs /= ranks
    return layer.copies * (inputs + outputs)


def _list_dense_layers(model: Model) -> Iterator[LinearLayer]:
    hidden, layers = model.hidden_size or 0, model.num_layers
    head = model.head_dim or hidden // max(1, model.num_heads or 1)
    queries = head * (model.num_heads or 1)
    yield LinearLayer(hidden, queries, copies=layers)
    if model.kv_lora_rank is not None:
        yield LinearLayer(hidden, model.kv_lora_rank + (model.qk_rope_head_dim or 0), copies=layers)
        yield LinearLayer(model.kv_lora_rank, 2 * queries, copies=layers)
    else:
        yield LinearLayer(hidden, head * (model.num_kv_heads or model.num_heads or 1), copies=2 * layers)
    yield LinearLayer(queries, hidden, divides_inputs=True, copies=layers)
    with_experts = (model.num_moe_layers or layers) if model.num_experts else 0
    yield from _list_mlp_layers(hidden, model.intermediate_size or 4 * hidden, layers - with_experts)
    if shared := model.shared_expert_intermediate_size:
        yield from _list_mlp_layers(hidden, shared, with_experts)


def _list_expert_layers(model: Model) -> Iterator[LinearLayer]:
    if model.num_experts:
        count = model.num_experts * (model.num_moe_layers or model.num_layers)
        width = model.moe_intermediate_size or model.intermediate_size or 4 * (model.hidden_size or 0)
        yield from _list_mlp_layers(model.hidden_size or 0, width, count)


def _list_mlp_layers(hidden: int, width: int, count: int) -> Iterator[LinearLayer]:
    """Gate, up and down."""
    yield LinearLayer(hidden, width, copies=2 * count)
    yield LinearLayer(width, hidden, divides_inputs=True, copies=count)
