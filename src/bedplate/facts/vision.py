"""Vision encoders and their projectors, counted separately from the language model."""

from __future__ import annotations

from bedplate.facts.hf_fields import Config, Weight, make_vectors


def make_vision_weights(config: Config, text: Config, hidden: int) -> list[Weight]:
    """Weights of the vision encoder; none if the configuration does not state its sizes."""
    vision = config.get_section("vision_config", "visual", "vit_config")
    if vision is None:
        return []
    width = vision.get_count("hidden_size", "vt_hidden_size", "embed_dim", "width")
    layers = vision.get_count("num_hidden_layers", "depth", "vt_num_hidden_layers", "layers", "num_layers", most=4096)
    if not width or not layers:
        return []
    kind = vision.get_text("model_type") or ""
    if kind.startswith(("qwen2_5_vl", "qwen2_vl")) and vision.has("embed_dim"):
        width = vision.require_count("embed_dim")
    inner = vision.get_count("intermediate_size", "vt_intermediate_size")
    if not inner:
        inner = int(width * (vision.get_number("mlp_ratio") or 4.0))
    gated = kind.startswith(("gemma4", "qwen2_5_vl", "pixtral"))
    attention = vision.get_count("qkv_hidden_size") or width
    out = vision.get_count("out_hidden_size", "text_hidden_size", "vision_output_dim") or hidden
    patch = vision.get_count("patch_size", "spatial_patch_size") or 14
    channels = 3 * patch * patch * (vision.get_count("temporal_patch_size") or 1)
    merged = width * _read_merged_patches(vision)
    base = "vision_tower"
    found = [
        Weight(f"{base}.qkv", "vision", 3 * attention, width, layers),
        Weight(f"{base}.proj", "vision", width, attention, layers),
        Weight(f"{base}.mlp", "vision", (3 if gated else 2) * inner, width, layers),
        Weight(f"{base}.patch_embed", "vision", width, channels),
        Weight(f"{base}.positions", "vision", _count_positions(vision, patch), width, matrix=False),
        *make_vectors("vision", base, [("vectors", layers * (9 * width + inner))]),
    ]
    if kind.startswith(("gemma", "siglip")):
        found.append(Weight(f"{base}.projector", "vision", hidden, width))
    else:
        mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
        found.append(Weight(f"{base}.merger_in", "vision", merged, merged, mergers))
        found.append(Weight(f"{base}.merger_out", "vision", out, merged, mergers))
    return found


def _read_merged_patches(vision: Config) -> int:
    """Patches merged into one token."""
    kernel = vision.get("merge_kernel_size")
    if (
        isinstance(kernel, list)
        and len(kernel) == 2
        and all(isinstance(size, int) and 0 < size < 64 for size in kernel)
    ):
        return int(kernel[0]) * int(kernel[1])
    side = vision.get_count("spatial_merge_size", most=64) or 1
    return side * side


def _count_positions(vision: Config, patch: int) -> int:
    if rows := vision.get_count("num_position_embeddings"):
        return rows
    if rows := vision.get_count("position_embedding_size"):
        return 2 * rows
    if height := vision.get_count("init_pos_emb_height"):
        return height * (vision.get_count("init_pos_emb_width") or height)
    side = (vision.get_count("image_size") or 0) // patch
    return side * side + 1 if side else 0
