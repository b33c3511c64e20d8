"""Ask an endpoint for structured output: control requests that show what it supports, then the scored prompts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bedplate.measure.structured_prompts import (
    KINDS,
    PromptFile,
    StructuredPrompt,
    make_body,
    read_prompts,
    spread_kinds,
)
from bedplate.measure.structured_scoring import (
    AnswerScore,
    ChatReply,
    judge_support,
    read_reply,
    score_reply,
    summarize_all,
    summarize_kind,
)
from bedplate.values.capabilities import FEATURE_NAMES, Capabilities, Feature
from bedplate.values.structured import StructuredKind, StructuredOutput, StructuredSupport, Support

if TYPE_CHECKING:
    import aiohttp

LIMIT_S = 600.0
"""Prompts that would start after this time are left out."""
USUAL_S = 120.0
"""What the prompts usually take, for the estimate before a run."""
REQUEST_LIMIT_S = 300.0
IN_FLIGHT = 4
MAX_TOKENS = 128
CONTROL_TOKENS = 100
FEATURES: dict[StructuredKind, Feature] = {
    "json_schema": "json_schema", "json_object": "json_object", "tool_auto": "tools", "tool_required": "forced_tools",
    "tool_named": "forced_tools",
}  # fmt: skip


class KnownSupport(NamedTuple):
    support: Support
    reason: str | None


async def check(
    url: str,
    name: str,
    key: str | None,
    *,
    capabilities: Capabilities | None = None,
    limit_s: float = LIMIT_S,
    only: Sequence[str] | None = None,
) -> StructuredOutput:
    """Asks the endpoint at `url` as many prompts as `limit_s` allows.

    `capabilities`: what bedplate's gateway lets through for this engine; other kinds are not asked. `only`: ids of
    prompts, instead of all.
    """
    import aiohttp

    file = read_prompts()
    prompts = tuple(one for one in file.prompts if only is None or one.id in only)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        asking = StructuredProbe(session, url.rstrip("/").removesuffix("/v1"), name, file, limit_s)
        known = {kind: await asking.find_support(kind, capabilities) for kind in KINDS if _has_kind(prompts, kind)}
        supported = [kind for kind, found in known.items() if found.support not in ("ignored", "refused")]
        scores = await asking.ask_all(spread_kinds(tuple(one for one in prompts if one.kind in supported)))
    kinds = [_summarize(kind, found, scores) for kind, found in known.items()]
    return summarize_all(file, kinds, scores)


def _has_kind(prompts: Sequence[StructuredPrompt], kind: StructuredKind) -> bool:
    return any(one.kind == kind for one in prompts)


def _summarize(kind: StructuredKind, found: KnownSupport, scores: Sequence[AnswerScore]) -> StructuredSupport:
    return summarize_kind(kind, found.support, found.reason, [one for one in scores if one.prompt.kind == kind])


class StructuredProbe:
    """Sends the prompts to one endpoint within a time limit."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, file: PromptFile, limit_s: float) -> None:
        self._session, self._url, self._name, self._file = session, url, name, file
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    async def find_support(self, kind: StructuredKind, capabilities: Capabilities | None) -> KnownSupport:
        feature = FEATURES[kind]
        if capabilities is not None and not capabilities.supports(feature):
            return KnownSupport("refused", f"the gateway refuses {FEATURE_NAMES[feature]} for this engine")
        if kind == "tool_auto":
            return await self._find_tool_support()
        controls = [one for one in self._file.controls if one.kind == kind]
        scores = await asyncio.gather(*(self._ask(one, CONTROL_TOKENS) for one in controls))
        return KnownSupport(*judge_support(kind, [one for one in scores if one is not None]))

    async def _find_tool_support(self) -> KnownSupport:
        """Compares the lengths of one prompt with and without its tools."""
        prompt = next(one for one in self._file.prompts if one.kind == "tool_auto")
        body = make_body(prompt, self._file.tools, 1)
        bare = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
        replies: list[ChatReply] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.left_s):
                replies += [await self._post(one) for one in (body, bare) if self.left_s > 0]
        if len(replies) < 2:
            return KnownSupport("unknown", "there was no time for the control requests")
        score = score_reply(prompt, replies[0], self._file.tools)
        return KnownSupport(*judge_support("tool_auto", [score], replies[1]))

    async def ask_all(self, prompts: Sequence[StructuredPrompt]) -> list[AnswerScore]:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def ask_in_turn(prompt: StructuredPrompt) -> AnswerScore | None:
            async with gate:
                return await self._ask(prompt, MAX_TOKENS)

        found = await asyncio.gather(*map(ask_in_turn, prompts))
        return [one for one in found if one is not None]

    async def _ask(self, prompt: StructuredPrompt, max_tokens: int) -> AnswerScore | None:
        """`None`: there was no time for it."""
        if self.left_s <= 0:
            return None
        try:
            async with asyncio.timeout(self.left_s):
                reply = await self._post(make_body(prompt, self._file.tools, max_tokens))
        except TimeoutError:
            return None
        return score_reply(prompt, reply, self._file.tools)

    async def _post(self, body: dict[str, Any]) -> ChatReply:
        import aiohttp

        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json={"model": self._name, **body}
            ) as one:
                return read_reply(one.status, await one.read())
        except (aiohttp.ClientError, OSError) as error:
            return ChatReply(0, error=str(error) or type(error).__name__)
