"""The verbs that only read and compute run where no POSIX module or function exists, as on Windows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.commands import Answer

WITHOUT_POSIX = """
import asyncio, contextlib, ctypes, io, json, multiprocessing, os, platform, shutil, signal, sqlite3, subprocess, sys
import tempfile, traceback, types
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
# Since Python 3.12, `which` asks Windows whether to search the current folder.
shutil._win_path_needs_curdir = lambda command, mode: False

import bedplate.cli


def run(words):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["bedplate", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            bedplate.cli.main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = 1
            traceback.print_exc()
    return {"code": code or 0, "out": out.getvalue(), "err": err.getvalue()}


print(json.dumps([run(words) for words in json.load(sys.stdin)]))
"""
LLAMA, CARD = "meta-llama/Llama-3.1-8B", "RTX 4090"
ROWS = "hardware,engine,model,quantization,metric\nRTX 4090,llama.cpp,Llama 3.1 8B,Q4_K_M,output_tok_s\n"


def run_without_posix(home: Path, *commands: list[str]) -> list[Answer]:
    """The commands one after the other, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env={**os.environ, "BEDPLATE_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return [Answer(**answer) for answer in json.loads(done.stdout)]


VERBS = [
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
]


def test_verbs_run_without_posix(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    commands = [[word.format(rows=tmp_path / "rows.csv") for word in words] for words in VERBS]
    for words, answer in zip(VERBS, run_without_posix(tmp_path / "home", *commands), strict=True):
        assert (answer.code, "Traceback" in answer.err) == (0, False), (words, answer.err)
        assert answer.out, words


def test_the_machine_is_probed_as_a_windows_machine(tmp_path: Path) -> None:
    (done,) = run_without_posix(tmp_path / "home", ["probe", "--json"])
    assert done.code == 0, done.err
    machine = json.loads(done.out)
    assert (machine["os"], machine["cpu"]["name"]) == ("windows", "AMD Ryzen 9 7950X 16-Core Processor")


def test_the_store_is_written_and_read_without_posix(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (added,) = run_without_posix(home, ["keys", "add", "alice", "--json"])
    assert added.code == 0, added.err
    # What one process wrote, another reads.
    listed, planned = run_without_posix(home, ["keys", "--json"], ["plan"])
    assert json.loads(listed.out)["tenants"][0]["name"] == "alice"
    assert planned.code == 0
