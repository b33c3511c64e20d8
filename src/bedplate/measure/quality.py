"""Check the answers of an endpoint: greedy-token agreement, divergence, perplexity, and garbled text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bedplate.measure.agreement import Reply, ask, choose_floor, choose_quick_prefixes, compare, judge_comparison
from bedplate.measure.garbled import find_garbling
from bedplate.measure.likelihood import (
    ListedTokens,
    PerplexityComparison,
    compare_echo,
    compute_continued_perplexity,
    compute_mean_divergence,
    find_likelihood,
    read_echo,
    read_fixed_text,
    read_listed,
)
from bedplate.measure.prefixes import choose_spread
from bedplate.measure.reference import Likelihood, Reference, TextPlace, find_reference
from bedplate.values import Model, Plan
from bedplate.values.run import Quality

if TYPE_CHECKING:
    import aiohttp

PREFIXES = 128
"""With 48, one wrong answer more than the other engine already leaves it open whether the answers are as good."""
LIMIT_S = 90.0
"""Time limit of the whole check; it applies once there are answers of each kind."""
IN_FLIGHT = 4
AT_ONCE = 8
REQUEST_LIMIT_S = 120.0
LISTED = (20, 5)
"""Numbers of alternatives to request: what most endpoints accept, and the limit of the oldest API."""
PLACES = 24
"""Places in the text where the reference lists the next token."""
LEAST_PLACES = 6
FLOOR = 0.97
"""The required share for an endpoint with unknown quantization: that of 8-bit weights."""
TEXT_TOKENS = 96
PROMPT = "Every morning the old gardener walked through the village to the river, and on the way he"


async def check(
    url: str,
    name: str,
    key: str | None,
    *,
    plan: Plan | None = None,
    model: Model | None = None,
    limit_s: float = LIMIT_S,
) -> Quality:
    """Checks an endpoint within about a minute. What it does not report stays `None`, with a note.

    The check ends after `limit_s`, or after twice that time if the endpoint does not answer.
    """
    try:
        async with asyncio.timeout(2 * limit_s):
            return await _check(url, name, key, plan, model, TimeLimit(limit_s))
    except TimeoutError:
        return Quality(note=f"the check of the answers took longer than {2 * limit_s:.0f} s")


async def _check(
    url: str, name: str, key: str | None, plan: Plan | None, model: Model | None, clock: TimeLimit
) -> Quality:
    import aiohttp

    facts = (plan.source or plan.model) if plan is not None else model
    reference = await asyncio.to_thread(find_reference, facts) if facts is not None else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        asking = QualityProbe(session, url.rstrip("/").removesuffix("/v1"), name)
        wrong = describe_garbling(await asking.request_text())
        found = Quality(note="there is no reference for these weights", garbled=wrong)
        if reference is not None:
            found = await check_agreement(
                asking, reference, key, clock, choose_floor(plan) if plan is not None else FLOOR, wrong
            )
        return await add_likelihood(asking, found, find_likelihood(reference) if reference else None, clock)


class TimeLimit:
    """The remaining time of a limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()


def describe_garbling(text: str | None) -> str | None:
    return None if text is None else find_garbling(text)


class QualityProbe:
    """Sends small requests to an endpoint; `None`: no usable response."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session = session
        self.url = url
        self.name = name

    async def request_text(self) -> str | None:
        """A short text, from the completions or the chat API."""
        body = {"max_tokens": TEXT_TOKENS, "temperature": 0}
        status, response = await self.post("/v1/completions", {**body, "prompt": PROMPT})
        if status == 200:
            return _read_first_text(response, "text")
        chat = [{"role": "user", "content": f"Continue this story: {PROMPT}"}]
        status, response = await self.post("/v1/chat/completions", {**body, "messages": chat})
        return _read_first_text(response, "content") if status == 200 else None

    async def request_listed(self, prefix: str, count: int) -> tuple[int, ListedTokens | None]:
        body = {"prompt": prefix, "max_tokens": 1, "temperature": 0, "logprobs": count}
        status, response = await self.post("/v1/completions", body)
        return status, read_listed(response) if status == 200 else None

    async def request_echo(self, text: str) -> list[float] | None:
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        status, response = await self.post("/v1/completions", body)
        return read_echo(response, text) if status == 200 else None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.post(f"{self.url}{path}", json={"model": self.name, **body}) as answer:
                return answer.status, await answer.read()
        return 0, b""


def _read_first_text(body: bytes, field: str) -> str | None:
    import msgspec

    try:
        choice = msgspec.json.decode(body)["choices"][0]
        found = choice["text"] if field == "text" else choice["message"]["content"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


async def check_agreement(
    asking: QualityProbe, reference: Reference, key: str | None, clock: TimeLimit, floor: float, wrong: str | None
) -> Quality:
    """Compares next tokens with the reference, as many as the time limit allows."""
    pairs = choose_quick_prefixes(reference.list_known(), PREFIXES)
    replies: list[Reply] = []
    while len(replies) < len(pairs) and (not replies or clock.left_s > clock.limit_s / 2):
        some = pairs[len(replies) : len(replies) + AT_ONCE]
        replies += await ask(asking.url, some, model=asking.name, key=key, in_flight=IN_FLIGHT)
    found = compare(pairs[: len(replies)], replies)
    verdict, why = judge_comparison(found, floor)
    return Quality(
        asked=found.asked,
        agreement=found.agreed / found.answered if found.answered else None,
        verdict=verdict,
        note=why,
        garbled=wrong,
        reference=reference.made_with,
    )


async def add_likelihood(asking: QualityProbe, found: Quality, known: Likelihood | None, clock: TimeLimit) -> Quality:
    """Adds divergence and perplexity, with the reference's, if the endpoint reports log-probabilities."""
    from bedplate.values import replace_fields

    places = (
        choose_spread([place for place in known.places if place.next[0] in dict(place.top)], PLACES) if known else ()
    )
    listed = await _request_listed(asking, places, clock)
    places = places[: len(listed)]
    divergence, divergence_error = compute_mean_divergence(places, listed) or (None, None)
    echoed = await asking.request_echo(read_fixed_text()) if clock.left_s > 0 else None
    compared: PerplexityComparison | None
    compared = compare_echo(echoed, known) if echoed else compute_continued_perplexity(places, listed)
    found = replace_fields(found, divergence=divergence, divergence_error=divergence_error)
    if compared is None:
        return found
    return replace_fields(
        found,
        perplexity=compared.own,
        reference_perplexity=compared.reference,
        perplexity_error=compared.error,
    )


async def _request_listed(
    asking: QualityProbe, places: Sequence[TextPlace], clock: TimeLimit
) -> list[ListedTokens | None]:
    """The most likely tokens at places in the text; empty if the endpoint reports no log-probabilities."""
    text, count = read_fixed_text(), LISTED[0]
    found: list[ListedTokens | None] = []
    for place in places:
        status, listed = await asking.request_listed(text[: place.end], count)
        if listed is None and not any(found):
            if status == 400 and count != LISTED[-1]:
                count = LISTED[-1]
                status, listed = await asking.request_listed(text[: place.end], count)
            if listed is None:
                return []
        found.append(listed)
        if clock.left_s < 0 and len(found) >= LEAST_PLACES:
            break
    return found
