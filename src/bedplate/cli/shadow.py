"""bedplate shadow: a challenger on the endpoint's own work."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json, engine_named
from bedplate.cli.serve import Build
from bedplate.cli.status import ServiceName

EXAMPLES = """Examples:

\b
  bedplate shadow vllm
  bedplate shadow pytorch chat --share 25% --for 30m
  bedplate shadow vllm chat --url https://gpu-2.example.com/v1 --key-env CHALLENGER_KEY

Exit codes: 0 stay; 10 migrate; 20 not proven; 1 it could not be compared; 3 something outside failed."""


def shadow(
    engine: Annotated[
        str,
        typer.Argument(metavar="ENGINE", help="What might take the place of the one in service.", parser=engine_named),
    ],
    name: ServiceName = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which of several served models. Default: the only one.", show_default=False),
    ] = None,
    share: Annotated[str, typer.Option(metavar="PERCENT", help="How much of the requests it is tried with.")] = "10%",
    limit: Annotated[
        str, typer.Option("--for", metavar="TIME", help="The most that it may take: 90s, 10m, 1h.")
    ] = "10m",
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back recorded requests are taken from.")] = "24h",
    build: Annotated[Build, typer.Option(help="packages: what its makers built; native: built here.")] = Build.packages,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where ENGINE serves the model already, on a device of its own; nothing is started here. "
            "The sampled requests go there as they are.",
            show_default=False,
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with that endpoint's key.", show_default=False),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the model is called there. Default: the first.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Try an engine on the endpoint's own work, and say stay, migrate or not proven. Real requests come first.

    On a device of its own it gets a sample of the live requests. On a shared one, recorded shapes are replayed to both
    in turns while nobody asks for anything.
    """
    from bedplate.errors import BadQuestion
    from bedplate.measure.bench import key_from
    from bedplate.measure.load import Target
    from bedplate.operate.control import ask
    from bedplate.operate.questions import read_share
    from bedplate.operate.records import chosen
    from bedplate.operate.shadow import Shadow
    from bedplate.show.terminal import TerminalProgress, console
    from bedplate.values import to_json
    from bedplate.values.shadow import Shadowed
    from bedplate.values.units import YEAR_S, parsed_seconds

    if url is None and (key_env is not None or served_model is not None):
        raise BadQuestion("--key-env and --served-model are those of the endpoint at --url, and there is none")
    if url is not None and build is not Build.packages:
        raise BadQuestion("--build is for what is started here, and with --url nothing is")
    key = key_from(key_env)
    wanted = Shadow(
        engine=engine,
        model=model,
        share=read_share(share),
        for_s=parsed_seconds(limit, "--for", positive=True, most_s=YEAR_S),
        since_s=parsed_seconds(since, "--since", positive=True, most_s=YEAR_S),
        build=build.value,
        url=Target.of(url, key=key).url if url is not None else None,
        key=key,
        served_model=served_model,
    )
    done = ask(chosen(name), "shadow", wanted, answer=Shadowed, tell=TerminalProgress().note, limit_s=None)
    if json:
        print(to_json(done))  # noqa: T201
    else:
        from bedplate.show.shadow import render_shadow

        console().print(render_shadow(done))
    raise typer.Exit(done.exit_code)
