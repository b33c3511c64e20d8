"""bedplate bundle: engine, model, plan and bedplate itself, packed for a site that reaches nothing outside."""

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
            help="An archive, where it ends in .tar, or a folder. Default: bedplate-MODEL-ENGINE.tar.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Pack nothing: compare a bundle with its own manifest.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Pack an engine, a model, its plan and bedplate itself for a site that reaches nothing outside.

    Decides, installs and converts as `serve` would, and packs what that came to. For hardware on paper, and engines
    that only an image has, the image is named instead of packed.
    """
    from bedplate.cli.options import intent_from
    from bedplate.cli.terminal import TerminalProgress, console
    from bedplate.show.bundle import render_checked, render_packed
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
