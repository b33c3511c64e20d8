"""The rules: their sources, their coverage by scenarios, and the fields that decide."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decide.scenario_files import decide_intent, list_own_files, list_shared_files, read_scenario

from bedplate.decide import candidates, case, decide, rules
from bedplate.decide.case import DecisionCase
from bedplate.decide.explain import REASONS
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.decide.rules import ARTICLES, CHALLENGES, DOUBTS, ORCHESTRATION, PICKS, RULES_PAGE, DecisionRule
from bedplate.engines import load_engines
from bedplate.engines.names import ORCHESTRATORS
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.run.models import find_intended_model
from bedplate.show.rules import write_rules_page
from bedplate.values import Decision, Workload

SEEDS = Path(__file__).parents[2].parent / "shared" / "seeds"
ALL: list[DecisionRule[..., Any]] = [*PICKS, *DOUBTS, *CHALLENGES, *ORCHESTRATION, *REASONS]
ELSEWHERE = {"evidence.calibrated", "build.cpu", "tuned.measured", "vision.images", "layout.mixture"}
"""Reasons that a scenario cannot have: they need measurements or files, or depend on what bedplate installs."""


SEED_OF = dict(zip(ARTICLES, ("000", "001", "002", "003", "004"), strict=True))
QUOTES = rf"""({"|".join(ARTICLES)})((?:,? "[^"]+")+)"""
SOURCE = re.compile(rf"{QUOTES}|physics: |measurement: |store: |[\w.-]+/[\w.-]+: |file header|the engine's package")
"""A source article with a quotation, physics, a measurement, a vendor's repository, or file contents."""


def normalize(text: str) -> str:
    """The words alone, without line breaks and typography."""
    return " ".join(re.sub(r"[^\x20-\x7e]+", " ", text.replace("’", "'")).split()).lower()


def find_quotes(source: str) -> Iterator[tuple[str, str]]:
    """(file number of the article, quoted words) of a source: cheat-sheet "these", "and these"; landscape "those"."""
    for article, quoted in re.findall(QUOTES, source):
        for words in re.findall(r'"([^"]+)"', quoted):
            yield SEED_OF[article], words


def list_sources() -> set[str]:
    """The sources of rules and of thresholds."""
    written = re.finditer(QUOTES, "".join(map(inspect.getsource, (case, candidates))))
    return {rule.source for rule in ALL} | {found[0] for found in written}


class TestSources:
    def test_every_rule_has_a_unique_id_a_sentence_and_a_source(self) -> None:
        ids = [rule.id for rule in ALL]
        assert len(ids) == len(set(ids))
        for rule in ALL:
            assert re.fullmatch(r"[a-z0-9.-]+", rule.id)
            assert rule.sentence.endswith(".") and 10 < len(rule.sentence) < 140, rule.id
            assert SOURCE.match(rule.source), rule.source

    def test_rules_name_existing_engines(self) -> None:
        assert {engine for rule in ALL for engine in rule.engines} <= set(load_engines())
        assert {engine for rule in DOUBTS for engine in rule.engines} | {"vllm"} == set(load_engines())
        named = {
            node.value
            for node in ast.walk(ast.parse(inspect.getsource(rules)))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in load_engines()
        }
        assert named == set(load_engines())

    def test_every_quotation_is_in_its_source_article(self) -> None:
        if not SEEDS.is_dir():
            pytest.skip("the source documents (../shared/seeds) are not here")
        texts = {path.name[:3]: normalize(path.read_text(errors="replace")) for path in SEEDS.glob("*.txt")}
        checked = 0
        for source in list_sources():
            for seed, words in find_quotes(source):
                for part in words.split("…"):
                    assert normalize(part) in texts[seed], f"article {seed} does not contain {words!r}"
                    checked += 1
        assert checked > 30

    def test_reasons_of_decisions_have_sources(self) -> None:
        for decision in decisions().values():
            for reason in decision.reasons:
                assert reason.text and reason.source, reason
                assert not reason.source.startswith(ARTICLES), "a reason cites what its reader can open"
                if reason.source.startswith(RULES_PAGE):
                    assert f'<a id="{reason.source.partition("#")[2]}">' in write_rules_page()


@functools.cache
def decisions() -> dict[str, Decision]:
    """The decisions of all scenarios without an error, computed once."""
    return {
        path.stem: decide_intent(loaded["intent"])
        for path in (*list_own_files(), *list_shared_files())
        if "error" not in (loaded := read_scenario(path))["expect"]
    }


@functools.cache
def cases() -> tuple[DecisionCase, ...]:
    intents = (
        to_intent(loaded["intent"])
        for path in (*list_own_files(), *list_shared_files())
        if "error" not in (loaded := read_scenario(path))["expect"]
    )
    return tuple(
        DecisionCase(resolve_hardware(one), find_intended_model(one.model), one.workload, one.operations)
        for one in intents
    )


class TestRuleCoverage:
    """By the scenarios of this repository, so that it holds without ../shared."""

    @pytest.mark.parametrize("rule", PICKS, ids=lambda rule: rule.id)
    def test_each_pick_decides_at_least_one_scenario(self, rule: DecisionRule[[DecisionCase], Any]) -> None:
        own = {path.stem for path in list_own_files()}
        first = {name: decision.reasons[0].rule for name, decision in decisions().items() if decision.reasons}
        assert [name for name, found in first.items() if found == rule.id and name in own]

    @pytest.mark.parametrize("rule", ORCHESTRATION, ids=lambda rule: rule.id)
    def test_each_orchestrator_is_chosen_in_a_scenario(self, rule: DecisionRule[[DecisionCase, int], Any]) -> None:
        own = {path.stem for path in list_own_files()}
        assert [
            name
            for name, decision in decisions().items()
            if name in own and rule.id in [reason.rule for reason in decision.reasons]
        ]

    @pytest.mark.parametrize("rule", REASONS, ids=lambda rule: rule.id)
    def test_each_reason_is_given_in_a_scenario(self, rule: DecisionRule[..., Any]) -> None:
        given = {reason.rule for decision in decisions().values() for reason in decision.reasons}
        assert rule.id in given or rule.id in ELSEWHERE

    @pytest.mark.parametrize("rule", DOUBTS, ids=lambda rule: rule.id)
    def test_each_doubt_applies_to_some_cases_but_not_all(self, rule: DecisionRule[[DecisionCase], Any]) -> None:
        said = [bool(rule.says(one)) for one in cases()]
        assert any(said)
        # An archived engine is doubted in every scenario, so no scenario without the doubt is required.
        assert not all(said)

    @pytest.mark.parametrize("rule", CHALLENGES, ids=lambda rule: rule.id)
    def test_each_challenge_is_made_in_a_scenario(self, rule: DecisionRule[[DecisionCase, str], Any]) -> None:
        assert [
            name
            for name, decision in decisions().items()
            if rule.engines[0] in [challenger.engine for challenger in decision.challengers]
        ]

    def test_orchestrators_are_dynamo_kubernetes_and_ray(self) -> None:
        found = {decision.orchestrator for decision in decisions().values()} - {None}
        assert found == set(ORCHESTRATORS)


H100 = {"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048}
RTX = {"accelerator": "RTX 4090", "ram_gb": 64}
SERVING = {"users": 200, "concurrency": 64, "prompt_tokens": 1024, "output_tokens": 256}
AGENTS = {"concurrency": 64, "prompt_tokens": 8000, "output_tokens": 300, "shared_prefix_tokens": 6000}
EXTREME = {"concurrency": 512, "prompt_tokens": 1024, "output_tokens": 512, "volume": "extreme"}
ONE = {"users": 1, "prompt_tokens": 1024, "output_tokens": 512}
L70, Q8, MOE = "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"

FLIPS: list[tuple[str, dict[str, Any], dict[str, Any], str | None, str | None]] = [
    (
        "a model that changes often is not worth compiling",
        {"hardware": H100, "model": L70, "workload": EXTREME, "operations": {"model_changes": "rarely"}},
        {"operations.model_changes": "often"},
        "tensorrt-llm",
        "vllm",
    ),
    (
        "volume that is not extreme is not either",
        {"hardware": H100, "model": L70, "workload": EXTREME, "operations": {"model_changes": "rarely"}},
        {"workload.volume": "normal"},
        "tensorrt-llm",
        "vllm",
    ),
    (
        "nor is it for a team without machinery",
        {
            "hardware": H100,
            "model": L70,
            "workload": EXTREME,
            "operations": {"model_changes": "rarely", "machinery": "container"},
        },
        {"operations.machinery": "none"},
        "tensorrt-llm",
        "vllm",
    ),
    (
        "it runs on NVIDIA alone",
        {"hardware": H100, "model": L70, "workload": EXTREME, "operations": {"model_changes": "rarely"}},
        {"hardware.accelerator": "MI300X"},
        "tensorrt-llm",
        "vllm",
    ),
    (
        "a short prefix needs no tree",
        {"hardware": H100, "model": L70, "workload": AGENTS},
        {"workload.shared_prefix_tokens": 200},
        "sglang",
        "vllm",
    ),
    (
        "structured output of many",
        {"hardware": H100, "model": L70, "workload": {**SERVING, "structured_output": True}},
        {"workload.structured_output": False},
        "sglang",
        "vllm",
    ),
    (
        "a mixture of experts with long requests",
        {
            "hardware": {"accelerator": "H200 SXM", "count": 8, "ram_gb": 2048},
            "model": MOE,
            "workload": {"concurrency": 64, "prompt_tokens": 16000, "output_tokens": 1000},
        },
        {"workload.prompt_tokens": 1000},
        "sglang",
        "vllm",
    ),
    (
        "very long requests where a cluster is run anyway",
        {
            "hardware": H100,
            "model": L70,
            "workload": {"concurrency": 16, "prompt_tokens": 60000, "output_tokens": 1000},
            "operations": {"machinery": "kubernetes"},
        },
        {"operations.machinery": "container"},
        "sglang",
        "vllm",
    ),
    (
        "many on one RTX card",
        {"hardware": RTX, "model": Q8, "workload": ONE},
        {"workload.users": 50},
        "exllamav3",
        "vllm",
    ),
    (
        "a Radeon instead of an RTX card",
        {"hardware": RTX, "model": Q8, "workload": ONE},
        {"hardware.accelerator": "Radeon RX 7900 XTX"},
        "exllamav3",
        "llama.cpp",
    ),
    (
        "no 4-bit engine where small errors show",
        {"hardware": RTX, "model": Q8, "workload": ONE},
        {"workload.precision_sensitive": True},
        "exllamav3",
        "vllm",
    ),
    (
        "no card at all",
        {"hardware": RTX, "model": Q8, "workload": ONE},
        {"hardware": {"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 64}},
        "exllamav3",
        "llama.cpp",
    ),
    (
        "a data centre's card is served from",
        {"hardware": RTX, "model": Q8, "workload": ONE},
        {"hardware.accelerator": "A100 SXM 80GB"},
        "exllamav3",
        "vllm",
    ),
    (
        "too little VRAM, and RAM enough",
        {"hardware": {"accelerator": "RTX 4090", "ram_gb": 128}, "model": "Qwen/Qwen3-32B", "workload": ONE},
        {"model": "gpt-oss-120b"},
        "exllamav3",
        "llama.cpp",
    ),
    (
        "and RAM not enough",
        {"hardware": {"accelerator": "RTX 4090", "ram_gb": 128}, "model": "gpt-oss-120b", "workload": ONE},
        {"hardware.ram_gb": 16},
        "llama.cpp",
        None,
    ),
    (
        "what must run anywhere",
        {"hardware": {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 256}, "model": Q8, "workload": ONE},
        {"operations.portable": True},
        "llama.cpp",
        "onnxruntime",
    ),
    (
        "a Mac is not Linux",
        {
            "hardware": {"accelerator": "Apple M3 Max 40-core", "ram_gb": 64, "os": "macos"},
            "model": Q8,
            "workload": ONE,
        },
        {"hardware": {"accelerator": "Radeon RX 7900 XTX", "ram_gb": 64, "os": "linux"}},
        "mlx",
        "llama.cpp",
    ),
    (
        "many who share a Mac",
        {
            "hardware": {"accelerator": "Apple M3 Max 40-core", "ram_gb": 64, "os": "macos"},
            "model": Q8,
            "workload": ONE,
        },
        {"workload.users": 20},
        "mlx",
        "llama.cpp",
    ),
    (
        "vLLM is not there on Windows",
        {"hardware": RTX, "model": Q8, "workload": {**ONE, "users": 50}},
        {"hardware.os": "windows"},
        "vllm",
        "llama.cpp",
    ),
    (
        "the engine in service stays",
        {"hardware": H100, "model": L70, "workload": SERVING},
        {"operations.incumbent": "sglang"},
        "vllm",
        "sglang",
    ),
    (
        "unless it cannot run here",
        {
            "hardware": {"accelerator": "MI300X", "count": 8, "ram_gb": 2048},
            "model": L70,
            "workload": SERVING,
            "operations": {"incumbent": "sglang"},
        },
        {"operations.incumbent": "tensorrt-llm"},
        "sglang",
        "vllm",
    ),
    (
        "a model that generates no text",
        {"hardware": {"accelerator": "L4", "ram_gb": 64}, "model": Q8, "workload": {"concurrency": 16}},
        {"model": {"task": "embed", "params_b": 0.11, "format": "onnx"}},
        "vllm",
        "onnxruntime",
    ),
    (
        "prototypes on a bare card",
        {
            "hardware": {"accelerator": "A10G", "ram_gb": 64},
            "model": Q8,
            "workload": {**ONE, "concurrency": 1},
            "operations": {"model_changes": "often", "machinery": "none"},
        },
        {"operations.machinery": "container"},
        "pytorch",
        "vllm",
    ),
    (
        "a prompt longer than the context",
        {"hardware": H100, "model": Q8, "workload": SERVING},
        {"workload.prompt_tokens": 100_000},
        "vllm",
        None,
    ),
]


def change_fields(intent: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    made = {name: dict(part) if isinstance(part, dict) else part for name, part in intent.items()}
    for path, value in fields.items():
        section, _, name = path.partition(".")
        if name:
            made.setdefault(section, {})[name] = value
        else:
            made[section] = value
    return made


@pytest.mark.parametrize(("intent", "fields", "before", "after"), [row[1:] for row in FLIPS], ids=[r[0] for r in FLIPS])
def test_deciding_field_changes_the_engine(
    intent: dict[str, Any], fields: dict[str, Any], before: str | None, after: str | None
) -> None:
    first, second = decide_intent(intent), decide_intent(change_fields(intent, fields))
    assert first.engine == before, (first.reasons[:1], first.refused)
    assert second.engine == after, (second.reasons[:1], second.refused)


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({"operations.machinery": "kubernetes"}, "ray", "kubernetes"),
        ({"workload.volume": "extreme"}, "ray", "dynamo"),
        ({"hardware.count": 8}, "ray", None),
    ],
)
def test_deciding_field_changes_the_orchestrator(fields: dict[str, Any], before: str, after: str | None) -> None:
    intent = {
        "hardware": {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8, "ram_gb": 2048},
        "model": "meta-llama/Meta-Llama-3.1-405B",
        "workload": {"concurrency": 200, "prompt_tokens": 1024, "output_tokens": 256},
        "operations": {"machinery": "cluster"},
    }
    assert decide_intent(intent).orchestrator == before
    assert decide_intent(change_fields(intent, fields)).orchestrator == after


BASES = [row[1] for row in FLIPS]
SPELLINGS = [
    ("H100 SXM", "NVIDIA H100 80GB HBM3"),
    ("RTX 4090", "NVIDIA GeForce RTX 4090"),
    ("MI300X", "AMD Instinct MI300X"),
    ("A10G", "NVIDIA A10G"),
]


@settings(deadline=None)
@given(st.sampled_from(BASES), st.floats(0.01, 100), st.floats(1, 5000))
def test_price_and_power_do_not_change_the_choice(intent: dict[str, Any], price: float, watts: float) -> None:
    dearer = change_fields(intent, {"operations.price_per_hour": price, "operations.watts": watts})
    assert get_choice(decide_intent(dearer)) == get_choice(decide_intent(intent))


@settings(deadline=None)
@given(st.sampled_from(BASES), st.randoms(use_true_random=False))
def test_the_order_of_fields_changes_nothing(intent: dict[str, Any], chance: Any) -> None:
    def shuffled(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        keys = list(part)
        chance.shuffle(keys)
        return {key: shuffled(part[key]) for key in keys}

    assert decide_intent(shuffled(intent)) == decide_intent(intent)


@settings(deadline=None)
@given(st.sampled_from([base for base in BASES if "concurrency" in base["workload"]]), st.floats(0.1, 3600))
def test_think_time_is_ignored_if_concurrency_is_given(intent: dict[str, Any], think_s: float) -> None:
    thinking = change_fields(intent, {"workload.think_time_s": think_s})
    assert get_choice(decide_intent(thinking)) == get_choice(decide_intent(intent))


@pytest.mark.parametrize(("usual", "other"), SPELLINGS)
def test_the_spelling_of_a_chip_changes_nothing(usual: str, other: str) -> None:
    bases = [base for base in BASES if base["hardware"].get("accelerator") == usual]
    assert bases
    for base in bases:
        assert decide_intent(change_fields(base, {"hardware.accelerator": other})) == decide_intent(base)


def test_the_spelling_of_a_model_changes_no_choice() -> None:
    base = {"hardware": H100, "model": L70, "workload": SERVING}
    for name in ("Llama 3.1 70B", "llama-3.1-70b"):
        assert get_choice(decide_intent(change_fields(base, {"model": name}))) == get_choice(decide_intent(base))


def get_choice(decision: Decision) -> tuple[object, ...]:
    """The decided values without cost and energy."""
    return (
        decision.engine, decision.orchestrator, decision.quantization, decision.parallelism, decision.max_concurrency,
        decision.settings, decision.reasons, decision.refused, decision.challengers, decision.launch,
        decision.estimate.output_tok_s,
    )  # fmt: skip


class TestIntelCards:
    """vLLM supports Intel's cards; for one user, llama.cpp is simpler."""

    def test_many_requests_run_on_all_cards_in_vllm(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "Arc Pro B60", "count": 4, "ram_gb": 128})
        found = decide(hardware, find_model("Qwen/Qwen3-32B"), Workload(concurrency=20))
        assert (found.engine, found.quantization, found.parallelism.tensor) == ("vllm", "BF16", 4)
        assert found.reasons[0].rule == "serve.default" and found.hints == ()
        (other,) = [one for one in found.refused if one.engine == "llama.cpp"]
        assert "not designed for many concurrent requests" in other.why

    def test_a_small_card_holds_more_requests_in_llama_cpp(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "Arc B580", "ram_gb": 32})
        found = decide(hardware, find_model("Qwen/Qwen3-8B"), Workload(concurrency=16))
        assert found.engine == "llama.cpp" and found.max_concurrency >= 16

    @pytest.mark.parametrize("requests", [1, 4])
    def test_few_requests_run_in_llama_cpp(self, requests: int) -> None:
        hardware = make_simulated_hardware({"accelerator": "Arc Pro B60", "count": 2, "ram_gb": 64})
        found = decide(hardware, find_model("Qwen/Qwen3-14B"), Workload(concurrency=requests))
        assert (found.engine, found.reasons[0].rule) == ("llama.cpp", "hardware.unusual")


def test_lmdeploy_is_worth_measuring_on_cards_that_vllm_dropped() -> None:
    """It serves other cases than vLLM there, for a few requests as well."""
    hardware = make_simulated_hardware({"accelerator": "V100 SXM2 32GB", "count": 4, "ram_gb": 256})
    found = decide(hardware, find_model("meta-llama/Llama-3.3-70B-Instruct"), Workload())
    assert found.engine == "llama.cpp" and [one.engine for one in found.challengers] == ["lmdeploy"]
