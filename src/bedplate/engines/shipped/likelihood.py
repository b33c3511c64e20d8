#!/usr/bin/env python3
"""The likelihood of a text in PyTorch with float32, and its most likely next tokens after some of the words.

Reads a text from stdin and prints JSON. Runs in an environment with torch and transformers, and depends on nothing
else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

PLACES = 40
FIRST_TOKENS = 12
LAST_TOKENS = 220
TOP = 20


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bedplate-likelihood", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with config.json, tokenizer and .safetensors")
    parser.add_argument("--gguf", help="a GGUF file in that folder to read instead of .safetensors")
    parser.add_argument(
        "--places", type=int, default=PLACES, help="number of words after which the most likely next tokens are listed"
    )
    options = parser.parse_args(arguments)
    text = sys.stdin.read()
    import torch
    import transformers

    given: dict[str, Any] = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **given)
    if options.gguf:
        given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **given).eval()
    found = compute_likelihood(model, tokenizer, text, options.places)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **found}))  # noqa: T201


def compute_likelihood(model: Any, tokenizer: Any, text: str, places: int) -> dict[str, Any]:
    import torch

    tokens = list(tokenizer(text)["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    each = [float(logits[number, token]) for number, token in enumerate(tokens[1:])]
    return {
        "tokens": len(tokens),
        "logprob": sum(each),
        "places": [
            list_next_tokens(tokenizer, logits, text, tokens, end)
            for end in choose_word_ends(tokenizer, text, tokens, places)
        ],
    }


def choose_word_ends(tokenizer: Any, text: str, tokens: list[int], count: int) -> list[int]:
    """Ends of words, spread over the first part of the text, at which the prefix has the tokens of the whole text."""
    found = []
    for end in (word.end() for word in re.finditer(r"\S+", text)):
        first = list(tokenizer(text[:end])["input_ids"])
        if FIRST_TOKENS <= len(first) <= LAST_TOKENS and tokens[: len(first)] == first and len(first) < len(tokens):
            found.append(end)
    return [found[number * len(found) // count] for number in range(count)] if len(found) > count else found


def list_next_tokens(tokenizer: Any, logits: Any, text: str, tokens: list[int], end: int) -> dict[str, Any]:
    length = len(tokenizer(text[:end])["input_ids"])
    row = logits[length - 1]
    best = row.topk(TOP)
    before = tokenizer.decode(tokens[:length], clean_up_tokenization_spaces=False)
    top = []
    for value, token in zip(best.values, best.indices, strict=True):
        after = tokenizer.decode([*tokens[:length], int(token)], clean_up_tokenization_spaces=False)
        top.append([after[len(before) :], round(float(value), 4)])
    following = tokenizer.decode(tokens[: length + 1], clean_up_tokenization_spaces=False)[len(before) :]
    return {"end": end, "tokens": length, "next": [following, round(float(row[tokens[length]]), 4)], "top": top}


if __name__ == "__main__":
    main()
