"""How much a request demands: its sequences, their length, and fields that the engine would not understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bedplate.run.gateway import sse
from bedplate.run.gateway.tasks import MAX_TEXTS
from bedplate.run.gateway.tenants import Demand, Rejection

MAX_CHOICES = 128
"""The most choices for one prompt, as in OpenAI's API."""
_COUNT_FIELDS = ("n", "n_cmpl", "best_of", "num_return_sequences")
_COST_FIELDS = {
    "n_cmpl": "n",
    "best_of": "n",
    "num_return_sequences": "n",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_tokens": None,
    "min_new_tokens": None,
    "ignore_eos": None,
    "generation_config": None,
}
"""Fields for length and count that only some engines understand, and the field of OpenAI's API to use instead."""
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def is_plain(api: sse.Api, asked: sse.RequestFields) -> bool:
    """Whether a request makes one sequence and has no field that `read_demand` would have to read."""
    return (
        asked.n is asked.ignore_eos is asked.stop is asked.min_tokens is asked.best_of is asked.n_predict is None
        and asked.n_cmpl is asked.num_return_sequences is asked.num_predict is asked.max_new_tokens is None
        and asked.min_new_tokens is asked.generation_config is asked.samplers is asked.n_probs is None
        and asked.logprobs is asked.top_logprobs is None
        and (api != "completions" or not _is_list(asked.prompt))
        and (api != "embeddings" or not _is_list(asked.input))
    )


def read_demand(
    api: sse.Api, asked: sse.RequestFields, fields: frozenset[str] | None, limits: Mapping[str, int]
) -> Demand | Rejection:
    """Reads what a request demands, or says why it is rejected.

    `fields` are the fields that the engines understand, in addition to those of all engines; `None`: not known.
    `limits` are the most entries of lists and the highest values of numbers.
    """
    for name, instead in _COST_FIELDS.items():
        value = getattr(asked, name)
        if fields is not None and name not in fields and not _has_no_effect(name, value):
            hint = f"; use {instead}" if instead is not None else ""
            return _reject(f"{name} is not supported for this model{hint}", "unsupported_parameter", name)
    for name, limit in limits.items():
        value = getattr(asked, name)
        if isinstance(value, int | float) and value > limit:
            return _reject(f"{name} may be at most {limit}", "invalid_value", name)
        if isinstance(value, list | str | dict) and len(value) > limit and not (name == "stop" and type(value) is str):
            return _reject(f"{name} may have at most {limit} entries", "too_many_entries", name)
    choices = 1
    for name in _COUNT_FIELDS:
        value = getattr(asked, name)
        if value is None or (fields is not None and name != "n" and name not in fields):
            continue
        if type(value) is not int or not 1 <= value <= MAX_CHOICES:
            return _reject(f"{name} must be an integer from 1 to {MAX_CHOICES}", "invalid_value", name)
        choices = max(choices, value)
    prompts, prompt_tokens = 1, None
    if api == "completions" and _is_list(asked.prompt):
        prompts, prompt_tokens = _count_prompts(asked.prompt)
    elif api == "embeddings" and _is_list(asked.input):
        # One batch without answers, which is charged for its tokens: it holds one slot, however many texts it has.
        texts, prompt_tokens = _count_prompts(asked.input)
        if texts > MAX_TEXTS:
            return _reject(f"input may have at most {MAX_TEXTS} entries", "too_many_entries", "input")
    return Demand(prompts, choices, prompt_tokens, _read_least_tokens(asked))


def list_prompts(prompt: msgspec.Raw) -> list[str | int]:
    """The prompts of a request: each text, or the number of its token ids."""
    try:
        value = msgspec.json.decode(prompt)
    except sse.UNREADABLE:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return []
    if any(type(one) is int for one in value):
        value = [value]
    return [one if isinstance(one, str) else len(one) for one in value if isinstance(one, str | list)]


def _read_least_tokens(asked: sse.RequestFields) -> int:
    given = [one for one in (asked.min_tokens, asked.min_new_tokens) if type(one) is int and one > 0]
    limit = asked.max_answer_tokens
    if asked.ignore_eos and limit is not None:
        given.append(limit)
    least = max(given, default=0)
    return least if limit is None else min(least, limit)


def _is_list(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"["


def _count_prompts(prompt: msgspec.Raw) -> tuple[int, int | None]:
    """The prompts in a list, and about how many tokens they have if they are token ids."""
    text = bytes(prompt)
    first = text[1:].lstrip()[:1]
    if first.isdigit():
        return 1, text.count(b",") + 1
    try:
        parts = _decode_list(prompt)
    except sse.UNREADABLE:
        return 1, None
    if any(bytes(memoryview(part)[:1]) not in b'"[{' for part in parts):
        return 1, None  # text and token ids of one prompt
    return max(1, len(parts)), text.count(b",") + 1 if first == b"[" else None


def _has_no_effect(name: str, value: Any) -> bool:
    return value is None or value is False or value == 0 or (value == 1 and name in _COUNT_FIELDS)


def _reject(message: str, code: str, param: str) -> Rejection:
    return Rejection(400, message, code, 0, param)
