"""A fixed number of streams from an endpoint; each answer is checked to be complete, single, and from one engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.soak.crowd import Crowd

REQUEST_LIMIT_S = 900.0
TURNED_AWAY = {503: '"held_full"', 429: '"overloaded"'}
"""How a gateway rejects a request before it accepts it: status and error code."""


@dataclass
class Counts:
    """The results of all requests."""

    whole: int = 0
    tokens: int = 0
    """Of complete answers, from their usage."""
    failed: list[str] = field(default_factory=list)
    """No answer, an error, or an error event within a stream."""
    truncated: list[str] = field(default_factory=list)
    """A stream that ended without its last event, or with fewer tokens than requested."""
    duplicated: list[str] = field(default_factory=list)
    """Parts of two answers in one stream, or events after its end."""
    turned_away: int = 0
    """Rejected with Retry-After."""
    ttft_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def add(self, status: int, retry_after: str | None, text: str, asked_tokens: int) -> None:
        if retry_after is not None and TURNED_AWAY.get(status, "\0") in text:
            self.turned_away += 1
            return
        if status != 200:
            self.failed.append(f"HTTP {status}: {text[:200]}")
            return
        wrong = looked_at(text, asked_tokens)
        if wrong is None:
            self.whole += 1
            self.tokens += max(map(int, re.findall(r'"completion_tokens": ?(\d+)', text)))
        else:
            {"failed": self.failed, "truncated": self.truncated, "duplicated": self.duplicated}[wrong[0]].append(
                wrong[1]
            )


def looked_at(text: str, asked_tokens: int) -> tuple[str, str] | None:
    """Checks a stream of chat chunks; returns the kind of error and a message, or `None`."""
    events = [part[6:] for part in text.split("\n\n") if part.startswith("data: ")]
    if "[DONE]" not in events:
        return "truncated", f"no [DONE] after {len(events)} events: {text[-200:]!r}"
    if events.index("[DONE]") != len(events) - 1:
        return "duplicated", "events after [DONE]"
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    if error := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        return "failed", str(error)[:200]
    ids = {chunk.get("id") for chunk in chunks}
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    if len(ids) > 1 or len(ends) > 1:
        return "duplicated", f"{len(ids)} answers and {len(ends)} ends in one stream"
    if not ends:
        return "truncated", "no finish_reason"
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
    made = usage["completion_tokens"] if usage else None
    if made is None:
        return "truncated", "no usage"
    if made > asked_tokens:
        return "duplicated", f"{made} tokens, but {asked_tokens} were requested"
    if ends == ["length"] and made < asked_tokens:
        return "truncated", f"{made} of {asked_tokens} tokens, although the finish reason is length"
    return None


class Streams(Crowd):
    """Keeps `count` streams in flight within `async with`."""

    def __init__(
        self, url: str, model: str, count: int, tokens: int, *, think_s: float = 0.0, key: str | None = None
    ) -> None:
        super().__init__(url, model, count, think_s=think_s, limit_s=REQUEST_LIMIT_S, key=key)
        self.tokens = tokens
        self.counts = Counts()

    async def one(self, number: int) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Story number {number}: tell me about a river."}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        pieces: list[bytes] = []
        try:
            async with self.session.post(f"{self.url}/chat/completions", json=body) as answer:
                async for piece in answer.content.iter_any():
                    if not pieces and answer.status == 200:
                        self.counts.ttft_s.append(time.monotonic() - began)
                    pieces.append(piece)
                text = b"".join(pieces).decode("utf-8", "replace")
                self.counts.add(answer.status, answer.headers.get("Retry-After"), text, self.tokens)
        except (aiohttp.ClientError, TimeoutError) as error:
            kept = self.counts.truncated if pieces else self.counts.failed
            kept.append(f"{type(error).__name__}: {error}")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)
        self.counts.took_s.append(time.monotonic() - began)
