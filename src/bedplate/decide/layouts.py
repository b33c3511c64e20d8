"""The ways to lay a model over cards: only those whose dimensions divide, and whose links can carry them."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.engines import Engine
from bedplate.engines.base import cards_of
from bedplate.values import Hardware, Model, Parallelism

TENSOR_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 72)
FAST_LINKS = frozenset(["nvlink", "xgmi"])
PCIE_TENSOR_CARDS = 4
"""Over PCIe each layer's exchange costs more than it saves beyond a few cards; pipelines exchange once a stage."""
MOST_PIPELINE = 32


def layouts(hardware: Hardware, engine: Engine, model: Model) -> Iterator[Parallelism]:
    """Every layout over some or all of the cards that this engine can be told, replicas filling the rest."""
    cards = len(cards_of(hardware, engine.vendors))
    target = engine.target(hardware)
    if target is None or target.device == "cpu" or cards <= 1:
        yield Parallelism()
        return
    node, fast = min(hardware.cards_per_node, cards), fast_cards(hardware)
    for tensor in TENSOR_SIZES:
        if tensor > node or (tensor > 1 and "tensor" not in engine.ways) or not divides(model, tensor):
            continue
        if tensor > max(PCIE_TENSOR_CARDS, fast):
            continue
        for pipeline in _stages(engine, model, tensor, node, cards, fast):
            for expert, attention in _expert_ways(engine, model, tensor):
                most = cards // (tensor * pipeline) if "data" in engine.ways else 1
                for data in _replicas(most):
                    yield Parallelism(
                        tensor=tensor, pipeline=pipeline, data=data, expert=expert, attention_data=attention
                    )


def divides(model: Model, tensor: int) -> bool:
    """Whether heads, and the MLP's width over its quantization's groups, come out even over so many ranks."""
    if tensor == 1:
        return True
    if model.num_heads and model.num_heads % tensor:
        return False
    kv_heads = model.num_kv_heads
    if kv_heads and model.kv_lora_rank is None and kv_heads % tensor and tensor % kv_heads:
        return False
    details = model.quantization_details
    step = max((details.group_size or 1), *(details.block or (1,))) if details is not None else 1
    # Experts may be spread whole instead of being cut; then only what every token passes through must divide.
    widths = [model.intermediate_size] if not model.num_experts else []
    return all(width % tensor == 0 and (width // tensor) % step == 0 for width in widths if width)


def experts_divide(model: Model, tensor: int) -> bool:
    """Whether each expert can be cut over so many ranks."""
    details = model.quantization_details
    step = max((details.group_size or 1), *(details.block or (1,))) if details is not None else 1
    width = model.moe_intermediate_size
    return not width or (width % tensor == 0 and (width // tensor) % step == 0)


def _replicas(most: int) -> tuple[int, ...]:
    """All replicas that there is room for, and the powers of two below: fewer may be all that the work needs."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return tuple(dict.fromkeys([*powers, most])) if most > 1 else (1,)


def _stages(engine: Engine, model: Model, tensor: int, node: int, cards: int, fast: int) -> tuple[int, ...]:
    """Pipelines: across nodes where a node is too small, and within one where links are slow."""
    if "pipeline" not in engine.ways:
        return (1,)
    most = min(cards // tensor, MOST_PIPELINE, model.num_layers or 1)
    # Within a node of fast links, tensor ranks do better; stages go across nodes then.
    within = 1 if fast >= node and "tensor" in engine.ways else node // tensor
    sizes = {1, *range(2, within + 1), *(size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32) if tensor == node)}
    return tuple(sorted(size for size in sizes if size <= max(1, most)))


def _expert_ways(engine: Engine, model: Model, tensor: int) -> tuple[tuple[int, int], ...]:
    """(expert ranks, attention replicas) for so many tensor ranks."""
    found: list[tuple[int, int]] = []
    if not model.num_experts or tensor == 1 or experts_divide(model, tensor):
        found.append((1, 1))
    if model.num_experts and tensor > 1 and "expert" in engine.ways and model.num_experts % tensor == 0:
        found.append((tensor, 1))
        if "attention_data" in engine.ways and model.kv_lora_rank is not None:
            # Every tensor rank would keep the whole latent; as replicas of attention each keeps its own requests'.
            found.append((tensor, tensor))
    return tuple(found)


def fast_cards(hardware: Hardware) -> int:
    """How many cards, counted from the first, reach it over more than PCIe, itself included."""
    return 1 + sum(link.kind in FAST_LINKS and link.a == "0" and link.b != "host" for link in hardware.links)
