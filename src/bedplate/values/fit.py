"""Fit: the memory that a layout needs on each device, and how many concurrent requests it holds."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Figure, Record


class DeviceNeed(Record, frozen=True, kw_only=True):
    """The memory needed on one device. Identical devices share one record."""

    device: str
    """A card's name, or "host"."""
    count: int = 1
    """Number of identical devices."""
    weights_bytes: int
    kv_bytes: int
    activation_bytes: Figure
    overhead_bytes: Figure
    """Driver context, captured graphs, workspaces and the process itself."""
    usable_bytes: int | None
    """Memory that the engine may use; `None`: unknown."""
    adapter_bytes: int = 0
    """LoRA adapters."""
    loading_bytes: int | None = None
    """The most memory while weights are loaded: with those that are quantized then, and the driver context. `None`:
    not estimated."""
    graph_bytes: Figure | None = None
    """Captured CUDA graphs, a part of `overhead_bytes`; `None`: none, or not estimated."""

    @property
    def total_bytes(self) -> int:
        parts = self.activation_bytes.value + self.overhead_bytes.value
        return self.weights_bytes + self.kv_bytes + self.adapter_bytes + round(parts)

    @property
    def high_bytes(self) -> int:
        parts = self.activation_bytes.high + self.overhead_bytes.high
        return self.weights_bytes + self.kv_bytes + self.adapter_bytes + round(parts)

    @property
    def fits(self) -> bool:
        return self.usable_bytes is not None and self.high_bytes <= self.usable_bytes


class Offload(Record, frozen=True, kw_only=True):
    """What stays on the host if the accelerators cannot hold everything."""

    kind: Literal["layers", "experts"]
    """Whole layers, or only the routed experts of some layers, which are read least often."""
    device_layers: int
    """Layers that are entirely on the accelerators."""
    host_layers: int
    host_bytes: int


class Fit(Record, frozen=True, kw_only=True):
    schema: Literal["fit/1"] = "fit/1"
    fits: bool
    """Whether the model and at least one request of the requested length fit."""
    devices: tuple[DeviceNeed, ...]
    concurrency: int
    """Concurrent requests included in the above, over all replicas."""
    max_concurrency: int
    """The most requests of the requested length in memory at once, over all replicas."""
    offload: Offload | None = None
    notes: tuple[str, ...] = ()
