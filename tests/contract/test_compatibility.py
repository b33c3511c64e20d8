"""Documents written by bedplate 0.1 still load without loss and match the schemas.

The files in `v1` are as that version wrote them, with shorter lists and other paths. They are never regenerated. New
keys are added to `keys.txt` by `python -m tests.contract.test_compatibility`, which removes none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.commands import invoke
from tests.contract.documents import BY_NAME, list_keys, read_schema

from bedplate.cli.schema import DOCUMENTS
from bedplate.cli.schema_files import load_record
from bedplate.decide.intent import read_intent, resolve_hardware
from bedplate.values.intent import Intent

V1 = Path(__file__).parent / "v1"
KEYS = V1 / "keys.txt"
every_kind = pytest.mark.parametrize("name", BY_NAME)


def stored(name: str) -> list[Any]:
    """The objects of a stored document: one, or several for lists and JSON lines."""
    text = next(V1.glob(f"{name}.[jy]*")).read_text(encoding="utf-8")
    if name == "intent":
        return [yaml.safe_load(text)]
    if BY_NAME[name].form == "lines":
        return [json.loads(line) for line in text.splitlines()]
    data = json.loads(text)
    return data if BY_NAME[name].form == "list" else [data]


def find_losses(old: Any, new: Any, path: str = "$") -> list[str]:
    """The paths at which `new` lacks a key of `old` or has another value."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [at for key, value in old.items() for at in find_losses(value, new.get(key, "<gone>"), f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [at for i, pair in enumerate(zip(old, new, strict=True)) for at in find_losses(*pair, f"{path}[{i}]")]
    return [] if old == new else [f"{path}: {old!r} is {new!r}"]


@every_kind
def test_version_1_documents_round_trip(name: str) -> None:
    documents = stored(name)
    assert documents
    for old in documents:
        readers = [load_record(record) for record in BY_NAME[name].records]
        lost = []
        for reader in readers:
            try:
                record = msgspec.json.decode(json.dumps(old), type=reader)
            except msgspec.ValidationError as error:
                lost.append([str(error)])
            else:
                lost.append(find_losses(old, json.loads(msgspec.json.encode(record))))
        assert [] in lost, lost


@every_kind
def test_version_1_documents_match_the_schema(name: str) -> None:
    schema = read_schema(name)
    validator = Draft202012Validator(schema)
    documents = [stored(name)] if BY_NAME[name].form == "list" else stored(name)
    for old in documents:
        assert not [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(old)]


def test_version_1_keys_still_exist() -> None:
    now = {line for document in DOCUMENTS for line in list_keys(document)}
    before = set(KEYS.read_text(encoding="utf-8").splitlines())
    assert len(before) > 1000
    assert sorted(before - now) == []
    assert sorted(now - before) == [], "new keys: run `python -m tests.contract.test_compatibility`"


# verbs that read documents


def test_version_1_intent_means_the_same() -> None:
    intent = read_intent(V1 / "intent.yaml")
    raw = yaml.safe_load((V1 / "intent.yaml").read_text(encoding="utf-8"))
    raw["services"][0]["operations"]["incumbent"] = "vllm"  # names are resolved to ids
    raw["services"][1].setdefault("workload", {})["task"] = "embed"
    assert find_losses(raw, json.loads(msgspec.json.encode(intent))) == []
    assert isinstance(intent, Intent) and not intent.notes


def test_plan_reads_saved_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    old = V1 / "hardware.json"
    assert resolve_hardware(read_intent(f"hardware: {old}\n")).cpu.name == stored("hardware")[0]["cpu"]["name"]
    answer = invoke("plan", "meta-llama/Llama-3.1-8B", "--hardware", str(old), "--json")
    assert json.loads(answer.out)["engine"] == "llama.cpp"


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--import", "{run}", "--json"),
        ("diagnose", "{run}", "--json"),
        ("report", "{run}", "--md"),
        ("tune", "--import", "{tuning}", "--json"),
        ("workload", "{request}", "--format", "bedplate", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_verbs_read_version_1_documents(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    paths = {"run": V1 / "run.json", "tuning": V1 / "tuning.json", "request": V1 / "request.jsonl"}
    answer = invoke(*(word.format(**paths) for word in words))
    assert (answer.code, bool(answer.out)) == (0, True), answer.err


if __name__ == "__main__":
    known = KEYS.read_text(encoding="utf-8").splitlines() if KEYS.exists() else []
    lines = {*known, *(line for document in DOCUMENTS for line in list_keys(document))}
    KEYS.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
