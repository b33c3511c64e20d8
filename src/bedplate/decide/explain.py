"""The reasons and figures of a candidate: why these weights and this layout, and the expected performance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bedplate.decide.apply_tuning import describe_tuning, use_measured_figures
from bedplate.decide.candidates import (
    PRECISE_BITS,
    ROUNDED_OFF,
    SERVER_EFFORT,
    EngineCandidate,
    compute_conversion_s,
    make_candidate,
)
from bedplate.decide.case import DecisionCase
from bedplate.decide.estimate import compute_expectation, to_estimate
from bedplate.decide.estimate.arrivals import BENCH
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.layouts import LARGE_MIXTURE
from bedplate.decide.order import explain_loss
from bedplate.decide.rules import DecisionRule
from bedplate.decide.targets import meets_targets
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.engines.visible import pick_cards
from bedplate.values import Estimate, Figure, Parallelism, Reason, replace_fields
from bedplate.values.cost import compute_cost_per_million
from bedplate.values.units import format_figure, format_latency, format_seconds, format_size
from bedplate.values.units import format_memory as as_memory

MUCH_LONGER = 2.0


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


def describe_equal_requests(candidate: EngineCandidate, case: DecisionCase, estimate: Estimate) -> str | None:
    """A note if equal requests, as `bedplate bench` sends them, wait much longer for their first token than others."""
    workload, usual = case.workload, estimate.ttft_ms
    if workload.concurrency is None or workload.batch or usual is None or usual.basis != "estimate":
        return None
    equal = compute_expectation(
        candidate.hardware, candidate.model, candidate.engine.id, candidate.layout, workload,
        slots=candidate.settings.slots, offload=candidate.fit.offload, factor=candidate.factor,
        kv_bits=candidate.kv_bits, arrivals=BENCH,
    )  # fmt: skip
    if equal is None or equal.ttft_s * 1000 < MUCH_LONGER * usual.value:
        return None
    low, high = equal.ttft_band.get_bounds(equal.ttft_s * 1000)
    return (
        "requests of equal lengths, as `bedplate bench` sends them, end together, and their prompts queue: TTFT "
        f"{format_figure(equal.ttft_s * 1000)} ms ({format_figure(low)} to {format_figure(high)})"
    )


def _make_figure(ends: Sequence[float | None], source: str) -> Figure | None:
    low, value, high = ends
    if low is None or value is None or high is None:
        return None
    return Figure(value=value, low=low, high=high, basis="estimate", source=source)


def _estimate_memory_gb(candidate: EngineCandidate) -> Figure:
    fullest = max(candidate.fit.devices, key=lambda need: need.total_bytes)
    fixed = fullest.weights_bytes + fullest.kv_bytes + fullest.adapter_bytes
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
    where = f"each of {need.count} GPUs" if need.count > 1 else need.device if candidate.cards > 1 else "the GPU"
    return f"{used} of {usable} usable memory on {where}"


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
    if candidate.weights.label != "FP8" or not candidate.weights.is_chosen:
        return None
    units = "fp8" in candidate.target.features
    return "FP8 units on this chip: half the bytes to read" if units else "FP8 weights: half the bytes to read"


@add_reason("quant.fp4", "physics: a quarter of the bytes to read; the chip's data sheet")
def explain_fp4(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """FP4 weights on a chip with FP4 units, if 8-bit weights leave too little memory for the requests."""
    label = candidate.weights.label
    # Weights that are published in FP4 keep their type, also in another format and on chips without FP4 units.
    if label not in ("NVFP4", "MXFP4") or not candidate.weights.is_chosen or label == case.model.quantization:
        return None
    return "FP4 units on this chip; 8-bit weights leave too little memory for all requests"


@add_reason("quant.none", 'landscape "anything where precision matters at the decimal level"')
def explain_unquantized(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """16-bit weights, if they fit and meet the latency targets, or the workload is precision-sensitive."""
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
    """The weights with the most bits that fit and meet the latency targets; below 4 bits if nothing else fits."""
    label = candidate.weights.label
    if not candidate.weights.is_chosen or label in (*SIXTEEN_BIT, "FP8", "NVFP4", "MXFP4", case.model.quantization):
        return None
    return f"{label}, {candidate.bits:.1f} bits per weight: {_explain_bits(candidate, case)}"


def _explain_bits(candidate: EngineCandidate, case: DecisionCase) -> str:
    """The criterion by which the order preferred these weights."""
    if candidate.max_concurrency < case.in_flight:
        return "the most bits that leave memory for about as many concurrent requests as any other"
    if candidate.expected is None:
        if case.workload.precision_sensitive or candidate.engine.effort >= SERVER_EFFORT:
            return "the most bits that fit"
        return "the fewest bits that suffice for text; the speed cannot be predicted"
    if meets_targets(candidate, case):
        return "the most bits that fit and meet the latency targets"
    return "none meet the latency targets, and these come closest"


@add_reason("quant.published", "docs/published-weights.md: the source of each entry")
def explain_published(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Weights that are published in the planned quantization are fetched: nothing is converted on this machine."""
    published = candidate.weights.published
    if published is None:
        return None
    what = (
        f", file {published.file}" if published.file else f", branch {published.revision}" if published.revision else ""
    )
    about = "" if published.size_basis == "reported" else "about "
    instead = _describe_conversion(candidate, case)
    if not published.sources and not candidate.model.name.endswith(published.file or "/"):
        instead += f"; the name of the {'file' if published.file else 'branch'} is assumed, as no source lists it"
    return f"fetch {published.repository}{what}, {about}{format_size(published.size_bytes)}{instead}"


def _describe_conversion(candidate: EngineCandidate, case: DecisionCase) -> str:
    """The effort that the published weights save; empty if the engine has no conversion to the same bits."""
    engine, made = candidate.engine, candidate.weights
    others = engine.list_weights(candidate.target, case.model, case.workload)
    same = [one for one in others if one.made == "converted" and one.format == made.format]
    if not same:
        saved = case.model.weight_bytes - candidate.model.weight_bytes
        return f" instead of the original's {format_size(case.model.weight_bytes)}" if saved > 0 else ""
    nearest = min(same, key=lambda one: one.label.upper() != made.label.upper().replace(" ", ""))
    seconds = compute_conversion_s(candidate, case, nearest)
    return (
        f" instead of a conversion: {format_size(case.model.weight_bytes)} to download, about "
        f"{format_seconds(seconds)} to convert"
    )


@add_reason("fit.graphs", "docs/gpu.md: memory of CUDA graphs")
def explain_few_graphs(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """CUDA graphs for a few requests only, where the weights leave no memory for those of more."""
    tokens = candidate.settings.graph_tokens
    if tokens is None:
        return None
    return (
        f"CUDA graphs for steps of up to {tokens} tokens only, for at most {candidate.settings.slots} requests at a "
        "time: those of more do not fit in addition to the weights"
    )


@add_reason("cache.8bit", "physics: half the bytes of a 16-bit cache")
def explain_cache_type(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """An 8-bit KV cache, only if a 16-bit one does not fit, holds too few requests, or misses the TPOT target."""
    wide = candidate.sixteen_bit
    if wide is None:
        return None
    if not wide.fit.fits or wide.fit.offload is not None:
        instead = f"a 16-bit cache of {wide.settings.context_tokens:,} tokens does not fit in addition to the weights"
    elif wide.usual_concurrency < case.in_flight:
        instead = f"a 16-bit cache would hold {wide.usual_concurrency:,}"
    else:
        took = wide.expected.tpot_s * 1000 if wide.expected is not None else 0.0
        instead = f"TPOT would be {format_latency(took)} with a 16-bit cache"
    holds = min(candidate.usual_concurrency, case.in_flight)
    return f"8-bit KV cache, for {holds:,} of {case.in_flight:,} concurrent requests: {instead}"


@add_reason("adapters.resident", "physics: rank × widths of the linear layers × layers")
def explain_adapters(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """How many LoRA adapters are in memory, for which rank, how large they are, and how a request names one."""
    engine, count = candidate.engine, len(case.workload.adapters)
    if not count or engine.adapters is None:
        return None
    resident, rank = engine.count_resident_adapters(case.workload), engine.choose_adapter_rank(case.workload)
    listed = case.workload.lora_adapters
    assumed = isinstance(listed, int) or all(one.rank is None for one in case.workload.adapters)
    size = sum(need.adapter_bytes * need.count for need in candidate.fit.devices)
    plural = "adapter" if count == 1 else "adapters"
    held = (
        f"{count} LoRA {plural}"
        if resident >= count
        else f"{resident} of {count} LoRA adapters, the others on the host"
    )
    apart = "" if engine.adapters.mixes or count == 1 else "; requests for different adapters do not share a batch"
    return (
        f"{held}, rank {rank}{' (assumed)' if assumed else ''}: {as_memory(size)} for all linear layers; "
        f"{engine.adapters.use}{apart}"
    )


@add_reason("vision.images", "physics: the patches of an image, divided by those that become one token")
def explain_images(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """The memory of a vision encoder in a file of its own, and how many images the context holds."""
    projector = case.model.projector
    if projector is None or not candidate.engine.reads_projectors:
        return None
    limit = "the tokens of an image depend on its size"
    context = case.workload.context_tokens or case.model.max_context
    if projector.image_tokens and context:
        most = context // projector.image_tokens
        limit = f"an image takes {projector.image_tokens:,} tokens, so {context:,} tokens hold at most {most:,}"
    size = as_memory(projector.weight_bytes + projector.activation_bytes)
    return f"images: the vision encoder takes {size} with the image that it computes; {limit}"


@add_reason("layout.named-cards", "physics: the ranks of one process wait for the slowest card")
def explain_cards(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Of different GPUs, those of one kind or the largest of one vendor, whichever the order of plans prefers."""
    if not candidate.settings.cards:
        return None
    used: dict[str, list[str]] = {}
    for card in pick_cards(candidate.hardware, candidate.settings.cards):
        used.setdefault(card.name, []).append(str(card.index))
    names = " and ".join(f"{name} ({'GPU' if len(at) == 1 else 'GPUs'} {', '.join(at)})" for name, at in used.items())
    return f"uses {names} of {len(case.hardware.accelerators)} different GPUs"


@add_reason("layout.tensor", 'cheat-sheet "interconnect (PCIe vs NVLink vs RDMA)"')
def explain_tensor(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Tensor parallelism only over fast links, or over a few GPUs of one machine."""
    size = candidate.layout.tensor // candidate.layout.attention_data
    return f"tensor parallelism over {size} GPUs with fast links or in one machine" if size > 1 else None


@add_reason("layout.attention", "physics: a rank stores whole KV heads, and a latent cache has no heads to divide")
def explain_attention(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Attention data parallelism for a mixture of experts: the groups have separate requests, and share the experts."""
    size, model = candidate.layout.attention_data, candidate.model
    if size <= 1:
        return None
    why = "each has its own requests, and all share the experts"
    if model.kv_lora_rank is not None:
        why = "a latent KV cache cannot be divided among tensor ranks"
    elif model.num_kv_heads and model.num_kv_heads < candidate.layout.tensor:
        why = f"{model.num_kv_heads} KV heads cannot be divided among {candidate.layout.tensor} ranks without copies"
    return f"attention data parallelism over {size} ranks: {why}"


@add_reason("layout.expert", 'cheat-sheet "expert parallel for MoE"')
def explain_expert(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Expert parallelism: each GPU holds whole experts, and a token is sent to the GPUs that hold its experts."""
    size = candidate.layout.expert
    return f"expert parallelism: whole experts, distributed over {size} GPUs" if size > 1 else None


@add_reason("layout.mixture", "physics: ranks with whole experts read each of them once for the requests of all")
def explain_mixture(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """A large mixture usually has data parallel attention with expert parallelism; why another layout is planned."""
    engine, model, layout = candidate.engine, candidate.model, candidate.layout
    is_large = model.parameters >= LARGE_MIXTURE and layout.tensor > 1
    if not model.num_experts or not is_large or layout.attention_data > 1 or "attention_data" not in engine.ways:
        return None
    most = layout.tensor * layout.pipeline * layout.data
    usual = Parallelism(tensor=most, expert=most, attention_data=most)
    if model.num_experts % most or not engine.accepts_layout(model, usual, 1):
        return None
    part = replace(case, hardware=candidate.hardware)
    other = make_candidate(engine, candidate.target, candidate.weights, model, usual, part, evidence)
    if case.workload.adapters and not engine.accepts_adapters(usual):
        why = f"{engine.name} serves no LoRA adapters in this layout"
    elif not other.fit.fits:
        why = "it does not fit, because every GPU has all attention weights"
    elif candidate.expected is None or other.expected is None:
        return None
    else:
        why = explain_loss(other, candidate, case)
    return f"no data parallel attention with expert parallelism over {most} GPUs: {why}"


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
    times = ", ".join(f"{name} {format_latency(took)} of {format_latency(limit)}" for name, took, limit in known)
    met = all(took <= limit for _, took, limit in known)
    return f"{'within the latency targets' if met else 'MISSES the latency targets'}: {times}" if known else None


@add_reason("evidence.calibrated", "store: measured on this machine")
def explain_calibration(candidate: EngineCandidate, case: DecisionCase, evidence: MachineEvidence) -> str | None:
    """Measurements of an engine on this machine correct its estimates."""
    found = evidence.calibrations.get((candidate.engine.id, candidate.target.device))
    return f"estimates are scaled by {found.describe()}" if found is not None else None
