"""The whole probe, its smaller readers on files in a folder that stands for /, and how it is shown."""

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

from bedplate.facts.cgroup import CgroupLimits
from bedplate.facts.cpu import parse_sysctl
from bedplate.facts.hardware import (
    apple_accelerator,
    container_kind,
    operating_system,
    os_version,
    parse_meminfo,
    parse_os_release,
    parse_system_profiler,
    probe,
    read_amd,
    read_disk,
    read_memory,
    root_is_disk,
)
from bedplate.show.probe import one_line, render_hardware, short_name
from bedplate.values import Accelerator, Cpu, Disk, Figure, Hardware, Memory, from_json, replaced, to_json

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
    def test_agrees_with_the_operating_system(self) -> None:
        hardware = probe()
        virtual = psutil.virtual_memory()
        assert hardware.os == operating_system()
        assert hardware.os_version
        assert hardware.cpu.logical_cores == os.cpu_count()
        assert hardware.memory.total_bytes == virtual.total
        assert hardware.memory.available_bytes <= virtual.total
        if hardware.memory.limit_bytes is None:
            assert hardware.memory.available_bytes == pytest.approx(virtual.available, rel=0.1)
        assert hardware.disk is not None
        assert 0 < hardware.disk.free_bytes <= hardware.disk.total_bytes

    @on_linux
    def test_agrees_with_the_affinity_mask(self) -> None:
        cpu = probe().cpu
        mask = len(os.sched_getaffinity(0))
        assert cpu.allowed_cores <= mask
        assert 1 <= cpu.allowed_physical_cores <= mask
        assert cpu.physical_cores == psutil.cpu_count(logical=False)

    def test_round_trips_through_json(self) -> None:
        hardware = probe()
        assert from_json(Hardware, to_json(hardware)) == hardware

    @on_linux
    def test_is_quick_and_starts_no_process(self) -> None:
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
    def test_does_not_load_the_driver_bindings_where_there_is_no_driver(self) -> None:
        program = (
            "import sys; from bedplate.facts.hardware import probe; found = probe()\n"
            "print(bool(found.accelerators or found.notes), 'pynvml' in sys.modules, 'torch' in sys.modules)"
        )
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        something, bindings, torch = child.stdout.split()
        assert torch == "False"
        assert something == "True" or bindings == "False"


class TestMemory:
    MEMINFO = "MemTotal:       24682740 kB\nMemFree:        22347268 kB\nMemAvailable:   24314912 kB\n"

    def test_is_what_meminfo_says(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        assert read_memory(CgroupLimits(), root) == Memory(
            total_bytes=24682740 * 1024, available_bytes=24314912 * 1024, limit_bytes=None
        )

    def test_is_bounded_by_what_the_group_has_left(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        memory = read_memory(CgroupLimits(memory_limit_bytes=4 * GIB, memory_headroom_bytes=3 * GIB), root)
        assert (memory.available_bytes, memory.limit_bytes) == (3 * GIB, 4 * GIB)

    def test_a_limit_above_the_machine_is_none(self, tmp_path: Path) -> None:
        root = put(tmp_path, {"proc/meminfo": self.MEMINFO})
        memory = read_memory(CgroupLimits(memory_limit_bytes=900 * GIB, memory_headroom_bytes=899 * GIB), root)
        assert (memory.available_bytes, memory.limit_bytes) == (24314912 * 1024, None)

    def test_falls_back_where_there_is_no_meminfo(self, tmp_path: Path) -> None:
        assert read_memory(CgroupLimits(), tmp_path).total_bytes == psutil.virtual_memory().total

    @given(st.one_of(st.text(), st.text(alphabet="MemTotalAvib: 0123456789k B\n")))
    def test_no_text_makes_it_raise(self, text: str) -> None:
        parse_meminfo(text)
        parse_os_release(text)
        parse_system_profiler(text)
        root_is_disk(text)


class TestSystem:
    def test_name(self, tmp_path: Path) -> None:
        put(tmp_path, {"etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'})
        assert os_version("linux", tmp_path) == "Debian GNU/Linux 12 (bookworm)"

    def test_name_without_a_pretty_one(self, tmp_path: Path) -> None:
        put(tmp_path, {"usr/lib/os-release": "NAME=Void\nVERSION_ID='1'\n"})
        assert os_version("linux", tmp_path) == "Void 1"
        assert os_version("linux", tmp_path / "nowhere") is None

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
    def test_containers_are_told_by_their_files(self, tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
        assert container_kind(put(tmp_path, files)) == kind

    def test_a_disk_made_from_an_image_is_no_container(self, tmp_path: Path) -> None:
        """Seen on virtual machines that boot a container image's files from a disk of their own."""
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
        assert container_kind(root) == "kvm"
        (root / "sys/devices/system/clocksource/clocksource0/available_clocksource").unlink()
        assert container_kind(root) == "vm"

    def test_an_overlay_root_is_a_container(self) -> None:
        assert not root_is_disk("473 387 0:143 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker\n")
        assert root_is_disk("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
        assert not root_is_disk("27 1 254:0 /docker/vfs/dir/abc / rw,relatime - ext4 /dev/vda rw\n")


class TestAccelerators:
    def test_amd_cards_from_sysfs(self, tmp_path: Path) -> None:
        """Files as amdgpu names them; the figures are those of a 24 GB card."""
        device = "sys/class/drm/card1/device"
        put(
            tmp_path,
            {
                "sys/class/drm/card0/device/vendor": "0x8086\n",
                f"{device}/vendor": "0x1002\n",
                f"{device}/device": "0x744c\n",
                f"{device}/mem_info_vram_total": "25753026560\n",
                f"{device}/mem_info_vram_used": "1073741824\n",
                "sys/class/drm/card1-DP-1/device/vendor": "0x1002\n",
                "sys/class/drm/card10/device/vendor": "0x1002\n",
                "sys/class/drm/card10/device/product_name": "AMD Instinct MI210\n",
                "sys/module/amdgpu/version": "6.10.5\n",
            },
        )
        first, second = read_amd(tmp_path)
        assert first == Accelerator(
            name="AMD GPU 0x744c",
            vendor="amd",
            index=0,
            memory_bytes=25753026560,
            free_bytes=25753026560 - 1073741824,
            driver_version="6.10.5",
        )
        assert (second.name, second.index, second.memory_bytes) == ("AMD Instinct MI210", 1, None)
        assert read_amd(tmp_path / "nowhere") == ()

    def test_an_apple_chip_shares_its_memory(self) -> None:
        sysctl = parse_sysctl((CAPTURES / "sysctl/apple-m2.txt").read_text())
        assert apple_accelerator(sysctl, {}, 12 * GIB) == Accelerator(
            name="Apple M2", vendor="apple", memory_bytes=24 * GIB, free_bytes=12 * GIB, unified_memory=True
        )

    def test_system_profiler_stands_in_for_sysctl(self) -> None:
        profiler = parse_system_profiler((CAPTURES / "sysctl/apple-m3-system-profiler.txt").read_text())
        found = apple_accelerator({}, profiler, 10 * GIB)
        assert found is not None
        assert (found.name, found.memory_bytes) == ("Apple M3", 24 * GIB)

    def test_an_intel_mac_has_none(self) -> None:
        sysctl = parse_sysctl((CAPTURES / "sysctl/intel-mac.txt").read_text())
        assert apple_accelerator(sysctl, {}, GIB) is None


def test_the_disk_is_that_of_a_folder_that_is_not_made_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def page(self, hardware: Hardware) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(render_hardware(hardware))
        return captured.get()

    def test_one_line(self) -> None:
        assert one_line(self.XEON) == ("Intel Xeon, 2 cores allowed (of 2), AVX-512 AMX · 23.4 GiB RAM free · no GPU")

    def test_one_line_with_cards(self) -> None:
        pair = replaced(self.XEON, accelerators=(self.H200, replaced(self.H200, index=1)))
        assert one_line(pair).endswith("· 2 × NVIDIA H200, 140 GiB free each")
        apple = Accelerator(name="Apple M2", vendor="apple", memory_bytes=24 * GIB, unified_memory=True)
        assert one_line(replaced(self.XEON, accelerators=(apple,))).endswith("· Apple M2 GPU, unified memory")

    def test_a_share_of_a_core_is_not_called_a_core(self) -> None:
        cpu = replaced(self.XEON.cpu, allowed_cores=0.5, allowed_physical_cores=1)
        assert "0.5 cores allowed (of 2)" in one_line(replaced(self.XEON, cpu=cpu))

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
    def test_short_names(self, name: str, short: str) -> None:
        assert short_name(name) == short

    def test_the_page_has_units_and_basis_and_says_what_is_unknown(self) -> None:
        page = self.page(
            replaced(
                self.XEON,
                container="docker",
                accelerators=(self.H200,),
                memory=replaced(
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
            "bandwidth TBD",
            "100 GB free of 1 TB · /models[1]",
            "GPU 7 is lost [bold]",
            "reported",
        ):
            assert expected in page

    def test_this_machine_can_be_shown(self) -> None:
        hardware = probe()
        assert str(hardware.cpu.allowed_physical_cores) in one_line(hardware)
        assert "Memory" in self.page(hardware)
