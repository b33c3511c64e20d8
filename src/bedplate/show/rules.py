"""docs/rules.md, made of the rules themselves: `python -m bedplate.show.rules > docs/rules.md`."""

# A table's rows are lines, however long.
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bedplate.decide.explain import REASONS
from bedplate.decide.rules import ASKED, CHALLENGES, DOUBTS, MEASURED, ORCHESTRATION, PICKS, Rule

HEAD = """# The rules behind a decision

<!-- Made from src/bedplate/decide by `make docs`; a test holds it to the source. -->

Every reason in a [plan](plan.md) names the rule that it comes from and the rule's source: a sentence in one of five
documents, physics, a vendor's document, or a measurement. Each rule is one small function in `src/bedplate/decide`.

## Sources

The labels `seeds/000` to `seeds/004` stand for these documents; their texts are not part of this repository.

| label | document | a sentence from it |
| --- | --- | --- |
| `seeds/000` | ThakiCloud: "Don't Pick an Inference Engine. Pick a Hardware Strategy." | "default to vLLM, migrate only when a bottleneck is proven" |
| `seeds/001` | the cheat sheet thread "You don't pick an Inference Engine, you pick a Hardware Strategy" (@TheAhmadOsman) | "hybrid offload, GGUF, ultimate portability" |
| `seeds/002` | an engineer's notes on the inference engine landscape | "CPU-only or consumer hardware points to llama.cpp." |
| `seeds/003` | Doubleword: "Behind the Stack, Ep 8: Choosing the Right Inference Engine for Your LLM Deployment" | "Use Llama.cpp or mistral.rs for portable, lightweight local inference." |
| `seeds/004` | "LLM Inference Engineer, Day 26: Production Inference Engines Compared" | "A professional page starts benchmark cells as TBD." |

## Order

1. **Hardware** decides which engines can run at all, and in which weight formats: each engine says so of itself.
2. **Fit**: for each form of the weights that an engine takes here, and each layout whose dimensions divide, weights,
   cache, activations and the engine's own overhead are held against what is really free ([memory](memory.md)). What
   does not fit says what would.
3. **The rules below are asked in their order.** The first that speaks names engines, the best first; the first of them
   that can run here and fits is chosen. A specialised engine is chosen unmeasured only when the intent states the very
   condition that its rule names.
4. Every other engine is refused with its reason, or is a challenger with the evidence that would justify it.
5. Several nodes put an orchestrator above the engine.
"""


def rules_page() -> str:
    parts = [HEAD]
    parts += ["## Above the rules\n", _table(("rule", "what it says", "source"), _fixed())]
    parts += ["## Which engine\n", _table(("rule", "what it says", "source"), _said(PICKS))]
    parts += [
        "## What it was not built for\n",
        "An engine that could run here and was not chosen is `unsuitable` by the first of these that speaks of it.\n",
        _table(("rule", "engine", "when", "source"), _said(DOUBTS, engine=True)),
    ]
    parts += [
        "## Worth measuring\n",
        "An engine that could, was built for this and was not chosen is a challenger, if one of these speaks of it;\n"
        "otherwise it is `outranked`.\n",
        _table(("rule", "engine", "when", "source"), _said(CHALLENGES, engine=True)),
    ]
    parts += ["## Above the engine\n", _table(("rule", "what it says", "source"), _said(ORCHESTRATION))]
    parts += [
        "## What is said of the choice\n",
        "These give the figures behind the choice: the fit, the weights, the layout.\n",
        _table(("rule", "what it says", "source"), _said(REASONS)),
    ]
    return "\n".join(parts)


def _fixed() -> list[tuple[str, ...]]:
    return [
        (
            f"`{ASKED[0]}`",
            "An engine that is asked for by its id is planned, or it is said why it cannot be.",
            ASKED[1],
        ),
        (
            f"`{MEASURED[0]}`",
            "What was measured here, on work like this, to be clearly faster and not wrong outweighs any rule.",
            MEASURED[1],
        ),
    ]


def _said(rules: Iterable[Rule[..., Any]], engine: bool = False) -> list[tuple[str, ...]]:
    found = []
    for rule in rules:
        cells = (f"`{rule.id}`", *((f"`{rule.engine}`",) if engine else ()), rule.sentence, rule.source)
        found.append(cells)
    return found


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
