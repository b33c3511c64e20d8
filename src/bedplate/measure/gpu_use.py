"""Which processes use NVIDIA GPUs, and how much: from NVML, else from `nvidia-smi`. Reading is apart from judging.

The driver does not always know the namespace of a container. It may list no processes, or the host's process ids, and
its utilization samples may have other ids than its list. So a share is attributed only where the ids fit together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

from bedplate.facts.devices import Ask, ask_program, parse_decimal, parse_natural
from bedplate.measure.flags import BUSY
from bedplate.measure.watch import list_process_tree
from bedplate.values.hardware import Accelerator, GpuProcess

SAMPLED_US = 1_000_000
"""NVML's utilization samples of the last second."""
NOTHING_SAMPLED = (0, 6)
"""NVML's codes if no process computed: success without a sample, and "not found"."""
LEAST_SHARE = 0.01
GPU_FILES = ("/dev/nvidia", "libcuda.so", "/dev/dxg")
"""Files that a process which uses an NVIDIA GPU has mapped into its memory."""
UNSEEN_BYTES = 2 << 30
"""Memory in use without a process that uses it. Drivers reserve less than this."""
UNSEEN = "a process that cannot be seen from here"
MEASURING = ("bench", "tune")
GPU_QUERY = ("nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
APPS_QUERY = (
    "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits",
)  # fmt: skip
MONITOR_QUERY = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """One GPU at one moment."""

    uuid: str
    share: float | None = None
    """Share of the last moments in which any process computed; `None`: not reported, as for a MIG slice."""
    used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    """Compute processes with memory on it."""
    samples: Mapping[int, float] | None = None
    """Share of its compute units by process id; `None`: not reported."""


class ProcessOwner(NamedTuple):
    """What this machine knows about a process."""

    name: str | None = None
    user: str | None = None
    command: str | None = None
    """The bedplate command that started it, such as `bedplate bench (process 77)`."""
    measures: bool = False
    """Whether that command measures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherGpuProcess:
    """A process that uses the GPU and does not belong to the measured engine."""

    pid: int | None = None
    name: str | None = None
    user: str | None = None
    bytes: int | None = None
    share: float | None = None
    command: str | None = None
    measures: bool = False

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, with_user: bool = True) -> str:
        """In words; without the user for files that others may read."""
        if self.pid is None:
            return f"{UNSEEN}{f' ({self.share:.0%})' if self.share else ''}"
        facts = [f"process {self.pid}"]
        facts += [f"user {self.user}"] if self.user and with_user else []
        facts += [f"{self.bytes >> 20:,} MiB"] if self.bytes else []
        facts += [f"{self.share:.0%} of the GPU"] if self.share is not None else []
        of = f" of {self.command}" if self.command else ""
        return f"{self.name or UNSEEN} ({', '.join(facts)}){of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherGpuUse:
    """Other processes on the GPUs of an engine at one moment."""

    share: float | None = None
    """Their share of the busiest GPU; `None`: unknown."""
    processes: tuple[OtherGpuProcess, ...] = ()
    is_busy: bool = False
    """Whether they make a measurement slower, as far as can be told."""


# judging


def find_users(uses: Sequence[GpuUse], own: set[int], owners: Mapping[int, ProcessOwner]) -> OtherGpuUse:
    """The use before an engine starts, or before load is sent to the endpoint whose processes are `own`."""
    found: dict[int | None, OtherGpuProcess] = {}
    shares: list[float] = []
    unknown = False
    for use in uses:
        listed = {one.pid: one for one in use.processes}
        sampled = {pid: share for pid, share in (use.samples or {}).items() if share >= LEAST_SHARE}
        fits = sampled.keys() <= listed.keys()
        for pid, process in listed.items():
            if pid not in own:
                _add(
                    found,
                    _describe(process, owners, sampled.get(pid, 0.0) if use.samples is not None and fits else None),
                )
        busy = use.share if use.share is not None else sum(sampled.values()) if use.samples is not None else None
        if busy is None:
            unknown = unknown or bool(listed.keys() - own)
            continue
        shares.append(min(1.0, busy))
        others = [one for pid, one in found.items() if pid in listed]
        if busy > BUSY and not any(one.share is None or one.share > BUSY for one in others):
            inside = next((listed[pid] for pid in listed if pid in own), None)
            extra = OtherGpuProcess(share=min(1.0, busy))
            _add(found, extra if inside is None else _describe(inside, owners, min(1.0, busy)))
    share = max(shares, default=None)
    is_busy = unknown or (share is not None and share > BUSY) or any(one.measures for one in found.values())
    return OtherGpuUse(share=share, processes=tuple(found.values()), is_busy=is_busy)


def find_others(
    uses: Sequence[GpuUse], own: set[int], owners: Mapping[int, ProcessOwner], before: OtherGpuUse | None = None
) -> OtherGpuUse:
    """The use by others while the engine with the processes `own` computes.

    `before`: the use before it started. In a container whose process ids are not the driver's, only the processes that
    were there before are known to be others.
    """
    earlier = {one.pid for one in before.processes if one.pid is not None} if before is not None else set()
    hidden = before is not None and any(one.pid is None for one in before.processes)
    found: dict[int | None, OtherGpuProcess] = {}
    shares: list[float] = []
    for use in uses:
        listed = {one.pid: one for one in use.processes}
        sampled = {pid: share for pid, share in (use.samples or {}).items() if share >= LEAST_SHARE}
        inside = own & listed.keys()
        if use.samples is None:
            for pid in listed.keys() - inside if inside else listed.keys() & earlier:
                _add(found, _describe(listed[pid], owners, None))
            continue
        if sampled.keys() & own or (inside and sampled.keys() <= listed.keys()):
            strangers = sampled.keys() - own
        else:
            strangers = sampled.keys() & earlier
            for pid in listed.keys() - inside if inside else ():
                _add(found, _describe(listed[pid], owners, None))
        for pid in strangers:
            _add(found, _describe(listed.get(pid, GpuProcess(pid=pid)), owners, sampled[pid]))
        shares.append(min(1.0, sum(sampled[pid] for pid in strangers)))
    if hidden and not found and before is not None:
        return replace(before, processes=tuple(one for one in before.processes if one.pid is None))
    share = max(shares, default=None)
    is_busy = (share is not None and share > BUSY) or any(one.share is None or one.measures for one in found.values())
    return OtherGpuUse(share=share, processes=tuple(found.values()), is_busy=is_busy)


def _describe(process: GpuProcess, owners: Mapping[int, ProcessOwner], share: float | None) -> OtherGpuProcess:
    owner = owners.get(process.pid, ProcessOwner())
    return OtherGpuProcess(
        pid=process.pid, name=owner.name or process.name, user=owner.user, bytes=process.bytes, share=share,
        command=owner.command, measures=owner.measures,
    )  # fmt: skip


def _add(found: dict[int | None, OtherGpuProcess], one: OtherGpuProcess) -> None:
    """A process on several GPUs is named once, with its memory on all of them."""
    before = found.get(one.pid)
    if before is not None:
        size = (before.bytes or 0) + (one.bytes or 0)
        shares = [each.share for each in (before, one) if each.share is not None]
        one = replace(one, bytes=size or None, share=max(shares, default=None))
    found[one.pid] = one


# nvidia-smi


def parse_gpu_query(text: str) -> tuple[GpuUse, ...]:
    """Parse the answer to GPU_QUERY: one line per GPU."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].startswith(("GPU-", "MIG-")):
            percent, mib = parse_decimal(cells[1]), parse_natural(cells[2])
            share = percent / 100 if percent is not None else None
            found.append(GpuUse(uuid=cells[0], share=share, used_bytes=None if mib is None else mib << 20))
    return tuple(found)


def parse_compute_apps(text: str) -> tuple[tuple[str, GpuProcess], ...]:
    """Parse the answer to APPS_QUERY: a GPU and a process in each line. The name may contain commas."""
    found = []
    for line in text.splitlines():
        uuid, _, rest = line.partition(",")
        pid, _, rest = rest.partition(",")
        name, _, mib = rest.rpartition(",")
        number, size = parse_natural(pid.strip()), parse_natural(mib.strip())
        if number is not None:
            program = PurePath(name.strip().split(" -", 1)[0]).name if "[" not in name else None
            process = GpuProcess(pid=number, name=program or None, bytes=None if size is None else size << 20)
            found.append((uuid.strip(), process))
    return tuple(found)


def parse_process_monitor(text: str) -> dict[int, dict[int, float]] | None:
    """Parse `nvidia-smi pmon -s u`: by the GPU's index, the share of each process; `None` if it is not supported."""
    columns: list[str] = []
    found: dict[int, dict[int, float]] = {}
    for line in text.splitlines():
        words = line.lstrip("# ").split()
        if line.startswith("#") and "pid" in words:
            columns = words
        elif not line.startswith("#") and len(words) >= len(columns) > 0:
            row = dict(zip(columns, words, strict=False))
            index, pid, percent = (
                parse_natural(row.get("gpu")),
                parse_natural(row.get("pid")),
                parse_decimal(row.get("sm")),
            )
            if index is not None:
                found.setdefault(index, {})
                if pid is not None:
                    found[index][pid] = min(1.0, (percent or 0.0) / 100)
    return found or None


class UseReader(Protocol):
    def read(self) -> tuple[GpuUse, ...]: ...


@dataclass(frozen=True)
class SmiReader:
    """Reads with `nvidia-smi`, where NVML cannot be loaded. A reading takes about a second."""

    uuids: tuple[str, ...]
    ask: Ask = ask_program

    def read(self) -> tuple[GpuUse, ...]:
        cards = parse_gpu_query(self.ask(GPU_QUERY) or "")
        apps = parse_compute_apps(self.ask(APPS_QUERY) or "")
        shares = parse_process_monitor(self.ask(MONITOR_QUERY) or "")
        return tuple(
            replace(
                card,
                processes=tuple(process for uuid, process in apps if uuid == card.uuid),
                samples=None if shares is None else shares.get(index),
            )
            for index, card in enumerate(cards)
            if not self.uuids or card.uuid in self.uuids
        )


# NVML


@dataclass(frozen=True)
class NvmlReader:
    """Reads with NVML. `handles`: GPUs or MIG slices by their UUID."""

    nvml: Any
    handles: Mapping[str, Any]

    def read(self) -> tuple[GpuUse, ...]:
        return tuple(self._read_one(uuid, handle) for uuid, handle in self.handles.items())

    def _read_one(self, uuid: str, handle: Any) -> GpuUse:
        load = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return GpuUse(
            uuid=uuid,
            share=None if load is None else load.gpu / 100,
            used_bytes=None if memory is None else int(memory.used),
            processes=tuple(
                GpuProcess(pid=int(one.pid), bytes=int(one.usedGpuMemory) if one.usedGpuMemory else None)
                for one in listed
            ),
            samples=self._read_samples(handle),
        )

    def _read_samples(self, handle: Any) -> dict[int, float] | None:
        since = int(time.time() * 1e6) - SAMPLED_US
        try:
            found = self.nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except Exception as error:
            # Anything else than these: the driver does not report it.
            return {} if getattr(error, "value", None) in NOTHING_SAMPLED else None
        # Entries that the driver did not fill have no time.
        return {int(one.pid): one.smUtil / 100 for one in found if one.timeStamp >= since and one.smUtil <= 100}

    def _ask(self, question: str, handle: Any) -> Any:
        try:
            return getattr(self.nvml, question)(handle)
        except Exception:  # an older driver, a MIG slice or a platform without it
            return None


def open_reader(uuids: Sequence[str] = ()) -> UseReader | None:
    """A reader of these GPUs, or of all; `None` on a machine without an NVIDIA driver that answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library or no permission
        smi = SmiReader(tuple(uuids))
        return smi if smi.read() else None
    handles: dict[str, Any] = {}
    try:
        if uuids:
            handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in uuids}
        else:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                handles[str(pynvml.nvmlDeviceGetUUID(handle))] = handle
    except Exception:
        return None
    return NvmlReader(pynvml, handles) if handles else None


def describe_gpu_users(cards: Sequence[Accelerator], own: set[int]) -> tuple[str, ...]:
    """A sentence for each NVIDIA GPU that processes other than `own` use."""
    numbers = {card.uuid: card.index for card in cards if card.vendor == "nvidia" and card.uuid is not None}
    reader = open_reader(tuple(numbers)) if numbers else None
    owners, found = ProcessOwners(), []
    for use in reader.read() if reader is not None else ():
        users = find_users([use], own, owners.find(one.pid for one in use.processes))
        names = "; ".join(map(str, users.processes))
        if not names and not use.processes and (use.used_bytes or 0) > UNSEEN_BYTES:
            names = f"{UNSEEN} ({(use.used_bytes or 0) >> 20:,} MiB)"
        if names:
            slower = ", and they slow each other down" if users.is_busy else ""
            found.append(
                f"GPU {numbers[use.uuid]} is also used by {names}: this service gets the memory that is free{slower}"
            )
    return tuple(found)


# processes of this machine


@dataclass
class ProcessOwners:
    """Owners of processes, each looked up once."""

    _known: dict[int, ProcessOwner] = field(default_factory=dict)

    def find(self, pids: Iterable[int]) -> dict[int, ProcessOwner]:
        for pid in pids:
            if pid not in self._known:
                self._known[pid] = find_owner(pid)
        return self._known


def find_owner(pid: int) -> ProcessOwner:
    """Whose process it is; empty if the id is not that of a process here which uses a GPU."""
    import psutil

    if not uses_gpu(pid):
        return ProcessOwner()
    try:
        process = psutil.Process(pid)
        name, user = process.name(), process.username()
        chain = [process, *process.parents()]
    except psutil.Error:
        return ProcessOwner()
    for one in chain:
        try:
            verb = find_verb(one.cmdline())
        except psutil.Error:
            continue
        if verb is not None:
            command = f"bedplate {verb} (process {one.pid})"
            return ProcessOwner(name, user, command, measures=verb in MEASURING)
    return ProcessOwner(name, user)


def find_verb(words: Sequence[str]) -> str | None:
    """The verb of a bedplate command line; `None` if it is another program's."""
    for position, word in enumerate(words[:-1]):
        if PurePath(word).name == "bedplate" and words[position + 1].isalpha():
            return words[position + 1]
    return None


def uses_gpu(pid: int, root: Path = Path("/proc")) -> bool:
    """Whether a process of this machine uses a GPU. A process of another user counts, since its files are hidden."""
    try:
        text = (root / str(pid) / "maps").read_text(errors="replace")
    except PermissionError:
        return True
    except OSError:
        return root == Path("/proc") and not root.exists()  # a system without /proc
    return any(mark in text for mark in GPU_FILES)


def list_own_processes(engine: int | None = None) -> set[int]:
    """This process and its descendants, and those of an engine that was started elsewhere."""
    return {*list_process_tree(os.getpid()), *(list_process_tree(engine) if engine is not None else ())}
