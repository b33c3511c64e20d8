"""bedplate watch: checks regularly whether a service has the right engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json
from bedplate.cli.status import ServiceName

if TYPE_CHECKING:
    from bedplate.values.watch import WatchEvaluation

EXAMPLES = """Examples:

\b
  bedplate watch --once
  bedplate watch chat --every 7d --budget 30m
  bedplate watch chat --webhook https://example.com/hooks/bedplate
  bedplate watch chat --auto
  bedplate watch --once --upgrade

Exit codes with --once: 0 stay; 10 migrate or upgrade; 20 not proven; 30 stay, because the challenger is worse by more
than 5 %; 3 external failure."""


def watch(
    name: ServiceName = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The served model, when there are several. Default: the only one.", show_default=False
        ),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Interval between evaluations when nothing changes.")
    ] = "24h",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit of one evaluation, for all challengers together.")
    ] = "10m",
    share: Annotated[
        str, typer.Option(metavar="PERCENT", help="Share of the requests that challengers are tried with.")
    ] = "10%",
    webhook: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL that gets each result as a JSON POST request.", show_default=False),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Migrate when a challenger is proven better.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Evaluate once, now, and exit with the answer as exit code.")
    ] = False,
    upgrade: Annotated[
        bool,
        typer.Option(
            "--upgrade",
            help="Install a newer release of the engine in service side by side, and compare both. Downloads packages.",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --upgrade: keep a release that is worse, instead of removing it again.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also try engines that lack what requests of the last day used."),
    ] = False,
    json: Json = False,
) -> None:
    """Check regularly whether a service has the right engine.

    Evaluates on a schedule, and after a new release, a driver change, a workload change or a missed latency target.
    Challengers are measured while the endpoint is idle. Without --auto nothing is migrated.
    """
    from bedplate.changing.notify import check_url
    from bedplate.changing.watch import WatchOptions, watch_once
    from bedplate.changing.watch import watch as watching
    from bedplate.cli.questions import parse_share
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.hosting.records import choose_service
    from bedplate.values.units import YEAR_S, parse_duration

    asked = WatchOptions(
        model=model,
        every_s=parse_duration(every, "--every", positive=True, most_s=YEAR_S),
        budget_s=parse_duration(budget, "--budget", positive=True, most_s=YEAR_S),
        share=parse_share(share),
        webhook=check_url(webhook) if webhook is not None else None,
        auto=auto,
        force=force,
        upgrade=upgrade,
        keep=keep,
        tell=TerminalProgress().note,
    )
    record = choose_service(name)
    if not once:
        watching(record, asked, lambda done: _show_evaluation(done, json=json, line=True))
        return
    done = watch_once(record, asked)
    _show_evaluation(done, json=json, line=False)
    raise typer.Exit(done.exit_code)


def _show_evaluation(done: WatchEvaluation, *, json: bool, line: bool) -> None:
    if json:
        from bedplate.values import to_json

        print(to_json(done, indent=-1 if line else 2), flush=True)  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.shadow import render_watched

    make_console().print(render_watched(done))
