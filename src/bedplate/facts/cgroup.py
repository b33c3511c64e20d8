"""The cgroup limits of this process: memory, CPU time and CPUs, from cgroup v1, v2 or both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# v1 writes "no limit" as the largest page-aligned number, which depends on the page size. Real limits are far below.
NO_LIMIT_BYTES = 1 << 60
MOST_CPUS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One line of /proc/self/cgroup; the v2 hierarchy has no controllers."""

    controllers: tuple[str, ...]
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMount:
    """One cgroup line of /proc/self/mountinfo."""

    version: int
    controllers: tuple[str, ...]
    root: str
    mount_point: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """The tightest limits from this process's group up to the highest visible one; `None`: no limit, or unreadable."""

    memory_limit_bytes: int | None = None
    memory_headroom_bytes: int | None = None
    """The least memory that any group on the way still allows. Reclaimable page cache does not count as used."""
    cpu_quota_cores: float | None = None
    cpus: frozenset[int] | None = None


def read_text(path: Path) -> str | None:
    """The text of a small file; `None` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def is_there(path: Path) -> bool:
    """Whether something exists at `path`. A path without permission counts as absent."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def parse_memberships(text: str) -> tuple[Membership, ...]:
    found = []
    for line in text.splitlines():
        parts = line.split(":", 2)  # the path itself may contain colons
        if len(parts) == 3 and parts[2].startswith("/"):
            found.append(Membership(controllers=tuple(filter(None, parts[1].split(","))), path=parts[2]))
    return tuple(found)


def parse_mounts(text: str) -> tuple[CgroupMount, ...]:
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = tuple(tail[2].split(",")) if tail[0] == "cgroup" and len(tail) > 2 else ()
        found.append(
            CgroupMount(
                version=2 if tail[0] == "cgroup2" else 1,
                controllers=controllers,
                root=_unescape(fields[3]),
                mount_point=_unescape(fields[4]),
            )
        )
    return tuple(found)


def parse_bytes(text: str | None) -> int | None:
    """A limit or a usage; `None` for `max`, for v1's "no limit" and for unreadable text."""
    value = _parse_natural(text)
    return None if value is None or value >= NO_LIMIT_BYTES else value


def parse_stat(text: str | None) -> dict[str, int]:
    """memory.stat as numbers."""
    found = {}
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if (number := _parse_natural(value)) is not None:
            found[key] = number
    return found


def parse_cpu_max(text: str | None) -> float | None:
    """v2's `cpu.max`, such as `150000 100000`, in cores."""
    words = (text or "").split()
    return _compute_cores(words[0], words[1] if len(words) > 1 else "100000") if words else None


def parse_cfs(quota: str | None, period: str | None) -> float | None:
    """v1's `cpu.cfs_quota_us` (-1: none) and `cpu.cfs_period_us`, in cores."""
    return _compute_cores(quota, period)


def parse_cpu_list(text: str | None) -> frozenset[int] | None:
    """The kernel's list format, such as `0-3,8`; `None` when it names no CPU."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, dash, last = part.partition("-")
        low, high = _parse_natural(first), _parse_natural(last if dash else first)
        if low is None or high is None or not low <= high < MOST_CPUS:
            return None
        found.update(range(low, high + 1))
    return frozenset(found) or None


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits on this process. Tests pass a captured tree as `root`."""
    memberships = parse_memberships(read_text(root / "proc/self/cgroup") or "")
    mounts = parse_mounts(read_text(root / "proc/self/mountinfo") or "")
    limit, headroom = _read_memory_limit(root, memberships, mounts)
    return CgroupLimits(
        memory_limit_bytes=limit,
        memory_headroom_bytes=headroom,
        cpu_quota_cores=_read_cpu_quota(root, memberships, mounts),
        cpus=_read_cpus(root, memberships, mounts),
    )


def _read_memory_limit(
    root: Path, memberships: tuple[Membership, ...], mounts: tuple[CgroupMount, ...]
) -> tuple[int | None, int | None]:
    limits, headrooms = [], []
    for version, folder in _walk_levels(root, "memory", memberships, mounts):
        stat = parse_stat(read_text(folder / "memory.stat"))
        if version == 2:
            # memory.high kills nothing, but above it every allocation stalls to reclaim memory, which makes an engine
            # very slow. It therefore limits a plan as memory.max does.
            names = ("memory.max", "memory.high")
            used = parse_bytes(read_text(folder / "memory.current"))
            cached = stat.get("inactive_file", 0)
            bounds = [parse_bytes(read_text(folder / name)) for name in names]
        else:
            # The soft limit is ignored: it only sets the reclaim order when the whole host is short of memory.
            used = parse_bytes(read_text(folder / "memory.usage_in_bytes"))
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            bounds = [parse_bytes(read_text(folder / "memory.limit_in_bytes"))]
            # The kernel's minimum over all ancestors, including those that a container cannot see.
            hierarchical = stat.get("hierarchical_memory_limit", NO_LIMIT_BYTES)
            bounds.append(hierarchical if hierarchical < NO_LIMIT_BYTES else None)
        known = [bound for bound in bounds if bound is not None]
        if known:
            limits.append(min(known))
            headrooms.append(max(0, min(known) - max(0, (used or 0) - cached)))
    return min(limits, default=None), min(headrooms, default=None)


def _read_cpu_quota(root: Path, memberships: tuple[Membership, ...], mounts: tuple[CgroupMount, ...]) -> float | None:
    found = []
    for version, folder in _walk_levels(root, "cpu", memberships, mounts):
        if version == 2:
            cores = parse_cpu_max(read_text(folder / "cpu.max"))
        else:
            cores = parse_cfs(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
        if cores is not None:
            found.append(cores)
    return min(found, default=None)


def _read_cpus(
    root: Path, memberships: tuple[Membership, ...], mounts: tuple[CgroupMount, ...]
) -> frozenset[int] | None:
    for version, folder in _walk_levels(root, "cpuset", memberships, mounts):
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        for name in names:
            # The effective set of the nearest group already includes its ancestors' limits.
            if cpus := parse_cpu_list(read_text(folder / name)):
                return cpus
    return None


def _walk_levels(
    root: Path, controller: str, memberships: tuple[Membership, ...], mounts: tuple[CgroupMount, ...]
) -> Iterator[tuple[int, Path]]:
    """The folder of this process's group for `controller`, then those of its ancestors up to the mount."""
    # A controller belongs to one hierarchy: v1 if it is mounted there, else v2.
    own = [mount for mount in mounts if mount.version == 1 and controller in mount.controllers]
    version = 1 if own else 2
    candidates = own or [mount for mount in mounts if mount.version == 2]
    path = next(
        (
            member.path
            for member in memberships
            if (controller in member.controllers if version == 1 else not member.controllers)
        ),
        "/",
    )
    for mount in candidates:
        top = root / mount.mount_point.lstrip("/")
        folder = top / _relate_to_mount(mount.root, path)
        # In a container the path may be the host's, outside of the mount. The mount is then this process's own group.
        if not _is_folder(folder):
            folder = top
        if _is_folder(folder):
            while True:
                yield version, folder
                if folder == top:
                    return
                folder = folder.parent


def _relate_to_mount(mount_root: str, path: str) -> str:
    """`path` relative to the mounted group; empty if it is outside of it."""
    inside = path if mount_root == "/" else path.removeprefix(mount_root)
    if ".." in path.split("/") or "\0" in path or (inside == path and mount_root != "/"):
        return ""
    return inside.lstrip("/") if inside.startswith("/") else ""


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # no permission, or a garbled name that is too long
        return False


def _compute_cores(quota: str | None, period: str | None) -> float | None:
    allowed, every = _parse_natural(quota), _parse_natural(period)
    return allowed / every if allowed and every else None


def _parse_natural(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"[0-9]{1,20}", stripped) else None


def _unescape(text: str) -> str:
    """Decode the octal escapes of mountinfo, for example of blanks."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8) & 0xFF), text)
