"""The variables that restrict a process to some of a machine's accelerators."""

from __future__ import annotations

from collections.abc import Iterable

from bedplate.values import Accelerator, Hardware

VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
}  # fmt: skip
"""By device."""
ORDER = {"CUDA_VISIBLE_DEVICES": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}
"""CUDA counts the fastest card first, unless this makes it count as the driver does."""


def show_first(device: str, count: int) -> dict[str, str]:
    """The variable with which a process sees only the first accelerators of those that are visible to it anyway."""
    variable = VARIABLES.get(device)
    return {variable: ",".join(map(str, range(count)))} if variable is not None else {}


def show_cards(device: str, cards: Iterable[Accelerator]) -> dict[str, str]:
    """The variables with which a process sees only these accelerators, in this order; none without accelerators."""
    variable, names = VARIABLES.get(device), [card.visible_name for card in cards]
    if variable is None or not names:
        return {}
    return {variable: ",".join(names), **ORDER.get(variable, {})}


def pick_cards(hardware: Hardware, indexes: Iterable[int]) -> tuple[Accelerator, ...]:
    """The accelerators with these indexes, in the order of the indexes; those that are gone are left out."""
    known = {card.index: card for card in hardware.accelerators}
    return tuple(known[index] for index in indexes if index in known)
