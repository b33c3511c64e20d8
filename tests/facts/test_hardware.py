"""The probe, its readers on files in a folder that is used as /, and its page."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.conftest import HANG_S

from bedplate.facts.cgroup import CgroupLimits
from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.hardware import (
    add_shared_memory,
    add_specs,
    detect_container,
    detect_operating_system,
    is_root_a_disk,
    merge_found,
    note_numa_gaps,
    parse_meminfo,
    parse_os_release,
    probe,
    read_accelerators,
    read_disk,
    read_memory,
    read_os_version,
)
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.show.probe import describe_hardware, describe_links, describe_speed_limit, render_hardware, shorten_name
from bedplate.values import (
    Accelerator,
    Cache,
    Cpu,
    Disk,
    Figure,
    GpuProcess,
    Hardware,
    Link,
    Memory,
    NumaNode,
    Pcie,
    from_json,
    replace_fields,
    to_json,
)

CAPTURES = Path(__file__).parent.parent / "captures"
GIB = 1 << 30
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's files")


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestProbe:
    def test_probe_agrees_with_the_operating_system(self) -> None:
        hardware = probe()
        virtual = psutil.virtual_memory()
        assert hardware.os == detect_operating_system()
        assert hardware.os_version
        assert hardware.cpu.logical_cores == os.cpu_count()
        assert hardware.memory.total_bytes == virtual.total
        assert hardware.memory.available_bytes <= virtual.total
        if hardware.memory.limit_bytes is None:
            assert hardware.memory.available_bytes == pytest.approx(virtual.available, rel=0.1)
        assert hardware.disk is not None
        assert 0 < hardware.disk.free_bytes <= hardware.disk.total_bytes

    @on_linux
    def test_probe_agrees_with_the_affinity_mask(self) -> None:
        cpu = probe().cpu
        mask = len(os.sched_getaffinity(0))
        assert cpu.allowed_cores <= mask
        assert 1 <= cpu.allowed_physical_cores <= mask
        assert cpu.physical_cores == psutil.cpu_count(logical=False)

    def test_probe_survives_json(self) -> None:
        hardware = probe()
        assert from_json(Hardware, to_json(hardware)) == hardware

    @pytest.mark.measures
    @on_linux
    def test_probe_is_fast_and_starts_no_process(self) -> None:
        probe()
        if probe().accelerators:
            pytest.skip("asking a GPU's driver takes longer")
        children = psutil.Process().children()
        durations = []
        for _ in range(5):
            start = time.perf_counter()
            probe()
            durations.append(time.perf_counter() - start)
        assert min(durations) < 0.05
        assert psutil.Process().children() == children

    @on_linux
    def test_probe_does_not_load_driver_bindings_without_a_driver(self) -> None:
        program = (
            "import sys; from bedplate.facts.hardware import probe; found = probe()\n"
            "print(bool(found.accelerators or found.notes), 'pynvml' in sys.modules, 'torch' in sys.modules)"
        )
        child = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S
        )
        something, bindings, torch = child.stdout.split()
        assert torch == "False"
        assert something == "True" or bindings == "False"


class TestMemory:
    MEMINFO = "MemTotal:       24682740 kB\nMemFree:        22347268 kB\nMemAvailable:   24314912 kB\n"

    def test_memory_is_read_from_meminfo(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        assert read_memory(CgroupLimits(), root) == Memory(
            total_bytes=24682740 * 1024, available_bytes=24314912 * 1024, limit_bytes=None
        )

    def test_memory_is_bounded_by_the_cgroup_headroom(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        memory = read_memory(CgroupLimits(memory_limit_bytes=4 * GIB, memory_headroom_bytes=3 * GIB), root)
        assert (memory.available_bytes, memory.limit_bytes) == (3 * GIB, 4 * GIB)

    def test_a_limit_above_the_total_is_ignored(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        memory = read_memory(CgroupLimits(memory_limit_bytes=900 * GIB, memory_headroom_bytes=899 * GIB), root)
        assert (memory.available_bytes, memory.limit_bytes) == (24314912 * 1024, None)

    def test_memory_without_meminfo_is_read_from_psutil(self, tmp_path: Path) -> None:
        assert read_memory(CgroupLimits(), tmp_path).total_bytes == psutil.virtual_memory().total

    @given(st.one_of(st.text(), st.text(alphabet="MemTotalAvib: 0123456789k B\n")))
    def test_any_meminfo_is_parsed_without_error(self, text: str) -> None:
        parse_meminfo(text)
        parse_os_release(text)
        is_root_a_disk(text)


class TestSystem:
    def test_the_system_name_is_read(self, tmp_path: Path) -> None:
        put(tmp_path, {"etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'})
        assert read_os_version("linux", tmp_path) == "Debian GNU/Linux 12 (bookworm)"

    def test_a_system_without_a_pretty_name_is_named(self, tmp_path: Path) -> None:
        put(tmp_path, {"usr/lib/os-release": "NAME=Void\nVERSION_ID='1'\n"})
        assert read_os_version("linux", tmp_path) == "Void 1"
        assert read_os_version("linux", tmp_path / "nowhere") is None

    @pytest.mark.parametrize(
        ("files", "kind"),
        [
            ({}, None),
            ({".dockerenv": ""}, "docker"),
            ({".dockerenv": "", "var/run/secrets/kubernetes.io/serviceaccount/token": "x"}, "kubernetes"),
            ({"proc/self/cgroup": "4:memory:/kubepods/burstable/pod1/abc\n"}, "kubernetes"),
            ({"proc/self/cgroup": "4:memory:/docker/0123abc\n"}, "docker"),
            ({"proc/self/cgroup": "0::/system.slice/docker-0123.scope\n"}, "docker"),
            ({"run/.containerenv": 'engine="podman-5.0"\n'}, "podman"),
            ({"proc/self/cgroup": "0::/lxc.payload.web/init.scope\n"}, "lxc"),
            ({"run/systemd/container": "systemd-nspawn\n"}, "systemd-nspawn"),
            ({"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}, "wsl"),
        ],
    )
    def test_containers_are_detected_by_files(self, tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
        assert detect_container(put(tmp_path, files)) == kind

    def test_a_disk_made_from_an_image_is_not_a_container(self, tmp_path: Path) -> None:
        """Seen on virtual machines that boot the files of a container image from a separate disk."""
        root = put(
            tmp_path,
            {
                ".dockerenv": "",
                "run/systemd/container": "docker\n",
                "proc/self/mountinfo": (CAPTURES / "cgroup/v1-hybrid-vm.mountinfo").read_text(),
                "proc/cpuinfo": (CAPTURES / "cpuinfo/x86_64-xeon-sapphire-rapids-vm.txt").read_text(),
                "sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc kvm-clock \n",
            },
        )
        assert detect_container(root) == "kvm"
        (root / "sys/devices/system/clocksource/clocksource0/available_clocksource").unlink()
        assert detect_container(root) == "vm"

    def test_an_overlay_root_is_a_container(self) -> None:
        assert not is_root_a_disk("473 387 0:143 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker\n")
        assert is_root_a_disk("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
        assert not is_root_a_disk("27 1 254:0 /docker/vfs/dir/abc / rw,relatime - ext4 /dev/vda rw\n")


class TestAccelerators:
    def test_cards_of_two_vendors_have_unique_indexes(self) -> None:
        first = FoundAccelerators(
            accelerators=(
                Accelerator(name="A", vendor="nvidia", index=0),
                Accelerator(name="A MIG", vendor="nvidia", index=2, parent=1),
            ),
            links=(Link(kind="pcie", a="0", b="host"),),
        )
        second = FoundAccelerators(
            accelerators=(Accelerator(name="B", vendor="amd", index=0), Accelerator(name="B", vendor="amd", index=1)),
            links=(Link(kind="xgmi", a="0", b="1"),),
            notes=("one",),
        )
        found = merge_found([first, FoundAccelerators(), second])
        assert [(card.index, card.parent) for card in found.accelerators] == [(0, None), (2, 1), (3, None), (4, None)]
        assert [(link.a, link.b) for link in found.links] == [("0", "host"), ("3", "4")]
        assert found.notes == ("one",)

    def test_a_chip_without_memory_uses_the_machines(self) -> None:
        ram = Memory(total_bytes=128 * GIB, available_bytes=100 * GIB)
        spark = add_shared_memory(Accelerator(name="NVIDIA GB10", vendor="nvidia", unified_memory=True), ram)
        assert (spark.memory_bytes, spark.free_bytes) == (128 * GIB, 100 * GIB)
        unknown = Accelerator(name="NVIDIA GPU", vendor="nvidia")
        assert add_shared_memory(unknown, ram) == unknown

    @on_linux
    def test_a_machine_without_accelerators_has_none(self, tmp_path: Path) -> None:
        assert read_accelerators("linux", Memory(total_bytes=GIB, available_bytes=GIB), tmp_path) == FoundAccelerators()

    def test_numa_nodes_with_missing_memory_are_noted(self) -> None:
        """Seen in a virtual machine that gets its memory late."""
        ram = Memory(total_bytes=135148457984, available_bytes=GIB)
        cpu = replace_fields(TestShow.XEON.cpu, numa=(NumaNode(index=0, cpus="0-15", memory_bytes=6135615488),))
        assert note_numa_gaps(cpu, ram) == ("the NUMA nodes list 5.71 GiB of 126 GiB of memory",)
        assert note_numa_gaps(replace_fields(cpu, numa=(NumaNode(index=0, memory_bytes=130 * 10**9),)), ram) == ()
        assert note_numa_gaps(replace_fields(cpu, numa=()), ram) == ()


class TestSpec:
    """Data-sheet figures are added to what drivers report."""

    def make_machine(self, *cards: Accelerator) -> Hardware:
        return replace_fields(TestShow.XEON, accelerators=cards)

    def test_a_known_chip_has_its_bandwidth(self) -> None:
        (card,) = add_specs(self.make_machine(TestShow.H200)).accelerators
        assert card.bandwidth_bytes_s is not None
        assert (card.bandwidth_bytes_s.value, card.bandwidth_bytes_s.basis) == (4.8e12, "spec")
        assert "NVIDIA" in (card.bandwidth_bytes_s.source or "")

    def test_an_unknown_chip_is_noted_and_has_no_bandwidth(self) -> None:
        hardware = add_specs(self.make_machine(Accelerator(name="Voodoo 2", vendor="other")))
        assert hardware.accelerators[0].bandwidth_bytes_s is None
        assert hardware.notes == ("Voodoo 2 is not in the list of chips, so its memory bandwidth is unknown",)

    def test_the_drivers_bandwidth_is_kept_for_an_unlisted_chip(self) -> None:
        figure = Figure(value=1e12, low=1e12, high=1e12, basis="reported")
        hardware = add_specs(self.make_machine(Accelerator(name="Voodoo 2", vendor="other", bandwidth_bytes_s=figure)))
        assert (hardware.accelerators[0].bandwidth_bytes_s, hardware.notes) == (figure, ())

    def test_a_slice_gets_its_part_of_its_cards_bandwidth(self) -> None:
        part = replace_fields(TestShow.H200, parent=0, name="NVIDIA H200 MIG 1g.18gb")
        figure = add_specs(self.make_machine(part)).accelerators[0].bandwidth_bytes_s
        assert figure is not None and (figure.value, figure.basis) == (4.8e12 / 8, "estimate")

    def test_a_slice_of_unknown_size_has_no_bandwidth(self) -> None:
        part = Accelerator(name="AMD Instinct MI300X", vendor="amd", index=1, parent=0, memory_bytes=24 * GIB)
        hardware = add_specs(self.make_machine(part))
        assert (hardware.accelerators[0].bandwidth_bytes_s, hardware.notes) == (None, ())

    def make_cpu(self, name: str, cores: int, sockets: int | None = 1) -> Hardware:
        processor = replace_fields(TestShow.XEON.cpu, name=name, physical_cores=cores, sockets=sockets)
        return replace_fields(TestShow.XEON, cpu=processor)

    @pytest.mark.parametrize(
        ("name", "cores", "sockets", "gb_s"),
        [
            ("AMD EPYC 7763 64-Core Processor", 64, 1, 204.8),
            ("AMD EPYC 7763 64-Core Processor", 128, 2, 409.6),
            ("Intel(R) Xeon(R) Platinum 8480+", 56, None, 307.2),
            ("12th Gen Intel(R) Core(TM) i7-12700", 12, 1, 76.8),
        ],
    )
    def test_a_cpus_bandwidth_range_covers_empty_channels(
        self, name: str, cores: int, sockets: int | None, gb_s: float
    ) -> None:
        figure = add_specs(self.make_cpu(name, cores, sockets)).memory.bandwidth_bytes_s
        assert figure is not None
        assert (figure.value, figure.high, figure.basis) == (gb_s * 1e9, gb_s * 1e9, "spec")
        assert figure.low == figure.value / 2
        assert "channels may be empty" in (figure.source or "")

    def test_soldered_memory_has_no_range(self) -> None:
        figure = add_specs(self.make_cpu("Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)", 4)).memory.bandwidth_bytes_s
        assert figure is not None and figure.low == figure.value == figure.high == pytest.approx(17.1e9)

    def test_a_virtual_machine_gets_no_more_than_its_part_of_the_socket(self) -> None:
        figure = add_specs(self.make_cpu("AMD EPYC 7763 64-Core Processor", 2)).memory.bandwidth_bytes_s
        assert figure is not None
        assert figure.value == pytest.approx(204.8e9 / 32)
        assert figure.basis == "estimate"
        assert figure.low < figure.value < figure.high < 60e9

    def test_an_unknown_cpu_has_no_bandwidth_unless_measured(self) -> None:
        assert add_specs(TestShow.XEON).memory.bandwidth_bytes_s is None
        measured = Figure(value=1e10, low=9e9, high=1.1e10, basis="measured")
        machine = self.make_cpu("AMD EPYC 7763 64-Core Processor", 64)
        machine = replace_fields(machine, memory=replace_fields(machine.memory, bandwidth_bytes_s=measured))
        assert add_specs(machine).memory.bandwidth_bytes_s == measured

    def test_memory_comes_from_the_data_sheet_if_the_driver_is_silent(self) -> None:
        hardware = add_specs(self.make_machine(Accelerator(name="Tenstorrent n300", vendor="tenstorrent")))
        assert hardware.accelerators[0].memory_bytes == 24 * GIB
        assert "data sheet" in hardware.notes[0]


def test_the_disk_is_found_for_a_folder_that_does_not_exist_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "not/yet"))
    disk, notes = read_disk()
    assert notes == ()
    assert disk is not None
    assert disk.path == str(tmp_path / "not/yet")
    assert not (tmp_path / "not").exists()


class TestShow:
    XEON = Hardware(
        os="linux",
        os_version="Debian GNU/Linux 12 (bookworm)",
        cpu=Cpu(
            name="Intel(R) Xeon(R) Processor",
            arch="x86_64",
            physical_cores=2,
            logical_cores=2,
            allowed_cores=2.0,
            allowed_physical_cores=2,
            instruction_sets=("avx2", "avx512f", "amx_tile"),
        ),
        memory=Memory(total_bytes=25275125760, available_bytes=25125558681),
        disk=Disk(path="/models[1]", total_bytes=10**12, free_bytes=10**11),
    )
    H200 = Accelerator(
        name="NVIDIA H200",
        vendor="nvidia",
        memory_bytes=150754820096,
        free_bytes=150109880320,
        compute_capability="9.0",
    )

    def render_page(self, hardware: Hardware) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(render_hardware(hardware))
        return captured.get()

    def test_one_line_describes_the_machine(self) -> None:
        assert describe_hardware(self.XEON) == (
            "Intel Xeon, 2 cores allowed (of 2), AVX-512 AMX · 23.4 GiB RAM free · no GPU"
        )

    def test_one_line_of_hypothetical_hardware_omits_unspecified_parts(self) -> None:
        assert describe_hardware(make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 64})).startswith(
            "8 cores allowed (of 8) · "
        )

    def test_one_line_includes_cards(self) -> None:
        pair = replace_fields(self.XEON, accelerators=(self.H200, replace_fields(self.H200, index=1)))
        assert describe_hardware(pair).endswith("· 2 × NVIDIA H200, 140 GiB free each")
        apple = Accelerator(name="Apple M2", vendor="apple", memory_bytes=24 * GIB, unified_memory=True)
        assert describe_hardware(replace_fields(self.XEON, accelerators=(apple,))).endswith(
            "· Apple M2 GPU, unified memory"
        )

    def test_a_share_of_a_core_is_not_called_a_core(self) -> None:
        cpu = replace_fields(self.XEON.cpu, allowed_cores=0.5, allowed_physical_cores=1)
        assert "0.5 cores allowed (of 2)" in describe_hardware(replace_fields(self.XEON, cpu=cpu))

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
            ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", "Intel Core i7-1165G7"),
            ("AMD Ryzen 7 2700X Eight-Core Processor", "AMD Ryzen 7 2700X"),
            ("AMD EPYC 7451 24-Core Processor", "AMD EPYC 7451"),
            ("Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)", "Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)"),
            ("Processor", "Processor"),
        ],
    )
    def test_cpu_names_are_shortened(self, name: str, short: str) -> None:
        assert shorten_name(name) == short

    def test_the_page_shows_units_basis_and_unknowns(self) -> None:
        page = self.render_page(
            replace_fields(
                self.XEON,
                container="docker",
                accelerators=(self.H200,),
                memory=replace_fields(
                    self.XEON.memory,
                    limit_bytes=16 * GIB,
                    bandwidth_bytes_s=Figure(value=41.2e9, low=40e9, high=42e9, basis="measured"),
                ),
                notes=("GPU 7 is lost [bold]",),
            )
        )
        for expected in (
            "Debian GNU/Linux 12 (bookworm) · in docker",
            "23.4 GiB free of 23.5 GiB · limited to 16 GiB",
            "bandwidth 41.2 GB/s",
            "measured",
            "NVIDIA H200 · 140 GiB free of 140 GiB · compute capability 9.0",
            "bandwidth not measured",
            "100 GB free of 1 TB · /models[1]",
            "GPU 7 is lost [bold]",
            "reported",
        ):
            assert expected in page

    def test_the_page_explains_bandwidths(self) -> None:
        figure = Figure(value=936e9, low=936e9, high=936e9, basis="spec")
        assert describe_speed_limit(figure, 24 * 10**9) == (
            "each GB of weights read per token takes 1.07 ms; with 24 GB of weights, at most 39 tokens/s per stream"
        )
        assert describe_speed_limit(figure, 234 * 10**9) == (
            "each GB of weights read per token takes 1.07 ms; with 234 GB of weights, at most 4.0 tokens/s per stream"
        )
        assert describe_speed_limit(figure, None) == "each GB of weights read per token takes 1.07 ms"
        assert describe_speed_limit(None, 1) is None
        ram = replace_fields(self.XEON.memory, bandwidth_bytes_s=replace_fields(figure, value=40e9))
        assert "takes 25 ms" in self.render_page(replace_fields(self.XEON, memory=ram))

    def test_the_page_groups_identical_cards(self) -> None:
        card = replace_fields(
            self.H200,
            architecture="Hopper",
            driver_version="580.1",
            cuda_version="13.0",
            sm_clock_mhz=345,
            max_sm_clock_mhz=1980,
            power_limit_w=650.0,
            max_power_limit_w=700.0,
            pcie=Pcie(generation=1, max_generation=5, width=8, max_width=16),
            nvlinks=18,
        )
        busy = replace_fields(card, index=1, processes=(GpuProcess(pid=403, name="python3", bytes=1713373184),))
        page = self.render_page(replace_fields(self.XEON, accelerators=(card, busy)))
        assert page.count("Hopper · driver 580.1 · CUDA 13.0") == 1
        assert "clock 345 of 1980 MHz · power limit 650 of 700 W · PCIe 1 x8 (of 5 x16) · 18 NVLinks" in page
        assert "python3 (pid 403) holds 1.6 GiB" in page

    def test_the_page_shows_slices_shared_memory_caches_and_nodes(self) -> None:
        part = replace_fields(self.H200, index=8, parent=3)
        limit = Figure(value=18 * GIB, low=16 * GIB, high=20 * GIB, basis="estimate")
        apple = Accelerator(
            name="Apple M2", vendor="apple", compute_units=10, unified_memory=True, wired_limit_bytes=limit
        )
        cpu = replace_fields(
            self.XEON.cpu,
            performance_cores=4,
            efficiency_cores=4,
            caches=(
                Cache(level=1, kind="instruction", bytes=1 << 15, count=8, shared_by=1),
                Cache(level=2, kind="unified", bytes=16 << 20, count=2, shared_by=4),
                Cache(level=3, kind="unified", bytes=32 << 20, count=1, shared_by=8),
            ),
            numa=(
                NumaNode(index=0, cpus="0-3", memory_bytes=64 * GIB),
                NumaNode(index=1, cpus="4-7", memory_bytes=None),
            ),
        )
        page = self.render_page(replace_fields(self.XEON, cpu=cpu, accelerators=(part, apple)))
        for expected in (
            "a slice of GPU 3",
            "10 GPU cores",
            "the GPU can use 18 GiB of it (16 GiB to 20 GiB)",
            "4 performance and 4 efficiency · 2 NUMA nodes",
            "L2 2 × 16 MiB for 4 CPUs · L3 32 MiB",
            "NUMA node 0: 64 GiB, CPUs 0-3",
            "NUMA node 1: memory unknown, CPUs 4-7",
        ):
            assert expected in page

    def test_identical_links_share_a_line(self) -> None:
        figure = Figure(value=450e9, low=450e9, high=450e9, basis="spec")
        switch = [
            Link(kind="nvlink", a=str(a), b=str(b), count=18, bandwidth_bytes_s=figure)
            for a in range(8)
            for b in range(a + 1, 8)
        ]
        host = [Link(kind="pcie", a=str(card), b="host") for card in (0, 1, 2, 5)]
        bridges = [Link(kind="nvlink", a="0", b="1", count=4), Link(kind="nvlink", a="2", b="3", count=4)]
        far = [Link(kind="pcie", a="0", b="2", path="system"), Link(kind="xgmi", a="0", b="3", hops=1)]
        assert list(describe_links([*switch, *host, *bridges, *far])) == [
            ("nvlink between all of GPU 0-7 · 18 links · 450 GB/s each way", "spec"),
            ("pcie GPU 0-2, 5 – host · bandwidth unknown", ""),
            ("nvlink GPU 0 – 1, 2 – 3 · 4 links · bandwidth unknown", ""),
            ("pcie GPU 0 – 2 · across two CPUs · bandwidth unknown", ""),
            ("xgmi GPU 0 – 3 · 1 hop · bandwidth unknown", ""),
        ]

    def test_only_terminals_get_colours(self) -> None:
        console = Console(width=120, force_terminal=False)
        with console.capture() as captured:
            console.print(render_hardware(self.XEON))
        assert "\x1b" not in captured.get()

    def test_this_machine_can_be_shown(self) -> None:
        hardware = probe()
        assert str(hardware.cpu.allowed_physical_cores) in describe_hardware(hardware)
        assert "Memory" in self.render_page(hardware)
