"""Sentences made from the figures of a decision: a shortage of memory, its remedies, and hints."""

from __future__ import annotations

from collections.abc import Iterable

from bedplate.values import Hint, Remedy, Shortage
from bedplate.values.units import format_figure, format_latency, format_memory, format_seconds

HELP_BY_BOTTLENECK = {
    "memory bandwidth": "fewer bits per weight, or faster or more accelerators",
    "compute": "shorter prompts, fewer concurrent requests, or faster or more accelerators",
    "KV cache": "shorter or fewer concurrent requests",
    "interconnect": "faster links between the accelerators",
    "runtime overhead": "fewer concurrent requests",
    "host memory": "enough accelerator memory for all weights",
}
"""What would make a token faster, by the bottleneck."""
FASTER = "a smaller model, or faster or more accelerators"
PAGE_BYTES = 4096
"""Of Linux on x86, in which ttm.pages_limit is stated."""
FASTER_PROMPT = "shorter prompts, fewer concurrent requests, or faster or more accelerators"
NOT_IN_ENGINE = {
    "workload.structured_output": "this engine cannot constrain its answers",
    "workload.shared_prefix_tokens": "this engine computes a shared prefix for each request",
    "operations.portable": "this engine runs on the hardware of one vendor",
}
NOT_ON_MACHINE = {"hardware.link": "a node has one accelerator", "hardware.network": "there is one node"}


def describe_shortage(shortage: Shortage, *, breakdown: bool = True) -> str:
    """How much memory is needed and how much is usable; `breakdown` adds weights, cache and overhead."""
    where = ""
    if shortage.device != "host":
        where = f" on each of {shortage.count} GPUs" if shortage.count > 1 else " on the GPU"
    usable = (
        f"{format_memory(shortage.usable_bytes)} is" if shortage.usable_bytes is not None else "an unknown amount is"
    )
    parts = (
        f" (weights {format_memory(shortage.weights_bytes)}, cache {format_memory(shortage.cache_bytes)}, "
        f"overhead {format_memory(shortage.overhead_bytes)})"
    )
    return (
        f"needs {format_memory(shortage.needed_bytes)}{where} in {shortage.weights_label}{parts if breakdown else ''}, "
        f"but only {usable} usable"
    )


def describe_remedy(remedy: Remedy) -> str:
    if remedy.kind == "quantization":
        return (
            f"a quantization of at most {remedy.most_bits_per_weight:.1f} bits per weight "
            f"(this one has {remedy.bits_per_weight:.1f})"
        )
    if remedy.kind == "memory":
        return f"{format_memory(remedy.memory_bytes or 0)} more free memory{' on the GPUs' if remedy.on_cards else ''}"
    return f"{remedy.cards} GPUs of this model"


def join_alternatives(texts: Iterable[str]) -> str | None:
    """One hint from several alternatives, any of which is sufficient; `None` if there are none."""
    return "; or ".join(texts) or None


def describe_hint(hint: Hint) -> str:
    """The hint as a sentence: what it is, why, and what would help."""
    describe = {
        "would-fit": _describe_fit,
        "unsupported-hardware": _describe_unsupported,
        "unsupported-model": _describe_unsupported_model,
        "idle-cards": _describe_idle_cards,
        "idle-sockets": _describe_idle_sockets,
        "idle-nodes": _describe_idle_nodes,
        "missed-target": _describe_missed_target,
        "unknown-target": _describe_unknown_target,
        "unusable-speed": _describe_unusable_speed,
        "growing-queue": _describe_growing_queue,
        "waiting-requests": _describe_waiting,
        "ignored-field": _describe_ignored,
        "few-bits": _describe_few_bits,
        "memory-limit": _describe_memory_limit,
    }
    return describe[hint.kind](hint)


def _describe_few_bits(hint: Hint) -> str:
    return (
        f"{hint.quantization} has fewer than 4 bits per weight, because nothing else fits: expect worse answers; "
        "compare them with those of a smaller model in 4 bits"
    )


def _describe_memory_limit(hint: Hint) -> str:
    limit, raised = hint.limit_bytes or 0, hint.raised_bytes or 0
    command = f"sudo sysctl iogpu.wired_limit_mb={raised >> 20} sets it until the next restart"
    if hint.device != "apple":
        command = f"the kernel parameter ttm.pages_limit={raised // PAGE_BYTES} sets it"
    within = f" in {' or '.join(hint.engines)}" if hint.engines else ""
    return (
        f"{hint.quantization}{within} would fit if the GPU might use {format_memory(raised)} of the memory instead of "
        f"{format_memory(limit)}: {command}"
    )


def _describe_fit(hint: Hint) -> str:
    if hint.remedy is not None:
        return describe_remedy(hint.remedy)
    return f"requests of at most {hint.most_tokens:,} tokens (--context), or a model with a longer context"


def _describe_unsupported(hint: Hint) -> str:
    text = f"no engine that bedplate plans uses {hint.total} × {hint.device}"
    if hint.projects:
        text += f"; {', '.join(hint.projects)} can"
    return f"{text}; --engine {' or '.join(hint.engines)} plans the CPU of the host"


def _describe_unsupported_model(hint: Hint) -> str:
    on_cpu = f"; --engine {' or '.join(hint.cpu_engines)} plans the CPU of the host" if hint.cpu_engines else ""
    if hint.original is not None:
        on_cpu = f"; plan {hint.original}, the original, for weights that they load{on_cpu}"
    if not hint.engines:
        return f"no engine runs this model on {hint.device}; the refusals say what each needs{on_cpu}"
    users = f"{', '.join(hint.engines)} can use {hint.device}"
    return f"{users}, but not with these weights or this model; the refusals say what each needs{on_cpu}"


def _describe_idle_cards(hint: Hint) -> str:
    idle = (hint.total or 0) - (hint.used or 0)
    which = f"the {hint.device}" if hint.total == 1 else f"{idle} of {hint.total} × {hint.device}"
    text = f"{which} {'stays' if idle == 1 else 'stay'} idle"
    if hint.cause != "engine":
        return f"{text}: {_describe_spare(hint)}"
    text += ": this engine does not use them"
    if hint.engines:
        return f"{text}; --engine {' or '.join(hint.engines)} does"
    return f"{text}; {', '.join(hint.projects)} can" if hint.projects else text


def _describe_spare(hint: Hint) -> str:
    spare = "it" if (hint.total or 0) - (hint.used or 0) == 1 else "them"
    why = "more are not expected to be faster"
    if hint.cause == "vendor":
        why = "one process computes on the cards of one vendor"
    if hint.cause == "enough":
        used = str(hint.used) if hint.used else "the others"
        why = f"{used} {'is' if hint.used == 1 else 'are'} enough for this workload"
    return f"{why}; use {spare} for another service"


def _describe_idle_nodes(hint: Hint) -> str:
    idle = (hint.total or 0) - (hint.used or 0)
    text = f"{idle} of {hint.total} nodes {'stays' if idle == 1 else 'stay'} idle"
    whys = {
        "engine": "this engine does not use their accelerators",
        "one-node": "this engine computes on one node; a server on each, behind a load balancer, uses all",
    }
    return f"{text}: {whys.get(hint.cause or '') or _describe_spare(hint)}"


def _describe_idle_sockets(hint: Hint) -> str:
    idle = (hint.total or 0) - (hint.used or 0)
    return (
        f"{idle} of {hint.total} CPU sockets {'stays' if idle == 1 else 'stay'} idle: this engine binds its threads to "
        "one; start a second replica with numactl --cpunodebind=1 --membind=1, or use --engine "
        f"{' or '.join(hint.engines)}"
    )


def _describe_missed_target(hint: Hint) -> str:
    expected, target = hint.expected_ms or 0.0, hint.target_ms or 0.0
    prompt = hint.metric == "ttft_ms"
    helps = FASTER_PROMPT if prompt else HELP_BY_BOTTLENECK.get(hint.bottleneck or "", FASTER)
    kind = "default target" if hint.is_default else "target"
    return (
        f"{_name_metric(hint)} {format_latency(expected)} misses the {kind} of {format_latency(target)}; "
        f"{format_figure(expected / target, 2)} times the speed would meet it: {helps}"
    )


def _describe_unknown_target(hint: Hint) -> str:
    return (
        f"whether {_name_metric(hint)} meets its target of {format_latency(hint.target_ms or 0)} is unknown, because "
        "the speed is not predicted; bedplate bench measures it"
    )


def _name_metric(hint: Hint) -> str:
    return "TTFT" if hint.metric == "ttft_ms" else "TPOT"


def _describe_unusable_speed(hint: Hint) -> str:
    helps = HELP_BY_BOTTLENECK.get(hint.bottleneck or "", FASTER)
    return f"one request takes about {format_seconds(hint.request_s or 0)}, which is too slow to use: {helps}"


def _describe_growing_queue(hint: Hint) -> str:
    if hint.bottleneck == "compute":
        return (
            f"{hint.requests_per_s:g} requests/s arrive, but even at its peak rate this hardware computes at most "
            f"{format_figure(hint.answered_per_s or 0, 2)}, so the queue keeps growing; at least "
            f"{hint.machines or 0:,} machines of this kind are needed"
        )
    return (
        f"{hint.requests_per_s:g} requests/s arrive, but only about {format_figure(hint.answered_per_s or 0, 2)} are "
        f"answered, so the queue keeps growing; about {hint.machines or 0:,} machines of this kind would be enough"
    )


def _describe_waiting(hint: Hint) -> str:
    if hint.cause == "engine":
        return (
            f"this engine computes {hint.used:,} of {hint.total:,} concurrent requests at a time, the others wait; "
            "replicas compute more at a time"
        )
    if hint.cause == "length":
        return (
            f"all {hint.total:,} requests of usual length run concurrently, but only {hint.used:,} of "
            f"{hint.most_tokens or 0:,} tokens; more memory or fewer bits per weight hold more"
        )
    return (
        f"{hint.used:,} of {hint.total:,} requests run concurrently, the others wait; more memory, fewer bits per "
        "weight or shorter requests hold more"
    )


def _describe_ignored(hint: Hint) -> str:
    field = hint.field or ""
    if hint.cause == "weights":
        return f"{field} is not met: the weights have fewer than 8 bits; use a version of the model with at least 8"
    why = {
        "other-field": f"{hint.other_field} is used instead; leave one of them out",
        "missing-field": f"it needs {hint.other_field}",
        "task": "this task generates no tokens",
        "engine": NOT_IN_ENGINE.get(field, "this engine does not use it"),
        "hardware": NOT_ON_MACHINE.get(field, "this machine has no use for it"),
        "orchestrator": "it is not an engine that could stay in service",
        "unknown-speed": "without an estimate of the speed there is no cost",
    }
    return f"{field} is ignored: {why.get(hint.cause or '', 'it changes nothing')}"
