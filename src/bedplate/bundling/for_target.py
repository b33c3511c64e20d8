"""Makes a bundle for another platform: resolves and downloads its packages, and runs none of them here."""

from __future__ import annotations

import datetime as dt
import fnmatch
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bedplate import _version
from bedplate.bundling.device_code import clear_unused
from bedplate.bundling.install import DECOMPRESSOR, find_manifest_problem
from bedplate.bundling.texts import write_target_readme
from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.engines import Engine, OverlayRecipe
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.roles import FIRST
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.home import check_free_space
from bedplate.progress import Progress, SilentProgress
from bedplate.run import wheels
from bedplate.run.builtin import FILE as BUILTIN_FILE
from bedplate.run.builtin import NAME as BUILTIN_NAME
from bedplate.run.builtin import fetch_builtin
from bedplate.run.models import find_intended_model
from bedplate.run.uv import find_engine_python, list_build_options, run_uv
from bedplate.values import replace_fields, to_json
from bedplate.values.bundle import (
    MANIFEST,
    BundledEngine,
    BundlePiece,
    BundleTarget,
    PackedForTarget,
    TargetBundle,
)
from bedplate.values.intent import ModelNamed
from bedplate.values.units import format_size

INSTALLER = "install.py"
ZSTANDARD = "zstandard==0.25.0"
# 201 MB of the FlashAttention 3 library of sglang-kernel 0.4.4, code for other GPUs cleared, on a busy machine: level 6
# 60.3 MB in 26 s, level 9 57.9 MB in 33 s, level 12 56.1 MB in 83 s; xz -3 52.9 MB in 239 s.
LEVEL, LARGEST_WINDOW_LOG = 9, 30
"""Decompressing needs as much memory as the window: at most 1 GiB, less for a smaller bundle."""
GLIBC = "2.35"
"""The newest glibc that a wheel may need; Ubuntu 22.04 has this version."""
MACHINES = ("x86_64", "aarch64")
DRIVERS = {"12": "525", "13": "580"}
"""Minimum driver per major version of CUDA (minor version compatibility), from the toolkit's release notes."""
PARTS = ("engine", "model", "bedplate")
LEAST_PIECE_BYTES = 1 << 20
_MTIME = 315_532_800
"""1980: a fixed time makes the archive reproducible."""
_OF_THIS_MACHINE = frozenset(["direct_url.json", "uv_cache.json", "REQUESTED", ".lock"])


@dataclass(frozen=True)
class TargetRequest:
    """The options of `bedplate bundle --for`."""

    target: str
    python: str
    engines: tuple[str, ...] = ()
    """ID or ID@VERSION."""
    overlay: str | None = None
    """torch==VERSION, or a file with the pinned packages of the target."""
    capability: str | None = None
    piece_bytes: int | None = None
    model: ModelNamed | None = None
    without: frozenset[str] = frozenset()
    output: Path | None = None


@dataclass
class _Contents:
    """Everything that goes into the archive."""

    root: Path
    engines: list[BundledEngine] = field(default_factory=list)
    own_packages: tuple[str, ...] = ()
    links: list[tuple[str, Path]] = field(default_factory=list)
    """Files that are packed from their own path: (path in the archive, file)."""
    model: str | None = None
    model_place: str | None = None
    glibc: list[str] = field(default_factory=list)
    cleared_bytes: int = 0

    def list_files(self) -> Iterator[tuple[str, Path]]:
        """Yield files sorted by suffix, which compresses better."""
        found = [(file.relative_to(self.root).as_posix(), file) for file in self.root.rglob("*") if is_content(file)]
        yield from sorted(found, key=lambda one: (one[1].suffix, one[0]))
        yield from self.links


def is_content(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and file.name not in _OF_THIS_MACHINE


def parse_target(name: str, python: str, capability: str | None = None) -> BundleTarget:
    found = re.fullmatch(r"linux-(\w+?)-(cpu|cuda(\d+))", name)
    if found is None or found[1] not in MACHINES or (found[3] and found[3] not in DRIVERS):
        known = [f"linux-{machine}-{kind}" for machine in MACHINES for kind in ("cpu", *(f"cuda{n}" for n in DRIVERS))]
        raise UsageError(f"unknown target {name!r}", hint=f"choose {', '.join(known[:-1])} or {known[-1]}")
    if re.fullmatch(r"3\.\d+", python) is None:
        raise UsageError(f"--python: {python!r} is not a minor version", hint="for example 3.12")
    if capability is not None and (found[3] is None or re.fullmatch(r"\d+\.\d", capability) is None):
        raise UsageError(
            f"--capability: {capability!r} is not the compute capability of a GPU of {name}",
            hint="for example 9.0, for a target with CUDA; nvidia-smi --query-gpu=compute_cap --format=csv shows it",
        )
    return BundleTarget(
        name=name,
        system="linux",
        machine=found[1],
        device="cuda" if found[3] else "cpu",
        python=python,
        cuda=found[3],
        driver=DRIVERS[found[3]] if found[3] else None,
        capability=capability,
    )


def make_target_bundle(request: TargetRequest, progress: Progress | None = None) -> PackedForTarget:
    progress = progress or SilentProgress()
    target = parse_target(request.target, request.python, request.capability)
    if unknown := request.without - set(PARTS):
        raise UsageError(f"--without: {min(unknown)!r} is not one of {', '.join(PARTS)}")
    if request.piece_bytes is not None and request.piece_bytes < LEAST_PIECE_BYTES:
        raise UsageError("--pieces: a piece must have at least 1 MiB", hint="for example --pieces 48M")
    if request.without == set(PARTS) or ("engine" in request.without and request.engines):
        raise UsageError("--without leaves nothing to pack, or excludes an engine that --engine names")
    engines = request.engines or (STANDARD_ENGINE if target.cuda else FIRST.id,)
    named = [_parse_engine_version(text) for text in engines if "engine" not in request.without]
    overlay = _Overlay.parse(request.overlay) if request.overlay is not None else None
    default = "-".join(["bedplate", *(one.id for one, _ in named), "for", target.name])
    output = (request.output or Path(default)).expanduser().absolute()
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} already exists", hint="name another path with -o, or remove it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".making-{output.name}-"
        for leftover in output.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent, ignore_cleanup_errors=True) as holder:
            scratch = Path(holder)
            (root := scratch / "contents").mkdir()
            download = PackageDownloader(target, scratch, progress)
            contents = _Contents(root)
            for engine, version in named:
                _add_engine(contents, engine, version, overlay, download)
            if "bedplate" not in request.without:
                _add_bedplate(contents, download)
            if "model" not in request.without:
                _add_model(contents, request.model, progress)
            target = replace_fields(target, glibc=wheels.find_least_glibc(contents.glibc, GLIBC))
            bundle, manifest_sha256 = _write(contents, target, request.piece_bytes, download, scratch / "bundle")
            (scratch / "bundle").rename(output)
    except OSError as error:
        hint = "free some disk space, or name another path with -o"
        raise ExternalFailure(f"cannot write {output}", cause=error.strerror or str(error), hint=hint) from error
    total = sum(file.stat().st_size for file in output.iterdir())
    return PackedForTarget(path=str(output), size_bytes=total, manifest_sha256=manifest_sha256, bundle=bundle)


def _parse_engine_version(text: str) -> tuple[Engine, str | None]:
    name, _, version = text.partition("@")
    return engine_by_id(name), version or None


# packages on the target


@dataclass(frozen=True)
class _Overlay:
    """The packages that the target already has."""

    torch: str
    pins: tuple[str, ...]
    """All packages that are known to be on the target."""

    @classmethod
    def parse(cls, text: str) -> _Overlay:
        if found := re.fullmatch(r"torch==(\d[\w.]*)(?:\+\w+)?", text):
            return cls(found[1], ())
        file = Path(text).expanduser()
        if not file.is_file():
            raise UsageError(
                f"--overlay: {text!r} is neither torch==VERSION nor a file",
                hint="for example --overlay torch==2.11.0, or a file with the output of `pip freeze` on the target",
            )
        lines = (line.partition("#")[0].partition(";")[0].strip() for line in file.read_text().splitlines())
        pins = tuple(line for line in lines if re.fullmatch(r"[\w.-]+==[\w.+!]+", line))
        versions = dict(line.split("==") for line in pins)
        torch = next((version for name, version in versions.items() if wheels.normalize_name(name) == "torch"), None)
        if torch is None:
            raise UsageError(f"--overlay: {file} has no torch==VERSION", hint="an overlay needs PyTorch on the target")
        return cls(torch.partition("+")[0], pins)

    @property
    def constraints(self) -> list[str]:
        return [pin.partition("+")[0] for pin in self.pins] or [f"torch=={self.torch}"]

    def has(self, pin: str) -> bool:
        name, _, version = pin.partition("==")
        return any(
            wheels.normalize_name(own.partition("==")[0]) == name
            and own.partition("==")[2].partition("+")[0] == version
            for own in self.pins
        )


@dataclass(frozen=True)
class _EngineContents:
    """The packages of an engine's environment, complete or as an overlay."""

    version: str
    packages: tuple[str, ...]
    check: str
    additional: tuple[str, ...] = ()
    """Installed without their dependencies."""
    left_out: tuple[str, ...] = ()
    """Patterns of package names."""
    unused_files: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    as_of: str | None = None


def _find_engine_contents(
    engine: Engine, version: str | None, overlay: _Overlay | None, target: BundleTarget
) -> _EngineContents:
    recipe = _find_overlay_recipe(engine, version, overlay, target) if target.cuda is not None else None
    if recipe is not None:
        major = (target.capability or "").partition(".")[0]
        kernels = [pattern for of, patterns in recipe.other_kernels if of == major for pattern in patterns]
        return _EngineContents(
            recipe.version,
            recipe.packages,
            recipe.check,
            recipe.additional,
            (*recipe.provided, *recipe.unused) if overlay is not None else (),
            (*recipe.unused_files, *kernels),
            recipe.environment,
            recipe.as_of,
        )
    installed = engine.find_recipe(target.device)
    if overlay is not None or installed is None or version not in (None, engine.version):
        asked = f"{engine.id}@{version}" if version else engine.id
        over = f" over torch {overlay.torch}" if overlay else ""
        known = [f"{engine.id}@{one.version} over torch {one.torch} and CUDA {one.cuda}" for one in engine.overlays]
        if engine.find_recipe(target.device) is not None:
            known.append(f"{engine.id}@{engine.version} without --overlay")
        raise NotPossible(
            f"bedplate has no recipe for {asked}{over} on {target.name}",
            hint=f"known: {'; '.join(known)}" if known else "choose another engine with --engine",
        )
    return _EngineContents(
        engine.version or "", installed.packages, installed.check, installed.bare, left_out=installed.removes
    )


def _find_overlay_recipe(
    engine: Engine, version: str | None, overlay: _Overlay | None, target: BundleTarget
) -> OverlayRecipe | None:
    """Return the recipe of the named version, or the first that fits the PyTorch of the target."""
    for recipe in engine.overlays:
        fits = recipe.cuda == target.cuda and (overlay is None or overlay.torch == recipe.torch)
        if fits and (version == recipe.version or (version is None and overlay is not None)):
            return recipe
    return None


# contents


class PackageDownloader:
    """Runs uv for the target's platform."""

    def __init__(self, target: BundleTarget, scratch: Path, progress: Progress) -> None:
        self.target, self.scratch, self.progress = target, scratch, progress
        major, minor = GLIBC.split(".")
        platform = f"{target.machine}-manylinux_{major}_{minor}"
        self._arguments = ["--python-platform", platform, "--python-version", target.python]
        self._arguments += ["--python", find_engine_python()]

    def _choose_torch_backend(self, packages: Iterable[str]) -> list[str]:
        on_cpu = self.target.device == "cpu" and any(package.startswith("torch==") for package in packages)
        return ["--torch-backend", "cpu"] if on_cpu else []

    def resolve(
        self, what: str, packages: Sequence[str], constraints: Sequence[str] = (), as_of: str | None = None
    ) -> list[str]:
        """Pin the packages and all their dependencies on the target."""
        folder = Path(tempfile.mkdtemp(prefix="resolve-", dir=self.scratch))
        wanted, limits, pins = (folder / name for name in ("wanted.in", "constraints.txt", "pins.txt"))
        wanted.write_text("\n".join(packages) + "\n")
        limits.write_text("\n".join(constraints) + "\n")
        command = ["pip", "compile", str(wanted), "--constraint", str(limits), "--output-file", str(pins)]
        command += ["--no-annotate", "--no-header", "--quiet", *list_build_options()]
        command += [*self._arguments, *self._choose_torch_backend(packages)]
        label = f"resolving {what} for {self.target.name} with Python {self.target.python}"
        # Some engines pin pre-releases, and some indexes have no upload times.
        dates = [["--exclude-newer", as_of], []] if as_of is not None else [[]]
        attempts = [[*date, "--prerelease", mode] for date in dates for mode in ("if-necessary-or-explicit", "allow")]
        with self.progress.step(label):
            for number, options in enumerate(attempts):
                try:
                    self._run([*command, *options], label, folder)
                except ExternalFailure:
                    if number == len(attempts) - 1:
                        raise
                    continue
                if as_of is not None and "--exclude-newer" not in options:
                    self.progress.note(f"the index cannot resolve packages as of {as_of}: {what} gets newer ones")
                break
        return [line.strip() for line in pins.read_text().splitlines() if "==" in line or " @ " in line]

    def _run(self, command: list[str], label: str, folder: Path) -> None:
        try:
            run_uv(command, label, folder)
        except ExternalFailure as error:
            if "unsatisfiable" not in (error.cause or ""):
                raise
            hint = f"the index has no such packages for Python {self.target.python} on {self.target.name}"
            raise ExternalFailure(error.message, cause=error.cause, hint=hint) from error

    def install(self, what: str, pins: Sequence[str], folder: Path) -> None:
        """Unpack exactly these wheels; nothing is built."""
        file = Path(tempfile.mkdtemp(prefix="install-", dir=self.scratch)) / "pins.txt"
        file.write_text("\n".join(pins) + "\n")
        command = ["pip", "install", "--quiet", "--no-deps", "--no-build", "--prerelease", "allow"]
        label = f"downloading {what} for {self.target.name}"
        with self.progress.step(label):
            run_uv(
                [*command, "--target", str(folder), *self._arguments, "--requirement", str(file)], label, file.parent
            )

    @property
    def site_packages(self) -> str:
        return f"lib/python{self.target.python}/site-packages"


def _add_engine(
    contents: _Contents, engine: Engine, version: str | None, overlay: _Overlay | None, download: PackageDownloader
) -> None:
    wanted = _find_engine_contents(engine, version, overlay, download.target)
    what = f"{engine.name} {wanted.version}"
    resolved = download.resolve(what, wanted.packages, overlay.constraints if overlay is not None else (), wanted.as_of)
    left_out = [
        pin
        for pin in resolved
        if any(fnmatch.fnmatch(pin.partition("==")[0], pattern) for pattern in wanted.left_out)
        or (overlay is not None and overlay.has(pin))
    ]
    names = {wheels.normalize_name(re.split(r"[=<>~\[; ]", pin)[0]) for pin in wanted.additional}
    kept = [pin for pin in resolved if pin not in left_out and pin.partition("==")[0] not in names]
    path = f"engines/{engine.id}"
    tree = contents.root / path
    site = tree / download.site_packages
    download.install(what, [*kept, *wanted.additional], site)
    _arrange(site, tree / "bin")
    _remove(site, wanted.unused_files)
    _remove_other_pythons(site, download.target.python)
    if (capability := download.target.capability) is not None:
        with download.progress.step(f"clearing code for other GPUs in {engine.name}"):
            contents.cleared_bytes += _clear(site, int(capability.replace(".", "")))
    contents.glibc += list_platforms(site)
    contents.engines.append(
        BundledEngine(
            engine=engine.id,
            name=engine.name,
            version=wanted.version,
            path=path,
            place=f"{path}/{wanted.version}-{download.target.name}",
            torch=overlay.torch if overlay is not None else None,
            packages=tuple(sorted(list_pins(site))),
            left_out=tuple(left_out),
            environment=dict(wanted.environment),
            check=wanted.check,
            libraries=tuple(_add_libraries(engine, download, tree / "borrowed")),
        )
    )


def _add_libraries(engine: Engine, download: PackageDownloader, folder: Path) -> Iterator[str]:
    """Add libraries that the engine needs if the target's system lacks them."""
    recipe = engine.find_recipe(download.target.device)
    for library in recipe.libraries if recipe is not None else ():
        holder = Path(tempfile.mkdtemp(prefix="library-", dir=download.scratch))
        download.install(library.soname, [library.package], holder)
        found = next(holder.glob(library.file), None)
        if found is None:
            download.progress.note(f"{library.soname} is not packed: the target's system must provide it")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found, folder / library.soname)
        yield library.soname


def _add_bedplate(contents: _Contents, download: PackageDownloader) -> None:
    site = install_bedplate(download, contents.root / "bedplate")
    contents.glibc += list_platforms(site)
    contents.own_packages = tuple(sorted(list_pins(site)))


def install_bedplate(download: PackageDownloader, tree: Path, extra: str | None = None) -> Path:
    """Install bedplate and its dependencies for the target's Python; return the folder of its packages."""
    import bedplate

    own = importlib.metadata.distribution("bedplate")
    folder = Path(tempfile.mkdtemp(prefix="bedplate-", dir=download.scratch))
    if wheels.is_editable(own):
        wheel = wheels.pack_source(own, Path(bedplate.__file__).parent, folder)
    else:
        wheel = wheels.pack_wheel(own, folder)
    name = f"bedplate[{extra}]" if extra is not None else "bedplate"
    pins = download.resolve("bedplate", [f"{name} @ {wheel.as_uri()}"])
    site = tree / download.site_packages
    download.install("bedplate", pins, site)
    _arrange(site, tree / "bin")
    return site


def _add_model(contents: _Contents, model: ModelNamed | None, progress: Progress) -> None:
    if model is None:
        contents.links = [(f"model/{BUILTIN_FILE}", fetch_builtin(progress))]
        contents.model, contents.model_place = BUILTIN_NAME, f"models/builtin/{BUILTIN_FILE}"
        return
    facts = find_intended_model(model)
    files = [Path(file) for file in facts.files]
    if not files:
        raise NotPossible(
            f"the files of {facts.name} are not on this machine",
            hint=f"hf download {facts.name} --local-dir FOLDER, then name that folder; or --without model",
        )
    place = f"models/bundled/{facts.short_name}"
    contents.model = facts.name
    if facts.format == "gguf":
        names = [file.name if file.suffix.lower() == ".gguf" else f"{facts.short_name}.gguf" for file in files]
        contents.links = [(f"model/{name}", file) for name, file in zip(names, files, strict=True)]
        contents.model_place = f"{place}/{names[0]}"
        return
    top = files[0].parent
    found = [file for file in sorted(top.rglob("*")) if file.is_file()]
    visible = [file for file in found if not any(part.startswith(".") for part in file.relative_to(top).parts)]
    contents.links = [(f"model/{file.relative_to(top).as_posix()}", file) for file in visible]
    contents.model_place = place


def _arrange(site: Path, programs: Path) -> None:
    """Move binaries to the environment's `bin`; install.py writes the Python scripts on the target."""
    given = site / "bin"
    if given.is_dir():
        programs.mkdir(parents=True, exist_ok=True)
        for file in given.iterdir():
            if file.is_file() and not file.read_bytes()[:2].startswith(b"#!"):
                shutil.move(file, programs / file.name)
        shutil.rmtree(given)


def _remove(site: Path, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for found in list(site.glob(pattern)):
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink()


def _remove_other_pythons(site: Path, python: str) -> None:
    """Remove extension modules for other versions of Python, which some wheels contain too."""
    own = f".cpython-{python.replace('.', '')}-"
    for file in list(site.rglob("*.cpython-3*.so")):
        module = file.name.partition(".")[0]
        if own not in file.name and any(file.parent.glob(f"{module}{own}*")):
            file.unlink()


def _clear(site: Path, architecture: int) -> int:
    return sum(clear_unused(file, architecture) for file in list(site.rglob("*.so*")) if file.is_file())


def list_pins(site: Path) -> list[str]:
    return [wheels.format_pin(one) for one in wheels.find_distributions(site).values()]


def list_platforms(site: Path) -> list[str]:
    """List the packages with the platforms of their wheels, as `find_least_glibc` reads them."""
    found = []
    for one in wheels.find_distributions(site).values():
        tags = re.findall(r"^Tag:\s*(\S+)\s*$", one.read_text("WHEEL") or "", re.MULTILINE)
        platforms = ".".join(dict.fromkeys(tag.rpartition("-")[2] for tag in tags))
        found.append(f"{one.name}-{platforms}")
    return found


# writing


class _PieceWriter:
    """A stream that is split into files of at most `piece_bytes`."""

    def __init__(self, folder: Path, piece_bytes: int | None) -> None:
        self._folder, self._most = folder, piece_bytes
        self.done: list[BundlePiece] = []
        self._open()

    def _open(self) -> None:
        self._file: BinaryIO = (self._folder / f"piece.{len(self.done):03}").open("xb")
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if self._most is not None and self._size == self._most:
                self.close()
                self._open()
            part = rest if self._most is None else rest[: self._most - self._size]
            self._file.write(part)
            self._hash.update(part)
            self._size += len(part)
            rest = rest[len(part) :]
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        name = f"piece.{len(self.done):03}"
        self.done.append(BundlePiece(name=name, size_bytes=self._size, sha256=self._hash.hexdigest()))


def _write(
    contents: _Contents, target: BundleTarget, piece_bytes: int | None, download: PackageDownloader, folder: Path
) -> tuple[TargetBundle, str]:
    """Write everything; return the manifest and its hash."""
    files = list(contents.list_files())
    total = sum(file.stat().st_size for _, file in files)
    check_free_space(folder.parent, total, "the bundle")
    folder.mkdir()
    compressor = _make_compressor(download.scratch, total)
    pieces = _PieceWriter(folder, piece_bytes)
    with (
        download.progress.step(f"packing {format_size(total)}", total) as tell,
        compressor.stream_writer(pieces, closefd=False) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        done = 0
        for path, file in files:
            before = file.stat()
            info = tarfile.TarInfo(path)
            info.size, info.mtime = before.st_size, _MTIME
            info.mode = 0o755 if before.st_mode & 0o111 else 0o644
            with file.open("rb") as source:
                archive.addfile(info, _CountingFile(source, lambda count, so_far=done: tell(so_far + count)))  # type: ignore[misc]
            done += before.st_size
    pieces.close()
    decompressor = _add_decompressor(download, folder)
    digest = hashlib.sha256("".join(piece.sha256 for piece in pieces.done).encode()).hexdigest()[:10]
    bundle = TargetBundle(
        id=digest,
        bedplate=_version.__version__,
        made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        target=target,
        engines=tuple(replace_fields(one, place=f"{one.place}-{digest}") for one in contents.engines),
        own_place=f"bundles/bedplate-{_version.__version__}-{digest}" if contents.own_packages else None,
        own_packages=contents.own_packages,
        model=contents.model,
        model_place=contents.model_place,
        unpacked_bytes=total,
        cleared_bytes=contents.cleared_bytes,
        pieces=tuple(pieces.done),
        decompressor=decompressor,
    )
    installer = importlib.resources.files("bedplate.bundling") / INSTALLER
    extra = {INSTALLER: installer.read_bytes(), "README.txt": write_target_readme(bundle).encode()}
    for name, content in extra.items():
        (folder / name).write_bytes(content)
    listed = tuple(_describe_piece(name, content) for name, content in extra.items())
    manifest = f"{to_json(replace_fields(bundle, files=listed))}\n".encode()
    if problem := find_manifest_problem(json.loads(manifest)):
        raise NotPossible(f"the bundle cannot be packed: {problem}", hint="rename the model's file")
    (folder / MANIFEST).write_bytes(manifest)
    return replace_fields(bundle, files=listed), hashlib.sha256(manifest).hexdigest()


def _describe_piece(name: str, content: bytes) -> BundlePiece:
    return BundlePiece(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


class _CountingFile:
    """A file that reports how many bytes were read."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file, self._tell, self._count = file, tell, 0

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self._count += len(data)
        self._tell(self._count)
        return data


def _make_compressor(scratch: Path, total: int) -> Any:
    """Install zstandard for this machine: Python has a zstd module only since 3.14."""
    folder = scratch / "compressor"
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build", "--target", str(folder)]
    run_uv([*command, "--python", find_engine_python(), ZSTANDARD], "fetching zstandard", scratch)
    sys.path.insert(0, str(folder))
    try:
        zstandard = importlib.import_module("zstandard")
    finally:
        sys.path.remove(str(folder))
    options = zstandard.ZstdCompressionParameters.from_level(
        LEVEL,
        window_log=min(max(total.bit_length(), 20), LARGEST_WINDOW_LOG),
        enable_ldm=True,
        threads=-1,
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(compression_params=options)


def _add_decompressor(download: PackageDownloader, folder: Path) -> BundlePiece:
    """Pack the part of zstandard that the target needs to decompress."""
    site = Path(tempfile.mkdtemp(prefix="zstandard-", dir=download.scratch))
    download.install("zstandard", [ZSTANDARD], site)
    with zipfile.ZipFile(folder / DECOMPRESSOR, "x", zipfile.ZIP_DEFLATED) as archive:
        for file in [site / "zstandard" / "__init__.py", *sorted((site / "zstandard").glob("backend_c.*.so"))]:
            archive.write(file, file.relative_to(site).as_posix())
    return _describe_piece(DECOMPRESSOR, (folder / DECOMPRESSOR).read_bytes())
