"""Estimates for one machine with one or a few streams, from the bytes and operations of a forward pass.

A forward pass of a few tokens reads its weights once and multiplies vectors; one of many tokens multiplies matrices in
tiles. Both are the same sum of named parts, each at an efficiency that was fitted for the engine and its backend.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from bedplate.decide.estimate import calibration
from bedplate.decide.estimate.calibration import Limit
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.machine import HALF_SHARE, MachineRates
from bedplate.decide.estimate.physics import (
    ModelShape,
    compute_decode_floor_s,
    compute_prefill_floor_s,
    count_all_reduce_bytes,
    count_attention_ops,
    count_distinct_experts,
    count_kv_bytes,
    get_link_bytes_s,
)
from bedplate.engines import EstimateTraits, load_engines

MOST_CHUNK = 8192
VECTOR_TOKENS = 8
"""Up to this many tokens, engines multiply vectors instead of matrices if that is faster, except experts on Vulkan.
Serving engines multiply even one token as a tile of a matrix, which takes longer on chips with a low matrix rate."""
HOST_COPY_TOKENS = 32
PACKED = frozenset({"gptq", "awq", "compressed-tensors"})
ACTIVATION_COPIES = 24.0
"""Rows of the hidden width that a layer reads and writes for each token around its matrix products."""
VULKAN_SCALAR_SHARE = 0.6
"""Rate of BF16 products with Vulkan relative to 16-bit products on AMD, whose drivers have no matrix instructions for
BF16: 1.55 against 2.53 TFLOP/s for 32-bit numbers on a Radeon 780M (ggml-org/llama.cpp, pull request 12260)."""
COPIED_BYTES = 4.0
"""Bytes per weight to write a 16-bit copy and to read it."""
EXPERT_MATRICES = 3
"""Matrices of an expert: gate, up and down."""
PAIR_OPS, SCORE_BYTES = 512.0, 4.0
"""Operations between two tokens of one head of the usual width, and bytes of the score that they compute."""


class Profile(NamedTuple):
    """The efficiencies of one engine on one kind of device. Shares refer to the data sheet's rates."""

    slack: float
    """Additional time to read weights relative to the data sheet's bandwidth: 0.15 is 15% more."""
    read_8: float
    """Time to read 8-bit weights relative to `slack`, for engines that multiply even one token as a tile: they quantize
    its inputs and scale its results block by block."""
    read_packed: float
    """The same for packed weights (GPTQ, AWQ)."""
    kv_read: float
    """Share of the memory bandwidth at which the cache is read."""
    unpack_16: float
    """Multiprocessor cycles per weight in a vector product, in addition to reading it: 16-bit weights."""
    unpack_8: float
    unpack_4: float
    layer_s: float
    """A layer's fixed cost: starting its kernels."""
    kernel_s: float
    """Cost of a small kernel (a norm or a scale) that a Llama layer does not have."""
    packed_s: float
    """Additional cost of a layer with packed weights (GPTQ, AWQ): their kernels start slower."""
    moe_s: float
    """Additional cost of a layer with experts: routing, and a kernel for each of its matrices."""
    moe_tile_s: float
    """Additional cost of a layer with experts if their products are tiled: most tiles that are started are empty."""
    state_s: float
    """Additional cost of a recurrent layer."""
    state: float
    """Memory passes of the recurrent state for each token and sequence, in addition to reading it."""
    scan: float
    """Memory passes of the recurrent state for each token of a prompt."""
    step_s: float
    """A step's fixed cost: sampling, the runtime between two steps."""
    launch_s: float
    """Host time per layer if the engine launches each kernel separately; the device waits if it is faster."""
    launch_8: float
    """`launch_s` for 8-bit weights relative to 16-bit weights: each product then takes several kernels."""
    launch_8_packed: float
    """`launch_s` for packed 8-bit weights (GPTQ) relative to 16-bit weights."""
    launch_4: float
    """`launch_s` for 4-bit weights relative to 16-bit weights."""
    eager_s: float
    """Additional cost of launching a layer's kernels for a prompt relative to one token."""
    pair: float
    """Cycles for each million operations between a new token and the cache."""
    gemm: float
    """Share of the matrix rate for large products."""
    gemm_8: float
    """`gemm` for 8-bit weights relative to 4-bit weights."""
    gemm_16: float
    """`gemm` for 16-bit weights relative to 4-bit weights."""
    gemm_fp4: float
    """`gemm` for weights that the device's 4-bit units multiply."""
    gemm_k: float
    """`gemm` for K-quants and I-quants, whose blocks have two levels of scales, relative to formats with one."""
    unpack_k: float
    """Cycles to dequantize a weight of K-quants and I-quants relative to formats with one level of scales."""
    library: float
    """Share of the matrix rate for products of 16-bit numbers by the vendor's library (cuBLAS, rocBLAS, hipBLASLt)."""
    copy: float
    """Memory passes of 16-bit copies of the weights, relative to one write and one read, where a library multiplies."""
    call_s: float
    """Host time for one expert's product, where the host starts a library product for each expert."""
    gemm_moe: float
    """Share of the matrix rate for experts."""
    moe_16: float
    """`gemm_moe` for 16-bit experts: engines that fuse only quantized experts are slow with others."""
    moe_4: float
    """Time of 4-bit experts relative to their bytes, for engines without a good kernel for them."""
    tile: float
    """Minimum tokens of a tile: a matrix product of fewer tokens costs as much."""
    expert_tile: float
    """The same for the product of one expert."""
    attend: float
    """Share of the matrix rate for attention between a prompt's tokens."""
    activation: float
    """How often activations move through memory, relative to `ACTIVATION_COPIES`."""
    column: float
    """Time that each further token adds to a vector product, as a share of the first."""
    plain: float
    """Relative cost of the products of attention that is not fused, for prompts."""
    scores: float
    """Memory passes of the attention scores if attention is not fused."""
    plain_kv: float
    """Relative cost of attention that is not fused, for output tokens."""
    device_s: float
    """Cost of the transfer to the next device of a pipeline."""
    reduce_s: float
    """Latency of one all-reduce."""
    overlap: float
    """Share of the ideal overlap that the chunks of a prompt reach in a pipeline of devices with peer access."""
    overlap_staged: float
    """The same without peer access: copies between devices pass through the host's memory."""


class Pass(NamedTuple):
    """The time of one forward pass by its parts."""

    weights_s: float
    kv_s: float
    compute_s: float
    links_s: float
    fixed_s: float
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.compute_s + self.links_s + self.fixed_s + self.host_s

    def split_by_limit(self) -> dict[Limit, float]:
        return {
            "memory bandwidth": self.weights_s,
            "KV cache": self.kv_s,
            "compute": self.compute_s,
            "interconnect": self.links_s,
            "runtime overhead": self.fixed_s,
            "host memory": self.host_s,
        }


class HostWeights(NamedTuple):
    """The weights that stay in the host's memory."""

    bytes: float
    """Bytes of these weights that one token reads."""
    bandwidth_bytes_s: float
    cores_ops_s: float
    params: float
    assumed: bool = False
    """Whether the host's memory bandwidth is unknown, so that a default is used."""


class PassWork(NamedTuple):
    """What one forward pass does; nothing in it is fitted. A fit uses columns of many such passes."""

    tokens: float
    computed: float
    """Share of the products of all layers and tokens that the pass computes."""
    vectors: float
    """Up to this many tokens, it may multiply vectors instead of matrices."""
    half: float
    """1 for 16-bit weights, else 0; `eight` and `four` are the same for 8 and 4 bits."""
    eight: float
    four: float
    native: float
    """1 if the device has units for these 4-bit weights."""
    packed: float
    """1 for packed weights (GPTQ, AWQ)."""
    two_level: float
    """1 for K-quants and I-quants."""
    library: float
    """1 if a library multiplies, after the weights were dequantized to 16 bits."""
    expert_library: float
    """1 if a library multiplies the experts."""
    copied_s: float
    """Writing and reading 16-bit copies of the weights that a library multiplies."""
    calls: float
    """Expert products that the host starts one by one."""
    read_s: float
    """Reading the weights at the data sheet's bandwidth."""
    expert_read_s: float
    """The part of `read_s` for experts."""
    weights_hz: float
    """Weights that are multiplied, over the cycles per second of all multiprocessors."""
    experts_hz: float
    body_s: float
    """One token through all weights but experts, at the matrix rate."""
    logits_s: float
    """The output projection of the rows that need it, at the matrix rate."""
    expert_s: float
    """One token through each of the experts that the pass uses, at the matrix rate."""
    each: float
    """Tokens per used expert."""
    moved_s: float
    """Moving activations through memory, at the data sheet's bandwidth."""
    kv_s: float
    """Reading the cache, at the data sheet's bandwidth."""
    prompt: float
    """1 if several tokens of one sequence are computed."""
    pairs_s: float
    """Attention between the tokens of prompts, at the matrix rate."""
    scores_s: float
    """One pass of 32-bit attention scores through memory."""
    pairs_hz: float
    """Millions of operations between new tokens and the cache, over the multiprocessors' cycles."""
    unfused: float
    """1 if attention is not fused."""
    layers: float
    small_kernels: float
    moe_layers: float
    recurrent: float
    """Recurrent layers."""
    states_s: float
    """One pass of the recurrent states of all sequences through memory, for each of their new tokens."""
    handovers: float
    reduces: float
    links_s: float
    launched: float
    """Layers whose kernels the host starts one by one."""
    host_s: float
    served_s: float
    """Host time of a server between two passes: sampling and sending the tokens of further sequences."""
    saved: float
    """Share of the time that an ideal overlap of chunks in a pipeline would save; 0 without a pipeline."""
    staged: float
    """1 if the devices of the pipeline have no peer access."""


def forward(profile: Profile, work: PassWork) -> Pass:
    """The time of a forward pass. The arithmetic works on columns as well as on numbers."""
    reading = (work.read_s + work.packed * work.four * work.expert_read_s * (profile.moe_4 - 1)) * (1 + profile.slack)
    slower = work.packed * (profile.read_packed - 1) + work.eight * (1 - work.packed) * (profile.read_8 - 1)
    reading = reading * (1 + (work.vectors < 1) * slower)
    packed = 1 + work.packed * work.four * (profile.moe_4 - 1)
    each_cycles = work.half * profile.unpack_16 + work.eight * profile.unpack_8 + work.four * profile.unpack_4
    each_cycles = each_cycles * (1 + work.two_level * (profile.unpack_k - 1))
    vector = reading + (work.weights_hz + work.experts_hz * packed) * each_cycles
    vector = vector * (1 + profile.column * (work.tokens - 1))
    tuned = work.half * profile.gemm_16 + work.eight * profile.gemm_8
    tuned = tuned + work.four * (work.native * profile.gemm_fp4 + (1 - work.native))
    tuned = tuned * (1 + work.two_level * (profile.gemm_k - 1))
    dense_share = work.library * profile.library + (1 - work.library) * profile.gemm * tuned
    body = work.body_s * work.computed * _compute_hypot(work.tokens, profile.tile)
    matrix = (body + work.logits_s) / dense_share
    own_share = profile.gemm_moe * (work.half * profile.moe_16 + (1 - work.half)) * tuned
    expert_share = work.expert_library * profile.library + (1 - work.expert_library) * own_share
    matrix = matrix + work.expert_s * packed * _compute_hypot(work.each, profile.expert_tile) / expert_share
    # Reading limits a product of few rows, computing one of many, and both limit those in between.
    moved = work.computed * work.moved_s * profile.activation
    whole = _overlap_times(reading, matrix + moved) + work.copied_s * profile.copy
    tiled = (work.tokens > work.vectors) | ((work.tokens > 1) & (whole < vector))
    weights = (1 - tiled) * vector + tiled * _take_min(reading, whole)
    compute = tiled * (whole - _take_min(reading, whole))
    kv_s = work.kv_s / profile.kv_read + (1 - work.prompt) * work.pairs_hz * profile.pair
    kv_s = kv_s * (1 + (1 - work.prompt) * work.unfused * (profile.plain_kv - 1))
    attention = work.pairs_s / profile.attend * (1 + work.unfused * (profile.plain - 1))
    attention = work.computed * (attention + work.unfused * work.scores_s * profile.scores)
    compute = compute + work.prompt * attention
    # The states of a prompt's tokens follow from each other without leaving the chip; those of sequences are stored.
    passes = work.prompt * profile.scan + (1 - work.prompt) * profile.state
    kv_s = kv_s + work.states_s * passes
    fixed = profile.step_s + work.layers * (profile.layer_s + work.prompt * profile.eager_s)
    fixed = fixed + work.small_kernels * profile.kernel_s + work.served_s
    fixed = fixed + work.packed * work.layers * profile.packed_s + work.moe_layers * profile.moe_s
    fixed = fixed + work.recurrent * profile.state_s + work.handovers * profile.device_s
    fixed = fixed + tiled * (work.calls * profile.call_s + work.moe_layers * profile.moe_tile_s)
    links = work.links_s + work.reduces * profile.reduce_s
    device = weights + kv_s + compute + links + fixed
    launch_8 = work.packed * profile.launch_8_packed + (1 - work.packed) * profile.launch_8
    each_launch = work.half + work.eight * launch_8 + work.four * profile.launch_4
    launched = work.launched * profile.launch_s * each_launch
    # The device waits for the host if launching kernels is slower; 0 for engines that do not launch them separately.
    idle = _overlap_times(device, launched) - device
    kept = 1 - work.saved * (work.staged * profile.overlap_staged + (1 - work.staged) * profile.overlap)
    return Pass(weights * kept, kv_s * kept, compute * kept, links * kept, (fixed + idle) * kept, work.host_s * kept)


def count_pass_work(
    machine: MachineRates,
    shape: ModelShape,
    *,
    tokens: float,
    sequences: float = 1.0,
    depth: float = 0.0,
    tensor: int = 1,
    pipeline: int = 1,
    output_rows: float | None = None,
    matrix_ops_s: float,
    expand_kv: bool = False,
    absorbed: bool = True,
    fused: bool = True,
    launched: bool = False,
    vectors: int = 1,
    library_tokens: int | None = None,
    saved: float = 0.0,
    skipped: float = 0.0,
    host: HostWeights | None = None,
    served_s: float = 0.0,
    kv_bits: float = 16.0,
) -> PassWork:
    """Count the work of `tokens` new tokens in `sequences`, each of which has `depth` tokens in its cache.

    The share `skipped` of the layers has to compute one token of each sequence only.
    """
    bandwidth = machine.bandwidth_bytes_s * tensor
    per_hz = 1 / (machine.core_hz * tensor) if machine.core_hz else 0.0
    per_op = 1 / (matrix_ops_s * tensor)
    touched = 0.0
    if shape.experts:
        touched = count_distinct_experts(shape.experts, shape.experts_active, tokens) / shape.experts
    rows = sequences if output_rows is None else output_rows
    expert_bytes, expert_params = shape.expert_bytes * touched, shape.expert_params * touched
    read_bytes = shape.dense_bytes + expert_bytes
    if host is not None:
        read_bytes -= min(read_bytes, host.bytes)
    kind = _classify_bits(shape)
    new_each = tokens / sequences
    kv = count_kv_bytes(shape, depth + 1, kv_bits) * sequences * (_compute_expansion(shape) if expand_kv else 1.0)
    links_s = 0.0
    if tensor > 1:
        rate_link = get_link_bytes_s(machine, tensor)
        links_s = 2 * shape.layers * count_all_reduce_bytes(tokens, shape, tensor) / rate_link if rate_link else 0.0
    prompt = new_each > 1
    pairs = count_attention_ops(shape, new_each, depth, absorbed=absorbed) * sequences if prompt else 0.0
    each = tokens * shape.experts_active / (shape.experts * touched) if shape.experts else 0.0
    library = library_tokens is not None and tokens >= library_tokens
    expert_library = library and library_tokens is not None and each >= library_tokens
    copied = (shape.dense_params * library + expert_params * expert_library) * COPIED_BYTES if kind != 16 else 0.0
    return PassWork(
        tokens=tokens,
        computed=1.0 - skipped * (1.0 - 1.0 / new_each) if prompt else 1.0,
        vectors=vectors,
        half=float(kind == 16),
        eight=float(kind == 8),
        four=float(kind == 4),
        native=float(shape.method in ("mxfp4", "nvfp4") and "fp4" in machine.ops_s),
        # Only general packed formats: a GGUF file stores experts in the layout of the kernels.
        packed=float(shape.method in PACKED),
        two_level=float(_has_two_scales(shape)),
        library=float(library),
        expert_library=float(expert_library),
        copied_s=copied / bandwidth,
        calls=EXPERT_MATRICES * shape.moe_layers * shape.experts * touched if library else 0.0,
        read_s=read_bytes / bandwidth,
        expert_read_s=expert_bytes / bandwidth,
        weights_hz=shape.dense_params * per_hz,
        experts_hz=expert_params * per_hz,
        body_s=2 * (shape.dense_params - shape.output_params) * per_op,
        logits_s=2 * shape.output_params * rows * per_op,
        expert_s=2 * expert_params * per_op,
        each=each,
        moved_s=ACTIVATION_COPIES * tokens * shape.layers * shape.hidden * 2 / bandwidth,
        kv_s=kv / (machine.bandwidth_bytes_s * _count_kv_devices(shape, tensor)),
        prompt=float(prompt),
        pairs_s=pairs * per_op,
        scores_s=pairs / PAIR_OPS * SCORE_BYTES / bandwidth,
        pairs_hz=0.0 if prompt else count_attention_ops(shape, 1, depth) * sequences * 1e-6 * per_hz,
        unfused=float(not fused),
        layers=shape.layers,
        small_kernels=shape.small_kernels,
        moe_layers=shape.moe_layers,
        recurrent=sum(group.layers for group in shape.attention if group.state_bytes),
        states_s=sum(group.state_bytes for group in shape.attention) * tokens / bandwidth,
        handovers=pipeline - 1,
        reduces=2 * shape.layers if tensor > 1 else 0,
        links_s=links_s,
        launched=shape.layers if launched else 0,
        host_s=_compute_host_s(host, machine, shape, tokens, touched),
        served_s=served_s,
        saved=saved,
        staged=float(machine.consumer),
    )


def _compute_host_s(
    host: HostWeights | None, machine: MachineRates, shape: ModelShape, tokens: float, touched: float
) -> float:
    if host is None or not host.bytes:
        return 0.0
    # The products of one token are as fast as reading the weights: published results of CPUs follow their bandwidth.
    # Only the products of further tokens can take longer.
    products_s = 2 * host.params * (tokens - 1) / max(host.cores_ops_s, 1.0)
    computed_s = max(host.bytes / host.bandwidth_bytes_s, products_s)
    if tokens > HOST_COPY_TOKENS and machine.host_link_bytes_s:
        # For many tokens, copying the weights to the GPU is faster.
        spread = touched / shape.expert_share if shape.experts and shape.expert_share else 1.0
        return min(computed_s, host.bytes * spread / machine.host_link_bytes_s)
    return computed_s


def _compute_hypot(one: float, other: float) -> float:
    found: float = (one * one + other * other) ** 0.5
    return found


def _take_min(one: float, other: float) -> float:
    return (one + other - abs(one - other)) / 2


def _overlap_times(one: float, other: float) -> float:
    """The time of two activities that overlap in part: more than the longer, less than the sum."""
    found: float = (one**4 + other**4) ** 0.25
    return found


def _classify_bits(shape: ModelShape) -> int:
    """The class of the stored bits: 4, 8 or 16."""
    return 16 if shape.stored_bits > 12 else 8 if shape.stored_bits > 6.8 else 4


def _has_two_scales(shape: ModelShape) -> bool:
    """Whether blocks of weights have scales that are themselves quantized: K-quants and I-quants."""
    label = shape.quantization.upper()
    return shape.method == "gguf" and ("_K" in label or label.startswith("IQ"))


def _compute_expansion(shape: ModelShape) -> float:
    """Factor on cache reads of engines that copy the cache for each query head and for each append."""
    heads = max((group.pair_ops / max(1.0, group.layers) / 512 for group in shape.attention), default=1.0)
    kv_heads = max((group.kv_heads for group in shape.attention), default=1)
    return 2.0 + 3.0 * max(1.0, heads / max(1, kv_heads))


def _count_kv_devices(shape: ModelShape, tensor: int) -> int:
    """Devices that divide the reads of a cache: at most one per KV head; a latent cache has one head."""
    heads = max((group.kv_heads for group in shape.attention), default=1)
    return max(1, min(tensor, heads))


STACKED = frozenset({"hopper", "blackwell-dc", "ampere-dc", "volta", "cdna"})
"""Architectures whose chips have stacked memory (HBM)."""


def list_effects(engine: str, backend: str, machine: MachineRates, current: bool = True) -> tuple[str, ...]:
    """The names of the fitted effects on an efficiency, from the most general to the most specific.

    Each effect is a factor on the ones before it; a name without an effect changes nothing.
    """
    driver, *builds = backend.split("-")
    kind = get_traits(engine).kernels
    if machine.kind == "cpu":
        # An engine's efficiency on GPUs says nothing about its CPU kernels.
        names = ["cpu", machine.family, *([f"like {kind}/cpu"] if kind else []), f"{engine}/cpu"]
        return tuple(names)
    names = ["gpu", driver, classify_memory(machine), f"chip {machine.family}"]
    if kind is not None:
        names += [f"like {kind}", f"like {kind}/{driver}"]
    names += [engine, f"{engine}/{driver}"]
    names += [f"{engine}/{driver}-{build}" for build in builds]
    if not current:
        names += [f"{engine} older", f"{engine}/{driver} older"]
    return tuple(names)


def classify_memory(machine: MachineRates) -> str:
    """The kind of a device's memory: stacked, separate graphics memory, or shared with the host."""
    return "memory shared" if machine.unified else "memory stacked" if machine.family in STACKED else "memory graphics"


@lru_cache(maxsize=512)
def _load_profile(names: tuple[str, ...]) -> Profile:
    effects = calibration.load_table("local")["effects"]
    values = dict(effects[names[0]]["values"])
    for name in names[1:]:
        for parameter, factor in effects.get(name, {}).get("values", {}).items():
            values[parameter] *= factor
    return Profile(**{name: float(values[name]) for name in Profile._fields})


def get_profile(engine: str, backend: str, machine: MachineRates, current: bool = True) -> tuple[Profile, str]:
    """The fitted efficiencies, and the most specific effect among them: of the engine here, or of similar engines."""
    names = list_effects(engine, backend, machine, current)
    effects = calibration.load_table("local")["effects"]
    return _load_profile(names), next(name for name in reversed(names) if name in effects)


def get_matrix_ops_s(engine: str, machine: MachineRates, shape: ModelShape, backend: str = "") -> float:
    """The matrix rate that an engine can reach on one device with these weights."""
    rates = machine.ops_s
    if backend.startswith("vulkan") and shape.quantization == "BF16" and machine.vendor == "amd":
        return machine.plain_ops_s * VULKAN_SCALAR_SHARE
    half = rates.get("bf16") or rates.get("fp16") or rates.get("fp32") or machine.plain_ops_s
    if machine.kind == "cpu":
        return machine.plain_ops_s * (1.0 if shape.bits < 12 else HALF_SHARE)
    traits = get_traits(engine)
    if traits.plain_products:
        return machine.plain_ops_s or half
    if shape.method in ("nvfp4", "mxfp4") and "fp4" in rates and traits.fp4_products:
        return rates["fp4"]
    if shape.method in ("fp8", "modelopt", "mxfp8", "int8") and "fp8" in rates and traits.fp8_products:
        return rates["fp8"]
    return half


class PassPart(NamedTuple):
    """A pass, how often it runs, and the lower bound of the total time."""

    work: PassWork
    times: float
    floor_s: float


class LocalEstimator(NamedTuple):
    """The estimate of one engine with one model on one machine."""

    engine: str
    profile: Profile
    key: str
    machine: MachineRates
    shape: ModelShape
    tensor: int
    pipeline: int
    chunk: int
    fused: bool
    ops_s: float
    """Matrix rate of one device."""
    vectors: int = VECTOR_TOKENS
    library_tokens: int | None = None
    """From this many tokens on, a library multiplies matrices; `None`: the engine's own kernels always do."""
    host: HostWeights | None = None
    kv_bits: float = 16.0
    served: bool = False
    """Whether requests come through the engine's server; benchmark programs neither sample nor send tokens."""

    @property
    def traits(self) -> EstimateTraits:
        return get_traits(self.engine)

    def step(self, batch: float, context: float) -> Pass:
        """The time of one token for each of `batch` sequences with `context` tokens."""
        return forward(self.profile, self.make_step_part(batch, context).work)

    def step_s(self, batch: float, context: float) -> float:
        return self.compute_seconds(self.make_step_part(batch, context))

    def make_step_part(self, batch: float, context: float) -> PassPart:
        work = count_pass_work(
            self.machine, self.shape, tokens=batch, sequences=batch, depth=context, tensor=self.tensor,
            pipeline=self.pipeline, matrix_ops_s=self.ops_s, expand_kv=self.traits.expands_cache, fused=self.fused,
            launched=self.traits.kernels == "eager", vectors=self.vectors, library_tokens=self.library_tokens,
            host=self.host, kv_bits=self.kv_bits, served_s=self._compute_served_s(batch),
        )  # fmt: skip
        floor = compute_decode_floor_s(self.shape, self.machine, batch, context, self.tensor, self.kv_bits)
        return PassPart(work, 1.0, floor)

    def _compute_served_s(self, batch: float) -> float:
        """Host time of the server for all sequences but the first, whose time is part of each pass's fixed cost.

        The efficiencies of CPUs were fitted on servers, so they contain it.
        """
        traits = self.traits
        if not self.served or batch <= 1 or self.machine.kind == "cpu":
            return 0.0
        vocabulary = self.shape.output_params / max(1, self.shape.hidden)
        each_s = vocabulary * traits.sample_entry_s + min(batch, traits.most_woken) * traits.wake_s
        return (batch - 1) * each_s

    def compute_seconds(self, part: PassPart) -> float:
        return max(forward(self.profile, part.work).total_s * part.times, part.floor_s)

    def make_prefill_part(self, tokens: int, sequences: int = 1, depth: float = 0.0) -> PassPart:
        """`sequences` prompts of `tokens` each, computed in chunks."""
        total = tokens * sequences
        chunk = max(1, min(total, self.chunk))
        chunks = total / chunk
        # A chunk attends to the earlier chunks of its prompt; a chunk of several prompts has none before it.
        together = max(1.0, chunk / tokens)
        before = depth + max(0.0, (tokens - chunk) / 2)
        work = count_pass_work(
            self.machine, self.shape, tokens=chunk, sequences=together, depth=before, tensor=self.tensor,
            pipeline=self.pipeline, output_rows=1.0, matrix_ops_s=self.ops_s, fused=self.fused,
            absorbed=self.traits.kernels == "gguf",
            launched=self.traits.kernels == "eager", vectors=self.vectors, library_tokens=self.library_tokens,
            saved=self._compute_saved_share(chunks), skipped=self._compute_skipped_share(), host=self.host,
            kv_bits=self.kv_bits,
        )  # fmt: skip
        devices = self.tensor * (self.pipeline if self.traits.overlaps_chunks else 1)
        floor = compute_prefill_floor_s(self.shape, self.machine, total * work.computed, devices)
        return PassPart(work, chunks, floor)

    def _compute_skipped_share(self) -> float:
        """The share of the layers that a prompt passes with its last token only."""
        return self.shape.borrowing_layers / self.shape.layers if self.traits.skips_borrowing_layers else 0.0

    def _compute_saved_share(self, chunks: float) -> float:
        """The share of the time that is saved if chunks follow each other through a pipeline without any delay.

        The stage with the most layers sets the pace: the output projection counts as a layer.
        """
        if self.pipeline == 1 or not self.traits.overlaps_chunks:
            return 0.0
        units = self.shape.layers + 1
        slowest = -(-units // self.pipeline) / units
        return max(0.0, 1.0 - (1.0 + (chunks - 1) * slowest) / chunks)

    def estimate_prefill_s(self, tokens: int, sequences: int = 1, depth: float = 0.0) -> float:
        return self.compute_seconds(self.make_prefill_part(tokens, sequences, depth))

    def make_request_parts(self, prompt: int, output: int, batch: int = 1) -> tuple[PassPart, PassPart]:
        """`batch` requests whose prompts are computed one after the other and whose tokens share their passes."""
        read, step = self.make_prefill_part(max(1, prompt)), self.make_step_part(batch, prompt + output / 2)
        return (
            read._replace(times=read.times * batch, floor_s=read.floor_s * batch),
            step._replace(times=float(output), floor_s=step.floor_s * output),
        )


def make_local_estimator(
    engine: str,
    backend: str,
    machine: MachineRates,
    shape: ModelShape,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    chunk: int | None = None,
    fused: bool = True,
    current: bool = True,
    build: int | None = None,
    year: int | None = None,
    host: HostWeights | None = None,
    kv_bits: float = 16.0,
    served: bool = False,
) -> LocalEstimator:
    """The estimator of an engine's `build`, or of a build of this year; of a current build if both are unknown."""
    known = load_engines().get(engine)
    half = _classify_bits(shape) == 16
    profile, key = get_profile(engine, backend, machine, current)
    return LocalEstimator(
        engine=engine, profile=profile, key=key, machine=machine, shape=shape, tensor=tensor, pipeline=pipeline,
        chunk=chunk or get_traits(engine).chunk_tokens or MOST_CHUNK, fused=fused,
        ops_s=get_matrix_ops_s(engine, machine, shape, backend), vectors=_count_vector_tokens(engine, backend, shape),
        library_tokens=known.get_library_tokens(backend, machine.family, half, build, year) if known else None,
        host=host, kv_bits=kv_bits, served=served,
    )  # fmt: skip


def _count_vector_tokens(engine: str, backend: str, shape: ModelShape) -> int:
    if get_traits(engine).kernels in ("serving", "eager"):
        return 0
    return 1 if shape.experts and backend.startswith("vulkan") else VECTOR_TOKENS
