"""Published schemas of custom kinds, to validate emitted files; read from a folder next to the project."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import pytest
import yaml
from referencing import Registry, Resource

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same trees as `yaml.safe_load` makes, in a tenth of the time where libyaml is there."""
CORE_VERSION = "1.33"
CRDS = Path(__file__).parents[2].parent / "shared" / "crds"


@functools.cache
def core_validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    """Like `kubernetes_validate.validate(…, strict=True)`, which reads its 2 MB of definitions for each document."""
    file = "-".join([kind.lower(), api_version.partition("/")[0].partition(".")[0], *api_version.split("/")[1:]])
    schema = kubernetes_validate.utils.schema_contents(f"{_core_folder()}/{file}.json", CORE_VERSION)
    registry = Resource.from_contents(schema) @ _core_definitions()
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _core_folder() -> str:
    (version,) = {one for one in kubernetes_validate.utils.all_versions() if one.startswith(f"{CORE_VERSION}.")}
    return f"kubernetes-json-schema/v{version}-local-strict"


@functools.cache
def _core_definitions() -> Registry[Any]:
    contents = kubernetes_validate.utils.schema_contents(f"{_core_folder()}/_definitions.json", CORE_VERSION)
    return (Resource.from_contents(contents) @ Registry()).crawl()


@functools.cache
def load_custom_kinds() -> dict[tuple[str, str], dict[str, Any]]:
    """Load the schemas by apiVersion and kind; unknown fields are errors."""
    if not CRDS.is_dir():
        pytest.skip("the schemas of custom kinds are not here (../shared/crds)")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            if version["served"]:
                schema = version["schema"]["openAPIV3Schema"]
                found[f"{group}/{version['name']}", kind] = forbid_unknown_fields(schema)
    return found


def forbid_unknown_fields(schema: Any) -> Any:
    """Reject unknown fields, which a cluster would silently drop."""
    if isinstance(schema, list):
        return [forbid_unknown_fields(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: forbid_unknown_fields(inner) for name, inner in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made.pop("pattern", None)
    loose = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not loose and schema.get("type") == "object":
        made["additionalProperties"] = False
    return made
