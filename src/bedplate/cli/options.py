"""Options that several verbs share, and what they make together."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bedplate.values.intent import Intent

Json = Annotated[bool, typer.Option("--json", help="Print the value as JSON.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a folder, a name in the Hugging Face, Ollama or LM Studio cache, or owner/name[:QUANT] "
        "on the hub. Default: the built-in SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
IntentFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="An intent file (bedplate.yaml).", show_default=False),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help='A machine on paper ("8x H100 SXM", "RTX 4090") or a file from `probe --json`. Default: this machine.',
        show_default=False,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of the intent: volume=extreme, ram_gb=128. May be repeated.",
        show_default=False,
    ),
]
EngineId = Annotated[str | None, typer.Option("--engine", metavar="ID", help="Ask for one engine.", show_default=False)]
Users = Annotated[int | None, typer.Option(min=1, help="People who may be active at once.", show_default=False)]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.", show_default=False)]
Context = Annotated[
    int | None, typer.Option(min=1, help="The longest request, prompt and answer, in tokens.", show_default=False)
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual prompt.", show_default=False)]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual answer.", show_default=False)]


def write_file(path: Path, text: str) -> None:
    from bedplate.errors import OutsideFailed

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutsideFailed(f"cannot write {path}", cause=error.strerror or str(error)) from error


def intent_from(file: Path | None, fields: list[str] | None, **options: Any) -> Intent:
    """The file's intent, or an empty one, with what the command line says instead."""
    from bedplate.facts.intent import override, parsed_fields, read_intent
    from bedplate.values.intent import Intent

    intent = read_intent(file) if file is not None else Intent()
    given = {name: value for name, value in options.items() if value is not None}
    given |= parsed_fields(fields or [])
    return override(intent, **given) if given else intent


def words_of(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """The command line again, as its parameters were understood; what nobody said is left out."""
    words: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in without or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        values = value if isinstance(value, list | tuple) else [value]
        for one in values:
            text = str(getattr(one, "value", one))
            if parameter.param_type_name == "argument":
                words.append(text)
            elif isinstance(one, bool):
                words.append(parameter.opts[0] if one else parameter.secondary_opts[0])
            else:
                words += [parameter.opts[0], text]
    return words
