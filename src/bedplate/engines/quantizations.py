"""The rows of the table of quantizations: what an engine has kernels for, on which device, and where that was read.

Every quantized plan has a row in its engine's table: the search takes weights from it, and the verifier checks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from bedplate.values.decision import Device


class SupportedQuantization(msgspec.Struct, frozen=True, kw_only=True):
    """An engine has kernels for one type of weights, or of the KV cache, on one kind of device."""

    method: str
    """As `name_quantization` names the weights, or the type of the cache as the engine's option has it."""
    part: Literal["weights", "cache"] = "weights"
    device: Device
    least: tuple[int, int] | None = None
    """The lowest CUDA compute capability; `None`: any that the engine's kernels are built for."""
    below: tuple[int, int] | None = None
    """The first CUDA compute capability that no longer has it."""
    units: Literal["fp8", "fp4"] | None = None
    """Matrix units that the chip must have."""
    source: str
    """File and version."""

    def covers(self, device: Device, capability: tuple[int, int] | None, features: frozenset[str]) -> bool:
        """Whether it holds for this device. An unknown compute capability is not too low: the engine may start."""
        if device != self.device or (self.units is not None and self.units not in features):
            return False
        if capability is None:
            return True
        return (self.least is None or capability >= self.least) and (self.below is None or capability < self.below)


class EightBitCache(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's KV cache of 8 bits; its rows in the table state the devices."""

    bits: float = 8.0
    """Of each key and value, with scales."""
    rows: tuple[SupportedQuantization, ...]
    latent: bool = False
    """Whether it stores a latent cache (MLA) in 8 bits."""
    head_step: int = 1
    """Values that share a scale: the size of a head is a multiple of it."""

    def find_row(
        self, device: Device, capability: tuple[int, int] | None, features: frozenset[str]
    ) -> SupportedQuantization | None:
        return find_quantization(self.rows, device, capability, features)


def make_rows(
    source: str,
    device: Device,
    methods: Iterable[str],
    *,
    least: tuple[int, int] | None = None,
    below: tuple[int, int] | None = None,
    units: Literal["fp8", "fp4"] | None = None,
) -> tuple[SupportedQuantization, ...]:
    """Rows for several kinds of weights that were read in one place."""
    return tuple(
        SupportedQuantization(method=one, device=device, least=least, below=below, units=units, source=source)
        for one in sorted(methods)
    )


def find_quantization(
    rows: Iterable[SupportedQuantization],
    device: Device,
    capability: tuple[int, int] | None,
    features: frozenset[str],
) -> SupportedQuantization | None:
    """The first row that covers this device."""
    return next((row for row in rows if row.covers(device, capability, features)), None)
