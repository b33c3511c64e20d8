"""Packs installed packages as wheels again, from the file lists of the packages, for another machine.

No package index is used, so packages that were built here, or came from an index that the other site cannot reach, are
packed as well.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bedplate.errors import ExternalFailure

_INSTALLATION_FILES = frozenset(["INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "direct_url.json", "uv_cache.json"])
"""Files in a package's dist-info folder that describe this installation, not the package."""
_SCRIPT_FOLDERS = frozenset(["bin", "Scripts"])
_RELOCATABLE_SHEBANG = re.compile(rb"#!/bin/sh\n'''exec' .*\n' '''\n")
"""The first lines of a Python script in an environment that is relocatable or has a long path."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time of the zip format; fixed, so that the same files give the same bytes."""
_LEGACY_GLIBC = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
CHUNK_BYTES = 1 << 20


class PackingCallbacks(NamedTuple):
    """Callbacks for progress and notes."""

    done: Callable[[int], None] = lambda count: None
    """Called with the bytes that were packed so far."""
    note: Callable[[str], None] = lambda text: None


SILENT = PackingCallbacks()


class PackageFile(NamedTuple):
    """One file of a package: its path, its path in the wheel, and its hash in the package's file list."""

    file: Path
    path: str
    sha256: str | None = None
    script: bool = False


def find_distributions(folder: Path) -> dict[str, importlib.metadata.Distribution]:
    """The packages that are installed in an environment or a folder, by normalized name."""
    folders = [str(one) for one in folder.rglob("site-packages") if one.is_dir()] or [str(folder)]
    found: dict[str, importlib.metadata.Distribution] = {}
    for one in importlib.metadata.distributions(path=folders):
        found.setdefault(normalize_name(one.name), one)
    return found


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def format_pin(one: importlib.metadata.Distribution) -> str:
    return f"{normalize_name(one.name)}=={one.version}"


def list_dependencies(name: str) -> list[importlib.metadata.Distribution]:
    """A package of this Python and all of its dependencies, as installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    visited: set[tuple[str, str]] = set()
    pending: list[tuple[str, frozenset[str], bool]] = [(normalize_name(name), frozenset(), True)]
    while pending:
        package, extras, required = pending.pop()
        new = {(package, extra) for extra in ("", *extras)} - visited
        if not new:
            continue
        visited |= new
        try:
            one = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            if not required:
                continue  # not installed because of its marker, for example for another system
            raise ExternalFailure(
                f"{package} is not installed as a package, so it cannot be packed",
                hint="install bedplate with pip, uv or pipx, and create the bundle with that installation",
            ) from None
        found[package] = one
        pending += [wanted for text in one.requires or () if (wanted := _parse_requirement(text, extras)) is not None]
    return [found[package] for package in sorted(found)]


def _parse_requirement(text: str, extras: frozenset[str]) -> tuple[str, frozenset[str], bool] | None:
    """A requirement as name, extras, and whether it has no marker; `None` if it belongs to an extra not requested."""
    requirement, _, marker = text.partition(";")
    found = re.match(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?", requirement)
    if found is None:
        return None
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    if extra is not None and normalize_name(extra[1]) not in extras:
        return None
    wanted = frozenset(normalize_name(one.strip()) for one in (found[2] or "").split(",") if one.strip())
    return normalize_name(found[1]), wanted, not marker.strip()


def measure_wheel_bytes(one: importlib.metadata.Distribution) -> int:
    """The size of a package's files, which is an upper bound for its wheel."""
    return sum(member.file.stat().st_size for member in _list_files(one) if member.file.is_file())


def pack_wheel(one: importlib.metadata.Distribution, folder: Path, tell: PackingCallbacks = SILENT) -> Path:
    """Writes the package's wheel into `folder`; each file is compared with the hash that came with the package."""
    if is_editable(one):
        raise ExternalFailure(
            f"{one.name} is an editable installation, which cannot be packed",
            hint=f"install it as a package: pip install {one.name}=={one.version}",
        )
    return _write_wheel(one, _list_files(one), folder, tell)


def is_editable(one: importlib.metadata.Distribution) -> bool:
    return re.search(r'"editable"\s*:\s*true', one.read_text("direct_url.json") or "") is not None


def find_requirement(name: str) -> str:
    """The requirement that installs this package again: from its index, or from the folder or address it came from."""
    one = importlib.metadata.distribution(name)
    origin = json.loads(one.read_text("direct_url.json") or "{}")
    if not origin:
        return f"{name}=={one.version}"
    commit = origin.get("vcs_info", {})
    return f"{name} @ {commit['vcs']}+{origin['url']}@{commit['commit_id']}" if commit else f"{name} @ {origin['url']}"


def pack_source(
    one: importlib.metadata.Distribution, package: Path, folder: Path, tell: PackingCallbacks = SILENT
) -> Path:
    """Writes the wheel of pure Python that may be an editable installation: its files are those in `package`."""
    info = _find_info_folder(one)
    metadata = [member for member in _list_files(one) if PurePosixPath(member.path).parts[0] == info]
    sources = (file for file in sorted(package.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
    code = [PackageFile(file, f"{package.name}/{file.relative_to(package).as_posix()}") for file in sources]
    return _write_wheel(one, [*code, *metadata], folder, tell, tags=["py3-none-any"])


def _find_info_folder(one: importlib.metadata.Distribution) -> str:
    """The name of its dist-info folder, which starts like the name of its wheel."""
    for file, _ in _read_record(one):
        if file.name == "METADATA" and len(file.parts) == 2 and file.parts[0].endswith(".dist-info"):
            return file.parts[0]
    raise ExternalFailure(
        f"{one.name} {one.version} was installed without a list of its files, so it cannot be packed",
        hint="install it with pip or uv in a virtual environment, not with the system's package manager",
    )


def _read_record(one: importlib.metadata.Distribution) -> list[tuple[PurePosixPath, str | None]]:
    """Each file that was installed, and its SHA-256. Since Python 3.12, `one.files` leaves out missing files."""
    rows = [row for row in csv.reader((one.read_text("RECORD") or "").splitlines()) if row]
    marks = [row[1].partition("=") if len(row) > 1 else ("", "", "") for row in rows]
    digests = [_decode_digest(value) if kind == "sha256" else None for kind, _, value in marks]
    return [(PurePosixPath(row[0]), digest) for row, digest in zip(rows, digests, strict=True)]


def _list_files(one: importlib.metadata.Distribution) -> list[PackageFile]:
    info = _find_info_folder(one)
    data = f"{info.removesuffix('.dist-info')}.data"
    scripts = {point.name for point in one.entry_points if point.group in ("console_scripts", "gui_scripts")}
    found = []
    for file, sha256 in _read_record(one):
        if "__pycache__" in file.parts or (file.parts[0] == info and file.parts[-1] in _INSTALLATION_FILES):
            continue
        path = Path(str(one.locate_file(str(file))))
        if file.parts[0] != ".." and not file.is_absolute():
            found.append(PackageFile(path, file.as_posix(), sha256))
            continue
        # Outside site-packages: programs, headers and data files.
        rest = [part for part in file.parts if part != ".."]
        if rest[0] in _SCRIPT_FOLDERS:
            if PurePosixPath(rest[-1]).stem not in scripts and rest[-1] not in scripts:
                found.append(PackageFile(path, f"{data}/scripts/{'/'.join(rest[1:])}", sha256, script=True))
        elif rest[:2] == ["include", "site"]:
            found.append(PackageFile(path, f"{data}/headers/{'/'.join(rest[4:])}", sha256))
        else:
            found.append(PackageFile(path, f"{data}/data/{'/'.join(rest)}", sha256))
    return found


def _write_wheel(
    one: importlib.metadata.Distribution,
    members: Iterable[PackageFile],
    folder: Path,
    tell: PackingCallbacks,
    tags: list[str] | None = None,
) -> Path:
    info = _find_info_folder(one)
    target = folder / f"{info.removesuffix('.dist-info')}-{_format_tags(select_tags(tags or _read_tags(one)))}.whl"
    staging = target.with_suffix(".making")
    rows: list[tuple[str, str, int | str]] = []
    done = 0
    with zipfile.ZipFile(staging, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member in members:
            found, size = _add_file(archive, member, one, tell, done)
            rows.append((member.path, f"sha256={_encode_digest(found)}", size))
            done += size
        if tags is not None:
            text = "".join(f"Tag: {tag}\n" for tag in tags)
            wheel = f"Wheel-Version: 1.0\nGenerator: bedplate\nRoot-Is-Purelib: true\n{text}".encode()
            if not any(path == f"{info}/WHEEL" for path, _, _ in rows):
                archive.writestr(_create_entry(f"{info}/WHEEL", 0o644), wheel)
                rows.append(
                    (f"{info}/WHEEL", f"sha256={_encode_digest(hashlib.sha256(wheel).hexdigest())}", len(wheel))
                )
        listed = io.StringIO()
        csv.writer(listed, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        archive.writestr(_create_entry(f"{info}/RECORD", 0o644), listed.getvalue())
    return staging.rename(target)


def _add_file(
    archive: zipfile.ZipFile,
    member: PackageFile,
    one: importlib.metadata.Distribution,
    tell: PackingCallbacks,
    before: int,
) -> tuple[str, int]:
    """Adds a file to the wheel; returns its hash and size. `before` bytes were packed before it."""
    digest, size = hashlib.sha256(), 0
    hashed = hashlib.sha256() if member.script else digest
    try:
        mode = member.file.stat().st_mode & 0o777
        large = member.file.stat().st_size > 1 << 30
        with archive.open(_create_entry(member.path, mode), "w", force_zip64=large) as out:
            for number, chunk in enumerate(_read_chunks(member.file)):
                if member.script:
                    hashed.update(chunk)
                    chunk = _replace_shebang(chunk) if number == 0 else chunk
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
                tell.done(before + size)
    except OSError as error:
        raise ExternalFailure(
            f"{one.name} {one.version} is incomplete: cannot read {member.path}",
            cause=error.strerror or str(error),
            hint="install it again (for an engine: bedplate engines remove ID, then repeat this command)",
        ) from error
    if member.sha256 is not None and hashed.hexdigest() != member.sha256:
        # Some installations strip libraries to save space. What runs here is packed, with a note.
        tell.note(f"{one.name} {one.version}: {member.path} differs from its package's hash; it is packed unchanged")
    return digest.hexdigest(), size


def _replace_shebang(start: bytes) -> bytes:
    """The start of a Python script without the path of its interpreter."""
    if moved := _RELOCATABLE_SHEBANG.match(start):
        return b"#!python\n" + start[moved.end() :]
    line, _, rest = start.partition(b"\n")
    return b"#!python\n" + rest if line.startswith(b"#!") and b"python" in line else start


def _read_chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk


def _create_entry(path: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(path, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100000 | (0o755 if mode & 0o111 else 0o644)) << 16
    return entry


def _read_tags(one: importlib.metadata.Distribution) -> list[str]:
    text = one.read_text("WHEEL") or ""
    return re.findall(r"^Tag:\s*(\S+)\s*$", text, re.MULTILINE) or ["py3-none-any"]


def select_tags(tags: Sequence[str], python: tuple[int, int] = sys.version_info[:2]) -> list[str]:
    """The tags that this Python accepts. If there are none, replaces them: some renamed wheels contain wrong tags."""
    major, minor = python
    kept = [tag for tag in tags if _is_accepted(tag, major, minor)]
    return kept or [f"cp{major}{minor}-none-{tag.split('-', 2)[-1]}" for tag in tags]


def _is_accepted(tag: str, major: int, minor: int) -> bool:
    interpreter, abi, _ = (*tag.split("-", 2), "", "")[:3]
    if interpreter == f"cp{major}{minor}":
        return True
    found = re.fullmatch(rf"(py|cp){major}(\d*)", interpreter)
    older = found is not None and int(found[2] or 0) <= minor
    return older and found is not None and (found[1] == "py" or abi == "abi3")


def _format_tags(tags: Iterable[str]) -> str:
    """A wheel's tags in the format of its file name: the values of each part, joined by dots."""
    parts: list[dict[str, None]] = [{}, {}, {}]
    for tag in tags:
        for kind, part in zip(parts, tag.split("-", 2), strict=False):
            kind[part] = None
    return "-".join(".".join(kind) or "any" for kind in parts)


def find_least_glibc(names: Iterable[str], own: str | None) -> str | None:
    """The glibc version that these wheels need; a wheel tagged only `linux` may need the one of this machine."""
    needed: list[tuple[int, int]] = []
    for name in names:
        versions: list[tuple[int, int]] = []
        for part in name.removesuffix(".whl").rpartition("-")[2].split("."):
            if found := re.match(r"manylinux_(\d+)_(\d+)_", part):
                versions.append((int(found[1]), int(found[2])))
            elif found := re.match(r"(manylinux\d+)_", part):
                versions.append(_LEGACY_GLIBC.get(found[1], (2, 17)))
            elif part.startswith("linux_") and own is not None:
                versions.append(parse_glibc_version(own))
        if versions:
            needed.append(min(versions))
    return ".".join(map(str, max(needed))) if needed else None


def parse_glibc_version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major or 0), int(re.match(r"\d*", minor)[0] or 0)  # type: ignore[index]


def _decode_digest(encoded: str) -> str:
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()


def _encode_digest(digest: str) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
