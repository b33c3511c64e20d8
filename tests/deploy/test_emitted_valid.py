"""Emitted files match the published schemas of core kinds, custom kinds and Compose."""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.intents import emit_files
from tests.deploy.schemas import CORE_VERSION, LOADER, core_validator, load_custom_kinds
from tests.deploy.test_emitted_walk import ON_A_CLUSTER, WITH_COMPOSE
from tests.deploy.walk import read_manifests

CUSTOM_GROUPS = ("kueue.x-k8s.io", "leaderworkerset.x-k8s.io", "keda.sh", "monitoring.coreos.com", "nvidia.com",
                 "ray.io", "inference.networking.k8s.io", "gateway.networking.k8s.io")  # fmt: skip


def is_custom(tree: dict[str, Any]) -> bool:
    return tree["apiVersion"].partition("/")[0] in CUSTOM_GROUPS


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_core_kinds_match_kubernetes_schemas(name: str, target: str) -> None:
    for tree in read_manifests(emit_files(name, target)):
        if not is_custom(tree):
            core_validator(tree["apiVersion"], tree["kind"]).validate(tree)


def test_unknown_field_of_a_core_kind_is_detected() -> None:
    tree = next(tree for tree in read_manifests(emit_files("h100-chat", "kubernetes")) if tree["kind"] == "Deployment")
    tree["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(tree, CORE_VERSION, strict=True)
    with pytest.raises(jsonschema.ValidationError, match="readinesProbe"):
        core_validator(tree["apiVersion"], tree["kind"]).validate(tree)


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_custom_kinds_match_published_schemas(name: str, target: str) -> None:
    kinds = load_custom_kinds()
    for tree in read_manifests(emit_files(name, target)):
        if is_custom(tree):
            # The CRD does not contain the schema of metadata.
            schema = kinds[tree["apiVersion"], tree["kind"]]
            schema = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
            jsonschema.Draft7Validator(schema).validate(tree)


def test_unknown_field_of_a_custom_kind_is_detected() -> None:
    schema = load_custom_kinds()["keda.sh/v1alpha1", "ScaledObject"]
    tree = next(
        tree for tree in read_manifests(emit_files("h100-chat", "kubernetes")) if tree["kind"] == "ScaledObject"
    )
    tree["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        jsonschema.Draft7Validator(schema).validate(tree)


@functools.cache
def load_compose_schema() -> dict[str, Any]:
    """Load the Compose specification that the package check-jsonschema contains."""
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("the package check-jsonschema, which has the Compose specification, is not installed")
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: dict[str, Any] = json.loads(vendored.read_text(encoding="utf-8"))
    return schema


@pytest.mark.parametrize("name", WITH_COMPOSE)
def test_compose_files_match_the_specification(name: str) -> None:
    files = emit_files(name, "compose")
    schema = load_compose_schema()
    kind = jsonschema.validators.validator_for(schema)
    for path, text in files.items():
        if path.endswith("compose.yaml"):
            kind(schema).validate(yaml.load(text, LOADER))


def test_unknown_field_of_a_compose_file_is_detected() -> None:
    schema = load_compose_schema()
    tree = yaml.safe_load(emit_files("h100-chat", "compose")["compose.yaml"])
    next(iter(tree["services"].values()))["imag"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validators.validator_for(schema)(schema).validate(tree)


@pytest.mark.parametrize(("name", "target"), ON_A_CLUSTER)
def test_kustomization_lists_exactly_the_manifests(name: str, target: str) -> None:
    files = emit_files(name, target)
    tree = yaml.safe_load(files["kustomization.yaml"])
    manifests = [path for path in files if path.endswith(".yaml") and "/" not in path and path != "kustomization.yaml"]
    assert tree["resources"] == manifests and set(tree) <= {"apiVersion", "kind", "resources", "images"}
