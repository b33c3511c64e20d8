"""Continuous batching: requests that come and go share passes through the model, prompts between the tokens of others.

Work is what one rank has to do, counted by `physics`; efficiencies say how near an engine comes to a chip's rates.
The functions that turn both into times use nothing but arithmetic, so that a fit can give them whole columns of rows.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.calibration import table
from bedplate.decide.estimate.machine import Machine
from bedplate.decide.estimate.physics import Shape, attention_ops, link_bytes_s

WeightType = Literal["16-bit", "fp8", "nvfp4", "mxfp4", "int4"]

MEMORY_SHARE = 0.92
"""Of what weights leave free on a device, what engines take for caches: vLLM 0.9 of all, TensorRT-LLM 0.95."""
RESERVED_SHARE = 0.03
"""Of a device's memory, what its driver and its error correction keep."""
OVERHEAD_BYTES = 1.5e9
"""Context, workspaces and graphs on each device."""
SLOW_LINK_BYTES_S = 25e9
"""Between devices of which nothing is said: PCIe 4."""
BUSIEST = 0.95
"""Share of prompts in the time beyond which a queue never drains in a closed loop: streams wait for themselves."""
PASS_TOKENS = 8192.0
"""Of prompts that engines put into one pass, by default or in published recipes."""
CHANCE = 0.64
"""Of a deviation's square: with it, what lies above a mean in expectation is a root that has no corner."""
OVERLAP = 3
"""Of two that go on at once, the larger counts, and a little more where they are alike: a norm of this order."""


class Layout(NamedTuple):
    """How one replica is divided among devices."""

    tensor: int = 1
    """Ranks that share the attention of one sequence."""
    attention_data: int = 1
    """Groups of such ranks, each with sequences of its own."""
    expert: int = 1
    """Ranks among which whole experts are divided; the rest of the ranks cut each expert."""
    pipeline: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Devices of one stage of one replica."""
        return self.tensor * self.attention_data

    @property
    def devices(self) -> int:
        return self.ranks * self.pipeline * self.replicas


class Work(NamedTuple):
    """What one rank has to do; seconds are at the sheet's rates."""

    dense_s: float
    """Reading the weights that every pass reads."""
    experts_s: float
    """Reading all routed experts."""
    dense_unpacked_s: float
    """Of `dense_s`, what is of 4 bits that the chip's units cannot multiply: weights are unpacked on the way."""
    experts_unpacked_s: float
    unpacking_layers: float
    idle_share: float
    """Of the experts, what one token leaves alone."""
    cache_s: float
    """Reading the cache of one sequence, half of its answer written."""
    dense_ops_s: float
    """Matrix products of one token, but for experts and logits."""
    expert_ops_s: float
    logits_s: float
    attending_s: float
    """Attention of one new token."""
    prompt_attending_s: float
    activation_s: float
    """One pass of a token's hidden states through memory in every layer."""
    expert_activation_s: float
    """Likewise of its copies for each of its experts on this rank."""
    reduce_s: float
    """All-reduces of one token, all layers."""
    reduces: float
    """How many a pass has."""
    exchange_s: float
    """Sending one token to its experts and back, all layers."""
    exchanges: float
    far: float
    """Of reduces and exchanges, how many go from node to node."""
    layers: float
    expert_layers: float
    fused_layers: float
    """Of those with experts, what Blackwell's kernels compute as one: choosing, multiplying and adding up."""
    latent_layers: float
    state_layers: float
    sparse_layers: float
    quantizing: float
    """Layers, those with experts twice, whose inputs are shortened to the 8 or 4 bits of the weights on the way."""
    groups: float
    """Of ranks with sequences of their own."""
    uneven: float
    """1 where sequences are dealt to several groups, of which the fullest sets the pace."""
    pipeline: float
    prompt: float
    output: float
    held_bytes: float
    """Cache of one sequence on one device, half of its answer written."""
    most_bytes: float
    """Cache of one sequence when it is complete."""
    room_bytes: float
    """What a device has for caches."""


class Waits(NamedTuple):
    """How a scheduler is set: passes that it lets go by before it takes in new requests, and how much it takes in."""

    polled: Any = 0.0
    """Between two looks at what has arrived."""
    gathered: Any = 0.0
    """While prompts for a fuller pass are gathered."""
    balanced: Any = 0.0
    """At the most, until all groups have a prompt."""
    pass_tokens: Any = PASS_TOKENS
    """Tokens of prompts that one pass takes."""
    ahead: Any = 0.0
    """1 where prompts go ahead of all tokens: a pass has prompts alone, all that wait, and ends for all at once."""


NO_WAITS = Waits()


class Efficiencies(NamedTuple):
    """Shares of a sheet's rates that are reached, and fixed costs in seconds."""

    dense_read: float
    expert_read: float
    unpacking: float
    """Time to unpack 4-bit weights against that of reading them at the sheet's bandwidth."""
    unpacking_layer_s: float
    cache_read: float
    matrix: float
    expert_matrix: float
    attention: float
    activations: float
    """How often hidden states pass through memory between a layer's products: norms, residuals, shortening."""
    expert_activations: float
    """Likewise the copies that experts get: sorting, activation, adding up."""
    routing_spread: float
    """Of the tokens of a pass, how many choose experts independently of the others."""
    layer_s: float
    expert_layer_s: float
    latent_layer_s: float
    state_layer_s: float
    sparse_layer_s: float
    quantizing_s: float
    pass_s: float
    sequence_s: float
    """Sampling, detokenizing and scheduling of one sequence."""
    reduce_latency_s: float
    reduce_rate: float
    reduce_rate_prompt: float
    exchange_latency_s: float
    exchange_rate: float
    exchange_rate_prompt: float
    prompt_share: float
    """Of a prompt's time, how much the tokens of others wait for: passes that both share cost less than two."""
    request_s: float
    """Accepting a request and sending its first token."""
    first_layer_s: float
    """What the host does for a layer of a new request's first pass, which no captured graph spares it."""
    first_expert_layer_s: float
    """The same for a layer with experts, beside the former; likewise the next two."""
    fused: float
    """Of that, what is left where kernels compute all of a layer's experts as one."""
    first_latent_layer_s: float
    first_state_layer_s: float
    host: float
    """An engine's time for the four above against that of all engines."""
    host_shared: float
    """Of that time, what the host needs for each pass of a wave."""
    steps_waited: float
    """Passes that go by before a lone request is taken in and its token is sent: polling and streaming intervals."""
    polled: float
    """Of an interval, in passes, at which an engine looks for new requests, what one of them waits."""
    gathered: float
    """Of the passes for which an engine gathers prompts, likewise."""
    balanced: float
    """Of the passes for which groups wait until all have a prompt, likewise."""
    queue: float
    burst: float
    """Share of all requests in the first wave, halved: each of them waits for half of the others on average."""
    cache_held: float
    """Of a half-written sequence's cache, what is held on average: lengths vary, and requests leave."""
    saturation: float
    """Throughput under endless load against that of the steady state."""
    unevenness: float
    """Of the fullest group over the mean, in roots of the mean."""
    wave_slower: float
    """Prompts that all arrive at once on an engine that is cold, against those of the steady state."""
    wave_token: float
    """Likewise the tokens of such a wave."""
    guess: float
    """What each token that is guessed ahead adds to a pass, against the pass without any."""
    accepted: float
    """Of such guesses, the share that holds if all before it did."""
    apart_token: float
    """Time per token of decode workers that compute no prompts, against the same work by itself."""
    apart_streams: float
    """Streams for each rank of one decode worker beyond which people add workers."""
    apart_growth: float
    """How fast workers are added then: with what power of the streams."""
    apart_first_s: float
    """Handing a request and its cache from one worker to the other."""
    apart_burst: float
    """Against `burst`: benchmarks of many nodes send fewer requests for each stream."""
    apart_saturated: float
    """Of the wait for prefill workers that answers do not hide, what is seen."""
    apart_sized: float
    """With what power of the load of one prefill worker people add further ones."""
    apart_far_s: float
    """What a message from node to node takes longer."""
    apart_uneven: float
    """How unevenly requests are dealt out to decode workers, in roots of the mean."""
    tuned: float
    """Throughput of a tuned submission with all requests at hand, against a server's under endless load."""
    tuned_server: float
    """What meeting a latency target leaves of that."""
    tuned_interactive: float


def least(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each pair of two columns."""
    return (a + b - abs(a - b)) / 2


def most(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def weight_type(shape: Shape) -> WeightType:
    label = shape.quantization.upper()
    if label.startswith("MXFP4"):
        return "mxfp4"
    if label.startswith(("NVFP4", "FP4")):
        return "nvfp4"
    if shape.bits >= 12:
        return "16-bit"
    return "fp8" if shape.bits >= 6.5 else "int4"


def layout_on(layout: Layout, shape: Shape) -> Layout:
    """Experts can be divided among no more ranks than there are."""
    return (
        layout._replace(expert=max(1, min(layout.expert, layout.ranks))) if shape.experts else layout._replace(expert=1)
    )


def usual_kv_bits(shape: Shape) -> float:
    """Engines and their recipes keep an 8-bit cache where weights and activations are 8 bits or fewer."""
    return 8.0 if weight_type(shape) in ("fp8", "nvfp4", "mxfp4") else 16.0


def work_of(
    machine: Machine,
    shape: Shape,
    layout: Layout,
    prompt: float,
    output: float,
    kv_bits: float,
    cached: float = 0.0,
    *,
    shared: bool = True,
) -> Work:
    """What a request of this shape asks of each rank. `cached` tokens of the prompt are in the cache already: once for
    all requests, or each has its own."""
    tensor, groups, ranks, stages = layout.tensor, layout.attention_data, layout.ranks, layout.pipeline
    bandwidth = machine.bandwidth_bytes_s
    context = prompt + output / 2
    wide = machine.rate("bf16", "fp16", "fp32") or 1e12
    dense_rate = _matrix_rate(machine, shape, shape.dense_bytes, shape.dense_params)
    expert_rate = _matrix_rate(machine, shape, shape.expert_bytes, shape.expert_params)
    dense_unpacked = _unpacked(machine, shape, shape.dense_bytes, shape.dense_params)
    experts_unpacked = _unpacked(machine, shape, shape.expert_bytes, shape.expert_params)
    cache = held = complete = common = pair_ops = 0.0
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
        pair_ops += group.pair_ops * seen / tensor
    new = max(1.0, prompt - cached)
    unabsorbed = attention_ops(shape, new, min(cached, prompt), absorbed=False) / tensor
    link = link_bytes_s(machine, ranks) or SLOW_LINK_BYTES_S
    sent = 2.0 * shape.hidden * 1.5 * min(shape.experts_active, layout.expert) * (layout.expert - 1) / layout.expert
    exchanging = groups > 1 and shape.experts > 0
    reduces = 2.0 * shape.layers if tensor > 1 else 0.0
    exchanges = 2.0 * shape.moe_layers if exchanging else 0.0
    weights = (shape.total_bytes - shape.expert_bytes) / tensor + shape.expert_bytes / ranks
    memory = float(machine.memory_bytes or 0)
    return Work(
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
        fused_layers=float(shape.moe_layers) if _fuses(machine, shape) else 0.0,
        latent_layers=float(sum(group.layers for group in shape.attention if group.latent)),
        state_layers=float(sum(group.layers for group in shape.attention if group.state_bytes)),
        sparse_layers=float(sum(group.layers for group in shape.attention if group.latent and group.window)),
        quantizing=float(shape.layers + shape.moe_layers) if weight_type(shape) in ("fp8", "nvfp4") else 0.0,
        groups=float(groups),
        uneven=1.0 if groups > 1 else 0.0,
        pipeline=float(stages),
        prompt=new,
        output=max(1.0, output),
        held_bytes=max(1.0, held / stages),
        most_bytes=max(1.0, complete / stages),
        room_bytes=MEMORY_SHARE * (memory * (1 - RESERVED_SHARE) - (weights + common) / stages - OVERHEAD_BYTES),
    )


def _matrix_rate(machine: Machine, shape: Shape, size: float, params: float) -> float:
    """Of the units that multiply such weights: 4-bit ones only where activations are that short too."""
    bits = size * 8 / params if params else 16.0
    kind = weight_type(shape)
    types = ["bf16", "fp16", "fp32"]
    if bits < 12 and kind != "int4" and not (kind == "mxfp4" and bits < 6 and "fp4" not in machine.ops_s):
        types = ["fp8", "int8", *types]
    if bits < 6 and kind == "nvfp4":
        types = ["fp4", *types]
    return machine.rate(*types) or 1e12


def _fuses(machine: Machine, shape: Shape) -> bool:
    """Whether all engines have the same kernel for all of a layer's experts: those for Blackwell of 8 and 4 bits."""
    return machine.family == "blackwell-dc" and weight_type(shape) in ("fp8", "nvfp4", "mxfp4")


def _unpacked(machine: Machine, shape: Shape, size: float, params: float) -> bool:
    """Whether such weights are of 4 bits, and of a kind that this chip multiplies only after widening it."""
    if not params or size * 8 / params >= 6:
        return False
    return weight_type(shape) == "int4" or "fp4" not in machine.ops_s


@lru_cache(maxsize=512)
def efficiencies(engine: str, family: str, weights: WeightType) -> Efficiencies:
    """As fitted for this engine on chips of this family; what nobody has measured stands at what all have in common."""
    fitted = table("serving")["efficiencies"]
    return Efficiencies(*(efficiency(fitted[name], engine, family, weights) for name in Efficiencies._fields))


def efficiency(entry: dict[str, Any], engine: str, family: str, weights: str) -> float:
    """A share moves on a logistic scale, so that it stays below 1; a time or a count on a logarithmic one."""
    moved = sum(
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
        return 1.0 / (1.0 + (1.0 / base - 1.0) * math.exp(-moved))
    return base * math.exp(moved)


def pass_parts(w: Any, e: Any, tokens: Any, cache_s: Any, attending_s: Any, sequences: Any, link_rates: Any) -> Any:
    """Seconds of one pass of so many tokens through each group of ranks: reading, computing, links and fixed costs."""
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
        + everywhere * w.expert_ops_s / e.expert_matrix
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


def pass_s(w: Any, e: Any, tokens: Any, cache_s: Any, attending_s: Any, sequences: Any, link_rates: Any) -> Any:
    reading, computing, links, fixed = pass_parts(w, e, tokens, cache_s, attending_s, sequences, link_rates)
    return overlapped(reading, computing) + links + fixed


def overlapped(one: Any, other: Any) -> Any:
    """Time of two that go on at once."""
    return (one**OVERLAP + other**OVERLAP) ** (1 / OVERLAP)


def decode_parts(w: Any, e: Any, batch: Any) -> Any:
    each = batch / w.pipeline
    return pass_parts(w, e, each, each * w.cache_s, each * w.attending_s, each, (e.reduce_rate, e.exchange_rate))


def decode_s(w: Any, e: Any, batch: Any) -> Any:
    """One token for each of `batch` sequences of a group; the stages of a pipeline each work on a part of them."""
    each = batch / w.pipeline
    return pass_s(w, e, each, each * w.cache_s, each * w.attending_s, each, (e.reduce_rate, e.exchange_rate))


def prefill_s(w: Any, e: Any) -> Any:
    """One prompt by itself."""
    return pass_s(w, e, w.prompt, 0.0, w.prompt_attending_s, 1.0, (e.reduce_rate_prompt, e.exchange_rate_prompt))


def prefill_each_s(w: Any, e: Any, count: Any) -> Any:
    """One prompt of so many that share a pass."""
    rates = (e.reduce_rate_prompt, e.exchange_rate_prompt)
    return pass_s(w, e, count * w.prompt, 0.0, count * w.prompt_attending_s, count, rates) / count


def wave_each_s(w: Any, e: Any, together: Any, host_s: Any) -> Any:
    """One prompt of a wave in passes of `together`, each of which the host launches while the last is computed."""
    return overlapped(together * prefill_each_s(w, e, together), e.host_shared * host_s) / together


def resident(w: Any, e: Any, complete: Any) -> Any:
    """Requests whose caches a group holds at once; `complete` (1 or 0): room for the whole answer is set aside."""
    held = complete * w.most_bytes + (1.0 - complete) * w.held_bytes * e.cache_held
    return most(w.room_bytes / held, 1.0)


def first_host_s(w: Any, e: Any) -> Any:
    """Launching the first pass of a request kernel by kernel, which has little to do with the chip or the prompt."""
    return e.host * (
        w.layers * e.first_layer_s
        + (w.expert_layers - w.fused_layers * (1.0 - e.fused)) * e.first_expert_layer_s
        + w.latent_layers * e.first_latent_layer_s
        + w.state_layers * e.first_state_layer_s
    )


def guessed(e: Any, guessing: Any) -> tuple[Any, Any]:
    """How much longer a pass takes that guesses so many tokens ahead of each sequence, and how many come out of it."""
    return 1.0 + e.guess * guessing, (1.0 - e.accepted ** (guessing + 1.0)) / (1.0 - e.accepted)


def steady(w: Any, e: Any, streams: Any, most_resident: Any, waits: Waits = NO_WAITS, guessing: Any = 0.0) -> Any:
    """Time to first token, time per token and batch of a group, `streams` requests being always in flight.

    Each token waits for its own pass and for its share of the prompts of others; what does not fit in memory queues.
    """
    slower, accepted = guessed(e, guessing)
    own = streams / w.groups
    own = most(own + w.uneven * e.unevenness * own**0.5, 1.0)
    # Of very many the smaller of the two would be lost in rounding.
    held = most(least(own, most_resident), 1.0)
    prompt_s = prefill_s(w, e)
    batch = held
    token_s = decode_s(w, e, batch)
    for _ in range(4):
        token_s = decode_s(w, e, batch) * slower / accepted + batch / w.pipeline / w.output * prompt_s * e.prompt_share
        batch = held * w.output * token_s / (w.output * token_s + prompt_s)
    busy = least(batch / w.output * prompt_s / token_s, BUSIEST)
    host_s = first_host_s(w, e)
    most_together = most(waits.pass_tokens / w.prompt, 1.0)
    together = most(least(most_together, held), 1.0)
    # What arrives between two looks is computed together, and is there only when all of its pass is.
    often = own * accepted / w.output
    arrived = 1.0 + often * (waits.polled + waits.gathered)
    taken = least(arrived, most_together)
    arrived_s = (arrived + taken) / 2.0 * prefill_each_s(w, e, taken)
    # The first of those that are gathered waits for all of it, those that come later for less.
    gathered = waits.gathered * (1.0 - often * waits.gathered / (1.0 + often * waits.gathered) / 2.0)
    wave_s = (held + waits.ahead * together) * wave_each_s(w, e, together, host_s)
    # Groups wait no longer than until each of them has a request that leaves.
    balanced = least(waits.balanced, 2.0 * w.output / own)
    first_s = (
        e.request_s
        + host_s
        + e.steps_waited * decode_s(w, e, batch) * slower
        + (e.polled * waits.polled + e.gathered * gathered + e.balanced * balanced) * token_s * accepted
        + arrived_s
        + prompt_s * e.queue * busy / (1.0 - busy)
        + e.burst * wave_s
    )
    queued_s = most(own / held - 1.0, 0.0) * (w.output * token_s + prompt_s)
    return first_s + queued_s, token_s, batch


def saturated_tok_s(w: Any, e: Any, batch: Any) -> Any:
    """Tokens per second of one replica whose every group always has `batch` requests."""
    token_s = decode_s(w, e, batch) + batch / w.pipeline / w.output * prefill_s(w, e) * e.prompt_share
    return batch * w.groups / token_s * e.saturation


def streamed_tok_s(w: Any, first_s: Any, token_s: Any, streams: Any) -> Any:
    """Tokens per second of one replica in a closed loop of `streams`."""
    return streams * w.output / (first_s + w.output * token_s)


def one_wave(w: Any, e: Any, streams: Any, most_resident: Any) -> Any:
    """As `steady`, for a benchmark that sends each stream's only request at once: prompts queue, then all decode."""
    own = most(streams / w.groups, 1.0)
    held = least(own, most_resident)
    prompt_s = prefill_s(w, e) * e.wave_slower
    token_s = decode_s(w, e, held) * e.wave_token
    first_s = e.request_s + first_host_s(w, e) + e.steps_waited * token_s + prompt_s * (1.0 + held) / 2.0
    queued_s = most(own / held - 1.0, 0.0) / 2.0 * (w.output * token_s + prompt_s * held)
    return first_s + queued_s, token_s, prompt_s * held


def apart(q: Any, e: Any) -> Any:
    """Times to first token and per token, and a worker's batch, where other workers compute the prompts.

    Where nobody says how many workers there are and how each is divided, people are taken to add them as load grows,
    and to choose the faster of dividing a sequence's attention (`work`) and dealing out sequences (`spread`).
    """
    known = least(q.decodes, 1.0)
    added = (1.0 + q.streams / (e.apart_streams * q.ranks)) ** e.apart_growth
    # Routers deal requests out to workers without looking at who has a place.
    bins = most(known * q.decodes, 1.0)
    over = (q.streams - q.slots) / bins
    spread = CHANCE * e.apart_uneven**2 * q.streams / bins * (1.0 - 1.0 / bins)
    held = q.streams - bins * (over + (over * over + spread + 1e-4) ** 0.5) / 2.0
    share = most(held / (known * q.decodes + (1.0 - known) * added), 1.0)
    divided_s, dealt_s = decode_s(q.work, e, share), decode_s(q.spread, e, most(share / q.ranks, 1.0))
    said_s = divided_s ** (1.0 - q.dealt) * dealt_s**q.dealt
    pass_time_s = known * said_s + (1.0 - known) * least(divided_s, dealt_s)
    slower, accepted = guessed(e, q.guessing)
    token_s = pass_time_s * e.apart_token * slower / accepted
    answer_s = q.work.output * token_s
    together = most(q.waits.pass_tokens / q.prompts.prompt, 1.0)
    host_s = first_host_s(q.prompts, e) * most(q.prompts.prompt / q.waits.pass_tokens, 1.0)
    one_s = q.streams * wave_each_s(q.prompts, e, together, host_s) / q.prompts.groups
    prefills = known * q.prefills + (1.0 - known) * (1.0 + one_s / answer_s) ** e.apart_sized
    backlog_s = one_s / prefills
    for_a_place_s = most(q.streams / held - 1.0, 0.0) * answer_s
    first_s = (
        e.request_s
        + host_s
        + e.apart_first_s
        + e.steps_waited * token_s
        + prefill_s(q.prompts._replace(groups=least(q.prompts.groups, 1.0)), e)
        + e.burst * e.apart_burst * backlog_s
        + most(for_a_place_s, e.apart_saturated * (backlog_s - answer_s))
    )
    return first_s, token_s, share
