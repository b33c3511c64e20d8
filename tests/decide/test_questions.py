"""Changes between decisions (--what-if), and machines that would serve a workload."""

from __future__ import annotations

import pytest

from bedplate.decide import decide
from bedplate.decide.intent import override, parse_fields, resolve_hardware, to_intent
from bedplate.decide.questions import COUNTS, describe_layout, list_changes, list_purchasable, procure, serves
from bedplate.facts.chips import find_chip
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.run.models import find_intended_model
from bedplate.values import Decision, LatencyTarget, Workload, replace_fields
from bedplate.values.intent import Intent, Operations

CARD = {"accelerator": "RTX 4090", "count": 1, "ram_gb": 64}
SERVING = Workload(concurrency=32, prompt_tokens=1024, output_tokens=256)


def decide_intent(intent: Intent) -> Decision:
    return decide(
        resolve_hardware(intent), find_intended_model(intent.model), intent.workload, operations=intent.operations
    )


class TestWhatIf:
    def test_identical_decisions_have_no_changes(self) -> None:
        decision = decide_intent(to_intent({"hardware": CARD, "model": "Qwen/Qwen3-8B"}))
        assert list_changes(decision, decision) == ()

    def test_changes_with_more_users_and_gpus_are_listed(self) -> None:
        intent = to_intent({"hardware": CARD, "model": "Qwen/Qwen3-8B", "workload": {"users": 1}})
        asked = override(intent, **parse_fields(["users=50,count=2"]))
        found = {change.what: change for change in list_changes(decide_intent(intent), decide_intent(asked))}
        assert (found["engine"].before, found["engine"].after) == ("exllamav3", "vllm")
        assert (found["rule"].before, found["rule"].after) == ("hardware.rtx", "serve.default")
        assert found["output_tok_s"].before != found["output_tok_s"].after

    def test_change_to_a_decision_that_does_not_fit_is_listed(self) -> None:
        intent = to_intent({"hardware": CARD, "model": "Qwen/Qwen3-8B"})
        asked = override(intent, model="meta-llama/Meta-Llama-3.1-405B")
        found = {change.what: change for change in list_changes(decide_intent(intent), decide_intent(asked))}
        assert found["engine"].after == "nothing fits" and found["tpot_ms"].after == "not predicted"
        assert found["concurrent requests"].after == "0"

    def test_equivalent_fields_change_nothing(self) -> None:
        intent = to_intent({"hardware": CARD, "model": "Qwen/Qwen3-8B", "workload": {"concurrency": 4}})
        asked = override(intent, accelerator="NVIDIA GeForce RTX 4090", think_time_s=5)
        assert list_changes(decide_intent(intent), decide_intent(asked)) == ()

    def test_layouts_are_described(self) -> None:
        machine = make_simulated_hardware({"accelerator": "H200 SXM", "count": 8, "ram_gb": 2048})
        work = replace_fields(SERVING, prompt_tokens=16000)
        words = describe_layout(decide(machine, find_model("deepseek-ai/DeepSeek-V3"), work))
        assert "8" in words and "parallel" in words
        assert describe_layout(decide_intent(to_intent({"hardware": CARD, "model": "Qwen/Qwen3-8B"}))) == "one device"


class TestProcure:
    def test_smallest_sufficient_machine_is_offered(self) -> None:
        chips = [find_chip(name).chip for name in ("L4", "RTX 4090", "H100 SXM", "H200 SXM")]
        model = find_model("meta-llama/Meta-Llama-3.1-70B")
        offers = {chip.name: offer for chip, offer in procure(model, SERVING, Operations(), chips)}
        assert len(offers) == 4
        for chip in chips:
            offer = offers[chip.name]
            if offer is None:
                continue
            assert serves(offer.decision, SERVING) and offer.count in COUNTS
            assert offer.watts is None or chip.watts is None or offer.watts == chip.watts * offer.count
            for fewer in COUNTS[: COUNTS.index(offer.count)]:
                machine = make_simulated_hardware({"accelerator": chip.name, "count": fewer})
                assert not serves(decide(machine, model, SERVING), SERVING)
        large, huge = offers[chips[2].name], offers[chips[3].name]
        assert large is not None and huge is not None and huge.count <= large.count

    def test_latency_target_needs_more_gpus(self) -> None:
        chips, model = [find_chip("L4").chip], find_model("Qwen/Qwen3-8B")
        ((_, relaxed),) = procure(model, SERVING, Operations(), chips)
        assert relaxed is not None and relaxed.decision.estimate.tpot_ms is not None
        strict = replace_fields(SERVING, latency=LatencyTarget(tpot_ms=relaxed.decision.estimate.tpot_ms.value * 0.7))
        ((_, quicker),) = procure(model, strict, Operations(), chips)
        assert quicker is None or quicker.count > relaxed.count
        impossible = replace_fields(SERVING, latency=LatencyTarget(tpot_ms=0.001))
        ((_, none),) = procure(model, impossible, Operations(), chips)
        assert none is None

    def test_machine_below_the_request_rate_is_not_offered(self) -> None:
        model, chips = find_model("Qwen/Qwen3-8B"), [find_chip("L4").chip]
        few, many = (Workload(requests_per_s=rate, prompt_tokens=1000, output_tokens=200) for rate in (0.1, 1000.0))
        ((_, offer),), ((_, none),) = (tuple(procure(model, work, Operations(), chips)) for work in (few, many))
        assert offer is not None and offer.count == 1
        assert none is None

    def test_machine_that_needs_offload_is_not_offered(self) -> None:
        machine = make_simulated_hardware({"accelerator": "RTX 3070", "ram_gb": 128})
        decision = decide(machine, find_model("Qwen/Qwen3-30B-A3B"), Workload())
        assert decision.fits and decision.memory is not None and decision.memory.offload is not None
        assert not serves(decision, Workload())

    @pytest.mark.parametrize("chip", ["Apple M3 Max 40-core", "NVIDIA GB10"])
    def test_chip_with_unified_memory_is_offered_once(self, chip: str) -> None:
        ((_, offer),) = procure(find_model("Qwen/Qwen3-8B"), Workload(), Operations(), [find_chip(chip).chip])
        assert offer is not None and offer.count == 1

    def test_laptop_with_several_gpus_is_not_offered(self) -> None:
        model, chip = find_model("Qwen/Qwen3-32B"), find_chip("RTX 4080 Laptop").chip
        work = replace_fields(SERVING, latency=LatencyTarget(tpot_ms=500))
        ((_, offer),) = procure(model, work, Operations(), [chip])
        assert offer is None
        assert serves(decide(make_simulated_hardware({"accelerator": chip.name, "count": 8}), model, work), work)

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "Qwen/Qwen2.5-0.5B-Instruct"])
    @pytest.mark.parametrize("users", [1, 50])
    def test_chips_without_published_rates_are_considered(self, name: str, users: int) -> None:
        silent = [chip for chip in list_purchasable() if not chip.dense_tera_ops]
        assert {"Apple M5 Max (40-core GPU)", "NVIDIA GeForce RTX 3060 Laptop"} <= {chip.name for chip in silent}
        offers = [offer for _, offer in procure(find_model(name), Workload(users=users), Operations(), silent) if offer]
        assert offers
        for offer in offers:
            assert offer.decision.estimate.ttft_ms is not None, offer.accelerator

    def test_only_purchasable_chips_are_considered(self) -> None:
        chips = list_purchasable()
        assert len(chips) > 30 and all(chip.year >= 2020 for chip in chips)
        assert {chip.vendor for chip in chips} == {"nvidia", "amd", "apple", "intel"}
