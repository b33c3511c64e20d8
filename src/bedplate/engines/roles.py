"""Engines that bedplate itself uses for a purpose, whatever a plan is made for."""

from __future__ import annotations

from bedplate.engines.llama_cpp import ENGINE as GGUF_READER
from bedplate.engines.llama_cpp import SERVER as GGUF_SERVER
from bedplate.engines.pytorch import ENGINE as DEQUANTIZER

__all__ = ["DEQUANTIZER", "FIRST", "GGUF_READER", "GGUF_SERVER", "REFERENCE"]

FIRST = GGUF_READER
"""Installed where nothing is: it is the smallest, and runs everywhere."""
REFERENCE = DEQUANTIZER
"""In float32 it computes the tokens that the answers of others are compared with."""
