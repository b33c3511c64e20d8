"""The steps of a script that `bedplate plan --emit command` wrote. It needs only the Python that runs it.

    script_steps.py once NAME COMMAND...       skips a command that succeeded before, if its result NAME still exists
    script_steps.py write NAME COMMAND...      the command writes NAME.part, which is renamed to NAME when it succeeded
    script_steps.py environment DIR PACKAGE... creates a virtual environment with these packages, once
    script_steps.py programs DIR NAME=FILE...  installs bedplate's programs into the virtual environment DIR

A script calls it by its path in an installation of bedplate without dependencies, so it imports nothing of bedplate.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "engines" / "shipped"


class FailedStep(Exception):
    """A command that failed: its exit code and its words."""

    def __init__(self, code: int, argv: list[str]) -> None:
        super().__init__(code, argv)
        self.code = code
        self.command = shlex.join(argv)


def run_once(name: str, *argv: str) -> None:
    """Run a command, unless it succeeded before and its result `name` still exists."""
    done, command = Path(f"{name}.done"), shlex.join(argv)
    if Path(name).exists() and _read(done) == command:
        return
    done.unlink(missing_ok=True)
    _run(*argv)
    done.write_text(f"{command}\n", encoding="utf-8", errors="surrogateescape")


def write_atomically(name: str, *argv: str) -> None:
    """Run a command that writes `name`.part, and rename that to `name`; nothing is done if `name` exists."""
    if Path(name).exists():
        return
    part = Path(f"{name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)
    _run(*argv)
    part.rename(name)


def make_environment(folder: str, *packages: str) -> None:
    """Create a virtual environment with these packages, unless it has been created with the same ones."""
    mark, listed = Path(folder, ".installed"), shlex.join(packages)
    if _read(mark) == listed:
        return
    _run("uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
    _run("uv", "pip", "install", "--python", f"{folder}/bin/python", *packages)
    mark.write_text(f"{listed}\n", encoding="utf-8")


def install_programs(folder: str, *programs: str) -> None:
    """Copy bedplate's programs, each as NAME=FILE, to the environment's programs; FILE may be a package."""
    target = Path(folder, "bin")
    for program in programs:
        name, _, file = program.partition("=")
        if (SHIPPED / file).is_dir():
            shutil.copytree(SHIPPED / file, target / name, dirs_exist_ok=True)
            continue
        text = (SHIPPED / file).read_text(encoding="utf-8")
        first = "#!" + str(target.absolute() / "python")
        (target / name).write_text(f"{first}\n{text}", encoding="utf-8")
        (target / name).chmod(0o755)


STEPS = {
    "once": run_once,
    "write": write_atomically,
    "environment": make_environment,
    "programs": install_programs,
}


def main(argv: list[str]) -> int:
    if len(argv) < 3 or argv[0] not in STEPS:
        sys.stderr.write(f"{__doc__}")
        return 2
    try:
        STEPS[argv[0]](*argv[1:])
    except FailedStep as failed:
        sys.stderr.write(f"error: exit code {failed.code}: {failed.command}\n")
        sys.stderr.write("hint: start the script again; it continues with this step\n")
        return failed.code
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(*argv: str) -> None:
    code = subprocess.call(argv)
    if code:
        # A command that a signal ended has a negative code; a shell reports 128 more than the signal.
        raise FailedStep(code if code > 0 else 128 - code, list(argv))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n")
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
