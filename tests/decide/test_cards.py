"""Machines with different cards: which of them a plan uses, in whatever order they are named."""

from __future__ import annotations

from typing import Any

import pytest
from tests.decide.plan_cases import generate_mixed_cases, make_machine, reverse_cards
from tests.decide.test_hints import HintCase, list_silences

from bedplate.decide import decide
from bedplate.decide.cards import has_different_cards, list_card_groups, list_kinds
from bedplate.decide.memory import fit
from bedplate.decide.placement import MachinePart, ServiceAsk, divide_machine
from bedplate.engines import get_engine
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.hardware import merge_found
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Accelerator, Decision, Hardware, Parallelism, Workload, replace_fields
from bedplate.values.intent import Operations

SMALL, LARGE = "RTX 4060 8GB", "RTX 4090"
QUICK, NIGHTLY = 12, 1000
FOUR_B, THIRTY_TWO_B, SEVENTY_B = "Qwen/Qwen3-4B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B"


def make_mixed(*names: str, ram_gb: int = 64) -> Hardware:
    return make_simulated_hardware({"accelerator": " + ".join(names), "ram_gb": ram_gb})


def decide_on(names: tuple[str, ...], model: str, engine: str | None = None, **work: Any) -> Decision:
    return decide(make_mixed(*names), find_model(model), Workload(**work), engine, with_alternatives=True)


def list_used(decision: Decision, names: tuple[str, ...]) -> list[str]:
    """The names of the cards that the plan names, without the vendor."""
    assert decision.settings is not None
    cards = pick_cards(make_mixed(*names), decision.settings.cards)
    return [card.name.removeprefix("NVIDIA GeForce ").removeprefix("AMD Radeon ") for card in cards]


def get_speed(decision: Decision) -> float:
    assert decision.estimate.output_tok_s is not None
    return decision.estimate.output_tok_s.value


def describe(decision: Decision, hardware: Hardware) -> tuple[object, ...]:
    """Everything that is decided; cards by name, as their indexes depend on the order."""
    settings = decision.settings
    cards = [card.name for card in pick_cards(hardware, settings.cards)] if settings is not None else []
    plain = replace_fields(settings, cards=()) if settings is not None else None
    refused = {(one.engine, one.kind) for one in decision.refused}
    chosen = (decision.engine, decision.weights, decision.parallelism, plain, cards)
    return *chosen, decision.estimate, decision.memory, decision.max_concurrency, sorted(decision.hints), refused


class TestOneCard:
    @pytest.mark.parametrize("names", [(SMALL, LARGE), (LARGE, SMALL)])
    def test_a_small_model_runs_on_the_large_card_alone(self, names: tuple[str, ...]) -> None:
        found, alone = decide_on(names, FOUR_B), decide_on((LARGE,), FOUR_B)
        place = names.index(LARGE)
        assert found.parallelism == Parallelism() and list_used(found, names) == ["RTX 4090"]
        assert found.launch is not None and found.settings is not None and found.settings.cards == (place,)
        assert found.launch.env["CUDA_VISIBLE_DEVICES"] == str(place)
        assert found.launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert get_speed(found) == get_speed(alone)
        assert found.memory is not None and [need.device for need in found.memory.devices] == [
            "NVIDIA GeForce RTX 4090"
        ]
        (hint,) = [hint for hint in found.hint_details if hint.kind == "idle-cards"]
        assert (hint.device, hint.used, hint.total, hint.cause) == ("NVIDIA GeForce RTX 4060", 0, 1, "enough")

    def test_the_reason_names_the_card_and_its_index(self) -> None:
        found = decide_on((SMALL, LARGE), FOUR_B)
        (text,) = [reason.text for reason in found.reasons if reason.rule == "layout.named-cards"]
        assert text == "uses NVIDIA GeForce RTX 4090 (GPU 1) of 2 different GPUs"

    def test_the_same_layout_on_the_other_card_is_an_alternative(self) -> None:
        found = decide_on((SMALL, LARGE), "Qwen/Qwen3-1.7B", "vllm")
        on_one = [one for one in found.alternatives if one.parallelism == Parallelism() and one.settings is not None]
        assert (0,) in [one.settings.cards for one in on_one if one.settings is not None]

    def test_cards_that_are_alike_are_not_named(self) -> None:
        machine = make_simulated_hardware({"accelerator": LARGE, "count": 4, "ram_gb": 64})
        found = decide(machine, find_model(FOUR_B), Workload())
        assert found.settings is not None and found.settings.cards == ()
        assert found.launch is not None and "CUDA_VISIBLE_DEVICES" not in found.launch.env

    def test_of_equal_cards_the_one_with_free_memory_is_used(self) -> None:
        machine = make_simulated_hardware({"accelerator": LARGE, "count": 2, "ram_gb": 64})
        busy = replace_fields(machine.accelerators[0], free_bytes=4 << 30)
        machine = replace_fields(machine, accelerators=(busy, machine.accelerators[1]))
        found = decide(machine, find_model(FOUR_B), Workload())
        assert found.settings is not None and found.settings.cards == (1,)

    def test_an_engine_without_kernels_for_one_card_uses_the_other(self) -> None:
        names = ("GTX 1080 Ti", SMALL)  # the older one has more bandwidth
        found = decide_on(names, FOUR_B, "vllm", concurrency=16)
        assert list_used(found, names) == ["RTX 4060"] and found.settings is not None and found.settings.cards == (1,)


class TestSeveralCards:
    @pytest.mark.parametrize("names", [(SMALL, LARGE), (LARGE, SMALL)])
    def test_a_model_that_fits_only_on_both_is_divided_by_memory(self, names: tuple[str, ...]) -> None:
        found = decide_on(names, THIRTY_TWO_B, "llama.cpp", precision_sensitive=False, concurrency=1)
        assert found.parallelism == Parallelism(pipeline=2) and list_used(found, names) == ["RTX 4090", "RTX 4060"]
        assert found.memory is not None and found.memory.offload is None
        large, small = found.memory.devices
        assert large.weights_bytes > 2 * small.weights_bytes and large.fits and small.fits
        assert large.weights_bytes + small.weights_bytes > (small.usable_bytes or 0) * 2

    def test_layers_that_fit_on_no_card_are_on_both_before_they_are_in_memory(self) -> None:
        found = decide_on((SMALL, LARGE), SEVENTY_B, "llama.cpp")
        alone = decide_on((LARGE,), SEVENTY_B, "llama.cpp")
        assert found.memory is not None and found.memory.offload is not None and found.parallelism.pipeline == 2
        assert alone.memory is not None and alone.memory.offload is not None
        assert found.memory.offload.host_layers < alone.memory.offload.host_layers

    def test_two_equal_fast_cards_leave_the_slow_one_idle(self) -> None:
        for names in (("2x RTX 4090", "RTX 3060 12GB"), ("RTX 3060 12GB", "2x RTX 4090")):
            found = decide_on(names, FOUR_B, concurrency=64)
            assert found.parallelism.data == 2 and list_used(found, names) == ["RTX 4090"] * 2
            (hint,) = [hint for hint in found.hint_details if hint.kind == "idle-cards"]
            assert hint.device == "NVIDIA GeForce RTX 3060 12GB" and (hint.used, hint.total) == (0, 1)

    def test_three_cards_of_two_kinds_are_all_used_if_the_model_needs_them(self) -> None:
        for names in ((LARGE, "2x RTX 3060 12GB"), ("2x RTX 3060 12GB", LARGE)):
            found = decide_on(names, SEVENTY_B)
            assert found.parallelism.pipeline == 3 and found.memory is not None and found.memory.offload is None
            assert list_used(found, names) == ["RTX 4090", "RTX 3060 12GB", "RTX 3060 12GB"]

    def test_a_pipeline_is_no_faster_than_its_fastest_card_and_no_slower_than_its_slowest(self) -> None:
        model, work, pair = find_model(FOUR_B), Workload(), Parallelism(pipeline=2)

        def measure(*names: str) -> float:
            found = decide(make_mixed(*names), model, work, "llama.cpp", with_alternatives=True)
            plans = [(found.parallelism, get_speed(found))] + [
                (one.parallelism, one.estimate.output_tok_s.value)
                for one in found.alternatives
                if one.engine == "llama.cpp" and one.quantization == found.quantization and one.estimate.output_tok_s
            ]
            return next(speed for layout, speed in plans if layout == pair)

        slow, mixed, fast = measure("2x RTX 3060 12GB"), measure("RTX 3060 12GB", LARGE), measure("2x RTX 4090")
        assert slow < mixed < fast

    def test_tensor_ranks_need_the_quantization_of_the_weakest_card(self) -> None:
        machine = make_mixed("RTX 3090", LARGE)
        (both,) = [one for one in list_card_groups(machine, get_engine("vllm")) if len(one.accelerators) == 2]
        target = get_engine("vllm").find_target(both)
        assert target is not None and target.capability == (8, 6) and "fp8" not in target.features


class TestVendors:
    @pytest.mark.parametrize("names", [("RX 7900 XTX", LARGE), (LARGE, "RX 7900 XTX")])
    def test_one_process_uses_the_cards_of_one_vendor(self, names: tuple[str, ...]) -> None:
        found = decide_on(names, SEVENTY_B, "llama.cpp")
        assert list_used(found, names) == ["RTX 4090"] and found.launch is not None
        # The NVIDIA driver counts its own cards.
        assert found.launch.env["CUDA_VISIBLE_DEVICES"] == "0"
        (hint,) = [hint for hint in found.hint_details if hint.kind == "idle-cards"]
        assert hint.device == "AMD Radeon RX 7900 XTX" and hint.cause == "vendor"
        assert any("one process computes on the cards of one vendor" in text for text in found.hints)
        for one in found.alternatives:
            cards = pick_cards(make_mixed(*names), one.settings.cards if one.settings is not None else ())
            assert len({card.vendor for card in cards}) <= 1

    def test_the_variable_is_that_of_the_vendor(self) -> None:
        found = decide_on(("RTX 3060 12GB", "RX 7900 XTX"), FOUR_B)
        assert found.launch is not None and found.launch.env["HIP_VISIBLE_DEVICES"] == "0"
        assert "CUDA_VISIBLE_DEVICES" not in found.launch.env

    def test_memory_of_the_processor_is_not_added_to_that_of_a_card(self) -> None:
        own = make_mixed("RTX 4060 8GB").accelerators[0]
        integrated = Accelerator(
            name="AMD Radeon 780M", vendor="amd", index=1, driver_index=0, memory_bytes=32 << 30, free_bytes=30 << 30,
            unified_memory=True, architecture="gfx1103",
        )  # fmt: skip
        for cards in ((own, integrated), (integrated, own)):
            machine = replace_fields(make_mixed("RTX 4060 8GB"), accelerators=cards)
            assert [kind[0].name for kind in list_kinds(machine)] == [own.name, integrated.name]
            assert all(len(one.accelerators) == 1 for one in list_card_groups(machine, get_engine("llama.cpp")))
            found = decide(machine, find_model(FOUR_B), Workload())
            assert found.settings is not None and found.settings.cards == (0,)


class TestIndexes:
    def test_cards_of_several_drivers_keep_the_indexes_of_their_drivers(self) -> None:
        nvidia = [Accelerator(name="NVIDIA GeForce RTX 4090", vendor="nvidia", index=index) for index in (0, 2)]
        amd = [Accelerator(name="AMD Radeon RX 7900 XTX", vendor="amd", index=index) for index in (0, 1)]
        merged = merge_found(
            [FoundAccelerators(accelerators=tuple(nvidia)), FoundAccelerators(accelerators=tuple(amd))]
        )
        cards = merged.accelerators
        assert [card.index for card in cards] == [0, 2, 3, 4]
        assert show_cards("cuda", cards[1:2])["CUDA_VISIBLE_DEVICES"] == "2"
        assert show_cards("rocm", cards[2:]) == {"HIP_VISIBLE_DEVICES": "0,1"}

    def test_a_slice_is_named_by_its_uuid(self) -> None:
        part = Accelerator(name="NVIDIA H100 MIG 1g.10gb", vendor="nvidia", index=8, parent=0, uuid="MIG-aa")
        assert show_cards("cuda", [part])["CUDA_VISIBLE_DEVICES"] == "MIG-aa"

    def test_a_plan_is_checked_on_the_cards_that_it_names(self) -> None:
        machine, model = make_mixed(SMALL, LARGE), find_model(FOUR_B)
        found = decide(machine, model, Workload(), "vllm")
        assert found.settings is not None and found.settings.cards == (1,)
        fitted = fit(machine, model, Workload(), "vllm", settings=found.settings)
        assert fitted.devices[0].device == "NVIDIA GeForce RTX 4090" and fitted.fits


class TestServing:
    def divide(self, machine: Hardware, model: str, replicas: int = 1) -> MachinePart:
        def decide_for(hardware: Hardware, workload: Workload) -> Decision:
            return decide(hardware, find_model(model), workload, "llama.cpp")

        (part,) = divide_machine(machine, [ServiceAsk(model, Workload(), decide_for, replicas)])
        return part

    def test_serve_shows_the_process_the_chosen_card_and_counts_its_memory(self) -> None:
        part = self.divide(make_mixed(SMALL, LARGE), FOUR_B)
        assert part.cards == ((1,),) and [set(need) for need in part.needs] == [{"card 1"}]

    def test_each_card_of_a_pipeline_needs_its_own_memory(self) -> None:
        part = self.divide(make_mixed(SMALL, LARGE), THIRTY_TWO_B)
        (need,) = part.needs
        assert part.cards == ((1, 0),) and need["card 1"] > 2 * need["card 0"] > 0

    def test_replicas_have_different_cards(self) -> None:
        part = self.divide(make_mixed(SMALL, LARGE), FOUR_B, replicas=2)
        assert sorted(part.cards) == [(0,), (1,)] and [set(need) for need in part.needs] == [{"card 1"}, {"card 0"}]

    def test_services_that_share_a_machine_name_their_cards(self) -> None:
        def decide_for(hardware: Hardware, workload: Workload) -> Decision:
            return decide(hardware, find_model("Qwen/Qwen3-8B"), workload, "vllm")

        asks = [ServiceAsk(name, Workload(), decide_for) for name in ("one", "two")]
        parts = divide_machine(make_mixed(SMALL, LARGE, "RTX 3090"), asks)
        named = [part.decision.settings.cards for part in parts if part.decision.settings is not None]
        assert [part.cards for part in parts] == [((1,),), ((2,),)] and named == [(1,), (2,)]


class TestKinds:
    def test_small_differences_of_free_memory_make_no_kind(self) -> None:
        machine = make_simulated_hardware({"accelerator": LARGE, "count": 2, "ram_gb": 64})
        first, second = machine.accelerators
        used = replace_fields(first, free_bytes=round(0.95 * (first.free_bytes or 0)))
        assert not has_different_cards(replace_fields(machine, accelerators=(used, second)))
        half = replace_fields(first, free_bytes=(first.free_bytes or 0) // 2)
        assert list_kinds(replace_fields(machine, accelerators=(half, second))) == ((second,), (half,))

    def test_groups_of_equal_cards_are_not_enumerated(self) -> None:
        engine = get_engine("vllm")
        alike = make_simulated_hardware({"accelerator": "H100 SXM", "count": 8})
        assert list_card_groups(alike, engine) == (alike,)
        mixed = make_mixed("4x RTX 3090", "4x RTX 4090")
        # Four of each kind, and the five to eight largest.
        assert sorted(len(one.accelerators) for one in list_card_groups(mixed, engine)) == [4, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("number", [QUICK, pytest.param(NIGHTLY, marks=pytest.mark.nightly)], ids=["quick", "nightly"])
def test_the_order_in_which_cards_are_named_changes_nothing(number: int) -> None:
    planned = 0
    for case in generate_mixed_cases(number):
        machine, other = make_machine(case.chip, 1), make_machine(reverse_cards(case).chip, 1)
        assert machine is not None and other is not None
        found, again = (decide(one, find_model(case.model), case.workload) for one in (machine, other))
        assert describe(found, machine) == describe(again, other), case.label
        assert not list_silences(HintCase(machine, case.model, case.workload, Operations()), found), case.label
        planned += found.fits
    assert planned > number / 3


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("GTX 1650",), "one NVIDIA desktop card, one request at a time"),
        (("RTX 4090", "RX 7900 XTX"), "one RTX card, one request at a time"),
        (("RTX 3090", "P40"), "one RTX card, one request at a time"),
        (("RTX 3060 12GB", "GTX 1050 Ti"), "2 NVIDIA desktop cards, one request at a time"),
        (("2x RTX 3090", "RTX 4090"), "3 RTX cards, one request at a time"),
        (("RTX 3060 12GB", "Arc B580"), "Intel Arc B580 and NVIDIA GeForce RTX 3060 12GB: llama.cpp runs on them"),
        (("Arc B580",), "Intel Arc B580: llama.cpp runs on it"),
    ],
)
def test_the_reason_for_the_engine_names_the_cards_that_it_is_about(names: tuple[str, ...], text: str) -> None:
    assert decide_on(names, "Qwen/Qwen3-4B").reasons[0].text.startswith(text)
