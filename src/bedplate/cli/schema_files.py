"""Writes the JSON Schemas that `bedplate schema` prints, from the records: `python -m bedplate.cli.schema_files`."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec

from bedplate.cli.schema import DOCUMENTS, FOLDER, Document, locate_schema
from bedplate.decide.intent import CHIPS
from bedplate.engines import load_engines
from bedplate.values.intent import DescribedMachine, Intent, ModelFacts

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = "#/$defs/{name}"
Schema = dict[str, Any]


def generate_schema(document: Document) -> Schema:
    kinds = [load_record(record) for record in document.records]
    described: list[type[msgspec.Struct]] = [*kinds, DescribedMachine, ModelFacts] if Intent in kinds else kinds
    references, definitions = msgspec.json.schema_components(described, ref_template=REFERENCE)
    definitions = _inline_enums(definitions)
    for kind in _find_structs(definitions, described):
        _describe(definitions[kind.__name__], kind)
    for definition in definitions.values():
        definition.pop("title", None)
        if not definition["required"]:
            del definition["required"]
        if not document.is_input:
            # Later versions add keys, and their documents are valid by this schema too.
            definition.pop("additionalProperties", None)
    if Intent in kinds:
        _widen_intent(definitions)
    for kind in kinds:
        _require_version(definitions[kind.__name__], document)
    body = references[0] if len(kinds) == 1 else {"anyOf": list(references[: len(kinds)])}
    if len(kinds) == 1 and document.form != "list":
        body = definitions.pop(kinds[0].__name__)
    return {
        "$schema": DIALECT,
        "$id": f"urn:bedplate:schema:{find_version(document)}",
        "title": find_version(document),
        **_add_summary({"type": "array", "items": body} if document.form == "list" else body, document),
        **({"$defs": dict(sorted(definitions.items()))} if definitions else {}),
    }


def _inline_enums(definitions: Schema) -> Schema:
    """The definitions of records, with the values of an enum in place of a reference to it."""
    enums = {REFERENCE.format(name=name): one for name, one in definitions.items() if "enum" in one}

    def replace_references(part: Any) -> Any:
        if isinstance(part, dict):
            if (enum := enums.get(part.get("$ref", ""))) is not None:
                return {name: value for name, value in part.items() if name != "$ref"} | {"enum": enum["enum"]}
            return {name: replace_references(value) for name, value in part.items()}
        return [replace_references(one) for one in part] if isinstance(part, list) else part

    records: Schema = {name: one for name, one in definitions.items() if "enum" not in one}
    return {name: replace_references(one) for name, one in records.items()} if enums else records


def find_version(document: Document) -> str:
    """As the document's key `schema` has it. Documents without that key count from 1 too."""
    kind = load_record(document.records[0])
    tag = kind.__struct_config__.tag
    if isinstance(tag, str):
        return tag
    fields = {field.name: field.default for field in msgspec.structs.fields(kind)}
    if len(document.records) == 1 and document.form == "one" and isinstance(fields.get("schema"), str):
        return str(fields["schema"])
    return f"{document.name}/1"


def load_record(path: str) -> type[msgspec.Struct]:
    module, _, name = path.partition(":")
    kind: type[msgspec.Struct] = getattr(importlib.import_module(f"bedplate.{module}"), name)
    return kind


def format_schema(document: Document) -> str:
    return json.dumps(generate_schema(document), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    names = {document.name for document in DOCUMENTS}
    for path in FOLDER.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    for document in DOCUMENTS:
        locate_schema(document.name).write_text(format_schema(document), encoding="utf-8")


def _add_summary(body: Schema, document: Document) -> Schema:
    verb = "reads" if document.is_input else "prints"
    form = ", one object a line" if document.form == "lines" else ""
    summary = f"What `bedplate {document.command}` {verb}{form}."
    own = body.pop("description", "")
    return {"description": summary if not own or own.startswith(summary) else f"{summary} {own}", **body}


def _require_version(definition: Schema, document: Document) -> None:
    """Every version of bedplate has written the key `schema` of a document that has one; people may leave it out."""
    if "schema" in definition["properties"] and not document.is_input:
        definition["required"] = ["schema", *(name for name in definition.get("required", ()) if name != "schema")]


# descriptions


def _find_structs(definitions: Schema, roots: list[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """The records behind the definitions, found by walking the types of their fields."""
    found: dict[str, type[msgspec.Struct]] = {}

    def walk(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls.__name__ in found:
                return
            found[info.cls.__name__] = info.cls
        for value in (getattr(info, name) for name in getattr(info, "__struct_fields__", ())):
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
                    walk(one)

    for root in roots:
        walk(msgspec.inspect.type_info(root))
    assert found.keys() == definitions.keys(), "two records of one document have the same class name"  # noqa: S101
    return list(found.values())


def _describe(definition: Schema, kind: type[msgspec.Struct]) -> None:
    for name, text in _read_field_docs(kind).items():
        if name in definition["properties"]:
            definition["properties"][name] = {"description": text, **definition["properties"][name]}


@cache
def _read_field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, as one line; fields of base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        body = _read_class_bodies(base.__module__).get(base.__name__, [])
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[field.target.id] = " ".join(below.value.value.split())
    return docs


@cache
def _read_class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


# the intent file, which takes more than its record


def _widen_intent(definitions: Schema) -> None:
    """What the reader does before it makes an Intent: null is the same as left out, a chip may be called by a number
    alone, and a machine and a model may be described by fields."""
    saved = {"type": "object", "properties": {"schema": {"const": "hardware/1"}}, "required": ["schema"]}
    machine = {"anyOf": [{"type": "string"}, {"$ref": REFERENCE.format(name="DescribedMachine")}, saved]}
    model = {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": REFERENCE.format(name="ModelFacts")}]}
    for name, definition in definitions.items():
        properties: Schema = definition["properties"]
        if name == "Intent":
            properties["hardware"] = _keep_descriptions(properties["hardware"], machine)
        if name in ("Intent", "Service"):
            properties["model"] = _keep_descriptions(properties["model"], model)
        for field, wanted in properties.items():
            if field in ("incumbent", "engine"):
                wanted["examples"] = list(load_engines())
            if field in CHIPS:
                wanted = _add_alternative(wanted, {"type": "integer"})
            # An empty or default section says nothing about the schema.
            if isinstance(wanted.get("default"), dict | list):
                wanted = {key: value for key, value in wanted.items() if key != "default"}
            properties[field] = wanted if name == "ModelFacts" and field == "params_b" else _allow_null(wanted)


def _keep_descriptions(old: Schema, new: Schema) -> Schema:
    return {**{key: value for key, value in old.items() if key == "description"}, **new}


def _allow_null(wanted: Schema) -> Schema:
    return _add_alternative(wanted, {"type": "null"})


def _add_alternative(wanted: Schema, other: Schema) -> Schema:
    words = {key: value for key, value in wanted.items() if key in ("description", "default", "examples")}
    rest = {key: value for key, value in wanted.items() if key not in words}
    choices = rest.pop("anyOf", None) or [rest]
    return {**words, "anyOf": [*choices, *([] if other in choices else [other])]}


if __name__ == "__main__":
    main()
