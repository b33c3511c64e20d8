"""bedplate serve: the main job."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import (
    Concurrency,
    Context,
    EngineId,
    Fields,
    IntentFile,
    ModelName,
    OutputTokens,
    PromptTokens,
    Users,
)

if TYPE_CHECKING:
    from bedplate.values import Decision, Endpoint, Hardware, Model, Plan, Workload
    from bedplate.values.agreement import Agreement
    from bedplate.values.intent import Intent

EXAMPLES = """Examples:

\b
  bedplate serve
  bedplate serve model.gguf --port 9000
  bedplate serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  bedplate serve --engine llama.cpp --build native
  BEDPLATE_API_KEY=secret bedplate serve --host 0.0.0.0

Ctrl-C stops everything; answers under way get a few seconds to finish."""


class Build(StrEnum):
    packages = "packages"
    native = "native"


def serve(
    model: ModelName = None,
    file: IntentFile = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The endpoint's port; 0 takes any free one.")] = 8080,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="BEDPLATE_API_KEY",
            help="A key that clients must send. Better in the environment: options can be seen by other users.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    fields: Fields = None,
    engine: EngineId = None,
    build: Annotated[
        Build,
        typer.Option(
            help="native: build the engine from its source for this very machine, which takes minutes, once. "
            "It is used if it then runs and answers as the ready-made one does."
        ),
    ] = Build.packages,
    max_body_mb: Annotated[int, typer.Option(min=1, help="The largest request that is taken, in MB.")] = 32,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare a few answers with a reference, the first time.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="When ready, print the endpoint as JSON, on one line.")] = False,
) -> None:
    """Serve a model behind one OpenAI-compatible endpoint.

    Looks at this machine, decides which engine fits, installs it, launches it and keeps it running.
    """
    from bedplate.cli.options import intent_from
    from bedplate.measure.builds import BuildExaminer
    from bedplate.run.serving import Listen
    from bedplate.run.serving import serve as serve_model
    from bedplate.show.terminal import TerminalProgress

    intent = intent_from(
        file, fields, model=model, users=users, concurrency=concurrency, context=context,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens,
    )  # fmt: skip
    workload = intent.workload
    serve_model(
        named(intent),
        workload=workload,
        operations=intent.operations,
        engine=engine,
        build=build.value,
        examiner=BuildExaminer(),
        listen=Listen(host=host, port=port, api_key=api_key or None, max_body_bytes=max_body_mb * 1_000_000),
        progress=TerminalProgress(),
        on_decision=lambda hardware, facts, decision: _show_head(
            hardware, facts, workload, decision, engine, json=json
        ),
        on_ready=lambda endpoint: _show_ready(endpoint, json=json),
        check=_check if check else None,
    )


def named(intent: Intent) -> str | None:
    """The model that an intent names; what it states as facts, or for several services, cannot be served from here."""
    from bedplate.errors import BadQuestion

    if intent.services:
        raise BadQuestion("several services are not served by one command", hint="bedplate plan -f FILE plans them")
    if isinstance(intent.model, dict):
        raise BadQuestion("model: facts can be planned, not served", hint="name a file, a folder or owner/name")
    return intent.model


def _show_head(
    hardware: Hardware, facts: Model, workload: Workload, decision: Decision, asked: str | None, *, json: bool
) -> None:
    import sys

    from bedplate._version import __version__
    from bedplate.show.decision import render_serving
    from bedplate.show.terminal import console

    out = console(sys.stderr if json else sys.stdout)
    out.print(f"\n [bold]bedplate {__version__}[/bold]\n")
    out.print(render_serving(hardware, facts, workload, decision, asked))
    out.print()


async def _check(hardware: Hardware, plan: Plan, url: str, key: str | None) -> None:
    from bedplate.measure.agreement import check_served

    await check_served(hardware, plan, url, key, _show_agreement)


def _show_agreement(agreement: Agreement) -> None:
    import sys

    from bedplate.show.serving import render_agreement
    from bedplate.show.terminal import console

    console(sys.stderr).print(render_agreement(agreement), soft_wrap=True)


def _show_ready(endpoint: Endpoint, *, json: bool) -> None:
    if json:
        import msgspec

        print(msgspec.json.encode(endpoint).decode(), flush=True)  # noqa: T201
        return
    from bedplate.show.serving import render_ready
    from bedplate.show.terminal import console

    console().print(render_ready(endpoint), soft_wrap=True)
