"""Fit: what a layout needs on each device, and how many requests it holds."""

from __future__ import annotations

from typing import Literal

from bedplate.values.record import Figure, Record


class DeviceNeed(Record, frozen=True, kw_only=True):
    """The need on one device; devices that are alike share one record."""

    device: str
    """A card's name, or "host"."""
    count: int = 1
    """How many devices carry the same."""
    weights_bytes: int
    kv_bytes: int
    activation_bytes: Figure
    overhead_bytes: Figure
    """The driver's context, captured graphs, workspaces, the process itself."""
    usable_bytes: int | None
    """What the engine may take of it; `None` when nobody says how much there is."""

    @property
    def total_bytes(self) -> int:
        parts = self.activation_bytes.value + self.overhead_bytes.value
        return self.weights_bytes + self.kv_bytes + round(parts)

    @property
    def high_bytes(self) -> int:
        parts = self.activation_bytes.high + self.overhead_bytes.high
        return self.weights_bytes + self.kv_bytes + round(parts)

    @property
    def fits(self) -> bool:
        return self.usable_bytes is not None and self.high_bytes <= self.usable_bytes


class Offload(Record, frozen=True, kw_only=True):
    """What stays on the host when the cards cannot hold it all."""

    kind: Literal["layers", "experts"]
    """Whole layers, or only the routed experts of so many layers, which are read least of all weights."""
    device_layers: int
    """Layers that are wholly on the cards."""
    host_layers: int
    host_bytes: int


class Fit(Record, frozen=True, kw_only=True):
    schema: Literal["fit/1"] = "fit/1"
    fits: bool
    """The model and at least one request of the asked length."""
    devices: tuple[DeviceNeed, ...]
    concurrency: int
    """Requests that the need above counts, over all replicas."""
    max_concurrency: int
    """The most requests of the asked length that are resident at once, over all replicas."""
    offload: Offload | None = None
    notes: tuple[str, ...] = ()
