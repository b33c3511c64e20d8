"""Serves from a bundle: checks it against its manifest and installs only from its wheels, without network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bedplate.bundling.make import ENGINE_PINS, get_recipe_packages
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
from bedplate.values.bundle import MANIFEST, TOP, Bundle, BundledFile, TargetBundle
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


def read_bundle(path: Path) -> Bundle:
    """Read only the manifest of a folder or an archive."""
    path = path.expanduser()
    if not path.exists():
        raise UsageError(f"there is no bundle {path}", hint="bedplate bundle creates one")
    try:
        if path.is_dir():
            raw = (path / MANIFEST).read_bytes()
        else:
            with tarfile.open(path, "r:") as archive:
                raw = _open_member(archive, MANIFEST).read(MOST_MANIFEST_BYTES)
    except (KeyError, FileNotFoundError, tarfile.TarError, EOFError) as error:
        raise ExternalFailure(
            f"{path} is not a bedplate bundle, or it is incomplete: {MANIFEST}, which is written last, is missing",
            cause=str(error) if isinstance(error, tarfile.TarError) else None,
            hint="copy it again, and compare its size with that of the original",
        ) from error
    except OSError as error:
        raise ExternalFailure(f"cannot read {path}", cause=error.strerror or str(error)) from error
    if _is_for_target(raw):
        raise NotPossible(
            f"{path} must be installed before it can be served",
            hint=f"run python3 {path / 'install.py'}, which prints the serve command",
        )
    bundle = from_json(Bundle, raw, f"{path / MANIFEST if path.is_dir() else path}")
    if bad := next((file for file in bundle.files if not file.is_inside), None):
        raise ExternalFailure(
            f"{path} is not safe to open: the path {bad.path} leads out of it", hint="check where the bundle is from"
        )
    return bundle


def _is_for_target(raw: bytes) -> bool:
    return re.match(rb'\s*\{\s*"schema"\s*:\s*"target-bundle/', raw) is not None


def _open_member(archive: tarfile.TarFile, path: str) -> BinaryIO:
    found = archive.extractfile(f"{TOP}/{path}")
    if found is None:
        raise KeyError(path)
    return found  # type: ignore[return-value]


@contextlib.contextmanager
def open_bundle(path: Path, progress: Progress | None = None) -> Iterator[OpenBundle]:
    """Check and open a bundle. Inside the context, packages are installed only from it, without network."""
    progress = progress or SilentProgress()
    path = path.expanduser().absolute()
    bundle = read_bundle(path)
    check_site(bundle)
    root = path if path.is_dir() else _unpack_archive(path, bundle, progress)
    check_files(bundle, root, progress)
    try:
        _link_prepared(bundle, root)
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


def check_files(bundle: Bundle, root: Path, progress: Progress | None = None) -> None:
    """Compare each file with the manifest. A file that passed is hashed again only if its size or time changes."""
    wrong: list[str] = []
    done = 0
    with (progress or SilentProgress()).step("checking the bundle", bundle.size_bytes) as tell:
        for file in bundle.files:
            if (why := _find_damage(file, root / file.path)) is not None:
                wrong.append(f"{file.path} {why}")
            done += file.size_bytes
            tell(done)
    _refuse_damaged(
        wrong,
        len(bundle.files),
        f"copy it to {root} again; sha256sum --check SHA256SUMS lists the damaged files",
    )


def _refuse_damaged(wrong: list[str], count: int, hint: str) -> None:
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ExternalFailure(
            f"the bundle is damaged: {len(wrong)} of {count} files differ from the manifest",
            cause=", ".join(wrong[:SHOWN]) + more,
            hint=hint,
        )


def _find_damage(file: BundledFile, path: Path) -> str | None:
    """Compare a file with its manifest entry; return what is wrong with it."""
    if file.link is not None:
        return None if path.is_symlink() and str(path.readlink()) == file.link else "is not the link that was packed"
    if not path.is_file():
        return "is missing"
    if (found := path.stat().st_size) != file.size_bytes:
        return f"has {found:,} bytes instead of {file.size_bytes:,}"
    return None if hash_file(path) == file.sha256 else "has a different sha256"


def _find_damage_in_archive(archive: tarfile.TarFile, file: BundledFile) -> str | None:
    """Compare a file inside the archive with its manifest entry."""
    try:
        member = archive.getmember(f"{TOP}/{file.path}")
        if file.link is not None:
            return None if member.linkname == file.link else "is not the link that was packed"
        digest = hashlib.sha256()
        with _open_member(archive, file.path) as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
    except (KeyError, tarfile.TarError, EOFError, OSError):
        return "is missing or truncated"
    return None if digest.hexdigest() == file.sha256 else "has a different sha256"


def _unpack_archive(path: Path, bundle: Bundle, progress: Progress) -> Path:
    """Unpack an archive into bedplate's home. The manifest is written last and marks a complete folder."""
    with tarfile.open(path, "r:") as archive:
        raw = _open_member(archive, MANIFEST).read()
        root = get_home() / "bundles" / hashlib.sha256(raw).hexdigest()[:16]
        ensure_writable(root.parent)
        with hold_lock(root, f"unpacking {path.name}", progress.note):
            if (root / MANIFEST).is_file():
                return root
            shutil.rmtree(root, ignore_errors=True)
            check_free_space(root.parent, bundle.size_bytes, f"the contents of {path.name}")
            progress.note(f"unpacking {path} ({format_size(bundle.size_bytes)}) to {root}")
            try:
                _unpack_files(archive, bundle, root, progress)
                check_files(bundle, root)
                (root / MANIFEST).write_bytes(raw)
            except (KeyError, tarfile.TarError, EOFError) as error:
                shutil.rmtree(root, ignore_errors=True)
                raise ExternalFailure(f"{path} is damaged", cause=str(error), hint="copy it again") from error
            except ExternalFailure as error:
                shutil.rmtree(root, ignore_errors=True)
                raise ExternalFailure(error.message, cause=error.cause, hint=f"copy {path} again") from error
            except OSError as error:
                raise make_disk_failure(error, root) from error
    return root


def _unpack_files(archive: tarfile.TarFile, bundle: Bundle, root: Path, progress: Progress) -> None:
    """Unpack only files in the manifest: an archive may contain anything."""
    done = 0
    with progress.step("unpacking", bundle.size_bytes) as tell:
        for file in bundle.files:
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.link is not None:
                target.symlink_to(file.link)
                continue
            with _open_member(archive, file.path) as source, target.open("xb") as out:
                while chunk := source.read(CHUNK_BYTES):
                    out.write(chunk)
                    done += len(chunk)
                    tell(done)
            target.chmod(0o755 if archive.getmember(f"{TOP}/{file.path}").mode & 0o111 else 0o644)


def _link_prepared(bundle: Bundle, root: Path) -> None:
    """Link converted weights to where `prepare` looks for them: the bundle may be on a read-only disk."""
    for name in bundle.prepared:
        source, folder = root / "prepared" / name, get_prepared_dir() / name
        ensure_writable(get_prepared_dir())
        with hold_lock(folder, "linking converted weights"):
            if (folder / PREPARED_MANIFEST).is_file() and all(one.exists() for one in folder.iterdir()):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for one in source.iterdir():
                if one.name == PREPARED_MANIFEST:
                    continue
                (folder / one.name).symlink_to(one.readlink() if one.is_symlink() else one)
            shutil.copyfile(source / PREPARED_MANIFEST, folder / PREPARED_MANIFEST)


def check_bundle(path: Path, progress: Progress | None = None) -> Bundle | TargetBundle:
    """Compare every file of a bundle with its manifest, and return the manifest."""
    path = path.expanduser().absolute()
    if (path / MANIFEST).is_file() and _is_for_target(raw := (path / MANIFEST).read_bytes()):
        return _check_pieces(path, from_json(TargetBundle, raw, str(path / MANIFEST)), progress)
    bundle = read_bundle(path)
    if path.is_dir():
        check_files(bundle, path, progress)
        return bundle
    wrong: list[str] = []
    done = 0
    with (
        tarfile.open(path, "r:") as archive,
        (progress or SilentProgress()).step("checking", bundle.size_bytes) as tell,
    ):
        for file in bundle.files:
            if (why := _find_damage_in_archive(archive, file)) is not None:
                wrong.append(f"{file.path} {why}")
            done += file.size_bytes
            tell(done)
    _refuse_damaged(wrong, len(bundle.files), f"copy {path} again")
    return bundle


def _check_pieces(path: Path, bundle: TargetBundle, progress: Progress | None) -> TargetBundle:
    wrong: list[str] = []
    done = 0
    with (progress or SilentProgress()).step("checking", bundle.size_bytes) as tell:
        for piece in (*bundle.pieces, bundle.decompressor):
            file = BundledFile(path=piece.name, size_bytes=piece.size_bytes, sha256=piece.sha256)
            if not file.is_inside:
                raise ExternalFailure(
                    f"{path} is not safe to open: the path {piece.name} leads out of it",
                    hint="check where the bundle is from",
                )
            if (why := _find_damage(file, path / piece.name)) is not None:
                wrong.append(f"{piece.name} {why}")
            done += piece.size_bytes
            tell(done)
    _refuse_damaged(wrong, len(bundle.pieces) + 1, f"copy these files to {path} again")
    return bundle
