"""Bundle: an engine, a model, a plan and bedplate itself, packed for an air-gapped site."""

from __future__ import annotations

from typing import Literal

from bedplate.values.decision import Plan
from bedplate.values.hardware import Hardware
from bedplate.values.record import Record
from bedplate.values.service import ModelOrder

MANIFEST = "bedplate-bundle.json"
SUMS = "SHA256SUMS"
TOP = "bedplate-bundle"
"""The folder that a bundle's archive unpacks to."""


class BundledFile(Record, frozen=True, kw_only=True):
    path: str
    """Relative to the top of the bundle, with slashes."""
    size_bytes: int = 0
    sha256: str = ""
    link: str | None = None
    """Target of a symbolic link; `None`: a file with content."""


class SiteRequirements(Record, frozen=True, kw_only=True):
    """Requirements of the wheels in a bundle on the machine where they are installed."""

    python: str
    """Minor version, such as 3.12."""
    platform: str
    """Platform in sysconfig's notation, such as linux-x86_64."""
    glibc: str | None = None
    """Minimum version, from the tags of the wheels; `None`: not Linux, or another libc."""


class Bundle(Record, frozen=True, kw_only=True):
    """The manifest of a bundle. It is written last."""

    schema: Literal["bundle/1"] = "bundle/1"
    bedplate: str
    """Version of bedplate that made the bundle."""
    made_at: str
    site: SiteRequirements
    wanted: ModelOrder
    """The service as the user requested it. Its model is in the bundle."""
    hardware: Hardware
    """The hardware that the plan is for."""
    plan: Plan
    """The paths of the model's files are relative to the bundle."""
    recipe: tuple[str, ...] = ()
    """The recipe of the engine's environment; empty if an image runs the engine."""
    packages: tuple[str, ...] = ()
    """Packages that the recipe resolved to, with versions."""
    own_packages: tuple[str, ...] = ()
    """bedplate and its dependencies, with versions."""
    image: str | None = None
    """The container image that runs the engine, if the bundle does not contain the engine's packages."""
    prepared: tuple[str, ...] = ()
    """Folder names of the converted weights in the bundle."""
    files: tuple[BundledFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class PackedBundle(Record, frozen=True, kw_only=True):
    """What `bedplate bundle --json` prints."""

    schema: Literal["packed/1"] = "packed/1"
    path: str
    size_bytes: int
    manifest_sha256: str | None = None
    """The hash for `--manifest-sha256`."""
    bundle: Bundle


class BundleTarget(Record, frozen=True, kw_only=True):
    """The machine that a bundle is for, and its requirements."""

    name: str
    """Such as linux-x86_64-cuda13."""
    system: str
    machine: str
    device: Literal["cpu", "cuda"]
    python: str
    """Minor version, such as 3.12."""
    glibc: str | None = None
    """Minimum version, from the tags of the wheels."""
    cuda: str | None = None
    """Major version."""
    driver: str | None = None
    """Minimum version of NVIDIA's driver."""
    capability: str | None = None
    """Compute capability. Code for other GPUs is left out; `None`: nothing is left out."""


class BundledEngine(Record, frozen=True, kw_only=True):
    """An engine in a bundle for another machine: files that become an environment when they are installed."""

    engine: str
    name: str
    version: str
    path: str
    """Path in the archive."""
    place: str
    """Path below `BEDPLATE_HOME` on the target."""
    torch: str | None = None
    """Version of the target's own PyTorch; `None`: the bundle includes PyTorch."""
    packages: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Packages that the engine needs and the bundle does not contain."""
    environment: dict[str, str]
    check: str
    """Python code that must run without error in the installed environment."""
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
    """Version of bedplate that made the bundle."""
    made_at: str
    target: BundleTarget
    engines: tuple[BundledEngine, ...] = ()
    own_place: str | None = None
    """Path below `BEDPLATE_HOME` for bedplate itself; `None`: it is not in the bundle."""
    own_packages: tuple[str, ...] = ()
    model: str | None = None
    model_place: str | None = None
    """Path below `BEDPLATE_HOME` of the file or folder to serve."""
    unpacked_bytes: int
    cleared_bytes: int = 0
    """Bytes of code for other GPUs that were overwritten with zeros."""
    pieces: tuple[BundlePiece, ...]
    """Parts of one tar archive, compressed with zstd."""
    decompressor: BundlePiece
    """The zstandard package for the target's Python."""
    files: tuple[BundlePiece, ...] = ()
    """The installer and the README."""

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class PackedForTarget(Record, frozen=True, kw_only=True):
    """What `bedplate bundle --for TARGET --json` prints."""

    schema: Literal["packed-for-target/1"] = "packed-for-target/1"
    path: str
    size_bytes: int
    manifest_sha256: str | None = None
    """The hash for `--manifest-sha256`."""
    bundle: TargetBundle


class ClusterImage(Record, frozen=True, kw_only=True):
    """An image of somebody else, which `fetch.sh` copies into the bundle and `push.sh` into the mirror."""

    source: str
    target: str
    """Its name in the mirror."""


class OwnImage(Record, frozen=True, kw_only=True):
    """The image of bedplate's gateway, as an OCI layout in the bundle."""

    name: str
    """With its registry and tag."""
    digest: str
    """SHA-256 of its manifest. The same base and packages give the same."""
    size_bytes: int
    architecture: str
    """amd64 or arm64."""
    python: str
    packages: tuple[str, ...]


class ClusterModel(Record, frozen=True, kw_only=True):
    """The content of one volume, or a part of it."""

    service: str
    name: str
    """The repository on the model hub, or the name of a model on this machine."""
    revision: str | None = None
    """The commit; `None`: not known."""
    folder: str
    """Path in the bundle."""
    path: str
    """Folder on the volume that gets the files."""
    marker: str
    """The file to create when all were copied."""
    files: tuple[str, ...] = ()
    """The files that are needed of the repository; empty: all."""
    size_bytes: int | None = None
    """`None`: not in the bundle; `fetch.sh` downloads it."""


class ClusterBundle(Record, frozen=True, kw_only=True):
    """The manifest of a bundle for an air-gapped cluster."""

    schema: Literal["cluster-bundle/1"] = "cluster-bundle/1"
    bedplate: str
    """Version of bedplate that made the bundle."""
    made_at: str
    target: str
    """kubernetes, dynamo or ray."""
    images: tuple[ClusterImage, ...] = ()
    built: tuple[str, ...] = ()
    """Images that are built from a Dockerfile in the bundle, with their registry."""
    own_image: OwnImage | None = None
    models: tuple[ClusterModel, ...] = ()
    files: tuple[BundledFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class PackedForCluster(Record, frozen=True, kw_only=True):
    """What `bedplate bundle --for kubernetes --json` prints."""

    schema: Literal["packed-for-cluster/1"] = "packed-for-cluster/1"
    path: str
    size_bytes: int
    manifest_sha256: str
    """The hash for `--manifest-sha256`."""
    bundle: ClusterBundle
