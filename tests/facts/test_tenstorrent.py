"""Tenstorrent's cards, from sysfs files and from real output of tt-smi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.tenstorrent import parse_tt_smi, read_tenstorrent
from bedplate.values import Accelerator

CAPTURES = Path(__file__).parent.parent / "captures" / "tenstorrent"


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_cards_are_read_from_sysfs(tmp_path: Path) -> None:
    """The names are those of tt-kmd's docs/sysfs-attributes.md."""
    put(
        tmp_path,
        {
            "sys/class/tenstorrent/tenstorrent!0/tt_card_type": "p150a",
            "sys/class/tenstorrent/tenstorrent!0/tt_aiclk": "800",
            "sys/class/tenstorrent/tenstorrent!0/device/current_link_speed": "32.0 GT/s PCIe",
            "sys/class/tenstorrent/tenstorrent!0/device/current_link_width": "16",
            "sys/class/tenstorrent/tenstorrent!10/tt_card_type": "n150",
            "sys/class/tenstorrent/tenstorrent!2/tt_heartbeat": "7",
            "sys/module/tenstorrent/version": "2.3.0",
        },
    )
    first, second, third = read_tenstorrent(tmp_path, lambda argv: None).accelerators
    assert (first.name, first.architecture, first.sm_clock_mhz) == ("Tenstorrent p150a", "Blackhole", 800)
    assert (first.driver_version, first.memory_bytes) == ("2.3.0", None)
    assert first.pcie is not None and (first.pcie.generation, first.pcie.width) == (5, 16)
    assert (second.name, second.index) == ("Tenstorrent card", 2), "old firmware does not say what it is"
    assert (third.index, third.architecture) == (10, "Wormhole")


def test_tt_smi_is_used_if_sysfs_has_no_cards(tmp_path: Path) -> None:
    text = (CAPTURES / "tt-smi-p300c.json").read_text()
    assert read_tenstorrent(tmp_path, lambda argv: text) == FoundAccelerators(), "no device, no question"
    put(tmp_path, {"dev/tenstorrent/0": ""})
    assert read_tenstorrent(tmp_path, lambda argv: text).accelerators == (
        Accelerator(
            name="Tenstorrent p300c",
            vendor="tenstorrent",
            index=0,
            pci_address="0000:04:00.0",
            architecture="Blackhole",
            sm_clock_mhz=800,
        ),
    )


def test_the_second_chip_of_an_n300_is_not_on_the_bus() -> None:
    """Constructed, after the table in tt-smi's README and the board types of its issue 3."""
    said = {
        "host_info": {"Driver": "TT-KMD 1.27.1"},
        "device_info": [
            {"board_info": {"board_type": "n300 L", "bus_id": "0000:01:00.0", "pcie_speed": 4, "pcie_width": "16"}},
            {"board_info": {"board_type": "n300 R", "bus_id": "N/A", "pcie_width": "N/A"}},
        ],
    }
    left, right = parse_tt_smi(json.dumps(said))
    assert (left.driver_version, left.pci_address, right.pci_address) == ("1.27.1", "0000:01:00.0", None)
    assert left.pcie is not None and (left.pcie.generation, left.pcie.width, right.pcie) == (4, 16, None)


def test_truncated_output_names_no_card() -> None:
    assert parse_tt_smi((CAPTURES / "tt-smi-p150a-cut.json").read_text()) == ()
    assert parse_tt_smi(None) == parse_tt_smi("") == parse_tt_smi("[]") == ()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["device_info", "host_info", "board_info", "board_type", "telemetry", "aiclk"]), inner
            )
        ),
    )
)
def test_json_of_any_shape_is_read(said: Any) -> None:
    parse_tt_smi(json.dumps(said))


def test_this_machine_is_read_without_raising() -> None:
    assert all(card.vendor == "tenstorrent" for card in read_tenstorrent().accelerators)
