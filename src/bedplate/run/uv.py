"""Runs uv, which downloads packages and creates engine environments, and explains its errors."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from bedplate.errors import ExternalFailure
from bedplate.run.child import run_child
from bedplate.run.transport import refuse_plain_indexes
from bedplate.values.decision import Device

_NO_NETWORK = re.compile(
    r"dns error|failed to lookup address|Connection refused|Could not connect|Network is unreachable|timed out"
    r"|error sending request|Connect(?:ion)?(?: |_)?(?:reset|error)|tls handshake|No route to host"
    r"|network was disabled",
    re.IGNORECASE,
)
_REASON = re.compile(r"\s*(?:error:|×|cause:|Caused by:|├─▶|╰─▶)\s*")
"""The beginning of a line in uv's chain of causes; it differs between versions."""
SOURCE_VARIABLE = "BEDPLATE_ALLOW_SOURCE_BUILDS"
_TORCH = re.compile(r"torch(?:==(?P<pin>[\w.]+))?(?![\w.-])")
"""PyTorch as a requirement, with its pin if it has one."""
_OTHER_ENVIRONMENT_VARIABLES = frozenset(["VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH"])


class WheelFolder(NamedTuple):
    """A folder of packages that replaces the package index on an air-gapped site."""

    folder: Path
    pinned: Mapping[str, Path]
    """The requirements file of each engine, with versions and hashes."""


_only: ContextVar[WheelFolder | None] = ContextVar("wheels", default=None)


@contextlib.contextmanager
def install_only_from(wheels: WheelFolder) -> Iterator[None]:
    """Within the block, packages are installed only from this folder; uv opens no connection."""
    before = _only.set(wheels)
    try:
        yield
    finally:
        _only.reset(before)


def list_pinned_packages(engine_id: str) -> list[str] | None:
    """Arguments of `uv pip install` for an engine from the folder of wheels; `None` if there is no such folder."""
    wheels = _only.get()
    if wheels is None:
        return None
    if engine_id not in wheels.pinned:
        raise ExternalFailure(
            f"the bundle has no packages for {engine_id}",
            cause=f"it has packages for {', '.join(wheels.pinned) or 'no engine'}, and no package index is used",
            hint=f"where a package index is reachable, create a bundle with: bedplate bundle --engine {engine_id}",
        )
    return ["--no-deps", "--require-hashes", "--requirement", str(wheels.pinned[engine_id])]


_READS_SYSCONFIG = threading.Lock()
"""Python before 3.12 shows the variables of sysconfig to other threads while it reads them for the first time."""


def read_sysconfig() -> dict[str, str | int | None]:
    """The variables of sysconfig, also where several threads ask first: engines are installed beside downloads."""
    with _READS_SYSCONFIG:
        return sysconfig.get_config_vars()


def find_uv() -> str:
    read_sysconfig()  # uv reads it too
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
        if found is None:
            raise ExternalFailure(
                "uv is not installed", hint="pip install uv (it is a dependency of bedplate)"
            ) from None
        return found


def build_uv_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The user's settings, including those for pip, without variables that would select another environment."""
    env = {k: v for k, v in given.items() if k not in _OTHER_ENVIRONMENT_VARIABLES}
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", ",".join(env["PIP_FIND_LINKS"].split()))
    if "PIP_INDEX_URL" in env and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & env.keys():
        env["UV_DEFAULT_INDEX"] = env["PIP_INDEX_URL"]
    if "PIP_EXTRA_INDEX_URL" in env and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & env.keys():
        env["UV_EXTRA_INDEX_URL"] = env["PIP_EXTRA_INDEX_URL"]
    if "PIP_TRUSTED_HOST" in env:
        env.setdefault("UV_INSECURE_HOST", env["PIP_TRUSTED_HOST"])
    if "PIP_CERT" in env:
        env.setdefault("SSL_CERT_FILE", env["PIP_CERT"])
    return env


def list_build_options() -> list[str]:
    """Options of `uv pip` that refuse source packages: building one runs its code, and needs a compiler."""
    return [] if os.environ.get(SOURCE_VARIABLE) else ["--only-binary", ":all:"]


def find_engine_python() -> str:
    """The interpreter for engine environments: `UV_PYTHON` if it is set, otherwise bedplate's own."""
    return os.environ.get("UV_PYTHON") or getattr(sys, "_base_executable", None) or sys.executable


def choose_torch_backend(packages: Sequence[str], device: Device) -> str | None:
    """The build of PyTorch for a device; `None` if there is only one, or PyTorch is not among the packages.

    The package index has the CUDA build, which is gigabytes large and useless on a machine without such a GPU.
    """
    if sys.platform == "darwin" or not any(_TORCH.match(package) for package in packages):
        return None
    return os.environ.get("UV_TORCH_BACKEND") or ("cpu" if device == "cpu" else "auto")


def build_torch_arguments(packages: Sequence[str], backend: str | None, python: str) -> list[str]:
    """Arguments of `uv pip install` that select that build: a local wheel, otherwise PyTorch's own index."""
    if backend is None:
        return list(packages)
    named = next(found for package in packages if (found := _TORCH.match(package)))
    if backend == "cpu" and (wheel := _find_cpu_wheel(named["pin"], python)):
        return [f"torch=={wheel}" if _TORCH.match(package) else package for package in packages]
    return ["--torch-backend", backend, *packages]


def _find_cpu_wheel(pin: str | None, python: str) -> str | None:
    """The version of a PyTorch wheel for this Python and machine in UV_FIND_LINKS; `pin`: only this version."""
    major, minor = python.split(".")[:2]
    version = re.escape(pin) if pin else r"[0-9.]+"
    pattern = re.compile(
        rf"torch-(?P<version>{version}\+cpu)-cp{major}{minor}-\w+-\w*{platform.system().lower()[:5]}\w*"
        rf"{re.escape(platform.machine().lower())}\.whl"
    )
    for folder in build_uv_environment(os.environ).get("UV_FIND_LINKS", "").split(","):
        path = Path(folder.strip().removeprefix("file://")).expanduser()
        for file in sorted(path.glob("torch-*.whl")) if folder.strip() and path.is_dir() else ():
            if found := pattern.fullmatch(file.name.replace("%2B", "+")):
                return found["version"]
    return None


def run_uv(arguments: list[str], what: str, folder: Path, written: Callable[[int], None] | None = None) -> None:
    """Runs uv in `folder`. `written` is called regularly with the bytes that it has written so far."""
    # Without --project, uv would read a uv.toml or pyproject.toml of the current directory.
    command = [find_uv(), "--no-progress", "--color", "never", "--project", str(folder), *arguments]
    env = build_uv_environment(os.environ)
    if (wheels := _only.get()) is None:
        refuse_plain_indexes(env)
    else:
        command.append("--offline")
        if arguments[:2] == ["pip", "install"]:
            command += ["--no-index", "--find-links", str(wheels.folder)]
    if os.environ.get("PIP_NO_INDEX", "0").lower() in ("1", "true", "yes", "on") and arguments[:2] == [
        "pip",
        "install",
    ]:
        command.append("--no-index")
    tick = None if written is None else lambda pid: report_written_bytes(pid, written)
    try:
        ended = run_child(command, env, tick)
    except OSError as error:
        raise ExternalFailure(f"{what} failed: cannot start uv", cause=str(error)) from error
    if ended.code != 0:
        raise explain_failure(what, ended.output)


def report_written_bytes(root: int, written: Callable[[int], None]) -> None:
    """Estimates uv's progress, which it shows only on terminals, from the bytes that its processes have written."""
    import psutil

    try:
        top = psutil.Process(root)
        counts = [process.io_counters().write_chars for process in (top, *top.children(recursive=True))]
    except (psutil.Error, AttributeError):
        return
    written(sum(counts))


def is_network_failure(output: str) -> bool:
    """Whether uv's output says that it reached no index."""
    return _NO_NETWORK.search(" ".join(output.split())) is not None


def parse_reasons(output: str) -> list[str]:
    """uv's chain of causes, the outermost first."""
    found: list[str] = []
    continues = False
    for line in output.splitlines():
        if mark := _REASON.match(line):
            found.append(line[mark.end() :].strip())
            continues = True
        elif continues and line.startswith((" ", "│")) and line.strip(" │"):
            found[-1] += " " + line.strip(" │")
        else:
            continues = False  # after a blank line come details and uv's own hints
    return [text.rstrip(":") for text in found]


def explain_failure(what: str, output: str) -> ExternalFailure:
    """Converts uv's output to an error with a hint."""
    why = [text for text in parse_reasons(output) if not text.startswith("error sending request")]
    why = why or output.strip().splitlines()[-1:] or ["uv gave no reason"]
    cause = ": ".join(dict.fromkeys([*why[:2], why[-1]]))
    if len(cause) > 600:
        cause = f"{cause[:300]} … {cause[-300:]}"
    hint = "bedplate uses the settings of uv and pip (UV_DEFAULT_INDEX, PIP_INDEX_URL, UV_FIND_LINKS …)"
    output = " ".join(output.split())  # older versions break lines within sentences
    if re.search(r"No space left|os error 28|Disk quota exceeded", output):
        hint = "free some space, or set BEDPLATE_HOME (and UV_CACHE_DIR) to a folder on a larger disk"
    elif re.search(r"[Hh]ash mismatch", output):
        hint = "the package index has a different file than the pinned one; use another index (UV_DEFAULT_INDEX)"
    elif re.search(r"no usable wheels|has no wheels|no wheels? with|building from source is disabled", output):
        hint = f"the package index has no wheel for this machine; {SOURCE_VARIABLE}=1 permits builds from source"
    elif _NO_NETWORK.search(output):
        hint = (
            "the first start needs a package index; set UV_DEFAULT_INDEX to a mirror, "
            "or UV_OFFLINE=1 and UV_FIND_LINKS to a folder with the wheels"
        )
    elif re.search(r"Permission denied|Read-only file system|Failed to initialize cache", output):
        hint = "set BEDPLATE_HOME (and UV_CACHE_DIR) to writable folders"
    elif "requirements are unsatisfiable" in output:
        here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        hint = f"the package index has no such package for {here}; use another index (UV_DEFAULT_INDEX)"
    return ExternalFailure(f"{what} failed", cause=cause, hint=hint)
