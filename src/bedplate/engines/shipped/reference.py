#!/usr/bin/env python3
"""The greedy next token after each of many prefixes in PyTorch with float32: the reference for every engine.

Reads a JSON list of texts from a file or stdin, and prints JSON. Runs in an environment with torch and transformers,
and depends on nothing else.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH_TOKENS = 2048


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bedplate-reference", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with config.json, tokenizer and .safetensors")
    parser.add_argument("--prefixes", default="-", help="file with a JSON list of texts; -: stdin")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="prompt tokens per batch")
    parser.add_argument("--threads", type=int, help="number of threads; default: chosen by PyTorch")
    options = parser.parse_args(arguments)
    prefixes = read_prefixes(options.prefixes)
    import torch
    import transformers

    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    config = transformers.AutoConfig.from_pretrained(options.model)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(options.model, config=one, dtype=torch.float32).eval()
        for one in (config, perturb_rope(config))
        if one is not None
    ]
    answers = predict_tokens(models, tokenizer, prefixes, options.batch_tokens)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"schema": "reference/1", **versions, "answers": answers}, ensure_ascii=False))  # noqa: T201


def read_prefixes(where: str) -> list[str]:
    try:
        text = sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        sys.exit(f"bedplate-reference: cannot read the prefixes: {error}")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        sys.exit("bedplate-reference: the prefixes must be a non-empty JSON list of texts")
    return found


def perturb_rope(config: Any) -> Any | None:
    """A deliberately wrong configuration, with a tenth of the rotary base; `None`: the model has no rotary base."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), int | float):
        return None
    other = copy.deepcopy(config)
    other.rope_parameters = {**rope, "rope_theta": rope["rope_theta"] / 10}
    return other


def group_prompts(prompts: list[list[int]], most_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts per batch: only prompts of the same length, so that the reference has no padding."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_length[len(prompt)].append(number)
    for length, numbers in sorted(by_length.items()):
        size = max(1, most_tokens // length)
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


def predict_tokens(models: list[Any], tokenizer: Any, prefixes: list[str], most_tokens: int) -> list[dict[str, Any]]:
    """The next tokens of the first model, and for each the logit gap of the second model."""
    import torch

    # As in a completions API: with the default special tokens of the tokenizer, such as BOS.
    prompts = [list(tokenizer(prefix)["input_ids"]) for prefix in prefixes]
    answers: list[dict[str, Any]] = [{} for _ in prefixes]
    for numbers in group_prompts(prompts, most_tokens):
        given = torch.tensor([prompts[number] for number in numbers])
        with torch.no_grad():
            logits, *others = (one(input_ids=given, logits_to_keep=1).logits[:, -1].float() for one in models)
        best = logits.topk(2)
        probabilities = logits.softmax(-1)
        for row, number in enumerate(numbers):
            token, second = (int(one) for one in best.indices[row])
            text, kind = spell_token(tokenizer, prompts[number], token)
            answers[number] = {
                "prefix": hashlib.sha256(prefixes[number].encode()).hexdigest()[:12],
                "tokens": len(prompts[number]),
                "token": token,
                "text": text,
                "kind": kind,
                "gap": round(float(best.values[row, 0] - best.values[row, 1]), 3),
                "probability": round(float(probabilities[row, token]), 4),
                "second": spell_token(tokenizer, prompts[number], second)[0],
                "turned_gap": round(compute_gap(others[0][row], token), 3) if others else None,
            }
    return answers


def compute_gap(logits: Any, token: int) -> float:
    """The difference of a token's logit to the best other one; negative if another is better."""
    best = logits.topk(2)
    other = best.values[1] if int(best.indices[0]) == token else best.values[0]
    return float(logits[token] - other)


def spell_token(tokenizer: Any, prompt: list[int], token: int) -> tuple[str, str]:
    """Text and kind of a token after the prompt; decoded alone it would lose its space in some tokenizers."""
    if token in set(tokenizer.all_special_ids):
        return str(tokenizer.decode([token])), "special"
    before = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    after = tokenizer.decode([*prompt, token], clean_up_tokenization_spaces=False)
    text = str(after[len(before) :])
    return text, "part" if "\ufffd" in text or not text else "text"


if __name__ == "__main__":
    main()
