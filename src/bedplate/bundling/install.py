"""Installs a bundle that `bedplate bundle --for` made. It needs only the Python that runs it.

    python3 install.py [--home FOLDER] [--check] [--json]

For an overlay, run it with the Python that has PyTorch. Everything that is missing on this machine is reported before
anything is unpacked. Exit codes: 0 installed, 1 not possible on this machine, 2 usage error, 3 external failure.
"""

# It must run on Python 3.7 and later, so that it can report a wrong version.
from __future__ import annotations

import argparse
import concurrent.futures
import configparser
import ctypes
import hashlib
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, BinaryIO

    Manifest = dict[str, Any]  # a JSON object of the manifest

MANIFEST = "bedplate-bundle.json"
INSTALLED = ".bedplate-bundle"
"""Marker of a complete folder: written before the folder is renamed to its place."""
CHUNK_BYTES = 1 << 20
SLACK_BYTES = 200_000_000
CHECK_LIMIT_S = 900


class InstallFailure(Exception):
    """An error with exit code, hint and a list of problems."""

    def __init__(self, code: int, message: str, hint: str | None = None, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.problems = code, message, hint, list(problems)


class ProgressLines:
    """Progress lines on stderr, at most one every two seconds per step."""

    def __init__(self) -> None:
        self._last = 0.0

    def note(self, text: str) -> None:
        print(" " + text, file=sys.stderr, flush=True)
        self._last = time.monotonic()

    def tell(self, label: str, done: int, total: int) -> None:
        if time.monotonic() - self._last >= 2:
            self.note(f"{label}: {100 * done // max(1, total)} %")


# checks


def check_pieces(folder: Path, manifest: Manifest, progress: ProgressLines) -> list[str]:
    """Check size and sha256 of the pieces; return the problems."""
    pieces = [*manifest["pieces"], manifest["decompressor"]]
    total, done = sum(piece["size_bytes"] for piece in pieces), 0
    problems: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda piece: (piece, find_piece_problem(folder, piece)), pieces)
        for piece, problem in found:
            done += piece["size_bytes"]
            progress.tell("checking the pieces", done, total)
            if problem is not None:
                problems.append("{} {}".format(piece["name"], problem))
    return problems


def find_piece_problem(folder: Path, piece: Manifest) -> str | None:
    path = folder / piece["name"]
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != piece["size_bytes"]:
        return "has {} bytes instead of {}".format(path.stat().st_size, piece["size_bytes"])
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return None if digest.hexdigest() == piece["sha256"] else "is damaged: its sha256 differs"


def check_target(manifest: Manifest, home: Path) -> list[str]:
    """Return what this machine lacks, one line each."""
    target = manifest["target"]
    problems: list[str] = []
    system, machine = platform.system().lower(), platform.machine().lower()
    if (system, machine) != (target["system"], target["machine"]):
        problems.append("the bundle is for {system} on {machine}".format(**target) + f"; this is {system} on {machine}")
    if get_python_version() != target["python"]:
        problems.append(
            "Python {} is required; {} is Python {}".format(target["python"], sys.executable, platform.python_version())
        )
    if importlib.util.find_spec("venv") is None:
        problems.append("this Python has no venv module (on Debian and Ubuntu, install the package python3-venv)")
    glibc = platform.libc_ver()[1]
    if target.get("glibc") and glibc and parse_numbers(glibc) < parse_numbers(target["glibc"]):
        problems.append("glibc {} or newer is required; this system has {}".format(target["glibc"], glibc))
    torches = {engine["torch"]: engine["name"] for engine in manifest["engines"] if engine.get("torch")}
    for version, name in torches.items():
        problems += find_torch_problems(version, target.get("cuda"), name)
    if target.get("cuda") and manifest["engines"]:
        problems += find_gpu_problems(target)
    folder = find_existing_parent(home)
    needed = 0 if is_installed(manifest, home) else manifest["unpacked_bytes"] + SLACK_BYTES
    free = shutil.disk_usage(str(folder)).free
    if free < needed:
        problems.append(f"{format_size(needed)} of disk space is required in {folder}; {format_size(free)} is free")
    if not os.access(str(folder), os.W_OK):
        problems.append(f"{folder} cannot be written to; name another folder with --home")
    return problems


def find_torch_problems(version: str, cuda: str | None, engine: str) -> list[str]:
    """Compare the version in torch/version.py: importing torch takes seconds."""
    needed = f"{engine} requires PyTorch {version} for CUDA {cuda}"
    folder = find_torch_folder()
    if folder is None:
        return [f"{needed}; {sys.executable} has none (run install.py with the Python that has PyTorch)"]
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        text = ""
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    found_cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    own = found.group(1) if found else "unknown"
    problems = []
    if own.partition("+")[0] != version:
        problems.append(f"{needed}; {folder} is version {own}")
    if cuda and (found_cuda is None or found_cuda.group(1).partition(".")[0] != cuda):
        built = "CUDA " + found_cuda.group(1) if found_cuda else "no CUDA"
        problems.append(f"{needed}; {folder} was built for {built}")
    return problems


def find_torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def find_gpu_problems(target: Manifest) -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"an NVIDIA GPU is required, but nvidia-smi cannot run: {error}"]
    text = done.stdout.decode(errors="replace").strip()
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    if done.returncode != 0 or not rows or any(len(row) != 3 for row in rows):
        return ["an NVIDIA GPU is required, but nvidia-smi failed: {}".format((text.splitlines() or ["no output"])[0])]
    problems = []
    driver = rows[0][1]
    if target.get("driver") and parse_numbers(driver) < parse_numbers(target["driver"]):
        problems.append(
            "CUDA {} requires driver {} or newer; this machine has {}".format(target["cuda"], target["driver"], driver)
        )
    wanted = target.get("capability")
    others = sorted({f"{row[0]} ({row[2]})" for row in rows if wanted and row[2] != wanted})
    if others:
        problems.append(
            "the bundle only has code for compute capability {}; this machine has {}".format(wanted, ", ".join(others))
        )
    return problems


# installation


class JoinedPieces(io.RawIOBase):
    """Reads the pieces as one stream."""

    def __init__(self, paths: Iterable[Path], tell: Callable[[int], None]) -> None:
        self._paths, self._tell, self._done = list(paths), tell, 0
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while True:
            if self._file is None:
                if not self._paths:
                    return b""
                self._file = self._paths.pop(0).open("rb")
            data = self._file.read(size)
            if data:
                self._done += len(data)
                self._tell(self._done)
                return data
            self._file.close()
            self._file = None


def load_decompressor(folder: Path, manifest: Manifest, scratch: Path) -> Any:
    """Load zstandard for this Python from the bundle."""
    with zipfile.ZipFile(str(folder / manifest["decompressor"]["name"])) as archive:
        archive.extractall(str(scratch))  # noqa: S202
    sys.path.insert(0, str(scratch))
    try:
        return importlib.import_module("zstandard")
    finally:
        sys.path.remove(str(scratch))


def unpack(folder: Path, manifest: Manifest, into: Path, scratch: Path, progress: ProgressLines) -> None:
    total = sum(piece["size_bytes"] for piece in manifest["pieces"])
    zstandard = load_decompressor(folder, manifest, scratch)
    paths = [folder / piece["name"] for piece in manifest["pieces"]]
    joined = JoinedPieces(paths, lambda done: progress.tell("unpacking", done, total))
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 30).stream_reader(joined)
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(str(into))  # noqa: S202
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise InstallFailure(3, f"the bundle cannot be unpacked: {error}", "copy the pieces again") from error


def make_environment(tree: Path, place: Path, engine: Manifest | None = None) -> None:
    """Turn an unpacked tree into an environment that works after it is renamed to `place`."""
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(tree)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace").strip().splitlines()
        raise InstallFailure(3, "cannot create an environment in {}: {}".format(tree, (output or ["no output"])[-1]))
    site = tree / "lib" / ("python" + get_python_version()) / "site-packages"
    if engine is not None:
        lines = []
        torch = find_torch_folder() if engine.get("torch") else None
        if torch is not None:
            lines.append(str(torch.parent))
        for name, value in sorted(engine.get("environment", {}).items()):
            lines.append(f"import os; os.environ.setdefault({name!r}, {value!r})")
        (site / "bedplate-overlay.pth").write_text("".join(line + "\n" for line in lines))
    write_programs(site, tree / "bin", place / "bin" / "python")


def write_programs(site: Path, folder: Path, python: Path) -> None:
    """Write the console scripts of the packages. They need the guard: an engine may re-run its script in a child."""
    first = f"#!{python}\n"
    if len(first) > 120 or " " in first:
        first = f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    for file in sorted(site.glob("*.dist-info/entry_points.txt")):
        points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        points.optionxform = str  # type: ignore[assignment, method-assign]
        points.read(str(file))
        for name, point in points.items("console_scripts") if points.has_section("console_scripts") else ():
            module, _, function = point.partition("[")[0].strip().partition(":")
            program = folder / name
            if program.exists() or not function or "/" in name:
                continue
            program.write_text(
                "{}import sys\nfrom {} import {}\nif __name__ == '__main__':\n    sys.exit({}())\n".format(
                    first, module, function.partition(".")[0], function
                )
            )
            program.chmod(0o755)


def move_model(source: Path, place: Path) -> None:
    """Move the model's files to `place`: a GGUF file, or a folder."""
    folder = place.parent if place.suffix.lower() == ".gguf" else place
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        goal = folder / file.relative_to(source)
        goal.parent.mkdir(parents=True, exist_ok=True)
        file.replace(goal)


def list_places(manifest: Manifest, home: Path) -> list[tuple[str, Path, Manifest | None]]:
    """List (tree in the archive, place, engine) of every environment."""
    found: list[tuple[str, Path, Manifest | None]] = [
        (engine["path"], home / engine["place"], engine) for engine in manifest["engines"]
    ]
    if manifest.get("own_place"):
        found.append(("bedplate", home / manifest["own_place"], None))
    return found


def is_installed(manifest: Manifest, home: Path) -> bool:
    model = manifest.get("model_place")
    return all((place / INSTALLED).is_file() for _, place, _ in list_places(manifest, home)) and (
        model is None or (home / model).exists()
    )


def install(folder: Path, manifest: Manifest, home: Path, progress: ProgressLines) -> None:
    if is_installed(manifest, home):
        progress.note("bundle {} is already unpacked".format(manifest["id"]))
    else:
        for leftover in home.glob(".installing-*"):
            shutil.rmtree(str(leftover), ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".installing-", dir=str(home)) as holder:
            staging = Path(holder) / "contents"
            staging.mkdir()
            progress.note("unpacking {} to {}".format(format_size(manifest["unpacked_bytes"]), home))
            unpack(folder, manifest, staging, Path(holder) / "zstandard", progress)
            for path, place, engine in list_places(manifest, home):
                tree = staging / path
                make_environment(tree, place, engine)
                (tree / INSTALLED).write_text(manifest["id"] + "\n")
                shutil.rmtree(str(place), ignore_errors=True)
                place.parent.mkdir(parents=True, exist_ok=True)
                tree.rename(place)
                compile_bytecode(place, progress)
            if manifest.get("model_place"):
                move_model(staging / "model", home / manifest["model_place"])
    if manifest.get("own_place"):
        link_program(home / manifest["own_place"] / "bin" / "bedplate", home / "bin" / "bedplate")


def compile_bytecode(place: Path, progress: ProgressLines) -> None:
    """Saves the compilation at every start, also where the environment forbids Python to write bytecode.

    Packages carry files that are not valid for this Python, so a failure here means nothing.
    """
    progress.note(f"compiling bytecode in {place}")
    command = [str(place / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(place / "lib")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        subprocess.run(
            command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CHECK_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        progress.note(f"bytecode was not compiled, so engines start more slowly: {error}")


def link_program(program: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f".{place.name}.{os.getpid()}")
    new.symlink_to(program)
    new.replace(place)


def register(manifest: Manifest, home: Path, progress: ProgressLines) -> list[str]:
    """Register each engine with bedplate; return the commands that the user must run."""
    bedplate = home / "bin" / "bedplate"
    program = str(bedplate) if bedplate.exists() else shutil.which("bedplate")
    left: list[str] = []
    for engine in manifest["engines"]:
        place = home / engine["place"]
        python = place / "bin" / "python"
        variables = dict(os.environ, BEDPLATE_HOME=str(home))
        missing = [name for name in engine.get("libraries", ()) if not can_load(name)]
        if missing:
            paths = [str(place / "borrowed")] + [path for path in [variables.get("LD_LIBRARY_PATH")] if path]
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        run_check(engine, python, variables, progress)
        command = [program or "bedplate", "engines", "use", engine["engine"], "--python", str(python)]
        if program is None:
            left.append(quote_command(home, command))
            continue
        progress.note("registering {} {}".format(engine["name"], engine["version"]))
        output = run_command(command, variables, "cannot register {}".format(engine["name"]))
        progress.note(output.strip().splitlines()[0] if output.strip() else "registered")
        for name in missing:
            folder = home / "engines" / engine["engine"] / "adopted" / "borrowed"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(place / "borrowed" / name), str(folder / name))
    return left


def run_check(engine: Manifest, python: Path, variables: dict[str, str], progress: ProgressLines) -> None:
    progress.note("checking that {} {} can be imported".format(engine["name"], engine["version"]))
    run_command(
        [str(python), "-c", engine["check"]],
        variables,
        "{} was installed but cannot be imported".format(engine["name"]),
    )


def run_command(command: list[str], variables: dict[str, str], failure: str) -> str:
    try:
        done = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=CHECK_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallFailure(3, f"{failure}: {error}") from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        last = output.strip().splitlines()[-12:] or [f"exit status {done.returncode}"]
        raise InstallFailure(3, failure, "the command was: " + " ".join(command), last)
    return output


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# helpers


def get_python_version() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def parse_numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def format_size(count: int) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} bytes"


def find_existing_parent(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def get_default_home() -> Path:
    """Return the same default as bedplate on Linux."""
    if os.environ.get("BEDPLATE_HOME"):
        return Path(os.environ["BEDPLATE_HOME"])
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bedplate"


def read_manifest(folder: Path) -> Manifest:
    try:
        manifest: Manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InstallFailure(
            3, f"cannot read {folder / MANIFEST}: {error}", "copy it to the folder of install.py again"
        ) from error
    if manifest.get("schema") != "target-bundle/1":
        raise InstallFailure(3, "{} has an unknown schema: {}".format(folder / MANIFEST, manifest.get("schema")))
    return manifest


def check(folder: Path, manifest: Manifest, home: Path, progress: ProgressLines) -> None:
    """Report everything that is missing before anything is unpacked."""
    pieces = [] if is_installed(manifest, home) else check_pieces(folder, manifest, progress)
    target = check_target(manifest, home)
    if pieces:
        hint = f"copy these files to {folder} again, then run install.py again"
        raise InstallFailure(3, "the bundle is incomplete", hint, pieces + target)
    if target:
        hint = "nothing was unpacked; install what is missing, or make another bundle with bedplate bundle --for"
        raise InstallFailure(1, "this machine cannot run the bundle", hint, target)


def list_serve_commands(manifest: Manifest, home: Path) -> list[str]:
    model = home / manifest["model_place"] if manifest.get("model_place") else None
    named = [] if model is None or model.parent.name == "builtin" else [str(model)]
    program = str(home / "bin" / "bedplate")
    return [
        quote_command(home, [program, "serve", *named, "--engine", engine["engine"]]) for engine in manifest["engines"]
    ]


def quote_command(home: Path, command: list[str]) -> str:
    return " ".join(["BEDPLATE_HOME=" + shlex.quote(str(home)), *map(shlex.quote, command)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Installs a bundle of bedplate on this machine, without a network.")
    parser.add_argument("--home", type=Path, help="where to install; default: BEDPLATE_HOME, or ~/.cache/bedplate")
    parser.add_argument("--check", action="store_true", help="check the pieces and this machine; unpack nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    folder = Path(__file__).resolve().parent
    home = (options.home or get_default_home()).expanduser().absolute()
    progress = ProgressLines()
    result: dict[str, Any] = {"schema": "installed-bundle/1", "home": str(home), "installed": False, "problems": []}
    code = 0
    try:
        manifest = read_manifest(folder)
        result["id"] = manifest["id"]
        check(folder, manifest, home, progress)
        result["commands"] = list_serve_commands(manifest, home)
        if not options.check:
            home.mkdir(parents=True, exist_ok=True)
            install(folder, manifest, home, progress)
            result["installed"] = True
            result["commands"] = register(manifest, home, progress) + result["commands"]
    except (InstallFailure, OSError) as caught:
        error = (
            caught
            if isinstance(caught, InstallFailure)
            else InstallFailure(3, f"{caught}", "name another folder with --home")
        )
        code = error.code
        result.update(error=error.message, hint=error.hint, problems=error.problems)
        print(f"error: {error.message}", file=sys.stderr)
        for problem in error.problems:
            print(f"  - {problem}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    elif code == 0 and options.check:
        print("The bundle is complete, and this machine meets its requirements.")
    elif code == 0:
        print(f"Installed to {home}. Next:")
        for command in result["commands"]:
            print(f"  {command}")
    return code


if __name__ == "__main__":
    sys.exit(main())
