"""Decisions: one entry for each engine, consistent figures, and remedies if nothing fits."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide import decide, plan
from bedplate.decide.memory import fit
from bedplate.engines import get_engine, load_engines
from bedplate.engines.llama_cpp import DEFAULT_CONTEXT_TOKENS, DEFAULT_SLOTS, MAX_SLOTS
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model, make_model_from_facts
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import (
    Cpu,
    Decision,
    Hardware,
    Memory,
    Model,
    Plan,
    Settings,
    Workload,
    from_json,
    replace_fields,
    to_json,
)
from bedplate.values.intent import Operations

MIB, GIB = 1 << 20, 1 << 30
LLAMA = get_engine("llama.cpp")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
GPU_MACHINES = (
    ("RTX 4090", 1), ("RTX 3070", 1), ("RTX 3090", 2), ("RTX 4090", 6), ("L4", 4), ("H100 SXM", 1), ("H100 SXM", 8),
    ("H200 SXM", 8), ("MI300X", 4), ("Radeon RX 7900 XTX", 1), ("Intel Arc B580", 1), ("Apple M3 Max 40-core", 1),
)  # fmt: skip
KNOWN = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Meta-Llama-3.1-70B", "deepseek-ai/DeepSeek-V3", "gpt-oss-120b",
    "Qwen/Qwen3-30B-A3B",
)  # fmt: skip


def make_cpu_machine(available_bytes: int = 16 * GIB) -> Hardware:
    cpu = Cpu(name="a CPU", arch="x86_64", logical_cores=8, allowed_cores=8.0, allowed_physical_cores=4)
    return Hardware(os="linux", cpu=cpu, memory=Memory(total_bytes=available_bytes, available_bytes=available_bytes))


@functools.cache
def make_machine(name: str, count: int = 1, ram_gb: int = 128) -> Hardware:
    described = {"accelerator": name, "count": count, "ram_gb": ram_gb}
    return make_simulated_hardware(described | ({"os": "macos"} if name.startswith("Apple") else {}))


def with_free(hardware: Hardware, share: float) -> Hardware:
    """The same machine with only this share of its GPU memory and RAM free."""
    cards = tuple(
        replace_fields(card, free_bytes=round((card.free_bytes or card.memory_bytes or 0) * share))
        for card in hardware.accelerators
    )
    memory = replace_fields(hardware.memory, available_bytes=round(hardware.memory.available_bytes * share))
    return replace_fields(hardware, accelerators=cards, memory=memory)


MODEL = read_builtin_facts()
EIGHT_B = replace_fields(
    MODEL,
    name="An 8B model",
    parameters=8_000_000_000,
    weight_bytes=4_900_000_000,
    num_layers=32,
    hidden_size=4096,
    max_context=131072,
    kv_bytes_per_token=131072,
)

boxes = st.builds(make_cpu_machine, st.integers(64 * MIB, 64 * GIB))
gpu_machines = st.sampled_from(GPU_MACHINES).map(lambda named: make_machine(*named))
shares = st.floats(0.02, 1)
gguf_models = st.builds(
    lambda weights, kv, window, state, context: replace_fields(
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
known_models = st.sampled_from(KNOWN).map(find_model)
fact_models = st.builds(
    lambda billions, form: make_model_from_facts({"params_b": billions, "format": form, "context": 32768}),
    st.floats(0.05, 500),
    st.sampled_from(["facts", "safetensors", "gguf", "mlx", "exl3"]),
)
any_models = gguf_models | known_models | fact_models
workloads = st.builds(
    Workload,
    users=st.integers(1, 500),
    concurrency=st.none() | st.integers(1, 500),
    prompt_tokens=st.integers(1, 50_000),
    output_tokens=st.integers(1, 4000),
    context_tokens=st.none() | st.integers(1, 200_000),
    shared_prefix_tokens=st.sampled_from([0, 100, 5000]),
    structured_output=st.booleans(),
    precision_sensitive=st.booleans(),
    task=st.sampled_from(["generate", "embed", "classify", "other"]),
    volume=st.sampled_from(["normal", "extreme"]),
)
operations = st.builds(
    Operations,
    model_changes=st.sampled_from([None, "often", "rarely"]),
    machinery=st.sampled_from([None, "none", "container", "kubernetes", "cluster"]),
    portable=st.booleans(),
    ecosystem=st.sampled_from([None, "huggingface"]),
    incumbent=st.none() | st.sampled_from(list(load_engines())),
)


def list_entries(decision: Decision) -> list[str]:
    chosen = [decision.engine] if decision.engine is not None else []
    return [*chosen, *(r.engine for r in decision.refused), *(c.engine for c in decision.challengers)]


def check_shape(decision: Decision, model: Model) -> None:
    assert sorted(list_entries(decision)) == sorted(load_engines())
    assert all(refusal.why for refusal in decision.refused)
    assert all(challenger.evidence_needed for challenger in decision.challengers)
    assert decision.fits == (decision.engine is not None) == (decision.launch is not None)
    assert bool(decision.reasons) == decision.fits
    if decision.fits:
        assert decision.max_concurrency >= 1 and decision.memory is not None and decision.memory.fits
        assert all(need.fits for need in decision.memory.devices)
        # No format has less than two bits per weight; the generated GGUF models here have four.
        weights = sum(need.weights_bytes * need.count for need in decision.memory.devices)
        assert weights >= min(model.weight_bytes, model.parameters / 4) * 0.99
        assert decision.settings is not None and decision.settings.slots >= 1
    else:
        assert decision.max_concurrency == 0 and not decision.challengers
    assert from_json(Decision, to_json(decision)) == decision


class TestDecisionInvariants:
    @settings(deadline=None)
    @given(boxes, any_models, workloads, operations, st.sampled_from([None, *load_engines()]))
    def test_decisions_for_cpu_machines_are_consistent(
        self, hardware: Hardware, model: Model, workload: Workload, kept: Operations, wanted: str | None
    ) -> None:
        check_shape(decide(hardware, model, workload, wanted, operations=kept), model)

    @settings(deadline=None)
    @given(gpu_machines, shares, any_models, workloads, operations, st.sampled_from([None, *load_engines()]))
    def test_decisions_for_machines_with_accelerators_are_consistent(
        self,
        hardware: Hardware,
        share: float,
        model: Model,
        workload: Workload,
        kept: Operations,
        wanted: str | None,
    ) -> None:
        decision = decide(with_free(hardware, share), model, workload, wanted, operations=kept)
        check_shape(decision, model)
        if decision.fits:
            made = plan(decision, model, workload)
            assert from_json(Plan, to_json(made)) == made
            layout = decision.parallelism
            assert layout.tensor * layout.pipeline * layout.data <= len(hardware.accelerators)

    def test_small_model_on_an_ordinary_machine_is_planned(self) -> None:
        decision = decide(make_cpu_machine(), MODEL, Workload())
        assert decision.engine == "llama.cpp" and decision.engine_version == LLAMA.version and decision.fits
        assert [reason.rule for reason in decision.reasons] == ["hardware.cpu", "fit.memory", "cpu.threads"]
        everyday = Settings(slots=DEFAULT_SLOTS, context_tokens=DEFAULT_CONTEXT_TOKENS, threads=4, gpu_layers=0)
        assert decision.settings == everyday
        assert decision.launch is not None and decision.launch.argv[0] == "llama-server"
        memory = decision.estimate.memory_gb
        assert memory is not None and memory.basis == "estimate"
        assert memory.low < memory.value < memory.high < 2
        assert decision.quantization == "Q4_1"

    def test_impossible_and_unsuitable_engines_are_distinguished(self) -> None:
        model = find_model("Qwen/Qwen3-8B")
        on_cpu = {refusal.engine: refusal for refusal in decide(make_cpu_machine(64 * GIB), model, Workload()).refused}
        assert on_cpu["tgi"].kind == "impossible" and on_cpu["vllm"].kind == "unsuitable"
        assert "GPU" in (on_cpu["vllm"].hint or "")
        on_gpu = decide(make_machine("H100 SXM"), model, Workload(concurrency=64))
        kinds = {refusal.engine: refusal.kind for refusal in on_gpu.refused}
        assert kinds["mlx"] != "outranked" and kinds["llama.cpp"] == "unsuitable" and kinds["tgi"] == "outranked"

    def test_memory_is_computed_for_the_decided_settings(self) -> None:
        """The settings fit into each device's usable memory, and the launch command has the same settings."""
        decision = decide(make_machine("RTX 4090", 1, 64), find_model("Qwen/Qwen3-32B"), Workload(prompt_tokens=4000))
        assert decision.memory is not None and decision.settings is not None
        for need in decision.memory.devices:
            assert need.high_bytes <= (need.usable_bytes or 0) <= 24 * GIB

    def test_price_and_watts_become_cost_and_energy(self) -> None:
        work = Workload(concurrency=16, prompt_tokens=500, output_tokens=200)
        kept = Operations(price_per_hour=3.0, watts=700)
        decision = decide(make_machine("H100 SXM"), find_model("Qwen/Qwen3-8B"), work, operations=kept)
        rate, cost, energy = (
            decision.estimate.output_tok_s,
            decision.estimate.cost_per_million_tokens,
            decision.estimate.kwh_per_million_tokens,
        )
        assert rate is not None and cost is not None and energy is not None
        layout = decision.parallelism
        cards = layout.tensor * layout.pipeline * layout.data
        assert cost.value == pytest.approx(3.0 * cards / 3600 / rate.value * 1e6)
        assert energy.value == pytest.approx(0.7 * cards / 3600 / rate.value * 1e6)
        assert cost.low < cost.value < cost.high and cost.basis == "estimate"
        plain = decide(make_machine("H100 SXM"), find_model("Qwen/Qwen3-8B"), work).estimate
        assert plain.cost_per_million_tokens is None and plain.kwh_per_million_tokens is None


class TestRequestedEngine:
    @pytest.mark.parametrize("wanted", list(load_engines()))
    def test_requested_engine_is_planned_or_refused_but_never_replaced(self, wanted: str) -> None:
        for hardware in (make_cpu_machine(64 * GIB), make_machine("H100 SXM", 8), make_machine("Apple M3 Max 40-core")):
            decision = decide(hardware, find_model("Qwen/Qwen3-8B"), Workload(), wanted)
            if decision.engine is not None:
                assert decision.engine == wanted and decision.reasons[0].rule == "operations.asked"
                continue
            assert decision.refused[0].engine == wanted and decision.refused[0].kind == "impossible"
            others = [refusal for refusal in decision.refused if "was requested" in refusal.why]
            assert others and wanted not in {refusal.engine for refusal in others}
            with pytest.raises(NotPossible) as no:
                plan(decision, MODEL, Workload())
            assert wanted in (no.value.cause or "")

    def test_unknown_engine_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match="no engine is called 'lama'"):
            decide(make_cpu_machine(), MODEL, Workload(), "lama")


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("neon",), "32-bit weights: this processor has no instructions for BF16"),
        (("neon", "bf16"), "16-bit weights fit"),
    ],
)
def test_older_arm_processor_gets_reason_for_32_bit_weights(sets: tuple[str, ...], why: str) -> None:
    here = make_cpu_machine()
    here = replace_fields(here, cpu=replace_fields(here.cpu, arch="aarch64", instruction_sets=sets))
    model = find_model("Qwen/Qwen3-0.6B")
    found = decide(here, model, Workload(), "pytorch")
    assert why in [reason.text for reason in found.reasons]
    assert found.memory is not None and found.settings is not None
    cache = model.compute_kv_bytes(found.settings.context_tokens, 32 if why.startswith("32") else 16)
    assert found.memory.devices[0].kv_bytes == cache


class TestInstallable:
    def test_only_installable_engines_are_chosen(self) -> None:
        for hardware in (make_cpu_machine(), make_machine("RTX 4090"), make_machine("Apple M3 Max 40-core")):
            decision = decide(hardware, MODEL, Workload(), installable=True)
            assert decision.engine is not None and get_engine(decision.engine).recipe is not None
            check_shape(decision, MODEL)

    def test_cpu_build_reports_idle_gpu(self) -> None:
        decision = decide(make_machine("RTX 4090"), MODEL, Workload(), "llama.cpp", installable=True)
        assert decision.settings is not None and decision.settings.device == "cpu"
        assert "build.cpu" in [reason.rule for reason in decision.reasons]
        on_paper = decide(make_machine("RTX 4090"), MODEL, Workload(), "llama.cpp")
        assert on_paper.settings is not None and on_paper.settings.device == "cuda"


class TestFit:
    @settings(deadline=None)
    @given(boxes, gguf_models, workloads, st.integers(0, 64 * GIB))
    def test_more_memory_never_makes_a_cpu_fit_fail(
        self, hardware: Hardware, model: Model, workload: Workload, more: int
    ) -> None:
        larger = make_cpu_machine(hardware.memory.available_bytes + more)
        before, after = (decide(one, model, workload, "llama.cpp") for one in (hardware, larger))
        assert after.fits >= before.fits and after.max_concurrency >= before.max_concurrency

    @settings(deadline=None)
    @given(gpu_machines, shares, shares, any_models, workloads)
    def test_more_memory_never_makes_a_fit_fail(
        self, hardware: Hardware, one: float, other: float, model: Model, workload: Workload
    ) -> None:
        less, more = (with_free(hardware, share) for share in sorted((one, other)))
        assert decide(more, model, workload).fits >= decide(less, model, workload).fits

    @settings(deadline=None)
    @given(boxes | gpu_machines, any_models, workloads, st.integers(0, 500), st.integers(0, 4000))
    def test_more_users_or_tokens_never_make_a_fit_succeed(
        self, hardware: Hardware, model: Model, workload: Workload, users: int, tokens: int
    ) -> None:
        fewer = decide(hardware, model, workload).fits
        asked = {"users": workload.users + users, "concurrency": workload.concurrency and workload.concurrency + users}
        assert decide(hardware, model, replace_fields(workload, **asked)).fits <= fewer
        assert (
            decide(hardware, model, replace_fields(workload, prompt_tokens=workload.prompt_tokens + tokens)).fits
            <= fewer
        )
        assert (
            decide(hardware, model, replace_fields(workload, output_tokens=workload.output_tokens + tokens)).fits
            <= fewer
        )

    @settings(deadline=None)
    @given(
        st.sampled_from(["vllm", "sglang", "tensorrt-llm", "llama.cpp", "exllamav3", "pytorch"]),
        st.sampled_from(["RTX 4090", "L4", "H100 SXM"]),
        shares,
        shares,
        known_models,
        workloads,
        st.integers(0, 10_000),
    )
    def test_fit_of_each_engine_is_monotonic(
        self, name: str, card: str, one: float, other: float, model: Model, work: Workload, tokens: int
    ) -> None:
        small, large = (with_free(make_machine(card), share) for share in sorted((one, other)))
        # With a prefix longer than the prompts, a longer prompt would share more tokens.
        work = replace_fields(work, shared_prefix_tokens=min(work.shared_prefix_tokens, work.prompt_tokens))
        longer = replace_fields(work, prompt_tokens=work.prompt_tokens + tokens)
        base, roomier, busier = (
            fit(*case, name) for case in ((small, model, work), (large, model, work), (small, model, longer))
        )
        assert roomier.fits >= base.fits >= busier.fits
        if base.offload is None and busier.offload is None:
            # A model that is split between GPUs and RAM may hold more requests, so only like cases are compared.
            assert roomier.max_concurrency >= base.max_concurrency >= busier.max_concurrency

    def test_max_concurrency_is_the_most_that_fit(self) -> None:
        hardware, workload = make_cpu_machine(16 * GIB), Workload(prompt_tokens=3000, output_tokens=1000)
        most = decide(hardware, EIGHT_B, workload).max_concurrency
        assert 1 < most < MAX_SLOTS
        for slots, fits in ((most, True), (most + 1, False)):
            need = fit(hardware, EIGHT_B, workload, LLAMA, settings=Settings(slots=slots, context_tokens=4000))
            assert (need.max_concurrency >= slots) is fits

    def test_settings_shrink_slots_first_then_context(self) -> None:
        workload = Workload(prompt_tokens=500, output_tokens=500, users=1)
        wanted = LLAMA.settle(make_cpu_machine(), EIGHT_B, workload)
        assert (wanted.slots, wanted.context_tokens) == (4, 8192)
        expected = [(4, 8192), (2, 8192), (1, 8192), (1, 4096), (1, 2048), (1, 1024), (1, 1000)]
        assert self.shrinking(workload, 10) == expected

    def test_requested_slots_shrink_last(self) -> None:
        workload = Workload(prompt_tokens=1000, output_tokens=1000, concurrency=8)
        expected = [(8, 8192), (8, 4096), (8, 2048), (8, 2000), (4, 2000), (2, 2000), (1, 2000)]
        assert self.shrinking(workload, 20) == expected

    def shrinking(self, workload: Workload, from_gib: int) -> list[tuple[int, int]]:
        """The settings for decreasing memory: in steps of 32 MiB, and where they change in steps of 4 MiB."""

        @functools.cache
        def choose(available: int) -> tuple[int, int] | None:
            chosen = decide(make_cpu_machine(available), EIGHT_B, workload, "llama.cpp").settings
            return None if chosen is None else (chosen.slots, chosen.context_tokens)

        path: list[tuple[int, int]] = []
        for start in range(from_gib * GIB, 4 * GIB, -32 * MIB):
            end = start - 32 * MIB
            for available in range(start, end - 1, -4 * MIB) if choose(start) != choose(end) else (start,):
                if (chosen := choose(available)) is not None and chosen not in path:
                    path.append(chosen)
        return path

    def test_waiting_requests_are_reported(self) -> None:
        work = Workload(prompt_tokens=2000, output_tokens=2000, concurrency=64)
        decision = decide(make_cpu_machine(7 * GIB), EIGHT_B, work)
        assert decision.settings is not None and decision.settings.slots < 64 and decision.max_concurrency < 64
        (queue,) = [reason for reason in decision.reasons if reason.rule == "fit.queue"]
        assert "of 64 requests" in queue.text
        roomy = decide(make_cpu_machine(64 * GIB), EIGHT_B, work)
        assert "fit.queue" not in [reason.rule for reason in roomy.reasons] and roomy.max_concurrency >= 64


class TestRemedies:
    @settings(deadline=None)
    @given(boxes, gguf_models, workloads)
    def test_suggested_memory_is_enough(self, hardware: Hardware, model: Model, workload: Workload) -> None:
        decision = decide(hardware, model, workload, "llama.cpp")
        if decision.fits or not decision.refused[0].why.startswith("needs "):
            return
        assert decision.refused[0].kind == "impossible" and "weights" in decision.refused[0].why
        more = parse_memory(next(hint for hint in decision.hints if "more free memory" in hint))
        assert decide(make_cpu_machine(hardware.memory.available_bytes + more), model, workload, "llama.cpp").fits
        with pytest.raises(NotPossible) as caught:
            plan(decision, model, workload)
        assert caught.value.exit_code == 1 and "more free memory" in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("card", "count", "model", "wanted"),
        [
            ("RTX 3070", 1, "Qwen/Qwen3-32B", "exllamav3"),
            ("L4", 1, "meta-llama/Meta-Llama-3.1-70B", "vllm"),
            ("H100 SXM", 4, "deepseek-ai/DeepSeek-V3", "sglang"),
        ],
    )
    def test_suggested_gpu_memory_is_enough(self, card: str, count: int, model: str, wanted: str) -> None:
        hardware, work = make_machine(card, count), Workload(prompt_tokens=1000)
        decision = decide(hardware, find_model(model), work, wanted)
        assert decision.engine is None
        more = parse_memory(next(hint for hint in decision.hints if "more free memory on the GPUs" in hint))
        larger = tuple(
            replace_fields(one, free_bytes=(one.free_bytes or 0) + -(-more // count)) for one in hardware.accelerators
        )
        assert decide(replace_fields(hardware, accelerators=larger), find_model(model), work, wanted).fits

    @pytest.mark.parametrize(
        ("name", "card", "count", "wanted"),
        [
            ("meta-llama/Meta-Llama-3.1-70B", "L4", 1, "vllm"),
            ("meta-llama/Meta-Llama-3.1-70B", "RTX 4090", 1, "vllm"),
            ("deepseek-ai/DeepSeek-R1", "H200 SXM", 2, "vllm"),
            ("deepseek-ai/DeepSeek-R1", "A100 SXM 80GB", 6, "sglang"),
            ("Qwen/Qwen3-235B-A22B", "RTX 3090", 4, "vllm"),
            ("openai/gpt-oss-120b", "RTX 4090", 1, "vllm"),
        ],
    )
    def test_suggested_number_of_gpus_is_enough(self, name: str, card: str, count: int, wanted: str) -> None:
        work, model = Workload(prompt_tokens=1000), find_model(name)
        # Host memory for the conversion to four bits.
        decision = decide(make_machine(card, count, 1024), model, work, wanted)
        cards = int(re.findall(r"(\d+) GPUs of this model", " ".join(decision.hints))[0])
        assert cards > count
        assert decide(make_machine(card, cards, 1024), model, work, wanted).fits

    def test_smaller_quantization_is_suggested_first_if_sufficient(self) -> None:
        decision = decide(make_cpu_machine(4 * GIB), EIGHT_B, Workload())
        assert not decision.fits
        named = re.fullmatch(r"a quantization of at most (\S+) bits per weight \(this one has 4.9\)", decision.hints[0])
        assert named is not None
        smaller = replace_fields(EIGHT_B, weight_bytes=int(EIGHT_B.parameters * float(named[1]) / 8))
        assert decide(make_cpu_machine(4 * GIB), smaller, Workload()).fits
        why = next(refusal.why for refusal in decision.refused if refusal.engine == "llama.cpp")
        assert "weights 4.56 GiB" in why and "only 3.8 GiB is usable" in why

    def test_no_quantization_is_suggested_if_none_is_sufficient(self) -> None:
        assert len(decide(make_cpu_machine(GIB), EIGHT_B, Workload()).hints) == 1

    def test_more_gpus_are_not_suggested_for_a_mac(self) -> None:
        decision = decide(make_machine("Apple M2", 1, 8), find_model("meta-llama/Meta-Llama-3.1-70B"), Workload())
        assert decision.hints and not [hint for hint in decision.hints if "GPUs of this model" in hint]

    def test_more_ram_is_suggested_if_offload_would_use_it(self) -> None:
        """Nothing fits; the engine with offload needs the least memory."""
        hardware, model = make_machine("RTX 3070", 1, 16), find_model("meta-llama/Meta-Llama-3.1-405B")
        decision = decide(hardware, model, Workload())
        assert decision.engine is None
        more = parse_memory(next(hint for hint in decision.hints if hint.endswith("more free memory")))
        memory = replace_fields(hardware.memory, available_bytes=hardware.memory.available_bytes + more)
        assert decide(replace_fields(hardware, memory=memory), model, Workload()).engine == "llama.cpp"

    def test_requests_longer_than_the_context_are_refused(self) -> None:
        model = find_model("Qwen/Qwen3-8B")
        decision = decide(make_machine("H100 SXM"), model, Workload(prompt_tokens=100_000, output_tokens=1000))
        assert decision.engine is None and sorted(list_entries(decision)) == sorted(load_engines())
        assert {refusal.kind for refusal in decision.refused} == {"impossible"}
        assert "40,960" in decision.hints[0]
        assert decide(make_machine("H100 SXM"), model, Workload(prompt_tokens=40_000, output_tokens=960)).fits


def parse_memory(hint: str) -> int:
    figure, unit = re.findall(r"([\d.]+) ([KMGT]?i?B) more free memory", hint)[0]
    return round(float(figure) * UNITS[unit])


class TestArrivals:
    """Little's law: requests in flight depend on the time of a request, and the other way round."""

    def test_requests_in_flight_follow_littles_law(self) -> None:
        work = Workload(requests_per_s=4, prompt_tokens=1000, output_tokens=200)
        decision = decide(make_machine("H100 SXM"), find_model("Qwen/Qwen3-8B"), work)
        ttft, tpot = decision.estimate.ttft_ms, decision.estimate.tpot_ms
        assert ttft is not None and tpot is not None
        request_s = (ttft.value + tpot.value * 200) / 1000
        assert decision.in_flight == pytest.approx(4 * request_s, rel=0.3, abs=2)
        assert "Little's law" in decision.notes[0] and "4 requests/s" in decision.notes[0]

    def test_think_time_reduces_requests_in_flight(self) -> None:
        work = Workload(users=200, think_time_s=30, prompt_tokens=1000, output_tokens=200)
        decision = decide(make_machine("H100 SXM", 8), find_model("Qwen/Qwen3-8B"), work)
        assert 1 <= decision.in_flight < 200

    def test_request_rate_above_capacity_is_reported(self) -> None:
        work = Workload(requests_per_s=1000, prompt_tokens=1000, output_tokens=200)
        decision = decide(make_machine("L4"), find_model("Qwen/Qwen3-8B"), work)
        (queue,) = [text for text in decision.hints if "the queue keeps growing" in text]
        assert "machines of this kind would be enough" in queue
        # The figures are for running requests, because the queue grows without limit.
        assert decision.fits and decision.in_flight <= decision.max_concurrency
        first = decision.estimate.ttft_ms
        assert first is not None and first.value < 60_000
        slow = replace_fields(work, requests_per_s=0.05)
        quiet = decide(make_machine("L4"), find_model("Qwen/Qwen3-8B"), slow)
        assert "growing-queue" not in {hint.kind for hint in quiet.hint_details}


@pytest.mark.parametrize("most", [128, 256, 512, 8192])
def test_embedding_model_is_planned_for_its_context(most: int) -> None:
    """The default lengths exceed the context of small embedding models, so they are limited to it."""
    small = replace_fields(
        make_model_from_facts({"task": "embed", "params_b": 0.02, "format": "onnx"}), max_context=most
    )
    chosen = plan(decide(make_cpu_machine(), small, Workload(origin="default")), small, Workload(origin="default"))
    assert chosen.workload.task == "embed" and chosen.workload.request_tokens == min(512, most)
    asked = decide(make_cpu_machine(), small, Workload(prompt_tokens=most + 1))
    assert asked.engine is None and asked.hints, "what somebody asked for is not made shorter"


@pytest.mark.parametrize("engine_id", ["pytorch", "vllm", "mlx", "onnxruntime"])
def test_dequantized_folder_is_loaded_from_its_path(engine_id: str) -> None:
    facts = replace_fields(read_builtin_facts(), name="acme/My Model v1", files=("/models/My Model v1.gguf",))
    on = make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 64, "os": "linux"})
    decision = decide(on, facts, Workload(), engine_id)
    assert decision.launch is not None and decision.unpacks
    unpacks, *rest = [step for step in decision.launch.prepare if step.kind == "convert"]
    assert (unpacks.argv[1], unpacks.where) == ("/models/My Model v1.gguf", "My-Model-v1")
    reads = rest[0].argv if rest else decision.launch.argv
    assert "My-Model-v1" in reads and not {"My Model v1", "acme/My Model v1"} & set(reads)


@pytest.mark.parametrize(("stored", "made"), [("Q4_1", "INT8"), ("Q8_0", "INT4"), ("F16", "INT4")])
def test_weights_of_few_bits_are_not_quantized_again(stored: str, made: str) -> None:
    """If the speed cannot be predicted, the fewest bits that suffice are used."""
    on = make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 64, "os": "linux"})
    memory, cpu = replace_fields(on.memory, bandwidth_bytes_s=None), replace_fields(on.cpu, name="nobody knows it")
    unknown = replace_fields(on, memory=memory, cpu=cpu)
    facts = replace_fields(read_builtin_facts(), quantization=stored, files=("/models/a.gguf",))
    decision = decide(unknown, facts, Workload(), "onnxruntime")
    assert decision.weights is not None and decision.weights.label == made
