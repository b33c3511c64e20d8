"""Decisions: one entry for each engine, figures that hold, and what would fit when nothing does."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide import choose, decide, plan
from bedplate.decide.fit import fitted, more_memory, most_requests
from bedplate.engines import Engine, Recipe, all_engines, engine
from bedplate.engines.llama_cpp import EVERYDAY_CONTEXT, EVERYDAY_SLOTS, MAX_SLOTS
from bedplate.errors import AnswerIsNo, BadQuestion
from bedplate.run.builtin import builtin_facts
from bedplate.values import (
    Accelerator,
    Cpu,
    Decision,
    Hardware,
    Launch,
    Memory,
    MemoryNeed,
    Model,
    Plan,
    Refusal,
    Settings,
    Workload,
    from_json,
    replaced,
    to_json,
)

MIB, GIB = 1 << 20, 1 << 30
LLAMA = engine("llama.cpp")


def box(available_bytes: int = 16 * GIB, *accelerators: Accelerator) -> Hardware:
    cpu = Cpu(name="a CPU", arch="x86_64", logical_cores=8, allowed_cores=8.0, allowed_physical_cores=4)
    memory = Memory(total_bytes=available_bytes, available_bytes=available_bytes)
    return Hardware(os="linux", cpu=cpu, memory=memory, accelerators=accelerators)


MODEL = builtin_facts()
EIGHT_B = replaced(
    MODEL,
    name="An 8B model",
    parameters=8_000_000_000,
    weight_bytes=4_900_000_000,
    num_layers=32,
    hidden_size=4096,
    max_context=131072,
    kv_bytes_per_token=131072,
)
H100 = Accelerator(name="NVIDIA H100", vendor="nvidia", memory_bytes=80 * GIB)
M2 = Accelerator(name="Apple M2", vendor="apple", unified_memory=True)

hardware = st.builds(box, st.integers(64 * MIB, 64 * GIB))
models = st.builds(
    lambda weights, kv, window, state, context: replaced(
        MODEL,
        weight_bytes=weights,
        parameters=weights * 2,
        kv_bytes_per_token=kv,
        kv_bytes_window=window,
        state_bytes=state,
        max_context=context,
    ),
    weights=st.integers(10 * MIB, 32 * GIB),
    kv=st.integers(0, MIB),
    window=st.integers(0, 512 * MIB),
    state=st.integers(0, 64 * MIB),
    context=st.sampled_from([None, 2048, 8192, 131072]),
)
workloads = st.builds(
    Workload,
    users=st.integers(1, 500),
    concurrency=st.none() | st.integers(1, 500),
    prompt_tokens=st.integers(1, 50_000),
    output_tokens=st.integers(1, 4000),
    context_tokens=st.none() | st.integers(1, 200_000),
    task=st.sampled_from(["generate", "embed", "classify", "other"]),
)
accelerated = st.builds(lambda cards: box(16 * GIB, *cards), st.lists(st.sampled_from([H100, M2]), max_size=2))


def entries(decision: Decision) -> list[str]:
    chosen = [decision.engine] if decision.engine is not None else []
    return [*chosen, *(r.engine for r in decision.refused), *(c.engine for c in decision.challengers)]


class TestShape:
    @given(hardware | accelerated, models, workloads, st.sampled_from([None, *all_engines()]))
    def test_every_engine_is_named_exactly_once(
        self, machine: Hardware, model: Model, workload: Workload, wanted: str | None
    ) -> None:
        decision = decide(machine, model, workload, wanted)
        assert sorted(entries(decision)) == sorted(all_engines())
        assert all(refusal.why for refusal in decision.refused)
        assert decision.fits == (decision.engine is not None) == (decision.launch is not None)
        assert bool(decision.reasons) == decision.fits
        if decision.fits:
            assert decision.max_concurrency >= 1 and decision.memory is not None and decision.memory.fits

    @given(hardware, models, workloads)
    def test_a_decision_survives_json(self, machine: Hardware, model: Model, workload: Workload) -> None:
        decision = decide(machine, model, workload)
        assert from_json(Decision, to_json(decision)) == decision
        if decision.fits:
            made = plan(decision, model, workload)
            assert from_json(Plan, to_json(made)) == made

    def test_a_small_model_on_an_ordinary_machine(self) -> None:
        decision = decide(box(), MODEL, Workload())
        assert decision.engine == "llama.cpp" and decision.engine_version == LLAMA.version and decision.fits
        assert [reason.rule for reason in decision.reasons] == ["hardware.cpu", "fit.memory", "cpu.threads"]
        assert decision.settings == Settings(
            slots=EVERYDAY_SLOTS, context_tokens=EVERYDAY_CONTEXT, threads=4, gpu_layers=0
        )
        assert decision.launch is not None and decision.launch.argv[0] == "llama-server"
        memory = decision.estimate.memory_gb
        assert memory is not None and memory.basis == "estimate"
        assert memory.low < memory.value < memory.high < 2
        assert decision.quantization == "Q4_1"

    def test_the_hardware_is_among_the_reasons(self) -> None:
        assert decide(box(16 * GIB, H100), MODEL, Workload()).reasons[0].rule == "hardware.anywhere"
        assert decide(box(16 * GIB, M2), MODEL, Workload()).reasons[0].rule == "hardware.anywhere"

    def test_what_cannot_run_here_is_told_from_what_was_not_built_for_this(self) -> None:
        kinds = {refusal.engine: refusal.kind for refusal in decide(box(), MODEL, Workload()).refused}
        assert kinds["mlx"] == "impossible" and kinds["tgi"] == "impossible" and kinds["vllm"] == "unsuitable"
        on_gpu = {refusal.engine: refusal.kind for refusal in decide(box(GIB, H100), MODEL, Workload()).refused}
        assert on_gpu["vllm"] == "outranked"


class TestAskedFor:
    def test_by_name(self) -> None:
        decision = decide(box(), MODEL, Workload(), "llama.cpp")
        assert decision.engine == "llama.cpp" and decision.reasons[0].rule == "operations.asked"

    @pytest.mark.parametrize("wanted", [one for one in all_engines() if one != "llama.cpp"])
    def test_what_is_not_possible_is_not_replaced_by_something_else(self, wanted: str) -> None:
        decision = decide(box(), MODEL, Workload(), wanted)
        assert decision.engine is None and not decision.fits and decision.max_concurrency == 0
        reasons = {refusal.engine: refusal for refusal in decision.refused}
        assert reasons["llama.cpp"].kind == "outranked" and "was asked for" in reasons["llama.cpp"].why
        assert "was asked for" not in reasons[wanted].why
        with pytest.raises(AnswerIsNo):
            plan(decision, MODEL, Workload())

    def test_a_name_that_no_engine_has(self) -> None:
        with pytest.raises(BadQuestion, match="no engine is called 'lama'"):
            decide(box(), MODEL, Workload(), "lama")

    def test_of_two_that_could_the_other_one_is_refused_with_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Second(Engine):
            id = "second"
            name = "Second"
            version = "1"
            recipe: ClassVar[Recipe | None] = Recipe(packages=(), download_bytes=0, disk_bytes=0, check="")

            def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
                return None

            def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
                return LLAMA.settle(hardware, model, workload)

            def memory(self, hardware: Hardware, model: Model, settings: Settings) -> MemoryNeed:
                return LLAMA.memory(hardware, model, settings)

            def launch(self, plan: Plan, port: int) -> Launch:
                return Launch(argv=("second",))

        known = {**all_engines(), "second": Second()}
        monkeypatch.setattr(choose, "all_engines", lambda: known)
        monkeypatch.setattr(choose, "engine_by_id", known.__getitem__)
        for wanted in (None, "second", "llama.cpp", "vllm"):
            assert sorted(entries(decide(box(), MODEL, Workload(), wanted))) == sorted(known)


class TestFit:
    @settings(max_examples=200)
    @given(hardware, models, workloads, st.integers(0, 64 * GIB))
    def test_more_memory_never_hurts(self, machine: Hardware, model: Model, workload: Workload, more: int) -> None:
        larger = box(machine.memory.available_bytes + more)
        before, after = decide(machine, model, workload), decide(larger, model, workload)
        assert after.fits >= before.fits
        assert after.max_concurrency >= before.max_concurrency
        if before.settings is not None and after.settings is not None:
            assert after.settings.slots >= before.settings.slots or (
                after.settings.context_tokens > before.settings.context_tokens
            )

    @settings(max_examples=200)
    @given(hardware, models, workloads, st.integers(0, 500), st.integers(0, 100_000))
    def test_asking_for_more_never_helps(
        self, machine: Hardware, model: Model, workload: Workload, users: int, tokens: int
    ) -> None:
        more = replaced(
            workload,
            users=workload.users + users,
            concurrency=workload.concurrency + users if workload.concurrency is not None else None,
            prompt_tokens=workload.prompt_tokens + tokens,
            context_tokens=workload.context_tokens + tokens if workload.context_tokens is not None else None,
        )
        before, after = decide(machine, model, workload), decide(machine, model, more)
        assert after.fits <= before.fits
        assert after.max_concurrency <= before.max_concurrency

    @given(hardware, models, st.integers(1, 100_000))
    def test_the_most_requests_are_the_most(self, machine: Hardware, model: Model, context: int) -> None:
        def fits(slots: int) -> bool:
            return LLAMA.memory(machine, model, Settings(slots=slots, context_tokens=context)).fits

        most = most_requests(LLAMA, machine, model, context)
        assert most == 0 or fits(most)
        assert not fits(most + 1) or most == MAX_SLOTS

    def test_max_concurrency_is_the_most_that_fit(self) -> None:
        machine, workload = box(16 * GIB), Workload(prompt_tokens=3000, output_tokens=1000)
        most = decide(machine, EIGHT_B, workload).max_concurrency
        assert 1 < most < MAX_SLOTS
        for slots, fits in ((most, True), (most + 1, False)):
            assert LLAMA.memory(machine, EIGHT_B, Settings(slots=slots, context_tokens=4000)).fits is fits

    def test_settings_shrink_in_the_order_that_costs_least(self) -> None:
        workload = Workload(prompt_tokens=500, output_tokens=500, users=1)
        wanted = LLAMA.settle(box(), EIGHT_B, workload)
        assert (wanted.slots, wanted.context_tokens) == (4, 8192)
        path: list[tuple[int, int]] = []
        for available in range(10 * GIB, 4 * GIB, -2 * MIB):
            chosen, need = fitted(LLAMA, box(available), EIGHT_B, workload)
            if need.fits and (chosen.slots, chosen.context_tokens) not in path:
                path.append((chosen.slots, chosen.context_tokens))
        assert path == [(4, 8192), (2, 8192), (1, 8192), (1, 4096), (1, 2048), (1, 1024), (1, 1000)]

    def test_slots_that_were_asked_for_go_last(self) -> None:
        workload = Workload(prompt_tokens=1000, output_tokens=1000, concurrency=8)
        path: list[tuple[int, int]] = []
        for available in range(20 * GIB, 4 * GIB, -8 * MIB):
            chosen, need = fitted(LLAMA, box(available), EIGHT_B, workload)
            if need.fits and (chosen.slots, chosen.context_tokens) not in path:
                path.append((chosen.slots, chosen.context_tokens))
        assert path == [(8, 8192), (8, 4096), (8, 2048), (8, 2000), (4, 2000), (2, 2000), (1, 2000)]

    def test_requests_that_must_wait_are_told(self) -> None:
        decision = decide(box(7 * GIB), EIGHT_B, Workload(prompt_tokens=2000, output_tokens=2000, concurrency=64))
        assert decision.settings is not None and decision.settings.slots < 64
        assert decision.reasons[-1].rule == "fit.queue" and "of 64 requests" in decision.reasons[-1].text

    @given(hardware, models, workloads)
    def test_what_does_not_fit_says_what_would(self, machine: Hardware, model: Model, workload: Workload) -> None:
        decision = decide(machine, model, workload, "llama.cpp")
        if decision.fits or decision.memory is None:
            return
        need = decision.memory
        assert decision.max_concurrency == 0
        assert decision.refused[0].engine == "llama.cpp" and decision.refused[0].kind == "impossible"
        assert decision.refused[0].hint and "more free memory" in decision.hints[-1]
        enough = box(need.available_bytes + more_memory(need) + 4096)  # shares are rounded to bytes
        assert decide(enough, model, workload).fits
        with pytest.raises(AnswerIsNo) as caught:
            plan(decision, model, workload)
        assert caught.value.exit_code == 1 and "more free memory" in str(caught.value.hint)

    def test_a_smaller_quantization_is_named_first_when_one_would_do(self) -> None:
        decision = decide(box(4 * GIB), EIGHT_B, Workload())
        assert not decision.fits
        assert (
            decision.hints[0].startswith("a quantization of at most 3.") and "(this one has 4.9)" in decision.hints[0]
        )
        assert "GiB are free" in decision.refused[0].why and "weights 4.56 GiB" in decision.refused[0].why

    def test_no_quantization_is_named_when_none_would_do(self) -> None:
        decision = decide(box(GIB), EIGHT_B, Workload())
        assert len(decision.hints) == 1

    def test_facts_of_another_format_are_refused(self) -> None:
        decision = decide(box(), replaced(MODEL, format="safetensors"), Workload())
        assert decision.engine is None and sorted(entries(decision)) == sorted(all_engines())
        reasons = {refusal.engine: refusal.why for refusal in decision.refused}
        assert "GGUF" in reasons["llama.cpp"]
