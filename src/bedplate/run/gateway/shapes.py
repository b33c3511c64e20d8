"""How prompts begin, as salted hashes: enough to see that two begin alike, and nothing of what they say. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from bedplate.run.gateway import sse
from bedplate.values.traffic import PREFIX_BLOCK_BYTES

MAX_BLOCKS = 128
PREFIX_BYTES = PREFIX_BLOCK_BYTES * MAX_BLOCKS
"""Of a text, what is looked at."""
CONVERSATION_BYTES = 2048


class _Speaker(msgspec.Struct):
    role: Any = None


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_speaker = msgspec.json.Decoder(_Speaker).decode


def prefix_hashes(text: bytes, salt: bytes) -> tuple[int, ...]:
    """One number of 63 bits for each block of the text's beginning, each standing for all of it up to there."""
    blake2b, key = hashlib.blake2b, salt[:64]
    if len(text) <= PREFIX_BLOCK_BYTES:  # most of them
        return (int.from_bytes(blake2b(text, key=key, digest_size=8).digest(), "big") >> 1,) if text else ()
    hashes = []
    before = b""
    for at in range(0, min(len(text), PREFIX_BYTES), PREFIX_BLOCK_BYTES):
        before = blake2b(before + text[at : at + PREFIX_BLOCK_BYTES], key=key, digest_size=8).digest()
        hashes.append(int.from_bytes(before, "big") >> 1)
    return tuple(hashes)


def conversation_of(asked: sse.Asked, salt: bytes) -> int | None:
    """A number that all requests of a conversation share, from the client's own key for it or from how it begins.

    The system prompt alone would send everybody's conversations to one replica, so that the first words of the user
    count, too.
    """
    if isinstance(asked.prompt_cache_key, str) and asked.prompt_cache_key:
        return _number(asked.prompt_cache_key.encode("utf-8", "replace"), salt)
    for part in (asked.messages, asked.input):
        try:
            if opening := _opening(_decode_list(part)):
                return _number(opening, salt)
        except sse.UNREADABLE:
            continue
    beginning, _ = asked.text(CONVERSATION_BYTES)
    return _number(beginning, salt) if beginning else None


def _opening(messages: list[msgspec.Raw]) -> bytes:
    """All up to and with the first words of the user."""
    opening = b""
    for message in messages[:8]:
        opening += memoryview(message)
        if _decode_speaker(message).role == "user":
            break
    return opening


def _number(data: bytes, salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, key=salt[:64], digest_size=8).digest(), "big") >> 1
