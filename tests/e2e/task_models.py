"""Small models for rerank, score and classify: the encoder of a package on the index, with a head made here."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np

RELEVANCE = Path(__file__).parents[1] / "fleet" / "relevance.py"
HIDDEN = 384
_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def read_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, about in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__" and about["dtype"] == "F32":
            begin, end = about["data_offsets"]
            found[name] = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.float32).reshape(about["shape"])
    return found


def write_tensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    head, at = {}, 0
    for name, one in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(one.shape), "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **head}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors.values():
            file.write(np.ascontiguousarray(one).tobytes())


def make_head(labels: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A head that gives scores which differ visibly between texts."""
    random = np.random.default_rng(labels)
    return random.normal(0, 1, (labels, HIDDEN)).astype(np.float32), random.normal(0, 1, labels).astype(np.float32)


def make_classifier(source: Path, into: Path, labels: tuple[str, ...]) -> Path:
    """The encoder as a Hugging Face classifier; with one label, as a reranker."""
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("*.safetensors", "modules.json", "1_Pooling"))
    config = json.loads((source / "config.json").read_text())
    names = {str(index): name for index, name in enumerate(labels)}
    ids = {name: index for index, name in enumerate(labels)}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": names, "label2id": ids}
    (into / "config.json").write_text(json.dumps(config))
    weight, bias = make_head(len(labels))
    tensors = {f"bert.{name}": one for name, one in read_tensors(source).items()}
    write_tensors(into / "model.safetensors", {**tensors, "classifier.weight": weight, "classifier.bias": bias})
    return into


def make_gguf(source: Path, path: Path, *, reranker: bool) -> Path:
    """The encoder as a GGUF file, with the head of a reranker or for embeddings."""
    tensors = read_tensors(source)
    vocabulary = (source / "vocab.txt").read_text(encoding="utf-8").splitlines()
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("tiny-reranker" if reranker else "tiny-embedder")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(6)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(12)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if reranker else gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    # As llama.cpp's converter writes them: a word begins with a mark, its other parts do not.
    writer.add_token_list(
        [one if one[:1] + one[-1:] == "[]" else one[2:] if one.startswith("##") else f"▁{one}" for one in vocabulary]
    )
    kinds = {"[PAD]": 3, "[UNK]": 3, "[CLS]": 3, "[SEP]": 3, "[MASK]": 3}
    writer.add_token_types([kinds.get(one, 1) for one in vocabulary])
    writer.add_unk_token_id(vocabulary.index("[UNK]"))
    writer.add_sep_token_id(vocabulary.index("[SEP]"))
    writer.add_pad_token_id(vocabulary.index("[PAD]"))
    writer.add_bos_token_id(vocabulary.index("[CLS]"))
    writer.add_mask_token_id(vocabulary.index("[MASK]"))
    if reranker:
        # A pair is then [CLS] query [SEP] document [SEP], as in training.
        writer.add_eos_token_id(vocabulary.index("[SEP]"))
        writer.add_add_eos_token(True)
        writer.add_add_sep_token(False)
    base = {
        "token_embd.weight": "embeddings.word_embeddings.weight",
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_types.weight": "embeddings.token_type_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    }
    for layer in range(6):
        for theirs, ours in _NAMES.items():
            for end in ("weight", "bias"):
                base[f"blk.{layer}.{ours}.{end}"] = f"encoder.layer.{layer}.{theirs}.{end}"
    if reranker:
        base |= {"cls.weight": "pooler.dense.weight", "cls.bias": "pooler.dense.bias"}
    for ours, theirs in base.items():
        writer.add_tensor(ours, tensors[theirs])
    if reranker:
        weight, bias = make_head(1)
        writer.add_tensor("cls.output.weight", weight)
        writer.add_tensor("cls.output.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compute_relevance(python: Path, folder: Path, pairs: list[list[str]], *, typed: bool = True) -> dict[str, Any]:
    """Logits and probabilities in PyTorch, computed by an interpreter with torch and transformers."""
    argv = [str(python), "-I", str(RELEVANCE), str(folder), json.dumps(pairs), "typed" if typed else "untyped"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
