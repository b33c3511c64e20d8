"""Answers the questions of questions.yaml, compares each with the recipe that it was checked against, and writes the
page docs/advice.md.

    make advice

Exit code 1: an answer differs from its recipe. Read the recipe again, then change the answer or the check.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bedplate.decide import decide
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.run.models import find_intended_model
from bedplate.values import Decision

FOLDER = Path(__file__).parent
QUESTIONS = FOLDER / "questions.yaml"
PAGE = FOLDER.parents[1] / "docs" / "advice.md"
LAYOUT = ("tensor", "pipeline", "data", "expert", "attention_data")
EXPECTED = (
    "engine", "quantization", "device", "adapters", "experts_in_ram", "option", "slots_at_least", "cards", *LAYOUT,
)  # fmt: skip
"""Fields of a check: a value or a list of values that the recipe allows; `option` is one that the launch has."""
HEAD = """\
# Fifty questions

What `bedplate plan` answers to fifty questions, each compared by hand with what the engine's own documentation or
source recommends. `make advice` writes this page from `benchmarks/advice/questions.yaml`, and fails if an answer is no
longer one that its source allows.

| | question | answer | reason | checked against |
| --- | --- | --- | --- | --- |
"""
TAIL = """
Speeds are not part of these checks: [estimates](estimates.md) compares them with published measurements. Each check in
the data file has the lines that were read, what they say, and the values that they allow.
"""


@dataclass(frozen=True)
class Question:
    id: str
    kind: str
    question: str
    intent: dict[str, Any]
    sources: tuple[str, ...]
    """Addresses of the recipe: a line of a file at a commit, a pull request, or a page of the documentation."""
    says: str
    expect: dict[str, Any]


def read_questions(path: Path = QUESTIONS) -> tuple[Question, ...]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(
        Question(
            id=one["id"],
            kind=one["class"],
            question=one["question"],
            intent=one["intent"],
            sources=tuple(one["check"]["sources"]),
            says=one["check"]["says"],
            expect=one["check"]["expect"],
        )
        for one in data
    )


def answer(question: Question) -> Decision:
    asked = to_intent(question.intent)
    model = find_intended_model(asked.model)
    return decide(resolve_hardware(asked), model, asked.workload, operations=asked.operations)


def list_differences(question: Question, found: Decision) -> list[str]:
    """Where the answer is not one that the recipe allows."""
    settings, layout = found.settings, found.parallelism
    has: dict[str, Any] = {
        "engine": found.engine,
        "quantization": found.quantization,
        "device": settings.device if settings is not None else None,
        "adapters": any(need.adapter_bytes for need in found.memory.devices) if found.memory is not None else False,
        "experts_in_ram": bool(settings is not None and settings.host_expert_layers),
        "cards": layout.tensor * layout.pipeline * layout.data,
        **{kind: getattr(layout, kind) for kind in LAYOUT},
    }
    different = []
    for name, allowed in question.expect.items():
        if name == "slots_at_least":
            slots = settings.slots if settings is not None else 0
            different += [] if slots >= allowed else [f"{slots} slots, at least {allowed} expected"]
        elif name == "option":
            words = found.launch.argv if found.launch is not None else ()
            different += [] if allowed in words else [f"the launch has no {allowed}"]
        else:
            values = allowed if isinstance(allowed, list) else [allowed]
            different += [] if has[name] in values else [f"{name} is {has[name]}, expected {values}"]
    return different


def describe_answer(found: Decision) -> str:
    if found.engine is None:
        return f"not possible: {'; '.join(found.hints[:2]) or found.refused[0].why}"
    layout = [
        f"{kind.replace('_', ' ')} parallel {size}" for kind in LAYOUT if (size := getattr(found.parallelism, kind)) > 1
    ]
    weights, settings = found.weights, found.settings
    plain = found.quantization in ("BF16", "F16", "F32")
    kinds = {"converted": ", converted", "while loading": "" if plain else ", quantized while loading"}
    made = kinds.get(weights.made, "") if weights is not None else ""
    host = ""
    if settings is not None and settings.host_expert_layers:
        host = f", experts of {settings.host_expert_layers} layers in RAM"
    elif found.memory is not None and found.memory.offload is not None:
        host = f", {found.memory.offload.host_layers} layers in RAM"
    return ", ".join([f"**{found.engine}** {found.quantization}{made}", *layout]) + host


def describe_reason(found: Decision) -> str:
    if any(hint.kind == "unsupported-hardware" for hint in found.hint_details):
        return "no engine that bedplate plans supports this accelerator"
    return found.reasons[0].text if found.reasons else (found.refused[0].why if found.refused else "")


def name_source(address: str) -> str:
    """The repository and the file, or the page."""
    if found := re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/blob/[0-9a-f]{40}/([^?#]+)\S*", address):
        return f"{found[1]}: {found[2]}"
    return address.removeprefix("https://github.com/").removeprefix("https://")


def format_source(question: Question) -> str:
    links = ", ".join(f"[{name_source(address)}]({address})" for address in question.sources)
    return f"{links}: {question.says}"


def write_page() -> tuple[str, list[str]]:
    """The page, and the differences from the recipes."""
    lines, different, kind = [], [], ""
    for number, question in enumerate(read_questions(), 1):
        found = answer(question)
        different += [f"{question.id}: {one}" for one in list_differences(question, found)]
        if question.kind != kind:
            kind = question.kind
            lines.append(f"| | **{kind}** | | | |")
        cells = (
            str(number),
            question.question,
            describe_answer(found),
            describe_reason(found),
            format_source(question),
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the page instead of writing it")
    options = parser.parse_args()
    page, different = write_page()
    if options.show:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    for one in different:
        print(one, file=sys.stderr)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
