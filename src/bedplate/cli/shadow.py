"""bedplate shadow: tries another engine with the requests of a running endpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json, parse_engine_and_version
from bedplate.cli.serve import BuildChoice
from bedplate.cli.status import ServiceName

EXAMPLES = """Examples:

\b
  bedplate shadow vllm
  bedplate shadow llama.cpp@2026.9.11063
  bedplate shadow pytorch chat --share 25% --for 30m
  bedplate shadow https://gpu-2.example.com/v1 chat --key-env CHALLENGER_KEY
  bedplate shadow vllm chat --url https://gpu-2.example.com/v1 --key-env CHALLENGER_KEY

Exit codes: 0 stay; 10 migrate; 20 not proven; 30 the challenger is worse by more than 5 %; 1 not comparable;
3 external failure."""


def parse_challenger(value: str) -> str:
    from bedplate.measure.questions import is_url

    return value if is_url(value) else parse_engine_and_version(value)


def shadow(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE[@VERSION]|URL",
            help="The engine to try, or the URL of an endpoint elsewhere that serves the model.",
            parser=parse_challenger,
        ),
    ],
    name: ServiceName = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The served model, when there are several. Default: the only one.", show_default=False
        ),
    ] = None,
    share: Annotated[str, typer.Option(metavar="PERCENT", help="Share of the requests that it is tried with.")] = "10%",
    limit: Annotated[str, typer.Option("--for", metavar="TIME", help="Time limit: 90s, 10m, 1h.")] = "10m",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Age of the oldest recorded requests to use: 24h, 7d.")
    ] = "24h",
    build: Annotated[
        BuildChoice, typer.Option(help="packages: as published; native: built from source on this machine.")
    ] = BuildChoice.packages,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Endpoint where ENGINE already serves the model on other hardware; nothing is started here. "
            "The sampled requests are sent there unchanged.",
            show_default=False,
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key of --url.", show_default=False),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model name at --url. Default: the first that it lists.", show_default=False),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Compare even if requests of the last day used what the engine lacks."),
    ] = False,
    json: Json = False,
) -> None:
    """Try another engine with the requests of a running endpoint.

    The answer is stay, migrate or not proven. On separate hardware the engine gets a sample of the live requests. On
    shared hardware, recorded request shapes are replayed to both engines in turn while the endpoint is idle; real
    requests have priority.
    """
    from bedplate.changing.shadow import ShadowRequest
    from bedplate.cli.questions import parse_share
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.errors import UsageError
    from bedplate.hosting.control import ask
    from bedplate.hosting.records import choose_service
    from bedplate.measure.bench import read_key
    from bedplate.measure.load import LoadTarget
    from bedplate.measure.questions import is_url
    from bedplate.values import to_json
    from bedplate.values.shadow import ShadowResult
    from bedplate.values.units import YEAR_S, parse_duration

    if is_url(engine):
        if url is not None:
            raise UsageError(f"{engine} and --url {url} cannot be combined", hint="give one URL")
        url, engine = engine, LoadTarget.from_url(engine).name
    if url is None and (key_env is not None or served_model is not None):
        raise UsageError("--key-env and --served-model need --url")
    if url is not None and build is not BuildChoice.packages:
        raise UsageError("--build and --url cannot be combined: with --url nothing is started here")
    key = read_key(key_env)
    wanted = ShadowRequest(
        engine=engine,
        model=model,
        share=parse_share(share),
        for_s=parse_duration(limit, "--for", positive=True, most_s=YEAR_S),
        since_s=parse_duration(since, "--since", positive=True, most_s=YEAR_S),
        build=build.value,
        url=LoadTarget.from_url(url, key=key).url if url is not None else None,
        key=key,
        served_model=served_model,
        force=force,
    )
    done = ask(choose_service(name), "shadow", wanted, answer=ShadowResult, tell=TerminalProgress().note, limit_s=None)
    if json:
        print(to_json(done))  # noqa: T201
    else:
        from bedplate.show.shadow import render_shadow

        make_console().print(render_shadow(done))
    raise typer.Exit(done.exit_code)
