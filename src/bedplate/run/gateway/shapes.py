"""Salted hashes of the beginnings of prompts: they show that two prompts share a prefix, not its content. Pure."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec

from bedplate.run.gateway import sse
from bedplate.values.traffic import PREFIX_BLOCK_BYTES

MAX_BLOCKS = 128
PREFIX_BYTES = PREFIX_BLOCK_BYTES * MAX_BLOCKS
"""Only this much of a prompt is hashed."""
CONVERSATION_BYTES = 2048


class _MessageRole(msgspec.Struct):
    role: Any = None


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_speaker = msgspec.json.Decoder(_MessageRole).decode


def hash_prefixes(text: bytes, salt: bytes) -> tuple[int, ...]:
    """One 63-bit hash for each block of the text's beginning; each covers the text up to the end of its block."""
    if len(text) <= PREFIX_BLOCK_BYTES:  # most prompts
        return (_hash_to_number(text, salt),) if text else ()
    hashes = []
    before = b""
    for at in range(0, min(len(text), PREFIX_BYTES), PREFIX_BLOCK_BYTES):
        hasher = _create_hasher(salt).copy()
        hasher.update(before + text[at : at + PREFIX_BLOCK_BYTES])
        before = hasher.digest()
        hashes.append(int.from_bytes(before, "big") >> 1)
    return tuple(hashes)


def hash_conversation(asked: sse.RequestFields, salt: bytes) -> int | None:
    """The same number for all requests of a conversation: from `prompt_cache_key`, or from its beginning.

    The beginning includes the first user message: the system prompt alone would send all conversations to one replica.
    """
    if isinstance(asked.prompt_cache_key, str) and asked.prompt_cache_key:
        return _hash_to_number(asked.prompt_cache_key.encode("utf-8", "replace"), salt)
    for part in (asked.messages, asked.input):
        try:
            if opening := _read_opening(_decode_list(part)):
                return _hash_to_number(opening, salt)
        except sse.UNREADABLE:
            continue
    beginning, _ = asked.get_prompt_text(CONVERSATION_BYTES)
    return _hash_to_number(beginning, salt) if beginning else None


def _read_opening(messages: list[msgspec.Raw]) -> bytes:
    """All messages up to and including the first user message."""
    opening = b""
    for message in messages[:8]:
        opening += memoryview(message)
        if _decode_speaker(message).role == "user":
            break
    return opening


def _hash_to_number(data: bytes, salt: bytes) -> int:
    hasher = _create_hasher(salt).copy()
    hasher.update(data)
    return int.from_bytes(hasher.digest(), "big") >> 1


@functools.lru_cache(maxsize=4)
def _create_hasher(salt: bytes) -> hashlib.blake2b:
    """To be copied for each hash, which takes less time than a new one with a key."""
    return hashlib.blake2b(key=salt[:64], digest_size=8)
