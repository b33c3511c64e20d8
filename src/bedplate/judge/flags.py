"""What engines call the same knob, so that advice can be followed; the names are those that their launches use."""

from __future__ import annotations

from typing import Literal

Knob = Literal["slots", "threads", "cache memory", "cache type", "batch tokens"]

FLAGS: dict[Knob, dict[str, str]] = {
    "slots": {
        "llama.cpp": "--parallel", "vllm": "--max-num-seqs", "sglang": "--max-running-requests",
        "tensorrt-llm": "--max_batch_size", "tgi": "--max-concurrent-requests", "lmdeploy": "--max-batch-size",
        "ollama": "OLLAMA_NUM_PARALLEL", "mlx": "--decode-concurrency", "mistral.rs": "--slots",
        "onnxruntime": "--slots", "exllamav2": "--slots", "exllamav3": "--slots", "pytorch": "--continuous-batching",
    },
    "threads": {
        "llama.cpp": "--threads", "pytorch": "OMP_NUM_THREADS", "onnxruntime": "--threads", "ollama": "num_thread",
        "mistral.rs": "--threads",
    },
    "cache memory": {
        "llama.cpp": "--ctx-size", "vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static",
        "tensorrt-llm": "--kv_cache_free_gpu_memory_fraction", "tgi": "--cuda-memory-fraction",
        "lmdeploy": "--cache-max-entry-count", "ollama": "OLLAMA_CONTEXT_LENGTH", "pytorch": "--cb-num-blocks",
        "exllamav3": "--cache-tokens",
    },
    "cache type": {
        "llama.cpp": "--cache-type-k q8_0 --cache-type-v q8_0", "vllm": "--kv-cache-dtype fp8",
        "sglang": "--kv-cache-dtype fp8_e4m3", "tgi": "--kv-cache-dtype fp8_e4m3fn", "lmdeploy": "--quant-policy int8",
        "ollama": "OLLAMA_KV_CACHE_TYPE", "mlx": "--kv-bits 8", "exllamav2": "--cache-bits 8",
        "exllamav3": "--cache-bits 8",
    },
    "batch tokens": {
        "llama.cpp": "--batch-size", "vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size",
        "tensorrt-llm": "--max_num_tokens", "tgi": "--max-batch-prefill-tokens", "lmdeploy": "--max-prefill-token-num",
        "mlx": "--prefill-step-size", "pytorch": "--cb-max-batch-tokens", "exllamav3": "--chunk-tokens",
        "ollama": "num_batch",
    },
}  # fmt: skip
ON_CPU: dict[tuple[Knob, str], str] = {
    ("cache memory", "vllm"): "--kv-cache-memory-bytes", ("threads", "vllm"): "VLLM_CPU_OMP_THREADS_BIND",
}  # fmt: skip
"""Where an engine has another name for it on a CPU."""


def flag(knob: Knob, engine: str, device: str | None = None) -> str | None:
    """The option's name; `None` where the engine has none, or it is not known."""
    if device == "cpu" and (knob, engine) in ON_CPU:
        return ON_CPU[knob, engine]
    return FLAGS[knob].get(engine)
