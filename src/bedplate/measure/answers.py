"""Compare the answers of a challenger with the reference and with the engine in service, by greedy-token agreement.

docs/agreement.md explains the method and the effect of quantization.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from bedplate import store
from bedplate.errors import OutsideFailed
from bedplate.measure.agreement import (
    CLEAR_GAP,
    LEAST_SPACES,
    QUICK_TOKENS,
    Answer,
    Comparison,
    Failed,
    Pairs,
    Reply,
    ask,
    compare,
    floor_for,
    judged,
    quick_ones,
    read_answer,
    stored_bits,
    verdict_of,
)
from bedplate.measure.garbled import garbled
from bedplate.measure.likelihood import read_listed
from bedplate.measure.moments import now_text
from bedplate.measure.prefixes import fixed_prefixes, spread
from bedplate.measure.reference import Known, reference_for
from bedplate.store import fingerprint
from bedplate.values import Hardware, Plan
from bedplate.values.agreement import Agreement
from bedplate.values.migration import Checked, Stage

if TYPE_CHECKING:
    import aiohttp

    from bedplate.measure.reference import Reference

ASKED = 48
ASKED_IN_SERVICE = 24
"""Fewer and shorter prefixes for the engine in service, because it has clients. The challenger gets them too."""
MOST_CHARACTERS = 160
IN_FLIGHT = 2
"""Low, because requests of clients have priority."""
AT_ONCE = 8
IN_SERVICE_S, LEAST_ASKED = 15.0, 8
CHECK_S, LEAST_CHECKED = 45.0, 24
"""Time limits of the requests; they apply once there are at least this many answers."""
ALTERNATIVES = 2
UNCLEAR_FLOORS = ((16.0, 0.90), (8.0, 0.85), (6.0, 0.70), (5.0, 0.50), (0.0, 0.40))
"""Like `FLOORS`, for all prefixes including near ties, if an engine reports no log-probabilities."""
REQUEST_LIMIT_S = 180.0
WARM_TOKENS = 24
PROMPTS = (
    "Every morning the old gardener walked through the village to the river, and on the way he",
    "The committee met on Thursday to discuss the new bridge. Its first question was",
    "A list of things to take on a long walk in the mountains:",
    "The difference between weather and climate is that",
)


class Where(NamedTuple):
    """The address of an engine."""

    url: str
    key: str | None
    name: str
    """Served name of the model."""


class Basis(NamedTuple):
    """The answers that a challenger is compared with."""

    plan: Plan | None
    """Plan of the engine in service; `None`: there is none."""
    pairs: Pairs
    """The prefixes with the answers of the engine in service."""
    clear_known: bool
    """Whether it is known which prefixes have a clear answer."""
    strips: bool
    """Whether the engine in service strips leading spaces."""
    reference: Reference | None
    failure: str | None = None
    """Why requests to the engine in service failed."""


async def basis_of(facts: Plan, incumbent: Plan | None, where: Where | None, *, most: int = ASKED_IN_SERVICE) -> Basis:
    """Collects the answers of the engine in service while it still runs. `facts` is the plan of the challenger."""
    reference = await asyncio.to_thread(reference_for, facts.source or facts.model)
    if where is None or incumbent is None:
        return Basis(None, (), True, False, reference)
    quick = quick_ones(reference.known(), ASKED) if reference is not None else ()
    gaps = {prefix: one.gap for prefix, one in quick if one.tokens <= QUICK_TOKENS}
    short = tuple(gaps) or tuple(one for one in fixed_prefixes() if len(one) <= MOST_CHARACTERS)
    prefixes = spread(short, most)
    answers: list[tuple[Reply, float | None]] = []
    until = time.monotonic() + IN_SERVICE_S
    while len(answers) < len(prefixes) and (len(answers) < LEAST_ASKED or time.monotonic() < until):
        some = prefixes[len(answers) : len(answers) + AT_ONCE]
        answers += await _heard(where, some, with_gaps=not gaps)
    prefixes = prefixes[: len(answers)]
    texts = [one.text for one, _ in answers if isinstance(one, Answer)]
    strips = len(texts) >= LEAST_SPACES and not any(text.startswith(" ") for text in texts)
    pairs = [
        (prefix, as_known(answer, gaps.get(prefix, gap), strips))
        for prefix, (answer, gap) in zip(prefixes, answers, strict=True)
        if isinstance(answer, Answer)
    ]
    failures = [one.why for one, _ in answers if isinstance(one, Failed)]
    clear_known = bool(gaps) or any(gap is not None for _, gap in answers)
    return Basis(incumbent, tuple(pairs), clear_known, strips, reference, failures[-1] if failures else None)


def as_known(answer: Answer, gap: float | None, strips: bool) -> Known:
    """Converts an engine's answer to a reference answer. Without a gap it counts as clear."""
    text = answer.text.strip() if strips else answer.text
    kind = "text"
    if answer.ended and not answer.text:
        kind = "special"
    elif not answer.text.strip("\ufffd "):
        kind = "part"
    return Known(text, kind, answer.prompt_tokens or 0, CLEAR_GAP if gap is None else gap)  # type: ignore[arg-type]


async def _heard(where: Where, prefixes: Sequence[str], *, with_gaps: bool) -> list[tuple[Reply, float | None]]:
    """The answer to each prefix, and its gap to the second best token if the engine reports log-probabilities."""
    if not with_gaps:
        replies = await ask(where.url, _plain(prefixes), model=where.name, key=where.key, in_flight=IN_FLIGHT)
        return [(one, None) for one in replies]
    import aiohttp

    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    timeout, gate = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S), asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def one(prefix: str) -> tuple[Reply, float | None]:
            async with gate:
                status, body = await _next_token(session, where, prefix, ALTERNATIVES)
                if status == 400:  # some engines reject `logprobs`
                    status, body = await _next_token(session, where, prefix, None)
            if status == 0:
                return Failed(why=body.decode("utf-8", "replace")), None
            listed = read_listed(body)
            best = sorted(listed.top.values(), reverse=True) if listed is not None else []
            return read_answer(status, body), best[0] - best[1] if len(best) > 1 else None

        return list(await asyncio.gather(*(one(prefix) for prefix in prefixes)))


async def _next_token(
    session: aiohttp.ClientSession, where: Where, prefix: str, alternatives: int | None
) -> tuple[int, bytes]:
    body: dict[str, object] = {"model": where.name, "prompt": prefix, "max_tokens": 1, "temperature": 0}
    if alternatives is not None:
        body["logprobs"] = alternatives
    return await _post(session, f"{where.url}/v1/completions", body)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[int, bytes]:
    """Returns status and body. Status 0: no response, and the body is the reason."""
    import aiohttp

    try:
        async with session.post(url, json=body) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return 0, (str(error) or type(error).__name__).encode()


def _plain(prefixes: Iterable[str]) -> Pairs:
    return tuple((prefix, Known("", "text", 0, 0.0)) for prefix in prefixes)


# the challenger


async def checked(
    hardware: Hardware, plan: Plan, where: Where, basis: Basis, stage: Stage, *, most: int = ASKED
) -> tuple[Checked, ...]:
    """Compares the challenger with the engine in service, and with the reference if there is one."""
    by_reference = quick_ones(basis.reference.known(), most) if basis.reference is not None else ()
    by_incumbent = spread(basis.pairs, most)
    # Common prefixes first, so that both comparisons have answers if the time limit is reached.
    prefixes = dict.fromkeys([*(prefix for prefix, _ in by_incumbent), *(prefix for prefix, _ in by_reference)])
    if not prefixes:
        return (_unchecked(stage, basis.failure or "there is neither a reference nor an engine in service"),)
    answers = await _answered(where, tuple(prefixes))
    by_reference = tuple(pair for pair in by_reference if pair[0] in answers)
    by_incumbent = tuple(pair for pair in by_incumbent if pair[0] in answers)
    found = []
    if basis.reference is not None and by_reference:
        agreement = judged(
            plan,
            basis.reference,
            compare(by_reference, [answers[prefix] for prefix, _ in by_reference]),
            at=now_text(),
            machine=fingerprint(hardware),
        )
        found.append(_checked(agreement, "the reference", stage, agreement.floor, agreement.verdict, agreement.why))
        if agreement.verdict != "unchecked" and stage == "answers":
            await asyncio.to_thread(_keep, agreement)
    if by_incumbent and basis.plan is not None:
        found.append(
            against_incumbent(plan, basis, by_incumbent, [answers[prefix] for prefix, _ in by_incumbent], stage)
        )
    return tuple(found)


async def _answered(where: Where, prefixes: Sequence[str]) -> dict[str, Reply]:
    """Requests answers until the time limit, and at least `LEAST_CHECKED`: on a busy machine all would take minutes."""
    found: dict[str, Reply] = {}
    until = time.monotonic() + CHECK_S
    while len(found) < len(prefixes) and (len(found) < LEAST_CHECKED or time.monotonic() < until):
        some = prefixes[len(found) : len(found) + AT_ONCE]
        replies = await ask(
            where.url, _plain(some), model=where.name, key=where.key, in_flight=IN_FLIGHT, limit_s=REQUEST_LIMIT_S
        )
        found |= dict(zip(some, replies, strict=True))
    return found


def against_incumbent(plan: Plan, basis: Basis, pairs: Pairs, replies: Sequence[Reply], stage: Stage) -> Checked:
    """Compares with the engine in service. Both may differ from float32 by their quantization. Pure."""
    if basis.strips:
        replies = [replaced_text(one) for one in replies]
    found = compare(pairs, replies)
    floors = [floor(one, basis.clear_known) for one in (plan, basis.plan) if one is not None]
    least = floors[0] * floors[-1] if len(floors) > 1 else floors[0]
    verdict, why = verdict_of(found, least, "incumbent")
    return _checked(found, "the engine in service", stage, None if verdict == "unchecked" else least, verdict, why)


def floor(plan: Plan, clear_known: bool) -> float:
    if clear_known:
        return floor_for(plan)
    bits = 8.0 if plan.weights.format == "gguf" and plan.weights.made == "as it is" else stored_bits(plan.weights.label)
    return next(share for least, share in UNCLEAR_FLOORS if (bits or 0.0) >= least)


def replaced_text(one: Reply) -> Reply:
    return msgspec.structs.replace(one, text=one.text.strip()) if isinstance(one, Answer) else one


def _checked(
    found: Comparison | Agreement,
    against: Literal["the reference", "the engine in service"],
    stage: Stage,
    floor: float | None,
    verdict: str,
    why: str,
) -> Checked:
    return Checked(
        against=against,
        stage=stage,
        asked=found.asked,
        answered=found.answered,
        agreed=found.agreed,
        clear=found.clear,
        clear_agreed=found.clear_agreed,
        floor=floor,
        verdict=verdict,  # type: ignore[arg-type]
        why=why,
    )


def _unchecked(stage: Stage, why: str) -> Checked:
    return Checked(
        against="the engine in service", stage=stage, asked=0, answered=0, agreed=0, clear=0, clear_agreed=0,
        verdict="unchecked", why=why,
    )  # fmt: skip


def _keep(agreement: Agreement) -> None:
    try:
        store.add_agreement(agreement)
    except OutsideFailed:
        return  # the record serves later decisions only


# warming up


async def warmed(where: Where, in_flight: int) -> str | None:
    """Sends a few concurrent requests to an engine before it has clients. Returns what is wrong with it, or `None`."""
    import aiohttp

    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        count = max(in_flight, len(PROMPTS))
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
        gate = asyncio.Semaphore(in_flight)

        async def one(prompt: str) -> str | None:
            async with gate:
                return await _said_wrong(session, where, prompt)

        found = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return next((wrong for wrong in found if wrong is not None), None)


async def _said_wrong(session: aiohttp.ClientSession, where: Where, prompt: str) -> str | None:
    asked: dict[str, object] = {"model": where.name, "max_tokens": WARM_TOKENS, "temperature": 0}
    status, body = await _post(session, f"{where.url}/v1/completions", {**asked, "prompt": prompt})
    field = "text"
    if status in (404, 405, 501):
        chat = [{"role": "user", "content": prompt}]
        status, body = await _post(session, f"{where.url}/v1/chat/completions", {**asked, "messages": chat})
        field = "content"
    if status == 0:
        return f"a warm-up request failed: {body.decode('utf-8', 'replace')}"
    if status != 200:
        return f"a warm-up request got HTTP {status}: {' '.join(body.decode('utf-8', 'replace').split())[:200]}"
    text = _text(body, field)
    return None if not text.strip() else garbled(text)


def _text(body: bytes, field: str) -> str:
    """The generated text; empty if there is none, since an answer may end at once."""
    try:
        choice = msgspec.json.decode(body)["choices"][0]
        return str(choice["text"] if field == "text" else choice["message"]["content"] or "")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return ""


__all__ = ["Basis", "Where", "against_incumbent", "as_known", "basis_of", "checked", "warmed"]
