"""One machine, one or a few streams: the time of a forward pass from its bytes and operations, and what follows.

A forward pass of a few tokens reads its weights once and multiplies vectors; one of many tokens multiplies matrices in
tiles. Both are the same sum of named parts, each at an efficiency that was fitted for the engine and its backend.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple

from bedplate.decide.estimate import calibration
from bedplate.decide.estimate.calibration import WIDE, Band, Limit
from bedplate.decide.estimate.machine import Machine
from bedplate.decide.estimate.physics import (
    Shape,
    all_reduce_bytes,
    attention_ops,
    decode_floor_s,
    experts_touched,
    kv_read_bytes,
    link_bytes_s,
    prefill_floor_s,
)
from bedplate.decide.estimate.rows import SERVING_ENGINES, Case, Prediction, Refused
from bedplate.values import Parallelism

TYPICAL_CONTEXT = 256
"""Where a table says nothing of lengths: short prompts and answers, as speed tables are made."""
CHUNK_TOKENS = {"llama.cpp": 512}
"""Prompt tokens that an engine computes at once, where it is not the whole prompt."""
MOST_CHUNK = 8192
VECTOR_TOKENS = 8
"""Up to so many tokens, engines multiply vectors instead of matrices where that is faster; not so Vulkan's experts."""
HOST_COPY_TOKENS = 32
PACKED = frozenset({"gptq", "awq", "compressed-tensors"})
ACTIVATION_COPIES = 24.0
"""Rows of the hidden width that a layer reads and writes for each token around its matrix products."""


class Profile(NamedTuple):
    """The efficiencies of one engine on one kind of device. Shares are of the sheet's rates."""

    read: float
    """Of the memory bandwidth, when weights are read."""
    kv_read: float
    """Of the memory bandwidth, when the cache is read."""
    unpack_16: float
    """Multiprocessor cycles for each weight that a vector is multiplied with, beside reading it: 16-bit weights."""
    unpack_8: float
    unpack_4: float
    layer_s: float
    """A layer's fixed cost: starting its kernels."""
    packed_s: float
    """What a layer costs more whose weights are packed for several engines (GPTQ, AWQ): their kernels start slower."""
    moe_s: float
    """What a layer with experts costs more: routing, and a kernel for each of its matrices."""
    state_s: float
    """What a recurrent layer costs more."""
    step_s: float
    """A step's fixed cost: sampling, the runtime between two steps."""
    launch_s: float
    """Host time for each layer of an engine that starts each kernel by itself; the device waits if it is faster."""
    launch_8: float
    """That over the one for 16-bit weights, for 8-bit ones: each product then takes several kernels."""
    launch_4: float
    """Likewise for 4-bit ones."""
    eager_s: float
    """What a layer's kernels cost to start for a prompt, beside what they cost for one token."""
    pair: float
    """Cycles for each million operations between a new token and the cache."""
    gemm: float
    """Of the matrix rate, for large products."""
    gemm_8: float
    """That share over the one for 4-bit weights, for 8-bit ones."""
    gemm_16: float
    """Likewise for 16-bit ones."""
    gemm_fp4: float
    """Likewise for weights that the device's own 4-bit units take."""
    gemm_moe: float
    """The share for experts."""
    moe_16: float
    """What 16-bit experts reach of it: engines that fuse quantised experts only are slow with others."""
    moe_4: float
    """How much longer 4-bit experts take than their bytes, where an engine has no good kernel for them."""
    tile: float
    """Tokens below which a matrix product costs as if it had so many."""
    attend: float
    """Of the matrix rate, between a prompt's own tokens."""
    activation: float
    """Times that activations pass through memory, of `ACTIVATION_COPIES`."""
    column: float
    """What each further token adds to multiplying a vector, as a share of the first."""
    plain: float
    """What attention costs more where it is not fused, while prompts are computed."""
    plain_kv: float
    """Likewise while tokens are made."""
    device_s: float
    """What handing over to the next device of a pipeline costs."""
    reduce_s: float
    """Latency of one all-reduce."""


class Pass(NamedTuple):
    """What one forward pass costs, by what it is spent on."""

    weights_s: float
    kv_s: float
    compute_s: float
    links_s: float
    fixed_s: float
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.compute_s + self.links_s + self.fixed_s + self.host_s

    def by_limit(self) -> dict[Limit, float]:
        return {
            "memory bandwidth": self.weights_s,
            "KV cache": self.kv_s,
            "compute": self.compute_s,
            "interconnect": self.links_s,
            "runtime overhead": self.fixed_s,
            "host memory": self.host_s,
        }


class Host(NamedTuple):
    """The part of the weights that stays in the host's memory."""

    bytes: float
    """Of them, what one token reads."""
    bandwidth_bytes_s: float
    cores_ops_s: float
    params: float


def forward(
    profile: Profile,
    machine: Machine,
    shape: Shape,
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
    vectors: int = 1,
    host: Host | None = None,
) -> Pass:
    """`tokens` new tokens over `sequences`, each of which has `depth` tokens in its cache."""
    bandwidth = machine.bandwidth_bytes_s * tensor
    hz = machine.core_hz * tensor
    touched = experts_touched(shape.experts, shape.experts_active, tokens) / shape.experts if shape.experts else 0.0
    rows = sequences if output_rows is None else output_rows
    dense_bytes, dense_params = shape.dense_bytes, shape.dense_params
    expert_bytes, expert_params = shape.expert_bytes * touched, shape.expert_params * touched
    read_bytes = dense_bytes + expert_bytes
    if host is not None:
        read_bytes -= min(read_bytes, host.bytes)
    reading = read_bytes / (bandwidth * profile.read)
    kind = _weight_class(shape)
    # Only formats that are packed for general engines: GGUF files carry their experts as their kernels want them.
    packs = shape.method in PACKED
    packed = profile.moe_4 if kind == 4 and packs else 1.0
    reading += expert_bytes * (packed - 1) / (bandwidth * profile.read)
    each_cycles = {4: profile.unpack_4, 8: profile.unpack_8, 16: profile.unpack_16}[kind]
    vector = reading + (dense_params + expert_params * packed) * each_cycles / hz if hz else reading
    vector *= 1 + profile.column * (tokens - 1)
    weights, compute = vector, 0.0
    if tokens > 1:
        body = dense_params - shape.output_params
        each = tokens * shape.experts_active / (shape.experts * touched) if shape.experts else 0.0
        tuned = _tuned(profile, shape, machine, kind)
        matrix = 2 * (body * math.hypot(tokens, profile.tile) + shape.output_params * rows) / profile.gemm
        share = profile.gemm_moe * (profile.moe_16 if kind == 16 else 1.0)
        matrix += 2 * expert_params * packed * math.hypot(each, profile.tile) / share
        matrix /= matrix_ops_s * tensor * tuned
        moved = ACTIVATION_COPIES * profile.activation * tokens * shape.layers * shape.hidden * 2 / bandwidth
        # A product of few rows is bound by reading, of many by computing; in between it is both.
        whole = _both(reading, matrix + moved)
        if tokens > vectors or whole < vector:
            weights = min(reading, whole)
            compute = whole - weights
    kv = kv_read_bytes(shape, depth + 1) * sequences
    if expand_kv:
        kv *= _expansion(shape)
    kv_s = kv / (machine.bandwidth_bytes_s * _kv_devices(shape, tensor) * profile.kv_read)
    new_each = tokens / sequences
    eager = 0.0
    if new_each > 1:
        eager = shape.layers * profile.eager_s
        pairs = attention_ops(shape, new_each, depth, absorbed=absorbed) * sequences
        compute += pairs / (matrix_ops_s * tensor * profile.attend) * (1.0 if fused else profile.plain)
    else:
        kv_s += attention_ops(shape, 1, depth) * sequences * profile.pair * 1e-6 / hz if hz else 0.0
        kv_s *= 1.0 if fused else profile.plain_kv
    recurrent = sum(group.layers for group in shape.attention if group.state_bytes)
    fixed = (
        profile.step_s
        + eager
        + (shape.layers * profile.packed_s if packs else 0.0)
        + shape.layers * profile.layer_s
        + shape.moe_layers * profile.moe_s
    )
    # States are updated sequence by sequence.
    fixed += recurrent * profile.state_s * sequences + (pipeline - 1) * profile.device_s
    links = 0.0
    if tensor > 1:
        rate_link = link_bytes_s(machine, tensor)
        sent = all_reduce_bytes(tokens, shape, tensor)
        links = 2 * shape.layers * (profile.reduce_s + (sent / rate_link if rate_link else 0.0))
    host_s = 0.0
    if host is not None and host.bytes:
        host_s = max(host.bytes / host.bandwidth_bytes_s, 2 * host.params * tokens / max(host.cores_ops_s, 1.0))
        if tokens > HOST_COPY_TOKENS and machine.host_link_bytes_s:
            # For many tokens it is quicker to bring the weights to the card.
            spread = touched / shape.expert_share if shape.experts and shape.expert_share else 1.0
            host_s = min(host_s, host.bytes * spread / machine.host_link_bytes_s)
    device = weights + kv_s + compute + links + fixed
    launched = shape.layers * profile.launch_s * {4: profile.launch_4, 8: profile.launch_8, 16: 1.0}[kind]
    idle = max(0.0, _both(device, launched) - device) if launched else 0.0
    return Pass(weights, kv_s, compute, links, fixed + idle, host_s)


def _both(one: float, other: float) -> float:
    """Two things that overlap in part: more than the longer, less than the sum."""
    return math.sqrt(math.hypot(one * one, other * other))


def _weight_class(shape: Shape) -> int:
    """4, 8 or 16: how the matrices are stored."""
    return 16 if shape.stored_bits > 12 else 8 if shape.stored_bits > 6.8 else 4


def _tuned(profile: Profile, shape: Shape, machine: Machine, kind: int) -> float:
    if kind == 4 and shape.method in ("mxfp4", "nvfp4") and "fp4" in machine.ops_s:
        return profile.gemm_fp4
    return {4: 1.0, 8: profile.gemm_8, 16: profile.gemm_16}[kind]


def _expansion(shape: Shape) -> float:
    """Engines that copy a cache for each query head, and append to it by copying it."""
    heads = max((group.pair_ops / max(1.0, group.layers) / 512 for group in shape.attention), default=1.0)
    kv_heads = max((group.kv_heads for group in shape.attention), default=1)
    return 2.0 + 3.0 * max(1.0, heads / max(1, kv_heads))


def _kv_devices(shape: Shape, tensor: int) -> int:
    """Devices that share the reading of a cache: no more than there are heads in it, and latents have one."""
    heads = max((group.kv_heads for group in shape.attention), default=1)
    return max(1, min(tensor, heads))


@lru_cache(maxsize=512)
def profile_for(engine: str, backend: str, dated: bool = True) -> tuple[Profile, str]:
    """The fitted efficiencies, and under which name they stand: those of the engine here, or of its next of kin."""
    found = calibration.table("local")
    profiles = found["profiles"]
    for key in kin(engine, backend, dated):
        if key in profiles:
            return Profile(**{name: float(profiles[key]["values"][name]) for name in Profile._fields}), key
    key = "other/cpu" if backend == "cpu" else "other"
    return Profile(**{name: float(profiles[key]["values"][name]) for name in Profile._fields}), key


KIN = {
    "vllm": "sglang", "sglang": "vllm", "exllamav3": "exllamav2", "tgi": "vllm", "tensorrt-llm": "vllm",
    "lmdeploy": "vllm", "onnxruntime": "pytorch",
}  # fmt: skip
NEAR_BACKENDS = {
    "rocm-wmma": ("rocm",), "vulkan-amdvlk": ("vulkan",), "sycl": ("vulkan", "rocm"), "other": ("vulkan", "cuda"),
    "rocm": ("vulkan",), "vulkan": ("rocm",), "metal": (), "cuda": (), "cpu": (),
}  # fmt: skip


def kin(engine: str, backend: str, dated: bool) -> list[str]:
    keys = []
    for name in (engine, KIN.get(engine, "")):
        if not name:
            continue
        if not dated:
            keys.append(f"{name}/{backend}/older")
        keys += [f"{name}/{near}" for near in (backend, *NEAR_BACKENDS.get(backend, ()))]
        keys.append(f"{name}/{backend}/older")
        if backend not in ("cpu", "metal"):
            keys.append(f"{name}/cuda")
    keys.append(f"other/{backend}")
    return keys


def matrix_ops_s(engine: str, machine: Machine, shape: Shape) -> float:
    """The rate that an engine's matrix products can reach on one device, by what it multiplies."""
    rates = machine.ops_s
    half = rates.get("bf16") or rates.get("fp16") or rates.get("fp32") or machine.plain_ops_s
    if machine.kind == "cpu":
        return rates["int8"] if shape.bits < 12 else rates["fp32"]
    if engine in ("llama.cpp", "mistral.rs", "exllamav2", "exllamav3", "other"):
        return machine.plain_ops_s or half
    if shape.method in ("nvfp4", "mxfp4") and "fp4" in rates and engine not in ("pytorch", "mlx"):
        return rates["fp4"]
    if shape.method in ("fp8", "mxfp8", "int8") and "fp8" in rates and engine != "mlx":
        return rates["fp8"]
    return half


class Question(NamedTuple):
    """What is asked of one engine on one machine."""

    engine: str
    profile: Profile
    key: str
    machine: Machine
    shape: Shape
    tensor: int
    pipeline: int
    chunk: int
    fused: bool
    ops_s: float
    """Of one device, for matrix products."""
    vectors: int = VECTOR_TOKENS
    host: Host | None = None

    def step(self, batch: float, context: float) -> Pass:
        """One token for each of `batch` sequences that have `context` tokens."""
        return forward(
            self.profile, self.machine, self.shape, tokens=batch, sequences=batch, depth=context, tensor=self.tensor,
            pipeline=self.pipeline, matrix_ops_s=self.ops_s, expand_kv=self.engine == "pytorch", fused=self.fused,
            vectors=self.vectors, host=self.host,
        )  # fmt: skip

    def step_s(self, batch: float, context: float) -> float:
        floor = decode_floor_s(self.shape, self.machine, batch, context, self.tensor, 16.0)
        return max(self.step(batch, context).total_s, floor)

    def prefill(self, tokens: int, sequences: int = 1, depth: float = 0.0) -> Pass:
        """`sequences` prompts of `tokens` each, a chunk at a time."""
        total = tokens * sequences
        chunk = max(1, min(total, self.chunk))
        chunks = total / chunk
        # Each chunk sees all of its own prompt that came before; a chunk of several prompts has nothing before it.
        together = max(1.0, chunk / tokens)
        before = depth + max(0.0, (tokens - chunk) / 2)
        one = forward(
            self.profile, self.machine, self.shape, tokens=chunk, sequences=together, depth=before, tensor=self.tensor,
            pipeline=self.pipeline, output_rows=1.0, matrix_ops_s=self.ops_s, fused=self.fused,
            absorbed=self.engine in ("llama.cpp", "mistral.rs"), vectors=self.vectors, host=self.host,
        )  # fmt: skip
        return Pass(*(part * chunks * self._overlap(chunks) for part in one))

    def _overlap(self, chunks: float) -> float:
        """Chunks follow each other through the devices of a pipeline."""
        if self.pipeline == 1 or self.engine != "llama.cpp":
            return 1.0
        return (chunks + self.pipeline - 1) / (chunks * self.pipeline)

    def prefill_s(self, tokens: int, sequences: int = 1, depth: float = 0.0) -> float:
        devices = self.tensor * (self.pipeline if self.engine == "llama.cpp" else 1)
        floor = prefill_floor_s(self.shape, self.machine, tokens * sequences, devices)
        return max(self.prefill(tokens, sequences, depth).total_s, floor)

    def request_s(self, prompt: int, output: int) -> float:
        return self.prefill_s(max(1, prompt)) + output * self.step_s(1, prompt + output / 2)


def ask(
    engine: str,
    backend: str,
    machine: Machine,
    shape: Shape,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    chunk: int | None = None,
    fused: bool = True,
    dated: bool = True,
    host: Host | None = None,
) -> Question:
    profile, key = profile_for(engine, backend, dated)
    return Question(
        engine=engine, profile=profile, key=key, machine=machine, shape=shape, tensor=tensor, pipeline=pipeline,
        chunk=chunk or CHUNK_TOKENS.get(engine, MOST_CHUNK), fused=fused, ops_s=matrix_ops_s(engine, machine, shape),
        vectors=1 if shape.experts and backend.startswith("vulkan") else VECTOR_TOKENS, host=host,
    )  # fmt: skip


def question_of(case: Case) -> Question:
    devices = case.devices or 1
    if case.engine in ONE_STREAM_ENGINES:
        tensor, pipeline = 1, devices
    else:
        tensor, pipeline = max(case.layout.tensor, devices // max(1, case.layout.pipeline * case.layout.data)), 1
    dated = is_current(case)
    return ask(
        case.engine, case.backend, case.machine, case.shape, tensor=tensor, pipeline=pipeline,
        chunk=_chunk(case), fused=_fused(case, dated), dated=dated,
    )  # fmt: skip


ONE_STREAM_ENGINES = frozenset({"llama.cpp", "mistral.rs", "exllamav2", "exllamav3", "mlx", "pytorch", "onnxruntime",
                                "other"})  # fmt: skip


SERVED = SERVING_ENGINES


def is_current(case: Case) -> bool:
    """Whether the engine's version is one of those that make up its main profile, and not an older one.

    Builds of llama.cpp are numbered, and tables that name none are mostly of 2023 and 2024. Transformers starts fewer
    kernels for each layer since its attention was rewritten in 4.48.
    """
    if case.engine == "llama.cpp":
        return bool(case.version) or case.backend == "cpu"
    if case.engine == "pytorch" and (found := re.match(r"4\.(\d+)", case.version)):
        return int(found[1]) >= 48
    return True


def _chunk(case: Case) -> int | None:
    if case.engine != "llama.cpp":
        return None
    if (said := case.notes.get("n_ubatch", "")).isdigit():
        return max(1, int(said))
    smaller = case.notes.get("b", "").removeprefix("-b").strip()
    if smaller.isdigit():
        return max(1, min(CHUNK_TOKENS["llama.cpp"], int(smaller)))
    # llama-batched-bench fills its batch with many prompts at once, and is run with larger ones.
    return 2048 if "batched-bench" in case.scenario else None


def _fused(case: Case, dated: bool) -> bool:
    if case.engine != "llama.cpp":
        return True
    said = case.notes.get("fa", "").lower()
    return said in ("1", "true", "on") if said else dated


def predict(case: Case) -> Prediction | Refused:
    """The case's metric with its band."""
    if case.metric == "peak_memory_gb":
        return _peak_memory(case)
    if case.machine.bandwidth_bytes_s <= 0:
        return Refused(f"the memory bandwidth of {case.machine.name} is not known")
    question = question_of(case)
    value = computed(question, case)
    if isinstance(value, Refused):
        return value
    if not math.isfinite(value) or value <= 0:
        return Refused("nothing finite follows from what is stated")
    band = band_of(RESIDUALS_OF.get(case.metric, case.metric), question.key)
    return Prediction(value, *(band.inverse() if case.metric.endswith("_ms") else band).around(value))


RESIDUALS_OF = {
    "tpot_ms": "decode_tok_s_single", "ttft_ms": "prefill_tok_s", "output_tok_s_per_gpu": "output_tok_s_total",
}  # fmt: skip
"""Metrics without residuals of their own, and whose they share."""


def band_of(metric: str, key: str) -> Band:
    """Eight of ten residuals lie inside; those of the engine here, or of all where it has too few."""
    bands = calibration.table("local").get("bands", {})
    found = bands.get(f"{metric}/{key}") or bands.get(metric)
    return Band(*found) if found else WIDE


def _peak_memory(case: Case) -> Prediction | Refused:
    from bedplate.decide.memory import fit
    from bedplate.facts.simulated import simulated
    from bedplate.values import Workload

    if case.prompt_tokens is None or case.output_tokens is None:
        return Refused("prompt and output lengths are not stated")
    if case.engine in ("other", "lmdeploy"):
        return Refused(f"what {case.texts['engine']} takes beside weights and cache is not known")
    devices = case.devices or 1
    described: dict[str, object] = {"accelerator": case.chip.name, "count": devices, "ram_gb": 1024}
    if case.chip.unified:
        sizes = case.chip.memory_options_gib
        described = {"accelerator": case.chip.name, "ram_gb": max(sizes, default=case.chip.memory_gib or 128)}
    if case.chip.kind == "cpu":
        described = {"cpu": case.chip.name, "ram_gb": 1024}
    layout = Parallelism(pipeline=devices) if case.engine in ONE_STREAM_ENGINES else Parallelism(tensor=devices)
    workload = Workload(
        concurrency=case.concurrency or 1,
        prompt_tokens=max(1, case.prompt_tokens),
        output_tokens=max(1, case.output_tokens),
    )
    found = fit(simulated(described), case.model, workload, case.engine, parallelism=layout)
    total = sum(need.count * need.total_bytes for need in found.devices)
    high = sum(need.count * need.high_bytes for need in found.devices)
    band = band_of("peak_memory_gb", case.engine)
    value = total / 1e9
    return Prediction(value, value * band.low, max(value * band.high, high / 1e9))


def predicts(case: Case) -> bool:
    """Whether this path computes the case's metric for its engine."""
    return case.metric != "ttft_ms" or case.concurrency in (None, 1)


def computed(question: Question, case: Case) -> float | Refused:
    """The case's metric, without a band."""
    prompt, output = case.prompt_tokens, case.output_tokens
    batch = case.concurrency or 1
    if case.metric == "prefill_tok_s":
        tokens = prompt or 512
        return tokens * batch / question.prefill_s(tokens, batch, case.depth or 0)
    if case.metric == "total_tok_s_incl_prompt":
        if prompt is None or output is None:
            return Refused("prompt and output lengths are not stated")
        return (prompt + output) / question.request_s(prompt, output)
    if case.metric == "decode_tok_s_single":
        if _whole_request(case) and prompt is not None and output:
            return output / question.request_s(prompt, output)
        return 1 / question.step_s(1, _context(case))
    step = question.step_s(batch, _context(case))
    if case.metric in ("output_tok_s_total", "output_tok_s_per_gpu"):
        return batch / step / ((case.devices or 1) if case.metric == "output_tok_s_per_gpu" else 1)
    if case.metric == "tpot_ms":
        return step * 1000
    if case.metric == "ttft_ms":
        return question.prefill_s(prompt or 512) * 1000 + step * 1000
    return Refused(f"{case.metric} is not predicted for {case.engine}")


def _context(case: Case) -> float:
    """Tokens in the cache while the answer is made, on average."""
    if case.prompt_tokens is None and case.output_tokens is None and case.depth is None:
        return TYPICAL_CONTEXT
    return max(case.depth or 0, case.prompt_tokens or 0) + (case.output_tokens or 0) / 2


def _whole_request(case: Case) -> bool:
    """Whether the speed is over a whole request, its prompt's time included: tables that count so state no depth."""
    if not case.prompt_tokens or case.depth is not None:
        return False
    return "decode phase" not in case.scenario and "llama-bench" not in case.scenario
