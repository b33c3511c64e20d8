"""Compares weights, KV cache, activations and overhead with the memory of each device: does it fit, for how many?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bedplate.decide.cards import SAME_FREE, get_free_bytes, keep_cards
from bedplate.engines import Engine
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import LIMITED_VENDORS, RESERVED_SHARE, SIXTEEN_BIT, find_cards
from bedplate.engines.visible import pick_cards
from bedplate.errors import UsageError
from bedplate.facts.adapters import compute_adapter_bytes
from bedplate.facts.known_models import apply_label
from bedplate.values import (
    Accelerator,
    Hardware,
    Model,
    Parallelism,
    Settings,
    Weights,
    Workload,
    make_estimate,
    replace_fields,
)
from bedplate.values.decision import CacheType
from bedplate.values.fit import DeviceNeed, Fit, Offload

MOST_SLOTS = 65536
"""Upper limit of concurrent requests for an engine that has none."""
EXPERTS = "experts"


def fit(
    hardware: Hardware,
    model: Model,
    workload: Workload,
    engine: str | Engine,
    quantization: str | None = None,
    parallelism: Parallelism | None = None,
    settings: Settings | None = None,
    kv_type: CacheType | None = None,
) -> Fit:
    """The memory that this layout needs on each device. `quantization` replaces the model's quantization.

    The cache is for the slots and context of `settings` or, without them, for the requests of the workload. It has the
    type of `kv_type`, or else of `settings`.
    """
    chosen = engine_by_id(engine) if isinstance(engine, str) else engine
    layout = parallelism or Parallelism()
    weights = apply_label(model, quantization) if quantization is not None else model
    if settings is not None and settings.cards:
        hardware = keep_cards(hardware, pick_cards(hardware, settings.cards))
    cards = select_cards(hardware, chosen, layout) if settings is None or settings.device != "cpu" else ()
    stored = kv_type or (settings.kv_type if settings is not None else "16-bit")
    asked = MemoryDemand.from_workload(chosen, workload, settings, stored)
    if not cards:
        if layout != Parallelism():
            raise UsageError("the layout divides the model among accelerators, but the machine has none")
        return _fit_on_host(hardware, weights, chosen, asked)
    if _is_divided_by_memory(cards, weights, chosen, layout):
        found = _fit_by_memory(cards, weights, chosen, asked)
    else:
        found = _fit_on_cards(cards, weights, chosen, layout, asked)
    if not found.fits and chosen.offloads and layout.tensor == layout.data == 1:
        return _fit_offloaded(hardware, cards, weights, chosen, asked) or found
    return found


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The requests that memory is needed for."""

    tokens: int
    """Tokens of one request at its end; for an engine without a paged cache, the reserved context."""
    prompt_tokens: int
    in_flight: int
    ceiling: int
    shared_tokens: int = 0
    """Prompt tokens that are cached once for all requests: requests with the same prefix share cache blocks."""
    adapters: int = 0
    """LoRA adapters in the memory of the devices."""
    adapter_rank: int = 0
    kv_type: CacheType = "16-bit"

    @classmethod
    def from_workload(
        cls, engine: Engine, workload: Workload, settings: Settings | None, kv_type: CacheType = "16-bit"
    ) -> MemoryDemand:
        ceiling = engine.max_slots or MOST_SLOTS
        shared = min(workload.shared_prefix_tokens, workload.prompt_tokens) if engine.paged else 0
        lora = (engine.count_resident_adapters(workload), engine.choose_adapter_rank(workload))
        if settings is None:
            in_flight = workload.compute_in_flight()
            return cls(workload.request_tokens, workload.prompt_tokens, in_flight, ceiling, shared, *lora, kv_type)
        # A paged cache grows with the requests; other engines reserve the whole context for each slot.
        tokens = workload.request_tokens if engine.paged else settings.context_tokens
        slots = min(settings.slots, workload.compute_in_flight()) if engine.paged else settings.slots
        return cls(tokens, min(workload.prompt_tokens, tokens), slots, ceiling, shared, *lora, kv_type)

    def compute_adapter_bytes(self, model: Model, layout: Parallelism | None = None) -> float:
        """Bytes of the LoRA adapters on each tensor rank of the whole pipeline."""
        if not self.adapters:
            return 0.0
        ranks = (layout or Parallelism()).tensor
        expert = (layout or Parallelism()).expert
        return self.adapters * compute_adapter_bytes(model, self.adapter_rank, tensor=ranks, expert=expert)


def select_cards(hardware: Hardware, engine: Engine, layout: Parallelism) -> tuple[Accelerator, ...]:
    """The accelerators that a layout uses, of those that the engine supports."""
    cards = find_cards(hardware, engine.vendors)
    if not _computes_on_cards(engine, hardware):
        return ()
    wanted = layout.tensor * layout.pipeline * layout.data
    if wanted > len(cards):
        raise UsageError(
            f"the layout needs {wanted} devices, but there are only {len(cards)}",
            hint="use a smaller tensor, pipeline or data parallelism",
        )
    return cards[:wanted]


_on_cards: dict[tuple[Engine, int], tuple[object, bool]] = {}
"""By the engine and the identity of a machine's accelerators: a search asks once for each layout."""
MOST_REMEMBERED = 256


def _computes_on_cards(engine: Engine, hardware: Hardware) -> bool:
    key, cards = (engine, id(hardware.accelerators)), hardware.accelerators
    known = _on_cards.get(key)
    if known is not None and known[0] is cards:
        return known[1]
    if len(_on_cards) >= MOST_REMEMBERED:
        _on_cards.clear()
    target = engine.find_target(hardware)
    _on_cards[key] = (cards, found := target is not None and target.device != "cpu")
    return found


def get_kv_bytes_on_device(
    model: Model, tokens: int, layout: Parallelism, engine: Engine | None = None, bits: float = 16.0
) -> float:
    """The KV cache of one request on one device: tensor ranks divide the heads, but each stores a whole latent cache.

    With attention data parallelism, only one rank stores a request.
    """
    return model.compute_kv_bytes(tokens, bits) * _get_cache_share(model, layout, engine)


def _get_cache_share(model: Model, layout: Parallelism, engine: Engine | None) -> float:
    ranks = max(1, layout.tensor // max(1, layout.attention_data))
    ranks = min(ranks, model.num_kv_heads or ranks) if model.kv_lora_rank is None else 1
    return _get_stage_share(model, layout, engine) / max(1, ranks)


def _get_stage_share(model: Model, layout: Parallelism, engine: Engine | None) -> float:
    """The largest share of the layers that one pipeline stage gets: stages have whole layers."""
    if engine is None or layout.pipeline == 1 or not model.num_layers:
        return 1 / layout.pipeline
    return engine.count_largest_stage(model.num_layers, layout.pipeline) / model.num_layers


def get_weight_bytes_on_device(model: Model, layout: Parallelism, engine: Engine | None = None) -> int:
    """Bytes of weights on one device: tensor or expert ranks divide the experts, tensor ranks divide the rest.

    With the engine, those of its largest pipeline stage, which may have the embedding or the output besides.
    """
    experts = _sum_expert_bytes(model)
    attention = max(1, layout.tensor // max(1, layout.attention_data))
    first, last = _get_end_bytes(model, engine) if layout.pipeline > 1 else (0, 0)
    share = _get_stage_share(model, layout, engine)
    rest = (model.weight_bytes - experts - first - last) * share + max(first, last)
    # Layers without experts come first, so that the other stages have more experts than layers.
    dense_first = engine is not None and 2 * (model.num_moe_layers or 0) > model.num_layers
    richest = min(1.0, share * model.num_layers / (model.num_moe_layers or 1)) if dense_first else share
    return round(experts / max(layout.tensor, layout.expert) * richest + rest / attention)


def _get_end_bytes(model: Model, engine: Engine | None) -> tuple[int, int]:
    """Bytes outside of the layers: with the first stage, and with the last."""
    if engine is None:
        return 0, 0
    sizes = {part.name: part.bytes for part in model.parts}
    embedding = 0 if engine.loading.embeds_on_host else sizes.get("embedding", 0)
    return embedding + sizes.get("vision", 0), sizes.get("output", 0)


def _sum_expert_bytes(model: Model) -> int:
    return sum(part.bytes for part in model.parts if part.name == EXPERTS)


def find_largest(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest count up to `ceiling` that fits, or 0; if a count fits, every smaller one must fit."""
    if not fits(1):
        return 0
    if fits(ceiling):
        return ceiling
    low, high = 1, ceiling
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_most_requests(needs: Callable[[int], float], usable: float, ceiling: int) -> int:
    """The largest count up to `ceiling` whose bytes are usable, or 0; `needs` grows with the count, nearly linearly."""
    low, high = 1, ceiling
    low_bytes, high_bytes = needs(low), needs(high)
    if low_bytes > usable:
        return 0
    if high_bytes <= usable:
        return ceiling
    bisects = False
    while high - low > 1:
        # Interpolation finds it in a few steps; every second step bisects in case the growth is not linear.
        share = 0.5 if bisects else (usable - low_bytes) / (high_bytes - low_bytes)
        bisects = not bisects
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        if (found := needs(middle)) > usable:
            high, high_bytes = middle, found
        elif (found_next := needs(middle + 1)) > usable:
            return middle
        else:
            low, low_bytes = middle + 1, found_next
    return low


def _fit_on_cards(
    cards: Sequence[Accelerator], model: Model, engine: Engine, layout: Parallelism, asked: MemoryDemand
) -> Fit:
    """All cards hold the same amount, so the one with the least free memory decides."""
    # Called for every layout on all of its cards: comprehensions, which make no call for each card.
    sizes = [card.free_bytes if card.free_bytes is not None else card.memory_bytes for card in cards]
    known, use = [size for size in sizes if size is not None], engine.uses
    free = min(known) if len(known) == len(sizes) else None
    usable = round(free * _get_usable_share(cards[0], engine)) if free is not None else None
    weights = get_weight_bytes_on_device(model, layout, engine)
    bits = engine.get_stored_cache_bits(asked.kv_type)
    cache_each = get_kv_bytes_on_device(model, asked.tokens, layout, engine, bits)
    # Each request has its own windows and states; only the cache that grows with every token is shared.
    shared = model.kv_bytes_per_token * asked.shared_tokens * bits / 16 * _get_cache_share(model, layout, engine)
    groups = max(1, layout.attention_data)
    adapters = round(asked.compute_adapter_bytes(model, layout) * _get_stage_share(model, layout, engine))

    def compute_cache(requests: int) -> float:
        here = -(-requests // groups)
        return cache_each * here - shared * (here - 1)

    def compute_activations(requests: int) -> float:
        return engine.compute_activation_bytes(model, asked.prompt_tokens * requests) / layout.tensor

    def compute_high(requests: int) -> float:
        own = (compute_activations(requests) + use.device_bytes) * (1 + use.spread)
        return weights + adapters + compute_cache(requests) + own

    most = find_most_requests(compute_high, usable, asked.ceiling) if usable is not None else 0
    counted = max(1, min(-(-asked.in_flight // layout.data), most))
    need = DeviceNeed(
        device=name_cards(cards),
        count=len(cards),
        weights_bytes=weights,
        kv_bytes=round(compute_cache(counted)),
        activation_bytes=make_estimate(compute_activations(counted), use.spread, use.source),
        overhead_bytes=make_estimate(use.device_bytes, use.spread, use.source),
        usable_bytes=usable,
        adapter_bytes=adapters,
    )
    return Fit(fits=most >= 1, devices=(need,), concurrency=counted * layout.data, max_concurrency=most * layout.data)


def add_start_memory(
    fit: Fit, engine: Engine, weights: Weights, source: Model, loaded: Model, layout: Parallelism, settings: Settings
) -> Fit:
    """The fit with the peak of loading `source` as these weights, and with the CUDA graphs that are captured then."""
    context, quantizes = engine.uses.context_bytes, is_quantized_while_loading(weights)
    if settings.device != "cuda" or not context:
        return fit
    before = get_weight_bytes_on_device(source, layout, engine) if quantizes else 0
    by_layer = engine.loading.quantizes == "by layer"
    layers = max(1, round(source.num_layers * _get_stage_share(source, layout, engine)))
    graphs = engine.compute_graph_bytes(loaded, settings) * _get_stage_share(loaded, layout, engine)

    def add(need: DeviceNeed) -> DeviceNeed:
        after = need.weights_bytes
        peak = after + before / layers if by_layer else max(after, before)
        estimate = make_estimate(graphs, engine.uses.spread, engine.uses.source) if graphs else None
        return replace_fields(need, loading_bytes=round(peak + context), graph_bytes=estimate)

    return replace_fields(fit, devices=tuple(map(add, fit.devices)))


def is_quantized_while_loading(weights: Weights) -> bool:
    return weights.made == "while loading" and weights.label not in SIXTEEN_BIT


def _get_usable_share(card: Accelerator, engine: Engine) -> float:
    """Memory that a GPU shares with the system is not used to the last byte, unless the system limits its part."""
    if card.unified_memory and card.vendor not in LIMITED_VENDORS:
        return min(engine.uses.share, 1 - RESERVED_SHARE)
    return engine.uses.share


def _is_divided_by_memory(cards: Sequence[Accelerator], model: Model, engine: Engine, layout: Parallelism) -> bool:
    """Whether cards of different size get different numbers of layers."""
    if layout.pipeline == 1 or layout.tensor * layout.data > 1 or engine.loading.divides != "by memory":
        return False
    sizes = [get_free_bytes(card) or 0 for card in cards]
    return bool(model.num_layers) and min(sizes) < SAME_FREE * max(sizes)


def _fit_by_memory(cards: Sequence[Accelerator], model: Model, engine: Engine, asked: MemoryDemand) -> Fit:
    """Each card holds layers in proportion to its free memory; any of them may be the first that is full."""
    sizes, use, layers = [get_free_bytes(card) or 0 for card in cards], engine.uses, model.num_layers
    counts = engine.count_layers_by_memory(layers, sizes)
    bits = engine.get_stored_cache_bits(asked.kv_type)
    cache_each, experts = model.compute_kv_bytes(asked.tokens, bits), _sum_expert_bytes(model)
    adapters, (first, last) = asked.compute_adapter_bytes(model), _get_end_bytes(model, engine)
    rest, with_experts = model.weight_bytes - experts - first - last, model.num_moe_layers or layers

    def compute_activations(requests: int) -> float:
        return engine.compute_activation_bytes(model, asked.prompt_tokens * requests)

    def compute_weights(number: int) -> int:
        # Layers with experts may all be on this card.
        here = rest * counts[number] / layers + experts * min(1.0, counts[number] / with_experts)
        return round(here + (first if number == 0 else 0) + (last if number == len(cards) - 1 else 0))

    def compute_high(number: int, requests: int) -> float:
        share = counts[number] / layers
        own = (compute_activations(requests) + use.device_bytes) * (1 + use.spread)
        return compute_weights(number) + (adapters + cache_each * requests) * share + own

    most = min(
        find_most_requests(lambda some, at=number: compute_high(at, some), size * use.share, asked.ceiling)  # type: ignore[misc]
        for number, size in enumerate(sizes)
    )
    counted = max(1, min(asked.in_flight, most))
    needs = [
        DeviceNeed(
            device=card.name,
            weights_bytes=compute_weights(number),
            kv_bytes=round(cache_each * counted * counts[number] / layers),
            activation_bytes=make_estimate(compute_activations(counted), use.spread, use.source),
            overhead_bytes=make_estimate(use.device_bytes, use.spread, use.source),
            usable_bytes=round(sizes[number] * use.share),
            adapter_bytes=round(adapters * counts[number] / layers),
        )
        for number, card in enumerate(cards)
    ]
    return Fit(fits=most >= 1, devices=tuple(needs), concurrency=counted, max_concurrency=most)


def name_cards(cards: Sequence[Accelerator]) -> str:
    """The kinds of cards: those of one machine may differ."""
    return " or ".join({card.name: None for card in cards})


def _fit_on_host(hardware: Hardware, model: Model, engine: Engine, asked: MemoryDemand) -> Fit:
    usable = round(hardware.memory.available_bytes * (1 - RESERVED_SHARE))
    cache_each = model.compute_kv_bytes(asked.tokens, engine.get_stored_cache_bits(asked.kv_type, model=model))
    use, adapters = engine.uses, round(asked.compute_adapter_bytes(model))

    def compute_overhead(requests: int) -> float:
        return engine.compute_overhead_bytes(model, Settings(slots=requests, context_tokens=asked.tokens))

    def fits(requests: int) -> bool:
        own = compute_overhead(requests) * (1 + use.spread)
        return model.weight_bytes + adapters + cache_each * requests + own <= usable

    most = find_largest(fits, asked.ceiling)
    counted = max(1, min(asked.in_flight, most))
    need = _make_host_need(
        model.weight_bytes, cache_each * counted, compute_overhead(counted), engine, usable, adapters
    )
    return Fit(fits=most >= 1, devices=(need,), concurrency=counted, max_concurrency=most)


def _make_host_need(
    weights: int, cache: int, overhead: float, engine: Engine, usable: int, adapters: int = 0
) -> DeviceNeed:
    return DeviceNeed(
        device="host",
        weights_bytes=weights,
        kv_bytes=cache,
        activation_bytes=make_estimate(0, 0),
        overhead_bytes=make_estimate(overhead, engine.uses.spread, engine.uses.source),
        usable_bytes=usable,
        adapter_bytes=adapters,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Which layers and bytes are on the cards, and which on the host."""

    kind: str
    layers: int
    """Layers that are entirely on the cards."""
    host_layers: int
    card_weights: int
    card_cache: int


def _fit_layers(model: Model, kept: int, with_experts: int, cache: float, cards: int, room: float) -> bool:
    """Whether whole layers fit on the cards, with the experts of the last `kept` layers that have any."""
    sizes = {part.name: part.bytes for part in model.parts}
    experts, room = sizes.get(EXPERTS, 0), room - sizes.get("output", 0)
    small = (model.weight_bytes - experts - sizes.get("output", 0) + cache) / with_experts
    large = small + experts / with_experts
    if (large if kept else small) > room:
        return False
    full, rest = divmod(with_experts - kept, int(room // small))
    beside = int((room - rest * small) // large) if rest else 0
    needed = full + bool(rest) - (-max(0, kept - beside) // int(room // large) if kept else 0)
    return needed <= cards


def _fit_offloaded(
    hardware: Hardware, cards: Sequence[Accelerator], model: Model, engine: Engine, asked: MemoryDemand
) -> Fit | None:
    """The cards hold as much as fits, and the host the rest: routed experts first, which are read least often."""
    rooms = [get_free_bytes(card) for card in cards]
    if not model.num_layers or any(room is None for room in rooms) or any(card.unified_memory for card in cards):
        return None  # unified memory has no separate host memory to offload to
    use, count, layers = engine.uses, len(cards), model.num_layers
    sizes = [room or 0 for room in rooms]
    usable, differ = round(min(sizes) * use.share), min(sizes) < SAME_FREE * max(sizes)
    host_usable = round(hardware.memory.available_bytes * (1 - RESERVED_SHARE))
    cache_each = model.compute_kv_bytes(asked.tokens, engine.get_stored_cache_bits(asked.kv_type))
    experts = _sum_expert_bytes(model)
    dense, with_experts = model.weight_bytes - experts, model.num_moe_layers or layers
    # An adapter is where its layer is; all of them are counted on the cards.
    adapters = round(asked.compute_adapter_bytes(model) / count)

    def compute_overhead(requests: int) -> float:
        return use.device_bytes + engine.compute_activation_bytes(model, asked.prompt_tokens * requests)

    def divide(kept: int) -> tuple[int, ...]:
        return engine.count_layers_by_memory(layers, sizes, kept)

    def split(requests: int) -> _Split:
        each = usable - adapters - compute_overhead(requests) * (1 + use.spread)
        room, cache = count * each, cache_each * requests
        if experts and room >= dense + cache:
            kept = min(with_experts, int((room - dense - cache) // (experts / with_experts)))
            if count > 1:
                kept = find_largest(
                    lambda some: _fit_layers(model, some, with_experts, cache, count, each), max(1, kept)
                )
            if kept or _fit_layers(model, 0, with_experts, cache, count, each):
                on_cards = round(dense + kept * experts / with_experts)
                return _Split("experts", kept, with_experts - kept, on_cards, cache)
        # The layers on cards are divided evenly or by memory, and each card holds whole layers.
        layer = (model.weight_bytes + cache) / layers
        kept = max(0, min(layers, count * int(each // layer)))
        if differ:
            lost = usable - each
            kept = find_largest(
                lambda some: all(
                    number * layer <= size * use.share - lost for number, size in zip(divide(some), sizes, strict=True)
                ),
                layers,
            )
        on_cards = round(model.weight_bytes * kept / layers)
        return _Split("layers", kept, layers - kept, on_cards, round(cache * kept / layers))

    def compute_host(requests: int, part: _Split) -> DeviceNeed:
        cache = cache_each * requests - part.card_cache
        own = engine.compute_overhead_bytes(model, Settings(slots=requests, context_tokens=asked.tokens))
        return _make_host_need(model.weight_bytes - part.card_weights, cache, own, engine, host_usable)

    def fits(requests: int) -> bool:
        # Even with all layers on the host, the card computes prompts and needs memory for that.
        own = adapters + compute_overhead(requests) * (1 + use.spread)
        return own <= usable and compute_host(requests, split(requests)).fits

    most = find_largest(fits, asked.ceiling)
    counted = max(1, min(asked.in_flight, most))
    part = split(counted)

    def describe_need(some: Sequence[Accelerator], share: float, size: int) -> DeviceNeed:
        return DeviceNeed(
            device=name_cards(some),
            count=len(some),
            weights_bytes=int(part.card_weights * share),
            kv_bytes=int(part.card_cache * share),
            activation_bytes=make_estimate(0, 0),
            overhead_bytes=make_estimate(compute_overhead(counted), use.spread, use.source),
            usable_bytes=size,
            adapter_bytes=adapters,
        )

    on_cards = [describe_need(cards, 1 / count, usable)]
    if differ and part.kind == "layers" and part.layers:
        shares = [number / part.layers for number in divide(part.layers)]
        on_cards = [
            describe_need([card], share, round(size * use.share))
            for card, share, size in zip(cards, shares, sizes, strict=True)
        ]
    on_host = compute_host(counted, part)
    return Fit(
        fits=most >= 1,
        devices=(*on_cards, on_host),
        concurrency=counted,
        max_concurrency=most,
        offload=Offload(
            kind="experts" if part.kind == "experts" else "layers",
            device_layers=part.layers,
            host_layers=part.host_layers,
            host_bytes=on_host.weights_bytes,
        ),
    )
