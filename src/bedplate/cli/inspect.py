"""bedplate inspect: a model, from its headers alone."""

from __future__ import annotations

from bedplate.cli.options import Json, ModelName

EXAMPLES = """Examples:

\b
  bedplate inspect model.gguf
  bedplate inspect model-00001-of-00003.gguf --json"""


def inspect(model: ModelName = None, json: Json = False) -> None:
    """Show what a model is made of, from its headers.

    Weights, cache for each token, context, quantization by tensor. No weights are read.
    """
    from bedplate.run.models import known_model

    facts = known_model(model)
    if json:
        from bedplate.values import to_json

        print(to_json(facts))  # noqa: T201
        return
    from bedplate.show.inspect import render_model
    from bedplate.show.terminal import console

    console().print(render_model(facts))
