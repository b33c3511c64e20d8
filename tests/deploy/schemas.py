"""Published schemas of custom kinds, to validate emitted files; read from a folder next to the project."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

CRDS = Path(__file__).parents[2].parent / "shared" / "crds"


@functools.cache
def load_custom_kinds() -> dict[tuple[str, str], dict[str, Any]]:
    """Load the schemas by apiVersion and kind; unknown fields are errors."""
    if not CRDS.is_dir():
        pytest.skip("the schemas of custom kinds are not here (../shared/crds)")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
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
