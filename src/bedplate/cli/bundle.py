"""bedplate bundle: engine, model, plan and bedplate itself, packed for an air-gapped site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bedplate.cli.options import (
    Concurrency,
    Context,
    EngineId,
    Fields,
    HardwareName,
    IntentFile,
    Json,
    ModelName,
    OutputTokens,
    PromptTokens,
    Users,
)

EXAMPLES = """Examples:

\b
  bedplate bundle
  bedplate bundle model.gguf --engine llama.cpp -o chat.tar
  bedplate bundle -f bedplate.yaml -o /media/stick/chat
  bedplate bundle --check chat.tar

Then, at the site: tar xf chat.tar && ./bedplate-bundle/serve, or bedplate serve --bundle chat.tar."""


def bundle(
    model: ModelName = None,
    file: IntentFile = None,
    hardware: HardwareName = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    fields: Fields = None,
    engine: EngineId = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="A .tar archive or a folder. Default: bedplate-MODEL-ENGINE.tar.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Verify a bundle against its manifest; pack nothing.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Pack an engine, a model and bedplate for an air-gapped site.

    Decides, installs and converts as `serve` does, and packs the result. For hypothetical hardware, and for engines
    that run only from a container image, the bundle names the image and does not contain it.
    """
    from bedplate.cli.options import intent_from
    from bedplate.show.bundle import render_checked, render_packed
    from bedplate.show.terminal import TerminalProgress, console
    from bedplate.values import to_json

    if check is not None:
        from bedplate.operate.bundled import checked

        found = checked(check, TerminalProgress())
        shown, value = render_checked(check, found), to_json(found)
    else:
        from bedplate.operate.bundle import make_bundle

        intent = intent_from(
            file, fields, model=model, hardware=hardware, users=users, concurrency=concurrency, context=context,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        )  # fmt: skip
        packed = make_bundle(intent, engine, output, TerminalProgress())
        shown, value = render_packed(packed), to_json(packed)
    if json:
        print(value)  # noqa: T201
    else:
        console().print(shown)
