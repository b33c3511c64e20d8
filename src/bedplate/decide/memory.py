"""Weights, cache, activations and overhead against what each device has: does this layout fit, and for how many?"""

from __future__ import annotations

from collections.abc import Sequence

from bedplate.decide.fit import MOST_SLOTS, most_that
from bedplate.engines import Engine
from bedplate.engines import engine as engine_by_id
from bedplate.engines.base import RESERVED_SHARE
from bedplate.errors import BadQuestion
from bedplate.facts.known_models import with_label
from bedplate.values import Accelerator, Hardware, Model, Parallelism, Settings, Workload, estimate, replaced
from bedplate.values.fit import DeviceNeed, Fit, Offload

OFFLOADING = frozenset(["llama.cpp"])
"""Engines that keep a part of the weights on the host."""


def fit(
    hardware: Hardware,
    model: Model,
    workload: Workload,
    engine: str | Engine,
    quantization: str | None = None,
    parallelism: Parallelism | None = None,
) -> Fit:
    """What this layout needs on each device. `quantization` asks for other weights than the model's own."""
    chosen = engine_by_id(engine) if isinstance(engine, str) else engine
    layout = parallelism or Parallelism()
    weights = with_label(model, quantization) if quantization is not None else model
    cards = _cards(hardware, layout)
    if not cards:
        return _on_host(hardware, weights, workload, chosen, layout)
    found = _on_cards(cards, weights, workload, chosen, layout)
    if not found.fits and chosen.id in OFFLOADING and layout == Parallelism():
        return _offloaded(hardware, cards, weights, workload, chosen) or found
    return found


def _cards(hardware: Hardware, layout: Parallelism) -> tuple[Accelerator, ...]:
    wanted = layout.tensor * layout.pipeline * layout.data
    cards = hardware.accelerators
    if cards and wanted > len(cards):
        raise BadQuestion(
            f"the layout needs {wanted} devices, and there are {len(cards)}",
            hint="ask for a smaller tensor, pipeline or data parallelism",
        )
    return cards[:wanted]


def kv_bytes_on_device(model: Model, tokens: int, layout: Parallelism) -> int:
    """One request's cache on one device: heads are divided among tensor ranks, a latent is kept by each of them."""
    whole = model.kv_bytes(tokens) / layout.pipeline
    if model.kv_lora_rank is not None:
        return round(whole / layout.attention_data) if layout.attention_data > 1 else round(whole)
    heads = model.num_kv_heads or layout.tensor
    return round(whole / max(1, min(layout.tensor, heads)))


def weight_bytes_on_device(model: Model, layout: Parallelism) -> int:
    """The share of the weights that one device has: experts over all ranks that divide them, the rest by tensor."""
    experts = sum(part.bytes for part in model.parts if part.name == "experts")
    spread = max(layout.tensor, layout.expert)
    attention = layout.tensor // max(1, layout.attention_data)
    rest = (model.weight_bytes - experts) / max(1, attention)
    return round((experts / spread + rest) / layout.pipeline)


def _need(
    model: Model, workload: Workload, engine: Engine, layout: Parallelism, requests: int, card: Accelerator, count: int
) -> DeviceNeed:
    tokens = workload.request_tokens
    # Each rank of attention data parallelism keeps its own requests; otherwise all ranks keep a share of each.
    resident = -(-requests // max(1, layout.attention_data)) if model.kv_lora_rank is not None else requests
    use = engine.uses
    activations = engine.activation_bytes(model, workload.prompt_tokens * requests) / layout.tensor
    free = card.free_bytes if card.free_bytes is not None else card.memory_bytes
    return DeviceNeed(
        device=card.name,
        count=count,
        weights_bytes=weight_bytes_on_device(model, layout),
        kv_bytes=kv_bytes_on_device(model, tokens, replaced(layout, attention_data=1)) * resident,
        activation_bytes=estimate(activations, use.spread, use.source),
        overhead_bytes=estimate(use.device_bytes, use.spread, use.source),
        usable_bytes=round(free * use.share) if free is not None else None,
    )


def _on_cards(
    cards: Sequence[Accelerator], model: Model, workload: Workload, engine: Engine, layout: Parallelism
) -> Fit:
    smallest = min(cards, key=lambda card: card.free_bytes or card.memory_bytes or 0)

    def need(requests: int) -> DeviceNeed:
        return _need(model, workload, engine, layout, requests, smallest, len(cards))

    most = most_that(lambda requests: need(requests).fits, engine.max_slots or MOST_SLOTS)
    asked = -(-workload.in_flight() // layout.data)
    counted = max(1, min(asked, most))
    return Fit(
        fits=most >= 1,
        devices=(need(counted),),
        concurrency=counted * layout.data,
        max_concurrency=most * layout.data,
    )


def _on_host(hardware: Hardware, model: Model, workload: Workload, engine: Engine, layout: Parallelism) -> Fit:
    if layout != Parallelism():
        raise BadQuestion("a machine without accelerators has nothing to divide a model among")
    use, memory = engine.uses, hardware.memory

    def need(requests: int) -> DeviceNeed:
        settings = Settings(slots=requests, context_tokens=workload.request_tokens)
        return DeviceNeed(
            device="host",
            weights_bytes=model.weight_bytes,
            kv_bytes=model.kv_bytes(workload.request_tokens) * requests,
            activation_bytes=estimate(0, 0),
            overhead_bytes=estimate(engine.overhead_bytes(model, settings), use.spread, use.source),
            usable_bytes=round(memory.available_bytes * (1 - RESERVED_SHARE)),
        )

    most = most_that(lambda requests: need(requests).fits, engine.max_slots or MOST_SLOTS)
    counted = max(1, min(workload.in_flight(), most))
    return Fit(fits=most >= 1, devices=(need(counted),), concurrency=counted, max_concurrency=most)


def _offloaded(
    hardware: Hardware, cards: Sequence[Accelerator], model: Model, workload: Workload, engine: Engine
) -> Fit | None:
    """As much on the cards as they hold, the rest on the host: routed experts first, since they are read least."""
    card = cards[0]
    free = card.free_bytes if card.free_bytes is not None else card.memory_bytes
    if free is None or not model.num_layers:
        return None
    use = engine.uses
    overhead = estimate(
        use.device_bytes + engine.activation_bytes(model, workload.prompt_tokens), use.spread, use.source
    )
    cache = model.kv_bytes(workload.request_tokens)
    experts = sum(part.bytes for part in model.parts if part.name == "experts")
    layers = model.num_layers
    room = free * use.share - overhead.high
    dense = model.weight_bytes - experts
    if experts and room >= dense + cache:
        kind, each, kept_bytes, kept_cache = "experts", experts / layers, dense, cache
        on_card = min(layers, int((room - dense - cache) // each))
    else:
        kind, each = "layers", (model.weight_bytes + cache) / layers
        on_card = max(0, min(layers, int(room // each)))
        kept_bytes, kept_cache = 0, round(cache * on_card / layers)
        each = model.weight_bytes / layers
    device_weights = round(kept_bytes + on_card * each)
    host_weights = model.weight_bytes - device_weights
    host_use = hardware.memory.available_bytes * (1 - RESERVED_SHARE)
    settings = Settings(slots=1, context_tokens=workload.request_tokens)
    needs = (
        DeviceNeed(
            device=card.name,
            weights_bytes=device_weights,
            kv_bytes=kept_cache,
            activation_bytes=estimate(0, 0),
            overhead_bytes=overhead,
            usable_bytes=round(free * use.share),
        ),
        DeviceNeed(
            device="host",
            weights_bytes=host_weights,
            kv_bytes=cache - kept_cache,
            activation_bytes=estimate(0, 0),
            overhead_bytes=estimate(engine.overhead_bytes(model, settings), use.spread, use.source),
            usable_bytes=round(host_use),
        ),
    )
    fits = all(need.fits for need in needs)
    return Fit(
        fits=fits,
        devices=needs,
        concurrency=1,
        max_concurrency=1 if fits else 0,
        offload=Offload(
            kind="experts" if kind == "experts" else "layers",
            device_layers=on_card,
            host_layers=layers - on_card,
            host_bytes=host_weights,
        ),
    )
