"""Packs everything that an air-gapped site needs to serve a model. Bundles are written atomically."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bedplate import _version
from bedplate.bundling.confinement import find_manifest_problem
from bedplate.bundling.texts import write_readme, write_serve_script
from bedplate.bundling.writing import BundleWriter, check_output, measure_bytes, write_atomically
from bedplate.decide import decide
from bedplate.decide import plan as plan_decision
from bedplate.decide.intent import resolve_hardware
from bedplate.deploy.emit import emit_target
from bedplate.deploy.images import choose_image
from bedplate.deploy.platform import place_one_service
from bedplate.engines import Engine, EnvironmentRecipe
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.home import check_free_space
from bedplate.progress import Progress, SilentProgress
from bedplate.run import wheels
from bedplate.run.environments import install_libraries, make_environment
from bedplate.run.models import find_intended_model
from bedplate.run.prepare import MANIFEST as PREPARED_MANIFEST
from bedplate.run.prepare import get_prepared_dir
from bedplate.run.ready import decide_engines, prepare_model
from bedplate.values import Decision, Hardware, Model, Plan, replace_fields, to_json
from bedplate.values.bundle import Bundle, BundledFile, PackedBundle, SiteRequirements
from bedplate.values.intent import Intent
from bedplate.values.service import ModelOrder
from bedplate.values.units import format_size

ENGINE_PINS, OWN_PINS = "engine-requirements.txt", "bedplate-requirements.txt"
SLACK_BYTES = 4_000_000
"""Small files and the padding of the archive."""


@dataclass
class BundleContents:
    """Everything that goes into a bundle, known before the first byte is written."""

    wanted: ModelOrder
    hardware: Hardware
    plan: Plan
    decision: Decision
    model_files: list[tuple[str, Path]] = field(default_factory=list)
    """Path in the bundle, and the file on this machine."""
    prepared: list[Path] = field(default_factory=list)
    engine: list[importlib.metadata.Distribution] = field(default_factory=list)
    own: list[importlib.metadata.Distribution] = field(default_factory=list)
    carried: list[importlib.metadata.Distribution] = field(default_factory=list)
    """Packages with a library that the engine uses if the system lacks it."""
    recipe: EnvironmentRecipe | None = None
    python: str = ""
    image: str | None = None
    more: dict[str, str] = field(default_factory=dict)
    """Small text files: path in the bundle and text."""

    @property
    def distributions(self) -> list[importlib.metadata.Distribution]:
        return list({wheels.format_pin(one): one for one in (*self.own, *self.engine, *self.carried)}.values())

    @property
    def size_bytes(self) -> int:
        """Upper bound: wheels are compressed."""
        files = sum(file.stat().st_size for _, file in self.model_files)
        kept = sum(file.stat().st_size for _, file in self.list_prepared_files() if not file.is_symlink())
        return files + kept + sum(_get_wheel_bytes(one) for one in self.distributions) + SLACK_BYTES

    def list_prepared_files(self) -> Iterator[tuple[str, Path]]:
        for folder in self.prepared:
            for file in sorted(folder.rglob("*")):
                if file.is_symlink() or file.is_file():
                    yield f"prepared/{folder.name}/{file.relative_to(folder).as_posix()}", file


def name_default_output(plan: Plan) -> Path:
    return Path(f"bedplate-{plan.model.short_name.lower()}-{plan.engine}.tar")


def make_bundle(
    intent: Intent, engine: str | None = None, output: Path | None = None, progress: Progress | None = None
) -> PackedBundle:
    """Pack a bundle for machines like this one; for hypothetical hardware it names an image instead of packages."""
    progress = progress or SilentProgress()
    if os.name != "posix":
        raise ExternalFailure("bundles need Linux or macOS", hint="on Windows, run bedplate inside WSL")
    if intent.services:
        raise UsageError(
            "a bundle serves one model, but the intent lists services", hint="name one model: --set model=NAME"
        )
    if output is not None:
        check_output(output)
    with tempfile.TemporaryDirectory(prefix="bedplate-bundle-") as scratch:
        load = (
            _collect_for_image(intent, engine)
            if intent.hardware is not None
            else _collect_for_this_machine(intent, engine, progress)
        )
        if load.recipe is not None:
            load.carried = _download_libraries(engine_by_id(load.plan.engine), load.recipe, Path(scratch), progress)
        output = (output or name_default_output(load.plan)).expanduser().absolute()
        check_output(output)
        return _write_bundle(load, output, progress)


# contents


def _collect_for_this_machine(intent: Intent, engine: str | None, progress: Progress) -> BundleContents:
    """Decide, install and convert as `serve` would, without starting the engine."""
    wanted = _read_wanted(intent, engine)
    hardware = probe()
    if engine is not None and engine_by_id(engine).recipe is None:
        return _collect_for_image(intent, engine, hardware)
    (found,) = decide_engines([wanted], hardware, progress)
    chosen = engine_by_id(found.plan.engine)
    recipe = chosen.find_recipe(found.plan.settings.device)
    if recipe is None:
        return _collect_for_image(intent, chosen.id, hardware)
    made = prepare_model(found, progress)
    # Do not pack an environment that the user registered with `engines use`.
    environment = make_environment(chosen, progress, made.plan.settings.device, own=True)
    if _get_minor_version(environment.python) != _get_own_python():
        raise NotPossible(
            f"{chosen.name} is installed for Python {environment.python}, bedplate runs on {platform.python_version()}",
            cause="the site would need both versions of Python",
            hint="unset UV_PYTHON and make the bundle again",
        )
    load = BundleContents(
        wanted, hardware, made.plan, found.decision, recipe=recipe, python=_get_minor_version(environment.python)
    )
    load.engine = list(wheels.find_distributions(Path(environment.path)).values())
    _take_model(load)
    if made.folder is not None:
        load.prepared = _find_linked_folders(made.folder)
    load.own = wheels.list_dependencies("bedplate")
    return load


def _read_wanted(intent: Intent, engine: str | None) -> ModelOrder:
    if isinstance(intent.model, dict):
        hint = "name a file, a folder or owner/name"
        raise UsageError("model: a model given by its facts can be planned but not served", hint=hint)
    return ModelOrder(model=intent.model, workload=intent.workload, operations=intent.operations, engine=engine)


def _collect_for_image(intent: Intent, engine: str | None, hardware: Hardware | None = None) -> BundleContents:
    """Describe a bundle for other hardware, or for an engine that runs from an image; nothing is installed."""
    wanted = _read_wanted(intent, engine)
    hardware = hardware or resolve_hardware(intent)
    facts = find_intended_model(intent.model)
    decision = decide(hardware, facts, intent.workload, engine, operations=intent.operations)
    plan = plan_decision(decision, facts, intent.workload)
    chosen = engine_by_id(plan.engine)
    image = choose_image(chosen, plan.settings, None, hardware.cpu.arch, None)
    if image is None or image.dockerfile is not None:
        here = intent.hardware is None
        why = "bedplate cannot install it" if here else "bedplate cannot install it for hypothetical hardware"
        raise NotPossible(
            f"{chosen.name} cannot be bundled for {_describe_machine(hardware)}",
            cause=f"{why}, and there is no published image of it",
            hint="make the bundle on a machine like the target, or choose another engine with --engine",
        )
    load = BundleContents(wanted, hardware, plan, decision, image=image.name, python=_get_own_python())
    if not (plan.source or plan.model).files:
        raise NotPossible(
            f"the files of {plan.model.name} are not on this machine",
            hint=f"run hf download {plan.model.name} --local-dir FOLDER, then name that folder",
        )
    _take_model(load)
    load.own = wheels.list_dependencies("bedplate")
    load.more = {f"compose/{name}": text for name, text in _write_compose(intent, hardware, facts, decision).items()}
    load.more["images.txt"] = f"{image.name}\n"
    return load


def _write_compose(intent: Intent, hardware: Hardware, facts: Model, decision: Decision) -> dict[str, str]:
    return dict(emit_target(place_one_service(intent, hardware, facts, intent.workload, decision), "compose"))


def _take_model(load: BundleContents) -> None:
    """Add the model's files, and change the plan to their paths in the bundle."""
    source = load.plan.source or load.plan.model
    files = [Path(file) for file in source.files]
    if not files:
        return  # a step of the plan downloads it; it is packed with the prepared files
    if source.format == "gguf":
        name = source.short_name
        one_file = len(files) == 1 and files[0].suffix.lower() != ".gguf"  # a store names files by their hash
        load.model_files = [(f"model/{name}.gguf" if one_file else f"model/{file.name}", file) for file in files]
    else:
        top = files[0].parent
        found = [file for file in sorted(top.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(top))]
        load.model_files = [(f"model/{file.relative_to(top).as_posix()}", file) for file in found]
    for _, file in load.model_files:
        if not os.access(file, os.R_OK):
            raise ExternalFailure(
                f"cannot read {file}", hint="check that the file exists and that this user may read it"
            )
    places = {str(file): path for path, file in load.model_files}
    # A bundle has the language model alone.
    inside = replace_fields(source, files=tuple(places[file] for file in source.files), projector=None)
    load.plan = replace_fields(load.plan, **{"source" if load.plan.source is not None else "model": inside})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _find_linked_folders(folder: Path) -> list[Path]:
    """Return a folder with converted weights and all folders that it links to."""
    found = [folder]
    for link in folder.iterdir():
        if link.is_symlink() and (other := get_prepared_dir() / link.readlink().parts[1]).is_dir():
            found += [one for one in _find_linked_folders(other) if one not in found]
    return [one for one in found if (one / PREPARED_MANIFEST).is_file()]


def _download_libraries(
    engine: Engine, recipe: EnvironmentRecipe, scratch: Path, progress: Progress
) -> list[importlib.metadata.Distribution]:
    """Download small packages with libraries that the site's system may lack."""
    found: list[importlib.metadata.Distribution] = []
    for number, library in enumerate(recipe.libraries if sys.platform.startswith("linux") else ()):
        folder = scratch / f"carrier{number}"
        try:
            install_libraries(engine, recipe, folder, [library.package])
        except ExternalFailure as error:
            progress.note(f"{library.soname} is not packed ({error.cause}): the site's system must provide it")
            continue
        found += wheels.find_distributions(folder).values()
    return found


# writing


def _write_bundle(load: BundleContents, output: Path, progress: Progress) -> PackedBundle:
    total = load.size_bytes
    largest = max((_get_wheel_bytes(one) for one in load.distributions), default=0)
    check_free_space(output.parent, total + largest, "the bundle")
    progress.note(
        f"packing {load.plan.model.name} and {load.image or load.plan.engine}, {format_size(total)} at most, to "
        f"{output}"
    )
    bundle, manifest_sha256 = write_atomically(
        output, total, progress, lambda writer, scratch: _fill_bundle(load, writer, scratch)
    )
    size = measure_bytes(output)
    return PackedBundle(path=str(output), size_bytes=size, manifest_sha256=manifest_sha256, bundle=bundle)


def _fill_bundle(load: BundleContents, writer: BundleWriter, scratch: Path) -> tuple[Bundle, str]:
    """Write everything; return the manifest and its hash."""
    packed = {wheels.format_pin(one): _pack_package(one, writer, scratch) for one in load.distributions}
    for path, file in load.model_files:
        writer.add_file(path, file)
    for path, file in load.list_prepared_files():
        if file.is_symlink():
            writer.link(path, str(file.readlink()))
        else:
            writer.add_file(path, file)
    engine, own = ([wheels.format_pin(one) for one in some] for some in (load.engine, load.own))
    if engine:
        writer.add_text(ENGINE_PINS, _write_pins(engine, packed))
    own_pins = _write_pins(own, packed)
    writer.add_text(OWN_PINS, own_pins)
    for path, text in load.more.items():
        writer.add_text(path, text)
    writer.add_text("plan.json", to_json(load.plan) + "\n")
    writer.add_text("decision.json", to_json(load.decision) + "\n")
    glibc = platform.libc_ver()[1] or None if sys.platform.startswith("linux") else None
    bundle = Bundle(
        bedplate=_version.__version__,
        made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        site=SiteRequirements(
            python=load.python,
            platform=sysconfig.get_platform(),
            glibc=wheels.find_least_glibc([Path(one.path).name for one in packed.values()], glibc),
        ),
        wanted=replace_fields(load.wanted, engine=load.plan.engine, model=load.plan.model.name),
        hardware=load.hardware,
        plan=load.plan,
        recipe=_list_recipe_packages(load.recipe),
        packages=tuple(sorted(engine)),
        own_packages=tuple(sorted(own)),
        image=load.image,
        prepared=tuple(folder.name for folder in load.prepared),
    )
    writer.add_text("README.txt", write_readme(replace_fields(bundle, files=tuple(writer.files))))
    if load.image is None:
        uv = next(file.path for pin, file in packed.items() if pin.startswith("uv=="))
        writer.add_text(
            "serve", write_serve_script(bundle, OWN_PINS, hashlib.sha256(own_pins.encode()).hexdigest()[:10], uv)
        )
    bundle = replace_fields(bundle, files=tuple(writer.files))
    if problem := find_manifest_problem(bundle):
        raise NotPossible(f"the bundle cannot be packed: {problem}", hint="rename this file")
    return bundle, writer.add_manifest(to_json(bundle))


def _pack_package(one: importlib.metadata.Distribution, writer: BundleWriter, scratch: Path) -> BundledFile:
    before = 0

    def tell(done: int) -> None:
        nonlocal before
        writer.report(done - before)
        before = done

    telling = wheels.PackingCallbacks(tell, writer.note)
    if one.name == "bedplate" and wheels.is_editable(one):
        import bedplate

        wheel = wheels.pack_source(one, Path(bedplate.__file__).parent, scratch, telling)
    else:
        wheel = wheels.pack_wheel(one, scratch, telling)
    try:
        return writer.add_file(f"wheels/{wheel.name}", wheel, silent=True)
    finally:
        wheel.unlink()


def _write_pins(pins: list[str], packed: dict[str, BundledFile]) -> str:
    return "".join(f"{pin} --hash=sha256:{packed[pin].sha256}\n" for pin in sorted(pins))


def _list_recipe_packages(recipe: EnvironmentRecipe | None) -> tuple[str, ...]:
    return (*recipe.packages, *recipe.bare) if recipe is not None else ()


def get_recipe_packages(engine: Engine, plan: Plan) -> tuple[str, ...]:
    """Return the packages that this version of bedplate installs for the engine."""
    return _list_recipe_packages(engine.find_recipe(plan.settings.device))


def _get_wheel_bytes(one: importlib.metadata.Distribution) -> int:
    return wheels.measure_wheel_bytes(one)


def _get_minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _get_own_python() -> str:
    return _get_minor_version(platform.python_version())


def _describe_machine(hardware: Hardware) -> str:
    cards = [card.name for card in hardware.accelerators]
    return f"{len(cards)} × {cards[0]}" if cards else hardware.cpu.name
