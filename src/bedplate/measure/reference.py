"""The reference: PyTorch's answers in float32 to the fixed prefixes, for weights identified by the hash of their file.

`python -m bedplate.measure.reference GGUF FOLDER PYTHON` writes the shipped file. FOLDER has the dequantized weights in
float32; PYTHON is an interpreter with torch and transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from bedplate.errors import ExternalFailure
from bedplate.measure.prefixes import hash_prefix, list_fixed_prefixes, list_short_prefixes
from bedplate.values import Model

DATA = "bedplate.measure"
KNOWN = ("text", "kind", "tokens", "gap")
QUIETLY = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


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


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["reference/1"] = "reference/1"
    file: str
    sha256: str
    file_bytes: int
    made_with: str
    answers: dict[str, ReferenceAnswer]
    """Key: the hash of the prefix."""

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
    """The reference for the weights of this file. The file is hashed only if its size matches."""
    path = Path(model.files[0]) if model.files else None
    if path is None or not path.is_file():
        return None
    size_bytes = path.stat().st_size
    close = [one for one in references or read_shipped_references() if one.file_bytes == size_bytes]
    found = hash_file(path) if close else None
    return next((one for one in close if one.sha256 == found), None)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def compute(source: Path, folder: Path, python: Path) -> Reference:
    """Computes the reference of a GGUF file from its dequantized folder. A small model takes minutes on a CPU."""
    program = importlib.resources.files("bedplate.engines.shipped") / "reference.py"
    done = subprocess.run(
        [str(python), str(program), "--model", str(folder)],
        input=json.dumps([*list_fixed_prefixes(), *list_short_prefixes()]).encode(),
        capture_output=True,
        env={**os.environ, **QUIETLY},
    )
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ExternalFailure("the reference could not be computed", cause=last[0] if last else None)
    made_with, answers = read_answers(done.stdout)
    return Reference(
        file=source.name,
        sha256=hash_file(source),
        file_bytes=source.stat().st_size,
        made_with=made_with,
        answers=answers,
    )


def write_reference(reference: Reference) -> str:
    """As JSON with one answer per line, so that diffs are readable."""
    head = json.loads(msgspec.json.encode(reference))
    lines = [f'    "{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in head.pop("answers").items()]
    whole = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return whole + ',\n  "answers": {\n' + ",\n".join(lines) + "\n  }\n}\n"


if __name__ == "__main__":
    made = compute(*(Path(argument) for argument in sys.argv[1:4]))
    (Path(__file__).parent / "data" / f"reference_{made.id}.json").write_text(write_reference(made), encoding="utf-8")
