"""Scores of text pairs in PyTorch, by a cross-encoder or a classifier. Prints JSON."""

from __future__ import annotations

import json
import sys


def main(folder: str, pairs: list[list[str]], has_types: bool) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [pair[0] for pair in pairs], [pair[1] for pair in pairs if len(pair) > 1]
    given = tokenizer(texts[0], texts[1] or None, padding=True, return_tensors="pt")
    if not has_types:  # llama.cpp gives both texts of a pair the first type
        given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
    with torch.no_grad():
        logits = model(**given).logits
    one = logits.shape[1] == 1
    probabilities = torch.sigmoid(logits) if one else torch.softmax(logits, dim=1)
    tokens = int(given["attention_mask"].sum())
    print(json.dumps({"logits": logits.tolist(), "probabilities": probabilities.tolist(), "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "typed")
