#!/usr/bin/env python3
"""Dequantizes a GGUF file to a Hugging Face folder for engines that do not read GGUF.

    gguf-to-folder MODEL.gguf FOLDER

Weights are written in bfloat16. A quantized weight is a 16-bit scale times a small integer, which bfloat16 rounds by at
most 0.2 %; the quantization steps of its block are 7 % (4 bits) to 0.4 % (8 bits) of the largest weight.
`--dtype float32` is exact, and needs twice the memory that a plan assumes.

A GGUF file has no tokenizer.json. Transformers builds one from the vocabulary. The file contains only the name of the
pre-tokenizer (`tokenizer.ggml.pre`); the table below has the expressions for each name.

Runs in PyTorch's environment: torch, transformers, accelerate and gguf.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

# Expressions are applied in this order; text that none of them matches is a piece too. Names and expressions are from
# the published tokenizer.json of the models, and from llama-vocab.cpp of llama.cpp b11549.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ALPHABETS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_LLAMA3 = (f"{_SHORT}|{_WORD}|\\p{{N}}{{1,3}}|{_REST}",)
_DIGITS_ALONE = (r"\p{N}", _GPT2)
_QWEN2 = (f"{_SHORT}|{_WORD}|\\p{{N}}|{_REST}",)
_GPT4O = (f"{_CASED % (_SHORT + '?', _SHORT + '?')}|\\p{{N}}{{1,3}}|{_CASED_REST}",)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SENTENCES = "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_ALONE
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "qwen35": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (f"{_CASED % ('', '')}|\\p{{N}}|{_CASED_REST}",),
    "seed-coder": (rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_ALPHABETS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (rf" ?[^(\s|.,!?{_SENTENCES})]+",)),
    "viking": (rf" ?[^(\s|.,!?{_SENTENCES})]+", r"\p{N}"),
}
WHOLE_WORDS_FIRST = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "glm4", "glm5")
)
"""Pre-tokenizers whose pieces are looked up in the vocabulary before merges are applied."""
BEGINS_BY_DEFAULT = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Pre-tokenizers that add the BOS token unless the file specifies otherwise."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Dequantize a GGUF file to a Hugging Face folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if not options.source.is_file():
        fail(f"the file {options.source} does not exist")
    if options.folder.exists():
        fail(f"{options.folder} already exists")
    try:
        convert_file(options)
    except BaseException:
        shutil.rmtree(options.folder, ignore_errors=True)
        raise


def convert_file(options: argparse.Namespace) -> None:
    # Otherwise missing parts would be requested from the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        fail(f"packages for GGUF files are missing in this Python: {error}")
    torch.set_num_threads(count_free_threads())
    given: dict[str, Any] = {"gguf_file": options.source.name}
    where, dtype = str(options.source.parent), getattr(torch, options.dtype)
    say("reading the tokenizer")
    header = GgufMetadata(options.source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **given)
        set_pre_tokenizer(tokenizer.backend_tokenizer, header)
        set_bos_token(tokenizer, header)
        say("dequantizing the weights")
        model = AutoModelForCausalLM.from_pretrained(
            where, **given, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, NotImplementedError) as error:
        fail(f"Transformers cannot dequantize this file: {error}")
    if getattr(model.config, "_name_or_path", None):
        model.config._name_or_path = ""
    say("writing")
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    config = options.folder / "config.json"
    config.write_text(json.dumps(add_older_names(json.loads(config.read_text())), indent=2) + "\n")
    for file in options.folder.iterdir():
        file.chmod(0o644)  # weights are written with permissions for the owner only


def add_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Add the RoPE keys of Transformers 4. Engines that do not know the new keys (ExLlamaV2 0.3.2) would silently use
    default values, and be wrong on long texts."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    older = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {**older, **config}


class GgufMetadata:
    """Fields of a GGUF header that Transformers ignores."""

    def __init__(self, source: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(source)

    def read_text(self, key: str) -> str | None:
        field = self._reader.get_field(key)
        return str(field.contents()) if field is not None else None

    def read_flag(self, key: str) -> bool | None:
        field = self._reader.get_field(key)
        return bool(field.contents()) if field is not None else None


def set_pre_tokenizer(backend: Any, header: GgufMetadata) -> None:
    """Set the pre-tokenizer of the header: by name for byte-level BPE; SentencePiece only marks spaces."""
    kind = header.read_text("tokenizer.ggml.model")
    if kind == "llama" and not (header.read_text("general.architecture") or "").startswith("gemma"):
        mark_spaces(backend, first=header.read_flag("tokenizer.ggml.add_space_prefix") is not False)
    if kind != "gpt2":
        return
    name = header.read_text("tokenizer.ggml.pre")
    if name is None:
        say("the file does not name its pre-tokenizer; llama.cpp's default is used, which may be wrong")
        name = "default"
    if name not in SPLITS:
        fail(f"this version of bedplate does not support the pre-tokenizer {name!r}")
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name]]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_letters])
    backend.model.ignore_merges = name in WHOLE_WORDS_FIRST


def mark_spaces(backend: Any, first: bool) -> None:
    """Mark spaces as in training: also before the first word, even if it already begins with a space."""
    from tokenizers import normalizers

    before = [normalizers.Prepend("\u2581")] if first else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = None


def set_bos_token(tokenizer: Any, header: GgufMetadata) -> None:
    """Add the BOS token if the file says so, or by default for its pre-tokenizer."""
    begins = header.read_flag("tokenizer.ggml.add_bos_token")
    if begins is None:
        of_pieces = header.read_text("tokenizer.ggml.model") == "llama"
        begins = of_pieces or header.read_text("tokenizer.ggml.pre") in BEGINS_BY_DEFAULT
    if tokenizer.bos_token is not None and hasattr(tokenizer, "add_bos_token") and tokenizer.add_bos_token != begins:
        tokenizer.add_bos_token = begins


def count_free_threads() -> int:
    """Cores that other processes leave free: spinning threads are slow if they cannot run at the same time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, round(count - load))


def say(text: str) -> None:
    print(f"gguf-to-folder: {text}", flush=True)  # noqa: T201


def fail(text: str) -> Any:
    sys.exit(f"gguf-to-folder: {' '.join(str(text).split())}")


if __name__ == "__main__":
    main()
