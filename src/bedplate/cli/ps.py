"""bedplate ps: the running services."""

from __future__ import annotations

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate ps
  bedplate ps --json | jq -r '.[].record.url'"""


def ps(json: Json = False) -> None:
    """List the running services."""
    import sys

    from bedplate.cli.terminal import make_console
    from bedplate.hosting.services import list_services
    from bedplate.values import to_json

    found, ended = list_services()
    for record in ended:
        make_console(sys.stderr).print(
            f" {record.name} (process {record.pid}) ended unexpectedly; its log: {record.log}",
            style="dim", soft_wrap=True, markup=False,
        )  # fmt: skip
    if json:
        print(to_json(found))  # noqa: T201
        return
    if not found:
        make_console().print(" no service is running; bedplate serve -d starts one")
        return
    from bedplate.show.services import render_list

    make_console().print(render_list([(one.record, one.status) for one in found]))
