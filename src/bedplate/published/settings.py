"""Settings of an engine that a row states, whatever their spelling; a setting that it does not state is `None`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

OFF = frozenset({"off", "no", "none", "false", "disabled", "disable", "without", "0", "n"})
ON = frozenset({"on", "yes", "true", "enabled", "enable", "with", "1", "y", "mtp", "eagle", "eagle3", "draft", "ngram"})
_VALUE = r"\s*[=:]?\s*(?P<value>[\w.\-]+)?"
_SPECULATION = re.compile(
    r"(?<![a-z0-9])(?:(?P<not>no|non|without|w/o)[ _-]+)?"
    r"(?:(?P<count>num[_ -]?(?:speculative|spec|draft(?:ed)?|nextn)[_ -]?\w*"
    r"|speculative[_ -]num[_ -](?:steps|draft[_ -]tokens)"
    r"|(?:draft(?:ed)?|speculative|spec|mtp)[_ -]?(?:tokens|steps|length|layers))"
    r"|mtp|eagle3?|specul(?:ative|ation)(?:[_ -]?(?:decod(?:e|ing)|algorithm|method|config))?"
    r"|spec(?:(?=\s*[=:])|[_ -]?(?:decod(?:e|ing)|algorithm|method)))"
    r"(?:\s*[=:]\s*(?P<value>[a-z0-9.]+)|[ _-]?(?P<word>\d+|on|off|enabled|disabled))?(?![a-z0-9])"
)
_PASS_TOKENS = re.compile(
    r"(?:max[_ -]num[_ -](?:batched[_ -])?tokens|chunked[_ -]prefill(?:[_ -]size)?|prefill[_ -]chunk(?:[_ -]size)?)"
    r"\s*[=: ]\s*(\d{2,7})"
)
_KV_TYPE = re.compile(
    r"kv[_ -]?(?:cache)?[_ -]?(?:d?type|precision|bits|quant(?:ization)?)?\s*[=: ]\s*"
    r"(fp8|int8|8|q8|bf16|fp16|f16|16|auto)"
    r"|(fp8|int8|bf16|fp16)[_ -]kv"
)
_GRAPHS_OFF = re.compile(
    r"enforce[_ -]eager(?!\s*[=:]\s*(?:false|0|off|no))|disable[_ -]cuda[_ -]graphs?|eager[_ -]mode"
)
_GRAPHS = re.compile(r"(?:cuda|hip)[_ -]?graphs?" + _VALUE)
_WORKERS = re.compile(r"(?:num[_ -])?(prefill|decode)[_ -](?:num[_ -])?workers?\s*[=: ]\s*(\d{1,3})")
_WORKERS_SHORT = re.compile(r"(?<![a-z0-9])(\d{1,3})p(\d{1,3})d(?![a-z0-9])")


class ServingSettings(NamedTuple):
    speculates: bool | None = None
    """Whether tokens are drafted: multi-token-prediction heads, EAGLE, n-grams."""
    drafted_tokens: int | None = None
    """Drafted tokens per step and sequence."""
    pass_tokens: int | None = None
    """Prefill chunk size: maximum prompt tokens of a pass."""
    kv_bits: float | None = None
    graphs: bool | None = None
    """Whether passes are captured graphs."""
    prefill_workers: int | None = None
    decode_workers: int | None = None
    day: str = ""
    """Day of the measurement, such as `2026-01-31`."""
    image: str = ""
    """Tag of the container image."""


def parse_settings(texts: Mapping[str, str], notes: Mapping[str, str]) -> ServingSettings:
    """The settings in the notes, the scenario and the name of the engine."""
    text = " ; ".join(texts.get(name, "") for name in ("notes", "scenario", "engine")).lower()
    speculates, drafted = _parse_speculation(text)
    found = _PASS_TOKENS.search(text)
    workers = {side: int(count) for side, count in _WORKERS.findall(text)}
    if short := _WORKERS_SHORT.search(text):
        workers = {"prefill": int(short[1]), "decode": int(short[2]), **workers}
    return ServingSettings(
        speculates=speculates,
        drafted_tokens=drafted,
        pass_tokens=int(found[1]) if found else None,
        kv_bits=_parse_kv_bits(text),
        graphs=False if _GRAPHS_OFF.search(text) else _parse_switch(_GRAPHS.finditer(text)),
        prefill_workers=workers.get("prefill"),
        decode_workers=workers.get("decode"),
        day=_parse_day(texts.get("date", "")) or _parse_day(notes.get("measured", "") or notes.get("date", "")),
        image=next((notes[name] for name in ("image", "container", "docker") if notes.get(name)), "").rpartition(":")[
            2
        ],
    )


def _parse_speculation(text: str) -> tuple[bool | None, int | None]:
    """Whether tokens are drafted, and how many; the last statement counts."""
    speculates: bool | None = None
    drafted: int | None = None
    for found in _SPECULATION.finditer(text):
        value = found["value"] or found["word"] or ""
        if found["not"] or value in OFF:
            speculates, drafted = False, 0
        elif value.isdigit() and (found["count"] or int(value) > 1):
            speculates, drafted = True, int(value)
        elif not found["count"]:
            speculates, drafted = True, drafted or None
    return speculates, drafted


def _parse_kv_bits(text: str) -> float | None:
    found = _KV_TYPE.search(text)
    if found is None or (label := found[1] or found[2]) == "auto":
        return None
    return 8.0 if "8" in label else 16.0


def _parse_switch(found: Iterable[re.Match[str]]) -> bool | None:
    for one in found:
        return (one["value"] or "") not in OFF
    return None


def _parse_day(text: str) -> str:
    found = re.match(r"\s*(20\d\d)-?(\d\d)-?(\d\d)", text)
    return f"{found[1]}-{found[2]}-{found[3]}" if found else ""
