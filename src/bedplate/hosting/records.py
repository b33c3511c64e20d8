"""Records of running services: one file for each under BEDPLATE_HOME/services, written by its host."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from bedplate._version import __version__
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.home import ensure_writable, get_home, get_logs_dir, hold_lock, make_disk_failure
from bedplate.values.record import from_json, replace_fields, to_json
from bedplate.values.service import ServiceRecord

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MOST_SOCKET_BYTES = 100
"""Longest path of a socket. Kernels allow 108 or 104 bytes, including the final zero."""
CONNECT_S = 2.0


def get_services_dir() -> Path:
    return get_home() / "services"


def get_run_dir() -> Path:
    return get_home() / "run"


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid service name",
            hint="use up to 63 lower-case letters, digits, dots, dashes and underscores; start with a letter or digit",
        )
    return name


def to_name(text: str) -> str:
    """A valid service name derived from the name of a model."""
    words = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63].rstrip("-._")
    return words or "bedplate"


# processes


def read_birth(pid: int) -> str | None:
    """An id of the process that a later one with the same pid does not share; None if there is no such process."""
    boot, ticks = _read_text("/proc/sys/kernel/random/boot_id"), _read_text(f"/proc/{pid}/stat")
    if boot is not None and ticks is not None:
        # The command name is in brackets and may itself contain brackets and spaces. The start time is the 20th field
        # after it.
        fields = ticks.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot.strip()} {fields[19]}"
    if boot is not None:
        return None
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.create_time():.2f}"
    return None


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def is_alive(record: ServiceRecord) -> bool:
    """Whether its process runs or, if processes are not visible from here, whether its socket accepts connections."""
    return read_birth(record.pid) == record.birth or _accepts_connections(record.socket)


def _accepts_connections(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(path)
        except OSError:
            return False
    return True


# the files


def claim_name(wanted: str | None, fallback: str, *, detached: bool = False) -> ServiceRecord:
    """Write a record of this process under `wanted`, or under `fallback`, with a number if that name is in use."""
    folder = ensure_writable(get_services_dir())
    name = check_name(wanted) if wanted is not None else to_name(fallback)
    pid = os.getpid()
    birth = read_birth(pid)
    if birth is None:
        raise ExternalFailure("the start time of this process cannot be read", hint="check that /proc is mounted")
    with hold_lock(folder / "claims", "starting"):
        taken = {record.name for record in list_running()}
        if name in taken and wanted is not None:
            raise make_name_taken_error(name)
        number, free = 2, name
        while free in taken:
            free, number = f"{name[:59]}-{number}", number + 1
        record = ServiceRecord(
            name=free,
            pid=pid,
            birth=birth,
            socket=str(get_socket_path(free)),
            log=str(get_logs_dir() / f"{free}.log"),
            version=__version__,
            started_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            detached=detached,
        )
        write(record)
    return record


def make_name_taken_error(name: str) -> UsageError:
    other = read(name)
    which = f" (process {other.pid})" if other is not None else ""
    return UsageError(
        f"a service named {name} is already running{which}",
        hint=f"run bedplate stop {name}, or choose another name: --name {name}-2",
    )


def write(record: ServiceRecord) -> None:
    """Write the record atomically, since other processes read it at any time."""
    path = get_services_dir() / f"{record.name}.json"
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(to_json(record) + "\n")
        fresh.chmod(0o600)
        fresh.replace(path)
    except OSError as error:
        raise make_disk_failure(error, path) from error


def update(record: ServiceRecord, **changes: object) -> ServiceRecord:
    fresh = replace_fields(record, **changes)
    write(fresh)
    return fresh


def forget(record: ServiceRecord) -> None:
    """Remove the record and the socket, unless another process has taken the name."""
    current = read(record.name)
    if current is None or (current.pid, current.birth) == (record.pid, record.birth):
        for path in (get_services_dir() / f"{record.name}.json", Path(record.socket)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read(name: str) -> ServiceRecord | None:
    """The record of a service; None if there is none or it cannot be read."""
    try:
        return from_json(ServiceRecord, (get_services_dir() / f"{name}.json").read_bytes(), f"the record of {name}")
    except (OSError, BedplateError):
        return None


def list_records() -> tuple[list[ServiceRecord], list[ServiceRecord]]:
    """The records of running services, and those whose process exited without removing its record."""
    alive: list[ServiceRecord] = []
    stale: list[ServiceRecord] = []
    for record in _read_all():
        (alive if is_alive(record) else stale).append(record)
    return alive, stale


def _read_all() -> Iterator[ServiceRecord]:
    try:
        names = sorted(path.stem for path in get_services_dir().glob("*.json") if not path.name.startswith("."))
    except OSError:
        return
    for name in names:
        if (record := read(name)) is not None:
            yield record


def list_running() -> list[ServiceRecord]:
    return list_records()[0]


def remove_stale() -> tuple[list[ServiceRecord], list[ServiceRecord]]:
    """The running services and the exited ones, whose records are removed."""
    alive, stale = list_records()
    for record in stale:
        forget(record)
    return alive, stale


def choose_service(name: str | None) -> ServiceRecord:
    """The running service of this name; without a name, the only one."""
    alive, stale = remove_stale()
    if name is None:
        if len(alive) == 1:
            return alive[0]
        if alive:
            names = ", ".join(record.name for record in alive)
            raise UsageError(f"{len(alive)} services are running", hint=f"name one of them: {names}")
        raise NotPossible("no service is running", cause=_explain_exits(stale), hint="start one with bedplate serve -d")
    for record in alive:
        if record.name == name:
            return record
    names = ", ".join(record.name for record in alive) or "none"
    gone = _explain_exits([record for record in stale if record.name == name])
    raise NotPossible(f"no service named {name} is running", cause=gone, hint=f"running: {names}")


def _explain_exits(stale: list[ServiceRecord]) -> str | None:
    return "; ".join(f"{one.name} (process {one.pid}) exited unexpectedly; its log: {one.log}" for one in stale) or None


# sockets


def get_socket_path(name: str) -> Path:
    """The path of a control socket: under BEDPLATE_HOME, or in the temporary folder if that path is too long."""
    path = get_run_dir() / f"{name}.sock"
    if len(os.fsencode(path)) <= MOST_SOCKET_BYTES:
        return path
    return get_short_socket_path(name)


def get_short_socket_path(name: str) -> Path:
    digest = sha256(f"{get_home()}\0{name}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"bedplate-{os.getuid()}" / f"{digest}.sock"


def ensure_private_folder(folder: Path) -> Path:
    """Create a folder that only this user may open. Raises if it belongs to another user."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ExternalFailure(
                f"{folder} is not a folder that belongs to this user", hint="remove it, or set TMPDIR to another folder"
            )
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise make_disk_failure(error, folder) from error
    return folder
