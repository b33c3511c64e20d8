"""NVIDIA GPUs, from NVML and nvidia-smi output. The H200's answers come from a real card."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts import nvidia
from bedplate.facts.devices import FoundAccelerators, select_visible
from bedplate.facts.nvidia import (
    DeviceFacts,
    NvidiaFacts,
    SliceFacts,
    ask_smi,
    compute_peak_bandwidth,
    count_nvlinks,
    explain_nvml_error,
    format_cuda_version,
    is_card_on_bus,
    make_accelerator,
    normalize_pci_address,
    parse_compute_capabilities,
    parse_smi_list,
    parse_smi_log,
    parse_smi_topology,
    read_nvidia,
    select_accelerators,
)
from bedplate.values import Accelerator, Figure, GpuProcess, Link, Pcie

CAPTURES = Path(__file__).parent.parent / "captures" / "nvidia"
GIB = 1 << 30

# As NVML of driver 580.159.04 answered on 2026-11-15; the serial part of the UUID is made up.
H200 = DeviceFacts(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-00000000-1111-2222-3333-444444444444",
    pci_address="0000:00:06.0",
    architecture="Hopper",
    total_bytes=150754820096,
    free_bytes=148387266560,
    compute_capability=(9, 0),
    sm_clock_mhz=1980,
    max_sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    max_memory_clock_mhz=3201,
    memory_bus_bits=6016,
    power_limit_w=700.0,
    max_power_limit_w=700.0,
    pcie=Pcie(generation=5, max_generation=5, width=16, max_width=16),
    mig=False,
    processes=(GpuProcess(pid=403, name="python3", bytes=1713373184),),
)


def read_capture(name: str) -> str:
    return (CAPTURES / name).read_text()


def make_cards(count: int, **answers: Any) -> tuple[DeviceFacts, ...]:
    return tuple(
        DeviceFacts(index=index, name="GPU", total_bytes=GIB, free_bytes=GIB, **answers) for index in range(count)
    )


class TestAnswers:
    def test_a_cards_answers_become_an_accelerator(self) -> None:
        found = make_accelerator(H200, "580.159.04", "13.0")
        assert (found.name, found.vendor, found.index, found.architecture) == ("NVIDIA H200", "nvidia", 0, "Hopper")
        assert (found.memory_bytes, found.free_bytes) == (150754820096, 148387266560)
        assert (found.compute_capability, found.driver_version, found.cuda_version) == ("9.0", "580.159.04", "13.0")
        assert (found.max_sm_clock_mhz, found.memory_clock_mhz, found.power_limit_w) == (1980, 3201, 700.0)
        assert found.processes == (GpuProcess(pid=403, name="python3", bytes=1713373184),)
        assert found.nvlinks is None, "this virtual machine hides them"

    def test_the_drivers_own_clock_and_bus_give_a_peak_bandwidth(self) -> None:
        figure = make_accelerator(H200, None, None).bandwidth_bytes_s
        assert figure is not None
        assert figure.value == pytest.approx(4.814e12, rel=1e-3)
        assert figure.basis == "reported"
        assert compute_peak_bandwidth(9751, 384) is not None
        assert compute_peak_bandwidth(None, 384) is None
        assert compute_peak_bandwidth(9751, 0) is None

    def test_old_bindings_answer_in_bytes(self) -> None:
        found = make_accelerator(DeviceFacts(index=1, name=b"Tesla P40"), b"535.54.03", None)
        assert (found.name, found.driver_version, found.index) == ("Tesla P40", "535.54.03", 1)

    def test_a_card_without_answers_is_listed(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=(DeviceFacts(index=0),)))
        assert found.accelerators == (Accelerator(name="NVIDIA GPU", vendor="nvidia", index=0),)
        assert found.notes == ("GPU 0: the driver does not report its memory",)

    def test_a_chip_without_memory_of_its_own_shares_the_machines(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=(DeviceFacts(index=0, name="NVIDIA GB10"),)))
        assert found.accelerators[0].unified_memory
        assert found.notes == ()

    def test_versions_and_addresses_are_normalized(self) -> None:
        assert [format_cuda_version(number) for number in (13000, 12080, 0, None)] == ["13.0", "12.8", None, None]
        assert normalize_pci_address(b"00000000:18:00.0") == "0000:18:00.0"
        assert normalize_pci_address("00000001:AE:00.0\0\0") == "0001:ae:00.0"
        assert normalize_pci_address("junk") is None


class TestSlices:
    SPLIT = DeviceFacts(
        index=1,
        name="NVIDIA A100-SXM4-80GB",
        total_bytes=80 * GIB,
        free_bytes=GIB,
        compute_capability=(8, 0),
        mig=True,
        slices=(
            SliceFacts(
                name="NVIDIA A100-SXM4-80GB MIG 3g.40gb",
                uuid="MIG-aa",
                total_bytes=40 * GIB,
                free_bytes=39 * GIB,
                multiprocessors=42,
            ),
            SliceFacts(
                name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", uuid="MIG-bb", total_bytes=10 * GIB, free_bytes=9 * GIB
            ),
        ),
    )
    WHOLE = DeviceFacts(index=0, name="NVIDIA A100-SXM4-80GB", uuid="GPU-1", total_bytes=80 * GIB, free_bytes=79 * GIB)

    def test_each_slice_replaces_its_card(self) -> None:
        whole, large, small = select_accelerators(
            NvidiaFacts(devices=(self.WHOLE, self.SPLIT), driver_version="550")
        ).accelerators
        assert (whole.index, whole.parent) == (0, None)
        assert (large.index, large.parent, large.memory_bytes, large.compute_units) == (2, 1, 40 * GIB, 42)
        assert (small.index, small.parent, small.memory_bytes, small.uuid) == (3, 1, 10 * GIB, "MIG-bb")
        assert (small.compute_capability, small.driver_version, small.mig) == ("8.0", "550", True)

    def test_cuda_visible_devices_may_name_a_slice(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=(self.WHOLE, self.SPLIT)), "MIG-bb")
        assert [card.uuid for card in found.accelerators] == ["MIG-bb"]

    def test_slices_that_cannot_be_listed_leave_the_whole_card_with_a_note(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=(replace(self.SPLIT, slices=None),)))
        assert found.accelerators[0].memory_bytes == 80 * GIB
        assert "GPU 1 is split by MIG" in found.notes[0]

    def test_a_mig_card_without_slices_is_not_usable(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=(replace(self.SPLIT, slices=()),)))
        assert found.accelerators == ()
        assert "MIG is on but has no slice" in found.notes[0]


class TestLinks:
    def test_behind_a_switch_every_pair_has_all_links(self) -> None:
        found = select_accelerators(
            NvidiaFacts(devices=make_cards(4, nvlinks=("switch",) * 18, compute_capability=(9, 0)))
        ).links
        assert len(found) == 6
        assert {(link.kind, link.count) for link in found} == {("nvlink", 18)}
        figure = found[0].bandwidth_bytes_s
        assert figure is not None and (figure.value, figure.basis) == (450e9, "spec")

    def test_direct_links_are_counted_for_each_pair(self) -> None:
        """Two pairs of cards, each joined by a bridge of four links."""
        address = [f"0000:0{index}:00.0" for index in range(4)]
        devices = tuple(
            DeviceFacts(index=index, pci_address=address[index], nvlinks=(address[index ^ 1],) * 4)
            for index in range(4)
        )
        assert count_nvlinks(devices) == {(0, 1): 4, (2, 3): 4}

    def test_links_whose_end_a_virtual_machine_hides_lead_to_a_switch(self) -> None:
        assert count_nvlinks(make_cards(2, nvlinks=(None,) * 12)) == {(0, 1): 12}
        assert count_nvlinks(make_cards(1, nvlinks=(None,) * 12)) == {}

    def test_without_nvlink_the_pcie_path_is_named(self) -> None:
        found = select_accelerators(NvidiaFacts(devices=make_cards(2), paths=((0, 1, "host-bridge"),))).links
        assert found == (Link(kind="pcie", a="0", b="1", path="host-bridge"),)

    def test_each_card_has_a_link_to_the_host(self) -> None:
        (link,) = select_accelerators(NvidiaFacts(devices=(H200,))).links
        assert (link.a, link.b, link.kind) == ("0", "host", "pcie")
        assert isinstance(link.bandwidth_bytes_s, Figure)
        assert link.bandwidth_bytes_s.value == pytest.approx(63e9, rel=0.01)

    def test_hidden_cards_have_no_links(self) -> None:
        answers = NvidiaFacts(devices=make_cards(3, nvlinks=("switch",) * 6))
        assert [(link.a, link.b) for link in select_accelerators(answers, "2,0").links] == [("0", "2")]


class TestVisibleDevices:
    def test_cuda_visible_devices_is_applied_and_noted(self) -> None:
        answers = NvidiaFacts(devices=make_cards(4))
        found = select_accelerators(answers, "2,0")
        assert [card.index for card in found.accelerators] == [2, 0]
        assert found.notes == ("CUDA_VISIBLE_DEVICES=2,0 hides 2 of 4 NVIDIA GPUs",)
        assert select_accelerators(answers) == select_accelerators(answers, None)

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
            ("junk", ()),
        ],
    )
    def test_cuda_visible_devices_is_parsed_as_in_cuda(self, value: str | None, kept: tuple[int, ...]) -> None:
        assert select_visible(["GPU-aa", "GPU-bb", "GPU-cc"], value) == kept

    @given(st.text())
    def test_any_value_is_parsed_without_error(self, value: str) -> None:
        assert set(select_visible(["GPU-aa", None], value)) <= {0, 1}
        select_accelerators(NvidiaFacts(devices=(H200, TestSlices.SPLIT)), value)


class TestSmiLog:
    def test_two_of_eight_h100_are_parsed(self) -> None:
        answers = parse_smi_log(read_capture("smi-q-h100-sxm-x8-first-2.txt"))
        assert (answers.driver_version, answers.cuda_version, len(answers.devices)) == ("565.57.01", "12.7", 2)
        first, second = answers.devices
        assert (first.name, first.architecture, first.index) == ("NVIDIA H100 80GB HBM3", "Hopper", 0)
        assert (first.pci_address, second.pci_address) == ("0000:18:00.0", "0000:2a:00.0")
        assert (first.total_bytes, first.free_bytes) == (81559 << 20, 81106 << 20)
        assert (first.sm_clock_mhz, first.max_sm_clock_mhz) == (345, 1980)
        assert (first.memory_clock_mhz, first.max_memory_clock_mhz) == (2619, 2619)
        assert (first.power_limit_w, first.max_power_limit_w) == (700.0, 700.0)
        assert first.pcie == Pcie(generation=5, max_generation=5, width=16, max_width=16)
        assert (first.mig, first.slices, first.processes) == (False, None, ())

    def test_a_consumer_card_has_no_mig_and_slows_its_link_when_idle(self) -> None:
        first, second = parse_smi_log(read_capture("smi-q-rtx-3090-x2.txt")).devices
        assert (first.mig, second.index) == (None, 1)
        assert first.pcie == Pcie(generation=1, max_generation=4, width=16, max_width=16)
        assert (first.total_bytes, first.max_memory_clock_mhz) == (24 * GIB, 9751)

    def test_a_narrow_slot_is_reported(self) -> None:
        (card,) = parse_smi_log(read_capture("smi-q-l4.txt")).devices
        assert card.pcie == Pcie(generation=1, max_generation=4, width=8, max_width=16)

    def test_other_processes_are_named_without_their_folders(self) -> None:
        (card,) = parse_smi_log(read_capture("smi-q-h200-busy.txt")).devices
        assert card.processes == (GpuProcess(pid=403, name="python3", bytes=1634 << 20),)

    def test_the_log_agrees_with_nvml(self) -> None:
        (card,) = parse_smi_log(read_capture("smi-q-h200-busy.txt")).devices
        for field in ("name", "pci_address", "architecture", "total_bytes", "power_limit_w", "pcie", "mig"):
            assert getattr(card, field) == getattr(H200, field), field

    def test_slices_are_parsed(self) -> None:
        (card,) = parse_smi_log(read_capture("smi-q-a100-mig-constructed.txt")).devices
        assert card.mig is True
        assert card.slices == (
            SliceFacts(total_bytes=20096 << 20, free_bytes=20083 << 20, multiprocessors=42),
            SliceFacts(total_bytes=4864 << 20, free_bytes=4857 << 20, multiprocessors=14),
        )

    def test_absent_and_partial_pages_are_parsed(self) -> None:
        assert parse_smi_log("") == NvidiaFacts()
        assert (
            parse_smi_log("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
            == NvidiaFacts()
        )
        whole = read_capture("smi-q-h100-sxm-x8-first-2.txt")
        (card,) = parse_smi_log(whole[: whole.index("FB Memory Usage")]).devices
        assert (card.name, card.total_bytes) == ("NVIDIA H100 80GB HBM3", None)

    @given(st.data())
    def test_garbled_pages_never_raise(self, data: st.DataObject) -> None:
        text = read_capture("smi-q-h200-busy.txt")
        cut = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(cut, len(text)))
        answers = parse_smi_log(text[:cut] + data.draw(st.text(max_size=20)) + text[end:])
        select_accelerators(answers)
        parse_smi_topology(text[:cut])
        parse_smi_list(text[cut:])


class TestSmiTopology:
    def test_eight_cards_behind_switches_are_parsed(self) -> None:
        answers = parse_smi_topology(read_capture("topo-h100-x8.txt"))
        assert len(answers.nvlink_counts) == 28
        assert {count for _, _, count in answers.nvlink_counts} == {18}
        assert answers.paths == ()

    def test_cards_without_nvlink_are_parsed(self) -> None:
        assert parse_smi_topology(read_capture("topo-rtx-5090-x2.txt")).paths == ((0, 1, "host-bridge"),)
        mixed = parse_smi_topology(read_capture("topo-pcie-x8-cut.txt")).paths
        assert (0, 1, "switch") in mixed and (0, 2, "host-bridge") in mixed and (0, 7, "system") in mixed

    def test_one_card_and_terminal_colours_are_parsed(self) -> None:
        assert "\x1b[4m" in read_capture("topo-h200.txt")
        assert parse_smi_topology(read_capture("topo-h200.txt")) == NvidiaFacts()

    @given(st.one_of(st.text(), st.text(alphabet="GPU01XNV8SY \t\n")))
    def test_any_text_is_parsed_without_error(self, text: str) -> None:
        parse_smi_topology(text)


def test_slices_are_named_by_the_list() -> None:
    listed = parse_smi_list(read_capture("smi-list-a100-mig-constructed.txt"))
    assert listed[0] == (
        SliceFacts(name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", uuid="MIG-00000000-0000-0000-0000-000000000001"),
        SliceFacts(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid="MIG-00000000-0000-0000-0000-000000000002"),
    )


def test_compute_capabilities_are_parsed() -> None:
    assert parse_compute_capabilities("9.0\n8.6\n") == ((9, 0), (8, 6))
    assert parse_compute_capabilities("[N/A]\n") == (None,)
    assert parse_compute_capabilities("") == ()


class TestNvidiaSmi:
    PAGES = {  # noqa: RUF012
        ("nvidia-smi", "-q"): "smi-q-a100-mig-constructed.txt",
        ("nvidia-smi", "-L"): "smi-list-a100-mig-constructed.txt",
        ("nvidia-smi", "topo", "-m"): "topo-h200.txt",
    }

    def ask(self, argv: Sequence[str]) -> str | None:
        if "--query-gpu=compute_cap" in argv:
            return "8.0\n"
        return read_capture(self.PAGES[tuple(argv)])

    def test_the_outputs_are_merged(self) -> None:
        answers = ask_smi(self.ask)
        assert answers is not None
        first, second = select_accelerators(answers).accelerators
        assert (first.name, first.memory_bytes) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20096 << 20)
        assert (second.uuid, second.compute_capability) == ("MIG-00000000-0000-0000-0000-000000000002", "8.0")

    def test_a_missing_or_failing_program_gives_no_answer(self) -> None:
        assert ask_smi(lambda argv: None) is None
        assert ask_smi(lambda argv: "No devices were found\n") is None

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the driver's traces are Linux's")
    def test_nvidia_smi_is_used_if_the_library_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvidia, "_ask_nvml", lambda root: (None, "no library"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").write_text("")
        found = read_nvidia(tmp_path, self.ask)
        assert len(found.accelerators) == 2
        assert "bedplate used nvidia-smi" in found.notes[0]
        assert read_nvidia(tmp_path, lambda argv: None) == FoundAccelerators(notes=("no library",))


class TestNvml:
    """A fake of the bindings with the answers of a real H200."""

    class Error(Exception):
        pass

    def make_nvml(self, **changes: Any) -> Any:
        def refuse(*about: Any) -> Any:
            raise self.Error

        answers: dict[str, Any] = {
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=b"00000000:00:06.0"),
            "nvmlDeviceGetArchitecture": lambda handle: 9,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150754820096, free=148387266560),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700000,
            "nvmlDeviceGetPowerManagementLimitConstraints": lambda handle: (200000, 700000),
            "nvmlDeviceGetMigMode": lambda handle: (0, 0),
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=403, usedGpuMemory=1713373184)],
            "nvmlSystemGetProcessName": lambda pid: b"/usr/bin/python3 -c secret",
            "nvmlDeviceGetNvLinkState": refuse,
            "nvmlDeviceGetClockInfo": refuse,
        }
        return SimpleNamespace(NVMLError=self.Error, **{**answers, **changes})

    def test_unsupported_questions_give_none(self, tmp_path: Path) -> None:
        device = nvidia._ask_device(self.make_nvml(), 0, "handle", tmp_path)
        assert (device.name, device.pci_address, device.architecture) == ("NVIDIA H200", "0000:00:06.0", "Hopper")
        assert (device.power_limit_w, device.max_power_limit_w) == (700.0, 700.0)
        assert (device.sm_clock_mhz, device.uuid, device.nvlinks, device.slices) == (None, None, None, None)
        assert device.pcie == Pcie(generation=5)
        assert device.processes == (GpuProcess(pid=403, name="python3", bytes=1713373184),)

    def test_links_end_at_switches_cards_or_hidden_devices(self, tmp_path: Path) -> None:
        def remote(handle: str, link: int) -> Any:
            if link == 2:
                raise self.Error
            return SimpleNamespace(busId=b"00000000:2A:00.0")

        nvml = self.make_nvml(
            NVML_NVLINK_MAX_LINKS=5,
            NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
            nvmlDeviceGetNvLinkState=lambda handle, link: int(link < 3),
            nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2 if link == 0 else 0,
            nvmlDeviceGetNvLinkRemotePciInfo=remote,
        )
        assert nvidia._ask_device(nvml, 0, "handle", tmp_path).nvlinks == ("switch", "0000:2a:00.0", None)

    def test_slices_are_asked_one_by_one(self, tmp_path: Path) -> None:
        def place(handle: str, number: int) -> str:
            if number > 1:
                raise self.Error
            return f"slice {number}"

        nvml = self.make_nvml(
            nvmlDeviceGetMigMode=lambda handle: (1, 1),
            nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
            nvmlDeviceGetMigDeviceHandleByIndex=place,
            nvmlDeviceGetName=lambda handle: f"{handle} MIG 1g.18gb",
            nvmlDeviceGetAttributes=lambda handle: SimpleNamespace(multiprocessorCount=16),
        )
        device = nvidia._ask_device(nvml, 0, "card", tmp_path)
        assert device.mig is True and device.slices is not None
        assert [one.name for one in device.slices] == ["slice 0 MIG 1g.18gb", "slice 1 MIG 1g.18gb"]
        assert device.slices[0].multiprocessors == 16


@pytest.mark.parametrize(
    ("error", "loaded", "says"),
    [
        ("NVMLError_LibRmVersionMismatch", True, "different versions"),
        ("NVMLError_LibraryNotFound", True, "--gpus all"),
        ("NVMLError_LibraryNotFound", False, "driver is not loaded"),
        ("NVMLError_DriverNotLoaded", True, "driver is not loaded"),
        ("NVMLError_NoPermission", True, "denies access"),
        ("NVMLError_GpuIsLost", True, "GpuIsLost"),
    ],
)
def test_each_failure_says_what_to_do(error: str, loaded: bool, says: str) -> None:
    assert says in explain_nvml_error(error, loaded=loaded)


def test_a_card_without_a_driver_is_noted(tmp_path: Path) -> None:
    sound = tmp_path / "sys/bus/pci/devices/0000:01:00.1"
    sound.mkdir(parents=True)
    (sound / "vendor").write_text("0x10de\n")
    (sound / "class").write_text("0x040300\n")
    assert not is_card_on_bus(tmp_path)
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    assert is_card_on_bus(tmp_path)
    if sys.platform.startswith("linux"):
        assert read_nvidia(tmp_path) == FoundAccelerators(notes=(explain_nvml_error("LibraryNotFound", loaded=False),))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the driver's traces are Linux's")
def test_a_loaded_driver_whose_library_is_missing_is_noted(tmp_path: Path) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        name = type(error).__name__
    else:
        pytest.skip("NVML works on this machine, so its absence cannot be seen")
    assert read_nvidia(tmp_path) == FoundAccelerators()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").write_text("")
    assert read_nvidia(tmp_path) == FoundAccelerators(), "WSL has this device whatever the GPU's make"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module\n")
    assert read_nvidia(tmp_path) == FoundAccelerators(notes=(explain_nvml_error(name, loaded=True),))


def test_this_machine_is_read_without_raising() -> None:
    found = read_nvidia()
    assert all(card.vendor == "nvidia" for card in found.accelerators)
    assert all(isinstance(note, str) for note in found.notes)
