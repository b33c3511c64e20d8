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


class _ModelFamily(NamedTuple):
    name: str
    architectures: tuple[str, ...] = ()
    """`model_type` values of config.json; empty: only the name decides."""
    named: str = ""
    """Pattern that the lower-case name of the model must contain."""


# The first match wins, so specific entries precede general ones.
_FAMILIES = (
    _ModelFamily("gpt-oss", ("gpt_oss",)),
    _ModelFamily("none", named=r"embed|rerank|guard\b|[-_]base\b|reward"),
    _ModelFamily("hermes", named=r"hermes-(?:2-pro|2-theta|3|4)"),
    _ModelFamily("deepseek-r1-distill", ("llama", "qwen2"), r"r1-distill|deepseek-r1-0528-qwen3"),
    _ModelFamily("deepseek-r1-distill", ("qwen3",), r"deepseek-r1"),
    _ModelFamily("deepseek-v3.1", ("deepseek_v3",), r"v3[._]1"),
    _ModelFamily("deepseek-r1", ("deepseek_v3",), r"r1"),
    _ModelFamily("kimi-k2-thinking", ("deepseek_v3", "kimi_k2"), r"kimi-k2.*think"),
    _ModelFamily("kimi-k2", ("deepseek_v3", "kimi_k2"), r"kimi"),
    _ModelFamily("kimi-k2", ("kimi_k2",)),
    _ModelFamily("kimi-k2-thinking", ("kimi_k25",)),
    _ModelFamily("kimi-k3", ("kimi_k3",)),
    _ModelFamily("deepseek-v3", ("deepseek_v3",)),
    _ModelFamily("deepseek-v3.2", ("deepseek_v32",)),
    _ModelFamily("deepseek-v4", ("deepseek_v4",)),
    _ModelFamily("glm-4.7", ("glm4_moe", "glm4_moe_lite"), r"glm-4[._]7"),
    _ModelFamily("glm-4.5", ("glm4_moe",)),
    _ModelFamily("glm-4.7", ("glm4_moe_lite", "glm_moe_dsa")),
    _ModelFamily("minimax-m2", ("minimax_m2",)),
    _ModelFamily("minimax-m3", ("minimax_m3",)),
    _ModelFamily("qwq", ("qwen2",), r"qwq"),
    _ModelFamily("qwen-2.5", ("qwen2",), r"qwen-?2[._]5.*(?:instruct|chat)"),
    _ModelFamily("qwen-3-coder", ("qwen3_moe", "qwen3_next"), r"coder"),
    _ModelFamily("qwen-3.5", ("qwen3_5", "qwen3_5_moe")),
    _ModelFamily("qwen-3-thinking", ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), r"thinking"),
    _ModelFamily("qwen-3-instruct", ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), r"instruct"),
    _ModelFamily("qwen-3", ("qwen3", "qwen3_moe")),
    _ModelFamily("llama-4", ("llama4",)),
    _ModelFamily("llama-3", ("llama", "mllama"), r"llama-?v?3[._][123]-?.*instruct"),
    _ModelFamily("magistral", ("mistral", "mistral3"), r"magistral"),
    _ModelFamily("mistral", ("mistral", "mixtral", "mistral3"), r"instruct|devstral|codestral|mistral-large"),
    _ModelFamily("gemma-4", ("gemma4",)),
    _ModelFamily("nemotron-3", ("nemotron_h",), r"nemotron-3"),
    _ModelFamily("granite-4", ("granitemoehybrid",)),
    _ModelFamily("granite-3", ("granite", "granitemoe"), r"instruct"),
    _ModelFamily("hunyuan", ("hunyuan_v1_moe",), r"instruct"),
    _ModelFamily("internlm", ("internlm2",), r"chat"),
    _ModelFamily("jamba", ("jamba",)),
    _ModelFamily("phi-4-mini", ("phi3",), r"phi-4-mini"),
    _ModelFamily("step-3.5", ("step3p5", "step3p7")),
    _ModelFamily("mimo", ("mimo_v2_flash", "mimo_v2")),
    _ModelFamily("seed-oss", ("seed_oss",), r"instruct"),
    _ModelFamily("lfm2", ("lfm2", "lfm2_moe")),
)  # fmt: skip


def find_family(model: Model) -> str | None:
    name = model.name.lower()
    for one in _FAMILIES:
        if (not one.architectures or model.architecture in one.architectures) and re.search(one.named, name):
            return one.name if one.name != "none" else None
    return None


_REASONING = re.compile(r"think|reason|analysis", re.IGNORECASE)
"""What every chat template of a reasoning model contains: its markers, its switch, or the name of its channel."""


def find_parsers(model: Model, known: Mapping[str, Parsers]) -> Parsers:
    """The parsers of the model's family among an engine's `known` ones.

    A model of the family whose chat template has no reasoning gets no reasoning parser: SGLang does not start if the
    tokenizer lacks the parser's marker.
    """
    found = known.get(find_family(model) or "", Parsers())
    if model.chat_template is not None and not _REASONING.search(model.chat_template):
        return found._replace(reasoning=None)
    return found
