"""Options that several verbs share, and what they make together."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bedplate.values.cost import Price
    from bedplate.values.intent import Intent


def engine_named(text: str) -> str:
    """The id of the engine that a person names, in any usual spelling."""
    from bedplate.engines import all_engines
    from bedplate.engines.names import engine_id, nearest_names
    from bedplate.errors import BadQuestion

    known = all_engines()
    found = text if text in known else engine_id(text)
    if found in known:
        return found
    near = [name for name in nearest_names(text) if name in known]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise BadQuestion(f"no engine is called {text!r}", hint=f"{hint}known: {', '.join(known)}")


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
Untuned = Annotated[bool, typer.Option("--untuned", help="Leave out what `bedplate tune` found here.")]
EngineId = Annotated[
    str | None,
    typer.Option("--engine", metavar="ID", help="Ask for one engine.", show_default=False, parser=engine_named),
]
EngineName = Annotated[
    str, typer.Argument(metavar="ID", help="The engine, as `bedplate engines` names it.", parser=engine_named)
]
Users = Annotated[int | None, typer.Option(min=1, help="People who may be active at once.", show_default=False)]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.", show_default=False)]
Context = Annotated[
    int | None, typer.Option(min=1, help="The longest request, prompt and answer, in tokens.", show_default=False)
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual prompt.", show_default=False)]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual answer.", show_default=False)]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="PRICE",
        help="Of one accelerator, or of the machine when it has none: the cost of a million tokens is then shown.",
        show_default=False,
    ),
]
ElectricityPrice = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="PRICE", help="Of one kWh, in the same currency; added to the cost.", show_default=False
    ),
]


def price_from(
    file: Path | None, price_per_hour: float | None, electricity_price: float | None, known: Price | None = None
) -> Price | None:
    """What the options say, else the intent's operations, else what is `known`; `None`: nobody says anything."""
    from bedplate.decide.intent import read_intent
    from bedplate.errors import BadQuestion
    from bedplate.values import replaced
    from bedplate.values.cost import Price

    price = known or Price()
    if file is not None:
        said = read_intent(file).operations.price
        price = replaced(price, **{name: one for name in said.__struct_fields__ if (one := getattr(said, name))})
    given = {"price_per_hour": price_per_hour, "electricity_price": electricity_price}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise BadQuestion(f"--{name.replace('_', '-')}: must be more than 0", hint="leave it out for no price")
    price = replaced(price, **{name: value for name, value in given.items() if value is not None})
    return price if price.said else None


def write_file(path: Path, text: str) -> None:
    from bedplate.errors import OutsideFailed

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutsideFailed(f"cannot write {path}", cause=error.strerror or str(error)) from error


def intent_from(file: Path | None, fields: list[str] | None, *, base: Intent | None = None, **options: Any) -> Intent:
    """The file's intent, or `base`, or an empty one, with what the command line says instead."""
    from bedplate.decide.intent import override, parsed_fields, read_intent
    from bedplate.values.intent import Intent

    intent = read_intent(file) if file is not None else base or Intent()
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
