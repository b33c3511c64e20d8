"""bedplate bench: the matrix of engines and loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import (
    ElectricityPrice,
    IntentFile,
    Json,
    ModelName,
    PricePerHour,
    engine_named,
    price_from,
    write_file,
)

if TYPE_CHECKING:
    from bedplate.measure.exchange import Form
    from bedplate.values.run import Run

EXAMPLES = """Examples:

\b
  bedplate bench
  bedplate bench --engines llama.cpp,pytorch --concurrency 1,4
  bedplate bench model.gguf --prompt-tokens 2048 --output-tokens 64 --shared-prefix 1024
  bedplate bench --rate 2 --arrivals poisson --seconds 60
  bedplate bench --slo ttft_ms=500,tpot_ms=50
  bedplate bench --url http://127.0.0.1:8000 --concurrency 1,8
  bedplate bench --url https://api.example.com/v1 --key-env API_KEY --model gpt-x
  bedplate bench --price-per-hour 2.5 --electricity-price 0.3
  bedplate bench --resume last
  bedplate bench --csv -o rows.csv

Ctrl-C stops everything and keeps what is done."""


class Arrivals(StrEnum):
    poisson = "poisson"
    constant = "constant"
    burst = "burst"


def bench(
    model: ModelName = None,
    file: IntentFile = None,
    engines: Annotated[
        str,
        typer.Option(metavar="IDS", help="Engines, with commas between them; `all` installs what can run here."),
    ] = "installed",
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Requests in flight, one cell each.", show_default="1,4,8,16"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, exactly.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly where possible.")] = 128,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Of each prompt, what all of them begin with.")] = 0,
    rate: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Requests per second that come whatever happens.", show_default=False),
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="How they come.")] = Arrivals.poisson,
    burst: Annotated[int, typer.Option(min=1, help="Requests that come at once, in bursts.")] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay a trace or a log: its arrivals and lengths.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Measured time of one repeat.")] = 10.0,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of a cell at the most.")] = 5,
    turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start every engine so often, in turns: what drifts is then shared out.",
            show_default="2 with several engines, else 1",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Measured time of all cells together.", show_default="4m for each engine"),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="ttft_ms=500,tpot_ms=50: find the highest load that meets it.", show_default=False
        ),
    ] = None,
    price_per_hour: PricePerHour = None,
    electricity_price: ElectricityPrice = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this endpoint, and start nothing.", show_default=False)
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with the endpoint's key.", show_default=False),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The endpoint's name of the model. Default: its first.", show_default=False
        ),
    ] = None,
    through_gateway: Annotated[
        bool, typer.Option("--through-gateway", help="Measure through bedplate's gateway, as clients see it.")
    ] = False,
    build: Annotated[
        str, typer.Option(metavar="KIND", help="packages, or native: built from source for this machine.")
    ] = "packages",
    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Compare answers with the reference, too.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the prompts and the arrivals.")] = 0,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a run that was ended; `last` is the newest.", show_default=False),
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Keep and show what others measured: `vllm bench serve`, GuideLLM, bedplate.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print the rows as JSON, one a line.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write a file: .json, .jsonl, .csv or .txt.", show_default=False
        ),
    ] = None,
) -> None:
    """Measure engines side by side: speed, memory, energy and whether the answers are right.

    The built-in model on every engine that is installed, one to sixteen requests in flight.
    """
    import sys

    form = _form(json=json, csv=csv, jsonl=jsonl, output=output)
    if import_file is not None:
        _imported(import_file, form, output)
        return
    from bedplate.measure.bench import Stopped
    from bedplate.measure.bench import bench as measure
    from bedplate.measure.questions import engine_list, loads_of, read_budget, read_target
    from bedplate.show.bench import teller_for
    from bedplate.show.terminal import console

    asked = engine_list(engines)
    named = asked if isinstance(asked, str) else tuple(dict.fromkeys(engine_named(one) for one in asked))
    loads = loads_of(
        concurrency=concurrency,
        rate=rate,
        arrivals=arrivals.value,
        burst=burst,
        trace=trace,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix,
        seed=seed,
    )
    target = read_target(slo) if slo is not None else None
    price = price_from(file, price_per_hour, electricity_price)
    teller = teller_for(console(sys.stdout if form is None or output is not None else sys.stderr), _limits)
    stopped: Stopped | None = None
    with teller:
        try:
            run = measure(
                model if model is not None or file is None else _model_in(file),
                engines=named,
                loads=loads,
                url=url,
                key_env=key_env,
                served_model=served_model,
                seconds=seconds,
                repeats=repeats,
                turns=turns,
                budget_s=read_budget(budget) if budget is not None else None,
                target=target,
                price=price,
                trace=trace,
                through_gateway=through_gateway,
                check_quality=quality,
                native=_native(build),
                resume=_resumed(resume),
                progress=teller,
                teller=teller,
                command=("bedplate", *sys.argv[1:]),
            )
        except Stopped as error:
            stopped, run = error, error.run
    teller.finished(run)
    _finish(run, form, output)
    if stopped is not None:
        console(sys.stderr).print(f" {stopped}", soft_wrap=True, markup=False)
        raise typer.Exit(130)


def _model_in(file: Path) -> str | None:
    """The model that an intent names; of its workload nothing is taken, since a benchmark has loads of its own."""
    from bedplate.decide.intent import read_intent
    from bedplate.errors import BadQuestion

    intent = read_intent(file)
    if intent.services:
        raise BadQuestion("one model is measured at a time, and the intent has services", hint="bedplate bench MODEL")
    named = intent.model
    if isinstance(named, dict):
        raise BadQuestion("model: facts can be planned, not measured", hint="name a file, a folder or owner/name")
    return named


def _form(*, json: bool, csv: bool, jsonl: bool, output: Path | None) -> Form | None:
    from bedplate.errors import BadQuestion

    forms: dict[str, Form] = {"json": "json", "csv": "csv", "jsonl": "jsonl", "txt": "txt"}
    asked = [name for name, wanted in (("json", json), ("csv", csv), ("jsonl", jsonl)) if wanted]
    if len(asked) > 1:
        raise BadQuestion(
            f"--{' and --'.join(asked)} cannot be had at once", hint="-o FILE writes one beside the other"
        )
    if asked:
        return forms[asked[0]]
    if output is None:
        return None
    ending = output.suffix.lower().removeprefix(".")
    if ending not in forms:
        raise BadQuestion(f"{output.name} has no ending that says its form", hint="name it .json, .jsonl, .csv or .txt")
    return forms[ending]


def _limits(run: Run) -> dict[str, str]:
    """What binds in each cell, as `diagnose` would say it."""
    from bedplate.cli.judging import diagnosis_of, limits_of
    from bedplate.errors import BedplateError
    from bedplate.facts.hardware import probe

    try:
        return limits_of(diagnosis_of(run.cells, {run.id: run.environment}, probe(), run.models))
    except BedplateError:
        return {}


def _imported(path: Path, form: Form | None, output: Path | None) -> None:
    from bedplate import store
    from bedplate.measure.imports import read_run
    from bedplate.show.bench import render_run
    from bedplate.show.terminal import console

    run = read_run(path)
    store.add_run(run)
    for cell in run.cells:
        store.add_cell(cell)
    if form is None or output is not None:
        console().print(render_run(run))
    _finish(run, form, output)


def _native(build: str) -> bool:
    from bedplate.errors import BadQuestion

    if build not in ("packages", "native"):
        raise BadQuestion(f"--build {build!r} is not known", hint="packages or native")
    return build == "native"


def _resumed(named: str | None) -> str | None:
    """The empty name is the newest run's."""
    return "" if named == "last" else named


def _finish(run: Run, form: Form | None, output: Path | None) -> None:
    if form is None:
        return
    from bedplate.measure.exchange import written

    text = written(run, form)
    if output is None:
        print(text, end="")  # noqa: T201
    else:
        write_file(output, text)
