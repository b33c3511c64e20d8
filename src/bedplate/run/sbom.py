"""A software bill of materials in CycloneDX 1.6: bedplate, its dependencies, engine environments and models."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bedplate._version import __version__
from bedplate.engines import load_engines
from bedplate.errors import BedplateError
from bedplate.facts.gguf import list_parts, read_header
from bedplate.facts.library import LocatedModel, list_local_models
from bedplate.run import builtin
from bedplate.run.environments import EngineEnvironment, list_borrowed_libraries, list_installed
from bedplate.run.locks import list_all_locks, list_hashes
from bedplate.run.wheels import find_distributions, list_dependencies, normalize_name

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
VERSION = "1.6"
_LONGEST_LICENCE = 100
"""Some packages put the text of the licence into the field for its name."""
_OLLAMA_BLOB = re.compile(r"sha256-([0-9a-f]{64})")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})/")
Component = dict[str, Any]


def make_sbom() -> dict[str, Any]:
    """The bill of materials of this installation."""
    own = [_describe_distribution(one, "bedplate", {}) for one in list_dependencies("bedplate")]
    bedplate = next(one for one in own if one["name"] == "bedplate")
    libraries = [one for one in own if one is not bedplate]
    engines = [_describe_environment(environment) for environment in list_installed()]
    models = [_describe_model(model) for model in list_local_models()]
    refs = [one["bom-ref"] for one in (*libraries, *engines)]
    depends = [{"ref": bedplate["bom-ref"], "dependsOn": refs}]
    depends += [
        {"ref": one["bom-ref"], "dependsOn": [inner["bom-ref"] for inner in one["components"]]}
        for one in engines
        if one.get("components")
    ]
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "tools": {"components": [{"type": "application", "name": "bedplate", "version": __version__}]},
            "component": {**bedplate, "type": "application"},
        },
        "components": [*libraries, *engines, *models],
        "dependencies": depends,
    }


def make_package_url(name: str, version: str) -> str:
    return f"pkg:pypi/{normalize_name(name)}@{quote(version, safe='')}"


def _describe_distribution(
    one: importlib.metadata.Distribution, scope: str, hashes: Mapping[str, Sequence[str]]
) -> Component:
    return _describe_package(one.name, one.version, scope, hashes, find_licences(one.metadata))


def _describe_package(
    name: str,
    version: str,
    scope: str,
    hashes: Mapping[str, Sequence[str]],
    licences: Sequence[Component] = (),
) -> Component:
    url = make_package_url(name, version)
    known = hashes.get(f"{normalize_name(name)}=={version}", ())
    return {
        "type": "library",
        "bom-ref": f"{scope}/{url}",
        "name": normalize_name(name),
        "version": version,
        "purl": url,
        # Several hashes mean several wheels for this platform; which of them is installed is not recorded.
        **_list_optional(hashes=[_make_hash(known[0])] if len(known) == 1 else (), licenses=licences),
    }


def find_licences(fields: Any) -> list[Component]:
    """The licence in a package's metadata: an SPDX expression, a name, or what its classifiers say."""
    if expression := fields.get("License-Expression"):
        return [{"expression": expression}]
    name = (fields.get("License") or "").strip()
    if name and name.upper() != "UNKNOWN" and "\n" not in name and len(name) <= _LONGEST_LICENCE:
        return [{"license": {"name": name}}]
    classifiers = [one.split(" :: ")[-1] for one in fields.get_all("Classifier") or () if one.startswith("License ::")]
    return [{"license": {"name": one}} for one in classifiers if one != "OSI Approved"]


def _describe_environment(environment: EngineEnvironment) -> Component:
    engine = load_engines().get(environment.engine)
    scope = f"engine/{environment.engine}/{Path(environment.path).name}"
    properties = [
        ("bedplate:locked", "true" if environment.locked else "false"),
        ("bedplate:python", environment.python),
        ("bedplate:adopted", environment.adopted_path or ""),
    ]
    return {
        "type": "application",
        "bom-ref": scope,
        "name": engine.name if engine is not None else environment.engine,
        "version": environment.version,
        **_list_optional(
            properties=[{"name": name, "value": value} for name, value in properties if value],
            components=_describe_contents(environment, scope),
        ),
    }


def _describe_contents(environment: EngineEnvironment, scope: str) -> list[Component]:
    engine = load_engines().get(environment.engine)
    if environment.built and engine is not None and engine.build is not None:
        name, _, version = engine.build.package.partition("==")
        return [_describe_package(name, version, scope, {engine.build.package: [engine.build.sha256]})]
    if environment.adopted or environment.program:
        named = (package.partition("==") for package in environment.packages)
        return [_describe_package(name, version, scope, {}) for name, _, version in named]
    hashes = _find_locked_hashes(environment)
    found = find_distributions(Path(environment.path))
    libraries = list_borrowed_libraries(environment)
    return [
        *(_describe_distribution(found[name], scope, hashes) for name in sorted(found)),
        *(_describe_file(file, scope) for file in libraries),
    ]


def _find_locked_hashes(environment: EngineEnvironment) -> dict[str, tuple[str, ...]]:
    """The hashes of the wheels of an environment, from the lock that has exactly its packages."""
    installed = {f"{normalize_name(name)}=={version}" for name, version in _split_pins(environment.packages)}
    for lock in list_all_locks(environment.engine):
        hashes = list_hashes(lock.requirements, environment.python)
        if hashes and hashes.keys() <= installed and len(installed) - len(hashes) <= len(lock.elsewhere):
            return hashes
    return {}


def _split_pins(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for package in packages:
        name, _, version = package.partition("==")
        yield name, version


def _describe_file(file: Path, scope: str) -> Component:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"type": "file", "bom-ref": f"{scope}/{file.name}", "name": file.name, "hashes": [_make_hash(digest)]}


def _describe_model(model: LocatedModel) -> Component:
    hashes, url, version, licence = [], None, None, _read_licence(model.path)
    if model.path == builtin.get_builtin_path():
        name, _, version = builtin.PACKAGE.partition("==")
        hashes, url, licence = [builtin.FILE_SHA256], make_package_url(name, version), builtin.LICENCE
    elif found := _SNAPSHOT.search(model.path.as_posix()):
        owner, _, repo = found[1].partition("--")
        version, url = found[2], f"pkg:huggingface/{quote(owner)}/{quote(repo)}@{found[2]}"
    files = [] if hashes else _list_files(model.path)
    scope = f"model/{model.origin}/{model.name}"
    parts = [_describe_model_file(file, f"{scope}/{index}") for index, file in enumerate(files, start=1)]
    if len(parts) == 1 and "hashes" in parts[0]:
        hashes, parts = [one["content"] for one in parts[0]["hashes"]], []
    return {
        "type": "machine-learning-model",
        "bom-ref": scope,
        "name": model.name,
        **_list_optional(
            version=version,
            purl=url,
            hashes=[_make_hash(one) for one in hashes],
            licenses=[{"license": {"name": licence}}] if licence else (),
            properties=[{"name": "bedplate:origin", "value": model.origin}],
            components=parts,
        ),
    }


def _list_files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [part for part in list_parts(path) or (path,) if part.is_file()]


def _describe_model_file(file: Path, ref: str) -> Component:
    """A file of a model. Its SHA-256 is known where a store names files by it; large files are not read for it."""
    blob = file.resolve().name
    named = _OLLAMA_BLOB.fullmatch(blob)
    digest = named[1] if named else blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None
    hashes = [_make_hash(digest)] if digest else []
    return {"type": "file", "bom-ref": ref, "name": file.name, **_list_optional(hashes=hashes)}


def _read_licence(path: Path) -> str | None:
    if path.is_dir():
        return None
    try:
        found = read_header(path).fields.get("general.license")
    except BedplateError:
        return None
    return found.decode("utf-8", "replace") if isinstance(found, bytes) and found else None


def _make_hash(sha256: str) -> Component:
    return {"alg": "SHA-256", "content": sha256}


def _list_optional(**fields: Any) -> Component:
    """The fields that have a value."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items() if value}
