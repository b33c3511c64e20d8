"""The verbs that only read and compute run where no POSIX module or function exists, as on Windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_POSIX = """
import asyncio, contextlib, ctypes, multiprocessing, os, platform, signal, sqlite3, subprocess, sys, tempfile, types
# These choose their own code for the operating system while they are imported, and could not be imported afterwards.
import click, filelock, platformdirs, psutil, rich.console, typer, yaml

for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "uvloop", "curses"):
    sys.modules[name] = None  # an import raises ImportError
for name in (
    "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "getgid", "getegid", "getpgid", "getsid", "setsid",
    "killpg", "fork", "forkpty", "getloadavg", "nice", "getpriority", "mkfifo", "pread", "preadv", "posix_fadvise",
    "O_DIRECT", "getgroups", "chroot", "ctermid", "wait3", "wait4", "O_NOFOLLOW", "O_DIRECTORY",
):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "alarm", "setitimer", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
platform.uname()
platform.system = lambda: "Windows"
sys.platform = "win32"

winreg = types.ModuleType("winreg")
winreg.HKEY_LOCAL_MACHINE = None
winreg.OpenKey = lambda root, path: contextlib.nullcontext(path)
winreg.QueryValueEx = lambda key, name: ("AMD Ryzen 9 7950X 16-Core Processor ", 1)
sys.modules["winreg"] = winreg

import bedplate.cli
sys.argv = ["bedplate", *sys.argv[1:]]
bedplate.cli.main()
"""
LLAMA, CARD = "meta-llama/Llama-3.1-8B", "RTX 4090"
ROWS = "hardware,engine,model,quantization,metric\nRTX 4090,llama.cpp,Llama 3.1 8B,Q4_K_M,output_tok_s\n"


def run_without_posix(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "BEDPLATE_HOME": str(tmp_path / "home")},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", LLAMA, "--hardware", CARD],
        ["plan", LLAMA, "--hardware", "H100 SXM", "--emit", "compose"],
        ["models", "--search", "smollm2"],
        ["models", "--hardware", CARD, "--search", "llama"],
        ["inspect", "Llama 3.1 8B FP8"],
        ["estimate", "--rows", "{rows}"],
        ["simulate", LLAMA, "--hardware", "H100 SXM", "--requests", "50", "--rate", "5", "--replicas", "1"],
        ["--help"],
        ["schema", "decision"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_verb_runs_without_posix(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    done = run_without_posix(tmp_path, *(word.format(rows=tmp_path / "rows.csv") for word in arguments))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout


def test_the_machine_is_probed_as_a_windows_machine(tmp_path: Path) -> None:
    done = run_without_posix(tmp_path, "probe", "--json")
    assert done.returncode == 0, done.stderr
    machine = json.loads(done.stdout)
    assert (machine["os"], machine["cpu"]["name"]) == ("windows", "AMD Ryzen 9 7950X 16-Core Processor")


def test_the_store_is_written_and_read_without_posix(tmp_path: Path) -> None:
    added = run_without_posix(tmp_path, "keys", "add", "alice", "--json")
    assert added.returncode == 0, added.stderr
    assert json.loads(run_without_posix(tmp_path, "keys", "--json").stdout)["tenants"][0]["name"] == "alice"
    assert run_without_posix(tmp_path, "plan").returncode == 0
