"""Memory rules: the peak of each card while it loads, captures graphs and serves, and of the host.

Weights are placed layer by layer and card by card, so that an uneven pipeline or experts on the host are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bedplate.engines import Engine, get_plan_engine
from bedplate.engines.base import LIMITED_VENDORS, RESERVED_SHARE
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.facts.adapters import compute_adapter_bytes
from bedplate.values import Accelerator, Model, Settings
from bedplate.values.units import format_memory

ENDS = ("embedding", "output", "vision")
"""Parts of a model outside of its layers; heads for multi-token prediction are not loaded by default."""
EXPERTS, MTP = "experts", "mtp"


@dataclass(frozen=True)
class PlacedModel:
    """The bytes of a model by layer."""

    dense_layer: float
    """Everything of one layer but its routed experts."""
    expert_layers: tuple[float, ...]
    """The routed experts of each layer; 0 for a dense layer."""
    first: float
    """Embedding and encoders, with the first layer."""
    last: float
    """Output, with the last layer."""
    tied: float = 0.0
    """Part of the output that is also the embedding: a pipeline has it at both ends."""


def place_model(model: Model) -> PlacedModel:
    layers = max(1, model.num_layers)
    sizes: dict[str, float] = {part.name: float(part.bytes) for part in model.parts if part.name != MTP}
    scale = model.weight_bytes / total if (total := sum(sizes.values())) else 0.0
    sizes = {name: size * scale for name, size in sizes.items()} or {"layers": float(model.weight_bytes)}
    experts = sizes.get(EXPERTS, 0.0)
    ends = {name: sizes.get(name, 0.0) for name in ENDS}
    dense = sum(sizes.values()) - experts - sum(ends.values())
    shares = _share_experts(layers, model.num_moe_layers or layers) if experts else (0.0,) * layers
    return PlacedModel(
        dense_layer=dense / layers,
        expert_layers=tuple([experts * share for share in shares]),
        first=ends["embedding"] + ends["vision"],
        last=ends["output"],
        tied=ends["output"] if model.tied_embeddings and not ends["embedding"] else 0.0,
    )


def _share_experts(layers: int, with_experts: int) -> Iterator[float]:
    """Each layer's share of the experts: dense layers come first, or experts are in every second or third layer."""
    dense_first = 2 * with_experts > layers
    for number in range(layers):
        spread = (number + 1) * with_experts // layers - number * with_experts // layers
        yield (number >= layers - with_experts if dense_first else spread) / with_experts


def list_weight_bytes(launch: PlannedLaunch, model: Model) -> tuple[float, ...]:
    """Bytes of weights on each card of one replica's pipeline, one tensor rank each."""
    layout, placed = launch.plan.parallelism, place_model(model)
    attention = max(1, layout.tensor // max(1, layout.attention_data))
    spread = max(layout.tensor, layout.expert)
    on_host = _list_host_experts(launch, placed)
    engine = get_plan_engine(launch.plan)
    counts = engine.count_layers_by_card(launch)
    skipped = len(placed.expert_layers) - sum(counts)
    found, begin = [], max(0, skipped)
    for number, count in enumerate(counts):
        held = range(begin, min(begin + count, len(placed.expert_layers)))
        begin += count
        experts = sum([placed.expert_layers[layer] for layer in held if layer not in on_host])
        rest = placed.dense_layer * len(held)
        if number == 0 and skipped <= 0 and not engine.loading.embeds_on_host:
            rest += placed.first + (placed.tied if len(counts) > 1 else 0.0)
        rest += placed.last if number == len(counts) - 1 else 0.0
        found.append(experts / spread + rest / attention)
    return tuple(found)


def _list_host_experts(launch: PlannedLaunch, placed: PlacedModel) -> frozenset[int]:
    """The layers whose experts stay in host memory: the first that have any."""
    on_host = launch.plan.settings.host_expert_layers or 0
    return frozenset([layer for layer, size in enumerate(placed.expert_layers) if size][:on_host])


def _list_loading_bytes(launch: PlannedLaunch, engine: Engine) -> tuple[float, ...]:
    """Weights on each card at the peak of loading: quantization needs the unquantized weights first."""
    loaded = list_weight_bytes(launch, launch.loaded)
    if not launch.is_quantized_while_loading:
        return loaded
    source = list_weight_bytes(launch, launch.model)
    if engine.loading.quantizes == "whole model":
        return tuple(map(max, source, loaded))
    layers = max(1, launch.model.num_layers // launch.plan.parallelism.pipeline)
    return tuple(after + before / layers for before, after in zip(source, loaded, strict=True))


def _count_requests(launch: PlannedLaunch, engine: Engine) -> int:
    """Requests of one replica whose cache is in memory at once; a paged cache is allocated as they come."""
    settings, work, layout = launch.plan.settings, launch.plan.workload, launch.plan.parallelism
    if not engine.paged:
        return settings.slots
    return max(1, min(settings.slots, -(-work.compute_in_flight() // layout.data)))


def _compute_cache_bytes(launch: PlannedLaunch, tokens: int, requests: int, shared_tokens: int = 0) -> float:
    """KV cache of the whole pipeline on one tensor rank."""
    model, layout = launch.loaded, launch.plan.parallelism
    ranks = max(1, layout.tensor // max(1, layout.attention_data))
    parts = min(ranks, model.num_kv_heads or ranks) if model.kv_lora_rank is None else 1
    bits = get_plan_engine(launch.plan).get_stored_cache_bits(launch.plan.settings.kv_type)
    each = model.compute_kv_bytes(tokens, bits) / max(1, parts)
    shared = model.kv_bytes_per_token * shared_tokens * bits / 16 / max(1, parts)
    here = -(-requests // max(1, layout.attention_data))
    return each * here - shared * (here - 1)


def _list_peaks(launch: PlannedLaunch, engine: Engine, tokens: int, requests: int, shared: int) -> Iterator[float]:
    """Bytes on each card of one replica with this many requests of this length in memory."""
    layout, model = launch.plan.parallelism, launch.loaded
    counts = engine.count_layers_by_card(launch)
    cache = _compute_cache_bytes(launch, tokens, requests, shared)
    prompt = min(tokens, launch.plan.workload.prompt_tokens)
    own = engine.uses.device_bytes + engine.compute_activation_bytes(model, prompt) / layout.tensor
    by_layer = cache + _compute_adapter_bytes(launch, engine)
    for weights, count in zip(list_weight_bytes(launch, model), counts, strict=True):
        yield weights + by_layer * count / max(1, model.num_layers) + own


def _compute_adapter_bytes(launch: PlannedLaunch, engine: Engine) -> float:
    """LoRA adapters on one tensor rank of the whole pipeline, as many and of the rank that the launch allocates."""
    if not launch.plan.workload.adapters or engine.adapters is None:
        return 0.0
    layout = launch.plan.parallelism
    count = launch.get_count(engine.adapters.slots, engine.count_resident_adapters(launch.plan.workload))
    rank = launch.get_count(engine.adapters.rank, engine.choose_adapter_rank(launch.plan.workload))
    return count * compute_adapter_bytes(launch.model, rank, tensor=layout.tensor, expert=layout.expert)


def _get_free_bytes(card: Accelerator) -> int | None:
    return card.free_bytes if card.free_bytes is not None else card.memory_bytes


def _get_limit(launch: PlannedLaunch, engine: Engine, card: Accelerator) -> float | None:
    """What the engine may use of this card: the share of its option, of the total or of what is free."""
    free: float | None = _get_free_bytes(card)
    if free is not None and card.unified_memory and card.vendor not in LIMITED_VENDORS:
        free *= 1 - RESERVED_SHARE  # the system runs in the same memory
    share = launch.options.get(engine.launch_options.share or "")
    if free is None or not share or engine.loading.share_covers != "everything":
        return free
    return min(free, float(share) * (max(card.memory_bytes or 0, free) if engine.uses.share_of == "total" else free))


def check_loading(launch: PlannedLaunch) -> str | None:
    """Each card holds its weights while they are loaded, including the unquantized weights that are quantized then."""
    if launch.device == "cpu" or not launch.cards:
        return None
    engine = get_plan_engine(launch.plan)
    needs = _list_loading_bytes(launch, engine)
    return _find_overflow(launch, needs, [_get_free_bytes(card) for card in launch.cards], "while loading")


def check_capture(launch: PlannedLaunch) -> str | None:
    """Each card holds its weights, the cache of one request of maximum length, activations and captured graphs."""
    if launch.device == "cpu" or not launch.cards:
        return None
    engine = get_plan_engine(launch.plan)
    needs = tuple(_list_peaks(launch, engine, launch.plan.settings.context_tokens, 1, 0))
    return _find_overflow(
        launch, needs, [_get_limit(launch, engine, card) for card in launch.cards], "for one request of maximum length"
    )


def check_serving(launch: PlannedLaunch) -> str | None:
    """Each card holds its weights and the cache of the planned requests."""
    if launch.device == "cpu" or not launch.cards:
        return None
    engine, work = get_plan_engine(launch.plan), launch.plan.workload
    if engine.paged:
        # Further requests wait for cache; what must be there is the cache of one.
        tokens, requests, shared = work.request_tokens, 1, 0
    else:
        tokens, requests, shared = launch.plan.settings.context_tokens, _count_requests(launch, engine), 0
    needs = tuple(_list_peaks(launch, engine, tokens, requests, shared))
    limits = [_get_limit(launch, engine, card) for card in launch.cards]
    return _find_overflow(launch, needs, limits, f"with {requests:,} requests of {tokens:,} tokens")


def check_share(launch: PlannedLaunch) -> str | None:
    """The share of a card's memory that the options ask for is free when the engine starts."""
    engine = get_plan_engine(launch.plan)
    share = launch.options.get(engine.launch_options.share or "")
    if not share:
        return None
    if not 0 < float(share) <= 1:
        return f"a share of {share} of the memory is not between 0 and 1"
    for card in launch.cards:
        free = _get_free_bytes(card)
        if engine.uses.share_of == "total" and free is not None and float(share) * (card.memory_bytes or 0) > free:
            return (
                f"the options ask for {float(share):.0%} of {format_memory(card.memory_bytes or 0)} on card "
                f"{card.index}, but only {format_memory(free)} is free"
            )
    return None


def check_host(launch: PlannedLaunch) -> str | None:
    """The host holds the weights and the cache that are not on cards, and the engine's processes."""
    engine, settings, model = get_plan_engine(launch.plan), launch.plan.settings, launch.loaded
    requests = _count_requests(launch, engine)
    need: float
    cache: float
    if launch.device == "cpu":
        bits = engine.get_stored_cache_bits(settings.kv_type, model=model)
        tokens = launch.plan.workload.request_tokens if engine.paged else settings.context_tokens
        cache = model.compute_kv_bytes(tokens, bits) * (1 if engine.paged else requests)
        need = (
            model.weight_bytes
            + cache
            + engine.compute_overhead_bytes(
                model, Settings(slots=1 if engine.paged else requests, context_tokens=tokens)
            )
            + _compute_adapter_bytes(launch, engine)
        )
    elif any(card.unified_memory for card in launch.cards) or not _keeps_weights_on_host(launch):
        return None
    else:
        on_cards = sum(list_weight_bytes(launch, model))
        layers = engine.count_layers_by_card(launch)
        cache = _compute_cache_bytes(launch, settings.context_tokens, requests)
        need = model.weight_bytes - on_cards + cache * (1 - sum(layers) / max(1, model.num_layers))
        need += engine.uses.process_bytes
    available = launch.hardware.memory.available_bytes * (1 - RESERVED_SHARE)
    if need > available:
        return f"the host needs {format_memory(need)}, but only {format_memory(available)} is usable"
    return None


def check_conversion(launch: PlannedLaunch) -> str | None:
    """A conversion has host memory for the weights that it reads."""
    engine, memory = get_plan_engine(launch.plan), launch.hardware.memory
    copies = engine.loading.conversion_copies
    # A machine that is described without its memory has an assumed one.
    if launch.plan.weights.made != "converted" or not copies or memory.basis == "estimate":
        return None
    need, available = launch.model.weight_bytes * copies, memory.available_bytes * (1 - RESERVED_SHARE)
    if need <= available:
        return None
    return (
        f"the conversion to {launch.plan.weights.label} holds {format_memory(need)} of unconverted weights in host "
        f"memory, but only {format_memory(available)} is usable"
    )


def check_disk(launch: PlannedLaunch) -> str | None:
    """The disk holds the downloads and the results of the conversions."""
    disk = launch.hardware.disk
    need = sum(step.disk_bytes or 0 for step in launch.launch.prepare if step.kind in ("download", "convert"))
    if disk is None or need <= disk.free_bytes:
        return None
    return f"the preparation needs {format_memory(need)} of disk, but only {format_memory(disk.free_bytes)} is free"


def _keeps_weights_on_host(launch: PlannedLaunch) -> bool:
    settings = launch.plan.settings
    return bool(settings.host_expert_layers) or (
        settings.gpu_layers is not None and settings.gpu_layers < launch.model.num_layers
    )


def _find_overflow(
    launch: PlannedLaunch, needs: tuple[float, ...], limits: list[float | None] | list[int | None], when: str
) -> str | None:
    """The first card that lacks memory; `needs` has one entry for each pipeline stage."""
    layout = launch.plan.parallelism
    tensor = max(1, layout.tensor)
    each = tensor * layout.pipeline
    for index, (card, limit) in enumerate(zip(launch.cards, limits, strict=True)):
        need = needs[index % each // tensor]
        if limit is not None and need > limit:
            return (
                f"card {card.index} needs {format_memory(need)} {when}, but only {format_memory(limit)} of it is usable"
            )
    return None


_ARITHMETIC = "arithmetic on the model's tensors, and the engine's own memory (docs/memory.md)"
MEMORY_RULES = (
    LaunchRule("memory.share", _ARITHMETIC, check_share, "a GPU without other programs"),
    LaunchRule("memory.load", _ARITHMETIC, check_loading, "weights that are published in this quantization"),
    LaunchRule("memory.capture", _ARITHMETIC, check_capture, "a shorter --context"),
    LaunchRule("memory.serve", _ARITHMETIC, check_serving, "fewer concurrent requests, or a shorter --context"),
    LaunchRule("memory.host", _ARITHMETIC, check_host, "more memory, or fewer bits per weight"),
    LaunchRule("memory.convert", _ARITHMETIC, check_conversion, "weights that are published in this quantization"),
    LaunchRule("disk.prepare", _ARITHMETIC, check_disk, "a disk with more free space"),
)
