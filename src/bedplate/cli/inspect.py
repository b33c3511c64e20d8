"""bedplate inspect: a model, read from its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json, ModelName

if TYPE_CHECKING:
    from bedplate.values import Model

EXAMPLES = """Examples:

\b
  bedplate inspect model.gguf
  bedplate inspect ./Qwen3-8B                        a folder with config.json and safetensors files
  bedplate inspect "Llama 3.1 8B FP8" --json         a well-known model, by name
  bedplate inspect owner/name                        on the Hugging Face hub; only headers are fetched
  bedplate inspect --chat-template                   as engines get it: with tools, if it is ChatML without them"""


def inspect(
    model: ModelName = None,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Print the chat template, with tools if it is ChatML without them."),
    ] = False,
    json: Json = False,
) -> None:
    """Show the size, layers, KV cache and context of a model.

    Reads headers only, not the weights. Shows the KV cache per token by kind of layer, and the quantization.
    """
    from bedplate.run.models import find_inspected_model

    if chat_template and json:
        from bedplate.errors import UsageError

        raise UsageError("--chat-template and --json cannot be combined", hint="--json has chat_template as it is")
    facts = find_inspected_model(model)
    if chat_template:
        _print_chat_template(facts)
        return
    if json:
        from bedplate.values import to_json

        print(to_json(facts))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.facts.hardware import probe
    from bedplate.show.inspect import render_model

    make_console().print(render_model(facts, probe()))


def _print_chat_template(facts: Model) -> None:
    from bedplate.engines.shipped.openai_server.tools import with_tools
    from bedplate.errors import NotPossible

    if facts.chat_template is None:
        why = "it is too long to be read" if facts.has_chat_template else "it completes text only"
        raise NotPossible(
            f"{facts.name}: no chat template is known", cause=why if facts.files else "no files were read"
        )
    print(with_tools(facts.chat_template) or facts.chat_template)  # noqa: T201
