#!/usr/bin/env python3
"""ExLlamaV3 behind an OpenAI-compatible server: paged cache, continuous batching, JSON schemas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bedplate.engines.shipped.openai_server import (
        BackendError,
        EngineBackend,
        GenerationRequest,
        HuggingFaceText,
        Piece,
        read_json,
        serve,
    )
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I does not add the folder of the script
    from openai_server import BackendError, EngineBackend, GenerationRequest, HuggingFaceText, Piece, read_json, serve

PAGE_TOKENS = 256
RESERVED_GB = 0.5
"""Memory of each GPU that the loader leaves free; the default of ExLlamaV3."""


class ExLlamaV3Backend(EngineBackend):
    engine = "exllamav3"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cards", type=int, default=1, help="number of visible GPUs to use")
        parser.add_argument(
            "--tensor-parallel", action="store_true", help="split each layer over the GPUs instead of whole layers"
        )
        parser.add_argument(
            "--cache-tokens", type=int, help="KV cache size for all requests; default: slots times context"
        )
        parser.add_argument("--cache-bits", type=int, choices=range(2, 9), help="bits of the KV cache; default: 16")
        parser.add_argument("--chunk-tokens", type=int, default=2048, help="prefill chunk size")

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        import exllamav3
        import torch

        config = exllamav3.Config.from_directory(options.model)
        model = exllamav3.Model.from_config(config)
        bits = options.cache_bits
        kind = exllamav3.CacheLayer_fp16 if bits is None else exllamav3.CacheLayer_quant
        cache = exllamav3.Cache(
            model,
            max_num_tokens=_round_to_pages(options.cache_tokens or options.slots * options.context),
            layer_type=kind,
            max_batch_size=options.slots,
            **({} if bits is None else {"k_bits": bits, "v_bits": bits}),
        )
        model.load(
            **_choose_placement(options.cards, options.tensor_parallel, torch.cuda.device_count()),
            max_chunk_size=options.chunk_tokens,
            max_batch_size=options.slots,
            callback=lambda done, total: progress(0.9 * done / max(1, total)),
        )
        self.tokenizer = exllamav3.Tokenizer.from_config(config)
        self.generator = exllamav3.Generator(
            model=model,
            cache=cache,
            tokenizer=self.tokenizer,
            max_batch_size=options.slots,
            max_chunk_size=options.chunk_tokens,
        )
        self.slots, self.context_tokens = options.slots, options.context
        self.text = HuggingFaceText(options.model)
        self.structured = frozenset(["json_schema"])
        self.ends = _list_eos_tokens(options.model, [*config.eos_token_id_list, self.tokenizer.eos_token_id])
        self._jobs: dict[GenerationRequest, Any] = {}
        progress(1.0)

    def admit(self, request: GenerationRequest) -> None:
        import exllamav3
        import torch

        try:
            filters = [_make_schema_filter(self.tokenizer, request.schema)] if request.schema is not None else None
            job = exllamav3.Job(
                input_ids=torch.tensor([request.prompt], dtype=torch.long),
                max_new_tokens=request.max_tokens,
                sampler=_make_sampler(request),
                seed=request.seed,
                stop_conditions=[] if request.ignore_eos else self.ends,
                filters=filters,
                identifier=request,
            )
            self.generator.enqueue(job)
        except (AssertionError, ValueError) as problem:
            raise BackendError(str(problem) or "the engine rejected the request") from problem
        self._jobs[request] = job

    def step(self) -> list[Piece]:
        pieces: list[Piece] = []
        for result in self.generator.iterate():
            request = result.get("identifier")
            if request is None:
                request = result["job"].identifier
            if result["stage"] == "streaming" and request in self._jobs:
                pieces += _make_pieces(request, result)
                if result["eos"]:
                    del self._jobs[request]
        return pieces

    def cancel(self, request: GenerationRequest) -> None:
        if (job := self._jobs.pop(request, None)) is not None:
            self.generator.cancel(job)

    def kv_use(self) -> float | None:
        stats = self.generator.get_cache_stats()
        return float(stats["used_tokens"] / stats["max_tokens"]) if stats["max_tokens"] else None


def _round_to_pages(tokens: int) -> int:
    """The number of tokens, rounded up to whole pages."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def _choose_placement(cards: int, tensor_parallel: bool, visible: int) -> dict[str, Any]:
    if cards == 1:
        return {"device": "cuda:0"}
    # A negative reserve excludes a GPU.
    reserve = [RESERVED_GB if card < cards else -1.0 for card in range(max(cards, visible))]
    return {"reserve_per_device": reserve, "tensor_p": tensor_parallel}


def _list_eos_tokens(folder: str, known: list[int | None]) -> list[int]:
    """All EOS tokens: generation_config.json may name more than config.json."""
    also = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    more = also if isinstance(also, list) else [also]
    return sorted({token for token in (*known, *more) if isinstance(token, int)})


def _make_sampler(request: GenerationRequest) -> Any:
    from exllamav3 import ComboSampler

    return ComboSampler(
        rep_p=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        freq_p=request.frequency_penalty,
        pres_p=request.presence_penalty,
        temperature=request.temperature,
        min_p=request.min_p or 0.0,
        top_k=request.top_k or 0,
        top_p=request.top_p,
    )


def _make_schema_filter(tokenizer: Any, schema: str) -> Any:
    from exllamav3 import LLGuidanceFilter

    return LLGuidanceFilter(tokenizer, eos_after_completed=True, json_schema=schema)


def _make_pieces(request: GenerationRequest, result: dict[str, Any]) -> list[Piece]:
    """The pieces of one result of the generator: any number of tokens, and possibly the end."""
    tokens = [int(token) for token in result["token_ids"].flatten().tolist()] if "token_ids" in result else []
    if not result["eos"]:
        return [Piece(request, token=token) for token in tokens]
    cached = result.get("cached_tokens")
    if result.get("eos_reason") == "max_new_tokens" and tokens:
        *before, last = tokens
        end = Piece(request, token=last, finish="length", cached_tokens=cached)
    else:
        # The EOS token is counted but not shown.
        before, end_token = tokens, result.get("eos_triggering_token_id")
        counted = 0 if end_token is None else 1
        end = Piece(request, text="", token=end_token, tokens=counted, finish="stop", cached_tokens=cached)
    return [*(Piece(request, token=token) for token in before), end]


if __name__ == "__main__":
    serve(ExLlamaV3Backend())
