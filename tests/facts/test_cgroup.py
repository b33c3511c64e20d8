"""cgroup limits: v1, v2 and hybrid, from files in a folder that is used as /."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S

from bedplate.facts.cgroup import (
    CgroupLimits,
    CgroupMount,
    parse_bytes,
    parse_cfs,
    parse_cpu_list,
    parse_cpu_max,
    parse_memberships,
    parse_mounts,
    parse_stat,
    read_limits,
)

CAPTURES = Path(__file__).parent.parent / "captures/cgroup"
GIB = 1 << 30
V1_NO_LIMIT = "9223372036854771712"


def write_tree(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """Write the files that a process sees under /."""
    everything = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def read_capture(name: str) -> str:
    return (CAPTURES / name).read_text()


V2_HOST = "29 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_a_hybrid_machine_without_limits(tmp_path: Path) -> None:
    """A virtual machine with separately mounted v1 controllers and an empty v2 hierarchy."""
    group = "sys/fs/cgroup/memory/agent/0123456789abcdef0123456789abcdef"
    root = write_tree(
        tmp_path,
        read_capture("v1-hybrid-vm.cgroup"),
        read_capture("v1-hybrid-vm.mountinfo"),
        {
            f"{group}/memory.limit_in_bytes": V1_NO_LIMIT,
            f"{group}/memory.usage_in_bytes": "3698688",
            f"{group}/memory.stat": read_capture("v1-hybrid-vm.memory.stat"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-1\n",
            "sys/fs/cgroup/unified/cgroup.controllers": "\n",
        },
    )
    assert read_limits(root) == CgroupLimits(cpus=frozenset({0, 1}))


def test_v1_limits_with_page_cache_taken_off(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/agent/0123456789abcdef0123456789abcdef"
    root = write_tree(
        tmp_path,
        read_capture("v1-hybrid-vm.cgroup"),
        read_capture("v1-hybrid-vm.mountinfo"),
        {
            f"{group}/memory.limit_in_bytes": str(4 * GIB),
            f"{group}/memory.usage_in_bytes": str(3 * GIB),
            f"{group}/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n"
            f"hierarchical_memory_limit {4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_limits(root) == CgroupLimits(
        memory_limit_bytes=4 * GIB, memory_headroom_bytes=3 * GIB, cpu_quota_cores=1.5
    )


def test_v1_reports_a_tighter_limit_of_a_hidden_ancestor(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        "4:memory:/docker/abc\n",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime master:15 - cgroup cgroup rw,memory\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}\n",
        },
    )
    limits = read_limits(root)
    assert (limits.memory_limit_bytes, limits.memory_headroom_bytes) == (2 * GIB, 1 * GIB)


def test_a_v1_container_whose_path_is_the_hosts_reads_its_own_mount(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the host's; the mount's own root may or may not be that group."""
    for mounted in ("/", "/docker/abc", "/../.."):
        root = write_tree(
            tmp_path / mounted.replace("/", "_"),
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            f"35 31 0:32 {mounted} /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
            f"36 31 0:33 {mounted} /sys/fs/cgroup/cpu,cpuacct ro,relatime - cgroup cgroup rw,cpu,cpuacct\n",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
        )
        limits = read_limits(root)
        assert (limits.memory_limit_bytes, limits.cpu_quota_cores) == (GIB, 0.5)


def test_v2_takes_the_tightest_of_all_levels(tmp_path: Path) -> None:
    """The limit of a parent also applies, and memory used by its other children is not available."""
    top = "sys/fs/cgroup"
    root = write_tree(
        tmp_path,
        "0::/user.slice/job.scope\n",
        V2_HOST,
        {
            f"{top}/cgroup.controllers": "cpuset cpu io memory pids\n",
            f"{top}/user.slice/memory.max": str(8 * GIB),
            f"{top}/user.slice/memory.current": str(7 * GIB),
            f"{top}/user.slice/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            f"{top}/user.slice/cpu.max": "200000 100000\n",
            f"{top}/user.slice/cpuset.cpus.effective": "0-7\n",
            f"{top}/user.slice/job.scope/memory.max": str(6 * GIB),
            f"{top}/user.slice/job.scope/memory.current": str(GIB),
            f"{top}/user.slice/job.scope/memory.stat": "inactive_file 0\n",
            f"{top}/user.slice/job.scope/cpu.max": "max 100000\n",
            f"{top}/user.slice/job.scope/cpuset.cpus.effective": "\n",
        },
    )
    assert read_limits(root) == CgroupLimits(
        memory_limit_bytes=6 * GIB,
        memory_headroom_bytes=2 * GIB,
        cpu_quota_cores=2.0,
        cpus=frozenset(range(8)),
    )


def test_memory_high_bounds_a_plan_as_memory_max_does(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        "0::/\n",
        read_capture("v2-docker-desktop.mountinfo"),
        {
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.high": str(2 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
        },
    )
    limits = read_limits(root)
    assert (limits.memory_limit_bytes, limits.memory_headroom_bytes) == (2 * GIB, GIB)


def test_usage_above_the_limit_leaves_zero_headroom(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(3 * GIB)}
    assert read_limits(write_tree(tmp_path, "0::/\n", V2_HOST, files)).memory_headroom_bytes == 0


def test_absent_files_mean_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()
    assert read_limits(write_tree(tmp_path, "0::/gone\n", V2_HOST, {})) == CgroupLimits()


def test_garbled_files_mean_no_limits(tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": "\x00 ∞ -7 \n" for name in ("memory.max", "cpu.max", "cpuset.cpus.effective")}
    assert read_limits(write_tree(tmp_path, f"0::/{'x' * 5000}\nnonsense\n", V2_HOST + "x - cgroup2\n", files)) == (
        CgroupLimits()
    )
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert read_limits(tmp_path) == CgroupLimits()


def test_mounts_are_read_with_their_escapes() -> None:
    assert parse_mounts(r"1 2 0:3 /a\040b /mnt/c\011d rw shared:1 master:2 - cgroup2 none rw") == (
        CgroupMount(version=2, controllers=(), root="/a b", mount_point="/mnt/c\td"),
    )
    assert {mount.version for mount in parse_mounts(read_capture("v1-hybrid-vm.mountinfo"))} == {1, 2}


def test_a_path_may_contain_colons() -> None:
    (member,) = parse_memberships("5:cpu,cpuacct:/system.slice/a:b\n")
    assert (member.controllers, member.path) == (("cpu", "cpuacct"), "/system.slice/a:b")


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("50000 100000", 0.5), ("250000", 2.5), ("0 0", None), ("", None)]
)
def test_cpu_max_is_parsed(text: str, cores: float | None) -> None:
    assert parse_cpu_max(text) == cores


def test_numbers_and_lists_are_parsed() -> None:
    assert parse_cfs("-1", "100000") is None
    assert parse_cfs("400000", "100000") == 4.0
    assert parse_bytes(V1_NO_LIMIT) is None
    assert parse_bytes("9223372036854710272") is None  # the same with pages of 64 KiB
    assert parse_bytes("0\n") == 0
    assert parse_cpu_list("0-2,8\n") == frozenset({0, 1, 2, 8})
    assert parse_cpu_list("3-1") is None
    assert parse_cpu_list("0-4000000000") is None


@given(st.one_of(st.text(), st.text(alphabet="0123456789-,:/. max\n", max_size=60)))
def test_no_text_makes_the_parsers_raise(text: str) -> None:
    parse_memberships(text)
    parse_mounts(text)
    parse_bytes(text)
    parse_stat(text)
    parse_cpu_max(text)
    parse_cfs(text, text)
    parse_cpu_list(text)


@given(path=st.text(max_size=300), mounted=st.text(max_size=30), where=st.text(max_size=30))
def test_no_membership_makes_the_reader_raise(
    tmp_path_factory: pytest.TempPathFactory, path: str, mounted: str, where: str
) -> None:
    root = tmp_path_factory.mktemp("tree")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::/{path}\n", encoding="utf-8")
    (root / "proc/self/mountinfo").write_text(f"1 2 0:3 /{mounted} /{where} rw - cgroup2 none rw\n", encoding="utf-8")
    assert read_limits(root).memory_limit_bytes is None


def _create_v1_memory_group() -> Path | None:
    """Create a child of the top v1 memory group, if this machine allows it."""
    for mount in parse_mounts(Path("/proc/self/mountinfo").read_text()):
        if mount.version == 1 and "memory" in mount.controllers:
            group = Path(mount.mount_point) / f"bedplate-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                return group
    return None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
def test_the_limit_of_a_real_group_is_read() -> None:
    """A child process in a group of 512 MiB reads that limit and a smaller headroom."""
    group = _create_v1_memory_group()
    if group is None:
        pytest.skip("this machine does not let us make a v1 memory group")
    try:
        try:
            (group / "memory.limit_in_bytes").write_text(str(512 << 20))
        except OSError as error:
            pytest.skip(f"the group's limit cannot be set: {error}")
        program = (
            "import sys, os, pathlib; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
            "from bedplate.facts.hardware import probe; memory = probe().memory\n"
            "print(memory.limit_bytes, memory.available_bytes)"
        )
        command = [sys.executable, "-c", program, str(group)]
        child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
        limit, available = map(int, child.stdout.split())
        assert limit == 512 << 20
        assert 0 < available < limit
    finally:
        group.rmdir()
