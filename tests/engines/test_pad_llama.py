"""A Llama that is padded with zeros computes the same output."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "models" / "pad_llama.py"
VOCABULARY, LAYERS, TOKENS = 17, 2, 5


def _load_program() -> Any:
    spec = importlib.util.spec_from_file_location("pad_llama", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pad: Any = _load_program()


def make_random_llama(sizes: Any) -> dict[str, Any]:
    make = np.random.default_rng(7)
    names = {"model.embed_tokens": (VOCABULARY, sizes.hidden), "model.norm": (sizes.hidden,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        names |= {f"{at}.input_layernorm": (sizes.hidden,), f"{at}.post_attention_layernorm": (sizes.hidden,)}
        names |= {f"{at}.self_attn.q_proj": (sizes.queries, sizes.hidden)}
        names |= {f"{at}.self_attn.{one}_proj": (sizes.keys, sizes.hidden) for one in "kv"}
        names |= {f"{at}.self_attn.o_proj": (sizes.hidden, sizes.queries)}
        names |= {f"{at}.mlp.{one}_proj": (sizes.intermediate, sizes.hidden) for one in ("gate", "up")}
        names |= {f"{at}.mlp.down_proj": (sizes.hidden, sizes.intermediate)}
    found = {f"{name}.weight": make.standard_normal(shape) for name, shape in names.items()}
    biased = {f"{name}.bias": make.standard_normal(shape[0]) for name, shape in names.items() if name[-6:] == "q_proj"}
    return found | biased


def compute_logits(weights: dict[str, Any], sizes: Any, eps: float) -> Any:
    """As Transformers computes a Llama, with tied embeddings."""

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def turned(x: Any) -> Any:
        half = sizes.head // 2
        angles = np.arange(TOKENS)[:, None] / 100 ** (np.arange(half) / half)
        sin, cos = np.tile(np.sin(angles), 2), np.tile(np.cos(angles), 2)
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    def heads(x: Any) -> Any:
        return x.reshape(TOKENS, -1, sizes.head).swapaxes(0, 1)

    x = weights["model.embed_tokens.weight"][np.arange(TOKENS)]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (heads(linear(y, f"{at}.self_attn.{one}_proj")) for one in "qkv")
        group = sizes.heads // sizes.kv_heads
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores = turned(q) @ turned(k).swapaxes(1, 2) / np.sqrt(sizes.head)
        scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = x + linear(mixed.swapaxes(0, 1).reshape(TOKENS, -1), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(y, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


def pad_weights(weights: dict[str, Any], now: Any, new: Any) -> dict[str, Any]:
    return {name: pad.padded(name, one, now, new, lambda _, shape: np.zeros(shape)) for name, one in weights.items()}


def test_padded_model_computes_the_same() -> None:
    now = pad.Sizes(hidden=20, intermediate=30, heads=6, kv_heads=3, head=4)
    new = pad.grown(now, step=8)
    assert (new.hidden, new.intermediate, new.heads, new.kv_heads, new.head) == (24, 32, 8, 4, 4)
    weights = make_random_llama(now)
    # So large that leaving it as it is would show.
    config = pad.configured({"rms_norm_eps": 0.05}, now, new)
    made = pad_weights(weights, now, new)
    expected = compute_logits(weights, now, 0.05)
    assert np.abs(compute_logits(made, new, config["rms_norm_eps"]) - expected).max() < 1e-9
    assert np.abs(compute_logits(made, new, 0.05) - expected).max() > 1e-4


def test_padded_sizes_of_smollm2() -> None:
    config = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    now = pad.Sizes.of(config)
    assert now == pad.Sizes(hidden=576, intermediate=1536, heads=9, kv_heads=3, head=64)
    # 640 would do for the width alone; 12 heads divide 768, and not 640.
    assert pad.grown(now) == pad.Sizes(hidden=768, intermediate=1536, heads=12, kv_heads=4, head=64)
    assert pad.grown(now, width=640).hidden == 640
    made = pad.configured(config | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}, now, pad.grown(now))
    assert made["rms_norm_eps"] == pytest.approx(7.5e-6) and made["head_dim"] == 64 and made["tie_word_embeddings"]


def test_sizes_that_are_multiples_are_kept() -> None:
    llama = pad.Sizes(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head=128)
    assert pad.grown(llama) == llama


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.0.mlp.router.weight", (4, 20)), ("lm_head.weight", (9, 19))]
)
def test_rejects_tensors_of_unknown_name_or_shape(name: str, shape: tuple[int, ...]) -> None:
    now = pad.Sizes(hidden=20, intermediate=30, heads=6, kv_heads=3, head=4)
    with pytest.raises(SystemExit):
        pad.padded(name, np.zeros(shape), now, pad.grown(now, step=8), lambda _, shape: np.zeros(shape))
