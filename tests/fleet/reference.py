"""The built-in GGUF as a Hugging Face folder, and the next tokens that PyTorch in float32 finds after fixed prefixes.

Runs in an environment of its own: reference.py GGUF FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PREFIXES = 500
LONGEST = 32
BATCH = 25
TEXT = """
Once upon a time there was a king who had three daughters, and the youngest of them was so beautiful that the sun, which
had seen so much, was astonished whenever it shone in her face. The capital of France is Paris, and the capital of
Germany is Berlin. Water boils at one hundred degrees Celsius and freezes at zero. def add(a, b): return a + b. To make
bread you need flour, water, salt and yeast; knead the dough for ten minutes and let it rest until it has doubled in
size. The quick brown fox jumps over the lazy dog, as everybody knows who has ever learned to type. In 1969 two people
walked on the Moon for the first time, while a third one circled above them. Dear Sir or Madam, I am writing to ask
whether the position that you advertised is still open. The heart pumps blood through the body; the lungs take in oxygen
and give off carbon dioxide. If it rains tomorrow, we will stay at home and play chess, but if the sun shines we will go
to the lake and swim. Prime numbers are those that only one and they themselves divide: two, three, five, seven, eleven.
She opened the door slowly, looked around the dark room, and whispered that somebody had been here before them. Light
travels about three hundred thousand kilometres in a second, and it takes eight minutes from the Sun to the Earth.
"""


def main(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    staging = folder.with_name(f".{folder.name}")
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    tokens = tokenizer(" ".join(TEXT.split()))["input_ids"]
    texts = [
        tokenizer.decode(tokens[max(0, end - length) : end])
        for end in range(4, len(tokens))
        for length in (LONGEST, LONGEST // 2)
    ]
    texts = texts[:: max(1, len(texts) // PREFIXES)][:PREFIXES]
    found: list[tuple[str, int, str]] = []
    for at in range(0, len(texts), BATCH):
        given = tokenizer(texts[at : at + BATCH], padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            logits = model(**given).logits
        for row, mask in enumerate(given["attention_mask"]):
            length = int(mask.sum())
            best = int(logits[row, length - 1].argmax())
            found.append((texts[at + row], length, tokenizer.decode([best], skip_special_tokens=True)))
    (staging / "next-tokens.json").write_text(json.dumps(found))
    staging.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
