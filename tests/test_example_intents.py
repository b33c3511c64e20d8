"""The intents in examples/: each is planned, verified and emitted; those for this machine are served."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from openai import OpenAI
from tests.commands import invoke
from tests.conftest import Served
from tests.deploy.schemas import LOADER, core_validator
from tests.deploy.test_emitted_valid import is_custom, load_compose_schema

from bedplate.decide import decide, plan
from bedplate.decide.intent import read_intent, resolve_hardware
from bedplate.decide.verify import find_first_fault
from bedplate.run.models import find_intended_model

ROOT = Path(__file__).parents[1]
INTENTS = sorted((ROOT / "examples" / "intents").glob("*.yaml"))
every_intent = pytest.mark.parametrize("path", INTENTS, ids=lambda path: path.stem)


def list_commands(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("# bedplate ")]


def read_table() -> dict[str, tuple[str, str]]:
    """Engine and command of each file in the README."""
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+)\]\(intents/\1\.yaml\) \|[^|]+\| `([^`]+)` \| `([^`]+)` \|$", text, re.M)
    return {name: (engine, command) for name, engine, command in rows}


def list_emitting() -> list[Any]:
    found = [(path, words) for path in INTENTS for words in list_commands(path) if words[1] == "plan"]
    return [pytest.param(words, id=path.stem) for path, words in found]


def test_ten_intents_are_listed_with_their_commands() -> None:
    assert len(INTENTS) == 10 and set(read_table()) == {path.stem for path in INTENTS}
    for path in INTENTS:
        first, command = list_commands(path)[0], read_table()[path.stem][1]
        assert " ".join(first).endswith(command) or command in " ".join(first), path
        assert all(f"examples/intents/{path.name}" in words for words in list_commands(path))


@every_intent
def test_plan_has_the_engine_of_the_table(path: Path) -> None:
    answer = invoke("plan", "-f", str(path), "--json")
    decision = json.loads(answer.out)
    assert answer.code == 0 and decision["engine"] == read_table()[path.stem][0], answer.err


@every_intent
def test_engine_would_accept_the_plan(path: Path) -> None:
    intent = read_intent(path)
    if intent.services:
        return  # planned as a portfolio, whose services are verified when they are placed
    hardware, model = resolve_hardware(intent), find_intended_model(intent.model)
    decision = decide(hardware, model, intent.workload, operations=intent.operations)
    assert decision.launch is not None and decision.fits
    assert find_first_fault(plan(decision, model, intent.workload), decision.launch, hardware) is None


@pytest.mark.parametrize("words", list_emitting())
def test_printed_command_writes_valid_files(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert invoke(*words[1:]).code == 0
    made = tmp_path / words[-1]
    if words[-1].endswith(".sh"):
        assert made.read_text().startswith("#!/usr/bin/env bash\n") and len(made.read_text().splitlines()) < 100
        return
    documents = [tree for file in made.glob("*.yaml") for tree in yaml.load_all(file.read_text(), LOADER) if tree]
    assert documents
    for tree in documents:
        if "services" in tree:
            schema = load_compose_schema()
            jsonschema.validators.validator_for(schema)(schema).validate(tree)
        elif not is_custom(tree) and tree["kind"] != "Kustomization":
            core_validator(tree["apiVersion"], tree["kind"]).validate(tree)


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name, (_, command) in read_table().items() if command == "serve"])
def test_intent_for_this_machine_is_served(name: str, own_home: Path, serve: Callable[..., Served]) -> None:
    tenants = read_intent(ROOT / "examples" / "intents" / f"{name}.yaml").tenants
    key = json.loads(invoke("keys", "add", tenants[0].name, "--json").out)["key"] if tenants else "none"
    served = serve("-f", str(ROOT / "examples" / "intents" / f"{name}.yaml"))
    assert served.endpoint, "".join(served.stderr)
    with OpenAI(base_url=served.url, api_key=key, max_retries=0) as client:
        (model,) = client.models.list()
        question = "What is the capital of France? Answer in one word."
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0
        )
    assert "Paris" in str(answer.choices[0].message.content)
