"""Greedy-token agreement: compare the next token after each of many prefixes with a float32 reference.

Generated text diverges at random after a few tokens. Single next tokens do not, if the reference clearly prefers one.
docs/agreement.md explains the constants.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bedplate.engines.base import SIXTEEN_BIT
from bedplate.measure.moments import format_now
from bedplate.measure.prefixes import choose_spread
from bedplate.measure.reference import Reference, ReferenceAnswer, find_reference
from bedplate.store import add_agreement, compute_fingerprint, read_agreements
from bedplate.values import Hardware, Plan
from bedplate.values.agreement import Agreement, Disagreement

CLEAR_GAP = 0.5
"""In logits: the best token is 1.6 times as likely as the second. Rounding to 8 bits changed none of these."""
FLOORS = ((16.0, 0.98), (8.0, 0.97), (6.0, 0.85), (5.0, 0.65), (0.0, 0.55))
"""Bits per weight, and the smallest share of clear prefixes that agree if the weights were quantized to them."""
CHANCE = 1e-3
"""An engine is broken if its count has a lower probability than this under the floor."""
QUICK = 48
QUICK_TOKENS = 100
QUICK_IN_FLIGHT = 2
"""Low, because requests of clients have priority at start-up."""
MOST_EVIDENCE = 8
SHOWN_CHARACTERS = 60
LEAST_ANSWERED = 0.9
LEAST_SPACES = 4
"""Answers that should begin with a space. If none of at least this many does, the engine strips spaces."""
REQUEST_LIMIT_S = 120.0


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an endpoint to one prefix."""

    text: str
    ended: bool = False
    """Whether the finish reason is an end-of-text token, not the token limit."""
    prompt_tokens: int | None = None
    made_tokens: int | None = None


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    why: str
    lasting: bool = False
    """The endpoint lacks the API, so another request would fail too."""


Reply = CompletionAnswer | FailedRequest
Pairs = Sequence[tuple[str, ReferenceAnswer]]


def choose_quick_prefixes(pairs: Pairs, count: int = QUICK) -> Pairs:
    """Chooses prefixes with a clear answer, in the order of the text: up to half position-sensitive, the others short.

    Position-sensitive prefixes reveal a wrong rotary base, which short texts do not.
    """
    clear = [number for number, (_, known) in enumerate(pairs) if is_clear(known)]
    sensitive = sorted(
        (one for one in clear if is_position_sensitive(pairs[one][1])), key=lambda one: _get_turned_gap(pairs[one][1])
    )
    chosen = set(sensitive[: min(count, QUICK) // 2])  # they are long
    short = [number for number in clear if number not in chosen and pairs[number][1].tokens <= QUICK_TOKENS]
    chosen |= set(choose_spread(short, count - len(chosen)))
    return tuple(pairs[number] for number in sorted(chosen))


def _get_turned_gap(known: ReferenceAnswer) -> float:
    return math.inf if known.turned_gap is None else known.turned_gap


def is_position_sensitive(known: ReferenceAnswer) -> bool:
    """Whether a clear answer changes if positions are wrong."""
    return is_clear(known) and _get_turned_gap(known) < 0


def is_clear(known: ReferenceAnswer) -> bool:
    return known.gap >= CLEAR_GAP


# asking


async def ask(
    url: str, pairs: Pairs, *, model: str, key: str | None = None, in_flight: int = 4, limit_s: float = REQUEST_LIMIT_S
) -> list[Reply]:
    """Request the next token after each prefix. `url` is the root, without /v1. A failed one is a `FailedRequest`."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=limit_s)
    gate = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def request_next_token(prefix: str) -> Reply:
            body = {"model": model, "prompt": prefix, "max_tokens": 1, "temperature": 0}
            async with gate:
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as answer:
                        return read_answer(answer.status, await answer.read())
                except (aiohttp.ClientError, TimeoutError) as error:
                    return FailedRequest(why=str(error) or type(error).__name__)

        if not pairs:
            return []
        first = await request_next_token(pairs[0][0])
        if isinstance(first, FailedRequest) and first.lasting:
            return [first] * len(pairs)
        return [first, *await asyncio.gather(*(request_next_token(prefix) for prefix, _ in pairs[1:]))]


def read_answer(status: int, body: bytes) -> Reply:
    """Parses the response of a completions API, valid or not."""
    if status in (404, 405, 501):
        return FailedRequest(why=f"the endpoint has no completions API (HTTP {status})", lasting=True)
    try:
        document = msgspec.json.decode(body)
        if status != 200:
            return FailedRequest(why=f"HTTP {status}: {_read_error_text(document)}")
        choice = document["choices"][0]
        usage = document.get("usage") or {}
        return msgspec.convert(
            {
                "text": choice["text"],
                "ended": choice.get("finish_reason") in ("stop", "eos", "eos_token"),
                "prompt_tokens": usage.get("prompt_tokens"),
                "made_tokens": usage.get("completion_tokens"),
            },
            CompletionAnswer,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        return FailedRequest(why=f"HTTP {status}, but the body is not a completion ({type(error).__name__})")


def _read_error_text(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]


# comparing


class TokenComparison(msgspec.Struct, frozen=True, kw_only=True):
    asked: int
    answered: int = 0
    agreed: int = 0
    clear: int = 0
    clear_agreed: int = 0
    telling: int = 0
    """Clear prefixes whose answer depends on correct positions."""
    telling_agreed: int = 0
    other_lengths: int = 0
    """Prompts with another token count than in the reference: another tokenizer, or an extra or missing BOS."""
    longer_by: int | None = None
    """The difference in tokens, if it is the same for all prompts."""
    evidence: tuple[Disagreement, ...] = ()
    failure: FailedRequest | None = None
    """The last failed request."""


def compare(pairs: Pairs, replies: Sequence[Reply]) -> TokenComparison:
    """Counts the answers that agree. The evidence is the answers that disagree, clearest first."""
    answered = [
        (prefix, known, answer)
        for (prefix, known), answer in zip(pairs, replies, strict=True)
        if isinstance(answer, CompletionAnswer)
    ]
    strips = strips_spaces([(known, answer) for _, known, answer in answered])
    wrong = [one for one in answered if not matches_token(one[1], one[2], strips)]
    differences = {answer.prompt_tokens - known.tokens for _, known, answer in answered if answer.prompt_tokens}
    failures = [answer for answer in replies if isinstance(answer, FailedRequest)]
    telling = sum(is_position_sensitive(known) for _, known, _ in answered)
    return TokenComparison(
        asked=len(pairs),
        answered=len(answered),
        agreed=len(answered) - len(wrong),
        clear=sum(is_clear(known) for _, known, _ in answered),
        clear_agreed=sum(is_clear(known) for _, known, _ in answered) - sum(is_clear(known) for _, known, _ in wrong),
        telling=telling,
        telling_agreed=telling - sum(is_position_sensitive(known) for _, known, _ in wrong),
        other_lengths=sum(answer.prompt_tokens not in (None, known.tokens) for _, known, answer in answered),
        longer_by=differences.pop() if len(differences) == 1 else None,
        evidence=tuple(
            _describe_disagreement(*one)
            for one in sorted(wrong, key=lambda one: one[1].gap, reverse=True)[:MOST_EVIDENCE]
        ),
        failure=failures[-1] if failures else None,
    )


def strips_spaces(answers: Iterable[tuple[ReferenceAnswer, CompletionAnswer]]) -> bool:
    """Whether an engine strips leading spaces: several are expected, and no answer has one."""
    expected = [answer for known, answer in answers if known.kind == "text" and known.text.startswith(" ")]
    return len(expected) >= LEAST_SPACES and not any(answer.text.startswith(" ") for answer in expected)


def matches_token(known: ReferenceAnswer, answer: CompletionAnswer, strips: bool = False) -> bool:
    """Whether the text of an answer matches the token of the reference."""
    if known.kind == "special":  # most engines hide special tokens, some print them
        return answer.text in ("", known.text)
    if known.kind == "part":  # an incomplete character is held back or replaced, so its bytes cannot be compared
        return not answer.ended and not answer.text.strip("\ufffd ")
    wanted, got = (known.text.strip(), answer.text.strip()) if strips else (known.text, answer.text)
    if answer.made_tokens is not None and answer.made_tokens > 1:
        return bool(wanted) and got.startswith(wanted)
    return got == wanted


def _describe_disagreement(prefix: str, known: ReferenceAnswer, answer: CompletionAnswer) -> Disagreement:
    ended = answer.ended and not answer.text
    return Disagreement(
        prefix=prefix[-SHOWN_CHARACTERS:],
        expected=known.text,
        got=None if ended else answer.text[:SHOWN_CHARACTERS],
        gap=known.gap,
    )


# judging


def read_stored_bits(label: str) -> float | None:
    """The bits per weight of a quantization label."""
    text = label.upper()
    if text in SIXTEEN_BIT or text in ("FP16", "FP32"):
        return 16.0
    for pattern in (r"([\d.]+) ?BPW", r"\bI?Q(\d)", r"(\d+)-BIT", r"(?:INT|FP|NF)(\d+)", r"W(\d+)A\d+"):
        if found := re.search(pattern, text):
            return float(found[1])
    return None


def choose_floor(plan: Plan) -> float:
    """The smallest share of clear answers that must agree.

    An engine that quantizes the weights again may lose what those bits explain; one that serves the file unchanged
    loses nothing. Engines may use 8-bit activations or an 8-bit KV cache, so only 16-bit weights need more.
    """
    bits = read_stored_bits(plan.weights.label)
    if plan.weights.format == "gguf" and plan.weights.made == "as it is":
        bits = 8.0
    if plan.settings.kv_type != "16-bit":
        bits = min(bits or 0.0, 8.0)
    return next(share for least, share in FLOORS if (bits or 0.0) >= least)


def compute_tail_probability(agreed: int, asked: int, share: float) -> float:
    """The probability of at most `agreed` agreements out of `asked`, if each has the probability `share`."""
    return sum(math.comb(asked, hits) * share**hits * (1 - share) ** (asked - hits) for hits in range(agreed + 1))


def judge_comparison(
    found: TokenComparison, floor: float, against: Literal["reference", "incumbent"] = "reference"
) -> tuple[Literal["ok", "broken", "unchecked"], str]:
    """The verdict and its reason in one clause. `against`: whose answers were compared."""
    if found.failure is not None and (found.failure.lasting or found.answered < LEAST_ANSWERED * found.asked):
        answered = "" if found.failure.lasting else f"only {found.answered} of {found.asked} requests were answered: "
        return "unchecked", f"{answered}{found.failure.why}"
    if not found.clear:
        return "unchecked", "none of the prefixes has a clear answer"
    counts = f"{found.clear_agreed} of {found.clear} prefixes"
    few = compute_tail_probability(found.clear_agreed, found.clear, floor) < CHANCE
    # Wrong positions change only some of the answers, so these prefixes are counted separately.
    few_sensitive = compute_tail_probability(found.telling_agreed, found.telling, floor) < CHANCE
    if not few and not few_sensitive:
        return "ok", f"{counts} with a clear answer agree"
    if not few:
        counts = f"{found.telling_agreed} of {found.telling} prefixes that depend on correct positions"
    sides = {
        "reference": ("the reference", "these weights"),
        "incumbent": ("the engine in service", "the weights of both"),
    }
    other, weights = sides[against]
    why = f"{counts} agree with {other}; at least {floor:.0%} are expected with {weights}"
    if found.other_lengths > found.answered / 2:
        by = f", {found.longer_by:+d} each" if found.longer_by is not None else ""
        why += f"; {found.other_lengths} prompts have another token count than in the reference{by}"
    return "broken", why


def record_agreement(plan: Plan, reference: Reference, found: TokenComparison, *, at: str, machine: str) -> Agreement:
    floor = choose_floor(plan)
    verdict, why = judge_comparison(found, floor)
    return Agreement(
        at=at,
        machine=machine,
        engine=plan.engine,
        engine_version=plan.engine_version,
        model=plan.model.name,
        weights=plan.weights.label,
        settings=plan.settings,
        reference=reference.id,
        made_with=reference.made_with,
        asked=found.asked,
        answered=found.answered,
        agreed=found.agreed,
        clear=found.clear,
        clear_agreed=found.clear_agreed,
        floor=None if verdict == "unchecked" else floor,
        verdict=verdict,
        why=why,
        evidence=found.evidence,
    )


# the check at start-up


async def check_served(
    hardware: Hardware,
    plan: Plan,
    url: str,
    key: str | None,
    tell: Callable[[Agreement], None],
    path: Path | None = None,
) -> None:
    """Checks an engine after its start, unless the same engine with the same settings passed the check before."""
    machine = compute_fingerprint(hardware)
    reference = await asyncio.to_thread(find_reference, plan.source or plan.model)
    if reference is None or _was_checked_before(plan, reference, read_agreements(machine, plan.model.name, path)):
        return
    pairs = choose_quick_prefixes(reference.list_known())
    replies = await ask(url, pairs, model=plan.model.served_name, key=key, in_flight=QUICK_IN_FLIGHT)
    found = record_agreement(plan, reference, compare(pairs, replies), at=format_now(), machine=machine)
    tell(found)
    if found.verdict != "unchecked" or any(isinstance(one, FailedRequest) and one.lasting for one in replies):
        add_agreement(found, path)


def _was_checked_before(plan: Plan, reference: Reference, earlier: Iterable[Agreement]) -> bool:
    """Whether the newest check of these settings passed, or could not be done because the API is missing."""
    matching = (
        one
        for one in earlier
        if one.reference == reference.id
        and one.has_same_setting(plan.engine, plan.engine_version, plan.weights.label, plan.settings)
    )
    newest = next(matching, None)
    return newest is not None and newest.verdict != "broken"
