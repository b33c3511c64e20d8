"""Create a Llama of any size with random weights, for speed tests: as a 16-bit folder, GGUF or EXL3.

    python benchmarks/models/random_llama.py --like SMOLLM2_FOLDER --shape 8b --form bf16 --out OUT_FOLDER
    python benchmarks/models/random_llama.py --like SMOLLM2.gguf --shape moe --form bf16 --out OUT_FOLDER
    python benchmarks/models/random_llama.py --like SMOLLM2.gguf --shape 8b --form q4_k --out OUT.gguf
    python benchmarks/models/random_llama.py --like SMOLLM2.gguf --shape moe --form q4_k --out OUT.gguf
    python benchmarks/models/random_llama.py --like SMOLLM2.gguf --shape 32b --form empty --out OUT_FOLDER

The tokenizer and the vocabulary are those of the model given with --like, so that every token has a text.
Shapes with experts are Qwen3-MoE, `mla` is DeepSeek-V2: both exist as 16-bit folders only. `empty` writes files of the
same size that take no space on disk and hold zeros, for engines that fill in weights themselves
(`--load-format dummy`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_BYTES = 4 << 30
SHIPPED = Path(__file__).resolve().parents[2] / "src" / "bedplate" / "engines" / "shipped"
Q4_K_BLOCK, Q4_K_BYTES = 256, 144
Q8_0_BLOCK, Q8_0_BYTES = 32, 34
SPREAD = 0.02
"""The usual standard deviation of an untrained model's weights."""
MUL1 = 0x83DC_D12D
"""The multiplier that names ExLlamaV3's usual codebook; stored with each of its tensors."""


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA) as in DeepSeek-V2: the cache holds `rank` + `rope` values for each token and layer."""

    rank: int
    nope: int
    rope: int
    value: int
    first_intermediate: int
    """Width of the first layer, which has no experts."""
    shared_experts: int


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int = 128
    experts: int = 0
    experts_active: int = 0
    """With experts, `intermediate` is the width of each of them."""
    latent: Latent | None = None


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8),
    "1b": Shape(2048, 8192, 16, 32, 8, head=64),
    # A layer as of Qwen3-30B-A3B, and a quarter of its 48 layers: 7.7 billion parameters, 0.9 billion for each token.
    "moe": Shape(2048, 768, 12, 32, 4, experts=128, experts_active=8),
    "32b": Shape(5120, 25600, 64, 64, 8),
    # DeepSeek-V2-Lite: 15.7 billion parameters, 2.4 billion for each token.
    "mla": Shape(2048, 1408, 27, 16, 16, experts=64, experts_active=6, latent=Latent(512, 128, 64, 128, 10944, 2)),
    "tiny-mla": Shape(256, 128, 2, 4, 4, experts=8, experts_active=2, latent=Latent(64, 32, 16, 32, 512, 1)),
    "tiny": Shape(256, 512, 2, 4, 2, head=64),
    "tiny-moe": Shape(256, 128, 2, 4, 2, head=64, experts=8, experts_active=2),
}


def linears(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Every matrix of the layers: name, rows (outputs), columns (inputs)."""
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in attention(shape):
            yield f"{at}.self_attn.{name}", rows, columns
        experts = 0 if shape.latent and layer == 0 else shape.experts
        if experts:
            yield f"{at}.mlp.gate", experts, shape.hidden
        widths = {f"{at}.mlp.experts.{expert}": shape.intermediate for expert in range(experts)}
        if shape.latent and experts:
            widths[f"{at}.mlp.shared_experts"] = shape.latent.shared_experts * shape.intermediate
        first = shape.latent.first_intermediate if shape.latent else shape.intermediate
        for mlp, width in (widths or {f"{at}.mlp": first}).items():
            yield f"{mlp}.gate_proj", width, shape.hidden
            yield f"{mlp}.up_proj", width, shape.hidden
            yield f"{mlp}.down_proj", shape.hidden, width


def attention(shape: Shape) -> Iterator[tuple[str, int, int]]:
    if latent := shape.latent:
        yield "q_proj", shape.heads * (latent.nope + latent.rope), shape.hidden
        yield "kv_a_proj_with_mqa", latent.rank + latent.rope, shape.hidden
        yield "kv_b_proj", shape.heads * (latent.nope + latent.value), latent.rank
        yield "o_proj", shape.hidden, shape.heads * latent.value
        return
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    yield "q_proj", q, shape.hidden
    yield "k_proj", kv, shape.hidden
    yield "v_proj", kv, shape.hidden
    yield "o_proj", shape.hidden, q


def norms(shape: Shape) -> Iterator[tuple[str, int]]:
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm", shape.hidden
        yield f"{at}.post_attention_layernorm", shape.hidden
        if shape.latent:
            yield f"{at}.self_attn.kv_a_layernorm", shape.latent.rank
        elif shape.experts:
            yield f"{at}.self_attn.q_norm", shape.head
            yield f"{at}.self_attn.k_norm", shape.head
    yield "model.norm", shape.hidden


def config(shape: Shape, like: dict[str, Any], exl3_bits: int | None) -> dict[str, Any]:
    kind, model_type = "LlamaForCausalLM", "llama"
    if shape.experts:
        kind, model_type = "Qwen3MoeForCausalLM", "qwen3_moe"
    if shape.latent:
        kind, model_type = "DeepseekV2ForCausalLM", "deepseek_v2"
    return {
        "architectures": [kind],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": like["vocab_size"],
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{name: like[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in like},
        **({"quantization_config": _exl3(exl3_bits)} if exl3_bits else {}),
        **(_experts(shape) if shape.experts else {}),
        **(_latent(shape, shape.latent) if shape.latent else {}),
    }


def _latent(shape: Shape, latent: Latent) -> dict[str, Any]:
    return {
        "intermediate_size": latent.first_intermediate,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "head_dim": latent.rope,
        "n_routed_experts": shape.experts,
        "n_shared_experts": latent.shared_experts,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
    }


def _experts(shape: Shape) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_active,
        "moe_intermediate_size": shape.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _exl3(bits: int) -> dict[str, Any]:
    return {"quant_method": "exl3", "version": "1.6.5", "bits": float(bits), "head_bits": 6, "codebook": "mul1"}


def write_folder(shape: Shape, like: Path, out: Path, exl3_bits: int | None) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = torch.Generator(device).manual_seed(0)
    out.mkdir(parents=True)
    known = write_tokenizer(like, out)
    (out / "config.json").write_text(json.dumps(config(shape, known, exl3_bits), indent=2))
    kind = torch.bfloat16 if exl3_bits is None else torch.float16

    def dense(*size: int) -> Any:
        return (torch.randn(size, generator=make, device=device) * SPREAD).to(kind).cpu()

    def sign(size: int) -> Any:
        return (torch.randint(0, 2, (size,), generator=make, device=device) * 2 - 1).half()

    def packed(name: str, rows: int, columns: int, bits: int) -> dict[str, Any]:
        tiles = (columns // 16, rows // 16, 16 * bits)
        words = torch.randint(-(1 << 15), 1 << 15, tiles, generator=make, device=device, dtype=torch.int16)
        return {
            f"{name}.trellis": words.cpu(),
            f"{name}.suh": sign(columns).cpu(),
            f"{name}.svh": (sign(rows) * SPREAD).cpu(),
            f"{name}.mul1": torch.tensor(MUL1 - (1 << 32), dtype=torch.int32),
        }

    shard: dict[str, Any] = {"model.embed_tokens.weight": dense(known["vocab_size"], shape.hidden)}
    where: dict[str, str] = {}
    total = number = held = 0

    def flush() -> None:
        nonlocal shard, number, total, held
        number += 1
        total += sum(one.nbytes for one in shard.values())
        name = f"model-{number:05d}.safetensors"
        save_file(shard, str(out / name), metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard, held = {}, 0

    for name, width in norms(shape):
        shard[f"{name}.weight"] = torch.ones(width, dtype=kind)
    for name, rows, columns in [*linears(shape), ("lm_head", known["vocab_size"], shape.hidden)]:
        bits = 6 if name == "lm_head" else exl3_bits
        made = packed(name, rows, columns, bits or 6) if exl3_bits else {f"{name}.weight": dense(rows, columns)}
        shard |= made
        held += sum(one.nbytes for one in made.values())
        if held > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def write_empty(shape: Shape, like: Path, out: Path) -> None:
    """A folder whose weights are holes in files: all of the sizes, none of the bytes."""
    out.mkdir(parents=True)
    known = write_tokenizer(like, out)
    (out / "config.json").write_text(json.dumps(config(shape, known, None), indent=2))
    vocabulary = (known["vocab_size"], shape.hidden)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    sizes |= {f"{name}.weight": (width,) for name, width in norms(shape)}
    sizes |= {f"{name}.weight": (rows, columns) for name, rows, columns in linears(shape)}
    shards: list[dict[str, Any]] = [{}]
    held = 0
    for name, size in sizes.items():
        begin, held = held, held + 2 * math.prod(size)
        shards[-1][name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, held]}
        if held > SHARD_BYTES:
            shards.append({})
            held = 0
    where: dict[str, str] = {}
    for number, shard in enumerate(filter(None, shards), start=1):
        file = out / f"model-{number:05d}.safetensors"
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
        with file.open("wb") as open_file:
            open_file.write(len(header).to_bytes(8, "little") + header)
            open_file.truncate(8 + len(header) + max(one["data_offsets"][1] for one in shard.values()))
        where.update(dict.fromkeys(shard, file.name))
    total = sum(2 * math.prod(size) for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(like: Path, out: Path) -> dict[str, Any]:
    """Copies the tokenizer of a folder, or builds it from a GGUF; returns what the configuration says of it."""
    if like.is_dir():
        for file in like.iterdir():
            if "token" in file.name or file.suffix == ".jinja" or file.name == "generation_config.json":
                shutil.copy(file, out / file.name)
        known: dict[str, Any] = json.loads((like / "config.json").read_text())
        return known
    from transformers import AutoTokenizer

    sys.path.insert(0, str(SHIPPED))
    converter: Any = importlib.import_module("gguf_to_folder")
    tokenizer = AutoTokenizer.from_pretrained(str(like.parent), gguf_file=like.name)
    header = converter.GgufMetadata(like)
    converter.set_pre_tokenizer(tokenizer.backend_tokenizer, header)
    converter.set_bos_token(tokenizer, header)
    tokenizer.save_pretrained(out)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {"vocab_size": len(tokenizer), **{name: value for name, value in ids.items() if value is not None}}


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str:
    if name in ("model.norm", "lm_head"):
        return {"model.norm": "output_norm", "lm_head": "output"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}"


def write_gguf(shape: Shape, like: Path, out: Path, form: str) -> None:
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(like)
    writer = gguf.GGUFWriter(out, "qwen3moe" if shape.experts else "llama")
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value = field.contents()
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub)
    vocab = len(reader.fields["tokenizer.ggml.tokens"].contents())
    writer.add_name(f"random Llama {form}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_active)
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_file_type({"q4_k": 15, "q8_0": 7, "f16": 1}[form])
    random = np.random.default_rng(0)

    def q8_0(rows: int, columns: int) -> Any:
        blocks = np.empty((rows, columns // Q8_0_BLOCK, Q8_0_BYTES), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(SPREAD / 64).tobytes(), np.uint8)
        blocks[..., 2:] = random.integers(0, 256, blocks[..., 2:].shape, np.uint8)
        return blocks.reshape(rows, -1), gguf.GGMLQuantizationType.Q8_0

    def q4_k(rows: int, columns: int) -> Any:
        blocks = np.empty((rows, columns // Q4_K_BLOCK, Q4_K_BYTES), np.uint8)
        # A scale and a minimum of 32 in each sub-block, so that weights are centred on zero. The high bits of the last
        # four are stored above those of the first four.
        blocks[..., :2] = np.frombuffer(np.float16(SPREAD / 256).tobytes(), np.uint8)
        blocks[..., 2:4] = np.frombuffer(np.float16(SPREAD / 256 * 7.5).tobytes(), np.uint8)
        blocks[..., 4:12] = 0xA0
        blocks[..., 12:16] = 0
        blocks[..., 16:] = random.integers(0, 256, blocks[..., 16:].shape, np.uint8)
        return blocks.reshape(rows, -1), gguf.GGMLQuantizationType.Q4_K

    def f16(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns), np.float32) * SPREAD).astype(np.float16), None

    weights = {"q4_k": q4_k, "q8_0": q8_0, "f16": f16}[form]

    def add(name: str, rows: int, columns: int) -> None:
        data, kind = weights(rows, columns)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", vocab, shape.hidden)
    add("output", vocab, shape.hidden)
    for name, width in norms(shape):
        writer.add_tensor(f"{gguf_name(name)}.weight", np.ones(width, np.float32))
    for name, rows, columns in linears(shape):
        if name.endswith(".mlp.gate"):
            router = random.standard_normal((rows, columns), np.float32) * SPREAD
            writer.add_tensor(f"{gguf_name(name)}.weight", router)
        elif ".experts." not in name:
            add(gguf_name(name), rows, columns)
        elif ".experts.0." in name:  # all experts of a layer are one tensor
            data, kind = weights(shape.experts * rows, columns)
            tensor = gguf_name(name.replace(".experts.0.", "."))
            writer.add_tensor(f"{tensor}_exps.weight", data.reshape(shape.experts, rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", type=Path, required=True, help="model whose tokenizer is used: a folder or a GGUF")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--form", choices=("bf16", "empty", "exl3-4", "exl3-8", "f16", "q8_0", "q4_k"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if shape.experts and given.form.startswith("exl3"):
        parser.error("a shape with experts is not written for ExLlamaV3")
    if shape.latent and given.form not in ("bf16", "empty"):
        parser.error("a shape with latent attention is written with --form bf16 or empty only")
    if given.form == "empty":
        write_empty(shape, given.like, given.out)
    elif given.form in ("f16", "q8_0", "q4_k"):
        write_gguf(shape, given.like, given.out, given.form)
    else:
        bits = int(given.form.partition("-")[2]) if given.form.startswith("exl3") else None
        write_folder(shape, given.like, given.out, bits)


if __name__ == "__main__":
    main()
