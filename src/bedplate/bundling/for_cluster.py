"""Makes a bundle for an air-gapped cluster: the emitted files, bedplate's image, models, and scripts for the rest."""

from __future__ import annotations

import csv
import datetime as dt
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from bedplate import _version
from bedplate.bundling.cluster_texts import (
    LAYOUT,
    PLATFORM,
    write_apply_script,
    write_fetch_script,
    write_push_script,
    write_readme,
)
from bedplate.bundling.confinement import find_path_problem
from bedplate.bundling.for_target import PackageDownloader, install_bedplate, is_content, list_pins, parse_target
from bedplate.bundling.install import write_programs
from bedplate.bundling.oci import MACHINES, BaseImage, BuiltImage, build_image, read_base
from bedplate.bundling.writing import BundleWriter, check_output, measure_bytes, write_atomically
from bedplate.decide import decide
from bedplate.decide.intent import resolve_hardware
from bedplate.decide.portfolio import make_portfolio, place_on_one_machine
from bedplate.deploy.air_gap import IMAGES, use_mirror_as_registry
from bedplate.deploy.emit import emit_target
from bedplate.deploy.endpoint import name_image
from bedplate.deploy.kubernetes import write_apply_commands
from bedplate.deploy.platform import Platform, place_one_service, place_services, split_services
from bedplate.deploy.pods import NAMESPACE
from bedplate.deploy.service_containers import (
    HubSource,
    LocalSource,
    ServiceContainers,
    describe_containers,
    make_volume_path,
    name_architecture,
)
from bedplate.engines.traits import MODELS
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.library import find_hub_snapshot
from bedplate.facts.model_folder import list_weight_files
from bedplate.home import check_free_space
from bedplate.progress import Progress, SilentProgress
from bedplate.run import hub
from bedplate.run.builtin import fetch_builtin
from bedplate.run.models import find_intended_model, is_builtin
from bedplate.values import replace_fields, to_json
from bedplate.values.bundle import ClusterBundle, ClusterImage, ClusterModel, OwnImage, PackedForCluster
from bedplate.values.intent import Intent
from bedplate.values.units import format_size

TARGETS = ("kubernetes", "dynamo", "ray")
PREFIX, STATE, USER = "/opt/bedplate", "/state", 1000
CONFIG: dict[str, Any] = {
    "User": f"{USER}:{USER}",
    "ExposedPorts": {"8080/tcp": {}},
    "Env": [
        f"PATH={PREFIX}/bin:/usr/local/bin:/usr/bin:/bin",
        f"BEDPLATE_HOME={STATE}",
        f"HOME={STATE}",
        "PYTHONDONTWRITEBYTECODE=1",
    ],
    "Entrypoint": ["bedplate"],
    "Cmd": ["--help"],
    "Volumes": {STATE: {}},
    "WorkingDir": STATE,
}
"""The same as in the Dockerfile; a test compares them."""
SLACK_BYTES = 4_000_000


@dataclass(frozen=True)
class ClusterRequest:
    """The options of `bedplate bundle --for kubernetes`."""

    intent: Intent
    target: str
    engine: str | None = None
    base: Path | None = None
    output: Path | None = None


@dataclass
class _ModelFiles:
    """A model of the bundle, and its files on this machine by their names in its folder."""

    model: ClusterModel
    files: list[tuple[str, Path]] = field(default_factory=list)


def make_cluster_bundle(request: ClusterRequest, progress: Progress | None = None) -> PackedForCluster:
    """Pack a bundle. Files that are not on this machine are not downloaded: the bundle has a script that does."""
    progress = progress or SilentProgress()
    output = (request.output or Path(f"bedplate-for-{request.target}")).expanduser().absolute()
    check_output(output)
    intent = request.intent
    if intent.deploy.mirror is None:
        raise UsageError(
            "a bundle for a cluster needs the registry that its nodes pull images from",
            hint="deploy.mirror in the intent, or --set mirror=registry.example.com/mirror",
        )
    if request.base is not None and not intent.deploy.endpoint:
        raise UsageError(
            "--base is the base of the gateway's image, but the intent has no gateway",
            hint="deploy.endpoint: true in the intent, or leave out --base",
        )
    if any(is_builtin(one) for one in _list_named_models(intent)):
        fetch_builtin(progress)
    platform = _build_platform(replace_fields(intent, deploy=replace_fields(intent.deploy, models="copy")), request)
    platform = _pin_revisions(platform, progress)
    files = emit_target(platform, request.target)
    units = _describe_units(platform)
    models = list(_list_models(units))
    with tempfile.TemporaryDirectory(prefix="bedplate-image-") as holder:
        image = None
        if request.base is not None:
            image = _build_own_image(request.base.expanduser(), platform, Path(holder), progress)
        elif platform.deploy.endpoint:
            progress.note("the bundle has no image of bedplate's gateway: --base names the image that it is built on")
        contents = _ClusterContents(request.target, platform, files, models, image, _list_architectures(platform))
        total = contents.size_bytes
        check_free_space(output.parent, total, "the bundle")
        progress.note(f"packing {format_size(total)} at most to {output}")
        bundle, sha256 = write_atomically(output, total, progress, lambda writer, _: contents.write(writer))
    size = measure_bytes(output)
    return PackedForCluster(path=str(output), size_bytes=size, manifest_sha256=sha256, bundle=bundle)


def _list_named_models(intent: Intent) -> list[str | None]:
    named = [one.model for one in intent.services if one.url is None] if intent.services else [intent.model]
    return [one for one in named if not isinstance(one, dict)]


def _build_platform(intent: Intent, request: ClusterRequest) -> Platform:
    if not intent.services:
        hardware, model = resolve_hardware(intent), find_intended_model(intent.model)
        decision = decide(hardware, model, intent.workload, request.engine, operations=intent.operations)
        if decision.engine is None:
            raise NotPossible("no engine can serve this model", hint="bedplate plan shows why")
        return place_one_service(intent, hardware, model, intent.workload, decision)
    if request.engine is not None:
        raise UsageError("--engine needs a single model", hint="set the engine of each service in the file")
    local, elsewhere = split_services(intent)
    if elsewhere:  # the gateway's package is large
        from bedplate.run.gateway.elsewhere import check_address

        for _, one in elsewhere:
            check_address(one.url or "", one.key_env)
    intent = replace_fields(intent, services=local)
    models = [find_intended_model(service.model) for service in intent.services]
    machine = None if intent.pools else resolve_hardware(intent)
    found = make_portfolio(intent, models) if machine is None else place_on_one_machine(intent, models, machine)
    return place_services(intent, found, models, machine, elsewhere)


def _describe_units(platform: Platform) -> list[ServiceContainers]:
    deploy = use_mirror_as_registry(platform.deploy)
    return [describe_containers(placed, deploy) for placed in platform.services]


def _list_architectures(platform: Platform) -> list[str]:
    return sorted({name_architecture(placed.node) for placed in platform.services})


# models


def _pin_revisions(platform: Platform, progress: Progress) -> Platform:
    """Pin each repository to the commit that is on this machine, or to its newest one."""
    pinned = dict(platform.deploy.revisions)
    sources: dict[str, set[str | None]] = {}
    for unit in _describe_units(platform):
        for source in unit.sources:
            sources.setdefault(source.repository, set()).add(source.revision)
    problem: BedplateError | None = None
    for repository, revisions in sources.items():
        if repository in pinned or len(revisions) > 1:  # several branches of one repository
            continue
        (revision,) = revisions
        if (snapshot := find_hub_snapshot(repository, revision)) is not None:
            pinned[repository] = snapshot.name
        elif not isinstance(problem, ExternalFailure):  # the hub can be reached
            try:
                pinned[repository] = hub.find_commit(repository, revision)
            except BedplateError as error:
                problem = error
    if problem is not None:
        unknown = ", ".join(one for one in sources if one not in pinned)
        progress.note(
            f"no commit is known of {unknown} ({problem.cause or problem.message}): name it in deploy.revisions"
        )
    return replace(platform, deploy=replace_fields(platform.deploy, revisions=pinned))


def _list_models(units: Sequence[ServiceContainers]) -> Iterator[_ModelFiles]:
    """Yield the sources of all volumes. Services with the same files share a folder of the bundle."""
    folders: dict[object, str] = {}
    for unit in units:
        for source in unit.sources:
            key = (source.repository, source.revision, source.patterns)
            label = f"{source.repository.replace('/', '--')}@{(source.revision or 'main')[:12]}"
            yield _describe_hub_model(unit.name, source, _choose_folder(folders, key, label))
        for local in unit.local_sources:
            folder = _choose_folder(folders, local.files, local.path.rpartition("/")[2])
            yield _describe_local_model(unit.name, local, folder)


def _choose_folder(folders: dict[object, str], key: object, label: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._@-]", "-", label).lstrip(".-") or "model"
    if key not in folders:
        taken = set(folders.values())
        numbered = (f"models/{name}{f'-{number}' if number > 1 else ''}" for number in range(1, len(taken) + 2))
        folders[key] = next(one for one in numbered if one not in taken)
    return folders[key]


def _describe_hub_model(service: str, source: HubSource, folder: str) -> _ModelFiles:
    model = ClusterModel(
        service=service, name=source.repository, revision=source.revision, folder=folder, path=source.path,
        marker=source.marker, files=source.patterns,
    )  # fmt: skip
    snapshot = find_hub_snapshot(source.repository, source.revision)
    if snapshot is None or not _is_complete(snapshot, source.patterns):
        return _ModelFiles(model)
    names = source.patterns or tuple(path for path, _ in _list_visible(snapshot))
    return _measure(model, [(name, snapshot / name) for name in names])


def _is_complete(snapshot: Path, patterns: tuple[str, ...]) -> bool:
    if patterns:
        return all((snapshot / name).is_file() for name in patterns)
    try:
        return bool(list_weight_files(snapshot)) and (snapshot / "config.json").is_file()
    except BedplateError:
        return False


def _describe_local_model(service: str, source: LocalSource, folder: str) -> _ModelFiles:
    if not source.files:
        raise NotPossible(
            f"the files of {source.name} are not on this machine, and it is not on a model hub",
            hint="name its folder or file in the intent",
        )
    first = Path(source.files[0])
    snapshot = first.parent if first.parent.parent.name == "snapshots" else None
    path, files = source.path, _list_visible(first.parent)
    if source.path.endswith(".gguf"):
        path = MODELS
        files = [(make_volume_path(Path(file).name).removeprefix(f"{MODELS}/"), Path(file)) for file in source.files]
    elif not (first.parent / "config.json").is_file() and first.suffix not in (".onnx", ".safetensors"):
        raise NotPossible(
            f"{first} is neither a .gguf file nor in a folder with config.json", hint="copy it under another name"
        )
    model = ClusterModel(
        service=service, name=source.name, revision=snapshot.name if snapshot is not None else None, folder=folder,
        path=path, marker=source.marker,
    )  # fmt: skip
    return _measure(model, files)


def _list_visible(folder: Path) -> list[tuple[str, Path]]:
    found = [(file.relative_to(folder), file) for file in sorted(folder.rglob("*")) if file.is_file()]
    return [(path.as_posix(), file) for path, file in found if not any(part.startswith(".") for part in path.parts)]


def _measure(model: ClusterModel, files: list[tuple[str, Path]]) -> _ModelFiles:
    size = sum(file.stat().st_size for _, file in files)
    return _ModelFiles(replace_fields(model, size_bytes=size), files)


# bedplate's image


@dataclass(frozen=True)
class _OwnImageBuild:
    built: BuiltImage
    record: OwnImage


def _build_own_image(path: Path, platform: Platform, scratch: Path, progress: Progress) -> _OwnImageBuild:
    with progress.step(f"reading {path}"):
        base = read_base(path, scratch)
    nodes = _list_architectures(platform)
    if base.architecture not in nodes:
        raise NotPossible(
            f"--base: {path} is for {base.architecture}, but the nodes of the intent are {' and '.join(nodes)}",
            hint=f"skopeo --override-os linux --override-arch {nodes[0]} copy docker://… oci:NAME",
        )
    root, owners = scratch / "root", {STATE.lstrip("/"): (USER, 0o700)}
    packages = install_own_packages(base, root, scratch, progress)
    deploy = use_mirror_as_registry(platform.deploy)
    name = name_image(deploy)
    labels = {"org.opencontainers.image.title": "bedplate", "org.opencontainers.image.version": _version.__version__}
    with progress.step("writing the image of the gateway"):
        config = {**CONFIG, "Labels": {**(base.config.get("Labels") or {}), **labels}}
        built = build_image(base, root, owners, config, name.rpartition(":")[2], scratch)
    record = OwnImage(
        name=name, digest=built.digest, size_bytes=built.size_bytes, architecture=base.architecture,
        python=base.python, packages=tuple(packages),
    )  # fmt: skip
    return _OwnImageBuild(built, record)


def install_own_packages(base: BaseImage, root: Path, scratch: Path, progress: Progress) -> list[str]:
    """Write an environment with bedplate for the base's Python below `root`; nothing of it is executed here."""
    target = parse_target(f"linux-{MACHINES[base.architecture]}-cpu", base.python)
    tree = root / PREFIX.lstrip("/")
    site = install_bedplate(PackageDownloader(target, scratch, progress), tree, "postgresql")
    (root / STATE.lstrip("/")).mkdir()
    programs = tree / "bin"
    programs.mkdir(exist_ok=True)
    write_programs(site, programs, Path(PREFIX, "bin", "python"))
    for name in ("python", "python3"):
        (programs / name).symlink_to(base.interpreter)
    folder = base.interpreter.rpartition("/")[0]
    (tree / "pyvenv.cfg").write_text(
        f"home = {folder}\ninclude-system-site-packages = false\nversion = {base.python}\n"
    )
    for file in [one for one in root.rglob("*") if one.is_file() and not one.is_symlink() and not is_content(one)]:
        file.unlink()
    _clean_records(site)
    return sorted(list_pins(site))


def _clean_records(site: Path) -> None:
    """Remove rows of files that are not packed: some contain hashes that differ from one build to the next."""
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row and (site / row[0]).is_file()]
        with record.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(sorted(rows))


# writing


@dataclass(frozen=True)
class _ClusterContents:
    target: str
    platform: Platform
    emitted: dict[str, str]
    models: list[_ModelFiles]
    image: _OwnImageBuild | None
    architectures: list[str]

    @property
    def size_bytes(self) -> int:
        """Upper bound."""
        folders = {one.model.folder: one.model.size_bytes or 0 for one in self.models}
        image = self.image.record.size_bytes if self.image is not None else 0
        return sum(folders.values()) + image + sum(map(len, self.emitted.values())) + SLACK_BYTES

    def write(self, writer: BundleWriter) -> tuple[ClusterBundle, str]:
        """Write everything; return the manifest and its hash."""
        for path, text in self.emitted.items():
            writer.add_text(f"{PLATFORM}/{path}", text)
        for one in {one.model.folder: one for one in self.models}.values():
            for name, file in one.files:
                writer.add_file(f"{one.model.folder}/{name}", file)
        if self.image is not None:
            for blob in self.image.built.blobs:
                writer.add_file(f"{LAYOUT}/{blob.path}", blob.file)
            for path, text in self.image.built.texts.items():
                writer.add_text(f"{LAYOUT}/{path}", text)
        bundle = self._describe()
        deploy = self.platform.deploy
        contexts = _find_contexts(self.emitted, bundle.built)
        commands = write_apply_commands(deploy, PLATFORM)
        lacks_own = deploy.endpoint and self.image is None
        own = name_image(use_mirror_as_registry(deploy)) if lacks_own else None
        writer.add_text("README.txt", write_readme(bundle, own))
        writer.add_text("fetch.sh", write_fetch_script(bundle, self.architectures, contexts))
        writer.add_text("push.sh", write_push_script(bundle))
        namespace = deploy.namespace or NAMESPACE
        writer.add_text("apply.sh", write_apply_script(bundle, _find_jobs(self.emitted), namespace, commands))
        bundle = replace_fields(bundle, files=tuple(writer.files))
        if problem := find_path_problem(bundle.files):
            raise NotPossible(f"the bundle cannot be packed: {problem}", hint="rename this file")
        return bundle, writer.add_manifest(to_json(bundle))

    def _describe(self) -> ClusterBundle:
        lines = self.emitted[IMAGES].splitlines()
        pairs = [line.split() for line in lines if not line.startswith("#")]
        own = name_image(use_mirror_as_registry(self.platform.deploy))
        built = [line.split()[-1] for line in lines if line.startswith("# Build it")]
        return ClusterBundle(
            bedplate=_version.__version__,
            made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            target=self.target,
            images=tuple(ClusterImage(source=source, target=target) for source, target in pairs),
            built=tuple(name for name in built if name != own and name in _find_contexts(self.emitted, built)),
            own_image=self.image.record if self.image is not None else None,
            models=tuple(one.model for one in self.models),
        )


def _find_contexts(files: dict[str, str], built: Sequence[str]) -> dict[str, str]:
    """Find the folder with the Dockerfile of each image that is built: the emitted files name images/ENGINE."""
    folders = {path.split("/")[1]: path.rpartition("/")[0] for path in files if path.endswith("/Dockerfile")}
    found = {}
    for name in built:
        label = name.rpartition("/")[2].partition(":")[0].removeprefix("bedplate-")
        engine = next((one for one in folders if one.replace(".", "") == label), None)
        if engine is not None:
            found[name] = f"{PLATFORM}/{folders[engine]}"
    return found


def _find_jobs(files: dict[str, str]) -> dict[str, str]:
    """Return the Job of each service that fills its volume."""
    trees = [tree for path, text in files.items() if path.endswith(".yaml") for tree in yaml.safe_load_all(text)]
    jobs = [tree["metadata"] for tree in trees if tree and tree.get("kind") == "Job"]
    return {one["labels"]["app.kubernetes.io/instance"]: one["name"] for one in jobs}
