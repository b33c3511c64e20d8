"""What an engine is to bedplate. An engine file answers questions; it never spawns, waits or prints."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from bedplate.values import (
    Hardware,
    Launch,
    MemoryNeed,
    Model,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Workload,
    estimate,
)

RESERVED_SHARE = 0.05
"""Of the free memory, what is left to the system: a machine that swaps is slower than any other setting."""


class BorrowedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library that an engine's wheel expects of the system, and a package that carries it along."""

    soname: str
    package: str
    file: str
    """Where in the package it is, as a glob."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's own environment is made: pinned packages, and programs that bedplate ships into it."""

    packages: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()
    """(command name, file in engines/shipped): put into the environment's bin folder."""
    libraries: tuple[BorrowedLibrary, ...] = ()
    """Taken only on systems that lack them."""
    download_bytes: int
    disk_bytes: int
    check: str
    """Python that must run in the finished environment, or the environment is not taken for a good one."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes beside weights and cache; a few named constants with their source."""

    process_bytes: int = 0
    """Of the host's memory: interpreter and libraries."""
    device_bytes: int = 0
    """Of each device's memory: the driver's context, workspaces, captured graphs."""
    prefill_tokens: int | None = None
    """Prompt tokens that are computed at once; `None`: the whole prompts of all requests."""
    mlp_copies: float = 3.0
    """Rows of the MLP's width that are alive at once for each of those tokens: gate, up and their product."""
    hidden_copies: float = 2.0
    logits_for_all: bool = False
    """Whether a row of logits is made for each of them, and not only for the last."""
    share: float = 1.0
    """Of a device's free memory, what the engine may take."""
    spread: float
    """The band around all of this, up and down."""
    source: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that a log line explains."""

    message: str
    hint: str
    lasting: bool = True
    """Whether starting again would only fail again."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own metrics say. `None` is what this engine or version does not tell."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    preemptions: float | None = None


class Engine:
    """The interface, with answers that are right for an engine that bedplate knows of and cannot run yet."""

    id: ClassVar[str]
    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()
    """Weight formats that it loads."""
    version: ClassVar[str | None] = None
    recipe: ClassVar[Recipe | None] = None
    """`None`: planned for, but not installed by this version of bedplate."""
    supervised_env: ClassVar[dict[str, str]] = {}
    """Beside the launch's own environment, what helps the supervisor and would only confuse a person."""
    uses: ClassVar[MemoryUse] = MemoryUse(spread=1.0, source="not known for this engine")
    max_slots: ClassVar[int | None] = None
    """Requests that it computes at once at the most, whatever the memory."""
    key_variable: ClassVar[str | None] = None
    """The environment variable from which it takes the key that it then asks of its clients."""
    strength: ClassVar[str] = ""
    """When it is the right choice, in the words of the hint behind a refusal."""

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        raise NotImplementedError

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        """The largest settings that serve this work here, whether or not they fit."""
        raise NotImplementedError

    def overhead_bytes(self, model: Model, settings: Settings) -> float:
        """What it takes on its host beside weights and cache."""
        return self.uses.process_bytes + self.activation_bytes(model, settings.context_tokens)

    def activation_bytes(self, model: Model, prompt_tokens: int) -> float:
        """What computing a prompt holds at once, 16-bit, on a device that has all of the width."""
        tokens = min(prompt_tokens, self.uses.prefill_tokens or prompt_tokens)
        width = model.intermediate_size or 4 * (model.hidden_size or 0)
        if model.num_experts_active and model.moe_intermediate_size:
            width = model.moe_intermediate_size * model.num_experts_active
        rows = self.uses.mlp_copies * width + self.uses.hidden_copies * (model.hidden_size or 0)
        logits = (model.vocab_size or 0) * (tokens if self.uses.logits_for_all else 1)
        return 2.0 * (tokens * rows + logits)

    def memory(self, hardware: Hardware, model: Model, settings: Settings) -> MemoryNeed:
        """The need on one machine's RAM."""
        available_bytes = hardware.memory.available_bytes
        return MemoryNeed(
            weights_bytes=model.weight_bytes,
            kv_bytes=model.kv_bytes(settings.context_tokens) * settings.slots,
            overhead_bytes=estimate(self.overhead_bytes(model, settings), self.uses.spread, self.uses.source),
            available_bytes=available_bytes,
            reserved_bytes=round(available_bytes * RESERVED_SHARE),
        )

    def launch(self, plan: Plan, port: int) -> Launch:
        raise NotImplementedError

    def connections(self, settings: Settings) -> int | None:
        """How many connections its HTTP server answers at once; `None`: as many as come."""
        return None

    def installation(self) -> tuple[Preparation, ...]:
        if self.recipe is None:
            return ()
        what, where = " ".join(self.recipe.packages), "an environment of its own"
        sizes = {"download_bytes": self.recipe.download_bytes, "disk_bytes": self.recipe.disk_bytes}
        return (Preparation(kind="install", what=what, where=where, **sizes),)

    def progress(self, line: str) -> float | None:
        """How much of the model is loaded, when this log line says so."""
        return None

    def explain(self, log: str) -> Failure | None:
        """The known failure that this log shows."""
        return None

    def read(self, metrics: str) -> EngineState:
        """The engine's state from its own Prometheus text."""
        return EngineState()

    def not_run_yet(self) -> Refusal:
        return self.refusal(
            "outranked", "fits this hardware, but this version of bedplate does not run it yet", self.strength
        )

    def refusal(self, kind: str, why: str, hint: str | None = None) -> Refusal:
        return msgspec.convert({"engine": self.id, "kind": kind, "why": why, "hint": hint}, Refusal)
