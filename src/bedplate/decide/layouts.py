"""Parallel layouts of a model: those that divide its dimensions evenly and suit the links between the cards."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.engines import Engine
from bedplate.engines.base import find_cards
from bedplate.values import Hardware, Model, Parallelism

TENSOR_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 72)
FAST_LINKS = frozenset(["nvlink", "xgmi"])
LEAST_GROUP = 4
"""Cards from which on attention replicas share experts: two cards have two replicas, or tensor parallelism."""
PCIE_TENSOR_CARDS = 4
"""Over PCIe, tensor parallelism on more cards costs more than it saves; pipelines exchange data once per stage."""
MOST_PIPELINE = 32
SLOW_NODES = (2, 3, 4, 6, 8)
SPACIOUS_SHARE, FULL_SHARE = 0.6, 0.9
"""Shares of a node's memory: with less for the weights, each node has a replica; with more, it does not hold them."""
LARGE_MIXTURE = 100e9
"""Parameters of mixtures for which recipes name data parallel attention; smaller ones have replicas instead."""


def list_layouts(hardware: Hardware, engine: Engine, model: Model) -> Iterator[Parallelism]:
    """All layouts that this engine supports on some or all of the cards; replicas use the remaining cards."""
    cards = len(find_cards(hardware, engine.vendors))
    target = engine.find_target(hardware)
    if target is None or target.device == "cpu" or cards <= 1:
        yield Parallelism()
        return
    node, fast = min(hardware.cards_per_node, cards), count_fast_cards(hardware)
    if target.chip is not None and target.chip.kind == "accelerator" and target.chip.link is not None:
        fast = max(fast, target.chip.link.domain)  # Gaudi's own network
    nodes = _count_slow_nodes(hardware, model, node) if fast < node < cards else ()
    each_host = min(node, (target.chip.per_host if target.chip is not None else None) or node)
    for tensor in TENSOR_SIZES:
        if tensor > cards or (tensor > 1 and "tensor" not in engine.ways):
            continue
        if tensor > max(PCIE_TENSOR_CARDS, fast) and not (tensor > node and fast >= node and tensor % node == 0):
            continue
        ways = [
            (expert, attention)
            for expert, attention in _list_expert_ways(engine, model, tensor, node, cards)
            # One attention replica is in one node; only the experts, or the stages of a pipeline, may be distributed.
            if (tensor // attention <= node or "pipeline" not in engine.ways) and can_divide(model, tensor // attention)
        ]
        for pipeline in _list_stages(engine, model, tensor, node, cards, fast, nodes) if ways else ():
            most = cards // (tensor * pipeline) if "data" in engine.ways else 1
            for expert, attention in ways:
                if pipeline > 1 and 1 < attention < tensor:
                    continue
                for data in _list_replicas(most):
                    layout = Parallelism(
                        tensor=tensor, pipeline=pipeline, data=data, expert=expert, attention_data=attention
                    )
                    # Replicas are started separately; one of them may need several hosts.
                    hosts = -(-tensor * pipeline // each_host)
                    if engine.accepts_layout(model, layout, hosts) and (hosts == 1 or engine.can_distribute(model)):
                        yield layout


def can_divide(model: Model, tensor: int) -> bool:
    """Whether the heads and the MLP's quantization groups divide evenly among this many ranks."""
    if tensor == 1:
        return True
    if model.num_heads and model.num_heads % tensor:
        return False
    kv_heads = model.num_kv_heads
    if kv_heads and model.kv_lora_rank is None and kv_heads % tensor and tensor % kv_heads:
        return False
    details = model.quantization_details
    step = max((details.group_size or 1), *(details.block or (1,))) if details is not None else 1
    return all(width % tensor == 0 and (width // tensor) % step == 0 for width in _list_dense_widths(model))


def _list_dense_widths(model: Model) -> list[int]:
    """Widths of the MLPs that tensor ranks divide; expert parallelism distributes whole experts."""
    if not model.num_experts:
        return [model.intermediate_size] if model.intermediate_size else []
    dense = model.intermediate_size if any(part.name == "mlp" for part in model.parts) else None
    return [width for width in (dense, model.shared_expert_intermediate_size) if width]


def can_divide_experts(model: Model, tensor: int) -> bool:
    """Whether each expert divides evenly among this many ranks."""
    details = model.quantization_details
    step = max((details.group_size or 1), *(details.block or (1,))) if details is not None else 1
    width = model.moe_intermediate_size
    return not width or (width % tensor == 0 and (width // tensor) % step == 0)


def _list_replicas(most: int) -> tuple[int, ...]:
    """The maximum number of replicas and the smaller powers of two: the workload may need fewer."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(dict.fromkeys([*powers, most])) if most > 1 else (1,)


def _count_slow_nodes(hardware: Hardware, model: Model, node: int) -> tuple[int, ...]:
    """Numbers of nodes that hold the model together, if one is too small, with slow links within each."""
    node_bytes = sum([card.free_bytes or card.memory_bytes or 0 for card in hardware.accelerators[:node]])
    if not node_bytes or model.weight_bytes <= SPACIOUS_SHARE * node_bytes:
        return ()
    least = model.weight_bytes / (FULL_SHARE * node_bytes)
    return tuple(count for count in SLOW_NODES if least <= count <= max(2.0, 2 * least))


def _list_stages(
    engine: Engine, model: Model, tensor: int, node: int, cards: int, fast: int, nodes: tuple[int, ...]
) -> tuple[int, ...]:
    """Numbers of pipeline stages: across nodes if a node is too small, within a node if its links are slow.

    With slow links, a pipeline over several nodes has all cards of each.
    """
    if "pipeline" not in engine.ways:
        return (1,)
    most = min(cards // tensor, MOST_PIPELINE, model.num_layers or 1)
    # Within a node with fast links, tensor parallelism is faster, so stages only go across nodes.
    within = 1 if fast >= node and "tensor" in engine.ways else node // tensor
    sizes = {1, *range(2, within + 1), *(size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32) if tensor == node)}
    if within > 1 and node % tensor == 0:
        sizes |= {within * count for count in nodes}
    return tuple(sorted(size for size in sizes if size <= max(1, most)))


def _list_expert_ways(engine: Engine, model: Model, tensor: int, node: int, cards: int) -> tuple[tuple[int, int], ...]:
    """(expert ranks, attention replicas) for this many tensor ranks."""
    found: list[tuple[int, int]] = []
    if not model.num_experts or tensor == 1 or can_divide_experts(model, tensor):
        found.append((1, 1))
    if model.num_experts and tensor > 1 and "expert" in engine.ways and model.num_experts % tensor == 0:
        found.append((tensor, 1))
        if "attention_data" in engine.ways:
            # A tensor rank stores the whole latent cache, or a copy of a KV head if there are fewer heads than ranks;
            # attention replicas store only the cache of their own requests.
            sizes: tuple[int, ...] = (tensor,) if model.kv_lora_rank is not None else ()
            # In a fleet, groups are whole nodes: fewer layouts to search.
            least = LEAST_GROUP if cards <= node else node
            if model.parameters >= LARGE_MIXTURE and least <= tensor <= node:
                sizes = _list_replicas(tensor)[1:]
            elif model.parameters >= LARGE_MIXTURE and tensor > node:
                sizes = sizes or tuple(dict.fromkeys((tensor // node, tensor)))
            found += [(tensor, size) for size in sizes if tensor % size == 0]
    return tuple(found)


def count_fast_cards(hardware: Hardware) -> int:
    """The number of cards with a link to the first card that is faster than PCIe, including the first."""
    first = str(hardware.accelerators[0].index) if hardware.accelerators else "0"
    ends = [(one.a, one.b) for one in hardware.links if one.kind in FAST_LINKS]
    return 1 + len([pair for pair in ends if first in pair and "host" not in pair])
