"""The case that rules examine: hardware, model, workload and operations, and the properties derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bedplate.facts.chips import Chip, find_accelerator_chip
from bedplate.values import Hardware, LatencyTarget, Model, Workload, replace_fields
from bedplate.values.intent import Operations

MANY = 10
"""Requests in flight from which on the scheduler determines the speed: landscape "High concurrency (10+
simultaneous)"."""
FEW = 4
"""Requests in flight that a local engine still serves well."""
RTX_CARDS = 4
"""cheat-sheet "perfect for 1/2/3/4 GPU(s) setups"."""
LONG_TOKENS = 8192
"""Requests to a mixture-of-experts model that are at least this long need more than batching."""
VERY_LONG_TOKENS = 32768
"""From this length on, the KV cache of a few requests is larger than the weights, even for a dense model."""
SHARED_TOKENS = 1024
SHARED_SHARE = 0.5
"""A shared prefix that justifies a radix tree: most of the prompt, and longer than a short system prompt."""
STORED_BITS = 5.0
"""Weights with at most this many bits are not quantized again."""
SMALL_PARAMETERS = 1_500_000_000
"""Embedding models below this size are encoders, not LLMs."""
CHAT_TARGET = LatencyTarget(ttft_ms=2000, tpot_ms=100)
"""The latency that text generation must meet if the workload states none."""
CHAT_SLACK = 1.1
"""Nobody asked for the targets of a chat: they count as met up to this factor, so that a few milliseconds cost no
fidelity."""
BATCH_REQUESTS = 64
"""Concurrent requests for each accelerator, or on a CPU, that batch work is planned for if the workload states none."""
MACHINERY = ("none", "container", "kubernetes", "cluster")


@dataclass(frozen=True)
class DecisionCase:
    hardware: Hardware
    model: Model
    workload: Workload
    operations: Operations
    names_cards: bool = False
    """Whether the hardware is a part of a machine with different accelerators, so that a plan names those it uses."""

    def with_work(self, workload: Workload) -> DecisionCase:
        return replace(self, workload=workload)

    @property
    def in_flight(self) -> int:
        return self.workload.compute_in_flight()

    @property
    def peak_in_flight(self) -> int:
        """Requests that are in flight at busy times; the rules judge engines by them."""
        return self.workload.compute_peak_in_flight()

    @property
    def concurrent_requests(self) -> str:
        """`64 concurrent requests`, for the reasons of rules."""
        most = "up to " if self.peak_in_flight > self.in_flight else ""
        return f"{most}{self.peak_in_flight:,} concurrent requests"

    @property
    def has_many_requests(self) -> bool:
        return self.peak_in_flight >= MANY or self.workload.volume == "extreme"

    @property
    def has_few_requests(self) -> bool:
        return self.peak_in_flight <= FEW and not self.has_many_requests

    @cached_property
    def chip(self) -> Chip | None:
        return find_accelerator_chip(self.hardware.accelerators[0]) if self.hardware.accelerators else None

    @property
    def cards(self) -> int:
        return len(self.hardware.accelerators)

    @property
    def vendor(self) -> str | None:
        return self.hardware.accelerators[0].vendor if self.hardware.accelerators else None

    @cached_property
    def has_unified_memory(self) -> bool:
        cards = self.hardware.accelerators
        return bool(cards and cards[0].unified_memory) or bool(self.chip and self.chip.unified)

    @cached_property
    def kind(self) -> str:
        """datacenter, workstation, consumer, apple, edge, cpu or accelerator; an unlisted card is judged by memory."""
        if not self.hardware.accelerators:
            return "cpu"
        if self.chip is not None:
            return self.chip.kind
        large = (self.hardware.accelerators[0].memory_bytes or 0) >= 40 << 30
        return "datacenter" if self.vendor in ("nvidia", "amd") and large else "consumer"

    @property
    def has_rtx_cards(self) -> bool:
        """One to four NVIDIA consumer or workstation cards."""
        return (
            self.vendor == "nvidia"
            and self.kind in ("consumer", "workstation")
            and self.cards <= RTX_CARDS
            and not self.has_unified_memory
        )

    @property
    def has_pre_turing_cards(self) -> bool:
        """NVIDIA cards for which most servers have no kernels."""
        capability = self.chip.capability if self.chip is not None else None
        return capability is not None and float(capability) < 7.5

    @property
    def desktop_cards(self) -> str:
        """`2 RTX cards`, for the reasons of rules: those of NVIDIA that are no data-centre cards."""
        names = []
        for card in self.hardware.accelerators:
            chip = find_accelerator_chip(card) if card.vendor == "nvidia" else None
            if card.vendor == "nvidia" and (chip is None or chip.kind in ("consumer", "workstation")):
                names.append(card.name)
        kind = "RTX" if all("RTX" in name.upper() for name in names) else "NVIDIA desktop"
        return f"{len(names)} {kind} cards" if len(names) > 1 else f"one {kind} card"

    @property
    def is_moe(self) -> bool:
        return bool(self.model.num_experts and self.model.num_experts > 1)

    @property
    def has_long_requests(self) -> bool:
        return self.workload.request_tokens >= LONG_TOKENS

    @property
    def has_very_long_requests(self) -> bool:
        return self.workload.request_tokens >= VERY_LONG_TOKENS

    @property
    def shares_prefix(self) -> bool:
        shared = self.workload.repeated_prefix_tokens
        return shared >= SHARED_TOKENS and shared >= SHARED_SHARE * self.workload.prompt_tokens

    @property
    def is_llm(self) -> bool:
        """Whether it generates text, or is an embedding model of the size of an LLM."""
        task = self.workload.task if self.workload.task != "generate" else self.model.task
        if task == "generate":
            return True
        return task == "embed" and self.model.format != "onnx" and self.model.parameters >= SMALL_PARAMETERS

    def allows(self, machinery: str) -> bool:
        """Whether the team runs at least this infrastructure; containers if the intent does not specify it."""
        return MACHINERY.index(self.operations.machinery or "container") >= MACHINERY.index(machinery)


def with_batch_load(hardware: Hardware, workload: Workload) -> Workload:
    """The workload with the concurrent requests of batch work if it does not say how many there are."""
    if not workload.batch or workload.states_load:
        return workload
    return replace_fields(workload, concurrency=BATCH_REQUESTS * max(1, len(hardware.accelerators)))


def with_model_task(model: Model, workload: Workload) -> Workload:
    """The workload with the model's task if it does not specify one.

    Default lengths are limited to the model's context.
    """
    if workload.task == "generate" and model.task != "generate":
        workload = replace_fields(workload, task=model.task)
    if workload.origin == "default" and workload.task != "generate" and model.max_context is not None:
        return replace_fields(workload, prompt_tokens=min(workload.prompt_tokens, model.max_context))
    return workload
