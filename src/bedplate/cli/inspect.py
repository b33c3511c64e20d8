"""bedplate inspect: a model, read from its headers."""

from __future__ import annotations

from bedplate.cli.options import Json, ModelName

EXAMPLES = """Examples:

\b
  bedplate inspect model.gguf
  bedplate inspect ./Qwen3-8B                        a folder with config.json and safetensors files
  bedplate inspect "Llama 3.1 8B FP8" --json         a well-known model, by name
  bedplate inspect owner/name                        on the Hugging Face hub; only headers are fetched"""


def inspect(model: ModelName = None, json: Json = False) -> None:
    """Show the size, layers, KV cache and context of a model.

    Reads headers only, not the weights. Shows the KV cache per token by kind of layer, and the quantization.
    """
    from bedplate.run.models import find_inspected_model

    facts = find_inspected_model(model)
    if json:
        from bedplate.values import to_json

        print(to_json(facts))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.facts.hardware import probe
    from bedplate.show.inspect import render_model

    make_console().print(render_model(facts, probe()))
