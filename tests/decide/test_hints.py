"""Hints: nothing is idle, missed or ignored without one, over generated machines, models and workloads."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from tests.decide.plan_cases import generate_cases, make_machine

from bedplate.decide import decide
from bedplate.decide.hints import add_intent_hints
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.engines import load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Decision, Hardware, Hint, Workload, replace_fields
from bedplate.values.intent import Operations
from bedplate.values.workload import LatencyTarget

QUICK, NIGHTLY = 40, 3000
EIGHT_B = "meta-llama/Llama-3.1-8B"
DEFAULTS = {"ttft_ms": 2200, "tpot_ms": 110}
"""Ten percent above the targets of a chat, which nobody asked for."""
MACHINES: tuple[dict[str, Any], ...] = (
    {"cpu": "2x AMD EPYC 9654", "ram_gb": 768},
    {"cpu": "2x Xeon Platinum 8480+", "ram_gb": 512},
    {"accelerator": ["2x RTX 3090", "RTX 4090"], "ram_gb": 128},
    {"accelerator": ["RTX 4090", "Radeon RX 7900 XTX"], "ram_gb": 128},
    {"accelerator": "H100 SXM", "count": 32, "gpus_per_node": 8, "network": "8x 400 Gbit/s"},
    {"accelerator": "L4", "count": 6},
    {"accelerator": "Gaudi 3", "count": 8},
    {"accelerator": "n300", "count": 4},
    {"accelerator": "p150", "count": 4},
    {"accelerator": "Ascend 910B", "count": 8},
    {"accelerator": "TPU v6e", "count": 4},
    {"accelerator": "Inferentia2", "count": 12, "ram_gb": 768},
    {"accelerator": "Cloud AI 100 Ultra", "count": 2},
    {"accelerator": "Arc B580", "ram_gb": 32},
)
"""Machines that are not one kind of GPU in one node: several sockets, nodes and kinds of cards, other accelerators."""
MODELS = (EIGHT_B, "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b", "BAAI/bge-m3")
LOADS: tuple[dict[str, Any], ...] = (
    {},
    {"concurrency": 64, "users": 200},
    {"requests_per_s": 3.0, "users": 50, "think_time_s": 20.0},
    {"users": 20, "structured_output": True},
    {"concurrency": 400, "prompt_tokens": 4000, "latency": LatencyTarget(ttft_ms=300, tpot_ms=20)},
    {"shared_prefix_tokens": 400, "precision_sensitive": True, "context_tokens": 64},
)
OPERATIONS = (Operations(), Operations(portable=True, price_per_hour=2.0), Operations(incumbent="dynamo", watts=300))


@dataclass(frozen=True)
class HintCase:
    hardware: Hardware
    model: str
    workload: Workload
    operations: Operations
    engine: str | None = None

    def decide(self) -> Decision:
        return decide(self.hardware, find_model(self.model), self.workload, self.engine, operations=self.operations)


def generate_hint_cases(number: int) -> list[HintCase]:
    """Every unusual machine, and chips × models × workloads in the order of the verifier's cases."""
    random = Random(23)
    engines = (None, None, None, *load_engines())
    unusual = [
        HintCase(
            make_simulated_hardware(described), random.choice(MODELS), Workload(**random.choice(LOADS)),
            random.choice(OPERATIONS), random.choice(engines),
        )
        for described in random.sample(MACHINES, len(MACHINES)) * (1 + number // 100)
    ]  # fmt: skip
    for case in generate_cases(max(0, number - len(unusual))):
        hardware = make_machine(case.chip, case.count)
        assert hardware is not None
        unusual.append(HintCase(hardware, case.model, case.workload, random.choice(OPERATIONS)))
    return unusual


def list_silences(case: HintCase, found: Decision) -> list[str]:
    """What the decision leaves idle, misses or ignores without a hint. It reads the decision, not the hints' code."""
    said = Counter(hint.kind for hint in found.hint_details)
    silences = [] if len(found.hints) == len(found.hint_details) and all(found.hints) else ["a hint has no sentence"]
    if found.engine is None or found.settings is None:
        return silences if said else [*silences, "no engine is usable"]
    cards, layout = case.hardware.accelerators, found.parallelism
    used = 0 if found.settings.device == "cpu" else layout.tensor * layout.pipeline * layout.data
    idle = sum((hint.total or 0) - (hint.used or 0) for hint in pick(found, "idle-cards"))
    if idle != len(cards) - used:
        silences.append(f"{len(cards) - used} idle cards, {idle} in hints")
    per_node = case.hardware.cards_per_node
    if cards and -(-used // per_node) < case.hardware.nodes > 1 and not said["idle-nodes"]:
        silences.append("idle nodes")
    several = (case.hardware.cpu.sockets or 1) > 1 and found.settings.device == "cpu"
    if several and not said["idle-sockets"] and not load_engines()[found.engine].spans_sockets:
        silences.append("an idle socket")
    silences += list_missed_targets(case, found)
    if (
        min(found.settings.slots * layout.data, found.max_concurrency) < found.in_flight
        and not said["waiting-requests"]
    ):
        silences.append("requests that wait")
    ignored = {hint.field for hint in pick(found, "ignored-field")}
    return [*silences, *(field for field in list_ignored(case, found) if field not in ignored)]


def pick(decision: Decision, kind: str) -> list[Hint]:
    return [hint for hint in decision.hint_details if hint.kind == kind]


def list_missed_targets(case: HintCase, found: Decision) -> list[str]:
    silences = []
    for metric, usual in DEFAULTS.items():
        asked = getattr(case.workload.latency, metric, None)
        took = getattr(found.estimate, metric)
        said = {hint.kind for hint in found.hint_details if hint.metric == metric}
        if took is not None and took.value > (asked or usual) and "missed-target" not in said:
            silences.append(f"{metric} {took.value:.0f}")
        if took is None and asked is not None and found.estimate.output_tok_s is None and not said:
            tokens = find_model(case.model).task == "generate"
            silences += [f"{metric} is unknown"] if tokens else []
    return silences


def list_ignored(case: HintCase, found: Decision) -> list[str]:
    """Fields of the intent that this decision cannot honour, by their meaning."""
    work, engine = case.workload, load_engines()[found.engine or ""]
    fields = []
    if work.users > 1 and (work.concurrency or work.requests_per_s):
        fields.append("workload.users")
    if work.think_time_s and (work.concurrency or work.requests_per_s):
        fields.append("workload.think_time_s")
    if work.context_tokens and work.context_tokens < work.prompt_tokens:
        fields.append("workload.context_tokens")
    features = engine.server_features
    if work.structured_output and features is not None and not features.json_schema:
        fields.append("workload.structured_output")
    if case.operations.incumbent == "dynamo" and found.orchestrator != "dynamo":
        fields.append("operations.incumbent")
    if case.operations.price_per_hour and found.estimate.cost_per_million_tokens is None:
        fields.append("operations.price_per_hour")
    if case.operations.portable and engine.vendors == ("nvidia",) and not engine.cpu:
        fields.append("operations.portable")
    return fields


@pytest.mark.parametrize("number", [QUICK, pytest.param(NIGHTLY, marks=pytest.mark.nightly)], ids=["quick", "nightly"])
def test_nothing_is_idle_missed_or_ignored_without_a_hint(number: int) -> None:
    silent = {}
    for case in generate_hint_cases(number):
        found = case.decide()
        if silences := list_silences(case, found):
            cards = case.hardware.accelerators
            name = f"{len(cards)} x {cards[0].name}" if cards else case.hardware.cpu.name
            silent[f"{name}, {case.model}, {case.engine}, {case.workload}"] = (found.engine, silences)
    assert not silent


@pytest.mark.parametrize("load", [load for load in LOADS if "users" in load and len(load) > 1])
def test_fields_that_are_called_ignored_change_nothing(load: dict[str, Any]) -> None:
    hardware, model = make_simulated_hardware({"accelerator": "L4", "count": 2}), find_model(EIGHT_B)
    work = Workload(**load)
    found = decide(hardware, model, work)
    fields = [(hint.field or "").removeprefix("workload.") for hint in pick(found, "ignored-field")]
    plain = Workload()
    without = replace_fields(work, **{name: getattr(plain, name) for name in fields})
    assert decide(hardware, model, without).launch == found.launch
    assert bool(fields) == (work.concurrency is not None or work.requests_per_s is not None)


class TestIdleHardware:
    def test_second_socket_is_counted_and_used(self) -> None:
        machine = make_simulated_hardware({"cpu": "2x AMD EPYC 9654", "ram_gb": 768})
        assert (machine.cpu.sockets, machine.cpu.physical_cores) == (2, 192)
        found = decide(machine, find_model(EIGHT_B), Workload())
        assert found.engine == "llama.cpp" and found.launch is not None
        argv = found.launch.argv
        assert argv[argv.index("--numa") + 1] == "distribute" and argv[argv.index("--threads") + 1] == "192"
        assert not pick(found, "idle-sockets")
        one = decide(make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 768}), find_model(EIGHT_B), Workload())
        assert one.launch is not None and "--numa" not in one.launch.argv

    def test_engine_that_binds_its_threads_to_one_socket_says_so(self) -> None:
        machine = make_simulated_hardware({"cpu": "2x AMD EPYC 9654", "ram_gb": 768})
        (hint,) = pick(decide(machine, find_model(EIGHT_B), Workload(), "vllm"), "idle-sockets")
        assert (hint.used, hint.total, hint.device) == (1, 2, "AMD EPYC 9654")

    def test_requested_engine_on_the_cpu_names_those_that_use_the_cards(self) -> None:
        machine = make_simulated_hardware({"accelerator": "Gaudi 3", "count": 8})
        found = decide(machine, find_model(EIGHT_B), Workload(), "llama.cpp")
        (hint,) = pick(found, "idle-cards")
        assert (hint.used, hint.total, hint.cause, hint.engines) == (0, 8, "engine", ("vllm",))
        assert any("--engine vllm does" in text for text in found.hints)

    def test_a_model_that_no_engine_runs_on_the_card_names_those_for_the_cpu(self) -> None:
        machine = make_simulated_hardware({"accelerator": "GTX 1080 Ti", "ram_gb": 32})
        found = decide(machine, find_model("BAAI/bge-reranker-v2-m3"), Workload())
        (hint,) = pick(found, "unsupported-model")
        assert found.engine is None and "onnxruntime" in hint.cpu_engines
        assert any("--engine" in text and "plans the CPU of the host" in text for text in found.hints)
        for engine in hint.cpu_engines:
            planned = decide(machine, find_model("BAAI/bge-reranker-v2-m3"), Workload(), engine)
            assert planned.settings is not None and planned.settings.device == "cpu" and pick(planned, "idle-cards")

    @pytest.mark.parametrize(
        ("model", "machine", "original"),
        [
            ("Qwen/Qwen3-8B-AWQ", {"accelerator": "M3 Max", "ram_gb": 36}, "Qwen/Qwen3-8B"),
            ("mlx-community/Qwen3-8B-4bit", {"accelerator": "RTX 4090", "ram_gb": 64}, "Qwen/Qwen3-8B"),
        ],
    )
    def test_weights_that_no_engine_loads_here_name_their_original(
        self, model: str, machine: dict[str, Any], original: str
    ) -> None:
        """An engine that refuses the weights on the CPU as well is no way out."""
        hardware = make_simulated_hardware(machine)
        found = decide(hardware, find_model(model), Workload())
        (hint,) = pick(found, "unsupported-model")
        assert found.engine is None and hint.original == original
        assert any(f"plan {original}, the original" in text for text in found.hints)
        assert decide(hardware, find_model(original), Workload()).engine is not None
        for engine in hint.cpu_engines:
            assert decide(hardware, find_model(model), Workload(), engine).engine == engine

    def test_gptq_weights_are_converted_for_cards_that_only_llama_cpp_supports(self) -> None:
        machine = make_simulated_hardware({"accelerator": "GTX 1080 Ti", "ram_gb": 32})
        found = decide(machine, find_model("Qwen/Qwen3-8B-GPTQ-Int4"), Workload())
        assert (found.engine, found.quantization) == ("llama.cpp", "Q4_K_M")

    def test_cards_of_another_vendor_are_named(self) -> None:
        machine = make_simulated_hardware({"accelerator": ["RTX 4090", "Radeon RX 7900 XTX"], "ram_gb": 64})
        found = decide(machine, find_model(EIGHT_B), Workload(), "exllamav3")
        assert [(hint.device, hint.cause) for hint in pick(found, "idle-cards")] == [
            ("AMD Radeon RX 7900 XTX", "engine")
        ]

    def test_nodes_that_are_not_needed_are_counted(self) -> None:
        machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8})
        found = decide(machine, find_model(EIGHT_B), Workload())
        (cards,), (nodes,) = pick(found, "idle-cards"), pick(found, "idle-nodes")
        assert (cards.used, cards.total, cards.cause) == (1, 16, "enough") and (nodes.used, nodes.total) == (1, 2)

    @pytest.mark.parametrize(
        "model", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-235B-A22B"]
    )
    @pytest.mark.parametrize("chip", ["RTX 3090", "L4", "A100 SXM 80GB"])
    def test_experts_stay_in_ram_only_if_no_engine_holds_them_on_the_cards(self, model: str, chip: str) -> None:
        machine, facts = make_simulated_hardware({"accelerator": chip, "count": 4, "ram_gb": 512}), find_model(model)
        found = decide(machine, facts, Workload())
        if found.memory is None or found.memory.offload is None:
            return
        for engine in load_engines():
            other = decide(machine, facts, Workload(), engine)
            if other.memory is None or other.settings is None or other.settings.device == "cpu":
                continue
            # Fewer than four bits would hold more models, and answer worse.
            assert other.memory.offload is not None or count_bits(other) < 4, engine


def count_bits(decision: Decision) -> float:
    named = re.match(r"I?Q(\d)|([\d.]+) bpw", decision.quantization or "")
    return float(named[1] or named[2]) if named else 4.0


class TestOtherAccelerators:
    def test_gaudi_runs_vllm_with_its_plugin(self) -> None:
        machine = make_simulated_hardware({"accelerator": "Gaudi 3", "count": 8})
        found = decide(machine, find_model("meta-llama/Llama-3.3-70B-Instruct"), Workload(concurrency=32))
        assert (found.engine, found.engine_version, found.quantization) == ("vllm", "0.26.0", "BF16")
        assert found.settings is not None and found.settings.device == "hpu"
        assert found.parallelism.tensor * found.parallelism.data == 8 and found.parallelism.pipeline == 1
        assert found.launch is not None and found.launch.argv[:2] == ("vllm", "serve")
        assert any("vllm-gaudi" in word for step in found.launch.prepare for word in step.argv)

    def test_gaudi_computes_no_float16(self) -> None:
        machine = make_simulated_hardware({"accelerator": "Gaudi 2"})
        half = replace_fields(find_model(EIGHT_B), quantization="F16")
        found = decide(machine, half, Workload())
        assert found.launch is not None and found.launch.argv[found.launch.argv.index("--dtype") + 1] == "bfloat16"

    @pytest.mark.parametrize(
        ("card", "count", "model", "board"),
        [
            ("n150", 1, "Qwen/Qwen3-8B", "n150"),
            ("n300", 1, EIGHT_B, "n300"),
            ("n300", 4, "meta-llama/Llama-3.3-70B-Instruct", "t3k"),
            ("p150", 4, "meta-llama/Llama-3.3-70B-Instruct", "p150x4"),
        ],
    )
    def test_tenstorrent_runs_the_image_of_model_and_board(self, card: str, count: int, model: str, board: str) -> None:
        found = decide(make_simulated_hardware({"accelerator": card, "count": count}), find_model(model), Workload())
        assert found.engine == "vllm" and found.launch is not None
        argv = found.launch.argv
        assert argv[:2] == ("docker", "run") and argv[argv.index("--tt-device") + 1] == board
        assert argv[argv.index("--model") + 1] == model.rpartition("/")[2]
        assert not pick(found, "idle-cards")

    def test_model_without_an_image_for_tenstorrent_is_refused(self) -> None:
        found = decide(make_simulated_hardware({"accelerator": "n300"}), find_model("openai/gpt-oss-20b"), Workload())
        assert found.engine is None and found.refused[0].engine == "vllm"
        assert "llama-3.1-8b" in (found.refused[0].hint or "")
        assert [hint.kind for hint in found.hint_details] == ["unsupported-model"]

    @pytest.mark.parametrize(
        ("card", "project"),
        [
            ("Ascend 910B", "vllm-ascend"),
            ("TPU v6e", "tpu-inference"),
            ("inf2.48xlarge", "vllm-neuron"),
            ("Trainium2", "vllm-neuron"),
            ("Cloud AI 100 Ultra", "vllm-qaic"),
        ],
    )
    def test_unsupported_accelerators_are_refused_with_what_exists(self, card: str, project: str) -> None:
        found = decide(make_simulated_hardware({"accelerator": card}), find_model(EIGHT_B), Workload())
        assert found.engine is None and not found.fits
        (hint,) = found.hint_details
        assert hint.kind == "unsupported-hardware" and any(project in one for one in hint.projects)
        assert project in found.hints[0] and "--engine llama.cpp" in found.hints[0]


class TestTargets:
    def test_default_target_that_is_missed_is_a_hint(self) -> None:
        machine = make_simulated_hardware({"cpu": "Raspberry Pi 5", "ram_gb": 16})
        found = decide(machine, find_model(EIGHT_B), Workload())
        missed = {hint.metric: hint for hint in pick(found, "missed-target")}
        assert set(missed) == {"ttft_ms", "tpot_ms"} and missed["tpot_ms"].is_default
        assert missed["tpot_ms"].target_ms == 100
        assert missed["tpot_ms"].expected_ms == found.estimate.tpot_ms.value if found.estimate.tpot_ms else False

    def test_minutes_are_not_stated_in_milliseconds(self) -> None:
        machine = make_simulated_hardware({"accelerator": "RTX 4060 8GB", "ram_gb": 64})
        found = decide(machine, find_model("Qwen/Qwen3-4B"), Workload(concurrency=64), "vllm")
        (text,) = [text for text in found.hints if text.startswith("TTFT")]
        assert re.match(r"TTFT \d+(\.\d)? (s|min \d+ s) misses the default target of 2,000 ms", text)

    def test_asked_target_replaces_the_default(self) -> None:
        machine = make_simulated_hardware({"accelerator": "L4"})
        tight = Workload(latency=LatencyTarget(tpot_ms=1))
        (hint,) = pick(decide(machine, find_model(EIGHT_B), tight), "missed-target")
        assert (hint.metric, hint.target_ms, hint.is_default) == ("tpot_ms", 1, False)

    def test_unusable_speed_is_a_hint(self) -> None:
        machine = make_simulated_hardware({"cpu": "Raspberry Pi 5", "ram_gb": 16})
        found = decide(machine, find_model("mistralai/Mistral-Small-24B-Instruct-2501"), Workload(prompt_tokens=4000))
        (hint,) = pick(found, "unusable-speed")
        assert hint.request_s is not None and hint.request_s > 60


class TestMemory:
    SEVENTY = "meta-llama/Llama-3.3-70B-Instruct"

    def test_fewer_than_four_bits_are_warned_of(self) -> None:
        machine = make_simulated_hardware({"accelerator": "MacBook Pro M4 Max 128GB"})
        found = decide(machine, find_model("Qwen/Qwen3-235B-A22B"), Workload())
        (hint,) = pick(found, "few-bits")
        assert hint.quantization == found.quantization == "Q2_K" and "fewer than 4 bits" in found.hints[0]
        assert pick(decide(machine, find_model(self.SEVENTY), Workload()), "few-bits") == []

    def test_the_limit_of_a_mac_is_a_hint_if_a_higher_one_allows_more_bits(self) -> None:
        machine, model = (
            make_simulated_hardware({"accelerator": "MacBook Pro M4 Max 36GB"}),
            find_model("Qwen/Qwen3-30B-A3B"),
        )
        found = decide(machine, model, Workload())
        (hint,) = pick(found, "memory-limit")
        assert hint.raised_bytes is not None and hint.limit_bytes is not None
        assert hint.quantization != found.quantization and hint.raised_bytes > hint.limit_bytes
        assert f"sudo sysctl iogpu.wired_limit_mb={hint.raised_bytes >> 20} " in found.hints[0]
        card = replace_fields(machine.accelerators[0], free_bytes=hint.raised_bytes, wired_limit_bytes=None)
        raised = decide(replace_fields(machine, accelerators=(card,)), model, Workload())
        assert raised.quantization == hint.quantization and pick(raised, "memory-limit") == []

    def test_the_limit_is_no_hint_if_speed_decides(self) -> None:
        machine = make_simulated_hardware({"accelerator": "MacBook Pro M4 Max 64GB"})
        assert pick(decide(machine, find_model(self.SEVENTY), Workload()), "memory-limit") == []

    def test_the_limit_of_an_amd_processor_is_a_kernel_parameter(self) -> None:
        machine = make_simulated_hardware({"accelerator": "Ryzen AI Max+ 395", "ram_gb": 32})
        found = decide(machine, find_model("Qwen/Qwen3-30B-A3B"), Workload())
        (hint,) = pick(found, "memory-limit")
        assert hint.raised_bytes == 28 << 30 and any("ttm.pages_limit=7340032" in one for one in found.hints)

    def test_a_model_that_fits_only_with_a_higher_limit_is_refused_with_the_command(self) -> None:
        machine = make_simulated_hardware({"accelerator": "MacBook Air M2 16GB"})
        found = decide(machine, find_model("mistralai/Mistral-Small-24B-Instruct-2501"), Workload())
        assert found.engine is None and "sudo sysctl iogpu.wired_limit_mb=12288" in found.hints[0]

    def test_the_limit_leaves_less_for_other_programs_if_the_model_does_not_run_otherwise(self) -> None:
        machine = make_simulated_hardware({"accelerator": "Mac mini M4 16GB"})
        found = decide(machine, find_model("openai/gpt-oss-20b"), Workload())
        (hint,) = pick(found, "memory-limit")
        assert found.engine is None and hint.raised_bytes == 13 << 30
        card = replace_fields(machine.accelerators[0], free_bytes=hint.raised_bytes, wired_limit_bytes=None)
        raised = decide(replace_fields(machine, accelerators=(card,)), find_model("openai/gpt-oss-20b"), Workload())
        assert hint.engines == (raised.engine,) and hint.quantization == raised.quantization
        assert f"{hint.quantization} in {raised.engine} would fit" in found.hints[0]


class TestBatchWork:
    def test_targets_of_a_chat_do_not_apply(self) -> None:
        machine, model = make_simulated_hardware({"cpu": "EPYC 9654", "ram_gb": 384}), find_model(EIGHT_B)
        chat, batch = (decide(machine, model, Workload(concurrency=64, batch=one)) for one in (False, True))
        assert pick(chat, "missed-target") and not pick(batch, "missed-target") and not pick(batch, "unusable-speed")
        asked = Workload(concurrency=64, batch=True, latency=LatencyTarget(tpot_ms=20))
        assert pick(decide(machine, model, asked), "missed-target")

    def test_many_requests_are_assumed(self) -> None:
        machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 2})
        found = decide(machine, find_model(EIGHT_B), Workload(batch=True))
        assert found.in_flight == 128 and found.parallelism.data == 2
        assert decide(machine, find_model(EIGHT_B), Workload(batch=True, concurrency=4)).in_flight == 4


class TestIgnoredFields:
    def test_link_and_network_of_one_card(self) -> None:
        intent = to_intent({
            "hardware": {"accelerator": "H100 SXM", "link": "nvlink", "network": "400 Gbit/s"}, "model": EIGHT_B,
        })  # fmt: skip
        machine = resolve_hardware(intent)
        found = add_intent_hints(decide(machine, find_model(EIGHT_B), Workload()), intent, machine)
        assert [hint.field for hint in pick(found, "ignored-field")] == ["hardware.link", "hardware.network"]

    def test_electricity_price_without_watts(self) -> None:
        machine = make_simulated_hardware({"accelerator": "L4"})
        priced = Operations(price_per_hour=1.0, electricity_price=0.3)
        found = decide(machine, find_model(EIGHT_B), Workload(), operations=priced)
        assert {(hint.field, hint.other_field) for hint in pick(found, "ignored-field")} == {
            ("operations.price_per_hour", "operations.watts"), ("operations.electricity_price", "operations.watts"),
        }  # fmt: skip

    def test_fields_that_embedding_does_not_have(self) -> None:
        machine = make_simulated_hardware({"accelerator": "L4"})
        work = Workload(output_tokens=100, latency=LatencyTarget(tpot_ms=5), structured_output=True)
        found = decide(machine, find_model("BAAI/bge-m3"), work)
        assert {hint.field for hint in pick(found, "ignored-field")} == {
            "workload.output_tokens", "workload.latency.tpot_ms", "workload.structured_output",
        }  # fmt: skip


def test_a_card_of_another_kind_is_idle_because_the_others_are_enough() -> None:
    mixed = make_simulated_hardware({"accelerator": ["RTX 5090", "RTX 3060 12GB"], "ram_gb": 64})
    found = decide(mixed, find_model("Qwen/Qwen3-14B"), Workload())
    (text,) = [text for text in found.hints if "stays idle" in text]
    assert "the others are enough" in text and "0 are" not in text


def test_requests_that_the_engine_does_not_compute_together_are_not_a_lack_of_memory() -> None:
    server = make_simulated_hardware({"cpu": "AMD EPYC 9354", "ram_gb": 64})
    found = decide(server, find_model("BAAI/bge-reranker-v2-m3"), Workload(concurrency=4, prompt_tokens=512))
    (hint,) = [hint for hint in found.hint_details if hint.kind == "waiting-requests"]
    assert hint.cause == "engine" and (hint.used, hint.total) == (1, 4)
    assert not any("more memory" in text for text in found.hints)


def test_requests_of_usual_length_that_all_run_are_not_said_to_wait() -> None:
    card = make_simulated_hardware({"accelerator": "RTX 3090", "ram_gb": 64})
    work = Workload(concurrency=16, prompt_tokens=1157, output_tokens=212, context_tokens=6520, batch=True)
    found = decide(card, find_model(EIGHT_B), work, "vllm")
    (hint,) = pick(found, "waiting-requests")
    assert found.settings is not None and found.settings.slots == 16 > found.max_concurrency
    assert (hint.cause, hint.used, hint.total, hint.most_tokens) == ("length", found.max_concurrency, 16, 6520)
    assert any(text.startswith("all 16 requests of usual length run concurrently") for text in found.hints)


class TestUnpredictedRates:
    """The speed of embeddings is not predicted, but no chip computes more than its data sheet says."""

    @pytest.mark.parametrize(
        ("machine", "model", "rate", "most"),
        [
            ({"accelerator": "H100 SXM", "ram_gb": 256}, "Qwen/Qwen3-Embedding-8B", 400.0, 140.0),
            ({"cpu": "AMD EPYC 9754", "ram_gb": 256}, "BAAI/bge-m3", 500.0, 120.0),
        ],
    )
    def test_a_rate_above_the_peak_of_the_hardware_is_stated(
        self, machine: dict[str, Any], model: str, rate: float, most: float
    ) -> None:
        hardware, facts = make_simulated_hardware(machine), find_model(model)
        (hint,) = pick(decide(hardware, facts, Workload(requests_per_s=rate)), "growing-queue")
        assert hint.answered_per_s is not None and 5 < hint.answered_per_s < most and hint.bottleneck == "compute"
        assert hint.machines is not None and hint.machines >= rate / most
        possible = decide(hardware, facts, Workload(requests_per_s=hint.answered_per_s / 2))
        assert not pick(possible, "growing-queue")
        assert not pick(decide(hardware, facts, Workload(concurrency=64)), "growing-queue")
