"""Shared helpers of the accelerator readers: sysfs, PCIe, external programs and device visibility."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedplate.facts.cgroup import read_text
from bedplate.values import Accelerator, Figure, Link, Pcie

Ask = Callable[[Sequence[str]], str | None]
"""Runs a program and returns its output; `None` if it is missing or failed."""
ASK_LIMIT_S = 20.0

# One lane, one direction, after line encoding: 2.5, 5, 8, 16, 32 and 64 GT/s (PCI-SIG base specifications).
PCIE_LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
PCIE_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundAccelerators:
    """The accelerators of one kind, their links, and notes on problems."""

    accelerators: tuple[Accelerator, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()


def ask_program(argv: Sequence[str]) -> str | None:
    program = shutil.which(argv[0])
    if program is None:
        return None
    try:
        done = subprocess.run([program, *argv[1:]], capture_output=True, timeout=ASK_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def parse_json(text: str | None) -> Any:
    """The JSON in a program's output, after any warnings that precede it; `None` if there is none."""
    text = text or ""
    for start in [match.start() for match in re.finditer(r"^\s*[\[{]", text, re.MULTILINE)][:8]:
        try:
            return json.loads(text[start:])
        except (ValueError, RecursionError):
            continue
    return None


def select_visible(uuids: Sequence[str | None], value: str | None) -> tuple[int, ...]:
    """The positions that CUDA_VISIBLE_DEVICES selects, in order. As in CUDA, the first invalid entry ends the list."""
    if value is None:
        return tuple(range(len(uuids)))
    kept: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isascii() and entry.isdigit() and len(entry) < 6:
            found = int(entry) if int(entry) < len(uuids) else None
        else:
            matches = [place for place, uuid in enumerate(uuids) if entry and uuid and uuid.startswith(entry)]
            found = matches[0] if len(matches) == 1 else None
        if found is None or found in kept:
            break
        kept.append(found)
    return tuple(kept)


def make_host_link(index: int, pcie: Pcie | None) -> Link | None:
    """A card's link to the CPU, at the highest rate that card and slot support."""
    if pcie is None:
        return None
    generation = pcie.max_generation or pcie.generation
    width = pcie.max_width or pcie.width
    lane = PCIE_LANE_BYTES_S.get(generation or 0)
    figure = None
    if lane is not None and width:
        source = f"PCIe {generation} x{width}, line rate after encoding (PCI-SIG)"
        figure = Figure(value=lane * width, low=lane * width, high=lane * width, basis="spec", source=source)
    return Link(kind="pcie", a=str(index), b="host", bandwidth_bytes_s=figure)


def read_pcie(device: Path) -> Pcie | None:
    """The slot of a PCI device, from its sysfs folder."""
    pcie = Pcie(
        generation=parse_link_speed(read_text(device / "current_link_speed")),
        max_generation=parse_link_speed(read_text(device / "max_link_speed")),
        width=validate_lanes(read_number(device / "current_link_width")),
        max_width=validate_lanes(read_number(device / "max_link_width")),
    )
    return None if pcie == Pcie() else pcie


def parse_link_speed(text: str | None) -> int | None:
    """`16.0 GT/s PCIe` is generation 4."""
    match = re.match(r"\s*([0-9]{1,3}(?:\.[0-9])?) GT/s", text or "")
    return PCIE_GENERATIONS.get(float(match[1])) if match else None


def validate_lanes(count: int | None) -> int | None:
    """`None` for 0 and 255, which the kernel writes for an unknown width."""
    return count if count is not None and 1 <= count <= 32 else None


def list_cards(root: Path, vendor: str) -> list[Path]:
    """The PCI folders of a vendor's graphics cards, in the kernel's order."""
    numbered = [
        (int(match[1]), folder / "device")
        for folder in (root / "sys/class/drm").glob("card*")
        if (match := re.fullmatch(r"card([0-9]{1,4})", folder.name))
    ]
    return [device for _, device in sorted(numbered) if read_word(device / "vendor") == vendor]


def read_uevent(device: Path) -> dict[str, str]:
    """The kernel's facts about a device: its driver and PCI address."""
    pairs = (line.partition("=") for line in (read_text(device / "uevent") or "").splitlines())
    return {key: value.strip() for key, equals, value in pairs if equals}


def read_word(path: Path) -> str | None:
    return (read_text(path) or "").strip() or None


def read_number(path: Path) -> int | None:
    return parse_natural(read_word(path))


def parse_natural(text: object) -> int | None:
    """Parse a non-negative integer; `None` if it is not one."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int):
        return text if 0 <= text < 1 << 63 else None
    stripped = text.strip() if isinstance(text, str) else ""
    return int(stripped) if re.fullmatch(r"[0-9]{1,18}", stripped) else None


def parse_decimal(text: object) -> float | None:
    """Parse a number such as `700.00 W`, 700 or "700"; `None` for N/A and similar."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int | float):
        return float(text) if 0 <= text < 1e18 else None
    match = re.match(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)(?:\s|$|[A-Za-z%])", text) if isinstance(text, str) else None
    return float(match[1]) if match else None


def read_numa_node(device: Path) -> int | None:
    """`None` also for -1, which means that there is no NUMA node."""
    return read_number(device / "numa_node")
