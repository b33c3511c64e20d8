"""Decisions that need a good justification: targets, contexts, shared prefixes, offload, racks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from bedplate.decide import decide
from bedplate.decide.memory import fit
from bedplate.decide.planning import plan
from bedplate.decide.verify import list_faults
from bedplate.engines import get_engine
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.run.models import find_known_model
from bedplate.values import Decision, LatencyTarget, Parallelism, Workload, replace_fields
from bedplate.values.intent import Operations

SEVENTY = "meta-llama/Llama-3.3-70B-Instruct"
GIB = 1 << 30


def decide_for(
    model: str,
    card: str,
    count: int = 1,
    wanted: str | None = None,
    ram_gb: float | None = None,
    *,
    with_alternatives: bool = False,
    **work: Any,
) -> Decision:
    hardware = make_simulated_hardware({"accelerator": card, "count": count, "ram_gb": ram_gb})
    return decide(hardware, find_model(model), Workload(**work), wanted, with_alternatives=with_alternatives)


def get_reason(decision: Decision, rule: str) -> str:
    return next((reason.text for reason in decision.reasons if reason.rule == rule), "")


class TestLatencyTargets:
    def test_idle_gpus_are_used_to_meet_latency_targets(self) -> None:
        plain = decide_for(SEVENTY, "H100 SXM", 8, users=4)
        pressed = decide_for(SEVENTY, "H100 SXM", 8, users=4, latency=LatencyTarget(tpot_ms=12))
        assert plain.estimate.tpot_ms is not None and pressed.estimate.tpot_ms is not None
        assert plain.estimate.tpot_ms.value > 12 >= pressed.estimate.tpot_ms.value
        assert pressed.parallelism.tensor > plain.parallelism.tensor
        assert get_reason(pressed, "latency.target").startswith("within the latency targets: TPOT ")
        assert not get_reason(plain, "latency.target")

    def test_fewer_bits_meet_latency_targets_on_one_gpu(self) -> None:
        plain = decide_for("Qwen/Qwen2.5-7B", "RTX 4090")
        pressed = decide_for("Qwen/Qwen2.5-7B", "RTX 4090", latency=LatencyTarget(tpot_ms=7))
        assert plain.engine == pressed.engine == "exllamav3"
        assert pressed.estimate.tpot_ms is not None and pressed.estimate.tpot_ms.value <= 7
        assert plain.quantization == "8.0 bpw" and pressed.quantization != "8.0 bpw"

    def test_missed_latency_targets_are_reported_with_both_figures(self) -> None:
        found = decide_for(SEVENTY, "H100 SXM", 8, users=200, latency=LatencyTarget(ttft_ms=50, tpot_ms=5))
        said = get_reason(found, "latency.target")
        assert found.fits and said.startswith("MISSES the latency targets: TTFT ") and "TPOT" in said

    def test_latency_targets_are_unknown_without_a_prediction(self) -> None:
        unnamed = make_simulated_hardware({"cpu": "an unknown CPU", "cores": 16, "ram_gb": 64})
        work = Workload(latency=LatencyTarget(ttft_ms=500))
        found = decide(unnamed, find_model("Qwen/Qwen3-8B"), work)
        assert found.estimate.ttft_ms is None and "unknown whether" in get_reason(found, "latency.target")
        (hint,) = [one for one in found.hint_details if one.kind == "unknown-target"]
        assert (hint.metric, hint.target_ms) == ("ttft_ms", 500)


class TestWeightsThatNearlyFillTheCards:
    @pytest.mark.parametrize("card", ["RTX 4090", "RTX 3090"])
    @pytest.mark.parametrize("users", [1, 4, 50])
    def test_seventy_billion_weights_in_four_bits_on_two_cards_of_24_gb(self, card: str, users: int) -> None:
        """39.8 GB of AWQ weights: few CUDA graphs and a short context instead of a refusal."""
        hardware = make_simulated_hardware({"accelerator": card, "count": 2, "ram_gb": 64})
        model = find_model("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4")
        work = Workload(users=users, concurrency=users)
        found = decide(hardware, model, work)
        assert found.engine == "vllm" and found.fits and found.parallelism.tensor == 2
        assert found.settings is not None and found.launch is not None and found.memory is not None
        assert found.settings.slots <= 8 and 768 <= found.settings.context_tokens <= 8192
        words = found.launch.argv
        assert words[words.index("--max-cudagraph-capture-size") + 1] == "16"
        assert "fit.graphs" in [reason.rule for reason in found.reasons]
        assert list_faults(plan(found, model, work), found.launch, hardware) == ()
        assert all(need.high_bytes <= (need.usable_bytes or 0) for need in found.memory.devices)

    def test_with_more_memory_the_graphs_are_the_usual_ones(self) -> None:
        found = decide_for("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "RTX 5090", 2, concurrency=8)
        assert found.engine == "vllm" and found.settings is not None and found.settings.graph_tokens is None

    def test_what_does_not_fit_without_graphs_either_is_refused(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 64})
        found = decide(hardware, find_model("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"), Workload(), "vllm")
        assert found.engine is None


class TestContext:
    def test_long_context_does_not_make_usual_requests_wait(self) -> None:
        usual = decide_for(SEVENTY, "H100 SXM", 4, concurrency=50)
        long = decide_for(SEVENTY, "H100 SXM", 4, concurrency=50, context_tokens=131072)
        assert usual.settings is not None and long.settings is not None
        assert long.settings.slots * long.parallelism.data == 50 and long.settings.context_tokens == 131072
        assert long.max_concurrency < 50
        assert f"{long.max_concurrency} at 131,072 tokens" in get_reason(long, "fit.queue")
        assert long.estimate.ttft_ms is not None and long.estimate.ttft_ms.value < 1000

    @pytest.mark.parametrize("wanted", ["vllm", "sglang"])
    def test_context_of_a_server_is_limited_to_its_cache(self, wanted: str) -> None:
        """vLLM does not start if its cache is smaller than one request of the maximum length."""
        model, tight = (
            find_model("meta-llama/Llama-3.1-8B-Instruct"),
            make_simulated_hardware({"accelerator": "RTX 4090"}),
        )
        work, told = Workload(), []
        for free in range(17 * GIB, 24 * GIB, GIB // 4):
            (card,) = tight.accelerators
            hardware = replace_fields(tight, accelerators=(replace_fields(card, free_bytes=free),))
            decision = decide(hardware, model, replace_fields(work, precision_sensitive=True), wanted)
            if decision.settings is None:
                continue
            context = decision.settings.context_tokens
            told.append(context)
            alone = replace_fields(work, context_tokens=context, concurrency=1)
            assert fit(hardware, model, alone, wanted, decision.quantization, Parallelism()).fits
        assert min(told) < max(told) == 8192

    def test_mac_reserves_context_for_a_conversation(self) -> None:
        small = decide(
            make_simulated_hardware({"accelerator": "Apple M1", "ram_gb": 8}),
            find_model("meta-llama/Llama-3.1-8B-Instruct"),
            Workload(),
        )
        assert small.engine == "mlx" and small.settings is not None and small.memory is not None
        assert small.settings.context_tokens > 1000 and small.settings.slots == 1
        assert small.memory.devices[0].kv_bytes >= find_model("meta-llama/Llama-3.1-8B-Instruct").compute_kv_bytes(
            small.settings.context_tokens
        )


class TestChatTargets:
    """Targets that nobody asked for cost no fidelity if they are missed by a few milliseconds."""

    def test_a_default_target_is_met_within_ten_percent_and_a_requested_one_exactly(self) -> None:
        unasked = decide_for("Qwen/Qwen3-14B", "Tesla P40")
        ttft = unasked.estimate.ttft_ms
        assert unasked.quantization == "Q8_0" and ttft is not None and 2000 < ttft.value < 2200
        assert "meet the latency targets" in get_reason(unasked, "quant.fit") and unasked.hint_details == ()
        target = LatencyTarget(ttft_ms=ttft.value - 1, tpot_ms=100)
        asked = decide_for("Qwen/Qwen3-14B", "Tesla P40", latency=target)
        assert asked.quantization in ("Q6_K", "Q4_K_M") and asked.estimate.ttft_ms is not None
        assert asked.estimate.ttft_ms.value <= ttft.value - 1

    def test_an_engine_that_would_run_on_the_cpu_is_not_said_to_lack_weights(self) -> None:
        """vLLM has no kernels for these cards: its published weights are not why it was not chosen."""
        found = decide_for("meta-llama/Llama-3.3-70B-Instruct", "Tesla P40", 4)
        assert (found.engine, found.reasons[0].text) == ("llama.cpp", "one request at a time on GPUs")

    def test_a_server_does_not_convert_for_half_an_hour_for_one_user(self) -> None:
        """Nobody publishes quantized weights of it: llama.cpp makes 8 bits sooner than llm-compressor makes 4."""
        found = decide_for("tiiuae/falcon-7b", "T4", ram_gb=64)
        assert (found.engine, found.quantization) == ("llama.cpp", "Q8_0")
        assert "vLLM would first convert the weights for about" in found.reasons[0].text
        many = decide_for("tiiuae/falcon-7b", "T4", ram_gb=64, concurrency=16)
        assert many.engine == "vllm"


class TestNamedRepositories:
    @pytest.mark.parametrize(
        ("text", "engine", "path"),
        [
            ("unsloth/Qwen3-32B-GGUF", "llama.cpp", "Qwen3-32B-GGUF/Qwen3-32B-Q4_K_M.gguf"),
            ("bartowski/Qwen2.5-7B-Instruct-GGUF:Q5_K_M", "llama.cpp",
             "Qwen2.5-7B-Instruct-GGUF/Qwen2.5-7B-Instruct-Q5_K_M.gguf"),
            ("turboderp/Qwen3-32B-exl3", "exllamav3", "Qwen3-32B-exl3-4.0bpw"),
        ],
    )  # fmt: skip
    def test_the_named_weights_are_fetched_and_served(self, text: str, engine: str, path: str) -> None:
        hardware = make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 64})
        found = decide(hardware, find_known_model(text), Workload())
        assert found.engine == engine and found.launch is not None
        assert found.launch.argv[found.launch.argv.index("--model") + 1] == path
        (fetched,) = [step for step in found.launch.prepare if step.argv[:2] == ("hf", "download")]
        assert fetched.argv[2] == text.partition(":")[0] and path.startswith(fetched.where)

    def test_an_engine_for_other_formats_gets_the_fetched_file(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "RTX 4090", "count": 4, "ram_gb": 256})
        found = decide(hardware, find_known_model("unsloth/Qwen3-32B-GGUF:Q8_0"), Workload(), "vllm")
        assert found.unpacks and found.launch is not None
        steps = [step.argv for step in found.launch.prepare if step.argv[:1] in (("hf",), ("gguf-to-folder",))]
        assert steps[0][2:4] == ("unsloth/Qwen3-32B-GGUF", "Qwen3-32B-Q8_0.gguf")
        assert steps[1][1] == "Qwen3-32B-GGUF/Qwen3-32B-Q8_0.gguf"


class TestSharedPrefix:
    WORK: ClassVar[dict[str, Any]] = {"users": 200, "prompt_tokens": 4000}

    def test_paged_cache_stores_the_prefix_once(self) -> None:
        model, card = "meta-llama/Llama-3.1-8B-Instruct", "A100 SXM 80GB"
        apart = decide_for(model, card, wanted="sglang", with_alternatives=True, **self.WORK)
        shared = decide_for(model, card, wanted="sglang", shared_prefix_tokens=3000, **self.WORK)
        assert apart.max_concurrency < 200 <= shared.max_concurrency
        # The cache that is saved leaves memory for more bits, so the same weights are compared.
        same = [one for one in apart.alternatives if (one.engine, one.quantization) == ("sglang", shared.quantization)]
        waiting = same[0].estimate if same else apart.estimate
        assert waiting.ttft_ms is not None and shared.estimate.ttft_ms is not None
        assert shared.estimate.ttft_ms.value < waiting.ttft_ms.value / 5

    def test_engine_with_slots_stores_the_prefix_in_each_slot(self) -> None:
        model = find_model("meta-llama/Llama-3.1-8B-Instruct")
        machine = make_simulated_hardware({"accelerator": "A100 SXM 80GB"})
        apart, shared = (
            fit(machine, model, Workload(shared_prefix_tokens=tokens, **self.WORK), "llama.cpp") for tokens in (0, 3000)
        )
        assert apart.max_concurrency == shared.max_concurrency > 0

    def test_attention_windows_are_not_shared(self) -> None:
        """Only the cache that grows with every token can be shared."""
        model, hardware = find_model("openai/gpt-oss-20b"), make_simulated_hardware({"accelerator": "RTX 4090"})
        work = Workload(users=8, prompt_tokens=4000, shared_prefix_tokens=4000)
        with_all = fit(hardware, model, work, "vllm").devices[0].kv_bytes
        assert with_all >= 8 * (model.compute_kv_bytes(4256) - model.kv_bytes_per_token * 4000)


class TestOffload:
    def test_extra_slots_do_not_offload_layers(self) -> None:
        found = decide_for("Qwen/Qwen3-32B", "RTX 4070", ram_gb=64, context_tokens=16384)
        assert found.engine == "llama.cpp" and found.settings is not None and found.settings.slots == 1
        model = find_model("Qwen/Qwen3-32B")
        assert found.memory is not None
        cached = sum(need.kv_bytes * need.count for need in found.memory.devices)
        assert cached == pytest.approx(model.compute_kv_bytes(16384), rel=0.01)

    def test_unknown_host_memory_gets_a_default_bandwidth(self) -> None:
        """Two channels of memory and vector instructions: similar to a current desktop CPU."""
        hardware = {"accelerator": "RTX 5090", "ram_gb": 128}
        model = find_model("openai/gpt-oss-120b")
        unsaid = decide(make_simulated_hardware(hardware), model, Workload()).estimate.output_tok_s
        said = decide(
            make_simulated_hardware(hardware | {"cpu": "AMD Ryzen 9 9950X", "cores": 16}), model, Workload()
        ).estimate.output_tok_s
        assert unsaid is not None and said is not None and said.value / 1.5 < unsaid.value <= said.value
        assert "two channels of DDR5-4800 are assumed" in (unsaid.source or "")
        assert "assumed" not in (said.source or "")

    def test_dense_layers_are_not_counted_as_expert_layers(self) -> None:
        """DeepSeek's first three layers have no experts: 58 of 61 do."""
        found = decide_for("deepseek-ai/DeepSeek-R1-0528", "RTX 4090", ram_gb=768)
        assert found.memory is not None and (split := found.memory.offload) is not None
        assert split.kind == "experts" and split.device_layers + split.host_layers == 58
        assert found.launch is not None
        argv = list(found.launch.argv)
        assert argv[argv.index("--n-cpu-moe") + 1] == str(split.host_layers + 3)

    def test_many_requests_wait_for_the_gpu_instead_of_offloading(self) -> None:
        found = decide_for("Qwen/Qwen3-32B", "RTX 4090", users=50)
        assert found.memory is not None and found.memory.offload is None


class TestReasons:
    def test_missing_fp8_units_are_not_given_as_a_reason(self) -> None:
        assert (
            get_reason(decide_for("Qwen/Qwen3-32B", "A100 SXM 80GB", concurrency=50), "quant.fp8")
            == "FP8 weights: half the bytes to read"
        )
        assert "FP8 units" in get_reason(decide_for("Qwen/Qwen3-32B", "H100 SXM", concurrency=50), "quant.fp8")

    def test_two_tokens_per_second_are_not_called_reading_speed(self) -> None:
        slow = decide_for(SEVENTY, "RTX 4090", ram_gb=64)
        assert slow.estimate.tpot_ms is not None and slow.estimate.tpot_ms.value > 200
        assert get_reason(slow, "quant.fit").endswith("none meet the latency targets, and these come closest")

    def test_fastest_weights_agree_with_the_estimate(self) -> None:
        """For an engine that multiplies 16-bit weights faster than it dequantizes smaller ones."""
        quick = decide_for("Qwen/Qwen3-32B", "H100 SXM", wanted="llama.cpp", concurrency=50)
        forms = [
            decide(
                make_simulated_hardware({"accelerator": "H100 SXM"}),
                find_model(f"Qwen/Qwen3-32B {label}"),
                Workload(concurrency=50),
                "llama.cpp",
            )
            for label in ("Q4_K_M", "Q8_0")
        ]
        times = [one.estimate.tpot_ms.value for one in (quick, *forms) if one.estimate.tpot_ms is not None]
        assert len(times) == 3 and times[0] == min(times)

    def test_pipeline_stages_on_fast_links_are_explained_by_the_engine(self) -> None:
        found = decide_for(SEVENTY, "V100 SXM 32GB", 4, "llama.cpp", users=20)
        assert found.parallelism.pipeline > 1 and "llama.cpp divide" in get_reason(found, "layout.pipeline")

    def test_engine_without_kernels_for_the_gpu_does_not_suggest_ram(self) -> None:
        found = decide_for(SEVENTY, "V100 SXM 32GB", 4, users=20)
        (refusal,) = [one for one in found.refused if one.engine == "vllm"]
        assert refusal.kind == "unsuitable" and "leave the accelerators idle" in refusal.why
        # llama.cpp misses the targets here; where it meets them, LMDeploy is a challenger.
        assert found.engine == "lmdeploy" and found.reasons[0].rule == "latency.engine"
        small = decide_for("Qwen/Qwen3-8B", "V100 SXM 32GB", 4, concurrency=12)
        assert small.engine == "llama.cpp" and "lmdeploy" in {one.engine for one in small.challengers}

    @pytest.mark.parametrize(("batch", "concurrency"), [(False, 256), (True, 64)])
    def test_simplest_engine_is_not_chosen_if_another_is_several_times_as_fast(
        self, batch: bool, concurrency: int
    ) -> None:
        """Neither meets the targets of a chat with 256 requests; for a batch there are none."""
        asked: dict[str, Any] = {
            "batch": batch,
            "concurrency": concurrency,
            "prompt_tokens": 2000,
            "output_tokens": 500,
        }
        found = decide_for("Qwen/Qwen3-30B-A3B", "V100 SXM 32GB", 8, **asked)
        simplest = decide_for("Qwen/Qwen3-30B-A3B", "V100 SXM 32GB", 8, "llama.cpp", **asked)
        assert found.engine == "lmdeploy" and "is expected to be faster" in found.reasons[0].text
        rates = [one.estimate.output_tok_s for one in (found, simplest)]
        assert rates[0] is not None and rates[1] is not None and rates[0].value > 2 * rates[1].value

    def test_four_bit_version_is_suggested_if_servers_need_it(self) -> None:
        found = decide_for("deepseek-ai/DeepSeek-V3.1-Terminus", "H100 SXM", 8, users=50)
        assert found.engine == "llama.cpp"
        (note,) = [one for one in found.notes if "AWQ-INT4" in one]
        assert "vllm would serve it" in note
        assert not [one for one in decide_for(SEVENTY, "H100 SXM", 8, users=50).notes if "AWQ" in one]

    def test_published_four_bit_version_is_fetched_if_servers_need_it(self) -> None:
        found = decide_for("deepseek-ai/DeepSeek-R1", "H100 SXM", 8, users=50)
        assert found.engine == "vllm" and found.weights is not None and found.weights.published is not None
        assert found.weights.published.repository == "cognitivecomputations/DeepSeek-R1-AWQ"


class TestIncumbentEngine:
    def in_service(self, name: str, model_name: str = "Qwen/Qwen3-8B", **work: Any) -> Decision:
        hardware, model = make_simulated_hardware({"accelerator": "RTX 4090"}), find_model(model_name)
        return decide(hardware, model, Workload(**work), operations=Operations(incumbent=name))

    @pytest.mark.parametrize("users", [1, 30])
    def test_ollama_as_incumbent_falls_back_to_llama_cpp(self, users: int) -> None:
        found = self.in_service("ollama", "Qwen/Qwen3-8B-Base", users=users)
        assert found.engine == "llama.cpp" and found.reasons[0].rule == "operations.incumbent"

    def test_ollama_stays_if_a_gguf_file_is_published(self) -> None:
        found = self.in_service("ollama", users=1)
        assert found.engine == "ollama" and found.weights is not None and found.weights.published is not None

    def test_replaced_incumbent_has_a_reason(self) -> None:
        found = self.in_service("mlx")
        assert found.engine == "exllamav3"
        assert get_reason(found, "operations.incumbent").startswith("MLX is in service, but: ")


class TestMachines:
    def test_usable_memory_is_that_of_the_driver(self) -> None:
        spark = make_simulated_hardware({"accelerator": "DGX Spark"})
        assert spark.memory.total_bytes == 122572 << 20
        assert (spark.accelerators[0].memory_bytes or 0) <= spark.memory.total_bytes
        assert make_simulated_hardware({"accelerator": "Jetson Orin Nano 8GB"}).memory.total_bytes == 7620 << 20

    def test_sixteen_gpus_of_a_rack_are_four_hosts(self) -> None:
        assert decide_for("deepseek-ai/DeepSeek-R1", "GB200", 16, users=200).orchestrator == "ray"
        assert decide_for("deepseek-ai/DeepSeek-R1", "GB200", 4, users=20).orchestrator is None
        assert decide_for("deepseek-ai/DeepSeek-R1", "B200", 8, users=200).orchestrator is None

    def test_single_request_that_vllm_cannot_hold_goes_to_the_fastest_engine(self) -> None:
        found = decide_for("deepseek-ai/DeepSeek-V3.1-Terminus", "H200 SXM", 6)
        assert found.engine == "llama.cpp" and "vLLM" not in found.reasons[0].text


def test_slots_with_reserved_memory_are_counted_completely() -> None:
    """MLX has a separate cache for each request."""
    assert not get_engine("mlx").paged


def test_embeddings_on_many_cards_have_replicas() -> None:
    """Without an estimate, tensor and pipeline parallelism over eight L4 held the most requests and were chosen."""
    found = decide_for("Qwen/Qwen3-Embedding-8B", "L4", 8, requests_per_s=100.0, prompt_tokens=512)
    assert (found.parallelism.data, found.parallelism.tensor, found.parallelism.pipeline) == (8, 1, 1)


def test_published_weights_partly_in_ram_are_fetched_instead_of_a_long_conversion() -> None:
    found = decide_for("Qwen/Qwen3-14B", "RTX 3080 10GB", 1)
    assert found.engine == "llama.cpp" and found.weights is not None and found.weights.published is not None
    assert "ExLlamaV3 would first convert" in found.reasons[0].text


def test_server_for_old_cards_is_chosen_if_the_simplest_engine_misses_the_targets() -> None:
    found = decide_for("Qwen/Qwen3-32B", "V100 SXM2 32GB", 4, concurrency=16)
    assert (found.engine, found.parallelism.tensor) == ("lmdeploy", 4)
    assert found.reasons[0].rule == "latency.engine"


class TestAdaptersOfExperts:
    """vLLM has no LoRA of experts for tensor and data parallel attention at once, SGLang none for the latter."""

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize("model", ["openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B"])
    def test_attention_replicas_are_whole_cards_or_none(self, engine: str, model: str) -> None:
        work: dict[str, Any] = {"concurrency": 64, "lora_adapters": 4}
        found = decide_for(model, "H200 SXM", 8, engine, with_alternatives=True, **work)
        if found.engine is None:
            assert engine == "sglang" and model.startswith("openai")  # no LoRA adapters of experts in MXFP4
            return
        layouts = [found.parallelism, *(one.parallelism for one in found.alternatives if one.engine == engine)]
        assert len(layouts) > 3 and not any("was not planned" in note for note in found.notes)
        if engine == "vllm":
            assert all(one.attention_data in (1, one.tensor) for one in layouts)
            assert any(one.attention_data > 1 for one in layouts)
        else:
            assert all(one.attention_data == 1 for one in layouts)
            assert get_reason(found, "layout.mixture").endswith("SGLang serves no LoRA adapters in this layout")


class TestFp8BeforeAda:
    """SGLang computes FP8 by ModelOpt and FP8 experts with kernels that A100 and A10G do not have."""

    SHARED: ClassVar[dict[str, Any]] = {
        "prompt_tokens": 8000, "output_tokens": 300, "shared_prefix_tokens": 6000,
    }  # fmt: skip

    @pytest.mark.parametrize(("card", "newer_card", "count", "model"), [
        ("A100 SXM 80GB", "H100 SXM", 2, SEVENTY), ("A10G", "L4", 4, "meta-llama/Llama-3.1-8B-Instruct"),
    ])  # fmt: skip
    def test_sglang_is_not_given_weights_that_it_refuses(
        self, card: str, newer_card: str, count: int, model: str
    ) -> None:
        work = {**self.SHARED, "concurrency": 16 * count}
        before = decide_for(model, card, count, **work)
        assert (before.engine, before.quantization) == ("sglang", "FP8") and before.weights is not None
        assert before.weights.made == "while loading" and before.weights.published is None
        newer = decide_for(model, newer_card, count, **work)
        assert newer.engine == "sglang" and newer.weights is not None and newer.weights.published is not None
        assert newer.weights.published.repository.startswith("nvidia/")

    @pytest.mark.parametrize("model", ["Qwen/Qwen3-235B-A22B-FP8", "zai-org/GLM-4.6"])
    def test_fp8_experts_are_given_to_vllm_which_has_marlin_kernels_for_them(self, model: str) -> None:
        work: dict[str, Any] = {"concurrency": 32, "prompt_tokens": 16000, "output_tokens": 500}
        found = decide_for(model, "A100 SXM 80GB", 8, **work)
        assert (found.engine, found.quantization) == ("vllm", "FP8")
        assert not any(
            (one.engine, one.quantization, one.fits) == ("sglang", "FP8", True)
            for one in decide_for(model, "A100 SXM 80GB", 8, with_alternatives=True, **work).alternatives
        )
        assert decide_for(model, "H100 SXM", 8, **work).engine == "sglang"

    def test_vllm_is_not_given_fp8_by_modelopt_on_turing(self) -> None:
        found = decide_for("meta-llama/Llama-3.1-8B-Instruct", "TITAN RTX", concurrency=32)
        assert found.engine == "vllm" and found.weights is not None and found.weights.published is not None
        assert not found.weights.published.repository.startswith("nvidia/")
