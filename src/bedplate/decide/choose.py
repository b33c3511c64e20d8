"""Hardware, model and workload in; a Decision out, with every refusal and its reason."""

from __future__ import annotations

from bedplate.decide.fit import fitted, most_requests, what_would_fit
from bedplate.decide.planning import plan
from bedplate.engines import Engine, all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.values import (
    Challenger,
    Decision,
    Estimate,
    Figure,
    Hardware,
    MemoryNeed,
    Model,
    Reason,
    Refusal,
    Settings,
    Workload,
    replaced,
)
from bedplate.values.units import memory as as_memory

SHOWN_PORT = 8080
"""The port in a Decision's launch, which is there to be read and tried by hand; `serve` takes a free one."""


def decide(hardware: Hardware, model: Model, workload: Workload, wanted: str | None = None) -> Decision:
    """Which engine, why, and what to expect. `wanted` asks for one engine by its id."""
    if model.max_context is not None and workload.request_tokens > model.max_context:
        return _too_long(model, workload)
    refused: list[Refusal] = []
    able: list[Engine] = []
    for engine in all_engines().values():
        refusal = engine.refuse(hardware, model, workload)
        if refusal is None and engine.recipe is None:
            refusal = engine.not_run_yet()
        if refusal is None:
            able.append(engine)
        else:
            refused.append(refusal)
    chosen: Engine | None = able[0] if able else None
    if wanted is not None:
        asked_for = engine_by_id(wanted)
        chosen = asked_for if asked_for in able else None
        refused.sort(key=lambda refusal: refusal.engine != asked_for.id)
        refused += [e.refusal("outranked", f"{asked_for.name} was asked for") for e in able if e is not chosen]
    elif chosen is not None:
        refused += [e.refusal("outranked", f"{chosen.name} is simpler and does the same here") for e in able[1:]]
    if chosen is None:
        return Decision(
            engine=None, model=model.name, quantization=model.quantization, fits=False, max_concurrency=0,
            refused=tuple(refused),
        )  # fmt: skip
    return _decision_for(chosen, hardware, model, workload, tuple(refused), asked_for=wanted is not None)


def _decision_for(
    engine: Engine,
    hardware: Hardware,
    model: Model,
    workload: Workload,
    refused: tuple[Refusal, ...],
    *,
    asked_for: bool,
) -> Decision:
    settings, need = fitted(engine, hardware, model, workload)
    decision = Decision(
        engine=engine.id if need.fits else None,
        engine_version=engine.version,
        model=model.name,
        quantization=model.quantization,
        fits=need.fits,
        max_concurrency=most_requests(engine, hardware, model, min(workload.request_tokens, settings.context_tokens)),
        settings=settings,
        memory=need,
        estimate=Estimate(memory_gb=_memory_gb(need)),
        refused=refused,
        challengers=_challengers(),
    )
    if not need.fits:
        too_large = engine.refusal("impossible", _too_large(need), "; or ".join(what_would_fit(need, model)))
        return replaced(decision, refused=(too_large, *refused), hints=what_would_fit(need, model))
    reasons = _reasons(engine, hardware, workload, settings, need, asked_for=asked_for)
    launch = engine.launch(plan(decision, model, workload), SHOWN_PORT)
    return replaced(decision, reasons=reasons, launch=launch)


def _reasons(
    engine: Engine, hardware: Hardware, workload: Workload, settings: Settings, need: MemoryNeed, *, asked_for: bool
) -> tuple[Reason, ...]:
    if asked_for:
        first = Reason(rule="operations.asked", text=f"{engine.name} was asked for", source="--engine")
    elif not hardware.accelerators:
        first = Reason(
            rule="hardware.cpu",
            text=f"no GPU here: {engine.name} runs anywhere",
            source='seeds/002 "CPU-only or consumer hardware points to llama.cpp"',
        )
    else:
        first = Reason(
            rule="hardware.anywhere",
            text=f"a GGUF model: {engine.name} runs it on any hardware",
            source='seeds/001 "hybrid offload, GGUF, ultimate portability"',
        )
    reasons = [
        first,
        Reason(
            rule="fit.memory",
            text=f"{as_memory(need.total_bytes)} of {as_memory(need.available_bytes)} that are free",
            source="file header, and the engine's measured overhead",
        ),
        Reason(
            rule="cpu.threads",
            text=f"{settings.threads} threads: one for each physical core that we may use",
            source="measurement: docs/threads.md",
        ),
    ]
    if hardware.accelerators and not settings.gpu_layers:
        reasons.append(
            Reason(
                rule="build.cpu",
                text=f"the GPU stays idle: this build of {engine.name} computes on the CPU",
                source="the engine's package",
            )
        )
    in_flight = workload.in_flight()
    if settings.slots < in_flight:
        reasons.append(
            Reason(
                rule="fit.queue",
                text=f"{settings.slots} of {in_flight} requests at once; the others wait",
                source="physics: the cache of one request times the requests",
            )
        )
    return tuple(reasons)


def _too_long(model: Model, workload: Workload) -> Decision:
    """No engine makes a model read more than it was made for."""
    why = f"requests of {workload.request_tokens:,} tokens, and {model.name} reads at most {model.max_context:,}"
    return Decision(
        engine=None,
        model=model.name,
        quantization=model.quantization,
        fits=False,
        max_concurrency=0,
        refused=tuple(engine.refusal("impossible", why) for engine in all_engines().values()),
        hints=(f"a context of at most {model.max_context:,} tokens (--context)", "a model with a longer context"),
    )


def _challengers() -> tuple[Challenger, ...]:
    """None yet: an engine is worth measuring only when bedplate can run it."""
    return ()


def _memory_gb(need: MemoryNeed) -> Figure:
    fixed = need.weights_bytes + need.kv_bytes
    overhead = need.overhead_bytes
    value, low, high = ((fixed + part) / 1e9 for part in (overhead.value, overhead.low, overhead.high))
    return Figure(value=value, low=low, high=high, basis="estimate", source=overhead.source)


def _too_large(need: MemoryNeed) -> str:
    parts = (need.weights_bytes, need.kv_bytes, need.overhead_bytes.high)
    weights, cache, own = (as_memory(part) for part in parts)
    needed, free = as_memory(need.high_bytes), as_memory(need.available_bytes)
    return f"needs {needed} (weights {weights}, cache {cache}, its own {own}) and {free} are free"
