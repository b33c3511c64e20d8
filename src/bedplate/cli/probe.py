"""bedplate probe: this machine."""

from __future__ import annotations

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate probe
  bedplate probe --json > machine.json"""


def probe(json: Json = False) -> None:
    """Show this machine, as far as we may use it."""
    from bedplate.facts.hardware import probe as probe_hardware

    hardware = probe_hardware()
    if json:
        from bedplate.values import to_json

        print(to_json(hardware))  # noqa: T201
        return
    from bedplate.show.probe import render_hardware
    from bedplate.show.terminal import console

    console().print(render_hardware(hardware))
