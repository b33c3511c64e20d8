"""Tenstorrent's cards, from their driver's sysfs files or from `tt-smi`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bedplate.facts.cgroup import is_there
from bedplate.facts.devices import (
    Ask,
    FoundAccelerators,
    ask_program,
    make_host_link,
    parse_json,
    parse_natural,
    read_pcie,
    read_uevent,
    read_word,
    validate_lanes,
)
from bedplate.values import Accelerator, Pcie

SYSFS = "sys/class/tenstorrent"
# By the first letter of a board's name.
ARCHITECTURES = {"e": "Grayskull", "n": "Wormhole", "p": "Blackhole"}


def read_tenstorrent(root: Path = Path("/"), ask: Ask = ask_program) -> FoundAccelerators:
    """All Tenstorrent cards. Their drivers do not report memory, so it stays unknown."""
    driver = read_word(root / "sys/module/tenstorrent/version")
    folders = sorted(
        (root / SYSFS).glob("tenstorrent!*"), key=lambda folder: parse_natural(folder.name.partition("!")[2]) or 0
    )
    found = [card for folder in folders if (card := read_sysfs_card(folder, driver))]
    if not found and is_there(root / "dev/tenstorrent"):
        found = list(parse_tt_smi(ask(["tt-smi", "-s"])))
    to_host = (make_host_link(card.index, card.pcie) for card in found)
    return FoundAccelerators(accelerators=tuple(found), links=tuple(link for link in to_host if link is not None))


def read_sysfs_card(folder: Path, driver: str | None) -> Accelerator | None:
    index = parse_natural(folder.name.partition("!")[2])
    if index is None:
        return None
    board = read_word(folder / "tt_card_type")
    return Accelerator(
        name=find_board_name(board),
        vendor="tenstorrent",
        index=index,
        pci_address=read_uevent(folder / "device").get("PCI_SLOT_NAME"),
        architecture=find_architecture(board),
        driver_version=driver,
        sm_clock_mhz=parse_natural(read_word(folder / "tt_aiclk")),
        pcie=read_pcie(folder / "device"),
    )


def parse_tt_smi(text: str | None) -> tuple[Accelerator, ...]:
    """Parse `tt-smi -s`: one entry per chip. The second chip of an n300 is reached through its first."""
    answer = parse_json(text)
    entries = answer.get("device_info") if isinstance(answer, dict) else None
    host = answer.get("host_info") if isinstance(answer, dict) else None
    driver = host.get("Driver") if isinstance(host, dict) else None
    version = re.search(r"([0-9]+(?:\.[0-9]+)+)", driver) if isinstance(driver, str) else None
    found: list[Accelerator] = []
    for entry in entries if isinstance(entries, list) else ():
        board, telemetry = _get_section(entry, "board_info"), _get_section(entry, "telemetry")
        kind = board.get("board_type")
        if not isinstance(kind, str):
            continue
        address = board.get("bus_id")
        slot = Pcie(
            generation=parse_natural(board.get("pcie_speed")),
            width=validate_lanes(parse_natural(board.get("pcie_width"))),
        )
        found.append(
            Accelerator(
                name=find_board_name(kind),
                vendor="tenstorrent",
                index=len(found),
                pci_address=address if isinstance(address, str) and ":" in address else None,
                architecture=find_architecture(kind),
                driver_version=version[1] if version else None,
                sm_clock_mhz=parse_natural(telemetry.get("aiclk")),
                pcie=None if slot == Pcie() else slot,
            )
        )
    return tuple(found)


def find_board_name(board: str | None) -> str:
    """The name of a board. `n300 L` is one of the two chips of an n300."""
    return f"Tenstorrent {board.strip()}" if board and board.strip() else "Tenstorrent card"


def find_architecture(board: str | None) -> str | None:
    return ARCHITECTURES.get((board or "").strip().lower()[:1])


def _get_section(whole: Any, name: str) -> dict[str, Any]:
    part = whole.get(name) if isinstance(whole, dict) else None
    return part if isinstance(part, dict) else {}
