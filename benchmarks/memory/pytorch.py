"""Predicted and measured memory of PyTorch on a GPU, at several batches and lengths.

Uses an 8-billion-parameter Llama shape with random weights in bf16: memory does not depend on the weight values.

    python benchmarks/memory/pytorch.py --measure > measured.json     on a machine with torch, transformers and a GPU
    python benchmarks/memory/pytorch.py --predict measured.json       on a machine with bedplate
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
CASES = [(1, 128), (1, 2048), (1, 8192), (4, 512), (4, 2048), (16, 512), (16, 2048), (64, 512)]
NEW_TOKENS = 32


def measure() -> list[dict[str, object]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPE)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    rows: list[dict[str, object]] = []
    for batch, prompt in CASES:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, 128000, (batch, prompt), device="cuda")
        mask = torch.ones_like(tokens)
        with torch.inference_mode():
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        rows.append({"batch": batch, "prompt": prompt, "bytes": torch.cuda.max_memory_allocated()})
        print(rows[-1], file=sys.stderr)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return [{**row, **versions} for row in rows]


def predict(rows: list[dict[str, int]]) -> None:
    from bedplate.decide.memory import fit
    from bedplate.facts.hypothetical import make_simulated_hardware
    from bedplate.facts.known_models import find_model
    from bedplate.values import Workload

    model = find_model("meta-llama/Meta-Llama-3.1-8B")
    hardware = make_simulated_hardware({"accelerator": "H200 SXM", "count": 1, "ram_gb": 128, "os": "linux"})
    print("| batch | prompt | predicted GB | measured GB | error |\n| ---: | ---: | ---: | ---: | ---: |")
    errors = []
    for row in rows:
        work = Workload(concurrency=row["batch"], prompt_tokens=row["prompt"], output_tokens=NEW_TOKENS)
        (need,) = fit(hardware, model, work, "pytorch").devices
        error = need.total_bytes / row["bytes"] - 1
        errors.append(abs(error))
        sizes = f"{need.total_bytes / 1e9:.2f} | {row['bytes'] / 1e9:.2f}"
        print(f"| {row['batch']} | {row['prompt']:,} | {sizes} | {error:+.1%} |")
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--predict", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(), indent=1))
    elif options.predict:
        predict(json.loads(options.predict.read_text()))
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
