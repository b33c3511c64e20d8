"""bedplate serve: the main job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Concurrency, Context, EngineId, ModelName, OutputTokens, PromptTokens, Users

if TYPE_CHECKING:
    from bedplate.values import Decision, Endpoint, Hardware, Model, Workload

EXAMPLES = """Examples:

\b
  bedplate serve
  bedplate serve model.gguf --port 9000
  bedplate serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  BEDPLATE_API_KEY=secret bedplate serve --host 0.0.0.0

Ctrl-C stops everything; answers under way get a few seconds to finish."""


def serve(
    model: ModelName = None,
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
    engine: EngineId = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="The largest request that is taken, in MB.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="When ready, print the endpoint as JSON, on one line.")] = False,
) -> None:
    """Serve a model behind one OpenAI-compatible endpoint.

    Looks at this machine, decides which engine fits, installs it, launches it and keeps it running.
    """
    from bedplate.cli.options import workload_of
    from bedplate.decide import plan
    from bedplate.engines import engine as engine_by_id
    from bedplate.run import builtin
    from bedplate.run.environments import make_environment
    from bedplate.run.models import is_builtin
    from bedplate.run.serving import Listen, check_port
    from bedplate.run.serving import serve as serve_plan
    from bedplate.show.terminal import TerminalProgress

    listen = Listen(host=host, port=port, api_key=api_key or None, max_body_bytes=max_body_mb * 1_000_000)
    progress = TerminalProgress()
    check_port(listen)
    workload = workload_of(
        users=users, concurrency=concurrency, context=context, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    hardware, facts, decision = _decide(model, workload, engine, progress)
    _show_head(hardware, facts, workload, decision, to_stderr=json)
    chosen = plan(decision, facts, workload)
    environment = make_environment(engine_by_id(chosen.engine), progress)
    if is_builtin(model):
        builtin.fetch_builtin(progress)

    def on_ready(endpoint: Endpoint, took_s: float) -> None:
        _show_ready(endpoint, took_s, json=json)

    serve_plan(chosen, environment, listen, progress, on_ready)


def _decide(
    model: str | None, workload: Workload, engine: str | None, progress: object
) -> tuple[Hardware, Model, Decision]:
    from bedplate.decide import decide
    from bedplate.facts.hardware import probe
    from bedplate.run.models import fetched_model, local_model
    from bedplate.show.terminal import TerminalProgress

    hardware = probe()
    facts = local_model(model)
    if facts is None:
        # Of a model on the hub only file sizes are known before it is here; a fifth is left for cache and engine.
        room = hardware.memory.available_bytes * 0.8
        shown = progress if isinstance(progress, TerminalProgress) else TerminalProgress()
        facts = fetched_model(str(model), lambda size_bytes: size_bytes <= room, shown)
    return hardware, facts, decide(hardware, facts, workload, engine)


def _show_head(hardware: Hardware, facts: Model, workload: Workload, decision: Decision, *, to_stderr: bool) -> None:
    import sys

    from bedplate._version import __version__
    from bedplate.show.decision import render_serving
    from bedplate.show.terminal import console

    out = console(sys.stderr if to_stderr else sys.stdout)
    out.print(f"\n [bold]bedplate {__version__}[/bold]\n")
    out.print(render_serving(hardware, facts, workload, decision))
    out.print()


def _show_ready(endpoint: Endpoint, took_s: float, *, json: bool) -> None:
    if json:
        import msgspec

        print(msgspec.json.encode(endpoint).decode(), flush=True)  # noqa: T201
        return
    from bedplate.show.serving import render_ready
    from bedplate.show.terminal import console

    console().print(render_ready(endpoint, took_s), soft_wrap=True)
