"""Engines that bedplate uses internally, independent of the plan."""

from __future__ import annotations

from bedplate.engines.llama_cpp import ENGINE as GGUF_READER
from bedplate.engines.llama_cpp import SERVER as GGUF_SERVER
from bedplate.engines.pytorch import ENGINE as DEQUANTIZER

__all__ = ["DEQUANTIZER", "FIRST", "GGUF_READER", "GGUF_SERVER", "REFERENCE"]

FIRST = GGUF_READER
"""Installed if no engine is installed: it is the smallest, and runs everywhere."""
REFERENCE = DEQUANTIZER
"""Computes the float32 reference tokens for greedy-token agreement."""
