"""bedplate pull: downloads a model without serving it."""

from __future__ import annotations

from bedplate.cli.options import Json, ModelName

EXAMPLES = """Examples:

\b
  bedplate pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  bedplate pull qwen3:8b                 the published weights that suit this machine
  bedplate pull                          the built-in model
  bedplate pull Qwen/Qwen3-8B --json

`bedplate serve MODEL` and `bedplate run MODEL` do this when it is necessary."""


def pull(model: ModelName = None, json: Json = False) -> None:
    """Download a model, in the weights that `serve` would use here.

    Nothing is downloaded if it is here already.
    """
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.facts.hardware import probe
    from bedplate.run.local_models import describe_model, find_local
    from bedplate.run.ready import fetch_facts
    from bedplate.values import to_json
    from bedplate.values.units import format_size

    before = find_local(model)
    facts = fetch_facts(model, probe(), TerminalProgress())
    found = describe_model(facts)
    if json:
        print(to_json(found))  # noqa: T201
        return
    state = "is already here" if before is not None else "downloaded"
    size = format_size(found.size_bytes)
    make_console().print(f" {found.name} {state}: {size}, {found.path}", soft_wrap=True, markup=False)
