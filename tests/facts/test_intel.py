"""Intel's cards: files as the xe and i915 drivers name them (constructed; github.com/AlexsJones/llmfit pull request 733
and github.com/ValveSoftware/steam-for-linux issue 12636 have the names and the B580's size)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.intel import parse_device_number, read_intel
from bedplate.values import Accelerator, Pcie


def write_card(root: Path, number: int, files: dict[str, str]) -> None:
    for name, text in {"vendor": "0x8086", **files}.items():
        path = root / f"sys/class/drm/card{number}/device/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_an_arc_card_is_read_under_xe(tmp_path: Path) -> None:
    write_card(
        tmp_path,
        1,
        {
            "device": "0xe20b",
            "uevent": "DRIVER=xe\nPCI_SLOT_NAME=0000:03:00.0",
            "tile0/physical_vram_size_bytes": str(0x300000000),
            "tile0/gt0/freq0/act_freq": "400",
            "tile0/gt0/freq0/max_freq": "2850",
            "max_link_speed": "16.0 GT/s PCIe",
            "max_link_width": "8",
        },
    )
    found = read_intel(tmp_path)
    assert found.accelerators == (
        Accelerator(
            name="Intel Arc B580",
            vendor="intel",
            index=0,
            pci_address="0000:03:00.0",
            memory_bytes=12 << 30,
            driver_version="xe",
            sm_clock_mhz=400,
            max_sm_clock_mhz=2850,
            pcie=Pcie(max_generation=4, max_width=8),
        ),
    )
    assert [(link.a, link.b, link.kind) for link in found.links] == [("0", "host", "pcie")]


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({f"tile{tile}/physical_vram_size_bytes": str(64 << 30) for tile in range(2)}, None),
        ({"drm/card0/lmem_total_bytes": str(128 << 30), "drm/card0/lmem_avail_bytes": str(100 << 30)}, 50 << 30),
    ],
    ids=["xe", "i915"],
)
def test_each_stack_of_a_data_center_card_is_a_gpu(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    """As Intel's runtime shows them: a model that needs 100 GB does not fit one of them."""
    write_card(tmp_path, 0, {"device": "0x0bd5", **files})
    write_card(tmp_path, 1, {"device": "0xe20b", "tile0/physical_vram_size_bytes": str(12 << 30)})
    found = [(one.index, one.memory_bytes, one.free_bytes) for one in read_intel(tmp_path).accelerators]
    assert found == [(0, 64 << 30, free), (1, 64 << 30, free), (2, 12 << 30, None)]


def test_the_data_center_i915_reports_free_memory(tmp_path: Path) -> None:
    write_card(
        tmp_path,
        0,
        {"device": "0x56c0", "drm/card0/lmem_total_bytes": "100", "drm/card0/lmem_avail_bytes": "40"},
    )
    found = read_intel(tmp_path).accelerators[0]
    assert (found.name, found.memory_bytes, found.free_bytes) == ("Intel Data Center GPU Flex 170", 100, 40)


def test_a_card_without_reported_memory_is_listed(tmp_path: Path) -> None:
    write_card(tmp_path, 0, {"device": "0x56a0", "uevent": "DRIVER=i915"})
    found = read_intel(tmp_path)
    assert (found.accelerators[0].name, found.accelerators[0].memory_bytes) == ("Intel Arc A770", None)
    assert "does not report its memory" in found.notes[0]


def test_integrated_graphics_is_only_noted(tmp_path: Path) -> None:
    write_card(tmp_path, 0, {"device": "0x9a49"})
    found = read_intel(tmp_path)
    assert found.accelerators == ()
    assert found.notes == ("Intel graphics 0x9a49 is built into the CPU and does not count as a GPU",)


def test_a_machine_without_intel_graphics_has_none(tmp_path: Path) -> None:
    assert read_intel(tmp_path) == FoundAccelerators()
    assert all(found.vendor == "intel" for found in read_intel().accelerators)


@given(st.text())
def test_no_device_number_raises(text: str) -> None:
    parse_device_number(text)
