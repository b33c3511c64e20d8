"""LoRA adapters: their size from the widths of a model, what each engine is told, and which engines refuse them."""

from __future__ import annotations

import pytest
from tests.decide.plan_cases import generate_cases, make_machine
from tests.engines.argv import read_options
from tests.engines.plans import machine, model, plan

from bedplate.decide.candidates import EngineCandidate, verify_candidate
from bedplate.decide.case import DecisionCase, with_model_task
from bedplate.decide.choose import EngineSearch
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.memory import fit
from bedplate.engines import get_engine, load_engines
from bedplate.facts.adapters import compute_adapter_bytes
from bedplate.facts.known_models import find_model
from bedplate.values import Launch, Parallelism, Refusal, Workload, replace_fields
from bedplate.values.intent import Operations
from bedplate.values.workload import LoraAdapter

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TWO = (LoraAdapter(path="/adapters/sql", rank=64), "acme/support")
SERVING = ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "tgi", "lmdeploy", "mlx", "ollama", "pytorch")
WITHOUT = ("mistral.rs", "exllamav2", "exllamav3", "onnxruntime")
QUICK = 150


def launch(engine: str, adapters: int | tuple[str | LoraAdapter, ...], on: str = "H100 SXM") -> Launch:
    found = get_engine(engine)
    work = Workload(concurrency=16, context_tokens=8192, lora_adapters=adapters)
    return found.launch(plan(found, machine(on, 1), model(LLAMA), workload=work), 8000)


def get_words(found: Launch, option: str) -> list[str]:
    """The words after an option, up to the next one."""
    after = found.argv[found.argv.index(option) + 1 :]
    end = next((number for number, word in enumerate(after) if word.startswith("--")), len(after))
    return list(after[:end])


class TestSize:
    def test_an_adapter_of_llama_8b_has_the_parameters_that_peft_counts(self) -> None:
        # PEFT's print_trainable_parameters() for rank 16 and all linear layers of Llama 3.1 8B: 41,943,040.
        assert compute_adapter_bytes(find_model(LLAMA), 16) == 2 * 41_943_040

    def test_tensor_ranks_divide_one_of_the_two_matrices(self) -> None:
        # By hand, for 2 ranks: q 4096 + 2048, k and v 4096 + 512, o 2048 + 4096, gate and up 4096 + 7168, down 7168 +
        # 4096; 32 layers.
        widths = 6144 + 2 * 4608 + 6144 + 3 * 11264
        assert compute_adapter_bytes(find_model(LLAMA), 16, tensor=2) == 2 * 16 * 32 * widths

    def test_experts_have_an_adapter_each_and_expert_ranks_divide_them(self) -> None:
        mixture = find_model("Qwen/Qwen3-30B-A3B")
        experts = 2 * 16 * 128 * 48 * 3 * (2048 + 768)
        whole, part = (compute_adapter_bytes(mixture, 16, expert=ranks) for ranks in (1, 8))
        assert whole - part == pytest.approx(experts * 7 / 8)

    def test_a_model_of_unknown_widths_has_an_estimate(self) -> None:
        facts = replace_fields(find_model(LLAMA), hidden_size=None)
        assert compute_adapter_bytes(facts, 16) == pytest.approx(2 * 41_943_040, rel=0.1)

    def test_the_fit_contains_the_resident_adapters(self) -> None:
        work = Workload(concurrency=32)
        plain, adapted = (
            fit(machine("H100 SXM", 1), find_model(LLAMA), one, "vllm")
            for one in (work, replace_fields(work, lora_adapters=20))
        )
        size = 20 * 2 * 41_943_040
        assert adapted.devices[0].adapter_bytes == size and plain.devices[0].adapter_bytes == 0
        assert adapted.devices[0].total_bytes - plain.devices[0].total_bytes == size
        assert adapted.max_concurrency < plain.max_concurrency

    def test_adapters_of_all_concurrent_requests_are_resident_up_to_a_limit(self) -> None:
        vllm, sglang = get_engine("vllm"), get_engine("sglang")
        few, many = Workload(concurrency=2, lora_adapters=100), Workload(concurrency=500, lora_adapters=100)
        assert [vllm.count_resident_adapters(one) for one in (few, many)] == [8, 64]
        # SGLang counts requests without an adapter as one more.
        assert [sglang.count_resident_adapters(one) for one in (few, many)] == [9, 33]

    def test_ranks_are_rounded_up_to_those_of_the_engine(self) -> None:
        work = Workload(lora_adapters=(LoraAdapter(path="a", rank=24),))
        assert get_engine("vllm").choose_adapter_rank(work) == 32
        assert get_engine("sglang").choose_adapter_rank(work) == 24


class TestLaunch:
    def test_vllm(self) -> None:
        found = launch("vllm", TWO)
        assert get_words(found, "--lora-modules") == ["sql=/adapters/sql", "support=acme/support"]
        assert get_words(found, "--max-loras") == ["2"] and get_words(found, "--max-lora-rank") == ["64"]
        assert "--enable-lora" in found.argv and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in found.env

    def test_vllm_loads_adapters_without_names_at_run_time(self) -> None:
        found = launch("vllm", 200)
        assert "--lora-modules" not in found.argv and found.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
        assert get_words(found, "--max-loras") == ["16"] and get_words(found, "--max-cpu-loras") == ["200"]

    def test_a_path_with_a_comma_is_json_for_vllm(self) -> None:
        (word,) = get_words(launch("vllm", ("/a,b/c",)), "--lora-modules")
        assert word == '{"name": "c", "path": "/a,b/c"}'

    def test_sglang(self) -> None:
        found = launch("sglang", TWO)
        assert get_words(found, "--lora-paths") == ["sql=/adapters/sql", "support=acme/support"]
        assert get_words(found, "--max-loras-per-batch") == ["3"] and get_words(found, "--max-lora-rank") == ["64"]
        assert get_words(launch("sglang", 4), "--lora-target-modules") == ["all"]

    def test_llama_cpp_converts_them_and_lets_requests_choose(self) -> None:
        found = launch("llama.cpp", (*TWO, "/adapters/x.gguf"))
        assert get_words(found, "--lora-scaled") == ["sql.gguf:0,support.gguf:0,/adapters/x.gguf:0"]
        made = [step for step in found.prepare if "convert_lora_to_gguf.py" in " ".join(step.argv)]
        assert [step.where for step in made] == ["sql.gguf", "support.gguf"]
        assert "hf download acme/support" in made[1].argv[-1]
        assert get_words(launch("llama.cpp", TWO[:1]), "--lora-scaled") == ["sql.gguf:1"]

    def test_tensorrt_llm_has_them_in_its_options_file(self) -> None:
        engine = get_engine("tensorrt-llm")
        work = Workload(concurrency=4, lora_adapters=TWO)
        chosen = plan(engine, machine("H100 SXM", 1), model(LLAMA), workload=work)
        (text,) = engine.list_container_files(chosen).values()
        assert "lora_config:\n  lora_target_modules: [attn_q" in text and "mlp_4h_to_h" in text
        assert "  max_lora_rank: 64\n  max_loras: 2\n  max_cpu_loras: 2\n" in text

    def test_tgi_mounts_folders(self) -> None:
        found = launch("tgi", TWO)
        assert get_words(found, "--lora-adapters") == ["sql=/models/sql,acme/support"]
        assert "/adapters/sql:/models/sql:ro" in found.argv

    def test_lmdeploy_uses_its_pytorch_engine(self) -> None:
        found = launch("lmdeploy", TWO)
        assert get_words(found, "--adapters") == ["sql=/adapters/sql", "support=acme/support"]
        assert get_words(found, "--backend") == ["pytorch"]

    def test_pytorch_computes_requests_one_after_the_other(self) -> None:
        found = launch("pytorch", TWO)
        assert get_words(found, "--lora-modules") == ["sql=/adapters/sql", "support=support"]
        assert get_words(found, "--max-loras") == ["2"] and get_words(found, "--max-lora-rank") == ["64"]
        assert ("hf", "download", "acme/support", "--local-dir", "support") in [step.argv for step in found.prepare]
        assert "--continuous-batching" not in found.argv and "--continuous-batching" in launch("pytorch", ()).argv
        later = launch("pytorch", 4)
        assert get_words(later, "--max-loras") == ["4"] and "--lora-modules" not in later.argv

    def test_pytorch_offers_no_setting_that_ignores_adapters(self) -> None:
        engine, on = get_engine("pytorch"), machine("H100 SXM", 1)
        for adapters, offered in ((None, ["--compile"]), (TWO, [])):
            work = Workload(concurrency=1, lora_adapters=adapters)
            knobs = engine.list_settings(on, plan(engine, on, model(LLAMA), workload=work))
            words = [word for knob in knobs for choice in knob.choices for word in choice.options]
            assert [word for word in words if word == "--compile"] == offered
            assert adapters is None or "slots" not in {knob.name for knob in knobs}, "there is nothing to choose"

    def test_mlx_and_ollama_have_one(self) -> None:
        engine = get_engine("mlx")
        work = Workload(lora_adapters=("acme/support",))
        chosen = plan(engine, machine("cpu"), model(LLAMA), workload=work)
        found = engine.launch(chosen, 8000)
        assert get_words(found, "--adapter-path") == ["support"]
        assert ("hf", "download", "acme/support", "--local-dir", "support") in [step.argv for step in found.prepare]
        assert "ADAPTER ./support" in launch("ollama", ("acme/support",)).prepare[-1].argv[-1]

    @pytest.mark.parametrize("name", ["vllm", "sglang", "tgi", "lmdeploy", "llama_cpp", "mlx", "pytorch"])
    def test_the_options_are_in_the_captured_parser(self, name: str) -> None:
        engine = get_engine(name.replace("_", "."))
        known = {one for option in read_options(name)["options"] for one in option["names"]}
        assert engine.adapters is not None
        used = {engine.adapters.slots, engine.adapters.rank, engine.adapters.names} - {None}
        assert used and used <= known


class TestRefusals:
    def test_every_engine_is_one_of_the_two_kinds(self) -> None:
        known = load_engines()
        assert {name for name, one in known.items() if one.adapters is not None} & {*SERVING, *WITHOUT} == set(SERVING)
        assert {*SERVING, *WITHOUT} <= set(known)

    @pytest.mark.parametrize("name", WITHOUT)
    def test_an_engine_without_adapters_refuses_and_says_what_would_do(self, name: str) -> None:
        refused = refuse(name, "RTX 4090", LLAMA, 1)
        assert refused is not None and refused.kind == "impossible"
        assert "LoRA" in refused.why and "merged" in (refused.hint or "")

    @pytest.mark.parametrize("name", ["mlx", "ollama"])
    def test_a_server_with_one_adapter_refuses_two(self, name: str) -> None:
        assert refuse(name, "cpu", "google/gemma-2-9b-it", 1) is None
        refused = refuse(name, "cpu", "google/gemma-2-9b-it", 2)
        assert refused is not None and "at most one LoRA adapter" in refused.why

    def test_a_rank_above_the_highest(self) -> None:
        refused = refuse("vllm", "H100 SXM", LLAMA, (LoraAdapter(path="a", rank=600),))
        assert refused is not None and "at most 512, not 600" in refused.why

    def test_models_without_adapters(self) -> None:
        refused = refuse("vllm", "H100 SXM", "tiiuae/falcon-7b", 1)
        assert refused is not None and "falcon" in refused.why
        mixture = refuse("vllm", "cpu", "Qwen/Qwen3-30B-A3B", 1)
        assert mixture is not None and "experts on a CPU" in mixture.why

    def test_quantized_experts_in_sglang(self) -> None:
        refused = refuse("sglang", "H100 SXM", "Qwen/Qwen3-30B-A3B-FP8", 1)
        assert refused is not None and "experts in FP8" in refused.why
        assert refuse("sglang", "H100 SXM", "Qwen/Qwen3-30B-A3B", 1) is None

    def test_a_path_that_llama_cpp_would_split(self) -> None:
        refused = refuse("llama.cpp", "cpu", LLAMA, ("/a,b.gguf",))
        assert refused is not None and "comma" in refused.why


def refuse(name: str, on: str, which: str, adapters: int | tuple[str | LoraAdapter, ...]) -> Refusal | None:
    return get_engine(name).refuse(machine(on, 1), find_model(which), Workload(lora_adapters=adapters))


def test_generated_plans_with_adapters_have_no_fault() -> None:
    planned = 0
    for number, case in enumerate(generate_cases(QUICK)):
        engine = get_engine(SERVING[number % len(SERVING)])
        on, which = make_machine(case.chip, case.count), find_model(case.model)
        adapters: int | tuple[str | LoraAdapter, ...] = TWO if number % 2 else 1 + number % 30
        if engine.adapters is not None and engine.adapters.most == 1:
            adapters = 1
        work = with_model_task(which, replace_fields(case.workload, lora_adapters=adapters))
        if on is None or (which.max_context is not None and work.request_tokens > which.max_context):
            continue
        asked = DecisionCase(on, which, work, Operations())
        found = EngineSearch(asked, MachineEvidence(), installable=False).get_candidate(engine)
        if isinstance(found, EngineCandidate):
            planned += 1
            assert any(need.adapter_bytes for need in found.fit.devices), case.label
            assert verify_candidate(found, asked) is None, case.label
    assert planned >= QUICK / 8


def test_pipeline_stages_hold_the_adapters_of_their_layers() -> None:
    hardware, work = machine("H100 SXM", 2), Workload(concurrency=8, lora_adapters=8)
    one, two = (
        fit(hardware, find_model(LLAMA), work, "vllm", parallelism=Parallelism(pipeline=stages)) for stages in (1, 2)
    )
    assert two.devices[0].adapter_bytes * 2 == one.devices[0].adapter_bytes
