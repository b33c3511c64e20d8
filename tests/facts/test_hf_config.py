"""Sizes computed from configurations, compared with published figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts.hf_config import read_config
from bedplate.facts.model_folder import read_config_file
from bedplate.values import Model, from_json, to_json

CONFIGS = Path(__file__).parents[2].parent / "shared" / "model_configs"
needs_configs = pytest.mark.skipif(not CONFIGS.is_dir(), reason="shared/model_configs is not beside the repository")


class Published(NamedTuple):
    total: str
    """As it is written there: what its rounding hides is forgiven."""
    source: str
    active: str | None = None
    holds: str = ""
    """What the published total counts beside the language model: vision, mtp."""
    hub: int | None = None
    """The number of weights in the safetensors files, as the hub shows it (`safetensors.total` of its API)."""
    hub_holds: str = ""


# The source of each figure. “Not read”: the figure is commonly quoted for this page, which was not available;
# a model that was made from another one has that one's figure. `hub` counts are as public repositories quote them.
LLAMA_CARD = "github:meta-llama/llama-models MODEL_CARD.md"
QWEN_CARD = (
    "model card, quoted in public repositories (32.8B, 480B, 8.2B) and github:vllm-project/recipes; 0.6B: its name"
)
QWEN35 = "github:vllm-project/recipes models/Qwen; model card of nvidia/Qwen3.5-397B-A17B-NVFP4 for the largest"
V3_README = "github:deepseek-ai/DeepSeek-V3 README.md"
V4_REPORT = "arXiv:2606.19348, abstract, on researchtracker.win"
GEMMA_CARD = "andysmith.ai/wiki/gemma-4-model-card, a summary of Google's card"
K2_README = "github:MoonshotAI/Kimi-K2 README.md"
K25 = "github:vllm-project/recipes models/moonshotai: K2.5 to K2.7 have K2's language model"
M2 = "github:vllm-project/recipes models/MiniMaxAI: 230B, 10B active; the hub counts 228.7B"
GLM_README = "github:zai-org/GLM-5 README.md"
GLM52 = "github:vllm-project/recipes models/zai-org/GLM-5.2.yaml: 743B, 39B active"
NEMOTRON = "github:NVIDIA-NeMo/Nemotron README.md and docs/index.md"
STEP = "github:stepfun-ai/Step-3.7-Flash README.md: language backbone of 196B beside 1.8B of vision"
OSS = "github:openai/gpt-oss README.md: 117B with 5.1B active, 21B with 3.6B"

PUBLISHED = {
    "meta-llama/Meta-Llama-3.1-8B": Published("8B", LLAMA_CARD, hub=8_030_261_248),
    "meta-llama/Meta-Llama-3.1-70B": Published("70B", LLAMA_CARD, hub=70_553_706_496),
    "meta-llama/Meta-Llama-3.1-405B": Published("405B", LLAMA_CARD, hub=405_853_388_800),
    # Its card counts 109B with the vision encoder, which this configuration leaves out.
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Published(
        "107.77B", "llama-bench of its GGUF: 107,769,861,184", "17B"
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": Published("400B", LLAMA_CARD, "17B"),
    "mistralai/Mixtral-8x7B-v0.1": Published(
        "46.7B", "mistral.ai/news/mixtral-of-experts, not read", "12.9B", hub=46_702_792_704
    ),
    "mistralai/Mixtral-8x22B-v0.1": Published(
        "141B", "mistral.ai/news/mixtral-8x22b, not read", "39B", hub=140_620_634_112
    ),
    "Qwen/Qwen3-0.6B": Published("0.6B", QWEN_CARD),
    "Qwen/Qwen3-1.7B": Published("1.7B", QWEN_CARD),
    "Qwen/Qwen3-8B": Published("8.2B", QWEN_CARD),
    "Qwen/Qwen3-32B": Published("32.8B", QWEN_CARD),
    "Qwen/Qwen3-32B-FP8": Published("32.8B", QWEN_CARD),
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": Published("32.8B", QWEN_CARD),
    "Qwen/Qwen3-30B-A3B": Published("30.5B", QWEN_CARD, "3.3B", hub=30_532_122_624),
    "Qwen/Qwen3-30B-A3B-FP8": Published("30.5B", QWEN_CARD, "3.3B"),
    "Qwen/Qwen3-235B-A22B": Published("235B", QWEN_CARD, "22B", hub=235_093_634_560),
    "Qwen/Qwen3-235B-A22B-FP8": Published("235B", QWEN_CARD, "22B"),
    "nvidia/Qwen3-235B-A22B-NVFP4": Published("235B", QWEN_CARD, "22B"),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": Published("480B", QWEN_CARD, "35B", hub=480_154_875_392),
    "Qwen/Qwen3-VL-2B-Instruct": Published("2B", "its name", hub=2_127_532_032, hub_holds="vision"),
    "Qwen/Qwen3-VL-4B-Instruct": Published("4B", "its name", hub=4_437_815_808, hub_holds="vision"),
    "Qwen/Qwen3-VL-8B-Instruct": Published("8B", "its name", hub=8_767_123_696, hub_holds="vision"),
    "Qwen/Qwen3-VL-32B-Instruct": Published("32.8B", "its language model is Qwen3-32B's"),
    "Qwen/Qwen3-VL-32B-Thinking": Published("32.8B", "its language model is Qwen3-32B's"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Published("30.5B", "its language model is Qwen3-30B-A3B's", "3.3B"),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": Published("235B", "github:vllm-project/recipes", "22B"),
    "Qwen/Qwen3.5-27B": Published("27B", QWEN35),
    "Qwen/Qwen3.5-35B-A3B": Published("35B", QWEN35, "3B"),
    "Qwen/Qwen3.5-122B-A10B": Published("122B", QWEN35, "10B"),
    "Qwen/Qwen3.5-397B-A17B": Published("397B", QWEN35, "17B"),
    "nvidia/Qwen3.5-122B-A10B-NVFP4": Published("122B", QWEN35, "10B"),
    "nvidia/Qwen3.5-397B-A17B-NVFP4": Published("397B", QWEN35, "17B"),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Published("35B", QWEN35, "3B"),
    "XiaomiMiMo/MiMo-7B-Base": Published("7.83B", "hub: model size of its fine-tunes, such as CodeDPO's", holds="mtp"),
    "XiaomiMiMo/MiMo-V2-Flash": Published("309B", "github:XiaomiMiMo/MiMo-V2-Flash README.md", "15B"),
    # MAI-DS-R1 is R1 without its MTP layer. The hub's counts of V3 and V3.2 hold two copies of the vocabulary in it.
    "deepseek-ai/DeepSeek-R1": Published("671B", V3_README, "37B", hub=671_026_419_200),
    "deepseek-ai/DeepSeek-V3": Published("671B", V3_README, "37B"),
    "deepseek-ai/DeepSeek-V3.2": Published("671B", "github:vllm-project/recipes models/deepseek-ai", "37B"),
    "nvidia/DeepSeek-V3.1-NVFP4": Published("671B", V3_README, "37B"),
    "nvidia/DeepSeek-V3.2-NVFP4": Published("671B", "github:vllm-project/recipes models/deepseek-ai", "37B"),
    "deepseek-ai/DeepSeek-V4-Flash": Published("284B", V4_REPORT, "13B", hub=290_944_616_402, hub_holds="mtp"),
    "nvidia/DeepSeek-V4-Flash-NVFP4": Published("284B", V4_REPORT, "13B"),
    "sgl-project/DeepSeek-V4-Flash-FP8": Published("284B", V4_REPORT, "13B"),
    "deepseek-ai/DeepSeek-V4-Pro": Published("1.6T", V4_REPORT, "49B", hub=1_598_839_674_782, hub_holds="mtp"),
    "nvidia/DeepSeek-V4-Pro-NVFP4": Published("1.6T", V4_REPORT, "49B"),
    "sgl-project/DeepSeek-V4-Pro-FP8": Published("1.6T", V4_REPORT, "49B"),
    "google/gemma-4-26B-A4B": Published("25.2B", GEMMA_CARD, "3.8B"),
    "nvidia/Gemma-4-26B-A4B-NVFP4": Published("25.2B", GEMMA_CARD, "3.8B"),
    "nvidia/Gemma-4-31B-IT-NVFP4": Published("30.7B", GEMMA_CARD),
    "moonshotai/Kimi-K2-Instruct": Published("1T", K2_README, "32B", hub=1_026_408_235_864),
    "moonshotai/Kimi-K2.5": Published("1T", K25, "32B"),
    "nvidia/Kimi-K2.5-NVFP4": Published("1T", K25, "32B"),
    "nvidia/Kimi-K2.6-NVFP4": Published("1T", K25, "32B"),
    "nvidia/Kimi-K2.7-Code-NVFP4": Published("1T", K25, "32B"),
    "moonshotai/Kimi-K3": Published(
        "2.8T",
        "hub: listing of moonshotai; active: github:ModelEngine-Group/unified-cache-management issue 1357",
        "104B",
    ),
    "MiniMaxAI/MiniMax-M2.5": Published("230B", M2, "10B", hub=228_703_644_928),
    "MiniMaxAI/MiniMax-M2.7": Published("230B", M2, "10B", hub=228_689_764_864),
    "nvidia/MiniMax-M2.5-NVFP4": Published("230B", M2, "10B"),
    "nvidia/MiniMax-M2.7-NVFP4": Published("230B", M2, "10B"),
    # The card's 428B and 23B include the vision encoder and leave something out of the active; 427B and 26B are vLLM's.
    "MiniMaxAI/MiniMax-M3": Published("427B", "github:vllm-project/recipes models/MiniMaxAI/MiniMax-M3.yaml", "26B"),
    "zai-org/GLM-5": Published("744B", GLM_README, "40B", hub=753_864_139_008, hub_holds="mtp"),
    "zai-org/GLM-5-FP8": Published("744B", GLM_README, "40B"),
    "zai-org/GLM-5.1": Published("744B", GLM_README, "40B", hub=753_864_139_008, hub_holds="mtp"),
    "zai-org/GLM-5.1-FP8": Published("744B", GLM_README, "40B"),
    "zai-org/GLM-5.2": Published("743B", GLM52, "39B", hub=753_329_940_480, hub_holds="mtp"),
    "zai-org/GLM-5.2-FP8": Published("743B", GLM52, "39B", hub=753_329_940_480, hub_holds="mtp"),
    # Of GLM-5.3 the maker publishes no count; the hub counts its files as it does GLM-5.2's.
    "zai-org/GLM-5.3": Published("743B", GLM52, "39B", hub=753_329_940_480, hub_holds="mtp"),
    "zai-org/GLM-5.3-FP8": Published("743B", GLM52, "39B"),
    "nvidia/GLM-5-NVFP4": Published("744B", GLM_README, "40B"),
    "nvidia/GLM-5.1-NVFP4": Published("744B", GLM_README, "40B"),
    "nvidia/GLM-5.2-NVFP4": Published("743B", GLM52, "39B"),
    "nvidia/GLM-5.3-NVFP4": Published("743B", GLM52, "39B"),
    "nvidia/Llama-3.1-70B-Instruct-FP8": Published("70.6B", "as Meta-Llama-3.1-70B"),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": Published("49.9B", "hub: model size of mmnga's GGUF; its name says 49B"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published("31.6B", NEMOTRON, "3.6B", hub=31_577_937_344),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": Published("31.6B", NEMOTRON, "3.6B"),
    # NVIDIA says 30B and 3B, in the name and on the page; the hub counts the files of its BF16 as it does the Nano's.
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": Published(
        "31.6B", "hub: of the BF16 files", "3.6B", hub=31_577_937_344
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": Published(
        "120.6B", NEMOTRON, "12.7B", hub=123_611_012_096, hub_holds="mtp"
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": Published("120.6B", NEMOTRON, "12.7B"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": Published("550B", NEMOTRON, "55B"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": Published("550B", NEMOTRON, "55B"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": Published("550B", NEMOTRON, "55B"),
    "nvidia/Nemotron-H-56B-Base-8K": Published("56B", "arXiv:2504.03624, not read; its name"),
    "openai/gpt-oss-120b": Published("117B", OSS, "5.1B", hub=116_829_156_672),
    "openai/gpt-oss-20b": Published("21B", OSS, "3.6B", hub=20_914_757_184),
    "stepfun-ai/Step-3.7-Flash": Published("196B", STEP, "11B"),
    "stepfun-ai/Step-3.7-Flash-FP8": Published("196B", STEP, "11B"),
}


def parse_figure(text: str) -> tuple[float, float]:
    """Parse a published figure. Returns its value and its rounding error."""
    value, unit = float(text[:-1]), {"B": 1e9, "T": 1e12}[text[-1]]
    digits = len(text[:-1].partition(".")[2])
    return value * unit, 0.5 * 10**-digits * unit


def list_configs() -> list[Path]:
    return (
        sorted(path for path in CONFIGS.glob("*_config.json") if "hf_quant" not in path.name)
        if CONFIGS.is_dir()
        else []
    )


def make_name(path: Path) -> str:
    return path.name.removesuffix("_config.json").replace("--", "/", 1)


def with_parts(model: Model, holds: str) -> int:
    vision = model.vision_parameters if "vision" in holds else 0
    return model.parameters + vision + (model.mtp_parameters if "mtp" in holds else 0)


@needs_configs
def test_every_configuration_has_its_published_count() -> None:
    assert {make_name(path) for path in list_configs()} == set(PUBLISHED)


@needs_configs
@pytest.mark.parametrize("name", [name for name, published in PUBLISHED.items() if published.hub])
def test_weights_match_the_counts_of_the_hub(name: str) -> None:
    """Within 0.01 %. The remainder are scales of quantized weights and buffers."""
    model = read_config_file(CONFIGS / f"{name.replace('/', '--', 1)}_config.json")
    counted = with_parts(model, PUBLISHED[name].hub_holds)
    assert counted == pytest.approx(PUBLISHED[name].hub, rel=1e-4), f"{counted:,}"


@needs_configs
@pytest.mark.parametrize("path", list_configs(), ids=make_name)
def test_parameters_match_published_counts(path: Path) -> None:
    """Within 1 %, or within the rounding of the published figure where that is coarser."""
    model = read_config_file(path)
    assert model.name == make_name(path)
    published = PUBLISHED[model.name]
    total, rounding = parse_figure(published.total)
    counted = with_parts(model, published.holds)
    assert abs(counted - total) <= max(0.01 * total, rounding), (
        f"{counted:,} against {published.total}, {published.source}"
    )
    if published.active:
        active, rounding = parse_figure(published.active)
        assert model.active_parameters is not None
        # Makers differ in whether the two ends of the vocabulary count as active.
        ends = sum(part.active_parameters for part in model.parts if part.name in ("embedding", "output"))
        nearest = min(abs(model.active_parameters - less - active) for less in (0, ends // 2, ends))
        assert nearest <= max(0.03 * active, rounding), f"{model.active_parameters:,} against {published.active}"


@needs_configs
@pytest.mark.parametrize("path", list_configs(), ids=make_name)
def test_every_configuration_gives_a_complete_model(path: Path) -> None:
    model = read_config_file(path)
    assert from_json(Model, to_json(model)) == model
    assert sum(part.parameters for part in model.parts if part.name not in ("vision", "mtp")) == model.parameters
    assert sum(part.bytes for part in model.parts if part.name != "mtp") == model.weight_bytes
    assert sum(group.count for group in model.layers) == model.num_layers
    assert model.max_context and model.vocab_size and model.quantization
    quantized = any(word in model.name for word in ("FP8", "NVFP4"))
    assert model.bits_per_weight is not None
    assert (model.bits_per_weight < 12) == (quantized or model.quantization_details is not None)


@needs_configs
@pytest.mark.parametrize(
    ("name", "gigabytes", "source"),
    [
        ("deepseek-ai/DeepSeek-R1", 673, "index.json: 688.6 GB, of which the MTP layer and its copies take about 15"),
        ("openai/gpt-oss-120b", 65.2, "hub: 65.3 GB of safetensors"),
        ("openai/gpt-oss-20b", 13.8, "hub: 13.8 GB of safetensors"),
        ("moonshotai/Kimi-K2.5", 595, "hub: 595 GB"),
        ("moonshotai/Kimi-K2-Instruct", 1029, "hub: 1.03 TB"),
        ("Qwen/Qwen3-32B-FP8", 34.3, "hub: 34.3 GB"),
        ("deepseek-ai/DeepSeek-V4-Flash", 156, "hub: about 160 GB with its MTP layer"),
    ],
)
def test_bytes_follow_the_quantization(name: str, gigabytes: float, source: str) -> None:
    model = read_config_file(CONFIGS / f"{name.replace('/', '--', 1)}_config.json")
    assert model.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01), source


LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def read(**changes: Any) -> Model:
    return read_config({**LLAMA, **changes}, name="made-up")


class TestByHand:
    def test_llama_3_8b_is_counted_exactly(self) -> None:
        attention = 4096 * (4096 + 1024 + 1024 + 4096)
        layer = attention + 3 * 4096 * 14336 + 2 * 4096
        assert read().parameters == 32 * layer + 2 * 128256 * 4096 + 4096 == 8_030_261_248

    def test_tied_embeddings_count_once(self) -> None:
        assert read().parameters - read(tie_word_embeddings=True).parameters == 128256 * 4096
        assert read(tie_word_embeddings=True).tied_embeddings

    def test_active_parameters_count_only_active_experts(self) -> None:
        model = read(num_local_experts=8, num_experts_per_tok=2)
        expert = 3 * 4096 * 14336 * 32
        assert model.parameters - read().parameters == 7 * expert + 32 * 8 * 4096
        assert model.active_parameters == model.parameters - 6 * expert
        assert (model.num_experts, model.num_experts_active, model.num_moe_layers) == (8, 2, 32)

    def test_bytes_read_per_token_exclude_the_embedding_and_inactive_experts(self) -> None:
        model = read(num_local_experts=8, num_experts_per_tok=2)
        assert model.active_parameters is not None
        assert model.read_bytes_per_token == 2 * (model.active_parameters - 128256 * 4096)

    @pytest.mark.parametrize(
        ("settings", "label", "bits"),
        [
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8", 8 + 32 / 128**2),
            ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ-Int4", 4 + 20 / 128),
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ-Int4", 4 + 20 / 128),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", 4.5),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "NF4", 4.5),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "INT8", 8),
            (
                {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 128}}}},
                "INT4",
                4 + 16 / 128,
            ),
        ],
    )  # fmt: skip
    def test_only_linear_layers_are_quantized(self, settings: dict[str, Any], label: str, bits: float) -> None:
        model = read(quantization_config=settings)
        layers = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
        rest = 2 * (model.parameters - layers)
        assert model.quantization == label
        assert model.weight_bytes == pytest.approx(layers * bits / 8 + rest, rel=1e-6)

    def test_mlx_quantizes_embedding_and_output_too(self) -> None:
        model = read(quantization={"group_size": 64, "bits": 4}, quantization_config={"group_size": 64, "bits": 4})
        assert model.quantization_details is not None and model.quantization_details.method == "mlx"
        assert model.weight_bytes == pytest.approx(model.parameters * 4.5 / 8, rel=1e-3)

    @pytest.mark.parametrize("algorithm", ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"])
    def test_fp8_by_modelopt_is_a_method_of_its_own(self, algorithm: str) -> None:
        """Engines have another loader for it, whose minimum compute capability is higher."""
        for settings in ({"quant_method": "modelopt"}, {}):
            details = read(quantization_config={**settings, "quant_algo": algorithm}).quantization_details
            assert details is not None and details.method == "modelopt"
        plain = read(quantization_config={"quant_method": "fp8"}).quantization_details
        assert plain is not None and plain.method == "fp8"

    def test_excluded_modules_are_not_quantized(self) -> None:
        plain = {"quant_method": "modelopt", "quant_algo": "FP8"}
        one = read(quantization_config={**plain, "ignore": ["lm_head", "model.layers.0.self_attn*"]})
        assert one.weight_bytes - read(quantization_config=plain).weight_bytes == 4096 * (4096 + 1024 + 1024 + 4096)

    @pytest.mark.measures
    def test_a_pattern_with_exponential_time_is_not_run(self) -> None:
        began = time.process_time()
        read(quantization_config={"quant_method": "fp8", "ignore": ["re:(a+)+$", "re:(.*.*)*x", "*" * 400, "re:["]})
        assert time.process_time() - began < 2

    @pytest.mark.parametrize(
        ("architecture", "task"),
        [
            ("LlamaForCausalLM", "generate"),
            ("LlamaModel", "embed"),
            ("LlamaForSequenceClassification", "classify"),
            ("GPT2LMHeadModel", "generate"),
        ],
    )
    def test_the_task_follows_from_the_architecture(self, architecture: str, task: str) -> None:
        assert read(architectures=[architecture]).task == task

    def test_auto_map_is_ignored(self) -> None:
        assert read(auto_map={"AutoModel": "modeling_evil.Evil"}) == read()


BAD: list[object] = [
    {}, [], None, 7, "x", {"model_type": "llama"}, {**LLAMA, "hidden_size": None}, {**LLAMA, "hidden_size": "4096"},
    {**LLAMA, "hidden_size": -1}, {**LLAMA, "hidden_size": 1e300}, {**LLAMA, "hidden_size": 10**400},
    {**LLAMA, "num_hidden_layers": 10**9}, {**LLAMA, "num_hidden_layers": [[]]}, {**LLAMA, "vocab_size": 2**63},
    {**LLAMA, "vocab_size": 0}, {**LLAMA, "layer_types": ["full_attention"]}, {**LLAMA, "layer_types": [{}] * 32},
    {**LLAMA, "layer_types": ["quantum_attention"] * 32}, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 9},
    {**LLAMA, "num_local_experts": 2**40}, {**LLAMA, "hybrid_override_pattern": "MMXX"}, {**LLAMA,
    "block_configs": [1]},
    {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 10**9}},
    {**LLAMA, "quantization_config": {"quant_method": "secret"}},
    {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
    {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": "big"}},
    {**LLAMA, "kv_lora_rank": 512}, {**LLAMA, "linear_attn_config": {"full_attn_layers": "all"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=range(len(BAD)))
def test_invalid_configurations_are_usage_errors(fields: object) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(fields, name="made-up")
    assert "made-up" in caught.value.message


KEYS = sorted({
    *LLAMA, "text_config", "vision_config", "quantization_config", "layer_types", "sliding_window",
    "num_local_experts", "num_experts_per_tok",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim",
    "index_n_heads", "compress_ratios",
    "hybrid_override_pattern", "full_attention_interval", "linear_num_key_heads", "mamba_d_state",
    "attn_layer_period", "num_kv_shared_layers",
    "moe_layer_freq", "first_k_dense_replace", "num_nextn_predict_layers", "block_configs", "linear_attn_config",
    "hidden_size_per_layer_input",
    "sparse_attention_config", "moe_intermediate_size", "n_shared_experts", "head_dim", "attn_type_list",
    "cross_attention_layers",
})  # fmt: skip
TYPES = [
    "llama",
    "gemma4_text",
    "gemma3n_text",
    "nemotron_h",
    "deepseek_v4",
    "lfm2",
    "qwen3_5_text",
    "bert",
    "jamba",
    "mamba2",
    "falcon_h1",
    "gpt_oss",
]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.sampled_from(TYPES)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)),
    max_leaves=12,
)
small = st.one_of(
    st.integers(0, 300),
    st.lists(st.integers(0, 200), max_size=40),
    st.lists(st.sampled_from(["full_attention", "mamba"]), min_size=32, max_size=40),
)


@given(
    changes=st.dictionaries(st.sampled_from(KEYS), st.one_of(values, small), max_size=8), kind=st.sampled_from(TYPES)
)
def test_any_configuration_is_read_or_rejected(changes: dict[str, Any], kind: str) -> None:
    try:
        model = read_config({**LLAMA, "model_type": kind, **changes}, name="fuzzed")
    except UsageError:
        return
    assert model.parameters >= 0 and model.weight_bytes >= 0 and model.compute_kv_bytes(1000) >= 0
    assert from_json(Model, to_json(model)) == model


def test_a_deeply_nested_configuration_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(UsageError):
        read_config_file(path)
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(UsageError):
        read_config_file(path)


def test_infinity_in_json_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "someone--model_config.json"
    path.write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")]}))
    assert read_config_file(path).name == "someone/model"
