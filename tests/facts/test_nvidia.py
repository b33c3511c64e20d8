"""NVIDIA GPUs: from NVML's answers to accelerators. The H200's answers are a real card's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts.nvidia import DeviceAnswers, accelerator, card_on_bus, conclude, explain, read_nvidia, visible
from bedplate.values import Accelerator

# As NVML of driver 580.159.04 answered on 2026-11-15; the serial part of the UUID is made up.
H200 = DeviceAnswers(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-00000000-1111-2222-3333-444444444444",
    total_bytes=150754820096,
    free_bytes=150109880320,
    compute_capability=(9, 0),
)


def test_a_cards_answers_become_an_accelerator() -> None:
    assert accelerator(H200, "580.159.04") == Accelerator(
        name="NVIDIA H200",
        vendor="nvidia",
        index=0,
        memory_bytes=150754820096,
        free_bytes=150109880320,
        compute_capability="9.0",
        driver_version="580.159.04",
        basis="reported",
    )


def test_old_bindings_answer_in_bytes() -> None:
    found = accelerator(DeviceAnswers(index=1, name=b"Tesla P40"), b"535.54.03")
    assert (found.name, found.driver_version, found.index) == ("Tesla P40", "535.54.03", 1)


def test_a_card_that_answers_nothing_is_still_there() -> None:
    """A MIG slice's parent, or a card with unified memory, refuses some questions."""
    (found,), notes = conclude([DeviceAnswers(index=0)], None)
    assert found == Accelerator(name="NVIDIA GPU", vendor="nvidia", index=0)
    assert notes == ("GPU 0: the driver does not say how much memory it has",)


def test_mig_is_reported_as_the_whole_card_with_a_note() -> None:
    split = DeviceAnswers(index=2, name="NVIDIA A100-SXM4-80GB", total_bytes=80 << 30, free_bytes=1 << 30, mig=True)
    (found,), (note,) = conclude([split], "550.90.07")
    assert found.memory_bytes == 80 << 30
    assert "GPU 2 is split by MIG" in note


def test_cuda_visible_devices_is_honoured_and_said() -> None:
    cards = [DeviceAnswers(index=index, name="RTX", total_bytes=1, free_bytes=1) for index in range(4)]
    found, notes = conclude(cards, "1", "2,0")
    assert [card.index for card in found] == [2, 0]
    assert notes == ("CUDA_VISIBLE_DEVICES=2,0 hides 2 of 4 NVIDIA GPUs",)
    assert conclude(cards, "1") == conclude(cards, "1", None)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("1", (1,)),
        ("0,7,1", (0,)),
        ("1,1", (1,)),
        ("GPU-bb", (1,)),
        ("GPU-", ()),
        ("GPU-cc,0", (2, 0)),
        ("MIG-55", (0, 1, 2)),
        ("junk", ()),
    ],
)
def test_visible_devices_as_cuda_reads_them(value: str | None, kept: tuple[int, ...]) -> None:
    assert visible(["GPU-aa", "GPU-bb", "GPU-cc"], value) == kept


@given(st.text())
def test_no_value_makes_it_raise(value: str) -> None:
    assert set(visible(["GPU-aa", None], value)) <= {0, 1}


@pytest.mark.parametrize(
    ("error", "loaded", "says"),
    [
        ("NVMLError_LibRmVersionMismatch", True, "different versions"),
        ("NVMLError_LibraryNotFound", True, "--gpus all"),
        ("NVMLError_LibraryNotFound", False, "driver is not loaded"),
        ("NVMLError_DriverNotLoaded", True, "driver is not loaded"),
        ("NVMLError_NoPermission", True, "refuses this user"),
        ("NVMLError_GpuIsLost", True, "GpuIsLost"),
    ],
)
def test_each_failure_says_what_to_do(error: str, loaded: bool, says: str) -> None:
    assert says in explain(error, loaded=loaded)


def test_a_card_without_a_driver_is_noted(tmp_path: Path) -> None:
    sound = tmp_path / "sys/bus/pci/devices/0000:01:00.1"
    sound.mkdir(parents=True)
    (sound / "vendor").write_text("0x10de\n")
    (sound / "class").write_text("0x040300\n")
    assert not card_on_bus(tmp_path)
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    assert card_on_bus(tmp_path)
    if sys.platform.startswith("linux"):
        assert read_nvidia(tmp_path) == ((), (explain("LibraryNotFound", loaded=False),))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the driver's traces are Linux's")
def test_a_loaded_driver_whose_library_is_missing_is_noted(tmp_path: Path) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        name = type(error).__name__
    else:
        pytest.skip("NVML works on this machine, so its absence cannot be seen")
    assert read_nvidia(tmp_path) == ((), ())
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").write_text("")
    assert read_nvidia(tmp_path) == ((), ()), "WSL has this device whatever the GPU's make"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module\n")
    assert read_nvidia(tmp_path) == ((), (explain(name, loaded=True),))


def test_this_machine_is_read_without_raising() -> None:
    accelerators, notes = read_nvidia()
    assert all(card.vendor == "nvidia" for card in accelerators)
    assert all(isinstance(note, str) for note in notes)
