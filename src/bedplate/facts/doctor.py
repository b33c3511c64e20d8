"""The report of `bedplate doctor` for bug reports, without keys, passwords, prompts and other users' processes."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bedplate._version import __version__
from bedplate.facts.cgroup import read_text
from bedplate.values import Hardware, Record, replace_fields
from bedplate.values.units import format_memory, format_size

DEFAULT_PORT = 8080
LEAST_DISK_BYTES = 5_000_000_000
LEAST_DISK_SHARE = 0.05
LEAST_MEMORY_BYTES = 1 << 30
SWAP_IN_USE_BYTES = 1 << 30
MOST_LOGS, LOG_LINES, LOG_WIDTH = 2, 12, 200
LOG_TAIL_BYTES = 64 << 10

SETTINGS = re.compile(
    r"(UV|PIP|HF|HUGGINGFACE|HUGGING_FACE|BEDPLATE)_[A-Z0-9_]+"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|(HTTP|HTTPS|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|NO_COLOR",
    re.IGNORECASE,
)
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|USER|COOKIE|NETRC", re.IGNORECASE)
# Key formats of well-known services, and any value after a name that announces a key.
SECRET_TEXT = re.compile(
    r"\b(?:hf|sk|pk|ghp|gho|ghs|glpat|pypi|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{12,}"
    r"|(?i:(?<=bearer )|(?<=api-key )|(?<=api_key=)|(?<=token=)|(?<=password=))[^\s\"',;]+"
)
# Greedy up to the last @, because passwords may contain any other separator.
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>\S*@)?(?P<host>[^\s/?#,;\"'@]*)(?P<rest>[^\s,;\"']*)")
# Lines in which an engine repeats a request. Timings mention prompts too, but do not quote them.
QUOTES_A_REQUEST = re.compile(r"\"(prompt|content|messages|input|text)\"|\bprompt\b\s*[:=]\s*['\"<]|<\|", re.IGNORECASE)


class EnvironmentSetting(Record, frozen=True, kw_only=True):
    name: str
    value: str
    """The value, without any part that may contain a secret."""


class EngineCheck(Record, frozen=True, kw_only=True):
    """A check of one installed engine."""

    engine: str
    version: str
    python: str | None = None
    disk_bytes: int | None = None
    failure: str | None = None
    """Why it no longer runs; `None`: it runs."""


class FoundModel(Record, frozen=True, kw_only=True):
    name: str
    origin: str
    bytes: int


class LogTail(Record, frozen=True, kw_only=True):
    name: str
    lines: tuple[str, ...]


class DoctorProblem(Record, frozen=True, kw_only=True):
    kind: Literal["problem", "remark"]
    """A remark explains; a problem should be fixed."""
    what: str
    hint: str | None = None


class DoctorReport(Record, frozen=True, kw_only=True):
    schema: Literal["doctor/1"] = "doctor/1"
    bedplate: str
    python: str
    uv: str | None
    system: str
    hardware: Hardware
    """Without the serial numbers of cards and other users' processes."""
    home: str
    home_writable: bool
    swap_used_bytes: int | None = None
    port_free: bool
    engines: tuple[EngineCheck, ...] = ()
    models: tuple[FoundModel, ...] = ()
    settings: tuple[EnvironmentSetting, ...] = ()
    logs: tuple[LogTail, ...] = ()
    problems: tuple[DoctorProblem, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return not any(problem.kind == "problem" for problem in self.problems)


def make_report(
    hardware: Hardware,
    *,
    home: Path,
    uv: str | None,
    engines: Sequence[EngineCheck] = (),
    models: Sequence[FoundModel] = (),
    environment: Mapping[str, str] | None = None,
    prefixes: Collection[str] = (),
    root: Path = Path("/"),
) -> DoctorReport:
    """Assemble the report. The caller has already checked the engines and uv.

    `prefixes` are those of the engines' environment variables.
    """
    environment = os.environ if environment is None else environment
    report = DoctorReport(
        bedplate=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        uv=uv,
        system=f"{hardware.os_version or hardware.os}, {platform.release()}, {platform.machine()}",
        hardware=anonymize(hardware),
        home=shorten_path(str(home)),
        home_writable=is_writable(home),
        swap_used_bytes=read_swap_used(root),
        port_free=is_port_free(DEFAULT_PORT),
        engines=tuple(engines),
        models=tuple(models),
        settings=list_settings(environment, prefixes),
        logs=tuple(read_log_tails(home / "logs")),
    )
    return replace_fields(report, problems=tuple(find_problems(report)))


def find_problems(report: DoctorReport) -> Iterable[DoctorProblem]:
    """Common problems that can be detected from the report."""
    hardware = report.hardware
    if not report.home_writable:
        yield _make_problem(f"{report.home} is not writable", "point BEDPLATE_HOME at a writable folder")
    disk = hardware.disk
    if disk is not None and disk.free_bytes < max(LEAST_DISK_BYTES, LEAST_DISK_SHARE * disk.total_bytes):
        what = (
            f"the disk of {report.home} is nearly full: {format_size(disk.free_bytes)} free of "
            f"{format_size(disk.total_bytes)}"
        )
        yield _make_problem(
            what, "free some space (bedplate engines remove ID), or point BEDPLATE_HOME at a larger disk"
        )
    if report.uv is None:
        yield _make_problem("uv is missing; bedplate installs engines with it", "pip install uv")
    for engine in report.engines:
        if engine.failure is not None:
            what = f"{engine.engine} {engine.version} no longer runs: {engine.failure}"
            yield _make_problem(what, f"bedplate engines remove {engine.engine}; the next start installs it again")
    ram = hardware.memory
    if ram.available_bytes < LEAST_MEMORY_BYTES:
        yield _make_problem(
            f"only {format_memory(ram.available_bytes)} of memory is free",
            "stop other programs, or use a smaller model",
        )
    if report.swap_used_bytes is not None and report.swap_used_bytes >= SWAP_IN_USE_BYTES:
        what = f"{format_memory(report.swap_used_bytes)} of memory is swapped out to disk"
        yield _make_problem(
            what, "swapping makes an engine slower by orders of magnitude; free memory before you serve"
        )
    if ram.limit_bytes is not None:
        what = (
            f"this container may use {format_memory(ram.limit_bytes)} of the machine's "
            f"{format_memory(ram.total_bytes)} of memory"
        )
        yield _make_remark(what, "raise the container's memory limit to use more of it")
    if hardware.cpu.allowed_cores < 1:
        yield _make_problem(
            f"only {hardware.cpu.allowed_cores:.2g} CPU cores are allowed", "raise the container's CPU limit"
        )
    for note in hardware.notes:
        driver = re.search(r"NVIDIA.*(driver|library|not read)|ROCm cannot use", note)
        yield _make_problem(note, None) if driver else _make_remark(note, None)
    if not report.port_free:
        what = f"port {DEFAULT_PORT}, the default of serve, is in use"
        yield _make_remark(what, "ignore this if bedplate uses it; otherwise choose another: bedplate serve --port N")


def list_settings(environment: Mapping[str, str], prefixes: Collection[str] = ()) -> tuple[EnvironmentSetting, ...]:
    """The environment variables that affect bedplate and its engines, without secret values."""
    return tuple(
        EnvironmentSetting(name=name, value=hide_secrets(name, value))
        for name, value in sorted(environment.items())
        if SETTINGS.fullmatch(name) or name.upper().startswith(tuple(prefixes))
    )


def hide_secrets(name: str, value: str) -> str:
    """A variable's value as it may be shown to anyone."""
    if not value:
        return "(empty)"
    # A flag reveals nothing even if its name contains a word like KEY.
    if value.lower() in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        return value
    if SECRET_NAME.search(name):
        return "(set, hidden)"
    return shorten_path(redact(value))


def redact(text: str) -> str:
    """Text without passwords and keys. URLs keep only their host, because tokens also occur in paths and queries."""

    def keep_host(match: re.Match[str]) -> str:
        user, rest = "…@" if match["user"] else "", match["rest"]
        return f"{match['scheme']}{user}{match['host']}{'/…' if len(rest) > 1 else rest}"

    return SECRET_TEXT.sub("…", URL.sub(keep_host, text))


def shorten_path(text: str) -> str:
    """Paths with ~ for the user's home folder, so that a report contains no user name."""
    try:
        own = str(Path.home())
    except (RuntimeError, OSError):
        return text
    return text.replace(own, "~") if len(own) > 1 else text


def anonymize(hardware: Hardware) -> Hardware:
    cards = tuple(replace_fields(card, uuid=None, pci_address=None, processes=()) for card in hardware.accelerators)
    disk = replace_fields(hardware.disk, path=shorten_path(hardware.disk.path)) if hardware.disk is not None else None
    return replace_fields(hardware, accelerators=cards, disk=disk)


def read_log_tails(folder: Path) -> Iterable[LogTail]:
    """The ends of the newest engine logs, without lines that quote a request."""
    try:
        logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for path in logs[:MOST_LOGS]:
        lines = [line for line in _read_end(path).splitlines() if line.strip() and not QUOTES_A_REQUEST.search(line)]
        shown = tuple(shorten_path(redact(line))[:LOG_WIDTH] for line in lines[-LOG_LINES:])
        yield LogTail(name=path.name, lines=shown)


def read_swap_used(root: Path = Path("/")) -> int | None:
    """`None` if the system does not report it."""
    text = read_text(root / "proc/meminfo")
    if text is None:
        return _read_psutil_swap()
    values = dict(re.findall(r"^(SwapTotal|SwapFree):\s+([0-9]{1,15}) kB", text, re.MULTILINE))
    if len(values) < 2:
        return None
    return max(0, int(values["SwapTotal"]) - int(values["SwapFree"])) * 1024


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        if sys.platform != "win32":  # as servers do: connections in TIME_WAIT do not block the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_writable(folder: Path) -> bool:
    """Whether the folder is writable or could be created. Nothing is created."""
    for path in (folder, *folder.parents):
        if path.exists():
            return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    return False


def _read_psutil_swap() -> int | None:
    import psutil

    try:
        return int(psutil.swap_memory().used)
    except (OSError, RuntimeError):
        return None


def _read_end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _make_problem(what: str, hint: str | None) -> DoctorProblem:
    return DoctorProblem(kind="problem", what=what, hint=hint)


def _make_remark(what: str, hint: str | None) -> DoctorProblem:
    return DoctorProblem(kind="remark", what=what, hint=hint)
