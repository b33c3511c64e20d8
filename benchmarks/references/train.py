#!/usr/bin/env python3
"""Train the three small models in tests/models on the documentation strings of Python's standard library.

    python benchmarks/references/train.py FOLDER --minutes 4

Runs in an environment with torch, transformers and sentencepiece, such as that of the PyTorch engine. The models share
a tokenizer of 512 tokens. They have about 0.4 million parameters, so they know the words of documentation, not facts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 512
SPACE = "\u2581"
"""SentencePiece's sign for a space."""
LENGTH = 128
BATCH = 10
HELD_OUT = 20_000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
SKIPPED = frozenset(["antigravity", "this", "idlelib", "test", "turtledemo", "lib2to3"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU time of each model")
    options = parser.parse_args()
    import torch
    import transformers

    text = collect_text()
    (options.folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(text, options.folder / "tokenizer")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    print(f"{len(text):,} characters, {len(tokens):,} tokens")
    configs = {
        "llama": transformers.LlamaConfig(**SHAPE),
        "qwen2": transformers.Qwen2Config(**SHAPE, use_sliding_window=False),
        "phi3": transformers.Phi3Config(**SHAPE, sliding_window=None),
    }
    for number, (name, config) in enumerate(configs.items()):
        if not (options.folder / name).exists():  # one that exists is kept
            torch.manual_seed(number)
            model = transformers.AutoModelForCausalLM.from_config(config)
            seconds = options.minutes * 60
            if name != "llama":
                first = transformers.AutoModelForCausalLM.from_pretrained(options.folder / "llama", dtype=torch.float32)
                model.load_state_dict(rename_weights(first.state_dict(), name), strict=False)
                seconds /= 4
            loss = train(model, tokens, seconds)
            print(f"{name}: {model.num_parameters():,} parameters, held-out loss {loss:.3f}")
            folder = options.folder / name
            model.to(torch.bfloat16).save_pretrained(folder)
            save_tokenizer(tokenizer, options.folder / "tokenizer", folder)


def collect_text() -> str:
    """The documentation strings of the standard library, without those that occur twice."""
    found: dict[str, None] = {}
    names = sorted(
        one.name
        for one in pkgutil.iter_modules()
        if one.name in sys.stdlib_module_names and not one.name.startswith("_") and one.name not in SKIPPED
    )
    for name in names:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(name)
            things = [module, *vars(module).values()]
            things += [one for thing in things if inspect.isclass(thing) for one in vars(thing).values()]
            for thing in things:
                words = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
                if len(words) > 60 and words.isascii():
                    found.setdefault(re.sub(r"[ \t]+", " ", words))
    return "\n\n".join(found)


def make_tokenizer(text: str, folder: Path) -> Any:
    import sentencepiece
    import tokenizers
    import transformers

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=written, vocab_size=VOCABULARY,
        model_type="bpe", byte_fallback=True, character_coverage=0.9995, normalization_rule_name="identity",
        remove_extra_whitespaces=False, max_sentence_length=20_000, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    vocabulary = {pieces.id_to_piece(number): number for number in range(VOCABULARY)}
    # A later piece has a lower score. Its merges are all ways to join it from two other pieces.
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in vocabulary.items()
        if not (pieces.is_byte(number) or pieces.is_control(number) or pieces.is_unknown(number))
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    unknown, begin, end = (pieces.id_to_piece(number) for number in range(3))
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(SPACE), tokenizers.normalizers.Replace(" ", SPACE)]
    )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(SPACE, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(content=" ", left=1),
        ]
    )  # fmt: skip
    made.add_special_tokens([unknown, begin, end])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
    )


def save_tokenizer(tokenizer: Any, source: Path, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes((source / "tokenizer.model").read_bytes())


def rename_weights(weights: dict[str, Any], kind: str) -> dict[str, Any]:
    """Those of the Llama model for another architecture: the others start from them, which saves most of the time."""
    import torch

    if kind == "qwen2":
        return weights  # its biases begin at 0
    joined = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    found = dict(weights)
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, parts in joined.items():
            block = f"model.layers.{layer}.{name.split('.')[0]}"
            found[f"model.layers.{layer}.{name}.weight"] = torch.cat(
                [found.pop(f"{block}.{part}.weight") for part in parts]
            )
    return found


def train(model: Any, tokens: Any, seconds: float) -> float:
    """Train for some CPU time; returns the loss on the end of the text."""
    import torch

    learned, held_out = tokens[:-HELD_OUT], tokens[-HELD_OUT:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95))
    began, step = time.process_time(), 0
    while (share := (time.process_time() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - 0.95 * share)
        starts = torch.randint(len(learned) - LENGTH, (BATCH,))
        batch = torch.stack([learned[start : start + LENGTH] for start in starts])
        batch[:, 0] = torch.where(torch.rand(BATCH) < 0.5, 1, batch[:, 0])  # texts begin with BOS
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, loss {float(loss):.3f}", flush=True)
    with torch.no_grad():
        rows = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)
        return float(model(input_ids=rows, labels=rows).loss)


if __name__ == "__main__":
    main()
