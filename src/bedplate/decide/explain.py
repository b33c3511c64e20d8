"""A candidate in words and figures: why these weights and this layout, and what to expect of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bedplate.decide.candidates import COMFORT_TPOT_S, PRECISE_BITS, ROUNDED_OFF, SERVER_EFFORT, Candidate, meets
from bedplate.decide.case import Case
from bedplate.decide.estimate import estimate_of
from bedplate.decide.evidence import Evidence
from bedplate.decide.rules import Rule
from bedplate.decide.tuned import measured_estimate, tuning_words
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.values import Estimate, Figure, Reason, replaced
from bedplate.values.cost import per_million
from bedplate.values.units import figure
from bedplate.values.units import memory as as_memory


def expectations(candidate: Candidate, case: Case) -> Estimate:
    """Speed from the estimator, memory from the fit, money and energy from what the intent says of them."""
    made = estimate_of(candidate.expected) if candidate.expected is not None else Estimate()
    made = replaced(made, memory_gb=_memory_gb(candidate))
    if candidate.tuned is not None:
        made = measured_estimate(candidate.tuned, case, made)
    rate, operations = made.output_tok_s, case.operations
    if rate is None or rate.value <= 0:
        return made
    cards = max(1, candidate.cards)
    # Slower is dearer: the band turns round.
    each = [per_million(operations.price, cards, tokens) for tokens in (rate.high, rate.value, max(rate.low, 1e-9))]
    said = f"{cards} × {operations.price.words} over the estimated tokens per second"
    return replaced(
        made,
        cost_per_million_tokens=_figure([one.cost_per_million_tokens for one in each], said),
        kwh_per_million_tokens=_figure([one.kwh_per_million_tokens for one in each], said),
    )


def _figure(ends: Sequence[float | None], source: str) -> Figure | None:
    low, value, high = ends
    if low is None or value is None or high is None:
        return None
    return Figure(value=value, low=low, high=high, basis="estimate", source=source)


def _memory_gb(candidate: Candidate) -> Figure:
    fullest = max(candidate.fit.devices, key=lambda need: need.total_bytes)
    fixed = fullest.weights_bytes + fullest.kv_bytes
    parts = (fullest.activation_bytes, fullest.overhead_bytes)
    value, low, high = ((fixed + sum(getattr(part, end) for part in parts)) / 1e9 for end in ("value", "low", "high"))
    return Figure(value=value, low=low, high=high, basis="estimate", source=fullest.overhead_bytes.source)


Says = Callable[[Candidate, Case, Evidence], str | None]
REASONS: list[Rule[[Candidate, Case, Evidence], str]] = []
"""What a decision says beside the rule that chose its engine, in this order."""


def reason(rule_id: str, source: str) -> Callable[[Says], Says]:
    def keep(says: Says) -> Says:
        REASONS.append(Rule(rule_id, source, says))
        return says

    return keep


def reasons_for(candidate: Candidate, case: Case, evidence: Evidence) -> tuple[Reason, ...]:
    said = ((rule, rule.says(candidate, case, evidence)) for rule in REASONS)
    return tuple(Reason(rule=rule.id, text=text, source=rule.citation) for rule, text in said if text)


@reason("tuned.measured", "store: measured here by bedplate tune; --untuned leaves it out")
def tuned(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Settings that were measured here to be better for such work than what is planned without measuring."""
    return tuning_words(candidate.tuned) if candidate.tuned is not None else None


@reason("fit.memory", "file header or facts, and the engine's overhead")
def fits(candidate: Candidate, case: Case, evidence: Evidence) -> str:
    """How much memory the fullest device needs, of how much it may take."""
    need = max(candidate.fit.devices, key=lambda one: one.total_bytes)
    used, free = as_memory(need.total_bytes), as_memory(need.usable_bytes or 0)
    if need.device == "host":
        return f"{used} of {free} RAM that may be used"
    return f"{used} of {free} that may be used on {f'each of {need.count} cards' if need.count > 1 else 'the card'}"


@reason("fit.split", 'cheat-sheet "hybrid offload"')
def split(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """What the cards cannot hold stays in RAM: routed experts first, since each token reads only a few of them."""
    offload = candidate.fit.offload
    if offload is None:
        return None
    what = "experts of " if offload.kind == "experts" else ""
    return f"{what}{offload.host_layers} of {offload.host_layers + offload.device_layers} layers stay in RAM"


@reason("quant.fp8", "physics: half the bytes to read; the chip's data sheet")
def fp8(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """On a chip that computes in FP8, weights are served in it; on others, where 16 bits do not hold everyone."""
    if candidate.weights.label != "FP8" or candidate.weights.made == "as it is":
        return None
    units = "fp8" in candidate.target.features
    return "FP8 units on this chip: half the bytes to read" if units else "FP8 weights: half the bytes to read"


@reason("quant.fp4", "physics: a quarter of the bytes to read; the chip's data sheet")
def fp4(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """On a chip that computes in FP4, weights that do not fit otherwise are served in it."""
    label = candidate.weights.label
    # Weights that were stored so keep their type, also in another format and on chips without such units.
    if label not in ("NVFP4", "MXFP4") or candidate.weights.made == "as it is" or label == case.model.quantization:
        return None
    return "FP4 units on this chip, and eight bits do not hold everyone"


@reason("quant.none", 'landscape "anything where precision matters at the decimal level"')
def unquantized(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Work that shows small errors keeps 16 bits where they fit; so does what nothing is gained by shrinking."""
    weights = candidate.weights
    if weights.label not in SIXTEEN_BIT:
        return None
    if weights.label == "F32" and weights.made == "while loading":
        return "32-bit weights: this processor has no instructions for BF16"
    bits = "32" if weights.label == "F32" else "16"
    small = case.workload.precision_sensitive
    return f"{bits}-bit weights: this work shows small errors" if small else f"{bits}-bit weights fit"


@reason("quant.stored", 'landscape "anything where precision matters at the decimal level"')
def stored_small(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Weights that come in few bits cannot be given back what they lost: work that shows small errors is warned."""
    if not case.workload.precision_sensitive or candidate.nominal_bits >= PRECISE_BITS - ROUNDED_OFF:
        return None
    return (
        f"THE WEIGHTS COME IN {candidate.quantization}, and this work shows small errors: compare its answers, "
        "or take the model in 8 bits or more where there is such a one"
    )


@reason("quant.fit", 'landscape "for text generation, 4-bit quantization is often acceptable"')
def quantized(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """The most faithful weights that fit and keep up with a reader; below four bits only where nothing else fits."""
    label = candidate.weights.label
    if candidate.weights.made == "as it is" or label in (*SIXTEEN_BIT, "FP8", "NVFP4", "MXFP4"):
        return None
    return f"{label}, {candidate.bits:.1f} bits per weight: {_why_these_bits(candidate, case)}"


def _why_these_bits(candidate: Candidate, case: Case) -> str:
    """As they were preferred: for everyone to be resident, then for speed, and else for what they say."""
    expected = candidate.expected
    if candidate.max_concurrency < case.in_flight:
        return "the most faithful that holds about as many at once as any"
    if case.workload.precision_sensitive or candidate.engine.effort >= SERVER_EFFORT:
        return "the most faithful that fits"
    if expected is None:
        return "the smallest that do for text, since nothing says how fast others are"
    if expected.tpot_s <= COMFORT_TPOT_S or meets(candidate, case):
        return "the most faithful that fits and keeps up with a reader"
    return "the quickest that fit; none keep up with a reader"


@reason("layout.tensor", 'cheat-sheet "interconnect (PCIe vs NVLink vs RDMA)"')
def tensor(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Layers are divided among cards only where links are fast, or over a few cards of one board."""
    size = candidate.layout.tensor
    return f"each layer over {size} cards that share fast links or a board" if size > 1 else None


@reason("layout.attention", "physics: a latent has no heads to divide")
def attention(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Where attention keeps a latent, its ranks are replicas: each would otherwise keep all of every cache."""
    if candidate.layout.attention_data <= 1:
        return None
    return f"attention as {candidate.layout.attention_data} replicas: a latent cache cannot be divided among ranks"


@reason("layout.expert", 'cheat-sheet "expert parallel for MoE"')
def expert(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Experts are spread whole, so that each token's few are read where they are."""
    return f"experts whole, spread over {candidate.layout.expert} cards" if candidate.layout.expert > 1 else None


@reason("layout.pipeline", 'cheat-sheet "interconnect (PCIe vs NVLink vs RDMA)"')
def pipeline(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Across slow links go stages of layers: they exchange once a stage and not twice a layer."""
    size = candidate.layout.pipeline
    if size <= 1:
        return None
    if "tensor" not in candidate.engine.ways:
        return f"{size} stages of layers: so does {candidate.engine.name} divide a model"
    return f"{size} stages of layers: slow links carry one exchange a stage"


@reason("layout.data", 'cheat-sheet "tensor / pipeline / data parallel"')
def replicas(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Cards that the model does not need hold further copies of it."""
    size = candidate.layout.data
    return f"{size} replicas for {case.in_flight:,} requests at once" if size > 1 else None


@reason("cpu.threads", "measurement: docs/threads.md")
def threads(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """One thread for each physical core that we may use."""
    if candidate.settings.threads is None or candidate.settings.device != "cpu":
        return None
    return f"{candidate.settings.threads} threads: one for each physical core that we may use"


@reason("build.cpu", "the engine's package")
def idle_gpu(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """A build that computes on the CPU leaves the GPU idle, and says so."""
    if not case.hardware.accelerators or candidate.settings.device != "cpu":
        return None
    return f"the GPU stays idle: this build of {candidate.engine.name} computes on the CPU"


@reason("fit.queue", "physics: the cache of one request times the requests")
def queue(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """More requests than are resident at once wait, and that is said."""
    computed, longest = candidate.settings.slots * candidate.layout.data, candidate.max_concurrency
    if min(computed, longest) >= case.in_flight:
        return None
    if computed <= longest:
        return f"{computed:,} of {case.in_flight:,} requests at once; the others wait"
    usual, most = case.workload.usual_tokens, case.workload.request_tokens
    of_usual = f"all {case.in_flight:,}" if computed >= case.in_flight else f"{computed:,} of {case.in_flight:,}"
    return f"{of_usual} requests at once while they have {usual:,} tokens, {longest:,} of {most:,}; the others wait"


@reason("latency.target", 'hardware-strategy "latency as the critical constraint"')
def in_time(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Layout and weights are chosen to keep the targets; where none does, the nearest, and that is said."""
    target = case.workload.latency
    if target is None:
        return None
    expected = expectations(candidate, case)
    pairs = (("TTFT", expected.ttft_ms, target.ttft_ms), ("TPOT", expected.tpot_ms, target.tpot_ms))
    asked = [(name, took, limit) for name, took, limit in pairs if limit is not None]
    known = [(name, took.value, limit) for name, took, limit in asked if took is not None]
    if len(known) < len(asked):
        return "whether the latency targets are kept is not known: nothing says how fast this is"
    said = ", ".join(f"{name} {figure(took)} ms of {figure(limit)}" for name, took, limit in known)
    kept = all(took <= limit for _, took, limit in known)
    return f"{'within the latency targets' if kept else 'MISSES the latency targets'}: {said}" if known else None


@reason("evidence.calibrated", "store: what was measured on this machine")
def calibrated(candidate: Candidate, case: Case, evidence: Evidence) -> str | None:
    """Measurements of an engine on this machine correct what is estimated for it here."""
    factor = evidence.factors.get((candidate.engine.id, candidate.target.device))
    if factor is None:
        return None
    return f"estimates are scaled by {factor:.2f}: so far off were they in what was measured here"
