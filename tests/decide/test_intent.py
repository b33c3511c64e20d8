"""The intent file: valid files are read, and errors name the field and a valid value."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bedplate.decide.intent import (
    MAX_CHARACTERS,
    override,
    parse_fields,
    read_intent,
    resolve_hardware,
    to_intent,
)
from bedplate.engines import load_engines
from bedplate.errors import BedplateError, UsageError
from bedplate.facts.hardware import probe
from bedplate.values import Hardware, from_json, to_json
from bedplate.values.intent import Intent, Operations, Service
from bedplate.values.workload import LatencyTarget, Workload

SCENARIOS = Path(__file__).parents[2].parent / "shared" / "scenarios"

WHOLE = """
hardware: {accelerator: NVIDIA H100 SXM 80GB, count: 8, ram_gb: 2048, os: linux}
model: meta-llama/Meta-Llama-3.1-70B         # hub id
workload:
  users: 200
  concurrency: 64
  requests_per_s: null
  think_time_s: 30
  prompt_tokens: 1024
  output_tokens: 256
  shared_prefix_tokens: 0
  structured_output: false
  precision_sensitive: false
  task: generate
  volume: normal
  latency: {ttft_ms: 500, tpot_ms: 50}
operations:
  model_changes: often
  machinery: container
  portable: false
  ecosystem: null
  incumbent: null
  price_per_hour: null
"""
PLATFORM = """
pools:
  - {name: big, accelerator: H100 SXM, count: 32, gpus_per_node: 8, network: InfiniBand NDR 400}
  - {name: small, cpu: Xeon 6430, cores: 32, count: 4, ram_gb: 256}
services:
  - name: chat
    model: meta-llama/Meta-Llama-3.1-70B
    workload: {users: 200, concurrency: 64}
    pool: big
    tenants: [red]
  - model: {task: embed, params_b: 0.11, format: onnx}
operations: {machinery: kubernetes}
tenants: [{name: red, share: 0.6}, {name: blue, share: 0.4}]
"""


def get_error(text: str) -> UsageError:
    with pytest.raises(UsageError) as bad:
        read_intent(text if "\n" in text else text + "\n")
    return bad.value


def test_complete_example_is_read() -> None:
    intent = read_intent(WHOLE)
    assert intent.hardware == {"accelerator": "NVIDIA H100 SXM 80GB", "count": 8, "ram_gb": 2048, "os": "linux"}
    assert intent.model == "meta-llama/Meta-Llama-3.1-70B"
    assert intent.workload == Workload(
        users=200, concurrency=64, think_time_s=30, prompt_tokens=1024, output_tokens=256,
        latency=LatencyTarget(ttft_ms=500, tpot_ms=50), origin="asked",
    )  # fmt: skip
    assert intent.operations == Operations(model_changes="often", machinery="container")
    assert intent.notes == ()


def test_platform_with_pools_and_services_is_read() -> None:
    intent = read_intent(PLATFORM)
    assert [(pool.name, pool.nodes) for pool in intent.pools] == [("big", 4), ("small", 4)]
    chat, embed = intent.services
    assert (chat.name, chat.pool, chat.tenants, chat.workload.concurrency) == ("chat", "big", ("red",), 64)
    assert isinstance(embed.model, dict) and embed.workload.task == "embed"  # the model's own task
    assert sum(tenant.share or 0 for tenant in intent.tenants) == 1


def test_an_empty_file_is_a_valid_intent() -> None:
    assert read_intent("# nothing yet\n") == Intent() == to_intent({}) == to_intent(None)


def test_json_is_read_as_well_even_with_tabs() -> None:
    data = {"model": "m", "workload": {"users": 3, "requests_per_s": 1.5e-1}}
    intent = read_intent(json.dumps(data, indent="\t"))
    assert (intent.workload.users, intent.workload.requests_per_s) == (3, 0.15)
    assert read_intent(to_json(intent)) == intent


def test_intent_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text(WHOLE, encoding="utf-8-sig")
    assert read_intent(path) == read_intent(str(path)) == read_intent(WHOLE)


@pytest.mark.parametrize("name", ["absent.yaml", "folder"])
def test_unreadable_file_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        read_intent(tmp_path / name)


def test_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text"):
        read_intent(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workload: {users: 0}", "workload.users: must be at least 1, got 0"),
        ("workload: {users: many}", 'workload.users: must be a whole number, got the text "many"'),
        ("workload: {users: 1.5}", "workload.users: must be a whole number, got 1.5"),
        ("workload: {users: true}", "workload.users: must be a whole number, got true"),
        ("workload: {users: 010}", 'workload.users: must be a whole number, got the text "010"'),
        ("workload: {users: 1e30}", "workload.users: must be at most 9,007,199,254,740,992, got 1e+30"),
        ("workload: {think_time_s: 0}", "workload.think_time_s: must be more than 0, got 0"),
        ("workload: {latency: {ttft_ms: -1}}", "workload.latency.ttft_ms: must be more than 0, got -1"),
        ("workload: {conurrency: 3}", "workload.conurrency: unknown field; did you mean concurrency?"),
        ("workload: {prompt-tokens: 3}", "workload.prompt-tokens: unknown field; did you mean prompt_tokens?"),
        ("worklaod: {users: 3}", "worklaod: unknown field; did you mean workload?"),
        ("users: 3", "users: unknown field; it belongs under workload"),
        ("workload: {incumbent: tgi}", "workload.incumbent: unknown field; it belongs under operations"),
        ("workload: {ttft_ms: 3}", "workload.ttft_ms: unknown field; it belongs under workload.latency"),
        ("workload: {xyzzy: 3}", "workload.xyzzy: unknown field"),
        ("workload: {lora_adapters: 0}", "workload.lora_adapters: must be at least 1, got 0"),
        (
            "workload: {lora_adapters: many}",
            'workload.lora_adapters: must be a whole number or a list, got the text "many"',
        ),
        ("workload: {lora_adapters: []}", "workload.lora_adapters: must not be empty"),
        ("workload: {lora_adapters: [{name: a}]}", "workload.lora_adapters[0].path: is missing"),
        (
            "workload: {lora_adapters: [{path: a, rnak: 8}]}",
            "workload.lora_adapters[0].rnak: unknown field; did you mean rank?",
        ),
        (
            "workload: {lora_adapters: [{path: a, rank: 0}]}",
            "workload.lora_adapters[0].rank: must be at least 1, got 0",
        ),
        ("workload: {lora_adapters: [x/a, y/a]}", "workload.lora_adapters[0]: two adapters are named a"),
        ("workload: {task: em}", "workload.task: must be generate, embed, classify, transcribe or other, got em"),
        ("operations: {model_changes: oft}", "operations.model_changes: must be often or rarely, got oft"),
        ("operations: {portable: no}", 'operations.portable: must be true or false, got the text "no"'),
        ("workload: 3", "workload: must be a mapping of fields, got 3"),
        ("pools: {name: a}", "pools: must be a list, got a mapping of fields"),
        ("pools: [{accelerator: H100}]", "pools[0].name: is missing"),
        ("pools: [{name: a}]", "pools[0]: needs an accelerator or a cpu"),
        ("pools: [{name: a, accelerator: H100, cuont: 3}]", "pools[0].cuont: unknown field; did you mean count?"),
        ("pools: [{name: '', accelerator: H100}]", "pools[0].name: must not be empty"),
        ("services: [{workload: {users: 1}}]", "services[0].model: is missing"),
        ("services: [{model: m, workload: {users: 0}}]", "services[0].workload.users: must be at least 1, got 0"),
        ("tenants: [{name: a, share: 60}]", "tenants[0].share: must be at most 1, got 60"),
        ("model: 3", "model: must be text or a mapping of fields, got 3"),
        ("model: {}", "model: must not be empty"),
        ("hardware: []", "hardware: must be text or a mapping of fields, got a list"),
        ("model: !!binary aGk=", "model: must be text, a number, true or false, got bytes"),
        ("hardware: {1: 2}", "hardware: field names must be text, got 1"),
        ("- a", "the intent: must be a mapping of fields, got a list"),
    ],
)  # fmt: skip
def test_an_invalid_field_is_named_with_a_valid_value(text: str, says: str) -> None:
    assert get_error(text).message == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hardware: {cpu: x}\npools: [{name: a, cpu: x}]", "hardware: cannot be combined with pools"),
        ("model: m\nservices: [{model: m}]", "model: cannot be combined with services"),
        ("workload: {users: 2}\nservices: [{model: m}]", "workload: cannot be combined with services"),
        (
            "workload: {prompt_tokens: 10, shared_prefix_tokens: 20}",
            "workload.shared_prefix_tokens: 20 is more than the 10 prompt tokens",
        ),
        ("model: {task: embed}\nworkload: {task: generate}", "workload.task: is generate, but the model's own task is"),
        (
            "pools: [{name: a, accelerator: H100, count: 4, gpus_per_node: 8}]",
            "pools[0].gpus_per_node: 8 per node, but the whole pool has 4",
        ),
        ("pools: [{name: a, cpu: x}, {name: a, cpu: y}]", "pools[0].name: the name a is used twice"),
        ("pools: [{name: a, cpu: x}]\nservices: [{model: m, pool: b}]", "services[0].pool: b is not defined"),
        ("pools: [{name: a, accelerator: H100}]", "services: is missing: pools list machines"),
        ("model: m\npools: [{name: a, accelerator: H100}]", "services: is missing"),
        ("pools: [{name: a, accelerator: H100}]\nservices: []", "services: must not be empty: pools list machines"),
        ("services: [{model: m, tenants: [x]}]", "services[0].tenants[0]: x is not defined"),
        ("tenants: [{name: a, share: 0.7}, {name: b, share: 0.7}]", "tenants: the shares add up to 140%"),
    ],
)
def test_contradictions_are_explained(text: str, says: str) -> None:
    assert get_error(text).message.startswith(says)


def test_an_error_names_the_line() -> None:
    found = get_error("model: m\nworkload:\n  prompt_tokens: 3\n  users: 0\n")
    assert found.cause == "line 4 of the intent" and found.exit_code == 2


def test_a_field_given_twice_is_named_with_both_lines() -> None:
    found = get_error("workload:\n  users: 1\n  prompt_tokens: 3\n  users: 2\n")
    assert found.message == "workload.users: given twice, in lines 2 and 4 of the intent"
    assert get_error('{"model": "a", "model": "b"}').message.startswith("model: given twice")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workload: {users: 2, concurrency: 9}", "workload.concurrency: 9 requests in flight is more than 2 users"),
        ("workload: {users: 10, requests_per_s: 5}", "workload.requests_per_s: 5 requests/s is more than 10 users"),
        ("workload: {concurrency: 1, requests_per_s: 1000}", "by Little's law"),
        (
            "workload: {prompt_tokens: 9, output_tokens: 9, context_tokens: 9}",
            "less than prompt plus output (18)",
        ),
        (
            "pools: [{name: a, accelerator: H100, count: 9, gpus_per_node: 8}]\nservices: [{model: m}]",
            "pools[0]: 9 accelerators at 8 per node",
        ),
        ("services: [{model: m, workload: {users: 2, concurrency: 9}}]", "services[0].workload.concurrency"),
    ],
)
def test_unusual_values_are_noted_and_allowed(text: str, says: str) -> None:
    notes = read_intent(text + "\n").notes
    assert len(notes) == 1 and says in notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "workload: {concurrency: 64}",
        "workload: {users: 60, requests_per_s: 2, think_time_s: 30}",
        "workload: {context_tokens: 100}",
        "pools: [{name: a, accelerator: H100, count: 16, gpus_per_node: 8}]\nservices: [{model: m}]",
    ],
)
def test_usual_values_are_not_noted(text: str) -> None:
    assert read_intent(text + "\n").notes == ()


def test_a_number_in_a_chip_field_is_a_chip_name() -> None:
    assert read_intent("hardware: {accelerator: 4090, count: 2}\n").hardware == {"accelerator": "4090", "count": 2}
    assert read_intent("hardware: 4090\n").hardware == "4090"
    pools = read_intent("pools: [{name: a, accelerator: 3090, count: 4}]\nservices: [{model: m}]\n").pools
    assert (pools[0].accelerator, pools[0].count) == ("3090", 4)
    asked = override(read_intent("hardware: RTX 3090\n"), **parse_fields(["accelerator=4090"]))
    assert resolve_hardware(asked).accelerators[0].name == "NVIDIA GeForce RTX 4090"
    assert "must be text" in get_error("hardware: true").message


def test_yaml_1_1_booleans_and_octals_are_text() -> None:
    intent = read_intent("tenants: [{name: no}, {name: on}, {name: 1:30}, {name: 2024-05-10}]\n")
    assert [tenant.name for tenant in intent.tenants] == ["no", "on", "1:30", "2024-05-10"]
    assert read_intent("workload: {users: 1e3, prompt_tokens: 100_000}\n").workload.users == 1000


def test_anchors_and_merges_work() -> None:
    text = "services:\n- model: a\n  workload: &w {users: 3}\n- model: b\n  workload: {<<: *w, prompt_tokens: 9}\n"
    assert [service.workload.users for service in read_intent(text).services] == [3, 3]


class TestHostileText:
    @pytest.mark.measures
    def test_exponential_aliases_are_rejected_quickly(self) -> None:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
        began = time.process_time()
        assert "through its aliases" in get_error("\n".join(lines)).message
        assert time.process_time() - began < 5

    def test_a_recursive_alias_is_rejected(self) -> None:
        assert get_error("model: &m {a: *m}\n").exit_code == 2

    @pytest.mark.parametrize("text", ["[" * 50_000, "{a: " * 5_000, "model: " + "[" * 30 + "]" * 30])
    def test_deep_nesting_is_refused(self, text: str) -> None:
        error = get_error(text + "\n")
        assert (error.exit_code, "nested more than 20 levels" in error.message) == (2, True)

    def test_a_huge_file_is_refused(self, tmp_path: Path) -> None:
        assert "characters" in get_error("#" * MAX_CHARACTERS + "\n").message
        (tmp_path / "big").write_bytes(b"#" * (5 * MAX_CHARACTERS))
        with pytest.raises(UsageError, match="larger than"):
            read_intent(tmp_path / "big")

    @pytest.mark.parametrize(
        "text",
        [
            "model: !!python/object/apply:os.system [echo]",
            "model: !unknown x",
            "a: b: c",
            "workload: {users: 3",
            "? [a, b]\n: c",
            "? {a: b}\n: c",
            "model: \x00",
            f"workload: {{users: {'9' * 5000}}}",
            "---\na: 1\n---\nb: 2",
            "workload: *nowhere",
            "%YAML 3.0\n---\na: 1",
        ],
    )
    def test_invalid_yaml_is_a_usage_error(self, text: str) -> None:
        assert get_error(text + "\n").exit_code == 2

    @given(st.text(max_size=200))
    def test_any_text_is_an_intent_or_a_usage_error(self, text: str) -> None:
        try:
            read_intent(text + "\n")
        except BedplateError as error:
            assert error.exit_code == 2 and error.message

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["workload", "users", "pools", "name", "services", "model", "hardware", "share"])
                    | st.text(max_size=5),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_data_is_an_intent_or_a_usage_error(self, data: object) -> None:
        try:
            intent = to_intent(data)
        except BedplateError as error:
            assert error.exit_code == 2 and error.message
        else:
            assert from_json(Intent, to_json(intent)) == intent


class TestIncumbent:
    @pytest.mark.parametrize(
        ("said", "engine"),
        [
            ("TensorRT-LLM", "tensorrt-llm"),
            ("LM Studio", "llama.cpp"),
            ("Ollama", "ollama"),
            ("HF Transformers", "pytorch"),
            ("K8s", "kubernetes"),
        ],
    )
    def test_the_usual_spellings_become_ids(self, said: str, engine: str) -> None:
        assert to_intent({"operations": {"incumbent": said}}).operations.incumbent == engine
        service = {"model": "m", "operations": {"incumbent": said}}
        found = to_intent({"services": [service]}).services[0].operations
        assert found is not None and found.incumbent == engine
        assert override(Intent(), incumbent=said).operations.incumbent == engine

    def test_an_unknown_one_is_named_with_its_field_line_and_the_nearest(self) -> None:
        with pytest.raises(UsageError) as bad:
            read_intent("operations:\n  incumbent: vlm\n")
        assert bad.value.message == "operations.incumbent: unknown engine 'vlm'"
        assert (bad.value.cause, bad.value.hint) == ("line 2 of the intent", "did you mean vllm or mlx?")
        with pytest.raises(UsageError, match=r"services\[1\].operations.incumbent") as bad:
            to_intent({"services": [{"model": "m"}, {"model": "n", "operations": {"incumbent": "zzz"}}]})
        assert bad.value.hint == f"known: {', '.join(load_engines())}, dynamo, ray, kubernetes"


class TestOverride:
    def test_options_override_the_file_and_none_is_ignored(self) -> None:
        intent = override(
            read_intent(WHOLE), users=8, concurrency=None, context=4096, model="other", incumbent="tgi", ttft_ms=100
        )
        assert (intent.workload.users, intent.workload.concurrency) == (8, 64)
        assert (intent.workload.context_tokens, intent.model) == (4096, "other")
        assert intent.operations == Operations(model_changes="often", machinery="container", incumbent="tgi")
        assert intent.workload.latency == LatencyTarget(ttft_ms=100, tpot_ms=50)
        assert any("64 requests in flight is more than 8 users" in note for note in intent.notes)

    def test_no_options_change_nothing(self) -> None:
        for text in (WHOLE, PLATFORM, "\n"):
            assert override(read_intent(text), users=None) == read_intent(text)

    def test_options_alone_make_an_intent(self) -> None:
        intent = override(Intent(), users=3, hardware="8x H100")
        assert intent.workload == Workload(users=3) and intent.hardware == "8x H100"

    @pytest.mark.parametrize(
        ("options", "says"),
        [({"users": 0}, "workload.users: must be at least 1, got 0"), ({"usrs": 1}, "usrs: unknown field")],
    )
    def test_bad_options_are_named(self, options: dict[str, int], says: str) -> None:
        with pytest.raises(UsageError) as bad:
            override(Intent(), **options)
        assert bad.value.message.startswith(says)

    @pytest.mark.parametrize("option", ["users", "model", "hardware", "tpot_ms"])
    def test_an_option_cannot_apply_to_several_services(self, option: str) -> None:
        with pytest.raises(UsageError):
            override(read_intent(PLATFORM), **{option: 3})


class TestHardware:
    def test_without_hardware_it_is_this_machine(self) -> None:
        assert resolve_hardware(Intent()).cpu.name == probe().cpu.name

    def test_a_saved_probe_is_that_machine(self, tmp_path: Path) -> None:
        path = tmp_path / "machine.json"
        saved = probe()
        path.write_text(to_json(saved))
        assert resolve_hardware(Intent(hardware=str(path))) == saved
        assert resolve_hardware(Intent(hardware=json.loads(to_json(saved)))) == saved
        path.write_text("{}")
        with pytest.raises(UsageError):
            resolve_hardware(Intent(hardware=str(path)))

    def test_a_mapping_is_hypothetical_hardware(self) -> None:
        machine = resolve_hardware(read_intent(WHOLE))
        assert isinstance(machine, Hardware) and len(machine.accelerators) == 8
        named = resolve_hardware(Intent(hardware="8x H100 SXM"))
        assert [card.name for card in named.accelerators] == [card.name for card in machine.accelerators]


@pytest.mark.skipif(not SCENARIOS.is_dir(), reason="the shared scenarios are not beside this checkout")
def test_every_shared_scenario_is_an_intent() -> None:
    files = sorted(SCENARIOS.glob("*.yaml"))
    assert files
    for path in files:
        data = yaml.safe_load(path.read_text())["intent"]
        from_data, from_text = to_intent(data), read_intent(yaml.safe_dump(data))
        assert from_data == from_text and from_data.hardware and from_data.model
        assert from_data.workload.users == data["workload"]["users"]
        assert resolve_hardware(from_data).os == data["hardware"]["os"]
        assert isinstance(from_data.services, tuple) and not any(isinstance(one, Service) for one in from_data.services)


def test_adapters_are_a_number_or_a_list() -> None:
    counted = read_intent("workload: {lora_adapters: 3}\n").workload
    assert [one.served_name for one in counted.adapters] == ["adapter-1", "adapter-2", "adapter-3"]
    assert not counted.names_adapters and counted.adapter_rank == 16
    listed = read_intent("workload: {lora_adapters: [acme/sql-lora, {path: /a/b.gguf, name: my adapter, rank: 64}]}\n")
    first, second = listed.workload.adapters
    assert listed.workload.names_adapters and listed.workload.adapter_rank == 64
    assert (first.served_name, first.is_on_hub) == ("sql-lora", True)
    assert (second.served_name, second.is_on_hub) == ("my-adapter", False)
    again = override(listed, users=4)
    assert again.workload.adapters == listed.workload.adapters
