"""Installs a bundle that `bedplate bundle --for` made. It needs only the Python that runs it.

    python3 install.py [--home FOLDER] [--check] [--manifest-sha256 HASH] [--json]

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
HEADER_BYTES = 1 << 20
"""The most that the archive may contain between two files: headers and padding."""
DECOMPRESSOR_BYTES = 100_000_000
DECOMPRESSOR = "zstandard.zip"
TREES = ("engines", "bedplate", "model")
"""The folders in the archive."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,199}")
SHA256 = re.compile(r"[0-9a-f]{64}")
DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
        print(" " + escape_controls(text), file=sys.stderr, flush=True)
        self._last = time.monotonic()

    def tell(self, label: str, done: int, total: int) -> None:
        if time.monotonic() - self._last >= 2:
            self.note(f"{label}: {100 * done // max(1, total)} %")


# the manifest


def find_manifest_problem(manifest: Any) -> str | None:
    """Return why the manifest is not valid, or names a path outside of the bundle's own folders; `None`: it is fine."""
    try:
        check_manifest_fields(manifest)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (TypeError, AttributeError) as error:
        return f"a value has the wrong type: {error}"
    except ValueError as error:
        return str(error)
    return None


def check_manifest_fields(manifest: Manifest) -> None:
    for number, piece in enumerate(manifest["pieces"]):
        check_piece(piece, [f"piece.{number:03}"])
    check_piece(manifest["decompressor"], [DECOMPRESSOR])
    for file in manifest.get("files") or []:
        check_piece(file, ["install.py", "README.txt"])
    digests = "".join(piece["sha256"] for piece in manifest["pieces"])
    own = hashlib.sha256(digests.encode()).hexdigest()[:10]
    require(manifest["id"] == own, "id", manifest["id"])
    require(is_count(manifest["unpacked_bytes"]), "unpacked_bytes", manifest["unpacked_bytes"])
    require(isinstance(manifest["target"], dict), "target", manifest["target"])
    for name in ("system", "machine", "python"):
        require(isinstance(manifest["target"][name], str), "target." + name, manifest["target"][name])
    for name in ("glibc", "cuda", "driver", "capability"):
        value = manifest["target"].get(name)
        require(value is None or isinstance(value, str), "target." + name, value)
    names = []
    for engine in manifest["engines"]:
        check_engine(engine, own)
        names.append(engine["engine"])
    require(len(set(names)) == len(names), "engines", names)
    place = manifest.get("own_place")
    require(place is None or is_place(place, ["bundles"], own), "own_place", place)
    place = manifest.get("model_place")
    require(place is None or is_model_place(place), "model_place", place)


def check_piece(piece: Manifest, names: Iterable[str]) -> None:
    require(piece["name"] in names, "name", piece["name"])
    require(is_count(piece["size_bytes"]), "size_bytes", piece["size_bytes"])
    require(is_match(SHA256, piece["sha256"]), "sha256", piece["sha256"])


def check_engine(engine: Manifest, own: str) -> None:
    for name in ("name", "version", "check"):
        require(isinstance(engine[name], str), "engines." + name, engine[name])
    require(is_match(NAME, engine["engine"]), "engines.engine", engine["engine"])
    require(engine["path"] == "engines/" + engine["engine"], "engines.path", engine["path"])
    require(is_place(engine["place"], ["engines", engine["engine"]], own), "engines.place", engine["place"])
    torch = engine.get("torch")
    require(torch is None or isinstance(torch, str), "engines.torch", torch)
    for library in engine.get("libraries") or []:
        require(is_match(NAME, library), "engines.libraries", library)
    for variable, value in (engine.get("environment") or {}).items():
        require(is_match(VARIABLE, variable), "engines.environment", variable)
        require(isinstance(value, str) and "\0" not in value, "engines.environment", value)


def require(holds: bool, field: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"its field {field} is not valid: {escape_controls(repr(value))[:200]}")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_match(pattern: Any, value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def is_place(place: Any, above: list[str], own: str) -> bool:
    """Whether a path below the home is a folder that belongs to this bundle: its name ends with the bundle's id."""
    *folders, last = place.split("/")
    return folders == above and is_match(NAME, last) and last.endswith("-" + own)


def is_model_place(place: Any) -> bool:
    parts = place.split("/")
    wanted = {"builtin": (3,), "bundled": (3, 4)}.get(parts[1] if parts[0] == "models" and len(parts) > 1 else "", ())
    return len(parts) in wanted and all(is_plain_name(part) for part in parts[2:])


def is_plain_name(name: str) -> bool:
    """Whether the text is the name of one visible file in its folder."""
    return 0 < len(name) < 200 and name[0] not in ".-" and "\\" not in name and escape_controls(name) == name


# checks


def check_pieces(folder: Path, manifest: Manifest, progress: ProgressLines) -> list[str]:
    """Check size and sha256 of the pieces; return the problems."""
    pieces = [*manifest["pieces"], manifest["decompressor"]]
    pieces += [file for file in manifest.get("files") or [] if (folder / file["name"]).exists()]
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

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


class LimitedReader:
    """A stream that fails when the archive has more data than it declares, so that it cannot fill memory or disk."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._left = reader, 0

    def allow(self, count: int) -> None:
        self._left = count + HEADER_BYTES

    def read(self, size: int) -> bytes:
        data: bytes = self._reader.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("it has more data than it declares")
        return data


def load_decompressor(folder: Path, scratch: Path) -> Any:
    """Load zstandard for this Python from the bundle."""
    with zipfile.ZipFile(str(folder / DECOMPRESSOR)) as archive:
        files = archive.infolist()
        if sum(file.file_size for file in files) > DECOMPRESSOR_BYTES:
            raise InstallFailure(3, f"{DECOMPRESSOR} is too large", "check where the bundle is from")
        for file in files:
            package, _, name = file.filename.partition("/")
            if package != "zstandard" or not is_match(NAME, name.lstrip("_")):
                raise InstallFailure(3, f"{DECOMPRESSOR} has another file: {file.filename}", "check its origin")
            (scratch / package).mkdir(parents=True, exist_ok=True)
            (scratch / package / name).write_bytes(archive.read(file))
    sys.path.insert(0, str(scratch))
    try:
        return importlib.import_module("zstandard")
    finally:
        sys.path.remove(str(scratch))


def unpack(folder: Path, manifest: Manifest, into: Path, scratch: Path, progress: ProgressLines) -> None:
    total = sum(piece["size_bytes"] for piece in manifest["pieces"])
    zstandard = load_decompressor(folder, scratch)
    paths = [folder / piece["name"] for piece in manifest["pieces"]]
    try:
        with JoinedPieces(paths, lambda done: progress.tell("unpacking", done, total)) as joined:
            stream = LimitedReader(zstandard.ZstdDecompressor(max_window_size=1 << 30).stream_reader(joined))
            stream.allow(0)
            with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
                extract(archive, stream, into, manifest["unpacked_bytes"])
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError, RecursionError, MemoryError) as error:
        raise InstallFailure(3, f"the bundle cannot be unpacked: {error}", "copy the pieces again") from error


def extract(archive: tarfile.TarFile, stream: LimitedReader, into: Path, most_bytes: int) -> None:
    """Write the files of the archive below `into`, an empty folder. Archives contain plain files and nothing else.

    No member becomes a link, so that a path cannot lead out of the folder, and none replaces another.
    """
    left = most_bytes
    while True:
        stream.allow(0)
        member = archive.next()
        if member is None:
            return
        parts = member.name.split("/")
        if not member.isreg() or member.issparse():
            raise ValueError(f"{member.name} is not a plain file")
        if parts[0] not in TREES or len(parts) < 2 or not all(is_file_name(part) for part in parts):
            raise ValueError(f"the path {member.name} leads out of its folders")
        left -= member.size
        if member.size < 0 or left < 0:
            raise ValueError(f"its files are larger than the {most_bytes} bytes that the manifest declares")
        stream.allow(member.size)
        goal = into.joinpath(*parts)
        goal.parent.mkdir(parents=True, exist_ok=True)
        source = archive.extractfile(member)
        written = 0
        with goal.open("xb") as out:
            while source is not None:
                chunk = source.read(CHUNK_BYTES)
                if not chunk:
                    break
                written += out.write(chunk)
        if written != member.size:
            raise EOFError(f"{member.name} is truncated")
        goal.chmod(0o755 if member.mode & 0o111 else 0o644)


def is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\\" not in name and escape_controls(name) == name


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
    if len(first) > 120 or shlex.quote(str(python)) != str(python):
        first = f"#!/bin/sh\n'''exec' {shlex.quote(str(python))} \"$0\" \"$@\"\n' '''\n"
    for file in sorted(site.glob("*.dist-info/entry_points.txt")):
        points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        points.optionxform = str  # type: ignore[assignment, method-assign]
        points.read(str(file))
        for name, point in points.items("console_scripts") if points.has_section("console_scripts") else ():
            module, _, function = point.partition("[")[0].strip().partition(":")
            program = folder / name
            if not is_match(NAME, name) or not is_match(DOTTED, module) or not is_match(DOTTED, function):
                continue
            if program.exists() or program.is_symlink():
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
        if folder.name != "builtin" or not goal.exists():
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
    return all(read_marker(place) == manifest["id"] for _, place, _ in list_places(manifest, home)) and (
        model is None or (home / model).exists()
    )


def read_marker(place: Path) -> str | None:
    """Return the id of the bundle that a folder was installed from."""
    try:
        return (place / INSTALLED).read_text().strip()
    except (OSError, ValueError):
        return None


def remove_old(place: Path, holder: Path) -> None:
    """Remove an earlier installation; nothing else is ever removed."""
    if not place.exists() and not place.is_symlink():
        return
    if place.is_symlink() or read_marker(place) is None:
        hint = "move it away, or name another folder with --home"
        raise InstallFailure(3, f"{place} exists, and no bundle installed it", hint)
    # Renamed first: an interrupted removal must not leave a folder without its marker.
    place.rename(Path(tempfile.mkdtemp(dir=str(holder))) / "old")


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
                remove_old(place, Path(holder))
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


def escape_controls(text: str) -> str:
    """Replace characters that control a terminal by their escapes."""
    return "".join(letter if letter.isprintable() or letter == "\u00a0" else ascii(letter)[1:-1] for letter in text)


def read_manifest(folder: Path, sha256: str | None = None) -> Manifest:
    try:
        raw = (folder / MANIFEST).read_bytes()
        found = hashlib.sha256(raw).hexdigest()
        if sha256 is not None and found != sha256.lower():
            problem = f"the hash of {folder / MANIFEST} is {found}, not the one that --manifest-sha256 names"
            raise InstallFailure(3, problem, "copy the bundle again from where it was made")
        manifest: Manifest = json.loads(raw.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InstallFailure(
            3, f"cannot read {folder / MANIFEST}: {error}", "copy it to the folder of install.py again"
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != "target-bundle/1":
        raise InstallFailure(3, f"{folder / MANIFEST} has an unknown schema: {schema}")
    problem_found = find_manifest_problem(manifest)
    if problem_found is not None:
        raise InstallFailure(3, f"{folder / MANIFEST} is not safe: {problem_found}", "check where the bundle is from")
    return manifest


def parse_sha256(text: str) -> str:
    if not is_match(SHA256, text.lower()):
        raise argparse.ArgumentTypeError("it is not a SHA-256 hash, 64 hexadecimal digits")
    return text.lower()


def check_home(home: Path) -> None:
    """Refuse a path that the scripts in an environment cannot contain."""
    if any(letter in "'\\" or not letter.isprintable() for letter in str(home)):
        raise InstallFailure(2, f"{home} has a quote, a backslash or a control character", "choose another --home")


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
    parser.add_argument("--manifest-sha256", metavar="HASH", type=parse_sha256, help="the manifest must have this hash")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    folder = Path(__file__).resolve().parent
    home = (options.home or get_default_home()).expanduser().absolute()
    progress = ProgressLines()
    result: dict[str, Any] = {"schema": "installed-bundle/1", "home": str(home), "installed": False, "problems": []}
    code = 0
    try:
        check_home(home)
        manifest = read_manifest(folder, options.manifest_sha256)
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
        print(f"error: {escape_controls(error.message)}", file=sys.stderr)
        for problem in error.problems:
            print(f"  - {escape_controls(problem)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {escape_controls(error.hint)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    elif code == 0 and options.check:
        print("The bundle is complete, and this machine meets its requirements.")
    elif code == 0:
        print(f"Installed to {home}. Next:")
        for command in result["commands"]:
            print("  " + escape_controls(command))
    return code


if __name__ == "__main__":
    sys.exit(main())
