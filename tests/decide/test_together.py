"""Several models and replicas on one machine: each gets a part, or an error with hints."""

from __future__ import annotations

import pytest
from tests.engines.plans import machine, model

from bedplate.decide import decide
from bedplate.decide.placement import ServiceAsk, divide_machine, subtract_needs
from bedplate.errors import NotPossible
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.values import Hardware, Model, Workload

GIB = 1 << 30
SMALL = model("Qwen/Qwen3-0.6B")
LLAMA_8B = model("meta-llama/Llama-3.1-8B-Instruct")


def make_ask(
    which: Model, engine: str | None = None, *, replicas: int = 1, on_demand: bool = False, users: int = 1
) -> ServiceAsk:
    return ServiceAsk(
        which.name, Workload(users=users), lambda on, workload: decide(on, which, workload, engine), replicas, on_demand
    )


def make_cpu_machine(ram_gb: float, cores: int = 16) -> Hardware:
    return make_simulated_hardware({"cpu": "AMD EPYC 9654", "cores": cores, "ram_gb": ram_gb, "os": "linux"})


def test_single_service_is_decided_as_without_others() -> None:
    on = make_cpu_machine(64)
    (part,) = divide_machine(on, [make_ask(LLAMA_8B)])
    assert part.decision == decide(on, LLAMA_8B, Workload())
    assert part.needs[0]["host"] == part.decision.memory.devices[0].high_bytes  # type: ignore[union-attr]


def test_services_that_do_not_fit_together_get_an_error_with_hints() -> None:
    on = make_cpu_machine(24)
    both = [make_ask(LLAMA_8B, "pytorch"), make_ask(SMALL, "llama.cpp")]
    assert all(decide(on, which, Workload(), engine).fits for which, engine in ((LLAMA_8B, "pytorch"), (SMALL, None)))
    assert len(divide_machine(on, both)) == 2
    with pytest.raises(NotPossible, match=f"{LLAMA_8B.name} does not fit together with {LLAMA_8B.name}") as caught:
        divide_machine(on, [make_ask(LLAMA_8B, "pytorch"), make_ask(LLAMA_8B, "pytorch")])
    assert "ttl" in str(caught.value.hint) and caught.value.cause


def test_services_on_demand_need_to_fit_one_at_a_time() -> None:
    on = make_cpu_machine(24)
    found = divide_machine(on, [make_ask(LLAMA_8B, "pytorch", on_demand=True) for _ in range(3)])
    assert all(part.decision.fits for part in found)
    with pytest.raises(NotPossible):
        divide_machine(on, [make_ask(LLAMA_8B, "pytorch"), make_ask(LLAMA_8B, "pytorch", on_demand=True)])


def test_spare_slots_are_given_up_before_an_error() -> None:
    """A chat gets four slots of 8,192 tokens if there is memory; two chats may get fewer."""
    one = divide_machine(make_cpu_machine(64), [make_ask(LLAMA_8B, "llama.cpp")])[0]
    tight = 2.0 * (one.needs[0]["host"] / 0.95 - 2 * GIB) / 1e9
    found = divide_machine(make_cpu_machine(tight), [make_ask(LLAMA_8B, "llama.cpp"), make_ask(LLAMA_8B, "llama.cpp")])
    assert all(part.needs[0]["host"] < one.needs[0]["host"] for part in found[1:])


def test_memory_budget_is_respected() -> None:
    on = make_cpu_machine(256)
    free = divide_machine(on, [make_ask(SMALL, "llama.cpp")])[0].needs[0]["host"]
    assert sum(divide_machine(on, [make_ask(SMALL, "llama.cpp")], free)[0].needs[0].values()) <= free
    with pytest.raises(NotPossible, match="does not fit in 2 GiB") as caught:
        divide_machine(on, [make_ask(LLAMA_8B, "llama.cpp")], 2 * GIB)
    assert "a larger memory budget" in str(caught.value.hint)


def test_replicas_divide_cores_memory_and_workload() -> None:
    on = make_cpu_machine(64, cores=16)
    (part,) = divide_machine(on, [make_ask(SMALL, "llama.cpp", replicas=4, users=40)])
    assert len(part.needs) == 4 and part.decision.settings is not None
    assert part.decision.settings.threads == on.cpu.allowed_physical_cores // 4
    assert part.workload.users == 10
    with pytest.raises(NotPossible, match="3 replicas of") as caught:
        divide_machine(make_cpu_machine(24), [make_ask(LLAMA_8B, "pytorch", replicas=3)])
    assert "fewer replicas" in str(caught.value.hint)


class TestCards:
    def test_replicas_get_separate_gpus(self) -> None:
        (part,) = divide_machine(machine("H100 SXM", 4), [make_ask(LLAMA_8B, "vllm", replicas=2)])
        assert all(part.cards) and not set(part.cards[0]) & set(part.cards[1])

    def test_second_model_is_placed_on_another_gpu(self) -> None:
        first, second = divide_machine(machine("H100 SXM", 2), [make_ask(LLAMA_8B, "vllm"), make_ask(SMALL, "vllm")])
        used = [set(part.cards[0]) for part in (first, second)]
        assert used[0] and used[1] and not used[0] & used[1]

    def test_replicas_that_reserve_a_gpu_need_one_each(self) -> None:
        with pytest.raises(NotPossible, match="need one accelerator each"):
            divide_machine(machine("H100 SXM", 1), [make_ask(LLAMA_8B, "vllm", replicas=2)])

    def test_taken_memory_is_not_free(self) -> None:
        on = machine("H100 SXM", 2)
        rest = subtract_needs(on, [{"card 0": 70 * GIB, "host": 10 * GIB}])
        assert rest.accelerators[0].index == 1
        assert on.memory.available_bytes - rest.memory.available_bytes == 10 * GIB


def test_earlier_service_leaves_cards_to_later_ones() -> None:
    """Alone, the large model is spread over all four cards."""
    on, large, small = machine("A40", 4), model("Qwen/Qwen3-32B"), model("Qwen/Qwen3-8B")
    assert decide(on, large, Workload(concurrency=4)).parallelism.tensor == 4
    found = divide_machine(on, [make_ask(large, "vllm", users=4), make_ask(small, "vllm", replicas=2, users=4)])
    used = [index for part in found for group in part.cards for index in group]
    assert [len(part.cards) for part in found] == [1, 2] and len(used) == len(set(used)) <= 4
