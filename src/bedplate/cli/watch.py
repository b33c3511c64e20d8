"""bedplate watch: is it still the right engine?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json
from bedplate.cli.status import ServiceName

if TYPE_CHECKING:
    from bedplate.values.watch import Watched

EXAMPLES = """Examples:

\b
  bedplate watch --once
  bedplate watch chat --every 7d --budget 30m
  bedplate watch chat --webhook https://example.com/hooks/bedplate
  bedplate watch chat --auto

Exit codes with --once: 0 stay; 10 migrate; 20 not proven; 3 something outside failed."""


def watch(
    name: ServiceName = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which of several served models. Default: the only one.", show_default=False),
    ] = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often, if nothing changes meanwhile.")] = "24h",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="What all challengers of one look may take together.")
    ] = "10m",
    share: Annotated[str, typer.Option(metavar="PERCENT", help="How much of the work they are tried with.")] = "10%",
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Is sent the result as JSON.", show_default=False)
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Migrate when that is proven.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, now, and end with the answer as exit code.")] = False,
    json: Json = False,
) -> None:
    """Look again whether a service has the right engine: on a schedule, and when something has changed.

    A new release, another driver, other work or a missed latency target are reasons to look. Challengers are measured
    while nobody asks for anything; nothing is moved without --auto.
    """
    from bedplate.operate.notify import checked_url
    from bedplate.operate.questions import read_share
    from bedplate.operate.records import chosen
    from bedplate.operate.watch import Watching, watch_once
    from bedplate.operate.watch import watch as watching
    from bedplate.show.terminal import TerminalProgress
    from bedplate.values.units import YEAR_S, parsed_seconds

    asked = Watching(
        model=model,
        every_s=parsed_seconds(every, "--every", positive=True, most_s=YEAR_S),
        budget_s=parsed_seconds(budget, "--budget", positive=True, most_s=YEAR_S),
        share=read_share(share),
        webhook=checked_url(webhook) if webhook is not None else None,
        auto=auto,
        tell=TerminalProgress().note,
    )
    record = chosen(name)
    if not once:
        watching(record, asked, lambda done: _show(done, json=json, line=True))
        return
    done = watch_once(record, asked)
    _show(done, json=json, line=False)
    raise typer.Exit(done.exit_code)


def _show(done: Watched, *, json: bool, line: bool) -> None:
    if json:
        import msgspec

        from bedplate.values import to_json

        print(msgspec.json.encode(done).decode() if line else to_json(done), flush=True)  # noqa: T201
        return
    from bedplate.show.shadow import render_watched
    from bedplate.show.terminal import console

    console().print(render_watched(done))
