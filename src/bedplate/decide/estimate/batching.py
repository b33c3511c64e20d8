"""A model of continuous batching: requests share forward passes, and prompts run between the tokens of others.

`PassWork` is what one rank has to do, counted by `physics`; `Efficiencies` are the shares of a chip's rates that an
engine reaches. The functions that compute times from both use only arithmetic, so that a fit can pass whole columns of
rows.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.arrivals import ArrivalTerms
from bedplate.decide.estimate.calibration import load_table
from bedplate.decide.estimate.machine import MachineRates
from bedplate.decide.estimate.physics import ModelShape, count_attention_ops, get_link_bytes_s

WeightType = Literal["16-bit", "fp8", "nvfp4", "mxfp4", "int4"]

MEMORY_SHARE = 0.92
"""Share of the memory left by the weights that engines use for the cache: vLLM 0.9 of all, TensorRT-LLM 0.95."""
RESERVED_SHARE = 0.03
"""Share of a device's memory that its driver and error correction reserve."""
OVERHEAD_BYTES = 1.5e9
"""Context, workspaces and graphs on each device."""
SLOW_LINK_BYTES_S = 25e9
"""Bandwidth between devices whose link is unknown: PCIe 4."""
BUSIEST = 0.95
"""Upper limit of the share of time spent on prompts: in a closed loop, streams then wait for themselves."""
PASS_TOKENS = 8192.0
"""Prompt tokens that engines put into one pass, by default or in published recipes."""
CHANCE = 0.64
"""Factor of the variance with which the expected excess over a mean is a smooth square root."""
ACCEPT_SHARE = 0.7
"""Share of the time to accept a request for which the process in front of the engine is busy: parsing, tokenizing."""
TOGETHER_FROM, SHARPNESS = 0.45, 4.0
"""Requests whose arrivals are spread over a time stay together if all their prompts take more than this share of it."""
OVERLAP = 3
"""Order of the norm that combines two overlapping times: the larger counts, and slightly more if they are similar."""


class Layout(NamedTuple):
    """How one replica is divided among devices."""

    tensor: int = 1
    """Tensor ranks, which share the attention of one sequence."""
    attention_data: int = 1
    """Groups of tensor ranks, each with different sequences."""
    expert: int = 1
    """Ranks among which whole experts are divided; the remaining ranks split each expert."""
    pipeline: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Devices of one stage of one replica."""
        return self.tensor * self.attention_data

    @property
    def devices(self) -> int:
        return self.ranks * self.pipeline * self.replicas


class RankWork(NamedTuple):
    """What one rank has to do; seconds are at the data sheet's rates."""

    dense_s: float
    """Reading the weights that every pass reads."""
    experts_s: float
    """Reading all routed experts."""
    dense_unpacked_s: float
    """The part of `dense_s` for 4-bit weights that the chip's units cannot multiply, which are dequantized first."""
    experts_unpacked_s: float
    unpacking_layers: float
    idle_share: float
    """Share of the experts that one token does not use."""
    cache_s: float
    """Reading the cache of one sequence with half of its output."""
    dense_ops_s: float
    """Matrix products of one token, without experts and logits."""
    expert_ops_s: float
    logits_s: float
    attending_s: float
    """Attention of one new token, without latent attention."""
    latent_attending_s: float
    """Latent attention of one new token: all heads multiply the same compressed cache, which is read once."""
    prompt_attending_s: float
    activation_s: float
    """Moving a token's hidden states through memory once in every layer."""
    expert_activation_s: float
    """The same for its copies for each of its experts on this rank."""
    reduce_s: float
    """All-reduces of one token, all layers."""
    reduces: float
    """Number of all-reduces of a pass."""
    exchange_s: float
    """Sending one token to its experts and back, all layers."""
    exchanges: float
    far: float
    """Number of all-reduces and exchanges between nodes."""
    layers: float
    expert_layers: float
    fused_layers: float
    """Expert layers that Blackwell's fused kernels compute: routing, products and sum."""
    latent_layers: float
    state_layers: float
    sparse_layers: float
    quantizing: float
    """Layers whose activations are quantized to the 8 or 4 bits of the weights; layers with experts count twice."""
    dealt_experts: float
    """1 − 1/n if whole experts are divided among n ranks, the busiest of which determines the speed."""
    groups: float
    """Groups of ranks with different sequences."""
    uneven: float
    """1 if sequences are distributed over several groups, the fullest of which determines the speed."""
    pipeline: float
    prompt: float
    output: float
    held_bytes: float
    """Cache of one sequence on one device, with half of its output."""
    most_bytes: float
    """Cache of one complete sequence."""
    room_bytes: float
    """Memory of a device for caches."""


class Waits(NamedTuple):
    """Scheduler settings: passes before new requests are admitted, and how much a pass admits."""

    polled: Any = 0.0
    """Passes between two polls of the request queue."""
    gathered: Any = 0.0
    """Passes for which prompts are collected to fill a pass."""
    balanced: Any = 0.0
    """Maximum passes until all groups have a prompt."""
    pass_tokens: Any = PASS_TOKENS
    """Prompt tokens of one pass."""
    ahead: Any = 0.0
    """1 if prompts have priority over tokens: a pass has only prompts, all that wait, and they finish together."""
    unbalanced: Any = 0.0
    """1 if requests are assigned to groups of ranks without regard to how many each has, 0 if they are balanced."""


NO_WAITS = Waits()
CLOSED_LOOP = ArrivalTerms()


class Efficiencies(NamedTuple):
    """Shares of a data sheet's rates that are reached, and fixed costs in seconds."""

    dense_read: float
    expert_read: float
    unpacking: float
    """Time to dequantize 4-bit weights relative to reading them at the data sheet's bandwidth."""
    unpacking_layer_s: float
    cache_read: float
    matrix: float
    expert_matrix: float
    attention: float
    activations: float
    """How often hidden states move through memory between a layer's products: norms, residuals, quantization."""
    expert_activations: float
    """The same for the copies for experts: sorting, activation, sum."""
    latent_attention: float
    """Share of the matrix rate that latent attention of new tokens reaches."""
    imbalance: float
    """Excess of the busiest expert rank's products over the mean, if experts are divided among many ranks."""
    routing_spread: float
    """Share of a pass's tokens that choose experts independently of the others."""
    layer_s: float
    expert_layer_s: float
    latent_layer_s: float
    state_layer_s: float
    sparse_layer_s: float
    quantizing_s: float
    pass_s: float
    sequence_s: float
    """Sampling and scheduling of one sequence."""
    forward_s: float
    """Detokenizing and sending one token, in a process beside the engine that serves all ranks of a replica."""
    reduce_latency_s: float
    reduce_rate: float
    reduce_rate_prompt: float
    exchange_latency_s: float
    exchange_rate: float
    exchange_rate_prompt: float
    prompt_share: float
    """Share of a prompt's time that delays the tokens of others: a shared pass costs less than two."""
    request_s: float
    """Accepting a request and sending its first token."""
    first_layer_s: float
    """Host time for a layer of a new request's first pass, which does not use a captured graph."""
    first_expert_layer_s: float
    """Additional host time for a layer with experts; the next ones are the same for their layers."""
    fused: float
    """Share of that time that remains with fused expert kernels."""
    first_latent_layer_s: float
    first_state_layer_s: float
    host: float
    """An engine's host time for the layers above relative to that of all engines."""
    eager_layer_s: float
    """Host time for a layer of a decode pass that is not a captured graph."""
    host_shared: float
    """Share of that time that the host needs for each pass of a burst."""
    steps_waited: float
    """Passes before a single request is admitted and its token is sent: polling and streaming intervals."""
    polled: float
    """Share of the polling interval, in passes, that a request waits."""
    gathered: float
    """Share of the passes for which prompts are collected that a request waits."""
    balanced: float
    """Share of the passes until all groups have a prompt that a request waits."""
    queue: float
    burst: float
    """The wait in a burst relative to that for half of its prompts."""
    synchronized: float
    """Share of the requests of a closed loop that stay together after the first round, if all are equal."""
    scatter: float
    """Growth of the interval in which a round's requests arrive, relative to independent lengths."""
    jitter: float
    """The same for equal requests, as a share of the time of a request: clients and networks are not equally fast."""
    lag: float
    """Passes of a burst between computing a first token and sending it: the next pass is launched before."""
    cache_held: float
    """Share of a sequence's cache at half of its output that is used on average: lengths vary, and requests leave."""
    saturation: float
    """Throughput at saturation relative to the steady state."""
    unevenness: float
    """Excess of the fullest group over the mean, in square roots of the mean."""
    wave_slower: float
    """Prompt time in an initial burst on a cold engine relative to the steady state."""
    wave_token: float
    """Time per token in such a burst relative to the steady state."""
    guess: float
    """Time that each drafted token adds to a pass, as a share of the pass."""
    accepted: float
    """Acceptance rate of a drafted token if all before it were accepted."""
    apart_token: float
    """Time per token of decode workers in a disaggregated deployment relative to the same work alone."""
    apart_streams: float
    """Streams per rank of one decode worker above which operators add workers."""
    apart_growth: float
    """Exponent of the streams with which workers are added."""
    apart_first_s: float
    """Transfer of a request and its cache from a prefill to a decode worker."""
    apart_burst: float
    """Relative to `burst`: benchmarks of many nodes send fewer requests per stream."""
    apart_saturated: float
    """Share of the wait for prefill workers that is visible when decoding does not hide it."""
    apart_sized: float
    """Exponent of a prefill worker's load with which operators add further ones."""
    apart_far_s: float
    """Additional time of a message between nodes."""
    apart_uneven: float
    """Imbalance of the requests over decode workers, in square roots of the mean."""
    apart_scattered: float
    """Excess of the fullest group of a prefill worker over the mean, in square roots of the prompts of a pass."""
    tuned: float
    """Throughput of a tuned offline submission relative to a server at saturation."""
    tuned_server: float
    """Share of that throughput that remains with a latency target."""
    tuned_interactive: float


def take_min(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or element by element of two columns."""
    return (a + b - abs(a - b)) / 2


def take_max(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def classify_weights(shape: ModelShape) -> WeightType:
    label = shape.quantization.upper()
    if label.startswith("MXFP4"):
        return "mxfp4"
    if label.startswith(("NVFP4", "FP4")):
        return "nvfp4"
    if shape.bits >= 12:
        return "16-bit"
    return "fp8" if shape.bits >= 6.5 else "int4"


def limit_layout(layout: Layout, shape: ModelShape) -> Layout:
    """The layout with expert ranks limited to the ranks that exist."""
    return (
        layout._replace(expert=max(1, min(layout.expert, layout.ranks))) if shape.experts else layout._replace(expert=1)
    )


def choose_kv_bits(shape: ModelShape) -> float:
    """Engines and published recipes use an 8-bit cache if weights and activations have at most 8 bits."""
    return 8.0 if classify_weights(shape) in ("fp8", "nvfp4", "mxfp4") else 16.0


def count_rank_work(
    machine: MachineRates,
    shape: ModelShape,
    layout: Layout,
    prompt: float,
    output: float,
    kv_bits: float,
    cached: float = 0.0,
    *,
    shared: bool = True,
) -> RankWork:
    """The work of one request on each rank. `cached` prompt tokens are already in the cache: once for all requests if
    `shared`, else once for each."""
    tensor, groups, ranks, stages = layout.tensor, layout.attention_data, layout.ranks, layout.pipeline
    bandwidth = machine.bandwidth_bytes_s
    context = prompt + output / 2
    wide = machine.rate("bf16", "fp16", "fp32") or 1e12
    dense_rate = _get_matrix_rate(machine, shape, shape.dense_bytes, shape.dense_params)
    expert_rate = _get_matrix_rate(machine, shape, shape.expert_bytes, shape.expert_params)
    dense_unpacked = _needs_dequantizing(machine, shape, shape.dense_bytes, shape.dense_params)
    experts_unpacked = _needs_dequantizing(machine, shape, shape.expert_bytes, shape.expert_params)
    cache = held = complete = common = pair_ops = latent_ops = 0.0
    for group in shape.attention:
        split = 1 if group.latent else min(tensor, group.kv_heads)
        per_token = group.bytes_per_token * kv_bits / 16 / split
        state = group.state_bytes / tensor
        seen = context if group.window is None else min(context, group.window)
        kept = group.window if group.window is not None and not group.latent else math.inf
        cache += per_token * seen + 2 * state
        once = min(cached, prompt) if shared and group.window is None else 0.0
        held += per_token * (min(context, kept) - once) + state
        complete += per_token * (min(prompt + output, kept) - once) + state
        common += per_token * once
        if group.latent:
            latent_ops += group.pair_ops * seen / tensor
        else:
            pair_ops += group.pair_ops * seen / tensor
    new = max(1.0, prompt - cached)
    unabsorbed = count_attention_ops(shape, new, min(cached, prompt), absorbed=False) / tensor
    link = get_link_bytes_s(machine, ranks) or SLOW_LINK_BYTES_S
    sent = 2.0 * shape.hidden * 1.5 * min(shape.experts_active, layout.expert) * (layout.expert - 1) / layout.expert
    exchanging = groups > 1 and shape.experts > 0
    reduces = 2.0 * shape.layers if tensor > 1 else 0.0
    exchanges = 2.0 * shape.moe_layers if exchanging else 0.0
    weights = (shape.total_bytes - shape.expert_bytes) / tensor + shape.expert_bytes / ranks
    memory = float(machine.memory_bytes or 0)
    return RankWork(
        dense_s=shape.dense_bytes / tensor / bandwidth,
        experts_s=shape.expert_bytes / ranks / bandwidth,
        dense_unpacked_s=shape.dense_bytes / tensor / bandwidth if dense_unpacked else 0.0,
        experts_unpacked_s=shape.expert_bytes / ranks / bandwidth if experts_unpacked else 0.0,
        unpacking_layers=float(shape.layers * dense_unpacked + shape.moe_layers * experts_unpacked),
        idle_share=1.0 - shape.expert_share,
        cache_s=cache / bandwidth,
        dense_ops_s=2.0 * (shape.dense_params - shape.output_params) / tensor / dense_rate,
        expert_ops_s=2.0 * shape.expert_params * shape.expert_share / ranks / expert_rate,
        logits_s=2.0 * shape.output_params / tensor / wide,
        attending_s=pair_ops / wide,
        latent_attending_s=latent_ops / wide,
        prompt_attending_s=unabsorbed / wide,
        activation_s=2.0 * shape.hidden * shape.layers / bandwidth,
        expert_activation_s=2.0 * shape.hidden * shape.moe_layers * shape.experts_active / layout.expert / bandwidth,
        reduce_s=8.0 * (tensor - 1) / tensor * shape.hidden * shape.layers / link,
        reduces=reduces,
        exchange_s=sent * shape.moe_layers / link if exchanging else 0.0,
        exchanges=exchanges,
        far=reduces + exchanges if ranks > machine.per_node else 0.0,
        layers=float(shape.layers),
        expert_layers=float(shape.moe_layers),
        fused_layers=float(shape.moe_layers) if _has_fused_experts(machine, shape) else 0.0,
        latent_layers=float(sum(group.layers for group in shape.attention if group.latent)),
        state_layers=float(sum(group.layers for group in shape.attention if group.state_bytes)),
        sparse_layers=float(sum(group.layers for group in shape.attention if group.latent and group.window)),
        quantizing=float(shape.layers + shape.moe_layers) if classify_weights(shape) in ("fp8", "nvfp4") else 0.0,
        dealt_experts=1.0 - 1.0 / layout.expert if shape.experts else 0.0,
        groups=float(groups),
        uneven=1.0 if groups > 1 else 0.0,
        pipeline=float(stages),
        prompt=new,
        output=max(1.0, output),
        held_bytes=max(1.0, held / stages),
        most_bytes=max(1.0, complete / stages),
        room_bytes=MEMORY_SHARE * (memory * (1 - RESERVED_SHARE) - (weights + common) / stages - OVERHEAD_BYTES),
    )


def _get_matrix_rate(machine: MachineRates, shape: ModelShape, size: float, params: float) -> float:
    """The rate of the units that multiply such weights; 4-bit units only if activations have 4 bits too."""
    bits = size * 8 / params if params else 16.0
    kind = classify_weights(shape)
    types = ["bf16", "fp16", "fp32"]
    if bits < 12 and kind != "int4" and not (kind == "mxfp4" and bits < 6 and "fp4" not in machine.ops_s):
        types = ["fp8", "int8", *types]
    if bits < 6 and kind == "nvfp4":
        types = ["fp4", *types]
    return machine.rate(*types) or 1e12


def _has_fused_experts(machine: MachineRates, shape: ModelShape) -> bool:
    """Whether engines have a fused kernel for all experts of a layer: 8 and 4 bits on Blackwell."""
    return machine.family == "blackwell-dc" and classify_weights(shape) in ("fp8", "nvfp4", "mxfp4")


def _needs_dequantizing(machine: MachineRates, shape: ModelShape, size: float, params: float) -> bool:
    """Whether these are 4-bit weights that the chip can multiply only after dequantizing them."""
    if not params or size * 8 / params >= 6:
        return False
    return classify_weights(shape) == "int4" or "fp4" not in machine.ops_s


@lru_cache(maxsize=512)
def get_efficiencies(engine: str, family: str, weights: WeightType) -> Efficiencies:
    """The fitted efficiencies for this engine on this chip family; without measurements, the common ones."""
    fitted = load_table("serving")["efficiencies"]
    return Efficiencies(*(compute_efficiency(fitted[name], engine, family, weights) for name in Efficiencies._fields))


def compute_efficiency(entry: dict[str, Any], engine: str, family: str, weights: str) -> float:
    """Apply the fitted effects: to a share on a logistic scale, so that it stays below 1, to others on a log scale."""
    effect = sum(
        entry.get(axis, {}).get(key, 0.0)
        for axis, key in (
            ("engine", engine),
            ("family", family),
            ("weights", weights),
            ("pair", f"{engine} on {family}"),
        )
    )
    base = float(entry["base"])
    if entry["scale"] == "share":
        return 1.0 / (1.0 + (1.0 / base - 1.0) * math.exp(-effect))
    return base * math.exp(effect)


def compute_pass_parts(
    w: Any, e: Any, tokens: Any, cache_s: Any, attending_s: Any, sequences: Any, link_rates: Any
) -> Any:
    """Seconds of one pass of `tokens` through each group of ranks: reading, computing, links and fixed costs."""
    reduce_rate, exchange_rate = link_rates
    everywhere = tokens * w.groups
    touched = 1.0 - w.idle_share ** (everywhere * e.routing_spread)
    reading = (
        w.dense_s / e.dense_read
        + w.experts_s * touched / e.expert_read
        + cache_s / e.cache_read
        + (w.dense_unpacked_s + w.experts_unpacked_s * touched) * e.unpacking
    )
    computing = (
        (tokens * w.dense_ops_s + sequences * w.logits_s) / e.matrix
        + attending_s / e.attention
        + everywhere * w.expert_ops_s * (1.0 + e.imbalance * w.dealt_experts) / e.expert_matrix
    )
    links = (
        w.reduces * e.reduce_latency_s
        + tokens * w.reduce_s / reduce_rate
        + w.exchanges * e.exchange_latency_s
        + w.far * e.apart_far_s
        + tokens * w.exchange_s / exchange_rate
    )
    fixed = (
        w.layers * e.layer_s
        + w.expert_layers * e.expert_layer_s
        + w.latent_layers * e.latent_layer_s
        + w.state_layers * e.state_layer_s
        + w.sparse_layers * e.sparse_layer_s
        + w.quantizing * e.quantizing_s
        + w.unpacking_layers * e.unpacking_layer_s
        + tokens * w.activation_s * e.activations
        + everywhere * w.expert_activation_s * e.expert_activations
        + e.pass_s
        + sequences * e.sequence_s
    )
    return reading, computing, links, fixed


def compute_pass_s(w: Any, e: Any, tokens: Any, cache_s: Any, attending_s: Any, sequences: Any, link_rates: Any) -> Any:
    reading, computing, links, fixed = compute_pass_parts(w, e, tokens, cache_s, attending_s, sequences, link_rates)
    return overlap_times(reading, computing) + links + fixed


def overlap_times(one: Any, other: Any) -> Any:
    """The time of two activities that overlap."""
    return (one**OVERLAP + other**OVERLAP) ** (1 / OVERLAP)


def compute_decode_parts(w: Any, e: Any, batch: Any) -> Any:
    each = batch / w.pipeline
    attending_s = each * (w.attending_s + w.latent_attending_s * e.attention / e.latent_attention)
    return compute_pass_parts(w, e, each, each * w.cache_s, attending_s, each, (e.reduce_rate, e.exchange_rate))


def compute_decode_s(w: Any, e: Any, batch: Any) -> Any:
    """One token for each of `batch` sequences of a group; each pipeline stage processes a part of them."""
    reading, computing, links, fixed = compute_decode_parts(w, e, batch)
    return overlap_times(reading, computing) + links + fixed


def compute_prefill_s(w: Any, e: Any) -> Any:
    """The time of one prompt alone."""
    return compute_pass_s(
        w, e, w.prompt, 0.0, w.prompt_attending_s, 1.0, (e.reduce_rate_prompt, e.exchange_rate_prompt)
    )


def compute_prefill_each_s(w: Any, e: Any, count: Any) -> Any:
    """The time per prompt of `count` prompts that share a pass."""
    rates = (e.reduce_rate_prompt, e.exchange_rate_prompt)
    return compute_pass_s(w, e, count * w.prompt, 0.0, count * w.prompt_attending_s, count, rates) / count


def compute_burst_each_s(w: Any, e: Any, together: Any, host_s: Any) -> Any:
    """The time per prompt of a burst in passes of `together`; the host launches each while the last one runs."""
    return overlap_times(together * compute_prefill_each_s(w, e, together), e.host_shared * host_s) / together


def count_resident(w: Any, e: Any, complete: Any) -> Any:
    """The number of requests whose caches fit in a group; `complete` (1 or 0): the whole output is reserved."""
    held = complete * w.most_bytes + (1.0 - complete) * w.held_bytes * e.cache_held
    return take_max(w.room_bytes / held, 1.0)


def compute_first_host_s(w: Any, e: Any) -> Any:
    """Host time to launch a request's first pass kernel by kernel; it hardly depends on chip or prompt."""
    return e.host * (
        w.layers * e.first_layer_s
        + (w.expert_layers - w.fused_layers * (1.0 - e.fused)) * e.first_expert_layer_s
        + w.latent_layers * e.first_latent_layer_s
        + w.state_layers * e.first_state_layer_s
    )


def compute_speculation(e: Any, guessing: Any) -> tuple[Any, Any]:
    """The relative time of a pass with `guessing` drafted tokens per sequence, and the tokens that it yields."""
    return 1.0 + e.guess * guessing, (1.0 - e.accepted ** (guessing + 1.0)) / (1.0 - e.accepted)


def compute_synchronized(e: Any, arrival: ArrivalTerms, busy: Any, queued: Any) -> Any:
    """The share of a closed loop's requests that arrive in a burst, if prompts take the share `busy` of the time.

    The first round is a burst. Lengths that differ then spread the arrivals of a round over an interval that grows with
    the square root of the rounds. As long as it is shorter than the time of all prompts, requests queue as in a burst.

    Equal requests that do not start in a burst keep their distances, unless their prompts queue: `queued` is the time
    of all prompts relative to the interval of the first arrivals. While prompts are computed, hardly any token is, so
    requests whose prompts queue end together.
    """
    gathered = 1.0 / (1.0 + (TOGETHER_FROM / queued) ** SHARPNESS)
    growth = (e.scatter * arrival.spread + e.jitter) / take_max(busy, 0.01) + 1e-3
    last = take_max(take_min(growth**-2.0, arrival.rounds - 0.5), 0.5)
    later = last - 0.5 - growth * (last**1.5 - 0.5**1.5) / 1.5
    counted = arrival.rounds - 1.0 + arrival.first_round
    burst = (arrival.first_round + e.synchronized * later) / counted
    return (1.0 - arrival.random) * (arrival.staggered * gathered + (1.0 - arrival.staggered) * burst)


def compute_steady(
    w: Any,
    e: Any,
    streams: Any,
    most_resident: Any,
    waits: Waits = NO_WAITS,
    guessing: Any = 0.0,
    arrival: ArrivalTerms = CLOSED_LOOP,
    eager: Any = 0.0,
) -> Any:
    """Time to first token, time per token and batch of a group with `streams` requests in flight at all times.

    Each token waits for its pass and for a share of the others' prompts; requests that do not fit in memory queue. The
    prompts of requests that arrive in a burst are computed together, so this time delays first tokens instead. Without
    captured graphs (`eager`), the host launches every pass kernel by kernel.
    """
    slower, accepted = compute_speculation(e, guessing)
    own = streams / w.groups
    own = take_max(own + w.uneven * e.unevenness * own**0.5, 1.0)
    # With a very large limit, the smaller of the two would be lost to rounding.
    held = take_max(take_min(own, most_resident), 1.0)
    prompt_s = compute_prefill_s(w, e)
    host_s = compute_first_host_s(w, e)
    most_together = take_max(waits.pass_tokens / w.prompt, 1.0)
    together = take_max(take_min(most_together, held), 1.0)
    accept_s = ACCEPT_SHARE * e.request_s * w.groups
    burst_s = overlap_times(compute_burst_each_s(w, e, together, host_s), accept_s)
    # Beside the passes of the devices: accepting requests, sending tokens, and launching passes that are not captured.
    beside_s = held * (w.groups * e.forward_s + accept_s / w.output) + eager * w.layers * e.eager_layer_s
    alone_s = e.request_s + host_s + prompt_s + w.output * compute_decode_s(w, e, 1.0) * slower / accepted
    queued = held * burst_s / alone_s
    batch = held
    token_s = compute_decode_s(w, e, batch)
    synchronized = 0.0
    for _ in range(4):
        others_s = batch / w.pipeline / w.output * prompt_s * e.prompt_share
        # In a burst, half of the prompts precede a request's own on average, and those of its own pass.
        others_s = others_s * (1.0 - synchronized * (1.0 + together / held) / 2.0)
        token_s = overlap_times(compute_decode_s(w, e, batch) * slower / accepted + others_s, beside_s)
        batch = held * w.output * token_s / (w.output * token_s + prompt_s)
        busy = held * burst_s / (w.output * token_s + held * burst_s)
        synchronized = compute_synchronized(e, arrival, busy, queued)
    busy = take_min(batch / w.output * prompt_s / token_s, BUSIEST)
    # Requests that arrive between two polls are computed together and finish with their pass.
    often = own * accepted / w.output
    arrived = 1.0 + often * (waits.polled + waits.gathered)
    taken = take_min(arrived, most_together)
    arrived_s = (arrived + taken) / 2.0 * compute_prefill_each_s(w, e, taken)
    # The first collected request waits for the whole interval, later ones for less.
    gathered = waits.gathered * (1.0 - often * waits.gathered / (1.0 + often * waits.gathered) / 2.0)
    late = e.lag * take_max(take_min(together, held - together), 0.0)
    wave_s = ((held + waits.ahead * together) / 2.0 + late) * burst_s
    # Groups wait at most until each of them has a request that finishes.
    balanced = take_min(waits.balanced, 2.0 * w.output / own)
    # Independent arrivals queue as before a server with constant service times; a closed loop limits its own queue.
    queue = arrival.random / 2.0 + (1.0 - arrival.random) * e.queue
    first_s = (
        e.request_s
        + host_s
        + e.steps_waited * compute_decode_s(w, e, batch) * slower
        + (e.polled * waits.polled + e.gathered * gathered + e.balanced * balanced) * token_s * accepted
        + arrived_s
        + prompt_s * queue * busy / (1.0 - busy)
        + (arrival.staggered + (1.0 - arrival.staggered) * e.burst) * synchronized * wave_s
    )
    queued_s = take_max(own / held - 1.0, 0.0) * (w.output * token_s + prompt_s)
    return first_s + queued_s, token_s, batch


def compute_saturated_tok_s(w: Any, e: Any, batch: Any) -> Any:
    """Tokens per second of one replica if every group always has `batch` requests."""
    token_s = compute_decode_s(w, e, batch) + batch / w.pipeline / w.output * compute_prefill_s(w, e) * e.prompt_share
    return batch * w.groups / token_s * e.saturation


def compute_streamed_tok_s(w: Any, first_s: Any, token_s: Any, streams: Any) -> Any:
    """Tokens per second of one replica in a closed loop with `streams` requests."""
    return streams * w.output / (first_s + w.output * token_s)


def compute_burst(w: Any, e: Any, streams: Any, most_resident: Any) -> Any:
    """Like `steady`, for a benchmark that sends all its requests in one burst: prompts queue, then all decode."""
    own = take_max(streams / w.groups, 1.0)
    held = take_min(own, most_resident)
    prompt_s = compute_prefill_s(w, e) * e.wave_slower
    token_s = compute_decode_s(w, e, held) * e.wave_token
    first_s = e.request_s + compute_first_host_s(w, e) + e.steps_waited * token_s + prompt_s * (1.0 + held) / 2.0
    queued_s = take_max(own / held - 1.0, 0.0) / 2.0 * (w.output * token_s + prompt_s * held)
    return first_s + queued_s, token_s, prompt_s * held


def compute_disaggregated(q: Any, e: Any) -> Any:
    """Time to first token, time per token and a worker's batch in a disaggregated deployment.

    If the number of workers and their layout are unknown, operators are assumed to add workers as load grows, and to
    choose the faster of tensor parallelism (`work`) and data parallelism (`spread`) for attention.
    """
    known = take_min(q.decodes, 1.0)
    added = (1.0 + q.streams / (e.apart_streams * q.ranks)) ** e.apart_growth
    # Routers distribute requests without checking which worker has a free slot.
    bins = take_max(known * q.decodes, 1.0)
    over = (q.streams - q.slots) / bins
    spread = CHANCE * e.apart_uneven**2 * q.streams / bins * (1.0 - 1.0 / bins)
    held = q.streams - bins * (over + (over * over + spread + 1e-4) ** 0.5) / 2.0
    share = take_max(held / (known * q.decodes + (1.0 - known) * added), 1.0)
    divided_s, dealt_s = (
        compute_decode_s(q.work, e, share),
        compute_decode_s(q.spread, e, take_max(share / q.ranks, 1.0)),
    )
    said_s = divided_s ** (1.0 - q.dealt) * dealt_s**q.dealt
    pass_time_s = known * said_s + (1.0 - known) * take_min(divided_s, dealt_s)
    slower, accepted = compute_speculation(e, q.guessing)
    token_s = pass_time_s * e.apart_token * slower / accepted
    answer_s = q.work.output * token_s
    together = take_max(q.waits.pass_tokens / q.prompts.prompt, 1.0)
    host_s = compute_first_host_s(q.prompts, e) * take_max(q.prompts.prompt / q.waits.pass_tokens, 1.0)
    each_s = compute_burst_each_s(q.prompts, e, together, host_s) / q.prompts.groups
    # A pass lasts as long as that of the fullest group.
    each_s = each_s * (1.0 + q.waits.unbalanced * q.prompts.uneven * e.apart_scattered / together**0.5)
    one_s = q.streams * each_s
    prefills = known * q.prefills + (1.0 - known) * (1.0 + one_s / answer_s) ** e.apart_sized
    backlog_s = one_s / prefills
    # Where prompts have priority, those of a pass leave the worker together, after the next pass has been launched.
    waiting = take_max(q.streams / prefills, 1.0)
    taken = take_min(together * q.prompts.groups, waiting)
    late = e.lag * take_max(take_min(taken, waiting - taken), 0.0)
    burst_s = backlog_s / 2.0 + q.waits.ahead * (taken / 2.0 + late) * each_s
    for_a_place_s = take_max(q.streams / held - 1.0, 0.0) * answer_s
    # Requests end on decode workers one by one, so that only those of the first round arrive in a burst.
    arrival = q.arrival
    together_share = (1.0 - arrival.random) * arrival.first_round / (arrival.rounds - 1.0 + arrival.first_round)
    first_s = (
        e.request_s
        + host_s
        + e.apart_first_s
        + e.steps_waited * token_s
        + compute_prefill_s(q.prompts._replace(groups=take_min(q.prompts.groups, 1.0)), e)
        + e.burst * e.apart_burst * together_share * burst_s
        + take_max(for_a_place_s, e.apart_saturated * (backlog_s - answer_s))
    )
    return first_s, token_s, share
