"""The reasons and figures of a candidate: why these weights and this layout, and the expected performance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bedplate.decide.apply_tuning import describe_tuning, use_measured_figures
from bedplate.decide.candidates import (
    COMFORT_TPOT_S,
    PRECISE_BITS,
    ROUNDED_OFF,
    SERVER_EFFORT,
    EngineCandidate,
    meets_targets,
)
from bedplate.decide.case import DecisionCase
from bedplate.decide.estimate import to_estimate
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.rules import DecisionRule
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.values import Estimate, Figure, Reason, replace_fields
from bedplate.values.cost import compute_cost_per_million
from bedplate.values.units import format_figure
from bedplate.values.units import format_memory as as_memory


def estimate_candidate(candidate: EngineCandidate, case: DecisionCase) -> Estimate:
    """Speed from the estimator, memory from the fit, cost and energy from the prices in the intent."""
    estimate = to_estimate(candidate.expected) if candidate.expected is not None else Estimate()
    estimate = replace_fields(estimate, memory_gb=_estimate_memory_gb(candidate))
    if candidate.tuned is not None:
        estimate = use_measured_figures(candidate.tuned, case, estimate)
    rate, operations = estimate.output_tok_s, case.operations
    if rate is None or rate.value <= 0:
        return estimate
    cards = max(1, candidate.cards)
    # A higher rate costs less, so the bounds change places.
    each = [
        compute_cost_per_million(operations.price, cards, tokens)
        for tokens in (rate.high, rate.value, max(rate.low, 1e-9))
    ]
    source = f"{cards} × {operations.price.description} over the estimated tokens per second"
    return replace_fields(
        estimate,
        cost_per_million_tokens=_make_figure([one.cost_per_million_tokens for one in each], source),
        kwh_per_million_tokens=_make_figure([one.kwh_per_million_tokens for one in each], source),
    )


def _make_figure(ends: Sequence[float | None], source: str) -> Figure | None:
    low, value, high = ends
    if low is None or value is None or high is None:
        return None
    return Figure(value=value, low=low, high=high, basis="estimate", source=source)


def _estimate_memory_gb(candidate: EngineCandidate) -> Figure:
    fullest = max(candidate.fit.devices, key=lambda need: need.total_bytes)
    fixed = fullest.weights_bytes + fullest.kv_bytes
    parts = (fullest.activation_bytes, fullest.overhead_bytes)
    value, low, high = ((fixed + sum(getattr(part, end) for part in parts)) / 1e9 for end in ("value", "low", "high"))
    return Figure(value=value, low=low, high=high, basis="estimate", source=fullest.overhead_bytes.source)


Says = Callable[[EngineCandidate, DecisionCase, MachineEvidence], str | None]
REASONS: list[DecisionRule[[EngineCandidate, DecisionCase, MachineEvidence], str]] = []
"""The rules that give a decision's further reasons, in the order in which they are shown."""


def add_reason(rule_id: str, source: str) -> Callable[[Says], Says]:
    def keep(says: Says) -> Says:
        REASONS.append(DecisionRule(rule_id, source, says))
        return says

    return keep


def list_reasons(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> tuple[Reason, ...]:
    texts = ((rule, rule.says(candidate, case, evidence)) for rule in REASONS)
    return tuple(Reason(rule=rule.id, text=text, source=rule.citation) for rule, text in texts if text)


@add_reason("tuned.measured", "store: measured here by bedplate tune; --untuned ignores it")
def explain_tuning(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Settings that `bedplate tune` measured on this machine to be better for this workload than the untuned plan."""
    return describe_tuning(candidate.tuned) if candidate.tuned is not None else None


@add_reason("fit.memory", "file header or facts, and the engine's overhead")
def explain_memory(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str:
    """How much memory the plan needs on the fullest device, and how much is usable there."""
    need = max(candidate.fit.devices, key=lambda one: one.total_bytes)
    used, usable = as_memory(need.total_bytes), as_memory(need.usable_bytes or 0)
    if need.device == "host":
        return f"{used} of {usable} usable RAM"
    return f"{used} of {usable} usable memory on {f'each of {need.count} GPUs' if need.count > 1 else 'the GPU'}"


@add_reason("fit.split", 'cheat-sheet "hybrid offload"')
def explain_split(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Weights that do not fit on the GPUs stay in RAM: routed experts first, because a token reads only a few."""
    offload = candidate.fit.offload
    if offload is None:
        return None
    what = "experts of " if offload.kind == "experts" else ""
    return f"{what}{offload.host_layers} of {offload.host_layers + offload.device_layers} layers stay in RAM"


@add_reason("quant.fp8", "physics: half the bytes to read; the chip's data sheet")
def explain_fp8(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """FP8 weights on a chip with FP8 units; on other chips, if 16-bit weights leave too little memory for requests."""
    if candidate.weights.label != "FP8" or candidate.weights.made == "as it is":
        return None
    units = "fp8" in candidate.target.features
    return "FP8 units on this chip: half the bytes to read" if units else "FP8 weights: half the bytes to read"


@add_reason("quant.fp4", "physics: a quarter of the bytes to read; the chip's data sheet")
def explain_fp4(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """FP4 weights on a chip with FP4 units, if 8-bit weights leave too little memory for the requests."""
    label = candidate.weights.label
    # Weights that are published in FP4 keep their type, also in another format and on chips without FP4 units.
    if label not in ("NVFP4", "MXFP4") or candidate.weights.made == "as it is" or label == case.model.quantization:
        return None
    return "FP4 units on this chip; 8-bit weights leave too little memory for all requests"


@add_reason("quant.none", 'landscape "anything where precision matters at the decimal level"')
def explain_unquantized(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """16-bit weights, if they fit and the workload is precision-sensitive or fewer bits bring no gain."""
    weights = candidate.weights
    if weights.label not in SIXTEEN_BIT:
        return None
    if weights.label == "F32" and weights.made == "while loading":
        return "32-bit weights: this processor has no instructions for BF16"
    bits = "32" if weights.label == "F32" else "16"
    sensitive = case.workload.precision_sensitive
    return f"{bits}-bit weights: the workload is precision-sensitive" if sensitive else f"{bits}-bit weights fit"


@add_reason("quant.stored", 'landscape "anything where precision matters at the decimal level"')
def explain_stored_bits(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Warns a precision-sensitive workload of weights below 8 bits: a conversion cannot restore the lost precision."""
    if not case.workload.precision_sensitive or candidate.nominal_bits >= PRECISE_BITS - ROUNDED_OFF:
        return None
    return (
        f"WARNING: the weights are {candidate.quantization}, and the workload is precision-sensitive; check the "
        "agreement of the answers, or use a version of the model with at least 8 bits"
    )


@add_reason("quant.fit", 'landscape "for text generation, 4-bit quantization is often acceptable"')
def explain_quantization(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """The weights with the most bits that fit and are faster than reading speed; below 4 bits if nothing else fits."""
    label = candidate.weights.label
    if candidate.weights.made == "as it is" or label in (*SIXTEEN_BIT, "FP8", "NVFP4", "MXFP4"):
        return None
    return f"{label}, {candidate.bits:.1f} bits per weight: {_explain_bits(candidate, case)}"


def _explain_bits(candidate: EngineCandidate, case: DecisionCase) -> str:
    """The criterion that `candidates` preferred these weights by."""
    expected = candidate.expected
    if candidate.max_concurrency < case.in_flight:
        return "the most bits that leave memory for about as many concurrent requests as any other"
    if case.workload.precision_sensitive or candidate.engine.effort >= SERVER_EFFORT:
        return "the most bits that fit"
    if expected is None:
        return "the fewest bits that suffice for text; the speed cannot be predicted"
    if expected.tpot_s <= COMFORT_TPOT_S or meets_targets(candidate, case):
        return "the most bits that fit and are faster than reading speed"
    return "the fastest that fit; none are faster than reading speed"


@add_reason("layout.tensor", 'cheat-sheet "interconnect (PCIe vs NVLink vs RDMA)"')
def explain_tensor(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Tensor parallelism only over fast links, or over a few GPUs of one machine."""
    size = candidate.layout.tensor
    return f"tensor parallelism over {size} GPUs with fast links or in one machine" if size > 1 else None


@add_reason("layout.attention", "physics: a latent cache has no heads to divide")
def explain_attention(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Attention data parallelism for a latent KV cache: tensor ranks would each store the whole cache."""
    size = candidate.layout.attention_data
    if size <= 1:
        return None
    return f"attention data parallelism over {size} ranks: a latent KV cache cannot be divided among tensor ranks"


@add_reason("layout.expert", 'cheat-sheet "expert parallel for MoE"')
def explain_expert(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Expert parallelism: each GPU holds whole experts, and a token is sent to the GPUs that hold its experts."""
    size = candidate.layout.expert
    return f"expert parallelism: whole experts, distributed over {size} GPUs" if size > 1 else None


@add_reason("layout.pipeline", 'cheat-sheet "interconnect (PCIe vs NVLink vs RDMA)"')
def explain_pipeline(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Pipeline parallelism over slow links: stages exchange data once per stage instead of twice per layer."""
    size = candidate.layout.pipeline
    if size <= 1:
        return None
    if "tensor" not in candidate.engine.ways:
        return f"{size} pipeline stages: {candidate.engine.name} divides a model by layers"
    return f"{size} pipeline stages: slow links carry one exchange per stage"


@add_reason("layout.data", 'cheat-sheet "tensor / pipeline / data parallel"')
def explain_replicas(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """GPUs that one replica does not need hold further replicas."""
    size = candidate.layout.data
    return f"{size} replicas for {case.in_flight:,} concurrent requests" if size > 1 else None


@add_reason("cpu.threads", "measurement: docs/threads.md")
def explain_threads(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """One thread for each physical core that the process may use."""
    if candidate.settings.threads is None or candidate.settings.device != "cpu":
        return None
    return f"{candidate.settings.threads} threads: one for each available physical core"


@add_reason("build.cpu", "the engine's package")
def explain_idle_gpu(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Reports that the GPU stays idle if the engine's build computes on the CPU."""
    if not case.hardware.accelerators or candidate.settings.device != "cpu":
        return None
    return f"the GPU stays idle: this build of {candidate.engine.name} computes on the CPU"


@add_reason("fit.queue", "physics: the KV cache of one request times the number of requests")
def explain_queue(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Reports how many requests run concurrently if not all of them do; the others wait in the queue."""
    computed, longest = candidate.settings.slots * candidate.layout.data, candidate.max_concurrency
    if min(computed, longest) >= case.in_flight:
        return None
    if computed <= longest:
        return f"{computed:,} of {case.in_flight:,} requests run concurrently; the others wait in the queue"
    usual, most = case.workload.usual_tokens, case.workload.request_tokens
    of_usual = f"all {case.in_flight:,}" if computed >= case.in_flight else f"{computed:,} of {case.in_flight:,}"
    return (
        f"{of_usual} requests run concurrently at {usual:,} tokens each, {longest:,} at {most:,} tokens; "
        "the others wait in the queue"
    )


@add_reason("latency.target", 'hardware-strategy "latency as the critical constraint"')
def explain_latency(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Layout and weights are chosen to meet the latency targets; if none do, the closest, with a warning."""
    target = case.workload.latency
    if target is None:
        return None
    expected = estimate_candidate(candidate, case)
    pairs = (("TTFT", expected.ttft_ms, target.ttft_ms), ("TPOT", expected.tpot_ms, target.tpot_ms))
    asked = [(name, took, limit) for name, took, limit in pairs if limit is not None]
    known = [(name, took.value, limit) for name, took, limit in asked if took is not None]
    if len(known) < len(asked):
        return "unknown whether the latency targets are met: the speed cannot be predicted"
    times = ", ".join(f"{name} {format_figure(took)} ms of {format_figure(limit)}" for name, took, limit in known)
    met = all(took <= limit for _, took, limit in known)
    return f"{'within the latency targets' if met else 'MISSES the latency targets'}: {times}" if known else None


@add_reason("evidence.calibrated", "store: measured on this machine")
def explain_calibration(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Measurements of an engine on this machine correct its estimates."""
    found = evidence.calibrations.get((candidate.engine.id, candidate.target.device))
    return f"estimates are scaled by {found.describe()}" if found is not None else None
