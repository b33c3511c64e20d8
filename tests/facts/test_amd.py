"""AMD GPUs: from the kernel's topology, sysfs and AMD's programs to accelerators and links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts import amd
from bedplate.facts.amd import (
    AmdFacts,
    ask_amdsmi,
    combine_amd_sources,
    format_gfx_target,
    format_kfd_address,
    parse_amd_smi,
    parse_clock_levels,
    parse_properties,
    parse_rocm_smi,
    read_amd,
    read_kfd,
)
from bedplate.facts.devices import FoundAccelerators
from bedplate.values import Accelerator, GpuProcess, Pcie

CAPTURES = Path(__file__).parent.parent / "captures" / "amd"


def read_capture(name: str) -> str:
    return (CAPTURES / name).read_text()


def write_topology(root: Path, name: str) -> Path:
    """Write a captured KFD tree as files. Each file begins with `== path`."""
    for part in read_capture(name).split("== ")[1:]:
        path, _, text = part.partition("\n")
        file = root / amd.KFD_NODES / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def write_card(root: Path, number: int, files: dict[str, str], vendor: str = "0x1002") -> Path:
    device = root / f"sys/class/drm/card{number}/device"
    for name, text in {"vendor": vendor, **files}.items():
        path = device / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return device


def answer_nothing(argv: Sequence[str]) -> str | None:
    return None


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "_import_and_ask", lambda: ())
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


class TestTopology:
    def test_an_mi210_has_xgmi_links(self, tmp_path: Path) -> None:
        nodes = read_kfd(write_topology(tmp_path, "kfd-mi210-x8-xgmi-first-4.txt"))
        assert [node.number for node in nodes] == [2, 3, 4, 5], "the CPU's node is none"
        assert {(node.target, node.compute_units, node.device_id) for node in nodes} == {("gfx90a", 104, 0x740F)}
        assert nodes[0].pci_address == "0000:63:00.0"
        found = combine_amd_sources((), nodes, ())
        pairs = [(link.a, link.b, link.kind, link.hops) for link in found.links]
        assert pairs == [
            (a, b, "xgmi", 1) for a, b in (("0", "1"), ("0", "2"), ("0", "3"), ("1", "2"), ("1", "3"), ("2", "3"))
        ]
        figure = found.links[0].bandwidth_bytes_s
        assert figure is not None and (figure.value, figure.basis) == (50e9, "reported")

    def test_each_part_of_a_partitioned_card_is_an_accelerator(self, tmp_path: Path) -> None:
        root = write_topology(tmp_path, "kfd-mi308-cpx-first-5.txt")
        nodes = read_kfd(root)
        assert [node.pci_address for node in nodes[:2]] == ["0000:0a:00.0", "0000:0a:00.1"]
        whole = {"mem_info_vram_total": "206158430208", "mem_info_vram_used": "1073741824"}
        device = write_card(
            root, 1, {"uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:0a:00.0", "device": "0x74a2", **whole}
        )
        first, second = combine_amd_sources([device], nodes, ()).accelerators[:2]
        assert (first.name, second.name) == ("AMD GPU 0x74a2", "AMD GPU 0x74a2")
        assert (first.architecture, first.compute_units) == ("gfx942", 20)
        assert (first.memory_bytes, first.free_bytes) == (48 << 30, None), "the card's own figures are not a part's"

    def test_an_old_kernel_names_no_target(self, tmp_path: Path) -> None:
        (node,) = read_kfd(write_topology(tmp_path, "kfd-vega10.txt"))
        assert (node.target, node.compute_units, node.memory_bytes) == (None, 64, 17163091968)
        assert (node.pci_address, node.max_memory_clock_mhz) == ("0000:19:00.0", 945)

    def test_targets_and_addresses_are_formatted(self) -> None:
        versions = (90402, 90010, 110501, 100300, 80003, 0, 7, 10**9)
        names = ["gfx942", "gfx90a", "gfx1151", "gfx1030", "gfx803", None, None, None]
        assert [format_gfx_target(version) for version in versions] == names
        assert format_kfd_address(0, 25344) == "0000:63:00.0"
        assert (format_kfd_address(0, 0), format_kfd_address(0, None), format_kfd_address(0, 1 << 40)) == (
            None,
            None,
            None,
        )

    @given(st.one_of(st.text(), st.text(alphabet="simd_countg x0123456789\n")))
    def test_no_text_makes_the_parsers_raise(self, text: str) -> None:
        parse_properties(text)
        parse_clock_levels(text)
        parse_rocm_smi(text)
        parse_amd_smi(text)


class TestPrograms:
    def test_rocm_smi_is_parsed(self) -> None:
        (card,) = parse_rocm_smi(read_capture("rocm-smi-rx-7900-xt.json"))
        assert card == AmdFacts(
            name="Radeon RX 7900 XT", target="gfx1100", total_bytes=21458059264, used_bytes=27856896
        )

    def test_other_versions_of_rocm_smi_are_parsed(self) -> None:
        (card,) = parse_rocm_smi(read_capture("rocm-smi-radeon-780m-excerpt.json"))
        assert (card.name, card.pci_address) == ("Phoenix3", "0000:c4:00.0")
        assert parse_rocm_smi(read_capture("rocm-smi-rx-6800-x2.json")) == (AmdFacts(), AmdFacts())

    def test_warnings_before_the_json_are_skipped(self) -> None:
        text = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n" + read_capture("rocm-smi-rx-7900-xt.json")
        assert parse_rocm_smi(text)[0].name == "Radeon RX 7900 XT"
        assert parse_rocm_smi("WARNING: No JSON data to report\n") == ()

    def test_amd_smi_is_parsed(self) -> None:
        (card,) = parse_amd_smi(read_capture("amd-smi-static-mi210.json"))
        assert (card.name, card.target, card.compute_units) == ("AMD Instinct MI210", "gfx90a", 104)
        assert (card.total_bytes, card.power_limit_w) == (65520 << 20, 300.0)
        assert card.pcie == Pcie(max_generation=4, max_width=16)
        wrapped = json.loads(read_capture("amd-smi-static-mi210.json"))
        assert parse_amd_smi(json.dumps(wrapped["gpu_data"])) == (card,), "older versions print a bare list"

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=6),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["card0", "gpu_data", "asic", "vram", "size", "value", "system"]), inner
                )
            ),
        )
    )
    def test_json_of_any_shape_is_read(self, said: Any) -> None:
        parse_amd_smi(json.dumps(said))
        parse_rocm_smi(json.dumps(said))

    def test_clock_levels_are_parsed(self) -> None:
        assert parse_clock_levels("0: 500Mhz\n1: 142Mhz *\n2: 2100Mhz\n") == (142, 2100)
        assert parse_clock_levels("S: 30Mhz *\n0: 889Mhz\n") == (30, 889)
        assert parse_clock_levels(None) == (None, None)


class TestCards:
    def test_a_card_is_read_from_sysfs_alone(self, tmp_path: Path) -> None:
        """Files as amdgpu names them; the figures are those of a 24 GB card."""
        write_card(tmp_path, 0, {}, vendor="0x8086")
        write_card(
            tmp_path,
            1,
            {
                "device": "0x744c",
                "mem_info_vram_total": "25753026560",
                "mem_info_vram_used": "1073741824",
                "pp_dpm_sclk": "0: 500Mhz *\n1: 2304Mhz",
                "hwmon/hwmon3/power1_cap": "327000000",
                "current_link_speed": "16.0 GT/s PCIe",
                "current_link_width": "16",
                "numa_node": "-1",
                "uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0",
            },
        )
        write_card(tmp_path, 10, {"product_name": "AMD Instinct MI210"})
        (tmp_path / "sys/class/drm/card1-DP-1/device").mkdir(parents=True)
        (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
        (tmp_path / "sys/module/amdgpu/version").write_text("6.10.5\n")
        found = read_amd(tmp_path, answer_nothing)
        first, second = found.accelerators
        assert first == Accelerator(
            name="AMD GPU 0x744c",
            vendor="amd",
            index=0,
            pci_address="0000:03:00.0",
            memory_bytes=25753026560,
            free_bytes=25753026560 - 1073741824,
            driver_version="6.10.5",
            sm_clock_mhz=500,
            max_sm_clock_mhz=2304,
            power_limit_w=327.0,
            pcie=Pcie(generation=4, width=16),
        )
        assert (second.name, second.index, second.memory_bytes) == ("AMD Instinct MI210", 1, None)
        assert "ROCm cannot use the card" in found.notes[0]

    def test_without_a_card_no_program_is_run(self, tmp_path: Path) -> None:
        def ask(argv: Sequence[str]) -> str | None:
            raise AssertionError("no card, no question")

        assert read_amd(tmp_path, ask) == FoundAccelerators()

    def test_a_program_gives_the_name(self, tmp_path: Path) -> None:
        root = write_topology(tmp_path, "kfd-vega10.txt")
        write_card(
            root, 0, {"device": "0x6860", "mem_info_vram_total": "17163091968", "mem_info_vram_used": "14102528"}
        )
        asked = []

        def ask(argv: Sequence[str]) -> str | None:
            asked.append(argv[0])
            return read_capture("rocm-smi-rx-7900-xt.json") if argv[0] == "rocm-smi" else None

        (found,) = read_amd(root, ask).accelerators
        assert asked == ["amd-smi", "rocm-smi"]
        assert found.name == "Radeon RX 7900 XT"
        assert (found.memory_bytes, found.compute_units) == (17163091968, 64), "the kernel knows better"

    def test_an_apu_has_the_machines_memory(self, tmp_path: Path) -> None:
        """Strix Halo with 512 MB of dedicated memory and the rest shared; constructed figures."""
        sizes = {"vram_total": 512 << 20, "vram_used": 100 << 20, "gtt_total": 60 << 30, "gtt_used": 1 << 30}
        device = write_card(tmp_path, 0, {f"mem_info_{name}": str(size) for name, size in sizes.items()})
        node = amd.make_kfd_node(1, {"simd_count": 80, "simd_per_cu": 2, "gfx_target_version": 110501}, [], [])
        assert node is not None
        (found,) = combine_amd_sources([device], [node], ()).accelerators
        assert (found.architecture, found.compute_units, found.unified_memory) == ("gfx1151", 40, True)
        assert found.memory_bytes == (60 << 30) + (512 << 20)
        assert found.free_bytes == (59 << 30) + (412 << 20)

    def test_visible_devices_of_rocr_and_hip_are_applied(self, tmp_path: Path) -> None:
        nodes = read_kfd(write_topology(tmp_path, "kfd-mi210-x8-xgmi-first-4.txt"))
        found = combine_amd_sources(
            (), nodes, (), environment={"ROCR_VISIBLE_DEVICES": "3,1,0", "HIP_VISIBLE_DEVICES": "0,1"}
        )
        assert [card.index for card in found.accelerators] == [3, 1]
        assert [(link.a, link.b) for link in found.links] == [("1", "3")]
        assert found.notes == (
            "ROCR_VISIBLE_DEVICES=3,1,0 hides 1 of 4 AMD GPUs",
            "HIP_VISIBLE_DEVICES=0,1 hides 1 of 3 AMD GPUs",
        )


class TestLibrary:
    """A fake of AMD's bindings with the answers in their documentation."""

    class Error(Exception):
        pass

    def make_library(self, **changes: Any) -> Any:
        answers: dict[str, Any] = {
            "amdsmi_init": lambda: None,
            "amdsmi_shut_down": lambda: None,
            "amdsmi_get_processor_handles": lambda: ["one"],
            "amdsmi_get_gpu_asic_info": lambda handle: {
                "market_name": "AMD Instinct MI300X",
                "num_compute_units": 304,
                "target_graphics_version": "gfx942",
            },
            "amdsmi_get_gpu_device_bdf": lambda handle: "0000:83:00.0",
            "amdsmi_get_gpu_memory_total": lambda handle, kind: 206141652992,
            "amdsmi_get_power_cap_info": lambda handle: {"power_cap": 750000000, "max_power_cap": 750000000},
            "amdsmi_get_gpu_process_list": lambda handle: [
                {"name": "vllm", "pid": 99, "memory_usage": {"vram_mem": 1 << 30}}
            ],
            "AmdSmiMemoryType": SimpleNamespace(VRAM=0),
        }
        return SimpleNamespace(AmdSmiException=self.Error, **{**answers, **changes})

    def test_the_library_is_asked_first_if_installed(self) -> None:
        (card,) = ask_amdsmi(self.make_library())
        assert (card.name, card.compute_units, card.power_limit_w) == ("AMD Instinct MI300X", 304, 750.0)
        assert (card.total_bytes, card.used_bytes) == (206141652992, None)
        assert card.processes == (GpuProcess(pid=99, name="vllm", bytes=1 << 30),)

    def test_a_failed_library_call_gives_none(self) -> None:
        def refuse(*about: Any) -> Any:
            raise self.Error

        (card,) = ask_amdsmi(self.make_library(amdsmi_get_gpu_asic_info=refuse, amdsmi_get_gpu_process_list=refuse))
        assert (card.name, card.pci_address, card.processes) == (None, "0000:83:00.0", ())
        assert ask_amdsmi(self.make_library(amdsmi_init=refuse)) == ()


def test_this_machine_is_read_without_raising() -> None:
    assert all(card.vendor == "amd" for card in read_amd().accelerators)
