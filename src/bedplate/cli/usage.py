"""bedplate usage: requests and tokens, by tenant, model, engine or day."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate usage
  bedplate usage --since 30d --by day
  bedplate usage --tenant alice --by model --csv > alice.csv"""


class UsageGrouping(StrEnum):
    tenant = "tenant"
    model = "model"
    engine = "engine"
    day = "day"


def usage(
    since: Annotated[str, typer.Option(metavar="SPAN", help="Time range: 90m, 24h, 30d, or all.")] = "24h",
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only this tenant.", show_default=False)
    ] = None,
    by: Annotated[UsageGrouping, typer.Option(help="Group the rows by this.")] = UsageGrouping.tenant,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json: Json = False,
) -> None:
    """Show served requests and tokens by tenant, model, engine or day."""
    from bedplate.errors import UsageError
    from bedplate.hosting.tenants import report_usage as used
    from bedplate.values.units import parse_duration

    if csv and json:
        raise UsageError("--csv and --json cannot be combined", hint="leave out one of the two")
    since_s = None if since.strip().lower() == "all" else parse_duration(since, "--since")
    report = used(by.value, since_s, tenant)
    if json:
        from bedplate.values import to_json

        print(to_json(report))  # noqa: T201
        return
    from bedplate.show.tenants import render_usage, to_usage_csv

    if csv:
        from bedplate.cli.printing import print_text

        print_text(to_usage_csv(report), end="")
        return
    from bedplate.cli.terminal import make_console

    make_console().print(render_usage(report))
