"""Bundle: an engine, a model, a plan and bedplate itself, packed for a site that reaches nothing outside."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from bedplate.values.decision import Plan
from bedplate.values.hardware import Hardware
from bedplate.values.record import Record
from bedplate.values.service import Wanted

MANIFEST = "bedplate-bundle.json"
TOP = "bedplate-bundle"
"""The folder that a bundle's archive unpacks to."""


class BundledFile(Record, frozen=True, kw_only=True):
    path: str
    """From the top of the bundle, with slashes."""
    size_bytes: int = 0
    sha256: str = ""
    link: str | None = None
    """It is a link to this, and has no content of its own."""

    @property
    def inside(self) -> bool:
        """Whether it, and what it links to, stay within the bundle."""
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            return False
        if self.link is None:
            return True
        depth = len(path.parts) - 1
        for part in PurePosixPath(self.link).parts:
            depth += -1 if part == ".." else 1
            if part == "/" or depth < 0:
                return False
        return True


class Site(Record, frozen=True, kw_only=True):
    """What the wheels of a bundle need of the machine that they are installed on."""

    python: str
    """Its minor version: 3.12."""
    platform: str
    """As sysconfig has it: linux-x86_64."""
    glibc: str | None = None
    """The least, by the names of the wheels; `None`: not Linux, or another libc."""


class Bundle(Record, frozen=True, kw_only=True):
    """The manifest, which is written last."""

    schema: Literal["bundle/1"] = "bundle/1"
    bedplate: str
    """Whose version made it."""
    made_at: str
    site: Site
    wanted: Wanted
    """As it was asked for; its model is the one in here."""
    hardware: Hardware
    """That it was planned for."""
    plan: Plan
    """Its model's files are paths within the bundle."""
    recipe: tuple[str, ...] = ()
    """What the engine's environment is made of, as bedplate names it; nothing where an image runs it."""
    packages: tuple[str, ...] = ()
    """What that resolved to, pinned."""
    own_packages: tuple[str, ...] = ()
    """bedplate itself and what it needs, pinned."""
    image: str | None = None
    """The container image that runs the engine, where no packages of it are in here."""
    prepared: tuple[str, ...] = ()
    """Converted weights in here, by the names of their folders."""
    files: tuple[BundledFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Packed(Record, frozen=True, kw_only=True):
    """What `bedplate bundle` made, and where."""

    schema: Literal["packed/1"] = "packed/1"
    path: str
    size_bytes: int
    bundle: Bundle


class BundleTarget(Record, frozen=True, kw_only=True):
    """The machine that a bundle is for, and what it must have before anything is installed."""

    name: str
    """linux-x86_64-cuda13."""
    system: str
    machine: str
    device: Literal["cpu", "cuda"]
    python: str
    """Its minor version: 3.12."""
    glibc: str | None = None
    """The least, by the tags of the wheels."""
    cuda: str | None = None
    """Major version."""
    driver: str | None = None
    """The least version of NVIDIA's driver."""
    capability: str | None = None
    """Compute capability: code for other GPUs is left out. `None`: nothing was left out."""


class BundledEngine(Record, frozen=True, kw_only=True):
    """An engine in a bundle for another machine: a tree of files, which becomes an environment there."""

    engine: str
    name: str
    version: str
    path: str
    """In the archive."""
    place: str
    """Below `BEDPLATE_HOME`."""
    torch: str | None = None
    """The version of PyTorch that the target brings; `None`: the bundle is complete."""
    packages: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Packages that were resolved and are not in the bundle."""
    environment: dict[str, str]
    check: str
    """Python that must run in the finished environment."""
    libraries: tuple[str, ...] = ()
    """Shared libraries under borrowed/, for systems that lack them."""


class BundlePiece(Record, frozen=True, kw_only=True):
    name: str
    size_bytes: int
    sha256: str


class TargetBundle(Record, frozen=True, kw_only=True):
    """The manifest of a bundle for another machine; `install.py` reads it there."""

    schema: Literal["target-bundle/1"] = "target-bundle/1"
    id: str
    bedplate: str
    """Whose version made it."""
    made_at: str
    target: BundleTarget
    engines: tuple[BundledEngine, ...] = ()
    own_place: str | None = None
    """Where bedplate goes below `BEDPLATE_HOME`; `None`: it is not in the bundle."""
    own_packages: tuple[str, ...] = ()
    model: str | None = None
    model_place: str | None = None
    """Below `BEDPLATE_HOME`: the file or folder to serve."""
    unpacked_bytes: int
    cleared_bytes: int = 0
    """Code for other GPUs, which was overwritten with zeros."""
    pieces: tuple[BundlePiece, ...]
    """Parts of one tar archive, compressed with zstd."""
    decompressor: BundlePiece
    """zstandard for the target's Python."""

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class PackedForTarget(Record, frozen=True, kw_only=True):
    """What `bedplate bundle --for` made, and where."""

    schema: Literal["packed-for-target/1"] = "packed-for-target/1"
    path: str
    size_bytes: int
    bundle: TargetBundle
