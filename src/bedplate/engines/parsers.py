"""Tool-call and reasoning formats of model families; each engine has its own parser names for them.

Families from vLLM's docs/features/tool_calling.md and reasoning_outputs.md (v0.28.0rc2, August 2026) and the parser
registries of vLLM 0.32.0 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bedplate.values import Model


class Parsers(NamedTuple):
    """An engine's parser names; `None`: it has no parser, or the model does not use the format."""

    tools: str | None = None
    reasoning: str | None = None


class _Family(NamedTuple):
    name: str
    architectures: tuple[str, ...] = ()
    """`model_type` values of config.json; empty: only the name decides."""
    named: str = ""
    """Pattern that the lower-case name of the model must contain."""


# The first match wins, so specific entries precede general ones.
_FAMILIES = (
    _Family("gpt-oss", ("gpt_oss",)),
    _Family("none", named=r"embed|rerank|guard\b|[-_]base\b|reward"),
    _Family("hermes", named=r"hermes-(?:2-pro|2-theta|3|4)"),
    _Family("deepseek-r1-distill", ("llama", "qwen2"), r"r1-distill|deepseek-r1-0528-qwen3"),
    _Family("deepseek-r1-distill", ("qwen3",), r"deepseek-r1"),
    _Family("deepseek-v3.1", ("deepseek_v3",), r"v3[._]1"),
    _Family("deepseek-r1", ("deepseek_v3",), r"r1"),
    _Family("kimi-k2-thinking", ("deepseek_v3", "kimi_k2"), r"kimi-k2.*think"),
    _Family("kimi-k2", ("deepseek_v3", "kimi_k2"), r"kimi"),
    _Family("kimi-k2", ("kimi_k2",)),
    _Family("kimi-k2-thinking", ("kimi_k25",)),
    _Family("kimi-k3", ("kimi_k3",)),
    _Family("deepseek-v3", ("deepseek_v3",)),
    _Family("deepseek-v3.2", ("deepseek_v32",)),
    _Family("deepseek-v4", ("deepseek_v4",)),
    _Family("glm-4.7", ("glm4_moe", "glm4_moe_lite"), r"glm-4[._]7"),
    _Family("glm-4.5", ("glm4_moe",)),
    _Family("glm-4.7", ("glm4_moe_lite", "glm_moe_dsa")),
    _Family("minimax-m2", ("minimax_m2",)),
    _Family("minimax-m3", ("minimax_m3",)),
    _Family("qwq", ("qwen2",), r"qwq"),
    _Family("qwen-2.5", ("qwen2",), r"qwen-?2[._]5.*(?:instruct|chat)"),
    _Family("qwen-3-coder", ("qwen3_moe", "qwen3_next"), r"coder"),
    _Family("qwen-3.5", ("qwen3_5", "qwen3_5_moe")),
    _Family("qwen-3-thinking", ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), r"thinking"),
    _Family("qwen-3-instruct", ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), r"instruct"),
    _Family("qwen-3", ("qwen3", "qwen3_moe")),
    _Family("llama-4", ("llama4",)),
    _Family("llama-3", ("llama", "mllama"), r"llama-?v?3[._][123]-?.*instruct"),
    _Family("magistral", ("mistral", "mistral3"), r"magistral"),
    _Family("mistral", ("mistral", "mixtral", "mistral3"), r"instruct|devstral|codestral|mistral-large"),
    _Family("gemma-4", ("gemma4",)),
    _Family("nemotron-3", ("nemotron_h",), r"nemotron-3"),
    _Family("granite-4", ("granitemoehybrid",)),
    _Family("granite-3", ("granite", "granitemoe"), r"instruct"),
    _Family("hunyuan", ("hunyuan_v1_moe",), r"instruct"),
    _Family("internlm", ("internlm2",), r"chat"),
    _Family("jamba", ("jamba",)),
    _Family("phi-4-mini", ("phi3",), r"phi-4-mini"),
    _Family("step-3.5", ("step3p5", "step3p7")),
    _Family("mimo", ("mimo_v2_flash", "mimo_v2")),
    _Family("seed-oss", ("seed_oss",), r"instruct"),
    _Family("lfm2", ("lfm2", "lfm2_moe")),
)  # fmt: skip


def family(model: Model) -> str | None:
    name = model.name.lower()
    for one in _FAMILIES:
        if (not one.architectures or model.architecture in one.architectures) and re.search(one.named, name):
            return one.name if one.name != "none" else None
    return None


def parsers_for(model: Model, known: Mapping[str, Parsers]) -> Parsers:
    """The parsers of the model's family among an engine's `known` ones."""
    return known.get(family(model) or "", Parsers())
