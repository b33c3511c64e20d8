from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFValueType, LlamaFileType
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts import gguf
from bedplate.facts.gguf import read_gguf, read_header
from bedplate.values import Model, from_json, to_json

Shape = tuple[int, ...]
Make = Callable[..., Path]

DENSE = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}


def write(
    path: Path,
    arch: str = "llama",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, tuple[Shape, str]] | None = None,
    general: dict[str, Any] | None = None,
    vocabulary: int = 0,
    **options: Any,
) -> Path:
    """A small GGUF as the format's own package writes it; shapes are rows first, as numpy has them."""
    writer = GGUFWriter(path, arch, **options)
    for key, value in (general or {}).items():
        add(writer, key, value)
    for key, value in (fields if fields is not None else DENSE).items():
        add(writer, f"{arch}.{key}", value)
    if vocabulary:
        writer.add_token_list([f"token {number} é" for number in range(vocabulary)])
        writer.add_token_scores([0.5] * vocabulary)
    for name, (shape, kind) in (tensors or {"token_embd.weight": ((16, 64), "F16")}).items():
        ggml = GGMLQuantizationType[kind]
        block, block_bytes = GGML_QUANT_SIZES[ggml]
        row_bytes = shape[-1] // block * block_bytes
        writer.add_tensor(name, np.zeros((*shape[:-1], row_bytes), dtype=np.uint8), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(*args: Any, name: str = "model-under-test.gguf", **kwargs: Any) -> Path:
        return write(tmp_path / name, *args, **kwargs)

    return build


def refused(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_gguf(path)
    return caught.value


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int = 0, fields: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + body


ARCHITECTURE = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")


class TestRealFile:
    def test_agrees_with_the_reference_gguf_reader(self, builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Its many thousand slices are several times as expensive with a memmap as with an array.
        mapped = np.memmap
        monkeypatch.setattr(np, "memmap", lambda *given, **named: mapped(*given, **named).view(np.ndarray))
        theirs = GGUFReader(builtin_gguf)
        ours = read_header(builtin_gguf)
        assert [(t.name, t.type, t.elements, t.bytes, t.offset + ours.data_offset) for t in ours.tensors] == [
            (t.name, t.tensor_type.name, t.n_elements, t.n_bytes, t.data_offset) for t in theirs.tensors
        ]
        assert ours.data_offset == theirs.data_offset
        for key, field in theirs.fields.items():
            if key.startswith("GGUF."):
                continue
            value = ours.fields[key]
            if field.types[0] == GGUFValueType.ARRAY:
                assert isinstance(value, gguf.GgufArray)
                assert value.length == len(field.data), key
            elif field.types[0] == GGUFValueType.STRING:
                assert value == field.contents().encode(), key
            else:
                assert value == field.contents(), key

    def test_is_the_built_in_model(self, builtin_gguf: Path) -> None:
        model = read_gguf(builtin_gguf, origin="built in")
        assert model.name == "SmolLM2-135M-Instruct"
        assert model.architecture == "llama"
        assert model.task == "generate"
        assert (model.parameters, model.active_parameters) == (134_515_008, 134_515_008)
        assert model.weight_bytes == 96_576_768
        assert model.quantization == "Q4_1"
        assert [(g.type, g.tensors) for g in model.tensor_groups] == [("Q4_1", 210), ("Q8_0", 1), ("F32", 61)]
        assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads) == (30, 576, 9, 3)
        assert (model.vocab_size, model.max_context) == (49_152, 8_192)
        assert model.kv_bytes_per_token == 30 * 3 * (64 + 64) * 2
        assert (model.kv_bytes_window, model.state_bytes) == (0, 0)
        assert model.has_chat_template
        assert model.chat_template is not None and model.chat_template.startswith("{% for message in messages %}")
        assert model.origin == "built in"
        assert model.files == (str(builtin_gguf),)
        assert from_json(Model, to_json(model)) == model

    def test_a_truncated_file_reports_actual_and_required_size(self, builtin_gguf: Path, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        with builtin_gguf.open("rb") as file:
            path.write_bytes(file.read(40_000_000))
        error = refused(path)
        full = builtin_gguf.stat().st_size
        assert error.message == f"cut.gguf is cut short: the header requires {full:,} bytes, the file has 40,000,000"
        assert error.hint is not None
        assert "download it again" in error.hint
        assert "free in" in error.hint

    def test_truncation_within_the_header_is_reported(self, builtin_gguf: Path, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        with builtin_gguf.open("rb") as file:
            path.write_bytes(file.read(1_000_000))
        assert "is cut short: its header alone needs" in refused(path).message

    @pytest.mark.measures
    def test_a_vocabulary_of_150_thousand_is_skipped_quickly(self, tmp_path: Path) -> None:
        words = b"".join(string(b"some token %d" % number) for number in range(150_000))
        body = ARCHITECTURE + string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 150_000) + words
        path = tmp_path / "vocabulary.gguf"
        path.write_bytes(header(0, 2, body))
        best = 9.9
        for _ in range(3):
            start = time.process_time()
            found = read_header(path)
            best = min(best, time.process_time() - start)
        assert found.vocabulary == 150_000
        # About 20 ms on an idle machine; the bound leaves room for a busy one.
        assert best < 0.25


class TestTypes:
    def test_the_type_table_matches_ggml(self) -> None:
        assert {number: (name, block, size) for number, (name, block, size) in gguf.GGML_TYPES.items()} | {
            # Newer in llama.cpp than in the package on the index.
            42: ("Q2_0", 64, 18)
        } == {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()} | {42: ("Q2_0", 64, 18)}

    def test_the_recipes_match_llama_cpp(self) -> None:
        theirs = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
        theirs.pop(int(LlamaFileType.GUESSED))
        assert {k: v for k, v in gguf._FILE_TYPES.items() if k != 41} == theirs | {38: "MXFP4"}

    @pytest.mark.parametrize("kind", [kind.name for kind in GGML_QUANT_SIZES])
    def test_each_type_has_its_size(self, make: Make, kind: str) -> None:
        path = make(tensors={"token_embd.weight": ((3, 512), kind), "output_norm.weight": ((64,), "F32")})
        model = read_gguf(path)
        theirs = {tensor.tensor_type.name: tensor.n_bytes for tensor in GGUFReader(path).tensors}
        if kind != "F32":
            assert {group.type: group.bytes for group in model.tensor_groups} == theirs
        assert model.weight_bytes == sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
        assert model.parameters == 3 * 512 + 64

    def test_an_unknown_type_is_named(self, tmp_path: Path) -> None:
        info = string(b"blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 32, 777, 0)
        path = tmp_path / "new.gguf"
        path.write_bytes(header(1, 1, ARCHITECTURE + info))
        error = refused(path)
        assert "blk.0.attn_q.weight in tensor type 777" in error.message
        assert error.hint is not None

    def test_a_retired_type_is_named(self, tmp_path: Path) -> None:
        info = string(b"blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 32, 31, 0)
        path = tmp_path / "old.gguf"
        path.write_bytes(header(1, 1, ARCHITECTURE + info))
        assert "Q4_0_4_4" in refused(path).message

    def test_the_recipe_takes_precedence_over_the_tensor_type(self, make: Make) -> None:
        tensors = {"token_embd.weight": ((16, 256), "Q4_K")}
        assert read_gguf(make(general={"general.file_type": 15}, tensors=tensors)).quantization == "Q4_K_M"
        assert read_gguf(make(tensors=tensors)).quantization == "Q4_K"

    def test_big_endian_files_are_read(self, make: Make) -> None:
        path = make(endianess=GGUFEndian.BIG, vocabulary=9)
        assert not read_header(path).little_endian
        model = read_gguf(path)
        assert (model.num_layers, model.vocab_size, model.num_kv_heads) == (4, 9, 2)

    def test_version_2_is_read(self, make: Make) -> None:
        path = make()
        content = bytearray(path.read_bytes())
        content[4] = 2
        path.write_bytes(content)
        assert read_gguf(path).num_layers == 4


class TestParameters:
    def test_active_parameters_count_only_active_experts(self, make: Make) -> None:
        path = make(
            "qwen3moe",
            fields=DENSE | {"expert_count": 8, "expert_used_count": 2},
            tensors={
                "token_embd.weight": ((100, 64), "F16"),
                "blk.0.attn_q.weight": ((64, 64), "F16"),
                "blk.0.ffn_gate_inp.weight": ((8, 64), "F32"),
                "blk.0.ffn_gate_exps.weight": ((8, 32, 64), "Q8_0"),
                "blk.0.ffn_up_exps.weight": ((8, 32, 64), "Q8_0"),
                "blk.0.ffn_down_exps.weight": ((8, 64, 32), "Q8_0"),
                "blk.0.ffn_up_shexp.weight": ((32, 64), "Q8_0"),
            },
        )
        model = read_gguf(path)
        rest, experts = 100 * 64 + 64 * 64 + 8 * 64 + 32 * 64, 3 * 8 * 32 * 64
        assert model.parameters == rest + experts
        assert model.active_parameters == rest + experts // 4
        assert (model.num_experts, model.num_experts_active) == (8, 2)

    def test_separate_expert_tensors_count_the_same(self, make: Make) -> None:
        tensors = {f"blk.0.ffn_up.{expert}.weight": ((32, 64), "F16") for expert in range(4)}
        path = make(fields=DENSE | {"expert_count": 4, "expert_used_count": 1}, tensors=tensors)
        assert (read_gguf(path).parameters, read_gguf(path).active_parameters) == (4 * 32 * 64, 32 * 64)

    def test_mtp_heads_encoders_and_tables_are_counted_separately(self, make: Make) -> None:
        path = make(
            "glm4moe",
            fields=DENSE | {"nextn_predict_layers": 1},
            tensors={
                "blk.2.attn_q.weight": ((64, 64), "F16"),
                "blk.3.nextn.eh_proj.weight": ((64, 128), "F16"),
                "v.blk.0.attn_q.weight": ((64, 64), "F16"),
                "rope_freqs.weight": ((32,), "F32"),
            },
        )
        model = read_gguf(path)
        assert model.parameters == 64 * 64
        assert model.num_layers == 3
        assert model.weight_bytes == 2 * (64 * 64 + 64 * 128 + 64 * 64) + 4 * 32

    def test_vocabulary_falls_back_to_the_tokens_and_then_to_the_embeddings(self, make: Make) -> None:
        assert read_gguf(make(fields=DENSE | {"vocab_size": 7}, vocabulary=5)).vocab_size == 7
        assert read_gguf(make(vocabulary=5)).vocab_size == 5
        assert read_gguf(make()).vocab_size == 16


class TestCache:
    """What a token costs; the figures are computed here by hand from the shapes."""

    def cache(self, make: Make, arch: str, **fields: Any) -> tuple[int, int, int]:
        named = {key.replace("__", "."): value for key, value in fields.items()}
        model = read_gguf(make(arch, fields=DENSE | named))
        return model.kv_bytes_per_token, model.kv_bytes_window, model.state_bytes

    def test_grouped_heads_share_the_cache(self, make: Make) -> None:
        assert self.cache(make, "llama") == (4 * 2 * (8 + 8) * 2, 0, 0)

    def test_key_and_value_lengths_may_differ(self, make: Make) -> None:
        lengths = {"attention__key_length": 24, "attention__value_length": 16}
        assert self.cache(make, "llama", **lengths) == (4 * 2 * (24 + 16) * 2, 0, 0)

    def test_without_kv_heads_every_head_has_its_own(self, make: Make) -> None:
        fields = {key: value for key, value in DENSE.items() if key != "attention.head_count_kv"}
        assert read_gguf(make(fields=fields)).kv_bytes_per_token == 4 * 8 * (8 + 8) * 2

    def test_heads_may_differ_by_layer(self, make: Make) -> None:
        per_layer = {"attention__head_count": [8, 8, 4, 8], "attention__head_count_kv": [2, 0, 1, 4]}
        assert self.cache(make, "deci", **per_layer) == ((2 + 0 + 1 + 4) * (8 + 8) * 2, 0, 0)

    def test_a_compressed_latent_is_kept_once_for_all_heads(self, make: Make) -> None:
        latent = {
            "attention__head_count_kv": 1,
            "attention__kv_lora_rank": 512,
            "rope__dimension_count": 64,
            "attention__key_length": 576,
            "attention__value_length": 512,
            "attention__key_length_mla": 192,
            "attention__value_length_mla": 128,
        }
        assert self.cache(make, "deepseek2", **latent) == (4 * (512 + 64) * 2, 0, 0)

    def test_old_conversions_of_latent_models_keep_full_keys_and_values(self, make: Make) -> None:
        full = {
            "attention__head_count_kv": 8,
            "attention__kv_lora_rank": 512,
            "attention__key_length": 192,
            "attention__value_length": 128,
        }
        assert self.cache(make, "deepseek2", **full) == (4 * 8 * (192 + 128) * 2, 0, 0)

    @pytest.mark.parametrize(
        ("arch", "layers", "windowed"),
        [("gemma2", 6, 3), ("gemma3", 12, 10), ("gpt-oss", 6, 3), ("cohere2", 8, 6), ("olmo2", 8, 6), ("plamo3", 8, 7)],
    )
    def test_windows_depend_on_the_architecture(self, make: Make, arch: str, layers: int, windowed: int) -> None:
        token = 2 * (8 + 8) * 2
        found = self.cache(make, arch, block_count=layers, attention__sliding_window=128)
        assert found == ((layers - windowed) * token, windowed * token * 128, 0)

    def test_chunks_of_llama_4_are_windows_of_8192(self, make: Make) -> None:
        token = 2 * (8 + 8) * 2
        found = self.cache(make, "llama4", context_length=1_000_000)
        assert found == (token, 3 * token * 8192, 0)
        assert self.cache(make, "llama4", attention__sliding_window=0) == (4 * token, 0, 0)

    def test_a_window_is_never_longer_than_the_context(self, make: Make) -> None:
        token = 2 * (8 + 8) * 2
        assert self.cache(make, "gemma2", context_length=100) == (2 * token, 2 * token * 100, 0)

    def test_the_files_window_pattern_takes_precedence(self, make: Make) -> None:
        token = 2 * (8 + 8) * 2
        marks = {"attention__sliding_window": 10, "attention__sliding_window_pattern": [True, True, False, True]}
        assert self.cache(make, "gemma4", **marks) == (token, 3 * token * 10, 0)
        period = {"attention__sliding_window": 10, "attention__sliding_window_pattern": 4}
        assert self.cache(make, "gemma3", **period) == (token, 3 * token * 10, 0)

    def test_windowed_layers_may_have_heads_of_another_length(self, make: Make) -> None:
        found = self.cache(
            make,
            "gemma4",
            attention__sliding_window=10,
            attention__sliding_window_pattern=[True, True, True, False],
            attention__key_length=32,
            attention__value_length=32,
            attention__key_length_swa=16,
            attention__value_length_swa=16,
        )
        assert found == (2 * 64 * 2, 3 * 2 * 32 * 2 * 10, 0)

    def test_layers_that_share_a_cache_have_none_of_their_own(self, make: Make) -> None:
        token = 2 * (8 + 8) * 2
        shared = {"attention__sliding_window": 10, "attention__shared_kv_layers": 2, "block_count": 10}
        assert self.cache(make, "gemma3n", **shared) == (token, 7 * token * 10, 0)

    @pytest.mark.parametrize(("arch", "dense"), [("cohere2", 3), ("smallthinker", 0)])
    def test_the_position_of_the_full_attention_layer_in_a_period(self, make: Make, arch: str, dense: int) -> None:
        heads = [1, 2, 4, 8]
        whole = heads[dense]
        found = self.cache(make, arch, attention__sliding_window=4096, attention__head_count_kv=heads)
        assert found == (whole * (8 + 8) * 2, (15 - whole) * (8 + 8) * 2 * 4096, 0)

    def test_sizes_beyond_64_bits_are_rejected(self, make: Make) -> None:
        wide = {"attention.head_count_kv": 2**24, "attention.key_length": 2**24, "attention.sliding_window": 2**31}
        fields = {key: value for key, value in DENSE.items() if key != "context_length"}
        assert refused(make("gemma2", fields=fields | wide)).cause == "its sizes exceed any computer's memory"

    def test_a_window_that_llama_cpp_ignores_does_not_shrink_the_cache(self, make: Make) -> None:
        assert self.cache(make, "phi3", attention__sliding_window=10) == (4 * 2 * (8 + 8) * 2, 0, 0)

    def test_state_space_models_have_a_state_and_no_cache(self, make: Make) -> None:
        ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__time_step_rank": 4}
        ssm |= {"attention__head_count": 0, "attention__head_count_kv": 0}
        assert self.cache(make, "mamba", **ssm) == (0, 0, 4 * 4 * (3 * 128 + 128 * 16))

    def test_hybrids_have_states_and_caches(self, make: Make) -> None:
        ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 2}
        state, token = 4 * (3 * (128 + 2 * 2 * 16) + 128 * 16), 2 * (8 + 8) * 2
        layers = {"attention__head_count_kv": [0, 0, 2, 0]}
        assert self.cache(make, "granitehybrid", **ssm, **layers) == (token, 0, 3 * state)
        assert self.cache(make, "jamba", **ssm, **layers) == (token, 0, 3 * state)
        assert self.cache(make, "falcon-h1", **ssm) == (4 * token, 0, 4 * state)
        assert self.cache(make, "qwen3next", **ssm) == (token, 0, 3 * state)
        assert self.cache(make, "qwen3next", **ssm, full_attention_interval=2) == (2 * token, 0, 2 * state)
        widths = {"feed_forward_length": [0, 256, 0, 0]}
        assert self.cache(make, "nemotron_h", **ssm, **layers, **widths) == (token, 0, 2 * state)

    def test_short_convolutions_have_a_state(self, make: Make) -> None:
        fields = {"shortconv__l_cache": 3, "attention__head_count_kv": [0, 2, 0, 0]}
        assert self.cache(make, "lfm2", **fields) == (2 * (8 + 8) * 2, 0, 3 * 4 * 64 * 2)

    def test_rwkv_models_have_a_state(self, make: Make) -> None:
        fields = {"wkv__head_size": 8, "attention__head_count": 0, "attention__head_count_kv": 0}
        assert self.cache(make, "rwkv7", **fields) == (0, 0, 4 * 4 * (2 * 64 + 64 * 8))

    def test_encoders_have_no_cache(self, make: Make) -> None:
        assert self.cache(make, "bert") == (0, 0, 0)


class TestTask:
    @pytest.mark.parametrize("arch", ["bert", "nomic-bert", "jina-bert-v2", "gemma-embedding", "t5encoder"])
    def test_embedding_architectures_have_the_embed_task(self, make: Make, arch: str) -> None:
        assert read_gguf(make(arch)).task == "embed"

    @pytest.mark.parametrize(("pooling", "task"), [(0, "generate"), (1, "embed"), (3, "embed"), (4, "classify")])
    def test_pooling_determines_the_task(self, make: Make, pooling: int, task: str) -> None:
        assert read_gguf(make("qwen3", fields=DENSE | {"pooling_type": pooling})).task == task

    def test_a_chat_template_is_detected(self, make: Make) -> None:
        assert not read_gguf(make()).has_chat_template
        assert read_gguf(make(general={"tokenizer.chat_template": "{{ messages }}"})).has_chat_template
        assert read_gguf(make(general={"tokenizer.chat_template": "x" * 100_000})).has_chat_template
        assert read_gguf(make(general={"tokenizer.chat_template": "{{ messages }}"})).chat_template == "{{ messages }}"
        assert read_gguf(make(general={"tokenizer.chat_template": "x" * 100_000})).chat_template is None


class TestName:
    @pytest.mark.parametrize(
        ("file", "name"),
        [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
            ("Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B"),
            ("gemma-3-4b-it-q4_0.gguf", "gemma-3-4b-it"),
            ("Mistral-7B-v0.3-BF16.gguf", "Mistral-7B-v0.3"),
            ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b"),
            ("phi-4.IQ3_XXS.gguf", "phi-4"),
        ],
    )
    def test_name_is_the_file_name_without_the_quantization(self, make: Make, file: str, name: str) -> None:
        assert read_gguf(make(name=file, general={"general.name": "Something Else"})).name == name

    def test_name_comes_from_the_header_if_the_file_name_is_generic(self, make: Make) -> None:
        general = {"general.basename": "Qwen3", "general.size_label": "8B", "general.finetune": "Instruct"}
        assert read_gguf(make(name="model.gguf", general=general)).name == "Qwen3-8B-Instruct"
        assert read_gguf(make(name="ggml-model-q4_0.gguf", general={"general.name": "My Model"})).name == "My Model"
        blob = "sha256-" + "ab" * 32
        assert read_gguf(make(name=blob, general={"general.name": "Llama 3.2 1B"})).name == "Llama 3.2 1B"

    def test_control_characters_are_removed(self, make: Make) -> None:
        model = read_gguf(make(name="model.gguf", general={"general.name": "a\x1b[31mred\nline"}))
        assert model.name == "a·[31mred·line"


class TestSplit:
    @pytest.fixture
    def parts(self, make: Make, tmp_path: Path) -> list[Path]:
        tensors = {f"blk.{layer}.attn_q.weight": ((64, 64), "F16") for layer in range(4)}
        make(name="big-Q4_K_M.gguf", tensors=tensors, vocabulary=11, split_max_tensors=2)
        found = sorted(tmp_path.glob("big-Q4_K_M-*.gguf"))
        assert [path.name for path in found] == ["big-Q4_K_M-00001-of-00002.gguf", "big-Q4_K_M-00002-of-00002.gguf"]
        return found

    def test_any_part_opens_the_whole_model(self, parts: list[Path]) -> None:
        models = [read_gguf(part) for part in parts]
        assert models[0] == models[1]
        assert models[0].name == "big"
        assert models[0].files == tuple(str(part) for part in parts)
        assert models[0].parameters == 4 * 64 * 64
        assert models[0].weight_bytes == 4 * 64 * 64 * 2
        assert models[0].vocab_size == 11

    def test_missing_parts_are_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        error = refused(parts[0])
        assert "1 of 2 parts" in error.message
        assert "big-Q4_K_M-00002-of-00002.gguf" in error.message

    def test_a_part_that_is_cut_short_is_named(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[1].read_bytes()[:-4096])
        assert refused(parts[0]).message.startswith("big-Q4_K_M-00002-of-00002.gguf is cut short: the header requires")

    def test_swapped_parts_are_detected(self, parts: list[Path]) -> None:
        first, second = (part.read_bytes() for part in parts)
        parts[0].write_bytes(second)
        parts[1].write_bytes(first)
        assert "a different part than its name" in refused(parts[0]).message

    def test_a_duplicate_part_is_detected(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[0].read_bytes())
        refused(parts[0])

    def test_missing_tensors_are_detected(self, parts: list[Path]) -> None:
        content = bytearray(parts[0].read_bytes())
        value = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        content[value] = 5
        parts[0].write_bytes(content)
        assert "hold 4 tensors, but the first part states 5" in refused(parts[1]).message

    def test_a_renamed_part_is_rejected_with_a_hint(self, parts: list[Path]) -> None:
        renamed = parts[0].with_name("mine.gguf")
        parts[0].rename(renamed)
        assert "one of 2 parts" in refused(renamed).message


class TestNotAModel:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
            (b"<!DOCTYPE html>\n<html>", "web page"),
            (b"\n <html><body>404", "web page"),
            (struct.pack("<Q", 20) + b'{"__metadata__":{}}   ', "safetensors"),
            (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
            (b"\x80\x02}q\x00.", "pickle"),
            (b"tjgg" + b"\0" * 40, "before GGUF"),
            (b"\0" * 4096, "zeros"),
            (b"Entry not found", "text that begins with “Entry not found”"),
            (b"\xff\xfe\x01\x02\x03", "bytes ff fe 01 02"),
        ],
    )
    def test_the_error_names_the_likely_file_type(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "thing.gguf"
        path.write_bytes(content)
        error = refused(path)
        assert error.message.startswith("thing.gguf is not a GGUF file: it ")
        assert words in error.message
        assert error.hint

    def test_a_folder_is_rejected(self, tmp_path: Path) -> None:
        assert "is a folder" in refused(tmp_path).message

    def test_a_missing_file_is_rejected(self, tmp_path: Path) -> None:
        assert "there is no file" in refused(tmp_path / "absent.gguf").message
        assert "there is no file" in refused(tmp_path / "zero\0byte.gguf").message

    def test_a_pipe_is_rejected_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        assert "not a regular file" in refused(tmp_path / "pipe.gguf").message

    def test_version_1_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "first.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<III", 1, 0, 0))
        assert "version 1" in refused(path).message

    def test_a_newer_version_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "future.gguf"
        path.write_bytes(header(version=9))
        error = refused(path)
        assert "version 9" in error.message
        assert error.hint is not None
        assert "update bedplate" in error.hint

    def test_companion_files_are_rejected(self, make: Make) -> None:
        assert "vision or audio encoder" in refused(make("clip", fields={"vision.block_count": 2})).message
        assert "LoRA adapter" in refused(make(general={"general.type": "adapter"})).message

    def test_a_vocabulary_alone_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "ggml-vocab.gguf"
        path.write_bytes(header(0, 1, ARCHITECTURE))
        assert "no weights" in refused(path).message

    def test_a_model_without_architecture_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "bare.gguf"
        info = string(b"a") + struct.pack("<IQIQ", 1, 1, 0, 0)
        path.write_bytes((header(1, 0, info) + b"\0" * 64)[:200])
        assert refused(path).cause == "general.architecture is not in the header"


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 2**63
HOSTILE = {
    "tensors without end": header(2**40, 1, ARCHITECTURE),
    "millions of tensors": header(5_000_000, 1, ARCHITECTURE),
    "more tensors than bytes": header(200_000, 1, ARCHITECTURE),
    "fields without end": header(0, HUGE, ARCHITECTURE),
    "a key of 2^63 bytes": header(0, 1, struct.pack("<Q", HUGE) + b"\0" * 64),
    "a string of 2^63 bytes": header(0, 1, field(b"general.name", 8, struct.pack("<Q", HUGE))),
    "a string of 2^64 - 1 bytes": header(0, 1, field(b"general.name", 8, struct.pack("<Q", 2**64 - 1))),
    "an array of 2^63 numbers": header(0, 1, field(b"a.b", 9, struct.pack("<IQ", 4, HUGE))),
    "an array of 2^63 strings": header(0, 1, field(b"a.b", 9, struct.pack("<IQ", 8, HUGE))),
    "an array whose string is 2^63 bytes": header(0, 1, field(b"a.b", 9, struct.pack("<IQQ", 8, 3, HUGE)) + b"\0" * 64),
    "strings that lead backwards": header(0, 1, field(b"a.b", 9, struct.pack("<IQQ", 8, 3, 2**64 - 8)) + b"\0" * 64),
    "arrays of arrays": header(0, 1, field(b"a.b", 9, struct.pack("<IQ", 9, 1) * 1000)),
    "a kind that is not": header(0, 1, field(b"a.b", 99, b"\0" * 64)),
    "an array of a kind that is not": header(0, 1, field(b"a.b", 9, struct.pack("<IQ", 99, 1) + b"\0" * 64)),
    "a key twice": header(0, 2, ARCHITECTURE * 2),
    "a key that is not UTF-8": header(0, 1, field(b"\xff\xfe", 0, b"\1")),
    "alignment zero": header(0, 1, field(b"general.alignment", 4, struct.pack("<I", 0))),
    "alignment three": header(0, 1, field(b"general.alignment", 4, struct.pack("<I", 3))),
    "alignment in words": header(0, 1, field(b"general.alignment", 8, string(b"32"))),
    "a tensor twice": header(2, 1, ARCHITECTURE + tensor(b"t") + tensor(b"t", offset=128) + b"\0" * 999),
    "a tensor that is not UTF-8": header(1, 1, ARCHITECTURE + tensor(b"\xc3\x28") + b"\0" * 999),
    "dimensions that overflow": header(1, 1, ARCHITECTURE + tensor(b"t", (2**32, 2**32)) + b"\0" * 999),
    "a tensor of 2^62 numbers and more in four dimensions": header(
        1, 1, ARCHITECTURE + tensor(b"t", (2**16, 2**16, 2**16, 2**16)) + b"\0" * 999
    ),
    "a tensor of 2^61 numbers": header(1, 1, ARCHITECTURE + tensor(b"t", (2**61,)) + b"\0" * 999),
    "five dimensions": header(1, 1, ARCHITECTURE + tensor(b"t", (1, 1, 1, 1, 1)) + b"\0" * 999),
    "dimensions without end": header(1, 1, ARCHITECTURE + string(b"t") + struct.pack("<I", 2**32 - 1) + b"\0" * 999),
    "rows that are no whole blocks": header(1, 1, ARCHITECTURE + tensor(b"t", (33,), 2) + b"\0" * 999),
    "tensors over each other": header(2, 1, ARCHITECTURE + tensor(b"t") + tensor(b"u", offset=32) + b"\0" * 999),
    "a tensor off the grid": header(1, 1, ARCHITECTURE + tensor(b"t", offset=5) + b"\0" * 999),
    "a tensor far away": header(1, 1, ARCHITECTURE + tensor(b"t", offset=2**63) + b"\0" * 999),
    "layers without end": header(
        1, 2, ARCHITECTURE + field(b"llama.block_count", 10, struct.pack("<Q", HUGE)) + tensor(b"t") + b"\0" * 999
    ),
    "minus one layer": header(
        1, 2, ARCHITECTURE + field(b"llama.block_count", 5, struct.pack("<i", -1)) + tensor(b"t") + b"\0" * 999
    ),
    "more experts at work than there are": header(
        1,
        4,
        ARCHITECTURE
        + field(b"llama.block_count", 4, struct.pack("<I", 1))
        + field(b"llama.expert_count", 4, struct.pack("<I", 2))
        + field(b"llama.expert_used_count", 4, struct.pack("<I", 3))
        + tensor(b"t")
        + b"\0" * 999,
    ),
    "nothing but a magic": b"GGUF",
}


HOSTILE_WORDS = {
    "tensors without end": "more than any model has",
    "millions of tensors": "more than any model has",
    "more tensors than bytes": "header alone needs",
    "fields without end": "more than any model has",
    "a key of 2^63 bytes": "a length that no file can have",
    "a string of 2^63 bytes": "a length that no file can have",
    "a string of 2^64 - 1 bytes": "a length that no file can have",
    "an array of 2^63 numbers": "a length that no file can have",
    "an array of 2^63 strings": "more than any vocabulary has",
    "an array whose string is 2^63 bytes": "a length that no file can have",
    "strings that lead backwards": "a length that no file can have",
    "arrays of arrays": "array of arrays",
    "a kind that is not": "unknown type 99",
    "an array of a kind that is not": "unknown type 99",
    "a key twice": "general.architecture occurs twice",
    "a key that is not UTF-8": "a key that is not UTF-8",
    "alignment zero": "power of two",
    "alignment three": "power of two",
    "alignment in words": "power of two",
    "a tensor twice": "the tensor t occurs twice",
    "a tensor that is not UTF-8": "a tensor name that is not UTF-8",
    "dimensions that overflow": "more weights than a file can hold",
    "a tensor of 2^62 numbers and more in four dimensions": "more weights than a file can hold",
    "a tensor of 2^61 numbers": "would take",
    "five dimensions": "5 dimensions",
    "dimensions without end": "4,294,967,295 dimensions",
    "rows that are no whole blocks": "not whole blocks of Q4_0",
    "tensors over each other": "u overlaps another",
    "a tensor off the grid": "aligned to 32 bytes",
    "a tensor far away": "would take",
    "layers without end": "llama.block_count is 9223372036854775808",
    "minus one layer": "llama.block_count is -1",
    "more experts at work than there are": "3 of 2 experts",
    "nothing but a magic": "header alone needs",
}


@pytest.mark.measures
@pytest.mark.parametrize("what", HOSTILE)
def test_a_malicious_header_is_rejected_quickly_without_memory(tmp_path: Path, what: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[what])
    tracemalloc.start()
    start = time.process_time()
    error = refused(path)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "hostile.gguf" in error.message
    assert HOSTILE_WORDS[what] in f"{error.message}: {error.cause}"
    assert seconds < 1
    assert peak < 4 << 20


@pytest.mark.measures
def test_a_large_file_of_tiny_strings_is_rejected_early(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header(0, 1, field(b"a.b", 9, struct.pack("<IQ", 8, 2**30))))
    with path.open("r+b") as file:
        file.truncate(16 << 30)
    start = time.process_time()
    error = refused(path)
    assert time.process_time() - start < 1
    assert error.cause is not None
    assert "more than any vocabulary" in error.cause


def test_a_header_of_gigabytes_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header(0, 1, field(b"a.b", 8, struct.pack("<Q", 8 << 30))))
    with path.open("r+b") as file:
        file.truncate(16 << 30)
    tracemalloc.start()
    error = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.cause is not None
    assert "header is longer" in error.cause
    assert peak < 4 << 20


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write(
        tmp_path_factory.mktemp("valid") / "valid.gguf",
        "gemma3",
        fields=DENSE
        | {
            "attention.sliding_window": 32,
            "attention.sliding_window_pattern": [True, False, True, True],
            "expert_count": 4,
            "expert_used_count": 2,
            "ssm.state_size": 16,
            "attention.key_length": 8,
        },
        general={"general.name": "Fuzz Me", "general.file_type": 15, "general.tags": ["a", "b"]},
        tensors={
            "token_embd.weight": ((9, 64), "F16"),
            "blk.0.ffn_up_exps.weight": ((4, 2, 256), "Q4_K"),
            "blk.3.attn_q.weight": ((4, 64), "Q8_0"),
        },
        vocabulary=9,
    )
    return path.read_bytes()


class TestFuzz:
    def check(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        try:
            model = read_gguf(path)
        except UsageError as error:
            assert error.message
            assert error.message.isprintable()
        else:
            assert from_json(Model, to_json(model)) == model
            assert model.weight_bytes <= len(content)

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_truncation_is_a_usage_error(self, tmp_path: Path, valid: bytes, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(valid) - 1))
        self.check(tmp_path / "f.gguf", valid[:length])

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=6),
        cut=st.one_of(st.none(), st.floats(0, 1)),
    )
    @example(flips=[(0.0, 1)], cut=None)
    def test_any_flipped_bytes_give_a_model_or_a_usage_error(
        self, tmp_path: Path, valid: bytes, flips: list[tuple[float, int]], cut: float | None
    ) -> None:
        # Zeros of weights fill the end of the file; flips belong in its header.
        span = min(len(valid), 1200)
        content = bytearray(valid)
        for where, mask in flips:
            content[int(where * span)] ^= mask
        self.check(tmp_path / "f.gguf", bytes(content if cut is None else content[: int(cut * len(content))]))

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(where=st.integers(4, 1150), value=st.integers(0, 2**64 - 1))
    def test_any_replaced_number_gives_a_model_or_a_usage_error(
        self, tmp_path: Path, valid: bytes, where: int, value: int
    ) -> None:
        content = bytearray(valid)
        content[where : where + 8] = struct.pack("<Q", value)
        self.check(tmp_path / "f.gguf", bytes(content))

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(noise=st.binary(max_size=300))
    def test_noise_after_the_magic_is_a_usage_error(self, tmp_path: Path, noise: bytes) -> None:
        self.check(tmp_path / "f.gguf", b"GGUF\x03\0\0\0" + noise)
