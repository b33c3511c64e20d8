"""Writes a container image as an OCI image layout, without a container engine: a base, and one layer above it.

The same base and the same files give the same bytes: entries are sorted, and times and owners are fixed. Formats:
https://github.com/opencontainers/image-spec, version 1.1.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bedplate.errors import ExternalFailure, NotPossible, UsageError

LAYOUT = "oci-layout"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_LAYER_TYPES = re.compile(
    r"application/vnd\.(oci\.image\.layer\.v1\.tar(\+gzip)?|docker\.image\.rootfs\.diff\.tar\.gzip)"
)
CREATED = "1980-01-01T00:00:00Z"
_MTIME = 315_532_800
"""The same time. A fixed one makes the image reproducible."""
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open, b"BZh": bz2.open,
}  # fmt: skip
_PYTHON = re.compile(r"(?:\./|/)?(usr/(?:local/)?bin)/python3\.(\d+)")
_ELF_MACHINES = {62: "amd64", 183: "arm64"}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures as images name them, and as Python and Linux do."""
LEAST_MINOR = 11
_CHUNK_BYTES = 1 << 20
_MOST_JSON_BYTES = 16 << 20
HINT = (
    "name a tar archive of a root file system with Python 3.11 or newer, or an OCI layout: "
    "skopeo copy docker://docker.io/library/python:3.12-slim-bookworm oci:python"
)
Tree = dict[str, Any]


@dataclass(frozen=True)
class Blob:
    """A file of the layout, which is named by its hash."""

    file: Path
    media_type: str
    digest: str
    size_bytes: int
    diff_id: str = ""
    """Of a layer: the hash of its uncompressed archive."""

    @property
    def path(self) -> str:
        return f"blobs/sha256/{self.digest}"

    @property
    def descriptor(self) -> Tree:
        return {"mediaType": self.media_type, "digest": f"sha256:{self.digest}", "size": self.size_bytes}


@dataclass(frozen=True)
class BaseImage:
    """The layers that another one is put on, and the Python in them."""

    layers: tuple[Blob, ...]
    architecture: str
    """amd64 or arm64."""
    python: str
    """Minor version, such as 3.12."""
    interpreter: str
    config: Tree = field(default_factory=dict)
    history: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class BuiltImage:
    blobs: tuple[Blob, ...]
    index: str
    digest: str
    """Of the manifest: what a registry calls the image's digest."""

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def texts(self) -> dict[str, str]:
        return {LAYOUT: '{"imageLayoutVersion":"1.0.0"}', "index.json": self.index}


def read_base(path: Path, scratch: Path) -> BaseImage:
    """Read a base: a folder with an OCI layout, or an archive of a root file system."""
    if (path / LAYOUT).is_file():
        return _read_layout(path)
    if path.is_dir() or not path.exists():
        what = "is a folder without an OCI layout" if path.is_dir() else "does not exist"
        raise UsageError(f"--base: {path} {what}", hint=HINT)
    try:
        with path.open("rb") as file, _decompress(file) as archive:
            layer = _write_layer(scratch / "base.layer", lambda out: shutil.copyfileobj(archive, out, _CHUNK_BYTES))
        found = list(_find_interpreters(layer))
    except (tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile, ValueError) as error:
        raise UsageError(f"--base: {path} is not a tar archive", cause=str(error), hint=HINT) from error
    return _choose_python(path, BaseImage((layer,), "", "", "", history=({"comment": "base"},)), found)


def _read_layout(path: Path) -> BaseImage:
    try:
        index = json.loads((path / "index.json").read_bytes())
        if len(index["manifests"]) != 1 or index["manifests"][0]["mediaType"] == INDEX_TYPE:
            raise UsageError(
                f"--base: {path} has several images", hint="copy one, without --all: skopeo copy docker://… oci:NAME"
            )
        manifest = _read_json(path, index["manifests"][0])
        config = _read_json(path, manifest["config"])
        layers = tuple(
            _open_blob(path, descriptor, diff_id)
            for descriptor, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        )
        found = [one for layer in layers for one in _find_interpreters(layer)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, tarfile.TarError, EOFError) as error:
        raise ExternalFailure(f"--base: the OCI layout in {path} is damaged", cause=str(error), hint=HINT) from error
    history = tuple(config.get("history") or ({"comment": "base"} for _ in layers))
    return _choose_python(path, BaseImage(layers, "", "", "", config.get("config") or {}, history), found)


def _open_blob(path: Path, descriptor: Tree, diff_id: str = "") -> Blob:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    if algorithm != "sha256" or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
        raise ValueError(f"unknown digest {descriptor['digest']}")
    kind = str(descriptor["mediaType"])
    if diff_id and _LAYER_TYPES.fullmatch(kind) is None:
        raise ValueError(f"layers of the type {kind} are not supported")
    file = path / "blobs" / "sha256" / digest
    with file.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
            raise ValueError(f"{file.name} has a different sha256")
    kept = f"{LAYER_TYPE}{'+gzip' if kind.endswith('gzip') else ''}" if diff_id else kind
    return Blob(file, kept, digest, file.stat().st_size, diff_id)


def _read_json(path: Path, descriptor: Tree) -> Tree:
    blob = _open_blob(path, descriptor)
    if blob.size_bytes > _MOST_JSON_BYTES:
        raise ValueError(f"{blob.digest} is too large for JSON")
    found = json.loads(blob.file.read_bytes())
    if not isinstance(found, dict):
        raise TypeError(f"{blob.digest} is not a JSON object")
    return found


def _decompress(file: BinaryIO) -> Any:
    """Return the file, decompressed if it is compressed."""
    start = file.read(6)
    file.seek(0)
    return next((opened(file) for magic, opened in _COMPRESSIONS.items() if start.startswith(magic)), file)


def _find_interpreters(layer: Blob) -> Iterator[tuple[str, int, str]]:
    """Yield folder, minor version and architecture of every Python in a layer."""
    with layer.file.open("rb") as file, tarfile.open(fileobj=_decompress(file), mode="r|") as archive:
        for member in archive:
            found = _PYTHON.fullmatch(member.name)
            if found is None or not member.isreg():
                continue
            opened = archive.extractfile(member)
            start = opened.read(20) if opened is not None else b""
            machine = _ELF_MACHINES.get(int.from_bytes(start[18:20], "little")) if start[:4] == b"\x7fELF" else None
            if machine is not None:
                yield found[1], int(found[2]), machine


def _choose_python(path: Path, base: BaseImage, found: Sequence[tuple[str, int, str]]) -> BaseImage:
    """Choose the Python of the image's own build over the system's, and the newer one of each."""
    usable = [one for one in found if one[1] >= LEAST_MINOR]
    if not usable:
        older = f"only Python 3.{max(one[1] for one in found)}" if found else "no Python"
        raise NotPossible(f"--base: {path} has {older}", cause="bedplate needs Python 3.11 or newer", hint=HINT)
    folder, minor, machine = max(usable, key=lambda one: ("local" in one[0], one[1]))
    python = f"3.{minor}"
    return BaseImage(base.layers, machine, python, f"/{folder}/python{python}", base.config, base.history)


class _Output(Protocol):
    def write(self, data: bytes, /) -> int: ...


class _HashingWriter:
    """Passes data on, and computes its hash and size."""

    def __init__(self, target: _Output) -> None:
        self._target, self._hash, self.count = target, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.count += len(data)
        self._target.write(data)
        return len(data)

    def flush(self) -> None:
        """Called by gzip; the file is flushed when it is closed."""

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _write_layer(file: Path, fill: Callable[[Any], object]) -> Blob:
    """Compress what `fill` writes, without name and time in the header."""
    with file.open("xb") as opened:
        compressed = _HashingWriter(opened)
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=compressed, mtime=0) as packed:
            plain = _HashingWriter(packed)
            fill(plain)
    return Blob(file, f"{LAYER_TYPE}+gzip", compressed.digest, compressed.count, f"sha256:{plain.digest}")


def _write_tree(root: Path, owners: dict[str, tuple[int, int]], out: Any) -> None:
    """Write the files below a folder; `owners` has the user and mode of paths that do not belong to root."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(root.rglob("*"), key=lambda one: one.relative_to(root).parts):
            info = tarfile.TarInfo(file.relative_to(root).as_posix())
            info.mtime = _MTIME
            info.uid, mode = owners.get(info.name, (0, 0))
            info.gid = info.uid
            if file.is_symlink():
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(file), 0o777  # noqa: PTH115
                archive.addfile(info)
            elif file.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, mode or 0o755
                archive.addfile(info)
            else:
                found = file.stat()
                info.size, info.mode = found.st_size, mode or (0o755 if found.st_mode & 0o111 else 0o644)
                with file.open("rb") as opened:
                    archive.addfile(info, opened)


def build_image(
    base: BaseImage, root: Path, owners: dict[str, tuple[int, int]], config: Tree, tag: str, scratch: Path
) -> BuiltImage:
    """Put the files below `root` on the base. `config` replaces fields of the base's; of variables, the same names."""
    layer = _write_layer(scratch / "own.layer", lambda out: _write_tree(root, owners, out))
    layers = (*base.layers, layer)
    variables = dict(one.partition("=")[::2] for one in (*(base.config.get("Env") or ()), *config.get("Env", ())))
    whole = {
        "created": CREATED,
        "architecture": base.architecture,
        "os": "linux",
        "config": {**base.config, **config, "Env": [f"{name}={value}" for name, value in variables.items()]},
        "rootfs": {"type": "layers", "diff_ids": [one.diff_id for one in layers]},
        "history": [*base.history, {"created": CREATED, "created_by": f"bedplate bundle: {tag}"}],
    }
    described = _write_json(whole, CONFIG_TYPE, scratch)
    manifest = _write_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": described.descriptor,
            "layers": [one.descriptor for one in layers],
        },
        MANIFEST_TYPE,
        scratch,
    )
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [
            {
                **manifest.descriptor,
                "annotations": {"org.opencontainers.image.ref.name": tag},
                "platform": {"architecture": base.architecture, "os": "linux"},
            }
        ],
    }
    blobs = {one.digest: one for one in (*layers, described, manifest)}
    return BuiltImage(tuple(blobs.values()), _format_json(index), manifest.digest)


def _format_json(value: Tree) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _write_json(value: Tree, kind: str, scratch: Path) -> Blob:
    data = _format_json(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    file = scratch / digest
    file.write_bytes(data)
    return Blob(file, kind, digest, len(data))
