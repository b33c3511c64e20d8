"""bedplate bench: measures engines under several loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import (
    AllowBusyGpu,
    ElectricityPrice,
    IntentFile,
    Json,
    ModelName,
    PricePerHour,
    ScenarioOption,
    Structured,
    WaitForGpu,
    parse_engine_and_version,
    read_price,
    write_file,
)

if TYPE_CHECKING:
    from bedplate.measure.exchange import Form
    from bedplate.values.run import MeasuredEndpoint, Run

EXAMPLES = """Examples:

\b
  bedplate bench
  bedplate bench --engines llama.cpp,pytorch --concurrency 1,4
  bedplate bench model.gguf --prompt-tokens 2048 --output-tokens 64 --shared-prefix 1024
  bedplate bench --rate 2 --arrivals poisson --seconds 60
  bedplate bench --scenario agent
  bedplate bench --slo ttft_ms=500,tpot_ms=50
  bedplate bench --structured --concurrency 1
  bedplate bench --url http://127.0.0.1:8000 --concurrency 1,8
  bedplate bench --url https://api.example.com/v1 --key-env API_KEY --model gpt-x
  bedplate bench --engines llama.cpp,https://gpu-2.example.com/v1 --key-env API_KEY
  bedplate bench -f services.yaml
  bedplate bench --price-per-hour 2.5 --electricity-price 0.3
  bedplate bench --resume last
  bedplate bench --csv -o rows.csv

Ctrl-C stops all engines and keeps the finished measurements."""


SCENARIO_SECONDS = 30.0
"""A session has several turns with waiting times between them."""


class ArrivalPattern(StrEnum):
    poisson = "poisson"
    constant = "constant"
    burst = "burst"


def bench(
    model: ModelName = None,
    file: IntentFile = None,
    engines: Annotated[
        str,
        typer.Option(
            metavar="IDS",
            help="Engines, comma-separated: ID, ID@VERSION, or the URL of an endpoint elsewhere that serves the same "
            "model; `all` installs every engine that can run here.",
        ),
    ] = "installed",
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Numbers of concurrent requests, or of sessions, comma-separated; each is measured as one cell.",
            show_default="1,4,8,16; that of the scenario",
        ),
    ] = None,
    scenario: ScenarioOption = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt length in tokens, exactly; the mean with --scenario.", show_default="512"),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answer length in tokens, exact where the engine allows it; the mean with --scenario.",
            show_default="128",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(min=0, help="Tokens at the beginning that all prompts share.", show_default="0")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Open-loop rates per second of requests, or of sessions, comma-separated.",
            show_default=False,
        ),
    ] = None,
    arrivals: Annotated[ArrivalPattern, typer.Option(help="Arrival process, with --rate.")] = ArrivalPattern.poisson,
    burst: Annotated[int, typer.Option(min=1, help="Requests in one burst, with --arrivals burst.")] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay the arrivals, lengths and sessions of a trace or a request log.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.5, help="Measurement window of one repeat, in seconds.", show_default="10; 30 with --scenario"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Maximum number of repeats of a cell.")] = 5,
    turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start each engine this many times, in interleaved rounds, so that drift affects all of them equally.",
            show_default="2 with several engines, else 1",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time limit of the whole run.", show_default="4m of measurements for each engine"
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Latency target, ttft_ms=500,tpot_ms=50: find the highest load that meets it.",
            show_default=False,
        ),
    ] = None,
    price_per_hour: PricePerHour = None,
    electricity_price: ElectricityPrice = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this OpenAI-compatible endpoint instead of starting engines.",
            show_default=False,
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key of URLs.", show_default=False),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Model name at the URLs. Default: the first that they list.",
            show_default=False,
        ),
    ] = None,
    through_gateway: Annotated[
        bool, typer.Option("--through-gateway", help="Measure through bedplate's gateway, as clients do.")
    ] = False,
    build: Annotated[
        str,
        typer.Option(metavar="KIND", help="Engine build: packages, or native (built from source for this machine)."),
    ] = "packages",
    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Also compare answers with the float32 reference.")
    ] = True,
    structured: Structured = False,
    wait_for_gpu: WaitForGpu = "60s",
    allow_busy_gpu: AllowBusyGpu = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and the arrivals.")] = 0,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Continue an interrupted run by its id; `last` is the newest.", show_default=False
        ),
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Store and show results of another bedplate or another tool, as `bedplate runs import` does.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print the rows as JSON lines.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a file; its suffix chooses the format: .json, .jsonl, .csv or .txt.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure the speed, memory, energy and answers of engines.

    Default: the built-in model on every installed engine, with 1, 4, 8 and 16 concurrent requests.
    """
    import sys

    form = _choose_form(json=json, csv=csv, jsonl=jsonl, output=output)
    if import_file is not None:
        _import_run(import_file, form, output)
        return
    from bedplate.cli.terminal import make_console
    from bedplate.errors import UsageError
    from bedplate.measure.bench import BenchStopped
    from bedplate.measure.bench import bench as measure
    from bedplate.measure.questions import choose_scenario, is_url, parse_engines, parse_loads, parse_target
    from bedplate.measure.replays import has_trace_sessions
    from bedplate.show.bench import choose_view
    from bedplate.values.run import MeasuredEndpoint
    from bedplate.values.units import parse_duration

    wanted = parse_engines(engines)
    if not isinstance(wanted, str):
        wanted = tuple(one if is_url(one) else parse_engine_and_version(one) for one in wanted)
    named, asked, endpoints = _read_subjects(file, wanted)
    if url is None and (key_env is not None or served_model is not None) and not any(map(is_url, asked)):
        raise UsageError("--key-env and --model need a URL", hint="list the URL in --engines")
    if not isinstance(asked, str):
        elsewhere = (one for one in asked if is_url(one))
        endpoints += tuple(MeasuredEndpoint(url=one, key_env=key_env, served_model=served_model) for one in elsewhere)
        asked = tuple(dict.fromkeys(one for one in asked if not is_url(one)))
    chosen, replaced = (
        (None, ()) if scenario is None else choose_scenario(scenario, prompt_tokens, output_tokens, shared_prefix)
    )
    loads = parse_loads(
        concurrency=concurrency,
        rate=rate,
        arrivals=arrivals.value,
        burst=burst,
        trace=trace,
        prompt_tokens=prompt_tokens or 512,
        output_tokens=output_tokens or 128,
        shared_prefix_tokens=shared_prefix or 0,
        seed=seed,
        scenario=chosen,
        in_sessions=trace is not None and has_trace_sessions(trace),
    )
    target = parse_target(slo) if slo is not None else None
    price = read_price(file, price_per_hour, electricity_price)
    out = make_console(sys.stdout if form is None or output is not None else sys.stderr)
    teller = choose_view(out, _find_bottlenecks, notes=make_console(sys.stderr))
    stopped: BenchStopped | None = None
    for note in replaced:
        teller.note(note)
    with teller:
        try:
            run = measure(
                model if model is not None else named,
                engines=asked,
                endpoints=endpoints,
                loads=loads,
                url=url,
                key_env=key_env,
                served_model=served_model,
                seconds=seconds or (10.0 if scenario is None else SCENARIO_SECONDS),
                repeats=repeats,
                turns=turns,
                budget_s=parse_duration(budget, "--budget", positive=True) if budget is not None else None,
                target=target,
                price=price,
                trace=trace,
                through_gateway=through_gateway,
                check_quality=quality,
                check_structured=structured,
                native=_is_native(build),
                resume=_find_run_to_resume(resume),
                wait_for_gpu_s=parse_duration(wait_for_gpu, "--wait-for-gpu"),
                allow_busy_gpu=allow_busy_gpu,
                progress=teller,
                teller=teller,
                command=("bedplate", *sys.argv[1:]),
            )
        except BenchStopped as error:
            stopped, run = error, error.run
    teller.report_end(run)
    _finish(run, form, output)
    if stopped is not None:
        make_console(sys.stderr).print(f" {stopped}", soft_wrap=True, markup=False)
        raise typer.Exit(130)


def _read_subjects(
    file: Path | None, engines: tuple[str, ...] | str
) -> tuple[str | None, tuple[str, ...] | str, tuple[MeasuredEndpoint, ...]]:
    """The model, engines and endpoints of an intent. Its workload is not used: `bench` has options for the load."""
    from bedplate.decide.intent import read_intent
    from bedplate.errors import UsageError
    from bedplate.values.run import MeasuredEndpoint

    if file is None:
        return None, engines, ()
    intent = read_intent(file)
    local = [one for one in intent.services if one.url is None]
    models = [one.model for one in local] if intent.services else [intent.model]
    if any(isinstance(one, dict) for one in models):
        raise UsageError("model: a described model cannot be measured", hint="name a file, a folder or owner/name")
    names = list(dict.fromkeys(one for one in models if not isinstance(one, dict)))
    if len(names) > 1:
        raise UsageError("bench measures one model, and the services have several", hint="bedplate bench MODEL")
    endpoints = tuple(
        MeasuredEndpoint(url=one.url, key_env=one.key_env, served_model=one.model)
        for one in intent.services
        if one.url is not None and isinstance(one.model, str)
    )
    if engines == "installed" and intent.services:
        named = tuple(dict.fromkeys(one.engine for one in local if one.engine is not None))
        engines = named or (engines if local else ())
    return (names[0] if names else None), engines, endpoints


def _choose_form(*, json: bool, csv: bool, jsonl: bool, output: Path | None) -> Form | None:
    from bedplate.errors import UsageError

    forms: dict[str, Form] = {"json": "json", "csv": "csv", "jsonl": "jsonl", "txt": "txt"}
    asked = [name for name, wanted in (("json", json), ("csv", csv), ("jsonl", jsonl)) if wanted]
    if len(asked) > 1:
        raise UsageError(f"--{' and --'.join(asked)} cannot be combined", hint="-o FILE writes a second format")
    if asked:
        return forms[asked[0]]
    if output is None:
        return None
    ending = output.suffix.lower().removeprefix(".")
    if ending not in forms:
        raise UsageError(f"{output.name} has an unknown suffix", hint="use .json, .jsonl, .csv or .txt")
    return forms[ending]


def _find_bottlenecks(run: Run) -> dict[str, str]:
    """The bottleneck of each cell, as `diagnose` finds it."""
    from bedplate.cli.judging import diagnose_cells, list_bottlenecks
    from bedplate.errors import BedplateError
    from bedplate.facts.hardware import probe

    try:
        return list_bottlenecks(diagnose_cells(run.cells, {run.id: run.environment}, probe(), run.models))
    except BedplateError:
        return {}


def _import_run(path: Path, form: Form | None, output: Path | None) -> None:
    from bedplate.cli.terminal import make_console
    from bedplate.measure.results import import_result
    from bedplate.show.bench import render_run

    run = import_result(path).run
    if form is None or output is not None:
        make_console().print(render_run(run))
    _finish(run, form, output)


def _is_native(build: str) -> bool:
    from bedplate.errors import UsageError

    if build not in ("packages", "native"):
        raise UsageError(f"--build {build!r} is not one of packages and native")
    return build == "native"


def _find_run_to_resume(named: str | None) -> str | None:
    """An empty name means the newest run."""
    return "" if named == "last" else named


def _finish(run: Run, form: Form | None, output: Path | None) -> None:
    if form is None:
        return
    from bedplate.measure.exchange import write_run

    text = write_run(run, form)
    if output is None:
        from bedplate.cli.printing import print_text

        print_text(text, end="")
    else:
        write_file(output, text)
