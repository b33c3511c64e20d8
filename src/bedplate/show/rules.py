"""Generates docs/rules.md from the rules; `make docs` writes it."""

# Rows of a Markdown table cannot be wrapped.
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bedplate.decide.explain import REASONS
from bedplate.decide.order import EXCLUSIONS, FEWEST
from bedplate.decide.rules import ASKED, CHALLENGES, DOUBTS, MEASURED, ORCHESTRATION, PICKS, TIMELY, DecisionRule
from bedplate.decide.verify.general import GENERAL_RULES
from bedplate.decide.verify.memory import MEMORY_RULES
from bedplate.engines import load_engines

HEAD = """# The rules behind a decision

<!-- Generated from src/bedplate/decide by `make docs`; a test compares it with the source. -->

Every reason in a [plan](plan.md) names the rule that it comes from. This page gives each rule's source: a sentence in
one of five articles, physics, a vendor's document, or a measurement. Each rule is one function in `src/bedplate/decide`.

## Sources

The texts of these articles are not part of this repository.

| short name | article | a sentence from it |
| --- | --- | --- |
| `hardware-strategy` | ThakiCloud: "Don't Pick an Inference Engine. Pick a Hardware Strategy." | "default to vLLM, migrate only when a bottleneck is proven" |
| `cheat-sheet` | the cheat sheet thread "You don't pick an Inference Engine, you pick a Hardware Strategy" (@TheAhmadOsman) | "hybrid offload, GGUF, ultimate portability" |
| `landscape` | an engineer's notes on the inference engine landscape | "CPU-only or consumer hardware points to llama.cpp." |
| `behind-the-stack` | Doubleword: "Behind the Stack, Ep 8: Choosing the Right Inference Engine for Your LLM Deployment" | "Use Llama.cpp or mistral.rs for portable, lightweight local inference." |
| `engines-compared` | "LLM Inference Engineer, Day 26: Production Inference Engines Compared" | "A professional page starts benchmark cells as TBD." |

## Order

1. **Hardware** decides which engines can run, and in which weight formats. Each engine's file states this.
2. **Fit**: for each weight format that an engine accepts on this hardware and each parallel layout that divides the
   model evenly, bedplate adds weights, KV cache, activations and engine overhead, and compares the sum with the free
   memory ([memory](memory.md)). When a model does not fit, bedplate says which quantization, memory or number of cards
   would be enough.
3. **The rules below apply in their order.** The first rule that matches names engines in order of preference. The first
   of these engines that can run here and fits is chosen. A specialised engine is chosen without a measurement only when
   the intent states the condition that its rule names.
4. **Weights, layout and settings** of an engine: every combination that fits is estimated. Those that meet the latency
   targets come first (asked, or for text generation a TTFT of 2 s and a TPOT of 100 ms) and hold all requests; if none
   does, those within ten percent of the closest. Of these the most faithful weights and cache, then the
   simplest (the effort of the engine, a conversion, one replica on several machines), then the fastest within three
   percent, then the fewest GPUs. [A few rules](#before-the-order) exclude combinations that the order prefers.
   `bedplate plan --alternatives` lists what was not chosen, and why.
5. Every other engine is refused with a reason, or is a challenger with the evidence that would justify it.
6. Several nodes put an orchestrator above the engine.
7. **A verifier** checks the result as the engine would ([what is verified](#what-is-verified)).
"""


def write_rules_page() -> str:
    parts = [HEAD]
    parts += ["## Above the rules\n", _format_table(("rule", "what it says", "source"), _list_fixed_rows())]
    parts += ["## Which engine\n", _format_table(("rule", "what it says", "source"), _list_rule_rows(PICKS))]
    parts += [
        "## Not suitable\n",
        "An engine that can run here and was not chosen is `unsuitable` if one of these rules matches; the first match is shown.\n",
        _format_table(("rule", "engine", "when", "source"), _list_rule_rows(DOUBTS, engine=True)),
    ]
    parts += [
        "## Worth measuring\n",
        "A suitable engine that was not chosen is a challenger if one of these rules matches; otherwise it is `outranked`.\n",
        _format_table(("rule", "engine", "when", "source"), _list_rule_rows(CHALLENGES, engine=True)),
    ]
    parts += [
        "## Before the order\n",
        "These rules exclude combinations of weights, layout and settings of an engine. If the order prefers one of them, the plan gives the rule as a reason.\n",
        _format_table(("rule", "what it says", "source"), _list_rule_rows((*EXCLUSIONS, FEWEST))),
    ]
    parts += [
        "## Above the engine\n",
        _format_table(("rule", "what it says", "source"), _list_rule_rows(ORCHESTRATION)),
    ]
    parts += [
        "## Reasons for the settings\n",
        "These rules give the figures behind the choice: fit, weights and layout.\n",
        _format_table(("rule", "what it says", "source"), _list_rule_rows(REASONS)),
    ]
    parts += [
        "## What is verified\n",
        "Before a plan is shown, a verifier that is separate from the search reads its launch back and checks it as the engine would. "
        "A plan that breaks one of these rules is not shown: the search goes on, and a note of the plan, or the refusal of the engine, gives the reason.\n",
        _format_table(("rule", "what must hold", "where engines check it"), _list_shared_checks()),
        _format_table(("rule", "engine", "what must hold", "source"), _list_engine_checks()),
    ]
    return "\n".join(parts)


def _list_shared_checks() -> list[tuple[str, ...]]:
    engines = load_engines().values()
    found: list[tuple[str, ...]] = []
    for rule in (*GENERAL_RULES, *MEMORY_RULES):
        cited = [f"{engine.name}: {source}" for engine in engines if (source := engine.rule_sources.get(rule.id))]
        found.append((f'<a id="{rule.id}"></a>`{rule.id}`', rule.sentence, "<br>".join(cited) or rule.source))
    return found


def _list_engine_checks() -> list[tuple[str, ...]]:
    return [
        (f'<a id="{rule.id}"></a>`{rule.id}`', f"`{engine.id}`", rule.sentence, rule.source)
        for engine in load_engines().values()
        for rule in engine.launch_rules
    ]


def _list_fixed_rows() -> list[tuple[str, ...]]:
    return [
        (
            f"`{ASKED[0]}`",
            "An engine that is requested with `--engine` is planned, or the plan states why it cannot run.",
            ASKED[1],
        ),
        (
            f"`{MEASURED[0]}`",
            "A measurement on this machine and a similar workload that proves another engine faster and correct outweighs every rule.",
            MEASURED[1],
        ),
        (
            f"`{TIMELY[0]}`",
            "If the engine that the rules choose misses the latency targets by more than ten percent, another one that the rules name for this case and that meets them is chosen; if the targets are asked for, also one that is worth measuring. Rules about operations take precedence. If no rule names an engine for many requests, and the simplest misses the targets or the work is a batch, one that is expected to be at least twice as fast is chosen, too.",
            TIMELY[1],
        ),
    ]


def _list_rule_rows(rules: Iterable[DecisionRule[..., Any]], engine: bool = False) -> list[tuple[str, ...]]:
    found = []
    for rule in rules:
        cells = (
            f'<a id="{rule.id}"></a>`{rule.id}`',
            *((f"`{rule.engines[0]}`",) if engine else ()),
            rule.sentence,
            rule.source,
        )
        found.append(cells)
    return found


def _format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
