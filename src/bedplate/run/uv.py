"""Runs uv, which fetches packages and makes engine environments, and says in plain words why it failed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from bedplate.errors import OutsideFailed

_NO_NETWORK = re.compile(
    r"dns error|failed to lookup address|Connection refused|Could not connect|Network is unreachable|timed out"
    r"|error sending request|Connect(?:ion)?(?: |_)?(?:reset|error)|tls handshake|No route to host|offline",
    re.IGNORECASE,
)


def uv_binary() -> str:
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
        if found is None:
            raise OutsideFailed("uv is not installed", hint="pip install uv (it is a dependency of bedplate)") from None
        return found


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The user's own settings, those for pip included, less what would lead uv into another environment."""
    env = {k: v for k, v in given.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH")}
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    if "PIP_INDEX_URL" in env and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & env.keys():
        env["UV_DEFAULT_INDEX"] = env["PIP_INDEX_URL"]
    if "PIP_EXTRA_INDEX_URL" in env and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & env.keys():
        env["UV_EXTRA_INDEX_URL"] = env["PIP_EXTRA_INDEX_URL"]
    return env


def python_for_engines() -> str:
    """The interpreter that engine environments are built on: `UV_PYTHON` if the user says so, else our own."""
    return os.environ.get("UV_PYTHON") or getattr(sys, "_base_executable", None) or sys.executable


def run_uv(
    arguments: list[str], what: str, written: Callable[[int], None] | None = None, cwd: Path | None = None
) -> str:
    """Runs uv and returns what it printed. `written` is called now and then with the bytes it has written so far."""
    command = [uv_binary(), "--no-progress", "--color", "never", *arguments]
    try:
        process = subprocess.Popen(
            command,
            env=environment(os.environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise OutsideFailed(f"{what} failed: uv could not be started", cause=str(error)) from error
    finished = threading.Event()
    if written is not None:
        threading.Thread(target=_watch_writes, args=(process.pid, written, finished), daemon=True).start()
    try:
        output, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        finished.set()
    if process.returncode != 0:
        raise _failure(what, output)
    return output


def _watch_writes(pid: int, written: Callable[[int], None], finished: threading.Event) -> None:
    """uv tells its progress only to terminals; what it has written to disk is as good, where the system counts it."""
    import psutil

    while not finished.wait(0.1):
        try:
            written(psutil.Process(pid).io_counters().write_chars)
        except (psutil.Error, AttributeError):
            return


def _failure(what: str, output: str) -> OutsideFailed:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"(error|×|╰─▶|├─▶|Caused by|hint)", line)] or lines
    cause = " ".join(line.lstrip("×╰─▶├ ") for line in causes[-3:])[:500] or "uv gave no reason"
    hint = "see the cause above; settings of uv and pip (UV_*, PIP_INDEX_URL, PIP_FIND_LINKS) are respected"
    if re.search(r"No space left|os error 28", output):
        hint = "free some space, or point BEDPLATE_HOME (and UV_CACHE_DIR) at a larger disk"
    elif re.search(r"[Hh]ash mismatch", output):
        hint = "the index served another file than the one that was pinned; try another index (UV_DEFAULT_INDEX)"
    elif _NO_NETWORK.search(output):
        hint = (
            "a package index must be reachable on the first start; "
            "set UV_DEFAULT_INDEX to a mirror, or UV_FIND_LINKS to a folder with the wheels"
        )
    elif re.search(r"Permission denied|Read-only file system", output):
        hint = "point BEDPLATE_HOME (and UV_CACHE_DIR) at folders that you may write to"
    return OutsideFailed(f"{what} failed", cause=cause, hint=hint)
