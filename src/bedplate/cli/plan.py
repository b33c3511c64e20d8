"""bedplate plan: which engine, why, and the exact launch."""

from __future__ import annotations

from bedplate.cli.options import Concurrency, Context, EngineId, Json, ModelName, OutputTokens, PromptTokens, Users

EXAMPLES = """Examples:

\b
  bedplate plan
  bedplate plan model.gguf --users 8 --context 16384
  bedplate plan model.gguf --json | jq .launch.argv

Exit code 1: it does not fit, or nothing runs it here."""


def plan(
    model: ModelName = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    engine: EngineId = None,
    json: Json = False,
) -> None:
    """Say which engine fits, why, and how to launch it.

    Also what was refused and why, what it will need, and whether it fits. Runs nothing.
    """
    import sys

    from bedplate.cli.options import workload_of
    from bedplate.decide import decide
    from bedplate.facts.hardware import probe
    from bedplate.run.models import known_model

    hardware = probe()
    facts = known_model(model)
    workload = workload_of(
        users=users, concurrency=concurrency, context=context, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    decision = decide(hardware, facts, workload, engine)
    if json:
        from bedplate.values import to_json

        print(to_json(decision))  # noqa: T201
    else:
        from bedplate.show.decision import render_decision
        from bedplate.show.terminal import console

        console().print(render_decision(hardware, facts, workload, decision, engine))
    sys.exit(0 if decision.engine is not None else 1)
