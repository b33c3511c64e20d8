"""bedplate probe: the hardware of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate probe
  bedplate probe --measure
  bedplate probe --json > machine.json"""


def probe(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the bandwidth of memory, GPUs, links and disk; takes seconds, and the results are stored.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show the hardware of this machine that bedplate may use."""
    from bedplate.facts.hardware import probe as probe_hardware

    hardware = probe_hardware(recall=not measure)
    if measure:
        from bedplate.cli.terminal import TerminalProgress
        from bedplate.facts.measured import apply_measurements
        from bedplate.facts.measured import measure as measure_hardware

        hardware = apply_measurements(hardware, measure_hardware(hardware, TerminalProgress()))
    if json:
        from bedplate.values import to_json

        print(to_json(hardware))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.probe import render_hardware

    out = make_console()
    out.print(render_hardware(hardware))
    if hardware.measured is not None:
        from bedplate.show.measured import render_measured

        out.print()
        out.print(render_measured(hardware.measured))
