"""The JSON Schemas are generated from the records and match what the verbs write."""

from __future__ import annotations

import functools
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.commands import all_commands, invoke
from tests.contract.documents import BY_NAME, check_document, read_schema
from tests.deploy.schemas import LOADER

from bedplate.cli.schema import DOCUMENTS, FOLDER, Document
from bedplate.cli.schema_files import find_version, format_schema
from bedplate.decide.intent import read_intent

TESTS = Path(__file__).parents[1]
CAPTURES = TESTS / "captures"
V1 = Path(__file__).parent / "v1"
SCENARIOS = TESTS.parents[1] / "shared" / "scenarios"
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


@every_document
def test_schema_file_is_generated_from_the_record(document: Document) -> None:
    published = (FOLDER / f"{document.name}.json").read_text(encoding="utf-8")
    assert published == format_schema(document), "run `make docs`"


@functools.cache
def check_schema_once(text: str) -> None:
    """Many documents have the same definitions."""
    Draft202012Validator.check_schema(json.loads(text))


@every_document
def test_schema_is_valid_and_names_its_version(document: Document) -> None:
    schema = read_schema(document.name)
    for part in ({**schema, "$defs": {}}, *schema.get("$defs", {}).values()):
        check_schema_once(json.dumps(part))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert re.fullmatch(r"[a-z-]+/\d+", schema["title"])
    assert schema["$id"] == f"urn:bedplate:schema:{schema['title']}"
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
    assert {name.removeprefix("#/$defs/") for name in references} == set(schema.get("$defs", {}))


def test_every_schema_file_has_a_record() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(BY_NAME)


def test_schemas_have_different_ids() -> None:
    assert len({find_version(document) for document in DOCUMENTS}) == len(DOCUMENTS)


# the verb


def test_schema_prints_the_published_file() -> None:
    for document in DOCUMENTS:
        answer = invoke("schema", document.name)
        assert (answer.code, answer.out) == (0, (FOLDER / f"{document.name}.json").read_text(encoding="utf-8"))


def test_schema_lists_every_document() -> None:
    answer = invoke("schema")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == list(BY_NAME)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("decison", "did you mean decision?"),
        ("probe", "bedplate probe writes hardware"),
        ("plan", "bedplate plan writes decision or why-not or what-if or offers or portfolio"),
        ("zzzz", "bedplate schema lists the documents"),
    ],
)
def test_unknown_name_is_a_usage_error_with_a_suggestion(name: str, hint: str) -> None:
    answer = invoke("schema", name)
    assert answer.code == 2
    assert answer.err == f"there is no document named {name!r}\n{hint}"


def test_every_json_option_has_a_schema() -> None:
    with_json = {
        " ".join(path)
        for path, command in all_commands()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    described = {
        re.sub(r" (-|[A-Z]).*", "", document.command) for document in DOCUMENTS if "--json" in document.command
    }
    # `keys --json` is `keys list --json`, and so for `runs` and `adapters`, whose other commands write the same.
    assert with_json - {"keys", "runs", "adapters", "adapters load", "adapters unload"} == described


# what the verbs write

LLAMA, CARD = "meta-llama/Llama-3.1-8B", "RTX 4090"
RUN_ID = "20261116-064003-7056"
"""The captured run `two-cores-arm-llama`."""
WITHOUT_ENGINE = {
    "probe": ("hardware", ["probe", "--json"]),
    "inspect": ("model", ["inspect", "Llama 3.1 8B FP8", "--json"]),
    "models": ("models", ["models", "--hardware", CARD, "--search", "llama", "--all", "--json"]),
    "plan": ("decision", ["plan", LLAMA, "--hardware", CARD, "--json"]),
    "plan, nothing fits": ("decision", ["plan", "deepseek-ai/DeepSeek-R1", "--hardware", CARD, "--json"]),
    "refused": ("why-not", ["plan", LLAMA, "--hardware", CARD, "--why-not", "mlx", "--json"]),
    "chosen": ("why-not", ["plan", LLAMA, "--hardware", CARD, "--engine", "vllm", "--why-not", "vllm", "--json"]),
    "challenger": ("why-not", ["plan", LLAMA, "--hardware", CARD, "--why-not", "vllm", "--json"]),
    "what-if": ("what-if", ["plan", LLAMA, "--hardware", CARD, "--what-if", "users=50,count=2", "--json"]),
    "portfolio": ("portfolio", ["plan", "-f", "{platform}", "--json"]),
    "simulate": ("simulation", ["simulate", LLAMA, "--hardware", "H100 SXM", "--requests", "200", "--rate", "5",
                                "--replicas", "2", "--json"]),
    "estimate": ("explanation", ["estimate", "--json", "--explain",
                                 "hardware=RTX 4090; engine=llama.cpp; model=Llama 3.1 8B; metric=prefill_tok_s"]),
    "workload": ("trace", ["workload", str(CAPTURES / "traces" / "mooncake-conversation.jsonl"), "--json"]),
    "engines": ("engines", ["engines", "--json"]),
    "engines show": ("engine", ["engines", "show", "vllm", "--json"]),
    "prepared": ("prepared", ["prepared", "--json"]),
    "list": ("local-models", ["list", "--json"]),
    "reference": ("references", ["reference", "--list", "--json"]),
    "doctor": ("doctor", ["doctor", "--json"]),
    "ps": ("services", ["ps", "--json"]),
    "bench": ("run", ["bench", "--import", "{run}", "--json"]),
    "bench of others": ("run", ["bench", "--import", str(CAPTURES / "runs" / "guidellm-real.json"), "--json"]),
    "bench --jsonl": ("row", ["bench", "--import", "{run}", "--jsonl"]),
    "diagnose": ("diagnosis", ["diagnose", "{run}", "--json"]),
    "compare": ("verdict", ["compare", "{run}", "{other_run}", "--allow", "quantization", "--allow", "weights",
                            "--json"]),
    "tune --import": ("tuning", ["tune", "--import", str(V1 / "tuning.json"), "--json"]),
    "tune --list": ("knobs", ["tune", "--list", "--json"]),
    "runs": ("runs", ["runs", "--json"]),
    "runs list": ("runs", ["runs", "list", "--json"]),
    "runs show": ("run-details", ["runs", "show", RUN_ID, "--json"]),
    "runs discard": ("discarded-run", ["runs", "discard", RUN_ID, "--yes", "--json"]),
    "runs export": ("signed-result", ["runs", "export", RUN_ID, "--sign"]),
    "runs verify": ("verified-result", ["runs", "verify", "{run}", "--json"]),
    "runs import": ("imported-runs", ["runs", "import", str(CAPTURES / "runs" / "llama-bench.json"), "--json"]),
    "keys add": ("key", ["keys", "add", "alice", "--requests-per-minute", "60", "--expires", "30d", "--json"]),
    "keys list": ("tenants", ["keys", "list", "--json"]),
    "keys": ("tenants", ["keys", "--json"]),
    "usage": ("usage", ["usage", "--json"]),
}  # fmt: skip
NEED_A_HUB = {"local-model", "removed-models"}
NEED_AN_ENGINE = {
    "adapters", "answer", "gate", "endpoint", "connected", "host", "stopped", "shadow", "migration", "watch", "packed",
    "bundle",
}  # fmt: skip
"""Documents of real engines, stored in `v1`."""
PLATFORM = """
pools: [{name: big, accelerator: H100 SXM, count: 8}]
services: [{name: chat, model: meta-llama/Llama-3.1-8B, workload: {users: 20}}]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("case", WITHOUT_ENGINE)
def test_verb_writes_its_document(case: str, home: Path) -> None:
    name, argv = WITHOUT_ENGINE[case]
    files = {"run": "two-cores-arm-llama", "other_run": "two-cores-arm-vllm"}
    for file, capture in files.items():
        if f"{{{file}}}" in argv or "runs" in argv:
            (home / f"{file}.json").write_bytes(
                lzma.decompress((CAPTURES / "runs" / f"{capture}.json.xz").read_bytes())
            )
    (home / "platform.yaml").write_text(PLATFORM)
    paths = {**{file: home / f"{file}.json" for file in files}, "platform": home / "platform.yaml"}
    if "runs" in argv:
        assert invoke("bench", "--import", str(paths["run"])).code == 0
    answer = invoke(*(word.format(**paths) if word.startswith("{") else word for word in argv))
    assert answer.out, answer.err
    check_document(name, answer.out)


def test_procure_writes_its_document(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bedplate.decide import questions

    few = questions.list_purchasable()[:8]
    monkeypatch.setattr(questions, "list_purchasable", lambda: few)
    assert check_document("offers", invoke("plan", LLAMA, "--procure", "--json").out)


def test_every_document_is_tested() -> None:
    written = {name for name, _ in WITHOUT_ENGINE.values()} | NEED_AN_ENGINE | {"offers"} | NEED_A_HUB
    assert written | {document.name for document in DOCUMENTS if document.is_input} == set(BY_NAME)
    assert not written & {document.name for document in DOCUMENTS if document.is_input}


def test_output_may_gain_keys_by_the_published_schema(home: Path) -> None:
    document = json.loads(invoke("usage", "--json").out)
    validator = Draft202012Validator(read_schema("usage"))
    assert validator.is_valid({**document, "a_later_key": 1})
    assert not validator.is_valid({key: value for key, value in document.items() if key != "rows"})
    assert not validator.is_valid({**document, "schema": "usage/2"})


# the intent file

INTENT = Draft202012Validator(read_schema("intent"))


def intents() -> Iterator[Any]:
    for folder in (TESTS / "scenarios", SCENARIOS):
        for path in sorted(folder.glob("*.yaml")):
            data = yaml.load(path.read_text(), LOADER)
            if "error" not in data.get("expect", {}):
                yield pytest.param(data["intent"], id=f"{folder.parent.name}-{path.stem}")
    for page in sorted((TESTS.parent / "docs").glob("*.md")):
        for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            if re.search(r"^(hardware|model|workload|services|pools):", text, re.MULTILINE):
                yield pytest.param(yaml.load(text, LOADER), id=f"{page.stem}-{number}")


@pytest.mark.parametrize("data", intents())
def test_intents_of_scenarios_and_pages_are_valid(data: dict[str, Any]) -> None:
    read_intent(json.dumps(data))
    assert not [f"{error.json_path}: {error.message}" for error in INTENT.iter_errors(data)]


@pytest.mark.parametrize(
    "data",
    [
        {"hardware": 4090},
        {"hardware": {"accelerator": 4090, "count": 2.0, "network": 400}},
        {"hardware": None, "workload": {"users": None}},
        {"model": {"params_b": 8, "task": "embed", "context": None}},
        {"services": [{"model": "Qwen/Qwen3-8B", "ttl": 600, "engine": "vLLM 0.10"}]},
        {"services": [{"model": {"params_b": 0.3}, "ttl": "10m"}]},
        {"schema": "intent/1"},
        {},
    ],
)
def test_intents_that_load_match_the_schema(data: dict[str, Any]) -> None:
    read_intent(json.dumps(data) if data else "\n")
    assert INTENT.is_valid(data)


@pytest.mark.parametrize(
    "data",
    [
        {"conurrency": 3},
        {"workload": {"conurrency": 3}},
        {"workload": {"users": 0}},
        {"workload": {"users": "many"}},
        {"workload": {"latency": {"ttft_s": 1}}},
        {"workload": {"task": "chat"}},
        {"operations": {"machinery": "swarm"}},
        {"operations": {"price_per_hour": 0}},
        {"deploy": {"layout": "mixed"}},
        {"pools": [{"accelerator": "H100"}], "services": [{"model": "a"}]},
        {"services": [{"name": "a"}]},
        {"tenants": [{"name": "red", "share": 2}]},
        {"schema": "intent/2"},
    ],
)
def test_intents_that_do_not_load_do_not_match_the_schema(data: dict[str, Any]) -> None:
    from bedplate.errors import UsageError

    with pytest.raises(UsageError):
        read_intent(json.dumps(data))
    assert not INTENT.is_valid(data)


@pytest.mark.parametrize(
    "data",
    [
        {"hardware": {"acelerator": "H100"}},
        {"hardware": {"accelerator": "H100 SXM", "count": 0}},
        {"hardware": {"accelerator": "H100 SXM", "count": 16_385}},
        {"hardware": {"accelerator": "H100 SXM", "gpus_per_node": 145}},
        {"hardware": {"cpu": "AMD EPYC 9654", "cores": 4_097}},
        {"hardware": {"cpu": "AMD EPYC 9654", "ram_gb": 65_537}},
        {"hardware": {"cpu": "AMD EPYC 9654", "os": "plan9"}},
        {"hardware": {"cpu": "AMD EPYC 9654", "arch": "vax"}},
        {"hardware": {"accelerator": "H100 SXM", "link": "thunderbolt"}},
        {"model": {"task": "embed"}},
        {"model": {"params_b": 0}},
        {"model": {"params_b": 8, "format": "pickle"}},
        {"model": {"params_b": 8, "layers": 4_097}},
        {"model": {"params_b": 8, "colour": "red"}},
    ],
)
def test_rejected_hardware_descriptions_do_not_match_the_schema(data: dict[str, Any]) -> None:
    from bedplate.decide.intent import resolve_hardware
    from bedplate.errors import UsageError
    from bedplate.run.models import find_intended_model

    intent = read_intent(json.dumps(data))
    with pytest.raises(UsageError):
        resolve_hardware(intent) if "hardware" in data else find_intended_model(intent.model)
    assert not INTENT.is_valid(data)


def test_every_field_of_the_intent_is_described() -> None:
    schema = read_schema("intent")
    records = {"Intent": schema, **schema["$defs"]}
    undescribed = [
        f"{record}.{field}"
        for record, definition in records.items()
        for field, wanted in definition["properties"].items()
        if not wanted.get("description")
    ]
    assert not undescribed
