"""Reserves the GPUs of a measurement: waits until no other process computes on them, and sees other measurements.

Each measurement writes a file under BEDPLATE_HOME/run/measuring. It shows measurements to each other that send load to
the same service, or that have not started their engines yet. Measurements of another BEDPLATE_HOME are found by the
processes of their engines.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bedplate.errors import BedplateError, ExternalFailure
from bedplate.home import get_home, hold_lock, make_disk_failure
from bedplate.measure.gpu_use import (
    OtherGpuUse,
    ProcessOwners,
    UseReader,
    find_others,
    find_users,
    list_own_processes,
    open_reader,
    uses_gpu,
)
from bedplate.measure.watch import list_process_tree
from bedplate.progress import Progress
from bedplate.run.ready import ModelDecision, list_planned_cards
from bedplate.values import Hardware, Record, from_json, replace_fields, to_json
from bedplate.values.units import format_seconds

WAIT_S = 60.0
LOOKS, LOOK_S = 3, 0.4
"""The driver reports the utilization of the last 0.17 to 1 s, so it is read several times."""
HINT = (
    "end that process, wait longer (--wait-for-gpu 10m), choose another GPU (CUDA_VISIBLE_DEVICES), "
    "or measure anyway and get flagged results (--allow-busy-gpu)"
)


class GpuClaim(Record, frozen=True, kw_only=True):
    """A measurement under way."""

    pid: int
    verb: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class GpuPolicy:
    """How a measurement treats GPUs that other processes use."""

    verb: str
    wait_s: float = WAIT_S
    allow_busy: bool = False


@dataclass
class GpuReservation:
    """The GPUs of one measurement, and who else uses them."""

    uuids: tuple[str, ...]
    reader: UseReader
    engine_pid: int | None = None
    """An engine that this process did not start."""
    before: OtherGpuUse | None = None
    """The use by others when the measurement began."""
    waited: bool = False
    claim: Path | None = None
    _owners: ProcessOwners = field(default_factory=ProcessOwners)

    def read_users(self) -> OtherGpuUse:
        """The use now, before the engine has work to do."""
        found = [self._read_users_once()]
        while len(found) < LOOKS:
            time.sleep(LOOK_S)
            found.append(self._read_users_once())
        return max(found, key=lambda one: (one.is_busy, one.share or 0.0))

    def _read_users_once(self) -> OtherGpuUse:
        uses, own = self.reader.read(), list_own_processes(self.engine_pid)
        return find_users(uses, own, self._owners.find(one.pid for use in uses for one in use.processes))

    def read_others(self) -> OtherGpuUse:
        """The use by others while the engine works."""
        uses, own = self.reader.read(), list_own_processes(self.engine_pid)
        pids = {pid for use in uses for pid in (*(one.pid for one in use.processes), *(use.samples or ()))}
        return find_others(uses, own, self._owners.find(pids - own), self.before)

    def list_other_measurements(self) -> tuple[GpuClaim, ...]:
        return tuple(one for path, one in _read_claims() if path != self.claim and set(one.gpus) & set(self.uuids))


def list_planned_gpus(decisions: Iterable[ModelDecision]) -> tuple[str, ...]:
    """The UUIDs of the NVIDIA GPUs that the planned engines use."""
    cards = list_planned_cards(decisions)
    return tuple(card.uuid for card in cards if card.vendor == "nvidia" and card.uuid is not None)


def find_endpoint_gpus(pid: int | None) -> tuple[str, ...]:
    """The UUIDs of the NVIDIA GPUs that the process of an endpoint on this machine, or its descendants, use."""
    reader = open_reader() if pid is not None else None
    if pid is None or reader is None:
        return ()
    uses, tree = reader.read(), list_process_tree(pid)
    named = [use.uuid for use in uses if any(one.pid in tree for one in use.processes)]
    # The ids that the driver lists may be those of the host.
    return tuple(named or (use.uuid for use in uses if any(map(uses_gpu, tree))))


def assume_free(hardware: Hardware) -> Hardware:
    """The machine with nothing on its accelerators, to plan for the time when others have left them."""
    cards = tuple(replace_fields(card, free_bytes=card.memory_bytes) for card in hardware.accelerators)
    return replace_fields(hardware, accelerators=cards)


@contextlib.contextmanager
def reserve_gpus(
    uuids: Sequence[str], policy: GpuPolicy, progress: Progress, *, engine_pid: int | None = None
) -> Iterator[GpuReservation | None]:
    """Waits until no other process computes on these GPUs, then holds them. `None` if there is nothing to watch."""
    reader = open_reader(uuids) if uuids else None
    if reader is None:
        yield None
        return
    one = GpuReservation(tuple(uuids), reader, engine_pid)
    with contextlib.ExitStack() as claims:
        _wait_until_free(one, policy, progress, claims)
        yield one


def _wait_until_free(one: GpuReservation, policy: GpuPolicy, progress: Progress, claims: contextlib.ExitStack) -> None:
    """Claims the GPUs. Raises if they are still in use at the end of the time."""
    use, names = _try_claim(one, policy, claims)
    if one.claim is None:
        progress.note(f"the GPU is in use: {names}")
        one.waited = True
        until = time.monotonic() + policy.wait_s
        with progress.step("waiting for the GPU", max(1, round(policy.wait_s))) as done:
            while one.claim is None and (left_s := until - time.monotonic()) > 0:
                time.sleep(min(LOOK_S, left_s))
                done(round(policy.wait_s - left_s))
                use, names = _try_claim(one, policy, claims)
    if one.claim is None:
        raise ExternalFailure(
            f"the GPU is in use: {names}",
            cause=f"bedplate {policy.verb} waited {format_seconds(policy.wait_s)}; its results would be too low",
            hint=HINT,
        )
    one.before = use
    if use.is_busy or one.list_other_measurements():
        progress.note(f"the GPU is in use: {names}; the results will be too low and are flagged busy")
    elif use.processes:
        progress.note(f"other processes hold memory on the GPU, but do not compute: {names}")


def _try_claim(one: GpuReservation, policy: GpuPolicy, claims: contextlib.ExitStack) -> tuple[OtherGpuUse, str]:
    """Claims the GPUs if they are free, or if that does not matter. Two measurements cannot both find them free."""
    folder = get_home() / "run" / "measuring"
    with hold_lock(folder / "claims", "looking at the GPU"):
        others, use = one.list_other_measurements(), one.read_users()
        names = [f"bedplate {other.verb} (process {other.pid}) measures on it" for other in others]
        names += map(str, use.processes)
        if policy.allow_busy or not (others or use.is_busy):
            # A process of another container may have the same id.
            path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            one.claim = claims.enter_context(_hold_claim(path, one.uuids, policy.verb))
        return use, "; ".join(names)


@contextlib.contextmanager
def _hold_claim(path: Path, uuids: tuple[str, ...], verb: str) -> Iterator[Path]:
    """Locked as long as the measurement runs: the system releases the lock of a process that is killed."""
    from filelock import FileLock

    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire()
        path.write_text(to_json(GpuClaim(pid=os.getpid(), verb=verb, gpus=uuids)) + "\n")
    except OSError as error:
        raise make_disk_failure(error, path) from error
    try:
        yield path
    finally:
        for file in (path, Path(lock.lock_file)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        lock.release()


def _read_claims() -> Iterator[tuple[Path, GpuClaim]]:
    """The measurements of this BEDPLATE_HOME that are under way. Files of killed ones are removed."""
    from filelock import FileLock, Timeout

    for path in sorted((get_home() / "run" / "measuring").glob("*.json")):
        lock = path.with_suffix(".lock")
        try:
            with FileLock(lock, timeout=0):
                path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        except Timeout:
            with contextlib.suppress(OSError, BedplateError):
                yield path, from_json(GpuClaim, path.read_bytes(), str(path))
        except OSError:
            continue
