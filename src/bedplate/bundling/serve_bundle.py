"""Serves from a bundle: checks it against its manifest and installs only from its wheels, without network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from bedplate.bundling.cluster_texts import BUILT, CARRIED, FETCHED
from bedplate.bundling.confinement import (
    MALFORMED,
    PREPARED,
    ManifestTree,
    check_pins,
    find_file_problem,
    find_manifest_problem,
    find_path_problem,
    list_members,
    list_unlisted,
    make_unsafe_bundle,
)
from bedplate.bundling.install import find_manifest_problem as find_target_problem
from bedplate.bundling.make import ENGINE_PINS, get_recipe_packages
from bedplate.bundling.writing import write_sums
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.home import check_free_space, ensure_writable, get_home, hold_lock, make_disk_failure
from bedplate.progress import Progress, SilentProgress
from bedplate.run.prepare import MANIFEST as PREPARED_MANIFEST
from bedplate.run.prepare import get_prepared_dir, hash_file
from bedplate.run.ready import ModelDecision
from bedplate.run.uv import WheelFolder, install_only_from
from bedplate.run.wheels import parse_glibc_version
from bedplate.store import compute_fingerprint
from bedplate.values import Hardware, Model, Plan, from_json, replace_fields
from bedplate.values.bundle import MANIFEST, SUMS, Bundle, BundledFile, ClusterBundle, TargetBundle
from bedplate.values.service import Order
from bedplate.values.units import format_size

MOST_MANIFEST_BYTES = 64 << 20
SHOWN = 3
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class OpenBundle:
    """A bundle whose files match its manifest."""

    bundle: Bundle
    root: Path

    @property
    def facts(self) -> Model:
        """The model with the paths of its files on this machine."""
        source = self.bundle.plan.source or self.bundle.plan.model
        return replace_fields(source, files=tuple(str(self.root / file) for file in source.files))

    def replace_model(self, order: Order) -> Order:
        """Return the order with the bundle's model."""
        files = self.facts.files
        model = (files[0] if files[0].endswith(".gguf") else str(Path(files[0]).parent)) if files else self.facts.name
        return replace_fields(order, services=tuple(replace_fields(one, model=model) for one in order.services))

    def check_plan(self, found: ModelDecision, progress: Progress) -> None:
        """Report how this machine's plan differs from the bundle's; refuse a plan that its packages cannot run."""
        bundled, here = self.bundle.plan, found.plan
        if here.engine != bundled.engine or here.settings.device != bundled.settings.device:
            raise NotPossible(
                f"the bundle has {bundled.engine} for {bundled.settings.device}, "
                f"but the plan for this machine is {here.engine} for {here.settings.device}",
                hint="make the bundle on a machine like this one",
            )
        if get_recipe_packages(engine_by_id(here.engine), here) != self.bundle.recipe:
            raise NotPossible(
                f"the packages of {here.engine} in the bundle do not match this version of bedplate",
                cause=f"another version of bedplate packed {', '.join(self.bundle.recipe)}",
                hint=f"use the bedplate in the bundle: {self.root / 'serve'}",
            )
        other = found.wanted.workload != self.bundle.wanted.workload
        for line in describe_differences(self.bundle.hardware, found.hardware, bundled, here, other_workload=other):
            progress.note(line)


def describe_differences(
    before: Hardware, now: Hardware, bundled: Plan, here: Plan, *, other_workload: bool = False
) -> list[str]:
    """Describe how hardware and plan differ from those that the bundle was made for; empty if they do not."""
    changed = [
        f"{name.replace('_', ' ')} {getattr(here.settings, name)} instead of {getattr(bundled.settings, name)}"
        for name in here.settings.__struct_fields__
        if getattr(here.settings, name) != getattr(bundled.settings, name)
    ]
    if here.parallelism != bundled.parallelism:
        changed.append("another parallelism")
    if here.weights != bundled.weights:
        changed.append(f"weights {here.weights.label} instead of {bundled.weights.label}")
    other = compute_fingerprint(before) != compute_fingerprint(now)
    if not changed and not other:
        return []
    why = "the workload differs from the bundle's" if other_workload else "fewer resources are free on this machine"
    if other:
        why = f"the bundle was planned for {_describe_hardware(before)}, this machine is {_describe_hardware(now)}"
    return [f"{why}: planned again, {'; '.join(changed) if changed else 'with the same settings'}"]


def _describe_hardware(hardware: Hardware) -> str:
    cards = hardware.accelerators
    memory = f"{hardware.memory.total_bytes / (1 << 30):.0f} GiB"
    what = f"{len(cards)} × {cards[0].name}" if cards else f"{hardware.cpu.name}, {hardware.cpu.allowed_cores:g} cores"
    return f"{what}, {memory}"


# opening


B = TypeVar("B", Bundle, ClusterBundle)


@dataclass(frozen=True)
class _Manifest(Generic[B]):
    """A manifest that names nothing outside of its bundle."""

    bundle: B
    raw: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()


def read_bundle(path: Path, sha256: str | None = None) -> Bundle:
    """Read only the manifest of a folder or an archive; with `sha256`, only a manifest with this hash."""
    return _read_manifest(path.expanduser(), sha256).bundle


def _read_manifest(path: Path, sha256: str | None) -> _Manifest[Bundle]:
    raw = _read_raw_manifest(path, sha256)
    if _has_schema(raw, "cluster-bundle"):
        raise NotPossible(
            f"{path} is for a cluster and cannot be served here", hint="its README.txt has the steps: push.sh, apply.sh"
        )
    if _has_schema(raw, "target-bundle"):
        raise NotPossible(
            f"{path} must be installed before it can be served",
            hint=f"run python3 {path / 'install.py'}, which prints the serve command",
        )
    bundle = from_json(Bundle, raw, f"{path / MANIFEST if path.is_dir() else path}")
    if problem := find_manifest_problem(bundle):
        raise make_unsafe_bundle(path, problem)
    return _Manifest(bundle, raw)


def _read_raw_manifest(path: Path, sha256: str | None) -> bytes:
    expected = _parse_sha256(sha256) if sha256 is not None else None
    if not path.exists():
        raise UsageError(f"there is no bundle {path}", hint="bedplate bundle creates one")
    try:
        if path.is_dir():
            if not stat.S_ISREG((path / MANIFEST).lstat().st_mode):
                raise FileNotFoundError(MANIFEST)
            with (path / MANIFEST).open("rb") as file:
                raw = file.read(MOST_MANIFEST_BYTES)
        else:
            with _Archive(path) as archive:
                raw = archive.read_manifest()
    except (FileNotFoundError, *MALFORMED) as error:
        raise ExternalFailure(
            f"{path} is not a bedplate bundle, or it is incomplete: {MANIFEST}, which is written last, is missing",
            cause=str(error) if isinstance(error, tarfile.TarError) else None,
            hint="copy it again, and compare its size with that of the original",
        ) from error
    except OSError as error:
        raise ExternalFailure(f"cannot read {path}", cause=error.strerror or str(error)) from error
    if expected not in (None, found := hashlib.sha256(raw).hexdigest()):
        raise ExternalFailure(
            f"{path} is not the bundle that --manifest-sha256 names",
            cause=f"the hash of its {MANIFEST} is {found}",
            hint="copy it again from where it was made; bedplate bundle printed the hash there",
        )
    return raw


def _parse_sha256(text: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{64}", text) is None:
        raise UsageError(
            f"--manifest-sha256: {text!r} is not a SHA-256 hash", hint="64 hexadecimal digits, as bundle printed them"
        )
    return text.lower()


def _has_schema(raw: bytes, name: str) -> bool:
    return re.match(rb'\s*\{\s*"schema"\s*:\s*"%s/' % name.encode(), raw) is not None


class _Archive:
    """A tar archive that contains only plain files and links of one bundle, each once."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - closed by the context
        try:
            self.members = list_members(self._tar, path)
        except BaseException:
            self._tar.close()
            raise

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def read_manifest(self) -> bytes:
        with self.open_file(MANIFEST) as source:
            return source.read(MOST_MANIFEST_BYTES)

    def open_file(self, path: str) -> BinaryIO:
        member = self.members[path]
        found = self._tar.extractfile(member) if member.isreg() else None
        if found is None:
            raise KeyError(path)
        return found  # type: ignore[return-value]

    def find_damage(self, file: BundledFile) -> str | None:
        """Compare a member with its manifest entry."""
        member = self.members.get(file.path)
        if member is None:
            return "is missing"
        if file.link is not None:
            return None if member.issym() and member.linkname == file.link else "is not the link that was packed"
        if not member.isreg():
            return "is not a regular file"
        if member.size != file.size_bytes:
            return f"has {member.size:,} bytes instead of {file.size_bytes:,}"
        digest = hashlib.sha256()
        try:
            with self.open_file(file.path) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
        except (*MALFORMED, OSError):
            return "is truncated"
        return None if digest.hexdigest() == file.sha256 else "has a different sha256"


@contextlib.contextmanager
def open_bundle(path: Path, progress: Progress | None = None, sha256: str | None = None) -> Iterator[OpenBundle]:
    """Check and open a bundle. Inside the context, packages are installed only from it, without network.

    With `sha256`, the manifest must have this hash, and every file is read again.
    """
    progress = progress or SilentProgress()
    path = path.expanduser().absolute()
    manifest = _read_manifest(path, sha256)
    bundle = manifest.bundle
    check_site(bundle)
    root = path if path.is_dir() else _unpack_archive(path, manifest, progress)
    check_files(manifest, root, progress, reread=sha256 is not None)
    try:
        if (root / ENGINE_PINS).is_file():
            check_pins((root / ENGINE_PINS).read_text(encoding="utf-8"), path)
        _link_prepared(bundle, root)
    except UnicodeDecodeError as error:
        raise make_unsafe_bundle(path, f"{ENGINE_PINS} is not text") from error
    except OSError as error:
        raise make_disk_failure(error, get_prepared_dir()) from error
    with install_only_from(WheelFolder(root / "wheels", {bundle.plan.engine: root / ENGINE_PINS})):
        yield OpenBundle(bundle, root)


def check_site(bundle: Bundle) -> None:
    """Check, before anything is unpacked, that the packages can run on this machine."""
    if bundle.image is not None:
        raise NotPossible(
            f"{bundle.plan.engine} in this bundle runs from a container image: {bundle.image}",
            hint="see its README.txt: docker load, then docker compose -f compose/compose.yaml up",
        )
    site = bundle.site
    python = ".".join(map(str, sys.version_info[:2]))
    if site.platform != sysconfig.get_platform():
        raise NotPossible(
            f"the bundle is for {site.platform}, but this machine is {sysconfig.get_platform()}",
            hint="make the bundle on a machine like this one",
        )
    if site.python != python and "UV_PYTHON" not in os.environ:
        raise NotPossible(
            f"the bundle's packages are for Python {site.python}, but this bedplate runs on {python}",
            hint=f"start it with ./serve, which finds the right Python, or run bedplate with python{site.python}",
        )
    glibc = platform.libc_ver()[1]
    if site.glibc is not None and glibc and parse_glibc_version(glibc) < parse_glibc_version(site.glibc):
        raise NotPossible(
            f"the bundle's packages need glibc {site.glibc} or newer, but this system has {glibc}",
            hint="use a newer system, or make the bundle on a system like this one",
        )


def check_files(
    manifest: _Manifest[B],
    root: Path,
    progress: Progress | None = None,
    *,
    reread: bool = False,
    allowed: tuple[str, ...] = (),
) -> None:
    """Compare every file below `root` with the manifest, and refuse files that it does not list.

    A file that passed is hashed again only if its size or time changes, or with `reread`. Paths that begin with
    `allowed` need not be listed.
    """
    bundle = manifest.bundle
    unlisted = [path for path in list_unlisted(bundle.files, root) if not path.startswith(allowed)]
    wrong = [f"{path} is not in the manifest" for path in unlisted]
    wrong += _find_sums_problem(manifest, root)
    done = 0
    with (progress or SilentProgress()).step("checking the bundle", bundle.size_bytes) as tell:
        for file in bundle.files:
            if (why := _find_damage(file, root, reread=reread)) is not None:
                wrong.append(f"{file.path} {why}")
            done += file.size_bytes
            tell(done)
    _refuse_damaged(
        wrong,
        len(bundle.files),
        f"copy it to {root} again; sha256sum --check SHA256SUMS lists the damaged files",
    )


def _find_sums_problem(manifest: _Manifest[B], root: Path) -> list[str]:
    """Compare SHA256SUMS, which no entry lists because it contains the manifest's own hash."""
    path = root / SUMS
    if not path.is_symlink() and not path.exists():
        return []
    expected = write_sums(manifest.bundle.files, manifest.sha256).encode()
    listed = BundledFile(path=SUMS, size_bytes=len(expected), sha256=hashlib.sha256(expected).hexdigest())
    why = _find_damage(listed, root, reread=True)
    return [f"{SUMS} {why}"] if why is not None else []


def _refuse_damaged(wrong: list[str], count: int, hint: str) -> None:
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ExternalFailure(
            f"the bundle is damaged: {len(wrong)} of {count} files differ from the manifest",
            cause=", ".join(wrong[:SHOWN]) + more,
            hint=hint,
        )


def _find_damage(file: BundledFile, root: Path, *, reread: bool) -> str | None:
    """Compare a file with its manifest entry; return what is wrong with it."""
    if (why := find_file_problem(file, root)) is not None or file.link is not None:
        return why
    if not reread:
        return None if hash_file(root / file.path) == file.sha256 else "has a different sha256"
    try:
        with (root / file.path).open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found == file.sha256 else "has a different sha256"


def _unpack_archive(path: Path, manifest: _Manifest[Bundle], progress: Progress) -> Path:
    """Unpack an archive into bedplate's home. The manifest is written last and marks a complete folder."""
    bundle = manifest.bundle
    root = get_home() / "bundles" / manifest.sha256[:16]
    ensure_writable(root.parent)
    with hold_lock(root, f"unpacking {path.name}", progress.note):
        if (root / MANIFEST).is_file():
            return root
        shutil.rmtree(root, ignore_errors=True)
        check_free_space(root.parent, bundle.size_bytes, f"the contents of {path.name}")
        progress.note(f"unpacking {path} ({format_size(bundle.size_bytes)}) to {root}")
        try:
            with _Archive(path) as archive:
                if archive.read_manifest() != manifest.raw:
                    raise tarfile.ReadError("it changed while it was read")
                _unpack_files(archive, bundle, root, progress)
            check_files(manifest, root)
            (root / MANIFEST).write_bytes(manifest.raw)
        except MALFORMED as error:
            shutil.rmtree(root, ignore_errors=True)
            raise ExternalFailure(f"{path} is damaged", cause=str(error), hint="copy it again") from error
        except ExternalFailure as error:
            shutil.rmtree(root, ignore_errors=True)
            raise ExternalFailure(error.message, cause=error.cause, hint=f"copy {path} again") from error
        except OSError as error:
            raise make_disk_failure(error, root) from error
    return root


def _unpack_files(archive: _Archive, bundle: Bundle, root: Path, progress: Progress) -> None:
    """Unpack exactly the files of the manifest, with the sizes that it declares."""
    done = 0
    root.mkdir()
    with progress.step("unpacking", bundle.size_bytes) as tell:
        for file in bundle.files:
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            member = archive.members[file.path]
            if file.link is not None:
                target.symlink_to(file.link)
                continue
            if member.size != file.size_bytes:
                raise tarfile.ReadError(f"{file.path} has {member.size:,} bytes instead of {file.size_bytes:,}")
            with archive.open_file(file.path) as source, target.open("xb") as out:
                while chunk := source.read(CHUNK_BYTES):
                    out.write(chunk)
                    done += len(chunk)
                    tell(done)
            target.chmod(0o755 if member.mode & 0o111 else 0o644)


def _link_prepared(bundle: Bundle, root: Path) -> None:
    """Link converted weights to where `prepare` looks for them: the bundle may be on a read-only disk."""
    tree = ManifestTree(bundle)
    for name in bundle.prepared:
        source, folder = root / PREPARED / name, get_prepared_dir() / name
        ensure_writable(get_prepared_dir())
        with hold_lock(folder, "linking converted weights"):
            if (folder / PREPARED_MANIFEST).is_file() and all(one.exists() for one in folder.iterdir()):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for one in source.iterdir():
                if one.name == PREPARED_MANIFEST:
                    continue
                inside = tree.resolve_link(f"{PREPARED}/{name}/{one.name}") if one.is_symlink() else None
                (folder / one.name).symlink_to(Path("..", *Path(inside).parts[1:]) if inside is not None else one)
            shutil.copyfile(source / PREPARED_MANIFEST, folder / PREPARED_MANIFEST)


def check_bundle(
    path: Path, progress: Progress | None = None, sha256: str | None = None
) -> Bundle | TargetBundle | ClusterBundle:
    """Read every file of a bundle, compare it with the manifest, and return the manifest.

    Files that the manifest does not list are refused. With `sha256`, the manifest must have this hash.
    """
    path = path.expanduser().absolute()
    progress = progress or SilentProgress()
    raw = _read_raw_manifest(path, sha256)
    if path.is_dir() and _has_schema(raw, "target-bundle"):
        return _check_pieces(path, raw, progress)
    if _has_schema(raw, "cluster-bundle"):
        return _check_cluster_bundle(path, raw, progress)
    manifest = _read_manifest(path, sha256)
    if path.is_dir():
        check_files(manifest, path, progress, reread=True)
        return manifest.bundle
    _check_archive(path, manifest, progress)
    return manifest.bundle


def _check_archive(path: Path, manifest: _Manifest[B], progress: Progress) -> None:
    bundle = manifest.bundle
    done = 0
    try:
        with _Archive(path) as archive, progress.step("checking", bundle.size_bytes) as tell:
            listed = {file.path for file in bundle.files} | {MANIFEST, SUMS}
            wrong = [f"{one} is not in the manifest" for one in archive.members if one not in listed]
            sums = write_sums(bundle.files, manifest.sha256).encode()
            if SUMS in archive.members and archive.open_file(SUMS).read(len(sums) + 1) != sums:
                wrong.append(f"{SUMS} does not match the manifest")
            for file in bundle.files:
                if (why := archive.find_damage(file)) is not None:
                    wrong.append(f"{file.path} {why}")
                done += file.size_bytes
                tell(done)
    except (*MALFORMED, OSError) as error:
        raise ExternalFailure(f"{path} is damaged", cause=str(error), hint="copy it again") from error
    _refuse_damaged(wrong, len(bundle.files), f"copy {path} again")


def _check_cluster_bundle(path: Path, raw: bytes, progress: Progress) -> ClusterBundle:
    """Check what was packed; what `fetch.sh` adds has hashes of its own."""
    bundle = from_json(ClusterBundle, raw, str(path))
    link = next((f"{file.path} is a link" for file in bundle.files if file.link is not None), None)
    if problem := link or find_path_problem(bundle.files):
        raise make_unsafe_bundle(path, problem)
    manifest = _Manifest(bundle, raw)
    if path.is_dir():
        later = (f"{one.folder}/" for one in bundle.models if one.size_bytes is None)
        check_files(manifest, path, progress, reread=True, allowed=(f"{CARRIED}/", f"{BUILT}/", FETCHED, *later))
    else:
        _check_archive(path, manifest, progress)
    return bundle


def _check_pieces(path: Path, raw: bytes, progress: Progress) -> TargetBundle:
    bundle = from_json(TargetBundle, raw, str(path / MANIFEST))
    if problem := find_target_problem(json.loads(raw)):
        raise make_unsafe_bundle(path, problem)
    pieces = (*bundle.pieces, bundle.decompressor, *bundle.files)
    listed = {piece.name for piece in pieces} | {MANIFEST}
    wrong = [f"{one.name} is not in the manifest" for one in sorted(path.iterdir()) if one.name not in listed]
    done = 0
    with progress.step("checking", bundle.size_bytes) as tell:
        for piece in pieces:
            file = BundledFile(path=piece.name, size_bytes=piece.size_bytes, sha256=piece.sha256)
            if (why := _find_damage(file, path, reread=True)) is not None:
                wrong.append(f"{piece.name} {why}")
            done += piece.size_bytes
            tell(done)
    _refuse_damaged(wrong, len(pieces), f"copy these files to {path} again")
    return bundle
