"""Plans with published weights: each engine accepts each form that it is offered, and the plan prefers to fetch."""

from __future__ import annotations

import functools

import pytest

from bedplate.decide import decide
from bedplate.decide.candidates import convert_model, list_accepted_weights, make_candidate, verify_candidate
from bedplate.decide.case import DecisionCase
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.layouts import list_layouts
from bedplate.decide.planning import plan
from bedplate.engines import get_engine, load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.facts.published_weights import list_published, load_catalogue
from bedplate.values import Decision, Hardware, Workload
from bedplate.values.intent import Operations

MODELS = tuple(load_catalogue().models)
EVERY = 23
"""`make test` checks every so many models, the nightly run all of them."""
MACHINES = ("RTX 4090", "H100 SXM", "B200", "MI300X", "Apple M3 Ultra 80-core")
COUNTS = (1, 4, 16)


@functools.cache
def make_machine(chip: str, count: int) -> Hardware:
    described = {"accelerator": chip, "count": count, "ram_gb": 4096, "os": "macos" if "Apple" in chip else "linux"}
    if count > 8:
        described |= {"gpus_per_node": 8, "network": "InfiniBand NDR 400"}
    return make_simulated_hardware(described)


def find_rejected(name: str, engine_id: str) -> tuple[int, list[str]]:
    """The number of published forms of a model that the engine is given, and those that the verifier always rejects."""
    engine, model, accepted = get_engine(engine_id), find_model(name), 0
    rejected: list[str] = []
    for chip in MACHINES:
        pending: dict[str, list[str]] = {}
        verified: set[str] = set()
        for count in COUNTS[:1] if "Apple" in chip else COUNTS:
            hardware = make_machine(chip, count)
            target = engine.find_target(hardware)
            if target is None or target.device == "cpu" or hardware.os not in engine.systems:
                continue
            case = DecisionCase(hardware, model, Workload(concurrency=1), Operations())
            for weights, loaded in list_accepted_weights(engine, target, case):
                assert weights.published is not None
                form = f"{weights.published.repository} {weights.label} on {chip}"
                for layout in () if form in verified else list_layouts(hardware, engine, loaded):
                    found = make_candidate(engine, target, weights, loaded, layout, case, MachineEvidence())
                    if not found.fit.fits:
                        continue
                    if (fault := verify_candidate(found, case)) is None:
                        verified.add(form)
                        break
                    pending.setdefault(form, []).append(f"{fault.rule}: {fault.why}")
        accepted += len(verified)
        rejected += [f"{form}: {whys[0]}" for form, whys in pending.items() if form not in verified]
    return accepted, rejected


@pytest.mark.parametrize("engine", sorted(load_engines()))
def test_a_plan_with_published_weights_passes_the_verifier(engine: str) -> None:
    found = [find_rejected(name, engine) for name in MODELS[::EVERY]]
    assert [one for _, rejected in found for one in rejected] == []


@pytest.mark.nightly
@pytest.mark.parametrize("engine", sorted(load_engines()))
def test_every_plan_with_published_weights_passes_the_verifier(engine: str) -> None:
    found = [find_rejected(name, engine) for name in MODELS]
    assert [one for _, rejected in found for one in rejected] == []
    forms = {one.format for name in MODELS for one in list_published(find_model(name))}
    if forms & set(get_engine(engine).formats):
        assert sum(accepted for accepted, _ in found) > 0


def decide_on(chip: str, name: str, engine: str | None = None, count: int = 1, concurrency: int = 1) -> Decision:
    return decide(make_machine(chip, count), find_model(name), Workload(concurrency=concurrency), engine)


def list_steps(decision: Decision) -> list[str]:
    assert decision.launch is not None
    return [step.kind for step in decision.launch.prepare]


class TestFetching:
    def test_a_small_card_is_told_to_fetch_a_file(self) -> None:
        """A GPU with 8 GB gets a GGUF file, neither the original's 16 GB nor a conversion."""
        hardware = make_simulated_hardware({"accelerator": "RTX 4060", "ram_gb": 16})
        decision = decide(hardware, find_model("meta-llama/Llama-3.1-8B-Instruct"), Workload(), "llama.cpp")
        assert decision.weights is not None and decision.launch is not None
        published = decision.weights.published
        assert published is not None and published.size_bytes < 7e9
        assert "convert" not in list_steps(decision)
        download = decision.launch.prepare[-1]
        assert download.download_bytes == published.size_bytes
        assert download.argv[:4] == ("hf", "download", published.repository, published.file)
        assert decision.launch.argv[decision.launch.argv.index("--model") + 1] == published.path

    @pytest.mark.parametrize("name", ["zai-org/GLM-4.5", "zai-org/GLM-4.6", "zai-org/GLM-4.7"])
    def test_glm_is_fetched_in_fp8(self, name: str) -> None:
        """The vLLM recipe serves the published FP8 weights: half of the 700 GB, and nothing is quantized."""
        decision = decide_on("H100 SXM", name, count=8, concurrency=16)
        assert decision.engine == "vllm" and decision.quantization == "FP8" and decision.weights is not None
        assert decision.weights.published is not None
        assert decision.weights.published.repository == f"{name}-FP8"

    @pytest.mark.parametrize(
        ("engine", "chip", "name"),
        [
            ("vllm", "L40S", "Qwen/Qwen3-32B"),
            ("sglang", "L40S", "Qwen/Qwen3-32B"),
            ("tensorrt-llm", "H100 SXM", "meta-llama/Llama-3.3-70B-Instruct"),
            ("lmdeploy", "RTX 4090", "Qwen/Qwen3-14B"),
            ("mlx", "Apple M3 Ultra 80-core", "deepseek-ai/DeepSeek-V3.1"),
        ],
    )
    def test_servers_are_given_the_hub_name(self, engine: str, chip: str, name: str) -> None:
        decision = decide_on(chip, name, engine, concurrency=8)
        assert decision.weights is not None and decision.launch is not None
        published = decision.weights.published
        assert published is not None, decision.quantization
        assert published.repository in decision.launch.argv
        assert "convert" not in list_steps(decision)
        assert decision.model == name
        assert plan(decision, find_model(name), Workload()).model.served_name == name.lower()

    def test_a_branch_of_exl3_is_fetched_into_a_folder(self) -> None:
        decision = decide_on("RTX 4090", "Qwen/Qwen3-32B")
        assert decision.engine == "exllamav3" and decision.launch is not None
        folder = "Qwen3-32B-exl3-4.0bpw"
        step = decision.launch.prepare[-1]
        assert step.argv == (
            "hf", "download", "turboderp/Qwen3-32B-exl3", "--revision", "4.0bpw", "--local-dir", folder,
        )  # fmt: skip
        assert decision.launch.argv[decision.launch.argv.index("--model") + 1] == folder

    def test_all_parts_of_a_split_file_are_fetched(self) -> None:
        decision = decide_on("H100 SXM", "deepseek-ai/DeepSeek-R1", "llama.cpp", count=16)
        assert decision.weights is not None and decision.weights.published is not None
        assert decision.weights.published.parts > 1 and decision.launch is not None
        step = decision.launch.prepare[-1]
        pattern = step.argv[step.argv.index("--include") + 1]
        assert "-*-of-" in pattern and pattern.endswith(".gguf")

    def test_a_requested_quantization_is_fetched(self) -> None:
        decision = decide_on("RTX 4090", "Qwen/Qwen3-8B:Q4_K_M")
        assert decision.engine == "llama.cpp" and decision.launch is not None
        assert "Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf" in decision.launch.argv
        assert decision.launch.prepare[-1].argv[2] == "unsloth/Qwen3-8B-GGUF"

    def test_the_reason_compares_the_effort(self) -> None:
        reasons = {one.rule: one.text for one in decide_on("RTX 4090", "Qwen/Qwen3-8B", "llama.cpp").reasons}
        assert reasons["quant.published"].startswith("fetch unsloth/Qwen3-8B-GGUF, file Qwen3-8B-")
        assert "instead of a conversion: 16.4 GB to download" in reasons["quant.published"]

    def test_a_long_conversion_yields_to_an_engine_that_fetches(self) -> None:
        decision = decide_on("RTX 4090", "microsoft/phi-4")
        assert decision.engine == "llama.cpp"
        assert "ExLlamaV3 would first convert the weights" in decision.reasons[0].text

    def test_four_published_bits_yield_to_an_engine_that_fetches_twice_as_many(self) -> None:
        decision = decide_on("RTX 4090", "Qwen/Qwen3-32B", count=2)
        assert (decision.engine, decision.quantization) == ("llama.cpp", "Q8_0")
        assert "the published weights for ExLlamaV3 have 4 bits" in decision.reasons[0].text
        assert decide_on("RTX 4090", "Qwen/Qwen3-32B").engine == "exllamav3"

    def test_the_fetched_weights_are_those_of_later_estimates(self) -> None:
        model, decision = find_model("Qwen/Qwen3-32B"), decide_on("RTX 4090", "Qwen/Qwen3-32B")
        assert decision.weights is not None and decision.weights.published is not None
        assert convert_model(model, decision.weights).weight_bytes < model.weight_bytes / 3

    def test_a_conversion_is_the_fallback(self) -> None:
        """Nobody is known to have published quantizations of the base model."""
        decision = decide_on("RTX 4090", "meta-llama/Meta-Llama-3.1-70B", "llama.cpp", count=4)
        assert decision.weights is not None and decision.weights.published is None
        assert "convert" in list_steps(decision)
