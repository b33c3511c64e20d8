"""bedplate diagnose: finds the bottleneck."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json, ScenarioOption

EXAMPLES = """Examples:

\b
  bedplate diagnose                        the newest run here
  bedplate diagnose 20261115-a1:vllm       one engine of a run
  bedplate diagnose run.json               a file from `bedplate bench --json`
  bedplate diagnose --scenario agent       the newest run with sessions of this scenario
  bedplate diagnose run.json --model meta-llama/Llama-3.1-8B    for a run that does not name its model"""


def diagnose(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run id, RUN:ENGINE, an engine, or a file from `bench --json`. Default: the newest run.",
            show_default=False,
        ),
    ] = None,
    # Any name that a run has, also of an engine that bedplate does not know: others measure those, too.
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Diagnose only this engine.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The measured model, for a run that does not name it.", show_default=False),
    ] = None,
    scenario: ScenarioOption = None,
    json: Json = False,
) -> None:
    """Find the bottleneck of a measured run, and what to change first.

    The bottleneck is memory bandwidth, KV cache, interconnect, scheduler, runtime overhead or compute.
    """
    from bedplate.cli.judging import diagnose_cells
    from bedplate.facts.hardware import probe
    from bedplate.measure.stored import find_cells, find_scenario_cells, select_engine
    from bedplate.run.models import find_known_model
    from bedplate.store import compute_fingerprint

    hardware = probe()
    machine = compute_fingerprint(hardware)
    found = find_cells(run, machine) if scenario is None else find_scenario_cells(scenario, run, machine)
    if found.by_engine:
        newest = max(found.cells, key=lambda cell: cell.at).run
        found = found._replace(cells=tuple(cell for cell in found.cells if cell.run == newest))
    if engine is not None:
        found = select_engine(found, engine)
    every_model = find_known_model(model) if model is not None else None
    diagnosis = diagnose_cells(found.cells, found.environments, hardware, found.models, every_model)
    if json:
        from bedplate.values import to_json

        print(to_json(diagnosis))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.diagnose import render_diagnosis

    make_console().print(render_diagnosis(diagnosis))
