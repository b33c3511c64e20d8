"""Sentence vectors in PyTorch as in Sentence Transformers: normalized mean over tokens. Prints JSON."""

from __future__ import annotations

import json
import sys


def main(folder: str, texts: list[str]) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    given = tokenizer(texts, padding=True, return_tensors="pt")
    mask = given["attention_mask"].unsqueeze(-1).float()
    with torch.no_grad():
        states = model(**given).last_hidden_state
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    print(json.dumps({"vectors": vectors.tolist(), "tokens": int(given["attention_mask"].sum())}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
