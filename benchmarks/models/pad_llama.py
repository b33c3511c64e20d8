"""Pad a Llama with zeros, so that its sizes are multiples of 128 and its results are unchanged.

    python benchmarks/models/pad_llama.py SMOLLM2_FOLDER OUT_FOLDER

For engines that support no other widths, such as ExLlamaV3. Needs PyTorch and safetensors. Norms divide by the mean
over more elements than before, so their weights and epsilon are scaled accordingly.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = 128
TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures with these layers, whose norms multiply by their weights without an offset."""
AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": (None, "hidden"),
    "lm_head": (None, "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "norm": ("hidden",),
    "q_norm": (None,),
    "k_norm": (None,),
}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
        )


def grown(now: Sizes, step: int = STEP, width: int | None = None) -> Sizes:
    """The smallest sizes that are multiples of `step`; the number of query heads per KV head is unchanged."""
    kv_heads = next(count for count in range(now.kv_heads, now.kv_heads + step + 1) if count * now.head % step == 0)
    heads = kv_heads * (now.heads // now.kv_heads)
    # Transformers requires a width that is divisible by the number of heads.
    hidden = width or up_to(now.hidden, math.lcm(step, heads))
    return Sizes(hidden, up_to(now.intermediate, step), heads, kv_heads, now.head)


def up_to(size: int, step: int) -> int:
    return -(-size // step) * step


def is_norm(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in ("input_layernorm", "post_attention_layernorm", "norm")


def padded(name: str, tensor: Any, now: Sizes, new: Sizes, zeros: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """The tensor padded with zeros at the end of each axis: added heads come last."""
    what, _, kind = name.rpartition(".")
    axes = AXES.get(what.rpartition(".")[2])
    if axes is None or kind not in ("weight", "bias"):
        raise SystemExit(f"nothing is known of {name}")
    axes = axes[:1] if kind == "bias" else axes
    wanted = tuple(size if axis is None else getattr(now, axis) for axis, size in zip(axes, tensor.shape, strict=True))
    if wanted != tuple(tensor.shape):
        raise SystemExit(f"{name} is {tuple(tensor.shape)}, and the configuration says {wanted}")
    shape = tuple(size if axis is None else getattr(new, axis) for axis, size in zip(axes, tensor.shape, strict=True))
    result = zeros(tensor, shape)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result * math.sqrt(now.hidden / new.hidden) if is_norm(name) else result


def configured(config: dict[str, Any], now: Sizes, new: Sizes) -> dict[str, Any]:
    return {
        **config,
        "hidden_size": new.hidden,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * now.hidden / new.hidden,
    }


def write(source: Path, out: Path, width: int | None) -> tuple[Sizes, Sizes]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    if config.get("model_type") not in TYPES or "quantization_config" in config:
        raise SystemExit(f"{source} is no folder with 16-bit weights of one of: {', '.join(TYPES)}")
    now = Sizes.of(config)
    new = grown(now, width=width)
    if new.hidden < now.hidden or new.hidden % STEP:
        raise SystemExit(f"a width of {new.hidden} is no multiple of {STEP} that holds {now.hidden}")
    out.mkdir(parents=True)
    total = 0
    where: dict[str, str] = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            made: dict[str, Any] = {}
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_tensor(name)
                    # In 16 bits the scaled weights of a norm would be rounded once more.
                    tensor = tensor.float() if is_norm(name) else tensor
                    made[name] = padded(name, tensor, now, new, lambda like, shape: like.new_zeros(shape)).contiguous()
            save_file(made, out / file.name, metadata={"format": "pt"})
            where |= dict.fromkeys(made, file.name)
            total += sum(tensor.nbytes for tensor in made.values())
        elif file.is_file() and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, out / file.name)
    (out / "config.json").write_text(json.dumps(configured(config, now, new), indent=2))
    if (source / "model.safetensors.index.json").is_file():
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return now, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, help="another hidden size, such as one not divisible by the heads")
    given = parser.parse_args()
    now, new = write(given.source, given.out, given.width)
    print(f"{now} became {new}")


if __name__ == "__main__":
    main()
