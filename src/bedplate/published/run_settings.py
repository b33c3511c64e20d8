"""The settings of a published run that change its speed, read from all texts of a row by one parser.

Tables spell the same setting in many ways: `fa=1`, `-fa 1`, `--flash-attn on`, `flash attention: enabled`. A setting
that no text mentions is `None`, and the estimate averages over its values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

READ_FROM = ("backend", "engine", "engine_version", "scenario", "parallelism", "notes")
"""Columns that may mention a setting."""
ON = r"1|on|true|yes|enabled?|with"
OFF = r"0|off|false|no|none|disabled?|without|unset"
_LINK = r"\s*[:=]?\s*"
_SWITCHES = {
    "flash_attention": r"(?:--?)?(?:fa|flash[ _-]?attn|flash[ _-]?attention)",
    "hipblaslt": r"(?:rocblas[ _]use[ _])?hip ?blas ?lt",
    "rocwmma": r"(?:ggml[ _]hip[ _])?roc ?wmma(?:[ _]fattn)?",
}
_COUNTS = {
    "micro_batch": r"(?:n[ _-]?ubatch|ubatch(?:[ _-]size)?|-ub|micro[ _-]?batch(?:[ _-]size)?)",
    "batch": r"(?:n[ _-]batch|(?:b=)?-b|b(?==))",
    "threads": r"(?:n[ _-]?threads|threads|-t)",
}


class RunSettings(NamedTuple):
    """Settings of a run; `None`: not mentioned."""

    flash_attention: bool | None = None
    hipblaslt: bool | None = None
    """Whether rocBLAS passes products on to hipBLASLt."""
    rocwmma: bool | None = None
    """Whether flash attention was built with rocWMMA."""
    driver: str | None = None
    """The Vulkan driver on AMD: amdvlk or radv."""
    micro_batch: int | None = None
    batch: int | None = None
    threads: int | None = None
    instruction_sets: tuple[str, ...] = ()
    """The sets that the engine was compiled for, if it does not use all those of the CPU."""
    build: int | None = None
    """The build number of llama.cpp."""
    year: int | None = None
    """The year of the build, or of the measurement if no build is named."""


def read_run_settings(texts: Mapping[str, str]) -> RunSettings:
    """The settings that the texts of a row mention, however they are spelled."""
    text = " ; ".join(texts.get(name, "") for name in READ_FROM).lower()
    text = re.sub(r"[\s_]+(?=;)", "", re.sub(r"[\"'`,|()\[\]]", " ; ", text))
    return RunSettings(
        flash_attention=_find_switch(text, _SWITCHES["flash_attention"]),
        hipblaslt=_find_switch(text, _SWITCHES["hipblaslt"]),
        rocwmma=_find_switch(text, _SWITCHES["rocwmma"]),
        driver=next((name for name in ("amdvlk", "radv") if name in text), None),
        micro_batch=_find_count(text, _COUNTS["micro_batch"]),
        batch=_find_count(text, _COUNTS["batch"]),
        threads=_find_count(text, _COUNTS["threads"]),
        instruction_sets=_find_instruction_sets(text),
        build=_find_build(texts.get("engine_version", "").lower()),
        year=_find_year(texts.get("engine_version", "")) or _find_year(texts.get("date", "")),
    )


def _find_switch(text: str, pattern: str) -> bool | None:
    """Whether a switch is on. A name with an empty value is off: the table has a column for it, and it was not set."""
    if re.search(rf"\b(?:no|without|non|not){_LINK}{pattern}\b", text):
        return False
    name = rf"(?<![a-z0-9]){pattern}(?![a-z0-9])"
    if found := re.search(rf"{name}{_LINK}(?:is )?(?:({ON})|({OFF}))(?![a-z0-9.])", text):
        return found[1] is not None
    if re.search(rf"{name}\s*[:=]\s*(?:;|$)", text):
        return False
    return True if re.search(name, text) else None


def _find_count(text: str, pattern: str) -> int | None:
    found = re.search(rf"(?<![a-z0-9]){pattern}(?![a-z]){_LINK}(\d{{1,6}})(?!\d)", text)
    if found is None and pattern == _COUNTS["threads"]:
        found = re.search(r"(?<!\d)(\d{1,4})\s+threads", text)
    return max(1, int(found[1])) if found else None


def _find_instruction_sets(text: str) -> tuple[str, ...]:
    found = re.search(r"(?<![a-z0-9])instruction[ _-]?sets\s*[:=]\s*([a-z0-9_+ ]+)", text)
    return tuple(re.split(r"[ +]+", found[1].strip())) if found else ()


def _find_build(version: str) -> int | None:
    """The number of a build such as `b5863`, `a4575513 (5863)` or `build 5863`; years and hashes are none."""
    for found in re.finditer(r"(?<![0-9a-z.])(?:b|build[ :#]*)?(\d{4,5})(?![0-9a-z.])", version):
        number = int(found[1])
        if not 2015 <= number <= 2040 or found[0].startswith("b"):
            return number
    return None


def _find_year(text: str) -> int | None:
    found = re.search(r"(?<!\d)(20[12]\d)(?!\d{1,3}(?!\d)|\d{5,})", text)
    return int(found[1]) if found else None
