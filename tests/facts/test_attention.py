"""The cache of each kind of layer, compared with manual calculations and published figures."""

from __future__ import annotations

from typing import Any

import pytest

from bedplate.facts.hf_config import read_config
from bedplate.facts.known_models import find_model
from bedplate.values import Model
from bedplate.values.model import LayerGroup

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def read(**changes: Any) -> Model:
    return read_config({**LLAMA, **changes}, name="made-up")


def count_kinds(model: Model) -> dict[str, int]:
    return {group.kind: group.count for group in model.layers}


def find_group(model: Model, kind: str) -> LayerGroup:
    return next(group for group in model.layers if group.kind == kind)


class TestPlain:
    def test_grouped_queries_share_kv_heads(self) -> None:
        assert read().kv_bytes_per_token == 32 * 8 * (128 + 128) * 2

    def test_multi_head_attention_has_a_kv_head_per_head(self) -> None:
        assert read(num_key_value_heads=None).kv_bytes_per_token == 32 * 32 * 256 * 2

    def test_multi_query_attention_has_one_kv_head(self) -> None:
        assert read(num_key_value_heads=1).kv_bytes_per_token == 32 * 256 * 2

    def test_head_dim_may_exceed_hidden_size_over_heads(self) -> None:
        assert read(head_dim=256).kv_bytes_per_token == 32 * 8 * 512 * 2

    def test_an_eight_bit_cache_is_half(self) -> None:
        model = read()
        assert (
            model.compute_kv_bytes(1000, bits=8) * 2 == model.compute_kv_bytes(1000) == 1000 * model.kv_bytes_per_token
        )


class TestLatent:
    """MLA keeps one latent and the rotated part for all heads: (512 + 64) values, not 128 heads of 320."""

    def test_deepseek_v3_keeps_one_latent_per_layer(self) -> None:
        model = find_model("DeepSeek-V3")
        assert model.kv_bytes_per_token == 61 * (512 + 64) * 2 == 70_272
        assert count_kinds(model) == {"latent attention": 61}

    def test_the_indexer_of_v32_keeps_a_key_of_its_own(self) -> None:
        assert find_model("deepseek-ai/DeepSeek-V3.2").kv_bytes_per_token == 61 * (512 + 64 + 128) * 2

    def test_layers_that_share_an_indexer_keep_no_key_for_it(self) -> None:
        # GLM-5.2: 21 layers choose, the 57 after them use the choice.
        assert find_model("zai-org/GLM-5").kv_bytes_per_token == 78 * (512 + 64 + 128) * 2
        assert find_model("zai-org/GLM-5.2").kv_bytes_per_token == 78 * (512 + 64) * 2 + 21 * 128 * 2

    def test_kimi_k3_keeps_a_latent_in_24_layers_and_a_state_in_69(self) -> None:
        model = find_model("moonshotai/Kimi-K3")
        assert model.kv_bytes_per_token == 24 * (512 + 64) * 2
        assert model.state_bytes == 69 * (96 * 128 * 128 * 4 + 3 * (4 - 1) * 96 * 128 * 2)


class TestCompressed:
    def test_deepseek_v4_pro_holds_a_tenth_of_v32_at_a_million_tokens(self) -> None:
        """The technical report states 10 % of the cache of V3.2; a reader of the report counted 9.62 GiB in 16 bits."""
        pro, before = find_model("deepseek-ai/DeepSeek-V4-Pro"), find_model("deepseek-ai/DeepSeek-V3.2")
        tokens = 1 << 20
        assert pro.compute_kv_bytes(tokens) / 2**30 == pytest.approx(9.62, rel=0.01)
        assert 0.09 < pro.compute_kv_bytes(tokens) / before.compute_kv_bytes(tokens) < 0.13

    def test_compressed_cache_matches_a_calculation_by_hand(self) -> None:
        # Of V4-Pro's 61 layers 30 keep an entry of 512 and an index key of 128 for 4 tokens, 31 one for 128 tokens.
        model = find_model("deepseek-ai/DeepSeek-V4-Pro")
        assert model.kv_bytes_per_token == round(30 * (512 + 128) / 4 * 2 + 31 * 512 / 128 * 2)
        assert model.kv_bytes_window == 61 * 128 * 512 * 2

    def test_minimax_m3_keeps_an_index_key_in_its_sparse_layers(self) -> None:
        assert find_model("MiniMaxAI/MiniMax-M3").kv_bytes_per_token == 60 * 4 * 256 * 2 + 57 * 128 * 2


class TestWindows:
    def test_gemma_3_sees_everything_in_every_sixth_layer_only(self) -> None:
        model = find_model("google/gemma-3-27b-it")
        assert count_kinds(model) == {"windowed attention": 52, "full attention": 10}
        assert model.kv_bytes_per_token == 10 * 16 * 256 * 2
        assert model.kv_bytes_window == 52 * 16 * 256 * 2 * 1024

    def test_gemma_4_has_fewer_and_wider_heads_where_it_sees_everything(self) -> None:
        model = find_model("google/gemma-4-26B-A4B")
        assert model.kv_bytes_per_token == 5 * 2 * (512 + 512) * 2
        assert model.kv_bytes_window == 25 * 8 * (256 + 256) * 2 * 1024

    def test_later_layers_of_gemma_4_e4b_read_the_cache_of_earlier_ones(self) -> None:
        model = find_model("gemma-4-E4B-it")
        assert count_kinds(model) == {"windowed attention": 20, "full attention": 4, "shares another layer's cache": 18}
        assert model.kv_bytes_per_token == 4 * 2 * 1024 * 2
        assert model.kv_bytes_window == 20 * 2 * 512 * 2 * 512

    def test_gpt_oss_alternates_windowed_and_full_layers(self) -> None:
        model = find_model("gpt-oss-20b")
        assert model.kv_bytes_per_token == 12 * 8 * 128 * 2
        assert model.kv_bytes_window == 12 * 8 * 128 * 2 * 128

    def test_mimo_v2_flash_has_its_own_heads_in_windowed_layers(self) -> None:
        model = find_model("XiaomiMiMo/MiMo-V2-Flash")
        assert model.kv_bytes_per_token == 9 * 4 * (192 + 128) * 2
        assert model.kv_bytes_window == 39 * 8 * (192 + 128) * 2 * 128

    def test_llama_4_looks_back_within_chunks_in_three_of_four_layers(self) -> None:
        model = find_model("Llama 4 Scout")
        assert count_kinds(model) == {"chunked attention": 36, "full attention": 12}
        assert model.kv_bytes_window == 36 * 8 * 256 * 2 * 8192

    def test_a_disabled_window_is_ignored(self) -> None:
        qwen = read(model_type="qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=4)
        assert qwen.kv_bytes_window == 0
        assert count_kinds(
            read(model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=4)
        ) == {
            "full attention": 4,
            "windowed attention": 28,
        }

    def test_a_short_sequence_does_not_fill_the_window(self) -> None:
        model = find_model("google/gemma-3-27b-it")
        assert model.compute_kv_bytes(10) == 62 * 16 * 256 * 2 * 10
        assert model.compute_kv_bytes(4096) == model.kv_bytes_per_token * 4096 + model.kv_bytes_window


class TestStates:
    def test_qwen35_keeps_a_state_in_three_of_four_layers(self) -> None:
        model = find_model("Qwen/Qwen3.5-397B-A17B")
        assert model.kv_bytes_per_token == 15 * 2 * (256 + 256) * 2
        conv = (4 - 1) * (2 * 16 * 128 + 64 * 128) * 2
        assert model.state_bytes == 45 * (64 * 128 * 128 * 4 + conv)

    def test_nemotron_h_has_layers_that_keep_nothing(self) -> None:
        model = find_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
        assert count_kinds(model) == {"state space": 23, "no cache": 23, "full attention": 6}
        assert model.kv_bytes_per_token == 6 * 2 * 256 * 2
        assert model.state_bytes == 23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2)

    def test_jamba_attends_in_every_eighth_layer(self) -> None:
        model = find_model("AI21-Jamba-1.5-Mini")
        assert count_kinds(model) == {"state space": 28, "full attention": 4}
        assert model.state_bytes == 28 * (8192 * 16 * 4 + 3 * 8192 * 2)

    def test_falcon_h1_has_attention_and_state_in_each_layer(self) -> None:
        model = find_model("Falcon-H1-7B-Instruct")
        assert count_kinds(model) == {"attention and state space": 44}
        assert model.kv_bytes_per_token == 44 * 2 * 256 * 2
        assert model.state_bytes == 44 * (3072 * 256 * 4 + 3 * (3072 + 2 * 256) * 2)

    def test_lfm2_convolves_over_three_tokens(self) -> None:
        model = find_model("LFM2-1.2B")
        assert count_kinds(model) == {"short convolution": 10, "full attention": 6}
        assert model.state_bytes == 10 * 2 * 2048 * 2

    def test_minimax_text_01_has_lightning_in_seven_of_eight(self) -> None:
        model = find_model("MiniMax-Text-01")
        assert find_group(model, "linear attention").count == 70
        assert model.state_bytes == 70 * 64 * 128 * 128 * 4
        assert model.kv_bytes_per_token == 10 * 8 * 256 * 2

    def test_kimi_linear_mixes_states_and_latents(self) -> None:
        model = find_model("Kimi-Linear-48B-A3B-Instruct")
        assert model.kv_bytes_per_token == 7 * 576 * 2
        assert find_group(model, "linear attention").count == 20


class TestOthers:
    def test_nemotron_super_has_attention_in_49_of_80_layers(self) -> None:
        model = find_model("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
        assert count_kinds(model) == {"full attention": 49, "no cache": 31}
        assert model.kv_bytes_per_token == 49 * 8 * 256 * 2

    def test_cross_attention_keeps_the_keys_of_a_picture_once(self) -> None:
        text = {
            **LLAMA,
            "model_type": "mllama_text_model",
            "num_hidden_layers": 40,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        }
        vision = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}
        model = read_config(
            {"model_type": "mllama", "text_config": text, "vision_config": vision}, name="Llama 3.2 Vision"
        )
        assert count_kinds(model) == {"full attention": 32, "cross attention": 8}
        assert model.kv_bytes_per_token == 32 * 8 * 256 * 2
        assert model.kv_bytes_window == 8 * 8 * 256 * 2 * (40 * 40 + 1) * 4

    def test_encoders_keep_nothing(self) -> None:
        model = find_model("BAAI/bge-base-en-v1.5")
        assert (model.task, model.compute_kv_bytes(512)) == ("embed", 0)

    @pytest.mark.parametrize(
        "name", ["DeepSeek-V4-Flash", "Qwen3.5-27B", "gemma-4-E4B-it", "Kimi-K3", "Nemotron-3-Nano-4B", "gpt-oss-20b"]
    )
    def test_groups_add_up_to_the_sums(self, name: str) -> None:
        model = find_model(name)
        assert sum(group.count for group in model.layers) == model.num_layers
        assert round(sum(group.kv_bytes_per_token for group in model.layers)) == model.kv_bytes_per_token
        assert sum(group.kv_bytes_window for group in model.layers) == model.kv_bytes_window
        assert sum(group.state_bytes for group in model.layers) == model.state_bytes
