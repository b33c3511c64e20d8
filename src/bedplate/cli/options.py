"""Options that several verbs share, and the values that they make together."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bedplate.values.cost import Price
    from bedplate.values.intent import Intent
    from bedplate.values.scenario import Scenario


def parse_engine(text: str) -> str:
    """The id of an engine, from any usual spelling of its name."""
    from bedplate.engines import load_engines
    from bedplate.engines.names import find_engine_id, find_nearest_names
    from bedplate.errors import UsageError

    known = load_engines()
    found = text if text in known else find_engine_id(text)
    if found in known:
        return found
    near = [name for name in find_nearest_names(text) if name in known]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no engine is called {text!r}", hint=f"{hint}known: {', '.join(known)}")


def complete_engine(incomplete: str) -> list[str]:
    from bedplate.engines import load_engines

    return [one for one in load_engines() if one.startswith(incomplete)]


def parse_engine_and_version(text: str) -> str:
    """The engine's id, with the version if one is given: ID@VERSION."""
    name, at, version = text.partition("@")
    if not at:
        return parse_engine(text)
    from bedplate.engines import load_engines
    from bedplate.engines.base import NATIVE
    from bedplate.errors import UsageError
    from bedplate.run.environments import resolve_version

    engine = parse_engine(name)
    if version == NATIVE and load_engines()[engine].build is None:
        raise UsageError(f"{engine} has no native build", hint=f"name a version, such as {engine}@1.2.3")
    if version != NATIVE and not re.fullmatch(r"v?[0-9][\w.+-]*", version):
        raise UsageError(f"{text!r} names no version after the @", hint="such as vllm@0.26.0 or llama.cpp@native")
    return resolve_version(engine, version)


def parse_scenario(text: str) -> str:
    from bedplate.facts.scenarios import get_scenario

    return get_scenario(text).name


Json = Annotated[bool, typer.Option("--json", help="Print JSON. `bedplate schema` has its format.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a folder, a name in the Hugging Face, Ollama or LM Studio cache, owner/name[:QUANT] on the "
        "Hugging Face hub, or a short name such as llama3.1:8b. Default: the built-in SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
WaitForGpu = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="How long to wait for a GPU that another process uses, before giving up.",
    ),
]
AllowBusyGpu = Annotated[
    bool,
    typer.Option(
        "--allow-busy-gpu", help="Measure although another process uses the GPU; the results are flagged busy."
    ),
]
Structured = Annotated[
    bool,
    typer.Option("--structured", help="Also send 100 prompts with JSON schemas and tools, and score the answers."),
]
IntentFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="An intent file (bedplate.yaml); docs/intent.md describes it.",
        show_default=False,
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help='Hypothetical hardware ("8x H100 SXM", "RTX 4090") or a file from `probe --json`. Default: this machine.',
        show_default=False,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set any field of the intent: volume=extreme, ram_gb=128. May be repeated.",
        show_default=False,
    ),
]
Untuned = Annotated[bool, typer.Option("--untuned", help="Ignore the settings that `bedplate tune` found.")]
EngineId = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ID[@VERSION]",
        help="Use this engine instead of the recommended one.",
        show_default=False,
        parser=parse_engine_and_version,
        autocompletion=complete_engine,
    ),
]
EngineName = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="An engine id from `bedplate engines`.",
        parser=parse_engine,
        autocompletion=complete_engine,
    ),
]
EngineVersionName = Annotated[
    str,
    typer.Argument(
        metavar="ID[@VERSION]",
        help="An engine id from `bedplate engines`, with a version if another one than bedplate's is meant.",
        parser=parse_engine_and_version,
        autocompletion=complete_engine,
    ),
]
Users = Annotated[
    int | None, typer.Option(min=1, help="Number of users, who think between requests.", show_default=False)
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Number of requests in flight.", show_default=False)]
Context = Annotated[
    int | None, typer.Option(min=1, help="Longest request in tokens, prompt and answer together.", show_default=False)
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Typical prompt length in tokens.", show_default=False)]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Typical answer length in tokens.", show_default=False)]
ScenarioOption = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="Sessions of a usual kind: chat, rag, agent, code, batch or voice; docs/scenarios.md describes them.",
        show_default=False,
        parser=parse_scenario,
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="PRICE",
        help="Price per hour of one accelerator, or of the machine when it has none. Adds the cost per million tokens.",
        show_default=False,
    ),
]
ElectricityPrice = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="PRICE", help="Price of one kWh in the same currency; added to the cost.", show_default=False
    ),
]


def read_price(
    file: Path | None, price_per_hour: float | None, electricity_price: float | None, known: Price | None = None
) -> Price | None:
    """The price from the options, else from the intent, else `known`; `None`: no price is given."""
    from bedplate.decide.intent import read_intent
    from bedplate.errors import UsageError
    from bedplate.values import replace_fields
    from bedplate.values.cost import Price

    price = known or Price()
    if file is not None:
        stated = read_intent(file).operations.price
        price = replace_fields(
            price, **{name: one for name in stated.__struct_fields__ if (one := getattr(stated, name))}
        )
    given = {"price_per_hour": price_per_hour, "electricity_price": electricity_price}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise UsageError(
                f"--{name.replace('_', '-')} must be more than 0", hint="leave it out if there is no price"
            )
    price = replace_fields(price, **{name: value for name, value in given.items() if value is not None})
    return price if price.is_given else None


def write_file(path: Path, text: str) -> None:
    from bedplate.errors import ExternalFailure

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "choose a file in a folder that you may write to"
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror or str(error), hint=hint) from error


def build_intent(file: Path | None, fields: list[str] | None, *, base: Intent | None = None, **options: Any) -> Intent:
    """The intent of the file, or `base`, or an empty one, changed by the options."""
    from bedplate.decide.intent import override, parse_fields, read_intent
    from bedplate.values.intent import Intent

    intent = read_intent(file) if file is not None else base or Intent()
    given = {name: value for name, value in options.items() if value is not None}
    given |= parse_fields(fields or [])
    return override(intent, **given) if given else intent


def add_scenario(
    intent: Intent, name: str, options: Mapping[str, object], fields: list[str] | None
) -> tuple[Intent, Scenario]:
    """The intent with the workload of a scenario for its model. Options that were given replace its figures."""
    from bedplate.decide.intent import ALIASES, parse_fields
    from bedplate.decide.scenario import apply_scenario
    from bedplate.run.models import find_intended_model

    given = {name for name, value in options.items() if value is not None} | set(parse_fields(fields or []))
    facts = find_intended_model(intent.model)
    return apply_scenario(intent, name, {ALIASES.get(name, name) for name in given}, facts.max_context)


def list_given(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """The options on the command line, by their names."""
    sources = {one: context.get_parameter_source(one.name or "") for one in context.command.params}
    given = [one for one, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return [one.opts[0] for one in given if one.name not in without]


def rebuild_command_line(context: typer.Context, without: Collection[str] = ()) -> list[str]:
    """The command line again, from its parsed parameters; those that were not given are left out."""
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
