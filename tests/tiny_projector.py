"""A tiny vision encoder and projector (mmproj) in GGUF, with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, INNER, LAYERS, SIDE, PATCH = 32, 64, 2, 56, 14
TOKENS = (SIDE // PATCH) ** 2


def make_projector(path: Path, hidden_size: int = 576, kind: str = "mlp", *, vision: bool = True) -> Path:
    """As llama.cpp's converter writes one for LLaVA, for a language model of this hidden size."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", vision)
    writer.add_string("clip.projector_type", kind)
    for key, value in {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER,
        "block_count": LAYERS, "attention.head_count": 2, "projection_dim": hidden_size, "projector.scale_factor": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_bool("clip.use_gelu", True)

    def add(name: str, *shape: int, spread: float = 0.2) -> None:
        writer.add_tensor(name, random.normal(0, spread, shape).astype(np.float32))

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.class_embd", WIDTH)
    add("v.position_embd.weight", TOKENS + 1, WIDTH)
    for part in ("pre_ln", *(f"blk.{layer}.ln{number}" for layer in range(LAYERS) for number in (1, 2))):
        add(f"v.{part}.weight", WIDTH)
        add(f"v.{part}.bias", WIDTH)
    shapes = {f"attn_{one}": (WIDTH, WIDTH) for one in ("q", "k", "v", "out")}
    for layer in range(LAYERS):
        for part, shape in {**shapes, "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}.items():
            add(f"v.blk.{layer}.{part}.weight", *shape)
            add(f"v.blk.{layer}.{part}.bias", shape[0])
    for part, columns, spread in (("mm.0", WIDTH, 0.2), ("mm.2", hidden_size, 0.05)):
        add(f"{part}.weight", hidden_size, columns, spread=spread)
        add(f"{part}.bias", hidden_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
