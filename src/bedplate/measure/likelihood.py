"""Compare an engine's log-probabilities with those of the reference: divergence and perplexity."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from bedplate.measure.reference import Likelihood, Reference, TextPlace

DATA = "bedplate.measure"
LEAST = 1e-6
"""Smallest probability: below it, the rounding of printed values dominates."""


class ListedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely next tokens that an endpoint reports, with their log-probabilities."""

    top: dict[str, float]


@functools.cache
def read_fixed_text() -> str:
    return (importlib.resources.files(DATA) / "data" / "likelihood_text.txt").read_text(encoding="utf-8")


@functools.cache
def read_shipped_likelihoods() -> tuple[Likelihood, ...]:
    folder = importlib.resources.files(DATA) / "data"
    files = sorted((file for file in folder.iterdir() if file.name.startswith("likelihood_")), key=lambda one: one.name)
    return tuple(
        msgspec.json.decode(file.read_bytes(), type=Likelihood) for file in files if file.name.endswith("json")
    )


def find_likelihood(reference: Reference) -> Likelihood | None:
    if reference.likelihood is not None:
        return reference.likelihood
    return next((one for one in read_shipped_likelihoods() if one.sha256 == reference.sha256), None)


# comparing


def compute_divergence(reference: Mapping[str, float], reported: Mapping[str, float]) -> float | None:
    """The Kullback-Leibler divergence in nats over the tokens in both lists and one class for all others.

    `None`: they have no token in common. APIs list only the most likely tokens. Merging the others into one class can
    only reduce the divergence, so this is a lower bound of that over the whole vocabulary.
    """
    shared = [token for token in reference if token in reported]
    if not shared:
        return None
    wanted = [math.exp(reference[token]) for token in shared]
    found = [math.exp(reported[token]) for token in shared]
    wanted.append(max(LEAST, 1 - sum(wanted)))
    found.append(max(LEAST, 1 - sum(found)))
    return max(0.0, sum(p * math.log(p / max(q, LEAST)) for p, q in zip(wanted, found, strict=True) if p > 0))


def compute_mean_divergence(
    places: Sequence[TextPlace], listings: Sequence[ListedTokens | None]
) -> tuple[float, float | None] | None:
    """The mean over the places, and its standard error."""
    found = [
        one
        for place, listed in zip(places, listings, strict=True)
        if listed is not None and (one := compute_divergence(dict(place.top), listed.top)) is not None
    ]
    return (statistics.fmean(found), compute_standard_error(found)) if found else None


def compute_standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


class PerplexityComparison(NamedTuple):
    own: float
    reference: float | None
    error: float | None
    """Standard error of the logarithm of their ratio, over the tokens."""


def compare_perplexity(own: Sequence[float], reference: Sequence[float]) -> PerplexityComparison:
    """From the log-probabilities of the same tokens. They vary together, so their differences have the error."""
    own_mean, reference_mean = statistics.fmean(own), statistics.fmean(reference)
    error = compute_standard_error([b - a for a, b in zip(own, reference, strict=True)])
    return PerplexityComparison(math.exp(-own_mean), math.exp(-reference_mean), error)


def compute_continued_perplexity(
    places: Sequence[TextPlace], listings: Sequence[ListedTokens | None]
) -> PerplexityComparison | None:
    """The perplexities of the endpoint and of the reference, over the places where both list the next token."""
    pairs = [
        (listed.top[place.next[0]], place.next[1])
        for place, listed in zip(places, listings, strict=True)
        if listed is not None and place.next[0] in listed.top
    ]
    if not pairs:
        return None
    return compare_perplexity(*zip(*pairs, strict=True))


def compare_echo(echoed: Sequence[float], known: Likelihood | None) -> PerplexityComparison:
    """The perplexity of the whole text. Only the same number of tokens can be compared one by one."""
    if known is not None and len(known.each) == len(echoed):
        return compare_perplexity(echoed, known.each)
    own = math.exp(-statistics.fmean(echoed))
    return PerplexityComparison(own, known.perplexity if known is not None else None, None)


# reading answers


def read_listed(body: bytes) -> ListedTokens | None:
    """Reads the alternatives of the first token, in the completions format or in the chat format of llama.cpp."""
    try:
        logprobs = msgspec.json.decode(body)["choices"][0]["logprobs"]
        if content := logprobs.get("content"):
            tops = content[0].get("top_logprobs") or []
            found = {str(one["token"]): float(one["logprob"]) for one in tops}
        else:
            found = {str(token): float(value) for token, value in logprobs["top_logprobs"][0].items()}
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError, AttributeError):
        return None
    known = {token: value for token, value in found.items() if math.isfinite(value) and value <= LEAST}
    return ListedTokens(top=known) if len(known) > 1 else None


def read_echo(body: bytes, text: str) -> list[float] | None:
    """The log-probabilities of an echoed text after its first token; `None` if the endpoint did not echo it."""
    try:
        document = msgspec.json.decode(body)
        choice = document["choices"][0]
        asked = document["usage"]["prompt_tokens"]
        each = choice["logprobs"]["token_logprobs"]
        if not str(choice["text"]).startswith(text.rstrip()[:200]) or asked < 2 or len(each) < asked:
            return None
        known = [float(value) for value in each[1:asked]]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return known if all(math.isfinite(value) for value in known) else None


def write_likelihood(made: Likelihood) -> str:
    """As JSON with one place per line."""
    head = {name: value for name, value in json.loads(msgspec.json.encode(made)).items() if value != []}
    lines = ["    " + json.dumps(place, ensure_ascii=False) for place in head.pop("places")]
    whole = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return whole + ',\n  "places": [\n' + ",\n".join(lines) + "\n  ]\n}\n"
