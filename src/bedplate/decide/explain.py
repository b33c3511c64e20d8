"""A candidate in words and figures: why these weights and this layout, and what to expect of them."""

from __future__ import annotations

from bedplate.decide.candidates import Candidate
from bedplate.decide.case import Case
from bedplate.decide.estimate import estimate_of
from bedplate.decide.evidence import Evidence
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.values import Estimate, Figure, Reason, replaced
from bedplate.values.units import memory as as_memory

SECONDS_PER_HOUR = 3600.0


def expectations(candidate: Candidate, case: Case) -> Estimate:
    """Speed from the estimator, memory from the fit, money and energy from what the intent says of them."""
    made = estimate_of(candidate.expected) if candidate.expected is not None else Estimate()
    made = replaced(made, memory_gb=_memory_gb(candidate))
    rate, operations = made.output_tok_s, case.operations
    if rate is None or rate.value <= 0:
        return made
    cards = max(1, candidate.cards)
    if operations.price_per_hour is not None:
        hourly = operations.price_per_hour * cards
        source = f"{hourly:g} an hour over the estimated tokens per second"
        made = replaced(made, cost_per_million_tokens=_per_million(hourly / SECONDS_PER_HOUR, rate, source))
    if operations.watts is not None:
        kilowatts = operations.watts * cards / 1000
        source = f"{kilowatts:g} kW over the estimated tokens per second"
        made = replaced(made, kwh_per_million_tokens=_per_million(kilowatts / SECONDS_PER_HOUR, rate, source))
    return made


def _per_million(each_second: float, rate: Figure, source: str) -> Figure:
    """Slower is dearer: the band turns round."""
    low, value, high = (each_second * 1e6 / tokens for tokens in (rate.high, rate.value, max(rate.low, 1e-9)))
    return Figure(value=value, low=low, high=high, basis="estimate", source=source)


def _memory_gb(candidate: Candidate) -> Figure:
    fullest = max(candidate.fit.devices, key=lambda need: need.total_bytes)
    fixed = fullest.weights_bytes + fullest.kv_bytes
    parts = (fullest.activation_bytes, fullest.overhead_bytes)
    value, low, high = ((fixed + sum(getattr(part, end) for part in parts)) / 1e9 for end in ("value", "low", "high"))
    return Figure(value=value, low=low, high=high, basis="estimate", source=fullest.overhead_bytes.source)


def reasons_for(candidate: Candidate, case: Case, evidence: Evidence) -> tuple[Reason, ...]:
    found = [_fits(candidate, case)]
    found += [reason for reason in (_weights(candidate, case), *_layout(candidate, case)) if reason is not None]
    if candidate.settings.threads is not None and candidate.settings.device == "cpu":
        found.append(
            Reason(
                rule="cpu.threads",
                text=f"{candidate.settings.threads} threads: one for each physical core that we may use",
                source="measurement: docs/threads.md",
            )
        )
    if case.hardware.accelerators and candidate.settings.device == "cpu":
        found.append(
            Reason(
                rule="build.cpu",
                text=f"the GPU stays idle: this build of {candidate.engine.name} computes on the CPU",
                source="the engine's package",
            )
        )
    if candidate.max_concurrency < case.in_flight or candidate.settings.slots * candidate.layout.data < case.in_flight:
        at_once = min(candidate.max_concurrency, candidate.settings.slots * candidate.layout.data)
        found.append(
            Reason(
                rule="fit.queue",
                text=f"{at_once:,} of {case.in_flight:,} requests at once; the others wait",
                source="physics: the cache of one request times the requests",
            )
        )
    if measured := evidence.measured(candidate.engine.id):
        factor = evidence.factor(candidate.engine.id)
        found.append(
            Reason(
                rule="evidence.calibrated",
                text=f"estimates are scaled by {factor:.2f}, as {measured} measurements of it here were",
                source="store",
            )
        )
    return tuple(found)


def _fits(candidate: Candidate, case: Case) -> Reason:
    need = max(candidate.fit.devices, key=lambda one: one.total_bytes)
    where = f"each of {need.count} cards" if need.count > 1 else "the card" if need.device != "host" else "RAM"
    free = as_memory(need.usable_bytes or 0)
    text = f"{as_memory(need.total_bytes)} of {free} that may be used on {where}"
    if need.device == "host":
        text = f"{as_memory(need.total_bytes)} of {free} RAM that may be used"
    return Reason(rule="fit.memory", text=text, source="file header or facts, and the engine's overhead")


def _weights(candidate: Candidate, case: Case) -> Reason | None:
    label, made = candidate.weights.label, candidate.weights.made
    if made == "as it is":
        return None
    if label == "FP8":
        return Reason(
            rule="quant.fp8",
            text="FP8 units on this chip: half the bytes to read",
            source="physics; the chip's data sheet",
        )
    if label in SIXTEEN_BIT:
        precise = "work that shows small errors" if case.workload.precision_sensitive else "they fit"
        return Reason(rule="quant.none", text=f"16-bit weights: {precise}", source='seeds/002 "Quality note"')
    if label in ("NVFP4", "MXFP4"):
        return Reason(rule="quant.fp4", text="FP4 units on this chip", source="physics; the chip's data sheet")
    return Reason(
        rule="quant.fit",
        text=f"{label} ({candidate.bits:.1f} bits per weight): the most faithful that fits and keeps up with a reader",
        source='seeds/002 "for text generation, 4-bit quantization is often acceptable"',
    )


def _layout(candidate: Candidate, case: Case) -> list[Reason]:
    layout, found = candidate.layout, []
    if candidate.fit.offload is not None:
        offload = candidate.fit.offload
        what = "experts of " if offload.kind == "experts" else ""
        layers = offload.host_layers + offload.device_layers
        found.append(
            Reason(
                rule="fit.split",
                text=f"{what}{offload.host_layers} of {layers} layers stay in RAM",
                source='seeds/001 "hybrid offload"',
            )
        )
    if layout.tensor > 1:
        found.append(
            Reason(
                rule="layout.tensor",
                text=f"each layer over {layout.tensor} cards that share fast links or a board",
                source='seeds/001 "interconnect (PCIe vs NVLink vs RDMA)"',
            )
        )
    if layout.attention_data > 1:
        found.append(
            Reason(
                rule="layout.attention",
                text="attention as replicas: every tensor rank would otherwise keep the whole latent cache",
                source="physics: a latent has no heads to divide",
            )
        )
    if layout.expert > 1:
        found.append(
            Reason(
                rule="layout.expert",
                text=f"experts whole, spread over {layout.expert} cards",
                source='seeds/001 "expert parallel for MoE"',
            )
        )
    if layout.pipeline > 1:
        found.append(
            Reason(
                rule="layout.pipeline",
                text=f"{layout.pipeline} stages of layers: slow links carry one exchange a stage",
                source='seeds/001 "interconnect (PCIe vs NVLink vs RDMA)"',
            )
        )
    if layout.data > 1:
        found.append(
            Reason(
                rule="layout.data",
                text=f"{layout.data} replicas for {case.in_flight:,} requests at once",
                source='seeds/001 "tensor / pipeline / data parallel"',
            )
        )
    return found
