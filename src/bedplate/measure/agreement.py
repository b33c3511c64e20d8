"""Does an engine answer as its weights do? One next token after each of many prefixes, held against a reference.

Free-running text diverges by chance after a few tokens; single next tokens do not, as far as the reference has a clear
favourite. docs/agreement.md says where the figures here come from.
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
from bedplate.measure.moments import now_text
from bedplate.measure.prefixes import spread
from bedplate.measure.reference import Known, Reference, reference_for
from bedplate.store import add_agreement, agreements, fingerprint
from bedplate.values import Hardware, Plan
from bedplate.values.agreement import Agreement, Disagreement

CLEAR_GAP = 0.5
"""In logits: the favourite is then 1.6 times as likely as the next best. Rounding turned none of these in 8 bits."""
FLOORS = ((16.0, 0.98), (8.0, 0.97), (6.0, 0.85), (5.0, 0.65), (0.0, 0.55))
"""Least share of clear answers that weights of so many bits explain, where they were made from the reference's own."""
CHANCE = 1e-3
"""How unlikely a count must be under the floor to be called broken: a few ill-chosen prefixes are not enough."""
QUICK = 48
QUICK_TOKENS = 100
QUICK_IN_FLIGHT = 2
"""At start-up the clients' own requests come first."""
MOST_EVIDENCE = 8
SHOWN_CHARACTERS = 60
LEAST_ANSWERED = 0.9
LEAST_SPACES = 4
"""Answers that should begin with a space before an engine that shows none is taken to strip them."""
REQUEST_LIMIT_S = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint said after one prefix."""

    text: str
    ended: bool = False
    """Whether it says that the text ends there, and not only its allowance."""
    prompt_tokens: int | None = None
    made_tokens: int | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    why: str
    lasting: bool = False
    """There is no such API: asking again would bring the same."""


Said = Answer | Failed
Pairs = Sequence[tuple[str, Known]]


def quick_ones(pairs: Pairs, count: int = QUICK) -> Pairs:
    """A few that the reference answers clearly: those that wrong positions would turn, and others that are soon read.

    In the order of the text. A wrong rotary base is the mistake that loads, answers and goes unnoticed in short texts.
    """
    clear = [number for number, (_, known) in enumerate(pairs) if is_clear(known)]
    telling = sorted((one for one in clear if tells(pairs[one][1])), key=lambda one: _turned(pairs[one][1]))
    chosen = set(telling[: count // 2])
    short = [number for number in clear if number not in chosen and pairs[number][1].tokens <= QUICK_TOKENS]
    chosen |= set(spread(short, count - len(chosen)))
    return tuple(pairs[number] for number in sorted(chosen))


def _turned(known: Known) -> float:
    return math.inf if known.turned_gap is None else known.turned_gap


def tells(known: Known) -> bool:
    """Whether a clear answer turns into another where positions are wrong."""
    return is_clear(known) and _turned(known) < 0


def is_clear(known: Known) -> bool:
    return known.gap >= CLEAR_GAP


# asking


async def ask(
    url: str, pairs: Pairs, *, model: str, key: str | None = None, in_flight: int = 4, limit_s: float = REQUEST_LIMIT_S
) -> list[Said]:
    """Asks for the next token after each prefix. `url` is the root, without /v1. Failures are answers, too."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=limit_s)
    gate = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def one(prefix: str) -> Said:
            body = {"model": model, "prompt": prefix, "max_tokens": 1, "temperature": 0}
            async with gate:
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as answer:
                        return read_answer(answer.status, await answer.read())
                except (aiohttp.ClientError, TimeoutError) as error:
                    return Failed(why=str(error) or type(error).__name__)

        if not pairs:
            return []
        first = await one(pairs[0][0])
        if isinstance(first, Failed) and first.lasting:
            return [first] * len(pairs)
        return [first, *await asyncio.gather(*(one(prefix) for prefix, _ in pairs[1:]))]


def read_answer(status: int, body: bytes) -> Said:
    """What a completions API sent, whatever that is."""
    if status in (404, 405, 501):
        return Failed(why=f"it has no completions API (HTTP {status})", lasting=True)
    try:
        said = msgspec.json.decode(body)
        if status != 200:
            return Failed(why=f"HTTP {status}: {_error_text(said)}")
        choice = said["choices"][0]
        usage = said.get("usage") or {}
        return msgspec.convert(
            {
                "text": choice["text"],
                "ended": choice.get("finish_reason") in ("stop", "eos", "eos_token"),
                "prompt_tokens": usage.get("prompt_tokens"),
                "made_tokens": usage.get("completion_tokens"),
            },
            Answer,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Failed(why=f"HTTP {status} with something else than a completion ({type(error).__name__})")


def _error_text(said: Any) -> str:
    error = said.get("error", said) if isinstance(said, dict) else said
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]


# comparing


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    asked: int
    answered: int = 0
    agreed: int = 0
    clear: int = 0
    clear_agreed: int = 0
    telling: int = 0
    """Of the clear ones, those that wrong positions would turn."""
    telling_agreed: int = 0
    other_lengths: int = 0
    """Prompts of another number of tokens than in the reference: another tokenizer, or a BOS too many or too few."""
    longer_by: int | None = None
    """By so many tokens, where it is the same number for all of them."""
    evidence: tuple[Disagreement, ...] = ()
    failure: Failed | None = None
    """The last one, where a request failed."""


def compare(pairs: Pairs, said: Sequence[Said]) -> Comparison:
    """Counts what agrees; the evidence is what disagrees, the clearest first."""
    answered = [
        (prefix, known, answer)
        for (prefix, known), answer in zip(pairs, said, strict=True)
        if isinstance(answer, Answer)
    ]
    strips = strips_spaces([(known, answer) for _, known, answer in answered])
    wrong = [one for one in answered if not same(one[1], one[2], strips)]
    differences = {answer.prompt_tokens - known.tokens for _, known, answer in answered if answer.prompt_tokens}
    failures = [answer for answer in said if isinstance(answer, Failed)]
    telling = sum(tells(known) for _, known, _ in answered)
    return Comparison(
        asked=len(pairs),
        answered=len(answered),
        agreed=len(answered) - len(wrong),
        clear=sum(is_clear(known) for _, known, _ in answered),
        clear_agreed=sum(is_clear(known) for _, known, _ in answered) - sum(is_clear(known) for _, known, _ in wrong),
        telling=telling,
        telling_agreed=telling - sum(tells(known) for _, known, _ in wrong),
        other_lengths=sum(answer.prompt_tokens not in (None, known.tokens) for _, known, answer in answered),
        longer_by=differences.pop() if len(differences) == 1 else None,
        evidence=tuple(
            _evidence(*one) for one in sorted(wrong, key=lambda one: one[1].gap, reverse=True)[:MOST_EVIDENCE]
        ),
        failure=failures[-1] if failures else None,
    )


def strips_spaces(answers: Iterable[tuple[Known, Answer]]) -> bool:
    """Whether an engine takes leading spaces off: where many are expected, it shows none at all."""
    expected = [answer for known, answer in answers if known.kind == "text" and known.text.startswith(" ")]
    return len(expected) >= LEAST_SPACES and not any(answer.text.startswith(" ") for answer in expected)


def same(known: Known, answer: Answer, strips: bool = False) -> bool:
    """Whether an answer is the reference's token, as far as text can tell."""
    if known.kind == "special":  # hidden by most, spelled out by some
        return answer.text in ("", known.text)
    if known.kind == "part":  # held back until the character is whole, or replaced; which half it was cannot be seen
        return not answer.ended and not answer.text.strip("\ufffd ")
    wanted, got = (known.text.strip(), answer.text.strip()) if strips else (known.text, answer.text)
    if answer.made_tokens is not None and answer.made_tokens > 1:
        return bool(wanted) and got.startswith(wanted)
    return got == wanted


def _evidence(prefix: str, known: Known, answer: Answer) -> Disagreement:
    ended = answer.ended and not answer.text
    return Disagreement(
        prefix=prefix[-SHOWN_CHARACTERS:],
        expected=known.text,
        got=None if ended else answer.text[:SHOWN_CHARACTERS],
        gap=known.gap,
    )


# judging


def stored_bits(label: str) -> float | None:
    """The bits of one weight that a label speaks of."""
    text = label.upper()
    if text in SIXTEEN_BIT or text in ("FP16", "FP32"):
        return 16.0
    for pattern in (r"([\d.]+) ?BPW", r"\bI?Q(\d)", r"(\d+)-BIT", r"(?:INT|FP|NF)(\d+)", r"W(\d+)A\d+"):
        if found := re.search(pattern, text):
            return float(found[1])
    return None


def floor_for(plan: Plan) -> float:
    """The least share of clear answers that must agree. Files that are served as they are lose nothing any more.

    What an engine stores the reference's weights in anew may lose as much as those bits explain. An engine may compute
    with 8-bit activations or keep an 8-bit cache, so that nobody is held to more than 8 bits unless its weights are 16.
    """
    bits = stored_bits(plan.weights.label)
    if plan.weights.format == "gguf" and plan.weights.made == "as it is":
        bits = 8.0
    if plan.settings.kv_type != "16-bit":
        bits = min(bits or 0.0, 8.0)
    return next(share for least, share in FLOORS if (bits or 0.0) >= least)


def chance(agreed: int, asked: int, share: float) -> float:
    """How likely so few or fewer are, if each agrees with this probability."""
    return sum(math.comb(asked, hits) * share**hits * (1 - share) ** (asked - hits) for hits in range(agreed + 1))


def verdict_of(
    found: Comparison, floor: float, against: Literal["reference", "incumbent"] = "reference"
) -> tuple[Literal["ok", "broken", "unchecked"], str]:
    """The verdict, and in one clause why. `against`: whose answers were compared."""
    if found.failure is not None and (found.failure.lasting or found.answered < LEAST_ANSWERED * found.asked):
        answered = "" if found.failure.lasting else f"only {found.answered} of {found.asked} prefixes were answered: "
        return "unchecked", f"{answered}{found.failure.why}"
    if not found.clear:
        return "unchecked", "none of the prefixes has a clear answer"
    counts = f"{found.clear_agreed} of {found.clear} prefixes"
    few = chance(found.clear_agreed, found.clear, floor) < CHANCE
    # A mistake in the positions hides among the many that it does not touch.
    turned = chance(found.telling_agreed, found.telling, floor) < CHANCE
    if not few and not turned:
        return "ok", f"{counts} with a clear answer agree"
    if not few:
        counts = f"{found.telling_agreed} of {found.telling} prefixes that depend on right positions"
    sides = {
        "reference": "with the reference, where its weights explain",
        "incumbent": "with the engine in service, where the weights of both explain",
    }
    why = f"{counts} agree {sides[against]} no less than {floor:.0%}"
    if found.other_lengths > found.answered / 2:
        by = f", {found.longer_by:+d} each" if found.longer_by is not None else ""
        why += f"; it reads {found.other_lengths} prompts as another number of tokens{by}"
    return "broken", why


def judged(plan: Plan, reference: Reference, found: Comparison, *, at: str, machine: str) -> Agreement:
    floor = floor_for(plan)
    verdict, why = verdict_of(found, floor)
    return Agreement(
        at=at,
        machine=machine,
        engine=plan.engine,
        engine_version=plan.engine_version,
        model=plan.model.name,
        weights=plan.weights.label,
        settings=plan.settings,
        reference=reference.id,
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
    """A quick check of an engine that was just started, unless this very setting was found good here before."""
    machine = fingerprint(hardware)
    reference = await asyncio.to_thread(reference_for, plan.source or plan.model)
    if reference is None or _found_good(plan, reference, agreements(machine, plan.model.name, path)):
        return
    pairs = quick_ones(reference.known())
    said = await ask(url, pairs, model=plan.model.served_name, key=key, in_flight=QUICK_IN_FLIGHT)
    found = judged(plan, reference, compare(pairs, said), at=now_text(), machine=machine)
    tell(found)
    if found.verdict != "unchecked" or any(isinstance(one, Failed) and one.lasting for one in said):
        add_agreement(found, path)


def _found_good(plan: Plan, reference: Reference, earlier: Iterable[Agreement]) -> bool:
    """Whether asking again would bring nothing new: it was good, or it has no API to ask."""
    of_this = (
        one
        for one in earlier
        if one.reference == reference.id
        and one.same_setting(plan.engine, plan.engine_version, plan.weights.label, plan.settings)
    )
    newest = next(of_this, None)
    return newest is not None and newest.verdict != "broken"
