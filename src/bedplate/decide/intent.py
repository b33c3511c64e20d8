"""The intent file. Every error names the field, its line and a valid value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from bedplate.engines import load_engines
from bedplate.engines.names import ORCHESTRATORS, find_engine_id, find_nearest_names, find_orchestrator_id
from bedplate.errors import UsageError
from bedplate.values.arrival import DEFAULT_THINK_TIME_S
from bedplate.values.choices import join_with_or
from bedplate.values.hardware import Hardware
from bedplate.values.intent import DeployTarget, Intent, NodePool, Operations, PlatformTenant, Service
from bedplate.values.record import R, from_json
from bedplate.values.units import parse_duration
from bedplate.values.workload import LatencyTarget, LoraAdapter, Workload

MAX_CHARACTERS = 256 * 1024
MAX_NUMBER = 2**53
OURS = {"schema", "origin", "notes", "load"}
"""Fields that programs write. They are never suggested to people."""
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "workload": Workload, "operations": Operations, "latency": LatencyTarget, "deploy": DeployTarget,
}  # fmt: skip
LISTS: dict[str, type[msgspec.Struct]] = {"pools": NodePool, "services": Service, "tenants": PlatformTenant}
ITEMS: dict[str, type[msgspec.Struct]] = {"lora_adapters": LoraAdapter}
"""Lists inside of a section."""
_REMOTE_FIELDS = ("key_env", "share", "price_per_million_tokens", "wait")
_LOCAL_FIELDS: dict[str, object] = {
    "workload": {"origin": "default"}, "operations": None, "pool": None, "engine": None, "replicas": 1, "ttl": None,
    "preload": False,
}  # fmt: skip
"""Fields of services that run here, with the values that mean nothing was given."""
CHIPS = ("hardware", "accelerator", "cpu")
"""Fields that may hold the name of a chip."""
ALIASES = {"context": "context_tokens"}


def read_intent(source: Path | str) -> Intent:
    """Read an intent from a YAML or JSON file (a path), or from text (a string with a line break or a brace)."""
    if isinstance(source, Path) or not re.search(r"[\n{]|: ", source):
        path = Path(source)
        return to_intent(*_parse_text(_read_text(path), path.name))
    return to_intent(*_parse_text(source, "the intent"))


def to_intent(data: object, lines: Mapping[str, int] | None = None, origin: str = "the intent") -> Intent:
    """Check and read parsed YAML or JSON. `lines` has the line of each field, for error messages."""
    place = _FieldLocations(lines or {}, origin)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UsageError(f"{origin}: must be a mapping of fields, got {_describe_value(data)}", hint=_make_top_hint())
    if "intent" in data and set(data) <= {"intent", "expect"}:
        # A test case: an intent and the expected answer.
        inner = {path.removeprefix("intent."): line for path, line in (lines or {}).items()}
        return to_intent(data["intent"], inner, origin)
    given = _stringify_chips(_drop_nulls(data))
    _check_keys(given, "", place)
    intent = _convert(given, Intent, "", place)
    _check_contradictions(intent, given, place)
    workload = _with_model_task(intent.workload, given.get("workload"), intent.model)
    services = tuple(
        msgspec.structs.replace(
            service,
            workload=_with_model_task(service.workload, raw.get("workload"), service.model),
            operations=service.operations
            and _resolve_incumbent(service.operations, f"services[{index}].operations", place),
            engine=service.engine and _resolve_engine(service.engine, f"services[{index}].engine", place),
        )
        for index, (service, raw) in enumerate(zip(intent.services, given.get("services", ()), strict=True))
    )
    notes = [*intent.notes]
    notes += _note_unusual_workload("workload", workload, set(given.get("workload", ())))
    for index, (service, raw) in enumerate(zip(services, given.get("services", ()), strict=True)):
        notes += _note_unusual_workload(f"services[{index}].workload", service.workload, set(raw.get("workload", ())))
    notes += [note for index, pool in enumerate(intent.pools) if (note := _note_unusual_pool(index, pool))]
    found = tuple(dict.fromkeys(notes))
    return msgspec.structs.replace(
        intent,
        workload=workload,
        operations=_resolve_incumbent(intent.operations, "operations", place),
        services=services,
        notes=found,
    )


def override(intent: Intent, **options: Any) -> Intent:
    """The intent with the command line's options applied; `None`: the option was not given."""
    from bedplate.facts.hypothetical import FIELDS as HARDWARE_FIELDS

    given = {ALIASES.get(name, name): value for name, value in options.items() if value is not None}
    data: dict[str, Any] = msgspec.to_builtins(intent)
    data.pop("notes")
    if intent.workload.origin == "default":
        data.pop("workload")
    # A field with its default value counts as not given, so it cannot contradict another field.
    for section, kind in (("workload", Workload), ("operations", Operations)):
        if section in data:
            data[section] = _keep_given_fields(data[section], kind)
    for service in data["services"]:
        service["workload"] = _keep_given_fields(service["workload"], Workload)
    for name, value in given.items():
        if name in ("model", "hardware"):
            _refuse_plural(intent, name)
            data[name] = value
        elif name in HARDWARE_FIELDS:
            _refuse_plural(intent, name)
            data["hardware"] = {**_get_machine_fields(data.get("hardware"), name), name: value}
        elif name in Workload.__struct_fields__ and name not in OURS:
            _refuse_plural(intent, name)
            data.setdefault("workload", {})[name] = value
            data["workload"].pop("origin", None)
        elif name in LatencyTarget.__struct_fields__:
            _refuse_plural(intent, name)
            data.setdefault("workload", {}).setdefault("latency", {})[name] = value
        elif name in Operations.__struct_fields__:
            data.setdefault("operations", {})[name] = value
        elif name in DeployTarget.__struct_fields__:
            data.setdefault("deploy", {})[name] = value
        else:
            raise UsageError(f"{name}: unknown field", hint=_suggest_field(name, _list_all_fields()))
    return to_intent({name: value for name, value in data.items() if value not in ((), [], {})}, origin="the options")


def _get_machine_fields(hardware: object, changed: str) -> dict[str, Any]:
    """The machine as a mapping, so that one field can be changed."""
    if isinstance(hardware, str) and not hardware.endswith(".json") and not _is_file(Path(hardware)):
        hardware = {"accelerator": hardware}
    if isinstance(hardware, dict) and "schema" not in hardware:
        return _drop_count(hardware) if changed == "count" else hardware
    if changed in ("accelerator", "cpu"):
        return {}
    raise UsageError(
        f"{changed}: can only be changed for hypothetical hardware",
        hint='specify the machine: --hardware "8x H100 SXM", or accelerator=…',
    )


def _drop_count(hardware: dict[str, Any]) -> dict[str, Any]:
    """The chip of "8x H100 SXM" without its count, which another field replaces."""
    from bedplate.facts.chips import find_chip

    named = hardware.get("accelerator")
    if not isinstance(named, str):
        return hardware
    try:
        found = find_chip(named, guess=True)
    except UsageError:
        return hardware
    return {**hardware, "accelerator": found.chip.name} if found.counted else hardware


def parse_fields(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `users=50,count=2` into fields and values, with the value syntax of an intent file."""
    found: dict[str, Any] = {}
    for text in texts:
        for piece in re.split(r",(?=\s*\w+\s*=)", text):
            name, equals, value = piece.partition("=")
            if not equals or not name.strip():
                raise UsageError(f"{piece.strip() or text!r} is not FIELD=VALUE", hint="for example users=50,count=2")
            data, _, _ = _parse_text(f"value: {value.strip()}", name.strip())
            found[name.strip()] = data["value"] if isinstance(data, dict) else None
    return found


def resolve_hardware(intent: Intent) -> Hardware:
    """The intent's machine: this one, a saved one, or hypothetical hardware."""
    named = intent.hardware
    if named is None:
        from bedplate.facts.hardware import probe

        return probe()
    if isinstance(named, str):
        path = Path(named).expanduser()
        if path.suffix == ".json" or _is_file(path):
            return from_json(Hardware, _read_text(path, "bedplate probe --json"), origin=path.name)
        named = {"accelerator": named}
    from bedplate.facts.hypothetical import make_simulated_hardware

    return make_simulated_hardware(named)


def names_hardware(text: str) -> bool:
    """Whether the text names hypothetical hardware with an accelerator, such as 8 H100 SXM."""
    from bedplate.facts.hypothetical import make_simulated_hardware

    try:
        return bool(make_simulated_hardware({"accelerator": text}).accelerators)
    except UsageError:
        return False


def _read_text(path: Path, writer: str = "bedplate init") -> str:
    """The text of a file; `writer` is the command that writes such files."""
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_CHARACTERS + 1)
    except OSError as error:
        hint = f"check its name and its permissions; {writer} writes such a file"
        raise UsageError(f"cannot read {path}", cause=error.strerror or str(error), hint=hint) from error
    if len(raw) > 4 * MAX_CHARACTERS:
        raise UsageError(
            f"{path} is larger than {4 * MAX_CHARACTERS:,} bytes, so it is neither an intent nor a saved machine"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "specify an intent in YAML, or a file from bedplate probe --json"
        raise UsageError(f"{path} is not text", cause=str(error), hint=hint) from error


def _parse_text(text: str, origin: str) -> tuple[object, dict[str, int], str]:
    from bedplate.facts.yaml_text import parse_yaml

    return parse_yaml(text, origin)


# data to records


class _FieldLocations:
    """The position of a field, for the cause line of an error."""

    def __init__(self, lines: Mapping[str, int], origin: str) -> None:
        self._lines, self.origin = lines, origin

    def make_error(self, path: str, what: str, hint: str | None = None) -> UsageError:
        line = self._lines.get(path)
        cause = f"line {line} of {self.origin}" if line is not None else None
        message = f"{path}: {what}" if path else f"{self.origin}: {what}"
        return UsageError(message, cause=cause, hint=hint or "docs/intent.md describes the fields of an intent")


def _drop_nulls(data: Any) -> Any:
    """Remove nulls, which mean not specified, and turn whole floats into integers: 1e3 users are 1000 users."""
    if isinstance(data, dict):
        return {key: _drop_nulls(value) for key, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_drop_nulls(value) for value in data]
    if isinstance(data, float) and data.is_integer() and abs(data) <= MAX_NUMBER:
        return int(data)
    return data


def _stringify_chips(data: Any, field: str = "") -> Any:
    """Chip names that are plain numbers, which YAML reads as quantities (accelerator: 4090), as text."""
    if isinstance(data, dict):
        return {key: _stringify_chips(value, key) for key, value in data.items()}
    if isinstance(data, list):
        return [_stringify_chips(value) for value in data]
    return str(data) if field in CHIPS and isinstance(data, int) and not isinstance(data, bool) else data


def _check_keys(data: Any, path: str, place: _FieldLocations) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise place.make_error(path, f"field names must be text, got {key!r}", hint="put it in quotes")
            _check_keys(value, f"{path}.{key}" if path else key, place)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _check_keys(value, f"{path}[{index}]", place)
    elif isinstance(data, int | float) and not abs(data) <= MAX_NUMBER:
        raise place.make_error(path, f"must be at most {MAX_NUMBER:,}, got {data:,}")
    elif not isinstance(data, str | int | float | bool):
        raise place.make_error(path, f"must be text, a number, true or false, got {_describe_value(data)}")


def _convert(data: object, kind: type[R], path: str, place: _FieldLocations) -> R:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _explain_error(str(error), data, path, place) from error


def _explain_error(message: str, data: object, prefix: str, place: _FieldLocations) -> UsageError:
    """msgspec's error in the terms of the file: the path, what is required, what was given."""
    what, _, at = message.partition(" - at `$")
    path = at.rstrip("`")
    value = _get_at(data, path)
    path = prefix + (path if prefix else path.lstrip("."))
    if unknown := re.search(r"unknown field `(.*)`", what):
        return _explain_unknown_field(path, unknown[1], place)
    if missing := re.search(r"missing required field `(.*)`", what):
        return place.make_error(f"{path}.{missing[1]}" if path else missing[1], "is missing")
    if bound := re.fullmatch(r"Expected `\w+` (>=|>|<=|<) (\S+)", what):
        words = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}
        return place.make_error(path, f"must be {words[bound[1]]} {float(bound[2]):g}, got {value:g}")
    if what.startswith("Invalid enum value"):
        choices = _list_choices(path)
        near = difflib.get_close_matches(str(value), choices, 1)
        required = f"must be {join_with_or(choices)}, got {value}" if choices else f"cannot be {value}"
        return place.make_error(path, required, hint=f"did you mean {near[0]}?" if near else None)
    if re.search(r"of length >= 1", what):
        return place.make_error(path, "must not be empty")
    if wanted := re.match(r"Expected `([^`]*)`, got", what):
        return place.make_error(path, f"must be {_describe_types(wanted[1])}, got {_describe_value(value)}")
    return place.make_error(path, what)


def _get_at(data: Any, path: str) -> Any:
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        try:
            data = data[name] if name else data[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _describe_types(types: str) -> str:
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    words |= {"object": "a mapping of fields", "array": "a list"}
    return join_with_or([words.get(kind, kind) for kind in types.split(" | ") if kind != "null"])


def _describe_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e15 else str(value)
    if isinstance(value, str):
        return f'the text "{value[:40]}"'
    if isinstance(value, dict):
        return "a mapping of fields"
    if isinstance(value, list | tuple):
        return "a list"
    return "nothing" if value is None else type(value).__name__


def _find_record(path: str) -> type[msgspec.Struct]:
    """The record type of the fields under this path."""
    last = re.sub(r"\[\d+\]", "", path).rpartition(".")[2]
    return SECTIONS.get(last) or LISTS.get(last) or ITEMS.get(last) or Intent


def _list_choices(path: str) -> list[str]:
    parent, _, field = path.rpartition(".")
    kinds = {entry.name: entry.type for entry in msgspec.structs.fields(_find_record(parent))}
    return _list_literals(kinds.get(field))


def _list_literals(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for part in get_args(kind) for value in _list_literals(part)]


def _list_fields(kind: type[msgspec.Struct]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name not in OURS]


def _list_all_fields() -> list[str]:
    kinds = (Intent, Workload, Operations, LatencyTarget, DeployTarget)
    return [name for kind in kinds for name in _list_fields(kind)]


def _suggest_field(name: str, known: list[str]) -> str | None:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else None


def _explain_unknown_field(path: str, name: str, place: _FieldLocations) -> UsageError:
    full = f"{path}.{name}" if path else name
    kind = _find_record(path)
    for section, other in SECTIONS.items():
        if other is not kind and name in _list_fields(other):
            home = "workload.latency" if section == "latency" else section
            return place.make_error(full, f"unknown field; it belongs under {home}")
    if near := _suggest_field(name, _list_fields(kind)):
        return place.make_error(full, f"unknown field; {near}")
    return place.make_error(full, "unknown field", hint=f"known fields: {', '.join(_list_fields(kind))}")


def _make_top_hint() -> str:
    return f"known fields: {', '.join(_list_fields(Intent))}"


# Checks for contradictions and unusual values


def _check_contradictions(intent: Intent, given: dict[str, Any], place: _FieldLocations) -> None:
    if intent.hardware is not None and intent.pools:
        what = "cannot be combined with pools: use pools for a platform, hardware for one machine"
        raise place.make_error("hardware", what)
    if intent.services:
        for field in ("model", "workload"):
            if field in given:
                raise place.make_error(field, f"cannot be combined with services: each service has its own {field}")
    for field, kind in (("hardware", intent.hardware), ("model", intent.model)):
        if kind is not None and not kind:
            raise place.make_error(field, "must not be empty")
    for index, service in enumerate(intent.services):
        if not service.model:
            raise place.make_error(f"services[{index}].model", "must not be empty")
    _check_work("workload", intent.workload, given.get("workload", {}), intent.model, place)
    for index, service in enumerate(intent.services):
        path, raw = f"services[{index}]", given["services"][index]
        _check_endpoint(path, raw, place)
        _check_work(f"{path}.workload", service.workload, raw.get("workload", {}), service.model, place)
        for field in ("ttl", "wait"):
            _check_duration(f"{path}.{field}", getattr(service, field), place)
        _check_reference(f"{path}.pool", service.pool, [pool.name for pool in intent.pools], place)
        for at, tenant in enumerate(service.tenants):
            _check_reference(f"{path}.tenants[{at}]", tenant, [tenant.name for tenant in intent.tenants], place)
    for index, pool in enumerate(intent.pools):
        _check_pool(f"pools[{index}]", pool, place)
    for field in LISTS:
        items = [one for one in getattr(intent, field) if getattr(one, "url", None) is None]
        _check_names(field, [item.name for item in items], place)
    if (shares := sum(tenant.share or 0 for tenant in intent.tenants)) > 1.0001:
        raise place.make_error("tenants", f"the shares add up to {shares:.0%}, which is more than 100%")
    if intent.pools and not intent.services:
        what = "must not be empty" if "services" in given else "is missing"
        hint = "services: [{model: Qwen/Qwen3-8B}]; for one machine, use hardware instead of pools"
        raise place.make_error("services", f"{what}: pools list machines, and services list what runs on them", hint)


def _check_work(path: str, work: Workload, raw: dict[str, Any], model: object, place: _FieldLocations) -> None:
    if "prompt_tokens" in raw and work.shared_prefix_tokens > work.prompt_tokens:
        what = f"{work.shared_prefix_tokens:,} is more than the {work.prompt_tokens:,} prompt tokens"
        raise place.make_error(f"{path}.shared_prefix_tokens", what)
    if isinstance(model, dict) and "task" in raw and model.get("task") not in (None, work.task):
        raise place.make_error(f"{path}.task", f"is {work.task}, but the model's own task is {model['task']}")
    names = [adapter.served_name for adapter in work.adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        at = f"{path}.lora_adapters[{names.index(twice)}]"
        raise place.make_error(at, f"two adapters are named {twice}", hint="give each a name: {path: …, name: …}")


def _check_endpoint(path: str, raw: dict[str, Any], place: _FieldLocations) -> None:
    """A service is a model for this machine, or an endpoint elsewhere with `url`."""
    if "url" not in raw:
        if field := next((one for one in _REMOTE_FIELDS if one in raw), None):
            raise place.make_error(f"{path}.{field}", "needs url: it describes an endpoint elsewhere")
    elif field := next((one for one in raw if one in _LOCAL_FIELDS and raw[one] != _LOCAL_FIELDS[one]), None):
        raise place.make_error(f"{path}.{field}", "cannot be combined with url: the model runs elsewhere")


def _check_duration(path: str, given: str | float | None, place: _FieldLocations) -> None:
    if isinstance(given, str):
        try:
            found = parse_duration(given)
        except UsageError as error:
            raise place.make_error(path, f"{given!r} is not a duration", hint=error.hint) from error
        if found <= 0:
            otherwise = "keep the model loaded" if path.endswith("ttl") else "reject requests"
            raise place.make_error(path, "must be more than 0", hint=f"leave it out to {otherwise}")


def _check_pool(path: str, pool: NodePool, place: _FieldLocations) -> None:
    if pool.accelerator is None and pool.cpu is None:
        raise place.make_error(path, "needs an accelerator or a cpu")
    if pool.gpus_per_node is not None and pool.gpus_per_node > pool.count:
        what = f"{pool.gpus_per_node} per node, but the whole pool has {pool.count}"
        raise place.make_error(
            f"{path}.gpus_per_node", what, hint="count is the number of accelerators in the whole pool"
        )


def _check_reference(path: str, name: str | None, known: list[str], place: _FieldLocations) -> None:
    if name is not None and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
        raise place.make_error(path, f"{name} is not defined", hint=hint)


def _check_names(field: str, names: list[str | None], place: _FieldLocations) -> None:
    given = [name for name in names if name is not None]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise place.make_error(f"{field}[{names.index(twice)}].name", f"the name {twice} is used twice")


def _with_model_task(work: Workload, raw: dict[str, Any] | None, model: object) -> Workload:
    """Use the model's own task unless the workload specifies one."""
    task = model.get("task") if isinstance(model, dict) else None
    if task in ("embed", "classify", "transcribe", "other") and "task" not in (raw or {}):
        return msgspec.structs.replace(work, task=task)
    return work


def _resolve_incumbent(operations: Operations, path: str, place: _FieldLocations) -> Operations:
    """Replace the incumbent's common name by its id."""
    name = operations.incumbent
    if name is None:
        return operations
    found = find_engine_id(name) or find_orchestrator_id(name)
    if found is None:
        near = find_nearest_names(name)
        hint = (
            f"did you mean {join_with_or(near)}?" if near else f"known: {', '.join((*load_engines(), *ORCHESTRATORS))}"
        )
        raise place.make_error(f"{path}.incumbent", f"unknown engine {name!r}", hint=hint)
    return msgspec.structs.replace(operations, incumbent=found)


def _resolve_engine(name: str, path: str, place: _FieldLocations) -> str:
    """The engine's id, from any of its common names."""
    found = find_engine_id(name)
    if found is None:
        near = find_nearest_names(name)
        raise place.make_error(
            path, f"unknown engine {name!r}", hint=f"did you mean {join_with_or(near)}?" if near else None
        )
    return found


def _note_unusual_workload(path: str, work: Workload, given: set[str]) -> list[str]:
    """Notes on unusual values that may be intended."""
    notes = []
    if {"users", "concurrency"} <= given and work.concurrency is not None and work.concurrency > work.users:
        notes.append(
            f"{path}.concurrency: {work.concurrency:,} requests in flight is more than {work.users:,} users with one "
            "request each; this is right if programs send requests for them"
        )
    if {"users", "requests_per_s"} <= given and work.requests_per_s is not None:
        think_s = work.think_time_s or DEFAULT_THINK_TIME_S
        most = work.users / think_s
        if work.requests_per_s > most * 1.001:
            assumed = "" if work.think_time_s else " (assumed)"
            notes.append(
                f"{path}.requests_per_s: {work.requests_per_s:g} requests/s is more than {work.users:,} users "
                f"with a think time of {think_s:g} s{assumed} send (at most {most:.3g}); the stated rate is used"
            )
    if work.concurrency is not None and work.requests_per_s is not None:
        request_s = work.concurrency / work.requests_per_s
        if not 0.05 <= request_s <= 600:
            notes.append(
                f"{path}: {work.concurrency:,} requests in flight at {work.requests_per_s:g} requests/s means that "
                f"each takes {request_s:.3g} s, by Little's law"
            )
    asked = work.prompt_tokens + work.output_tokens
    if work.context_tokens is not None and {"prompt_tokens", "output_tokens"} <= given and work.context_tokens < asked:
        notes.append(
            f"{path}.context_tokens: {work.context_tokens:,} is less than prompt plus output ({asked:,}); "
            "the plan uses the longer of the two"
        )
    return notes


def _note_unusual_pool(index: int, pool: NodePool) -> str | None:
    if pool.gpus_per_node is not None and pool.count % pool.gpus_per_node:
        rest = pool.count % pool.gpus_per_node
        return f"pools[{index}]: {pool.count} accelerators at {pool.gpus_per_node} per node leave one node with {rest}"
    return None


def _keep_given_fields(data: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    defaults = msgspec.to_builtins(kind())
    kept = {name: value for name, value in data.items() if value is not None and value != defaults[name]}
    return kept | ({"origin": data["origin"]} if "origin" in data else {})


def _refuse_plural(intent: Intent, option: str) -> None:
    if option == "hardware" and intent.pools:
        raise UsageError("hardware: the intent has pools; use only one of the two")
    if option != "hardware" and intent.services:
        raise UsageError(
            f"{option}: the intent has {len(intent.services)} services, each with its own",
            hint="change it in the file, or use a file with one model",
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
