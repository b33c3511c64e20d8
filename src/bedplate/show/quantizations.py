"""Writes docs/quantizations.md: the quantizations that each engine has kernels for, by device, with their sources."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.engines import Engine, load_engines
from bedplate.engines.quantizations import SupportedQuantization

DEVICES = {
    "cuda": "NVIDIA", "rocm": "AMD", "metal": "Apple", "xpu": "Intel GPUs", "hpu": "Gaudi", "tt": "Tenstorrent",
    "cpu": "CPU", "vulkan": "Vulkan",
}  # fmt: skip
HEAD = """# Quantizations by engine and chip

Every quantized plan has a row on this page. The search offers weights and KV caches from these tables, and the verifier
checks each plan against them (`weights.kernels` and `cache.type` in the [rules](rules.md#what-is-verified)). Each row
cites the file and the version in which it was read. The tables are generated from the engine files by `make docs`.

"while loading" means that the engine quantizes 16-bit weights when it starts; a name without it means weights that are
published or converted in this form. 16-bit weights need no row.
"""


def write_quantizations_page() -> str:
    return "\n".join([HEAD, *(line for engine in load_engines().values() for line in _write_engine(engine))])


def list_rows(engine: Engine) -> tuple[SupportedQuantization, ...]:
    """The rows of weights, then those of an 8-bit KV cache."""
    return (*engine.quantizations, *(engine.eight_bit_cache.rows if engine.eight_bit_cache is not None else ()))


def _write_engine(engine: Engine) -> Iterator[str]:
    yield f"## {engine.name}\n"
    yield "| weights or cache | device | compute capability | source |"
    yield "| --- | --- | --- | --- |"
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row in list_rows(engine):
        what = f"KV cache {row.method}" if row.part == "cache" else row.method
        merged.setdefault((DEVICES[row.device], _describe_chip(row, engine), row.source), []).append(what)
    for (device, chip, source), names in merged.items():
        yield f"| {', '.join(names)} | {device} | {chip} | {source} |"
    yield ""


def _describe_chip(row: SupportedQuantization, engine: Engine) -> str:
    found = []
    if row.device == "cuda":
        least = max(row.least or engine.capability, engine.capability)
        found.append(f"from {_format(least)}")
        if row.below is not None:
            found.append(f"below {_format(row.below)}")
    if row.units is not None:
        found.append(f"with {row.units.upper()} units")
    return ", ".join(found) or "any"


def _format(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
