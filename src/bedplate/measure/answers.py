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
from bedplate.errors import ExternalFailure
from bedplate.measure.agreement import (
    CLEAR_GAP,
    LEAST_SPACES,
    QUICK_TOKENS,
    CompletionAnswer,
    FailedRequest,
    Pairs,
    Reply,
    TokenComparison,
    ask,
    choose_floor,
    choose_quick_prefixes,
    compare,
    judge_comparison,
    read_answer,
    read_stored_bits,
    record_agreement,
)
from bedplate.measure.garbled import find_garbling
from bedplate.measure.likelihood import read_listed
from bedplate.measure.moments import format_now
from bedplate.measure.prefixes import choose_spread, list_fixed_prefixes
from bedplate.measure.reference import ReferenceAnswer, find_reference
from bedplate.store import compute_fingerprint
from bedplate.values import Hardware, Plan
from bedplate.values.agreement import Agreement
from bedplate.values.migration import AnswerCheck, Stage

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


class EngineAddress(NamedTuple):
    """The address of an engine."""

    url: str
    key: str | None
    name: str
    """Served name of the model."""


class AnswerBasis(NamedTuple):
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


async def collect_basis(
    facts: Plan, incumbent: Plan | None, where: EngineAddress | None, *, most: int = ASKED_IN_SERVICE
) -> AnswerBasis:
    """Collects the answers of the engine in service while it still runs. `facts` is the plan of the challenger."""
    reference = await asyncio.to_thread(find_reference, facts.source or facts.model)
    if where is None or incumbent is None:
        return AnswerBasis(None, (), True, False, reference)
    quick = choose_quick_prefixes(reference.list_known(), ASKED) if reference is not None else ()
    gaps = {prefix: one.gap for prefix, one in quick if one.tokens <= QUICK_TOKENS}
    short = tuple(gaps) or tuple(one for one in list_fixed_prefixes() if len(one) <= MOST_CHARACTERS)
    prefixes = choose_spread(short, most)
    answers: list[tuple[Reply, float | None]] = []
    until = time.monotonic() + IN_SERVICE_S
    while len(answers) < len(prefixes) and (len(answers) < LEAST_ASKED or time.monotonic() < until):
        some = prefixes[len(answers) : len(answers) + AT_ONCE]
        answers += await request_answers(where, some, with_gaps=not gaps)
    prefixes = prefixes[: len(answers)]
    texts = [one.text for one, _ in answers if isinstance(one, CompletionAnswer)]
    strips = len(texts) >= LEAST_SPACES and not any(text.startswith(" ") for text in texts)
    pairs = [
        (prefix, as_known(answer, gaps.get(prefix, gap), strips))
        for prefix, (answer, gap) in zip(prefixes, answers, strict=True)
        if isinstance(answer, CompletionAnswer)
    ]
    failures = [one.why for one, _ in answers if isinstance(one, FailedRequest)]
    clear_known = bool(gaps) or any(gap is not None for _, gap in answers)
    return AnswerBasis(incumbent, tuple(pairs), clear_known, strips, reference, failures[-1] if failures else None)


def as_known(answer: CompletionAnswer, gap: float | None, strips: bool) -> ReferenceAnswer:
    """Converts an engine's answer to a reference answer. Without a gap it counts as clear."""
    text = answer.text.strip() if strips else answer.text
    kind = "text"
    if answer.ended and not answer.text:
        kind = "special"
    elif not answer.text.strip("\ufffd "):
        kind = "part"
    return ReferenceAnswer(text, kind, answer.prompt_tokens or 0, CLEAR_GAP if gap is None else gap)  # type: ignore[arg-type]


async def request_answers(
    where: EngineAddress, prefixes: Sequence[str], *, with_gaps: bool
) -> list[tuple[Reply, float | None]]:
    """The answer to each prefix, and its gap to the second best token if the engine reports log-probabilities."""
    if not with_gaps:
        replies = await ask(
            where.url, _make_plain_pairs(prefixes), model=where.name, key=where.key, in_flight=IN_FLIGHT
        )
        return [(one, None) for one in replies]
    import aiohttp

    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    timeout, gate = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S), asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def request_answer(prefix: str) -> tuple[Reply, float | None]:
            async with gate:
                status, body = await _request_next_token(session, where, prefix, ALTERNATIVES)
                if status == 400:  # some engines reject `logprobs`
                    status, body = await _request_next_token(session, where, prefix, None)
            if status == 0:
                return FailedRequest(why=body.decode("utf-8", "replace")), None
            listed = read_listed(body)
            best = sorted(listed.top.values(), reverse=True) if listed is not None else []
            return read_answer(status, body), best[0] - best[1] if len(best) > 1 else None

        return list(await asyncio.gather(*(request_answer(prefix) for prefix in prefixes)))


async def _request_next_token(
    session: aiohttp.ClientSession, where: EngineAddress, prefix: str, alternatives: int | None
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


def _make_plain_pairs(prefixes: Iterable[str]) -> Pairs:
    return tuple((prefix, ReferenceAnswer("", "text", 0, 0.0)) for prefix in prefixes)


# the challenger


async def check_challenger(
    hardware: Hardware, plan: Plan, where: EngineAddress, basis: AnswerBasis, stage: Stage, *, most: int = ASKED
) -> tuple[AnswerCheck, ...]:
    """Compares the challenger with the engine in service, and with the reference if there is one."""
    by_reference = choose_quick_prefixes(basis.reference.list_known(), most) if basis.reference is not None else ()
    by_incumbent = choose_spread(basis.pairs, most)
    # Common prefixes first, so that both comparisons have answers if the time limit is reached.
    prefixes = dict.fromkeys([*(prefix for prefix, _ in by_incumbent), *(prefix for prefix, _ in by_reference)])
    if not prefixes:
        return (_make_unchecked(stage, basis.failure or "there is neither a reference nor an engine in service"),)
    answers = await _request_until_limit(where, tuple(prefixes))
    by_reference = tuple(pair for pair in by_reference if pair[0] in answers)
    by_incumbent = tuple(pair for pair in by_incumbent if pair[0] in answers)
    found = []
    if basis.reference is not None and by_reference:
        agreement = record_agreement(
            plan,
            basis.reference,
            compare(by_reference, [answers[prefix] for prefix, _ in by_reference]),
            at=format_now(),
            machine=compute_fingerprint(hardware),
        )
        found.append(_make_check(agreement, "the reference", stage, agreement.floor, agreement.verdict, agreement.why))
        if agreement.verdict != "unchecked" and stage == "answers":
            await asyncio.to_thread(_keep, agreement)
    if by_incumbent and basis.plan is not None:
        found.append(
            check_against_incumbent(plan, basis, by_incumbent, [answers[prefix] for prefix, _ in by_incumbent], stage)
        )
    return tuple(found)


async def _request_until_limit(where: EngineAddress, prefixes: Sequence[str]) -> dict[str, Reply]:
    """Requests answers until the time limit, and at least `LEAST_CHECKED`: on a busy machine all would take minutes."""
    found: dict[str, Reply] = {}
    until = time.monotonic() + CHECK_S
    while len(found) < len(prefixes) and (len(found) < LEAST_CHECKED or time.monotonic() < until):
        some = prefixes[len(found) : len(found) + AT_ONCE]
        replies = await ask(
            where.url,
            _make_plain_pairs(some),
            model=where.name,
            key=where.key,
            in_flight=IN_FLIGHT,
            limit_s=REQUEST_LIMIT_S,
        )
        found |= dict(zip(some, replies, strict=True))
    return found


def check_against_incumbent(
    plan: Plan, basis: AnswerBasis, pairs: Pairs, replies: Sequence[Reply], stage: Stage
) -> AnswerCheck:
    """Compares with the engine in service. Both may differ from float32 by their quantization. Pure."""
    if basis.strips:
        replies = [strip_answer(one) for one in replies]
    found = compare(pairs, replies)
    floors = [choose_answer_floor(one, basis.clear_known) for one in (plan, basis.plan) if one is not None]
    least = floors[0] * floors[-1] if len(floors) > 1 else floors[0]
    verdict, why = judge_comparison(found, least, "incumbent")
    return _make_check(found, "the engine in service", stage, None if verdict == "unchecked" else least, verdict, why)


def choose_answer_floor(plan: Plan, clear_known: bool) -> float:
    if clear_known:
        return choose_floor(plan)
    bits = (
        8.0
        if plan.weights.format == "gguf" and plan.weights.made == "as it is"
        else read_stored_bits(plan.weights.label)
    )
    return next(share for least, share in UNCLEAR_FLOORS if (bits or 0.0) >= least)


def strip_answer(one: Reply) -> Reply:
    return msgspec.structs.replace(one, text=one.text.strip()) if isinstance(one, CompletionAnswer) else one


def _make_check(
    found: TokenComparison | Agreement,
    against: Literal["the reference", "the engine in service"],
    stage: Stage,
    floor: float | None,
    verdict: str,
    why: str,
) -> AnswerCheck:
    return AnswerCheck(
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


def _make_unchecked(stage: Stage, why: str) -> AnswerCheck:
    return AnswerCheck(
        against="the engine in service", stage=stage, asked=0, answered=0, agreed=0, clear=0, clear_agreed=0,
        verdict="unchecked", why=why,
    )  # fmt: skip


def _keep(agreement: Agreement) -> None:
    try:
        store.add_agreement(agreement)
    except ExternalFailure:
        return  # the record serves later decisions only


# warming up


async def warm_up_engine(where: EngineAddress, in_flight: int) -> str | None:
    """Sends a few concurrent requests to an engine before it has clients. Returns what is wrong with it, or `None`."""
    import aiohttp

    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        count = max(in_flight, len(PROMPTS))
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
        gate = asyncio.Semaphore(in_flight)

        async def send_warm_up(prompt: str) -> str | None:
            async with gate:
                return await _find_fault(session, where, prompt)

        found = await asyncio.gather(*(send_warm_up(prompt) for prompt in prompts))
    return next((wrong for wrong in found if wrong is not None), None)


async def _find_fault(session: aiohttp.ClientSession, where: EngineAddress, prompt: str) -> str | None:
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
    text = _read_text(body, field)
    return None if not text.strip() else find_garbling(text)


def _read_text(body: bytes, field: str) -> str:
    """The generated text; empty if there is none, since an answer may end at once."""
    try:
        choice = msgspec.json.decode(body)["choices"][0]
        return str(choice["text"] if field == "text" else choice["message"]["content"] or "")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return ""


__all__ = [
    "AnswerBasis",
    "EngineAddress",
    "as_known",
    "check_against_incumbent",
    "check_challenger",
    "collect_basis",
    "warm_up_engine",
]
