"""CPU facts, from captured text of real machines (see tests/captures) and in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S

from bedplate.facts.cgroup import CgroupLimits
from bedplate.facts.cpu import (
    INSTRUCTION_SETS,
    Processor,
    cap_by_quota,
    count_cores,
    list_sysctl_caches,
    make_linux_cpu,
    make_mac_cpu,
    parse_cache_size,
    parse_cpuinfo,
    parse_node_meminfo,
    parse_sysctl,
    read_caches,
    read_core_kinds,
    read_cpu,
    read_numa,
    read_siblings,
    select_instruction_sets,
    summarize_instruction_sets,
)
from bedplate.values import Cache, Cpu, NumaNode

CAPTURES = Path(__file__).parent.parent / "captures"
NOWHERE = Path("/nonexistent")


def read_capture(name: str) -> str:
    return (CAPTURES / name).read_text()


def describe_cpu(
    name: str, arch: str, affinity: set[int] | None = None, limits: CgroupLimits | None = None, root: Path = NOWHERE
) -> Cpu:
    cpu = make_linux_cpu(read_capture(f"cpuinfo/{name}.txt"), arch, affinity or set(), limits or CgroupLimits(), root)
    assert cpu is not None
    return cpu


def test_a_virtual_xeon_has_amx() -> None:
    cpu = describe_cpu("x86_64-xeon-sapphire-rapids-vm", "x86_64", {0, 1})
    assert (cpu.name, cpu.vendor, cpu.arch) == ("Intel(R) Xeon(R) Processor", "intel", "x86_64")
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores) == (1, 2, 2)
    assert (cpu.allowed_cores, cpu.allowed_physical_cores) == (2.0, 2)
    assert cpu.instruction_sets == (
        "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
        "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    )  # fmt: skip
    assert summarize_instruction_sets(cpu.instruction_sets) == "AVX-512 AMX"


def test_hyperthreads_share_a_core() -> None:
    whole = describe_cpu("x86_64-core-i7-1165g7", "x86_64", set(range(8)))
    assert (whole.sockets, whole.physical_cores, whole.logical_cores, whole.allowed_physical_cores) == (1, 4, 8, 4)
    assert summarize_instruction_sets(whole.instruction_sets) == "AVX-512"
    # CPUs 0 and 4 are the two threads of core 0.
    assert describe_cpu("x86_64-core-i7-1165g7", "x86_64", {0, 4}).allowed_physical_cores == 1
    assert describe_cpu("x86_64-core-i7-1165g7", "x86_64", {0, 1}).allowed_physical_cores == 2
    assert describe_cpu("x86_64-core-i7-1165g7", "x86_64", {0, 4}).allowed_cores == 2.0


def test_the_same_core_number_in_two_sockets_is_two_cores() -> None:
    cpu = describe_cpu("x86_64-epyc-7451-excerpt", "x86_64", {0, 24, 48, 72})
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores) == (2, 4, 8)
    assert cpu.allowed_physical_cores == 2
    assert cpu.vendor == "amd"
    assert summarize_instruction_sets(cpu.instruction_sets) == "AVX2"


def test_a_virtual_ryzen_has_the_instruction_sets_of_its_host() -> None:
    cpu = describe_cpu("x86_64-ryzen-2700x-vm", "x86_64", {0})
    assert (cpu.name, cpu.vendor) == ("AMD Ryzen 7 2700X Eight-Core Processor", "amd")
    assert cpu.instruction_sets == ("sse4_2", "avx", "avx2")


@pytest.mark.parametrize(
    ("capture_name", "name", "cores", "sets"),
    [
        ("raspberry-pi-5", "Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)", 4, ("neon", "dotprod")),
        ("graviton2", "Neoverse-N1", 16, ("neon", "dotprod")),
        ("graviton3", "Neoverse-V1", 1, ("neon", "dotprod", "i8mm", "bf16", "sve")),
        ("ampere-altra-max", "Neoverse-N1", 128, ("neon", "dotprod")),
        ("rk3588", "Cortex-A55 + Cortex-A76", 8, ("neon", "dotprod")),
        ("apple-m1-pro-asahi", "Apple M1 Pro", 10, ("neon", "dotprod")),
    ],
)
def test_arm_cores_are_named_by_their_part_numbers(
    capture_name: str, name: str, cores: int, sets: tuple[str, ...]
) -> None:
    cpu = describe_cpu(f"aarch64-{capture_name}", "aarch64", set(range(cores)))
    assert cpu.name == name
    assert (cpu.physical_cores, cpu.logical_cores, cpu.allowed_physical_cores) == (cores, cores, cores)
    assert cpu.sockets is None
    assert cpu.instruction_sets == sets


def test_an_unlisted_arm_part_is_named_by_its_number() -> None:
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xfff\n"
    assert parse_cpuinfo(text).name == "arm core 0xfff"
    assert parse_cpuinfo(text.replace("0x41", "0x99")).name == "0x99 core 0xfff"


@pytest.mark.parametrize(
    ("capture_name", "name", "vendor", "processors"),
    [
        ("s390x-z196", "IBM Z (2817)", "ibm", 17),
        ("ppc64-power7", "POWER7 (architected)", "ibm", 16),
        ("riscv64-visionfive2", "sifive,u74-mc", None, 4),
    ],
)
def test_other_architectures_are_named_without_instruction_sets(
    capture_name: str, name: str, vendor: str | None, processors: int
) -> None:
    info = parse_cpuinfo(read_capture(f"cpuinfo/{capture_name}.txt"))
    assert (info.name, info.vendor, len(info.processors)) == (name, vendor, processors)
    assert select_instruction_sets(info.flags) == ()


def test_threads_of_a_core_come_from_sysfs_where_cpuinfo_names_no_cores(tmp_path: Path) -> None:
    for number in range(16):
        first = number // 4 * 4
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{first}-{first + 3}\n")
    cpu = describe_cpu("ppc64-power7", "ppc64", {0, 1, 2, 3, 4}, root=tmp_path)
    assert (cpu.physical_cores, cpu.logical_cores, cpu.allowed_physical_cores) == (4, 16, 2)
    assert read_siblings(NOWHERE) == {}


def test_the_device_tree_names_the_board_where_cpuinfo_does_not(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(b"Radxa ROCK 5B\0")
    assert describe_cpu("aarch64-rk3588", "aarch64", root=tmp_path).name == "Cortex-A55 + Cortex-A76 (Radxa ROCK 5B)"


def test_a_container_that_renumbers_cpus_keeps_its_share() -> None:
    """lxcfs lists CPUs 0 to 7 while the affinity mask has the host's numbers."""
    cpu = describe_cpu("x86_64-core-i7-1165g7", "x86_64", {40, 41, 42, 43})
    assert (cpu.allowed_cores, cpu.allowed_physical_cores) == (4.0, 4)
    siblings = {40: frozenset({40, 41}), 41: frozenset({40, 41}), 42: frozenset({42, 43}), 43: frozenset({42, 43})}
    processors = [Processor(number=number) for number in range(4)]
    assert count_cores(processors, siblings, frozenset(siblings)).allowed_physical == 2


@pytest.mark.parametrize(
    ("quota", "time", "cores"), [(None, 8.0, 4), (0.5, 0.5, 1), (1.5, 1.5, 1), (2.0, 2.0, 2), (3.9, 3.9, 3), (64, 8, 4)]
)
def test_a_quota_caps_the_threads_that_can_really_run(quota: float | None, time: float, cores: int) -> None:
    limits = CgroupLimits(cpu_quota_cores=quota)
    cpu = describe_cpu("x86_64-core-i7-1165g7", "x86_64", set(range(8)), limits)
    assert (cpu.allowed_cores, cpu.allowed_physical_cores) == (time, cores)


def test_a_cpuset_narrows_the_mask_but_never_to_nothing() -> None:
    everything = set(range(8))
    narrowed = describe_cpu("x86_64-core-i7-1165g7", "x86_64", everything, CgroupLimits(cpus=frozenset({1, 2})))
    assert narrowed.allowed_cores == 2.0
    foreign = describe_cpu("x86_64-core-i7-1165g7", "x86_64", everything, CgroupLimits(cpus=frozenset({90})))
    assert foreign.allowed_cores == 8.0


def test_an_apple_chip_is_read_from_sysctl() -> None:
    cpu = make_mac_cpu(parse_sysctl(read_capture("sysctl/apple-m2.txt")), "x86_64")  # as a translated Python would say
    assert cpu is not None
    assert (cpu.name, cpu.vendor, cpu.arch) == ("Apple M2", "apple", "arm64")
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores, cpu.allowed_physical_cores) == (1, 8, 8, 8)
    assert (cpu.performance_cores, cpu.efficiency_cores) == (4, 4)
    assert cpu.instruction_sets == ("neon", "dotprod", "i8mm", "bf16")
    assert summarize_instruction_sets(cpu.instruction_sets) == "NEON I8MM"


def test_an_intel_mac_is_read_from_sysctl() -> None:
    cpu = make_mac_cpu(parse_sysctl(read_capture("sysctl/intel-mac.txt")), "x86_64")
    assert cpu is not None
    assert (cpu.name, cpu.vendor) == ("Intel(R) Core(TM) i5-4440 CPU @ 3.10GHz", "intel")
    assert (cpu.arch, cpu.physical_cores, cpu.logical_cores) == ("x86_64", 4, 4)
    newer = {"hw.ncpu": "4", "machdep.cpu.features": "SSE4.2 AVX1.0 FMA F16C", "machdep.cpu.leaf7_features": "AVX2"}
    other = make_mac_cpu(newer, "x86_64")
    assert other is not None
    assert other.instruction_sets == ("sse4_2", "avx", "avx2", "fma", "f16c")


def test_instruction_sets_keep_one_order_and_have_names() -> None:
    assert select_instruction_sets(["amx_tile", "bogus", "avx2", "sse4_2"]) == ("sse4_2", "avx2", "amx_tile")
    assert select_instruction_sets({"asimd", "asimddp", "sve2", "sve"}) == ("neon", "dotprod", "sve", "sve2")
    assert summarize_instruction_sets(()) == ""
    assert summarize_instruction_sets(("neon", "dotprod", "i8mm", "sve", "sve2")) == "SVE2 I8MM"
    assert all(name and name.strip() == name for name in INSTRUCTION_SETS.values())


def test_absent_and_partial_text_gives_no_cpu() -> None:
    assert make_linux_cpu("", "x86_64", {0}, CgroupLimits()) is None
    assert make_mac_cpu({}, "arm64") is None
    partial = make_linux_cpu("processor\t: 0\nprocessor\t: 1\nmodel na", "x86_64", {0, 1}, CgroupLimits(), NOWHERE)
    assert partial is not None
    assert (partial.name, partial.vendor, partial.allowed_physical_cores) == ("unknown x86_64 CPU", None, 2)


LINES = st.lists(
    st.tuples(
        st.sampled_from(
            ["processor", "processor 1", "physical id", "core id", "flags", "Features", "CPU part", "CPU implementer",
             "cpu", "Model", "model name", "vendor_id", "machine", "hw.ncpu", "hw.physicalcpu", "hw.optional.arm64"]
        ),
        st.sampled_from(["", ":", " : ", "\t: "]),
        st.one_of(st.text(max_size=12), st.integers().map(str), st.integers().map(hex), st.just("9" * 5000)),
    ).map("".join)
).map("\n".join)  # fmt: skip


@given(st.one_of(st.text(), LINES), st.sets(st.integers(min_value=0, max_value=300), max_size=8))
def test_no_text_makes_the_parsers_raise(text: str, affinity: set[int]) -> None:
    parse_cpuinfo(text)
    make_mac_cpu(parse_sysctl(text), "arm64")
    cpu = make_linux_cpu(text, "x86_64", affinity, CgroupLimits(), NOWHERE)
    assert cpu is None or 1 <= cpu.allowed_physical_cores <= max(1, len(affinity), cpu.logical_cores)


class TestCaches:
    def write_tree(self, root: Path, cpus: int, caches: dict[str, tuple[str, str, str, int]]) -> Path:
        """Write sysfs files: for each index its level, type, size and how many adjacent CPUs share it."""
        for cpu in range(cpus):
            for index, (level, kind, size, shared) in caches.items():
                folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/{index}"
                folder.mkdir(parents=True)
                first = cpu // shared * shared
                listed = f"{first}-{first + shared - 1}" if shared > 1 else str(cpu)
                for name, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": listed}.items():
                    (folder / name).write_text(f"{text}\n")
        return root

    def test_identical_caches_are_counted_together(self, tmp_path: Path) -> None:
        """The sizes are those of the Sapphire Rapids VM in tests/captures, with 16 CPUs."""
        root = self.write_tree(
            tmp_path,
            16,
            {
                "index0": ("1", "Data", "48K", 1),
                "index1": ("1", "Instruction", "32K", 1),
                "index2": ("2", "Unified", "2048K", 1),
                "index3": ("3", "Unified", "307200K", 16),
            },
        )
        assert read_caches(root) == (
            Cache(level=1, kind="data", bytes=48 << 10, count=16, shared_by=1),
            Cache(level=1, kind="instruction", bytes=32 << 10, count=16, shared_by=1),
            Cache(level=2, kind="unified", bytes=2 << 20, count=16, shared_by=1),
            Cache(level=3, kind="unified", bytes=300 << 20, count=1, shared_by=16),
        )

    def test_cache_levels_with_shared_threads_are_counted(self, tmp_path: Path) -> None:
        root = self.write_tree(tmp_path, 16, {"index0": ("1", "Data", "32K", 2), "index3": ("3", "Unified", "32M", 8)})
        assert read_caches(root) == (
            Cache(level=1, kind="data", bytes=32 << 10, count=8, shared_by=2),
            Cache(level=3, kind="unified", bytes=32 << 20, count=2, shared_by=8),
        )

    def test_a_virtual_machine_that_hides_caches_has_none(self, tmp_path: Path) -> None:
        assert read_caches(tmp_path) == ()
        broken = self.write_tree(tmp_path, 2, {"index0": ("x", "Data", "48K", 1), "index1": ("1", "Odd", "48K", 1)})
        assert read_caches(broken) == ()

    def test_caches_of_an_apple_chip_are_read(self) -> None:
        values = parse_sysctl(read_capture("sysctl/apple-m2.txt"))
        assert read_core_kinds(values) == (4, 4)
        assert list_sysctl_caches(values) == (
            Cache(level=1, kind="data", bytes=128 << 10, count=4, shared_by=1),
            Cache(level=2, kind="unified", bytes=16 << 20, count=1, shared_by=4),
            Cache(level=1, kind="data", bytes=64 << 10, count=4, shared_by=1),
            Cache(level=2, kind="unified", bytes=4 << 20, count=1, shared_by=4),
        )
        assert (read_core_kinds({}), list_sysctl_caches({})) == ((None, None), ())

    @given(st.text())
    def test_no_cache_size_text_raises(self, text: str) -> None:
        parse_cache_size(text)
        parse_node_meminfo(text)


class TestNuma:
    def test_each_node_has_cpus_and_memory(self, tmp_path: Path) -> None:
        """Two sockets as `numactl -H` shows them for a Xeon Platinum 8468 server; the layout is the kernel's."""
        for node, (cpus, total, free) in enumerate([("0-46:2", 0, 0), ("1,3,5", 528421888, 501723136)]):
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cpus}\n")
            memory = f"Node {node} MemTotal:       {total} kB\nNode {node} MemFree:        {free} kB\n"
            (folder / "meminfo").write_text(memory if total else "")
        assert read_numa(tmp_path) == (
            NumaNode(index=0),
            NumaNode(index=1, cpus="1,3,5", memory_bytes=528421888 << 10, free_bytes=501723136 << 10),
        )
        assert read_numa(NOWHERE) == ()


@given(st.integers(min_value=1, max_value=1024), st.floats(min_value=1e-6, max_value=1e9))
def test_a_quota_never_leaves_less_than_one_core_nor_adds_any(cores: int, quota: float) -> None:
    assert 1 <= cap_by_quota(cores, quota) <= cores


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity masks and /proc are Linux's")
class TestThisMachine:
    def test_allowed_cores_match_the_affinity_mask(self) -> None:
        cpu, notes = read_cpu()
        assert notes == ()
        assert cpu.allowed_cores == float(len(os.sched_getaffinity(0)))
        assert 1 <= cpu.allowed_physical_cores <= len(os.sched_getaffinity(0))

    def test_a_process_with_a_narrower_mask_has_fewer_cores(self) -> None:
        mask = sorted(os.sched_getaffinity(0))
        if len(mask) < 2:
            pytest.skip("only one CPU is allowed here, so the mask cannot be narrowed")
        program = (
            "import json, os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\n"
            "from bedplate.facts.cpu import read_cpu; cpu, _ = read_cpu()\n"
            "print(json.dumps([cpu.allowed_cores, cpu.allowed_physical_cores, cpu.logical_cores]))"
        )
        command = [sys.executable, "-c", program, str(mask[-1])]
        child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
        allowed, physical, logical = json.loads(child.stdout)
        assert (allowed, physical) == (1.0, 1)
        assert logical == read_cpu()[0].logical_cores
