"""The vision encoder and projector of a GGUF model: a file of its own (mmproj) in the same folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bedplate.values.model import Projector

_MARK = "mmproj"
_MAX_SIDE = 1 << 16
_ONE_FOR_EACH_PATCH = frozenset(["mlp", "mlp_norm"])
_POOLED = {"ldp": 2, "ldpv2": 2, "idefics3": None, "internvl": None, "gemma3": 4}
"""Patches of one side that become one token; None: as the file says (clip.vision.projector.scale_factor)."""
_COPIES = 12
"""Rows of the encoder's width that are in memory at once while a layer is computed, in 32 bits."""


def list_candidates(model: Path, strip_file_name: Callable[[str], str]) -> list[Path]:
    """The files beside a model's file that may be its projector; none if it is not certain which model they are for."""
    try:
        names = sorted(one.name for one in model.parent.iterdir() if one.name.lower().endswith(".gguf"))
    except OSError:
        return []
    own = strip_file_name(model.name).lower()
    candidates = [name for name in names if _MARK in name.lower() and name != model.name]
    others = {strip_file_name(name).lower() for name in names if _MARK not in name.lower()} - {own}
    # With other models in the folder, only a common name shows which one it belongs to.
    named = [name for name in candidates if own in name.lower()]
    return [model.parent / name for name in named or (() if others else candidates)]


def read_projector(
    path: Path, fields: Mapping[str, object], tensors: Sequence[tuple[int, int]], hidden_size: int | None
) -> Projector | None:
    """The projector in a header; `None`: it is not for this model. `tensors` are their weights and bytes."""

    def read(key: str) -> int | None:
        value = fields.get(f"clip.vision.{key}")
        return value if type(value) is int and 0 < value < 1 << 31 else None

    if fields.get("general.architecture") != b"clip" or fields.get("clip.has_vision_encoder") is False:
        return None
    width = read("projection_dim")
    if width is not None and hidden_size is not None and width % hidden_size:
        return None
    kind = fields.get("clip.projector_type") or fields.get("clip.vision.projector_type")
    name = kind.decode("utf-8", "replace")[:40] if isinstance(kind, bytes) else "unknown"
    side, patch = read("image_size"), read("patch_size")
    patches = (side // patch) ** 2 if side and patch and side < _MAX_SIDE else 0
    rows = _COPIES * (read("embedding_length") or 0) + patches * (read("attention.head_count") or 1)
    return Projector(
        file=str(path),
        kind=name,
        parameters=sum(elements for elements, _ in tensors),
        weight_bytes=sum(size for _, size in tensors),
        image_size=side,
        image_tokens=_count_tokens(name, patches, fields, read("projector.scale_factor")),
        activation_bytes=4 * patches * rows,
    )


def _count_tokens(kind: str, patches: int, fields: Mapping[str, object], scale: int | None) -> int | None:
    # An image that is divided into tiles has as many tokens as the tiles have together.
    if not patches or "clip.vision.image_grid_pinpoints" in fields:
        return None
    if kind in _ONE_FOR_EACH_PATCH:
        return patches
    if kind in _POOLED and (side := _POOLED[kind] or scale):
        return patches // side**2 or None
    return None
