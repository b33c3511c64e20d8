"""No plan is beaten by its own alternatives: the order of candidates, the rules that overrule it, and what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.decide.plan_cases import PlanCase, generate_cases, generate_mixed_cases, make_machine
from tests.decide.plan_order import MARGIN, TPOT_MS, TTFT_MS

from bedplate.decide import decide
from bedplate.decide.alternatives import PRINTED
from bedplate.decide.case import DecisionCase, with_model_task
from bedplate.decide.order import EXCLUSIONS
from bedplate.engines import get_engine, load_engines
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.facts.chips import load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Alternative, Decision, Figure, Parallelism, Workload
from bedplate.values.intent import Operations
from bedplate.values.workload import LatencyTarget

QUICK, NIGHTLY = 20, 3000
RULES_PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
SEVENTY = "meta-llama/Meta-Llama-3.1-70B"


def decide_for(model: str, card: str, count: int = 1, **work: Any) -> Decision:
    hardware = make_simulated_hardware({"accelerator": card, "count": count, "ram_gb": 1024})
    return decide(hardware, find_model(model), Workload(**work), with_alternatives=True)


def get_reason(decision: Decision, rule: str) -> str:
    return next((reason.text for reason in decision.reasons if reason.rule == rule), "")


def make_case(case: PlanCase) -> DecisionCase | None:
    machine, model = make_machine(case.chip, case.count), find_model(case.model)
    assert machine is not None
    work = with_model_task(model, case.workload)
    too_long = model.max_context is not None and work.request_tokens > model.max_context
    return None if too_long else DecisionCase(machine, model, work, Operations())


class TestGeneratedCases:
    def test_no_alternative_beats_the_decision(self) -> None:
        check_decisions(QUICK)

    @pytest.mark.nightly
    @pytest.mark.timeout(7200)
    def test_no_alternative_beats_thousands_of_decisions(self) -> None:
        check_decisions(NIGHTLY)


def check_decisions(number: int) -> None:
    """Alternatives without a rule lose by the estimate; a rule that overrules it is documented and shown."""
    rules = set(
        re.findall(r'<a id="([^"]+)"|^\| `([a-z.-]+)` \|', RULES_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    documented = {name for pair in rules for name in pair if name}
    planned = listed = 0
    for generated in (*generate_cases(number), *generate_mixed_cases(number // 4)):
        case = make_case(generated)
        if case is None:
            continue
        decision = decide(case.hardware, case.model, generated.workload, with_alternatives=True)
        planned, listed = planned + decision.fits, listed + len(decision.alternatives)
        shown = {reason.rule for reason in decision.reasons}
        for one in decision.alternatives:
            told = (generated.label, decision.engine, decision.quantization, decision.parallelism, one)
            assert one.why_not, told
            assert one.rule is None or (one.fits and one.rule in documented), told
            assert one.rule not in PRINTED or one.rule in shown, told
            spans = one.parallelism.tensor * one.parallelism.pipeline > count_per_machine(generated, case)
            assert one.rule is not None or not one.fits or spans or not is_clearly_better(one, decision), told
    assert planned > number / 3 and listed > 5 * planned


def count_per_machine(generated: PlanCase, case: DecisionCase) -> int:
    """Cards of one machine. A plan on several machines is less simple, so it need not be slower."""
    each = case.hardware.cards_per_node
    chip = load_chips().get(generated.chip)
    return min(each, (chip.per_host if chip is not None else None) or each)


def is_clearly_better(one: Alternative, decision: Decision) -> bool:
    """By the estimates in the document alone: faster within the same weights, or only it meets the targets."""
    own, chosen = one.estimate, decision.estimate
    pairs = ((own.ttft_ms, chosen.ttft_ms, TTFT_MS), (own.tpot_ms, chosen.tpot_ms, TPOT_MS))
    if any(mine is None or best is None for mine, best, _ in pairs) or decision.settings is None:
        return False
    assert one.settings is not None
    if one.settings.slots * one.parallelism.data < decision.in_flight:
        return False
    met = [(get_value(mine) <= limit, get_value(best) <= limit) for mine, best, limit in pairs]
    if all(mine for mine, _ in met) and not all(best for _, best in met):
        return one.engine == decision.engine
    same = (one.engine, one.quantization, one.settings.kv_type) == (
        decision.engine, decision.quantization, decision.settings.kv_type,
    )  # fmt: skip
    if not same or not all(mine and best for mine, best in met) or one.parallelism.pipeline > 1:
        return False
    return get_value(own.output_tok_s) > MARGIN * get_value(chosen.output_tok_s)


def get_value(figure: Figure | None) -> float:
    assert figure is not None
    return figure.value


class TestOrder:
    def test_default_targets_apply_to_chats_only(self) -> None:
        """70 B in 16 bits on one card with the rest in RAM: nothing meets 100 ms, and fewer bits come closest."""
        slow = decide_for(SEVENTY, "RTX 4090")
        assert slow.engine == "llama.cpp" and slow.quantization == "Q4_K_M"
        assert any(
            "misses the latency targets" in one.why_not for one in slow.alternatives if one.engine == "llama.cpp"
        )
        embedding = decide_for("BAAI/bge-m3", "RTX 4090", concurrency=8)
        assert not any("latency" in one.why_not for one in embedding.alternatives)

    def test_the_most_faithful_weights_that_meet_the_targets_are_chosen(self) -> None:
        plain = decide_for(SEVENTY, "H100 SXM", 8, concurrency=64)
        assert (plain.engine, plain.quantization) == ("vllm", "BF16")
        (faster,) = [one for one in plain.alternatives if (one.engine, one.quantization) == ("vllm", "FP8")]
        assert get_value(faster.estimate.output_tok_s) > get_value(plain.estimate.output_tok_s)
        assert faster.why_not.startswith("less faithful: FP8") and faster.rule is None
        pressed = decide_for(SEVENTY, "H100 SXM", 8, concurrency=64, latency=LatencyTarget(tpot_ms=18))
        assert pressed.quantization == "FP8" and get_value(pressed.estimate.tpot_ms) <= 18

    def test_within_one_class_the_fastest_layout_is_chosen(self) -> None:
        plain = decide_for("Qwen/Qwen3-32B", "H100 SXM", 8, concurrency=256)
        speeds = [
            get_value(one.estimate.output_tok_s)
            for one in plain.alternatives
            if (one.engine, one.quantization) == (plain.engine, plain.quantization) and one.fits and one.rule is None
        ]
        assert len(speeds) > 5 and get_value(plain.estimate.output_tok_s) > max(speeds) / 1.031

    def test_replicas_are_on_one_host_if_others_add_less_than_ten_percent(self) -> None:
        found = decide_for("Qwen/Qwen3-8B", "GB200", 8, concurrency=110)
        assert found.parallelism == Parallelism(data=4) and found.node_launches == ()  # a host has four GPUs
        both = next(one for one in found.alternatives if (one.engine, one.parallelism) == ("vllm", Parallelism(data=8)))
        assert get_value(both.estimate.output_tok_s) < MARGIN * get_value(found.estimate.output_tok_s)
        assert both.why_not == "8 GPUs instead of 4 for about the same speed"

    def test_requests_that_wait_count_as_missed(self) -> None:
        crowded = decide_for("Qwen/Qwen3-32B", "H100 SXM", 1, concurrency=100, prompt_tokens=2000, output_tokens=500)
        assert crowded.quantization != "BF16"
        faithful = next(one for one in crowded.alternatives if (one.engine, one.quantization) == ("vllm", "BF16"))
        assert re.match(r"holds \d+ of 100 concurrent requests", faithful.why_not)


class TestRules:
    def test_few_requests_use_the_fewest_cards_and_the_reason_is_printed(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "RTX 4090", "count": 4, "ram_gb": 1024})
        found = decide(hardware, find_model("Qwen/Qwen3-8B"), Workload(), "exllamav3", with_alternatives=True)
        assert found.parallelism == Parallelism()
        faster = [one for one in found.alternatives if one.rule == "layout.fewest"]
        assert faster and all(one.engine == found.engine for one in faster)
        assert "one GPU is fast enough" in get_reason(found, "layout.fewest")

    def test_weights_that_miss_the_targets_equally_are_the_most_faithful(self) -> None:
        """The first token depends little on the bits: 2,925 ms with 4 of them, 2,942 ms with 8."""
        mac = make_simulated_hardware({"accelerator": "Apple M3 Ultra", "ram_gb": 512, "os": "macos"})
        found = decide(
            mac, find_model("Qwen/Qwen3-235B-A22B"), Workload(prompt_tokens=1024), "mlx", with_alternatives=True
        )
        assert any(hint.kind == "missed-target" for hint in found.hint_details)
        assert found.quantization == "8-bit"

    def test_slow_plan_that_does_not_hold_its_own_load_is_not_used(self) -> None:
        """With 16 bits a request takes longer, so that more are in flight than fit."""
        found = decide_for(
            "Qwen/Qwen3-8B", "H100 SXM", users=500, think_time_s=10.0, prompt_tokens=1000, output_tokens=300
        )
        (slow,) = [one for one in found.alternatives if (one.engine, one.quantization) == ("vllm", "BF16")]
        assert (found.engine, found.quantization) == ("vllm", "FP8") and found.in_flight <= found.max_concurrency
        assert slow.rule == "load.sustained" and get_reason(found, "load.sustained")

    @pytest.mark.parametrize("card", ["H100 SXM", "L40S"])
    @pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "meta-llama/Llama-3.1-8B-Instruct"])
    def test_a_small_model_on_many_cards_gets_replicas(self, card: str, model: str) -> None:
        for count in (2, 4, 8):
            for requests in (32, 128):
                work = {"concurrency": requests, "prompt_tokens": 1024, "output_tokens": 256}
                found = decide_for(model, card, count, **work)
                layout, told = found.parallelism, (card, model, count, requests, found.parallelism)
                assert (layout.tensor, layout.pipeline) == (1, 1) and layout.data in (count, count // 2), told
                divided = [one for one in found.alternatives if one.rule == "layout.one-gpu"]
                assert all(one.parallelism.tensor * one.parallelism.pipeline > 1 for one in divided), told
                assert bool(divided) == bool(get_reason(found, "layout.one-gpu")), told

    def test_a_small_model_is_divided_if_one_card_misses_the_targets_or_does_not_hold_it(self) -> None:
        work = {"concurrency": 32, "prompt_tokens": 1024, "output_tokens": 256}
        pressed = decide_for("Qwen/Qwen3-14B", "H100 SXM", 8, latency=LatencyTarget(tpot_ms=9), **work)
        assert pressed.parallelism.tensor > 1 and not get_reason(pressed, "layout.one-gpu")
        large = decide_for(SEVENTY, "H100 SXM", 8, **work)
        assert large.parallelism.tensor > 1 and not get_reason(large, "layout.one-gpu")

    def test_a_faster_engine_that_takes_more_effort_says_by_how_much(self) -> None:
        """One user on two 4090s: vLLM in FP8 fits and is twice as fast; llama.cpp is faster than people read."""
        found = decide_for("Qwen/Qwen3-32B", "RTX 4090", 2)
        assert (found.engine, found.quantization) == ("llama.cpp", "Q8_0")
        (vllm,) = [one for one in found.refused if one.engine == "vllm"]
        assert re.search(
            r"\d tok/s with FP8 instead of \d.*, but vLLM takes more effort to operate than llama.cpp", vllm.why
        )
        many = decide_for("Qwen/Qwen3-32B", "RTX 4090", 2, concurrency=8)
        assert (many.engine, many.quantization, many.parallelism.tensor) == ("vllm", "FP8", 2)

    def test_a_reason_for_a_processor_names_no_gpu(self) -> None:
        machine = make_simulated_hardware({"cpu": "Intel N100", "ram_gb": 16})
        found = decide(machine, find_model("Qwen/Qwen3-4B"), Workload())
        assert get_reason(found, "quant.least").startswith("not Q2_K on the CPU, about")
        assert not any("GPU" in reason.text for reason in found.reasons if reason.rule != "hardware.cpu")

    def test_weights_stay_on_the_cards(self) -> None:
        """16-bit experts in RAM would meet the targets of one user, at a fraction of the speed."""
        card = {"accelerator": "RTX 4090", "count": 1, "ram_gb": 128, "cpu": "AMD EPYC 9654"}
        machine = make_simulated_hardware(card)
        found = decide(machine, find_model("Qwen/Qwen3-30B-A3B"), Workload(), "llama.cpp", with_alternatives=True)
        assert found.memory is not None and found.memory.offload is None
        (faithful,) = [one for one in found.alternatives if (one.engine, one.quantization) == ("llama.cpp", "BF16")]
        assert faithful.fits and faithful.rule == "fit.on-cards" and get_reason(found, "fit.on-cards")

    def test_an_engine_that_meets_the_targets_replaces_one_that_does_not(self) -> None:
        """The rule for structured output prefers SGLang; vLLM is named by it as well."""
        model, work = "nvidia/Llama-3.1-8B-Instruct-FP8", {"concurrency": 64, "structured_output": True}
        usual = decide_for(model, "H100 SXM", **work)
        assert usual.engine == "sglang" and usual.reasons[0].rule == "serve.structured"
        (vllm,) = [one for one in usual.alternatives if one.engine == "vllm"]
        assert vllm.rule == "serve.structured" and "SGLang is preferred" in vllm.why_not
        faster_ms, slower_ms = get_value(vllm.estimate.ttft_ms), get_value(usual.estimate.ttft_ms)
        assert faster_ms * 1.2 < slower_ms
        pressed = decide_for(model, "H100 SXM", latency=LatencyTarget(ttft_ms=faster_ms * 1.05), **work)
        assert pressed.engine == "vllm" and pressed.reasons[0].rule == "latency.engine"
        assert "SGLang, the choice of serve.structured, misses the latency targets: TTFT" in pressed.reasons[0].text
        close = decide_for(model, "H100 SXM", latency=LatencyTarget(ttft_ms=slower_ms * 0.95), **work)
        assert close.engine == "sglang"

    def test_every_exclusion_states_itself_and_its_source(self) -> None:
        assert {rule.id for rule in EXCLUSIONS} < set(PRINTED)
        for rule in PRINTED.values():
            assert rule.sentence.endswith(".") and rule.source, rule.id


class TestContents:
    def test_a_decision_carries_the_plans_of_all_engines(self) -> None:
        found = decide_for(SEVENTY, "H100 SXM", 8, concurrency=64)
        refused = {one.engine for one in found.refused if one.kind == "impossible" and one.shortage is None}
        assert {one.engine for one in found.alternatives} | refused >= set(load_engines()) - {"mlx", "ollama"}
        chosen = (found.engine, found.quantization, found.parallelism)
        assert chosen not in {(one.engine, one.quantization, one.parallelism) for one in found.alternatives}
        places = [one.fits for one in found.alternatives]
        assert places == sorted(places, reverse=True)

    def test_plans_that_do_not_fit_say_how_much_memory_they_need(self) -> None:
        found = decide_for("meta-llama/Meta-Llama-3.1-405B", "RTX 4090")
        assert found.alternatives and not any(one.rule for one in found.alternatives if not one.fits)
        vllm = [one for one in found.alternatives if one.engine == "vllm"]
        assert vllm and all(not one.fits and one.settings is None and "GiB" in one.why_not for one in vllm)

    def test_a_requested_engine_is_the_rule_against_better_ones(self) -> None:
        machine = make_simulated_hardware({"accelerator": "RTX 4090", "count": 1, "ram_gb": 64})
        found = decide(machine, find_model("Qwen/Qwen3-8B"), Workload(), "vllm", with_alternatives=True)
        better = [one for one in found.alternatives if one.rule is not None]
        assert better and {one.rule for one in better} == {"operations.asked"}
        assert better[0].why_not == "vLLM was requested with --engine"

    def test_plans_that_the_verifier_rejects_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse_all(launch: PlannedLaunch) -> str | None:
            """For this test."""
            return "nothing works"

        rule = LaunchRule("test.all", "this test", refuse_all)
        monkeypatch.setattr(type(get_engine("sglang")), "launch_rules", (rule,))
        found = decide_for("Qwen/Qwen3-8B", "H100 SXM", concurrency=64)
        rejected = [one for one in found.alternatives if one.engine == "sglang"]
        assert rejected and all((one.fits, one.why_not, one.rule) == (False, "nothing works", None) for one in rejected)

    def test_they_are_left_out_unless_requested(self) -> None:
        machine = make_simulated_hardware({"accelerator": "RTX 4090", "count": 1, "ram_gb": 64})
        assert decide(machine, find_model("Qwen/Qwen3-8B"), Workload()).alternatives == ()
