#!/usr/bin/env python3
"""ExLlamaV2 behind an OpenAI-compatible server: one request at a time, because its paged mode needs flash-attn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bedplate.engines.shipped.openai_server import (
        GenerationRequest,
        HuggingFaceText,
        Piece,
        SequentialBackend,
        read_json,
        serve,
    )
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I does not add the folder of the script
    from openai_server import GenerationRequest, HuggingFaceText, Piece, SequentialBackend, read_json, serve

PAGE_TOKENS = 256


class ExLlamaV2Backend(SequentialBackend):
    engine = "exllamav2"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cache-bits", type=int, choices=(4, 6, 8), help="bits of the KV cache; default: 16")

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        import exllamav2
        from exllamav2.generator import ExLlamaV2DynamicGenerator

        tokens = -(-options.context // PAGE_TOKENS) * PAGE_TOKENS
        config = exllamav2.ExLlamaV2Config(options.model)
        config.arch_compat_overrides()
        if (base := _read_rope_base(options.model)) is not None:
            config.rotary_embedding_base = base
        # Version 0.3.2 passes no causal mask to PyTorch's attention; its own attention has one.
        config.no_sdpa = True
        config.max_seq_len = tokens
        model = exllamav2.ExLlamaV2(config)
        kinds = {None: "ExLlamaV2Cache", 8: "ExLlamaV2Cache_Q8", 6: "ExLlamaV2Cache_Q6", 4: "ExLlamaV2Cache_Q4"}
        cache = getattr(exllamav2, kinds[options.cache_bits])(model, max_seq_len=tokens, lazy=True)
        model.load_autosplit(cache, callback=lambda done, total: progress(0.9 * done / max(1, total)))
        tokenizer = exllamav2.ExLlamaV2Tokenizer(config)
        self.generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer, paged=False)
        self.slots, self.context_tokens = 1, options.context
        self.text = HuggingFaceText(options.model)
        self.ends = _list_eos_tokens(options.model, [config.eos_token_id, tokenizer.eos_token_id])
        progress(1.0)

    def stream(self, request: GenerationRequest) -> Iterator[Piece]:
        import torch
        from exllamav2.generator import ExLlamaV2DynamicJob

        job = ExLlamaV2DynamicJob(
            input_ids=torch.tensor([request.prompt], dtype=torch.long),
            max_new_tokens=request.max_tokens,
            gen_settings=_make_sampler_settings(request),
            seed=request.seed,
            stop_conditions=[] if request.ignore_eos else self.ends,
        )
        self.generator.enqueue(job)
        ended = False
        try:
            while not ended:
                for result in self.generator.iterate():
                    if result["stage"] == "streaming" and result["job"] is job:
                        ended = bool(result["eos"])
                        yield from _make_pieces(request, result)
        finally:
            if not ended:
                self.generator.cancel(job)


def _read_rope_base(folder: str) -> float | None:
    """The rotary base from a configuration of Transformers 5, whose keys ExLlamaV2 0.3.2 does not read."""
    config = read_json(Path(folder) / "config.json")
    rope = config.get("rope_parameters")
    if "rope_theta" in config or not isinstance(rope, dict):
        return None
    base = rope.get("rope_theta")
    return float(base) if isinstance(base, int | float) else None


def _list_eos_tokens(folder: str, known: list[int | None]) -> list[int]:
    """All EOS tokens: generation_config.json may name more than config.json."""
    also = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    more = also if isinstance(also, list) else [also]
    return sorted({token for token in (*known, *more) if isinstance(token, int)})


def _make_sampler_settings(request: GenerationRequest) -> Any:
    from exllamav2.generator import ExLlamaV2Sampler

    penalties = {
        "token_repetition_penalty": 1.0 if request.repetition_penalty is None else request.repetition_penalty,
        "token_frequency_penalty": request.frequency_penalty,
        "token_presence_penalty": request.presence_penalty,
    }
    if request.temperature == 0:
        return ExLlamaV2Sampler.Settings.greedy(**penalties)
    return ExLlamaV2Sampler.Settings(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        **penalties,
    )


def _make_pieces(request: GenerationRequest, result: dict[str, Any]) -> Iterator[Piece]:
    """The pieces of one result of the generator: any number of tokens, and possibly the end."""
    tokens = [int(token) for token in result["token_ids"].flatten().tolist()] if "token_ids" in result else []
    if not result["eos"]:
        yield from (Piece(request, token=token) for token in tokens)
    elif result.get("eos_reason") == "max_new_tokens" and tokens:
        yield from (Piece(request, token=token) for token in tokens[:-1])
        yield Piece(request, token=tokens[-1], finish="length")
    else:
        yield from (Piece(request, token=token) for token in tokens)
        end = result.get("eos_triggering_token_id")
        yield Piece(request, text="", token=end, tokens=0 if end is None else 1, finish="stop")


if __name__ == "__main__":
    serve(ExLlamaV2Backend())
