"""The reference: the most faithful answers to the fixed prefixes, for weights identified by their content.

One is shipped for the built-in model. `compute_reference` in `measure.references` computes those of other models, which
are cached under BEDPLATE_HOME.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from bedplate.errors import ExternalFailure
from bedplate.home import get_home
from bedplate.measure.prefixes import hash_prefix, list_fixed_prefixes
from bedplate.run.prepare import hash_model_content
from bedplate.values import Model

DATA = "bedplate.measure"
KNOWN = ("text", "kind", "tokens", "gap")
ReferenceMethod = Literal["float32", "float32 by layer", "engine"]
"""float32: PyTorch, completely in memory. by layer: one layer in memory at a time. engine: an engine's own answers."""


class ReferenceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer of the reference."""

    text: str
    """Text of the token."""
    kind: Literal["text", "special", "part"]
    """special: engines hide or print it. part: an incomplete character, which engines hold back or replace."""
    tokens: int
    """Number of prompt tokens."""
    gap: float
    """Gap to the second best token, in logits."""
    turned_gap: float | None = None
    """The gap with a tenth of the rotary base, so with wrong positions; below 0 another token is best."""


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
    """That of the reference."""
    made_with: str
    tokens: int
    logprob: float | None = None
    """Log-probability of the whole text after its first token; `None`: an engine reported only single places."""
    each: tuple[float, ...] = ()
    """The log-probabilities of the single tokens; empty if only their sum is known."""
    places: tuple[TextPlace, ...]

    @property
    def perplexity(self) -> float | None:
        return None if self.logprob is None else math.exp(-self.logprob / (self.tokens - 1))


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["reference/1"] = "reference/1"
    file: str
    """Name of the file, or of the model."""
    sha256: str
    """Hash of the file; of a cached reference, of all files of the model."""
    file_bytes: int
    """Size of all weight files."""
    made_with: str
    method: ReferenceMethod = "float32"
    at: str | None = None
    """When it was computed: ISO 8601, UTC."""
    seconds: float | None = None
    answers: dict[str, ReferenceAnswer]
    """Key: the hash of the prefix."""
    likelihood: Likelihood | None = None
    """`None`: the shipped likelihood of this file, if there is one."""

    @property
    def id(self) -> str:
        return self.sha256[:12]

    def list_known(self, prefixes: Iterable[str] | None = None) -> tuple[tuple[str, ReferenceAnswer], ...]:
        """The prefixes (default: the fixed ones) that have an answer, with it, in the order of the text."""
        return tuple(
            (prefix, self.answers[found])
            for prefix in (list_fixed_prefixes() if prefixes is None else prefixes)
            if (found := hash_prefix(prefix)) in self.answers
        )


@functools.cache
def read_shipped_references() -> tuple[Reference, ...]:
    folder = importlib.resources.files(DATA) / "data"
    files = sorted(
        (file for file in folder.iterdir() if file.name.startswith("reference_")), key=lambda file: file.name
    )
    return tuple(
        msgspec.json.decode(file.read_bytes(), type=Reference) for file in files if file.name.endswith(".json")
    )


def find_reference(model: Model, references: Iterable[Reference] | None = None) -> Reference | None:
    """The shipped or cached reference for the weights of this model. Files are hashed only if their size matches."""
    paths = [Path(file) for file in model.files]
    if not paths or not all(path.is_file() for path in paths):
        return None
    size_bytes = measure_weight_bytes(model)
    close = [one for one in references or read_shipped_references() if one.file_bytes == size_bytes]
    found = hash_file(paths[0]) if close and len(paths) == 1 else None
    shipped = next((one for one in close if one.sha256 == found), None)
    if shipped is not None or references is not None:
        return shipped
    if not any(get_references_dir().glob(f"{size_bytes}-*.json")):
        return None
    return read_reference(get_reference_path(model))


def measure_weight_bytes(model: Model) -> int:
    return sum(Path(file).stat().st_size for file in model.files)


def get_references_dir() -> Path:
    return get_home() / "references"


def get_reference_path(model: Model) -> Path:
    """The file of a cached reference. Its name begins with the size of the weights, so that others are not hashed."""
    return get_references_dir() / f"{measure_weight_bytes(model)}-{hash_model_content(model)[:20]}.json"


def read_reference(path: Path) -> Reference | None:
    """A cached reference; `None` if there is none, or if another version of bedplate wrote it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reference)
    except (OSError, msgspec.DecodeError):
        return None


def list_cached_references() -> tuple[tuple[Path, Reference], ...]:
    """The files and their references, the newest first."""
    paths = sorted(get_references_dir().glob("*.json"))
    found = [(path, one) for path in paths if (one := read_reference(path)) is not None]
    return tuple(sorted(found, key=lambda pair: pair[1].at or "", reverse=True))


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_output(output: str | bytes, sha256: str) -> tuple[str, dict[str, ReferenceAnswer], Likelihood | None]:
    """Reads the output of the shipped program: its versions, its answers and the likelihood of the text."""
    made_with, answers = read_answers(output)
    found: dict[str, Any] | None = json.loads(output).get("likelihood")
    if found is None:
        return made_with, answers, None
    try:
        likelihood = msgspec.convert({**found, "sha256": sha256, "made_with": made_with}, Likelihood)
    except msgspec.ValidationError as error:
        raise ExternalFailure("the output of the reference program is not a likelihood", cause=str(error)) from error
    return made_with, answers, likelihood


def read_answers(output: str | bytes) -> tuple[str, dict[str, ReferenceAnswer]]:
    """Reads the output of the shipped program: its versions and its answers."""
    try:
        document = json.loads(output)
        answers = {
            one["prefix"]: msgspec.convert([*(one[name] for name in KNOWN), one.get("turned_gap")], ReferenceAnswer)
            for one in document["answers"]
        }
        return f"torch {document['torch']}, transformers {document['transformers']}, float32", answers
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ExternalFailure("the output of the reference program is not a reference", cause=str(error)) from error


def write_reference(reference: Reference) -> str:
    """As JSON with one answer per line, so that diffs are readable."""
    head = {name: value for name, value in json.loads(msgspec.json.encode(reference)).items() if value is not None}
    if head["method"] == "float32":
        del head["method"]
    lines = [f'    "{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in head.pop("answers").items()]
    whole = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return whole + ',\n  "answers": {\n' + ",\n".join(lines) + "\n  }\n}\n"
