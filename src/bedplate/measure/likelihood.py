"""Compare an engine's log-probabilities with PyTorch in float32: divergence and perplexity.

`python -m bedplate.measure.likelihood GGUF PYTHON` writes the shipped file; PYTHON has torch and transformers.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bedplate.errors import ExternalFailure
from bedplate.measure.reference import QUIETLY, hash_file

DATA = "bedplate.measure"
LEAST = 1e-6
"""Smallest probability: below it, the rounding of printed values dominates."""


class TextPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a word in the text, with the next tokens of the reference."""

    end: int
    """Number of characters before it."""
    tokens: int
    next: tuple[str, float]
    """The token that follows in the text, and its log-probability."""
    top: tuple[tuple[str, float], ...]
    """The most likely tokens with their log-probabilities."""


class Likelihood(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["likelihood/1"] = "likelihood/1"
    sha256: str
    """Hash of the model file."""
    made_with: str
    tokens: int
    logprob: float
    """Log-probability of the whole text after its first token."""
    places: tuple[TextPlace, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / (self.tokens - 1))


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


def find_likelihood(sha256: str) -> Likelihood | None:
    return next((one for one in read_shipped_likelihoods() if one.sha256 == sha256), None)


# comparing


def compute_divergence(reference: Mapping[str, float], reported: Mapping[str, float]) -> float | None:
    """The Kullback-Leibler divergence in nats over the tokens in both lists and one class for all others.

    `None`: they have no token in common. Merging the other tokens can only reduce the divergence.
    """
    shared = [token for token in reference if token in reported]
    if not shared:
        return None
    wanted = [math.exp(reference[token]) for token in shared]
    found = [math.exp(reported[token]) for token in shared]
    wanted.append(max(LEAST, 1 - sum(wanted)))
    found.append(max(LEAST, 1 - sum(found)))
    return max(0.0, sum(p * math.log(p / max(q, LEAST)) for p, q in zip(wanted, found, strict=True) if p > 0))


def compute_mean_divergence(places: Sequence[TextPlace], listings: Sequence[ListedTokens | None]) -> float | None:
    found = [
        one
        for place, listed in zip(places, listings, strict=True)
        if listed is not None and (one := compute_divergence(dict(place.top), listed.top)) is not None
    ]
    return sum(found) / len(found) if found else None


def compute_continued_perplexity(
    places: Sequence[TextPlace], listings: Sequence[ListedTokens | None]
) -> tuple[float, float] | None:
    """The perplexities of the endpoint and of the reference, over the places where both list the next token."""
    pairs = [
        (listed.top[place.next[0]], place.next[1])
        for place, listed in zip(places, listings, strict=True)
        if listed is not None and place.next[0] in listed.top
    ]
    if not pairs:
        return None
    own, reference = (math.exp(-sum(side) / len(pairs)) for side in zip(*pairs, strict=True))
    return own, reference


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


def read_echo(body: bytes, text: str) -> float | None:
    """The perplexity of a text echoed with its log-probabilities; `None` if the endpoint did not echo it."""
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
    return math.exp(-sum(known) / len(known)) if all(math.isfinite(value) for value in known) else None


# computing the shipped file


def compute(source: Path, python: Path) -> Likelihood:
    """Computes the likelihood of a GGUF file. A small model takes a minute on a CPU."""
    program = importlib.resources.files("bedplate.engines.shipped") / "likelihood.py"
    done = subprocess.run(
        [str(python), str(program), "--model", str(source.parent), "--gguf", source.name],
        input=read_fixed_text().encode(),
        capture_output=True,
        env={**os.environ, **QUIETLY},
    )
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ExternalFailure("the likelihood could not be computed", cause=last[0] if last else None)
    return read_likelihood(json.loads(done.stdout), hash_file(source))


def read_likelihood(output: dict[str, Any], sha256: str) -> Likelihood:
    """Reads the output of the program."""
    made_with = f"torch {output.pop('torch')}, transformers {output.pop('transformers')}, float32"
    try:
        return msgspec.convert({**output, "sha256": sha256, "made_with": made_with}, Likelihood)
    except msgspec.ValidationError as error:
        raise ExternalFailure("the output of the program is not a likelihood", cause=str(error)) from error


def write_likelihood(made: Likelihood) -> str:
    """As JSON with one place per line."""
    head = json.loads(msgspec.json.encode(made))
    lines = ["    " + json.dumps(place, ensure_ascii=False) for place in head.pop("places")]
    whole = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return whole + ',\n  "places": [\n' + ",\n".join(lines) + "\n  ]\n}\n"


if __name__ == "__main__":
    found = compute(Path(sys.argv[1]), Path(sys.argv[2]))
    (Path(__file__).parent / "data" / f"likelihood_{found.sha256[:12]}.json").write_text(
        write_likelihood(found), "utf-8"
    )
