#!/usr/bin/env python3
"""llama-server for the xllamacpp wheel, which contains the server without a command line; has llama-server's options.

Runs in the engine's environment and depends only on that wheel.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

SPECULATION = ("draft-simple", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="llama-server", description=__doc__, allow_abbrev=False)
    p.add_argument("-m", "--model", required=True, help="GGUF file; for a split model its first part")
    p.add_argument("-a", "--alias", help="model name in the API")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8080)
    p.add_argument("--threads-http", type=int, default=-1, help="HTTP threads; one per connection")
    p.add_argument("--timeout", type=int, help="seconds without progress after which a connection is closed")
    p.add_argument("--api-key", default=os.environ.get("LLAMA_API_KEY"), help="API key that clients must send")
    p.add_argument("-c", "--ctx-size", type=int, default=0, help="context of all slots together; 0: as in the model")
    p.add_argument("-np", "--parallel", type=int, default=1, help="slots: maximum number of concurrent requests")
    p.add_argument("-b", "--batch-size", type=int)
    p.add_argument("-ub", "--ubatch-size", type=int)
    p.add_argument("-t", "--threads", type=int, default=-1, help="threads for decode")
    p.add_argument("-tb", "--threads-batch", type=int, help="threads for prefill; default: as --threads")
    p.add_argument("--poll", type=int, choices=range(101), metavar="0..100", help="how long idle threads spin")
    p.add_argument("-ngl", "--n-gpu-layers", type=int, default=0)
    p.add_argument("-ncmoe", "--n-cpu-moe", type=int, help="first layers whose experts stay in host memory")
    p.add_argument(
        "-sm", "--split-mode", choices=("none", "layer", "row", "tensor"), help="how the model is split over GPUs"
    )
    p.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"))
    p.add_argument("-ctk", "--cache-type-k", help="f16, q8_0, q4_0 …")
    p.add_argument("-ctv", "--cache-type-v", help="f16, q8_0, q4_0 …")
    p.add_argument("-cram", "--cache-ram", type=int, help="MiB for the prompt cache of earlier requests; 0: none")
    p.add_argument("-kvu", "--kv-unified", action="store_true", help="one KV cache for all slots")
    p.add_argument("--spec-type", choices=("none", *SPECULATION), default="none", help="speculative decoding")
    p.add_argument("-md", "--spec-draft-model", help="GGUF file of the draft model (draft-simple)")
    p.add_argument("--spec-draft-n-max", type=int, help="maximum number of drafted tokens")
    p.add_argument("--fit", choices=("on", "off"), default="on", help="reduce unset options until the model fits")
    p.add_argument("--lora-scaled", metavar="FILE:SCALE,...", help="LoRA adapters, each with its default scale")
    p.add_argument("--mmproj", metavar="FILE", help="GGUF file of the vision encoder and its projector")
    p.add_argument("--chat-template", help="chat template that replaces the one of the model")
    p.add_argument("--embeddings", "--embedding", action="store_true", help="serve only embeddings")
    p.add_argument("--pooling", choices=("none", "mean", "cls", "last", "rank"))
    p.add_argument("--metrics", action="store_true", help="enable /metrics")
    p.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True, help="enable /slots")
    p.add_argument("--webui", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--mmap", action=argparse.BooleanOptionalAction, default=True, help="memory-map the file instead of reading it"
    )
    p.add_argument("-lv", "--verbosity", type=int)
    return p


def make_adapter(path: str, scale: str):  # type: ignore[no-untyped-def]
    import xllamacpp

    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = path, float(scale)
    return adapter


def make_params(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The options as parameters of the wheel; unset options keep the server's default."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = options.model
    if hasattr(p, "hostnames"):
        p.hostnames = [options.host]
    else:  # before 2026.10
        p.hostname = options.host
    p.port = options.port
    p.n_threads_http = options.threads_http
    p.n_ctx = options.ctx_size
    p.n_parallel = options.parallel
    p.cpuparams.n_threads = options.threads
    p.cpuparams_batch.n_threads = options.threads if options.threads_batch is None else options.threads_batch
    p.n_gpu_layers = options.n_gpu_layers
    p.kv_unified = options.kv_unified
    p.fit_params = options.fit == "on"
    p.embedding = options.embeddings
    p.endpoint_metrics = options.metrics
    p.endpoint_slots = options.slots
    p.ui = options.webui
    p.warmup = options.warmup
    if options.poll is not None:
        p.cpuparams.poll = options.poll
        p.cpuparams_batch.poll = options.poll
    if options.spec_type != "none":
        name = f"COMMON_SPECULATIVE_TYPE_{options.spec_type.replace('-', '_').upper()}"
        p.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    if options.spec_draft_model is not None:
        p.speculative.draft.mparams.path = options.spec_draft_model
    if options.spec_draft_n_max is not None:
        p.speculative.draft.n_max = options.spec_draft_n_max
    if options.alias is not None:
        p.model_alias = {options.alias} if isinstance(p.model_alias, set) else options.alias
    if options.timeout is not None:
        p.timeout_read = p.timeout_write = options.timeout
    if options.api_key is not None:
        p.api_keys = [options.api_key]
    if options.batch_size is not None:
        p.n_batch = options.batch_size
    if options.ubatch_size is not None:
        p.n_ubatch = options.ubatch_size
    if options.cache_ram is not None:
        p.cache_ram_mib = options.cache_ram
    if options.lora_scaled is not None:
        p.lora_adapters = [make_adapter(*entry.rsplit(":", 1)) for entry in options.lora_scaled.split(",")]
    if options.mmproj is not None:
        p.mmproj.path = options.mmproj
    if options.chat_template is not None:
        p.chat_template = options.chat_template
    if options.verbosity is not None:
        p.verbosity = options.verbosity
    if not options.mmap:
        p.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    if options.flash_attn is not None:
        kinds = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
        p.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{kinds[options.flash_attn]}"
        )
    if options.n_cpu_moe:
        # As in llama-server: one pattern per layer.
        experts = (rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" for layer in range(options.n_cpu_moe))
        p.tensor_buft_overrides = ",".join(experts)
    if options.split_mode is not None:
        p.split_mode = getattr(xllamacpp.llama_split_mode, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    if options.pooling is not None:
        p.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}")
    for name in ("cache_type_k", "cache_type_v"):
        if (wanted := getattr(options, name)) is not None:
            types = {t.name.removeprefix("GGML_TYPE_").lower(): t for t in xllamacpp.ggml_type}
            if wanted.lower() not in types:
                sys.exit(f"llama-server: unknown cache type {wanted!r}; choose one of {', '.join(sorted(types))}")
            setattr(p, name, types[wanted.lower()])
    return p


def main() -> None:
    options = make_parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Loading holds the GIL, which would delay a Python signal handler.
        signal.signal(number, signal.SIG_DFL)
    import xllamacpp

    try:
        server = xllamacpp.Server(make_params(options))  # serves as long as the object exists
    except RuntimeError as error:
        # The server has already logged the cause, so no traceback is printed. A normal exit flushes the log, which a
        # separate thread writes.
        print(f"llama-server: {error}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(1)
    # The byte that C writes for a signal can be read at any later time. A lock that a handler releases would block
    # forever if the signal arrived just before the wait.
    signalled, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signalled.recv(1)
    _ = server
    # Threads that still generate, or wait for their parent, would delay a normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()
