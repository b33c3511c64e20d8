"""Model folders of Hugging Face, MLX, ExLlama and ONNX Runtime, written here in small."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bedplate.errors import UsageError
from bedplate.facts.model_folder import find_part, read_folder
from bedplate.facts.onnx import read_onnx

SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
FEED = {"gate_proj": (16, 8), "up_proj": (16, 8), "down_proj": (8, 16)}


def list_tensors(layers: int = 2) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 8),
        "lm_head.weight": (32, 8),
        "model.norm.weight": (8,),
    }
    for layer in range(layers):
        base = f"model.layers.{layer}"
        found |= {f"{base}.self_attn.{name}.weight": shape for name, shape in SHAPES.items()}
        found |= {f"{base}.mlp.{name}.weight": shape for name, shape in FEED.items()}
        found |= {f"{base}.input_layernorm.weight": (8,), f"{base}.post_attention_layernorm.weight": (8,)}
    return found


def write(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", metadata: dict[str, str] | None = None
) -> int:
    width = {"BF16": 2, "F32": 4, "U32": 4, "F16": 2, "I32": 4}[dtype]
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        size = width
        for side in shape:
            size *= side
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * end)
    return end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(SMALL))
    return made


class TestComplete:
    def test_one_file_is_read(self, folder: Path) -> None:
        size = write(folder / "model.safetensors", list_tensors(), metadata={"format": "pt"})
        model = read_folder(folder)
        assert (model.name, model.format, model.quantization) == ("tiny-llama", "safetensors", "BF16")
        assert model.weight_bytes == size == 2 * model.parameters
        assert model.files == (str(folder / "model.safetensors"),)
        assert {part.name: part.bytes for part in model.parts} == {
            "embedding": 512, "output": 512, "norms": 80, "attention": 2 * 2 * 192, "mlp": 2 * 2 * 384,
        }  # fmt: skip

    def test_shards_are_read(self, folder: Path) -> None:
        names = list(list_tensors())
        half = {name: list_tensors()[name] for name in names[:7]}, {name: list_tensors()[name] for name in names[7:]}
        sizes = [write(folder / f"model-0000{n}-of-00002.safetensors", half[n - 1]) for n in (1, 2)]
        index = {name: f"model-0000{1 if name in half[0] else 2}-of-00002.safetensors" for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert read_folder(folder).weight_bytes == sum(sizes)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(UsageError) as caught:
            read_folder(folder)
        assert "1 of 2 files of the model are not in" in caught.value.message

    def test_a_configuration_without_weights_is_computed(self, folder: Path) -> None:
        model = read_folder(folder)
        assert model.files == () and model.weight_bytes == 2 * model.parameters

    def test_mtp_heads_and_vision_encoders_are_counted_separately(self, folder: Path) -> None:
        extra = {"model.layers.2.mlp.up_proj.weight": (16, 8), "vision_tower.blocks.0.attn.weight": (8, 8)}
        write(folder / "model.safetensors", {**list_tensors(), **extra})
        model = read_folder(folder)
        assert (model.mtp_parameters, model.mtp_weight_bytes) == (128, 256)
        assert (model.vision_parameters, model.vision_weight_bytes) == (64, 128)
        assert model.weight_bytes == 2 * (model.parameters + 64)

    def test_files_override_the_count_of_an_unknown_architecture(self, folder: Path) -> None:
        write(folder / "model.safetensors", {**list_tensors(), "model.layers.0.novelty.weight": (64, 64)})
        assert (
            read_folder(folder).parameters
            == sum(a * b for a, b in [(32, 8), (32, 8)]) + 8 + 2 * (192 + 384 + 16) + 4096
        )

    def test_an_encoder_decoder_model_is_read(self, folder: Path) -> None:
        """A complete T5 with two layers in encoder and decoder, with the tensor names of real files."""
        config = {
            "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True,
            "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32, "n_positions": 64,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        shapes: dict[str, tuple[int, ...]] = {"shared.weight": (32, 8)}
        for side, blocks in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
            shapes[f"{side}.final_layer_norm.weight"] = (8,)
            shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, 2)
            for layer in range(2):
                base = f"{side}.block.{layer}.layer"
                for place, block in enumerate(blocks):
                    shapes |= {f"{base}.{place}.{block}.{name}.weight": (8, 8) for name in "qkvo"}
                    shapes[f"{base}.{place}.layer_norm.weight"] = (8,)
                last = f"{base}.{len(blocks)}"
                shapes |= {f"{last}.DenseReluDense.wi.weight": (16, 8), f"{last}.DenseReluDense.wo.weight": (8, 16)}
                shapes[f"{last}.layer_norm.weight"] = (8,)
        size = write(folder / "model.safetensors", shapes)
        model = read_folder(folder)
        assert model.weight_bytes == size == 2 * model.parameters
        assert sum(part.bytes for part in model.parts) == size
        encoder = next(part for part in model.parts if part.name == "encoder")
        assert encoder.bytes == 2 * encoder.parameters
        assert encoder.active_parameters == 0

    def test_the_chat_template_is_read(self, folder: Path) -> None:
        write(folder / "model.safetensors", list_tensors())
        assert not read_folder(folder).has_chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        assert read_folder(folder).chat_template == "{{ messages }}"
        (folder / "chat_template.jinja").write_text("{{ other }}")
        assert read_folder(folder).chat_template == "{{ other }}"

    def test_the_name_of_a_snapshot_is_its_repository(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(SMALL))
        assert read_folder(snapshot).name == "me/tiny"


class TestQuantized:
    @pytest.mark.parametrize(
        ("text", "context"),
        [('{"max_seq_length": 40}', 40), ('{"max_seq_length": 99}', 64), ('{"max_seq_length": null}', 64), ("[]", 64)],
    )
    def test_the_longest_input_of_sentence_transformers_limits_the_context(
        self, folder: Path, text: str, context: int
    ) -> None:
        (folder / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 64}))
        (folder / "sentence_bert_config.json").write_text(text)
        assert read_folder(folder).max_context == context
        write(folder / "model.safetensors", list_tensors())
        assert read_folder(folder).max_context == context

    def test_mlx_quantization_is_read(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**SMALL, "quantization": {"group_size": 64, "bits": 4}}))
        size = write(
            folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": (16, 1)}, "U32", {"format": "mlx"}
        )
        model = read_folder(folder)
        assert (model.format, model.quantization, model.weight_bytes) == ("mlx", "4-bit", size)

    def test_mlx_without_quantization_is_known_by_its_header(self, folder: Path) -> None:
        write(folder / "model.safetensors", list_tensors(), metadata={"format": "mlx"})
        assert read_folder(folder).format == "mlx"

    @pytest.mark.parametrize("method", ["exl2", "exl3"])
    def test_exllama_quantization_is_read(self, folder: Path, method: str) -> None:
        (folder / "config.json").write_text(
            json.dumps({**SMALL, "quantization_config": {"quant_method": method, "bits": 4.25}})
        )
        write(folder / "output.safetensors", {"model.layers.0.mlp.up_proj.q_weight": (16, 2)}, "I32")
        model = read_folder(folder)
        assert (model.format, model.quantization) == (method, "4.25 bpw")
        assert model.parameters > 0 and model.weight_bytes == 128

    def test_modelopt_states_it_in_a_separate_file(self, folder: Path) -> None:
        (folder / "hf_quant_config.json").write_text(
            json.dumps(
                {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
            )
        )
        details = read_folder(folder).quantization_details
        assert details is not None
        assert (details.method, details.group_size, details.kv_cache) == ("nvfp4", 16, "FP8")

    def test_a_quantization_stated_only_in_the_name(self, tmp_path: Path) -> None:
        folder = tmp_path / "tiny-NVFP4"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SMALL))
        assert read_folder(folder).quantization == "NVFP4"


class TestRefused:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
    def test_pickles_are_rejected(self, folder: Path, name: str) -> None:
        (folder / name).write_bytes(b"\x80\x02")
        with pytest.raises(UsageError, match="never opens one") as caught:
            read_folder(folder)
        assert "safetensors" in str(caught.value.hint)

    def test_weights_without_a_configuration_are_rejected(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", list_tensors())
        with pytest.raises(UsageError, match=r"no config\.json"):
            read_folder(tmp_path)

    def test_a_damaged_shard_is_rejected(self, folder: Path) -> None:
        write(folder / "model.safetensors", list_tensors())
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(500)
        with pytest.raises(UsageError, match="cut short"):
            read_folder(folder)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null"])
    def test_an_invalid_configuration_is_rejected(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(UsageError):
            read_folder(folder)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "mlp"),
        ("backbone.layers.3.mixer.in_proj.weight", "state space"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.linear_attn.in_proj_qkv.weight", "attention"),
        ("model.visual.blocks.1.mlp.weight", "vision"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp"),
        ("model.layers.40.mlp.up_proj.weight", "mtp"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "output"),
    ],
)
def test_tensors_are_assigned_to_parts(name: str, part: str) -> None:
    assert find_part(name, 40) == part


def encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def encode_message(field: int, content: bytes) -> bytes:
    return encode_varint(field << 3 | 2) + encode_varint(len(content)) + content


def encode_onnx_tensor(name: str, kind: int, dims: list[int], raw: int) -> bytes:
    return (
        b"".join(encode_varint(8) + encode_varint(dim) for dim in dims)
        + encode_varint(16)
        + encode_varint(kind)
        + encode_message(8, name.encode())
        + encode_message(9, b"\0" * raw)
    )


class TestOnnx:
    GENAI: ClassVar[dict[str, Any]] = {
        "model": {
            "type": "phi3", "context_length": 4096, "vocab_size": 32064,
            "decoder": {"filename": "model.onnx", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_size": 96, "hidden_size": 3072},
        }
    }  # fmt: skip

    def write_graph(self, folder: Path) -> None:
        weights = encode_onnx_tensor("w_Q4", 2, [4, 8], 32) + b""
        graph = encode_message(5, weights) + encode_message(5, encode_onnx_tensor("scales", 10, [4], 8))
        (folder / "model.onnx").write_bytes(encode_varint(8) + encode_varint(7) + encode_message(7, graph))

    def test_a_genai_folder_is_read(self, tmp_path: Path) -> None:
        self.write_graph(tmp_path)
        (tmp_path / "model.onnx.data").write_bytes(b"\0" * 1000)
        (tmp_path / "genai_config.json").write_text(json.dumps(self.GENAI))
        model = read_folder(tmp_path, name="phi")
        assert (model.format, model.architecture, model.num_layers, model.max_context) == ("onnx", "phi3", 32, 4096)
        assert model.kv_bytes_per_token == 32 * 8 * 192 * 2
        assert model.weight_bytes == 1000 + (tmp_path / "model.onnx").stat().st_size
        assert model.parameters == 64 + 4
        assert model.quantization == "INT4"

    def test_an_onnx_folder_with_a_configuration_is_read(self, folder: Path) -> None:
        (folder / "onnx").mkdir()
        self.write_graph(folder / "onnx")
        model = read_folder(folder)
        assert (model.format, model.num_layers) == ("onnx", 2)

    @pytest.mark.parametrize(
        "content",
        [
            b"\xff" * 50,
            encode_varint(7 << 3 | 2) + encode_varint(2**60),
            encode_varint(7 << 3 | 3),
            encode_message(7, b"\x2a\x7f"),
        ],
    )
    def test_damaged_graphs_are_rejected(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.onnx").write_bytes(content)
        with pytest.raises(UsageError, match="damaged"):
            read_onnx(tmp_path, None, name="x", origin=None)
