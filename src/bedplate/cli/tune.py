"""bedplate tune: finds the best settings of one engine on this machine by measuring."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import AllowBusyGpu, EngineId, IntentFile, Json, ModelName, WaitForGpu, write_file

if TYPE_CHECKING:
    from bedplate.values.run import Load
    from bedplate.values.tuning import TuningRun
    from bedplate.values.workload import Workload

EXAMPLES = """Examples:

\b
  bedplate tune
  bedplate tune --engine vllm --concurrency 8 --budget 20m
  bedplate tune model.gguf --slo ttft_ms=500,tpot_ms=50
  bedplate tune --objective latency --concurrency 1
  bedplate tune --knobs threads,ubatch
  bedplate tune --list                     the tunable settings and what they do; runs nothing
  bedplate tune --resume last
  bedplate tune --export tuned.json        the last result, for other machines
  bedplate tune --import tuned.json

`plan` and `serve` then use these settings and say so. Ctrl-C stops everything and keeps the measurements.
Exit codes: 0 better settings are proven; 1 no better settings are proven."""


class Goal(StrEnum):
    throughput = "throughput"
    latency = "latency"
    memory = "memory"
    energy = "energy"
    cost = "cost"


def tune(
    model: ModelName = None,
    file: IntentFile = None,
    engine: EngineId = None,
    objective: Annotated[Goal, typer.Option(help="What to optimize.")] = Goal.throughput,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Latency target, ttft_ms=500,tpot_ms=50; requests that miss it do not count.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Number of concurrent requests.", show_default="4")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt length in tokens.", show_default="512")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Answer length in tokens.", show_default="128")
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(min=0, help="Tokens at the beginning that all prompts share.", show_default="0")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time limit after the installation: 20m, 1h.", show_default="10m")
    ] = None,
    knobs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tune only these settings, comma-separated; --list shows their names.",
            show_default=False,
        ),
    ] = None,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy",
            help="Also try weights with lower precision, as long as their answers stay within the expected error.",
        ),
    ] = False,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A small draft model with the same tokenizer, for speculative decoding.",
            show_default=False,
        ),
    ] = None,
    build: Annotated[
        str,
        typer.Option(metavar="KIND", help="Engine build: packages, or native (built from source for this machine)."),
    ] = "packages",
    price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Price of this machine per hour, for --objective cost.", show_default=False),
    ] = None,
    wait_for_gpu: WaitForGpu = "60s",
    allow_busy_gpu: AllowBusyGpu = False,
    list_: Annotated[bool, typer.Option("--list", help="List the tunable settings; run nothing.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Continue an interrupted tuning by its id; `last` is the newest.", show_default=False
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the settings that were found to a file; without other options, the last ones.",
            show_default=False,
        ),
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import", metavar="FILE", help="Store settings that were found on another machine.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the Pareto front as an SVG image.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Find the best settings of one engine by measuring.

    Starts from the plan, changes one setting after the other, and verifies the best ones against the engine defaults.
    """
    import sys

    from bedplate.errors import UsageError

    if build not in ("packages", "native"):
        raise UsageError(f"--build {build!r} is not one of packages and native")
    if import_file is not None:
        _show_tuning(_import_tuning(import_file), json=json, plot=plot)
        return
    if export is not None and not (model or file or engine or knobs or resume or list_):
        write_file(export, _export_tuning(_load_last()))
        return
    named, load, workload = _read_workload(
        model, file, concurrency=concurrency, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix,
    )  # fmt: skip
    if list_:
        _list_settings(named, engine, load, workload, native=build == "native", json=json)
        return
    from bedplate.cli.terminal import make_console
    from bedplate.measure.questions import parse_target
    from bedplate.show.tune import make_view
    from bedplate.tuning.tune import TuningStopped
    from bedplate.tuning.tune import tune as run
    from bedplate.values.units import parse_duration

    teller = make_view(make_console(sys.stderr))
    stopped: TuningStopped | None = None
    with teller:
        try:
            tuned = run(
                named,
                engine=engine,
                load=load,
                objective=objective.value,
                target=parse_target(slo) if slo is not None else workload.latency if workload is not None else None,
                budget_s=parse_duration(budget, "--budget", positive=True) if budget is not None else None,
                knobs=tuple(name.strip() for name in (knobs or "").split(",") if name.strip()),
                lossy=lossy,
                draft=str(draft) if draft is not None else None,
                native=build == "native",
                price_per_hour=price,
                workload=workload,
                resume="" if resume == "last" else resume,
                wait_for_gpu_s=parse_duration(wait_for_gpu, "--wait-for-gpu"),
                allow_busy_gpu=allow_busy_gpu,
                progress=teller,
                teller=teller,
            )
        except TuningStopped as error:
            stopped, tuned = error, error.tuned
    if export is not None:
        write_file(export, _export_tuning(tuned))
    _show_tuning(tuned, json=json, plot=plot)
    if stopped is not None:
        make_console(sys.stderr).print(f" {stopped}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    raise typer.Exit(0 if tuned.is_proven else 1)


def _read_workload(
    model: str | None, file: Path | None, **lengths: int | None
) -> tuple[str | None, Load, Workload | None]:
    """The model and the load: from the options, else from the intent file, else the defaults of `bench`."""
    from bedplate.errors import UsageError
    from bedplate.values.run import Load

    given = {name: value for name, value in lengths.items() if value is not None}
    if file is None:
        return model, Load(**{"concurrency": 4, **given}), None  # type: ignore[arg-type]
    from bedplate.cli.options import build_intent

    intent = build_intent(file, None, model=model)
    if intent.services:
        raise UsageError("tune needs a single model, and the intent has services", hint="bedplate tune MODEL")
    if isinstance(intent.model, dict):
        raise UsageError("model: a described model cannot be tuned", hint="name a file, a folder or owner/name")
    work = intent.workload
    of_file = {
        "concurrency": work.compute_in_flight(work.assumed_request_s) if work.states_load else 4,
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "shared_prefix_tokens": work.shared_prefix_tokens,
    }
    return intent.model, Load(**{**of_file, **given}), work  # type: ignore[arg-type]


def _list_settings(
    model: str | None, engine: str | None, load: Load, workload: Workload | None, *, native: bool, json: bool
) -> None:
    from bedplate.facts.hardware import probe
    from bedplate.run.models import find_intended_model
    from bedplate.tuning.tune import check_settings, choose_plan, list_settings

    hardware = probe()
    chosen = choose_plan(engine, hardware, find_intended_model(model), load, workload, native=native)
    found = list_settings(chosen)
    check_settings(found, (), chosen)
    if json:
        from bedplate.values import to_json

        print(to_json(found))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.tune import render_settings

    make_console().print(render_settings(chosen.engine.name, found))


def _load_last() -> TuningRun:
    from bedplate.errors import UsageError
    from bedplate.facts.hardware import probe
    from bedplate.store import compute_fingerprint, read_tunings

    found = next(
        (one for one in read_tunings(compute_fingerprint(probe())) if one.finished and one.source is None), None
    )
    if found is None:
        raise UsageError("no engine has been tuned on this machine", hint="run bedplate tune first")
    return found


def _export_tuning(tuned: TuningRun) -> str:
    """The settings, their gain and the machine, without the single measurements."""
    from bedplate.values import replace_fields, to_json

    return to_json(replace_fields(tuned, trials=())) + "\n"


def _import_tuning(path: Path) -> TuningRun:
    """Stored under the machine that it was found on: used on machines like it, and a hint on others."""
    from bedplate.errors import make_unreadable_error
    from bedplate.store import add_tuning
    from bedplate.values import from_json, replace_fields
    from bedplate.values.tuning import TuningRun

    try:
        text = path.read_bytes()
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    tuned = replace_fields(from_json(TuningRun, text, origin=str(path)), source=path.name)
    add_tuning(tuned)
    return tuned


def _show_tuning(tuned: TuningRun, *, json: bool, plot: Path | None) -> None:
    if plot is not None:
        from bedplate.show.tune import draw_front

        write_file(plot, draw_front(tuned))
    if json:
        from bedplate.values import to_json

        print(to_json(tuned))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.tune import render_tuned

    make_console().print(render_tuned(tuned))
